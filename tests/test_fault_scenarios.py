"""Peers that fail or are slow in an all-reduce of real processes: a few of the scenarios of benchmarks/scenarios.py.

tests/test_faults.py has the same faults and more inside one process; here SIGKILL and Ctrl-C are the real ones.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MB = 24.0
"""A slow one takes two seconds for its part."""
PATIENCE = 6.0
"""Times the usual deadlines: a healthy process that the machine does not run for ten seconds stays one."""
PAIRS = [("dies before", "cancels"), ("dies sending", "sends slowly"), ("dies reducing", "reduces slowly")]
"""Each kind once, and each death beside a peer that lives on."""


def test_four_healthy_processes_succeed_whoever_fails_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    scenarios = importlib.import_module("scenarios")
    assert set(scenarios.KINDS) == {kind for pair in PAIRS for kind in pair}
    for run in scenarios.measure(PAIRS, MB, patience=PATIENCE):
        assert not run["problems"], scenarios.line(run)
        shares = dict(zip(run["kinds"], run["in"], strict=True))
        assert all(shares[kind] == 1.0 for kind in shares if "slowly" in kind), scenarios.line(run)
        assert all(shares[kind] < 1.0 for kind in shares if "dies" in kind), scenarios.line(run)
