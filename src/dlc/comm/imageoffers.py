"""Which offers of images are taken, and what of them (docs/protocol.md, "Behind, forked, new").

An offer is a state of the log, with images of what its donor holds of the channels there. It is taken if it can be
true, as far as its form, its donor's record and the digests of the others tell, and

  its history is greater than mine ──────── and gives what I would lose by it, or nobody has shown me for T_evict
  it is of my history ───────────────────── and has a state that I lack
  it has a first state that I look for ──── as its channel is about to be opened

Of its images those are wanted that I lack. One that is of another kind than my state is of no use, nor any other of its
channel: that is believed of a digest that was verified, and of a size, which nothing proves, once two donors say it.
"""

from __future__ import annotations

from collections.abc import Sequence

from dlc.comm.context import Context
from dlc.comm.entries import OPEN, LogState
from dlc.comm.events import BadImage, StateMisfit
from dlc.comm.ids import Voter
from dlc.comm.images import PieceLimits
from dlc.comm.log import Log
from dlc.comm.messages import ImageOffer, Offer
from dlc.comm.permit import alive_records
from dlc.comm.records import key_of, told_digest
from dlc.comm.shapes import plausible_state

IMAGE_BYTES_MAX = 1 << 38
BAD_IMAGES_MAX = 64
"""Images remembered as bad; more of them than this are tried again."""


