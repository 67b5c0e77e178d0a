"""overlap = "delayed": inner steps go on during a round, and are the first ones of the next phase."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import dlc.train.local_model
from dlc.flat import FlatView
from dlc.runspec import RunSpec
from dlc.train import phases
from dlc.train.inner import InnerLoop, StepResult
from tests.swarm import DEADLINE_S
from tests.train.fake_peer import FakeMember, FakePeer
from tests.train.test_ahead import PER_STEP, STEP_TOKENS, spec, trained
from tests.train.test_trainer import H, Run

__all__ = ["spec", "trained"]


@pytest.fixture(autouse=True)
def look_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dlc.train.local_model, "POLL_S", 0.0)
    monkeypatch.setattr(phases, "PATIENCE_S_MIN", DEADLINE_S)  # no round is late where the machine stands still


@pytest.fixture
def delayed(spec: RunSpec) -> RunSpec:
    return dataclasses.replace(spec, rounds=3, overlap="delayed")


def test_steps_during_a_round_belong_to_the_next_phase(delayed: RunSpec, tmp_path: Path, trained: list[int]) -> None:
    run = Run(FakePeer(delayed), tmp_path)
    run.peer.slices = [3, H - 1]
    summary = run.go()
    assert run.peer.weights == [H * STEP_TOKENS] * 3
    assert [event["step"] for event in run.all("step")] == list(range(3 * H))  # the schedule has no gap and no repeat
    assert trained == list(range(3 * H * PER_STEP)) and summary.setbacks.tokens_dropped == 0
    assert [event["counted"] for event in run.all("round")] == [True] * 3


@pytest.mark.parametrize(
    "options", [{}, {"overlap": "eager"}, {"mixing": 0.25}, {"overlap": "none", "fragments": 2}, {"fragments": 2}]
)
def test_what_is_validated_after_a_round_is_the_model_of_that_round(
    delayed: RunSpec, tmp_path: Path, options: dict[str, Any]
) -> None:
    """And not that of this peer, which may be some steps ahead; these go on as if nobody had looked."""
    spec = dataclasses.replace(delayed, **options)
    looked, blind = (Run(FakePeer(spec), tmp_path / str(k), eval_every=k) for k in (1, 0))
    found: list[tuple[float, torch.Tensor]] = []
    take = looked.trainer._tell._on_event

    def keep(event: dict[str, Any]) -> None:
        take(event)
        if event["event"] == "validation":
            found.append((event["loss"], looked.peer.theta()))

    looked.trainer._tell._on_event = keep
    for run in (looked, blind):
        run.peer.slices = [2] * 10
        run.go()
    assert len(found) == spec.exchanges + 1
    view = FlatView.of(looked.trainer.model)
    for loss, theta in found:
        view.scatter(theta)
        assert loss == looked.trainer._engine.evaluate(looked.trainer._eval_batches)
    losses = [[event["loss"] for event in run.all("step")] for run in (looked, blind)]
    assert losses[0] == losses[1] and torch.equal(looked.peer.theta(), blind.peer.theta())


def test_nobody_steps_during_the_last_round(delayed: RunSpec, tmp_path: Path, trained: list[int]) -> None:
    run = Run(FakePeer(dataclasses.replace(delayed, rounds=1)), tmp_path)
    run.peer.slices = [5]
    run.peer.round_s = 0.0
    assert run.go().setbacks.tokens_dropped == 0 and len(trained) == H * PER_STEP


def test_what_was_trained_during_a_round_is_kept_on_top_of_its_mean(delayed: RunSpec, tmp_path: Path) -> None:
    """The change of the parameters is the mean's step and nothing else."""
    run = Run(FakePeer(delayed), tmp_path)
    run.peer.slices = [2]
    after: list[torch.Tensor] = []
    run.on_step = {n: lambda: after.append(run.params()) for n in (H, H + 1, H + 2)}
    seen: list[torch.Tensor] = []
    train_step = InnerLoop.train_step

    def first_of_next_phase(self: InnerLoop, batches: Any, step: int) -> StepResult:
        if step == H + 2:
            seen.append(run.params())
        return train_step(self, batches, step)

    before = run.params()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InnerLoop, "train_step", first_of_next_phase)
        run.go()
    offered = run.peer.vectors[0]
    torch.testing.assert_close(before - after[0], offered, rtol=0, atol=1e-6)
    steps = after[2] - after[0]  # made during the round
    outer = delayed.outer
    theta_1 = before - outer.lr * (offered + outer.momentum * offered)
    torch.testing.assert_close(seen[0], theta_1 + steps, rtol=0, atol=1e-6)


