"""Which link leads to which peer, and bulk on its way onto it.

    machine ── control ──> send ──────────────> control link of the peer's record
       └────── next_bulk <── pump, while a link has room: nothing waits in queues but a few chunks that its link did
                              not take (`_stash`)

All of it happens on the driver's thread, which says when. A link to where a peer no longer is gets closed, and the
machine hears of each bulk connection that has ended: what was on its way there goes once more.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Mapping
from typing import Protocol

from dlc.comm.addresses import on_this_host
from dlc.comm.framing import Frame, encode
from dlc.comm.ids import PeerId, Voter
from dlc.comm.messages import Bulk, Contrib, Message, Piece, Record
from dlc.comm.tcp import WaySample
from dlc.comm.transport import Transport

log = logging.getLogger(__name__)

BULK_BURST = 4
"""Chunks handed to one link before control messages are looked at again."""
SAMPLE_S = 0.1
"""How often the kernel is asked about bulk links, while bulk moves."""
SAMPLE_TAIL_S = 1.0
"""And for how long after the last bulk message: what was handed to it then is still on its way."""
WARM_S = 1.0
"""How often it is seen to that bulk links to those who will need them are open."""
UNENTERED_MAX = 20
"""Looks, one each WARM_S, after which a port by which nobody has come is said to be closed: links take 3 s at most."""
BARRED_S = 10.0
"""Who lives, and takes no bulk connection for so long, has its port closed: twice as long as an attempt takes."""
RECENT_BULK_MAX = 8
"""Bulk messages whose frames are kept for the other recipients: a few chunks of memory."""


class BulkSource(Protocol):
    """The bulk side of a machine that has one."""

    def pending_bulk(self) -> set[PeerId]: ...
    def next_bulk(self, peer: PeerId) -> Bulk | None: ...
    def record_of(self, peer: PeerId) -> Record | None: ...
    def bulk_broken(self, peer: PeerId) -> None: ...
    def bulk_peers(self) -> set[PeerId]: ...
    def link_samples(self, samples: Mapping[PeerId, WaySample], now: float) -> None: ...
    def links_widened(self) -> None: ...

    @property
    def awaits_bulk(self) -> bool: ...


class Dispatch:
    def __init__(self, transport: Transport, me: Voter) -> None:
        self.transport, self.me = transport, me
        self.tag = bytes(8)
        """Of the run, in each envelope."""
        self.bulk: BulkSource | None = None
        self.bulk_at = float("-inf")
        """When bulk last waited, or came in."""
        self._stash: dict[PeerId, list[Frame]] = {}
        """Taken from the machine, and its link had no room."""
        self._addresses: dict[str, PeerId] = {}
        self._dials: dict[PeerId, str] = {}
        self._bulk_to: dict[PeerId, str] = {}
        """Where bulk for a peer went last."""
        self._recent: collections.deque[tuple[Bulk, list[Frame]]] = collections.deque(maxlen=RECENT_BULK_MAX)
        self._sample_at = self._warm_at = 0.0
        self._barred: dict[str, tuple[float, bool]] = {}
        """Bulk addresses of the living to which no link comes up: since when that is seen, and whether it was told."""
        self._awaited_in_vain = 0
        """How often nobody had come in by the bulk port, though somebody was to."""

    def frames(self, message: Message) -> list[Frame]:
        return encode(self.me, self.tag, message)

    # ---------------------------------------------------------------- who is where

    def peer_at(self, address: str) -> PeerId | None:
        return self._addresses.get(address)

    def send(self, to: PeerId, message: Message) -> None:
        """A control message, to where that peer's record says."""
        record = self._record_of(to)
        if record is None or not record.control:
            return
        address = record.control[0]
        if self._dials.get(to) != address:
            self.forget(to)
            self._dials[to], self._addresses[address] = address, to
        self._addresses.setdefault(address, to)  # where another peer had it, and was forgotten
        self.transport.send_control(address, self.frames(message))

    def forget(self, peer: PeerId) -> None:
        """Close the links to a peer that left, moved, or was dead for so long that it is forgotten."""
        for address in [a for a, p in self._addresses.items() if p == peer]:
            del self._addresses[address]
            self.transport.forget(address)
        self._dials.pop(peer, None)
        if self._bulk_to.pop(peer, None) is not None:
            self.broken(peer)

    def broken(self, peer: PeerId | None) -> None:
        """A bulk connection to it has ended."""
        if peer is not None and self.bulk is not None:
            self.bulk.bulk_broken(peer)

    def _record_of(self, peer: PeerId) -> Record | None:
        return self.bulk.record_of(peer) if self.bulk is not None else None

    def _bulk_address(self, peer: PeerId) -> str | None:
        """Where bulk for it goes. The link to where that went before is closed: one that is up would be kept for ever,
        and what the kernel says of it be taken for what it says of the new one."""
        record = self._record_of(peer)
        if record is None or not record.bulk:
            return None
        address = record.bulk[0]
        before = self._bulk_to.get(peer, address)
        if before not in (address, self._dials.get(peer)) and self._addresses.get(before) == peer:
            del self._addresses[before]
            self.transport.forget(before)
            self.broken(peer)
        self._bulk_to[peer], self._addresses[address] = address, peer
        return address

    # ---------------------------------------------------------------- onto the links

    def want_write(self) -> list[str]:
        """Bulk addresses of the peers that something waits for."""
        if self.bulk is None:
            return []
        wanted = []
        for peer in self.bulk.pending_bulk() | self._stash.keys():
            address = self._bulk_address(peer)
            if address is not None:
                wanted.append(address)
            else:
                self._stash.pop(peer, None)
        return wanted

    def pump(self, address: str) -> None:
        """Hand a few chunks to a link that has room."""
        peer, bulk = self._addresses.get(address), self.bulk
        if peer is None or bulk is None:
            return
        for _ in range(BULK_BURST):
            frames = self._stash.pop(peer, None)
            if frames is None:
                message = bulk.next_bulk(peer)
                if message is None:
                    return
                frames = self._bulk_frames(message)
            if not self.transport.send_bulk(address, frames):
                self._stash[peer] = frames
                return

    def _bulk_frames(self, message: Bulk) -> list[Frame]:
        """The same result goes to every peer: its header is encoded once. A part or a piece goes to one alone, and
        would keep all the memory that it is a view of."""
        if isinstance(message, Contrib | Piece):
            return self.frames(message)
        for known, frames in self._recent:
            if known is message:
                return frames
        frames = self.frames(message)
        self._recent.append((message, frames))
        return frames

    def pace(self, peer: PeerId, rate_Bps: float | None) -> None:
        """Bulk within a host is not paced."""
        record = self._record_of(peer)
        if record is not None and record.bulk and not on_this_host(record.bulk[0]):
            self.transport.pace(record.bulk[0], rate_Bps, control=record.control[0] if record.control else "")

    # ---------------------------------------------------------------- the links themselves

    def moves(self, now: float) -> bool:
        """Bulk waits, comes in, or did until just now."""
        return now < self.bulk_at + SAMPLE_TAIL_S

    def sample_in_s(self, now: float) -> float:
        """Seconds until the kernel is to be asked again, while bulk moves."""
        return max(0.0, self._sample_at - now)

    def sample(self, now: float) -> None:
        """Tell the machine what the kernel says of the bulk links, while bulk moves."""
        if self.bulk is None or now < self._sample_at or not self.moves(now):
            return
        self._sample_at = now + SAMPLE_S
        samples = {}
        for address, peer in self._addresses.items():
            sample = self.transport.way_sample(address)
            if sample is not None:
                samples[peer] = sample
        self.bulk.link_samples(samples, now)

    def warm(self, now: float) -> None:
        """Open links before they are needed: a chunk would wait for the handshakes of TCP and CURVE."""
        if self.bulk is None or now < self._warm_at:
            return
        self._warm_at = now + WARM_S
        for peer in {*self._dials, *self._addresses.values()}:
            if self.bulk.record_of(peer) is None:
                self.forget(peer)
        before, self._barred = self._barred, {}
        for peer in self.bulk.bulk_peers():
            address = self._bulk_address(peer)
            if address is not None:
                self.transport.open_bulk(address)
                if why := self.transport.barred(address):
                    since, told = before.get(address, (now, False))
                    self._barred[address] = since, told or _tell_barred(peer, address, why, now - since)
        if self.bulk.awaits_bulk and not self.transport.bulk_entered:
            self._awaited_in_vain += 1
            if self._awaited_in_vain == UNENTERED_MAX:
                log.warning(
                    "nobody has come in by TCP port %d of this host: does a firewall, or a router, let it in? What the "
                    "others have for this peer, states and results, comes that way",
                    self.transport.bulk_port,
                )
        self.transport.revive_bulk()
        if not self.moves(now) and self.transport.mend_bulk():
            self.bulk.links_widened()


def _tell_barred(peer: PeerId, address: str, why: str, for_s: float) -> bool:
    """Whether it was said who may have to open which port."""
    if for_s >= BARRED_S:
        log.warning(
            "%s answers pings, but takes no bulk connection from here (%s: %s): rounds go on without what would go "
            "there. Does a firewall let that TCP port in, on its host or on the way? (It is tried for ever)",
            peer[:8],
            address,
            why,
        )
    return for_s >= BARRED_S
