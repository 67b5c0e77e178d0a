"""A round beside a busy main thread: what training does to the exchange, and the exchange to inner steps.

    python benchmarks/busy.py --mb 100
    python benchmarks/busy.py --mb 100 --mbit 1000      root, Linux: links of 1 Gbit/s in place of the bare loopback

Two processes average a vector over loopback again and again, in the background (`all_reduce(async_op=True)`), while the
main thread of each waits, spins in pure Python (the worst case for the interpreter lock), or makes steps of torch
operations. The processors are shared, too: so each is put beside rounds in which as much work is done by two other
processes of the same priority, while the main threads wait. What is left is the lock. Steps are timed with and without
a round; what they lose there is processors and lock together.

--mbit: everything runs in a network namespace of its own, whose loopback the kernel (tbf) holds to twice that rate, for
both ways together.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from _workers import LIMIT_S, WORKER, Workers, say

from dlc.demo import free_addresses
from dlc.peer import Peer

KINDS = ("idle", "python", "torch")
MATRIX = 192
"""One step is STEP_PRODUCTS products of matrices of this size: some milliseconds, as many calls as a small layer."""
STEP_PRODUCTS = 30
SPIN = 2000
"""Turns of an empty loop between two looks at the clock."""
HELD = "DLC_BUSY_HELD"
"""Set where the loopback is held to a rate already."""
BURST_BYTES, QUEUE_MS = 1 << 18, 50
"""Of the kernel's token bucket: four of loopback's packets of 64 KiB."""
ALONE_S = 1.0
"""How long steps are timed without a round."""


def spin() -> None:
    for _ in range(SPIN):
        pass


class Steps:
    def __init__(self) -> None:
        self.a, self.b = torch.randn(MATRIX, MATRIX), torch.randn(MATRIX, MATRIX)
        self.out = torch.empty(MATRIX, MATRIX)

    def step(self) -> None:
        for _ in range(STEP_PRODUCTS):
            torch.mm(self.a, self.b, out=self.out)


def work_of(kind: str) -> Callable[[], None]:
    return {"python": spin, "torch": Steps().step}[kind]


def worker_main(arguments: list[str]) -> None:
    """`burn KIND`: works until it is ended. Else a peer, told what its main thread does in each round."""
    torch.set_num_threads(1)
    if arguments[0] == "burn":
        work = work_of(arguments[1])
        say("ready")
        while True:
            work()
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", required=True)
    parser.add_argument("--peers", default="")
    parser.add_argument("--numel", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    options = parser.parse_args(arguments)
    peer = Peer.join(options.peers, listen=options.listen, run="busy", join_timeout_s=LIMIT_S)
    vector = torch.empty(options.numel)
    say("ready")
    for line in sys.stdin:
        word, kind = line.split()
        if word == "alone":
            end = time.monotonic() + ALONE_S
            say("done", steps=timed_steps(work_of(kind), lambda end=end: time.monotonic() > end))
            continue
        vector.fill_(options.rank + 1.0)
        reduction = peer.all_reduce(vector, async_op=True)
        steps = timed_steps(work_of(kind), lambda r=reduction: r.done) if kind != "idle" else []
        report = reduction.wait(LIMIT_S)
        right = len(report.contributors) == 2 and bool((vector == 1.5).all())
        say("done", seconds=report.seconds, steps=steps, right=right)
    peer.leave()


def timed_steps(work: Callable[[], None], over: Callable[[], bool]) -> list[float]:
    """Seconds of each piece of work until it is `over`."""
    found = []
    while not over():
        begin = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin)
    return found


class Bench:
    def __init__(self, workers: Workers, numel: int) -> None:
        self.workers = workers
        addresses = free_addresses(2)
        for rank, address in enumerate(addresses):
            words = ["--listen", address, "--numel", str(numel), "--rank", str(rank)]
            workers.start(f"p{rank}", *words, *(["--peers", addresses[0]] if rank else []))
            workers.wait(f"p{rank}", "ready")
        self._burning = 0

    def all(self, line: str) -> list[dict[str, Any]]:
        for rank in range(2):
            self.workers.tell(f"p{rank}", line)
        return [self.workers.wait(f"p{rank}", "done") for rank in range(2)]

    def round(self, kind: str) -> tuple[float, list[float]]:
        """(seconds of the slowest, seconds of all steps) of a round whose main threads do this."""
        told = self.all(f"round {kind}")
        if not all(one["right"] for one in told):
            raise RuntimeError("not the mean of two")
        return max(one["seconds"] for one in told), [s for one in told for s in one["steps"]]

    def beside(self, kind: str, work: Callable[[], Any]) -> Any:
        """`work()` while two other processes do this."""
        names = [f"burn{self._burning + i}" for i in range(2)]
        self._burning += 2
        for name in names:
            self.workers.start(name, "burn", kind)
        for name in names:
            self.workers.wait(name, "ready")
        try:
            return work()
        finally:
            for name in names:
                self.workers.signal(name, 9)
                self.workers.exit_code(name)


def measure(mb: float, rounds: int) -> dict[str, Any]:
    """Medians. Rounds of all kinds take turns."""
    times: dict[str, list[float]] = {}
    steps: dict[str, list[float]] = {}
    with Workers(__file__) as workers:
        bench = Bench(workers, int(mb * 1e6 / 4))
        bench.round("idle")
        for _ in range(rounds):
            for kind in KINDS:
                seconds, found = bench.round(kind)
                times.setdefault(kind, []).append(seconds)
                steps.setdefault(kind, []).extend(found)
            for kind in KINDS[1:]:
                seconds, _ = bench.beside(kind, lambda: bench.round("idle"))
                times.setdefault(f"beside {kind}", []).append(seconds)
            alone = bench.all("alone torch")
            steps.setdefault("alone", []).extend(s for one in alone for s in one["steps"])
    medians = {kind: statistics.median(found) for kind, found in times.items()}
    means = {kind: statistics.fmean(found) for kind, found in steps.items() if found}
    return {"mb": mb, "round_s": medians, "step_s": {"alone": means["alone"], "in a round": means["torch"]}}


def held_to(mbit: float) -> int:
    """Run this again where the loopback carries `mbit` each way; its exit status."""
    missing = [tool for tool in ("unshare", "ip", "tc") if shutil.which(tool) is None]
    if missing or not sys.platform.startswith("linux") or os.geteuid() != 0:
        print(f"--mbit needs Linux, root and the commands unshare, ip and tc (missing: {', '.join(missing) or 'none'})")
        return 2
    rate = f"tc qdisc add dev lo root tbf rate {2 * mbit:g}mbit burst {BURST_BYTES} latency {QUEUE_MS}ms"
    words = [sys.executable, *sys.argv]
    env = {**os.environ, HELD: "1"}
    return subprocess.run(
        ["unshare", "--net", "sh", "-ec", f'ip link set lo up; {rate}; exec "$@"', "sh", *words], env=env
    ).returncode


def main() -> int:
    if sys.argv[1:2] == [WORKER]:
        worker_main(sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=100.0, help="MB (10^6 bytes) of fp32 per process")
    parser.add_argument("--rounds", type=int, default=7, help="of each kind (default 7)")
    parser.add_argument("--mbit", type=float, default=0.0, metavar="R", help="links of R Mbit/s (10^6 bit) each way")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    if args.mbit and HELD not in os.environ:
        return held_to(args.mbit)
    result = measure(args.mb, args.rounds)
    if args.json:
        print(json.dumps(result))
        return 0
    round_s, step_s = result["round_s"], result["step_s"]
    over = f"links of {args.mbit:g} Mbit/s" if args.mbit else "loopback"
    print(f"rounds of two processes, {args.mb:g} MB of fp32 each, fp16 over {over}, medians of {args.rounds}")
    print(f"  main threads wait                   {round_s['idle']:.3f} s")
    for kind, name in (("python", "spin in Python"), ("torch", "run torch operations")):
        beside = round_s[f"beside {kind}"]
        print(f"  main threads {name:<22} {round_s[kind]:.3f} s; {beside:.3f} s beside two processes that do it")
    print(f"a step: {1e3 * step_s['alone']:.2f} ms alone, {1e3 * step_s['in a round']:.2f} ms in a round (means)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
