"""The pure parts of means.py: vectors that tell where they come from, and the verdict on a mean of them.

A contribution is a pattern that all know times a value, and its weight tells which value: so whoever has a report can
work out what each chunk of the mean must be. A chunk is right if it is the weighted mean of all whose whole vector is
in it by the report, and of some of those of whom only a part is; and of each of these the mean has as many elements as
the report says.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from dlc.comm.grid import Grid
from dlc.report import Share

VALUES = 97
WEIGHTS = 512
"""Different ones, and as many as there are contributions to tell apart."""
PATTERN = (1.0, -1.0, 0.5, -0.5, 0.25, 2.0, -2.0, 0.75)
ROUNDED = {"fp32": 1e-5, "fp16": 2e-3, "int8": 4e-2}
"""Of an element of the mean, the most by which the codec changes it on both ways, in units of the mean's value."""
SHIFTED = {"fp32": 1e-5, "fp16": 1e-3, "int8": 8e-3}
"""The same of that value: elements of the same size are rounded alike."""


def weight_of(peer: int, k: int) -> float:
    """Of the k-th contribution of that peer."""
    return 1.0 + (peer * 64 + k) % WEIGHTS


def value_of(weight: float) -> float:
    return 1.0 + (round(weight) * 37 % VALUES) / 8


def pattern(numel: int) -> Tensor:
    """The same in every process."""
    drawn = torch.randint(0, len(PATTERN), (numel,), generator=torch.Generator().manual_seed(7))
    return torch.tensor(PATTERN)[drawn]


def wrong(mean: Tensor, like: Tensor, shares: Sequence[Share], grid: Grid) -> str:
    """What is wrong with a mean of multiples of `like` (both fp32 [numel]); empty if nothing is."""
    whole = [share.weight for share in shares if share.fraction == 1.0]
    partly = [share for share in shares if share.fraction < 1.0]
    subsets = [set(some) for n in range(len(partly) + 1) for some in itertools.combinations(range(len(partly)), n)]
    means = [_mean_of([*whole, *(partly[i].weight for i in some)]) for some in subsets]
    shifted, rounded = SHIFTED[grid.codec], ROUNDED[grid.codec]
    surely, perhaps = [0] * len(partly), [0] * len(partly)
    for chunk in range(grid.n_chunks):
        part = slice(*grid.span(chunk))
        value = float(mean[part] @ like[part] / (like[part] @ like[part]))
        fit = [some for some, x in zip(subsets, means, strict=True) if x is not None and abs(value - x) <= shifted * x]
        if not fit:
            told = ", ".join(f"{value_of(s.weight):g} (weight {s.weight:g}, {s.fraction:.3f} of it)" for s in shares)
            return f"chunk {chunk} is {value:.4f}, which is no mean of {told}"
        if float((mean[part] - value * like[part]).abs().max()) > rounded * value:
            return f"chunk {chunk} is not one mean: its elements are of different ones"
        for i in range(len(partly)):
            surely[i] += grid.elems(chunk) * all(i in some for some in fit)
            perhaps[i] += grid.elems(chunk) * any(i in some for some in fit)
    for i, share in enumerate(partly):
        if not surely[i] <= round(share.fraction * grid.numel) <= perhaps[i]:
            return f"{share.fraction:.4f} of {share.peer[:8]} is said to be in it, and {surely[i] / grid.numel:.4f} is"
    return ""


def _mean_of(weights: Sequence[float]) -> float | None:
    return sum(w * value_of(w) for w in weights) / sum(weights) if weights else None
