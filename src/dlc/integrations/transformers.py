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

A checkpoint of the Trainer holds the model and the moments of its optimizer, and beside them, in `dlc.safetensors`,
what the swarm had: outer parameters and momentum, the log of the run, and what int8, int4 or topk still owe. A whole
swarm that was stopped goes on from there:

    state = saved_state("out/checkpoint-500")
    peer = dlc.Peer.join(found=True, resume=dlc.Resume.of(state), state_dir="peer")
    trainer = Trainer(..., callbacks=[DiLoCoCallback(peer, sync_every=500, resume=state)])
    trainer.train(resume_from_checkpoint="out/checkpoint-500")

Without `resume=` the file is looked for in the checkpoint itself: at `args.resume_from_checkpoint`, and where this
Trainer would have written it. Where the swarm lives on, a peer that resumes starts from the swarm's parameters, and the
steps between its last round and the checkpoint are lost; with `save_steps` a multiple of `sync_every` there are none.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from dlc.errors import UsageError
from dlc.integrations import saved
from dlc.integrations.options import check_options, takes_options
from dlc.integrations.rounds import metrics
from dlc.report import RoundReport
from dlc.train.diloco import DiLoCo
from dlc.train.stephooks import skipped
from dlc.train.swarm import TrainPeer

log = logging.getLogger(__name__)


def saved_state(checkpoint: str | Path) -> dict[str, Any]:
    """What a checkpoint of the Trainer, a folder, holds of the swarm: for `dlc.Resume.of`, and for `resume=`.

    UsageError: nothing, because it was saved without a DiLoCoCallback. CheckpointError: it is damaged.
    """
    return saved.demand(saved.read(Path(checkpoint)), checkpoint)