def test_a_round_longer_than_a_phase_is_gone_beyond(delayed: RunSpec, tmp_path: Path, trained: list[int]) -> None:
    """Nothing stands still as long as the lease lasts, and all of it is offered at once when the round is over."""
    run = Run(FakePeer(delayed), tmp_path)
    run.peer.slices = [100]
    run.peer.others = [FakeMember(status={"t": 0, "inner": 0, "of": 100, "step_s": 1000.0})]
    run.go()
    assert delayed.blocks_per_lease == 3 * H * PER_STEP
    assert run.peer.uptos[:2] == [H * PER_STEP, 2 * delayed.blocks_per_lease]
    assert trained == list(range(len(trained)))


def test_a_round_that_left_us_out_counts_all_the_steps_later(
    delayed: RunSpec, tmp_path: Path, trained: list[int]
) -> None:
    run = Run(FakePeer(delayed), tmp_path)
    run.peer.misses, run.peer.slices = ["late"], [2, 0]
    summary = run.go()
    assert [event["counted"] for event in run.all("round")] == [False, True, True]
    assert run.peer.weights[0] == H * STEP_TOKENS and run.peer.weights[1] >= (H + 2) * STEP_TOKENS
    assert summary.tokens == sum(run.peer.weights[1:]) and trained == list(range(len(trained)))


