"""Push-sum on a virtual clock: mass is neither made nor lost, whatever the network does; graphs and sketches."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch

from dlc.comm.effects import Effect, Pace, Send
from dlc.comm.events import MemberDown, MemberUp
from dlc.comm.giftpace import GiftPace
from dlc.comm.gossip import ARRIVED_MAX, RECLAIM_S, VECTORS_MAX, Gossip, Settled, Share, absorb, give_away
from dlc.comm.graphs import GRAPHS, contraction, gives, hops, mixing, neighbours
from dlc.comm.grid import Grid
from dlc.comm.ids import Voter
from dlc.comm.meshmessages import Gift, Parcel, Pull, Refused, Taken, Withdraw
from dlc.comm.pacing import PLAN_SHARE, UNPACED_BPS
from dlc.comm.partition import Load
from dlc.comm.sketch import SKETCH_ELEMS, SLICE_ELEMS, TRAIL_STEPS, Trail, distance, from_bytes, sketch, to_bytes
from dlc.errors import ProtocolError, UsageError
from dlc.sim.meshnet import DETECT_S, Host, MeshNet

NUMEL, CHUNK = 100, 16


class Walker:
    """One peer that gossips: gives at its own pace, and takes in what came before each step."""

    def __init__(self, net: MeshNet, host: Host, i: int, codec: str = "fp32", weight: float = 1.0) -> None:
        self.net, self.host, self.weight, self.t = net, host, weight, 0
        self.grid = Grid(NUMEL, CHUNK, codec)
        self.z = torch.randn(NUMEL, generator=torch.Generator().manual_seed(i)) + i
        self.machine: Gossip = host.mesh.gossip("g", self.grid)
        self.overdrawn = self.unsure = 0.0

    def take(self) -> None:
        arrivals = self.machine.arrivals()
        for share in [*arrivals.taken, *arrivals.returned]:
            self.weight = absorb(self.grid, self.z, self.weight, share)
        self.overdrawn += arrivals.overdrawn
        self.unsure += arrivals.unsure
        self.weight -= arrivals.overdrawn

    def step(self, graph: str, voters: list[Voter], keep_s: float = 10.0) -> None:
        if self.host.dead or self.host.frozen:
            return
        self.take()
        shares = neighbours(graph, voters, self.host.voter, self.t)
        self.t += 1
        gifts = [(to, self.weight * s) for to, s in shares if self.machine.free(to)]
        if not gifts:
            return
        payloads, self.weight = give_away(self.grid, self.z, self.weight, sum(w for _, w in gifts))
        give = self.machine.give
        self.net.act(
            self.host,
            lambda mesh, now: mesh.with_gossip(self.machine, lambda: give(gifts, self.t, payloads, keep_s), now),
        )


def walkers(net: MeshNet, n: int, **options: Any) -> list[Walker]:
    return [Walker(net, host, i, weight=1.0 + i % 3, **options) for i, host in enumerate(net.add(n))]


def mass(many: list[Walker]) -> tuple[torch.Tensor, float]:
    total = sum((w.weight * w.z.double() for w in many), torch.zeros(NUMEL, dtype=torch.float64))
    return total, sum(w.weight for w in many)


def settled(many: list[Walker]) -> bool:
    return not any(w.machine.unsettled or w.machine.coming for w in many if not w.host.dead)


@pytest.mark.parametrize("seed", range(16))
def test_mass_is_conserved_and_everybody_comes_to_the_true_mean(seed: int) -> None:
    rng = random.Random(seed)
    net = MeshNet(seed, loss=rng.choice([0.0, 0.1, 0.3]), duplicates=rng.choice([0.0, 0.2]))
    codec = rng.choice(["fp32", "fp16", "int8"])
    many, graph = walkers(net, rng.randint(2, 7), codec=codec), rng.choice(GRAPHS)
    voters = [w.host.voter for w in many]
    before, weight = mass(many)
    spread = float(torch.stack([w.z for w in many]).std(0).mean())

    def walk(w: Walker, pace_s: float) -> None:
        if net.now < 1060.0:
            w.step(graph, voters, keep_s=rng.choice([0.2, 2.0, 10.0]))
            net.clock.at(net.now + pace_s, walk, w, pace_s)

    for w in many:
        net.clock.at(net.now + rng.random(), walk, w, rng.uniform(0.3, 1.5))
    frozen = rng.choice(many).host
    if seed % 2:
        net.clock.at(1010.0, net.freeze, frozen)
        net.clock.at(1025.0, net.thaw, frozen)
    net.run(62.0)
    net.until(lambda: settled(many), 120.0)
    for w in many:
        w.take()
    after, left = mass(many)
    assert left == pytest.approx(weight, rel=1e-9)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-3)
    assert all(w.overdrawn == w.unsure == 0.0 and w.weight > 0 for w in many)
    held = sum(len(w.host.mesh.parcels.holdings._held) for w in many)
    assert held == 0
    worst = max(float((w.z.double() - before / weight).abs().max()) for w in many)
    assert worst < (0.2 if codec == "int8" else 0.02) * max(spread, 1.0)


class Remembered(dict[Voter, Settled]):
    """What a taker has settled; which gifts it took is remembered when the giver is gone, too."""

    def __init__(self) -> None:
        super().__init__()
        self.took = set[tuple[Voter, int]]()

    def __setitem__(self, giver: Voter, settled: Settled) -> None:
        super().__setitem__(giver, settled)
        if settled.taken:
            self.took.add((giver, settled.serial))


class Float64:
    """A grid whose codec takes and gives float64, by way of the wire's own form: what that rounds off is seen."""

    def __init__(self, grid: Grid) -> None:
        self._grid, self.coder = grid, self
        self.numel, self.chunk_elems, self.n_chunks, self.span = grid.numel, grid.chunk_elems, grid.n_chunks, grid.span

    def encode(self, x: torch.Tensor) -> Any:
        return self._grid.coder.encode(x.float())

    def decode(self, payload: Any, numel: int, out: torch.Tensor) -> torch.Tensor:
        return self._grid.coder.decode(payload, numel, out).double()


