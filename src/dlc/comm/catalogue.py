"""Every kind of message, with its code on the wire."""

from __future__ import annotations

from dlc.comm.measures import MEASURES
from dlc.comm.meshmessages import MESH
from dlc.comm.messages import MESSAGES
from dlc.comm.probemessages import PROBE_MESSAGES
from dlc.comm.servermessages import SERVER_MESSAGES

MEASURES_FROM = 128
"""Code of the first measuring message: leaves the codes below to the swarm's."""

SERVICES: dict[int, tuple[type, ...]] = {64: MESH, 320: SERVER_MESSAGES, 384: PROBE_MESSAGES}
"""Messages of the machines outside the log (service.py), each family from a code of its own; append only."""

SERVICE_KINDS = frozenset(kind for family in SERVICES.values() for kind in family)

KINDS: dict[int, type] = {
    **dict(enumerate(MESSAGES)),
    **dict(enumerate(MEASURES, MEASURES_FROM)),
    **{first + i: kind for first, family in SERVICES.items() for i, kind in enumerate(family)},
}
CODES: dict[type, int] = {kind: code for code, kind in KINDS.items()}
