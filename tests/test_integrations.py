"""dlc inside transformers.Trainer and Lightning: what counts as a step, resuming, logs, and how training ends."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dlc
from dlc.comm.straggler import NEVER_S
from dlc.errors import SwarmClosed, UsageError
from dlc.flat import FlatView
from dlc.integrations import saved as beside
from tests.train.fake_peer import FakePeer

SUM = dlc.OuterSpec(lr=1.0, momentum=0.0)
"""A lone peer then trains as it would without dlc."""


class Net(nn.Module):
    """Takes and returns what a Trainer wants."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.line = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.line(x) - x.sum(-1, keepdim=True)).square().mean()}


def flat(model: nn.Module) -> Tensor:
    view = FlatView.of(model)
    return view.gather(torch.empty(view.numel))


def rows() -> list[Tensor]:
    return list(torch.randn(32, 4, generator=torch.Generator().manual_seed(1)))


# ------------------------------------------------------------------ transformers


def trainer(folder: Path, model: nn.Module, callbacks: list[Any], **options: Any) -> Any:
    pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate: pip install 'dlc[accelerate]'")
    from transformers import Trainer, TrainingArguments

    usual = {"max_steps": 6, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 0.05}
    usual |= {"logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    args = TrainingArguments(str(folder), **{**usual, **options})
    data = [{"x": x} for x in rows()]
    return Trainer(model=model, args=args, train_dataset=data, eval_dataset=data, callbacks=callbacks)


def callback(peer: FakePeer, sync_every: int = 2, **options: Any) -> Any:
    pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate: pip install 'dlc[accelerate]'")
    from dlc.integrations.transformers import DiLoCoCallback

    return DiLoCoCallback(peer, sync_every, outer=SUM, codec="fp32", **options)


def test_optimizer_steps_count_not_micro_batches_and_a_lone_peer_trains_as_without(tmp_path: Path) -> None:
    peer, model, alone = FakePeer(), Net(), Net()
    trainer(tmp_path, model, [callback(peer)]).train()
    trainer(tmp_path, alone, []).train()
    assert peer.weights == [8.0, 8.0, 8.0]  # two steps of two batches of two sequences
    torch.testing.assert_close(flat(model), flat(alone), rtol=1e-5, atol=1e-6)
    assert torch.equal(flat(model), peer.theta())


@pytest.mark.parametrize(
    ("size", "accumulated", "epochs", "sync_every", "weights"),
    [
        (2, 5, 1, 2, [20.0, 12.0]),  # 16 batches: the last step has one of them
        (5, 2, 2, 3, [30.0, 22.0, 12.0]),  # 7 batches, the last one of two sequences
        (32, 16, 2, 1, [32.0, 32.0]),  # fewer batches than are to be accumulated
    ],
)
@pytest.mark.parametrize("overlap", ["none", "delayed"])
def test_a_step_weighs_the_sequences_that_it_trained(
    tmp_path: Path, size: int, accumulated: int, epochs: int, sync_every: int, weights: list[float], overlap: str
) -> None:
    peer = FakePeer()
    options: dict[str, Any] = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulated}
    own = callback(peer, sync_every, overlap=overlap)
    trainer(tmp_path, Net(), [own], **options, max_steps=-1, num_train_epochs=epochs).train()
    assert peer.weights == pytest.approx(weights) and sum(peer.weights) == 32 * epochs


@pytest.mark.parametrize(
    ("loader", "weights", "told"),
    [
        ({"batch_size": 5, "drop_last": True}, [10.0, 10.0, 10.0], False),
        ({"batch_size": 5, "sampler": range(13)}, [10.0, 3.0], False),
        ({"batch_size": 8}, [16.0, 16.0], False),
        ({"batch_sampler": [[0, 1, 2], [3, 4], [5], [6, 7, 8, 9]]}, [4.0, 4.0], True),
    ],
)
def test_a_step_weighs_the_sequences_of_the_loader_that_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, loader: dict[str, Any], weights: list[float], told: bool
) -> None:
    """What the arguments say counted, though a `get_train_dataloader` of one's own reads other batches."""
    own = callback(peer := FakePeer(), 1)
    one = trainer(tmp_path, Net(), [own], max_steps=-1, num_train_epochs=1)
    data = torch.utils.data.DataLoader(one.train_dataset, collate_fn=one.data_collator, **loader)
    one.get_train_dataloader = lambda: one.accelerator.prepare(data)
    one.train()
    assert peer.weights == weights and ("no one size that it tells" in caplog.text) is told


