"""Gossip where vectors do not reach all neighbours: push-sum, all steps at once, comes to the mean of everybody."""

from __future__ import annotations

import random

import numpy as np
import pytest

from dlc.comm.detours import BACK_SHARE, Detours
from dlc.comm.graphs import GRAPHS, neighbours


class Walk:
    """n peers, 0 to n - 1, that hold one number each. `apart`: pairs that do not reach each other."""

    def __init__(self, graph: str, n: int, apart: set[frozenset[int]]) -> None:
        self.graph, self.n, self.pairs, self.t = graph, n, apart, 0
        self.held = np.arange(n, dtype=np.float64)
        self.weights = np.ones(n)
        self.detours = [Detours(graph, i, seed=1) for i in range(n)]
        self.carried: set[tuple[int, int]] = set()

    def apart(self, i: int) -> set[int]:
        return {j for j in range(self.n) if frozenset((i, j)) in self.pairs}

    def step(self) -> None:
        move, came = np.zeros((self.n, self.n)), list[tuple[int, int]]()
        for i, detours in enumerate(self.detours):
            for to, share in detours.gives(range(self.n), self.t, self.apart(i)):
                assert to != i and to not in self.apart(i)
                move[to, i] += share
                came.append((to, i))
        move += np.diag(1.0 - move.sum(0))
        assert np.diag(move).min() > 0.99 * (1 - 0.5 - BACK_SHARE)
        mass = move @ (self.weights * self.held)
        self.weights = move @ self.weights
        self.held = mass / self.weights
        for to, giver in came:
            self.detours[to].came(giver, self.t)
        self.carried |= set(came)
        self.t += 1


def sites(kinds: str) -> set[frozenset[int]]:
    """a and b do not reach each other; c reaches all."""
    return {frozenset((i, j)) for i, x in enumerate(kinds) for j, y in enumerate(kinds) if {x, y} == {"a", "b"}}


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("kinds", ["abc", "abac", "aabcba", "cababab"])
def test_two_sites_that_do_not_reach_each_other_come_to_the_mean_of_all(graph: str, kinds: str) -> None:
    walk = Walk(graph, len(kinds), sites(kinds))
    for _ in range(200):
        walk.step()
    assert walk.weights.sum() == pytest.approx(walk.n, rel=1e-12)
    np.testing.assert_allclose(walk.held, (walk.n - 1) / 2, atol=1e-3)
    assert walk.weights.min() > 1e-3, "who gives is given to"


@pytest.mark.parametrize("seed", range(8))
def test_pairs_out_of_reach_change_no_mean_while_one_peer_reaches_all(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.randint(3, 10)
    apart = {frozenset((i, j)) for i in range(1, n) for j in range(i) if j and rng.random() < 0.4}
    walk = Walk(rng.choice(GRAPHS), n, apart)
    for _ in range(250):
        walk.step()
    assert walk.weights.sum() == pytest.approx(n, rel=1e-12)
    np.testing.assert_allclose(walk.held, (n - 1) / 2, atol=1e-3)


@pytest.mark.parametrize("graph", GRAPHS)
def test_where_all_are_reached_it_is_the_graph(graph: str) -> None:
    walk = Walk(graph, 6, set())
    for t in range(12):
        expected = {(to, i) for i in range(6) for to, _ in neighbours(graph, range(6), i, t, 1)}
        walk.carried = set()
        walk.step()
        assert walk.carried == expected


def test_a_neighbour_out_of_reach_is_not_waited_for_and_its_share_goes_elsewhere() -> None:
    detours = Detours("ring", 0, seed=0)
    assert detours.waits_for(range(5), 0, {1}) == [4]
    ((left, half), (other, instead)) = detours.gives(range(5), 0, {1})
    assert left == 4 and other in (2, 3) and half == instead == 0.25
    assert detours.gives(range(3), 1, {1}) == [(2, 0.25)], "nobody else is there: the share stays"


def test_who_gave_beside_the_graph_gets_something_back_once_and_what_comes_back_is_not_answered() -> None:
    giver, taker = Detours("ring", 0, seed=0), Detours("ring", 2, seed=0)
    assert (2, 0.25) in giver.gives(range(4), 0, {1})
    taker.came(0, 0)
    taker.came(1, 0)
    assert taker.gives(range(4), 1, ()) == [(1, 0.25), (3, 0.25), (0, BACK_SHARE)]
    assert taker.gives(range(4), 2, ()) == [(1, 0.25), (3, 0.25)]
    giver.came(2, 1)
    assert giver.gives(range(4), 3, ()) == [(1, 0.25), (3, 0.25)]