def held_by_all(many: list[Walker]) -> tuple[torch.Tensor, float]:
    """All mass there is, that of the dead included: what each holds, what has come to it, and its gifts that nobody
    has taken."""
    total, weight = torch.zeros(NUMEL, dtype=torch.float64), 0.0
    took = {gift for w in many for gift in cast(Remembered, w.machine._settled).took}
    for w in many:
        arrivals, me = w.machine._arrivals, w.host.voter
        given = [g.share for g in w.machine._given.values() if (me, g.serial) not in took]
        total += w.weight * w.z
        weight += w.weight
        for share in [*arrivals.taken, *arrivals.returned, *given]:
            weight += share.weight
            for chunk, payload in enumerate(share.payloads):
                start, stop = w.grid.span(chunk)
                decoded = w.grid.coder.decode(payload, stop - start, torch.empty(stop - start))
                total[start:stop] += share.weight * decoded
    return total, weight


@pytest.mark.parametrize("seed", range(12))
def test_mass_is_conserved_to_float64_at_every_moment_and_told_where_a_death_may_have_doubled_it(seed: int) -> None:
    """Of unequal shares, over links that lose and repeat, with deaths, leaves and sleeps: nothing is ever lost but what
    the dead hold, and nothing doubles but what is told as unsure, or given up as overdrawn."""
    rng = random.Random(seed)
    net = MeshNet(seed, loss=rng.choice([0.0, 0.1, 0.3]), duplicates=rng.choice([0.0, 0.2]))
    many, graph = walkers(net, rng.randint(3, 7), codec=rng.choice(["fp32", "fp16", "int8"])), rng.choice(GRAPHS)
    for w in many:
        w.z, w.grid = w.z.double(), cast(Grid, Float64(w.grid))
        w.machine._settled = w.host.mesh._settled["g"] = Remembered()
    begun, weight = held_by_all(many)

    def walk(w: Walker, pace_s: float) -> None:
        if net.now < 1050.0:
            voters = [other.host.voter for other in many if not other.host.dead]
            w.step(graph, voters, keep_s=rng.choice([0.2, 2.0, 10.0]))
            net.clock.at(net.now + pace_s, walk, w, pace_s)

    for w in many:
        net.clock.at(net.now + rng.random(), walk, w, rng.uniform(0.3, 1.5))
    first, second = rng.sample(many, 2)
    net.clock.at(1000.0 + rng.uniform(2.0, 20.0), getattr(net, rng.choice(["kill", "leave"])), first.host)
    frozen_at = 1000.0 + rng.uniform(2.0, 30.0)
    net.clock.at(frozen_at, net.freeze, second.host)
    net.clock.at(frozen_at + rng.choice([10.0, 90.0]), net.thaw, second.host)
    most = 0.0
    for _ in range(140):
        net.run(1.0)
        total, now = held_by_all(many)
        twice = now - weight
        most = max(most, twice)
        unsure = sum(w.unsure + w.machine._arrivals.unsure for w in many)
        assert -1e-9 < twice < unsure + 1e-9, f"at {net.now:.0f} s"
        if most < 1e-9:
            torch.testing.assert_close(total, begun, rtol=1e-12, atol=1e-10)


