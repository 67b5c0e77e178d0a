"""`DiLoCoCallback`: DiLoCo for `transformers.Trainer`, by one more line.

    peer = dlc.Peer.join(peers=["host:port"], key="run.key")
    trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[DiLoCoCallback(peer, sync_every=500)])
    trainer.train()
    peer.leave()

The Trainer trains as ever. Each `sync_every`-th optimizer step (not micro-batch: gradient accumulation is one step) is
followed by a round, and when training ends the model is the swarm's. The numbers of a round (round/peers,
round/seconds, ...) are added to the Trainer's next log. The Trainer calls the reporters of `report_to` before any other
callback; to have the rounds in them too, name them behind this one: `callbacks=[DiLoCoCallback(...),
TensorBoardCallback()]` with `report_to="none"`.

A checkpoint of the Trainer holds the model, and `resume_from_checkpoint` the moments of its optimizer. Where the swarm
lives on, a peer that resumes starts from the swarm's parameters; the first peer of a new run makes its own the swarm's.
`save_steps` should be a multiple of `sync_every`: between two rounds a model is this peer's own. What int8 and int4 owe
is not in it, so a resumed peer loses the rounding of one contribution.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from dlc.errors import UsageError
from dlc.integrations.rounds import metrics
from dlc.report import RoundReport
from dlc.runspec import OuterSpec
from dlc.train.diloco import DiLoCo
from dlc.train.outer_loop import Hook
from dlc.train.swarm import TrainPeer

log = logging.getLogger(__name__)

_NESTEROV = OuterSpec()


class DiLoCoCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not read by mypy
    """Trains the Trainer's model together with all peers of the channel; arguments are those of `dlc.DiLoCo`.

    weight: of one optimizer step in the mean of a round; None: its sequences, so that larger batches count more.

    One process per peer: UsageError under torchrun, FSDP or DeepSpeed. What `dlc.DiLoCo.step` raises comes out of
    `trainer.train()`.
    """

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
        weight: float | None = None,
        pseudo_gradient_hook: Hook | None = None,
        patience_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> None:
        self._peer, self._sync_every, self._weight = peer, sync_every, weight
        self._outer, self._codec, self._chunk_elems = outer, codec, chunk_elems
        self._channel, self._overlap, self._timeout_s = channel, overlap, timeout_s
        self._hook, self._patience_s = pseudo_gradient_hook, patience_s
        self._diloco: DiLoCo | None = None
        self._running = False
        self._logged: RoundReport | None = None
        """The last round that is in the Trainer's logs."""

    @property
    def diloco(self) -> DiLoCo:
        """Of the present or the last training; UsageError before the first."""
        if self._diloco is None:
            raise UsageError("there is no DiLoCo before trainer.train()")
        return self._diloco

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **of_trainer: Any
    ) -> None:
        """The model is on its device and the checkpoint loaded: take the swarm's parameters, and follow the steps."""
        if args.world_size > 1:
            raise UsageError(
                f"DiLoCoCallback needs a process of its own for each peer, but this Trainer has {args.world_size}: "
                "start each without torchrun, with a Peer of its own"
            )
        model: nn.Module = of_trainer["model"]
        optimizer = of_trainer["optimizer"]
        sequences = args.train_batch_size * args.gradient_accumulation_steps
        if self._diloco is not None:
            self._diloco.unfollow()  # a training before this one ended by an exception
        self._diloco = DiLoCo(
            model,
            getattr(optimizer, "optimizer", optimizer),  # accelerate wraps the one that makes the steps
            self._peer,
            self._sync_every,
            outer=self._outer,
            codec=self._codec,
            chunk_elems=self._chunk_elems,
            channel=self._channel,
            overlap=self._overlap,
            weight=float(sequences) if self._weight is None else self._weight,
            pseudo_gradient_hook=self._hook,
            patience_s=self._patience_s,
            timeout_s=self._timeout_s,
        )
        self._diloco.follow()
        self._running = True

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **of_trainer: Any
    ) -> None:
        """At the last step: before the Trainer evaluates and saves the model for the last time."""
        if control.should_training_stop:
            self._finish()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **of_trainer: Any
    ) -> None:
        """As `on_step_end`, where an evaluation, or the end of the data, stops the training."""
        if control.should_training_stop:
            self._finish()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **of_trainer: Any
    ) -> None:
        """As `on_step_end`, where nothing had said that the end would come; a best model that was loaded stays."""
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self._running = False
            self.diloco.unfollow()
        self._finish()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **of_trainer: Any,
    ) -> None:
        """Add the last round, once, to a log of the training; those of evaluations stay as they are."""
        report = self._diloco.last_report if self._diloco is not None else None
        if report is None or report is self._logged or logs is None or not {"loss", "train_loss"} & logs.keys():
            return
        self._logged = report
        numbers = metrics(report)
        logs.update(numbers)
        state.log_history[-1].update(numbers)  # a copy of `logs`

    def _finish(self) -> None:
        if self._running:
            self._running = False
            report = self.diloco.finish()
            log.info("training ended; %s", report.summary() if report else "nothing was left to exchange")
