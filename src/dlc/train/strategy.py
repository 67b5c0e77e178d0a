"""What is exchanged, with whom, when, and how the result is applied: the one interface between a trainer and that.

    Trainer                      Strategy
    model, data, checkpoints,    ready      whether there is something to train on now
    validation, events, the      advance    inner steps until the next exchange is due, and that exchange
    end of a run                 wind_up    stopped: what is done goes into an exchange that is near, or is dropped
                                 finish     the model becomes what all hold, as far as there is such a thing

A strategy gets `Parts` and nothing else; `strategies` knows them by their names in the RunSpec. Its docstring says
which promises of a run it keeps. It tells what it does through `Parts.tell` and `Parts.calls`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from dlc.report import RoundReport
from dlc.runspec import RunSpec
from dlc.train.data import Blocks
from dlc.train.engine import Engine
from dlc.train.saves import Local, Saved
from dlc.train.swarm import Frozen, Position, TrainerPeer
from dlc.train.telling import Teller

CHANNEL = "train"
"""Of the log, where a strategy has rounds."""


@dataclass(frozen=True)
class Calls:
    """What a trainer does meanwhile."""

    over: Callable[[threading.Event], str | None]
    """Why the training is over, or None."""
    hear: Callable[[], None]
    """Between two inner steps."""
    listen: Callable[[], None]
    """While a round is waited for: what is heard is reported in order, with the round."""
    on_round: Callable[[RoundReport, bool, float | None, float], None]
    """The round that an offer waited for: its report, whether it counted us, our mean loss, seconds we stood still."""
    counted: Callable[[int, threading.Event], None]
    """After an exchange that counted us, with its number."""
    stopping: Callable[[], bool]
    """Whether it is to end before the run does, though a batch may not be there yet."""
    moved: Callable[[int, int, float], None]
    """By an exchange that is no round: bytes sent, bytes received, seconds that inner steps stood still for it."""


@dataclass(frozen=True)
class Parts:
    """What a trainer gives to its strategy."""

    peer: TrainerPeer
    spec: RunSpec
    engine: Engine
    source: Blocks
    tell: Teller
    calls: Calls
    clock: Callable[[], float]


class Strategy(Protocol):
    """Used from the trainer's thread. DlcError, from any call: the training diverged, or the peer had to leave."""

    @property
    def position(self) -> Position:
        """Where the model's inner steps began."""

    def newest(self) -> Position:
        """Where the swarm stands, as far as this peer knows."""

    def open(self, saved: Saved | None) -> Position:
        """Take part, from a checkpoint of this run if one is given; blocks until the model is what the swarm holds."""

    def ready(self) -> bool:
        """Whether `advance` can do something: there are samples for this peer."""

    def advance(self, stop: threading.Event) -> None:
        """Inner steps until the next exchange is due, and that; returns early on `stop`, and where the run is over."""

    def wind_up(self, stopped: bool, stop: threading.Event) -> None:
        """The training ends; `stopped`: before the run does. What no exchange has counted now is dropped, and told."""

    def finish(self) -> Position:
        """Set the model to the newest that the swarm holds; nothing more is trained."""

    def at_rest(self) -> AbstractContextManager[None]:
        """Within it the model is that of `position`, without inner steps that are ahead of it: to be measured."""

    def frozen(self) -> Frozen:
        """A consistent copy of what the peers share, for a checkpoint."""

    def local(self) -> Local:
        """What a checkpoint keeps of this peer alone. Not copied."""

    def close(self) -> None:
        """End the strategy's own threads. Once."""
