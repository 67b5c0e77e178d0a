"""Benchmarks that no other test runs keep working as what they measure changes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import benchmark_module

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_a_benchmark_finds_all_that_it_uses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One imported a function that was gone, and nobody noticed."""
    monkeypatch.syspath_prepend(str(FOLDER))
    benchmark_module(name)


def test_the_convergence_benchmark_trains_and_tells_the_loss(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "convergence.py"), "--arms", "2 workers;int8", "--seeds", "1"]
    command += ["--steps", "100", "--state", str(tmp_path / "state.json"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {row["arm"]: row for row in json.loads(done.stdout[done.stdout.index("{") :])["rows"]}
    assert rows.keys() == {"2 workers", "int8"}
    for row in rows.values():
        assert 2.0 < row["loss"] < 3.2, "a byte drawn at random costs 5.5 nats"
