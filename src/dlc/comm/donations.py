"""What a peer gives to those who are behind, without ever stopping for it.

Entries that follow the asker's head, with their results while these are kept; else an offer of a snapshot: the log's
state at some head, and an image of each channel's state there. The offer is sent once the pieces of all its images are
hashed, which is done a slice per tick. The log goes on meanwhile; what follows the snapshot is kept for its takers.

At most one image per open channel is kept while somebody fetches it. Whoever asks for the present state while an older
one is being fetched is offered the older one, if the log still reaches back to it, or else is served from the state
itself until that changes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import cast

from dlc.comm.context import Context
from dlc.comm.entries import EMPTY, LogState
from dlc.comm.exchange import Exchange
from dlc.comm.ids import Voter
from dlc.comm.images import PIECE_BYTES, Image, PieceLimits
from dlc.comm.log import HISTORY_ROUNDS_MAX, Log, Past
from dlc.comm.messages import Fetch, ImageOffer, NoOffer, NoPiece, Offer, Piece, PieceReq, Step, Steps, SyncReq

__all__ = ["PIECE_BYTES", "Donations"]

IMAGE_KEEP_S = 60.0
"""An image that nobody asked for during this time is given up."""
IN_USE_S = 10.0
"""Somebody asked for a piece just now: another image does not take this one's place."""
IMAGES_MAX = 3
"""Per channel before it is open: the choice of its first state may still need one that was replaced. Later only one."""
STEPS_MAX = 8
"""Entries in one answer, each with the hashes of all its chunks; the asker asks again."""
PENDING_MAX = 64
"""Askers that wait for an offer to be ready; one more asks again."""


@dataclass(frozen=True)
class Snapshot:
    """What an offer is made of: a head, and the channel states that belong to it."""

    state: LogState
    chain: tuple[bytes, ...]
    totals: tuple[float, ...]
    images: tuple[tuple[str, bytes], ...]
    """(channel, digest) of each."""


