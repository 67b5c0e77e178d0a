"""Bulk that is ready for each peer: results that I reduced, before what it asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from dlc.comm.entries import Part
from dlc.comm.ids import PeerId
from dlc.comm.messages import Bulk, Contrib, Piece, Result

SERVED_MAX = 4096
"""Results and pieces queued for one peer that asked for them; what is over is asked for again."""


class Outbox:
    def __init__(self) -> None:
        self.results: dict[PeerId, deque[Result]] = {}
        """What I reduced, for everybody."""
        self.served: dict[PeerId, dict[tuple[object, ...], Bulk]] = {}
        """What somebody asked for; outlives the slot, because it is asked for by those who are behind."""

    def tell(self, result: Result, peers: Iterable[PeerId]) -> None:
        for peer in peers:
            self.results.setdefault(peer, deque()).append(result)

    def serve(self, peer: PeerId, message: Bulk) -> None:
        """Queue a message that `peer` asked for, once."""
        queue = self.served.setdefault(peer, {})
        if len(queue) < SERVED_MAX:
            queue.setdefault(_name_of(message), message)

    def take_back(self, channel: str, base: bytes, part: Part) -> None:
        """This contribution comes after all: nobody is to be told any more that it does not."""
        given_up = channel, base, part.weight, part.upto
        kept = {
            peer: {
                name: message
                for name, message in queue.items()
                if not isinstance(message, Contrib)
                or (message.channel, message.base, message.weight, message.upto) != given_up
            }
            for peer, queue in self.served.items()
        }
        self.served = {peer: queue for peer, queue in kept.items() if queue}

    def keep(self, wanted: Callable[[Result], bool], reachable: Callable[[PeerId], bool]) -> None:
        """Drop results that nobody wants any more, and what was asked for by those who are gone."""
        kept = {peer: deque(filter(wanted, queue)) for peer, queue in self.results.items()}
        self.results = {peer: queue for peer, queue in kept.items() if queue}
        self.served = {peer: queue for peer, queue in self.served.items() if queue and reachable(peer)}

    @property
    def empty(self) -> bool:
        return not (self.results or self.served)

    def peers(self) -> set[PeerId]:
        """Those for whom there is something."""
        return {*self.results, *self.served}

    def next(self, peer: PeerId) -> Bulk | None:
        """Taken out: the next message for `peer`."""
        results = self.results.get(peer)
        if results:
            result = results.popleft()
            if not results:
                del self.results[peer]
            return result
        served = self.served.get(peer)
        if served:
            message = served.pop(next(iter(served)))
            if not served:
                del self.served[peer]
            return message
        return None


def _name_of(message: Bulk) -> tuple[object, ...]:
    if isinstance(message, Result):
        header = message.header
        return (header.head, header.ballot, header.chunk)
    if isinstance(message, Contrib):
        return (message.channel, message.base, message.chunk, message.weight, message.upto)
    assert isinstance(message, Piece)
    return (message.channel, message.digest, message.piece)
