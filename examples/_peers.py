"""What the examples share: two peers on this machine, or one peer of a run on several.

python examples/NAME.py                              two peers here, one in a process of its own
python examples/NAME.py --found --key-file run.key --listen 0.0.0.0:4600              the first of a run on several
python examples/NAME.py --peers HOST:PORT --key-file run.key --listen 0.0.0.0:4600 --shard 1    the second

Training begins when both are there, or as many as --size says to each of them.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

import dlc

Train = Callable[[dlc.Peer, int], Iterable[Tensor]]
"""Takes a peer and the number of its share of the data; returns what the peers then have in common."""
JOIN_S = 60.0
LOOK_S = 0.1


def run(train: Train) -> None:
    """Parse the command line, join, and train."""
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, epilog=__doc__)
    parser.add_argument("--found", action="store_true", help="found a run that others join")
    parser.add_argument("--peers", default="", help="HOST:PORT of a peer of the run; default: two peers here")
    parser.add_argument("--key-file", type=Path, help="made by `dlc key`")
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--shard", type=int, default=0, help="which share of the data is trained")
    parser.add_argument("--size", type=int, default=2, help="peers that training waits for, this one among them")
    args = parser.parse_args()
    if args.found or args.peers:
        limit_s = JOIN_S if args.peers else None
        with dlc.Peer.join(args.peers, key=args.key_file, listen=args.listen, join_timeout_s=limit_s) as peer:
            print(f"others join with --peers {peer.address}", flush=True)
            _wait_for(peer, args.size)
            _tell(peer, train(peer, args.shard))
            peer.barrier("end")
    else:
        _two(train)


def _wait_for(peer: dlc.Peer, size: int) -> None:
    """These programs train for a second: who began alone would be gone before another had joined."""
    peer.describe(status={"joined": True})
    said = 0
    while (here := sum(m.me or (m.alive and "joined" in m.status) for m in peer.members())) < size:
        if here != said:
            print(f"{here} of {size} peers are here; training begins when all are", flush=True)
            said = here
        time.sleep(LOOK_S)


def _two(train: Train) -> None:
    """A peer in a process of its own, and one in this. The process starts first: a peer does not outlive a fork."""
    torch.set_num_threads(1)  # two processes share this machine
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    here, there = context.Pipe()
    child = context.Process(target=_second, args=(train, there), daemon=True)  # ends with this one
    child.start()
    with dlc.Peer.join() as peer:
        here.send(peer.address)
        if not here.poll(JOIN_S):
            sys.exit("the second peer did not join")
        _tell(peer, train(peer, 0))
        peer.barrier("end")
    child.join()
    if child.exitcode:
        sys.exit(f"the second peer ended with exit status {child.exitcode}")


def _second(train: Train, pipe: Connection) -> None:
    with dlc.Peer.join(pipe.recv(), join_timeout_s=JOIN_S) as peer:
        pipe.send("joined")
        _tell(peer, train(peer, 1))
        peer.barrier("end")


def _tell(peer: dlc.Peer, tensors: Iterable[Tensor]) -> None:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    sys.stdout.write(f"peer {peer.id[:8]} ends with {digest.hexdigest()[:16]}\n")
    sys.stdout.flush()
