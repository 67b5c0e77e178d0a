"""RSA keys for signatures, under Hivemind's names. Who may join a run is no matter of these: that is the run key."""

from __future__ import annotations

import base64
import threading

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

KEY_BITS, KEY_BITS_MAX = 2048, 8192
"""Of a new key, and of one that is verified with: it comes from another host, and a longer one takes long."""
PADDING = padding.PSS(mgf=padding.MGF1(hashes.SHA256()), salt_length=padding.PSS.MAX_LENGTH)


class RSAPublicKey:
    """Verifies."""

    def __init__(self, key: rsa.RSAPublicKey) -> None:
        self._key = key

    def verify(self, data: bytes, signature: bytes) -> bool:
        """Whether `signature` (base64) is that of `data`."""
        try:
            self._key.verify(base64.b64decode(signature, validate=True), data, PADDING, hashes.SHA256())
        except (ValueError, InvalidSignature):
            return False
        return True

    def to_bytes(self) -> bytes:
        """As OpenSSH writes it: "ssh-rsa AAAA..."."""
        return self._key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)

    @classmethod
    def from_bytes(cls, raw: bytes) -> RSAPublicKey:
        """ValueError: it is none."""
        try:
            key = serialization.load_ssh_public_key(raw)
        except UnsupportedAlgorithm as error:
            raise ValueError(f"no RSA key: {error}") from error
        if not isinstance(key, rsa.RSAPublicKey) or key.key_size > KEY_BITS_MAX:
            raise ValueError(f"no RSA key of up to {KEY_BITS_MAX} bits")
        return cls(key)


class RSAPrivateKey:
    """Signs; a new one without an argument."""

    _process_wide: RSAPrivateKey | None = None
    _lock = threading.Lock()

    def __init__(self, key: rsa.RSAPrivateKey | None = None) -> None:
        self._key = key or rsa.generate_private_key(public_exponent=65537, key_size=KEY_BITS)

    @classmethod
    def process_wide(cls) -> RSAPrivateKey:
        """One for this process, made when it is first asked for."""
        with cls._lock:
            if RSAPrivateKey._process_wide is None:
                RSAPrivateKey._process_wide = cls()
            return RSAPrivateKey._process_wide

    def sign(self, data: bytes) -> bytes:
        """The signature, base64."""
        return base64.b64encode(self._key.sign(data, PADDING, hashes.SHA256()))

    def get_public_key(self) -> RSAPublicKey:
        return RSAPublicKey(self._key.public_key())


__all__ = ["RSAPrivateKey", "RSAPublicKey"]
