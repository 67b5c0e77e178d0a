"""Rounds as transcripts: real nodes on a virtual clock, a hand-made fault each, the invariants after every event."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch

from dlc.comm import agenda as agenda_module
from dlc.comm import messages as msg
from dlc.comm import slot
from dlc.comm.account import account
from dlc.comm.coordinator import RUN
from dlc.comm.entries import CONFIG, EMPTY, OPEN, ROUND, Entry, Part
from dlc.comm.events import DigestMismatch, RoundDone
from dlc.comm.exchange import Exchange
from dlc.comm.grid import Grid
from dlc.comm.ids import Ballot, Voter
from dlc.comm.ledger import Ledger
from dlc.comm.log import Log, grid_of
from dlc.comm.node import Node
from dlc.comm.offered import Traffic
from dlc.errors import ProtocolError, UsageError
from dlc.report import Missing
from dlc.sim.invariants import Violation
from dlc.sim.schedule import TRAIN
from dlc.sim.toy import ToyState
from dlc.sim.world import Process
from tests.comm.stage import Stage, past_round

torch.set_num_threads(1)

# ------------------------------------------------------------------ deaths


def test_the_coordinator_dies_after_its_plan_and_the_round_commits_all_the_same() -> None:
    stage = Stage(3)
    coordinator, plan = stage.planned()
    stage.until(lambda: all(p.node.slot.plan is not None for p in stage.world.running()))
    stage.world.crash(coordinator)
    reports = stage.committed(plan.entry.t, stage.peers())
    assert {r.ballots for r in reports.values()} == {2}
    for process in stage.peers():
        roster = past_round(process.node, plan.entry.t).entry.roster
        assert {p.voter for p in roster} <= {p.voter for p in plan.entry.roster}


def test_a_plan_tells_the_norms_and_the_one_after_its_coordinators_death_tells_the_same() -> None:
    """Contributions are clipped by them; all told here are equal, so that nothing is, and the checker agrees."""
    stage = Stage(3)
    for process in stage.peers():
        process.node.contribute = partial(process.node.contribute, norm=2.5)  # type: ignore[method-assign]
    coordinator, plan = stage.planned()
    while not plan.norms:  # those offered before are not to be clipped
        stage.committed(plan.entry.t, stage.peers())
        coordinator, plan = stage.planned()
    assert plan.norms == (2.5,) * len(plan.entry.roster)
    stage.until(lambda: all(p.node.slot.plan is not None for p in stage.world.running()))
    stage.world.crash(coordinator)
    stage.committed(plan.entry.t, stage.peers())
    later = [
        m for _, _, _, m in stage.sent if isinstance(m, msg.Plan) and m.head == plan.head and m.ballot > plan.ballot
    ]
    assert later and all(m.norms == plan.norms and len(m.norms) == len(m.entry.roster) for m in later)


def test_an_owner_dies_with_one_chunk_at_one_peer_and_that_chunk_is_kept() -> None:
    """Chunk c of the dead owner reached P alone: it is kept; its other chunk is reduced anew by somebody else."""
    stage = Stage(3, n_chunks=6)
    coordinator, plan = stage.planned()
    owner, witness = stage.peers(coordinator)
    owned = [c for c, o in enumerate(plan.assignment) if plan.owners[o] == owner.voter]
    kept, lost = owned
    name = owner.host.name

    def only_one_chunk_to_one_peer(source: str, target: str, m: Any) -> bool:
        if source != name or not isinstance(m, msg.Result) or m.header.head != plan.head:
            return False
        return target != witness.host.name or m.header.chunk != kept

    stage.hold = only_one_chunk_to_one_peer
    stage.until(lambda: kept in witness.node.exchange.held and len(coordinator.node.exchange.held) == 4)
    stage.world.crash(owner)
    reports = stage.committed(plan.entry.t, stage.peers())
    results = past_round(witness.node, plan.entry.t).results
    assert (results[kept].header.ballot, results[kept].header.owner) == (plan.ballot, owner.voter)
    assert results[lost].header.ballot > plan.ballot and results[lost].header.owner != owner.voter
    assert all(r.header.ballot == plan.ballot for c, r in enumerate(results) if c != lost)
    for report in reports.values():
        assert report.ballots == 2
        dead = next(s for s in report.contributors if s.peer == name)
        assert dead.fraction < 1.0  # its part of the lost chunk died with it
        assert [(m.peer, m.reason) for m in report.missing] == [(name, "dead")]


def test_a_leave_crosses_the_plan() -> None:
    stage = Stage(3)
    coordinator, plan = stage.planned()
    leaver = stage.peers(coordinator)[0]
    assert leaver.node.slot.plan is None  # the plan is on its way
    stage.world.leave(leaver)
    reports = stage.committed(plan.entry.t, stage.peers(), limit_s=6.0)
    for report in reports.values():
        assert [(m.peer, m.reason) for m in report.missing] == [(leaver.host.name, "left")]
    assert stage.peers()[0].node.log.state.electorate == tuple(sorted(p.voter for p in stage.peers()))


# ------------------------------------------------------------------ lost, late, repeated


def test_a_late_ready_does_not_enlarge_the_roster_and_is_not_lost() -> None:
    stage = Stage(3)
    late = stage.peers(next(p for p in stage.peers() if p.voter == p.node.log.state.rank0))[0]
    stage.hold = lambda source, target, m: source == late.host.name and isinstance(m, msg.Ready)
    _, plan = stage.planned()
    assert late.voter not in {p.voter for p in plan.entry.roster}
    blocks = list(late.trainer.blocks)
    stage.hold = lambda source, target, m: False
    stage.release()
    report = stage.committed(plan.entry.t, stage.peers())[late.host.name]
    assert [(m.peer, m.reason) for m in report.missing] == [(late.host.name, "not ready")]
    lease = late.node.lease()
    assert blocks and lease is not None and lease.take(len(blocks))[0] == blocks  # still to be counted
    later = stage.committed(plan.entry.t + 1, stage.peers())
    assert late.host.name in {s.peer for s in later[late.host.name].contributors}


def test_a_lost_commit_is_shown_again_to_the_one_who_lacks_it() -> None:
    stage = Stage(3)
    coordinator, plan = stage.planned()
    victim = stage.peers(coordinator)[0]
    lost = 0

    def first_commit(source: str, target: str, m: Any) -> bool:
        nonlocal lost
        if target != victim.host.name:
            return False
        hit = isinstance(m, msg.Commit) and lost == 0
        lost += hit
        return hit or isinstance(m, msg.Held)

    stage.hold = first_commit
    stage.committed(plan.entry.t, stage.peers(), limit_s=5.0)
    assert lost == 1 and victim.node.log.active


# ------------------------------------------------------------------ learned by the others' votes


def no_commits(source: str, target: str, m: Any) -> bool:
    return isinstance(m, msg.Commit)


def test_whoever_sees_all_votes_need_not_hear_of_the_commit() -> None:
    stage = Stage(3)
    coordinator, plan = stage.planned()
    stage.hold = no_commits
    reports = stage.committed(plan.entry.t, stage.peers(), limit_s=5.0)
    assert len({p.node.log.head for p in stage.peers()}) == 1
    assert all(not report.missing for report in reports.values())
    for process in stage.peers():
        holders = set(process.node.applier.last_decision().holders)
        assert len(holders) >= 2 and holders <= {p.voter for p in stage.peers()}, (
            "who lacks what is on its way may be left"
        )
    assert coordinator.node.log.state.round_of(TRAIN) == plan.entry.t


def test_the_vote_that_decides_a_slot_is_none_of_the_next() -> None:
    """Its ballot and, where no round was decided, its manifest may be the same there."""
    stage = Stage(3)
    for _ in range(4):
        _, plan = stage.planned()
        stage.committed(plan.entry.t, stage.peers())
        stage.between_rounds()
        assert not any(p.node.slot.votes for p in stage.peers())


def test_no_member_decides_while_one_that_is_awake_has_not_voted(monkeypatch: pytest.MonkeyPatch) -> None:
    """If results for it still wait. Whom to wait for, and for how long, is the coordinator's affair."""
    stage = Stage(4)
    coordinator, plan = stage.planned()
    lacks = stage.peers(coordinator)[0]
    monkeypatch.setattr(Exchange, "owed", lambda self: (lacks.voter,))
    stage.hold = lambda s, t, m: no_commits(s, t, m) or (isinstance(m, msg.Held) and lacks.host.name in (s, t))
    others = stage.peers(lacks, coordinator)
    stage.until(lambda: all(len(p.node.slot.votes) == 2 for p in others))
    assert all(p.node.log.state.quorum({*p.node.slot.votes, p.voter}) for p in others)
    stage.world.run_until(stage.world.now + 1.0)
    assert {p.node.log.head for p in others} == {plan.head}
    stage.hold = lambda source, target, m: False
    stage.release()
    stage.committed(plan.entry.t, stage.peers(), limit_s=5.0)


