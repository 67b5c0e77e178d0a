"""What a peer tells its application."""

from __future__ import annotations

from dataclasses import dataclass

from dlc.comm.ids import Voter
from dlc.report import RoundReport


@dataclass(frozen=True, slots=True)
class MemberUp:
    voter: Voter


@dataclass(frozen=True, slots=True)
class MemberSuspect:
    voter: Voter


@dataclass(frozen=True, slots=True)
class MemberDown:
    voter: Voter


@dataclass(frozen=True, slots=True)
class MemberLeft:
    voter: Voter


@dataclass(frozen=True, slots=True)
class SeenAt:
    """Nobody else is known to live, and has had time to answer; but one answered a Hello, and saw it come from here."""

    host: str


@dataclass(frozen=True, slots=True)
class SelfReplaced:
    """Another process with our identity and a greater incarnation is alive: this one must stop."""

    voter: Voter


@dataclass(frozen=True, slots=True)
class RoundDone:
    """A round of a channel was committed and applied here."""

    report: RoundReport
    counted: bool
    """Our own contribution counted: it is in more than half of the elements."""
    grid: str
    """What was averaged, for people: elements, codec and chunks."""
    fits: bool
    """Our own contribution had that grid (True where we had none)."""
    included: tuple[bool, ...] = ()
    """For each chunk whether our own contribution is in its mean; empty where we had none, or none of that grid."""
    older: bool = False
    """An earlier contribution of ours is in it, which we had taken back for the present one; no sink took its means."""


@dataclass(frozen=True, slots=True)
class ChannelOpened:
    channel: str


@dataclass(frozen=True, slots=True)
class ChannelSynced:
    """The channel's state here equals the swarm's (after an open, a snapshot or a repair)."""

    channel: str
    t: int


@dataclass(frozen=True, slots=True)
class ElectorateChanged:
    voters: tuple[Voter, ...]


@dataclass(frozen=True, slots=True)
class DigestMismatch:
    """Our state differed from the swarm's; it is being repaired from a peer."""

    channel: str
    t: int


@dataclass(frozen=True, slots=True)
class HistoryLost:
    """Our side of a partition lost: its training rounds and tokens since the split are set aside, their samples will be
    trained by the others, and the state is fetched again."""

    rounds: int
    tokens: float


@dataclass(frozen=True, slots=True)
class LeftAhead:
    """The run goes on from our history without a quorum, and these, which have left, were further than that: what they
    did since is in their checkpoints only."""

    voters: tuple[Voter, ...]
    tokens: float
    """What had counted there at most beyond what has here, in weights of contributions."""


@dataclass(frozen=True, slots=True)
class BulkLost:
    """These peers answer pings, but bulk does not get to them or from them: they own nothing for a while."""

    voters: tuple[Voter, ...]


@dataclass(frozen=True, slots=True)
class Apart:
    """For T_dead it has answered by a relay only, which carries no bulk. Told of each process once."""

    voter: Voter
    relay: str
    """Peer id."""


@dataclass(frozen=True, slots=True)
class BadImage:
    """An image came whole and is not the state that its donor named: it was thrown away, and another is asked for."""

    donor: Voter
    channel: str


@dataclass(frozen=True, slots=True)
class StateMisfit:
    """The run's state of a channel is of another kind than the one attached here: it is fetched no more."""

    channel: str
    why: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """No progress is possible now; whom we wait for (nobody in particular: empty), and why."""

    reason: str
    peers: tuple[str, ...]
    """Ids, or addresses where no peer is known."""
    left_s: float | None = None
    """Seconds until the others may go on without them; None: not without them."""
    waited_s: float = 0.0
    """Where `left_s` is None: seconds for which this has been so, at least; told again ever more seldom."""
    advice: str = ""
    """What a person can do."""


@dataclass(frozen=True, slots=True)
class ContributionDropped:
    """My contribution was withdrawn: the channel's state jumped, or its samples were leased to others."""

    channel: str
