"""Several peers at one table: their rounds, without a network, as a test wants them to be.

A seat has what training needs of a `Peer` (`dlc.train.swarm.TrainPeer`). Its offer waits on the table; `Table.commit`
makes a round of some offers, each in the chunks that are named, by the reducer of the real owners; each seat applies
that when it is told to, so one may be behind the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlc.comm.encoded import Encoded, payload_of
from dlc.comm.entries import Part
from dlc.comm.grid import Grid
from dlc.comm.ids import Voter
from dlc.comm.ledger import AWAY_ENTRIES, Ledger
from dlc.comm.reducer import ChunkReducer
from dlc.errors import RoundTimeout
from dlc.report import RoundReport, Share
from dlc.train.outer import OuterState
from tests.train.fake_peer import FakePosition


class Offered:
    """An offer on the table; satisfies `dlc.train.swarm.Pending`."""

    def __init__(self, vector: Tensor | Encoded, part: Part, norm: float, grid: Grid) -> None:
        self.vector, self.part, self.norm, self.grid = vector, part, norm, grid
        self.payloads = self.encoded()
        self.report: RoundReport | None = None
        self.done = self.counted = self.overtaken = False
        self.included: tuple[bool, ...] = ()
        self.misfit = ""

    def encoded(self) -> list[bytes]:
        return [bytes(payload_of(self.vector, self.grid, chunk)) for chunk in range(self.grid.n_chunks)]

    def values(self) -> Tensor:
        """The vector itself, or what its encoding says."""
        if isinstance(self.vector, Tensor):
            return self.vector.clone()
        elems = map(self.grid.elems, range(self.grid.n_chunks))
        return torch.cat([self.grid.coder.decode(p, n) for p, n in zip(self.payloads, elems, strict=True)])

    def wait(self, timeout_s: float | None = None) -> RoundReport | None:
        if not self.done:
            raise RoundTimeout("no round yet")
        return self.report


@dataclass(frozen=True)
class Chunk:
    """Of a round: elements [start, stop), their mean (None: of nobody), and whose values are in it."""

    start: int
    stop: int
    mean: Tensor | None
    included: tuple[Part, ...]


@dataclass(frozen=True)
class Round:
    report: RoundReport
    chunks: tuple[Chunk, ...]
    ledger: Ledger
    """And the tokens: after it."""
    tokens: float


class Table:
    """`grid`: of what rounds average."""

    def __init__(self, grid: Grid, lease_len: int) -> None:
        self.grid, self.leased = grid, lease_len > 0
        self.seats: list[Seat] = []
        self.rounds: list[Round] = []
        self.ledger, self.tokens = Ledger(lease_len), 0.0

    def seat(self, name: str) -> Seat:
        """Another peer, which `open` will bring to where the first one stands: not behind the rounds."""
        seat = Seat(self, name)
        self.seats.append(seat)
        self._seated()
        return seat

    def leave(self, seat: Seat) -> None:
        self.seats.remove(seat)
        self._seated()

    def lose_lease(self, seat: Seat) -> None:
        """It is put out of the electorate for long, and back, before it hears of anything else: its blocks are others'
        now, and what it has offered can be in no round any more."""
        others = [other.voter for other in self.seats if other is not seat] + [Voter("somebody", 1)]
        for _ in range(AWAY_ENTRIES + 1):
            self.ledger = self.ledger.seated(others)
        self._seated()
        if seat.offered is not None and seat.t == len(self.rounds) and self.leased:
            seat.offered.done, seat.offered = True, None

    def _seated(self) -> None:
        self.ledger = self.ledger.seated([seat.voter for seat in self.seats])
        for seat in self.seats:
            if seat.t == len(self.rounds):
                seat.ledger = self.ledger

    def commit(self, included: Mapping[Seat, Sequence[bool]]) -> Round:
        """A round of the offers of these seats, each in the mean of the chunks that say so."""
        seats = sorted(included, key=lambda seat: seat.voter)
        offers = [seat.offered for seat in seats]
        assert all(seat.t == len(self.rounds) for seat in seats)
        roster = tuple(offer.part for offer in offers if offer is not None)
        norms = [offer.norm for offer in offers if offer is not None]
        chunks, elements = list[Chunk](), dict.fromkeys(roster, 0)
        for chunk in range(self.grid.n_chunks):
            reducer = ChunkReducer(self.grid, chunk, roster, norms)
            for i, (seat, offer) in enumerate(zip(seats, offers, strict=True)):
                if included[seat][chunk]:
                    assert offer is not None and reducer.offer(i, offer.payloads[chunk]) is None
            payload, present = reducer.close()
            start, stop = self.grid.span(chunk)
            mean = self.grid.coder.decode_result(payload, stop - start) if present else None
            chunks.append(Chunk(start, stop, mean, tuple(roster[i] for i in present)))
            for i in present:
                elements[roster[i]] += stop - start
        counted = [part for part in roster if 2 * elements[part] > self.grid.numel]
        self.ledger = self.ledger.committed([(part.voter, part.upto) for part in counted])
        self.ledger = self.ledger.seated([seat.voter for seat in self.seats])
        self.tokens += sum(part.weight for part in counted)
        shares = tuple(Share(p.voter.peer, p.weight, elements[p] / self.grid.numel) for p in roster if elements[p])
        t, weight = len(self.rounds) + 1, sum(share.weight for share in shares)
        report = RoundReport("train", t, f"{t:04x}", shares, (), weight, 1, 1, 1.0, 1.0, 0.1, 1)
        self.rounds.append(Round(report, tuple(chunks), self.ledger, self.tokens))
        return self.rounds[-1]


class Seat:
    """One peer. `knows`: that a round is sure to count it is known when its state moves. `planned`: a plan may name its
    offer, which cannot be taken back."""

    def __init__(self, table: Table, name: str) -> None:
        self.table, self.id, self.voter = table, name, Voter(name, 1)
        self.t, self.ledger, self.tokens = len(table.rounds), table.ledger, table.tokens
        self.state: OuterState | None = None
        self.offered: Offered | None = None
        self.knows, self.planned = True, False
        self._counting = False

    def catch_up(self) -> None:
        """Apply the next round."""
        done, offer = self.table.rounds[self.t], self.offered
        assert self.state is not None
        chunks = tuple(offer is not None and offer.part in chunk.included for chunk in done.chunks)
        elements = sum(chunk.stop - chunk.start for chunk, own in zip(done.chunks, chunks, strict=True) if own)
        counted = 2 * elements > self.table.grid.numel
        self._counting = counted
        self.state.step(done.report.t, [(chunk.start, chunk.stop, chunk.mean) for chunk in done.chunks])
        self._counting = False
        self.t, self.ledger, self.tokens = done.report.t, done.ledger, done.tokens
        if offer is not None:
            assert offer.encoded() == offer.payloads, "the vector changed while it was offered"
            offer.report, offer.counted, offer.included, offer.done = done.report, counted, chunks, True
            self.offered = None

    # ---------------------------------------------------------------- as a peer

    def open(
        self,
        channel: str,
        state: OuterState,
        *,
        codec: str,
        chunk_elems: int,
        lease_len: int = 0,
        timeout_s: float | None = None,
    ) -> FakePosition:
        donor = next((s for s in self.table.seats if s is not self and s.state is not None and s.t == self.t), None)
        if self.state is None and donor is not None and donor.state is not None:
            state.restore(donor.state.export())
        self.state = state
        return self.position(channel)

    def abandon(self, channel: str, state: OuterState) -> None:
        raise AssertionError("a state is of no use")

    role = "trainer"

    def take_seat(self, timeout_s: float | None = None) -> None: ...

    def resumed_at(self, channel: str) -> int:
        return 0

    def position(self, channel: str) -> FakePosition:
        if self.state is None:
            return FakePosition(0, 0.0, b"", None, b"")
        lease = self.ledger.lease(self.voter)
        return FakePosition(self.t, self.tokens, self.t.to_bytes(2, "big"), lease, self.state.digest())

    def contribute(
        self,
        channel: str,
        vector: Tensor | Encoded,
        *,
        weight: float,
        upto: int = 0,
        norm: float = 0.0,
        after: int | None = None,
        patience_s: float = 0.0,
        filling: object = None,
    ) -> Offered:
        assert self.offered is None and self.ledger.valid(self.voter, upto)
        offer = Offered(vector, Part(self.voter, weight, upto), norm, self.table.grid)
        if after is not None and after != self.t:
            offer.overtaken = offer.done = True
        else:
            self.offered = offer
        return offer

    def withdraw(self, channel: str) -> bool:
        if self.planned or self.offered is None:
            return False
        self.offered = None
        return True

    def counts(self, channel: str) -> bool:
        return self._counting and self.knows

    def members(self) -> list[object]:
        return []

    def describe(self, **changes: object) -> None: ...

    def needed_by(self) -> list[str]:
        return []

    def leave(self, timeout_s: float = 5.0) -> None: ...
