"""The rates that a plan gives to connections: no link is overfilled, and no claim stops a round."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from dlc.comm.effects import Effect, Pace
from dlc.comm.ids import Voter
from dlc.comm.messages import Result
from dlc.comm.owners import Shape
from dlc.comm.pacing import PLAN_SHARE, RATE_MIN_BPS, SPARE_SHARE, UNPACED_BPS, Pacing, rates
from dlc.comm.partition import Member, loads, optimum, time_s
from dlc.sim.world import Process
from tests.comm.stage import Stage

VECTOR = 10_000_000


def shape(members: Sequence[Member], shares: Sequence[float]) -> Shape:
    voters = tuple(Voter(f"p{i}", 1) for i in range(len(members)))
    return Shape(voters, tuple(members), tuple(shares), VECTOR)


def matrix(members: list[Member], shares: tuple[float, ...]) -> list[list[float]]:
    """Rate from each to each; 0 on the diagonal. All must be paced."""
    found = [rates(shape(members, shares), me) for me in range(len(members))]
    for me, row in enumerate(found):
        assert row[me] is None and all(rate is not None for j, rate in enumerate(row) if j != me)
    return [[rate or 0.0 for rate in row] for row in found]


@pytest.mark.parametrize("seed", range(20))
def test_no_link_carries_more_than_its_share_and_all_flows_end_together(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.randint(3, 12)
    members = [Member(rng.uniform(2e6, 40e6), rng.uniform(2e6, 40e6)) for _ in range(n)]
    shares = optimum(members, VECTOR).shares
    found, each = matrix(members, shares), loads(members, shares, VECTOR)
    plan_s = time_s(members, shares, VECTOR) / PLAN_SHARE
    for i, (member, load) in enumerate(zip(members, each, strict=True)):
        sent = [rate for rate in found[i] if rate > RATE_MIN_BPS]
        received = [row[i] for row in found if row[i] > RATE_MIN_BPS]
        assert sum(sent) <= PLAN_SHARE * member.up_Bps * (1 + 1e-9)
        assert sum(received) <= (PLAN_SHARE if shares[i] else 1.0) * member.down_Bps * (1 + 1e-9)
        assert sum(found[i]) * plan_s >= load.up * (1 - 1e-9)
        assert all(found[i][j] * plan_s >= (shares[i] + shares[j]) * VECTOR * (1 - 1e-9) for j in range(n) if j != i)


def test_the_slow_link_is_filled_to_its_share() -> None:
    members = [Member(2.5e6, 2.5e6), *[Member(10e6, 10e6)] * 3]
    found = matrix(members, optimum(members, VECTOR).shares)
    assert sum(found[0]) == pytest.approx(PLAN_SHARE * 2.5e6)
    assert sum(row[0] for row in found) == pytest.approx(2.5e6), "results do not lag behind contributions"


def test_results_go_faster_only_where_the_way_up_has_room() -> None:
    """Two own, whose ways up the plan fills: a third that owns nothing gets what is left, and no link is overfilled."""
    members = [Member(3e6, 9e6), Member(3e6, 9e6), Member(9e6, 9e6, owns=False)]
    found = matrix(members, (0.5, 0.5, 0.0))
    assert [sum(row) for row in found[:2]] == [pytest.approx(PLAN_SHARE * 3e6)] * 2


def test_what_the_way_up_has_to_spare_is_shared_by_all_who_own_nothing() -> None:
    members = [Member(3e6, 2.97e6), *[Member(9e6, 9e6, owns=False)] * 2]
    found = matrix(members, (1.0, 0.0, 0.0))
    assert sum(found[0]) == pytest.approx(PLAN_SHARE * 3e6)


def test_of_two_the_quicker_has_some_of_what_is_left() -> None:
    members = [Member(6e6, 6e6), Member(3e6, 9e6)]
    found = matrix(members, (0.5, 0.5))
    assert found[1][0] == pytest.approx(PLAN_SHARE * 3e6)
    assert found[0][1] == pytest.approx(PLAN_SHARE * (3e6 + SPARE_SHARE * 3e6))


def test_who_only_helps_or_only_receives_is_counted() -> None:
    members = [Member(5e6, 5e6), Member(5e6, 5e6), Member(5e6, 5e6, contributes=False, receives=False)]
    found = matrix(members, (0.25, 0.25, 0.5))
    assert max(sum(row) for row in found) == pytest.approx(PLAN_SHARE * 5e6)
    assert found[2][0] == found[0][2] == found[0][1] == pytest.approx(PLAN_SHARE * 5e6 / 2)


def test_an_unknown_rate_limits_nobody() -> None:
    members = [Member(4e6, 4e6), Member(0.0, 0.0), Member(8e6, 8e6)]
    third = (1 / 3,) * 3
    assert rates(shape(members, third), 1) == [None] * 3
    assert sum(r for r in rates(shape(members, third), 0) if r) == pytest.approx(PLAN_SHARE * 4e6)
    assert rates(shape([Member(), Member()], (0.5, 0.5)), 0) == [None, None]
    assert rates(shape([Member(4e6, 4e6)], (1.0,)), 0) == [None]


def test_a_claim_of_almost_nothing_does_not_stop_the_others() -> None:
    members = [Member(1.0, 1.0), *[Member(10e6, 10e6)] * 3]
    shares = (0.0, *(1 / 3,) * 3)
    found = matrix(members, shares)
    for i in (1, 2, 3):
        assert found[i][0] == found[0][i] == RATE_MIN_BPS
        assert all(found[i][j] > 0.99 * PLAN_SHARE * SPARE_SHARE * 10e6 / 3 for j in (1, 2, 3) if i != j)


@pytest.mark.parametrize(
    ("up", "down", "paced"), [(1e9, 1e9, False), (1e9, 2e6, True), (2e6, 1e9, True), (1e9, 0, False)]
)
def test_only_where_a_link_is_narrow(up: float, down: float, paced: bool) -> None:
    assert UNPACED_BPS < 1e9
    found = rates(shape([Member(up, 1e9), Member(1e9, down)], (0.5, 0.5)), 0)
    assert (found[1] is not None) == paced


def test_a_plan_sets_rates_the_next_changes_them_and_the_end_lifts_them() -> None:
    members = [Member(10e6, 10e6)] * 3
    all_three = shape(members, (0.5, 0.5, 0.0))
    ctx = SimpleNamespace(me=all_three.voters[0], out=[])
    pacing = Pacing(ctx)  # type: ignore[arg-type]

    def told(plan: Shape | None) -> dict[str, float | None]:
        ctx.out = []
        pacing.begin(plan)
        assert all(isinstance(effect, Pace) for effect in ctx.out)
        return {effect.peer: effect.rate_Bps for effect in ctx.out}

    first = told(all_three)
    assert first == dict(zip(("p1", "p2"), rates(all_three, 0)[1:], strict=True)) and None not in first.values()
    without_last = Shape(all_three.voters[:2], tuple(members[:2]), (0.5, 0.5), VECTOR)
    again = told(without_last)
    assert again["p2"] is None and again["p1"] == pytest.approx(PLAN_SHARE * 10e6)
    assert told(None) == {"p1": None}
    assert told(None) == {}
    told(all_three)
    assert told(Shape(all_three.voters[1:], tuple(members[1:]), (0.5, 0.5), VECTOR)) == {"p1": None, "p2": None}
    assert told(shape([Member()] * 3, (0.5, 0.5, 0.0))) == {}, "nothing is known"


# ---------------------------------------------------------------------- in a round


class Watched:
    """A stage whose peers know their rates; the rates that each was told to send at, as they stand."""

    def __init__(self, n: int) -> None:
        self.stage = Stage(n)
        for process in self.stage.peers():
            rates_of = process.node.exchange.rates
            rates_of.up.Bps = rates_of.down.Bps = 1e6
        self.paced: dict[str, dict[str, float]] = {p.host.name: {} for p in self.stage.peers()}
        self.log: list[tuple[str, str, float | None]] = []
        self._perform = self.stage.world.perform
        self.stage.world.perform = self._performed  # type: ignore[method-assign]
        self.stage.until(lambda: all(_told(p) == {1e6} for p in self.stage.peers()), 60.0)
        self.stage.between_rounds()

    def _performed(self, process: Process, effects: list[Effect], answer_to: Any) -> None:
        for effect in effects:
            if isinstance(effect, Pace):
                self.log.append((process.host.name, effect.peer, effect.rate_Bps))
                self.paced[process.host.name].pop(effect.peer, None)
                if effect.rate_Bps is not None:
                    self.paced[process.host.name][effect.peer] = effect.rate_Bps
        self._perform(process, effects, answer_to)


def _told(process: Process) -> set[float]:
    """The rates that it knows of all."""
    return {rate for r in process.node.members.records() for rate in (r.up_Bps, r.down_Bps)}


def test_every_connection_is_paced_in_a_round_and_none_afterwards() -> None:
    watched = Watched(3)
    stage = watched.stage
    assert watched.paced == {name: {} for name in watched.paced}
    coordinator, plan = stage.planned()
    stage.until(lambda: all(len(told) == 2 for told in watched.paced.values()))
    for told in watched.paced.values():
        assert 0.9e6 < sum(told.values()) <= PLAN_SHARE * 1e6 * (1 + 1e-9), "one chunk of three each"
    stage.committed(plan.entry.t, stage.peers())
    stage.between_rounds()
    assert watched.paced == {name: {} for name in watched.paced}


def test_a_new_plan_after_a_death_lets_go_of_the_dead_and_paces_the_others() -> None:
    watched = Watched(3)
    stage = watched.stage
    stage.hold = lambda source, target, message: isinstance(message, Result)
    coordinator, plan = stage.planned()
    stage.until(lambda: all(len(told) == 2 for told in watched.paced.values()))
    victim = next(p for p in stage.peers() if p is not coordinator)
    name = victim.host.name
    stage.world.crash(victim)
    stage.hold = lambda source, target, message: False
    one, other = (p.host.name for p in stage.peers())
    stage.until(lambda: set(watched.paced[one]) == {other} and set(watched.paced[other]) == {one})
    assert (one, name, None) in watched.log and (other, name, None) in watched.log
    assert watched.paced[one][other] == pytest.approx(PLAN_SHARE * 1e6, rel=0.3)
