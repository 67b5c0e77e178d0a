"""Run one scenario to its end: faults, settling, verdict."""

from __future__ import annotations

import gc
import traceback
from dataclasses import dataclass

from dlc.sim.invariants import Violation
from dlc.sim.oracle import OracleError
from dlc.sim.schedule import Scenario
from dlc.sim.transcript import Transcript
from dlc.sim.world import World

SETTLE_STEP_S = 2.0
SETTLE_EVICTIONS = 4
"""Bound on settling, in T_evict of the run: eviction itself, widened by local health, and what follows it."""
ROUNDS_S = 60.0
FAULT_FREE_S = 30.0
RAISED = "a peer raised"


@dataclass(frozen=True)
class Outcome:
    seed: int
    violation: str
    """Empty: none."""
    rounds: int
    faults: dict[str, int]
    forks: int
    events: int
    ended_at_s: float
    """Virtual."""
    settled_s: float
    """From the end of faults until all live peers were on one log and committing."""

    @property
    def broken(self) -> str:
        """Name of the invariant that does not hold, or of the exception that a peer raised; empty: none."""
        if self.violation.startswith(RAISED):
            return self.violation.strip().splitlines()[-1].partition(":")[0]
        return self.violation.replace(":", " ").partition(" ")[0]


def run(scenario: Scenario, transcript: Transcript | None = None) -> Outcome:
    world = World(scenario, transcript)
    violation, settled_s = "", 0.0
    collecting = gc.isenabled()
    gc.disable()  # a world is small, and nearly all of it lives to the end: not worth a search for cycles on the way
    try:
        world.run_until(max(scenario.last_fault_s, FAULT_FREE_S))
        world.settle()
        settled_s = _await_liveness(world)
    except (Violation, OracleError) as broken:
        violation = f"{broken} (at {world.now:.3f} s)"
    except Exception:
        violation = f"{RAISED} (at {world.now:.3f} s): {traceback.format_exc()}"
    finally:
        if collecting:
            gc.enable()
    checker = world.checker
    return Outcome(
        scenario.seed, violation, checker.rounds, dict(world.faults.struck), checker.history.forks, world.clock.events,
        world.now, settled_s,
    )  # fmt: skip


def _await_liveness(world: World) -> float:
    """L1 to L3, within their bound."""
    began = world.now
    deadline = began + SETTLE_EVICTIONS * world.scenario.timeouts.evict_s + ROUNDS_S
    while True:
        world.run_until(world.now + SETTLE_STEP_S)
        why = world.checker.unsettled(began)
        if not why:
            return world.now - began
        if world.now >= deadline:
            raise Violation(why[:2], f"{why[4:]}, {world.now - began:.0f} s after the last fault")
