"""A contribution that becomes final while it is offered, from its end to its front, as a backward pass makes gradients.

    vector[start:] is written  ──>  reached(start)  ──>  its chunks may be encoded, sent and summed
    the work failed            ──>  stop()          ──>  nothing more of it is sent: the owners are told so

The front is all that is shared: one number, which only goes down, and is set after what it covers was written. Elements
from it on are not written again before the round is over; those before it are not looked at. So whoever writes needs no
lock against the driver, and all peers send their chunks in one order, from the last to the first: an owner's window
never waits for a chunk that comes later.
"""

from __future__ import annotations

from collections.abc import Callable

FILL_S_MAX = 600.0
"""A round does not wait for longer than some of these, whatever a contributor expects."""


class Filling:
    """How far a contribution of `numel` elements is final. `expected_s`: seconds until all of it will be, above 0.

    `reached` may be called on any thread, one call after the other, and `stop` by whoever finds that the work failed.
    """

    def __init__(self, numel: int, expected_s: float) -> None:
        if numel < 1 or not expected_s > 0:
            raise ValueError(f"a filling of {numel} elements in {expected_s} s")
        self.numel = numel
        self.expected_s = min(expected_s, FILL_S_MAX)
        self.front = numel
        """Elements from here on are final."""
        self.stopped = False
        """What is not final will never be, and nothing of it is sent any more."""
        self._chunk_elems = 1
        self._moved: Callable[[], None] = lambda: None

    def watch(self, chunk_elems: int, moved: Callable[[], None]) -> None:
        """Call `moved` from now on when another chunk is final, or none will be any more; it must be quick."""
        self._chunk_elems, self._moved = chunk_elems, moved
        if self.stopped or self.front < self.numel:
            moved()

    def reached(self, start: int) -> None:
        """Elements from `start` on are final."""
        if self.stopped or start >= self.front:
            return
        # The first chunk that is final begins at the front, rounded up.
        before, now = -(-self.front // self._chunk_elems), -(-start // self._chunk_elems)
        self.front = start  # before `_moved` is looked up: `watch` sets that first, and then looks here
        if now < before:
            self._moved()

    def stop(self) -> None:
        """Nothing more becomes final. Once all is final, this changes nothing."""
        if not self.stopped and self.front:
            self.stopped = True
            self._moved()

    @property
    def complete(self) -> bool:
        """All of it is final."""
        return not self.front

    def covers(self, start: int) -> bool:
        """Elements from `start` on are final, and may be used."""
        return start >= self.front and not self.stopped