class Halves:
    """Some hosts and the others do not reach each other for a while, and take each other for dead."""

    def __init__(self, net: MeshNet, apart_s: float, rng: random.Random) -> None:
        self.net, names = net, sorted(net.hosts)
        some = rng.sample(names, len(names) // 2)
        self.ways = [way for a in some for b in set(names) - set(some) for way in ((a, b), (b, a))]
        for way in self.ways:
            net.network.cut(*way)
        net.clock.at(net.now + DETECT_S, self.see, True)
        net.clock.at(net.now + apart_s, self.heal)

    def heal(self) -> None:
        for way in self.ways:
            self.net.network.mend(*way)
        self.see(False)

    def see(self, down: bool) -> None:
        for a, b in self.ways:
            one, other = self.net.hosts[a], self.net.hosts[b].voter
            if down and (a, b) in self.net.network.cuts:
                one.seen.down.add(other)
                self.net._tell(one, MemberDown(other))
            elif not (down or self.net.hosts[b].dead):
                one.seen.down.discard(other)
                self.net._tell(one, MemberUp(other))


@pytest.mark.parametrize("seed", range(5))
def test_mass_is_conserved_through_restarts_and_partitions_and_whatever_comes_late(seed: int) -> None:
    """As above. Messages of gossip come again up to 40 s later, when their process may be gone, or another in the place
    of the one that they are for; in the end nobody waits, and nothing is kept of those who are gone."""
    rng = random.Random(seed)
    net = MeshNet(seed, loss=rng.choice([0.0, 0.1, 0.3]), duplicates=0.2)
    many, graph, new_mass = list[Walker](), rng.choice(GRAPHS), [torch.zeros(NUMEL, dtype=torch.float64), 0.0]

    def begins(host: Host) -> None:
        w = Walker(net, host, len(many), weight=1.0 + len(many) % 3, codec=codec)
        w.z, w.grid = w.z.double(), cast(Grid, Float64(w.grid))
        w.machine._settled = host.mesh._settled["g"] = Remembered()
        many.append(w)
        new_mass[:] = new_mass[0] + w.weight * w.z, new_mass[1] + w.weight
        net.clock.at(net.now + rng.random(), walk, w, rng.uniform(0.3, 1.5))

    def walk(w: Walker, pace_s: float) -> None:
        if net.now < 1060.0 and not w.host.dead:
            voters = [host.voter for host in net.hosts.values() if not host.dead]
            w.step(graph, voters, keep_s=rng.choice([0.2, 2.0, 10.0]))
            net.clock.at(net.now + pace_s, walk, w, pace_s)

    def again(target: str, sender: Voter, message: Any) -> None:
        net._deliver(net.hosts[target], sender, message)

    def late(source: str, target: str, message: Any) -> Any:
        if isinstance(message, Gift | Withdraw | Taken | Refused | Parcel) and rng.random() < 0.1:
            net.clock.at(net.now + rng.uniform(1.0, 40.0), again, target, net.hosts[source].voter, message)
        return message

    def restart(after_s: float) -> None:
        host = rng.choice([host for host in net.hosts.values() if not host.dead])
        net.kill(host)
        net.clock.at(net.now + after_s, lambda: begins(net.start(host.name, host.voter.inc + 1)))

    codec = rng.choice(["fp32", "fp16", "int8"])
    net.tamper = late
    for host in net.add(rng.randint(3, 6)):
        begins(host)
    for _ in range(3):
        net.clock.at(1000.0 + rng.uniform(2.0, 55.0), restart, rng.choice([0.5, 2.0, 20.0]))
    net.clock.at(1000.0 + rng.uniform(5.0, 30.0), Halves, net, rng.choice([1.0, 10.0, 80.0]), rng)
    most = 0.0
    for _ in range(85):
        net.run(2.0)
        total, weight = held_by_all(many)
        twice = weight - cast(float, new_mass[1])
        most = max(most, twice)
        unsure = sum(w.unsure + w.machine._arrivals.unsure for w in many)
        assert -1e-9 < twice < unsure + 1e-9, f"at {net.now:.0f} s"
        if most < 1e-9:
            torch.testing.assert_close(total, new_mass[0], rtol=1e-12, atol=1e-10)
    alive = [w for w in many if not w.host.dead]
    assert len(many) > len(alive) and settled(alive)
    voters = {w.host.voter for w in alive}
    for w in alive:
        assert not w.machine._reclaimed and set(w.machine._settled) <= voters
        assert not w.host.mesh.parcels.holdings._held and not w.host.mesh.parcels._intakes


def test_nothing_is_kept_of_the_gifts_of_one_that_was_down_before_another_process_took_its_place() -> None:
    """Nothing was told of it then, and there was one more with each that died and came back."""
    net = MeshNet(3)
    giver, taker = walkers(net, 2)
    giver.step("ring", [giver.host.voter, taker.host.voter])
    net.until(lambda: settled([giver, taker]))
    assert set(taker.machine._settled) == {giver.host.voter}
    net.kill(giver.host)
    net.until(lambda: giver.host.voter in taker.host.seen.down, 10.0)
    assert taker.machine._settled, "it may come back itself, and ask"
    taker.host.seen.left.add(giver.host.voter)
    net._tell(taker.host, MemberUp(Voter(giver.host.name, 2)))
    assert not taker.machine._settled


def test_nobody_is_asked_for_a_share_that_came_back_from_one_whose_place_another_process_has_taken() -> None:
    net = MeshNet(3)
    giver, taker = walkers(net, 2)
    net.tamper = untold
    giver.step("ring", [giver.host.voter, taker.host.voter])
    net.run(1.0)
    net.kill(taker.host)
    net.until(lambda: giver.machine._reclaimed, 90.0)
    giver.host.seen.left.add(taker.host.voter)
    net._tell(giver.host, MemberUp(Voter(taker.host.name, 2)))
    net.run(1.0)
    assert not giver.machine._reclaimed


def test_one_that_was_up_again_meanwhile_has_the_whole_time_anew_to_answer() -> None:
    """Nothing of it comes through, and both times it is down for less than a share is kept for."""
    net = MeshNet(3)
    giver, taker = walkers(net, 2)
    net.tamper = lambda source, target, m: None
    giver.step("ring", [giver.host.voter, taker.host.voter])
    for _ in range(2):
        net.freeze(taker.host)
        net.run(0.75 * RECLAIM_S)
        net.thaw(taker.host)
        net.run(2.0)
    assert giver.machine.unsettled and not giver.machine._reclaimed
    net.tamper = lambda source, target, m: m
    net.until(lambda: not giver.machine.unsettled, 5.0)
    giver.take()
    assert (giver.weight, giver.unsure, giver.overdrawn) == (1.0, 0.0, 0.0)


def test_gifts_of_a_gossip_that_is_made_anew_are_none_of_those_before_it() -> None:
    """Its taker remembers that it has those, and would say so of these: their mass would be nowhere."""
    net = MeshNet(0)
    one, two = walkers(net, 2)
    voters = [one.host.voter, two.host.voter]
    for weight in (2.5, 3.0):
        one.step("ring", voters)
        net.run(5.0)
        two.take()
        assert settled([one, two]) and two.weight == weight
        closed(one)
        one = Walker(net, one.host, 0, weight=1.0)


def test_a_gift_that_was_withdrawn_before_it_came_is_not_taken() -> None:
    """It counts with its giver again; where another taker has the same vector, it could still be pulled."""
    net = MeshNet(0)
    giver, taker = walkers(net, 2)
    gift = Gift("g", 1, taker.host.voter, 1, 1.0, taker.machine.spec, 1)
    for message in (Withdraw("g", 1, taker.host.voter), gift):
        effects = taker.host.mesh.receive(giver.host.voter, message, net.now)
        assert [type(effect.message) for effect in effects if isinstance(effect, Send)] == [Refused]
    assert not taker.machine.coming


def test_a_later_gift_takes_the_place_of_one_that_its_giver_has_settled_by_itself() -> None:
    net = MeshNet(0)
    giver, taker = walkers(net, 2)
    for serial in (1, 2):
        gift = Gift("g", serial, taker.host.voter, 1, 1.0, taker.machine.spec, serial)
        taker.host.mesh.receive(giver.host.voter, gift, net.now)
    assert taker.machine._coming[giver.host.voter].gift == gift
    assert [intake.key.step for intake in taker.host.mesh.parcels._intakes.values()] == [2]


def untold(source: str, target: str, message: Any) -> Any:
    """Answers of a taker do not come."""
    return None if isinstance(message, Taken) else message


@pytest.mark.parametrize(("fault", "limit_s"), [("leave", 10.0), ("kill", 90.0)])
def test_a_share_of_a_process_that_is_gone_comes_back_of_a_dead_one_after_a_time(fault: str, limit_s: float) -> None:
    net = MeshNet(3)
    a, b = walkers(net, 2)
    net.tamper = untold
    a.step("ring", [a.host.voter, b.host.voter])
    net.run(1.0)
    assert a.weight == 0.5 and b.machine.arrived_from(a.host.voter, 0)
    getattr(net, fault)(b.host)
    net.until(lambda: not a.machine.unsettled, limit_s)
    a.take()
    assert a.weight == 1.0


@pytest.mark.parametrize("fault", ["leave", "kill"])
@pytest.mark.parametrize("sent", [True, False])
def test_what_one_who_is_gone_may_have_given_on_of_a_share_that_comes_back_is_told(fault: str, sent: bool) -> None:
    """Its answer was lost: the giver can't know that a part of the share is elsewhere by now."""
    net = MeshNet(3)
    a, b, c = walkers(net, 3)
    a.weight, a.z[:], b.z[:], c.z[:] = 1.0, 1.0, 0.0, 0.0
    unheard = Taken if sent else Pull
    net.tamper = lambda source, target, message: (
        None if target == a.host.name and isinstance(message, unheard) else message
    )
    a.step("ring", [a.host.voter, b.host.voter])
    net.run(2.0)
    b.step("ring", [b.host.voter, c.host.voter])
    net.run(2.0)
    assert not b.machine.unsettled
    c.take()
    getattr(net, fault)(b.host)
    net.until(lambda: not a.machine.unsettled, 90.0)
    a.take()
    assert a.weight == 1.0 and a.overdrawn == 0.0
    twice = a.weight * float(a.z[0]) + c.weight * float(c.z[0]) - 1.0
    assert twice == pytest.approx(0.25 if sent else 0.0) and a.unsure == (0.5 if sent else 0.0) >= twice


def test_a_share_taken_back_from_one_who_had_it_after_all_is_given_up_and_told() -> None:
    net = MeshNet(4)
    a, b = walkers(net, 2)
    net.tamper = untold
    a.step("ring", [a.host.voter, b.host.voter])
    net.run(1.0)
    net.freeze(b.host)
    net.until(lambda: not a.machine.unsettled, 90.0)
    a.take()
    assert a.weight == 1.0
    net.tamper = lambda source, target, message: message
    net.thaw(b.host)
    net.run(5.0)
    a.take()
    b.take()
    assert a.overdrawn == 0.5 and a.weight + b.weight == pytest.approx(3.0)


@pytest.mark.parametrize("had", [True, False])
@pytest.mark.parametrize("lost", [1, 5])
def test_one_whose_share_was_taken_back_is_asked_until_it_answers_and_given_nothing_before(
    lost: int, had: bool
) -> None:
    net = MeshNet(4)
    a, b = walkers(net, 2)
    voters = [a.host.voter, b.host.voter]
    for _ in range(2):
        net.tamper = untold if had else lambda source, target, message: None
        a.step("ring", voters)
        net.run(1.0)
        net.freeze(b.host)
        net.until(lambda: not a.machine.unsettled, 90.0)
        net.run(1.0)  # what was on its way to b is lost with the rest
        a.take()
        asked: list[Withdraw] = []

        def forgetful(source: str, target: str, message: Any, asked: list[Withdraw] = asked) -> Any:
            asked += [message] if isinstance(message, Withdraw) else []
            return None if isinstance(message, Withdraw) and len(asked) <= lost else message

        b.host.inbox.clear()
        net.tamper = forgetful
        net.thaw(b.host)
        net.until(lambda asked=asked: asked, 5.0)  # type: ignore[misc]
        assert not a.machine.free(b.host.voter)
        net.until(lambda: a.machine.free(b.host.voter), 20.0)
        assert len(asked) == lost + 1 and len({m.serial for m in asked}) == 1
        net.run(10.0)
        assert len(asked) == lost + 1, "it has answered"
    a.take()
    b.take()
    assert (a.overdrawn > 0.0) == had and a.weight + b.weight == pytest.approx(3.0)


@pytest.mark.parametrize("answer", [Taken("g", 0), Refused("g", 0, "no")])
def test_an_answer_about_another_gift_settles_neither_the_one_on_its_way_nor_the_one_that_was_taken_back(
    answer: Taken | Refused,
) -> None:
    net = MeshNet(4)
    a, b = walkers(net, 2)
    net.tamper = untold
    a.step("ring", [a.host.voter, b.host.voter])
    net.run(1.0)

    def heard() -> bool:
        """Whether it moved anything."""
        (serial,) = {g.serial for g in [*a.machine._given.values(), *a.machine._reclaimed.values()]}
        for other in (serial - 1, serial + 1):
            told = dataclasses.replace(answer, serial=other)
            net.act(a.host, lambda mesh, now, told=told: mesh.receive(b.host.voter, told, now))
        arrivals = a.machine.arrivals()
        a.machine._arrivals = arrivals
        return a.machine.free(b.host.voter) or bool(arrivals.overdrawn)

    assert not heard() and a.machine.unsettled
    net.freeze(b.host)
    net.until(lambda: not a.machine.unsettled, 90.0)
    assert not heard()


@pytest.mark.parametrize("fault", ["", "kill", "leave", "stalled"])
def test_who_gives_is_needed_until_its_gift_is_taken_or_cannot_be(fault: str) -> None:
    net = MeshNet(3)
    giver, taker = walkers(net, 2)
    before = giver.machine._serial
    giver.step("ring", [giver.host.voter, taker.host.voter], keep_s=1.0)
    assert giver.host.mesh.owed() == {("gossip/g", before + 1): frozenset({taker.host.name})}
    assert not taker.host.mesh.owed()
    if fault in ("kill", "leave"):
        getattr(net, fault)(taker.host)
    elif fault:
        net.tamper = lambda source, target, m: None if isinstance(m, Parcel | Refused) else m
    net.until(lambda: not giver.host.mesh.owed(), 10.0)
    assert bool(giver.machine.unsettled) == (fault in ("kill", "stalled")) and bool(giver.host.mesh._gossips)


def test_gifts_of_another_shape_or_to_nobody_come_back() -> None:
    net = MeshNet(5)
    a, *_ = walkers(net, 1)
    other, nobody = net.add(2)
    other.mesh.gossip("g", Grid(NUMEL + 1, CHUNK, "fp32"))
    for host, why in ((other, "101 elements"), (nobody, "nobody gossips")):
        a.step("ring", [a.host.voter, host.voter])
        net.until(lambda: not a.machine.unsettled, 10.0)
        (share,) = a.machine._arrivals.returned
        assert why in share.why
        a.take()
        assert a.weight == 1.0


def test_who_does_not_take_in_what_comes_refuses_more() -> None:
    net = MeshNet(6)
    many = walkers(net, 2)
    a, b = many
    for _ in range(12):
        a.weight = 1.0
        a.step("ring", [a.host.voter, b.host.voter])
        net.until(lambda: settled(many), 10.0)
    assert len(b.machine._arrivals.taken) == 8


def test_gifts_that_are_being_pulled_count_towards_those_that_wait_here() -> None:
    net = MeshNet(5)
    taker, *givers = walkers(net, ARRIVED_MAX + 2)
    net.tamper = lambda source, target, m: None if isinstance(m, Parcel) and source != givers[0].host.name else m
    for i, giver in enumerate(givers):
        giver.step("ring", sorted([giver.host.voter, taker.host.voter]), keep_s=60.0)
        if not i:
            net.until(lambda: taker.machine._arrivals.taken)
    net.run(0.5)
    assert len(taker.machine.coming) == ARRIVED_MAX - 1
    assert [share.why for giver in givers for share in giver.machine.arrivals().returned] == ["busy"]


@pytest.mark.parametrize("weight", [0.0, -1.0, 2.0**54])
def test_a_gift_of_a_weight_that_nobody_can_have_is_refused(weight: float) -> None:
    net = MeshNet(5)
    giver, taker = walkers(net, 2)
    change = {"weight": weight}
    net.tamper = lambda source, target, m: dataclasses.replace(m, **change) if isinstance(m, Gift) else m
    giver.step("ring", [giver.host.voter, taker.host.voter])
    net.until(lambda: not giver.machine.unsettled, 2.0)
    assert not taker.machine.coming and not taker.machine.arrivals().taken
    assert [share.why for share in giver.machine.arrivals().returned] == [f"a weight of {weight}"]


def test_a_gift_that_is_not_finite_is_refused_at_once_and_counted_under_its_giver() -> None:
    net = MeshNet(5)
    giver, taker = walkers(net, 2)

    def tamper(source: str, target: str, m: Any) -> Any:
        if not isinstance(m, Parcel) or m.chunk != 3:
            return m
        return dataclasses.replace(m, payload=np.full(CHUNK, np.nan, "<f4").tobytes())

    net.tamper = tamper
    giver.step("ring", [giver.host.voter, taker.host.voter])
    net.until(lambda: not giver.machine.unsettled, 2.0)
    net.run(1.0)
    assert not taker.machine.coming and not taker.machine.arrivals().taken and not taker.host.mesh.parcels._intakes
    assert [share.why for share in giver.machine.arrivals().returned] == ["refused: not finite"]
    assert taker.host.mesh.ground.dropped[giver.host.name, "not finite"] == 1


@pytest.mark.parametrize("n", [2, 3, 4, 7, 8, 16])
def test_graphs_conserve_mass_and_shrink_the_distance_by_their_gap(n: int) -> None:
    rng = np.random.default_rng(n)
    for graph in GRAPHS:
        x = rng.standard_normal(n)
        for t in range(20):
            p = mixing(graph, n, t)
            assert np.allclose(p.sum(0), 1.0) and (p >= 0).all()
            assert sum(share for _, share in gives(graph, n, 0, t)) < 1.0
        rho = contraction(graph, n)
        assert 0.0 <= rho < 1.0
        deviation = x - x.mean()
        if graph == "random-pairs":
            squares = [np.linalg.norm(mixing(graph, n, t) @ deviation) ** 2 for t in range(3000)]
            assert np.mean(squares) == pytest.approx(rho**2 * np.linalg.norm(deviation) ** 2, rel=0.05)
        elif graph == "ring":
            after = mixing(graph, n) @ deviation
            assert np.linalg.norm(after) <= rho * np.linalg.norm(deviation) + 1e-12
        elif n == 1 << hops(n):
            for t in range(hops(n)):
                deviation = mixing(graph, n, t) @ deviation
            assert np.linalg.norm(deviation) < 1e-12 and rho == 0.0
    with pytest.raises(UsageError, match="random-pairs"):
        gives("star", n, 0, 0)


def test_a_lossy_codec_moves_no_mass() -> None:
    grid = Grid(NUMEL, CHUNK, "int4")
    z = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1))
    before = 3.0 * z.double()
    payloads, left = give_away(grid, z, 3.0, 1.0)
    told = torch.zeros(NUMEL)
    assert absorb(grid, told, 0.0, Share(Voter("giver", 1), 1.0, 1, payloads)) == 1.0
    assert not torch.equal(told, z)
    torch.testing.assert_close(left * z.double() + 1.0 * told.double(), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("numel", "noise"), [(100_003, 0.1), (7 * SLICE_ELEMS + 5, 0.0)])
