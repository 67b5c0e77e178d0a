"""A lock on a folder, as long as the process lives: the file `lock` in it (flock, msvcrt).

Whoever has it writes a line of its own into the file, by which it sees later whether the folder is still the one that
it locked: somebody may have removed it, and another process made it anew. The numbers that file systems give to files
would not do, as some give another one each time.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import sys
from pathlib import Path
from typing import IO

NAME = "lock"
LINE_BYTES_MAX = 64
"""More than a line of ours has."""


class FolderLock:
    """The lock on `folder`, which is there, until `close`.

    Raises BlockingIOError if another process (or another FolderLock of this one) has it, OSError if there can be none.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        file = self._path.open("ab", buffering=0)
        try:
            _lock(file)
        except BlockingIOError:
            file.close()
            raise
        except OSError as error:
            file.close()
            raise OSError(error.errno, f"its file system keeps no locks ({error.strerror})") from None
        self._line = _sign(file)
        self._held = [file]
        """Until it is closed, by whichever thread takes it from here."""

    def lost(self) -> bool:
        """Whether what is there now is another file, or none. False, too, where that cannot be found out, as of a disk
        that is gone: who writes there tells of it."""
        try:
            with self._path.open("rb") as file:
                return self._line is not None and file.read(LINE_BYTES_MAX) != self._line
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False

    def close(self) -> None:
        """Let another process have it. May be called twice, by two threads at once, too."""
        with contextlib.suppress(IndexError):
            file = self._held.pop()
            _unlock(file)
            file.close()


def _sign(file: IO[bytes]) -> bytes | None:
    """The line that is in the file now; None: the disk has no room for one."""
    line = f"{os.getpid()} {secrets.token_hex(8)}\n".encode()
    try:
        file.truncate(0)
        return line if file.write(line) == len(line) else None
    except OSError:
        return None


if sys.platform == "win32":
    import msvcrt

    def _lock(file: IO[bytes]) -> None:
        file.seek(0)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError as error:
            raise BlockingIOError(errno.EAGAIN, error.strerror) from None

    def _unlock(file: IO[bytes]) -> None:
        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _lock(file: IO[bytes]) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _unlock(file: IO[bytes]) -> None:
        fcntl.flock(file, fcntl.LOCK_UN)
