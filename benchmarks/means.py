"""Are the means right, whatever happens? Real processes average while one is killed, frozen, cut off, or leaves.

    python benchmarks/means.py --minutes 6
    python benchmarks/means.py --minutes 6 --sites 5
    python benchmarks/means.py --codec int8 --n 7 --seed 3

Each process averages two vectors of different names, round after round, by `Peer.all_reduce`; faults come by the
seed's schedule, as in chaos.py, and with --sites there are cuts between emulated sites (root). What a process
contributes tells who made it, in every element, and so does its weight: from a report each process works out what every
chunk of the mean has to be, and compares. Checked is, of each round that anybody told of, that

- every chunk is the weighted mean of those whom the report names, and has of each as much as the report says;
- all who had the round had the same bits;
- whoever was told that there is no mean still had its own vector, unchanged;
- everybody who was up had a round within the last --stuck seconds.

The exit status is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from _chaos import Fault, schedule, site_of
from _means import ROUNDED, WEIGHTS, pattern, value_of, weight_of, wrong
from _wan import Site, Wan, available
from _workers import LIMIT_S, WORKER, Workers, say
from blake3 import blake3

from dlc.comm.grid import Grid, usual_chunk_elems
from dlc.comm.security import generate_run_key
from dlc.errors import DlcError, RoundLost, RoundTimeout, SwarmClosed
from dlc.peer import Peer

CHANNELS = ("a", "b")
MBIT, DELAY_MS = 80.0, 10.0
"""Of the emulated sites."""
ROUND_S = 60.0
PAUSE_S = 0.2
"""Between two rounds of a name, at most: drawn anew, so that the names overlap in all ways."""
LOOK_S = 0.1


def worker_main(arguments: list[str]) -> None:
    number, listen, peers, key, codec, numel, folder = arguments
    torch.set_num_threads(1)
    try:
        peer = Peer.join(
            [p for p in peers.split(",") if p],
            run="means",
            key=key,
            listen=listen,
            state_dir=Path(folder),
            join_timeout_s=LIMIT_S,
        )
    except DlcError as error:
        sys.exit(str(error))
    say("joined", address=peer.address)
    over = threading.Event()
    averaging = [
        threading.Thread(target=average, args=(peer, name, int(number), codec, int(numel), over)) for name in CHANNELS
    ]
    for thread in averaging:
        thread.start()
    sys.stdin.readline()
    over.set()
    for thread in averaging:
        thread.join()
    peer.leave()


def average(peer: Peer, name: str, number: int, codec: str, numel: int, over: threading.Event) -> None:
    """Rounds of one name until `over`; each is told with what is wrong with it."""
    like, grid = pattern(numel), Grid(numel, usual_chunk_elems(numel, codec), codec)
    k = random.randrange(WEIGHTS)  # not from the seed: who comes back must not contribute the same as before
    while not over.wait(random.random() * PAUSE_S):
        k += 1
        weight = weight_of(number, k)
        own = like * value_of(weight)
        vector = own.clone()
        try:
            report = peer.all_reduce(vector, name=name, weight=weight, codec=codec, timeout_s=ROUND_S)
        except SwarmClosed:
            return
        except (RoundLost, RoundTimeout) as error:
            changed = "" if torch.equal(vector, own) else "the vector has changed, though there is no mean"
            say("none", why=type(error).__name__, wrong=changed)
            continue
        say(
            "round",
            name=name,
            head=report.head,
            bits=blake3(vector.numpy().tobytes()).hexdigest(),
            contributors=len(report.contributors),
            partly=sum(share.fraction < 1.0 for share in report.contributors),
            ballots=report.ballots,
            wrong=wrong(vector, like, report.contributors, grid),
        )


class Run:
    """The processes, and what they have told."""

    def __init__(self, options: argparse.Namespace, workers: Workers, wan: Wan | None, folder: str) -> None:
        self.options, self.workers, self.wan, self.folder = options, workers, wan, Path(folder)
        self.key = generate_run_key()
        self.addresses: dict[str, str] = {}
        self.up: dict[str, float] = {}
        """Who is up, and since when it has had no round."""
        self.frozen: set[str] = set()
        self.rounds: list[dict[str, Any]] = []
        self.without: Counter[str] = Counter()
        self.wrong: list[str] = []

    def start(self, name: str) -> None:
        options, host, within = self.options, "127.0.0.1", list[str]()
        if self.wan is not None:
            site = site_of(name, options.sites)
            host, within = self.wan.address(site), self.wan.enter(site)
        peers = ",".join(self.addresses[other] for other in self.up if other in self.addresses)
        numel, state = str(round(options.mb * 1e6 / 4)), str(self.folder / name)
        self.workers.start(name, name[1:], f"{host}:0", peers, self.key, options.codec, numel, state, within=within)
        self.up[name] = time.monotonic()

    def apply(self, fault: Fault) -> None:
        name = fault.peer
        if fault.kind in ("cut", "split", "heal"):
            self._part(fault)
        elif fault.kind in ("join", "restart"):
            self.start(name)
        elif fault.kind == "thaw":
            self.workers.signal(name, signal.SIGCONT)
            self.frozen.discard(name)
            self.up[name] = time.monotonic()
        elif fault.kind == "freeze":
            self.workers.signal(name, signal.SIGSTOP)
            self.frozen.add(name)
        else:
            self.end(name, kill=fault.kind == "kill")

    def _part(self, fault: Fault) -> None:
        assert self.wan is not None
        first, *others = fault.peer.split("+")
        for other in others or [name for name in self.wan.names if name != first]:
            (self.wan.heal if fault.kind == "heal" else self.wan.cut)(first, other)
        for name in self.up:
            self.up[name] = max(self.up[name], time.monotonic())

    def end(self, name: str, kill: bool = False) -> None:
        del self.up[name]
        if kill:
            self.workers.signal(name, signal.SIGKILL)
        else:
            self.workers.tell(name, "end")
        code = self.workers.exit_code(name)
        if code != (-signal.SIGKILL if kill else 0):
            self.wrong.append(f"{name} ended with {code}: {self.workers.said(name)}")
        self.hear()

    def hear(self) -> None:
        """Take what was told, and look for who is stuck."""
        for name, told in self.workers.take():
            if told["event"] == "joined":
                self.addresses[name] = told["address"]
            elif told["event"] == "none":
                self.without[told["why"]] += 1
            elif told["event"] == "round":
                self.rounds.append(told)
                if name in self.up:
                    self.up[name] = time.monotonic()
            if told.get("wrong"):
                self.wrong.append(f"{name}: {told['wrong']}")
        for name, since in self.up.items():
            silent_s = time.monotonic() - since
            if silent_s > self.options.stuck and name not in self.frozen:
                self.wrong.append(f"{name} has had no round for {silent_s:.0f} s: {self.workers.said(name)}")
                self.up[name] = time.monotonic()

    def verdict(self) -> int:
        bits: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
        for told in self.rounds:
            bits[told["name"], told["head"]].add(told["bits"])
        differ = sum(len(found) > 1 for found in bits.values())
        partly = sum(told["partly"] > 0 for told in self.rounds)
        again = sum(told["ballots"] > 1 for told in self.rounds)
        most = max((told["contributors"] for told in self.rounds), default=0)
        print(
            f"{len(bits)} rounds, told of {len(self.rounds)} times: {partly} times of some only a part was in it, "
            f"{again} times it took more than one ballot; at most {most} contributors; no mean: {dict(self.without)}"
        )
        for line in self.wrong:
            print(line)
        if differ:
            print(f"{differ} rounds were not the same bits for all")
        if not self.rounds:
            print("no round was had")
        print("wrong" if self.wrong or differ or not self.rounds else "all means were right")
        return int(bool(self.wrong or differ or not self.rounds))


def run(options: argparse.Namespace) -> int:
    names = [f"p{i}" for i in range(options.n)]
    faults = schedule(options.seed, names, options.every, options.minutes * 60, options.sites)
    if options.print_schedule:
        print(*faults, sep="\n")
        return 0
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="dlc-means-"))
        sites = {f"s{i}": Site(MBIT, MBIT, DELAY_MS) for i in range(options.sites)}
        wan = stack.enter_context(Wan(sites, seed=options.seed)) if sites else None
        swarm = Run(options, stack.enter_context(Workers(__file__)), wan, folder)
        for name in names:
            swarm.start(name)
            swarm.addresses[name] = swarm.workers.wait(name, "joined")["address"]
        began = time.monotonic()
        for fault in faults:
            while time.monotonic() < began + fault.at_s:
                swarm.workers.pump(LOOK_S)
                swarm.hear()
            print(fault, file=sys.stderr, flush=True)
            swarm.apply(fault)
        while time.monotonic() < began + options.minutes * 60:
            swarm.workers.pump(LOOK_S)
            swarm.hear()
        for name in list(swarm.up):
            swarm.end(name)
        return swarm.verdict()


def main() -> int:
    if sys.argv[1:2] == [WORKER]:
        worker_main(sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=5, help="processes (default 5)")
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--every", type=float, default=6.0, help="seconds from fault to fault (default 6)")
    parser.add_argument("--sites", type=int, default=0, help="emulated, with cuts between them (default 0: loopback)")
    parser.add_argument("--codec", choices=tuple(ROUNDED), default="fp16")
    parser.add_argument("--mb", type=float, default=2.4, help="MB of fp32 each (default 2.4)")
    parser.add_argument("--stuck", type=float, default=90.0, help="seconds without a round (default 90)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--print-schedule", action="store_true")
    options = parser.parse_args()
    if options.n < 3 or options.every <= 0 or options.minutes <= 0 or options.mb <= 0 or options.sites == 1:
        parser.error("--n must be at least 3, --sites 0 or at least 2, and --every, --minutes and --mb above 0")
    if options.sites and (reason := available()):
        print(f"not available here: {reason}")
        return 0
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
