"""What a coordinator counts, and which ballots it makes."""

from __future__ import annotations

import dataclasses
import math

import pytest

from dlc.comm import messages as msg
from dlc.comm.coordinator import BACK_OFF_S, BACK_OFFS_MAX, IDLE, PREP, RUN, Coordinator
from dlc.comm.ids import Ballot, Voter
from dlc.sim.network import Weather
from dlc.sim.schedule import Scenario, Start
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
    vote = msg.Held(coordinator.log.head, coordinator.ballot, b"m" * 32)
    voter, *_ = others(coordinator)
    for counter in (coordinator.ballot.counter - 1, coordinator.ballot.counter + 1):
        coordinator.receive_held(voter, dataclasses.replace(vote, ballot=Ballot(counter, coordinator.ctx.me)))
    coordinator.receive_held(STRANGER, vote)
    assert not coordinator.votes
    coordinator.receive_held(voter, vote)
    assert coordinator.votes == {voter: vote.manifest}


def test_two_manifests_in_one_ballot_end_it() -> None:
    """Somebody computes wrong bytes: none of the two may be decided, whichever has more votes."""
    stage, process, coordinator = running(msg.Held)
    head, ballot = process.node.log.head, coordinator.ballot
    coordinator.votes.clear()
    for voter, manifest in zip(others(coordinator), (b"a" * 32, b"b" * 32, b"b" * 32), strict=True):
        coordinator.receive_held(voter, msg.Held(head, ballot, manifest))
    assert coordinator.phase == PREP and coordinator.ballot > ballot and not coordinator.votes
    assert process.node.log.head == head


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
    coordinator.receive_held(other, msg.Held(coordinator.log.head, coordinator.ballot, b"m" * 32))
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
    vote = msg.Held(coordinator.log.head, coordinator.ballot, b"m" * 32)
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
