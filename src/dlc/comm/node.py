"""One peer, sans I/O: membership, slot, coordinator, exchange and sync behind one machine interface.

    receive(sender, message, now) ─┐                       ┌─> Send, Dial, Answer, Notify
    tick(now)                      ├─> Node ──(handlers)───┤
    attach / contribute / leave    ┘                       └─> next_bulk(peer): pulled by whoever moves the bytes

Every event goes through `_event`: measure how long I was away (a long gap makes me *stale*), let the machines act,
handle what I sent to myself, refresh my record. The same class runs under the real driver and in the simulator.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from dlc.comm import messages as msg
from dlc.comm.account import account
from dlc.comm.context import Context
from dlc.comm.coordinator import IDLE, Coordinator
from dlc.comm.effects import Answer, Dial, Effect, Notify, Send
from dlc.comm.entries import EMPTY, OPEN, ROUND, Entry, LogState, manifest_hash
from dlc.comm.events import (
    ChannelOpened,
    ChannelSynced,
    ContributionDropped,
    DigestMismatch,
    ElectorateChanged,
    MemberDown,
    MemberLeft,
    RoundDone,
    Waiting,
)
from dlc.comm.exchange import Exchange, Offered
from dlc.comm.grid import Grid
from dlc.comm.ids import PeerId, Voter
from dlc.comm.ledger import Lease
from dlc.comm.log import Log, Sink, counted_of
from dlc.comm.membership import Membership
from dlc.comm.permit import alive_records, greater_alive
from dlc.comm.shapes import check_slot_message, plausible_entry
from dlc.comm.slot import Slot
from dlc.comm.state import State
from dlc.comm.sync import Sync
from dlc.comm.timeouts import Timeouts
from dlc.comm.wire import pack, unpack
from dlc.errors import DlcError, ProtocolError
from dlc.report import Reason

RUNNING_STEP_S_MAX = 1.0
"""Running time: at most this much is counted between two events, so that a freeze ages nobody."""
TICK_S_MAX = 0.25
"""A node is ticked at least this often."""
COUNTDOWN_S = 5.0
"""How often a peer that waits for a quorum says how long it still will."""
TICK_S_MIN = 0.005
"""And no more often than this: a deadline that cannot be met yet must not keep a core busy."""

SLOT_MESSAGES = (
    msg.Ready,
    msg.Prepare,
    msg.Promise,
    msg.Nack,
    msg.Coord,
    msg.Progress,
    msg.Plan,
    msg.Held,
)
MEMBERSHIP_MESSAGES = (msg.Ping, msg.Ack, msg.PingReq, msg.IndirectAck, msg.Leave, msg.Welcome)
_CODES = {kind: code for code, kind in enumerate(msg.MESSAGES)}


@dataclass(frozen=True)
class NodeConfig:
    """What a node is started with."""

    run: str
    spec_hash: bytes
    spec: bytes
    listed: tuple[str, ...] = ()
    """Addresses of `--peers`."""
    founder: bool = False
    """May found the run alone: started without `--peers`, or with `--found`."""
    timeouts: Timeouts = dataclasses.field(default_factory=Timeouts)


class Node:
    def __init__(
        self,
        record: msg.Record,
        config: NodeConfig,
        *,
        sign: Callable[[msg.Record], msg.Record],
        verify: Callable[[msg.Record], bool],
        rng: random.Random,
        now: float,
        resumed: LogState | None = None,
    ) -> None:
        self.me, self.config = record.voter, config
        self.members = Membership(
            record,
            sign=sign,
            verify=verify,
            hello=self._hello,
            rng=rng,
            timeouts=config.timeouts,
            bootstrap=config.listed,
            now=now,
        )
        self.ctx = Context(self.me, self.members)
        self.ctx.now = now
        self.log = Log()
        self._resumed = resumed
        if resumed is not None:
            self.log.install(resumed, (resumed.head,))
        self.exchange = Exchange(self.ctx, self.log)
        self.slot = Slot(self.ctx, self.log, self.exchange, config.listed)
        self.slot.founder = config.founder
        self.coordinator = Coordinator(self.ctx, self.log, self.slot, self.exchange, self._committed, self._diverged)
        self.sync = Sync(self.ctx, self.log, self.exchange, self._apply, self._switched)
        self.leaving = False
        self._last: float | None = None
        self._stale_since: float | None = None
        self._last_waiting: Waiting | None = None
        self._record_due = True
        self._slot_opened()

    # ---------------------------------------------------------------- the machine interface

    def receive(self, sender: Voter, message: msg.Message, now: float) -> list[Effect]:
        """Handle one message. Raises ProtocolError for one that no correct peer sends; the state is unchanged then."""
        return self._event(now, lambda: self._dispatch(sender, message))

    def tick(self, now: float) -> list[Effect]:
        return self._event(now, self._tick)

    def next_deadline(self) -> float:
        """Absolute time at which `tick` wants to be called at the latest."""
        deadlines = [
            self.members.next_deadline(),
            self.slot.next_deadline(),
            self.coordinator.next_deadline(),
            self.exchange.next_deadline(),
            self.sync.next_deadline(),
        ]
        soonest = min([self.ctx.now + TICK_S_MAX] + [d for d in deadlines if d is not None])
        return max(soonest, self.ctx.now + TICK_S_MIN)

    def pending_bulk(self) -> set[PeerId]:
        return self.exchange.pending()

    def next_bulk(self, peer: PeerId) -> msg.Bulk | None:
        return self.exchange.next_bulk(peer)

    # ---------------------------------------------------------------- commands of the application

    def attach(self, channel: str, state: State, grid: Grid, lease_len: int, now: float) -> list[Effect]:
        """Bring a channel's state into the run: opens the channel, or fetches the swarm's state for it."""

        def act() -> None:
            attached = self.log.attach(channel, state, grid, lease_len)
            # Restored from the checkpoint that this node was started with, and no round came since.
            resumed, here = self._resumed, self.log.state
            same_base = resumed is not None and here.base(channel) == resumed.base(channel)
            attached.synced = self.log.is_open(channel) and same_base
            if not self.log.is_open(channel):
                spec = msg.GridSpec(grid.numel, grid.chunk_elems, grid.codec)
                self.slot.wishes[channel] = msg.Ready(
                    EMPTY, channel, EMPTY, spec, 0.0, 0, attached.digest, 0.0, True, lease_len
                )
            self._record_due = True
            self.slot.advance()
            self.slot.announce()
            self.sync.start()

        return self._event(now, act)

    def contribute(
        self,
        channel: str,
        vector: Tensor,
        grid: Grid,
        *,
        weight: float,
        upto: int,
        patience_s: float,
        sink: Sink | None,
        now: float,
    ) -> list[Effect]:
        """Offer a frozen fp32 vector to the channel's next round. It must not change until RoundDone."""
        if channel in self.exchange.offered:
            raise DlcError(f"channel {channel!r} has a contribution in flight already: wait for its round first")
        if vector.numel() != grid.numel:
            raise DlcError(f"the vector has {vector.numel()} elements, the channel {grid.numel}")
        state = self.log.state
        spec = msg.GridSpec(grid.numel, grid.chunk_elems, grid.codec)
        ready = msg.Ready(state.head, channel, state.base(channel), spec, weight, upto, b"", patience_s, False, 0)

        def act() -> None:
            self.exchange.offered[channel] = Offered(ready, vector, sink, now)
            self.slot.announce()

        return self._event(now, act)

    def withdraw(self, channel: str) -> bool:
        """Take back a contribution that no plan has named yet.

        False if a round with it may be decided still: then it goes on from a copy, its mean goes nowhere, and the
        caller's memory is not touched any more.
        """
        plan, mine = self.slot.plan, self.exchange.offered.get(channel)
        if plan is not None and plan.entry.channel == channel:
            if mine is not None:
                mine.vector, mine.sink = mine.vector.clone(), None
            return False
        return self.exchange.offered.pop(channel, None) is not None

    def lease(self) -> Lease | None:
        return self.log.state.ledger.lease(self.me)

    def describe(self, now: float, **changes: object) -> list[Effect]:
        """Update what my record says of me: role, speed, eta_s, status."""
        return self._event(now, lambda: self.members.update_own(**changes))

    def leave(self, now: float) -> list[Effect]:
        """Announce that this process goes for good. It votes no more."""

        def act() -> None:
            self.leaving = True
            self.ctx.stale = True
            self.coordinator.drop()
            self.ctx.out.extend(self.members.leave(now))

        return self._event(now, act)

    def refused(self, peer: PeerId, now: float) -> list[Effect]:
        """The transport saw this peer's connection close and re-connection refused."""
        return self._event(now, lambda: self.ctx.out.extend(self.members.refused(peer, now)))

    # ---------------------------------------------------------------- one event

    def _event(self, now: float, act: Callable[[], None]) -> list[Effect]:
        self._wake(now)
        act()
        self._refresh()
        out = self._settle()
        return out

    def _wake(self, now: float) -> None:
        gap = 0.0 if self._last is None else now - self._last
        first = self._last is None
        self._last = now
        self.ctx.now = now
        self.ctx.out = []
        if first or gap > self.members.t_gap_s:
            self._become_stale(now)

    def _become_stale(self, now: float) -> None:
        """I may have been frozen: no coordination, promise or vote before I know where the others are."""
        self.ctx.stale = True
        self.coordinator.drop()
        self.ctx.out.extend(self.members.begin_refresh(now))
        self._stale_since = self.members.running_s  # after the step that the gap itself adds

    def _refresh(self) -> None:
        """Stale ends when nobody alive is ahead, and every voter that is not gone has answered, or T_refresh passed."""
        if not self.ctx.stale or self.leaving or self._stale_since is None:
            return
        if greater_alive(self.ctx, self.log):
            return
        members = self.members
        waiting = [
            v for v in self.log.state.electorate if v != self.me and not members.gone(v) and not members.refreshed(v)
        ]
        if waiting and members.running_s - self._stale_since < members.t_refresh_s:
            return
        self.ctx.stale = False
        self._stale_since = None
        self.slot.announce()

    def _settle(self) -> list[Effect]:
        """Handle what I sent to myself before anything leaves, refresh my record, and find each message's way."""
        done: list[Effect] = []
        while self.ctx.out:
            batch, self.ctx.out = self.ctx.out, []
            for effect in batch:
                if isinstance(effect, Send) and effect.to == self.me.peer:
                    self._dispatch(self.me, effect.message)
                else:
                    done.append(effect)
        if self._record_due:
            self._describe_log()
        return [self._routed(effect) for effect in done]

    def _describe_log(self) -> None:
        self._record_due = False
        state = self.log.state
        self.members.update_own(
            head=state.head,
            tokens=state.tokens,
            depth=state.depth,
            active=self.log.active,
            synced=self.log.synced,
        )

    def _routed(self, effect: Effect) -> Effect:
        """One relay hop where the direct path to an alive peer fails."""
        if isinstance(effect, Dial) and isinstance(effect.message, msg.Hello):
            return Dial(effect.address, dataclasses.replace(effect.message, address=effect.address))
        if not isinstance(effect, Send) or isinstance(effect.message, MEMBERSHIP_MESSAGES + (msg.Relay,)):
            return effect
        relay = self.members.relay_for(effect.to)
        if relay is None or relay == self.me.peer:
            return effect
        code = _CODES[type(effect.message)]
        return Send(relay, msg.Relay(effect.to, self.me, code, pack(effect.message)))

    # ---------------------------------------------------------------- dispatch

    def _dispatch(self, sender: Voter, message: msg.Message) -> None:
        if isinstance(message, SLOT_MESSAGES):
            self._slot_message(sender, message)
        elif isinstance(message, msg.Contrib):
            self.exchange.receive_contrib(sender, message)
            self.slot.advance()
        elif isinstance(message, msg.Result):
            if not self.exchange.receive_result(message) or self.sync.busy:
                self.sync.receive_result(message)
            self.slot.advance()
        elif isinstance(message, MEMBERSHIP_MESSAGES):
            self._membership(sender, message)
        elif isinstance(message, msg.Hello):
            self._answer_hello(message)
        elif isinstance(message, msg.Commit):
            self._receive_commit(sender, message)
        elif isinstance(message, msg.Fetch):
            if message.head == self.log.head:
                self.slot.receive_fetch(sender, message)
            else:
                self.sync.receive_fetch(sender, message)
        elif isinstance(message, msg.Relay):
            self._relay(message)
        else:
            self._sync_message(sender, message)

    def _membership(self, sender: Voter, message: msg.Message) -> None:
        if isinstance(message, msg.Welcome) and message.record is not None and message.address:
            self.slot.answers[message.address] = message.record.voter.peer
        effects = self.members.receive(sender, message, self.ctx.now)
        self.ctx.out.extend(effects)
        if any(isinstance(e, Notify) and isinstance(e.event, MemberDown | MemberLeft) for e in effects):
            self._fewer()
        if not self.sync.busy and greater_alive(self.ctx, self.log):
            self.sync.start()

    def _fewer(self) -> None:
        """Somebody is gone, and a round may be waiting for it: look at once and not at the next tick."""
        self.exchange.close_due()
        self.slot.advance()
        if not self.leaving:
            self.coordinator.tick()

    def _slot_message(self, sender: Voter, m: msg.Message) -> None:
        head = m.head  # type: ignore[attr-defined]
        if head != self.log.head:
            # The sender is behind by the last entry: show it. Anything else is mended by records and sync.
            if self.log.past and self.log.past[-1].entry.parent == head and sender != self.me:
                self.ctx.send(sender, msg.Commit(self.log.past[-1].entry, (self.me,)))
            return
        if sender != self.me:
            check_slot_message(m, self.log.state)
        slot, coordinator = self.slot, self.coordinator
        if isinstance(m, msg.Ready):
            coordinator.receive_ready(sender, m)
        elif isinstance(m, msg.Prepare):
            if m.ballot.voter != self.me and m.ballot > coordinator.ballot:
                coordinator.drop()
            slot.receive_prepare(sender, m)
        elif isinstance(m, msg.Promise):
            coordinator.receive_promise(sender, m)
        elif isinstance(m, msg.Nack):
            slot.receive_nack(sender, m)
            coordinator.receive_nack(sender, m)
        elif isinstance(m, msg.Coord):
            if m.ballot.voter != self.me and m.ballot > coordinator.ballot:
                coordinator.drop()
            slot.receive_coord(sender, m)
        elif isinstance(m, msg.Progress):
            coordinator.receive_progress(sender, m)
        elif isinstance(m, msg.Plan):
            if m.ballot.voter != self.me and m.ballot > coordinator.ballot:
                coordinator.drop()
            slot.receive_plan(sender, m)
            self._check_digest(sender, m)
        elif isinstance(m, msg.Held):
            coordinator.receive_held(sender, m)

    def _check_digest(self, sender: Voter, plan: msg.Plan) -> None:
        """The plan's state is not mine: fetch the coordinator's before I vote (P2)."""
        attached = self.log.attached.get(plan.entry.channel)
        if attached is None or not plan.digest or attached.digest == plan.digest:
            return
        if plan.entry.kind == OPEN:
            self.sync.fetch_first_state(sender, plan.entry.channel, plan.digest)
        elif plan.entry.kind == ROUND and attached.synced:
            self._diverged(plan.entry.channel, plan.digest)

    def _diverged(self, channel: str, digest: bytes) -> None:
        self.log.attached[channel].synced = False
        self._record_due = True
        self.ctx.notify(DigestMismatch(channel, self.log.state.round_of(channel)))
        self.sync.start()

    def _sync_message(self, sender: Voter, m: msg.Message) -> None:
        sync = self.sync
        if isinstance(m, msg.SyncReq):
            sync.receive_request(sender, m)
        elif isinstance(m, msg.Steps):
            sync.receive_steps(sender, m)
        elif isinstance(m, msg.Offer):
            sync.receive_offer(sender, m)
        elif isinstance(m, msg.NoOffer):
            sync.receive_no_offer(sender, m)
        elif isinstance(m, msg.PieceReq):
            sync.receive_piece_request(sender, m)
        elif isinstance(m, msg.Piece):
            sync.receive_piece(sender, m)
            self.slot.advance()
        elif isinstance(m, msg.NoPiece):
            sync.receive_no_piece(sender, m)
        else:
            raise ProtocolError(f"{type(m).__name__} is not for a peer")

    def _relay(self, m: msg.Relay) -> None:
        if m.target != self.me.peer:
            self.ctx.out.append(Send(m.target, m))
            return
        if not 0 <= m.code < len(msg.MESSAGES):
            raise ProtocolError(f"no message has the code {m.code}")
        kind = msg.MESSAGES[m.code]
        if kind is msg.Relay or issubclass(kind, msg.Bulk):
            raise ProtocolError(f"{kind.__name__} is not relayed")
        self._dispatch(m.origin, unpack(m.message, kind))

    # ---------------------------------------------------------------- hello

    def _hello(self) -> msg.Hello:
        return msg.Hello(msg.PROTOCOL_VERSION, self.config.run, self.config.spec_hash, self.members.own, "")

    def _answer_hello(self, m: msg.Hello) -> None:
        if m.record is not None and m.spec_hash == self.config.spec_hash:
            self.ctx.out.extend(self.members.learn(m.record, self.ctx.now))
        own = self.members.own
        self.ctx.out.append(
            Answer(
                msg.Welcome(
                    msg.PROTOCOL_VERSION,
                    self.config.run,
                    self.config.spec,
                    own,
                    tuple(self.members.records()),
                    m.address,
                    "",
                )
            )
        )

    # ---------------------------------------------------------------- time

    def _tick(self) -> None:
        self.ctx.out.extend(self.members.tick(self.ctx.now))
        self.exchange.close_due()
        self.slot.tick()
        if not self.leaving:
            self.coordinator.tick()
        self.sync.tick()
        self._say_waiting()

    def _say_waiting(self) -> None:
        """Tell the application that nothing can go on and for whom we wait: at each change, and as time runs down."""
        state = self.log.state
        absent = [v for v in state.electorate if not self.members.alive(v)]
        missing = tuple(v.peer for v in absent if not self.members.gone(v))
        waiting = None
        if state.head == EMPTY:
            unheard = tuple(a for a in self.config.listed if a not in self.slot.answers)
            if unheard:
                waiting = Waiting("founding needs every listed address", unheard)
        elif missing and not state.quorum([v for v in state.electorate if v not in absent]):
            unseen_s = min(self.members.unseen_s(v) for v in absent if not self.members.gone(v))
            left_s = max(0.0, self.members.t_evict_s - unseen_s)
            waiting = Waiting("no quorum", missing, COUNTDOWN_S * math.ceil(left_s / COUNTDOWN_S))
        if waiting is not None and waiting != self._last_waiting:
            self.ctx.notify(waiting)
        self._last_waiting = waiting

    # ---------------------------------------------------------------- entries

    def _committed(self, entry: Entry, holders: list[Voter]) -> None:
        """I coordinated the decision of this entry: tell everyone, and apply it."""
        commit = msg.Commit(entry, tuple(holders))
        for record in self.members.records():
            if record.voter != self.me:
                self.ctx.send(record.voter, commit)
        self._receive_commit(self.me, commit)

    def _receive_commit(self, sender: Voter, m: msg.Commit) -> None:
        entry, log = m.entry, self.log
        if entry.parent == log.head:
            if not plausible_entry(entry, log.state):
                raise ProtocolError(f"a {entry.kind} entry that does not follow this head")
            if entry.kind != ROUND:
                self._decided()
                self._apply(entry, (), ())
                return
            bytes_of = self._bytes_of(entry)
            if bytes_of is not None:
                self._decided()
                self._apply(entry, *bytes_of)
                return
        if entry.depth > log.state.depth and entry.hash != log.head:
            # I lack bytes, or more than this entry: catch up from one who holds them.
            alive = [v for v in (sender, *m.holders) if v != self.me and self.members.alive(v)]
            self.sync.start(hint=alive[0] if alive else None)

    def _decided(self) -> None:
        """Deciding with others makes this process part of the living run."""
        self.log.active = True

    def _bytes_of(self, entry: Entry) -> tuple[tuple[bytes, ...], tuple[msg.Result, ...]] | None:
        """All results of this round, if I hold them: as candidates of the current plan, or as what I accepted."""
        exchange, accepted = self.exchange, self.slot.accepted
        if exchange.complete and manifest_hash(exchange.manifest()) == entry.manifest:
            return exchange.manifest(), exchange.results()
        if accepted is not None and accepted[1].entry.manifest == entry.manifest:
            return accepted[1].hashes, self.slot.accepted_results
        return None

    def _apply(self, entry: Entry, hashes: tuple[bytes, ...], results: tuple[msg.Result, ...]) -> None:
        """The head moves by one entry."""
        before = self.log.state
        mine = self.exchange.offered.get(entry.channel) if entry.kind == ROUND else None
        reduce_s = max(0.0, self.exchange.last_gain - self.exchange.reduce_since) if self.exchange.plan else 0.0
        ballots = mine.ballots if mine else 1
        if self.sync.donor is not None:
            donor = self.members.record(self.sync.donor.peer)
            self.log.active = self.log.active or (donor is not None and donor.active)
        fits = mine is None or mine.ready.grid == msg.GridSpec(entry.numel, entry.chunk_elems, entry.codec)
        self.log.commit(entry, hashes, results, mine.sink if mine and fits else None)
        if entry.kind == ROUND:
            counted = any(p.voter == self.me for p in counted_of(entry, results))
            absent = self._absent(entry, before)
            paths = {v.peer: self._path(v.peer) for v in before.electorate if v != self.me}
            report = account(entry, results, absent, mine, ballots, reduce_s, self.ctx.now, paths)
            self.exchange.offered.pop(entry.channel, None)
            self.coordinator.agenda.applied(entry.channel)
            self.ctx.notify(RoundDone(report, counted, f"{entry.numel} elements in {entry.codec}", fits))
        if entry.kind == OPEN:
            self.slot.wishes.pop(entry.channel, None)
            self.ctx.notify(ChannelOpened(entry.channel))
            if entry.channel in self.log.attached and self.log.attached[entry.channel].synced:
                self.ctx.notify(ChannelSynced(entry.channel, 0))
        self._moved(before.electorate)

    def _absent(self, entry: Entry, before: LogState) -> dict[Voter, Reason]:
        """Trainers of the electorate that the roster lacks, and why."""
        roster = {p.voter for p in entry.roster}
        absent: dict[Voter, Reason] = {}
        for voter in before.trainers:
            if voter not in roster:
                gone, alive = self.members.gone(voter), self.members.alive(voter)
                absent[voter] = "left" if gone else "not ready" if alive else "dead"
        return absent

    def _path(self, peer: PeerId) -> str:
        relay = self.members.relay_for(peer)
        return "direct" if relay is None else f"relayed via {relay}"

    def _switched(self) -> None:
        """A snapshot was installed: the head jumped."""
        donors = [r for r in alive_records(self.ctx) if r.active]
        self.log.active = self.log.active or bool(donors)
        for channel, mine in list(self.exchange.offered.items()):
            if mine.ready.base != self.log.state.base(channel):
                del self.exchange.offered[channel]
                self.ctx.notify(ContributionDropped(channel))
        self._moved(())

    def _moved(self, electorate: Sequence[Voter]) -> None:
        state = self.log.state
        self._record_due = True
        self._slot_opened()
        if tuple(electorate) != state.electorate:
            self.ctx.notify(ElectorateChanged(state.electorate))
        self.slot.announce()

    def _slot_opened(self) -> None:
        self.members.watch(v for v in self.log.state.electorate if v != self.me)
        self.slot.enter()
        self.coordinator.enter()

    # ---------------------------------------------------------------- views

    @property
    def phase(self) -> str:
        """For people: what this peer's rounds are doing."""
        if self.sync.busy:
            return "syncing"
        if self.slot.plan is not None:
            return "reducing" if not self.exchange.complete else "voting"
        return "waiting" if self.exchange.offered else "idle" if self.coordinator.phase == IDLE else "coordinating"

    def record_of(self, peer: PeerId) -> msg.Record | None:
        return self.members.record(peer)
