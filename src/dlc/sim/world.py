"""A swarm on a virtual clock: hosts, processes, faults. The machine that is driven is `dlc.comm.node.Node` itself.

    Host      a place with an address "sim:<name>"; at most one process runs there, and it may be restarted
    Process   one Node with its trainer; running, frozen (its input waits for it), or ended
    World     carries out the effects of every node, lets faults happen on schedule, and calls the checker after
              every event

In place of the driver: effects become messages, bulk is pulled when the uplink is idle, ticks come by deadline.
"""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from dlc.comm import messages as msg
from dlc.comm.effects import Answer, Dial, Effect, Notify, Send
from dlc.comm.entries import SavedLog
from dlc.comm.events import SelfReplaced, StateMisfit
from dlc.comm.grid import Grid
from dlc.comm.ids import Voter
from dlc.comm.node import Node, NodeConfig
from dlc.comm.wire import pack, unpack
from dlc.sim.faults import Faults
from dlc.sim.invariants import Checker, Violation
from dlc.sim.network import Clock, Network
from dlc.sim.schedule import KINDS, REDUCE, SECOND, TRAIN, Scenario, Start
from dlc.sim.toy import LEASE_LEN, ToyState, Trainer
from dlc.sim.transcript import Transcript

BULK_HEADER_BYTES = 200
WIRE_CHECK_EVERY = 97
"""Every so many messages one goes through its wire form and back."""
REFUSED_AFTER_S = 0.05
"""From the death of a process to its peers' seeing their connections refused, where the machine lives on."""
CHECKPOINT_EVERY_S = 5.0
EVENTS_MAX = 1_000_000
"""A schedule with more is a message storm."""
TIMER_STEP_S = 1e-3
"""Resolution of timers, as of a real poll; a deadline that is due by rounding alone does not spin."""
CLOCK_OFFSET_S_MAX = 1e5
"""Clocks that drift also begin anywhere."""
FIT_S_MAX = 10.0
"""Until who brought a state of a kind that the run has no use for brings another."""
CLOCK_ROUNDING_S = 1e-6
"""Added to a timer that was converted from a drifting clock, so that it is due when it rings."""


@dataclass
class Checkpoint:
    """What a host's disk holds."""

    log: SavedLog
    images: dict[str, bytes]
    """By channel."""
    kind: tuple[int, int]
    """Of the second one."""


@dataclass
class Host:
    name: str
    role: str = "trainer"
    boots: int = 0
    moves: int = 0
    """How often its address changed."""
    process: Process | None = None
    disk: Checkpoint | None = None
    offset_s: float = 0.0
    rate: float = 1.0
    """Its clock shows offset_s + rate * t."""
    uplink_Bps: float = 0.0
    """0: that of the scenario."""
    kind: tuple[int, int] = KINDS[0]
    """Of the second state that its processes bring."""

    @property
    def address(self) -> str:
        return f"sim:{self.name}.{self.moves}" if self.moves else f"sim:{self.name}"

    def clock_s(self, t: float) -> float:
        return self.offset_s + self.rate * t

    def when(self, clock_s: float) -> float:
        """The true time at which its clock shows this."""
        late_s = 0.0 if self.rate == 1.0 else CLOCK_ROUNDING_S
        return (clock_s - self.offset_s) / self.rate + late_s


@dataclass(eq=False)
class Process:
    host: Host
    node: Node
    rng: random.Random
    trainers: dict[str, Trainer] = field(default_factory=dict)
    """By channel."""
    running: bool = True
    frozen: bool = False
    left: bool = False
    inbox: deque[tuple[Callable[..., None], tuple[Any, ...]]] = field(default_factory=deque)
    """What came while it was frozen."""
    unsent: list[Effect] = field(default_factory=list)
    """The rest of a batch in whose middle it was frozen: sent on waking."""
    tick_at: float = float("inf")
    uplink_busy: bool = False
    last_bulk_to: str = ""

    @property
    def voter(self) -> Voter:
        return self.node.me

    @property
    def awake(self) -> bool:
        return self.running and not self.frozen

    @property
    def trainer(self) -> Trainer:
        return self.trainers[TRAIN]


