"""Real trainers with real peers on a virtual clock: how long a step takes is what a test says, on any machine.

    Troupe          the clock, the network, and the threads of the trainers, of which one at a time has its turn
    VirtualDriver   in place of a peer's driver: messages go through their wire form and the network of the simulator
    Player          one trainer with its peer

Whoever would wait (for a round, an event, the end of an inner step) hands its turn on, and time passes only when nobody
can go on. So a machine that stands still in the middle of it changes nothing, and one order of events comes each time.
"""

from __future__ import annotations

import math
import queue
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

import dlc.drivercalls
import dlc.handles
import dlc.peer
import dlc.train.announcement
from dlc.comm.driver import Driven, Reply
from dlc.comm.effects import Answer, Dial, Effect, Notify, Send
from dlc.comm.framing import decode, encode
from dlc.comm.identity import Identity
from dlc.comm.ids import Voter
from dlc.comm.log import HISTORY_BYTES_MAX
from dlc.comm.messages import Bulk, Message
from dlc.comm.node import Node
from dlc.comm.timeouts import Timeouts
from dlc.errors import SwarmClosed
from dlc.handles import Flag
from dlc.joining import Introduction, Reception
from dlc.peer import Peer
from dlc.runspec import RunSpec
from dlc.sim.network import Clock, Network, Weather
from dlc.statedir import Ephemeral
from dlc.train.inner import InnerLoop, StepResult
from dlc.train.trainer import Summary, Trainer

T = TypeVar("T")
Event = dict[str, Any]

UPLINK_Bps = 10e6
LOOK_S = 1e-3
"""Each look at what is not there yet takes so long: who looks again and again does not stop the clock."""
LIMIT_S = 3600.0
"""Virtual."""
TURN_S = 240.0
"""Of real time, for what is done in one turn."""


class _Over(BaseException):
    """The troupe is no more, and nobody plays on."""


class _Actor:
    """A thread that plays when it has its turn. `done`: what `act` gave."""

    def __init__(self, troupe: Troupe, act: Callable[[], Any]) -> None:
        self.done: Future[Any] = Future()
        self.until, self.ready = 0.0, lambda: False
        self._troupe, self._act = troupe, act
        self.goes, self.rests = threading.Semaphore(0), threading.Semaphore(0)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.goes.acquire()
        try:
            self._troupe.check_plays()
            self.done.set_result(self._act())
        except BaseException as error:
            self.done.set_exception(error)
        self.rests.release()

    def turn(self) -> None:
        self.goes.release()
        assert self.rests.acquire(timeout=TURN_S), "a trainer waits for something that is not of this clock"