def test_what_is_resumed_in_the_middle_of_an_epoch_weighs_what_is_left_of_it(tmp_path: Path) -> None:
    options: dict[str, Any] = {"per_device_train_batch_size": 5, "max_steps": 4, "save_strategy": "steps"}
    trainer(tmp_path, Net(), [callback(FakePeer())], **options, save_steps=2).train()
    own = callback(peer := FakePeer(), 1)
    one = trainer(tmp_path, Net(), [own], **options)
    one.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    if one.state.global_step < 4:
        pytest.skip("this transformers leaves out the last step of an epoch that it resumes")
    assert peer.weights == [10.0, 2.0]


def test_a_step_that_a_scaler_skips_weighs_nothing(tmp_path: Path) -> None:
    """The fourth: as torch's GradScaler has it of a fused optimizer."""
    from transformers import TrainerCallback

    model = Net()
    inner = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)

    class Overflow(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **of_trainer: Any) -> None:
            inner.found_inf = torch.tensor(float(state.global_step == 3))  # type: ignore[attr-defined]

    options: dict[str, Any] = {"gradient_accumulation_steps": 5, "max_steps": -1, "num_train_epochs": 2}
    one = trainer(tmp_path, model, [callback(peer := FakePeer()), Overflow()], **options)
    one.optimizer = inner
    one.train()
    assert peer.weights == [20.0, 20.0, 20.0, 2.0]  # of 10, 10, 10, 2 sequences in each epoch


def test_a_weight_that_is_given_stays(tmp_path: Path) -> None:
    trainer(tmp_path, Net(), [callback(peer := FakePeer(), weight=3.0)], gradient_accumulation_steps=5).train()
    assert peer.weights == [6.0, 6.0, 6.0]


def test_a_search_for_the_batch_size_is_refused_before_the_run_is_begun(tmp_path: Path) -> None:
    one = trainer(tmp_path, Net(), [callback(peer := FakePeer())], auto_find_batch_size=True)
    with pytest.raises(UsageError, match="auto_find_batch_size"):
        one.train()
    two = trainer(tmp_path, Net(), [callback(peer)])
    two.args.deepspeed = {"zero_optimization": {"stage": 1}}
    with pytest.raises(UsageError, match="DeepSpeed keeps parameters of its own"):
        two.train()
    assert not peer.weights


@pytest.mark.parametrize("overlap", ["none", "delayed"])
def test_the_last_steps_are_brought_in_before_the_last_checkpoint_is_written(tmp_path: Path, overlap: str) -> None:
    from safetensors.torch import load_file

    peer, model = FakePeer(), Net()
    own = callback(peer, sync_every=4, overlap=overlap, weight=1.0)
    trainer(tmp_path, model, [own], save_strategy="steps", save_steps=6).train()
    assert peer.weights == [4.0, 2.0] and own.diloco.t == 2
    assert torch.equal(flat(model), peer.theta())
    saved = load_file(tmp_path / "checkpoint-6" / "model.safetensors")
    assert all(torch.equal(saved[name], p) for name, p in model.named_parameters())


@pytest.mark.parametrize("overlap", ["none", "delayed"])
def test_rounds_wait_for_a_trainer_until_its_last_steps_are_offered(tmp_path: Path, overlap: str) -> None:
    """It said that it trains no more, and then offered them: the others' last round went on without it, and each was
    left with a model of its own."""
    peer, said = FakePeer(), list[bool]()
    peer.on_contribute = lambda: said.append(any(change.get("eta_s") == NEVER_S for change in peer.said))
    trainer(tmp_path, Net(), [callback(peer, 4, overlap=overlap)]).train()
    assert peer.weights == [16.0, 8.0] and said == [False, False]
    assert peer.said[-1] == {"eta_s": NEVER_S}


def test_a_round_is_in_the_trainers_log_once(tmp_path: Path) -> None:
    own = callback(FakePeer())  # skips where transformers.Trainer cannot run
    from transformers import TrainerCallback

    class Reporter(TrainerCallback):  # type: ignore[misc]
        rounds: list[float] = []

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **of_trainer: Any) -> None:
            self.rounds += [logs["round/t"]] if "round/t" in logs else []

    behind = Reporter()
    one = trainer(tmp_path, Net(), [own, behind])
    one.train()
    assert behind.rounds == [1, 2, 3]
    logs = [log for log in one.state.log_history if "round/t" in log]
    assert [(log["step"], log["round/t"]) for log in logs] == [(2, 1), (4, 2), (6, 3)]
    assert all(log["round/peers"] == 1 and log["round/seconds"] >= 0 and "loss" in log for log in logs)


def test_a_resumed_trainer_goes_on_with_its_moments_and_trains_what_is_left(tmp_path: Path) -> None:
    peer, whole, halves = FakePeer(), Net(), Net()
    trainer(tmp_path / "whole", whole, [callback(FakePeer())]).train()
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4}
    trainer(tmp_path / "a", halves, [callback(FakePeer())], **options).train()
    again = Net()
    checkpoint = str(tmp_path / "a" / "checkpoint-4")
    result = trainer(tmp_path / "b", again, [callback(peer)]).train(resume_from_checkpoint=checkpoint)
    assert result.global_step == 6 and len(peer.weights) == 1
    torch.testing.assert_close(flat(again), flat(whole), rtol=1e-5, atol=1e-6)


