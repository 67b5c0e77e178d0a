"""The owner of one span: takes pushes, makes updates of them, has the standby take each one, applies it, answers.

    push ──fetched──> waiting ──(round complete, or at once)──> update ──> standby takes it ──> applied ──> PushDone
                                                                  └── sent again until taken ──┘

Theta as others see it moves only by updates that the standby holds, so nothing that anybody saw is lost by a takeover.
A push is answered once: when its update is applied, or when it cannot count (it is too old, came after its round, or is
not finite). Until then the trainer repeats its offer, to whoever owns the span then.

A round is closed once all trainers that are alive and took part before have pushed; or `patience_s`, or half of what
the last round took, after the first push, with those that are here, provided that nothing more has come for a while of
a push under way. It is the next one, or a later one, where most trainers name that: they have come to it in other
spans. Who is missing, and why, stands in the update. Who misses a round, and has pushed nothing since the one before,
is neither waited for nor named until it pushes again; who only pulls is waited for once. Without rounds it has a part
of a step until it pulls again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from dlc.comm.codecs import Payload, get_codec
from dlc.comm.entries import Part as RosterPart
from dlc.comm.followers import LOG_MAX, Followers
from dlc.comm.ids import Voter
from dlc.comm.messages import Excluded
from dlc.comm.reducer import WEIGHT_MAX, ChunkReducer
from dlc.comm.roles import TRAINER
from dlc.comm.serverexchange import ASKING
from dlc.comm.servermessages import (
    COUNTED,
    DEAD,
    LATE,
    LEFT,
    NOT_FINITE,
    NUMBERS_AHEAD_MAX,
    SEQ_MAX,
    STALE,
    Counted,
    PullOffer,
    PullReq,
    Push,
    PushDone,
    PushOffer,
    SpanView,
    Update,
    UpdateTaken,
    check_numbers,
)
from dlc.comm.serverpeer import ServerPeer
from dlc.comm.spanstate import SpanState, contributors
from dlc.errors import ProtocolError

SNAPSHOTS_MAX = 4
"""Versions of theta that are kept for those who are fetching them."""
SNAPSHOT_KEEP_S = 60.0
SNAPSHOT_WAIT_S = 4.0
"""Where all of them are being fetched, whoever pulls another version waits so long for one to be through; then that of
which most is left gives way. Else, of many who pull a version each, none might ever have the whole of it."""
LAST_ROUND_SHARE = 0.5
"""A round waits for those who are late at least this part of what the last one took."""
FETCH_STILL_S = 4.0
"""A push that is on its way keeps its round open as long as no two parts are further apart."""


@dataclass(frozen=True)
class Rules:
    """How pushes become updates; the same on all helpers."""

    asynchronous: bool
    max_staleness: int
    """Asynchronous: a push is refused if more updates than this came after its base."""
    patience_s: float
    """Synchronous: least time that a round waits for others after the first push."""


@dataclass
class Waiting:
    offer: PushOffer
    parts: list[Payload]


@dataclass
class _Snapshot:
    key: str
    asked_at: float
    parts: list[Payload] = field(default_factory=list)
    offered: set[Voter] = field(default_factory=set)
    """Who fetches it, or may begin to."""
    given: int = 0
    """Parts that they have got."""

    @property
    def left(self) -> float:
        """Share of what they fetch that has not gone out yet."""
        wanted = len(self.offered) * len(self.parts)
        return max(0, wanted - self.given) / wanted if wanted else 0.0

    def through(self, voter: Voter) -> None:
        """It fetches this no longer."""
        if voter in self.offered:
            self.offered.remove(voter)
            self.given = max(0, self.given - len(self.parts))


class SpanOwner:
    def __init__(
        self, host: ServerPeer, view: SpanView, state: SpanState, rules: Rules, serial: Callable[[], int]
    ) -> None:
        self.host, self.view, self.state, self.rules = host, view, state, rules
        self.solo = False
        """There is nobody to be the standby: updates are applied without."""
        self.closing = False
        """No more updates are made: the span is about to be handed over."""
        self.also: Voter | None = None
        """A standby in the making that is being claimed: what is acknowledged meanwhile must be held by it too."""
        self.followers = Followers(host, state, serial)
        self.issued = state.version
        self._serial = serial
        self._waiting: dict[Voter, Waiting] = {}
        """Synchronous: pushes of the next round."""
        self._fetching: dict[Voter, PushOffer] = {}
        self._pulls: dict[Voter, PullReq] = {}
        self._attending: set[Voter] = self._took_part() or set(host.living(TRAINER))
        """Synchronous: trainers that a round waits for: those in the last one, and those that came since. Asynchronous:
        those among whom a round's step is divided."""
        self._known: set[Voter] = set()
        """Those that pulled, or pushed."""
        self._looked: dict[Voter, int] = {}
        """Number of the first pull since a push."""
        self._heard: set[Voter] = set()
        """Those that offered a push since the last round was closed; others are waited for in one round only."""
        self._refused: set[Voter] = set()
        """Synchronous: whose push of the next round is not finite: they are not waited for."""
        self._first_at: float | None = None
        """When the first push of the next round was here."""
        self._closed_at = host.now
        self._last_round_s = 0.0
        self._snapshots: dict[int, _Snapshot] = {}
        self._full_since: float | None = None
        """Since when pulls wait for one of them."""
        if view.standby is not None:
            self.followers.add(view.standby)

    def _took_part(self) -> set[Voter]:
        """As the state tells: in the last round, or, as an update holds one push, ever."""
        if self.rules.asynchronous:
            return {counted.voter for counted in self.state.counted.values()}
        return set(contributors(self.state.last))

    # ---------------------------------------------------------------- standbys

    def renew(self, view: SpanView) -> None:
        """A view of mine was established: the same owner, another standby."""
        self.view, self.also, self.closing = view, None, False
        self.followers.keep_only(view.standby)
        if view.standby is not None:
            self.solo = False
            self.followers.add(view.standby)
        self.apply()

    def holds_all(self, voter: Voter) -> bool:
        """That replica holds everything that was acknowledged."""
        return self.followers.taken(voter) >= self.state.version

    @property
    def quiet(self) -> bool:
        """Nothing is on its way to the standby."""
        return self.issued == self.state.version

    def receive_taken(self, sender: Voter, m: UpdateTaken) -> None:
        self.followers.receive_taken(sender, m, self.issued, self.view)
        self.apply()

    # ---------------------------------------------------------------- pushes

    def receive_push(self, sender: Voter, m: PushOffer) -> None:
        check_numbers(m.base, m.step)
        if not 0 <= m.weight <= WEIGHT_MAX or not 1 <= m.seq <= SEQ_MAX:
            raise ProtocolError(f"a push with weight {m.weight}, number {m.seq}, base {m.base}, round {m.step}")
        self._attend(sender)
        self._looked.pop(sender, None)
        counted, last = self.state.has(sender, m.seq), self.state.last
        if counted is not None:
            known = last if last is not None and last.version == counted else None
            self._answer(sender, m.seq, COUNTED, known, max(0, counted - 1 - m.base), counted)
            return
        if any(p.voter == sender and p.seq >= m.seq for made in self.followers.log for p in made.update.pushes):
            return  # answered once it is applied
        self._heard.add(sender)
        if self.rules.asynchronous and self.issued - m.base > self.rules.max_staleness:
            self._answer(sender, m.seq, STALE, None, self.issued - m.base)
        elif not self.rules.asynchronous and not self._step < m.step <= self._step + NUMBERS_AHEAD_MAX:
            self._answer(sender, m.seq, LATE, last, 0)  # so that it pulls, and learns which round this is
        elif not self._has(sender, m):
            before = self._fetching.get(sender)
            if before is not None:
                self.host.fetches.cancel(sender, before.key)
            self._fetching[sender] = m
            self._waiting.pop(sender, None)
            sizes = self.state.spans.wire_sizes(self.view.span)
            self.host.fetches.fetch(sender, m.key, sizes, partial(self._fetched, sender, m), self.host.now)

    @property
    def _step(self) -> int:
        """The newest round that is closed."""
        return max([self.state.step, *(made.update.step for made in self.followers.log)])

    def _has(self, sender: Voter, m: PushOffer) -> bool:
        """This push is here or on its way, or one that follows it is."""
        waiting, fetching = self._waiting.get(sender), self._fetching.get(sender)
        if fetching is not None and fetching.seq >= m.seq and self.host.fetches.busy(sender, fetching.key):
            return True
        return waiting is not None and waiting.offer.seq >= m.seq

    def _fetched(self, sender: Voter, m: PushOffer, parts: list[Payload] | None) -> None:
        fetching = self._fetching.get(sender)
        if fetching is None or fetching.key != m.key:
            return
        del self._fetching[sender]
        if parts is None:
            return  # dead, or it will offer again
        spans, span = self.state.spans, self.view.span
        chunks = spans.chunks(span)
        coder = spans.grid.coder
        if not all(coder.finite(part, spans.grid.elems(c)) for c, part in zip(chunks, parts, strict=True)):
            self._answer(sender, m.seq, NOT_FINITE, None, 0)
            self._refused.add(sender)
            self.make()
            return
        if not self.rules.asynchronous and m.step <= self._step:  # its round was closed meanwhile
            self._answer(sender, m.seq, LATE, self.state.last, 0)
            return
        self._refused.discard(sender)
        self._waiting[sender] = Waiting(m, parts)
        self._first_at = self.host.now if self._first_at is None else self._first_at
        self.make()

    def make(self) -> None:
        """Make updates of the pushes that wait, if it is time."""
        if self.closing or not self._waiting or len(self.followers.log) >= LOG_MAX:
            return
        if self.rules.asynchronous:
            for sender in list(self._waiting):
                self._make_one(sender)
        elif self._complete():
            self._make_round()

    def _make_one(self, sender: Voter) -> None:
        waiting = self._waiting.pop(sender)
        m, staleness = waiting.offer, self.issued - waiting.offer.base
        if staleness > self.rules.max_staleness:
            self._answer(sender, m.seq, STALE, None, staleness)
            return
        push = Push(sender, m.seq, m.weight)
        update = Update(self.issued + 1, 0, max(1, len(self._trainers() | {sender})), (push,), ())
        self._issue(update, waiting.parts, {sender: m.base})

    def _attend(self, sender: Voter) -> None:
        self._attending.add(sender)
        self._known.add(sender)

    def _trainers(self) -> set[Voter]:
        """Those that are alive and take part."""
        return self._attending.intersection(self.host.living(TRAINER))

    def _complete(self) -> bool:
        absent = self._trainers() - self._waiting.keys() - self._refused
        if not absent:
            return True
        now, first_at = self.host.now, self._first_at if self._first_at is not None else self.host.now
        if now < first_at + max(self.rules.patience_s, LAST_ROUND_SHARE * self._last_round_s):
            return False
        heard = [self.host.fetches.heard_at(v, m.key) for v, m in self._fetching.items() if v in absent]
        return not any(at is not None and now < at + FETCH_STILL_S for at in heard)

    def _make_round(self) -> None:
        spans, span = self.state.spans, self.view.span
        waiting = dict(sorted(self._waiting.items()))
        roster = tuple(RosterPart(v, w.offer.weight, 0) for v, w in waiting.items())
        payloads: list[Payload] = []
        for at, chunk in enumerate(spans.chunks(span)):
            reducer = ChunkReducer(spans.grid, chunk, roster)
            for index, held in enumerate(waiting.values()):
                reducer.offer(index, held.parts[at])
            payloads.append(reducer.close()[0])
        living = set(self.host.living(TRAINER))
        missing = sorted(self._attending - waiting.keys())
        update = Update(
            self.issued + 1,
            self._named(sorted((held.offer.step for held in waiting.values()), reverse=True)),
            len(waiting),
            tuple(Push(v, held.offer.seq, held.offer.weight) for v, held in waiting.items()),
            tuple(Excluded(v, self._reason(v)) for v in missing),
        )
        self._attending &= (living & self._heard) | waiting.keys()
        self._heard.clear()
        self._refused.clear()
        self._waiting.clear()
        self._first_at = None
        self._last_round_s, self._closed_at = self.host.now - self._closed_at, self.host.now
        self._issue(update, payloads, {v: held.offer.base for v, held in waiting.items()})

    def _named(self, steps: list[int]) -> int:
        """Which round this is, by what its pushes say, in descending order: the next, or the newest to which most of
        the trainers have come elsewhere. One alone may be wrong, and all would follow it."""
        most = len(self._trainers() | self._waiting.keys()) // 2
        return steps[most] if most < len(steps) else self._step + 1

    def _reason(self, voter: Voter) -> str:
        if voter in self._refused:
            return NOT_FINITE
        if self.host.members.gone(voter):
            return LEFT
        return LATE if self.host.lives(voter) else DEAD

    def _issue(self, update: Update, payloads: list[Payload], bases: dict[Voter, int]) -> None:
        self.issued = update.version
        self.followers.make(update, payloads, bases, self.view)
        self.apply()

    def apply(self) -> None:
        """Apply what may be, and answer for it."""
        upto = self._held_by_standby()
        for made in [m for m in self.followers.log if self.state.version < m.update.version <= upto]:
            self.state.apply(made.update, made.payloads)
            self.followers.applied()
            for push in made.update.pushes:
                staleness = max(0, made.update.version - 1 - made.bases[push.voter])  # its base may be lost
                self._answer(push.voter, push.seq, COUNTED, made.update, staleness, made.update.version)
            self._answer_pulls()
        self.followers.trim()

    def _held_by_standby(self) -> int:
        if self.view.standby is None:
            held = self.issued if self.solo else self.state.version
        else:
            held = self.followers.taken(self.view.standby)
        return held if self.also not in self.followers.all else min(held, self.followers.all[self.also].taken)

    def _answer(
        self, to: Voter, seq: int, outcome: str, update: Update | None, staleness: int, version: int = 0
    ) -> None:
        self.host.send(to, PushDone(self.view.span, self.view.term, seq, outcome, version, update, staleness))

    # ---------------------------------------------------------------- pulls

    def receive_pull(self, sender: Voter, m: PullReq) -> None:
        check_numbers(m.number, m.step)
        if m.number != ASKING and self._looked.setdefault(sender, m.number) != m.number:
            if self.rules.asynchronous:
                self._attending.discard(sender)
        elif self.rules.asynchronous or sender not in self._known:
            self._attend(sender)
        if m.number == ASKING:
            self._offer_theta(sender, m, "", ())
            return
        for snapshot in self._snapshots.values():
            snapshot.through(sender)  # what it was offered before it has, or does not want
        self._pulls[sender] = m
        self._answer_pulls()

    def _answer_pulls(self) -> None:
        due = [(v, m) for v, m in self._pulls.items() if not self.state.step < m.step <= self._step]
        if not due or not self._has_room():
            return
        for voter, m in due:  # one that waits for a round after the newest waits for one that was lost
            del self._pulls[voter]
            snapshot = self._snapshot()
            snapshot.offered.add(voter)
            self._offer_theta(voter, m, snapshot.key, tuple(self.state.counted.values()))

    def _has_room(self) -> bool:
        """Whether theta as it is now may be kept, if need be in the place of another one."""
        kept = self._snapshots
        if self.state.version in kept or len(kept) < SNAPSHOTS_MAX or not all(s.left for s in kept.values()):
            self._full_since = None
            return True
        self._full_since = self.host.now if self._full_since is None else self._full_since
        return self.host.now >= self._full_since + SNAPSHOT_WAIT_S

    def _offer_theta(self, to: Voter, m: PullReq, key: str, pushes: tuple[Counted, ...]) -> None:
        view, state = self.view, self.state
        known = view.span, view.term, m.number, state.version, state.step
        self.host.send(to, PullOffer(*known, key, state.newest(to), pushes))

    def _snapshot(self) -> _Snapshot:
        """Theta as it is now, frozen."""
        version = self.state.version
        snapshot = self._snapshots.get(version)
        if snapshot is None:
            self._make_room()
            spans, span, coder = self.state.spans, self.view.span, get_codec("fp32")
            first = spans.elements(span)[0]
            cuts = ([at - first for at in spans.grid.span(chunk)] for chunk in spans.chunks(span))
            parts: list[Payload] = [coder.encode(self.state.theta[a:b]) for a, b in cuts]
            snapshot = _Snapshot(f"theta/{span}/{self._serial()}", self.host.now, parts)
            self._snapshots[version] = snapshot
            self.host.shelf.hold(snapshot.key, len(parts), partial(self._part, snapshot))
        snapshot.asked_at = self.host.now
        return snapshot

    def _make_room(self) -> None:
        """Of those that all have who were to, the oldest gives way; else that of which most is left."""
        self._full_since = None
        kept = self._snapshots
        if len(kept) >= SNAPSHOTS_MAX:
            self._forget(max(kept, key=lambda v: (not kept[v].left, kept[v].left, -kept[v].asked_at)))

    def _part(self, snapshot: _Snapshot, index: int) -> Payload:
        """For who fetches it: as long as somebody does, it is kept."""
        snapshot.asked_at, snapshot.given = self.host.now, snapshot.given + 1
        return snapshot.parts[index]

    def _forget(self, version: int) -> None:
        self.host.shelf.drop(self._snapshots.pop(version).key)

    # ---------------------------------------------------------------- time and end

    def look(self) -> None:
        """Send again what was not answered, close the round if it is time."""
        self.followers.repeat(self.issued, self.view)
        if self.rules.asynchronous:  # a round names those that left
            self._attending = {v for v in self._attending if not self.host.members.gone(v)}
        self._known = {v for v in self._known if not self.host.members.gone(v)}
        self._refused &= self._known
        self._looked = {v: number for v, number in self._looked.items() if v in self._known}
        if not self._waiting:
            self._first_at = None
        self.make()
        self.apply()
        for version in [v for v, s in self._snapshots.items() if self.host.now > s.asked_at + SNAPSHOT_KEEP_S]:
            self._forget(version)

    def close(self) -> None:
        """Another owns the span now."""
        self.followers.close()
        for voter, m in self._fetching.items():
            self.host.fetches.cancel(voter, m.key)
        self._fetching.clear()
        for version in list(self._snapshots):
            self._forget(version)