@takes_options
class DiLoCoCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not read by mypy
    """Trains the Trainer's model together with all peers of the channel; `options` are the keywords of `dlc.DiLoCo`.

    weight: of one optimizer step in the mean of a round; None: the sequences that it trained, so that larger batches
    count more: at the end of the data a step may have fewer. That is read from the Trainer's DataLoader. Where the
    length of its data is not known, or `get_train_dataloader` is your own and does not prepare it, a last batch counts
    as a whole one; where its batches have no one size, each counts as args say, and the log says so.

    Without `resume=`, which takes what `saved_state` gave, it looks into the checkpoint from which the Trainer resumes.
    One process per peer: UsageError under torchrun, FSDP or DeepSpeed. UsageError also with `auto_find_batch_size`: it
    would begin the training anew in the middle of the run. TypeError: `dlc.DiLoCo` has no such keyword.
    What `dlc.DiLoCo` and its `step` raise comes out of `trainer.train()`. Where anything else ends that by an exception
    and the process goes on without training, call `callback.diloco.unfollow()`, or the others' rounds wait for it.
    """

    def __init__(self, peer: TrainPeer, sync_every: int = 500, *, weight: float | None = None, **options: Any) -> None:
        check_options("DiLoCoCallback", options)
        self._peer, self._sync_every, self._weight, self._options = peer, sync_every, weight, options
        self._diloco: DiLoCo | None = None
        self._running = False
        self._batches = self._sequences = 0
        """Micro-batches since the last optimizer step, and the sequences of those that the next one trains."""
        self._unweighed = False
        """No step was made since these were counted."""
        self._size = self._lacking = 0
        """Sequences of a micro-batch, and how many fewer the last one of the data has."""
        self._trained: deque[int] = deque(maxlen=sync_every)
        """Sequences of the steps before."""
        self._hook: RemovableHandle | None = None
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
        if args.deepspeed:
            raise UsageError(
                "DeepSpeed keeps parameters of its own, which a round would not change: train without it, or let "
                "several GPUs be one peer by `torchrun ... -m dlc join`"
            )
        if args.auto_find_batch_size:
            raise UsageError(
                "auto_find_batch_size=True begins a training anew where memory is full, which a peer of a run cannot: "
                "leave it out, and give a per_device_train_batch_size that fits"
            )
        model: nn.Module = of_trainer["model"]
        optimizer = of_trainer["optimizer"]
        inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps that
        if self._diloco is not None:
            self._unfollow(self._diloco)  # a training before this one ended by an exception
        self._size, self._lacking = self._sizes(args, of_trainer.get("train_dataloader"))
        self._batches, self._sequences = 0, self._size * args.gradient_accumulation_steps
        self._trained.clear()
        weight = float(self._sequences) if self._weight is None else self._weight
        self._diloco = saved.follow(
            model,
            inner,
            self._peer,
            self._sync_every,
            self._found(args, state, model),
            {**self._options, "weight": weight},
        )
        if self._weight is None:
            self._hook = inner.register_step_pre_hook(self._weigh)
        self._running = True

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **of_trainer: Any
    ) -> None:
        """A micro-batch after which no step is made."""
        self._batches += 1

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **of_trainer: Any
    ) -> None:
        """Count the sequences of the step to come."""
        progress = getattr(of_trainer["optimizer"], "gradient_state", None)  # accelerate's, of the data
        over = progress is not None and progress.end_of_dataloader
        self._sequences = (self._batches + 1) * self._size - (self._lacking if over else 0)
        self._batches, self._unweighed = 0, True

    def _sizes(self, args: TrainingArguments, loader: Any) -> tuple[int, int]:
        """Sequences of a batch of the loader, which may be another one than the Trainer's own, and how many fewer its
        last one has."""
        batches = getattr(loader, "batch_sampler", None)
        size = getattr(batches, "batch_size", None)
        if isinstance(size, int):
            drops = getattr(batches, "drop_last", args.dataloader_drop_last)
            return size, 0 if drops else -(_length(batches, "sampler") or _length(loader, "dataset")) % size
        if self._weight is None:
            log.warning(
                "the batches of the training's DataLoader have no one size that it tells: each counts as %d sequences "
                "(per_device_train_batch_size) in the mean of a round; give weight= if peers have others",
                args.train_batch_size,
            )
        return args.train_batch_size, 0

    def _weigh(self, *_: object) -> None:
        """Before a step that is made: its round weighs a step as the mean of those that it will have counted. Torch may
        call it twice for one: see `DiLoCo`."""
        unweighed, self._unweighed = self._unweighed, False
        if not unweighed or skipped(self.diloco.inner):
            return
        before = self.diloco.inner_step
        period = [*self._trained][-before:] if before else []
        self._trained.append(self._sequences)
        self.diloco.weight = (sum(period) + self._sequences) / (len(period) + 1)

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

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **of_trainer: Any
    ) -> None:
        """As `on_step_end`, where EarlyStoppingCallback, before this one in the list, stops the training: the Trainer
        saves next."""
        if control.should_training_stop:
            self._finish()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **of_trainer: Any
    ) -> None:
        """As `on_step_end`, where nothing had said that the end would come; a best model that was loaded stays."""
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            if self._running and (lost := self.diloco.inner_step):
                log.warning("the last %d steps are in no round: a best model was loaded before their offer", lost)
            self._running = False
            self._unfollow(self.diloco)
        self._finish()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **of_trainer: Any) -> None:
        """Write what the swarm had into the checkpoint that was just written, unless that holds the model only."""
        folder = _folder(args, state)
        if args.save_only_model or self._diloco is None:
            return
        if not folder.is_dir():
            log.warning("there is no checkpoint at %s, so the outer state is not saved", folder)
        elif (kept := saved.state_of(self._diloco)) is not None:
            saved.write(folder, kept, of_trainer["model"])

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

    def _found(self, args: TrainingArguments, state: TrainerState, model: nn.Module) -> dict[str, Any] | None:
        """The state beside the checkpoint from which the Trainer has resumed; None: it has not, or there is none."""
        if not state.global_step or self._options.get("resume") is not None:
            return None
        for folder in _folders(args, state):
            found = saved.read(folder, model)
            if found is not None:
                return found
        log.warning(
            "no outer state was found in %s: give resume=saved_state(checkpoint), if a whole swarm is started again",
            " or ".join(map(str, _folders(args, state))),
        )
        return None

    def _unfollow(self, diloco: DiLoCo) -> None:
        diloco.unfollow()
        self._unhook()

    def _unhook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _finish(self) -> None:
        if self._running:
            self._running = False
            self._unhook()
            report = self.diloco.finish()  # until which the others' rounds wait for this peer
            log.info("training ended; %s", report.summary() if report else "nothing was left to exchange")


def _length(of: Any, name: str) -> int:
    """Of the data, or the indices, that something reads; 0: that is not known."""
    try:
        return len(getattr(of, name))
    except (AttributeError, TypeError):
        return 0


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    """Where the Trainer writes its checkpoint of this step, but in a search of hyper-parameters."""
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def _folders(args: TrainingArguments, state: TrainerState) -> Iterator[Path]:
    """Where the checkpoint may lie from which it has resumed: callbacks are not told."""
    if isinstance(args.resume_from_checkpoint, str):
        yield Path(args.resume_from_checkpoint)
    yield _folder(args, state)