def test_sketches_tell_the_distance(numel: int, noise: float) -> None:
    """Of vectors that differ by a constant, too: what all slices have in common adds up where their signs do."""
    generator = torch.Generator().manual_seed(2)
    many = [torch.randn(numel, generator=generator) * noise + i * (1 - 9 * noise) for i in range(8)]
    stack = torch.stack(many).double()
    exact = math.sqrt(float((stack - stack.mean(0)).square().sum(1).mean()))
    told = [from_bytes(to_bytes(sketch(x, seed=3))) for x in many]
    assert distance([t for t in told if t is not None]) == pytest.approx(exact, rel=0.15)
    assert distance([sketch(many[0]), sketch(many[0])]) == 0.0
    assert from_bytes(b"x") is None and from_bytes(b"\xff" * 1024) is None


def test_who_has_told_of_an_older_step_is_compared_with_that_step() -> None:
    """Two that agree to 0.01 were told to be 3 apart: the one's newest vector beside what the other had a step ago."""
    generator = torch.Generator().manual_seed(5)
    common = torch.cumsum(torch.randn(TRAIL_STEPS + 10, SKETCH_ELEMS, generator=generator), 0)
    trail = Trail()
    assert trail.distance([(0, common[0])]) is None, "nothing of its own yet"
    for t in range(4):
        trail.add(t, common[t])
    assert trail.distance([]) == 0.0 and trail.distance([(3, None)]) is None
    assert trail.distance([(3, common[3]), (2, common[2]), (0, common[0])]) == 0.0
    off = torch.full((SKETCH_ELEMS,), 0.01 / math.sqrt(SKETCH_ELEMS))
    assert trail.distance([(2, common[2] + off)]) == pytest.approx(0.005, rel=1e-3)
    many = [(3, torch.randn(SKETCH_ELEMS, generator=generator)) for _ in range(3)]
    assert trail.distance(many) == pytest.approx(distance([common[3], *(told for _, told in many)]))
    trail.add(7, common[7])
    assert trail.distance([(5, common[3])]) == 0.0, "it passed 5 over: what it had then is of step 3"
    assert trail.distance([(9, common[7])]) == 0.0, "one that is ahead is compared with the newest"
    for t in range(8, TRAIL_STEPS + 10):
        trail.add(t, common[t])
    assert trail.distance([(2, common[2])]) is None, "too old to be compared"
    far = [(20, torch.full((SKETCH_ELEMS,), sign * 3e38)) for sign in (1, -1)]
    for others in ([(20, common[2])], far):
        apart = trail.distance(others)
        assert apart is not None and 0.0 < apart < math.inf


