"""What a member promises and votes for, message by message, and what it refuses."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dlc.comm import messages as msg
from dlc.comm import slot as slot_module
from dlc.comm.effects import Pace, Send
from dlc.comm.entries import EMPTY, OPEN
from dlc.comm.exchange import result_hash
from dlc.comm.grid import Grid
from dlc.comm.ids import LOWEST, Ballot, Voter
from dlc.comm.roles import HELPER
from dlc.comm.slot import Slot
from dlc.sim.schedule import TRAIN
from dlc.sim.toy import ToyState
from dlc.sim.world import Process
from tests.comm.stage import Stage

torch.set_num_threads(1)

WRONG = bytes(32)


class Member:
    """One of four, in a slot that another coordinates; `others`: the voters beside it and the coordinator."""

    def __init__(self, stage: Stage, process: Process, coordinator: Voter) -> None:
        self.stage, self.process, self.coordinator = stage, process, coordinator
        self.node, self.slot, self.log = process.node, process.node.slot, process.node.log
        self.me, self.head, self.ctx = process.voter, process.node.log.head, process.node.ctx
        self.others = [v for v in self.log.state.electorate if v not in (self.me, coordinator)]

    def sent(self, act: Callable[..., object], *args: Any) -> list[tuple[str, Any]]:
        """What this makes it send."""
        self.ctx.out.clear()
        act(*args)
        sent = [(effect.to, effect.message) for effect in self.ctx.out if isinstance(effect, Send)]
        self.ctx.out.clear()
        return sent

    def kinds(self, act: Callable[..., object], *args: Any) -> list[type]:
        return [type(message) for _, message in self.sent(act, *args)]


def waiting() -> Member:
    """Nothing is planned yet."""
    stage = Stage(4, inner_s=3.0)
    rank0 = stage.peers()[0].node.log.state.rank0
    assert rank0 is not None
    return Member(stage, next(p for p in stage.peers() if p.voter != rank0), rank0)


def voted() -> Member:
    """It holds all of a round, and has voted; nobody's vote arrives."""
    stage = Stage(4, inner_s=3.0)
    stage.hold = lambda source, target, message: isinstance(message, msg.Held)
    coordinator, plan = stage.planned()
    process = stage.peers(coordinator)[0]
    stage.until(lambda: process.node.slot.accepted is not None)
    assert process.node.log.head == plan.head
    member = Member(stage, process, coordinator.voter)
    member.slot.votes.clear()
    return member


def about_to_vote() -> Member:
    """The same, a moment before the vote."""
    member = voted()
    member.slot.accepted, member.slot.accepted_results = None, ()
    return member


# ------------------------------------------------------------------ who may decide at all


