"""What a coordinator counts, and which ballots it makes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest

from dlc.comm import coordinator as coordinator_module
from dlc.comm import messages as msg
from dlc.comm.choose import Resume
from dlc.comm.coordinator import BACK_OFF_S, BACK_OFFS_MAX, IDLE, PREP, RUN, Coordinator
from dlc.comm.effects import Send
from dlc.comm.entries import CONFIG, OPEN, ROUND, Entry, manifest_hash
from dlc.comm.ids import Ballot, Voter
from dlc.comm.messages import WAIT
from dlc.sim.network import Weather
from dlc.sim.schedule import TRAIN, Scenario, Start
from dlc.sim.world import Process, World
from tests.comm.stage import Stage

STRANGER = Voter("stranger", 1)


def running(kept: type) -> tuple[Stage, Process, Coordinator]:
    """Of four one coordinates a round; messages of this kind do not arrive any more."""
    stage = Stage(4, inner_s=3.0)
    stage.hold = lambda source, target, message: isinstance(message, kept)
    process, _ = stage.planned()
    return stage, process, process.node.coordinator


def preparing() -> tuple[Coordinator, msg.Promise]:
    """It has no promise but its own; one that counts."""
    stage, process, coordinator = running(msg.Promise)
    coordinator._next_ballot()
    assert coordinator.phase == PREP and set(coordinator.promises) <= {process.voter}
    coordinator.promises.clear()
    head = process.node.log.head
    return coordinator, msg.Promise(head, coordinator.ballot, None, None, None, (), (), ())


def others(coordinator: Coordinator) -> list[Voter]:
    return [voter for voter in coordinator.log.state.electorate if voter != coordinator.ctx.me]


def test_only_votes_of_its_deciders_in_its_ballot_count() -> None:
    _, _, coordinator = running(msg.Held)
    coordinator.votes.clear()
    vote = msg.Held(coordinator.log.head, coordinator.ballot, b"m" * 32, ())
    voter, *_ = others(coordinator)
    for counter in (coordinator.ballot.counter - 1, coordinator.ballot.counter + 1):
        coordinator.receive_held(voter, dataclasses.replace(vote, ballot=Ballot(counter, coordinator.ctx.me)))
    coordinator.receive_held(STRANGER, vote)
    assert not coordinator.votes
    coordinator.receive_held(voter, vote)
    assert coordinator.votes == {voter: vote}


def test_two_manifests_in_one_ballot_end_it() -> None:
    """Somebody computes wrong bytes: none of the two may be decided, whichever has more votes."""
    stage, process, coordinator = running(msg.Held)
    head, ballot = process.node.log.head, coordinator.ballot
    coordinator.votes.clear()
    for voter, manifest in zip(others(coordinator), (b"a" * 32, b"b" * 32, b"b" * 32), strict=True):
        coordinator.receive_held(voter, msg.Held(head, ballot, manifest, ()))
    assert coordinator.phase == PREP and coordinator.ballot > ballot and not coordinator.votes
    assert process.node.log.head == head


def test_two_manifests_in_a_forced_ballot_end_it_in_another_forced_one() -> None:
    _, process, coordinator = running(msg.Held)
    me, one = coordinator.ctx.me, others(coordinator)[0]
    head, ballot, coordinator.deciders = process.node.log.head, coordinator.ballot, (me, one)
    coordinator.votes = {me: msg.Held(head, ballot, b"a" * 32, ())}
    coordinator.receive_held(one, msg.Held(head, ballot, b"b" * 32, ()))
    assert coordinator.phase == PREP and coordinator.ballot > ballot and coordinator.deciders == (me, one)


def test_only_promises_of_its_deciders_to_its_ballot_count() -> None:
    coordinator, promise = preparing()
    voter, *_ = others(coordinator)
    older = Ballot(coordinator.ballot.counter - 1, coordinator.ctx.me)
    coordinator.receive_promise(voter, dataclasses.replace(promise, ballot=older))
    coordinator.receive_promise(STRANGER, promise)
    assert not coordinator.promises
    coordinator.receive_promise(voter, promise)
    assert set(coordinator.promises) == {voter} and coordinator.phase == PREP, "one of four is no quorum"


def test_who_is_outside_a_forced_ballot_has_no_part_in_it() -> None:
    coordinator, promise = preparing()
    one, other, *_ = others(coordinator)
    coordinator.deciders = (coordinator.ctx.me, one)
    coordinator.receive_promise(other, promise)
    assert not coordinator.promises
    coordinator.phase = RUN
    coordinator.receive_held(other, msg.Held(coordinator.log.head, coordinator.ballot, b"m" * 32, ()))
    assert not coordinator.votes


@pytest.mark.parametrize(("above", "phase"), [(-1, RUN), (0, RUN), (1, IDLE)])
def test_a_nack_ends_a_ballot_only_by_a_higher_one(above: int, phase: str) -> None:
    _, _, coordinator = running(msg.Held)
    voter, *_ = others(coordinator)
    top = coordinator.ballot
    coordinator.receive_nack(voter, msg.Nack(coordinator.log.head, Ballot(top.counter + above, top.voter)))
    assert coordinator.phase == phase


@pytest.mark.parametrize("highest", ["seen", "promised", "own"])
def test_each_own_ballot_is_above_all_that_it_knows(highest: str) -> None:
    """A number is never used twice: there is one plan of each ballot."""
    _, _, coordinator = running(msg.Held)
    voter, *_ = others(coordinator)
    slot = coordinator.slot
    slot.seen, slot.promised, coordinator.ballot = (
        Ballot(9 if highest == name else 5, voter) for name in ("seen", "promised", "own")
    )
    coordinator._next_ballot()
    assert coordinator.ballot == Ballot(10, coordinator.ctx.me) and not coordinator.votes


def test_each_further_ballot_of_a_slot_waits_longer_up_to_a_limit() -> None:
    _, _, coordinator = running(msg.Held)
    waits_s = []
    for counter in (1, 2, 3, BACK_OFFS_MAX, 1000):
        coordinator.ballot = Ballot(counter - 1, coordinator.ctx.me)
        coordinator.slot.seen = coordinator.slot.promised = coordinator.ballot
        coordinator._next_ballot()
        waits_s.append((coordinator._not_before - coordinator.ctx.now) / BACK_OFF_S)
    assert waits_s == pytest.approx([1, 2, 3, BACK_OFFS_MAX, BACK_OFFS_MAX])


def test_a_new_slot_knows_nothing_of_what_went_wrong_in_the_last() -> None:
    stage, process, coordinator = running(msg.Held)
    stage.hold = lambda source, target, message: False
    coordinator._not_before, coordinator._stalls, coordinator._mute = math.inf, 2, (STRANGER,)
    head = process.node.log.head
    stage.until(lambda: process.node.log.head != head, 120.0)
    assert (coordinator._stalls, coordinator._mute) == (0, ()) and coordinator._not_before < math.inf


def test_who_is_stale_begins_no_slot() -> None:
    _, process, coordinator = running(msg.Held)
    for stale, phase in ((True, IDLE), (False, WAIT)):
        process.node.ctx.stale = stale
        coordinator.enter()
        assert coordinator.phase == (phase if coordinator.log.state.rank0 == coordinator.ctx.me else IDLE)


def test_a_forced_ballot_needs_all_of_its_deciders(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no quorum: what some of them say is nobody's decision."""
    coordinator, promise = preparing()
    monkeypatch.setattr(coordinator.slot, "may_decide", lambda deciders: True)
    committed: list[list[Voter]] = []
    monkeypatch.setattr(coordinator, "committed", lambda entry, holders: committed.append(holders))
    me, (one, other, _) = coordinator.ctx.me, others(coordinator)
    coordinator.deciders = me, one, other
    for voter in (me, one):
        coordinator.receive_promise(voter, promise)
    assert coordinator.phase == PREP
    coordinator.receive_promise(other, promise)
    assert coordinator.phase == RUN
    coordinator.votes.clear()
    vote = msg.Held(coordinator.log.head, coordinator.ballot, b"m" * 32, ())
    for voter in (me, one):
        coordinator.receive_held(voter, vote)
    assert not committed
    coordinator.receive_held(other, vote)
    assert committed == [sorted((me, one, other))]


