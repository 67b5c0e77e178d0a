"""Who owns how much, in real rounds: a slow link gets fewer chunks as soon as it was measured, and means stay exact.

Every stage runs under the simulator's checker, which computes each mean again from the roster.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch

from dlc.comm.events import Apart
from dlc.comm.ids import Voter
from dlc.comm.messages import Plan
from dlc.comm.owners import all_sent, asked_Bps, cut_off, shape_of
from dlc.sim.schedule import TRAIN
from dlc.sim.world import Process
from tests.comm.stage import Stage

torch.set_num_threads(1)

UPLINK_Bps = 400e3
N_CHUNKS = 40


def stage_of(n: int) -> Stage:
    """Chunks of 32 KiB, so that a round is long enough to be measured."""
    return Stage(n, n_chunks=N_CHUNKS, chunk_elems=1 << 13, uplink_Bps=UPLINK_Bps)


def owned(plan: Plan) -> Counter[str]:
    return Counter({owner.peer: plan.assignment.count(i) for i, owner in enumerate(plan.owners)})


def next_round(stage: Stage) -> tuple[Plan, float]:
    """The next round's plan, and how long everybody took from it to the commit."""
    _, plan = stage.planned()
    began = stage.world.now
    reports = stage.committed(plan.entry.t, stage.peers(), limit_s=120.0)
    assert all(r.complete and r.ballots == 1 for r in reports.values())
    seconds = stage.world.now - began
    stage.between_rounds()
    return plan, seconds


def rates_of(process: Process) -> tuple[float, float]:
    return process.node.members.own.up_Bps, process.node.members.own.down_Bps


def claim(process: Process, up_Bps: float, down_Bps: float) -> None:
    """It tells these rates from now on, whatever it measures."""
    process.node.exchange.rates.told_up_Bps = up_Bps
    process.node.exchange.rates.told_down_Bps = down_Bps
    process.node.exchange.rates.end = lambda: None  # type: ignore[method-assign]
    process.node.members.update_own(up_Bps=up_Bps, down_Bps=down_Bps)


def told(stage: Stage, claims: dict[str, float]) -> None:
    """Everybody has heard these claims of all."""
    for process in stage.peers():
        claim(process, claims[process.host.name], claims[process.host.name])

    def heard(process: Process, of: Process) -> bool:
        record = process.node.record_of(of.host.name)
        return record is not None and record.up_Bps == claims[of.host.name]

    stage.until(lambda: all(heard(p, of) for p in stage.peers() for of in stage.peers()))
    stage.between_rounds()


def test_a_slow_uplink_owns_less_by_the_third_plan_and_more_again_when_it_is_mended() -> None:
    stage = stage_of(4)
    rates = {process.host.name: rates_of(process)[0] for process in stage.peers()}
    assert 0.8 * UPLINK_Bps < min(rates.values()) <= max(rates.values()) < 1.1 * min(rates.values())
    before, _ = next_round(stage)
    # Equal links are measured alike, not to the last byte. Who owns the share s sends 1 - s of its own part and 3 s of
    # means, and all take the same time for it: the best for these rates, to which the plan has to come within a chunk.
    for name, rate_Bps in rates.items():
        best = (6 * rate_Bps / sum(rates.values()) - 1) / 2
        assert abs(owned(before)[name] - N_CHUNKS * best) < 1
    slow = stage.peers()[1]
    slow.host.uplink_Bps = UPLINK_Bps / 4
    _, unaware_s = next_round(stage)
    next_round(stage)
    plan, aware_s = next_round(stage)
    assert owned(plan)[slow.host.name] <= N_CHUNKS // 20
    assert slow.voter in plan.owners, "it is alive: it may own something again"
    assert aware_s < 0.8 * unaware_s
    slow.host.uplink_Bps = 0.0
    later = [owned(next_round(stage)[0])[slow.host.name] for _ in range(3)]
    assert later[-1] >= N_CHUNKS // 8


def test_a_round_of_few_bytes_measures_nothing() -> None:
    stage = Stage(3)
    next_round(stage)
    assert all(rates_of(process) == (0.0, 0.0) for process in stage.peers())


