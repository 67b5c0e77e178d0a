"""One flat gradient, written while backward runs."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from dlc.comm.filling import Filling
from dlc.errors import DlcError
from dlc.flat import FlatView, flatten_tensors
from dlc.train.gradients import EXPECTED_KEPT, EXPECTED_S_MIN, Gradients


class Model(nn.Module):
    """Four layers of 6, 6, 6 and 6 elements; the second takes part if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
        self.second = True

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x) if i != 1 or self.second else x
        return x.sum()


NUMEL, PIECE = 24, 6
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Bench:
    def __init__(self, device: str = "cpu") -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = Model().to(device)
        self.view = FlatView.of(self.model)
        self.now = 0.0
        self.gradients = Gradients(self.view.tensors, PIECE, lambda: self.now)
        self.vector = torch.full((NUMEL,), -1.0)
        self.fronts: list[int] = []

    def step(self, takes_s: float = 1.0) -> tuple[Filling | None, bool]:
        """Two micro-batches."""
        self.model.zero_grad(set_to_none=True)
        self.model(torch.randn(3, 2, device=self.device)).backward()
        self.vector.fill_(-1.0)
        filling = self.gradients.begin(self.vector)
        if filling is not None:
            filling.watch(1, lambda: self.fronts.append(filling.front))
        self.model(torch.randn(3, 2, device=self.device)).backward()
        self.now += takes_s
        return filling, self.gradients.end()

    def exact(self) -> Tensor:
        return flatten_tensors([torch.zeros_like(t) if t.grad is None else t.grad for t in self.view.tensors])


@pytest.mark.parametrize("device", DEVICES)
def test_the_first_backward_is_watched_and_the_others_become_final_piece_by_piece(device: str) -> None:
    bench = Bench(device)
    assert bench.step(2.0) == (None, True) and torch.equal(bench.vector, bench.exact())
    for expected_s, takes_s in ((2.0, 0.5), (EXPECTED_KEPT * 2.0, 4.0), (4.0, 1.0)):
        bench.fronts.clear()
        filling, sound = bench.step(takes_s)
        assert filling is not None and filling.expected_s == expected_s and filling.complete and sound
        assert bench.fronts == [18, 12, 6, 0]
        assert torch.equal(bench.vector, bench.exact())
    bench.gradients.close()
    bench.gradients.begin(bench.vector)
    bench.model(torch.randn(3, 2, device=device)).backward()
    assert bench.gradients._made == [None] * 8, "its hooks are gone"


def test_a_backward_that_takes_no_time_by_the_clock_was_watched_too() -> None:
    bench = Bench()
    assert bench.step(0.0) == (None, True)
    filling, _ = bench.step(0.0)
    assert filling is not None and filling.expected_s == EXPECTED_S_MIN


def test_gradients_that_come_in_two_parts_are_offered_at_the_end_only() -> None:
    """A part of the model runs a backward of its own: what it adds to a gradient is made as that was before."""
    bench = Bench()

    def within(_: Tensor) -> None:
        with torch.enable_grad():
            bench.model.layers[3](torch.ones(1, 2)).sum().backward()

    bench.view.tensors[0].register_hook(within)
    for _ in range(3):
        assert bench.step() == (None, True) and torch.equal(bench.vector, bench.exact())


def test_a_parameter_without_a_gradient_is_zero_and_known_at_the_end() -> None:
    bench = Bench()
    bench.step()
    bench.model.second = False
    filling, sound = bench.step()
    assert filling is not None and filling.complete and sound
    assert bench.fronts == [18, 12, 0] and (bench.vector[6:12] == 0).all() and torch.equal(bench.vector, bench.exact())


def test_what_is_not_final_stays_so_where_an_element_is_not_finite() -> None:
    bench = Bench()
    bench.step()
    calls = itertools.count()
    bench.view.tensors[2].register_hook(lambda g: g / 0.0 if next(calls) == 1 else g)  # of the second layer
    filling, sound = bench.step()
    assert filling is not None and filling.stopped and not filling.complete and not sound
    assert bench.fronts == [18, 12, 12] and filling.front == 12
    assert bench.step()[1], "the next one begins anew"


def test_a_backward_that_failed_leaves_nothing_behind() -> None:
    bench = Bench()
    bench.step()
    filling = bench.gradients.begin(bench.vector)
    bench.gradients.drop()
    bench.gradients.drop()
    assert filling is not None and filling.stopped
    bench.vector.fill_(7.0)
    bench.model(torch.randn(3, 2)).backward()
    assert (bench.vector == 7.0).all()


def changing(bench: Bench, in_place: bool) -> None:
    """After ours: scales a gradient once it was made, or puts another one in its place."""

    def halve(tensor: Tensor) -> None:
        assert tensor.grad is not None
        if in_place:
            tensor.grad.mul_(0.5)
        else:
            tensor.grad = tensor.grad * 0.5

    bench.view.tensors[-1].register_post_accumulate_grad_hook(halve)


each_change = pytest.mark.parametrize("in_place", [True, False])


@each_change
def test_gradients_that_change_after_they_were_made_are_offered_at_the_end_only(in_place: bool) -> None:
    bench = Bench()
    changing(bench, in_place)
    for _ in range(3):
        assert bench.step() == (None, True) and torch.equal(bench.vector, bench.exact())


@each_change
def test_a_gradient_that_changes_after_it_was_offered_is_an_error(in_place: bool) -> None:
    bench = Bench()
    bench.step()
    changing(bench, in_place)
    with pytest.raises(DlcError, match="changed after"):
        bench.step()
