"""The keywords that an integration hands on to `dlc.DiLoCo`. Its signature names them, and nothing here repeats that.

A class that takes `**options` and is decorated with `takes_options` shows them all in `help()` and in editors.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import TypeVar

from dlc.train.diloco import DiLoCo

C = TypeVar("C", bound=type)

KEYWORDS: Mapping[str, inspect.Parameter] = {
    name: parameter
    for name, parameter in inspect.signature(DiLoCo).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
}


def takes_options(cls: C) -> C:
    """The class with a signature in which the keywords of `dlc.DiLoCo` stand in the place of `**options`."""
    own = inspect.signature(cls)
    named = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    more = [p for name, p in KEYWORDS.items() if name not in own.parameters]
    cls.__signature__ = own.replace(parameters=[*named, *more])  # type: ignore[attr-defined]  # as inspect reads it
    return cls


def check_options(owner: str, options: Iterable[str]) -> None:
    """TypeError, as Python's own, for a name that `dlc.DiLoCo` does not know: now, not when training begins."""
    unknown = [repr(name) for name in options if name not in KEYWORDS]
    if unknown:
        known = ", ".join(KEYWORDS)
        raise TypeError(f"{owner} got unexpected {', '.join(unknown)}; it takes the keywords of dlc.DiLoCo: {known}")
