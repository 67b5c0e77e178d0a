"""The next steps' batches, made on a thread while the present step computes.

What is in a batch follows from its positions alone, so a batch made ahead is the one that would be made now, and plans
may change at any time: what was made for other positions is dropped.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from itertools import zip_longest
from queue import SimpleQueue

from torch import Tensor

from dlc.train.data import Blocks

AHEAD_MAX = 2
"""Steps whose batches are made ahead: one hides reading and tokenising that takes as long as a step; the second evens
out documents of unequal length."""

WAIT_SLICE_S = 0.25
"""Between two looks at whether the training is to stop, while a batch is waited for."""
CLOSE_S = 1.0
"""The loader's thread is waited for; a source that hangs does not keep a trainer from its end."""

Group = tuple[int, ...]
"""Positions of one step."""


class Stopped(Exception):
    """The training is to stop, and a batch is not there yet."""


class Loader:
    """Used from the trainer's thread; `source` is read by the loader's own thread only, until `close`.

    pin:       lock the batches in memory, so that a CUDA device copies them while it computes.
    stopping:  whether the training is to stop: batches that are not there are not waited for then.
    """

    def __init__(
        self, source: Blocks, batch_size: int, pin: bool = False, stopping: Callable[[], bool] = lambda: False
    ) -> None:
        self._source, self._batch_size, self._pin, self._stopping = source, batch_size, pin, stopping
        self._jobs: SimpleQueue[tuple[Group, Future[list[Tensor]]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        """Begun with the first batch. A daemon: the source may hang when the process ends."""
        self._made: deque[tuple[Group, Future[list[Tensor]]]] = deque()
        """In the order of use; at most AHEAD_MAX and the one that is asked for."""

    def take(self, group: Sequence[int], ahead: Sequence[Sequence[int]] = ()) -> list[Tensor]:
        """The micro-batches of a step, int64 [<= batch_size, seq_len] each. `ahead`: the steps after it, where known.

        DataError: the source cannot be read any more. Stopped: see `stopping`; it may be asked for again.
        """
        plan = [tuple(group), *(tuple(later) for later in ahead[:AHEAD_MAX])]
        for at, (wanted, made) in enumerate(zip_longest(plan, list(self._made))):
            if made is not None and made[0] != wanted:
                while len(self._made) > at:
                    self._made.pop()[1].cancel()
                break
        for wanted in plan[len(self._made) :]:
            job = (wanted, Future[list[Tensor]]())
            self._made.append(job)
            self._jobs.put(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="dlc-loader", daemon=True)
            self._thread.start()
        batches = self._made[0][1]
        while not wait([batches], WAIT_SLICE_S).done:
            if self._stopping():
                raise Stopped
        self._made.popleft()
        return batches.result()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            group, made = job
            if not made.set_running_or_notify_cancel():
                continue
            try:
                made.set_result(self._make(group))
            except BaseException as error:  # it is the trainer's, where that asks for this batch
                made.set_exception(error)
            del job, made  # what it holds may be large

    def _make(self, group: Group) -> list[Tensor]:
        size = self._batch_size
        batches = [self._source.batch(group[a : a + size]) for a in range(0, len(group), size)]
        return [batch.pin_memory() for batch in batches] if self._pin else batches

    def close(self) -> None:
        """Stop the thread, in the middle of the batch that it is making where the source can."""
        while self._made:
            self._made.pop()[1].cancel()
        self._jobs.put(None)
        if self._thread is not None:
            self._source.break_off()
            self._thread.join(CLOSE_S)
