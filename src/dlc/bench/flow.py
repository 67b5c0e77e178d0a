"""Rates out of (time, bytes so far), and how much may be on the way. Bytes are payload; Mbit/s are 10^6 bit."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence

from dlc.bench.limits import CHUNK_BYTES_MAX, CHUNK_BYTES_MIN

MARKS_MAX = 4096
"""Points of a meter; every second one is forgotten when there are more."""
BUNCH_S = 0.002
"""Chunks that lay ready together are read within this time."""
SKIP_SHARE = 0.3
"""First part of a transfer that is not counted: slow start, and the filling of buffers on the way."""
WINDOW_BYTES_MIN = 128 << 10
"""At first, and on slow links: 1 s of 1 Mbit/s that has to drain when a transfer ends."""
WINDOW_BYTES_MAX = 64 << 20
"""1 Gbit/s over 0.5 s of round trip."""
WINDOW_EXTRA_S = 0.1
"""On the way beyond the round trip: buffers of both hosts, and the time until a thread gets its turn."""
CHUNKS_PER_WINDOW = 16
"""Few enough to be cheap, many enough that one more or less changes no rate: about 20 ms of a 50 ms path."""


class Meter:
    """Total bytes as a function of time: straight lines between the marks.

    What comes within BUNCH_S is one mark, made of the last of it. Otherwise a line would end at the first chunk of each
    bunch, all lines would run too low, and a rate from a line to the last mark would be too high.
    """

    def __init__(self) -> None:
        self.times: list[float] = []
        self.totals: list[int] = []
        self._bunch_at = -BUNCH_S

    def add(self, at_s: float, total_bytes: int) -> None:
        """`total_bytes` had come through at `at_s`; neither ever goes back."""
        if self.times and at_s < self._bunch_at + BUNCH_S:
            self.times[-1], self.totals[-1] = at_s, total_bytes
            return
        self._bunch_at = at_s
        self.times.append(at_s)
        self.totals.append(total_bytes)
        if len(self.times) > MARKS_MAX:
            self.times, self.totals = self.times[::2], self.totals[::2]

    def total_at(self, at_s: float) -> float:
        """Bytes at a time within the marks."""
        right = min(max(bisect_right(self.times, at_s), 1), len(self.times) - 1)
        t0, t1 = self.times[right - 1], self.times[right]
        b0, b1 = self.totals[right - 1], self.totals[right]
        return b1 if t1 <= t0 else b0 + (b1 - b0) * (at_s - t0) / (t1 - t0)


def rate_mbps(meters: Sequence[Meter]) -> float | None:
    """Sum of the rates of streams that ran side by side, while all of them ran; None if they never all did.

    The first mark of each only tells when it began. All marks are of one clock.
    """
    if not meters or any(len(m.times) < 2 for m in meters):
        return None
    begin, end = max(m.times[0] for m in meters), min(m.times[-1] for m in meters)
    begin += SKIP_SHARE * (end - begin)
    if end <= begin:
        return None
    moved = sum(m.total_at(end) - m.total_at(begin) for m in meters)
    return moved * 8e-6 / (end - begin)


class Window:
    """Bytes that may be on the way: twice what the path holds at the best rate seen, so it never limits for long."""

    def __init__(self, rtt_s: float) -> None:
        self.n_bytes = WINDOW_BYTES_MIN
        self._rtt_s = rtt_s
        self._span_s = max(rtt_s, WINDOW_EXTRA_S)
        self._recent: deque[tuple[float, int]] = deque()

    @property
    def chunk_bytes(self) -> int:
        """Size of the next message."""
        return min(max(self.n_bytes // CHUNKS_PER_WINDOW, CHUNK_BYTES_MIN), CHUNK_BYTES_MAX)

    def progress(self, now: float, total_bytes: int) -> None:
        """So much has come through in all; widens the window if that was fast."""
        recent = self._recent
        recent.append((now, total_bytes))
        while len(recent) > 1 and recent[1][0] < now - self._span_s:
            recent.popleft()
        elapsed_s = now - recent[0][0]
        if elapsed_s < self._span_s / 2:
            return
        rate = (total_bytes - recent[0][1]) / elapsed_s
        wanted = int(2 * rate * (self._rtt_s + WINDOW_EXTRA_S))
        self.n_bytes = min(max(self.n_bytes, wanted), WINDOW_BYTES_MAX)
