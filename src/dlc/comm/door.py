"""Who comes to the sockets that listen: those who never say that they know the run key take no more than their share.

libzmq accepts whoever connects, and drops who has not shown the key in HANDSHAKE_TIMEOUT_S. Until then each holds an
open file of this process, so that strangers who only connect, again and again, could take all that the system allows:
no checkpoint could be written, and nobody join. Here the oldest of them are shut as soon as there are too many.

A stranger is known by what our side has sent it: libzmq's greeting (64 bytes) goes to everybody, its next message only
to those whose first one was made with the server's key. So members are none after one round trip, whatever this thread
is busy with. Of strangers those go first whose host has most of them: one host's do not keep others out.

Whoever has listened on the way can say a member's first message once more, but not the next, which answers what our
side says then. Of such there may be some more, as members, too, wait there until this thread lets them in.

Nor may any of them fill the memory: libzmq reads first messages of any length that a link may have, megabytes of each,
before it asks for the key. Whoever has sent more than a member does until then is shut at once.

Where the system does not show what a connection has sent (not Linux), none is shut.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from ipaddress import ip_address
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from dlc.comm import tcp

log = logging.getLogger(__name__)

GREETING_BYTES = 64
"""What libzmq sends before it knows anything of the other side (ZMTP 3.1)."""
WELCOMED_BYTES = GREETING_BYTES + 170
"""And before it has asked for the key: its answer to a first message (CurveZMQ's WELCOME)."""
WELCOMED_TIMES = 3
"""So many times as strangers may be those who wait for what follows, by which a member is known."""
HELLO_BYTES_MAX = 4096
"""What a member may have sent before it is known; it sends some 700 bytes."""
INSPECT_S = 0.1
"""How often those who are strangers are looked at."""
STRANGERS_SHARE = 1 / 8
"""Of the open files that this process may have."""
STRANGERS_MIN, STRANGERS_MAX = 32, 512
EVENTS_MAX = 512
"""Of one socket, looked at in one call, some milliseconds: what else there is waits until messages were polled."""
_WATCHED = int(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)


class Door:
    """Watches `listening`, sockets of `context` that are to be bound after this. Belongs to the thread that owns them.

    strangers_max: None: there is no key, so nobody is a stranger.
    """

    def __init__(
        self, context: zmq.Context[Any], listening: Sequence[zmq.Socket[bytes]], strangers_max: int | None
    ) -> None:
        self.strangers_max = strangers_max if tcp.AVAILABLE else None
        self.shut = 0
        """Connections that were shut here."""
        self._inspect_at = 0.0
        self._listening = listening
        self._spare = tcp.Spare()
        self._guests: dict[tuple[int, int], tuple[str, int]] = {}
        """(index of the socket, descriptor): numeric host and port, of those not known to be members, oldest first."""
        self.monitors: list[zmq.Socket[bytes]] = []
        for index, sock in enumerate(listening):
            name = f"inproc://door-{index}"
            sock.monitor(name, _WATCHED)
            monitor: zmq.Socket[bytes] = context.socket(zmq.PAIR)
            monitor.rcvhwm = 0  # with a limit libzmq's thread would wait for this one
            monitor.connect(name)
            self.monitors.append(monitor)

    def look(self) -> list[str]:
        """Take in what has happened, shut whom there are too many of, and return the addresses of ours, `host:port`, by
        which others came in and showed that they are members."""
        reached: list[str] = []
        for index, monitor in enumerate(self.monitors):
            for _ in range(EVENTS_MAX):
                try:
                    event = recv_monitor_message(monitor, zmq.NOBLOCK)
                except zmq.Again:
                    break
                if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    reached.append(event["endpoint"].decode("ascii", "replace").removeprefix("tcp://"))
                elif event["event"] == zmq.EVENT_DISCONNECTED:
                    self._guests.pop((index, event["value"]), None)
                else:
                    self._came(index, event["value"], int(event["endpoint"].rpartition(b":")[2]))
        return reached

    def inspect(self, now: float) -> None:
        """Shut who floods. Called often; `now` is anybody's clock, in seconds."""
        if not self._guests or now < self._inspect_at:
            return
        self._inspect_at = now + INSPECT_S
        for key, peer in list(self._guests.items()):
            with self._same(key[1], peer) as sock:
                told = tcp.sample(sock) if sock is not None else None
                if sock is None or told is None or _sent_bytes(told) > WELCOMED_BYTES:
                    del self._guests[key]
                elif told.bytes_received > HELLO_BYTES_MAX:
                    del self._guests[key]
                    self._shut(sock)

    def close(self) -> None:
        """Before the sockets that it watches."""
        for sock, monitor in zip(self._listening, self.monitors, strict=True):
            sock.monitor(None, 0)
            monitor.close(0)
        if self.monitors:
            self._spare.close()
        self.monitors = []

    def _came(self, index: int, fd: int, port: int) -> None:
        """port: of the listening socket. Where `fd` leads from another one, it is the number of another file by now."""
        self._guests.pop((index, fd), None)  # whose end was not told yet
        if self.strangers_max is None:
            return
        with self._spare.duplicate(fd) as sock:
            peer = tcp.peer_of(sock) if sock is not None and sock.getsockname()[1] == port else None
        if peer is not None:
            self._guests[index, fd] = peer
            if len(self._guests) > self.strangers_max:
                self._shut_some(self.strangers_max)

    def _shut_some(self, strangers_max: int) -> None:
        """More are here than may be strangers: find out who they are, and shut those of whom there are too many."""
        strangers, welcomed = list[tuple[int, int]](), list[tuple[int, int]]()
        for key, peer in list(self._guests.items()):
            with self._same(key[1], peer) as sock:
                told = tcp.sample(sock) if sock is not None else None
            if told is None or _sent_bytes(told) > WELCOMED_BYTES:
                del self._guests[key]
            else:
                (welcomed if _sent_bytes(told) > GREETING_BYTES else strangers).append(key)
        self._shut_oldest(strangers, strangers_max)
        self._shut_oldest(welcomed, WELCOMED_TIMES * strangers_max)

    def _shut_oldest(self, keys: Sequence[tuple[int, int]], most: int) -> None:
        """keys: of guests, oldest first. Where they are more than `most`, half as many may stay."""
        if len(keys) <= most:
            return
        younger: Counter[int] = Counter()
        ranks = {}
        for key in reversed(keys):
            site = _site(self._guests[key][0])
            ranks[key] = younger[site]
            younger[site] += 1
        order = sorted(keys, key=ranks.__getitem__, reverse=True)
        if not self.shut:
            log.warning(
                "more than %d connections at once, most from %s, do not say that they know the run key: the oldest are "
                "closed (told once). Members can still come; a firewall would keep strangers out",
                most,
                self._guests[order[0]][0],
            )
        for key in order[: len(order) - most // 2]:
            with self._same(key[1], self._guests.pop(key)) as sock:
                if sock is not None:
                    self._shut(sock)

    def _shut(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
            self.shut += 1

    @contextlib.contextmanager
    def _same(self, fd: int, peer: tuple[str, int]) -> Iterator[socket.socket | None]:
        """A duplicate of `fd`, if it still is the connection that came from `peer`."""
        with self._spare.duplicate(fd) as sock:
            yield sock if sock is not None and tcp.peer_of(sock) == peer else None


def strangers_max() -> int:
    """By the open files that this process may have."""
    if sys.platform == "win32":
        return STRANGERS_MAX
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return STRANGERS_MAX
    return min(max(int(STRANGERS_SHARE * soft), STRANGERS_MIN), STRANGERS_MAX)


def _sent_bytes(told: tcp.TcpSample) -> int:
    """What our side has sent and the other has acknowledged; without what it says came out of order, which counts full
    segments, and may be made up."""
    return told.bytes_acked - told.sacked_bytes


def _site(host: str) -> int:
    """One number for what one machine may have: an IPv4 address, or the first half of an IPv6 one."""
    address = ip_address(host)
    return int(address) if address.version == 4 else (1 << 64) | int(address) >> 64
