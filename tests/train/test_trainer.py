import dataclasses
import itertools
import json
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

import dlc.train.local_model
import dlc.train.phases
import dlc.train.trainer
from dlc.comm.events import RoundDone
from dlc.comm.roles import HELPER
from dlc.errors import CheckpointError, DlcError, NoRoom, UsageError
from dlc.flat import FlatView
from dlc.report import RoundReport
from dlc.runspec import DataSpec, InnerSpec, ModelSpec, OuterSpec, RunSpec
from dlc.train import checkpoint, saver, saves
from dlc.train.inner import InnerLoop, StepResult
from dlc.train.outer import OuterState
from dlc.train.phases import DIVERGED_MAX
from dlc.train.rounds import Rounds
from dlc.train.strategy import CHANNEL
from dlc.train.swarm import Frozen
from dlc.train.telling import Teller
from dlc.train.trainer import Summary, Trainer
from tests.helpers import wait_until
from tests.train.fake_peer import FakeMember, FakePeer

H = 4
LLAMA = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}
DROPPING = {**LLAMA, "attention_dropout": 0.3}
"""Its steps draw from the random state."""
ANOTHER = FakeMember(status={"t": 1 << 20, "inner": 0, "of": H, "step_s": 1.0})
"""A trainer that is not in step with us."""
Event = dict[str, Any]


@pytest.fixture(autouse=True)
def look_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dlc.train.local_model, "POLL_S", 0.0)


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(32, 127)) * 100)
    return RunSpec(
        rounds=2,
        sync_every=H,
        model=ModelSpec(config=LLAMA),
        data=DataSpec(source=str(text), seq_len=16),
        inner=InnerSpec(batch_size=2, accumulate=2, warmup_steps=1),
    )


class Run:
    """A trainer with its events; `on_step` is called after the n-th inner step of the whole run.

    each_is_saved: no step goes on beside a checkpoint that is being written, beside which none of the next round would
    be begun: on a slow disk the rounds of it would differ.
    """

    def __init__(self, peer: FakePeer, folder: Path, *, each_is_saved: bool = False, **options: Any) -> None:
        self.peer, self.stop, self._each_is_saved = peer, threading.Event(), each_is_saved
        self.events: list[Event] = []
        self.on_step: dict[int, Callable[[], object]] = {}
        self.on_event: Callable[[Event], object] = lambda event: None
        self._steps = 0
        self.trainer = Trainer(
            peer, folder, on_event=self._take, peer_events=peer.events, device="cpu", eval_blocks=4, **options
        )

    def _take(self, event: Event) -> None:
        json.dumps(event, allow_nan=False)
        self.events.append(event)
        if event["event"] == "step":
            self._steps += 1
            if self._each_is_saved:
                wait_until(lambda: not self.trainer._saver.busy, what="the checkpoint to be written")
            self.on_step.get(self._steps, lambda: None)()
        self.on_event(event)

    def go(self) -> Summary:
        return self.trainer.run(self.stop)

    def all(self, name: str) -> list[Event]:
        return [event for event in self.events if event["event"] == name]

    def params(self) -> torch.Tensor:
        view = FlatView.of(self.trainer.model)
        return view.gather(torch.empty(view.numel))