class World:
    def __init__(self, scenario: Scenario, transcript: Transcript | None = None) -> None:
        self.scenario, self.transcript = scenario, transcript
        self.rng = random.Random(f"world {scenario.seed}")
        self.clock = Clock()
        self.network = Network(self.clock, random.Random(f"network {scenario.seed}"), scenario.weather)
        self.hosts: dict[str, Host] = {}
        elems, codec = scenario.chunk_elems, scenario.codec
        sizes = {TRAIN: scenario.n_chunks * elems - 1, SECOND: 2 * elems - 1, REDUCE: elems + 1}
        self.grids = {channel: Grid(sizes[channel], elems, codec) for channel in scenario.channels}
        self.checker = Checker(self)
        self.faults = Faults(self)
        self.quiet = False
        """Faults are over."""
        self._sent = 0
        for number, start in enumerate(scenario.starts):
            self.clock.at(start.at_s, self._start_first, number, start)
        for fault in scenario.faults:
            self.clock.at(fault.at_s, self.faults.strike, fault)

    # ---------------------------------------------------------------- running

    def new_host(self, role: str = "trainer", number: int | None = None) -> Host:
        name, seed, drift = f"p{len(self.hosts) if number is None else number}", self.scenario.seed, self.scenario.drift
        host = Host(name, role)
        if drift:
            rng = random.Random(f"clock {seed} {name}")
            host.offset_s, host.rate = rng.uniform(0, CLOCK_OFFSET_S_MAX), rng.uniform(1 - drift, 1 + drift)
        if self.scenario.misfits:
            host.kind = random.Random(f"kind {seed} {name}").choice((KINDS[0], *KINDS))
        return host

    def grid_of(self, host: Host, channel: str) -> Grid:
        """Of the state, or the vectors, that its processes bring."""
        usual, elems, codec = self.grids[channel], self.scenario.chunk_elems, self.scenario.codec
        more, _ = host.kind
        return Grid(usual.numel + more * elems, elems, codec) if channel == SECOND else usual

    def first_states(self, channel: str) -> Iterator[ToyState]:
        """All that anybody may bring."""
        return (self.first_state(Host(name, kind=kind), channel) for name in self.hosts for kind in KINDS)

    def sizes(self, channel: str) -> set[int]:
        """Of the vectors that anybody may bring."""
        return {self.grid_of(Host("", kind=kind), channel).numel for kind in KINDS}

    def first_state(self, host: Host, channel: str) -> ToyState:
        """What its processes bring."""
        seed = 0 if self.scenario.equal_states else int(host.name[1:])
        _, extra_bytes = host.kind
        return ToyState(self.grid_of(host, channel).numel, seed, extra_bytes if channel == SECOND else 0)

    @property
    def now(self) -> float:
        return self.clock.now

    def running(self) -> list[Process]:
        return [h.process for h in self.hosts.values() if h.process is not None and h.process.running]

    def run_until(self, when: float) -> None:
        if not self.clock.run_until(when, EVENTS_MAX):
            raise Violation("storm", f"more than {EVENTS_MAX} events")

    def settle(self) -> None:
        """Faults stop: heal the network, disarm the traps, let everybody wake."""
        self.quiet = True
        self.checker.faults_end()
        self.faults.traps.clear()
        self.network.cuts.clear()
        self.network.weather = dataclasses.replace(self.network.weather, loss=min(0.01, self.network.weather.loss))
        for process in self.running():
            self._wake(process)
        self.checker.paths_changed()

    # ---------------------------------------------------------------- processes

    def _start_first(self, number: int, start: Start) -> None:
        listed = tuple(f"sim:p{i}" for i in start.listed)
        self.start(self.new_host(start.role, number), listed, founder=not start.listed)

    def start(self, host: Host, listed: tuple[str, ...], founder: bool = False, from_disk: bool = False) -> Process:
        """Start a process on a host: the first one, or one after a crash (greater inc, another voter)."""
        host.boots += 1
        self.hosts[host.name] = host
        rng = random.Random(f"{self.scenario.seed} {host.name} {host.boots}")
        voter = Voter(host.name, (host.boots << 32) + rng.getrandbits(32))
        record = msg.Record(
            voter=voter, public_key=b"", control=(host.address,), bulk=(host.address,), role=host.role, head=bytes(32),
            tokens=0.0, depth=0, active=False, synced=True, speed=0.0, eta_s=-1.0, seq=0, left=False,
        )  # fmt: skip
        config = NodeConfig(
            "sim", b"spec", b"spec", listed, founder, self.scenario.timeouts,
            self.scenario.piece_bytes, self.scenario.history_bytes, probe_links=self.scenario.probes,
        )  # fmt: skip
        disk = host.disk if from_disk else None
        host.kind = disk.kind if disk else host.kind
        node = Node(
            record, config, sign=lambda r: r, verify=lambda r: True, rng=rng, now=host.clock_s(self.now),
            resumed=disk.log if disk else None,
        )  # fmt: skip
        process = host.process = Process(host, node, rng)
        for channel in self.grids:
            process.trainers[channel] = Trainer(self, process, channel, self.scenario.inner_s * rng.uniform(0.8, 1.3))
        self.say(process, "starts", f"listed {', '.join(listed) or 'nobody'}{', from disk' if disk else ''}")
        self.checker.started(process)
        for channel, trainer in process.trainers.items():
            if channel != REDUCE:
                self._attach(process, channel, disk)
            trainer.begin()
        self.later(process, CHECKPOINT_EVERY_S * rng.random(), self._checkpoint, process)
        self.checker.paths_changed()
        return process

    def _attach(self, process: Process, channel: str, disk: Checkpoint | None) -> None:
        grid, lease_len = self.grid_of(process.host, channel), LEASE_LEN if channel == TRAIN else 0
        state = self.first_state(process.host, channel)
        if disk is not None:
            state.restore(memoryview(disk.images[channel]))
        self.act(process, lambda now: process.node.attach(channel, state, grid, lease_len, now))

    def _checkpoint(self, process: Process) -> None:
        log = process.node.log
        if process not in self.checker.corrupt and all(a.synced and log.is_open(c) for c, a in log.attached.items()):
            images = {channel: bytes(a.state.export()) for channel, a in log.attached.items()}
            process.host.disk = Checkpoint(log.saved(), images, process.host.kind)
        self.later(process, CHECKPOINT_EVERY_S, self._checkpoint, process)

    def end(self, process: Process) -> None:
        process.running = False
        process.inbox.clear()
        process.unsent = []
        if process.host.process is process:
            process.host.process = None
        self.checker.paths_changed()

    # ---------------------------------------------------------------- one event of a process

    def later(self, process: Process, delay_s: float, act: Callable[..., None], *args: Any) -> None:
        self.clock.at(self.now + delay_s, self._call, process, act, args)

    def _call(self, process: Process, act: Callable[..., None], args: tuple[Any, ...]) -> None:
        if process.frozen:
            process.inbox.append((act, args))
        elif process.running:
            act(*args)

    def act(self, process: Process, command: Callable[[float], list[Effect]], answer_to: Host | None = None) -> None:
        """Let the node do one thing, check it, carry out what it wants."""
        effects = command(process.host.clock_s(self.now))
        self.checker.after_event(process)
        self.perform(process, effects, answer_to)
        self.checker.after_effects(process)
        if process.awake:
            if not process.uplink_busy and process.node.pending_bulk():
                self._pull(process)
            self._arm(process)

    def _arm(self, process: Process) -> None:
        at = process.host.when(process.node.next_deadline())
        if at < process.tick_at:
            process.tick_at = max(at, self.now + TIMER_STEP_S)
            self.clock.at(process.tick_at, self._call, process, self._tick, (process, process.tick_at))

    def _tick(self, process: Process, armed_for: float) -> None:
        if armed_for == process.tick_at:
            process.tick_at = float("inf")
            self.act(process, process.node.tick)

    def _receive(self, host: Host, sender: Voter, source: Host, message: msg.Message) -> None:
        """A message reaches a host: whoever runs there now gets it."""
        process = host.process
        if process is None:
            return
        if process.frozen:
            process.inbox.append((self._receive, (host, sender, source, message)))
            return
        if self.transcript is not None:
            self.transcript.received(self.now, process.voter, sender, message)
        self.act(process, lambda now: process.node.receive(sender, message, now), source)

    # ---------------------------------------------------------------- effects

    def perform(self, process: Process, effects: list[Effect], answer_to: Host | None) -> None:
        if self.faults.traps and effects:
            effects = self.faults.spring(process, effects)
        for effect in effects:
            if isinstance(effect, Send):
                self._send(process, self._found(process, effect.to), effect.message)
            elif isinstance(effect, Dial):
                name = effect.address.removeprefix("sim:").partition(".")[0]
                target = self.hosts.get(name)
                if target is not None and target.address == effect.address:
                    self._send(process, target, effect.message)
            elif isinstance(effect, Answer):
                if answer_to is not None:
                    self._send(process, answer_to, effect.message)
            elif isinstance(effect, Notify) and process.running:
                self._notify(process, effect.event)

    def _found(self, process: Process, peer: str) -> Host | None:
        """The host of a peer; None where this process knows only an address that it has left."""
        host = self.hosts.get(peer)
        if host is None or not host.moves:
            return host
        record = process.node.record_of(peer)
        return host if record is not None and host.address in record.control else None

    def _send(self, process: Process, target: Host | None, message: msg.Message) -> None:
        self._sent += 1
        if self._sent % WIRE_CHECK_EVERY == 0:
            self._check_wire(message)
        if target is not None:
            source = process.host
            self.network.carry(source.name, target.name, self._receive, target, process.voter, source, message)

    def _check_wire(self, message: msg.Message) -> None:
        again = unpack(pack(message), type(message))
        if again != message:
            raise Violation("wire", f"{message} comes back as {again}")

    def _notify(self, process: Process, event: object) -> None:
        self.say(process, "is told", event)
        self.checker.told(process, event)
        for trainer in process.trainers.values():
            trainer.told(event)
        if isinstance(event, SelfReplaced):
            self.end(process)
        elif isinstance(event, StateMisfit) and self.scenario.misfits:
            self.faults.struck["misfit"] += 1
            process.node.log.attached[event.channel].abandoned = True
            self.later(process, process.rng.uniform(0, FIT_S_MAX), self._bring_another, process, event.channel)

    def _bring_another(self, process: Process, channel: str) -> None:
        """As a program does that has been told what kind the run's state is of, or guesses."""
        if process.node.log.attached[channel].void and not process.left:
            process.host.kind = process.rng.choice(KINDS)
            self._attach(process, channel, None)

    def say(self, process: Process, verb: str, what: object = "") -> None:
        if self.transcript is not None:
            self.transcript.said(self.now, process.voter, verb, what)

    # ---------------------------------------------------------------- bulk

    def _pull(self, process: Process) -> None:
        """The uplink is idle: take the next bulk message, peer by peer in turn."""
        if process.uplink_busy or not process.awake:
            return
        peers = sorted(process.node.pending_bulk())
        turn = [p for p in peers if p > process.last_bulk_to] + [p for p in peers if p <= process.last_bulk_to]
        for peer in turn:
            message = process.node.next_bulk(peer)
            if message is None:
                continue
            if isinstance(message, msg.Result) and self.faults.spring_result(process):
                return
            self.checker.bulk_sent(process, message)
            process.last_bulk_to, process.uplink_busy = peer, True
            size = len(message.payload) + BULK_HEADER_BYTES  # type: ignore[attr-defined]
            uplink_Bps = process.host.uplink_Bps or self.scenario.uplink_Bps
            self.clock.at(self.now + size / uplink_Bps, self._left_uplink, process, peer, message)
            return

    def _left_uplink(self, process: Process, peer: str, message: msg.Bulk) -> None:
        process.uplink_busy = False
        if not process.running:
            return
        target = self._found(process, peer)
        if target is not None:
            source = process.host
            self.network.carry(
                source.name, target.name, self._receive, target, process.voter, source, message, bulk=True
            )
        if process.awake and process.node.pending_bulk():
            self._pull(process)

    # ---------------------------------------------------------------- faults

    def crash(self, process: Process) -> None:
        self.faults.struck["crash"] += 1
        self.say(process, "CRASHES")
        self.end(process)
        if self.rng.random() < 0.5:  # the process dies, its machine lives on and refuses connections
            for other in self.running():
                if self.network.two_way(other.host.name, process.host.name):
                    self.later(other, REFUSED_AFTER_S, self._refused, other, process)

    def _refused(self, process: Process, dead: Process) -> None:
        if dead.host.process is None:
            self.act(process, lambda now: process.node.refused(dead.host.name, now))

    def freeze(self, process: Process, for_s: float, kind: str = "freeze") -> None:
        self.faults.struck[kind] += 1
        self.say(process, "FREEZES", f"for {for_s:.1f} s")
        process.frozen = True
        self.checker.paths_changed()
        self.clock.at(self.now + for_s, self._wake, process)

    def _wake(self, process: Process) -> None:
        if not process.frozen or not process.running:
            return
        self.say(process, "WAKES")
        process.frozen = False
        unsent, process.unsent = process.unsent, []
        self.perform(process, unsent, None)
        inbox, process.inbox = process.inbox, deque()
        while inbox and process.awake:
            act, args = inbox.popleft()
            act(*args)
        process.inbox.extendleft(reversed(inbox))
        self.checker.paths_changed()
        if process.awake:
            self._arm(process)
            self._pull(process)

    def leave(self, process: Process) -> None:
        self.faults.struck["leave"] += 1
        self.say(process, "LEAVES")
        process.left = True
        self.act(process, process.node.leave)
        if process.running:
            self.end(process)