def test_who_slept_decides_by_no_vote_that_was_sent_before() -> None:
    """Others may have gone on by force meanwhile, as after any sleep."""
    stage = Stage(3)
    coordinator, plan = stage.planned()
    sleeper = stage.peers(coordinator)[0]
    stage.hold = lambda s, t, m: t == sleeper.host.name and isinstance(m, msg.Held | msg.Commit)
    stage.until(lambda: sleeper.node.slot.accepted is not None)
    assert sleeper.node.log.head == plan.head
    stage.until(lambda: len([m for *_, m in stage.held if isinstance(m, msg.Held)]) == 2)
    stage.world.freeze(sleeper, 20.0)
    stage.until(lambda: sleeper.awake)
    assert sleeper.node.log.head == plan.head
    votes = [(s, m) for s, t, _, *_, m in stage.held if isinstance(m, msg.Held)]
    for source, vote in votes:
        voter = next(p.voter for p in stage.peers() if p.host.name == source)
        stage.world.act(sleeper, lambda now, m=vote, v=voter: sleeper.node.receive(v, m, now))
    assert len(sleeper.node.slot.votes) == 2 and sleeper.node.log.head == plan.head
    stage.hold = lambda source, target, m: False
    stage.all_in((sleeper,), 60.0)


def test_where_many_vote_only_the_coordinator_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot, "VOTES_TOLD_MAX", 2)
    stage = Stage(3)
    coordinator, plan = stage.planned()
    stage.committed(plan.entry.t, stage.peers())
    told = {t for _, _, t, m in stage.sent if isinstance(m, msg.Held) and m.head == plan.head}
    assert told <= {coordinator.host.name} and len(told) == 1