def test_the_best_model_that_was_loaded_at_the_end_is_not_offered(tmp_path: Path) -> None:
    peer, model = FakePeer(), Net()
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    options |= {"load_best_model_at_end": True, "label_names": ["x"]}
    best = trainer(tmp_path, model, [callback(peer)], **options)
    best.train()
    assert len(peer.weights) == 3 and best.state.best_model_checkpoint is not None


def test_where_early_stopping_ends_the_training_its_checkpoint_holds_the_swarms_model(tmp_path: Path) -> None:
    peer, model = FakePeer(), Net()
    own = callback(peer, sync_every=3)
    from transformers import EarlyStoppingCallback

    from dlc.integrations.transformers import saved_state

    class Worse(type(own).__mro__[1]):  # type: ignore[misc]  # transformers' TrainerCallback
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
            metrics["eval_loss"] = float(state.global_step)

    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    options |= {"metric_for_best_model": "loss", "greater_is_better": False, "label_names": ["x"], "max_steps": 20}
    one = trainer(tmp_path, model, [Worse(), EarlyStoppingCallback(1), own], **options)
    one.train()
    steps = one.state.global_step
    assert steps < 20 and steps % 3 and own.diloco.inner_step == 0, "it was stopped between two rounds"
    kept = saved_state(tmp_path / f"checkpoint-{steps}")
    assert kept["t"] == peer.state.t and kept["steps"] == 0


def test_steps_that_no_round_has_where_a_best_model_was_loaded_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    peer, model = FakePeer(), Net()
    options: dict[str, Any] = {"eval_strategy": "epoch", "save_strategy": "epoch", "max_steps": -1}
    options |= {"load_best_model_at_end": True, "label_names": ["x"], "num_train_epochs": 9}
    from transformers import EarlyStoppingCallback

    own = callback(peer, sync_every=1000)
    one = trainer(tmp_path, model, [own, EarlyStoppingCallback(1, 1e9)], **options)  # behind ours: seen too late
    one.train()
    assert not peer.weights and one.state.best_model_checkpoint is not None
    assert f"the last {one.state.global_step} steps are in no round" in caplog.text
    assert peer.said[-1] == {"eta_s": NEVER_S}, "no round waits for it any more"


def run_of(checkpoint: Path | None, state_dir: Path) -> dlc.Peer:
    """A real peer alone, of a new run or of the one that the checkpoint is of."""
    from dlc.integrations.transformers import saved_state

    resume = None if checkpoint is None else dlc.Resume.of(saved_state(checkpoint))
    return dlc.Peer.join(found=True, resume=resume, state_dir=state_dir)


NESTEROV: dict[str, Any] = {"outer": dlc.OuterSpec(lr=0.5, momentum=0.9), "codec": "int8"}
"""With momentum, and with something that the codec owes."""


@pytest.mark.parametrize("where", ["the checkpoint's own folder", "args", "resume"])
def test_a_whole_swarm_that_was_stopped_goes_on_from_a_trainers_checkpoint(tmp_path: Path, where: str) -> None:
    """Rounds after a restart are the same in bits as those without, though the outer optimizer has momentum."""
    callback(FakePeer())  # skips where transformers.Trainer cannot run
    from dlc.integrations.transformers import DiLoCoCallback, saved_state

    whole, first, again = Net(), Net(), Net()
    saves: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
    with run_of(None, tmp_path / "alone") as peer:
        trainer(tmp_path / "whole", whole, [DiLoCoCallback(peer, 1, **NESTEROV)], **saves).train()
    with run_of(None, tmp_path / "peer") as peer:
        trainer(tmp_path / "out", first, [DiLoCoCallback(peer, 1, **NESTEROV)], **saves, max_steps=4).train()
    checkpoint = tmp_path / "out" / "checkpoint-2"
    options: dict[str, Any] = {"resume": saved_state(checkpoint)} if where == "resume" else {}
    more: dict[str, Any] = {"resume_from_checkpoint": str(checkpoint)} if where == "args" else {}
    folder = tmp_path / "out" if where.endswith("folder") else tmp_path / "elsewhere"
    with run_of(checkpoint, tmp_path / "peer") as peer:
        own = DiLoCoCallback(peer, 1, **NESTEROV, **options)
        trainer(folder, again, [own], **saves, **more).train(resume_from_checkpoint=str(checkpoint))
        assert own.diloco.t == 6 and peer.position("train").t == 6
    assert torch.equal(flat(again), flat(whole))
    assert own.diloco.state_dict()["residual"].any()