def stale(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    member.ctx.stale = True


def replaced(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member.ctx.members, "gone", lambda voter: voter == member.me)


def without_a_seat(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    state = member.log.state
    member.log.state = dataclasses.replace(state, electorate=tuple(v for v in state.electorate if v != member.me))


Why = Callable[[Member, pytest.MonkeyPatch], None]
NO_RIGHT = pytest.mark.parametrize("why", [stale, replaced, without_a_seat])


@NO_RIGHT
def test_who_may_not_decide_promises_nothing(why: Why, monkeypatch: pytest.MonkeyPatch) -> None:
    member = waiting()
    promised = member.slot.promised
    why(member, monkeypatch)
    prepare = msg.Prepare(member.head, Ballot(3, member.coordinator), ())
    assert not member.sent(member.slot.receive_prepare, member.coordinator, prepare)
    assert member.slot.promised == promised


@NO_RIGHT
def test_who_may_not_decide_votes_for_nothing(why: Why, monkeypatch: pytest.MonkeyPatch) -> None:
    member = about_to_vote()
    why(member, monkeypatch)
    assert not member.sent(member.slot.advance) and member.slot.accepted is None


@NO_RIGHT
def test_who_may_not_decide_any_more_repeats_no_vote(why: Why, monkeypatch: pytest.MonkeyPatch) -> None:
    member = voted()
    coord = msg.Coord(member.head, member.slot.promised, msg.RUN, ())
    assert msg.Held in member.kinds(member.slot.receive_coord, member.coordinator, coord)
    why(member, monkeypatch)
    assert msg.Held not in member.kinds(member.slot.receive_coord, member.coordinator, coord)
    assert msg.Held not in member.kinds(member.slot.announce)


def test_a_forced_ballot_is_asked_about_at_each_promise_plan_and_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quorum lives, so it is not permitted; what was permitted once may be so no more."""
    member = about_to_vote()
    slot, plan, promised = member.slot, member.slot.plan, member.slot.promised
    assert plan is not None
    deciders = tuple(sorted((member.me, member.coordinator)))
    forced = dataclasses.replace(plan, ballot=Ballot(3, member.coordinator), deciders=deciders)
    prepare = msg.Prepare(member.head, forced.ballot, deciders)
    assert not member.sent(slot.receive_prepare, member.coordinator, prepare)
    assert not member.sent(slot.receive_plan, member.coordinator, forced)
    assert slot.promised == promised and slot.plan is plan
    slot.plan, slot.promised = forced, forced.ballot
    assert not member.sent(slot.advance) and slot.accepted is None
    with monkeypatch.context() as patched:
        patched.setattr(Slot, "may_decide", lambda slot, of: of == deciders)
        assert member.sent(slot.advance) == [(member.coordinator.peer, msg.Held(*_vote(member)))]
    assert msg.Held not in member.kinds(slot.announce)


def _vote(member: Member) -> tuple[bytes, Ballot, bytes, tuple[Voter, ...]]:
    assert member.slot.accepted is not None
    ballot, decree = member.slot.accepted
    return member.head, ballot, decree.entry.manifest, ()


# ------------------------------------------------------------------ promises


def test_promises_go_upwards_and_only_to_the_ballots_own_voter() -> None:
    member = waiting()
    slot, (one, other) = member.slot, member.others
    ballot = Ballot(3, one)
    member.ctx.running_s += 1.0
    for _ in range(2):  # it may be lost
        ((to, promise),) = member.sent(slot.receive_prepare, one, msg.Prepare(member.head, ballot, ()))
        assert to == one.peer and isinstance(promise, msg.Promise) and promise.ballot == ballot
    assert slot.promised == slot.seen == ballot and slot.coordinator_heard == member.ctx.running_s
    lower = msg.Prepare(member.head, Ballot(2, other), ())
    assert member.sent(slot.receive_prepare, other, lower) == [(other.peer, msg.Nack(member.head, ballot))]
    in_its_name = msg.Prepare(member.head, Ballot(9, one), ())
    assert not member.sent(slot.receive_prepare, other, in_its_name)
    assert slot.promised == slot.seen == ballot


def test_a_ballot_that_was_refused_is_one_that_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    member = waiting()
    monkeypatch.setattr(Slot, "may_decide", lambda slot, deciders: False)
    ballot = Ballot(3, member.others[0])
    member.slot.receive_prepare(ballot.voter, msg.Prepare(member.head, ballot, ()))
    assert member.slot.seen == ballot > member.slot.promised


def test_a_promise_tells_what_was_accepted_and_is_held_and_ready() -> None:
    member = voted()
    ballot = Ballot(3, member.others[0])
    ((_, promise),) = member.sent(member.slot.receive_prepare, ballot.voter, msg.Prepare(member.head, ballot, ()))
    assert (promise.accepted_ballot, promise.accepted) == member.slot.accepted
    assert promise.plan is member.slot.plan
    assert [held.hash for held in promise.held] == list(member.node.exchange.manifest())
    assert {promise.rosters[held.included] for held in promise.held} == {promise.plan.entry.roster}
    assert [ready.channel for ready in promise.ready] == [TRAIN]


def test_a_beat_of_a_higher_ballot_that_waits_is_followed_and_no_other() -> None:
    member = waiting()
    stage, slot, (one, other) = member.stage, member.slot, member.others
    stage.until(lambda: TRAIN in member.node.exchange.offered)
    promised = slot.promised
    for phase in (msg.PREP, msg.RUN):  # its PREPARE or PLAN comes yet, and asks more of me
        slot.receive_coord(one, msg.Coord(member.head, Ballot(3, one), phase, ()))
        assert slot.promised == promised and slot.seen == Ballot(3, one)
    assert not member.sent(slot.receive_coord, other, msg.Coord(member.head, Ballot(4, one), msg.WAIT, ()))
    assert slot.promised == promised
    sent = member.sent(slot.receive_coord, one, msg.Coord(member.head, Ballot(3, one), msg.WAIT, ()))
    assert slot.promised == Ballot(3, one)
    assert [(to, type(m)) for to, m in sent] == [(one.peer, msg.Ready)]
    lower = msg.Coord(member.head, Ballot(2, other), msg.WAIT, ())
    member.ctx.running_s += 1.0
    assert member.sent(slot.receive_coord, other, lower) == [(other.peer, msg.Nack(member.head, Ballot(3, one)))]
    assert slot.coordinator_heard < member.ctx.running_s, "an old coordinator is none"


def test_what_was_promised_before_a_sleep_is_voted_for_no_more() -> None:
    """Others may have gone on by force meanwhile. Its coordinator is told so, and may ask once more with all it has."""
    member = about_to_vote()
    slot, before = member.slot, member.slot.promised
    after = Ballot(before.counter + 1, before.voter)
    slot.wake()
    assert slot.promised == slot.seen == after
    assert not member.sent(slot.advance) and slot.accepted is None
    beat = msg.Coord(member.head, before, msg.RUN, ())
    nack = (member.coordinator.peer, msg.Nack(member.head, after))
    assert member.sent(slot.receive_coord, member.coordinator, beat) == [nack]
    ((_, promise),) = member.sent(slot.receive_prepare, after.voter, msg.Prepare(member.head, after, ()))
    assert promise.ballot == after and promise.plan is slot.plan
    slot.seen = Ballot(9, member.others[0])
    slot.wake()
    assert slot.seen == Ballot(9, member.others[0]), "what it had heard of is above that"
    slot.promised = LOWEST
    slot.wake()
    assert slot.promised == LOWEST, "it had promised nothing"


def test_only_who_was_away_for_longer_than_T_gap_has_slept() -> None:
    member = waiting()
    node, slot, promised = member.process.node, member.slot, member.slot.promised
    node.tick(member.ctx.now + member.ctx.members.t_gap_s)
    assert slot.promised == promised and not member.ctx.stale
    node.tick(member.ctx.now + member.ctx.members.t_gap_s + 0.1)
    assert slot.promised == Ballot(promised.counter + 1, promised.voter) and member.ctx.stale


def test_a_promise_names_no_more_rosters_than_fit_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that it leaves out are reduced again; the first ones of one roster all have room."""
    member = voted()
    roster, last = member.slot.plan.entry.roster, max(member.node.exchange.held)  # type: ignore[union-attr]
    result = member.node.exchange.held[last]
    header = dataclasses.replace(result.header, included=roster[1:])
    member.node.exchange.held[last] = dataclasses.replace(result, header=header)
    monkeypatch.setattr(slot_module, "ROSTER_PARTS_MAX", 2 * len(roster) - 1)
    held, rosters = member.slot._held_chunks()
    assert len(held) == last + 1 and rosters == (roster, roster[1:])
    monkeypatch.setattr(slot_module, "ROSTER_PARTS_MAX", 2 * len(roster) - 2)
    held, rosters = member.slot._held_chunks()
    assert [chunk.chunk for chunk in held] == list(range(last)) and rosters == (roster,)


def test_a_new_slot_knows_nothing_of_the_last() -> None:
    member = voted()
    slot, ctx = member.slot, member.ctx
    slot.votes, slot.blocked_on_digest, slot._last_ready = {member.others[0]: (slot.promised, WRONG)}, True, ctx.now
    slot.promised = slot.seen = Ballot(9, member.others[0])
    slot.beat = msg.Coord(member.head, slot.promised, msg.RUN, (member.me,))
    slot._lacked = (WRONG, ctx.running_s - 2 * ctx.members.t_evict_s)
    assert slot._waited_in_vain(WRONG)
    paced = member.stage.peers()[0].voter.peer
    slot.pacing._paced = {paced}
    ctx.running_s += 5.0
    ctx.out.clear()
    slot.enter()
    assert Pace(paced, None) in ctx.out, "nothing of this size is to come"
    assert slot.beat is None, "whom its coordinator waited for, nobody waits for now"
    assert not slot._waited_in_vain(WRONG), "the wait for a first state begins with its slot"
    rank0 = member.log.state.rank0
    assert rank0 is not None and slot.promised == slot.seen == Ballot(0, rank0)
    assert slot.accepted is None and not slot.accepted_results and slot.plan is None and not slot.votes
    assert not slot.blocked_on_digest and slot.coordinator_heard == slot.entered == ctx.running_s
    assert slot.next_deadline() <= ctx.now, "what I offer is told at once"
    assert member.node.exchange.plan is None and not member.node.exchange.held


# ------------------------------------------------------------------ plans


def test_a_plan_is_taken_from_its_own_voter_and_upwards_only() -> None:
    member = voted()
    slot, plan, (one, other) = member.slot, member.slot.plan, member.others
    assert plan is not None
    slot.promised = Ballot(3, one)
    for sender, ballot in ((other, Ballot(2, other)), (other, Ballot(4, one))):
        assert not member.sent(slot.receive_plan, sender, dataclasses.replace(plan, ballot=ballot))
        assert slot.plan is plan and slot.promised == Ballot(3, one)
    higher = dataclasses.replace(plan, ballot=Ballot(4, one))
    member.ctx.running_s += 1.0
    slot.receive_plan(one, higher)
    assert slot.coordinator_heard == member.ctx.running_s
    assert slot.plan is higher and slot.promised == slot.seen == Ballot(4, one)


def test_a_repeated_plan_is_answered_and_begins_nothing_anew() -> None:
    member = voted()
    held = dict(member.node.exchange.held)
    sent = member.sent(member.slot.receive_plan, member.coordinator, member.slot.plan)
    assert sent[-1] == (member.coordinator.peer, msg.Held(*_vote(member)))
    assert isinstance(sent[0][1], msg.Progress) and sent[0][1].held == len(held) == len(member.node.exchange.held)


def again(member: Member, counter: int = 3) -> msg.Plan:
    """What was accepted, as the plan of a higher ballot."""
    plan, slot = member.slot.plan, member.slot
    assert plan is not None and slot.accepted is not None
    fixed = tuple(msg.FixedChunk(c, digest, tuple(member.others)) for c, digest in enumerate(slot.accepted[1].hashes))
    ballot = Ballot(counter, member.others[0])
    return dataclasses.replace(plan, ballot=ballot, assignment=(-1,) * len(fixed), fixed=fixed)


def test_what_was_accepted_is_voted_for_again_though_another_plan_came_between() -> None:
    """The bytes that I voted for are kept until the head moves: a later ballot may need them."""
    member = voted()
    slot, exchange = member.slot, member.node.exchange
    plan, first = again(member), slot.accepted
    assert first is not None
    exchange.held, exchange.hashes = {}, {}
    slot.receive_plan(plan.ballot.voter, plan)
    assert slot.accepted == (plan.ballot, first[1])


def tells(member: Member, voter: Voter, digest: bytes) -> None:
    """That voter's record, here: it stands where the member does, with such a state of the training."""
    of = member.node.members._table.members[voter.peer]
    states = (msg.StateDigest(TRAIN, digest),)
    of.record = dataclasses.replace(of.record, head=member.head, states=states, seq=of.record.seq + 1)
    member.node.members._table._listed = None


@pytest.mark.parametrize("told", [False, True])
def test_a_plan_of_a_state_that_nobody_says_to_hold_is_not_taken(told: bool) -> None:
    member = voted()
    slot, before = member.slot, member.slot.plan
    plan = dataclasses.replace(again(member, 3), digest=WRONG)
    if told:
        tells(member, member.others[1], WRONG)
    slot.receive_plan(member.others[0], plan)
    assert slot.plan == (plan if told else before) and slot.blocked_on_digest == told


def test_no_state_is_given_up_for_one_that_only_the_dead_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody could give it. Its coordinator finds out what those who live hold, and plans anew."""
    member = voted()
    slot, before, dead = member.slot, member.slot.plan, member.others[1]
    tells(member, dead, WRONG)
    alive = member.ctx.members.alive
    monkeypatch.setattr(member.ctx.members, "alive", lambda voter: voter != dead and alive(voter))
    slot.receive_plan(member.others[0], dataclasses.replace(again(member), digest=WRONG))
    assert slot.plan == before and not slot.blocked_on_digest


def test_who_holds_a_wrong_state_of_one_channel_votes_for_the_opening_of_another() -> None:
    stage = Stage(4, inner_s=3.0)
    stage.hold = lambda source, target, message: isinstance(message, msg.Result)
    coordinator, plan = stage.planned()
    process = stage.peers(coordinator)[0]
    stage.until(lambda: process.node.slot.plan is not None)
    member = Member(stage, process, coordinator.voter)
    slot, log, ballot = member.slot, member.log, Ballot(4, member.others[0])
    tells(member, member.others[0], WRONG)
    slot.receive_plan(ballot.voter, dataclasses.replace(plan, ballot=Ballot(3, ballot.voter), digest=WRONG))
    assert slot.blocked_on_digest
    log.attached[TRAIN].synced = False
    digest = log.attach("new", ToyState(8, 0), Grid(8, 8, "fp32"), 0).digest
    grid = msg.GridSpec(8, 8, "fp32")
    entry = member.node.coordinator.agenda._entry(OPEN, "new", 0, (), grid, digest, 0)
    slot.receive_plan(ballot.voter, msg.Plan(plan.head, ballot, (), entry, digest, (), (), (), ()))
    assert slot.accepted is not None and slot.accepted[0] == ballot


def test_who_was_found_to_hold_another_state_does_not_vote_before_it_is_repaired() -> None:
    """Not in a later ballot either; while its state is on its way it has none to compare."""
    member = voted()
    slot, log = member.slot, member.log
    right = log.digest(TRAIN)
    tells(member, member.others[0], WRONG)
    for counter, digest in ((3, WRONG), (4, right)):
        slot.receive_plan(member.others[0], dataclasses.replace(again(member, counter), digest=digest))
        assert slot.blocked_on_digest and slot.accepted is not None and slot.accepted[0].counter < 3
        log.attached[TRAIN].synced = False
    log.attached[TRAIN].synced = True
    slot.advance()
    assert not slot.blocked_on_digest and slot.accepted[0].counter == 4


def test_who_has_no_state_to_compare_votes() -> None:
    """An observer that came by a vote, or who fetches what it lacks: it holds the bytes all the same."""
    member = voted()
    plan = again(member)
    member.log.attached[TRAIN].synced = False
    member.slot.receive_plan(plan.ballot.voter, plan)
    assert member.slot.accepted is not None and member.slot.accepted[0] == plan.ballot


def test_a_fixed_chunk_is_asked_for_unless_its_owner_is_about_to_send_it(monkeypatch: pytest.MonkeyPatch) -> None:
    member = about_to_vote()
    slot, exchange, before = member.slot, member.node.exchange, member.slot.plan
    assert before is not None
    hashes = exchange.manifest()
    fixed = tuple(msg.FixedChunk(c, digest, (member.others[0],)) for c, digest in enumerate(hashes))
    plan = dataclasses.replace(before, ballot=Ballot(3, member.others[0]), assignment=(-1,) * len(fixed), fixed=fixed)
    dead = before.owners[before.assignment[0]]
    alive = member.ctx.members.alive
    monkeypatch.setattr(member.ctx.members, "alive", lambda voter: voter != dead and alive(voter))
    exchange.held, exchange.hashes = {}, {}
    sent = [m for _, m in member.sent(slot.receive_plan, plan.ballot.voter, plan) if isinstance(m, msg.Fetch)]
    assert {chunk for m in sent for chunk in m.chunks} == {
        c for c, owner in enumerate(before.assignment) if before.owners[owner] == dead
    }
    higher = dataclasses.replace(plan, ballot=Ballot(4, member.others[0]))
    exchange.held, exchange.hashes = {}, {}
    sent = [m for _, m in member.sent(slot.receive_plan, higher.ballot.voter, higher) if isinstance(m, msg.Fetch)]
    assert {chunk for m in sent for chunk in m.chunks} == set(range(len(fixed))), "what was fixed had no owner either"


# ------------------------------------------------------------------ the vote


def lacks_a_chunk(member: Member) -> None:
    member.node.exchange.held.popitem()


def has_promised_a_higher_ballot(member: Member) -> None:
    member.slot.promised = Ballot(3, member.others[0])


def lacks_the_state(member: Member) -> None:
    member.slot.blocked_on_digest = True
    member.log.attached[TRAIN].digest = WRONG


@pytest.mark.parametrize("why", [lacks_a_chunk, has_promised_a_higher_ballot, lacks_the_state])
def test_no_vote(why: Callable[[Member], None]) -> None:
    member = about_to_vote()
    why(member)
    assert not member.sent(member.slot.advance) and member.slot.accepted is None


def test_a_vote_goes_once_to_the_coordinator_and_to_the_other_voters() -> None:
    member = about_to_vote()
    sent = member.sent(member.slot.advance)
    assert sent == [(v.peer, msg.Held(*_vote(member))) for v in (member.coordinator, *member.others)]
    assert member.slot.accepted_results == member.node.exchange.results()
    assert not member.sent(member.slot.advance)


def test_an_old_vote_is_not_repeated_after_a_promise() -> None:
    member = voted()
    slot = member.slot
    coord = msg.Coord(member.head, slot.promised, msg.RUN, ())
    slot.promised = Ballot(3, member.others[0])
    slot.receive_coord(member.coordinator, coord)
    assert msg.Held not in member.kinds(slot.announce)
    slot.promised = Ballot(slot.plan.ballot.counter, slot.plan.ballot.voter)  # type: ignore[union-attr]
    assert msg.Held in member.kinds(slot.announce)


def test_who_votes_for_an_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who holds the first state, and who would hold none of the later ones: a quorum has it then."""
    member = voted()
    slot, log, plan = member.slot, member.log, member.slot.plan
    assert plan is not None
    attached = log.attached[TRAIN]

    def allows(digest: bytes, channel: str = TRAIN) -> bool:
        entry = dataclasses.replace(plan.entry, kind=OPEN, channel=channel, digest=digest)
        return slot._state_allows(dataclasses.replace(plan, entry=entry))

    assert allows(attached.digest) and not allows(WRONG)
    attached.misfit = "another model"
    assert allows(WRONG)
    assert not allows(WRONG, "unattached"), "a trainer may attach it yet"
    record = dataclasses.replace(member.ctx.members.own, role=HELPER)
    monkeypatch.setattr(type(member.ctx.members), "own", property(lambda members: record))
    assert allows(WRONG, "unattached")
    slot.accepted = None
    monkeypatch.setattr(slot, "_state_allows", lambda of: False)
    assert not member.sent(slot.advance) and slot.accepted is None


def test_a_first_state_is_waited_for_as_long_as_there_is_hope_of_it() -> None:
    """Then the opening is voted for without it, but not in the slot's first ballot, which binds nobody yet."""
    member = voted()
    slot, ctx, plan = member.slot, member.ctx, member.slot.plan
    evict_s = ctx.members.t_evict_s
    assert plan is not None
    entry = dataclasses.replace(plan.entry, kind=OPEN, digest=WRONG)
    first = dataclasses.replace(plan, entry=entry, ballot=Ballot(0, member.coordinator))
    second = dataclasses.replace(first, ballot=Ballot(1, member.coordinator))
    for on_its_way, allowed in ((False, False), (True, False), (False, True)):
        slot.fetching = lambda on_its_way=on_its_way: on_its_way
        assert (slot._state_allows(second), slot._state_allows(first)) == (allowed, False)
        ctx.running_s += evict_s + 0.1
    another = dataclasses.replace(second, entry=dataclasses.replace(entry, digest=bytes(31) + b"1"))
    assert not slot._state_allows(another) and not slot._state_allows(second), "that is another wait"


def test_no_vote_for_a_round_whose_next_voters_are_half_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ranks them anew, and might give the casting vote to a dead one. What may be decided already is voted for."""
    member = voted()
    slot, plan, fixed = member.slot, member.slot.plan, again(member)
    assert plan is not None and not slot.outlived(plan)
    dead = member.others[:1]
    monkeypatch.setattr(member.ctx.members, "alive", lambda voter: voter not in dead)
    assert not slot.outlived(plan)
    dead += member.others[1:]
    assert slot.outlived(plan) and not slot.outlived(fixed)
    assert not slot.outlived(dataclasses.replace(plan, deciders=(member.me, member.coordinator)))
    slot.accepted = None
    assert not member.sent(slot.advance) and slot.accepted is None


# ------------------------------------------------------------------ others' votes


def learning(member: Member, monkeypatch: pytest.MonkeyPatch) -> list[list[Voter]]:
    learned: list[list[Voter]] = []
    monkeypatch.setattr(member.slot, "_learned", lambda entry, holders: learned.append(holders))
    return learned


def test_a_member_learns_by_the_votes_of_all_that_are_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    member = voted()
    slot, learned, vote = member.slot, learning(member, monkeypatch), msg.Held(*_vote(member))
    *_, lacking = [member.coordinator, *member.others]
    vote = dataclasses.replace(vote, owed=(lacking,))
    older, another = Ballot(-1, member.coordinator), dataclasses.replace(vote, manifest=WRONG)
    voters = [member.coordinator, *member.others]
    for voter in voters[:2]:
        slot.receive_held(voter, vote)
    *_, last = voters
    slot.receive_held(last, another)
    slot.receive_held(last, dataclasses.replace(vote, head=WRONG))
    slot.receive_held(Voter("stranger", 1), vote)
    assert not learned and set(slot.votes) <= set(voters)
    slot.receive_held(voters[0], dataclasses.replace(vote, ballot=older))  # came late
    slot.receive_held(last, vote)
    assert learned == [sorted(member.log.state.electorate)]


def test_a_member_learns_without_the_votes_of_those_who_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    member = voted()
    slot, learned = member.slot, learning(member, monkeypatch)
    *voters, asleep = member.coordinator, *member.others
    vote = dataclasses.replace(msg.Held(*_vote(member)), owed=(asleep,))
    for voter in voters:
        slot.receive_held(voter, vote)
    assert not learned
    monkeypatch.setattr(member.ctx.members, "awake", lambda voter: voter != asleep)
    slot.receive_held(voters[0], vote)
    assert learned == [sorted((member.me, *voters))]


def test_who_lacks_only_what_is_on_its_way_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By whatever owner, myself included, what it lacks still waits: then it is."""
    member = voted()
    slot, learned, vote = member.slot, learning(member, monkeypatch), msg.Held(*_vote(member))
    first, second, lacking = member.coordinator, *member.others
    slot.receive_held(first, dataclasses.replace(vote, owed=(second, lacking)))
    slot.receive_held(second, vote)
    assert not learned, "results for it wait with another"
    outbox, result = slot.exchange.outbox, member.node.exchange.results()[0]
    outbox.tell(result, [lacking.peer])
    slot.receive_held(first, dataclasses.replace(vote, owed=(second,)))
    assert not learned, "and with me"
    outbox.results.clear()
    slot.receive_held(first, vote)
    assert learned == [sorted((member.me, first, second))]


def test_a_vote_says_for_whom_results_wait() -> None:
    member = about_to_vote()
    exchange, waiting = member.node.exchange, member.others[1]
    exchange.outbox.tell(exchange.results()[0], [waiting.peer, "who is no member"])
    assert {message.owed for _, message in member.sent(member.slot.advance)} == {(waiting,)}


def test_a_vote_says_whom_results_do_not_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who answers by a relay only gets none of them, though none waits."""
    member = about_to_vote()
    apart = member.others[0]
    monkeypatch.setattr(member.ctx.members, "relay_for", lambda peer: member.me.peer if peer == apart.peer else None)
    assert member.node.exchange.owed() == (apart,)


def test_that_others_have_decided_is_known_by_their_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quorum's, for one manifest, in the ballot of the plan at hand; not in a forced one."""
    member = voted()
    slot, vote = member.slot, msg.Held(*_vote(member))
    learning(member, monkeypatch)
    assert slot.plan is not None
    for voter in member.others:
        slot.receive_held(voter, vote)
    assert not slot.decided_without_me, "two of four"
    older = Ballot(vote.ballot.counter - 1, vote.ballot.voter)
    for other in (dataclasses.replace(vote, manifest=WRONG), dataclasses.replace(vote, ballot=older)):
        slot.votes[member.coordinator] = other
        assert not slot.decided_without_me
    slot.votes[member.coordinator] = vote
    assert slot.decided_without_me
    slot.plan = dataclasses.replace(slot.plan, deciders=slot.log.state.electorate)
    assert not slot.decided_without_me


def decides_by_force(slot: Slot) -> None:
    assert slot.plan is not None
    slot.plan = dataclasses.replace(slot.plan, deciders=slot.log.state.electorate)


def has_promised_more(slot: Slot) -> None:
    slot.promised = Ballot(slot.promised.counter + 1, slot.promised.voter)


def voted_in_an_older_ballot(slot: Slot) -> None:
    assert slot.accepted is not None
    slot.accepted = (Ballot(-1, slot.promised.voter), slot.accepted[1])


def has_slept(slot: Slot) -> None:
    slot.ctx.stale = True


@pytest.mark.parametrize("why", [decides_by_force, has_promised_more, voted_in_an_older_ballot, has_slept])
def test_a_member_learns_of_nothing(why: Callable[[Slot], None], monkeypatch: pytest.MonkeyPatch) -> None:
    member = voted()
    slot, learned, vote = member.slot, learning(member, monkeypatch), msg.Held(*_vote(member))
    why(slot)
    for voter in (member.coordinator, *member.others):
        slot.receive_held(voter, vote)
    assert slot.votes and not learned


def test_all_that_are_awake_are_not_always_a_quorum(monkeypatch: pytest.MonkeyPatch) -> None:
    member = voted()
    monkeypatch.setattr(member.ctx.members, "awake", lambda voter: voter == member.me)
    learned = learning(member, monkeypatch)
    member.slot._learn()
    assert not learned


def test_who_decided_by_force_with_me() -> None:
    """Exactly the deciders of the plan that I voted for; a quorum that holds it may be of any ballot."""
    member = voted()
    slot, plan, accepted = member.slot, member.slot.plan, member.slot.accepted
    assert plan is not None and accepted is not None
    entry, deciders = accepted[1].entry, (member.me, member.others[0])
    assert not slot.forced(entry, member.log.state.electorate)
    slot.plan = dataclasses.replace(plan, deciders=deciders)
    assert slot.forced(entry, deciders) and not slot.forced(entry, deciders[:1])
    assert not slot.forced(dataclasses.replace(entry, t=entry.t + 1), deciders)
    slot.accepted = (Ballot(-1, member.coordinator), accepted[1])
    assert not slot.forced(entry, deciders)


# ------------------------------------------------------------------ READY, FETCH


def test_a_contribution_for_another_base_is_not_told_of() -> None:
    member = waiting()
    slot, exchange = member.slot, member.node.exchange
    member.stage.until(lambda: TRAIN in exchange.offered)
    member.ctx.running_s = exchange.offered[TRAIN].since_run + 7.0
    ((to, ready),) = member.sent(slot.announce)
    assert to == member.coordinator.peer
    assert (ready.head, ready.digest, ready.offered_s) == (member.head, member.log.digest(TRAIN), pytest.approx(7.0))
    state = member.log.state
    member.log.state = dataclasses.replace(state, electorate=(member.coordinator, *member.others))
    assert not member.sent(slot.announce), "it would not be counted"
    member.log.state = state
    offered = exchange.offered[TRAIN]
    offered.ready = dataclasses.replace(offered.ready, base=WRONG)
    assert not member.sent(slot.announce)


def test_while_its_plan_is_the_newest_nothing_is_ready() -> None:
    member = voted()
    slot = member.slot
    assert msg.Ready not in member.kinds(slot.announce)
    slot.promised = Ballot(3, member.others[0])
    assert [(to, type(m)) for to, m in member.sent(slot.announce)] == [(member.others[0].peer, msg.Ready)]


def test_wishes_are_told_until_the_channel_is_open_or_given_up() -> None:
    member = waiting()
    slot, log, exchange = member.slot, member.log, member.node.exchange
    exchange.offered.clear()
    grid = msg.GridSpec(log.state.channels[0].numel, 8, "fp32")
    wish = slot.wishes[TRAIN] = msg.Ready(EMPTY, TRAIN, EMPTY, grid, 0.0, 0, b"", 0.0, True, 0)
    assert not member.sent(slot.announce), "it is open"
    log.attached["new"], slot.wishes["new"] = log.attached[TRAIN], dataclasses.replace(wish, channel="new")
    ((_, told),) = member.sent(slot.announce)
    assert (told.channel, told.opening, told.base) == ("new", True, log.state.base("new"))
    attached = log.attached["new"]
    attached.abandoned, attached.misfit = True, "another model"
    assert not member.sent(slot.announce)


def test_missing_results_are_asked_of_owner_and_coordinator_in_turn() -> None:
    member = about_to_vote()
    slot, exchange, plan = member.slot, member.node.exchange, member.slot.plan
    assert plan is not None
    chunk = next(c for c, o in enumerate(plan.assignment) if plan.owners[o] in member.others)
    del exchange.held[chunk]
    owner = plan.owners[plan.assignment[chunk]]
    asked = [member.sent(slot.fetcher._ask, slot.plan, [chunk], turn) for turn in (0, 1)]
    fetch = msg.Fetch(member.head, plan.ballot, (chunk,), ())
    assert asked == [[(owner.peer, fetch)], [(member.coordinator.peer, fetch)]]
    slot.plan = dataclasses.replace(plan, owners=(member.me,) * len(plan.owners))
    assert not member.sent(slot.fetcher._ask, slot.plan, [chunk], 0), "I know that I lack it"


def test_a_coordinator_asks_others_for_what_has_no_way_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not itself: that an owner answers by a relay, or every holder is dead, is no reason to wait for a stall."""
    stage = Stage(4, inner_s=3.0)
    stage.hold = lambda source, target, message: isinstance(message, msg.Held)
    process, plan = stage.planned()
    stage.until(lambda: process.node.exchange.complete)
    member = Member(stage, process, process.voter)
    slot, members = member.slot, member.ctx.members
    chunk = next(c for c, o in enumerate(plan.assignment) if plan.owners[o] != member.me)
    owner = plan.owners[plan.assignment[chunk]]
    rest = [v.peer for v in member.others if v != owner]
    monkeypatch.setattr(members, "relay_for", lambda peer: rest[0] if peer == owner.peer else None)
    asked = [member.sent(slot.fetcher._ask, slot.plan, [chunk], turn) for turn in (0, 1)]
    fetch = msg.Fetch(member.head, plan.ballot, (chunk,), ())
    assert asked == [[(peer, fetch)] for peer in rest]
    fixed = msg.FixedChunk(chunk, member.node.exchange.hashes[chunk], (owner,))
    slot.plan = dataclasses.replace(plan, fixed=(fixed,))
    monkeypatch.setattr(members, "alive", lambda voter: voter != owner)
    asked = [member.sent(slot.fetcher._ask, slot.plan, [chunk], turn) for turn in (0, 1)]
    assert asked == [[(peer, dataclasses.replace(fetch, hashes=(fixed.hash,)))] for peer in rest]


def test_fixed_chunks_are_asked_of_those_holders_that_live(monkeypatch: pytest.MonkeyPatch) -> None:
    member = voted()
    slot, (one, other) = member.slot, member.others
    slot.plan = plan = again(member)
    fetch = msg.Fetch(member.head, plan.ballot, (0,), (plan.fixed[0].hash,))
    assert [member.sent(slot.fetcher._ask, plan, [0], turn)[0][0] for turn in (0, 1)] == [one.peer, other.peer]
    dead = [one]
    monkeypatch.setattr(member.ctx.members, "alive", lambda voter: voter not in dead)
    assert member.sent(slot.fetcher._ask, plan, [0], 0) == [(other.peer, fetch)]
    dead.append(other)
    assert member.sent(slot.fetcher._ask, plan, [0], 1) == [(plan.ballot.voter.peer, fetch)]


def test_missing_results_are_asked_for_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """After half a stall without any, and not while contributions become final; my part is sent once more, too."""
    member = about_to_vote()
    slot, exchange, ctx = member.slot, member.node.exchange, member.ctx
    del exchange.held[next(c for c, o in enumerate(slot.plan.assignment) if slot.plan.owners[o] != member.me)]  # type: ignore[union-attr]
    again_of: list[int] = []
    monkeypatch.setattr(exchange, "send_again", again_of.append)
    exchange.last_gain = ctx.now
    look = functools.partial(slot.fetcher.look, slot.plan)
    assert not member.sent(look)
    ctx.now += exchange.collector.stall_s
    exchange.collector.patience.fills_until = ctx.running_s + 1.0
    assert not member.sent(look)
    exchange.collector.patience.fills_until = 0.0
    assert msg.Fetch in member.kinds(look) and again_of == exchange.missing()
    assert not member.sent(look)


def test_what_one_owner_does_not_send_is_asked_of_it_while_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its results went down with a connection: the window to it stayed shut until all others were done."""
    member = about_to_vote()
    slot, exchange, ctx = member.slot, member.node.exchange, member.ctx
    plan = slot.plan
    assert plan is not None
    silent = next(owner for owner in plan.owners if owner != member.me)
    its = [c for c, o in enumerate(plan.assignment) if plan.owners[o] == silent]
    for chunk in its:
        del exchange.held[chunk]
    monkeypatch.setattr(exchange, "send_again", lambda chunk: pytest.fail("its parts may all be there"))
    wanted = msg.Fetch(member.head, plan.ballot, tuple(its), ())
    half_s = exchange.collector.stall_s / 2
    for _ in range(3):
        ctx.now += half_s
        exchange.last_gain = ctx.now
        assert member.sent(slot.fetcher.look, plan) == [(silent.peer, wanted)]
        assert not member.sent(slot.fetcher.look, plan), "now and then"
    ctx.now += half_s
    exchange.last_gain = exchange._heard[silent] = ctx.now
    assert not member.sent(slot.fetcher.look, plan), "it sends"


def test_results_are_served_by_chunk_and_by_hash() -> None:
    member = voted()
    slot, exchange, (asker, _) = member.slot, member.node.exchange, member.others
    result = exchange.held[0]

    def served(m: msg.Fetch) -> list[Any]:
        slot.receive_fetch(asker, m)
        return list(iter(lambda: exchange.outbox.next(asker.peer), None))

    served(msg.Fetch(member.head, slot.promised, (), ()))
    assert served(msg.Fetch(member.head, slot.promised, (0,), ())) == [result]
    accepted = slot.accepted, slot.accepted_results
    exchange.held, exchange.hashes = {0: result}, {0: WRONG}
    slot.accepted, slot.accepted_results = None, ()
    assert not served(msg.Fetch(member.head, slot.promised, (0,), (result_hash(result),)))
    slot.accepted, slot.accepted_results = accepted
    assert served(msg.Fetch(member.head, slot.promised, (), (result_hash(result),))) == [result]


def test_what_is_in_hand_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each who asked, and each new plan, all of it was hashed again; a large vector takes longer than T_dead."""
    member = voted()
    slot, exchange, asker = member.slot, member.node.exchange, member.others[0]
    plan, results = again(member), exchange.results()
    monkeypatch.setattr("dlc.comm.exchange.result_hash", None)
    monkeypatch.setattr("dlc.comm.exchange.blake3", None)
    exchange.held, exchange.hashes = {}, {}
    slot.receive_fetch(asker, msg.Fetch(member.head, slot.promised, (), tuple(f.hash for f in plan.fixed)))
    served = list(iter(lambda: exchange.outbox.next(asker.peer), None))
    assert {r.header.chunk: r for r in served} == dict(enumerate(results))  # type: ignore[union-attr]
    slot.receive_plan(plan.ballot.voter, plan)
    assert exchange.results() == results and slot.accepted is not None and slot.accepted[0] == plan.ballot


def test_what_is_fixed_for_one_chunk_is_kept_for_no_other() -> None:
    """Nor for another vector. It was voted for, and could not be applied: half of the state had moved by then."""
    member = voted()
    slot, exchange, plan, first = member.slot, member.node.exchange, again(member), member.slot.accepted
    a, b, *others = plan.fixed
    swapped = (dataclasses.replace(a, hash=b.hash), dataclasses.replace(b, hash=a.hash), *others)
    slot.receive_plan(plan.ballot.voter, dataclasses.replace(plan, fixed=swapped))
    assert exchange.held.keys() == {f.chunk for f in others} and slot.accepted is first
    longer = dataclasses.replace(plan, ballot=Ballot(4, plan.ballot.voter))
    entry = dataclasses.replace(plan.entry, numel=plan.entry.numel + 1)
    kept = slot._kept(dataclasses.replace(longer, entry=entry))
    assert kept.keys() == {f.chunk for f in plan.fixed[:-1]}, "the last is shorter"
    slot.receive_plan(longer.ballot.voter, longer)
    assert slot.accepted == (longer.ballot, first[1] if first is not None else None)


def test_what_waits_for_whoever_asks_is_not_given_to_it_twice() -> None:
    """Its link has no room for it: so much the longer would it take."""
    member = voted()
    slot, outbox, asker = member.slot, member.node.exchange.outbox, member.others[0]
    first, second, *_ = member.node.exchange.results()
    outbox.results.clear()
    outbox.tell(first, [asker.peer])
    slot.receive_fetch(asker, msg.Fetch(member.head, slot.promised, (0, 1), ()))
    assert list(iter(lambda: outbox.next(asker.peer), None)) == [first, second]
    slot.receive_fetch(asker, msg.Fetch(member.head, slot.promised, (0,), ()))
    assert list(iter(lambda: outbox.next(asker.peer), None)) == [first], "it may have been lost with a connection"
