"""The process behind `_wan.Wan`: makes the namespaces, and moves every packet between them when its time has come.

It is started with a seed and the sites, answers with its file descriptors of the namespaces, then carries out one JSON
line after another from its standard input (a socket), each of which it answers. When that is closed it kills whatever
runs in the namespaces, and ends.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import math
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from _wan import Site, address_of

MTU_BYTES = 1500
BUFFER_S = 0.05
"""What a link's buffer holds at the link's rate, as a common router does."""
BUFFER_BYTES_MIN = 64 * 1024
"""And at least one super-packet, or a slow link would pass none."""
QUEUE_PACKETS = 4096
"""Packets that an interface keeps for the relay: more than TCP has on the way here."""
READ_BYTES_MAX = 10 + 65_535
READS_AT_ONCE = 16
"""Packets taken from one interface before those that are due are handed on."""
BEAT_S = 0.05
"""The longest sleep, so that it is seen if the machine lets this process sleep longer than it wants to."""
ROUND_S = 0.01
"""What one round of the loop may take, besides its sleep; what is more is lateness. Common is a tenth of that."""

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_OFFLOAD_CHECKSUM_AND_TSO4 = 0x01 | 0x02
_VNET = struct.Struct("=BBHHHH")
"""flags, kind of segmentation, header length, segment payload, checksum start and offset (struct virtio_net_hdr)."""


@dataclass
class Pipe:
    """One direction of a site's link: packets leave one after another at its rate."""

    mbit: float
    free_at: float = 0.0
    """When all that was let in will have left."""

    def admit(self, now: float, packet: Packet) -> tuple[float, int]:
        """Take in as many segments as the buffer holds: when they have passed, and how many these are."""
        if not self.mbit:
            return now, packet.segments
        bytes_per_s = self.mbit * 125_000
        start = max(now, self.free_at)
        room = max(BUFFER_S * bytes_per_s, BUFFER_BYTES_MIN) - (start - now) * bytes_per_s
        fitting = min(packet.segments, math.ceil(max(0.0, room) / packet.segment_bytes))
        if fitting:
            self.free_at = start + min(packet.wire_bytes, fitting * packet.segment_bytes) / bytes_per_s
        return self.free_at, fitting


@dataclass
class Port:
    """The relay's end of one site."""

    site: Site
    tun: int
    space: int
    """File descriptors of the interface and of the namespace."""
    up: Pipe
    down: Pipe
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("sent", "received", "lost", "full", "cut"), 0)
    )
    """Bytes, then segments: lost by chance, dropped by full buffers, cut."""


