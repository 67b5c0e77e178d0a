"""The table of engines beside each other, on made-up seconds."""

from __future__ import annotations

import pytest

from tests.helpers import benchmark_module

beside = benchmark_module("_beside")
Row = beside.Row
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
