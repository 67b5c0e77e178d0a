"""Machines beside the log: their messages pass whatever state the log is in, and a node may have no log at all."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from dlc.comm import messages as msg
from dlc.comm.effects import Dial, Effect, Notify, Send
from dlc.comm.ids import Ballot, PeerId, Voter
from dlc.comm.node import AT_LENGTH_BYTES_MIN, Node, NodeConfig
from dlc.comm.service import MemberEvent
from dlc.errors import ProtocolError, UsageError
from tests.comm.swim_net import record_of, seal, signed, verify


@dataclass(frozen=True)
class Shout:
    text: str


class Echo:
    """Answers what it hears, and keeps what it was told."""

    takes: tuple[type, ...] = (Shout,)

    def __init__(self) -> None:
        self.heard: list[tuple[Voter, str]] = []
        self.members: list[MemberEvent] = []

    def receive(self, sender: Voter, message: object, now: float) -> list[Effect]:
        assert isinstance(message, Shout)
        self.heard.append((sender, message.text))
        return [Send(sender.peer, Shout(message.text + "!"))] if not message.text.endswith("!") else []

    def tick(self, now: float) -> list[Effect]:
        return []

    def next_deadline(self) -> float | None:
        return None

    def member(self, event: MemberEvent, now: float) -> list[Effect]:
        self.members.append(event)
        return []

    def pending_bulk(self) -> list[PeerId]:
        return ["b"]

    def next_bulk(self, peer: PeerId) -> msg.Bulk | None:
        return None

    def bulk_peers(self) -> list[PeerId]:
        return ["b"]

    @property
    def resting(self) -> bool:
        return False


def node(name: str, log: bool) -> Node:
    return Node(
        record_of(name),
        NodeConfig("run", b"", b"", founder=True, log=log),
        sign=lambda record: replace(record, signature=seal(record)),
        verify=verify,
        rng=random.Random(name),
        now=0.0,
    )


@pytest.mark.parametrize("log", [True, False])
def test_messages_of_a_service_pass_while_the_log_is_stale(log: bool) -> None:
    at, echo, other = node("a", log), Echo(), Voter("b", 1 << 32)
    at.services.add(echo)
    at.tick(0.0)
    at.ctx.stale, at.absence._since = True, None  # as after a freeze, for ever: nothing may be promised or voted for
    assert Send("b", Shout("hi!")) in at.receive(other, Shout("hi"), 0.1) and at.ctx.stale
    assert echo.heard == [(other, "hi")]
    assert at.pending_bulk() == {"b"} and at.bulk_peers() == {"b"}


def test_what_a_service_sends_to_its_own_peer_comes_back_at_once() -> None:
    at, echo = node("a", False), Echo()
    at.services.add(echo)
    effects = at.serve(lambda: [Send("a", Shout("me"))], 0.0)
    assert [text for _, text in echo.heard] == ["me", "me!"] and not [e for e in effects if isinstance(e, Send)]


def test_services_hear_who_comes_and_leaves() -> None:
    at, echo, record = node("a", False), Echo(), record_of("b")
    at.services.add(echo)
    at.tick(0.0)
    met = replace(record, signature=seal(record))
    at.receive(met.voter, msg.Ping(1, msg.Gossip((met,), ())), 0.1)
    left = replace(met, left=True, seq=1)
    at.receive(met.voter, msg.Leave(replace(left, signature=seal(left))), 0.2)
    assert [type(event).__name__ for event in echo.members] == ["MemberLeft"]


def test_what_membership_finds_out_in_the_middle_of_an_event_is_told_when_that_ends() -> None:
    at, echo, met = node("a", False), Echo(), signed(record_of("b"))
    at.services.add(echo)
    at.tick(0.0)
    at.receive(met.voter, msg.Ping(1, msg.Gossip((met,), ())), 0.1)
    done: list[str] = []

    def aside(work: Callable[[], None], effects: list[Effect]) -> None:
        left = signed(met, left=True, seq=1)
        answers = at.breathe(3.0, met.voter, msg.Ping(2, msg.Gossip((left,), ())))
        assert [type(e.message) for e in answers if isinstance(e, Send)] == [msg.Ack]
        assert not any(isinstance(e, Notify) for e in answers) and not echo.members and not effects
        done.append("meanwhile")
        work()

    at.work_aside(aside)
    at.serve(lambda: at.ctx.at_length(lambda: done.append("short"), AT_LENGTH_BYTES_MIN - 1) or [], 0.2)
    assert done == ["short"]
    effects = at.serve(lambda: at.ctx.at_length(lambda: done.append("work"), AT_LENGTH_BYTES_MIN) or [], 0.3)
    assert done == ["short", "meanwhile", "work"]
    assert [type(e.event) for e in effects if isinstance(e, Notify)] == [type(event) for event in echo.members]
    assert [type(event).__name__ for event in echo.members] == ["MemberLeft"] and at.ctx.now == 3.0


def test_what_membership_finds_out_beside_an_event_is_told_with_the_next_one() -> None:
    """To copy the state for the application is none; that a newer process of mine runs is told only once."""
    at, echo, met = node("a", False), Echo(), signed(record_of("b"))
    at.services.add(echo)
    at.tick(0.0)
    at.receive(met.voter, msg.Ping(1, msg.Gossip((met,), ())), 0.1)
    newer = signed(replace(record_of("a"), voter=Voter("a", record_of("a").voter.inc + 1)))

    def aside(work: Callable[[], None], effects: list[Effect]) -> None:
        at.breathe(0.5, met.voter, msg.Ping(2, msg.Gossip((signed(met, left=True, seq=1), newer), ())))
        work()

    at.work_aside(aside)
    at.ctx.at_length(lambda: None, AT_LENGTH_BYTES_MIN)
    told = [type(e.event).__name__ for e in at.tick(0.6) if isinstance(e, Notify)]
    assert sorted(told) == ["MemberLeft", "SelfReplaced"]
    assert [type(event).__name__ for event in echo.members] == ["MemberLeft"]
    assert not [e for e in at.tick(0.7) if isinstance(e, Notify)]


def test_who_dials_in_the_middle_of_an_event_says_which_address_it_dials() -> None:
    """Or the answer would count for no listed address."""
    record = record_of("a")
    config = NodeConfig("run", b"", b"", listed=("127.0.0.1:5",))
    at = Node(
        record,
        config,
        sign=lambda r: replace(r, signature=seal(r)),
        verify=verify,
        rng=random.Random(1),
        now=0.0,
    )
    at.tick(0.0)
    dialled = [e.message for step in range(1, 200) for e in at.breathe(step * 0.05) if isinstance(e, Dial)]
    assert dialled and {m.address for m in dialled if isinstance(m, msg.Hello)} == {"127.0.0.1:5"}


def test_who_slept_in_the_middle_of_an_event_finds_it_out_after_it() -> None:
    at, met = node("a", True), signed(record_of("b"))
    at.tick(0.0)
    late_s = 10 * at.config.timeouts.t_gap_s()

    def aside(work: Callable[[], None], effects: list[Effect]) -> None:
        assert not at.breathe(late_s, met.voter, msg.Ping(2, msg.Gossip((met,), ())))
        work()

    at.work_aside(aside)
    at.serve(lambda: at.ctx.at_length(lambda: None, AT_LENGTH_BYTES_MIN) or [], 0.1)
    assert not at.absence.woken
    at.tick(late_s + 0.1)
    assert at.absence.woken


def test_without_a_log_nothing_is_founded_and_its_messages_are_refused() -> None:
    at = node("a", False)
    for second in range(1, 60):
        effects = at.tick(second / 10)
    assert not at.log.state.electorate and not effects
    with pytest.raises(ProtocolError, match="this run has none"):
        at.receive(Voter("b", 1), msg.Nack(b"", Ballot(1, Voter("b", 1))), 6.0)
    with pytest.raises(ProtocolError):
        at.receive(Voter("b", 1), Shout("nobody here takes it"), 6.0)


def test_two_services_cannot_take_one_kind_of_message() -> None:
    at, echo = node("a", False), Echo()
    at.services.add(echo)
    with pytest.raises(UsageError, match="takes Shout already"):
        at.services.add(Echo())
    at.services.remove(echo)
    at.services.add(Echo())
