"""What the machines of one peer share while they handle one event.

A `Context` is created once per peer. For each event the node sets `now`, the machines append to `out`, and the node
hands the effects on. It holds no behaviour of the protocol: only who I am, what time it is, and how to send.
"""

from __future__ import annotations

from collections.abc import Iterable

from dlc.comm.effects import Effect, Notify, Send
from dlc.comm.ids import Voter
from dlc.comm.membership import Membership
from dlc.comm.messages import Message
from dlc.comm.state import AtLength


class Context:
    def __init__(self, me: Voter, members: Membership) -> None:
        self.me = me
        self.members = members
        self.now = 0.0
        self.running_s = 0.0
        """Time lived through: at most a second between two events counts. Patience with others is measured in it:
        while I was not scheduled, their messages lay unread."""
        self.out: list[Effect] = []
        self.record_due = True
        """What my record says of log and states is out of date."""
        self.leaving = False
        """The leave is announced: nothing is coordinated, promised or voted for any more."""
        self.stale = True
        """I may have been frozen, or have just started: no promise, no vote, no coordination until refreshed."""
        self.at_length: AtLength = lambda work, size_bytes: work()
        """Does work that grows with the model; whoever drives the node may answer others' pings meanwhile."""

    def send(self, to: Voter, message: Message) -> None:
        self.out.append(Send(to.peer, message))

    def cast(self, voters: Iterable[Voter], message: Message) -> None:
        for voter in voters:
            self.out.append(Send(voter.peer, message))

    def notify(self, event: object) -> None:
        self.out.append(Notify(event))
