"""One probe of my link, from the question who has time for it to the rate that it shows (linkprobe.py).

Junk goes to several receivers side by side, so that no slow one hides what my own link carries. Each tells what has
come (`counted`), and that alone lets more of it go: what is on the way is bounded by a window per receiver.

The rate is the largest over a good part of the probe: of what the kernel says was acknowledged, where it says anything
(`acked`), else of what the receivers counted.
"""

from __future__ import annotations

from dlc.comm.ids import PeerId, Voter
from dlc.comm.probemessages import ProbePush
from dlc.comm.rates import Meter
from dlc.comm.window import Window
from dlc.errors import ProtocolError

BURST_S = 1.5
"""Of sending. The slow start to the nearest receivers has to be over by then: ten round trips for 1 Gbit/s."""
BURST_BYTES_MAX = 64 << 20
"""To all receivers together: half a second of 1 Gbit/s. Faster links are through with it in a moment."""
FIRST_BYTES = 64 << 10
"""On the way to all receivers before any of them told anything: half a second of 1 Mbit/s."""
CHUNK_BYTES_MIN = 2 << 10
"""Of junk: a round's first message does not wait long behind one, on the slowest link either."""
RATE_S_MIN, RATE_BYTES_MIN = 0.1, 16 << 10
"""A rate is measured over at least this time and so many bytes: 0.1 Mbit/s can be told."""
RATE_SHARE = 0.3
"""And over this share of the probe: half of it told up to 8 % more than the slowest of four emulated sites carries."""


class Receiver:
    """Whom junk goes to."""

    def __init__(self, voter: Voter, rtt_s: float, n: int) -> None:
        """n: receivers of this probe."""
        self.voter = voter
        self.free: bool | None = None
        """Its answer; None: none yet."""
        self.window = Window(rtt_s, FIRST_BYTES // n, CHUNK_BYTES_MIN)
        self.sent_bytes = self.counted_bytes = 0

    @property
    def has_room(self) -> bool:
        return self.sent_bytes - self.counted_bytes + self.window.chunk_bytes <= self.window.n_bytes


class Burst:
    def __init__(self, session: int, receivers: list[tuple[Voter, float]], answers_until: float) -> None:
        """receivers: with their round trips in seconds."""
        self.session = session
        self.receivers = {voter.peer: Receiver(voter, rtt_s, len(receivers)) for voter, rtt_s in receivers}
        self.asked = tuple(voter for voter, _ in receivers)
        self.answers_until = answers_until
        self.wait_s = 0.0
        """The longest that somebody who has no time asked for."""
        self.began: float | None = None
        """When junk began to go; None: answers are waited for."""
        self._junk = memoryview(b"")
        self._sent_bytes = 0
        self._acked, self._counted = Meter(), Meter()

    @property
    def sending(self) -> bool:
        return self.began is not None

    def begin(self, now: float, junk: bytes) -> None:
        """Send to those who are free. junk: as long as the longest message (window.CHUNK_BYTES_MAX), incompressible."""
        self.receivers = {peer: r for peer, r in self.receivers.items() if r.free}
        self.began, self._junk = now, memoryview(junk)
        self._counted.begin(now, 0)

    def over(self, now: float) -> bool:
        """All junk has come, or its time is over."""
        return self.began is not None and (self._counted_bytes >= BURST_BYTES_MAX or now >= self.began + BURST_S)

    @property
    def _counted_bytes(self) -> int:
        return sum(r.counted_bytes for r in self.receivers.values())

    # ---------------------------------------------------------------- bulk

    def pending(self) -> list[PeerId]:
        if self.began is None or self._sent_bytes >= BURST_BYTES_MAX:
            return []
        return [peer for peer, receiver in self.receivers.items() if receiver.has_room]

    def next_bulk(self, peer: PeerId) -> ProbePush | None:
        receiver = self.receivers.get(peer)
        if self.began is None or receiver is None or not receiver.has_room:
            return None
        size = min(receiver.window.chunk_bytes, BURST_BYTES_MAX - self._sent_bytes)
        if not size:
            return None
        receiver.sent_bytes += size
        self._sent_bytes += size
        return ProbePush(self.session, self._junk[:size])

    # ---------------------------------------------------------------- what has come

    def count(self, receiver: Receiver, total_bytes: int, now: float) -> None:
        """A receiver tells. Raises ProtocolError for more than any probe has."""
        if not 0 <= total_bytes <= BURST_BYTES_MAX:
            raise ProtocolError(f"{receiver.voter} counts {total_bytes} bytes of a probe")
        total_bytes = min(total_bytes, receiver.sent_bytes)  # what was sent twice was counted twice
        if total_bytes > receiver.counted_bytes:  # counts may overtake each other
            receiver.counted_bytes = total_bytes
            receiver.window.progress(now, total_bytes)
            self._counted.at(now, self._counted_bytes)

    def acked(self, now: float, total_bytes: int) -> None:
        """The kernel tells what was acknowledged of all bulk, by a count that only grows."""
        if self.began is not None:
            self._acked.at(now, total_bytes)

    def rate_Bps(self, now: float) -> float:
        """What my link was seen to carry until now, when the probe is over; 0: too little came to tell."""
        for meter in (self._acked, self._counted):
            found = 0.0 if meter.empty else meter.peak_Bps(RATE_S_MIN, RATE_BYTES_MIN, RATE_SHARE)
            if found:
                return found
        # So fast that all of it came within less than a window.
        quick = self.began is not None and now > self.began and self._counted_bytes >= BURST_BYTES_MAX
        return self._counted_bytes / (now - self.began) if quick and self.began is not None else 0.0
