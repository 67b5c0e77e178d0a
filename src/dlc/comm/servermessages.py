"""Messages of the parameter server. Payloads travel apart, in parts that are asked for one by one (`servershelf`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from dlc.comm.ids import PeerId, Voter
from dlc.comm.messages import Bulk, Excluded
from dlc.errors import ProtocolError

COUNTED = "counted"
STALE = "stale"
LATE = "late"
LOST = "lost"
"""It was counted, but owner and standby died, and nobody had pulled it."""
NOT_FINITE = "refused: not finite"
DEAD, LEFT = "dead", "left"
OUTCOMES = (COUNTED, STALE, LATE, NOT_FINITE)
"""What becomes of a push that an owner answers."""
REASONS = (LATE, DEAD, LEFT, NOT_FINITE)
"""Why a round went on without a trainer."""
NUMBER_MAX = 1 << 53
"""Greatest term, version or round: the one after it still has a wire form."""
NUMBERS_AHEAD_MAX = 1 << 32
"""How far a term or a round may be above the last that was heard of, and a stake below NUMBER_MAX: far above what a run
can use up, so no message takes the last number there is."""
BEGINNING_MAX = NUMBER_MAX - NUMBERS_AHEAD_MAX
"""Greatest version or round that anything goes on from."""
SEQ_MAX = 1 << 62
"""Greatest number of a push; they begin with a clock."""
PAST_MAX = 64
"""Trainings that are remembered: times that the whole swarm was started again."""


@dataclass(frozen=True, slots=True)
class Push:
    """One trainer's share in an update."""

    voter: Voter
    seq: int
    """Of that process's pushes to this span; the first is 1."""
    weight: float


@dataclass(frozen=True, slots=True)
class Update:
    """What is applied at once. Its payloads travel apart."""

    version: int
    """Number of the update within its span; the first is 1."""
    step: int
    """Synchronous: the round. Asynchronous: 0."""
    n: int
    """Trainers at that time."""
    pushes: tuple[Push, ...]
    missing: tuple[Excluded, ...]
    """Trainers that a round went on without, and why."""


@dataclass(frozen=True, slots=True)
class Counted:
    """A trainer's newest push that is part of a span."""

    voter: Voter
    seq: int
    version: int
    """Of the update that counted it."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the vector is cut (`Spans`)."""

    numel: int
    chunk_elems: int
    codec: str
    n_spans: int


@dataclass(frozen=True, slots=True)
class Left:
    """A training that was stopped, and gone on from."""

    founder: Voter
    """Its `Origin.founder`."""
    version: int
    """The round of the checkpoint that the next one began with: what it had after that is no part of it."""


@dataclass(frozen=True, slots=True)
class Origin:
    """With what a training began: all spans are of one. A swarm that is started again is another training."""

    theta: bytes
    """Digest of those parameters, of all spans."""
    version: int = 0
    """The round that they were of, by the trainer that gave them; above 0 they were a checkpoint's."""
    founder: Voter | None = None
    """The helper that took them; None: nobody has, they are what a trainer would begin with."""
    past: tuple[Left, ...] = ()
    """The trainings before it, the last at the end."""

    def like(self, other: Origin) -> bool:
        """Of the same parameters, whoever took them."""
        return self.theta == other.theta


@dataclass(frozen=True, slots=True)
class SpanView:
    """Who serves a span; of two views the greater (term, owner) holds."""

    span: int
    term: int
    owner: Voter
    standby: Voter | None
    origin: Origin
    seed_term: int
    """Term in which its state was taken from a trainer; updates before that which are newer than `seed_version` are
    lost."""
    seed_version: int


# ------------------------------------------------------------------ views


@dataclass(frozen=True, slots=True)
class AskViews:
    """Who serves what? A trainer's layout is taken over by a helper that has none."""

    layout: Layout | None
    optimizer: str
    """How a helper moves the parameters (`Optimizer.name`); empty: I am none."""


@dataclass(frozen=True, slots=True)
class TellViews:
    layout: Layout | None
    optimizer: str
    """As in `AskViews`."""
    views: tuple[SpanView, ...]
    """Established ones; spans that are not named have none here."""
    unreached: tuple[PeerId, ...]
    """Trainers that a helper reaches by a relay only; a trainer tells none."""


@dataclass(frozen=True, slots=True)
class Claim:
    """May this view hold from now on? Asked of all who are alive."""

    view: SpanView


@dataclass(frozen=True, slots=True)
class Granted:
    span: int
    term: int


@dataclass(frozen=True, slots=True)
class Refused:
    """No: this is the greatest view that I know of or have granted."""

    view: SpanView
    established: bool


@dataclass(frozen=True, slots=True)
class Established:
    """A majority granted this view: it holds."""

    view: SpanView


# ------------------------------------------------------------------ owner and standby


