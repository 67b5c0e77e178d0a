"""Transcripts of the mistakes that this protocol is easily built with; each of them was made once, or nearly.

| mistake | test |
|---|---|
| a chunk reduced under one roster is reused under another | an old chunk of another roster is reduced again |
| the woken are no longer stale before they have caught up | the woken stay stale while the state is slow to come |
| a contribution is known by its weight alone | a part of a revoked lease is not averaged |
| who said that it is ahead, and is silent now, has answered | who is cut off before it has caught up decides nothing |
| after a long cut nobody pings any more | after a long cut all find each other again |
| a restarted founder knows no address and goes on alone | a founder from disk does not go on alone |
| in a long chunk phase the coordinator is taken for dead | a long chunk phase has one ballot; a slow downlink |
| one peer with a wrong state convicts all others | a corrupt coordinator convicts nobody but itself |
| its plan does so after its death | the plan of a corrupt coordinator that died convicts nobody else |
| who trains on while a round is in flight runs out of samples | nobody runs dry while its round is in flight |
| who slept votes for what it promised before | who slept decides no older ballot |
| a forced ballot counts as word from those it left out | what was accepted costs one T_evict, not two |
| what is told of an offer is told of the next one | a round with an earlier offer does not count the present one |
| a coordinator's patience ends before its owners' | owners that bear with a silence are asked anew, not for ever |
| a voter that may not vote yet is waited for | who slept and looks around holds nobody up |
| what is at stake with a late peer grows by the wait | those who hang are not waited for without end |
| a wait begins anew with each entry of the log | a wait goes on from slot to slot |
| only a contributor counts bytes and ballots | who contributes nothing is told what it sent and received |
| who was started anew is said to have left | a process that is back as another did not leave |
| two lone peers, cut in one direction | not mended: a partition, and one history is given up |
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch

from dlc.comm import ledger
from dlc.comm import messages as msg
from dlc.comm.agenda import Agenda
from dlc.comm.collector import Collector
from dlc.comm.coordinator import RUN, Coordinator
from dlc.comm.entries import CONFIG, ROUND, Part
from dlc.comm.events import ContributionDropped, DigestMismatch, HistoryLost, RoundDone
from dlc.comm.grid import Grid
from dlc.comm.ids import Ballot, Voter
from dlc.comm.messages import ChunkHeader, Result
from dlc.comm.patience import Patience
from dlc.comm.permit import greater_alive
from dlc.comm.records import told_digest
from dlc.comm.slot import ROSTER_PARTS_MAX, Slot
from dlc.sim.invariants import Violation
from dlc.sim.network import Weather
from dlc.sim.schedule import REDUCE, TIMEOUTS, TRAIN, Scenario, Start
from dlc.sim.toy import Means
from dlc.sim.world import Process, World
from tests.comm.stage import Stage, past_round
from tests.comm.test_transcripts_cases import names, nothing

torch.set_num_threads(1)

EVICT_S = TIMEOUTS.evict_s


def cut(stage: Stage, some: list[Process], others: list[Process]) -> None:
    for a in some:
        for b in others:
            stage.world.network.cut(a.host.name, b.host.name)
            stage.world.network.cut(b.host.name, a.host.name)
    stage.world.checker.paths_changed()


def mend(stage: Stage) -> None:
    stage.world.network.cuts.clear()
    stage.world.checker.paths_changed()


def ranked(stage: Stage) -> list[Process]:
    by_voter = {p.voter: p for p in stage.peers()}
    return [by_voter[v] for v in stage.peers()[0].node.log.state.ranked]


def promises_counted(stage: Stage) -> list[msg.Promise]:
    """Every promise that a coordinator takes from now on, its own included."""
    taken: list[msg.Promise] = []
    for process in stage.peers():
        coordinator = process.node.coordinator
        elect = coordinator._elect

        def noted(coordinator: Coordinator = coordinator, elect: Callable[[], None] = elect) -> None:
            taken.extend(coordinator.promises.values())
            elect()

        coordinator._elect = noted  # type: ignore[method-assign]
    return taken


# ------------------------------------------------------------------ ballots


def test_who_slept_decides_no_older_ballot() -> None:
    """A, with the casting vote, sleeps before it holds all of its round. B and a newcomer without a vote begin a forced
    ballot, in which B alone votes. A wakes and gets what it lacked: its vote alone would decide ballot 0 then, and the
    next coordinator would go by B's, of the higher ballot."""
    stage = Stage(2, n_chunks=2)
    a, b = ranked(stage)
    stage.hold = lambda source, target, m: isinstance(m, msg.Result) and target == a.host.name
    coordinator, plan = stage.planned()
    assert coordinator is a and plan.ballot.counter == 0
    t = plan.entry.t
    stage.until(lambda: b.node.exchange.held)
    stage.world.freeze(a, EVICT_S + 4.0)
    c = stage.world.start(stage.world.new_host(), (f"sim:{b.host.name}",))
    stage.hold = lambda source, target, m: (
        target == a.host.name or (target == c.host.name and isinstance(m, msg.Plan) and bool(m.deciders))
    )
    stage.until(lambda: b.node.slot.accepted is not None)
    accepted = b.node.slot.accepted
    assert accepted is not None and accepted[0].voter == b.voter and b.node.coordinator.deciders and not a.awake
    stage.world.crash(c)
    stage.until(lambda: a.awake)
    stage.hold = lambda source, target, m: isinstance(m, msg.Prepare | msg.Coord) and target == a.host.name
    stage.release()
    stage.until(lambda: a.node.exchange.complete and not a.node.ctx.stale, 2 * EVICT_S)
    stage.world.run_until(stage.world.now + 1.0)
    assert a.node.slot.accepted is None
    stage.hold = nothing
    stage.release()
    stage.committed(t, (a, b))
    stage.all_in((a, b))


def test_mutation_votes_for_what_was_promised_before_a_sleep_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slot, "wake", lambda self: None)
    with pytest.raises(Violation, match="I1"):
        test_who_slept_decides_no_older_ballot()


