"""The applied log of one peer: its state, the recent past in wire form, and the channels' own states.

`Log.commit` is the only way a head moves by one entry, whether the entry came by COMMIT, by catching up, or by replay;
`Log.install` is the only way it jumps (a snapshot). Both keep promise P2: equal head, equal digest.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from dlc.comm import vectors
from dlc.comm.codecs import get_codec
from dlc.comm.entries import EMPTY, OPEN, ROUND, Entry, LogState, Part, SavedLog, counted_parts
from dlc.comm.grid import Grid
from dlc.comm.ids import Voter
from dlc.comm.messages import Result
from dlc.comm.state import AtLength, State

HISTORY_ROUNDS_MAX = 8
"""Entries kept with their results, for peers that missed a few."""
HISTORY_STATELESS_MAX = 2
"""The same for rounds of channels without state: each holds memory that the next round would reuse."""
HISTORY_BYTES_MAX = 1 << 30
"""Bytes of results kept for them; the newest entry is always kept."""
HISTORY_PINNED_MAX = 256
"""Entries kept, within the same bytes, while somebody fetches the state that they follow."""
PASSED_MAX = 64
"""Heads of which a peer remembers what its own state was."""
CHAIN_MAX = 1 << 16
"""Hashes of old entries kept to find a common ancestor (2 MiB)."""
CHAIN_SENT_MAX = 4096
"""The newest of them, sent with an offer and kept in a checkpoint: 128 KiB, enough to find any recent fork."""


class Sink(Protocol):
    """Takes the means of one committed round of a channel without state."""

    @property
    def out(self) -> Tensor | None:
        """Where the means are to be decoded (fp32, CPU, contiguous, as long as the vector); None: each is looked at and
        forgotten."""

    def step(self, t: int, means: Iterator[tuple[int, int, Tensor | None]]) -> None: ...


@dataclass
class Past:
    """One applied entry with everything needed to apply it again elsewhere."""

    entry: Entry
    hashes: tuple[bytes, ...]
    results: tuple[Result, ...]

    @property
    def payload_bytes(self) -> int:
        return sum(len(r.payload) for r in self.results)


@dataclass
class Attached:
    """A channel state of this process."""

    state: State
    lease_len: int
    grid: Grid
    synced: bool = False
    """Equal to the swarm's state at this head."""
    digest: bytes = b""
    abandoned: bool = False
    """Whoever gave the state has no use for it: another may take its place."""
    misfit: str = ""
    """Why the run's state cannot be taken here: it is of another kind. Not by itself will that ever change."""
    passed: deque[tuple[bytes, bytes]] = field(default_factory=lambda: deque(maxlen=PASSED_MAX))
    """(head, digest) of this state at the last heads: what others tell of those comes later."""

    @property
    def void(self) -> bool:
        """As if there were none: it can never be in step, and nobody here waits for it any more."""
        return self.abandoned and bool(self.misfit)


