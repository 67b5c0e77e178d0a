"""How a group comes to be, without a master: those who wait with one key find each other on the board.

    Wish on the board ──> all wait for the same peers, and all are there ──────────────────────> groups.py
                     └──> the first in rank of those who wait: Invite ──> Accept ──> Begin ──> groups.py
                                                                    └──> Decline: it is in another group already

Everyone who waits shows a `Wish` under the group's key. Where all whom I wait for wait for just these, too, their
wishes are the group (crowd.py). Otherwise it takes one that gathers them: the rank is a hash of key and peer, so all
agree who is first as far as they see the same wishes; it invites, once

- as many wait as the group is to have (`target`), or
- everybody whom it expects is there: those whom the caller named and who are up, or else all trainers who are up, or
- the first of those who wait would have to give up soon (its wish is about to expire), and there are `least`.

Who does not answer in time is left out, who declines too; one that has given its call up has as long to make another.
If the first does nothing, the next in rank does it RANK_GRACE_S later. One who has accepted waits for Begin for
ANSWER_S, then it is free; two groups that form at once take each peer once, because whoever has accepted declines.

`least` is everybody's own: whoever wants more than a group would have is left out of it, and waits on; where too few
are left for the one who invites, nobody begins. `target` is that of the one who invites.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from blake3 import blake3

from dlc.comm.board import REPEAT_FIRST_S, TTL_S_MAX, Board
from dlc.comm.calls import MISFIT, Call, GoneOn, GroupFormed, MeetingFailed
from dlc.comm.crowd import AGAIN_S, ANSWER_S, GATHER_SHOWN_MAX, Crowd, answer_s, crowd_digest, crowd_nonce
from dlc.comm.ground import Ground
from dlc.comm.ids import PeerId, Voter
from dlc.comm.meshmessages import Accept, Begin, Cancel, Decline, Done, Invite, Wish
from dlc.comm.messages import GridSpec
from dlc.comm.roles import OBSERVER, TRAINER
from dlc.comm.seating import GROUP_MAX, seats_of, sound, wish_of
from dlc.comm.wire import pack
from dlc.errors import ProtocolError

BOARD_PREFIX = "meet/"
RANK_GRACE_S = 1.5
RANKS_MAX = 4
"""As many steps in, the rank adds no more."""
LINGER_S = 15.0
"""A wish stays on the board for so long after its end, unless it is withdrawn: its owner may be invited still."""
WITHDRAWN_S = 15.0
"""That a wish is withdrawn is told for so long: of calls with a key each there would be ever more on the board, and all
are repeated. Who does not hear of it invites in vain."""
PATIENCE_S_MAX = TTL_S_MAX - LINGER_S
"""Of one call: no wish stays on the board for longer."""
HASTE_S = 1.0
"""The group is formed so long before the first of those who wait would give up."""
NONCES_MAX = 16
"""Groups that are not begun here of which it is kept who needs nothing any more."""
GATHER_BYTES_MAX = 32 << 10
"""What one member gives all others with Begin, which is one message."""


@dataclass
class Forming:
    """I invite."""

    nonce: int
    wishes: dict[Voter, Wish]
    until: float
    again: float
    accepted: dict[Voter, bytes] = field(default_factory=dict)
    declined: set[Voter] = field(default_factory=set)


@dataclass
class Accepted:
    """I wait for Begin."""

    leader: Voter
    nonce: int
    until: float
    again: float


class Meeting:
    """One call that waits for its group."""

    def __init__(
        self,
        ground: Ground,
        board: Board,
        call: Call,
        begun: Callable[[Meeting, Voter, Begin, Collection[Voter]], None],
        given_up: Wish | None = None,
    ) -> None:
        """begun: told of the leader, its Begin, and who has said already that it needs nothing of the group.
        given_up: the wish of this key that I gave up last."""
        self.ground, self.board, self.call, self._begun = ground, board, call, begun
        self.over = False
        self._given_up = given_up
        grid, own = call.grid, ground.members.record(ground.me.peer)
        peers = self._may_crowd()
        self.wish = Wish(
            ground.rng.getrandbits(48) or 1,
            GridSpec(grid.numel, grid.chunk_elems, grid.codec),
            call.weight if call.vector is not None else 0.0,
            call.label,
            call.vector is not None,
            call.owns,
            call.out is not None,
            call.target,
            call.least,
            own.up_Bps if own else 0.0,
            own.down_Bps if own else 0.0,
            crowd_digest(peers) if peers else b"",
            call.gather if peers else b"",
            tuple(ground.apart()[:GROUP_MAX]),
        )
        self._crowd = Crowd(ground.me, self.wish, peers) if peers else None
        self._until_run = ground.running_s + call.patience_s
        self._here_since: float | None = None
        """Running time since which all that I wait for have been here."""
        self._gone_run: float | None = None
        """Running time at which some that I waited for had gone on."""
        self._ends: dict[Voter, float] = {}
        """When (running time) each of the others gives up waiting."""
        self._state: Forming | Accepted | None = None
        self._shunned: dict[Voter, float] = {}
        """Who did not answer my invitation, until when it gets no other."""
        self._misfits: set[PeerId] = set()
        self._read: dict[Voter, tuple[bytes, Wish | None]] = {}
        self._finished: dict[int, set[Voter]] = {}
        """By group: whose Done has overtaken its beginning."""
        named = call.expected if isinstance(call.expected, tuple) and not call.target else None
        to = named if call.show_to is None else call.show_to
        board.post(BOARD_PREFIX + call.key, pack(self.wish), call.patience_s + LINGER_S, to)

    def _may_crowd(self) -> frozenset[PeerId]:
        """Those whom I wait for, and I, where they may be a group by themselves; empty: I am to be invited."""
        if self._given_up is not None or len(self.call.gather) > GATHER_SHOWN_MAX:
            return frozenset()
        try:
            peers = (self._expected() or set()) | {self.ground.me.peer}
        except _ExpectedRaised:  # and again when I look
            return frozenset()
        return frozenset(peers) if max(self.call.least, 2) <= len(peers) <= self._size_max else frozenset()

    # ---------------------------------------------------------------- who waits

    def _others(self) -> dict[Voter, Wish]:
        """Who waits with this key and the same vector, and is up."""
        found: dict[Voter, Wish] = {}
        for posted in self.board.get(BOARD_PREFIX + self.call.key).values():
            voter, members = posted.author, self.ground.members
            if voter == self.ground.me or not members.up(voter):
                continue
            wish = self._wish_of(voter, posted.value)
            if wish is None or wish.grid != self.wish.grid:
                self._misfits.add(voter.peer)
                continue
            self._ends[voter] = self.ground.running_s + posted.until - LINGER_S - self.ground.now
            found[voter] = wish
            if self._crowd is not None:
                self._crowd.see(voter, wish)
        return found

    def _wish_of(self, voter: Voter, value: bytes) -> Wish | None:
        """Read once: everybody's is looked at whenever anything happens."""
        known = self._read.get(voter)
        if known is None or known[0] is not value:
            known = self._read[voter] = value, wish_of(value)
        return known[1]

    def likely(self) -> list[Voter]:
        """Who may be in my group: links to them are opened while it forms."""
        return sorted(self._others(), key=self._rank)[: self._size_max]

    def _rank(self, voter: Voter) -> bytes:
        return blake3(f"{self.call.key}\0{voter.peer}".encode()).digest(8)

    # ---------------------------------------------------------------- time

    def advance(self) -> None:
        """Something has changed, or time has passed."""
        if self.over:
            return
        now, state = self.ground.now, self._state
        if isinstance(state, Forming):
            self._form(state)
        elif isinstance(state, Accepted):
            if now >= state.until or not self.ground.members.up(state.leader):
                self._state = None
            elif now >= state.again:
                state.again = now + AGAIN_S
                self.ground.send(state.leader, Accept(self.call.key, state.nonce, self.call.gather))
        if self._state is None and not self.over:
            self._look()

    def _look(self) -> None:
        """Is it for me, and time, to form a group?"""
        running_s, others = self.ground.running_s, self._others()
        free = {v: w for v, w in others.items() if self._shunned.get(v, 0.0) <= self.ground.now}
        wishes = {**free, self.ground.me: self.wish}
        ranked = sorted(wishes, key=self._rank)
        place = min(ranked.index(self.ground.me), RANKS_MAX)
        try:
            expected = self._expected()
        except _ExpectedRaised as raised:
            if isinstance(raised.error, GoneOn) and self._crowd is not None and self._gone_for() < self._answer_s:
                return  # perhaps to a group of my wish: I am told of it then
            self.close()
            self.ground.notify(MeetingFailed(self.call, f"expected() raised {raised.error!r}", raised.error))
            return
        if self._form_crowd() or self._about_to_be(others, expected):
            return
        everybody = len(free) == len(others) and expected is not None and expected <= {v.peer for v in wishes}
        due = self._due(wishes, everybody)
        if running_s >= due + place * RANK_GRACE_S:
            chosen = self._enough({v: wishes[v] for v in ranked})
            if self.ground.me in chosen:
                self._invite({v: wishes[v] for v in chosen})
                return
        if running_s >= self._end({**others, self.ground.me: self.wish}, place) or self._in_vain(wishes):
            self._give_up(wishes)

    def _in_vain(self, wishes: dict[Voter, Wish]) -> bool:
        """All who were named are here, for long enough that each of them sees it, and none of them brings anything:
        nobody else will come."""
        named, since = self.call.expected, self._here_since
        if not isinstance(named, tuple) or self.call.target or since is None or _contributed(wishes.values()):
            return False
        seen_run = since + REPEAT_FIRST_S + self._rtt_s(self.ground.up())
        return self.ground.running_s >= seen_run and {v.peer for v in wishes}.issuperset(named)

    def _end(self, wishes: dict[Voter, Wish], place: int) -> float:
        """Running time at which I give up: no group is to be hoped for among those who wait (`wishes`, of which I am
        the `place`-th), or none has come about."""
        if self._enough(wishes):
            return self._until_run + (place + 1) * RANK_GRACE_S + ANSWER_S
        return self._lonely_end

    @property
    def _lonely_end(self) -> float:
        """The same where too few wait: a wish that was shown in time may still be on its way to me."""
        return self._until_run + REPEAT_FIRST_S + self._rtt_s(self.ground.up())

    @property
    def _answer_s(self) -> float:
        """Within it I am told of a group of my wish."""
        return answer_s(self._rtt_s(self.ground.up()))

    @property
    def _n_chunks(self) -> int:
        return self.call.grid.n_chunks

    @property
    def _size_max(self) -> int:
        """Of a group that I form."""
        return self.call.target or GROUP_MAX

    def _enough(self, ranked: dict[Voter, Wish]) -> tuple[Voter, ...]:
        """The first of them that may be a group of mine, each of whom finds it large enough; none where too few may."""
        fits, n = list(ranked), len(ranked) + 1
        while len(fits) < n:
            n = len(fits)
            fits = [v for v in fits if ranked[v].least <= min(n, self._size_max)]
        chosen = fits[: self._size_max]
        contributed = _contributed(ranked[v] for v in chosen)
        return tuple(chosen) if contributed and len(chosen) >= max(self.call.least, 1) else ()

    def _due(self, wishes: dict[Voter, Wish], everybody: bool) -> float:
        """Running time from which the first in rank forms the group. everybody: all whom I expect are here."""
        n = sum(w.least <= self._size_max for w in wishes.values())
        if (everybody and n >= self.call.least) or n >= self._size_max:
            self._here_since = self.ground.running_s if self._here_since is None else self._here_since
            return self._here_since
        self._here_since = None
        ends = [self._ends[v] for v in wishes if v != self.ground.me]
        return min([*ends, self._until_run]) - min(HASTE_S, self.call.patience_s / 2)

    def _expected(self) -> set[PeerId] | None:
        """Whom I wait for, of those who are up; None: nobody in particular, but for the target."""
        members, expected = self.ground.members, self.call.expected
        if self.call.target and expected is None:
            return None
        try:
            named = None if expected is None else frozenset(expected() if callable(expected) else expected)
        except BaseException as error:  # it is the caller's, who is told
            raise _ExpectedRaised(error) from error
        roles = {v.peer: record.role for v in self.ground.up() if (record := members.record(v.peer)) is not None}
        if named is None:
            return {peer for peer, role in roles.items() if role == TRAINER or peer == self.ground.me.peer}
        return {peer for peer, role in roles.items() if role != OBSERVER} & named

    def _rtt_s(self, others: Iterable[Voter]) -> float:
        return max((self.ground.members.rtt_s(v.peer) for v in others), default=0.0)

    def _give_up(self, wishes: dict[Voter, Wish]) -> None:
        self.close()
        why = f"{len(wishes)} of at least {self.call.least} came"
        wanting = [(v.peer[:8], w.least) for v, w in wishes.items() if w.least > len(wishes) >= self.call.least]
        if wanting:
            why += "; " + ", ".join(f"{peer} wants at least {least}" for peer, least in sorted(wanting))
        if not any(w.contributes for w in wishes.values()):
            why = "nobody came who contributes"
        elif not _contributed(wishes.values()):
            why = "of those who came, all who contribute give weight 0"
        if self._misfits:
            names = ", ".join(sorted(peer[:8] for peer in self._misfits))
            why += f"; {names} {MISFIT}"
        self.ground.notify(MeetingFailed(self.call, why))

    def close(self) -> None:
        """Wait no longer: whoever invited me, or whom I invited, is told."""
        state, self._state, self.over = self._state, None, True
        if self._crowd is not None:
            decline = Decline(self.call.key, 0, self.wish.nonce)
            for voter in self.ground.up():
                if voter.peer in self._crowd.peers:
                    self.ground.send(voter, decline)
        self.board.withdraw(BOARD_PREFIX + self.call.key, WITHDRAWN_S)
        if isinstance(state, Forming):
            self._cancel(state, state.wishes)
        elif isinstance(state, Accepted):
            self.ground.send(state.leader, Decline(self.call.key, state.nonce, self.wish.nonce))

    def next_deadline(self) -> float:
        """Waiting has but one exact deadline, that of the lonely: for the rest the node's usual ticks are often enough,
        for formations not."""
        now = self.ground.now
        if self._state is not None:
            return now + AGAIN_S / 2
        end = self.ground.at(self._lonely_end)
        return min(end, now + AGAIN_S) if end > now else now + AGAIN_S

    # ---------------------------------------------------------------- all at once

    def _form_crowd(self) -> bool:
        """All whom I wait for are there, and wait for just the same ones: we are the group."""
        wishes = self._crowd.whole() if self._crowd is not None else None
        if wishes is None:
            return False
        members = self.ground.members
        others = [v for v in wishes if v != self.ground.me]
        n, most = len(wishes), min(w.target or GROUP_MAX for w in wishes.values())
        if (
            not all(w.least <= n <= most and w.grid == self.wish.grid for w in wishes.values())
            or not _contributed(wishes.values())
            or not all(members.up(v) for v in others)
        ):
            return False
        nonce = crowd_nonce(self.call.key, [(v, w.nonce) for v, w in wishes.items()])
        seats = seats_of(wishes, {v: w.gather for v, w in wishes.items()}, self.call.grid)
        self._start_crowd(Begin(self.call.key, nonce, self.wish.grid, seats, crowd=True))
        return True

    def _about_to_be(self, waiting: Collection[Voter], expected: Collection[PeerId] | None) -> bool:
        """A group of my wish may have formed, that I shall see, or be told of: somebody of my crowd who is up shows its
        wish no longer, and has not given it up; or I wait for one no longer of whom I have seen none (it was lost),
        which those who have seen it are about to show."""
        if self._crowd is None:
            return False
        up, seen = self.ground.up(), self._crowd.seen
        if any(voter in seen and voter not in waiting for voter in up):
            return self._gone_for() < self._answer_s
        unseen = self._crowd.peers & {voter.peer for voter in up} - {voter.peer for voter in seen}
        return expected is not None and not unseen <= set(expected) and self._gone_for() < 2 * self._rtt_s(up)

    def _gone_for(self) -> float:
        """Running time, in seconds, since the first sign that some of my crowd have gone on, which may be this one."""
        if self._gone_run is None:
            self._gone_run = self.ground.running_s
        return self.ground.running_s - self._gone_run

    def _receive_crowd(self, sender: Voter, m: Begin) -> bool:
        """It has formed, of a wish of mine, and I had not seen it; or of the one before, and I offer the same."""
        seats = {seat.voter: seat for seat in m.seats}
        seat = seats.get(self.ground.me)
        nonce = crowd_nonce(m.key, [(s.voter, s.wish) for s in m.seats])
        if seat is None or sender not in seats or nonce != m.nonce or not sound(m, self.wish.grid, self._n_chunks):
            raise ProtocolError(f"{sender} tells of a group that cannot be")
        same = (seat.contributes, seat.receives) == (self.wish.contributes, self.wish.receives)
        if not same or seat.weight > self.wish.weight or len(seats) < self.call.least:
            return False
        if seat.wish != self.wish.nonce and not self._offers_what_was_given_up(seat.wish):
            return False
        if isinstance(self._state, Accepted):
            return True  # that other group may have begun by now; if not, I am told of this one again
        if isinstance(self._state, Forming):
            self._cancel(self._state, self._state.wishes)
        self._start_crowd(m)
        return True

    def _offers_what_was_given_up(self, nonce: int) -> bool:
        """It is of the wish before this one, which had the same weight, and the same bytes to be gathered."""
        before, now = self._given_up, self.wish
        return (
            before is not None
            and before.nonce == nonce
            and (before.weight, before.label, before.owns) == (now.weight, now.label, now.owns)
            and before.gather == self.call.gather
        )

    def _start_crowd(self, begin: Begin) -> None:
        self._start(min((seat.voter for seat in begin.seats), key=self._rank), begin)

    # ---------------------------------------------------------------- the one who invites

    def _invite(self, wishes: dict[Voter, Wish]) -> None:
        now, me = self.ground.now, self.ground.me
        until = now + answer_s(self._rtt_s(v for v in wishes if v != me))
        state = Forming(self.ground.rng.getrandbits(48), wishes, until, now)
        state.accepted[me] = self.call.gather
        self._state = state
        self._form(state)

    def _form(self, state: Forming) -> None:
        now, members = self.ground.now, self.ground.members
        lost = {v for v in state.wishes if v != self.ground.me and not members.up(v)}
        open_ = [v for v in state.wishes if v not in state.accepted and v not in state.declined and v not in lost]
        if open_ and now < state.until:
            if now >= state.again:
                state.again = now + AGAIN_S
                for voter in open_:
                    self.ground.send(voter, Invite(self.call.key, state.nonce, state.wishes[voter].nonce))
            return
        for voter in (*open_, *state.declined):
            self._shunned[voter] = now + ANSWER_S
        taken = {v: state.wishes[v] for v in state.wishes if v in state.accepted and v not in lost}
        if self.ground.me in (chosen := self._enough(taken)):
            self._begin(state, {v: taken[v] for v in chosen})
            return
        self._state = None
        self._cancel(state, state.accepted)

    def _cancel(self, state: Forming, whom: Collection[Voter]) -> None:
        for voter in whom:
            if voter != self.ground.me:
                self.ground.send(voter, Cancel(self.call.key, state.nonce))

    def _begin(self, state: Forming, wishes: dict[Voter, Wish]) -> None:
        seats = seats_of(wishes, state.accepted, self.call.grid)
        begin = Begin(self.call.key, state.nonce, self.wish.grid, seats, crowd=False)
        self._cancel(state, [v for v in state.wishes if v not in wishes])
        for voter in wishes:
            if voter != self.ground.me:
                self.ground.send(voter, begin)
        self._start(self.ground.me, begin)

    # ---------------------------------------------------------------- messages

    def receive_invite(self, sender: Voter, m: Invite) -> None:
        state = self._state
        if isinstance(state, Accepted):
            if (state.leader, state.nonce) != (sender, m.nonce):
                self.ground.send(sender, Decline(m.key, m.nonce, 0))
            else:
                self.ground.send(sender, Accept(m.key, m.nonce, self.call.gather))
        elif isinstance(state, Forming) and self._rank(sender) > self._rank(self.ground.me):
            self.ground.send(sender, Decline(m.key, m.nonce, 0))
        else:
            if isinstance(state, Forming):
                self._cancel(state, state.wishes)
            now = self.ground.now
            until = now + 2 * answer_s(self.ground.members.rtt_s(sender.peer))
            self._state = Accepted(sender, m.nonce, until, now + AGAIN_S)
            self.ground.send(sender, Accept(m.key, m.nonce, self.call.gather))

    def receive_accept(self, sender: Voter, m: Accept) -> None:
        state = self._state
        if not isinstance(state, Forming) or state.nonce != m.nonce or sender not in state.wishes:
            self.ground.send(sender, Cancel(m.key, m.nonce))
        elif len(m.gather) > GATHER_BYTES_MAX:
            state.declined.add(sender)
            raise ProtocolError(f"{sender} gives {len(m.gather)} bytes to be gathered")
        else:
            state.accepted[sender] = m.gather
            self._form(state)

    def receive_decline(self, sender: Voter, m: Decline) -> None:
        state = self._state
        if m.given_up and self._crowd is not None:
            self._crowd.give_up(sender, m.given_up)
        if not isinstance(state, Forming) or state.nonce != m.nonce or sender not in state.wishes:
            return
        invited, wish = state.wishes[sender].nonce, self._others().get(sender)
        if m.given_up and m.given_up != invited:
            return  # a second answer to an invitation of its wish before
        if wish is not None and wish.nonce != invited:
            state.wishes[sender] = wish  # it waits anew: what it declines is for a call that it has given up
            state.accepted.pop(sender, None)
            self.ground.send(sender, Invite(self.call.key, state.nonce, wish.nonce))
        elif m.given_up:
            state.accepted.pop(sender, None)  # it may wait anew: it is asked again as long as answers are waited for
        else:
            state.declined.add(sender)
            state.accepted.pop(sender, None)
            self._form(state)

    def receive_cancel(self, sender: Voter, m: Cancel) -> None:
        state = self._state
        if isinstance(state, Accepted) and (state.leader, state.nonce) == (sender, m.nonce):
            self._state = None

    def receive_begin(self, sender: Voter, m: Begin) -> bool:
        """False: it is too late, I am not in this group. ProtocolError: nor in this one, which cannot be."""
        if m.crowd:
            return self._receive_crowd(sender, m)
        state = self._state
        if not isinstance(state, Accepted) or state.nonce != m.nonce:
            return False
        if state.leader != sender:
            return True  # it is not for this one to say
        seat = next((seat for seat in m.seats if seat.voter == self.ground.me), None)
        if seat is None or not sound(m, self.wish.grid, self._n_chunks):
            self._state = None
            raise ProtocolError(f"{sender} begins a group that cannot be")
        if len(m.seats) < self.call.least:
            self._state = None
            raise ProtocolError(f"{sender} begins a group of {len(m.seats)}, and I want at least {self.call.least}")
        if seat.contributes != self.wish.contributes or seat.weight > self.wish.weight:
            self._state = None
            raise ProtocolError(f"{sender} begins a group with another contribution of mine than I offered")
        self._start(sender, m)
        return True

    def receive_done(self, sender: Voter, m: Done) -> None:
        self._finished.setdefault(m.nonce, set()).add(sender)
        if len(self._finished) > NONCES_MAX:
            del self._finished[next(iter(self._finished))]

    def _start(self, leader: Voter, begin: Begin) -> None:
        self.over, self._state = True, None
        self.board.withdraw(BOARD_PREFIX + self.call.key, WITHDRAWN_S)
        members = tuple(seat.voter.peer for seat in begin.seats)
        self.ground.notify(GroupFormed(self.call, members, frozenset(self._misfits.difference(members))))
        self._begun(self, leader, begin, self._finished.get(begin.nonce, ()))


def _contributed(wishes: Iterable[Wish]) -> bool:
    """Whether a group of them has a mean."""
    return any(wish.contributes and wish.weight > 0 for wish in wishes)


class _ExpectedRaised(Exception):
    """The caller's function that tells whom to expect did, or gave what is no collection of ids."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
