"""The run key, and what every link derives from it.

A run has one secret: the **run key**, 32 random bytes that the operator copies to every host. From it HKDF-SHA256
derives two Curve25519 key pairs that all members share: the *server* pair, used by sockets that listen, and the
*client* pair, used by sockets that connect. CurveZMQ then keeps strangers out in both directions:

- a stranger who connects does not know the server's public key, so the server drops its first handshake message;
- a stranger who listens does not know the server's secret key, so our client never completes the handshake;
- one who had learnt the server's public key (it is not sent, but it is not secret to libzmq either) is still refused
  by `ZapHandler`, which accepts the derived client key and nothing else.

All members hold the same credentials: the key says "one of us", never "who"; who is proved by signatures (`identity`).
Nor does it say of which run: whoever joins need not know the run's name before it has asked, so the links of every run
with this key are the same. Frames carry a tag of their run (`framing`), which keeps two runs of one operator apart.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import hmac
import logging
import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from zmq.utils import z85

from dlc.comm.keytext import HIDDEN, KEY_PREFIX, may_be_key
from dlc.errors import KeyFileError, UsageError

log = logging.getLogger(__name__)

KEY_BYTES = 32
KEY_FILE_BYTES_MAX = 4096
"""A key file is one short line; more than this is another file, and is not read into memory."""
ZAP_DOMAIN = b"dlc"
ZAP_ENDPOINT = "inproc://zeromq.zap.01"


def generate_run_key() -> str:
    """A fresh run key in its text form: one line, ready to be written to a file."""
    return f"{KEY_PREFIX}{base64.urlsafe_b64encode(secrets.token_bytes(KEY_BYTES)).decode().rstrip('=')}\n"


def load_run_key(source: str | bytes | Path) -> bytes:
    """The 32 bytes of a run key, given as those bytes, as its text form, or as the path of a file that holds it.

    Raises KeyFileError if there is no such file or if it holds no run key. A key file that others may read is used,
    and warned about in the log.
    """
    if isinstance(source, bytes):
        return source if len(source) == KEY_BYTES else _parse(source.decode("latin-1"), "the given run key")
    if isinstance(source, str) and source.strip().startswith(KEY_PREFIX):
        return _parse(source, "the given run key")
    if isinstance(source, str) and not source.strip():
        raise KeyFileError(
            "the given run key is empty: give the text that `dlc key` printed, or the path of its file; key=None is "
            "for a run without one"
        )
    path = Path(source)
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(KEY_FILE_BYTES_MAX).removeprefix(codecs.BOM_UTF8).decode("latin-1")  # editors write it
    except (OSError, ValueError) as error:  # ValueError: of a name that no file can have
        raise _unread(path, error) from None
    key = _parse(text, f"the file {path}")  # first: what is another file has to stay as it is
    if os.name == "posix" and stat.S_ISREG(mode) and mode & (stat.S_IRGRP | stat.S_IROTH):
        log.warning("other users of this host can read the run key file %s; run `chmod 600 %s`", path, path)
    return key


def _unread(path: Path, error: Exception) -> KeyFileError:
    """Why nothing could be read there. A key that was given in its place is not shown."""
    if may_be_key(str(path)):
        return KeyFileError(
            f"what was given is neither the path of a run key file nor a run key {HIDDEN}: give the path of a file "
            "that holds the one line that `dlc key` prints"
        )
    if isinstance(error, FileNotFoundError):
        return KeyFileError(
            f"there is no run key file {path}; copy it from a host of the run, or for a new run make it with "
            f"`dlc key > {path}` and copy it to every host"
        )
    return KeyFileError(f"the run key file {path} cannot be read: {getattr(error, 'strerror', None) or error}")


def _parse(text: str, what: str) -> bytes:
    body = text.strip().removeprefix(KEY_PREFIX)
    try:
        key = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not text.strip().startswith(KEY_PREFIX) or len(key) != KEY_BYTES:
        raise KeyFileError(
            f"{what} does not hold a run key; expected one line, {KEY_PREFIX} and 43 characters, as `dlc key` prints it"
        )
    return key


@dataclass(frozen=True)
class LinkSecurity:
    """The CURVE credentials that the members of one run share; the four keys are in Z85."""

    server_public: bytes
    server_secret: bytes = field(repr=False)
    client_public: bytes
    client_secret: bytes = field(repr=False)

    @classmethod
    def derive(cls, run_key: bytes, run_name: str) -> LinkSecurity:
        """Credentials under `run_name`; the same on every host that holds `run_key`. Peers use those of ""."""
        if len(run_key) != KEY_BYTES:
            raise KeyFileError(f"a run key has {KEY_BYTES} bytes, not {len(run_key)}")
        if not zmq.has("curve"):
            raise UsageError("this build of libzmq has no CURVE; install the pyzmq wheel from PyPI")
        server = _derive_secret(run_key, run_name, b"server")
        client = _derive_secret(run_key, run_name, b"client")
        return cls(zmq.curve_public(server), server, zmq.curve_public(client), client)

    def apply_server(self, sock: zmq.Socket[Any]) -> None:
        """Prepare a socket that will bind; a `ZapHandler` of the same context must already be bound."""
        sock.curve_secretkey = self.server_secret
        sock.curve_server = True
        sock.zap_domain = ZAP_DOMAIN

    def apply_client(self, sock: zmq.Socket[Any]) -> None:
        """Prepare a socket that will connect."""
        sock.curve_serverkey = self.server_public
        sock.curve_publickey = self.client_public
        sock.curve_secretkey = self.client_secret


def _derive_secret(run_key: bytes, run_name: str, role: bytes) -> bytes:
    info = b"dlc link 1\0" + role + b"\0" + run_name.encode()
    secret = HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=info).derive(run_key)
    encoded: bytes = z85.encode(secret)
    return encoded


class ZapHandler:
    """Answers libzmq's question "may this client in?" (ZAP 1.0, RFC 27) inside the thread that owns the sockets.

    The caller polls `socket` and calls `serve()` when it is readable; no handshake is completed in between.
    """

    def __init__(self, context: zmq.Context[Any], security: LinkSecurity) -> None:
        self._client_public: bytes = z85.decode(security.client_public)
        self.refused = 0
        """Clients that knew the server's public key and still were not one of us."""
        self.socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(ZAP_ENDPOINT)

    def serve(self) -> None:
        """Answer every waiting request."""
        while True:
            try:
                request = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            accepted = self._accepts(request)
            self.refused += not accepted
            status = (b"200", b"OK") if accepted else (b"400", b"not a member of this run")
            request_id = request[1] if len(request) > 1 else b""
            self.socket.send_multipart([b"1.0", request_id, *status, b"member" if accepted else b"", b""])

    def _accepts(self, request: list[bytes]) -> bool:
        if len(request) != 7:
            return False
        version, _, domain, _, _, mechanism, key = request
        return (version, domain, mechanism) == (b"1.0", ZAP_DOMAIN, b"CURVE") and hmac.compare_digest(
            key, self._client_public
        )

    def close(self) -> None:
        """Release the endpoint; libzmq then refuses every new client."""
        self.socket.close(0)
