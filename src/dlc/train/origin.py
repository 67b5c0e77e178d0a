"""Where the inner steps of a model began, and how far they have come, as flat fp32 vectors.

    base    theta of the swarm, as it was when the inner steps began
    start   what the parameters held then: base as their dtype rounds it, less what a rebase kept
    d       start - local: the pseudo-gradient

Who makes no step while d is on its way needs no base meanwhile: it may be spent, d then has its memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlc.errors import UsageError
from dlc.flat import FlatView
from dlc.train.outer import pseudo_gradient


class Origin:
    """Used from one thread. Holds 4 bytes per parameter; twice as many where these have fewer bits than fp32."""

    def __init__(self, view: FlatView) -> None:
        self._view = view
        self._exact = all(t.dtype == torch.float32 for t in view.tensors)
        base = view.gather(torch.empty(view.numel, dtype=torch.float32))
        self._base: Tensor | None = base
        self._rounded = None if self._exact else base.clone()
        """start, where it is not base."""
        self.spendable = self._exact and type(view) is FlatView
        """Whether `spend` can be called."""

    @property
    def base(self) -> Tensor:
        if self._base is None:
            raise UsageError("inner steps were made while a contribution was on its way without overlap: wait for it")
        return self._base

    @property
    def spent(self) -> bool:
        """There is no base, until `renew` or `recover`."""
        return self._base is None

    def spend(self) -> Tensor:
        """d, in the memory of base."""
        d, self._base = self._view.subtract_from(self.base), None
        return d

    def renew(self, vector: Tensor) -> None:
        """Memory for a base, to be filled."""
        self._base = vector

    def recover(self, d: Tensor) -> None:
        """base as it was when d was measured; no step was made since."""
        self._base = self._view.gather(torch.empty_like(d)).add_(d)

    def load(self) -> None:
        """Set the parameters to base."""
        self._view.scatter(self.base)
        if self._rounded is not None:
            self._view.gather(self._rounded)

    def measure(self, out: Tensor) -> Tensor:
        """out <- d."""
        start = self.base if self._rounded is None else self._rounded
        return pseudo_gradient(start, self._view.gather(out), out=out)

    def place(self, d: Tensor) -> None:
        """Set the parameters to base - d, so that d is what `measure` gives. d is overwritten where they are fp32."""
        self._view.scatter(torch.sub(self.base, d, out=d if self._rounded is None else self._rounded))
        if self._rounded is not None:
            self._view.gather(self._rounded).add_(d)

    def show(self) -> None:
        """Set the parameters to base for a while: `scatter` what `gather` gave before it ends."""
        self._view.scatter(self.base)

    def gather(self) -> Tensor:
        """The parameters, in memory of their own."""
        return self._view.gather(torch.empty(self._view.numel))

    def scatter(self, local: Tensor) -> Tensor:
        """Set the parameters to `local`, which then holds what they do: the same but for rounding."""
        self._view.scatter(local)
        return local if self._exact else self._view.gather(local)
