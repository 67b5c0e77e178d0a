"""What a checkpoint keeps of inner steps that are ahead of its round, and when they are not gone on from."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dlc.train.local_model
from dlc.comm.ledger import Range
from dlc.errors import CheckpointError
from dlc.report import Missing, RoundReport, Share
from dlc.runspec import RunSpec
from dlc.train import saves
from dlc.train.offers import Work
from dlc.train.progress import Progress
from dlc.train.saves import Local, Saved
from tests.train.fake_peer import OTHER, FakeMember, FakePeer, FakePending, FakePosition
from tests.train.test_ahead import PER_STEP, far, spec, trained
from tests.train.test_trainer import H, Run

__all__ = ["spec", "trained"]

AHEAD = 2
LOST = f"{AHEAD} inner steps that were ahead of round 1 are lost: "
GONE = LOST + "the run has gone on since, or their samples were given to others"


@pytest.fixture(autouse=True)
def look_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dlc.train.local_model, "POLL_S", 0.0)


class Resumed(FakePeer):
    """It has the lease of before, from block `lo` on. `passed`: a round has been committed meanwhile."""

    def __init__(self, spec: RunSpec, lo: int, passed: bool = False) -> None:
        super().__init__(spec)
        self.lo, self.passed = lo, passed

    def open(self, *args: Any, **terms: Any) -> FakePosition:
        super().open(*args, **terms)
        (lease,) = self.ledger.leases
        first, *rest = lease.ranges
        lease = dataclasses.replace(lease, ranges=(Range(self.lo, first.hi), *rest))
        self.ledger = dataclasses.replace(self.ledger, leases=(lease,))
        if self.passed:
            self.pass_round(torch.full((self.state.numel,), 0.5))
        return self.position("train")


def saved_ahead(spec: RunSpec, folder: Path) -> Saved:
    """After a round during which two steps were made."""
    run = Run(FakePeer(spec), folder, checkpoint_every=1)
    run.peer.slices = [AHEAD]
    run.on_step = {H + AHEAD + 1: run.stop.set}
    assert run.go().t == 1
    return saves.read(saves.folder_of(folder, spec) / saves.name_of(1))


@pytest.fixture
def delayed(spec: RunSpec) -> RunSpec:
    return dataclasses.replace(spec, rounds=3, overlap="delayed")


def test_who_goes_on_from_steps_ahead_counts_them_once(delayed: RunSpec, tmp_path: Path, trained: list[int]) -> None:
    saved = saved_ahead(delayed, tmp_path)
    trained.clear()
    again = Run(Resumed(delayed, H * PER_STEP), tmp_path, resume=saved)
    again.go()
    assert trained == list(range((H + AHEAD) * PER_STEP, 3 * H * PER_STEP))
    assert again.peer.uptos == [2 * H * PER_STEP, 3 * H * PER_STEP]
    assert [event["step"] for event in again.all("step")] == list(range(H + AHEAD, 3 * H))
    assert again.peer.weights == [H * PER_STEP * 16] * 2


def test_steps_beyond_a_long_round_are_gone_on_from_without_an_overlap_too(spec: RunSpec, tmp_path: Path) -> None:
    spec = dataclasses.replace(spec, rounds=3)
    run = Run(FakePeer(spec), tmp_path, checkpoint_every=1, keep=9)
    run.peer.slices, run.peer.round_s = [AHEAD], -1000.0  # committed long before the steps ended
    run.peer.others = [far(0)]
    run.go()
    again = Run(Resumed(spec, H * PER_STEP), tmp_path, resume=saves.read(run.trainer._saver._folder / saves.name_of(1)))
    again.go()
    rest = [(event["step"], event["loss"]) for event in again.all("step")]
    assert rest == [(event["step"], event["loss"]) for event in run.all("step")][H + AHEAD :]
    assert rest[0][0] == H + AHEAD and again.peer.state.digest() == run.peer.state.digest()


@pytest.mark.parametrize(("inner", "first"), [(1, AHEAD), (H - 1, H - 1)])
def test_who_goes_on_from_steps_ahead_is_no_further_back_than_the_others(
    delayed: RunSpec, tmp_path: Path, inner: int, first: int
) -> None:
    """Else those who were not stopped would wait for it."""
    saved = saved_ahead(delayed, tmp_path)
    again = Run(Resumed(delayed, H * PER_STEP), tmp_path, resume=saved)
    again.peer.others = [FakeMember(status={"t": 1, "inner": inner, "of": H, "step_s": 1000.0})]
    again.go()
    assert again.all("step")[0]["step"] == H + first
    assert again.peer.weights[0] == (AHEAD + H - first) * PER_STEP * 16


@pytest.mark.parametrize(
    ("lo", "passed", "peer", "told"),
    [
        (0, False, "", GONE),
        (H * PER_STEP, True, "", GONE),
        (H * PER_STEP, False, "another", LOST + "the checkpoint is another peer's"),
    ],
)
def test_steps_ahead_of_which_another_may_train_the_samples_are_lost(
    delayed: RunSpec,
    tmp_path: Path,
    trained: list[int],
    caplog: pytest.LogCaptureFixture,
    lo: int,
    passed: bool,
    peer: str,
    told: str,
) -> None:
    caplog.set_level(logging.INFO, logger="dlc.train.rounds")
    saved = saved_ahead(delayed, tmp_path)
    trained.clear()
    again = Run(Resumed(delayed, lo, passed), tmp_path, resume=dataclasses.replace(saved, peer=peer or saved.peer))
    starts: list[bool] = []
    validate = again.trainer._validate

    def look() -> float:
        starts.append(torch.equal(again.params(), again.peer.theta()))
        return validate()

    again.trainer._validate = look  # type: ignore[method-assign]
    again.go()
    assert starts[0], "the model was not the swarm's"
    assert trained[0] == lo and sum(again.peer.weights) == 16 * len(trained)
    assert [record.getMessage() for record in caplog.records if record.name == "dlc.train.rounds"] == [told]


def test_where_steps_ahead_were_lost_the_checkpoint_that_has_them_stays(delayed: RunSpec, tmp_path: Path) -> None:
    saved = saved_ahead(delayed, tmp_path)
    again = Run(Resumed(delayed, 0), tmp_path, resume=saved)
    again.stop.set()
    assert again.go().t == 1
    assert "steps" in saves.read(saved.path).own


def test_a_checkpoint_that_does_not_tell_of_steps_ahead_is_gone_on_from(
    delayed: RunSpec, tmp_path: Path, trained: list[int]
) -> None:
    """As they were written before: the inner optimizer has made steps that are trained anew."""
    saved = dataclasses.replace(saved_ahead(delayed, tmp_path), own={}, ahead=True)
    trained.clear()
    Run(Resumed(delayed, H * PER_STEP), tmp_path, resume=saved).go()
    assert trained == list(range(H * PER_STEP, 3 * H * PER_STEP))


class Two(FakePeer):
    """Another peer is in each round, with three times our weight."""

    def report(self, contributors: tuple[Share, ...], missing: tuple[Missing, ...]) -> RoundReport:
        return super().report((*contributors, Share(OTHER.peer, 3 * contributors[0].weight, 1.0)), missing)


def test_eager_goes_on_with_the_share_that_it_had_of_the_last_mean(delayed: RunSpec, tmp_path: Path) -> None:
    eager = dataclasses.replace(delayed, overlap="eager")
    Run(Two(eager), tmp_path, each_is_saved=True, checkpoint_every=1).go()
    path = saves.folder_of(tmp_path, eager) / saves.name_of(2)

    def resumed(peer: str = "", **changes: Any) -> Run:
        saved = saves.read(path)
        saved = dataclasses.replace(saved, peer=peer or saved.peer, own={**saved.own, **changes})
        return Run(Two(eager), tmp_path, resume=saved)

    for peer, share in (("", 0.25), ("another", 1.0)):
        again = resumed(peer)
        again.trainer.strategy.open(again.trainer._resume)
        assert again.trainer.strategy.outer.share == share, "the share of another peer's steps was another"  # type: ignore[attr-defined]
    for wrong in (torch.nan, -0.25, 1.5):
        with pytest.raises(CheckpointError, match="share of the saved state is .*, and must be a number from 0 to 1"):
            resumed(share=torch.tensor(wrong)).go()


def test_who_goes_on_with_fragments_holds_of_each_what_it_held(spec: RunSpec, tmp_path: Path) -> None:
    """The last turns have weights by it."""
    spec = dataclasses.replace(spec, rounds=1, fragments=4)
    whole = Run(FakePeer(spec), tmp_path, each_is_saved=True, checkpoint_every=1, keep=9)
    whole.go()
    path = saves.folder_of(tmp_path, spec) / saves.name_of(2)
    done = H // 2 * PER_STEP
    again = Run(Resumed(spec, done), tmp_path, resume=saves.read(path))
    again.go()
    assert again.peer.weights == whole.peer.weights[2:] and len(again.peer.weights) == 5


@pytest.mark.parametrize("passes", [False, True])
def test_what_mixing_left_undone_at_the_end_is_saved_with_the_round_that_it_is_of(
    delayed: RunSpec, tmp_path: Path, passes: bool
) -> None:
    """What a later round found would be taken for inner steps made after that one."""
    mixing = dataclasses.replace(delayed, mixing=0.5)
    run = Run(FakePeer(mixing), tmp_path)
    checkpoint, asked, ends = run.peer.checkpoint, list[str](), list[Tensor]()

    def passed(channel: str) -> Any:
        if passes and not asked:
            run.peer.pass_round()
        asked.append(channel)
        return checkpoint(channel)

    def taken(event: dict[str, Any]) -> None:
        if event["event"] == "round" and event["t"] == mixing.rounds:
            ends.append(run.params())

    run.on_event, run.peer.checkpoint = taken, passed  # type: ignore[method-assign]
    assert run.go().t == mixing.rounds + passes
    saved = saves.newest(tmp_path, mixing)
    assert saved is not None and saved.t == mixing.rounds + passes
    if passes:
        assert "parameters" not in saved.own
    else:
        assert torch.equal(saved.own["parameters"], ends[0]) and not torch.equal(ends[0], run.peer.theta())


@pytest.mark.parametrize("options", [{"overlap": "delayed", "mixing": 0.5}, {"overlap": "none", "fragments": 2}])
def test_steps_that_a_stop_drops_are_in_nothing_that_is_saved_and_what_is_lost_with_them_is_told(
    spec: RunSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    """Their samples are trained again."""
    caplog.set_level(logging.INFO, logger="dlc.train.rounds")
    spec = dataclasses.replace(spec, **options)
    run = Run(FakePeer(spec), tmp_path)
    run.on_step = {H + 1: run.stop.set}
    run.go()
    saved = saves.newest(tmp_path, spec)
    assert saved is not None and saved.ahead and "parameters" not in saved.own
    again = Run(Resumed(spec, run.peer.uptos[-1]), tmp_path, resume=saved)
    again.stop.set()
    again.go()
    kept = saves.newest(tmp_path, spec)
    assert kept is not None and kept.ahead, "the inner optimizer that it went on with had made them"
    told = [record.getMessage() for record in caplog.records if record.name == "dlc.train.rounds"]
    assert told == [f"what fragments, or mixing, had left of the inner steps before round {saved.t} is lost"]


def test_steps_ahead_of_a_round_that_another_overtook_are_not_saved_and_the_checkpoint_says_so(
    delayed: RunSpec, tmp_path: Path
) -> None:
    """The inner optimizer has made them."""
    run = Run(FakePeer(delayed), tmp_path, checkpoint_every=1, keep=9)
    run.peer.slices = [AHEAD]
    run.on_event = lambda event: run.peer.pass_round() if event["event"] == "round" and event["t"] == 1 else None
    run.go()
    saved = saves.read(saves.folder_of(tmp_path, delayed) / saves.name_of(2))
    assert saved.ahead and not {"parameters", "steps"} & saved.own.keys()


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": torch.tensor([[2, 32], [1, 16]])},
        {"steps": torch.tensor([[-1, 32], [5, 16]])},
        {"steps": torch.tensor([2, 2])},
        {"blocks": torch.tensor([[4, 5, 6, 7]])},
        {"losses": torch.tensor([1.0])},
    ],
)
def test_saved_steps_whose_parts_do_not_fit_are_refused(wrong: dict[str, Tensor]) -> None:
    done = Progress()
    done.add([4, 5], 32, 2.0)
    done.add([6, 7], 32, 3.0)
    named = done.tensors()
    again = Progress.of(named)
    assert (again.work, again.tokens, again.counted(2)) == (done.work, 64, 2.5)
    assert not len(Progress.of({})) and not Progress().tensors()
    with pytest.raises(CheckpointError, match="do not fit each other"):
        Progress.of({**named, **wrong})
    with pytest.raises(CheckpointError, match="do not fit each other"):
        Progress.of({"steps": named["steps"]})


def test_saved_steps_are_the_same_ones_and_end_where_the_last_block_used_does() -> None:
    """Blocks of the dead are used between fresh ones: the last block in order of use is not the greatest."""
    made = Progress()
    made.add((28, 29), 64, 1.0 / 3.0)
    made.add((3,), 32, 0.1)
    again = Progress.of(made.tensors())
    assert again.work == made.work == Work((28, 29, 3), 4) and (again.tokens, len(again)) == (96, 2)
    assert again.counted(1) == 1.0 / 3.0 and again.work == Work((3,), 4) and again.counted(1) == 0.1


def test_what_is_being_written_is_not_changed_by_the_next_step_nor_its_meaning_lost() -> None:
    parts = [{"a": torch.ones(3)} for _ in range(3)]
    local = Local(parts[0], torch.ones(3), parts[1], parts[2], ahead=True)
    copied = local.copy()
    for tensor in local.tensors().values():
        tensor.zero_()
    assert copied.ahead and copied.tensors().keys() == local.tensors().keys() and len(copied.tensors()) == 4
    assert all(bool((tensor == 1.0).all()) for tensor in copied.tensors().values())


class Unseated(FakePeer):
    """The samples of its lease are another's after the first round that counts it."""

    def contribute(self, *args: Any, **terms: Any) -> FakePending:
        pending = super().contribute(*args, **terms)
        commit, first = pending.commit, len(self.vectors) == 1

        def committed() -> tuple[RoundReport | None, bool]:
            told = commit()
            if first:
                self.lose_lease()
            return told

        pending.commit = committed
        return pending


def test_steps_ahead_that_are_dropped_at_the_round_that_counts_those_before_are_told_in_its_checkpoint(
    delayed: RunSpec, tmp_path: Path
) -> None:
    """It said that its inner optimizer had made none."""
    run = Run(Unseated(delayed), tmp_path, checkpoint_every=1, keep=9)
    run.peer.slices = [AHEAD]
    run.go()
    many = [saves.read(saves.folder_of(tmp_path, delayed) / saves.name_of(t)) for t in (1, 2)]
    assert [saved.ahead for saved in many] == [True, False]
    assert not {"parameters", "steps"} & many[0].own.keys()
