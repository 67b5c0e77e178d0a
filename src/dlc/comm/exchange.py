"""The data plane of a slot: butterfly all-reduce of one plan (docs/protocol.md, "Data plane").

Each roster member sends chunk c of its frozen vector to the owner named in the plan. The owner waits for all parts, or
for those that still may come; sums them in roster order, encodes the mean once, and sends the same bytes to everybody.
A member holds a candidate result until the slot is decided; nothing here is applied.

  contribution   offered (frozen, or becoming so: `filling.py`) -> sent within the owner's window (`sender.py`) ->
                 acknowledged by the chunk's result
  owned chunk    open -> closed (`collector.py`)
  result         wanted -> held: from its owner, from any holder by hash, or kept from an earlier plan

Bulk is *pulled*: the driver asks `next_bulk(peer)` when the link to that peer can take a message, so that nothing but
the frozen vector and the held results waits in memory. Contributions of a base stay valid for every plan of that base.
"""

from __future__ import annotations

from collections.abc import Iterable

from blake3 import blake3

from dlc.comm.collector import Collector
from dlc.comm.context import Context
from dlc.comm.dropped import UNASKED, Dropped
from dlc.comm.early import Early, Room
from dlc.comm.entries import Part, forget_oldest
from dlc.comm.grid import Grid
from dlc.comm.ids import PeerId, Voter
from dlc.comm.log import Log, grid_of
from dlc.comm.messages import Bulk, Contrib, GridSpec, Plan, Result
from dlc.comm.offered import Offered, Traffic
from dlc.comm.outbox import Outbox
from dlc.comm.owners import asked_Bps, shape_of
from dlc.comm.rates import Rates
from dlc.comm.sender import Sender
from dlc.comm.shapes import named
from dlc.comm.wire import pack


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
        self.dropped = Dropped()
        self.collector = Collector(ctx, log, self.dropped)
        self.outbox = Outbox()
        self.rates = Rates()
        self.reduce_since = 0.0
        self.last_gain = 0.0
        self._sender = Sender(ctx, self.outbox)
        self._recipients: tuple[Voter, ...] = ()
        self._spec: GridSpec | None = None
        """How the plan's vector is cut and encoded."""
        self._fixed: dict[int, bytes] = {}
        self._roster: frozenset[Part] = frozenset()
        """The plan's: each result names some hundreds of it, and is looked at."""
        self.room = Room(self.dropped)
        self._early: Early[Result] = Early(self.room)
        """Their plan, which travels on the other lane, is not known yet."""
        self._heard: dict[Voter, float] = {}
        """When a result of each owner came last, under this plan."""

    # ---------------------------------------------------------------- the plan

    def begin(self, plan: Plan, recipients: Iterable[Voter], keep: dict[int, Result]) -> None:
        """Start (or restart) the data plane for `plan`. `keep`: results in hand that the plan fixes, by chunk."""
        now, entry = self.ctx.now, plan.entry
        self.plan, self.grid = plan, grid_of(entry) if plan.assignment else None
        self._spec = GridSpec(entry.numel, entry.chunk_elems, entry.codec)
        self._fixed = {f.chunk: f.hash for f in plan.fixed}
        self._roster = frozenset(entry.roster)
        # A plan that keeps what its own roster does not name cannot be voted for: nobody could count such a round.
        self.held = {chunk: result for chunk, result in keep.items() if self._of_roster(result)}
        self.hashes = {chunk: self._fixed[chunk] for chunk in self.held}
        self.reduce_since, self.last_gain = now, now
        self._heard = {}
        self._recipients = tuple(v for v in recipients if v != self.ctx.me)
        self.outbox.keep(self._still_wanted, self._reachable)
        self._sender.end()
        if self.grid is not None:
            self._traffic(entry.channel).ballots += 1
            shape = shape_of(self.ctx, plan, (*self._recipients, self.ctx.me))
            if shape is not None:
                self.rates.begin(now, asked_Bps(shape, self.ctx.me))
            self._sender.begin(plan, self.log.state.base(entry.channel), self.grid, self._mine, self.held)
        self._pass_on(self.collector.begin(plan, self.grid, self._recipients, self._mine))
        for _, result in self._early.take():
            self.receive_result(result)

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
        self.plan, self.grid = None, None
        self.rates.end()
        self.held, self.hashes, self._fixed = {}, {}, {}
        self.collector.end()
        self._sender.end()
        self._early.take()

    # ---------------------------------------------------------------- reducing

    def receive_contrib(self, sender: Voter, contrib: Contrib) -> None:
        if self.log.state.base(contrib.channel) != contrib.base:
            self.dropped.note(sender, UNASKED)
            return
        if contrib.payload:
            self._count_received(contrib.channel, len(contrib.payload))
        self._pass_on(self.collector.take(sender, contrib, self._mine))

    def close_due(self) -> None:
        """Somebody may have died or become late whose parts are waited for."""
        self._pass_on(self.collector.close_due(self._mine))

    def _pass_on(self, closed: list[Result]) -> None:
        for result in closed:
            self._hold(result, result_hash(result))
            self.outbox.tell(result, (voter.peer for voter in self._recipients))

    # ---------------------------------------------------------------- results

    def receive_result(self, result: Result) -> bool:
        """Store a candidate if the current plan asks for it; True if it was new and wanted."""
        plan, header = self.plan, result.header
        if header.head == self.log.head and (plan is None or header.ballot > plan.ballot):
            self._early.keep(header.owner, result)  # it had all parts, and was quicker than the plan
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
            self.dropped.note(header.owner, UNASKED)
            return False
        if not self._well_formed(result):
            self.dropped.note(header.owner, "a result that cannot be", bad=True)
            return False
        self._count_received(plan.entry.channel, len(result.payload))
        self._heard[header.owner] = self.ctx.now
        self.collector.patience.sign(header.owner)
        self._hold(result, digest)
        return True

    def _well_formed(self, result: Result) -> bool:
        assert self.grid is not None and self.plan is not None
        included, chunk = result.header.included, result.header.chunk
        if not included:
            return not result.payload
        if not self._of_roster(result):
            return False
        if len(result.payload) != self.grid.result_bytes(chunk, len(included)):
            return False
        return self.grid.coder.finite_result(result.payload, self.grid.elems(chunk))  # as parts are, a mean is finite

    def _of_roster(self, result: Result) -> bool:
        """The plan names all whose parts are in it; mostly that is everybody, which is seen at once."""
        assert self.plan is not None
        included = result.header.included
        return included == self.plan.entry.roster or named(included, self._roster)

    def _hold(self, result: Result, digest: bytes) -> None:
        chunk = result.header.chunk
        self.held[chunk], self.hashes[chunk] = result, digest
        self.last_gain = self.ctx.now
        self._sender.done(chunk)

    # ---------------------------------------------------------------- sending

    def send_again(self, chunk: int) -> None:
        """Nothing moves and this chunk's result is missing: my part may have been lost with a connection. Once only."""
        self._sender.send_again(chunk)

    def broken(self, peer: PeerId) -> None:
        """A connection to it has ended, and what was on its way there may be lost."""
        self._sender.broken(peer)

    def pending(self) -> set[PeerId]:
        """Peers for which `next_bulk` has something now."""
        return self._sender.pending(self._mine)

    def next_bulk(self, peer: PeerId) -> Bulk | None:
        """The next message for `peer`: results and contributions by turns, contributions within the owner's window."""
        message = self._sender.next_bulk(peer, self._mine, self.collector.n_open)
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
    def complete(self) -> bool:
        """Every chunk of the current plan is held."""
        return self.plan is not None and len(self.held) == len(self.plan.assignment)

    def missing(self) -> list[int]:
        if self.grid is None:
            return []
        return [c for c in range(self.grid.n_chunks) if c not in self.held]

    def heard_of(self, owner: Voter) -> float:
        """When a result of its came last, or the plan began."""
        return self._heard.get(owner, self.reduce_since)

    def owed(self) -> tuple[Voter, ...]:
        """Members of the plan for whom results that I reduced wait here, and those whom my bulk does not reach."""
        results, relayed = self.outbox.results, self.ctx.members.relay_for
        return tuple(v for v in self._recipients if v.peer in results or relayed(v.peer) is not None)

    def coming(self, since_run: float) -> bool:
        """Some results are still missing, and may be on their way: all had been sent by `since_run` (running time)."""
        plan = self.plan
        if plan is None or self.complete:
            return False
        patience = self.collector.patience
        owners = {plan.owners[at] for at in (plan.assignment[c] for c in self.missing()) if at >= 0} - {self.ctx.me}
        patient_s = max(map(patience.underway_s, owners), default=self.collector.stall_s / 2)
        return self.ctx.running_s - max(patience.last_came, since_run) < patient_s

    def manifest(self) -> tuple[bytes, ...]:
        return tuple(self.hashes[c] for c in range(len(self.hashes)))

    def results(self) -> tuple[Result, ...]:
        return tuple(self.held[c] for c in range(len(self.held)))


def result_hash(result: Result) -> bytes:
    """Identity of a chunk result: BLAKE3 over its header and its bytes."""
    return blake3(pack(result.header)).update(result.payload).digest()
