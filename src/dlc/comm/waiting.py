"""Why nothing can go on just now, and for whom this peer waits: said to its application, and never left unsaid.

Looked at with every tick, and told at each change, as time runs down, and again as time goes by, ever more seldom. What
an ordinary start goes through in passing is told only when it lasts. Nothing here changes what the protocol does.

| this peer | is told |
|---|---|
| is outside the run, a listed address has not answered | which; a run is founded, or resumed, only with all of them |
| is outside the run, who answered left, is silent or cannot dial here, nobody else is in it | which; what helps |
| is outside the run, and so is everybody here | these; each of them says for whom it waits |
| sees no quorum alive | the voters that are missing, and how long until the others may go on without them |
| lacks a state that nobody here holds | that, and of which channel if it holds others |
| wishes to open a channel, and half of the voters or more do not | these |
| wishes to open a channel with leases, and another one has them | which |
"""

from __future__ import annotations

import dataclasses
import math

from dlc.comm.context import Context
from dlc.comm.entries import EMPTY, OPEN, ROUND, Entry
from dlc.comm.events import Waiting
from dlc.comm.log import Log
from dlc.comm.messages import PREP, RUN, WAIT
from dlc.comm.permit import alive_records, can_vote, greater_alive
from dlc.comm.reach import out_of_reach
from dlc.comm.roles import OBSERVER
from dlc.comm.slot import Slot

COUNTDOWN_S = 5.0
"""How often a peer that waits for a quorum says how long it still will."""
AGAIN_S = 30.0
"""What has no end in sight is told again after this time, twice this time, four times ..."""
CONTACT_S = 10.0
"""A newcomer hears of a member, and of what it holds, and proves that it lives, within this time: it took 6 s at round
trips of 0.6 s."""
OPENING_S = 15.0
"""Voters that come together wish a channel to be opened within this time: more than an opening waits for them."""

HEARD_S = 0.5
"""In a new slot the coordinator has heard of everybody's wishes by then, and says in truth who lacks one."""


