"""Whose turn it is on the connection to an owner."""

from __future__ import annotations

import pytest

from dlc.comm.turns import LEAD, Turns


def sent(turns: Turns, parts: int, results: int) -> str:
    """What goes, in order, where everything is ready."""
    order = ""
    while parts or results:
        first = parts and (not results or turns.contribution_first("a", parts, results))
        parts, results = (parts - 1, results) if first else (parts, results - 1)
        order += "C" if first else "R"
    return order


@pytest.mark.parametrize(("parts", "results"), [(100, 100), (300, 100), (20, 400)])
def test_both_end_together_whatever_is_ready_first(parts: int, results: int) -> None:
    turns = Turns()
    turns.begin({"a": parts}, results)
    order = sent(turns, parts, results)
    for at in range(len(order)):
        ahead = order[:at].count("C") / parts - order[:at].count("R") / results
        assert -1 / results - 1e-9 <= ahead <= LEAD + 1 / parts + 1e-9
    assert order.index("R") == pytest.approx(LEAD * parts, abs=1)


def test_who_is_owed_nothing_gets_results_and_who_reduces_nothing_sends_what_it_has() -> None:
    turns = Turns()
    turns.begin({"a": 10}, 10)
    assert not turns.contribution_first("b", 0, 10)
    turns.begin({"a": 10}, 0)
    assert not turns.contribution_first("a", 10, 3), "results of an older plan, that somebody still wants"
