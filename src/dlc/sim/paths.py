"""Which processes can reach each other, and since when not: whether a fork is a partition's or a fault."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dlc.sim.world import Process, World

Pair = tuple[str, str]


class Paths:
    def __init__(self, world: World) -> None:
        self.world = world
        self._apart_now: set[Pair] = set()
        """Awake processes without a two-way path, direct or by one relay."""
        self._apart_s: dict[Pair, float] = {}
        """Seconds that both were awake and apart since they last had a path."""
        self._noted = 0.0
        self._frozen_since: dict[Process, float] = {}
        self._partitions: list[tuple[float, float]] = []
        """Times (from, to) in which some pair had been apart for longer than `limit_s`."""
        # When a cut begins, the last proof of the other may be as old as T_dead, which measured round trips widen to
        # about T_gap; a freeze shorter than T_gap is noticed by nobody. So T_evict without a proof means this much time
        # awake and apart.
        timeouts = world.scenario.timeouts
        self.limit_s = timeouts.evict_s - 2 * timeouts.t_gap_s()

    def changed(self) -> None:
        """A cut, freeze, start or end: note who is apart from now on."""
        self._note()
        network, running = self.world.network, self.world.running()
        awake = [p.host.name for p in running if not p.frozen]
        self._frozen_since = {p: self._frozen_since.get(p, self.world.now) for p in running if p.frozen}
        self._apart_now = set()
        if network.cuts:
            self._apart_now = {
                (a, b) for i, a in enumerate(awake) for b in awake[i + 1 :] if not network.joined(a, b, awake)
            }
        names, awake_names = {p.host.name for p in running}, set(awake)
        for pair in [p for p in self._apart_s if p not in self._apart_now]:
            # Joined again, or one has ended; a freeze only stops the clock.
            if not names.issuperset(pair) or awake_names.issuperset(pair):
                del self._apart_s[pair]

    def _note(self) -> None:
        """Add the time since the last change to every pair that is apart."""
        since, self._noted = self._noted, self.world.now
        for pair in self._apart_now:
            self._apart_s[pair] = self._apart_s.get(pair, 0.0) + self._noted - since
        longest_s = max(self._apart_s.values(), default=0.0)
        if longest_s > self.limit_s:
            self._partitions.append((max(since, self._noted - (longest_s - self.limit_s)), self._noted))

    def asleep(self) -> list[Process]:
        """Who has slept for about T_evict: nobody waits for it any more."""
        return [p for p, since in self._frozen_since.items() if self.world.now - since >= self.limit_s]

    def partitioned(self, since: float, until: float) -> bool:
        """Between these times there was a partition: two processes apart for about T_evict."""
        self._note()
        return any(begin <= until and end >= since for begin, end in self._partitions)
