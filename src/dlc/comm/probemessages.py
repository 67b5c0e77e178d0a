"""What peers say to each other when one measures its link (linkprobe.py). Frozen dataclasses as in messages.py."""

from __future__ import annotations

from dataclasses import dataclass, field

from dlc.comm.messages import Bulk


@dataclass(frozen=True, slots=True)
class ProbeOpen:
    """May I send you junk for a moment?"""

    session: int
    """Random, chosen by the asker: names the probe in all that follows."""


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """Answer to ProbeOpen; and, while junk comes, that no more of it is wanted."""

    session: int
    wait_s: float
    """0: send. Else not now: ask again after so many seconds at the earliest."""


@dataclass(frozen=True, slots=True)
class ProbePush(Bulk):
    """Junk, to be counted and thrown away."""

    session: int
    payload: bytes | memoryview = field(default=b"", metadata={"frame": True})


@dataclass(frozen=True, slots=True)
class ProbeCount:
    """So much junk has come so far."""

    session: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class ProbeClose:
    """The probe is over: you are free for others."""

    session: int


PROBE_MESSAGES: tuple[type, ...] = (ProbeOpen, ProbeAnswer, ProbePush, ProbeCount, ProbeClose)
"""The index is the code on the wire, counted from that of the family in catalogue.py: append only."""
