"""A helper of the parameter server: it owns some spans, is the standby of others, and sees to it that all are served.

Promises:
- Every span is served by its owner as long as it or its standby lives, with the same bits after a takeover, and every
  push counts once or its trainer is told why not.
- A helper that moves parameters in another way than one that was there before serves nothing, and says so.
- Owners acknowledge what their standby holds; where nobody is left to be one, that is told, and training goes on.
- Two who think that they own a span are told apart by term and majority (`claims`).
- Spans follow the helpers that are there (`spans.assign`): who comes gets its share, who dies is replaced, and who does
  not reach a trainer owns none where another helper does (`unreached`).
- Where owner and standby of a span are both gone, training pauses for as long as there is no helper; the next one takes
  what the trainers pulled last, the newest of it (moments begin at zero). All spans are of one *origin*: the first of
  them decides with which trainer's parameters a training begins, the others take theirs from whoever began alike.

What one helper does with one span (a *seat*):

    none ──claim──> owner            the span has no view and I am its first choice: take a stake and claim
    none ──claim──> none             the view names me as its owner, and I hold nothing: its standby is to be that
    none ──image──> replica          the owner makes me its standby
    replica ──claim──> owner         the owner died and the view names me as its standby
    owner ──greater view──> none     somebody else owns it; its image comes next if I am the standby
"""

from __future__ import annotations

import itertools
from functools import partial

from dlc.comm.claimant import Claimant
from dlc.comm.claims import ASK_S
from dlc.comm.followers import LOG_MAX
from dlc.comm.ids import PeerId, Voter
from dlc.comm.messages import Message
from dlc.comm.replicas import Replicas
from dlc.comm.roles import HELPER, TRAINER
from dlc.comm.seats import Host, Replica, Seat
from dlc.comm.seeding import Seeder
from dlc.comm.servermessages import (
    AskStake,
    AskViews,
    Established,
    Granted,
    ImageOffer,
    Layout,
    PullReq,
    PushOffer,
    Refused,
    SpanView,
    Stake,
    TellViews,
    UpdateOffer,
    UpdateTaken,
)
from dlc.comm.serverpeer import Notice, ServerMembers, layout_of, spans_of
from dlc.comm.spanowner import Rules, SpanOwner
from dlc.comm.spans import Assignment, assign, ranking
from dlc.comm.spanstate import Optimizer
from dlc.comm.tidings import WAIT_S, spans_text
from dlc.comm.unreached import Unreached
from dlc.errors import ProtocolError

NO_ERA = -1
"""Of what I held as the owner: an image with the same digest may confirm it."""
FOUND_S = 1.0
"""A span that never had an owner waits so long for helpers that come at the same time."""
SETTLE_S = 3.0
"""Helpers must have been the same for this long before spans move between live ones."""
SOLO_AFTER_S = 30.0
"""A standby, in the making or not, that has not taken what it was offered for so long is not waited for: its bulk may
not pass."""
MOVES_MAX = 2
"""Spans of mine that move, of free choice, at once."""
SPREAD_S = 5.0
"""How often the views that I know are told to one of the others, in turn: what says who owns a span may get lost."""


