"""Where a peer is among rounds that nobody hands out: shown to those whom it may meet, and read of them."""

from __future__ import annotations

import contextlib
from collections.abc import Collection

from dlc.comm.board import TTL_S_MAX
from dlc.comm.ids import PeerId
from dlc.comm.mesh import Mesh
from dlc.comm.rotation import Place, Seen
from dlc.comm.wire import pack, unpack
from dlc.errors import ProtocolError
from dlc.peer import Peer


class Places:
    """All peers of one `name` show theirs under it."""

    def __init__(self, peer: Peer, name: str) -> None:
        self._mesh, self._me, self._key = peer.mesh, peer.id, f"place/{name}"
        self._shown: Place | None = None

    def stand(self, place: Place, to: Collection[PeerId] | None = None) -> None:
        """Show these (None: everybody) where I am, until `close`, or until I am gone."""
        if place != self._shown:
            self._shown, value = place, pack(place)
            self._mesh.act(lambda mesh, now: mesh.post(self._key, value, TTL_S_MAX, now, to))

    def seen(self, mesh: Mesh) -> Seen:
        """On the driver thread."""
        places, late = dict[PeerId, Place](), set[PeerId]()
        for peer, posted in mesh.board.get(self._key).items():
            if peer == self._me or not mesh.ground.members.up(posted.author):
                continue
            with contextlib.suppress(ProtocolError):
                place = unpack(posted.value, Place)
                if place.sound:
                    places[peer] = place
                    if place.late(mesh.ground.now + TTL_S_MAX - posted.until):
                        late.add(peer)
        return Seen(places, late)

    def ask(self) -> Seen:
        """From any thread."""
        return self._mesh.ask(lambda mesh, now: self.seen(mesh))

    def close(self) -> None:
        self._mesh.act(lambda mesh, now: mesh.withdraw(self._key, now))
