"""The end of a run with fragments: each has one more turn, and what was trained is in the model that all end with."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dlc.train.local_model
from dlc.errors import DataError, DlcError
from dlc.flat import FlatView
from dlc.runspec import OuterSpec, RunSpec
from dlc.train import phases, saves
from dlc.train.held import END_PATIENCE_S, Held
from dlc.train.inner import InnerLoop, StepResult
from dlc.train.rounds import Rounds
from tests.swarm import DEADLINE_S
from tests.train.fake_peer import FakeMember, FakePeer
from tests.train.test_ahead import PER_STEP, STEP_TOKENS, spec, trained
from tests.train.test_swarm_pace import spec_of
from tests.train.test_trainer import H, Run
from tests.train.virtual import Player, Troupe

__all__ = ["spec", "trained"]

MEAN = OuterSpec(lr=1.0, momentum=0.0)
"""The outer step is the mean of the parameters: alone, a model that all is exchanged of stays as it is."""


@pytest.fixture(autouse=True)
def look_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dlc.train.local_model, "POLL_S", 0.0)
    monkeypatch.setattr(phases, "PATIENCE_S_MIN", DEADLINE_S)  # no round is late where the machine stands still


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The parameters as the last turns left them, before they become the swarm's."""
    finish, seen = Rounds.finish, list[Tensor]()

    def measured(self: Rounds) -> Any:
        view = self._parts.engine.view
        seen.append(view.gather(torch.empty(view.numel)))
        return finish(self)

    monkeypatch.setattr(Rounds, "finish", measured)
    return seen


def cut(spec: RunSpec, k: int, **options: Any) -> RunSpec:
    return dataclasses.replace(spec, **{"fragments": k, "outer": MEAN, "codec": "fp32", **options})


