"""The way of one peer through whole cycles of Moshpit's grid: which group it meets next, and with which weight. Pure.

It is for vectors that hold still; for those that are trained on between two rounds there is rotation.py.

Rounds are named (cycle, axis), a cycle being one round along each axis. Nobody hands these names out: each peer counts
for itself, and joins the furthest cycle in which it sees others wait: within a cycle nobody skips a round, since others
that wait in the next may be of lines that are quicker. Who waits itself meanwhile for the first round of a cycle goes
where it sees any of its line in a later one: of equal speed, a cycle apart, they would pass each other by for ever,
also some who are together here. In a later round, which has something to lose, it goes where nobody else is left, and
does not wait for those who are further. The grid is that of the membership when the cycle began here; who dies in it
is not waited for, who comes takes part in the next.

Who has been through whole rounds only has all that its cell stands for, and says so to its next group with the `mark`
of the grid and the name of its last group (`Call.gather`): a round was whole if everybody in it says the same of the
grid, somebody was there for each of `parts`, and those of one part name one group. A line whose members came at
different times may have met as two groups that were whole each: what both bring along the next axis would count twice.
So by the last round it is known whether the mean is that of all peers of the grid, whatever others saw.

In one averaging of a fixed vector the weight that a peer brings to a round is that of everybody who is in its vector by
now, shared with those who hold the same vector: all members of its last group. So `label` is that group's name, and the
one who forms the next group divides by those who come with it (cells.py says why the mean is exact then).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from blake3 import blake3

from dlc.comm.calls import GoneOn
from dlc.comm.cells import Cells, grid_of
from dlc.comm.ids import PeerId
from dlc.comm.rotation import FOLLOWED_MAX


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
    mark: bytes
    """Names the grid, by its sides and peers."""
    parts: tuple[frozenset[PeerId], ...]
    """What the line's mean is made of: of each, one peer is needed, who died since the cycle began or not. In the first
    round of a cycle each peer has its own vector, afterwards those of a cell have the same."""

    def word(self, label: str) -> bytes:
        """What one who has lacked nothing before gives the group to gather. label: as it gives it, the name of its last
        group; empty in the first round."""
        return self.mark + label.encode()

    def whole(self, gathered: Mapping[PeerId, bytes]) -> bool:
        """Whether nothing is missing of what a group of these members has averaged, and nothing is in it twice, if no
        contribution is missing. gathered: `word` of those who have lacked nothing before."""
        if {word[: len(self.mark)] for word in gathered.values()} != {self.mark}:
            return False
        return all(len({gathered[peer] for peer in part & gathered.keys()}) == 1 for part in self.parts)


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
        """An averaging that wants whole cycles begins: not in the middle of one that was left, nor on its grid."""
        if self.axis:
            self.cycle, self.axis = self.cycle + 1, 0
        self._cells = None

    def leg(self, members: Sequence[PeerId], me: PeerId, waiting: Iterable[str]) -> Leg:
        """The next round. members: who takes part and is up, sorted, me among them. waiting: keys under which somebody
        waits now. UsageError where there are too few for `dims`."""
        furthest = max((at for key in waiting if (at := self._place(key)) is not None), default=(0, 0))
        if furthest[0] > self.cycle:
            (self.cycle, self.axis), self._cells = furthest, None
        if self._cells is None:
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
        holders = dict[object, set[PeerId]]()
        for i in group:
            holders.setdefault(cells.cell(i) if self.axis else i, set()).add(self._members[i])
        parts = tuple(map(frozenset, holders.values()))
        mark = blake3("\0".join([str(cells.sides), *self._members]).encode()).digest(8)
        return Leg(self.cycle, self.axis, f"{self.prefix}{self.cycle}.{self.axis}/{line}", peers, cells, mark, parts)

    def awaited(self, leg: Leg, waiting: Mapping[str, Collection[PeerId]]) -> frozenset[PeerId]:
        """Who may still come to this round. waiting: the others who wait, by key. GoneOn: that is where they are."""
        further = set[PeerId]()
        for key, peers in waiting.items():
            place = self._place(key)
            if place is not None and place[0] > leg.cycle:
                further.update(peers)
        left = frozenset(leg.peers) - further
        if len(left) < len(leg.peers) and (leg.axis == 0 or len(left) == 1):
            raise GoneOn
        return left

    def passed(self) -> bool:
        """The round is over; True if it was the last of its cycle."""
        assert self._cells is not None
        self.axis += 1
        if self.axis < self._cells.dims:
            return False
        self.cycle, self.axis, self._cells = self.cycle + 1, 0, None
        return True

    def _place(self, key: str) -> tuple[int, int] | None:
        """(cycle, axis) of a key of mine; None for others, and for a cycle that nobody can be at."""
        if not key.startswith(self.prefix):
            return None
        cycle, _, axis = key[len(self.prefix) :].partition("/")[0].partition(".")
        if not (cycle.isdecimal() and axis.isdecimal()) or int(cycle) > FOLLOWED_MAX:
            return None
        return int(cycle), int(axis)
