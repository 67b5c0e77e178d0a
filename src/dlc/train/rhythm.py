"""When the rounds of a `dlc.DiLoCo` are due, and what of its inner steps goes on meanwhile: as its caller gave it."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import SupportsIndex

from dlc.arguments import instance, number, whole
from dlc.errors import UsageError
from dlc.pacespec import check_overlap


@dataclass(frozen=True)
class Rhythm:
    """In inner steps."""

    sync_every: int
    """Between two rounds of the same fragment."""
    overlap: str
    overlap_steps: int
    """Made at most while a round is on its way, where they go on."""
    mixing: float
    fragments: int

    @classmethod
    def of(cls, sync_every: int, overlap: str, overlap_steps: int, mixing: float, fragments: int) -> Rhythm:
        """UsageError, ConfigError: one of them cannot be, or they do not go together. `overlap_steps` 0: until the next
        round is due."""
        if not isinstance(sync_every, SupportsIndex) or operator.index(sync_every) < 1:
            raise UsageError(f"sync_every must be a whole number of inner steps, at least 1, not {sync_every!r}")
        sync_every = operator.index(sync_every)
        instance("overlap", overlap, str, 'give "none", "delayed" or "eager"')
        overlap_steps, fragments = whole("overlap_steps", overlap_steps, 0), whole("fragments", fragments, 1)
        mixing = number("mixing", mixing, 0, 1, "0 to below 1")
        check_overlap(overlap, overlap_steps, mixing, fragments, sync_every)
        return cls(sync_every, overlap, overlap_steps or sync_every // fragments, mixing, fragments)

    @property
    def period(self) -> int:
        """Between two rounds."""
        return self.sync_every // self.fragments

    @property
    def overlaps(self) -> bool:
        """Steps go on during a round."""
        return self.overlap != "none"

    @property
    def whole(self) -> bool:
        """A round that counted all inner steps leaves nothing of what they changed."""
        return self.fragments == 1 and not self.mixing
