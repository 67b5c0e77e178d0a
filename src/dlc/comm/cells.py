"""Moshpit's grid: which peers average together in which round. Pure.

N peers stand on a d-dimensional grid with sides M_1 ... M_d, whose product P is at most N; peer i of the sorted
membership in cell i mod P, so every cell is taken, by floor(N / P) peers or one more. In round k (of d) a group is a
line of cells along axis k: all peers whose other coordinates are equal.

Exact for any N, where nobody fails: let T(c) be the number of peers (or the sum of weights) whose vectors are in the
mean that cell c holds. At first each peer holds its own, T = 1. In round k a cell counts with T(c), once, whether one
peer stands in it or two, who hold the same: each takes T(c) / peers in c as its weight. The group's mean is then that
of all peers in the line's slab, and its total weight their number. After d rounds that is everybody (Ryabinin et al.
2021, arXiv 2103.03239, for N = M^d).

In the first round the peers of one cell hold different vectors, and each counts by itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from dlc.errors import UsageError

T = TypeVar("T")

GROUP_SIZE = 8
"""Usual side: few enough to meet in time, and a failure costs little; many enough that two rounds reach 64 peers."""


@dataclass(frozen=True, slots=True)
class Cells:
    """A grid. `sides` are at least 2 each, or () for a single peer."""

    n: int
    """Peers."""
    sides: tuple[int, ...]

    @property
    def dims(self) -> int:
        """Rounds until everybody has the mean."""
        return len(self.sides)

    @property
    def n_cells(self) -> int:
        return math.prod(self.sides)

    def cell(self, peer: int) -> tuple[int, ...]:
        """Coordinates of peer i of the sorted membership."""
        index, coordinates = peer % self.n_cells, []
        for side in self.sides:
            coordinates.append(index % side)
            index //= side
        return tuple(coordinates)

    def line(self, peer: int, axis: int) -> tuple[int, ...]:
        """What all members of its group along this axis have in common: the other coordinates."""
        cell = self.cell(peer)
        return cell[:axis] + cell[axis + 1 :]

    def group(self, peer: int, axis: int) -> tuple[int, ...]:
        """The peers of its group along this axis, itself among them, ascending."""
        line = self.line(peer, axis)
        return tuple(other for other in range(self.n) if self.line(other, axis) == line)

    @property
    def group_max(self) -> int:
        """Peers of its largest group."""
        peers = Counter[tuple[int, tuple[int, ...]]]()
        for cell, n_peers in Counter(self.cell(peer) for peer in range(self.n)).items():
            for axis in range(self.dims):
                peers[axis, cell[:axis] + cell[axis + 1 :]] += n_peers
        return max(peers.values(), default=1)


def lines_of(cells: Cells, members: Sequence[T], me: T) -> list[list[T]]:
    """Of the peer `me` of the sorted membership: its group along each axis, itself among them; [[me]] of one alone."""
    index = members.index(me)
    return [[members[i] for i in cells.group(index, axis)] for axis in range(cells.dims)] or [[me]]


def grid_of(n: int, group_size: int | None = None, dims: int | None = None) -> Cells:
    """The grid for n peers.

    group_size: of about so many, GROUP_SIZE where nothing is said: the fewest dimensions that do with groups no larger,
    but for what does not divide. dims: so many dimensions. Sides are as equal as can be, and as long as n allows.
    UsageError where n peers cannot fill 2^dims cells.
    """
    if n < 1:
        raise UsageError("a grid needs at least one peer")
    if group_size is not None and group_size < 2:
        raise UsageError(f"groups of {group_size} average nothing: group_size must be at least 2")
    if dims is not None and n < 2**dims:
        here = "there is 1" if n == 1 else f"there are {n}"
        raise UsageError(f"a grid of {dims} dimensions needs at least {2**dims} peers, and {here}: set dims lower")
    if n == 1:
        return Cells(1, ())
    if dims is None:
        size, dims = group_size or GROUP_SIZE, 1
        while size**dims < n and 2 ** (dims + 1) <= n:
            dims += 1
    side = max(2, int(round(n ** (1 / dims))))
    while side**dims > n:
        side -= 1
    while (side + 1) ** dims <= n:
        side += 1
    sides = [side] * dims
    for axis in range(dims):
        if math.prod(sides) // side * (side + 1) <= n:
            sides[axis] += 1
    return Cells(n, tuple(sides))
