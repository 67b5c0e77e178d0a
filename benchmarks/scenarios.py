"""Peers that fail, or are slow, in the middle of an all-reduce, alone and in pairs: four healthy peers must succeed.

    python benchmarks/scenarios.py --mb 48
    python benchmarks/scenarios.py --kinds "sends slowly,cancels"

The scenarios are those of Hivemind's own tests of fault tolerance:

| kind            | what the peer does in the round                                                              |
|-----------------|----------------------------------------------------------------------------------------------|
| dies before     | SIGKILL as it is about to send the first part of its vector                                  |
| dies sending    | SIGKILL when it has sent a quarter of its parts                                              |
| sends slowly    | its uplink takes 10 MB/s                                                                     |
| dies reducing   | SIGKILL when a quarter of what it is to sum has come; at once if that is nothing             |
| reduces slowly  | it takes in 10 MB/s of parts                                                                 |
| cancels         | Ctrl-C in its call, when it has sent a quarter of its parts; it stays in the swarm           |

Four healthy processes stay for all scenarios; whoever fails is a fresh process. After an undisturbed round of all comes
the round with the fault. Peer i contributes value_i * pattern with weight_i (see failures.py), so the values tell who
is in each chunk: all healthy peers must hold the same bits, these must be the weighted mean of exactly those whom the
report names, chunk by chunk, and the healthy must be in whole. MB = 10^6 bytes of fp32; fp16 on the wire; loopback.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import sys
from collections import deque
from typing import Any

from _workers import WORKER, WorkerLost, Workers, say
from failures import VALUES, WEIGHTS, Work, check

KINDS = ("dies before", "dies sending", "sends slowly", "dies reducing", "reduces slowly", "cancels")
HEALTHY = 4
SLOW_BPS = 10e6
"""Of a slow peer: no gap is as long as any deadline, so that it is waited for."""
FRACTION = 0.25
"""Of what a peer sends or sums, before it fails."""
LIMIT_S = 20.0
"""For the round of the healthy: T_dead, another ballot and the longest of the slow ones, on a machine that is busy."""
PATIENCE = 1.0
"""Times the usual deadlines; more where the machine may not run a healthy process for seconds."""


# ---------------------------------------------------------------------- a worker


class Faulty:
    """Stands between a peer's node and its driver. Everything here runs on the driver thread."""

    def __init__(self, node: Any, kind: str) -> None:
        from dlc.comm.clock import clock
        from dlc.comm.messages import Contrib

        self.node, self.kind, self.clock, self.part = node, kind, clock, Contrib
        self.sent = self.received = 0
        self.struck = False
        self.due = 0.0
        self.aside: deque[tuple[Any, Any]] = deque()
        self._receive, self._tick, self._next_deadline = node.receive, node.tick, node.next_deadline
        self._next_bulk, self._pending_bulk = node.next_bulk, node.pending_bulk
        for name in ("receive", "tick", "next_deadline", "next_bulk", "pending_bulk"):
            setattr(node, name, getattr(self, name))

    def next_bulk(self, to: str) -> Any:
        if not self._link_is_free():
            return None
        message = self._next_bulk(to)
        if message is not None and self.kind == "sends slowly":
            self.due = self.clock() + len(message.payload) / SLOW_BPS
        if isinstance(message, self.part):
            if self.kind == "dies before":
                self._die()
            self.sent += 1
            self._strike("dies sending", self.sent, self._to_send())
            self._strike("cancels", self.sent, self._to_send())
        return message

    def pending_bulk(self) -> set[str]:
        return self._pending_bulk() if self._link_is_free() else set()

    def _link_is_free(self) -> bool:
        return self.kind != "sends slowly" or self.clock() >= self.due

    def receive(self, sender: Any, message: Any, now: float) -> Any:
        if isinstance(message, self.part):
            self.received += 1
            self._strike("dies reducing", self.received, self._to_sum())
            if self.kind == "reduces slowly":
                self.aside.append((sender, message))
                return []
        return self._receive(sender, message, now)

    def tick(self, now: float) -> Any:
        effects = self._tick(now)
        plan = self.node.exchange.plan
        if self.kind == "dies reducing" and plan is not None and plan.assignment and not self._to_sum():
            self._die()  # by what its link was measured to carry
        if self.aside and now >= self.due:
            sender, message = self.aside.popleft()
            self.due = now + len(message.payload) / SLOW_BPS
            effects += self._receive(sender, message, now)
        return effects

    def next_deadline(self) -> float:
        slow = self.aside or (self.kind == "sends slowly" and self._pending_bulk())
        return min(self._next_deadline(), max(self.due, self.clock())) if slow else self._next_deadline()

    def _owners(self) -> list[bool]:
        """Per chunk: it is mine."""
        plan = self.node.exchange.plan
        return [plan.owners[owner] == self.node.me for owner in plan.assignment] if plan is not None else []

    def _to_send(self) -> int:
        return self._owners().count(False)

    def _to_sum(self) -> int:
        plan = self.node.exchange.plan
        return self._owners().count(True) * (len(plan.entry.roster) - 1) if plan is not None else 0

    def _strike(self, kind: str, done: int, whole: int) -> None:
        """Once: a later ballot may give it less to do than it has done."""
        if self.kind == kind and not self.struck and done >= max(1, int(FRACTION * whole)):
            self.struck = True
            if kind == "cancels":
                say("fault", at=self.clock())
                os.kill(os.getpid(), signal.SIGINT)
            else:
                self._die()

    def _die(self) -> None:
        say("fault", at=self.clock())
        os.kill(os.getpid(), signal.SIGKILL)


