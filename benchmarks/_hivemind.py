"""One process of a benchmark that averages under Hivemind's names; it imports nothing of ours but what --module says.

    .venv-hivemind/bin/python benchmarks/_hivemind.py --worker --numel 1000000 --rank 0 --n 4
    python benchmarks/_hivemind.py --worker --numel 1000000 --rank 0 --n 4 --module dlc.compat.hivemind

Answers the lines of standard input with JSON lines, as the workers of `_workers.py` do. Two ways to average:

    "prepare"   find the group, and wait for the trigger
    "round"     the all-reduce itself, timed from the trigger to the mean in its own tensors: no matchmaking

    "fill"      own numbers into the tensor
    "step"      `averager.step()`, timed from the call to its return: what a program waits for, matchmaking and all

Vectors are unit normals drawn from the rank; after each mean the whole tensor is compared with the true one. Times are
of the monotonic clock, which all processes of a machine have in common.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import threading
import time
from typing import Any

import torch

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
        hivemind = importlib.import_module(options.module)
        compression = importlib.import_module(f"{options.module}.compression")
        if options.key:
            hivemind.set_run_key(options.key)
        self.dht = hivemind.DHT(
            initial_peers=[p for p in options.peers.split(",") if p],
            start=True,
            host_maddrs=[f"/ip4/{options.host}/tcp/0"],
        )
        self.averager = hivemind.DecentralizedAverager(
            [self.mine.clone()],
            self.dht,
            start=True,
            prefix="bench",
            target_group_size=None if options.open else options.n,
            min_group_size=options.n,
            compression=compression.Float16Compression(),
            **({} if options.matchmaking is None else {"min_matchmaking_time": options.matchmaking}),
        )
        self.stages = importlib.import_module(f"{options.module}.averaging.control").AveragingStage
        self.control: Any = None

    def fill(self) -> None:
        with self.averager.get_tensors() as (tensor,):
            tensor.copy_(self.mine)

    def prepare(self) -> None:
        """Own numbers into the tensor, and a group of all found; a search that failed is begun anew."""
        self.fill()
        end = time.monotonic() + LIMIT_S
        pause = threading.Event()
        while time.monotonic() < end:
            control = self.averager.step(wait=False, require_trigger=True, timeout=LIMIT_S, allow_retries=False)
            while time.monotonic() < end and not control.done():
                if control.stage == self.stages.AWAITING_TRIGGER:
                    self.control = control
                    return
                pause.wait(LOOK_S)
        raise TimeoutError(f"no group of {self.n} was found within {LIMIT_S:g} s")

    def round(self) -> dict[str, object]:
        began = time.monotonic()
        self.control.allow_allreduce()
        gathered = self.control.result(LIMIT_S)
        return self._judged(began, gathered)

    def step(self) -> dict[str, object]:
        began = time.monotonic()
        gathered = self.averager.step()
        return self._judged(began, gathered)

    def _judged(self, began: float, gathered: dict[Any, Any]) -> dict[str, object]:
        """What a mean that has just come took, and whether it is the true one."""
        ended = time.monotonic()
        with self.averager.get_tensors() as (tensor,):
            error = float((tensor - self.true).abs().max())
        return {
            "began": began,
            "ended": ended,
            "error": error,
            "right": error <= TOLERANCE,
            "contributors": len(gathered),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--peers", default="", help="addresses that another printed")
    parser.add_argument("--host", default="127.0.0.1", help="IPv4 address to listen on")
    parser.add_argument("--module", default="hivemind", help="what is imported (default hivemind)")
    parser.add_argument("--open", action="store_true", help="no target_group_size")
    parser.add_argument("--key", default="", help="a run key, for a module that knows such")
    parser.add_argument("--matchmaking", type=float, help="min_matchmaking_time, s (default: the module's own)")
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
        elif line.strip() == "fill":
            site.fill()
            say("filled")
        elif line.strip() == "step":
            say("done", **site.step())
    site.averager.shutdown()
    site.dht.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
