"""Every message that peers exchange, as frozen dataclasses without behaviour.

Names follow docs/protocol.md. Control messages travel on the control lane; those that derive from `Bulk` travel on the
bulk lane and carry their payload as a raw frame of its own, outside the msgpack header. Slot messages name their slot
by `head` (hash of its parent entry); data-plane messages carry `base`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dlc.comm.entries import Entry, LogState, Part
from dlc.comm.ids import Ballot, PeerId, Voter
from dlc.comm.wire import Packed

PROTOCOL_VERSION = 21
"""Raised whenever the meaning or shape of a message changes; peers of different versions do not talk."""


# ------------------------------------------------------------------ membership


@dataclass(frozen=True, slots=True)
class StateDigest:
    channel: str
    digest: bytes


@dataclass(frozen=True, slots=True)
class Record:
    """What a peer says of itself; signed, gossiped, replaced by a greater (inc, seq)."""

    voter: Voter
    public_key: bytes
    control: tuple[str, ...]
    """Addresses HOST:PORT of the control lane, best first."""
    bulk: tuple[str, ...]
    role: str
    """trainer, helper or observer; observers never vote."""
    head: bytes
    tokens: float
    depth: int
    """(tokens, depth, head) is the position in the total order of histories."""
    active: bool
    """Founded the run, or got its head from an active peer."""
    synced: bool
    """Holds the state of every channel that it has attached, or of some, if nobody alive holds the others: may be
    enlisted as a voter."""
    speed: float
    """Training speed in tokens/s; 0 = unknown."""
    eta_s: float
    """Expected seconds from the making of this record until the peer is ready to contribute; < 0 = unknown."""
    seq: int
    """Version within the incarnation."""
    left: bool
    """The process has left for good: proof that this voter is gone."""
    states: tuple[StateDigest, ...] = ()
    """Of the open channels whose state it holds at `head`: shows who differs before anything is built on it."""
    up_Bps: float = 0.0
    """What its link carries towards all others together, in bytes per second, as it estimates; 0 = unknown."""
    down_Bps: float = 0.0
    stale: bool = False
    """It slept for long, and neither promises nor votes nor coordinates before it knows where others are."""
    status: bytes = b""
    """Small JSON object for people: round, inner step, loss. Never read by the protocol."""
    signature: bytes = b""


@dataclass(frozen=True, slots=True)
class Rumour:
    """SWIM's view of one voter, ordered by (refutation, state)."""

    voter: Voter
    state: int
    """0 alive, 1 suspect, 2 dead."""
    refutation: int
    """Raised only by the voter itself, to refute a suspicion."""


@dataclass(frozen=True, slots=True)
class Gossip:
    """What is piggybacked on every probe and answer."""

    records: tuple[Record, ...]
    rumours: tuple[Rumour, ...]


@dataclass(frozen=True, slots=True)
class Hello:
    """First message to an address; also what `dlc status` sends. Answered by Welcome on the same connection."""

    protocol: int
    run: str
    spec_hash: bytes
    """Empty: the sender has no RunSpec yet and asks for it."""
    record: Record | None
    address: str
    """The address that was dialled, echoed by the answer: tells the sender which peer lives there."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answer to Hello: who I am, what the run is, whom I know, and which address I saw you come from."""

    protocol: int
    run: str
    spec: bytes
    """Canonical RunSpec; empty while the answerer itself waits for one."""
    record: Record | None
    records: tuple[Record, ...]
    address: str
    """Echo of Hello.address."""
    observed_host: str
    """The host that the answerer saw the sender come from; filled in by its driver."""
    waiting: bool = False
    """The answerer knows no RunSpec, and has not heard from all whom it asked for one: ask it again."""


@dataclass(frozen=True, slots=True)
class Ping:
    nonce: int
    gossip: Gossip


@dataclass(frozen=True, slots=True)
class Ack:
    """Two-way proof: carries the nonce of the ping it answers."""

    nonce: int
    gossip: Gossip


@dataclass(frozen=True, slots=True)
class PingReq:
    """Ask the receiver to ping `target` for me."""

    nonce: int
    target: PeerId
    gossip: Gossip


@dataclass(frozen=True, slots=True)
class IndirectAck:
    """`target` answered the ping that I asked for: two-way proof by way of the sender."""

    nonce: int
    target: PeerId
    gossip: Gossip


@dataclass(frozen=True, slots=True)
class Leave:
    """An announced leave: a signed record with left = True."""

    record: Record


