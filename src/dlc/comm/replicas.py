"""The standby's side of a span: it fetches the owner's image once, then applies the owner's updates in their order.

What an owner sends is taken only under the view that I know, or a greater one; an owner of an older view is told who
owns the span now. A replica belongs to one owner for as long as that one owned the span without a break.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from dlc.comm.codecs import Payload
from dlc.comm.followers import DIGEST_EVERY, IMAGE_PART_BYTES
from dlc.comm.ids import Voter
from dlc.comm.seats import Host, Replica, Seat
from dlc.comm.servermessages import (
    Established,
    ImageOffer,
    SpanView,
    UpdateOffer,
    UpdateTaken,
    check_numbers,
    check_update,
)
from dlc.comm.spanstate import SpanState
from dlc.errors import ProtocolError

AHEAD_MAX = 64
"""Updates that a replica keeps until those before them are here."""
HEAD_BYTES_MAX = 4 << 20
"""Of an image, beside its vectors."""
VECTORS_MAX = 8


class Replicas:
    def __init__(self, host: Host) -> None:
        self.host = host

    def _heeds(self, sender: Voter, view: SpanView) -> Seat | None:
        """My seat, if the sender is the owner as far as I know; an older one is told who is."""
        self.host.learn(view)
        known = self.host.witness.established.get(view.span)
        if known is not None and known != view:
            self.host.send(sender, Established(known))
            return None
        return self.host.seats.get(view.span) if view.owner == sender else None

    def image_offered(self, sender: Voter, m: ImageOffer) -> None:
        check_numbers(m.version)
        seat = self._heeds(sender, m.view)
        if seat is None or self.host.spans is None:
            return
        replica = seat.replica
        if replica is not None and self._has_it(sender, replica, m):
            if (replica.source, replica.era) != (sender, m.era):  # what came ahead, or is to come, is of another era
                seat.replica = Replica(sender, m.era, replica.state)
            self._say_taken(sender, m.view, replica.state)
            return
        if not 0 < m.n_bytes <= 4 * self.host.spans.grid.numel * VECTORS_MAX + HEAD_BYTES_MAX:
            raise ProtocolError(f"an image of {m.n_bytes} bytes")
        if seat.image is not None and seat.image != (sender, m.key):
            self.host.fetches.cancel(*seat.image)
        seat.image = sender, m.key
        self.host.fetches.fetch(sender, m.key, _cuts(m.n_bytes), partial(self._image_fetched, sender, m), self.host.now)

    @staticmethod
    def _has_it(sender: Voter, replica: Replica, m: ImageOffer) -> bool:
        """What the image would bring is here already."""
        if (replica.source, replica.era) == (sender, m.era):
            return replica.state.version >= m.version
        return replica.state.version == m.version and replica.state.digest() == m.digest

    def _image_fetched(self, sender: Voter, m: ImageOffer, parts: list[Payload] | None) -> None:
        view = self.host.witness.established.get(m.view.span)
        if parts is None or self.host.spans is None or view is None or view.owner != sender:
            return
        state = SpanState.restored(self.host.spans, m.view.span, self.host.optimizer, b"".join(parts))
        if state.version != m.version or state.digest() != m.digest:
            raise ProtocolError(f"the image of span {m.view.span} from {sender} is not what it named")
        seat = self.host.seats[m.view.span]
        kept = seat.replica
        if kept is None or (kept.source, kept.era) != (sender, m.era) or kept.state.version < m.version:
            kept = seat.replica = Replica(sender, m.era, state)
        self._say_taken(sender, view, kept.state)  # updates may have come further than the image

    def update_offered(self, sender: Voter, m: UpdateOffer) -> None:
        check_update(m.update)
        seat = self._heeds(sender, m.view)
        if seat is None or self.host.spans is None:
            return
        replica = seat.replica
        if replica is None or (replica.source, replica.era) != (sender, m.era):
            self.host.send(sender, UpdateTaken(m.view.span, m.view.term, -1, b""))
            return
        if m.update.version <= replica.state.version:
            self._say_taken(sender, m.view, replica.state)
            return
        allowed = self.host.spans.wire_sizes(m.view.span)
        if len(m.sizes) != len(allowed) or any(s not in (0, a) for s, a in zip(m.sizes, allowed, strict=True)):
            raise ProtocolError(f"update {m.update.version} of span {m.view.span} with parts of another length")
        if m.update.version in replica.ahead or m.update.version > replica.state.version + AHEAD_MAX:
            return
        before = replica.asked.get(m.update.version, m.key)
        if before != m.key:
            self.host.fetches.cancel(sender, before)
        replica.asked[m.update.version] = m.key
        self.host.fetches.fetch(sender, m.key, m.sizes, partial(self._update_fetched, sender, m), self.host.now)

    def _update_fetched(self, sender: Voter, m: UpdateOffer, parts: list[Payload] | None) -> None:
        view = self.host.witness.established.get(m.view.span)
        if parts is None or view is None or view.owner != sender:
            return
        replica = self.host.seats[m.view.span].replica
        if replica is None or (replica.source, replica.era) != (sender, m.era):
            return
        state = replica.state
        replica.asked.pop(m.update.version, None)
        if not self._finite(m.view.span, parts):
            raise ProtocolError(f"update {m.update.version} of span {m.view.span} from {sender} is not finite")
        if m.update.version > state.version:  # else an image has brought it meanwhile
            replica.ahead[m.update.version] = (m.update, parts)
        while state.version + 1 in replica.ahead:
            state.apply(*replica.ahead.pop(state.version + 1))
        self._say_taken(sender, view, state)

    def _finite(self, span: int, parts: Sequence[Payload]) -> bool:
        spans = self.host.spans
        assert spans is not None
        chunks, coder = spans.chunks(span), spans.grid.coder
        return all(not len(p) or coder.finite(p, spans.grid.elems(c)) for c, p in zip(chunks, parts, strict=True))

    def _say_taken(self, to: Voter, view: SpanView, state: SpanState) -> None:
        digest = state.digest() if state.version % DIGEST_EVERY == 0 else b""
        self.host.send(to, UpdateTaken(view.span, view.term, state.version, digest))


def _cuts(n_bytes: int) -> Sequence[int]:
    """Lengths of the parts of an image."""
    whole, rest = divmod(n_bytes, IMAGE_PART_BYTES)
    return [IMAGE_PART_BYTES] * whole + ([rest] if rest else [])
