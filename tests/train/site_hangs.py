"""What `test_site` starts as torchrun would: rank 1 stops running while rank 0 waits for it.

Rank 0 has no other end than that of its look at the others' heartbeats, whose limits are short here.
"""

from __future__ import annotations

import logging
import os
import signal
from argparse import Namespace

import torch

from dlc.cli.interrupt import Interrupts
from dlc.cli.site import Rank, leading
from dlc.train import heartbeat
from dlc.train.group import Group


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    if int(os.environ["RANK"]):
        Group(torch.device("cpu")).meet()
        os.kill(os.getpid(), signal.SIGSTOP)
    heartbeat.TOLD_S, heartbeat.SILENCE_S_MAX = 2.0, 4.0
    with leading(Namespace(device="cpu", parallel=None), Rank(rank=0, size=2, local_rank=0), Interrupts()) as group:
        assert group is not None
        group.meet()
        group.meet()


if __name__ == "__main__":
    main()
