"""The division of a round's work: the least time there is (an LP solver is the oracle), and the best whole chunks."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from dlc.comm.partition import Member, completed, connection_Bps, counts, divided, loads, optimum, time_s

BYTES = 5e6


def drawn(seed: int, roles: bool) -> list[Member]:
    """1 to 16 members with rates over three decades; with roles, some do not contribute, own, or get the result."""
    rng = random.Random(seed)
    members = []
    for _ in range(rng.randint(1, 16)):
        up, down = 10 ** rng.uniform(5, 8), 10 ** rng.uniform(5, 8)
        contributes, owns, receives = (not roles or rng.random() < 0.8 for _ in range(3))
        length = rng.choice((1.0, 3.5)) if roles else 1.0  # of a result, in contributions
        members.append(Member(up, rng.choice((up, down)), contributes, owns, length * receives))
    if not any(m.contributes for m in members) or not any(m.owns for m in members):
        members.append(Member(1e6, 1e6))
    return members


def bytes_moved(members: list[Member], shares: list[float]) -> list[tuple[float, float]]:
    """Counted one transfer at a time: (sent, received) of each."""
    sent, received = [0.0] * len(members), [0.0] * len(members)
    for i, a in enumerate(members):
        for j, b in enumerate(members):
            if i != j:
                size = BYTES * (shares[j] * a.contributes + shares[i] * b.receives)
                sent[i] += size
                received[j] += size
    return list(zip(sent, received, strict=True))


def lp_seconds(members: list[Member]) -> float:
    """The least T by a general LP solver: each load is linear in the member's own share, found here by differences."""
    n = len(members)
    none = bytes_moved(members, [0.0] * n)
    rows, limits = [], []
    for i, m in enumerate(members):
        one = bytes_moved(members, [float(j == i) for j in range(n)])
        # A load depends on the sum of all shares too, which is 1: what the others own follows from one's own share.
        others = bytes_moved(members, [0.0 if j == i else 1.0 / max(1, n - 1) for j in range(n)])
        for direction, rate in ((0, m.up_Bps), (1, m.down_Bps)):
            assert none[i][direction] == 0
            at_0, at_1 = others[i][direction] if n > 1 else one[i][direction], one[i][direction]
            row = [0.0] * (n + 1)
            row[i], row[n] = at_1 - at_0, -rate
            rows.append(row)
            limits.append(-at_0)
    # In units of a second of the whole at 1 MB/s, so that the solver's tolerances fit.
    scale = BYTES / 1e6
    a = np.array(rows) / BYTES
    a[:, n] *= scale
    bounds = [(0, 1 if m.owns else 0) for m in members] + [(0, None)]
    found = linprog(
        [0.0] * n + [1.0], A_ub=a, b_ub=np.array(limits) / BYTES, A_eq=[[1.0] * n + [0.0]], b_eq=[1.0], bounds=bounds
    )
    assert found.success, found.message
    return float(found.x[n]) * scale


@pytest.mark.parametrize("roles", [False, True])
def test_the_least_time_is_that_of_an_lp_solver(roles: bool) -> None:
    for seed in range(60):
        members = drawn(seed, roles)
        found = optimum(members, BYTES)
        whole = completed(members)
        assert whole is not None
        # Where all do everything, the cap on a single claim costs nothing: the LP is given the rates as they are.
        assert found.seconds == pytest.approx(lp_seconds(whole if roles else members), rel=1e-6, abs=1e-9), seed


@pytest.mark.parametrize("roles", [False, True])
def test_the_shares_take_the_least_time(roles: bool) -> None:
    for seed in range(100):
        members = drawn(seed, roles)
        found = optimum(members, BYTES)
        assert math.isclose(sum(found.shares), 1.0, rel_tol=1e-9)
        assert all(0 <= share <= (1 + 1e-9 if m.owns else 0) for share, m in zip(found.shares, members, strict=True))
        whole = completed(members)
        assert whole is not None
        moved = bytes_moved(whole, list(found.shares))
        takes_s = max(max(s / m.up_Bps, r / m.down_Bps) for (s, r), m in zip(moved, whole, strict=True))
        assert takes_s == pytest.approx(found.seconds, rel=1e-6, abs=1e-9), seed
        assert time_s(members, found.shares, BYTES) == pytest.approx(takes_s, rel=1e-9, abs=1e-12)


def test_the_closed_form_of_equal_directions() -> None:
    rng = random.Random(1)
    for _ in range(200):
        rates = [10 ** rng.uniform(5, 8) for _ in range(rng.randint(2, 16))]
        closed_s = max(BYTES / min(rates), 2 * (len(rates) - 1) * BYTES / sum(rates))
        assert optimum([Member(r, r) for r in rates], BYTES).seconds == pytest.approx(closed_s, rel=1e-9)


def test_loads_and_connections_are_the_transfers_one_by_one() -> None:
    for seed in range(50):
        members = drawn(seed, roles=True)
        shares = optimum(members, BYTES).shares
        each, moved = loads(members, shares, BYTES), bytes_moved(members, list(shares))
        n = len(members)
        for i in range(n):
            assert (each[i].up, each[i].down) == pytest.approx(moved[i], rel=1e-9, abs=1e-3)
            to = sum(connection_Bps(members, shares, BYTES, 2.0, i, j) for j in range(n) if j != i)
            assert to == pytest.approx(moved[i][0] / 2.0, rel=1e-9, abs=1e-3)


