"""Every kind of fault and of peer that the simulator knows, one at a time; and the checks that must see a mistake."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable

import pytest
import torch

from dlc.comm import account as account_module
from dlc.comm.agenda import Agenda
from dlc.comm.applier import Applier
from dlc.comm.log import Log
from dlc.comm.messages import PieceReq
from dlc.comm.probing import Prober
from dlc.comm.view import View
from dlc.report import RoundReport
from dlc.sim.invariants import Violation
from dlc.sim.network import Weather
from dlc.sim.oracle import OracleError
from dlc.sim.run import run
from dlc.sim.schedule import KINDS, REDUCE, SECOND, TRAIN, Fault, Scenario, Start
from dlc.sim.transcript import Transcript
from dlc.sim.world import Process, World

torch.set_num_threads(1)


def swarm(n: int, *faults: Fault, roles: tuple[str, ...] = (), **more: object) -> Scenario:
    """One founder, the others join in the first two seconds; the last ones in these roles."""
    named = ("trainer",) * (n - len(roles)) + roles
    starts = (Start(0.0, ()), *(Start(0.2 * i, (0,), named[i]) for i in range(1, n)))
    plan = Scenario(0, starts, faults, Weather(latency_max_s=0.05), inner_s=1.0)
    return dataclasses.replace(plan, **more)  # type: ignore[arg-type]


def good(plan: Scenario) -> str:
    """Run it without a violation; what happened, as text."""
    transcript = Transcript(10**6)
    outcome = run(plan, transcript)
    assert not outcome.violation, outcome.violation
    return "\n".join(transcript.lines())


def process(world: World, name: str) -> Process:
    found = world.hosts[name].process
    assert found is not None
    return found


def step_until(world: World, condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    end = world.now + limit_s
    while not condition():
        assert world.clock.step() and world.now < end, "the transcript does not reach its point"


def test_clocks_that_drift_show_another_time_and_agree_all_the_same() -> None:
    world = World(swarm(3, drift=1e-3))
    world.run_until(30.0)
    clocks = [host.clock_s(world.now) for host in world.hosts.values()]
    assert len({round(host.rate, 9) for host in world.hosts.values()}) == 3 and max(clocks) - min(clocks) > 60.0
    assert world.checker.rounds >= 10


def test_a_helper_votes_and_gives_nothing_an_observer_follows() -> None:
    world = World(swarm(4, roles=("helper", "observer")))
    world.run_until(30.0)
    helper, observer = process(world, "p2"), process(world, "p3")
    state = process(world, "p0").node.log.state
    assert {v.peer for v in state.electorate} == {"p0", "p1", "p2"}
    assert {v.peer for v in state.trainers} == {"p0", "p1"}
    rosters = [{p.voter.peer for p in past.entry.roster} for past in process(world, "p0").node.log.past]
    assert all(roster <= {"p0", "p1"} for roster in rosters)
    assert helper.trainer.rounds and observer.node.log.state.round_of(TRAIN) >= state.round_of(TRAIN) - 2
    assert observer.node.log.attached[TRAIN].synced


def test_three_channels_have_rounds_side_by_side() -> None:
    world = World(swarm(3, channels=(TRAIN, SECOND, REDUCE)))
    world.run_until(40.0)
    state = process(world, "p0").node.log.state
    assert all(state.round_of(channel) >= 5 for channel in world.grids)
    assert all(trainer.rounds >= 5 for trainer in process(world, "p1").trainers.values())


def test_a_pseudo_gradient_survives_the_round_of_another_channel() -> None:
    world = World(swarm(3, channels=(TRAIN, SECOND)))
    world.run_until(10.0)
    node = process(world, "p0").node
    step_until(world, lambda: SECOND in node.exchange.offered)
    offer, t, second = node.exchange.offered[SECOND], node.log.state.round_of(TRAIN), node.log.state.round_of(SECOND)
    for name in ("p1", "p2"):
        process(world, name).trainers[SECOND].inner_s = 30.0
    step_until(world, lambda: node.log.state.round_of(TRAIN) > t or node.log.state.round_of(SECOND) > second)
    if node.log.state.round_of(SECOND) == second:
        assert node.exchange.offered[SECOND] is offer
    step_until(world, lambda: node.exchange.offered.get(SECOND) is not offer)
    assert node.log.state.round_of(SECOND) > second


def test_a_slow_machine_takes_part() -> None:
    text = good(swarm(3, Fault(10.0, "slow", who=1, for_s=15.0)))
    assert text.count("FREEZES") >= 5


def test_a_peer_comes_back_at_another_address() -> None:
    world = World(swarm(3, Fault(10.0, "move", who=1)))
    world.run_until(60.0)
    moved = process(world, "p1")
    assert moved.host.address == "sim:p1.1" and moved.node.members.own.control == ("sim:p1.1",)
    assert moved.voter in process(world, "p0").node.log.state.electorate
    assert world.faults.struck["move"] == 1


def test_images_come_in_several_pieces_and_histories_are_short() -> None:
    world = World(swarm(3, Fault(15.0, "join"), piece_bytes=64, history_bytes=300), transcript := Transcript(10**6))
    world.run_until(30.0)
    newcomer = process(world, "p3")
    assert newcomer.node.log.attached[TRAIN].synced
    asked = [what for _, _, _, what in transcript._lines if isinstance(what, PieceReq)]
    assert max(piece for request in asked for piece in request.pieces) >= 2
    assert all(sum(p.payload_bytes for p in x.node.log.past) <= 300 for x in world.running())


def test_a_peer_whose_second_state_is_of_another_kind_trains_on_and_brings_another() -> None:
    world = World(swarm(4, channels=(TRAIN, SECOND), misfits=True))
    kinds = {name: random.Random(f"kind 0 {name}").choice((KINDS[0], *KINDS)) for name in ("p0", "p1", "p2", "p3")}
    assert len(set(kinds.values())) > 1
    step_until(world, lambda: len(world.running()) == 4)
    assert {name: host.kind for name, host in world.hosts.items()} == kinds
    step_until(world, lambda: world.faults.struck["misfit"] > 0)
    step_until(world, lambda: any(p.node.log.attached[SECOND].void and p.trainer.rounds for p in world.running()))
    step_until(world, lambda: all(p.node.log.holds(SECOND) for p in world.running()), 200.0)
    assert len({p.host.kind for p in world.running()}) == 1
    rounds = [p.trainers[SECOND].rounds for p in world.running()]
    step_until(world, lambda: all(p.trainers[SECOND].rounds > n for p, n in zip(world.running(), rounds, strict=True)))


# -------------------------------------------------------------------- corruption


@pytest.mark.parametrize("who", range(3))
def test_a_corrupted_state_is_told_and_repaired(who: int) -> None:
    text = good(swarm(3, Fault(10.0, "corrupt", who=who)))
    assert "is corrupted" in text and f"p{who}.1 is told      DigestMismatch" in text
    assert text.count("DigestMismatch") == 1


def test_a_corrupted_majority_cannot_be_told_and_is_no_violation() -> None:
    """One of three is corrupted and a sound one dies: nobody can tell, and the run goes on with one of two states."""
    good(swarm(3, Fault(10.0, "corrupt", who=0), Fault(10.1, "crash", who=1)))


def test_mutation_believing_the_first_report_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was: whoever is ready first tells the coordinator which state is right."""

    def mutant(self: Agenda, channel: str, mine: bytes, offers: dict[object, tuple[object, float]]) -> bytes:
        first = min(offers.values(), key=lambda offer: offer[1])[0]
        return first.digest  # type: ignore[attr-defined, no-any-return]

    monkeypatch.setattr(Agenda, "_digest", mutant)
    broken = {run(swarm(4, Fault(10.0 + 0.3 * i, "corrupt", who=i))).broken for i in range(12)}
    assert "S1" in broken


