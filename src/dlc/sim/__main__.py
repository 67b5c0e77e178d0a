"""python -m dlc.sim: sweep seeds, check the invariants after every event, print what breaks and how to replay it."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections import Counter

import torch

from dlc.sim.run import run
from dlc.sim.schedule import FAULTS, scenario
from dlc.sim.transcript import Transcript


def span(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    return int(low), int(high or low)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m dlc.sim",
        description=__doc__,
        epilog="example: python -m dlc.sim --peers 2:8 --seeds 0:100 --faults crash,freeze,restart",
    )
    parser.add_argument("--peers", type=span, default=(2, 8), metavar="LOW:HIGH", help="peers at the start")
    parser.add_argument("--seeds", type=span, default=(0, 100), metavar="FIRST:END", help="END is not run; or one seed")
    parser.add_argument("--faults", default=",".join(FAULTS), help="comma-separated; default: %(default)s")
    parser.add_argument("--json", action="store_true", help="one line of JSON per schedule, and one for all")
    parser.add_argument("--transcript", action="store_true", help="print the last events of each schedule")
    parser.add_argument("--max-failures", type=int, default=1, metavar="N", help="stop after so many")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no schedule after so long")
    args = parser.parse_args()
    kinds = [k for k in args.faults.split(",") if k and k != "none"]
    unknown = sorted(set(kinds) - set(FAULTS))
    if unknown:
        parser.error(f"unknown faults {', '.join(unknown)}; known: {', '.join(FAULTS)}")
    torch.set_num_threads(1)
    return sweep(args, kinds)


def sweep(args: argparse.Namespace, kinds: list[str]) -> int:
    first, end = args.seeds
    low, high = args.peers
    began, done, rounds, events, failures = time.monotonic(), 0, 0, 0, 0
    faults: Counter[str] = Counter()
    for seed in range(first, max(end, first + 1)):
        plan = scenario(seed, low, high, kinds)
        outcome = run(plan)
        done, rounds, events = done + 1, rounds + outcome.rounds, events + outcome.events
        faults.update(outcome.faults)
        if args.json:
            print(json.dumps(outcome.__dict__), flush=True)
        if outcome.violation or args.transcript:
            transcript = Transcript()
            run(plan, transcript)
            _explain(args, kinds, seed, outcome.violation, transcript)
        failures += bool(outcome.violation)
        if failures >= args.max_failures or time.monotonic() - began > args.seconds:
            break
    minutes = (time.monotonic() - began) / 60
    summary = {
        "schedules": done, "violations": failures, "rounds": rounds, "faults": dict(sorted(faults.items())),
        "events": events, "schedules_per_minute": round(done / minutes, 1),
    }  # fmt: skip
    if args.json:
        print(json.dumps(summary))
    else:
        print(", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in summary.items()))
    return 1 if failures else 0


def _explain(args: argparse.Namespace, kinds: list[str], seed: int, violation: str, transcript: Transcript) -> None:
    out = sys.stderr if args.json else sys.stdout
    low, high = args.peers
    plan = scenario(seed, low, high, kinds)
    print(f"seed {seed}: {len(plan.starts)} peers, {plan.n_chunks} chunks, {plan.weather}", file=out)
    for number, start in enumerate(plan.starts):
        print(f"  p{number} starts at {start.at_s:.2f} s, listed {start.listed or 'nobody'}", file=out)
    for fault in plan.faults:
        print(f"  {fault}", file=out)
    for line in transcript.lines():
        print(line, file=out)
    if violation:
        print(f"VIOLATION {violation}", file=out)
        command = ["python", "-m", "dlc.sim", "--peers", f"{low}:{high}", "--seeds", str(seed)]
        print(f"replay: {shlex.join([*command, '--faults', ','.join(kinds) or 'none'])} --transcript", file=out)


if __name__ == "__main__":
    raise SystemExit(main())
