"""Who measures whom, when: a round-robin tournament, so that no host is ever in two measurements."""

from __future__ import annotations

Pair = tuple[int, int]
"""(from, to)."""


def turns(n: int) -> list[list[Pair]]:
    """Every ordered pair of n hosts once; within a turn every host is in one pair at most. Circle method.

    One host keeps its place and the others rotate; with an odd number there is one place that nobody holds.
    """
    places = list(range(n)) + ([-1] if n % 2 else [])
    half = len(places) // 2
    found: list[list[Pair]] = []
    for _ in range(len(places) - 1):
        pairs = [(a, b) for a, b in zip(places[:half], reversed(places[half:]), strict=True) if a >= 0 and b >= 0]
        found += [pairs, [(b, a) for a, b in pairs]]
        places = [places[0], places[-1], *places[1:-1]]
    return [turn for turn in found if turn]
