"""One TCP connection as Linux shows it: pacing, what it has delivered, how much waits in the kernel.

Everything here acts on a duplicate of a descriptor that belongs to libzmq. On systems that do not have a function it
does nothing and says so (None, or False), and callers go on without it: no error of the system leaves this file.

A duplicate keeps the connection open for as long as it lives, whatever libzmq does meanwhile. So its owner closes it
before it lets libzmq close its own, and at once when libzmq says that the connection has ended.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

AVAILABLE = sys.platform.startswith("linux")
RATE_BPS_MAX = 2.0**32 - 2
"""The kernel takes 32 bits; all ones means unlimited, and so does a rate above this (4.3 GB/s)."""

SEND_BUFFERS = Path("/proc/sys/net/ipv4/tcp_wmem")
"""Of this network namespace: least, usual and greatest size, in bytes."""

_SO_MAX_PACING_RATE = 47
_TCP_INFO, _TCP_CONGESTION, _TCP_NOTSENT_LOWAT, _TCP_CC_INFO = 11, 13, 25, 26
_NAME_BYTES = 16
"""The longest name of a congestion control, with its end."""
_UNLIMITED = 2**32 - 1
_INFO = struct.Struct("=2xBB3xB8xI4xII36xI4xII16xI16xQQ8xII8xQQQQ")
"""struct tcp_info up to tcpi_sndbuf_limited, which Linux 4.10 brought. Its fields are laid out alike on all platforms.
Those that are read: tcpi_retransmits (byte 2), tcpi_probes (3), byte 7 (one of whose bits says application-limited),
tcpi_snd_mss (16), tcpi_unacked (24), tcpi_sacked (28), tcpi_rtt (68), tcpi_snd_ssthresh (76), tcpi_snd_cwnd (80),
tcpi_total_retrans (100), tcpi_bytes_acked (120), tcpi_bytes_received (128), tcpi_notsent_bytes (144), tcpi_min_rtt
(148), tcpi_delivery_rate (160), tcpi_busy_time (168), tcpi_rwnd_limited (176), tcpi_sndbuf_limited (184)."""
_BBR_INFO = struct.Struct("=IIIII")
"""struct tcp_bbr_info: its rate in bytes/s, low and high half, its least round trip in us, and two gains."""
_APP_LIMITED = 0x01 if sys.byteorder == "little" else 0x80
_INFO_BYTES = 256
"""More than any kernel's struct has so far; what comes after tcpi_sndbuf_limited is not looked at."""
_NO_RTT_US = 2**32 - 1
_NO_THRESHOLD = 2**31 - 1
BBR_SHARE = 0.99
"""Of what it saw go through, BBR sends this much, so that queues drain. On a paced connection it sees the pace go."""
UNSENT_S, UNSENT_BYTES_MIN = 0.25, 128 << 10
"""Of a paced connection the kernel holds no more unsent than it sends in this time, and at least so much. What it would
take at once, a send buffer for each connection, is encoded at once, and whatever else a host has to do waits for it."""
_KEPT_WINDOW = 0.75
"""Of the congestion window becomes the threshold when a connection has idled, if that is more."""


@dataclass(frozen=True, slots=True)
class TcpSample:
    """What the kernel says of one connection: of our sending direction, where nothing else is said."""

    bytes_acked: int
    """Since the connection was made, encryption and framing included. What came behind a lost segment counts as soon as
    the other side has it: else it would seem to come all at once when the loss is repaired."""
    rtt_s: float
    """Smoothed; what waits in queues on the way is in it."""
    min_rtt_s: float
    """Smallest of the last minutes: the path without queues. 0 before the first."""
    delivery_Bps: float
    """Rate at which the other side received most recently; where `app_limited`, maybe that of a busier time before."""
    app_limited: bool
    """Whether that rate was limited by us having nothing to send."""
    busy_s: float
    """Time in which something was sent and not acknowledged yet, or waited in the kernel to be sent."""
    retransmits: int
    """Segments sent once more."""
    buffered_s: float = 0.0
    """Part of `busy_s` in which a buffer was full, of this host for what it sends or of the other for what it receives,
    and the path could have taken more."""
    bytes_received: int = 0
    """From the other side, since the connection was made."""
    queued_bytes: int = 0
    """Not acknowledged yet, or not even sent."""
    timeouts: int = 0
    """How often in a row something was sent once more after a time without any answer; each is twice as long. Where the
    host no longer has the address that the connection began with, it only tries to."""
    threshold_bytes: float = math.inf
    """Where slow start ends after an idle time (ssthresh); inf: nowhere, until something is lost or waits. BBR has one
    as soon as it knows what the path holds, and does not go by it."""
    sacked_bytes: int = 0
    """Part of `bytes_acked` that came behind a lost segment, as if all were full ones."""