class Packet:
    """An IPv4 packet as the kernel hands it over: a virtio header, then one segment or many in one."""

    __slots__ = ("data", "header_bytes", "payload_bytes", "segment_bytes", "segments", "source", "target", "wire_bytes")

    def __init__(self, data: bytes, source: int) -> None:
        self.data, self.source = data, source
        self.target = data[_VNET.size + 19] - 1
        _, kind, _, step, start, _ = _VNET.unpack_from(data)
        length = len(data) - _VNET.size
        self.segments, self.header_bytes, self.payload_bytes = 1, length, 0
        if kind:
            self.header_bytes = start + 4 * (data[_VNET.size + start + 12] >> 4)
            self.payload_bytes = length - self.header_bytes
            self.segments = max(1, -(-self.payload_bytes // step))
        self.segment_bytes = self.header_bytes + (step if kind else 0)
        self.wire_bytes = length + (self.segments - 1) * self.header_bytes

    def part(self, first: int, count: int) -> Packet:
        """Segments [first, first + count) as a packet of their own."""
        if count == self.segments:
            return self
        step = self.segment_bytes - self.header_bytes
        begin, end = first * step, min((first + count) * step, self.payload_bytes)
        head = bytearray(self.data[: _VNET.size + self.header_bytes])
        if count == 1:
            head[1:6] = bytes(5)  # no segmentation any more; the kernel still completes the checksum
        ip, tcp = _VNET.size, _VNET.size + 4 * (head[_VNET.size] & 15)
        struct.pack_into(">H", head, ip + 2, self.header_bytes + end - begin)
        struct.pack_into(">I", head, tcp + 4, (struct.unpack_from(">I", head, tcp + 4)[0] + begin) & 0xFFFFFFFF)
        if end < self.payload_bytes:
            head[tcp + 13] &= ~0x09  # FIN and PSH belong to the last segment
        struct.pack_into(">H", head, ip + 10, 0)
        words = sum(struct.unpack_from(f">{(tcp - ip) // 2}H", head, ip))
        words = (words & 0xFFFF) + (words >> 16)
        struct.pack_into(">H", head, ip + 10, ~((words & 0xFFFF) + (words >> 16)) & 0xFFFF)
        payload = _VNET.size + self.header_bytes
        return Packet(bytes(head) + self.data[payload + begin : payload + end], self.source)


class Relay:
    """Moves packets between the ports at the times that the model gives."""

    def __init__(self, sites: Sequence[Site], control: socket.socket, rng: random.Random) -> None:
        self.ports = [_open_port(site, address_of(i)) for i, site in enumerate(sites)]
        self.control, self.rng = control, rng
        self.delays_s: dict[tuple[int, int], float] = {}
        self.cuts: set[tuple[int, int]] = set()
        self.late_s = 0.0
        """In sum, how long it should have run and did not: while it lasts no link carries what it should."""
        self._due: list[tuple[float, int, Callable[[Packet, float], None], Packet]] = []
        self._serial = 0

    def run(self) -> None:
        """Until the control socket is closed from the other side."""
        by_fd = {port.tun: index for index, port in enumerate(self.ports)}
        watched = [self.control.fileno(), *by_fd]
        begun = time.monotonic()
        while True:
            wait = min(BEAT_S, max(0.0, self._due[0][0] - begun)) if self._due else BEAT_S
            for fd in select.select(watched, [], [], wait)[0]:
                if fd in by_fd:
                    self._take(by_fd[fd])
                elif not self._command():
                    return
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                when, _, act, packet = heapq.heappop(self._due)
                act(packet, when)
            before, begun = begun, time.monotonic()
            self.late_s += max(0.0, begun - before - wait - ROUND_S)

    def _at(self, when: float, act: Callable[[Packet, float], None], packet: Packet) -> None:
        """`act(packet, when)` at that time, or as soon as possible after it."""
        self._serial += 1
        heapq.heappush(self._due, (when, self._serial, act, packet))

    def _take(self, index: int) -> None:
        port = self.ports[index]
        for _ in range(READS_AT_ONCE):
            try:
                data = os.read(port.tun, READ_BYTES_MAX)
            except BlockingIOError:
                return
            if len(data) < _VNET.size + 20 or data[_VNET.size] >> 4 != 4:
                continue  # IPv6's announcements
            packet = Packet(data, index)
            if 0 <= packet.target < len(self.ports):
                self._leave(packet, port)

    def _leave(self, packet: Packet, port: Port) -> None:
        """Through the sender's uplink, then lost or on its way."""
        passed, fitting = port.up.admit(time.monotonic(), packet)
        port.counts["full"] += packet.segments - fitting
        if not fitting:
            return
        packet = packet.part(0, fitting)
        port.counts["sent"] += packet.wire_bytes
        away = passed + self._delay_s(packet.source, packet.target)
        for piece in self._survivors(packet, port):
            self._at(away, self._arrive, piece)

    def _survivors(self, packet: Packet, port: Port) -> list[Packet]:
        if not port.site.loss:
            return [packet]
        kept = [self.rng.random() >= port.site.loss for _ in range(packet.segments)]
        port.counts["lost"] += kept.count(False)
        pieces, first = [], 0
        for index, keep in enumerate([*kept, False]):
            if not keep:
                if index > first:
                    pieces.append(packet.part(first, index - first))
                first = index + 1
        return pieces

    def _delay_s(self, a: int, b: int) -> float:
        both = (self.ports[a].site.delay_ms + self.ports[b].site.delay_ms) / 1000
        return self.delays_s.get((min(a, b), max(a, b)), both)

    def _arrive(self, packet: Packet, when: float) -> None:
        """At the receiver's downlink. A relay that is late does not make the link lose the time."""
        port = self.ports[packet.target]
        if (packet.source, packet.target) in self.cuts:
            port.counts["cut"] += packet.segments
            return
        passed, fitting = port.down.admit(when, packet)
        port.counts["full"] += packet.segments - fitting
        if fitting:
            self._at(passed, self._deliver, packet.part(0, fitting))

    def _deliver(self, packet: Packet, when: float) -> None:
        port = self.ports[packet.target]
        port.counts["received"] += packet.wire_bytes
        try:
            os.write(port.tun, packet.data)
        except BlockingIOError:
            port.counts["full"] += packet.segments

    def _command(self) -> bool:
        """Carry out one line from the owner; False once it is gone."""
        line = b""
        while not line.endswith(b"\n"):
            byte = self.control.recv(1)
            if not byte:
                return False
            line += byte
        what, *numbers = json.loads(line)
        answer: object = None
        if what in ("cut", "heal"):
            a, b = numbers
            (self.cuts.update if what == "cut" else self.cuts.difference_update)([(a, b), (b, a)])
        elif what == "rate":
            port = self.ports[numbers[0]]
            port.up.mbit, port.down.mbit = numbers[1:]
            port.up.free_at = port.down.free_at = 0.0
        elif what == "delay":
            a, b, one_way_ms = numbers
            self.delays_s[min(a, b), max(a, b)] = one_way_ms / 1000
        elif what == "stats":
            answer = [port.counts for port in self.ports]
        elif what == "late":
            answer = self.late_s
        self.control.sendall(json.dumps(answer).encode() + b"\n")
        return True

    def kill_sites(self) -> None:
        """End every process in the namespaces."""
        spaces = {os.fstat(port.space).st_ino for port in self.ports}
        for name in os.listdir("/proc"):
            try:
                if name.isdigit() and int(name) != os.getpid() and os.stat(f"/proc/{name}/ns/net").st_ino in spaces:
                    os.kill(int(name), signal.SIGKILL)
            except OSError:  # it ended while we looked
                continue


def _open_port(site: Site, address: str) -> Port:
    """A new namespace, in which this process then is, with the interface `wan0`."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    space = os.open("/proc/self/ns/net", os.O_RDONLY)
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", b"wan0", _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR))
    fcntl.ioctl(tun, _TUNSETOFFLOAD, _OFFLOAD_CHECKSUM_AND_TSO4)
    for words in (
        "link set lo up",
        f"link set wan0 mtu {MTU_BYTES} txqueuelen {QUEUE_PACKETS} up",
        f"address add {address}/24 dev wan0",
    ):
        subprocess.run(["ip", *words.split()], check=True)
    return Port(site, tun, space, Pipe(site.up_mbit), Pipe(site.down_mbit))


def main(seed: str, sites: str) -> None:
    control = socket.socket(fileno=os.dup(0))
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    relay = Relay([Site(**s) for s in json.loads(sites)], control, random.Random(int(seed)))
    ctypes.CDLL(None).setns(home, _CLONE_NEWNET)  # back from the last site
    control.sendall(json.dumps([port.space for port in relay.ports]).encode() + b"\n")
    try:
        relay.run()
    finally:
        relay.kill_sites()


if __name__ == "__main__":
    main(*sys.argv[1:])
