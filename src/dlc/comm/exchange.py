"""The data plane of a slot: butterfly all-reduce of one plan (docs/protocol.md, "Data plane").

Each roster member sends chunk c of its frozen vector to the owner named in the plan. The owner waits for all parts, or
for those that still may come; sums them in roster order, encodes the mean once, and sends the same bytes to everybody.
A member holds a candidate result until the slot is decided; nothing here is applied.

  contribution   offered (frozen, or becoming so: `filling.py`) -> sent within the owner's window -> acknowledged by the
                 chunk's result
  owned chunk    open -> closed: all parts in, or every missing member is dead or late
  result         wanted -> held: from its owner, from any holder by hash, or kept from an earlier plan

Bulk is *pulled*: the driver asks `next_bulk(peer)` when the link to that peer can take a message, so that nothing but
the frozen vector and the held results waits in memory. Contributions of a base stay valid for every plan of that base.
All members of a plan send chunks in one order: an owner could wait for ever for windows that are full of other chunks.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterable, Iterator

from blake3 import blake3

from dlc.comm.context import Context
from dlc.comm.encoded import payload_of
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
from dlc.comm.shapes import named
from dlc.comm.turns import Turns
from dlc.comm.wire import pack

log = logging.getLogger(__name__)

WINDOW_BYTES = 16 << 20
"""Contributions on their way to one owner whose results have not come back: bounds what an owner must hold per peer."""
WINDOW_CHUNKS_MIN = 4
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
        self._to_send: dict[Voter, deque[int]] = {}
        self._in_flight: dict[Voter, set[int]] = {}
        self._window = WINDOW_CHUNKS_MIN
        """Chunks that may be in flight to one owner under this plan."""
        self.outbox, self._turns = Outbox(), Turns()
        self.patience = Patience(ctx)
        self.rates = Rates()
        self._recipients: tuple[Voter, ...] = ()
        self._plan_base = b""
        """Of the plan's channel."""
        self._parts_of: dict[Voter, tuple[int, Part]] = {}
        """The plan's roster by voter: (index, part)."""
        self._fixed: dict[int, bytes] = {}
        self._sent_again: set[int] = set()
        self._early: list[Result] = []
        self._early_bytes = 0

    # ---------------------------------------------------------------- the plan

    def begin(self, plan: Plan, recipients: Iterable[Voter], keep: dict[int, Result]) -> None:
        """Start (or restart) the data plane for `plan`. `keep`: results in hand that the plan fixes, by chunk."""
        now = self.ctx.now
        self.plan, self.grid = plan, grid_of(plan.entry) if plan.assignment else None
        self.held = dict(keep)
        self.hashes = {f.chunk: f.hash for f in plan.fixed if f.chunk in keep}
        self._fixed = {f.chunk: f.hash for f in plan.fixed}
        self._plan_base = self.log.state.base(plan.entry.channel)
        self._parts_of = {part.voter: (index, part) for index, part in enumerate(plan.entry.roster)}
        self.gained, self.reduce_since, self.last_gain = 0, now, now
        self._recipients = tuple(v for v in recipients if v != self.ctx.me)
        self.outbox.keep(self._still_wanted, self._reachable)
        self._owned, self._to_send, self._in_flight = {}, {}, {}
        if self.grid is not None:
            self._traffic(plan.entry.channel).ballots += 1
            shape = shape_of(self.ctx, plan, (*self._recipients, self.ctx.me))
            if shape is not None:
                self.rates.begin(now, asked_Bps(shape, self.ctx.me))
            if self._workspace is None or self._workspace[0] != self.grid:
                self._workspace = (self.grid, Workspace(self.grid))
            self._window = self.window_chunks(self.grid)
            self._queue_contributions(plan)
            self._own(plan, self.grid)
        early = self._early
        self._early, self._early_bytes = [], 0
        for result in early:
            self.receive_result(result)

    def _own(self, plan: Plan, grid: Grid) -> None:
        """Open the chunks that the plan gives me, with the parts that came before it."""
        parts = self._parts.get((plan.entry.channel, self._plan_base), {})
        mine = [c for c, owner in _in_order(plan) if owner >= 0 and plan.owners[owner] == self.ctx.me]
        owed_bytes = sum(grid.wire_bytes(chunk) for chunk in mine)
        roster = (p.voter for p in plan.entry.roster if p.voter != self.ctx.me)
        result_bytes = grid.result_bytes(0, max(1, len(plan.entry.roster)))
        self.patience.begin(roster, len(self._recipients), grid.wire_bytes(0), result_bytes, owed_bytes, plan.fill_s)
        self._turns.begin({owner.peer: len(chunks) for owner, chunks in self._to_send.items()}, len(mine))
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

    def _queue_contributions(self, plan: Plan) -> None:
        me, entry = self.ctx.me, plan.entry
        self._to_send, self._in_flight, self._sent_again = {}, {}, set()
        mine = self._mine(plan)
        part = next((p for p in entry.roster if p.voter == me), None)
        if part is None:
            return
        if mine is None or mine.given_up or (part.weight, part.upto) != (mine.ready.weight, mine.ready.upto):
            self._tell_absent(plan, part)
            return
        mine.started = self.ctx.now if mine.started is None else mine.started
        for chunk, owner in _in_order(plan):
            if owner >= 0 and plan.owners[owner] != me:
                self._to_send.setdefault(plan.owners[owner], deque()).append(chunk)

    def _tell_absent(self, plan: Plan, part: Part) -> None:
        """What the plan names I have no more, or never will: nobody need wait for it. An empty part says so."""
        first = {owner: chunk for chunk, owner in reversed(list(enumerate(plan.assignment))) if owner >= 0}
        for index, chunk in first.items():
            owner = plan.owners[index]
            if owner != self.ctx.me:
                empty = Contrib(plan.entry.channel, self._plan_base, chunk, part.weight, part.upto)
                self.outbox.serve(owner.peer, empty)

    def filled(self) -> None:
        """More of what I offer is final, or nothing more will be."""
        for offered in self.offered.values():
            filling = offered.filling
            if offered.first_final is None and filling is not None and filling.front < filling.numel:
                offered.first_final = self.ctx.now
        plan = self.plan
        mine = self._mine(plan) if plan is not None else None
        if plan is None or mine is None:
            return
        if mine.given_up and self._to_send:
            self._to_send, self._in_flight = {}, {}
            self._tell_absent(plan, self._parts_of[self.ctx.me][1])
        self.close_due()

    def _mine(self, plan: Plan) -> Offered | None:
        """My contribution, if it has the plan's grid: it may have been withdrawn for another since I was ready."""
        mine, entry = self.offered.get(plan.entry.channel), plan.entry
        grid = GridSpec(entry.numel, entry.chunk_elems, entry.codec)
        return mine if mine is not None and mine.ready.grid == grid else None

    def reset(self) -> None:
        """The slot is over: candidates and plan are dropped; contributions live as long as their base."""
        for key in [k for k in self._parts if self.log.state.base(k[0]) != k[1]]:
            del self._parts[key]
        self._absent = {v: told for v, told in self._absent.items() if self.log.state.base(told[0]) == told[1]}
        self.plan, self.grid = None, None
        self.rates.end()
        self.held, self.hashes, self._owned, self._fixed = {}, {}, {}, {}
        self._to_send, self._in_flight = {}, {}
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
        for in_flight in self._in_flight.values():
            in_flight.discard(chunk)

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
            mine = self._mine(self.plan) if part.voter == self.ctx.me else None
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
            self._take(self.ctx.me, self._encode(own, chunk))
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

    def window_chunks(self, grid: Grid) -> int:
        return max(WINDOW_CHUNKS_MIN, WINDOW_BYTES // max(1, grid.wire_bytes(0)))

    def send_again(self, chunk: int) -> None:
        """Nothing moves and this chunk's result is missing: my part may have been lost with a connection. Once only."""
        for owner, in_flight in self._in_flight.items():
            if chunk in in_flight and chunk not in self._sent_again:
                self._sent_again.add(chunk)
                in_flight.discard(chunk)
                self._to_send[owner].append(chunk)

    def pending(self) -> set[PeerId]:
        """Peers for which `next_bulk` has something now."""
        return {*self.outbox.peers(), *self._owners_with_room()}

    def _owners_with_room(self) -> Iterator[PeerId]:
        """Those who lack parts of mine, and whose window is not full."""
        if not self._to_send:
            return
        assert self.plan is not None
        mine = self.offered.get(self.plan.entry.channel)
        for owner, chunks in self._to_send.items():
            if chunks and len(self._in_flight.get(owner, ())) < self._window and self._sendable(mine, chunks[0]):
                yield owner.peer

    def _sendable(self, mine: Offered | None, chunk: int) -> bool:
        """It need not wait until more of my contribution is final."""
        if mine is None or mine.filling is None or chunk in self.held:
            return True
        assert self.grid is not None
        return mine.final(self.grid.span(chunk)[0])

    def next_bulk(self, peer: PeerId) -> Bulk | None:
        """The next message for `peer`: results and contributions by turns, contributions within the owner's window."""
        contribution = self._next_contribution(peer) if self._contribution_first(peer) else None
        ready = self.outbox.next(peer) if contribution is None else None
        if ready is None:
            return contribution or self._next_contribution(peer)
        if self.plan is not None and isinstance(ready, Contrib | Result):
            self._count_sent(self.plan.entry.channel, len(ready.payload))
        return ready

    def _contribution_first(self, peer: PeerId) -> bool:
        results = self.outbox.results.get(peer)
        if not results:
            return False
        parts_left = sum(len(chunks) for owner, chunks in self._to_send.items() if owner.peer == peer)
        return self._turns.contribution_first(peer, parts_left, len(self._owned) + len(results))

    def _next_contribution(self, peer: PeerId) -> Contrib | None:
        if self.grid is None or self.plan is None:
            return None
        mine = self._mine(self.plan)
        for owner, chunks in self._to_send.items():
            in_flight = self._in_flight.setdefault(owner, set())
            while owner.peer == peer and chunks and mine is not None and len(in_flight) < self._window:
                if not self._sendable(mine, chunks[0]):
                    break
                chunk = chunks.popleft()
                if chunk in self.held:
                    continue
                in_flight.add(chunk)
                contrib = self._encode(mine, chunk)
                self._count_sent(self.plan.entry.channel, len(contrib.payload))
                return contrib
        return None

    def _encode(self, mine: Offered, chunk: int) -> Contrib:
        assert self.grid is not None
        start, _ = self.grid.span(chunk)
        # Its maker may stop it at any moment, on another thread: what was final is so still, and may go.
        if mine.filling is not None and start < mine.filling.front:
            raise RuntimeError(f"chunk {chunk} is not final: it must not be sent")
        payload = payload_of(mine.vector, self.grid, chunk)
        ready = mine.ready
        return Contrib(ready.channel, ready.base, chunk, ready.weight, ready.upto, payload)

    def _count_sent(self, channel: str, size: int) -> None:
        more = not self.outbox.empty or next(self._owners_with_room(), None) is not None
        self.rates.sent(self.ctx.now, size, more)
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


def _in_order(plan: Plan) -> Iterable[tuple[int, int]]:
    """(chunk, index of its owner) in the order in which all members send and close them."""
    chunks = list(enumerate(plan.assignment))
    return reversed(chunks) if plan.fill_s > 0 else chunks


def result_hash(result: Result) -> bytes:
    """Identity of a chunk result: BLAKE3 over its header and its bytes."""
    return blake3(pack(result.header)).update(result.payload).digest()
