"""Small values as bytes: msgpack, with tuples kept as tuples and sets as sets. Never pickle."""

from __future__ import annotations

from typing import Any

import msgpack

from dlc.errors import UsageError

TUPLE, SET = 1, 2
"""Codes of the extension types."""


class MSGPackSerializer:
    """`dumps` and `loads`; UsageError for what msgpack does not know, ValueError for bytes that are no msgpack."""

    @classmethod
    def dumps(cls, value: object) -> bytes:
        try:
            packed: bytes = msgpack.packb(value, use_bin_type=True, strict_types=True, default=cls._unusual)
        except (TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"{type(value).__name__} cannot be sent to others: {error}") from error
        return packed

    @classmethod
    def loads(cls, raw: bytes) -> Any:
        try:
            return msgpack.unpackb(raw, raw=False, strict_map_key=False, use_list=True, ext_hook=cls._usual)
        except (msgpack.exceptions.UnpackException, RecursionError, TypeError) as error:
            raise ValueError(f"no msgpack: {error}") from error

    @classmethod
    def _unusual(cls, value: object) -> Any:
        if isinstance(value, str):  # a class of its own, such as PeerID
            return str.__str__(value)
        if isinstance(value, tuple | set | frozenset):
            return msgpack.ExtType(TUPLE if isinstance(value, tuple) else SET, cls.dumps(list(value)))
        if isinstance(value, dict):  # and others of their own, too
            return dict(value)
        if isinstance(value, list):
            return list(value)
        raise TypeError(f"{type(value).__name__} is neither a number, text, bytes, list, tuple, set nor dict")

    @classmethod
    def _usual(cls, code: int, raw: bytes) -> Any:
        if code in (TUPLE, SET):
            return (tuple if code == TUPLE else set)(cls.loads(raw))
        raise ValueError(f"no msgpack of ours: extension {code}")


SerializerBase = MSGPackSerializer

__all__ = ["MSGPackSerializer", "SerializerBase"]