@dataclass(frozen=True, slots=True)
class ImageOffer:
    """The state of a span for a new standby."""

    view: SpanView
    """Of the owner, as it stands; the receiver may not be the standby yet."""
    era: int
    """Of the owner's updates: they follow images of the same era only."""
    version: int
    digest: bytes
    key: str
    n_bytes: int


@dataclass(frozen=True, slots=True)
class UpdateOffer:
    view: SpanView
    era: int
    update: Update
    key: str
    sizes: tuple[int, ...]
    """Of the payloads, one per chunk of the span."""


@dataclass(frozen=True, slots=True)
class UpdateTaken:
    """My replica holds all updates up to this one."""

    span: int
    term: int
    version: int
    """-1: I have no replica that this owner's updates could follow."""
    digest: bytes
    """Of the replica, now and then; else empty."""


# ------------------------------------------------------------------ trainers


@dataclass(frozen=True, slots=True)
class PushOffer:
    """My share in an update waits here under `key`; repeated until PushDone."""

    span: int
    term: int
    seq: int
    base: int
    """Version of the parameters that the work began with."""
    step: int
    """Synchronous: the round; asynchronous: 0."""
    weight: float
    key: str
    layout: bytes
    """`Spans.digest`."""


@dataclass(frozen=True, slots=True)
class PushDone:
    span: int
    term: int
    seq: int
    outcome: str
    """COUNTED, or why not."""
    version: int
    """Of the update that counted it; 0 where none did."""
    update: Update | None
    """The same, if it is still known."""
    staleness: int
    """Updates between the base of the push and the one that counted it."""


@dataclass(frozen=True, slots=True)
class PullReq:
    """What are the parameters? Answered as soon as round `step` is applied."""

    span: int
    term: int
    number: int
    """Of the trainer's exchange."""
    step: int
    layout: bytes
    """`Spans.digest`."""


@dataclass(frozen=True, slots=True)
class PullOffer:
    span: int
    term: int
    number: int
    version: int
    step: int
    key: str
    counted: int
    """Number of the asker's newest push that is part of it; 0: none is. -1: not known any more."""
    pushes: tuple[Counted, ...]
    """Each trainer's newest push that is part of it, those counted last at the end."""


@dataclass(frozen=True, slots=True)
class AskStake:
    """A helper that is to serve a span whose state nobody holds asks trainers what they pulled last."""

    span: int


@dataclass(frozen=True, slots=True)
class Stake:
    span: int
    origin: Origin
    version: int
    step: int
    key: str
    pushes: tuple[Counted, ...]
    """As the PullOffer that it came with told them."""
    layout: bytes
    """`Spans.digest`."""


# ------------------------------------------------------------------ payloads


@dataclass(frozen=True, slots=True)
class PartReq:
    """Send me these parts of what you hold under the key."""

    key: str
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NoPart:
    """Nothing is held under that key (any more)."""

    key: str


@dataclass(frozen=True, slots=True)
class Part(Bulk):
    key: str
    part: int
    payload: bytes = field(default=b"", metadata={"frame": True})


def check_numbers(*numbers: float) -> None:
    """ProtocolError for a term, version, or round that nobody can have come to."""
    for number in numbers:
        if not 0 <= number <= NUMBER_MAX:
            raise ProtocolError(f"the number {number}: it must be at least 0 and at most {NUMBER_MAX}")


def check_leaves_room(*numbers: float) -> None:
    """The same for what a run is to go on from: enough numbers come after it."""
    check_numbers(*numbers, *(number + NUMBERS_AHEAD_MAX for number in numbers))


def check_origin(origin: Origin) -> None:
    """ProtocolError for one that no training has."""
    check_numbers(origin.version, *(left.version for left in origin.past))
    if len(origin.past) > PAST_MAX:
        raise ProtocolError(f"a training that was stopped {len(origin.past)} times")


def check_update(update: Update) -> None:
    """ProtocolError for one that nobody can have made."""
    check_numbers(update.version, update.step, update.n, *(push.weight for push in update.pushes))
    if not all(1 <= push.seq <= SEQ_MAX for push in update.pushes):
        raise ProtocolError("an update with a push of a number that none can have")
    voters = [*(push.voter for push in update.pushes), *(missing.voter for missing in update.missing)]
    if len(set(voters)) < len(voters):
        raise ProtocolError("an update that names a trainer twice")
    for missing in update.missing:
        if missing.reason not in REASONS:
            raise ProtocolError(f"{missing.voter} is missing for no known reason: {missing.reason[:40]!r}")


SERVER_MESSAGES: tuple[type, ...] = (
    AskViews,
    TellViews,
    Claim,
    Granted,
    Refused,
    Established,
    ImageOffer,
    UpdateOffer,
    UpdateTaken,
    PushOffer,
    PushDone,
    PullReq,
    PullOffer,
    AskStake,
    Stake,
    PartReq,
    NoPart,
    Part,
)
"""The index, from the family's first code on, is the code on the wire: append only."""
