"""What the rounds need of a channel's replicated state; `dlc.train` implements it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from torch import Tensor

AtLength = Callable[[Callable[[], None], int], None]
"""(work, bytes that it goes through): returns when the work is done, and raises what it raises."""


class State(Protocol):
    """Outer state of one channel: a deterministic state machine driven by the means of committed rounds.

    Called by the driver thread, or while that waits for it; an implementation that is also read by others guards
    itself.
    """

    @property
    def numel(self) -> int:
        """Elements of the vector that the rounds average."""

    def step(self, t: int, means: Iterable[tuple[int, int, Tensor | None]]) -> None:
        """Apply round t: fp32 mean of elements [start, stop) each, or None where nobody contributed.

        The memory of a mean is used again once the next one is asked for.
        """

    def digest(self) -> bytes:
        """BLAKE3-256 of the image, equal on every peer that stands at the same round."""

    def image_bytes(self) -> int:
        """Size of an exported image in bytes."""

    def export(self) -> memoryview:
        """A frozen copy of the whole state in portable byte order."""

    def copy_image(self, start: int, out: memoryview) -> None:
        """The same, in parts: copy the bytes from `start` on that fill `out`."""

    def restore(self, image: memoryview) -> None:
        """Replace the whole state by an image, or raise CheckpointError and change nothing.

        A writable image is given up to the state, which may keep it as its own memory.
        """
