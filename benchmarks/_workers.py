"""Worker processes of a benchmark: they take lines on stdin and answer with events, one JSON object a line.

The benchmark starts its own file again for each worker. Nobody waits without a limit, a worker that ends is an error
unless it was expected, and no worker outlives the benchmark (dlc.monitor.children).
"""

from __future__ import annotations

import collections
import json
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from dlc.monitor.children import Children
from dlc.monitor.feed import Feed

WORKER = "--worker"
"""First argument of a benchmark that is started as a worker."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
LIMIT_S = 600.0
"""For a worker to start, or to finish one round, on a machine that others use too."""
_out = threading.Lock()


class WorkerLost(Exception):
    """A worker ended, or said nothing in time."""


def say(event: str, **fields: Any) -> None:
    """In a worker: tell the benchmark. Any thread may."""
    with _out:
        sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
        sys.stdout.flush()


class Workers:
    """Named workers of one script; leaving it ends them all."""

    def __init__(self, script: str, python: str = sys.executable) -> None:
        self._script, self._python = script, python
        self._children, self._feed = Children(), Feed()
        self._heard: dict[str, collections.deque[dict[str, Any]]] = {}
        self._ended: set[str] = set()
        self._folder = tempfile.TemporaryDirectory(prefix="dlc-workers-")

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._children.close()
        self._folder.cleanup()

    def start(self, name: str, *arguments: str, within: Sequence[str] = ()) -> None:
        """`within`: words before the command, such as those that put it into a network namespace."""
        command = [*within, self._python, self._script, WORKER, *arguments]
        stdout = self._children.start(name, command, self._log(name), ONE_THREAD, talk=True)
        self._heard[name] = collections.deque()
        self._ended.discard(name)
        self._feed.attach(name, stdout)

    def tell(self, name: str, line: str) -> None:
        self._children.tell(name, line)

    def signal(self, name: str, number: int) -> None:
        self._children.signal(name, number)

    def wait(self, name: str, event: str, limit_s: float = LIMIT_S) -> dict[str, Any]:
        """The worker's next event of this kind, with those before it dropped. WorkerLost if there will be none."""
        deadline = time.monotonic() + limit_s
        while True:
            heard = self._heard[name]
            while heard:
                found = heard.popleft()
                if found["event"] == event:
                    return found
            if name in self._ended:
                raise WorkerLost(f"{name} ended with {self._children.exit_code(name, 10.0)}: {self.said(name)}")
            if time.monotonic() > deadline:
                raise WorkerLost(f"{name} did not tell {event!r} within {limit_s:g} s: {self.said(name)}")
            self.pump(0.2)

    def pump(self, timeout_s: float) -> None:
        """Take what came within that time, or at once."""
        item = self._feed.get(timeout_s)
        if item is not None and item.event is None:
            self._ended.add(item.name)
        elif item is not None and item.event is not None:
            self._heard[item.name].append(item.event)

    def take(self) -> list[tuple[str, dict[str, Any]]]:
        """All that has come and nobody has waited for, by worker."""
        self.pump(0.0)
        taken = [(name, found) for name, heard in self._heard.items() for found in heard]
        for heard in self._heard.values():
            heard.clear()
        return taken

    def any_of(self, names: list[str], event: str, limit_s: float = LIMIT_S) -> tuple[str, dict[str, Any]]:
        """Which of these workers told this first; what they told before it stays."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            for name in names:
                for found in self._heard[name]:
                    if found["event"] == event:
                        return name, found
            self.pump(0.2)
        raise WorkerLost(f"nobody told {event!r} within {limit_s:g} s")

    def exit_code(self, name: str, limit_s: float = LIMIT_S) -> int | None:
        """Of a worker that ends by now; then its name may be used again. WorkerLost if it does not end."""
        deadline = time.monotonic() + limit_s
        while name not in self._ended:
            if time.monotonic() > deadline:
                raise WorkerLost(f"{name} did not end within {limit_s:g} s: {self.said(name)}")
            self.pump(0.2)
        return self._children.exit_code(name, 10.0)

    def said(self, name: str) -> str:
        """The end of a worker's stderr."""
        return " | ".join(self._log(name).read_text("utf-8", "replace").splitlines()[-4:])

    def _log(self, name: str) -> Path:
        return Path(self._folder.name, f"{name}.log")
