"""Messages of a member whose software is wrong: each is refused or without effect, and the others' rounds go on.

Every one of them ended a peer, or stood still for days, before it was checked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from dlc.comm import agenda, dropped, early
from dlc.comm import messages as msg
from dlc.comm.catalogue import CODES
from dlc.comm.coordinator import WAIT
from dlc.comm.effects import Send
from dlc.comm.entries import OPEN, ROUND, Entry, LogState
from dlc.comm.events import DigestMismatch
from dlc.comm.ids import Ballot, Voter
from dlc.comm.shapes import BALLOTS_AHEAD_MAX, LEASE_LEN_MAX, plausible_entry
from dlc.comm.wire import Packed, pack
from dlc.errors import ProtocolError
from dlc.sim.schedule import TRAIN
from dlc.sim.world import Process
from dlc.survey import member_of
from tests.comm.stage import Stage

STRANGER = Voter("stranger", 1)


def taken(to: Process, sender: Voter, message: msg.Message) -> bool:
    """Whether that peer takes it; what it answers goes nowhere."""
    try:
        to.node.receive(sender, message, to.host.clock_s(0.0) + to.node.ctx.now)
    except ProtocolError:
        return False
    return True


def voted(stage: Stage) -> tuple[Process, Process, msg.Commit]:
    """Run until a round is voted for by a peer that does not coordinate it: it, the coordinator, and the commit."""
    stage.hold = lambda source, target, message: isinstance(message, msg.Commit | msg.Held)
    coordinator, plan = stage.planned()
    (member, *_) = stage.peers(coordinator)
    stage.until(lambda: member.node.slot.accepted is not None and member.node.slot.plan == plan)
    assert member.node.slot.accepted is not None
    return member, coordinator, msg.Commit(member.node.slot.accepted[1].entry, (coordinator.voter, member.voter))


FALSE: dict[str, Callable[[Entry], dict[str, Any]]] = {
    "chunks that there are not": lambda e: {"chunk_elems": e.chunk_elems // 2},
    "another vector": lambda e: {"numel": e.numel - 1},
    "another codec": lambda e: {"codec": "fp16"},
    "a roster that lacks who is in the results": lambda e: {"roster": e.roster[1:]},
    "other weights": lambda e: {"roster": tuple(dataclasses.replace(p, weight=p.weight + 1) for p in e.roster)},
    "nobody who votes next": lambda e: {"electorate": (), "trainers": ()},
    "two processes of one peer": lambda e: {"electorate": (*e.electorate, e.electorate[0]._replace(inc=1))},
    "trainers without a vote": lambda e: {"trainers": (*e.trainers, STRANGER)},
}


@pytest.mark.parametrize("how", FALSE)
def test_a_commit_that_does_not_fit_its_results_moves_nobody(how: str) -> None:
    stage = Stage(3)
    member, coordinator, commit = voted(stage)
    head = member.node.log.head
    false = dataclasses.replace(commit, entry=dataclasses.replace(commit.entry, **FALSE[how](commit.entry)))
    assert not taken(member, coordinator.voter, false) and member.node.log.head == head
    stage.hold = lambda source, target, message: False
    stage.all_in()


def test_a_result_that_names_a_contributor_twice_is_dropped() -> None:
    stage = Stage(3)
    stage.hold = lambda source, target, message: isinstance(message, msg.Result)
    _, plan = stage.planned()
    stage.until(lambda: any(isinstance(held[-1], msg.Result) for held in stage.held))
    source, target, *_, result = next(held for held in stage.held if isinstance(held[-1], msg.Result))
    process = stage.world.hosts[target].process
    assert process is not None and process.node.slot.plan == plan
    twice = dataclasses.replace(result.header, included=(*result.header.included, result.header.included[0]))
    sender = plan.owners[plan.assignment[result.header.chunk]]
    assert taken(process, sender, dataclasses.replace(result, header=twice))
    assert result.header.chunk not in process.node.exchange.held
    stage.hold = lambda source, target, message: False
    stage.release()
    stage.all_in()


def test_nobody_speaks_in_the_name_of_the_one_it_speaks_to() -> None:
    """Such messages were taken for the peer's own, which need no check."""
    stage = Stage(3)
    member, coordinator, _ = voted(stage)
    plan = member.node.slot.plan
    assert plan is not None
    false = dataclasses.replace(plan, assignment=(len(plan.owners),) * len(plan.assignment))
    relayed = msg.Relay(member.voter.peer, member.voter, CODES[msg.Plan], Packed(pack(false)))
    assert not taken(member, member.voter, false)
    assert not taken(member, coordinator.voter, relayed)
    assert taken(member, member.voter, msg.Hello(msg.PROTOCOL_VERSION, "sim", b"spec", None, ""))  # by its own address


