"""The head of one peer's log: how it moves, and what follows from that.

An entry is applied once its commit is known and all its bytes are here; a snapshot makes the head jump. Either way the
account goes to the application, a new slot begins, and my record tells the others where I stand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dlc.comm import messages as msg
from dlc.comm.account import account, chunks_with, deaf_owners
from dlc.comm.context import Context
from dlc.comm.coordinator import Coordinator
from dlc.comm.entries import OPEN, ROUND, Entry, LogState, Part, manifest_hash
from dlc.comm.events import (
    ChannelOpened,
    ChannelSynced,
    ContributionDropped,
    DigestMismatch,
    ElectorateChanged,
    LeftAhead,
    RoundDone,
)
from dlc.comm.exchange import Exchange
from dlc.comm.ids import PeerId, Voter
from dlc.comm.log import Log, counted_of, grid_of
from dlc.comm.offered import Traffic
from dlc.comm.permit import alive_records, can_vote
from dlc.comm.shapes import plausible_entry, plausible_results
from dlc.comm.slot import Slot
from dlc.comm.sync import Sync
from dlc.errors import ProtocolError
from dlc.report import Reason


class Applier:
    def __init__(self, ctx: Context, log: Log, exchange: Exchange, slot: Slot, piece_bytes: int) -> None:
        self.ctx, self.log, self.exchange, self.slot = ctx, log, exchange, slot
        self.coordinator = Coordinator(ctx, log, slot, exchange, self.committed, self.diverged)
        self.sync = Sync(
            ctx, log, exchange, self.apply, self.switched, slot.accepted_first, self.last_results_come, piece_bytes
        )
        slot.fetching = lambda: self.sync.busy
        self._announced: msg.Commit | None = None
        """Of the plan at hand, whose last results were on their way here when it came."""
        self._decided_run: float | None = None
        """Running time at which I found that the plan at hand is decided without me."""
        self._decision: msg.Commit | None = None
        self._left_ahead: set[Voter] = set()
        """Who was told of as such."""

    def committed(self, entry: Entry, holders: list[Voter]) -> None:
        """I coordinated the decision of this entry: tell everyone, and apply it."""
        commit = msg.Commit(entry, tuple(holders))
        for record in self.ctx.members.records():
            if record.voter != self.ctx.me:
                self.ctx.send(record.voter, commit)
        self.receive_commit(self.ctx.me, commit)

    def learned(self, entry: Entry, holders: list[Voter]) -> None:
        """Another coordinates the decision of this entry, and I saw all votes that it waits for: its COMMIT is on its
        way to everybody."""
        self.receive_commit(self.ctx.me, msg.Commit(entry, tuple(holders)))

    def receive_commit(self, sender: Voter, m: msg.Commit) -> None:
        entry, log = m.entry, self.log
        if entry.parent == log.head:
            if not plausible_entry(entry, log.state):
                raise ProtocolError(f"a {entry.kind} entry that does not follow this head")
            if entry.kind != ROUND:
                self._decided(m)
                self.apply(entry, (), ())
                self._look_back()
                return
            bytes_of = self._bytes_of(entry)
            if bytes_of is not None:
                accepted = self.slot.accepted
                voted_for = accepted is not None and accepted[1].entry.hash == entry.hash  # each was checked as it came
                if not voted_for and not plausible_results(entry, bytes_of[1]):
                    raise ProtocolError("a round entry that its results do not fit")
                self._decided(m)
                self.apply(entry, *bytes_of)
                self._look_back()
                return
            if self._is_planned(entry):
                self._announced = m
        if entry.depth > log.state.depth and entry.hash != log.head:
            # I lack bytes that are not on their way, or more than this entry: catch up from one who holds them.
            alive = [v for v in (sender, *m.holders) if v != self.ctx.me and self.ctx.members.alive(v)]
            self.sync.start(hint=alive[0] if alive else None)

    def _is_planned(self, entry: Entry) -> bool:
        """The plan at hand is of this entry, so what it still lacks may be on its way."""
        plan = self.exchange.plan
        return plan is not None and dataclasses.replace(plan.entry, manifest=entry.manifest) == entry

    @property
    def next_entry(self) -> Entry | None:
        """What follows my head, where that is known to be decided by the plan at hand: results of it are lacking."""
        announced = self._announced
        if announced is not None and announced.entry.parent == self.log.head:
            return announced.entry
        return self.slot.decided_without_me

    def last_results_come(self) -> bool:
        """The plan at hand is decided without me, and its last results are on their way here: nothing need be asked
        for."""
        if self.next_entry is None:
            return False
        if self._decided_run is None:
            self._decided_run = self.ctx.running_s
        return self.exchange.coming(self._decided_run)

    def received(self) -> None:
        """Another result is here: perhaps the last that an announced decision lacked."""
        announced = self._announced
        if announced is not None and announced.entry.parent == self.log.head and self.exchange.complete:
            self.receive_commit(self.ctx.me, announced)

    def _decided(self, m: msg.Commit) -> None:
        """Deciding with others makes this process part of the living run. They may have done it without my vote, or
        long after it; but a forced ballot of mine is no news of those whom it left out."""
        self.log.active = True
        self._decision = m
        if self.slot.forced(m.entry, m.holders):
            self.log.fellows = (m.entry.hash, frozenset(m.holders))
        else:
            self.log.learned_run = self.ctx.running_s

    def _look_back(self) -> None:
        """Where a forced ballot has just gone on from here, some may have gone further, and left meanwhile. Each is
        told of once: what was accepted before may be decided first, and then the same is done again."""
        tokens = self.log.state.tokens
        gone = [r for r in self.ctx.members.departed() if can_vote(r) and r.tokens > tokens]
        if self.log.fellows_here and not self._left_ahead.issuperset(r.voter for r in gone):
            self._left_ahead.update(r.voter for r in gone)
            self.ctx.notify(LeftAhead(tuple(r.voter for r in gone), max(r.tokens for r in gone) - tokens))

    def last_decision(self) -> msg.Commit:
        """My last entry, and who decided it, as far as I was told: for those who are behind by it."""
        entry, told = self.log.past[-1].entry, self._decision
        return told if told is not None and told.entry.hash == entry.hash else msg.Commit(entry, (self.ctx.me,))

    def left_behind(self) -> list[Voter]:
        """Who lives, was not waited for when my last entry was decided, and has not told that it follows: what it lacks
        may be here only, on its way."""
        members, state = self.ctx.members, self.log.state
        if not self.log.past:
            return []
        others = [v for v in state.electorate if v not in (self.ctx.me, *self.last_decision().holders)]
        records = [r for v in others if (r := members.record(v.peer)) is not None and r.voter == v]
        return [r.voter for r in records if members.awake(r.voter) and r.depth < state.depth]

    def _bytes_of(self, entry: Entry) -> tuple[tuple[bytes, ...], tuple[msg.Result, ...]] | None:
        """All results of this round, if I hold them: as candidates of the current plan, or as what I accepted."""
        exchange, accepted = self.exchange, self.slot.accepted
        if exchange.complete and manifest_hash(exchange.manifest()) == entry.manifest:
            return exchange.manifest(), exchange.results()
        if accepted is not None and accepted[1].entry.manifest == entry.manifest:
            return accepted[1].hashes, self.slot.accepted_results
        return None

    def apply(self, entry: Entry, hashes: tuple[bytes, ...], results: tuple[msg.Result, ...]) -> None:
        """The head moves by one entry."""
        before = self.log.state
        mine = self.exchange.offered.get(entry.channel) if entry.kind == ROUND else None
        reduce_s = max(0.0, self.exchange.last_gain - self.exchange.reduce_since) if self.exchange.plan else 0.0
        if self.sync.donor is not None:
            donor = self.ctx.members.record(self.sync.donor.peer)
            self.log.active = self.log.active or (donor is not None and donor.active)
        fits = mine is None or mine.ready.grid == msg.GridSpec(entry.numel, entry.chunk_elems, entry.codec)
        # Owners keep the parts of an offer that was taken back, and a plan may name it still: that is not this one.
        own = Part(self.ctx.me, mine.ready.weight, mine.ready.upto) if mine else None
        named = next((p for p in entry.roster if p.voter == self.ctx.me), None)
        older = own is not None and named not in (None, own) and any(chunks_with(named, results))
        self.log.commit(entry, hashes, results, mine.sink if mine and fits and not older else None)
        if entry.kind == ROUND:
            self.slot.wishes.pop(entry.channel, None)
            counted = own in counted_of(entry, results)
            absent = self._absent(entry, before)
            paths = {v.peer: self._path(v.peer) for v in before.electorate if v != self.ctx.me}
            traffic = self.exchange.traffic.pop(entry.channel, None) or Traffic()
            report = account(entry, results, absent, mine, traffic, reduce_s, self.ctx.now, paths)
            self.exchange.offered.pop(entry.channel, None)
            self.coordinator.agenda.applied(entry.channel)
            plan = self.exchange.plan
            if plan is not None and not plan.fill_s:  # of one that became final on the way, a part may be all there is
                self.coordinator.agenda.silent(deaf_owners(entry, results))
            included = chunks_with(own, results) if own and fits else ()
            self.ctx.notify(RoundDone(report, counted, str(grid_of(entry)), fits, included, older))
        if entry.kind == OPEN:
            self.ctx.notify(ChannelOpened(entry.channel))
            if entry.channel in self.log.attached and self.log.attached[entry.channel].synced:
                self.ctx.notify(ChannelSynced(entry.channel, 0))
        self._moved(before.electorate)

    def _absent(self, entry: Entry, before: LogState) -> dict[Voter, Reason]:
        """Trainers of the electorate that the roster lacks, and why."""
        roster = {p.voter for p in entry.roster}
        here: Reason = "no room" if len(roster) >= grid_of(entry).parts_max else "not ready"
        absent: dict[Voter, Reason] = {}
        for voter in before.trainers:
            if voter not in roster:
                gone, alive = self.ctx.members.gone(voter), self.ctx.members.alive(voter)
                left = gone and self.ctx.members.record(voter.peer) is None
                absent[voter] = "left" if left else here if alive else "dead"
        return absent

    def _path(self, peer: PeerId) -> str:
        relay = self.ctx.members.relay_for(peer)
        return "direct" if relay is None else f"relayed via {relay}"

    def switched(self) -> None:
        """A snapshot was installed: the head jumped."""
        for channel in [c for c in self.slot.wishes if self.log.state.round_of(c)]:
            del self.slot.wishes[channel]
        donors = [r for r in alive_records(self.ctx) if r.active]
        self.log.active = self.log.active or bool(donors)
        self._moved(())

    def _moved(self, electorate: Sequence[Voter]) -> None:
        state = self.log.state
        self.ctx.record_due = True
        for channel, mine in list(self.exchange.offered.items()):
            if not self._stands(mine.ready):
                del self.exchange.offered[channel]
                self.ctx.notify(ContributionDropped(channel))
        self.open_slot()
        if tuple(electorate) != state.electorate:
            self.ctx.notify(ElectorateChanged(state.electorate))
        self.slot.announce()

    def _stands(self, ready: msg.Ready) -> bool:
        """Whether a contribution can still be counted: its base is current, its samples are still leased to me."""
        state = self.log.state
        known = state.channel(ready.channel)
        leased = known is not None and known.leased
        return ready.base == state.base(ready.channel) and (not leased or state.ledger.valid(self.ctx.me, ready.upto))

    def open_slot(self) -> None:
        self._announced, self._decided_run = None, None
        self.ctx.members.watch(v for v in self.log.state.electorate if v != self.ctx.me)
        self.slot.enter()
        self.coordinator.enter()

    def diverged(self, channel: str, digest: bytes) -> None:
        self.log.attached[channel].synced = False
        self.log.attached[channel].passed.clear()
        self.sync.donations.doubt(channel)
        self.ctx.record_due = True
        self.ctx.notify(DigestMismatch(channel, self.log.state.round_of(channel)))
        self.sync.start()

    def check_digest(self, sender: Voter, plan: msg.Plan) -> None:
        """The plan's state is not mine: fetch the coordinator's before I vote (P2)."""
        attached = self.log.attached.get(plan.entry.channel)
        if attached is None or not plan.digest or attached.digest == plan.digest:
            return
        if plan.entry.kind == OPEN:
            self.sync.fetch_first_state(sender, plan.entry.channel, plan.digest)
            self.slot.advance()
        elif plan.entry.kind == ROUND and attached.synced:
            self.diverged(plan.entry.channel, plan.digest)
