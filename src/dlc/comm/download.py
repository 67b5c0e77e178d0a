"""Images of one offer on their way from several donors at once, in proportion to what each of them can send.

Every donor has a window of pieces asked for and not arrived, worth half a second at its measured speed; each piece that
arrives makes room for the next. Where nothing is left to ask for, a donor that is done takes over what a slower one
owes, so the end waits for nobody. A donor that is silent gives its pieces back and is asked less and less; one that
dies or lacks an image is not asked any more. Equal digests mean equal pieces, so what was fetched for one offer serves
any other that names the same image.

Each piece is verified by its hash on arrival; the whole against the digest, in order, as far as it has come.
"""

from __future__ import annotations

import math
import mmap
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from blake3 import blake3

from dlc.comm.ids import Voter
from dlc.comm.images import PieceLimits
from dlc.comm.messages import ImageOffer, Offer, Piece, PieceReq

AHEAD_S = 0.5
"""What is asked of a donor in advance: more than a long round trip, little against the whole."""
MEASURE_S = 0.25
"""Time over which a donor's speed is measured."""
SILENCES_MAX = 4
"""Doublings of the patience with a donor that stays silent."""

Key = tuple[str, int]
"""(channel, piece)"""


class Staged:
    """One image in the making."""

    def __init__(self, image: ImageOffer) -> None:
        self.image = image
        self.memory = mmap.mmap(-1, image.image_bytes)
        """Taken from the system page by page, as pieces arrive."""
        self.missing = set(range(len(image.piece_hashes)))
        self._hasher = blake3()
        self._hashed = 0

    def take(self, index: int, payload: bytes | memoryview) -> bool:
        """Store one piece; False if it is not what was offered."""
        start = index * self.image.piece_bytes
        if len(payload) != min(self.image.piece_bytes, self.image.image_bytes - start):
            return False
        if blake3(payload).digest() != self.image.piece_hashes[index]:
            return False
        self.memory[start : start + len(payload)] = payload
        self.missing.discard(index)
        return True

    def verify(self, n_pieces: int) -> None:
        """Hash up to so many pieces more, in order, of those that are here."""
        end, limit = self._hashed, min(self._hashed + n_pieces, len(self.image.piece_hashes))
        while end < limit and end not in self.missing:
            end += 1
        if end > self._hashed:
            size = self.image.piece_bytes
            with memoryview(self.memory) as view, view[self._hashed * size : end * size] as part:
                self._hasher.update(part)
            self._hashed = end

    @property
    def verified(self) -> bool:
        return self._hashed == len(self.image.piece_hashes)

    @property
    def sound(self) -> bool:
        """The whole is the state that was named. Asked once it is verified."""
        return self._hasher.digest() == self.image.digest


@dataclass
class Donor:
    window: int
    heard_at: float
    """When the last piece came from it, or when it was first asked."""
    asked: dict[Key, None] = field(default_factory=dict)
    """In the order of asking, which is that of arrival."""
    lacks: set[str] = field(default_factory=set)
    """Channels whose image it does not have."""
    silences: int = 0
    rate_Bps: float = 0.0
    measured_from: float = 0.0
    measured_bytes: int = 0

    def arrived(self, n_bytes: int, now: float, limits: PieceLimits) -> None:
        """Measure its speed, and size its window by it."""
        self.heard_at, self.silences = now, 0
        self.measured_bytes += n_bytes
        took_s = now - self.measured_from
        if took_s >= MEASURE_S:
            rate_Bps = self.measured_bytes / took_s
            self.rate_Bps = (self.rate_Bps + rate_Bps) / 2 if self.rate_Bps else rate_Bps
            self.measured_from, self.measured_bytes = now, 0
            pieces = math.ceil(self.rate_Bps * AHEAD_S / limits.piece_bytes)
            self.window = min(limits.in_flight_max, max(limits.in_flight_min, pieces))

    def owes_s(self, n_more: int, piece_bytes: int) -> float:
        """Seconds until it will have sent all that it was asked for and so many pieces more."""
        owed_bytes = (len(self.asked) + n_more) * piece_bytes
        return owed_bytes / self.rate_Bps if self.rate_Bps else math.inf


