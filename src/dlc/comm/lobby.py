"""Before a peer knows what the run is: say hello to every listed address until somebody tells.

  no address listed                     -> done at once, with my own RunSpec
  a Welcome with a RunSpec              -> done, with that RunSpec
  every listed address answered, none knows a RunSpec, and none waits for somebody who may -> done, with my own
  a Welcome of an active member of the run of my own RunSpec, at an address that I knew from before -> done, as well
  otherwise                             -> keep dialling with back-off, and say for whom I wait

A run with a log is begun by all who are listed, once they are out of the lobby (permit.py). One without a log begins as
the first is out: so there nobody who waits here, too, counts as the run, and those who found each other wait here until
all who are listed have answered, or one of them takes part.

A waiting peer answers the hellos of others meanwhile, so that four that start together find each other. It tells what
it found, and whether it still waits: who took the silence of a peer that is itself about to join for "there is no
RunSpec" would begin with another one than the run has, and never be heard.

An observer that lists nobody may begin no run, so it waits for one at its `Desk`: who asks there first, and may vote,
is told that the address it dialled is its own, and founds the run alone; all others are told the same, and found none
without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dlc.comm.effects import Answer, Dial, Effect
from dlc.comm.ids import Voter
from dlc.comm.messages import PROTOCOL_VERSION, Hello, Message, Record, Welcome
from dlc.comm.records import well_formed
from dlc.comm.roles import OBSERVER

BACK_OFF_FIRST_S = 0.25
BACK_OFF_MAX_S = 4.0
RECALL_S = 15.0
"""A desk that knows addresses of before looks for their run so long, and peers of it for the desk, before another one
may begin."""
FORGET_S = 60.0
"""Who was told to begin, and is silent for so long without having begun, is no longer waited for."""
ASKED_MAX = 256
"""Addresses that a desk asks in turn: more than come to one desk before the first of them has begun."""


@dataclass
class Try:
    """One address."""

    next_at: float
    back_off_s: float = BACK_OFF_FIRST_S
    tries: int = 0
    answer: Welcome | None = None

    @property
    def final(self) -> bool:
        """It need not be asked again."""
        return self.answer is not None and not self.answer.waiting


class Lobby:
    def __init__(
        self,
        record: Record,
        run: str,
        spec: bytes,
        spec_hash: bytes,
        listed: tuple[str, ...],
        known: tuple[str, ...] = (),
        begins_here: Callable[[bytes], bool] = lambda spec: False,
    ) -> None:
        """begins_here: whether the run of this RunSpec has no log."""
        self.record, self.run, self.spec, self.spec_hash = record, run, spec, spec_hash
        self.tries = {address: Try(0.0) for address in listed}
        self.known = {address: Try(0.0) for address in known if address not in self.tries} if spec and listed else {}
        """Addresses of former peers: asked beside the listed ones, and not waited for. Who answers there may be of
        another run by now, or not of any yet, so only an active member of the run that my own RunSpec names counts; in
        one without a log, where nobody is active, who takes part in it."""
        self.found: Welcome | None = None
        self._begins_here = begins_here
        self._may_not_run = False
        """The run has no log, and nobody who takes part in it has answered."""

    @property
    def done(self) -> bool:
        return not self.unheard() if self.found is None else not self._gathers

    @property
    def _gathers(self) -> bool:
        """I know the RunSpec, and wait for all who are listed."""
        return self._may_not_run and bool(self.silent())

    def unheard(self) -> tuple[str, ...]:
        """Listed addresses that have not answered yet; where I have no RunSpec, also those that wait for one."""
        return tuple(a for a, t in self.tries.items() if not (t.answer if self.spec else t.final))

    def own(self) -> tuple[str, ...]:
        """Listed addresses that proved to be mine."""
        answers = {a: t.answer.record for a, t in self.tries.items() if t.answer is not None}
        return tuple(a for a, record in answers.items() if record is not None and record.voter == self.record.voter)

    def silent(self) -> tuple[str, ...]:
        """Listed addresses from which nothing has come at all."""
        return tuple(a for a, t in self.tries.items() if t.answer is None)

    def receive(self, sender: Voter, message: Message, now: float) -> list[Effect]:
        if isinstance(message, Hello):
            spec = self.spec or (self.found.spec if self.found is not None else b"")
            waiting = not spec and any(t.answer is None for t in self.tries.values())
            welcome = Welcome(PROTOCOL_VERSION, self.run, spec, self.record, (), message.address, "", waiting)
            return [Answer(welcome)]
        if isinstance(message, Welcome) and message.address in self.tries:
            record = message.record
            mine = record is not None and record.voter == self.record.voter
            if message.spec and not mine:
                if self.found is None:
                    self._may_not_run = self.spec in (b"", message.spec) and self._begins_here(message.spec)
                self._may_not_run = self._may_not_run and not _takes_part(message)
                self.found = self.found or message
            self.tries[message.address].answer = message  # last: another thread looks whether I am done
            for t in self.tries.values():
                if t.answer is not None and not t.final:  # what I know now, others may know by now, too
                    t.back_off_s, t.next_at = BACK_OFF_FIRST_S, min(t.next_at, now + BACK_OFF_FIRST_S)
        elif isinstance(message, Welcome) and message.address in self.known:
            active = message.record is not None and message.record.active
            if message.spec == self.spec and (active or (_takes_part(message) and self._begins_here(self.spec))):
                self.known[message.address].answer = message
                self.found, self._may_not_run = self.found or message, False
        return []

    def tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for address, t in (*self.tries.items(), *self.known.items()):
            if (not t.final or self._gathers) and now >= t.next_at:
                t.tries += 1
                t.next_at = now + t.back_off_s
                t.back_off_s = min(2 * t.back_off_s, BACK_OFF_MAX_S)
                hello = Hello(PROTOCOL_VERSION, self.run, self.spec_hash, self.record, address)
                effects.append(Dial(address, hello))
        return effects

    def next_deadline(self) -> float | None:
        tries = (*self.tries.values(), *self.known.values())
        waiting = [t.next_at for t in tries if not t.final or self._gathers]
        return min(waiting) if waiting else None


def _takes_part(answer: Welcome) -> bool:
    """Whether the answerer is out of the lobby, where no record is signed."""
    return answer.record is not None and bool(answer.record.signature)


class Desk(Lobby):
    """The lobby of an observer that lists nobody. Done when a run is heard of that has begun."""

    def __init__(self, record: Record, run: str, known: tuple[str, ...] = ()) -> None:
        super().__init__(record, run, b"", b"", ())
        self.known = {address: Try(0.0) for address in known}
        """Addresses of before, of whoever is to begin, and of whoever says that it is active."""
        self.first: Record | None = None
        """Who is to begin the run."""
        self._spec, self._heard_at = b"", 0.0
        self._opens_at: float | None = None if known else 0.0

    @property
    def done(self) -> bool:
        return self.found is not None

    def receive(self, sender: Voter, message: Message, now: float) -> list[Effect]:
        if isinstance(message, Hello):
            return self._hello(message, now)
        if isinstance(message, Welcome) and message.address in self.known and message.record is not None:
            if self.first is not None and message.record.voter.peer == self.first.voter.peer:
                self._spec, self._heard_at = message.spec, now
            if message.spec and message.record.active:
                self.known[message.address].answer = self.found = message
        return []

    def _hello(self, m: Hello, now: float) -> list[Effect]:
        asker = m.record
        if asker is not None and not (asker.control and well_formed(asker)):
            return []
        if asker is not None and asker.role != OBSERVER:
            if not asker.active and not self._begins(asker, now):
                return []  # it asks again
            self._ask(asker.control[0], now)
        told = self.first or self.record
        waiting = not self._spec and (asker is None or told.voter != asker.voter)
        return [Answer(Welcome(PROTOCOL_VERSION, self.run, self._spec, told, (), m.address, "", waiting))]

    def _ask(self, address: str, now: float) -> None:
        """Dial it from now on. The one asked in vain for the longest gives way, but never who is to begin."""
        if address not in self.known and len(self.known) >= ASKED_MAX:
            first = self.first.control[0] if self.first is not None else ""
            self.known.pop(next((a for a, t in self.known.items() if t.answer is None and a != first), ""), None)
        self.known.setdefault(address, Try(now))

    def _begins(self, asker: Record, now: float) -> bool:
        """Whether it is known who is to begin; it may be the asker from now on."""
        if self._opens_at is None or now < self._opens_at:
            return False
        same = self.first is not None and self.first.voter.peer == asker.voter.peer
        if self.first is None or same or now >= self._heard_at + FORGET_S:
            self.first, self._heard_at = asker, now
        return True

    def tick(self, now: float) -> list[Effect]:
        if self._opens_at is None:
            self._opens_at = now + RECALL_S
        return super().tick(now)
