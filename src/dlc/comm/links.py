"""One outgoing connection: a DEALER that is opened, watched and opened again for ever.

    WAITING --retry time--> RESOLVING --numeric addresses--> CONNECTING --handshake succeeded--> UP
       ^______ refused, unreached, ..._failed ___________________|                               |
       |______________________________________ disconnected _____________________________________|

What libzmq (4.3.5) really emits on a monitor, and what this file makes of it:

| what happened                    | events                                                     | kind             |
|----------------------------------|------------------------------------------------------------|------------------|
| nobody listens there             | CONNECT_DELAYED, CLOSED (hence `knock`)                    | refused          |
| no host there, no way to it      | the same                                                   | unreached        |
| no answer at all                 | the same, after the connect timeout                        | unreached        |
| no route, no IPv6 here           | CLOSED, or nothing (hence `_OVERDUE_S`)                    | unreached        |
| other run key or run name        | CONNECTED, HANDSHAKE_FAILED_NO_DETAIL (EPIPE, ECONNRESET)  | auth_failed      |
| refused by the other side's ZAP  | CONNECTED, HANDSHAKE_FAILED_AUTH (400)                     | auth_failed      |
| only one side has a key          | CONNECTED, HANDSHAKE_FAILED_PROTOCOL (mechanism mismatch), | auth_failed      |
|                                  | or HANDSHAKE_FAILED_NO_DETAIL, by chance                   |                  |
| it accepts and says nothing      | CONNECTED, HANDSHAKE_FAILED_NO_DETAIL (EAGAIN, EINTR)      | handshake_failed |
| it speaks something else         | CONNECTED, HANDSHAKE_FAILED_PROTOCOL (anything else)       | handshake_failed |

A peer that dies in the middle of a handshake looks like one with another key, so the caller should believe
`auth_failed` only when it comes again.

libzmq's own reconnection is not used: after a protocol or authentication error it never tries again, after a closed
handshake it tries ten times a second, and it keeps to the first address of a name. Here every attempt gets a fresh
socket, after a back-off. `ZMQ_IMMEDIATE` keeps messages out of a connection that is not up; control messages wait in
`pending` meanwhile, so a peer that starts later gets them. What was written to a connection that then breaks is lost.

A bulk link keeps a duplicate of its connection's descriptor while it lives (`tcp`), to pace it and to look at it.
"""

from __future__ import annotations

import dataclasses
import errno
import itertools
import math
import random
import socket
from collections import deque
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from dlc.comm import tcp
from dlc.comm.addresses import Resolver, is_loopback, is_numeric, join_address, parse_address
from dlc.comm.knock import Knock, why
from dlc.comm.lanes import (
    BULK_FRAME_BYTES_MAX,
    BULK_KEEPALIVE,
    BULK_RECEIVE_HWM,
    BULK_SEND_HWM,
    CONNECT_TIMEOUT_S,
    CONTROL_FRAME_BYTES_MAX,
    CONTROL_KEEPALIVE,
    CONTROL_RECEIVE_HWM,
    CONTROL_SEND_HWM,
    HANDSHAKE_TIMEOUT_S,
    Frames,
    Lane,
    LinkEvent,
    LinkKind,
)
from dlc.comm.security import LinkSecurity

RETRY_MIN_S = 0.1
RETRY_MAX_S = 2.0
"""A peer that comes back is found within this time; a dead one costs one SYN in as long."""
_OVERDUE_S = CONNECT_TIMEOUT_S + HANDSHAKE_TIMEOUT_S + 1.0
"""An attempt of which libzmq reports nothing at all is given up after this."""
CONTROL_PENDING_MAX = 1024
CONTROL_PENDING_BYTES_MAX = 16 << 20
"""Control messages that wait for a link to come up: half a minute of heartbeats, or a few of the largest messages."""
UNUSED_S = 30.0
"""A message that has waited for so long is dropped: whoever sent it has said it again, or needs no answer any more. And
a link that is down, and that nobody has used for so long, is let go."""

