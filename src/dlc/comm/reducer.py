"""The weighted mean of one chunk, as its owner computes it.

Encoded contributions are held as they came until the owner closes the chunk; then they are summed **in roster
order**, so the result does not depend on the order of arrival. A contribution that is late, of the wrong size or
not finite is left out, and the weights of those present are renormalised. Of most codecs one that is not finite shows
in the sum, which is made once more without it then: looking at each contribution would be a fifth of the work.

    x_i: contribution i, decoded to fp32     w_i: its weight     k: how many are present

    1. Scale:   v_i = fp32(w_i / 2^e) with 2^e the least power of two that is not below sum(w_i). Where all
                positive weights are equal they are taken as 1 first, so v_i = 2^-e exactly.
    2. Sum:     a = v_1 * x_1 + ... + v_k * x_k, every product and every sum rounded to fp32. Of a contribution that is
                to be clipped, fp32(v_i * c_i) is taken, with c_i = min(1, median of the plan's norms / its own).
    3. Divide:  a / fp32(sum(v_i)), left out where that sum is 1
    4. Encode once; these bytes are the result for everybody, the owner included. (Of sparse contributions the result
       is the list of them with their factors; see sparsecodec.py.)

Why this form: scaling by a power of two is exact, so weights that are token counts below 2^24 enter without any
rounding (w_i / sum(w_i) would round every one of them), equal weights cost no rounding in the products, and one
contributor alone gets its own elements back bit for bit. sum(v_i) is at most 1 but for rounding, so the sum
overflows only where the mean is within rounding of the largest fp32 number, and is clamped to that. With u = 2^-24,
and underflow left aside, the fp32 mean is within (k + 5) u * mean(|x_i|) of the exact one, both means weighted.

Each step is one IEEE operation per element, without reductions across elements or fused multiply-adds: every host
computes the same bits from the same roster and payloads. The sums of the weights are exact (`fsum`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from dlc.comm import vectors
from dlc.comm.codecs import Payload
from dlc.comm.entries import Part
from dlc.comm.grid import Grid

WEIGHT_MAX = 2.0**53
"""Weights are counts of tokens; beyond this a float64 no longer counts in ones."""

SUM_TELLS_PARTS_MAX = 2048
"""Of fewer contributions, all finite, the mean is finite in the wire type, whatever rounding adds."""

DUPLICATE = "duplicate"
LATE = "late"
NOT_FINITE = "refused: not finite"
WRONG_SIZE = "wrong size"


class Workspace:
    """Buffers for closing or decoding chunks of one grid, one after the other, by one thread.

    Fresh buffers for every chunk are page faults for every chunk: closing then takes up to three times as long.
    """

    def __init__(self, grid: Grid) -> None:
        numel = min(grid.chunk_elems, grid.numel)
        self.acc = vectors.zeros(numel)
        self.scratch = vectors.zeros(numel)


class ChunkReducer:
    """Collects the contributions to one chunk, and closes once.

    The caller looks up the sender's index in the roster, decides when to stop waiting, and keeps a payload unchanged
    from its offer until `close`; nothing is copied before. Holds at most one payload of exactly
    `grid.wire_bytes(chunk)` bytes per member of the roster. `norms`: of the members' whole contributions, by which
    these are clipped; empty for no clipping.
    """

    def __init__(self, grid: Grid, chunk: int, roster: tuple[Part, ...], norms: Sequence[float] = ()) -> None:
        for part in roster:
            if not 0 <= part.weight <= WEIGHT_MAX:
                raise ValueError(f"weight of {part.voter} must be 0 to 2^53, got {part.weight}")
        self.grid = grid
        self.chunk = chunk
        self.roster = roster
        self.norms = norms
        self._numel = grid.elems(chunk)
        self._wire_bytes = grid.wire_bytes(chunk)
        self._held: dict[int, Payload] = {}
        self._refused: dict[int, str] = {}
        self._closed = False

    def offer(self, index: int, payload: Payload) -> str | None:
        """Take the contribution of roster[index]. None: accepted; else the reason why not, and nothing changed but
        `refused`. A refusal is final: a contributor's vector is frozen, so sending again can't mend it. One that is not
        finite may be found out by `close` only.

        IndexError where the roster has no such index.
        """
        if not 0 <= index < len(self.roster):
            raise IndexError(f"index {index} in a roster of {len(self.roster)}")
        if self._closed:
            return LATE
        if index in self._held:
            return DUPLICATE
        if index not in self._refused:
            reason = self._fault(payload)
            if reason is None:
                self._held[index] = payload
                return None
            self._refused[index] = reason
        return self._refused[index]

    def _fault(self, payload: Payload) -> str | None:
        if memoryview(payload).nbytes != self._wire_bytes:
            return WRONG_SIZE
        coder = self.grid.coder
        return None if coder.sum_tells or coder.finite(payload, self._numel) else NOT_FINITE

    def missing(self) -> tuple[int, ...]:
        """Indexes from which nothing has come, in roster order. Those refused are not among them."""
        return tuple(i for i in range(len(self.roster)) if i not in self._held and i not in self._refused)

    @property
    def refused(self) -> dict[int, str]:
        """Index and reason of every contribution that was refused; a duplicate or late one is no refusal."""
        return dict(self._refused)

    @property
    def held_bytes(self) -> int:
        """Memory of the payloads held; 0 once closed."""
        return len(self._held) * self._wire_bytes

    def close(self, workspace: Workspace | None = None) -> tuple[bytes | memoryview, tuple[int, ...]]:
        """The encoded mean of what is held and the roster indexes in it, ascending; `(b"", ())` where the weights
        present sum to 0. Lets go of the contributions. RuntimeError when closed before: an owner emits a chunk once.

        `workspace` is of this grid, and is overwritten; without it buffers are made for this one call.
        """
        if self._closed:
            raise RuntimeError(f"chunk {self.chunk} is closed already")
        self._closed = True
        held, self._held = self._held, {}
        workspace = workspace or Workspace(self.grid)
        if self.grid.coder.sum_tells:
            mean = self._mean(held, workspace, usual=True) if len(held) < SUM_TELLS_PARTS_MAX else None
            if mean is not None:
                return mean
            for i in [i for i, payload in held.items() if not self.grid.coder.finite(payload, self._numel)]:
                self._refused[i] = NOT_FINITE
                del held[i]
        return self._mean(held, workspace) or (b"", ())

    def _mean(
        self, held: Mapping[int, Payload], workspace: Workspace, usual: bool = False
    ) -> tuple[memoryview, tuple[int, ...]] | None:
        """The encoded mean and who is in it. None where no weight is positive, or where it is not as usual."""
        included = tuple(sorted(held))
        weights, divisor = scaled_weights([self.roster[i].weight for i in included])
        if divisor == 0:
            return None
        clip = clip_factors(self.norms or [0.0] * len(self.roster))
        parts = [(held[i], _fp32(w * clip[i])) for i, w in zip(included, weights, strict=True)]
        coder = self.grid.coder
        combine = coder.combine_usual if usual else coder.combine
        payload = combine(parts, divisor, workspace.acc[: self._numel], workspace.scratch)
        return None if payload is None else (payload, included)


def scaled_weights(weights: Sequence[float]) -> tuple[list[float], float]:
    """Steps 1 and 3 of the mean: (v_i, sum of v_i), all of them fp32 numbers; all 0 where no weight is positive."""
    positive = {weight for weight in weights if weight > 0}
    if not positive:
        return [0.0] * len(weights), 0.0
    if len(positive) == 1:
        weights = [1.0 if weight > 0 else 0.0 for weight in weights]
    mantissa, exponent = math.frexp(math.fsum(weights))
    if mantissa == 0.5:  # the sum is a power of two itself
        exponent -= 1
    scaled = [_fp32(math.ldexp(weight, -exponent)) for weight in weights]
    return scaled, _fp32(math.fsum(scaled))


def clip_factors(norms: Sequence[float]) -> list[float]:
    """What each contribution is multiplied by, so that no norm is above the median; 1 for those that told none (0).

    The norms are of whole vectors, so that all chunks of a plan are clipped alike.
    """
    told = [norm for norm in norms if norm > 0]
    median = statistics.median(told) if told else 0.0
    return [min(1.0, median / norm) if norm > 0 else 1.0 for norm in norms]


def _fp32(value: float) -> float:
    return float(np.float32(value))