def test_a_helper_with_a_good_link_owns_the_most() -> None:
    stage = stage_of(3)
    helper = stage.world.start(stage.world.new_host("helper"), (stage.peers()[0].host.address,))
    helper.host.uplink_Bps = 4 * UPLINK_Bps
    stage.until(lambda: all(helper.voter in p.node.log.state.electorate for p in stage.peers()), 60.0)
    stage.between_rounds()
    told(stage, {p.host.name: UPLINK_Bps * (4 if p is helper else 1) for p in stage.peers()})
    plan, _ = next_round(stage)
    assert helper.voter not in {part.voter for part in plan.entry.roster}
    assert owned(plan)[helper.host.name] > N_CHUNKS // 2
    report = next(iter(stage.reports(plan.entry.t).values()))
    assert report.owned[helper.host.name] > 0.5 and sum(report.owned.values()) == 1.0
    assert {s.peer for s in report.contributors} == {p.host.name for p in stage.peers(helper)}


def test_after_the_death_of_a_large_owner_the_open_chunks_are_divided_by_rates() -> None:
    stage = stage_of(4)
    large, middle, slow, other = stage.peers()
    told(stage, {large.host.name: 9e5, middle.host.name: 4e5, slow.host.name: 1e5, other.host.name: 4e5})
    coordinator, plan = stage.planned()
    assert owned(plan)[large.host.name] > N_CHUNKS // 3 and owned(plan)[slow.host.name] == 0
    survivors = stage.peers(large)
    stage.until(lambda: all(len(p.node.exchange.held) >= N_CHUNKS // 8 for p in survivors), 60.0)
    stage.world.crash(large)

    def replanned() -> list[Plan]:
        plans = [p.node.slot.plan for p in survivors if p.node.slot.plan is not None]
        return [p for p in plans if p.ballot > plan.ballot and p.entry.t == plan.entry.t and any(p.assignment)]

    stage.until(replanned, 60.0)
    again = replanned()[0]
    open_chunks = sum(owner >= 0 for owner in again.assignment)
    assert 0 < open_chunks < N_CHUNKS, "what is held is kept"
    assert owned(again)[slow.host.name] == 0 and owned(again)[large.host.name] == 0
    assert abs(owned(again)[middle.host.name] - owned(again)[other.host.name]) <= 1
    stage.committed(plan.entry.t, survivors, limit_s=120.0)


def cut(stage: Stage, pairs: list[tuple[str, str]], both_ways: bool = True) -> None:
    for a, b in pairs:
        stage.world.network.cut(a, b)
        if both_ways:
            stage.world.network.cut(b, a)
    stage.world.checker.paths_changed()


def rounds_in_a_cut(stage: Stage, n: int, known_after: int = 1) -> list[Plan]:
    """The plans of the next n rounds after so many that may not know of the cut yet, each decided in one ballot by
    all."""
    t = max(p.node.log.state.round_of(TRAIN) for p in stage.peers()) + known_after
    stage.committed(t, stage.peers(), limit_s=120.0)
    plans = []
    for later in range(t + 1, t + 1 + n):
        _, plan = stage.planned()
        reports = stage.committed(later, stage.peers(), limit_s=120.0)
        assert {len(r.contributors) for r in reports.values()} == {len(stage.peers())}
        assert all(r.ballots == 1 for r in reports.values())
        plans.append(plan)
    return plans


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize("pair", [("p1", "p2"), ("p0", "p2")])
@pytest.mark.parametrize("n", [3, 4])
def test_two_that_do_not_reach_each_other_own_nothing_and_are_in_with_all(
    n: int, pair: tuple[str, str], both_ways: bool
) -> None:
    """What each of them sent to the other, as an owner, would come to nobody: every round would wait for it."""
    stage = stage_of(n)
    cut(stage, [pair], both_ways)
    for plan in rounds_in_a_cut(stage, 3):
        assert {name for name, k in owned(plan).items() if k} == {p.host.name for p in stage.peers()} - set(pair)
        assert all(r.complete for r in stage.reports(plan.entry.t).values())
    apart = [(name, e.voter.peer, e.relay) for name, e in stage.told if isinstance(e, Apart)]
    assert sorted(name for name, _, _ in apart) == sorted(pair), "each tells it once"
    assert all({name, other} == set(pair) and relay not in pair for name, other, relay in apart)
    stage.world.network.cuts.clear()
    stage.world.checker.paths_changed()
    stage.until(lambda: all(p.node.members.relay_for(q) is None for p in stage.peers() for q in pair), 30.0)
    stage.between_rounds()
    next_round(stage)  # its READYs may be from before
    plan, _ = next_round(stage)
    assert all(owned(plan)[name] for name in pair), "both own again as soon as they reach each other"


def test_for_one_that_half_of_them_reach_one_owner_is_left() -> None:
    stage = stage_of(4)
    cut(stage, [("p3", "p1"), ("p3", "p2")])
    for plan in rounds_in_a_cut(stage, 2):
        assert {name for name, k in owned(plan).items() if k} == {"p0"}
        assert all(r.complete for r in stage.reports(plan.entry.t).values())


def test_for_one_that_few_reach_the_others_do_not_stand_back_nor_wait() -> None:
    """It gets what the others reduce from the one that it reaches, and stays in step."""
    stage = stage_of(5)
    _, whole_s = next_round(stage)
    cut(stage, [("p4", "p1"), ("p4", "p2"), ("p4", "p3")])
    rounds_in_a_cut(stage, 0, known_after=2)
    began = stage.world.now
    for plan in rounds_in_a_cut(stage, 4):
        assert {name for name, k in owned(plan).items() if k} == {"p0", "p1", "p2", "p3"}
        (report, *_) = stage.reports(plan.entry.t).values()
        shares = {s.peer: s.fraction for s in report.contributors}
        assert 0 < shares["p4"] < 0.5 and all(shares[name] == 1.0 for name in ("p0", "p1", "p2", "p3"))
    assert stage.world.now - began < 5 * 2 * whole_s, "p0's link carries to it what the others reduce, once more"


def test_who_is_cut_off() -> None:
    a, b, c, d, e = (Voter(name, 1) for name in "abcde")
    assert cut_off((a, b, c), ()) == set()
    assert cut_off((a, b, c), {(a, b)}) == cut_off((a, b, c), {(b, a)}) == {a, b}
    assert cut_off((a, b, c), {(a, b), (b, a)}) == {a, b}
    assert cut_off((a, b, c, d), {(a, b), (a, c)}) == {a, b, c}, "two thirds of the others"
    assert cut_off((a, b, c, d, e), {(a, b), (a, c), (d, a)}) == {a}
    assert cut_off((a, b, c), {(a, d), (d, b), (c, c)}) == set(), "d takes no part"
    assert cut_off((a, b), {(a, b)}) == {a, b}


def test_claims_beyond_all_measure_make_a_plan_like_any_other() -> None:
    stage = stage_of(4)
    a, b, c, d = (p.host.name for p in stage.peers())
    told(stage, {a: 1e12, b: 4e5, c: 1e-6, d: 4e5})
    plan, _ = next_round(stage)
    assert sum(owned(plan).values()) == N_CHUNKS and owned(plan)[c] == 0


def test_what_a_plan_asks_of_my_link() -> None:
    stage = stage_of(3)
    told(stage, {"p0": 4e5, "p1": 4e5, "p2": 1e5})
    process, plan = stage.planned()
    recipients = process.node.log.state.electorate
    shape = shape_of(process.node.ctx, plan, recipients)
    assert shape is not None and shape.vector_bytes == N_CHUNKS * 4 * (1 << 13) - 4
    for peer, rate_Bps in (("p0", 4e5), ("p2", 1e5)):
        voter = next(v for v in recipients if v.peer == peer)
        asked = asked_Bps(shape, voter)
        assert asked.up <= rate_Bps * 1.000001
        if peer == "p2":
            assert asked.up > 0.99 * rate_Bps, "its own vector out is what takes the time"


def test_all_is_sent_once_every_other_owner_says_so() -> None:
    """Who owns nothing need not say anything, nor need who lacks it: what that one owns all others hold."""
    _, plan = Stage(4).planned()
    a, b, c, d = plan.owners
    plan = dataclasses.replace(plan, assignment=(0, 1, 0))
    assert all_sent(plan, 3, d, {a: (), b: ()}) and all_sent(plan, 4, d, {a: (c,), b: (a,), c: (d,)})
    assert not all_sent(plan, 4, d, {a: (), b: ()}), "half of all hold it"
    assert not all_sent(plan, 3, d, {a: (), c: ()}) and not all_sent(plan, 4, d, {a: (), b: (c, d), c: ()})
    assert all_sent(plan, 3, b, {a: (), c: ()}) and not all_sent(plan, 3, b, {c: (), d: ()})
    for assignment in ((0, -1, 1), ()):
        assert not all_sent(dataclasses.replace(plan, assignment=assignment), 4, d, {a: (), b: (), c: ()})