def test_the_outer_state_of_another_training_with_a_checkpoint_of_the_same_name_is_not_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saves: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4}
    trainer(tmp_path / "a", Net(), [callback(FakePeer())], **saves).train()
    trainer(tmp_path / "b", Net(), [callback(FakePeer())], **saves, learning_rate=0.01).train()
    own = callback(peer := FakePeer())
    trainer(tmp_path / "b", Net(), [own]).train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-4"))
    assert "no outer state was found" in caplog.text and peer.state.t == 1


def test_a_run_that_nobody_resumed_begins_anew_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saves: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4}
    trainer(tmp_path, Net(), [callback(FakePeer())], **saves).train()
    trainer(tmp_path, Net(), [own := callback(FakePeer())]).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert "outer state of round 2" in caplog.text and "saved_state" in caplog.text and own.diloco.t == 1
    given = callback(FakePeer(), resume=dlc_state(tmp_path / "checkpoint-4"))
    with pytest.raises(UsageError, match="round 2.*join with resume"):
        trainer(tmp_path, Net(), [given]).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def dlc_state(checkpoint: Path) -> dict[str, Any]:
    from dlc.integrations.transformers import saved_state

    return saved_state(checkpoint)


def test_steps_that_were_on_their_way_to_a_round_are_not_told_as_in_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With an overlap a checkpoint may hold them, and the round may count them."""
    from dlc.integrations import saved

    def made(peer: FakePeer) -> tuple[Net, torch.optim.Optimizer, dlc.DiLoCo]:
        model = Net()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, inner, dlc.DiLoCo(model, inner, peer, 2, codec="fp32", overlap="delayed", overlap_steps=2)

    peer = FakePeer()
    peer.slices = [0, 9]
    model, _, opt = made(peer)
    for x in rows()[:5]:
        model(x)["loss"].backward()
        opt.step()
    assert (state := saved.state_of(opt)) is not None and (state["t"], state["steps"], state["offered"]) == (1, 3, 2)
    saved.write(tmp_path, state, model)
    model, inner, _ = made(FakePeer())
    saved.follow(model, inner, FakePeer(start_t=5), 2, saved.read(tmp_path), {"codec": "fp32"})
    assert "1 steps of the checkpoint were in no round and are lost: it is of round 1" in caplog.text
    assert "2 steps of the checkpoint were on their way to a round" in caplog.text


def test_where_the_model_alone_is_saved_or_the_peer_has_left_a_checkpoint_has_no_outer_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Gone(FakePeer):
        def checkpoint(self, channel: str) -> Any:
            raise SwarmClosed("the peer stopped on an error: no memory")

    saves: dict[str, Any] = {"save_strategy": "steps", "save_steps": 6}
    trainer(tmp_path / "model", Net(), [callback(FakePeer())], **saves, save_only_model=True).train()
    trainer(tmp_path / "left", Net(), [callback(Gone())], **saves).train()
    assert "no outer state" in caplog.text and "stopped on an error: no memory" in caplog.text
    for folder in (tmp_path / "model", tmp_path / "left"):
        assert (folder / "checkpoint-6" / "model.safetensors").is_file()
        with pytest.raises(UsageError, match="no outer state"):
            dlc_state(folder / "checkpoint-6")


# ------------------------------------------------------------------ lightning


@pytest.fixture
def fit(tmp_path: Path) -> Iterator[Any]:
    lightning = pytest.importorskip("lightning", reason="needs pip install 'dlc[lightning]'")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, optimizers: int = 1) -> None:
            super().__init__()
            self.net, self.count = Net(), optimizers
            self.automatic_optimization = optimizers < 2

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return self.net(batch)["loss"]  # type: ignore[no-any-return]

        def validation_step(self, batch: Tensor, index: int) -> None:
            pass

        def configure_optimizers(self) -> Any:
            many = [torch.optim.AdamW(self.parameters(), lr=0.05) for _ in range(self.count)]
            return many if self.count > 1 else many[0] if many else None

    def run(
        strategy: Any,
        ckpt_path: str | None = None,
        optimizers: int = 1,
        data: list[Tensor] | None = None,
        validation: bool = False,
        **options: Any,
    ) -> Any:
        usual = {"accelerator": "cpu", "max_steps": 6, "accumulate_grad_batches": 2, "default_root_dir": tmp_path}
        usual |= {
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        one = lightning.Trainer(strategy=strategy, **{**usual, **options})
        module = Module(optimizers)
        loader = torch.utils.data.DataLoader(torch.stack(data or rows()), batch_size=2)
        one.fit(module, loader, loader if validation else None, ckpt_path=ckpt_path)
        return one, module

    yield run


def strategy(peer: FakePeer, sync_every: int = 2, **options: Any) -> Any:
    from dlc.integrations.lightning import DLCStrategy

    return DLCStrategy(peer, sync_every, outer=SUM, codec="fp32", **options)


def test_lightning_trains_as_without_for_a_lone_peer_and_brings_the_last_steps_in(fit: Any) -> None:
    peer = FakePeer()
    own = strategy(peer, sync_every=4)
    one, module = fit(own)
    _, alone = fit("auto")
    assert peer.weights == [4.0, 2.0] and one.global_step == 6 and own.diloco.t == 2
    torch.testing.assert_close(flat(module), flat(alone), rtol=1e-5, atol=1e-6)
    assert torch.equal(flat(module), peer.theta())


@pytest.mark.parametrize("ends_by", ["epochs", "steps", "a callback", "early stopping"])
def test_the_last_checkpoint_of_lightning_holds_the_swarms_model(fit: Any, tmp_path: Path, ends_by: str) -> None:
    peer = FakePeer()
    own = strategy(peer, sync_every=5)  # skips where Lightning is not installed
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
    from lightning.pytorch.plugins.io import TorchCheckpointIO

    class Stop(Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
            trainer.should_stop = ends_by == "a callback" and trainer.global_step == 6

        def on_train_epoch_end(self, trainer: Trainer, *_: object) -> None:
            trainer.callback_metrics["ever less"] = torch.tensor(0.0)

    limits: dict[str, dict[str, Any]] = {
        "epochs": {"max_steps": -1, "max_epochs": 1},
        "steps": {"max_steps": 12},
        "a callback": {},
        "early stopping": {"max_steps": -1, "max_epochs": 9},
    }
    kept = ModelCheckpoint(tmp_path / "kept", filename="end", save_last=True)
    early = EarlyStopping("ever less", patience=1, mode="min", check_on_train_epoch_end=True)
    callbacks = [kept, Stop(), *([early] if ends_by == "early stopping" else [])]
    fit(own, enable_checkpointing=True, callbacks=callbacks, **limits[ends_by])
    expected = {
        "epochs": [5.0, 3.0],
        "steps": [5.0, 5.0, 2.0],
        "a callback": [5.0, 1.0],
        "early stopping": [5.0, 5.0, 5.0, 1.0],
    }
    assert peer.weights == expected[ends_by]
    whole = TorchCheckpointIO().load_checkpoint(kept.last_model_path, weights_only=True)
    assert torch.equal(torch.cat([p.flatten() for p in whole["state_dict"].values()]), peer.theta())
    assert whole["dlc"]["t"] == peer.state.t and whole["dlc"]["steps"] == 0


def test_callbacks_of_lightning_see_the_number_of_the_last_epoch(fit: Any, tmp_path: Path) -> None:
    """It was one too high, so that `every_n_epochs` left the last checkpoint out."""
    own = strategy(FakePeer())  # skips where Lightning is not installed
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Epochs(Callback):  # type: ignore[misc]
        seen: list[int] = []

        def on_train_epoch_end(self, trainer: Trainer, *_: object) -> None:
            self.seen.append(trainer.current_epoch)

    kept = ModelCheckpoint(tmp_path / "kept", filename="{epoch}", every_n_epochs=2)
    epochs = Epochs()
    one, _ = fit(own, enable_checkpointing=True, callbacks=[kept, epochs], max_steps=-1, max_epochs=2)
    assert epochs.seen == [0, 1] and one.current_epoch == 2
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["epoch=1.ckpt"]


@pytest.mark.parametrize("ends_by", ["epochs", "steps", "a callback"])
@pytest.mark.parametrize("saved_at", ["the step", "the validation"])
def test_the_last_validation_of_lightning_and_what_is_saved_by_it_are_of_the_swarms_model(
    fit: Any, tmp_path: Path, ends_by: str, saved_at: str
) -> None:
    strategy(peer := FakePeer())  # skips where Lightning is not installed
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.io import TorchCheckpointIO

    from dlc.integrations.lightning import DLCStrategy

    class Measured(Callback):  # type: ignore[misc]
        last = torch.zeros(0)

        def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
            trainer.should_stop = ends_by == "a callback" and trainer.global_step == 6

        def on_validation_batch_start(self, trainer: Trainer, module: nn.Module, *_: object) -> None:
            self.last = flat(module)

    limits = {"epochs": {"max_steps": -1, "max_epochs": 1}, "steps": {"max_steps": 16}, "a callback": {"max_steps": 9}}
    when: dict[str, Any] = {"every_n_train_steps": 2} if saved_at == "the step" else {"save_on_train_epoch_end": False}
    kept = ModelCheckpoint(tmp_path / "kept", save_last=True, **when)
    measured, own = Measured(), DLCStrategy(peer, 5, **NESTEROV)
    fit(own, validation=True, enable_checkpointing=True, callbacks=[measured, kept], **limits[ends_by])
    assert sum(peer.weights) == {"epochs": 8.0, "steps": 16.0, "a callback": 6.0}[ends_by]
    assert torch.equal(measured.last, peer.theta())
    for path in (kept.best_model_path, kept.last_model_path):
        whole = TorchCheckpointIO().load_checkpoint(path, weights_only=True)
        assert torch.equal(torch.cat([p.flatten() for p in whole["state_dict"].values()]), peer.theta())


def test_a_search_or_several_devices_in_lightning_are_refused_before_the_run_is_touched(fit: Any) -> None:
    peer = FakePeer()
    strategy(peer)  # skips where Lightning is not installed
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import (
        BatchSizeFinder,
        LearningRateFinder,
        StochasticWeightAveraging,
        WeightAveraging,
    )

    for averages in (StochasticWeightAveraging(0.1), WeightAveraging()):
        with pytest.raises(UsageError, match="WeightAveraging would leave each peer with another model"):
            fit(strategy(peer), callbacks=[averages])
    with pytest.raises(UsageError, match="make the search with a Trainer without DLCStrategy"):
        fit(strategy(peer), callbacks=[LearningRateFinder()])
    sizes = Trainer(accelerator="cpu", logger=False, callbacks=[BatchSizeFinder()])  # which needs a DataModule to fit
    sizes.state.fn = "fit"
    from lightning.pytorch.core.optimizer import LightningOptimizer

    module = Net()
    with pytest.raises(UsageError, match="LightningSGD wraps an optimizer"):
        dlc.DiLoCo(module, LightningOptimizer(torch.optim.SGD(module.parameters(), lr=0.1)), peer)
    with pytest.raises(UsageError, match="a search for a learning rate or a batch size"):
        strategy(peer).setup(sizes)
    for devices in ([0, 1], "0,1"):  # numbers of GPUs, which this machine may not have
        several = Trainer(accelerator="cpu", logger=False)
        several._accelerator_connector._devices_flag = devices
        with pytest.raises(UsageError, match="trains on one device"):
            strategy(peer).setup(several)
    for devices in (2, "2"):
        with pytest.raises(UsageError, match="trains on one device, but the Trainer was given devices="):
            fit(strategy(peer), devices=devices)
    assert not peer.weights and not peer.vectors
    fit(strategy(peer), devices="auto")
    assert peer.weights


def test_lightnings_loggers_take_each_round(fit: Any, tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    class Seen(CSVLogger):  # type: ignore[misc]
        rounds: list[float] = []

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            self.rounds += [metrics["round/t"]] if "round/t" in metrics else []

    logger = Seen(tmp_path)
    fit(strategy(FakePeer()), logger=logger)
    assert logger.rounds == [1, 2, 3]


def test_a_hook_and_a_patience_are_handed_on(fit: Any, tmp_path: Path) -> None:
    peers = [FakePeer(), FakePeer()]
    options: dict[str, Any] = {"pseudo_gradient_hook": lambda d: 0 * d, "patience_s": 3.0}
    fit(strategy(peers[0], **options))
    trainer(tmp_path, Net(), [callback(peers[1], **options)]).train()
    for peer in peers:
        assert peer.vectors and not any(vector.any() for vector in peer.vectors) and set(peer.patiences_s) == {3.0}


def test_lightning_resumes_with_its_moments(fit: Any, tmp_path: Path) -> None:
    data = rows()[:1] * 32  # a plain DataLoader starts anew, so all batches are the same
    _, whole = fit(strategy(FakePeer()), data=data)
    half, _ = fit(strategy(FakePeer()), max_steps=4, data=data)
    half.save_checkpoint(tmp_path / "half.ckpt")
    peer = FakePeer()
    one, again = fit(strategy(peer), ckpt_path=str(tmp_path / "half.ckpt"), data=data)
    assert one.global_step == 6 and len(peer.weights) == 1
    torch.testing.assert_close(flat(again), flat(whole), rtol=1e-5, atol=1e-6)


def test_a_whole_swarm_that_was_stopped_goes_on_from_a_checkpoint_of_lightning(fit: Any, tmp_path: Path) -> None:
    strategy(FakePeer())  # skips where Lightning is not installed
    from dlc.integrations.lightning import DLCStrategy, saved_state

    data = rows()[:1] * 32
    with dlc.Peer.join(found=True, state_dir=tmp_path / "alone") as peer:
        _, whole = fit(DLCStrategy(peer, 1, **NESTEROV), data=data)
    with dlc.Peer.join(found=True, state_dir=tmp_path / "peer") as peer:
        half, _ = fit(DLCStrategy(peer, 1, **NESTEROV), data=data, max_steps=2)
        half.save_checkpoint(tmp_path / "half.ckpt")
        half.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    half.save_checkpoint(tmp_path / "late.ckpt")
    state = saved_state(tmp_path / "half.ckpt")
    with dlc.Peer.join(found=True, resume=dlc.Resume.of(state), state_dir=tmp_path / "peer") as peer:
        one, again = fit(own := DLCStrategy(peer, 1, **NESTEROV), ckpt_path=str(tmp_path / "half.ckpt"), data=data)
        assert one.global_step == 6 and own.diloco.t == 6
    assert torch.equal(flat(again), flat(whole))
    for name in ("weights", "late"):
        with pytest.raises(UsageError, match="no outer state"):
            saved_state(tmp_path / f"{name}.ckpt")


def test_a_module_with_two_optimizers_or_none_is_refused(fit: Any) -> None:
    with pytest.raises(UsageError, match="one optimizer, not 2"):
        fit(strategy(FakePeer()), optimizers=2, accumulate_grad_batches=1)
    with pytest.raises(UsageError, match="the module's optimizer holds no parameters"):
        fit(strategy(FakePeer()), optimizers=0)


# ------------------------------------------------------------------ the keywords of dlc.DiLoCo

KEYWORDS = {name for name, p in inspect.signature(dlc.DiLoCo).parameters.items() if p.kind is p.KEYWORD_ONLY}


def test_every_keyword_of_diloco_reaches_it_through_both(
    fit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that it will have one day: what is given here is read from its signature."""
    from dlc.integrations import saved

    given: list[dict[str, Any]] = []

    class Stop(Exception):
        pass

    def taken(*model_inner_peer_and_h: Any, **options: Any) -> None:
        given.append(options)
        raise Stop

    monkeypatch.setattr(saved, "DiLoCo", taken)
    options = {name: object() for name in KEYWORDS} | {"weight": 3.0}
    with pytest.raises(Stop):
        fit(_plain_strategy(options))
    with pytest.raises(Stop):
        trainer(tmp_path, Net(), [_plain_callback(options)]).train()
    assert given == [options, options] and {"resume", "fragments", "mixing", "overlap_steps", "outer"} <= KEYWORDS