def test_mutation_a_member_that_decides_by_its_own_vote_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(self: slot.Slot) -> None:
        if self.accepted is not None and self.plan is not None and self.plan.ballot.voter != self.ctx.me:
            self._learned(self.accepted[1].entry, [self.ctx.me])

    monkeypatch.setattr(slot.Slot, "_learn", hasty)
    with pytest.raises(Violation, match="I1"):
        Stage(3).all_in()


def test_everything_twice_and_old_messages_once_more() -> None:
    stage = Stage(3)
    stage.copies = 2
    old: list[tuple[Any, ...]] = []
    kinds = (msg.Plan, msg.Held, msg.Promise, msg.Prepare, msg.Commit, msg.Contrib, msg.Result, msg.Ready, msg.Coord)
    record = stage._carry

    def remember(source: str, target: str, deliver: Any, *args: Any, bulk: bool = False) -> None:
        if isinstance(args[-1], kinds) and len(old) < 400:
            old.append((source, target, deliver, *args))
        record(source, target, deliver, *args, bulk=bulk)

    stage._carry = remember
    before = stage.rounds
    stage.until(lambda: stage.rounds >= before + 4)
    for entry in list(old):
        record(*entry)
    stage.until(lambda: stage.rounds >= before + 8)
    for report in [e.report for _, e in stage.told if isinstance(e, RoundDone)]:
        assert report.ballots == 1 and not report.missing


def test_results_that_do_not_arrive_are_fetched_from_another() -> None:
    stage = Stage(3)
    coordinator, plan = stage.planned()
    owner, victim = stage.peers(coordinator)

    def one_way(source: str, target: str, m: Any) -> bool:
        return (source, target) == (owner.host.name, victim.host.name) and isinstance(m, msg.Result)

    stage.hold = one_way
    reports = stage.committed(plan.entry.t, stage.peers())
    fetches = [(s, t) for _, s, t, m in stage.sent if isinstance(m, msg.Fetch)]
    assert (victim.host.name, coordinator.host.name) in fetches
    assert not reports[victim.host.name].missing and reports[victim.host.name].ballots == 1


# ------------------------------------------------------------------ freezes


def test_a_voter_that_was_frozen_does_not_vote_before_it_is_refreshed() -> None:
    stage = Stage(3)
    coordinator, _ = stage.planned()
    victim = stage.peers(coordinator)[0]
    stage.world.freeze(victim, victim.node.members.t_gap_s + 1.0)
    stage.until(lambda: victim.awake)
    stage.sent.clear()
    # Nobody's answer reaches it: it has news of the others' rounds in its inbox, and still says nothing that binds.
    stage.hold = lambda source, target, m: target == victim.host.name and isinstance(m, msg.Ack | msg.IndirectAck)
    stage.until(lambda: victim.node.ctx.stale)
    woke = stage.world.now
    stage.until(lambda: stage.world.now > woke + 0.8 * victim.node.members.t_refresh_s)
    assert victim.node.ctx.stale
    mine = [m for _, source, _, m in stage.sent if source == victim.host.name]
    assert any(isinstance(m, msg.Ping) for m in mine)
    assert not any(isinstance(m, msg.Held | msg.Promise | msg.Plan | msg.Prepare) for m in mine)
    stage.hold = lambda source, target, m: False
    stage.until(lambda: not victim.node.ctx.stale)
    stage.until(lambda: any(s == victim.host.name and isinstance(m, msg.Held) for _, s, _, m in stage.sent))


