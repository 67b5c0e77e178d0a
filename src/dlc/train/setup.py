"""From a RunSpec to the parts of an inner loop, on the device of this host."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import nn

from dlc.errors import UsageError
from dlc.runspec import RunSpec
from dlc.train.inner import InnerLoop, build_optimizer, learning_rate
from dlc.train.model import build_model


def model_of(spec: RunSpec) -> nn.Module:
    """The network that the run trains, with the founder's seed."""
    return build_model(Path(spec.model.path) if spec.model.kind == "path" else spec.model.config, spec.seed)


def inner_loop_of(spec: RunSpec, model: nn.Module, device: torch.device) -> InnerLoop:
    """The inner loop of the run, with a fresh optimizer; moves the model to the device."""
    inner = spec.inner
    optimizer = build_optimizer(inner.optimizer, model, lr=inner.lr, betas=inner.betas, weight_decay=inner.weight_decay)
    schedule = partial(
        learning_rate,
        peak=inner.lr,
        warmup_steps=inner.warmup_steps,
        total_steps=spec.horizon_steps,
        min_ratio=inner.min_lr_ratio,
    )
    return InnerLoop(model, optimizer, schedule, inner.clip_norm, device, spec.precision)


def pick_device(name: str) -> torch.device:
    """The device by name; "auto" is CUDA where there is one, else the CPU. UsageError if torch cannot use it."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # a torch without CUDA asserts
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(f"the device {name!r} cannot be used ({reason}); choose auto, cpu or cuda") from None
    return device
