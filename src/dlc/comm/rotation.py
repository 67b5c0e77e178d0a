"""Whom a peer meets in which round, of groups that change from round to round, while it trains in between. Pure.

Rounds are counted, and the number says who is to meet: a line of Moshpit's grid, a pair. Nobody hands the numbers out,
and peers come to be at different ones: they differ in speed, one was away, a group went on without another. So each
shows its `Place` to its mates, all that it may ever meet, and

- who comes to a round goes on to the furthest in which one of them waits, and passes over those that all others of its
  group have passed;
- who waits goes on, too, as soon as one of them waits in a later round, or all others of its group have passed its own;
- nobody waits for those who have passed the round.

Of equal speed, or where one's phase is a multiple of another's, they could still pass each other by for ever as their
waits do not overlap. So some cycles are patient: in their rounds each waits for those that are not much slower than
itself for as long as these train, and average, between two rounds. Those of about one speed come at the same time from
then on, as long as their phases vary by less than they usually wait.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from dlc.comm.calls import GoneOn
from dlc.comm.ids import PeerId

PATIENT, OF_CYCLES = (1, 2), 16
"""Which of so many cycles are patient: two in a row, as who passes over rounds may pass over one."""
SLOWER = 1.5
"""One is not much slower, and not late either, whose phase takes up to so many times as long as one's own, or as it did
before."""
PASSES_MAX = 1000
"""So many rounds are passed over at once."""
ROUND_MAX = 1 << 53
FOLLOWED_MAX = 1 << 32
"""Nobody makes so many rounds: who shows a later one is not followed, as those after ROUND_MAX could not be shown."""
AWAY_S_MAX, EXCHANGE_S_MAX = 86400.0, 3600.0
"""Who trains, or averages, for longer shows as much: nobody waits for it any longer than that."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a peer shows of itself."""

    round: int
    """The one that it waits for, or comes to next."""
    waits: bool
    """It waits now."""
    averages: bool
    """It averages the round before; neither: it trains."""
    away_s: float
    """For how long it last trained between two rounds; AWAY_S_MAX at most."""
    exchange_s: float
    """For how long it last averaged; EXCHANGE_S_MAX at most."""

    @property
    def sound(self) -> bool:
        good_times = 0 <= self.away_s <= AWAY_S_MAX and 0 <= self.exchange_s <= EXCHANGE_S_MAX
        return 0 <= self.round <= ROUND_MAX and good_times

    @property
    def left_s(self) -> float:
        """How long it may take until it comes to its round, from when this was shown on."""
        return 0.0 if self.waits else self.away_s + self.exchange_s * self.averages

    def late(self, shown_s: float) -> bool:
        """Whether it should have come to its round by now, `shown_s` seconds after it showed this."""
        return not self.waits and shown_s > SLOWER * self.left_s


@dataclass(frozen=True, slots=True)
class Seen:
    """What the others show, of those who are up."""

    places: Mapping[PeerId, Place]
    late: Collection[PeerId] = ()
    """Who of them should have come to its round long since."""

    def last(self, peers: Collection[PeerId]) -> int:
        """Where the last of these is; of one that has shown nothing yet it is not known that it has passed any."""
        return min((self.places[peer].round if peer in self.places else 0 for peer in peers), default=0)

    def furthest(self, peers: Collection[PeerId]) -> int:
        """Of the rounds in which some of these wait; -1: none does."""
        return max((place.round for peer, place in self.places.items() if place.waits and peer in peers), default=-1)

    def quick(self, peers: Collection[PeerId], at: int, away_s: float) -> dict[PeerId, float]:
        """Which of these have not passed round `at`, and are not much slower than one that trains for `away_s`; and how
        long it may take until they come."""
        found = dict[PeerId, float]()
        for peer in self.places.keys() & set(peers) - set(self.late):
            place = self.places[peer]
            if place.round <= at and 0 < place.away_s <= SLOWER * away_s:
                found[peer] = place.left_s
        return found


@dataclass(frozen=True, slots=True)
class Turn:
    """One round."""

    round: int
    others: frozenset[PeerId]
    """Who is to come."""
    mates: frozenset[PeerId]
    """All others that it may meet in some round: they see its place, and it sees theirs."""
    quick: frozenset[PeerId]
    """Whom it waits for longer than usual; none but in patient cycles."""
    usual_s: float
    """How long it waits for all others that have not passed the round."""
    patience_s: float
    """How long it waits for `quick`."""

    def awaited(self, seen: Seen, waited_s: float) -> frozenset[PeerId]:
        """Who of the others may still come, after so long a wait. GoneOn: they are in a later round."""
        if seen.furthest(self.mates) > self.round:
            raise GoneOn
        left = self.others - {peer for peer in self.others if seen.last([peer]) > self.round}
        if self.others and not left:
            raise GoneOn
        return left if waited_s < self.usual_s else left & self.quick & seen.places.keys() - set(seen.late)


def next_turn(
    at: int,
    group: Callable[[int], Collection[PeerId]],
    mates: Collection[PeerId],
    cycle: int,
    seen: Seen,
    usual_s: float,
    away_s: float,
) -> Turn:
    """The round that a peer waits for from now on, `at` or a later one.

    group: the others of a round. cycle: so many rounds are one. away_s: for how long this peer has trained.
    """
    at = max(at, seen.furthest(mates), seen.last(mates))
    for _ in range(PASSES_MAX):
        if seen.last(group(at)) <= at:
            break
        at += 1
    others = group(at)
    quick = seen.quick(others, at, away_s) if at // cycle % OF_CYCLES in PATIENT else {}
    patience_s = usual_s + max(quick.values(), default=0.0)
    return Turn(at, frozenset(others), frozenset(mates), frozenset(quick), usual_s, patience_s)