class Waits:
    def __init__(self, ctx: Context, log: Log, slot: Slot) -> None:
        self.ctx, self.log, self.slot = ctx, log, slot
        self.now: Waiting | None = None
        """What was told last, as long as it is so."""
        self._reason = ""
        self._since = 0.0
        """Running time since which this reason holds."""
        self._not_wishing: tuple[str, ...] = ()

    def tick(self) -> None:
        """Look, and tell the application what has changed."""
        waiting, grace_s = self._outside() or self._without_quorum() or self._unopened() or (None, 0.0)
        before, self.now = self.now, None
        if waiting is None:
            self._reason = ""
            return
        if waiting.reason != self._reason:
            self._reason, self._since = waiting.reason, self.ctx.running_s
        waited_s = self.ctx.running_s - self._since
        if waited_s < grace_s:
            return
        if waiting.left_s is None:
            waiting = dataclasses.replace(waiting, waited_s=_seldom(waited_s))
        self.now = waiting
        if waiting != before:
            self.ctx.notify(waiting)

    def why(self) -> Waiting | None:
        """For who has waited in vain for a round, an opening or a vote: what holds it up, as far as that is known here.
        Told or not, but for what may pass by itself."""
        told, (outside, grace_s) = self.now, self._outside() or self._without_quorum() or (None, 0.0)
        if outside is not None and told is not None and told.reason == outside.reason:
            return told  # with how long it has been so
        if outside is not None and not grace_s:
            return outside
        unopened = self._unopened()
        return self._under_way() or (unopened[0] if unopened else self._not_begun())

    def _under_way(self) -> Waiting | None:
        """It has only to be done yet; by whom, of those that are not this peer."""
        log, slot, me = self.log, self.slot, self.ctx.me
        if not (log.active or slot.founder):
            here = tuple(record.voter.peer for record in alive_records(self.ctx))
            return Waiting("it has not heard yet how far the run is", here or slot.listed)
        electorate = log.state.electorate
        if electorate and me not in electorate and self.ctx.members.own.role != OBSERVER:
            return Waiting("it has no vote yet, which these give to who is in step", tuple(v.peer for v in electorate))
        if lacking := sorted(log.lacking()):
            return Waiting(f"the run's state of channel {lacking[0]!r} is still on its way to this peer", ())
        if slot.plan is None:
            return None
        what = f"{_named(slot.plan.entry)} is under way"
        lacks = self._beaten(RUN)
        return Waiting(f"{what}, and lacks the votes of", lacks) if lacks else Waiting(what, ())

    def _not_begun(self) -> Waiting | None:
        """Nothing is under way."""
        if silent := self._beaten(PREP):
            return Waiting("a coordinator asks who is with it, and these have not answered", silent)
        trainers = {v.peer for v in self.log.state.trainers}
        late = tuple(peer for peer in self._beaten(WAIT) if peer in trainers)
        return Waiting("no round has begun, and these are not ready for one", late) if late else None

    def _beaten(self, phase: str) -> tuple[str, ...]:
        """Whom the coordinator waits for in this phase, as it said last, but for this peer."""
        beat = self.slot.beat
        return tuple(v.peer for v in beat.waiting_for if v != self.ctx.me) if beat and beat.phase == phase else ()

    def _outside(self) -> tuple[Waiting, float] | None:
        """I have not met the run, or not founded it yet."""
        log, slot, members = self.log, self.slot, self.ctx.members
        if log.active or slot.founder or greater_alive(self.ctx, log):
            return None
        alive = alive_records(self.ctx)
        if any(record.active for record in alive):
            return None
        unheard = tuple(address for address in slot.listed if address not in slot.answers)
        if unheard:
            what = "founding" if log.head == EMPTY else "going on from a checkpoint"
            advice = "start these, or give the address of a member that runs (--peers)"
            met = any(record.active for record in members.records())  # but has not proved yet that it lives
            return Waiting(f"{what} needs every listed address", unheard, advice=advice), CONTACT_S if met else 0.0
        here = {record.voter.peer for record in alive} | {self.ctx.me.peer}
        lost = tuple(address for address in slot.listed if slot.answers[address] not in here)
        watching = {r.voter.peer for r in members.records() if not can_vote(r) and members.alive(r.voter)}
        if lost and all(slot.answers[address] in watching for address in lost):
            reason = "no member of the run is in reach but observers, which have nothing of it"
            advice = (
                "give the address of another member (--peers); if the run has ended, start these anew to begin another"
            )
            return Waiting(reason, lost, advice=advice), CONTACT_S
        if lost:
            mine = members.own.control[0]
            reason = (
                f"no member of the run is in reach: those who answered have left, are silent, or cannot dial {mine}"
            )
            advice = (
                "does a firewall, or a router, let that TCP port of this peer's and the next one in (--advertise where "
                "others reach it elsewhere)? These are tried for ever; give the address of another member (--peers). "
                "No run is founded instead"
            )
            return Waiting(reason, lost, advice=advice), CONTACT_S
        if log.head == EMPTY and members.own.role != OBSERVER:
            peers = tuple(sorted(record.voter.peer for record in alive))
            return Waiting("nobody here can found the run", peers, advice="each says for whom it waits"), CONTACT_S
        return None

    def _without_quorum(self) -> tuple[Waiting, float] | None:
        state, members = self.log.state, self.ctx.members
        living = members.living(state.electorate)
        absent = [v for v in state.electorate if v not in living] if len(living) < len(state.electorate) else []
        absent += sorted(v for v in self.log.fellows_here.difference(state.electorate) if not members.alive(v))
        missing = tuple(v.peer for v in absent if not members.gone(v))
        if missing and not state.quorum(living):
            unseen_s = min(members.unseen_s(v) for v in absent if not members.gone(v))
            learned_s = self.ctx.running_s - self.log.learned_run
            left_s = max(0.0, members.t_evict_s - min(unseen_s, learned_s))
            return Waiting("no quorum", missing, COUNTDOWN_S * math.ceil(left_s / COUNTDOWN_S)), 0.0
        lost = sorted(out_of_reach(self.ctx, self.log))  # mine differs, or was never fetched
        if lost:
            others = any(map(self.log.holds, self.log.attached))
            which = f" of channel {', '.join(map(repr, lost))}" if others else ""
            advice = "start a peer that has it, in memory or as a checkpoint"
            advice += "; other channels go on meanwhile" if others else ""
            return Waiting(f"the run's state{which} is held by nobody who is here", (), advice=advice), CONTACT_S
        return None

    def _unopened(self) -> tuple[Waiting, float] | None:
        """A channel that I wish to be opened is not, for want of others that hold a first state."""
        slot, beat = self.slot, self.slot.beat
        wished = sorted(c for c in slot.wishes if not (self.log.is_open(c) or self.log.attached[c].abandoned))
        if not wished or self.ctx.me not in self.log.state.electorate:
            self._not_wishing = ()
            return None
        if (leased := self.log.state.leased) is not None and slot.wishes[wished[0]].lease_len:
            reason = f"channel {wished[0]!r} cannot open: it asks for leases, and those of this run go to {leased!r}"
            return Waiting(reason, (), advice="open it without (lease_len 0), or in a run of its own"), OPENING_S
        # The first beat of a slot comes before the coordinator has heard of anybody's wishes.
        if beat is not None and beat.phase == WAIT and slot.coordinator_heard - slot.entered >= HEARD_S:
            self._not_wishing = tuple(v.peer for v in beat.waiting_for if v != self.ctx.me)
            if not self._not_wishing:
                return None
        reason = f"training cannot begin (channel {wished[0]!r}): half of the peers with a vote or more are not ready"
        advice = (
            "those that still build their model or read their data say so in their logs; who is not to train can join "
            "as an observer, or, in a program of its own, as a helper"
        )
        return Waiting(reason, self._not_wishing, advice=advice), OPENING_S


def _named(entry: Entry) -> str:
    """For people."""
    if entry.kind == ROUND:
        return f"round {entry.t} of {entry.channel!r}"
    return f"the opening of channel {entry.channel!r}" if entry.kind == OPEN else "a change of the voters"


def _seldom(waited_s: float) -> float:
    """0 at first, then AGAIN_S, twice that, four times ..., as far as the time waited has come."""
    return 0.0 if waited_s < AGAIN_S else AGAIN_S * 2.0 ** math.floor(math.log2(waited_s / AGAIN_S))
