"""The table of records: the newest signed record of every known peer, mine, and proofs that a voter is gone.

Records are ordered by (inc, seq); the greater replaces the smaller, whatever way it came. A greater inc means that the
peer was restarted: it gets a fresh `Member`, since nothing that was proved of the old process holds for the new one.
A record with `left` moves its peer to the tombstones, so that an old record, which is still on its way somewhere, does
not bring it back. Of the dead without a vote those seen last are kept, as many as live, or DEAD_MAX; the others are
forgotten. A record of theirs that is not newer is old news, or whoever still has it would bring them back again and
again; a ping of their own does, or an answer to a Hello. Nobody else is ever forgotten, save when the table is full.

A record is looked at (well formed, signature) only if it would change the table: most gossip is old news.
"""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from dlc.comm.ids import PeerId, Voter
from dlc.comm.log import Log
from dlc.comm.messages import Record, StateDigest

RECORDS_MAX = 4096
"""Peers in the table, well above any swarm this protocol is for; over it, those never proved go first, oldest first."""
DEAD_MAX = 64
"""Dead peers that are kept however few live: each is asked once in so many T_dead/2, and a newcomer is told them all,
and asks them all at once. Machines lent for hours, with a new key each time, leave thousands in a week."""
FORGOTTEN_MAX = 4096
"""Forgotten peers of which so much is kept as to know old news of them, and to ask now and then where they were."""
TOMBSTONES_MAX = 1024
"""Peers that left, remembered for as long as stale records of them may still be on their way."""
ADDRESSES_MAX = 16
"""Addresses in one record, both lanes together."""
ADDRESS_CHARS_MAX = 280
"""A host name has at most 253 characters; the port and brackets come on top."""
STATES_MAX = 64
"""Channels whose digests stand in one record: training, or its fragments. Of more, the first by name."""
STATUS_BYTES_MAX = 1024
"""Largest status map, for people only; these three bound a record, and with it a message of gossip, in bytes."""
KEY_BYTES_MAX = 128
"""Longest public key, signature, head, peer id or role."""
RATE_MAX_Bps = 1e12
"""Of a link; beyond what any has, and far from what sums of them could not hold."""
NUMBER_MAX = 1 << 62
"""Counters stay in what the wire can carry, with room to add one."""
NEVER = -math.inf


class Standing(enum.IntEnum):
    """SWIM's view of a voter. The first three are the numbers of Rumour.state."""

    ALIVE = 0
    SUSPECT = 1
    DEAD = 2
    NEW = 3
    """Heard of, not yet proved."""