# ------------------------------------------------------------------ digests


def spoil(process: Process) -> None:
    """The state in memory is no longer what the log says."""
    attached = process.node.log.attached[TRAIN]
    attached.state.theta.add_(1.0)  # type: ignore[attr-defined]
    attached.digest = attached.state.digest()
    process.trainer.world.checker.corrupted(process)


def test_a_peer_with_another_digest_does_not_vote_is_told_and_repairs_itself() -> None:
    stage = Stage(3)
    coordinator, plan = stage.planned()
    victim = stage.peers(coordinator)[0]
    assert victim.node.slot.plan is None
    spoil(victim)
    stage.hold = lambda source, target, m: isinstance(m, msg.Piece)  # not repaired before the round is over
    stage.committed(plan.entry.t, stage.peers(victim))
    votes = [s for _, s, _, m in stage.sent if isinstance(m, msg.Held) and m.head == plan.head]
    assert victim.host.name not in votes and len(set(votes)) >= 1
    assert [type(e) for name, e in stage.told if name == victim.host.name].count(DigestMismatch) == 1
    stage.hold = lambda source, target, m: False
    stage.until(lambda: victim.node.log.attached[TRAIN].synced)
    stage.until(lambda: stage.rounds > 8)  # the checker compares digests at every head


def test_a_repair_that_takes_longer_than_a_round_is_brought_up_to_date() -> None:
    stage = Stage(3, inner_s=0.3)
    coordinator, plan = stage.planned()
    victim = stage.peers(coordinator)[0]
    spoil(victim)
    stage.hold = lambda source, target, m: isinstance(m, msg.Piece)
    stage.until(lambda: stage.held)
    asked_at = victim.node.log.head
    stage.until(lambda: victim.node.log.head != asked_at)  # it follows the rounds without a state of its own
    assert not victim.node.log.attached[TRAIN].synced
    requests = sum(isinstance(m, msg.SyncReq) for _, _, _, m in stage.sent)
    stage.hold = lambda source, target, m: False
    stage.release()
    stage.until(lambda: victim.node.log.attached[TRAIN].synced, limit_s=1.0)
    assert sum(isinstance(m, msg.SyncReq) for _, _, _, m in stage.sent) == requests  # the first image was of use
    state = victim.node.log.attached[TRAIN]
    assert state.digest == state.state.digest()


# ------------------------------------------------------------------ malformed


def malformed(node: Node, plan: msg.Plan, other: Voter) -> list[msg.Message]:
    head, state, entry = node.log.head, node.log.state, plan.entry
    high = Ballot(7, other)
    base = state.base(TRAIN)
    changed = dataclasses.replace

    def planned(**fields: Any) -> msg.Plan:
        return changed(plan, ballot=high, **fields)

    def promise(**fields: Any) -> msg.Promise:
        return changed(msg.Promise(head, node.coordinator.ballot, None, None, plan, (), (), ()), **fields)

    fixed = msg.FixedChunk(99, b"x" * 32, (other,))
    decree = msg.Decree(changed(entry, manifest=b"m" * 32), (b"x" * 32,))
    nobody = Part(Voter("nobody", 1), 1.0, 10**9)
    return [
        planned(assignment=(9, 9, 9)),
        planned(assignment=plan.assignment[:1]),
        planned(fixed=(fixed,)),
        planned(entry=changed(entry, codec="zip")),
        planned(norms=(1.0,) * (len(entry.roster) + 1)),
        planned(norms=(-1.0,) * len(entry.roster)),
        planned(entry=changed(entry, kind="odd"), assignment=()),
        planned(entry=changed(entry, depth=entry.depth + 3)),
        planned(entry=changed(entry, roster=(nobody,))),
        planned(entry=changed(entry, roster=entry.roster + entry.roster[:1])),
        promise(held=(msg.HeldChunk(0, plan.ballot, b"x" * 32, 5),)),
        promise(held=(msg.HeldChunk(77, plan.ballot, b"x" * 32, 0),), rosters=((),)),
        promise(accepted=decree, accepted_ballot=plan.ballot),
        promise(accepted=None, accepted_ballot=plan.ballot),
        msg.Prepare(head, Ballot(1 << 62, other), ()),
        msg.Nack(head, Ballot((1 << 64) - 1, other)),
        msg.Coord(head, Ballot(-3, other), RUN, ()),
        msg.Commit(changed(entry, kind="odd"), ()),
        msg.Commit(changed(entry, depth=entry.depth + 1), ()),
        msg.Fetch(head, plan.ballot, (-1, 1 << 40), (b"short",)),
        msg.Fetch(b"elsewhere", plan.ballot, (0,), (b"x" * 32,)),
        msg.PieceReq("no such channel", b"", (0,)),
        msg.PieceReq(TRAIN, node.log.attached[TRAIN].digest, (-1, 1 << 50)),
        msg.Contrib(TRAIN, base, -1, 1.0, 0, b""),
        msg.Contrib(TRAIN, base, 1 << 40, 1.0, 0, b"\0" * 32),
        msg.Contrib("no such channel", node.log.state.base("no such channel"), 0, 1.0, 0, b"\0"),
        msg.Contrib(TRAIN, b"old", 0, 1.0, 0, b"\0" * 32),
        msg.Result(msg.ChunkHeader(base, 1 << 40, head, plan.ballot, other, (), ()), b""),
        msg.Result(msg.ChunkHeader(base, 0, head, plan.ballot, other, (nobody,), ()), b"\0" * 32),
        msg.Steps(head, (msg.Step(changed(entry, manifest=b"m" * 32), (b"x" * 32,)),)),
        msg.NoPiece(TRAIN, b"x"),
        msg.Piece(TRAIN, b"x", -5, b"y"),
    ]


