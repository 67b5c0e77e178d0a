"""The owner's side of its standbys: they are sent an image once, and then each update, again and again until taken.

Updates are kept, in order, until they are applied here and every follower has taken them. Now and then both sides tell
the digest of their state at the same version: a replica of other bits is sent all again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from dlc.comm.codecs import Payload
from dlc.comm.ids import Voter
from dlc.comm.servermessages import ImageOffer, SpanView, Update, UpdateOffer, UpdateTaken
from dlc.comm.serverpeer import Notice, ServerPeer
from dlc.comm.spanstate import SpanState

REPEAT_S = 1.0
"""How often what was not answered is sent again; or after four round trips."""
LOG_MAX = 64
"""Updates kept for a standby in the making; beyond that no more are made until it has taken some."""
IMAGE_PART_BYTES = 1 << 20
IMAGES_BYTES = 64 << 20
"""Once a helper has made images of so many bytes in one look, more wait for the next: each copies and hashes a span,
and nothing is heard meanwhile."""
DIGEST_EVERY = 16
"""Versions between two checks that the standby holds the same bits."""


@dataclass
class Made:
    """An update on its way to the standby, or kept for one in the making."""

    update: Update
    payloads: list[Payload]
    key: str
    bases: dict[Voter, int]
    """By trainer: the version that its push was based on."""
    made_at: float


@dataclass
class Follower:
    """A replica: the standby, or one in the making."""

    era: int
    """Of what it is sent: updates follow images of the same era only, even where both are mine."""
    taken: int = -1
    """Newest version that it holds; -1: it has no replica yet."""
    image: tuple[int, str, int, bytes] | None = None
    """(version, key, bytes, digest) of the image that it is fetching."""
    said_at: float = float("-inf")
    told: tuple[int, bytes] = (-1, b"")
    """(version, digest) of its replica, as it said last."""


class Followers:
    def __init__(self, host: ServerPeer, state: SpanState, serial: Callable[[], int]) -> None:
        self.host, self.state, self._serial = host, state, serial
        self.all: dict[Voter, Follower] = {}
        self.log: deque[Made] = deque()
        """Oldest first: not applied yet, or not taken yet by all followers."""
        self._digest: tuple[int, bytes] = (-1, b"")
        """(version, digest) of my own, as found last."""

    def add(self, voter: Voter) -> Follower:
        """Make and keep a replica there."""
        if voter not in self.all:
            self.all[voter] = Follower(self._serial())
        return self.all[voter]

    def remove(self, voter: Voter) -> None:
        follower = self.all.pop(voter, None)
        if follower is not None:
            self._drop_image(follower)

    def keep_only(self, *voters: Voter | None) -> None:
        for voter in [v for v in self.all if v not in voters]:
            self.remove(voter)

    def taken(self, voter: Voter) -> int:
        follower = self.all.get(voter)
        return -1 if follower is None else follower.taken

    def stalled(self, voter: Voter, after_s: float) -> bool:
        """It has not taken something for so long."""
        first = next((made for made in self.log if made.update.version > self.taken(voter)), None)
        return first is not None and self.host.now > first.made_at + after_s

    # ---------------------------------------------------------------- updates

    def make(self, update: Update, payloads: list[Payload], bases: dict[Voter, int], view: SpanView) -> None:
        """Keep an update, and offer it to all who have a replica."""
        made = Made(update, payloads, f"update/{view.span}/{self._serial()}", bases, self.host.now)
        self.log.append(made)
        self.host.shelf.hold_parts(made.key, payloads)
        for voter, follower in self.all.items():
            if follower.taken >= 0:
                follower.said_at = self.host.now
                self._offer(voter, follower, made, view)

    def applied(self) -> None:
        """The state has moved by one update."""
        if self.state.version % DIGEST_EVERY == 0:
            self._digest = (self.state.version, self.state.digest())
            for voter, follower in self.all.items():
                self._compare(voter, follower)

    def trim(self) -> None:
        """Let go of what nobody needs."""
        needed = [f.taken if f.image is None else f.image[0] for f in self.all.values()]
        kept = min([self.state.version, *(version for version in needed if version >= 0)])
        while self.log and self.log[0].update.version <= kept:
            self.host.shelf.drop(self.log.popleft().key)

    def receive_taken(self, sender: Voter, m: UpdateTaken, issued: int, view: SpanView) -> None:
        follower = self.all.get(sender)
        if follower is None or m.version > issued:
            return
        if follower.taken < 0 and (follower.image is None or m.version < follower.image[0]):
            return  # it cannot have taken what it is offered: this is of a replica that it had before
        if m.version < 0 and follower.taken >= 0:
            follower.taken = -1  # it has lost its replica
        if m.version > follower.taken:
            follower.taken, follower.said_at = m.version, self.host.now
            self._drop_image(follower)
            for made in self.log:
                if made.update.version > follower.taken:
                    self._offer(sender, follower, made, view)
        if m.digest:
            follower.told = (m.version, m.digest)
            self._compare(sender, follower)

    def _compare(self, voter: Voter, follower: Follower) -> None:
        """Whoever is first at a version, its digest waits for the other's."""
        version, digest = follower.told
        if version == self._digest[0] >= 0 and digest != self._digest[1]:
            self.host.tell(Notice(f"span {self.state.span}: {voter} holds other bits, and is sent all again", True))
            follower.era, follower.taken, follower.told = self._serial(), -1, (-1, b"")

    # ---------------------------------------------------------------- offers

    def repeat(self, issued: int, view: SpanView) -> None:
        """Offer again what was not taken, from time to time."""
        for voter, follower in self.all.items():
            every_s = max(REPEAT_S, 4 * self.host.members.rtt_s(voter.peer))
            if follower.taken >= issued or self.host.now < follower.said_at + every_s:
                continue
            if follower.taken < 0:
                self._offer_image(voter, follower, view)
            else:
                follower.said_at = self.host.now
                for made in self.log:
                    if made.update.version > follower.taken:
                        self._offer(voter, follower, made, view)

    def _offer(self, voter: Voter, follower: Follower, made: Made, view: SpanView) -> None:
        sizes = tuple(len(payload) for payload in made.payloads)
        self.host.send(voter, UpdateOffer(view, follower.era, made.update, made.key, sizes))

    def _offer_image(self, voter: Voter, follower: Follower, view: SpanView) -> None:
        if follower.image is None:
            if self.host.images_bytes >= IMAGES_BYTES:
                return
            image = self.state.image()
            self.host.images_bytes += len(image)
            key = f"image/{view.span}/{self._serial()}"
            size = IMAGE_PART_BYTES
            self.host.shelf.hold(key, -(-len(image) // size), lambda part: image[part * size : (part + 1) * size])
            follower.image = (self.state.version, key, len(image), self.state.digest())
        follower.said_at = self.host.now
        version, key, n_bytes, digest = follower.image
        self.host.send(voter, ImageOffer(view, follower.era, version, digest, key, n_bytes))

    def _drop_image(self, follower: Follower) -> None:
        if follower.image is not None:
            self.host.shelf.drop(follower.image[1])
            follower.image = None

    def close(self) -> None:
        self.keep_only()
        for made in self.log:
            self.host.shelf.drop(made.key)
