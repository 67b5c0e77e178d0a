"""`PeerSwarm` without sockets: where it takes more peers than a machine has room for, over memberships on a virtual
clock, and where it depends on which of two threads is first."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from dlc.comm.detector import HEARTBEATS_MAX
from dlc.comm.membership import Membership
from dlc.compat.hivemind import peer_swarm
from dlc.compat.hivemind.averaging.control import StepControl
from dlc.compat.hivemind.peer_swarm import PeerSwarm
from dlc.compat.hivemind.swarm import Notice, Terms
from dlc.errors import RoundTimeout
from tests.comm.swim_net import Net
from tests.helpers import TICK_S, interrupted_at, wait_until


def swarm_of(members: Membership) -> PeerSwarm:
    mesh = SimpleNamespace(ground=SimpleNamespace(members=members))

    def ask(read: Any) -> Any:
        return read(mesh, 0.0)

    return PeerSwarm(Mock(id=members.me.peer, mesh=Mock(ask=ask)))


def test_a_newcomer_warns_of_who_lives_and_is_silent_and_not_of_who_was_killed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever joined a run in which a peer had been killed was told that not all had told what they know."""
    monkeypatch.setattr(peer_swarm, "HELLO_S", TICK_S)
    killed, slow = (SimpleNamespace(id=name, alive=name == "slow", left=False) for name in ("killed", "slow"))
    swarm = PeerSwarm(Mock(id="me", mesh=Mock(ask=lambda read: [])))
    for here, told in (([killed], ""), ([killed, slow], "slow did not tell what they know")):
        monkeypatch.setattr(swarm._peer, "members", lambda here=here: here)
        caplog.clear()
        swarm._greet()
        warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert [text.partition(" within")[0] for text in warned] == ([told] if told else [])


def test_nobody_who_lives_is_missed_in_a_swarm_too_large_to_ping_all_of_it_and_the_dead_are() -> None:
    net, names = Net(), [f"p{i:02d}" for i in range(HEARTBEATS_MAX + 4)]
    for name in names:
        net.start(name, names[0])
    first = swarm_of(net.hosts[names[0]].machine)
    net.run_until(lambda: len(first.present()) == len(names), 120.0)
    for _ in range(10):
        net.run(1.0)
        assert first.present() == set(names)
    net.crash(names[-1])
    net.run_until(lambda: len(first.present()) < len(names), 120.0)
    assert first.present() == set(names[:-1])


