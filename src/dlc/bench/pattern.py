"""Vectors whose mean every peer knows, and whether a mean is what a codec may make of it.

    vector of peer i, piece j = f_ij p_j        p: the same random numbers on all peers, of unit variance
    mean of the peers in S    = f_Sj p_j        f_Sj: the mean of their f_ij

f_ij = +-(1 ... 2) follows from the peer's id and the piece, so another set of peers has another mean in most pieces.
What is wrong with a mean shows in e, the difference of a piece from what it must be:

    <e, p> / <p, p>     too much or too little of a vector. Rounding is no part of it but for 1 / sqrt(PIECE_ELEMS).
    rms of e            what is no multiple of the pattern
    greatest of |e|     single numbers
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from dlc.comm.codecs import get_codec

PIECE_ELEMS = 1 << 16
PROBE_ELEMS = 1 << 18
"""What the loss of the codec is measured on: few numbers may by chance be among those that it does not change."""
CERTAIN = 6.0
"""Standard deviations of what a piece's rounding adds up to."""
SPARE = 1.5
"""A codec's loss is that of the probe times this, at most: what it is depends on the numbers."""
LARGEST_SPARE = 3.0
"""The same of the greatest loss, which differs more from one vector to another."""
BIAS = 1 / 8
"""Of the loss, in what it adds to the pattern: means of rounded numbers often lie half-way between two others, and what
these are rounded to has been seen to be one-sided by a tenth."""
ROUNDING = 1e-5
"""Of the numbers: their sums in fp32."""


class Pattern:
    """For vectors of `numel` elements, averaged with that codec. Takes as much memory as one of them."""

    def __init__(self, numel: int, codec: str) -> None:
        self._p = _normal(numel)
        coder, probe = get_codec(codec), _normal(PROBE_ELEMS)
        lost = coder.decode(coder.encode(probe), PROBE_ELEMS).sub_(probe)
        self._rms, self._largest = _rms(lost), lost.abs().max().item()
        """Lost of one vector of unit variance."""
        self._bias = max(abs(_share(lost, probe)), BIAS * self._rms)

    def fill(self, vector: Tensor, peer: str) -> None:
        """The vector of that peer."""
        for piece, p, (factor,) in self._pieces(vector, [peer]):
            torch.mul(p, factor, out=piece)

    def wrong(self, mean: Tensor, peers: Sequence[str]) -> str:
        """What shows that `mean` is not that of these peers; "" if nothing does."""
        for piece, p, factors in self._pieces(mean, peers):
            factor = math.fsum(factors) / len(factors)
            e = torch.add(piece, p, alpha=-factor)
            # Each contribution was encoded, and the mean; what a codec loses is in proportion to the numbers.
            parts, n = [abs(f) / len(factors) for f in factors], len(p)
            sizes = math.fsum(parts) + abs(factor)
            least, rms = ROUNDING * sizes, SPARE * self._rms * math.hypot(*parts, factor)
            share = CERTAIN * rms / (math.sqrt(n) * max(_rms(p), 1e-3)) + SPARE * self._bias * sizes
            largest = LARGEST_SPARE * self._largest * sizes
            for what, found, most in (
                ("part of the vector", abs(_share(e, p)), share),
                ("mean square difference", _rms(e), rms * (1 + CERTAIN / math.sqrt(n))),
                ("greatest difference", e.abs_().max().item(), largest),
            ):
                most += least * max(1.0, p.abs().max().item())
                if not found <= most:
                    return f"{what} {found:.3g} where the codec may lose {most:.3g}"
        return ""

    def _pieces(self, vector: Tensor, peers: Sequence[str]) -> Iterator[tuple[Tensor, Tensor, list[float]]]:
        """Each piece of a vector, what it is made of, and the factors of these peers there."""
        pieces = list(zip(torch.split(vector, PIECE_ELEMS), torch.split(self._p, PIECE_ELEMS), strict=True))
        factors = [_factors(peer, len(pieces)) for peer in peers]
        for j, (piece, p) in enumerate(pieces):
            yield piece, p, [float(own[j]) for own in factors]


def _factors(peer: str, n: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Exact in every codec."""
    drawn = np.frombuffer(blake3(peer.encode()).digest(2 * n), np.uint8).astype(np.float64)
    return (1 + drawn[:n] / 256) * np.where(drawn[n:] < 128, -1, 1)


def _normal(numel: int) -> Tensor:
    """The same numbers on every peer."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(0))


def _rms(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x)) / math.sqrt(len(x))


def _share(e: Tensor, p: Tensor) -> float:
    """How much of p is in e."""
    return float(torch.dot(e, p)) / max(float(torch.dot(p, p)), 1e-9)
