"""python -m dlc.sim: sweep seeds, check the invariants after every event, print what breaks and how to replay it."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import TextIO

import torch

from dlc.sim.files import load, save_json, to_plain
from dlc.sim.run import Outcome, run
from dlc.sim.schedule import FAULTS, Scenario
from dlc.sim.shrink import shrink
from dlc.sim.sweep import Job, StateFile, outcomes
from dlc.sim.transcript import Transcript

PROGRESS_EVERY_S = 15.0
SHRINK_S = 120.0
"""Time for shortening one failing schedule."""
INTERRUPTED = 130
"""Exit code after Ctrl-C."""


def main() -> int:
    args = _arguments()
    torch.set_num_threads(1)
    if args.scenario:
        return replay(load(args.scenario), args.transcript, args.json)
    return Sweep(args).run()


def span(text: str) -> tuple[int, int]:
    """LOW:HIGH, or one number for both."""
    low, _, high = text.partition(":")
    return int(low), int(high or low)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m dlc.sim",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(
            [
                "faults:",
                *(f"  {name:<10} {text}" for name, text in FAULTS.items()),
                "\nexample: python -m dlc.sim --peers 2:8 --seeds 0:1000 --faults crash,freeze --state sweep.json",
            ]
        ),
    )
    parser.add_argument("--peers", type=span, default=(2, 8), metavar="LOW:HIGH", help="peers at the start; or N")
    parser.add_argument("--seeds", type=span, default=(0, 100), metavar="FIRST:END", help="END is not run; or one seed")
    parser.add_argument("--faults", default=",".join(FAULTS), help="comma-separated, or none; default: all")
    parser.add_argument("--scenario", type=Path, metavar="FILE", help="run the scenario of this file, and no sweep")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes; default: cores")
    parser.add_argument("--state", type=Path, metavar="FILE", help="remember there what is done, and go on from it")
    parser.add_argument("--json", action="store_true", help="one line of JSON per schedule, and one for all")
    parser.add_argument("--transcript", action="store_true", help="print the last events of a schedule that fails")
    parser.add_argument("--max-failures", type=int, default=1, metavar="N", help="stop after so many")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no schedule after so long")
    args = parser.parse_args()
    unknown = sorted(set(args.faults.split(",")) - {"", "none", *FAULTS})
    if unknown:
        parser.error(f"unknown faults {', '.join(unknown)}; known: {', '.join(FAULTS)}")
    if args.jobs < 1 or not 1 <= args.peers[0] <= args.peers[1]:
        parser.error("--jobs and --peers must be at least 1, and LOW not above HIGH")
    return args


class Sweep:
    """One command: the seeds that are left, what comes of them, and what is said about it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        kinds = tuple(k for k in args.faults.split(",") if k and k != "none")
        first, end = args.seeds
        self.job, self.end = Job(args.peers, kinds, first), max(end, first + 1)
        self.state = StateFile(args.state)
        self.tally, word = self.state.load(self.job)
        if word:
            print(word, file=sys.stderr)
        self.began = self.reported = time.monotonic()
        self.before = self.tally.schedules
        self.known = len(self.tally.violations)
        """What an earlier run of the sweep found: it was told then, and the sweep went on."""
        self.out: TextIO = sys.stderr if args.json else sys.stdout
        self.interrupted = False
        self._at_once = args.jobs == 1
        """What is done now may be cut short: no worker's outcome is waited for."""

    def run(self) -> int:
        before = signal.getsignal(signal.SIGINT)
        if before is signal.default_int_handler:  # else it is ignored, as in the background of a shell
            signal.signal(signal.SIGINT, self._interrupt)
        try:
            for outcome in outcomes(self.job, self.tally.left(self.end), self.args.jobs, self._more):
                self._take(outcome)
        except KeyboardInterrupt:
            self.interrupted = True
        self.state.save(self.job, self.tally, now=True)
        self._summary()
        if not self.interrupted:
            signal.signal(signal.SIGINT, before)
        return INTERRUPTED if self.interrupted else 1 if self.tally.violations else 0

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """The first Ctrl-C ends the sweep within a moment; another would only cut that short, and is not heard."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.interrupted = True
        if self._at_once:
            raise KeyboardInterrupt

    def _more(self) -> bool:
        """KeyboardInterrupt: after Ctrl-C."""
        if self.interrupted:
            raise KeyboardInterrupt
        enough = len(self.tally.violations) - self.known >= self.args.max_failures
        return not enough and time.monotonic() < self.began + self.args.seconds

    def _take(self, outcome: Outcome) -> None:
        found = len(self.tally.violations) - self.known
        self.tally.add(outcome)
        self.state.save(self.job, self.tally)
        if self.args.json:
            print(json.dumps(outcome.__dict__), flush=True)
        if outcome.violation and found < self.args.max_failures:
            before, self._at_once = self._at_once, True
            self._explain(outcome)
            self._at_once = before
        elif outcome.violation:
            print(f"VIOLATION at seed {outcome.seed}: {outcome.violation}", file=self.out)
        if time.monotonic() >= self.reported + PROGRESS_EVERY_S:
            self.reported = time.monotonic()
            of = self.end - self.job.first
            print(f"{self.tally.schedules} of {of} schedules, {self._rate()} per minute", file=sys.stderr)

    def _rate(self) -> float:
        minutes = (time.monotonic() - self.began) / 60
        return round((self.tally.schedules - self.before) / minutes, 1)

    def _explain(self, outcome: Outcome) -> None:
        """Say what broke and how to see it again; shorten it, and leave the short form as a file."""
        low, high = self.job.peers
        command = ["python", "-m", "dlc.sim", "--peers", f"{low}:{high}", "--seeds", str(outcome.seed), "--faults"]
        print(f"VIOLATION at seed {outcome.seed}: {outcome.violation}", file=self.out)
        print(f"replay: {shlex.join([*command, ','.join(self.job.kinds) or 'none'])}", file=self.out, flush=True)
        short, its_outcome = shrink(self.job.scenario(outcome.seed), outcome, SHRINK_S)
        path = (self.args.state or Path("sim.json")).parent / f"seed-{outcome.seed}.json"
        save_json(path, to_plain(short))
        describe(short, its_outcome, self.out)
        print(f"replay: python -m dlc.sim --scenario {shlex.quote(str(path))} --transcript", file=self.out, flush=True)
        if self.args.transcript:
            transcript = Transcript()
            run(short, transcript)
            print("\n".join(transcript.lines()), file=self.out, flush=True)

    def _summary(self) -> None:
        tally = self.tally
        summary = {
            "schedules": tally.schedules, "violations": len(tally.violations), "seeds": sorted(tally.violations),
            "rounds": tally.rounds, "faults": dict(sorted(tally.faults.items())), "events": tally.events,
            "schedules_per_minute": self._rate(), "code": tally.code,
        }  # fmt: skip
        if self.args.json:
            print(json.dumps(summary))
        else:
            print(", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in summary.items()))


def describe(plan: Scenario, outcome: Outcome, out: TextIO) -> None:
    """A scenario and what comes of it, for people."""
    states = "equal" if plan.equal_states else "different"
    said = {
        "eager trainers": plan.eager,
        "probes": plan.probes,
        "contributions that fill": plan.filling,
        "patient rounds": plan.patient,
    }
    habits = "".join(f"{name}, " for name, on in said.items() if on)
    print(
        f"{len(plan.starts)} peers, {plan.n_chunks} chunks in {plan.codec}, channels {', '.join(plan.channels)}, "
        f"drift {plan.drift:g}, {habits}{states} first states, {plan.weather}",
        file=out,
    )
    for number, start in enumerate(plan.starts):
        print(f"  p{number} ({start.role}) starts at {start.at_s:.2f} s, listed {start.listed or 'nobody'}", file=out)
    for fault in plan.faults:
        print(f"  {fault}", file=out)
    print(f"  {outcome.violation or f'no violation, {outcome.rounds} rounds'}", file=out)


def replay(plan: Scenario, with_transcript: bool, as_json: bool) -> int:
    """Run one scenario that was written to a file."""
    transcript = Transcript() if with_transcript else None
    outcome = run(plan, transcript)
    for line in transcript.lines() if transcript is not None else ():
        print(line)
    if as_json:
        print(json.dumps(outcome.__dict__))
    else:
        describe(plan, outcome, sys.stdout)
    return 1 if outcome.violation else 0


if __name__ == "__main__":
    raise SystemExit(main())