# ------------------------------------------------------------------ unknown rates, claims


def test_where_nothing_is_known_all_own_the_same() -> None:
    members = [Member(), Member(contributes=False), Member(owns=False), Member()]
    found = optimum(members, BYTES)
    assert found.shares == pytest.approx((1 / 3, 1 / 3, 0, 1 / 3)) and found.seconds == 0
    assert counts(10, members) == [4, 3, 0, 3] and time_s(members, found.shares, BYTES) == 0
    assert counts(3, [Member()] * 16) == [1, 1, 1] + [0] * 13
    assert counts(49, [Member()] * 49) == [1] * 49


def test_an_unknown_rate_counts_as_the_median() -> None:
    known = [Member(2e6, 8e6), Member(3e6, 9e6), Member(9e6, 9e6)]
    assert optimum([*known, Member()], BYTES) == optimum([*known, Member(3e6, 9e6)], BYTES)


def test_a_direction_of_which_nothing_is_known_limits_nobody() -> None:
    ups = (2e6, 8e6, 8e6, 8e6)
    found = optimum([Member(up, 0.0) for up in ups], BYTES)
    assert found == optimum([Member(up, 1e12) for up in ups], BYTES)
    assert found.seconds == pytest.approx(max(BYTES / 2e6, 6 * BYTES / sum(ups)))


def test_a_claim_counts_for_no_more_than_anybody_could_use() -> None:
    honest = [Member(1e6, 1e6)] * 3
    assert optimum([*honest, Member(1e12, 1e12)], BYTES) == optimum([*honest, Member(4e6, 4e6)], BYTES)


def test_rates_that_cannot_be() -> None:
    for bad in (Member(-1.0, 1.0), Member(math.nan, 1.0), Member(1.0, math.inf)):
        with pytest.raises(ValueError, match="rates"):
            optimum([Member(1.0, 1.0), bad], BYTES)
    with pytest.raises(ValueError, match="own"):
        optimum([Member(1.0, 1.0, owns=False)], BYTES)


# ------------------------------------------------------------------ who owns what


def test_a_slow_peer_owns_nothing_and_the_others_keep_slack() -> None:
    found = optimum([Member(r, r) for r in (20e6, 80e6, 80e6, 160e6)], BYTES)
    slow, *fast = found.shares
    assert slow == pytest.approx(0, abs=1e-9) and found.seconds == pytest.approx(BYTES / 20e6)
    assert fast[0] == pytest.approx(fast[1]) and fast[2] > fast[0], "in proportion to what they could own"


def test_a_helper_pays_where_its_link_is_faster_than_the_others() -> None:
    """It votes, so it gets the result too: on a link like the others' that costs more than its work saves."""
    trainers = [Member(10e6, 10e6)] * 3
    alone = optimum(trainers, BYTES)
    equal = optimum([*trainers, Member(10e6, 10e6, contributes=False)], BYTES)
    fast = optimum([*trainers, Member(30e6, 30e6, contributes=False)], BYTES)
    assert fast.seconds < 0.8 * alone.seconds < alone.seconds < equal.seconds
    assert fast.shares[3] > 2 * fast.shares[0]


@given(rates=st.lists(st.floats(1e5, 1e9), min_size=2, max_size=12), n_chunks=st.integers(1, 120))
def test_no_division_into_whole_chunks_takes_less_time(rates: list[float], n_chunks: int) -> None:
    members = [Member(r, r) for r in rates]
    owned = divided(n_chunks, members)
    assert sum(owned) == n_chunks and min(owned) >= 0
    assert sum(counts(n_chunks, members)) == n_chunks and min(counts(n_chunks, members)) >= 0
    # The times that single members need for so many chunks: the n-th smallest of them all is the least there is.
    whole = completed(members)
    assert whole is not None
    each = [loads(whole, [k / n_chunks] * len(rates), BYTES) for k in range(1, n_chunks + 1)]
    times = sorted(load.up / m.up_Bps for row in each for m, load in zip(whole, row, strict=True))
    none_s = max(BYTES / m.up_Bps for m in whole)
    least_s = max(none_s, times[n_chunks - 1])
    assert time_s(members, [c / n_chunks for c in owned], BYTES) == pytest.approx(least_s, rel=1e-9)


def test_equal_arguments_give_equal_plans() -> None:
    for seed in range(20):
        members = drawn(seed, roles=True)
        assert counts(77, members) == counts(77, list(members))


@pytest.mark.parametrize(
    ("rates", "n_chunks", "owned"),
    [
        ((20, 80, 80, 80), 20, [0, 7, 7, 6]),
        ((80, 20, 20), 20, [20, 0, 0]),
        ((200, 200, 200, 200), 10, [3, 3, 2, 2]),
        ((1, 1), 1, [1, 0]),
        ((5,), 7, [7]),
        ((20, 37, 37, 23), 10, [0, 5, 5, 0]),  # the last would own a single chunk, whose result comes a round later
    ],
)
def test_known_divisions(rates: tuple[float, ...], n_chunks: int, owned: list[int]) -> None:
    assert counts(n_chunks, [Member(r * 1e6, r * 1e6) for r in rates]) == owned