def _plain_strategy(options: dict[str, Any]) -> Any:
    from dlc.integrations.lightning import DLCStrategy

    assert set(inspect.signature(DLCStrategy).parameters) == {"peer", "sync_every", "device"} | KEYWORDS
    with pytest.raises(TypeError, match="'overlop'.*overlap_steps"):
        DLCStrategy(FakePeer(), overlop="eager")
    return DLCStrategy(FakePeer(), 2, **options)


def _plain_callback(options: dict[str, Any]) -> Any:
    callback(FakePeer())
    from dlc.integrations.transformers import DiLoCoCallback

    assert set(inspect.signature(DiLoCoCallback).parameters) == {"peer", "sync_every"} | KEYWORDS
    with pytest.raises(TypeError, match="'overlop'.*overlap_steps"):
        DiLoCoCallback(FakePeer(), overlop="eager")
    return DiLoCoCallback(FakePeer(), 2, **options)


def test_fragments_with_overlap_train_inside_both(fit: Any, tmp_path: Path) -> None:
    peers = [FakePeer(), FakePeer()]
    options: dict[str, Any] = {"fragments": 2, "overlap": "eager", "overlap_steps": 1}
    fit(strategy(peers[0], **options))
    trainer(tmp_path, Net(), [callback(peers[1], **options)]).train()
    for peer in peers:
        assert peer.state.t >= 6 and max(vector.numel() for vector in peer.vectors) < 5