def test_only_a_voter_takes_over_from_a_silent_coordinator() -> None:
    starts = Start(0.0, ()), Start(0.1, (0,)), Start(0.2, (0,)), Start(0.3, (0,), "observer")
    world = World(Scenario(0, starts, weather=Weather(latency_max_s=0.05, spike=0.0)))
    world.run_until(12.0)
    current = world.running()[0].node.slot.promised.voter
    for process in world.running():
        node = process.node
        node.coordinator._drop()
        node.slot.coordinator_heard = -1e9
        node.coordinator.tick()
        takes_over = node.coordinator.phase == PREP
        assert takes_over == (process.host.role == "trainer"), f"{process.voter}, after {current}"


# ------------------------------------------------------------------ what moves a ballot


def sent(coordinator: Coordinator, act: Callable[..., object], *args: Any) -> list[tuple[str, Any]]:
    """What this makes it send."""
    out = coordinator.ctx.out
    out.clear()
    act(*args)
    messages = [(effect.to, effect.message) for effect in out if isinstance(effect, Send)]
    out.clear()
    return messages


def heard_alive(monkeypatch: pytest.MonkeyPatch, coordinator: Coordinator, *dead: Voter) -> None:
    """These are dead, and all others alive and awake."""
    for name in ("alive", "awake"):
        monkeypatch.setattr(coordinator.ctx.members, name, lambda voter: voter not in dead)
    monkeypatch.setattr(coordinator.ctx.members, "living", lambda voters: tuple(v for v in voters if v not in dead))


