"""The log: entries, their hashes, electorates and quorums, and the small replicated state that entries build.

A run is a chain of entries, each naming its parent by hash. Three kinds:
  config  changes who votes; the founding entry is a config entry whose parent is EMPTY
  open    opens a channel with state: its grid, the digest of its first state, its lease length
  round   a mean update of one channel: roster, and the manifest (hash of every chunk result)
Everything here is pure. What a round *counted* is a function of its chunk headers, so every peer that holds the bytes
of a manifest computes the same next `LogState`.
"""

from __future__ import annotations

import dataclasses
import functools
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from dlc.comm.ids import Voter
from dlc.comm.ledger import Ledger
from dlc.comm.wire import pack, size_of
from dlc.errors import UsageError

EMPTY = bytes(32)
"""Head of the empty log: parent of the founding entry."""
CONFIG, OPEN, ROUND = "config", "open", "round"


@dataclass(frozen=True, slots=True)
class Part:
    """One contribution as a roster names it."""

    voter: Voter
    weight: float
    upto: int
    """Lease position after the samples of this contribution. The number of the offer in channels without leases; minus
    that where it brings no samples that are not counted yet."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One decided value. The ballot is not part of it: choosing the same value again gives the same hash."""

    kind: str
    parent: bytes
    depth: int
    channel: str
    t: int
    """Round number of the channel (1 for its first round); 0 for config and open."""
    electorate: tuple[Voter, ...]
    """Who decides the entry after this one."""
    trainers: tuple[Voter, ...]
    """The part of the electorate that takes leases."""
    roster: tuple[Part, ...]
    numel: int
    chunk_elems: int
    codec: str
    manifest: bytes
    """Hash of all chunk hashes; empty unless kind is round."""
    digest: bytes
    """Of the channel's first state; empty unless kind is open."""
    lease_len: int

    @property
    def hash(self) -> bytes:
        return blake3(pack(self)).digest()


def manifest_hash(hashes: Sequence[bytes]) -> bytes:
    return blake3(b"".join(hashes)).digest()


def is_quorum(present: Iterable[Voter], electorate: Sequence[Voter], rank0: Voter | None) -> bool:
    """More than half, or exactly half with rank 0 among them (its casting vote): any two quorums intersect."""
    count = len(set(present) & set(electorate))
    if 2 * count == len(electorate):
        return rank0 is not None and rank0 in set(present)
    return 2 * count > len(electorate)


CHANNEL_BYTES_MAX = 128
"""Of a channel's name: it is in the log's state for ever, and in what peers tell of themselves."""
CHANNELS_MAX = 1024
"""Channels that a run may have had: the state of the log, which names them all, must fit a message."""


def check_channel(name: str, state: LogState) -> None:
    """UsageError where this is no name for a channel, or the run that stands at `state` can have no new one."""
    if not 1 <= size_of(name) <= CHANNEL_BYTES_MAX:
        raise UsageError(f"a name is a string of 1 to {CHANNEL_BYTES_MAX} bytes of UTF-8, not {name!r:.60}")
    if len(state.channels) >= CHANNELS_MAX and state.channel(name) is None:
        raise UsageError(
            f"the run has had {len(state.channels)} names, and {name!r} would be a new one: use one name for all calls "
            "of one kind, without a step number; the rounds of a name are numbered anyway"
        )


def forget_oldest(by_channel: dict[str, Any]) -> None:
    """Names of which nothing ever comes do not fill the memory: called after one was added."""
    if len(by_channel) > CHANNELS_MAX:
        del by_channel[next(iter(by_channel))]


@dataclass(frozen=True, slots=True)
class ChannelState:
    """What the log knows of one channel."""

    name: str
    base: bytes
    """Hash of the channel's last round or open entry."""
    t: int
    numel: int
    chunk_elems: int
    codec: str
    opened: bool
    """False: a library all-reduce, without state; its grid may change with every round."""
    leased: bool
    """Its samples come from the ledger. At most one channel of a run is leased."""


