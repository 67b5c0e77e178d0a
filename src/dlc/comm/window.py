"""How much may be on the way to one receiver that tells what has come, and in messages of which size."""

from __future__ import annotations

from collections import deque

WINDOW_BYTES_MIN = 128 << 10
"""At first, and on slow links: 1 s of 1 Mbit/s that has to drain when a transfer ends."""
WINDOW_BYTES_MAX = 64 << 20
"""1 Gbit/s over 0.5 s of round trip."""
WINDOW_EXTRA_S = 0.1
"""On the way beyond the round trip: buffers of both hosts, and the time until a thread gets its turn."""
CHUNKS_PER_WINDOW = 16
"""Few enough to be cheap, many enough that one more or less changes no rate: about 20 ms of a 50 ms path."""
CHUNK_BYTES_MIN = 16 << 10
"""A message on the slowest links: at 0.1 Mbit/s some come through within a second or two."""
CHUNK_BYTES_MAX = 1 << 20
"""A message on fast links, where the cost of each one counts."""


class Window:
    """Bytes that may be on the way: twice what the path holds at the best rate seen, so it never limits for long."""

    def __init__(self, rtt_s: float, n_bytes: int = WINDOW_BYTES_MIN, chunk_bytes_min: int = CHUNK_BYTES_MIN) -> None:
        """n_bytes: at first; it never shrinks."""
        self.n_bytes, self._chunk_bytes_min = n_bytes, chunk_bytes_min
        self._rtt_s = rtt_s
        self._span_s = max(rtt_s, WINDOW_EXTRA_S)
        self._recent: deque[tuple[float, int]] = deque()

    @property
    def chunk_bytes(self) -> int:
        """Size of the next message."""
        return min(max(self.n_bytes // CHUNKS_PER_WINDOW, self._chunk_bytes_min), CHUNK_BYTES_MAX)

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
