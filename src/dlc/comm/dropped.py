"""What a peer threw away of others, and why: never fatal, and told once where no honest peer sends such."""

from __future__ import annotations

import logging
from collections import Counter

from dlc.comm.ids import PeerId, Voter

log = logging.getLogger(__name__)

DROPPED_MAX = 4096
"""Kinds that are counted."""
UNASKED = "it came too late, or nobody asked for it"
"""Honest peers send such, too."""


class Dropped(Counter[tuple[PeerId, str]]):
    """How often, by sender and reason."""

    def note(self, sender: Voter, why: str, bad: bool = False) -> None:
        """bad: no honest peer sends it."""
        key = (sender.peer, why)
        if key not in self and len(self) >= DROPPED_MAX:
            return  # of peers that there are not
        self[key] += 1
        if bad and self[key] == 1:
            log.warning("%s sent what was dropped: %s (told once; the round goes on without it)", sender.peer[:8], why)
