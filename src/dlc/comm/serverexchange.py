"""One exchange of a trainer with the parameter server, and what it tells of it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from torch import Tensor

from dlc.comm.ids import PeerId, Voter
from dlc.comm.servermessages import PAST_MAX, Counted, Left, Origin, SpanView, Update, check_numbers, check_origin
from dlc.comm.service import ServiceNews
from dlc.errors import ProtocolError

PUSH, PULL, OVER = "push", "pull", "over"
ASKING = 0
"""Number of a pull that asks only which push of the asker is the newest; exchanges count from 1."""
NOWHERE = Origin(b"")
"""Of nothing."""
KEPT_MAX = 256
"""Counted pushes that are remembered per span."""


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
    unsound: int = 0
    """How often its theta came, and was not finite."""


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
    set_aside: int
    """Earlier pushes of mine that had counted, and are no part any more of what was pulled: after a long partition the
    other side's updates hold. At most KEPT_MAX are remembered."""
    set_aside_weight: float
    """The sum of their weights."""
    rounds_lost: int
    """Rounds that my checkpoint holds, and what was pulled first does not (`Mark.lost`)."""


@dataclass(frozen=True)
class CountedPush:
    """One of my pushes that counted in one span."""

    seq: int
    term: int
    """Of the owner that said so."""
    version: int
    weight: float

    def holds(self, view: SpanView, newest: int) -> bool:
        """It is part of theta under this view, where `newest` is my newest push that its owner knows. Both rules are
        needed: versions before and after a seeding may be of two histories, and after a push that counted since then
        `newest` tells nothing of those before it."""
        if self.term < view.seed_term and self.version > view.seed_version:
            return False  # its owner's state began with what a trainer had pulled before
        return newest < 0 or self.seq <= newest


@dataclass
class Pushes:
    """My pushes to one span."""

    seq: int = 0
    """Number of the newest."""
    counted: deque[CountedPush] = field(default_factory=lambda: deque(maxlen=KEPT_MAX))
    """Those that counted, as far as I know."""
    known_to: SpanView | None = None
    """The view under which its owner told last which of them it has; none is pushed to another before that is told."""
    set_aside: int = 0
    set_aside_weight: float = 0.0
    """See `Outcome`; not told yet."""


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
class ExchangeFailed(ServiceNews):
    """It was given up, as it cannot succeed."""

    number: int
    why: str


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
    owner: Voter | None = None
    """Who gave it: after a partition two may have owned a span in one term."""
    version: int = 0
    step: int = 0
    origin: Origin = NOWHERE
    pushes: tuple[Counted, ...] = ()
    """Each trainer's newest push that is part of it."""
    lost: int = 0
    """As `Outcome.rounds_lost`; not told yet."""
    fetching: tuple[Voter, str] | None = None
    """Whose theta is on its way, and its key: one at a time, and none once the exchange is over."""


@dataclass(frozen=True, slots=True)
class Mark:
    """What was pulled of one span, as a checkpoint keeps it."""

    origin: Origin
    term: int
    version: int

    def lost(self, own: Origin, step: int, view: SpanView) -> int:
        """Rounds (asynchronous, within one training: updates) of a checkpoint that are no part of theta under this
        view. `own`, `step`: the origin that the checkpoint's theta would be, and its round."""
        if view.origin == self.origin:
            return max(0, self.version - view.seed_version) if self.term < view.seed_term else 0
        if view.origin.like(own):
            return 0  # another training, which began with it
        left = [left.version for left in view.origin.past if left.founder == self.origin.founder]
        return max(0, step - (left[-1] if left else view.origin.version))

    def past(self, step: int) -> tuple[Left, ...]:
        """That of a training which goes on from this mark's checkpoint, of that round."""
        founder = self.origin.founder
        return (*self.origin.past, Left(founder, step))[-PAST_MAX:] if founder is not None else self.origin.past


@dataclass(frozen=True, slots=True)
class History:
    """The same of all spans."""

    marks: tuple[Mark, ...]


def check_history(history: History) -> None:
    """ProtocolError for one that no exchanges have made."""
    for mark in history.marks:
        check_numbers(mark.term, mark.version)
        check_origin(mark.origin)
    if not history.marks:
        raise ProtocolError("a history of no spans")
