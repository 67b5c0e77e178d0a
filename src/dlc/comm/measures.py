"""The messages of `dlc bench`: measuring the way between two sites. No run is involved.

Frozen dataclasses as in messages.py, with a run tag of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dlc.comm.messages import Bulk


@dataclass(frozen=True, slots=True)
class MeasureOpen:
    """Asks a site that serves measurements for its time; repeated until it is answered."""

    session: bytes
    """Random, chosen by the asker: names the measurement in all that follows."""
    seconds: float
    bytes_max: int
    """Payload bytes that will be moved at most, both directions together."""


@dataclass(frozen=True, slots=True)
class MeasureAnswer:
    """Answer to MeasureOpen."""

    session: bytes
    refusal: str
    """Why not; empty: the measurement may begin."""
    wait_s: float
    """> 0: another measurement goes on here, and ends within this time."""
    bulk_port: int


@dataclass(frozen=True, slots=True)
class MeasurePing:
    session: bytes
    serial: int


@dataclass(frozen=True, slots=True)
class MeasurePong:
    session: bytes
    serial: int


@dataclass(frozen=True, slots=True)
class MeasureClose:
    """The measurement is over: the site is free for others."""

    session: bytes


@dataclass(frozen=True, slots=True)
class MeasureOrder:
    """Asks a site to measure its way to another one; repeated while the asker wants the outcome."""

    order: bytes
    address: str
    seconds: float
    bytes_max: int


@dataclass(frozen=True, slots=True)
class MeasureOutcome:
    """Answer to every MeasureOrder."""

    order: bytes
    running: bool
    error: str
    """Why there is no rate; empty while it runs, and where it went well."""
    wait_s: float
    """> 0: another measurement goes on here, and ends within this time; nothing was begun."""
    up_mbps: float | None
    """From the asked site to `address`; None: see `error`."""
    rtt_ms: float | None
    """Median."""


@dataclass(frozen=True, slots=True)
class MeasurePush(Bulk):
    """Payload to be counted and thrown away."""

    session: bytes
    payload: bytes = field(default=b"", metadata={"frame": True})


@dataclass(frozen=True, slots=True)
class MeasureCount(Bulk):
    """Answer to MeasurePush, on its connection: what has come in on it so far, by the receiver's clock."""

    session: bytes
    total_bytes: int
    at_s: float
    payload: bytes = field(default=b"", metadata={"frame": True})


@dataclass(frozen=True, slots=True)
class MeasurePull(Bulk):
    """Asks for one MeasureData with so many bytes on this connection."""

    session: bytes
    n_bytes: int
    payload: bytes = field(default=b"", metadata={"frame": True})


@dataclass(frozen=True, slots=True)
class MeasureData(Bulk):
    session: bytes
    payload: bytes = field(default=b"", metadata={"frame": True})


MEASURES: tuple[type, ...] = (
    MeasureOpen,
    MeasureAnswer,
    MeasurePing,
    MeasurePong,
    MeasureClose,
    MeasureOrder,
    MeasureOutcome,
    MeasurePush,
    MeasureCount,
    MeasurePull,
    MeasureData,
)
"""Their order gives their codes on the wire: append only."""
