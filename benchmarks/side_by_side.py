"""Ours, Gloo and Hivemind beside each other on loopback: one command, one table.

    make hivemind                             once: Hivemind 1.1.12 in .venv-hivemind
    python benchmarks/side_by_side.py         2 and 4 processes, 100 MB of fp32 each

Engines take turns: each turn is a few rounds of every engine by fresh processes, and the next turn begins with another
engine. Told are the medians of all turns and the ratio to ours. A round's time is that of the slowest process, to the
mean (Gloo: the sum) of fp32 in its own tensors. Every process compares its whole vector with the true one after every
round; a wrong one ends the benchmark with exit status 1. Gloo bf16 is timed with the conversion from and to fp32. Of
Hivemind only the all-reduce is timed, not its matchmaking before each round. Without `make hivemind` the others run,
and the table says so. Ctrl-C and SIGTERM end all processes; the table has the turns that were finished.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
from pathlib import Path
from typing import NoReturn

import _gloo
from _beside import Row, ratio, table
from _hivemind_sites import MISSING, PYTHON, HivemindSites, Place
from _workers import WorkerLost
from allreduce import Swarm

OURS, HIVEMIND = "dlc fp16", "Hivemind fp16"
ENGINES = {"dlc": OURS, "gloo-fp32": "Gloo fp32", "gloo-bf16": "Gloo bf16", "hivemind": HIVEMIND}


def one_turn(engine: str, n: int, mb: float, warm: int, rounds: int) -> list[float]:
    """Seconds of each timed round of fresh processes. RuntimeError or WorkerLost where a mean is wrong or one fails."""
    numel = int(mb * 1e6 / 4)
    if engine.startswith("gloo-"):
        return _gloo.run(n, mb, rounds, warm, wire=engine.removeprefix("gloo-"))[0]
    if engine == "hivemind":
        with HivemindSites([Place()] * n, numel) as sites:
            return [sites.round() for _ in range(warm + rounds)][warm:]
    swarm = Swarm(n, numel, "fp16")
    try:
        return [swarm.round()[0] for _ in range(warm + rounds)][warm:]
    finally:
        swarm.close()


def take_turns(options: argparse.Namespace, seconds: dict[tuple[int, str], list[float]]) -> None:
    """Fills `seconds`, which has a list for each number of processes and engine, in the order of the table."""
    for turn in range(options.repeats):
        for n in dict.fromkeys(options.n):
            engines = [engine for m, engine in seconds if m == n]
            first = turn % len(engines)
            for engine in engines[first:] + engines[:first]:
                took = one_turn(engine, n, options.mb, options.warm, options.rounds)
                seconds[n, engine] += took
                told = " ".join(f"{s:.3f}" for s in took)
                print(
                    f"turn {turn + 1} of {options.repeats}, {n} processes, {ENGINES[engine]}: {told}", file=sys.stderr
                )


def rows_of(seconds: dict[tuple[int, str], list[float]], why: dict[str, str]) -> list[Row]:
    return [
        Row(f"{n} processes", ENGINES[engine], tuple(times), why.get(engine, "stopped before its first turn ended"))
        for (n, engine), times in seconds.items()
    ]


def tell(rows: list[Row], path: Path | None) -> None:
    print(table(rows, OURS), flush=True)
    if path is not None:
        found = [
            {
                "case": row.case,
                "engine": row.engine,
                "all_s": row.seconds,
                "median_s": statistics.median(row.seconds) if row.seconds else None,
                "over_dlc": ratio(rows, row, OURS),
            }
            for row in rows
        ]
        path.write_text(json.dumps(found, indent=1), encoding="utf-8")


def _terminated(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=_gloo.at_least_1, nargs="+", default=[2, 4], help="processes (default 2 and 4)")
    parser.add_argument("--mb", type=float, default=100.0, help="MB (10^6 bytes) of fp32 per process (default 100)")
    parser.add_argument("--engines", nargs="+", choices=tuple(ENGINES), default=list(ENGINES), help="default: all")
    parser.add_argument("--repeats", type=_gloo.at_least_1, default=3, help="turns of each engine (default 3)")
    parser.add_argument("--rounds", type=_gloo.at_least_1, default=3, help="timed rounds of a turn (default 3)")
    parser.add_argument("--warm", type=int, default=2, help="rounds of a turn before them (default 2)")
    parser.add_argument("--json", type=Path, help="write all figures there, too")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _terminated)
    why = {}
    if "hivemind" in options.engines and not PYTHON.exists():
        why["hivemind"] = MISSING
        if set(options.engines) == {"hivemind"}:
            parser.error(MISSING)
        print(f"without Hivemind: {MISSING}", file=sys.stderr)
    seconds: dict[tuple[int, str], list[float]] = {
        (n, e): [] for n in options.n for e in dict.fromkeys(options.engines)
    }
    run = {key: times for key, times in seconds.items() if key[1] not in why}
    status = 0
    try:
        take_turns(options, run)
    except KeyboardInterrupt:
        print("stopped: the table has the turns that were finished", file=sys.stderr)
        status = 130
    except (RuntimeError, WorkerLost) as error:
        print(f"failed: {error}\nthe table has the turns that were finished", file=sys.stderr)
        status = 1
    print(f"loopback, {options.mb:g} MB of fp32 each, medians")
    tell(rows_of(seconds, why), options.json)
    return status


if __name__ == "__main__":
    sys.exit(main())
