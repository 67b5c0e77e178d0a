"""Eager: a peer's own part of the mean is applied at once, the others' parts when they come."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dlc.train.local_model
from dlc.flat import FlatView
from dlc.report import RoundReport, Share
from dlc.runspec import OuterSpec
from dlc.train.offers import Work
from dlc.train.outer_loop import OuterLoop
from tests.train.fake_peer import OTHER, FakePeer


class Two(FakePeer):
    """Another peer is in each round, with three times our weight, and moves every parameter by 0.5."""

    def report(self, contributors: tuple[Share, ...], missing: tuple[object, ...]) -> RoundReport:
        both = (*contributors, Share(OTHER.peer, 3.0, 1.0))
        self.rounds += 1
        self.head = self.rounds.to_bytes(2, "big")
        return RoundReport("train", self.state.t, self.head.hex(), both, (), 4.0, 0, 0, 0.0, 0.0, 0.0, 1)

    def means(self, vector: torch.Tensor) -> list[tuple[int, int, torch.Tensor | None]]:
        return [(0, len(vector), (vector + 3 * torch.full_like(vector, -0.5)) / 4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_our_part_comes_at_once_and_the_others_with_the_mean(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dlc.train.local_model, "POLL_S", 0.0)
    peer, model = Two(), nn.Linear(2, 2).to(dtype)
    peer.lossy = True
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    view = FlatView.of(model)
    loop = OuterLoop(peer, view, channel="train", outer=OuterSpec(lr=1.0, momentum=0.0), overlap="eager")
    loop.open(codec="fp32", chunk_elems=8)

    def value(values: torch.Tensor) -> float:
        assert torch.equal(values, values[:1].expand(6))
        return float(values[0])

    def local() -> float:
        return value(view.gather(torch.empty(6)))

    def step() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.5)

    step()
    assert loop.offer(1.0, Work((0,), 1)) and local() == 1.5, "alone, for all we know: all of our part"
    assert loop.wait(0.0) and loop.settle(Work((0,), 1)).counted and local() == 1.5
    step()
    assert local() == 2.0
    peer.slices = [1]
    assert loop.offer(1.0, Work((0,), 1)) and local() == 1.625, "a quarter of the mean is ours"
    here = loop.model.local()
    assert here is not None and value(here) == 2.0, "what is saved is what the steps made"
    step()
    assert not loop.wait(0.0) and loop.wait(0.0)
    settled = loop.settle(Work((0, 1), 2))
    assert settled.counted and value(peer.theta()) == 2.0 and local() == 2.5  # the mean, and one step since
    peer.means = lambda vector: [(0, 6, vector)]  # type: ignore[method-assign]
    assert loop.offer(1.0, Work((1,), 2)) and local() == 2.125
    loop.put_back()
    assert local() == 2.125
    assert loop.wait(0.0) and loop.settle(Work((1,), 2)).counted
    assert local() == value(peer.theta()) == 2.5, "nothing is counted twice or lost by what was applied in advance"