# ------------------------------------------------------------------ following


def test_follow_counts_the_steps_of_the_inner_optimizer_until_finish() -> None:
    peer, model = FakePeer(), Net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = dlc.DiLoCo(model, inner, peer, sync_every=2, codec="fp32")
    opt.follow()
    with pytest.raises(UsageError, match="follow"):
        opt.step()
    for x in rows()[:3]:
        model(x)["loss"].backward()
        inner.step()
    assert peer.weights == [2.0] and opt.last_report is not None and opt.inner_step == 1
    report = opt.finish()
    assert report is not None and report.t == 2 and peer.weights == [2.0, 1.0]
    assert torch.equal(flat(model), peer.theta())
    inner.step()
    assert opt.inner_step == 0 and opt.finish() is None


class Clipped(torch.optim.SGD):
    """As many have one: a class of torch with something before and after its step."""

    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        return super().step(closure)


def test_a_step_that_calls_the_step_of_its_base_class_is_counted_once(tmp_path: Path) -> None:
    """Where an optimizer of the base class was made, too, torch calls the hooks of both, and it was counted twice."""
    model = Net()
    torch.optim.SGD(model.parameters(), lr=0.1)  # whose class has hooks from now on
    inner = Clipped(model.parameters(), lr=0.1)
    opt = dlc.DiLoCo(model, inner, FakePeer(), sync_every=4)
    opt.follow()
    for counted in (1, 2, 3, 0, 1):
        model(rows()[0])["loss"].backward()
        inner.step()
        assert opt.inner_step == counted
    one = trainer(tmp_path, model := Net(), [callback(peer := FakePeer(), 3)], max_steps=-1, num_train_epochs=2)
    one.args.gradient_accumulation_steps = 5
    one.optimizer = Clipped(model.parameters(), lr=0.1)
    one.train()
    assert peer.weights == [30.0, 22.0, 12.0]  # of 10, 10, 10, 2 sequences in each epoch


