"""How fast each of my connections goes in a round, so that nobody's link is overfilled.

TCP finds out what a link carries by overfilling it. Where several owners send to one peer, shallow buffers overflow,
and while one connection repairs its losses the link idles. So all members compute the same thing from the plan and from
the rates that the records tell: the time T_p that the round takes at best, on the link that takes longest. Then each
sends to each as fast as its bytes for it need in that time. No link carries more than PLAN_SHARE of its rate then, but
for the way down to who owns nothing, and all flows end together.

    my bytes for j:  the part of my contribution that j owns, and what I own of the result
    my rate to j:    these bytes / T_p

An unknown rate limits nobody, and who does not know its own is not paced. A claim that is far too low must not hold up
those whom it does not concern, nor a stall: of what is left of two links, SPARE_SHARE of an equal part is added to the
connection between them. Links that the plan fills have nothing left, so the bound stands.

Who owns nothing gets results alone, which are made as contributions come. At the pace of these they would lag behind
more and more, as no connection quite reaches its pace. So they may go at all of the way down, where the way up has
room: they are no more than what comes.
"""

from __future__ import annotations

import math

from dlc.comm.context import Context
from dlc.comm.effects import Pace
from dlc.comm.ids import PeerId
from dlc.comm.owners import Shape
from dlc.comm.partition import Load, Member, connection_Bps, loads

PLAN_SHARE = 0.98
"""Of the links' rates: at all of it a queue, once there, would never go away."""
SPARE_SHARE = 0.25
RATE_MIN_BPS = 64 << 10
"""No connection is held below this: a peer that is slower is given up as late."""
UNPACED_BPS = 125e6
"""Where both links carry more (1 Gbit/s), the processors are what limits, and timers cost their time."""


def rates(shape: Shape, me: int) -> list[float | None]:
    """Bytes per second from member `me` of the plan to each member. None: without limit."""
    members, n = shape.members, len(shape.members)
    each = loads(members, shape.shares, shape.vector_bytes)
    plan_s = max(_plan_s(member, load) for member, load in zip(members, each, strict=True))
    if not plan_s or not members[me].up_Bps or n < 2:
        return [None] * n
    mine_Bps = PLAN_SHARE * members[me].up_Bps - each[me].up / plan_s
    found: list[float | None] = []
    for index, (member, load) in enumerate(zip(members, each, strict=True)):
        theirs_Bps = PLAN_SHARE * member.down_Bps - load.down / plan_s if member.down_Bps else math.inf
        spare_Bps = max(0.0, min(mine_Bps, theirs_Bps)) / (n - 1)
        needed_Bps = connection_Bps(members, shape.shares, shape.vector_bytes, plan_s, me, index)
        more_Bps = SPARE_SHARE * spare_Bps
        if not shape.shares[index]:
            more_Bps = max(more_Bps, min((1 / PLAN_SHARE - 1) * needed_Bps, max(0.0, mine_Bps) / (n - 1)))
        wide = min(members[me].up_Bps, member.down_Bps or math.inf) >= UNPACED_BPS
        paced = index != me and not wide
        found.append(max(RATE_MIN_BPS, needed_Bps + more_Bps) if paced else None)
    return found


def _plan_s(member: Member, load: Load) -> float:
    """How long this member's links need at their share; 0 where no rate is known."""
    up_s = load.up / member.up_Bps if member.up_Bps else 0.0
    down_s = load.down / member.down_Bps if member.down_Bps else 0.0
    return max(up_s, down_s) / PLAN_SHARE


class Pacing:
    """The rates of my connections under the plan at hand."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self._paced: set[PeerId] = set()

    def begin(self, shape: Shape | None) -> None:
        """A plan, or a new one for the same round: pace what it needs, and lift the rest. None: no bytes move."""
        wanted: dict[PeerId, float] = {}
        if shape is not None and self.ctx.me in shape.voters:
            found = rates(shape, shape.voters.index(self.ctx.me))
            wanted = {v.peer: rate for v, rate in zip(shape.voters, found, strict=True) if rate is not None}
        for peer in sorted(self._paced - wanted.keys()):
            self.ctx.out.append(Pace(peer, None))
        self.ctx.out.extend(Pace(peer, rate_Bps) for peer, rate_Bps in wanted.items())
        self._paced = set(wanted)

    def end(self) -> None:
        """The round is over."""
        self.begin(None)
