"""One Hivemind process of a benchmark, run by the Python of `make hivemind`; it imports nothing of ours.

    .venv-hivemind/bin/python benchmarks/_hivemind.py --worker --numel 1000000 --rank 0 --n 4

Answers the lines of standard input with JSON lines, as the workers of `_workers.py` do. "prepare": find the group, and
wait for the trigger. "round": the all-reduce itself, timed from the trigger to the mean in its own tensors. Matchmaking
is in no figure. Vectors are unit normals drawn from the rank; after each round the whole tensor is compared with the
true mean.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time

import torch
from hivemind import DHT
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import AveragingStage, StepControl
from hivemind.compression import Float16Compression

MATCH_S = 4.0
"""For all to find each other, before each round."""
LIMIT_S = 120.0
"""For a group to be found, or a round; below the limit of `_workers.py`, so that the reason is told."""
LOOK_S = 0.01
TOLERANCE = 4e-3
"""Of an element of a mean of unit normals: fp16 on both ways, and elements of up to 6."""


def say(event: str, **fields: object) -> None:
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


def vector_of(rank: int, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


class Site:
    def __init__(self, options: argparse.Namespace) -> None:
        self.n = options.n
        self.mine = vector_of(options.rank, options.numel)
        self.true = torch.zeros(options.numel)
        for rank in range(options.n):
            self.true.add_(vector_of(rank, options.numel), alpha=1 / options.n)
        self.dht = DHT(
            initial_peers=[p for p in options.peers.split(",") if p],
            start=True,
            host_maddrs=[f"/ip4/{options.host}/tcp/0"],
            use_ipfs=False,
        )
        self.averager = DecentralizedAverager(
            [self.mine.clone()],
            self.dht,
            start=True,
            prefix="bench",
            target_group_size=options.n,
            min_group_size=options.n,
            min_matchmaking_time=MATCH_S,
            compression=Float16Compression(),
            client_mode=False,
        )
        self.control: StepControl | None = None

    def prepare(self) -> None:
        """Own numbers into the tensor, and a group of all found; a search that failed is begun anew."""
        with self.averager.get_tensors() as (tensor,):
            tensor.copy_(self.mine)
        end = time.monotonic() + LIMIT_S
        pause = threading.Event()
        while time.monotonic() < end:
            control = self.averager.step(wait=False, require_trigger=True, timeout=LIMIT_S, allow_retries=False)
            while time.monotonic() < end and not control.done():
                if control.stage == AveragingStage.AWAITING_TRIGGER:
                    self.control = control
                    return
                pause.wait(LOOK_S)
        raise TimeoutError(f"no group of {self.n} was found within {LIMIT_S:g} s")

    def round(self) -> dict[str, object]:
        assert self.control is not None
        start = time.perf_counter()
        self.control.allow_allreduce()
        gathered = self.control.result(LIMIT_S)
        seconds = time.perf_counter() - start
        with self.averager.get_tensors() as (tensor,):
            error = float((tensor - self.true).abs().max())
        return {"seconds": seconds, "error": error, "right": error <= TOLERANCE, "contributors": len(gathered)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--peers", default="", help="addresses that another printed")
    parser.add_argument("--host", default="127.0.0.1", help="IPv4 address to listen on")
    for name in ("--numel", "--rank", "--n"):
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    site = Site(options)
    say("ready", addresses=[str(a) for a in site.dht.get_visible_maddrs()])
    for line in sys.stdin:
        if line.strip() == "prepare":
            site.prepare()
            say("prepared")
        elif line.strip() == "round":
            say("done", **site.round())
    site.averager.shutdown()
    site.dht.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
