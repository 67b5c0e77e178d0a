"""Who a peer is: an Ed25519 key pair, and an id derived from its public key.

The id is the lower-case base32 of the first 20 bytes of BLAKE3(public key): 32 characters, no padding. Nobody can
claim an id without the private key, because whoever checks a signature also derives the id from the public key that
came with it (`peer_id`). The key pair is kept in the peer's state directory, so a restarted peer keeps its id.
"""

from __future__ import annotations

import base64

from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from dlc.comm.ids import PeerId

PRIVATE_KEY_BYTES = 32
_ID_BYTES = 20


def peer_id(public_key: bytes) -> PeerId:
    """The id that belongs to a public key."""
    return base64.b32encode(blake3(public_key).digest(length=_ID_BYTES)).decode().lower()


def verify(public_key: bytes, data: bytes, signature: bytes) -> bool:
    """Whether `signature` over `data` was made with the private key of `public_key`; any bytes may be given."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


class Identity:
    """A peer's key pair."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.public_key: bytes = private.public_key().public_bytes_raw()
        self.peer: PeerId = peer_id(self.public_key)

    @classmethod
    def generate(cls) -> Identity:
        """A new peer."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_private_bytes(cls, private: bytes) -> Identity:
        """The peer whose private key was saved; raises ValueError unless there are 32 bytes."""
        return cls(Ed25519PrivateKey.from_private_bytes(private))

    def private_bytes(self) -> bytes:
        """The private key, to be saved where only its owner can read."""
        return self._private.private_bytes_raw()

    def sign(self, data: bytes) -> bytes:
        """A signature of 64 bytes."""
        return self._private.sign(data)

    def __repr__(self) -> str:
        return f"Identity({self.peer})"
