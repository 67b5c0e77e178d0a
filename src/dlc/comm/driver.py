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
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import torch

from dlc.comm.addresses import on_this_host
from dlc.comm.allocator import keep_freed_chunks
from dlc.comm.clock import clock
from dlc.comm.effects import Answer, Dial, Effect, Notify, Pace, Send
from dlc.comm.events import MemberLeft
from dlc.comm.framing import Frame, OtherVersion, decode, encode, told_version
from dlc.comm.ids import PeerId, Voter
from dlc.comm.lanes import Broken, Event, Incoming, LinkEvent, Reached, Route, Writable
from dlc.comm.messages import PROOFS, Bulk, Contrib, Message, Piece, Record, Welcome
from dlc.comm.tcp import WaySample
from dlc.comm.transport import Transport
from dlc.errors import ProtocolError, SwarmClosed

log = logging.getLogger(__name__)
T = TypeVar("T")
Call = tuple[Future[Any], Callable[[float], Any]]

POLL_S_MAX = 0.25
"""The machine is ticked at least this often."""
BULK_BURST = 4
"""Chunks handed to one link before control messages are looked at again."""
SAMPLE_S = 0.1
"""How often the kernel is asked about bulk links, while bulk moves."""
SAMPLE_TAIL_S = 1.0
"""And for how long after the last bulk message: what was handed to it then is still on its way."""
WARM_S = 1.0
"""How often it is seen to that bulk links to those who will need them are open."""
UNENTERED_MAX = 20
"""Looks, one each WARM_S, after which a port by which nobody has come is said to be closed: links take 3 s at most."""
BARRED_S = 10.0
"""Who lives, and takes no bulk connection for so long, has its port closed: twice as long as an attempt takes."""
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
RECENT_BULK_MAX = 8
"""Bulk messages whose frames are kept for the other recipients: a few chunks of memory."""


class Driven(Protocol):
    """What the driver drives: a Lobby first, a Node afterwards."""

    def receive(self, sender: Voter, message: Message, now: float) -> list[Effect]: ...
    def tick(self, now: float) -> list[Effect]: ...
    def next_deadline(self) -> float | None: ...


