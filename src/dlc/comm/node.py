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
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from dlc.comm import messages as msg
from dlc.comm.absence import Absence
from dlc.comm.applier import Applier
from dlc.comm.catalogue import CODES
from dlc.comm.context import Context
from dlc.comm.coordinator import IDLE
from dlc.comm.donations import PIECE_BYTES
from dlc.comm.effects import Dial, Effect, Notify, Send
from dlc.comm.encoded import Encoded
from dlc.comm.entries import EMPTY, SavedLog, check_channel
from dlc.comm.events import MemberDown, MemberLeft, MemberUp
from dlc.comm.exchange import Exchange
from dlc.comm.filling import Filling
from dlc.comm.grid import Grid
from dlc.comm.ground import Ground
from dlc.comm.health import RUNNING_STEP_MAX_S
from dlc.comm.ids import PeerId, Voter
from dlc.comm.inbox import MEMBERSHIP_MESSAGES, Inbox
from dlc.comm.ledger import Lease
from dlc.comm.linkprobe import LinkProbes
from dlc.comm.log import HISTORY_BYTES_MAX, Log, Sink
from dlc.comm.membership import Membership
from dlc.comm.observing import Observing
from dlc.comm.offered import Offered
from dlc.comm.reach import in_step
from dlc.comm.records import told_states
from dlc.comm.reducer import WEIGHT_MAX
from dlc.comm.roles import OBSERVER
from dlc.comm.service import Services
from dlc.comm.slot import Slot
from dlc.comm.state import State
from dlc.comm.straggler import NEVER_S
from dlc.comm.tcp import WaySample
from dlc.comm.timeouts import Timeouts
from dlc.comm.waiting import Waits
from dlc.comm.wire import HEADER_BYTES_MAX, Packed, pack
from dlc.errors import DlcError, UsageError

TICK_S_MAX = 0.25
"""A node is ticked at least this often."""
TICK_S_MIN = 0.005
"""And no more often than this: a deadline that cannot be met yet must not keep a core busy."""