def test_only_what_rises_in_its_own_ballot_is_progress() -> None:
    """A member that repeats what it said, or speaks of an older ballot, does not put off the end of a stall."""
    _, _, coordinator = running(msg.Held)
    voter, *_ = others(coordinator)
    coordinator.progress.clear()
    first = msg.Progress(coordinator.log.head, coordinator.ballot, 1, 2, (), 0.0)
    older = dataclasses.replace(first, ballot=Ballot(-1, coordinator.ctx.me))
    less, more = dataclasses.replace(first, held=0, gained=9), dataclasses.replace(first, gained=3)
    moved = []
    for m in (older, first, first, less, more):
        coordinator._moved = -1.0
        coordinator.receive_progress(voter, m)
        moved.append(coordinator._moved >= 0)
    assert moved == [False, True, False, False, True] and coordinator.progress == {voter: (1, 3)}
    vote, moved = msg.Held(coordinator.log.head, coordinator.ballot, b"m" * 32, ()), []
    coordinator.votes.clear()
    for _ in range(2):
        coordinator._moved = -1.0
        coordinator.receive_held(voter, vote)
        moved.append(coordinator._moved >= 0)
    assert moved == [True, False]


def test_a_new_ballot_knows_nothing_of_the_last() -> None:
    _, _, coordinator = running(msg.Held)
    voter, *_ = others(coordinator)
    coordinator._quorum_since, coordinator._moved = 0.0, -1.0
    coordinator.promises = {voter: msg.Promise(b"", coordinator.ballot, None, None, None, (), (), ())}
    coordinator._lacks, coordinator._bears_s, coordinator.progress = {voter: (0,)}, {voter: 9.0}, {voter: (1, 1)}
    coordinator._next_ballot()
    assert coordinator._quorum_since is None and coordinator._moved == coordinator.ctx.running_s
    assert not (coordinator.promises or coordinator._lacks or coordinator._bears_s or coordinator.progress)
    assert coordinator.plan is None


def test_a_plan_is_shown_until_it_was_seen() -> None:
    _, process, coordinator = running(msg.Held)
    one, two, three = others(coordinator)
    ready = next(iter(process.node.slot._readies()))
    vote = msg.Held(coordinator.log.head, coordinator.ballot, b"m" * 32, ())
    coordinator.progress, coordinator.votes = {one: (1, 1)}, {two: vote}
    for voter in (one, two):
        assert not sent(coordinator, coordinator.receive_ready, voter, ready)
    assert sent(coordinator, coordinator.receive_ready, three, ready) == [(three.peer, coordinator.plan)]
    shown = [to for to, m in sent(coordinator, coordinator._beat) if isinstance(m, msg.Plan)]
    assert sorted(shown) == sorted((coordinator.ctx.me.peer, three.peer))


def test_its_beat_says_whom_it_waits_for_and_asks_them_again() -> None:
    coordinator, promise = preparing()
    one, *rest = others(coordinator)
    coordinator.promises = {one: promise}
    asked = sent(coordinator, coordinator._beat)
    lacking = {coordinator.ctx.me, *rest}
    assert {to for to, m in asked if isinstance(m, msg.Prepare)} == {v.peer for v in lacking}
    assert {m.waiting_for for _, m in asked if isinstance(m, msg.Coord)} == {tuple(sorted(lacking))}
    vote = msg.Held(coordinator.log.head, coordinator.ballot, b"m" * 32, ())
    coordinator.phase, coordinator.votes = RUN, {one: vote}
    assert set(coordinator._waiting_for()) == lacking


def test_a_promise_brings_what_its_voter_has_to_contribute() -> None:
    """And is none any more where the ballot has gone on."""
    coordinator, promise = preparing()
    voter, *_ = others(coordinator)
    base = coordinator.log.state.base(TRAIN)
    ready = msg.Ready(promise.head, TRAIN, base, msg.GridSpec(8, 8, "fp32"), 1.0, 1, b"", 0.0, False, 0)
    coordinator.agenda.enter()
    coordinator.receive_promise(voter, dataclasses.replace(promise, ready=(ready,)))
    assert list(coordinator.agenda._ready[TRAIN]) == [voter]
    coordinator.phase, coordinator.promises = RUN, {}
    coordinator.receive_promise(voter, promise)
    assert not coordinator.promises and coordinator.phase == RUN


