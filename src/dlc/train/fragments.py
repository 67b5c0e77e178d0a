"""Which part of a model each round exchanges, where it is cut into fragments (Streaming DiLoCo, arXiv:2501.18512).

    K fragments of strided layers: fragment p holds layers p, p + K, p + 2 K, ... and every K-th of the other tensors
    round t = 1, 2, 3, ... exchanges fragment (t - 1) mod K, so each has its turn every K rounds

Rounds come every H / K inner steps: each fragment is exchanged every H of them, at an offset of its own, and at no time
does more than a K-th of the model travel.

The tensors are put in that order and cut into K pieces of equal length, since all rounds of a channel average vectors
of one length. So where layers differ in size, a cut may lie within one. A last piece that is shorter by a few elements
is filled up with zeros.

Here is only the arithmetic of indices: which ranges of the flat vector (`flat`) a fragment has.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from blake3 import blake3
from torch import Tensor

from dlc.comm import vectors
from dlc.errors import ConfigError


class Span(NamedTuple):
    """Elements [start, stop) of the flat vector."""

    start: int
    stop: int


class Fragments:
    """The spans of each fragment, in the order of its packed vector."""

    def __init__(self, spans: Sequence[Sequence[Span]]) -> None:
        self._spans = tuple(tuple(part) for part in spans)
        sizes = [sum(span.stop - span.start for span in part) for part in self._spans]
        self.numel = sum(sizes)
        """Of the flat vector."""
        self.packed_numel = max(sizes)
        """Of what a round averages."""
        self.fingerprint = self._digest() if len(self._spans) > 1 else bytes(8)
        """8 bytes that tell two ways to cut apart; zeros if nothing is cut."""

    @classmethod
    def whole(cls, numel: int) -> Fragments:
        """One fragment: the flat vector as it is."""
        return cls([[Span(0, numel)]])

    @classmethod
    def strided(cls, tensors: Sequence[tuple[str, int]], k: int) -> Fragments:
        """`tensors`: name and size of each tensor of the flat vector, in its order.

        Tensors of one layer share the name up to its first number ("model.layers.3."). ConfigError: there are too few
        elements for so many fragments.
        """
        numel = sum(size for _, size in tensors)
        if k == 1:
            return cls.whole(numel)
        length = -(-numel // max(k, 1))
        if k < 1 or (k - 1) * length >= numel:
            raise ConfigError(f"fragments is {k}: the {numel} parameters of this model cannot be cut into so many")
        units: dict[str, list[Span]] = {}
        start = 0
        for name, size in tensors:
            units.setdefault(_unit(name), []).append(Span(start, start + size))
            start += size
        ordered = list(units.values())
        strided = [span for p in range(k) for unit in ordered[p::k] for span in unit]
        return cls(_cut(strided, length))

    def __len__(self) -> int:
        return len(self._spans)

    def of_round(self, t: int) -> int:
        """The fragment that round t >= 1 exchanges."""
        return (t - 1) % len(self)

    def turn(self, t: int) -> int:
        """Round t is the how-many-th of its fragment; the first is 1."""
        return (t - 1) // len(self) + 1

    def pieces(self, fragment: int, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, int, int]]:
        """Elements [start, stop) of the packed vector: for each range (a, b) of the flat vector where it begins there.

        What fills up the last fragment is in none.
        """
        at = 0
        stop = self.packed_numel if stop is None else stop
        for span in self._spans[fragment]:
            end = at + span.stop - span.start
            low, high = max(start, at), min(stop, end)
            if low < high:
                yield span.start + low - at, span.start + high - at, low
            at = end

    def take(self, flat: Tensor, fragment: int, out: Tensor | None = None) -> Tensor:
        """The packed vector of a fragment; the flat one itself if there is only one fragment and no `out`."""
        if out is None:
            if len(self) == 1:
                return flat
            out = vectors.empty(self.packed_numel)
        end = 0
        for a, b, at in self.pieces(fragment):
            end = at + b - a
            out[at:end] = flat[a:b]
        out[end:] = 0.0
        return out

    def put(self, packed: Tensor, fragment: int, flat: Tensor) -> None:
        """The reverse of `take`: write a packed vector to its places in the flat one."""
        for a, b, at in self.pieces(fragment):
            flat[a:b] = packed[at : at + b - a]

    def add(self, packed: Tensor, fragment: int, flat: Tensor, times: float = 1.0) -> None:
        """Add a packed vector, so many times, to its places in the flat one."""
        for a, b, at in self.pieces(fragment):
            flat[a:b].add_(packed[at : at + b - a], alpha=times)

    def _digest(self) -> bytes:
        hasher = blake3()
        for fragment, spans in enumerate(self._spans):
            for span in spans:
                hasher.update(struct.pack("<IQQ", fragment, *span))
        return hasher.digest(8)


def _unit(name: str) -> str:
    """Up to the first number: "model.layers.3." of "model.layers.3.mlp.up_proj.weight"; a name without one is its own.

    The block of a residual network, "layer1.0.conv", counts by "layer1.0.".
    """
    words = name.split(".")
    for index, word in enumerate(words):
        if word.isdecimal():
            return ".".join(words[: index + 1]) + "."
    return name


def _cut(spans: Sequence[Span], length: int) -> list[list[Span]]:
    """Pieces of `length` elements, the last one perhaps shorter; neighbours are joined."""
    pieces: list[list[Span]] = [[]]
    room = length
    for span in spans:
        start = span.start
        while start < span.stop:
            if room == 0:
                pieces.append([])
                room = length
            stop = min(span.stop, start + room)
            last = pieces[-1][-1] if pieces[-1] else None
            if last is not None and last.stop == start:
                pieces[-1][-1] = Span(last.start, stop)
            else:
                pieces[-1].append(Span(start, stop))
            room -= stop - start
            start = stop
    return pieces
