"""Every direction once, nobody twice at the same time."""

from __future__ import annotations

import pytest

from dlc.bench.schedule import turns


@pytest.mark.parametrize("n", range(2, 12))
def test_every_ordered_pair_once_and_no_host_in_two_measurements(n: int) -> None:
    schedule = turns(n)
    pairs = [pair for turn in schedule for pair in turn]
    assert sorted(pairs) == [(a, b) for a in range(n) for b in range(n) if a != b]
    for turn in schedule:
        hosts = [host for pair in turn for host in pair]
        assert len(hosts) == len(set(hosts))
    assert len(schedule) == 2 * (n - 1 + n % 2), "as few turns as there can be"


def test_one_host_has_nobody_to_measure() -> None:
    assert turns(1) == [] and turns(0) == []
