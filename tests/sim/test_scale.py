"""The averaging of many peers on the virtual clock, here with few: what its table says holds."""

from __future__ import annotations

import pytest

from dlc.sim.scale import gossip, main, moshpit


def test_moshpit_is_exact_in_d_rounds_and_near_with_deaths() -> None:
    told = moshpit(16, 4, 0.0, seed=1)
    assert told.sides == (4, 4) and told.error < 1e-5 and told.died == 0
    assert told.bulk == pytest.approx(told.bound, rel=0.05)
    assert moshpit(16, 4, 0.1, seed=1).died == 4


@pytest.mark.parametrize("graph", ["ring", "exponential", "random-pairs"])
def test_gossip_shrinks_the_distance_as_the_spectral_gap_says(graph: str) -> None:
    told = gossip(graph, 32, seed=1)
    assert told.measured == pytest.approx(told.theory, rel=0.05)


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--peers", "9"]) == 0
    assert "3x3" in capsys.readouterr().out
