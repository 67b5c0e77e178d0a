"""Engines that take turns beside each other, and their table, on made-up seconds; one true turn of Hivemind's names."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.helpers import benchmark_module

for imported in ("_gloo", "_workers"):
    benchmark_module(imported)
beside = benchmark_module("_beside")
Row = beside.Row
DEADLINE_S = 120.0
ROWS = [
    Row("2 processes", "ours", (0.5, 0.2, 0.4)),
    Row("2 processes", "theirs", (1.0, 3.0)),
    Row("4 processes", "ours", (2.0,)),
    Row("4 processes", "theirs", (1.0,)),
    Row("4 processes", "absent", (), "make it"),
]


def test_ratios_are_of_medians_within_one_case() -> None:
    assert [beside.ratio(ROWS, row, "ours") for row in ROWS] == [1.0, pytest.approx(5.0), 1.0, 0.5, None]


def test_no_ratio_without_ours() -> None:
    assert beside.ratio(ROWS[1:2], ROWS[1], "ours") is None
    assert beside.ratio([Row("2 processes", "ours", ()), ROWS[1]], ROWS[1], "ours") is None


def test_the_table_tells_median_spread_and_what_did_not_run() -> None:
    lines = beside.table(ROWS, "ours").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["case", "engine", "median, s", "least to most, s", "rounds", "x the time of ours"]
    assert cells[3] == ["2 processes", "theirs", "2.000", "1.000 to 3.000", "2", "5.00"]
    assert cells[2][2:] == ["0.400", "0.200 to 0.500", "3", "1.00"]
    assert cells[6][:3] == ["4 processes", "absent", "not run: make it"]
    assert {len(row) for row in cells} == {6}


def test_turns_begin_with_another_engine_and_what_was_finished_is_told_after_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun: list[str] = []

    def turn(engine: str) -> list[float]:
        begun.append(engine)
        if len(begun) == 4:
            raise RuntimeError("not the mean of all")
        return [float(len(begun))]

    work = {("2 processes", engine): partial(turn, engine) for engine in ("ours", "theirs", "absent")}
    options = argparse.Namespace(repeats=3, json=tmp_path / "found.json")
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert beside.run(work, {"absent": "make it"}, "ours", "title", options) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    assert begun == ["ours", "theirs", "theirs", "ours"]
    told = capsys.readouterr()
    assert "title" in told.out and "not run: make it" in told.out and "failed: not the mean of all" in told.err
    found = json.loads(options.json.read_text("utf-8"))
    assert [(row["engine"], row["all_s"]) for row in found] == [("ours", [1.0]), ("theirs", [2.0, 3.0]), ("absent", [])]
    assert [row["over_dlc"] for row in found] == [1.0, 2.5, None]


@pytest.mark.parametrize("module", ["dlc.compat.hivemind", "hivemind"])
def test_a_program_of_hiveminds_names_steps_to_the_true_mean(module: str) -> None:
    """benchmarks/compat.py, tiny: each process compares its vector with the mean, and a wrong one raises."""
    sites = benchmark_module("_hivemind_sites")
    if module == "hivemind" and not sites.PYTHON.exists():
        pytest.skip(sites.MISSING)
    engine = sites.THEIRS if module == "hivemind" else sites.Engine(module, sys.executable)
    with sites.HivemindSites([sites.Place()] * 2, 5000, engine, matchmaking_s=None) as program:
        assert all(0.0 < program.step() < DEADLINE_S for _ in range(2))
        assert 0.0 < program.round() < DEADLINE_S
