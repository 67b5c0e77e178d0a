"""What a coordinator may propose, given the promises it got: the safety core of Paxos, as one pure function.

The first rule that applies:
  1. some promise carries an accepted decree: that of the highest ballot, verbatim (it may have been decided);
     should two differ there, because somebody's bytes are wrong, the one that most promisers hold;
  2. some promise carries a plan of kind round: its roster (never enlarged within the slot), keeping every held chunk
     of the same channel whose contributors all stand in that roster with the same weight and lease position, and were
     clipped to the same median, if at all;
  3. neither: free choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dlc.comm.entries import ROUND, Part
from dlc.comm.ids import Ballot, Voter
from dlc.comm.messages import Decree, FixedChunk, HeldChunk, Plan, Promise


@dataclass(frozen=True, slots=True)
class Again:
    """Rule 1: propose this decree, all chunks fixed, held by those who accepted it."""

    decree: Decree
    fixed: tuple[FixedChunk, ...]


@dataclass(frozen=True, slots=True)
class Resume:
    """Rule 2: the round of this plan goes on; the fixed chunks stay, others are reduced by new owners."""

    plan: Plan
    fixed: tuple[FixedChunk, ...]


Choice = Again | Resume | None

HOLDERS_MAX = 3
"""Holders named per fixed chunk: all of a large swarm would make a plan of thousands of chunks too long to send."""


def choose(promises: Mapping[Voter, Promise]) -> Choice:
    accepted = _highest_accepted(promises)
    if accepted is not None:
        decree, holders = accepted
        fixed = tuple(FixedChunk(c, digest, _few(holders, c)) for c, digest in enumerate(decree.hashes))
        return Again(decree, fixed)
    plans = [p.plan for p in promises.values() if p.plan is not None and p.plan.entry.kind == ROUND]
    if not plans:
        return None
    plan = max(plans, key=lambda p: p.ballot)
    return Resume(plan, _reusable(plan, promises))


def _highest_accepted(promises: Mapping[Voter, Promise]) -> tuple[Decree, tuple[Voter, ...]] | None:
    """The decree, and who holds its bytes. In one ballot all accept the same, unless somebody's bytes are wrong: then
    the one that most hold, as others may have learned it where that peer was not awake."""
    accepted = [
        (p.accepted_ballot, p.accepted, v)
        for v, p in sorted(promises.items())
        if p.accepted is not None and p.accepted_ballot is not None
    ]
    if not accepted:
        return None
    top = max(ballot for ballot, _, _ in accepted)
    holders = {d: tuple(v for _, held, v in accepted if held == d) for ballot, d, _ in accepted if ballot == top}
    decree = min(holders, key=lambda d: (-len(holders[d]), d.hashes))
    return decree, holders[decree]


def _reusable(plan: Plan, promises: Mapping[Voter, Promise]) -> tuple[FixedChunk, ...]:
    """Per chunk the candidate that most promisers hold (then the highest ballot, then the hash). What a promiser holds
    is of its plan, which may be a round of another channel: another vector, whatever its roster."""
    standing = set(plan.entry.roster)
    holders: dict[int, dict[tuple[Ballot, bytes], list[Voter]]] = {}
    for voter, promise in sorted(promises.items()):
        if promise.plan is None or not _alike(promise.plan, plan):
            continue
        for held in promise.held:
            if _stands(held, promise, standing):
                by_hash = holders.setdefault(held.chunk, {})
                by_hash.setdefault((held.ballot, held.hash), []).append(voter)
    fixed = []
    for chunk, candidates in sorted(holders.items()):
        (_, digest), voters = max(candidates.items(), key=lambda item: (len(item[1]), item[0]))
        fixed.append(FixedChunk(chunk, digest, _few(tuple(voters), chunk)))
    return tuple(fixed)


def _alike(held: Plan, plan: Plan) -> bool:
    """What was reduced under the first may be what the second would reduce. The median of other contributors' norms is
    another one."""
    if held.entry.channel != plan.entry.channel or held.norms != plan.norms:
        return False
    return not plan.norms or held.entry.roster == plan.entry.roster


def _few(holders: tuple[Voter, ...], chunk: int) -> tuple[Voter, ...]:
    """Others for each chunk, so that no holder is asked for everything."""
    if len(holders) <= HOLDERS_MAX:
        return holders
    start = chunk % len(holders)
    return (holders[start:] + holders[:start])[:HOLDERS_MAX]


def _stands(held: HeldChunk, promise: Promise, roster: set[Part]) -> bool:
    """A chunk that nobody contributed to is better reduced again."""
    included = promise.rosters[held.included]
    return bool(included) and all(part in roster for part in included)
