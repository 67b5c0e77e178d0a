"""Averaging without the log over emulated links: Moshpit and gossip in pairs, beside what the links allow.

    python benchmarks/averaging.py [--peers 8] [--mb 25] [--rate-mbit 200] [--dims 1,3 | --dims ""] [--no-gossip] ...

needs root and iproute2: each peer is a process in a network namespace (`_wan.py`). With B bytes per vector on the wire
(--mb, fp16) and equal links of rate r, the least times are

    Moshpit on a grid of sides M_k    sum_k 2 (M_k - 1) / M_k  B / r
    gossip, one exchange in pairs     B / r

Every result is checked: Moshpit's is the exact mean, gossip's weights sum to the number of peers. Each engine is run in
turn, so that what else the machine does hits all; but each then learns of the links from the others' rounds, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from typing import Any

import torch
from _wan import Site, Wan, available
from _workers import LIMIT_S, WORKER, Workers, say

import dlc
from dlc.comm.cells import grid_of
from dlc.comm.security import generate_run_key
from dlc.errors import DlcError

PORT = 4600
FRAMING = 1500 / 1448
"""Headers of TCP and IP, as in wan.py: rates are of payload."""
TOLERANCE = 0.02
"""Of an element of fp16 averages of unit normals."""


class Engines:
    """What one process takes part in; the vector of peer i is a unit normal drawn from seed i."""

    def __init__(self, options: argparse.Namespace) -> None:
        peers = [p for p in options.peers.split(",") if p]
        self.peer = dlc.Peer.join(
            peers, run="avg", key=options.key, listen=options.listen, join_timeout_s=LIMIT_S, log=False
        )
        self.n, self.mine = options.n, vector_of(options.rank, options.numel)
        self.true = torch.stack([vector_of(i, options.numel)[:1024] for i in range(options.n)]).mean(0)
        self.pits = {
            f"moshpit-{dims}": dlc.Moshpit(self.peer, f"d{dims}", dims=dims, matchmaking_s=30.0)
            for dims in dims_of(options)
        }
        self.gossip = dlc.Gossip(self.peer, graph="random-pairs")

    def known(self) -> int:
        """Peers that are up here, and on every grid: whoever has not heard of all takes no mean for the exact one."""
        on_grids = self.peer.mesh.ask(
            lambda mesh, now: [len(mesh.board.get(f"moshpit/{pit.name}")) for pit in self.pits.values()]
        )
        return min([sum(m.alive for m in self.peer.members()), *on_grids])

    def round(self, engine: str) -> dict[str, Any]:
        work = self.mine.clone()
        start = time.perf_counter()
        if engine == "gossip":
            step = self.gossip.step(work, wait_s=LIMIT_S)
            right, more = not step.returned, {"weight": step.weight, "sent": step.bytes_sent}
        else:
            report = self.pits[engine].average(work, timeout_s=LIMIT_S)
            error = float((work[:1024] - self.true).abs().max())
            right = report.complete and error < TOLERANCE
            more = {"sent": report.bytes_sent, "summary": report.summary(), "error": error}
        return {"seconds": time.perf_counter() - start, "right": right, **more}


def dims_of(options: argparse.Namespace) -> list[int]:
    return [int(dims) for dims in options.dims.split(",") if dims]


def vector_of(rank: int, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def worker_main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    for name in ("--key", "--listen", "--dims"):
        parser.add_argument(name, required=True)
    parser.add_argument("--peers", default="")
    for name in ("--numel", "--rank", "--n"):
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        engines = Engines(options)
        say("ready")
        for line in sys.stdin:
            word, _, engine = line.strip().partition(" ")
            if word == "members":
                say("members", alive=engines.known())
            elif word == "round":
                say("done", **engines.round(engine))
        engines.peer.leave()
    except DlcError as error:
        sys.exit(str(error))


class Bench:
    def __init__(self, options: argparse.Namespace, wan: Wan, workers: Workers) -> None:
        self.options, self.wan, self.workers = options, wan, workers
        self.sites = [f"s{i}" for i in range(options.peers)]

    def start(self) -> None:
        key, first = generate_run_key(), self.wan.address(self.sites[0])
        for rank, site in enumerate(self.sites):
            words = ["--key", key, "--listen", f"{self.wan.address(site)}:{PORT}", "--dims", self.options.dims]
            words += ["--rank", str(rank), "--n", str(len(self.sites)), "--numel", str(self.options.numel)]
            words += ["--peers", f"{first}:{PORT}"] if rank else []
            self.workers.start(site, *words, within=self.wan.enter(site))
            if not rank:
                self.workers.wait(site, "ready")  # the others join through it, all at once
        for site in self.sites[1:]:
            self.workers.wait(site, "ready")
        end = time.monotonic() + LIMIT_S
        while any(told["alive"] < len(self.sites) for told in self.all("members", "members")):
            if time.monotonic() > end:
                raise RuntimeError("the peers do not find each other")

    def all(self, line: str, event: str) -> list[dict[str, Any]]:
        for site in self.sites:
            self.workers.tell(site, line)
        return [self.workers.wait(site, event, LIMIT_S) for site in self.sites]

    def round(self, engine: str) -> dict[str, float]:
        told = self.all(f"round {engine}", "done")
        wrong = [site for site, one in zip(self.sites, told, strict=True) if not one["right"]]
        if wrong:
            raise RuntimeError(f"{engine} gave a wrong or partial result at {', '.join(wrong)}: {told}")
        return {"seconds": max(float(one["seconds"]) for one in told), "sent": max(float(one["sent"]) for one in told)}


def bounds(options: argparse.Namespace) -> dict[str, float]:
    """Seconds, by engine."""
    once = 2 * options.numel / (options.rate_mbit * 1e6 / 8)
    found = {"gossip": once} if options.gossip else {}
    for dims in dims_of(options):
        found[f"moshpit-{dims}"] = once * sum(2 * (m - 1) / m for m in grid_of(options.peers, dims=dims).sides)
    return found


def main() -> int:
    if sys.argv[1:2] == [WORKER]:
        worker_main(sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--mb", type=float, default=25.0, help="of one vector on the wire, fp16 (default %(default)s)")
    parser.add_argument("--rate-mbit", type=float, default=200.0, help="of every link, both ways")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="round trip between two sites")
    parser.add_argument(
        "--dims", default="1,3", help='dimensions of Moshpit\'s grids (default %(default)s); "" for none'
    )
    parser.add_argument("--gossip", action=argparse.BooleanOptionalAction, default=True, help="gossip in pairs, too")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of each engine; one more before them")
    parser.add_argument("--space", type=float, default=1.0, help="seconds between two rounds")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if reason := available():
        sys.exit(f"averaging.py needs network namespaces: {reason}")
    options.numel = round(options.mb * 1e6 / 2)
    rate = options.rate_mbit * FRAMING
    site = Site(rate, rate, options.delay_ms / 4)
    least, seconds = bounds(options), dict[str, list[float]]()
    with Workers(__file__) as workers, Wan({f"s{i}": site for i in range(options.peers)}) as wan:
        bench = Bench(options, wan, workers)
        bench.start()
        for turn in range(1 + options.rounds):
            for engine in least:
                told = bench.round(engine)
                print(
                    f"{engine}: {told['seconds']:.2f} s, {told['sent'] / 1e6:.1f} MB sent", file=sys.stderr, flush=True
                )
                if turn:
                    seconds.setdefault(engine, []).append(told["seconds"])
                threading.Event().wait(options.space)
    rows = {
        engine: {
            "median_s": statistics.median(times),
            "bound_s": least[engine],
            "ratio": statistics.median(times) / least[engine],
            "all_s": times,
        }
        for engine, times in seconds.items()
    }
    if options.json:
        print(json.dumps(rows))
        return 0
    for engine, row in rows.items():
        times = " ".join(f"{s:.2f}" for s in row["all_s"])
        print(
            f"{engine:<10} {row['median_s']:6.2f} s, {row['ratio']:.2f} x its bound ({row['bound_s']:.2f} s); {times}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
