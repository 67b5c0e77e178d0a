"""Where the inner steps of a model began, and how far they have come, as flat fp32 vectors.

    base    theta of the swarm, as it was when the inner steps began: lent by the outer state (`outer.Lent`)
    start   what the parameters held then: base as their dtype rounds it, less what a rebase kept
    d       start - local: the pseudo-gradient

base takes no memory of its own before theta moves on without us. Who makes no step while d is on its way has no use
for it once a round counts d: it may be spent, and theta then moves where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from dlc.comm import vectors
from dlc.errors import DlcError
from dlc.flat import FlatView
from dlc.train.outer import Lent, OuterState, pseudo_gradient


class Origin:
    """Used from one thread. Holds 4 bytes per parameter where these have fewer bits than fp32."""

    def __init__(self, view: FlatView, state: OuterState) -> None:
        self._view, self._state = view, state
        self._exact = all(t.dtype == torch.float32 for t in view.tensors)
        self._lent: Lent | None = None
        self._rounded = None if self._exact else view.gather(vectors.empty(view.numel))
        """start, where it is not base."""

    @property
    def _loan(self) -> Lent:
        if self._lent is None:
            raise DlcError("the channel is not open yet")
        return self._lent

    @property
    def base(self) -> Tensor:
        """To be read only."""
        return self._loan.theta

    @property
    def _start(self) -> Tensor:
        return self.base if self._rounded is None else self._rounded

    def rounded(self) -> Tensor | None:
        """A copy of start; None where it is base. Parameters of fewer bits than fp32 did not hold base, and from what
        they held a rebase, and fragments, keep d."""
        return self._rounded.clone() if self._rounded is not None else None

    def set_rounded(self, start: Tensor) -> None:
        """Take back what `rounded` gave."""
        if self._rounded is not None:
            self._rounded.copy_(start)

    def renew(self) -> None:
        """base := theta."""
        self._lent = self._state.lend()

    def spend(self, by: Callable[[], bool]) -> None:
        """base is of no more use once theta moves while `by()` holds; see `Lent.spend`."""
        self._loan.spend(by)

    def reclaim(self) -> bool:
        """base is of use again. False: it is gone."""
        return self._loan.reclaim()

    def load(self) -> None:
        """Set the parameters to base."""
        self._view.scatter(self.base)
        if self._rounded is not None:
            self._view.gather(self._rounded)

    def measure(self, out: Tensor) -> Tensor:
        """out <- d."""
        return pseudo_gradient(self._start, self._view.gather(out), out=out)

    @property
    def device(self) -> torch.device:
        """Where the parameters are; see `FlatView.device`."""
        return self._view.device

    def parts(self, elems: int, device: torch.device) -> Iterator[Tensor]:
        """d in parts of `elems` elements on `device`, without memory for the whole: that of one part is used again for
        the next."""
        start, at = self._start, 0
        for local in self._view.parts(elems, device):
            yield pseudo_gradient(start[at : at + local.numel()].to(device), local, out=local)
            at += local.numel()

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
        return self._view.gather(vectors.empty(self._view.numel))

    def scatter(self, local: Tensor) -> Tensor:
        """Set the parameters to `local`, which then holds what they do: the same but for rounding."""
        self._view.scatter(local)
        return local if self._exact else self._view.gather(local)
