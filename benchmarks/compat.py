"""Hivemind 1.1.12 and `dlc.compat.hivemind` beside each other: what a program waits for in `averager.step()`.

    make hivemind                               once: Hivemind 1.1.12 in .venv-hivemind
    python benchmarks/compat.py                 2 and 4 processes on loopback, 100 MB of fp32 each
    python benchmarks/compat.py --open          the same without a target_group_size
    python benchmarks/compat.py --sites         four emulated far sites instead (root, Linux: network namespaces)

Both run the same program, `_hivemind.py`, with another import; beyond loopback dlc has a run key besides. A round lasts
from the first process's call of `averager.step()` to the last one's return: with finding the group, to the mean in its
own tensors. All are told to begin at once. Of DecentralizedAverager are given: start=True, prefix,
compression=Float16Compression(), and as target_group_size and min_group_size the number of processes, so that no group
is smaller. All else has the default of either: min_matchmaking_time is 5 s. A group of Hivemind's begins when it has
target_group_size members, or after min_matchmaking_time; --open gives no target, which is the default.

Engines take turns: each turn is a few rounds of every engine by fresh processes, and the next turn begins with another
engine. Told are the medians of all turns and the ratio to ours. Every process compares its whole vector with the true
mean after every round. A wrong one of ours ends the benchmark with exit status 1. Hivemind's step returns as if nothing
were wrong where a part of the exchange has failed, and keeps local values there: such rounds are counted and told below
the table, and are in no figure. Without `make hivemind` ours runs alone, and the table says so. Ctrl-C and SIGTERM end
all processes; the table has the turns that were finished.

--sites: the network of `wan.py --case four-site`, with rates and bytes times --scale; --settle seconds before the first
round of a turn, and --space seconds between rounds, for both engines, as there.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from functools import partial

from _beside import run, turn_options
from _gloo import at_least_1
from _hivemind_sites import MISSING, PYTHON, THEIRS, Engine, HivemindSites, Place, WrongMean
from _wan import available
from wan import CASES, network

from dlc.comm.security import generate_run_key

OURS, HIVEMIND = "dlc.compat", "Hivemind"
FAR = "four-site"
wrong: Counter[str] = Counter()
"""Rounds of Hivemind with a wrong mean, by number of processes; see `one_turn`."""


def one_turn(engine: Engine, places: Sequence[Place], options: argparse.Namespace, scale: float = 1.0) -> list[float]:
    """Seconds of each timed step of fresh processes, without Hivemind's wrong ones, which `wrong` counts."""
    numel = int(options.mb * scale * 1e6 / 4)
    took = []
    with HivemindSites(places, numel, engine, matchmaking_s=None, open_=options.open) as sites:
        threading.Event().wait(options.settle)
        for number in range(options.warm + options.rounds):
            try:
                seconds = sites.step()
            except WrongMean as error:
                if engine is not THEIRS:
                    raise
                wrong[f"{len(places)} processes"] += 1
                print(f"not counted: {error}", file=sys.stderr)
            else:
                took += [seconds] if number >= options.warm else []
            threading.Event().wait(options.space)
    return took


def far_turn(engine: Engine, options: argparse.Namespace) -> list[float]:
    """The same between far sites, on a network of its own."""
    with network(CASES[FAR], options.scale, loss=0.0) as wan:
        places = [Place(wan.address(site), wan.enter(site)) for site in CASES[FAR].up]
        return one_turn(engine, places, options, options.scale)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=at_least_1, nargs="+", default=[2, 4], help="processes (default 2 and 4)")
    parser.add_argument("--open", action="store_true", help="without target_group_size")
    parser.add_argument("--sites", action="store_true", help="four emulated far sites instead of loopback")
    parser.add_argument("--scale", type=float, default=0.25, help="of rates and bytes between sites (default 0.25)")
    parser.add_argument("--settle", type=float, help="seconds before a turn's first round (default: sites 20, else 0)")
    parser.add_argument("--space", type=float, help="seconds between two rounds (default: sites 11, else 0)")
    turn_options(parser)
    options = parser.parse_args()
    for name, far in (("settle", 20.0), ("space", 11.0)):
        if getattr(options, name) is None:
            setattr(options, name, far if options.sites else 0.0)
    if options.sites and (reason := available()):
        print(f"not available here: {reason}")
        return 0
    absent = {} if PYTHON.exists() else {HIVEMIND: MISSING}
    ours = Engine("dlc.compat.hivemind", sys.executable, generate_run_key() if options.sites else "")
    engines = {OURS: ours, HIVEMIND: THEIRS}
    if options.sites:
        work = {(FAR, name): partial(far_turn, engine, options) for name, engine in engines.items()}
    else:
        work = {
            (f"{n} processes", name): partial(one_turn, engine, [Place()] * n, options)
            for n in options.n
            for name, engine in engines.items()
        }
    where = f"emulated sites, all times {options.scale:g}" if options.sites else "loopback"
    where += ", no target_group_size" if options.open else ""
    status = run(work, absent, OURS, f"averager.step(), {where}, {options.mb:g} MB of fp32 each, medians", options)
    for case, count in wrong.items():
        print(f"{case}: {count} rounds of Hivemind, warm ones included, gave some process a wrong mean; not counted")
    return status


if __name__ == "__main__":
    sys.exit(main())
