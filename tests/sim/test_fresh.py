"""Schedules that nobody has run before: every version of the code gets seeds of its own.

They follow from the code's hash, so that who runs the same version again sees the same failure, and can look for it.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable

import pytest

from dlc.sim.schedule import FAULTS
from dlc.sim.sweep import Job, code_version, outcomes

PEERS = (2, 8)
SEEDS = 10**9


def test_fresh_seeds(pytestconfig: pytest.Config, record_property: Callable[[str, object], None]) -> None:
    job = Job(PEERS, FAULTS, first=int(code_version(), 16) % SEEDS)
    end = time.monotonic() + float(pytestconfig.getoption("--sim-seconds"))
    broken: list[str] = []
    done = 0

    def more() -> bool:
        return not broken and time.monotonic() < end

    for outcome in outcomes(job, itertools.count(job.first), os.cpu_count() or 1, more):
        done += 1
        if outcome.violation:
            where = f"--peers {PEERS[0]}:{PEERS[1]} --seeds {outcome.seed}"
            replay = f"python -m dlc.sim {where} --transcript"
            broken.append(f"seed {outcome.seed}: {outcome.violation}\nreplay: {replay}")
    result = f"{len(broken)} violations" if broken else "no violation"
    record_property(
        "simulated",
        f"simulator: {done} fresh schedules from seed {job.first} on, {len(FAULTS)} kinds of faults, {result}",
    )
    assert not broken, "\n".join(broken)
    assert done, "no schedule was run: give --sim-seconds more than 0"
