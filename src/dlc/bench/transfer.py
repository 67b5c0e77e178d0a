"""The client's machines: round trips, and one direction of one stream. Time comes in as an argument.

    Pinger      one MeasurePing at a time; the next when its answer is there, or after PING_LOST_S
    Transfer    up:   MeasurePush while the window has room; MeasureCount says what came in over there, and when
                down: MeasurePull while the window has room; MeasureData is counted here

A transfer begins to count with the first sign of progress, so connecting is no part of it. It stops asking when its
time is over (`seconds` after that, and not later than `until`) or its bytes are used up, and is done when nothing is on
the way any more (or not within DRAIN_S, though something came through until ALIVE_S before the end: then the connection
must not be used again). Nothing moving for STALL_S is a failure, also at the end. Silence within the time counts: the
rate's time ends with the asking.
"""

from __future__ import annotations

import math
import statistics

from dlc.bench.flow import Meter
from dlc.comm.measures import MeasureCount, MeasureData, MeasurePing, MeasurePong, MeasurePull, MeasurePush
from dlc.comm.messages import Message
from dlc.comm.window import Window

PING_LOST_S = 2.0
"""Longer than any round trip on earth, buffers included; a lost one is not counted."""
PINGS_MAX = 50
STALL_S = 10.0
"""Longer than a connection attempt that lost two packets, and than a few of TCP's retransmissions."""
DRAIN_S = 2.0
ALIVE_S = 1.0
"""A connection that carried something so shortly before its time was over is slow; one that did not may be dead."""


class Pinger:
    """Round trips, one after the other, until PINGS_MAX or the time is over; at least one if anything answers."""

    def __init__(self, session: bytes, seconds: float, now: float, within_s: float = PING_LOST_S) -> None:
        """`within_s`: for the first answer, where that is more than `seconds`."""
        self.rtts_s: list[float] = []
        self._session = session
        self._end = now + seconds
        self._last = now + max(seconds, within_s)
        self._serial = 0
        self._sent_at: float | None = None

    def tick(self, now: float) -> list[Message]:
        """What to send on the control lane now."""
        if self._sent_at is not None and now < self._sent_at + PING_LOST_S:
            return []
        if self.done(now):
            return []
        self._serial += 1
        self._sent_at = now
        return [MeasurePing(self._session, self._serial)]

    def receive(self, message: Message, now: float) -> None:
        if isinstance(message, MeasurePong) and message.serial == self._serial and self._sent_at is not None:
            self.rtts_s.append(now - self._sent_at)
            self._sent_at = None

    def done(self, now: float) -> bool:
        return now >= (self._end if self.rtts_s else self._last) or self._serial >= PINGS_MAX and self._sent_at is None

    def next_deadline(self) -> float:
        end = self._end if self.rtts_s else self._last
        return end if self._sent_at is None else min(end, self._sent_at + PING_LOST_S)


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def median(values: list[float]) -> float:
    return statistics.median(values)


class Transfer:
    """One direction of one stream; see the module."""

    def __init__(
        self,
        up: bool,
        session: bytes,
        block: memoryview,
        *,
        seconds: float,
        bytes_max: int,
        rtt_s: float,
        counted: int,
        now: float,
        until: float = math.inf,
    ) -> None:
        """`block`: what is sent, CHUNK_BYTES_MAX bytes; `counted`: what the other side had counted before."""
        self.meter = Meter()
        """up: by the other side's clock; down: by ours."""
        self.moved = 0
        """Bytes that have come through."""
        self.asked = 0
        """Bytes that were sent, or asked for, whether they have come through or not."""
        self._up, self._session, self._block = up, session, block
        self._window = Window(rtt_s)
        self._seconds, self._until, self._bytes_max = seconds, until, bytes_max
        self._counted = counted
        self._moved_at = now
        self._clocks_apart_s = math.inf  # ours minus the meter's, with the shortest way of a count to here
        self._end = math.inf  # until something has come through
        self._time_over = False

    @property
    def _over(self) -> bool:
        return self._time_over or self.asked >= self._bytes_max

    @property
    def bytes_ended(self) -> bool:
        """All its bytes were asked for before its time was over."""
        return self.asked >= self._bytes_max

    @property
    def wants_room(self) -> bool:
        """`next_bulk` has something to give."""
        on_the_way = self.asked - self.moved
        return not self._over and (on_the_way == 0 or on_the_way + self._window.chunk_bytes <= self._window.n_bytes)

    def next_bulk(self) -> MeasurePush | MeasurePull:
        """The next message, while `wants_room`; it stays the next one until `sent`."""
        n_bytes = min(self._window.chunk_bytes, self._bytes_max - self.asked)
        if self._up:
            return MeasurePush(self._session, payload=self._block[:n_bytes])  # type: ignore[arg-type]
        return MeasurePull(self._session, n_bytes)

    def sent(self, bulk: MeasurePush | MeasurePull) -> None:
        """The link took what `next_bulk` gave."""
        self.asked += len(bulk.payload) if isinstance(bulk, MeasurePush) else bulk.n_bytes

    def receive(self, message: Message, now: float) -> None:
        if self._up and isinstance(message, MeasureCount):
            self._progress(message.total_bytes - self._counted, message.at_s, now)
        if not self._up and isinstance(message, MeasureData):
            self._progress(self.moved + len(message.payload), now, now)

    def _progress(self, moved: int, at_s: float, now: float) -> None:
        if moved <= self.moved:
            return
        self.moved, self._moved_at = moved, now
        if self._end == math.inf:
            self._end = min(now + self._seconds, self._until)
        self.meter.add(at_s, moved)
        self._clocks_apart_s = min(self._clocks_apart_s, now - at_s)
        self._window.progress(now, moved)

    def tick(self, now: float) -> None:
        """Stop asking when the time is over."""
        if self._time_over or now < self._end:
            return
        if not self.drained():
            self.meter.stop(self._end - self._clocks_apart_s)
        self._time_over = True

    def drained(self) -> bool:
        """Nothing is on the way."""
        return self._over and self.asked == self.moved

    def done(self, now: float) -> bool:
        return self.drained() or (self._alive_at_end and now >= self._end + DRAIN_S)

    def stalled(self, now: float) -> bool:
        """Nothing has come through for STALL_S, though it is not `done`."""
        return now >= self._moved_at + STALL_S

    def next_deadline(self) -> float:
        if self._alive_at_end:
            return self._end + DRAIN_S
        return min(self._moved_at + STALL_S, math.inf if self._time_over else self._end)

    @property
    def _alive_at_end(self) -> bool:
        return self._time_over and self._moved_at >= self._end - ALIVE_S