# ------------------------------------------------------------------ stepping down, taking over


@pytest.mark.parametrize("why", ["stale", "replaced"])
def test_who_may_not_decide_coordinates_nothing(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, coordinator = running(msg.Held)
    ctx = coordinator.ctx
    ctx.stale = why == "stale"
    monkeypatch.setattr(ctx.members, "gone", lambda voter: why == "replaced" and voter == ctx.me)
    coordinator.tick()
    assert coordinator.phase == IDLE and coordinator._not_before == ctx.now + BACK_OFF_S


def idle(place: int, after: int = 0) -> tuple[Coordinator, tuple[Voter, ...]]:
    """The one of this place in rank, in a slot that the one of place `after` coordinates."""
    stage = Stage(4, inner_s=3.0)
    ranked = stage.peers()[0].node.log.state.ranked
    coordinator = next(p for p in stage.peers() if p.voter == ranked[place]).node.coordinator
    coordinator._drop()
    coordinator._not_before = 0.0
    coordinator.slot.promised = Ballot(1, ranked[after])
    return coordinator, ranked


def takes_over_after(coordinator: Coordinator, shares: tuple[float, ...]) -> float:
    """The first of these silences, in T_coord, after which it makes a ballot of its own."""
    ctx, slot = coordinator.ctx, coordinator.slot
    for share in shares:
        slot.coordinator_heard = ctx.running_s - share * ctx.members.t_coord_s
        coordinator._maybe_take_over()
        if coordinator.phase == PREP:
            return share
    return math.inf


SILENCES = (0.0, 0.9, 1.01, 1.9, 2.01, 2.9, 3.01)


@pytest.mark.parametrize(
    ("place", "after", "dead", "silence"),
    [
        (1, 0, (), 1.01),
        (2, 0, (), 2.01),
        (2, 0, (1,), 1.01),  # who is dead has no place
        (1, 0, (0,), 0.0),  # who is proved to be dead need not be waited for
        (2, 0, (0,), 1.01),
        (0, 1, (), 3.01),  # those after the coordinator come first
        (2, 1, (), 1.01),
    ],
)
def test_who_takes_over_when(
    place: int, after: int, dead: tuple[int, ...], silence: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, T_coord each: at once they would refuse each other's ballots."""
    coordinator, ranked = idle(place, after)
    heard_alive(monkeypatch, coordinator, *(ranked[i] for i in dead))
    assert takes_over_after(coordinator, SILENCES) == silence


def test_nobody_takes_over_in_a_pause_or_without_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator, _ = idle(1)
    heard_alive(monkeypatch, coordinator)
    coordinator._not_before = coordinator.ctx.now + 1.0
    assert takes_over_after(coordinator, SILENCES) == math.inf
    coordinator._not_before = 0.0
    coordinator.log.attached[TRAIN].synced = False
    assert takes_over_after(coordinator, SILENCES) == math.inf


def test_a_ballot_is_forced_only_with_permission_and_asked_about_again(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator, ranked = idle(1)
    me, slot, ctx = coordinator.ctx.me, coordinator.slot, coordinator.ctx
    heard_alive(monkeypatch, coordinator, *(v for v in ranked if v != me))
    permitted = False
    monkeypatch.setattr(slot, "may_decide", lambda deciders: permitted)
    monkeypatch.setattr(coordinator_module, "proposal", lambda ctx, log: (me,))
    coordinator._maybe_take_over()
    assert coordinator.phase == IDLE
    for end in ("refused", "silent", "refused later"):
        permitted, coordinator._not_before = True, 0.0
        coordinator._maybe_take_over()
        assert (coordinator.phase, coordinator.deciders) == (PREP, (me,))
        coordinator._elect()
        assert coordinator.phase == PREP
        if end == "silent":
            ctx.now += ctx.members.t_coord_s + 0.1
            coordinator._elect()
        elif end == "refused":
            permitted = False
            coordinator._elect()
        else:
            coordinator._propose_config((me,))
            coordinator._not_before, permitted = 0.0, False
            coordinator._watch()
        assert coordinator.phase == IDLE, end


# ------------------------------------------------------------------ promises


def test_an_election_without_a_quorum_ends_or_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator, promise = preparing()
    ctx, ballot = coordinator.ctx, coordinator.ballot
    one, two, three = others(coordinator)
    coordinator.promises = {ctx.me: promise}
    dead: list[Voter] = [one, two, three]
    monkeypatch.setattr(ctx.members, "alive", lambda voter: voter not in dead)
    coordinator._elect()
    assert coordinator.ballot == ballot and coordinator.phase == PREP, "they may only be slow"
    ctx.now += ctx.members.t_coord_s + 0.1
    dead.clear()
    coordinator._not_before = ctx.now + 1.0
    coordinator._elect()
    assert coordinator.ballot == ballot
    coordinator._not_before = 0.0
    coordinator._elect()
    assert coordinator.ballot > ballot and coordinator.phase == PREP
    ctx.now += ctx.members.t_coord_s + 0.1
    dead += [one, two, three]
    coordinator._elect()
    assert coordinator.phase == IDLE, "no quorum lives"


def test_an_election_ends_at_once_where_so_many_left_that_the_rest_is_no_quorum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coordinator, _ = preparing()
    gone = others(coordinator)
    monkeypatch.setattr(coordinator.ctx.members, "gone", lambda voter: voter in gone)
    coordinator._elect()
    assert coordinator.phase == IDLE


def test_beyond_a_quorum_promises_are_waited_for_a_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the last one holds saves work; but not from who is dead, and not for long."""
    for end in ("late", "dead"):
        coordinator, promise = preparing()
        ctx, (one, two, three) = coordinator.ctx, others(coordinator)
        dead: list[Voter] = []
        monkeypatch.setattr(ctx.members, "awake", lambda voter, dead=dead: voter not in dead)
        coordinator.promises = dict.fromkeys((ctx.me, one, two), promise)
        coordinator._elect()
        assert coordinator.phase == PREP
        if end == "dead":
            dead.append(three)
        else:
            ctx.now += ctx.members.t_prep_s + 0.01
        coordinator._elect()
        assert coordinator.phase != PREP, end


def test_a_mutes_promise_counts_only_where_it_is_needed() -> None:
    coordinator, promise = preparing()
    me, (one, two, mute) = coordinator.ctx.me, others(coordinator)
    coordinator.agenda.silent([mute])
    coordinator.promises = dict.fromkeys((me, one, two, mute), promise)
    assert set(coordinator.heard()) == {me, one, two}
    coordinator.deciders = (me, one, two, mute)
    assert set(coordinator.heard()) == {me, one, two, mute}, "a forced ballot needs everybody's"
    coordinator.deciders = ()
    coordinator.promises = dict.fromkeys((one, mute), promise)
    assert set(coordinator.heard()) == {one, mute}, "without it they are no quorum"


# ------------------------------------------------------------------ proposals


def test_a_resumed_round_keeps_what_is_held_by_anybody_who_is_not_mute() -> None:
    _, _, coordinator = running(msg.Held)
    one, two, mute = others(coordinator)
    plan = coordinator.plan
    assert plan is not None and len(plan.assignment) == 3
    old = dataclasses.replace(plan, norms=(1.0,) * len(plan.entry.roster), fill_s=2.0)
    coordinator.agenda.silent([mute])
    fixed = tuple(msg.FixedChunk(c, bytes([c]) * 32, holders) for c, holders in enumerate(((mute,), (one, mute))))
    coordinator._propose_resumed(Resume(old, fixed))
    new = coordinator.plan
    assert new is not None and [f.chunk for f in new.fixed] == [1]
    assert [owner < 0 for owner in new.assignment] == [False, True, False] and mute not in new.owners
    assert (new.digest, new.norms, new.fill_s) == (old.digest, old.norms, old.fill_s)
    assert (new.entry.roster, new.entry.manifest) == (old.entry.roster, b"")


def test_a_round_resumed_by_force_names_its_deciders_as_the_next_voters() -> None:
    _, _, coordinator = running(msg.Held)
    old, deciders = coordinator.plan, (coordinator.ctx.me, others(coordinator)[0])
    assert old is not None
    coordinator.deciders = deciders
    coordinator._propose_resumed(Resume(old, ()))
    assert coordinator.plan is not None and coordinator.plan.entry.electorate == tuple(sorted(deciders))


@pytest.mark.parametrize("forced", [False, True])
def test_a_round_of_a_state_that_fewer_hold_is_not_resumed(forced: bool) -> None:
    """Who planned it was wrong, and alone with that. By its digest all who are right would be found to be wrong."""
    coordinator, promise = preparing()
    electorate, right, old = coordinator.log.state.electorate, coordinator.log.digest(TRAIN), coordinator.slot.plan
    assert old is not None and old.digest == right
    for digest in (right, b"w" * 32):
        coordinator._next_ballot(electorate if forced else ())
        plan = dataclasses.replace(old, digest=digest)
        coordinator.promises = dict.fromkeys(electorate, dataclasses.replace(promise, plan=plan))
        coordinator._propose_chosen()
        new = coordinator.plan
        assert new is not None and coordinator.phase == RUN
        config = forced and digest != right
        assert (new.entry.kind, new.digest) == ((CONFIG, b"") if config else (ROUND, right))


def test_of_two_manifests_that_were_accepted_in_one_ballot_one_is_proposed_to_all() -> None:
    """No owner makes anything anew, the broken one neither: the round ends."""
    coordinator, promise = preparing()
    me, (one, two, three) = coordinator.ctx.me, others(coordinator)
    plan = coordinator.slot.plan
    assert plan is not None
    same = (b"h" * 32,) * (len(plan.assignment) - 1)
    decrees = [
        msg.Decree(dataclasses.replace(plan.entry, manifest=manifest_hash(hashes)), hashes)
        for hashes in ((b"a" * 32, *same), (b"b" * 32, *same))
    ]
    told = [dataclasses.replace(promise, accepted_ballot=plan.ballot, accepted=decree, plan=plan) for decree in decrees]
    coordinator.promises = {one: told[0], two: told[1], three: told[0], me: told[1]}
    coordinator._propose_chosen()
    new = coordinator.plan
    assert new is not None and new.entry == decrees[0].entry and coordinator.phase == RUN
    assert set(new.assignment) == {-1} and tuple(f.hash for f in new.fixed) == decrees[0].hashes
    assert {f.holders for f in new.fixed} == {tuple(sorted((one, three)))}, "who voted otherwise asks these"


def test_what_may_be_decided_is_proposed_as_it_is() -> None:
    """Of an opening with its digest: who lacks that first state fetches it before it votes."""
    coordinator, promise = preparing()
    state = coordinator.log.state
    entry = coordinator.agenda._entry(OPEN, "new", 0, (), msg.GridSpec(8, 8, "fp32"), b"d" * 32, 0)
    decree = msg.Decree(entry, ())
    accepted = dataclasses.replace(promise, accepted_ballot=Ballot(0, state.electorate[0]), accepted=decree)
    coordinator.promises = dict.fromkeys(state.electorate, accepted)
    coordinator._propose_chosen()
    plan = coordinator.plan
    assert plan is not None and (plan.entry, plan.digest) == (entry, entry.digest)


def test_who_is_found_to_be_wrong_coordinates_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, coordinator = running(msg.Held)
    told: list[tuple[str, bytes]] = []
    monkeypatch.setattr(coordinator, "diverged", lambda *what: told.append(what))
    monkeypatch.setattr(coordinator.agenda, "due", lambda: None)
    coordinator.phase, coordinator.agenda.diverged = WAIT, (TRAIN, b"d" * 32)
    coordinator._consider()
    assert told == [(TRAIN, b"d" * 32)] and coordinator.phase == IDLE


# ------------------------------------------------------------------ a round that does not go on


def lacking(n: int = 1) -> tuple[Coordinator, msg.Plan, Voter]:
    """A coordinator without the results of this many chunks of another owner; that owner."""
    stage = Stage(4, inner_s=3.0)
    stage.hold = lambda source, target, message: isinstance(message, msg.Held)
    process, plan = stage.planned()
    coordinator = process.node.coordinator
    owner = next(o for o in (plan.owners[i] for i in plan.assignment) if o != process.voter)
    stage.until(lambda: process.node.exchange.complete)
    chunks = [c for c, i in enumerate(plan.assignment) if plan.owners[i] == owner]
    for chunk in chunks[:n]:
        del process.node.exchange.held[chunk]
    coordinator._not_before = 0.0
    return coordinator, plan, owner


def test_an_owner_that_dies_is_replaced_where_its_chunks_are_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator, plan, owner = lacking()
    held_of = next(o for o in (plan.owners[i] for i in plan.assignment) if o not in (owner, coordinator.ctx.me))
    dead = [held_of]
    monkeypatch.setattr(coordinator.ctx.members, "alive", lambda voter: voter not in dead)
    coordinator._watch()
    assert coordinator.plan is plan, "all that it owned is here"
    dead[:] = [owner]
    coordinator._not_before = coordinator.ctx.now + 1.0
    coordinator._watch()
    assert coordinator.plan is plan, "it pauses between its ballots"
    coordinator._not_before, coordinator.deciders = 0.0, (coordinator.ctx.me, held_of)
    monkeypatch.setattr(coordinator.slot, "may_decide", lambda deciders: True)
    coordinator._watch()
    assert coordinator.phase == PREP and coordinator.ballot > plan.ballot
    assert coordinator.deciders == (coordinator.ctx.me, held_of), "a forced ballot stays one"


def test_a_plan_that_nobody_may_vote_for_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator, plan, _ = lacking(0)
    monkeypatch.setattr(coordinator.slot, "outlived", lambda of: of is plan)
    coordinator._watch()
    assert coordinator.phase == PREP and coordinator.ballot > plan.ballot


def test_nothing_stalls_before_T_stall_and_T_dead_nor_while_contributions_become_final() -> None:
    coordinator, plan, owner = lacking()
    ctx, exchange = coordinator.ctx, coordinator.exchange
    stall_s = coordinator._stall_s() + ctx.members.t_dead_s
    coordinator._lacks.clear()
    patience = exchange.collector.patience
    coordinator._moved, patience.fills_until = ctx.running_s - stall_s + 0.1, 0.0
    coordinator._watch()
    coordinator._moved, patience.fills_until = ctx.running_s - 10 * stall_s, ctx.running_s - stall_s + 0.1
    coordinator._watch()
    assert coordinator.plan is plan
    patience.fills_until = 0.0
    coordinator._moved = ctx.running_s - stall_s - 0.1
    coordinator._watch()
    assert coordinator.phase == PREP and coordinator._mute == (owner,)
    assert coordinator.agenda.mute() == {owner}
    coordinator.deciders = (ctx.me,)
    coordinator._propose_config(coordinator.deciders)
    assert coordinator.plan is not None and coordinator.plan.mute == (owner,), "the next coordinator need not find out"


def test_a_wait_for_contributions_is_no_stall() -> None:
    coordinator, plan, _ = lacking(0)
    ctx = coordinator.ctx
    coordinator.phase, coordinator._moved, coordinator._phase_since = WAIT, ctx.running_s - 100.0, ctx.now - 100.0
    coordinator._propose(plan.entry, plan.owners, plan.assignment, (), plan.digest)
    assert coordinator.phase == RUN and coordinator._moved == ctx.running_s and coordinator._phase_since == ctx.now


def test_a_coordinator_bears_with_what_living_owners_bear_with_twice_as_long_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coordinator, _, owner = lacking()
    stall_s = coordinator.exchange.collector.stall_s
    assert coordinator._stall_s() == stall_s
    coordinator._bears_s = {owner: 3 * stall_s}
    told = []
    for stalls in (0, 1, 2, 3):
        coordinator._stalls = stalls
        told.append(coordinator._stall_s() / stall_s)
    assert told == pytest.approx([1.0, 2.0, 3.0, 3.0])
    monkeypatch.setattr(coordinator.ctx.members, "alive", lambda voter: voter != owner)
    assert coordinator._stall_s() == stall_s


def test_holders_of_fixed_chunks_owe_them() -> None:
    coordinator, plan, owner = lacking()
    chunk = coordinator._lacking()[0]
    assignment = tuple(-1 if c == chunk else o for c, o in enumerate(plan.assignment))
    holder = next(v for v in others(coordinator) if v != owner)
    coordinator.plan = coordinator.exchange.plan = dataclasses.replace(
        plan, assignment=assignment, fixed=(msg.FixedChunk(chunk, b"h" * 32, (holder,)),)
    )
    coordinator._lacks.clear()
    coordinator._stalled(coordinator.plan)
    assert coordinator._mute == (holder,)


def test_where_nobody_owes_anything_the_next_in_rank_has_its_turn_after_two_tries() -> None:
    coordinator, plan, _ = lacking(0)
    coordinator._lacks.clear()
    coordinator._stalled(plan)
    assert coordinator.phase == PREP and coordinator._stalls == 1
    coordinator._stalled(plan)
    ctx = coordinator.ctx
    assert coordinator.phase == IDLE and coordinator._not_before == ctx.now + 3 * ctx.members.t_coord_s


def test_an_owner_is_unheard_where_half_of_the_other_living_members_lack_its_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Perhaps the coordinator itself. What the owner says of its own results is nothing."""
    coordinator, plan, _ = lacking(0)
    me, (one, two, three) = coordinator.ctx.me, others(coordinator)
    index = plan.owners.index(me)
    for lacks, unheard in (
        ({one: (index,), two: (), three: ()}, False),
        ({one: (index,), two: (index,), me: ()}, True),
        ({one: (index,), two: ()}, True),
        ({one: (index,), two: (), me: (index,), three: ()}, False),
    ):
        coordinator._lacks = lacks
        assert (me in coordinator._unheard_owners(plan)) == unheard, lacks
    monkeypatch.setattr(coordinator.ctx.members, "alive", lambda voter: voter not in (two, three))
    assert coordinator._unheard_owners(plan) == [me]
    coordinator._stalled(plan)
    assert coordinator._mute == (me,)


# ------------------------------------------------------------------ votes


def test_beyond_a_quorum_votes_are_waited_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that are awake, and for whom results wait: a peer that misses the COMMIT has to catch up."""
    for end in ("late", "asleep", "there"):
        _, _, coordinator = running(msg.Held)
        ctx, (one, two, three) = coordinator.ctx, others(coordinator)
        committed: list[list[Voter]] = []
        monkeypatch.setattr(coordinator, "committed", lambda entry, holders, to=committed: to.append(holders))
        asleep: list[Voter] = []
        monkeypatch.setattr(ctx.members, "awake", lambda voter, asleep=asleep: voter not in asleep)
        coordinator.votes, coordinator._quorum_since = {}, None
        vote = msg.Held(coordinator.log.head, coordinator.ballot, b"m" * 32, (three,))
        for voter in (ctx.me, one, two):
            coordinator.receive_held(voter, vote)
        since = ctx.now
        ctx.now = since + ctx.members.timeouts.t_commit_s(since - coordinator._phase_since) - 0.01
        coordinator._count()
        assert not committed and coordinator.phase == RUN
        voters = [ctx.me, one, two]
        if end == "late":
            ctx.now += 0.02
            coordinator._count()
        elif end == "asleep":
            asleep.append(three)
            coordinator._count()
        else:
            voters.append(three)
            coordinator.receive_held(three, vote)
        assert committed == [sorted(voters)] and coordinator.phase == IDLE, end


@pytest.mark.parametrize("sent", [True, False])
def test_who_lacks_only_what_is_on_its_way_is_not_waited_for(sent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the last owner says that nothing for it waits there. Where chunks have to be asked for, it is."""
    _, _, coordinator = running(msg.Held)
    assert coordinator.plan is not None
    if not sent:
        assignment = (-1, *coordinator.plan.assignment[1:])
        coordinator.plan = dataclasses.replace(coordinator.plan, assignment=assignment)
    committed: list[list[Voter]] = []
    monkeypatch.setattr(coordinator, "committed", lambda entry, holders: committed.append(holders))
    me, (one, two, three) = coordinator.ctx.me, others(coordinator)
    coordinator.votes = {}
    vote = msg.Held(coordinator.log.head, coordinator.ballot, b"m" * 32, ())
    for voter in (one, two, three):
        coordinator.receive_held(voter, vote)
    assert not committed, "of the head that I cannot follow yet I do not tell the others"
    coordinator.votes = {}
    for voter in (me, one):
        coordinator.receive_held(voter, vote)
    coordinator.receive_held(two, dataclasses.replace(vote, owed=(three,)))
    assert not committed and coordinator.phase == RUN
    coordinator.receive_held(two, vote)
    assert committed == ([sorted((me, one, two))] if sent else [])


def test_votes_of_an_older_ballot_say_nothing_of_what_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else half of all, with the casting vote, would be believed at once."""
    _, _, coordinator = running(msg.Held)
    me, (one, two, three), plan = coordinator.ctx.me, others(coordinator), coordinator.plan
    assert coordinator.log.state.quorum((me, one))
    committed: list[list[Voter]] = []
    monkeypatch.setattr(coordinator, "committed", lambda entry, holders: committed.append(holders))
    coordinator.votes = {}
    vote = msg.Held(coordinator.log.head, coordinator.ballot, b"m" * 32, ())
    for voter in (two, three):
        coordinator.receive_held(voter, vote)
    coordinator._next_ballot()
    coordinator.phase, coordinator.plan = RUN, plan
    for voter in (me, one):
        coordinator.receive_held(voter, dataclasses.replace(vote, ballot=coordinator.ballot))
    assert not committed and coordinator.phase == RUN


def test_what_is_committed_has_the_manifest_that_was_voted_for(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, coordinator = running(msg.Held)
    committed: list[Entry] = []
    monkeypatch.setattr(coordinator, "committed", lambda entry, holders: committed.append(entry))
    plan = coordinator.plan
    assert plan is not None
    coordinator.votes = {}
    for voter in coordinator.log.state.electorate:
        coordinator.receive_held(voter, msg.Held(plan.head, plan.ballot, b"m" * 32, ()))
    assert committed == [dataclasses.replace(plan.entry, manifest=b"m" * 32)]
