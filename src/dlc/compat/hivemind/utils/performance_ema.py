"""How fast something goes: an exponential moving average of seconds per item, corrected for its start at zero."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class PerformanceEMA:
    """alpha: share of the newest measurement. eps: the rate, in items per second, before the first one."""

    def __init__(self, alpha: float = 0.1, eps: float = 1e-20, paused: bool = False) -> None:
        self.alpha, self.eps, self.paused = alpha, eps, paused
        self.num_updates = 0
        self.ema_seconds_per_sample = 0.0
        self.samples_per_second = eps
        self.timestamp = time.perf_counter()
        self.lock = threading.Lock()

    def update(self, task_size: float, interval: float | None = None) -> float:
        """`task_size` items (above 0) took `interval` seconds, or the time since the last call. Returns items/s."""
        if not task_size > 0:
            raise ValueError(f"task_size must be above 0, not {task_size}")
        now = time.perf_counter()
        if interval is None:
            if self.paused:
                raise ValueError("while it is paused, the interval must be given")
            interval = now - self.timestamp
        if not self.paused:
            self.timestamp = now
        self.ema_seconds_per_sample += self.alpha * (interval / task_size - self.ema_seconds_per_sample)
        self.num_updates += 1
        corrected = self.ema_seconds_per_sample / (1 - (1 - self.alpha) ** self.num_updates)
        self.samples_per_second = 1 / max(corrected, self.eps)
        return self.samples_per_second

    def reset_timer(self) -> None:
        """The next interval begins now."""
        self.timestamp = time.perf_counter()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Time inside does not count."""
        paused, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = paused
            self.reset_timer()

    @contextmanager
    def update_threadsafe(self, task_size: float) -> Iterator[None]:
        """What is done inside are `task_size` items; several threads at once count together."""
        start = time.perf_counter()
        yield
        with self.lock:
            self.update(task_size, time.perf_counter() - max(start, self.timestamp))

    def __repr__(self) -> str:
        return f"PerformanceEMA({self.samples_per_second:.5f} items/s after {self.num_updates} updates)"


__all__ = ["PerformanceEMA"]
