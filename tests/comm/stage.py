"""A stage for transcripts: real nodes on a virtual clock, a hand-made fault each, the invariants after every event.

The simulator's world carries the messages; a `Stage` looks at each of them, and may drop it, hold it back or repeat it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from dlc.comm import messages as msg
from dlc.comm.coordinator import RUN
from dlc.comm.entries import ROUND
from dlc.comm.events import RoundDone
from dlc.comm.node import Node
from dlc.report import RoundReport
from dlc.sim.network import Weather
from dlc.sim.schedule import TRAIN, Scenario, Start
from dlc.sim.world import Process, World

Rule = Callable[[str, str, Any], bool]
"""(source, target, message) -> is it to be held back?"""


class Stage:
    """n peers that train together; `hold` keeps back the messages it names."""

    def __init__(
        self,
        n: int,
        n_chunks: int = 3,
        inner_s: float = 1.0,
        uplink_Bps: float = 50_000.0,
        chunk_elems: int = 8,
        seed: int = 0,
    ) -> None:
        starts = (Start(0.0, ()), *(Start(0.1 * i, (0,)) for i in range(1, n)))
        plan = Scenario(
            seed=seed,
            starts=starts,
            weather=Weather(latency_max_s=0.05, spike=0.0),
            n_chunks=n_chunks,
            chunk_elems=chunk_elems,
            inner_s=inner_s,
            uplink_Bps=uplink_Bps,
        )
        self.world = World(plan)
        self.hold: Rule = lambda source, target, message: False
        self.held: list[tuple[Any, ...]] = []
        self.sent: list[tuple[float, str, str, Any]] = []
        self.told: list[tuple[str, object]] = []
        self.copies = 1
        self._carry, self._notify = self.world.network.carry, self.world._notify
        self.world.network.carry = self._carried  # type: ignore[method-assign]
        self.world._notify = self._noted  # type: ignore[method-assign]
        self.until(lambda: self.rounds > 2 and all(len(p.node.log.state.electorate) == n for p in self.peers()), 120.0)
        self.between_rounds()
        self.sent.clear()
        self.told.clear()

    def _carried(self, source: str, target: str, deliver: Any, *args: Any, bulk: bool = False) -> None:
        message = args[-1]
        self.sent.append((self.world.now, source, target, message))
        if self.hold(source, target, message):
            self.held.append((source, target, deliver, *args))
            return
        for _ in range(self.copies):
            self._carry(source, target, deliver, *args, bulk=bulk)

    def release(self) -> None:
        held, self.held = self.held, []
        for source, target, deliver, *args in held:
            self._carry(source, target, deliver, *args)

    def _noted(self, process: Process, event: object) -> None:
        self.told.append((process.host.name, event))
        self._notify(process, event)

    @property
    def rounds(self) -> int:
        return self.world.checker.rounds

    def until(self, condition: Callable[[], object], limit_s: float = 30.0) -> None:
        end = self.world.now + limit_s
        while not condition():
            assert self.world.clock.step() and self.world.now < end, "the transcript does not reach its point"

    def between_rounds(self) -> None:
        """Everybody stands at one head, and nothing is planned."""
        self.until(
            lambda: (
                len({p.node.log.head for p in self.world.running()}) == 1
                and not any(p.node.slot.plan for p in self.world.running())
            )
        )

    def planned(self) -> tuple[Process, msg.Plan]:
        """Run until a round is planned, that nobody has learned the end of yet: its coordinator and the plan."""

        def coordinators() -> list[Process]:
            depth = max(p.node.log.state.depth for p in self.world.running())
            newest = [p for p in self.world.running() if p.node.log.state.depth == depth]
            return [p for p in newest if p.node.coordinator.phase == RUN and p.node.slot.plan is not None]

        self.until(lambda: any(_plan(p).entry.kind == ROUND for p in coordinators()))
        process = next(p for p in coordinators() if _plan(p).entry.kind == ROUND)
        return process, _plan(process)

    def peers(self, *but: Process) -> list[Process]:
        return [p for p in self.world.running() if p not in but]

    def reports(self, t: int) -> dict[str, RoundReport]:
        done = [(name, e.report) for name, e in self.told if isinstance(e, RoundDone)]
        return {name: report for name, report in done if report.t == t}

    def committed(self, t: int, who: Iterable[Process], limit_s: float = 30.0) -> dict[str, RoundReport]:
        names = {p.host.name for p in who}
        self.until(lambda: names <= self.reports(t).keys(), limit_s)
        return self.reports(t)

    def counted(self, t: int) -> set[str]:
        """Who is in round t, as everybody who has it says."""
        shares = {frozenset(s.peer for s in report.contributors) for report in self.reports(t).values()}
        assert len(shares) <= 1
        return set().union(*shares)

    def all_in(self, who: Iterable[Process] | None = None, limit_s: float = 30.0) -> None:
        """Run until each of these (all that run) was in a round from the next one on."""
        names = {p.host.name for p in (self.peers() if who is None else who)}
        t = max(p.node.log.state.round_of(TRAIN) for p in self.peers())
        self.until(lambda: names <= set().union(*(self.counted(later) for later in range(t + 1, t + 60))), limit_s)


def _plan(process: Process) -> msg.Plan:
    assert process.node.slot.plan is not None
    return process.node.slot.plan


def past_round(node: Node, t: int) -> Any:
    return next(p for p in node.log.past if p.entry.kind == ROUND and p.entry.t == t)
