"""One peer's events: what is left of one that fails, what is found out during work at length, what is taken back."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlc.comm import messages as msg
from dlc.comm.coordinator import IDLE
from dlc.comm.effects import Answer, Notify, Send
from dlc.comm.events import MemberDown
from dlc.comm.ids import Ballot, Voter
from dlc.comm.straggler import NEVER_S
from dlc.comm.wire import pack
from dlc.errors import ProtocolError, UsageError
from dlc.sim.schedule import TRAIN
from dlc.sim.toy import ToyState
from tests.comm.stage import Stage


def test_of_an_event_that_is_refused_nothing_leaves_but_what_membership_found_out() -> None:
    stage = Stage(2)
    node, other = (process.node for process in stage.peers())
    down, commit = MemberDown(other.me), msg.Commit(node.log.past[-1].entry, ())

    def act() -> None:
        node.ctx.send(other.me, commit)
        node.ctx.notify(down)
        raise UsageError("no")

    with pytest.raises(UsageError):
        node._event(stage.world.now, act)
    effects = node.tick(stage.world.now)
    assert Notify(down) in effects and Send(other.me.peer, commit) not in effects
    assert not node.torn and Notify(down) not in node.tick(stage.world.now)


@pytest.mark.parametrize("beside", [False, True])
def test_an_event_that_ends_halfway_is_the_end_of_the_node_unless_it_is_beside_the_log(beside: bool) -> None:
    node = Stage(2).peers()[0].node

    def act() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        node._event(node.ctx.now, act, beside)
    assert node.torn is not beside


def test_what_membership_finds_out_during_work_at_length_is_told_when_that_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A round would wait for a peer that is known to be dead."""
    stage = Stage(2)
    node, other = (process.node for process in stage.peers())
    down, ping = Notify(MemberDown(other.me)), Send(other.me.peer, msg.Ping(1, msg.Gossip((), ())))
    with monkeypatch.context() as found:
        found.setattr(node.members, "tick", lambda now: [down, ping])
        assert node.breathe(stage.world.now) == [ping]
        assert node.breathe(stage.world.now + node._t_gap_s + 0.1) == [], "it was away: the next event finds that out"
    assert node.tick(stage.world.now).count(down) == 1


def test_who_takes_the_place_of_a_state_that_nobody_uses_any_more_becomes_the_same() -> None:
    stage = Stage(2)
    process, _ = stage.peers()
    attached = process.node.log.attached[TRAIN]
    before, attached.abandoned = attached.state, True
    successor = ToyState(before.numel, seed=7)
    image = bytes(before.export())
    process.node.hand_on(TRAIN, successor, attached.grid, attached.lease_len, stage.world.now)
    assert attached.state is successor and bytes(successor.export()) == image and not attached.abandoned
    stage.all_in()


def test_a_contribution_that_is_taken_back_during_its_round_goes_on_from_a_copy() -> None:
    """Its owner writes into that memory, or lets it go: the others would have a mean of whatever is there."""
    stage = Stage(3)
    process, plan = stage.planned()
    mine: Any = process.node.exchange.offered[TRAIN]
    mine.vector, stopped = torch.ones(plan.entry.numel), list[bool]()
    given, mine.sink = mine.vector, lambda *told: None
    mine.filling = SimpleNamespace(stop=lambda: stopped.append(True))
    assert not process.node.withdraw(TRAIN)
    given.zero_()
    assert process.node.exchange.offered[TRAIN] is mine and mine.sink is None and stopped == [True]
    assert torch.equal(mine.vector, torch.ones(plan.entry.numel))


def test_who_refuses_in_the_middle_of_a_step_is_in_doubt() -> None:
    """The head has moved, and its state has not: it would be taken for a message that is refused, and nothing more."""
    stage = Stage(3, inner_s=3.0)
    stage.hold = lambda source, target, message: isinstance(message, msg.Held | msg.Commit)
    coordinator, _ = stage.planned()
    process = stage.peers(coordinator)[0]
    node = process.node
    stage.until(lambda: node.slot.accepted is not None)
    assert node.slot.accepted is not None
    commit, now = msg.Commit(node.slot.accepted[1].entry, (coordinator.voter,)), process.host.clock_s(stage.world.now)
    false = dataclasses.replace(commit, entry=dataclasses.replace(commit.entry, electorate=()))
    with pytest.raises(ProtocolError):
        node.receive(coordinator.voter, false, now)
    assert not node.torn

    def step(t: int, means: object) -> None:
        raise ProtocolError("a mean of another length")

    node.log.attached[TRAIN].state.step = step  # type: ignore[method-assign]
    with pytest.raises(ProtocolError, match="of another length"):
        node.receive(coordinator.voter, commit, now)
    assert node.torn


def test_who_answers_is_noted_of_listed_addresses_alone() -> None:
    """Of any that was ever dialled, or said to have been, it was kept for ever."""
    stage = Stage(2)
    process, other = stage.peers()
    node, now = process.node, process.host.clock_s(stage.world.now)
    node.slot.listed, record = ("listed:1",), other.node.members.own
    for address in ("listed:1", "another:1", ""):
        welcome = msg.Welcome(msg.PROTOCOL_VERSION, "sim", b"spec", record, (), address, "")
        node.receive(other.voter, welcome, now)
    assert node.slot.answers.get("listed:1") == other.voter.peer
    assert not {"another:1", ""} & node.slot.answers.keys()


