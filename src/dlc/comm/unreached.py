"""Which helpers of a parameter server do not reach which trainers: who owns a span must reach all who train.

Each helper sees for itself which trainers answer it by a relay only, which carries no vectors, and tells the other
helpers once that has been so for a while (`TellViews`). From what all have told follows who is *shunned*: whoever
does not reach more trainers than some other helper does. A trainer that reaches none changes nothing, and one that is
silent for a moment neither: spans move only once it is away.
"""

from __future__ import annotations

from collections.abc import Iterable

from dlc.comm.ids import PeerId
from dlc.comm.roles import HELPER, TRAINER
from dlc.comm.seats import Host

APART_S = 10.0
"""A trainer is said to be out of reach, or in reach again, once that has been so for this long: spans move by it."""


class Unreached:
    def __init__(self, host: Host) -> None:
        self.host = host
        self.mine: tuple[PeerId, ...] = ()
        """Trainers that this helper does not reach, sorted; what it tells."""
        self._differs: dict[PeerId, float] = {}
        """Trainers with whom it is not as I tell: since when."""
        self._told: dict[PeerId, tuple[PeerId, ...]] = {}
        """By helper."""

    def look(self) -> bool:
        """Whether there is something else to tell than before."""
        heard = {voter.peer for voter in self.host.living(TRAINER)}
        apart = {peer for peer in heard if self.host.members.relay_for(peer) is not None}
        before = self._there().intersection(self.mine)
        self._differs = {peer: self._differs.get(peer, self.host.now) for peer in (apart ^ before) & heard}
        due = {peer for peer, since in self._differs.items() if self.host.now >= since + APART_S}
        known, self.mine = self.mine, tuple(sorted(before ^ due))
        return known != self.mine

    def _there(self) -> set[PeerId]:
        """Trainers that live, or were heard of a moment ago."""
        return {voter.peer for voter in self.host.voters(TRAINER) if not self.host.away(voter)}

    def told(self, helper: PeerId, trainers: tuple[PeerId, ...]) -> None:
        self._told[helper] = trainers

    def shunned(self, helpers: Iterable[PeerId]) -> frozenset[PeerId]:
        """Of these, of whom I am one: those that reach fewer of the trainers than some other does."""
        living = {voter.peer for voter in self.host.living(HELPER)}
        self._told = {helper: trainers for helper, trainers in self._told.items() if helper in living}
        told, there = self._told | {self.host.me.peer: self.mine}, self._there()
        missed = {helper: len(there.intersection(told.get(helper, ()))) for helper in helpers}
        least = min(missed.values(), default=0)
        return frozenset(helper for helper, n in missed.items() if n > least)
