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

import math

from dlc.comm import vectors
from dlc.comm.calls import Call, GroupDone, GroupFailed, Outcome
from dlc.comm.codecbase import all_finite
from dlc.comm.crowd import NOT_COME, RollCall
from dlc.comm.effects import Pace
from dlc.comm.ground import Ground
from dlc.comm.groupowner import CONTRIBUTION, NOBODY, RESULT, GroupOwner, contributors_of, key_of, owners_of
from dlc.comm.holdings import Holding, Tally
from dlc.comm.ids import PeerId, Voter
from dlc.comm.meshmessages import Begin, Decline, Done, Key, Parcel, Seat
from dlc.comm.owners import Shape, asked_Bps
from dlc.comm.pacing import rates as connection_rates
from dlc.comm.parcels import LATE, LEFT, Intake, Parcels
from dlc.comm.partition import Member
from dlc.comm.seating import sound_result

DONE_AGAIN_S = 1.0
"""Running time after which Done is said again."""


class Reduction:
    """One group from Begin until nobody needs anything of it."""

    def __init__(self, ground: Ground, parcels: Parcels, leader: Voter, begin: Begin, call: Call, tally: Tally) -> None:
        """call: what I want of it; with fewer than its `least` who have come at all there is no mean. tally: of what
        this peer has sent in all its groups."""
        self.ground, self.parcels, self.begin, self.grid = ground, parcels, begin, call.grid
        self.call = call
        self.vector, self.out = call.vector, call.out
        self.seats = begin.seats
        self.me = next(i for i, seat in enumerate(self.seats) if seat.voter == ground.me)
        self.outcome = Outcome(begin.key, begin.nonce, leader.peer, begin.seats)
        self.done = self.failed = False
        """Mine: the outcome is told, or the failure."""
        self._since = ground.now
        self._until_run = ground.running_s + call.budget_s
        self._contributors, self._owner_of = contributors_of(begin), owners_of(begin)
        self._lost: dict[int, str] = {}
        """Seats that are dead, gone, or gave no results."""
        self._left_out: dict[int, str] = {}
        """Contributors that a result is without, and why, as its owner told it."""
        self._finished: set[int] = {self.me}
        """Seats that need nothing more."""
        self._results_left = set(range(self.grid.n_chunks)) if self.out is not None else set()
        self._done_again_run = -math.inf
        self._results: dict[int, Intake] = {}
        self._least, self._tally = call.least, tally
        self._scratch = vectors.empty(self.grid.elems(0)) if call.keeps_unsaid else None
        self._roll = RollCall(ground, begin, self._partners()) if begin.crowd else None
        self._owner = GroupOwner(
            ground,
            parcels,
            begin,
            self.grid,
            self.vector,
            self._until_run,
            self.outcome,
            self._never_comes,
            self._closed,
        )

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
                self._lost[i] = self._owner.absent[i] = LEFT
                self._finished.add(i)
                self._never_comes(i)
        self._pace(begin=True)
        results = Holding(self.grid, self._until_run, wanted=self._owner.wanted, tally=self._tally)
        holdings.hold(self._key(RESULT), results)
        self._owner.reduce([c for c, owner in enumerate(self._owner_of) if owner == self.me])
        for owner in sorted(set(self._owner_of) - {self.me}):
            self._fetch(owner, [c for c in sorted(self._results_left) if self._owner_of[c] == owner])
        self._look()

    def _key(self, part: int) -> Key:
        return key_of(self.begin, part)

    def _closed(self, parcel: Parcel | None) -> None:
        """A result that I reduced; None: nobody gives anything of that chunk."""
        if parcel is None:
            self._fail(NOBODY)
        else:
            self._take_result(parcel)

    # ---------------------------------------------------------------- as a receiver

    def _fetch(self, owner: int, chunks: list[int]) -> None:
        """Get results from this owner, or from whoever stands in for it."""
        if not chunks or self.failed:  # it may have, over the chunks of the owner before this one
            return
        giver = self._stand_in(owner)
        if giver == self.me:
            self._owner.reduce(chunks)
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
        mean = self.grid.coder.decode_result(parcel.payload, stop - start, self.out[start:stop])
        if self.call.keeps_unsaid and self.vector is not None:
            own = self.vector[start:stop]
            if self.me in parcel.included or all_finite(own):  # what is included was found finite by whoever reduced it
                mean.add_(self.grid.unsaid(chunk, own, self._scratch))
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
            lacking = [c for c in sorted(self._results_left) if self._owner_of[c] == owner and not self._owner.has(c)]
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
                outcome.missing[peer] = self._owner.absent.get(i) or self._left_out.get(i) or self._lost.get(i) or LATE
        self.ground.notify(GroupDone(self.call, outcome))
        self._tell_done()

    def _fail(self, why: str) -> None:
        if not (self.done or self.failed):
            self.failed = True
            self.ground.notify(GroupFailed(self.call, why))
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

    @property
    def unfinished(self) -> frozenset[PeerId]:
        """Who may still need something of me."""
        return frozenset(seat.voter.peer for i, seat in enumerate(self.seats) if i not in self._finished)

    def release(self) -> None:
        """Give everything back, and refer to nothing that refers to this: vectors must not wait for the garbage
        collector, which a program of few objects runs seldom."""
        self._owner.stop()
        for intake in self._results.values():
            self.parcels.stop(intake)
        self._results.clear()
        for part in (CONTRIBUTION, RESULT):
            self.parcels.holdings.release(self._key(part), "the group is over")
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
        self._owner.ask_no_more(i)
        if i in self._results:
            self.parcels.stop(self._results[i])
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
                self._owner.without(i, why)
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
        self._owner.open()

    def next_deadline(self) -> float:
        if self._owner.may_open:
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
