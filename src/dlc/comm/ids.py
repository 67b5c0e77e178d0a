"""Names of things on the wire: peers, voters, ballots."""

from __future__ import annotations

from typing import NamedTuple

PeerId = str
"""Derived from a peer's public key (32 characters of base32); survives restarts."""


class Voter(NamedTuple):
    """One *process* of a peer. A restarted peer keeps `peer` and gets a greater `inc`: it is a new voter."""

    peer: PeerId
    inc: int
    """Boot counter in the upper bits, 32 random bits in the lower."""

    def __str__(self) -> str:
        return f"{self.peer[:8]}.{self.inc >> 32}"


class Ballot(NamedTuple):
    """A proposal number of single-decree Paxos; ordered by counter, then voter, and owned by that voter."""

    counter: int
    voter: Voter

    def __str__(self) -> str:
        return f"{self.counter}@{self.voter}"


NOBODY = Voter("", 0)
LOWEST = Ballot(-1, NOBODY)
"""Below every ballot that a voter can own."""
