"""The all-reduce of one group that is formed: a butterfly of parcels, without a coordinator.

    every member        holds its vector                          (part CONTRIBUTION of the group's key)
    owner of a chunk    pulls it from every contributor; sums in the order of the seats, in fp32; encodes the mean once;
                        holds it                                  (part RESULT)
    every receiver      pulls each chunk's result from its owner
    who has it all      says Done, again now and then to whom it has not heard it of; who has heard it of all others
                        that live gives the memory back
    who receives none   is there for those who do until all that live have said so, or until the group's time is over:
                        either is its end

What fails, and what is done:

- *A contributor* is dead, silent, sends a wrong size or what is not finite: its chunks that are not here are closed
  without it. The mean is that of who is left, weights renormalised; the seats included travel with every result. One
  that trickles: half of the group's time is for contributions, then the same. Where I stand in for a lost owner, all
  that still contribute have half of what is left from then on.
- *An owner*: whoever lacks its chunks asks the next owner among those that it does not hold for lost; that one reduces
  them anew from the contributors. The last one to ask is oneself.
- *Everybody else*: what is left is the own vector, and the report says so.
- *One that was never heard of* in a group that formed by itself (crowd.py) has not come: with fewer than this peer's
  `least` left, `GroupFailed`.
- *The time of the group is over*: `GroupFailed`, no mean; the caller's own tensors are untouched.

Two members that lost an owner at different moments may hold means of different contributors in its chunks: each knows
whose (`Outcome`), and each is a true weighted mean. A result is taken only where the seats it names could be in it.
"""

from __future__ import annotations

import collections
import math

from torch import Tensor

from dlc.comm.calls import GroupDone, GroupFailed, Outcome
from dlc.comm.crowd import NOT_COME, RollCall
from dlc.comm.effects import Pace
from dlc.comm.entries import Part
from dlc.comm.grid import Grid
from dlc.comm.ground import Ground
from dlc.comm.holdings import Holding, Tally
from dlc.comm.ids import Voter
from dlc.comm.meshmessages import Begin, Decline, Done, Key, LeftOut, Parcel, Seat
from dlc.comm.owners import Shape, asked_Bps
from dlc.comm.pacing import rates as connection_rates
from dlc.comm.parcels import LATE, LEFT, Intake, Parcels
from dlc.comm.partition import Member
from dlc.comm.reducer import ChunkReducer, Workspace
from dlc.comm.seating import sound_result

CONTRIBUTION, RESULT = 0, 1
NOBODY = "no contribution to the mean could be had"
CONTRIBUTION_SHARE = 0.5
"""Of the group's time, or of what is left of it where an owner is lost, that contributors have; the rest is for the
results."""
OPEN_BYTES, OPEN_CHUNKS_MIN = 16 << 20, 4
"""Of the chunks that an owner collects at the same time, times the contributors: what fast ones may be ahead."""
DONE_AGAIN_S = 1.0
"""Running time after which Done is said again."""


