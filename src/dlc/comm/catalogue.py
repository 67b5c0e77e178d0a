"""Every kind of message, with its code on the wire."""

from __future__ import annotations

from dlc.comm.measures import MEASURES
from dlc.comm.messages import MESSAGES

MEASURES_FROM = 128
"""Code of the first measuring message: leaves the codes below to the swarm's."""

KINDS: dict[int, type] = {**dict(enumerate(MESSAGES)), **dict(enumerate(MEASURES, MEASURES_FROM))}
CODES: dict[type, int] = {kind: code for code, kind in KINDS.items()}
