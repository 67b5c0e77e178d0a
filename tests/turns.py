"""Tests run on several processes at once (pytest-xdist), but for those marked `alone`: while one of them runs, none of
the others does, since it measures time, a rate or memory of this machine."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path


class Turns:
    """A lock of readers and writers over two files, as one of several processes sees it.

    Who asks to be alone closes the door behind itself: those who come later wait, and those who are in come out.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._door, self._room = folder / "door", folder / "room"

    @contextmanager
    def taken(self, alone: bool) -> Iterator[None]:
        """Beside others that are not alone, or as the only one; waits for as long as it must."""
        with ExitStack() as inside:
            with _held(self._door, fcntl.LOCK_EX):
                inside.enter_context(_held(self._room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
            yield


@contextmanager
def _held(path: Path, how: int) -> Iterator[None]:
    """The kernel lets go of it when the process ends, however that comes."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, how)
        yield
    finally:
        os.close(fd)
