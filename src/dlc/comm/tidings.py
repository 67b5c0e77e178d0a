"""What a helper says of its spans: what becomes of many of them at about the same time is told in one line."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from dlc.comm.serverpeer import Notice

WAIT_S = 1.0
"""The first of them waits so long for others; counted anew after each line."""


class Tidings:
    def __init__(self) -> None:
        self._kept: dict[tuple[str, bool], dict[int, int]] = {}
        """What, and whether it is serious: the spans, and the version of each."""
        self._since = 0.0

    def add(self, what: str, span: int, version: int, now: float, serious: bool = False) -> None:
        if not self._kept:
            self._since = now
        self._kept.setdefault((what, serious), {})[span] = version

    def due(self, now: float) -> list[Notice]:
        """What has waited for long enough; each is told once."""
        if not self._kept or now < self._since + WAIT_S:
            return []
        kept, self._kept = self._kept, {}
        return [
            Notice(f"{spans_text(at)}: {what} ({_versions(at.values())})", serious)
            for (what, serious), at in kept.items()
        ]


def spans_text(spans: Iterable[int]) -> str:
    """As "span 3", or "spans 0, 3 to 7"."""
    numbered = enumerate(sorted(spans))
    runs = [[span for _, span in run] for _, run in groupby(numbered, key=lambda pair: pair[1] - pair[0])]
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"span{'s' if len(runs) > 1 or len(runs[0]) > 1 else ''} {', '.join(parts)}"


def _versions(versions: Iterable[int]) -> str:
    least, most = min(versions), max(versions)
    return f"version {least}" if least == most else f"versions {least} to {most}"
