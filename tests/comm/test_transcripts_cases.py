"""Transcripts of what is rare: messages of the dead, crossings, broken transfers, lost bootstrap peers, wrong clocks.

And the smallest swarm: of two peers one is lost, with or without the casting vote, at every step of a round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dlc.comm import messages as msg
from dlc.comm.coordinator import RUN
from dlc.comm.events import HistoryLost, RoundDone, SelfReplaced
from dlc.comm.log import HISTORY_ROUNDS_MAX
from dlc.sim.schedule import TIMEOUTS, TRAIN
from dlc.sim.world import Process
from tests.comm.stage import Rule, Stage, past_round

torch.set_num_threads(1)

EVICT_S = TIMEOUTS.evict_s


def of(name: str, *kinds: type) -> Rule:
    """Messages of these kinds that `name` sends."""
    return lambda source, target, m: source == name and isinstance(m, kinds)


def nothing(source: str, target: str, message: Any) -> bool:
    return False


def names(stage: Stage) -> set[str]:
    return {p.host.name for p in stage.peers()}


# ------------------------------------------------------------------ messages of the dead, crossings


@pytest.mark.parametrize("from_disk", [True, False])
def test_what_a_dead_process_had_sent_arrives_after_its_restart(from_disk: bool) -> None:
    """Its plan, votes, parts and promises come when its host runs another voter: they bind and contribute nothing."""
    stage = Stage(4)
    coordinator, plan = stage.planned()
    old = coordinator.voter
    kinds = (msg.Plan, msg.Contrib, msg.Result, msg.Held, msg.Coord, msg.Commit)
    stage.hold = of(coordinator.host.name, *kinds)
    stage.until(lambda: len([h for h in stage.held if isinstance(h[-1], msg.Contrib | msg.Result)]) >= 3)
    host = coordinator.host
    stage.world.crash(coordinator)
    host.disk = host.disk if from_disk else None
    book = tuple(p.host.address for p in stage.peers())
    new = stage.world.start(host, book, from_disk=from_disk)
    stage.hold = nothing
    stage.until(lambda: all(p.node.members.gone(old) for p in stage.peers()))
    stage.release()
    stage.committed(plan.entry.t, stage.peers(new))
    for process in stage.peers(new):
        roster = past_round(process.node, plan.entry.t).entry.roster
        assert roster == plan.entry.roster, "the plan had reached the others: the round is decided with that roster"
    stage.all_in()
    for process in stage.peers():
        assert old not in process.node.log.state.electorate and new.voter in process.node.log.state.electorate


def test_the_coordinator_leaves_while_its_plan_is_on_the_way() -> None:
    """The plan names a coordinator that is gone when it comes: the next in rank takes over without T_dead."""
    stage = Stage(4)
    coordinator, plan = stage.planned()
    assert all(p.node.slot.plan is None for p in stage.peers(coordinator))
    began = stage.world.now
    stage.world.leave(coordinator)
    others = stage.peers()
    reports = stage.committed(plan.entry.t, others, limit_s=6.0)
    assert stage.world.now - began < others[0].node.members.t_dead_s + 2.5
    for report in reports.values():
        assert {p.host.name for p in others} == {s.peer for s in report.contributors if s.fraction == 1.0}
        assert report.ballots <= 2


def test_leave_before_the_plan_and_an_old_ready_arrives_after_it() -> None:
    """READY and LEAVE overtake one another: who left is not waited for, though its READY comes."""
    stage = Stage(4)
    rank0 = stage.peers()[0].node.log.state.rank0
    leaver = next(p for p in stage.peers() if p.voter != rank0)
    stage.hold = of(leaver.host.name, msg.Ready)
    stage.until(lambda: stage.held)
    t = leaver.node.log.state.round_of(TRAIN) + 1
    stage.world.leave(leaver)
    stage.hold = nothing
    stage.until(lambda: all(p.node.members.gone(leaver.voter) for p in stage.peers()))
    stage.release()
    reports = stage.committed(t, stage.peers(), limit_s=5.0)
    for report in reports.values():
        assert {s.peer for s in report.contributors} == names(stage)
        assert all((m.peer, m.reason) == (leaver.host.name, "left") for m in report.missing)


# ------------------------------------------------------------------ joining, and transfers that break


def test_who_joins_in_a_round_delays_nobody_and_is_in_the_next_ones() -> None:
    stage = Stage(3)
    _, plan = stage.planned()
    before = stage.peers()
    began = stage.world.now
    newcomer = stage.world.start(stage.world.new_host(), (before[0].host.address,))
    reports = stage.committed(plan.entry.t, before)
    assert stage.world.now - began < 1.5
    assert all(r.ballots == 1 and r.complete and len(r.contributors) == 3 for r in reports.values())
    stage.all_in(limit_s=10.0)
    assert newcomer.node.log.attached[TRAIN].synced


def asked_for_pieces(stage: Stage, newcomer: Process) -> set[str]:
    return {t for _, s, t, m in stage.sent if s == newcomer.host.name and isinstance(m, msg.PieceReq)}


def test_the_donor_dies_in_the_middle_of_a_snapshot() -> None:
    """Its own state stays untouched until all is verified; then it takes another donor."""
    stage = Stage(4, inner_s=0.3)
    stage.until(lambda: stage.rounds > 2 * HISTORY_ROUNDS_MAX)  # steps alone do not bring it here
    stage.hold = lambda source, target, m: isinstance(m, msg.Piece)
    newcomer = stage.world.start(stage.world.new_host(), (stage.peers()[0].host.address,))
    untouched = newcomer.node.log.attached[TRAIN].digest
    stage.until(lambda: stage.held and asked_for_pieces(stage, newcomer))
    donor = stage.world.hosts[sorted(asked_for_pieces(stage, newcomer))[0]].process
    assert donor is not None
    stage.held.clear()
    stage.world.crash(donor)
    stage.hold = of(donor.host.name, msg.Piece)
    assert newcomer.node.log.attached[TRAIN].digest == untouched and not newcomer.node.log.attached[TRAIN].synced
    stage.sent.clear()
    stage.until(lambda: newcomer.node.log.attached[TRAIN].synced, 20.0)
    assert asked_for_pieces(stage, newcomer) - {donor.host.name}, "another one was asked"
    stage.all_in()


def test_the_donor_dies_in_the_middle_of_a_replay() -> None:
    """Who is a few entries behind fetches their results; they stop in the middle of one."""
    stage = Stage(4)
    late = next(p for p in stage.peers() if p.voter != p.node.log.state.rank0)
    t = late.node.log.state.round_of(TRAIN)
    stage.hold = lambda source, target, m: late.host.name in (source, target)
    stage.committed(t + 3, stage.peers(late))
    stage.held.clear()
    fetched = 0

    def one_result_only(source: str, target: str, m: Any) -> bool:
        nonlocal fetched
        if target != late.host.name or not isinstance(m, msg.Result) or not late.node.sync.busy:
            return False
        fetched += 1
        return fetched > 1

    stage.hold = one_result_only
    stage.until(lambda: fetched > 1)
    at, donor = late.node.log.head, next(p for p in stage.peers() if p.voter == late.node.sync.donor)
    assert late.node.sync.busy
    stage.held.clear()
    stage.hold = nothing
    stage.world.crash(donor)
    assert late.node.log.head == at, "half of an entry is not applied"
    stage.all_in()
    assert not [e for _, e in stage.told if isinstance(e, HistoryLost)]


# ------------------------------------------------------------------ bootstrap peers


def test_the_run_outlives_every_address_that_its_peers_were_given() -> None:
    """All joined through p0. It dies; so does one more, comes back, and one joins through another."""
    stage = Stage(4)
    founder = stage.world.hosts["p0"].process
    assert founder is not None
    stage.world.crash(founder)
    stage.all_in()
    other = stage.peers()[0]
    stage.world.freeze(other, 8.0)  # longer than T_gap: it has to find everybody again
    stage.until(lambda: other.awake)
    stage.all_in()
    restarted = stage.peers()[1]
    stage.world.crash(restarted)
    stage.until(lambda: restarted.voter not in stage.peers()[0].node.log.state.electorate)
    stage.world.start(restarted.host, ("sim:p0", stage.peers()[0].host.address), from_disk=True)
    stage.world.start(stage.world.new_host(), (other.host.address,))
    stage.all_in()
    assert names(stage) == {"p1", "p2", "p3", "p4"} and not stage.world.checker.history.forks


# ------------------------------------------------------------------ clocks


class Clock:
    """Stands between the world's time and what one process believes the time is."""

    def __init__(self, stage: Stage, process: Process) -> None:
        self.world, node = stage.world, process.node
        self.ahead_s = 0.0
        self.stands_at: float | None = None
        event, deadline = node._event, node.next_deadline

        def shifted(now: float, act: Callable[[], None]) -> Any:
            return event(self.read(), act)

        node._event = shifted  # type: ignore[method-assign]
        node.next_deadline = lambda: deadline() - self.read() + self.world.now  # type: ignore[method-assign]

    def read(self) -> float:
        return self.world.now + self.ahead_s if self.stands_at is None else self.stands_at

    def stop(self) -> None:
        self.stands_at = self.read()

    def go_on(self) -> None:
        self.ahead_s, self.stands_at = self.read() - self.world.now, None


