"""A failing scenario made short: whatever is not needed for breaking the same invariant is left out.

Candidates go from coarse to fine: faults by halves and one by one, peers, everything that makes the schedule harder,
durations. A candidate is kept if it breaks the same invariant, and the search begins again until nothing helps or the
time is over. A shorter schedule draws other random numbers, so this is a search and not a proof.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator

from dlc.comm.donations import PIECE_BYTES
from dlc.comm.log import HISTORY_BYTES_MAX
from dlc.sim.network import Weather
from dlc.sim.run import Outcome, run
from dlc.sim.schedule import TRAIN, Fault, Scenario, Start

SHORTEST_S = 0.5
"""A duration is not halved below this."""
CALM = Weather(latency_max_s=0.02, jitter=0.1, spike=0.0)


def shrink(
    plan: Scenario, outcome: Outcome, seconds: float, play: Callable[[Scenario], Outcome] = run
) -> tuple[Scenario, Outcome]:
    """The shortest scenario found within `seconds` that breaks the invariant of `outcome`, and its own outcome."""
    end = time.monotonic() + seconds
    better: tuple[Scenario, Outcome] | None = (plan, outcome)
    while better is not None:
        plan, outcome = better
        better = next(_breaking(plan, outcome, end, play), None)
    return plan, outcome


def _breaking(
    plan: Scenario, outcome: Outcome, end: float, play: Callable[[Scenario], Outcome]
) -> Iterator[tuple[Scenario, Outcome]]:
    for candidate in _candidates(plan, outcome.ended_at_s):
        if time.monotonic() >= end:
            return
        tried = play(candidate)
        if tried.broken == outcome.broken:
            yield candidate, tried


def _candidates(plan: Scenario, ended_at_s: float) -> Iterator[Scenario]:
    yield from _fewer_faults(plan, ended_at_s)
    yield from _fewer_peers(plan)
    yield from _calmer(plan)
    yield from _shorter(plan)


def _fewer_faults(plan: Scenario, ended_at_s: float) -> Iterator[Scenario]:
    faults = plan.faults
    early = tuple(f for f in faults if f.at_s <= ended_at_s)
    if early != faults:
        yield dataclasses.replace(plan, faults=early)
    size = (len(faults) + 1) // 2
    while size:
        for begin in range(0, len(faults), size):
            yield dataclasses.replace(plan, faults=faults[:begin] + faults[begin + size :])
        size //= 2


def _fewer_peers(plan: Scenario) -> Iterator[Scenario]:
    """Leave out one peer that does not come first; those after it get the number before theirs."""
    for gone in range(len(plan.starts) - 1, 0, -1):
        left = plan.starts[:gone] + plan.starts[gone + 1 :]
        starts = tuple(dataclasses.replace(s, listed=_renumbered(s.listed, gone)) for s in left)
        if [bool(s.listed) for s in starts] == [bool(s.listed) for s in left]:  # no second founder
            yield dataclasses.replace(plan, starts=starts)


def _renumbered(listed: tuple[int, ...], gone: int) -> tuple[int, ...]:
    return tuple(n - (n > gone) for n in listed if n != gone)


def _calmer(plan: Scenario) -> Iterator[Scenario]:
    reliable = dataclasses.replace(plan.weather, loss=0.0, duplicates=0.0)
    trainers = tuple(Start(s.at_s, s.listed) for s in plan.starts)
    candidates = (
        dataclasses.replace(plan, weather=CALM),
        dataclasses.replace(plan, weather=reliable),
        dataclasses.replace(plan, starts=trainers),
        dataclasses.replace(plan, drift=0.0),
        dataclasses.replace(plan, eager=False),
        dataclasses.replace(plan, probes=False),
        dataclasses.replace(plan, filling=False),
        dataclasses.replace(plan, patient=False),
        dataclasses.replace(plan, channels=(TRAIN,)),
        dataclasses.replace(plan, piece_bytes=PIECE_BYTES, history_bytes=HISTORY_BYTES_MAX),
        dataclasses.replace(plan, n_chunks=1),
        dataclasses.replace(plan, codec="fp32"),
        dataclasses.replace(plan, equal_states=True),
    )
    yield from (candidate for candidate in candidates if candidate != plan)


def _shorter(plan: Scenario) -> Iterator[Scenario]:
    """Halve how long a fault lasts; let it strike at once and not in the middle of a batch."""
    for index, fault in enumerate(plan.faults):
        if fault.for_s > SHORTEST_S:
            yield _with(plan, index, dataclasses.replace(fault, for_s=max(SHORTEST_S, fault.for_s / 2)))
        if fault.target:
            yield _with(plan, index, dataclasses.replace(fault, target="", part=0.0))


def _with(plan: Scenario, index: int, fault: Fault) -> Scenario:
    return dataclasses.replace(plan, faults=(*plan.faults[:index], fault, *plan.faults[index + 1 :]))
