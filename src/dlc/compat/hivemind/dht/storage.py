"""What `DHT.store` and `DHT.get` mean, over notices: a value under a key, or under a subkey of it, until it expires.

Every peer holds all notices, so there is no look-up and no replica; those of who is gone are said on by others. Of
several values the one that expires last counts, whoever wrote it; a value without a subkey and those with one exclude
each other in the same way.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from blake3 import blake3

from dlc.compat.hivemind.dht.validation import DHTRecord, RecordValidatorBase
from dlc.compat.hivemind.swarm import VALUES, Notice
from dlc.compat.hivemind.utils.serializer import MSGPackSerializer
from dlc.compat.hivemind.utils.timed_storage import ValueWithExpiration
from dlc.errors import DlcError

log = logging.getLogger(__name__)

NEVER = -float("inf")
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

    def to_bytes(self, validator: RecordValidatorBase) -> bytes | None:
        """For a notice, signed; None: the validator does not take it."""
        plain = _as_validated(self.key, self.subkey, MSGPackSerializer.dumps(self.value), self.expiration)
        signed = replace(plain, value=validator.sign_value(plain))
        if not validator.validate(signed):
            return None
        return MSGPackSerializer.dumps([self.key, self.subkey, signed.value, self.expiration])

    @classmethod
    def from_bytes(cls, raw: bytes, validator: RecordValidatorBase) -> Record | None:
        """Of a notice; None: the validator does not take it. ValueError or TypeError: it is no record."""
        key, subkey, value, expiration = MSGPackSerializer.loads(raw)
        hash(subkey)  # TypeError: no peer of ours stores such a one
        if not isinstance(value, bytes):
            raise TypeError("the value is not packed")
        if type(expiration) is not float or expiration != expiration:
            raise TypeError("it ends at no time")
        found = _as_validated(key, subkey, value, expiration)
        if not validator.validate(found):
            return None
        return cls(key, subkey, MSGPackSerializer.loads(validator.strip_value(found)), expiration)


def _as_validated(key: Any, subkey: Any, value: bytes, expiration: float) -> DHTRecord:
    packed = b"" if subkey is None else MSGPackSerializer.dumps(subkey)
    return DHTRecord(MSGPackSerializer.dumps(key), packed, value, expiration)


def notice_key(key: Any, subkey: Any) -> str:
    return f"{notice_prefix(key)}{_digest(subkey)}"


def notice_prefix(key: Any) -> str:
    """Of the notices of a key with all its subkeys."""
    return f"{VALUES}{_digest(key)}/"


def records(notices: Iterable[Notice], key: Any, validator: RecordValidatorBase, warned: set[str]) -> list[Record]:
    """Those of `key` that the validator takes. What is no record is dropped, and so is what it does not take, or fails
    at; the author is named once, and is in `warned` then: the same is read again and again. Notices end by themselves:
    nobody's clock is compared with mine."""
    found = []
    for notice in notices:
        author, told = notice.author[:8], notice.author in warned
        try:
            record = Record.from_bytes(notice.value, validator)
        except (ValueError, TypeError, DlcError):
            if not told:
                log.warning("%s stored something that is no record; it is not looked at", author)
        except Exception:
            if not told:
                log.exception("a validator failed at what %s stored; it is not looked at", author)
        else:
            if record is not None:
                found += [record] if record.key == key else []
                continue
            if not told:
                log.warning("what %s stored is refused by a validator", author)
        warned.add(notice.author)
    return found


def newest(found: Iterable[Record]) -> ValueWithExpiration[Any] | None:
    """The value of the key; with subkeys a dict of such values."""
    by_subkey: dict[Any, Record] = {}
    for record in found:
        known = by_subkey.get(record.subkey)
        if known is None or _rank(record) > _rank(known):
            by_subkey[record.subkey] = record
    plain = by_subkey.pop(None, None)
    last = max((record.expiration for record in by_subkey.values()), default=NEVER)
    if plain is not None and plain.expiration >= last:
        return ValueWithExpiration(plain.value, plain.expiration)
    if not by_subkey:
        return None
    values = {subkey: ValueWithExpiration(record.value, record.expiration) for subkey, record in by_subkey.items()}
    return ValueWithExpiration(values, last)


def is_plain(found: Iterable[Record]) -> bool:
    """A value without a subkey is what `newest` gives."""
    plain, last = _ends(found)
    return plain > NEVER and plain >= last


def hidden_until(found: Sequence[Record], subkey: Any) -> float:
    """What is stored under this subkey and ends no later than that is not what `newest` gives."""
    if subkey is None:
        return max(_ends(found))
    own = max((record.expiration for record in found if record.subkey == subkey), default=NEVER)
    return max(own, _ends(found)[0]) if is_plain(found) else own


def _ends(found: Iterable[Record]) -> tuple[float, float]:
    """When the last one without a subkey ends, and the last one with one."""
    ends = {True: NEVER, False: NEVER}
    for record in found:
        plain = record.subkey is None
        ends[plain] = max(ends[plain], record.expiration)
    return ends[True], ends[False]


def _rank(record: Record) -> tuple[float, bytes]:
    """By expiration; equal ones in an order that is the same on all peers."""
    return record.expiration, MSGPackSerializer.dumps(record.value)


def _digest(value: Any) -> str:
    return blake3(MSGPackSerializer.dumps(value)).hexdigest(DIGEST_BYTES)
