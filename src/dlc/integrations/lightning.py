"""`DLCStrategy`: DiLoCo for Lightning, as the strategy of its Trainer.

    peer = dlc.Peer.join(peers=["host:port"], key="run.key")
    trainer = lightning.Trainer(strategy=DLCStrategy(peer, sync_every=500))
    trainer.fit(model, data)
    peer.leave()

Each peer is a Trainer of its own on one device. Each `sync_every`-th step of the optimizer (not micro-batch: gradient
accumulation is one step) is followed by a round, whose numbers (round/peers, round/seconds, ...) go to the Trainer's
loggers. When `fit` has ended the model is the swarm's; checkpoints that Lightning writes between two rounds hold this
peer's own. `fit(ckpt_path=...)` brings back the moments of the optimizer and the counters; where the swarm lives on,
the parameters are the swarm's.
"""

from __future__ import annotations

try:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import SingleDeviceStrategy
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}: pip install 'dlc[lightning]'", name=error.name) from error

import torch

from dlc.errors import UsageError
from dlc.integrations.rounds import metrics
from dlc.report import RoundReport
from dlc.runspec import OuterSpec
from dlc.train.diloco import DiLoCo
from dlc.train.outer_loop import Hook
from dlc.train.swarm import TrainPeer

_NESTEROV = OuterSpec()


class DLCStrategy(SingleDeviceStrategy):  # type: ignore[misc]  # lightning is not read by mypy
    """Trains the module together with all peers of the channel; arguments are those of `dlc.DiLoCo`.

    device: None takes the first one of the Trainer's accelerator.
    weight: of one optimizer step in the mean of a round: its samples, or 1 where all peers use equal batches.

    UsageError: the module has more than one optimizer. What `dlc.DiLoCo.step` raises comes out of `trainer.fit`.
    """

    strategy_name = "dlc"

    def __init__(
        self,
        peer: TrainPeer,
        sync_every: int = 500,
        *,
        outer: OuterSpec = _NESTEROV,
        codec: str = "fp16",
        chunk_elems: int = 0,
        channel: str = "train",
        overlap: str = "none",
        weight: float = 1.0,
        pseudo_gradient_hook: Hook | None = None,
        patience_s: float = 0.0,
        timeout_s: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(device=device or "cpu")
        self._device_is_open = device is None
        self._peer, self._sync_every, self._weight = peer, sync_every, weight
        self._outer, self._codec, self._chunk_elems = outer, codec, chunk_elems
        self._channel, self._overlap, self._timeout_s = channel, overlap, timeout_s
        self._hook, self._patience_s = pseudo_gradient_hook, patience_s
        self._diloco: DiLoCo | None = None
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
        super().setup_environment()

    def setup(self, trainer: pl.Trainer) -> None:
        """Keep the Trainer, whose loggers take the rounds."""
        self._trainer = trainer
        super().setup(trainer)

    def on_train_start(self) -> None:
        """The module is on its device and the checkpoint loaded: take the swarm's parameters, and follow the steps."""
        super().on_train_start()
        if len(self.optimizers) != 1:
            raise UsageError(f"DLCStrategy needs a module with one optimizer, not {len(self.optimizers)}")
        self._diloco = DiLoCo(
            self.lightning_module,
            self.optimizers[0],
            self._peer,
            self._sync_every,
            outer=self._outer,
            codec=self._codec,
            chunk_elems=self._chunk_elems,
            channel=self._channel,
            overlap=self._overlap,
            weight=self._weight,
            pseudo_gradient_hook=self._hook,
            patience_s=self._patience_s,
            timeout_s=self._timeout_s,
        )
        self._diloco.follow()

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        """Log the round that the batch before may have ended with."""
        super().on_train_batch_start(batch, batch_idx)
        self._log_round()

    def on_train_end(self) -> None:
        """Bring the last steps to the others, and leave the module at the swarm's parameters."""
        super().on_train_end()
        self.diloco.finish()
        self._log_round()

    def teardown(self) -> None:
        """Also after an exception: later steps of the optimizer are its own."""
        if self._diloco is not None:
            self._diloco.unfollow()
        super().teardown()

    def _log_round(self) -> None:
        report = self.diloco.last_report
        if report is None or report is self._logged or self._trainer is None:
            return
        self._logged = report
        for logger in self._trainer.loggers:
            logger.log_metrics(metrics(report), step=self._trainer.global_step)
