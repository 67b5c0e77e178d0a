"""Time how soon sites that were cut off from each other average together again.

    python benchmarks/cuts.py
    python benchmarks/cuts.py --cut 8,20,45,90 --repeats 3

Three emulated sites average a vector in rounds that follow at once. One is cut off from both others in the middle of a
round, which nobody is told, and healed after --cut seconds. Told is how long after that all saw all again, and how long
until all three had a round with all of each in it. Two of three are a quorum and go on meanwhile; beyond 60 s (T_evict)
the one that is alone goes on, too, and gives that up later.

Needs root (network namespaces).
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import threading
import time
from typing import Any

import torch
from _wan import Site, Wan, available
from _workers import LIMIT_S, WORKER, Workers, say

from dlc.comm.security import generate_run_key
from dlc.errors import DlcError, RoundLost
from dlc.peer import Peer

SITES = ("a", "b", "c")
PORT = 7000
BEFORE_S = 3.0
"""Rounds without a fault, once all take part."""
CUT_S_MIN = 5.0
"""By then each side takes the other for dead."""
LOOK_S = 0.05


def worker_main(arguments: list[str]) -> None:
    """Tells whenever the number of members that it sees alive changes, and of each round; its times are of a clock that
    all processes of this machine share."""
    key, listen, peers, numel = arguments
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
            whole = report.complete and len(report.contributors) == len(SITES)
            say("round", at_s=time.monotonic(), whole=whole)
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


def once(cut_s: float, options: argparse.Namespace) -> tuple[float, float]:
    """Seconds after the healing of one cut: until all see all, and until a round had all of all."""
    key, numel, pause = generate_run_key(), round(options.mb * 1e6 / 4), threading.Event()
    site = Site(options.mbit, options.mbit, options.delay)
    with Workers(__file__) as workers, Wan(dict.fromkeys(SITES, site)) as wan:
        for name in SITES:
            peers = f"{wan.address(SITES[0])}:{PORT}" if name != SITES[0] else ""
            workers.start(name, key, f"{wan.address(name)}:{PORT}", peers, str(numel), within=wan.enter(name))
            if name == SITES[0]:
                workers.wait(name, "sees")
        for name in SITES:
            first(workers, name, "round", 0.0, lambda told: told["whole"])
        pause.wait(BEFORE_S)
        wan.isolate(SITES[-1])
        pause.wait(cut_s)
        for name in SITES[:-1]:
            wan.heal(name, SITES[-1])
        healed_s = time.monotonic()
        seen_s = max(first(workers, name, "sees", healed_s, lambda told: told["alive"] == len(SITES)) for name in SITES)
        return seen_s, max(first(workers, name, "round", healed_s, lambda told: told["whole"]) for name in SITES)


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
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--mb", type=float, default=20.0, help="MB of fp32 per site (default 20)")
    parser.add_argument("--mbit", type=float, default=100.0, help="up and down, of each site (default 100)")
    parser.add_argument("--delay", type=float, default=10.0, help="ms from a site to the middle (default 10)")
    options = parser.parse_args()
    reason = available()
    if reason:
        print(f"not available here: {reason}")
        return 0
    print("seconds after a cut: until all saw all | until a round of all three; medians, and all")
    for cut_s in options.cut:
        seen_s, whole_s = zip(*[once(cut_s, options) for _ in range(options.repeats)], strict=True)
        print(f"cut for {cut_s:3g} s: {told(seen_s)} | {told(whole_s)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
