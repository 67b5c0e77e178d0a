"""The clock of drivers, and of whatever else waits for peers: the protocol itself is told what time it is."""

from __future__ import annotations

import time


def clock() -> float:
    """Monotonic seconds that go on while the host sleeps, where the system has such a clock."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    return time.clock_gettime(boottime) if boottime is not None else time.monotonic()
