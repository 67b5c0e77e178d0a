"""Who takes part, on a virtual clock: peers show it on the board, and hours may pass between two exchanges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from dlc import moshpit
from dlc.comm.board import REPEAT_MAX_S
from dlc.comm.calls import Call
from dlc.comm.mesh import Mesh
from dlc.comm.meshmessages import Place
from dlc.gossip import Gossip
from dlc.handles import Flag
from dlc.handover import Handover
from dlc.moshpit import Moshpit, _Met
from dlc.peer import Peer
from dlc.places import PLACE_BYTES_MAX, Places, _place
from dlc.report import GroupReport, Share
from dlc.sim.meshnet import DETECT_S, MeshNet
from tests.comm.netpeer import NetPeer

PHASE_S = 67.5 * 60
"""Inner steps between two exchanges of OpenDiLoCo's largest run."""


@pytest.mark.parametrize("end", ["close", "kill", "leave"])
def test_a_peer_keeps_its_place_through_phases_of_any_length_and_loses_it_with_its_end(end: str) -> None:
    net = MeshNet(1)
    hosts = net.add(2)
    one, two = (cast(Peer, NetPeer(net, host)) for host in hosts)
    places = [(Gossip(peer, "x"), Moshpit(peer, "x", group_size=2), Handover(peer, "x", 4)) for peer in (one, two)]
    for _, _, handover in places:
        handover.stand(1, torch.zeros(4))
    gossip, moshpit, handover = places[0]

    def seen() -> tuple[bool, bool, bool]:
        """Whether the other one is there to gossip with, to average with, and to take a model from."""
        return two.voter in gossip._members(), two.id in moshpit._leg().peers, bool(handover.standings())

    net.run(1.0)
    assert seen() == (True, True, True)
    net.run(PHASE_S)
    assert seen() == (True, True, True)
    for place in places[1] if end == "close" else ():
        place.close()
    if end != "close":
        getattr(net, end)(hosts[1])
    net.run(DETECT_S + REPEAT_MAX_S)
    moshpit._course.passed()
    assert seen() == (False, False, False)


def test_what_is_too_long_for_a_place_is_not_kept() -> None:
    """Whoever showed something else each time had all others keep hundreds of megabytes of it."""
    net = MeshNet(1)
    one, two = (cast(Peer, NetPeer(net, host)) for host in net.add(2))
    here, there = Places(one, "x", everybody=True), Places(two, "x", everybody=True)
    _place.cache_clear()
    two.mesh.act(lambda mesh, now: mesh.post("place/x", bytes(PLACE_BYTES_MAX + 1), 60.0, now))
    net.run(1.0)
    assert one.mesh.ask(lambda mesh, now: mesh.board.get("place/x"))
    assert not here.ask().places and not _place.cache_info().currsize
    there.trains(7, ())
    net.run(1.0)
    assert here.ask().places[two.id].round == 7 and _place.cache_info().currsize == 1


class Waiter(NetPeer):
    """Whoever waits looks at it now and then, and the others go on meanwhile."""

    def ask(self, fn: Callable[[Mesh, float], Any]) -> Any:
        self.net.run(0.05)
        return super().ask(fn)


