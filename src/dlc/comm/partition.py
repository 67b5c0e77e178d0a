"""Who should own how much of a vector, by what each one's link carries, and how fast each connection has to be.

Member i owns the share w_i. With C contributors, R receivers of the result, and all sizes in vectors, it

    sends     s_i + w_i (R - r_i - s_i)      its contribution to the other owners, its results to the other receivers
    receives  r_i + w_i (C - s_i - r_i)      the others' results, and their contributions to what it owns

where s_i is 1 if it contributes and r_i is 1 if it receives the result, else 0 (R and C are the sums over all). Where
results are longer than contributions, r_i is so many times greater. Nobody sends to itself. So a time T
bounds each share by the member's own two rates alone: from above, where a greater share means more bytes, and from
below in groups so small that it means fewer. The least time T* is the least T at which these bounds let the shares sum
to 1; with T more is possible, so it is found by bisection. For N members that all contribute and receive, with rates
r_i in both directions and B bytes per vector,

    T* = max( B / min r_i,  2 (N - 1) B / sum r_i )

A slow link may bind by itself: its own contribution out, the result in. Then the others have time to spare, and they
own in proportion to what they could own in T*, so that all have some of it. Without latency and headers.

Here is only the arithmetic, for the coordinator (`optimum`, `counts`) and for all members (`loads`, `time_s`,
`connection_Bps`). Where rates come from is rates.py, who takes part is owners.py.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

HALVINGS = 60
"""Of the interval that the least time is in: as exact as a float."""
FEW_CHUNKS = 3
"""An owner of fewer has to be worth it."""
WORTH = 0.9
"""Part of the time that a round without such an owner may take."""
ROUNDING = 1e-12
"""Relative: what is exceeded by less is kept."""


@dataclass(frozen=True, slots=True)
class Member:
    """One peer in a round."""

    up_Bps: float = 0.0
    """What its link carries towards the others, in bytes per second; 0 = unknown."""
    down_Bps: float = 0.0
    contributes: bool = True
    owns: bool = True
    """May own a share."""
    receives: float = 1.0
    """How much it gets of the result: 0 nothing, 1 all of it. More where a result is longer than a contribution."""


@dataclass(frozen=True, slots=True)
class Optimum:
    shares: tuple[float, ...]
    """Owned share of each member; they sum to 1."""
    seconds: float
    """T*; 0 where no rate is known."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a member sends and receives in a round, in bytes."""

    up: float
    down: float


def optimum(members: Sequence[Member], vector_bytes: float) -> Optimum:
    """The shares with which a round takes the least time. Equal ones where no rate is known.

    An unknown rate counts as the median of the known ones of its direction. A known one counts for at most N times
    that median: no member could use more, and nobody's wrong claim matters beyond it.
    ValueError where nobody may own, or a rate is negative or not finite.
    """
    owners = sum(m.owns for m in members)
    if not owners:
        raise ValueError("nobody may own anything")
    whole = completed(members)
    if whole is None:
        return Optimum(tuple(m.owns / owners for m in members), 0.0)
    bounds = _bounds(whole)
    # In this time each member could own everything, so the least time is no greater; not for want of a rounded bit.
    low, high = 0.0, max(b.whole_s for b in bounds) * (1 + ROUNDING)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if _feasible(bounds, middle):
            high = middle
        else:
            low = middle
    return Optimum(_spread(bounds, high), high * vector_bytes)


def counts(n_chunks: int, members: Sequence[Member]) -> list[int]:
    """How many of these chunks each member should own.

    Bytes are spread over the whole round, so an owner of k chunks has the parts of its last one at the end, and its
    result takes a k-th of the round more. An owner of very few chunks is left out where the round is shorter without.
    """
    owned = divided(n_chunks, members)
    owners = [i for i, k in enumerate(owned) if k]
    while len(owners) > 1 and completed(members) is not None:
        few = min(reversed(owners), key=lambda i: owned[i])
        if owned[few] >= FEW_CHUNKS:
            break
        kept = [replace(m, owns=i in owners and i != few) for i, m in enumerate(members)]
        fewer = divided(n_chunks, kept)
        if _with_last_s(members, fewer) > WORTH * _with_last_s(members, owned):
            break
        owned, owners = fewer, [i for i, k in enumerate(fewer) if k]
    return owned


def _with_last_s(members: Sequence[Member], owned: Sequence[int]) -> float:
    """How long a round takes with its last results, for a vector of one byte."""
    n_chunks = sum(owned)
    return time_s(members, [k / n_chunks for k in owned], 1.0) * (1 + 1 / min(k for k in owned if k))


def divided(n_chunks: int, members: Sequence[Member]) -> list[int]:
    """The optimum in whole chunks: no other division moves all bytes in less time.

    Each gets what it owns in the optimum, rounded down; the chunks left over go one by one to who would be through
    with one more the earliest (ties: the first).
    """
    shares = optimum(members, 1.0).shares
    owned = [math.floor(n_chunks * share) for share in shares]
    whole = completed(members)
    bounds = _bounds(whole) if whole is not None else None

    def through_s(i: int) -> float:
        return bounds[i].takes_s((owned[i] + 1) / n_chunks) if bounds is not None else owned[i]

    may_own = [i for i, m in enumerate(members) if m.owns]
    for _ in range(n_chunks - sum(owned)):
        owned[min(may_own, key=through_s)] += 1
    return owned


