"""One connection of a client to a site that serves measurements: a transport of its own, driven by one thread.

    Stream.open      HOST:PORT answers, shares our key, and has time for us
    Stream.ping      round trips
    Stream.transfer  payload in one direction

All of them return early with `Stopped` when `stop` is set.
"""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Callable

from dlc.bench.limits import BUSY_S, TAG
from dlc.bench.transfer import PING_LOST_S, STALL_S, Pinger, Transfer
from dlc.comm.addresses import join_address, parse_address
from dlc.comm.clock import clock
from dlc.comm.framing import OtherVersion, decode, encode
from dlc.comm.ids import Voter
from dlc.comm.lanes import Event, Incoming, LinkEvent, Writable
from dlc.comm.measures import MeasureAnswer, MeasureClose, MeasureCount, MeasureOpen, MeasurePing
from dlc.comm.messages import PROTOCOL_VERSION, Hello, Message, Welcome
from dlc.comm.security import LinkSecurity
from dlc.comm.transport import Transport
from dlc.comm.window import CHUNK_BYTES_MAX
from dlc.errors import DlcError, JoinError, ProtocolError, UnreachableError, WrongKeyError

POLL_S_MAX = 0.1
"""Until `stop` is noticed."""
ASK_AGAIN_S = 0.5
WHO_AFTER = 4
"""Times that a site which was reached has not answered; from then on it is asked what it is, too."""
OPEN_S = 10.0
"""To reach a site: a connection attempt that lost two packets, and a handshake."""
AUTH_FAILURES = 2
"""A site that dies in the middle of a handshake looks like one with another key; twice in a row it is the key."""
KEEP_ALIVE_S = 1.0
CLOSE_S = 0.5
"""For the word that the session is over to leave this host."""


class Stopped(DlcError):
    """The measurement was ended from outside."""


class MeasureFailed(DlcError):
    """The site was reached, but the measurement did not come to an end."""


class SiteBusy(UnreachableError):
    """The site was reached, but measured with others all the time."""


