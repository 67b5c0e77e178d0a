"""Who watches the members of a run: callbacks, on a thread that waits for nobody else.

The driver thread only puts changes into a queue; a callback may take its time, and may call the peer. The thread begins
with the first callback and ends with the peer.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from dlc.comm.events import MemberDown, MemberLeft, MemberUp
from dlc.comm.ids import PeerId, Voter

log = logging.getLogger(__name__)

Kind = Literal["up", "down", "left"]
_KINDS: dict[type[object], Kind] = {MemberUp: "up", MemberDown: "down", MemberLeft: "left"}


@dataclass(frozen=True)
class MemberChange:
    """What became of one other member, as seen from this peer. A suspicion that proved wrong is no change."""

    peer: PeerId
    """Its id."""
    kind: Kind
    """"up": it answers, for the first time or again; "down": it does not answer any more; "left": it said goodbye."""


Callback = Callable[[MemberChange], None]


class MemberWatch:
    """The callbacks of one peer. `tell` and `close` do not block; `up`: the members that answer at first."""

    def __init__(self, up: Iterable[Voter]) -> None:
        self._up = set(up)
        self._callbacks: dict[object, Callback] = {}
        self._lock = threading.Lock()
        self._changes: queue.SimpleQueue[MemberChange | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="dlc-members", daemon=True)
        self._thread.start()

    def add(self, callback: Callback) -> Callable[[], None]:
        """Call it with each change from now on; the result ends that, and may be called twice."""
        key = object()  # the same function may be added twice
        with self._lock:
            self._callbacks = {**self._callbacks, key: callback}

        def remove() -> None:
            with self._lock:
                self._callbacks = {k: known for k, known in self._callbacks.items() if k is not key}

        return remove

    def tell(self, event: MemberUp | MemberDown | MemberLeft) -> None:
        """On the driver thread."""
        kind = _KINDS[type(event)]
        if (kind == "up") == (event.voter in self._up):
            return
        (self._up.add if kind == "up" else self._up.discard)(event.voter)
        self._changes.put(MemberChange(event.voter.peer, kind))

    def close(self, timeout_s: float) -> None:
        """End the thread after what was told; a callback that is at work is waited for no longer than `timeout_s`."""
        self._changes.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (change := self._changes.get()) is not None:
            for callback in self._callbacks.values():
                try:
                    callback(change)
                except BaseException:  # sys.exit(), which would end this thread, too
                    log.exception("a callback of on_member_change failed at %s", change)
