"""Why a connection could not be made: libzmq says only that it could not.

A host that refuses it is there, and the process that listened there has ended. Where there is no way to it (a cable is
out, it sleeps, this host has lost its route) nothing is known of that process, and it may be back in a moment. The
kernel tells the one from the other to whoever tries.
"""

from __future__ import annotations

import errno
import os
import socket

_ON_ITS_WAY = (0, errno.EINPROGRESS, errno.EWOULDBLOCK)


class Knock:
    """One more attempt to connect to the numeric `host`, of which nothing but the outcome is wanted. Never blocks.

    Raises OSError where this process may open no more files, or has no such addresses.
    """

    def __init__(self, host: str, port: int) -> None:
        self._sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        self._sock.setblocking(False)
        try:
            error = self._sock.connect_ex((host, port))
        except OSError:  # an interface of its scope that is no more
            self._sock.close()
            raise
        self._error = error if error not in _ON_ITS_WAY else None

    def fileno(self) -> int:
        """Can be written to as soon as there is an outcome."""
        return self._sock.fileno()

    def error(self) -> int | None:
        """What has come of it, as an errno; 0: it was let in; None: nothing yet."""
        if self._error is None:
            self._error = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or self._let_in()
        return self._error

    def _let_in(self) -> int | None:
        try:
            self._sock.getpeername()
        except OSError:
            return None
        return 0

    def close(self) -> None:
        self._sock.close()


def why(error: int) -> str:
    """A clause for the log."""
    if error == errno.ECONNREFUSED:
        return "nobody listens there"
    return f"there is no way to it: {os.strerror(error)}" if error else "nobody listened there a moment ago"
