"""Addresses as people give them: whom to ask, where to listen, what others dial. Needs no torch."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Sequence

from dlc.comm.addresses import is_loopback, is_numeric, parse_address
from dlc.comm.keytext import without_keys
from dlc.errors import UsageError

PEERS_MAX = 256
LOOPBACK, ALL_V4, ALL_V6 = "127.0.0.1:0", "0.0.0.0:0", "[::]:0"


def addresses_of(peers: Sequence[str] | str) -> tuple[str, ...]:
    """`HOST:PORT,HOST:PORT` or a sequence of addresses, checked; duplicates are dropped."""
    many = peers.split(",") if isinstance(peers, str) else list(peers) if isinstance(peers, Iterable) else [peers]
    if not all(isinstance(peer, str) for peer in many):
        raise UsageError(f'peers is {without_keys(repr(peers)):.60}: give addresses, as in ["HOST:PORT"]')
    listed = tuple(dict.fromkeys(p.strip() for p in many if p.strip()))
    if len(listed) > PEERS_MAX:
        raise UsageError(f"{len(listed)} peers listed; {PEERS_MAX} are enough, all others are found through them")
    for address in listed:
        if parse_address(address)[1] == 0:
            raise UsageError(f"{address!r} has port 0: give the port that the peer printed when it started")
    return listed


def advertised(given: str, port: int) -> tuple[str, int]:
    """HOST[:PORT] as `(host, port)`: an IPv6 address without a port may stand with brackets, or without.

    UsageError: it is no address, or one that nobody can dial.
    """
    bare = given.removeprefix("[").removesuffix("]")
    if is_numeric(bare):
        host, said = bare, port
    else:
        host, said = parse_address(given if ":" in given else f"{given}:{port}")
    if is_numeric(host) and ipaddress.ip_address(host).is_unspecified:
        raise UsageError(
            f"nobody can dial {host}, which stands for all addresses of a host: advertise the name or address by which "
            "others reach this one, or leave it out to have it found out"
        )
    if said == 0 and ":" in given and not is_numeric(bare):
        raise UsageError(
            f"nobody can dial port 0: advertise {host} without a port for the one that is listened on, or the "
            "port that leads there from outside"
        )
    return host, said


def check_listen(listen: str, guarded: bool) -> None:
    """UsageError: no address, or one beyond this machine and not `guarded` by a key or said to be meant so.

    A name is looked up where it is listened on, and not before.
    """
    host, _ = parse_address(listen)
    if not guarded and is_numeric(host) and not is_loopback(host):
        raise UsageError(
            f"listening on {listen} needs a run key, or any stranger could join; give --key-file "
            "(`dlc key > run.key` makes one), or say --insecure on a network that you trust"
        )


def default_listen(peers: Sequence[str], has_key: bool, insecure: bool) -> str:
    """All interfaces where strangers are kept out, or where that was waived; else, and for local peers, loopback."""
    hosts = [parse_address(address)[0] for address in peers]
    if hosts and all(host == "localhost" or (is_numeric(host) and is_loopback(host)) for host in hosts):
        return LOOPBACK
    if has_key or insecure:
        v6 = any(is_numeric(host) and ipaddress.ip_address(host).version == 6 for host in hosts)
        return ALL_V6 if v6 else ALL_V4
    if hosts:
        raise UsageError(
            "the peers are beyond this machine: give the run key, --key-file or key= (or --insecure, on every peer)"
        )
    return LOOPBACK


def outbound_host(host: str) -> str:
    """The address of the interface that the default route uses; nothing is sent."""
    v6 = ":" in host
    target = ("2001:db8::1", 9) if v6 else ("192.0.2.1", 9)
    with socket.socket(socket.AF_INET6 if v6 else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(target)
            return str(probe.getsockname()[0])
        except OSError:
            return "::1" if v6 else "127.0.0.1"


def bulk_port_of(listen: str) -> int:
    """The port after the control port, so that a firewall needs two neighbours; a free one where that is free."""
    port = listen.rpartition(":")[2]
    return int(port) + 1 if port.isdigit() and 0 < int(port) < 65535 else 0