@pytest.mark.parametrize(("n", "survivors"), [(3, 1), (5, 2)])
def test_after_a_forced_ballot_for_what_was_accepted_the_dead_are_not_waited_for_again(n: int, survivors: int) -> None:
    """All have voted and most die: what the rest decide by force names the dead as voters still. Their own COMMIT made
    the survivors wait for these as if they had been heard of just then: T_evict twice."""
    stage = Stage(n)
    coordinator, plan = stage.planned()
    t, rest = plan.entry.t, ranked(stage)[-survivors:]
    stage.hold = lambda source, target, m: isinstance(m, msg.Held) and source != target
    stage.until(lambda: all(p.node.slot.accepted is not None for p in rest))
    assert coordinator not in rest and coordinator.node.log.head == plan.head, "nothing is decided"
    for process in stage.peers(*rest):
        stage.world.crash(process)
    stage.hold = nothing
    stage.committed(t, rest, 3 * EVICT_S)
    assert all(p.node.log.state.electorate == plan.entry.electorate for p in rest)
    decided = stage.world.now
    stage.committed(t + 2, rest, 3 * EVICT_S)
    assert stage.world.now - decided < EVICT_S / 2
    assert all(set(p.node.log.state.electorate) == {q.voter for q in rest} for p in rest)


# ------------------------------------------------------------------ offers taken back


def test_parts_of_an_offer_that_was_taken_back_are_none_of_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of an all-reduce reaches A alone, whose parts the owners keep; its coordinator dies, and what A tells
    the next one is late: the next round is another channel's, and the all-reduce has its old base. A calls again, with
    other values: of those that the owners kept none may be in the mean, nor be said to be."""
    monkeypatch.setattr("dlc.sim.invariants.check_means", lambda *known: None)  # these are no vectors of its trainers
    monkeypatch.setattr("dlc.sim.limits.over", lambda process: "")  # nor are limits by their grids those of this one
    stage = Stage(5, inner_s=3.0)
    coordinator, *_, a = ranked(stage)
    rest, grid = [p for p in stage.peers() if p is not coordinator], Grid(400, 4, "fp32")
    stage.world.grids["calls"] = grid
    sinks = {p.voter: Means() for p in rest}

    def call(process: Process, value: float) -> None:
        vector, sink = torch.full((400,), value), sinks.get(process.voter)
        how = {"weight": 1.0, "upto": 0, "patience_s": 25.0, "sink": sink}
        stage.world.checker.offered(process, "calls", Part(process.voter, 1.0, process.node.offers + 1))
        stage.world.act(process, lambda now: process.node.contribute("calls", vector, grid, **how, now=now))

    def first(source: str, target: str, m: msg.Message) -> bool:
        of_calls = isinstance(m, msg.Plan) and m.entry.channel == "calls"
        only_a = source == coordinator.host.name and target != a.host.name
        late = isinstance(m, msg.Promise | msg.Ready) and source == a.host.name and target != coordinator.host.name
        return (of_calls and only_a) or late

    stage.hold = first
    for process in stage.peers():
        call(process, 100.0 if process is a else 1.0)
    base = a.node.log.state.base("calls")
    strays = [p for p in rest if p is not a]

    def kept() -> bool:
        by_chunk = [part for p in strays for part in p.node.exchange.collector.parts.get(("calls", base), {}).values()]
        return sum(a.voter in part for part in by_chunk) > 30

    stage.until(kept, 40.0)
    stage.world.crash(coordinator)
    head = a.node.log.head
    stage.until(lambda: a.node.log.head != head, 60.0)
    assert a.node.log.state.base("calls") == base and kept()
    stage.hold = nothing
    assert a.node.withdraw("calls")
    stage.world.checker.withdrawn(a, "calls")
    sinks[a.voter] = Means()
    call(a, 1.0)
    stage.until(lambda: all(sink.t for sink in sinks.values()), 120.0)
    for sink in sinks.values():
        assert all(mean is not None and bool((mean == 1.0).all()) for _, _, mean in sink.chunks)


# ------------------------------------------------------------------ rosters


def test_a_promise_names_no_more_rosters_than_fit_a_header() -> None:
    """Chunks behind those are left out, and reduced again."""
    node = Stage(2).peers()[0].node
    parts = tuple(Part(Voter(f"p{i}", 1), 1.0, i) for i in range(1000))
    result = Result(ChunkHeader(b"", 0, b"", Ballot(0, node.me), node.me, (), ()), b"")
    for chunk in range(20):
        header = dataclasses.replace(result.header, chunk=chunk, included=parts[chunk // 2 :])
        node.exchange.held[chunk] = dataclasses.replace(result, header=header)
        node.exchange.hashes[chunk] = bytes(32)
    held, rosters = node.slot._held_chunks()
    assert sum(len(roster) for roster in rosters) <= ROSTER_PARTS_MAX
    assert len(rosters) == 8 and [h.chunk for h in held] == list(range(16))


def test_an_old_chunk_of_another_roster_is_reduced_again() -> None:
    """A and B begin round t alone and B holds chunks of it. C, D, E, who know nothing of that plan, begin it anew with
    another roster; C dies; D coordinates, hears from B, and must not mix B's chunks into the new round."""
    stage = Stage(5, n_chunks=6, uplink_Bps=10_000.0)
    a, b, c, d, e = ranked(stage)
    t = a.node.log.state.round_of(TRAIN) + 1
    pair = {a.host.name, b.host.name}
    across = (msg.Ready, msg.Plan)
    stage.hold = lambda source, target, m: (source in pair) != (target in pair) and isinstance(m, across)
    stage.until(lambda: a.node.coordinator.phase == RUN, 60.0)
    first = a.node.coordinator.plan
    assert first is not None and {p.voter for p in first.entry.roster} == {a.voter, b.voter}
    stage.hold = lambda source, target, m: (source in pair) != (target in pair)
    stage.until(lambda: b.node.exchange.held)
    stage.world.crash(a)
    cut(stage, [b], [c, d, e])
    stage.hold, stage.held = nothing, []
    stage.until(lambda: any(p.node.coordinator.phase == RUN for p in (c, d, e)))
    second = next(p for p in (c, d, e) if p.node.coordinator.phase == RUN)
    plan = second.node.coordinator.plan
    assert plan is not None and {p.voter for p in plan.entry.roster} == {c.voter, d.voter, e.voter}
    stage.hold = lambda source, target, m: isinstance(m, msg.Contrib | msg.Result)  # nobody gets any of this one
    stage.until(lambda: all(p.node.slot.plan is not None for p in (c, d, e)))
    held, hashes = dict(b.node.exchange.held), set(b.node.exchange.hashes.values())
    assert held, "B still holds the old candidates"
    stage.world.crash(second)
    mend(stage)
    third = stage.peers(b)
    heard = promises_counted(stage)
    stage.until(lambda: any(isinstance(m, msg.Plan) and m.ballot > plan.ballot for _, _, _, m in stage.sent))
    stage.hold = nothing
    stage.committed(t, [*third, b])
    assert any(p.held and p.plan is not None and p.plan.ballot == first.ballot for p in heard), "B offered them"
    plans = [m for _, _, _, m in stage.sent if isinstance(m, msg.Plan)]
    assert not [f for m in plans for f in m.fixed if f.hash in hashes], "a plan reuses a chunk of another roster"
    for process in third:
        past = past_round(process.node, t)
        assert {p.voter for p in past.entry.roster} == {c.voter, d.voter, e.voter}
        assert not {r.header.ballot for r in held.values()} & {r.header.ballot for r in past.results}