def worker(peers: str, numel: int, index: int, n: int, patience: float) -> None:
    """One peer; see failures.py."""
    import torch

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit it ignored
    torch.set_num_threads(1)
    work = Work(peers, numel, index, n, patience)
    say("address", address=work.peer.address, peer=work.peer.id)
    for line in sys.stdin:
        word, _, kind = line.strip().partition(" ")
        if word == "arm":
            work.peer._ask(lambda node, now, kind=kind: Faulty(node, kind) and None)
            say("armed")
        elif word == "leave":
            break
        elif word == "round":
            try:
                work.round()
            except KeyboardInterrupt:
                say("round", error="cancelled")
    work.peer.leave()


# ---------------------------------------------------------------------- the benchmark


class Stand:
    """Four healthy peers, and whoever fails this time."""

    def __init__(self, workers: Workers, numel: int, patience: float) -> None:
        self.workers, self.numel, self.patience = workers, numel, patience
        self.names = [f"w{i}" for i in range(HEALTHY)]
        self.peer_of: dict[str, str] = {}
        self.address = "-"
        self._start("w0")
        self.address = self._hello("w0")
        for name in self.names[1:]:
            self._start(name)
        for name in self.names[1:]:
            self._hello(name)
        self._round(self.names)

    def _start(self, name: str) -> None:
        self.workers.start(name, self.address, str(self.numel), name[1:], str(len(WEIGHTS)), str(self.patience))

    def _hello(self, name: str) -> str:
        hello = self.workers.wait(name, "address")
        self.peer_of[name] = hello["peer"]
        return str(hello["address"])

    def _round(self, names: list[str]) -> dict[str, dict[str, Any]]:
        for name in names:
            self.workers.tell(name, "round")
        return {name: self.workers.wait(name, "round") for name in names}

    def run(self, kinds: tuple[str, ...]) -> dict[str, Any]:
        """One scenario: the figures of its round, and what was wrong with it."""
        guests = {f"w{HEALTHY + i}": kind for i, kind in enumerate(kinds)}
        everybody = self.names + list(guests)
        for name in guests:
            self._start(name)
        for name in guests:
            self._hello(name)
        calm = self._round(everybody)
        problems = self._problems(calm, guests)
        for name, kind in guests.items():
            self.workers.tell(name, f"arm {kind}")
            self.workers.wait(name, "armed")
        for name in everybody:
            self.workers.tell(name, "round")
        hit = {name: self.workers.wait(name, "round") for name in self.names}
        problems += self._problems(hit, guests)
        for name, kind in guests.items():
            problems += self._end(name, kind, hit)
        seconds = seconds_of(hit)
        if seconds > LIMIT_S * self.patience:
            problems.append(f"the healthy needed {seconds:.1f} s")
        return {
            "kinds": kinds,
            "calm_s": seconds_of(calm),
            "healthy_s": seconds,
            "in": self._shares(hit, guests),
            "ballots": max((r["report"]["ballots"] for r in hit.values() if "report" in r), default=0),
            "problems": problems,
        }

    def _end(self, name: str, kind: str, hit: dict[str, dict[str, Any]]) -> list[str]:
        """What the failed peer itself says; it ends, and the name is free again."""
        problems = []
        if kind.startswith("dies"):
            code = self.workers.exit_code(name)
            if code != -signal.SIGKILL:
                problems.append(f"{name} was not killed, it ended with {code}")
            return problems
        said = self.workers.wait(name, "round")
        if kind == "cancels":
            if said.get("error") != "cancelled":
                problems.append(f"{name} was not cancelled: {said}")
        elif said.get("bits") != hit["w0"].get("bits"):
            problems.append(f"{name} was slow, and holds other bits: {said.get('error')}")
        self.workers.tell(name, "leave")
        code = self.workers.exit_code(name)
        return problems + ([f"{name} ended with {code}"] if code else [])

    def _problems(self, results: dict[str, dict[str, Any]], guests: dict[str, str]) -> list[str]:
        n = HEALTHY + len(guests)
        problems = check(results, self.peer_of, n, HEALTHY)
        for name, r in results.items():
            shares = {s["peer"]: s["fraction"] for s in r.get("report", {"contributors": []})["contributors"]}
            lost = [h for h in self.names if shares.get(self.peer_of[h], 0.0) < 1.0]
            if lost:
                told = {
                    m["peer"]: f"{m['reason']}, {m['fraction']:.3f}" for m in r.get("report", {}).get("missing", [])
                }
                why = "; ".join(f"{h} ({told.get(self.peer_of[h], 'no reason is told')})" for h in lost)
                problems.append(f"{name}: of healthy ones a part is missing: {why}")
        return problems

    def _shares(self, hit: dict[str, dict[str, Any]], guests: dict[str, str]) -> list[float]:
        report = hit[self.names[0]].get("report", {"contributors": []})
        shares = {s["peer"]: s["fraction"] for s in report["contributors"]}
        return [round(shares.get(self.peer_of[name], 0.0), 3) for name in guests]


