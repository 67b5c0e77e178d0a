"""SWIM membership, sans I/O: who takes part, who is alive, and what each one last said of itself.

Promises:
- `alive(v)` is a *two-way proof* within T_dead of running time: v answered a ping of mine, directly or through another
  peer. To hear from somebody, or of somebody, is not enough.
- `gone(v)` is a proof that the process is no more: its signed leave, or a signed record of its peer with a greater inc.
- The dead, and bootstrap addresses behind which nobody alive is known, are contacted for ever, one at random each
  T_dead/2. No bootstrap peer has to stay alive, and a healed cut is noticed. Who left is forgotten. Of who has been
  dead for longer than T_evict and is not in the electorate, where many others have died since, nothing is told any
  more, and little is kept (`records.py`); it is still asked for where it was, now and then.
- Where nobody else lives, as seen from here, it may be my own address that is wrong, or has changed: an answer to a
  Hello comes on its own connection, and tells by which address that came (`SeenAt`).
- My own changes reach every peer that I exchange a ping with, and all others by gossip.

The work is divided: records.py holds what is known and who is proved gone, piggyback.py spreads it, probing.py and
detector.py find out who answers (theory of operation there), health.py keeps the local view of time, view.py holds the
questions that others ask. This file takes messages apart.

| message | what it does |
|---|---|
| Ping | answered at once, even to a stranger (its record comes in the ping); a stranger also gets my table |
| Ack | proof; where the ping was on behalf of another, that one gets an IndirectAck |
| PingReq | I ping the target for the sender |
| IndirectAck | proof by way of the sender, of the process whose record it carries |
| Leave | its voter is gone |
| Welcome | answer to my Hello: tells who lives at a bootstrap address, and its table |
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dlc.comm.detector import SLACK_S
from dlc.comm.effects import Answer, Dial, Effect, Notify, Send
from dlc.comm.events import MemberDown, MemberLeft, SeenAt, SelfReplaced
from dlc.comm.health import LocalTime
from dlc.comm.ids import PeerId, Voter
from dlc.comm.messages import (
    Ack,
    Gossip,
    Hello,
    IndirectAck,
    Leave,
    Ping,
    PingReq,
    Record,
    Welcome,
)
from dlc.comm.piggyback import NEWS_RECORDS_MAX
from dlc.comm.records import Member, Merged, RecordTable, Standing
from dlc.comm.timeouts import Timeouts
from dlc.comm.view import View

NEWS_MESSAGE_RECORDS_MAX = NEWS_RECORDS_MAX + 2
"""A message with more records carries a table: its records are old news elsewhere and are not passed on."""


class Membership(View):
    """The caller calls `tick` no later than `next_deadline`, and carries out every effect. Times are seconds of one
    monotonic clock; methods without `now` refer to the last event."""

    def __init__(
        self,
        own: Record,
        *,
        sign: Callable[[Record], Record],
        verify: Callable[[Record], bool],
        hello: Callable[[], Hello],
        rng: random.Random,
        timeouts: Timeouts,
        bootstrap: Sequence[str],
        now: float,
    ) -> None:
        super().__init__(RecordTable(own, sign, verify), LocalTime(timeouts, now), rng)
        self._hello = hello
        self._rng = rng
        self._bootstrap = tuple(dict.fromkeys(bootstrap))
        self._lives_at: dict[str, PeerId] = {}
        """Bootstrap address: the peer that answered there."""
        self._contact_run: float | None = None

    # ------------------------------------------------------------------ the machine

    def receive(self, sender: Voter, message: object, now: float) -> list[Effect]:
        self._time.advance(now)
        if self._left or sender == self.me and not isinstance(message, Welcome):
            return []
        match message:
            case Ping():
                self._ping(sender, message)
            case Ack():
                self._ack(sender, message)
            case PingReq():
                self._ping_request(sender, message)
            case IndirectAck():
                self._indirect_ack(sender, message)
            case Leave():
                self._merge(message.record, news=True)
            case Welcome():
                self._welcome(message)
        return self._drain()

    def tick(self, now: float) -> list[Effect]:
        self._time.advance(now)
        if self._left:
            return []
        self._detector.tick()
        if self._contact_run is None:
            self._out.extend(Dial(address, self._hello()) for address in self._open_addresses())
            self._contact_run = self._time.running_s + self._time.pace_s
        elif self._contact_run <= self._time.running_s + SLACK_S:
            self._contact_run = self._time.running_s + self._time.pace_s
            self._contact()
        return self._drain()

    def next_deadline(self) -> float | None:
        if self._left:
            return None
        if self._contact_run is None:
            return self._time.last
        soonest_run, time = self._detector.next_run(), self._time
        if self._contact_run < soonest_run:
            soonest_run = self._contact_run
        return time.last + (soonest_run - time.running_s) if soonest_run > time.running_s else time.last

    def learn(self, record: Record, now: float) -> list[Effect]:
        """Merge one record that came by another way than gossip."""
        self._time.advance(now)
        if not self._left:
            self._merge(record, news=True)
        return self._drain()

    def refused(self, peer: PeerId, now: float) -> list[Effect]:
        """The transport saw the connection to `peer` close and its re-connection refused: the peer has about two probe
        periods to prove that it lives."""
        self._time.advance(now)
        member = self._table.members.get(peer)
        if member is not None and not self._left:
            member.refused = True
            self._detector.doubt(member)
        return self._drain()

    def begin_refresh(self, now: float) -> list[Effect]:
        """Ping all known peers; `refreshed` then tells who answered a ping sent from now on."""
        self._time.advance(now)
        self._prober.generation += 1
        if not self._left:
            for member in list(self._table.members.values()):
                self._detector.ping(member)
        return self._drain()

    def leave(self, now: float) -> list[Effect]:
        """Announce that this process goes for good; from here on the machine is silent."""
        self._time.advance(now)
        if not self._left:
            self._table.update_own({"left": True})
            self._left = True
            message = Leave(self._table.own)
            self._out.extend(Send(peer, message) for peer in self._table.members)
        return self._drain()

    # ------------------------------------------------------------------ what I say

    def update_own(self, **changes: Any) -> None:
        """Change fields of my record; it is signed when next sent. Equal values change nothing."""
        if not self._left:
            self._table.update_own(changes)

    def tell_voters(self) -> list[Effect]:
        """My record, now: the next probes may come later than what they are to decide by it."""
        if not self._left:
            for voter in self._watched:
                if (member := self._member(voter)) is not None:
                    self._prober.tell(member)
        return self._drain()

    def watch(self, voters: Iterable[Voter]) -> None:
        """The electorate: each one that is not gone is pinged every T_dead/2, dead or not."""
        electorate = set(voters)
        if electorate != self._watched.keys():
            running_s = self._time.running_s
            self._watched = {voter: self._watched.get(voter, running_s) for voter in sorted(electorate)}
            for voter in electorate:
                self._table.remember(voter)
            self._detector.watch(self._watched)

    # ------------------------------------------------------------------ messages

    def _ping(self, sender: Voter, ping: Ping) -> None:
        known = self._member(sender) is not None
        self._table.remember(sender)
        self._absorb(ping.gossip)
        member = self._table.members.get(sender.peer)
        if member is not None and member.voter.inc > sender.inc:
            # A process that was replaced: it must see the record that proves it, on its own connection.
            self._out.append(Answer(Ack(ping.nonce, Gossip((member.record,), ()))))
            return
        if member is not None and member.voter != sender:
            member = None  # restarted, and its new record is missing
        if member is not None and not known:
            member.owed_table = True
        self._out.append(Send(sender.peer, Ack(ping.nonce, self._news.fill(member))))
        if member is not None:
            self._detector.hearing(member)

    def _ack(self, sender: Voter, ack: Ack) -> None:
        self._absorb(ack.gossip)
        ping = self._prober.pings.get(ack.nonce)
        member = self._member(sender)
        if ping is None or ping.peer != sender.peer or member is None:
            return
        del self._prober.pings[ack.nonce]
        self._detector.proof(member, ack.nonce, ping, relay=None)
        if ping.origin is not None:
            origin = self._table.members.get(ping.origin)
            told = self._news.fill(origin)
            gossip = Gossip((*told.records, member.record), told.rumours)
            self._out.append(Send(ping.origin, IndirectAck(ping.origin_nonce, sender.peer, gossip)))

    def _ping_request(self, sender: Voter, request: PingReq) -> None:
        self._absorb(request.gossip)
        member = self._table.members.get(request.target)
        if member is not None and request.target != sender.peer:
            self._prober.ping_for(member, sender.peer, request.nonce)

    def _indirect_ack(self, sender: Voter, ack: IndirectAck) -> None:
        self._absorb(ack.gossip)
        ping = self._prober.pings.get(ack.nonce)
        member = self._table.members.get(ack.target)
        if ping is None or ping.peer != ack.target or member is None:
            return
        if any(record.voter == member.voter for record in ack.gossip.records):  # the very process that answered
            self._detector.proof(member, ack.nonce, ping, relay=sender.peer)

    def _welcome(self, welcome: Welcome) -> None:
        if welcome.observed_host and self._left_alone:
            self._out.append(Notify(SeenAt(welcome.observed_host)))
        if welcome.record is not None:
            if welcome.address in self._bootstrap:
                self._lives_at[welcome.address] = welcome.record.voter.peer
            self._table.remember(welcome.record.voter)
            self._merge(welcome.record, news=False)
        for record in welcome.records:
            self._merge(record, news=False)

    def _absorb(self, gossip: Gossip) -> None:
        news = len(gossip.records) <= NEWS_MESSAGE_RECORDS_MAX
        for record in gossip.records:
            self._merge(record, news)
        for rumour in gossip.rumours:
            self._detector.rumour(rumour)

    def _merge(self, record: Record, news: bool) -> None:
        """Take one record in, and draw the consequences."""
        merged, old = self._table.merge(record, self._time.running_s)
        if merged is Merged.OLD or merged is Merged.REFUSED:
            return
        peer = record.voter.peer
        if merged is Merged.REPLACED_ME:
            self._out.append(Notify(SelfReplaced(record.voter)))
            return
        if merged is Merged.GHOST:
            self._news.add_ghost(peer)
            return
        if news or merged is Merged.LEFT:
            self._news.add_record(peer)
        if old is not None:
            self._detector.removed(old)
        if merged is Merged.LEFT:
            if old is not None:
                self._out.append(Notify(MemberLeft(old.voter)))
            return
        if merged is Merged.REBORN and old is not None and old.standing in (Standing.ALIVE, Standing.SUSPECT):
            self._out.append(Notify(MemberDown(old.voter)))
        if merged in (Merged.ADDED, Merged.REBORN):
            member = self._table.members[peer]
            member.watched = record.voter in self._watched
            self._detector.added(member)

    # ------------------------------------------------------------------ contact

    def _contact(self) -> None:
        """One at random of those that nobody else here pings: the dead, and addresses that nobody alive answers at; of
        those who are forgotten one is drawn to be among them."""
        dead = [m for m in self._table.members.values() if m.standing is Standing.DEAD and not m.watched]
        for member in self._table.forget(dead, self._time.running_s - self.t_evict_s):
            dead.remove(member)
            self._detector.removed(member)
        silent = [member for member in dead if not member.probe_nonce]
        choices: list[Member | str] = [*silent, *self._open_addresses(), *self._table.left_behind(self._rng)]
        if choices:
            choice = self._rng.choice(choices)
            if isinstance(choice, str):
                self._out.append(Dial(choice, self._hello()))
            else:
                self._detector.ping(choice)
        if self._left_alone:  # what is answered to pings may go to an address that I have no more
            one = self._rng.choice(list(self._table.members.values()))
            self._out.extend(Dial(address, self._hello()) for address in one.record.control[:1])

    @property
    def _left_alone(self) -> bool:
        """Others have been known for long enough to answer, and none is known to live."""
        others, since_run = self._table.members.values(), self._time.running_s - self.t_dead_s
        return any(m.seen_run < since_run for m in others) and not any(map(self._detector.alive, others))

    def _open_addresses(self) -> list[str]:
        """Bootstrap addresses that have not answered, or whose peer is not alive."""
        return [address for address in self._bootstrap if not self._answers(self._lives_at.get(address))]

    def _answers(self, peer: PeerId | None) -> bool:
        if peer is None or peer == self.me.peer:
            return peer is not None
        member = self._table.members.get(peer)
        return member is not None and self._detector.alive(member)

    def _member(self, voter: Voter) -> Member | None:
        member = self._table.members.get(voter.peer)
        return member if member is not None and member.voter == voter else None

    def _drain(self) -> list[Effect]:
        effects = self._out[:]
        self._out.clear()
        return effects
