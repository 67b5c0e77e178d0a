"""`DLCStrategy`: DiLoCo for Lightning, as the strategy of its Trainer.

    peer = dlc.Peer.join(peers=["host:port"], key="run.key")
    trainer = lightning.Trainer(strategy=DLCStrategy(peer, sync_every=500))
    trainer.fit(model, data)
    peer.leave()

Each peer is a Trainer of its own on one device. Each `sync_every`-th step of the optimizer (not micro-batch: gradient
accumulation is one step) is followed by a round, whose numbers (round/peers, round/seconds, ...) go to the Trainer's
loggers. After the last step the steps that are in no round are brought in and the model is the swarm's, in the
validation and the checkpoints that come then, too; those between two rounds are of this peer's own.

A checkpoint holds, beside what Lightning saves, what the swarm had: outer parameters and momentum, the log of the run,
and what int8, int4 or topk still owe. A whole swarm that was stopped goes on from there:

    peer = dlc.Peer.join(found=True, resume=dlc.Resume.of(saved_state("last.ckpt")), state_dir="peer")
    lightning.Trainer(strategy=DLCStrategy(peer, sync_every=500)).fit(model, data, ckpt_path="last.ckpt")

Where the swarm lives on, the parameters are the swarm's, and the steps between the last round before the checkpoint
and the checkpoint are lost; the log says how many.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

try:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import (
        BatchSizeFinder,
        LearningRateFinder,
        StochasticWeightAveraging,
        WeightAveraging,
    )
    from lightning.pytorch.plugins.io import TorchCheckpointIO
    from lightning.pytorch.strategies import SingleDeviceStrategy
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}: pip install 'dlc[lightning]'", name=error.name) from error

import torch

from dlc.errors import UsageError
from dlc.integrations import saved
from dlc.integrations.options import check_options, takes_options
from dlc.integrations.rounds import metrics
from dlc.report import RoundReport
from dlc.train.diloco import DiLoCo
from dlc.train.swarm import TrainPeer

KEY = "dlc"
"""Of what is ours in a checkpoint of Lightning."""


def saved_state(checkpoint: str | Path) -> dict[str, Any]:
    """What a checkpoint of Lightning, a file, holds of the swarm: for `dlc.Resume.of`, and for `resume=`.

    Lightning reads it, tensors and plain values only, and what it raises for other files comes out of it. UsageError:
    it was saved without a DLCStrategy, as weights only, or after the peer had left.
    """
    whole = TorchCheckpointIO().load_checkpoint(checkpoint, map_location="cpu", weights_only=True)
    return saved.demand(whole.get(KEY), checkpoint)


class _LastStep(pl.Callback):  # type: ignore[misc]
    """Asks for the end of the exchanges where the last step may have been made: the first in the list, it comes before
    whatever measures or saves the model then."""

    def __init__(self, end_if_over: Callable[[], None]) -> None:
        self._end_if_over = end_if_over

    def on_train_batch_end(self, *_: object) -> None:
        self._end_if_over()

    def on_validation_start(self, *_: object) -> None:
        """Another callback may have stopped the training at the end of the batch."""
        with torch.inference_mode(False):
            self._end_if_over()

    def on_train_epoch_end(self, *_: object) -> None:
        self._end_if_over()


@takes_options
class DLCStrategy(SingleDeviceStrategy):  # type: ignore[misc]  # lightning is not read by mypy
    """Trains the module together with all peers of the channel; `options` are the keywords of `dlc.DiLoCo`.

    device: None takes the first one of the Trainer's accelerator.

    Without `resume=` it takes what is in the checkpoint of `fit(ckpt_path=...)`.
    UsageError: the module has more than one optimizer, or none, the Trainer several devices, or it searches for a
    learning rate or a batch size, or averages weights on its own. TypeError: `dlc.DiLoCo` has no such keyword. What
    `dlc.DiLoCo` and its `step` raise comes out of `trainer.fit`.
    """

    strategy_name = "dlc"

    def __init__(
        self, peer: TrainPeer, sync_every: int = 500, *, device: torch.device | str | None = None, **options: Any
    ) -> None:
        check_options("DLCStrategy", options)
        super().__init__(device=device or "cpu")
        self._device_is_open = device is None
        self._peer, self._sync_every, self._options = peer, sync_every, options
        self._found: Mapping[str, Any] | None = None
        """Of the checkpoint of which this training resumes."""
        self._diloco: DiLoCo | None = None
        self._running = False
        self._trainer: pl.Trainer | None = None
        self._logged: RoundReport | None = None

    @property
    def diloco(self) -> DiLoCo:
        """Of the present or the last training; UsageError before the first."""
        if self._diloco is None:
            raise UsageError("there is no DiLoCo before trainer.fit()")
        return self._diloco

    def setup_environment(self) -> None:
        """Choose the device, now that the Trainer has chosen the accelerator."""
        if self._device_is_open:
            kind = self.accelerator
            self._root_device = kind.get_parallel_devices(kind.parse_devices(1))[0]
        self._found = None
        super().setup_environment()

    def setup(self, trainer: pl.Trainer) -> None:
        """Keep the Trainer, whose loggers take the rounds."""
        _check_trainer(trainer)
        self._trainer = trainer
        others = [callback for callback in trainer.callbacks if not isinstance(callback, _LastStep)]
        trainer.callbacks = [_LastStep(self._finish_if_over), *others]
        super().setup(trainer)

    def on_train_start(self) -> None:
        """The module is on its device and the checkpoint loaded: take the swarm's parameters, and follow the steps."""
        super().on_train_start()
        if len(self.optimizers) != 1:
            raise UsageError(f"DLCStrategy needs a module with one optimizer, not {len(self.optimizers)}")
        if not any(group["params"] for group in self.optimizers[0].param_groups):
            raise UsageError(
                "the module's optimizer holds no parameters, as where configure_optimizers returns None: its steps "
                "would be counted, and train nothing; let configure_optimizers return the optimizer"
            )
        found, self._found = self._found, None
        self._diloco = saved.follow(
            self.lightning_module, self.optimizers[0], self._peer, self._sync_every, found, self._options
        )
        self._running = True

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        """Log the round that the batch before may have ended with."""
        super().on_train_batch_start(batch, batch_idx)
        self._log_round()

    def on_train_end(self) -> None:
        """Bring the last steps to the others, and leave the module at the swarm's parameters, unless that is done."""
        super().on_train_end()
        if self._running:
            self._finish()

    def save_checkpoint(self, checkpoint: dict[str, Any], *where: Any, **how: Any) -> None:
        """Add what the swarm had, unless the checkpoint holds the weights only."""
        if self._diloco is not None and "optimizer_states" in checkpoint:
            kept = saved.state_of(self._diloco)
            checkpoint = checkpoint if kept is None else {**checkpoint, KEY: kept}
        super().save_checkpoint(checkpoint, *where, **how)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """For a checkpoint. Where EarlyStopping, or the module itself, ended the training at the end of the epoch, the
        exchanges have not ended yet: those are asked after `_LastStep`."""
        trainer = self._trainer
        if trainer is not None and trainer.training and trainer.should_stop:
            self._finish_if_over()
        kept: dict[str, Any] = super().lightning_module_state_dict()
        return kept

    def load_checkpoint(self, *where: Any, **how: Any) -> dict[str, Any]:
        """Keep what the swarm had for the beginning of the training."""
        checkpoint: dict[str, Any] = super().load_checkpoint(*where, **how)
        self._found = checkpoint.get(KEY)
        return checkpoint

    def teardown(self) -> None:
        """Also after an exception: later steps of the optimizer are its own."""
        self._running = False
        if self._diloco is not None:
            self._diloco.unfollow()
        super().teardown()

    def _finish_if_over(self) -> None:
        if self._running and self._trainer is not None and _is_over(self._trainer):
            self._finish()

    def _finish(self) -> None:
        self._running = False
        self.diloco.finish()
        self._log_round()

    def _log_round(self) -> None:
        report = self.diloco.last_report
        if report is None or report is self._logged or self._trainer is None:
            return
        self._logged = report
        for logger in self._trainer.loggers:
            logger.log_metrics(metrics(report), step=self._trainer.global_step)


