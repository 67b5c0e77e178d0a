"""What a peer gives to those who are behind, without ever stopping for it.

Entries that follow the asker's head, with their results while these are kept; else an offer of a snapshot. Images of
channel states are exported once per digest, and dropped when nobody asked for them for `IMAGE_KEEP_S`.
"""

from __future__ import annotations

from dataclasses import dataclass

from blake3 import blake3

from dlc.comm.context import Context
from dlc.comm.entries import EMPTY
from dlc.comm.exchange import Exchange
from dlc.comm.ids import Voter
from dlc.comm.log import Log
from dlc.comm.messages import Fetch, ImageOffer, NoOffer, NoPiece, Offer, Piece, PieceReq, Step, Steps, SyncReq

PIECE_BYTES = 1 << 20
PIECES_IN_FLIGHT = 8
"""Per donor and newcomer: bounds what is asked for at once, and what one request makes a donor queue."""
IMAGE_KEEP_S = 60.0
IMAGES_MAX = 3
"""Per channel; newcomers at different heads need different images, each of the size of the whole state."""
CHAIN_SENT_MAX = 4096
"""Newest entry hashes sent with an offer: 128 KiB, enough to find any recent fork."""


@dataclass
class Image:
    """An exported image that others may fetch."""

    data: memoryview
    last_asked: float


class Donations:
    def __init__(self, ctx: Context, log: Log, exchange: Exchange) -> None:
        self.ctx, self.log, self.exchange = ctx, log, exchange
        self._images: dict[tuple[str, bytes], Image] = {}

    def keep(self, channel: str) -> None:
        """Set the present first state aside before another replaces it: I accepted it, so it may have been decided."""
        image = Image(self.log.attached[channel].state.export(), self.ctx.now)
        self._images[(channel, self.log.attached[channel].digest)] = image

    def kept(self, channel: str, digest: bytes) -> memoryview | None:
        """A first state that was set aside here."""
        image = self._images.get((channel, digest))
        return image.data if image is not None else None

    def tick(self) -> None:
        now = self.ctx.now
        over = [k for k, image in self._images.items() if now - image.last_asked > IMAGE_KEEP_S]
        for key in over:
            if self.log.is_open(key[0]):  # the choice of a first state may still need an old one
                del self._images[key]

    def receive_request(self, sender: Voter, m: SyncReq) -> None:
        past = None if m.snapshot else self.log.after(m.head)
        if past:
            steps = tuple(Step(p.entry, p.hashes) for p in past)
            self.ctx.send(sender, Steps(m.head, steps))
            return
        if self.log.head == EMPTY or not self.log.synced or (past is not None and not m.snapshot):
            self.ctx.send(sender, NoOffer(self.log.head))
            return
        wanted = set(m.first_states)
        images = tuple(self._offer_image(c, wanted) for c in self.log.attached if self.log.servable(c))
        chain = tuple(self.log.chain)[-CHAIN_SENT_MAX:]
        totals = tuple(self.log.totals)[-CHAIN_SENT_MAX:]
        self.ctx.send(sender, Offer(self.log.state, chain, totals, images))

    def _offer_image(self, channel: str, wanted: set[bytes]) -> ImageOffer:
        digest = self.log.servable(channel)
        if not self.log.is_open(channel):
            digest = next((d for c, d in self._images if c == channel and d in wanted), digest)
        data = self._image(channel, digest)
        assert data is not None
        hashes = tuple(blake3(data[i : i + PIECE_BYTES]).digest() for i in range(0, len(data), PIECE_BYTES))
        return ImageOffer(channel, digest, len(data), PIECE_BYTES, hashes)

    def _image(self, channel: str, digest: bytes) -> memoryview | None:
        """The exported image with this digest, kept from before or exported now."""
        kept = self._images.get((channel, digest))
        if kept is None:
            if not digest or self.log.servable(channel) != digest:
                return None
            others = [key for key in self._images if key[0] == channel]
            if len(others) >= IMAGES_MAX:
                del self._images[min(others, key=lambda key: self._images[key].last_asked)]
            kept = Image(self.log.attached[channel].state.export(), self.ctx.now)
            self._images[(channel, digest)] = kept
        kept.last_asked = self.ctx.now
        return kept.data

    def receive_piece_request(self, sender: Voter, m: PieceReq) -> None:
        data = self._image(m.channel, m.digest)
        if data is None:
            self.ctx.send(sender, NoPiece(m.channel, m.digest))
            return
        for piece in m.pieces[:PIECES_IN_FLIGHT]:
            start = piece * PIECE_BYTES
            if 0 <= start < len(data):
                payload = bytes(data[start : start + PIECE_BYTES])
                self.exchange.serve(sender.peer, Piece(m.channel, m.digest, piece, payload))

    def receive_fetch(self, sender: Voter, m: Fetch) -> None:
        """Serve results of entries that I have applied."""
        wanted = set(m.hashes)
        for past in self.log.past:
            if past.entry.parent != m.head:
                continue
            for digest, result in zip(past.hashes, past.results, strict=True):
                if digest in wanted:
                    self.exchange.serve(sender.peer, result)