_DIRECT_ONLY = (*MEMBERSHIP_MESSAGES, msg.Relay)
AT_LENGTH_BYTES_MIN = 32 << 20
"""Work that goes through fewer bytes is done before anybody could miss me: some 20 ms."""
RELAYED_BYTES_MAX = HEADER_BYTES_MAX - 4096
"""What is longer fits no header together with what a relay says of it."""


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
    piece_bytes: int = PIECE_BYTES
    """Of an image on its way; the same on all peers of a run."""
    history_bytes_max: int = HISTORY_BYTES_MAX
    """Results kept for peers that are a few entries behind."""
    log: bool = True
    """Without it the node seeks no seat, founds nothing and votes for nothing: membership and services only. The same
    on all peers of a run."""
    known: tuple[str, ...] = ()
    """Addresses of former peers: dialled as those that are listed, and not waited for."""
    probe_links: bool = True
    """Measure my link before the first round, and let others measure theirs with me."""


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
        resumed: SavedLog | None = None,
    ) -> None:
        self.me, self.config = record.voter, config
        self.members = Membership(
            record,
            sign=sign,
            verify=verify,
            hello=self._hello,
            rng=rng,
            timeouts=config.timeouts,
            bootstrap=(*config.listed, *config.known),
            now=now,
        )
        self.ctx = Context(self.me, self.members)
        self.ctx.now = now
        self.log = Log(history_bytes_max=config.history_bytes_max)
        self._resumed = resumed.state if resumed is not None else None
        if resumed is not None:
            self.log.install(resumed.state, resumed.chain, resumed.totals)
        self.exchange = Exchange(self.ctx, self.log)
        self.slot = Slot(self.ctx, self.log, self.exchange, config.listed, lambda *told: self.applier.learned(*told))
        self.slot.founder = config.founder
        self.applier = Applier(self.ctx, self.log, self.exchange, self.slot, config.piece_bytes)
        self.coordinator, self.sync = self.applier.coordinator, self.applier.sync
        self.observing = Observing(self.ctx, self.log, self.applier.diverged)
        self.services = Services()
        self.probes: LinkProbes | None = None
        if config.probe_links:
            beside = random.Random(f"probes of {self.me}")  # drawn from rng, probes would change what others draw
            ground = Ground(self.me, self.members, self.exchange.rates, beside, self.rates_changed)
            self.probes = LinkProbes(ground, self._seats, self._resting)
            self.services.add(self.probes)
        self.inbox = Inbox(self.applier, self.services, config.run, config.spec, config.spec_hash, config.log)
        self._t_gap_s = self.members.t_gap_s
        self.offers = 0
        """Contributions that this process has offered."""
        self._last: float | None = None
        self.absence = Absence(self.ctx, self.log)
        self.waits = Waits(self.ctx, self.log, self.slot)
        self.torn = False
        """See `_event`."""
        self.applier.open_slot()

    # ---------------------------------------------------------------- the machine interface

    def receive(self, sender: Voter, message: msg.Message, now: float) -> list[Effect]:
        """Handle one message. Raises ProtocolError for one that no correct peer sends; the state is unchanged then."""
        self.inbox.check_sender(sender, message)
        return self._event(now, lambda: self.inbox.receive(sender, message))

    def tick(self, now: float) -> list[Effect]:
        return self._event(now, self._tick)

    def next_deadline(self) -> float:
        """Absolute time at which `tick` wants to be called at the latest."""
        now = self.ctx.now
        if self.sync.working:
            return now + TICK_S_MIN
        soonest = now + TICK_S_MAX  # soon enough for exchange and sync
        log_due = (self.slot.next_deadline(), self.coordinator.next_deadline()) if self.config.log else ()
        for deadline in (self.members.next_deadline(), self.services.next_deadline(), *log_due):
            if deadline is not None and deadline < soonest:
                soonest = deadline
        return soonest if soonest > now + TICK_S_MIN else now + TICK_S_MIN

    def work_aside(self, aside: Callable[[Callable[[], None], list[Effect]], None]) -> None:
        """What grows with the model (a round's step, the digest, a copy of the state) is done by
        `aside(work, effects)` from now on: it performs the effects, and calls `breathe` until the work is done."""

        def at_length(work: Callable[[], None], size_bytes: int) -> None:
            if size_bytes < AT_LENGTH_BYTES_MIN:
                work()
                return
            # The others need not wait for my step before theirs. COMMIT and HELD are true however early they come.
            decisive = [e for e in self.ctx.out if self._is_decisive(e)]
            self.ctx.out[:] = [e for e in self.ctx.out if not self._is_decisive(e)]
            aside(work, [self._routed(e) for e in decisive])

        self.ctx.at_length = self.log.at_length = at_length

    def _is_decisive(self, effect: Effect) -> bool:
        """Of what others wait for; what I send to myself never leaves."""
        if not isinstance(effect, Send) or effect.to == self.me.peer:
            return False
        return isinstance(effect.message, msg.Commit | msg.Held)

    def breathe(self, now: float, sender: Voter | None = None, message: msg.Message | None = None) -> list[Effect]:
        """In the middle of an event that takes long: one of `messages.PROOFS`, or what time itself makes membership do.

        Only membership sees it. To the others this is a peer that is alive, and whose messages take longer; what
        membership finds out is an effect of the event at hand, once that ends. ProtocolError as `receive`.
        """
        if self._last is None or now - self._last > self._t_gap_s:
            return []  # I was away: the next event finds that out
        self._last = self.ctx.now = now
        effects = self.members.tick(now) if sender is None else self.members.receive(sender, message, now)
        self.ctx.out.extend(e for e in effects if isinstance(e, Notify))
        return self._on_their_way([e for e in effects if not isinstance(e, Notify)])

    def pending_bulk(self) -> set[PeerId]:
        return self.exchange.pending() | self.services.pending_bulk()

    def next_bulk(self, peer: PeerId) -> msg.Bulk | None:
        return self.exchange.next_bulk(peer) or self.services.next_bulk(peer)

    def bulk_peers(self) -> set[PeerId]:
        """Peers that bulk will go to: the other voters that are alive, if I am one, and those that services name."""
        electorate = self.log.state.electorate
        voters = electorate if self.me in electorate else ()
        return {v.peer for v in voters if v != self.me and self.members.alive(v)} | self.services.bulk_peers()

    @property
    def awaits_bulk(self) -> bool:
        """Others have something for me, or connect for the time when they will: a state that I lack, or results."""
        electorate = self.log.state.electorate
        fellow = self.me in electorate and any(v != self.me and self.members.alive(v) for v in electorate)
        return fellow or self.sync.donor is not None

    def links_widened(self) -> None:
        """My bulk has more connections to somebody than before."""
        if self.probes is not None:
            self.probes.begin_anew()

    def link_samples(self, samples: Mapping[PeerId, WaySample], now: float) -> None:
        """What the kernel says of the connections that my bulk leaves by; about every 100 ms while bulk moves."""
        self.exchange.rates.samples(samples, now)
        if self.probes is not None:
            self.probes.sampled(now)

    def _seats(self) -> tuple[Voter, ...]:
        """The other voters; nobody while I have no seat, or am not in step. Without a log: all that may take part."""
        if not self.config.log:
            voters = [record.voter for record in self.members.records() if record.role != OBSERVER]
            return tuple(voter for voter in voters if voter != self.me) if self.me in voters else ()
        electorate = self.log.state.electorate
        if self.me not in electorate or self.ctx.stale or not in_step(self.ctx, self.log):
            return ()
        return tuple(voter for voter in electorate if voter != self.me)

    def _resting(self) -> bool:
        """No plan with bulk is at work here and no state on its way, in either direction: the link is free."""
        plan = self.slot.plan
        reducing = plan is not None and bool(plan.assignment)
        return self.services.resting and not (reducing or self.sync.busy or self.exchange.pending() or self.ctx.leaving)

    # ---------------------------------------------------------------- commands of the application

    def attach(self, channel: str, state: State, grid: Grid, lease_len: int, now: float) -> list[Effect]:
        """Bring a channel's state into the run: opens the channel, or fetches the swarm's state for it."""
        self.need_log(f"channel {channel!r} cannot be opened")
        check_channel(channel, self.log.state)
        here = (name for name, attached in self.log.attached.items() if attached.lease_len and not attached.abandoned)
        leased = {*here, self.log.state.leased} - {channel, None}
        if lease_len and leased and not self.log.is_open(channel):
            raise UsageError(
                f"channel {channel!r} cannot lease samples: those of this run go to {min(map(str, leased))!r}, and a "
                "run has one ledger. Open it without leases (lease_len 0), or with a Peer of another run"
            )

        def act() -> None:
            attached = self.log.attach(channel, state, grid, lease_len)
            # Restored from the checkpoint that this node was started with, and no round came since.
            resumed, here = self._resumed, self.log.state
            same_base = resumed is not None and here.base(channel) == resumed.base(channel)
            attached.synced = self.log.is_open(channel) and same_base
            if not here.round_of(channel):
                spec = msg.GridSpec(grid.numel, grid.chunk_elems, grid.codec)
                self.slot.wishes[channel] = msg.Ready(
                    EMPTY, channel, EMPTY, spec, 0.0, 0, attached.digest, 0.0, True, lease_len
                )
            self.ctx.record_due = True
            self.slot.advance()
            self.slot.announce()
            self.sync.start()

        return self._event(now, act)

    def hand_on(self, channel: str, state: State, grid: Grid, lease_len: int, now: float) -> list[Effect]:
        """Put another state in the place of one that is in step, which nobody uses any more: it becomes the same.
        CheckpointError, with nothing changed: it is of another kind."""

        def act() -> None:
            attached = self.log.attached[channel]
            before = attached.state
            self.ctx.at_length(lambda: state.restore(before.export()), 2 * before.image_bytes())
            attached.state, attached.grid, attached.lease_len, attached.abandoned = state, grid, lease_len, False

        return self._event(now, act)

    def contribute(
        self,
        channel: str,
        vector: Tensor | Encoded,
        grid: Grid,
        *,
        weight: float,
        upto: int,
        norm: float = 0.0,
        patience_s: float,
        sink: Sink | None,
        now: float,
        filling: Filling | None = None,
    ) -> list[Effect]:
        """Offer a frozen fp32 vector to the channel's next round, or one that is encoded in its grid. It must not
        change until RoundDone.

        `upto`: the position in the lease that it was trained up to; 0 if it brings no samples that are not counted, or
        without a lease. The number of this offer then takes its place, below 0 in a leased channel: owners may keep
        parts of one that was taken back, and must not take them for parts of the next.
        `norm`: its own, if it is to be clipped by the others'; 0 if not. `filling`: only what it covers is final yet;
        `filled` is to be called as it goes on.
        """
        self.need_log(f"channel {channel!r} has no rounds")
        check_channel(channel, self.log.state)
        known = self.log.state.channel(channel)
        if sink is not None and (channel in self.log.attached or (known is not None and known.opened)):
            raise UsageError(
                f"{channel!r} is the channel of a state that is trained (dlc.DiLoCo), and what such a call averages "
                "would be taken for a step of it: give the call another name"
            )
        if channel in self.exchange.offered:
            raise UsageError(f"channel {channel!r} has a contribution in flight already: wait for its round first")
        if vector.numel() != grid.numel:
            raise UsageError(f"the vector has {vector.numel()} elements, the channel {grid.numel}")
        if not (0 <= weight <= WEIGHT_MAX and 0 <= norm < math.inf and 0 <= patience_s < math.inf):
            raise UsageError(
                f"weight {weight}, norm {norm}, patience {patience_s} s: none may be negative or not finite, "
                f"nor a weight be over {WEIGHT_MAX:g}"
            )
        state = self.log.state
        spec = msg.GridSpec(grid.numel, grid.chunk_elems, grid.codec)
        self.offers += 1
        upto = upto or (-self.offers if known is not None and known.leased else self.offers)
        fill_s = filling.expected_s if filling is not None and not filling.complete else 0.0
        ready = msg.Ready(
            state.head, channel, state.base(channel), spec, weight, upto, b"", patience_s, False, 0, norm, fill_s
        )

        def act() -> None:
            self.exchange.offered[channel] = Offered(ready, vector, sink, now, self.ctx.running_s, filling=filling)
            self.slot.offered(channel)

        return self._event(now, act)

    def filled(self, now: float) -> list[Effect]:
        """A contribution of mine has become final as far as another chunk, or will not any more."""

        def act() -> None:
            self.exchange.filled()
            self.slot.advance()

        return self._event(now, act)

    def need_log(self, what: str) -> None:
        """UsageError, which says `what` cannot be, where this peer has no log."""
        if not self.config.log:
            raise UsageError(f"{what}: this peer takes part without the replicated log (dlc.Gossip, dlc.Moshpit, ...)")

    def withdraw(self, channel: str) -> bool:
        """Take back a contribution that no plan has named yet.

        False if a round with it may be decided still: then it goes on from a copy, its mean goes nowhere, and the
        caller's memory is not touched any more. One that is not final goes no further.
        """
        plan, mine = self.slot.plan, self.exchange.offered.get(channel)
        if plan is not None and plan.entry.channel == channel:
            if mine is not None:
                if mine.filling is not None:
                    mine.filling.stop()
                mine.vector, mine.sink = mine.vector.clone(), None
            return False
        return self.exchange.offered.pop(channel, None) is not None

    def lease(self) -> Lease | None:
        return self.log.state.ledger.lease(self.me)

    def describe(self, now: float, **changes: object) -> list[Effect]:
        """Update what my record says of me: role, speed, eta_s, status.

        That I contribute again is told before anything else: no round waits for me as long as a voter does not know it.
        """

        def act() -> None:
            rested = self.members.own.eta_s >= NEVER_S
            self.members.update_own(**changes)
            if rested and self.members.own.eta_s < NEVER_S:
                self.ctx.out.extend(self.members.tell_voters())

        return self._event(now, act)

    def rates_changed(self) -> None:
        """A service measured my link: my record tells it."""
        self.ctx.record_due = True

    def serve(self, act: Callable[[], list[Effect]], now: float) -> list[Effect]:
        """A command of the application to one of my services; what it sends finds its way as all messages do."""
        return self._event(now, lambda: self.ctx.out.extend(act()), beside=True)

    def leave(self, now: float) -> list[Effect]:
        """Announce that this process goes for good. It votes no more."""

        def act() -> None:
            self.ctx.leaving = True
            self.ctx.stale = True
            self.coordinator.drop()
            self.ctx.out.extend(self.members.leave(now))

        return self._event(now, act)

    def refused(self, peer: PeerId, now: float) -> list[Effect]:
        """The transport saw this peer's connection close and re-connection refused."""
        return self._event(now, lambda: self.ctx.out.extend(self.members.refused(peer, now)))

    def bulk_broken(self, peer: PeerId) -> None:
        """A bulk connection to this peer has ended, and what was on its way there may be lost."""
        self.exchange.broken(peer)

    # ---------------------------------------------------------------- one event

    def _event(self, now: float, act: Callable[[], None], beside: bool = False) -> list[Effect]:
        """Refusals (DlcError) leave all as it was. Any other error in the middle of an event is the end of this node,
        and so is one of these after the head moved: it would vote, answer and be saved with a log that says more than
        its states hold.
        beside: `act` is of a service, which has no part in the log: what it raises is its caller's affair.
        """
        self._wake(now)
        head = self.log.head
        try:
            act()
        except DlcError:
            self.torn = self.torn or self.log.head != head
            raise
        except BaseException:
            self.torn = not beside
            raise
        try:
            return self._settle()
        except BaseException:
            self.torn = True
            raise

    def _wake(self, now: float) -> None:
        gap = 0.0 if self._last is None else now - self._last
        first = self._last is None
        self._last = now
        self.ctx.now = now
        self.ctx.running_s += min(gap, RUNNING_STEP_MAX_S)
        # What membership found out during work at length that was no event, or in one that failed.
        self.ctx.out = [e for e in self.ctx.out if isinstance(e, Notify)]
        if first or gap > self._t_gap_s:
            self.coordinator.drop()
            if not first:
                self.slot.wake()
            self.absence.begin(woken=not first)

    def _settle(self) -> list[Effect]:
        """Handle what I sent to myself before anything leaves, refresh my record, and find each message's way."""
        if self.ctx.stale and self.config.log and self.absence.over():
            self.slot.announce()
        done: list[Effect] = []
        self.inbox.catch_up()
        while self.ctx.out:
            batch, self.ctx.out = self.ctx.out, []
            for effect in batch:
                if type(effect) is Send and effect.to == self.me.peer:
                    self.inbox.receive(self.me, effect.message)
                    continue
                done.append(effect)
                if type(effect) is Notify and isinstance(effect.event, MemberUp | MemberDown | MemberLeft):
                    self.ctx.out.extend(self.services.member(effect.event, self.ctx.now))
            self.inbox.catch_up()
        if self.ctx.record_due:
            self._describe_log()
        return self._on_their_way(done)

    def _on_their_way(self, effects: list[Effect]) -> list[Effect]:
        return [
            effect if type(effect) is Send and isinstance(effect.message, _DIRECT_ONLY) else self._routed(effect)
            for effect in effects
        ]

    def _describe_log(self) -> None:
        self.ctx.record_due = False
        state = self.log.state
        self.members.update_own(
            head=state.head,
            tokens=state.tokens,
            depth=state.depth,
            active=self.log.active,
            synced=in_step(self.ctx, self.log) and self.config.log,
            states=told_states(self.log),
            up_Bps=self.exchange.rates.told_up_Bps,
            down_Bps=self.exchange.rates.told_down_Bps,
        )

    def _routed(self, effect: Effect) -> Effect:
        """One relay hop where the direct path to an alive peer fails."""
        if isinstance(effect, Dial) and isinstance(effect.message, msg.Hello):
            return Dial(effect.address, dataclasses.replace(effect.message, address=effect.address))
        if not isinstance(effect, Send):
            return effect
        relay = self.members.relay_for(effect.to)
        if relay is None or relay == self.me.peer:
            return effect
        code, packed = CODES[type(effect.message)], Packed(pack(effect.message))
        if len(packed) > RELAYED_BYTES_MAX:
            return effect  # it may get there yet; as a relay it would not even leave
        return Send(relay, msg.Relay(effect.to, self.me, code, packed))

    # ---------------------------------------------------------------- hello

    def _hello(self) -> msg.Hello:
        return msg.Hello(msg.PROTOCOL_VERSION, self.config.run, self.config.spec_hash, self.members.own, "")

    # ---------------------------------------------------------------- time

    def _tick(self) -> None:
        self.ctx.out.extend(self.members.tick(self.ctx.now))
        self.ctx.out.extend(self.services.tick(self.ctx.now))
        if not self.config.log:
            return
        self.exchange.close_due()
        self.slot.tick()
        if not self.ctx.leaving:
            self.coordinator.tick()
        self.observing.tick()
        self.sync.tick()
        if in_step(self.ctx, self.log) != self.members.own.synced:  # the last who held what I lack is gone, or is back
            self.ctx.record_due = True
        self.waits.tick()

    # ---------------------------------------------------------------- views

    @property
    def phase(self) -> str:
        """For people: what this peer's rounds are doing."""
        if self.sync.busy:
            return "syncing"
        if self.slot.plan is not None:
            return "reducing" if not self.exchange.complete else "voting"
        return "waiting" if self.exchange.offered else "idle" if self.coordinator.phase == IDLE else "coordinating"

    def left_behind(self) -> list[Voter]:
        """See `Applier`."""
        return self.applier.left_behind()

    def record_of(self, peer: PeerId) -> msg.Record | None:
        return self.members.record(peer)