def _is_over(trainer: pl.Trainer) -> bool:
    """Whether no step comes any more: after a batch, too, for which Lightning's `fit_loop.done` does not tell. That
    would also count the epoch before its callbacks have seen the end of it."""
    if not trainer.fit_loop.epoch_loop.done:
        return False
    epochs, steps = trainer.current_epoch + 1, trainer.global_step
    if -1 < trainer.max_steps <= steps or -1 < trainer.max_epochs <= epochs:
        return True
    return bool(trainer.should_stop) and trainer.min_epochs <= epochs and (trainer.min_steps or 0) <= steps


def _check_trainer(trainer: pl.Trainer) -> None:
    """UsageError: of a Trainer for whom a strategy of one process, in a swarm of others, is not made."""
    searches = any(isinstance(callback, LearningRateFinder | BatchSizeFinder) for callback in trainer.callbacks)
    if searches and trainer.state.fn == "fit":
        raise UsageError(
            "a search for a learning rate or a batch size makes steps that ruin a model, and the other peers would "
            "take part in it: make the search with a Trainer without DLCStrategy"
        )
    for callback in trainer.callbacks:
        if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            raise UsageError(
                f"{type(callback).__name__} would leave each peer with another model, the average of its own steps: "
                "leave it out; rounds average over the peers already"
            )
    devices = getattr(trainer._accelerator_connector, "_devices_flag", "auto")  # no public name tells what was given
    named = devices.strip(",").split(",") if isinstance(devices, str) else devices  # their numbers, or how many
    several = isinstance(named, list | tuple) and len(named) > 1
    if several or (str(devices).isdigit() and int(devices) > 1):
        raise UsageError(
            f"DLCStrategy trains on one device, but the Trainer was given devices={devices!r}: start a process with a "
            "Peer of its own for each device, or let several GPUs be one peer by `torchrun ... -m dlc join`"
        )
