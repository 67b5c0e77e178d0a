"""Error feedback: what encoding lost of one contribution is added to the next (EF-SGD, arXiv:1901.09847).

    e       the residual of this peer, fp32, zero at first
    v       d + c e: what is offered in place of the pseudo-gradient d; c is 1, or the codec's `carry`
    Q(v)    what the owners decode of it

Once a round counted v, e := v - Q(v) in every chunk whose mean has this peer in it. So what was delivered in T rounds
is the sum of the d of these rounds, but for the last residual, which is at most half a quantisation step (where c is 1:
otherwise what stays behind for long fades away). A chunk that
was left out keeps its e as it was; its d is lost, as with any codec. An offer that was not counted changes nothing.

What the owners clip off v (`outer.clip`) is no part of that, and is not offered again.

The residual is this peer's own: not averaged and not sent, but part of its checkpoint. With int8 and int4 one that is
lost, or older than what this peer sent last (a crash, then an older checkpoint), costs one rounding. With topk, whose
residual is most of a contribution, the old one offers again what was sent since, and it fades by `carry` a round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dlc.comm import vectors
from dlc.comm.grid import Grid
from dlc.errors import CheckpointError


class Feedback:
    """The residual of one channel, for a codec with `feedback`: `parts` of them, one after another, where its rounds
    average so many vectors in turn. Used from one thread."""

    def __init__(self, grid: Grid, parts: int = 1) -> None:
        self._grid = grid
        self._scratch = vectors.empty(min(grid.chunk_elems, grid.numel))
        self._spare: Tensor | None = None
        """Memory for v, while none is offered."""
        self.residual = vectors.zeros(parts * grid.numel)
        """e: changed by `over` and `load` only."""

    def added(self, pieces: Iterable[Tensor], part: int = 0) -> Tensor:
        """v = d + c e, in memory that is the caller's until `over`. `pieces`: d, one after the other; each is done with
        when the next is asked for."""
        v = self._spare if self._spare is not None else vectors.empty(self._grid.numel)
        residual, at = self._residual_of(part), 0
        for d in pieces:
            span = slice(at, at + d.numel())
            torch.add(d, residual[span], alpha=self._grid.coder.carry, out=v[span])
            at = span.stop
        self._spare = None
        return v

    def over(self, v: Tensor, included: Sequence[bool] = (), part: int = 0) -> None:
        """v will not be sent any more. `included`: of each chunk of a round that counted it, whether its mean has v in
        it; empty where no round did, and nothing changes."""
        coder, residual = self._grid.coder, self._residual_of(part)
        for chunk, is_in in enumerate(included):
            if is_in:
                start, stop = self._grid.span(chunk)
                offered = v[start:stop]
                sent = coder.decode(coder.encode(offered, self._scratch), stop - start)
                torch.sub(offered, sent, out=residual[start:stop])
        self._spare = v

    def _residual_of(self, part: int) -> Tensor:
        return self.residual[part * self._grid.numel : (part + 1) * self._grid.numel]

    def load(self, residual: Tensor | None) -> None:
        """Go on from a saved residual (copied), or from zero where there is none.

        CheckpointError, with nothing changed, where it is of another model or not finite.
        """
        if residual is None:
            self.residual.zero_()
            return
        self.check(residual)
        self.residual.copy_(residual)

    def check(self, residual: Tensor) -> None:
        """CheckpointError where a saved residual is of another model or not finite."""
        if residual.dtype != torch.float32 or residual.shape != self.residual.shape:
            raise CheckpointError(
                f"the saved residual is {residual.dtype} {tuple(residual.shape)}, "
                f"this model needs float32 ({self.residual.numel()},): it belongs to another model"
            )
        if not bool(torch.isfinite(residual).all()):
            raise CheckpointError("the saved residual holds NaN or Inf: every contribution would be refused")
