"""The other processes of `dlc bench allreduce --local`: started, looked at, and asked for what they saw.

One that dies is noticed while the rounds go on, which ends them; those that live then notice it as peers on other hosts
would, and print what was measured until then.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from typing import IO

from dlc.bench.allreduce import LOOK_EVERY_S, PeerReport
from dlc.bench.memory import check_memory
from dlc.comm.clock import clock
from dlc.errors import DlcError, UsageError

LOCAL_MAX = 64
"""Processes of --local, this one included: each takes a core for seconds to begin with, and a port or two."""
VECTORS, PROCESS_BYTES = 5, 250e6
"""Memory of a process: so many vectors (seen: 4.7 with fp32, 3.4 with fp16), and what it has without any."""
LAST_S = 30.0
"""For the others to notice that one has died, and to print what they saw: more than GONE_S."""
WITH_REPORT = (0, 4)
"""Exit status of a process that printed what it saw: of all rounds, or until it was stopped."""


def check_local(n: int, mb: float) -> None:
    """UsageError: `n` processes with vectors of `mb` are too many, or take more memory than is free."""
    if n > LOCAL_MAX:
        raise UsageError(f"--local is {n}; choose up to {LOCAL_MAX} processes")
    needed = n * (VECTORS * mb * 1e6 + PROCESS_BYTES)
    check_memory(f"--local {n} with --mb {mb:g}", needed, "choose fewer processes, or a smaller vector")


def check_vector(mb: float) -> None:
    """UsageError: this process with a vector of `mb` takes more memory than is free."""
    check_memory(f"--mb {mb:g}", VECTORS * mb * 1e6, "choose a smaller vector")


class Children:
    """The other peers of `--local`: processes that run this very command. Closing ends those that still live.

    Each has a session of its own: a Ctrl-C of the terminal is for us alone, and we end them.
    """

    def __init__(self, n: int, options: Mapping[str, str]) -> None:
        self._processes: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []
        try:
            for _ in range(n):
                # A file and no pipe, which would be full before it is read: there may be very many rounds.
                out = tempfile.TemporaryFile()  # noqa: SIM115  as long as the process
                process = subprocess.Popen(_command(options), stdout=out, start_new_session=True)
                self._processes.append((process, out))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def look(self) -> None:
        """DlcError if one of them failed."""
        for process, _ in self._processes:
            if status := process.poll():
                raise DlcError(_ended(status))

    def reports(self) -> tuple[list[PeerReport], str]:
        """(what each of them printed, why one printed nothing). Waits for their end, and no longer than LAST_S where
        one has failed."""
        failed_at: float | None = None
        while None in (states := [process.poll() for process, _ in self._processes]):
            if failed_at is None and any(states):
                failed_at = clock()
            if failed_at is not None and clock() >= failed_at + LAST_S:
                break
            threading.Event().wait(LOOK_EVERY_S)
        found, lost = [], ""
        for status, (_, out) in zip(states, self._processes, strict=True):
            out.seek(0)
            text = out.read() if status in WITH_REPORT else b""
            if text:
                (plain,) = json.loads(text)["peers"]
                found.append(PeerReport(**plain | {"seconds": tuple(plain["seconds"])}))
            elif status is not None or not lost:
                lost = f"a peer did not end within {LAST_S:g} s" if status is None else _ended(status)
        return found, lost

    def close(self) -> None:
        for process, _ in self._processes:
            process.kill()  # they keep nothing, and a signal that they may answer is told once more by each
        for process, out in self._processes:
            process.wait()
            out.close()


def _command(options: Mapping[str, str]) -> list[str]:
    words = [word for option in options.items() for word in option]
    return [sys.executable, "-m", "dlc", "bench", "allreduce", "--json", "--log-level", "error", *words]


def _ended(status: int) -> str:
    if status >= 0:
        return f"a peer ended with exit status {status}; its error stands above"
    why = ", as the system does where memory runs out" if status == -signal.SIGKILL else ""
    name = signal.Signals(-status).name if -status in {*signal.Signals} else f"signal {-status}"
    return f"a peer was ended by {name}{why}"