class Download:
    """`kept`: images staged by an earlier download, to go on with where this offer names them too."""

    def __init__(
        self, offer: Offer, wanted: Collection[ImageOffer], limits: PieceLimits, kept: dict[str, Staged]
    ) -> None:
        self.offer, self.limits = offer, limits
        self.staged: dict[str, Staged] = {}
        for image in wanted:
            known = kept.get(image.channel)
            same = known is not None and known.image == image
            self.staged[image.channel] = known if known is not None and same else Staged(image)
        self.donors: dict[Voter, Donor] = {}
        self._todo: deque[Key] = deque((c, p) for c, s in self.staged.items() for p in sorted(s.missing))

    @property
    def complete(self) -> bool:
        return not any(s.missing for s in self.staged.values())

    @property
    def verified(self) -> bool:
        return all(s.verified for s in self.staged.values())

    def verify(self) -> None:
        """One slice of hashing."""
        for staged in self.staged.values():
            if not staged.verified:
                staged.verify(self.limits.hash_pieces)
                return

    # ---------------------------------------------------------------- asking

    def ask(self, candidates: Collection[Voter], patience_s: float, now: float) -> list[tuple[Voter, PieceReq]]:
        """Requests to send now. `candidates`: those who are alive and may have the images."""
        for voter in [v for v in self.donors if v not in candidates]:
            self._release(self.donors.pop(voter))
        for voter in candidates:
            if voter not in self.donors:
                self.donors[voter] = Donor(self.limits.in_flight_first, now, measured_from=now)
        for donor in self.donors.values():
            if donor.asked and now - donor.heard_at > patience_s * 2**donor.silences:
                self._release(donor)
                donor.silences = min(donor.silences + 1, SILENCES_MAX)
                donor.heard_at, donor.window = now, 1
        requests = []
        for voter in sorted(self.donors, key=lambda v: (self.donors[v].silences, v)):
            keys = list(self._next_of(self.donors[voter], now))
            for channel in dict.fromkeys(c for c, _ in keys):
                pieces = tuple(p for c, p in keys if c == channel)
                requests.append((voter, PieceReq(channel, self.staged[channel].image.digest, pieces)))
        return requests

    def hopeless(self) -> bool:
        """Nobody is left who could send what is missing."""
        lacking = {c for c, s in self.staged.items() if s.missing}
        return any(all(c in d.lacks or d.silences > 1 for d in self.donors.values()) for c in lacking)

    def _next_of(self, donor: Donor, now: float) -> Iterator[Key]:
        if not donor.asked:
            donor.heard_at = donor.measured_from = now
            donor.measured_bytes = 0
        passed: list[Key] = []
        while self._todo and len(donor.asked) < donor.window:
            key = self._todo.popleft()
            if key[0] in donor.lacks:
                passed.append(key)
            elif key[1] in self.staged[key[0]].missing:
                donor.asked[key] = None
                yield key
        self._todo.extendleft(reversed(passed))
        if not donor.asked and not donor.silences:
            stolen = self._stolen_by(donor)
            if stolen is not None:
                donor.asked[stolen] = None
                yield stolen

    def _stolen_by(self, donor: Donor) -> Key | None:
        """The last piece that a slower donor, or one that has been silent, owes and nobody else was asked for."""
        size = self.limits.piece_bytes
        slower = [d for d in self.donors.values() if d.silences or d.owes_s(0, size) > 2 * donor.owes_s(1, size)]
        for other in sorted(slower, key=lambda d: -d.owes_s(0, size)):
            for key in reversed(other.asked):
                if key[0] not in donor.lacks and sum(key in d.asked for d in self.donors.values()) == 1:
                    return key
        return None

    def _release(self, donor: Donor) -> None:
        """What it was asked for is asked of others, first of all."""
        others = {key for d in self.donors.values() if d is not donor for key in d.asked}
        self._todo.extendleft(reversed([key for key in donor.asked if key not in others]))
        donor.asked.clear()

    # ---------------------------------------------------------------- what comes

    def receive(self, sender: Voter, m: Piece, now: float) -> bool:
        """Take a piece, whoever it comes from; True if it was missing."""
        donor, staged, key = self.donors.get(sender), self.staged.get(m.channel), (m.channel, m.piece)
        if donor is not None:
            donor.arrived(len(m.payload), now, self.limits)
        if staged is None or m.digest != staged.image.digest or m.piece not in staged.missing:
            return False
        if not staged.take(m.piece, m.payload):
            self.refuse(sender, m.channel, m.digest)
            return False
        for other in self.donors.values():
            other.asked.pop(key, None)
        staged.verify(self.limits.hash_pieces)
        return True

    def refuse(self, sender: Voter, channel: str, digest: bytes) -> None:
        """This donor does not have that image (any more), or sends something else instead."""
        donor, staged = self.donors.get(sender), self.staged.get(channel)
        if donor is not None and staged is not None and staged.image.digest == digest:
            donor.lacks.add(channel)
            self._release(donor)
