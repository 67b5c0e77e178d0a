"""One exchange of a trainer with the parameter server, and what it tells of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dlc.comm.ids import PeerId
from dlc.comm.servermessages import Update
from dlc.comm.service import ServiceNews

PUSH, PULL, OVER = "push", "pull", "over"


@dataclass
class Leg:
    """One span of the exchange."""

    phase: str
    seq: int = 0
    outcome: str = ""
    update: Update | None = None
    staleness: int = 0
    term: int = 0
    """Of the owner that answered the push."""
    version: int = 0
    """Of the update that counted it."""
    step: int = 0
    """The pull waits for this round."""
    said_at: float = float("-inf")


@dataclass(frozen=True)
class Outcome:
    """What became of one span's push, and what was pulled."""

    span: int
    share: float
    """Part of the vector."""
    owner: PeerId
    outcome: str
    """COUNTED, or why it does not count; empty where nothing was pushed."""
    update: Update | None
    staleness: int
    version: int


@dataclass(frozen=True)
class ExchangeOver(ServiceNews):
    number: int
    step: int
    """Newest round that all of theta is of."""
    outcomes: tuple[Outcome, ...]
    bytes_sent: int
    bytes_received: int
    seconds: float


@dataclass(frozen=True)
class Paused(ServiceNews):
    """Nobody serves these spans; empty: all are served again."""

    spans: tuple[int, ...]


@dataclass
class Exchange:
    number: int
    vector: Tensor | None
    weight: float
    step: int
    began: float
    legs: list[Leg]
    sent_before: int
    received_before: int
    over: bool = False


@dataclass
class Pulled:
    """What I hold of one span."""

    term: int = 0
    version: int = 0
    step: int = 0
    origin: bytes = b""
    fetching: str = ""
    """Key of the theta that is on its way."""
