"""All our bulk connections to one address: one, or STREAMS of them where a single one would be slow.

The congestion controls that every system allows give a connection the rate that its losses leave it: MSS / RTT * 1.2 /
sqrt(share of lost packets) for Reno (Mathis et al. 1997), 12 Mbit/s at 100 ms and 0.01 %. And after each idle time its
window begins with ten segments. Several side by side have several times both. BBR needs no help, nor do near hosts.
"""

from __future__ import annotations

from collections.abc import Callable

from dlc.comm.lanes import Frames
from dlc.comm.links import Link
from dlc.comm.tcp import WaySample

STREAMS = 4
"""A round between four far sites without BBR took 8 s where one segment in a thousand was lost, 4.1 s with four, 4.4 s
with eight."""


class Bundle:
    """Belongs to the transport's thread. Messages go by turns, each on one connection, and may overtake each other."""

    def __init__(self, first: Link) -> None:
        self.links = [first]
        self._rate_Bps: float | None = None
        self._next = 0
        self._acked_bytes = 0
        self._seen: dict[Link, int] = {}
        """What each connection had acknowledged when it was looked at last."""

    def widen(self, streams: int, make: Callable[[], Link | None]) -> None:
        """Have so many connections, as far as `make` gives them."""
        n_before = len(self.links)
        while len(self.links) < streams and (link := make()) is not None:
            self.links.append(link)
        if len(self.links) > n_before and self._rate_Bps is not None:
            self.pace(self._rate_Bps)

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
