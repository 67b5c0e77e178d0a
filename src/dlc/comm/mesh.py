"""The machines outside the log that every averaging without one is built of, as one service of a node.

    board      small notices on every peer                     board.py, heirs.py
    parcels    vectors pulled chunk by chunk from holders      parcels.py, holdings.py
    meetings   who waits with one key forms a group            meetings.py
    groups     the all-reduce of a group                       groups.py
    gossip     shares of mass between neighbours               gossip.py

Here messages find their machine, and members that die or leave are told to all. What the driver asks is at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from dlc.comm import meshmessages as mm
from dlc.comm.board import Board
from dlc.comm.calls import Call
from dlc.comm.crowd import NOT_COME
from dlc.comm.effects import Effect
from dlc.comm.events import MemberUp
from dlc.comm.gossip import NONE_YET, Gossip, Settled
from dlc.comm.grid import Grid
from dlc.comm.ground import Ground
from dlc.comm.groupowner import CONTRIBUTION, RESULT, key_of
from dlc.comm.groups import Reduction
from dlc.comm.heirs import Heirs
from dlc.comm.holdings import Tally
from dlc.comm.ids import PeerId, Voter
from dlc.comm.meetings import Meeting
from dlc.comm.messages import Bulk, Message
from dlc.comm.parcels import DEAD, LEFT, Parcels
from dlc.comm.seating import GROUP_MAX
from dlc.comm.service import MemberEvent
from dlc.comm.wire import size_of
from dlc.errors import ProtocolError, UsageError

GIVEN_UP_MAX = 64
"""Keys of which the last wish that was given up is remembered."""
OLD_GROUPS_MAX, ALL_OLD_GROUPS_MAX = 4, 64
"""Groups of one name, and of all together, that are done here and still serve others; of more than these the oldest are
given up. Each holds its vector. Who lacks something of one then has the mean of whom it can get, and is told whose."""


class Mesh:
    takes: tuple[type, ...] = mm.MESH

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.board = Board(ground)
        self.heirs = Heirs(ground, self.board)
        self.parcels = Parcels(ground)
        self._meetings: dict[str, Meeting] = {}
        self._given_up: dict[str, mm.Wish] = {}
        """By key: the last wish that ended without a group; its owner may wait anew."""
        self._groups: dict[tuple[str, int], Reduction] = {}
        self._tally = Tally()
        """Of all groups, those that are over and those that failed, too."""
        self._gossips: dict[str, Gossip] = {}
        self._will_gossip: set[str] = set()
        self._open: set[str] = set()
        """Keys under which what is open here shows its place."""
        self._settled: dict[str, dict[Voter, Settled]] = {}
        """What the gossips of a name have answered, those that are closed, too."""

    # ---------------------------------------------------------------- commands

    def meet(self, call: Call, now: float) -> list[Effect]:
        """Wait for a group of `call.key`, and average with it. One call of a key at a time.

        Ends in MeetingFailed; or in GroupFormed, then GroupDone or GroupFailed.
        """
        if not (size_of(call.key) and (call.label == "" or size_of(call.label))):
            wrong = call.label if size_of(call.key) else call.key
            raise UsageError(f"a name is a string of at least one character, with a form in UTF-8, not {wrong!r:.60}")
        if call.key in self._meetings or any(key == call.key and not g.done for (key, _), g in self._groups.items()):
            raise UsageError(f"this peer averages under the key {call.key!r} already: wait for that to end")

        def act() -> None:
            given_up = self._given_up.get(call.key)
            self._meetings[call.key] = Meeting(self.ground, self.board, call, self._begun, given_up)

        return self._event(now, act)

    def give_up(self, call: Call, now: float) -> list[Effect]:
        """The caller waits no longer: if this is not over it ends here; nothing is written any more. Another call of
        the key, which began after its end, goes on."""

        def act() -> None:
            meeting = self._meetings.get(call.key)
            if meeting is not None and meeting.call is call:
                del self._meetings[call.key]
                meeting.close()
                self._ended(meeting)
            for group in list(self._groups.values()):
                if group.call is call:
                    group.abandon()

        return self._event(now, act)

    def post(
        self, key: str, value: bytes, ttl_s: float, now: float, to: Iterable[PeerId] | None = None
    ) -> list[Effect]:
        """See `Board.post`."""
        return self._event(now, lambda: self.board.post(key, value, ttl_s, to))

    def withdraw(self, key: str, now: float) -> list[Effect]:
        return self._event(now, lambda: self.board.withdraw(key))

    def outlive(self, prefix: str, of_members: bool, now: float) -> list[Effect]:
        """See `Heirs.keep`."""
        return self._event(now, lambda: self.heirs.keep(prefix, of_members))

    def open(self, key: str, name: str) -> None:
        """The owner shows its place under this key until `shut`. UsageError where another one here does: it would hide
        that place, and take it away at its end."""
        if key in self._open:
            raise UsageError(f"this peer has one of the name {name!r} already: close that, or give this another name")
        self._open.add(key)

    def shut(self, key: str, now: float) -> list[Effect]:
        self._open.discard(key)
        return self.withdraw(key, now)

    def will_gossip(self, name: str, will: bool) -> None:
        """A gossip of this name is about to begin here: who gives to it already is not refused, and gives again."""
        (self._will_gossip.add if will else self._will_gossip.discard)(name)

    def gossip(self, name: str, grid: Grid) -> Gossip:
        """A gossip of this name begins here. UsageError where there is one already."""
        if name in self._gossips:
            raise UsageError(f"this peer gossips under the name {name!r} already")
        self.will_gossip(name, False)
        settled = self._settled.setdefault(name, {})
        self._gossips[name] = Gossip(self.ground, self.parcels, name, grid, settled)
        return self._gossips[name]

    def with_gossip(self, gossip: Gossip, act: Callable[[], None], now: float) -> list[Effect]:
        """A command of its owner to a gossip."""

        def acted() -> None:
            act()
            if gossip.closed:
                self._gossips.pop(gossip.name, None)

        return self._event(now, acted)

    def owed(self) -> dict[tuple[str, int], frozenset[PeerId]]:
        """Groups whose mean is here, and gifts of a gossip: to those who may still need something of me in them."""
        owed = {name: group.unfinished for name, group in self._groups.items() if group.done}
        for gossip in self._gossips.values():
            owed |= {(f"gossip/{gossip.name}", number): frozenset({to}) for number, to in gossip.wanted.items()}
        return owed

    # ---------------------------------------------------------------- groups

    def _begun(self, meeting: Meeting, leader: Voter, begin: mm.Begin, finished: Collection[Voter]) -> None:
        call = meeting.call
        self._meetings.pop(call.key, None)
        self._given_up.pop(call.key, None)
        group = Reduction(self.ground, self.parcels, leader, begin, call, self._tally)
        for key in self._too_old(begin.key):
            self._groups.pop(key).release()
        self._groups[begin.key, begin.nonce] = group
        group.start()
        for voter in finished:
            group.receive_done(voter)

    def _too_old(self, begins: str) -> list[tuple[str, int]]:
        """Groups that are given up as one of this key begins. Those of other names average beside it: if any of them
        has a slow member, it would lack what it is about to get."""
        old = [key for key, known in self._groups.items() if known.done]
        of_name = [key for key in old if _name_of(key[0]) == _name_of(begins)]
        too_old = of_name[: max(0, len(of_name) - OLD_GROUPS_MAX + 1)]
        left = [key for key in old if key not in too_old]
        return too_old + left[: max(0, len(left) - ALL_OLD_GROUPS_MAX + 1)]

    def _accept(self, sender: Voter, m: mm.Accept) -> None:
        """Also of one that has not heard Begin."""
        group = self._groups.get((m.key, m.nonce))
        meeting = self._meetings.get(m.key)
        if group is not None and any(seat.voter == sender for seat in group.seats):
            self.ground.send(sender, group.begin)
        elif meeting is not None:
            meeting.receive_accept(sender, m)
        else:
            self.ground.send(sender, mm.Cancel(m.key, m.nonce))

    def _invite(self, sender: Voter, m: mm.Invite) -> None:
        meeting = self._meetings.get(m.key)
        for (key, _), group in self._groups.items():
            if key == m.key and group.lacks(sender):
                self.ground.send(sender, group.begin)
                return
        if meeting is not None and meeting.wish.nonce == m.wish:
            meeting.receive_invite(sender, m)
        else:
            self.ground.send(sender, mm.Decline(m.key, m.nonce, self._if_given_up(m.key, m.wish)))

    def _ended(self, meeting: Meeting) -> None:
        """Without a group."""
        self._given_up.pop(meeting.call.key, None)
        self._given_up[meeting.call.key] = meeting.wish
        while len(self._given_up) > GIVEN_UP_MAX:
            del self._given_up[next(iter(self._given_up))]

    def _if_given_up(self, key: str, nonce: int) -> int:
        """The nonce, if it is that of the last wish of this key that was given up; else 0."""
        given_up = self._given_up.get(key)
        return nonce if given_up is not None and given_up.nonce == nonce else 0

    def _begin(self, sender: Voter, m: mm.Begin) -> None:
        if (group := self._groups.get((m.key, m.nonce))) is not None:
            group.heard(sender)
            return
        if self.parcels.holdings.was_held(key_of(m, RESULT)):
            self.ground.send(sender, mm.Done(m.key, m.nonce))
            return
        meeting = self._meetings.get(m.key)
        try:
            if meeting is None or not meeting.receive_begin(sender, m):
                self._begun_without_me(sender, m)
        except ProtocolError:
            self._begun_without_me(sender, m)
            raise

    def _begun_without_me(self, sender: Voter, m: mm.Begin) -> None:
        """I have given up what I had accepted or shown, or refuse it: nobody waits for me to need nothing of it, nor
        for what I would have given. In a crowd each tells me of it itself."""
        seats = {seat.voter: seat for seat in m.seats[:GROUP_MAX]}
        mine = seats.pop(self.ground.me, None)
        if mine is None:
            return
        if m.crowd:
            self.ground.send(sender, mm.Decline(m.key, m.nonce, self._if_given_up(m.key, mine.wish)))
            return
        for part in (CONTRIBUTION, RESULT):
            self.parcels.holdings.never(key_of(m, part), NOT_COME)
        for voter in sorted(seats):
            self.ground.send(voter, mm.Done(m.key, m.nonce))

    def _decline(self, sender: Voter, m: mm.Decline) -> None:
        for (key, _), group in self._groups.items():
            if key == m.key:
                group.receive_decline(sender, m)
        if (meeting := self._meetings.get(m.key)) is not None:
            meeting.receive_decline(sender, m)

    def _heard(self, sender: Voter, key: mm.Key) -> None:
        """It takes part in the group of this key, if it is that of one."""
        if (group := self._groups.get((key.channel, key.step))) is not None:
            group.heard(sender)

    def _done(self, sender: Voter, m: mm.Done) -> None:
        group = self._groups.get((m.key, m.nonce))
        meeting = self._meetings.get(m.key)
        if group is not None:
            group.receive_done(sender)
        elif meeting is not None:
            meeting.receive_done(sender, m)

    # ---------------------------------------------------------------- the machine interface

    def receive(self, sender: Voter, message: Message, now: float) -> list[Effect]:
        if self.ground.members.record(sender.peer) is None:
            self.ground.dropped["", "from somebody whose record is not known"] += 1
            return []
        return self._event(now, lambda: self._handle(sender, message))

    def tick(self, now: float) -> list[Effect]:
        def act() -> None:
            self.board.tick()
            self.heirs.tick()
            self.parcels.tick()
            for group in list(self._groups.values()):
                group.tick()
            for gossip in self._gossips.values():
                gossip.tick()

        return self._event(now, act)

    def next_deadline(self) -> float:
        due = [self.board.next_deadline(), self.heirs.next_deadline()]
        due += [meeting.next_deadline() for meeting in self._meetings.values()]
        due += [group.next_deadline() for group in self._groups.values()]
        due += [gossip.next_deadline() for gossip in self._gossips.values()]
        parcels = self.parcels.next_deadline()
        return min(due if parcels is None else [*due, parcels])

    def member(self, event: MemberEvent, now: float) -> list[Effect]:
        def act() -> None:
            self.heirs.changed()
            if isinstance(event, MemberUp):
                self.board.member_up(event.voter)
                for gossip in self._gossips.values():
                    gossip.member_up(event.voter)
                self._let_go()
                return
            why = LEFT if self.ground.members.gone(event.voter) else DEAD
            self.parcels.member_gone(event.voter, why)
            for group in list(self._groups.values()):
                group.member_gone(event.voter, why)
            for gossip in self._gossips.values():
                gossip.member_gone(event.voter)
            self._let_go()

        return self._event(now, act)

    def _let_go(self) -> None:
        """Of givers that are gone: nobody asks any more for what became of their gifts. Of one that was down before
        another process took its place nothing else tells."""
        gone = self.ground.members.gone
        for settled in self._settled.values():
            for giver in [giver for giver in settled if gone(giver)]:
                del settled[giver]

    def pending_bulk(self) -> list[PeerId]:
        return self.parcels.pending()

    def next_bulk(self, peer: PeerId) -> Bulk | None:
        return self.parcels.next_bulk(peer)

    def bulk_peers(self) -> set[PeerId]:
        seats = [seat.voter for group in self._groups.values() if not group.done for seat in group.seats]
        waiting = [voter for meeting in self._meetings.values() for voter in meeting.likely()]
        given = {peer for gossip in self._gossips.values() for peer in gossip.next_to}
        return given | {voter.peer for voter in (*seats, *waiting) if voter != self.ground.me}

    @property
    def resting(self) -> bool:
        return self.parcels.resting

    # ---------------------------------------------------------------- one event

    def _event(self, now: float, act: Callable[[], None]) -> list[Effect]:
        self.ground.wake(now)
        act()
        for meeting in list(self._meetings.values()):
            meeting.advance()
        for meeting in [meeting for meeting in self._meetings.values() if meeting.over]:
            del self._meetings[meeting.call.key]
            self._ended(meeting)
        for key, group in list(self._groups.items()):
            if group.failed or (group.done and group.over):
                group.release()
                del self._groups[key]
        return self.ground.drain()

    def _handle(self, sender: Voter, m: Message) -> None:
        match m:
            case mm.Parcel():
                self._heard(sender, m.key)
                self.parcels.receive_parcel(sender, m)
            case mm.Pull():
                self._heard(sender, m.key)
                self.parcels.receive_pull(sender, m)
            case mm.Coming():
                self._heard(sender, m.key)
                self.parcels.receive_coming(sender, m)
            case mm.NoParcel():
                self.parcels.receive_no_parcel(sender, m)
            case mm.Notices():
                self.board.receive(sender, m)
            case mm.Accept():
                self._accept(sender, m)
            case mm.Invite():
                self._invite(sender, m)
            case mm.Done():
                self._done(sender, m)
            case mm.Gift() | mm.Withdraw() | mm.Taken() | mm.Refused():
                self._of_gossip(sender, m)
            case mm.Begin():
                self._begin(sender, m)
            case mm.Cancel():
                if (meeting := self._meetings.get(m.key)) is not None:
                    meeting.receive_cancel(sender, m)
            case mm.Decline():
                self._decline(sender, m)

    def _of_gossip(self, sender: Voter, m: mm.Gift | mm.Withdraw | mm.Taken | mm.Refused) -> None:
        gossip = self._gossips.get(m.name)
        if isinstance(m, mm.Gift | mm.Withdraw) and self.ground.members.gone(sender):
            return  # it comes late: nothing can be pulled of it, and nobody waits for the answer
        if gossip is None:
            if isinstance(m, mm.Gift | mm.Withdraw):
                self._without_gossip(sender, m)
        elif isinstance(m, mm.Gift):
            gossip.receive_gift(sender, m)
        elif isinstance(m, mm.Withdraw):
            gossip.receive_withdraw(sender, m)
        elif isinstance(m, mm.Taken):
            gossip.receive_taken(sender, m)
        else:
            gossip.receive_refused(sender, m)

    def _without_gossip(self, sender: Voter, m: mm.Gift | mm.Withdraw) -> None:
        """Of a gossip that is closed, or has not begun: what is refused stays refused by the next one of the name."""
        settled = self._settled.get(m.name, {}).get(sender, NONE_YET)
        if settled.serial == m.serial:
            self.ground.send(sender, settled.answer(m.name))
        elif isinstance(m, mm.Withdraw) or m.name not in self._will_gossip:
            refused = Settled(m.serial, False, "nobody gossips under this name here")
            known = m.name in self._settled or m.name in self._will_gossip
            if known and m.to == self.ground.me and m.serial > settled.serial:
                self._settled.setdefault(m.name, {})[sender] = refused
            self.ground.send(sender, refused.answer(m.name))


def _name_of(key: str) -> str:
    """What stands before the tag of a call, or the round of a grid: one caller's groups, one after the other."""
    return key.partition("#")[0]
