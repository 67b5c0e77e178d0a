"""The coordinator of one ballot (docs/protocol.md, "The slot: coordinator").

  IDLE --elected or forced--> PREP --promises--> choose --> RUN --votes--> COMMIT sent, head moves, IDLE
  IDLE --rank 0 of a new slot--> WAIT --everyone ready, or the straggler deadline--> RUN
  PREP / RUN --an owner died, nothing moves, a NACK--> PREP with the next own ballot (held chunks are kept)
  any --a higher ballot, or I became stale--> IDLE

It never makes two plans for one ballot and never uses a ballot number twice, so there is one manifest per ballot (I3).
What to propose in WAIT is decided by `agenda.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from dlc.comm.agenda import Agenda, next_electorate
from dlc.comm.choose import Again, Resume, choose
from dlc.comm.context import Context
from dlc.comm.entries import CONFIG, Entry
from dlc.comm.exchange import Exchange
from dlc.comm.ids import LOWEST, Ballot, Voter
from dlc.comm.log import Log, grid_of
from dlc.comm.messages import (
    PREP,
    RUN,
    WAIT,
    Coord,
    FixedChunk,
    Held,
    Nack,
    Plan,
    Prepare,
    Progress,
    Promise,
    Ready,
)
from dlc.comm.owners import all_sent, plan_round
from dlc.comm.permit import proposal
from dlc.comm.reach import in_step
from dlc.comm.slot import Slot

IDLE = "idle"
STALLS_MAX = 2
DOUBLINGS_MAX = 8
"""Of how long nothing may move: from 2 s, the least T_chunk, to 480 s, the greatest where an owner is in bad health."""
BACK_OFF_S, BACK_OFFS_MAX = 0.25, 32
"""Between two own ballots of one slot, times the number of ballots so far; but no more than so many times."""


class Coordinator:
    def __init__(
        self,
        ctx: Context,
        log: Log,
        slot: Slot,
        exchange: Exchange,
        committed: Callable[[Entry, list[Voter]], None],
        diverged: Callable[[str, bytes], None],
    ) -> None:
        self.ctx, self.log, self.slot, self.exchange = ctx, log, slot, exchange
        self.committed = committed
        """Called with the decided entry and the voters that hold its bytes."""
        self.diverged = diverged
        """Called with a channel and the digest that most voters report, when mine differs."""
        self.phase = IDLE
        self.ballot = LOWEST
        self.deciders: tuple[Voter, ...] = ()
        self.promises: dict[Voter, Promise] = {}
        self.agenda = Agenda(ctx, log)
        self.plan: Plan | None = None
        self.votes: dict[Voter, Held] = {}
        """The last one for `plan` of each who holds it."""
        self.progress: dict[Voter, tuple[int, int]] = {}
        self._lacks: dict[Voter, tuple[int, ...]] = {}
        """Owners, by index, of whose results each member lacks some."""
        self._bears_s: dict[Voter, float] = {}
        """The silence of contributors that each member bears with, as an owner."""
        self._phase_since = 0.0
        self._moved = 0.0
        """Running time of the last sign that the ballot goes on."""
        self._quorum_since: float | None = None
        self._last_beat = -1e9
        self._not_before = 0.0
        self._mute: tuple[Voter, ...] = ()
        """Found in this slot."""
        self._stalls = 0
        """Own ballots of this slot in which nothing moved any more."""

    # ---------------------------------------------------------------- life

    def enter(self) -> None:
        """A new slot: rank 0 begins to wait for READY without a PREPARE."""
        self._drop()
        self._not_before, self._stalls, self._mute = 0.0, 0, ()
        self.agenda.enter()
        rank0 = self.log.state.rank0
        if rank0 == self.ctx.me and not self.ctx.stale:
            self._begin(WAIT, Ballot(0, self.ctx.me), ())

    def drop(self) -> None:
        """Step down: a higher ballot is about, or I may have been frozen."""
        if self.phase != IDLE:
            self._drop()
            self._not_before = self.ctx.now + BACK_OFF_S

    def _drop(self) -> None:
        self.phase, self.plan, self.deciders = IDLE, None, ()

    def _begin(self, phase: str, ballot: Ballot, deciders: tuple[Voter, ...]) -> None:
        now = self.ctx.now
        self.phase, self.ballot, self.deciders = phase, ballot, deciders
        self.promises, self.votes, self.plan = {}, {}, None
        self.progress, self._lacks, self._bears_s = {}, {}, {}
        self._phase_since, self._moved = now, self.ctx.running_s
        self._quorum_since = None
        self._last_beat = -1e9

    def _next_ballot(self, deciders: tuple[Voter, ...] = ()) -> None:
        """Prepare an own ballot above all seen."""
        top = max(self.slot.seen, self.slot.promised, self.ballot if self.phase != IDLE else LOWEST)
        ballot = Ballot(max(top.counter, 0) + 1, self.ctx.me)
        self._begin(PREP, ballot, deciders)
        self._not_before = self.ctx.now + BACK_OFF_S * min(ballot.counter, BACK_OFFS_MAX)
        self._prepare()

    def _prepare(self) -> None:
        for voter in self.deciders or self.log.state.electorate:
            if voter not in self.promises:
                self.ctx.send(voter, Prepare(self.log.head, self.ballot, self.deciders))

    # ---------------------------------------------------------------- messages

    def receive_ready(self, sender: Voter, m: Ready) -> None:
        self.agenda.ready(sender, m)
        if self.phase == WAIT and self.agenda.stirs(m.channel):
            self._consider()
        elif self.phase == RUN and self.plan is not None and sender not in self.progress and sender not in self.votes:
            self.ctx.send(sender, self.plan)

    def receive_promise(self, sender: Voter, m: Promise) -> None:
        for ready in m.ready:
            self.agenda.ready(sender, ready)
        if self.phase == PREP and m.ballot == self.ballot and self._decides(sender):
            self.promises[sender] = m
            self._moved = self.ctx.running_s
            self._elect()

    def receive_nack(self, sender: Voter, m: Nack) -> None:
        if self.phase != IDLE and m.promised > self.ballot:
            self.drop()

    def receive_progress(self, sender: Voter, m: Progress) -> None:
        if self.phase == RUN and m.ballot == self.ballot:
            now = (m.held, m.gained)
            self._lacks[sender], self._bears_s[sender] = m.lacks, m.waits_s
            if now > self.progress.get(sender, (-1, -1)):
                self.progress[sender] = now
                self._moved = self.ctx.running_s

    def receive_held(self, sender: Voter, m: Held) -> None:
        if self.phase != RUN or m.ballot != self.ballot or not self._decides(sender):
            return
        before = self.votes.get(sender)
        if before is None or before.manifest != m.manifest:
            self._moved = self.ctx.running_s
        self.votes[sender] = m
        self._count()

    def _decides(self, sender: Voter) -> bool:
        return sender in (self.deciders or self.log.state.electorate)

    # ---------------------------------------------------------------- time

    def tick(self) -> None:
        if self.ctx.stale or self.ctx.members.gone(self.ctx.me):
            self.drop()
            return
        if self.phase == IDLE:
            self._maybe_take_over()
        elif self.phase == PREP:
            self._elect()
        elif self.phase == WAIT:
            self._consider()
        elif self.phase == RUN:
            self._count()
            if self.phase == RUN:
                self._watch()
        if self.phase != IDLE and self.ctx.now >= self._last_beat + self.ctx.members.timeouts.beat_s:
            self._beat()

    def next_deadline(self) -> float | None:
        return None if self.phase == IDLE else self._last_beat + self.ctx.members.timeouts.beat_s

    def _beat(self) -> None:
        self._last_beat = self.ctx.now
        voters = self.deciders or self.log.state.electorate
        if self.phase == PREP:
            self._prepare()
        waiting = self._waiting_for()
        self.ctx.cast(voters, Coord(self.log.head, self.ballot, self.phase, waiting))
        if self.phase == RUN and self.plan is not None:
            # The plan is repeated to whoever has not shown that it has it.
            self.ctx.cast([v for v in voters if v not in self.progress and v not in self.votes], self.plan)

    def _waiting_for(self) -> tuple[Voter, ...]:
        voters = self.deciders or self.log.state.electorate
        if self.phase == PREP:
            return tuple(v for v in voters if v not in self.promises)
        if self.phase == RUN:
            return tuple(v for v in voters if v not in self.votes)
        return self.agenda.waiting_for()

    # ---------------------------------------------------------------- election

    def _maybe_take_over(self) -> None:
        ctx, slot, state = self.ctx, self.slot, self.log.state
        if ctx.now < self._not_before or not in_step(ctx, self.log):
            return
        if not state.quorum(ctx.members.living(state.electorate)):
            self._maybe_force()
            return
        if not slot.votes_here:
            return
        current = slot.promised.voter
        if current == ctx.me:
            # My own ballot was dropped: go on with the next one.
            self._next_ballot()
            return
        t_coord = ctx.members.t_coord_s
        silent_s = ctx.running_s - slot.coordinator_heard
        absent = not ctx.members.awake(current)
        if not absent and silent_s < t_coord:
            return  # as mostly: no place is looked for
        place = self._place_after(current)
        if silent_s >= (place if absent else place + 1) * t_coord:
            self._next_ballot()

    def _place_after(self, coordinator: Voter) -> int:
        """How many voters that are awake come before me in rank order, counted from the coordinator on."""
        ranked = list(self.log.state.ranked)
        start = ranked.index(coordinator) + 1 if coordinator in ranked else 0
        place = 0
        for voter in ranked[start:] + ranked[:start]:
            if voter == self.ctx.me:
                return place
            if voter != coordinator and self.ctx.members.awake(voter):
                place += 1
        return place

    def _maybe_force(self) -> None:
        group = proposal(self.ctx, self.log)
        if group and self.slot.may_decide(group):
            self._next_ballot(group)

    def _elect(self) -> None:
        """Enough promises? Then choose and propose."""
        ctx, members, state = self.ctx, self.ctx.members, self.log.state
        waited = ctx.now - self._phase_since
        if self.deciders:
            if not self.slot.may_decide(self.deciders):
                self.drop()
            elif all(v in self.promises for v in self.deciders):
                self._propose_chosen()
            elif waited > members.t_coord_s:
                self.drop()
            return
        if not state.quorum(self.promises):
            patient = waited <= members.t_coord_s
            hoped_for = [v for v in state.electorate if not members.gone(v) and (patient or members.alive(v))]
            if not state.quorum(hoped_for):
                self.drop()  # only a forced ballot can go on, and that begins in IDLE
            elif waited > members.t_coord_s and ctx.now >= self._not_before:
                self._next_ballot()
            return
        everyone = all(v in self.promises for v in state.electorate if members.awake(v))
        if everyone or waited >= members.t_prep_s:
            self._propose_chosen()

    def heard(self) -> dict[Voter, Promise]:
        """The promises that count. What a mute peer holds cannot be had: its own is left out where the others are a
        quorum without it, as if it had not come; a forced ballot needs everybody's."""
        mute = self.agenda.mute()
        heard = {v: p for v, p in self.promises.items() if v not in mute}
        return heard if not self.deciders and self.log.state.quorum(heard) else self.promises

    def _propose_chosen(self) -> None:
        choice = choose(self.heard())
        if isinstance(choice, Again):
            entry = choice.decree.entry  # of an opening, the digest tells those who lack the first state to fetch it
            self._propose(entry, (), (-1,) * len(choice.fixed), choice.fixed, entry.digest)
        elif isinstance(choice, Resume) and not self.agenda.outvoted(choice.plan):
            self._propose_resumed(choice)
        elif self.deciders:
            self._propose_config(self.deciders)
        else:
            self.phase = WAIT
            self._consider()

    def _propose_resumed(self, choice: Resume) -> None:
        old = choice.plan.entry
        base = self.deciders or None
        electorate, trainers = next_electorate(self.ctx, self.log, base, self.agenda.recent(), ranks_anew=True)
        entry = dataclasses.replace(old, electorate=electorate, trainers=trainers, manifest=b"")
        mute, apart = self.agenda.mute(), self.agenda.apart()
        fixed = {f.chunk: f for f in choice.fixed if not mute.issuperset(f.holders)}
        grid = grid_of(entry) if choice.plan.assignment else None
        kept = fixed.keys()
        owners, assignment = plan_round(self.ctx, self.log, entry.roster, grid, kept, self.deciders, mute, apart)
        old_plan = choice.plan
        self._propose(
            entry, owners, assignment, tuple(fixed.values()), old_plan.digest, old_plan.norms, old_plan.fill_s
        )

    # ---------------------------------------------------------------- proposals

    def _consider(self) -> None:
        """In WAIT: propose whatever is due."""
        if self.phase != WAIT:
            return
        draft = self.agenda.due()
        if self.agenda.diverged is not None:
            # Most voters hold another state than mine: not fit to coordinate before I am repaired.
            self.diverged(*self.agenda.diverged)
            self.drop()
        elif draft is not None:
            self._propose(draft.entry, draft.owners, draft.assignment, (), draft.digest, draft.norms, draft.fill_s)

    def _propose_config(self, electorate: tuple[Voter, ...]) -> None:
        state = self.log.state
        electorate, trainers = next_electorate(self.ctx, self.log, electorate, self.agenda.recent())
        entry = Entry(CONFIG, state.head, state.depth + 1, "", 0, electorate, trainers, (), 0, 0, "", b"", b"", 0)
        self._propose(entry, (), (), (), b"")

    def _propose(
        self,
        entry: Entry,
        owners: tuple[Voter, ...],
        assignment: tuple[int, ...],
        fixed: tuple[FixedChunk, ...],
        digest: bytes,
        norms: tuple[float, ...] = (),
        fill_s: float = 0.0,
    ) -> None:
        now = self.ctx.now
        self.phase = RUN
        self._phase_since, self._moved = now, self.ctx.running_s
        self.plan = Plan(
            head=self.log.head,
            ballot=self.ballot,
            deciders=self.deciders,
            entry=entry,
            digest=digest,
            owners=owners,
            assignment=assignment,
            fixed=fixed,
            mute=self._mute,
            norms=norms,
            fill_s=fill_s,
        )
        self._last_beat = now
        self.ctx.cast(self.deciders or self.log.state.electorate, self.plan)

    # ---------------------------------------------------------------- running

    def _watch(self) -> None:
        """Re-plan when an owner of an unfinished chunk died, or when nothing has moved for T_stall."""
        plan, members, now = self.plan, self.ctx.members, self.ctx.now
        assert plan is not None
        if now < self._not_before:
            return
        if self.deciders and not self.slot.may_decide(self.deciders):
            self.drop()
            return
        unfinished = {plan.owners[plan.assignment[c]] for c in self._lacking() if plan.assignment[c] >= 0}
        owner_lost = any(not members.alive(owner) for owner in unfinished) or self.slot.outlived(plan)
        if owner_lost:
            self._next_ballot(self.deciders)
            return
        still_s = self.ctx.running_s - max(self._moved, self.exchange.collector.fills_until)
        if still_s > self._stall_s() + members.t_dead_s:
            self._stalled(plan)

    def _stall_s(self) -> float:
        """How long nothing may move. An owner knows the pace of who sends to it, and may wait for longer than I would.
        At first another owner is asked, which may not; but each new ballot makes all of them wait anew, and where all
        wait for long the round would never end. So I bear with them for twice as long each time."""
        members, own_s = self.ctx.members, self.exchange.collector.stall_s
        told_s = (bears_s for voter, bears_s in self._bears_s.items() if members.alive(voter))
        return max(own_s, min(own_s * 2.0 ** min(self._stalls, DOUBLINGS_MAX), max(told_s, default=0.0)))

    def _stalled(self, plan: Plan) -> None:
        """Everybody answers, but nothing moves: go on without those who owe what is missing.

        Where nobody is found who does, a second try is made; then I let the next in rank.
        """
        holders = {f.chunk: f.holders for f in plan.fixed}
        owing = set(self._unheard_owners(plan))
        for chunk in self._lacking():
            owner = plan.assignment[chunk]
            owing.update(holders.get(chunk, ()) if owner < 0 else (plan.owners[owner],))
        self.agenda.silent(owing)
        self._mute = tuple(sorted(owing))
        self._stalls += 1
        if owing or self._stalls < STALLS_MAX or self.deciders:
            self._next_ballot(self.deciders)
        else:
            self._drop()
            self._not_before = self.ctx.now + 3 * self.ctx.members.t_coord_s

    def _unheard_owners(self, plan: Plan) -> list[Voter]:
        """Owners, perhaps myself, of whose results at least half of the other members that live lack some."""
        members = self.ctx.members
        unheard = []
        for index, owner in enumerate(plan.owners):
            lack = [index in lacks for v, lacks in self._lacks.items() if v != owner and members.alive(v)]
            if lack and 2 * sum(lack) >= len(lack):
                unheard.append(owner)
        return unheard

    def _lacking(self) -> list[int]:
        """Chunks that nobody is known to hold: what I myself do not hold."""
        if self.plan is None or self.exchange.plan is not self.plan:
            return []
        return self.exchange.missing()

    def _count(self) -> None:
        """Commit when the deciders hold the same manifest."""
        plan, members, now = self.plan, self.ctx.members, self.ctx.now
        if self.phase != RUN or plan is None or not self.votes:
            return
        manifests = {m.manifest for m in self.votes.values()}
        if len(manifests) > 1:
            # One manifest per ballot (I3): somebody computes wrong bytes. The next ballot makes none anew: what one of
            # them accepted is proposed to all.
            self._next_ballot(self.deciders)
            return
        state = self.log.state
        if self.deciders:
            if not all(v in self.votes for v in self.deciders):
                return
        else:
            if not state.quorum(self.votes):
                return
            if self._quorum_since is None:
                self._quorum_since = now
            lacking = (v for v in state.electorate if v not in self.votes and members.awake(v))
            n = len(state.electorate)
            owed = {v: m.owed for v, m in self.votes.items()}
            everyone = all(v != self.ctx.me and all_sent(plan, n, v, owed) for v in lacking)
            patience_s = members.timeouts.t_commit_s(self._quorum_since - self._phase_since)
            if not everyone and now - self._quorum_since < patience_s:
                return
        (manifest,) = manifests
        entry = dataclasses.replace(plan.entry, manifest=manifest)
        holders = sorted(self.votes)
        self._drop()
        self.committed(entry, holders)