def test_a_fetch_that_is_interrupted_writes_no_more_and_the_next_one_has_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C in a notebook: the rest went on being written, and the next fetch of the same model waited for an hour."""

    def interrupted(self: Flag, timeout_s: float | None = None) -> bool:
        raise KeyboardInterrupt

    net, numel, kinds = MeshNet(1), 200_000, (NetPeer, Waiter)
    peers = (cast(Peer, kind(net, host)) for kind, host in zip(kinds, net.add(2), strict=True))
    shows, takes = (Handover(peer, "x", numel) for peer in peers)
    shows.stand(1, torch.ones(numel))
    net.until(takes.standings)
    out = torch.zeros(numel)
    with monkeypatch.context() as at_once:
        at_once.setattr(Flag, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            takes.fetch(out)
    net.run(10.0)
    assert not out.any()
    monkeypatch.setattr("dlc.handover.FETCH_S", 10.0)
    assert takes.fetch(out) == 1 and bool((out == 1.0).all())


def test_the_furthest_model_that_is_finite_is_taken_and_memory_is_given_back_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Flag, "wait", lambda self, timeout_s=None: self.is_set())
    net, numel = MeshNet(1), 1000
    *givers, taker = net.add(4)
    many = [Handover(cast(Peer, NetPeer(net, host)), "x", numel) for host in givers]
    takes = Handover(cast(Peer, Waiter(net, taker)), "x", numel)
    for t, handover in enumerate(many, 1):
        vector = torch.full((numel,), float(t))
        vector[-1] = float("nan") if t == 3 else 7.0
        handover.stand(t, vector)
    net.until(lambda: len(takes.standings()) == 3)
    out = torch.zeros(numel)
    assert takes.fetch(out) == 2 and float(out[0]) == 2.0 and float(out[-1]) == 7.0
    for handover in many:
        handover.close()
    assert not any(host.mesh.parcels.holdings._held for host in givers) and not taker.mesh.parcels._intakes


def test_a_gift_that_is_being_pulled_is_waited_for_though_its_giver_is_through_with_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Flag, "wait", lambda self, timeout_s=None: self.is_set())
    net = MeshNet(1)
    (slow,), (other,) = net.add(1, up_Bps=500.0), net.add(1)
    gives, takes = (
        Gossip(cast(Peer, NetPeer(net, slow)), codec="fp32"),
        Gossip(cast(Peer, Waiter(net, other)), codec="fp32"),
    )
    net.run(1.0)
    for gossip in (takes, gives, takes):
        gossip.step(torch.ones(500), wait_s=0.0)
        net.run(10.0)
    gives.t = takes.t
    gives.step(torch.ones(500), wait_s=0.0)
    machine = takes._machine
    net.until(lambda: machine is not None and machine.coming)
    report = takes.step(torch.ones(500), wait_s=60.0)
    assert report.t == gives.t and set(report.took) == {slow.name}


def test_a_gossip_that_is_closed_before_its_first_step_refuses_at_once_what_comes_for_it() -> None:
    """Its giver had it back after a minute only, and gave this peer nothing until then."""
    net = MeshNet(1)
    one, two = (cast(Peer, NetPeer(net, host)) for host in net.add(2))
    gives, never = Gossip(one), Gossip(two)
    net.run(1.0)
    never.close()
    gives._members = lambda: {two.voter: Place(1, 1.0, b"", 1)}  # type: ignore[method-assign]  # as it did not hear of it yet
    assert set(gives.step(torch.ones(4), wait_s=0.0).gave) == {two.id}
    net.run(1.0)
    assert set(gives.step(torch.ones(4), wait_s=0.0).returned) == {two.id}


def moshpits(net: MeshNet) -> Moshpit:
    """That of the first of two."""
    first, _ = [Moshpit(cast(Peer, NetPeer(net, host)), group_size=2, codec="fp32") for host in net.add(2)]
    net.run(1.0)
    return first


def test_who_goes_on_to_ever_later_rounds_of_the_others_does_not_follow_them_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For twice as long as it would wait in one."""
    pit, now, patience = moshpits(MeshNet(1)), [100.0], list[float]()
    monkeypatch.setattr(moshpit, "clock", lambda: now[0])

    def gone_on(call: Call, told: object, formed: object) -> None:
        patience.append(call.patience_s)
        now[0] += 3.0
        assert len(patience) < 10

    monkeypatch.setattr(pit, "_meet", gone_on)
    report = pit.step(torch.ones(4))
    assert patience == [5.0, 5.0, 4.0, 1.0] and "for long enough" in report.failed[0]


def test_a_part_of_a_mean_that_is_without_the_own_one_gets_that_with_its_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its owner died after it had some of the others; in the rest of the mean this peer is."""
    pit, x = moshpits(MeshNet(1)), torch.zeros(4)
    shares = (Share(pit.peer.id, 2.0, 0.5), Share("other", 6.0, 1.0))
    report = GroupReport("g", shares, (), {}, {}, {}, 8.0, 0, 0, 0.0, 0.0)
    met = _Met(report, torch.full((4,), 8.0), frozenset([0]), "", (), frozenset())
    monkeypatch.setattr(pit, "_meet", lambda *args: met)
    pit.step(x, weight=2.0)
    assert x.tolist() == [6.0] * 4
