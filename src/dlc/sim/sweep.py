"""Many schedules over several processes; a sweep can be stopped at any time and goes on where it stopped.

The state file holds one tally per (peers, faults, first seed): the version of the code, which seeds are done, what was
found. It is replaced atomically every SAVE_EVERY_S and at the end, an interrupt included. Where the code has changed
since, what was done says nothing any more, and the sweep begins anew.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import dlc
from dlc.sim.files import save_json
from dlc.sim.run import Outcome, run
from dlc.sim.schedule import Scenario, scenario

SAVE_EVERY_S = 10.0
LOOK_S = 0.25
"""How often it is looked whether to go on, while workers are at schedules."""
ENTRY = "dlc.sim.run"
"""What plays a schedule."""


@dataclass(frozen=True)
class Job:
    """What is swept."""

    peers: tuple[int, int]
    kinds: tuple[str, ...]
    first: int
    """First seed."""

    @property
    def name(self) -> str:
        return f"{self.peers[0]}:{self.peers[1]} {','.join(sorted(self.kinds)) or 'none'} from {self.first}"

    def scenario(self, seed: int) -> Scenario:
        return scenario(seed, *self.peers, self.kinds)


@dataclass
class Tally:
    """What a sweep has done so far, earlier runs of the same command included."""

    code: str
    next: int
    """All seeds of the sweep below this one are done."""
    ahead: list[int] = field(default_factory=list)
    """Seeds from there on that are done too, in ascending order."""
    schedules: int = 0
    rounds: int = 0
    events: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    violations: dict[int, str] = field(default_factory=dict)
    """By seed."""

    def add(self, outcome: Outcome) -> None:
        self.schedules += 1
        self.rounds += outcome.rounds
        self.events += outcome.events
        self.faults.update(outcome.faults)
        if outcome.violation:
            self.violations[outcome.seed] = outcome.violation
        self.ahead = sorted([*self.ahead, outcome.seed])
        while self.ahead and self.ahead[0] == self.next:
            del self.ahead[0]
            self.next += 1

    def left(self, end: int) -> Iterator[int]:
        """Seeds below `end` that are not done."""
        return (seed for seed in range(self.next, end) if seed not in self.ahead)

    def to_plain(self) -> dict[str, Any]:
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**plain, "faults": dict(self.faults)}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Tally:
        violations = {int(seed): text for seed, text in plain["violations"].items()}
        return cls(**{**plain, "faults": Counter(plain["faults"]), "violations": violations})


def code_version() -> str:
    """Hash of the sources of dlc that a schedule runs: ENTRY, and all that it imports, over however many modules."""
    digest = hashlib.sha256()
    for name, path in sorted(_imported(ENTRY).items()):
        digest.update(f"{name}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _imported(entry: str) -> dict[str, Path]:
    root = Path(dlc.__file__).parent.parent
    found: dict[str, Path] = {}
    ahead = [entry]
    while ahead:
        name = ahead.pop()
        path = root.joinpath(*name.split(".")).with_suffix(".py")
        if name in found or not path.is_file():  # a package, or a name in a module
            continue
        found[name] = path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                ahead += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                ahead += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


class StateFile:
    """The tallies of all sweeps, in one file; without a path it forgets."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._saved = time.monotonic()
        self._tallies: dict[str, Any] = {}
        if path is not None and path.exists():
            self._tallies = json.loads(path.read_text())

    def load(self, job: Job) -> tuple[Tally, str]:
        """Where this sweep stands, and a word on it for people."""
        code = code_version()
        plain = self._tallies.get(job.name)
        if plain is None:
            return Tally(code, job.first), ""
        tally = Tally.from_plain(plain)
        if tally.code != code:
            done = f"the code has changed since {tally.schedules} schedules were done"
            return Tally(code, job.first), f"{done}: beginning again at seed {job.first}"
        return tally, f"going on at seed {tally.next}, after {tally.schedules} schedules"

    def save(self, job: Job, tally: Tally, now: bool = False) -> None:
        if self.path is None or (not now and time.monotonic() < self._saved + SAVE_EVERY_S):
            return
        self._saved = time.monotonic()
        self._tallies[job.name] = tally.to_plain()
        save_json(self.path, self._tallies)


# -------------------------------------------------------------------- running


def play(job: Job, seed: int) -> Outcome:
    return run(job.scenario(seed))


def outcomes(job: Job, seeds: Iterable[int], jobs: int, more: Callable[[], bool]) -> Iterator[Outcome]:
    """Run the seeds in `jobs` processes (one: in this one), in no particular order, while `more()`; what that raises
    ends it. With several it is the place for an interrupt: raised where it comes, that might leave a lock held that the
    thread needs which hears of the workers."""
    if jobs == 1:
        for seed in seeds:
            if not more():
                return
            yield play(job, seed)
        return
    # Spawned and not forked: torch's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    theirs, mine = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(jobs, context, initializer=_begin_worker, initargs=(theirs,))
    waiting: set[Future[Outcome]] = set()
    todo = iter(seeds)
    try:
        while True:
            going = more()
            # One more than there are workers: none is idle, and little is lost by an interrupt.
            while going and len(waiting) <= jobs and (following := next(todo, None)) is not None:
                waiting.add(pool.submit(play, job, following))
            if not waiting:
                return
            done, waiting = wait(waiting, LOOK_S, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
    finally:
        mine.close()  # nobody waits for what the workers are at
        pool.shutdown(wait=True, cancel_futures=True)
        theirs.close()


def _begin_worker(collector: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that collects
    torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(collector,), daemon=True).start()


def _end_with(collector: Connection) -> None:
    """It sends nothing, and closes its end when it collects no more, or is killed: a worker would finish its seed for
    nobody, and wait for the next one for ever."""
    collector.poll(None)
    os._exit(1)
