"""Claims of a helper on their way: asked of all who are alive, until a majority has granted them (`claims`)."""

from __future__ import annotations

import dataclasses

from dlc.comm.claims import ASK_S, CLAIM_S, Claiming
from dlc.comm.ids import Voter
from dlc.comm.roles import HELPER, TRAINER
from dlc.comm.seats import Host, Seat
from dlc.comm.servermessages import Claim, Established, Granted, Refused, SpanView
from dlc.comm.spanstate import SpanState


class Claimant:
    def __init__(self, host: Host) -> None:
        self.host = host

    def make(self, span: int, seat: Seat, state: SpanState, owner: Voter, standby: Voter | None) -> None:
        term = self.host.witness.term_after(span)
        if seat.seeding is not None:
            state.seed = (term, state.version)
        self._begin(seat, SpanView(span, term, owner, standby, state.origin, *state.seed))

    def give_on(self, seat: Seat, view: SpanView, heir: Voter) -> None:
        """By that view the span is mine, and I hold nothing of it."""
        term = self.host.witness.term_after(view.span)
        self._begin(seat, dataclasses.replace(view, term=term, owner=heir, standby=None))

    def _begin(self, seat: Seat, view: SpanView) -> None:
        self.host.witness.asked(view)  # I am a witness of my own
        seat.claim = Claiming(view, self.host.now, {self.host.me})
        self.press(view.span, seat, seat.claim)

    def press(self, span: int, seat: Seat, claim: Claiming) -> None:
        """Ask those who have not answered, give up, or win."""
        if claim.won(self.host.known()):
            self._won(span, seat, claim.view)
        elif self.host.now > claim.began + CLAIM_S:
            self._give_up(seat)
        elif self.host.now >= claim.asked_at + ASK_S:
            claim.asked_at = self.host.now
            self.host.cast([v for v in self.host.living(HELPER, TRAINER) if v not in claim.granted], Claim(claim.view))

    def _give_up(self, seat: Seat) -> None:
        """The others may be slow, or cut off just now: try again in a while, and not all at the same time."""
        seat.claim, seat.retry_at = None, self.host.now + CLAIM_S * (0.5 + (self.host.me.inc % 97) / 97)
        if seat.owner is not None:
            seat.owner.also, seat.owner.closing = None, False

    def granted(self, sender: Voter, m: Granted) -> None:
        seat = self.host.seats.get(m.span)
        if seat is not None and seat.claim is not None and seat.claim.view.term == m.term:
            seat.claim.granted.add(sender)
            if seat.claim.won(self.host.known()):
                self._won(m.span, seat, seat.claim.view)

    def refused(self, m: Refused) -> None:
        """Somebody else claims the span, or did and died before all knew."""
        seat = self.host.seats.get(m.view.span)
        if seat is None or seat.claim is None or seat.claim.view.term > m.view.term:
            return
        contested = not m.established and self.host.lives(m.view.owner) and m.view.owner != self.host.me
        self.host.witness.asked(m.view)  # so that my next claim is for a greater term
        self._give_up(seat)
        if not contested and (m.view.owner == self.host.me or self.host.away(m.view.owner)):
            seat.retry_at = self.host.now

    def _won(self, span: int, seat: Seat, view: SpanView) -> None:
        seat.claim = None
        self.host.cast(self.host.living(HELPER, TRAINER), Established(view))
        self.host.learn(view)