class SpanServer(Host):
    def __init__(self, members: ServerMembers, optimizer: Optimizer, rules: Rules, now: float) -> None:
        super().__init__(members, optimizer, now)
        self.rules = rules
        self._claims, self._replicas = Claimant(self), Replicas(self)
        self._seeder = Seeder(self, self._claims, self._lost)
        self._unreached = Unreached(self)
        self._serial = itertools.count(1)
        self._answered: set[Voter] = set()
        """Who has told me the views that it knows, and was alive since then."""
        self._misfits: set[Voter] = set()
        """Who cuts the vector in another way, and is to be told how it is cut here."""
        self._others: set[Voter] = set()
        """Helpers that move the parameters in another way."""
        self._alone: set[int] = set()
        """Spans of mine that have just lost their standby, or found none."""
        self._alone_since = now
        self._asked_at = float("-inf")
        self._spread_at, self._turn = now, 0
        self._helpers: tuple[PeerId, ...] = ()
        self._shunned: frozenset[PeerId] = frozenset()
        self._same_since = now
        """Since when these two are what they are."""

    # ---------------------------------------------------------------- what others see

    @property
    def owned(self) -> list[int]:
        return [span for span, seat in self.seats.items() if seat.owner is not None]

    @property
    def backed(self) -> list[int]:
        """Spans of which I am the standby."""
        return [span for span, view in self.witness.established.items() if view.standby == self.me]

    @property
    def step(self) -> int:
        """Newest round of any span that I hold."""
        held = [seat.owner.state for seat in self.seats.values() if seat.owner is not None]
        held += [seat.replica.state for seat in self.seats.values() if seat.replica is not None]
        return max((state.step for state in held), default=0)

    # ---------------------------------------------------------------- messages

    def take(self, sender: Voter, message: Message) -> None:
        if isinstance(message, AskViews):
            self._adopt_layout(sender, message.layout, False)
            self._hear_optimizer(sender, message.optimizer)
            self._tell_views([sender])
        elif isinstance(message, TellViews):
            self._adopt_layout(sender, message.layout, any(view.owner == sender for view in message.views))
            self._hear_optimizer(sender, message.optimizer)
            self._answered.add(sender)
            self._unreached.told(sender.peer, message.unreached)
            for view in message.views:
                self.learn(view)
        elif isinstance(message, Granted):
            self._claims.granted(sender, message)
        elif isinstance(message, Refused):
            self._claims.refused(message)
        elif isinstance(message, PushOffer | PullReq):
            self._from_trainer(sender, message)
        elif isinstance(message, ImageOffer):
            self._replicas.image_offered(sender, message)
        elif isinstance(message, UpdateOffer):
            self._replicas.update_offered(sender, message)
        elif isinstance(message, UpdateTaken):
            seat = self.seats.get(message.span)
            if seat is not None and seat.owner is not None and message.term == seat.owner.view.term:
                seat.owner.receive_taken(sender, message)
        elif isinstance(message, Stake):
            self._seeder.stake_told(sender, message)
        elif not isinstance(message, AskStake):  # the one kind that is for trainers, who may be new at a helper's name
            raise ProtocolError(f"{type(message).__name__} is not for a helper")

    def _adopt_layout(self, sender: Voter, layout: Layout | None, owns: bool) -> None:
        """The first that is told; or, as long as nothing is held here, that of one who owns spans: who told the first
        may have been wrong."""
        if layout is None or layout == layout_of(self.spans):
            return
        if self.spans is not None and (self._holds_any() or not owns):
            self._misfits.add(sender)
            raise ProtocolError(f"another layout than {layout_of(self.spans)}: {layout}")
        self.spans = spans_of(layout)
        self.seats = {span: Seat() for span in range(self.spans.n)}
        self.witness.forget_beyond(self.spans.n)

    def _hear_optimizer(self, sender: Voter, name: str) -> None:
        if not name or name == self.optimizer.name or sender in self._others:
            return
        self._others.add(sender)
        left_out = f"{sender} is left out" if self._holds_any() else "this helper serves nothing beside it"
        what = f"{sender} moves the parameters by {name}, and this helper by {self.optimizer.name}"
        self.tell(Notice(f"{what}: {left_out}; start all helpers with the same optimizer and [server]", True))

    def _holds_any(self) -> bool:
        return any(seat.owner is not None or seat.replica is not None for seat in self.seats.values())

    def _from_trainer(self, sender: Voter, m: PushOffer | PullReq) -> None:
        seat = self.seats.get(m.span)
        view = self.witness.established.get(m.span)
        if seat is None or seat.owner is None or m.term != seat.owner.view.term:
            if view is not None:
                self.send(sender, Established(view))
        elif m.layout != seat.owner.state.spans.digest:
            self._misfits.add(sender)
            raise ProtocolError(f"{type(m).__name__} for another layout than {layout_of(self.spans)}")
        elif not self.cut_off():
            if isinstance(m, PushOffer):
                seat.owner.receive_push(sender, m)
            else:
                seat.owner.receive_pull(sender, m)

    # ---------------------------------------------------------------- time

    def look(self) -> None:
        self.images_bytes = 0
        living = self.living(HELPER)
        self._others = {v for v in self._others if not self.members.gone(v)}
        helpers = tuple(sorted(v.peer for v in living if v not in self._others))
        aside = len(helpers) < len(living) and not self._holds_any()
        if self._unreached.look():
            self._tell_views(living)
        shunned = self._unreached.shunned(helpers)
        if (helpers, shunned) != (self._helpers, self._shunned):
            self._helpers, self._shunned, self._same_since = helpers, shunned, self.now
        self._ask_views()
        self._spread_views()
        self._tell_misfits()
        if self.spans is None or self.me.peer not in helpers:
            return
        wanted = assign(self.spans.n, helpers, shunned)
        cut_off = self.cut_off()
        for span, seat in self.seats.items():
            if seat.claim is not None:
                self._claims.press(span, seat, seat.claim)
            if cut_off or aside:
                continue
            if seat.owner is not None:
                self._look_after(span, seat, seat.owner, wanted)
                seat.owner.look()
            else:
                self._look_at_other(span, seat, wanted)
        for notice in self.tidings.due(self.now):
            self.tell(notice)
        self._tell_alone()

    def _ask_views(self) -> None:
        """Everybody; those who come later, or again, too: what a helper told before it was away is forgotten."""
        living = self.living(HELPER, TRAINER)
        self._answered.intersection_update(living)
        if self.now < self._asked_at + ASK_S:
            return
        unasked = [v for v in living if v not in self._answered and v != self.me]
        if unasked:
            self._asked_at = self.now
            self.cast(unasked, AskViews(layout_of(self.spans), self.optimizer.name))

    def _spread_views(self) -> None:
        others = [v for v in self.living(HELPER, TRAINER) if v != self.me]
        if others and self.witness.established and self.now >= self._spread_at + SPREAD_S:
            self._spread_at, self._turn = self.now, self._turn + 1
            self._tell_views([others[self._turn % len(others)]])

    def _tell_views(self, voters: list[Voter]) -> None:
        self.tell_views(voters, self.optimizer.name, self._unreached.mine)

    def _tell_misfits(self) -> None:
        self._tell_views(sorted(self._misfits))
        self._misfits.clear()

    def _tell_alone(self) -> None:
        """In one line: a helper that is the only one has all of them. Not at the end of a run, which helpers leave one
        after the other: once somebody trains."""
        if not self._alone or self.now < self._alone_since + WAIT_S or not self.living(TRAINER):
            return
        alone = sorted(span for span in self._alone if (owner := self.seats[span].owner) is not None and owner.solo)
        self._alone.clear()
        if not alone:
            return
        has = "has" if len(alone) == 1 else "have"
        self.tell(Notice(f"{spans_text(alone)} {has} no standby now: start another helper", True))

    def _informed(self) -> bool:
        known = self.known()
        return 2 * len(self._answered.intersection(known) | {self.me}) > len(known)

    # ---------------------------------------------------------------- my own spans

    def _look_after(self, span: int, seat: Seat, owner: SpanOwner, wanted: Assignment) -> None:
        """See to it that there is a standby, and that the span is where it belongs."""
        first, second = wanted[span]
        choice = self._within_reach(span, second if first == self.me.peer else first)
        standby = owner.view.standby
        healthy = standby is not None and self.lives(standby) and not owner.followers.stalled(standby, SOLO_AFTER_S)
        candidate = self._voter_of(choice)
        if seat.claim is not None or self.now < seat.retry_at:
            return
        owner.followers.keep_only(standby, candidate)
        if len(owner.followers.log) >= LOG_MAX:
            self._let_go(owner, standby)
        if not healthy:
            self._replace_standby(span, seat, owner, candidate)
            return
        seat.candidate = None
        if standby is not None and self._belongs_to(standby.peer, first):
            if self._may_move(span):
                owner.closing = True
            if owner.closing and owner.quiet and owner.holds_all(standby):
                self._claims.make(span, seat, owner.state, standby, self.me)
        elif candidate is not None and candidate != standby and self._may_move(span):
            owner.closing = False
            owner.followers.add(candidate)
            if owner.holds_all(candidate):
                owner.also = candidate
                self._claims.make(span, seat, owner.state, self.me, candidate)
        else:
            owner.closing = False

    def _let_go(self, owner: SpanOwner, standby: Voter | None) -> None:
        """No update is made while the log is full: it is kept for no replica in the making that is not taken (control
        passes, and bulk does not). The next try begins with an image of today."""
        stalled = [v for v in owner.followers.all if v != standby and owner.followers.stalled(v, SOLO_AFTER_S)]
        for voter in stalled:
            owner.followers.remove(voter)
        if stalled:
            owner.apply()

    def _replace_standby(self, span: int, seat: Seat, owner: SpanOwner, candidate: Voter | None) -> None:
        owner.closing = False
        if candidate != seat.candidate:
            seat.candidate, seat.candidate_since = candidate, self.now
        if candidate is not None and candidate != owner.view.standby:
            follower = owner.followers.add(candidate)
            if owner.holds_all(candidate):
                owner.also = candidate
                self._claims.make(span, seat, owner.state, self.me, candidate)
                return
            if self.now < seat.candidate_since + SOLO_AFTER_S:
                owner.solo = owner.solo and follower.taken < 0  # else it would never catch up with what is applied
                return
        if owner.view.standby is not None:
            self._claims.make(span, seat, owner.state, self.me, None)
        elif not owner.solo:
            owner.solo = True
            self._alone_since = self._alone_since if self._alone else self.now
            self._alone.add(span)
            owner.make()
            owner.apply()

    def _belongs_to(self, standby: PeerId, first: PeerId) -> bool:
        """The span goes to its standby: that is the first choice, or will give it to that one, which I do not reach."""
        if first == self.me.peer or self.me.peer not in self._shunned or self.members.relay_for(first) is None:
            return standby == first != self.me.peer
        return standby not in self._shunned

    def _within_reach(self, span: int, choice: PeerId | None) -> PeerId | None:
        """Who is to be the standby: the choice, or, where no vector of mine reaches it, the next that I reach."""
        ranked = sorted(ranking(span, self._helpers), key=self._shunned.__contains__)
        others = [choice, *(helper for helper in ranked if helper != self.me.peer)]
        reached = (peer for peer in others if peer is not None and self.members.relay_for(peer) is None)
        return next(reached, choice)

    def _may_move(self, span: int) -> bool:
        """Moves of free choice wait until helpers have stopped coming and going, and a few go at a time."""
        if self.now < self._same_since + SETTLE_S:
            return False
        moving = [s for s, seat in self.seats.items() if s != span and seat.owner is not None and _moves(seat.owner)]
        return len(moving) < MOVES_MAX

    def _voter_of(self, peer: PeerId | None) -> Voter | None:
        record = self.members.record(peer) if peer is not None else None
        return None if record is None or record.voter == self.me else record.voter

    # ---------------------------------------------------------------- spans of others

    def _look_at_other(self, span: int, seat: Seat, wanted: Assignment) -> None:
        view = self.witness.established.get(span)
        if seat.claim is not None or self.now < seat.retry_at:
            return
        if view is not None and view.owner == self.me:  # and I hold nothing of it
            if view.standby is not None and self.lives(view.standby):
                self._claims.give_on(seat, view, view.standby)
                return
        elif view is not None and self.lives(view.owner):
            seat.seeding = None
            return
        elif view is not None and view.standby == self.me:
            replica = seat.replica
            if replica is not None and replica.source == view.owner:
                self._claims.make(span, seat, replica.state, self.me, None)
                return
        named = view is not None and self.me in (view.owner, view.standby)  # the others leave it to me
        if (named or wanted[span][0] == self.me.peer) and self._lost(view) and self._informed():
            self._seeder.seed(span, seat)

    def _lost(self, view: SpanView | None) -> bool:
        """Nobody serves the span, and nobody is about to."""
        if view is None:
            return self.now > self._same_since + FOUND_S
        seat = self.seats[view.span]
        mine = self.me in (view.owner, view.standby) and (seat.owner is not None or seat.replica is not None)
        return not mine and all(v in (None, self.me) or self.away(v) for v in (view.owner, view.standby))

    def view_changed(self, view: SpanView) -> None:
        seat = self.seats.get(view.span)
        if seat is None:
            return
        if seat.claim is not None and (view.owner != self.me or seat.claim.view.term <= view.term):
            seat.claim = None  # also one for a greater term: what it was made for is let go of here
        if view.owner != self.me:
            if seat.owner is not None:
                self._step_down(view, seat, seat.owner)
            seat.seeding = None
            if seat.replica is not None and seat.replica.source != view.owner:
                seat.replica = None
        elif seat.owner is not None:
            seat.owner.renew(view)
        else:
            self._take_over(view, seat)

    def _take_over(self, view: SpanView, seat: Seat) -> None:
        seeded = seat.seeding is not None and view.seed_term == view.term
        held = seat.seeding if seeded else seat.replica
        state = held.state if held is not None else None
        seat.replica = seat.seeding = None
        if state is None:
            self.tell(Notice(f"span {view.span} was given to me, and I hold nothing of it", True))
            return
        seat.owner = SpanOwner(self, view, state, self.rules, partial(next, self._serial))
        seat.candidate = None
        self.tidings.add("mine now", view.span, state.version, self.now)

    def _step_down(self, view: SpanView, seat: Seat, owner: SpanOwner) -> None:
        owner.close()
        seat.owner = None
        if view.standby == self.me:
            seat.replica = Replica(view.owner, NO_ERA, owner.state)
        by_hand = view.term == owner.view.term + 1 and view.standby == self.me
        if not by_hand:
            self.tidings.add(f"{view.owner}'s now, and mine given up", view.span, owner.state.version, self.now)


def _moves(owner: SpanOwner) -> bool:
    return owner.closing or any(v != owner.view.standby for v in owner.followers.all)
