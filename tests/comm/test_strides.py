"""Peers of unequal pace in a gossip: what they learn counts by how much of it they do."""

from __future__ import annotations

import random

import pytest

from dlc.comm.graphs import GRAPHS, neighbours
from dlc.comm.ids import Voter
from dlc.comm.strides import WINDOW, Strides

A, B = (Voter(name * 32, 1) for name in "ab")


def test_equal_paces_are_one_whoever_is_a_step_ahead() -> None:
    ahead, behind = Strides(), Strides()
    for step in range(4 * WINDOW):
        ahead.step({B: step})
        behind.step({A: step + 1})
        assert ahead.ratio(B) == behind.ratio(A) == 1.0
        assert ahead.due(B) and behind.due(A)
        ahead.gave(B)
        behind.gave(A)


@pytest.mark.parametrize("every", [1, 3])
def test_the_ratio_is_that_of_the_paces_and_follows_them(every: int) -> None:
    mine, told = Strides(), 0
    for step in range(10 * WINDOW * every):
        told = step // 8 // every * every  # it makes a step in eight of mine, and tells every `every`-th
        mine.step({B: told}, every)
    assert 1 / 8 <= mine.ratio(B) <= 1 / 8 + 1 / WINDOW
    for _ in range(3 * WINDOW * every):
        mine.step({B: told}, every)
    assert mine.ratio(B) == 0.0 and not any(mine.due(B) for _ in range(3)), "it steps no more"
    for _ in range(3 * WINDOW * every):
        told += 1
        mine.step({B: told}, every)
    assert mine.ratio(B) == 1.0
    assert mine.ratio(A) == 1.0, "nothing is known of it"


def test_who_counts_anew_or_comes_again_is_not_held_to_what_was() -> None:
    mine = Strides()
    for step in range(3 * WINDOW):
        mine.step({B: 1000 if step < 2 * WINDOW else 0})
    assert mine.ratio(B) == 0.0, "of the steps since then"
    mine.step({})
    mine.step({B: 1000})
    assert mine.ratio(B) == 1.0


def test_what_could_not_be_given_for_long_is_not_made_up_for_all_at_once() -> None:
    """While a gift is on its way no other goes to its taker: a burst of them would be more than that one can return."""
    mine, in_a_row = Strides(), 0
    for step in range(10 * WINDOW):
        mine.step({B: step // 8})
        mine.due(B)
    while in_a_row < WINDOW and mine.due(B):
        mine.gave(B)
        in_a_row += 1
    assert in_a_row == 2


def test_a_gift_that_is_due_stays_due_until_it_is_given_and_parts_of_one_add_up() -> None:
    mine, given = Strides(), 0
    assert mine.due(B) and mine.due(B)
    mine.gave(B)
    for step in range(400):
        mine.step({B: step * 7 // 10})
        if mine.due(B):
            mine.gave(B)
            given += 1
    assert 280 <= given <= 280 * 1.1, "not one in two, nor each"


def weights(graph: str, n: int, pace: float, fair: bool, turns: int = 1000) -> float:
    """The mean weight of one peer of n that makes `pace` steps to each of the others', from equal weights. The others
    step at random: at equal intervals, numbers that all share would bring some always the same neighbour."""
    drawn = random.Random(n)
    voters = [Voter(f"{i:032}", 1) for i in range(n)]
    strides, w, t, seen = [Strides() for _ in voters], [1.0] * n, 0, []
    waiting = [0.0] * n
    for turn in range(turns):
        for i, voter in enumerate(voters):
            if i and drawn.random() > 1 / pace:
                continue
            t += 0 if i else 1
            strides[i].step({v: strides[j].made for j, v in enumerate(voters) if j != i})
            w[i], waiting[i] = w[i] + waiting[i], 0.0
            here = w[i]
            for to, share in neighbours(graph, voters, voter, t, 0):
                if (due := strides[i].due(to)) or not fair:
                    if due:
                        strides[i].gave(to)
                    w[i] -= here * share
                    waiting[voters.index(to)] += here * share
        if turn > turns // 2:
            seen.append(w[0])
    assert sum(w) + sum(waiting) == pytest.approx(n)
    return sum(seen) / len(seen)


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize(("n", "pace"), [(2, 4), (5, 2), (5, 4), (6, 10), (16, 4)])
def test_a_fast_peer_keeps_its_weight(graph: str, n: int, pace: int) -> None:
    given_always, fair = weights(graph, n, pace, False), weights(graph, n, pace, True)
    assert given_always < 1.0 / pace + 0.15, "what the rule is for"
    assert 0.5 < fair < 1.5


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("n", [2, 5])
def test_a_peer_that_is_hardly_faster_takes_no_weight_from_the_others(graph: str, n: int) -> None:
    """It gave one gift of two, to peers that gave each: they held half of its weight."""
    assert weights(graph, n, 1.1, True) == pytest.approx(weights(graph, n, 1.0, True), abs=0.25)