def test_a_gift_to_one_that_is_about_to_begin_waits_for_it() -> None:
    """A peer shows that it takes part before it knows how long its vector is: gifts came back from it at once."""
    net = MeshNet(0)
    early, late = net.add(2)
    first = Walker(net, early, 0)
    late.mesh.will_gossip("g", True)
    first.step("ring", [early.voter, late.voter])
    net.run(3.0)
    assert first.machine.unsettled, "neither taken nor refused"
    second = Walker(net, late, 1)
    net.until(lambda: settled([first, second]), 5.0)
    for w in (first, second):
        w.take()
    assert (first.weight, second.weight) == (0.5, 1.5)


def test_a_gift_to_one_that_never_begins_comes_back() -> None:
    net = MeshNet(0)
    early, late = net.add(2)
    first = Walker(net, early, 0)
    late.mesh.will_gossip("g", True)
    first.step("ring", [early.voter, late.voter], keep_s=5.0)
    net.until(lambda: not first.machine.unsettled, 10.0)
    first.take()
    assert first.weight == 1.0


def test_a_gift_that_gets_on_is_not_withdrawn_however_long_it_takes() -> None:
    net = MeshNet(7)
    hosts = [*net.add(1, up_Bps=60.0), *net.add(1)]
    slow, other = (Walker(net, host, i) for i, host in enumerate(hosts))
    slow.step("ring", [host.voter for host in hosts], keep_s=4.0)
    took_s = net.until(lambda: not slow.machine.unsettled)
    other.take()
    assert took_s > 4 * 4.0 and not slow.machine.arrivals().returned
    assert (slow.weight, other.weight) == (0.5, 1.5)