CONGESTION_CONTROL = "bbr"
"""Of bulk links to far hosts, where the system has it: random loss does not slow it down."""
NEAR_CONGESTION_CONTROLS = ("cubic", "reno")
"""The same within this host and to near ones, where the system's own may be bbr: that keeps no more on the way than the
path holds twice, which is less there than what waits while a process or a router is late. Any system allows reno."""
NEAR_RTT_S = 0.003
"""A host is near to which the shortest round trip is less: few routers are between, and next to nothing is lost."""

RENEW_BYTES_MIN = 64 << 10
"""A connection that has carried less is as good as new."""
WINDOW_BYTES_MIN = 128 << 10
WINDOW_SPARE = 1.25
"""A window of so many bytes, and of this times what is on the way at the rate of the last round, is enough."""

KNOWN_SHARE = 0.8
"""BBR that knows of less than this part of the pace begins anew. It would look for more by a quarter at a time, in each
eighth round trip; one that begins doubles its rate in each, up to the pace. A first round between far sites took 6.4 s
for 3.3, as one of twelve connections began it with a sixth of its pace: what went before had left it no more."""

FULL_BYTES = 4096
"""A message that is as long takes packets of full size: of two such the longer shows no more."""

STALLED_TIMEOUTS = 5
"""So often in a row something was sent once more, and no answer came: for 31 times the kernel's first wait, which is
the round trip and a little more, and 0.2 s at least."""

_NOT_LAST = zmq.NOBLOCK | zmq.SNDMORE
_MECHANISM_MISMATCH = 0x11000002
"""ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH; not named by pyzmq."""
_CLOSED_BY_PEER = (errno.EPIPE, errno.ECONNRESET, errno.ECONNABORTED)
_SILENT = (errno.EAGAIN, errno.EINTR)
"""Of a handshake that takes too long libzmq tells the error that its thread met last: nothing was there to read, or its
wait for something was interrupted, as where this process was suspended meanwhile."""


def set_lane_options(sock: zmq.Socket[Any], lane: Lane) -> None:
    """Limits, keepalive and time limits; the same for sockets that listen and sockets that connect."""
    control = lane == "control"
    sock.linger = 0
    sock.sndhwm = CONTROL_SEND_HWM if control else BULK_SEND_HWM
    sock.rcvhwm = CONTROL_RECEIVE_HWM if control else BULK_RECEIVE_HWM
    sock.maxmsgsize = CONTROL_FRAME_BYTES_MAX if control else BULK_FRAME_BYTES_MAX
    sock.handshake_ivl = int(HANDSHAKE_TIMEOUT_S * 1000)
    alive = CONTROL_KEEPALIVE if control else BULK_KEEPALIVE
    sock.tcp_keepalive = 1
    sock.tcp_keepalive_idle = alive.idle_s
    sock.tcp_keepalive_intvl = alive.interval_s
    sock.tcp_keepalive_cnt = alive.count
    sock.tcp_maxrt = 1000 * alive.silent_s


_MONITORED = zmq.EVENT_ALL & ~zmq.EVENT_MONITOR_STOPPED
"""To tell of its own end, a monitor waits for its reading end, for ever where that could not be made."""
_MONITORS = itertools.count()
"""Names of monitors are not used twice: those of closed links go away some time later."""


