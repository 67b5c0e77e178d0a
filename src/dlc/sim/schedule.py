"""From a seed to a scenario: who starts how, over which network, and which faults happen when.

A `Scenario` is plain data that can be read, shortened (`dataclasses.replace`) and run again. Peers are named by number
modulo those that exist when the fault happens, so that a shortened schedule still means something.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from dlc.comm.timeouts import Timeouts
from dlc.sim.network import Weather

FAULTS = ("crash", "freeze", "cut", "loss", "restart", "join", "leave", "partition")
TIMEOUTS = Timeouts(evict_s=20.0)
"""T_evict is a third of the default: virtual seconds cost real time. All relations between the deadlines hold."""
SPLIT_S_MAX = 0.7 * TIMEOUTS.evict_s
"""Longest short cut; whether it counts as a partition is the checker's to say."""
TARGETS = ("Plan", "Result", "Held", "Promise", "Commit")
"""A targeted fault strikes after a random part of one batch of these."""
FIRST_FAULT_S = 8.0


@dataclass(frozen=True)
class Fault:
    at_s: float
    kind: str
    """One of FAULTS; crash and freeze strike at once, or in the middle of the next batch of `target`."""
    who: int = 0
    other: int = 0
    for_s: float = 0.0
    target: str = ""
    part: float = 0.0
    """Share of the batch that still goes out."""

    def __str__(self) -> str:
        text = f"{self.at_s:.2f} s: {self.kind} #{self.who}"
        text += f" -> #{self.other}" if self.kind == "cut" else ""
        text += f" for {self.for_s:.1f} s" if self.for_s else ""
        return text + (f" after {self.part:.0%} of a batch of {self.target}" if self.target else "")


@dataclass(frozen=True)
class Start:
    at_s: float
    listed: tuple[int, ...]
    """Numbers of the peers whose addresses it was given; empty: it founds."""


@dataclass(frozen=True)
class Scenario:
    seed: int
    starts: tuple[Start, ...]
    faults: tuple[Fault, ...] = ()
    weather: Weather = Weather()
    timeouts: Timeouts = TIMEOUTS
    n_chunks: int = 3
    chunk_elems: int = 8
    codec: str = "fp32"
    inner_s: float = 2.0
    uplink_Bps: float = 50_000.0
    """Slow against the toy's few hundred bytes, so that faults strike while chunks are on their way."""
    equal_states: bool = True
    """All peers start from the same first state; else they differ, and the opening decides."""

    @property
    def last_fault_s(self) -> float:
        ends = [f.at_s + f.for_s for f in self.faults] + [s.at_s for s in self.starts]
        return max(ends, default=0.0)


def scenario(seed: int, peers_min: int, peers_max: int, kinds: Sequence[str]) -> Scenario:
    """The schedule of this seed."""
    rng = random.Random(f"schedule {seed}")
    n = rng.randint(peers_min, peers_max)
    weather = Weather(
        latency_max_s=rng.choice((0.02, 0.1, 0.2)),
        jitter=rng.choice((0.1, 0.3, 1.0)),
        loss=rng.choice((0.0, 0.01, 0.05, 0.1)) if "loss" in kinds else 0.0,
        duplicates=rng.choice((0.0, 0.05)) if "loss" in kinds else 0.0,
    )
    return Scenario(
        seed=seed,
        starts=_starts(rng, n),
        faults=_faults(rng, [k for k in kinds if k != "loss"]),
        weather=weather,
        n_chunks=rng.randint(1, 5),
        chunk_elems=rng.choice((4, 8)),
        codec=rng.choice(("fp32", "fp16")),
        inner_s=rng.uniform(0.5, 3.0),
        uplink_Bps=rng.choice((5_000.0, 50_000.0, 1e6)),
        equal_states=rng.random() < 0.7,
    )


def _starts(rng: random.Random, n: int) -> tuple[Start, ...]:
    """One founder and joiners, or all at once with the same list."""
    if n > 1 and rng.random() < 0.3:
        everyone = tuple(range(n))
        return tuple(Start(rng.uniform(0, 2.0), everyone) for _ in range(n))
    joiners = (Start(rng.uniform(0, 6.0), tuple({0, rng.randrange(max(1, i))})) for i in range(1, n))
    return (Start(0.0, ()), *joiners)


def _faults(rng: random.Random, kinds: Sequence[str]) -> tuple[Fault, ...]:
    """A dozen or less in a minute or two, sometimes in bursts."""
    if not kinds:
        return ()
    at, faults = FIRST_FAULT_S, []
    pace_s = rng.choice((2.0, 6.0, 15.0))
    for _ in range(rng.randint(1, 10)):
        at += rng.expovariate(1 / pace_s)
        faults.append(_fault(rng, rng.choice(list(kinds)), at))
    return tuple(faults)


def _fault(rng: random.Random, kind: str, at: float) -> Fault:
    who, other = rng.randrange(1 << 16), rng.randrange(1 << 16)
    if kind in ("crash", "freeze") and rng.random() < 0.6:
        target, part = rng.choice(TARGETS), rng.random()
    else:
        target, part = "", 0.0
    evict_s = TIMEOUTS.evict_s
    for_s = 0.0
    if kind == "freeze":
        for_s = rng.choice((rng.uniform(0.5, evict_s / 4), rng.uniform(0.5, 3 * evict_s)))
    elif kind == "cut":
        for_s = rng.uniform(1.0, SPLIT_S_MAX)
    elif kind == "partition":
        for_s = rng.choice((rng.uniform(1.0, SPLIT_S_MAX), rng.uniform(evict_s, 4 * evict_s)))
    return Fault(at, kind, who, other, for_s, target, part)
