"""Averaging without the log over real peers on loopback."""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import queue
import signal
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import dlc
from dlc import gossip as gossip_module
from dlc.comm.calls import MISFIT, Call, GroupFormed
from dlc.comm.cells import grid_of
from dlc.comm.driver import Reply
from dlc.comm.effects import Effect
from dlc.comm.gossip import RECLAIM_S, Share, absorb
from dlc.comm.grid import Grid
from dlc.comm.ids import Voter
from dlc.comm.mesh import Mesh
from dlc.comm.meshmessages import Place
from dlc.comm.moshpit import Leg
from dlc.comm.service import ServiceNews
from dlc.comm.wire import pack
from dlc.errors import RoundTimeout, SwarmClosed, UsageError
from dlc.gossip import _unbroken
from dlc.mesh import GroupCall
from dlc.served import Served
from dlc.sim.meshnet import MeshNet
from tests.comm.netpeer import NetPeer
from tests.helpers import TICK_S, interrupted_at, wait_until
from tests.swarm import late_for_its_partner, swarm

LONG_S = 240.0
MEET_S = LONG_S / 2
"""For the others to come; the rest is for the exchange."""


def know_each_other(peers: list[dlc.Peer]) -> None:
    wait_until(lambda: all(sum(m.alive for m in p.members()) == len(peers) for p in peers), LONG_S)


def shown(peer: dlc.Peer, key: str) -> int:
    """How many show a notice of this key."""
    return peer.mesh.ask(lambda mesh, now: len(mesh.board.get(key)))


def waiting(gossip: dlc.Gossip) -> float:
    """Weight that came after the last step."""
    machine = gossip._machine
    assert machine is not None
    return gossip._ask(lambda: sum(share.weight for share in machine._arrivals.taken))


def settled(gossip: dlc.Gossip) -> bool:
    """None of its gifts is on its way."""
    machine = gossip._machine
    return machine is not None and not gossip._ask(lambda: machine.unsettled)


def test_groups_of_those_who_show_up_named_ones_and_clients() -> None:
    with swarm(4, log=False) as peers, ThreadPoolExecutor(4) as pool:
        know_each_other(peers)
        given = [torch.randn(50_000, generator=torch.Generator().manual_seed(i)) for i in range(4)]
        held = [[g[:40_000].clone().view(200, 200), g[40_000:].clone().bfloat16()] for g in given]
        groups = [dlc.Group(p, "all", codec="fp32", matchmaking_s=MEET_S) for p in peers]
        reports = list(
            pool.map(
                lambda i: groups[i].all_reduce(held[i], weight=i + 1.0, gather=bytes([i]), timeout_s=LONG_S), range(4)
            )
        )
        mean = sum((i + 1) * given[i][:40_000].double() for i in range(4)) / 10
        for i, report in enumerate(reports):
            assert report.complete and len(report.contributors) == 4 and report.weight == 10.0
            assert report.gathered == {p.id: bytes([j]) for j, p in enumerate(peers)}
            torch.testing.assert_close(held[i][0].flatten().double(), mean, rtol=1e-6, atol=1e-6)
            assert held[i][1].dtype == torch.bfloat16 and report.bytes_received > 0
        pair = [peers[0].id, peers[2].id]
        alone = [torch.full((10,), float(i)) for i in range(4)]
        some = [dlc.Group(p, "some", matchmaking_s=MEET_S) for p in peers]
        for report in pool.map(lambda i: some[i].all_reduce(alone[i], receives=i < 3, timeout_s=LONG_S), range(4)):
            assert report.complete and report.weight in (4.0, 0.0), report.summary()  # 0: it has reduced nothing
        assert [float(x[0]) for x in alone] == [1.5, 1.5, 1.5, 3.0]
        alone = [torch.full((10,), float(i)) for i in range(4)]
        two = [dlc.Group(peers[i], "pair", peers=pair, owns=i == 0, matchmaking_s=MEET_S) for i in (0, 2)]
        told = list(pool.map(lambda k: two[k].all_reduce(alone[2 * k], timeout_s=LONG_S), range(2)))
        assert torch.equal(alone[0], torch.ones(10)) and torch.equal(alone[2], torch.ones(10))
        assert all(r.owned == {peers[0].id: 1.0} for r in told) and "2 of 2 peers" in told[0].summary()


def lose_parcels(peer: dlc.Peer) -> Callable[[], None]:
    """Those that come here are lost, as with a connection, until what it gives is called: what is lacking then is asked
    for again after some silence, of two seconds at least."""

    def lose(mesh: Mesh, now: float) -> Callable[[], None]:
        take, losing = mesh.parcels.receive_parcel, cast(Any, mesh.parcels)
        losing.receive_parcel = lambda sender, parcel: None
        return partial(setattr, losing, "receive_parcel", take)

    return peer.mesh.ask(lose)