@dataclass
class Log:
    state: LogState = field(default_factory=LogState)
    active: bool = False
    """This process founded the run, or got its head from an active peer. Never ends within a process."""
    past: deque[Past] = field(default_factory=deque)
    chain: deque[bytes] = field(default_factory=lambda: deque([EMPTY], maxlen=CHAIN_MAX))
    totals: deque[float] = field(default_factory=lambda: deque([0.0], maxlen=CHAIN_MAX))
    """Tokens committed up to each entry of the chain: tells what is set aside where a history is lost."""
    attached: dict[str, Attached] = field(default_factory=dict)
    history_bytes_max: int = HISTORY_BYTES_MAX
    before_change: Callable[[str], None] = lambda channel: None
    """Told the channel whose state is about to move."""
    at_length: AtLength = lambda work, size_bytes: work()
    """See `Context`: what is done to states goes through it."""
    pinned: dict[str, bytes] = field(default_factory=dict)
    """See `pin`."""
    learned_run: float = -math.inf
    """Running time at which I last learned of an entry that others may have decided: they may have lived until then."""
    fellows: tuple[bytes, frozenset[Voter]] = (EMPTY, frozenset())
    """An entry that I decided with others by force, and they: they stand there, or will as soon as they hear of it."""

    @property
    def head(self) -> bytes:
        return self.state.head

    @property
    def fellows_here(self) -> frozenset[Voter]:
        """Who decided this head with me by force, and me; empty where it was decided otherwise."""
        entry, voters = self.fellows
        return voters if entry == self.head else frozenset()

    @property
    def synced(self) -> bool:
        """Every attached channel that the run has opened is in step here."""
        return not self.lacking()

    def lacking(self) -> set[str]:
        """Attached channels that the run has opened, and whose state is not in step here."""
        return {name for name, a in self.attached.items() if not (a.synced or a.void) and self.is_open(name)}

    def is_open(self, channel: str) -> bool:
        known = self.state.channel(channel)
        return known is not None and known.opened

    def attach(self, channel: str, state: State, grid: Grid, lease_len: int) -> Attached:
        attached = Attached(state, lease_len, grid)
        self.at_length(lambda: _tell_digest(attached), state.image_bytes())
        self.attached[channel] = attached
        return attached

    def digest(self, channel: str) -> bytes:
        """Digest of the channel's state here; empty where this process holds none, or none that is in step."""
        attached = self.attached.get(channel)
        return attached.digest if attached and attached.synced else b""

    def holds(self, channel: str) -> bool:
        """The channel is open, and its state here is in step."""
        return self.is_open(channel) and bool(self.digest(channel))

    def servable(self, channel: str) -> bytes:
        """Digest of a state that others may fetch here: one in step, or the first state of a channel not open yet."""
        attached = self.attached.get(channel)
        if attached is None or (self.is_open(channel) and not attached.synced):
            return b""
        return attached.digest

    def commit(self, entry: Entry, hashes: tuple[bytes, ...], results: tuple[Result, ...], sink: Sink | None) -> None:
        """Apply the next entry. `results` are all chunk results of its manifest, in chunk order."""
        counted = counted_of(entry, results)
        self.state = self.state.apply(entry, counted)
        self.chain.append(self.state.head)
        self.totals.append(self.state.tokens)
        attached = self.attached.get(entry.channel)
        if entry.kind == OPEN and attached:
            attached.synced = attached.digest == entry.digest
            attached.misfit = "" if attached.synced else attached.misfit
        if entry.kind == ROUND and attached and attached.synced:
            self._step(attached, [Past(entry, hashes, results)])
        elif entry.kind == ROUND and sink is not None:
            self.at_length(lambda: sink.step(entry.t, means(entry, results, sink.out)), 4 * entry.numel)
        for channel, other in self.attached.items():
            if other.synced and self.is_open(channel):
                other.passed.append((self.head, other.digest))
        self.past.append(Past(entry, hashes, results))
        self._trim()

    def follow(self, channel: str, later: Sequence[Past]) -> None:
        """Bring a state that was restored at an older head up to mine by the entries kept since."""
        attached = self.attached[channel]
        mine = [past for past in later if past.entry.channel == channel]
        opening = next((i for i, past in enumerate(mine) if past.entry.kind == OPEN), None)
        if opening is not None:
            attached.synced = attached.digest == mine[opening].entry.digest
            mine = mine[opening + 1 :]  # rounds before it were not of a state
        if attached.synced:
            self._step(attached, mine)

    def _step(self, attached: Attached, rounds: Sequence[Past]) -> None:
        """Rounds move the state of their channel."""

        def work() -> None:
            for past in rounds:
                self.before_change(past.entry.channel)
                attached.state.step(past.entry.t, means(past.entry, past.results))
            _tell_digest(attached)

        if rounds:
            self.at_length(work, len(rounds) * attached.state.image_bytes())

    def install(self, state: LogState, chain: Sequence[bytes], totals: Sequence[float]) -> None:
        """Jump to a snapshot; the caller has restored the channel states that belong to it."""
        self.state = state
        self.past.clear()
        self.chain.clear()
        self.chain.extend(chain)
        self.totals.clear()
        self.totals.extend(totals)

    def saved(self) -> SavedLog:
        """For whoever is to go on from here, a restart of this peer or another one."""
        return SavedLog(self.state, tuple(self.chain)[-CHAIN_SENT_MAX:], tuple(self.totals)[-CHAIN_SENT_MAX:])

    def beyond(self, chain: Collection[bytes]) -> tuple[int, float]:
        """(training rounds, tokens) of my history after the newest entry that is in `chain` too."""
        others, rounds, newer = set(chain), 0, self.state.tokens
        for entry, tokens in zip(reversed(self.chain), reversed(self.totals), strict=True):
            rounds += tokens < newer
            newer = tokens
            if entry in others:
                break
        return rounds, self.state.tokens - newer

    def parted_at(self, chain: Collection[bytes]) -> bytes:
        """The newest entry of my history that is in `chain` too: my head, where mine goes on in it. EMPTY where none of
        those that are kept is."""
        others = set(chain)
        return next((entry for entry in reversed(self.chain) if entry in others), EMPTY)

    def after(self, head: bytes) -> list[Past] | None:
        """The kept entries that follow `head`, or None where the history does not reach back to it."""
        if head == self.head:
            return []
        for index, past in enumerate(self.past):
            if past.entry.parent == head:
                return list(self.past)[index:]
        return None

    def recent(self) -> set[bytes]:
        """The heads that the kept entries follow: a state that stands there can be brought up to mine."""
        return {past.entry.parent for past in self.past}

    def pin(self, use: str, head: bytes) -> None:
        """Keep what follows this head for longer, for this use: a state that stands there is being fetched, and what
        came since is applied to it. b"": none is."""
        if head != self.pinned.get(use, b""):
            self.pinned[use] = head
            self._trim()

    @property
    def holds_pinned(self) -> bool:
        """The history is longer than usual on behalf of somebody."""
        return not self.recent().isdisjoint(self.pinned.values())

    def _trim(self) -> None:
        total = sum(p.payload_bytes for p in self.past)
        while len(self.past) > 1 and total > self.history_bytes_max:
            total -= self.past.popleft().payload_bytes
        while len(self.past) > HISTORY_PINNED_MAX:
            self.past.popleft()
        if self.holds_pinned:
            return
        self._thin()
        while len(self.past) > HISTORY_ROUNDS_MAX:
            self.past.popleft()

    def _thin(self) -> None:
        """Rounds of channels without state are of use to a straggler only: the last few, not a whole history."""
        stateless = [i for i, p in enumerate(self.past) if p.entry.kind == ROUND and not self.is_open(p.entry.channel)]
        if len(stateless) > HISTORY_STATELESS_MAX:
            # A log is replayed without gaps: what stands before the dropped round goes with it.
            for _ in range(stateless[-HISTORY_STATELESS_MAX]):
                self.past.popleft()


