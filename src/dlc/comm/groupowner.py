"""The chunks of a group's vector that one member reduces: its own, and those of owners that it stands in for.

    reduce(chunks) ──> opened, some at a time ──> pulled from every contributor ──> closed: summed, encoded, held

A chunk is closed as soon as nobody is waited for: every contributor has given it, or is absent. It is the mean of those
who gave it, in the order of the seats; who lacks in it, and why, goes with it.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable

from torch import Tensor

from dlc.comm.calls import Outcome
from dlc.comm.entries import Part
from dlc.comm.grid import Grid
from dlc.comm.ground import Ground
from dlc.comm.meshmessages import Begin, Key, LeftOut, Parcel
from dlc.comm.parcels import LATE, Intake, Parcels, nobody
from dlc.comm.reducer import ChunkReducer, Workspace

CONTRIBUTION, RESULT = 0, 1
"""Parts of a group's key."""
NOBODY = "no contribution to the mean could be had"
CONTRIBUTION_SHARE = 0.5
"""Of the group's time, or of what is left of it where an owner is lost, that contributors have; the rest is for the
results."""
OPEN_BYTES, OPEN_CHUNKS_MIN = 16 << 20, 4
"""Of the chunks that are collected at the same time, times the contributors: what fast ones may be ahead."""


def key_of(begin: Begin, part: int) -> Key:
    """What contributions, or results, of a group are held under, from its beginning to its end."""
    return Key(begin.key, begin.nonce, part)


def contributors_of(begin: Begin) -> list[int]:
    """The seats whose vectors are to be in the mean."""
    return [i for i, seat in enumerate(begin.seats) if seat.contributes and seat.weight > 0]


def owners_of(begin: Begin) -> list[int]:
    """By chunk: the seat that owns it."""
    return [i for i, seat in enumerate(begin.seats) for _ in range(seat.chunks)]