class Donations:
    def __init__(self, ctx: Context, log: Log, exchange: Exchange, limits: PieceLimits) -> None:
        self.ctx, self.log, self.exchange, self.limits = ctx, log, exchange, limits
        log.before_change = self._before_change
        self._images: dict[tuple[str, bytes], Image] = {}
        self._given_up: list[Image] = []
        """Their memory goes back a segment per tick."""
        self._snapshot: Snapshot | None = None
        self._pending: dict[Voter, Snapshot] = {}
        self._followers: dict[Voter, tuple[bytes, float]] = {}
        """Who is given more entries than are usually kept: the head that it asked at last, and when."""

    # ---------------------------------------------------------------- images

    def keep(self, channel: str) -> None:
        """Set the present first state aside before another replaces it: I accepted it, so it may have been decided."""
        digest = self.log.attached[channel].digest
        if (channel, digest) not in self._images:
            self._make(channel, digest)

    def doubt(self, channel: str) -> None:
        """The state of this channel here has been found to be another than the swarm's: no image of it is given."""
        for key in [key for key in self._images if key[0] == channel]:
            self._give_up(key)

    def kept(self, channel: str, digest: bytes) -> bytearray | None:
        """A copy of a first state that was set aside here."""
        image = self._images.get((channel, digest))
        if image is None:
            return None
        return bytearray().join(image.piece(p) for p in range(image.n_pieces))

    def _before_change(self, channel: str) -> None:
        """The state of this channel moves on: what is still read from it is copied now, if anybody wants it."""
        for key, image in list(self._images.items()):
            if key[0] == channel and not image.copied and key[1] == self.log.attached[channel].digest:
                if self._in_use(image) or not self.log.is_open(channel) or self._awaited(key):
                    image.finish()
                else:
                    self._give_up(key)

    def _in_use(self, image: Image) -> bool:
        return self.ctx.now - image.last_asked <= IN_USE_S

    def _fetched(self, image: Image) -> bool:
        return self.ctx.now - image.last_fetched <= IN_USE_S

    def _awaited(self, key: tuple[str, bytes]) -> bool:
        return any(key in snapshot.images for snapshot in self._pending.values())

    def _make(self, channel: str, digest: bytes) -> Image:
        """Begin an image of the present state; older ones of the channel give way."""
        room = 1 if self.log.is_open(channel) else IMAGES_MAX
        others = [key for key in self._images if key[0] == channel]
        while len(others) >= room:
            oldest = min(others, key=lambda key: self._images[key].last_asked)
            others.remove(oldest)
            self._give_up(oldest)
        image = Image(self.log.attached[channel].state, digest, self.limits, self.ctx.now)
        self._images[(channel, digest)] = image
        return image

    def _give_up(self, key: tuple[str, bytes]) -> None:
        self._given_up.append(self._images.pop(key))
        if self._snapshot is not None and key in self._snapshot.images:
            self._snapshot = None
        for voter in [v for v, s in self._pending.items() if key in s.images]:
            del self._pending[voter]
            self.ctx.send(voter, NoOffer(self.log.head))

    # ---------------------------------------------------------------- work in slices

    @property
    def working(self) -> bool:
        """There is a slice of work for the next tick."""
        return bool(self._given_up or self._pending) or any(not i.copied for i in self._images.values())

    def tick(self) -> None:
        """One slice of work."""
        self._keep_followed()
        if not (self._images or self._given_up):
            return
        now = self.ctx.now
        for key in [k for k, image in self._images.items() if now - image.last_asked > IMAGE_KEEP_S]:
            if self.log.is_open(key[0]):  # the choice of a first state may still need an old one
                self._give_up(key)
        if self._given_up and not self._given_up[-1].give_back():
            self._given_up.pop()
        self._work()
        snapshot = self._snapshot
        fetched = snapshot is not None and any(self._in_use(self._images[key]) for key in snapshot.images)
        self.log.pin("given", snapshot.state.head if snapshot is not None and fetched else b"")

    def _keep_followed(self) -> None:
        """What follows a state that was fetched here is kept for who takes it entry by entry, as long as it asks."""
        now = self.ctx.now
        self._followers = {v: (head, at) for v, (head, at) in self._followers.items() if now - at <= IN_USE_S}
        heads = (head for head, _ in self._followers.values())
        self.log.pin("followed", max(heads, key=lambda head: len(self.log.after(head) or ()), default=b""))

    def _work(self) -> None:
        """Hash a few pieces that an offer waits for, or copy a few; send the offers that are complete."""
        awaited = [i for key, i in self._images.items() if not i.hashed and self._awaited(key)]
        if awaited:
            awaited[0].hash(self.limits.hash_pieces)
        else:
            uncopied = [i for i in self._images.values() if not i.copied]
            if uncopied:
                uncopied[0].copy(self.limits.copy_pieces)
        for voter, snapshot in list(self._pending.items()):
            if all(self._images[key].hashed for key in snapshot.images):
                del self._pending[voter]
                self._offer(voter, snapshot)

    # ---------------------------------------------------------------- requests

    def receive_request(self, sender: Voter, m: SyncReq) -> None:
        later = self.log.after(m.head)
        if later and (not m.snapshot or self._costs(later)):
            if len(later) > HISTORY_ROUNDS_MAX:
                self._followers[sender] = m.head, self.ctx.now
            steps = tuple(Step(p.entry, p.hashes) for p in later[:STEPS_MAX])
            self.ctx.send(sender, Steps(m.head, steps))
            return
        nothing = later is None and bool(self.log.lacking()) and not any(map(self.log.holds, self.log.attached))
        if self.log.head == EMPTY or nothing or (later is not None and not m.snapshot):
            self.ctx.send(sender, NoOffer(self.log.head))
            return
        if len(self._pending) >= PENDING_MAX and sender not in self._pending:
            return
        self._pending[sender] = self._snapshot_for(m)
        self._work()

    def _costs(self, later: list[Past]) -> bool:
        """Whoever jumped over these entries to my head would lose a state that it may hold there, and that I have none
        of. Each of two peers may hold what the other lacks: entry by entry they come together."""
        moved = {past.entry.channel for past in later}
        return any(self.log.is_open(channel) and not self.log.servable(channel) for channel in moved)

    def _snapshot_for(self, m: SyncReq) -> Snapshot:
        """The one that is being fetched just now, if the asker can use it, or else one of this moment."""
        old = self._snapshot
        if old is not None and m.depth <= old.state.depth and not m.first_states and self.log.after(old.state.head):
            moved = [k for k in old.images if self.log.servable(k[0]) != k[1]]
            attached = {c for c in self.log.attached if self.log.servable(c)}
            wanted = any(self._fetched(self._images[k]) or self._awaited(k) for k in moved)
            if wanted and {c for c, _ in old.images} == attached:
                for key in old.images:
                    self._images[key].last_asked = self.ctx.now
                return old
        return self._take_snapshot(set(m.first_states))

    def _take_snapshot(self, wanted: Collection[bytes]) -> Snapshot:
        """Of this moment; of channels that are not open yet, the first states that are wanted, where they are kept."""
        images = []
        for channel in self.log.attached:
            digest = self.log.servable(channel)
            if not self.log.is_open(channel):
                digest = next((d for c, d in self._images if c == channel and d in wanted), digest)
            if digest:
                images.append((channel, digest))
                if (channel, digest) not in self._images:
                    self._make(channel, digest)
                self._images[channel, digest].last_asked = self.ctx.now
        here = self.log.saved()
        self._snapshot = Snapshot(here.state, here.chain, here.totals, tuple(images))
        return self._snapshot

    def _offer(self, to: Voter, snapshot: Snapshot) -> None:
        images = ((c, d, self._images[c, d]) for c, d in snapshot.images)
        offers = tuple(ImageOffer(c, d, i.n_bytes, i.piece_bytes, tuple(i.hashes)) for c, d, i in images)
        self.ctx.send(to, Offer(snapshot.state, snapshot.chain, snapshot.totals, offers))

    def receive_piece_request(self, sender: Voter, m: PieceReq) -> None:
        image = self._image(m.channel, m.digest)
        if image is None:
            self.ctx.send(sender, NoPiece(m.channel, m.digest))
            return
        image.last_asked = image.last_fetched = self.ctx.now
        for index in m.pieces[: self.limits.in_flight_max]:
            if 0 <= index < image.n_pieces:
                payload = cast(bytes, image.piece(index))  # a view: what waits in the queue takes no memory of its own
                self.exchange.outbox.serve(sender.peer, Piece(m.channel, m.digest, index, payload))

    def _image(self, channel: str, digest: bytes) -> Image | None:
        """The image with this digest: one that is kept, a new one, or one that is not kept, of a state still here."""
        image = self._images.get((channel, digest))
        if image is not None or not digest or self.log.servable(channel) != digest:
            return image
        if self.log.is_open(channel) and any(k[0] == channel and self._in_use(i) for k, i in self._images.items()):
            return Image(self.log.attached[channel].state, digest, self.limits, self.ctx.now)
        self._take_snapshot(())  # of all channels: whoever asks next is offered the same
        return self._images[channel, digest]

    def receive_fetch(self, sender: Voter, m: Fetch) -> None:
        """Serve results of entries that I have applied."""
        if sender in self._followers:
            self._followers[sender] = m.head, self.ctx.now
        wanted = set(m.hashes)
        for past in self.log.past:
            if past.entry.parent != m.head:
                continue
            for digest, result in zip(past.hashes, past.results, strict=True):
                if digest in wanted:
                    self.exchange.outbox.serve(sender.peer, result)
