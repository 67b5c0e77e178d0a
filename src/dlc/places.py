"""Where a peer is among rounds that nobody hands out: shown to those whom it may meet, and read of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import lru_cache

from dlc.comm.board import TTL_S_MAX
from dlc.comm.ids import PeerId
from dlc.comm.mesh import Mesh
from dlc.comm.rotation import AWAY_S_MAX, EXCHANGE_S_MAX, FOLLOWED_MAX, Place, Seen, Turn
from dlc.comm.wire import pack, unpack
from dlc.errors import ProtocolError
from dlc.peer import Peer

PLACE_BYTES_MAX = 256
"""Far more than a place has: what was read once is kept."""


class Places:
    """All peers of one `name` show theirs under it: to their mates, or to everybody, who may all be mates. A round
    beyond `most` is none that anybody can be at: who shows it is not heeded."""

    def __init__(self, peer: Peer, name: str, everybody: bool = False, most: int = FOLLOWED_MAX) -> None:
        self._mesh, self._me, self._key, self._everybody = peer.mesh, peer.id, f"place/{name}", everybody
        self._most = most
        self._away_s = self._exchange_s = 0.0
        self._left_at, self._met_at = self._now(), 0.0
        """When I began to train, and to average."""

    def begin(self) -> None:
        """I train from now on, whatever I did before."""
        self._left_at = self._now()

    def comes(self) -> float:
        """I have trained; for so long."""
        self._away_s = self._now() - self._left_at
        return self._away_s

    def waits(self, turn: Turn) -> None:
        """I do from now on."""
        self._show(Place(turn.round, True, False, self._away_s, self._exchange_s), turn.mates)

    def averages(self, turn: Turn) -> None:
        """The group is formed."""
        self._met_at = self._now()
        self._show(Place(turn.round + 1, False, True, self._away_s, self._exchange_s), turn.mates)

    def trains(self, before: int, mates: Collection[PeerId]) -> None:
        """I do from now on; before: which round."""
        self.begin()
        if self._met_at:
            self._exchange_s, self._met_at = self._left_at - self._met_at, 0.0
        self._show(Place(before, False, False, self._away_s, self._exchange_s), mates)

    def _now(self) -> float:
        return self._mesh.ask(lambda mesh, now: now)

    def _show(self, place: Place, mates: Collection[PeerId]) -> None:
        to = None if self._everybody else mates
        away_s, exchange_s = min(place.away_s, AWAY_S_MAX), min(place.exchange_s, EXCHANGE_S_MAX)
        shown = pack(replace(place, away_s=away_s, exchange_s=exchange_s))
        self._mesh.act(lambda mesh, now: mesh.post(self._key, shown, TTL_S_MAX, now, to))

    def seen(self, mesh: Mesh) -> Seen:
        """On the driver thread."""
        places, late = dict[PeerId, Place](), set[PeerId]()
        for peer, posted in mesh.board.get(self._key).items():
            if peer == self._me or not mesh.ground.members.up(posted.author):
                continue
            place = _place(posted.value) if len(posted.value) <= PLACE_BYTES_MAX else None
            if place is not None and place.round <= self._most:
                places[peer] = place
                if place.late(mesh.ground.now + TTL_S_MAX - posted.until):
                    late.add(peer)
        return Seen(places, late)

    def ask(self) -> Seen:
        """From any thread."""
        return self._mesh.ask(lambda mesh, now: self.seen(mesh))

    def close(self) -> None:
        """Be at no place any more."""
        self._mesh.act(lambda mesh, now: mesh.withdraw(self._key, now))


@lru_cache(maxsize=4096)
def _place(value: bytes) -> Place | None:
    """None: it is none."""
    try:
        place = unpack(value, Place)
    except ProtocolError:
        return None
    return place if place.sound else None
