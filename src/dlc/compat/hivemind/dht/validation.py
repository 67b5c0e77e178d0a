"""What decides whether a value of the DHT is taken: each peer asks its own validators, for what it stores and reads.

A validator may add a signature to a value (`sign_value`), and takes it off again (`strip_value`). Several are asked
from the highest priority down, each seeing what is left when those before it have taken off theirs.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class DHTRecord:
    """A value on its way, as validators see it."""

    key: bytes
    """msgpack of the key; not a digest of it, as in Hivemind."""
    subkey: bytes
    """msgpack of the subkey; empty: there is none."""
    value: bytes
    """msgpack of the value, with what validators have added."""
    expiration_time: float
    """Seconds since 1970."""


class RecordValidatorBase(ABC):
    """Base of validators; those of a program's own need `validate` only. Called on any thread that uses the DHT."""

    @abstractmethod
    def validate(self, record: DHTRecord) -> bool:
        """Whether the record, as it came, is taken."""

    def sign_value(self, record: DHTRecord) -> bytes:
        """The value with what others' `validate` wants to see."""
        return record.value

    def strip_value(self, record: DHTRecord) -> bytes:
        """The value without what `sign_value` added."""
        return record.value

    @property
    def priority(self) -> int:
        """The highest is the last to sign, and the first to validate."""
        return 0

    def merge_with(self, other: RecordValidatorBase) -> bool:
        """Take over what `other` does; False: it stands beside this one."""
        return False


class CompositeValidator(RecordValidatorBase):
    """Several as one."""

    def __init__(self, validators: Iterable[RecordValidatorBase] = ()) -> None:
        self._validators: list[RecordValidatorBase] = []
        self.extend(validators)

    def extend(self, validators: Iterable[RecordValidatorBase]) -> None:
        """Ask these, too. TypeError: one of them is no validator."""
        together = list(self._validators)
        for new in validators:
            if not isinstance(new, RecordValidatorBase):
                raise TypeError(f"{type(new).__name__} is no RecordValidatorBase")
            if not any(known.merge_with(new) for known in together):
                together.append(new)
        self._validators = sorted(together, key=lambda validator: validator.priority)

    def validate(self, record: DHTRecord) -> bool:
        for validator in reversed(self._validators):
            if not validator.validate(record):
                return False
            record = dataclasses.replace(record, value=validator.strip_value(record))
        return True

    def sign_value(self, record: DHTRecord) -> bytes:
        for validator in self._validators:
            record = dataclasses.replace(record, value=validator.sign_value(record))
        return record.value

    def strip_value(self, record: DHTRecord) -> bytes:
        for validator in reversed(self._validators):
            record = dataclasses.replace(record, value=validator.strip_value(record))
        return record.value


__all__ = ["CompositeValidator", "DHTRecord", "RecordValidatorBase"]
