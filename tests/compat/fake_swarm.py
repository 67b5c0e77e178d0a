"""Peers of one process without sockets: what `dlc.compat.hivemind` needs of a swarm, over dicts and one lock.

town = Town()
dht = hivemind.DHT(start=True, p2p=town.peer())
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dlc.compat.hivemind.swarm import Notice, Outcome, Parts, Terms
from dlc.errors import RoundTimeout, SwarmClosed

HASTE_S = 0.05
"""A group is formed so long before the first would give up."""
LOOK_S = 0.02
"""Deadlines are looked at this often; everything else is told."""


@dataclass
class Seat:
    peer: str
    terms: Terms
    until: float
    group: Group | None = None
    given_up: bool = False


@dataclass
class Group:
    """Those who met; the last to give its vectors computes the mean of all."""

    town: Town
    members: tuple[str, ...]
    data: Mapping[str, bytes]
    contributes: Mapping[str, bool]
    given: dict[str, tuple[list[Tensor], float]] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    outcome: Outcome | None = None
    means: list[Tensor] = field(default_factory=list)

    def finish(self) -> None:
        """Under the lock: the mean, if all are here who will come."""
        gone = self.left | {peer for peer in self.members if peer not in self.town.peers}
        if self.outcome is not None or not self.given or set(self.members) - gone - set(self.given):
            return
        weights = {peer: weight for peer, (_, weight) in sorted(self.given.items()) if self.contributes[peer]}
        total = sum(weights.values())
        n_parts = len(next(iter(self.given.values()))[0])
        for part in range(n_parts):
            vectors = [(self.given[peer][0][part].double(), weight) for peer, weight in weights.items()]
            self.means.append((torch.stack([v * w for v, w in vectors]).sum(0) / total).float())
        missing = {p: "left" for p in gone if self.contributes[p]}
        self.outcome = Outcome(self.members, self.data, missing, None)
        self.town.changed()


class Town:
    """All peers, and what they share."""

    def __init__(self) -> None:
        self.lock = threading.Condition(threading.RLock())
        self.peers: dict[str, FakeSwarm] = {}
        self.posted: dict[tuple[str, str], tuple[bytes, float, FakeSwarm]] = {}
        """Value, end and process by author and key."""
        self.waiting: dict[str, list[Seat]] = {}
        self.rounds: list[tuple[str, tuple[str, ...]]] = []
        """Key and members of every group."""
        self.failing: Callable[[str], bool] = lambda peer: False
        """Whether the all-reduce of this peer fails."""
        self._numbers = itertools.count()

    def peer(self) -> FakeSwarm:
        with self.lock:
            name = f"peer{next(self._numbers):04d}"
            self.peers[name] = FakeSwarm(self, name)
            self.changed()
            return self.peers[name]

    def restart(self, name: str) -> FakeSwarm:
        """Another process under that name, before anybody has seen that the one before is dead."""
        with self.lock:
            before, self.peers[name] = self.peers[name], FakeSwarm(self, name)
            self.changed()
        for listener in tuple(before.listeners):
            listener()  # its threads end
        return self.peers[name]

    def changed(self) -> None:
        with self.lock:
            self.lock.notify_all()
            listeners = [listener for peer in self.peers.values() for listener in peer.listeners]
        for listener in listeners:
            listener()

    def wait_for(self, condition: Callable[[], object], timeout_s: float | None) -> None:
        """Under the lock."""
        end = time.monotonic() + (1e9 if timeout_s is None else timeout_s)
        while not condition() and (left := end - time.monotonic()) > 0:
            self.lock.wait(min(left, LOOK_S))


class FakeSwarm:
    """One of them."""

    def __init__(self, town: Town, name: str) -> None:
        self.town, self.id = town, name
        self.address = "127.0.0.1:4600"
        self.listeners: list[Callable[[], None]] = []
        self.held: dict[str, bytes] = {}

    def present(self) -> frozenset[str]:
        return frozenset(self.town.peers)

    def post(self, key: str, value: bytes, ttl_s: float) -> None:
        with self.town.lock:
            self._check()
            self.town.posted[self.id, key] = value, time.monotonic() + ttl_s, self
        self.town.changed()

    def withdraw(self, key: str) -> None:
        with self.town.lock:
            if self._lives():
                self.town.posted.pop((self.id, key), None)
        self.town.changed()

    def notices(self, prefix: str) -> list[Notice]:
        with self.town.lock:
            self._check()
            now = time.monotonic()
            return [
                Notice(author, key, value, writer._lives())
                for (author, key), (value, until, writer) in self.town.posted.items()
                if key.startswith(prefix) and until > now
            ]

    def listen(self, changed: Callable[[], None]) -> Callable[[], None]:
        self.listeners.append(changed)
        return lambda: self.listeners.remove(changed)

    def average(self, key: str, parts: Parts, terms: Terms) -> Outcome | None:
        town, seat = self.town, Seat(self.id, terms, time.monotonic() + terms.patience_s)
        with town.lock:
            self._check()
            town.waiting.setdefault(key, []).append(seat)
            terms.when_given_up(lambda: self._give_up(seat))
            town.changed()
            town.wait_for(lambda: seat.group or self._form(key, seat) or self._over(seat), None)
            group = seat.group
            if group is None:
                town.waiting[key].remove(seat)
                return None
            terms.formed()
            if fails := town.failing(self.id):
                group.left.add(self.id)
            else:
                group.given[self.id] = ([vector.clone() for vector, _ in parts], terms.weight)
            group.finish()
            if fails:
                raise RoundTimeout("this all-reduce is made to fail")
            town.wait_for(lambda: group.outcome, terms.budget_s)
            if group.outcome is None:
                raise RoundTimeout("the others did not come")
        if terms.contributes:
            for index, ((vector, codec), mean) in enumerate(zip(parts, group.means, strict=True)):
                parts[index] = mean.clone().view(vector.shape), codec
        return group.outcome

    def _over(self, seat: Seat) -> bool:
        return seat.given_up or time.monotonic() >= seat.until

    def _give_up(self, seat: Seat) -> None:
        with self.town.lock:
            seat.given_up = True
        self.town.changed()

    def _form(self, key: str, seat: Seat) -> bool:
        """Under the lock: a group of those who wait, if it is complete, or its time has come."""
        terms, waiting = seat.terms, self.town.waiting[key]
        here = [other for other in waiting if not other.given_up]
        full = terms.target is not None and len(here) >= terms.target
        complete = terms.expected() <= {other.peer for other in here}
        if len(here) < terms.minimum or not any(other.terms.owns for other in here):
            return False
        if not (full or complete or time.monotonic() >= seat.until - HASTE_S):
            return False
        taken = sorted(here[: terms.target], key=lambda other: other.peer)
        members = tuple(other.peer for other in taken)
        data = {other.peer: other.terms.data for other in taken}
        group = Group(self.town, members, data, {other.peer: other.terms.contributes for other in taken})
        for other in taken:
            other.group = group
            waiting.remove(other)
        self.town.rounds.append((key, members))
        self.town.changed()
        return seat.group is not None

    def hold(self, key: str, data: bytes, ttl_s: float) -> None:
        self.held[key] = data

    def release(self, key: str) -> None:
        self.held.pop(key, None)

    def fetch(self, peer: str, key: str, n_bytes: int, timeout_s: float | None) -> bytes | None:
        with self.town.lock:
            other = self.town.peers.get(peer)
            return other.held.get(key) if other is not None else None

    def leave(self) -> None:
        with self.town.lock:
            if self._lives():
                del self.town.peers[self.id]
            for waiting in self.town.waiting.values():
                waiting[:] = [seat for seat in waiting if seat.peer != self.id]
        self.town.changed()
        for listener in tuple(self.listeners):
            listener()

    def _lives(self) -> bool:
        return self.town.peers.get(self.id) is self

    def _check(self) -> None:
        if not self._lives():
            raise SwarmClosed("the peer has left")
