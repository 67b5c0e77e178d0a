"""The driver: one thread that owns the sockets, the clock and the machine, and connects the three.

    other threads ── call(fn) ──> queue ─┐
    transport.poll ── frames ──> decode ─┼─> machine.receive / tick / commands ──> effects ──> transport
    clock ───────────────────────────────┘                └─> next_bulk, pulled while a link has room

Nothing else in `comm/` knows threads, or reads the clock. Malformed frames are counted and dropped. An error inside the
machine stops the driver and is given to all who wait on it, because a peer whose state is in doubt must not vote.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import logging
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import torch

from dlc.comm.allocator import keep_freed_chunks
from dlc.comm.clock import clock
from dlc.comm.dispatch import BulkSource, Dispatch
from dlc.comm.effects import Answer, Dial, Effect, Notify, Pace, Send
from dlc.comm.events import MemberLeft
from dlc.comm.framing import OtherVersion, decode, told_version
from dlc.comm.ids import PeerId, Voter
from dlc.comm.lanes import Broken, Event, Incoming, LinkEvent, Reached, Route, Writable
from dlc.comm.messages import PROOFS, Message, Welcome
from dlc.comm.transport import Transport
from dlc.errors import ProtocolError, SwarmClosed

log = logging.getLogger(__name__)
T = TypeVar("T")
Call = tuple[Future[Any], Callable[[float], Any]]

POLL_S_MAX = 0.25
"""The machine is ticked at least this often."""
SWITCH_S = 1e-4
"""While bulk moves, Python changes threads as often as this. The driver lets go of the interpreter lock some dozens of
times per chunk, and a main thread that computes in Python would keep it for 5 ms (the default) each time."""
SWITCH_NEAR_S = 1.1 * SWITCH_S
"""Python keeps whole microseconds, and tells them with an error."""
LOG_BAD_FRAMES_EVERY = 100
BREATH_S = 0.05
"""While work is done aside, time goes on for the machine at least this often."""
HELD_BACK_MAX, HELD_BACK_BYTES_MAX = 4096, 256 << 20
"""Messages that came meanwhile and are not for then, and bytes of them; more wait in their sockets, and no ping is
answered."""


class Driven(Protocol):
    """What the driver drives: a Lobby first, a Node afterwards."""

    def receive(self, sender: Voter, message: Message, now: float) -> list[Effect]: ...
    def tick(self, now: float) -> list[Effect]: ...
    def next_deadline(self) -> float | None: ...


class Member(BulkSource, Protocol):
    """A machine that takes part: it has bulk, and work that is done aside."""

    def refused(self, peer: PeerId, now: float) -> list[Effect]: ...
    def work_aside(self, aside: Callable[[Callable[[], None], list[Effect]], None]) -> None: ...
    def breathe(self, now: float, sender: Voter | None = None, message: Message | None = None) -> list[Effect]: ...

    @property
    def torn(self) -> bool:
        """An event ended in an error halfway: nothing may be built on what is here now."""


class Reply(Future[T]):
    """What a call on the driver thread gives; for one thread that waits, in whose wait Ctrl-C may come.

    That of a plain future may then keep a lock that the driver thread needs to answer: all would be over. Here nobody
    touches that before the answer is there, unless to cancel.
    """

    def __init__(self) -> None:
        super().__init__()
        gate = self._gate = threading.Lock()
        """Closed until there is an answer."""
        gate.acquire()
        self.add_done_callback(lambda _: gate.release())  # it must not hold this future, which keeps it

    def result(self, timeout: float | None = None) -> T:
        """As of a `Future`."""
        if self._gate.acquire(timeout=-1 if timeout is None else timeout):
            self._gate.release()
        return super().result(0.0)


class Driver:
    def __init__(self, transport: Transport, me: Voter, on_event: Callable[[object], None]) -> None:
        self.transport = transport
        self.dispatch = Dispatch(transport, me)
        self.on_event = on_event
        """Called on the driver thread with each event; must be quick and must not raise."""
        self.on_link: Callable[[LinkEvent], None] | None = None
        """Called on the driver thread with each event of a link; then it tells of another version, and not the log."""
        self.on_reached: Callable[[str, float], None] = lambda host, now: None
        """Called on the driver thread with the host of `Reached`, and the time."""
        self.on_stop: Callable[[], None] = lambda: None
        """Called on the driver thread when it ends, by `stop` or by an error."""
        self.bad_frames = 0
        self.error: BaseException | None = None
        self._machine: Driven | None = None
        self._member: Member | None = None
        self._calls: collections.deque[Call] = collections.deque()
        self._looks: collections.deque[Call] = collections.deque()
        self._switch_s: float | None = None
        """The switch interval before this driver changed it; None where it did not."""
        self._held_back: collections.deque[Event] = collections.deque()
        """What came while work was done aside, in its order: taken before anything newer."""
        self._held_back_bytes = 0
        self._stopping = self._ended = False
        self._began = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dlc-driver", daemon=True)

    # ---------------------------------------------------------------- from other threads

    def start(self) -> None:
        threads = torch.get_num_threads()
        self._thread.start()
        self._began.wait()
        torch.set_num_threads(threads)  # what the driver set for itself would be the default of threads made later

    def call(self, fn: Callable[[float], T], look: bool = False) -> Reply[T]:
        """Run `fn(now)` on the driver thread; effects are performed by calling `perform` inside it.

        look: `fn` only reads what membership knows, so it need not wait for work that is done aside.
        """
        future: Reply[T] = Reply()
        self._hand_over(future, fn, look)
        return future

    def _hand_over(self, future: Reply[T], fn: Callable[[float], T], look: bool) -> None:
        (self._looks if look else self._calls).append((future, fn))
        if self._ended:
            self._fail_calls()
        self.transport.wake()

    def ask(self, fn: Callable[[float], T], look: bool = False) -> T:
        """`call` and wait for the result. If this is interrupted, `fn` is not called any more, unless it has been
        already."""
        if self.is_current:
            return fn(clock())
        future: Reply[T] = Reply()
        try:
            self._hand_over(future, fn, look)
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self, timeout_s: float, reason: BaseException | None = None) -> None:
        """End the thread after what was called before; later calls raise `reason`. Idempotent.

        With a `reason` the machine is in doubt: it does nothing any more, and what was called before fails as well.
        """
        self.error = self.error or reason
        self._stopping = True
        self.transport.wake()
        if not self._thread.ident:  # never started: nobody else will say so, nor close the sockets
            self._ended = True
            self.transport.close(0.0)
        if self._thread.is_alive() and not self.is_current:
            self._thread.join(timeout_s)

    @property
    def is_current(self) -> bool:
        """Whether this is called on its thread."""
        return threading.current_thread() is self._thread

    @property
    def running(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    def closed_error(self) -> SwarmClosed:
        """For who calls, or waits, once the thread has ended: why it has. A new one each time."""
        if isinstance(self.error, SwarmClosed):
            return SwarmClosed(str(self.error))
        closed = SwarmClosed(f"the peer stopped on an error: {self.error}" if self.error else "the peer has left")
        closed.__cause__ = self.error
        return closed

    # ---------------------------------------------------------------- on the driver thread

    def install(self, machine: Driven, tag: bytes, member: Member | None) -> None:
        """Drive this machine from now on. Called through `call`, or before `start`."""
        self._machine, self._member = machine, member
        self.dispatch.bulk, self.dispatch.tag = member, tag
        if member is not None:
            member.work_aside(self._aside)

    def perform(self, effects: list[Effect], route: Route | None = None, observed_host: str = "") -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self.dispatch.send(effect.to, effect.message)
            elif isinstance(effect, Dial):
                self.transport.send_control(effect.address, self.dispatch.frames(effect.message))
            elif isinstance(effect, Notify):
                if isinstance(effect.event, MemberLeft):
                    self.dispatch.forget(effect.event.voter.peer)
                self.on_event(effect.event)
            elif isinstance(effect, Pace):
                self.dispatch.pace(effect.peer, effect.rate_Bps)
            elif isinstance(effect, Answer) and route is not None:
                self._answer(route, effect.message, observed_host)

    def _answer(self, route: Route, message: Message, observed_host: str) -> None:
        if isinstance(message, Welcome):
            message = dataclasses.replace(message, observed_host=observed_host)
        self.transport.reply(route, self.dispatch.frames(message))

    def _run(self) -> None:
        keep_freed_chunks()
        # A chunk is too short to share out: on a busy host the helpers' wake-up costs a hundred times the work.
        torch.get_num_threads()  # a thread takes over the common number at its first look, and would do so later
        torch.set_num_threads(1)
        _as_all_hosts_compute()
        self._began.set()
        try:
            while not self._stopping:
                self._turn()
            self._drain_calls()
        except BaseException as error:  # a SystemExit, too: nobody else would tell of it
            log.exception("the driver stopped on an error")
            self.error = error
        finally:
            self._stopping = self._ended = True  # before the calls fail: one made from now on fails itself
            self._switch_often(False)
            self._fail_calls()
            try:
                self.transport.close()
            finally:
                self.on_stop()  # who waits is told, whatever the sockets do

    def _turn(self) -> None:
        self._take_held_back()
        now = clock()
        deadline = self._machine.next_deadline() if self._machine is not None else None
        wait = POLL_S_MAX if deadline is None else min(POLL_S_MAX, max(0.0, deadline - now))
        if self._calls or self._looks:
            wait = 0.0
        dispatch = self.dispatch
        dispatch.warm(now)
        wanted = dispatch.want_write()
        if wanted:
            dispatch.bulk_at = now
        moves = dispatch.moves(now)
        self._switch_often(moves)
        if moves:
            wait = min(wait, dispatch.sample_in_s(now))
        for event in self.transport.poll(wait, wanted):
            if isinstance(event, Incoming) and event.lane == "bulk" and self._member is not None:
                dispatch.bulk_at = now
            self._take(event)
        self._drain_calls()
        self._take_held_back()
        dispatch.sample(clock())
        machine = self._machine
        if machine is not None and self.error is None:
            now = clock()
            due = machine.next_deadline()
            if due is not None and now >= due:
                self.perform(machine.tick(now))

    def _take(self, event: Event) -> None:
        if self.error is not None:
            return
        if isinstance(event, Incoming):
            self._receive(event)
        elif isinstance(event, Writable):
            self.dispatch.pump(event.address)
        elif isinstance(event, Reached):
            self.on_reached(event.host, clock())
        elif isinstance(event, Broken):
            self.dispatch.broken(self.dispatch.peer_at(event.address))
        else:
            self._link_event(event)

    def _aside(self, work: Callable[[], None], effects: list[Effect]) -> None:
        """Perform `effects`, and have `work` done by another thread; whoever asks meanwhile whether I live is answered,
        and all else is held back. Raises what `work` raises."""
        self.perform(effects)
        done: Future[None] = Future()

        def run() -> None:
            _as_all_hosts_compute()
            try:
                work()
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)
            self.transport.wake()

        threading.Thread(target=run, name="dlc-work", daemon=True).start()
        while not done.done():
            room = len(self._held_back) < HELD_BACK_MAX and self._held_back_bytes < HELD_BACK_BYTES_MAX
            for event in self.transport.poll(BREATH_S, bulk=False) if room else ():
                if not self._breathe(event):
                    self._held_back.append(event)
                    self._held_back_bytes += _size(event)
            if not room:
                concurrent.futures.wait([done], BREATH_S)
            if self._member is not None:
                self.perform(self._member.breathe(clock()))
            self._drain(self._looks)
        done.result()

    def _breathe(self, event: Event) -> bool:
        """Whether it was for now."""
        if not isinstance(event, Incoming) or self._member is None:
            return False
        try:
            sender, message = decode(event.frames, self.dispatch.tag)
            if not isinstance(message, PROOFS):
                return False
            effects = self._member.breathe(clock(), sender, message)
        except ProtocolError:
            return False  # counted when its turn comes
        self.perform(effects, event.route, event.observed_host)
        return True

    def _take_held_back(self) -> None:
        """Before the machine's patience with anybody is judged."""
        while self._held_back:
            event = self._held_back.popleft()
            self._held_back_bytes -= _size(event)
            self._take(event)

    def _switch_often(self, often: bool) -> None:
        """See SWITCH_S. A process may have several drivers; what somebody else has set meanwhile stays."""
        if often and self._switch_s is None and sys.getswitchinterval() > SWITCH_NEAR_S:
            self._switch_s = sys.getswitchinterval()
            sys.setswitchinterval(SWITCH_S)
        elif not often and self._switch_s is not None:
            if sys.getswitchinterval() <= SWITCH_NEAR_S:
                sys.setswitchinterval(self._switch_s)
            self._switch_s = None

    def _receive(self, event: Incoming) -> None:
        if self._machine is None:
            return
        try:
            sender, message = decode(event.frames, self.dispatch.tag)
            effects = self._machine.receive(sender, message, clock())
        except ProtocolError as error:
            if self._member is not None and self._member.torn:
                raise
            self.bad_frames += 1
            told = isinstance(error, OtherVersion) and self._part_ways(event, error)
            if not told and self.bad_frames % LOG_BAD_FRAMES_EVERY == 1:
                whose = event.address or event.observed_host
                log.warning("dropped a frame from %s: %s (%d so far)", whose, error, self.bad_frames)
            return
        self.perform(effects, event.route, event.observed_host)

    def _part_ways(self, event: Incoming, error: OtherVersion) -> bool:
        """Whoever asks is answered in words that it does not take, but for what version they are of; and where I have
        asked, I am told of such an answer. True: `on_link` has it."""
        if event.route is not None and event.lane == "control" and error.hello:
            self._answer(event.route, told_version(), "")
        elif event.address is not None and (on_link := self.on_link) is not None:
            on_link(LinkEvent(event.address, "other_version", str(error)))
            return True
        return False

    def _link_event(self, event: LinkEvent) -> None:
        peer = self.dispatch.peer_at(event.address)
        if event.kind == "refused" and peer is not None and self._member is not None:
            self.perform(self._member.refused(peer, clock()))
        if (on_link := self.on_link) is not None:
            on_link(event)

    # ---------------------------------------------------------------- calls

    def _drain_calls(self) -> None:
        self._drain(self._calls)
        self._drain(self._looks)

    def _drain(self, calls: collections.deque[Call]) -> None:
        while calls and self.error is None:
            future, fn = calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(fn(clock()))
            except BaseException as error:  # the caller is told: its future raises this
                future.set_exception(error)
                if self._member is not None and self._member.torn:
                    raise

    def _fail_calls(self) -> None:
        while True:
            try:
                future, _ = (self._calls or self._looks).popleft()
            except IndexError:  # two threads may do this at once
                return
            if future.set_running_or_notify_cancel():
                future.set_exception(self.closed_error())


def _size(event: Event) -> int:
    """Bytes of memory that it keeps, but for little."""
    return sum(map(len, event.frames)) if isinstance(event, Incoming) else 0


def _as_all_hosts_compute() -> None:
    """Numbers below the normal range stay what they are in this thread, whatever its maker was set to: some libraries
    have the processor take them for zero, in all threads made later, and this peer's state would be another one."""
    torch.set_flush_denormal(False)
