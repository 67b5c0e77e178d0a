"""How far apart vectors of millions of elements are, from a kilobyte each: a random projection that all peers share.

    s = S x,  S in {-1, 0, 1}^(k x n), one sign per column:    s_j = sum over i with i mod k = j of sign_i x_i

The signs are drawn from a seed, so every peer uses the same S, and S is linear: for two vectors x and y,
E ||S x - S y||^2 = ||x - y||^2, with a relative standard deviation of about sqrt(2 / k) (count sketch; Charikar, Chen,
Farach-Colton 2002). Over several peers the errors of the pairs average out in part.

To draw a sign for each element would take ten times as long as all the rest. So a slice has a stretch of one row of
signs, from a place that is drawn for it, all of them turned over or not: any two signs are still independent, as the
expected value asks.

`distance` is the consensus distance: the root of the mean over peers of ||x_i - mean||^2. `Trail` tells it where each
peer has heard of the others' vectors at other steps than its own newest.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dlc.comm import vectors

SKETCH_ELEMS = 256
SLICE_ELEMS = 1 << 20
"""Elements that a slice has; a multiple of SKETCH_ELEMS."""
TRAIL_STEPS = 64
"""How many of its own sketches a peer keeps, of a kilobyte each: who told one of an older step is not compared."""


@functools.lru_cache(maxsize=2)
def _row(seed: int) -> Tensor:
    """Signs, fp32: a stretch of SLICE_ELEMS begins at each of the first SLICE_ELEMS."""
    with torch.inference_mode(False):
        drawn = torch.randint(0, 2, (2 * SLICE_ELEMS,), generator=torch.Generator().manual_seed(seed), device="cpu")
        return drawn.float().mul_(2.0).sub_(1.0)


def sketch(x: Tensor, seed: int = 0) -> Tensor:
    """The projection of a fp32 CPU vector: SKETCH_ELEMS fp32 elements."""
    row, generator = _row(seed), torch.Generator().manual_seed(seed + 1)
    total = torch.zeros(SKETCH_ELEMS, dtype=torch.float64, device="cpu")
    work = vectors.empty(min(SLICE_ELEMS, x.numel()))
    for start in range(0, x.numel(), SLICE_ELEMS):
        part = x[start : start + SLICE_ELEMS]
        place, turned = torch.randint(0, SLICE_ELEMS, (2,), generator=generator, device="cpu").tolist()
        signed = torch.mul(part, row[place : place + part.numel()], out=work[: part.numel()])
        if turned % 2:
            signed.neg_()
        rows = signed.numel() // SKETCH_ELEMS
        total += signed[: rows * SKETCH_ELEMS].view(rows, SKETCH_ELEMS).sum(0, dtype=torch.float64)
        rest = signed[rows * SKETCH_ELEMS :]
        total[: rest.numel()] += rest
    return total.float()


def distance(sketches: Sequence[Tensor]) -> float:
    """Consensus distance of the vectors behind these sketches; 0 for fewer than two."""
    if len(sketches) < 2:
        return 0.0
    stack = torch.stack([s.double() for s in sketches])
    return math.sqrt(float((stack - stack.mean(0)).square().sum(1).mean()))


def to_bytes(s: Tensor) -> bytes:
    """Little-endian fp32."""
    return bytes(s.float().contiguous().numpy().astype("<f4").tobytes())


def from_bytes(raw: bytes) -> Tensor | None:
    """None where it is no sketch."""
    if len(raw) != 4 * SKETCH_ELEMS:
        return None
    found = torch.frombuffer(bytearray(raw), dtype=torch.float32).clone()
    return found if bool(torch.isfinite(found).all()) else None


class Trail:
    """One peer's sketches of its newest steps.

    What another told is of the step that it told last. Beside this peer's newest vector it would be apart by all that
    was done since, however well the two agree. So each is compared with what this peer had at that step (or last before
    it, where it passed the step over), and the distance is that of these differences, this peer's own being zero. Where
    all told the same step, that is the consensus distance at that step.
    """

    def __init__(self) -> None:
        self._own: deque[tuple[int, Tensor]] = deque(maxlen=TRAIL_STEPS)

    def add(self, t: int, mine: Tensor) -> None:
        """`mine` is the sketch of this peer's vector at step `t`, which is not below those before."""
        self._own.append((t, mine))

    def distance(self, others: Iterable[tuple[int, Tensor | None]]) -> float | None:
        """Of this peer and others, each with the step that it told and its sketch, if it told one. 0 where there are no
        others; None where there are, and none can be compared."""
        told = list(others)
        apart = [
            theirs.double() - mine.double()
            for t, theirs in told
            if theirs is not None and (mine := self._at(t)) is not None
        ]
        return distance([torch.zeros(SKETCH_ELEMS, device="cpu"), *apart]) if apart or not told else None

    def _at(self, t: int) -> Tensor | None:
        return next((mine for step, mine in reversed(self._own) if step <= t), None)
