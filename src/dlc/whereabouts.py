"""Which address a peer tells the others to dial, once the run has begun: the first guess may be wrong, and a host may
get another one.

    somebody dialled this address of my host ──> reached     takes the place of loopback
    nobody answers me, and I was seen here   ──> seen        takes the place of any
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from dlc.comm.addresses import on_this_host, parse_address
from dlc.comm.messages import Record
from dlc.joining import Introduction

log = logging.getLogger(__name__)

SEEN_MIN = 5
"""Once may be the moment in which a cut has healed, and all answer again; it is asked once in T_dead / 2 or so."""


class Whereabouts:
    """Of the peer of `intro`; for the driver's thread. Its answers are what is to be changed in the peer's record,
    `own`."""

    def __init__(self, intro: Introduction) -> None:
        self._intro = intro
        self._reached = ""
        """By which address of this host somebody dialled it last."""
        self._seen = Counter[str]()
        """Where this peer was seen to be, and how often, since nobody answers."""

    def reached(self, host: str, own: Record | None) -> dict[str, Any]:
        """Others can dial this address of my host, since one did. Without a record, before the run has begun, it is
        kept for `begun`."""
        self._reached = host
        return self.begun(own) if own is not None else {}

    def begun(self, own: Record) -> dict[str, Any]:
        """Where somebody did, that address takes the place of loopback, which stood there for want of a better guess,
        and of nothing else."""
        if not self._reached or not on_this_host(own.control[0]):
            return {}
        record = self._intro.record(self._reached)
        if record.control == own.control:
            return {}
        log.info("others reach this peer at %s, and are told so from now on", record.control[0])
        return {"control": record.control, "bulk": record.bulk}

    def seen(self, host: str, own: Record) -> dict[str, Any]:
        """Nobody answers where this peer is said to be, and this is where it was seen to be."""
        record = self._intro.record(host)
        self._seen[host] += 1
        if self._intro.advertise and self._seen[host] == SEEN_MIN and parse_address(own.control[0])[0] != host:
            log.warning(
                "nobody reaches this peer at %s, which --advertise gives; it was seen at %s. If that is where others "
                "are to dial it now, start it again with that, or without --advertise; a name is looked up anew all "
                "the time",
                own.control[0],
                host,
            )
        if record.control == own.control or on_this_host(record.control[0]):
            return {}
        log.warning("nobody reaches this peer where it said; it was seen at %s, and says so now", record.control[0])
        return {"control": record.control, "bulk": record.bulk}

    def answered(self) -> None:
        """Somebody answers: it is where it said."""
        self._seen.clear()