@dataclass(frozen=True, slots=True)
class WaySample:
    """What the kernel says of several connections to one host, together."""

    bytes_acked: int
    """By all of them, and by those whose place they took: it only grows."""
    rtt_s: float
    """Smoothed, of the connection whose packets wait least, as is the next."""
    min_rtt_s: float


def duplicate(fd: int, host: str, port: int) -> socket.socket | None:
    """A duplicate of the connected socket `fd`, if it leads to the numeric address `host`:`port`.

    `fd` is what an event of the past says: it may be closed by now, or be the number of another file, hence the look
    at where it leads. The caller closes the duplicate. It shares all flags with `fd`: nothing but the functions below
    may be done with it.
    """
    if not AVAILABLE:
        return None
    try:
        number = os.dup(fd)
    except OSError:
        return None
    try:
        copy = socket.socket(fileno=number)
    except OSError:  # no socket any more
        os.close(number)
        return None
    if peer_of(copy) == (_address(host), port):
        return copy
    copy.close()
    return None


class Spare:
    """A descriptor held in reserve: it becomes a duplicate for a moment, also when no more files may be opened."""

    def __init__(self) -> None:
        self._rest = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._spare = os.dup(self._rest.fileno())

    @contextlib.contextmanager
    def duplicate(self, fd: int) -> Iterator[socket.socket | None]:
        """A duplicate of `fd` inside the `with`; None if it is no connected TCP socket (any more)."""
        copy = None
        try:
            with contextlib.suppress(OSError):
                os.dup2(fd, self._spare, inheritable=False)
                copy = socket.socket(fileno=self._spare)
            yield copy if copy is not None and peer_of(copy) is not None else None
        finally:
            if copy is not None:
                copy.detach()
            os.dup2(self._rest.fileno(), self._spare, inheritable=False)

    def close(self) -> None:
        os.close(self._spare)
        self._rest.close()


def peer_of(sock: socket.socket) -> tuple[str, int] | None:
    """Numeric host and port that it leads to; None where it is no connected TCP socket."""
    try:
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
            return None
        name = sock.getpeername()
        return _address(name[0]), int(name[1])
    except OSError:
        return None


def _address(host: str) -> str:
    """In one form: without a scope, IPv4 as such where it came mapped into IPv6."""
    plain = host.partition("%")[0].removeprefix("::ffff:")
    with contextlib.suppress(ValueError):
        return str(ip_address(plain))
    return plain


def sample(sock: socket.socket) -> TcpSample | None:
    """What the kernel says now; None where it says nothing, or too little (before Linux 4.10)."""
    if not AVAILABLE:
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _INFO_BYTES)
    except OSError:
        return None
    if len(info) < _INFO.size:
        return None
    (
        timeouts,
        probes,
        flags,
        mss,
        unacked,
        sacked,
        rtt_us,
        threshold,
        window,
        retransmits,
        acked,
        received,
        unsent_bytes,
        min_rtt_us,
        delivery_Bps,
        busy_us,
        receiver_us,
        sender_us,
    ) = _INFO.unpack_from(info)
    return TcpSample(
        bytes_acked=acked + sacked * mss,
        rtt_s=rtt_us / 1e6,
        min_rtt_s=0.0 if min_rtt_us == _NO_RTT_US else min_rtt_us / 1e6,
        delivery_Bps=float(delivery_Bps),
        app_limited=bool(flags & _APP_LIMITED),
        busy_s=busy_us / 1e6,
        retransmits=retransmits,
        buffered_s=(receiver_us + sender_us) / 1e6,
        bytes_received=received,
        queued_bytes=unacked * mss + unsent_bytes,
        timeouts=max(timeouts, probes),
        threshold_bytes=max(threshold, _KEPT_WINDOW * window) * mss if threshold < _NO_THRESHOLD else math.inf,
        sacked_bytes=sacked * mss,
    )


