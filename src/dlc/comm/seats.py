"""What a helper has of one span; changed by the parts of the helper: `server`, `claimant`, `replicas`, `seeding`."""

from __future__ import annotations

from dataclasses import dataclass, field

from dlc.comm.claims import Claiming
from dlc.comm.codecs import Payload
from dlc.comm.ids import PeerId, Voter
from dlc.comm.roles import HELPER, TRAINER
from dlc.comm.servermessages import Stake, Update
from dlc.comm.serverpeer import ServerMembers, ServerPeer
from dlc.comm.spanowner import SpanOwner
from dlc.comm.spanstate import Optimizer, SpanState
from dlc.comm.tidings import Tidings


@dataclass
class Replica:
    """The state of a span whose owner is another."""

    source: Voter
    era: int
    """Of that owner's updates: those of another do not follow this state."""
    state: SpanState
    ahead: dict[int, tuple[Update, list[Payload]]] = field(default_factory=dict)
    """Updates that are here before those that they follow."""
    asked: dict[int, str] = field(default_factory=dict)
    """Updates on their way: version to key."""


@dataclass
class Seeding:
    """A span without an owner, that I am about to take from a trainer."""

    began: float
    stakes: dict[Voter, Stake] = field(default_factory=dict)
    refused: set[Voter] = field(default_factory=set)
    """Whose stakes are not finite."""
    asked_at: float = float("-inf")
    fetching: tuple[Voter, str] | None = None
    """Whose stake is on its way, and its key."""
    state: SpanState | None = None


@dataclass
class Seat:
    owner: SpanOwner | None = None
    """I own the span."""
    replica: Replica | None = None
    image: tuple[Voter, str] | None = None
    """Whose image was asked for last, and its key."""
    seeding: Seeding | None = None
    claim: Claiming | None = None
    candidate: Voter | None = None
    """Where a standby is being made, since the one before died."""
    candidate_since: float = 0.0
    retry_at: float = float("-inf")
    """No claim before that."""


class Host(ServerPeer):
    """What the parts of a helper share."""

    def __init__(self, members: ServerMembers, optimizer: Optimizer, now: float) -> None:
        super().__init__(members, now)
        self.optimizer, self.began = optimizer, now
        self.seats: dict[int, Seat] = {}
        self.tidings = Tidings()

    def bulk_peers(self) -> list[PeerId]:
        return [v.peer for v in self.living(HELPER, TRAINER) if v != self.me]

    def away(self, voter: Voter) -> bool:
        """Gone, or dead for so long that it is not waited for."""
        if self.members.gone(voter):
            return True
        record = self.members.record(voter.peer)
        if record is None or record.voter != voter:  # it left, or died, before I came
            return self.now > self.began + self.members.t_remove_s
        return not self.lives(voter) and self.members.unseen_s(voter) > self.members.t_remove_s