class Stream:
    """See the module. Belongs to one thread at a time; close it in the end."""

    def __init__(
        self,
        address: str,
        security: LinkSecurity | None,
        session: bytes,
        block: memoryview,
        stop: threading.Event,
        busy_s: float | None = None,
    ) -> None:
        """busy_s: how long `open` waits for a site that measures with others; BUSY_S, unless given."""
        self._address, self._has_key = address, security is not None
        self._session, self._block, self._stop, self._busy_s = session, block, stop, busy_s
        self._transport = Transport("127.0.0.1:0", security=security, ident=b"bench" + secrets.token_bytes(8))
        self._me = Voter("", secrets.randbits(32))
        self._asked = False
        self._bulk = ""
        self._connected = False  # the control link is up
        self._carried = False  # something has come through on this connection
        self._passable = False  # or on another one to that port
        self._counted = 0
        self._kept_alive_at = 0.0
        self._other_version: OtherVersion | None = None

    def close(self) -> None:
        """Let go of everything; a session that was asked for is ended."""
        if self._asked:
            self._send(MeasureClose(self._session))
        self._transport.close(CLOSE_S if self._asked else 0.0)

    def open(self, seconds: float, bytes_max: int, say: Callable[[str], None]) -> int:
        """Ask for a measurement; the site's bulk port. Raises UnreachableError (SiteBusy), WrongKeyError,
        MeasureFailed."""
        busy_s = BUSY_S if self._busy_s is None else self._busy_s
        begin = clock()
        asked_at, asked, failures, last, busy = -1e9, 0, 0, "", False
        while True:
            now = clock()
            limit_s = busy_s if busy else OPEN_S
            if now >= begin + limit_s:
                raise _no_answer(self._address, limit_s, busy, self._connected, last)
            if now >= asked_at + ASK_AGAIN_S and (self._connected or asked_at < 0):
                asked_at, asked, self._asked = now, asked + 1, True
                self._send(MeasureOpen(self._session, seconds, bytes_max))
                if asked > WHO_AFTER and not busy:
                    self._send(Hello(PROTOCOL_VERSION, "", b"", None, self._address))
            for event in self._poll(ASK_AGAIN_S):
                if isinstance(event, LinkEvent):
                    failures += event.kind == "auth_failed"
                    last = "" if event.kind == "connected" else event.detail
                    if failures >= AUTH_FAILURES:
                        raise WrongKeyError(wrong_key(self._address, self._has_key))
                answer = self._message(event)
                if self._other_version is not None:
                    raise UnreachableError(f"{self._address} answered: {self._other_version}")
                if isinstance(answer, Welcome):
                    raise _unserved(self._address, "a peer of a run, which serves no measurements, listens there")
                if not isinstance(answer, MeasureAnswer) or answer.session != self._session:
                    continue
                if answer.refusal:
                    raise MeasureFailed(f"{self._address} refuses: {answer.refusal}")
                if not answer.wait_s:
                    return answer.bulk_port
                if not busy:
                    say(f"{self._address} is busy with another measurement, for {answer.wait_s:.0f} s at most; waiting")
                busy = True

    def use(self, bulk_port: int, passable: bool = False) -> None:
        """The session is open, by this stream or another: its bulk goes to that port. passable: other connections have
        carried something there."""
        self._bulk, self._passable = join_address(parse_address(self._address)[0], bulk_port), passable

    def ping(self, seconds: float, within_s: float = PING_LOST_S) -> list[float]:
        """Round-trip times, in seconds; at least one. Raises MeasureFailed where none comes within that, or `within_s`
        if it is more."""
        pinger = Pinger(self._session, seconds, clock(), within_s)
        while not pinger.done(clock()):
            for message in pinger.tick(clock()):
                self._send(message)
            for event in self._poll(pinger.next_deadline() - clock()):
                if isinstance(event, LinkEvent) and event.kind != "connected":
                    raise MeasureFailed(self._silent())
                message_in = self._message(event)
                if message_in is not None:
                    pinger.receive(message_in, clock())
        if not pinger.rtts_s:
            raise MeasureFailed(self._silent())
        return pinger.rtts_s

    def transfer(self, up: bool, seconds: float, bytes_max: int, rtt_s: float, until: float = math.inf) -> Transfer:
        """Move payload in one direction for that time, but not later than `until`, or until so many bytes have moved.
        Raises MeasureFailed."""
        now = clock()
        transfer = Transfer(
            up,
            self._session,
            self._block,
            seconds=seconds,
            bytes_max=bytes_max,
            rtt_s=rtt_s,
            counted=self._counted,
            now=now,
            until=until,
        )
        while not transfer.done(now):
            if transfer.stalled(now):
                raise MeasureFailed(self._stall())
            self._keep_alive(now)
            wait_s = min(transfer.next_deadline() - now, POLL_S_MAX)
            for event in self._poll(wait_s, [self._bulk] if transfer.wants_room else []):
                if isinstance(event, Writable):
                    self._fill(transfer)
                message = self._message(event)
                if isinstance(message, MeasureCount):
                    self._counted = message.total_bytes
                if message is not None:
                    transfer.receive(message, clock())
            self._carried = self._carried or transfer.moved > 0
            now = clock()
            transfer.tick(now)
        if not transfer.drained():
            if not self._connected:
                raise MeasureFailed(self._silent())
            self._transport.forget(self._bulk)  # what is still on the way must not disturb what is measured next
            self._counted = 0
            self.ping(0.0, STALL_S)  # slow, or dead since? After a standstill of this host nothing has told yet
        return transfer

    def _fill(self, transfer: Transfer) -> None:
        while transfer.wants_room:
            bulk = transfer.next_bulk()
            if not self._transport.send_bulk(self._bulk, encode(self._me, TAG, bulk)):
                return
            transfer.sent(bulk)

    def _stall(self) -> str:
        if not self._connected:
            return self._silent()
        if self._carried:
            return f"nothing came through to {self._address} for {STALL_S:g} s in the middle of a transfer"
        port = parse_address(self._bulk)[1]
        if self._passable:
            return (
                f"one more connection to {self._address} (TCP {port}) carried nothing for {STALL_S:g} s, though others "
                "did: try again, or with fewer --streams"
            )
        return f"{self._address} answers, but nothing passes on its bulk port: open TCP {port} in the firewall there"

    def _silent(self) -> str:
        return f"{self._address} stopped answering; is `dlc bench serve` still running there?"

    def _keep_alive(self, now: float) -> None:
        if now >= self._kept_alive_at + KEEP_ALIVE_S:
            self._kept_alive_at = now
            self._send(MeasurePing(self._session, 0))

    def _send(self, message: Message) -> None:
        self._transport.send_control(self._address, encode(self._me, TAG, message))

    def _poll(self, timeout_s: float, want_write: list[str] | None = None) -> list[Event]:
        if self._stop.is_set():
            raise Stopped("the measurement was stopped")
        events = self._transport.poll(min(max(timeout_s, 0.0), POLL_S_MAX), want_write or [])
        for event in events:
            if isinstance(event, LinkEvent):
                self._connected = event.kind == "connected"
        return events

    def _message(self, event: Event) -> Message | None:
        if not isinstance(event, Incoming):
            return None
        try:
            return decode(event.frames, TAG)[1]
        except ProtocolError as error:
            self._other_version = error if isinstance(error, OtherVersion) else self._other_version
            return None


def new_block() -> memoryview:
    """Payload that nothing on the way can compress."""
    return memoryview(secrets.token_bytes(CHUNK_BYTES_MAX))


def wrong_key(address: str, has_key: bool) -> str:
    """The sentence for an address that answered a handshake, and did not finish it."""
    if has_key:
        what = (
            "refused our key: use the key file that `dlc bench serve` was given there, or leave --key-file out, if it "
            "was given none"
        )
    else:
        what = "wants a key: add --key-file with the key file that `dlc bench serve` uses there"
    return f"{address} answered, but {what}; or something else than that listens there, and hangs up"


def _no_answer(address: str, limit_s: float, busy: bool, connected: bool, detail: str) -> JoinError:
    if busy:
        return SiteBusy(f"{address} was busy with other measurements for {limit_s:g} s; try again later")
    if connected:
        return _unserved(address, f"it was reached, and did not answer for {limit_s:g} s")
    why = f" ({detail})" if detail else ""
    return UnreachableError(
        f"no answer within {limit_s:g} s from {address}{why}; "
        "check the address, that `dlc bench serve` runs there, and that its port is open"
    )


def _unserved(address: str, why: str) -> UnreachableError:
    return UnreachableError(
        f"nobody serves measurements at {address} ({why}): run `dlc bench serve` there, on a port of its own, of the "
        "same version as here"
    )
