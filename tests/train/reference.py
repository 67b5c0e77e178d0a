"""What training in rounds computes, in float64, from the papers and docs/: nothing of `dlc` is used here.

fragments   layers in strides, cut into pieces of one length (Streaming DiLoCo, arXiv:2501.18512)
Outer       nesterov, sgd, adam, each fragment with steps of its own; the learning rate's schedule
QUANTISED   what of a vector each codec sends
Joint       the AdamW or SGD of data-parallel training
mean_of     of those listed, by their weights, each clipped to the median norm (SparseLoCo, arXiv:2508.15706)
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Vector = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]
FEEDBACK = {"int8": 1.0, "int4": 1.0, "topk": 0.95}
"""How much of what was not sent comes back with the next vector; of the other codecs nothing does."""


def fragments(tensors: Sequence[tuple[str, int]], k: int) -> list[Places]:
    """For each fragment where its elements are, of tensors with these names and sizes one after the other."""
    layers: dict[str, list[Places]] = {}
    start = 0
    for name, size in tensors:
        words = name.split(".")
        number = next((i for i, word in enumerate(words) if word.isdigit()), len(words))
        layers.setdefault(".".join(words[: number + 1]), []).append(np.arange(start, start + size))
        start += size
    if k == 1:
        return [np.arange(start)]
    order = np.concatenate([places for p in range(k) for layer in list(layers.values())[p::k] for places in layer])
    length = -(-start // k)
    return [order[p * length : (p + 1) * length] for p in range(k)]


class Outer:
    """theta after each round. `spec`: as `dlc.OuterSpec`."""

    def __init__(self, theta: Vector, spec: Any, places: Sequence[Places]) -> None:
        self.theta, self.spec, self.places = theta.copy(), spec, places
        self._m, self._v = np.zeros_like(theta), np.zeros_like(theta)
        self.t = 0

    @property
    def next(self) -> Places:
        """Of the fragment that the next round moves."""
        return self.places[self.t % len(self.places)]

    def after(self, mean: Vector, there: npt.NDArray[np.bool_]) -> Outer:
        """Another one, after a round of `next`; `there`: where somebody gave something."""
        new = Outer(self.theta, self.spec, self.places)
        new._m, new._v, new.t = self._m.copy(), self._v.copy(), self.t + 1
        at, g = self.next[there], mean[there]
        turn, spec = self.t // len(self.places) + 1, self.spec
        lr = learning_rate(spec, turn)
        if spec.optimizer == "sgd":
            new.theta[at] -= lr * g
        elif spec.optimizer == "nesterov":
            new._m[at] = spec.momentum * self._m[at] + g
            new.theta[at] -= lr * (g + spec.momentum * new._m[at])
        else:
            b1, b2 = spec.betas
            new._m[at] = b1 * self._m[at] + (1 - b1) * g
            new._v[at] = b2 * self._v[at] + (1 - b2) * g * g
            root = np.sqrt(new._v[at] / (1 - b2**turn))
            new.theta[at] -= lr * new._m[at] / (1 - b1**turn) / (root + spec.eps)
        return new

    def foreseen(self, mean: Vector) -> Vector:
        """`next` of theta, if the next mean were this."""
        return self.after(mean, np.ones(len(self.next), bool)).theta[self.next]


def learning_rate(spec: Any, turn: int) -> float:
    """Of round `turn` >= 1: linear warm-up, then constant, or down to the floor at `total_rounds`."""
    lr, floor = float(spec.lr), float(spec.min_lr_ratio)
    if turn <= spec.warmup_rounds:
        return lr * turn / spec.warmup_rounds
    if spec.schedule == "constant":
        return lr
    gone = min(1.0, (turn - 1 - spec.warmup_rounds) / (spec.total_rounds - spec.warmup_rounds))
    left = 1 - gone if spec.schedule == "linear" else (1 + math.cos(math.pi * gone)) / 2
    return lr * (floor + (1 - floor) * left)


class Joint:
    """theta of data-parallel training: AdamW (arXiv:1711.05101) or SGD, with clipping as torch's, of mean gradients.
    `inner`: as `dlc.InnerSpec`; total: steps of the schedule, 0 for none; decays: which elements do."""

    def __init__(self, theta: Vector, inner: Any, total: int, decays: npt.NDArray[np.bool_]) -> None:
        self.theta, self.inner, self.total, self.decays = theta.copy(), inner, total, decays
        self._m, self._v = np.zeros_like(theta), np.zeros_like(theta)
        self.t, self.moved = 0, 0.0
        """Steps; by how much an element may have moved in all of them."""

    def step(self, mean: Vector, there: npt.NDArray[np.bool_]) -> None:
        """there: where somebody gave something; the rest stays as it is."""
        inner, norm = self.inner, float(np.sqrt((mean[there] ** 2).sum()))
        scale = min(1.0, inner.clip_norm / (norm + 1e-6)) if inner.clip_norm else 1.0
        lr, self.t = self._lr(), self.t + 1
        before = self.theta.copy()
        self.theta[there & self.decays] *= 1 - lr * inner.weight_decay
        g = mean[there] * scale
        if inner.optimizer == "sgd":
            self.theta[there] -= lr * g
        else:
            b1, b2 = inner.betas
            self._m[there] = b1 * self._m[there] + (1 - b1) * g
            self._v[there] = b2 * self._v[there] + (1 - b2) * g * g
            root = np.sqrt(self._v[there] / (1 - b2**self.t))
            self.theta[there] -= lr * self._m[there] / (1 - b1**self.t) / (root + 1e-8)
        self.moved += float(np.abs(self.theta - before).max())

    def _lr(self) -> float:
        """Of step `t`, counted from 0."""
        inner = self.inner
        if self.t < inner.warmup_steps:
            return float(inner.lr) * (self.t + 1) / inner.warmup_steps
        if not self.total:
            return float(inner.lr)
        gone = min(1.0, (self.t - inner.warmup_steps) / (self.total - inner.warmup_steps))
        return float(inner.lr) * (inner.min_lr_ratio + (1 - inner.min_lr_ratio) * (1 + math.cos(math.pi * gone)) / 2)


def mean_of(sent: Sequence[Vector], weights: Sequence[float], clips: Sequence[float]) -> Vector:
    """Of vectors as they were sent."""
    whole = sum(weights)
    return np.sum([x * (w / whole * c) for x, w, c in zip(sent, weights, clips, strict=True)], axis=0)


def clips_of(norms: Sequence[float]) -> list[float]:
    """What each is multiplied by so that none is longer than the median one."""
    median = statistics.median([n for n in norms if n > 0] or [0.0])
    return [min(1.0, median / n) if n > 0 else 1.0 for n in norms]


# ------------------------------------------------------------------ codecs


def _half(x: Vector) -> Vector:
    greatest = float(np.abs(x).max())
    mantissa, exponent = math.frexp(greatest)
    rounded = math.ldexp(round(mantissa * 2048) / 2048, exponent)
    if greatest and not 1 <= rounded <= 65504:
        scale = 2.0 ** (math.frexp(rounded)[1] - 15)
        return np.float16(x / scale).astype(np.float64) * scale
    return np.float16(x).astype(np.float64)


def _bfloat(x: Vector) -> Vector:
    values: Vector = torch.from_numpy(x).to(torch.bfloat16).double().numpy()
    return values


def _blocks(limit: int) -> Callable[[Vector], Vector]:
    def quantised(x: Vector) -> Vector:
        out = np.zeros_like(x)
        for a in range(0, len(x), 256):
            block = x[a : a + 256].astype(np.float32)
            scale = np.abs(block).max() / np.float32(limit)
            if scale > 0:
                out[a : a + 256] = np.rint(block / scale) * scale
        return out

    return quantised


def _greatest(x: Vector) -> Vector:
    """Of each 4096 a 64th, each as one of two sizes."""
    out = np.zeros_like(x)
    for a in range(0, len(x), 4096):
        block = x[a : a + 4096]
        size, count = np.abs(block), -(-len(block) // 64)
        order = np.argsort(-size, kind="stable")[:count]
        high = size[order] > size[order].mean()
        low_mean = size[order][~high].mean()
        high_mean = size[order][high].mean() if high.any() else low_mean
        levels = _bfloat(np.array([low_mean, high_mean]))
        out[a + order] = np.sign(block[order]) * np.where(high, levels[1], levels[0])
    return out


QUANTISED: dict[str, Callable[[Vector], Vector]] = {
    "fp32": lambda x: x,
    "fp16": _half,
    "bf16": _bfloat,
    "int8": _blocks(127),
    "int4": _blocks(7),
    "topk": _greatest,
}
ROUNDING = {"fp32": 1e-6, "fp16": 2.0**-11, "bf16": 2.0**-8, "int8": 0.5 / 127, "int4": 0.5 / 7, "topk": 1e-6}
"""Of a mean's own encoding, as a part of its greatest element at most."""
