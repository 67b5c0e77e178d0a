"""The events of several `dlc join --json` processes, in one queue.

One thread for each stream reads lines and puts every JSON object among them into the queue, in order; the end of a
stream is an item too. A process that is killed leaves its last line torn, and a library may print to stdout what is no
JSON: the last of such lines are kept for the reader, and never stop a feed.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import IO, Any, NamedTuple

ITEMS_MAX = 10_000
"""Items that wait in the queue. Then readers stop reading, until the pipes are full and the children wait: a reader
that has stopped for so long has failed, and memory stays bounded."""
LINE_BYTES_MAX = 1 << 20
"""A round's report with hundreds of peers takes some 30 kB; what is longer is read in pieces, which are no JSON."""
STRAY_LINES_MAX = 20
"""Lines that are no events, kept per stream: enough for a traceback."""


class Item(NamedTuple):
    """One event of one stream."""

    name: str
    """Which stream."""
    at_s: float
    """When it was read, on the feed's clock."""
    event: dict[str, Any] | None
    """None: the stream has ended, nothing follows."""


class Feed:
    """Reads any number of streams. Close the streams' writing ends to end it; its threads are daemons."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._items: queue.Queue[Item] = queue.Queue(ITEMS_MAX)
        self._stray: dict[str, deque[str]] = {}

    def attach(self, name: str, stream: IO[bytes]) -> None:
        """Read `stream` to its end, as `name`; it is closed then."""
        self._stray[name] = deque(maxlen=STRAY_LINES_MAX)
        threading.Thread(target=self._read, args=(name, stream), name=f"feed-{name}", daemon=True).start()

    def get(self, timeout_s: float) -> Item | None:
        """The next item, or None if there is none for so long."""
        try:
            return self._items.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def stray(self, name: str) -> list[str]:
        """The last lines of a stream that were no events."""
        return list(self._stray.get(name, ()))

    def _read(self, name: str, stream: IO[bytes]) -> None:
        try:
            with stream:
                while line := stream.readline(LINE_BYTES_MAX):
                    event = parse_event(line)
                    if event is not None:
                        self._items.put(Item(name, self._clock(), event))
                    elif text := line.decode("utf-8", "replace").strip():
                        self._stray[name].append(text)
        except (OSError, ValueError):  # closed while it was read
            pass
        self._items.put(Item(name, self._clock(), None))


def parse_event(line: bytes) -> dict[str, Any] | None:
    """The event of one line, or None where it is torn or something else."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("event"), str) else None
