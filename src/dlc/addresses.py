"""Addresses as people give them: whom to ask, where to listen, what others dial. Needs neither torch nor a socket."""

from __future__ import annotations

from collections.abc import Sequence

from dlc.comm.addresses import is_loopback, is_numeric, parse_address
from dlc.errors import UsageError

PEERS_MAX = 256


def addresses_of(peers: Sequence[str] | str) -> tuple[str, ...]:
    """`HOST:PORT,HOST:PORT` or a sequence of addresses, checked; duplicates are dropped."""
    many = peers.split(",") if isinstance(peers, str) else list(peers)
    listed = tuple(dict.fromkeys(p.strip() for p in many if p.strip()))
    if len(listed) > PEERS_MAX:
        raise UsageError(f"{len(listed)} peers listed; {PEERS_MAX} are enough, all others are found through them")
    for address in listed:
        if parse_address(address)[1] == 0:
            raise UsageError(f"{address!r} has port 0: give the port that the peer printed when it started")
    return listed


def advertised(given: str, port: int) -> tuple[str, int]:
    """HOST[:PORT] as `(host, port)`: an IPv6 address without a port may stand with brackets, or without."""
    bare = given.removeprefix("[").removesuffix("]")
    return (bare, port) if is_numeric(bare) else parse_address(given if ":" in given else f"{given}:{port}")


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
