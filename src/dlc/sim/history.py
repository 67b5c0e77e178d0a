"""The tree of all entries that were ever applied by anybody in one schedule."""

from __future__ import annotations

from dlc.comm.entries import EMPTY, Entry

Fork = tuple[bytes, bytes, bytes]
"""Last common entry, its child towards the one that commits, its child towards the other."""


class History:
    def __init__(self) -> None:
        self._parent: dict[bytes, bytes] = {}
        self._depth: dict[bytes, int] = {EMPTY: 0}
        self._children: dict[bytes, int] = {}
        self._committed: set[Fork] = set()
        self.forks = 0

    def add(self, entry: Entry) -> None:
        self._parent[entry.hash] = entry.parent
        self._depth[entry.hash] = entry.depth
        self._children[entry.parent] = self._children.get(entry.parent, 0) + 1
        self.forks += self._children[entry.parent] > 1

    def fork(self, a: bytes, b: bytes) -> Fork | None:
        """Where the logs of a and b part; None where one is part of the other."""
        if not self.forks or a not in self._depth or b not in self._depth:
            return None
        child_a = child_b = b""
        while a != b:
            if self._depth[a] >= self._depth[b]:
                child_a, a = a, self._parent[a]
            else:
                child_b, b = b, self._parent[b]
        return (a, child_a, child_b) if child_a and child_b else None

    def commits(self, fork: Fork) -> bool:
        """A round was committed on the first side while the other had awake peers; True if the other did so before."""
        self._committed.add(fork)
        return (fork[0], fork[2], fork[1]) in self._committed

    def distance(self, behind: bytes, ahead: bytes) -> int | None:
        """Entries from `behind` to `ahead` along one log; None where it is no ancestor."""
        if behind not in self._depth or ahead not in self._depth:
            return None
        steps = 0
        while self._depth[ahead] > self._depth[behind]:
            ahead, steps = self._parent[ahead], steps + 1
        return steps if ahead == behind else None