class Reduction:
    """One group from Begin until nobody needs anything of it."""

    def __init__(
        self,
        ground: Ground,
        parcels: Parcels,
        leader: Voter,
        begin: Begin,
        grid: Grid,
        vector: Tensor | None,
        out: Tensor | None,
        budget_s: float,
        least: int,
        tally: Tally,
    ) -> None:
        """vector: fp32, CPU, frozen until `over`; None: no contribution. out: where the means go; None: nowhere.
        least: with fewer who have come at all there is no mean. tally: of what this peer has sent in all its groups."""
        self.ground, self.parcels, self.begin, self.grid = ground, parcels, begin, grid
        self.vector, self.out = vector, out
        self.seats = begin.seats
        self.me = next(i for i, seat in enumerate(self.seats) if seat.voter == ground.me)
        self.outcome = Outcome(begin.key, begin.nonce, leader.peer, begin.seats)
        self.done = self.failed = False
        """Mine: the outcome is told, or the failure."""
        self._since = ground.now
        self._until_run = ground.running_s + budget_s
        self._roster = tuple(Part(seat.voter, seat.weight, 0) for seat in self.seats)
        self._contributors = [i for i, seat in enumerate(self.seats) if seat.contributes and seat.weight > 0]
        self._owner_of = [i for i, seat in enumerate(self.seats) for _ in range(seat.chunks)]
        self._lost: dict[int, str] = {}
        """Seats that are dead, gone, or gave no results."""
        self._absent: dict[int, str] = {}
        """Contributors that give nothing more, as an owner sees it, and why."""
        self._left_out: dict[int, str] = {}
        """Contributors that a result is without, and why, as its owner told it."""
        self._finished: set[int] = {self.me}
        """Seats that need nothing more."""
        self._results_left = set(range(grid.n_chunks)) if out is not None else set()
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
        self._contribute_until_run = self._done_again_run = -math.inf
        self._contributions: dict[int, Intake] = {}
        self._results: dict[int, Intake] = {}
        self._workspace = Workspace(grid)
        self._least, self._tally = least, tally
        self._roll = RollCall(ground, begin, self._partners()) if begin.crowd else None
        crowd = len(self._contributors)
        self._open_max = max(OPEN_CHUNKS_MIN, OPEN_BYTES // (grid.wire_bytes(0) * max(1, crowd)))

    def _partners(self) -> list[Seat]:
        """Who will ask me for something, or send me something."""
        mine = self.seats[self.me]
        return [
            seat
            for i, seat in enumerate(self.seats)
            if i != self.me
            and (
                (mine.chunks and (i in self._contributors or seat.receives))
                or (seat.chunks and (self.me in self._contributors or mine.receives))
            )
        ]

    # ---------------------------------------------------------------- beginning

    def start(self) -> None:
        holdings = self.parcels.holdings
        if self.vector is not None:
            weight = self.seats[self.me].weight
            contribution = Holding(self.grid, self._until_run, vector=self.vector, weight=weight, tally=self._tally)
            holdings.hold(self._key(CONTRIBUTION), contribution)
        for i, seat in enumerate(self.seats):
            if self.ground.members.gone(seat.voter):
                self._lost[i] = self._absent[i] = LEFT
                self._finished.add(i)
                self._never_comes(i)
        self._pace(begin=True)
        results = Holding(self.grid, self._until_run, wanted=self._wanted, tally=self._tally)
        holdings.hold(self._key(RESULT), results)
        self._reduce([c for c, owner in enumerate(self._owner_of) if owner == self.me])
        for owner in sorted(set(self._owner_of) - {self.me}):
            self._fetch(owner, [c for c in sorted(self._results_left) if self._owner_of[c] == owner])
        self._look()

    def _key(self, part: int) -> Key:
        return _key_of(self.begin, part)

    # ---------------------------------------------------------------- as an owner

    def _wanted(self, chunk: int) -> None:
        """Somebody asks me for a result that is not here: mine on its way, or that of an owner it has lost."""
        if chunk in self._empty:
            self.parcels.holdings.refuse(self._key(RESULT), chunk, NOBODY)
        elif chunk not in self._ever:
            self._reduce([chunk])

    def _reduce(self, chunks: list[int]) -> None:
        new = [c for c in chunks if c not in self._ever]
        if new:
            self._give_time({self._owner_of[c] for c in new})
        self._ever.update(new)
        self._to_reduce.extend(new)
        self._open()

    def _give_time(self, owners: set[int]) -> None:
        """Contributors have time for the chunks of these owners: once for each, and again only when it is over, so
        that one that trickles does not get more with each chunk that I am asked for."""
        now = self.ground.running_s
        if owners <= self._reduces_for and now < self._contribute_until_run:
            return
        self._reduces_for |= owners
        self._contribute_until_run = max(self._contribute_until_run, now + CONTRIBUTION_SHARE * (self._until_run - now))
        for intake in self._contributions.values():
            intake.until_run = self._contribute_until_run

    def _open(self) -> None:
        """Begin with further chunks, as far as memory is meant for it. Those that wait for nobody close at once and
        make room for more: one batch per event, for all of thousands may be such, and this peer must be heard of."""
        if not self._may_open or self.ground.now <= self._opened_at:
            return
        self._opened_at = self.ground.now
        opened = self._opened()
        for i in self._contributors:
            if i != self.me and i not in self._absent:
                self.parcels.want(self._contribution(i), opened)
        for chunk in opened:
            self._close_if_complete(chunk)

    @property
    def _may_open(self) -> bool:
        return bool(self._to_reduce) and len(self._reducers) < self._open_max and not self.failed

    def _opened(self) -> list[int]:
        """Chunks that are begun with now."""
        opened = []
        while self._may_open:
            chunk = self._to_reduce.popleft()
            opened.append(chunk)
            reducer = self._reducers[chunk] = ChunkReducer(self.grid, chunk, self._roster)
            if self.me in self._contributors and self.vector is not None:
                start, stop = self.grid.span(chunk)
                if reason := reducer.offer(self.me, self.grid.coder.encode(self.vector[start:stop])):
                    self._absent[self.me] = reason
        return opened

    def _contribution(self, i: int) -> Intake:
        intake = self._contributions.get(i)
        if intake is None:
            intake = self._contributions[i] = Intake(
                self._key(CONTRIBUTION),
                self.seats[i].voter,
                self.grid,
                self._contribute_until_run,
                len(self.seats),
                lambda parcel: self._take_contribution(i, parcel),
                lambda why: self._no_contribution(i, why),
            )
        return intake

    def _take_contribution(self, i: int, parcel: Parcel) -> None:
        self.outcome.bytes_received += len(parcel.payload)
        reducer = self._reducers.get(parcel.chunk)
        if reducer is None:
            return
        if reason := reducer.offer(i, parcel.payload):
            self.parcels.stop(self._contributions[i])
            self._no_contribution(i, reason)
            return
        self._close_if_complete(parcel.chunk)
        self._open()

    def _no_contribution(self, i: int, why: str) -> None:
        """What of it is here counts, the rest of its chunks are closed without it."""
        self._never_comes(i)
        self._absent.setdefault(i, why)
        self._close_without()
        self._open()

    def _close_without(self) -> None:
        """Who may have been waited for is absent now."""
        for chunk in sorted(self._reducers):
            self._close_if_complete(chunk)

    def _close_if_complete(self, chunk: int) -> None:
        """The caller opens others then."""
        reducer = self._reducers.get(chunk)
        if reducer is None or any(i in self._contributors and i not in self._absent for i in reducer.missing()):
            return
        del self._reducers[chunk]
        payload, included = reducer.close(self._workspace)
        refused = {i: why for i, why in reducer.refused.items() if i not in self._absent}
        self._absent |= refused
        if not included:
            self._empty.add(chunk)
            self.parcels.holdings.refuse(self._key(RESULT), chunk, NOBODY)
            self._fail(NOBODY)
            return
        weight = math.fsum(self.seats[i].weight for i in included)
        left_out = tuple(LeftOut(i, self._absent.get(i, LATE)) for i in self._contributors if i not in included)
        parcel = Parcel(self._key(RESULT), chunk, weight, included, left_out, payload)
        self.outcome.reduced += 1
        self.parcels.holdings.put(parcel.key, parcel)
        self._take_result(parcel)
        for i in refused.keys() & self._contributions.keys():
            self.parcels.stop(self._contributions[i])
        if refused:
            self._close_without()

    # ---------------------------------------------------------------- as a receiver

    def _fetch(self, owner: int, chunks: list[int]) -> None:
        """Get results from this owner, or from whoever stands in for it."""
        if not chunks:
            return
        giver = self._stand_in(owner)
        if giver == self.me:
            self._reduce(chunks)
            return
        intake = self._results.get(giver)
        if intake is None:
            intake = self._results[giver] = Intake(
                self._key(RESULT),
                self.seats[giver].voter,
                self.grid,
                self._until_run,
                len(self.seats),
                lambda parcel: self._take_result(parcel, giver),
                lambda why: self._no_results(giver, why),
            )
        self.parcels.want(intake, chunks)

    def _stand_in(self, owner: int) -> int:
        """The owner, or the next one that is not lost; me where none is left."""
        owners = [i for i, seat in enumerate(self.seats) if seat.chunks]
        after = owners.index(owner)
        for i in owners[after:] + owners[:after]:
            if i == self.me or i not in self._lost:
                return i
        return self.me

    def _take_result(self, parcel: Parcel, giver: int | None = None) -> None:
        """giver: None for one that I reduced myself."""
        chunk = parcel.chunk
        if giver is not None:
            self.outcome.bytes_received += len(parcel.payload)
        if self.out is None:
            self._count(parcel)
            return
        if chunk not in self._results_left:
            return
        if not self._sound(parcel, giver):
            return
        start, stop = self.grid.span(chunk)
        self.grid.coder.decode_result(parcel.payload, stop - start, self.out[start:stop])
        self._results_left.discard(chunk)
        self._count(parcel)
        self._look()

    def _count(self, parcel: Parcel) -> None:
        """Who is in this chunk of the result."""
        elems = self.grid.elems(parcel.chunk)
        self.outcome.known += elems
        if self.me not in parcel.included:
            self.outcome.without_mine.append(parcel.chunk)
        for i in parcel.included:
            peer = self.seats[i].voter.peer
            self.outcome.included[peer] = self.outcome.included.get(peer, 0) + elems
        for i, why in parcel.left_out:
            self._left_out.setdefault(i, why)

    def _sound(self, parcel: Parcel, giver: int | None) -> bool:
        """Whether this result can be one of this group."""
        sound = sound_result(parcel, self.seats, self._contributors)
        sound = sound and self.grid.coder.finite_result(parcel.payload, self.grid.elems(parcel.chunk))
        if sound:
            return True
        if giver is not None:
            self.ground.dropped[self.seats[giver].voter.peer, "a result that cannot be"] += 1
            self.parcels.stop(self._results[giver])
            self._no_results(giver, "refused: a result that cannot be")
        else:
            self._fail("the mean is not finite")
        return False

    def _no_results(self, giver: int, why: str) -> None:
        """This owner gives none: others stand in for what is lacking."""
        if self.done or self.failed:
            return
        if why == LATE and self.ground.running_s >= self._until_run:
            self._fail("the time for the exchange is over")
            return
        self._never_comes(giver)
        self._lost.setdefault(giver, why)
        self.outcome.lost.setdefault(self.seats[giver].voter.peer, why)
        self._results.pop(giver, None)
        for owner in sorted({self._owner_of[c] for c in self._results_left}):
            lacking = [c for c in sorted(self._results_left) if self._owner_of[c] == owner and c not in self._ever]
            asked = self._results.get(self._stand_in(owner))
            known = {*asked.todo, *asked.in_flight} if asked is not None else set()
            self._fetch(owner, [c for c in lacking if c not in known])

    # ---------------------------------------------------------------- the end

    def _look(self) -> None:
        """Is it all here?"""
        if self.done or self.failed:
            return
        if self._came < self._least:
            self._fail(f"{self._came} of at least {self._least} came")
            return
        if self._results_left:
            return
        if self.out is None and not self._served:
            return
        self.done = True
        outcome = self.outcome
        outcome.seconds = self.ground.now - self._since
        outcome.bytes_sent = self._tally.tell()
        for i in self._contributors:
            peer = self.seats[i].voter.peer
            if outcome.included.get(peer, 0) < outcome.known:
                outcome.missing[peer] = self._absent.get(i) or self._left_out.get(i) or self._lost.get(i) or LATE
        self.ground.notify(GroupDone(outcome))
        self._tell_done()

    def _fail(self, why: str) -> None:
        if not (self.done or self.failed):
            self.failed = True
            self.ground.notify(GroupFailed(self.begin.key, why))
            self._tell_done()
            self.release()

    def abandon(self) -> None:
        """The caller gives it up."""
        self._fail("given up")

    def _tell_done(self) -> None:
        self._pace(begin=False)
        self._say_done(set(range(len(self.seats))))

    def _say_done(self, seats: set[int]) -> None:
        self._done_again_run = self.ground.running_s + DONE_AGAIN_S
        for i in sorted(seats - {self.me}):
            if not self.ground.members.gone(self.seats[i].voter):
                self.ground.send(self.seats[i].voter, Done(self.begin.key, self.begin.nonce))

    @property
    def _served(self) -> bool:
        """Nobody who receives the mean needs anything more. Others who receive none say so only when it is true of
        them: who waited for them would wait for who waits for it."""
        return all(i in self._finished for i, seat in enumerate(self.seats) if seat.receives)

    @property
    def over(self) -> bool:
        """Nobody needs anything of me."""
        return len(self._finished) == len(self.seats)

    def release(self) -> None:
        """Give everything back."""
        for intake in [*self._contributions.values(), *self._results.values()]:
            self.parcels.stop(intake)
        for part in (CONTRIBUTION, RESULT):
            self.parcels.holdings.release(self._key(part), "the group is over")
        self._reducers.clear()
        self.vector = self.out = None

    # ---------------------------------------------------------------- messages, members, time

    @property
    def _came(self) -> int:
        """Members, without those of whom nothing was ever heard."""
        return len(self.seats) - (len(self._roll.never) if self._roll is not None else 0)

    def heard(self, sender: Voter) -> None:
        """A message of this group has come from there."""
        if self._roll is not None:
            self._roll.heard(sender)

    def lacks(self, voter: Voter) -> bool:
        """It is a member that may not know it."""
        return self._roll is not None and self._roll.lacks(voter)

    def _never_comes(self, i: int) -> None:
        """Nothing more is expected of it: if nothing was heard, it has not come."""
        if self._roll is not None:
            self._roll.lost(self.seats[i].voter)

    def receive_decline(self, sender: Voter, m: Decline) -> None:
        if self._roll is not None and self._roll.declined(sender, m):
            self._without(sender)

    def _without(self, voter: Voter) -> None:
        """It has given up, and is not in the group."""
        i = next(i for i, seat in enumerate(self.seats) if seat.voter == voter)
        for intakes in (self._contributions, self._results):
            if i in intakes:
                self.parcels.stop(intakes[i])
        if self.seats[i].chunks:
            self._no_results(i, NOT_COME)
        self.member_gone(voter, NOT_COME)

    def receive_done(self, sender: Voter) -> None:
        self.heard(sender)
        for i, seat in enumerate(self.seats):
            if seat.voter == sender:
                self._finished.add(i)
        self._look()

    def member_gone(self, voter: Voter, why: str) -> None:
        """Called after its intakes have failed."""
        for i, seat in enumerate(self.seats):
            if seat.voter == voter:
                self._finished.add(i)
                self._no_contribution(i, why)
                if i not in self._lost:
                    self._lost[i] = why
        self._look()

    def tick(self) -> None:
        for voter in self._roll.tick() if self._roll is not None else ():
            self._without(voter)
        if self.ground.running_s >= self._until_run:
            self._finished.update(range(len(self.seats)))
            self._look()
            self._fail("the time for the exchange is over")
        elif self.done and self.ground.running_s >= self._done_again_run:
            self._say_done(set(range(len(self.seats))) - self._finished)
        self._open()

    def next_deadline(self) -> float:
        if self._may_open:
            return self.ground.now
        due = self.ground.at(min(self._until_run, self._done_again_run) if self.done else self._until_run)
        called = self._roll.next_deadline() if self._roll is not None else None
        return due if called is None else min(due, called)

    # ---------------------------------------------------------------- how fast

    def _pace(self, begin: bool) -> None:
        """Connections go as fast as the group's plan needs, so that no link is overfilled (pacing.py)."""
        shape = self._shape()
        if not begin:
            self.ground.rates.end()
            self.ground.tell_rates()
            self.ground.out.extend(Pace(v.peer, None) for v in shape.voters if v != self.ground.me)
            return
        self.ground.rates.begin(self.ground.now, asked_Bps(shape, self.ground.me))
        found = connection_rates(shape, self.me)
        for voter, rate_Bps in zip(shape.voters, found, strict=True):
            if voter != self.ground.me:
                self.ground.out.append(Pace(voter.peer, rate_Bps))

    def _shape(self) -> Shape:
        members = tuple(
            Member(seat.up_Bps, seat.down_Bps, seat.contributes, seat.chunks > 0, seat.receives) for seat in self.seats
        )
        sizes = [0] * len(self.seats)
        for chunk, owner in enumerate(self._owner_of):
            sizes[owner] += self.grid.wire_bytes(chunk)
        total = sum(sizes)
        return Shape(tuple(s.voter for s in self.seats), members, tuple(size / total for size in sizes), total)


def _key_of(begin: Begin, part: int) -> Key:
    return Key(begin.key, begin.nonce, part)


def result_key(begin: Begin) -> Key:
    """What the results of a group are held under, from its beginning to its end."""
    return _key_of(begin, RESULT)