def test_what_is_offered_at_the_end_is_waited_for_after_unfollow_too() -> None:
    peer, model, said = FakePeer(), Net(), list[float]()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = dlc.DiLoCo(model, inner, peer, sync_every=2)
    opt.follow()
    model(rows()[0])["loss"].backward()
    inner.step()
    opt.unfollow()
    assert peer.said == [{"eta_s": NEVER_S}]
    peer.on_contribute = lambda: said.append(peer.said[-1]["eta_s"])
    report = opt.finish()
    assert report is not None and said == [-1.0] and peer.said[-1] == {"eta_s": NEVER_S}


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skips_does_not_count(fused: bool) -> None:
    """A fused optimizer is stepped all the same, and its kernel does nothing."""
    peer, model = FakePeer(), Net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    opt = dlc.DiLoCo(model, inner, peer, sync_every=2)
    opt.follow()
    scaler = torch.amp.GradScaler("cpu")
    for factor, counted in ((1.0, 1), (float("inf"), 1)):
        inner.zero_grad()
        scaler.scale(model(rows()[0])["loss"] * factor).backward()
        scaler.step(inner)
        scaler.update()
        assert opt.inner_step == counted and not peer.weights


def test_what_is_written_beside_a_checkpoint_is_read_back_whole(tmp_path: Path) -> None:
    """What is lost of it is missed by nobody: there is a default for each."""
    net = Net()
    outer = {"t": 2, "log": torch.arange(5, dtype=torch.uint8), "image": torch.arange(9, dtype=torch.uint8)}
    vectors = {name: torch.rand(4) for name in ("residual", "local", "start")}
    counts = {"t": 3, "inner_step": 5, "steps": 4, "offered": 1, "held": [1, 2], "share": 0.25}
    beside.write(tmp_path, {"outer": outer, **vectors, **counts}, net)
    found = beside.read(tmp_path, net)
    assert found is not None and found.keys() == {"inner", "outer", *vectors, *counts} and found["inner"] is None
    assert {name: found[name] for name in counts} == counts and found["outer"]["t"] == 2
    for name, vector in (*vectors.items(), *((name, outer[name]) for name in ("log", "image"))):
        assert torch.equal(found[name] if name in vectors else found["outer"][name], vector)
    beside.write(tmp_path, {"outer": outer, **dict.fromkeys(vectors), **counts}, net)
    found = beside.read(tmp_path, net)
    assert found is not None and all(found[name] is None for name in vectors)
    with torch.no_grad():
        next(net.parameters()).add_(1.0)
    assert beside.read(tmp_path, net) is None, "it is of another model"


