"""Child processes of which none outlives us, whatever happens.

    we return, raise, or get Ctrl-C   `Children.close` kills every group (it is a context manager)
    we get SIGKILL                    Linux kills the children with the thread that started them (PR_SET_PDEATHSIG)

Each child has a session of its own, so a Ctrl-C of the terminal reaches us only: we ask them to stop, in our order.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

PR_SET_PDEATHSIG = 1
"""From linux/prctl.h: the signal that a process gets when its parent's thread ends."""
WAIT_S = 10.0
"""For a process that has closed its output, or got SIGKILL, to be gone."""


class Children:
    """Named processes. Start them from a thread that lives as long as they should."""

    def __init__(self) -> None:
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Children:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def start(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        variables: dict[str, str] | None = None,
        *,
        talk: bool = False,
    ) -> IO[bytes]:
        """Run `command` with `variables` added to its environment; returns its stdout, its stderr is added to `log`.

        talk: `tell` can write to its stdin. A name can be used again once its process has ended.
        """
        with log.open("ab") as errors:
            child = subprocess.Popen(
                [*_env(variables or {}), *command],
                stdin=subprocess.PIPE if talk else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                preexec_fn=_die_with_parent(),
            )
        self._running[name] = child
        assert child.stdout is not None
        return child.stdout

    def pid(self, name: str) -> int:
        return self._running[name].pid

    def tell(self, name: str, line: str) -> None:
        """Write one line to the stdin of a process that was started with `talk`; one that has ended hears nothing."""
        stdin = self._running[name].stdin
        assert stdin is not None
        try:
            stdin.write(line.encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            pass

    def signal(self, name: str, number: int) -> None:
        """Send a signal, if the process still runs."""
        self._running[name].send_signal(number)

    def exit_code(self, name: str, wait_s: float = 0.0) -> int | None:
        """What the process returned, negative for the signal that ended it; None: it still runs."""
        try:
            return self._running[name].wait(wait_s)
        except subprocess.TimeoutExpired:
            return None

    def interrupt(self, grace_s: float) -> None:
        """Ask all to leave, as Ctrl-C does, and give them so long; `close` ends what remains."""
        for child in self._running.values():
            if child.poll() is None:
                child.send_signal(signal.SIGINT)
        deadline = time.monotonic() + grace_s
        for name in self._running:
            self.exit_code(name, max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Kill all that still run, and what they started."""
        for child in self._running.values():
            if child.poll() is None:
                _kill_group(child)
        for name in self._running:
            self.exit_code(name, WAIT_S)


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    if sys.platform == "win32":
        child.kill()
        return
    try:
        os.killpg(child.pid, signal.SIGKILL)  # it leads its session, hence a group of its own
    except ProcessLookupError:
        pass


def _env(variables: dict[str, str]) -> list[str]:
    """A prefix that sets `variables` and leaves all others; where there is no `env`, they are not set."""
    program = shutil.which("env")
    return [program, *(f"{name}={value}" for name, value in variables.items())] if program and variables else []


def _die_with_parent() -> Callable[[], None] | None:
    """What a Linux child does before it becomes the program; elsewhere nothing."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up here: the child of a process with threads must not take locks
    parent = os.getpid()

    def ask_for_signal() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died in between
            os._exit(1)

    return ask_for_signal
