"""The least time of a round, from rates of paths."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path

import pytest

from dlc.bench.limit import least, read_links
from dlc.comm.partition import Member, optimum
from dlc.errors import UsageError

V = 400.0
"""Mbit: 100 MB of fp32 as fp16."""


def between(up: list[float], down: list[float], **paths: float) -> dict[tuple[str, str], float]:
    """Rates of paths that are as fast as the hosts' links, but for those that are given, as `ab`."""
    names = "abcdefgh"[: len(up)]
    links = permutations(range(len(up)), 2)
    return {(names[i], names[j]): paths.get(names[i] + names[j], min(up[i], down[j])) for i, j in links}


def test_links_that_are_all_the_same_carry_2_n_less_1_nths_of_the_vector() -> None:
    for n in (2, 3, 8):
        limit = least(between([50.0] * n, [50.0] * n), V)
        assert limit.seconds == pytest.approx(2 * (n - 1) / n * V / 50.0)
    assert limit.by.startswith("all that")


def test_a_slow_path_carries_two_nths_of_the_vector_and_not_what_goes_to_all() -> None:
    limit = least(between([1000.0] * 8, [1000.0] * 8, ab=10.0), V)
    assert limit.seconds == pytest.approx(2 / 8 * V / 10.0) and limit.by == "a to b"
    two = least(between([1000.0] * 2, [1000.0] * 2, ab=10.0), V)
    assert two.seconds == pytest.approx(V / 10.0) and two.by == "a to b"


def test_a_path_that_is_not_slow_enough_is_not_the_limit() -> None:
    """Its two eighths take as long as all that a host sends where it is seven times as slow."""
    assert least(between([70.0] * 8, [70.0] * 8, ab=11.0), V).seconds == pytest.approx(2 * 7 / 8 * V / 70.0)
    assert least(between([70.0] * 8, [70.0] * 8, ab=9.0), V).seconds == pytest.approx(2 / 8 * V / 9.0)


def test_a_slow_host_owns_less_and_sends_its_own_vector_at_least() -> None:
    slow = least(between([10.0, 100.0, 100.0, 100.0], [10.0, 100.0, 100.0, 100.0]), V)
    assert slow.seconds == pytest.approx(V / 10.0) and slow.by in ("all that a sends", "all that a receives")


def test_a_fast_host_is_not_taken_to_receive_as_slowly_as_others_send() -> None:
    """It can own all: what the others send is slow, and comes from all of them at once."""
    rates = between([1000.0] + [10.0] * 7, [1000.0] + [20.0] * 7)
    assert least(rates, V).seconds == pytest.approx(V / 10.0)


@pytest.mark.parametrize(
    ("up", "down"),
    [
        ([80.0, 40.0, 20.0, 20.0], [200.0, 100.0, 60.0, 60.0]),
        ([1000.0, 12.0, 9.0, 9.0, 40.0], [1000.0, 50.0, 100.0, 20.0, 200.0]),
        ([100.0, 100.0, 20.0], [20.0, 20.0, 100.0]),
        ([30.0, 300.0], [300.0, 30.0]),
    ],
)
def test_the_limit_is_no_more_than_the_least_time_of_these_hosts(up: list[float], down: list[float]) -> None:
    truth = optimum([Member(u, d) for u, d in zip(up, down, strict=True)], V).seconds
    assert 0.7 * truth < least(between(up, down), V).seconds < truth * 1.0001


def test_measurements_of_the_same_links_differ() -> None:
    noisy = between([50.0] * 4, [50.0] * 4, ab=46.0, bc=53.0, cd=48.0, da=51.0)
    assert least(noisy, V).seconds == pytest.approx(1.5 * V / 50.0, rel=0.1)


def test_rates_are_those_between_the_sites_that_take_part(tmp_path: Path) -> None:
    links = tmp_path / "links.json"
    rates = {("a:1", "b:1"): 90.0, ("b:1", "a:1"): 70, ("a:1", "c:1"): 5.0, ("c:1", "a:1"): None}
    pairs = [{"from": a, "to": b, "up_mbps": rate} for (a, b), rate in rates.items()]
    links.write_text(json.dumps({"pairs": pairs}))
    assert read_links(links, ["a:1", "b:1"]) == {("a:1", "b:1"): 90.0, ("b:1", "a:1"): 70.0}
    with pytest.raises(UsageError, match="no rate for c:1 to a:1"):
        read_links(links, ["a:1", "c:1"])
    for nothing in (0.0, True, float("inf"), -1.0):
        links.write_text(json.dumps({"pairs": [pairs[0], pairs[1] | {"up_mbps": nothing}]}))
        with pytest.raises(UsageError, match="no rate for b:1 to a:1"):
            read_links(links, ["a:1", "b:1"])
    links.write_text("[]")
    with pytest.raises(UsageError, match="no output of"):
        read_links(links, ["a:1", "b:1"])
    with pytest.raises(UsageError, match="cannot be read"):
        read_links(tmp_path / "nowhere", ["a:1"])
