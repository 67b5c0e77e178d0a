"""Who is waited for, by what it costs: one second of one peer is the unit where all have one pace."""

from __future__ import annotations

import pytest

from dlc.comm.straggler import Idle, Late, worth_waiting

FLOOR_S, SHARE = 2.0, 0.5
PHASE_S = 60.0


def waits(ready: list[Idle], late: list[Late]) -> bool:
    return worth_waiting(ready, late, FLOOR_S, SHARE, PHASE_S)


def idle(n: int, since_s: float = 3.0, pace: float = 1.0) -> list[Idle]:
    return [Idle(since_s, pace)] * n


def late(eta_s: float | None, worked_s: float = PHASE_S, pace: float = 1.0) -> Late:
    return Late(eta_s, worked_s, pace)


def wait_s(n: int, eta_s: float | None, worked_s: float = PHASE_S, step_s: float = 0.25) -> float:
    """How long n ready peers wait for one that never comes; what it said ages."""
    at_s = 0.0
    while waits(
        [Idle(at_s, 1.0)] * n,
        [Late(None if eta_s is None else max(0.0, eta_s - at_s), worked_s + at_s, 1.0)],
    ):
        at_s += step_s
        assert at_s < 10 * PHASE_S, "for ever"
    return at_s


def test_nobody_is_late() -> None:
    assert not waits(idle(3), [])


@pytest.mark.parametrize(
    ("n", "eta_s", "waited"),
    [
        (1, 18.0, True),  # two peers, one 1.3 times slower: half of its minute is worth more than 18 s of the other
        (7, 18.0, False),  # but not 18 s of seven others
        (7, 3.0, True),
        (1, 600.0, False),
        (9, 0.2, True),
        (20, 0.2, False),  # they have spent a minute already
    ],
)
def test_a_wait_that_costs_less_than_the_work_of_the_late_one(n: int, eta_s: float, waited: bool) -> None:
    assert waits(idle(n), [late(eta_s)]) == waited


def test_everybody_near_is_waited_for_and_the_far_one_is_not() -> None:
    assert waits(idle(1), [late(1.0), late(1.0), late(500.0)])
    assert not waits(idle(5), [late(500.0)])


def test_the_first_does_not_start_alone_after_a_round_that_left_it_out() -> None:
    """All others have just begun: they have nothing done yet, but will bring all of a phase."""
    behind = [Idle(3.0, 1.0)]
    assert waits(behind, [late(PHASE_S, 0.5)] * 7)
    assert waits(behind, [late(None, 0.5)] * 7)  # they have not said anything since
    assert waits([Idle(PHASE_S - 1.0, 1.0)], [late(None, 0.5)] * 2)
    assert not waits([Idle(PHASE_S + 1.0, 1.0)], [late(None, 0.5)] * 2)


def test_two_halves_out_of_step_come_together() -> None:
    """Each half would otherwise be left out of every second round."""
    assert waits(idle(2, 0.5), [late(None, 0.5)] * 2)
    assert waits(idle(2, 3.0), [late(PHASE_S - 5.0, 0.5)] * 2)
    assert not waits(idle(2, 3.0), [late(20 * PHASE_S, 0.5)] * 2)
    assert not waits(idle(3, 3.0), [late(None, 3.0)] * 2)


def test_a_newcomer_without_work_holds_up_nobody() -> None:
    for since_s in (0.0, 0.1, 3.0):
        assert not waits(idle(7, since_s), [late(None, 0.2)])
        assert not waits(idle(7, since_s), [late(PHASE_S, 0.2)])
    assert not waits(idle(2, 0.0), [late(None, 0.2)])


def test_predictions_are_given_a_floor() -> None:
    assert waits(idle(100, FLOOR_S / 2), [late(0.0)])
    assert waits(idle(100, FLOOR_S / 2), [late(600.0)])
    assert not waits(idle(100, FLOOR_S), [late(600.0)])


@pytest.mark.parametrize("eta_s", [0.0, 1.0, 10.0, None])
@pytest.mark.parametrize("n", [1, 2, 7, 100])
def test_who_never_comes_is_waited_for_within_bounds(n: int, eta_s: float | None) -> None:
    """n peers together spend no more than half of its work, but for the floor."""
    waited_s = wait_s(n, eta_s)
    assert waited_s <= max(FLOOR_S, SHARE * (PHASE_S + waited_s + (eta_s or 0.0)) / n) + 0.25
    assert waited_s >= FLOOR_S


@pytest.mark.parametrize(
    ("ready", "absent"), [([1.0], [2.0]), ([1.0, 1.0], [4.0]), ([1.0], [1.0, 1.0]), ([1.0] * 4, [1.0] * 8)]
)
def test_those_with_most_of_the_paces_who_never_come_are_waited_for_within_bounds(
    ready: list[float], absent: list[float]
) -> None:
    """By the wait itself no more comes to be at stake than a phase's work."""

    def waits_at(waited_s: float) -> bool:
        idle = [Idle(waited_s, pace) for pace in ready]
        overdue = [Late(0.0, PHASE_S + waited_s, pace) for pace in absent]
        return worth_waiting(idle, overdue, FLOOR_S, SHARE, PHASE_S)

    assert waits_at(FLOOR_S) and not waits_at(2 * PHASE_S)


def test_who_was_left_out_has_more_at_stake() -> None:
    assert not waits(idle(3, 1.0 + FLOOR_S), [late(10.5, worked_s=PHASE_S - 10.5)])
    assert waits(idle(3, 1.0 + FLOOR_S), [late(10.5, worked_s=2 * PHASE_S - 10.5)])


def test_paces_count() -> None:
    fast, slow = 8.0, 1.0
    assert waits(idle(4, pace=slow), [late(20.0, pace=fast)])
    assert not waits(idle(4, pace=fast), [late(20.0, pace=slow)])


def test_who_comes_meanwhile_waits_for_the_rest_too() -> None:
    """The first of the late ones is not worth its wait alone; with it, twice as much waits for the second."""
    ready = [Idle(0.0, 50.0), Idle(0.0, 50.0)]
    first, second = Late(1.0, 0.0, 150.0), Late(10.0, 20.0, 100.0)
    assert not worth_waiting(ready, [first, second], 0.0, 0.5, 20.0)
    assert worth_waiting(ready, [second], 0.0, 0.5, 20.0), "alone it would cost them 1000 of 1500"


def test_who_has_made_no_step_yet_is_none_of_a_majority() -> None:
    ready, slow = [Idle(0.0, 1.0)], 0.01
    assert not worth_waiting(ready, [Late(5.0, 0.0, slow)], 0.0, 0.5, 10.0)
    assert worth_waiting(ready, [Late(5.0, 1.0, slow)], 0.0, 0.5, 10.0)