def seconds_of(results: dict[str, dict[str, Any]]) -> float:
    good = [r for r in results.values() if "ended" in r]
    return max(r["ended"] for r in good) - min(r["began"] for r in good) if good else 0.0


def scenarios(kinds: list[str], pairs: bool) -> list[tuple[str, ...]]:
    alone: list[tuple[str, ...]] = [(kind,) for kind in kinds]
    return alone + (list(itertools.combinations_with_replacement(kinds, 2)) if pairs else [])


def measure(
    chosen: list[tuple[str, ...]], mb: float, tell: Any = lambda run: None, patience: float = PATIENCE
) -> list[dict[str, Any]]:
    """Run these scenarios one after another, in one swarm."""
    assert HEALTHY + 2 <= len(VALUES)
    runs = []
    with Workers(__file__) as workers:
        stand = Stand(workers, int(mb * 1e6 / 4), patience)
        for kinds in chosen:
            runs.append(stand.run(kinds))
            tell(runs[-1])
    return runs


def line(run: dict[str, Any]) -> str:
    wrong = "none" if not run["problems"] else "; ".join(run["problems"])
    shares = " ".join(f"{share:.3f}" for share in run["in"])
    return (
        f"{' + '.join(run['kinds']):<34} {run['calm_s']:9.2f} {run['healthy_s']:9.2f}  {shares:<12} "
        f"{run['ballots']:7d}  {wrong}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=48.0, help="MB (10^6 bytes) of fp32 per process (default 48)")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}; default all")
    parser.add_argument("--alone", action="store_true", help="no pairs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    kinds = args.kinds.split(",")
    if not set(kinds) <= set(KINDS):
        parser.error(f"--kinds must be of {', '.join(KINDS)}")
    if not args.json:
        print(
            f"{HEALTHY} healthy processes, {args.mb:g} MB of fp32 each; seconds of an undisturbed round and of this one"
        )
        print("who fails                          all, calm   healthy  share of it  ballots  wrong")
    tell = (lambda run: None) if args.json else (lambda run: print(line(run), flush=True))
    try:
        runs = measure(scenarios(kinds, not args.alone), args.mb, tell)
    except WorkerLost as lost:
        print(lost)
        return 1
    if args.json:
        print(json.dumps({"mb": args.mb, "runs": runs}))
    else:
        print(f"median of the healthy: {statistics.median(r['healthy_s'] for r in runs):.2f} s")
    return 1 if any(r["problems"] for r in runs) else 0


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == WORKER:
        address, numel, index, n, patience = sys.argv[2:]
        worker("" if address == "-" else address, int(numel), int(index), int(n), float(patience))
        sys.exit(0)
    sys.exit(main())
