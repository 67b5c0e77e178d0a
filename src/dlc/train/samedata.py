"""Whether all trainers mean the same samples by the same positions: each tells the fingerprint of its data, and
keeps it in its checkpoints.

Other data is no reason to stop, since every contribution is still a step on real text, but samples are then trained
twice or not at all, and validation text may be trained on: people have to know.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from dlc.train.saves import Saved
from dlc.train.swarm import MemberView

log = logging.getLogger(__name__)

FIELD = "data"
"""Of a trainer's status."""
DIGITS = 16
"""Hex digits told: enough to tell data apart that differs by accident."""


def told_of(fingerprint: bytes) -> str:
    """What is told of data, and kept."""
    return fingerprint.hex()[:DIGITS]


class SameData:
    """Looks at what the others tell, and warns once of each that has other data."""

    def __init__(self, fingerprint: bytes, source: str) -> None:
        self.mine, self._source = told_of(fingerprint), source
        self._warned: set[str] = set()

    def goes_on(self, saved: Saved) -> None:
        """Warn where a checkpoint was trained on other data than there is now."""
        if saved.data not in ("", self.mine):
            log.warning(
                "the data at %s is not what it was when %s was written (files came, went, or changed; or the tokenizer "
                "did): positions mean other samples now, so some are trained twice or never, and validation text "
                "may have been trained on. Put the data back as it was, or found another run with it",
                self._source,
                saved.path,
            )

    def look(self, members: Iterable[MemberView]) -> list[str]:
        """The peers that are newly known to have other data; what another host says is checked."""
        other = []
        for member in members:
            told = member.status.get(FIELD)
            if member.me or member.left or type(told) is not str or told == self.mine or member.id in self._warned:
                continue
            self._warned.add(member.id)
            other.append(member.id)
            log.warning(
                "peer %s has other data at %s than this one: compare the files (or the revision of the dataset, and "
                "the version of `datasets`) and the tokenizer on both hosts; positions mean other samples there",
                member.id[:8],
                self._source,
            )
        return other
