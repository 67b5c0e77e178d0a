"""Leases: which voter trains which blocks of the data source (promise P7).

A pure, deterministic part of the replicated state: every peer computes the same table from the same entries. Blocks are
numbered 0, 1, 2, ...; a voter holds up to two ranges [lo, hi), used in order; the first one's `lo` is its committed
position. A voter that is removed keeps its lease for some entries: what it trained before it slept stands when it comes
back. Then what it had not committed goes to the pool, first in first out; fresh ranges come after.
Invariant I5: consumed, pool and leases are disjoint and together are [0, next).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dlc.comm.ids import Voter

RANGES_PER_VOTER = 2
"""One in use and one ahead, so that a peer that trains on while a round is in flight never runs dry."""
AWAY_ENTRIES = 16
"""How many entries a lease outlives the seat of its voter; one more, and others train its blocks."""


@dataclass(frozen=True, slots=True)
class Range:
    lo: int
    """First block not yet committed."""
    hi: int
    """One past the last block."""


@dataclass(frozen=True, slots=True)
class Lease:
    """What one voter may train: ranges in order of use; the first one's `lo` is the committed position."""

    voter: Voter
    ranges: tuple[Range, ...]
    away: int = 0
    """Entries since its voter lost its seat among the trainers; 0: it has one."""

    @property
    def blocks(self) -> int:
        return sum(r.hi - r.lo for r in self.ranges)

    def holds(self, upto: int) -> bool:
        """True if `upto` is a position that this lease can be advanced to."""
        return any(r.lo < upto <= r.hi for r in self.ranges)

    def advanced(self, upto: int) -> Lease:
        """The lease after everything before `upto` (in order of use) was consumed."""
        for index, r in enumerate(self.ranges):
            if r.lo < upto <= r.hi:
                rest = () if upto == r.hi else (Range(upto, r.hi),)
                return dataclasses.replace(self, ranges=rest + self.ranges[index + 1 :])
        raise ValueError(f"position {upto} is outside the lease {self.ranges}")

    def take(self, count: int) -> tuple[list[int], int]:
        """The next `count` block indices in order of use (fewer if the lease is shorter) and the `upto` after them."""
        blocks: list[int] = []
        upto = -1
        for r in self.ranges:
            stop = min(r.hi, r.lo + count - len(blocks))
            blocks.extend(range(r.lo, stop))
            if stop > r.lo:
                upto = stop
            if len(blocks) == count:
                break
        return blocks, upto


@dataclass(frozen=True, slots=True)
class Ledger:
    """The whole table. `length` is the size of a fresh range in blocks; 0 means that the run has no leases."""

    length: int = 0
    leases: tuple[Lease, ...] = ()
    """In ascending voter order."""
    pool: tuple[Range, ...] = ()
    next: int = 0
    """First block that was never handed out."""

    def lease(self, voter: Voter) -> Lease | None:
        return next((lease for lease in self.leases if lease.voter == voter), None)

    def valid(self, voter: Voter, upto: int) -> bool:
        """A contribution of `voter` up to position `upto` may stand in a roster at this state. Below 0: it brings no
        samples that are not counted yet."""
        if self.length == 0:
            return True
        lease = self.lease(voter)
        return lease is not None and (upto < 0 or lease.holds(upto))

    @property
    def sound(self) -> bool:
        """Entries can have made it: pool and leases are disjoint parts of [0, next), with one lease for each voter."""
        if self.length == 0:
            return not (self.leases or self.pool or self.next)
        voters = [lease.voter for lease in self.leases]
        ranges = sorted([*self.pool, *(r for lease in self.leases for r in lease.ranges)], key=lambda r: r.lo)
        ends = [0, *(r.hi for r in ranges)]
        return (
            voters == sorted(set(voters))
            and all(0 <= lease.away <= AWAY_ENTRIES and len(lease.ranges) <= RANGES_PER_VOTER for lease in self.leases)
            and all(end <= r.lo < r.hi for end, r in zip(ends, ranges, strict=False))
            and ends[-1] <= self.next
        )

    def committed(self, counted: Sequence[tuple[Voter, int]]) -> Ledger:
        """The table after the contributions (voter, upto) were counted."""
        if self.length == 0:
            return self
        upto = {voter: position for voter, position in counted if position >= 0}
        leases = tuple(x.advanced(upto[x.voter]) if x.voter in upto else x for x in self.leases)
        return dataclasses.replace(self, leases=leases)

    def seated(self, trainers: Iterable[Voter]) -> Ledger:
        """The table after the next entry, with these trainers: those who run short of ranges get new ones, others keep
        theirs for a while, but for those of an older process of a trainer's peer, which go to the new one."""
        if self.length == 0:
            return self
        seats = sorted(set(trainers))
        processes = {voter.peer: voter for voter in seats}
        held = {lease.voter: lease.ranges for lease in self.leases if lease.voter in seats}
        pool = list(self.pool)
        away = []
        for lease in self.leases:
            if lease.voter in seats:
                continue
            successor = processes.get(lease.voter.peer)
            if successor is not None and successor not in held:
                held[successor] = lease.ranges
            elif successor is None and lease.ranges and lease.away < AWAY_ENTRIES:
                away.append(dataclasses.replace(lease, away=lease.away + 1))
            else:
                pool.extend(lease.ranges)
        next_block = self.next
        # First range for everybody before a second one for anybody: a short pool is shared fairly.
        for wanted in range(1, RANGES_PER_VOTER + 1):
            for voter in seats:
                ranges = held.get(voter, ())
                if len(ranges) >= wanted:
                    continue
                if pool:
                    fresh = pool.pop(0)
                else:
                    fresh = Range(next_block, next_block + self.length)
                    next_block += self.length
                held[voter] = (*ranges, fresh)
        leases = sorted([*away, *(Lease(voter, held[voter]) for voter in seats)], key=lambda lease: lease.voter)
        return Ledger(self.length, tuple(leases), tuple(pool), next_block)