def test_a_part_of_a_revoked_lease_is_not_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """X's parts reach the owner O before the plan, which dies with its coordinator. The others go on without X for so
    long that X's lease, which ends with its seat here, is in the pool; then X contributes the same weight for other
    samples."""
    monkeypatch.setattr(ledger, "AWAY_ENTRIES", 0)
    stage = Stage(7, n_chunks=42, uplink_Bps=50_000.0)
    x = max(stage.peers(), key=lambda p: p.voter)
    while ranked(stage)[0] is x:
        stage.until(lambda head=x.node.log.head: x.node.log.head != head)
        stage.between_rounds()
    a, o, *others = [p for p in ranked(stage) if p is not x]
    for process in (a, o, x):
        process.rng.randint = lambda low, high: 3  # type: ignore[method-assign]
    t = a.node.log.state.round_of(TRAIN) + 1
    slow, blind = {p.host.name for p in others}, {p.host.name for p in (o, *others)}
    stage.hold = lambda s, t, m: (isinstance(m, msg.Ready) and s in slow) or (isinstance(m, msg.Plan) and t in blind)
    stage.until(lambda: a.node.coordinator.phase == RUN, 60.0)
    first = a.node.coordinator.plan
    assert first is not None and {p.voter for p in first.entry.roster} >= {a.voter, x.voter}
    mine = next(p for p in first.entry.roster if p.voter == x.voter)
    # A is missed before X is, or in the same entry, in which it comes first: X gets its ranges, and not its own again.
    cut(stage, [a], others)
    began = stage.world.now
    stage.until(lambda: stage.world.now - began > 1.0)
    cut(stage, [o, x], others)
    base = o.node.log.state.base(TRAIN)

    def parts_of_x() -> list[msg.Contrib]:
        chunks = o.node.exchange.collector.parts.get((TRAIN, base), {}).values()
        return [by[x.voter] for by in chunks if x.voter in by]

    stage.hold = lambda source, target, m: isinstance(m, msg.Plan) and target == o.host.name
    owned = [chunk for chunk, owner in enumerate(first.assignment) if first.owners[owner] == o.voter]
    stage.until(lambda: owned and len(parts_of_x()) == len(owned))  # all that it owes to O
    stage.world.crash(a)
    cut(stage, [o], [x])
    stage.hold, stage.held = nothing, []
    for process in (o, *others):  # they have nothing to contribute for a while: the next entry is a config
        if process.node.withdraw(TRAIN):
            stage.world.checker.told(process, ContributionDropped(TRAIN))
        process.trainer.inner_s = 1e6
        process.trainer.begin()
    stage.until(lambda: all(x.voter not in p.node.log.state.electorate for p in others), 60.0)
    assert others[0].node.log.state.base(TRAIN) == base and parts_of_x(), "the round is still to come"
    parts = parts_of_x()
    mend(stage)
    stage.until(lambda: all(x.voter in p.node.log.state.electorate for p in stage.peers()))
    stage.until(lambda: TRAIN in x.node.exchange.offered)
    assert parts_of_x()
    for process in (o, *others):
        process.trainer.inner_s = 1.0
        process.trainer.begin()
    stage.until(lambda: o.node.slot.plan is not None and o.node.slot.plan.entry.kind == ROUND)
    plan = o.node.slot.plan
    assert plan is not None and any(plan.owners[plan.assignment[part.chunk]] == o.voter for part in parts)
    stage.committed(t, stage.peers(), 60.0)
    roster = past_round(x.node, t).entry.roster
    # The checker computes every mean again from the roster: a part of other samples would be seen.
    again = [p for p in roster if p.voter == x.voter]
    assert again and again[0].weight == mine.weight and again[0].upto != mine.upto


# ------------------------------------------------------------------ taken back


def taken_back(stage: Stage, alone: bool) -> tuple[Process, Process, int]:
    """X offers another weight while a plan that names the first is on its way to it: (coordinator, x, round)."""
    coordinator, x = ranked(stage)[:2]
    if alone:
        stage.until(lambda: TRAIN not in coordinator.node.exchange.offered)
        coordinator.trainer._offer = lambda: None  # type: ignore[method-assign]
    t = coordinator.node.log.state.round_of(TRAIN) + 1
    stage.hold = lambda source, target, m: isinstance(m, msg.Plan) and target == x.host.name
    stage.until(lambda: coordinator.node.coordinator.phase == RUN, 60.0)
    plan = coordinator.node.coordinator.plan
    contributors = {x.voter} if alone else {coordinator.voter, x.voter}
    assert plan is not None and {p.voter for p in plan.entry.roster} == contributors
    old = x.node.exchange.offered[TRAIN]
    assert x.node.withdraw(TRAIN)
    grid, weight, upto = stage.world.grids[TRAIN], old.ready.weight + 100, old.ready.upto + 1
    vector = torch.zeros(grid.numel)
    stage.world.act(
        x,
        lambda now: x.node.contribute(
            TRAIN, vector, grid, weight=weight, upto=upto, patience_s=0.0, sink=None, now=now
        ),
    )
    stage.hold = nothing
    stage.release()
    return coordinator, x, t


