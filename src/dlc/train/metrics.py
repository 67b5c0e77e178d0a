"""What a peer tells of its training, in a file: `metrics.jsonl`.

One JSON object a line, each written at once and whole, so that a live table or a plot can follow the file:

    {"time_s": 1712.5, "step": 300, "loss": 2.31, "tokens_per_s": 51000.0}
    {"time_s": 1713.0, "report": {...}}
    {"time_s": 1713.5, "round": 3, "validation_loss": 2.25}

A peer that goes on from a checkpoint appends: of steps and rounds that it makes again, which shows in numbers that go
back, the later lines count. Lines of one step that follow each other are steps of their own, beyond those of a round.
Values that are not finite stand as null (JSON has no NaN). Metrics never stop a training: a full disk is logged once,
and the next line is tried again. The file grows as long as the peer trains. Where somebody removes it, or gives it
another name, it is begun anew; one that is cut is gone on with.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from dlc.errors import UsageError

log = logging.getLogger(__name__)

FILE_NAME = "metrics.jsonl"


class MetricsWriter:
    """Appends to `folder`/metrics.jsonl.

    before_write: called before the file is made; UsageError: it may not be.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        clock: Callable[[], float] = time.time,
        before_write: Callable[[], None] = lambda: None,
    ) -> None:
        self.path = Path(folder) / FILE_NAME
        self._clock, self._before_write = clock, before_write
        self._fd: int | None = None
        self._told = False

    def scalar(self, step: int, **values: float) -> None:
        """Named values of one global step."""
        self._write({"time_s": self._clock(), "step": step, **values})

    def of_round(self, t: int, **values: float | None) -> None:
        """Named values after round, or exchange, `t`."""
        self._write({"time_s": self._clock(), "round": t, **values})

    def report(self, report: Mapping[str, Any]) -> None:
        """One round's report; bytes stand as hex, other unknown things as their text."""
        self._write({"time_s": self._clock(), "report": dict(report)})

    def close(self) -> None:
        """Write out what is held back; later calls open the file again."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _write(self, record: dict[str, Any]) -> None:
        try:
            line = (json.dumps(_jsonable(record), allow_nan=False) + "\n").encode()
            if self._fd is not None and not self._is_there(self._fd):
                self.close()
            if self._fd is None:
                self._before_write()
                self.path.parent.mkdir(parents=True, exist_ok=True)
                flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
                self._fd = os.open(self.path, flags, 0o644)
            if _is_torn(self._fd):
                line = b"\n" + line
            if os.write(self._fd, line) != len(line):
                self._tell(f"{self.path} is not complete: the disk is full")
        except (OSError, UsageError) as e:
            self._tell(f"{self.path} is not complete: {e}")

    def _is_there(self, fd: int) -> bool:
        """That file still has the name."""
        try:
            return os.path.samestat(os.fstat(fd), self.path.stat())
        except FileNotFoundError:
            return False

    def _tell(self, message: str) -> None:
        if not self._told:
            self._told = True
            log.warning("%s; training goes on", message)


def _is_torn(fd: int) -> bool:
    """The last line has no end: torn by a full disk, by a kill, or where the file was cut."""
    if not os.fstat(fd).st_size:
        return False
    os.lseek(fd, -1, os.SEEK_END)  # Windows has no pread; what is written goes to the end all the same
    return os.read(fd, 1) != b"\n"


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """All whole lines of a metrics file; a line torn by a full disk or a kill is left out."""
    records: list[dict[str, Any]] = []
    for line in Path(path).read_bytes().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def _jsonable(value: Any) -> Any:
    """The same value in what JSON knows."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int, bool)):
        return value
    if isinstance(value, Mapping):
        return {str(k): _jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_jsonable(v) for v in value]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).hex()
    if is_dataclass(value) and not isinstance(value, type):
        return _jsonable(asdict(value))
    item = getattr(value, "item", None)  # a 0-dim tensor or a numpy number
    return _jsonable(item()) if callable(item) and getattr(value, "ndim", 1) == 0 else str(value)
