"""What `DHT.store` and `DHT.get` mean, over notices: a value under a key, or under a subkey of it, until it expires.

Every peer holds all notices, so there is no look-up and no replica. Of several values the one that expires last counts,
whoever wrote it; a value without a subkey and those with one exclude each other in the same way.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from dlc.compat.hivemind.swarm import Notice
from dlc.compat.hivemind.utils.serializer import MSGPackSerializer
from dlc.compat.hivemind.utils.timed_storage import ValueWithExpiration

log = logging.getLogger(__name__)

DIGEST_BYTES = 16
"""Of a key in the name of a notice: keys may be long, and of any type."""


@dataclass(frozen=True)
class Record:
    """What one notice holds."""

    key: Any
    subkey: Any
    """None: there is no subkey."""
    value: Any
    expiration: float
    """Seconds since 1970."""

    def to_bytes(self) -> bytes:
        return MSGPackSerializer.dumps([self.key, self.subkey, self.value, self.expiration])


def notice_key(key: Any, subkey: Any) -> str:
    return f"{notice_prefix(key)}{_digest(subkey)}"


def notice_prefix(key: Any) -> str:
    """Of the notices of a key with all its subkeys."""
    return f"dht/{_digest(key)}/"


def records(notices: Iterable[Notice], key: Any) -> list[Record]:
    """Those of `key`; what is no record is dropped, and its author named. Notices end by themselves: nobody's clock is
    compared with mine."""
    found = []
    for notice in notices:
        try:
            record = Record(*MSGPackSerializer.loads(notice.value))
            float(record.expiration)
        except (ValueError, TypeError):
            log.warning("%s stored something that is no record; it is not looked at", notice.author[:8])
            continue
        if record.key == key:
            found.append(record)
    return found


def newest(found: Iterable[Record]) -> ValueWithExpiration[Any] | None:
    """The value of the key; with subkeys a dict of such values."""
    by_subkey: dict[Any, Record] = {}
    for record in found:
        known = by_subkey.get(record.subkey)
        if known is None or _rank(record) > _rank(known):
            by_subkey[record.subkey] = record
    plain = by_subkey.pop(None, None)
    last = max((record.expiration for record in by_subkey.values()), default=-float("inf"))
    if plain is not None and plain.expiration >= last:
        return ValueWithExpiration(plain.value, plain.expiration)
    if not by_subkey:
        return None
    values = {subkey: ValueWithExpiration(record.value, record.expiration) for subkey, record in by_subkey.items()}
    return ValueWithExpiration(values, last)


def _rank(record: Record) -> tuple[float, bytes]:
    """By expiration; equal ones in an order that is the same on all peers."""
    return record.expiration, MSGPackSerializer.dumps(record.value)


def _digest(value: Any) -> str:
    return blake3(MSGPackSerializer.dumps(value)).hexdigest(DIGEST_BYTES)
