"""Which address a peer tells the others to dial, once the run has begun: the first guess may be wrong, and a host may
get another one. Both functions return what is to be changed in its record `own`."""

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


def reached_at(host: str, intro: Introduction, own: Record) -> dict[str, Any]:
    """Others can dial this address of my host, since one did. It takes the place of loopback, which stood there for
    want of a better guess, and of nothing else."""
    if not on_this_host(own.control[0]):
        return {}
    record = intro.record(host)
    if record.control == own.control:
        return {}
    log.info("others reach this peer at %s, and are told so from now on", record.control[0])
    return {"control": record.control, "bulk": record.bulk}


def seen_at(host: str, intro: Introduction, own: Record, seen: Counter[str]) -> dict[str, Any]:
    """Nobody answers where this peer is said to be, and this is where it was seen to be. seen: how often, since
    somebody answered last."""
    record = intro.record(host)
    seen[host] += 1
    if intro.advertise and seen[host] == SEEN_MIN and parse_address(own.control[0])[0] != host:
        log.warning(
            "nobody reaches this peer at %s, which --advertise gives; it was seen at %s. If that is where others are "
            "to dial it now, start it again with that, or without --advertise; a name is looked up anew all the time",
            own.control[0],
            host,
        )
    if record.control == own.control or on_this_host(record.control[0]):
        return {}
    log.warning("nobody reaches this peer where it said; it was seen at %s, and says so now", record.control[0])
    return {"control": record.control, "bulk": record.bulk}
