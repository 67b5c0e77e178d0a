"""From GPU to GPU: an all-reduce of two processes on one host, and what encoding and copying take of it.

    python benchmarks/gpu_allreduce.py                 # 4 GB of fp32 each, in fp16
    python benchmarks/gpu_allreduce.py --cpu-small     # a try-out on the CPU

Each process averages one vector of a CUDA device (the two share it where there is one only), over loopback. Besides,
alone on the device, medians of passes over the same vector, in GB/s of fp32 (10^9 bytes):

    copy        within the device: the limit of whatever reads and writes all of it
    encode      within the device
    payloads    encoded there and in the host's memory, as a round has it
    fetched     the vector in pinned memory of the host: what the copy of numbers that are not encoded takes
    host        encoded by one thread of the host, where the vector is in its memory
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from _workers import LIMIT_S, WORKER, Workers, say

from dlc.comm.encoded import Encoded, part_elems
from dlc.comm.grid import Grid, usual_chunk_elems
from dlc.demo import free_addresses
from dlc.peer import Peer

PASSES = 7
PATIENCE_S = 300.0
CODECS = ("fp16", "bf16", "int8", "int4")


def device_of(rank: int, cpu: bool) -> torch.device:
    return torch.device("cpu") if cpu else torch.device("cuda", rank % torch.cuda.device_count())


def idle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def worker_main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", required=True)
    parser.add_argument("--peers", default="")
    parser.add_argument("--numel", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--codec", required=True)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    device = device_of(options.rank, options.cpu)
    peer = Peer.join(options.peers, listen=options.listen, run="gpu", join_timeout_s=LIMIT_S)
    vector = torch.empty(options.numel, device=device)
    say("ready")
    for _ in sys.stdin:
        vector.fill_(options.rank + 1.0)
        idle(device)
        begin = time.perf_counter()
        report = peer.all_reduce(vector, codec=options.codec, timeout_s=LIMIT_S, patience_s=PATIENCE_S)
        idle(device)
        seconds = time.perf_counter() - begin
        largest = (vector - 1.5).abs_().max().item()
        say("done", seconds=seconds, exchange=report.seconds, n=len(report.contributors), off=largest)
    peer.leave()


def rounds(numel: int, codec: str, n: int, cpu: bool) -> dict[str, Any]:
    """Seconds of `n` rounds after one that is not counted, each of the slower of the two."""
    with Workers(__file__) as workers:
        addresses = free_addresses(2)
        for rank, address in enumerate(addresses):
            words = ["--listen", address, "--numel", str(numel), "--rank", str(rank), "--codec", codec]
            words += ["--peers", addresses[0]] * bool(rank) + ["--cpu"] * cpu
            workers.start(f"p{rank}", *words)
            workers.wait(f"p{rank}", "ready")
        found = []
        for _ in range(n + 1):
            for rank in range(2):
                workers.tell(f"p{rank}", "round")
            told = [workers.wait(f"p{rank}", "done") for rank in range(2)]
            if any(one["n"] != 2 or one["off"] > 0.2 for one in told):
                raise RuntimeError(f"not the mean of two: {told}")
            found.append(tuple(max(one[key] for one in told) for key in ("seconds", "exchange")))
    seconds, exchange = zip(*found[1:], strict=True)
    return {"seconds": statistics.median(seconds), "exchange_s": statistics.median(exchange), "all": list(seconds)}


def passes(numel: int, codec: str, device: torch.device) -> dict[str, float]:
    """GB/s of fp32 of each piece of work that the docstring names."""
    grid = Grid(numel, usual_chunk_elems(numel, codec), codec)
    coder, elems = grid.coder, part_elems(grid, device)
    vector = torch.randn(numel, generator=torch.Generator(device).manual_seed(0), device=device)
    other, n_rows = torch.empty_like(vector), elems // grid.chunk_elems
    payloads = torch.empty((n_rows, coder.wire_bytes(grid.chunk_elems)), dtype=torch.uint8, device=device)
    pinned = torch.empty(elems, device="cpu", pin_memory=device.type == "cuda")
    host, scratch = torch.ones(elems), torch.empty(elems)
    parts = vector.split(elems)
    whole = [part.view(n_rows, -1) for part in parts if part.numel() == elems]

    def encode() -> None:
        for part in whole:
            coder.encode_rows(part, payloads)

    def fetch() -> None:
        for part in parts:
            pinned[: part.numel()].copy_(part, non_blocking=True)

    def on_host() -> None:
        for chunk in host.split(grid.chunk_elems):
            coder.encode(chunk, scratch)

    return {
        "copy": rate(lambda: other.copy_(vector), numel, device),
        "encode": rate(encode, elems * len(whole), device),
        "payloads": rate(lambda: Encoded(grid, parts), numel, device),
        "fetched": rate(fetch, numel, device),
        "host": rate(on_host, elems, torch.device("cpu")),
    }


def rate(work: Callable[[], object], numel: int, device: torch.device) -> float:
    """GB/s of `numel` fp32 numbers: the median of PASSES, from an idle device to an idle device, after one before."""
    work()
    times = []
    for _ in range(PASSES):
        idle(device)
        begin = time.perf_counter()
        work()
        idle(device)
        times.append(time.perf_counter() - begin)
    return 4e-9 * numel / statistics.median(times)


def table(result: dict[str, Any]) -> str:
    lines = [f"{result['device']}, torch {result['torch']}; {result['mb']:g} MB of fp32"]
    lines += [
        "",
        "| codec | copy | encode | of the copy | payloads | fetched | host |",
        "|---|---|---|---|---|---|---|",
    ]
    for codec, of in result["gb_per_s"].items():
        own = f"| {codec} | {of['copy']:.3g} | {of['encode']:.3g} | {of['encode'] / of['copy']:.0%} "
        lines.append(f"{own}| {of['payloads']:.3g} | {of['fetched']:.3g} | {of['host']:.3g} |")
    lines += ["", "| all-reduce of two processes | device to device | of it the exchange |", "|---|---|---|"]
    for codec, of in result["rounds"].items():
        lines.append(f"| {codec} | {of['seconds']:.3f} s | {of['exchange_s']:.3f} s |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == [WORKER]:
        worker_main(words[1:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=4000.0, help="MB (10^6 bytes) of fp32 per process")
    parser.add_argument("--rounds", type=int, default=5, help="of each codec (default 5)")
    parser.add_argument("--codecs", default="fp16", help=f"of {', '.join(CODECS)} for the rounds; parted by commas")
    parser.add_argument("--cpu-small", action="store_true", help="a try-out on the CPU with 8 MB")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(words)
    if unknown := [codec for codec in args.codecs.split(",") if codec not in CODECS]:
        parser.error(f"no such codec: {', '.join(unknown)}; there are {', '.join(CODECS)}")
    if not args.cpu_small and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here; --cpu-small tries the benchmark out on the CPU")
    mb = 8.0 if args.cpu_small else args.mb
    numel, device = int(mb * 1e6 / 4), device_of(0, args.cpu_small)
    result = {
        "device": "a try-out on the CPU, which says nothing about GPUs"
        if args.cpu_small
        else f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(device)}",
        "torch": torch.__version__,
        "mb": mb,
        "gb_per_s": {codec: passes(numel, codec, device) for codec in CODECS},
    }
    if device.type == "cuda":
        torch.cuda.empty_cache()
    result["rounds"] = {codec: rounds(numel, codec, args.rounds, args.cpu_small) for codec in args.codecs.split(",")}
    print(json.dumps(result) if args.json else table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
