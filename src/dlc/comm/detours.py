"""To whom a peer gives in a step of gossip where vectors do not reach all of its neighbours.

The share of a neighbour that is out of reach goes to another peer that is not, drawn from (seed, peer, step). Nobody
tells that one, so it cannot know that it should give to me: it gives something back to whoever gave to it, and is not
one of those who do so in the graph. So an edge that carries nothing becomes edges in both directions to peers that can
be reached, to each of them now and then; where one peer reaches all others, that joins what the cut has taken apart.
Shares stay here where there is nobody else. What does not change is that mass is neither made nor lost.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from typing import Generic, TypeVar

from dlc.comm.graphs import neighbours

BACK_SHARE = 0.25
"""Of my mass, to all together that get something back. In every graph at most a half goes to neighbours."""
T = TypeVar("T")


class Detours(Generic[T]):
    """Of one peer, step by step. `members` are sorted alike on all peers, and `me` is among them."""

    def __init__(self, graph: str, me: T, seed: int) -> None:
        self._graph, self._me, self._seed = graph, me, seed
        self._came: dict[T, int] = {}
        """Who gave to me since I gave last, and in which of its steps."""
        self._instead: set[T] = set()
        """To whom I gave in a neighbour's place: what they give out of the graph is what I get back."""

    def came(self, giver: T, t: int) -> None:
        """Its gift of step t was taken in."""
        self._came[giver] = t

    def gives(self, members: Sequence[T], t: int, apart: Collection[T]) -> list[tuple[T, float]]:
        """(peer, share) of each gift of step t, `apart` being those out of reach. Asked once in each step."""
        graph = dict(neighbours(self._graph, members, self._me, t, self._seed))
        shares = dict(self.ahead(members, t, apart))
        back = [v for v in self._back(members) if v not in shares and v not in apart]
        self._came = {}
        self._instead |= shares.keys() - graph.keys()
        self._instead &= set(members)
        return [*shares.items(), *((v, BACK_SHARE / len(back)) for v in back)]

    def ahead(self, members: Sequence[T], t: int, apart: Collection[T]) -> list[tuple[T, float]]:
        """The same of any step, without what is given back."""
        shares = dict(neighbours(self._graph, members, self._me, t, self._seed))
        others = [v for v in members if v != self._me and v not in shares and v not in apart]
        rng = random.Random(f"{self._seed} {members.index(self._me)} {t}")
        for out_of_reach in [v for v in shares if v in apart]:
            share = shares.pop(out_of_reach)
            if others:
                other = rng.choice(others)
                shares[other] = shares.get(other, 0.0) + share
        return list(shares.items())

    def waits_for(self, members: Sequence[T], t: int, apart: Collection[T]) -> list[T]:
        """Who gives to me in step t in any case."""
        return [v for v in members if v != self._me and v not in apart and self._is_given_by(v, members, t)]

    def _is_given_by(self, giver: T, members: Sequence[T], t: int) -> bool:
        return any(to == self._me for to, _ in neighbours(self._graph, members, giver, t, self._seed))

    def _back(self, members: Sequence[T]) -> list[T]:
        """To whom something is due that gave to me."""
        found = []
        for giver, t in self._came.items():
            if giver not in members or self._is_given_by(giver, members, t):
                continue
            if giver in self._instead:
                self._instead.discard(giver)
            else:
                found.append(giver)
        return found