def test_steps_that_diverge_during_a_round_are_undone(
    delayed: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    train_step = InnerLoop.train_step

    def poisoned(self: InnerLoop, batches: Any, step: int) -> StepResult:
        calls.append(step)
        result = train_step(self, batches, step)
        return StepResult(float("nan"), result.tokens, 1.0) if len(calls) == H + 2 else result

    monkeypatch.setattr(InnerLoop, "train_step", poisoned)
    run = Run(FakePeer(delayed), tmp_path)
    run.peer.slices = [5]
    run.go()
    assert len(run.all("diverged")) == 1 and run.peer.weights == [H * STEP_TOKENS] * 3
    assert [event["counted"] for event in run.all("round")] == [True] * 3


def test_a_delayed_round_is_no_waiting(delayed: RunSpec, tmp_path: Path) -> None:
    run = Run(FakePeer(delayed), tmp_path)
    run.peer.slices = [3, 3]
    run.go()
    phases = [event["phase"] for event in run.all("phase")]
    assert phases.count("overlapping") == 2 and phases.count("waiting") == 1  # the last round is waited for


def test_blocks_of_delayed_steps_are_trained_once(delayed: RunSpec, tmp_path: Path, trained: list[int]) -> None:
    run = Run(FakePeer(dataclasses.replace(delayed, rounds=5)), tmp_path)
    run.peer.slices = [1, 0, 3, 2]
    run.go()
    assert sorted(trained) == list(range(len(trained)))
    assert run.peer.uptos == [n * H * PER_STEP for n in range(1, 6)]


def test_overlap_steps_bound_what_is_done_before_a_round_is_waited_for(delayed: RunSpec, tmp_path: Path) -> None:
    run = Run(FakePeer(dataclasses.replace(delayed, overlap_steps=1)), tmp_path)
    run.peer.slices = [9, 9, 9]
    made: list[int] = []

    def note() -> None:
        made.append(len(run.all("step")))

    run.peer.on_contribute = note
    run.go()
    assert made == [H, 2 * H, 3 * H] and run.peer.weights == [H * STEP_TOKENS] * 3
    ahead = [event["inner"] for event in run.all("step")]
    assert ahead == [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4]


@pytest.mark.parametrize("fragments", [1, 2])
def test_eager_steps_go_on_from_where_the_round_will_lead(delayed: RunSpec, tmp_path: Path, fragments: int) -> None:
    """Alone, what a peer foresees is what comes: the mean puts nothing right, and no step is lost or counted twice."""
    eager = dataclasses.replace(delayed, overlap="eager", codec="fp32", fragments=fragments)
    run = Run(FakePeer(eager), tmp_path)
    period = H // fragments
    run.peer.slices = [1] * (3 * fragments)
    before: list[torch.Tensor] = []
    run.on_step = {period + 1: lambda: before.append(run.params())}
    train_step, seen = InnerLoop.train_step, []

    def second_of_next_phase(self: InnerLoop, batches: Any, step: int) -> StepResult:
        if step == period + 1:
            seen.append(run.params())
        return train_step(self, batches, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InnerLoop, "train_step", second_of_next_phase)
        summary = run.go()
    torch.testing.assert_close(seen[0], before[0], rtol=0, atol=1e-6)
    assert summary.t == 4 * fragments - 1, "each fragment but one has its turn once more"
    assert run.peer.weights[: 3 * fragments] == [period * STEP_TOKENS] * 3 * fragments
    assert [event["step"] for event in run.all("step")] == list(range(3 * H))
    assert summary.digest == run.peer.state.digest().hex()
    assert torch.equal(run.params(), run.peer.theta())


def test_eager_steps_that_diverge_begin_again_where_the_round_will_lead(
    delayed: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    train_step = InnerLoop.train_step

    def poisoned(self: InnerLoop, batches: Any, step: int) -> StepResult:
        calls.append(step)
        result = train_step(self, batches, step)
        return StepResult(float("nan"), result.tokens, 1.0) if len(calls) == H + 2 else result

    monkeypatch.setattr(InnerLoop, "train_step", poisoned)
    run = Run(FakePeer(dataclasses.replace(delayed, overlap="eager")), tmp_path)
    run.peer.slices = [5]
    run.go()
    assert len(run.all("diverged")) == 1 and run.peer.weights == [H * STEP_TOKENS] * 3
    assert torch.isfinite(run.peer.theta()).all()


def test_a_missed_eager_round_counts_all_the_steps_later(delayed: RunSpec, tmp_path: Path, trained: list[int]) -> None:
    run = Run(FakePeer(dataclasses.replace(delayed, overlap="eager")), tmp_path)
    run.peer.misses, run.peer.slices = ["late"], [2, 0]
    summary = run.go()
    assert [event["counted"] for event in run.all("round")] == [False, True, True]
    assert run.peer.weights[1] >= (H + 2) * STEP_TOKENS and trained == list(range(len(trained)))
    assert summary.tokens == sum(run.peer.weights[1:])


def test_mixing_leaves_a_part_of_the_parameters_where_they_were(delayed: RunSpec, tmp_path: Path) -> None:
    run = Run(FakePeer(dataclasses.replace(delayed, mixing=0.25, codec="fp32")), tmp_path)
    run.peer.slices = [2]
    after: list[torch.Tensor] = []
    run.on_step = {n: lambda: after.append(run.params()) for n in (H, H + 2)}
    train_step, seen = InnerLoop.train_step, []

    def third_of_next_phase(self: InnerLoop, batches: Any, step: int) -> StepResult:
        if step == H + 2:
            seen.extend((run.params(), run.peer.theta()))
        return train_step(self, batches, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InnerLoop, "train_step", third_of_next_phase)
        run.go()
    mixed, theta = seen
    moved = after[1] - after[0]  # during the round
    torch.testing.assert_close(mixed, 0.75 * (theta + moved) + 0.25 * after[1], rtol=0, atol=1e-6)
    assert run.peer.weights == [H * STEP_TOKENS] * 3 and torch.equal(run.params(), run.peer.theta())