@pytest.mark.parametrize("step", ["between rounds", "reducing"])
@pytest.mark.parametrize("coordinates", [True, False])
def test_a_clock_that_jumps_ahead_by_minutes(step: str, coordinates: bool) -> None:
    """It looks like a freeze from inside, and like nothing from outside: nobody is evicted, and nothing is lost."""
    stage = Stage(4)
    rank0 = stage.peers()[0].node.log.state.rank0
    process = next(p for p in stage.peers() if (p.voter == rank0) == coordinates)
    clock = Clock(stage, process)
    if step == "reducing":
        stage.until(lambda: all(p.node.slot.plan is not None for p in stage.peers()))
    t = process.node.log.state.round_of(TRAIN) + 1
    depth = process.node.log.state.depth
    clock.ahead_s += 20 * EVICT_S
    stage.until(lambda: process.node.ctx.stale, 1.0)
    stage.until(lambda: not process.node.ctx.stale, 5.0)
    stage.committed(t, stage.peers(), limit_s=8.0)
    stage.all_in(limit_s=10.0)
    reports = [e.report for _, e in stage.told if isinstance(e, RoundDone)]
    assert not any(m.reason in ("dead", "left") for report in reports for m in report.missing)
    assert not stage.world.checker.history.forks
    since = [p.entry for p in process.node.log.past if p.entry.depth > depth]
    assert since and not [entry for entry in since if len(entry.electorate) < 4]