def test_a_gift_whose_taker_only_asks_again_is_withdrawn() -> None:
    net = MeshNet(7)
    a, b = walkers(net, 2)
    net.tamper = lambda source, target, message: None if isinstance(message, Parcel) else message
    a.step("ring", [a.host.voter, b.host.voter], keep_s=3.0)
    took_s = net.until(lambda: not a.machine.unsettled)
    a.take()
    assert net.sent["Pull"] > 1 and 3.0 < took_s < 4.5 and (a.weight, b.weight) == (1.0, 2.0)


def test_no_more_vectors_than_some_are_on_their_way() -> None:
    net = MeshNet(8)
    giver, *others = walkers(net, VECTORS_MAX + 2)
    net.tamper = lambda source, target, message: None if isinstance(message, Parcel) else message
    for other in others:
        giver.step("ring", [giver.host.voter, other.host.voter])
    assert len(giver.machine.unsettled) == VECTORS_MAX == len(giver.host.mesh.parcels.holdings._held)
    net.until(lambda: giver.machine.free(others[-1].host.voter), 15.0)


def paced(net: MeshNet, host: Host, pace: GiftPace, takers: list[Host]) -> dict[str, float | None]:
    host.mesh.ground.wake(net.now)
    pace.follow([taker.voter for taker in takers])
    return {effect.peer: effect.rate_Bps for effect in host.mesh.ground.drain() if isinstance(effect, Pace)}


def test_gifts_share_the_link_and_none_goes_faster_than_its_taker_can_take_it() -> None:
    net = MeshNet(1)
    giver, one, two, three = net.add(4)
    told: list[float] = []
    ground = giver.mesh.ground
    ground.tell_rates = lambda: told.append(net.now)
    pace = GiftPace(ground)
    assert paced(net, giver, pace, [one]) == {} and ground.rates.measuring, "its link is not known: TCP finds out"
    assert paced(net, giver, pace, []) == {} and len(told) == 1 and not ground.rates.measuring
    ground.rates.told_up_Bps = 10e6
    two.record = dataclasses.replace(two.record, down_Bps=2e6)
    three.record = dataclasses.replace(three.record, down_Bps=9e6)
    net.version += 1
    assert paced(net, giver, pace, [one]) == {one.name: PLAN_SHARE * 10e6}
    assert paced(net, giver, pace, [one, two]) == {one.name: PLAN_SHARE * 5e6, two.name: PLAN_SHARE * 2e6}
    assert paced(net, giver, pace, [two]) == {one.name: None, two.name: PLAN_SHARE * 2e6}
    assert paced(net, giver, pace, [two]) == {}
    assert paced(net, giver, pace, [three]) == {two.name: None, three.name: PLAN_SHARE * 9e6}
    assert paced(net, giver, pace, []) == {three.name: None} and len(told) == 2
    ground.rates.told_up_Bps = UNPACED_BPS
    assert paced(net, giver, pace, [one]) == {} == paced(net, giver, pace, []), "timers cost more than they save"
    ground.rates.begin(net.now, Load(1e6, 1e6))  # of a group
    assert paced(net, giver, pace, [two]) == {} == paced(net, giver, pace, [])
    assert ground.rates.measuring and len(told) == 3


