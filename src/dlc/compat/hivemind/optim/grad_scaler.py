"""`GradScaler`: torch's scaler of the loss for gradients that are accumulated over several steps (reuse_grad_buffers).

Between two steps of the whole swarm gradients stay scaled, and the scale stays as it is; it is changed after such a
step, or when an overflow was found. Without reuse_grad_buffers torch's own class does.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.amp.grad_scaler import _refresh_per_optimizer_state

from dlc.errors import UsageError

log = logging.getLogger(__name__)


class GradScaler(TorchGradScaler):
    """Takes the arguments of `torch.amp.GradScaler`; used as that is. With enabled=False it does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lock = threading.RLock()
        self._global = False
        """A step of the whole swarm is made."""
        self._stepped = False
        """One was made, and `update` has not taken note of it since."""
        self._accumulates = False
        """There are gradients of the present scale in a sum."""
        self._finite: dict[int, bool] = {}
        """By optimizer inside: whether the gradients were finite when they were unscaled."""
        self._checked: set[int] = set()

    @contextmanager
    def running_global_step(self) -> Iterator[None]:
        """Inside, gradients are really unscaled and stepped with."""
        with self._lock:
            before, self._global = self._global, True
            try:
                yield
            finally:
                self._global = before

    def unscale_(self, optimizer: torch.optim.Optimizer) -> bool:  # type: ignore[override]  # tells whether it did
        """In a global step: unscale the gradients, True. Otherwise only look for overflows, False."""
        if not self.is_enabled():
            return False
        with self._lock:
            if not self._global:
                self._check_inf_per_device(optimizer)
                self._checked.add(id(optimizer))
                return False
            super().unscale_(optimizer)
            inner = getattr(optimizer, "opt", optimizer)
            self._finite[id(inner)] = not self._infs(optimizer)
            return True

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Of a `hivemind.Optimizer`: accumulate. Of the one inside: step, unless one has overflowed."""
        if hasattr(optimizer, "opt"):
            with self._lock:
                self._checked.add(id(optimizer))
            result = optimizer.step(*args, grad_scaler=self, **kwargs)  # may wait for a step that needs the lock
            self._accumulates = optimizer.accumulates
            return result
        with self._lock:
            if not self._global:
                raise UsageError("hivemind.GradScaler is for hivemind.Optimizer; for others take torch.amp.GradScaler")
            self._stepped = True
            if self._finite.pop(id(optimizer), True):
                return optimizer.step(*args, **kwargs)
            log.warning("a gradient has overflowed: this step of the optimizer is left out")
            return None

    def update(self, new_scale: float | torch.Tensor | None = None) -> bool:  # type: ignore[override]
        """After a global step, or an overflow: set the scale, True. Otherwise False.

        A step that was made in the background counts once the sum begins anew: all of a sum has one scale.
        """
        if not self.is_enabled():
            return False
        with self._lock:
            states = self._per_optimizer_states.values()
            looked = any(state["found_inf_per_device"] for state in states)
            if (looked and self._stepped and not self._accumulates) or any(self._count(state) for state in states):
                super().update(new_scale)
                self._stepped = False
                return True
            for key in self._checked:
                self._per_optimizer_states[key] = _refresh_per_optimizer_state()
            self._checked.clear()
            return False

    def are_grads_finite(self, optimizer: torch.optim.Optimizer, use_cached: bool = False) -> bool:
        """Whether no gradient of the optimizer is NaN or infinite; use_cached: by the last look."""
        if not use_cached:
            self._check_inf_per_device(optimizer)
        return not self._infs(optimizer)

    def _infs(self, optimizer: torch.optim.Optimizer) -> float:
        return self._count(self._per_optimizer_states[id(optimizer)])

    @staticmethod
    def _count(state: dict[str, Any]) -> float:
        return float(sum(found.item() for found in state["found_inf_per_device"].values()))

    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
        """Parameters may be fp16 themselves."""
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)


__all__ = ["GradScaler"]
