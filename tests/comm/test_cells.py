"""Moshpit's grid: exact for any number of peers, in float64 and through the real machines on a virtual clock."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from dlc.comm.cells import Cells, grid_of
from dlc.comm.grid import Grid
from dlc.comm.groups import GroupDone
from dlc.comm.meetings import Call
from dlc.comm.moshpit import Course
from dlc.errors import UsageError
from dlc.sim.meshnet import MeshNet


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
    first = course.leg(names, "p0", ["moshpit/other#7.0/1", "nonsense"])
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