@pytest.mark.parametrize("begun", [False, True])
def test_who_gives_up_a_call_that_begins_goes_on_when_it_is_cancelled(
    begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went on at once, and the others took the call that was cancelled later into their group."""
    control, order = StepControl(0.0, float("inf"), allow_retries=False, weight=1.0, number=-1), list[str]()

    def give_up() -> None:
        control.cancel()
        order.append("goes on")

    def begin(*_: Any, **__: Any) -> Mock:
        order.append("begins")
        giving_up.start()
        wait_until(lambda: control.cancelled() and (waits.is_set() or not giving_up.is_alive()))
        wait = Mock(side_effect=RoundTimeout("no"))
        return Mock(cancel=lambda: order.append("cancelled"), wait=wait, members=("me",))

    waits, giving_up = threading.Event(), threading.Thread(target=give_up)
    terms = Mock(patience_s=1.0, budget_s=1.0)
    terms.when_given_up = lambda end: control.add_done_callback(lambda _: (waits.set(), end()))
    monkeypatch.setattr(peer_swarm, "Group", Mock(return_value=Mock(begin=begin, matchmaking_s=1.0)))
    swarm = swarm_of(Mock(me=Mock(peer="me")))
    if not begun:
        give_up()
        assert swarm.average("key", [(torch.zeros(1), "fp32")], terms) is None and order == ["goes on"]
        return
    with pytest.raises(RoundTimeout):
        swarm.average("key", [(torch.zeros(1), "fp32")], terms)
    giving_up.join()
    assert order == ["begins", "cancelled", "goes on"]


def test_who_is_interrupted_before_all_have_told_what_they_know_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """It went on as a member that nobody could let leave, and its port stayed taken."""
    peer = Mock(id="me")
    peer.mesh.act.side_effect = KeyboardInterrupt
    monkeypatch.setattr(peer_swarm.Peer, "join", Mock(return_value=peer))
    with pytest.raises(KeyboardInterrupt):
        PeerSwarm.join([], listen="127.0.0.1:0", advertise=None, key=None, state_dir=None, timeout_s=1.0)
    peer.leave.assert_called_once_with()


def test_ctrl_c_at_any_line_of_a_wait_for_the_others_keeps_nobody_from_leaving() -> None:
    """The lock of an event was kept, and `leave` waited for it for ever."""
    at, came = 0, True
    while came:
        at += 1
        swarm = PeerSwarm(Mock(id="me"))
        came = interrupted_at(at, partial(swarm._closed.wait, TICK_S))
        leaving = threading.Thread(target=swarm.leave, daemon=True)
        leaving.start()
        leaving.join(10.0)
        assert not leaving.is_alive(), at
    assert at > 5, "as a wait has some lines"


def test_a_newcomer_waits_for_nobody_who_is_dead_and_for_whom_another_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each who joined a run in which a peer had been killed waited for three seconds."""
    swarm = PeerSwarm(Mock(id="me"))
    told = [Notice("heir", "hello/heir", b""), Notice("heir", "hello/killed", b""), Notice("heir", "hello/back", b"")]
    monkeypatch.setattr(swarm, "notices", lambda prefix: told)
    here = [SimpleNamespace(id=name, alive=name != "killed", left=False) for name in ("heir", "killed", "back")]
    monkeypatch.setattr(swarm._peer, "members", lambda: here)
    assert swarm._silent() == {"back": True}, "who lives tells it itself"


def test_further_parts_are_averaged_by_those_of_the_first_and_all_who_lack_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Strangers would have another mean of the first part; and who is left alone keeps what it has of the others."""
    came = [{"a": b"x", "b": b"y", "c": b"z"}, {"a": b"", "c": b""}]
    lack = [[SimpleNamespace(peer="b", reason="died")], [SimpleNamespace(peer="c", reason="late")]]
    made: list[tuple[str, dict[str, Any]]] = []

    class Fake:
        def __init__(self, peer: object, key: str, **options: Any) -> None:
            made.append((key, options))
            self.matchmaking_s, self.at = options["matchmaking_s"], len(made) - 1

        def begin(self, vector: torch.Tensor, **how: Any) -> SimpleNamespace:
            assert how["keeps_unsaid"]
            report = SimpleNamespace(gathered=came[self.at], missing=lack[self.at])
            return SimpleNamespace(wait=lambda: report, mean=vector + how["weight"], members=("a",))

    monkeypatch.setattr(peer_swarm, "Group", Fake)
    swarm = PeerSwarm(SimpleNamespace(id="a"))  # type: ignore[arg-type]
    monkeypatch.setattr(swarm, "_hello", lambda: None)
    terms = Terms(
        target=3,
        minimum=3,
        data=b"",
        weight=2.0,
        contributes=True,
        owns=True,
        keeps_unsaid=True,
        patience_s=1.0,
        budget_s=1.0,
        expected=frozenset,
        when_given_up=lambda end: None,
        formed=lambda: None,
    )
    parts = [(torch.zeros(2), "fp32"), (torch.ones(3), "fp16")]
    outcome = swarm.average("key", parts, terms)
    assert outcome is not None and outcome.members == ("a", "b", "c") and outcome.data == came[0]
    assert outcome.missing == {"b": "died", "c": "late"}
    assert [(vector.tolist(), codec) for vector, codec in parts] == [([2.0] * 2, "fp32"), ([3.0] * 3, "fp16")]
    (_, first), (key, second) = made
    assert first["peers"] is None and (first["target_size"], first["min_size"]) == (3, 3)
    assert key == "key/1" and second["peers"] == ["a", "b", "c"]
    assert (second["target_size"], second["min_size"], second["expected"]) == (None, 1, None)
