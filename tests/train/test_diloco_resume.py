"""A `dlc.DiLoCo` that goes on from `state_dict(outer=True)`: as if it had never stopped, bit for bit on the CPU."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dlc.train.local_model
from dlc.errors import CheckpointError
from dlc.flat import FlatView
from dlc.integrations import saved
from dlc.report import Missing, RoundReport, Share
from dlc.train.diloco import DiLoCo
from dlc.train.uncounted import SavedSteps, Uncounted
from tests.train.fake_peer import OTHER, FakePeer

H, STEPS = 6, 21
State = dict[str, Any]


class Two(FakePeer):
    """Another peer is in each round, with three times our weight. With an overlap a round takes as long as a step."""

    def __init__(self, overlap: str, start_t: int = 0) -> None:
        super().__init__(start_t=start_t)
        self.lossy = True
        if overlap != "none":
            self.slices = [1] * STEPS

    def report(self, contributors: tuple[Share, ...], missing: tuple[Missing, ...]) -> RoundReport:
        (mine,) = contributors
        told = super().report((mine, Share(OTHER.peer, 3 * mine.weight, 1.0)), missing)
        return dataclasses.replace(told, weight=4 * mine.weight)


@pytest.fixture(autouse=True)
def look_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dlc.train.local_model, "POLL_S", 0.0)


def build(dtype: torch.dtype, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def made(net: nn.Module, peer: FakePeer, resume: State | None = None, **options: Any) -> DiLoCo:
    if options["overlap"] != "none":
        options["overlap_steps"] = 1
    inner = torch.optim.AdamW(net.parameters(), lr=0.05)
    opt = DiLoCo(net, inner, peer, sync_every=H, codec="int8", resume=resume, **options)
    if resume is not None:
        opt.load_state_dict(resume)
    return opt


def train(opt: DiLoCo, net: nn.Module, since: int = 0) -> Iterator[Tensor]:
    """The parameters after each step."""
    view = FlatView.of(net)
    for step in range(since, STEPS):
        inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        net(inputs.to(next(net.parameters()).dtype)).square().sum().backward()
        opt.step()
        opt.zero_grad()
        yield view.gather(torch.empty(view.numel))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("fragments", [1, 2, 3])
@pytest.mark.parametrize(
    ("overlap", "mixing"), [("none", 0.0), ("delayed", 0.0), ("delayed", 0.5), ("eager", 0.0), ("eager", 0.5)]
)
def test_who_resumes_while_no_round_is_on_its_way_goes_on_bit_for_bit(
    overlap: str, mixing: float, fragments: int, dtype: torch.dtype
) -> None:
    """Parameters in bf16 began where they were put, not at theta; eager began with our whole part of the mean."""
    options = {"overlap": overlap, "mixing": mixing, "fragments": fragments}
    net = build(dtype)
    opt = made(net, Two(overlap), **options)
    whole, states = list[Tensor](), dict[int, State]()
    for params in train(opt, net):
        whole.append(params)
        if opt.t and not opt._outer.waiting:
            states[len(whole)] = copy.deepcopy(opt.state_dict(outer=True))
    assert len(states) >= 3
    for at, state in states.items():
        other = build(dtype, seed=1)
        again = made(other, Two(overlap, start_t=state["t"]), state, **options)
        for step, params in enumerate(train(again, other, since=at), at):
            assert torch.equal(params, whole[step]), f"saved after {at} steps, another model after {step + 1}"


def test_what_a_framework_saves_is_all_that_belongs_to_the_bits(tmp_path: Path) -> None:
    options = {"overlap": "eager", "mixing": 0.5, "fragments": 2}
    net = build(torch.bfloat16)
    opt, whole = made(net, Two("eager"), **options), list[Tensor]()
    at, state = 0, State()
    for params in train(opt, net):
        whole.append(params)
        if not at and opt.t == 3 and not opt._outer.waiting:
            at, state = len(whole), copy.deepcopy(opt.state_dict(outer=True))
            saved.write(tmp_path, state, net)
    kept = saved.read(tmp_path)
    assert kept is not None and 0 < at < STEPS
    other = build(torch.bfloat16, seed=1)
    again = made(other, Two("eager", start_t=3), {**kept, "inner": state["inner"]}, **options)
    assert all(map(torch.equal, train(again, other, since=at), whole[at:]))


def test_where_the_inner_steps_began_is_checked_before_anything_changes() -> None:
    net = build(torch.bfloat16)
    opt = made(net, Two("none"), overlap="none", fragments=2)
    *_, before = train(opt, net)
    state = copy.deepcopy(opt.state_dict(outer=True))
    for start in (state["start"][1:], torch.full_like(state["start"], torch.nan)):
        with pytest.raises(CheckpointError, match="another model, or are damaged"):
            opt.load_state_dict({**state, "start": start})
    assert torch.equal(FlatView.of(net).gather(torch.empty_like(before)), before)


def test_a_state_that_does_not_tell_the_share_of_the_last_mean_leaves_it_as_it_is() -> None:
    net = build(torch.float32)
    opt = made(net, Two("eager"), overlap="eager")
    *_, _ = train(opt, net)
    state = opt.state_dict()
    assert state["share"] == opt._outer.share == 0.25
    opt.load_state_dict({**state, "share": 0.5})
    assert opt._outer.share == 0.5
    opt.load_state_dict({name: value for name, value in state.items() if name != "share"})
    assert opt._outer.share == 0.5


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(("share", wrong) for wrong in (float("nan"), -0.25, 1.5, "a quarter", None)),
        *(
            (name, wrong)
            for name in ("inner_step", "steps", "offered")
            for wrong in (float("nan"), -1, 0.5, "two", None)
        ),
        *(("held", wrong) for wrong in ([-1, 1], [float("inf"), 1], ["one"], 7)),
    ],
)
def test_a_number_of_a_state_that_cannot_be_is_refused_before_anything_changes(name: str, wrong: object) -> None:
    net = build(torch.float32)
    opt = made(net, Two("eager"), overlap="eager", fragments=2)
    *_, before = train(opt, net)
    state = copy.deepcopy(opt.state_dict(outer=True))
    momentum = copy.deepcopy(opt.inner.state_dict())
    fresh = torch.optim.AdamW(net.parameters(), lr=0.01).state_dict()
    with pytest.raises(CheckpointError, match=f"{name} of the saved state is .*, and must be"):
        opt.load_state_dict({**state, "inner": fresh, name: wrong})
    assert torch.equal(FlatView.of(net).gather(torch.empty_like(before)), before)
    assert str(opt.inner.state_dict()) == str(momentum) and opt._outer.share == state["share"]


def test_no_more_steps_than_there_are_can_be_on_their_way_to_a_round() -> None:
    """So many less than none were told as lost."""
    for state in ({"steps": 2, "offered": 3}, {"inner_step": 2, "offered": 3}):
        with pytest.raises(CheckpointError, match="offered of the saved state is 3, and must be .* from 0 to 2"):
            SavedSteps.of(state)
    assert SavedSteps.of({"steps": 2, "offered": 2}) == SavedSteps(0, 2, 2, [])


@pytest.mark.parametrize("steps", [0, 2, 2**53])
def test_steps_are_as_many_as_the_fragment_of_the_last_round_holds(steps: int) -> None:
    """They are the weight of what is offered next: beside such a one nothing of the others would be in a mean."""
    with pytest.raises(CheckpointError, match=f"steps of the saved state is {steps}, and must be 1, the least that"):
        SavedSteps.of({"inner_step": 0, "steps": steps, "held": [3, 1]})
    assert SavedSteps.of({"inner_step": 1, "steps": 1, "held": [3, 1]}) == SavedSteps(1, 1, 0, [3, 1])


def test_parameters_without_the_outer_state_that_they_began_at_are_no_state() -> None:
    net = build(torch.float32)
    opt = made(net, Two("none"), overlap="none", fragments=2)
    *_, _ = train(opt, net)
    state = opt.state_dict(outer=True)
    assert state["local"] is not None
    with pytest.raises(CheckpointError, match="no state of dlc.DiLoCo"):
        opt.load_state_dict({name: value for name, value in state.items() if name != "outer"})


def test_a_round_is_due_as_soon_after_a_second_restart_as_after_the_first() -> None:
    """Of a period of four steps two were lost with the first process, and one is on its way to a round."""
    first = Uncounted(4, 1)
    first.lose(SavedSteps(inner_step=2, steps=2, offered=0, held=[2]))
    first.add()
    first.offered = 1
    second = Uncounted(4, 1)
    second.take_up(SavedSteps.of({**first.saved(), "held": first.held.amounts()}))
    assert not first.due and not second.due
    for steps in (first, second):
        steps.add()
    assert first.due and second.due and second.steps == 2 and second.held.amounts() == [2]


def test_a_number_of_steps_that_nobody_made_takes_no_memory() -> None:
    """As in a state that is damaged: where it was so large, the process ended for want of memory."""
    many = Uncounted(4, 1)
    many.take_up(SavedSteps.of({"inner_step": 2**53, "steps": 2**53, "offered": 0}))
    assert len(many.work.blocks) == many.steps == 2**53
