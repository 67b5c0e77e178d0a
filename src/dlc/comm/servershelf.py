"""Payloads on their way between two peers: one holds them under a key, the other asks for them part by part.

    holder:   hold(key, ...)    PartReq ──> queue of that peer ──(link has room)──> Part        NoPart: no such key
    fetcher:  fetch(key, ...) ──> PartReq, a window of parts at once ──> Part ... ──> done(parts)

Nothing is sent that was not asked for, so a peer's memory holds what it asked for and no more. A part is taken if it
was asked of its sender and has the length that was agreed on; anything else is dropped and counted under the sender.
A holder that is silent is asked again, more and more patiently, `SILENCES_MAX` times; one that dies, or holds the
payload no longer, ends the fetch at once: `done(None)`. Whoever wanted it decides what then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from dlc.comm.codecbase import Payload
from dlc.comm.ids import PeerId, Voter
from dlc.comm.servermessages import NoPart, Part, PartReq
from dlc.errors import ProtocolError

WINDOW_BYTES = 4 << 20
"""Asked for and not arrived, per fetch: what a link of 300 Mbit/s carries in 100 ms."""
WINDOW_PARTS_MIN = 2
WINDOW_PARTS_MAX = 64
QUEUED_MAX = 4096
"""Parts that wait for one peer's link; more is asked for again."""
SILENCE_S = 2.0
"""Least silence after which parts are asked for again."""
SILENCES_MAX = 4
KEY_CHARS_MAX = 128
FETCHES_MAX = 8192
"""Under way from one holder: more than its spans, and updates of some of them."""

Done = Callable[[list[Payload] | None], None]
"""Takes the parts in order, or None: they cannot be had from there."""
Piece = Callable[[int], Payload]
"""The payload of a part."""


