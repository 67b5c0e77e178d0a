"""Records that belong to a key: `RSASignatureValidator`."""

from __future__ import annotations

import dataclasses
import logging
import re

from dlc.compat.hivemind.dht.validation import DHTRecord, RecordValidatorBase
from dlc.compat.hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey
from dlc.compat.hivemind.utils.serializer import MSGPackSerializer

log = logging.getLogger(__name__)


class RSASignatureValidator(RecordValidatorBase):
    """Takes a record whose key or subkey names an owner, "[owner:ssh-rsa ...]", only with that owner's signature.

    private_key: with which this peer signs what it stores under its `local_public_key`; None: that of the process.
    Records without an owner are taken as they are.
    """

    PUBLIC_KEY_FORMAT = b"[owner:_key_]"
    SIGNATURE_FORMAT = b"[signature:_value_]"
    PUBLIC_KEY_REGEX = re.escape(PUBLIC_KEY_FORMAT).replace(b"_key_", rb"(.+?)")
    _PUBLIC_KEY = re.compile(PUBLIC_KEY_REGEX)
    _SIGNATURE = re.compile(rb"\[signature:([A-Za-z0-9+/=]+)\]\Z")

    def __init__(self, private_key: RSAPrivateKey | None = None) -> None:
        self._private_key = private_key or RSAPrivateKey.process_wide()
        own = self._private_key.get_public_key().to_bytes()
        self._local_public_key = self.PUBLIC_KEY_FORMAT.replace(b"_key_", own)

    @property
    def local_public_key(self) -> bytes:
        """To be a subkey, or a part of a key, of what only this peer may store."""
        return self._local_public_key

    def validate(self, record: DHTRecord) -> bool:
        owners = self._owners(record)
        if not owners:
            return True
        found = self._SIGNATURE.search(record.value)
        if len(owners) > 1 or found is None:
            log.debug("a record of %d owners has %s signature", len(owners), "a" if found else "no")
            return False
        try:
            key = RSAPublicKey.from_bytes(owners.pop())
        except ValueError as error:
            log.debug("a record names an owner that is no key: %s", error)
            return False
        return key.verify(_signed(record, record.value[: found.start()]), found[1])

    def sign_value(self, record: DHTRecord) -> bytes:
        if self._local_public_key not in record.key and self._local_public_key not in record.subkey:
            return record.value
        signature = self._private_key.sign(_signed(record, record.value))
        return record.value + self.SIGNATURE_FORMAT.replace(b"_value_", signature)

    def strip_value(self, record: DHTRecord) -> bytes:
        return self._SIGNATURE.sub(b"", record.value) if self._owners(record) else record.value

    @property
    def priority(self) -> int:
        """Before those that read the value."""
        return 10

    def merge_with(self, other: RecordValidatorBase) -> bool:
        """One is enough: it validates for all owners, and signs with the first one's key."""
        return isinstance(other, RSASignatureValidator)

    def _owners(self, record: DHTRecord) -> set[bytes]:
        return {*self._PUBLIC_KEY.findall(record.key), *self._PUBLIC_KEY.findall(record.subkey)}


def _signed(record: DHTRecord, value: bytes) -> bytes:
    """What is signed: the whole record, so that neither key nor end can be another."""
    return MSGPackSerializer.dumps(list(dataclasses.astuple(dataclasses.replace(record, value=value))))


__all__ = ["RSASignatureValidator"]