def test_a_group_that_begins_beside_gifts_keeps_its_own_measuring_and_its_own_pace() -> None:
    net = MeshNet(1)
    giver, one, two = net.add(3)
    ground = giver.mesh.ground
    ground.rates.told_up_Bps = 10e6
    pace = GiftPace(ground)
    assert paced(net, giver, pace, [one]) == {one.name: PLAN_SHARE * 10e6}
    ground.rates.begin(net.now, Load(3e6, 3e6))  # of a group with both, which has paced them as its plan says
    assert paced(net, giver, pace, [one, two]) == {}, "what the group's plan gives them is less"
    assert ground.rates._asked_Bps == Load(3e6, 3e6)
    assert paced(net, giver, pace, []) == {}, "nothing is lifted in the middle of the group"
    assert ground.rates.measuring, "the group learns at its end, and no probe begins before"
    ground.rates.end()
    assert not ground.rates.measuring


def test_a_group_is_measured_without_the_time_before_it_in_which_a_gift_stood_still() -> None:
    net = MeshNet(1)
    giver, one = net.add(2)
    rates = giver.mesh.ground.rates
    pace = GiftPace(giver.mesh.ground)
    paced(net, giver, pace, [one])
    net.run(60.0)  # its taker is down
    rates.begin(net.now, Load(0.0, 0.0))
    for _ in range(100):  # ten seconds of 1 MB/s
        net.run(0.1)
        rates.sent(net.now, 100_000, more=True)
    rates.end()
    assert rates.told_up_Bps == pytest.approx(1e6, rel=0.05)


def test_gifts_without_a_pause_between_them_tell_of_the_link_too() -> None:
    """There is always one on its way where each step takes what is there, and the link of who gives so is not known."""
    net = MeshNet(1)
    giver, one, two = net.add(3)
    rates = giver.mesh.ground.rates
    pace = GiftPace(giver.mesh.ground)
    for i in range(100):
        paced(net, giver, pace, [[one, two], [two], [two, one], [one]][i % 4])
        for _ in range(10):  # each takes a second
            net.run(0.1)
            rates.sent(net.now, 100_000, more=True)
    assert rates.told_up_Bps == pytest.approx(1e6, rel=0.05)


def test_a_gossip_paces_its_gifts_until_they_are_settled() -> None:
    net = MeshNet(1)
    one, two = walkers(net, 2)
    one.host.mesh.ground.rates.told_up_Bps = 1e6
    paces: list[tuple[str, float | None]] = []
    carry_out = net.carry_out

    def heard(host: Host, effects: Sequence[Effect]) -> None:
        paces.extend((effect.peer, effect.rate_Bps) for effect in effects if isinstance(effect, Pace))
        carry_out(host, effects)

    net.carry_out = heard  # type: ignore[method-assign]
    one.step("ring", [one.host.voter, two.host.voter])
    net.until(lambda: settled([one, two]))
    assert paces == [(two.host.name, PLAN_SHARE * 1e6), (two.host.name, None)]


@pytest.mark.parametrize("again", [False, True])
def test_what_a_gossip_that_is_closed_has_taken_is_not_told_as_refused(again: bool) -> None:
    """It would come back to the giver though it counted, and was given on. Its giver had not heard of it before."""
    net = MeshNet(0)
    one, two = (Walker(net, host, i) for i, host in enumerate(net.add(2)))
    net.tamper = lambda source, target, m: None if isinstance(m, Taken) else m
    one.step("ring", [one.host.voter, two.host.voter])
    net.until(lambda: two.machine._arrivals.taken)
    two.take()
    net.act(two.host, lambda mesh, now: mesh.with_gossip(two.machine, two.machine.close, now))
    if again:
        two.machine = two.host.mesh.gossip("g", two.grid)
    net.tamper = lambda source, target, m: m
    net.until(lambda: not one.machine.unsettled, 10.0)
    one.take()
    assert (one.weight, two.weight) == (0.5, 1.5) and not two.machine.arrivals().taken


@pytest.mark.parametrize("begun_before", [False, True])
def test_what_was_refused_without_a_gossip_is_not_taken_by_one_that_begins_then(begun_before: bool) -> None:
    """It counts with its giver again. On a ring both neighbours have one vector, so it could be pulled all the same."""
    net = MeshNet(7)
    hosts = net.add(3)
    giver, other = (Walker(net, host, i) for i, host in enumerate(hosts[:2]))
    late, gifts = hosts[2], list[Gift]()
    if begun_before:
        closed(Walker(net, late, 2))
    else:
        late.mesh.will_gossip("g", True)
        giver.host.seen.down.add(late.voter)  # so that the gift is withdrawn

    def tamper(source: str, target: str, m: Any) -> Any:
        if isinstance(m, Gift) and target == late.name:
            gifts.append(m)
        return None if isinstance(m, Pull) and source == other.host.name else m

    net.tamper = tamper
    giver.step("ring", [host.voter for host in hosts], keep_s=30.0)
    net.until(lambda: {share.peer for share in giver.machine.unsettled} == {other.host.voter}, 10.0)
    begins = Walker(net, late, 2)
    net._deliver(late, giver.host.voter, gifts[0])
    net.until(lambda: not begins.machine.coming)
    net.tamper = lambda source, target, m: m
    net.until(lambda: settled([giver, other, begins]), 60.0)
    for walker in (giver, other, begins):
        walker.take()
    assert (giver.weight, other.weight, begins.weight) == (0.75, 1.25, 1.0)


def closed(walker: Walker) -> None:
    walker.net.act(walker.host, lambda mesh, now: mesh.with_gossip(walker.machine, walker.machine.close, now))


