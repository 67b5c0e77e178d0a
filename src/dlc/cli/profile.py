"""`--profile DIR[:STEPS]`: a trace of a few inner steps, by torch.profiler, for chrome://tracing or ui.perfetto.dev.

step 1      not looked at: allocations, kernels that are chosen or compiled
step 2      the profiler warms up
then        `STEPS` steps are recorded, with what lies between them: a round, if one does
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from dlc.errors import UsageError

log = logging.getLogger(__name__)

Event = dict[str, Any]


class StepProfile:
    """A sink that profiles the thread on which it is given the events: the trainer's."""

    def __init__(self, folder: Path, steps: int, peer: str) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--profile {folder} cannot be written: {error.strerror or error}") from None
        self._folder, self._steps, self._name = folder, steps, peer[:8]
        self._seen = self._first = self._last = 0
        self._profiler: Any = None
        self._over = False

    def take(self, event: Event) -> None:
        if event["event"] != "step" or self._over:
            return
        self._seen += 1
        if self._profiler is None:
            phases = schedule(wait=0, warmup=1, active=self._steps, repeat=1)
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
            self._profiler = profile(activities=activities, schedule=phases, on_trace_ready=self._write)
            self._profiler.start()
            return
        self._last = event["step"]
        self._first = self._last if self._seen == 3 else self._first
        self._profiler.step()
        if self._seen == self._steps + 2:
            self.close()

    def close(self) -> None:
        """Ends it; a run that was over before writes what it has."""
        if self._over:
            return
        self._over = True
        if self._profiler is not None:
            self._profiler.stop()
        if self._seen < 3:
            log.warning("the run ended before an inner step was profiled; there is no trace")

    def _write(self, profiler: Any) -> None:
        if self._seen < 3:
            return
        path = self._folder / f"{self._name}-steps-{self._first}-{self._last}.json"
        try:
            path.unlink(missing_ok=True)
            profiler.export_chrome_trace(str(path))
            if not path.exists():  # torch has said why on stderr, and nothing to us
                if (begun := path.with_name(f"{path.name}.tmp")).exists():
                    os.truncate(begun, 0)  # torch keeps it open, so that it would take its room for as long as we live
                    begun.unlink()
                raise OSError("the disk is full, or the folder cannot be written to")
        except (OSError, RuntimeError) as error:
            log.warning("the profile %s could not be written: %s; training goes on", path, error)
            return
        log.info("profile of inner steps %d to %d: %s", self._first, self._last, path)
