"""Faults on schedule: what happens to processes and links, and to whom.

A fault without a target strikes at once. A targeted one arms a trap: the next process that sends a batch of such
messages is struck after a part of them. A fault that would end the last active process of the run is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlc.comm.effects import Effect, Send
from dlc.comm.log import Log
from dlc.sim.schedule import TRAIN, Fault
from dlc.sim.toy import ToyState

if TYPE_CHECKING:
    from dlc.sim.world import Host, Process, World


NAP_S = (0.05, 1.0)
"""What a slow process sleeps at a time; its events wait for no longer."""
AWAKE_S = (0.0, 0.3)
"""And how long it is awake in between."""
SOUND_MIN = 3
"""Trainers with one state, the corrupted one included, below which nobody could tell which of two is the wrong one."""


@dataclass
class Trap:
    """An armed targeted fault."""

    fault: Fault
    left: int = 0
    """Results still let through; bulk is pulled one by one."""


class Faults:
    def __init__(self, world: World) -> None:
        self.world = world
        self.traps: list[Trap] = []
        self.struck: Counter[str] = Counter()
        """What really happened."""

    def strike(self, fault: Fault) -> None:
        """Let this fault happen, or arm its trap."""
        if self.world.quiet:
            return
        if fault.target:
            self.traps.append(Trap(fault, left=int(fault.part * 4)))
            return
        awake = [p for p in self.world.running() if p.awake]
        victim = awake[fault.who % len(awake)] if awake else None
        if fault.kind == "join":
            self._join(fault)
        elif fault.kind in ("restart", "move"):
            self._crash_and_restart(victim, moves=fault.kind == "move")
        elif fault.kind == "cut":
            self._cut(fault)
        elif fault.kind == "breaks":
            self._break(fault)
        elif fault.kind == "partition":
            self._partition(fault)
        elif fault.kind == "corrupt":
            self._corrupt(victim)
        elif fault.kind == "slow" and victim is not None:
            self.struck["slow"] += 1
            self._nap(victim, self.world.now + fault.for_s)
        elif victim is None or not self.expendable(victim):
            return
        elif fault.kind == "crash":
            self.world.crash(victim)
        elif fault.kind == "freeze":
            self.world.freeze(victim, fault.for_s)
        elif fault.kind == "leave":
            self.world.leave(victim)

    def expendable(self, process: Process) -> bool:
        """The run outlives its loss: another trainer is there that is active and holds the run's state, that of what
        was opened just now as well."""
        opened = [channel for channel in process.node.log.attached if process.node.log.is_open(channel)]
        others = (p for p in self.world.running() if p is not process and not p.left)
        return any(p.node.log.active and p.host.role == "trainer" and self._has(p.node.log, opened) for p in others)

    def _has(self, log: Log, opened: Iterable[str]) -> bool:
        if self.world.scenario.orphans:
            return TRAIN not in log.lacking() and (TRAIN not in opened or log.is_open(TRAIN))
        return log.synced and all(map(log.is_open, opened))

    def _join(self, fault: Fault) -> None:
        peers = [p for p in self.world.running() if p.node.log.active and not p.left]
        if not peers:
            return
        self.struck["join"] += 1
        known = {peers[fault.who % len(peers)].host.address, peers[fault.other % len(peers)].host.address}
        self.world.start(self.world.new_host(), tuple(sorted(known)))

    def _crash_and_restart(self, victim: Process | None, moves: bool) -> None:
        if victim is None or not self.expendable(victim):
            return
        self.world.crash(victim)
        self.world.clock.at(self.world.now + self.world.rng.choice((0.2, 3.0, 20.0)), self._restart, victim.host, moves)

    def _restart(self, host: Host, moves: bool) -> None:
        if self.world.quiet or host.process is not None:
            return
        self.struck["move" if moves else "restart"] += 1
        host.moves += moves
        book = tuple(sorted(h.address for h in self.world.hosts.values() if h is not host))
        self.world.start(host, book, from_disk=host.disk is not None and self.world.rng.random() < 0.5)

    def _cut(self, fault: Fault) -> None:
        names = sorted(self.world.hosts)
        a, b = names[fault.who % len(names)], names[fault.other % len(names)]
        if a != b:
            self._hold_cut([(a, b)], fault)

    def _break(self, fault: Fault) -> None:
        names = sorted(self.world.hosts)
        a, b = (self.world.hosts[names[n % len(names)]] for n in (fault.who, fault.other))
        if a is not b:
            self.struck["breaks"] += 1
            self.world.network.end_bulk(a.name, b.name)
            self.world.clock.at(self.world.now + fault.for_s, self._connect, a, b, a.process)

    def _connect(self, source: Host, target: Host, process: Process | None) -> None:
        """Whoever sent hears of the end of its connection, and makes another."""
        self.world.network.begin_bulk(source.name, target.name)
        if process is not None and process is source.process:
            process.node.bulk_broken(target.name)

    def _partition(self, fault: Fault) -> None:
        names = sorted(self.world.hosts)
        side = {name for i, name in enumerate(names) if fault.who >> i % 16 & 1}
        pairs = [(a, b) for a in side for b in names if b not in side]
        self._hold_cut([*pairs, *((b, a) for a, b in pairs)], fault)

    def _hold_cut(self, pairs: list[tuple[str, str]], fault: Fault) -> None:
        self.struck[fault.kind] += 1
        if self.world.transcript is not None:
            self.world.transcript.happened(self.world.now, f"{fault.kind} of {pairs} for {fault.for_s:.1f} s")
        for a, b in pairs:
            self.world.network.cut(a, b)
        self.world.checker.paths_changed()
        self.world.clock.at(self.world.now + fault.for_s, self._mend, pairs)

    def _mend(self, pairs: list[tuple[str, str]]) -> None:
        if self.world.transcript is not None:
            self.world.transcript.happened(self.world.now, f"{pairs} mended")
        for a, b in pairs:
            self.world.network.mend(a, b)
        self.world.checker.paths_changed()

    def _corrupt(self, victim: Process | None) -> None:
        """Flip one element, where the others can tell: a majority of the trainers is awake, at one head, and sound."""
        if victim is None or victim.host.role != "trainer" or not victim.node.log.is_open(TRAIN):
            return
        log, corrupt = victim.node.log, self.world.checker.corrupt
        step = {
            p.voter
            for p in self.world.running()
            if p.awake and p.node.log.synced and p not in corrupt and p.node.log.head == log.head
        }
        trainers, sound = set(log.state.trainers), (step & set(log.state.trainers)) - {victim.voter}
        if victim.voter not in step or len(sound) + 1 < SOUND_MIN or 2 * len(sound) <= len(trainers):
            return
        self.struck["corrupt"] += 1
        self.world.say(victim, "is corrupted")
        state = log.attached[TRAIN].state
        assert isinstance(state, ToyState)
        state.flip()
        self.world.checker.corrupted(victim)

    def _nap(self, process: Process, until_s: float) -> None:
        """A slow machine: short sleeps, one after the other."""
        world = self.world
        if not process.running or world.quiet or world.now >= until_s:
            return
        nap_s = world.rng.uniform(*NAP_S)
        if process.awake:
            world.freeze(process, nap_s, "nap")
        world.clock.at(world.now + nap_s + world.rng.uniform(*AWAKE_S), self._nap, process, until_s)

    # ---------------------------------------------------------------- targeted faults

    def spring(self, process: Process, effects: list[Effect]) -> list[Effect]:
        """If a trap waits for this batch, let a part of it out, and give back what is still to be sent (nothing)."""
        for trap in self.traps:
            fault = trap.fault
            hits = [
                i for i, e in enumerate(effects) if isinstance(e, Send) and type(e.message).__name__ == fault.target
            ]
            if not hits or not self.expendable(process):
                continue
            self.traps.remove(trap)
            stop = [*hits, len(effects)][min(len(hits), int(fault.part * (len(hits) + 1)))]
            self.world.say(process, "is struck", f"after {stop} of {len(effects)} effects ({fault.target})")
            self._let_out(process, effects[:stop])
            if fault.kind == "crash":
                self.world.crash(process)
            else:
                process.unsent = effects[stop:]
                self.world.freeze(process, fault.for_s)
            return []
        return effects

    def _let_out(self, process: Process, effects: list[Effect]) -> None:
        traps, self.traps = self.traps, []
        self.world.perform(process, effects, None)
        self.traps = traps

    def spring_result(self, process: Process) -> bool:
        """The same for results, which leave one by one; the result in hand is lost with the process's memory."""
        for trap in self.traps:
            if trap.fault.target == "Result" and self.expendable(process):
                trap.left -= 1
                if trap.left >= 0:
                    return False
                self.traps.remove(trap)
                if trap.fault.kind == "crash":
                    self.world.crash(process)
                else:
                    self.world.freeze(process, trap.fault.for_s)
                return True
        return False