@dataclass(frozen=True, slots=True)
class Relay:
    """A control message for `target`, carried one hop by the receiver because the direct path fails."""

    target: PeerId
    origin: Voter
    code: int
    message: Packed


# ------------------------------------------------------------------ the slot


@dataclass(frozen=True, slots=True)
class GridSpec:
    """How a channel's vector is cut and encoded; equal for all contributors of a round."""

    numel: int
    chunk_elems: int
    codec: str


@dataclass(frozen=True, slots=True)
class Ready:
    """A contribution waits; repeated to the coordinator until a plan is seen."""

    head: bytes
    channel: str
    base: bytes
    grid: GridSpec
    weight: float
    upto: int
    digest: bytes
    """Of the channel's outer state; empty where the channel has none."""
    patience_s: float
    """The contributor wants the round to start after this wait even if others are not ready; <= 0: adaptive."""
    opening: bool
    """Asks to open a channel with this grid and state digest, instead of contributing."""
    lease_len: int
    """With opening: blocks per lease range; 0 = the channel has no leases."""
    norm: float = 0.0
    """Euclidean norm of the contribution, if it is to be clipped to the median of all (`Plan.norms`); 0: it is not."""
    fill_s: float = 0.0
    """Seconds from the offer until the contribution is final, from its end to its front; 0: it is."""
    offered_s: float = 0.0
    """Running time since it was offered: slots may be shorter than the wait that it asks for."""
    apart: tuple[Voter, ...] = ()
    """Voters that answer its sender by a relay only, which carries no bulk."""


@dataclass(frozen=True, slots=True)
class Prepare:
    head: bytes
    ballot: Ballot
    deciders: tuple[Voter, ...]
    """Empty: a quorum of the electorate decides. Else a forced ballot, decided by all of these."""


@dataclass(frozen=True, slots=True)
class HeldChunk:
    """A candidate chunk result in the promiser's hands."""

    chunk: int
    ballot: Ballot
    hash: bytes
    included: int
    """Index into Promise.rosters of the contributors of this chunk."""


@dataclass(frozen=True, slots=True)
class Decree:
    """The value that Paxos decides: everything of an entry, and the hashes of all its chunk results."""

    entry: Entry
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Promise:
    head: bytes
    ballot: Ballot
    accepted_ballot: Ballot | None
    accepted: Decree | None
    plan: Plan | None
    held: tuple[HeldChunk, ...]
    rosters: tuple[tuple[Part, ...], ...]
    ready: tuple[Ready, ...]


@dataclass(frozen=True, slots=True)
class Nack:
    head: bytes
    promised: Ballot


WAIT, PREP, RUN = "wait", "prepare", "run"
"""The phases of a coordinator: for READY, for promises, for votes."""


