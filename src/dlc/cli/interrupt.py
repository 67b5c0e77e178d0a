"""Ctrl-C and SIGTERM: the first asks for a clean end, the second ends the process at once with status 130.

A terminal that is closed (SIGHUP) asks for a clean end too, and never for one at once: the kernel and the shell tell it
both. Behind `nohup` it is ignored, and stays so.

Before there is anything to save, the first one already raises KeyboardInterrupt, since joining can wait for ever; and
before there is anything to let go, it ends the process, since an import may take an exception for a missing package.

Another process of this site may ask for the same (`Interrupts.ask`), which counts as no signal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

SHOW_CURSOR = b"\x1b[?25h"
HANGUP: int | None = getattr(signal, "SIGHUP", None)
"""None: this system has none."""


def end_signals() -> list[int]:
    """Those that ask for an end."""
    signals: list[int] = [signal.SIGINT, signal.SIGTERM]
    if HANGUP is not None and signal.getsignal(HANGUP) is not signal.SIG_IGN:
        signals.append(HANGUP)
    return signals


class Interrupts:
    """While entered, the signals are ours. Enter it on the main thread."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        """Set by the first signal, and where another process asks."""
        self.holds = False
        """Set by the owner once others, or child processes, are to be told of an end, or files are half written."""
        self.can_save = False
        """Set by the owner once a stop leads to a saved checkpoint, or to an end at which there is none to save."""
        self._signalled_once = False
        self._asked = False
        """The signal on its way is that of `ask`."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in end_signals():
            self._before[number] = signal.signal(number, self._signalled)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if isinstance(error, Exception) and self.stop.is_set() and not self.can_save:
            raise KeyboardInterrupt from None  # ours, which something on the way took for an error of its own

    def ask(self) -> None:
        """A clean end, asked for from another thread; a signal that comes as well is still the first one."""
        if self.stop.is_set():
            return
        self.stop.set()
        if not self.can_save:  # nobody may be looking at `stop`
            self._asked = True
            os.kill(os.getpid(), signal.SIGTERM)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        if number == HANGUP and self.stop.is_set():
            return
        asked, self._asked = self._asked or number == HANGUP, False
        if self._signalled_once and not asked:
            end_at_once(130)
        self._signalled_once = self._signalled_once or not asked
        self.stop.set()
        if not (self.holds or self.can_save):
            _say(b"dlc: interrupted\n")
            end_at_once(130)
        if not self.can_save:
            raise KeyboardInterrupt
        _say(b"\nleaving the run; once more to stop at once\n")


def end_at_once(status: int) -> None:
    """End the process, whatever its threads do."""
    if sys.stderr.isatty():
        _say(SHOW_CURSOR)  # the live table hides it
    os._exit(status)


@contextlib.contextmanager
def asked_to_stop() -> Iterator[threading.Event]:
    """Yields an event that Ctrl-C and SIGTERM set, to be looked at often. Enter it on the main thread.

    Python's own handler raises KeyboardInterrupt wherever the main thread is: while pyzmq checks a result, or in what
    runs around a fork, that is printed, and lost. The second signal raises it all the same.
    """
    stop = threading.Event()

    def signalled(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, signalled) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(text: bytes) -> None:
    """On stderr, if it can be said: Ctrl-C also ends the `tee` that a log is piped to, and a disk may be full. Raised
    here, that would come up anywhere in the training, which then would not end by a checkpoint."""
    with contextlib.suppress(OSError, ValueError):
        os.write(sys.stderr.fileno(), text)
