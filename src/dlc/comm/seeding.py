"""Where a span's parameters come from when no helper holds them: from the trainer that pulled the newest.

At the beginning that is any trainer's own; the first span decides whose, and all others take theirs from a trainer that
began alike (its *origin*, to which the helper that takes the first span adds its name). Moments begin at zero. Which
pushes those parameters hold comes with them: a trainer whose answer died with the owner offers its push again, and it
must not count twice.

Where a swarm is started again, the first trainer that comes may have an older checkpoint than the next: so the first
span, as long as it never had a view, waits a while (START_S) for more of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import torch

from dlc.comm.claimant import Claimant
from dlc.comm.claims import ASK_S
from dlc.comm.codecbase import all_finite
from dlc.comm.codecs import Payload, get_codec
from dlc.comm.ids import Voter
from dlc.comm.roles import TRAINER
from dlc.comm.seats import Host, Seat, Seeding
from dlc.comm.servermessages import AskStake, Origin, SpanView, Stake, check_leaves_room, check_origin
from dlc.comm.serverpeer import START_S, Notice
from dlc.comm.spanstate import SpanState, table_of

STAKES_S = 3.0
"""Trainers that have not said by then what they hold are not waited for."""


class Seeder:
    def __init__(self, host: Host, claims: Claimant, lost: Callable[[SpanView | None], bool]) -> None:
        self.host, self.claims, self._lost = host, claims, lost

    def seed(self, span: int, seat: Seat) -> None:
        """Take the span's parameters from the trainer that pulled the newest."""
        seeding = seat.seeding = seat.seeding or Seeding(self.host.now)
        if seeding.fetching is not None:
            return
        if seeding.state is not None:
            self.claims.make(span, seat, seeding.state, self.host.me, None)
            return
        trainers = self.host.living(TRAINER)
        if not trainers:
            seeding.began = self.host.now  # they may come again much later, with others
        if self.host.now >= seeding.asked_at + ASK_S:
            seeding.asked_at = self.host.now
            self.host.cast([v for v in trainers if v not in seeding.stakes], AskStake(span))
        origin = self._origin(span)
        if not trainers or (origin is None and span):
            return  # the first span decides
        givers = set(trainers) - seeding.refused
        fits = {v: s for v, s in seeding.stakes.items() if v in givers and self._cut_alike(s)}
        told = {v: s for v, s in fits.items() if origin is None or s.origin.like(origin)}
        if not told:
            return
        newest = max(s.version for s in told.values())
        all_told = seeding.stakes.keys() >= set(trainers)
        if self.host.now < seeding.began + self._patience_s(span, newest, all_told):
            return
        barred = {v for v in told if self.host.members.relay_for(v.peer) is not None}  # no vector comes from these
        giver = min((v for v, s in told.items() if s.version == newest), key=lambda v: (v in barred, v))
        self._fetch_stake(span, seeding, giver, told[giver])

    def _cut_alike(self, stake: Stake) -> bool:
        return self.host.spans is not None and stake.layout == self.host.spans.digest

    def _patience_s(self, span: int, newest: int, all_told: bool) -> float:
        """For trainers that may have a newer stake. `all_told`: none of those that are here."""
        if span == 0 and self.host.witness.established.get(span) is None:
            return START_S if newest or not all_told else 0.0
        return 0.0 if all_told else STAKES_S

    def _origin(self, span: int) -> Origin | None:
        """That of the other spans that are served, if any is."""
        served = [v for v in self.host.witness.established.values() if v.span != span and not self._lost(v)]
        return min(served, key=lambda view: view.span).origin if served else None

    def stake_told(self, sender: Voter, m: Stake) -> None:
        seat = self.host.seats.get(m.span)
        check_leaves_room(m.version, m.step)
        check_origin(m.origin)
        table_of(m.pushes, m.version)
        if seat is not None and seat.seeding is not None:
            seat.seeding.stakes[sender] = m

    def _fetch_stake(self, span: int, seeding: Seeding, giver: Voter, stake: Stake) -> None:
        assert self.host.spans is not None
        seeding.fetching = giver, stake.key
        sizes = tuple(4 * self.host.spans.grid.elems(chunk) for chunk in self.host.spans.chunks(span))
        self.host.fetches.fetch(
            giver, stake.key, sizes, partial(self._stake_fetched, span, giver, stake), self.host.now
        )

    def _stake_fetched(self, span: int, giver: Voter, stake: Stake, parts: list[Payload] | None) -> None:
        if self.host.spans is None or not self._cut_alike(stake):
            return
        seeding = self.host.seats[span].seeding
        if seeding is None or seeding.fetching != (giver, stake.key):
            return  # it was for one that was given up, and may be of long ago
        seeding.fetching = None
        if parts is None:
            seeding.stakes.pop(giver, None)
            return
        coder = get_codec("fp32")
        theta = torch.cat([coder.decode(part, len(part) // 4) for part in parts])
        if not all_finite(theta):
            seeding.refused.add(giver)
            self.host.tell(Notice(f"span {span}: what {giver} holds is not finite, and not taken", serious=True))
            return
        origin = stake.origin
        if origin.founder is None:
            origin = self._origin(span) or dataclasses.replace(origin, founder=self.host.me)
        state = SpanState(self.host.spans, span, self.host.optimizer, theta, origin)
        state.version, state.step, state.rounds = stake.version, stake.step, float(stake.step)
        state.counted = table_of(stake.pushes, stake.version)
        seeding.state = state
        what = "parameters with moments at zero" if stake.version else "the first parameters"
        self.host.tidings.add(f"{what}, taken from {giver}", span, stake.version, self.host.now, stake.version > 0)
