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
import sys
from functools import partial

import _gloo
from _beside import run, turn_options
from _hivemind_sites import MISSING, PYTHON, HivemindSites, Place
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=_gloo.at_least_1, nargs="+", default=[2, 4], help="processes (default 2 and 4)")
    parser.add_argument("--engines", nargs="+", choices=tuple(ENGINES), default=list(ENGINES), help="default: all")
    turn_options(parser)
    options = parser.parse_args()
    absent = {} if PYTHON.exists() else {HIVEMIND: MISSING}
    if absent and set(options.engines) == {"hivemind"}:
        parser.error(MISSING)
    work = {
        (f"{n} processes", ENGINES[engine]): partial(one_turn, engine, n, options.mb, options.warm, options.rounds)
        for n in options.n
        for engine in options.engines
    }
    return run(work, absent, OURS, f"loopback, {options.mb:g} MB of fp32 each, medians", options)


if __name__ == "__main__":
    sys.exit(main())
