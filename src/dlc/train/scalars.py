"""Numbers in what was saved: a CheckpointError that names one that cannot be, in place of training on with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dlc.arguments import real
from dlc.errors import CheckpointError

COUNT_MAX = 2**53
"""Up to here each whole number is a float, as some formats keep numbers."""


def saved_count(state: Mapping[str, Any], name: str, most: int = COUNT_MAX) -> int:
    """A number of inner steps, or of tokens; 0 where there is none of that name. CheckpointError: it is not one, or
    above `most`."""
    return _count(name, state.get(name, 0), most)


def saved_counts(state: Mapping[str, Any], name: str) -> list[int]:
    """Several of them. CheckpointError: one is not."""
    given = state.get(name, ())
    if not isinstance(given, Iterable):
        raise CheckpointError(damaged(name, given, "a list of whole numbers"))
    return [_count(name, one) for one in given]


def saved_share(value: object) -> float:
    """This peer's part of a mean. CheckpointError: it is none."""
    if not 0 <= (share := real(value)) <= 1:
        raise CheckpointError(damaged("share", value, "a number from 0 to 1"))
    return share


def _count(name: str, value: object, most: int = COUNT_MAX) -> int:
    count = real(value)
    if not (0 <= count <= most and count.is_integer()):
        kind = "a whole number, 0 or more" if most == COUNT_MAX else f"a whole number from 0 to {most}"
        raise CheckpointError(damaged(name, value, kind))
    return int(count)


def damaged(name: str, value: object, kind: str) -> str:
    """What the error says. kind: what it must be."""
    return (
        f"{name} of the saved state is {value!r:.60}, and must be {kind}: the state is damaged, or was changed after "
        "it was saved; go on from another one"
    )