class GroupOwner:
    def __init__(
        self,
        ground: Ground,
        parcels: Parcels,
        begin: Begin,
        grid: Grid,
        vector: Tensor | None,
        until_run: float,
        outcome: Outcome,
        never_comes: Callable[[int], None],
        closed: Callable[[Parcel | None], None],
    ) -> None:
        """vector: mine, fp32, CPU, frozen until `stop`; None: no contribution. until_run: the end of the group's time.
        outcome: what is received and reduced is counted there. never_comes: told of a seat that gives nothing more.
        closed: takes each result; None where nobody gives anything of its chunk."""
        self._ground, self._parcels, self._begin, self._grid, self._vector = ground, parcels, begin, grid, vector
        self._until_run, self._outcome, self._never_comes, self._closed = until_run, outcome, never_comes, closed
        self._seats = begin.seats
        self._me = next(i for i, seat in enumerate(begin.seats) if seat.voter == ground.me)
        self._roster = tuple(Part(seat.voter, seat.weight, 0) for seat in begin.seats)
        self._contributors, self._owner_of = contributors_of(begin), owners_of(begin)
        self.absent: dict[int, str] = {}
        """Contributors that give nothing more, and why."""
        self._to_reduce: collections.deque[int] = collections.deque()
        self._opened_at = -math.inf
        """The moment at which chunks were begun with last."""
        self._reducers: dict[int, ChunkReducer] = {}
        self._ever: set[int] = set()
        """Chunks that I have begun to reduce."""
        self._empty: set[int] = set()
        """Those of them to which nobody could contribute any more."""
        self._reduces_for: set[int] = set()
        """Owners whose chunks I have begun to reduce: I, and those that I stand in for."""
        self._contribute_until_run = -math.inf
        self._contributions: dict[int, Intake] = {}
        self._workspace = Workspace(grid)
        crowd = len(self._contributors)
        self._open_max = max(OPEN_CHUNKS_MIN, OPEN_BYTES // (grid.wire_bytes(0) * max(1, crowd)))

    # ---------------------------------------------------------------- what is to be reduced

    def has(self, chunk: int) -> bool:
        """I have begun with it."""
        return chunk in self._ever

    def wanted(self, chunk: int) -> None:
        """Somebody asks me for a result that is not here: mine on its way, or that of an owner it has lost."""
        if chunk in self._empty:
            self._parcels.holdings.refuse(key_of(self._begin, RESULT), chunk, NOBODY)
        elif chunk not in self._ever:
            self.reduce([chunk])

    def reduce(self, chunks: list[int]) -> None:
        """These, too; what I have begun with I do not begin with again."""
        new = [c for c in chunks if c not in self._ever]
        if new:
            self._give_time({self._owner_of[c] for c in new})
        self._ever.update(new)
        self._to_reduce.extend(new)
        self.open()

    def _give_time(self, owners: set[int]) -> None:
        """Contributors have time for the chunks of these owners: once for each, and again only when it is over, so
        that one that trickles does not get more with each chunk that I am asked for."""
        now = self._ground.running_s
        if owners <= self._reduces_for and now < self._contribute_until_run:
            return
        self._reduces_for |= owners
        self._contribute_until_run = max(self._contribute_until_run, now + CONTRIBUTION_SHARE * (self._until_run - now))
        for intake in self._contributions.values():
            intake.until_run = self._contribute_until_run

    def open(self) -> None:
        """Begin with further chunks, as far as memory is meant for it. Those that wait for nobody close at once and
        make room for more: one batch per event, for all of thousands may be such, and this peer must be heard of."""
        if not self.may_open or self._ground.now <= self._opened_at:
            return
        self._opened_at = self._ground.now
        opened = self._opened()
        for i in self._contributors:
            if i != self._me and i not in self.absent:
                self._parcels.want(self._contribution(i), opened)
        for chunk in opened:
            self._close_if_complete(chunk)

    @property
    def may_open(self) -> bool:
        return bool(self._to_reduce) and len(self._reducers) < self._open_max

    def _opened(self) -> list[int]:
        """Chunks that are begun with now."""
        opened = []
        while self.may_open:
            chunk = self._to_reduce.popleft()
            opened.append(chunk)
            reducer = self._reducers[chunk] = ChunkReducer(self._grid, chunk, self._roster)
            if self._me in self._contributors and self._vector is not None:
                start, stop = self._grid.span(chunk)
                if reason := reducer.offer(self._me, self._grid.coder.encode(self._vector[start:stop])):
                    self.absent[self._me] = reason
        return opened

    # ---------------------------------------------------------------- what comes

    def _contribution(self, i: int) -> Intake:
        intake = self._contributions.get(i)
        if intake is None:
            intake = self._contributions[i] = Intake(
                key_of(self._begin, CONTRIBUTION),
                self._seats[i].voter,
                self._grid,
                self._contribute_until_run,
                len(self._seats),
                lambda parcel: self._take_contribution(i, parcel),
                lambda why: self.without(i, why),
            )
        return intake

    def _take_contribution(self, i: int, parcel: Parcel) -> None:
        self._outcome.bytes_received += len(parcel.payload)
        reducer = self._reducers.get(parcel.chunk)
        if reducer is None:
            return
        if reason := reducer.offer(i, parcel.payload):
            self._parcels.stop(self._contributions[i])
            self.without(i, reason)
            return
        self._close_if_complete(parcel.chunk)
        self.open()

    def without(self, i: int, why: str) -> None:
        """What of it is here counts, the rest of its chunks are closed without it."""
        self._never_comes(i)
        self.absent.setdefault(i, why)
        self._close_without()
        self.open()

    def _close_without(self) -> None:
        """Who may have been waited for is absent now."""
        for chunk in sorted(self._reducers):
            self._close_if_complete(chunk)

    def _close_if_complete(self, chunk: int) -> None:
        """The caller opens others then."""
        reducer = self._reducers.get(chunk)
        if reducer is None or any(i in self._contributors and i not in self.absent for i in reducer.missing()):
            return
        del self._reducers[chunk]
        payload, included = reducer.close(self._workspace)
        refused = {i: why for i, why in reducer.refused.items() if i not in self.absent}
        self.absent |= refused
        if not included:
            self._empty.add(chunk)
            self._parcels.holdings.refuse(key_of(self._begin, RESULT), chunk, NOBODY)
            self._closed(None)
            return
        weight = math.fsum(self._seats[i].weight for i in included)
        left_out = tuple(LeftOut(i, self.absent.get(i, LATE)) for i in self._contributors if i not in included)
        parcel = Parcel(key_of(self._begin, RESULT), chunk, weight, included, left_out, payload)
        self._outcome.reduced += 1
        self._parcels.holdings.put(parcel.key, parcel)
        self._closed(parcel)
        for i in refused.keys() & self._contributions.keys():
            self._parcels.stop(self._contributions[i])
        if refused:
            self._close_without()

    # ---------------------------------------------------------------- the end

    def ask_no_more(self, i: int) -> None:
        """Nothing is pulled from this contributor any more; `without` is to follow."""
        if i in self._contributions:
            self._parcels.stop(self._contributions[i])

    def stop(self) -> None:
        """Reduce no more, tell nothing more, and give everything back."""
        for intake in self._contributions.values():
            self._parcels.stop(intake)
        self._contributions.clear()
        self._never_comes = self._closed = nobody
        self._to_reduce.clear()
        self._reducers.clear()
        self._vector = None
