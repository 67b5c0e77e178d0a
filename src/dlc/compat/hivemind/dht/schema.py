"""Records that have the form of a pydantic model: `SchemaValidator`, which needs pip install 'pydantic>=2'."""

from __future__ import annotations

import logging
import re
from typing import Annotated, Any

from dlc.compat.hivemind.dht.crypto import RSASignatureValidator
from dlc.compat.hivemind.dht.validation import DHTRecord, RecordValidatorBase
from dlc.compat.hivemind.utils.serializer import MSGPackSerializer
from dlc.errors import UsageError

log = logging.getLogger(__name__)


class SchemaValidator(RecordValidatorBase):
    """Takes under the key of each field of `schema`, a pydantic model, only what that field takes.

    The key of a field is "PREFIX_NAME", without prefix "NAME". Values that were stored with subkeys are the entries of
    a field that is a dict. A value that pydantic would have to convert is refused. allow_extra_keys: take what is
    stored under keys that no field has.

    UsageError: `schema` is no model of pydantic 2. ModuleNotFoundError: pydantic is not installed.
    """

    def __init__(self, schema: type[Any], allow_extra_keys: bool = True, prefix: str | None = None) -> None:
        if not (isinstance(schema, type) and issubclass(schema, _pydantic().BaseModel)):
            raise UsageError(f"SchemaValidator takes a class that is derived from pydantic.BaseModel, not {schema!r}")
        keys = {name: name if prefix is None else f"{prefix}_{name}" for name in schema.model_fields}
        self._fields: list[tuple[bytes, type[Any], str]] = [
            (MSGPackSerializer.dumps(key), schema, name) for name, key in keys.items()
        ]
        """Packed key, model and field; several of one key after `merge_with`."""
        self._allow_extra_keys = allow_extra_keys

    def validate(self, record: DHTRecord) -> bool:
        fields = [(schema, name) for key, schema, name in self._fields if key == record.key]
        if not fields:
            return self._allow_extra_keys
        try:
            value = MSGPackSerializer.loads(record.value)
            if record.subkey:
                value = {MSGPackSerializer.loads(record.subkey): value}
        except (ValueError, TypeError) as error:
            log.debug("a value that has a schema cannot be read: %s", error)
            return False
        return any(_fits(schema, name, value) for schema, name in fields)

    def merge_with(self, other: RecordValidatorBase) -> bool:
        """Where both know a key, what either takes is taken."""
        if not isinstance(other, SchemaValidator):
            return False
        self._fields = self._fields + other._fields
        self._allow_extra_keys = self._allow_extra_keys and other._allow_extra_keys
        return True


def _fits(schema: type[Any], name: str, value: Any) -> bool:
    model = schema.model_construct()  # with this field alone: the others are under keys of their own
    try:
        schema.__pydantic_validator__.validate_assignment(model, name, value)
    except _pydantic().ValidationError as error:
        log.debug("a value is refused: %s", error)
        return False
    (taken,) = model.model_dump(include={name}, by_alias=True).values()
    return bool(taken == value)


def _pydantic() -> Any:
    try:
        import pydantic
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}: pip install 'pydantic>=2'", name=error.name) from error
    if not hasattr(pydantic.BaseModel, "model_fields"):
        raise UsageError(f"SchemaValidator needs pydantic 2, not {pydantic.VERSION}: pip install 'pydantic>=2'")
    return pydantic


def _names_an_owner(key: bytes) -> bytes:
    if not re.search(RSASignatureValidator.PUBLIC_KEY_REGEX, key):
        raise ValueError("it holds no public key: use RSASignatureValidator.local_public_key")
    return key


def __getattr__(name: str) -> Any:
    """`BytesWithPublicKey`, for fields of type dict[BytesWithPublicKey, ...]: subkeys that name an owner."""
    if name == "BytesWithPublicKey":
        pydantic = _pydantic()
        return Annotated[bytes, pydantic.Strict(), pydantic.AfterValidator(_names_an_owner)]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["SchemaValidator"]
