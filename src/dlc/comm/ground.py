"""What the machines of one peer outside the log share while they handle one event: the counterpart of `Context`."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from dlc.comm.effects import Effect, Notify, Send
from dlc.comm.health import RUNNING_STEP_MAX_S
from dlc.comm.ids import PeerId, Voter
from dlc.comm.messages import Message
from dlc.comm.rates import Rates
from dlc.comm.service import Members, ServiceNews


class Ground:
    def __init__(
        self,
        me: Voter,
        members: Members,
        rates: Rates,
        rng: random.Random,
        tell_rates: Callable[[], None] = lambda: None,
    ) -> None:
        """tell_rates: called when the rates of my link may have changed, so that my record is made anew."""
        self.me, self.members, self.rates, self.rng, self.tell_rates = me, members, rates, rng, tell_rates
        self.now = 0.0
        self.running_s = 0.0
        """Time lived through; patience with others is measured in it: while I was not scheduled, their messages lay
        unread."""
        self.out: list[Effect] = []
        self.dropped: Counter[tuple[PeerId, str]] = Counter()
        """What was thrown away of whom, and why: parcels of a wrong size, that nobody asked for, ..."""

    def wake(self, now: float) -> None:
        """An event begins."""
        if now > self.now:
            self.running_s += min(now - self.now, RUNNING_STEP_MAX_S) if self.now else 0.0
            self.now = now

    def drain(self) -> list[Effect]:
        """An event ends: what is to be done."""
        effects, self.out = self.out, []
        return effects

    def at(self, running_s: float) -> float:
        """The moment at which so much time will have been lived through, if all goes well."""
        return self.now + max(0.0, running_s - self.running_s)

    def send(self, to: Voter, message: Message) -> None:
        self.out.append(Send(to.peer, message))

    def notify(self, event: ServiceNews) -> None:
        self.out.append(Notify(event))

    def up(self) -> list[Voter]:
        """Everybody else who is up, sorted."""
        members = self.members
        return sorted(r.voter for r in members.records() if r.voter != self.me and members.up(r.voter))

    def apart(self) -> list[Voter]:
        """Those of them that no vector reaches: they answer by a relay only, which carries no bulk."""
        return [voter for voter in self.up() if self.members.relay_for(voter.peer) is not None]
