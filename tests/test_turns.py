"""Tests that measure run alone, and get their turn."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from tests.helpers import wait_until

if sys.platform == "win32":
    pytest.skip("there is no flock", allow_module_level=True)

from tests.turns import Turns


class Visitor:
    """A process that runs one test, as a thread: a lock of flock belongs to the file that was opened."""

    def __init__(self, folder: Path, alone: bool) -> None:
        self.inside, self._leave = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._visit, args=(Turns(folder), alone), daemon=True)
        self._thread.start()

    def _visit(self, turns: Turns, alone: bool) -> None:
        with turns.taken(alone):
            self.inside.set()
            assert self._leave.wait(60)
            self.inside.clear()

    def leave(self) -> None:
        self._leave.set()
        self._thread.join(60)
        assert not self._thread.is_alive()


def waits(path: Path) -> bool:
    """Whether somebody waits for this file's lock, as the kernel tells it."""
    blocked = [line.split() for line in Path("/proc/locks").read_text().splitlines() if "->" in line]
    return any(fields[-3].endswith(f":{path.stat().st_ino}") for fields in blocked)


def test_those_that_are_not_alone_run_beside_each_other(tmp_path: Path) -> None:
    both = [Visitor(tmp_path, alone=False) for _ in range(2)]
    wait_until(lambda: all(visitor.inside.is_set() for visitor in both))
    for visitor in both:
        visitor.leave()


@pytest.mark.skipif(sys.platform != "linux", reason="looks for waiting locks in /proc")
def test_one_that_is_alone_waits_for_those_inside_and_lets_nobody_in_before_it(tmp_path: Path) -> None:
    first = Visitor(tmp_path, alone=False)
    wait_until(first.inside.is_set)
    alone = Visitor(tmp_path, alone=True)
    wait_until(lambda: waits(tmp_path / "room"))
    later = Visitor(tmp_path, alone=False)
    wait_until(lambda: waits(tmp_path / "door"))
    assert not alone.inside.is_set() and not later.inside.is_set()
    first.leave()
    wait_until(alone.inside.is_set)
    assert not later.inside.is_set()
    alone.leave()
    wait_until(later.inside.is_set)
    later.leave()
