"""How often others step, beside how often I do; and so how often they are given to. Pure.

Who steps more often than its neighbours would give more often than it is given to. It would hold ever less weight, down
to where what it gives in a time is what it gets, and what it learns counts with that weight: with twice the steps, half
each. So a slower peer gets one gift for as many of the graph's as I make steps to one of its own. Between two peers
then goes, in either direction, what the slower one can return (the rule of Metropolis et al. 1953), and in the long run
all hold equal weights, whatever the pace of each. One that steps no more is given nothing more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dlc.comm.ids import Voter

WINDOW = 16
"""Steps of mine, at least, after which a count begins anew; what is told is of one to two windows."""


class Mark(NamedTuple):
    mine: int
    theirs: int


class Strides:
    """Steps that I made, and that others told they made, since some step of mine of late."""

    def __init__(self) -> None:
        self.made = 0
        """Steps that I began."""
        self._every = 1
        self._told: dict[Voter, int] = {}
        self._marks: dict[Voter, tuple[Mark, Mark]] = {}
        """Where the count of each began, and where the next one will."""
        self._credit: dict[Voter, float] = {}
        """Part of a gift that each has coming."""

    def step(self, told: Mapping[Voter, int], every: int = 1) -> None:
        """I begin a step. `told`: by peer that is up, how many it has made, as it tells each `every`-th time."""
        self.made, self._every = self.made + 1, every
        self._told = dict(told)
        marks, self._marks = self._marks, {}
        for voter, theirs in told.items():
            here = Mark(self.made, theirs)
            since, later = marks.get(voter, (here, here))
            if theirs < later.theirs:  # it counts anew
                since = later = here
            if self.made - later.mine >= WINDOW * every:
                since, later = later, here
            self._marks[voter] = since, later
        self._credit = {voter: self._credit[voter] for voter in self._credit.keys() & told.keys()}

    def ratio(self, voter: Voter) -> float:
        """Steps of this peer to mine, at most 1. What it did not tell yet, at most its last `every` steps, is taken to
        have been made: so equal paces are 1, whoever is a step ahead of the other. 0: it told nothing for as long as
        two of its notices take at my pace, as one that does not step."""
        if voter not in self._marks:
            return 1.0
        since = self._marks[voter][0]
        mine, theirs = self.made - since.mine, self._told[voter] - since.theirs
        if not theirs and mine > 2 * self._every:
            return 0.0
        return min(1.0, (theirs + self._every) / mine) if mine else 1.0

    def due(self, voter: Voter) -> bool:
        """In a step whose graph has me give to this peer: whether I do. Called once."""
        credit = self._credit[voter] = min(2.0, self._credit.get(voter, 0.0) + self.ratio(voter))
        return credit >= 1.0

    def gave(self, voter: Voter) -> None:
        """It was due, and was given something."""
        self._credit[voter] -= 1.0