@pytest.mark.parametrize("alone", [True, False])
def test_who_takes_its_contribution_back_too_late_is_left_out_and_nobody_else_is_blamed(alone: bool) -> None:
    """X's part never comes. To wait for it in X's own chunks was to wait for oneself, and an error with nobody else in
    the roster; other owners waited for as long as X's pace explained. Nor is anybody mute: what reaches no owner proves
    nothing about an owner's port."""
    stage = Stage(2, n_chunks=4)
    coordinator, x, t = taken_back(stage, alone)
    stage.committed(t, (coordinator, x), TIMEOUTS.chunk_s / 2)
    assert stage.counted(t) == (set() if alone else {coordinator.host.name})
    for report in stage.reports(t).values():
        assert [m.reason for m in report.missing if m.peer == x.host.name] == ["late"]
    assert not any(p.node.coordinator.agenda.mute() for p in (coordinator, x))
    stage.all_in((x,), 60.0)


def test_a_part_that_comes_before_the_plan_that_asks_for_it_is_kept() -> None:
    """An owner dies, and its chunks go to others. One of these hears of the new plan later than a contributor, whose
    part for a chunk that was not its own comes first; dropped, it would be waited for until it is sent again."""
    stage = Stage(3, n_chunks=6, uplink_Bps=20_000.0)
    coordinator, plan = stage.planned()
    victim, slow = stage.peers(coordinator)
    stage.hold = lambda source, target, m: source == victim.host.name and isinstance(m, msg.Result)
    stage.until(lambda: all(p.node.slot.plan is not None for p in stage.peers()))
    stage.world.crash(victim)
    stage.hold = lambda source, target, m: (
        (isinstance(m, msg.Plan) and m.ballot > plan.ballot and target == slow.host.name)
        or (isinstance(m, msg.Contrib) and source == slow.host.name)
    )

    def early() -> bool:
        by_chunk = slow.node.exchange.collector.parts.get((TRAIN, plan.entry.parent), {})
        mine = {c for c, o in enumerate(plan.assignment) if plan.owners[o] == slow.voter}
        return any(coordinator.voter in by for chunk, by in by_chunk.items() if chunk not in mine)

    stage.until(early)
    stage.hold = nothing
    stage.release()
    reports = stage.committed(plan.entry.t, (coordinator, slow))
    for report in reports.values():
        assert {m.peer for m in report.missing} <= {victim.host.name}
        assert {s.peer for s in report.contributors if s.fraction == 1.0} >= {coordinator.host.name, slow.host.name}


def test_a_part_that_was_lost_once_is_sent_again() -> None:
    """A connection breaks with it: the result that does not come makes its contributor send it once more."""
    stage = Stage(3)
    lost: list[msg.Contrib] = []

    def first(source: str, target: str, m: object) -> bool:
        if isinstance(m, msg.Contrib) and not lost:
            lost.append(m)
            return True
        return False

    stage.hold = first
    stage.until(lambda: lost)
    t = stage.peers()[0].node.log.state.round_of(TRAIN) + 1
    reports = stage.committed(t, stage.peers())
    assert len(stage.held) == 1, "it is never delivered"
    for report in reports.values():
        assert not report.missing and [share.fraction for share in report.contributors] == [1.0] * 3


def test_what_goes_down_with_a_connection_costs_nothing_while_others_keep_the_round_busy() -> None:
    """The window to that owner was sent once more when nothing at all moved. Where a slow member kept moving, its
    contributor was late with all that it had sent."""
    stage = Stage(4, n_chunks=60)
    slow = stage.peers()[1].host
    slow.uplink_Bps = 2_000.0
    n_before = stage.rounds
    stage.until(lambda: stage.rounds > n_before + 2, 100.0)  # its pace is known
    stage.between_rounds()
    _, plan = stage.planned()
    owner, victim, *_ = (p for p in stage.peers() if p.host is not slow and p.voter in plan.owners)
    lost: list[msg.Contrib] = []

    def breaks(source: str, target: str, m: object) -> bool:
        down = isinstance(m, msg.Contrib) and (source, target) == (victim.host.name, owner.host.name)
        if not down or len(lost) == 5:
            return False
        lost.append(m)
        if len(lost) == 5:
            victim.node.bulk_broken(target)
        return True

    stage.hold = breaks
    reports = stage.committed(plan.entry.t, stage.peers(), limit_s=100.0)
    assert len(lost) == 5
    for report in reports.values():
        assert {m.peer for m in report.missing} <= {slow.name}
        assert {s.peer for s in report.contributors if s.fraction == 1.0} >= {owner.host.name, victim.host.name}


# ------------------------------------------------------------------ sleep


def test_who_is_behind_comes_to_the_only_one_whose_bulk_has_a_way_to_it() -> None:
    """The three with the greatest histories were asked by turns for ever: all alive, and nothing came from them."""
    stage = Stage(6)
    *others, sleeper = stage.peers()
    stage.world.freeze(sleeper, 12.0)
    stage.until(lambda: sleeper.awake)
    silent, depth = {p.host.name for p in others[:4]}, others[4].node.log.state.depth
    assert sleeper.node.log.state.depth < depth - 3
    bulk = (msg.Result, msg.Contrib, msg.Piece)
    stage.hold = lambda source, target, m: source in silent and target == sleeper.host.name and isinstance(m, bulk)
    stage.until(lambda: sleeper.node.log.state.depth >= depth, limit_s=90.0)


def test_who_slept_and_looks_around_holds_nobody_up() -> None:
    """It has to hear of a peer that is dead, so it stays stale for some seconds, and is first in rank in some of the
    slots meanwhile. It is alive: others would find out by its silence, and wait in vain for its promises and votes."""
    took = [slot for seed in range(15, 20) for slot in slots_beside_a_sleeper(seed)]
    assert max(coords for first, coords in took if first) < 2
    assert max(coords for first, coords in took if not first) < 1


def slots_beside_a_sleeper(seed: int) -> list[tuple[bool, float]]:
    """Of each slot until it is stale no more: whether it is first in rank there, and how many T_coord it takes."""
    stage = Stage(5, seed=seed)
    *_, sleeper, dead = ranked(stage)
    stage.world.crash(dead)
    stage.world.freeze(sleeper, 8.0)
    stage.until(lambda: sleeper.awake)
    observer = stage.peers(sleeper)[0]
    slots: list[tuple[bytes, float, Voter | None]] = []

    def back() -> bool:
        state = observer.node.log.state
        if not slots or slots[-1][0] != state.head:
            slots.append((state.head, stage.world.now, state.rank0))
        return not sleeper.node.ctx.stale

    assert not back()
    stage.until(back, 2 * EVICT_S)
    t_coord_s = observer.node.members.t_coord_s
    pairs = itertools.pairwise(slots)
    return [(rank0 == sleeper.voter, (after - at) / t_coord_s) for (_, at, rank0), (_, after, _) in pairs]


