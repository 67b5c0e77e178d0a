"""Which processes can reach each other, and since when not: whether a fork is a partition's or a fault."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dlc.comm.health import RUNNING_STEP_MAX_S

if TYPE_CHECKING:
    from dlc.comm.messages import Record
    from dlc.sim.world import Process, World

Pair = tuple[str, str]


class Clocks:
    """For each pair of processes a time that runs, and when any of these was over the limit."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.seconds: dict[Pair, float] = {}
        self.joined: dict[Pair, float] = {}
        """When a pair got a path again: one that is gone before anybody heard by it has not been."""
        self._over: list[tuple[float, float]] = []
        """Times (from, to) in which some pair's was over the limit."""

    def run(self, pairs: set[Pair], since: float, now: float) -> None:
        for pair in pairs:
            self.seconds[pair] = self.seconds.get(pair, 0.0) + now - since
        longest_s = max((s for pair, s in self.seconds.items() if pair not in self.joined), default=0.0)
        if longest_s > self.limit_s:
            self._over.append((max(since, now - (longest_s - self.limit_s)), now))

    def add(self, pair: Pair, seconds: float) -> None:
        self.seconds[pair] = self.seconds.get(pair, 0.0) + seconds

    def part(self, pair: Pair, now: float, heard_s: float) -> None:
        """It has no path (any more); was there one for `heard_s`, its time begins anew."""
        if now - self.joined.pop(pair, now) >= heard_s:
            del self.seconds[pair]

    def join(self, pair: Pair, now: float) -> None:
        """It has a path."""
        self.joined.setdefault(pair, now)

    def forget(self, pair: Pair) -> None:
        """One of the two has ended."""
        del self.seconds[pair]
        self.joined.pop(pair, None)

    def over(self, since: float, until: float) -> bool:
        """Between these times it was for some pair."""
        return any(begin <= until and end >= since for begin, end in self._over)


class Paths:
    def __init__(self, world: World) -> None:
        self.world = world
        # When a cut begins, the last proof of the other may be as old as T_dead, which measured round trips widen to
        # about T_gap; a freeze shorter than T_gap is noticed by nobody. So T_evict without a proof means this much time
        # awake and apart.
        timeouts = world.scenario.timeouts
        self.limit_s = timeouts.evict_s - 2 * timeouts.t_gap_s()
        self._apart_now: set[Pair] = set()
        """Awake processes without a two-way path, direct or by one relay that they can hear of."""
        self._apart = Clocks(self.limit_s)
        """How long both were apart since they last had a path, awake or in a nap that its own clock counts."""
        self._unheard = Clocks(self.limit_s)
        """The same, and how long one of them slept before, if it woke without a path: the other did not hear of it."""
        self._noted = 0.0
        self._frozen_since: dict[Process, float] = {}
        self._tables: dict[Process, tuple[Sequence[Record], frozenset[str]]] = {}
        """What each process knows of others while there are cuts, and their addresses."""

    def heard(self, process: Process) -> None:
        """After an event of this process: it may have heard of somebody, and be a relay from now on."""
        known = self._tables.get(process)
        if self.world.network.cuts and known is not None and self._addresses(process) != known[1]:
            self.changed()

    def _addresses(self, process: Process) -> frozenset[str]:
        """Where it looks for others, as long as they do not answer."""
        records = process.node.members.records()
        known = self._tables.get(process)
        if known is None or known[0] is not records:
            addresses = frozenset(process.node.config.listed).union(*(r.control for r in records))
            known = self._tables[process] = records, addresses
        return known[1]

    def _knows(self, a: Process, b: Process) -> bool:
        return b.host.address in self._addresses(a)

    def _in_touch(self, awake: Sequence[Process]) -> dict[Process, frozenset[Process]]:
        """Who hears of whom: those that can reach each other, one of which knows the other, and whom they tell of."""
        network = self.world.network
        groups = {p: frozenset((p,)) for p in awake}
        for i, a in enumerate(awake):
            for b in awake[i + 1 :]:
                met = self._knows(a, b) or self._knows(b, a)
                if b not in groups[a] and met and network.two_way(a.host.name, b.host.name):
                    both = groups[a] | groups[b]
                    groups.update(dict.fromkeys(both, both))
        return groups

    def _parted(self, awake: Sequence[Process]) -> Iterator[Pair]:
        """Those without a way to each other, directly or by a third. Where they know each other, that one must be in
        touch with both: a newcomer that nobody has heard of, and that has heard of nobody, relays nothing."""
        network, groups = self.world.network, self._in_touch(awake)
        for i, a in enumerate(awake):
            for b in awake[i + 1 :]:
                acquainted = self._knows(a, b) and self._knows(b, a)
                relays = groups[a] & groups[b] if acquainted else awake
                if not network.joined(a.host.name, b.host.name, (r.host.name for r in relays)):
                    yield a.host.name, b.host.name

    def changed(self) -> None:
        """A cut, freeze, start or end, or somebody was heard of: note who is apart from now on."""
        self._note()
        now, network, running = self.world.now, self.world.network, self.world.running()
        awake = [p for p in running if not p.frozen]
        slept_s = {p.host.name: now - since for p, since in self._frozen_since.items() if p in running and not p.frozen}
        self._frozen_since = {p: self._frozen_since.get(p, now) for p in running if p.frozen}
        self._tables = {p: table for p, table in self._tables.items() if p in running}
        self._apart_now = set(self._parted(awake)) if network.cuts else set()
        # Within T_dead two peers that have a path hear of each other; by a shorter one, nobody may have.
        heard_s = self.world.scenario.timeouts.t_dead_s(len(running), 1.0)
        names, awake_names = {p.host.name for p in running}, {p.host.name for p in awake}
        for clocks in (self._apart, self._unheard):
            for pair in [p for p in clocks.seconds if p not in self._apart_now]:
                # A freeze only stops the clock.
                if not names.issuperset(pair):
                    clocks.forget(pair)
                elif awake_names.issuperset(pair):
                    clocks.join(pair, now)
            for pair in self._apart_now:
                clocks.part(pair, now, heard_s)
        for pair in self._apart_now:
            asleep_s = max(slept_s.get(name, 0.0) for name in pair)
            self._unheard.add(pair, asleep_s)
            if asleep_s <= RUNNING_STEP_MAX_S:
                self._apart.add(pair, asleep_s)  # a nap that its own clocks count as if it had been awake

    def _note(self) -> None:
        """Add the time since the last change to every pair that is apart."""
        since, self._noted = self._noted, self.world.now
        for clocks in (self._apart, self._unheard):
            clocks.run(self._apart_now, since, self._noted)

    def asleep(self) -> list[Process]:
        """Who has slept for about T_evict: nobody waits for it any more."""
        return [p for p, since in self._frozen_since.items() if self.world.now - since >= self.limit_s]

    def apart(self, a: Process, b: Process) -> bool:
        """These two have been apart for about T_evict."""
        self._note()
        pair, seconds = (a.host.name, b.host.name), self._apart.seconds
        return max(seconds.get(pair, 0.0), seconds.get(pair[::-1], 0.0)) > self.limit_s

    def partitioned(self, since: float, until: float) -> bool:
        """A partition made a fork whose sides were decided at these times: two processes were apart for about T_evict.

        Or the later side was decided after it had not heard from the other for so long, which slept at first and woke
        without a path, and the other was awake without one for so long until now, before it went on, too.
        """
        self._note()
        return self._apart.over(since, until) or (
            self._unheard.over(since, until) and self._apart.over(until, self.world.now)
        )
