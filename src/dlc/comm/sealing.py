"""Encryption of the bulk lane: session keys for each connection, and AES-256-GCM for what it carries.

    who connects                            who listens
    e = a fresh X25519 key
    [HELLO, e]                     ──>      f = a fresh X25519 key
                                   <──      [HELLO, f, MAC by the third key]
    numbered, sealed messages      <─>      numbered, sealed messages

Both derive three keys from X25519(e, f), the run's secret for bulk and both public keys by HKDF-SHA256: one for each
direction, and one by which the listener shows that it has the others. So only holders of the run key come to the same
keys, each connection has its own, and who learns the run key later cannot read what was recorded before, as the private
keys are forgotten. It is the pattern NNpsk of the Noise framework (noiseprotocol.org), with the secret as HKDF's salt.

Every message has a number that its direction never uses twice, whether it was sent in the end or not: it stands before
the first frame, and is the nonce together with the frame's place and how many there are. A number that is not above
the last one is refused, so nothing can be shown twice, cut short or put together anew; what is left out is as if it
had been lost with a connection.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

Frame = bytes | memoryview

HELLO, AGAIN = b"dlc hello 1", b"dlc again 1"
"""Shorter than any sealed frame. AGAIN: there is no session for what you sent: say hello anew."""
KEY_BYTES, PUBLIC_BYTES, NUMBER_BYTES, TAG_BYTES = 32, 32, 8, 16
SEAL_BYTES = NUMBER_BYTES + TAG_BYTES
"""By which a frame becomes longer, at most."""


class BrokenSeal(Exception):
    """This was not sealed in this session, or was shown before."""


class Session:
    """The two directions of one connection, as one of its ends sees them."""

    def __init__(self, sealing: bytes, opening: bytes) -> None:
        """Keys, 32 bytes each."""
        self._sealing, self._opening = AESGCM(sealing), AESGCM(opening)
        self._sealed = self._opened = 0
        """The last numbers."""

    def seal(self, frames: Sequence[Frame]) -> list[bytes]:
        """The message as it is to be sent, once."""
        self._sealed += 1
        number = self._sealed.to_bytes(NUMBER_BYTES, "big")
        sealed = [
            self._sealing.encrypt(_nonce(number, index, len(frames)), frame, None) for index, frame in enumerate(frames)
        ]
        sealed[0] = number + sealed[0]
        return sealed

    def open(self, sealed: Sequence[Frame]) -> list[bytes]:
        """The message that the other end sealed. BrokenSeal: it did not, or this came before."""
        first = memoryview(sealed[0])
        number = bytes(first[:NUMBER_BYTES])
        if len(number) < NUMBER_BYTES or int.from_bytes(number, "big") <= self._opened:
            raise BrokenSeal
        bodies = [first[NUMBER_BYTES:], *sealed[1:]]
        try:
            frames = [
                self._opening.decrypt(_nonce(number, index, len(bodies)), body, None)
                for index, body in enumerate(bodies)
            ]
        except InvalidTag:
            raise BrokenSeal from None
        self._opened = int.from_bytes(number, "big")
        return frames


class Greeting:
    """Of who connects: from its hello until the answer."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()

    @property
    def hello(self) -> list[bytes]:
        return [HELLO, self.public]

    def answered(self, frames: Sequence[Frame]) -> Session | None:
        """The session, if this answers this very hello and comes from a holder of the run key."""
        if len(frames) != 3 or len(frames[1]) != PUBLIC_BYTES:
            return None
        theirs = bytes(frames[1])
        keys = _keys(self._secret, self._private, theirs, self.public + theirs)
        if keys is None or not hmac.compare_digest(bytes(frames[2]), _mac(keys[2])):
            return None
        return Session(keys[0], keys[1])


def answer(secret: bytes, frames: Sequence[Frame]) -> tuple[list[bytes], Session] | None:
    """What who listens answers to a hello, and its session; None: it is no hello."""
    if len(frames) != 2 or len(frames[1]) != PUBLIC_BYTES:
        return None
    theirs, private = bytes(frames[1]), X25519PrivateKey.generate()
    mine = private.public_key().public_bytes_raw()
    keys = _keys(secret, private, theirs, theirs + mine)
    if keys is None:
        return None
    return [HELLO, mine, _mac(keys[2])], Session(keys[1], keys[0])


def _keys(secret: bytes, private: X25519PrivateKey, theirs: bytes, both: bytes) -> tuple[bytes, bytes, bytes] | None:
    """For what who connects seals, for what who listens seals, and for its proof."""
    try:
        shared = private.exchange(X25519PublicKey.from_public_bytes(theirs))
    except ValueError:  # a point that leaves nothing to chance
        return None
    derived = HKDF(SHA256(), 3 * KEY_BYTES, salt=secret, info=b"dlc bulk session 1" + both).derive(shared)
    return derived[:KEY_BYTES], derived[KEY_BYTES : 2 * KEY_BYTES], derived[2 * KEY_BYTES :]


def _mac(key: bytes) -> bytes:
    return hmac.digest(key, HELLO, "sha256")


def _nonce(number: bytes, index: int, count: int) -> bytes:
    return number + index.to_bytes(2, "big") + count.to_bytes(2, "big")