def test_a_whole_run(spec: RunSpec, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    run = Run(FakePeer(spec), tmp_path / "state")
    summary = run.go()
    peer = run.peer
    assert (summary.reason, summary.t, summary.tokens) == ("rounds", 2, 2 * spec.tokens_per_round)
    assert summary.digest == peer.state.digest().hex() and peer.left
    assert [event["step"] for event in run.all("step")] == list(range(2 * H))
    assert [(event["t"], event["counted"], bool(event["digest"])) for event in run.all("round")] == [
        (1, True, True),
        (2, True, True),
    ]
    assert run.all("round")[-1]["digest"] == summary.digest
    before, after = (event["loss"] for event in run.all("validation"))
    assert after == summary.validation_loss < before
    assert run.all("end")[0]["bytes_sent"] == 20 and run.all("end")[0]["digest"] == summary.digest
    assert peer.weights == [spec.tokens_per_round] * 2
    assert peer.uptos == [spec.blocks_per_round, 2 * spec.blocks_per_round]
    assert summary.model is not None
    loaded = FlatView.of(AutoModelForCausalLM.from_pretrained(summary.model))
    assert torch.equal(loaded.gather(torch.empty(loaded.numel)), peer.theta())
    names = [event["event"] for event in run.events if event["event"] != "step"]
    assert names[:3] == ["phase", "synced", "validation"] and names[-1] == "end"
    status = peer.said[-1]["status"]
    assert {"t", "inner", "of", "loss", "tokens_per_s", "phase"} <= status.keys()
    assert (status["phase"], status["t"]) == ("leaving", 2), "the table that stays on the terminal shows it"


def test_the_exchange_is_cut_into_the_chunks_that_a_run_names(spec: RunSpec, tmp_path: Path) -> None:
    run = Run(FakePeer(dataclasses.replace(spec, chunk_elems=1000)), tmp_path / "state")
    run.go()
    assert run.peer.grid.span(0) == (0, 1000)


def test_a_device_with_less_room_makes_the_same_steps(spec: RunSpec, tmp_path: Path) -> None:
    """All had to have the batch size of the smallest."""

    def run(micro_batch: int) -> tuple[Run, list[int]]:
        made, sizes = Run(FakePeer(spec), tmp_path / str(micro_batch), micro_batch=micro_batch), list[int]()
        made.trainer.model.register_forward_pre_hook(
            lambda module, args, named: sizes.append(len(named["input_ids"])), with_kwargs=True
        )
        made.go()
        return made, sizes

    (usual, usual_sizes), (small, small_sizes), (large, large_sizes) = run(0), run(1), run(100)
    assert (max(usual_sizes), max(small_sizes), max(large_sizes)) == (2, 1, 2)
    assert usual.peer.weights == small.peer.weights and usual.peer.uptos == small.peer.uptos
    torch.testing.assert_close(small.params(), usual.params(), rtol=0, atol=1e-5)
    assert torch.equal(large.params(), usual.params())


def test_the_speed_that_is_told_is_tokens_over_time_where_some_steps_take_far_longer() -> None:
    """As on a busy host: 320 tokens in 10 s."""
    tell = Teller(FakePeer(), lambda event: None, None, clock=lambda: 0.0)
    told = []
    for n in range(100):
        tell.step(0, n, 100, 1.0, 64, 9.2 if n % 5 == 4 else 0.2)
        told.append(tell.tokens_per_s)
    assert 32.0 / 2 < min(told[50:]) and max(told[50:]) < 2 * 32.0


def test_the_run_ends_with_the_round_that_reaches_its_tokens(spec: RunSpec, tmp_path: Path) -> None:
    limit = dataclasses.replace(spec, rounds=0, tokens=spec.tokens_per_round + 1)
    summary = Run(FakePeer(limit), tmp_path).go()
    assert (summary.reason, summary.t) == ("tokens", 2)


def test_a_round_that_passes_during_inner_steps_is_reported_and_our_work_still_counts(
    spec: RunSpec, tmp_path: Path
) -> None:
    run = Run(FakePeer(spec), tmp_path)
    run.on_step = {2: run.peer.pass_round}
    summary = run.go()
    assert [(event["t"], event["counted"]) for event in run.all("round")] == [(1, False), (2, True)]
    assert [event["step"] for event in run.all("step")] == [0, 1, H + 2, H + 3]  # the schedule is the swarm's
    assert summary.t == 2 and run.peer.weights == [spec.tokens_per_round] and run.peer.vectors[0].any()


def test_a_late_contribution_is_offered_once_more(spec: RunSpec, tmp_path: Path) -> None:
    run = Run(FakePeer(spec), tmp_path)
    run.peer.misses = ["late"]
    run.go()
    assert len(run.peer.vectors) == 2 and torch.equal(*run.peer.vectors)
    assert [event["counted"] for event in run.all("round")] == [False, True]
    assert run.all("round")[0]["loss"] is None and len(run.all("step")) == H


def test_the_last_round_may_pass_without_us(spec: RunSpec, tmp_path: Path) -> None:
    run = Run(FakePeer(spec), tmp_path)
    run.peer.misses = ["late", "late", "late"]
    assert run.go().reason == "rounds"
    assert len(run.peer.vectors) == 2


def test_work_on_blocks_that_another_peer_got_is_dropped(spec: RunSpec, tmp_path: Path) -> None:
    run = Run(FakePeer(spec), tmp_path)

    def put_out() -> None:
        run.peer.lose_lease()
        run.peer.pass_round()

    run.on_step = {2: put_out}
    run.go()
    assert len(run.all("step")) == 2 + H and len(run.peer.vectors) == 1
    assert run.peer.weights == [spec.tokens_per_round]
    assert run.peer.uptos[0] > 2 * spec.blocks_per_lease  # from the new lease


def test_a_lease_lost_without_a_round_is_noticed_before_contributing(spec: RunSpec, tmp_path: Path) -> None:
    run = Run(FakePeer(spec), tmp_path)
    run.on_step = {H: run.peer.lose_lease}
    run.go()
    assert len(run.all("step")) == 3 * H and len(run.peer.vectors) == 2


def test_stop_leaves_saves_and_contributes_nothing_half_done(spec: RunSpec, tmp_path: Path) -> None:
    run = Run(FakePeer(spec), tmp_path)
    run.on_step = {H + 1: run.stop.set}
    summary = run.go()
    assert (summary.reason, summary.t, summary.validation_loss) == ("interrupted", 1, None)
    assert run.peer.left and len(run.peer.vectors) == 1 and len(run.all("step")) == H + 1
    assert summary.checkpoint is not None and summary.checkpoint.is_file()
    assert torch.equal(run.params(), run.peer.theta())


def test_steps_that_the_last_round_left_out_are_not_said_to_be_trained_anew(spec: RunSpec, tmp_path: Path) -> None:
    """They were, though nobody trains any more."""
    run = Run(FakePeer(spec), tmp_path)
    run.on_step = {(spec.rounds - 1) * H + 2: run.peer.pass_round}
    run.go()
    (dropped,) = run.all("work_dropped")
    assert (dropped["t"], dropped["steps"], dropped["others"]) == (spec.rounds, 2, False)


def test_a_round_that_passes_while_it_stops_is_in_the_model_the_checkpoint_and_the_summary(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint had it, and the other two were of the round before."""
    run = Run(FakePeer(spec), tmp_path)
    run.on_step = {H + 1: run.stop.set}
    checkpoint, asked = run.peer.checkpoint, list[str]()

    def passed(channel: str) -> Any:
        if not asked:
            run.peer.pass_round()
        asked.append(channel)
        return checkpoint(channel)

    monkeypatch.setattr(run.peer, "checkpoint", passed)
    summary = run.go()
    saved = saves.newest(tmp_path, spec)
    assert saved is not None and summary.t == saved.t == 2
    assert torch.equal(run.params(), run.peer.theta())


def test_a_stopped_run_goes_on_from_its_checkpoint(spec: RunSpec, tmp_path: Path) -> None:
    first = Run(FakePeer(spec), tmp_path)
    first.on_step = {H + 1: first.stop.set}
    first.go()
    saved = saves.newest(tmp_path, spec)
    assert saved is not None and saved.t == 1 and saved.log == b"the log" and saved.spec == spec
    anything = saves.newest(tmp_path)
    assert anything is not None and anything.path == saved.path
    second = Run(FakePeer(spec), tmp_path, resume=saved)
    second.go()
    assert [event["step"] for event in second.all("step")] == list(range(H, 2 * H))
    moments = second.trainer.strategy.local().inner
    assert float(moments["0.step"]) == H + 1 + H  # of the first process, and its own


def test_of_a_checkpoint_that_was_gone_on_from_nothing_large_stays(spec: RunSpec, tmp_path: Path) -> None:
    """It stayed in memory until the training was over: with AdamW 8 bytes per parameter, and more with an overlap."""
    spec = dataclasses.replace(spec, overlap="delayed", codec="int8", rounds=4)
    first = Run(FakePeer(spec), tmp_path)
    first.peer.slices = [0, 2]
    first.on_step = {2 * H + 3: first.stop.set}
    first.go()
    saved = saves.newest(tmp_path, spec)
    assert saved is not None and saved.inner and saved.residual is not None
    large = [weakref.ref(tensor) for tensor in (*saved.inner.values(), *saved.own.values(), saved.residual)]
    second = Run(FakePeer(spec), tmp_path, resume=saved)
    held: list[int] = []
    second.on_step = {1: lambda: held.append(sum(tensor() is not None for tensor in large))}
    second.go()
    assert held == [0] and len(large) > 20 and saved.path is not None


def test_the_outer_optimizer_and_its_moments_go_on_from_a_checkpoint(spec: RunSpec, tmp_path: Path) -> None:
    outer = OuterSpec(optimizer="adam", lr=0.3, schedule="cosine", warmup_rounds=1)
    spec = dataclasses.replace(spec, outer=outer, rounds=4)
    first = Run(FakePeer(spec), tmp_path)
    first.on_step = {2 * H + 1: first.stop.set}
    first.go()
    assert first.peer.state.spec == dataclasses.replace(outer, total_rounds=4)
    saved = saves.newest(tmp_path, spec)
    assert saved is not None and saved.t == 2
    second = Run(FakePeer(spec), tmp_path, resume=dataclasses.replace(saved))
    second.go()
    whole = OuterState(torch.zeros(first.peer.state.numel), first.peer.state.spec)
    whole.restore(saved.image)
    for t, d in enumerate(second.peer.counted, start=3):
        whole.step(t, [(0, whole.numel, d)])
    assert whole.t == 4 and whole.digest() == second.peer.state.digest()


def test_a_checkpoint_of_another_run_or_a_damaged_one_is_not_taken(
    spec: RunSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Run(FakePeer(spec), tmp_path, checkpoint_every=1).go()
    assert saves.newest(tmp_path, dataclasses.replace(spec, seed=1)) is None
    paths = sorted(saves.folder_of(tmp_path, spec).iterdir())
    assert [path.name for path in paths] == ["t-00000001.safetensors", "t-00000002.safetensors"]
    paths[1].write_bytes(paths[1].read_bytes()[:-9])
    older = saves.newest(tmp_path, spec)
    assert older is not None and older.t == 1 and "t-00000002" in caplog.text
    assert saves.set_aside(tmp_path) is not None and saves.newest(tmp_path) is None


def test_a_full_disk_is_told_and_training_goes_on(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise CheckpointError("No space left on device")

    monkeypatch.setattr(saver, "save_checkpoint", full)
    monkeypatch.setattr("dlc.train.trainer.save_model", full)
    summary = Run(FakePeer(spec), tmp_path, checkpoint_every=1).go()
    assert (summary.t, summary.checkpoint, summary.model) == (2, None, None)
    assert caplog.text.count("No space left on device") == 3


class Disk:
    """With room for so many checkpoints; told so before they are written, or in the middle (a quota)."""

    def __init__(self, folder: Path, room: int, monkeypatch: pytest.MonkeyPatch, *, quota: bool) -> None:
        self.folder, self.room, self.quota = folder, room, quota
        self._save_file = checkpoint.save_file
        monkeypatch.setattr(checkpoint, "save_file", self.write)
        monkeypatch.setattr(checkpoint, "_demand_room", lambda target, _: quota or self.demand(target))

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir()) if self.folder.exists() else []

    def demand(self, target: Path) -> None:
        if target.parent == self.folder and len(self.names()) >= self.room:
            raise NoRoom("its disk has 0.0 MB free")

    def write(self, tensors: dict[str, torch.Tensor], path: Path, header: dict[str, str]) -> None:
        if self.quota and len(self.names()) >= self.room:
            path.write_bytes(b"half of it")
            raise SafetensorError("Error while serializing: I/O error: Disk quota exceeded (os error 122)")
        self._save_file(tensors, path, header)


@pytest.mark.parametrize("quota", [False, True], ids=["told before", "told by the write"])
def test_where_there_is_no_room_for_one_more_checkpoint_the_oldest_makes_way(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: bool
) -> None:
    spec = dataclasses.replace(spec, rounds=4)
    disk = Disk(saves.folder_of(tmp_path, spec), 3, monkeypatch, quota=quota)
    run = Run(FakePeer(spec), tmp_path, each_is_saved=True, checkpoint_every=1, keep=3)
    summary = run.go()
    assert summary.saved and disk.names() == [f"t-{t:08}.safetensors" for t in (2, 3, 4)]
    assert saves.newest(tmp_path, spec).path == summary.checkpoint  # type: ignore[union-attr]


@pytest.mark.parametrize("room", [2, 1], ids=["an older one makes way", "too little"])
def test_where_there_is_no_room_for_the_model_older_checkpoints_make_way(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    """The newest, which the model can be had from, stays."""
    folder, save = saves.folder_of(tmp_path, spec), dlc.train.trainer.save_model

    def save_where_there_is_room(model: Any, target: Path, tokenizer: Any) -> None:
        if len(list(folder.iterdir())) >= room:
            raise NoRoom("its disk has 0.0 MB free")
        save(model, target, tokenizer)

    monkeypatch.setattr(dlc.train.trainer, "save_model", save_where_there_is_room)
    summary = Run(FakePeer(spec), tmp_path, checkpoint_every=1, keep=2).go()
    assert summary.saved and list(folder.iterdir()) == [summary.checkpoint]
    if room == 2:
        assert summary.model is not None and (summary.model / "model.safetensors").is_file()
    else:
        assert summary.model is None and caplog.messages[-1] == "its disk has 0.0 MB free"


def test_the_newest_that_is_whole_makes_way_for_none(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is the one that the run goes on from, here the older of two: the other is damaged."""
    Run(FakePeer(spec), tmp_path, checkpoint_every=1).go()
    folder = saves.folder_of(tmp_path, spec)
    one, two = (folder / f"t-{t:08}.safetensors" for t in (1, 2))
    two.write_bytes(two.read_bytes()[:-9])
    saved = saves.newest(tmp_path, spec)
    assert saved is not None and saved.path == one
    (folder / ".t-00000002.safetensors.tmp-1").touch()  # of a process that was killed
    disk = Disk(folder, 1, monkeypatch, quota=False)
    stopped = Run(FakePeer(spec), tmp_path, resume=dataclasses.replace(saved))
    stopped.stop.set()
    summary = stopped.go()
    assert (summary.saved, summary.checkpoint, disk.names()) == (False, one, [one.name])
    assert "0.0 MB free\n" in caplog.text and "training goes on" not in caplog.text, "it is the end"
    disk.room = 2
    assert Run(FakePeer(spec), tmp_path, resume=saved).go().saved and disk.names() == [one.name, two.name]


def test_other_errors_of_a_disk_delete_nothing(spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it fails, the older ones are worth more."""
    Run(FakePeer(spec), tmp_path, checkpoint_every=1).go()

    def fails(*_: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: Input/output error (os error 5)")

    monkeypatch.setattr(checkpoint, "save_file", fails)
    assert not Run(FakePeer(spec), tmp_path, resume=saves.newest(tmp_path, spec)).go().saved
    assert len(list(saves.folder_of(tmp_path, spec).iterdir())) == 2


def test_a_gradient_that_is_not_finite_is_a_divergence(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_step, steps = InnerLoop.train_step, [0]

    def overflows(self: InnerLoop, batches: Any, step: int) -> StepResult:
        good = train_step(self, batches, step)
        steps[0] += 1
        return dataclasses.replace(good, grad_norm=float("inf"), applied=False)

    monkeypatch.setattr(InnerLoop, "train_step", overflows)
    run = Run(FakePeer(spec), tmp_path)
    with pytest.raises(DlcError, match="3 times in a row"):
        run.go()
    assert steps[0] == 3 and not run.all("step")


def test_a_loss_that_is_not_finite_is_not_contributed(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_step, bad = InnerLoop.train_step, {2}

    def poisoned(self: InnerLoop, batches: Any, step: int) -> StepResult:
        good = train_step(self, batches, step)
        calls.append(step)
        return StepResult(float("nan"), good.tokens, 1.0) if len(calls) in bad else good

    calls: list[int] = []
    monkeypatch.setattr(InnerLoop, "train_step", poisoned)
    run = Run(FakePeer(spec), tmp_path / "one")
    assert run.go().t == 2 and len(run.all("diverged")) == 1 and len(calls) == 2 + 2 * H
    calls.clear()
    bad.update(range(1, 100))
    run = Run(FakePeer(spec), tmp_path / "all")
    with pytest.raises(DlcError, match=r"inner\.lr"):
        run.go()
    assert [event["in_a_row"] for event in run.all("diverged")] == list(range(1, DIVERGED_MAX + 1))
    assert not run.peer.vectors


def test_phases_that_diverge_now_and_then_end_no_training(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes so many in a row, without a round between them that counted this peer."""
    train_step, calls = InnerLoop.train_step, itertools.count()

    def poisoned(self: InnerLoop, batches: Any, step: int) -> StepResult:
        result = train_step(self, batches, step)
        return dataclasses.replace(result, loss=float("nan")) if next(calls) % (H + 1) == 0 else result

    monkeypatch.setattr(InnerLoop, "train_step", poisoned)
    run = Run(FakePeer(dataclasses.replace(spec, rounds=DIVERGED_MAX + 1)), tmp_path / "state")
    assert run.go().t == DIVERGED_MAX + 1
    assert [event["in_a_row"] for event in run.all("diverged")] == [1] * (DIVERGED_MAX + 1)


@pytest.mark.parametrize(("good", "left"), [(H // 2 + 1, [H // 2, 0]), (1, [0, 0])], ids=["ahead", "before"])
def test_of_steps_that_are_undone_as_they_diverged_no_fragment_holds_anything(
    good: int, left: list[int], spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor, of fragments that are on no way to a round, of those before: else they had too great weights at the end."""
    train_step, calls = InnerLoop.train_step, itertools.count()

    def poisoned(self: InnerLoop, batches: Any, step: int) -> StepResult:
        result = train_step(self, batches, step)
        return dataclasses.replace(result, loss=float("nan")) if next(calls) == good else result

    monkeypatch.setattr(InnerLoop, "train_step", poisoned)
    run = Run(FakePeer(dataclasses.replace(spec, fragments=2, overlap="delayed")), tmp_path / "state")
    run.peer.slices = [9]
    held: list[list[int]] = []
    strategy = run.trainer.strategy
    assert isinstance(strategy, Rounds)
    run.on_event = lambda event: held.append(strategy.phases.held.amounts()) if event["event"] == "diverged" else None
    run.go()
    assert held == [[steps * spec.tokens_per_round // H for steps in left]]


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of any length are long enough for that, and the last of each phase ends when the peer has heard of it."""
    monkeypatch.setattr(dlc.train.phases, "ANNOUNCED_STEP_S_MIN", 0.0)
    train_step = InnerLoop.train_step

    def heard_of(self: InnerLoop, batches: Any, step: int) -> StepResult:
        result = train_step(self, batches, step)
        timers = [thread for thread in threading.enumerate() if thread.name == "dlc-announce"]
        for timer in timers:
            timer.join(60.0)
        return result

    monkeypatch.setattr(InnerLoop, "train_step", heard_of)


@pytest.mark.usefixtures("announced")
def test_the_last_step_of_a_phase_is_announced_with_what_it_will_be(spec: RunSpec, tmp_path: Path) -> None:
    run, plain = Run(FakePeer(spec), tmp_path / "a"), Run(FakePeer(spec), tmp_path / "b")
    run.peer.others = plain.peer.others = [ANOTHER]
    run.go()
    assert [filling is not None and filling.complete for filling in run.peer.fillings] == [True, True]
    assert run.peer.weights == [spec.tokens_per_round] * 2 and len(run.peer.counted) == 2
    assert run.peer.uptos == [spec.blocks_per_round, 2 * spec.blocks_per_round]
    with pytest.MonkeyPatch.context() as never:
        never.setattr(dlc.train.phases, "ANNOUNCED_STEP_S_MIN", 1e9)
        plain.go()
    assert plain.peer.fillings == [None, None] and torch.equal(plain.params(), run.params())


@pytest.mark.usefixtures("announced")
def test_a_lone_trainer_announces_nothing(spec: RunSpec, tmp_path: Path) -> None:
    run = Run(FakePeer(spec), tmp_path)
    run.go()
    assert run.peer.fillings == [None, None] and len(run.peer.counted) == 2


@pytest.mark.usefixtures("announced")
def test_an_announced_step_that_diverges_contributes_nothing(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan names it already: its round goes on without us, is waited for, and the run goes on."""
    train_step, steps = InnerLoop.train_step, [0]

    def bad_once(self: InnerLoop, batches: Any, step: int) -> StepResult:
        good = train_step(self, batches, step)
        steps[0] += 1
        return dataclasses.replace(good, loss=float("nan")) if steps[0] == H else good

    monkeypatch.setattr(InnerLoop, "train_step", bad_once)
    run = Run(FakePeer(spec), tmp_path)
    run.peer.others = [ANOTHER]
    assert run.go().t == 2 and len(run.all("diverged")) == 1
    first, *others = run.peer.fillings
    assert first is not None and first.stopped and len(run.peer.counted) == 1
    assert all(filling is None or filling.complete for filling in others)


@pytest.mark.usefixtures("announced")
@pytest.mark.parametrize("planned", [False, True])
def test_who_is_to_stop_in_an_announced_step_contributes_it_or_takes_it_back(
    spec: RunSpec, tmp_path: Path, planned: bool
) -> None:
    run = Run(FakePeer(spec), tmp_path)
    run.peer.planned, run.peer.others = planned, [ANOTHER]
    run.on_step[H] = run.stop.set
    summary = run.go()
    assert summary.reason == "interrupted" and run.peer.left
    (filling,) = run.peer.fillings
    assert filling is not None and (filling.stopped or len(run.peer.counted) == 1)


@pytest.mark.parametrize(
    ("statuses", "first"),
    [
        ([{"t": 0, "inner": 2}], 2),
        ([{"t": 0, "inner": 1}, {"t": 0, "inner": 3}, {"t": 0, "inner": 3}], 3),
        ([{"t": 0, "inner": H}], H - 1),  # all wait already: one step, and nobody waits for us
        ([{"t": 7, "inner": 2}], 0),  # another round
        ([{}, {"t": 0, "inner": "2"}, {"t": 0, "inner": -1}], 0),  # what other hosts say is checked
    ],
)
def test_a_newcomer_begins_where_the_others_are(
    spec: RunSpec, tmp_path: Path, statuses: list[dict[str, Any]], first: int
) -> None:
    run = Run(FakePeer(spec), tmp_path)
    run.peer.others = [FakeMember(status=status) for status in statuses]
    run.go()
    assert [event["step"] for event in run.all("step")] == list(range(first, 2 * H))
    assert run.peer.weights == [spec.tokens_per_round * (H - first) / H, spec.tokens_per_round]


def test_validation_every_round(spec: RunSpec, tmp_path: Path) -> None:
    run = Run(FakePeer(spec), tmp_path, eval_every=1)
    run.go()
    assert [event["t"] for event in run.all("validation")] == [0, 1, 2]


def test_validation_and_checkpoints_come_though_only_every_second_round_counts_this_peer(
    spec: RunSpec, tmp_path: Path
) -> None:
    """A slower peer is counted in the odd rounds only: no round that counts it is a multiple of two."""
    run = Run(FakePeer(dataclasses.replace(spec, rounds=7)), tmp_path, eval_every=2, checkpoint_every=2)
    run.peer.misses = ["", "late"] * 9
    run.go()
    counted = [event["t"] for event in run.all("round") if event["counted"]]
    assert counted == [1, 3, 5, 7]
    assert [event["t"] for event in run.all("validation")] == [0, 3, 5, 7]


def test_checkpoints_come_every_so_many_rounds_of_this_process_and_no_more_often(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, start = list[int](), saver.Saver.start

    def told(writer: saver.Saver, frozen: Frozen, local: saves.Local) -> None:
        begun.append(frozen.t)
        start(writer, frozen, local)

    monkeypatch.setattr(saver.Saver, "start", told)
    spec, longer = (dataclasses.replace(spec, rounds=rounds) for rounds in (7, 12))
    Run(FakePeer(spec), tmp_path, each_is_saved=True, checkpoint_every=3).go()
    assert begun == [3, 6]
    Run(FakePeer(longer), tmp_path, each_is_saved=True, checkpoint_every=3, resume=saves.newest(tmp_path, longer)).go()
    assert begun == [3, 6, 10]


def test_each_peer_drops_units_of_its_own(spec: RunSpec, tmp_path: Path) -> None:
    """With one random state for all, the mean of all would keep the noise of each step."""
    dropping = dataclasses.replace(spec, model=ModelSpec(config=DROPPING))

    def losses(name: str) -> list[float]:
        peer = FakePeer(dropping)
        peer.id = name
        run = Run(peer, tmp_path)
        run.go()
        return [event["loss"] for event in run.all("step")]

    one, other = losses("one"), losses("other")
    assert one == losses("one") and one[0] != other[0]


def test_rounds_that_are_in_the_checkpoint_already_are_not_told_again(spec: RunSpec, tmp_path: Path) -> None:
    """As the peer hears of them while it finds its place in the run."""
    Run(FakePeer(spec), tmp_path).go()
    longer = dataclasses.replace(spec, rounds=3)
    run = Run(FakePeer(longer), tmp_path, resume=saves.newest(tmp_path, longer))
    past = RoundReport("train", 2, "ab", (), (), 1.0, 10, 20, 1.0, 0.5, 0.5, 1)
    run.peer.events.put(RoundDone(past, False, grid="", fits=True))
    summary = run.go()
    assert [event["t"] for event in run.all("round")] == [3] and summary.bytes_sent == 10
    assert [event["t"] for event in run.all("validation")] == [2, 3], "where it goes on, and at the end"
    over = Run(FakePeer(longer), tmp_path, resume=saves.newest(tmp_path, longer))
    assert over.go().t == 3 and not over.all("step")
    assert [event["t"] for event in over.all("validation")] == [3], "where these are one, once"


def test_every_round_is_told_once_where_another_history_wins(spec: RunSpec, tmp_path: Path) -> None:
    """Its rounds have numbers that we have seen before."""
    run = Run(FakePeer(dataclasses.replace(spec, rounds=5)), tmp_path)
    first = b""

    def other_history() -> None:
        run.peer.state.restore(memoryview(bytearray(first)))
        run.peer.pass_round(torch.ones(run.peer.state.numel))
        run.peer.events.get()  # it is caught up with as an image
        run.peer.rounds -= 1

    def remember() -> None:
        nonlocal first
        first = bytes(run.peer.state.export())

    run.on_step = {1: remember, 3 * H + 1: other_history}
    summary = run.go()
    assert [event["t"] for event in run.all("round")] == [1, 2, 3, 2, 3, 4, 5]
    assert summary.bytes_sent == 7 * 10 and summary.t == 5


AWAY = {"depth": 1, "channels": (CHANNEL,), "alive": False, "away": True}


@pytest.mark.parametrize(
    "lacks", [{"depth": 1, "channels": (CHANNEL,)}, {"depth": 9}, AWAY], ids=["a round", "the model", "away"]
)
def test_who_has_reached_the_end_stays_for_those_who_still_fetch_it(
    spec: RunSpec,
    tmp_path: Path,
    lacks: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(dlc.train.trainer, "LINGER_TOLD_S", 0.0)
    caplog.set_level("INFO", logger="dlc")
    run = Run(FakePeer(spec), tmp_path)
    looks: list[int] = []
    members = run.peer.members

    def behind() -> list[FakeMember]:
        found = members()
        if run.peer.state.t < spec.rounds:
            return found
        looks.append(len(looks))
        whole: dict[str, Any] = {"depth": 9, "channels": (CHANNEL,)}
        others = [FakeMember(**(lacks if len(looks) < 4 else whole)), FakeMember(depth=9, role=HELPER)]
        others += [FakeMember("dead", alive=False), FakeMember("left", alive=False, left=True)]
        return [dataclasses.replace(found[0], **whole), *others]

    run.peer.members = behind  # type: ignore[method-assign]
    run.go()
    assert len(looks) >= 4 and run.peer.left
    assert [r.message for r in caplog.records if "staying for" in r.message] == [
        "staying for other, for want of the model or the last round there: 60 s at most"
    ]


def test_who_has_reached_the_end_stays_for_those_who_lack_their_part_of_the_last_exchange(
    spec: RunSpec, tmp_path: Path
) -> None:
    run, looks = Run(FakePeer(spec), tmp_path), iter([["other"], ["other"], []])
    run.peer.needed_by = lambda: next(looks)  # type: ignore[method-assign]
    run.go()
    assert run.peer.left and next(looks, None) is None


def test_an_unknown_device_is_refused(spec: RunSpec, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="abacus"):
        Trainer(FakePeer(spec), tmp_path, device="abacus")
