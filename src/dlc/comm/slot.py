"""The slot: how this peer takes part in deciding the next entry (docs/protocol.md, "The slot: member").

A slot is named by its parent head. This class is the acceptor of single-decree Paxos and the member of a plan:

  promised   the highest ballot I answered, or know to have a quorum's promises; lower ones are refused
  plan       the plan of the highest ballot seen; its data plane runs in `Exchange`
  accepted   (ballot, decree): I hold every byte of it and said so (HELD = my vote)

It promises: never a promise or vote while stale, or outside the electorate (or the deciders of a forced ballot that I
permit at that moment); a vote only with every byte of the manifest in hand (I2); all of it in memory only, because a
restarted process is another voter. The state is dropped when the head moves, and a head never comes back (I6).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from dlc.comm.context import Context
from dlc.comm.entries import OPEN, ROUND, Entry, Part, manifest_hash
from dlc.comm.exchange import Exchange
from dlc.comm.fetcher import Fetcher
from dlc.comm.grid import Grid
from dlc.comm.ids import LOWEST, Ballot, Voter
from dlc.comm.log import Log, grid_of
from dlc.comm.messages import (
    WAIT,
    Coord,
    Decree,
    Fetch,
    Held,
    HeldChunk,
    Nack,
    Plan,
    Prepare,
    Progress,
    Promise,
    Ready,
    Result,
)
from dlc.comm.owners import all_sent, shape_of
from dlc.comm.pacing import Pacing
from dlc.comm.permit import permits
from dlc.comm.records import STATES_MAX, told_digest
from dlc.comm.roles import HELPER
from dlc.comm.shapes import plausible_plan

T = TypeVar("T")

VOTES_TOLD_MAX = 8
"""Where no more vote, each tells all others: n^2 small messages save half of the longest round trip of every entry."""
ROSTER_PARTS_MAX = 1 << 13
"""Parts in all rosters that a promise names: some 80 bytes each, beside the 2 MiB that chunks may take (`grid.py`)."""


class Slot:
    def __init__(
        self,
        ctx: Context,
        log: Log,
        exchange: Exchange,
        listed: tuple[str, ...],
        learned: Callable[[Entry, list[Voter]], None],
    ) -> None:
        """`learned`: called with an entry that others coordinate and that is decided, and the voters that hold it."""
        self.ctx, self.log, self.exchange, self._learned = ctx, log, exchange, learned
        self.listed = listed
        """Addresses of `--peers`: a founding group must contain them all."""
        self.founder = False
        self.answers: dict[str, str] = {}
        """Which peer answered at a listed address."""
        self.wishes: dict[str, Ready] = {}
        """Channels that I want opened, and opened ones that no round has moved: another history may not have them."""
        self.pacing = Pacing(ctx)
        self.fetcher = Fetcher(ctx, log, exchange)
        self.promised = LOWEST
        self.seen = LOWEST
        """Highest ballot heard of; my own next one is above it."""
        self.accepted: tuple[Ballot, Decree] | None = None
        self.accepted_results: tuple[Result, ...] = ()
        self.plan: Plan | None = None
        self.votes: dict[Voter, Held] = {}
        """The last that each of the others told me."""
        self.coordinator_heard = 0.0
        """Running time."""
        self.entered = 0.0
        """Running time."""
        self.beat: Coord | None = None
        """The last of this slot's coordinator."""
        self.blocked_on_digest = False
        """The plan's digest is not mine: I must be repaired before I vote."""
        self.fetching: Callable[[], bool] = lambda: False
        """Whether a state is on its way here."""
        self._lacked: tuple[bytes, float] = (b"", 0.0)
        """The first state that this slot's opening needs here, and the running time at which I last had hope of it."""
        self._last_ready = -1.0

    # ---------------------------------------------------------------- life of a slot

    def enter(self) -> None:
        """The head moved: a new slot begins, with ballot (0, rank 0) promised to without a PREPARE."""
        rank0 = self.log.state.rank0
        self.promised = Ballot(0, rank0) if rank0 else LOWEST
        self.seen = self.promised
        self.accepted, self.accepted_results, self.plan = None, (), None
        self.votes = {}
        self.coordinator_heard = self.entered = self.ctx.running_s
        self.beat = None
        self.blocked_on_digest = False
        self._lacked = (b"", 0.0)
        self._last_ready = -1.0
        self.exchange.reset()
        self.pacing.end()

    def wake(self) -> None:
        """I may have slept: what I promised before I vote for no more.

        Others may have gone on by a forced ballot, which does not ask those who sleep. A vote of mine could then decide
        an older ballot, and the next coordinator would hold theirs, of the higher number, for the decided one. Its
        NACK makes a coordinator that still waits for me begin a new ballot, with all that I hold.
        """
        if self.promised != LOWEST:
            self.promised = Ballot(self.promised.counter + 1, self.promised.voter)
            self.seen = max(self.seen, self.promised)

    @property
    def votes_here(self) -> bool:
        return self.ctx.me in self.log.state.electorate

    def may_decide(self, deciders: tuple[Voter, ...]) -> bool:
        """I may promise and vote in a ballot with these deciders, now."""
        if self.ctx.stale or self.ctx.members.gone(self.ctx.me):
            return False
        if deciders:
            return permits(self.ctx, self.log, deciders, self.listed, self.answers, self.founder)
        return self.votes_here

    # ---------------------------------------------------------------- messages

    def receive_prepare(self, sender: Voter, m: Prepare) -> None:
        if m.ballot.voter != sender:
            return
        self.seen = max(self.seen, m.ballot)
        if m.ballot < self.promised:
            self.ctx.send(sender, Nack(self.log.head, self.promised))
        elif self.may_decide(m.deciders):
            self.promised = m.ballot
            self.coordinator_heard = self.ctx.running_s
            self.ctx.send(sender, self._promise(m.ballot))

    def _promise(self, ballot: Ballot) -> Promise:
        held, rosters = self._held_chunks()
        return Promise(
            head=self.log.head,
            ballot=ballot,
            accepted_ballot=self.accepted[0] if self.accepted else None,
            accepted=self.accepted[1] if self.accepted else None,
            plan=self.plan,
            held=held,
            rosters=rosters,
            ready=tuple(self._readies()),
        )

    def _held_chunks(self) -> tuple[tuple[HeldChunk, ...], tuple[tuple[Part, ...], ...]]:
        """What I hold, and the rosters that it names by number; no more than fit a header. What is left out is reduced
        again: choose only saves work by it."""
        rosters: dict[tuple[Part, ...], int] = {}
        held, room = [], ROSTER_PARTS_MAX
        for chunk, result in sorted(self.exchange.held.items()):
            included = result.header.included
            if included not in rosters:
                room -= len(included)
                if room < 0:
                    break
            index = rosters.setdefault(included, len(rosters))
            held.append(HeldChunk(chunk, result.header.ballot, self.exchange.hashes[chunk], index))
        return tuple(held), tuple(rosters)

    def receive_coord(self, sender: Voter, m: Coord) -> None:
        if m.ballot.voter != sender or m.ballot < self.promised:
            if m.ballot < self.promised:
                self.ctx.send(sender, Nack(self.log.head, self.promised))
            return
        self.seen = max(self.seen, m.ballot)
        self.coordinator_heard, self.beat = self.ctx.running_s, m
        if m.phase == WAIT and m.ballot > self.promised:
            # A quorum promised it, and its PREPARE never came here, nor comes again: it waits for my READY.
            self.promised = m.ballot
            self.announce()
        if self.plan is not None and self.plan.ballot == m.ballot:
            self._answer_progress(sender)

    def _answer_progress(self, coordinator: Voter) -> None:
        plan = self.plan
        assert plan is not None
        self.ctx.send(coordinator, self._progress(plan))
        if self.accepted is not None and self.accepted[0] == plan.ballot:
            self._send_vote()

    def _progress(self, plan: Plan) -> Progress:
        exchange, collector = self.exchange, self.exchange.collector
        lacks = {plan.assignment[chunk] for chunk in exchange.missing()} - {-1}
        told = plan.ballot, len(exchange.held), collector.gained, tuple(sorted(lacks)), collector.waits_s
        return Progress(self.log.head, *told)

    def receive_nack(self, sender: Voter, m: Nack) -> None:
        self.seen = max(self.seen, m.promised)

    def receive_plan(self, sender: Voter, m: Plan) -> None:
        if m.ballot.voter != sender or m.ballot < self.promised or not plausible_plan(m, self.log.state):
            return
        self.coordinator_heard = self.ctx.running_s
        if self.plan is not None and self.plan.ballot == m.ballot:
            self._answer_progress(sender)
            return
        if (m.deciders and not self.may_decide(m.deciders)) or self._unheard_of(m):
            return
        self.promised = m.ballot
        self.seen = max(self.seen, m.ballot)
        before, self.plan = self.plan, m
        recipients = set(self.log.state.electorate) | set(m.deciders)
        self.exchange.begin(m, sorted(recipients), self._kept(m))
        self.pacing.begin(shape_of(self.ctx, m, recipients))
        self.fetcher.begin(m, before)
        mine = self.log.digest(m.entry.channel)
        # Once found to be another in this slot, my state stays so until it is repaired, whatever the ballot.
        found = self.blocked_on_digest and before is not None and before.entry.channel == m.entry.channel
        self.blocked_on_digest = bool(m.digest) and (mine != m.digest if mine else found)
        self.ctx.send(sender, self._progress(m))
        self.advance()

    def _unheard_of(self, plan: Plan) -> bool:
        """It is a round of another state than mine, and nobody alive says to hold that one: its coordinator is wrong,
        or its record is still on its way, and the plan comes again. Nobody's state is given up for it."""
        channel, mine = plan.entry.channel, self.log.digest(plan.entry.channel)
        if plan.entry.kind != ROUND or not (mine and plan.digest) or mine == plan.digest:
            return False
        members = self.ctx.members
        others = (r for r in members.records() if r.voter != self.ctx.me and r.head == plan.head)
        may_hold = (
            r for r in others if told_digest(r, plan.head, channel) == plan.digest or len(r.states) == STATES_MAX
        )
        return not any(members.alive(r.voter) for r in may_hold)

    def _kept(self, plan: Plan) -> dict[int, Result]:
        """Results in hand (candidates, or the bytes of what I accepted) that the new plan fixes."""
        if not plan.fixed:
            return {}
        in_hand = self._accepted_by_hash() | {self.exchange.hashes[c]: r for c, r in self.exchange.held.items()}
        found, grid = ((f.chunk, in_hand.get(f.hash)) for f in plan.fixed), grid_of(plan.entry)
        return {chunk: r for chunk, r in found if r is not None and _may_be(r, grid, chunk)}

    def _accepted_by_hash(self) -> dict[bytes, Result]:
        """The bytes of what I accepted. No hash is made anew: that takes as long as reading the whole vector."""
        hashes = self.accepted[1].hashes if self.accepted is not None else ()
        return dict(zip(hashes, self.accepted_results, strict=True))

    def receive_fetch(self, sender: Voter, m: Fetch) -> None:
        """Serve results of the current plan or of what I accepted; older entries' results are served by sync."""
        outbox, wanted = self.exchange.outbox, set(m.hashes)
        accepted = self._accepted_by_hash() if wanted else {}
        coming = {result.header.chunk for result in outbox.results.get(sender.peer, ())}  # once its link has room
        for chunk in m.chunks:
            result = self.exchange.held.get(chunk) if chunk not in coming else None
            if result is not None and (not wanted or self.exchange.hashes[chunk] in wanted):
                outbox.serve(sender.peer, result)
        for digest in wanted & accepted.keys():
            outbox.serve(sender.peer, accepted[digest])

    # ---------------------------------------------------------------- the vote

    def advance(self) -> None:
        """Vote as soon as all bytes of the plan are held and nothing forbids it."""
        plan = self.plan
        if plan is None or plan.ballot != self.promised or not self.exchange.complete:
            return
        if self.accepted is not None and self.accepted[0] == plan.ballot:
            return
        if self.blocked_on_digest and self.log.digest(plan.entry.channel) == plan.digest:
            self.blocked_on_digest = False
        if self.blocked_on_digest or not self._state_allows(plan) or not self.may_decide(plan.deciders):
            return
        if self.outlived(plan):
            return
        hashes = self.exchange.manifest()
        manifest = manifest_hash(hashes) if plan.entry.kind == ROUND else b""
        self.accepted = (plan.ballot, Decree(dataclasses.replace(plan.entry, manifest=manifest), hashes))
        self.accepted_results = self.exchange.results()
        self._send_vote()
        if not plan.deciders and len(self.log.state.electorate) <= VOTES_TOLD_MAX:
            others = (v for v in self.log.state.electorate if v not in (self.ctx.me, plan.ballot.voter))
            self.ctx.cast(others, Held(self.log.head, plan.ballot, manifest, self.exchange.owed()))
        self._learn()

    def receive_held(self, sender: Voter, m: Held) -> None:
        """Another's vote: together with mine it may be the last that was lacking."""
        if m.head != self.log.head:
            return  # it was the last that my coordinator lacked: this is another slot by now
        if sender != self.ctx.me and sender in self.log.state.electorate:
            known = self.votes.get(sender)
            if known is None or m.ballot >= known.ballot:
                self.votes[sender] = m
                self._learn()

    def _learn(self) -> None:
        """The coordinator's rule, half a round trip before its COMMIT is here: a quorum voted as I did, and so did all
        that are awake, or will when they have what is on its way to them. Where anybody is waited for, that is the
        coordinator's affair."""
        plan, accepted, members = self.plan, self.accepted, self.ctx.members
        if plan is None or accepted is None or plan.deciders or plan.ballot.voter == self.ctx.me:
            return
        if not accepted[0] == plan.ballot == self.promised or not self.may_decide(()):
            return
        entry, electorate = accepted[1].entry, self.log.state.electorate
        owed = self._voted(plan.ballot, entry.manifest) | {self.ctx.me: self.exchange.owed()}
        if not self.log.state.quorum(owed):
            return
        n = len(electorate)
        if all(v in owed or all_sent(plan, n, v, owed) for v in electorate if members.awake(v)):
            self._learned(entry, sorted(owed))

    def _voted(self, ballot: Ballot, manifest: bytes) -> dict[Voter, tuple[Voter, ...]]:
        """Others who told this vote, and for whom results wait with them."""
        votes = ((v, self.votes.get(v)) for v in self.log.state.electorate)
        return {v: m.owed for v, m in votes if m is not None and (m.ballot, m.manifest) == (ballot, manifest)}

    @property
    def decided_without_me(self) -> Entry | None:
        """What others voted for by the plan at hand, if they are a quorum: it is decided, whatever I hold of it."""
        plan = self.plan
        if plan is None or plan.deciders:
            return None
        manifests = {m.manifest for m in self.votes.values() if m.ballot == plan.ballot}
        decided = (m for m in manifests if self.log.state.quorum(self._voted(plan.ballot, m)))
        return next((dataclasses.replace(plan.entry, manifest=manifest) for manifest in decided), None)

    def _state_allows(self, plan: Plan) -> bool:
        """An opening is voted for only by those who hold the first state, so that a quorum has it; and by those who
        would hold none of its later states either: helpers that have no use for the channel, and whoever has a state of
        another kind. Without their votes neither it nor anything after it might ever be decided. Nor might it where
        those who had that state died, and others voted for it: it is not waited for without end."""
        if plan.entry.kind != OPEN:
            return True
        attached, digest = self.log.attached.get(plan.entry.channel), plan.entry.digest
        if attached is not None and attached.digest == digest:
            return True
        useless = attached.misfit != "" if attached is not None else self.ctx.members.own.role == HELPER
        in_vain = self._waited_in_vain(digest)
        # Of a slot's first ballot nobody can have accepted anything before: the next one may propose another opening.
        return useless or (in_vain and plan.ballot.counter > 0)

    def _waited_in_vain(self, digest: bytes) -> bool:
        """Nobody has given me this first state for T_evict: as long as the silent may stand in the way."""
        now = self.ctx.running_s
        lacked, hoped = self._lacked
        if lacked != digest or self.fetching():
            self._lacked = digest, now
            return False
        return now - hoped >= self.ctx.members.t_evict_s

    def outlived(self, plan: Plan) -> bool:
        """No more than half of the next voters live, and this round ranks them anew: decided like this, it might give
        the casting vote to a dead one. Its coordinator proposes it again without them. What may have been accepted
        already (all chunks fixed) stays as it is."""
        entry = plan.entry
        if entry.kind != ROUND or plan.deciders or all(owner < 0 for owner in plan.assignment):
            return False
        members = self.ctx.members
        return 2 * sum(members.alive(v) for v in entry.electorate) <= len(entry.electorate)

    def accepted_first(self) -> bytes:
        """Digest of the first state that I accepted, if this slot's value is an opening."""
        decree = self.accepted[1] if self.accepted is not None else None
        return decree.entry.digest if decree is not None and decree.entry.kind == OPEN else b""

    def forced(self, entry: Entry, holders: Iterable[Voter]) -> bool:
        """These voted for it in a forced ballot, and I with them; nobody else did. Its deciders are no quorum, so no
        ordinary ballot has the same."""
        plan, accepted = self.plan, self.accepted
        if plan is None or accepted is None or accepted[0] != plan.ballot or accepted[1].entry.hash != entry.hash:
            return False
        return bool(plan.deciders) and set(plan.deciders) == set(holders)

    def _send_vote(self) -> None:
        assert self.accepted is not None
        ballot, decree = self.accepted
        # A vote is repeated until the head moves, but only while it may be given.
        deciders = self.plan.deciders if self.plan is not None and self.plan.ballot == ballot else ()
        if ballot == self.promised and self.may_decide(deciders):
            vote = Held(self.log.head, ballot, decree.entry.manifest, self.exchange.owed())
            self.ctx.send(ballot.voter, vote)

    # ---------------------------------------------------------------- time

    def tick(self) -> None:
        now, members = self.ctx.now, self.ctx.members
        beat_s = members.timeouts.beat_s
        if now >= self._last_ready + beat_s:
            self._last_ready = now
            self._repeat()
        if self.plan is not None and not self.exchange.complete:
            self.fetcher.look(self.plan)
        self.advance()

    def next_deadline(self) -> float:
        return self._last_ready + self.ctx.members.timeouts.beat_s

    def _repeat(self) -> None:
        if self.plan is None or self.plan.ballot < self.promised:
            if self.promised != LOWEST:
                for ready in self._readies():
                    self.ctx.send(self.promised.voter, ready)
        elif self.accepted is not None and self.accepted[0] == self.plan.ballot:
            self._send_vote()

    def announce(self) -> None:
        """Something became ready: tell the coordinator at once."""
        self._last_ready = self.ctx.now
        self._repeat()

    def offered(self, channel: str) -> None:
        """This channel became ready. Of others the coordinator was told: where many are offered one after the other, to
        say all anew with each would be a load that grows with their square. When they are repeated stays as it was."""
        if len(self.exchange.offered) == 1:
            self.announce()
        elif (self.plan is None or self.plan.ballot < self.promised) and self.promised != LOWEST:
            for ready in self._readies(channel):
                self.ctx.send(self.promised.voter, ready)

    def _readies(self, only: str | None = None) -> Iterable[Ready]:
        """What I offer or wish in this slot, under the present head and base; `only`: on that channel."""
        state = self.log.state
        if not self.votes_here and state.electorate:
            return
        apart = tuple(v for v in state.electorate if self.ctx.members.relay_for(v.peer) is not None)
        for channel, wish in _of(self.wishes, only):
            attached = self.log.attached[channel]
            if not (self.log.is_open(channel) or attached.void):
                yield dataclasses.replace(wish, head=state.head, base=state.base(channel), digest=attached.digest)
        for channel, mine in _of(self.exchange.offered, only):
            if mine.ready.base == state.base(channel):
                offered_s = max(0.0, self.ctx.running_s - mine.since_run)
                digest = self.log.digest(channel)
                yield dataclasses.replace(mine.ready, head=state.head, digest=digest, offered_s=offered_s, apart=apart)


def _of(by_channel: Mapping[str, T], only: str | None) -> list[tuple[str, T]]:
    """The items, or that of one channel, if there is one."""
    if only is None:
        return list(by_channel.items())
    return [(only, by_channel[only])] if only in by_channel else []


def _may_be(result: Result, grid: Grid, chunk: int) -> bool:
    """It is a mean of this chunk, and as long as one of that grid: other bytes could not be applied."""
    header = result.header
    n_bytes = grid.result_bytes(chunk, len(header.included)) if header.included else 0
    return header.chunk == chunk and len(result.payload) == n_bytes
