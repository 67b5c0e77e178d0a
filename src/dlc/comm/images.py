"""Frozen images of channel states that others may fetch, made a slice at a time.

An image begins as a promise: nothing is copied yet, and the state itself is read, so that its hashes are known soon.
It is then copied slice by slice, and sooner where pieces are asked for. Whoever is about to change the state calls
`finish` first. Memory comes and goes in segments, because giving a gigabyte back takes as long as getting it.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

from blake3 import blake3

from dlc.comm.state import State

SEGMENT_PIECES = 4
"""Pieces per piece of memory: what is taken or given back at once, 4 MiB as a rule."""


PIECE_BYTES = 1 << 20
"""Short against a round trip's worth of a fast link, long against a message."""


PIECES_MAX = 1 << 16
"""Of an image: an offer names the hash of each, and must fit a message."""


@dataclass(frozen=True)
class PieceLimits:
    """How images are cut, and how much is done with them at once, in pieces."""

    piece_bytes: int = PIECE_BYTES
    """The same on all peers of a run; doubled for images that would have more than PIECES_MAX."""
    hash_pieces: int = 16
    """Hashed per tick, in about 5 ms."""
    copy_pieces: int = 4
    """Copied per tick, which takes as long: memory that comes fresh from the system is slow."""
    in_flight_min: int = 2
    """Asked of one donor: the next is on its way while one arrives."""
    in_flight_first: int = 4
    """Before its speed is known."""
    in_flight_max: int = 16
    """Bounds what one request makes a donor queue; enough for 1 Gbit/s over 120 ms."""

    def piece_bytes_of(self, image_bytes: int) -> int:
        """Of an image of this size."""
        size = self.piece_bytes
        while image_bytes > size * PIECES_MAX:
            size *= 2
        return size


class Image:
    """One state as it is now, whatever becomes of it."""

    def __init__(self, state: State, digest: bytes, limits: PieceLimits, now: float) -> None:
        self.digest, self.n_bytes = digest, state.image_bytes()
        self.last_asked = now
        self.last_fetched = -1e9
        """When a piece of it was asked for."""
        self._state: State | None = state
        """Until everything is copied."""
        self.piece_bytes = limits.piece_bytes_of(self.n_bytes)
        self.n_pieces = -(-self.n_bytes // self.piece_bytes)
        self._scratch = bytearray(min(self.piece_bytes, self.n_bytes))
        self._segments: dict[int, mmap.mmap] = {}
        self._have: set[int] = set()
        self._copied = 0
        """All pieces before this one are copied."""
        self.hashes: list[bytes] = []
        """Of the first pieces, as far as they are known."""

    @property
    def copied(self) -> bool:
        return self._state is None

    @property
    def hashed(self) -> bool:
        return len(self.hashes) == self.n_pieces

    def piece(self, index: int) -> memoryview:
        """Bytes of one piece; they never change, and may be referred to for as long as they are needed."""
        number, place = divmod(index, SEGMENT_PIECES)
        size = min(self.piece_bytes, self.n_bytes - index * self.piece_bytes)
        segment = self._segments.get(number)
        if segment is None:
            segment_bytes = SEGMENT_PIECES * self.piece_bytes
            left_bytes = self.n_bytes - number * segment_bytes
            segment = self._segments[number] = mmap.mmap(-1, min(segment_bytes, left_bytes))
        view = memoryview(segment)[place * self.piece_bytes :][:size]
        if index not in self._have:
            assert self._state is not None
            self._state.copy_image(index * self.piece_bytes, view)
            self._have.add(index)
        return view.toreadonly()

    def copy(self, n_pieces: int) -> None:
        """Copy up to so many more pieces."""
        while n_pieces and self._copied < self.n_pieces:
            n_pieces -= self._copied not in self._have
            self.piece(self._copied)
            self._copied += 1
        if self._copied == self.n_pieces:
            self._state = None

    def finish(self) -> None:
        """Copy the rest at once: the state is about to change."""
        self.copy(self.n_pieces)

    def hash(self, n_pieces: int) -> None:
        """Hash up to so many more pieces, copied ones or the state's own."""
        first = len(self.hashes)
        for index in range(first, min(first + n_pieces, self.n_pieces)):
            if index in self._have:
                content = self.piece(index)
            else:
                assert self._state is not None
                start = index * self.piece_bytes
                content = memoryview(self._scratch)[: min(self.piece_bytes, self.n_bytes - start)]
                self._state.copy_image(start, content)
            self.hashes.append(blake3(content).digest())

    def give_back(self) -> bool:
        """Drop one segment of memory; False once all are gone. Nothing else may be asked of the image then."""
        if self._segments:
            self._segments.popitem()
        return bool(self._segments)