def test_what_is_relayed_goes_one_hop_and_no_further() -> None:
    """Where another process had taken over the target's address it came back to that, again and again, for ever."""
    stage = Stage(3)
    relay, origin, target = stage.peers()
    wish = msg.Relay(target.voter.peer, origin.voter, CODES[msg.Fetch], Packed(b""))
    now = relay.host.clock_s(0.0) + relay.node.ctx.now
    assert Send(target.voter.peer, wish) in relay.node.receive(origin.voter, wish, now)
    assert not any(isinstance(e, Send) and e.message == wish for e in relay.node.receive(target.voter, wish, now))


@pytest.mark.parametrize("kind", [msg.Relay, msg.Contrib])
def test_neither_bulk_nor_what_is_relayed_is_relayed(kind: type[msg.Message]) -> None:
    stage = Stage(3)
    member, other, _ = stage.peers()
    relayed = msg.Relay(member.voter.peer, other.voter, CODES[kind], Packed(b""))
    with pytest.raises(ProtocolError, match=f"{kind.__name__} is not relayed"):
        member.node.receive(other.voter, relayed, member.host.clock_s(0.0) + member.node.ctx.now)


@pytest.mark.parametrize("counter", [BALLOTS_AHEAD_MAX // 2, 2**31 - 2, 2**63])
def test_a_ballot_out_of_range_costs_no_peer_its_turn(counter: int) -> None:
    """A coordinator was to wait a quarter of a second for each ballot before it looks at the owners of its plan."""
    stage = Stage(4)
    stage.hold = lambda source, target, message: isinstance(message, msg.Result | msg.Contrib)
    coordinator, plan = stage.planned()
    others = stage.peers(coordinator)
    nack = msg.Nack(plan.head, Ballot(counter, others[0].voter))
    assert taken(coordinator, others[0].voter, nack) is (counter <= BALLOTS_AHEAD_MAX)
    if counter <= BALLOTS_AHEAD_MAX:
        stage.until(lambda: (now := coordinator.node.slot.plan) is not None and now.ballot > nack.promised)
    stage.world.crash(next(p for p in others if p.voter in plan.owners))
    stage.hold = lambda source, target, message: False
    stage.committed(plan.entry.t, stage.peers(), limit_s=60.0)
    stage.all_in()


def test_entries_that_no_coordinator_makes_are_implausible() -> None:
    voters = (Voter("a", 1), Voter("b", 1))
    state = LogState().apply(Entry("config", bytes(32), 1, "", 0, voters, voters, (), 0, 0, "", b"", b"", 0))
    opening = Entry(OPEN, state.head, 2, TRAIN, 0, voters, voters, (), 10, 4, "fp32", b"", b"d" * 32, 5)
    assert plausible_entry(opening, state)
    for change in (
        {"t": 2**63},
        {"t": -1},
        {"channel": ""},
        {"channel": "x" * 129},
        {"numel": 0},
        {"chunk_elems": -1},
        {"codec": "none such"},
        {"lease_len": -1},
        {"lease_len": LEASE_LEN_MAX},
    ):
        assert not plausible_entry(dataclasses.replace(opening, **change), state), change
    opened = state.apply(opening)
    again = dataclasses.replace(opening, parent=opened.head, depth=3)
    assert not plausible_entry(again, opened), "it is open"
    round_ = dataclasses.replace(again, kind=ROUND, t=1, digest=b"", lease_len=0)
    assert plausible_entry(round_, opened)
    for other in ({"numel": 9}, {"chunk_elems": 5}, {"codec": "fp16"}, {"channel": "x" * 129}):
        assert not plausible_entry(dataclasses.replace(round_, **other), opened), other


@pytest.mark.parametrize("digest", [b"x", bytes(31), bytes(33)])
def test_what_is_no_digest_convicts_nobody(digest: bytes) -> None:
    """Two peers: it was the lesser of two, so the coordinator took its own state for the wrong one."""
    stage = Stage(2)
    stage.hold = lambda source, target, message: isinstance(message, msg.Ready)
    coordinator = next(p for p in stage.peers() if p.node.coordinator.phase == WAIT)
    (other,) = stage.peers(coordinator)
    stage.until(lambda: any(source == other.host.name for source, *_ in stage.held))
    ready = next(held[-1] for held in stage.held if held[0] == other.host.name)
    assert taken(coordinator, other.voter, dataclasses.replace(ready, digest=digest))
    stage.hold = lambda source, target, message: False
    _, plan = stage.planned()
    assert not taken(other, plan.ballot.voter, dataclasses.replace(plan, digest=digest))
    stage.all_in()
    assert not any(isinstance(event, DigestMismatch) for _, event in stage.told)


def test_a_plan_of_a_state_that_nobody_holds_makes_nobody_give_up_its_own() -> None:
    """All took their own for the wrong one at once, and then none was left anywhere."""
    stage = Stage(3)
    stage.hold = lambda source, target, message: isinstance(message, msg.Plan)
    coordinator, plan = stage.planned()
    for peer in stage.peers(coordinator):
        taken(peer, coordinator.voter, dataclasses.replace(plan, digest=b"x" * 32))
    stage.world.crash(coordinator)
    stage.hold = lambda source, target, message: False
    stage.committed(plan.entry.t, stage.peers())
    stage.all_in()
    assert not any(isinstance(event, DigestMismatch) for _, event in stage.told)


def test_an_outdated_plan_makes_nobody_give_up_its_own_state_but_tells_who_is_mute() -> None:
    """Of a ballot below what was promised it is nobody's word any more; what its coordinator had found out is true."""
    stage = Stage(3, inner_s=5.0)
    coordinator, plan = stage.planned()
    member, other = stage.peers(coordinator)
    stage.until(lambda: member.node.slot.plan == plan)
    older = dataclasses.replace(plan, ballot=Ballot(0, Voter("a", 1)), digest=b"x" * 32, mute=(other.voter,))
    assert older.ballot < plan.ballot and taken(member, older.ballot.voter, older)
    assert member.node.slot.plan == plan and member.node.log.synced
    assert member.node.coordinator.agenda.mute() == {other.voter}
    stage.committed(plan.entry.t, stage.peers())


def test_a_status_that_is_no_json_is_shown_as_nothing() -> None:
    stage = Stage(1)
    own = stage.peers()[0].node.members.own
    for raw in (b"[" * 1024, b'{"a":' * 200, b"\xff", b"[]", b"1e999"):
        assert member_of(dataclasses.replace(own, status=raw), True, False).status == {}
    not_finite = b'{"loss": NaN, "a": [-Infinity, 1e999, 2.5], "t": 3}'
    told = member_of(dataclasses.replace(own, status=not_finite), True, False).status
    assert told == {"loss": None, "a": [None, None, 2.5], "t": 3}, "who prints it as JSON prints JSON"


def test_what_comes_too_early_is_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results without a payload, contributions to channels that nobody else has, senders that there are not."""
    monkeypatch.setattr(early, "EARLY_BYTES_MAX", 10_000)
    monkeypatch.setattr(dropped, "DROPPED_MAX", 50)
    monkeypatch.setattr(agenda, "CHANNELS_MAX", 10)
    stage = Stage(3)
    coordinator, plan = stage.planned()
    sender = stage.peers(coordinator)[0].voter
    kept = coordinator.node.exchange
    ready = msg.Ready(plan.head, "", b"", msg.GridSpec(1, 1, "fp32"), 1.0, 1, b"", 1.0, False, 0)
    for i in range(200):
        later = Ballot(plan.ballot.counter + 1 + i, sender)
        header = msg.ChunkHeader(b"", 0, plan.head, later, Voter(f"nobody{i}", 1), (), ())
        assert taken(coordinator, sender, msg.Result(header))
        assert taken(coordinator, Voter(f"nobody{i}", 1), msg.Contrib(TRAIN, b"another", 0, 1.0, 1, b"x"))
        assert taken(coordinator, sender, dataclasses.replace(ready, channel=f"name{i}"))
    assert 10 <= len(kept._early) < 200 and len(kept.dropped) <= 50
    assert len(coordinator.node.coordinator.agenda._ready) <= 11
    stage.all_in()
