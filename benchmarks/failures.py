"""What one failure costs in a real round: four processes average 100 MB on loopback, and one fails in the middle.

    python benchmarks/failures.py --n 4 --mb 100 --repeats 3

| kind        | in the middle of the reduction                                                       |
|-------------|--------------------------------------------------------------------------------------|
| owner       | SIGKILL of a peer that contributes and owns chunks, and does not coordinate          |
| coordinator | SIGKILL of the peer that coordinates (it contributes and owns chunks too)            |
| freeze      | SIGSTOP; SIGCONT after the round, and the peer has to take part again by itself      |
| leave       | a peer announces that it leaves                                                      |

Each repeat starts a fresh swarm, warms it up, times undisturbed rounds and then one with the failure, which comes when
the peer that fails has finished half of its own span. It tells the moment (all processes read one clock) and the chunks
that it owned and had not finished, its *lost span*. Compared are the time beyond the undisturbed round, and the bound
for it: the time until the *first* survivor took that peer for dead or gone, plus the lost span's part of an undisturbed
round. The bound with the *last* survivor's time stands beside it: each owner waits for missing parts until it knows.

Peer i contributes value_i * pattern with weight_i, all exact in fp16, and the weighted mean of every subset of peers is
another multiple of the pattern. So the values themselves tell, chunk by chunk, who is in; that must be one subset
throughout a chunk, must agree with the fractions in the RoundReport, and all survivors must hold the same bits.
MB = 10^6 bytes of fp32.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import signal
import statistics
import sys
import threading
from typing import Any

from _workers import WORKER, WorkerLost, Workers, say

KINDS = ("owner", "coordinator", "freeze", "leave")
WEIGHTS = (8.0, 1.0, 4.0, 3.0, 5.0, 7.0)
VALUES = (2.0, 22.0, 31.0, 1.0, 23.0, 7.0)
"""By peer. With these every subset of peers has another mean (checked in `subset_means`)."""
HALF_ULP = 2.0**-11
"""Relative error of one rounding to fp16; the mean is rounded once."""
CALM_ROUNDS = 3
"""Undisturbed rounds before each failure; their median is compared."""
ROUND_LIMIT_S = 120.0
DETECTION_LIMIT_S = 3.0
"""What is asked for a killed process among four."""
RETURN_ROUNDS_MAX = 5
"""Rounds within which a peer that was frozen has to be counted again."""


def subset_means(n: int) -> dict[float, frozenset[int]]:
    """The multiple of the pattern that each subset of n peers gives; raises if two could be taken for each other."""
    means: dict[float, frozenset[int]] = {}
    for size in range(1, n + 1):
        for subset in itertools.combinations(range(n), size):
            mean = sum(WEIGHTS[i] * VALUES[i] for i in subset) / sum(WEIGHTS[i] for i in subset)
            if any(abs(mean - other) < 4 * HALF_ULP * mean for other in means):
                raise ValueError(f"the peers {subset} cannot be told from others")
            means[mean] = frozenset(subset)
    return means


# ---------------------------------------------------------------------- a worker


def worker(peers: str, numel: int, index: int, n: int) -> None:
    """One peer; see `Work`."""
    import torch

    torch.set_num_threads(1)
    work = Work(peers, numel, index, n)
    say("address", address=work.peer.address, peer=work.peer.id)
    for line in sys.stdin:
        word, *rest = line.split()
        if word == "alive":
            say("alive", count=sum(m.alive for m in work.peer.members()))
        elif word == "arm":
            work.arm(rest[0], set(rest[1:]))
        elif word == "round":
            work.round()
    work.peer.leave()


class Work:
    def __init__(self, peers: str, numel: int, index: int, n: int, patience: float = 1.0) -> None:
        import torch

        from dlc.comm.clock import clock
        from dlc.comm.timeouts import Timeouts
        from dlc.peer import Peer

        self.clock, self.index, self.n = clock, index, n
        self.trace: list[tuple[float, str, str]] = []
        """(clock, what, of whom): what this peer noticed in this round."""
        usual = Timeouts()
        patient = {name: patience * getattr(usual, name) for name in ("probe_s", "chunk_s", "commit_s")}
        timeouts = dataclasses.replace(usual, **patient, beat_s=max(usual.beat_s, patient["probe_s"]))
        self.peer = Peer.join(peers, join_timeout_s=120, on_event=self._event, timeouts=timeouts)
        self.pattern = 1 + torch.randint(0, 32, (numel,), generator=torch.Generator().manual_seed(1)) / 32
        self.vector = torch.empty(numel)
        self.peer._ask(self._watch)

    def _event(self, event: object) -> None:
        name = type(event).__name__
        if name.startswith("Member"):
            self.trace.append((self.clock(), name, getattr(event, "voter").peer))  # noqa: B009
        elif name == "RoundDone":
            self.trace.append((self.clock(), "applied", ""))

    def _watch(self, node: Any, now: float) -> None:
        """Note when a plan begins, and when this peer votes."""
        begin, vote = node.exchange.begin, node.slot._send_vote

        def noted_begin(plan: Any, *rest: Any) -> None:
            self.trace.append((self.clock(), f"plan {plan.ballot.counter}", plan.ballot.voter.peer))
            begin(plan, *rest)

        def noted_vote() -> None:
            self.trace.append((self.clock(), f"vote {node.slot.accepted[0].counter}", ""))
            vote()

        node.exchange.begin, node.slot._send_vote = noted_begin, noted_vote

    def arm(self, kind: str, others: set[str]) -> None:
        """Fail in the middle of the next round; `others`: the ids of all peers."""
        from dlc.cli.fault import strike, unfinished

        first: list[Any] = []

        def ripe(node: Any) -> bool:
            exchange = node.exchange
            plan = exchange.plan
            if plan is None or plan.ballot not in (first or [plan.ballot]):
                return False  # in a later ballot another peer coordinates: one failure is enough
            first[:] = [plan.ballot]
            span = sum(owner >= 0 and plan.owners[owner] == node.me for owner in plan.assignment)
            if not 0 < 2 * unfinished(node) <= span:
                return False
            coordinator = plan.ballot.voter.peer
            victim = coordinator if kind == "coordinator" else min(others - {coordinator})
            return bool(victim == node.me.peer)

        def fail(node: Any) -> None:
            lost, chunks = unfinished(node), len(node.exchange.plan.assignment)
            say("fault", at=self.clock(), lost=lost, chunks=chunks, peer=node.me.peer)
            if kind == "leave":
                threading.Thread(target=self.peer.leave).start()
            else:
                os.kill(os.getpid(), signal.SIGSTOP if kind == "freeze" else signal.SIGKILL)

        strike(self.peer, ripe, fail)

    def round(self) -> None:
        import torch

        from dlc.errors import DlcError

        torch.mul(self.pattern, VALUES[self.index], out=self.vector)
        self.trace.clear()
        began = self.clock()
        try:
            report = self.peer.all_reduce(self.vector, weight=WEIGHTS[self.index], timeout_s=ROUND_LIMIT_S)
        except DlcError as error:
            say("round", error=f"{type(error).__name__}: {error}")
            return
        ended = self.clock()
        say("round", began=began, ended=ended, report=report.to_dict(), trace=self.trace, **self._look())

    def _look(self) -> dict[str, Any]:
        """Who is in each chunk, by the values; and a hash of all bits."""
        from blake3 import blake3

        from dlc.comm.grid import usual_chunk_elems

        means, included, wrong = subset_means(self.n), [], 0
        elems = usual_chunk_elems(self.vector.numel(), "fp16", self.peer.spec.chunk_elems)
        for start in range(0, self.vector.numel(), elems):
            part = self.vector[start : start + elems] / self.pattern[start : start + elems]
            low, high = float(part.min()), float(part.max())
            mean = min(means, key=lambda m: abs(m - low))
            wrong += low < mean * (1 - 1.01 * HALF_ULP) or high > mean * (1 + 1.01 * HALF_ULP)
            included.append((part.numel(), sorted(means[mean])))
        return {
            "bits": blake3(self.vector.numpy().view("uint8")).hexdigest(),
            "included": included,
            "wrong_chunks": wrong,
        }


# ---------------------------------------------------------------------- the benchmark


class Swarm:
    """N workers of one run, warmed up."""

    def __init__(self, workers: Workers, n: int, numel: int) -> None:
        self.workers, self.n = workers, n
        self.names = [f"w{i}" for i in range(n)]
        workers.start("w0", "-", str(numel), "0", str(n))
        first = workers.wait("w0", "address")
        for index, name in enumerate(self.names[1:], 1):
            workers.start(name, first["address"], str(numel), str(index), str(n))
        hello = {"w0": first} | {name: workers.wait(name, "address") for name in self.names[1:]}
        self.peer_of = {name: str(hello[name]["peer"]) for name in self.names}
        for _ in range(2):
            self.round(self.names)

    def round(self, names: list[str]) -> dict[str, dict[str, Any]]:
        """One all-reduce of these; what each one told."""
        for name in names:
            self.workers.tell(name, "round")
        return self.results(names)

    def results(self, names: list[str]) -> dict[str, dict[str, Any]]:
        return {name: self.workers.wait(name, "round") for name in names}


def measure(kind: str, n: int, numel: int) -> dict[str, Any]:
    """A fresh swarm: one undisturbed round, one with the failure; and the checks."""
    with Workers(__file__) as workers:
        swarm = Swarm(workers, n, numel)
        rounds = [swarm.round(swarm.names) for _ in range(CALM_ROUNDS)]
        problems = [problem for calm in rounds for problem in check(calm, swarm.peer_of, n, n)]
        for name in swarm.names:
            workers.tell(name, f"arm {kind} {' '.join(swarm.peer_of.values())}")
        for name in swarm.names:
            workers.tell(name, "round")
        victim, fault = workers.any_of(swarm.names, "fault")
        survivors = [name for name in swarm.names if name != victim]
        hit = swarm.results(survivors)
        problems += check(hit, swarm.peer_of, n, n - 1)
        back: dict[str, Any] = {}
        if kind == "freeze":
            back = come_back(swarm, victim)
            problems += back.pop("problems")
        undisturbed_s = statistics.median(seconds(calm) for calm in rounds)
        return {"kind": kind, "problems": problems, **back, **figures(undisturbed_s, hit, fault)}


def come_back(swarm: Swarm, victim: str) -> dict[str, Any]:
    """Wake the frozen peer; how many rounds it takes until it is counted again."""
    swarm.workers.signal(victim, signal.SIGCONT)
    woken = swarm.workers.wait(victim, "round")
    told = woken.get("error") or "had the round's mean"
    for rounds in range(1, RETURN_ROUNDS_MAX + 1):
        results = swarm.round(swarm.names)
        if all("report" in r and len(r["report"]["contributors"]) == swarm.n for r in results.values()):
            problems = check(results, swarm.peer_of, swarm.n, swarm.n)
            return {"woken": told, "rounds_to_return": rounds, "problems": problems}
    return {"woken": told, "problems": [f"the frozen peer was not counted in {RETURN_ROUNDS_MAX} rounds: {results}"]}


def seconds(results: dict[str, dict[str, Any]]) -> float:
    """From the first that began to the last that had the mean."""
    return float(max(r["ended"] for r in results.values()) - min(r["began"] for r in results.values()))


def figures(undisturbed: float, hit: dict[str, Any], fault: dict[str, Any]) -> dict[str, Any]:
    signs = {"MemberDown", "MemberLeft"}
    noticed = []  # by each survivor itself; who had the mean before did not need to
    for result in hit.values():
        downs = [at for at, what, peer in result["trace"] if what in signs and peer == fault["peer"]]
        noticed.append(min([*downs, result["ended"]]) - fault["at"])
    disturbed = seconds(hit)
    span = undisturbed * fault["lost"] / fault["chunks"]
    some = next(iter(hit.values()))["report"]
    return {
        "undisturbed_s": undisturbed,
        "disturbed_s": disturbed,
        "beyond_s": disturbed - undisturbed,
        "detection_s": min(noticed),
        "detection_last_s": max(noticed),
        "lost_span_s": span,
        "bound_s": min(noticed) + span,
        "bound_last_s": max(noticed) + span,
        "ballots": max(r["report"]["ballots"] for r in hit.values()),
        "missing": [{"reason": m["reason"], "fraction": round(m["fraction"], 3)} for m in some["missing"]],
        "trace": {
            name: [[round(at - fault["at"], 3), what, peer[:6]] for at, what, peer in result["trace"]]
            for name, result in hit.items()
        },
    }


def check(results: dict[str, dict[str, Any]], peer_of: dict[str, str], n: int, whole: int) -> list[str]:
    """What is wrong with a round: `whole` of the n peers must be in every element."""
    problems = [f"{name}: {r['error']}" for name, r in results.items() if "error" in r]
    good = {name: r for name, r in results.items() if "error" not in r}
    if len({r["bits"] for r in good.values()}) > 1:
        problems.append("the survivors' bits differ")
    index_of = {peer_of[f"w{i}"]: i for i in range(n)}
    for name, r in good.items():
        if r["wrong_chunks"]:
            problems.append(f"{name}: {r['wrong_chunks']} chunks are no weighted mean of any peers")
        total = sum(numel for numel, _ in r["included"])
        shares = {index_of[s["peer"]]: s["fraction"] for s in r["report"]["contributors"]}
        for i in range(n):
            seen = sum(numel for numel, subset in r["included"] if i in subset) / total
            if abs(seen - shares.get(i, 0.0)) > 1e-6:
                problems.append(f"{name}: the report says {shares.get(i, 0.0):.4f} of peer {i}, the values {seen:.4f}")
        if sum(share == 1.0 for share in shares.values()) < whole:
            problems.append(f"{name}: only {shares} were in, {whole} living peers should be wholly in")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=4, help="processes (default 4)")
    parser.add_argument("--mb", type=float, default=100.0, help="MB (10^6 bytes) of fp32 per process (default 100)")
    parser.add_argument("--repeats", type=int, default=3, help="fresh swarms for each kind of failure (default 3)")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}; default all")
    parser.add_argument("--json", action="store_true", help="print one JSON object, with the trace of each survivor")
    args = parser.parse_args()
    kinds = args.kinds.split(",")
    if not 3 <= args.n <= len(WEIGHTS) or not set(kinds) <= set(KINDS):
        parser.error(f"--n must lie in 3 to {len(WEIGHTS)}, --kinds in {', '.join(KINDS)}")
    runs: list[dict[str, Any]] = []
    for _ in range(args.repeats):  # the kinds in turn, so that a busy spell of the machine hits all
        for kind in kinds:
            try:
                runs.append(measure(kind, args.n, int(args.mb * 1e6 / 4)))
            except WorkerLost as lost:
                runs.append({"kind": kind, "problems": [str(lost)]})
            if not args.json:
                tell(runs[-1])
    medians = [median_of(kind, [r for r in runs if r["kind"] == kind and "beyond_s" in r]) for kind in kinds]
    held = not any(r["problems"] for r in runs) and all(m.get("held") for m in medians)
    if args.json:
        print(json.dumps({"n": args.n, "mb": args.mb, "medians": medians, "runs": runs, "held": held}))
    else:
        table(args, medians)
    return 0 if held else 1


def median_of(kind: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    if not runs:
        return {"kind": kind, "runs": 0, "held": False}
    names = [key for key, value in runs[0].items() if key.endswith("_s") and isinstance(value, float)]
    medians = {name: statistics.median(r[name] for r in runs) for name in names}
    fast = kind not in ("owner", "coordinator") or medians["detection_s"] < DETECTION_LIMIT_S
    return {"kind": kind, "runs": len(runs), **medians, "held": fast and medians["beyond_s"] <= medians["bound_s"]}


def tell(run: dict[str, Any]) -> None:
    print(f"{run['kind']}:", *run["problems"] or ["values, bits and reports hold"], sep="\n  ")
    if "beyond_s" in run:
        print(f"  report: ballots {run['ballots']}, missing {run['missing']}", flush=True)
    if "woken" in run:
        print(f"  woken: {run['woken']}; counted again in round {run.get('rounds_to_return')}", flush=True)


def table(args: argparse.Namespace, medians: list[dict[str, Any]]) -> None:
    print(f"\n{args.n} processes, {args.mb:g} MB of fp32 each, fp16, loopback; medians of {args.repeats}, in s")
    print("kind         undisturbed  with failure  beyond  detected first/last  lost span  bound first/last  held")
    for m in medians:
        if "beyond_s" not in m:
            print(f"{m['kind']:<12} no run was completed")
            continue
        print(
            f"{m['kind']:<12} {m['undisturbed_s']:11.2f}  {m['disturbed_s']:12.2f}  {m['beyond_s']:6.2f}"
            f"  {m['detection_s']:10.2f} / {m['detection_last_s']:.2f}     {m['lost_span_s']:6.2f}"
            f"  {m['bound_s']:9.2f} / {m['bound_last_s']:.2f}"
            f"  {'yes' if m['held'] else 'NO'}"
        )


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == WORKER:
        worker("" if sys.argv[2] == "-" else sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
        sys.exit(0)
    sys.exit(main())
