"""Engines that do the same work in turns, and the table of what they took: medians, spread, and ratios to ours."""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from _gloo import at_least_1
from _workers import WorkerLost

Work = Mapping[tuple[str, str], Callable[[], list[float]]]
"""For each case and engine, in the order of the table, what a turn does: it returns the seconds of each timed round.
RuntimeError or WorkerLost: a result is wrong, or a process failed."""


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


def turn_options(parser: argparse.ArgumentParser) -> None:
    """The options of every benchmark that takes turns."""
    parser.add_argument("--mb", type=float, default=100.0, help="MB (10^6 bytes) of fp32 per process (default 100)")
    parser.add_argument("--repeats", type=at_least_1, default=3, help="turns of each engine (default 3)")
    parser.add_argument("--rounds", type=at_least_1, default=3, help="timed rounds of a turn (default 3)")
    parser.add_argument("--warm", type=int, default=2, help="rounds of a turn before them (default 2)")
    parser.add_argument("--json", type=Path, help="write all figures there, too")


def take_turns(work: Work, repeats: int, seconds: dict[tuple[str, str], list[float]]) -> int:
    """Fill `seconds`, each turn beginning with another engine; Ctrl-C, SIGTERM and a failure end it. Exit status."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for turn in range(repeats):
            for case in dict.fromkeys(case for case, _ in work):
                engines = [engine for of, engine in work if of == case]
                first = turn % len(engines)
                for engine in engines[first:] + engines[:first]:
                    took = work[case, engine]()
                    seconds[case, engine] += took
                    told = " ".join(f"{s:.3f}" for s in took)
                    print(f"turn {turn + 1} of {repeats}, {case}, {engine}: {told}", file=sys.stderr)
    except KeyboardInterrupt:
        print("stopped: the table has the turns that were finished", file=sys.stderr)
        return 130
    except (RuntimeError, WorkerLost) as error:
        print(f"failed: {error}\nthe table has the turns that were finished", file=sys.stderr)
        return 1
    return 0


def tell(rows: Sequence[Row], ours: str, path: Path | None) -> None:
    """Print the table; write all figures to the path, too."""
    print(table(rows, ours), flush=True)
    if path is not None:
        found = [
            {
                "case": row.case,
                "engine": row.engine,
                "all_s": row.seconds,
                "median_s": statistics.median(row.seconds) if row.seconds else None,
                "over_dlc": ratio(rows, row, ours),
            }
            for row in rows
        ]
        path.write_text(json.dumps(found, indent=1), encoding="utf-8")


def run(work: Work, absent: Mapping[str, str], ours: str, title: str, options: argparse.Namespace) -> int:
    """All turns of `turn_options`, and their table. absent: why an engine does not run, by its name. Exit status."""
    for why in absent.values():
        print(f"without some: {why}", file=sys.stderr)
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in work}
    status = take_turns({key: turn for key, turn in work.items() if key[1] not in absent}, options.repeats, seconds)
    print(title)
    rows = [
        Row(case, engine, tuple(times), absent.get(engine, "stopped before its first turn ended"))
        for (case, engine), times in seconds.items()
    ]
    tell(rows, ours, options.json)
    return status
