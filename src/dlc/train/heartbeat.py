"""Whether the other processes of a site still run, as rank 0 sees it, and whether rank 0 does, as they see it.

One that hangs (SIGSTOP, a host that swaps or has lost its power, a driver that never returns) ends nothing: the others
wait for it in the middle of a step, for half an hour with Gloo, or for rank 0's next order, for ever. So each counts
its beats in the site's store, on a thread of its own; rank 0 looks at these numbers, and the others at that of rank 0.
A process that waits for the others, or computes, beats on.

Silence is counted in running time: between two looks at most LOOK_S_MAX, since who looks may have been suspended, and
all the others with it (Ctrl-Z).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

BEAT_S = 1.0
"""Between two beats."""
TOLD_S = 20.0
"""Of silence, after which the log says so: a host that swaps, or is short of processor time, comes back by itself."""
SILENCE_S_MAX = 300.0
"""After which nobody waits any longer."""
LOOK_S_MAX = 2.0
"""Of silence that one look counts."""


class Silence(NamedTuple):
    """A process that does not beat."""

    rank: int
    for_s: float


class Heartbeats:
    """Looks at the beats of `ranks`. beats: how many one has counted so far. clock: as time.monotonic."""

    def __init__(self, ranks: Iterable[int], beats: Callable[[int], int], clock: Callable[[], float]) -> None:
        self._beats, self._clock = beats, clock
        self._seen = dict.fromkeys(ranks, -1)
        self._silent_s = dict.fromkeys(self._seen, 0.0)
        self._told: set[int] = set()
        self._looked = clock()

    def look(self) -> tuple[list[Silence], list[Silence]]:
        """Those silent for TOLD_S by now, each once until it beats again; and for SILENCE_S_MAX."""
        now = self._clock()
        passed, self._looked = min(now - self._looked, LOOK_S_MAX), now
        for rank, seen in self._seen.items():
            beats = self._beats(rank)
            self._silent_s[rank] = 0.0 if beats != seen else self._silent_s[rank] + passed
            self._seen[rank] = beats
        silent = [Silence(rank, for_s) for rank, for_s in self._silent_s.items() if for_s >= TOLD_S]
        fresh = [silence for silence in silent if silence.rank not in self._told]
        self._told = {silence.rank for silence in silent}
        return fresh, [silence for silence in silent if silence.for_s >= SILENCE_S_MAX]
