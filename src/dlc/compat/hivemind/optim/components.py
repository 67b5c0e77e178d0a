"""Optimizer and schedule, given or made here, on the model's parameters or on copies in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

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
    shown: list[Tensor]
    """What the model was set from, while a step in the background may bring the copies further; else empty."""

    @torch.no_grad()
    def apply(self) -> None:
        """Model <- copies."""
        for main, copy in zip(self.main, self.optimized, strict=True):
            main.copy_(copy)
        self.versions[:] = versions(self.main)
        if self.shown:
            self._show()

    def hold(self) -> None:
        """Before a step in the background: remember what the model was set from, until `release`."""
        if self.main is not self.optimized and not self.shown:
            self._show()

    def release(self) -> None:
        """There is no step in the background any more, and the model is as the copies are."""
        self.shown.clear()

    def _show(self) -> None:
        each = zip(self.main, self.optimized, strict=True)
        self.shown[:] = [copy.detach().to(main.dtype, copy=True) for main, copy in each]

    @property
    def written(self) -> bool:
        """The program has written to the model, whatever it was."""
        return self.main is not self.optimized and self.versions != versions(self.main)

    def changed(self) -> bool:
        """The program has changed values of the model, by a checkpoint, say, or a limit; what it does by way of `.data`
        is not seen. What it wrote without a change is forgotten."""
        if not self.written:
            return False
        if any(where is not None for where in self.changes()):
            return True
        self.versions[:] = versions(self.main)
        return False

    @torch.no_grad()
    def changes(self, whole: bool = False) -> list[Tensor | None]:
        """Of each parameter, where the program has changed it; None: nowhere. whole: all of it, if it wrote there."""
        if self.main is self.optimized:
            return [None] * len(self.main)
        each = zip(self.main, self.shown or self.optimized, self.versions, strict=True)
        return [None if main._version == before else differ(main, shown, whole) for main, shown, before in each]

    @property
    def current(self) -> tuple[Tensor, ...]:
        """The copies, but with values of the model where the program has changed those."""
        each = zip(self.main, self.optimized, self.changes(), strict=True)
        return tuple(copy if where is None else merged(main, copy, where) for main, copy, where in each)

    @torch.no_grad()
    def take(self, changes: Iterable[Tensor | None]) -> None:
        """Copies <- the model, where it was changed."""
        for main, copy, where in zip(self.main, self.optimized, changes, strict=True):
            if where is not None:
                copy.copy_(merged(main, copy, where))

    def take_over(self, whole: bool = False) -> None:
        """Copies <- what the program has changed of the model; whole: as of `changes`."""
        if self.written:
            self.take(self.changes(whole))
            self.versions[:] = versions(self.main)

    @torch.no_grad()
    def load_gradients(self) -> None:
        """Gradients of the copies <- those of the model."""
        for main, copy in zip(self.main, self.optimized, strict=True):
            grad = main.grad  # None: the optimizer leaves it out, whatever the batch before had
            copy.grad = None if grad is None else grad.detach().to(copy.device, copy.dtype, copy=True)

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
    averaged: Sequence[str] = (),
) -> Components:
    """averaged: names of statistics that must be tensors. UsageError: arguments that do not go together."""
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
        held = {param for group in opt.param_groups for param in group["params"]}
        if any(param.requires_grad and param not in held for param in optimized):
            raise UsageError(f"the optimizer that was made holds other parameters than those that it was given: {HOW}")
    if initialize_optimizer is not False:
        initialize(opt, averaged)
    sched = scheduler if isinstance(scheduler, LRScheduler) or scheduler is None else scheduler(opt)
    if sched is not None and sched.optimizer is not opt:
        raise UsageError("the scheduler is of another optimizer")
    if isinstance(sched, ReduceLROnPlateau):
        raise UsageError("a schedule follows the epochs, and ReduceLROnPlateau a metric: step it yourself")
    return Components(opt, sched, main, optimized, versions(main), [])


def versions(params: Iterable[Tensor]) -> list[int]:
    return [param._version for param in params]


def differ(main: Tensor, shown: Tensor, whole: bool = False) -> Tensor | None:
    """Where the values differ, on the device of `shown`; None: nowhere. NaN is the same as itself here."""
    now = main.detach().to(shown.device)
    if whole:
        return torch.ones_like(now, dtype=torch.bool)
    then = shown.to(now.dtype)
    where = (now != then) & ~(now.isnan() & then.isnan())
    return where if where.any() else None


@torch.no_grad()
def merged(main: Tensor, copy: Tensor, where: Tensor) -> Tensor:
    return torch.where(where, main.to(copy.device, copy.dtype), copy)


def steps_of(scheduler: Any) -> int:
    """How often it was stepped, its making included."""
    if count := getattr(scheduler, "_step_count", 0):  # stays at 0 where a class steps in its own way
        return int(count)
    if hasattr(scheduler, "last_epoch"):
        return int(scheduler.last_epoch) + 1
    return steps_of(scheduler._schedulers[0])  # all that are chained are stepped together


def _groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    if isinstance(params, Tensor):  # which is an iterable, too: of its rows
        raise UsageError("params is one tensor: give a list of the parameters, or groups of them")
    given = list(params)
    if all(isinstance(param, Tensor) for param in given):
        given = [{"params": given}]
    each = [(group, group["params"]) for group in given]
    return [{**group, "params": [many] if isinstance(many, Tensor) else list(many)} for group, many in each]


def _host_copy(param: Tensor) -> Tensor:
    copy = param.detach().to("cpu", torch.float32, copy=True).requires_grad_(param.requires_grad)
    copy.grad = torch.zeros_like(copy)
    return copy


__all__ = ["Components", "build", "differ", "merged", "steps_of", "versions"]
