"""Who averages under a prefix: each averager posts one notice about itself, and reads those of the others."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Sequence

from blake3 import blake3
from torch import Tensor

from dlc.compat.hivemind.averaging.allreduce import AveragingMode
from dlc.compat.hivemind.swarm import Swarm, key_of
from dlc.compat.hivemind.utils.serializer import MSGPackSerializer
from dlc.flat import identity

log = logging.getLogger(__name__)

TTL_S, REFRESH_S = 7 * 86400.0, 3600.0
"""Of a notice: a peer that is gone is not present any more, so this is only a bound for memory. Who averages posts it
again now and then."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """What an averager tells of itself."""

    bits: str
    """Group bits: averagers of equal bits meet."""
    mode: int
    """Value of its AveragingMode."""
    schema: str
    """Equal exactly where shapes, ties and codecs of the tensors are."""
    round: int = -1
    """The next round that it will join, where rounds are numbered (`Optimizer`); -1: they are not."""
    priority: float | None = None
    """As a donor of state; None: it gives none."""
    loading: bool = False
    """It is fetching state itself."""
    generation: int = 0
    """Greater than those of all whom it knew when it came."""
    averaged: int = -1
    """The last epoch whose gradients it has averaged; -1: none."""

    def __post_init__(self) -> None:
        """TypeError for what no correct peer posts: it is compared with mine."""
        numbers = (self.mode, self.round, self.averaged, self.generation)
        sound = type(self.bits) is str and type(self.schema) is str and all(type(n) is int for n in numbers)
        sound = sound and type(self.loading) is bool
        known = isinstance(self.priority, int | float | None) and self.priority == self.priority
        if not sound or not known:
            raise TypeError("no entry of an averager")


class Directory:
    """The averagers of one prefix, as seen by one of them."""

    def __init__(self, swarm: Swarm, prefix: str, entry: Entry) -> None:
        self._swarm, self._key = swarm, f"averagers/{key_of(prefix)}/"
        self._lock = threading.Lock()
        self._warned: set[str] = set()
        self.open = True
        self._posted = 0.0
        self._unsure = False
        """What the others have may not be `entry`: telling it failed, or was interrupted."""
        ages = [other.generation + 1 for other in self.others().values()]
        self.entry = dataclasses.replace(entry, generation=max(ages, default=0))
        self.change()

    def change(self, **changes: object) -> None:
        """Post my entry with these changes."""
        with self._lock:
            if not self.open:
                return
            entry = dataclasses.replace(self.entry, **changes)  # type: ignore[arg-type]
            if changes and entry == self.entry and not self._unsure:
                return
            before, self.entry, self._unsure = self.entry, entry, True
            try:
                self._swarm.post(self._key, MSGPackSerializer.dumps(list(dataclasses.astuple(entry))), TTL_S)
            except BaseException:  # it is still to be told
                self.entry = before
                raise
            self._posted, self._unsure = time.monotonic(), False

    def refresh(self) -> None:
        """Post my entry again, long before it ends."""
        if time.monotonic() - self._posted > REFRESH_S:
            self.change()

    def close(self) -> None:
        """I average no more."""
        with self._lock:
            self.open = False
            self._swarm.withdraw(self._key)

    def others(self) -> dict[str, Entry]:
        """Entries of the averagers that are alive, without mine, by peer id."""
        found = {}
        for notice in self._swarm.notices(self._key):
            if notice.lives and notice.author != self._swarm.id:
                entry = self._read(notice.author, notice.value)
                if entry is not None:
                    found[notice.author] = entry
        return found

    def is_reference(self) -> bool:
        """Of the donors with the greatest priority I am the eldest: whoever loads takes what I have."""
        entries = {**self.others(), self._swarm.id: self.entry}
        return min(entries, key=lambda peer: seniority(peer, entries[peer])) == self._swarm.id

    def expected(self, bits: str, number: int) -> frozenset[str]:
        """Who will come to round `number` of these bits, as far as they have said; I among them.

        Where rounds are numbered, that is who waits for this one and who is still busy with the one before it, but no
        auxiliary peer: it comes when it sees that it is needed, and is not waited for.
        """
        coming = {
            peer
            for peer, entry in self.others().items()
            if self._fits(peer, entry)
            and entry.bits == bits
            and (number < 0 or entry.mode != AveragingMode.AUX.value)
            and number - 1 <= entry.round <= number
        }
        return frozenset(coming | {self._swarm.id})

    def _fits(self, peer: str, entry: Entry) -> bool:
        if entry.schema != self.entry.schema and peer not in self._warned:
            self._warned.add(peer)
            log.warning(
                "%s has other shapes, dtypes, tied tensors, compression or averager under this prefix: it is not "
                "averaged with",
                peer[:8],
            )
        return entry.schema == self.entry.schema

    def _read(self, author: str, raw: bytes) -> Entry | None:
        try:
            return Entry(*MSGPackSerializer.loads(raw))
        except (ValueError, TypeError):
            if author not in self._warned:
                self._warned.add(author)
                log.warning("%s posted something that is no averager's notice; it is not looked at", author[:8])
            return None


def seniority(peer: str, entry: Entry) -> tuple[float, int, str]:
    """Least for the donor with the greatest priority, of several for the eldest."""
    return float("inf") if entry.priority is None else -entry.priority, entry.generation, peer


def schema_of(tensors: Sequence[Tensor], codecs: Sequence[str], scheme: str = "") -> str:
    """Hex digest of shapes, dtypes, codecs and which tensors are tied, and of the scheme of averaging, if it is not the
    plain one. Where they are tied on one peer only, that one could take but one of the means of the others."""
    rows: list[object] = [[list(t.shape), str(t.dtype), codec] for t, codec in zip(tensors, codecs, strict=True)]
    seen: dict[object, int] = {}
    places = [seen.setdefault(identity(tensor), i) for i, tensor in enumerate(tensors)]
    if len(seen) < len(places):
        rows.append(places)
    return blake3(MSGPackSerializer.dumps([*rows, scheme] if scheme else rows)).hexdigest(16)
