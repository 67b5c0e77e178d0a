"""The relations between deadlines, on which safety and speed rest."""

from __future__ import annotations

import pytest

from dlc.comm.timeouts import Timeouts
from dlc.errors import ConfigError


def test_timeouts_keep_their_relations() -> None:
    timeouts = Timeouts()
    for n in (1, 2, 8, 100, 4000):
        for health in (1.0, 8.0):
            dead, remove, evict = (f(n, health) for f in (timeouts.t_dead_s, timeouts.t_remove_s, timeouts.t_evict_s))
            assert dead < remove < evict
            assert timeouts.t_gap_s() <= evict / 4
            assert timeouts.t_coord_s(n, health, 0.1) > dead and timeouts.t_refresh_s(n, health, 0.1) > dead
    assert timeouts.t_dead_s(1, 1) == 0.25 + 4 * 0.25
    assert timeouts.t_evict_s(1, 1) == 60.0
    assert timeouts.t_gap_s() == 15.0
    assert timeouts.t_prep_s(0.0) == 0.25
    assert timeouts.t_commit_s(100.0) == 25.0
    assert timeouts.t_chunk_s(0.1, 5.0) == 15.0


@pytest.mark.parametrize(
    "wrong",
    [{"probe_s": 0.0}, {"evict_s": float("nan")}, {"probe_s": 2.0}, {"beat_s": 2.0}, {"evict_s": 3.0}],
)
def test_timeouts_that_contradict_each_other_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Timeouts(**wrong)
