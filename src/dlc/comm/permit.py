"""Forced ballots: when a group may go on, or found a run, without a quorum (docs/protocol.md, "Forced ballots").

A ballot that names its deciders F is decided by *all* of F. `permits` is the condition that each member of F checks
before it promises and again before it votes; `proposal` is the group that I would propose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dlc.comm.context import Context
from dlc.comm.entries import EMPTY
from dlc.comm.ids import PeerId, Voter
from dlc.comm.log import Log
from dlc.comm.messages import Record
from dlc.comm.records import key_of
from dlc.comm.roles import OBSERVER


def can_vote(record: Record) -> bool:
    return record.role != OBSERVER


def alive_records(ctx: Context) -> list[Record]:
    """Records of all peers with a two-way proof, me excluded, observers excluded."""
    members = ctx.members
    return [r for r in members.records() if r.voter != ctx.me and can_vote(r) and members.alive(r.voter)]


def greater_alive(ctx: Context, log: Log) -> list[Record]:
    """Alive peers whose history is greater than mine, the greatest first."""
    members = ctx.members
    ahead = members.ahead_of(log.state)
    return [r for r in ahead if can_vote(r) and members.alive(r.voter)] if ahead else ahead


def permits(
    ctx: Context,
    log: Log,
    deciders: Sequence[Voter],
    listed: Sequence[str],
    answers: Mapping[str, PeerId],
    founder: bool,
) -> bool:
    """I permit this forced ballot at this moment: rules (a) to (e)."""
    members, state = ctx.members, log.state
    group = set(deciders)
    if ctx.stale or ctx.me not in group:  # (a)
        return False
    alive = alive_records(ctx)
    if any(key_of(r) > state.key for r in alive):  # (b) follow the greater history instead
        return False
    if any(r.head == state.head and r.voter not in group for r in alive):  # (b) nobody who stands here is left out
        return False
    if state.quorum([v for v in state.electorate if members.alive(v)]):  # (c)
        return False
    # Those whose entry I have only just learned of may have decided it long after I had lost sight of them.
    learned_s = ctx.running_s - log.learned_run
    if learned_s < members.t_dead_s and any(r.head != EMPTY and r.voter not in group for r in alive):
        return False  # (b) it may have learned of the entry as I have, and stand here: its record will say so
    # (d) The same for newcomers that stand here without a vote: they could go on by force without us. So could those
    # who came here by a forced ballot of ours, whose entry may leave them without a vote. And for whoever is known to
    # be ahead: where the voters of an old head have all left since, it is the run that goes on there.
    others = set(state.electorate)
    if state.head != EMPTY:
        records = [r for r in members.records() if can_vote(r)]
        others |= {r.voter for r in records if r.head == state.head or key_of(r) > state.key}
        others |= log.fellows_here
    for voter in others - group:
        unseen_s = min(members.unseen_s(voter), learned_s)
        if not members.gone(voter) and (members.alive(voter) or unseen_s < members.t_evict_s):
            return False
    return _legitimate(ctx, log, group, listed, answers, founder)  # (e)


def _legitimate(
    ctx: Context,
    log: Log,
    group: set[Voter],
    listed: Sequence[str],
    answers: Mapping[str, PeerId],
    founder: bool,
) -> bool:
    """(e) The group holds an active peer, or every listed address, or I was started as founder."""
    if log.active or founder:
        return True
    records = {r.voter: r for r in ctx.members.records()}
    if any(voter in records and records[voter].active for voter in group):
        return True
    peers = {voter.peer for voter in group}
    return bool(listed) and all(answers.get(address) in peers for address in listed)


def proposal(ctx: Context, log: Log) -> tuple[Voter, ...]:
    """The forced ballot that I would propose: everyone alive at my head; empty unless I have the smallest id."""
    members, head = ctx.members, log.head
    group = sorted([r.voter for r in alive_records(ctx) if r.head == head] + [ctx.me])
    if group[0] != ctx.me or not can_vote(members.own):
        return ()
    return tuple(group)
