"""What several tests share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

TICK_S = 0.005
"""Between two looks at a condition: short against any deadline, long against the cost of looking."""


def wait_until(condition: Callable[[], object], deadline_s: float = 10.0, what: str = "") -> None:
    """Return as soon as `condition()` is true; fail after `deadline_s`, naming `what` was waited for.

    The deadline is for machines under load, so a generous one costs a passing test nothing.
    """
    never = threading.Event()
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() >= end:
            name = what or getattr(condition, "__qualname__", repr(condition))
            raise AssertionError(f"not within {deadline_s:g} s: {name}")
        never.wait(TICK_S)