@pytest.mark.parametrize("who", ["giver", "taker"])
def test_a_gossip_that_is_closed_in_the_midst_of_a_gift_gives_all_back_at_once(who: str) -> None:
    """The memory of its vectors, its link's measuring, and its share in the other's: nobody waits for its silence."""
    net = MeshNet(3)
    one, two = walkers(net, 2)
    net.tamper = lambda source, target, m: None if isinstance(m, Parcel) and m.chunk else m
    one.step("ring", [one.host.voter, two.host.voter])
    net.until(lambda: two.machine.coming and two.machine._coming[one.host.voter].left < two.grid.n_chunks)
    assert one.host.mesh.ground.rates.measuring
    closed(one if who == "giver" else two)
    net.run(0.2)
    assert not one.machine.unsettled and not two.machine.coming
    for host in (one.host, two.host):
        assert not host.mesh.parcels.holdings._held and not host.mesh.parcels._intakes
        assert not host.mesh.ground.rates.measuring
    returned = one.machine.arrivals().returned
    assert [share.why for share in returned] == ([] if who == "giver" else ["this gossip is closed"])
    net.tamper = lambda source, target, m: m
    net.run(5.0)
    assert not two.machine.arrivals().taken


def test_a_gossip_that_is_closed_beside_a_group_slows_no_link_any_more() -> None:
    """Nobody looks again once the group has ended."""
    net = MeshNet(1)
    one, two = walkers(net, 2)
    rates, paces = one.host.mesh.ground.rates, list[Pace]()
    rates.told_up_Bps = 1e6
    one.step("ring", [one.host.voter, two.host.voter])
    rates.begin(net.now, Load(1e6, 1e6))
    carry_out = net.carry_out

    def heard(host: Host, effects: Sequence[Effect]) -> None:
        paces.extend(effect for effect in effects if isinstance(effect, Pace))
        carry_out(host, effects)

    net.carry_out = heard  # type: ignore[method-assign]
    closed(one)
    assert paces == [Pace(two.host.name, None)]


def test_chunks_that_go_to_another_taker_are_no_step_of_a_gift_that_stands_still() -> None:
    """On a ring both neighbours get the same vector, and one of them may take none of it."""
    net = MeshNet(7)
    hosts = [*net.add(1, up_Bps=60.0), *net.add(2)]
    slow, stuck, fine = (Walker(net, host, i) for i, host in enumerate(hosts))
    unheard = stuck.host.name
    net.tamper = lambda source, target, m: None if source == unheard and isinstance(m, Pull) else m
    slow.step("ring", [host.voter for host in hosts], keep_s=4.0)
    assert {share.peer for share in slow.machine.unsettled} == {stuck.host.voter, fine.host.voter}
    took_s = net.until(lambda: stuck.host.voter not in {share.peer for share in slow.machine.unsettled})
    assert 4.0 <= took_s < 6.0 and [share.peer for share in slow.machine.unsettled] == [fine.host.voter]
    net.until(lambda: not slow.machine.unsettled)
    fine.take()
    slow.take()
    assert slow.weight + fine.weight + stuck.weight == pytest.approx(3.0) and fine.weight > 1.0


def test_what_a_gift_takes_on_the_wire_is_told_by_both() -> None:
    net = MeshNet(2)
    one, two = walkers(net, 2, codec="fp16")
    for n in (1, 2):
        one.step("ring", [one.host.voter, two.host.voter])
        net.until(lambda: settled([one, two]))
        assert one.machine.bytes_sent == two.machine.bytes_received == n * one.grid.total_wire_bytes
    assert one.machine.bytes_received == two.machine.bytes_sent == 0


def test_a_gift_has_arrived_from_who_gave_it_and_of_its_step_or_an_earlier_one() -> None:
    """Whoever waits for those who give in this step waits on for the others, and for what was given before."""
    net = MeshNet(2)
    one, two, other = walkers(net, 3)
    one.t = 4
    one.step("ring", [one.host.voter, two.host.voter])
    net.until(lambda: two.machine._arrivals.taken)
    assert [two.machine.arrived_from(one.host.voter, step) for step in (4, 5, 6)] == [True, True, False]
    assert not two.machine.arrived_from(other.host.voter, 0)


@pytest.mark.parametrize("kind", [Gift, Withdraw])
@pytest.mark.parametrize("serial", [-1, -2])
def test_a_number_that_no_gift_has_is_refused(kind: type, serial: int) -> None:
    """Its taker looked for what it had answered to the gift before the first, and ended."""
    net = MeshNet(1)
    giver, taker = walkers(net, 2)
    gift = Gift("g", serial, taker.host.voter, 1, 1.0, taker.machine.spec, 1)
    message = gift if kind is Gift else Withdraw("g", serial, taker.host.voter)
    with pytest.raises(ProtocolError, match="number"):
        taker.host.mesh.receive(giver.host.voter, message, net.now)


@pytest.mark.parametrize("fault", ["leave", "kill"])
def test_a_share_of_which_nothing_went_to_its_taker_is_sure_though_all_of_the_vector_went_to_another(
    fault: str,
) -> None:
    """It was told as one that may count twice: two takers have one vector."""
    net = MeshNet(3)
    a, b, c = walkers(net, 3)
    net.tamper = lambda source, target, message: (
        None if source == b.host.name and isinstance(message, Pull) else message
    )
    a.step("ring", [a.host.voter, b.host.voter, c.host.voter])
    net.until(lambda: [share.peer for share in a.machine.unsettled] == [b.host.voter], 10.0)
    getattr(net, fault)(b.host)
    net.until(lambda: not a.machine.unsettled, 90.0)
    a.take()
    assert a.weight == 0.75 and a.unsure == 0.0


def test_a_gift_that_was_refused_is_not_taken_when_it_comes_again() -> None:
    """Its giver has taken it back; where another taker has the same vector, it can still be pulled."""
    net = MeshNet(0)
    giver, taker = walkers(net, 2)
    gift = Gift("g", 1, taker.host.voter, 1, 0.0, taker.machine.spec, 1)
    answers = list[object]()
    for weight in (0.0, 1.0):
        effects = taker.host.mesh.receive(giver.host.voter, dataclasses.replace(gift, weight=weight), net.now)
        answers += [type(effect.message) for effect in effects if isinstance(effect, Send)]
    assert answers == [Refused, Refused]
