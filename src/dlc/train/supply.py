"""The blocks of a lease, step by step, and what the loader may read ahead."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

from torch import Tensor

from dlc.train.loader import AHEAD_MAX, Loader, Stopped
from dlc.train.local_model import LocalModel


class Supply:
    """Used from the trainer's thread. `per_step`: blocks of an inner step."""

    def __init__(self, model: LocalModel, loader: Loader, per_step: int) -> None:
        self._model, self._loader, self._per_step = model, loader, per_step
        self._ahead: deque[int] = deque()
        """Blocks of the lease that come after what is done, as far as they were looked up."""
        self._later: Sequence[int] = ()
        """Those after them, for the loader only: when they are trained, they are looked up again."""

    def forget(self) -> None:
        """What comes next may have changed: look the lease up again."""
        self._ahead.clear()

    def next(self, done: Sequence[int], steps_left: int) -> list[int]:
        """Of the next step, after `done`; fewer at the end of the lease, none where it is not ours any more.

        `steps_left`: for so many the lease is looked up at once.
        """
        count = self._per_step
        if not self._ahead:
            lease = self._model.newest().lease
            blocks = lease.take(len(done) + (steps_left + AHEAD_MAX) * count)[0] if lease is not None else []
            if tuple(blocks[: len(done)]) == tuple(done):
                end = len(done) + steps_left * count
                self._ahead.extend(blocks[len(done) : end])
                self._later = blocks[end:]
        return [self._ahead.popleft() for _ in range(min(count, len(self._ahead)))]

    def batches(self, group: Sequence[int]) -> list[Tensor]:
        """The micro-batches of a step that `next` gave. Stopped: they are not there, and `next` gives it again."""
        try:
            return self._loader.take(group, self._after())
        except Stopped:
            self.forget()
            raise

    def _after(self) -> list[list[int]]:
        """Blocks of the steps that come next, as things stand."""
        count = self._per_step
        blocks = list(itertools.islice(itertools.chain(self._ahead, self._later), AHEAD_MAX * count))
        return [blocks[a : a + count] for a in range(0, len(blocks), count)]

    def close(self) -> None:
        """End the loader's thread; no step can follow."""
        self._loader.close()
