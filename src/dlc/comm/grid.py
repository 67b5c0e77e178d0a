"""How a vector is cut into chunks. Pure arithmetic.

A `Grid` is a function of the RunSpec (and channel), never of a plan: every peer cuts the same vector at the same
places, and an owner with a better link gets *more* chunks, not larger ones. All chunks have `chunk_elems` elements
except the last, which has what remains.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from dlc.comm.codecs import Codec, get_codec
from dlc.errors import ConfigError

CHUNK_ELEMS_MAX = 1 << 21
"""8 MiB of fp32 per chunk: an owner holds one payload per contributor and open chunk, and what is longer fits no frame
of the bulk lane."""
RESULT_BYTES_MAX, RESULT_PARTS = 8 << 20, 256
"""A result fits a frame of the bulk lane, also where it is as long as the parts of so many contributors together. How
many more a round may have depends on the grid: `Grid.parts_max`."""
N_CHUNKS_MAX = 1 << 13
"""A promise may tell, of every chunk, what was accepted, who is planned to hold it, and what is held: some 260 bytes,
which must fit a header together. 17e9 elements in the largest chunks."""

USUAL_CHUNKS, USUAL_BYTES = 512, 2.0
"""Of a vector, and wire bytes per element of those codecs that have so many."""
USUAL_ELEMS_MIN, USUAL_ELEMS_MAX = 1 << 14, 1 << 18
LARGE_CHUNKS = 64
LOOPBACK_CHUNK_ELEMS = 1 << 19
"""2 MiB of fp32, 1 MiB of fp16: where peers share a host, the work per message counts for more than the first and the
last chunk of a round, which nothing overlaps. What is larger by far falls out of the processor's caches."""


def usual_chunk_elems(numel: int, codec: str, most: int = 0) -> int:
    """Elements per chunk where nobody says how many: a power of two that makes some hundreds of chunks.

    A round begins and ends with a chunk that nothing overlaps, so chunks are small against the vector. Each costs every
    peer some work of its own, so none is smaller than a few packets, there are fewer of a codec that makes few bytes of
    an element, and none but those of a vector of more than N_CHUNKS_MAX chunks (2e9 elements) is larger than what a
    second-level cache holds.

    `most`: the run's own number (0: it has none). Chunks are then as large as that, if some dozens are left to share.
    """
    few = get_codec(codec).wire_bytes(USUAL_ELEMS_MAX) / (USUAL_BYTES * USUAL_ELEMS_MAX)
    usual = max(LARGE_CHUNKS, round(USUAL_CHUNKS * min(1.0, few)))
    chunks, largest = (LARGE_CHUNKS, most) if most else (usual, USUAL_ELEMS_MAX)
    elems = min(max(_power_of_two(numel / chunks), USUAL_ELEMS_MIN), largest)
    return min(max(elems, _power_of_two(numel / N_CHUNKS_MAX)), CHUNK_ELEMS_MAX, max(1, numel))


def _power_of_two(least: float) -> int:
    return 1 << max(0, math.ceil(least) - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Grid:
    """The chunks of one vector. ConfigError where a field is out of range or the codec unknown."""

    numel: int
    """Elements of the whole vector, at least 1."""
    chunk_elems: int
    """Elements per chunk, 1 to CHUNK_ELEMS_MAX; `numel / chunk_elems` is at most N_CHUNKS_MAX."""
    codec: str
    """Name of the wire format, see codecs.py."""

    def __post_init__(self) -> None:
        if self.numel < 1:
            raise ConfigError(f"a vector has at least 1 element, got numel = {self.numel}")
        if not 1 <= self.chunk_elems <= CHUNK_ELEMS_MAX:
            raise ConfigError(f"chunk_elems must be 1 to {CHUNK_ELEMS_MAX}, got {self.chunk_elems}")
        if self.n_chunks > N_CHUNKS_MAX:
            needed = -(-self.numel // N_CHUNKS_MAX)
            raise ConfigError(
                f"{self.numel} elements in chunks of {self.chunk_elems} are {self.n_chunks} chunks, "
                f"at most {N_CHUNKS_MAX} are allowed: raise chunk_elems to {needed} or more"
            )
        if self.coder.result_bytes(self.elems(0), RESULT_PARTS) > RESULT_BYTES_MAX:
            raise ConfigError(
                f"{self.codec} in chunks of {self.chunk_elems} makes results of more than {RESULT_BYTES_MAX} bytes "
                f"where {RESULT_PARTS} contribute, too long for one message: lower chunk_elems"
            )

    def __str__(self) -> str:
        return f"{self.numel} elements in {self.codec}, in chunks of {self.chunk_elems}"

    @property
    def n_chunks(self) -> int:
        return -(-self.numel // self.chunk_elems)

    @property
    def coder(self) -> Codec:
        """The object behind the name `codec`."""
        return get_codec(self.codec)

    def span(self, chunk: int) -> tuple[int, int]:
        """Elements [start, stop) of a chunk; IndexError where there is no such chunk."""
        if not 0 <= chunk < self.n_chunks:
            raise IndexError(f"chunk {chunk} of {self.n_chunks}")
        start = chunk * self.chunk_elems
        return start, min(start + self.chunk_elems, self.numel)

    def elems(self, chunk: int) -> int:
        """Elements of a chunk: `chunk_elems`, or fewer in the last."""
        start, stop = self.span(chunk)
        return stop - start

    def wire_bytes(self, chunk: int) -> int:
        """Length of the payload of a chunk."""
        return self.coder.wire_bytes(self.elems(chunk))

    def result_bytes(self, chunk: int, n_parts: int) -> int:
        """Length of the result of a chunk that has so many contributions in it, at least 1."""
        return self.coder.result_bytes(self.elems(chunk), n_parts)

    def unsaid(self, chunk: int, own: Tensor, out: Tensor | None = None) -> Tensor:
        """What the codec cannot say of `own`, a peer's chunk of a vector: added to the mean of what was said, it stays
        with that peer. Otherwise a vector that is averaged again and again would lose all that is below the codec's
        resolution, on all peers alike.

        out: fp32, of at least as many elements; what is computed lies there. Memory that is new for each chunk takes
        as long as the work itself."""
        numel = self.elems(chunk)
        scratch = None if out is None else out[:numel]
        said = self.coder.decode(self.coder.encode(own, scratch), numel, scratch)
        return torch.sub(own, said, out=said)

    @property
    def parts_max(self) -> int:
        """Contributions of which the result still fits one message, at least RESULT_PARTS: the most in one round."""
        return RESULT_BYTES_MAX // self.result_bytes(0, 1) if self.coder.sparse else sys.maxsize

    @property
    def total_wire_bytes(self) -> int:
        """Sum of `wire_bytes` over all chunks: what one peer's whole vector takes, without headers."""
        last = self.n_chunks - 1
        full = self.coder.wire_bytes(self.chunk_elems) * last
        return full + self.wire_bytes(last)
