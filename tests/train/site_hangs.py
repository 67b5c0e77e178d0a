"""What `test_site` starts as torchrun would: one of two ranks stops running while the other waits for it.

That one has no other end than that of its look at the heartbeats, whose limits are short here.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from argparse import Namespace

import torch

from dlc.cli.interrupt import Interrupts
from dlc.cli.site import Rank, follow_on, leading
from dlc.train import heartbeat
from dlc.train.group import Group


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    rank, hangs, args = int(os.environ["RANK"]), int(sys.argv[1]), Namespace(device="cpu", parallel=None)
    if rank == hangs == 1:
        Group(torch.device("cpu")).meet()
        os.kill(os.getpid(), signal.SIGSTOP)
    heartbeat.TOLD_S, heartbeat.SILENCE_S_MAX = 2.0, 4.0
    if rank:
        follow_on(args, Rank(rank=1, size=2, local_rank=1))
        return
    with leading(args, Rank(rank=0, size=2, local_rank=0), Interrupts()) as group:
        assert group is not None
        if hangs == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        group.meet()
        group.meet()


if __name__ == "__main__":
    main()