def send_buffer_bytes() -> int | None:
    """How large the kernel lets the send buffer of a connection of this host become; None where it does not tell.

    What is on the way stays in it, with what the kernel needs beside, and libzmq fills it up once a third is free: so
    up to two thirds of it are on the way.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(SEND_BUFFERS.read_text(encoding="ascii").split()[2])
    return None


def pace(sock: socket.socket, rate_Bps: float | None) -> bool:
    """Let the kernel send at this rate at most, None: as fast as it can. False where the system cannot.

    It is the rate of what `TcpSample.bytes_acked` counts; where the interface has the queueing discipline fq, headers
    count too, which makes 4 % less. The first ten segments of a connection are not paced. To be told anew when the
    congestion control changes. How much waits unsent in the kernel is limited with it (UNSENT_S). Raises ValueError for
    a rate that is not above 0.
    """
    if rate_Bps is not None and not rate_Bps > 0:
        raise ValueError(f"a rate is above 0, not {rate_Bps}")
    if rate_Bps is not None and congestion(sock) == "bbr":
        rate_Bps /= BBR_SHARE
    value = _UNLIMITED if rate_Bps is None or rate_Bps > RATE_BPS_MAX else max(1, int(rate_Bps))
    unsent_bytes = _UNLIMITED if value == _UNLIMITED else max(UNSENT_BYTES_MIN, int(UNSENT_S * value))
    _set(sock, socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, struct.pack("=I", unsent_bytes))
    return _set(sock, socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=I", value))


def set_congestion(sock: socket.socket, name: str) -> bool:
    """Use this congestion control, where the system has it and lets us; otherwise the default stays, and False."""
    return _set(sock, socket.IPPROTO_TCP, _TCP_CONGESTION, name.encode())


def congestion(sock: socket.socket) -> str:
    """The congestion control in use; empty where the system does not tell."""
    if not AVAILABLE:
        return ""
    with contextlib.suppress(OSError):
        return sock.getsockopt(socket.IPPROTO_TCP, _TCP_CONGESTION, _NAME_BYTES).rstrip(b"\0").decode()
    return ""


def bbr_Bps(sock: socket.socket) -> float | None:
    """The rate, in bytes/s, that BBR takes this connection's path to carry: the greatest at which anything went through
    in its last ten round trips. None where it has another congestion control, or the system does not tell."""
    if congestion(sock) != "bbr":
        return None
    with contextlib.suppress(OSError, struct.error):
        low, high, *_ = _BBR_INFO.unpack_from(sock.getsockopt(socket.IPPROTO_TCP, _TCP_CC_INFO, _BBR_INFO.size))
        return float((high << 32) + low)
    return None


def begin_congestion(sock: socket.socket, names: Sequence[str]) -> bool:
    """Use the first of these congestion controls that the system lets us, as a new connection does; False: none.

    What losses made of the threshold at which slow start ends (ssthresh) is forgotten. Only the beginning of BBR sets
    it anew, and setting what is set already is no beginning; hence by way of two others. Where the system has no BBR,
    the threshold stays.
    """
    for name in ("reno", "bbr"):
        set_congestion(sock, name)
    return any(set_congestion(sock, name) for name in names)


def _set(sock: socket.socket, level: int, option: int, value: bytes) -> bool:
    if not AVAILABLE:
        return False
    with contextlib.suppress(OSError):
        sock.setsockopt(level, option, value)
        return True
    return False
