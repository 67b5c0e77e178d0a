"""Rates out of (time, bytes so far). Bytes are payload; Mbit/s are 10^6 bit."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

MARKS_MAX = 4096
"""Points of a meter; every second one is forgotten when there are more."""
BUNCH_S = 0.002
"""Chunks that lay ready together are read within this time."""
SKIP_SHARE = 0.3
"""First part of a transfer that is never counted: slow start, and the filling of buffers on the way."""
SETTLE_RTTS = 10
"""Round trips that are never counted: TCP begins with 14 kB and doubles about once in each of them."""
COUNTED_RTTS = 5
"""Round trips that a rate is made of at least: losses make what comes through in a single one differ by half."""
PACE_S_MIN = 0.01
"""A shorter round trip counts as this: threads and buffers of both hosts need as long to find their pace."""
GROWTH, GROWTH_RTTS = 1.25, 3
"""A rate still grows if it is more than so many times the one before, each over so many round trips, as in BBR. Later
the halves of what is counted are compared so."""
KEPT_SHARE, KEPT_RTTS = 2 / 3, 20
"""Of what is left after the settling a rate is made, of this share or so many round trips at least, whichever is less:
else it would be that of a burst behind a loss."""
HOLE_RTTS, HOLE_STEPS = 3, 4
"""What follows a lost segment is handed over when that has come again, within so many round trips as a rule. Where the
counting may begin is looked at so many times in each of them."""


class Meter:
    """Total bytes as a function of time: straight lines between the marks.

    What comes within BUNCH_S is one mark, made of the last of it. Otherwise a line would end at the first chunk of each
    bunch, all lines would run too low, and a rate from a line to the last mark would be too high.
    """

    def __init__(self) -> None:
        self.times: list[float] = []
        self.totals: list[int] = []
        self._bunch_at = -BUNCH_S
        self._stopped_at: float | None = None

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

    def stop(self, at_s: float) -> None:
        """A rate counts until then, whether bytes came through until then or not; what comes later may be added."""
        self._stopped_at = at_s

    @property
    def end(self) -> float:
        """Until when a rate counts: the last mark, or the first one since `stop`, or that moment if there is none.

        A mark, because marks come late, if anything: from a line to a line a rate could be more than the link carries.
        """
        if self._stopped_at is None:
            return self.times[-1]
        since = bisect_left(self.times, self._stopped_at)
        return self.times[since] if since < len(self.times) else self._stopped_at

    def total_at(self, at_s: float) -> float:
        """Bytes at a time from the first mark on; after the last one nothing has come."""
        if at_s >= self.times[-1]:
            return self.totals[-1]
        right = min(max(bisect_right(self.times, at_s), 1), len(self.times) - 1)
        t0, t1 = self.times[right - 1], self.times[right]
        b0, b1 = self.totals[right - 1], self.totals[right]
        return b1 if t1 <= t0 else b0 + (b1 - b0) * (at_s - t0) / (t1 - t0)


def least_s(rtt_s: float) -> float:
    """A transfer that runs for less than this has no rate."""
    return (SETTLE_RTTS + COUNTED_RTTS) * max(rtt_s, PACE_S_MIN)


def rate_mbps(meters: Sequence[Meter], rtt_s: float) -> float | None:
    """Sum of the rates of streams that ran side by side, while all of them ran and once their sum had stopped growing;
    None if they never all did, or not for long enough after that.

    The first mark of each only tells when it began. All marks are of one clock. rtt_s: without load.
    """
    if not meters or any(len(m.times) < 2 for m in meters):
        return None
    begin, end = max(m.times[0] for m in meters), min(m.end for m in meters)
    pace_s = max(rtt_s, PACE_S_MIN)
    grown = _grown(meters, begin, end, pace_s)
    if grown is None:
        return None
    begin = max(grown, begin + SETTLE_RTTS * pace_s, begin + SKIP_SHARE * (end - begin))
    kept_s = max(COUNTED_RTTS * pace_s, min(KEPT_SHARE * (end - begin), KEPT_RTTS * pace_s))
    last = end - kept_s
    while begin <= last:
        middle = (begin + end) / 2
        if _moved(meters, middle, end) <= GROWTH * _moved(meters, begin, middle):
            begin = _whole(meters, begin, end, pace_s)
            return _moved(meters, begin, end) * 8e-6 / (end - begin)
        begin += pace_s  # the losses at the end of slow start can hold everything back for some round trips
    return None


def _whole(meters: Sequence[Meter], begin: float, end: float, pace_s: float) -> float:
    """The time to count from, at `begin` or soon after it, where that lies in a hole, or in the burst behind it: what
    came behind a lost segment before is handed over later, and would be counted too. So it is where most had come,
    compared with the mean; but where nothing is held back, it is `begin`, however fast that part of it was."""
    bytes_per_s = _moved(meters, begin, end) / (end - begin)
    step_s = pace_s / HOLE_STEPS
    after = int(min(HOLE_RTTS * pace_s, end - COUNTED_RTTS * pace_s - begin) / step_s)
    ahead = {
        step: _moved(meters, begin, begin + step * step_s) - bytes_per_s * step * step_s
        for step in range(-HOLE_STEPS, after + 1)
    }
    if all(ahead[step] <= ahead[step + 1] for step in range(-HOLE_STEPS, after)):
        return begin
    return begin + step_s * max(range(after + 1), key=lambda step: ahead[step])


def _grown(meters: Sequence[Meter], begin: float, end: float, pace_s: float) -> float | None:
    """When the sum of the rates had stopped growing; None if it never did."""
    step_s = GROWTH_RTTS * pace_s
    at = begin + step_s
    while at + step_s <= end:
        if _moved(meters, at, at + step_s) <= GROWTH * _moved(meters, at - step_s, at):
            return at
        at += pace_s
    return None


def _moved(meters: Sequence[Meter], begin: float, end: float) -> float:
    return sum(m.total_at(end) - m.total_at(begin) for m in meters)
