"""`torchrun ... -m dlc join`: which process of a site this one is, and what those that are not rank 0 do.

All processes of one torchrun group are one peer. torchrun hands signals on to all those of its host. Rank 0 decides
what they mean: the others ask it for a clean end, as often as they are told, and end when rank 0 says so, or when it is
gone.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlc.cli import FAILED
from dlc.cli.interrupt import end_at_once, end_signals
from dlc.errors import UsageError

if TYPE_CHECKING:
    import torch

    from dlc.cli.interrupt import Interrupts
    from dlc.train.group import Group
    from dlc.train.heartbeat import Heartbeats

log = logging.getLogger(__name__)

DDP = "ddp"
STOP_LOOK_S = 0.5
"""Between two looks of rank 0 for a process that was told to stop: torchrun kills it 30 s later."""
LAST_LOOK_S = 5.0
"""For the last one to be over: a torchrun that is suspended (Ctrl-Z) answers none."""
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Rank:
    """One process of several."""

    rank: int
    size: int
    local_rank: int
    """Of those on this host: the number of its GPU."""


def launched() -> Rank | None:
    """Of what torchrun told this process; None: it is alone."""
    if not all(name in os.environ for name in TORCHRUN) or os.environ["WORLD_SIZE"] == "1":
        return None
    return Rank(*(int(os.environ[name]) for name in TORCHRUN[:3]))


def device_of(name: str, rank: Rank) -> torch.device:
    """The device of this rank; each has a GPU of its own. UsageError: there is none for it."""
    import torch

    from dlc.train.setup import pick_device

    if name != "cpu" and rank.local_rank < torch.cuda.device_count():
        torch.cuda.set_device(rank.local_rank)  # first: trying another one takes memory there until the process ends
    device = pick_device(name)
    if device.type != "cuda":
        return device
    if device.index is not None:
        raise UsageError(f"under torchrun each process takes a GPU by its own number: leave out --device {name}")
    if rank.local_rank >= torch.cuda.device_count():
        raise UsageError(
            f"process {rank.local_rank} of this host has no GPU, there are {torch.cuda.device_count()}: "
            "start torchrun with --nproc-per-node of that number"
        )
    return torch.device("cuda", rank.local_rank)


def follow_on(args: argparse.Namespace, rank: Rank) -> None:
    """All that a process other than rank 0 does."""
    logging.getLogger("dlc").setLevel(logging.ERROR)  # rank 0 tells
    for number in end_signals():
        signal.signal(number, signal.SIG_DFL)  # until rank 0 is there, nobody else would end us; Python may be waiting
    from transformers.utils.logging import disable_progress_bar

    from dlc.train.follower import follow
    from dlc.train.group import Group

    disable_progress_bar()
    group = Group(device_of(args.device, rank), args.parallel or DDP)
    hand_signals_on(group)
    over = threading.Event()
    look = threading.Thread(target=_look_at_leader, args=(group, over), daemon=True, name="dlc-site-leader")
    look.start()
    try:
        follow(group)
    finally:
        over.set()
        look.join(LAST_LOOK_S)
    group.close()


def hand_signals_on(group: Group) -> None:
    """From now on Ctrl-C, SIGTERM and SIGHUP here ask rank 0 for a clean end of the site. Call it on the main thread.

    By a thread: the main one may wait for an order as long as a round takes, in which Python runs no handlers.
    """
    signalled, written_to = socket.socketpair()
    written_to.setblocking(False)
    signal.set_wakeup_fd(written_to.detach(), warn_on_full_buffer=False)
    for number in end_signals():
        signal.signal(number, lambda *_: None)

    def ask() -> None:
        signalled.recv(1)
        group.ask_for_stop()

    threading.Thread(target=ask, daemon=True, name="dlc-signals").start()


@contextlib.contextmanager
def leading(args: argparse.Namespace, rank: Rank | None, interrupts: Interrupts) -> Iterator[Group | None]:
    """Rank 0's group, whose others are told to leave at the end; None without torchrun. Sets `args.device`.

    Where one of the others asks for the end, or torchrun is gone, it is asked of `interrupts`.
    """
    from dlc.train.setup import pick_device  # torch, only now that the options are known to be right

    if rank is None:
        args.device = str(pick_device(args.device))
        yield None
        return
    from dlc.train.group import Group

    device = device_of(args.device, rank)
    args.device = str(device)
    group = Group(device, args.parallel or DDP)
    log.info("a site of %d processes (%s), one peer", group.size, group.parallel)
    over = threading.Event()
    look = threading.Thread(target=_look_for_stop, args=(group, interrupts, over), name="dlc-site-stop", daemon=True)
    look.start()
    try:
        yield group
    finally:
        over.set()
        look.join(LAST_LOOK_S)
        group.close()


def _look_for_stop(group: Group, interrupts: Interrupts, over: threading.Event) -> None:
    from dlc.train.group import SiteLost

    heartbeats, asked = group.heartbeats(), False
    while not over.wait(STOP_LOOK_S):
        try:
            _end_if_hung(heartbeats)
            if asked or not group.stop_asked():
                continue
            log.info("another process of this site was told to stop: the site leaves the run")
        except SiteLost as error:
            log.warning("%s: the site leaves the run", error)
            over.set()
        interrupts.ask()
        asked = True


def _look_at_leader(group: Group, over: threading.Event) -> None:
    """On the others, while torchrun is there: end this process where rank 0 hangs, whose orders it waits for."""
    from dlc.train.group import SiteLost

    heartbeats = group.heartbeats()
    with contextlib.suppress(SiteLost):
        while not over.wait(STOP_LOOK_S):
            _end_if_hung(heartbeats)


def _end_if_hung(heartbeats: Heartbeats) -> None:
    """Tell of processes that do not run; ends this one where they have not for too long: it may wait for them where
    nothing else ends it."""
    from dlc.train.heartbeat import SILENCE_S_MAX

    fresh, hung = heartbeats.look()
    for silence in fresh:
        log.warning(
            "process %d of this site has not run for %.0f s: it was suspended, or its host hangs. The site waits for "
            "it, and ends when that has lasted %.0f s",
            *silence,
            SILENCE_S_MAX,
        )
    if hung:
        log.error(
            "process %d of this site has not run for %.0f s: the site ends, and saves nothing. Look after that process "
            "and its host; the same command goes on from the newest checkpoint",
            *hung[0],
        )
        end_at_once(FAILED)
