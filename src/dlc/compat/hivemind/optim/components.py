"""Optimizer and schedule, given or made here, on the model's parameters or on copies in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dlc.compat.hivemind.optim.optimizer_state import initialize
from dlc.errors import UsageError

HOW = (
    "give params=model.parameters() and optimizer=lambda params: ..., or an optimizer that was made already, "
    "without offloading and delays"
)


@dataclass(frozen=True)
class Components:
    """What a training state is made of."""

    optimizer: Optimizer
    scheduler: LRScheduler | None
    main: tuple[Tensor, ...]
    """Parameters of the model."""
    optimized: tuple[Tensor, ...]
    """Parameters of the optimizer: the same, or copies of them."""
    versions: list[int]
    """Of the parameters of the model, when they were last equal to the copies."""

    @torch.no_grad()
    def apply(self) -> None:
        """Model <- copies."""
        for main, copy in zip(self.main, self.optimized, strict=True):
            main.copy_(copy)
        self.versions[:] = _versions(self.main)

    @property
    def changed(self) -> bool:
        """The program has changed the model, by a checkpoint, say; what it does by way of `.data` is not seen."""
        return self.main is not self.optimized and self.versions != _versions(self.main)

    @torch.no_grad()
    def take_over(self) -> None:
        """Copies <- what the program has changed of the model."""
        if self.changed:
            for main, copy, before in zip(self.main, self.optimized, self.versions, strict=True):
                if main._version != before:
                    copy.copy_(main)
            self.versions[:] = _versions(self.main)

    @torch.no_grad()
    def load_gradients(self) -> None:
        """Gradients of the copies <- those of the model."""
        for main, copy in zip(self.main, self.optimized, strict=True):
            if main.grad is not None:
                copy.grad = main.grad.detach().to(copy.device, copy.dtype, copy=True)

    @torch.no_grad()
    def zero_main_gradients(self, set_to_none: bool) -> None:
        for main in self.main:
            if set_to_none:
                main.grad = None
            elif main.grad is not None:
                main.grad.zero_()


def build(
    optimizer: Optimizer | Callable[..., Optimizer],
    params: Iterable[Any] | None,
    scheduler: LRScheduler | Callable[..., LRScheduler] | None,
    initialize_optimizer: bool | None,
    offload: bool,
) -> Components:
    """UsageError: arguments that do not go together."""
    made_here = not isinstance(optimizer, Optimizer)
    if made_here and (not callable(optimizer) or params is None):
        raise UsageError(f"an optimizer is made of params: {HOW}")
    if offload and not made_here:
        raise UsageError(f"only an optimizer that is made here can be offloaded: {HOW}")
    if made_here and isinstance(scheduler, LRScheduler):
        raise UsageError("the optimizer is made here, so the scheduler must be, too: give a callable of the optimizer")
    groups = _groups(params if params is not None else optimizer.param_groups)  # type: ignore[union-attr]
    main = tuple(param for group in groups for param in group["params"])
    if len(set(main)) != len(main):
        raise UsageError("a parameter stands in params twice")
    optimized = tuple(_host_copy(param) for param in main) if offload else main
    if isinstance(optimizer, Optimizer):
        opt = optimizer
    else:
        rest = iter(optimized)
        opt = optimizer([{**group, "params": [next(rest) for _ in group["params"]]} for group in groups])
    if initialize_optimizer or (initialize_optimizer is None and not opt.state):
        initialize(opt)
    sched = scheduler if isinstance(scheduler, LRScheduler) or scheduler is None else scheduler(opt)
    if sched is not None and sched.optimizer is not opt:
        raise UsageError("the scheduler is of another optimizer")
    return Components(opt, sched, main, optimized, _versions(main))


def _versions(params: Iterable[Tensor]) -> list[int]:
    return [param._version for param in params]


def _groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    given = list(params)
    if all(isinstance(param, Tensor) for param in given):
        given = [{"params": given}]
    return [{**group, "params": list(group["params"])} for group in given]


def _host_copy(param: Tensor) -> Tensor:
    copy = param.detach().to("cpu", torch.float32, copy=True).requires_grad_(param.requires_grad)
    copy.grad = torch.zeros_like(copy)
    return copy


__all__ = ["Components", "build"]