def test_what_a_sleeper_had_trained_is_averaged_when_it_is_back() -> None:
    """It sleeps with a contribution on offer, for so long that the others remove it: its lease outlives its seat."""
    stage = Stage(4)
    x = ranked(stage)[-1]
    others = stage.peers(x)
    stage.hold = lambda source, target, m: isinstance(m, msg.Ready) and source == x.host.name
    stage.until(lambda: TRAIN in x.node.exchange.offered and x.node.slot.plan is None)
    mine = x.node.exchange.offered[TRAIN].ready
    stage.world.freeze(x, 0.6 * EVICT_S)
    stage.hold = nothing
    stage.until(lambda: all(x.voter not in p.node.log.state.electorate for p in others), 60.0)
    assert not x.awake
    stage.all_in((x,), 60.0)
    assert not [event for name, event in stage.told if name == x.host.name and isinstance(event, ContributionDropped)]
    rosters = {past.entry.roster for p in stage.peers() for past in p.node.log.past}
    assert Part(x.voter, mine.weight, mine.upto) in {part for roster in rosters for part in roster}


def test_the_woken_stay_stale_while_the_state_is_slow_to_come() -> None:
    """Three of five sleep; two go on by force. The three wake, all at one old head and a quorum of it, and what would
    bring them up to date is held up: until it comes they decide nothing."""
    stage = Stage(5)
    sleepers, others = ranked(stage)[:3], ranked(stage)[3:]
    head, asleep = sleepers[0].node.log.head, {p.host.name for p in sleepers}
    for process in sleepers:
        stage.world.freeze(process, 3 * EVICT_S)
    stage.until(lambda: all(set(p.node.log.state.electorate) == {q.voter for q in others} for p in others), 80.0)
    stage.committed(others[0].node.log.state.round_of(TRAIN) + 2, others)
    assert {p.node.log.head for p in sleepers} == {head}
    slow = (msg.Steps, msg.Offer, msg.Piece, msg.Commit)
    stage.hold = lambda source, target, m: target in asleep and isinstance(m, slow)
    stage.until(lambda: all(p.awake for p in sleepers), 80.0)
    stage.sent.clear()
    until = stage.world.now + 1.5 * EVICT_S
    stage.until(lambda: stage.world.now > until, 2 * EVICT_S)
    assert all(p.node.ctx.stale for p in sleepers)
    binding = (msg.Held, msg.Promise, msg.Plan, msg.Prepare)
    assert not [m for _, s, _, m in stage.sent if s in asleep and isinstance(m, binding)]
    stage.hold = nothing
    stage.release()
    stage.all_in()
    assert not stage.world.checker.history.forks


def heads_of(stage: Stage) -> set[bytes]:
    return {p.node.log.head for p in stage.peers()}


@pytest.mark.parametrize("after_s", [1.0, 0.8 * EVICT_S])
def test_who_is_cut_off_before_it_has_caught_up_decides_nothing(after_s: float) -> None:
    """One of two sleeps, and the other goes on by force. The sleeper, whose vote alone decides at the old head, hears
    so when it wakes; before it has caught up the other one is out of reach again, for less than T_evict."""
    stage = Stage(2)
    stage.until(lambda: len(heads_of(stage)) == 1 and not any(p.node.slot.plan for p in stage.peers()))
    sleeper, other = ranked(stage)
    head, name = sleeper.node.log.head, sleeper.host.name
    stage.world.freeze(sleeper, 1.5 * EVICT_S)
    slow = (msg.Steps, msg.Offer, msg.Piece, msg.Commit)
    stage.hold = lambda source, target, m: target == name and isinstance(m, slow)
    stage.until(lambda: other.node.log.state.electorate == (other.voter,), 3 * EVICT_S)
    stage.committed(other.node.log.state.round_of(TRAIN) + 2, [other])
    stage.until(lambda: sleeper.awake and bool(greater_alive(sleeper.node.ctx, sleeper.node.log)), 3 * EVICT_S)
    until = stage.world.now + after_s
    stage.until(lambda: stage.world.now > until)
    cut(stage, [sleeper], [other])
    stage.until(lambda: not sleeper.node.members.alive(other.voter), EVICT_S)
    until = stage.world.now + 0.5 * EVICT_S
    stage.until(lambda: stage.world.now > until, EVICT_S)
    assert sleeper.node.ctx.stale and sleeper.node.log.head == head
    stage.hold = nothing
    stage.release()
    mend(stage)
    stage.all_in()
    assert not stage.world.checker.history.forks


# ------------------------------------------------------------------ cuts


@pytest.mark.parametrize("evictions", [0.5, 3.0])
def test_after_a_long_cut_all_find_each_other_again(evictions: float) -> None:
    """Nobody is given up: those across the cut are pinged all the time, and the cut's end is noticed within seconds."""
    stage = Stage(4)
    one, *others = ranked(stage)
    cut(stage, [one], others)
    end = stage.world.now + evictions * EVICT_S
    stage.until(lambda: stage.world.now > end - 4.0, 4 * EVICT_S)
    assert not any(p.node.members.alive(one.voter) for p in others)
    stage.sent.clear()
    stage.until(lambda: stage.world.now > end)
    across = [
        s for _, s, t, m in stage.sent if isinstance(m, msg.Ping) and (s == one.host.name) != (t == one.host.name)
    ]
    assert set(across) == names(stage), "both sides go on trying"
    mend(stage)
    stage.until(lambda: all(p.node.members.alive(q.voter) for p in stage.peers() for q in stage.peers()), 6.0)
    stage.all_in(limit_s=25.0)
    assert len({p.node.log.head for p in stage.peers()}) <= 2