@dataclass(slots=True, eq=False)
class Member:
    """What I know of one voter other than me. Times are running times of this process (`*_run`)."""

    record: Record
    voter: Voter
    first_run: float
    """When it was first heard of."""
    standing: Standing = Standing.NEW
    told: tuple[int, int] = (0, 0)
    """(refutation, state) of the greatest rumour about it."""
    proof_run: float = NEVER
    """When the newest ping that it answered, directly or by way of another, was *sent*."""
    direct_run: float = NEVER
    """The same for direct answers alone."""
    relay: PeerId | None = None
    """By whom an indirect ping succeeded last."""
    relayed_run: float = math.inf
    """Since when it has answered by relays only."""
    told_apart: bool = False
    """That was told to the application."""
    rtt_s: float = -1.0
    """Smoothed round trip; negative: not measured."""
    rtt_var_s: float = 0.0
    sampled_at: float = NEVER
    """When the first answer came of those that count as one sample: to pings that were on their way until then."""
    sample_s: float = 0.0
    """The quickest of them."""
    rtt_before: tuple[float, float] = (-1.0, 0.0)
    """`rtt_s` and `rtt_var_s` before them."""
    suspect_run: float = 0.0
    doubt_run: float = NEVER
    """When strong evidence against it came; only pings sent later speak for it."""
    verdict_run: float = math.inf
    """When that doubt ends in death, unless it answers."""
    missed: int = 0
    """Probes in a row without an answer."""
    refused: bool = False
    """Nobody listens where it did, as its host has said since it answered last."""
    probe_nonce: int = 0
    """The ping that is being waited for; 0: none."""
    probe_run: float = 0.0
    direct_until_run: float = 0.0
    """When others are asked; inf once they were."""
    probe_until_run: float = 0.0
    """When the probe counts as missed."""
    probe_scored: bool = False
    """The probe is one of the round-robin, whose success improves local health."""
    due_run: float = math.inf
    """When to ping it next."""
    timer_run: float = math.inf
    """Time of its one valid entry in the timer heap."""
    watched: bool = False
    """Member of the electorate."""
    acked_seq: int = -1
    """It has my own record up to this seq."""
    owed_table: bool = False
    """The next message to it carries my table."""
    generation: int = -1
    """It answered a ping of this generation (see `begin_refresh`)."""

    @property
    def seen_run(self) -> float:
        """When the last ping that it answered was sent; where it answered none, when it was first heard of."""
        return max(self.proof_run, self.first_run)


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What stays of a peer that was dead for long."""

    voter: Voter
    seq: int
    """Of its last record."""
    control: tuple[str, ...]
    """Where that said it was to be reached."""
    seen_run: float
    """When it was last proved to live, or else first heard of."""


class Merged(enum.Enum):
    """What a record did to the table."""

    OLD = enum.auto()
    """Nothing new."""
    REFUSED = enum.auto()
    """Malformed, wrongly signed, or no room."""
    ADDED = enum.auto()
    UPDATED = enum.auto()
    REBORN = enum.auto()
    """A greater inc: the older voter is gone."""
    LEFT = enum.auto()
    GHOST = enum.auto()
    """An old record of a peer that left: whoever sent it has not heard of the leave."""
    REPLACED_ME = enum.auto()
    """A greater inc of my own peer id."""


class RecordTable:
    def __init__(self, own: Record, sign: Callable[[Record], Record], verify: Callable[[Record], bool]) -> None:
        self.me = own.voter
        self.members: dict[PeerId, Member] = {}
        self.tombstones: dict[PeerId, Record] = {}
        self.forgotten: dict[PeerId, Forgotten] = {}
        self.replaced_by: Voter | None = None
        self._own = own
        self._signed = False
        self._sign = sign
        self._verify = verify
        self._listed: list[Record] | None = None
        self._order: list[PeerId] | None = None

    # ------------------------------------------------------------------ mine

    @property
    def own(self) -> Record:
        """My record, signed at the first read after a change."""
        if not self._signed:
            self._own = self._sign(self._own)
            self._signed = True
        return self._own

    @property
    def own_seq(self) -> int:
        return self._own.seq

    def update_own(self, changes: dict[str, Any]) -> bool:
        """True if a field changed; only then seq goes up."""
        if all(getattr(self._own, name) == value for name, value in changes.items()):
            return False
        self._own = replace(self._own, **changes, seq=self._own.seq + 1, signature=b"")
        self._signed = False
        self._listed = None
        return True

    # ------------------------------------------------------------------ all

    def records(self) -> list[Record]:
        """The newest of each peer that has not left, mine first; not to be changed. The same list until a record is."""
        if self._listed is None:
            mine = [] if self._own.left else [self.own]
            self._listed = mine + [member.record for member in self.members.values()]
        return self._listed

    def order(self) -> list[PeerId]:
        """Known peers as a list that can be indexed; not to be changed."""
        if self._order is None:
            self._order = list(self.members)
        return self._order

    def gone(self, voter: Voter) -> bool:
        if voter.peer == self.me.peer:
            replaced = self.replaced_by is not None and self.replaced_by.inc > voter.inc
            return voter.inc < self.me.inc or replaced or (voter == self.me and self._own.left)
        member = self.members.get(voter.peer)
        if member is not None and member.voter.inc > voter.inc:
            return True
        known = self.forgotten.get(voter.peer)
        if known is not None and known.voter.inc > voter.inc:
            return True
        stone = self.tombstones.get(voter.peer)
        return stone is not None and stone.voter.inc >= voter.inc

    def merge(self, record: Record, running_s: float) -> tuple[Merged, Member | None]:
        """Take a record in; the member given back is the one that it replaced or removed, if any."""
        voter = record.voter
        old = self.members.get(voter.peer)
        if old is not None and (voter.inc, record.seq) <= (old.voter.inc, old.record.seq):
            return Merged.OLD, None
        if voter.peer == self.me.peer:
            return self._merge_own(record), None
        stone = self.tombstones.get(voter.peer)
        if stone is not None and stone.voter.inc >= voter.inc:
            return (Merged.OLD if record.left else Merged.GHOST), None
        known = self.forgotten.get(voter.peer)
        if known is not None and (voter.inc, record.seq) <= (known.voter.inc, known.seq):
            return Merged.OLD, None
        if not well_formed(record) or not self._verify(record):
            return Merged.REFUSED, None
        if record.left:
            self._bury(record)
            return Merged.LEFT, old
        if old is not None and old.voter == voter:
            old.record = record
            self._listed = None
            return Merged.UPDATED, None
        if old is None and not self._make_room():
            return Merged.REFUSED, None
        self.tombstones.pop(voter.peer, None)
        self.forgotten.pop(voter.peer, None)
        self.members[voter.peer] = Member(record, voter, running_s)
        self._changed()
        return (Merged.ADDED if old is None else Merged.REBORN), old

    def _merge_own(self, record: Record) -> Merged:
        newest = self.replaced_by or self.me
        if record.voter.inc <= newest.inc or not well_formed(record) or not self._verify(record):
            return Merged.OLD
        self.replaced_by = record.voter
        return Merged.REPLACED_ME

    def _bury(self, record: Record) -> None:
        self.members.pop(record.voter.peer, None)
        self.forgotten.pop(record.voter.peer, None)
        self.tombstones.pop(record.voter.peer, None)
        self.tombstones[record.voter.peer] = record
        if len(self.tombstones) > TOMBSTONES_MAX:
            del self.tombstones[next(iter(self.tombstones))]
        self._changed()

    def forget(self, dead: list[Member], seen_before_run: float) -> list[Member]:
        """Forget those of `dead` that were not seen since that time, as far as they are too many."""
        excess = len(dead) - max(len(self.members) - len(dead), DEAD_MAX)
        if excess <= 0:
            return []
        oldest = sorted(dead, key=lambda member: (member.proof_run, member.first_run))[:excess]
        forgotten = [member for member in oldest if member.seen_run < seen_before_run]
        for member in forgotten:
            peer = member.voter.peer
            del self.members[peer]
            self.forgotten.pop(peer, None)
            self.forgotten[peer] = Forgotten(member.voter, member.record.seq, member.record.control, member.seen_run)
            if len(self.forgotten) > FORGOTTEN_MAX:
                del self.forgotten[next(iter(self.forgotten))]
        self._changed()
        return forgotten

    def left_behind(self, rng: random.Random) -> tuple[str, ...]:
        """Where one of the forgotten was, at random: it may live, and have forgotten me as well."""
        return rng.choice(list(self.forgotten.values())).control[:1] if self.forgotten else ()

    def remember(self, voter: Voter) -> None:
        """What others tell of it is taken again."""
        known = self.forgotten.get(voter.peer)
        if known is not None and known.voter == voter:
            del self.forgotten[voter.peer]

    def _make_room(self) -> bool:
        if len(self.members) < RECORDS_MAX:
            return True
        unproved = (m for m in self.members.values() if m.proof_run == NEVER and not m.watched)
        oldest = min(unproved, key=lambda member: member.first_run, default=None)
        if oldest is None:
            return False
        del self.members[oldest.voter.peer]
        oldest.timer_run = math.inf
        return True

    def _changed(self) -> None:
        self._listed = None
        self._order = None


def told_states(log: Log) -> tuple[StateDigest, ...]:
    """What my record says of my channels."""
    held = sorted(c for c in log.attached if log.holds(c) and len(c) <= KEY_BYTES_MAX)
    return tuple(StateDigest(c, log.digest(c)) for c in held[:STATES_MAX])


def told_digest(record: Record, head: bytes, channel: str) -> bytes | None:
    """What it says of its state of a channel at this head; empty: it holds none. None: it stands elsewhere."""
    if record.head != head:
        return None
    return next((s.digest for s in record.states if s.channel == channel), b"")


def key_of(record: Record) -> tuple[float, int, bytes]:
    """Position of a peer's history in the total order."""
    return (record.tokens, record.depth, record.head)


def well_formed(record: Record) -> bool:
    """Sizes and numbers are in bounds: what no correct peer exceeds is neither kept nor passed on."""
    addresses = record.control + record.bulk
    texts = (record.voter.peer, record.role, record.public_key, record.signature, record.head)
    return (
        len(addresses) <= ADDRESSES_MAX
        and all(len(address) <= ADDRESS_CHARS_MAX for address in addresses)
        and len(record.status) <= STATUS_BYTES_MAX
        and len(record.states) <= STATES_MAX
        and all(len(s.channel) <= KEY_BYTES_MAX and len(s.digest) <= KEY_BYTES_MAX for s in record.states)
        and all(len(text) <= KEY_BYTES_MAX for text in texts)
        and all(0 <= number < NUMBER_MAX for number in (record.seq, record.depth))
        and 0 <= record.voter.inc < 4 * NUMBER_MAX
        and all(math.isfinite(number) for number in (record.tokens, record.speed, record.eta_s))
        and all(0 <= rate <= RATE_MAX_Bps for rate in (record.up_Bps, record.down_Bps))
    )
