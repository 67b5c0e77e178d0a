"""Catching up: the one rule for whoever is behind, forked or new (docs/protocol.md, "Behind, forked, new").

Whoever learns of an alive peer with a greater history asks it what follows its own head:

  IDLE --greater history alive--> ASKED --Steps--> REPLAY (fetch results by hash, apply entry by entry) --> IDLE
                                        --Offer--> IMAGES (fetch pieces, verify, switch at once)        --> ASKED
  any --the donor dies or falls silent--> IDLE (another is taken; my own state was not touched)

Pieces are asked of every alive peer that stands at the offered head, because equal heads have equal images. The other
side of this conversation is `donations.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from blake3 import blake3

from dlc.comm.context import Context
from dlc.comm.donations import PIECE_BYTES, PIECES_IN_FLIGHT, Donations
from dlc.comm.entries import EMPTY, ROUND, Entry, manifest_hash
from dlc.comm.events import ChannelSynced, HistoryLost
from dlc.comm.exchange import Exchange, result_hash
from dlc.comm.ids import LOWEST, Voter
from dlc.comm.log import Attached, Log
from dlc.comm.messages import (
    Fetch,
    ImageOffer,
    NoOffer,
    NoPiece,
    Offer,
    Piece,
    PieceReq,
    Result,
    Step,
    Steps,
    SyncReq,
)
from dlc.comm.permit import alive_records, greater_alive, key_of
from dlc.comm.shapes import plausible_entry, plausible_results
from dlc.errors import CheckpointError

STEPS_IN_FLIGHT = 2
"""Entries whose results are asked for at once: hides the round trips, bounds the memory."""
ASK_AGAIN_S = 1.0
IMAGE_BYTES_MAX = 1 << 38


@dataclass
class Download:
    """Images of one offer on their way."""

    offer: Offer
    buffers: dict[str, bytearray]
    missing: dict[tuple[str, int], bytes]
    """(channel, piece) -> expected hash."""
    asked: dict[tuple[str, int], tuple[Voter, float]] = field(default_factory=dict)
    refused: set[Voter] = field(default_factory=set)


class Sync:
    def __init__(
        self,
        ctx: Context,
        log: Log,
        exchange: Exchange,
        apply: Callable[[Entry, tuple[bytes, ...], tuple[Result, ...]], None],
        switched: Callable[[], None],
        accepted_first: Callable[[], bytes],
    ) -> None:
        self.ctx, self.log, self.exchange = ctx, log, exchange
        self.apply, self.switched = apply, switched
        """Apply the next entry; told after a snapshot was installed."""
        self.accepted_first = accepted_first
        """Digest of the first state that I accepted in this slot, if it is an opening."""
        self.donor: Voter | None = None
        self.first_states: dict[str, bytes] = {}
        """Channels about to be opened with another first state than mine: the digest to fetch."""
        self._steps: list[Step] = []
        self._results: dict[bytes, Result] = {}
        self._download: Download | None = None
        self.donations = Donations(ctx, log, exchange)
        self._asked_at = -1e9
        self._heard_at = 0.0

    @property
    def busy(self) -> bool:
        return bool(self._steps) or self._download is not None

    # ---------------------------------------------------------------- asking

    def tick(self) -> None:
        now = self.ctx.now
        self.donations.tick()
        if self.donor is not None and not self._donor_fit():
            self._abandon()
        if self.busy and now >= self._asked_at + ASK_AGAIN_S:
            self._ask_pieces()
            self._ask_results()
            return
        if not self.busy and now >= self._asked_at + ASK_AGAIN_S:
            self.start()

    def _donor_fit(self) -> bool:
        assert self.donor is not None
        patience = max(4 * ASK_AGAIN_S, 2 * self.ctx.members.t_dead_s)
        return self.ctx.members.alive(self.donor) and self.ctx.now - self._heard_at < patience

    def next_deadline(self) -> float | None:
        if not self.busy and not self.wanted():
            return None
        # Where nobody can be asked the time of the last question is long past: look again, but do not spin.
        return max(self._asked_at + ASK_AGAIN_S, self.ctx.now + ASK_AGAIN_S / 4)

    def wanted(self) -> bool:
        return bool(self._unsynced()) or bool(greater_alive(self.ctx, self.log))

    def _unsynced(self) -> list[str]:
        """Channels whose state must come as an image although the log may be up to date."""
        attached = self.log.attached
        self.first_states = {
            c: d for c, d in self.first_states.items() if not self.log.is_open(c) and attached[c].digest != d
        }
        return [c for c, a in attached.items() if c in self.first_states or (not a.synced and self.log.is_open(c))]

    def fetch_first_state(self, donor: Voter, channel: str, digest: bytes) -> None:
        """A plan opens this channel with another first state than mine: take the coordinator's before voting."""
        kept = self.donations.kept(channel, digest)
        if kept is not None:
            self._replace(self.log.attached[channel], channel, kept)
            return
        known = self.first_states.get(channel) == digest
        self.first_states[channel] = digest
        # The coordinator may lack it too, if it proposes what others accepted: then everybody is asked in turn.
        self.start(hint=None if known else donor)

    def start(self, hint: Voter | None = None) -> None:
        """Ask the peer with the greatest history for what I lack; `hint`: one known to have it."""
        if self.busy or self._awaiting() or not (self.wanted() or hint):
            return
        ahead = [r.voter for r in greater_alive(self.ctx, self.log)]
        image = bool(self._unsynced())
        if not ahead and image:
            at_my_head = [r for r in alive_records(self.ctx) if key_of(r) == self.log.state.key and r.synced]
            ahead = [r.voter for r in at_my_head]
        if hint is not None and hint != self.ctx.me:
            ahead.insert(0, hint)
        if not ahead:
            return
        # Turn by turn among the best few, so that one silent donor is not asked for ever.
        best = ahead if self.first_states else ahead[:3]
        self.donor = best[int(self.ctx.now / ASK_AGAIN_S) % len(best)] if hint is None else ahead[0]
        self._asked_at = self._heard_at = self.ctx.now
        state = self.log.state
        wanted = tuple(self.first_states.values())
        self.ctx.send(self.donor, SyncReq(state.head, state.depth, image or state.head == EMPTY, wanted))

    def _awaiting(self) -> bool:
        """Somebody was asked just now: the answer is on the way, or it was of no use."""
        return self.ctx.now - self._asked_at < ASK_AGAIN_S

    def _abandon(self) -> None:
        self.donor, self._steps, self._results, self._download = None, [], {}, None

    # ---------------------------------------------------------------- replay

    def receive_steps(self, sender: Voter, m: Steps) -> None:
        if sender != self.donor or m.after != self.log.head or self.busy or not m.steps:
            return
        self._heard_at = self.ctx.now
        self._steps = list(m.steps)
        self._results = {}
        self._ask_results()
        self._replay()

    def _ask_results(self, which: slice = slice(0, STEPS_IN_FLIGHT)) -> None:
        if not self._steps or self.donor is None:
            return
        self._asked_at = self.ctx.now
        held = set(self.exchange.hashes.values())
        for step in self._steps[which]:
            lacking = tuple(h for h in step.hashes if h not in self._results and h not in held)
            if lacking:
                self.ctx.send(self.donor, Fetch(step.entry.parent, LOWEST, (), lacking))

    def receive_result(self, result: Result) -> bool:
        """Take a result that the replay waits for."""
        if not self._steps:
            return False
        digest = result_hash(result)
        if not any(digest in step.hashes for step in self._steps[:STEPS_IN_FLIGHT]):
            return False
        self._heard_at = self.ctx.now
        self._results[digest] = result
        self._replay()
        return True

    def _replay(self) -> None:
        """Apply as many steps as are complete."""
        while self._steps:
            step = self._steps[0]
            if step.entry.parent != self.log.head or not _consistent(step):
                self._abandon()
                return
            in_hand = {self.exchange.hashes[c]: r for c, r in self.exchange.held.items()} | self._results
            if any(h not in in_hand for h in step.hashes):
                return
            results = tuple(in_hand[h] for h in step.hashes)
            if not plausible_entry(step.entry, self.log.state) or not plausible_results(step.entry, results):
                self._abandon()
                return
            rest = self._steps[1:]
            self._results = {h: r for h, r in self._results.items() if h not in step.hashes}
            self.apply(step.entry, step.hashes, results)
            self._steps = rest
            self._ask_results(slice(STEPS_IN_FLIGHT - 1, STEPS_IN_FLIGHT))
        self.donor = None
        self._asked_at = -1e9

    # ---------------------------------------------------------------- images

    def receive_offer(self, sender: Voter, m: Offer) -> None:
        if sender != self.donor or self.busy:
            return
        fork = not self._is_ancestor(m)
        if m.state.key < self.log.state.key or (m.state.key == self.log.state.key and not self._unsynced()):
            self.donor = None
            return
        if fork and m.state.key <= self.log.state.key:
            self.donor = None
            return
        offered = {i.channel: i.digest for i in m.images}
        if m.state.key == self.log.state.key and any(offered.get(c) != d for c, d in self.first_states.items()):
            self.donor = None
            return
        wanted = [i for i in m.images if i.channel in self.log.attached and self._needs(i)]
        if len(m.totals) != len(m.chain) or any(not _plausible(i, self.log.attached[i.channel]) for i in wanted):
            self._abandon()
            return
        self._heard_at = self.ctx.now
        buffers = {i.channel: bytearray(i.image_bytes) for i in wanted}
        missing = {(i.channel, p): h for i in wanted for p, h in enumerate(i.piece_hashes)}
        self._download = Download(m, buffers, missing)
        self._ask_pieces()
        self._finish_if_complete()

    def _is_ancestor(self, m: Offer) -> bool:
        return self.log.head == EMPTY or self.log.head in m.chain

    def _needs(self, image: ImageOffer) -> bool:
        attached = self.log.attached[image.channel]
        return attached.digest != image.digest

    def _ask_pieces(self) -> None:
        """Keep a few pieces in flight with every peer that holds this image."""
        down = self._download
        if down is None or self.donor is None:
            return
        now = self.ctx.now
        self._asked_at = now
        head = down.offer.state.head
        donors = [r.voter for r in alive_records(self.ctx) if r.head == head and r.voter not in down.refused]
        if self.donor not in donors and self.donor not in down.refused:
            donors.append(self.donor)
        if not donors:
            self._abandon()
            return
        patience = max(4 * ASK_AGAIN_S, 2 * self.ctx.members.t_dead_s)
        load = dict.fromkeys(donors, 0)
        for key, (voter, at) in list(down.asked.items()):
            if voter not in load or now - at > patience:
                del down.asked[key]
            else:
                load[voter] += 1
        wanted: dict[Voter, dict[str, list[int]]] = {}
        for key in down.missing:
            if key in down.asked:
                continue
            voter = min(donors, key=lambda v: (load[v], v))
            if load[voter] >= PIECES_IN_FLIGHT:
                break
            load[voter] += 1
            down.asked[key] = (voter, now)
            wanted.setdefault(voter, {}).setdefault(key[0], []).append(key[1])
        digests = {i.channel: i.digest for i in down.offer.images}
        for voter, by_channel in wanted.items():
            for channel, pieces in by_channel.items():
                self.ctx.send(voter, PieceReq(channel, digests[channel], tuple(pieces)))

    def receive_piece(self, sender: Voter, m: Piece) -> None:
        down = self._download
        if down is None:
            return
        key = (m.channel, m.piece)
        expected = down.missing.get(key)
        if expected is None or blake3(m.payload).digest() != expected:
            return
        start = m.piece * PIECE_BYTES
        down.buffers[m.channel][start : start + len(m.payload)] = m.payload
        del down.missing[key]
        down.asked.pop(key, None)
        self._heard_at = self.ctx.now
        if not down.missing or len(down.asked) <= PIECES_IN_FLIGHT // 2:
            self._ask_pieces()
        self._finish_if_complete()

    def receive_no_piece(self, sender: Voter, m: NoPiece) -> None:
        down = self._download
        if down is None:
            return
        down.refused.add(sender)
        down.asked = {k: v for k, v in down.asked.items() if v[0] != sender}
        if sender == self.donor:
            self._abandon()
        else:
            self._ask_pieces()

    def _finish_if_complete(self) -> None:
        """All pieces verified: switch to the offered state at once, or change nothing."""
        down = self._download
        if down is None or down.missing:
            return
        offer = down.offer
        self._download = None
        self.donor = None
        self._asked_at = -1e9
        # The log may have gone on meanwhile: then what is kept of it is applied to the image. None: too far.
        ahead = offer.state.key < self.log.state.key
        later = self.log.after(offer.state.head) if ahead else []
        if later is None:
            return
        was = {channel: self.log.state.base(channel) for channel in self.log.attached}
        restored: list[Attached] = []
        for image in offer.images:
            attached = self.log.attached.get(image.channel)
            if attached is None or (ahead and attached.synced):
                continue
            if attached.digest != image.digest:
                buffer = down.buffers.get(image.channel)
                try:
                    if buffer is None:  # my state moved since the offer came
                        raise CheckpointError("a channel's image was not asked for")
                    self._replace(attached, image.channel, memoryview(buffer).toreadonly())
                except CheckpointError:
                    for other in restored:
                        other.synced = False
                    return
                restored.append(attached)
            attached.synced = attached.digest == image.digest and self._opened(offer, image.channel)
            self.log.follow(image.channel, later)
        if not ahead and offer.state.head != self.log.head:
            self._report_loss(offer)
            self.log.install(offer.state, offer.chain, offer.totals)
            offered = {i.channel for i in offer.images}
            for channel, attached in self.log.attached.items():
                if channel not in offered and self.log.state.base(channel) != was[channel]:
                    attached.synced = False  # the donor does not hold it
            self.switched()
        for image in offer.images:
            if image.channel in self.log.attached and self.log.attached[image.channel].synced:
                self.ctx.notify(ChannelSynced(image.channel, self.log.state.round_of(image.channel)))

    def _replace(self, attached: Attached, channel: str, image: memoryview) -> None:
        """Another state takes the place of mine; one that I accepted in this slot is set aside first."""
        if attached.digest == self.accepted_first():
            self.donations.keep(channel)
        attached.state.restore(image)
        attached.digest = attached.state.digest()

    def _opened(self, offer: Offer, channel: str) -> bool:
        known = offer.state.channel(channel)
        return known is not None and known.opened

    def _report_loss(self, offer: Offer) -> None:
        # A chain that does not reach back to my depth says nothing of where I stand to it.
        reaches = self.log.state.depth > offer.state.depth - len(offer.chain)
        if self.log.active and reaches and not self._is_ancestor(offer):
            self.ctx.notify(HistoryLost(*self.log.beyond(offer.chain)))

    def receive_no_offer(self, sender: Voter, m: NoOffer) -> None:
        if sender == self.donor and not self.busy:
            self.donor = None


def _consistent(step: Step) -> bool:
    if step.entry.kind != ROUND:
        return not step.hashes
    return manifest_hash(step.hashes) == step.entry.manifest


def _plausible(image: ImageOffer, attached: Attached) -> bool:
    pieces = -(-image.image_bytes // PIECE_BYTES) if image.image_bytes > 0 else -1
    return (
        image.piece_bytes == PIECE_BYTES
        and 0 < image.image_bytes <= IMAGE_BYTES_MAX
        and image.image_bytes == attached.state.image_bytes()
        and len(image.piece_hashes) == pieces
    )
