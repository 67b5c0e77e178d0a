"""The averaging of many peers on the virtual clock, here with few: what its table says holds."""

from __future__ import annotations

import pytest

from dlc.sim.scale import gossip, main, moshpit
from dlc.sim.swim import membership


def test_moshpit_is_exact_in_d_rounds_and_near_with_deaths() -> None:
    told = moshpit(16, 4, 0.0, seed=1)
    assert told.sides == (4, 4) and told.error < 1e-5 and told.died == 0
    assert told.bulk == pytest.approx(told.bound, rel=0.05)
    assert moshpit(16, 4, 0.1, seed=1).died == 4


@pytest.mark.parametrize("graph", ["ring", "exponential", "random-pairs"])
def test_gossip_shrinks_the_distance_as_the_spectral_gap_says(graph: str) -> None:
    told = gossip(graph, 32, seed=1)
    assert told.measured == pytest.approx(told.theory, rel=0.05)


def test_membership_costs_no_more_in_a_large_swarm_and_all_learn_of_a_death() -> None:
    """Above 64 peers each is pinged in its turn only."""
    few, many = membership(24, seed=1), membership(96, seed=1)
    assert 0 < many.sent_Bps < few.sent_Bps < 10e3
    assert 0 < few.seconds < 30 and 0 < many.seconds < 30


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--peers", "9"]) == 0
    told = capsys.readouterr().out
    assert "3x3" in told and "membership" in told
