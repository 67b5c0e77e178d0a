"""How many files this process may have open."""

from __future__ import annotations

import contextlib
import sys

OPEN_FILES_MAX = 1 << 16
"""Where the system names no limit of its own."""


def raise_open_files_limit() -> None:
    """As many as the system allows this process: the usual 1,024 are for programs that `select`.

    Each connection is one, two for each other peer, and strangers may take an eighth of all (`comm/door.py`).
    """
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES_MAX if hard == resource.RLIM_INFINITY else hard
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    with contextlib.suppress(OSError, ValueError):  # the system may allow less than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
