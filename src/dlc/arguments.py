"""Checks of what callers of the library give: a UsageError that names it, in place of a bare TypeError from within."""

from __future__ import annotations

import math
from numbers import Integral
from typing import SupportsFloat, cast

from dlc.errors import UsageError


def real(value: object) -> float:
    """A number, or a tensor or array that holds one; NaN: it is none."""
    try:
        return float(value) if isinstance(value, SupportsFloat) else math.nan
    except OverflowError:  # of an int
        return math.inf
    except (TypeError, ValueError, RuntimeError):  # of a tensor or array of several, or of complex ones
        return math.nan


def seconds(name: str, value: object) -> float:
    """UsageError: it is no time."""
    if math.isnan(value_s := real(value)):
        raise UsageError(f"{name} is {value!r:.60}: it must be a number of seconds")
    return value_s


def above_zero_s(name: str, value: object, most_s: float) -> float:
    """UsageError: it is no time, none at all, or longer than `most_s`."""
    if not 0 < (value_s := seconds(name, value)) <= most_s:
        raise UsageError(f"{name} is {value_s:g}: it must be above 0, and at most {most_s:g} (seconds)")
    return value_s


def number(name: str, value: object, least: float, most: float, limits: str) -> float:
    """UsageError: it is no number from `least` to `most`; `limits` says so, as in "0 to 2^53"."""
    if not least <= (given := real(value)) <= most:
        raise UsageError(f"{name} is {value!r:.60}: it must be a number from {limits}")
    return given


def finite(name: str, value: object) -> float:
    """UsageError: it is no finite number."""
    if not math.isfinite(given := real(value)):
        raise UsageError(f"{name} is {value!r:.60}: it must be a finite number")
    return given


def whole(name: str, value: object, least: int, most: int | None = None) -> int:
    """UsageError: it is no whole number from `least` on, to `most` where that is given."""
    given = cast(int, value)
    if not isinstance(value, Integral) or given < least or (most is not None and given > most):
        limits = f"at least {least}" if most is None else f"{least} to {most}"
        raise UsageError(f"{name} is {value!r:.60}: it must be {limits}, and a whole number")
    return int(value)


def function(name: str, value: object) -> None:
    """UsageError: it cannot be called."""
    if not callable(value):
        raise UsageError(f"{name} is {type(value).__name__}: it must be a function")


def joined(peer: object) -> None:
    """UsageError: it is no `dlc.Peer`, nor anything like one."""
    if not callable(getattr(peer, "describe", None)):
        raise UsageError(f"peer is {type(peer).__name__}: give what dlc.Peer.join(...) returned")


def instance(name: str, value: object, kind: type | tuple[type, ...], advice: str) -> None:
    """UsageError: it is of another type; `advice` says what to give."""
    if not isinstance(value, kind):
        raise UsageError(f"{name} is {type(value).__name__}: {advice}")