def test_two_lone_peers_with_a_one_way_cut_are_a_partition() -> None:
    """What A says reaches B, and nothing comes back: neither has a two-way proof, and nobody is there to relay. Both go
    on by themselves; the greater history wins when the cut is mended, and who loses its own is told."""
    stage = Stage(2)
    a, b = ranked(stage)
    common = a.node.log.state.round_of(TRAIN)
    stage.world.network.cut(b.host.name, a.host.name)
    stage.world.checker.paths_changed()
    stage.until(lambda: all(p.node.log.state.round_of(TRAIN) > common + 5 for p in (a, b)), 6 * EVICT_S)
    assert stage.world.checker.history.forks
    key = {p.host.name: p.node.log.state.key for p in (a, b)}
    mend(stage)
    stage.until(lambda: a.node.log.head == b.node.log.head, 20.0)
    lost = [(name, e) for name, e in stage.told if isinstance(e, HistoryLost)]
    assert len(lost) == 1 and lost[0][1].rounds > 3
    assert lost[0][0] == min(key, key=lambda name: key[name])
    stage.all_in()


# ------------------------------------------------------------------ founding again


def test_a_founder_from_disk_does_not_go_on_alone() -> None:
    """It founded the run once; started again from its checkpoint with its address book, it is one peer like another."""
    stage = Stage(3)
    founder = stage.world.hosts["p0"].process
    assert founder is not None
    stage.until(lambda: founder.host.disk is not None)
    stage.world.crash(founder)
    others = stage.peers()
    stage.committed(others[0].node.log.state.round_of(TRAIN) + 1, others)
    again = stage.world.start(founder.host, tuple(p.host.address for p in others), from_disk=True)
    cut(stage, [again], others)
    saved = again.node.log.head
    until = stage.world.now + 2 * EVICT_S
    stage.until(lambda: stage.world.now > until, 3 * EVICT_S)
    assert again.node.log.head == saved and not again.node.log.active
    assert not stage.world.checker.history.forks
    mend(stage)
    stage.all_in()


# ------------------------------------------------------------------ long phases


def test_a_long_chunk_phase_has_one_ballot() -> None:
    """Chunks come for many times T_coord, T_dead and T_stall: nobody takes over, nobody is given up, nothing is
    reduced twice."""
    stage = Stage(3, n_chunks=60, uplink_Bps=320e3, chunk_elems=1 << 13)  # a chunk of 32 KiB each 0.1 s
    coordinator, plan = stage.planned()
    began = stage.world.now
    reports = stage.committed(plan.entry.t, stage.peers(), 120.0)
    assert stage.world.now - began > 3 * coordinator.node.members.t_coord_s
    assert all(r.ballots == 1 and r.complete for r in reports.values())
    assert not [m for _, _, _, m in stage.sent if isinstance(m, msg.Prepare | msg.Nack | msg.Promise)]


def test_one_slow_downlink_is_waited_for_as_long_as_it_receives() -> None:
    """Two have all results and have voted; the third gets one each 1.5 s. That is progress, and no reason to plan
    again."""
    stage = Stage(3, n_chunks=12)
    coordinator, plan = stage.planned()
    slow = stage.peers(coordinator)[0]
    stage.hold = lambda source, target, m: target == slow.host.name and isinstance(m, msg.Result)
    stage.until(lambda: len(stage.held) >= 8)
    others = stage.peers(slow)
    while slow.node.log.state.round_of(TRAIN) < plan.entry.t and stage.held:
        one, stage.held = stage.held[0], stage.held[1:]
        stage._carry(*one)
        until = stage.world.now + 1.5
        stage.until(lambda until=until: stage.world.now > until)
        if all(p.node.log.state.round_of(TRAIN) >= plan.entry.t for p in others):
            break
    stage.hold = nothing
    stage.release()
    reports = stage.committed(plan.entry.t, stage.peers())
    assert all(r.ballots == 1 for r in reports.values())
    assert not [m for _, _, _, m in stage.sent if isinstance(m, msg.Prepare)]


def test_owners_that_bear_with_a_silence_are_asked_anew_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parts of two of four do not come. Every owner waits for 13 s for them, the coordinator for 2: each new ballot
    begins their wait anew, so the coordinator must bear with them for longer in the end."""
    stage = Stage(4)
    mute = {p.host.name for p in ranked(stage)[2:]}
    monkeypatch.setattr(Patience, "silence_s", lambda self, voter: 13.0)
    monkeypatch.setattr(Collector, "stall_s", property(lambda self: 2.0))
    stage.hold = lambda source, target, m: source in mute and isinstance(m, msg.Contrib)
    t = max(p.node.log.state.round_of(TRAIN) for p in stage.peers()) + 1
    reports = stage.committed(t, ranked(stage)[:2], limit_s=60.0)
    for report in reports.values():
        assert {m.peer for m in report.missing if m.reason == "late"} <= mute and report.missing
    assert [m for _, _, _, m in stage.sent if isinstance(m, msg.Prepare)], "the coordinator asked anew"
    patient = ranked(stage)[0].node.coordinator
    patient._stalls = 10_000
    assert 2.0 <= patient._stall_s() <= 13.0, "after hours without progress, too"


def test_a_round_with_an_earlier_offer_does_not_count_the_present_one() -> None:
    """A plan that reached one member alone made it send its parts, which owners keep. Its coordinator dies, the next
    decides an electorate, and the base stays. The member trains on, and offers more than before; that crosses the next
    plan, which names the earlier offer, and owners have parts of that."""
    stage = Stage(5, n_chunks=12, seed=1)
    first = ranked(stage)[0]
    giver, *rest = stage.peers(first)
    offers = {p.host.name: p.trainer._offer for p in rest}
    for process in rest:  # still at work: they offer nothing for now
        process.trainer._offer = lambda: None  # type: ignore[method-assign]
        if process.node.withdraw(TRAIN):
            stage.world.checker.withdrawn(process, TRAIN)
            process.trainer.due = True

    def crosses(source: str, target: str, m: object) -> bool:
        if isinstance(m, msg.Plan):
            return source == first.host.name and target != giver.host.name
        late = isinstance(m, msg.Promise | msg.Ready) and source == giver.host.name
        return late and target != first.host.name

    def kept() -> int:
        return sum(
            giver.voter in by for p in rest for ch in p.node.exchange.collector.parts.values() for by in ch.values()
        )

    stage.hold = crosses
    stage.until(lambda: giver.node.slot.plan is not None and giver.node.slot.plan.entry.kind == ROUND)
    stage.until(lambda: kept() >= 3)
    stage.world.crash(first)
    head = giver.node.log.head
    stage.until(lambda: giver.node.log.head != head, 120.0)
    assert giver.node.log.past[-1].entry.kind == CONFIG and TRAIN in giver.node.exchange.offered
    stage.hold = nothing
    stage.between_rounds()
    stage.until(lambda: any(giver.voter in p.node.coordinator.agenda._ready.get(TRAIN, {}) for p in stage.peers()))

    stage.hold = lambda source, target, m: source == giver.host.name and isinstance(m, msg.Ready)
    trainer, earlier = giver.trainer, giver.node.exchange.offered[TRAIN].ready
    assert not trainer._planned() and giver.node.withdraw(TRAIN)
    stage.world.checker.withdrawn(giver, TRAIN)
    lease = giver.node.lease()
    assert lease is not None
    trainer.blocks, trainer.upto = lease.take(len(trainer.blocks) + 2)
    trainer._work, trainer.due = lambda: True, True  # type: ignore[method-assign]
    trainer.weight = 2 * earlier.weight
    n = len(stage.told)
    trainer._offer()
    for process in rest:
        process.trainer._offer = offers[process.host.name]  # type: ignore[method-assign]
        process.trainer._offer()

    def told() -> list[RoundDone]:
        return [e for name, e in stage.told[n:] if name == giver.host.name and isinstance(e, RoundDone)]

    stage.until(told, 60.0)
    done = told()[0]
    assert [s.weight for s in done.report.contributors if s.peer == giver.host.name] == [earlier.weight]
    assert done.older and not done.counted and not any(done.included)


# ------------------------------------------------------------------ one wrong state


def test_a_corrupt_coordinator_convicts_nobody_but_itself() -> None:
    """The state of rank 0 is no longer what the log says. The others' digests agree: it steps down and is repaired."""
    stage = Stage(4)
    corrupt, *others = ranked(stage)
    attached = corrupt.node.log.attached[TRAIN]
    attached.state.theta.add_(1.0)  # type: ignore[attr-defined]
    attached.digest = attached.state.digest()
    stage.world.checker.corrupted(corrupt)
    t = corrupt.node.log.state.round_of(TRAIN) + 1
    reports = stage.committed(t, others)
    assert {s.peer for s in reports[others[0].host.name].contributors} >= {p.host.name for p in others}
    assert {name for name, e in stage.told if isinstance(e, DigestMismatch)} == {corrupt.host.name}
    stage.all_in()
    assert attached.synced and attached.digest == attached.state.digest()