def test_a_newcomer_of_another_run_is_answered_and_not_learned_of() -> None:
    stage = Stage(2)
    process, other = stage.peers()
    node, now = process.node, process.host.clock_s(stage.world.now)
    for name, spec in (("stranger", b"another"), ("friend", b"spec")):
        record = dataclasses.replace(other.node.members.own, voter=Voter(name, 1), control=(f"sim:{name}",))
        hello = msg.Hello(msg.PROTOCOL_VERSION, "sim", spec, record, "")
        effects = node.receive(record.voter, hello, now)
        assert any(isinstance(e, Answer) and isinstance(e.message, msg.Welcome) for e in effects)
    assert node.members.record("friend") is not None and node.members.record("stranger") is None


def test_where_not_all_can_be_told_of_the_living_are(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(3)
    node, dead, alive = (process.node for process in stage.peers())
    records = node.members.records()
    assert node.inbox._records_to_tell() == tuple(records)
    monkeypatch.setattr(node.members, "alive", lambda voter: voter != dead.me)
    room = sum(len(pack(record)) for record in records) - 1
    monkeypatch.setattr("dlc.comm.inbox.WELCOME_BYTES_MAX", room)
    assert {record.voter for record in node.inbox._records_to_tell()} == {r.voter for r in records} - {dead.me}


def test_that_it_contributes_again_is_told_to_the_voters_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(2)
    process, other = stage.peers()
    node, now = process.node, process.host.clock_s(stage.world.now)
    ping = Send(other.voter.peer, msg.Ping(7, msg.Gossip((), ())))
    monkeypatch.setattr(node.members, "tell_voters", lambda: [ping])
    changes = ((NEVER_S, False), (NEVER_S, False), (5.0, True), (3.0, False))
    for eta_s, tells in changes:
        assert (ping in node.describe(now, eta_s=eta_s)) is tells


def test_what_is_too_long_for_a_relay_is_sent_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may get there yet; as a relay it would not leave."""
    stage = Stage(3)
    node, other, relay = (process.node for process in stage.peers())
    monkeypatch.setattr(node.members, "relay_for", lambda peer: relay.me.peer if peer == other.me.peer else None)
    send = Send(other.me.peer, msg.Nack(node.log.head, Ballot(1, other.me)))
    relayed = node._routed(send)
    assert isinstance(relayed, Send) and relayed.to == relay.me.peer and isinstance(relayed.message, msg.Relay)
    monkeypatch.setattr("dlc.comm.node.RELAYED_BYTES_MAX", len(relayed.message.message))
    assert node._routed(send) == relayed
    monkeypatch.setattr("dlc.comm.node.RELAYED_BYTES_MAX", len(relayed.message.message) - 1)
    assert node._routed(send) == send


def test_who_has_said_that_it_leaves_votes_no_more() -> None:
    stage = Stage(3, inner_s=3.0)
    stage.hold = lambda source, target, message: isinstance(message, msg.Held)
    coordinator, plan = stage.planned()
    process = stage.peers(coordinator)[0]
    node = process.node
    stage.until(lambda: node.slot.accepted is not None)
    assert node.log.head == plan.head
    node.slot.accepted, node.slot.accepted_results = None, ()
    node.leave(process.host.clock_s(stage.world.now))
    node.slot.advance()
    assert node.slot.accepted is None


def test_who_is_behind_by_the_last_entry_is_shown_it_and_nobody_else() -> None:
    stage = Stage(2)
    process, other = stage.peers()
    node, now = process.node, process.host.clock_s(stage.world.now)
    last = node.log.past[-1].entry

    def shown(head: bytes) -> list[msg.Commit]:
        effects = node.receive(other.voter, msg.Nack(head, Ballot(1, other.voter)), now)
        return [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, msg.Commit)]

    assert [commit.entry for commit in shown(last.parent)] == [last]
    assert not shown(bytes(31) + b"1") and not shown(node.log.past[-2].entry.parent) and not shown(node.log.head)


@pytest.mark.parametrize("kind", [msg.Prepare, msg.Coord, msg.Plan])
def test_who_hears_of_a_higher_ballot_coordinates_no_more(kind: type) -> None:
    stage = Stage(3, inner_s=3.0)
    stage.hold = lambda source, target, message: isinstance(message, msg.Result)
    process, plan = stage.planned()
    other, node = stage.peers(process)[0].voter, process.node
    higher, now = Ballot(plan.ballot.counter + 1, other), process.host.clock_s(stage.world.now)
    message = {
        msg.Prepare: msg.Prepare(plan.head, higher, ()),
        msg.Coord: msg.Coord(plan.head, higher, msg.RUN, ()),
        msg.Plan: dataclasses.replace(plan, ballot=higher),
    }[kind]
    assert node.coordinator.phase == msg.RUN
    node.receive(other, message, now)
    assert node.coordinator.phase == IDLE


@pytest.mark.parametrize(("channel", "sign"), [(TRAIN, -1), ("calls", 1)])
def test_an_offer_without_a_position_has_a_number_of_its_own(channel: str, sign: int) -> None:
    """Owners keep parts of one that was taken back, and must not take them for parts of the next. Where there are
    leases it is no position: below 0, as it brings no samples."""
    stage = Stage(2)
    process, _ = stage.peers()
    node, now, grid = process.node, process.host.clock_s(stage.world.now), stage.world.grids[TRAIN]
    node.withdraw(TRAIN)
    numbers = []
    for upto in (0, 0, 77):
        node.contribute(
            channel, torch.zeros(grid.numel), grid, weight=1.0, upto=upto, patience_s=0.0, sink=None, now=now
        )
        numbers.append(node.exchange.offered[channel].ready.upto)
        assert node.withdraw(channel)
    first, second, position = numbers
    assert first * sign > 0 and second == first + sign and position == 77
