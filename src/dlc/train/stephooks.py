"""The steps that somebody else makes with an optimizer: a Trainer, or a wrapper of a framework.

optimizer.step()  ──> before() ──> its step ──> after(), unless a GradScaler had it skip that one
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def skipped(inner: torch.optim.Optimizer) -> bool:
    """In a hook of its step: whether a GradScaler has it skip this one. With `fused=True` its kernel does that, so the
    step is made all the same. Waits for the device, as a GradScaler does with other optimizers."""
    return bool(getattr(inner, "found_inf", False))


class StepHooks:
    """Calls `before` and `after` around each step of `inner`, until `remove`. What they raise comes out of it."""

    def __init__(self, inner: torch.optim.Optimizer, before: Callable[[], object], after: Callable[[], object]) -> None:
        self._inner, self._before, self._after = inner, before, after
        self._begun = False
        """A step that is not told yet: where a class of optimizers calls the `step` of its base, torch calls the hooks
        of both for one step."""
        self._handles = (inner.register_step_pre_hook(self._begins), inner.register_step_post_hook(self._ends))

    def _begins(self, *_: object) -> None:
        self._begun = True
        self._before()

    def _ends(self, *_: object) -> None:
        counts, self._begun = self._begun and not skipped(self._inner), False
        if counts:
            self._after()

    def remove(self) -> None:
        """Nobody is told of the steps that follow."""
        for handle in self._handles:
            handle.remove()
