"""A contribution that is encoded once, when it is offered, and takes no more memory than its payloads.

    d, part by part ──encode──> payloads, frozen ──decode──> the exchange asks for a chunk ──encode──> the same bytes

What it was made of may change at once. To the exchange it is the vector of a contribution, of which it asks the length
and one chunk after the other; a chunk is decoded, and what the exchange encodes of that is the payload again, bit for
bit. That holds for codecs which cast each element by itself, and not for those with feedback, whose scale may come out
otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from torch import Tensor

from dlc.comm import vectors
from dlc.comm.grid import Grid


class Encoded:
    """`parts`: see `fill`; without any it has no values before that is called, and is to be read by nobody.
    ValueError: they are not as long as the grid, or the codec is one with feedback."""

    def __init__(self, grid: Grid, parts: Iterable[Tensor] | None = None) -> None:
        if grid.coder.feedback:
            raise ValueError(f"what {grid.codec} decodes to may encode to other bytes")
        self.grid = grid
        self._payloads = np.empty(grid.total_wire_bytes, np.uint8)
        self._decoded = vectors.empty(min(grid.chunk_elems, grid.numel))
        """Kept: memory that came and went with each chunk would leave holes between what lasts."""
        if parts is not None:
            self.fill(parts)

    def fill(self, parts: Iterable[Tensor]) -> None:
        """Once: the vector in parts of any length (fp32, CPU, contiguous), each done with when the next is asked for.
        ValueError: they are not as long as the grid."""
        grid, end = self.grid, 0
        for part in parts:
            start, end = end, end + part.numel()
            if end > grid.numel:
                break
            self._payloads[self._place(start, end)] = np.frombuffer(grid.coder.encode(part), np.uint8)
        if end != grid.numel:
            raise ValueError(f"the parts have {end} elements or more, not {grid.numel}")
        self._payloads.flags.writeable = False

    def _place(self, start: int, stop: int) -> slice:
        each = self.grid.coder.wire_bytes(1)
        return slice(each * start, each * stop)

    def numel(self) -> int:
        """Elements of the vector."""
        return self.grid.numel

    def __getitem__(self, span: slice) -> Tensor:
        """The elements [start, stop) of a chunk, decoded (fp32), until the next are asked for: by one thread."""
        if self._payloads.flags.writeable:
            raise RuntimeError("this contribution has no values yet: it must not be sent")
        payload, numel = self._payloads[self._place(span.start, span.stop)], span.stop - span.start
        return self.grid.coder.decode(payload.data, numel, self._decoded[:numel])

    def clone(self) -> Encoded:
        """Itself: what it has it keeps."""
        return self
