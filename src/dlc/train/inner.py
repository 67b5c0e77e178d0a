"""The inner loop: what one peer does between two rounds.

One step of the global schedule is one call of `InnerLoop.train_step`: forward and backward over the micro-batches
(gradient accumulation), clip the norm, set the learning rate of that step, one optimizer step.

The learning rate is a pure function of the global step, so that a newcomer that loads state at step 40 000 is at once
on the same schedule. The optimizer's own state (Adam's moments) is local: it is not averaged and not sent.

A step whose gradient is not finite is not applied, as it would spoil Adam's moments for good: `StepResult.applied` says
so. With fp16 the loss is scaled up so that small gradients are not lost, by as much as fits, and now and then by more:
the same batches are then gone through again with half the scale, so that no step counts for more than it did.

On CUDA a step waits for the device once, for loss and gradient norm together, before the optimizer's own work is
queued: that and the first kernels of the next step overlap with Python.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlc.errors import CheckpointError, ConfigError, UsageError, first_line
from dlc.runspec import OPTIMIZERS, PRECISIONS
from dlc.train.muon import muon_and_adamw

SCALE_MIN = 1.0
"""Of the loss in fp16. Where even this overflows, nothing is wrong with the scale: the training diverges."""

_SCALER = {"scaler.scale": "scale", "scaler.growth_tracker": "_growth_tracker"}
"""Names in a checkpoint, and GradScaler's own."""


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

    @property
    def diverged(self) -> bool:
        """The loss or the gradient was not finite."""
        return not math.isfinite(self.loss) or not self.applied


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
    name: str,
    model: nn.Module,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    momentum: float = 0.95,
    fused: bool = False,
) -> torch.optim.Optimizer:
    """The inner optimizer by name: "adamw", "muon" (see `muon`), or "sgd" (plain: no momentum, `betas` unused).

    `momentum`: Muon's. `fused`: AdamW as one kernel; the model must be on a CUDA device then.
    """
    groups = param_groups(model, weight_decay)
    match name:
        case "adamw":
            return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=fused or None)
        case "muon":
            return muon_and_adamw(
                model, groups, lr=lr, betas=betas, momentum=momentum, weight_decay=weight_decay, fused=fused
            )
        case "sgd":
            return torch.optim.SGD(groups, lr=lr)
        case _:
            raise ConfigError(f"unknown inner optimizer {name!r}; choose one of {', '.join(OPTIMIZERS)}")


