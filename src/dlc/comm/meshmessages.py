"""What peers say to each other outside the log: notices, pulled parcels, groups, gifts.

Frozen dataclasses as in messages.py. A parcel is one chunk of a vector that its holder keeps under a key; everything
that is averaged without the log travels in parcels, pulled by whoever wants it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from dlc.comm.ids import Voter
from dlc.comm.messages import Bulk, GridSpec

# ------------------------------------------------------------------ the board


@dataclass(frozen=True, slots=True)
class Notice:
    """A small value under a key; of one author and key the newest (author.inc, seq) counts."""

    author: Voter
    key: str
    seq: int
    left_s: float
    """Seconds until it expires, when this was sent: no clock is compared between hosts."""
    gone: bool
    """Withdrawn: older ones of the key are no longer shown."""
    near: bool
    """For some peers only, who are told by the author: it is not handed on."""
    value: bytes


@dataclass(frozen=True, slots=True)
class Notices:
    items: tuple[Notice, ...]


# ------------------------------------------------------------------ parcels


class Key(NamedTuple):
    """What a holder keeps a vector under."""

    channel: str
    step: int
    part: int


@dataclass(frozen=True, slots=True)
class Pull:
    """Send me these chunks as soon as you have them; `grid`: what I take the vector for."""

    key: Key
    grid: GridSpec
    chunks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Coming:
    """Answer to Pull: the key is held here, but none of the chunks is ready yet."""

    key: Key


@dataclass(frozen=True, slots=True)
class NoParcel:
    """Answer to Pull: it is not had here, and will not be."""

    key: Key
    why: str


class LeftOut(NamedTuple):
    """A contributor that a result is without."""

    seat: int
    why: str


@dataclass(frozen=True, slots=True)
class Parcel(Bulk):
    """One chunk."""

    key: Key
    chunk: int
    weight: float
    """Of a contribution or gift: its own; of a result: the sum of those included."""
    included: tuple[int, ...]
    """Of a result: seats whose contributions are in this chunk's mean, ascending."""
    left_out: tuple[LeftOut, ...]
    """Of a result: the other contributors, ascending, as its owner saw them."""
    payload: bytes | memoryview = field(default=b"", metadata={"frame": True})


# ------------------------------------------------------------------ groups


@dataclass(frozen=True, slots=True)
class Wish:
    """Value of the notice of a peer that waits for a group of this key."""

    nonce: int
    """Names this attempt."""
    grid: GridSpec
    weight: float
    label: str
    """Those of one group that contribute with an equal label bring the same vector: their weight is divided among
    them."""
    contributes: bool
    owns: bool
    receives: bool
    target: int
    """A group that it forms begins as soon as it has so many; 0: no number."""
    least: int
    """Fewer are no group for it, whoever forms it."""
    up_Bps: float
    """What its link carries towards the others; 0: unknown."""
    down_Bps: float
    crowd: bytes
    """Digest of those whom it waits for (crowd.py), itself among them; empty: it waits to be invited."""
    gather: bytes
    """What all members are to get, where it is shown with a crowd."""
    apart: tuple[Voter, ...] = ()
    """Those who are up and answer its author by a relay only, which carries no bulk."""


@dataclass(frozen=True, slots=True)
class Invite:
    """From the first in rank of those who wait: come into the group that I form now."""

    key: str
    nonce: int
    """Names the group, together with its sender."""
    wish: int
    """Nonce of the receiver's wish."""


@dataclass(frozen=True, slots=True)
class Accept:
    """I am in, and wait for Begin; repeated until it comes."""

    key: str
    nonce: int
    gather: bytes


@dataclass(frozen=True, slots=True)
class Decline:
    """I am not in this group. Without a nonce, to my crowd: nor in one of the wish that I have given up."""

    key: str
    nonce: int
    given_up: int
    """The wish that was invited, or that the group is of, where its owner has given it up and may wait anew, with
    another one; else 0."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """This group is not formed with you: you are free again."""

    key: str
    nonce: int


@dataclass(frozen=True, slots=True)
class Seat:
    """One member of a group that begins."""

    voter: Voter
    wish: int
    """Nonce of the wish that it showed."""
    weight: float
    contributes: bool
    receives: bool
    chunks: int
    """How many chunks of the grid it owns; the owners' chunks follow each other in the order of the seats."""
    up_Bps: float
    down_Bps: float
    gather: bytes


@dataclass(frozen=True, slots=True)
class Begin:
    """The group is formed: who is in it, and who reduces what."""

    key: str
    nonce: int
    grid: GridSpec
    seats: tuple[Seat, ...]
    crowd: bool
    """It has formed by itself (crowd.py); otherwise it comes from the one who invited."""


@dataclass(frozen=True, slots=True)
class Done:
    """I need nothing more of this group."""

    key: str
    nonce: int


# ------------------------------------------------------------------ gossip


@dataclass(frozen=True, slots=True)
class Place:
    """Value of the notice of a peer that gossips: where it stands."""

    t: int
    weight: float
    sketch: bytes
    """Projection of its vector (sketch.py); empty before its first step."""
    made: int
    """Steps that it made: `t` passes over those that others made meanwhile."""


@dataclass(frozen=True, slots=True)
class Gift:
    """A share of my mass is yours, as soon as you have pulled the vector that I hold. Repeated until it is answered."""

    name: str
    serial: int
    """Counts the giver's gifts to all; one at a time is on its way to each."""
    to: Voter
    step: int
    weight: float
    grid: GridSpec
    vector: int
    """What it is held under: `Key.step`. Gifts of one step share a vector."""


@dataclass(frozen=True, slots=True)
class Withdraw:
    """If you have not taken this gift yet, do not take it any more: answered by Taken or Refused, for good."""

    name: str
    serial: int
    to: Voter


@dataclass(frozen=True, slots=True)
class Taken:
    """All of it is here and counts here from now on."""

    name: str
    serial: int


@dataclass(frozen=True, slots=True)
class Refused:
    """It is not taken, now or ever: it counts with the giver again."""

    name: str
    serial: int
    why: str


MESH: tuple[type, ...] = (
    Notices,
    Pull,
    Coming,
    NoParcel,
    Parcel,
    Invite,
    Accept,
    Decline,
    Cancel,
    Begin,
    Done,
    Gift,
    Withdraw,
    Taken,
    Refused,
)
"""The index is the code on the wire, counted from that of the family in catalogue.py: append only."""
