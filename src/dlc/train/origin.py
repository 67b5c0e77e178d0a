"""Where the inner steps of a model began, and how far they have come, as flat fp32 vectors.

base    theta of the swarm, as it was when the inner steps began
start   what the parameters held then: base as their dtype rounds it, less what a rebase kept
d       start - local: the pseudo-gradient
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlc.flat import FlatView
from dlc.train.outer import pseudo_gradient


class Origin:
    """Used from one thread. Holds 4 bytes per parameter; twice as many where these have fewer bits than fp32."""

    def __init__(self, view: FlatView) -> None:
        self._view = view
        self.base = view.gather(torch.empty(view.numel, dtype=torch.float32))
        self._exact = all(t.dtype == torch.float32 for t in view.tensors)
        self._start: Tensor = self.base if self._exact else self.base.clone()

    def load(self) -> None:
        """Set the parameters to base."""
        self._view.scatter(self.base)
        if not self._exact:
            self._view.gather(self._start)

    def measure(self, out: Tensor) -> Tensor:
        """out <- d."""
        return pseudo_gradient(self._start, self._view.gather(out), out=out)

    def place(self, d: Tensor) -> None:
        """Set the parameters to base - d, so that d is what `measure` gives. d is overwritten where they are fp32."""
        self._view.scatter(torch.sub(self.base, d, out=d if self._exact else self._start))
        if not self._exact:
            self._view.gather(self._start).add_(d)

    def gather(self) -> Tensor:
        """The parameters, in memory of their own."""
        return self._view.gather(torch.empty_like(self.base))

    def scatter(self, local: Tensor) -> Tensor:
        """Set the parameters to `local`, which then holds what they do: the same but for rounding."""
        self._view.scatter(local)
        return local if self._exact else self._view.gather(local)