class BulkSource(Protocol):
    """The bulk side of a machine that has one."""

    def pending_bulk(self) -> set[PeerId]: ...
    def next_bulk(self, peer: PeerId) -> Bulk | None: ...
    def record_of(self, peer: PeerId) -> Record | None: ...
    def refused(self, peer: PeerId, now: float) -> list[Effect]: ...
    def bulk_broken(self, peer: PeerId) -> None: ...
    def bulk_peers(self) -> set[PeerId]: ...
    def link_samples(self, samples: Mapping[PeerId, WaySample], now: float) -> None: ...
    def links_widened(self) -> None: ...

    @property
    def awaits_bulk(self) -> bool: ...

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
        self.transport, self.me = transport, me
        self.on_event = on_event
        """Called on the driver thread with each event; must be quick and must not raise."""
        self.on_link: Callable[[LinkEvent], None] | None = None
        """Called on the driver thread with each event of a link; then it tells of another version, and not the log."""
        self.on_reached: Callable[[str, float], None] = lambda host, now: None
        """Called on the driver thread with the host of `Reached`, and the time."""
        self.on_stop: Callable[[], None] = lambda: None
        """Called on the driver thread when it ends, by `stop` or by an error."""
        self.bad_frames = 0
        self.tag = bytes(8)
        self.error: BaseException | None = None
        self._machine: Driven | None = None
        self._bulk: BulkSource | None = None
        self._calls: collections.deque[Call] = collections.deque()
        self._looks: collections.deque[Call] = collections.deque()
        self._stash: dict[PeerId, list[Frame]] = {}
        """Taken from the machine, and its link had no room."""
        self._addresses: dict[str, PeerId] = {}
        self._dials: dict[PeerId, str] = {}
        self._bulk_to: dict[PeerId, str] = {}
        """Where bulk for a peer went last."""
        self._recent: collections.deque[tuple[Bulk, list[Frame]]] = collections.deque(maxlen=RECENT_BULK_MAX)
        self._bulk_at = float("-inf")
        """When bulk last waited, or came in."""
        self._sample_at = self._warm_at = 0.0
        self._barred: dict[str, tuple[float, bool]] = {}
        """Bulk addresses of the living to which no link comes up: since when that is seen, and whether it was told."""
        self._awaited_in_vain = 0
        """How often nobody had come in by the bulk port, though somebody was to."""
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

    def install(self, machine: Driven, tag: bytes, bulk: BulkSource | None) -> None:
        """Drive this machine from now on. Called through `call`, or before `start`."""
        self._machine, self._bulk, self.tag = machine, bulk, tag
        if bulk is not None:
            bulk.work_aside(self._aside)

    def perform(self, effects: list[Effect], route: Route | None = None, observed_host: str = "") -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._send(effect.to, effect.message)
            elif isinstance(effect, Dial):
                self.transport.send_control(effect.address, self._frames(effect.message))
            elif isinstance(effect, Notify):
                if isinstance(effect.event, MemberLeft):
                    self._forget(effect.event.voter.peer)
                self.on_event(effect.event)
            elif isinstance(effect, Pace):
                self._pace(effect)
            elif isinstance(effect, Answer) and route is not None:
                self._answer(route, effect.message, observed_host)

    def _answer(self, route: Route, message: Message, observed_host: str) -> None:
        if isinstance(message, Welcome):
            message = dataclasses.replace(message, observed_host=observed_host)
        self.transport.reply(route, self._frames(message))

    def _frames(self, message: Message) -> list[Frame]:
        return encode(self.me, self.tag, message)

    def _send(self, to: PeerId, message: Message) -> None:
        record = self._bulk.record_of(to) if self._bulk is not None else None
        if record is None or not record.control:
            return
        address = record.control[0]
        if self._dials.get(to) != address:
            self._forget(to)
            self._dials[to], self._addresses[address] = address, to
        self._addresses.setdefault(address, to)  # where another peer had it, and was forgotten
        self.transport.send_control(address, self._frames(message))

    def _forget(self, peer: PeerId) -> None:
        """Close the links to a peer that left, moved, or was dead for so long that it is forgotten."""
        for address in [a for a, p in self._addresses.items() if p == peer]:
            del self._addresses[address]
            self.transport.forget(address)
        self._dials.pop(peer, None)
        if self._bulk_to.pop(peer, None) is not None:
            self._broken(peer)

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
        self._warm(now)
        wanted = self._want_write()
        if wanted:
            self._bulk_at = now
        self._switch_often(now < self._bulk_at + SAMPLE_TAIL_S)
        if now < self._bulk_at + SAMPLE_TAIL_S:
            wait = min(wait, max(0.0, self._sample_at - now))
        for event in self.transport.poll(wait, wanted):
            if isinstance(event, Incoming) and event.lane == "bulk" and self._bulk is not None:
                self._bulk_at = now
            self._take(event)
        self._drain_calls()
        self._take_held_back()
        self._sample(clock())
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
            self._pump(event.address)
        elif isinstance(event, Reached):
            self.on_reached(event.host, clock())
        elif isinstance(event, Broken):
            self._broken(self._addresses.get(event.address))
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
            if self._bulk is not None:
                self.perform(self._bulk.breathe(clock()))
            self._drain(self._looks)
        done.result()

    def _breathe(self, event: Event) -> bool:
        """Whether it was for now."""
        if not isinstance(event, Incoming) or self._bulk is None:
            return False
        try:
            sender, message = decode(event.frames, self.tag)
            if not isinstance(message, PROOFS):
                return False
            effects = self._bulk.breathe(clock(), sender, message)
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
            sender, message = decode(event.frames, self.tag)
            effects = self._machine.receive(sender, message, clock())
        except ProtocolError as error:
            if self._bulk is not None and self._bulk.torn:
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
        peer = self._addresses.get(event.address)
        if event.kind == "refused" and peer is not None and self._bulk is not None:
            self.perform(self._bulk.refused(peer, clock()))
        if (on_link := self.on_link) is not None:
            on_link(event)

    # ---------------------------------------------------------------- bulk

    def _want_write(self) -> list[str]:
        """Bulk addresses of the peers that something waits for."""
        if self._bulk is None:
            return []
        wanted = []
        for peer in self._bulk.pending_bulk() | self._stash.keys():
            address = self._bulk_address(peer)
            if address is not None:
                wanted.append(address)
            else:
                self._stash.pop(peer, None)
        return wanted

    def _bulk_address(self, peer: PeerId) -> str | None:
        """Where bulk for it goes. The link to where that went before is closed: one that is up would be kept for ever,
        and what the kernel says of it be taken for what it says of the new one."""
        record = self._bulk.record_of(peer) if self._bulk is not None else None
        if record is None or not record.bulk:
            return None
        address = record.bulk[0]
        before = self._bulk_to.get(peer, address)
        if before not in (address, self._dials.get(peer)) and self._addresses.get(before) == peer:
            del self._addresses[before]
            self.transport.forget(before)
            self._broken(peer)
        self._bulk_to[peer], self._addresses[address] = address, peer
        return address

    def _broken(self, peer: PeerId | None) -> None:
        """A bulk connection to it has ended."""
        if peer is not None and self._bulk is not None:
            self._bulk.bulk_broken(peer)

    def _pump(self, address: str) -> None:
        """Hand a few chunks to a link that has room."""
        peer, bulk = self._addresses.get(address), self._bulk
        if peer is None or bulk is None:
            return
        for _ in range(BULK_BURST):
            frames = self._stash.pop(peer, None)
            if frames is None:
                message = bulk.next_bulk(peer)
                if message is None:
                    return
                frames = self._bulk_frames(message)
            if not self.transport.send_bulk(address, frames):
                self._stash[peer] = frames
                return

    def _bulk_frames(self, message: Bulk) -> list[Frame]:
        """The same result goes to every peer: its header is encoded once. A part or a piece goes to one alone, and
        would keep all the memory that it is a view of."""
        if isinstance(message, Contrib | Piece):
            return self._frames(message)
        for known, frames in self._recent:
            if known is message:
                return frames
        frames = self._frames(message)
        self._recent.append((message, frames))
        return frames

    def _warm(self, now: float) -> None:
        """Open links before they are needed: a chunk would wait for the handshakes of TCP and CURVE."""
        if self._bulk is None or now < self._warm_at:
            return
        self._warm_at = now + WARM_S
        for peer in {*self._dials, *self._addresses.values()}:
            if self._bulk.record_of(peer) is None:
                self._forget(peer)
        before, self._barred = self._barred, {}
        for peer in self._bulk.bulk_peers():
            address = self._bulk_address(peer)
            if address is not None:
                self.transport.open_bulk(address)
                if why := self.transport.barred(address):
                    since, told = before.get(address, (now, False))
                    self._barred[address] = since, told or self._tell_barred(peer, address, why, now - since)
        if self._bulk.awaits_bulk and not self.transport.bulk_entered:
            self._awaited_in_vain += 1
            if self._awaited_in_vain == UNENTERED_MAX:
                log.warning(
                    "nobody has come in by TCP port %d of this host: does a firewall, or a router, let it in? What the "
                    "others have for this peer, states and results, comes that way",
                    self.transport.bulk_port,
                )
        self.transport.revive_bulk()
        if now >= self._bulk_at + SAMPLE_TAIL_S and self.transport.mend_bulk():
            self._bulk.links_widened()

    def _tell_barred(self, peer: PeerId, address: str, why: str, for_s: float) -> bool:
        """Whether it was said who may have to open which port."""
        if for_s >= BARRED_S:
            log.warning(
                "%s answers pings, but takes no bulk connection from here (%s: %s): rounds go on without what would go "
                "there. Does a firewall let that TCP port in, on its host or on the way? (It is tried for ever)",
                peer[:8],
                address,
                why,
            )
        return for_s >= BARRED_S

    def _sample(self, now: float) -> None:
        """Tell the machine what the kernel says of the bulk links, while bulk moves."""
        if self._bulk is None or now < self._sample_at or now >= self._bulk_at + SAMPLE_TAIL_S:
            return
        self._sample_at = now + SAMPLE_S
        samples = {}
        for address, peer in self._addresses.items():
            sample = self.transport.way_sample(address)
            if sample is not None:
                samples[peer] = sample
        self._bulk.link_samples(samples, now)

    def _pace(self, effect: Pace) -> None:
        record = self._bulk.record_of(effect.peer) if self._bulk is not None else None
        if record is not None and record.bulk and not on_this_host(record.bulk[0]):
            self.transport.pace(record.bulk[0], effect.rate_Bps, control=record.control[0] if record.control else "")

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
                if self._bulk is not None and self._bulk.torn:
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
