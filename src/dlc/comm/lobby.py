"""Before a peer knows what the run is: say hello to every listed address until somebody tells.

  no address listed                     -> done at once, with my own RunSpec
  a Welcome with a RunSpec              -> done, with that RunSpec
  every listed address answered, none knows a RunSpec, and none waits for somebody who may -> done, with my own
  a Welcome of an active member of the run of my own RunSpec, at an address that I knew from before -> done, as well
  otherwise                             -> keep dialling with back-off, and say for whom I wait

A waiting peer answers the hellos of others meanwhile, so that four that start together find each other. It tells what
it found, and whether it still waits: who took the silence of a peer that is itself about to join for "there is no
RunSpec" would begin with another one than the run has, and never be heard.
"""

from __future__ import annotations

from dataclasses import dataclass

from dlc.comm.effects import Answer, Dial, Effect
from dlc.comm.ids import Voter
from dlc.comm.messages import PROTOCOL_VERSION, Hello, Message, Record, Welcome

BACK_OFF_FIRST_S = 0.25
BACK_OFF_MAX_S = 4.0


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
    ) -> None:
        self.record, self.run, self.spec, self.spec_hash = record, run, spec, spec_hash
        self.tries = {address: Try(0.0) for address in listed}
        self.known = {address: Try(0.0) for address in known if address not in self.tries} if spec and listed else {}
        """Addresses of former peers: asked beside the listed ones, and not waited for. Who answers there may be of
        another run by now, or not of any yet, so only an active member of the run that my own RunSpec names counts."""
        self.found: Welcome | None = None

    @property
    def done(self) -> bool:
        return self.found is not None or not self.unheard()

    def unheard(self) -> tuple[str, ...]:
        """Listed addresses that have not answered yet; where I have no RunSpec, also those that wait for one."""
        return tuple(a for a, t in self.tries.items() if not (t.answer if self.spec else t.final))

    def receive(self, sender: Voter, message: Message, now: float) -> list[Effect]:
        if isinstance(message, Hello):
            spec = self.spec or (self.found.spec if self.found is not None else b"")
            waiting = not spec and any(t.answer is None for t in self.tries.values())
            welcome = Welcome(PROTOCOL_VERSION, self.run, spec, self.record, (), message.address, "", waiting)
            return [Answer(welcome)]
        if isinstance(message, Welcome) and message.address in self.tries:
            self.tries[message.address].answer = message
            mine = message.record is not None and message.record.voter == self.record.voter
            if message.spec and not mine and self.found is None:
                self.found = message
            for t in self.tries.values():
                if t.answer is not None and not t.final:  # what I know now, others may know by now, too
                    t.back_off_s, t.next_at = BACK_OFF_FIRST_S, min(t.next_at, now + BACK_OFF_FIRST_S)
        elif isinstance(message, Welcome) and message.address in self.known:
            if message.spec == self.spec and message.record is not None and message.record.active:
                self.known[message.address].answer = message
                self.found = self.found or message
        return []

    def tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for address, t in (*self.tries.items(), *self.known.items()):
            if not t.final and now >= t.next_at:
                t.tries += 1
                t.next_at = now + t.back_off_s
                t.back_off_s = min(2 * t.back_off_s, BACK_OFF_MAX_S)
                hello = Hello(PROTOCOL_VERSION, self.run, self.spec_hash, self.record, address)
                effects.append(Dial(address, hello))
        return effects

    def next_deadline(self) -> float | None:
        waiting = [t.next_at for t in (*self.tries.values(), *self.known.values()) if not t.final]
        return min(waiting) if waiting else None
