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


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("chaos", "--fragments 3 --print-schedule", "multiple of fragments"),
        ("chaos", "--every 0 --print-schedule", "--every must be above 0"),
        ("techniques", "--arms diloco --sync-every 0", "sync_every must be at least 1"),
        ("dataparallel", "--codec fp17", "fp17"),
        ("utilisation", "--overlaps none,late", "no late; there are none"),
        ("utilisation", "--codec fp17", "fp17"),
        ("memory", "--overlap late", "late"),
        ("memory", "--codec fp17", "fp17"),
        ("allreduce", "--codec int4", "int4"),
        ("encryption", "--codec int4", "int4"),
    ],
)
def test_options_that_cannot_be_are_refused_in_a_sentence(
    name: str, words: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some ended with a traceback, or with one of each process; a fault every 0 seconds took for ever to plan."""
    monkeypatch.syspath_prepend(str(FOLDER))
    benchmark = benchmark_module(name)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words.split()])
    with pytest.raises(SystemExit) as ended:
        benchmark.main()
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_the_convergence_benchmark_trains_and_tells_the_loss(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "convergence.py"), "--arms", "2 workers;int8", "--seeds", "1"]
    command += ["--start", "30", "--steps", "70", "--state", str(tmp_path / "state.json"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {row["arm"]: row for row in json.loads(done.stdout[done.stdout.index("{") :])["rows"]}
    assert rows.keys() == {"2 workers", "int8"}
    for row in rows.values():
        assert 2.0 < row["loss"] < 3.2, "a byte drawn at random costs 5.5 nats"
    runs = json.loads((tmp_path / "state.json").read_text())["runs"]
    first, last = ({run["curve"][at][1] for run in runs.values()} for at in (0, -1))
    assert len(first) == 1 and first.pop() < 4.5 and len(last) == 2, "all arms go on from one model that has learned"
