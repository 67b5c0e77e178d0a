"""Trainers over real peers in this process, each in a thread of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlc.errors import DlcError
from dlc.flat import FlatView
from dlc.peer import Peer
from dlc.runspec import RunSpec
from dlc.train.saves import Saved
from dlc.train.trainer import Summary, Trainer
from tests.helpers import wait_until

DEADLINE_S = 240.0
Event = dict[str, Any]


class Pupil:
    """One trainer with its peer. Made on the test's own thread: first weights come from the state of the process."""

    def __init__(self, spec: RunSpec, folder: Path, listed: str = "", resume: Saved | None = None) -> None:
        self.events, self.stop = list[Event](), threading.Event()
        self.on_event: Callable[[Event], None] = lambda event: None
        heard: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.peer = Peer.join(listed, spec=spec, hold=True, on_event=heard.put, state_dir=folder)
        self.trainer = Trainer(
            self.peer, folder, device="cpu", on_event=self._take, peer_events=heard, eval_blocks=2, resume=resume
        )

    def _take(self, event: Event) -> None:
        self.events.append(event)
        self.on_event(event)

    def all(self, name: str) -> list[Event]:
        return [event for event in list(self.events) if event["event"] == name]

    def model(self) -> Tensor:
        view = FlatView.of(self.trainer.model)
        return view.gather(torch.empty(view.numel))


class School:
    """Trainers that run in threads; all end with it."""

    def __init__(self) -> None:
        self.pupils: list[Pupil] = []
        self.ends: list[Future[Summary]] = []
        self._pool = ThreadPoolExecutor(8)

    def __enter__(self) -> School:
        return self

    def __exit__(self, *error: object) -> None:
        for pupil in self.pupils:
            pupil.stop.set()
            try:
                pupil.peer.leave()
            except DlcError:
                pass
        self._pool.shutdown()

    def add(self, pupil: Pupil) -> Pupil:
        self.pupils.append(pupil)
        return pupil

    def acquainted(self) -> None:
        """Everybody knows of everybody: before that one may begin alone."""
        n = len(self.pupils)
        wait_until(lambda: all(_alive(pupil) == n for pupil in self.pupils), DEADLINE_S, "all know all")

    def start(self, pupil: Pupil) -> Future[Summary]:
        self.ends.append(self._pool.submit(pupil.trainer.run, pupil.stop))
        return self.ends[-1]

    def summaries(self) -> list[Summary]:
        wait_until(lambda: all(end.done() for end in self.ends), DEADLINE_S, "all trainers end")
        return [end.result() for end in self.ends]


def _alive(pupil: Pupil) -> int:
    return sum(member.alive for member in pupil.peer.members())
