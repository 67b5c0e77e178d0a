"""The replicated state of data-parallel training: theta, the moments of one AdamW or SGD, and the step that all take.

    g <- mean gradient of all peers, over their tokens
    g <- g min(1, clip / (|g| + 1e-6))                                   as torch.nn.utils.clip_grad_norm_
    theta <- theta (1 - lr decay)             matrices only              AdamW (arXiv:1711.05101); the same with SGD
    theta, moments <- step(theta, moments, g)                            see `outer_step`

It is an `OuterState` whose rounds are steps, so a newcomer gets the moments too, checkpoints and exports are the same,
and digests are compared at every step. That needs the same bits everywhere: the norm, too, is summed in an order that
no processor chooses, by adding halves elementwise.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dlc.comm import vectors
from dlc.comm.grid import USUAL_ELEMS_MAX, usual_chunk_elems
from dlc.runspec import InnerSpec, OuterSpec, RunSpec
from dlc.train.outer import OuterState
from dlc.train.outer_step import fp32, outer_lr

NORM_EPS = 1e-6
"""As torch has it."""
NORM_ELEMENTS_MAX = 1 << 17
"""Squared at a time: 512 KiB, which stays in a core's second-level cache."""
STEP_CHUNKS = 32
"""Enough that sending, reducing and sending back overlap: what does not is the time of one or two of them."""
ADAM_EPS = 1e-8
"""As torch.optim.AdamW has it."""


def step_chunk_elems(numel: int, codec: str) -> int:
    """Elements per chunk where the run does not say: a power of two.

    Larger than for rounds after many steps: what a chunk costs every peer in work of its own comes with every step.
    """
    some = 1 << (max(1, numel // STEP_CHUNKS) - 1).bit_length()
    return max(usual_chunk_elems(numel, codec), min(some, USUAL_ELEMS_MAX))


def joint_spec(spec: RunSpec) -> OuterSpec:
    """The run's inner optimizer and schedule as those of a replicated state, a round being a step."""
    inner, total = spec.inner, spec.horizon_steps
    plain = OuterSpec(optimizer="sgd")
    rule = OuterSpec(optimizer="adam", betas=inner.betas, eps=ADAM_EPS) if inner.optimizer == "adamw" else plain
    return dataclasses.replace(
        rule,
        lr=inner.lr,
        schedule="cosine" if total else "constant",
        warmup_rounds=inner.warmup_steps,
        total_rounds=max(total, inner.warmup_steps),
        min_lr_ratio=inner.min_lr_ratio,
    )


class JointState(OuterState):
    """theta: the parameters, fp32, 1-D, in the order of `tensors`, of which those of two dimensions and more decay."""

    def __init__(self, theta: Tensor, tensors: Sequence[Tensor], spec: OuterSpec, inner: InnerSpec) -> None:
        super().__init__(theta, spec)
        self._decay = inner.weight_decay
        self._clip = inner.clip_norm or math.inf
        self._decayed = _spans([(t.numel(), t.dim() > 1) for t in tensors])
        self._g = torch.empty_like(self._theta)
        """The mean gradient of a step: its norm is known only when all of it is there."""
        self.norm = 0.0
        """Of the last mean gradient, before clipping."""

    def step(self, t: int, means: Iterable[tuple[int, int, Tensor | None]]) -> None:
        held: list[tuple[int, int, Tensor | None]] = []
        squares = Squares()
        for start, stop, mean in means:
            if mean is None:
                held.append((start, stop, None))
                continue
            g = self._g[start:stop].copy_(mean)
            squares.add(g)
            held.append((start, stop, g))
        self.norm = math.sqrt(squares.total())
        scale = self._clip / (self.norm + NORM_EPS)
        if scale < 1.0:
            self._g.mul_(fp32(scale))
        super().step(t, held)

    def _step_range(self, t: int, lr: float, start: int, stop: int, mean: Tensor) -> None:
        if self._decay:
            kept = fp32(1.0 - lr * self._decay)
            for a, b in self._decayed:
                a, b = max(a, start), min(b, stop)
                if a < b:
                    self._theta[a:b].mul_(kept)
        super()._step_range(t, lr, start, stop, mean)

    def lr(self, t: int) -> float:
        """Learning rate of step t, the first being 1."""
        return outer_lr(self.spec, t)


class Squares:
    """The sum of squares of fp32 vectors, equal in bits wherever it is summed."""

    def __init__(self) -> None:
        self._squares = vectors.empty(NORM_ELEMENTS_MAX)
        self._total = 0.0

    def add(self, vector: Tensor) -> None:
        """At most `NORM_ELEMENTS_MAX` at a time in float32, and these sums in float64."""
        for a in range(0, len(vector), NORM_ELEMENTS_MAX):
            part = vector[a : a + NORM_ELEMENTS_MAX]
            total = _folded(torch.mul(part, part, out=self._squares[: len(part)]))
            if not math.isfinite(total):  # the squares overflow
                wide = part.double()
                total = _folded(wide.mul_(wide))
            self._total = self._total + total

    def total(self) -> float:
        return self._total


def _folded(values: Tensor) -> float:
    """Their sum, by adding one half to the other elementwise, again and again; `values` is overwritten."""
    while len(values) > 1:
        half = len(values) // 2
        rest = values[2 * half :]
        values = values[:half].add_(values[half : 2 * half])
        values[: len(rest)].add_(rest)
    return float(values[0])


def _spans(parts: Sequence[tuple[int, bool]]) -> list[tuple[int, int]]:
    """[start, stop) of the neighbouring parts that are marked."""
    spans: list[tuple[int, int]] = []
    at = 0
    for numel, marked in parts:
        if marked and spans and spans[-1][1] == at:
            spans[-1] = (spans[-1][0], at + numel)
        elif marked:
            spans.append((at, at + numel))
        at += numel
    return spans