class ImageOffers:
    def __init__(self, ctx: Context, log: Log, limits: PieceLimits) -> None:
        self.ctx, self.log, self.limits = ctx, log, limits
        self.first_states: dict[str, bytes] = {}
        """Channels about to be opened with another first state than mine: the digest to fetch."""
        self.bad: set[tuple[Voter, bytes]] = set()
        """(donor, digest that it named): what came was another state."""
        self._told_size: dict[str, tuple[Voter, int]] = {}
        """By channel: who offered an image of another size than mine, and the size."""
        self._kept_back: tuple[bytes | None, float] = (None, 0.0)
        """Where my history parts from one of which I was offered less than I hold, and the running time at which I was
        first. That is my head where I may follow; on a fork it stays, though I go on with rounds of my own."""

    def unsynced(self) -> list[str]:
        """Channels whose state must come as an image although the log may be up to date."""
        attached = {c: a for c, a in self.log.attached.items() if not a.misfit}
        if self.first_states:
            self.first_states = {
                c: d
                for c, d in self.first_states.items()
                if c in attached and not self.log.is_open(c) and attached[c].digest != d
            }
        return [c for c, a in attached.items() if c in self.first_states or (not a.synced and self.log.is_open(c))]

    # ---------------------------------------------------------------- offers

    def wanted(self, donor: Voter, m: Offer) -> list[ImageOffer] | None:
        """What to fetch of an offer; None: it is not to be taken."""
        images = [i for i in m.images if self.needs(m, i)]
        plausible = plausible_state(m) and self.as_told(donor, m.state)
        plausible = plausible and len({i.channel for i in m.images}) == len(m.images)
        plausible = plausible and all(_plausible(i, self.limits) for i in images)
        plausible = plausible and not any(self._outvoted(m.state.head, i) for i in images)
        plausible = plausible and not any((donor, i.digest) in self.bad for i in images)
        return images if plausible and self._of_use(m, images) else None

    def fit(self, donor: Voter, m: Offer, images: Sequence[ImageOffer]) -> bool:
        """Whether all of them have the size of mine; of those that have not it is remembered, or told."""
        misfits = [i for i in images if i.image_bytes != self.log.attached[i.channel].state.image_bytes()]
        for image in misfits:
            self._another_size(donor, image, m.state.head)
        return not misfits

    def as_told(self, donor: Voter, state: LogState) -> bool:
        """The donor's record, if it stands at the head of this state, says the same of it."""
        record = self.ctx.members.record(donor.peer)
        return record is None or record.head != state.head or key_of(record) == state.key

    def _of_use(self, m: Offer, wanted: Sequence[ImageOffer]) -> bool:
        """Its history is greater than mine, and it gives what I would lose by it; or the same where I lack a state that
        it has; or mine has gone on since I asked, by entries that I can apply to that state."""
        if m.state.key > self.log.state.key:
            return not self._would_lose(m)
        if self.log.after(m.state.head) is None:
            return False
        lacking = set(self.unsynced()) - self.first_states.keys()
        proven = (i for i in m.images if opened(m, i.channel) and self._is_mine(i))
        # What I lack of several channels may be with several peers.
        first = any(self.first_states.get(i.channel) == i.digest for i in m.images)
        return first or any(image.channel in lacking for image in (*wanted, *proven))

    def _would_lose(self, m: Offer) -> bool:
        """I hold a state, its channel had rounds since, and the donor does not have what these made of it: entry by
        entry I may come there yet, if not from this donor. For T_evict; then nobody is here who could show me, and what
        I hold is of a history that is given up, or of no use to anybody."""
        given = {i.channel for i in m.images}
        held = (c for c in self.log.attached if c not in given and self.log.holds(c))
        if all(m.state.base(c) == self.log.state.base(c) for c in held):
            return False
        parted, since = self._kept_back
        if parted != (now := self.log.parted_at(m.chain)):
            self._kept_back = now, self.ctx.running_s
            return True
        return self.ctx.running_s - since < self.ctx.members.t_evict_s

    def _outvoted(self, head: bytes, image: ImageOffer) -> bool:
        """Most of those who stand there hold another state: its donor does not know yet that its own differs."""
        told = [told_digest(r, head, image.channel) for r in self.ctx.members.records() if r.voter != self.ctx.me]
        return 2 * sum(d == image.digest for d in told if d) < sum(1 for d in told if d)

    # ---------------------------------------------------------------- images

    def needs(self, offer: Offer, image: ImageOffer) -> bool:
        """I lack this state. Of a channel that is not open yet only the first state that is about to open it: mine may
        be needed by others."""
        attached = self.log.attached.get(image.channel)
        if attached is None or attached.misfit or attached.digest == image.digest:
            return False
        if offer.state.key <= self.log.state.key and attached.synced and self.log.is_open(image.channel):
            return False  # one of us is wrong, which its digest shows in a round; others of its images may be of use
        first = self.first_states.get(image.channel) == image.digest
        return first or opened(offer, image.channel) or self._opened_since(offer, image)

    def _is_mine(self, image: ImageOffer) -> bool:
        attached = self.log.attached.get(image.channel)
        return attached is not None and attached.digest == image.digest

    def _opened_since(self, offer: Offer, image: ImageOffer) -> bool:
        """The entries that follow the offered head open its channel with it."""
        later = (past.entry for past in self.log.after(offer.state.head) or ())
        return any((e.kind, e.channel, e.digest) == (OPEN, image.channel, image.digest) for e in later)

    def remember_bad(self, donor: Voter, image: ImageOffer) -> None:
        """Its donor's memory, or its word, is wrong: the same offer is not taken from it again."""
        if len(self.bad) >= BAD_IMAGES_MAX:
            self.bad.clear()
        self.bad.add((donor, image.digest))
        self.ctx.notify(BadImage(donor, image.channel))

    def _another_size(self, donor: Voter, image: ImageOffer, head: bytes) -> None:
        """Nothing proves an image's size: it is believed when a second donor says the same, or where there is none."""
        channel, theirs = image.channel, image.image_bytes
        first = self._told_size.setdefault(channel, (donor, theirs))
        others = (r for r in alive_records(self.ctx) if r.voter not in (self.ctx.me, donor))
        if first[1] == theirs and (first[0] != donor or not any(told_digest(r, head, channel) for r in others)):
            mine = self.log.attached[channel].state.image_bytes()
            self.tell_misfit(channel, f"it has {theirs} bytes, the one here {mine}")
        else:
            self._told_size[channel] = (donor, theirs)

    def tell_misfit(self, channel: str, why: str) -> None:
        """All who are in step hold that kind of state, so no other donor or later image could help."""
        attached = self.log.attached[channel]
        attached.misfit, attached.synced = why, False
        self.ctx.record_due = True
        self.ctx.notify(StateMisfit(channel, why))


def opened(offer: Offer, channel: str) -> bool:
    """Whether the channel is open in the state that is offered."""
    known = offer.state.channel(channel)
    return known is not None and known.opened


def _plausible(image: ImageOffer, limits: PieceLimits) -> bool:
    size = limits.piece_bytes_of(image.image_bytes)
    pieces = -(-image.image_bytes // size) if image.image_bytes > 0 else -1
    return image.piece_bytes == size and 0 < image.image_bytes <= IMAGE_BYTES_MAX and len(image.piece_hashes) == pieces
