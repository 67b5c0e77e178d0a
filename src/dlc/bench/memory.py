"""Whether a measurement fits this host: what takes more memory than is free is refused, before the system ends it."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

from dlc.errors import UsageError

MEMINFO, GROUPS, CGROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
V2 = "memory.max", "memory.current", "inactive_file"
"""Where a control group tells its limit, what is taken, and how much of that is files that can be dropped."""


def check_memory(what: str, needed_bytes: float, remedy: str) -> None:
    """UsageError: `what`, the options as they were given, takes more memory than is free; `remedy` says what to do."""
    free = _free_bytes()
    if needed_bytes > free:
        raise UsageError(
            f"{what} takes about {needed_bytes / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free: {remedy}"
        )


def _free_bytes() -> float:
    """Memory that can be had without swapping; infinite where the system does not tell."""
    try:
        told = dict(line.split(":", 1) for line in MEMINFO.read_text(encoding="ascii").splitlines())
        free = int(told["MemAvailable"].split()[0]) * 1024.0
    except (OSError, ValueError, LookupError):
        free = math.inf
    return min(free, _free_of_groups())


def _free_of_groups() -> float:
    """What the limits of a container, or of another control group of this process, leave; infinite: no limit."""
    free = math.inf
    with contextlib.suppress(OSError):
        for line in GROUPS.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            base = CGROUPS / "memory" if controllers else CGROUPS
            most, used, cached = V1 if controllers else V2
            group = Path(path.lstrip("/"))
            for folder in (base / group, *(base / above for above in group.parents)):
                with contextlib.suppress(OSError, ValueError, LookupError):  # there is none, or no limit ("max")
                    limit, taken = (int((folder / name).read_text()) for name in (most, used))
                    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                    free = min(free, max(limit - taken + int(stat[cached]), 0.0))
    return free
