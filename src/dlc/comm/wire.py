"""Frozen dataclasses to msgpack and back, with limits on everything.

A message is one msgpack array `[code, field, field, ...]`; nested dataclasses and named tuples are arrays of their
fields. Decoding walks the *annotations*: whatever does not have the annotated type, is too long, too deep or too
large raises `ProtocolError`, and nothing is ever called by name. Encoding is canonical (field order is fixed, no
maps with unordered keys), so equal values give equal bytes and can be hashed.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

import msgpack

from dlc.errors import ProtocolError

HEADER_BYTES_MAX = 4 << 20
"""A header is at most this long; the largest real ones are promises that list every held chunk."""
STRING_BYTES_MAX = 256 << 10
"""Longest single string or byte string in a header: a RunSpec with an inline model config."""
ITEMS_MAX = 1 << 17
"""Longest array in a header: one item per chunk of a 30-billion-parameter vector in 256 Ki-element chunks."""

Packed = typing.NewType("Packed", bytes)
"""A message in a message: bytes that are as long as a header may be."""

_Decoder = Callable[[Any], Any]
T = TypeVar("T")


def size_of(text: object) -> int:
    """Bytes of a string on the wire; 0 for what is no string, or has no such form (half a surrogate pair)."""
    try:
        return len(text.encode()) if isinstance(text, str) else 0
    except UnicodeEncodeError:
        return 0


def pack(value: object) -> bytes:
    """Canonical msgpack of a dataclass, named tuple, tuple, str, bytes, bool, int, float or None."""
    packed: bytes = msgpack.packb(value, default=_fields_of, use_bin_type=True)
    return packed


def unpack(data: bytes | memoryview, kind: type[T]) -> T:
    """The inverse of `pack`; raises ProtocolError unless `data` is exactly one value of `kind`."""
    if len(data) > HEADER_BYTES_MAX:
        raise ProtocolError(f"header of {len(data)} bytes is over the limit of {HEADER_BYTES_MAX}")
    try:
        raw = msgpack.unpackb(
            data,
            use_list=False,
            raw=False,
            strict_map_key=True,
            max_str_len=STRING_BYTES_MAX,
            max_bin_len=HEADER_BYTES_MAX,
            max_array_len=ITEMS_MAX,
            max_map_len=0,
            max_ext_len=0,
        )
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise ProtocolError(f"not a valid header: {error}") from None
    value: T = decoder(kind)(raw)
    return value


def _fields_of(value: Any) -> list[Any]:
    """What msgpack asks for where it has no form of its own: anything but tuples and scalars."""
    kind = type(value)
    names = _FIELDS.get(kind)
    if names is None:
        if not dataclasses.is_dataclass(kind):
            raise TypeError(f"{kind.__name__} has no wire form")
        names = _header_fields(kind)
    return [getattr(value, name) for name in names]


_FIELDS: dict[type, tuple[str, ...]] = {}


def _header_fields(kind: type) -> tuple[str, ...]:
    """Fields that travel in the header: all but those marked `metadata={"frame": True}`, which are raw frames."""
    if kind not in _FIELDS:
        _FIELDS[kind] = _travelling(kind)
    return _FIELDS[kind]


def _travelling(kind: Any) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(kind) if not f.metadata.get("frame"))


def decoder(kind: Any) -> _Decoder:
    """A function that checks a plain msgpack value against the annotation `kind` and builds it."""
    found = _DECODERS.get(kind)
    if found is None:
        found = _DECODERS[kind] = _build(kind)
    return found


_DECODERS: dict[Any, _Decoder] = {}


def _build(kind: Any) -> _Decoder:
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return _decode_union(typing.get_args(kind))
    if origin is tuple:
        return _decode_tuple(typing.get_args(kind))
    if dataclasses.is_dataclass(kind):
        return _decode_fields(kind, _header_fields(typing.cast(type, kind)))
    if isinstance(kind, type) and issubclass(kind, tuple):
        return _decode_fields(kind, typing.cast(Any, kind)._fields)
    if kind is Packed:
        return _decode_scalar(bytes, HEADER_BYTES_MAX)
    return _decode_scalar(kind)


def _decode_scalar(kind: Any, bytes_max: int = STRING_BYTES_MAX) -> _Decoder:
    def decode(raw: Any) -> Any:
        if kind is float and type(raw) is int:
            return float(raw)
        if type(raw) is not kind:
            raise ProtocolError(f"expected {kind.__name__}, got {type(raw).__name__}")
        if kind is float and not math.isfinite(raw):
            raise ProtocolError("a number that is not finite")
        if kind is bytes and len(raw) > bytes_max:
            raise ProtocolError(f"{len(raw)} bytes where at most {bytes_max} may stand")
        return raw

    return decode


def _decode_union(options: tuple[Any, ...]) -> _Decoder:
    (inner,) = [option for option in options if option is not type(None)]
    decode_inner = decoder(inner)
    return lambda raw: None if raw is None else decode_inner(raw)


def _decode_tuple(args: tuple[Any, ...]) -> _Decoder:
    if len(args) == 2 and args[1] is Ellipsis:
        decode_item = decoder(args[0])

        def decode_many(raw: Any) -> Any:
            if type(raw) is not tuple:
                raise ProtocolError(f"expected an array, got {type(raw).__name__}")
            return tuple([decode_item(item) for item in raw])  # a list is faster than a generator, and this is often

        return decode_many
    decoders = tuple(decoder(arg) for arg in args)

    def decode_fixed(raw: Any) -> Any:
        if type(raw) is not tuple or len(raw) != len(decoders):
            raise ProtocolError(f"expected an array of {len(decoders)}")
        return tuple([decode(item) for decode, item in zip(decoders, raw, strict=True)])

    return decode_fixed


def _decode_fields(kind: Any, names: tuple[str, ...]) -> _Decoder:
    hints = typing.get_type_hints(kind)
    decode_fixed = _decode_tuple(tuple(hints[name] for name in names))
    if names != tuple(inspect.signature(kind).parameters)[: len(names)]:
        raise TypeError(f"{kind.__name__}: the fields that travel in the header come first")

    def decode(raw: Any) -> Any:
        try:
            return kind(*decode_fixed(raw))
        except ProtocolError as error:
            raise ProtocolError(f"{kind.__name__}: {error}") from None

    return decode
