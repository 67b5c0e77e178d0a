"""What several tests share."""

from __future__ import annotations

import importlib.util
import math
import sys
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from types import FrameType, ModuleType
from typing import TypeVar

import pytest

T = TypeVar("T")

TICK_S = 0.005
"""Between two looks at a condition: short against any deadline, long against the cost of looking."""
LATE_SHARE_MAX = 0.02
"""Of the time. On a machine that is busy with other processes it is a tenth of that."""


def wait_until(condition: Callable[[], object], deadline_s: float = 180.0, what: str = "") -> None:
    """Return as soon as `condition()` is true; fail after `deadline_s`, naming `what` was waited for.

    The deadline is for machines that do not run a process for seconds, so a generous one costs a passing test nothing.
    """
    never = threading.Event()
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() >= end:
            name = what or getattr(condition, "__qualname__", repr(condition))
            raise AssertionError(f"not within {deadline_s:g} s: {name}")
        never.wait(TICK_S)


def interrupted_at(at: int, call: Callable[[], object], within: Collection[str] = ()) -> bool:
    """Whether the call comes to its `at`-th line, where Ctrl-C ends it. within: counted in these files only."""
    lines = 0

    def trace(frame: FrameType, event: str, arg: object) -> object:
        nonlocal lines
        if within and frame.f_code.co_filename not in within:
            return None
        lines += event == "line" or not within
        if lines == at:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return lines >= at


def undisturbed(
    late_s: Callable[[], float], measure: Callable[[], T], deadline_s: float = 30.0, figure_s: float = math.inf
) -> T:
    """What `measure()` gives in a time in which the emulated network ran when it had to, as its own clock shows.

    `late_s`: for how long, in sum, the machine has kept it from that (`_wan.Wan.late_s`): nothing that is measured. On
    a machine that gives no such time within `deadline_s` the test is skipped: there no rate and no delay is true.
    `figure_s`: what a single figure of `measure()` is of, where that is a part of the time: one pause may lie in it.
    """
    end = time.monotonic() + deadline_s
    while True:
        begun, before = time.monotonic(), late_s()
        measured = measure()
        share = (late_s() - before) / min(figure_s, time.monotonic() - begun)
        if share < LATE_SHARE_MAX:
            return measured
        if time.monotonic() >= end:
            pytest.skip(f"this machine kept the emulated network from running for {share:.0%} of the time")


def benchmark_module(name: str) -> ModuleType:
    """benchmarks/NAME.py as a module; that folder holds scripts and is no package."""
    known = sys.modules.get(name)
    if known is None:
        path = Path(__file__).resolve().parent.parent / "benchmarks" / f"{name}.py"
        found = importlib.util.spec_from_file_location(name, path)
        assert found is not None and found.loader is not None
        known = sys.modules[name] = importlib.util.module_from_spec(found)
        sys.path.insert(0, str(path.parent))  # where it finds what it imports of that folder
        try:
            found.loader.exec_module(known)
        finally:
            sys.path.remove(str(path.parent))
    return known
