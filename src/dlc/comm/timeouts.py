"""Every deadline of the protocol in one place: the floors, how each deadline follows from them, and their relations.

The fields are floors. A deadline is computed from a floor and from what was measured: the number of peers `n`, the
local `health` (1 = I answer in time, up to 8 = I am slow myself), round-trip times. Measured deadlines are never below
their floors. Only `evict_s` touches safety, by way of T_evict and T_gap; all others only cost or save time. It must
therefore be the same on every peer of a run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from dlc.errors import ConfigError


@dataclass(frozen=True)
class Timeouts:
    """Floors, in seconds; the relations between them are checked when one is made."""

    probe_s: float = 0.25
    """SWIM probe period: one peer is pinged in each."""
    beat_s: float = 1.0
    """How often a coordinator says that it lives; less than T_dead of two peers, else it is taken for dead."""
    evict_s: float = 60.0
    """Floor of T_evict, and four times T_gap: a peer that was not scheduled for longer must refresh before it votes."""
    prep_s: float = 0.25
    """Floor of the wait for promises beyond a quorum."""
    commit_s: float = 2.0
    """Floor of the wait for votes beyond a quorum."""
    commit_share: float = 0.25
    """The same as a part of the chunk phase so far."""
    chunk_s: float = 2.0
    """Floor of the silence after which an owner closes a chunk without a contributor."""
    chunk_gaps: float = 3.0
    """The same in measured gaps between two chunks of that contributor."""
    slot_settle_s: float = 2.0
    """Age of a slot before its coordinator may change the electorate: who comes together is taken together."""
    straggler_floor_s: float = 2.0
    """Least wait for those who are not ready, after the first who is: their predictions are no better than that."""
    straggler_share: float = 0.5
    """Part of its work that is counted as lost where a round leaves a peer out, whose work a later round counts; a
    round waits for it no longer than is worth that much (`dlc.comm.straggler`)."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"timeout {field.name} is {value}: it must be a positive number")
        self._relation("probe_s <= beat_s", self.probe_s <= self.beat_s)
        self._relation("beat_s < T_dead of two peers", self.beat_s < self.t_dead_s(2, 1.0))
        self._relation("T_remove of two peers < evict_s", self.t_remove_s(2, 1.0) < self.evict_s)
        self._relation("8 probe_s <= T_gap = evict_s / 4", 8 * self.probe_s <= self.t_gap_s())

    def _relation(self, text: str, holds: bool) -> None:
        if not holds:
            raise ConfigError(
                f"timeouts must keep {text}, but probe_s={self.probe_s}, evict_s={self.evict_s} and "
                f"beat_s={self.beat_s} (which no RUN.toml sets)"
            )

    def t_dead_s(self, n: int, health: float) -> float:
        """Without a two-way proof for this long, a peer is not alive: one probe and the SWIM suspicion time."""
        return (self.probe_s + 4 * math.log2(n + 1) * self.probe_s) * health

    def t_remove_s(self, n: int, health: float) -> float:
        """Unseen for this long, a voter leaves the electorate with the next entry."""
        return 2 * self.t_dead_s(n, health)

    def t_evict_s(self, n: int, health: float) -> float:
        """Unseen for this long, a voter does not stand in the way of a forced ballot."""
        return max(self.evict_s, 8 * self.t_dead_s(n, health))

    def t_gap_s(self) -> float:
        """Not scheduled for longer than this: I was frozen. A constant: it must be under T_evict / 4 of every *other*
        peer, whose n and health are not known here, so it is taken from the floor that all share."""
        return self.evict_s / 4

    def t_refresh_s(self, n: int, health: float, rtt_max_s: float) -> float:
        """After this much running time a refresh no longer waits for voters that do not answer."""
        return self.t_dead_s(n, health) + 2 * rtt_max_s

    def t_coord_s(self, n: int, health: float, rtt_s: float) -> float:
        """Silence of a coordinator after which the next in rank takes over."""
        return self.t_dead_s(n, health) + 4 * rtt_s

    def t_prep_s(self, rtt_max_s: float, rtt_var_s: float = 0.0) -> float:
        """Wait for promises beyond a quorum."""
        return max(self.prep_s, 4 * rtt_max_s + 4 * rtt_var_s)

    def t_commit_s(self, chunk_phase_s: float) -> float:
        """Wait for votes beyond a quorum, after a chunk phase of that length."""
        return max(self.commit_s, self.commit_share * chunk_phase_s)

    def t_chunk_s(self, rtt_s: float, gap_s: float) -> float:
        """Silence of a contributor (or of all missing results: T_stall) after which it is not waited for."""
        return max(self.chunk_s, 4 * rtt_s, self.chunk_gaps * gap_s)
