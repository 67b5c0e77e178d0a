"""Notices that outlive their authors: who is left shows them to those who come later.

An author shows its notices to whoever comes (`board`). One that has left, died, or was started again shows none of its
earlier ones any more: those who were there with it have them until they end, and newcomers would never. So of each such
notice one of those who are up says the same under the same key, in its own name, for as long as it would have lasted:
the first in an order by hash; where that one does not (it may have come too late to know), the second, and so on. When
the author is up again what was said for it is withdrawn.

Under a key that a peer has a notice of its own under it says nothing for another. Nobody says more for others than
half of what one peer may have.
"""

from __future__ import annotations

import math

from blake3 import blake3

from dlc.comm.board import Board, Posted
from dlc.comm.ground import Ground
from dlc.comm.ids import PeerId, Voter

LOOK_S, LOOK_SELDOM_S = 2.0, 60.0
"""How often it is looked whether it is my turn, where somebody's is; and else, beside when others come and go."""
TURN_S = 5.0
"""How long an author is not up before others say it, and how long each leaves it to the one before in order."""
WITHDRAWN_S = 60.0
"""How long it is told that the author shows it itself again."""


class Heirs:
    def __init__(self, ground: Ground, board: Board) -> None:
        self.ground, self.board = ground, board
        self._prefixes: dict[str, bool] = {}
        """How keys of lasting notices begin, and whether the id of a peer follows."""
        self._orphans: dict[tuple[str, bytes], float] = {}
        """Key and value of what nobody shows who is up: since when."""
        self._said: dict[str, tuple[Voter, int]] = {}
        """What I say for others: by key, for whom, and the number of my notice."""
        self._look_at = math.inf

    def keep(self, prefix: str, of_members: bool = False) -> None:
        """Notices of keys that begin so outlive their authors; those for some peers only (`to`) do not. To be said on
        all peers. of_members: the id of a peer follows, and they do as long as that peer is known, dead or alive."""
        self._prefixes[prefix] = of_members
        self._look_at = self.ground.now

    def changed(self) -> None:
        """Somebody came, died or left."""
        if self._prefixes:
            self._look_at = self.ground.now

    def tick(self) -> None:
        if self.ground.now < self._look_at:
            return
        up = {voter.peer: voter for voter in (self.ground.me, *self.ground.up())}
        self._give_back(up)
        before, self._orphans = self._orphans, {}
        for key in sorted({key for prefix in self._prefixes for key in self.board.keys(prefix) if self._lasts(key)}):
            self._look(key, up, before)
        self._look_at = self.ground.now + (LOOK_S if self._orphans else LOOK_SELDOM_S)

    def next_deadline(self) -> float:
        return self._look_at

    def _lasts(self, key: str) -> bool:
        about = [key.removeprefix(p) for p, of_members in self._prefixes.items() if of_members and key.startswith(p)]
        return all(self.ground.members.record(peer) is not None for peer in about)

    def _give_back(self, up: dict[PeerId, Voter]) -> None:
        for key, (author, seq) in list(self._said.items()):
            mine = self.board.get(key).get(self.ground.me.peer)
            if mine is None or mine.seq != seq:  # it has ended, or I have something of my own to say there
                del self._said[key]
            elif up.get(author.peer) == author or not self._lasts(key):
                del self._said[key]
                self.board.withdraw(key, WITHDRAWN_S)

    def _look(self, key: str, up: dict[PeerId, Voter], before: dict[tuple[str, bytes], float]) -> None:
        shown, me = self.board.get(key), self.ground.me
        said = {posted.value for posted in shown.values() if up.get(posted.author.peer) == posted.author}
        by_end = sorted(shown.values(), key=lambda posted: posted.until)
        orphans = {posted.value: posted for posted in by_end if not posted.near and posted.value not in said}
        if not orphans or me.peer in shown:
            return
        heirs = sorted((peer for peer in up if peer not in shown), key=lambda peer: _rank(key, peer))
        turn = heirs.index(me.peer)
        for i, (value, posted) in enumerate(sorted(orphans.items())):
            since = self._orphans[key, value] = before.get((key, value), self.ground.now)
            if self.ground.now >= since + TURN_S * (1 + (turn - i) % len(heirs)):
                self._say(key, posted)
                return

    def _say(self, key: str, posted: Posted) -> None:
        seq = self.board.say_on(key, posted)
        if seq:
            self._said[key] = posted.author, seq


def _rank(key: str, peer: PeerId) -> bytes:
    return blake3(f"{key} {peer}".encode()).digest(16)
