"""Time how soon sites that were cut off from each other average together again, and rounds while two of them are.

    python benchmarks/cuts.py
    python benchmarks/cuts.py --cut 8,20,45,90 --repeats 3
    python benchmarks/cuts.py --pair 40

Three emulated sites average a vector in rounds that follow at once. One is cut off from both others in the middle of a
round, which nobody is told, and healed after --cut seconds. Told is how long after that all saw all again, and how long
until all three had a round with all of each in it. Two of three are a quorum and go on meanwhile; beyond 60 s (T_evict)
the one that is alone goes on, too, and gives that up later.

With --pair four sites average, for so many seconds undisturbed, and then while two of them do not reach each other and
both reach the others. Told are these rounds: how long they take, and whether all of each site was in them.

Needs root (network namespaces).
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from _wan import Site, Wan, available
from _workers import LIMIT_S, WORKER, Workers, say

from dlc.comm.security import generate_run_key
from dlc.errors import DlcError, RoundLost
from dlc.peer import Peer

SITES = ("a", "b", "c", "d")
PORT = 7000
BEFORE_S = 3.0
"""Rounds without a fault, once all take part."""
CUT_S_MIN = 5.0
"""By then each side takes the other for dead."""
LOOK_S = 0.05


def worker_main(arguments: list[str]) -> None:
    """Tells whenever the number of members that it sees alive changes, and of each round; its times are of a clock that
    all processes of this machine share."""
    key, listen, peers, numel, sites = arguments
    torch.set_num_threads(1)
    try:
        peer = Peer.join([p for p in peers.split(",") if p], run="cuts", key=key, listen=listen, join_timeout_s=LIMIT_S)
        threading.Thread(target=_watch, args=(peer,), daemon=True).start()
        vector = torch.ones(int(numel))
        while True:
            try:
                report = peer.all_reduce(vector, name="cuts", timeout_s=LIMIT_S)
            except RoundLost:
                continue
            whole = report.complete and len(report.contributors) == int(sites)
            say("round", at_s=time.monotonic(), whole=whole, took_s=report.seconds)
    except DlcError as error:
        sys.exit(str(error))


def _watch(peer: Peer) -> None:
    seen, pause = 0, threading.Event()
    while not pause.wait(LOOK_S):
        alive = sum(member.alive for member in peer.members())
        if alive != seen:
            seen = alive
            say("sees", at_s=time.monotonic(), alive=alive)


def first(workers: Workers, site: str, event: str, since_s: float, good: Any) -> float:
    """Seconds from `since_s` until this site told such an event."""
    while True:
        told = workers.wait(site, event)
        if told["at_s"] >= since_s and good(told):
            return float(told["at_s"]) - since_s


@contextmanager
def averaging(sites: Sequence[str], options: argparse.Namespace) -> Iterator[tuple[Workers, Wan]]:
    """Sites that have had a round of all of them."""
    key, numel = generate_run_key(), round(options.mb * 1e6 / 4)
    site = Site(options.mbit, options.mbit, options.delay)
    with Workers(__file__) as workers, Wan(dict.fromkeys(sites, site)) as wan:
        for name in sites:
            peers = f"{wan.address(sites[0])}:{PORT}" if name != sites[0] else ""
            given = key, f"{wan.address(name)}:{PORT}", peers, str(numel), str(len(sites))
            workers.start(name, *given, within=wan.enter(name))
            if name == sites[0]:
                workers.wait(name, "sees")
        for name in sites:
            first(workers, name, "round", 0.0, lambda told: told["whole"])
        yield workers, wan


def once(cut_s: float, options: argparse.Namespace) -> tuple[float, float]:
    """Seconds after the healing of one cut: until all see all, and until a round had all of all."""
    sites, pause = SITES[:3], threading.Event()
    with averaging(sites, options) as (workers, wan):
        pause.wait(BEFORE_S)
        wan.isolate(sites[-1])
        pause.wait(cut_s)
        for name in sites[:-1]:
            wan.heal(name, sites[-1])
        healed_s = time.monotonic()
        seen_s = max(first(workers, name, "sees", healed_s, lambda told: told["alive"] == len(sites)) for name in sites)
        return seen_s, max(first(workers, name, "round", healed_s, lambda told: told["whole"]) for name in sites)


def pair(options: argparse.Namespace) -> None:
    """Rounds of four before two of them are apart, and meanwhile."""
    pause = threading.Event()
    with averaging(SITES, options) as (workers, wan):
        since_s = time.monotonic()
        pause.wait(options.pair)
        wan.cut(SITES[1], SITES[2])
        cut_s = time.monotonic()
        pause.wait(options.pair)
        until_s = time.monotonic()
        rounds = []
        while not rounds or rounds[-1]["at_s"] < until_s:
            rounds.append(workers.wait(SITES[1], "round"))
    for name, begin_s, end_s in (("before", since_s, cut_s), ("apart", cut_s, until_s)):
        mine = [r for r in rounds if begin_s < r["at_s"] < end_s]
        took_s = [r["took_s"] for r in mine]
        whole = sum(r["whole"] for r in mine)
        print(
            f"{name:6}: {len(mine)} rounds, {whole} with all of all; the first {took_s[0]:.1f} s, "
            f"median {statistics.median(took_s):.2f} s, the last {took_s[-1]:.2f} s",
            flush=True,
        )


def cuts_s(text: str) -> list[float]:
    """Of the command line."""
    found = [float(cut) for cut in text.split(",")]
    if not all(CUT_S_MIN <= cut_s < math.inf for cut_s in found):
        raise argparse.ArgumentTypeError(f"{text}: from {CUT_S_MIN:g} s on, before which nobody is taken for dead")
    return found


def told(seconds: tuple[float, ...]) -> str:
    return f"{statistics.median(seconds):4.1f} ({', '.join(f'{s:.1f}' for s in seconds)})"


def main() -> int:
    if sys.argv[1:2] == [WORKER]:
        worker_main(sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cut", type=cuts_s, default="8,20,45", help="seconds, comma-separated (default 8,20,45)")
    parser.add_argument("--pair", type=float, metavar="S", help="two of four apart, so many seconds, in place of cuts")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--mb", type=float, default=20.0, help="MB of fp32 per site (default 20)")
    parser.add_argument("--mbit", type=float, default=100.0, help="up and down, of each site (default 100)")
    parser.add_argument("--delay", type=float, default=10.0, help="ms from a site to the middle (default 10)")
    options = parser.parse_args()
    reason = available()
    if reason:
        print(f"not available here: {reason}")
        return 0
    if options.pair is not None:
        if not CUT_S_MIN <= options.pair < math.inf:
            parser.error(f"--pair {options.pair:g}: from {CUT_S_MIN:g} s on")
        pair(options)
        return 0
    print("seconds after a cut: until all saw all | until a round of all three; medians, and all")
    for cut_s in options.cut:
        seen_s, whole_s = zip(*[once(cut_s, options) for _ in range(options.repeats)], strict=True)
        print(f"cut for {cut_s:3g} s: {told(seen_s)} | {told(whole_s)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