def test_the_plan_of_a_corrupt_coordinator_that_died_convicts_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had heard of nobody else's state, and one peer got its plan. That one takes the state of the others; they do
    not go on with the round of a state that nobody has any more."""
    stage = Stage(4)
    corrupt, one, *rest = ranked(stage)
    node, attached = corrupt.node, corrupt.node.log.attached[TRAIN]
    attached.state.theta.add_(1.0)  # type: ignore[attr-defined]
    attached.digest = wrong = attached.state.digest()
    node.ctx.record_due = True
    node.coordinator.agenda._digest = lambda channel, mine, offers: mine  # type: ignore[method-assign]
    stage.world.checker.corrupted(corrupt)
    # Of the simulator's own swarms no coordinator ever makes such a plan, and so convicts nobody.
    monkeypatch.setattr(stage.world.checker._truth, "planned", lambda plan, sound: "")
    monkeypatch.setattr(stage.world.checker, "_convicted", lambda process, event: None)
    stage.hold = lambda source, target, m: isinstance(m, msg.Plan) and target != one.host.name
    coordinator, plan = stage.planned()
    assert coordinator is corrupt and plan.digest == wrong
    stage.until(lambda: one.node.slot.plan == plan)
    for process in rest:
        record = process.node.members.record(corrupt.voter.peer)
        assert record is not None and told_digest(record, plan.head, TRAIN) == wrong
    stage.world.crash(corrupt)
    stage.hold = nothing
    stage.committed(plan.entry.t, [one, *rest], 120.0)
    assert {name for name, e in stage.told if isinstance(e, DigestMismatch)} == {one.host.name}
    stage.all_in()


# ------------------------------------------------------------------ samples


def test_nobody_runs_dry_while_its_round_is_in_flight() -> None:
    """At every head each trainer has samples behind those that it has just offered, though ranges are used up."""
    stage = Stage(3, inner_s=0.3)
    used_up = 0

    def offered(process: Process) -> tuple[Voter, int]:
        return process.voter, process.trainer.upto

    first = {p.voter: p.node.lease().ranges[0].hi for p in stage.peers()}  # type: ignore[union-attr]
    t = max(p.node.log.state.round_of(TRAIN) for p in stage.peers())
    for later in range(t + 1, t + 25):
        _, plan = stage.planned()
        for process in stage.peers():
            lease = process.node.lease()
            part = next((p for p in plan.entry.roster if p.voter == process.voter), None)
            if process.node.log.head != plan.head or part is None or lease is None:
                continue
            rest = lease.advanced(part.upto)
            used_up += part.upto == lease.ranges[0].hi
            assert rest.blocks > 0, "nothing to train on while this round is in flight"
        stage.committed(later, stage.peers())
    assert used_up >= 3 and all(p.node.lease().ranges[0].hi != first[p.voter] for p in stage.peers())  # type: ignore[union-attr]
    entries = [p.entry for p in stage.peers()[0].node.log.past]
    assert {e.kind for e in entries} <= {ROUND, CONFIG} and not [e for _, e in stage.told if isinstance(e, HistoryLost)]
    assert all(e.counted for _, e in stage.told if isinstance(e, RoundDone))


# ------------------------------------------------------------------ who does not come


def hangs(stage: Stage, *processes: Process) -> None:
    """Their training has stopped; the processes answer as ever."""
    for process in processes:
        for trainer in process.trainers.values():
            trainer._finished = trainer._offer = lambda: None  # type: ignore[method-assign]


@pytest.mark.parametrize(("n", "hung", "times_as_fast"), [(3, 2, 1.0), (3, 1, 4.5), (6, 4, 1.0)])
def test_those_who_hang_are_not_waited_for_without_end(n: int, hung: int, times_as_fast: float) -> None:
    """What was at stake with those who are twice as fast as all that are ready grew by the wait itself, and faster than
    what the wait had cost."""
    stage = Stage(n)
    stage.all_in()
    for i, process in enumerate(stage.peers()):
        speed = 100.0 * (times_as_fast if i < hung else 1.0)
        stage.world.act(process, lambda now, p=process, s=speed: p.node.describe(now, speed=s, eta_s=0.0))  # type: ignore[misc]
    hangs(stage, *stage.peers()[:hung])
    before, start = stage.rounds, stage.world.now
    stage.until(lambda: stage.rounds >= before + 4, 200.0)
    assert stage.world.now - start < 200.0


def test_a_wait_goes_on_from_slot_to_slot() -> None:
    """Another channel's rounds came more often than the patience, which began anew with each of them: no round ever."""
    scenario = Scenario(
        seed=0,
        starts=(Start(0.0, ()), *(Start(0.1 * i, (0,)) for i in range(1, 4))),
        weather=Weather(latency_max_s=0.05, spike=0.0),
        inner_s=1.0,
        channels=(TRAIN, REDUCE),
    )
    world = World(scenario)

    def run(condition: Callable[[], object], limit_s: float) -> None:
        end = world.now + limit_s
        while not condition():
            assert world.clock.step() and world.now < end, "the transcript does not reach its point"

    def rounds(channel: str) -> int:
        return max((p.node.log.state.round_of(channel) for p in world.running()), default=0)

    run(lambda: rounds(REDUCE) > 1 and all(len(p.node.log.state.electorate) == 4 for p in world.running()), 120.0)
    lazy = list(world.running())[1].trainers[REDUCE]
    lazy._finished = lazy._offer = lambda: None  # type: ignore[method-assign]
    reduced, trained = rounds(REDUCE), rounds(TRAIN)
    run(lambda: rounds(REDUCE) >= reduced + 4, 60.0)
    assert rounds(TRAIN) >= trained + 10


