"""The data plane of a slot: butterfly all-reduce of one plan (docs/protocol.md, "Data plane").

Each roster member sends chunk c of its frozen vector to the owner named in the plan. The owner waits for all parts, or
for those that still may come; sums them in roster order, encodes the mean once, and sends the same bytes to everybody.
A member holds a candidate result until the slot is decided; nothing here is applied.

  contribution   offered (frozen, or becoming so: `filling.py`) -> sent within the owner's window (`sender.py`) ->
                 acknowledged by the chunk's result
  owned chunk    open -> closed: all parts in, or every missing member is dead or late
  result         wanted -> held: from its owner, from any holder by hash, or kept from an earlier plan

Bulk is *pulled*: the driver asks `next_bulk(peer)` when the link to that peer can take a message, so that nothing but
the frozen vector and the held results waits in memory. Contributions of a base stay valid for every plan of that base.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

from blake3 import blake3

from dlc.comm.context import Context
from dlc.comm.entries import Part, forget_oldest
from dlc.comm.grid import Grid
from dlc.comm.ids import PeerId, Voter
from dlc.comm.log import Log, grid_of
from dlc.comm.messages import Bulk, ChunkHeader, Contrib, Excluded, GridSpec, Plan, Result
from dlc.comm.offered import Offered, Traffic
from dlc.comm.outbox import Outbox
from dlc.comm.owners import asked_Bps, shape_of
from dlc.comm.patience import Patience
from dlc.comm.rates import Rates
from dlc.comm.reducer import WRONG_SIZE, ChunkReducer, Workspace
from dlc.comm.sender import Sender, in_order, window_chunks
from dlc.comm.shapes import named
from dlc.comm.wire import pack

log = logging.getLogger(__name__)

STRAY_CHUNKS_MAX = 64
STRAY_BYTES_MAX = 64 << 20
"""Contributions kept per sender before the plan that asks for them is known here: more than any window."""
EARLY_BYTES_MAX = 64 << 20
"""Results kept, with their headers, that came before the plan they belong to, which travels on the other lane; what is
over is fetched."""
DROPPED_MAX = 4096
"""Kinds of what was thrown away that are counted."""
UNASKED = "it came too late, or nobody asked for it"
"""Of what is dropped: honest peers send such, too."""


class Exchange:
    def __init__(self, ctx: Context, log: Log) -> None:
        self.ctx, self.log = ctx, log
        self.offered: dict[str, Offered] = {}
        self.traffic: dict[str, Traffic] = {}
        """By channel; whoever applies its round takes it out."""
        self.held: dict[int, Result] = {}
        """Candidate results of the current plan, by chunk."""
        self.hashes: dict[int, bytes] = {}
        self.plan: Plan | None = None
        self.grid: Grid | None = None
        self.gained = 0
        """Parts taken and chunks closed under this plan: that it rises shows that bytes move."""
        self.dropped: Counter[tuple[PeerId, str]] = Counter()
        """What was thrown away of whom, and why; never fatal. Told once each where no honest peer does it."""
        self.reduce_since = 0.0
        self.last_gain = 0.0
        self._parts: dict[tuple[str, bytes], dict[int, dict[Voter, Contrib]]] = {}
        self._absent: dict[Voter, tuple[str, bytes, Part]] = {}
        """(channel, base, part): the contribution that each one said last it has no more, though a plan may name it."""
        self._owned: dict[int, ChunkReducer] = {}
        self._workspace: tuple[Grid, Workspace] | None = None
        """Kept from round to round: fresh buffers for every chunk would be page faults for every chunk."""
        self.outbox = Outbox()
        self._sender = Sender(ctx, self.outbox)
        self._window = 0
        """Chunks that others may have in flight to me under this plan."""
        self.patience = Patience(ctx)
        self.rates = Rates()
        self._recipients: tuple[Voter, ...] = ()
        self._spec: GridSpec | None = None
        """How the plan's vector is cut and encoded."""
        self._plan_base = b""
        """Of the plan's channel."""
        self._parts_of: dict[Voter, tuple[int, Part]] = {}
        """The plan's roster by voter: (index, part)."""
        self._fixed: dict[int, bytes] = {}
        self._early: list[Result] = []
        self._early_bytes = 0

    # ---------------------------------------------------------------- the plan

    def begin(self, plan: Plan, recipients: Iterable[Voter], keep: dict[int, Result]) -> None:
        """Start (or restart) the data plane for `plan`. `keep`: results in hand that the plan fixes, by chunk."""
        now, entry = self.ctx.now, plan.entry
        self.plan, self.grid = plan, grid_of(entry) if plan.assignment else None
        self._spec = GridSpec(entry.numel, entry.chunk_elems, entry.codec)
        self.held = dict(keep)
        self.hashes = {f.chunk: f.hash for f in plan.fixed if f.chunk in keep}
        self._fixed = {f.chunk: f.hash for f in plan.fixed}
        self._plan_base = self.log.state.base(entry.channel)
        self._parts_of = {part.voter: (index, part) for index, part in enumerate(entry.roster)}
        self.gained, self.reduce_since, self.last_gain = 0, now, now
        self._recipients = tuple(v for v in recipients if v != self.ctx.me)
        self.outbox.keep(self._still_wanted, self._reachable)
        self._owned = {}
        self._sender.end()
        if self.grid is not None:
            self._traffic(entry.channel).ballots += 1
            shape = shape_of(self.ctx, plan, (*self._recipients, self.ctx.me))
            if shape is not None:
                self.rates.begin(now, asked_Bps(shape, self.ctx.me))
            if self._workspace is None or self._workspace[0] != self.grid:
                self._workspace = (self.grid, Workspace(self.grid))
            self._window = window_chunks(self.grid)
            self._sender.begin(plan, self._plan_base, self.grid, self._mine, keep)
            self._own(plan, self.grid)
        early = self._early
        self._early, self._early_bytes = [], 0
        for result in early:
            self.receive_result(result)

    def _own(self, plan: Plan, grid: Grid) -> None:
        """Open the chunks that the plan gives me, with the parts that came before it."""
        parts = self._parts.get((plan.entry.channel, self._plan_base), {})
        mine = [c for c, owner in in_order(plan) if owner >= 0 and plan.owners[owner] == self.ctx.me]
        owed_bytes = sum(grid.wire_bytes(chunk) for chunk in mine)
        roster = (p.voter for p in plan.entry.roster if p.voter != self.ctx.me)
        result_bytes = grid.result_bytes(0, max(1, len(plan.entry.roster)))
        self.patience.begin(roster, len(self._recipients), grid.wire_bytes(0), result_bytes, owed_bytes, plan.fill_s)
        for chunk in mine:
            self._owned[chunk] = ChunkReducer(grid, chunk, plan.entry.roster, plan.norms)
            for sender, contrib in list(parts.get(chunk, {}).items()):
                self._take(sender, contrib)
        self.close_due()

    def _still_wanted(self, result: Result) -> bool:
        """Of the queued results of older plans only those that this plan fixes."""
        assert self.plan is not None
        return result.header.head == self.plan.head and result.header.chunk in self._fixed

    def _reachable(self, peer: PeerId) -> bool:
        record = self.ctx.members.record(peer)
        return record is not None and self.ctx.members.alive(record.voter)

    def filled(self) -> None:
        """More of what I offer is final, or nothing more will be."""
        for offered in self.offered.values():
            filling = offered.filling
            if offered.first_final is None and filling is not None and filling.front < filling.numel:
                offered.first_final = self.ctx.now
        mine = self._mine
        if mine is None:
            return
        if mine.given_up:
            self._sender.give_up()
        self.close_due()

    @property
    def _mine(self) -> Offered | None:
        """My contribution, if it has the plan's grid: it may have been withdrawn for another since I was ready."""
        mine = self.offered.get(self.plan.entry.channel) if self.plan is not None else None
        return mine if mine is not None and mine.ready.grid == self._spec else None

    def reset(self) -> None:
        """The slot is over: candidates and plan are dropped; contributions live as long as their base."""
        for key in [k for k in self._parts if self.log.state.base(k[0]) != k[1]]:
            del self._parts[key]
        self._absent = {v: told for v, told in self._absent.items() if self.log.state.base(told[0]) == told[1]}
        self.plan, self.grid = None, None
        self.rates.end()
        self.held, self.hashes, self._owned, self._fixed = {}, {}, {}, {}
        self._sender.end()
        self._early, self._early_bytes = [], 0

    # ---------------------------------------------------------------- receiving

    def receive_contrib(self, sender: Voter, contrib: Contrib) -> None:
        if self.log.state.base(contrib.channel) != contrib.base:
            self._drop(sender, UNASKED)
            return
        part = Part(sender, contrib.weight, contrib.upto)
        if not contrib.payload:
            self._absent[sender] = (contrib.channel, contrib.base, part)
            self.close_due()
            return
        if self._absent.get(sender) == (contrib.channel, contrib.base, part):
            del self._absent[sender]  # the same was offered once more
        self._count_received(contrib.channel, len(contrib.payload))
        if self._store(sender, contrib) and contrib.chunk in self._owned:
            self._close_if_done(contrib.chunk)

    def _asked_for(self, contrib: Contrib) -> bool:
        """It belongs to the present plan's channel; one of another channel may have the same chunk number."""
        plan = self.plan
        return plan is not None and contrib.channel == plan.entry.channel and contrib.base == self._plan_base

    def _store(self, sender: Voter, contrib: Contrib) -> bool:
        """Keep a part; True if the present plan's channel asks for it."""
        asked_for = self._asked_for(contrib)
        wanted = asked_for and contrib.chunk in self._owned
        if not wanted and not self._room_for(sender, contrib):
            self._drop(sender, "more than is kept before a plan asks for it")
            return False
        self.patience.heard(sender, len(contrib.payload))
        if asked_for and not (self.grid is not None and 0 <= contrib.chunk < self.grid.n_chunks):
            self._drop(sender, "a chunk that there is not", bad=True)
            return False
        # What this plan gives to another owner, or what I hold already, is for the next plan: the sender may have seen
        # it before me, and the coordinator may have made it before it knew what I hold.
        chunks = self._parts.setdefault((contrib.channel, contrib.base), {})
        chunks.setdefault(contrib.chunk, {})[sender] = contrib
        self.gained += wanted
        if asked_for:
            self._take(sender, contrib)
        return asked_for

    def _take(self, sender: Voter, contrib: Contrib) -> None:
        """Hand a part of the plan's channel to the reducer of its chunk, if it is one that the plan's roster names."""
        reducer = self._owned.get(contrib.chunk)
        index, part = self._parts_of.get(sender, (-1, None))
        if reducer is None or part is None or (part.weight, part.upto) != (contrib.weight, contrib.upto):
            return
        if (reason := reducer.offer(index, contrib.payload)) is not None:
            self._drop(sender, f"a part of a chunk: {reason}", bad=reason == WRONG_SIZE)

    def receive_result(self, result: Result) -> bool:
        """Store a candidate if the current plan asks for it; True if it was new and wanted."""
        plan, header = self.plan, result.header
        if header.head == self.log.head and (plan is None or header.ballot > plan.ballot):
            self._keep_early(result)
            return False
        if plan is None or self.grid is None or header.chunk in self.held or not 0 <= header.chunk < self.grid.n_chunks:
            return False
        fixed = self._fixed.get(header.chunk)
        digest = result_hash(result)
        if fixed is not None:
            wanted = digest == fixed
        else:
            owner = plan.owners[plan.assignment[header.chunk]]
            wanted = header.head == plan.head and header.ballot == plan.ballot and header.owner == owner
        if not wanted:
            self._drop(header.owner, UNASKED)
            return False
        if not self._well_formed(result):
            self._drop(header.owner, "a result that cannot be", bad=True)
            return False
        self._count_received(plan.entry.channel, len(result.payload))
        self.patience.sign(header.owner)
        self._hold(result, digest)
        return True

    def _keep_early(self, result: Result) -> None:
        """An owner had all parts and was quicker than the plan: `begin` looks at the result again."""
        size = len(result.payload) + len(pack(result.header))
        if self._early_bytes + size <= EARLY_BYTES_MAX:
            self._early.append(result)
            self._early_bytes += size
        else:
            self._drop(result.header.owner, "more than is kept before the plan is known")

    def _drop(self, sender: Voter, why: str, bad: bool = False) -> None:
        key = (sender.peer, why)
        if key not in self.dropped and len(self.dropped) >= DROPPED_MAX:
            return  # of peers that there are not
        self.dropped[key] += 1
        if bad and self.dropped[key] == 1:
            log.warning("%s sent what was dropped: %s (told once; the round goes on without it)", sender.peer[:8], why)

    def _room_for(self, sender: Voter, contrib: Contrib) -> bool:
        """Of what no plan asks for yet, so much is kept of each."""
        own = [len(by[sender].payload) for chunks in self._parts.values() for by in chunks.values() if sender in by]
        return len(own) < STRAY_CHUNKS_MAX and sum(own) + len(contrib.payload) <= STRAY_BYTES_MAX

    def _well_formed(self, result: Result) -> bool:
        assert self.grid is not None and self.plan is not None
        roster, included, chunk = self.plan.entry.roster, result.header.included, result.header.chunk
        if not included:
            return not result.payload
        if not (included == roster or named(included, roster)):
            return False
        if len(result.payload) != self.grid.result_bytes(chunk, len(included)):
            return False
        return self.grid.coder.finite_result(result.payload, self.grid.elems(chunk))  # as parts are, a mean is finite

    def _hold(self, result: Result, digest: bytes) -> None:
        chunk = result.header.chunk
        self.held[chunk], self.hashes[chunk] = result, digest
        self.last_gain = self.ctx.now
        self._sender.done(chunk)

    # ---------------------------------------------------------------- reducing

    def close_due(self) -> None:
        """Look at the open chunks in the window again: a contributor may have died or become late."""
        if self.plan is None or self.grid is None:
            return
        alone = len(self.plan.entry.roster) == 1
        window = len(self._owned) if alone else self._window
        if self._owned:
            first = self._owned[next(iter(self._owned))]
            roster = self.plan.entry.roster
            self.patience.waiting_for(roster[i].voter for i in first.missing() if roster[i].voter != self.ctx.me)
        for chunk in list(self._owned)[:window]:
            self._close_if_done(chunk)

    def _close_if_done(self, chunk: int) -> None:
        """Close an owned chunk that has all the parts it will get.

        My own part is encoded when all others are in, and summed at once: it never waits in memory.
        """
        assert self.plan is not None
        roster, reducer = self.plan.entry.roster, self._owned[chunk]
        reasons: dict[Voter, str] = {}
        own: Offered | None = None
        for index in reducer.missing():
            part = roster[index]
            mine = self._mine if part.voter == self.ctx.me else None
            if mine is not None and (part.weight, part.upto) == (mine.ready.weight, mine.ready.upto):
                if mine.final(reducer.grid.span(chunk)[0]):
                    own = mine
                    continue
                if not mine.given_up and not self.patience.own_overdue():
                    return
            reason = self._given_up(part)
            if reason is None:
                return
            reasons[part.voter] = reason
        if own is not None:
            self._take(self.ctx.me, own.contrib(reducer.grid, chunk))
        self._close(chunk, reducer, reasons)

    def _given_up(self, part: Part) -> str | None:
        """Why this contributor's part is no longer waited for, or None."""
        members, plan, voter = self.ctx.members, self.plan, part.voter
        assert plan is not None
        # It was taken back, or another was offered, since its contributor was ready: it will not come.
        if voter == self.ctx.me or self._absent.get(voter) == (plan.entry.channel, self._plan_base, part):
            return "late"
        if members.gone(voter):
            return "left" if members.record(voter.peer) is None else "dead"  # or it is back as another process
        # The coordinator left it out as an owner, and I find it silent myself: no need to wait for my own verdict.
        if not members.alive(voter) or (voter not in plan.owners and members.suspect(voter)):
            return "dead"
        return "late" if self.patience.given_up(voter) else None

    @property
    def stall_s(self) -> float:
        """T_stall: the longest silence of anybody's that is no reason to act."""
        members = self.ctx.members
        floor_s = members.timeouts.t_chunk_s(members.rtt_max_s, 0.0)
        roster = self.plan.entry.roster if self.plan is not None else ()
        return max([floor_s, *(self.patience.silence_s(p.voter) for p in roster if p.voter != self.ctx.me)])

    @property
    def waits_s(self) -> float:
        """The longest silence that I bear with of those whose parts my next open chunk lacks; 0 where it lacks none."""
        if self.plan is None or not self._owned:
            return 0.0
        roster, first = self.plan.entry.roster, self._owned[next(iter(self._owned))]
        others = (roster[i].voter for i in first.missing() if roster[i].voter != self.ctx.me)
        return max((self.patience.silence_s(v) for v in others if not self.patience.given_up(v)), default=0.0)

    def _close(self, chunk: int, reducer: ChunkReducer, reasons: dict[Voter, str]) -> None:
        assert self.plan is not None
        plan = self.plan
        payload, included = reducer.close(self._workspace[1] if self._workspace else None)
        roster = plan.entry.roster
        reasons |= {roster[i].voter: reason for i, reason in reducer.refused.items()}
        excluded = tuple(Excluded(v, r) for v, r in sorted(reasons.items()))
        header = ChunkHeader(
            base=self._plan_base,
            chunk=chunk,
            head=plan.head,
            ballot=plan.ballot,
            owner=self.ctx.me,
            included=tuple(roster[i] for i in included),
            excluded=excluded,
        )
        del self._owned[chunk]
        self._parts.get((plan.entry.channel, self._plan_base), {}).pop(chunk, None)
        self.gained += 1
        self.patience.closed()
        result = Result(header, payload)
        self._hold(result, result_hash(result))
        self.outbox.tell(result, (voter.peer for voter in self._recipients))

    # ---------------------------------------------------------------- sending

    def send_again(self, chunk: int) -> None:
        """Nothing moves and this chunk's result is missing: my part may have been lost with a connection. Once only."""
        self._sender.send_again(chunk)

    def pending(self) -> set[PeerId]:
        """Peers for which `next_bulk` has something now."""
        return self._sender.pending(self._mine)

    def next_bulk(self, peer: PeerId) -> Bulk | None:
        """The next message for `peer`: results and contributions by turns, contributions within the owner's window."""
        message = self._sender.next_bulk(peer, self._mine, len(self._owned))
        if self.plan is not None and isinstance(message, Contrib | Result):
            self._count_sent(self.plan.entry.channel, len(message.payload))
        return message

    def _count_sent(self, channel: str, size: int) -> None:
        self.rates.sent(self.ctx.now, size, more=not self._sender.idle(self._mine))
        self._traffic(channel).bytes_sent += size

    def _count_received(self, channel: str, size: int) -> None:
        self.rates.received(self.ctx.now, size)
        self._traffic(channel).bytes_received += size

    def _traffic(self, channel: str) -> Traffic:
        traffic = self.traffic.setdefault(channel, Traffic())
        forget_oldest(self.traffic)
        return traffic

    # ---------------------------------------------------------------- views

    @property
    def fills_until(self) -> float:
        """Running time: before this it is no sign of failure that nothing moves, as contributions become final."""
        return self.patience.fills_until if self.grid is not None else 0.0

    @property
    def complete(self) -> bool:
        """Every chunk of the current plan is held."""
        return self.plan is not None and len(self.held) == len(self.plan.assignment)

    def missing(self) -> list[int]:
        if self.grid is None:
            return []
        return [c for c in range(self.grid.n_chunks) if c not in self.held]

    def manifest(self) -> tuple[bytes, ...]:
        return tuple(self.hashes[c] for c in range(len(self.hashes)))

    def results(self) -> tuple[Result, ...]:
        return tuple(self.held[c] for c in range(len(self.held)))


def result_hash(result: Result) -> bytes:
    """Identity of a chunk result: BLAKE3 over its header and its bytes."""
    return blake3(pack(result.header)).update(result.payload).digest()