@pytest.mark.parametrize("how", ["leave", "Ctrl-C", "at once"])
def test_who_leaves_right_after_a_mean_stays_until_the_others_have_it(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that ended after its last call took its part of the mean along, and the other had its own values."""
    stays = how == "leave"
    with swarm(2, log=False) as peers:
        know_each_other(peers)
        owner, other = sorted(peers, key=lambda peer: peer.voter)
        find_again = lose_parcels(other)
        groups = [dlc.Group(peer, "last", codec="fp32", matchmaking_s=MEET_S) for peer in (owner, other)]
        calls = [group.begin(torch.full((8,), 2.0 * i), timeout_s=LONG_S) for i, group in enumerate(groups)]
        calls[0].wait(LONG_S)
        assert owner.needed_by() == (other.id,)
        if how == "Ctrl-C":
            monkeypatch.setattr(owner, "_wait", lambda *args: signal.raise_signal(signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                owner.leave(LONG_S)
        else:
            if stays:
                find_again()
            owner.leave(LONG_S if stays else 0.0)
        assert not owner._driver.running
        report = calls[1].wait(LONG_S)
        assert len(report.contributors) == (2 if stays else 1) and report.complete == stays
        assert calls[1].mean is not None and torch.equal(calls[1].mean, torch.full((8,), 1.0 if stays else 2.0))


def test_who_leaves_does_not_wait_for_what_begins_meanwhile_nor_on_the_drivers_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = list[str]()

    def owed(mesh: Mesh) -> dict[tuple[str, int], frozenset[str]]:
        looks.append("look")
        return {("first" if len(looks) == 1 else "later", 1): frozenset({"x"})}

    with swarm(1, log=False) as (peer,), monkeypatch.context() as patch:
        patch.setattr(Mesh, "owed", owed)
        peer._see_off(LONG_S)
        assert len(looks) == 2
        peer._driver.ask(lambda now: peer._see_off(LONG_S))
        assert len(looks) == 2, "that thread has to talk to those whom it would wait for"


def test_who_leaves_right_after_a_step_of_gossip_stays_until_what_it_gave_is_taken() -> None:
    with swarm(2, log=False) as peers:
        know_each_other(peers)
        gossips = [dlc.Gossip(peer, "last", graph="ring", codec="fp32") for peer in peers]
        wait_until(lambda: all(len(g._members()) == 1 for g in gossips), LONG_S)
        gossips[1]._begun(8)
        find_again = lose_parcels(peers[1])
        gossips[0].step(torch.zeros(8), wait_s=0.0)
        assert peers[0].needed_by() == (peers[1].id,)
        find_again()
        peers[0].leave(LONG_S)
        assert waiting(gossips[1]) > 0.0


def test_what_is_begun_is_sent_from_where_it_lies_and_its_mean_is_another_vector() -> None:
    with swarm(3, log=False) as peers, ThreadPoolExecutor(3) as pool:
        know_each_other(peers)
        given = [torch.full((5000,), float(i)) for i in range(3)]
        groups = [dlc.Group(p, "flat", codec="fp32", matchmaking_s=MEET_S) for p in peers]
        calls = [groups[0].begin(given[0], weight=3.0, receives=False, timeout_s=LONG_S)]
        assert calls[0]._call.vector is given[0], "the others have not come yet"
        calls += [groups[i].begin(given[i], weight=3.0, contributes=i != 2, timeout_s=LONG_S) for i in (1, 2)]
        assert all(report.complete for report in pool.map(GroupCall.wait, calls))
        assert not any(call._call.vector is not None for call in calls), "what is over holds no contribution"
        assert calls[0].mean is None
        for call in calls[1:]:
            assert call.mean is not None and torch.equal(call.mean, torch.full((5000,), 0.5))
        assert [torch.equal(vector, torch.full((5000,), float(i))) for i, vector in enumerate(given)] == [True] * 3
        with pytest.raises(UsageError, match="at least one element"):
            groups[0].begin(torch.empty(0))


@pytest.mark.parametrize("keeps", [True, False])
def test_what_the_codec_rounds_off_stays_with_its_peer_where_that_is_wanted(keeps: bool) -> None:
    given = 1.0 + 2.0**-12  # fp16 makes it 1
    with swarm(2, log=False) as peers:
        know_each_other(peers)
        groups = [dlc.Group(p, "fine", target_size=2, matchmaking_s=MEET_S, codec="fp16") for p in peers]
        calls = [group.begin(torch.full((100,), given), keeps_unsaid=keeps, timeout_s=LONG_S) for group in groups]
        for call in calls:
            call.wait()
            assert call.mean is not None and torch.equal(call.mean, torch.full((100,), given if keeps else 1.0))


def test_a_group_that_is_over_leaves_no_vector_to_the_garbage_collector() -> None:
    """It may be gigabytes, and the next group needs as much anew: a program of few objects runs it seldom."""
    with swarm(2, log=False) as peers:
        know_each_other(peers)
        gc.collect()
        gc.disable()
        try:
            calls = [dlc.Group(p, "g", target_size=2, matchmaking_s=MEET_S).begin(torch.ones(1000)) for p in peers]
            for call in calls:
                call.wait()
            means = [weakref.ref(call.mean) for call in calls]
            del call, calls
            wait_until(lambda: not any(mean() is not None for mean in means), what="both means are given back")
        finally:
            gc.enable()


def test_a_call_that_begins_as_another_of_its_name_ends_has_none_of_its_news(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be over at once, with the other's report and a mean that nobody has written."""
    with swarm(2, log=False) as peers:
        know_each_other(peers)
        groups = [dlc.Group(p, "again", codec="fp32", matchmaking_s=MEET_S) for p in peers]
        first = groups[0].begin(torch.zeros(8), timeout_s=LONG_S)
        act = Served.act

        def late(mesh: Served[Mesh], fn: Callable[[Mesh, float], list[Effect]]) -> None:
            monkeypatch.setattr(Served, "act", act)
            groups[1].begin(torch.full((8,), 2.0), timeout_s=LONG_S).wait(LONG_S)
            first.wait(LONG_S)
            mesh.act(fn)

        monkeypatch.setattr(Served, "act", late)
        second = groups[0].begin(torch.full((8,), 4.0), timeout_s=LONG_S)
        assert second.stage == "waiting"
        groups[1].begin(torch.full((8,), 8.0), timeout_s=LONG_S).wait(LONG_S)
        second.wait(LONG_S)
        assert first.mean is not None and torch.equal(first.mean, torch.ones(8))
        assert second.mean is not None and torch.equal(second.mean, torch.full((8,), 6.0))


def test_a_call_that_ends_twice_at_once_ends_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled on one thread while the peer leaves on another: the second end must not keep others from theirs."""
    with swarm(1, log=False) as (peer,):
        call = dlc.Group(peer, "twice", matchmaking_s=LONG_S).all_reduce(torch.ones(8), async_op=True)
        assert isinstance(call, GroupCall)
        unlisten, second = Served.unlisten, [RoundTimeout("the other end")]

        def interrupted(served: Served[Mesh], listener: Callable[[ServiceNews], None]) -> None:
            if second:
                call._end(second.pop())
            unlisten(served, listener)

        monkeypatch.setattr(Served, "unlisten", interrupted)
        call.cancel()
        with pytest.raises(RoundTimeout, match="cancelled"):
            call.wait()


def test_what_is_no_peer_is_refused_by_that_name() -> None:
    made: list[Callable[[Any], object]] = [partial(dlc.Group, name="x"), dlc.Gossip, dlc.Moshpit, dlc.ParameterServer]
    for make in (*made, partial(dlc.ServerClient, theta=torch.zeros(8))):
        with pytest.raises(UsageError, match=r"peer is str: give what dlc\.Peer\.join\(...\) returned"):
            make("host:1")


def test_a_lonely_call_ends_a_call_given_up_frees_the_name_and_a_peer_that_leaves_says_so() -> None:
    with swarm(2, log=False) as peers:
        x = torch.ones(8)
        with pytest.raises(RoundTimeout, match="1 of at least 2 came"):
            dlc.Group(peers[0], "lonely", matchmaking_s=0.2).all_reduce(x)
        with pytest.raises(RoundTimeout, match="all who contribute give weight 0"):
            dlc.Group(peers[0], "weightless", min_size=1, matchmaking_s=0.2).all_reduce(x, weight=0.0)
        with pytest.raises(RoundTimeout, match="nobody came who contributes"):
            dlc.Group(peers[0], "idle", min_size=1, matchmaking_s=0.2).all_reduce(x, contributes=False)
        group = dlc.Group(peers[0], "later", matchmaking_s=LONG_S)
        call = group.all_reduce(x, async_op=True)
        assert isinstance(call, GroupCall) and call.stage == "waiting" and not call.done
        with pytest.raises(UsageError, match="already"):
            group.all_reduce(x)
        call.cancel()
        with pytest.raises(RoundTimeout, match="cancelled"):
            call.wait()
        with pytest.raises(RoundTimeout, match=r"expected\(\) raised ZeroDivisionError") as told:
            dlc.Group(peers[0], "odd", expected=lambda: [str(1 // 0)]).all_reduce(x)
        assert isinstance(told.value.__cause__, ZeroDivisionError)
        earlier, call = call, group.all_reduce(x, async_op=True)
        assert isinstance(call, GroupCall)
        earlier.cancel()  # it is over, so this changes nothing
        assert call.stage == "waiting"
        peers[0].leave()
        with pytest.raises(SwarmClosed):
            call.wait(LONG_S)
        assert torch.equal(x, torch.ones(8))
    with pytest.raises(UsageError, match="not this one"):
        dlc.Group(peers[1], "x", peers=["somebody"])


@pytest.mark.parametrize("kind", [ValueError, SystemExit])
def test_what_a_callback_of_a_group_raises_ends_no_peer(
    kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def raising(*_: object) -> list[str]:
        raise kind("of the user's own")

    with swarm(1, log=False) as (peer,):
        group = dlc.Group(peer, "alone", min_size=1, formed=raising, matchmaking_s=MEET_S)
        assert group.all_reduce(torch.ones(3), timeout_s=LONG_S).complete
        assert "of the user's own" in caplog.text
        with pytest.raises(RoundTimeout, match="of the user's own") as caught:
            dlc.Group(peer, "nobody", expected=raising, matchmaking_s=MEET_S).all_reduce(torch.ones(3))
        assert isinstance(caught.value.__cause__, kind) and peer.members()


def test_a_call_made_as_one_of_its_name_is_formed_is_not_told_of_that_ones_end() -> None:
    """A group of one is formed and done at once: its end was taken for that of the next call, which wrote what lay in
    fresh memory into the tensors."""
    calls, given = list[GroupCall](), torch.ones(3)
    with swarm(1, log=False) as (peer,):
        two = dlc.Group(peer, "x", min_size=2, matchmaking_s=0.1)
        one = dlc.Group(peer, "x", min_size=1, formed=lambda _: calls.append(two.all_reduce(given, async_op=True)))
        assert one.all_reduce(torch.zeros(3), timeout_s=LONG_S).complete
        with pytest.raises(RoundTimeout, match="1 of at least 2 came"):
            calls[0].wait(LONG_S)
        assert given.eq(1.0).all()


def test_a_callback_on_the_drivers_thread_that_would_wait_for_others_is_refused() -> None:
    """It waited for what only its own thread could bring: for ever, and with it everybody who used the peer."""
    waits, said = list[Callable[[], object]](), queue.SimpleQueue[str]()

    def refused(*_: object) -> None:
        while waits:
            try:
                waits.pop()()
            except UsageError as error:
                said.put(str(error))

    with dlc.Peer.join(log=False, on_event=refused) as peer:
        gossip, moshpit, client, x = (
            dlc.Gossip(peer),
            dlc.Moshpit(peer),
            dlc.ServerClient(peer, torch.ones(64)),
            torch.ones(4),
        )
        group = dlc.Group(peer, "inside", min_size=1, matchmaking_s=0.5)
        call = dlc.Group(peer, "on its way", target_size=2, matchmaking_s=MEET_S).all_reduce(x, async_op=True)
        of_group: list[Callable[[], object]] = [
            lambda: group.all_reduce(x, timeout_s=1.0),
            lambda: call.wait(1.0),
            lambda: gossip.step(x, wait_s=0.0),
            lambda: moshpit.step(x, timeout_s=1.0),
            lambda: moshpit.average(x, timeout_s=1.0),
            lambda: client.exchange(timeout_s=1.0),
            lambda: client.wait(1.0),
            lambda: client.poll(1.0),
        ]
        waits += of_group
        with dlc.Peer.join([peer.address], log=False):
            for _ in of_group:
                assert "cannot wait for the other peers" in said.get(timeout=MEET_S)
        waits += of_group[:2]
        formed = dlc.Group(peer, "formed", min_size=1, matchmaking_s=0.5, formed=refused)
        assert formed.all_reduce(x, timeout_s=LONG_S).complete
        for _ in range(2):
            assert "of a group" in said.get(timeout=MEET_S)
        call.cancel()
        assert group.all_reduce(x, timeout_s=LONG_S).complete, "nothing was offered"


def test_an_endless_time_limit_is_none() -> None:
    with swarm(1, log=False) as (peer,), ThreadPoolExecutor(1) as pool:
        call = dlc.Group(peer, "alone", matchmaking_s=LONG_S).all_reduce(torch.ones(3), async_op=True)
        with pytest.raises(UsageError, match="timeout_s is 'soon'"):
            call.wait("soon")  # type: ignore[arg-type]
        waited = pool.submit(call.wait, math.inf)
        wait_until(lambda: waited.running() or waited.done(), LONG_S)
        peer.leave(math.inf)
        with pytest.raises(SwarmClosed):
            waited.result(LONG_S)


def test_what_interrupts_the_call_of_a_group_gives_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler of an alarm raised, and no call of that name could be made until this one was over."""

    class Alarm(Exception):
        pass

    def interrupted(*args: object) -> None:
        monkeypatch.undo()
        raise Alarm

    with swarm(2, log=False) as peers:
        know_each_other(peers)
        group = dlc.Group(peers[0], "g", target_size=2, matchmaking_s=MEET_S)
        moshpits = [dlc.Moshpit(peer, "m", matchmaking_s=MEET_S) for peer in peers]
        wait_until(lambda: shown(peers[0], "moshpit/m") == 2, LONG_S)
        for call in (partial(group.all_reduce, torch.ones(3)), partial(moshpits[0].average, torch.ones(3))):
            for _ in range(2):
                monkeypatch.setattr(GroupCall, "wait", interrupted)
                with pytest.raises(Alarm):
                    call()


def test_an_exchange_that_has_begun_is_given_up_a_while_after_the_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlc.mesh.STOP_S", 0.2)
    with late_for_its_partner(LONG_S) as (owner, late):
        groups = [dlc.Group(peer, "g", target_size=2, matchmaking_s=MEET_S) for peer in (owner, late)]
        calls = [group.all_reduce(torch.ones(4), async_op=True, timeout_s=2 * LONG_S) for group in groups]
        calls[0].stopping = lambda: True
        wait_until(lambda: calls[0].members, LONG_S)
        assert owner.needed_by() == (), "it has no mean yet"
        with pytest.raises(RoundTimeout, match="given up"):
            calls[0].wait()


def test_gossip_of_pairs_comes_to_the_mean_and_tells_the_distance() -> None:
    with swarm(4, log=False) as peers, ThreadPoolExecutor(4) as pool:
        know_each_other(peers)
        given = [torch.randn(20_000, generator=torch.Generator().manual_seed(i)) for i in range(4)]
        mean = torch.stack(given).double().mean(0)
        held = [g.clone() for g in given]
        gossips = [dlc.Gossip(p, graph="exponential", codec="fp32") for p in peers]
        wait_until(lambda: all(len(g._members()) == 3 for g in gossips), LONG_S)

        def walk(i: int) -> list[dlc.GossipReport]:
            return [gossips[i].step(held[i], wait_s=LONG_S) for _ in range(12)]

        told = list(pool.map(walk, range(4)))
        for i, reports in enumerate(told):
            assert float((held[i].double() - mean).abs().max()) < 0.05
            apart = reports[-1].distance
            assert reports[-1].peers == 4 and apart is not None and apart < 0.1 * float(given[0].norm())
            assert not any(r.returned or r.overdrawn for r in reports) and reports[0].bytes_sent > 0
        assert sum(g.weight + waiting(g) for g in gossips) == pytest.approx(4.0)
        for gossip in gossips:
            gossip.close()


@pytest.mark.parametrize("where", ["while it waits", "while it takes in"])
def test_ctrl_c_in_a_step_of_gossip_loses_no_mass(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it had given and taken was in its weight, and not in its tensors."""
    with swarm(2, log=False) as peers:
        know_each_other(peers)
        gossips = [dlc.Gossip(p, "interrupted", graph="ring", codec="fp32") for p in peers]
        held = [torch.full((8,), 0.0), torch.full((8,), 8.0)]
        wait_until(lambda: all(len(g._members()) == 1 for g in gossips), LONG_S)
        gossips[0].step(held[0], wait_s=0.0)
        gossips[1].step(held[1], wait_s=0.0)
        wait_until(lambda: waiting(gossips[0]) > 0.0 and all(settled(g) for g in gossips), LONG_S)

        def interrupted(grid: Grid, z: torch.Tensor, weight: float, share: Share) -> float:
            os.kill(os.getpid(), signal.SIGINT)
            return absorb(grid, z, weight, share)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            if where == "while it waits":
                patch.setattr(gossips[0], "_wait", lambda *args: signal.raise_signal(signal.SIGINT))
            else:
                patch.setattr("dlc.gossip.absorb", interrupted)
            gossips[0].step(held[0], wait_s=0.0)
        assert float(held[0][0]) > 0.0, "what it took in"
        wait_until(lambda: all(settled(g) for g in gossips), LONG_S)
        for gossip, x in zip(gossips, held, strict=True):
            monkeypatch.setattr(gossip, "_give", lambda *args: [])
            gossip.step(x, wait_s=0.0)
        assert sum(g.weight for g in gossips) == pytest.approx(2.0)
        assert sum(g.weight * float(x[0]) for g, x in zip(gossips, held, strict=True)) == pytest.approx(8.0)


def test_ctrl_c_at_any_line_leaves_no_change_of_mass_half_done() -> None:
    """Where it came as the change ended, the thread that made it could not end; or it went on beside its caller."""
    begun, ended, pause = list[int](), list[int](), threading.Event()

    def change() -> int:
        begun.append(1)
        pause.wait(TICK_S)
        ended.append(1)
        return len(ended)

    at, interrupted = 0, True
    while interrupted:
        at += 1
        interrupted = interrupted_at(at, lambda: _unbroken(change))
        assert len(begun) == len(ended), at
    assert at > 10 and len(ended) < at, "some were interrupted before they had begun"


@pytest.mark.parametrize(("first", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_ctrl_c_at_any_line_of_a_step_of_gossip_loses_nothing_and_the_next_one_goes_on(
    first: bool, dtype: torch.dtype
) -> None:
    """Where it came before the exchange began, the next step took the whole estimate for what was learned since; in the
    midst of the tensors, what was given away was in them still; and in the first step there was none after it."""
    at, interrupted = 0, True
    while interrupted:
        at += 1
        net = MeshNet(1)
        peers = [cast(dlc.Peer, NetPeer(net, host)) for host in net.add(2)]
        gossips = [dlc.Gossip(peer, codec="fp32") for peer in peers]
        held = [torch.full((4,), 1.0 + 2 * i, dtype=dtype) for i in range(2)]
        net.run(0.4)
        for gossip, x in zip(gossips[first:], held[first:], strict=True):
            gossip.step(x, wait_s=0.0)
        net.run(0.4)
        if not first:
            held[0] += 8.0
        step = partial(gossips[0].step, held[0], wait_s=0.0)
        interrupted = interrupted_at(at, step, [gossip_module.__file__])
        net.run(0.4)
        for gossip, x in 2 * [*zip(gossips, held, strict=True)]:
            gossip._give = lambda *args: []  # type: ignore[method-assign]
            gossip.step(x, wait_s=0.0)
            net.run(0.4)
        assert sum(gossip.weight + waiting(gossip) for gossip in gossips) == pytest.approx(2.0), at
        told = sum(g.weight * (float(x[0]) + unsaid(g)) for g, x in zip(gossips, held, strict=True))
        assert told == pytest.approx(4.0 if first else 12.0, rel=1e-5), at
    assert at > 40


def unsaid(gossip: dlc.Gossip) -> float:
    """Of the first element of the tensors."""
    return 0.0 if gossip._unsaid is None else float(gossip._unsaid[0])


@pytest.mark.parametrize("t", [2**53, 2**64 - 1])
def test_a_member_that_tells_of_a_step_that_nobody_can_be_at_ends_no_other_s_gossip(t: int) -> None:
    """Each followed it there, and could tell of no step after it."""
    with swarm(3, log=False) as peers:
        know_each_other(peers)
        gossips = [dlc.Gossip(p, "far", codec="fp32") for p in peers[:2]]
        place = pack(Place(t, 1.0, b"", 0))
        peers[2].mesh.act(lambda mesh, now: mesh.post("gossip/far", place, 1000.0, now))
        wait_until(lambda: all(t in [p.t for p in g._members().values()] for g in gossips), LONG_S)
        for _ in range(3):
            told = [gossip.step(torch.ones(8), wait_s=0.0) for gossip in gossips]
        assert all(report.peers == 3 for report in told)


def test_what_a_fast_peer_learns_counts_and_is_not_given_away_to_a_slow_one() -> None:
    """With a gift in each step, a tenth of it was counted, of a peer that makes ten steps to the other's one."""
    with swarm(2, log=False) as peers, ThreadPoolExecutor(2) as pool:
        know_each_other(peers)
        fast, slow = (dlc.Gossip(p, "paces", codec="fp32") for p in peers)
        held, learned = [torch.zeros(8), torch.zeros(8)], 0
        wait_until(lambda: len(fast._members()) == len(slow._members()) == 1, LONG_S)

        def at_rest() -> bool:
            made = [place.made for gossip in (fast, slow) for place in gossip._members().values()]
            machines = [gossip._machine for gossip in (fast, slow)]
            busy = fast._ask(lambda: any(m is None or m.unsettled or m.coming for m in machines))
            return made == [slow._strides.made, fast._strides.made] and not busy

        list(pool.map(lambda g, x: g.step(x, wait_s=LONG_S), (fast, slow), held))
        for turn in range(1, 121):
            wait_until(at_rest, LONG_S)
            held[0] += 1.0
            learned += 1
            report = fast.step(held[0], wait_s=0.0)
            if turn % 10 == 0:
                slow.step(held[1], wait_s=0.0)
        wait_until(at_rest, LONG_S)
        list(pool.map(lambda g, x: g.step(x, wait_s=0.0), (fast, slow), held))
        assert report.weight > 0.3
        assert fast.weight * float(held[0][0]) + slow.weight * float(held[1][0]) > 0.5 * learned


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_peer_learns_moves_the_mean_by_its_part_though_nobody_waits_and_tensors_are_coarse(
    dtype: torch.dtype,
) -> None:
    """Half of each peer's weight is on its way between two steps; and a quarter of a bf16 number's last bit is nothing
    that bf16 can hold."""
    net, steps, bit = MeshNet(1), 16, 2.0**-7
    peers = [cast(dlc.Peer, NetPeer(net, host)) for host in net.add(4)]
    gossips = [dlc.Gossip(peer, graph="exponential", codec="fp32") for peer in peers]
    net.run(5.0)
    held = [torch.ones(4, dtype=dtype) for _ in gossips]
    for _ in range(steps):
        held[0] += bit
        for gossip, x in zip(gossips, held, strict=True):
            gossip.step(x, wait_s=0.0)
        net.run(3.0)
    mass = 0.0
    for gossip, x in zip(gossips, held, strict=True):
        gossip._give = lambda *args: []  # type: ignore[method-assign]
        gossip.step(x, wait_s=0.0)
        mass += gossip.weight * float(x[0])
    assert sum(gossip.weight for gossip in gossips) == pytest.approx(4.0)
    assert mass == pytest.approx(4.0 + steps * bit, abs=1e-4 if dtype is torch.float32 else 2 * bit)


def test_a_gossip_of_the_least_weights_makes_none_of_nothing() -> None:
    """Who had given half of the least was taken to hold the least still."""
    net = MeshNet(1)
    peers = [cast(dlc.Peer, NetPeer(net, host)) for host in net.add(2)]
    gossips = [dlc.Gossip(peer, codec="fp32", weight=n * 2.0**-20) for n, peer in zip((1, 4), peers, strict=True)]
    net.run(5.0)
    held = [torch.full((4,), float(i)) for i in range(2)]
    for _ in range(8):
        for gossip, x in zip(gossips, held, strict=True):
            gossip.step(x, wait_s=0.0)
        net.run(3.0)
    for gossip, x in zip(gossips, held, strict=True):
        gossip._give = lambda *args: []  # type: ignore[method-assign]
        gossip.step(x, wait_s=0.0)
    weights = [gossip.weight * 2.0**20 for gossip in gossips]
    assert sum(weights) == pytest.approx(5.0)
    assert sum(w * float(x[0]) for w, x in zip(weights, held, strict=True)) == pytest.approx(4.0)


def test_a_gossip_that_holds_less_than_it_has_to_give_up_gives_up_the_rest_later() -> None:
    """So much weight counted twice for ever."""
    net = MeshNet(1)
    (host,) = net.add(1)
    gossip, x = dlc.Gossip(cast(dlc.Peer, NetPeer(net, host)), codec="fp32"), torch.ones(4)
    gossip.step(x)
    machine = gossip._machine
    assert machine is not None
    machine._arrivals.overdrawn = 1.5
    gossip.step(x)
    assert gossip.weight == 2.0**-20
    payloads = [machine.grid.coder.encode(torch.full((4,), 3.0))]
    machine._arrivals.taken.append(Share(Voter("other", 1), 1.0, 1, payloads))
    gossip.step(x)
    assert gossip.weight == pytest.approx(0.5) and float(x[0]) == pytest.approx(3.0, abs=1e-5)


def test_moshpit_gives_the_exact_mean_and_goes_on_without_one_that_has_left() -> None:
    with swarm(4, log=False) as peers, ThreadPoolExecutor(4) as pool:
        know_each_other(peers)
        given = [torch.randn(3000, generator=torch.Generator().manual_seed(i)) for i in range(4)]
        held = [g.clone() for g in given]
        pits = [dlc.Moshpit(p, dims=2, codec="fp32", matchmaking_s=MEET_S) for p in peers]
        wait_until(
            lambda: all(len(p.mesh.ask(lambda m, _: m.board.get("moshpit/moshpit"))) == 4 for p in peers), LONG_S
        )
        told = list(pool.map(lambda i: pits[i].average(held[i], timeout_s=LONG_S), range(4)))
        mean = torch.stack(given).double().mean(0)
        for i, report in enumerate(told):
            assert report.complete and report.weight == 4.0 and report.sides == (2, 2), report.summary()
            torch.testing.assert_close(held[i].double(), mean, rtol=1e-5, atol=1e-6)
        peers[3].leave()
        wait_until(lambda: all(sum(m.alive for m in p.members()) == 3 for p in peers[:3]), LONG_S)
        with pytest.raises(UsageError, match="at least 4 peers"):
            pits[0].average(held[0])
        three = [dlc.Moshpit(p, "three", group_size=2, codec="fp32", matchmaking_s=MEET_S) for p in peers[:3]]
        wait_until(
            lambda: all(len(p.mesh.ask(lambda m, _: m.board.get("moshpit/three"))) == 3 for p in peers[:3]), LONG_S
        )
        reports = list(pool.map(lambda i: three[i].step(held[i], timeout_s=LONG_S), range(3)))
        assert all(r.rounds and not r.failed for r in reports), [r.summary() for r in reports]


@pytest.mark.parametrize("how", ["leaves between the rounds", "not finite"])
def test_a_moshpit_average_is_exact_to_those_only_who_have_everybody_s_vector(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not to who meets nobody of a cell, nor to who was not in the group in which somebody was lacking."""
    with swarm(4, log=False) as peers, ThreadPoolExecutor(4) as pool:
        know_each_other(peers)
        peers.sort(key=lambda p: p.id)
        pits = [dlc.Moshpit(p, dims=2, codec="fp32", matchmaking_s=MEET_S) for p in peers]
        wait_until(lambda: all(shown(p, "moshpit/moshpit") == 4 for p in peers), LONG_S)
        held = [torch.full((5,), float(10**i)) for i in range(4)]

        def leg(i: int, next_leg: Callable[[], Leg]) -> Leg:
            if pits[i]._course.axis and i == 3:
                peers[i].leave()
            elif pits[i]._course.axis:
                wait_until(lambda: sum(m.alive for m in peers[i].members()) == 3, LONG_S)
            return next_leg()

        def average(i: int) -> dlc.MoshpitReport | SwarmClosed:
            try:
                return pits[i].average(held[i], timeout_s=LONG_S)
            except SwarmClosed as error:
                return error

        if how == "not finite":
            held[3].fill_(float("nan"))
        else:
            for i in range(4):
                monkeypatch.setattr(pits[i], "_leg", partial(leg, i, pits[i]._leg))
        told = list(pool.map(average, range(4)))
        reports = [report for report in told if isinstance(report, dlc.MoshpitReport)]
        means, exact = [277.75, 5.5, 277.75], [True, False, True]
        if how == "not finite":
            means, exact = [37.0] * 4, [False] * 4
        assert [float(x[0]) for x in held[: len(reports)]] == means
        assert [report.complete for report in reports] == exact, [report.summary() for report in reports]


def test_a_call_that_cannot_be_is_refused_and_the_next_one_is_not_the_worse_for_it() -> None:
    """A name without a form on the wire ended the peer, what is gathered without one the group of the others; NaN drew
    all the weight of a gossip to itself."""
    with swarm(2, log=False) as peers, ThreadPoolExecutor(2) as pool:
        know_each_other(peers)
        for peer in peers:
            for name in ("\ud800", "x" * 300, 7):
                with pytest.raises(UsageError, match="string"):
                    dlc.Group(peer, name).all_reduce(torch.ones(4))  # type: ignore[arg-type]
            for gather in ("abc", bytearray(3), [1]):
                with pytest.raises(UsageError, match="must be bytes"):
                    dlc.Group(peer, "g").all_reduce(torch.ones(4), gather=gather)  # type: ignore[arg-type]
            calls = dlc.Group(peer, "g").all_reduce, dlc.Gossip(peer, "h").step, dlc.Moshpit(peer, "m").step
            for tensors, why in (([1.0], "torch tensors, not float"), (torch.ones(1).expand(4), r"clone\(\) it")):
                for call in calls:
                    with pytest.raises(UsageError, match=why):
                        call(tensors)  # type: ignore[operator]
            for label in (None, 5, "\ud800"):
                with pytest.raises(UsageError, match="string"):
                    dlc.Group(peer, "g").all_reduce(torch.ones(4), label=label)  # type: ignore[call-overload]
            for options, why in (
                ({"owns": "no"}, "owns is str: it must be bool"),
                ({"target_size": 2.0}, "target_size is float: it must be int"),
                ({"min_size": 1.5}, "min_size is float: it must be int"),
                ({"expected": [peer.id]}, "expected is list: it must be a function"),
                ({"peers": 5}, "peers is 5: give a list of the members' ids"),
                ({"peers": peer.id}, "give a list of the members' ids"),  # its letters were taken for ids
                ({"peers": [peer.id, None]}, "give a list of the members' ids"),
                ({"codec": ["fp16"]}, r"unknown codec \['fp16'\]"),
            ):
                with pytest.raises(UsageError, match=why):
                    dlc.Group(peer, "g", **options)  # type: ignore[arg-type]
            # One of whole numbers failed within, and its name was never free again.
            for vector in (None, [1.0], torch.ones(4, dtype=torch.int64), torch.ones(2, 2), torch.ones(8)[::2]):
                with pytest.raises(UsageError, match="vector is"):
                    dlc.Group(peer, "g").begin(vector)  # type: ignore[arg-type]
            with pytest.raises(RoundTimeout, match=r"expected\(\) raised TypeError"):
                dlc.Group(peer, "g", expected=lambda: [["a"]]).all_reduce(torch.ones(4))  # type: ignore[list-item]
        pit = dlc.Moshpit(peers[0], "n", matchmaking_s=0.1)
        assert pit.average(torch.ones(4), weight=torch.tensor(2.0)).weight == 2.0  # type: ignore[arg-type]
        gossips = [dlc.Gossip(p, "walk", codec="fp32") for p in peers]
        values = [torch.full((4,), float(i)) for i in range(2)]
        wait_until(lambda: all(len(g._members()) == 1 for g in gossips), LONG_S)
        with pytest.raises(UsageError, match="NaN or Inf"):
            gossips[0].step(torch.tensor([1.0, float("nan"), 0.0, 0.0]))
        for weight in (0.0, 3e-7, 1e300, float("nan")):  # one below the least was taken for that, in silence
            with pytest.raises(UsageError, match=r"weight is .*2\^-20 to 2\^53"):
                dlc.Gossip(peers[0], "weights", weight=weight)
        # Whose step begins when the other's gift is there already gives some of that on: 0.75 and 1.25, not 1 and 1.
        told = list(pool.map(lambda i: gossips[i].step(values[i], wait_s=LONG_S), range(2)))
        assert all(report.weight in (0.75, 1.0, 1.25) and len(report.took) == 1 for report in told)
        assert sum(report.weight for report in told) == 2.0
        mean = sum(report.weight * value for report, value in zip(told, values, strict=True)) / 2.0
        torch.testing.assert_close(mean, torch.full((4,), 0.5))
        groups = [dlc.Group(p, "g", matchmaking_s=MEET_S) for p in peers]
        for group in pool.map(lambda i: groups[i].all_reduce(values[i], timeout_s=LONG_S), range(2)):
            assert len(group.contributors) == 2


def scripted(
    monkeypatch: pytest.MonkeyPatch,
    rounds: Sequence[tuple[int, int]],
    members: Sequence[tuple[str, ...]] = (("a", "b"),) * 3,
) -> tuple[dlc.Moshpit, list[Call]]:
    """A Moshpit that goes through these rounds (cycle, axis), and the calls that it makes. In each it meets one other,
    of another cell, who has 10 and as much weight, and has lacked nothing."""
    made: list[Call] = []

    class Met:
        def __init__(self, peer: object, key: str, call: Call, answers: object, formed: object, warned: object) -> None:
            self.call, self.group, self.members, self.waited_s = call, f"group of {key}", members[len(made)], 0.0
            self.without_mine, self.misfits = frozenset[int](), frozenset[str]()
            made.append(call)

        def wait(self) -> SimpleNamespace:
            vector, word = self.call.vector, legs[len(made) - 1].word(self.call.label)
            assert vector is not None
            self.call.out = (vector + 10.0) / 2
            return SimpleNamespace(complete=True, weight=2 * self.call.weight, gathered=dict.fromkeys("ab", word))

    cells = grid_of(4, None, 2)
    parts = (frozenset("a"), frozenset("b"))
    legs = [Leg(c, axis, f"{c}.{axis}", ("a", "b"), cells, b"grid", parts) for c, axis in rounds]
    pit = object.__new__(dlc.Moshpit)
    pit.peer, pit.name, pit.codec, pit.matchmaking_s = SimpleNamespace(id="a"), "m", "fp32", 1.0  # type: ignore[assignment]
    course = SimpleNamespace(begin_cycle=lambda: None, passed=lambda: len(made) == len(legs))
    pit._course, pit._closed, pit.stopping, pit._misfits = course, False, None, set()  # type: ignore[assignment]
    pit._places = SimpleNamespace(begin=lambda: None)  # type: ignore[assignment]
    pit._mesh = SimpleNamespace(check_may_wait=lambda: None)  # type: ignore[assignment]
    monkeypatch.setattr(pit, "_show", lambda: None)
    monkeypatch.setattr("dlc.moshpit.GroupCall", Met)
    monkeypatch.setattr(pit, "_leg", lambda: legs[len(made)])
    return pit, made


def test_a_moshpit_average_that_the_others_have_left_behind_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait in the next one: what is half averaged, and its weight, would count this one's vectors there again."""
    pit, made = scripted(monkeypatch, [(5, 0), (6, 0), (6, 1)])
    vector = torch.full((3,), 2.0)
    report = pit.average(vector)
    assert [(c.key, float(c.vector[0]), c.weight, c.label) for c in made if c.vector is not None] == [
        ("5.0", 2.0, 1.0, ""),
        ("6.0", 2.0, 1.0, ""),
        ("6.1", 6.0, 2.0, "group of 6.0"),
    ]
    assert vector.tolist() == [8.0] * 3 and not report.complete


def test_a_moshpit_average_that_lacks_nothing_says_of_which_group_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    pit, made = scripted(monkeypatch, [(6, 0), (6, 1)])
    assert pit.average(torch.full((3,), 2.0)).complete
    assert [call.gather for call in made] == [b"grid", b"gridgroup of 6.0"]


def test_a_moshpit_average_that_fails_is_no_time_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counted as such for the next `step`, which tells the others how long this peer trains."""
    pit, _ = scripted(monkeypatch, [(5, 0)])
    began: list[float] = []
    pit._places = SimpleNamespace(begin=lambda: began.append(1.0))  # type: ignore[assignment]

    def closed() -> Leg:
        raise SwarmClosed("left")

    monkeypatch.setattr(pit, "_leg", closed)
    vector = torch.full((3,), 2.0)
    with pytest.raises(SwarmClosed):
        pit.average(vector)
    assert len(began) == 1 and vector.tolist() == [2.0] * 3


def test_two_that_are_a_cycle_apart_meet_in_the_later_one() -> None:
    """Of two of equal speed each waited for the other in its own cycle, both in vain and for ever."""
    with swarm(2, log=False) as peers, ThreadPoolExecutor(1) as pool:
        know_each_other(peers)
        ahead = dlc.Moshpit(peers[0], group_size=2, codec="fp32", matchmaking_s=MEET_S)
        assert ahead.step(torch.ones(4)).peers == 1
        behind = dlc.Moshpit(peers[1], group_size=2, codec="fp32", matchmaking_s=MEET_S)
        wait_until(lambda: all(shown(p, "moshpit/moshpit") == 2 for p in peers), LONG_S)
        for whole in (False, True):
            mine, other = torch.zeros(4), torch.ones(4)
            go = dlc.Moshpit.average if whole else dlc.Moshpit.step
            waits = pool.submit(go, behind, other, timeout_s=LONG_S)
            wait_until(lambda: peers[0].mesh.ask(lambda m, _: m.board.keys("meet/moshpit/moshpit#")), LONG_S)
            reports = [go(ahead, mine, timeout_s=LONG_S), waits.result(LONG_S)]
            assert [(r.cycle, len(r.rounds), r.failed) for r in reports] == [(reports[0].cycle, 1, ())] * 2
            assert torch.equal(mine, torch.full((4,), 0.5)) and torch.equal(mine, other)
            assert not whole or all(r.complete for r in reports), "all of it was made in the later one"
            assert not any(r.absent for r in reports) and all(r.waiting_s <= r.seconds for r in reports)
            ahead._course.cycle += 1  # an averaging alone


def test_what_comes_too_late_for_the_others_is_in_the_own_mean_of_a_step() -> None:
    """It took over the others' mean there, and lost what it had learned."""
    with late_for_its_partner(LONG_S) as (owner, late), ThreadPoolExecutor(2) as pool:
        pits = [dlc.Moshpit(p, group_size=2, codec="fp32", matchmaking_s=MEET_S) for p in (owner, late)]
        wait_until(lambda: all(shown(p, "moshpit/moshpit") == 2 for p in (owner, late)), LONG_S)
        vectors = [torch.full((4,), 1.0), torch.full((4,), 9.0)]
        step = partial(dlc.Moshpit.step, timeout_s=MEET_S + 4.0)
        told = [pool.submit(step, *args, weight=w) for *args, w in zip(pits, vectors, (3.0, 1.0), strict=True)]
        for report in (future.result(LONG_S) for future in told):
            assert [(m.peer, m.reason) for m in report.rounds[0].missing] == [(late.id, "late")]
        assert vectors[0].tolist() == [1.0] * 4 and vectors[1].tolist() == [3.0] * 4


def test_a_moshpit_round_tells_who_did_not_come_and_who_had_gone_on() -> None:
    with swarm(3, log=False) as peers, ThreadPoolExecutor(2) as pool:
        know_each_other(peers)
        peers.sort(key=lambda p: p.id)
        waits_s = (1.0, MEET_S, MEET_S)
        pits = [dlc.Moshpit(p, dims=1, codec="fp32", matchmaking_s=s) for p, s in zip(peers, waits_s, strict=True)]
        wait_until(lambda: all(shown(p, "moshpit/moshpit") == 3 for p in peers), LONG_S)
        alone = pits[0].step(torch.ones(4))
        assert alone.absent == dict.fromkeys((peers[1].id, peers[2].id), "did not come")
        assert 0.0 < alone.waiting_s <= alone.seconds and alone.to_dict()["absent"] == alone.absent
        assert f"{peers[1].id[:8]} did not come" in alone.summary()
        wait_until(lambda: all(shown(p, "place/moshpit/moshpit") == 1 for p in peers), LONG_S)
        two = list(pool.map(lambda pit: pit.step(torch.ones(4)), pits[1:]))
        assert [report.absent for report in two] == [{peers[0].id: "had gone on to a later round"}] * 2
        assert all(len(report.rounds[0].contributors) == 2 for report in two)


def test_who_came_with_other_tensors_is_not_told_as_one_who_did_not_come(caplog: pytest.LogCaptureFixture) -> None:
    """A swarm in which one model differs averaged without it, and nothing said why."""
    with swarm(2, log=False) as peers, ThreadPoolExecutor(2) as pool:
        know_each_other(peers)
        other = peers[1].id
        pits = [dlc.Moshpit(p, dims=1, matchmaking_s=s) for p, s in zip(peers, (1.0, MEET_S), strict=True)]
        wait_until(lambda: all(shown(p, "moshpit/moshpit") == 2 for p in peers), LONG_S)

        def waits(mesh: Mesh, _: float) -> bool:
            keys = mesh.board.keys("meet/moshpit/")
            return any(posted.author.peer == other for key in keys for posted in mesh.board.get(key).values())

        averages = pool.submit(pits[1].average, torch.ones(5))
        wait_until(lambda: peers[0].mesh.ask(waits), LONG_S)
        x = torch.zeros(4)
        assert pits[0].average(x).absent == {other: MISFIT} and not x.any()
        assert f"averages without {other[:8]}, who {MISFIT}" in caplog.text
        peers[1].leave()
        with pytest.raises(SwarmClosed):
            averages.result(LONG_S)


def test_a_misfit_is_warned_of_once_and_told_in_each_report(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A peer of another model was in the log in every round."""
    told = GroupCall._told

    def with_misfit(self: GroupCall, news: Any) -> None:
        told(self, dataclasses.replace(news, misfits=frozenset({"other"})) if isinstance(news, GroupFormed) else news)

    monkeypatch.setattr(GroupCall, "_told", with_misfit)
    with swarm(1, log=False) as (peer,):
        pit = dlc.Moshpit(peer, matchmaking_s=0.1)
        assert [pit.step(torch.ones(4)).absent for _ in range(3)] == [{"other": MISFIT}] * 3
    assert [message.endswith(f"averages without other, who {MISFIT}") for message in caplog.messages] == [True]


def test_a_step_tells_of_other_tensors_too() -> None:
    with swarm(2, log=False) as peers, ThreadPoolExecutor(2) as pool:
        know_each_other(peers)
        pits = [dlc.Moshpit(p, dims=1, matchmaking_s=s) for p, s in zip(peers, (1.0, MEET_S), strict=True)]
        wait_until(lambda: all(shown(p, "moshpit/moshpit") == 2 for p in peers), LONG_S)
        key = "meet/moshpit/moshpit#r0.0/"
        steps = pool.submit(pits[1].step, torch.ones(5))
        wait_until(lambda: peers[0].mesh.ask(lambda mesh, now: mesh.board.get(key)), LONG_S)
        assert pits[0].step(torch.zeros(4)).absent == {peers[1].id: MISFIT}
        peers[1].leave()
        with pytest.raises(SwarmClosed):
            steps.result(LONG_S)


def test_time_in_which_there_were_too_few_for_the_grid_is_no_phase_of_training() -> None:
    net = MeshNet(1)
    hosts = net.add(2)
    pit = dlc.Moshpit(cast(dlc.Peer, NetPeer(net, hosts[0])), "m", dims=1)
    net.run(60.0)
    with pytest.raises(UsageError, match="at least 2"):
        pit.step(torch.ones(4))
    net.run(10.0)
    assert pit._places.comes() == pytest.approx(10.0)


def test_who_missed_an_averaging_that_was_given_up_is_not_told_as_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    pit, made = scripted(monkeypatch, [(0, 0), (1, 0), (1, 1)], members=[("a",), ("a", "b"), ("a",)])
    assert pit.average(torch.ones(3)).absent == {} and len(made) == 3


def test_a_moshpit_whose_groups_would_be_larger_than_groups_can_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with swarm(1, log=False) as (peer,):
        with pytest.raises(UsageError, match="group_size is 65: it must be 2 to 64"):
            dlc.Moshpit(peer, group_size=65)
        pit = dlc.Moshpit(peer, dims=1, matchmaking_s=0.1)
        names = sorted([peer.id, *(f"p{i}" for i in range(64))])
        monkeypatch.setattr(pit, "_members", lambda mesh: names)
        with pytest.raises(UsageError, match="65 peers in 1 dimensions make groups of up to 65; .* give more dims"):
            pit.average(torch.ones(4))
        assert pit.step(torch.ones(4)).rounds  # with whom it meets
        names.remove("p0")
        assert pit.average(torch.ones(4)).rounds


def test_what_is_closed_refuses_a_step_and_closing_it_again_takes_nothing_from_the_next_of_its_name() -> None:
    with swarm(1, log=False) as (peer,):
        gossip, pit = dlc.Gossip(peer, "again"), dlc.Moshpit(peer, "again", matchmaking_s=0.1)
        gossip.step(torch.ones(4), wait_s=0.0)
        gossip.close()
        pit.close()
        for call in (gossip.step, pit.step, pit.average):
            with pytest.raises(UsageError, match="'again' is closed"):
                call(torch.ones(4))  # type: ignore[operator]
        others = dlc.Gossip(peer, "again"), dlc.Moshpit(peer, "again", matchmaking_s=0.1)
        gossip.close()
        pit.close()
        assert shown(peer, "gossip/again") == shown(peer, "moshpit/again") == 1
        assert others[0].step(torch.ones(4), wait_s=0.0).weight == 1.0 and others[1].step(torch.ones(4)).rounds


@pytest.mark.parametrize("kind", [dlc.Gossip, dlc.Moshpit])
def test_a_second_one_of_a_name_is_refused_and_takes_no_place_away(kind: type[dlc.Gossip | dlc.Moshpit]) -> None:
    """The end of the second took the first one off the others' grid, for as long as that lived."""
    with swarm(1, log=False) as (peer,):
        first = kind(peer, "one")
        with pytest.raises(UsageError, match="has one of the name 'one' already: close that"):
            kind(peer, "one")
        kind(peer, "two").close()
        assert shown(peer, f"{kind.__name__.lower()}/one") == 1
        first.close()
        kind(peer, "one").close()


def test_a_gossip_opens_the_links_of_its_next_step() -> None:
    """Partners change with every step: the first bytes to a new one would wait for the handshakes."""
    with swarm(2, log=False) as peers:
        gossips = [dlc.Gossip(p, "links", codec="fp32") for p in peers]
        wait_until(lambda: all(len(g._members()) == 1 for g in gossips), 60.0)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda g: g.step(torch.ones(4)), gossips))
        asked = [peer.mesh.ask(lambda mesh, now: mesh.bulk_peers()) for peer in peers]
        assert asked == [{peers[1].id}, {peers[0].id}]


@pytest.mark.parametrize("graph", ["ring", "exponential", "random-pairs"])
def test_a_gossip_gives_nothing_to_whom_no_vector_reaches_and_comes_to_the_mean_of_all(graph: str) -> None:
    """On the ring both neighbours of the second peer are beyond its reach: without another way it would be alone."""
    net = MeshNet(1)
    hosts = net.add(4)
    for other in (hosts[0], hosts[2]):
        net.cut(hosts[1], other, hosts[3])
    gossips = [dlc.Gossip(cast(dlc.Peer, NetPeer(net, host)), graph=graph, codec="fp32") for host in hosts]
    net.run(5.0)
    held = [torch.full((4,), float(i)) for i in range(4)]
    for _ in range(40):
        for gossip, x in zip(gossips, held, strict=True):
            report = gossip.step(x, wait_s=0.0)
            assert not report.returned and report.overdrawn == report.unsure == 0.0
            if gossip is gossips[1]:
                assert report.gave.keys() <= {hosts[3].name}
        net.run(3.0)
    assert all(abs(float(x[0]) - 1.5) < 0.05 for x in held), held
    for gossip, x in zip(gossips, held, strict=True):
        gossip._give = lambda *args: []  # type: ignore[method-assign]
        gossip.step(x, wait_s=0.0)
    assert sum(gossip.weight for gossip in gossips) == pytest.approx(4.0)
    assert sum(gossip.weight * float(x[0]) for gossip, x in zip(gossips, held, strict=True)) == pytest.approx(6.0)


def test_a_gift_whose_taker_is_down_is_waited_for_by_no_step_and_comes_back() -> None:
    """Each step of a minute stood still for all of `wait_s`, once a neighbour was dead with a gift on its way to it."""
    net = MeshNet(1)
    hosts = net.add(2)
    gossips = [dlc.Gossip(cast(dlc.Peer, NetPeer(net, host)), graph="ring", codec="fp32") for host in hosts]
    net.run(5.0)
    x, looks = torch.ones(4), list[int]()
    gossips[0].step(x, wait_s=0.0)
    net.kill(hosts[1])
    net.run(10.0)
    gossips[0].stopping = lambda: looks.append(1) or len(looks) > 2  # type: ignore[func-returns-value]
    report = gossips[0].step(x, wait_s=60.0)
    assert (report.unsettled, report.peers, len(looks)) == (0.5, 1, 1)
    net.run(RECLAIM_S)
    assert gossips[0].step(x, wait_s=60.0).returned == {hosts[1].name: "dead"} and gossips[0].weight == 1.0


def test_a_group_whose_beginning_is_interrupted_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C came as the driver had begun it: its name was taken until the others' time was over."""
    result = Reply[object].result

    def interrupted(future: Reply[object], timeout: float | None = None) -> object:
        result(future, timeout)
        monkeypatch.undo()
        raise KeyboardInterrupt

    with swarm(1, log=False) as (peer,):
        group = dlc.Group(peer, "g", target_size=2, matchmaking_s=LONG_S)
        x = torch.ones(4)
        heard = list(peer._listeners)
        monkeypatch.setattr(Reply, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            group.all_reduce(x, timeout_s=LONG_S)
        assert peer._listeners == heard
        call = group.all_reduce(x, timeout_s=LONG_S, async_op=True)
        assert call.stage == "waiting"
        call.cancel()