class Troupe:
    """See the module. Used as a context manager; `patch` undoes what it sets."""

    def __init__(self, patch: pytest.MonkeyPatch, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.clock = Clock()
        self.clock.now = 1000.0
        self.network = Network(self.clock, random.Random(seed), Weather(latency_max_s=0.02, spike=0.0, ordered=True))
        self.drivers: dict[str, VirtualDriver] = {}
        """By address."""
        self.players: list[Player] = []
        self._actors: list[_Actor] = []
        self._playing: _Actor | None = None
        self._over = False

        def wait(flag: Flag, timeout_s: float | None = None) -> bool:
            self.pause(math.inf if timeout_s is None else timeout_s, flag.is_set)
            return flag.is_set()

        patch.setattr(Flag, "wait", wait)
        patch.setattr(dlc.drivercalls, "clock", self.time)
        patch.setattr(dlc.peer, "clock", self.time)
        patch.setattr(dlc.peer, "secrets", SimpleNamespace(randbits=self.rng.getrandbits))
        patch.setattr(dlc.train.announcement, "threading", SimpleNamespace(Timer=self._timer))
        train_step = InnerLoop.train_step

        def step(inner: InnerLoop, batches: Any, number: int) -> StepResult:
            result = train_step(inner, batches, number)
            player = next(p for p in self.players if p.goes_on is self._playing)
            self.pause(player.step_s(player.steps))
            player.steps += 1
            return result

        patch.setattr(InnerLoop, "train_step", step)

    def __enter__(self) -> Troupe:
        return self

    def __exit__(self, *exc: object) -> None:
        self._over = True
        for actor in self._actors:
            if not actor.done.done():
                actor.turn()
        for player in self.players:
            player.peer._driver.stop(0.0)
            player.peer.leave(0.0)

    def time(self) -> float:
        return self.clock.now

    def _timer(self, in_s: float, act: Callable[[], None]) -> SimpleNamespace:
        timer = SimpleNamespace(off=False, join=lambda: None)
        timer.start = lambda: self.clock.at(self.clock.now + in_s, lambda: None if timer.off else act())
        timer.cancel = lambda: setattr(timer, "off", True)
        return timer

    # ---------------------------------------------------------------- turns

    def plays(self, act: Callable[[], Any]) -> _Actor:
        """From now on `act` has its turns."""
        self._actors.append(_Actor(self, act))
        return self._actors[-1]

    def pause(self, for_s: float, ready: Callable[[], object] = lambda: False) -> None:
        """Come back after `for_s`, or once it is `ready`."""
        self.check_plays()
        if ready():
            return
        until = self.clock.now + max(for_s, LOOK_S)
        if math.isfinite(until):
            self.clock.at(until, lambda: None)
        actor = self._playing
        if actor is None:
            self.until(lambda: ready() or self.clock.now >= until)
            return
        actor.until, actor.ready = until, ready  # type: ignore[assignment]
        actor.rests.release()
        actor.goes.acquire()
        self.check_plays()

    def check_plays(self) -> None:
        """For the threads of the trainers."""
        if self._over and threading.current_thread() is not threading.main_thread():
            raise _Over

    def until(self, condition: Callable[[], object], limit_s: float = LIMIT_S, what: str = "") -> None:
        """Let all play until it holds."""
        end = self.clock.now + limit_s
        while not condition():
            actor = next((a for a in self._actors if not a.done.done() and (a.ready() or self._due(a))), None)
            if actor is not None:
                self._playing = actor
                actor.turn()
                self._playing = None
            else:
                assert self.clock.now < end and self.clock.step(), f"not within {limit_s:g} s: {what}"

    def _due(self, actor: _Actor) -> bool:
        return actor.until <= self.clock.now

    def end(self) -> list[Summary]:
        """Of all players, once they have come to it."""
        ends = [player.goes_on.done for player in self.players]
        self.until(lambda: all(end.done() for end in ends), what="all trainers end")
        return [end.result() for end in ends]

    # ---------------------------------------------------------------- peers

    def join(self, spec: RunSpec, listed: str, timeouts: Timeouts, on_event: Callable[[object], None]) -> Peer:
        """As `Peer.join` with `hold`; it founds the run where nobody is listed."""
        state = Ephemeral()
        state._identity = Identity.from_private_bytes(self.rng.randbytes(32))
        voter = Voter(state.identity.peer, state.next_incarnation(self.rng.getrandbits(32)))
        host = f"10.0.0.{len(self.drivers) + 1}"
        driver: Any = VirtualDriver(self, f"{host}:7700", voter)
        self.drivers[driver.address] = driver
        peer = Peer(driver, Introduction(state, voter, host, 7700, 7701, None, "trainer"), on_event)
        others = (listed,) if listed else ()
        peer._take_part(
            Reception(spec, {}, (), ""), others, (), not listed, None, timeouts, True, False, HISTORY_BYTES_MAX
        )
        return peer


class VirtualDriver:
    """What `dlc.Peer` needs of a driver. Its machine acts at once, in the turn of whoever calls."""

    def __init__(self, troupe: Troupe, address: str, voter: Voter) -> None:
        self.address, self.voter, self.error, self.running = address, voter, None, True
        self.on_event: Callable[[object], None] = lambda event: None
        self.on_stop: Callable[[], None] = lambda: None
        self.on_reached: Callable[[str, float], None] = lambda host, now: None
        self.is_current = False
        self._troupe = troupe
        self._machine: Node | None = None
        self._tag = b""
        self._tick_at = math.inf
        self._uplink_busy = False
        self._last_bulk_to = ""

    def install(self, machine: Driven, tag: bytes, member: Node) -> None:
        self._machine, self._tag = member, tag

    def ask(self, fn: Callable[[float], T], look: bool = False) -> T:
        if not self.running:
            raise self.closed_error()
        result = fn(self._troupe.time())
        self._go_on()
        return result

    def call(self, fn: Callable[[float], T], look: bool = False) -> Reply[T]:
        reply: Reply[T] = Reply()
        try:
            reply.set_result(self.ask(fn))
        except SwarmClosed as closed:
            reply.set_exception(closed)
        return reply

    def stop(self, timeout_s: float, reason: BaseException | None = None) -> None:
        self.error = self.error or reason  # type: ignore[assignment]
        if self.running:
            self.running = False
            self.on_stop()

    def closed_error(self) -> SwarmClosed:
        return SwarmClosed(f"the peer has left: {self.error}")

    # ---------------------------------------------------------------- effects, messages, time

    def perform(self, effects: list[Effect], answer_to: str = "") -> None:
        for effect in effects:
            match effect:
                case Send(to, message):
                    record = self._machine.record_of(to) if self._machine is not None else None
                    if record is not None:
                        self._carry(record.control[0], message)
                case Dial(address, message):
                    self._carry(address, message)
                case Answer(message) if answer_to:
                    self._carry(answer_to, message)
                case Notify(event):
                    self.on_event(event)

    def _carry(self, address: str, message: Message) -> None:
        target = self._troupe.drivers.get(address)
        if target is not None:
            frames = [bytes(frame) for frame in encode(self.voter, self._tag, message)]
            bulk = isinstance(message, Bulk)
            self._troupe.network.carry(self.address, address, target._receive, self.address, frames, bulk=bulk)

    def _receive(self, source: str, frames: list[bytes]) -> None:
        if self.running and self._machine is not None:
            sender, message = decode(frames, self._tag)
            self.perform(self._machine.receive(sender, message, self._troupe.time()), source)
            self._go_on()

    def _go_on(self) -> None:
        """After whatever happened here: when is the next tick, and is there something to send?"""
        if self._machine is None or not self.running:
            return
        at = max(self._machine.next_deadline(), self._troupe.time() + LOOK_S)
        if at < self._tick_at:
            self._tick_at = at
            self._troupe.clock.at(at, self._tick, at)
        if not self._uplink_busy and self._machine.pending_bulk():
            self._pull(self._machine)

    def _tick(self, armed_for: float) -> None:
        if self.running and self._machine is not None and armed_for == self._tick_at:
            self._tick_at = math.inf
            self.perform(self._machine.tick(self._troupe.time()))
            self._go_on()

    def _pull(self, machine: Node) -> None:
        """Peer by peer in turn."""
        for peer in sorted(machine.pending_bulk(), key=lambda peer: (peer <= self._last_bulk_to, peer)):
            message: Any = machine.next_bulk(peer)
            record = machine.record_of(peer)
            if message is None or record is None:
                continue
            self._last_bulk_to, self._uplink_busy = peer, True
            self._carry(record.control[0], message)
            self._troupe.clock.at(self._troupe.time() + len(message.payload) / UPLINK_Bps, self._left_uplink)
            return

    def _left_uplink(self) -> None:
        self._uplink_busy = False
        self._go_on()


class Player:
    """One trainer with its peer. step_s: seconds of each of its inner steps, by their number."""

    def __init__(
        self,
        troupe: Troupe,
        spec: RunSpec,
        folder: Path,
        step_s: Callable[[int], float],
        timeouts: Timeouts | None = None,
    ) -> None:
        self.step_s, self.steps, self.events, self.stop = step_s, 0, list[Event](), Flag()
        heard: queue.SimpleQueue[object] = queue.SimpleQueue()
        listed = troupe.players[0].peer.address if troupe.players else ""
        self.peer = troupe.join(spec, listed, timeouts or Timeouts(), heard.put)
        self.trainer = Trainer(
            self.peer,
            folder,
            device="cpu",
            on_event=self.events.append,
            peer_events=heard,
            eval_blocks=1,
            clock=troupe.time,
        )
        self.goes_on: _Actor
        self._troupe = troupe
        troupe.players.append(self)

    def goes(self) -> None:
        """It trains from now on."""
        stop: Any = self.stop
        self.goes_on = self._troupe.plays(lambda: self.trainer.run(stop))

    def all(self, name: str) -> list[Event]:
        return [event for event in self.events if event["event"] == name]