@pytest.mark.parametrize(
    ("k", "overlap", "limit"), [(4, "none", "rounds"), (2, "eager", "rounds"), (2, "delayed", "tokens")]
)
def test_nothing_that_was_trained_is_lost_at_the_end(
    k: int, overlap: str, limit: str, spec: RunSpec, tmp_path: Path, trained: list[int], before: list[Tensor]
) -> None:
    """All fragments but one were set back to their last round: up to `sync_every` steps of them."""
    tokens = 2 * H * STEP_TOKENS
    length = {"rounds": 2} if limit == "rounds" else {"rounds": 0, "tokens": tokens}
    run = Run(FakePeer(cut(spec, k, overlap=overlap, **length)), tmp_path / "state")
    run.peer.slices = [1] * 20
    summary = run.go()
    torch.testing.assert_close(before[0], run.peer.theta(), rtol=1e-6, atol=1e-7)
    assert torch.equal(run.params(), run.peer.theta()) and summary.digest == run.peer.state.digest().hex()
    ahead = len(trained) // PER_STEP - 2 * H
    if not ahead:
        turns = [H * STEP_TOKENS * (k - 1 - turn) // k**2 for turn in range(k - 1)]
        assert run.peer.weights == [H * STEP_TOKENS // k] * 2 * k + turns
        assert summary.tokens == tokens, "nothing is counted twice"
        assert summary.t == 2 * k + k - 1
    else:
        assert limit == "tokens" and summary.t == 3 * k, "of these steps each fragment has its turn, too"
    assert set(run.peer.patiences_s[2 * k :]) == {END_PATIENCE_S} and run.peer.uptos[2 * k - 1] == 2 * H * PER_STEP
    assert trained == list(range(len(trained))) and summary.setbacks.tokens_dropped == 0
    saved = saves.newest(tmp_path / "state")
    assert saved is not None and saved.t == summary.t and not any(saved.own["held"]) and "parameters" not in saved.own


def test_what_misses_its_last_turn_is_told(spec: RunSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(FakePeer(cut(spec, 4, rounds=1)), tmp_path)
    run.peer.misses = ["", "", "", "", "", "late"]
    summary = run.go()
    assert summary.t == 7 and run.peer.weights == [64.0, 64.0, 64.0, 64.0, 48.0, 32.0, 16.0]
    said = [record.getMessage() for record in caplog.records if record.name == "dlc.train.phases"]
    assert said == ["up to 128 tokens of 1 fragments are in no round: rounds have passed without this peer"]
    assert torch.equal(run.params(), run.peer.theta())


def test_who_is_stopped_meanwhile_makes_no_more_turns(
    spec: RunSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(FakePeer(cut(spec, 4, rounds=1)), tmp_path)
    run.peer.slices = [0, 0, 0, 0, 0, 1 << 40]
    contribute = run.peer.contribute

    def sixth(*args: Any, **options: Any) -> Any:
        if len(run.peer.weights) == 5:
            run.stop.set()
        return contribute(*args, **options)

    run.peer.contribute = sixth  # type: ignore[method-assign]
    assert run.go().t == 5 and torch.equal(run.params(), run.peer.theta())
    said = [record.getMessage() for record in caplog.records if record.name == "dlc.train.phases"]
    assert said == ["up to 128 tokens of 2 fragments are in no round: this peer was stopped"]


def test_an_error_ends_without_them(spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(FakePeer(cut(spec, 2)), tmp_path)
    step = InnerLoop.train_step

    def fails(self: InnerLoop, batches: Any, number: int) -> StepResult:
        if number == H:
            raise DataError("no more of it")
        return step(self, batches, number)

    monkeypatch.setattr(InnerLoop, "train_step", fails)
    with pytest.raises(DlcError, match="no more of it"):
        run.go()
    assert len(run.peer.vectors) == 2


def test_who_has_nothing_left_stays_for_the_last_turns_of_others(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And follows them: the others would end with another model."""
    monkeypatch.setattr(dlc.train.others, "LOOK_EVERY_S", 0.0)
    run = Run(FakePeer(cut(spec, 2, rounds=1)), tmp_path)
    other = {"t": 3, "inner": 2, "of": 2, "step_s": 1.0, "phase": "waiting"}
    looks = list[int]()

    def members() -> list[FakeMember]:
        if run.peer.state.t < 3:
            return []
        looks.append(run.peer.state.t)
        if len(looks) == 2:
            run.peer.pass_round()
        told = {**other, "t": 4, "phase": "leaving"} if len(looks) > 3 else other
        return [FakeMember(status={} if len(looks) == 1 else told)]

    monkeypatch.setattr(run.peer, "members", members)
    run.trainer.strategy.phases._others._members = members  # type: ignore[attr-defined]
    summary = run.go()
    assert summary.t == 4 and len(run.peer.vectors) == 3 and len(looks) >= 4
    rests = [said["eta_s"] for said in run.peer.said if said["status"]["phase"] == "leaving"]
    assert rests and set(rests) == {1e9}, "no round waits for it"


def test_peers_that_are_not_in_step_end_with_one_model(
    tmp_path: Path, before: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = cut(spec_of(tmp_path, 1), 3, sync_every=6)
    with Troupe(monkeypatch) as troupe:
        for i in range(2):
            Player(troupe, spec, tmp_path / str(i), lambda step, i=i: 1.0 + 0.3 * i).goes()
        summaries = troupe.end()
        assert len({(summary.t, summary.digest) for summary in summaries}) == 1 and summaries[0].t >= 5
        models = [FlatView.of(player.trainer.model) for player in troupe.players]
        assert torch.equal(*(view.gather(torch.empty(view.numel)) for view in models))
        held = [player.trainer.strategy.phases.held for player in troupe.players]  # type: ignore[attr-defined]
        assert not any(any(of_one.amounts()) for of_one in held)


def test_steps_that_are_undone_leave_what_is_offered_in_its_fragment_and_nothing_in_others() -> None:
    held = Held(3)
    held.add(10)
    held.counted(1, 0)
    assert held.amounts() == [0, 10, 10] and held.next(1) == 10  # offered to round 2
    held.add(5)
    held.undo(1, 5)
    assert held.amounts() == [0, 10, 0]
