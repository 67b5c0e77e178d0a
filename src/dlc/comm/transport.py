"""All sockets of a peer, in one object that one thread owns.

    others' DEALERs ──> control ROUTER ──┐                        ┌── control DEALERs ──> others' ROUTERs
    others' DEALERs ──> bulk ROUTER ─────┤        poll()          ├── bulk DEALERs ─────> others' ROUTERs
    libzmq's I/O thread ──> ZAP socket ──┤  (receive, serve ZAP,  ├── monitors (links up, down, refused)
    other threads ──> wake() ────────────┤   open links again)    └── resolver's answers
    both ROUTERs' monitors (the door) ───┘

Two lanes never share a queue, so a heartbeat does not wait behind a chunk: `poll` takes all control messages first
and looks at the control ROUTER again before every bulk message. Nothing here blocks but `poll` (for at most the time
it is given) and `close`. Links are made on demand, each watches itself (`links`), and are kept until `forget`, or until
they are down and nobody has used them for UNUSED_S.

Messages travel on a connection that somebody opened: `send_*` uses ours, `reply` uses theirs. Order is kept within one
lane and one connection, of which bulk may take several to one address (`bundle`); nothing is delivered twice; what is
inside a connection that breaks is lost, and the caller's protocol repeats itself. Frames received may be memoryviews of
libzmq's own memory: they stay valid as long as they are referenced, and hold that memory as long.

Without a run key a transport listens on loopback only, unless `insecure` says that this is meant.
"""

from __future__ import annotations

import errno
import ipaddress
import itertools
import logging
import math
import socket
import time
from collections.abc import Callable, Collection
from typing import Any

import zmq

from dlc.comm.addresses import Resolver, is_loopback, is_numeric, join_address, leads_here, look_up, parse_address
from dlc.comm.bundle import STREAMS_MAX, Bundle
from dlc.comm.door import Door, strangers_max
from dlc.comm.lanes import (
    BULK_FRAME_BYTES_MAX,
    CONTROL_FRAME_BYTES_MAX,
    FULL_PACKETS_LOST,
    Broken,
    Event,
    Frames,
    Incoming,
    Lane,
    LinkEvent,
    Reached,
    Route,
    Writable,
)
from dlc.comm.links import Link, set_lane_options
from dlc.comm.security import LinkSecurity, ZapHandler
from dlc.comm.tcp import WaySample
from dlc.errors import UsageError

log = logging.getLogger(__name__)

CONTROL_MESSAGES_MAX = 256
"""Control messages returned by one `poll`: a burst of everybody's heartbeats; more wait for the next call."""
BULK_MESSAGES_MAX = 4
"""Bulk messages returned by one `poll`: what the caller may work on before control is looked at again."""
FRAMES_MAX = 16
"""Frames of one message; one with more comes from no peer of ours and is dropped."""
VIEW_BYTES_MIN = 4096
"""Frames shorter than this are copied to bytes: cheaper than a view, and they do not hold libzmq's buffers."""
LINKS_MAX = 4096
"""Links to others, both lanes: addresses come from records that other peers sign, so there must be an end."""
WIDE_LINKS_MAX = 128
"""Of both lanes, above which a far host has one bulk link: each takes five of the files that a process may open."""
SOCKETS_MAX = 4 * LINKS_MAX
"""Three for each link, and those of closed ones that libzmq has not taken away yet."""
IDENT_BYTES_MAX = 200
"""A routing id has at most 255 bytes; a lane letter and a serial number are added to `ident`."""
STALLS_TOLD = 2
"""Bulk connections in a row on which only small packets were answered: one may have been cut."""
CLOSE_POLL_S = 0.05
_LANES: tuple[Lane, Lane] = ("control", "bulk")
_WAKE_BYTES_MAX = 4096
_POLLIN, _POLLOUT, _EVENTS = int(zmq.POLLIN), int(zmq.POLLOUT), int(zmq.EVENTS)
"""As plain numbers: pyzmq's are of a class that takes a microsecond for each `&` and `|`."""