def test_mutation_repair_without_a_word_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Applier.diverged

    def mutant(self: Applier, channel: str, digest: bytes) -> None:
        notify, self.ctx.notify = self.ctx.notify, lambda e: None  # type: ignore[method-assign]
        told(self, channel, digest)
        self.ctx.notify = notify  # type: ignore[method-assign]

    monkeypatch.setattr(Applier, "diverged", mutant)
    assert run(swarm(3, Fault(10.0, "corrupt", who=1))).violation.startswith("S1: p1.1, whose state was wrong")


# -------------------------------------------------------------------- what the checks must see


def test_mutation_a_history_without_end_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Log, "_trim", lambda self: None)
    assert run(swarm(2)).violation.startswith("memory: p")


def test_mutation_a_report_that_leaves_somebody_out_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = account_module.account

    def mutant(*args: object) -> RoundReport:
        report = whole(*args)  # type: ignore[arg-type]
        return dataclasses.replace(report, missing=())

    monkeypatch.setattr("dlc.comm.applier.account", mutant)
    world = World(swarm(3, Fault(10.0, "crash", who=1)))
    with pytest.raises(OracleError, match="I4 round .* is missing"):
        world.run_until(30.0)


def test_mutation_a_contribution_dropped_without_a_word_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def mutant(self: Applier) -> None:
        for channel in [c for c, mine in self.exchange.offered.items() if not self._stands(mine.ready)]:
            del self.exchange.offered[channel]
        moved(self)

    moved = Applier.switched
    monkeypatch.setattr(Applier, "switched", mutant)
    plan = swarm(4, Fault(10.0, "partition", who=0b0011, for_s=45.0))
    # Who loses its history has a contribution on offer in most cases, and not in all.
    assert any(run(dataclasses.replace(plan, seed=seed)).broken == "L4" for seed in range(6))


