"""A training that ends by an error keeps what was counted until then."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dlc.cli.sinks import sentence
from dlc.errors import CheckpointError, DataError, DlcError, SwarmClosed, UsageError
from dlc.runspec import RunSpec
from dlc.train import saver, saves
from dlc.train.data import BlockSource
from dlc.train.group import SiteLost
from dlc.train.inner import InnerLoop, StepResult
from dlc.train.outer import theta_of
from tests.helpers import wait_until
from tests.train.fake_peer import FakeMember, FakePeer
from tests.train.school import DEADLINE_S, Pupil, School
from tests.train.test_ahead import STEP_TOKENS
from tests.train.test_averaging import MOSHPIT, NOLOCO, PLAIN, spec_in
from tests.train.test_dataparallel import spec_in as parallel_in
from tests.train.test_served import Helpers, helpers
from tests.train.test_trainer import H, Run, spec

__all__ = ["helpers", "spec"]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Samples can be read for so many steps, and no more."""

    def only(steps: int) -> None:
        read: set[tuple[int, ...]] = set()
        batch = BlockSource.batch

        def broken(self: BlockSource, ks: Sequence[int]) -> Tensor:
            read.add(tuple(ks))
            if len(read) > steps * 2:  # accumulate
                raise DataError("line 5 is torn")
            return batch(self, ks)

        monkeypatch.setattr(BlockSource, "batch", broken)

    return only