class InnerLoop:
    """Trains `model` with `optimizer`, one global step a call. The model stays on `device` once it is moved here.

    model:      a transformers causal LM, or any module that maps ids [b, s] to logits [b, s, vocab].
    schedule:   global step -> learning rate; None keeps the optimizer's own.
    clip_norm:  greatest gradient norm; 0 for no clipping.
    precision:  "auto" is bf16 autocast on CUDA and fp32 elsewhere; "fp32", "bf16" and "fp16" hold on any device.
    compiled:   run the training steps through torch.compile. ConfigError: this host cannot.
    forward:    what training steps call in place of `model`, such as the same model in DDP.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Callable[[int], float] | None = None,
        clip_norm: float = 0.0,
        device: torch.device | str = "cpu",
        precision: str = "auto",
        compiled: bool = False,
        forward: nn.Module | None = None,
    ) -> None:
        if precision not in PRECISIONS:
            raise ConfigError(f"unknown precision {precision!r}; choose one of {', '.join(PRECISIONS)}")
        self.device = torch.device(device)
        self.model = model.to(self.device)
        self.optimizer = optimizer
        self._schedule = schedule
        self._clip_norm = clip_norm if clip_norm > 0 else math.inf
        self._autocast = autocast_dtype(precision, self.device)
        self._scaler = torch.amp.GradScaler(self.device.type) if self._autocast == torch.float16 else None
        forward = self.model if forward is None else forward
        self._forward: Callable[..., Any] = _compiled(forward, self.device) if compiled else forward
        self._params = [p for group in optimizer.param_groups for p in group["params"]]

    def train_step(self, batches: Sequence[Tensor], step: int) -> StepResult:
        """One optimizer step over all micro-batches (int64 [b, s] each, s >= 2), as if they were one batch."""
        targets = sum(_targets(ids) for ids in batches)
        if not targets:
            raise UsageError("a training step needs at least one batch of blocks of two tokens or more")
        return self.weighted_step([(ids, _targets(ids) / targets) for ids in batches], step)

    def weighted_step(self, parts: Sequence[tuple[Tensor, float]], step: int) -> StepResult:
        """One optimizer step on the sum over all micro-batches of weight times mean loss."""
        result = self._try(parts, step)
        while not result.applied and self._lower_scale() and math.isfinite(result.loss):
            result = self._try(parts, step)
        return result

    def _try(self, parts: Sequence[tuple[Tensor, float]], step: int) -> StepResult:
        total = self._backward(parts)
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        norm = self._clipped()
        mean, grad_norm = self._agreed(torch.stack((total, norm.to(total)))).tolist()  # the one wait for the device
        applied = math.isfinite(grad_norm)
        if applied:
            if self._schedule is not None:
                for group in self.optimizer.param_groups:
                    group["lr"] = self._schedule(step)
            self.optimizer.step()
            if self._scaler is not None:
                self._scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(mean, sum(ids.numel() for ids, _ in parts), grad_norm, applied)

    def gradient(self, batches: Sequence[Tensor], at_last: Callable[[Tensor], None] | None = None) -> float:
        """Leave the gradient of the mean loss over all micro-batches in the parameters' `grad`; no step.

        `at_last` is called before the last backward, with that mean loss.
        Returns the mean loss in nats, which may not be finite. Not for fp16, whose own scale is not taken out.
        """
        targets = sum(_targets(ids) for ids in batches)
        if not targets:
            raise UsageError("a gradient needs at least one batch of blocks of two tokens or more")
        return float(self._backward([(ids, _targets(ids) / targets) for ids in batches], at_last))

    def _backward(
        self, parts: Sequence[tuple[Tensor, float]], at_last: Callable[[Tensor], None] | None = None
    ) -> Tensor:
        """Fresh gradients of the sum over all micro-batches of weight times mean loss, which is returned."""
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        moved = [(self._moved(ids), weight) for ids, weight in parts]
        for i, (ids, weight) in enumerate(moved, 1):
            with self._meanwhile(i == len(moved)):
                with self._precision():
                    loss = causal_loss(self._forward, ids)
                loss = loss * weight
                if at_last is not None and i == len(moved):
                    at_last(total + loss.detach())
                scaled = loss if self._scaler is None else self._scaler.scale(loss)
                scaled.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    def _meanwhile(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Around forward and backward of a micro-batch, the last of the step or not: nothing, but for a site."""
        return contextlib.nullcontext()

    def _clipped(self) -> Tensor:
        """Clip the gradients; returns their norm before."""
        return nn.utils.clip_grad_norm_(self._params, self._clip_norm)

    def _agreed(self, values: Tensor) -> Tensor:
        """Loss and gradient norm of this step, [2]: with a site, those of all its ranks."""
        return values

    def _moved(self, ids: Tensor) -> Tensor:
        """On the device, without waiting: a copy from memory that is not pinned waits for all work before it."""
        return (ids.pin_memory() if self.device.type == "cuda" else ids).to(self.device, non_blocking=True)

    def _lower_scale(self) -> bool:
        """Halve fp16's loss scale, which was too large. False: it is at its least, or there is none.

        By what all ranks of a site agree on, and not by what each found in its own part of the gradient.
        """
        if self._scaler is None:
            return False
        before = self._scaler.get_scale()
        self._scaler.update(max(SCALE_MIN, before * self._scaler.get_backoff_factor()))
        self._scaler.load_state_dict(self._scaler.state_dict() | {"_growth_tracker": 0})  # which this `update` keeps
        return before > SCALE_MIN

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        if self._autocast is not None:
            # A cache would keep all weights in 16 bits until the loss is there, though each is of use in one layer.
            return torch.autocast(self.device.type, dtype=self._autocast, cache_enabled=False)
        return contextlib.nullcontext()

    def tensors(self) -> dict[str, Tensor]:
        """The optimizer's state as named tensors, to be saved before the next step changes them; with fp16 also the
        loss scale."""
        state = self.optimizer.state_dict()["state"]
        named = {f"{i}.{name}": v for i, entry in state.items() for name, v in entry.items() if isinstance(v, Tensor)}
        if self._scaler is not None:
            scaler = self._scaler.state_dict()
            values = {key: float(scaler[field]) for key, field in _SCALER.items()}
            named |= {k: torch.tensor(v, dtype=torch.float32, device="cpu") for k, v in values.items()}
        return named

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take back what `tensors` gave; CheckpointError where it belongs to other parameters."""
        self.take(tensors.items())

    def take(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """The same of tensors that come one after the other; each is done with when the next is asked for."""
        scaler: dict[str, Tensor] = {}
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in named:
            if key in _SCALER:
                scaler[_SCALER[key]] = value
                continue
            index, _, name = key.partition(".")
            if not index.isdecimal() or int(index) >= len(self._params):
                raise CheckpointError(f"the optimizer state {key!r} belongs to another model")
            if value.dim() and value.shape != self._params[int(index)].shape:
                raise CheckpointError(f"the optimizer state {key!r} has shape {tuple(value.shape)} of another model")
            state.setdefault(int(index), {})[name] = self._placed(value, self._params[int(index)])
        self.optimizer.load_state_dict({"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]})
        if scaler and self._scaler is not None:
            values = {"scale": float(scaler["scale"]), "_growth_tracker": int(scaler["_growth_tracker"])}
            self._scaler.load_state_dict(self._scaler.state_dict() | values)

    def _placed(self, value: Tensor, like: Tensor) -> Tensor:
        """Of a checkpoint, for the state of parameter `like`: a copy, since the optimizer writes into it."""
        return placed(value, like)


def placed(value: Tensor, like: Tensor) -> Tensor:
    """A copy where `like` is, without one on the host before; where a number belongs, the optimizer knows."""
    return value.to(like.device, copy=True) if value.dim() else value.clone()


def autocast_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """What matrix products are computed in; None: in fp32, without autocast."""
    if precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else None
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)


def _compiled(model: nn.Module, device: torch.device) -> Callable[..., Any]:
    """The model through torch.compile, after a try that finds out whether this host has what it takes.

    Only for training: evaluation goes through the model itself, and stays comparable between hosts.
    """
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.ones(2, device=device))
    except Exception as error:  # dynamo, inductor, triton and compilers raise many kinds
        reason = first_line(error)
        raise ConfigError(
            f"inner.compile is on, but torch.compile does not work on this host ({reason}): install a C++ compiler and "
            "the headers of Python (triton too for CUDA), or set inner.compile = false for the run"
        ) from error
    compiled: Callable[..., Any] = torch.compile(model)
    return compiled


def causal_loss(model: Callable[..., Any], ids: Tensor) -> Tensor:
    """Mean next-token cross-entropy of ids [b, s] in nats, over b * (s - 1) targets.

    A model with `labels` in its signature works its own loss out (and adds what it adds, such as a router's loss).
    """
    if _takes_labels(model):
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        return loss
    return _cross_entropy(model(ids), ids, "mean")


def evaluate(
    model: nn.Module,
    batches: Sequence[Tensor],
    device: torch.device | str | None = None,
    after: Callable[[int], object] = lambda blocks: None,
) -> float:
    """Mean next-token loss in nats per token over all batches, without autocast; the same each time.

    The model's training flag is put back. `device`: where the model lies; found from its parameters if not given.
    `after`: told how many blocks are done, after each batch.
    """
    targets = sum(_targets(ids) for ids in batches)
    if not targets:
        raise UsageError("evaluation needs at least one batch of blocks of two tokens or more")
    where = torch.device(device) if device is not None else next(model.parameters()).device
    was_training = model.training
    model.eval()
    total, done = 0.0, 0
    try:
        with torch.no_grad():
            for ids in batches:
                moved = ids.to(where)
                output = model(input_ids=moved) if _takes_labels(model) else model(moved)
                total += float(_cross_entropy(output, moved, "sum"))
                done += len(ids)
                after(done)
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


def _takes_labels(model: Callable[..., Any]) -> bool:
    inner: Any = model
    while hasattr(inner, "_orig_mod") or isinstance(inner, nn.parallel.DistributedDataParallel):
        inner = inner._orig_mod if hasattr(inner, "_orig_mod") else inner.module
    parameters = inspect.signature(inner.forward).parameters
    return "labels" in parameters and "input_ids" in parameters