@pytest.mark.parametrize("step", ["between rounds", "reducing"])
@pytest.mark.parametrize("coordinates", [True, False])
def test_a_clock_that_stands_still_for_a_while(step: str, coordinates: bool) -> None:
    """The process runs, answers and hears, but no deadline of its comes: the others do without what it would do."""
    stage = Stage(4)
    rank0 = stage.peers()[0].node.log.state.rank0
    process = next(p for p in stage.peers() if (p.voter == rank0) == coordinates)
    clock = Clock(stage, process)
    if step == "reducing":
        stage.until(lambda: all(p.node.slot.plan is not None for p in stage.peers()))
    t = process.node.log.state.round_of(TRAIN)
    clock.stop()
    others = stage.peers(process)
    stage.committed(t + 6, others, limit_s=60.0)
    clock.go_on()
    stage.all_in(limit_s=10.0)
    assert not stage.world.checker.history.forks
    assert not [e for _, e in stage.told if isinstance(e, HistoryLost | SelfReplaced)]


# ------------------------------------------------------------------ two peers, one lost


PAIR_STEPS = ("before the plan", "reducing", "voting", "after COMMIT")


@pytest.mark.parametrize("step", PAIR_STEPS)
@pytest.mark.parametrize("loss", ["dies", "leaves", "restarts"])
@pytest.mark.parametrize("survivor_casts", [True, False])
def test_of_two_peers_one_is_lost(survivor_casts: bool, loss: str, step: str) -> None:
    """Rank 0 goes on after T_dead, the other one after T_evict; after a leave or a seen restart, either at once.

    A round that was voted for before the loss is decided as it was, and may give the casting vote to the dead one.
    """
    stage = Stage(2, n_chunks=6, uplink_Bps=10_000.0)
    rank0 = stage.peers()[0].node.log.state.rank0
    first = next(p for p in stage.peers() if p.voter == rank0)
    (second,) = stage.peers(first)
    survivor, lost = (first, second) if survivor_casts else (second, first)
    t, head = survivor.node.log.state.round_of(TRAIN) + 1, survivor.node.log.head
    to_the_point(stage, first, lost, step)
    accepted = survivor.node.slot.accepted
    ahead = lost.node.log.state.round_of(TRAIN) == t
    began = stage.world.now
    if loss == "leaves":
        stage.world.leave(lost)
    else:
        stage.world.crash(lost)
    stage.held.clear()
    stage.hold = nothing
    if loss == "restarts":
        stage.world.start(lost.host, (survivor.host.address,), from_disk=False)
    stage.committed(t, [survivor], limit_s=3 * EVICT_S)
    took = stage.world.now - began
    entry = past_round(survivor.node, t).entry
    if accepted is not None and survivor.node.log.head != head:
        assert entry == accepted[1].entry, "what was accepted may have been decided"
    if ahead:
        assert entry == past_round(lost.node, t).entry, "the other one had applied it"
    at_once = loss != "dies" or survivor_casts
    assert took < (9.0 if at_once else 3 * EVICT_S)
    assert at_once or took > 0.9 * EVICT_S or step == "after COMMIT", "without the casting vote it must wait"
    casts = survivor.node.log.state.rank0 == survivor.voter
    later = stage.committed(t + 2, [survivor], limit_s=20.0 if casts or loss != "dies" else 3 * EVICT_S)
    assert survivor.host.name in {s.peer for s in later[survivor.host.name].contributors}
    if loss == "restarts":
        stage.all_in()
    assert not stage.world.checker.history.forks


def to_the_point(stage: Stage, first: Process, lost: Process, step: str) -> None:
    coordinator = first.node.coordinator
    if step == "after COMMIT":  # it reaches nobody else; where the coordinator survives, it is the other's that is lost
        stage.hold = lambda source, target, m: isinstance(m, msg.Commit) and target != source
    if step == "before the plan":
        stage.until(lambda: any(isinstance(m, msg.Ready) for _, _, _, m in stage.sent))
        return
    stage.until(lambda: coordinator.phase == RUN)
    if step == "reducing":
        stage.until(lambda: first.node.exchange.held and lost.node.exchange.held)
        assert not first.node.exchange.complete
    elif step == "voting":
        stage.until(lambda: first.node.slot.accepted is not None)
        assert coordinator.phase == RUN
    else:
        head = first.node.log.head
        stage.until(lambda: first.node.log.head != head)
