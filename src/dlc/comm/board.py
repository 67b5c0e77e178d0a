"""A board of small notices: a key and an author to some bytes, with an expiration, on every peer.

An author sends a new notice to everybody who is up, in swarms larger than DIRECT_MAX to FANOUT at random, who hand it
on once; repeats it at growing intervals while it lives; and shows all its notices to whoever comes. So everybody has
it within a message's time, and after a loss within REPEAT_FIRST_S or little more. Of one author and key the newest
counts: greater (incarnation, seq). Nothing is agreed on: two authors may have one key, and readers see both.

A notice outlives the process that wrote it, until it expires; `Posted.author` tells who it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from dlc.comm.ground import Ground
from dlc.comm.ids import PeerId, Voter
from dlc.comm.meshmessages import Notice, Notices
from dlc.errors import ProtocolError, UsageError

DIRECT_MAX = 64
"""Largest swarm in which an author tells everybody itself."""
FANOUT = 4
"""Whom a new notice is handed on to in larger ones: after log_4 N steps all but a few per cent have it."""
REPEAT_FIRST_S, REPEAT_MAX_S = 0.5, 8.0
"""Between two repeats of an author's own notice; doubled from the first to the last."""
VALUE_BYTES_MAX = 64 << 10
KEY_CHARS_MAX = 256
NOTICES_MAX = 4096
"""Of one author."""
AUTHOR_BYTES_MAX = 4 << 20
TTL_S_MAX = 7 * 86400.0
MESSAGE_BYTES_MAX = 256 << 10
"""Values of one message together."""


@dataclass(frozen=True, slots=True)
class Posted:
    """A notice as it is kept here."""

    author: Voter
    seq: int
    until: float
    """Of my own clock."""
    gone: bool
    value: bytes

    @property
    def version(self) -> tuple[int, int]:
        return self.author.inc, self.seq


@dataclass(slots=True)
class Repeat:
    at: float
    gap_s: float


