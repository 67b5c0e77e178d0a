"""What a trainer has done and no round has counted yet: the steps behind its pseudo-gradient, in order."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dlc.errors import CheckpointError
from dlc.train.offers import Work

_STEPS, _BLOCKS, _LOSSES = "steps", "blocks", "losses"


class Step(NamedTuple):
    """One inner step."""

    blocks: tuple[int, ...]
    tokens: int
    loss: float


class Progress:
    """Grows by a step, shrinks by what a round counted."""

    def __init__(self) -> None:
        self._steps: list[Step] = []

    @classmethod
    def of(cls, named: Mapping[str, Tensor]) -> Progress:
        """What `tensors` gave, among others; of none of them no step. CheckpointError: they do not fit each other."""
        made = cls()
        if _STEPS not in named:
            return made
        steps, blocks, losses = (named.get(name, torch.empty(0)) for name in (_STEPS, _BLOCKS, _LOSSES))
        fit = steps.dim() == 2 and steps.shape[1] == 2 and bool((steps > 0).all()) and losses.shape == steps.shape[:1]
        if not fit or blocks.shape != (int(steps[:, 0].sum()),):
            raise CheckpointError(
                f"the saved inner steps are {tuple(steps.shape)}, with blocks {tuple(blocks.shape)} and losses "
                f"{tuple(losses.shape)}, which do not fit each other: the checkpoint was not written by this program"
            )
        at, named_blocks = 0, blocks.tolist()
        for (count, tokens), loss in zip(steps.tolist(), losses.tolist(), strict=True):
            made.add(named_blocks[at : at + count], tokens, loss)
            at += count
        return made

    def tensors(self) -> dict[str, Tensor]:
        """For a checkpoint: of each step how many blocks and tokens (int64 [steps, 2]) and the loss (float64 [steps]),
        and the blocks one after the other (int64). Empty where there is no step."""
        if not self._steps:
            return {}
        counts = [(len(step.blocks), step.tokens) for step in self._steps]
        return {
            _STEPS: torch.tensor(counts, dtype=torch.int64, device="cpu"),
            _BLOCKS: torch.tensor(self.work.blocks, dtype=torch.int64, device="cpu"),
            _LOSSES: torch.tensor([step.loss for step in self._steps], dtype=torch.float64, device="cpu"),
        }

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
