"""The table of engines that did the same work beside each other: medians, spread, and ratios to ours."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One engine in one case."""

    case: str
    engine: str
    seconds: tuple[float, ...]
    """Of each timed round; none: it did not run."""
    why: str = ""
    """Why it did not run, and what to do about it."""


def ratio(rows: Sequence[Row], row: Row, ours: str) -> float | None:
    """The median of `row` over that of `ours` in the same case; above 1: slower than ours. None: one did not run."""
    base = next((r.seconds for r in rows if r.case == row.case and r.engine == ours), ())
    return statistics.median(row.seconds) / statistics.median(base) if base and row.seconds else None


def table(rows: Sequence[Row], ours: str) -> str:
    """All rows as one Markdown table, with ratios to the engine `ours` of the same case."""
    lines = [
        f"| case | engine | median, s | least to most, s | rounds | x the time of {ours} |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if not row.seconds:
            lines.append(f"| {row.case} | {row.engine} | not run: {row.why} | | | |")
            continue
        times = f"{statistics.median(row.seconds):.3f} | {min(row.seconds):.3f} to {max(row.seconds):.3f}"
        found = ratio(rows, row, ours)
        told = "" if found is None else f"{found:.2f}"
        lines.append(f"| {row.case} | {row.engine} | {times} | {len(row.seconds)} | {told} |")
    return "\n".join(lines)
