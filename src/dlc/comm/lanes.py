"""The two lanes: their limits, and what the transport says of them.

Control carries small messages that decide; bulk carries chunks. Each has its own sockets, ports, queues and limits.
All queues are per connection, so a peer that floods fills its own queue and then its own TCP window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Lane = Literal["control", "bulk"]
LinkKind = Literal[
    "connected", "disconnected", "refused", "unreached", "handshake_failed", "auth_failed", "other_version"
]
Frames = Sequence[bytes | memoryview]

CONNECT_TIMEOUT_S = 5.0
"""Longer than three lost SYNs (1 + 2 s), far shorter than the system's two minutes."""
HANDSHAKE_TIMEOUT_S = 10.0
"""A handshake is a few round trips and one ZAP answer by a thread that may be reducing a chunk meanwhile."""
CONTROL_SEND_HWM = 64
"""Control messages inside libzmq per link: what is lost when the link breaks."""
BULK_SEND_HWM = 2
"""Chunks inside libzmq per link: one on its way and one behind it; more would only age there."""
BULK_RECEIVE_HWM = 4
"""Chunks received and not yet polled, per link."""
CONTROL_RECEIVE_HWM = 256
"""Control messages received and not yet polled, per link."""
CONTROL_FRAME_BYTES_MAX = (4 << 20) + 4096
BULK_FRAME_BYTES_MAX = (8 << 20) + 4096
"""Longest frame, payload and header; libzmq drops a connection that announces more, before it allocates."""

FULL_PACKETS_LOST = (
    "packets of full size may be lost on the way, which small ones pass: `ip link set dev DEVICE mtu 1280`, as root on "
    "this host, makes them smaller, both ways"
)
"""What helps where a tunnel on the way takes less than both ends believe, and nobody tells them (RFC 2923)."""


@dataclass(frozen=True)
class Keepalive:
    """How the kernel finds out that the other end of a connection vanished without a word, or the way to it.

    Where something is on its way, silence for `silent_s` is enough. Else the kernel would send it once more for a
    quarter of an hour, ever more seldom, and after a cut of 45 s find some 20 s late that there is a way again.
    """

    idle_s: int
    interval_s: int
    count: int

    @property
    def silent_s(self) -> int:
        return self.idle_s + self.count * self.interval_s


CONTROL_KEEPALIVE = Keepalive(idle_s=5, interval_s=2, count=3)
BULK_KEEPALIVE = Keepalive(idle_s=15, interval_s=15, count=3)
"""Longer: a peer that computes at length takes no chunks meanwhile, which looks alike to the kernel where many are on
their way. `Link.revive` tells it apart, and is sooner. But no longer idle than that: some routers forget a connection
of which they have seen nothing for 30 s."""


@dataclass(frozen=True)
class Route:
    """The connection on which a message came in; only for `Transport.reply`."""

    lane: Lane
    routing_id: bytes


@dataclass(frozen=True)
class Incoming:
    """A message. Who sent it stands inside it: nothing here is proof of that."""

    lane: Lane
    frames: list[bytes | memoryview]
    route: Route | None
    """For `reply`, if the sender opened the connection; else None."""
    address: str | None
    """The address that we connected to, if we opened the connection; else None."""
    observed_host: str
    """The sender's numeric address as this host sees it; empty if libzmq does not know it."""


@dataclass(frozen=True)
class Writable:
    """The bulk link to `address` takes another message now."""

    address: str


@dataclass(frozen=True)
class LinkEvent:
    """Something happened to the control link to an address."""

    address: str
    kind: LinkKind
    detail: str
    """A clause for the log."""


@dataclass(frozen=True)
class Reached:
    """Somebody who holds the key, where there is one, came in by an address of this machine that others can dial. Told
    once, where all interfaces are listened on."""

    host: str
    """That address, in numbers, as the kernel says it."""


@dataclass(frozen=True)
class Broken:
    """A bulk connection to this address has ended: what it was given last may not have come through."""

    address: str


Event = Incoming | Writable | LinkEvent | Reached | Broken
