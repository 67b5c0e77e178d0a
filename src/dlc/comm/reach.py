"""What is in reach: those to whom bulk has a way; states of the run that are not in step here, whether anybody could
give them, and what I may do without."""

from __future__ import annotations

from collections.abc import Iterable

from dlc.comm.context import Context
from dlc.comm.ids import Voter
from dlc.comm.log import Log
from dlc.comm.permit import alive_records
from dlc.comm.records import STATES_MAX, key_of


def direct(ctx: Context, voters: Iterable[Voter]) -> list[Voter]:
    """Those of them that do not answer by a relay only, which carries no bulk."""
    return [voter for voter in voters if ctx.members.relay_for(voter.peer) is None]


def out_of_reach(ctx: Context, log: Log) -> set[str]:
    """Channels that I lack, and of which nobody alive says that it holds the state, at my head, beyond it or a few
    entries before it."""
    lacking, recent = log.lacking(), log.recent()
    for record in alive_records(ctx) if lacking else ():
        if key_of(record) >= log.state.key or record.head in recent:
            told = {state.channel for state in record.states}
            lacking -= lacking if len(told) == STATES_MAX else told  # a record may not have room for all
    return lacking


def in_step(ctx: Context, log: Log) -> bool:
    """I may be given a vote, and coordinate: every state that I have a use for is in step here. Where whoever held some
    of them is gone, one of the others is enough, or one that is still to be opened: the rest of the run is not to wait
    for what may never come."""
    lacking = log.lacking()
    more = any(log.holds(channel) or not log.is_open(channel) for channel in log.attached)
    return not lacking or (more and lacking == out_of_reach(ctx, log))
