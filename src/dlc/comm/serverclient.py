"""A trainer's side of the parameter server: one exchange at a time, of all spans side by side.

    exchange: for each span   push ──PushDone──> pull ──PullOffer, parts──> theta       (without a vector: pull only)

What an exchange brings is in `theta`, span by span as it comes; it is over when all spans are. Offers are repeated
until they are answered, to whoever owns the span by then: a push is counted once, whoever counts it (`SpanState.has`).
Words of an owner whose view is not the greatest that I know are not heeded. One that cuts the vector in another way
ends the exchange: it serves other parameters.

An owner tells with theta which push of mine is the newest in it: what counted later is set aside, by a partition or a
seeding. The next push that counts would hide that. So under another view than before nothing is pushed until the owner
was asked (a pull of number ASKING, which brings no theta); it owns the span without a break as long as the view holds.

Who begins with a checkpoint knows by its *history* what it holds of which training, and is told with its first pull how
many rounds of that are no part of theta here: a swarm that was stopped as a whole may go on from an older one.

Vectors go directly only. Where an owner answers by way of a third peer, its span waits until a helper that this trainer
reaches owns it (`unreached`), or that is mended; it is told, again and again (`_say_barred`).

A trainer is a witness of claims, too, and holds what it pulled last as its *stake*, with the pushes that are part of
it: where a span's owner and standby are both gone, the next helper takes the newest stake.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from dlc.comm.claims import ASK_S
from dlc.comm.codecs import Payload, get_codec
from dlc.comm.effects import Effect
from dlc.comm.ids import NOBODY, PeerId, Voter
from dlc.comm.messages import Message
from dlc.comm.roles import HELPER, TRAINER
from dlc.comm.serverexchange import (
    ASKING,
    OVER,
    PULL,
    PUSH,
    CountedPush,
    Exchange,
    ExchangeFailed,
    ExchangeOver,
    History,
    Leg,
    Mark,
    Outcome,
    Paused,
    Pulled,
    Pushes,
)
from dlc.comm.servermessages import (
    COUNTED,
    LATE,
    LOST,
    OUTCOMES,
    AskStake,
    AskViews,
    Granted,
    ImageOffer,
    Layout,
    Origin,
    PullOffer,
    PullReq,
    PushDone,
    PushOffer,
    Refused,
    SpanView,
    Stake,
    TellViews,
    UpdateOffer,
    UpdateTaken,
    check_leaves_room,
    check_numbers,
    check_update,
)
from dlc.comm.serverpeer import START_S, Notice, ServerMembers, ServerPeer, layout_of
from dlc.comm.spans import Spans
from dlc.comm.spanstate import table_of
from dlc.errors import DlcError, ProtocolError, UsageError

REPEAT_S = 1.0
"""How often what was not answered is sent again; or after four round trips."""
UNSOUND_MAX = 3
"""So often a span is asked for again that was not finite when it came."""
PAUSED_S = 5.0
"""A span without an owner for so long is told, or with one that no vector reaches; a takeover is over by then."""
AGAIN_S = 30.0
"""The latter is told again after this time, twice this time, four times ..."""


class SpanClient(ServerPeer):
    def __init__(
        self,
        members: ServerMembers,
        spans: Spans,
        theta: Tensor,
        digest: bytes,
        asynchronous: bool,
        now: float,
        step: int = 0,
        history: History | None = None,
    ) -> None:
        """`theta`: the parameters that I would begin with, fp32, one-dimensional, on the CPU; it is the client's from
        now on. `digest`: theirs. `step`: the round that they are of, as far as I know. `history`: that of the client
        that pulled them; None: they were not pulled, or nobody knows."""
        super().__init__(members, now)
        if theta.dtype is not torch.float32 or theta.shape != (spans.grid.numel,):
            raise UsageError(f"the layout has {spans.grid.numel} fp32 elements, got {theta.dtype} {tuple(theta.shape)}")
        self.spans: Spans = spans
        self.theta, self.asynchronous = theta, asynchronous
        if history is not None and len(history.marks) != spans.n:
            raise UsageError(f"the history is of {len(history.marks)} spans, but theta has {spans.n}")
        past = history.marks[0].past(step) if history is not None else ()
        self._own, self._own_step = Origin(digest, step, None, past), step
        self._marks: list[Mark | None] = [None] * spans.n if history is None else list(history.marks)
        """Of the checkpoint that I began with, until its span is pulled."""
        self.pulled = [Pulled(version=step, step=step, origin=self._own) for _ in range(spans.n)]
        self.exchange: Exchange | None = None
        first = int(now * 1000) << 16  # above those of an earlier client of this process, which owners know
        self._pushes = [Pushes(seq=first) for _ in range(spans.n)]
        self.number = 0
        """Of the newest exchange."""
        self._asked_at = float("-inf")
        self._served_at = now
        self._paused: tuple[int, ...] = ()
        self._barred: dict[PeerId, tuple[float, float]] = {}
        """Owners that I wait for and that no vector reaches: since when, and when that is told (again)."""
        self._begun = False
        """A helper asked for my stake in the first span before I had pulled any of it."""
        self._fp32 = get_codec("fp32")

    # ---------------------------------------------------------------- commands

    def begin(self, vector: Tensor | None, weight: float, now: float) -> list[Effect]:
        """Push `vector` (fp32, as long as theta; it must not change until the exchange is over), then pull; None: pull
        only. The exchange is the next `number`. DlcError: one is under way."""
        self.now = now
        if self.exchange is not None and not self.exchange.over:
            raise DlcError("an exchange with the parameter server is under way already: wait for it first")
        self.number += 1
        step = 0 if self.asynchronous or vector is None else self.step + 1
        legs = [Leg(PULL if vector is None else PUSH) for _ in range(self.spans.n)]
        before = self.shelf.sent_bytes, self.fetches.received_bytes
        self.exchange = Exchange(self.number, vector, weight, step, now, legs, *before)
        if vector is not None:
            for span, leg in enumerate(legs):
                self._pushes[span].seq += 1
                leg.seq = self._pushes[span].seq
                self.shelf.hold(
                    _push_key(span, leg.seq), len(self.spans.chunks(span)), partial(self._piece, vector, span)
                )
        self.look()
        return self._drain()

    @property
    def step(self) -> int:
        """Newest round that any part of theta is of."""
        return max(pulled.step for pulled in self.pulled)

    @property
    def history(self) -> History:
        """What theta is part of, for a checkpoint of it."""
        now = [Mark(pulled.origin, pulled.term, pulled.version) for pulled in self.pulled]
        return History(tuple(before or mark for before, mark in zip(self._marks, now, strict=True)))

    def cancel(self) -> None:
        """The caller waits no longer. What was pushed may be counted all the same; the vector is not read any more."""
        exchange = self.exchange
        if exchange is not None and not exchange.over:
            self._end(exchange)
            for pulled in self.pulled:
                if pulled.fetching is not None:
                    self.fetches.cancel(*pulled.fetching)
                    pulled.fetching = None

    def _piece(self, vector: Tensor, span: int, part: int) -> Payload:
        a, b = self.spans.grid.span(self.spans.chunks(span)[part])
        return self.spans.grid.coder.encode(vector[a:b])

    # ---------------------------------------------------------------- time

    def look(self) -> None:
        exchange = self.exchange
        unserved = [span for span in range(self.spans.n) if self._owner(span) is None]
        if unserved and self.now >= self._asked_at + ASK_S:
            self._asked_at = self.now
            self.cast(self.living(HELPER, TRAINER), AskViews(layout_of(self.spans), ""))
        self._say_paused(tuple(unserved))
        self._say_barred(exchange)
        if exchange is None or exchange.over:
            return
        for span, leg in enumerate(exchange.legs):
            self._press(exchange, span, leg)

    def _say_paused(self, unserved: tuple[int, ...]) -> None:
        if not unserved:
            self._served_at = self.now
        paused = unserved if self.now > self._served_at + PAUSED_S else ()
        if paused != self._paused and (paused or not unserved):
            self._paused = paused
            self.tell(Paused(paused))

    def _say_barred(self, exchange: Exchange | None) -> None:
        """An owner that answers, but only by way of another peer, would be waited for without end, and in silence."""
        legs = enumerate(exchange.legs) if exchange is not None and not exchange.over else ()
        waited = {owner.peer for span, leg in legs if leg.phase != OVER and (owner := self._owner(span)) is not None}
        relays = {peer: relay for peer in sorted(waited) if (relay := self.members.relay_for(peer)) is not None}
        self._barred = {peer: self._barred.get(peer, (self.now, self.now + PAUSED_S)) for peer in relays}
        for peer, (since, at) in self._barred.items():
            if self.now >= at:
                self._barred[peer] = since, self.now + max(AGAIN_S, self.now - since)
                self.tell(Notice(self._barred_text(peer, relays[peer]), serious=True))

    def _barred_text(self, peer: PeerId, relay: PeerId) -> str:
        record = self.members.record(peer)
        where = f" ({', '.join(record.bulk)})" if record is not None else ""
        return (
            f"training pauses: helper {peer[:8]}{where} owns a part of the parameters, and this host reaches it by way "
            f"of {relay[:8]} only, which carries no vectors. A helper that reaches more trainers takes that part over; "
            "if this goes on, there is none: let TCP pass between the two hosts (a firewall, or a route?), or stop "
            "that helper"
        )

    def _owner(self, span: int) -> Voter | None:
        view = self.witness.established.get(span)
        return view.owner if view is not None and self.lives(view.owner) else None

    def _press(self, exchange: Exchange, span: int, leg: Leg) -> None:
        owner, view = self._owner(span), self.witness.established.get(span)
        if leg.phase == OVER or owner is None or view is None:
            return
        if self.now < leg.said_at + max(REPEAT_S, 4 * self.members.rtt_s(owner.peer)):
            return
        leg.said_at = self.now
        if leg.phase == PULL:
            if self.pulled[span].fetching is None:
                self.send(owner, PullReq(span, view.term, exchange.number, leg.step, self.spans.digest))
            return
        if self._must_ask(view):
            self.send(owner, PullReq(span, view.term, ASKING, 0, self.spans.digest))
            return
        base, key = self.pulled[span].version, _push_key(span, leg.seq)
        push = leg.seq, base, exchange.step, exchange.weight, key, self.spans.digest
        self.send(owner, PushOffer(span, view.term, *push))

    def _must_ask(self, view: SpanView) -> bool:
        pushes = self._pushes[view.span]
        return bool(pushes.counted) and pushes.known_to != view

    # ---------------------------------------------------------------- messages

    def take(self, sender: Voter, message: Message) -> None:
        if isinstance(message, PushDone):
            self._push_done(sender, message)
        elif isinstance(message, PullOffer):
            self._offered(sender, message)
        elif isinstance(message, AskViews):
            if message.layout is not None and message.layout != layout_of(self.spans):
                raise ProtocolError(f"another layout than {layout_of(self.spans)}: {message.layout}")
            self.tell_views([sender], "", ())
        elif isinstance(message, TellViews):
            if message.layout is not None and message.layout != layout_of(self.spans):
                self._serves_others(sender, message.layout, message.views)
                return
            for view in message.views:
                self.learn(view)
        elif isinstance(message, AskStake):
            self._tell_stake(sender, message)
        elif not isinstance(message, Granted | Refused | ImageOffer | UpdateOffer | UpdateTaken):
            raise ProtocolError(f"{type(message).__name__} is not for a trainer")

    def _serves_others(self, sender: Voter, theirs: Layout, views: tuple[SpanView, ...]) -> None:
        """An owner ends the exchange; who owns nothing may have heard of the layout from somebody who is wrong."""
        mine, exchange = layout_of(self.spans), self.exchange
        if exchange is None or exchange.over or not any(view.owner == sender for view in views):
            raise ProtocolError(f"another layout than {mine}: {theirs}")
        self.cancel()
        self.tell(
            ExchangeFailed(
                exchange.number,
                f"the parameters of this swarm are another vector, or cut or encoded otherwise: {theirs}, ours {mine}; "
                "theta's length, codec, chunk_elems and the number of spans must be the same on all trainers",
            )
        )

    def view_changed(self, view: SpanView) -> None:
        pulled = self.pulled[view.span]
        if pulled.fetching is not None and pulled.fetching[0] != view.owner:
            self.fetches.cancel(*pulled.fetching)
            pulled.fetching = None
        if self.exchange is not None and not self.exchange.over:
            leg = self.exchange.legs[view.span]
            leg.said_at = float("-inf")
            self._press(self.exchange, view.span, leg)

    def _leg(self, sender: Voter, span: int, term: int) -> Leg | None:
        """The leg that a word of its owner is about."""
        view = self.witness.established.get(span)
        if view is None or view.owner != sender or view.term != term:
            return None
        return None if self.exchange is None or self.exchange.over else self.exchange.legs[span]

    def _push_done(self, sender: Voter, m: PushDone) -> None:
        check_numbers(m.version, m.staleness)
        if m.update is not None:
            check_update(m.update)
        if m.outcome not in OUTCOMES:
            raise ProtocolError(f"no push ends like this: {m.outcome[:40]!r}")
        leg = self._leg(sender, m.span, m.term)
        if leg is None or leg.phase != PUSH or leg.seq != m.seq or self.exchange is None:
            return
        self.shelf.drop(_push_key(m.span, m.seq))
        leg.phase, leg.outcome, leg.update, leg.staleness = PULL, m.outcome, m.update, m.staleness
        leg.term, leg.version = m.term, m.version
        leg.step = self.exchange.step if m.outcome in (COUNTED, LATE) else 0
        if m.outcome == COUNTED:
            self._pushes[m.span].counted.append(CountedPush(m.seq, m.term, m.version, self.exchange.weight))
        leg.said_at = float("-inf")
        self._press(self.exchange, m.span, leg)

    # ---------------------------------------------------------------- theta

    def _offered(self, sender: Voter, m: PullOffer) -> None:
        leg = self._leg(sender, m.span, m.term)
        if leg is None or self.exchange is None:
            return
        check_leaves_room(m.version, m.step)  # it is my stake from then on
        table_of(m.pushes, m.version)
        if m.number == ASKING and leg.phase == PUSH and self._must_ask(self.witness.established[m.span]):
            self._set_aside(leg, m)
            leg.said_at = float("-inf")
            self._press(self.exchange, m.span, leg)
        pulled = self.pulled[m.span]
        if leg.phase != PULL or m.number != self.exchange.number or pulled.fetching is not None:
            return
        if (pulled.term, pulled.owner, pulled.version) == (m.term, sender, m.version) and m.version:
            pulled.step = m.step
            self._set_aside(leg, m)
            self._leg_over(leg)
            return
        pulled.fetching = sender, m.key
        sizes = [4 * self.spans.grid.elems(chunk) for chunk in self.spans.chunks(m.span)]
        self.fetches.fetch(sender, m.key, sizes, partial(self._fetched, sender, m), self.now)

    def _fetched(self, sender: Voter, m: PullOffer, parts: list[Payload] | None) -> None:
        pulled = self.pulled[m.span]
        pulled.fetching = None
        leg, view = self._leg(sender, m.span, m.term), self.witness.established.get(m.span)
        if leg is None or leg.phase != PULL or view is None:
            return
        if parts is None:
            leg.said_at = float("-inf")
            return
        if not all(self._fp32.finite(part, len(part) // 4) for part in parts):
            self._not_finite(sender, m.span, leg)
            return
        self.shelf.drop(_stake_key(m.span, pulled))
        for chunk, part in zip(self.spans.chunks(m.span), parts, strict=True):
            a, b = self.spans.grid.span(chunk)
            self.theta[a:b] = self._fp32.decode(part, b - a)
        mark, self._marks[m.span] = self._marks[m.span], None
        if mark is not None:
            pulled.lost = mark.lost(self._own, self._own_step, view)
        pulled.term, pulled.owner, pulled.version = m.term, sender, m.version
        pulled.step, pulled.origin, pulled.pushes = m.step, view.origin, m.pushes
        self._set_aside(leg, m)
        self._leg_over(leg)

    def _not_finite(self, owner: Voter, span: int, leg: Leg) -> None:
        """It may have been damaged on the way; or the parameters are lost, and the exchange ends."""
        leg.unsound += 1
        text = f"span {span}: what {owner} serves is not finite"
        if leg.unsound <= UNSOUND_MAX:
            self.tell(Notice(f"{text}, and not taken: it is asked for again", serious=True))
        elif self.exchange is not None:
            number = self.exchange.number
            self.cancel()
            self.tell(
                ExchangeFailed(
                    number,
                    f"{text}, though it was asked for {UNSOUND_MAX} times more. If other helpers serve what is finite, "
                    "stop this one, and join again; or begin anew from a checkpoint, with lower learning rates",
                )
            )

    def _set_aside(self, leg: Leg, m: PullOffer) -> None:
        """What had counted, and is no part of what the owner has: this exchange's push, or earlier ones."""
        view, pushes = self.witness.established[m.span], self._pushes[m.span]
        pushes.known_to = view
        for push in [push for push in pushes.counted if not push.holds(view, m.counted)]:
            pushes.counted.remove(push)
            if push.seq == leg.seq:
                leg.outcome = LOST
            else:
                pushes.set_aside, pushes.set_aside_weight = pushes.set_aside + 1, pushes.set_aside_weight + push.weight

    def _leg_over(self, leg: Leg) -> None:
        leg.phase = OVER
        exchange = self.exchange
        if exchange is not None and all(other.phase == OVER for other in exchange.legs):
            self._end(exchange)
            self.tell(self._news(exchange))

    def _end(self, exchange: Exchange) -> None:
        exchange.over, exchange.vector = True, None
        for span, leg in enumerate(exchange.legs):
            self.shelf.drop(_push_key(span, leg.seq))

    def _news(self, exchange: Exchange) -> ExchangeOver:
        outcomes = []
        for span, leg in enumerate(exchange.legs):
            view, pushes = self.witness.established[span], self._pushes[span]
            pulled, share = self.pulled[span], self.spans.share(span)
            found = leg.outcome, leg.update, leg.staleness
            aside = pushes.set_aside, pushes.set_aside_weight
            pushes.set_aside, pushes.set_aside_weight = 0, 0.0
            outcomes.append(Outcome(span, share, view.owner.peer, *found, pulled.version, *aside, pulled.lost))
            pulled.lost = 0
        return ExchangeOver(
            exchange.number,
            min(pulled.step for pulled in self.pulled),
            tuple(outcomes),
            self.shelf.sent_bytes - exchange.sent_before,
            self.fetches.received_bytes - exchange.received_before,
            self.now - exchange.began,
        )

    def _tell_stake(self, sender: Voter, m: AskStake) -> None:
        self.check_span(m.span)
        pulled = self.pulled[m.span]
        if m.span == 0 and pulled.owner is None:
            self._helper_begins()
        key = _stake_key(m.span, pulled)
        self.shelf.hold(key, len(self.spans.chunks(m.span)), partial(self._stake_piece, m.span))
        told = pulled.origin, pulled.version, pulled.step
        self.send(sender, Stake(m.span, *told, key, pulled.pushes, self.spans.digest))

    def _helper_begins(self) -> None:
        """It may wait for other trainers: that is no pause."""
        if not self._begun and self._own_step:
            self.tell(Notice(f"the swarm begins with the newest checkpoint of those that come within {START_S:g} s"))
        self._begun, self._served_at = True, max(self._served_at, self.now + START_S)

    def _stake_piece(self, span: int, part: int) -> Payload:
        a, b = self.spans.grid.span(self.spans.chunks(span)[part])
        return self._fp32.encode(self.theta[a:b])


def _push_key(span: int, seq: int) -> str:
    return f"push/{span}/{seq}"


def _stake_key(span: int, pulled: Pulled) -> str:
    """Names one theta: two owners of one term may have counted up to the same version."""
    owner = pulled.owner or NOBODY
    return f"stake/{span}/{pulled.term}/{pulled.version}/{owner.peer}/{owner.inc}"