def test_whether_a_run_has_begun_is_asked_of_its_own_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another one a run that goes on would begin anew, or the other way round."""
    asked: list[tuple[str, float | None]] = []

    def rounds_made(peer: FakePeer, channel: str, timeout_s: float | None) -> int:
        asked.append((channel, timeout_s))
        return len(asked) - 1

    monkeypatch.setattr(beside, "rounds_made", rounds_made)
    assert not beside._begun(FakePeer(), {"channel": "mine", "timeout_s": 7.0}) and beside._begun(FakePeer(), {})
    assert asked == [("mine", 7.0), (inspect.signature(dlc.DiLoCo).parameters["channel"].default, None)]


@pytest.mark.parametrize(
    ("changed", "over"),
    [
        ({}, False),
        ({"should_stop": True}, True),
        ({"should_stop": True, "min_steps": 5}, True),
        ({"should_stop": True, "min_steps": 6}, False),
        ({"should_stop": True, "min_epochs": 2}, False),
        ({"max_steps": 5}, True),
        ({"max_steps": 6}, False),
        ({"max_epochs": 1}, True),
        ({"max_epochs": 1, "done": False}, False),
    ],
)
def test_the_training_of_lightning_is_over_where_no_step_comes_any_more(changed: dict[str, Any], over: bool) -> None:
    """Or else the steps that come are no part of any round."""
    pytest.importorskip("lightning")
    from dlc.integrations.lightning import _is_over

    usual = {"current_epoch": 0, "global_step": 5, "max_steps": -1, "max_epochs": -1, "should_stop": False}
    given = {**usual, "min_epochs": 1, "min_steps": None, "done": True, **changed}
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(done=given["done"]))
    assert _is_over(SimpleNamespace(fit_loop=loop, **given)) is over
