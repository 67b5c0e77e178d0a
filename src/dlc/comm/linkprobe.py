"""Links measured before the first round: a peer that does not know what its own carries sends some junk to others.

The first plan would otherwise be cut into equal spans, and the slowest link would carry as much as the fastest.

    QUIET --nobody has come lately, my turn--> ASKING --enough have time--> SENDING --> QUIET: told, by my record
      ^                                          | busy                       | a round, here or there
      +------------------ later -----------------+----------------------------+

- **Who.** A voter (without a log: whoever is no observer) of whose way up no round has told anything yet, as long as
  others are there that it has not measured with: who comes first meets few, and measures again when more have come,
  until ENOUGH did. Peers on my own host do not count: there is no link.
- **Rounds go first.** No probe begins where bulk of a round, a group or a state moves, at either end, and none goes on:
  no junk leaves from the moment a plan is known, or a group. What is on its way then is a window's worth (window.py):
  at most what the link carries in 0.2 s and two round trips. Nobody waits for a probe, and nothing but a rate follows
  from it.
- **One at a time.** Who receives has no time for others, nor has who sends, so no two probes share a link. Peers begin
  in the order of those who do not know their rate, a SLOT_S apart, and who is refused asks again when told to.
- **Bounded.** A burst by BURST_S and BURST_BYTES_MAX, which a link of a data centre carries in a moment. A receiver
  keeps a count and nothing else; it takes part in GRANTS_MAX probes of one process, each for GRANT_S, and drops junk
  that it did not agree to.
- **Failures.** Who does not answer is left out. Where a receiver dies the probe is repeated later, as it is after a
  round, ASKS_MAX times in all. A sender that dies is forgotten when that is noticed, or after GRANT_S.

What is found counts until a round tells more (`Rates.probed`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from blake3 import blake3

from dlc.comm.addresses import on_this_host
from dlc.comm.burst import BURST_BYTES_MAX, BURST_S, Burst
from dlc.comm.effects import Effect
from dlc.comm.events import MemberUp
from dlc.comm.ground import Ground
from dlc.comm.ids import PeerId, Voter
from dlc.comm.messages import Bulk, Message
from dlc.comm.probemessages import PROBE_MESSAGES, ProbeAnswer, ProbeClose, ProbeCount, ProbeOpen, ProbePush
from dlc.comm.service import MemberEvent
from dlc.comm.window import CHUNK_BYTES_MAX
from dlc.errors import ProtocolError

SETTLE_S = 2.0
"""After the last one came: peers that start together are measured together, and their bulk links are up by then."""
SETTLE_S_MAX = 10.0
"""But no longer than this where somebody comes all the time."""
SLOT_S = 0.25
"""Between two peers that want to probe: longer than most round trips."""
RECEIVERS_MAX = 8
"""Of one probe, by lot where there are more."""
ENOUGH = 4
"""So many receivers do, where others are busy; a probe to so many is not repeated when more come."""
ANSWER_S = 0.3
"""Who has not answered after this and two round trips is left out."""
GRANT_S = BURST_S + 1.5
"""A receiver is taken for so long at most, if it never hears that the probe is over."""
USUAL_S = BURST_S + 0.5
"""And for so long as a rule."""
BUSY_S = 1.0
"""In a round, or probing: ask again after this."""
WAIT_S_MAX = 60.0
FAILURES_MAX = 6
"""So many times the wait after a burst that came to nothing is doubled: a minute, in the end."""
ASKS_MAX = 32
"""Probes that one process begins, those that came to nothing included."""
GRANTS_MAX = 40
"""Probes of one process that another takes part in: more than any correct one asks for."""
GRANTED_PEERS_MAX = 1024
"""Whose probes are counted; then the first of them is forgotten."""
TELL_S = 0.02
"""Between two counts that a receiver tells: messages for some hundred kilobytes."""
LOOK_S = 0.25
"""Whether a probe is due is looked at so often."""


@dataclass
class Guest:
    """Whose junk I take."""

    voter: Voter
    session: int
    until: float
    total_bytes: int = 0
    told_bytes: int = 0
    told_at: float = -math.inf


class LinkProbes:
    """A service of the node, whose log tells it two things: who has a seat beside me, and whether bulk rests."""

    takes: tuple[type, ...] = PROBE_MESSAGES

    def __init__(self, ground: Ground, seats: Callable[[], tuple[Voter, ...]], resting: Callable[[], bool]) -> None:
        """seats: those other than me who may take part in rounds, or groups; none while I may not myself. resting: no
        bulk of a round and no state is on its way here, and none is about to."""
        self.ground, self._seats, self._resting = ground, seats, resting
        self._burst: Burst | None = None
        self._guest: Guest | None = None
        self._due: float | None = None
        """When my next probe begins; None: none is wanted."""
        self._latest = 0.0
        """Newcomers do not put it off beyond this."""
        self._look_at = 0.0
        self._met: frozenset[Voter] = frozenset()
        """Who was asked to receive the probes that told something, whether or not it answered."""
        self._asks = self._failures = 0
        """Failures: bursts that came to nothing since the last one that told something."""
        self._grants: dict[Voter, int] = {}

    # ---------------------------------------------------------------- my own probe

    def _look(self) -> None:
        """Is a probe due?"""
        now = self.ground.now
        if self._burst is not None or now < self._look_at:
            return
        self._look_at = now + LOOK_S
        others = self._others()
        if not others:
            self._due = None
        elif self._due is None:
            self._due = now + SETTLE_S + self._turn_s(others)
            self._latest = now + SETTLE_S_MAX
        elif now >= self._due and self._guest is None and self._quiet():
            self._ask(others)

    def begin_anew(self) -> None:
        """What the probes until now have shown is less than my link carries."""
        self._met = frozenset()

    def _others(self) -> list[Voter]:
        """Whom a probe would go to, sorted; nobody where none is wanted."""
        ground = self.ground
        if not ground.rates.unsure or self._asks >= ASKS_MAX or len(self._met) >= ENOUGH:
            return []
        others = sorted(v for v in self._seats() if ground.members.alive(v) and self._apart(v))
        return [] if self._met.issuperset(others) else others

    def _apart(self, voter: Voter) -> bool:
        """A link lies between us."""
        record = self.ground.members.record(voter.peer)
        return record is not None and record.voter == voter and bool(record.bulk) and not on_this_host(record.bulk[0])

    def _turn_s(self, others: list[Voter]) -> float:
        """Those who do not know their rates either, and stand before me, go first."""
        known = (self.ground.members.record(v.peer) for v in others if v < self.ground.me)
        before = sum(record is not None and not record.up_Bps for record in known)
        return SLOT_S * (before + self.ground.rng.random())

    def _quiet(self) -> bool:
        return self._resting() and not self.ground.rates.measuring

    def _ask(self, others: list[Voter]) -> None:
        ground, chosen = self.ground, self._chosen(others)
        receivers = [(voter, ground.members.rtt_s(voter.peer)) for voter in chosen]
        until = ground.now + ANSWER_S + 2 * max(rtt_s for _, rtt_s in receivers)
        self._asks += 1
        self._burst = Burst(ground.rng.getrandbits(62), receivers, until)
        for voter in chosen:
            ground.send(voter, ProbeOpen(self._burst.session))

    def _chosen(self, others: list[Voter]) -> list[Voter]:
        """Those of the others that receive my next probe, sorted: by a lot that more who come leave as it is."""
        lot = f"{self.ground.me} {self._asks}"
        drawn = sorted(others, key=lambda voter: blake3(f"{lot} {voter}".encode()).digest(8))
        return sorted(drawn[:RECEIVERS_MAX])

    def _decide(self, burst: Burst) -> None:
        """All have answered, or had the time to."""
        answers = [receiver.free for receiver in burst.receivers.values()]
        free = answers.count(True)
        if free and (free >= ENOUGH or False not in answers):
            burst.begin(self.ground.now, self.ground.rng.randbytes(CHUNK_BYTES_MAX))
        else:
            self._later(max(burst.wait_s, BUSY_S))

    def _go_on(self, burst: Burst) -> None:
        now = self.ground.now
        if not self._quiet():
            self._later(BUSY_S)
        elif burst.over(now):
            self._learn(burst)
        elif not burst.sending and now >= burst.answers_until:
            self._decide(burst)

    def _learn(self, burst: Burst) -> None:
        rate_Bps = burst.rate_Bps(self.ground.now)
        if not rate_Bps:
            self._later(BUSY_S)
            return
        self._close(burst)
        self._failures = 0
        self._met |= frozenset(burst.asked)
        self.ground.rates.probed(rate_Bps)
        self.ground.tell_rates()

    def _later(self, wait_s: float) -> None:
        """This probe came to nothing."""
        burst = self._burst
        if burst is not None:
            self._close(burst)
            if burst.sending:
                self._failures = min(self._failures + 1, FAILURES_MAX)
                wait_s *= 2.0**self._failures
        self._due = self._latest = self.ground.now + wait_s + self._turn_s(self._others())

    def _close(self, burst: Burst) -> None:
        self._burst = self._due = None
        for voter in burst.asked:
            self.ground.send(voter, ProbeClose(burst.session))

    def _receive_answer(self, sender: Voter, m: ProbeAnswer) -> None:
        if not 0 <= m.wait_s <= WAIT_S_MAX:
            raise ProtocolError(f"{sender} asks a probe to wait for {m.wait_s} s")
        burst = self._burst
        receiver = burst.receivers.get(sender.peer) if burst is not None and burst.session == m.session else None
        if burst is None or receiver is None or receiver.voter != sender:
            return
        if burst.sending:
            if m.wait_s:
                self._later(m.wait_s)  # its round begins: mine, too, most likely
            return
        receiver.free = not m.wait_s
        burst.wait_s = max(burst.wait_s, m.wait_s)
        if all(r.free is not None for r in burst.receivers.values()):
            self._decide(burst)

    def _receive_count(self, sender: Voter, m: ProbeCount) -> None:
        burst = self._burst
        receiver = burst.receivers.get(sender.peer) if burst is not None and burst.session == m.session else None
        if burst is not None and receiver is not None and receiver.voter == sender:
            burst.count(receiver, m.total_bytes, self.ground.now)

    def sampled(self, now: float) -> None:
        """What the kernel says of my bulk links has come to `Rates.samples`."""
        if self._burst is not None:
            self._burst.acked(now, self.ground.rates.acked_bytes)

    # ---------------------------------------------------------------- others' probes

    def _receive_open(self, sender: Voter, m: ProbeOpen) -> None:
        now, granted = self.ground.now, self._grants.get(sender, 0)
        guest = self._guest
        if granted >= GRANTS_MAX:
            wait_s = WAIT_S_MAX
        elif self._burst is not None or not self._quiet():
            wait_s = BUSY_S
        elif guest is not None and guest.voter != sender:
            wait_s = max(SLOT_S, guest.until - GRANT_S + USUAL_S - now)
        else:
            wait_s = 0.0
            self._grants[sender] = granted + 1
            if len(self._grants) > GRANTED_PEERS_MAX:
                del self._grants[next(iter(self._grants))]
            self._guest = Guest(sender, m.session, now + GRANT_S)
        self.ground.send(sender, ProbeAnswer(m.session, wait_s))

    def _receive_push(self, sender: Voter, m: ProbePush) -> None:
        guest = self._guest
        size = memoryview(m.payload).nbytes
        if guest is None or (guest.voter, guest.session) != (sender, m.session):
            self.ground.dropped[sender.peer, "junk that was not agreed to"] += 1
            return
        if guest.total_bytes + size > BURST_BYTES_MAX:
            raise ProtocolError(f"{sender} sends more than {BURST_BYTES_MAX} bytes of junk")
        guest.total_bytes += size
        self._host(guest)

    def _receive_close(self, sender: Voter, m: ProbeClose) -> None:
        if self._guest is not None and (self._guest.voter, self._guest.session) == (sender, m.session):
            self._guest = None

    def _host(self, guest: Guest) -> None:
        """End it where it is time, or tell what has come."""
        now = self.ground.now
        if not self._quiet():
            self.ground.send(guest.voter, ProbeAnswer(guest.session, BUSY_S))
            self._guest = None
        elif now >= guest.until:
            self._guest = None
        elif guest.total_bytes > guest.told_bytes and now >= guest.told_at + TELL_S:
            guest.told_bytes, guest.told_at = guest.total_bytes, now
            self.ground.send(guest.voter, ProbeCount(guest.session, guest.total_bytes))

    # ---------------------------------------------------------------- the machine interface

    def receive(self, sender: Voter, message: Message, now: float) -> list[Effect]:
        if self.ground.members.record(sender.peer) is None:
            self.ground.dropped["", "from somebody whose record is not known"] += 1
            return []
        self.ground.wake(now)
        match message:
            case ProbePush():
                self._receive_push(sender, message)
            case ProbeCount():
                self._receive_count(sender, message)
            case ProbeOpen():
                self._receive_open(sender, message)
            case ProbeAnswer():
                self._receive_answer(sender, message)
            case ProbeClose():
                self._receive_close(sender, message)
        if self._burst is not None:
            self._go_on(self._burst)
        return self.ground.drain()

    def tick(self, now: float) -> list[Effect]:
        self.ground.wake(now)
        if self._guest is not None:
            self._host(self._guest)
        if self._burst is not None:
            self._go_on(self._burst)
        self._look()
        return self.ground.drain()

    def next_deadline(self) -> float:
        due = [math.inf]
        burst, guest = self._burst, self._guest
        if burst is not None:
            due.append(burst.answers_until if burst.began is None else burst.began + BURST_S)
        elif self._due is not None and guest is None:
            due.append(max(self._due, self._look_at))
        if guest is not None:
            due.append(guest.told_at + TELL_S if guest.total_bytes > guest.told_bytes else guest.until)
        return min(due)

    def member(self, event: MemberEvent, now: float) -> list[Effect]:
        self.ground.wake(now)
        burst, voter = self._burst, event.voter
        if isinstance(event, MemberUp):
            if self._due is not None:
                self._due = max(self._due, min(now + SETTLE_S, self._latest))
            return self.ground.drain()
        if self._guest is not None and self._guest.voter == voter:
            self._guest = None
        receiver = burst.receivers.get(voter.peer) if burst is not None else None
        if burst is not None and receiver is not None and receiver.voter == voter:
            del burst.receivers[voter.peer]
            if burst.sending or not burst.receivers:
                self._later(BUSY_S)
        return self.ground.drain()

    def pending_bulk(self) -> list[PeerId]:
        return self._burst.pending() if self._burst is not None and self._quiet() else []

    def next_bulk(self, peer: PeerId) -> Bulk | None:
        return self._burst.next_bulk(peer) if self._burst is not None and self._quiet() else None

    def bulk_peers(self) -> list[PeerId]:
        """From the moment a probe is wanted: a burst is too short for the handshakes of far links."""
        if self._burst is not None:
            return list(self._burst.receivers)
        return [voter.peer for voter in self._chosen(self._others())] if self._due is not None else []

    @property
    def resting(self) -> bool:
        """Where I am busy with a probe is told with my answers."""
        return True
