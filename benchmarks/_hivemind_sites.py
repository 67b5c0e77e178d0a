"""Processes that average under Hivemind's names, told what to do from here (`_hivemind.py` is what they run)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from _workers import Workers

PYTHON = Path(__file__).resolve().parent.parent / ".venv-hivemind" / "bin" / "python"
MISSING = "no virtual environment .venv-hivemind; make it with `make hivemind`"
SCRIPT = Path(__file__).resolve().parent / "_hivemind.py"
MATCH_S = 4.0
"""For all to find each other, before a round whose matchmaking is not timed."""


@dataclass(frozen=True)
class Place:
    """Where one of them runs."""

    host: str = "127.0.0.1"
    """What it listens on."""
    within: Sequence[str] = ()
    """Words before its command, such as those that put it into a network namespace."""


@dataclass(frozen=True)
class Engine:
    """What their processes run."""

    module: str = "hivemind"
    """That is imported, and has Hivemind's names."""
    python: str = str(PYTHON)
    """The interpreter that has it."""
    run_key: str = ""
    """For a module that knows such; it is needed beyond loopback."""


THEIRS = Engine()


class WrongMean(RuntimeError):
    """A round has returned at all processes, and in some of them with something else than the mean of all."""


class HivemindSites:
    """Processes that average `numel` numbers; leaving it ends them and all that they started.

    matchmaking_s: `min_matchmaking_time`; None: not given, the default of the module. open_: no `target_group_size`.
    """

    def __init__(
        self,
        places: Sequence[Place],
        numel: int,
        engine: Engine = THEIRS,
        matchmaking_s: float | None = MATCH_S,
        open_: bool = False,
    ) -> None:
        self._engine = engine.module
        self._names = [f"site-{rank}" for rank in range(len(places))]
        self._workers = Workers(str(SCRIPT), engine.python)
        more = ["--module", engine.module]
        more += ["--open"] if open_ else []
        more += ["--key", engine.run_key] if engine.run_key else []
        more += [] if matchmaking_s is None else ["--matchmaking", str(matchmaking_s)]
        addresses: list[str] = []
        try:
            for rank, (name, place) in enumerate(zip(self._names, places, strict=True)):
                words = ["--numel", str(numel), "--n", str(len(places)), "--rank", str(rank), "--host", place.host]
                words += ["--peers", ",".join(addresses)] if addresses else []
                self._workers.start(name, *words, *more, within=place.within)
                if rank == 0:
                    addresses = self._workers.wait(name, "ready")["addresses"]
            for name in self._names[1:]:
                self._workers.wait(name, "ready")
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __enter__(self) -> HivemindSites:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._workers.__exit__(kind, error, at)

    def round(self) -> float:
        """Seconds of the slowest, from the trigger on. WrongMean where a mean is wrong."""
        self._all("prepare", "prepared")
        return max(one["ended"] - one["began"] for one in self._averaged("round"))

    def step(self) -> float:
        """Seconds from the first call of `averager.step` to the last return. WrongMean where a mean is wrong."""
        self._all("fill", "filled")
        told = self._averaged("step")
        seconds: float = max(one["ended"] for one in told) - min(one["began"] for one in told)
        return seconds

    def _averaged(self, line: str) -> list[dict[str, Any]]:
        told = self._all(line, "done")
        for name, one in zip(self._names, told, strict=True):
            if not one["right"] or one["contributors"] != len(self._names):
                raise WrongMean(f"{self._engine}: not the mean of all: {one}; {self._workers.said(name)}")
        return told

    def _all(self, line: str, event: str) -> list[dict[str, Any]]:
        for name in self._names:
            self._workers.tell(name, line)
        return [self._workers.wait(name, event) for name in self._names]