def diverging(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """All steps but the first `after` leave NaN in the parameters and in the optimizer's moments."""
    step, calls = InnerLoop.train_step, [0]

    def spoilt(self: InnerLoop, batches: Sequence[Tensor], number: int) -> StepResult:
        result = step(self, batches, number)
        calls[0] += 1
        if calls[0] <= after:
            return result
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(math.nan)
                self.optimizer.state[parameter]["exp_avg"].fill_(math.nan)
        return dataclasses.replace(result, loss=math.nan)

    monkeypatch.setattr(InnerLoop, "train_step", spoilt)


def is_sound(saved: saves.Saved) -> bool:
    return bool(theta_of(saved.image).isfinite().all()) and all(bool(t.isfinite().all()) for t in saved.inner.values())


def test_what_was_counted_is_saved_where_the_data_cannot_be_read_on(
    spec: RunSpec, tmp_path: Path, reads: Callable[[int], None]
) -> None:
    reads(H + 2)
    run = Run(FakePeer(spec), tmp_path)
    with pytest.raises(DlcError, match="line 5 is torn") as caught:
        run.go()
    assert not isinstance(caught.value, UsageError), "it was not wrong from the start"
    (end,) = run.all("end")
    assert (end["reason"], end["t"], end["saved"], end["validation_loss"]) == ("failed", 1, True, None)
    assert "the training failed, and left the run at round 1" in sentence(end)
    assert [event["tokens"] for event in run.all("work_dropped")] == [2 * STEP_TOKENS] and run.peer.left
    assert torch.equal(run.params(), run.peer.theta()) and Path(end["model"], "model.safetensors").is_file()
    saved = saves.newest(tmp_path, spec)
    assert saved is not None and str(saved.path) == end["checkpoint"] and saved.t == 1
    assert torch.equal(theta_of(saved.image), run.peer.theta())


def test_it_goes_on_from_there(spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        diverging(patch, after=H + 1)
        first = Run(FakePeer(spec), tmp_path)
        with pytest.raises(DlcError, match="3 times in a row"):
            first.go()
    saved = saves.newest(tmp_path, spec)
    assert saved is not None and saved.t == 1 and is_sound(saved)
    second = Run(FakePeer(spec), tmp_path, resume=saved)
    assert second.go().t == 2 and not second.all("diverged")


@pytest.mark.parametrize("options", [PLAIN, NOLOCO, MOSHPIT], ids=["average", "noloco", "moshpit"])
@pytest.mark.parametrize("fails", ["data", "loss"])
def test_without_rounds_it_is_this_peers_own_model(
    tmp_path: Path,
    options: dict[str, Any],
    fails: str,
    monkeypatch: pytest.MonkeyPatch,
    reads: Callable[[int], None],
) -> None:
    run = spec_in(tmp_path, **options)
    if fails == "loss":
        diverging(monkeypatch, after=4)
    with School() as school:
        pupil = school.add(Pupil(run, tmp_path / "0"))
        if fails == "data":
            batch, read = BlockSource.batch, [0]

            def broken(self: BlockSource, ks: Sequence[int]) -> Tensor:
                read[0] += 1
                if read[0] > 4:
                    raise DataError("line 5 is torn")
                return batch(self, ks)

            monkeypatch.setattr(BlockSource, "batch", broken)
        school.start(pupil)
        wait_until(lambda: school.ends[0].done(), DEADLINE_S, "it fails")
        with pytest.raises(DlcError, match="torn|3 times in a row"):
            school.ends[0].result()
        saved = saves.newest(tmp_path / "0", run)
        assert saved is not None and saved.t == 1 and is_sound(saved)
        assert torch.equal(theta_of(saved.image), pupil.model())


def test_of_a_parameter_server_it_is_what_was_pulled(
    spec: RunSpec, tmp_path: Path, helpers: type[Helpers], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = dataclasses.replace(spec, strategy="parameter-server")
    diverging(monkeypatch, after=H + 1)
    run = Run(FakePeer(spec), tmp_path)
    with pytest.raises(DlcError, match="3 times in a row"):
        run.go()
    saved = saves.newest(tmp_path, spec)
    assert saved is not None and saved.t == 1 and is_sound(saved)
    assert torch.equal(theta_of(saved.image), run.params())


@pytest.mark.parametrize("overlap", ["delayed", "eager"])
def test_a_round_that_is_under_way_is_seen_through(
    spec: RunSpec, tmp_path: Path, reads: Callable[[int], None], overlap: str
) -> None:
    reads(H + 1)
    run = Run(FakePeer(dataclasses.replace(spec, overlap=overlap)), tmp_path)
    run.peer.slices = [5]
    with pytest.raises(DlcError, match="torn"):
        run.go()
    assert run.peer.weights == [H * STEP_TOKENS] and run.all("end")[0]["t"] == 1
    assert [event["tokens"] for event in run.all("work_dropped")] == [STEP_TOKENS]
    assert torch.equal(run.params(), run.peer.theta())


def test_who_is_to_stop_anyway_has_nothing_to_tell_of(
    spec: RunSpec, tmp_path: Path, reads: Callable[[int], None]
) -> None:
    """The others are about to have a round, and one step more would fit in before it."""
    reads(2)
    run = Run(FakePeer(spec), tmp_path)
    run.on_step = {2: run.stop.set}
    run.peer.others = [FakeMember(status={"t": 0, "inner": 0, "of": 3, "step_s": 1.0})]
    run.trainer._tell.step_s = 0.1
    assert run.go().reason == "interrupted" and run.all("end")[0]["saved"]


def test_gradients_that_others_may_still_fetch_are_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan names them when backward fails; the model is pulled into other memory."""
    run = Run(FakePeer(parallel_in(tmp_path)), tmp_path / "state")
    contribute, offered, before = run.peer.contribute, list[Tensor](), list[Tensor]()

    def noted(channel: str, vector: Any, **options: Any) -> Any:
        offered.append(vector)
        return contribute(channel, vector, **options)

    def failing(self: InnerLoop, batches: Any, begin: Callable[[Tensor], None]) -> float:
        if len(offered) < 2:
            return gradient(self, batches, begin)
        begin(torch.tensor(1.0))
        before.append(offered[-1].clone())
        run.peer.pass_round(torch.ones(run.peer.state.numel))
        raise RuntimeError("out of memory")

    gradient = InnerLoop.gradient
    monkeypatch.setattr(run.peer, "contribute", noted)
    monkeypatch.setattr(InnerLoop, "gradient", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        run.go()
    assert len(offered) == 3 and run.all("end")[0]["t"] == 3
    assert torch.equal(run.params(), run.peer.theta()) and torch.equal(offered[-1], before[0])


def test_nor_are_those_that_wait_when_nobody_can_be_told_of_the_step(tmp_path: Path) -> None:
    """The terminal is gone, after backward: the gradient is offered, and a plan names it."""
    run = Run(FakePeer(parallel_in(tmp_path)), tmp_path / "state")
    contribute, offered, before = run.peer.contribute, list[Tensor](), list[Tensor]()

    def noted(channel: str, vector: Any, **options: Any) -> Any:
        offered.append(vector)
        return contribute(channel, vector, **options)

    def gone() -> None:
        before.append(offered[-1].clone())
        run.peer.pass_round(torch.ones(run.peer.state.numel))
        run.peer.planned = True
        raise OSError("Input/output error")

    run.peer.contribute = noted  # type: ignore[method-assign]
    run.on_step = {3: gone}
    with pytest.raises(OSError, match="Input/output"):
        run.go()
    assert len(offered) == 3 and run.all("end")[0]["t"] == 3
    assert torch.equal(run.params(), run.peer.theta()) and torch.equal(offered[-1], before[0])


def test_who_never_was_in_step_saves_nothing(spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = FakePeer(spec)

    def refused(*_: object, **__: object) -> None:
        raise CheckpointError("the state is of another model")

    monkeypatch.setattr(peer, "open", refused)
    run = Run(peer, tmp_path)
    with pytest.raises(CheckpointError, match="another model"):
        run.go()
    assert saves.newest(tmp_path) is None and not run.all("end") and not (tmp_path / "model").exists()


def test_the_error_is_told_whatever_becomes_of_the_files(
    spec: RunSpec,
    tmp_path: Path,
    reads: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: object) -> None:
        raise CheckpointError("No space left on device")

    monkeypatch.setattr(saver, "save_checkpoint", full)
    monkeypatch.setattr("dlc.train.trainer.save_model", full)
    reads(H + 2)
    run = Run(FakePeer(spec), tmp_path)
    with pytest.raises(DlcError, match="torn"):
        run.go()
    (end,) = run.all("end")
    assert (end["saved"], end["checkpoint"], end["model"]) == (False, None, None)
    assert caplog.text.count("No space left on device") == 2


def test_a_peer_that_is_gone_has_no_state_to_save(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(FakePeer(spec), tmp_path, checkpoint_every=1)

    def gone(*_: object, **__: object) -> None:
        raise SwarmClosed("another process is newer")

    def leave() -> None:
        for name in ("contribute", "position", "pull", "checkpoint", "describe"):
            monkeypatch.setattr(run.peer, name, gone)

    run.on_step = {H + 1: leave}
    with pytest.raises(SwarmClosed, match="newer"):
        run.go()
    assert "is not saved" in caplog.text and not run.all("end")
    assert "newer" not in caplog.text, "that is what run() raises"


def test_a_site_that_lost_a_process_does_not_wait_for_it(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(FakePeer(spec), tmp_path)

    def lost(*_: object) -> None:
        raise SiteLost("a process has ended")

    monkeypatch.setattr(InnerLoop, "train_step", lost)
    monkeypatch.setattr(InnerLoop, "tensors", lambda self: pytest.fail("this is asked of all processes"))
    with pytest.raises(SiteLost):
        run.go()
    assert not run.all("end")
