"""How peers are called and where they are: `PeerID`, and multiaddresses (`/ip4/1.2.3.4/tcp/4600/p2p/ID`).

Both are strings, so that they may be printed, sorted, put into JSON and compared without knowing of these classes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from dlc.comm.addresses import is_numeric, join_address, parse_address
from dlc.comm.keytext import HIDDEN, holds_key
from dlc.compat.hivemind.refused import INSIDE, attribute_hook
from dlc.errors import UsageError

log = logging.getLogger(__name__)

HOSTS = ("ip4", "ip6", "dns", "dns4", "dns6")
OTHER_WAYS = frozenset(
    ("udp", "quic", "quic-v1", "webtransport", "webrtc", "webrtc-direct", "ws", "wss", "p2p-circuit", "unix")
)
"""Transports of multiaddresses that Hivemind's programs may name, and dlc does not speak."""


class AddressError(UsageError, ValueError):
    """None of the addresses can be used; a ValueError, too, for programs that know no error of dlc."""


class PeerID(str):
    """Name of a peer; of dlc's own kind, derived from its public key."""

    def __new__(cls, name: str | bytes) -> PeerID:
        return super().__new__(cls, name.decode() if isinstance(name, bytes) else name)

    def to_bytes(self) -> bytes:
        return self.encode()

    def to_string(self) -> str:
        return str(self)

    to_base58 = pretty = to_string

    @classmethod
    def from_base58(cls, name: str) -> PeerID:
        return cls(name)


class Multiaddr(str):
    """`/ip4/1.2.3.4/tcp/4600`, with or without `/p2p/ID`. UsageError for other protocols."""

    def __new__(cls, text: str) -> Multiaddr:
        parse_multiaddr(text)
        return super().__new__(cls, text)

    @classmethod
    def of(cls, address: str, peer: str = "") -> Multiaddr:
        """Of HOST:PORT."""
        host, port = parse_address(address)
        kind = ("ip6" if ":" in host else "ip4") if is_numeric(host) else "dns"
        return cls(f"/{kind}/{host}/tcp/{port}" + (f"/p2p/{peer}" if peer else ""))

    @property
    def address(self) -> str:
        """HOST:PORT, as dlc writes it."""
        return parse_multiaddr(self)


def parse_multiaddr(text: str) -> str:
    """HOST:PORT of a multiaddress; an address that has that form already is returned as it is. UsageError otherwise."""
    if not text.startswith("/"):
        host, port = parse_address(text)
        return join_address(host, port)
    parts = text.strip("/").split("/")
    named = dict(zip(parts[::2], parts[1::2], strict=False))
    hosts = [named[kind] for kind in HOSTS if kind in named]
    if len(parts) % 2 or not hosts or "tcp" not in named or set(named) - {*HOSTS, "tcp", "p2p"}:
        shown = HIDDEN if holds_key(text) else repr(text)
        raise UsageError(
            f"{shown} is no address of a dlc peer: write HOST:PORT or /ip4/HOST/tcp/PORT "
            "(UDP, QUIC, relays and addresses in IPFS are not offered)"
        )
    host = hosts[0]
    return join_address(*parse_address(f"[{host}]:{named['tcp']}" if ":" in host else f"{host}:{named['tcp']}"))


def listed(name: str, maddrs: Iterable[str] | None) -> list[str]:
    """The addresses of an argument, none where it is None; it is read once, as it may be a generator. TypeError, by its
    name, for anything but texts, and what is written as a multiaddress, such as one of the library of that name."""
    found = [] if maddrs is None or isinstance(maddrs, str) else list(maddrs)
    if isinstance(maddrs, str) or not all(isinstance(m, str) or str(m).startswith("/") for m in found):
        raise TypeError(f"{name} is a list of addresses")
    return found


def tcp_of(maddrs: Iterable[str]) -> list[str]:
    """HOST:PORT of each of them; those of QUIC and UDP, which Hivemind's programs list beside TCP, are left out."""
    return [parse_multiaddr(text) for text in map(str, maddrs) if not _elsewhere(text)]


def first_of(maddrs: Iterable[str], what: str) -> str:
    """HOST:PORT of the first that is TCP; UsageError, which says of `what`, where none is."""
    found = tcp_of(maddrs)
    if not found:
        raise UsageError(f"{what} has no TCP address: give /ip4/HOST/tcp/PORT")
    return found[0]


def initial_of(maddrs: Sequence[str]) -> list[str]:
    """HOST:PORT of each `initial_peers`; what dlc has no way to is logged and left out.

    AddressError where nothing is left: to begin a swarm of one's own would be a split that nobody asked for.
    """
    found = tcp_of(maddrs)
    ignored = ", ".join(text for text in map(str, maddrs) if _elsewhere(text))
    if maddrs and not found:
        raise AddressError(
            f"none of initial_peers can be used: {ignored}. dlc speaks TCP: give HOST:PORT or /ip4/HOST/tcp/PORT of a "
            "peer that runs, as its get_visible_maddrs() tells it, or no initial_peers to begin a swarm"
        )
    if ignored:
        log.warning("of initial_peers these are ignored, as dlc speaks TCP: %s", ignored)
    return found


def _elsewhere(text: str) -> bool:
    """A multiaddress of another way than plain TCP."""
    return text.startswith("/") and not OTHER_WAYS.isdisjoint(text.split("/"))


__getattr__ = attribute_hook(
    __name__,
    dict.fromkeys(("P2P", "P2PContext", "P2PDaemonError", "P2PHandlerError", "PeerInfo", "ServicerBase"), INSIDE),
)

__all__ = ["AddressError", "Multiaddr", "PeerID", "first_of", "initial_of", "listed", "parse_multiaddr", "tcp_of"]
