"""Machines that a node carries beside the replicated log: no entry, no vote; membership and transport only.

    Node ──(receive, tick, member, next_bulk)──> Services ──> each Service ──> effects

A service is sans-I/O like every machine, and is told three things: messages of its own kinds, the time, and who of the
members came, died or left. It hands out effects, and frames of the bulk lane when a link has room for them. What the
log knows of itself (stale after a freeze, no seat, nothing founded yet) does not concern it: its messages are handed
on in all these states. Its own kinds of messages stand in catalogue.py, each family from a code of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from dlc.comm.effects import Effect
from dlc.comm.events import MemberDown, MemberLeft, MemberUp
from dlc.comm.ids import PeerId, Voter
from dlc.comm.messages import Bulk, Message, Record
from dlc.errors import UsageError

MemberEvent = MemberUp | MemberDown | MemberLeft


class ServiceNews:
    """Base of the events that a service tells its owner with `Notify`; they go to the listeners of `Peer.serve`."""

    __slots__ = ()


class Members(Protocol):
    """What a service may ask about the others; `Membership` answers it, and a stand-in of a simulation may."""

    me: Voter

    def alive(self, voter: Voter) -> bool:
        """This very process answered a ping of mine within T_dead."""
        ...

    def up(self, voter: Voter) -> bool:
        """It answered me once, and nothing says that it is dead, or gone: in swarms too large to ping all of them."""
        ...

    def gone(self, voter: Voter) -> bool:
        """Proof that this process is no more."""
        ...

    def record(self, peer: PeerId) -> Record | None: ...

    def records(self) -> list[Record]:
        """The newest of each known peer that has not left, mine first; not to be changed."""
        ...

    def relay_for(self, peer: PeerId) -> PeerId | None:
        """Who carries messages there, but no bulk, as the direct way to it fails; None: it is reached directly."""
        ...

    def rtt_s(self, peer: PeerId) -> float: ...

    @property
    def t_dead_s(self) -> float:
        """After this long without a proof of life a peer counts as dead."""
        ...


class Service(Protocol):
    """The interface of a machine outside the log. `now` never goes back."""

    takes: tuple[type, ...]
    """Kinds of messages that are for it, and for no other service."""

    def receive(self, sender: Voter, message: Message, now: float) -> list[Effect]:
        """Raises ProtocolError for a message that no correct peer sends; the state is unchanged then."""
        ...

    def tick(self, now: float) -> list[Effect]: ...

    def next_deadline(self) -> float | None:
        """Absolute time at which `tick` wants to be called at the latest; None: at any time."""
        ...

    def member(self, event: MemberEvent, now: float) -> list[Effect]:
        """Somebody came, is dead (and may come back), or has left for good."""
        ...

    def pending_bulk(self) -> Iterable[PeerId]:
        """Peers for which `next_bulk` has something; asked very often."""
        ...

    def next_bulk(self, peer: PeerId) -> Bulk | None:
        """The next message for this peer's bulk link, which has room for it."""
        ...

    def bulk_peers(self) -> Iterable[PeerId]:
        """Peers to which bulk will go soon: their links are opened beforehand."""
        ...

    @property
    def resting(self) -> bool:
        """Nothing is on its way to or from this machine that a probe of the link might disturb."""
        ...


class Services:
    """The services of one node, by the kinds of messages that they take."""

    def __init__(self) -> None:
        self._all: list[Service] = []
        self.kinds: dict[type, Service] = {}
        """Which service takes messages of which kind."""

    def add(self, service: Service) -> None:
        """Raises UsageError where another service takes one of its kinds already."""
        for kind in service.takes:
            if kind in self.kinds:
                other = type(self.kinds[kind]).__name__
                raise UsageError(f"{other} of this peer takes {kind.__name__} already: close it, or use another peer")
        self._all.append(service)
        self.kinds.update(dict.fromkeys(service.takes, service))

    def remove(self, service: Service) -> None:
        self._all.remove(service)
        for kind in service.takes:
            del self.kinds[kind]

    def receive(self, sender: Voter, message: Message, now: float) -> list[Effect]:
        """A message of one of the `kinds`."""
        return self.kinds[type(message)].receive(sender, message, now)

    def tick(self, now: float) -> list[Effect]:
        return [effect for service in self._all for effect in service.tick(now)] if self._all else []

    def member(self, event: MemberEvent, now: float) -> list[Effect]:
        return [effect for service in self._all for effect in service.member(event, now)]

    def next_deadline(self) -> float | None:
        return min((at for s in self._all if (at := s.next_deadline()) is not None), default=None)

    def pending_bulk(self) -> set[PeerId]:
        return {peer for service in self._all for peer in service.pending_bulk()}

    def next_bulk(self, peer: PeerId) -> Bulk | None:
        for service in self._all:
            message = service.next_bulk(peer)
            if message is not None:
                return message
        return None

    def bulk_peers(self) -> set[PeerId]:
        return {peer for service in self._all for peer in service.bulk_peers()}

    @property
    def resting(self) -> bool:
        return all(service.resting for service in self._all)