class Board:
    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self._by_key: dict[str, dict[PeerId, Posted]] = {}
        self._sizes: dict[PeerId, tuple[int, int]] = {}
        """Per author: notices, and bytes of them."""
        self._repeats: dict[str, Repeat] = {}
        """Of my own notices."""
        self._seq = 0
        self._expire_at = math.inf

    # ---------------------------------------------------------------- mine

    def post(self, key: str, value: bytes, ttl_s: float) -> None:
        """Show `value` under `key` to everybody for `ttl_s` seconds; replaces my notice of that key."""
        if not 0 < ttl_s <= TTL_S_MAX:
            raise UsageError(f"a notice lives for up to {TTL_S_MAX:g} s, not {ttl_s:g}")
        if len(value) > VALUE_BYTES_MAX or len(key) > KEY_CHARS_MAX:
            raise UsageError(f"a notice has up to {VALUE_BYTES_MAX} bytes, its key {KEY_CHARS_MAX} characters")
        mine, before = self.ground.me, self._by_key.get(key, {}).get(self.ground.me.peer)
        number, size = self._sizes.get(mine.peer, (0, 0))
        number, size = number + (before is None), size + len(value) - (len(before.value) if before else 0)
        if number > NOTICES_MAX or size > AUTHOR_BYTES_MAX:
            raise UsageError(f"one peer may have {NOTICES_MAX} notices of {AUTHOR_BYTES_MAX} bytes together")
        self._say(key, value, False, self.ground.now + ttl_s)

    def withdraw(self, key: str) -> None:
        """My notice of this key is no longer shown anywhere."""
        mine = self._by_key.get(key, {}).get(self.ground.me.peer)
        if mine is not None and not mine.gone:
            self._say(key, b"", True, mine.until)

    def _say(self, key: str, value: bytes, gone: bool, until: float) -> None:
        self._seq += 1
        self._keep(key, Posted(self.ground.me, self._seq, until, gone, value))
        self._repeats[key] = Repeat(self.ground.now + REPEAT_FIRST_S, REPEAT_FIRST_S)
        self._tell(self._audience(), (key,))

    # ---------------------------------------------------------------- what is known

    def get(self, key: str) -> dict[PeerId, Posted]:
        """By author: what is shown under this key now."""
        now = self.ground.now
        return {peer: p for peer, p in self._by_key.get(key, {}).items() if not p.gone and p.until > now}

    def keys(self, prefix: str) -> list[str]:
        return sorted(key for key in self._by_key if key.startswith(prefix) and self.get(key))

    # ---------------------------------------------------------------- the machine

    def receive(self, message: Notices) -> list[str]:
        """Keys under which something has changed."""
        for item in message.items:
            if not (0 <= item.left_s <= TTL_S_MAX and len(item.value) <= VALUE_BYTES_MAX and item.seq > 0):
                raise ProtocolError("a notice out of bounds")
            if len(item.key) > KEY_CHARS_MAX:
                raise ProtocolError(f"a notice with a key of {len(item.key)} characters")
        changed = [item.key for item in message.items if self._take(item)]
        if changed and len(self.ground.members.records()) > DIRECT_MAX:
            self._pass_on(message.items, set(changed))
        return changed

    def member_up(self, voter: Voter) -> None:
        """Whoever comes is shown what is mine."""
        self._tell([voter], self._repeats)

    def tick(self) -> None:
        now = self.ground.now
        if now >= self._expire_at:
            self._expire()
        due = [key for key, repeat in self._repeats.items() if repeat.at <= now]
        for key in due:
            repeat = self._repeats[key]
            repeat.gap_s = min(2 * repeat.gap_s, REPEAT_MAX_S)
            repeat.at = now + repeat.gap_s
        if due:
            self._tell(self._audience(), due)

    def next_deadline(self) -> float:
        return min((repeat.at for repeat in self._repeats.values()), default=self._expire_at)

    # ---------------------------------------------------------------- inside

    def _take(self, item: Notice) -> bool:
        author = item.author
        if author.peer == self.ground.me.peer or item.left_s <= 0:
            return False
        before = self._by_key.get(item.key, {}).get(author.peer)
        posted = Posted(author, item.seq, self.ground.now + item.left_s, item.gone, item.value)
        if before is not None and before.version >= posted.version:
            return False
        number, size = self._sizes.get(author.peer, (0, 0))
        if before is None and number >= NOTICES_MAX or size + len(item.value) > AUTHOR_BYTES_MAX:
            self.ground.dropped[author.peer, "too many notices"] += 1
            return False
        self._keep(item.key, posted)
        return True

    def _keep(self, key: str, posted: Posted) -> None:
        peer, by_author = posted.author.peer, self._by_key.setdefault(key, {})
        before = by_author.get(peer)
        number, size = self._sizes.get(peer, (0, 0))
        by_author[peer] = posted
        size += len(posted.value) - (len(before.value) if before else 0)
        self._sizes[peer] = (number + (before is None), size)
        self._expire_at = min(self._expire_at, posted.until)

    def _expire(self) -> None:
        now, self._expire_at = self.ground.now, math.inf
        for key, by_author in list(self._by_key.items()):
            for peer, posted in list(by_author.items()):
                if posted.until > now:
                    self._expire_at = min(self._expire_at, posted.until)
                    continue
                del by_author[peer]
                number, size = self._sizes[peer]
                self._sizes[peer] = (number - 1, size - len(posted.value))
                if number == 1:
                    del self._sizes[peer]
                if posted.author == self.ground.me:
                    self._repeats.pop(key, None)
            if not by_author:
                del self._by_key[key]

    def _audience(self) -> list[Voter]:
        others = self.ground.up()
        return others if len(others) < DIRECT_MAX else self.ground.rng.sample(others, FANOUT)

    def _tell(self, audience: Iterable[Voter], keys: Iterable[str]) -> None:
        mine, now, peer = list[Notice](), self.ground.now, self.ground.me.peer
        for key in keys:
            posted = self._by_key[key].get(peer)
            if posted is not None and posted.until > now:
                mine.append(Notice(posted.author, key, posted.seq, posted.until - now, posted.gone, posted.value))
        messages = [Notices(part) for part in _parts(mine)]
        for voter in audience:
            for message in messages:
                self.ground.send(voter, message)

    def _pass_on(self, items: Iterable[Notice], changed: set[str]) -> None:
        others = self.ground.up()
        news = tuple(item for item in items if item.key in changed)
        for voter in self.ground.rng.sample(others, min(FANOUT, len(others))):
            self.ground.send(voter, Notices(news))


def _parts(notices: list[Notice]) -> list[tuple[Notice, ...]]:
    """Divided so that no message is too long."""
    parts: list[list[Notice]] = []
    size = MESSAGE_BYTES_MAX
    for notice in notices:
        n_bytes = len(notice.value) + len(notice.key) + 64
        if size + n_bytes > MESSAGE_BYTES_MAX:
            parts.append([])
            size = 0
        parts[-1].append(notice)
        size += n_bytes
    return [tuple(part) for part in parts]
