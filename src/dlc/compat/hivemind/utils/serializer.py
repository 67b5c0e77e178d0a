"""Small values as bytes: msgpack, with tuples kept as tuples, sets as sets and frozen ones as such. Never pickle."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgpack

from dlc.errors import UsageError

TUPLE, SET, FROZEN = 1, 2, 3
"""Codes of the extension types."""
MADE: dict[int, Callable[[list[Any]], Any]] = {TUPLE: tuple, SET: set, FROZEN: frozenset}
"""What `loads` makes of them."""
DEPTH_MAX = 16
"""Tuples and sets within each other: msgpack reads each by a call of its own, with 40 KB of the C stack, and whoever
sends some hundreds of them would end the process that reads them."""


class MSGPackSerializer:
    """`dumps` and `loads`; UsageError for what msgpack does not know, ValueError for bytes that are no msgpack."""

    @classmethod
    def dumps(cls, value: object) -> bytes:
        return cls._dumps(value, 0)

    @classmethod
    def _dumps(cls, value: object, depth: int) -> bytes:
        try:
            plain = partial(cls._unusual, depth)
            packed: bytes = msgpack.packb(value, use_bin_type=True, strict_types=True, default=plain)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise UsageError(f"{type(value).__name__} cannot be sent to others: {error}") from error
        return packed

    @classmethod
    def loads(cls, raw: bytes) -> Any:
        return cls._loads(raw, 0)

    @classmethod
    def _loads(cls, raw: bytes, depth: int) -> Any:
        try:
            hook = partial(cls._usual, depth)
            return msgpack.unpackb(raw, raw=False, strict_map_key=False, use_list=True, ext_hook=hook)
        except (msgpack.exceptions.UnpackException, RecursionError, TypeError) as error:
            raise ValueError(f"no msgpack: {error}") from error

    @classmethod
    def _unusual(cls, depth: int, value: object) -> Any:
        if isinstance(value, str):  # a class of its own, such as PeerID
            return str.__str__(value)
        if isinstance(value, tuple | set | frozenset):
            if depth == DEPTH_MAX:
                raise TypeError(f"more than {DEPTH_MAX} tuples or sets within each other")
            code = TUPLE if isinstance(value, tuple) else SET if isinstance(value, set) else FROZEN
            return msgpack.ExtType(code, cls._dumps(list(value), depth + 1))
        if type(value) is int:
            raise TypeError("a whole number is from -2^63 to 2^64 - 1")
        if isinstance(value, dict):  # and others of their own, too
            return dict(value)
        if isinstance(value, list):
            return list(value)
        raise TypeError(f"{type(value).__name__} is neither a number, text, bytes, list, tuple, set nor dict")

    @classmethod
    def _usual(cls, depth: int, code: int, raw: bytes) -> Any:
        if code in MADE and depth < DEPTH_MAX:
            return MADE[code](cls._loads(raw, depth + 1))
        raise ValueError(f"no msgpack of ours: extension {code}, {depth} deep")


SerializerBase = MSGPackSerializer

__all__ = ["MSGPackSerializer", "SerializerBase"]
