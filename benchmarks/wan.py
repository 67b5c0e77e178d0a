"""Time the all-reduce between emulated far sites beside Gloo and Hivemind, and compare all with what the links allow.

    python benchmarks/wan.py --case four-site
    python benchmarks/wan.py --engines fp16,gloo-bf16,hivemind        after `make hivemind`
    python benchmarks/wan.py --case all --rounds 5 --json

One process a site, and one more for Hivemind, which waits while others work. Each turn is one round of every engine, in
an order that rotates, --space seconds apart, as real rounds are minutes apart (BBR probes its round trip anew after
10 s, which would fall into rounds that follow at once). A round's time is that of the slowest process, from a common
beginning to the mean in its own tensors; every mean is compared with the true one. Ours is told no rate: its peers
measure their links in the --settle seconds before the first round, which stand for the first inner steps. Its first
rounds are told apart.

The limit is the least time in which the links carry the bytes: each contributor's vector out, each result in, with the
best division of the work (`dlc.comm.partition`), without headers and latency. Gloo bf16 is timed with the conversion.
Hivemind has its defaults and fp16 on the wire; its matchmaking before each round is not timed. With --announce S nor is
our agreement on the round: each is announced S seconds before, as a trainer does before its last inner steps.

The relay is a process of this machine and carries about a gigabit in all, so --scale divides rates *and* bytes: seconds
stay what they would be, but for the work per byte. Needs root (network namespaces).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import statistics
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from _hivemind_sites import MISSING, PYTHON, HivemindSites, Place
from _wan import Site, Wan, available
from _workers import LIMIT_S, WORKER, Workers, say

from dlc.comm import tcp
from dlc.comm.codecs import get_codec
from dlc.comm.partition import Member, optimum
from dlc.comm.security import generate_run_key
from dlc.errors import DlcError
from dlc.handles import Reduction
from dlc.peer import Peer

PORT = 7000
GLOO_PORT = 7100
INTERFACE = "wan0"
FRAMING = 1500 / 1448
"""IP bytes per byte of payload: a rate of the table is what TCP can carry."""
SAMPLE = 4096
"""Elements of each end of the vector that are compared with the true mean."""
TOLERANCE = {"fp32": 1e-6, "fp16": 4e-3, "bf16": 3e-2, "int8": 8e-2, "int4": 1.2}
"""Of an element of a mean of unit normals, by wire format: both hops round."""
GLOO = {"gloo-fp32": "fp32", "gloo-bf16": "bf16"}
HIVEMIND = "hivemind"
ENGINES = (*TOLERANCE, *GLOO, HIVEMIND)
"""Codecs of ours, and others."""


@dataclass(frozen=True)
class Case:
    """Links in Mbit/s of payload, one-way delays in ms between sites."""

    up: Mapping[str, float]
    down: Mapping[str, float]
    delay_ms: Mapping[tuple[str, str], float]
    default_ms: float = 0.0


def _equal(rates: Mapping[str, float], default_ms: float) -> Case:
    return Case(rates, rates, {}, default_ms)


FOUR = {"canada": 935.0, "finland": 127.0, "texas": 450.0, "delaware": 935.0}
CASES: dict[str, Case] = {
    "four-site": Case(
        FOUR,
        FOUR,
        {
            ("canada", "finland"): 55,
            ("canada", "texas"): 22,
            ("canada", "delaware"): 10,
            ("finland", "texas"): 70,
            ("finland", "delaware"): 52,
            ("texas", "delaware"): 18,
        },
    ),
    "equal": _equal(dict.fromkeys("abcd", 200.0), 50.0),
    "equal-near": _equal(dict.fromkeys("abcd", 200.0), 0.0),
    "one-slow": _equal({"slow": 50.0, "b": 400.0, "c": 400.0, "d": 400.0}, 40.0),
    "asymmetric": Case(dict.fromkeys("abcd", 100.0), dict.fromkeys("abcd", 500.0), {}, 40.0),
    "eight": _equal(dict(zip("abcdefgh", (100.0, 150, 200, 300, 400, 600, 800, 1000), strict=True)), 25.0),
}
"""The first is after OpenDiLoCo's report of 127 to 935 Mbit/s between four sites (arXiv 2407.07852)."""


