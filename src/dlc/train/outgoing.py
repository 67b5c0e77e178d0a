"""What is sent of a pseudo-gradient: what the caller's hook makes of it, and what encoding lost of those before it.

A `hook` may change what is offered of d (mask it, clip it, add noise), never d itself: all of d counts as delivered.
With a codec that asks for it (`Codec.feedback`), what is offered is that and what encoding lost of earlier offers; see
`feedback`. d itself is as before: that residual is no part of the model, and settles with the round that counted it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from dlc.comm.encoded import Encoded, part_elems
from dlc.comm.grid import Grid
from dlc.errors import UsageError
from dlc.flat import CPU, finite
from dlc.train.feedback import Feedback
from dlc.train.offers import NotFinite, norm_of

NOT_FINITE = "the inner steps ended in values that are not finite; the swarm's model was loaded again"

Hook = Callable[[Tensor], Tensor]
"""From d (fp32, 1-D, on the CPU; a copy, which it may change) to what is offered in its place, of the same form."""


class Outgoing:
    """For one channel. `clips`: rounds are told the norm of what is sent. Used from one thread."""

    def __init__(self, grid: Grid, vectors: int, hook: Hook | None, clips: bool) -> None:
        """`vectors`: of how many, in turn, the rounds of the channel are."""
        self.grid = grid
        """What contributions are cut and encoded in."""
        self._hook, self._clips = hook, clips
        self._feedback = Feedback(grid, vectors) if grid.coder.feedback else None

    # ---------------------------------------------------------------- the residual

    @property
    def residual(self) -> Tensor | None:
        """What encoding lost of the contributions so far; None: the codec needs none. The next round changes it."""
        return self._feedback.residual if self._feedback is not None else None

    def load_residual(self, residual: Tensor | None) -> None:
        """Take back what `residual` gave; None is zero, and a codec without feedback has no use for any.

        CheckpointError: it is of another model, or not finite.
        """
        if self._feedback is not None:
            self._feedback.load(residual)

    def check_residual(self, residual: Tensor | None) -> None:
        """Raise what `load_residual` would."""
        if self._feedback is not None and residual is not None:
            self._feedback.check(residual)

    # ---------------------------------------------------------------- what is sent

    def hooked(self, d: Tensor) -> Tensor:
        """What is offered of d, before the residual is added; d itself without a hook.

        UsageError: the hook made nothing of it that can be offered.
        """
        if self._hook is None:
            return d
        given = d.clone()
        made = self._hook(given)
        if not isinstance(made, Tensor) or made.dtype != d.dtype or made.shape != d.shape or made.device != d.device:
            what = f"{made.dtype} {list(made.shape)} on {made.device}" if isinstance(made, Tensor) else repr(made)
            raise UsageError(f"the pseudo_gradient_hook must return float32 [{d.numel()}] on the CPU, not {what}")
        made = made.detach()
        if not finite(made):
            raise UsageError("the pseudo_gradient_hook returned NaN or Inf; nothing was offered")
        if made.data_ptr() != given.data_ptr():
            made = made.clone()  # memory of the hook's own, which may write there while this is on its way
        return made.contiguous()

    def whole(self, hooked: Tensor, vector: int) -> tuple[Tensor, float]:
        """What is sent of the channel's vector of that number, and its norm: the vector itself, or that and the
        residual in memory of their own."""
        sent = hooked if self._feedback is None else self._feedback.added((hooked,), vector)
        return sent, norm_of(sent) if self._clips else 0.0

    def announced(self) -> Encoded | None:
        """What `streamed` will give, before it has values. None: its norm, or what encoding loses, is told with it."""
        return Encoded(self.grid) if self._feedback is None and not self._clips else None

    def cut(self, device: torch.device) -> tuple[int, torch.device]:
        """How `streamed` is best given a vector of parameters on `device`: the elements of a part, and where it is.
        The residual is on the host, and so is what it is added to."""
        where = device if self._feedback is None else CPU
        return part_elems(self.grid, where), where

    def streamed(self, parts: Iterable[Tensor], announced: Encoded | None = None) -> tuple[Tensor | Encoded, float]:
        """The same of a vector that comes part by part, and does not stay: in memory of its own, or in `announced`.

        NotFinite: a part holds NaN or Inf.
        """
        norms: list[float] = []
        seen = self._seen(parts, norms)
        if self._feedback is not None:
            sent = self._feedback.added(seen)
            return sent, norm_of(sent) if self._clips else 0.0
        encoded = announced if announced is not None else Encoded(self.grid)
        encoded.fill(seen)
        return encoded, math.sqrt(math.fsum(n * n for n in norms))

    def _seen(self, parts: Iterable[Tensor], norms: list[float]) -> Iterator[Tensor]:
        """The same, each found to be finite; with their norms, where these are told."""
        for part in parts:
            if not finite(part):
                raise NotFinite(NOT_FINITE)
            if self._clips:
                norms.append(norm_of(part))
            yield part

    def over(self, sent: Tensor | Encoded, included: Sequence[bool] = (), vector: int = 0) -> None:
        """It will not be sent any more, and these chunks of a round have it in them; none where no round counted it."""
        if self._feedback is not None and isinstance(sent, Tensor):
            self._feedback.over(sent, included, vector)
