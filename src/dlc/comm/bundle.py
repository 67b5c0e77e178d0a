"""All our bulk connections to one address: one, or several where a single one is slow.

The congestion controls that every system allows give a connection the rate that its losses leave it: MSS / RTT * 1.2 /
sqrt(share of lost packets) for Reno (Mathis et al. 1997), 12 Mbit/s at 100 ms and 0.01 %. And after each idle time its
window begins with ten segments. Several side by side have several times both. With BBR there is one: four in its place
between four far sites took 4.6 to 5.5 s, where one took 3.9 to 4.5.

With any congestion control, a connection has no more on the way than its host's send buffer takes, two thirds of 4 MB
by default: 200 Mbit/s at 110 ms. Where buffers were seen to hold connections back, there are more from then on.
"""

from __future__ import annotations

from collections.abc import Callable

from dlc.comm.lanes import Frames
from dlc.comm.links import NEAR_RTT_S, Link
from dlc.comm.tcp import WaySample

STREAMS = 4
"""A round between four far sites without BBR took 8 to 12 s where one segment in a thousand was lost, 4.1 to 4.3 s with
four, 4.4 s with eight."""
STREAMS_MAX = 16
BUFFERED = 0.2
"""Part of the time in which buffers held connections back: up to 0.02 where they were large enough, 0.25 to 0.55 in a
probe where they took half of what was needed, and up to 0.15 with four in place of one, but for one way of twelve."""
BUSY_S_MIN = 0.5
"""Connections that were busy for less tell nothing of that."""


class Bundle:
    """Belongs to the transport's thread. Messages go by turns, each on one connection, and may overtake each other."""

    def __init__(self, first: Link) -> None:
        self.links = [first]
        self._rate_Bps: float | None = None
        self._next = 0
        self._acked_bytes = 0
        self._seen: dict[Link, int] = {}
        """What each connection had acknowledged when it was looked at last."""
        self._busy_s: dict[Link, tuple[float, float]] = {}
        """How long each had been busy then, and held back by buffers."""

    def widen(self, streams: int, make: Callable[[], Link | None]) -> None:
        """Have so many connections, as far as `make` gives them."""
        n_before = len(self.links)
        while len(self.links) < streams and (link := make()) is not None:
            self.links.append(link)
        if len(self.links) > n_before and self._rate_Bps is not None:
            self.pace(self._rate_Bps)

    def held_back(self) -> bool:
        """Whether buffers held the connections to a far host back, since this was asked last, and there may be more."""
        all_busy_s = all_buffered_s = 0.0
        for link in self.links:
            sample = link.tcp_sample()
            if sample is None:
                continue
            busy_s, buffered_s = self._busy_s.get(link, (0.0, 0.0))
            if sample.busy_s < busy_s:  # another connection
                busy_s = buffered_s = 0.0
            busy_s, buffered_s = sample.busy_s - busy_s, sample.buffered_s - buffered_s
            if busy_s >= BUSY_S_MIN:
                self._busy_s[link] = sample.busy_s, sample.buffered_s
                if sample.min_rtt_s >= NEAR_RTT_S:
                    all_busy_s, all_buffered_s = all_busy_s + busy_s, all_buffered_s + buffered_s
        return all_buffered_s > BUFFERED * all_busy_s and len(self.links) < STREAMS_MAX

    def send(self, frames: Frames) -> bool:
        """On the next connection that is up and has room; False: none has."""
        n = len(self.links)
        for turn in range(self._next, self._next + n):
            if self.links[turn % n].send(frames):
                self._next = (turn + 1) % n
                return True
        return False

    def pace(self, rate_Bps: float | None, path_s: float = 0.0) -> bool:
        """`Link.pace` of all together; False if none is there to be told."""
        self._rate_Bps = rate_Bps
        each_Bps = rate_Bps / len(self.links) if rate_Bps is not None else None
        told = [link.pace(each_Bps, path_s) for link in self.links]
        return any(told)

    def sample(self) -> WaySample | None:
        """Of the connections that are up; None: the kernel says nothing."""
        samples = {link: sample for link in self.links if (sample := link.tcp_sample()) is not None}
        if not samples:
            return None
        for link, sample in samples.items():
            before = self._seen.get(link, 0)
            self._acked_bytes += sample.bytes_acked - before * (sample.bytes_acked >= before)
            self._seen[link] = sample.bytes_acked
        freest = min(samples.values(), key=lambda sample: sample.rtt_s - sample.min_rtt_s)
        return WaySample(self._acked_bytes, freest.rtt_s, freest.min_rtt_s)