class Link:
    """The connection to one address on one lane; owned by the transport's thread.

    Raises UsageError if `address` is none.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        lane: Lane,
        *,
        routing_id: bytes,
        security: LinkSecurity | None,
        resolver: Resolver,
    ) -> None:
        self.address = address
        self.lane: Lane = lane
        self.host, self._port = parse_address(address)
        self.socket: zmq.Socket[bytes] | None = None
        self.monitor: zmq.Socket[bytes] | None = None
        self.knock: Knock | None = None
        """An attempt has failed, and this is to show why. In place of `socket` and `monitor`."""
        self.pending: deque[list[bytes]] = deque()
        self.used_at = -math.inf
        """When somebody last had a use for it."""
        self.up = False
        self.tried = False
        """Whether some attempt has failed since the link was last up (or made)."""
        self.why = ""
        """A clause for the log: why the last attempt failed, until one succeeds."""
        self.stalls = 0
        """How many connections in a row came up, and got no answer before they had carried much, or messages as long as
        what was on its way then."""
        self.starved = False
        """The last attempt failed because this process may open no more files."""
        self.broke = False
        """A connection that had been given something to carry has ended; whoever looks sets it back."""
        self.lossy = False
        """A way to a far host for which the system refuses CONGESTION_CONTROL."""
        self._rate_Bps: float | None = None
        self._last_rate_Bps = math.inf
        """The last that was not None; inf: there was none."""
        self._fd = -1
        """The connection's descriptor, which is libzmq's: it may have become another's."""
        self._tcp: socket.socket | None = None
        """Duplicate of the connection's descriptor: closed before libzmq closes its own, or it would stay open."""
        self._acked_bytes = 0
        """The most that a sample of this connection said."""
        self._given_bytes = self._longest_bytes = 0
        """What this connection was given to carry: in all, and in one message (FULL_BYTES, where that is more)."""
        self._stalled_bytes = 0
        """The latter, of those that `stalls` counts."""
        self._context = context
        self._routing_id = routing_id
        self._security = security
        self._resolver = resolver
        self._random = random.Random(routing_id + address.encode())
        self._pending_bytes = 0
        self._kept_at: deque[float] = deque()
        """Since when each of `pending` waits."""
        self._numeric = is_numeric(self.host)
        self._candidates: list[str] = [self.host] if self._numeric else []
        self._candidate = 0
        self._resolving = False
        self._failures = 0
        self._retry_at: float | None = 0.0
        self._opened_at = self._overdue_at = 0.0

    def deadline(self) -> float | None:
        """When `advance` next has something to do."""
        if self._retry_at is not None:
            return self._retry_at
        return None if self.up or self._resolving else self._overdue_at

    def unused(self, now: float) -> bool:
        """It is down, and nobody waits for it: of those that are dead there may be ever more."""
        return not self.up and now >= self.used_at + UNUSED_S

    def advance(self, now: float) -> list[LinkEvent]:
        """Start what is due: a look-up, or an attempt to connect; or give an attempt up. Drop what waited too long."""
        while self._kept_at and now >= self._kept_at[0] + UNUSED_S:
            self._unkeep()
        if self._retry_at is None:
            if not self.up and not self._resolving and now >= self._overdue_at:
                detail = "no answer" if self.knock is not None else "nothing was heard of the attempt to connect"
                return self._fail("unreached", detail, now)
            return []
        if now < self._retry_at:
            return []
        self._retry_at = None
        if self._candidates:
            return self._open(now)
        self._resolving = True
        self._resolver.ask(self.host)
        return []

    def resolved(self, hosts: list[str], problem: str, now: float) -> list[LinkEvent]:
        """The resolver's answer for `self.host`."""
        if not self._resolving:
            return []
        self._resolving = False
        self._candidates, self._candidate = hosts, 0
        if not hosts:
            return self._fail("unreached", problem, now)
        self._retry_at = None
        return self._open(now)

    def send(self, frames: Frames) -> bool:
        """Hand a message to libzmq if the link is up and has room; never blocks."""
        if self.socket is None:
            return False
        last = len(frames) - 1
        try:  # only the first frame can find no room
            for index, frame in enumerate(frames):
                self.socket.send(frame, zmq.NOBLOCK if index == last else _NOT_LAST)
        except zmq.Again:
            return False
        n_bytes = sum(map(len, frames))
        self._given_bytes += n_bytes
        self._longest_bytes = max(self._longest_bytes, min(n_bytes, FULL_BYTES))
        return True

    def send_or_keep(self, frames: Frames, now: float) -> bool:
        """Like `send`, but a message that cannot go now waits its turn; False if too much is waiting."""
        if not self.pending and self.send(frames):
            return True
        kept = [bytes(frame) for frame in frames]
        size = sum(map(len, kept))
        if len(self.pending) >= CONTROL_PENDING_MAX or self._pending_bytes + size > CONTROL_PENDING_BYTES_MAX:
            return False
        self.pending.append(kept)
        self._kept_at.append(now)
        self._pending_bytes += size
        return True

    def once_more(self) -> None:
        """Try at once where the link has failed; `tried` says again whether that failed, too."""
        self.tried = False
        if self._retry_at is not None:
            self._retry_at = 0.0

    def flush(self) -> None:
        """Send what waits, as far as there is room."""
        while self.pending and self.send(self.pending[0]):
            self._unkeep()

    def _unkeep(self) -> None:
        self._kept_at.popleft()
        self._pending_bytes -= sum(map(len, self.pending.popleft()))

    def pace(self, rate_Bps: float | None, path_s: float = 0.0) -> bool:
        """Send at most at this rate (None: without limit), now and after each reconnection.

        False if there is no connection to tell it to yet, or the system cannot. Raises ValueError for a rate that is
        not above 0. path_s: another connection's shortest round trip to this host, 0 = unknown; one of the two may have
        been busy all the time.
        """
        if rate_Bps is not None and not rate_Bps > 0:
            raise ValueError(f"a rate is above 0, not {rate_Bps}")
        begins = self._rate_Bps is None and rate_Bps is not None
        self._rate_Bps = rate_Bps
        if rate_Bps is not None:
            self._last_rate_Bps = rate_Bps
        if self._tcp is None:
            return False
        if begins:
            self._choose_congestion(path_s)
        return tcp.pace(self._tcp, rate_Bps)

    def path_s(self) -> float:
        """The shortest round trip of the last minutes, by the kernel; 0 where it is unknown."""
        if self._tcp is not None:
            found = tcp.sample(self._tcp)
        else:
            copy = tcp.duplicate(self._fd, self._candidates[self._candidate], self._port) if self.up else None
            found = tcp.sample(copy) if copy is not None else None
            if copy is not None:
                copy.close()
        return found.min_rtt_s if found is not None else 0.0

    def renew(self, now: float) -> list[LinkEvent]:
        """Connect anew if that begins better than what losses have made of this connection. For a link at rest.

        After an idle time slow start begins again in any case, but ends at the threshold that losses have set, of a
        probe, say, which overfills the path on purpose. Beyond it the window grows by a segment or so in a round trip:
        between far hosts that took a whole round. BBR does not go by the threshold, and knows what the path carries: a
        new connection would have to find that out again.
        """
        sample = self.tcp_sample()
        if self._rate_Bps is not None or sample is None or sample.queued_bytes or sample.bytes_acked < RENEW_BYTES_MIN:
            return []
        needed_bytes = max(WINDOW_BYTES_MIN, WINDOW_SPARE * self._last_rate_Bps * sample.min_rtt_s)
        if sample.threshold_bytes >= needed_bytes or is_loopback(self._candidates[self._candidate]):
            return []
        if self._tcp is None or tcp.congestion(self._tcp) == CONGESTION_CONTROL:
            return []
        self.close()
        self.broke = False  # all of it has come through
        return self._open(now)

    def revive(self, now: float) -> list[LinkEvent]:
        """Connect anew where the kernel gets no answer: it would send once more after ever longer times, and on the old
        connection only, which a firewall on the way may have forgotten. What was on its way is lost."""
        sample = self.tcp_sample()
        if sample is None or sample.timeouts < STALLED_TIMEOUTS:
            return []
        if sample.bytes_acked < RENEW_BYTES_MIN:
            self.stalls += 1
            self._stalled_bytes = max(self._stalled_bytes, self._longest_bytes)
        self.close()
        return self._open(now)

    def tcp_sample(self) -> tcp.TcpSample | None:
        """What the kernel says of the connection; None while there is none, or where it says nothing."""
        sample = tcp.sample(self._tcp) if self.up and self._tcp is not None else None
        if sample is None:
            return None
        # Segments behind a loss count as full ones: when it is repaired, the exact sum may be a little less.
        self._acked_bytes = max(self._acked_bytes, sample.bytes_acked)
        answered = not sample.queued_bytes and self._acked_bytes >= self._given_bytes
        if self._acked_bytes >= RENEW_BYTES_MIN or (answered and 0 < self._stalled_bytes <= self._longest_bytes):
            self.stalls = 0
        return dataclasses.replace(sample, bytes_acked=self._acked_bytes)

    def read_monitor(self, now: float) -> list[LinkEvent]:
        """What the monitor says, in this link's words."""
        found: list[LinkEvent] = []
        while self.monitor is not None:
            try:
                event = recv_monitor_message(self.monitor, zmq.NOBLOCK)
            except zmq.Again:
                break
            found += self._on_event(event["event"], event["value"], now)
        return found

    def close(self, linger_s: float = 0.0) -> None:
        """Close the socket; messages inside libzmq have `linger_s` to leave. The link can be opened again."""
        self.up, self.broke = False, self.broke or self._given_bytes > 0
        self._given_bytes = self._longest_bytes = 0
        if self._tcp is not None:
            self._tcp.close()
            self._tcp = None
        if self.knock is not None:
            self.knock.close()
            self.knock = None
        if self.socket is None:
            return
        self.socket.monitor(None, 0)
        if self.monitor is not None:
            self.monitor.close(0)
        self.socket.close(round(linger_s * 1000))
        self.socket = self.monitor = None

    def _open(self, now: float) -> list[LinkEvent]:
        host = self._candidates[self._candidate]
        self._opened_at, self._overdue_at, self.starved = now, now + _OVERDUE_S, False
        try:
            self.socket = self._context.socket(zmq.DEALER)
            set_lane_options(self.socket, self.lane)
            self.socket.routing_id = self._routing_id
            self.socket.immediate = 1
            self.socket.reconnect_ivl = -1
            self.socket.connect_timeout = int(CONNECT_TIMEOUT_S * 1000)
            self.socket.ipv6 = ":" in host
            if self._security is not None:
                self._security.apply_client(self.socket)
            self._watch()
            self.socket.connect(f"tcp://{join_address(host, self._port)}")
        except zmq.ZMQError as error:  # too many open files, an address that libzmq does not take
            self.starved = error.errno in (errno.EMFILE, errno.ENFILE)
            return self._fail("unreached", f"no attempt could be made: {error.strerror}", now)
        return []

    def _watch(self) -> None:
        """Make the monitor. Nothing happens on the socket before its reading end is there too."""
        assert self.socket is not None
        address = f"inproc://link-monitor-{next(_MONITORS)}"
        self.socket.monitor(address, _MONITORED)
        self.monitor = self._context.socket(zmq.PAIR)
        self.monitor.connect(address)

    def _keep_descriptor(self, fd: int) -> None:
        """libzmq has a connection, whose descriptor this is, or was."""
        host = self._candidates[self._candidate]
        if self._tcp is not None:
            self._tcp.close()
        self._tcp, self._acked_bytes = tcp.duplicate(fd, host, self._port), 0
        if self._tcp is None:
            return
        self._choose_congestion()
        if self._rate_Bps is not None:
            tcp.pace(self._tcp, self._rate_Bps)

    def _choose_congestion(self, path_s: float = 0.0) -> None:
        """When the connection opens, and when it begins to be paced.

        A near one begins anew then. What a probe lost to shallow buffers left it a small window, which grows by so
        little in a round that one such connection of twelve made all wait; and a paced one loses next to nothing. So
        does a far one that knows of too little (KNOWN_SHARE).
        """
        assert self._tcp is not None
        known_s = [rtt_s for rtt_s in (path_s, self.path_s()) if rtt_s]
        if is_loopback(self._candidates[self._candidate]) or (known_s and min(known_s) < NEAR_RTT_S):
            self.lossy = False
            tcp.begin_congestion(self._tcp, NEAR_CONGESTION_CONTROLS)
        else:
            self.lossy = not tcp.set_congestion(self._tcp, CONGESTION_CONTROL)
            if self._rate_Bps is not None and self._knows_less(KNOWN_SHARE * self._rate_Bps):
                tcp.begin_congestion(self._tcp, (CONGESTION_CONTROL,))

    def _knows_less(self, rate_Bps: float) -> bool:
        """BBR takes the path to carry less than that, by what has passed."""
        assert self._tcp is not None
        known_Bps, found = tcp.bbr_Bps(self._tcp), tcp.sample(self._tcp)
        new = found is None or found.bytes_acked < RENEW_BYTES_MIN
        return not new and known_Bps is not None and known_Bps < rate_Bps

    def _on_event(self, event: int, value: int, now: float) -> list[LinkEvent]:
        if event == zmq.EVENT_CONNECTED:
            self._fd = value
            if self.lane == "bulk":
                self._keep_descriptor(value)
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.up, self.tried, self.why, self._failures = True, False, "", 0
            return [LinkEvent(self.address, "connected", f"reached at {self._candidates[self._candidate]}")]
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return self._fail("auth_failed", f"it refused our credentials (status {value})", now)
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            if value == _MECHANISM_MISMATCH:
                return self._fail("auth_failed", "one side uses a run key and the other does not", now)
            return self._fail("handshake_failed", f"it does not speak our protocol (ZMTP error {value:#x})", now)
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            if value in _CLOSED_BY_PEER:
                return self._fail("auth_failed", "it closed the connection during the handshake: another run key?", now)
            silent = dict.fromkeys(_SILENT, "it takes connections, and says nothing")
            said = {**errno.errorcode, **silent}.get(value, value)
            return self._fail("handshake_failed", f"no handshake: {said}", now)
        if event == zmq.EVENT_DISCONNECTED:
            if self.up:
                return self._fail("disconnected", "the connection ended", now)
            return self._fail("auth_failed", "it closed the connection during the handshake: another run key?", now)
        if event == zmq.EVENT_CLOSED and not self.up:
            if now - self._opened_at >= CONNECT_TIMEOUT_S:
                return self._fail("unreached", "no answer", now)
            return self._ask_why(now)
        return []

    def _ask_why(self, now: float) -> list[LinkEvent]:
        """An attempt has failed."""
        self.close()
        self._overdue_at = now + CONNECT_TIMEOUT_S
        try:
            self.knock = Knock(self._candidates[self._candidate], self._port)
        except OSError as error:
            self.starved = error.errno in (errno.EMFILE, errno.ENFILE)
            return self._fail("unreached", f"no attempt could be made: {error.strerror}", now)
        return self.look(now)

    def look(self, now: float) -> list[LinkEvent]:
        """What has come of `knock`, if there is one."""
        error = self.knock.error() if self.knock is not None else None
        if error is None:
            return []
        return self._fail("refused" if error == errno.ECONNREFUSED else "unreached", why(error), now)

    def _fail(self, kind: LinkKind, detail: str, now: float) -> list[LinkEvent]:
        """Close, choose the next candidate and the time to try it."""
        self.close()
        if kind != "disconnected":
            self._candidate += 1
            if self._candidate < len(self._candidates):
                self._retry_at = now
                return []
            self._candidate = 0
            self._candidates = [self.host] if self._numeric else []
            self.tried, self.why = True, detail
        delay_s = min(RETRY_MIN_S * 2 ** min(self._failures, 10), RETRY_MAX_S)
        self._failures += 1
        self._retry_at = now + delay_s * self._random.uniform(0.75, 1.0)
        return [LinkEvent(self.address, kind, detail)]
