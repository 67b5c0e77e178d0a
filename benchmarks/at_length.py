"""How long a peer with a large model says nothing, and what its others wait for: long work in line, and aside.

    python benchmarks/at_length.py --millions 100 --rounds 5

Two peers on loopback average vectors of a `dlc.DiLoCo` of so many fp32 parameters; the inner step is a trifle. After a
round each moves its outer state and hashes it, which takes seconds for a billion parameters. Interleaved, round by
round: all of it done by the thread that also answers others ("in line": what `AT_LENGTH_BYTES_MIN` spares small models
from), or aside, as it is. Told are the longest time in which a peer did not look at what came, not even for a ping (the
greater of both; a peer that is silent for T_dead, 1.8 s among two, is taken for dead), and the seconds of the call.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import torch
from _workers import LIMIT_S, WORKER, Workers, say
from memory import Nudge, Vector

import dlc
from dlc.comm import node as node_module
from dlc.comm.security import generate_run_key
from dlc.comm.transport import Transport
from dlc.demo import free_addresses

WAYS = ("in line", "aside")


class Silence:
    """The longest time in which the driver did not look at its sockets. To wait for something to come is no silence."""

    def __init__(self) -> None:
        self._looked = time.monotonic()
        self.longest_s = 0.0
        poll = Transport.poll

        def looks(transport: Transport, *args: Any, **how: Any) -> Any:
            self.longest_s = max(self.longest_s, time.monotonic() - self._looked)
            try:
                return poll(transport, *args, **how)
            finally:
                self._looked = time.monotonic()

        Transport.poll = looks  # type: ignore[method-assign]


def worker_main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    for name in ("--key", "--listen"):
        parser.add_argument(name, required=True)
    parser.add_argument("--peers", default="")
    parser.add_argument("--numel", type=int, required=True)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    silence = Silence()
    peers = [p for p in options.peers.split(",") if p]
    bytes_min = node_module.AT_LENGTH_BYTES_MIN
    peer = dlc.Peer.join(peers, run="at-length", key=options.key, listen=options.listen, join_timeout_s=LIMIT_S)
    model = Vector(options.numel)
    opt = dlc.DiLoCo(model, Nudge(model.parameters(), by=-1e-3), peer, sync_every=1)
    say("ready")
    while (way := sys.stdin.readline().strip()) in WAYS:
        node_module.AT_LENGTH_BYTES_MIN = bytes_min if way == "aside" else sys.maxsize
        silence.longest_s, began = 0.0, time.monotonic()
        report = opt.step()
        if report is None or len(report.contributors) != 2:
            raise RuntimeError(f"not a round of both: {report}")
        say("round", silent_s=silence.longest_s, seconds=time.monotonic() - began)
    peer.leave()


def main() -> int:
    if sys.argv[1:2] == [WORKER]:
        worker_main(sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=100.0, help="parameters (default 100)")
    parser.add_argument("--rounds", type=int, default=5, help="of each way, after one that is not counted (default 5)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    key, addresses, numel = generate_run_key(), free_addresses(2), round(args.millions * 1e6)
    silent_s: dict[str, list[float]] = {way: [] for way in WAYS}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    with Workers(__file__) as workers:
        for rank, address in enumerate(addresses):
            words = ["--key", key, "--listen", address, "--numel", str(numel)]
            workers.start(f"p{rank}", *words, *(["--peers", addresses[0]] if rank else []))
        for rank in range(2):
            workers.wait(f"p{rank}", "ready")
        for number in range(2 * (args.rounds + 1)):
            way = WAYS[number % 2]
            for rank in range(2):
                workers.tell(f"p{rank}", way)
            told = [workers.wait(f"p{rank}", "round") for rank in range(2)]
            if number >= 2:
                silent_s[way].append(max(one["silent_s"] for one in told))
                seconds[way].append(max(one["seconds"] for one in told))
        for rank in range(2):
            workers.tell(f"p{rank}", "end")
    if args.json:
        print(json.dumps({"parameters": numel, "silent_s": silent_s, "seconds": seconds}))
        return 0
    print(f"{args.millions:g} million parameters, {args.rounds} rounds each way; medians, and the most")
    for way in WAYS:
        silent, round_s = silent_s[way], seconds[way]
        print(
            f"  {way:<8} silent for {statistics.median(silent):.2f} s, at most {max(silent):.2f}; "
            f"a round {statistics.median(round_s):.2f} s, at most {max(round_s):.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
