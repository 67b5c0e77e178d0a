"""A board of small notices: a key and an author to some bytes, with an expiration, on every peer.

An author sends a new notice to everybody who is up, in swarms larger than DIRECT_MAX to FANOUT at random, who hand it
on once; repeats it at growing intervals while it lives, in large swarms to SLICE others in turn; and shows all its
notices to whoever comes. So everybody has it within a message's time, after a loss within REPEAT_FIRST_S or little
more; in large swarms all but a few per cent within some messages' time, and these when their turn comes. Of one author
and key the newest counts: greater (incarnation, seq). Nothing is agreed on: two authors may have one key, and readers
see both.

Who hands a notice on could say what it likes in its author's name, and hide all that the author says there until that
ends. So in small swarms, where nobody hands on, each is heard for itself alone. In large ones nothing is taken of a
process that no record tells of, and an author whose word is older than what is kept of it is shown that: then it says
it again, as a newer one. What it says itself takes the place of what others said in its name where there is no more
room for it.

A notice may be for some peers only (`to`), such as those that are expected in a group: they alone are told, and whoever
shows a notice of that kind under the same key.

A notice outlives the process that wrote it, until it expires; `Posted.author` tells who it was. Who comes later
sees such a one only where it is of those that others say on (`heirs`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from dlc.comm.ground import Ground
from dlc.comm.ids import PeerId, Voter
from dlc.comm.meshmessages import Notice, Notices
from dlc.comm.wire import size_of
from dlc.errors import ProtocolError, UsageError

DIRECT_MAX = 64
"""Largest swarm in which an author tells everybody itself."""
FANOUT = 4
"""Whom a new notice is handed on to in larger ones: after log_4 N steps all but a few per cent have it."""
SLICE = 16
"""Whom a repeat is told to in larger ones."""
REPEAT_FIRST_S, REPEAT_MAX_S = 0.5, 8.0
"""Between two repeats of an author's own notice; doubled from the first to the last."""
VALUE_BYTES_MAX = 64 << 10
KEY_CHARS_MAX = 256
NOTICES_MAX = 4096
"""Of one author."""
AUTHOR_BYTES_MAX = 4 << 20
TTL_S_MAX = 7 * 86400.0
SEQ_MAX, PASSED_ON_SEQ_MAX = 1 << 62, 1 << 61
"""Of a notice that its author sends, and of one that another hands on: there is always room above the latter."""
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
    near: bool = False
    heard: bool = True
    """From its author itself."""

    @property
    def version(self) -> tuple[int, int]:
        return self.author.inc, self.seq


