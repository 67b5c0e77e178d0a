"""Messages to frames and back: `[envelope, header]` on the control lane, `[envelope, header, payload]` for bulk.

The envelope names the protocol version, the run (a tag of run name and RunSpec hash: a process of another run that
took over an address is not mistaken for a peer), the sending voter and the kind of message.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from blake3 import blake3

from dlc.comm.catalogue import CODES, KINDS
from dlc.comm.ids import Voter
from dlc.comm.messages import PROTOCOL_VERSION, Bulk, Hello, Message, Welcome
from dlc.comm.wire import pack, unpack
from dlc.errors import ProtocolError

Frame = bytes | memoryview
TAG_BYTES = 8
ENVELOPE_BYTES, ENVELOPES_MAX = 256, 1024
"""Envelopes come again and again: so many, of at most this length (ours have some 70), are remembered decoded."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """Its shape, and the code of Hello, are the same in all versions: each can tell another what it is."""

    protocol: int
    tag: bytes
    sender: Voter
    code: int


class OtherVersion(ProtocolError):
    """A message of another protocol version, of which no more than the envelope is read."""

    def __init__(self, protocol: int, hello: bool) -> None:
        super().__init__(protocol, hello)
        self.protocol, self.hello = protocol, hello
        """hello: its sender asks for an answer."""

    def __str__(self) -> str:
        return (
            f"it speaks protocol version {self.protocol}, and this dlc {PROTOCOL_VERSION}: have the same version of "
            "dlc on all hosts"
        )


def told_version() -> Welcome:
    """The answer to one that asks in another version: of what version this dlc is, and that is all it reads of it."""
    return Welcome(PROTOCOL_VERSION, "", b"", None, (), "", "")


def run_tag(run: str, spec_hash: bytes) -> bytes:
    return blake3(run.encode() + b"\0" + spec_hash).digest(TAG_BYTES)


@lru_cache(maxsize=4 * len(KINDS))
def _envelope(sender: Voter, tag: bytes, code: int) -> bytes:
    return pack(Envelope(PROTOCOL_VERSION, tag, sender, code))


@lru_cache(maxsize=ENVELOPES_MAX)
def _opened(frame: bytes) -> Envelope:
    return unpack(frame, Envelope)


def encode(sender: Voter, tag: bytes, message: Message) -> list[Frame]:
    frames: list[Frame] = [_envelope(sender, tag, CODES[type(message)]), pack(message)]
    if isinstance(message, Bulk):
        frames.append(message.payload)  # type: ignore[attr-defined]
    return frames


def decode(frames: Sequence[Frame], tag: bytes) -> tuple[Voter, Message]:
    """The sender and the message. Raises ProtocolError for anything that a peer of this run would not send."""
    if not 2 <= len(frames) <= 3:
        raise ProtocolError(f"{len(frames)} frames")
    envelope = _opened(bytes(frames[0])) if len(frames[0]) <= ENVELOPE_BYTES else unpack(frames[0], Envelope)
    if envelope.protocol != PROTOCOL_VERSION:
        raise OtherVersion(envelope.protocol, envelope.code == CODES[Hello])
    kind = KINDS.get(envelope.code)
    if kind is None:
        raise ProtocolError(f"no message has the code {envelope.code}")
    if envelope.tag != tag and kind not in (Hello, Welcome):
        raise ProtocolError("a message of another run")
    message: Any = unpack(frames[1], kind)
    if issubclass(kind, Bulk) != (len(frames) == 3):
        raise ProtocolError(f"{kind.__name__} with {len(frames)} frames")
    if len(frames) == 3:
        message = dataclasses.replace(message, payload=frames[2])
    return envelope.sender, message