# ---------------------------------------------------------------- in the sites


class Engines:
    """What one process takes part in; the vector of peer i is a unit normal drawn from seed i."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.peer = Peer.join(options.peers, run="wan", key=options.key, listen=options.listen, join_timeout_s=LIMIT_S)
        self.vectors = [vector_of(i, options.numel) for i in range(options.n)]
        ends = [torch.cat((v[:SAMPLE], v[-SAMPLE:])) for v in self.vectors]
        self.true = torch.stack(ends).mean(0)
        self.mine = self.vectors[options.rank].clone()
        self.vectors.clear()
        self.work = torch.empty_like(self.mine)
        self.announced: Reduction | None = None

    def meet_gloo(self) -> None:
        import os

        import torch.distributed as dist

        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{self.options.meet}",
            rank=self.options.rank,
            world_size=self.options.n,
            timeout=timedelta(seconds=LIMIT_S),
        )

    def round(self, engine: str) -> dict[str, Any]:
        self.work.copy_(self.mine)
        start = time.perf_counter()
        more = self._gloo(engine) if engine in GLOO else self._ours(engine)
        seconds = time.perf_counter() - start
        ends = torch.cat((self.work[:SAMPLE], self.work[-SAMPLE:]))
        error = float((ends - self.true).abs().max())
        return {"seconds": seconds, "error": error, "right": error <= TOLERANCE[wire_format(engine)], **more}

    def announce(self, codec: str) -> None:
        """Let the peers agree on the round, as a trainer does before its last inner steps."""
        self.announced = self.peer.all_reduce(
            self.work,
            name=f"wan-{codec}",
            codec=codec,
            timeout_s=LIMIT_S,
            async_op=True,
            expected_s=self.options.announce,
        )

    def _ours(self, codec: str) -> dict[str, Any]:
        if self.announced is None:
            report = self.peer.all_reduce(self.work, name=f"wan-{codec}", codec=codec, timeout_s=LIMIT_S)
        else:
            self.announced.ready()
            report = self.announced.wait(LIMIT_S)
            self.announced = None
        return {"contributors": len(report.contributors), "sent": report.bytes_sent}

    def _gloo(self, engine: str) -> dict[str, Any]:
        import torch.distributed as dist

        if engine == "gloo-fp32":
            dist.all_reduce(self.work)
        else:
            half = self.work.to(torch.bfloat16)
            dist.all_reduce(half)
            self.work.copy_(half)
        self.work.div_(self.options.n)
        return {"contributors": self.options.n}


def refuse_bbr() -> None:
    """As a system does that does not allow it, and whose own is cubic."""
    choose = tcp.set_congestion

    def refuse(sock: socket.socket, name: str) -> bool:
        return choose(sock, "cubic" if name == "bbr" else name) and name != "bbr"

    tcp.set_congestion = refuse


def vector_of(rank: int, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def worker_main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    for name in ("--key", "--listen", "--meet"):
        parser.add_argument(name, required=True)
    parser.add_argument("--peers", default="")
    parser.add_argument("--announce", type=float, required=True)
    parser.add_argument("--no-bbr", action="store_true")
    for name in ("--numel", "--rank", "--n"):
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args(arguments)
    options.peers = [p for p in options.peers.split(",") if p]
    torch.set_num_threads(1)
    if options.no_bbr:
        refuse_bbr()
    try:
        engines = Engines(options)
        say("ready")
        for line in sys.stdin:
            word, _, engine = line.strip().partition(" ")
            if word == "gloo":
                engines.meet_gloo()
                say("met")
            elif word == "members":
                say("members", alive=sum(m.alive for m in engines.peer.members()))
            elif word == "rates":
                up_Bps = engines.peer._ask(lambda node, now: node.exchange.rates.told_up_Bps)
                say("rates", up_mbit=up_Bps * 8e-6)
            elif word == "announce":
                engines.announce(engine)
                say("announced")
            elif word == "round":
                say("done", **engines.round(engine))
        engines.peer.leave()
    except DlcError as error:
        sys.exit(str(error))


# ---------------------------------------------------------------- outside


def wire_format(engine: str) -> str:
    """The name of the codec whose bytes an engine sends."""
    return {HIVEMIND: "fp16", **GLOO}.get(engine, engine)


def limit_s(case: Case, wire_bytes: float) -> float:
    """The least time for one vector of so many bytes, at the rates of the table."""
    members = [Member(case.up[site] * 1e6 / 8, case.down[site] * 1e6 / 8) for site in case.up]
    return optimum(members, wire_bytes).seconds


def network(case: Case, scale: float, loss: float) -> Wan:
    sites = {
        site: Site(case.up[site] * scale * FRAMING, case.down[site] * scale * FRAMING, case.default_ms / 2, loss)
        for site in case.up
    }
    wan = Wan(sites)
    for (a, b), one_way_ms in case.delay_ms.items():
        wan.set_delay(a, b, one_way_ms)
    return wan


class Bench:
    def __init__(self, case: Case, options: argparse.Namespace, wan: Wan, workers: Workers) -> None:
        self.options, self.wan, self.workers = options, wan, workers
        self.sites = list(case.up)
        self.numel = round(options.mb * options.scale * 1e6 / 4)
        self.key = generate_run_key()
        self.probed: dict[str, float] = {}
        """Mbit/s, before --scale, that each site told before the first round; 0: unknown."""
        self._hivemind: HivemindSites | None = None

    def start(self, until: contextlib.ExitStack) -> None:
        """Start all engines; those whose processes are not `workers` end with `until`."""
        first = self.wan.address(self.sites[0])
        for rank, site in enumerate(self.sites):
            words = [
                "--key",
                self.key,
                "--listen",
                f"{self.wan.address(site)}:{PORT}",
                "--meet",
                f"{first}:{GLOO_PORT}",
            ]
            words += ["--announce", str(self.options.announce), *["--no-bbr"] * self.options.no_bbr]
            words += ["--rank", str(rank), "--n", str(len(self.sites)), "--numel", str(self.numel)]
            words += ["--peers", f"{first}:{PORT}"] if rank else []
            self.workers.start(site, *words, within=self.wan.enter(site))
            self.workers.wait(site, "ready")
        self.all("members", "members", lambda told: told["alive"] == len(self.sites))
        if set(GLOO) & set(self.options.engines):
            self.all("gloo", "met")
        if HIVEMIND in self.options.engines:
            places = [Place(self.wan.address(site), self.wan.enter(site)) for site in self.sites]
            self._hivemind = until.enter_context(HivemindSites(places, self.numel))

    def all(self, line: str, event: str, good: Any = lambda told: True) -> list[dict[str, Any]]:
        """Tell all at once, and hear all; again until each answer is good."""
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            for site in self.sites:
                self.workers.tell(site, line)
            told = [self.workers.wait(site, event) for site in self.sites]
            if all(good(t) for t in told):
                return told
        raise RuntimeError(f"no good answer to {line!r} within {LIMIT_S:g} s: {told}")

    def round(self, engine: str) -> float:
        if engine == HIVEMIND:
            assert self._hivemind is not None
            return self._hivemind.round()
        if self.options.announce and engine in TOLERANCE:
            self.all(f"announce {engine}", "announced")
            threading.Event().wait(self.options.announce)
        told = self.all(f"round {engine}", "done")
        for site, one in zip(self.sites, told, strict=True):
            if not one["right"] or one["contributors"] != len(self.sites):
                raise RuntimeError(f"{engine} at {site}: not the mean of all: {one}")
        return max(float(one["seconds"]) for one in told)

    def run(self) -> dict[str, list[float]]:
        """Seconds of every round, the first included."""
        seconds: dict[str, list[float]] = {engine: [] for engine in self.options.engines}
        threading.Event().wait(self.options.settle)
        told = self.all("rates", "rates")
        self.probed = {site: t["up_mbit"] / self.options.scale for site, t in zip(self.sites, told, strict=True)}
        engines = list(self.options.engines)
        for turn in range(self.options.warm + self.options.rounds):
            for engine in engines[turn % len(engines) :] + engines[: turn % len(engines)]:
                seconds[engine].append(self.round(engine))
                self._pause()
        return seconds

    def _pause(self) -> None:
        threading.Event().wait(self.options.space)


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    case = CASES[name]
    with contextlib.ExitStack() as until:
        workers = until.enter_context(Workers(__file__))
        wan = until.enter_context(network(case, options.scale, options.loss))
        if options.send_buffer:
            wan.set_ipv4("tcp_wmem", f"4096 16384 {options.send_buffer}")
        bench = Bench(case, options, wan, workers)
        bench.start(until)
        before = wan.stats()
        seconds = bench.run()
        after = wan.stats()
    dropped = sum(after[s]["full"] - before[s]["full"] for s in after)
    rows = {}
    for engine, times in seconds.items():
        codec = get_codec(wire_format(engine))
        least = limit_s(case, codec.wire_bytes(round(options.mb * 1e6 / 4)))
        warm = times[options.warm :]
        rows[engine] = {"first_s": times[0], "median_s": statistics.median(warm), "limit_s": least, "all_s": times}
    return {"case": name, "loss": options.loss, "dropped": dropped, "probed_mbit": bench.probed, "rows": rows}


def show(result: dict[str, Any]) -> str:
    probed = ", ".join(f"{site} {mbit:.0f}" for site, mbit in result["probed_mbit"].items())
    lines = [f"{result['case']}, loss {result['loss']:g}; segments dropped by buffers: {result['dropped']}"]
    lines.append(f"  Mbit/s up, told before the first round: {probed}")
    name, ours = next(iter(result["rows"].items()))
    for engine, row in result["rows"].items():
        share, first = row["limit_s"] / row["median_s"], row["limit_s"] / row["first_s"]
        times = " ".join(f"{s:.2f}" for s in row["all_s"])
        ratio = f"{row['median_s'] / ours['median_s']:.2f} x the time of {name}; " if ours is not row else ""
        lines.append(
            f"  {engine:<10} {row['median_s']:6.2f} s, {share:5.1%} of the limit ({row['limit_s']:.2f} s); {ratio}"
            f"first round {first:5.1%}; all: {times}"
        )
    return "\n".join(lines)


def main() -> int:
    if sys.argv[1:2] == [WORKER]:
        worker_main(sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=(*CASES, "all"), default="four-site")
    parser.add_argument("--engines", default="fp16,gloo-bf16", help=f"of {', '.join(ENGINES)}; ratios are to the first")
    parser.add_argument("--mb", type=float, default=100.0, help="MB of fp32 per peer, before --scale")
    parser.add_argument("--scale", type=float, default=0.25, help="of rates and bytes (default 0.25)")
    parser.add_argument("--loss", type=float, default=0.0, help="probability that a segment is lost")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of each engine")
    parser.add_argument("--warm", type=int, default=2, help="rounds before them; the first is told")
    parser.add_argument("--space", type=float, default=11.0, help="seconds between two rounds")
    parser.add_argument("--settle", type=float, default=20.0, help="seconds before the first round (default 20)")
    parser.add_argument(
        "--announce", type=float, default=0.0, help="announce our rounds so many seconds before (default 0: do not)"
    )
    parser.add_argument("--no-bbr", action="store_true", help="ours has cubic, as where the system refuses BBR")
    parser.add_argument(
        "--send-buffer", type=int, default=0, help="most bytes of a connection's (default the system's)"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.engines = options.engines.split(",")
    unknown = sorted(set(options.engines) - set(ENGINES))
    if unknown:
        parser.error(f"there is no engine {unknown[0]!r}; there are {', '.join(ENGINES)}")
    if HIVEMIND in options.engines and not PYTHON.exists():
        parser.error(MISSING)
    reason = available()
    if reason:
        print(f"not available here: {reason}")
        return 0
    results = []
    for name in CASES if options.case == "all" else [options.case]:
        results.append(measure(name, options))
        if not options.json:
            print(show(results[-1]), flush=True)
    if options.json:
        print(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
