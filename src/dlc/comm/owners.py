"""Who owns which chunk of a round, and what a plan asks of each link: records and plans turned into `partition.py`.

The coordinator makes a plan by what the records say of everybody's links. Each member reads from it what it has to send
and receive. Records may differ a little between members; the plan is the same for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from dlc.comm.context import Context
from dlc.comm.entries import Part
from dlc.comm.grid import Grid
from dlc.comm.ids import Voter
from dlc.comm.log import Log, grid_of
from dlc.comm.messages import Plan
from dlc.comm.partition import Load, Member, counts, loads, time_s


@dataclass(frozen=True, slots=True)
class Shape:
    """A plan as `partition.py` sees it."""

    voters: tuple[Voter, ...]
    """Whose links take part: contributors, owners and recipients that are alive."""
    members: tuple[Member, ...]
    shares: tuple[float, ...]
    """Of the bytes that still have to be reduced."""
    vector_bytes: int
    """These bytes; above 0."""


def plan_round(
    ctx: Context,
    log: Log,
    roster: Collection[Part],
    grid: Grid | None,
    fixed: Collection[int],
    deciders: tuple[Voter, ...],
    mute: Collection[Voter],
    apart: Collection[tuple[Voter, Voter]],
) -> tuple[tuple[Voter, ...], tuple[int, ...]]:
    """(owners, assignment): every chunk that is not fixed gets an alive owner, in contiguous spans, so that the round
    takes the least time that the links allow.

    `grid`: None where the entry has no bulk. `mute`: peers from which no bulk came; they own something only where
    nobody else could. `apart`: pairs between which no bulk passes (`cut_off`). `owners` names all others that are
    alive: a slow one may own no chunk.
    """
    alive = sorted(v for v in (deciders or log.state.electorate) if ctx.members.alive(v))
    heard = [v for v in alive if v not in mute] or alive
    missed = cut_off(alive, apart)
    owners = tuple(v for v in heard if v not in missed) or tuple(heard)
    n_chunks = grid.n_chunks if grid is not None else 0
    open_chunks = [c for c in range(n_chunks) if c not in fixed]
    assignment = [-1] * n_chunks
    if grid is not None and open_chunks:
        contributors = {part.voter for part in roster}
        length = _result_length(grid, len(roster))
        members = [_member(ctx, v, v in contributors, v in owners, length) for v in alive]
        owned = dict(zip(alive, counts(len(open_chunks), members), strict=True))
        spans = (index for index, owner in enumerate(owners) for _ in range(owned[owner]))
        for chunk, owner in zip(open_chunks, spans, strict=True):
            assignment[chunk] = owner
    return owners, tuple(assignment)


def cut_off(voters: Collection[Voter], apart: Collection[tuple[Voter, Voter]]) -> set[Voter]:
    """Those who should own nothing, as the parts of another would not reach them, nor their results that one.

    Of two that are apart it is both, and the round may take longer than it would with them, but all of both is in its
    mean. Not for the sake of one that is apart from more than two thirds of the others, who would have to wait for the
    rest: then it alone owns nothing, and is in what it can reach.
    """
    of: dict[Voter, set[Voter]] = {v: set() for v in voters}
    for a, b in apart:
        if a != b and a in of and b in of:
            of[a].add(b)
            of[b].add(a)
    lonely = {v for v, others in of.items() if 3 * len(others) > 2 * (len(of) - 1)}
    return lonely | {v for v, others in of.items() if others - lonely}


def shape_of(ctx: Context, plan: Plan, recipients: Collection[Voter]) -> Shape | None:
    """None where nothing has to be reduced. `recipients`: who gets the results, myself among them."""
    if not plan.assignment:
        return None
    grid = grid_of(plan.entry)
    owned = Counter(plan.assignment)
    owned_bytes = {plan.owners[index]: n * grid.wire_bytes(0) for index, n in owned.items() if index >= 0}
    last = plan.assignment[-1]
    if last >= 0:
        owned_bytes[plan.owners[last]] += grid.wire_bytes(grid.n_chunks - 1) - grid.wire_bytes(0)
    total = sum(owned_bytes.values())
    if not total:
        return None
    contributors = {part.voter for part in plan.entry.roster}
    everybody = {*contributors, *recipients, *owned_bytes}
    voters = tuple(sorted(v for v in everybody if ctx.members.alive(v)))
    length = _result_length(grid, len(contributors))
    members = tuple(
        _member(ctx, v, v in contributors, v in owned_bytes, length if v in recipients else 0.0) for v in voters
    )
    return Shape(voters, members, tuple(owned_bytes.get(v, 0) / total for v in voters), total)


def all_sent(plan: Plan, n_voters: int, member: Voter, owed: Mapping[Voter, Collection[Voter]]) -> bool:
    """All results that `member` may lack are on their way to it: of owners, all others hold what it gets, and none of
    theirs waits any more. owed: of those who voted for this plan, for whom theirs wait.

    Never where half of the n_voters, with the casting vote, are all who hold them: so few are believed after a wait
    only. Nor where chunks are fixed: these are asked for, and nobody knows who has them by now.
    """
    if not plan.assignment or min(plan.assignment) < 0 or 2 * len(owed) <= n_voters:
        return False
    owners = {plan.owners[index] for index in set(plan.assignment)} - {member}
    return all(owner in owed and member not in owed[owner] for owner in owners)


def asked_Bps(shape: Shape, me: Voter) -> Load:
    """What my link has to carry so that the round takes no longer than the links allow; 0 where no rate is known."""
    seconds = time_s(shape.members, shape.shares, shape.vector_bytes)
    if not seconds or me not in shape.voters:
        return Load(0.0, 0.0)
    load = loads(shape.members, shape.shares, shape.vector_bytes)[shape.voters.index(me)]
    return Load(load.up / seconds, load.down / seconds)


def _result_length(grid: Grid, n_contributors: int) -> float:
    """How long a result is, in contributions."""
    return grid.result_bytes(0, max(1, n_contributors)) / grid.wire_bytes(0)


def _member(ctx: Context, voter: Voter, contributes: bool, owns: bool, receives: float) -> Member:
    record = ctx.members.record(voter.peer)
    if record is None or record.voter != voter:
        return Member(0.0, 0.0, contributes, owns, receives)
    return Member(record.up_Bps, record.down_Bps, contributes, owns, receives)
