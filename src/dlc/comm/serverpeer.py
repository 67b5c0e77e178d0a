"""What helpers and trainers of a parameter server have in common: they witness claims, and fetch and hold payloads."""

from __future__ import annotations

from typing import Protocol

from dlc.comm.claims import Witness, order
from dlc.comm.detector import HEARTBEATS_MAX
from dlc.comm.effects import Effect, Notify, Send
from dlc.comm.events import MemberDown, MemberLeft, MemberUp
from dlc.comm.grid import Grid
from dlc.comm.ids import PeerId, Voter
from dlc.comm.messages import Bulk, Message
from dlc.comm.roles import HELPER, TRAINER
from dlc.comm.servermessages import (
    NUMBERS_AHEAD_MAX,
    SERVER_MESSAGES,
    Claim,
    Established,
    Layout,
    NoPart,
    Part,
    PartReq,
    Refused,
    SpanView,
    TellViews,
    check_numbers,
    check_origin,
)
from dlc.comm.servershelf import Fetches, Shelf
from dlc.comm.service import MemberEvent, Members, ServiceNews
from dlc.comm.spans import SPANS_MAX, Spans
from dlc.errors import ConfigError, ProtocolError

TICK_S = 0.25
"""A server's machines look around at least this often."""
START_S = 15.0
"""A swarm that begins with a checkpoint waits so long for trainers with a newer one, and for those that are members and
have not said yet what they hold; from the first trainer on."""

VIEWS_MAX = 256
"""In one message, which has a greatest length: of a training that was stopped as often as is remembered,
a view takes some 4 KB."""


class ServerMembers(Members, Protocol):
    """What they ask about the others beyond that."""

    def unseen_s(self, voter: Voter) -> float: ...

    @property
    def t_evict_s(self) -> float: ...

    @property
    def t_remove_s(self) -> float: ...


class Notice(ServiceNews):
    """Something that people should read: the library logs it."""

    __slots__ = ("serious", "text")

    def __init__(self, text: str, serious: bool = False) -> None:
        self.text, self.serious = text, serious


