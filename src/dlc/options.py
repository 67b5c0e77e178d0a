"""Frozen dataclasses as option tables: types checked, unknown names answered with the nearest known one.

A *table* is a frozen dataclass whose fields are `str`, `int`, `float`, `bool`, `tuple[float, float]`, a mapping of
plain values, or another table. `check_types` is called by its `__post_init__`; `from_plain` builds it from what TOML
or msgpack gave; `to_plain` is the inverse. Nothing here knows what the options mean.
"""

from __future__ import annotations

import dataclasses
import difflib
import keyword
import math
import sys
import typing
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from dlc.errors import ConfigError

INT_MAX = (1 << 63) - 1
"""Greatest integer of both TOML and msgpack."""
DEPTH_MAX = 8
"""Deepest nesting inside a mapping of plain values; model configs need two or three."""

T = TypeVar("T")


def check_types(table: Any, prefix: str) -> None:
    """Check each field of a frozen table against its annotation, integers becoming floats where a float is asked.

    Mappings are copied and made read-only. `prefix` is what errors put before a field's name, such as "inner.".
    """
    for name, kind in field_kinds(type(table)).items():
        object.__setattr__(table, name, _checked(getattr(table, name), kind, prefix + option(name)))


def check(holds: bool, message: str) -> None:
    """ConfigError with `message`, unless it holds."""
    if not holds:
        raise ConfigError(message)