class Transport:
    """Sockets of one peer. All methods but `wake` belong to one thread at a time.

    listen: `host:port`; port 0 takes a free one. bulk_port: port of the bulk lane, on the same host, 0 likewise.
    ident: bytes that no other process uses (peer id and incarnation). streams: bulk links to an address for which the
    system refuses BBR, or buffers are too small (bundle.py). Raises UsageError if it cannot listen there.
    """

    def __init__(
        self,
        listen: str = "127.0.0.1:0",
        *,
        security: LinkSecurity | None,
        insecure: bool = False,
        ident: bytes,
        bulk_port: int = 0,
        streams: int = 1,
        io_threads: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 1 <= len(ident) <= IDENT_BYTES_MAX:
            raise ValueError(f"ident must have 1 to {IDENT_BYTES_MAX} bytes")
        host, port = parse_address(listen)
        self.host = _listen_host(host, listen)
        if security is None and not insecure and not is_loopback(self.host):
            raise UsageError(
                f"listening on {listen} needs a run key, or any stranger could join; "
                "give a key file (`dlc key > run.key`), or say --insecure on a network that you trust"
            )
        self.dropped = 0
        """Messages dropped because they had too many frames, or none."""
        self.bulk_entered = False
        """Somebody has come in by the bulk port."""
        self._ident = ident
        self._streams = streams
        self._security = security
        self._clock = clock
        self._serial = itertools.count()
        self._controls: dict[str, Link] = {}
        self._bundles: dict[str, Bundle] = {}
        self._events: list[LinkEvent | Reached | Broken] = []
        self._closed = self._starved = self._lossy = False
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._resolver = Resolver(self.wake)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads)
        self._context.set(zmq.MAX_SOCKETS, SOCKETS_MAX)
        self._zap = ZapHandler(self._context, security) if security is not None else None
        self._control: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._bulk: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._door = Door(self._context, (self._control, self._bulk), strangers_max() if security is not None else None)
        self._reached = not ipaddress.ip_address(self.host).is_unspecified
        """There is nothing more to tell of the addresses by which others come in."""
        try:
            self.control_port = self._bind(self._control, "control", port)
            self.bulk_port = self._bind(self._bulk, "bulk", bulk_port)
        except UsageError:
            self.close(0.0)
            raise

    @property
    def refused_clients(self) -> int:
        """Connections that ZAP turned away."""
        return self._zap.refused if self._zap is not None else 0

    def send_control(self, address: str, frames: Frames) -> bool:
        """Send on our control link to `address`, now or when it comes up; False if too much is waiting already."""
        _check(frames, CONTROL_FRAME_BYTES_MAX)
        link = self._control_link(address)
        return link is not None and link.send_or_keep(frames, self._clock())

    def send_bulk(self, address: str, frames: Frames) -> bool:
        """Send on our bulk link to `address` if it is up and has room; else False, and `poll` can wait for room."""
        _check(frames, BULK_FRAME_BYTES_MAX)
        bundle = self._bundle(address)
        return bundle is not None and bundle.send(frames)

    def reply(self, route: Route, frames: Frames) -> bool:
        """Send on the connection that a message came in on; False if it is gone or full."""
        control = route.lane == "control"
        _check(frames, CONTROL_FRAME_BYTES_MAX if control else BULK_FRAME_BYTES_MAX)
        try:
            (self._control if control else self._bulk).send_multipart([route.routing_id, *frames], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (errno.EAGAIN, errno.EHOSTUNREACH):
                return False
            raise
        return True

    def open_bulk(self, address: str) -> None:
        """Have a bulk link to `address`, so that the first chunk does not wait for handshakes."""
        self._bundle(address)

    def pace(self, address: str, rate_Bps: float | None, control: str = "") -> bool:
        """Send on our bulk link to `address` at most at this rate from now on, reconnections included, until told
        otherwise or `forget`; None: as fast as it can. Messages that are `reply`s are not paced. control: the same
        host's address on the other lane, whose connection knows, too, how far away that is.

        False if it takes effect later (the link is not up yet) or never (the system cannot).
        """
        if rate_Bps is None and address not in self._bundles:
            return False
        bundle = self._bundle(address)
        other = self._controls.get(control) if rate_Bps is not None else None
        return bundle is not None and bundle.pace(rate_Bps, other.path_s() if other is not None else 0.0)

    def mend_bulk(self) -> bool:
        """Connect those of our bulk links anew that losses have left a small window, and have more where buffers held
        them back; whether there are more. To be called while bulk rests: what others send back on such a connection is
        lost."""
        more = False
        for address, bundle in self._bundles.items():
            before = len(bundle.links)
            if self._streams > 1 and bundle.held_back():
                self._widen(address, min(max(self._streams, 2 * before), STREAMS_MAX))
            more = more or len(bundle.links) > before
            for link in bundle.links[:before]:
                self._note(link, link.renew(self._clock()))
        return more

    def revive_bulk(self) -> None:
        """Connect those of our bulk links anew on which the kernel gets no answer."""
        for address, bundle in self._bundles.items():
            before = max(link.stalls for link in bundle.links)
            for link in bundle.links:
                self._note(link, link.revive(self._clock()))
            if before < STALLS_TOLD <= (stalls := max(link.stalls for link in bundle.links)):
                log.warning(
                    "bulk connections to %s are made, and get no answer to what is sent then, %d in a row: %s",
                    address,
                    stalls,
                    FULL_PACKETS_LOST,
                )

    def barred(self, address: str) -> str:
        """Why the last attempt to make a bulk link to `address` failed; empty where one is up, none has
        failed, or this process may open no more files."""
        bundle = self._bundles.get(address)
        return bundle.links[0].why if bundle is not None and not bundle.links[0].starved else ""

    def way_sample(self, address: str) -> WaySample | None:
        """The kernel's numbers of our bulk links to `address`, if one is up and the system has them."""
        bundle = self._bundles.get(address)
        return bundle.sample() if bundle is not None else None

    def forget(self, address: str) -> None:
        """Close our links to `address`; what waits for it is dropped. Using the address again makes new links."""
        control, bundle = self._controls.pop(address, None), self._bundles.pop(address, None)
        for link in (control, *(bundle.links if bundle is not None else ())):
            if link is not None:
                link.close()

    def poll(self, timeout_s: float, want_write: Collection[str] = (), bulk: bool = True) -> list[Event]:
        """Wait until something happens or `timeout_s` has passed, and return it, control before bulk.

        want_write: addresses whose bulk link has something to send; each that has room gives one `Writable`.
        bulk: False leaves messages of the bulk lane where they are.
        The list may be empty before the time is over (after `wake`, or after work of the transport's own).
        """
        for address in want_write:
            self._bundle(address)
        now = self._clock()
        self._advance(now)
        wait_s = 0.0 if self._events else self._wait_s(timeout_s, now)
        ready = self._wait(wait_s, want_write, _LANES if bulk else _LANES[:1])
        now = self._clock()
        self._serve(ready, now)
        events: list[Event] = []
        self._take_control(ready, events)
        self._take_bulk(ready, events)
        events[:0] = self._events
        self._events = []
        for address in want_write:
            bundle = self._bundles.get(address)
            if bundle is not None and any(ready.get(link.socket, 0) & _POLLOUT for link in bundle.links):
                events.append(Writable(address))
        return events

    def wake(self) -> None:
        """Make `poll` return. The one method that other threads may call; harmless after `close`."""
        try:
            self._wake_in.send(b"w")
        except OSError:  # already awake (the buffer is full), or closed
            pass

    def close(self, linger_s: float = 1.0) -> None:
        """Deliver control messages that were sent before, as far as others take them within `linger_s`; then let go.

        A link that has failed and has something to deliver is tried once more, at once, and no longer waited for when
        that fails. May be called twice.
        """
        if self._closed:
            return
        self._closed = True
        deadline = self._clock() + linger_s
        for link in self._controls.values():
            if link.pending:
                link.once_more()
        while self._clock() < deadline and any(link.pending and not link.tried for link in self._controls.values()):
            self._advance(self._clock())
            self._serve(self._wait(CLOSE_POLL_S, (), read=()), self._clock())
        left_s = max(deadline - self._clock(), 0.0)
        for link in self._links():
            link.close(left_s if link.lane == "control" else 0.0)
        self._controls.clear()
        self._bundles.clear()
        self._door.close()
        self._control.close(round(left_s * 1000))
        self._bulk.close(0)
        if self._zap is not None:
            self._zap.close()
        self._resolver.close()
        self._context.term()
        self._wake_in.close()
        self._wake_out.close()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _bind(self, sock: zmq.Socket[bytes], lane: Lane, port: int) -> int:
        set_lane_options(sock, lane)
        sock.router_mandatory = 1
        sock.router_handover = 1
        sock.ipv6 = ":" in self.host
        if self._security is not None:
            self._security.apply_server(sock)
        address = join_address(self.host, port)
        try:
            sock.bind(f"tcp://{address}")
        except zmq.ZMQError as error:
            if error.errno == errno.EADDRINUSE:
                raise UsageError(
                    f"port {port} on {self.host} is taken; choose another, or 0 for a free one (the {lane} lane)"
                ) from None
            raise UsageError(f"cannot listen on {address} (the {lane} lane): {error.strerror}") from None
        endpoint: bytes = sock.getsockopt(zmq.LAST_ENDPOINT)  # type: ignore[assignment]
        return int(endpoint.rstrip(b"\0").rpartition(b":")[2])

    def _look_at_door(self) -> None:
        """The kernel says by which address of ours each came; the first that others can dial is told."""
        for address in self._door.look():
            self.bulk_entered = self.bulk_entered or address.endswith(f":{self.bulk_port}")
            if self._reached:
                continue
            try:
                host = parse_address(address)[0].removeprefix("::ffff:")
            except UsageError:  # it had gone again before libzmq asked
                continue
            if is_numeric(host) and leads_here(host):
                self._events.append(Reached(host))
                self._reached = True

    def _links(self) -> list[Link]:
        return [*self._controls.values(), *(link for bundle in self._bundles.values() for link in bundle.links)]

    def _control_link(self, address: str) -> Link | None:
        link, now = self._controls.get(address), self._clock()
        if link is None and (link := self._make("control", address)) is not None:
            self._controls[address] = link
            self._note(link, link.advance(now))
        if link is not None:
            link.used_at = now
        return link

    def _bundle(self, address: str) -> Bundle | None:
        bundle, now = self._bundles.get(address), self._clock()
        if bundle is None and (link := self._make("bulk", address)) is not None:
            bundle = self._bundles[address] = Bundle(link)
            self._note(link, link.advance(now))
        for link in bundle.links if bundle is not None else ():
            link.used_at = now
        return bundle

    def _make(self, lane: Lane, address: str) -> Link | None:
        routing_id = lane[:1].encode() + self._ident + next(self._serial).to_bytes(8, "big")
        try:
            if len(self._links()) >= LINKS_MAX:
                raise UsageError(f"{LINKS_MAX} links are open already")
            return Link(
                self._context,
                address,
                lane,
                routing_id=routing_id,
                security=self._security,
                resolver=self._resolver,
            )
        except UsageError as error:  # addresses come from other peers' records: no reason to stop
            if lane == "control":
                self._events.append(LinkEvent(address, "unreached", str(error)))
            return None

    def _widen(self, address: str, streams: int) -> None:
        """More connections beside those that are slow; they open at the next `poll`."""
        if address in self._bundles and len(self._links()) < WIDE_LINKS_MAX:
            self._bundles[address].widen(streams, lambda: self._make("bulk", address))

    def _note(self, link: Link, events: list[LinkEvent]) -> None:
        if link.starved and not self._starved:
            self._starved = True
            log.warning(
                "no link to %s can be made: this process may open no more files (told once). Rounds go on without what "
                "such links would carry; stop it, and start it with a higher limit (`ulimit -n`)",
                link.address,
            )
        if link.lossy and not self._lossy:
            self._lossy = True
            log.warning(
                "Linux does not let this process use BBR, as bulk links to far hosts want, %s among them (told once). "
                "Several connections to each take its place, and rounds take longer. Root on this host allows it with "
                '`modprobe tcp_bbr` and `sysctl -w net.ipv4.tcp_allowed_congestion_control="reno cubic bbr"`',
                link.address,
            )
        if link.lossy and any(event.kind == "connected" for event in events):
            self._widen(link.address, self._streams)
        if link.lane == "control":
            self._events += events
        elif link.broke:
            link.broke = False
            self._events.append(Broken(link.address))

    def _advance(self, now: float) -> None:
        for address in [a for a, link in self._controls.items() if link.unused(now)]:
            self._controls.pop(address).close()
        for address in [a for a, b in self._bundles.items() if all(link.unused(now) for link in b.links)]:
            for link in self._bundles.pop(address).links:
                link.close()
        for link in self._links():
            self._note(link, link.advance(now))

    def _wait_s(self, timeout_s: float, now: float) -> float:
        deadlines = [deadline for link in self._links() if (deadline := link.deadline()) is not None]
        return max(min([timeout_s, *(deadline - now for deadline in deadlines)]), 0.0)

    def _wait(self, timeout_s: float, want_write: Collection[str], read: Collection[Lane] = _LANES) -> dict[Any, int]:
        """read: lanes whose messages it does not wait beyond."""
        wanted = set(want_write)
        watched: list[tuple[Any, int]] = [(self._wake_out, _POLLIN)]
        watched += [(s, _POLLIN) for lane, s in zip(_LANES, (self._control, self._bulk), strict=True) if lane in read]
        if self._zap is not None:
            watched.append((self._zap.socket, _POLLIN))
        watched += [(monitor, _POLLIN) for monitor in self._door.monitors]
        for link in self._links():
            if link.socket is not None:
                control = link.lane == "control"
                write = link.pending if control else link.address in wanted
                events = (_POLLIN if link.lane in read else 0) | (_POLLOUT if write else 0)
                if events:
                    watched.append((link.socket, events))
                watched.append((link.monitor, _POLLIN))
            if link.knock is not None:
                watched.append((link.knock.fileno(), _POLLOUT))
        return dict(zmq.zmq_poll(watched, math.ceil(timeout_s * 1000)))

    def _serve(self, ready: dict[Any, int], now: float) -> None:
        """Work of the transport's own: wake, ZAP, the door, look-ups, monitors, waiting control messages."""
        if self._wake_out in ready or self._wake_out.fileno() in ready:
            self._wake_out.recv(_WAKE_BYTES_MAX)
        if self._zap is not None and self._zap.socket in ready:
            self._zap.serve()
        if any(monitor in ready for monitor in self._door.monitors):
            self._look_at_door()
        self._door.inspect(now)
        for host, hosts, problem in self._resolver.answers():
            for link in self._links():
                if link.host == host:
                    self._note(link, link.resolved(hosts, problem, now))
        for link in self._links():
            if link.monitor is not None and link.monitor in ready:
                self._note(link, link.read_monitor(now))
            if link.knock is not None:
                self._note(link, link.look(now))
            if link.pending:
                link.flush()

    def _take_control(self, ready: dict[Any, int], events: list[Event]) -> None:
        room = CONTROL_MESSAGES_MAX
        if self._control in ready:
            room = self._take(self._control, "control", None, room, events)
        for address, link in self._controls.items():
            if link.socket is not None and ready.get(link.socket, 0) & _POLLIN:
                room = self._take(link.socket, "control", address, room, events)

    def _take_bulk(self, ready: dict[Any, int], events: list[Event]) -> None:
        sources: list[tuple[zmq.Socket[bytes], str | None]] = [(self._bulk, None)] if self._bulk in ready else []
        for to, bundle in self._bundles.items():
            for link in bundle.links:
                if link.socket is not None and ready.get(link.socket, 0) & _POLLIN:
                    sources.append((link.socket, to))
        room = BULK_MESSAGES_MAX
        for sock, address in sources:
            while room and self._take(sock, "bulk", address, 1, events) == 0:
                room -= 1
                if int(self._control.getsockopt(_EVENTS)) & _POLLIN:
                    self._take(self._control, "control", None, CONTROL_MESSAGES_MAX, events)

    def _take(self, sock: zmq.Socket[bytes], lane: Lane, address: str | None, room: int, events: list[Event]) -> int:
        """Receive up to `room` messages; what is left of it."""
        while room:
            try:
                parts = [sock.recv(zmq.NOBLOCK, copy=False)]
            except zmq.Again:
                break
            more = parts[0].more
            while more:
                part = sock.recv(copy=False)
                more = part.more
                if len(parts) <= FRAMES_MAX + 1:  # further ones are not kept: there may be millions
                    parts.append(part)
            room -= 1
            route = Route(lane, parts.pop(0).bytes) if address is None else None
            if not 1 <= len(parts) <= FRAMES_MAX:
                self.dropped += 1
                continue
            frames = [part.bytes if len(part) < VIEW_BYTES_MIN else part.buffer for part in parts]
            events.append(Incoming(lane, frames, route, address, _observed_host(parts[0])))
        return room


def _observed_host(frame: zmq.Frame) -> str:
    """Where it came from, in numbers; empty where that connection had gone before libzmq asked."""
    try:
        return str(frame.get("Peer-Address")).removeprefix("::ffff:")
    except zmq.ZMQError as error:
        if error.errno == errno.EINVAL:
            return ""
        raise


def _listen_host(host: str, listen: str) -> str:
    """The numeric host to bind to."""
    if host == "*":
        return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
    if is_numeric(host):
        return host
    try:
        return look_up(host)[0]
    except (OSError, UnicodeError, IndexError) as error:
        raise UsageError(f"cannot listen on {listen}: the name {host} cannot be looked up ({error})") from None


def _check(frames: Frames, frame_bytes_max: int) -> None:
    """A message over the limits would cost the link: that is a fault of the caller."""
    if not 1 <= len(frames) <= FRAMES_MAX or any(memoryview(frame).nbytes > frame_bytes_max for frame in frames):
        raise ValueError(f"a message has 1 to {FRAMES_MAX} frames of up to {frame_bytes_max} bytes")
