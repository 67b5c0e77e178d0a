"""Text addresses, and host names to numeric ones without stopping the transport.

An address is `host:port`, `[v6]:port` or `name:port`. libzmq would look a name up inside its I/O thread, which stops
*all* links for as long as the name server is silent, and it would only ever try the first answer. So names are looked
up here, each in a short daemon thread, and the link tries every answer in turn.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections import deque
from collections.abc import Callable

from dlc.comm.keytext import HIDDEN, holds_key, is_key
from dlc.errors import UsageError

ADDRESS_CHARS_MAX = 300
"""A DNS name has at most 253 characters; the rest is brackets, zone and port."""
CANDIDATES_MAX = 16
"""Numeric addresses tried for one name; a name with more is no host of ours."""
JOIN_S = 0.2
"""How long `close` waits for all look-ups together; one inside the C library cannot be interrupted, and its thread is a
daemon."""


def parse_address(address: str) -> tuple[str, int]:
    """`(host, port)`, the host without brackets. Raises UsageError that says what an address looks like."""
    host, colon, port_text = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    good_port = port_text.isascii() and port_text.isdigit() and int(port_text[:6]) <= 65535 and len(port_text) <= 5
    good_host = host and (bracketed or ":" not in host) and not any(c.isspace() or c in "/;[]@" for c in host)
    if not (colon and good_port and good_host) or len(address) > ADDRESS_CHARS_MAX or is_key(host):
        raise UsageError(f"{_shown(address)}; write HOST:PORT, or [V6]:PORT for IPv6, with a port up to 65535")
    return host, int(port_text)


def _shown(address: str) -> str:
    """What is wrong with it."""
    if holds_key(address):
        return f"what is given as an address looks like a run key {HIDDEN}: that belongs into --key-file, or key="
    return f"{address[:80]!r} is no address"


def join_address(host: str, port: int) -> str:
    """The inverse of `parse_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_numeric(host: str) -> bool:
    """Whether `host` needs no look-up."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether the numeric `host` can be reached from this machine only."""
    return ipaddress.ip_address(host).is_loopback


def leads_here(host: str) -> bool:
    """Whether others can dial the numeric `host`, an address of this machine, as it stands: beyond the machine, and
    without a zone, which has another name on each host."""
    address = ipaddress.ip_address(host)
    zoned = address.version == 6 and address.is_link_local
    return not (address.is_loopback or address.is_unspecified or zoned)


def on_this_host(address: str) -> bool:
    """Whether no link lies between: what its connections carry is a matter of processors, and pacing only costs.

    False for what is no address: it leads nowhere.
    """
    try:
        host, _ = parse_address(address)
    except UsageError:
        return False
    return is_numeric(host) and is_loopback(host)


def look_up(host: str) -> list[str]:
    """Numeric addresses of `host`, best first, without duplicates. Blocks; raises OSError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    numeric = (str(sockaddr[0]) for family, *_, sockaddr in found if family in (socket.AF_INET, socket.AF_INET6))
    return list(dict.fromkeys(numeric))[:CANDIDATES_MAX]


class Resolver:
    """Looks names up beside the thread that owns it; `wake` is called (from the other thread) for every answer."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._answers: deque[tuple[str, list[str], str]] = deque()
        self._running: dict[str, threading.Thread] = {}

    def ask(self, host: str) -> None:
        """Start a look-up; one at a time per name."""
        if host in self._running:
            return
        thread = threading.Thread(target=self._run, args=(host,), name="dlc-resolver", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # there may be no more threads for now
            self._answers.append((host, [], f"the name cannot be looked up: {error}"))
            self._wake()
        else:
            self._running[host] = thread

    def answers(self) -> list[tuple[str, list[str], str]]:
        """What has been found since the last call: `(host, numeric addresses, why there are none)`."""
        found = []
        while self._answers:
            answer = self._answers.popleft()
            self._running.pop(answer[0], None)
            found.append(answer)
        return found

    def _run(self, host: str) -> None:
        try:
            answer = (host, look_up(host), "the name has no address")
        except (OSError, UnicodeError) as error:
            answer = (host, [], f"the name cannot be looked up: {error}")
        self._answers.append(answer)
        self._wake()

    def close(self) -> None:
        """Wait shortly for look-ups that are nearly done; what is left can do no harm."""
        for thread in self._running.values():
            thread.join(JOIN_S / len(self._running))
