"""How a vector is cut into spans, and which helper owns which: pure functions of the layout and of who is there.

A *span* is a run of whole chunks of the grid. Spans are as equal as chunks allow, so that helpers own equal shares.

Who owns what follows from the ids of the live helpers alone, so all of them find the same without a word. Each span
ranks the helpers by a hash of its own (rendezvous hashing: who comes or goes moves few spans), and the first of the
ranking with room becomes the owner, the next other one with room the standby. *Room* is spans / helpers, apart for
owners and standbys: rounded down, and up for as many helpers as it takes. So all own equal shares, but for one span;
who is shunned (`unreached`) owns none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from blake3 import blake3

from dlc.comm.grid import Grid
from dlc.comm.ids import PeerId
from dlc.errors import ConfigError

SPANS_USUAL = 16
"""Enough for a share per helper in small swarms; each costs a handful of control messages per update."""
SPANS_MAX = 4096
CODECS = ("fp32", "fp16", "bf16")
LAYOUT_BYTES = 16

Assignment = tuple[tuple[PeerId, PeerId | None], ...]
"""(owner, standby) of each span; no standby where there is one helper only."""


@dataclass(frozen=True)
class Spans:
    """The layout of one parameter server: the same on all peers. ConfigError where n does not fit the grid."""

    grid: Grid
    n: int
    """Number of spans, 1 to the number of chunks."""

    def __post_init__(self) -> None:
        if self.grid.codec not in CODECS:
            raise ConfigError(
                f"codec {self.grid.codec!r} loses what nobody keeps in a parameter server: use {', '.join(CODECS)}"
            )
        if not 1 <= self.n <= min(SPANS_MAX, self.grid.n_chunks):
            raise ConfigError(
                f"{self.n} spans of {self.grid.n_chunks} chunks: there must be at least 1, at most one per chunk, "
                f"and at most {SPANS_MAX}"
            )

    @classmethod
    def usual(cls, grid: Grid, n: int = 0) -> Spans:
        """With `n` spans, or as many as there are chunks if these are fewer; 0: SPANS_USUAL."""
        return cls(grid, min(n or SPANS_USUAL, grid.n_chunks))

    @cached_property
    def digest(self) -> bytes:
        """Equal exactly where two peers cut the same vector in the same way and encode it alike."""
        told = f"{self.grid.numel} {self.grid.chunk_elems} {self.grid.codec} {self.n}"
        return blake3(told.encode()).digest(LAYOUT_BYTES)

    def chunks(self, span: int) -> range:
        """The grid's chunks that make up the span. IndexError where there is no such span."""
        if not 0 <= span < self.n:
            raise IndexError(f"span {span} of {self.n}")
        total = self.grid.n_chunks
        return range(span * total // self.n, (span + 1) * total // self.n)

    def elements(self, span: int) -> tuple[int, int]:
        """[start, stop) of the span in the vector."""
        chunks = self.chunks(span)
        return self.grid.span(chunks[0])[0], self.grid.span(chunks[-1])[1]

    def numel(self, span: int) -> int:
        start, stop = self.elements(span)
        return stop - start

    def share(self, span: int) -> float:
        """Part of the vector, above 0 and at most 1."""
        return self.numel(span) / self.grid.numel

    def wire_sizes(self, span: int) -> tuple[int, ...]:
        """Length in bytes of the payload of each of its chunks."""
        return tuple(self.grid.wire_bytes(chunk) for chunk in self.chunks(span))


@lru_cache(maxsize=8)
def assign(n_spans: int, helpers: tuple[PeerId, ...], shunned: frozenset[PeerId] = frozenset()) -> Assignment:
    """Owner and standby of each span; the order of `helpers` is of no account. shunned: those of them that are to own
    nothing. ValueError where nobody is left."""
    owners = [helper for helper in helpers if helper not in shunned]
    if not owners:
        raise ValueError("spans need at least one helper")
    owned = dict.fromkeys(owners, 0)
    backed = dict.fromkeys(helpers, 0)
    found = []
    for span in range(n_spans):
        ranked = ranking(span, helpers)
        owner = _first_with_room([helper for helper in ranked if helper in owned], owned, n_spans)
        owned[owner] += 1
        others = [helper for helper in ranked if helper != owner]
        standby = _first_with_room(others, backed, n_spans) if others else None
        if standby is not None:
            backed[standby] += 1
        found.append((owner, standby))
    return tuple(found)


def ranking(span: int, helpers: Sequence[PeerId]) -> list[PeerId]:
    """The helpers in the order in which this span prefers them."""
    return sorted(helpers, key=lambda helper: blake3(f"{span} {helper}".encode()).digest(16))


def _first_with_room(ranked: Sequence[PeerId], load: dict[PeerId, int], n_spans: int) -> PeerId:
    """The least loaded where nobody has room: only standbys can come to that, as an owner is not its own."""
    room, more = divmod(n_spans, len(load))
    taken = sum(carried > room for carried in load.values())
    fits = (h for h in ranked if load[h] < room or (load[h] == room and taken < more))
    return next(fits, min(ranked, key=lambda h: load[h]))