class Shelf:
    """What I hold for others."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[int, Piece]] = {}
        self._queues: dict[PeerId, dict[tuple[str, int], None]] = {}
        self.sent_bytes = 0

    def hold(self, key: str, n_parts: int, piece: Piece) -> None:
        self._held[key] = (n_parts, piece)

    def hold_parts(self, key: str, parts: Sequence[Payload]) -> None:
        self.hold(key, len(parts), parts.__getitem__)

    def drop(self, key: str) -> None:
        self._held.pop(key, None)

    def __contains__(self, key: str) -> bool:
        return key in self._held

    def receive_request(self, sender: Voter, m: PartReq) -> NoPart | None:
        """The answer, where there is one on the control lane."""
        if m.key not in self._held:
            return NoPart(m.key[:KEY_CHARS_MAX])
        n_parts = self._held[m.key][0]
        queue = self._queues.setdefault(sender.peer, {})
        for part in m.parts[:WINDOW_PARTS_MAX]:
            if 0 <= part < n_parts and len(queue) < QUEUED_MAX:
                queue[m.key, part] = None
        return None

    def pending(self) -> list[PeerId]:
        return [peer for peer, queue in self._queues.items() if queue]

    def next_bulk(self, peer: PeerId) -> Part | None:
        queue = self._queues.get(peer)
        while queue:
            key, part = next(iter(queue))
            del queue[key, part]
            if key in self._held:
                payload = self._held[key][1](part)
                self.sent_bytes += len(payload)
                return Part(key, part, cast(bytes, payload))
        return None

    def forget(self, peer: PeerId) -> None:
        self._queues.pop(peer, None)


@dataclass
class Fetch:
    holder: Voter
    key: str
    sizes: tuple[int, ...]
    done: Done
    heard_at: float
    parts: list[Payload | None] = field(default_factory=list)
    todo: list[int] = field(default_factory=list)
    """Parts still to be asked for, the next at the end."""
    asked: dict[int, None] = field(default_factory=dict)
    silences: int = 0

    @property
    def window(self) -> int:
        size = max(1, max(self.sizes, default=1))
        return max(WINDOW_PARTS_MIN, min(WINDOW_PARTS_MAX, WINDOW_BYTES // size))


class Fetches:
    """What I ask of others. `send(to, message)` sends on the control lane; `gone(holder)`: it has left for good."""

    def __init__(
        self,
        send: Callable[[Voter, object], None],
        rtt_s: Callable[[PeerId], float],
        gone: Callable[[Voter], bool],
    ) -> None:
        self._send, self._rtt_s, self._gone = send, rtt_s, gone
        self._all: dict[tuple[Voter, str], Fetch] = {}
        self._from: Counter[Voter] = Counter()
        """How many of them, by holder."""
        self.received_bytes = 0
        self.strays: dict[Voter, int] = {}
        """Parts that nobody asked for, by sender: late repetitions, mostly."""

    def fetch(self, holder: Voter, key: str, sizes: Sequence[int], done: Done, now: float) -> None:
        """Ask for all parts; a fetch of the same from the same that is under way goes on, and this one is no other.

        Parts of no bytes are not asked for. Above FETCHES_MAX of one holder it ends at once: done(None).
        """
        if (holder, key) in self._all:
            return
        if self._gone(holder) or self._from[holder] >= FETCHES_MAX:  # its offer comes after the news
            done(None)
            return
        fetch = Fetch(holder, key, tuple(sizes), done, now)
        fetch.parts = [None if size else b"" for size in sizes]
        fetch.todo = [i for i in reversed(range(len(sizes))) if sizes[i]]
        self._all[holder, key] = fetch
        self._from[holder] += 1
        self._go_on(fetch)

    def cancel(self, holder: Voter, key: str) -> None:
        if self._all.pop((holder, key), None) is not None:
            self._from[holder] -= 1
            if not self._from[holder]:
                del self._from[holder]

    @property
    def resting(self) -> bool:
        """Nothing is asked for."""
        return not self._all

    def busy(self, holder: Voter, key: str) -> bool:
        return (holder, key) in self._all

    def heard_at(self, holder: Voter, key: str) -> float | None:
        """When the last part of it came; None: no such fetch."""
        fetch = self._all.get((holder, key))
        return None if fetch is None else fetch.heard_at

    def receive(self, sender: Voter, m: Part, now: float) -> None:
        """ProtocolError for a part of another length than agreed."""
        fetch = self._all.get((sender, m.key))
        if fetch is None or m.part not in fetch.asked:
            self.strays[sender] = self.strays.get(sender, 0) + 1
            return
        if len(m.payload) != fetch.sizes[m.part]:
            raise ProtocolError(
                f"part {m.part} of {m.key} from {sender} has {len(m.payload)} bytes, not {fetch.sizes[m.part]}"
            )
        del fetch.asked[m.part]
        fetch.parts[m.part] = m.payload
        fetch.heard_at, fetch.silences = now, 0
        self.received_bytes += len(m.payload)
        self._go_on(fetch)

    def refused(self, sender: Voter, m: NoPart) -> None:
        fetch = self._all.get((sender, m.key))
        if fetch is not None:
            self._end(fetch, None)

    def lost(self, holder: Voter) -> None:
        """The holder is dead or has left."""
        self.strays.pop(holder, None)
        for fetch in [f for f in self._all.values() if f.holder == holder]:
            self._end(fetch, None)

    def tick(self, now: float) -> None:
        for fetch in list(self._all.values()):
            if now - fetch.heard_at > self._patience_s(fetch):
                if fetch.silences >= SILENCES_MAX:
                    self._end(fetch, None)
                    continue
                fetch.silences += 1
                fetch.heard_at = now
                fetch.todo.extend(reversed(fetch.asked))
                fetch.asked.clear()
                self._go_on(fetch)

    def next_deadline(self) -> float | None:
        return min((f.heard_at + self._patience_s(f) for f in self._all.values()), default=None)

    def _patience_s(self, fetch: Fetch) -> float:
        return float(max(SILENCE_S, 4 * self._rtt_s(fetch.holder.peer)) * 2**fetch.silences)

    def _go_on(self, fetch: Fetch) -> None:
        if not fetch.todo and not fetch.asked:
            self._end(fetch, [part for part in fetch.parts if part is not None])
            return
        room = fetch.window - len(fetch.asked)
        if not fetch.todo or room < min(len(fetch.todo), fetch.window // 2):
            return  # ask for half a window at once
        batch = [fetch.todo.pop() for _ in range(min(room, len(fetch.todo)))]
        fetch.asked.update(dict.fromkeys(batch))
        self._send(fetch.holder, PartReq(fetch.key, tuple(batch)))

    def _end(self, fetch: Fetch, parts: list[Payload] | None) -> None:
        self.cancel(fetch.holder, fetch.key)
        fetch.done(parts)