@dataclass(frozen=True, slots=True)
class LogState:
    """Replicated state of the log itself (the tensors are the channels' own)."""

    head: bytes = EMPTY
    depth: int = 0
    tokens: float = 0.0
    electorate: tuple[Voter, ...] = ()
    trainers: tuple[Voter, ...] = ()
    rank_seed: bytes = EMPTY
    """Hash of the last open or round entry, or of the founding one: seeds the rank order, which config entries keep."""
    channels: tuple[ChannelState, ...] = ()
    ledger: Ledger = Ledger()

    @property
    def key(self) -> tuple[float, int, bytes]:
        """Position in the total order of histories; grows along every log."""
        return (self.tokens, self.depth, self.head)

    @property
    def ranked(self) -> tuple[Voter, ...]:
        """The electorate in rank order; rank 0 coordinates ballot 0 and has the casting vote."""
        return rank(self.rank_seed, self.electorate)

    @property
    def rank0(self) -> Voter | None:
        return self.ranked[0] if self.electorate else None

    @property
    def leased(self) -> str | None:
        """The channel whose samples come from the ledger, if one is open."""
        return next((c.name for c in self.channels if c.leased), None)

    def channel(self, name: str) -> ChannelState | None:
        at = bisect_left(self.channels, name, key=lambda c: c.name)
        return self.channels[at] if at < len(self.channels) and self.channels[at].name == name else None

    def base(self, name: str) -> bytes:
        """Names the channel's current round for the data plane; defined for channels that had no round yet too."""
        channel = self.channel(name)
        return channel.base if channel else blake3(name.encode()).digest()

    def round_of(self, name: str) -> int:
        channel = self.channel(name)
        return channel.t if channel else 0

    def quorum(self, present: Iterable[Voter]) -> bool:
        return is_quorum(present, self.electorate, self.rank0)

    def apply(self, entry: Entry, counted: Sequence[Part] = ()) -> LogState:
        """The state after `entry`; `counted`: the roster members included in more than half of the elements."""
        if entry.parent != self.head:
            raise ValueError("entry does not follow this head")
        head = entry.hash
        ledger, tokens = self.ledger, self.tokens
        channels = self.channels
        old = self.channel(entry.channel)
        opened = entry.kind == OPEN or (old is not None and old.opened)
        leased = bool(entry.lease_len) if entry.kind == OPEN else old is not None and old.leased
        if entry.kind != CONFIG:
            new = ChannelState(
                entry.channel, head, entry.t, entry.numel, entry.chunk_elems, entry.codec, opened, leased
            )
            channels = tuple(sorted([c for c in channels if c.name != entry.channel] + [new], key=lambda c: c.name))
        if entry.kind == OPEN and leased:
            ledger = dataclasses.replace(ledger, length=entry.lease_len)
        if entry.kind == ROUND and leased:
            ledger = ledger.committed([(p.voter, p.upto) for p in counted])
        if entry.kind == ROUND and opened:
            tokens += sum(p.weight for p in counted if p.upto >= 0)
        keeps_rank = entry.kind == CONFIG and self.head != EMPTY
        return LogState(
            head=head,
            depth=self.depth + 1,
            tokens=tokens,
            electorate=entry.electorate,
            trainers=entry.trainers,
            rank_seed=self.rank_seed if keeps_rank else head,
            channels=channels,
            ledger=ledger.seated(entry.trainers),
        )


@functools.lru_cache(maxsize=256)
def rank(seed: bytes, electorate: tuple[Voter, ...]) -> tuple[Voter, ...]:
    return tuple(sorted(electorate, key=lambda voter: blake3(seed + pack(voter)).digest()))


@dataclass(frozen=True, slots=True)
class SavedLog:
    """A log as a checkpoint has it: where it stands, and the entries that led there."""

    state: LogState
    chain: tuple[bytes, ...]
    """Hashes of the newest entries, oldest first: the last one is the head."""
    totals: tuple[float, ...]
    """Tokens committed up to each of them."""

    @property
    def fits(self) -> bool:
        """Whether its parts are of one log."""
        return len(self.chain) == len(self.totals) > 0 and self.chain[-1] == self.state.head


def counted_parts(roster: Sequence[Part], included: Iterable[tuple[int, Sequence[Part]]]) -> tuple[Part, ...]:
    """Roster members that are in more than half of the elements; `included`: (elements, parts) per chunk."""
    elements = dict.fromkeys((p.voter for p in roster), 0)
    total = 0
    for numel, parts in included:
        total += numel
        for part in parts:
            elements[part.voter] += numel
    return tuple(p for p in roster if 2 * elements[p.voter] > total)
