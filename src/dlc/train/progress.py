"""What a trainer has done and no round has counted yet: the steps behind its pseudo-gradient, in order."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from dlc.train.offers import Work


class Step(NamedTuple):
    """One inner step."""

    blocks: tuple[int, ...]
    tokens: int
    loss: float


class Progress:
    """Grows by a step, shrinks by what a round counted."""

    def __init__(self) -> None:
        self._steps: list[Step] = []

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, blocks: Sequence[int], tokens: int, loss: float) -> None:
        self._steps.append(Step(tuple(blocks), tokens, loss))

    def keep(self, steps: int) -> None:
        """Forget all but the first `steps`."""
        del self._steps[steps:]

    @property
    def blocks(self) -> int:
        """How many were trained."""
        return sum(len(step.blocks) for step in self._steps)

    @property
    def tokens(self) -> int:
        return sum(step.tokens for step in self._steps)

    @property
    def work(self) -> Work:
        blocks = tuple(block for step in self._steps for block in step.blocks)
        return Work(blocks, blocks[-1] + 1) if blocks else Work()

    def counted(self, steps: int) -> float | None:
        """Forget the first `steps`, which are part of a round now; returns the mean of their losses."""
        done, self._steps = self._steps[:steps], self._steps[steps:]
        return statistics.fmean(step.loss for step in done) if done else None
