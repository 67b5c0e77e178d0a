"""Averaging without the log over real peers on loopback."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import dlc
from dlc.errors import RoundTimeout, SwarmClosed, UsageError
from dlc.mesh import GroupCall
from tests.helpers import wait_until
from tests.swarm import swarm

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
        two = [dlc.Group(peers[i], "pair", peers=pair, owns=i == 0, matchmaking_s=MEET_S) for i in (0, 2)]
        told = list(pool.map(lambda k: two[k].all_reduce(alone[2 * k], timeout_s=LONG_S), range(2)))
        assert torch.equal(alone[0], torch.ones(10)) and torch.equal(alone[2], torch.ones(10))
        assert all(r.owned == {peers[0].id: 1.0} for r in told) and "2 of 2 peers" in told[0].summary()


def test_a_lonely_call_ends_a_call_given_up_frees_the_name_and_a_peer_that_leaves_says_so() -> None:
    with swarm(2, log=False) as peers:
        x = torch.ones(8)
        with pytest.raises(RoundTimeout, match="1 of at least 2 came"):
            dlc.Group(peers[0], "lonely", matchmaking_s=0.2).all_reduce(x)
        group = dlc.Group(peers[0], "later", matchmaking_s=LONG_S)
        call = group.all_reduce(x, async_op=True)
        assert isinstance(call, GroupCall) and call.stage == "waiting" and not call.done
        with pytest.raises(UsageError, match="already"):
            group.all_reduce(x)
        call.cancel()
        with pytest.raises(RoundTimeout, match="cancelled"):
            call.wait()
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
            assert reports[-1].peers == 4 and reports[-1].distance < 0.1 * float(given[0].norm())
            assert not any(r.returned or r.overdrawn for r in reports) and reports[0].bytes_sent > 0
        assert sum(g.weight + waiting(g) for g in gossips) == pytest.approx(4.0)
        for gossip in gossips:
            gossip.close()


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


def test_a_call_that_cannot_be_is_refused_and_the_next_one_is_not_the_worse_for_it() -> None:
    """A name without a form on the wire ended the peer; NaN drew all the weight of a gossip to itself."""
    with swarm(2, log=False) as peers, ThreadPoolExecutor(2) as pool:
        know_each_other(peers)
        for peer in peers:
            for name in ("\ud800", "x" * 300, 7):
                with pytest.raises(UsageError, match="string"):
                    dlc.Group(peer, name).all_reduce(torch.ones(4))  # type: ignore[arg-type]
            for tensors, why in (([1.0], "torch tensors, not float"), (torch.ones(1).expand(4), r"clone\(\) it")):
                for call in (dlc.Group(peer, "g").all_reduce, dlc.Gossip(peer, "h").step, dlc.Moshpit(peer, "m").step):
                    with pytest.raises(UsageError, match=why):
                        call(tensors)  # type: ignore[operator]
        gossips = [dlc.Gossip(p, "walk", codec="fp32") for p in peers]
        values = [torch.full((4,), float(i)) for i in range(2)]
        with pytest.raises(UsageError, match="NaN or Inf"):
            gossips[0].step(torch.tensor([1.0, float("nan"), 0.0, 0.0]))
        with pytest.raises(UsageError, match="fp16 ends at 65504"):
            dlc.Gossip(peers[0], "far").step(torch.tensor([-7e4]))
        for report in pool.map(lambda i: gossips[i].step(values[i], wait_s=LONG_S), range(2)):
            assert report.weight == 1.0 and len(report.took) == 1
        assert all(torch.equal(v, torch.full((4,), 0.5)) for v in values)
        groups = [dlc.Group(p, "g", matchmaking_s=MEET_S) for p in peers]
        for mean in pool.map(lambda i: groups[i].all_reduce(values[i], timeout_s=LONG_S), range(2)):
            assert len(mean.contributors) == 2
