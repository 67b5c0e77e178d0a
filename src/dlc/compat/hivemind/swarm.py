"""What the classes of this package need of a peer, as an interface: `PeerSwarm` has it, and a
stand-in of tests.

Three things: *notices* (small values under a key, each with an author and an end), averages of a group of those who
show up under one key, and bytes that are held for others to fetch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from blake3 import blake3
from torch import Tensor

Parts = list[tuple[Tensor, str]]
"""Flat fp32 CPU vectors, each with the name of its codec."""
VALUES = "dht/"
"""Keys of the notices that hold values of a DHT begin so."""
NAME_CHARS_MAX = 64
"""Of a prefix within the key of a notice."""


def key_of(prefix: str) -> str:
    """A prefix as a part of such a key, which has a greatest length: a long one as its digest."""
    return prefix if len(prefix) <= NAME_CHARS_MAX and "/" not in prefix else blake3(prefix.encode()).hexdigest(16)


class Notice(NamedTuple):
    """A small value that a peer tells all others."""

    author: str
    """Peer id."""
    key: str
    value: bytes
    lives: bool = True
    """The process that wrote it is alive; not one of before, of a peer that was started again under its name."""


@dataclass(frozen=True)
class Terms:
    """On which terms a peer averages with a group."""

    target: int | None
    """Largest group; None: no limit."""
    minimum: int
    """Smallest group."""
    data: bytes
    """For the others of the group."""
    weight: float
    contributes: bool
    """False: an auxiliary peer, which only computes."""
    owns: bool
    """False: a client, which only contributes."""
    keeps_unsaid: bool
    """What the codec rounds off of this peer's vectors stays with it, on top of the mean."""
    patience_s: float
    """How long to wait for others."""
    budget_s: float
    """How long the exchange may take, once there is a group."""
    expected: Callable[[], frozenset[str]]
    """Who will come, as far as is known: the group is complete when all of these are here. Called on any thread."""
    when_given_up: Callable[[Callable[[], None]], None]
    """Have something called when the caller wants no group any more: at once, or from another thread later. It may be
    called after the end, too."""
    formed: Callable[[], None]
    """Called when there is a group, on any thread, before this peer gives it anything: nobody has a mean with this
    peer in it earlier."""


@dataclass(frozen=True)
class Outcome:
    """How it went."""

    members: tuple[str, ...]
    """Peer ids of the group, sorted; the same on all of them."""
    data: Mapping[str, bytes]
    """What each of them gave for the others."""
    missing: Mapping[str, str]
    """Who should be in the mean and is not, in part or wholly, and why."""
    report: Any
    """What dlc itself tells of it."""


class Swarm(Protocol):
    """A peer, as this package uses it. All methods may be called from any thread."""

    @property
    def id(self) -> str: ...

    @property
    def address(self) -> str:
        """HOST:PORT that others dial."""
        ...

    def present(self) -> frozenset[str]:
        """Ids of the members that are alive, mine among them."""
        ...

    def post(self, key: str, value: bytes, ttl_s: float) -> None:
        """Tell everybody; replaces my earlier notice of that key, and ends after `ttl_s` seconds."""
        ...

    def withdraw(self, key: str) -> None:
        """End my notice of that key."""
        ...

    def notices(self, prefix: str) -> list[Notice]:
        """Those that have not ended, of keys that begin so, mine among them."""
        ...

    def listen(self, changed: Callable[[], None]) -> Callable[[], None]:
        """`changed` is called, on a thread of the peer, when notices or members change; the result ends that."""
        ...

    def average(self, key: str, parts: Parts, terms: Terms) -> Outcome | None:
        """Wait for a group of those who call this with one key, and average with it.

        A part is a flat fp32 CPU vector and the name of its codec; all members have the same. In the list the mean, a
        vector of its own, takes the place of each. What was given is sent from where it lies, and others may ask for it
        after the end, too: nobody may ever change it again. None: too few came, or the caller gave up. DlcError: there
        was no group for the reason that it tells, or the exchange failed. In all cases the parts are not to be used.
        """
        ...

    def hold(self, key: str, data: bytes, ttl_s: float) -> None:
        """Keep `data` for others to fetch; replaces what was held under this key."""
        ...

    def release(self, key: str) -> None:
        """Hold it no longer."""
        ...

    def fetch(self, peer: str, key: str, n_bytes: int, timeout_s: float | None) -> bytes | None:
        """What `peer` holds; None: it is gone, or did not send it in time."""
        ...

    def leave(self) -> None: ...