# ------------------------------------------------------------------ reports


def test_who_contributes_nothing_is_told_what_it_sent_and_received() -> None:
    """It owns chunks as all do; its report said 0 bytes, and one ballot, whatever it had done."""
    stage = Stage(4, n_chunks=8, chunk_elems=64)
    stage.all_in()
    lazy = stage.peers()[1]
    hangs(stage, lazy)
    stage.all_in(stage.peers(lazy))
    stage.between_rounds()
    stage.sent.clear()
    t = lazy.node.log.state.round_of(TRAIN) + 1
    reports = stage.committed(t, stage.peers())
    assert {s.peer for s in reports[lazy.host.name].contributors} == {p.host.name for p in stage.peers(lazy)}
    bulk = [(s, d, len(m.payload)) for _, s, d, m in stage.sent if isinstance(m, msg.Result | msg.Contrib)]
    for name, report in reports.items():
        assert report.bytes_sent == sum(size for s, _, size in bulk if s == name) > 0
        assert report.bytes_received == sum(size for _, d, size in bulk if d == name) > 0


def test_all_are_told_how_many_ballots_a_round_took() -> None:
    stage = Stage(4)
    stage.all_in()
    lazy = stage.peers()[1]
    hangs(stage, lazy)
    stage.all_in(stage.peers(lazy))
    coordinator, plan = stage.planned()
    while coordinator is lazy:
        stage.committed(plan.entry.t, stage.peers())
        coordinator, plan = stage.planned()
    stage.until(lambda: all(p.node.slot.plan is not None for p in stage.peers()))
    stage.world.crash(coordinator)
    reports = stage.committed(plan.entry.t, stage.peers())
    assert {report.ballots for report in reports.values()} == {2}


def test_a_process_that_is_back_as_another_did_not_leave() -> None:
    stage = Stage(4, n_chunks=8)
    stage.all_in()
    coordinator, plan = stage.planned()
    roster = {part.voter for part in plan.entry.roster}
    victim = next(p for p in stage.peers(coordinator) if p.voter in roster)
    name, host = victim.host.name, victim.host
    stage.hold = lambda source, target, message: source == name and isinstance(message, msg.Contrib | msg.Result)
    stage.world.crash(victim)
    book = tuple(sorted(h.address for h in stage.world.hosts.values() if h is not host))
    stage.world.clock.at(stage.world.now + 0.2, lambda: stage.world.start(host, book, from_disk=False))
    reports = stage.committed(plan.entry.t, [p for p in stage.peers() if p.host.name != name], 60.0)
    for report in reports.values():
        assert [(m.peer, m.reason) for m in report.missing] == [(name, "dead")]


# ------------------------------------------------------------------ many channels


def test_of_many_calls_that_wait_each_is_told_once_and_looked_at_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """With each call all others were told anew, and with each that was told all others looked at: a hundred at once
    took twenty times as long as one after the other, and kept peers so busy that they were taken for dead."""
    monkeypatch.setattr("dlc.sim.invariants.check_means", lambda *known: None)  # these are no vectors of its trainers
    monkeypatch.setattr("dlc.sim.limits.over", lambda process: "")  # nor are limits by their grids those of this one
    looks, look = [0], Agenda._round
    monkeypatch.setattr(Agenda, "_round", lambda self, channel: (looks.append(looks.pop() + 1), look(self, channel))[1])
    stage, n, grid = Stage(2, inner_s=20.0), 20, Grid(8, 8, "fp32")
    calls = [f"call {i}" for i in range(n)]
    stage.world.grids |= dict.fromkeys(calls, grid)
    sinks = {(p.voter, name): Means() for p in stage.peers() for name in calls}
    looks[0] = 0
    for process in stage.peers():
        for name in calls:
            how = {"weight": 1.0, "upto": 0, "patience_s": 25.0, "sink": sinks[process.voter, name]}
            stage.world.checker.offered(process, name, Part(process.voter, 1.0, process.node.offers + 1))
            vector = torch.ones(8)
            act = partial(process.node.contribute, name, vector, grid, **how)
            stage.world.act(process, lambda now, act=act: act(now=now))
    told = [m.channel for _, _, _, m in stage.sent if isinstance(m, msg.Ready) and m.channel in calls]
    assert sorted(told) == sorted(calls), "by the one that does not coordinate"
    stage.until(lambda: all(sink.t for sink in sinks.values()), 120.0)
    assert looks[0] < 3 * n**2
