"""Reports as plain values for JSON."""

from __future__ import annotations

from typing import Any

DIGITS = 6
"""Significant ones: more than any measurement here has."""


def rounded(value: Any) -> Any:
    """Dicts, lists and tuples of plain values, every float with DIGITS digits, tuples as lists."""
    if isinstance(value, dict):
        return {name: rounded(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(inner) for inner in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
