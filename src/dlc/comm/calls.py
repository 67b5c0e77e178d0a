"""What a caller wants of a group, and what it is told: `Call` goes in; MeetingFailed, or GroupFormed and then GroupDone
or GroupFailed, come out."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from torch import Tensor

from dlc.comm.grid import Grid
from dlc.comm.ids import PeerId
from dlc.comm.meshmessages import Seat
from dlc.comm.service import ServiceNews


@dataclass
class Call:
    """What a caller wants of a group."""

    key: str
    grid: Grid
    vector: Tensor | None
    """fp32, CPU, frozen until the group is over; None: it contributes nothing."""
    out: Tensor | None
    """Where the means go; None: it wants none."""
    weight: float = 1.0
    owns: bool = True
    label: str = ""
    target: int = 0
    """A group that I form has so many at most, and begins as soon as it has them; 0: no number."""
    least: int = 1
    """Fewer are no group for me, whoever forms it."""
    expected: tuple[PeerId, ...] | Callable[[], Collection[PeerId]] | None = None
    """Whom it waits for as long as they are up; None: all trainers, or only for the target where there is one. A
    function is asked again whenever something has changed, and must be quick; where it raises, the meeting fails."""
    show_to: tuple[PeerId, ...] | None = None
    """Who is told that it waits; None: those named in `expected`, if it waits for them alone, or else everybody."""
    patience_s: float = 5.0
    """How long it waits for others."""
    budget_s: float = 60.0
    """How long the exchange may take, from Begin on."""
    gather: bytes = b""
    keeps_unsaid: bool = False
    """What the codec rounds off of `vector` is added to what goes to `out`; see `Grid.unsaid`."""


MISFIT = "would average another number of elements, or in another codec"
"""Why somebody who came is in no group with me."""


class GoneOn(Exception):
    """For `Call.expected` to raise: those whom it waits for are in a later group, and will not come."""


@dataclass(frozen=True)
class MeetingFailed(ServiceNews):
    """No group came to be."""

    call: Call = field(repr=False, compare=False)
    why: str
    cause: BaseException | None = None
    """What `Call.expected` raised."""


@dataclass(frozen=True)
class GroupFormed(ServiceNews):
    call: Call = field(repr=False, compare=False)
    peers: tuple[PeerId, ...]
    misfits: frozenset[PeerId] = frozenset()
    """Who wanted to come, with another number of elements or another codec."""


@dataclass
class Outcome:
    """What a group's all-reduce gave its caller here."""

    key: str
    nonce: int
    leader: PeerId
    seats: tuple[Seat, ...]
    known: int = 0
    """Elements of the result that are known here: all, or what I reduced where I receive none."""
    included: dict[PeerId, int] = field(default_factory=dict)
    """How many of them include each contributor."""
    without_mine: list[int] = field(default_factory=list)
    """Chunks of it that do not include what I contributed."""
    missing: dict[PeerId, str] = field(default_factory=dict)
    """Why elements lack a contributor, as far as it was seen here."""
    lost: dict[PeerId, str] = field(default_factory=dict)
    """Owners whose chunks others reduced, and why."""
    reduced: int = 0
    """Chunks that I reduced."""
    bytes_sent: int = 0
    """Payloads, of all groups of this peer, since the outcome before this one was told: others ask for what they lack
    of a group when its outcome is here already."""
    bytes_received: int = 0
    seconds: float = 0.0
    """From Begin to the last chunk."""


@dataclass(frozen=True)
class GroupDone(ServiceNews):
    call: Call = field(repr=False, compare=False)
    outcome: Outcome


@dataclass(frozen=True)
class GroupFailed(ServiceNews):
    call: Call = field(repr=False, compare=False)
    why: str