@dataclass(slots=True)
class Repeat:
    at: float
    gap_s: float
    to: set[PeerId] | None
    """Whom it is for; None: everybody."""


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
        self._turn = 0
        """Where the next slice begins."""

    # ---------------------------------------------------------------- mine

    def post(self, key: str, value: bytes, ttl_s: float, to: Iterable[PeerId] | None = None) -> None:
        """Show `value` under `key` for `ttl_s` seconds, to everybody or to these; replaces my notice of that key."""
        if not 0 < ttl_s <= TTL_S_MAX:
            raise UsageError(f"a notice lives for up to {TTL_S_MAX:g} s, not {ttl_s:g}")
        if len(value) > VALUE_BYTES_MAX or not size_of(key) or len(key) > KEY_CHARS_MAX:
            raise UsageError(
                f"a notice has up to {VALUE_BYTES_MAX} bytes, its key is a string of 1 to {KEY_CHARS_MAX} characters, "
                f"not {key!r:.60}"
            )
        if not self._has_room(key, self.ground.me.peer, value):
            raise UsageError(f"one peer may have {NOTICES_MAX} notices of {AUTHOR_BYTES_MAX} bytes together")
        self._say(key, value, False, self.ground.now + ttl_s, None if to is None else set(to))

    def withdraw(self, key: str, told_s: float = math.inf) -> None:
        """My notice of this key is no longer shown anywhere. told_s: that is told, and known, for so long at most; who
        was cut off until then sees the notice until it ends."""
        mine = self._by_key.get(key, {}).get(self.ground.me.peer)
        if mine is not None and not mine.gone:
            self._say(key, b"", True, min(mine.until, self.ground.now + told_s), self._repeats[key].to)

    def say_on(self, key: str, posted: Posted) -> int:
        """Show what another has shown under the key in my own name, until it would have ended: the number of my notice.
        0: the half of what one peer may have that is not for what is its own has no room."""
        number, size = self._sizes_with(key, self.ground.me.peer, posted.value)
        if 2 * number > NOTICES_MAX or 2 * size > AUTHOR_BYTES_MAX:
            return 0
        self._say(key, posted.value, False, posted.until, None)
        return self._seq

    def _say(self, key: str, value: bytes, gone: bool, until: float, to: set[PeerId] | None) -> None:
        self._seq += 1
        self._keep(key, Posted(self.ground.me, self._seq, until, gone, value, to is not None))
        self._repeats[key] = Repeat(self.ground.now + REPEAT_FIRST_S, REPEAT_FIRST_S, to)
        self._spread([key], first=True)

    # ---------------------------------------------------------------- what is known

    def get(self, key: str) -> dict[PeerId, Posted]:
        """By author: what is shown under this key now."""
        now = self.ground.now
        return {peer: p for peer, p in self._by_key.get(key, {}).items() if not p.gone and p.until > now}

    def keys(self, prefix: str) -> list[str]:
        return sorted(key for key in self._by_key if key.startswith(prefix) and self.get(key))

    # ---------------------------------------------------------------- the machine

    def receive(self, sender: Voter, message: Notices) -> list[str]:
        """Keys under which something has changed."""
        for item in message.items:
            if not (0 <= item.left_s <= TTL_S_MAX and len(item.value) <= VALUE_BYTES_MAX and 0 < item.seq < SEQ_MAX):
                raise ProtocolError("a notice out of bounds")
            if len(item.key) > KEY_CHARS_MAX:
                raise ProtocolError(f"a notice with a key of {len(item.key)} characters")
        taken = [item for item in message.items if self._take(sender, item)]
        for item in message.items:
            mine = self._repeats.get(item.key)
            near = item.near and item.author == sender
            if near and mine is not None and mine.to is not None and sender.peer not in mine.to:
                mine.to.add(sender.peer)
                self._tell([sender], (item.key,))
        if taken and len(self.ground.members.records()) > DIRECT_MAX:
            self._pass_on(taken)
        return [item.key for item in taken]

    def member_up(self, voter: Voter) -> None:
        """Whoever comes is shown what is mine."""
        self._tell([voter], [k for k, repeat in self._repeats.items() if repeat.to is None or voter.peer in repeat.to])

    def tick(self) -> None:
        now = self.ground.now
        if now >= self._expire_at:
            self._expire()
        due = [key for key, repeat in self._repeats.items() if repeat.at <= now]
        for key in due:
            repeat = self._repeats[key]
            repeat.gap_s = min(2 * repeat.gap_s, REPEAT_MAX_S)
            repeat.at = now + repeat.gap_s
        self._spread(due, first=False)

    def next_deadline(self) -> float:
        return min((repeat.at for repeat in self._repeats.values()), default=self._expire_at)

    # ---------------------------------------------------------------- inside

    def _take(self, sender: Voter, item: Notice) -> bool:
        author = item.author
        if item.left_s <= 0:
            return False
        if author.peer == self.ground.me.peer:
            self._refute(item)
            return False
        record = self.ground.members.record(author.peer)
        if record is None:  # it repeats what it says until I know it
            self.ground.dropped["", "a notice of somebody whose record is not known"] += 1
            return False
        if author != sender and (author.inc > record.voter.inc or not self._passable(item)):
            self.ground.dropped[sender.peer, "a notice in another's name"] += 1
            return False
        before = self._by_key.get(item.key, {}).get(author.peer)
        heard, until = author == sender, self.ground.now + item.left_s
        posted = Posted(author, item.seq, until, item.gone, item.value, item.near, heard)
        same = before is not None and before.version == posted.version and heard and not before.heard
        if before is not None and before.version >= posted.version and not same:
            if before.version > posted.version and before.author == sender and before.until > self.ground.now:
                self.ground.send(sender, Notices((self._told(item.key, before),)))
            return False
        if not (self._has_room(item.key, author.peer, item.value) or (heard and self._made_room(item))):
            self.ground.dropped[author.peer, "too many notices"] += 1
            return False
        self._keep(item.key, posted)
        return not same

    def _passable(self, item: Notice) -> bool:
        """Whether another than its author may send it. Peers differ a little in how many they know."""
        return len(self.ground.members.records()) > DIRECT_MAX // 2 and item.seq < PASSED_ON_SEQ_MAX

    def _refute(self, item: Notice) -> None:
        """Somebody keeps this as a notice of mine. If I show one under the key that it would hide, I say mine again, as
        a newer one."""
        mine = self._by_key.get(item.key, {}).get(self.ground.me.peer)
        if mine is None or item.author != self.ground.me or not mine.seq < item.seq < PASSED_ON_SEQ_MAX:
            return
        self._seq = max(self._seq, item.seq)
        self._say(item.key, mine.value, mine.gone, mine.until, self._repeats[item.key].to)

    def _has_room(self, key: str, peer: PeerId, value: bytes) -> bool:
        number, size = self._sizes_with(key, peer, value)
        return number <= NOTICES_MAX and size <= AUTHOR_BYTES_MAX

    def _made_room(self, item: Notice) -> bool:
        """For what its author says itself, in place of what others said in its name: if that is true, it says it."""
        peer = item.author.peer
        for key in [key for key, by_author in self._by_key.items() if peer in by_author and key != item.key]:
            if not self._by_key[key][peer].heard:
                self._drop(key, peer)
                if self._has_room(item.key, peer, item.value):
                    return True
        return False

    def _sizes_with(self, key: str, peer: PeerId, value: bytes) -> tuple[int, int]:
        """An author's notices and bytes, with this value in the place of what it shows under the key."""
        before = self._by_key.get(key, {}).get(peer)
        number, size = self._sizes.get(peer, (0, 0))
        return number + (before is None), size + len(value) - (len(before.value) if before else 0)

    def _keep(self, key: str, posted: Posted) -> None:
        peer = posted.author.peer
        self._sizes[peer] = self._sizes_with(key, peer, posted.value)
        self._by_key.setdefault(key, {})[peer] = posted
        self._expire_at = min(self._expire_at, posted.until)

    def _expire(self) -> None:
        now, self._expire_at = self.ground.now, math.inf
        for key, by_author in list(self._by_key.items()):
            for peer, posted in list(by_author.items()):
                if posted.until > now:
                    self._expire_at = min(self._expire_at, posted.until)
                    continue
                self._drop(key, peer)
                if posted.author == self.ground.me:
                    self._repeats.pop(key, None)

    def _drop(self, key: str, peer: PeerId) -> None:
        """Keep it no longer."""
        posted = self._by_key[key].pop(peer)
        if not self._by_key[key]:
            del self._by_key[key]
        number, size = self._sizes[peer]
        self._sizes[peer] = (number - 1, size - len(posted.value))
        if number == 1:
            del self._sizes[peer]

    def _spread(self, keys: list[str], first: bool) -> None:
        """Tell those whom these notices of mine are for."""
        if not keys:
            return
        others = self.ground.up()
        public = [key for key in keys if self._repeats[key].to is None]
        if public:
            self._tell(self._audience(others, first), public)
        for key in keys:
            to = self._repeats[key].to
            if to is not None:
                self._tell([voter for voter in others if voter.peer in to], (key,))

    def _audience(self, others: list[Voter], first: bool) -> list[Voter]:
        if len(others) < DIRECT_MAX:
            return others
        if first:
            return self.ground.rng.sample(others, FANOUT)
        start = self._turn % len(others)
        self._turn = start + SLICE
        return (others + others)[start : start + SLICE]

    def _tell(self, audience: Iterable[Voter], keys: Iterable[str]) -> None:
        mine, now, me = list[Notice](), self.ground.now, self.ground.me
        for key in keys:
            posted = self._by_key[key].get(me.peer)
            if posted is not None and posted.until > now:
                mine.append(self._told(key, posted))
        messages = [Notices(part) for part in _parts(mine)]
        for voter in audience:
            for message in messages:
                self.ground.send(voter, message)

    def _told(self, key: str, posted: Posted) -> Notice:
        left_s = posted.until - self.ground.now
        return Notice(posted.author, key, posted.seq, left_s, posted.gone, posted.near, posted.value)

    def _pass_on(self, items: Iterable[Notice]) -> None:
        others = self.ground.up()
        news = tuple(item for item in items if not item.near and item.seq < PASSED_ON_SEQ_MAX)
        if not news:
            return
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