@dataclass(frozen=True, slots=True)
class Coord:
    """The coordinator's beat, sent every T_beat in every phase."""

    head: bytes
    ballot: Ballot
    phase: str
    waiting_for: tuple[Voter, ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """Answer to Coord: how far the bulk has come here; any rise keeps the coordinator from re-planning."""

    head: bytes
    ballot: Ballot
    held: int
    gained: int
    """Parts taken and chunks closed as an owner, under this ballot's plan."""
    lacks: tuple[int, ...]
    """Owners of that plan, by index, whose results are not all here."""
    waits_s: float
    """The longest silence that I, as an owner, still bear with of those whose parts I lack; 0 where I lack none."""


@dataclass(frozen=True, slots=True)
class FixedChunk:
    """A chunk whose result exists already and is kept by this plan."""

    chunk: int
    hash: bytes
    holders: tuple[Voter, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What the coordinator of a ballot proposes. `entry.manifest` is empty unless every chunk is fixed."""

    head: bytes
    ballot: Ballot
    deciders: tuple[Voter, ...]
    entry: Entry
    digest: bytes
    owners: tuple[Voter, ...]
    assignment: tuple[int, ...]
    """Per chunk: index into owners, or -1 where the chunk is fixed."""
    fixed: tuple[FixedChunk, ...]
    mute: tuple[Voter, ...]
    """Owners whose results got to nobody under this coordinator's last plan, though they answer pings."""
    norms: tuple[float, ...] = ()
    """Of the roster's contributions, as their READYs told them; empty where none is to be clipped. What an owner makes
    of them is in the bytes of its result, so that entries need not name them."""
    fill_s: float = 0.0
    """The longest `Ready.fill_s` of the roster. Above 0 all send their chunks from the last to the first, and nobody is
    silent before some of this time has passed."""


@dataclass(frozen=True, slots=True)
class Held:
    """The vote: I hold every byte of this manifest."""

    head: bytes
    ballot: Ballot
    manifest: bytes
    owed: tuple[Voter, ...]
    """Members for whom results that I reduced still wait here, or find no way: all others' are on theirs."""


@dataclass(frozen=True, slots=True)
class Commit:
    entry: Entry
    holders: tuple[Voter, ...]


# ------------------------------------------------------------------ state sync


@dataclass(frozen=True, slots=True)
class SyncReq:
    """Asks for what follows my head, or for a snapshot."""

    head: bytes
    depth: int
    snapshot: bool
    """True: my log or state is of no use, offer me a snapshot."""
    first_states: tuple[bytes, ...]
    """Digests of first states that I need to vote for an opening; any peer may keep one that is no longer its own."""


@dataclass(frozen=True, slots=True)
class Step:
    """One entry of the log after the asker's head, with the hashes of its chunk results."""

    entry: Entry
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Steps:
    """Answer to SyncReq when the asker's head is in my log: entries in order; results are fetched on the bulk lane."""

    after: bytes
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class ImageOffer:
    """A frozen image of one channel's state: fetched in pieces, verified piece by piece."""

    channel: str
    digest: bytes
    image_bytes: int
    piece_bytes: int
    piece_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Offer:
    """Answer to SyncReq when only a snapshot helps."""

    state: LogState
    chain: tuple[bytes, ...]
    """Hashes of the entries of this log, oldest first, the head last (only the newest where the log is long)."""
    totals: tuple[float, ...]
    """Tokens committed up to each of them."""
    images: tuple[ImageOffer, ...]


@dataclass(frozen=True, slots=True)
class NoOffer:
    """The asker's head is mine already, or I can't serve now."""

    head: bytes


# ------------------------------------------------------------------ bulk


@dataclass(frozen=True, slots=True)
class Bulk:
    """Base of the messages of the bulk lane."""


@dataclass(frozen=True, slots=True)
class Contrib(Bulk):
    """One chunk of a contributor's frozen vector, encoded, for its owner. An empty payload: nothing more comes of the
    contribution with this weight and position, in any chunk."""

    channel: str
    base: bytes
    chunk: int
    weight: float
    upto: int
    payload: bytes | memoryview = field(default=b"", metadata={"frame": True})


@dataclass(frozen=True, slots=True)
class Excluded:
    voter: Voter
    reason: str


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """What is hashed, together with the payload, into a chunk result's identity."""

    base: bytes
    chunk: int
    head: bytes
    ballot: Ballot
    owner: Voter
    included: tuple[Part, ...]
    excluded: tuple[Excluded, ...]


@dataclass(frozen=True, slots=True)
class Result(Bulk):
    """The encoded mean of one chunk, the same bytes for everybody."""

    header: ChunkHeader
    payload: bytes | memoryview = field(default=b"", metadata={"frame": True})


@dataclass(frozen=True, slots=True)
class Fetch:
    """Ask for a chunk result by hash (empty: whatever the current plan of `ballot` gave). Sent on the control lane."""

    head: bytes
    ballot: Ballot
    chunks: tuple[int, ...]
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class PieceReq:
    """Ask for pieces of an offered image."""

    channel: str
    digest: bytes
    pieces: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece(Bulk):
    channel: str
    digest: bytes
    piece: int
    payload: bytes | memoryview = field(default=b"", metadata={"frame": True})


@dataclass(frozen=True, slots=True)
class NoPiece:
    """The image is no longer kept here: ask for a new offer."""

    channel: str
    digest: bytes


MESSAGES: tuple[type, ...] = (
    Hello,
    Welcome,
    Ping,
    Ack,
    PingReq,
    IndirectAck,
    Leave,
    Relay,
    Ready,
    Prepare,
    Promise,
    Nack,
    Coord,
    Progress,
    Plan,
    Held,
    Commit,
    SyncReq,
    Steps,
    Offer,
    NoOffer,
    Contrib,
    Result,
    Fetch,
    PieceReq,
    Piece,
    NoPiece,
)
"""The index is the code on the wire: append only."""

PROOFS = (Ping, Ack, PingReq, IndirectAck)
"""What shows who lives: answered even in the middle of an event that takes long."""

Message = object
