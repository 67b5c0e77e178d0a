"""Who sits in a group, and who reduces what: follows from the wishes of its members alone, so that each of them finds
the same seats as all others do. Should two hosts round a share differently, they ask different owners for a chunk, and
each of these reduces it: weights and members, which make the mean, take no such arithmetic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from dlc.comm.grid import Grid
from dlc.comm.ids import Voter
from dlc.comm.meshmessages import Begin, Parcel, Seat, Wish
from dlc.comm.messages import GridSpec
from dlc.comm.owners import cut_off
from dlc.comm.parcels import WHY_CHARS_MAX
from dlc.comm.partition import Member, counts
from dlc.comm.reducer import WEIGHT_MAX
from dlc.comm.wire import unpack
from dlc.errors import ProtocolError

GROUP_MAX = 64
"""Members of one group: each pulls from each, so larger swarms divide (dlc.Moshpit)."""
WEIGHT_SLACK = 1e-6
"""Relative: a result's weight is the sum of those it names but for rounding."""


def seats_of(wishes: Mapping[Voter, Wish], gathers: Mapping[Voter, bytes], grid: Grid) -> tuple[Seat, ...]:
    """Sorted by voter. Those that contribute with an equal label share one weight; chunks are owned as the links are
    fast (partition.py), by everybody where nobody offers to own any, and by none of two that do not reach each other
    while others can."""
    voters = sorted(wishes)
    labels = [wishes[v].label if wishes[v].contributes else "" for v in voters]
    willing = {v for v in voters if wishes[v].owns} or set(voters)
    owners = willing - cut_off(voters, [(v, other) for v in voters for other in wishes[v].apart]) or willing
    links = [
        Member(w.up_Bps, w.down_Bps, w.contributes, v in owners, w.receives)
        for v, w in ((v, wishes[v]) for v in voters)
    ]
    seats = []
    for voter, label, link, n_chunks in zip(voters, labels, links, counts(grid.n_chunks, links), strict=True):
        wish = wishes[voter]
        weight = wish.weight / labels.count(label) if label else wish.weight
        seats.append(
            Seat(
                voter,
                wish.nonce,
                weight,
                wish.contributes,
                wish.receives,
                n_chunks,
                link.up_Bps,
                link.down_Bps,
                gathers[voter],
            )
        )
    return tuple(seats)


def sound(m: Begin, grid: GridSpec, n_chunks: int) -> bool:
    """Whether a group of this vector can begin like this."""
    voters = [seat.voter for seat in m.seats]
    return (
        m.grid == grid
        and len(voters) <= GROUP_MAX
        and len({v.peer for v in voters}) == len(voters)
        and sum(seat.chunks for seat in m.seats) == n_chunks
        and all(seat.chunks >= 0 and 0 <= seat.weight <= WEIGHT_MAX for seat in m.seats)
        and all(seat.up_Bps >= 0 and seat.down_Bps >= 0 for seat in m.seats)
        and any(seat.contributes and seat.weight > 0 for seat in m.seats)
    )


def sound_result(m: Parcel, seats: Sequence[Seat], contributors: Sequence[int]) -> bool:
    """Whether a result of a group can name these contributors, absentees and weight. contributors: ascending."""
    included = m.included
    sound = bool(included) and all(a < b for a, b in itertools.pairwise(included))
    sound = sound and all(i in contributors for i in included)
    sound = sound and [i for i, _ in m.left_out] == [i for i in contributors if i not in included]
    sound = sound and all(0 < len(why) <= WHY_CHARS_MAX for _, why in m.left_out)
    if not sound:
        return False
    weight = math.fsum(seats[i].weight for i in included)
    return abs(weight - m.weight) <= WEIGHT_SLACK * weight


def wish_of(value: bytes) -> Wish | None:
    """None: no correct peer shows it."""
    try:
        wish = unpack(value, Wish)
    except ProtocolError:
        return None
    fit = 0 <= wish.weight <= WEIGHT_MAX and wish.up_Bps >= 0 and wish.down_Bps >= 0
    return wish if fit else None