def test_partitions_are_judged_at_the_time_of_the_fork() -> None:
    """A partition excuses its own fork and none that comes before or after it."""
    world = World(swarm(4, Fault(10.0, "partition", who=0b0011, for_s=40.0)))
    world.run_until(60.0)
    paths = world.checker.paths
    assert paths.partitioned(25.0, 45.0)
    assert not paths.partitioned(0.0, 15.0) and not paths.partitioned(52.0, 60.0)


def test_a_sleep_that_ends_in_a_partition_counts_once_both_were_awake_and_apart_as_long() -> None:
    """p0 sleeps from 10 s on and wakes, at 20 s, into a partition that began meanwhile; a sleep alone is none."""
    asleep, apart = Fault(10.0, "freeze", who=0, for_s=10.0), Fault(14.0, "partition", who=0b0001, for_s=40.0)
    world = World(swarm(4, asleep, apart))
    world.run_until(29.0)
    assert not world.checker.paths.partitioned(8.0, 26.0)  # p0 may not have gone on yet
    world.run_until(33.0)
    paths = world.checker.paths
    assert paths.partitioned(8.0, 26.0) and not paths.partitioned(8.0, 19.0)
    world = World(swarm(4, asleep))
    world.run_until(33.0)
    assert not world.checker.paths.partitioned(8.0, 26.0)


def test_who_goes_on_after_half_of_t_evict_is_caught_though_it_slept_before_and_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A freeze of nearly T_gap, which nobody notices, is not time in which both were awake and apart."""
    whole_s = View.t_evict_s.fget
    assert whole_s is not None
    faults = Fault(10.0, "freeze", who=1, for_s=4.9), Fault(14.8, "partition", who=1, for_s=9.5)
    plans = [swarm(2, *faults, Fault(15.0, "freeze", who=1, for_s=4.9), seed=seed) for seed in (2, 3)]
    assert not any(run(plan).violation for plan in plans)
    monkeypatch.setattr(View, "t_evict_s", property(lambda view: whole_s(view) / 2))
    assert all(run(plan).violation.startswith("S2") for plan in plans)


def a_newcomer_beside_a_partition(*listed: int) -> World:
    """p2 sleeps, and has lost its vote when p0 and p1 are parted; then an observer begins, cut off from nobody."""
    asleep, apart = Fault(10.0, "freeze", who=2, for_s=45.0), Fault(18.0, "partition", who=0b0001, for_s=26.0)
    calm = swarm(3, asleep, apart)
    world = World(dataclasses.replace(calm, starts=(*calm.starts, Start(20.0, listed, "observer"))))
    world.run_until(17.0)
    assert {v.peer for v in process(world, "p0").node.log.state.electorate} == {"p0", "p1"}
    return world


@pytest.mark.parametrize(("listed", "meets_s"), [((2,), None), ((0, 2), 0.0), ((2,), 4.0), ((2,), 14.0)])
def test_a_newcomer_is_a_relay_once_it_has_heard_of_somebody(listed: tuple[int, ...], meets_s: float | None) -> None:
    """One whose only address sleeps knows nobody, and nobody knows it: it joins no parted peers."""
    world = a_newcomer_beside_a_partition(*listed)

    def meet() -> None:
        newcomer, told = process(world, "p3"), process(world, "p0").node.members.own
        world.act(newcomer, lambda now: newcomer.node.members.learn(told, now))

    if meets_s:
        world.clock.at(20.0 + meets_s, meet)
    world.run_until(43.0)
    # Without a path for 26 s; for 2 s; for 6 s, both less than the 10 s that count; for 16 s, of which 6 s do.
    assert world.checker.paths.partitioned(18.0, 43.0) == (meets_s in (None, 14.0))
    assert not world.checker.paths.partitioned(18.0, 27.0)
    assert world.checker.history.forks == (meets_s is None)


@pytest.mark.parametrize(("listed", "caught"), [((2,), False), ((0, 2), True), ((1, 2), True)])
def test_mutation_a_relay_that_is_not_asked_is_caught(
    monkeypatch: pytest.MonkeyPatch, listed: tuple[int, ...], caught: bool
) -> None:
    """By an observer that has heard of one of two parted voters, they must hear of each other."""
    monkeypatch.setattr(Prober, "ask_others", lambda self, member, live: setattr(member, "direct_until_run", math.inf))
    world = a_newcomer_beside_a_partition(*listed)
    if caught:
        with pytest.raises(Violation, match="S2"):
            world.run_until(50.0)
    else:
        world.run_until(50.0)
        assert world.checker.history.forks
