"""Host memory of the outer side of training: bytes per parameter, beyond the model and its gradients.

    python benchmarks/memory.py --millions 100
    python benchmarks/memory.py --millions 25 --n 4 --round

Peers on loopback train a vector of so many fp32 parameters with `dlc.DiLoCo`; the inner step is a trifle. Read is what
Linux counts as resident in one of them: when model and inner optimizer are there, after each round, and at most during
the rounds (VmHWM). What comes to it belongs to the outer side: parameters and momentum of the swarm, the contribution,
the result, and the history of updates, which holds as many results as it has room for.

With `--round` peers only average that vector (`Peer.all_reduce`), and told is what a round takes beyond it and what was
there before. The result has to be held to vote, in wire form; parts for the span that the peer owns come from the
others. The bound is the result, 1.5 spans in wire form, and 64 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from _workers import LIMIT_S, WORKER, Workers, say
from torch import nn

import dlc
from dlc.comm.codecs import CODECS, get_codec
from dlc.comm.security import generate_run_key
from dlc.demo import free_addresses
from dlc.pacespec import OVERLAPS

SPARE_BYTES = 64e6
"""Of the bound of a round: sockets, frames on their way, buffers."""


def resident_bytes(field: str) -> int:
    """VmRSS: now; VmHWM: the most since `forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    raise OSError(f"the kernel does not tell {field}")


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


class Vector(nn.Module):
    """Parameters in pieces of 4 million, as a model has them."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        piece = 4_000_000
        sizes = [min(piece, numel - a) for a in range(0, numel, piece)]
        self.pieces = nn.ParameterList(nn.Parameter(torch.zeros(size), requires_grad=True) for size in sizes)


class Nudge(torch.optim.Optimizer):
    """Moves every parameter by a constant, without gradients and state."""

    def __init__(self, params: Any, by: float) -> None:
        super().__init__(params, {})
        self.by = by

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(self.by)


def average(options: argparse.Namespace, peer: dlc.Peer) -> None:
    """Rounds of one vector; each is told with what was resident before it, and at most in it."""
    vector = torch.full((options.numel,), 0.0)
    say("ready", before=resident_bytes("VmRSS"))
    for _ in range(options.rounds):
        sys.stdin.readline()
        vector.fill_(options.rank + 1.0)
        forget_peak()
        before = resident_bytes("VmRSS")
        report = peer.all_reduce(vector, codec=options.codec, timeout_s=LIMIT_S)
        peak = resident_bytes("VmHWM")
        right = len(report.contributors) == options.n and bool((vector == (options.n + 1) / 2).all())
        say("round", before=before, after=resident_bytes("VmRSS"), peak=peak, right=right)


def worker_main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--round", action="store_true")
    parser.add_argument("--key", required=True)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--peers", default="")
    parser.add_argument("--codec", required=True)
    parser.add_argument("--overlap", required=True)
    for name in ("--numel", "--n", "--rank", "--rounds"):
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    peers = [p for p in options.peers.split(",") if p]
    peer = dlc.Peer.join(peers, run="memory", key=options.key, listen=options.listen, join_timeout_s=LIMIT_S)
    if options.round:
        average(options, peer)
    else:
        train(options, peer)
    sys.stdin.readline()
    peer.leave()


def train(options: argparse.Namespace, peer: dlc.Peer) -> None:
    model = Vector(options.numel)
    for piece in model.pieces:
        piece.data.fill_(0.0)  # touched: resident
    # The first optimizer of a process has torch load its compiler (71 MB), with dlc or without.
    inner = Nudge(model.parameters(), by=-1e-3 * (options.rank + 1))
    before = resident_bytes("VmRSS")
    opt = dlc.DiLoCo(model, inner, peer, sync_every=1, codec=options.codec, overlap=options.overlap)
    say("ready", before=before)
    for _ in range(options.rounds):
        sys.stdin.readline()
        forget_peak()
        report = opt.step()
        say("round", after=resident_bytes("VmRSS"), peak=resident_bytes("VmHWM"), t=report.t if report else None)
    opt.flush()


def show_rounds(each: list[list[dict[str, Any]]], numel: int, args: argparse.Namespace) -> int:
    """What the round that took most of each peer took, beside the bound; 1 where it is over."""
    wrong = [one for told in each for one in told if not one["right"]]
    if wrong:
        raise RuntimeError(f"not the mean of all {args.n}: {wrong[0]}")
    result_bytes = get_codec(args.codec).wire_bytes(numel)
    bound_bytes = result_bytes + 1.5 * result_bytes / args.n + SPARE_BYTES
    beyond = [[one["peak"] - one["before"] for one in told] for told in each]
    if args.json:
        print(json.dumps({"parameters": numel, "codec": args.codec, "bound": bound_bytes, "beyond": beyond}))
    else:
        print(f"MB beyond a vector of {4e-6 * numel:g} MB, {args.n} peers, {args.codec}; bound {bound_bytes / 1e6:.0f}")
        for number, row in enumerate(beyond):
            print(f"  round {number + 1}: " + ", ".join(f"{b / 1e6:.0f}" for b in row))
    return int(max(map(max, beyond)) > bound_bytes)


def main() -> int:
    if sys.argv[1:2] == [WORKER]:
        worker_main(sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=100.0, help="parameters (default 100)")
    parser.add_argument("--n", type=int, default=2, help="peers (default 2)")
    parser.add_argument("--rounds", type=int, default=4, help="the last one is told (default 4)")
    parser.add_argument("--codec", choices=tuple(CODECS), default="fp16")
    parser.add_argument("--overlap", choices=OVERLAPS, default="none")
    parser.add_argument("--round", action="store_true", help="only average a vector, and tell what each round takes")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not Path("/proc/self/clear_refs").exists():
        print("skipped: only Linux tells the most memory that was in use")
        return 0
    numel, key = round(args.millions * 1e6), generate_run_key()
    addresses = free_addresses(args.n)
    with Workers(__file__) as workers:
        for rank, address in enumerate(addresses):
            words = ["--key", key, "--listen", address, "--codec", args.codec, "--overlap", args.overlap]
            words += ["--numel", str(numel), "--n", str(args.n), "--rank", str(rank), "--rounds", str(args.rounds)]
            words += ["--round"] if args.round else []
            workers.start(f"p{rank}", *words, *(["--peers", addresses[0]] if rank else []))
        ready = [workers.wait(f"p{rank}", "ready") for rank in range(args.n)]
        told: list[dict[str, Any]] = []
        each: list[list[dict[str, Any]]] = []
        for _ in range(args.rounds):
            for rank in range(args.n):
                workers.tell(f"p{rank}", "round")
            told = [workers.wait(f"p{rank}", "round") for rank in range(args.n)]
            each.append(told)
        for rank in range(args.n):
            workers.tell(f"p{rank}", "end")
    if args.round:
        return show_rounds(each, numel, args)
    rows = [
        {
            "after": (one["after"] - first["before"]) / numel,
            "peak": (one["peak"] - first["before"]) / numel,
        }
        for first, one in zip(ready, told, strict=True)
    ]
    if args.json:
        print(json.dumps({"parameters": numel, "codec": args.codec, "overlap": args.overlap, "bytes_each": rows}))
        return 0
    print(f"bytes per parameter beyond the model, {args.millions:g} million of them, round {args.rounds}:")
    for rank, row in enumerate(rows):
        print(f"  peer {rank}: {row['after']:.1f} after it, {row['peak']:.1f} at most in it")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("MALLOC_ARENA_MAX", "2")
    sys.exit(main())