def check_used(table: Any, prefix: str, names: tuple[str, ...], used: bool, why: str) -> None:
    """ConfigError where an option of these has another value than its default or 0, and is not used, `why` says."""
    defaults = {field.name: field.default for field in dataclasses.fields(table)}
    for name in names:
        value = getattr(table, name)
        check(used or value in (defaults[name], 0), f"{prefix}{name} is given, but {why}: remove it")


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """ConfigError, with the nearest word, unless option `name` has one of the words that it may have."""
    near = difflib.get_close_matches(value, allowed, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    check(value in allowed, f"{name} must be one of {', '.join(allowed)}, got {value!r}{hint}")


def to_plain(value: Any) -> Any:
    """Tables and mappings as new dicts, tuples as lists; the values of a TOML file."""
    if dataclasses.is_dataclass(value):
        return {option(field.name): to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value


def from_plain(kind: type[T], plain: Any, path: str = "", names: tuple[str, ...] = ()) -> T:
    """Build the table `kind`; options left out keep their defaults, unknown ones raise ConfigError.

    `path` is where the table stands ("inner."), `names` all dotted names of the root table, for suggestions.
    """
    if not isinstance(plain, Mapping):
        raise ConfigError(f"{path[:-1] or 'the top level'} must be a table, got {plain!r}")
    kinds = {option(name): inner for name, inner in field_kinds(kind).items()}
    names = names or tuple(dotted_names(kind))
    values = {}
    for name, value in plain.items():
        if name not in kinds:
            where = f"{path}{name}"
            raise ConfigError(unknown_table(where, names) if isinstance(value, Mapping) else unknown(where, names))
        inner = kinds[name]
        is_table = dataclasses.is_dataclass(inner)
        values[attribute(name)] = from_plain(inner, value, f"{path}{name}.", names) if is_table else value
    return kind(**values)


ELSEWHERE = {
    "h": "sync_every",
    "local_steps": "sync_every",
    "inner_steps": "sync_every",
    "sync_steps": "sync_every",
    "name": "run",
    "run_id": "run",
    "run_name": "run",
    "compression": "codec",
    "max_steps": "rounds",
    "learning_rate": "inner.lr",
    "per_device_train_batch_size": "inner.batch_size",
    "gradient_accumulation_steps": "inner.accumulate",
    "max_grad_norm": "inner.clip_norm",
    "torch_compile": "inner.compile",
    "gradient_checkpointing": "inner.checkpointing",
    "outer_lr": "outer.lr",
    "outer_momentum": "outer.momentum",
    "seq_length": "data.seq_len",
    "sequence_length": "data.seq_len",
    "max_length": "data.seq_len",
    "dataset": "data.source",
    "dataset_name": "data.source",
    "path_model": "model.path",
    "model_name": "model.name",
    "model_name_or_path": "model.name",
}
"""What OpenDiLoCo, Hivemind, transformers and the papers call an option, by its last part in lower case."""
OF_HOSTS = {
    "key": "key-file",
    "run_key": "key-file",
    "initial_peers": "peers",
    "host": "listen",
    "port": "listen",
    **{
        name.replace("-", "_"): name
        for name in (
            "peers key-file insecure listen advertise found join-timeout state-dir resume role device parallel "
            "micro-batch no-probe history-bytes eval-every checkpoint-every keep tensorboard wandb profile"
        ).split()
    },
}
"""What differs from host to host is no option of a run: the option of `dlc join`, by what it may be called."""


def unknown(name: str, names: tuple[str, ...]) -> str:
    """The sentence for an option that does not exist, with the nearest that does."""
    plain = str(name).lower()
    last = plain.rpartition(".")[2]
    if (of_host := OF_HOSTS.get(last)) is not None:
        return f"unknown option {name!r}: each host says it for itself, by `dlc join --{of_host}`"
    moved = [known for known in names if known.rpartition(".")[2] == last and plain not in names]
    if (other := ELSEWHERE.get(last)) in names and other not in moved:
        moved.append(other)
    similar = difflib.get_close_matches(plain, names, n=1) or [
        known for known in names if difflib.get_close_matches(last, [known.rpartition(".")[2]])
    ]
    hint = moved or similar[:1]
    return f"unknown option {name!r}" + (f"; did you mean {' or '.join(map(repr, hint))}?" if hint else "")


def unknown_table(name: str, names: tuple[str, ...]) -> str:
    """The sentence for a table that does not exist, with the nearest that does, or all of them."""
    tables = tuple(dict.fromkeys(known.rpartition(".")[0] for known in names if "." in known))
    near = difflib.get_close_matches(name, tables, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"the tables are {', '.join(tables)}"
    return f"unknown option {name!r}; {hint}"


def dotted_names(kind: Any, prefix: str = "") -> Iterator[str]:
    """Every option of a table, those of inner tables as "inner.lr"."""
    for name, inner in field_kinds(kind).items():
        yield prefix + option(name)
        if dataclasses.is_dataclass(inner):
            yield from dotted_names(inner, f"{prefix}{name}.")


def flatten(plain: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one dict with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in plain.items():
        flat.update(flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value})
    return flat


def option(name: str) -> str:
    """The option of a field: a name that Python keeps for itself has an underscore after it in the class only."""
    return name.rstrip("_")


def attribute(name: str) -> str:
    """The field of an option."""
    return f"{name}_" if keyword.iskeyword(name) else name


def field_kinds(kind: Any) -> dict[str, Any]:
    """Field names of a table with their resolved annotations, in order."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _checked(value: Any, kind: Any, name: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _demand(value, isinstance(value, typing.cast(type, kind)), name, "a table")
    if typing.get_origin(kind) is tuple:
        length = len(typing.get_args(kind))
        _demand(value, isinstance(value, list | tuple) and len(value) == length, name, f"a list of {length} numbers")
        return tuple(_checked(item, float, name) for item in value)
    if kind is bool:
        return _demand(value, type(value) is bool, name, "true or false")
    if kind is str:
        return _demand(value, type(value) is str, name, "a string")
    if kind is int:
        return _demand(value, type(value) is int and 0 <= value <= INT_MAX, name, "a whole number of at least 0")
    if kind is float:
        _demand(value, type(value) in (int, float) and abs(value) <= sys.float_info.max, name, "a finite number")
        return float(value) + 0.0  # adding zero turns -0.0, which has other bytes, into 0.0
    return MappingProxyType(_plain_mapping(value, name, DEPTH_MAX))


def _plain_mapping(value: Any, name: str, depth: int) -> dict[str, Any]:
    is_mapping = isinstance(value, Mapping) and all(type(key) is str for key in value)
    _demand(value, is_mapping, name, "a table with string keys")
    return {key: _plain_value(item, f"{name}.{key}", depth - 1) for key, item in value.items()}


def _plain_value(value: Any, name: str, depth: int) -> Any:
    if depth < 0:
        raise ConfigError(f"{name} is nested more than {DEPTH_MAX} deep")
    if isinstance(value, Mapping):
        return _plain_mapping(value, name, depth)
    if isinstance(value, list | tuple):
        return [_plain_value(item, name, depth - 1) for item in value]
    is_plain = type(value) in (str, bool) or (type(value) is int and abs(value) <= INT_MAX)
    is_plain = is_plain or (type(value) is float and math.isfinite(value))
    return _demand(value, is_plain, name, "a string, number, true, false, list or table (leave out what is None)")


def _demand(value: Any, holds: bool, name: str, what: str) -> Any:
    if not holds:
        raise ConfigError(f"{name} must be {what}, got {value!r}")
    return value
