"""Hivemind processes, told what to do from here (`_hivemind.py` is what they run)."""

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


@dataclass(frozen=True)
class Place:
    """Where one of them runs."""

    host: str = "127.0.0.1"
    """What it listens on."""
    within: Sequence[str] = ()
    """Words before its command, such as those that put it into a network namespace."""


class HivemindSites:
    """Processes that average `numel` numbers; leaving it ends them and all that they started."""

    def __init__(self, places: Sequence[Place], numel: int) -> None:
        self._names = [f"hivemind-{rank}" for rank in range(len(places))]
        self._workers = Workers(str(SCRIPT), str(PYTHON))
        addresses: list[str] = []
        try:
            for rank, (name, place) in enumerate(zip(self._names, places, strict=True)):
                words = ["--numel", str(numel), "--n", str(len(places)), "--rank", str(rank), "--host", place.host]
                words += ["--peers", ",".join(addresses)] if addresses else []
                self._workers.start(name, *words, within=place.within)
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
        """Seconds of the slowest, from the trigger on. RuntimeError where a mean is wrong."""
        self._all("prepare", "prepared")
        told = self._all("round", "done")
        for one in told:
            if not one["right"] or one["contributors"] != len(self._names):
                raise RuntimeError(f"hivemind: not the mean of all: {one}")
        return max(float(one["seconds"]) for one in told)

    def _all(self, line: str, event: str) -> list[dict[str, Any]]:
        for name in self._names:
            self._workers.tell(name, line)
        return [self._workers.wait(name, event) for name in self._names]
