"""The inner loop: what one peer does between two rounds.

One step of the global schedule is one call of `InnerLoop.train_step`: forward and backward over the micro-batches
(gradient accumulation), clip the norm, set the learning rate of that step, one optimizer step.

The learning rate is a pure function of the global step, so that a newcomer that loads state at step 40 000 is at once
on the same schedule. The optimizer's own state (Adam's moments) is local: it is not averaged and not sent.

A step whose gradient is not finite is not applied, as it would spoil Adam's moments for good: `StepResult.applied` says
so.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlc.errors import CheckpointError, ConfigError, UsageError

OPTIMIZERS = ("adamw", "sgd")
PRECISIONS = ("auto", "fp32", "bf16")


@dataclass(frozen=True)
class StepResult:
    """What one inner step did."""

    loss: float
    """Mean over the predicted tokens of all micro-batches, in nats."""
    tokens: int
    """Tokens of all micro-batches: the unit of weights, goals and tokens/s."""
    grad_norm: float
    """Before clipping."""
    applied: bool = True
    """False: the gradient was not finite and the parameters are unchanged."""


def learning_rate(step: int, peak: float, warmup_steps: int, total_steps: int, min_ratio: float) -> float:
    """Linear warm-up to `peak` over steps 0 ... warmup_steps - 1, cosine down to `min_ratio * peak` at total_steps.

    Step 0 has a rate above zero; after total_steps the rate stays at its floor. total_steps 0: no cosine, the rate
    stays at `peak` after the warm-up.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if total_steps <= 0:
        return peak
    if step >= total_steps:
        return peak * min_ratio
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    return peak * (min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress)))


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters in two groups: matrices decay; vectors and scalars (norms, biases) do not."""
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return [g for g in groups if g["params"]]


def build_optimizer(
    name: str, model: nn.Module, *, lr: float, betas: tuple[float, float], weight_decay: float
) -> torch.optim.Optimizer:
    """The inner optimizer by name: "adamw", or "sgd" (plain: no momentum, `betas` unused)."""
    groups = param_groups(model, weight_decay)
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=lr, betas=betas)
    if name == "sgd":
        return torch.optim.SGD(groups, lr=lr)
    raise ConfigError(f"unknown inner optimizer {name!r}; choose one of {', '.join(OPTIMIZERS)}")


class InnerLoop:
    """Trains `model` with `optimizer`, one global step a call. The model stays on `device` once it is moved here.

    model:      a transformers causal LM, or any module that maps ids [b, s] to logits [b, s, vocab].
    schedule:   global step -> learning rate; None keeps the optimizer's own.
    clip_norm:  greatest gradient norm; 0 for no clipping.
    precision:  "auto" is bf16 autocast on CUDA and fp32 elsewhere; "fp32" and "bf16" hold on any device.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Callable[[int], float] | None = None,
        clip_norm: float = 0.0,
        device: torch.device | str = "cpu",
        precision: str = "auto",
    ) -> None:
        if precision not in PRECISIONS:
            raise ConfigError(f"unknown precision {precision!r}; choose one of {', '.join(PRECISIONS)}")
        self.device = torch.device(device)
        self.model = model.to(self.device)
        self.optimizer = optimizer
        self._schedule = schedule
        self._clip_norm = clip_norm if clip_norm > 0 else math.inf
        self._autocast = precision == "bf16" or (precision == "auto" and self.device.type == "cuda")
        self._params = [p for group in optimizer.param_groups for p in group["params"]]

    def train_step(self, batches: Sequence[Tensor], step: int) -> StepResult:
        """One optimizer step over all micro-batches (int64 [b, s] each, s >= 2), as if they were one batch."""
        targets = sum(_targets(ids) for ids in batches)
        if not targets:
            raise UsageError("a training step needs at least one batch of blocks of two tokens or more")
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.device)
        for ids in batches:
            with self._precision():
                loss = causal_loss(self.model, ids.to(self.device, non_blocking=True))
            loss = loss * (_targets(ids) / targets)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        norm = float(nn.utils.clip_grad_norm_(self._params, self._clip_norm))
        applied = math.isfinite(norm)
        if applied:
            if self._schedule is not None:
                for group in self.optimizer.param_groups:
                    group["lr"] = self._schedule(step)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(float(total), sum(ids.numel() for ids in batches), norm, applied)

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        if self._autocast:
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()

    def tensors(self) -> dict[str, Tensor]:
        """The optimizer's state as named tensors, to be saved before the next step changes them."""
        state = self.optimizer.state_dict()["state"]
        return {f"{i}.{name}": v for i, entry in state.items() for name, v in entry.items() if isinstance(v, Tensor)}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take back what `tensors` gave; CheckpointError where it belongs to other parameters."""
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            index, _, name = key.partition(".")
            if not index.isdecimal() or int(index) >= len(self._params):
                raise CheckpointError(f"the optimizer state {key!r} belongs to another model")
            if value.dim() and value.shape != self._params[int(index)].shape:
                raise CheckpointError(f"the optimizer state {key!r} has shape {tuple(value.shape)} of another model")
            state.setdefault(int(index), {})[name] = value.clone()  # the optimizer writes into what it is given
        self.optimizer.load_state_dict({"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]})


def causal_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Mean next-token cross-entropy of ids [b, s] in nats, over b * (s - 1) targets.

    A model with `labels` in its signature works its own loss out (and adds what it adds, such as a router's loss).
    """
    if _takes_labels(model):
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        return loss
    return _cross_entropy(model(ids), ids, "mean")


def evaluate(model: nn.Module, batches: Sequence[Tensor], device: torch.device | str | None = None) -> float:
    """Mean next-token loss in nats per token over all batches, without autocast; the same each time.

    The model's training flag is put back. `device`: where the model lies; found from its parameters if not given.
    """
    targets = sum(_targets(ids) for ids in batches)
    if not targets:
        raise UsageError("evaluation needs at least one batch of blocks of two tokens or more")
    where = torch.device(device) if device is not None else next(model.parameters()).device
    was_training = model.training
    model.eval()
    total = 0.0
    try:
        with torch.no_grad():
            for ids in batches:
                moved = ids.to(where)
                output = model(input_ids=moved) if _takes_labels(model) else model(moved)
                total += float(_cross_entropy(output, moved, "sum"))
    finally:
        model.train(was_training)
    return total / targets


def _cross_entropy(output: Any, ids: Tensor, reduction: str) -> Tensor:
    logits: Tensor = getattr(output, "logits", output)
    vocab = logits.shape[-1]
    return F.cross_entropy(logits[:, :-1].float().reshape(-1, vocab), ids[:, 1:].reshape(-1), reduction=reduction)


def _targets(ids: Tensor) -> int:
    """Tokens of a batch that are predicted: all but the first of each block."""
    return ids.shape[0] * (ids.shape[1] - 1)


def _takes_labels(model: nn.Module) -> bool:
    inner: Any = model
    while hasattr(inner, "_orig_mod") or isinstance(inner, nn.parallel.DistributedDataParallel):
        inner = inner._orig_mod if hasattr(inner, "_orig_mod") else inner.module
    parameters = inspect.signature(inner.forward).parameters
    return "labels" in parameters and "input_ids" in parameters
