"""What comes before its time: a result before its plan, and what is for the slot after the one at hand.

Lanes do not wait for each other, and neither do peers. Such a message is kept, and handed on as if it came later. All
that one peer keeps so has one bound, in bytes, as there may be thousands that are small. What is over is as good as
lost: it is told again, sent again or fetched, but only once nothing else moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from dlc.comm.dropped import Dropped
from dlc.comm.ids import Voter
from dlc.comm.wire import pack

EARLY_BYTES_MAX = 128 << 20
"""Of all that is kept, with headers: more than the windows of seven contributors (`sender.WINDOW_BYTES`)."""
MESSAGE_BYTES = 512
"""What each takes beside the bytes that travelled, so that the empty ones are limited, too."""

M = TypeVar("M")


class Room:
    """For what several `Early` keep."""

    def __init__(self, dropped: Dropped) -> None:
        self.dropped = dropped
        self.used_bytes = 0


class Early(Generic[M]):
    """Messages that wait for one event, in the order in which they came."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._kept: list[tuple[Voter, M]] = []
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[tuple[Voter, M]]:
        return iter(self._kept)

    def keep(self, sender: Voter, message: M) -> None:
        size = size_of(message)
        if self._room.used_bytes + size > EARLY_BYTES_MAX:
            self._room.dropped.note(sender, "more than is kept of what comes too early")
            return
        self._kept.append((sender, message))
        self._bytes += size
        self._room.used_bytes += size

    def take(self) -> list[tuple[Voter, M]]:
        """All of it; nothing is kept any more."""
        kept, self._kept = self._kept, []
        self._room.used_bytes -= self._bytes
        self._bytes = 0
        return kept


def size_of(message: object) -> int:
    return MESSAGE_BYTES + len(pack(message)) + len(getattr(message, "payload", b""))
