"""The way of one peer through Moshpit's grid: which group it meets next, and with which weight. Pure.

Rounds are named (cycle, axis), a cycle being one round along each axis. Nobody hands these names out: each peer counts
for itself, and joins the furthest cycle in which it sees others wait: within a cycle nobody skips a round, since others
that wait in the next may be of lines that are quicker. The grid is that of the membership when the cycle began here;
who dies in it is not waited for, who comes takes part in the next.

In one averaging of a fixed vector the weight that a peer brings to a round is that of everybody who is in its vector by
now, shared with those who hold the same vector: all members of its last group. So `label` is that group's name, and the
one who forms the next group divides by those who come with it (cells.py says why the mean is exact then).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dlc.comm.cells import Cells, grid_of
from dlc.comm.ids import PeerId


@dataclass(frozen=True, slots=True)
class Leg:
    """One round."""

    cycle: int
    axis: int
    key: str
    """The group's: peers of the same line meet under it."""
    peers: tuple[PeerId, ...]
    """Whom to expect there, this peer among them."""
    cells: Cells


class Course:
    """group_size, dims: as in `grid_of`."""

    def __init__(self, name: str, group_size: int | None, dims: int | None) -> None:
        self.name = name
        self._group_size, self._dims = group_size, dims
        self.cycle, self.axis = 0, 0
        """The next round."""
        self._members: tuple[PeerId, ...] = ()
        self._cells: Cells | None = None

    @property
    def prefix(self) -> str:
        """Of all keys of this name."""
        return f"moshpit/{self.name}#"

    def begin_cycle(self) -> None:
        """An averaging that wants whole cycles begins: not in the middle of one that was left."""
        if self.axis:
            self.cycle, self.axis, self._cells = self.cycle + 1, 0, None

    def leg(self, members: Sequence[PeerId], me: PeerId, waiting: Iterable[str]) -> Leg:
        """The next round. members: who takes part and is up, sorted, me among them. waiting: keys under which somebody
        waits now. UsageError where there are too few for `dims`."""
        furthest = max((at for key in waiting if (at := self._place(key)) is not None), default=(0, 0))
        if furthest[0] > self.cycle:
            (self.cycle, self.axis), self._cells = furthest, None
        if self._cells is None or me not in self._members:
            self._members, self._cells = tuple(members), grid_of(len(members), self._group_size, self._dims)
        cells = self._cells
        if self.axis >= max(1, cells.dims):
            self.cycle, self.axis, self._cells = self.cycle + 1, 0, None
            return self.leg(members, me, ())
        index = self._members.index(me)
        line = ".".join(map(str, cells.line(index, self.axis)))
        here = set(members)
        group = cells.group(index, self.axis) if cells.sides else (index,)
        peers = tuple(self._members[i] for i in group if self._members[i] in here)
        return Leg(self.cycle, self.axis, f"{self.prefix}{self.cycle}.{self.axis}/{line}", peers, cells)

    def passed(self) -> bool:
        """The round is over; True if it was the last of its cycle."""
        assert self._cells is not None
        self.axis += 1
        if self.axis < self._cells.dims:
            return False
        self.cycle, self.axis, self._cells = self.cycle + 1, 0, None
        return True

    def _place(self, key: str) -> tuple[int, int] | None:
        """(cycle, axis) of a key of mine; None for others."""
        if not key.startswith(self.prefix):
            return None
        cycle, _, axis = key[len(self.prefix) :].partition("/")[0].partition(".")
        return (int(cycle), int(axis)) if cycle.isdecimal() and axis.isdecimal() else None