def test_malformed_messages_change_nothing_and_the_round_goes_on() -> None:
    stage = Stage(3)
    coordinator, plan = stage.planned()
    stage.until(lambda: all(p.node.slot.plan is not None for p in stage.world.running()))
    refused = 0
    for process in stage.world.running():
        other = stage.peers(process)[0].voter
        for bad in malformed(process.node, plan, other):
            try:
                process.node.receive(other, bad, stage.world.now)
            except ProtocolError:
                refused += 1
        assert process.node.exchange.dropped.total() >= 3
        assert process.node.slot.promised == plan.ballot
    assert refused >= 3 * 16
    reports = stage.committed(plan.entry.t, stage.peers(), limit_s=10.0)
    assert all(not r.missing and r.ballots == 1 for r in reports.values())


def test_a_contribution_of_the_wrong_size_is_reported_and_costs_only_itself() -> None:
    stage = Stage(3)
    coordinator, plan = stage.planned()
    liar = stage.peers(coordinator)[0]
    record = stage._carry

    def cut_short(source: str, target: str, deliver: Any, *args: Any, bulk: bool = False) -> None:
        m = args[-1]
        if source == liar.host.name and isinstance(m, msg.Contrib) and m.base == plan_base:
            args = (*args[:-1], dataclasses.replace(m, payload=m.payload[:-4]))
        record(source, target, deliver, *args, bulk=bulk)

    plan_base = coordinator.node.log.state.base(TRAIN)
    stage._carry = cut_short
    report = stage.committed(plan.entry.t, stage.peers())[coordinator.host.name]
    assert [m.peer for m in report.missing] == [liar.host.name]
    assert {s.peer for s in report.contributors if s.fraction == 1.0} == {
        p.host.name for p in stage.peers() if p is not liar
    }
    told = {name: e for name, e in stage.told if isinstance(e, RoundDone) and e.report.t == plan.entry.t}
    for process in stage.peers():
        whole = process is not liar
        included = tuple(whole or plan.owners[owner] == liar.voter for owner in plan.assignment)
        assert told[process.host.name].included == included, "each is told of its own chunks"


def without_leases(node: Node) -> None:
    """As if no channel of the run had any."""
    state = node.log.state
    channels = tuple(dataclasses.replace(channel, leased=False) for channel in state.channels)
    node.log.state = dataclasses.replace(state, channels=channels, ledger=Ledger())


@pytest.mark.parametrize(("lease_len", "proposed"), [(5, False), (0, True)])
def test_a_wish_for_a_second_channel_with_leases_is_not_proposed(lease_len: int, proposed: bool) -> None:
    """Both would take their samples from one ledger, whose length the second one would change."""
    node = Stage(2).peers()[0].node
    wish = msg.Ready(node.log.head, "other", EMPTY, msg.GridSpec(8, 8, "fp32"), 0.0, 0, bytes(32), 0.0, True, lease_len)
    for voter in node.log.state.electorate:
        node.coordinator.agenda.ready(voter, wish)
    draft = node.coordinator.agenda.due()
    assert (draft is not None and draft.entry.kind == OPEN) == proposed


@pytest.mark.parametrize("where", ["in the run", "here"])
def test_a_second_channel_with_leases_is_refused(where: str) -> None:
    stage = Stage(2)
    node, state, grid, now = stage.peers()[0].node, ToyState(8, 0), Grid(8, 8, "fp32"), stage.world.now
    if where == "here":
        without_leases(node)
    else:
        node.log.attached[TRAIN].lease_len = 0
    for _ in range(2):
        with pytest.raises(UsageError, match=f"'other' cannot lease samples: those of this run go to '{TRAIN}'"):
            node.attach("other", state, grid, 5, now)
    assert "other" not in node.log.attached and "other" not in node.slot.wishes
    node.attach("other", state, grid, 0, now)
    without_leases(node)
    node.log.attached[TRAIN].abandoned = True
    node.attach("third", state, grid, 5, now)
    node.attach("third", state, grid, 5, now)
    assert node.slot.wishes["third"].lease_len == 5


