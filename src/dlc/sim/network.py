"""A virtual clock and a seeded network: what lies between two machines, and nothing of the machines themselves.

    Clock    a heap of (time, tie, act): events happen in the order of their time, ties in the order of scheduling, so
             that a seed replays exactly.
    Network  carries one message from host to host: latency of its own per direction, jitter that reorders, loss,
             duplicates, cuts per direction, partitions.

Control messages and bulk use the same paths. Bandwidth concerns bulk alone, and is the sender's uplink (world.py pulls
the next bulk message when the last one has left), so a control message is never behind bulk.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

BULK_LOSS_SHARE = 0.1
"""Bulk runs over a reliable stream: it is lost only when a connection breaks."""


class Clock:
    """Virtual time in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._tie = 0

    def at(self, when: float, act: Callable[..., None], *args: Any) -> None:
        self._tie += 1
        heapq.heappush(self._heap, (when if when > self.now else self.now, self._tie, act, args))

    def step(self) -> bool:
        """Let the next event happen; False where there is none."""
        if not self._heap:
            return False
        self.now, _, act, args = heapq.heappop(self._heap)
        self.events += 1
        act(*args)
        return True

    def run_until(self, when: float, events_max: int) -> bool:
        """Let everything happen that is due before `when`, and come to that time; False after too many events."""
        self.at(when, _nothing)
        heap, pop = self._heap, heapq.heappop
        while self.now < when:
            self.now, _, act, args = pop(heap)
            self.events += 1
            act(*args)
            if self.events > events_max:
                return False
        return True


def _nothing() -> None:
    """What happens at the time that is waited for."""


@dataclass(frozen=True)
class Weather:
    """How the network behaves for a whole schedule."""

    latency_min_s: float = 0.005
    latency_max_s: float = 0.1
    """One way; drawn once per direction of each link."""
    jitter: float = 0.3
    """Mean of the exponential part of the delay, as a share of the latency: what reorders."""
    loss: float = 0.0
    duplicates: float = 0.0
    spike: float = 0.002
    """Share of messages that are held up for up to `spike_max_s`."""
    spike_max_s: float = 0.8
    ordered: bool = False
    """On each link no message overtakes another of its lane, as on one connection; but duplicates do."""


@dataclass
class Network:
    clock: Clock
    rng: random.Random
    weather: Weather
    cuts: dict[tuple[str, str], int] = field(default_factory=dict)
    """Directions in which nothing passes, with the number of faults that hold each one cut."""
    broken: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Directions whose connections for bulk are no more, likewise."""
    delivered: int = 0
    lost: int = 0
    _breaks: Counter[tuple[str, str]] = field(default_factory=Counter)
    """How many connections for bulk have ended in each direction."""
    _latency: dict[tuple[str, str], float] = field(default_factory=dict)
    _last: dict[tuple[str, str, bool], float] = field(default_factory=dict)
    """When the last message of each link's lane arrives."""

    def carry(self, source: str, target: str, deliver: Callable[..., None], *args: Any, bulk: bool = False) -> None:
        """Call `deliver(*args)` after this message's delay; perhaps twice, perhaps never."""
        weather, rng = self.weather, self.rng
        if source == target:
            self.clock.at(self.clock.now, deliver, *args)
            return
        link = (source, target)
        loss = weather.loss * BULK_LOSS_SHARE if bulk else weather.loss
        if link in self.cuts or (bulk and link in self.broken) or (loss and rng.random() < loss):
            self.lost += 1
            return
        self.delivered += 1
        clock = self.clock
        at = clock.now + self._delay(link)
        if weather.ordered:
            at = self._last[(*link, bulk)] = max(at, self._last.get((*link, bulk), 0.0))
        if bulk:
            args = (link, self._breaks[link], deliver, *args)
            deliver = self._arrive
        clock.at(at, deliver, *args)
        if weather.duplicates and rng.random() < weather.duplicates:
            clock.at(clock.now + 3 * self._delay(link), deliver, *args)

    def _arrive(self, link: tuple[str, str], breaks: int, deliver: Callable[..., None], *args: Any) -> None:
        """Bulk, which goes down with its connection."""
        if breaks == self._breaks[link]:
            deliver(*args)
        else:
            self.lost += 1

    def _delay(self, link: tuple[str, str]) -> float:
        weather, rng = self.weather, self.rng
        latency_s = self._latency.get(link)
        if latency_s is None:
            latency_s = self._latency[link] = rng.uniform(weather.latency_min_s, weather.latency_max_s)
        delay_s = latency_s * (1 - weather.jitter * math.log(1 - rng.random()))
        if rng.random() < weather.spike:
            delay_s += rng.uniform(0, weather.spike_max_s)
        return delay_s

    # ---------------------------------------------------------------- cuts

    def cut(self, source: str, target: str) -> None:
        self.cuts[(source, target)] = self.cuts.get((source, target), 0) + 1

    def mend(self, source: str, target: str) -> None:
        left = self.cuts.get((source, target), 0) - 1
        if left > 0:
            self.cuts[(source, target)] = left
        else:
            self.cuts.pop((source, target), None)

    def end_bulk(self, source: str, target: str) -> None:
        """The connection for bulk ends, and with it what is on its way; there is none until `begin_bulk`."""
        self.broken[source, target] += 1
        self._breaks[source, target] += 1

    def begin_bulk(self, source: str, target: str) -> None:
        self.broken -= Counter({(source, target): 1})

    def two_way(self, a: str, b: str) -> bool:
        return (a, b) not in self.cuts and (b, a) not in self.cuts

    def joined(self, a: str, b: str, relays: Iterable[str]) -> bool:
        """A two-way path exists: direct, or by one of these relays."""
        return self.two_way(a, b) or any(self.two_way(a, r) and self.two_way(r, b) for r in relays if r not in (a, b))