class ServerPeer:
    """One event after the other: `now` is that of the present one, `out` what it brought about."""

    takes: tuple[type, ...] = SERVER_MESSAGES

    def __init__(self, members: ServerMembers, now: float) -> None:
        self.members, self.me = members, members.me
        self.now = now
        self.out: list[Effect] = []
        self.witness = Witness()
        self.shelf = Shelf()
        self.fetches = Fetches(self.send, members.rtt_s, members.gone)
        self.spans: Spans | None = None
        """None until a trainer told the layout."""
        self.images_bytes = 0
        """Of images of spans, for replicas, that were made since I last began to look."""
        self._looked_at = float("-inf")

    # ---------------------------------------------------------------- the service

    def receive(self, sender: Voter, message: Message, now: float) -> list[Effect]:
        self.now = now
        self._take(sender, message)
        return self._drain()

    def tick(self, now: float) -> list[Effect]:
        self.now = now
        self.fetches.tick(now)
        if now >= self._looked_at + TICK_S:
            self._looked_at = now
            self.look()
        return self._drain()

    def next_deadline(self) -> float | None:
        own, fetch = self._looked_at + TICK_S, self.fetches.next_deadline()
        return own if fetch is None else min(own, fetch)

    def member(self, event: MemberEvent, now: float) -> list[Effect]:
        self.now = now
        if isinstance(event, MemberDown | MemberLeft):
            self.shelf.forget(event.voter.peer)
            self.fetches.lost(event.voter)
        if isinstance(event, MemberUp | MemberDown | MemberLeft):
            self.look()
        return self._drain()

    def pending_bulk(self) -> list[PeerId]:
        return self.shelf.pending()

    def next_bulk(self, peer: PeerId) -> Bulk | None:
        return self.shelf.next_bulk(peer)

    def bulk_peers(self) -> list[PeerId]:
        return [v.peer for v in self.living(HELPER) if v != self.me]

    @property
    def resting(self) -> bool:
        return self.fetches.resting and not self.shelf.pending()

    # ---------------------------------------------------------------- what the two sides do

    def look(self) -> None:
        """Do what is due."""
        raise NotImplementedError

    def take(self, sender: Voter, message: Message) -> None:
        """A message that only one side gets."""
        raise NotImplementedError

    def view_changed(self, view: SpanView) -> None:
        """A greater view holds."""
        raise NotImplementedError

    # ---------------------------------------------------------------- common messages

    def _take(self, sender: Voter, message: Message) -> None:
        if isinstance(message, PartReq):
            answer = self.shelf.receive_request(sender, message)
            if answer is not None:
                self.send(sender, answer)
        elif isinstance(message, Part):
            self.fetches.receive(sender, message, self.now)
        elif isinstance(message, NoPart):
            self.fetches.refused(sender, message)
        elif isinstance(message, Claim):
            self.check_view(message.view)
            self.send(sender, self.witness.asked(message.view))
        elif isinstance(message, Established):
            self.learn(message.view)
            known = self.witness.established[message.view.span]
            if order(known) > order(message.view):
                self.send(sender, Established(known))  # it has not heard yet
        else:
            if isinstance(message, Refused):
                self.check_view(message.view)
                if message.established:
                    self.learn(message.view)
            self.take(sender, message)

    def learn(self, view: SpanView) -> None:
        self.check_view(view)
        if self.witness.learn(view):
            self.view_changed(view)

    def check_view(self, view: SpanView) -> None:
        self.check_span(view.span)
        check_numbers(view.term, view.seed_term, view.seed_version)
        check_origin(view.origin)
        if view.term >= self.witness.term_after(view.span) + NUMBERS_AHEAD_MAX:
            raise ProtocolError(f"a view of term {view.term}: nobody could claim that span any more")
        record = self.members.record(view.owner.peer)
        if record is not None and record.voter == view.owner and record.role != HELPER:
            raise ProtocolError(f"a view in which {view.owner} owns a span, a {record.role[:40]}")

    def check_span(self, span: int) -> None:
        n = SPANS_MAX if self.spans is None else self.spans.n
        if not 0 <= span < n:
            raise ProtocolError(f"span {span} of {n}")

    # ---------------------------------------------------------------- members

    def voters(self, *roles: str) -> list[Voter]:
        """Who is known and has not left, me included."""
        return [r.voter for r in self.members.records() if r.role in roles and not self.members.gone(r.voter)]

    def lives(self, voter: Voter) -> bool:
        """As far as I know; in swarms too large to ping all of them this is gossip."""
        members = self.members
        return members.alive(voter) or (len(members.records()) > HEARTBEATS_MAX and members.up(voter))

    def living(self, *roles: str) -> list[Voter]:
        return [v for v in self.voters(*roles) if self.lives(v)]

    def known(self) -> list[Voter]:
        """Whose majority decides about views."""
        evict_s = self.members.t_evict_s
        return [v for v in self.voters(HELPER, TRAINER) if v == self.me or self.members.unseen_s(v) < evict_s]

    def cut_off(self) -> bool:
        """Most of those known are not to be reached: what I hold may be out of date."""
        known = self.known()
        return 2 * sum(self.lives(v) for v in known) <= len(known)

    # ---------------------------------------------------------------- out

    def send(self, to: Voter, message: object) -> None:
        self.out.append(Send(to.peer, message))

    def cast(self, voters: list[Voter], message: object) -> None:
        for voter in voters:
            if voter != self.me:
                self.send(voter, message)

    def tell_views(self, voters: list[Voter], optimizer: str, unreached: tuple[PeerId, ...]) -> None:
        """All that are established; one message at least: it tells the layout, too."""
        views = tuple(self.witness.established.values())
        for first in range(0, max(1, len(views)), VIEWS_MAX):
            part = views[first : first + VIEWS_MAX]
            self.cast(voters, TellViews(layout_of(self.spans), optimizer, part, unreached))

    def tell(self, news: ServiceNews) -> None:
        self.out.append(Notify(news))

    def _drain(self) -> list[Effect]:
        out, self.out = self.out, []
        return out


def layout_of(spans: Spans | None) -> Layout | None:
    if spans is None:
        return None
    return Layout(spans.grid.numel, spans.grid.chunk_elems, spans.grid.codec, spans.n)


def spans_of(layout: Layout) -> Spans:
    """ProtocolError where there can be no such layout."""
    try:
        return Spans(Grid(layout.numel, layout.chunk_elems, layout.codec), layout.n_spans)
    except ConfigError as error:
        raise ProtocolError(f"a layout that cannot be: {error}") from None
