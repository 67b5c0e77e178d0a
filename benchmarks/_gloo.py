"""Time `torch.distributed` Gloo all-reduce on loopback: the engine that `allreduce.py` is measured against.

    python benchmarks/_gloo.py --n 4 --mb 100 --rounds 5

starts n processes of this file, which meet through a file in a temporary directory, sum an fp32 vector of `mb`
megabytes (10^6 bytes) `rounds` times after the warm-up, and check the sum. Prints one line of JSON:

    {"n": 4, "mb": 100.0, "seconds": [0.13, ...], "cpu_s": [0.24, ...]}

Two numbers per round: the slowest process, from a common barrier to the sum being there; and the processor time that
all processes took together. Filling the vector before and checking it afterwards is in neither. The exit status is 1,
with the reason on standard error, when a process fails or the deadline passes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

LOOPBACK = {"darwin": "lo0"}.get(sys.platform, "lo")
"""Gloo picks the interface of the host's name unless told; that need not be loopback."""


def main() -> int:
    options = _options()
    if options.rank is not None:
        _work(options)
        return 0
    try:
        seconds, cpu_s = run(
            options.n, options.mb, options.rounds, options.warmup, options.threads, options.deadline_s, options.wire
        )
    except RuntimeError as error:
        print(f"_gloo.py: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"n": options.n, "mb": options.mb, "seconds": seconds, "cpu_s": cpu_s}))
    return 0


def run(
    n: int, mb: float, rounds: int, warmup: int = 2, threads: int = 1, deadline_s: float = 300.0, wire: str = "fp32"
) -> tuple[list[float], list[float]]:
    """(seconds, processor seconds) of each round, by n fresh processes; RuntimeError when one fails or the deadline
    passes."""
    shape = [
        f"--wire={wire}",
        f"--n={n}",
        f"--mb={mb}",
        f"--rounds={rounds}",
        f"--warmup={warmup}",
        f"--threads={threads}",
    ]
    with tempfile.TemporaryDirectory(prefix="gloo-") as folder:
        command = [sys.executable, str(Path(__file__).resolve()), *shape, f"--deadline-s={deadline_s}"]
        command.append(f"--meet={Path(folder, 'meet')}")
        environment = {"GLOO_SOCKET_IFNAME": LOOPBACK, **os.environ}
        workers: list[subprocess.Popen[str]] = []
        try:
            for rank in range(n):
                with open(Path(folder, f"{rank}.err"), "w") as errors:
                    workers.append(
                        subprocess.Popen(
                            [*command, f"--rank={rank}"],
                            env=environment,
                            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                            stderr=errors,
                            text=True,
                        )
                    )
            return _wait(workers, Path(folder), time.monotonic() + deadline_s)
        finally:
            for worker in workers:
                worker.kill()
                worker.communicate()


def _wait(workers: list[subprocess.Popen[str]], folder: Path, end: float) -> tuple[list[float], list[float]]:
    """The times that rank 0 prints, once every worker has ended well."""
    printed, late = "", None
    for rank, worker in enumerate(workers):
        try:
            out, _ = worker.communicate(timeout=max(0.0, end - time.monotonic()))
            printed = printed or (out or "")
        except subprocess.TimeoutExpired:
            late = rank if late is None else late
    for rank, worker in enumerate(workers):  # one that failed explains those that wait for it
        if worker.returncode not in (None, 0):
            tail = Path(folder, f"{rank}.err").read_text()[-2000:].strip()
            raise RuntimeError(f"rank {rank} ended with status {worker.returncode}:\n{tail}")
    if late is not None:
        raise RuntimeError(f"rank {late} was not done at the deadline")
    seconds, cpu_s = json.loads(printed)
    return seconds, cpu_s


def _work(options: argparse.Namespace) -> None:
    """One process: `--rank` of `--n`."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(options.threads)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{options.meet}",
        rank=options.rank,
        world_size=options.n,
        timeout=timedelta(seconds=options.deadline_s),
    )
    x = torch.empty(max(1, round(options.mb * 1e6 / 4)))
    half = torch.empty_like(x, dtype=torch.bfloat16) if options.wire == "bf16" else x
    elapsed = torch.zeros(options.warmup + options.rounds, dtype=torch.float64)
    used = torch.zeros_like(elapsed)
    for turn in range(len(elapsed)):
        x.fill_(options.rank + 1)
        dist.barrier()
        start, used_before = time.perf_counter(), time.process_time()
        if options.wire == "bf16":
            half.copy_(x)
            dist.all_reduce(half)
            x.copy_(half)
        else:
            dist.all_reduce(x)
        elapsed[turn] = time.perf_counter() - start
        used[turn] = time.process_time() - used_before
        low, high = torch.aminmax(x)
        if not float(low) == float(high) == options.n * (options.n + 1) / 2:
            raise AssertionError(f"wrong sum: {float(low)} to {float(high)}")
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    dist.all_reduce(used)
    if options.rank == 0:
        print(json.dumps([times[options.warmup :].tolist() for times in (elapsed, used)]))
    dist.destroy_process_group()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time Gloo all-reduce on loopback; prints JSON.")
    parser.add_argument("--n", type=at_least_1, default=4, help="processes (default 4)")
    parser.add_argument("--mb", type=float, default=100.0, help="fp32 vector in 10^6 bytes (default 100)")
    parser.add_argument("--rounds", type=at_least_1, default=5, help="timed rounds (default 5)")
    parser.add_argument("--warmup", type=int, default=2, help="rounds before them (default 2)")
    parser.add_argument("--threads", type=at_least_1, default=1, help="torch threads per process (default 1)")
    parser.add_argument("--wire", choices=("fp32", "bf16"), default="fp32", help="bf16: converted before and after")
    parser.add_argument("--deadline-s", type=float, default=300.0, help="for everything (default 300)")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meet", help=argparse.SUPPRESS)
    return parser.parse_args()


def at_least_1(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