def completed(members: Sequence[Member]) -> list[Member] | None:
    """The members with a rate for everybody, as `optimum` counts them; None where no rate is known.

    Where all rates of one direction are unknown, that direction does not limit anybody: math.inf.
    """
    for m in members:
        if not (0 <= m.up_Bps < math.inf and 0 <= m.down_Bps < math.inf):
            raise ValueError(f"rates are finite and not negative, got {m}")
    ups = _filled([m.up_Bps for m in members])
    downs = _filled([m.down_Bps for m in members])
    if math.inf in ups and math.inf in downs:
        return None
    return [replace(m, up_Bps=up, down_Bps=down) for m, up, down in zip(members, ups, downs, strict=True)]


def loads(members: Sequence[Member], shares: Sequence[float], vector_bytes: float) -> list[Load]:
    """What each member sends and receives where it owns this share."""
    fixed, slopes = _coefficients(members)
    return [
        Load((f.up + s.up * w) * vector_bytes, (f.down + s.down * w) * vector_bytes)
        for f, s, w in zip(fixed, slopes, shares, strict=True)
    ]


def time_s(members: Sequence[Member], shares: Sequence[float], vector_bytes: float) -> float:
    """How long a round takes with these shares; 0 where no rate is known."""
    whole = completed(members)
    if whole is None:
        return 0.0
    each = zip(whole, loads(whole, shares, vector_bytes), strict=True)
    return max(max(load.up / m.up_Bps, load.down / m.down_Bps) for m, load in each)


def connection_Bps(
    members: Sequence[Member], shares: Sequence[float], vector_bytes: float, seconds: float, source: int, target: int
) -> float:
    """Rate at which `source` has to send to `target` so that all of it takes this time: the part of its contribution
    that the target owns, and what it owns of the result. Over all targets that sums to its load."""
    parts = shares[target] * members[source].contributes
    results = shares[source] * members[target].receives
    return (parts + results) * vector_bytes / seconds


def _filled(rates: list[float]) -> list[float]:
    known = [rate for rate in rates if rate > 0]
    if not known:
        return [math.inf] * len(rates)
    median = statistics.median(known)
    return [min(rate, len(rates) * median) if rate > 0 else median for rate in rates]


def _coefficients(members: Sequence[Member]) -> tuple[list[Load], list[Load]]:
    """(what a member sends and receives without owning anything, what each further share adds), in vectors."""
    contributors, receivers = sum(m.contributes for m in members), sum(m.receives for m in members)
    fixed = [Load(float(m.contributes), float(m.receives)) for m in members]
    slopes = [Load(receivers - m.receives - m.contributes, contributors - m.contributes - m.receives) for m in members]
    return fixed, slopes


def _bounds(members: Sequence[Member]) -> list[_Bounds]:
    fixed, slopes = _coefficients(members)
    return [_Bounds(m, f, s) for m, f, s in zip(members, fixed, slopes, strict=True)]


class _Bounds:
    """Between which shares a member can stay within a time, for a vector of one byte."""

    def __init__(self, member: Member, fixed: Load, slope: Load) -> None:
        self.owns = member.owns
        self._lines = ((fixed.up, slope.up, member.up_Bps), (fixed.down, slope.down, member.down_Bps))
        self.whole_s = max(self.takes_s(0.0), self.takes_s(1.0))

    def takes_s(self, share: float) -> float:
        return max((fixed + slope * share) / rate for fixed, slope, rate in self._lines)

    def at(self, seconds: float) -> tuple[float, float]:
        """(least, greatest) share; the least is above the greatest where none is possible."""
        least, greatest = 0.0, math.inf if self.owns else 0.0
        for fixed, slope, rate in self._lines:
            spare = seconds * rate - fixed
            if slope > 0:
                greatest = min(greatest, spare / slope)
            elif slope < 0:
                least = max(least, spare / slope)
            elif spare < 0:
                return 1.0, 0.0
        return least, greatest


def _feasible(bounds: Sequence[_Bounds], seconds: float) -> bool:
    between = [b.at(seconds) for b in bounds]
    possible = all(least <= greatest for least, greatest in between)
    return possible and sum(least for least, _ in between) <= 1 <= sum(greatest for _, greatest in between)


def _spread(bounds: Sequence[_Bounds], seconds: float) -> tuple[float, ...]:
    """Shares within the bounds at a feasible time: each at the same part of the way from its least to its greatest."""
    between = [b.at(seconds) for b in bounds]
    finite = [greatest for _, greatest in between if greatest < math.inf]
    most = max([1.0, *finite])  # for those that nothing limits
    between = [(least, min(greatest, most)) for least, greatest in between]
    rest = 1 - sum(least for least, _ in between)
    room = sum(greatest - least for least, greatest in between)
    part = rest / room if room > 0 else 0.0
    return tuple(least + (greatest - least) * part for least, greatest in between)
