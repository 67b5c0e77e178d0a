"""A contribution that is encoded once, when it is offered, and takes no more memory than its payloads.

    d, part by part ──encode──> payloads, frozen ──> the exchange asks for a chunk

What it was made of may change at once. It is encoded by the processor that has it: of a vector on a GPU only payloads
come to the host (`landing`).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from dlc.comm.grid import Grid
from dlc.comm.landing import Landing

PART_ELEMS = 1 << 18
"""1 MiB of fp32, which a processor's second-level cache holds from the subtraction to the encoding."""
DEVICE_PART_ELEMS = 1 << 22
"""What starting a kernel costs is little for 16 MiB of fp32, and a training that fills a GPU has room for a few."""


def part_elems(grid: Grid, device: torch.device) -> int:
    """Elements of the parts in which a vector of that grid is best encoded: whole chunks."""
    wanted = PART_ELEMS if device.type == "cpu" else DEVICE_PART_ELEMS
    return max(1, wanted // grid.chunk_elems) * grid.chunk_elems


class Encoded:
    """`parts`: see `fill`; without any it has no values before that is called, and is to be read by nobody."""

    def __init__(self, grid: Grid, parts: Iterable[Tensor] | None = None) -> None:
        self.grid = grid
        self._payloads = np.empty(grid.total_wire_bytes, np.uint8)
        if parts is not None:
            self.fill(parts)

    def fill(self, parts: Iterable[Tensor]) -> None:
        """Once: the vector in parts (fp32, contiguous, on one device), each done with when the next is asked for. All
        but the last are whole chunks, and on a GPU none is more than `part_elems`. ValueError: it is not so, or they
        are not as long as the grid."""
        grid, end = self.grid, 0
        landing: Landing | None = None
        try:
            for part in parts:
                start, end = end, end + part.numel()
                if end > grid.numel:
                    break
                if start % grid.chunk_elems:
                    raise ValueError(f"a part begins at element {start}, within a chunk of {grid.chunk_elems}")
                if landing is None and part.device.type != "cpu":
                    landing = Landing(part.device, self._place(0, part_elems(grid, part.device)).stop)
                for rows, out in self._rows(part, start):
                    if landing is None:
                        self._encode(rows, out)
                    else:
                        landing.take(partial(self._encode, rows), out)
        finally:
            if landing is not None:
                landing.finish()
        if end != grid.numel:
            raise ValueError(f"the parts have {end} elements or more, not {grid.numel}")
        self._payloads.flags.writeable = False

    def _encode(self, rows: Tensor, out: Tensor) -> None:
        self.grid.coder.encode_rows(rows, out.view(len(rows), -1))

    def _rows(self, part: Tensor, start: int) -> Iterable[tuple[Tensor, Tensor]]:
        """Its whole chunks as the rows of one tensor, then what remains, each with the place of the payloads."""
        elems = self.grid.chunk_elems
        whole = part.numel() // elems * elems
        for a, b, width in ((0, whole, elems), (whole, part.numel(), part.numel() - whole)):
            if a < b:
                yield part[a:b].view(-1, width), torch.from_numpy(self._payloads[self._place(start + a, start + b)])

    def _place(self, start: int, stop: int) -> slice:
        """Of the payloads of the elements [start, stop): `start` begins a chunk, and `stop` ends one."""
        grid = self.grid
        a, b = (bound // grid.chunk_elems * grid.coder.wire_bytes(grid.chunk_elems) for bound in (start, stop))
        rest = stop % grid.chunk_elems
        return slice(a, b + (grid.coder.wire_bytes(rest) if rest else 0))

    def numel(self) -> int:
        """Elements of the vector."""
        return self.grid.numel

    def payload(self, chunk: int) -> memoryview:
        """What `encode` makes of the elements of that chunk."""
        if self._payloads.flags.writeable:
            raise RuntimeError("this contribution has no values yet: it must not be sent")
        return self._payloads[self._place(*self.grid.span(chunk))].data

    def clone(self) -> Encoded:
        """Itself: what it has it keeps."""
        return self


def payload_of(vector: Tensor | Encoded, grid: Grid, chunk: int) -> memoryview:
    """What is sent of a chunk of a contribution (fp32, CPU, or encoded in that grid)."""
    if isinstance(vector, Encoded):
        return vector.payload(chunk)
    return grid.coder.encode(vector[slice(*grid.span(chunk))])
