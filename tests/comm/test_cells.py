"""Moshpit's grid: exact for any number of peers, in float64 and through the real machines on a virtual clock."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch

from dlc.comm.calls import Call, GoneOn, GroupDone, GroupFailed, MeetingFailed
from dlc.comm.cells import Cells, grid_of
from dlc.comm.grid import Grid
from dlc.comm.moshpit import Course
from dlc.errors import UsageError
from dlc.sim.meshnet import Host, MeshNet


def averaged(cells: Cells, x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """d rounds in exact arithmetic, each peer with the weight that the grid says."""
    x, total = x.copy(), weights.copy()
    for axis in range(cells.dims):
        peers_of = Counter(cells.cell(i) for i in range(cells.n))
        share = np.array([1.0 if axis == 0 else 1.0 / peers_of[cells.cell(i)] for i in range(cells.n)])
        new, new_total = x.copy(), total.copy()
        for i in range(cells.n):
            group = list(cells.group(i, axis))
            w = (total * share)[group]
            new[i], new_total[i] = (w @ x[group]) / w.sum(), w.sum()
        x, total = new, new_total
    return x


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 8, 11, 20, 27, 64, 100, 257])
@pytest.mark.parametrize("how", [{}, {"group_size": 2}, {"group_size": 3}, {"dims": 2}, {"dims": 3}])
def test_any_grid_gives_everybody_the_exact_mean_after_d_rounds(n: int, how: dict[str, int]) -> None:
    if n < 2 ** how.get("dims", 0):
        with pytest.raises(UsageError, match="needs at least"):
            grid_of(n, **how)
        return
    cells = grid_of(n, **how)
    assert cells.n_cells <= n and all(side >= 2 for side in cells.sides)
    assert {cells.cell(i) for i in range(cells.n_cells)} == {cells.cell(i) for i in range(n)}
    rng = np.random.default_rng(n)
    x, weights = rng.standard_normal(n), rng.uniform(0.1, 3.0, n)
    assert np.allclose(averaged(cells, x, weights), (weights @ x) / weights.sum(), rtol=1e-12, atol=1e-12)


def test_known_grids() -> None:
    assert grid_of(8, dims=3).sides == (2, 2, 2) and grid_of(27, group_size=3).sides == (3, 3, 3)
    assert grid_of(20, dims=3).sides == (3, 3, 2) and grid_of(8).sides == (8,) and grid_of(1).sides == ()
    assert grid_of(1024, group_size=32).sides == (32, 32)


@pytest.mark.parametrize(("n", "dims"), [(8, 3), (27, 3), (20, 3), (5, 2)])
def test_through_the_machines_the_mean_is_exact_too(n: int, dims: int) -> None:
    net = MeshNet(n, loss=0.02)
    hosts = net.add(n)
    names = sorted(host.name for host in hosts)
    numel = 40
    grid = Grid(numel, 16, "fp32")
    zs = [torch.randn(numel, generator=torch.Generator().manual_seed(i)) for i in range(n)]
    mean = torch.stack(zs).double().mean(0)
    weights, labels = [1.0] * n, [""] * n
    courses = [Course("m", None, dims) for _ in hosts]
    for _ in range(dims):
        outs = []
        for i, host in enumerate(hosts):
            leg = courses[i].leg(names, host.name, ())
            outs.append(torch.empty(numel))
            call = Call(leg.key, grid, zs[i], outs[i], weights[i], label=labels[i], expected=leg.peers)
            host.told.clear()
            net.act(host, lambda mesh, now, call=call: mesh.meet(call, now))  # type: ignore[misc]
        net.until(lambda: all(any(isinstance(e, GroupDone) for e in h.told) for h in hosts), 60.0)
        for i, host in enumerate(hosts):
            outcome = next(e for e in host.told if isinstance(e, GroupDone)).outcome
            assert not outcome.missing
            seats = {seat.voter.peer: seat.weight for seat in outcome.seats}
            weights[i] = sum(seats[p] for p in outcome.included)
            zs[i], labels[i] = outs[i], f"{outcome.leader}/{outcome.nonce}"
            courses[i].passed()
    assert all(w == pytest.approx(n) for w in weights)
    for z in zs:
        torch.testing.assert_close(z.double(), mean, rtol=1e-5, atol=1e-6)


def test_who_is_behind_joins_the_furthest_round_in_which_somebody_waits() -> None:
    names = [f"p{i}" for i in range(4)]
    course = Course("m", None, 2)
    far = f"moshpit/m#{'9' * 200}.0/0"  # the keys of the rounds after it would be too long for the board
    first = course.leg(names, "p0", ["moshpit/other#7.0/1", "nonsense", far])
    assert (first.cycle, first.axis, first.peers) == (0, 0, ("p0", "p1"))
    later = course.leg(names, "p0", ["moshpit/m#3.1/0", "moshpit/m#2.0/1", "moshpit/m#x.1/0"])
    assert (later.cycle, later.axis, later.peers) == (3, 1, ("p0", "p2"))
    assert course.passed() and (course.cycle, course.axis) == (4, 0)
    course.leg(names, "p0", ())
    assert not course.passed()
    without = course.leg(["p0", "p1", "p3"], "p0", ())
    assert without.axis == 1 and without.peers == ("p0",)  # p2 is dead, and not waited for
    course.begin_cycle()
    assert (course.cycle, course.axis) == (5, 0)
    assert course.leg(names, "p0", ()).cells.n == 4
    course.begin_cycle()
    assert (course.cycle, course.leg(names[:3] + ["p4", "p5"], "p0", ()).cells.n) == (5, 5)  # its round was not made


def test_a_round_is_whole_with_everybody_at_first_and_with_one_of_each_cell_later() -> None:
    names = [f"p{i}" for i in range(5)]  # p0 and p4 in one cell
    course = Course("m", None, 2)
    first = course.leg(names, "p0", ())
    assert first.peers == ("p0", "p1", "p4") and first.whole(dict.fromkeys(first.peers, first.mark))
    assert not first.whole(dict.fromkeys(("p0", "p1"), first.mark))
    assert not first.whole(dict.fromkeys(first.peers, first.mark) | {"p1": b""})
    course.passed()
    second = course.leg(["p0", "p1", "p2", "p3"], "p0", ())
    assert second.mark == first.mark and second.peers == ("p0", "p2")
    assert second.whole(dict.fromkeys(("p0", "p2"), second.mark))
    assert not second.whole(dict.fromkeys(("p0", "p4"), second.mark))
    other = Course("m", None, 2).leg(["p0", "p1", "p2", "p3"], "p0", ())
    assert other.key == first.key and not other.whole({"p0": other.mark, "p1": first.mark})


def test_who_waits_follows_those_in_later_cycles_and_in_a_later_round_only_where_nobody_else_is_left() -> None:
    course = Course("m", None, 1)
    names = ["p0", "p1", "p2"]
    leg = course.leg(names, "p0", ())
    assert course.awaited(leg, {"moshpit/m#0.0/0": {"p1"}, "moshpit/other#4.0/0": {"p2"}}) == {"p0", "p1", "p2"}
    with pytest.raises(GoneOn):
        course.awaited(leg, {"moshpit/m#1.0/0": {"p2"}})
    many = Course("m", None, 2)
    six = [f"p{i}" for i in range(6)]
    assert many.leg(six, "p0", ()).cells.sides == (3, 2)
    many.passed()
    second = many.leg([*six, "p6"], "p0", ())
    assert second.peers == ("p0", "p3")
    assert many.awaited(second, {"moshpit/m#1.0/0": {"p1"}}) == {"p0", "p3"}, "not of its line"
    with pytest.raises(GoneOn):
        many.awaited(second, {"moshpit/m#1.0/0": {"p3"}})
    three = Course("m", None, 2)
    nine = [f"p{i}" for i in range(9)]
    three.leg(nine, "p0", ())
    three.passed()
    later = three.leg(nine, "p0", ())
    assert later.peers == ("p0", "p3", "p6")
    assert three.awaited(later, {"moshpit/m#1.0/0": {"p3"}}) == {"p0", "p6"}
    alone = Course("m", 2, None).leg(["p0"], "p0", ())
    assert course.awaited(alone, {"moshpit/m#1.0/0": {"p2"}}) == {"p0"}


def test_a_round_in_which_those_of_one_cell_come_of_two_groups_is_not_whole() -> None:
    names = [f"p{i}" for i in range(5)]  # p0 and p4 in one cell
    course = Course("m", None, 2)
    course.leg(names, "p0", ())
    course.passed()
    leg = course.leg(names, "p0", ())
    one, other, second = leg.word("p0/1"), leg.word("p4/2"), leg.word("p2/3")
    assert leg.whole({"p0": one, "p2": second, "p4": one}) and leg.whole({"p0": one, "p2": second})
    assert not leg.whole({"p0": one, "p2": second, "p4": other})


@pytest.mark.parametrize("resume_s", [5.2, 6.0, 7.0])
def test_where_a_line_has_met_as_two_groups_nobody_takes_what_counts_twice_for_exact(resume_s: float) -> None:
    """Each of the two had somebody of both cells, and has all that these stand for."""
    net = MeshNet(3)
    walkers = [Walker(net, host, i, Course("m", None, 3)) for i, host in enumerate(net.add(11))]
    start = net.now
    for i, axis, at_s in [*((i, 1, 4.5) for i in (4, 6, 8, 10)), *((i, 2, resume_s) for i in (0, 2, 4, 6))]:
        walkers[i].not_before[axis] = start + at_s
    for walker in walkers:
        walker.go()
    net.until(lambda: all(w.over for w in walkers), 300.0)
    twice = [w for w in walkers if w.weight > 11]
    assert twice and not any(w.whole for w in twice)
    mean = torch.stack([w.given for w in walkers]).double().mean(0)
    for walker in walkers:
        if walker.whole:
            torch.testing.assert_close(walker.z.double(), mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n", [2, 5, 20, 65, 130])
@pytest.mark.parametrize("how", [{}, {"group_size": 3}, {"dims": 1}, {"group_size": 64}])
def test_the_largest_group(n: int, how: dict[str, int]) -> None:
    cells = grid_of(n, **how)
    assert cells.group_max == max(len(cells.group(i, axis)) for i in range(n) for axis in range(cells.dims))


@pytest.mark.parametrize("seed", range(8))
def test_whoever_dies_the_mean_is_exact_where_each_round_was_whole(seed: int) -> None:
    rng = random.Random(seed)
    net = MeshNet(seed, detect_s=rng.uniform(0.1, 2.0))
    n, dims = rng.choice([(8, 3), (5, 2), (7, 2)])
    walkers = [Walker(net, host, i, Course("m", None, dims)) for i, host in enumerate(net.add(n))]
    for walker in walkers:
        walker.go()
    for victim in rng.sample(walkers, rng.randint(0, 2)):
        net.clock.at(net.now + rng.uniform(0.0, 1.5), net.kill, victim.host)
    net.until(lambda: all(w.over or w.host.dead for w in walkers), 300.0)
    mean = torch.stack([w.given for w in walkers]).double().mean(0)
    exact = [w for w in walkers if w.over and w.whole]
    assert exact or any(w.host.dead for w in walkers)
    for walker in exact:
        torch.testing.assert_close(walker.z.double(), mean, rtol=1e-5, atol=1e-6)


class Walker:
    """One peer that goes through the grid once, as `dlc.Moshpit.average` does."""

    def __init__(self, net: MeshNet, host: Host, i: int, course: Course) -> None:
        self.net, self.host, self.course = net, host, course
        self.z = self.given = torch.randn(40, generator=torch.Generator().manual_seed(i))
        self.weight, self.label, self.whole, self.over = 1.0, "", True, False
        self.not_before: dict[int, float] = {}
        """When it begins with a round, by axis; at once where nothing is said."""
        host.heard = self.heard

    def go(self) -> None:
        if self.host.dead:
            return
        if self.net.now < (at := self.not_before.get(self.course.axis, 0.0)):
            self.net.clock.at(at, self.go)
            return
        up = self.host.seen.up
        members = sorted(h.name for h in self.net.hosts.values() if h is self.host or up(h.voter))
        self.leg = self.course.leg(members, self.host.name, ())
        self.out = torch.empty(40)
        gather = self.leg.word(self.label) if self.whole else b""
        call = Call(self.leg.key, Grid(40, 16, "fp32"), self.z, self.out, self.weight, label=self.label, gather=gather)
        call.expected = self.leg.peers
        self.net.act(self.host, lambda mesh, now: mesh.meet(call, now))

    def heard(self, event: object) -> None:
        if isinstance(event, GroupDone):
            outcome = event.outcome
            seats = {seat.voter.peer: seat for seat in outcome.seats}
            self.whole &= not outcome.missing and self.leg.whole({p: seat.gather for p, seat in seats.items()})
            self.weight = sum(seats[p].weight for p in outcome.included)
            self.z, self.label = self.out, f"{outcome.leader}/{outcome.nonce}"
        elif isinstance(event, GroupFailed | MeetingFailed):
            self.whole = False
        else:
            return
        if self.course.passed():
            self.over = True
        else:
            self.net.clock.at(self.net.now, self.go)
