"""Time dlc's all-reduce beside torch.distributed's Gloo on loopback, in one run.

    python benchmarks/allreduce.py --n 4 --mb 100 --rounds 7

N processes hold a fp32 vector each and average it again and again; a round's time is that of the slowest process, from
the common start to the mean in its own tensors, and its processor time that of all processes together. Ours and Gloo's
runs are interleaved; medians and their ratio are printed. Every mean is checked. MB = 10^6 bytes of fp32.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import _gloo

WORKER = "--worker"
CLOSE_S = 30.0


def worker(peers: str, numel: int, codec: str, index: int, key: str, size: float) -> None:
    """One peer: prints its address, then a line per round that standard input asks for."""
    import torch

    from dlc.addresses import LOOPBACK
    from dlc.peer import Peer

    torch.set_num_threads(1)
    peer = Peer.join(peers, key=key or None, listen=LOOPBACK, join_timeout_s=60)
    print(peer.address, flush=True)
    vector = torch.empty(numel)
    background_s = time.process_time() - time.thread_time()
    for line in sys.stdin:
        if line.startswith("members"):
            print(sum(m.alive for m in peer.members()), flush=True)
            continue
        vector.fill_(size * (index + 1))
        start, used_s = time.perf_counter(), time.thread_time()
        report = peer.all_reduce(vector, codec=codec, timeout_s=120)
        seconds, used_s = time.perf_counter() - start, time.thread_time() - used_s
        mean = float(vector[0])
        same = bool((vector == mean).all())
        background_s, before_s = time.process_time() - time.thread_time(), background_s  # since the last round
        result = {
            "seconds": seconds,
            "cpu_s": used_s + background_s - before_s,
            "mean": mean / size,
            "same": same,
        }
        result["contributors"] = len(report.contributors)
        print(json.dumps(result | {"sent": report.bytes_sent, "reduce_s": report.reduce_s}), flush=True)
    peer.leave()


class Swarm:
    """N worker processes."""

    def __init__(self, n: int, numel: int, codec: str, key: str = "", size: float = 1.0) -> None:
        self.n = n
        self.workers: list[subprocess.Popen[str]] = []
        address = "-"
        try:
            for index in range(n):
                command = [sys.executable, __file__, WORKER, address, str(numel), codec, str(index), key, str(size)]
                environment = os.environ | {"OMP_NUM_THREADS": "1"}
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
                )
                self.workers.append(process)
                mine = self._line(process)
                address = mine if index == 0 else address
        except BaseException:
            self.close()
            raise

    def round(self) -> tuple[float, float]:
        """One all-reduce: (seconds of the slowest, processor seconds of all). Raises if a mean is wrong."""
        for process in self.workers:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        results = [json.loads(self._line(p)) for p in self.workers]
        mean = (self.n + 1) / 2
        for result in results:
            if result["contributors"] != self.n or not result["same"] or abs(result["mean"] - mean) > 1e-2 * mean:
                raise RuntimeError(f"not the mean of {self.n} peers: {result}")
        return max(float(r["seconds"]) for r in results), sum(float(r["cpu_s"]) for r in results)

    def close(self) -> None:
        """Ask all to leave; those that have not after CLOSE_S are killed."""
        for process in self.workers:
            assert process.stdin is not None
            process.stdin.close()
        end = time.monotonic() + CLOSE_S
        for process in self.workers:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @staticmethod
    def _line(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"a worker ended with exit status {process.wait(10)}")
        return line


def compare(n: int, mb: float, rounds: int, codec: str, repeats: int, size: float) -> dict[str, object]:
    numel = int(mb * 1e6 / 4)
    ours: list[tuple[float, float]] = []
    gloo: list[tuple[float, float]] = []
    per_repeat = max(1, rounds // repeats)
    for _ in range(repeats):
        swarm = Swarm(n, numel, codec, size=size)
        try:
            swarm.round()
            swarm.round()
            ours += [swarm.round() for _ in range(per_repeat)]
        finally:
            swarm.close()
        gloo += zip(*_gloo.run(n, mb, per_repeat), strict=True)
    (dlc_s, dlc_cpu_s), (gloo_s, gloo_cpu_s) = (
        tuple(statistics.median(column) for column in zip(*rows, strict=True)) for rows in (ours, gloo)
    )
    return {
        "n": n,
        "mb": mb,
        "codec": codec,
        "dlc_s": dlc_s,
        "dlc_cpu_s": dlc_cpu_s,
        "dlc_all_s": [s for s, _ in ours],
        "gloo_fp32_s": gloo_s,
        "gloo_cpu_s": gloo_cpu_s,
        "gloo_all_s": [s for s, _ in gloo],
        "gloo_over_dlc": gloo_s / dlc_s,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=4, help="processes")
    parser.add_argument("--mb", type=float, default=100.0, help="MB (10^6 bytes) of fp32 per process")
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds of each")
    parser.add_argument("--repeats", type=int, default=3, help="turns that ours and Gloo's rounds are divided into")
    parser.add_argument("--codec", choices=("fp32", "fp16", "bf16"), default="fp16")
    parser.add_argument("--size", type=float, default=1.0, help="the vectors hold 1 to N times so much")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    result = compare(args.n, args.mb, args.rounds, args.codec, args.repeats, args.size)
    if args.json:
        print(json.dumps(result))
        return 0
    print(f"{args.n} processes, {args.mb:g} MB of fp32 each, loopback, medians of {len(result['dlc_all_s'])} rounds")
    print(f"  dlc {args.codec:<6} {result['dlc_s']:.3f} s, {result['dlc_cpu_s']:.3f} s of processors")
    print(f"  Gloo fp32  {result['gloo_fp32_s']:.3f} s, {result['gloo_cpu_s']:.3f} s of processors", end="")
    print(f"   ({result['gloo_over_dlc']:.2f} x the time of dlc)")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    if len(sys.argv) > 1 and sys.argv[1] == WORKER:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal tells all; who started us closes standard input
        listed = "" if sys.argv[2] == "-" else sys.argv[2]
        worker(listed, int(sys.argv[3]), sys.argv[4], int(sys.argv[5]), sys.argv[6], float(sys.argv[7]))
        sys.exit(0)
    sys.exit(main())