def _tell_digest(attached: Attached) -> None:
    attached.digest = attached.state.digest()


def grid_of(entry: Entry) -> Grid:
    return Grid(entry.numel, entry.chunk_elems, entry.codec)


def counted_of(entry: Entry, results: Sequence[Result]) -> tuple[Part, ...]:
    if entry.kind != ROUND:
        return ()
    grid = grid_of(entry)
    spans = (grid.span(r.header.chunk) for r in results)
    sizes = (stop - start for start, stop in spans)
    return counted_parts(entry.roster, zip(sizes, (r.header.included for r in results), strict=True))


def means(
    entry: Entry, results: Sequence[Result], out: Tensor | None = None
) -> Iterator[tuple[int, int, Tensor | None]]:
    """Decoded fp32 means of a round, chunk by chunk; None where nobody contributed.

    out: a vector that they are decoded into, in their places; else the memory of one is used again for the next.
    """
    grid, codec = grid_of(entry), get_codec(entry.codec)
    decoded = vectors.empty(min(grid.chunk_elems, grid.numel)) if out is None else out
    for result in results:
        start, stop = grid.span(result.header.chunk)
        into = decoded[: stop - start] if out is None else out[start:stop]
        yield start, stop, codec.decode_result(result.payload, stop - start, into) if result.header.included else None