@pytest.mark.parametrize("lease_len", [5, -1])
def test_a_wish_with_a_lease_of_fewer_than_no_blocks_is_not_proposed(lease_len: int) -> None:
    """Nobody would take the plan, and its coordinator would propose it again and again."""
    stage = Stage(2)
    node = stage.peers()[0].node
    without_leases(node)
    wish = msg.Ready(node.log.head, "other", EMPTY, msg.GridSpec(8, 8, "fp32"), 0.0, 0, bytes(32), 0.0, True, lease_len)
    for voter in node.log.state.electorate:
        node.coordinator.agenda.ready(voter, wish)
    draft = node.coordinator.agenda.due()
    assert (draft is not None and draft.entry.kind == OPEN) == (lease_len > 0)


@pytest.mark.parametrize("kind", [CONFIG, OPEN])
def test_an_entry_of_another_slot_is_not_applied(kind: str) -> None:
    stage = Stage(2)
    node = stage.peers()[0].node
    entry = Entry(kind, b"elsewhere" * 3, 1, "", 0, (), (), (), 0, 0, "", b"", b"", 0)
    head = node.log.head
    node.receive(stage.peers()[1].voter, msg.Commit(entry, ()), stage.world.now)
    assert node.log.head == head


@pytest.mark.parametrize("coordinates", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_an_owner_whose_results_get_nowhere_costs_one_stall_and_no_round(coordinates: bool, seed: int) -> None:
    """It answers pings, so it is alive; its bulk does not get out (a closed port, a broken route)."""
    stage = Stage(4, seed=seed)
    coordinator, plan = stage.planned()
    name = coordinator.host.name if coordinates else stage.peers(coordinator)[0].host.name
    stage.hold = lambda source, target, message: source == name and isinstance(message, msg.Result)
    t = plan.entry.t
    others = [p for p in stage.peers() if p.host.name != name]
    stage.committed(t, others, limit_s=20.0)
    began = stage.world.now
    reports = stage.committed(t + 4, others, limit_s=120.0)
    assert all(len(report.contributors) >= 3 for report in reports.values())
    assert len({p.node.log.digest(TRAIN) for p in others if p.node.log.state.round_of(TRAIN) == t + 4}) <= 1
    assert stage.world.now - began < 12.0, "the next rounds do not pay the price again, whoever coordinates them"


def test_a_peer_whose_bulk_does_not_get_out_at_all_is_named_and_the_others_go_on() -> None:
    stage = Stage(4)
    _, plan = stage.planned()
    name = stage.peers()[0].host.name
    stage.hold = lambda source, target, message: source == name and isinstance(message, msg.Bulk)
    others = [p for p in stage.peers() if p.host.name != name]
    reports = stage.committed(plan.entry.t + 3, others, limit_s=120.0)
    for report in reports.values():
        assert name in {missing.peer for missing in report.missing}
        assert {share.peer for share in report.contributors} == {p.host.name for p in others}


def test_an_owner_that_nothing_reaches_spoils_one_round_and_owns_nothing_in_the_next() -> None:
    """Its bulk port is closed: what it sends gets out, what others send does not get in."""
    stage = Stage(4)
    _, plan = stage.planned()
    deaf = stage.peers()[0]
    stage.hold = lambda source, target, message: target == deaf.host.name and isinstance(message, msg.Contrib)
    others = stage.peers(deaf)
    first = stage.committed(plan.entry.t, others, limit_s=60.0)
    if any(plan.owners[owner] == deaf.node.me for owner in plan.assignment):
        assert all(missing.reason == "late" for report in first.values() for missing in report.missing)
    later = stage.committed(plan.entry.t + 3, others, limit_s=60.0)
    assert all(report.complete and len(report.contributors) == 4 for report in later.values())


def test_who_learns_by_a_commit_what_it_did_not_vote_for_knows_that_the_others_lived_then() -> None:
    """It would go on by force at once, if it had not seen them for long: they went on without it, and live."""
    stage = Stage(5, inner_s=10.0)  # no round comes between
    ranked = stage.peers()[0].node.log.state.ranked
    unasked, leaver = (next(p for p in stage.peers() if p.voter == voter) for voter in ranked[-2:])

    def keeps_config_from_it(source: str, target: str, m: Any) -> bool:
        return target == unasked.host.name and isinstance(m, msg.Plan) and m.entry.kind == CONFIG

    stage.hold = keeps_config_from_it
    stage.world.leave(leaver)
    stage.until(lambda: leaver.voter not in unasked.node.log.state.electorate)
    assert stage.held and unasked.node.log.learned_run == unasked.node.ctx.running_s


def offer_of(process: Process, stage: Stage) -> msg.Ready:
    node = process.node
    stage.until(lambda: TRAIN in node.exchange.offered)
    ready, digest = node.exchange.offered[TRAIN].ready, node.log.digest(TRAIN)
    return dataclasses.replace(ready, head=node.log.head, digest=digest, offered_s=100.0)


def test_a_coordinator_listens_for_others_states_however_old_the_offers_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot had just begun, and nobody could have told its state yet: one with a wrong state went on with that."""
    stage = Stage(3, inner_s=3.0)
    process = stage.peers()[0]
    agenda, members = process.node.coordinator.agenda, process.node.members
    offer = offer_of(process, stage)
    monkeypatch.setattr(agenda_module, "told_digest", lambda record, head, channel: None)
    agenda.enter()
    agenda.ready(process.voter, offer)
    draft = agenda.due()
    assert draft is None or draft.entry.kind != ROUND
    offers = {process.voter: (offer, agenda.ctx.now - 100.0)}
    assert agenda._digest(TRAIN, offer.digest, offers) is None
    agenda.ctx.now += 3.1 * members.t_dead_s  # asleep
    assert agenda._digest(TRAIN, offer.digest, offers) is None
    agenda.ctx.running_s += 3.1 * members.t_dead_s
    assert agenda._digest(TRAIN, offer.digest, offers) == offer.digest


def test_newcomers_are_heard_before_a_voter_is_convicted_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """One wrong voter and one right one after a forced ballot; who had decided it with them had told nothing yet."""
    stage = Stage(3, inner_s=3.0)
    process, wrong, newcomer = stage.peers()
    node, agenda = process.node, process.node.coordinator.agenda
    offer = offer_of(process, stage)
    node.log.state = dataclasses.replace(node.log.state, electorate=(process.voter, wrong.voter))
    told = {wrong.voter: bytes(32)}  # wins a tie
    monkeypatch.setattr(agenda_module, "told_digest", lambda record, head, channel: told.get(record.voter))
    offers = {process.voter: (offer, agenda.ctx.now)}
    agenda.enter()
    assert agenda._digest(TRAIN, offer.digest, offers) is None
    told[newcomer.voter] = offer.digest
    assert agenda._digest(TRAIN, offer.digest, offers) == offer.digest


def test_a_voter_out_of_reach_may_break_a_tie_as_long_as_it_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong state, with the lower digest, and a right one; the third voter has been silent for a little more than
    T_dead."""
    stage = Stage(3, inner_s=3.0)
    process, wrong, silent = stage.peers()
    agenda, members = process.node.coordinator.agenda, process.node.members
    offer = offer_of(process, stage)
    told = {wrong.voter: bytes(32)}
    monkeypatch.setattr(agenda_module, "told_digest", lambda record, head, channel: told.get(record.voter))
    alive = members.alive
    monkeypatch.setattr(members, "alive", lambda voter: voter != silent.voter and alive(voter))
    offers = {process.voter: (offer, agenda.ctx.now)}
    agenda.enter()
    assert agenda._digest(TRAIN, offer.digest, offers) is None
    log = process.node.log
    log.state = dataclasses.replace(log.state, electorate=(process.voter, wrong.voter))
    assert agenda._digest(TRAIN, offer.digest, offers) in (bytes(32), offer.digest), "it is no voter any more"


def test_an_observer_with_another_state_has_the_silent_voters_heard_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator, cut off with it, held the wrong one, and planned when the others had ceased to be alive."""
    stage = Stage(4, inner_s=3.0)
    process, *silent, observer = stage.peers()
    agenda, log, members = process.node.coordinator.agenda, process.node.log, process.node.members
    offer = offer_of(process, stage)
    log.state = dataclasses.replace(log.state, electorate=tuple(p.voter for p in (process, *silent)))
    told: dict[Voter, bytes] = {observer.voter: bytes(32)}
    monkeypatch.setattr(agenda_module, "told_digest", lambda record, head, channel: told.get(record.voter))
    monkeypatch.setattr(agenda_module, "can_vote", lambda record: record.voter != observer.voter)
    monkeypatch.setattr(members, "alive", lambda voter: voter in (process.voter, observer.voter))
    offers = {process.voter: (offer, agenda.ctx.now)}
    agenda.enter()
    agenda.ctx.running_s += 3.1 * members.t_dead_s
    assert agenda._digest(TRAIN, offer.digest, offers) is None
    told[observer.voter] = offer.digest
    assert agenda._digest(TRAIN, offer.digest, offers) == offer.digest


def test_that_my_forced_ballot_decided_is_no_news_of_others_and_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is behind by that entry is answered with it, and with who decided it: its COMMIT may be lost, or later."""
    stage = Stage(3, inner_s=3.0)
    process, coordinator, behind = stage.peers()
    node, slot, head = process.node, process.node.slot, process.node.log.head
    deciders = (process.voter, coordinator.voter)
    entry = node.coordinator.agenda._entry(CONFIG, "", 0, (), msg.GridSpec(0, 0, ""), b"", 0)
    entry = dataclasses.replace(entry, electorate=deciders, trainers=deciders)
    ballot = Ballot(1, coordinator.voter)
    slot.plan = msg.Plan(head, ballot, deciders, entry, b"", (), (), (), ())
    slot.accepted = (ballot, msg.Decree(entry, ()))
    monkeypatch.setattr(node.log, "commit", partial(Log.commit, node.log))  # unseen by those who check what is decided
    before = node.log.learned_run = -1.0
    sent: list[Any] = []
    monkeypatch.setattr(node.ctx, "send", lambda to, m: sent.append((to, m)))
    node.applier.receive_commit(coordinator.voter, msg.Commit(entry, deciders))
    assert node.log.head == entry.hash and node.log.learned_run == before
    node.inbox._slot_message(behind.voter, msg.Nack(head, ballot))
    assert sent[-1] == (behind.voter, msg.Commit(entry, deciders))


def test_a_plan_of_an_outdated_ballot_convicts_nobody() -> None:
    """Its coordinator slept; the others have promised another one a higher ballot."""
    stage = Stage(3, inner_s=3.0)
    slow, plan = stage.planned()
    process, other = (p for p in stage.peers() if p is not slow)
    node, slot = process.node, process.node.slot
    assert node.log.head == plan.head and node.log.attached[plan.entry.channel].synced
    slot.plan, slot.promised = None, Ballot(5, other.voter)
    node.inbox._slot_message(slow.voter, dataclasses.replace(plan, digest=bytes(32)))
    assert slot.plan is None and node.log.attached[plan.entry.channel].synced


def test_who_is_being_repaired_says_nothing_of_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its READY, with the digest it has now, none, won a tie, or made others wait for a minute."""
    stage = Stage(3, inner_s=3.0)
    process, repaired, _ = stage.peers()
    log, agenda = process.node.log, process.node.coordinator.agenda
    offer = offer_of(process, stage)
    log.state = dataclasses.replace(log.state, electorate=(process.voter, repaired.voter))
    monkeypatch.setattr(agenda_module, "told_digest", lambda record, head, channel: None)
    agenda.enter()
    agenda.ctx.running_s += 3.1 * process.node.members.t_dead_s
    offers = {process.voter: (offer, agenda.ctx.now), repaired.voter: (dataclasses.replace(offer, digest=b""), 0.0)}
    assert agenda._digest(TRAIN, offer.digest, offers) == offer.digest


def test_what_a_coordinator_listened_for_counts_for_that_round_only() -> None:
    stage = Stage(3, inner_s=3.0)
    process = stage.peers()[0]
    agenda = process.node.coordinator.agenda
    stage.until(lambda: TRAIN in process.node.exchange.offered)
    agenda._listened_s(TRAIN)
    agenda.ctx.running_s += 5.0
    assert agenda._listened_s(TRAIN) >= 5.0
    agenda.enter()
    assert agenda._listened_s(TRAIN) >= 5.0, "slots of other channels may be short"
    agenda.applied(TRAIN)
    agenda.enter()
    assert agenda._listened_s(TRAIN) == 0.0


def test_who_is_not_in_a_chunk_of_an_earlier_ballot_is_missing_there() -> None:
    """When that was reduced the roster was smaller, so its header names nobody as excluded."""
    _, plan = Stage(3, inner_s=3.0).planned()
    grid, (first, second, *others) = grid_of(plan.entry), plan.entry.roster
    everybody = (first, second, *others)
    results = []
    for chunk in range(grid.n_chunks):
        included = everybody if chunk else (first, *others)
        header = msg.ChunkHeader(b"", chunk, plan.head, plan.ballot, first.voter, included, ())
        results.append(msg.Result(header, b""))
    report = account(plan.entry, results, {}, None, Traffic(), 0.0, 0.0, {})
    lost = grid.elems(0) / grid.numel
    assert report.missing == (Missing(second.voter.peer, "not ready", lost),) and not report.complete
    shares = {share.peer: share.fraction for share in report.contributors}
    assert shares == {p.voter.peer: 1.0 - lost if p is second else 1.0 for p in everybody}
