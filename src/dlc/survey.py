"""Looking at a swarm from outside: `dlc status`, without joining it."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlc.addresses import addresses_of
from dlc.arguments import seconds
from dlc.comm.clock import clock
from dlc.comm.framing import OtherVersion, decode, encode
from dlc.comm.ids import Voter
from dlc.comm.lanes import Incoming, LinkEvent
from dlc.comm.messages import PROTOCOL_VERSION, Hello, Record, Welcome
from dlc.comm.security import LinkSecurity, load_run_key
from dlc.comm.transport import Transport
from dlc.errors import ProtocolError, UnreachableError, UsageError, WrongKeyError

ASK_AGAIN_S = 0.5
STATUS_BYTES_MAX = 4096
"""A longer status is not shown."""
UNANSWERED = "connected, but no answer has come"
OTHER_VERSION = (
    "as from another version of dlc, or `dlc bench serve`, whose log says so: have the same one on all hosts"
)
"""What an address may be that is connected, and does not answer: what another version sends is dropped there."""


@dataclass(frozen=True)
class Member:
    """One peer as another sees it."""

    id: str
    address: str
    role: str
    alive: bool
    left: bool
    head: str
    """Hash of the last entry it applied, hex."""
    tokens: float
    depth: int
    speed: float
    """tokens/s; 0 = unknown."""
    status: dict[str, Any]
    me: bool
    channels: tuple[str, ...] = ()
    """Whose states it holds, as they are at `head`."""
    away: bool = False
    """It has stopped to answer less than `timeouts.evict_s` ago, and may come back: nothing says that it has ended.
    `dlc status`, which looks on for a moment only, knows of none."""


def member_of(record: Record, alive: bool, me: bool, away: bool = False) -> Member:
    return Member(
        id=record.voter.peer,
        address=record.control[0] if record.control else "",
        role=record.role,
        alive=alive,
        left=record.left,
        head=record.head.hex(),
        tokens=record.tokens,
        depth=record.depth,
        speed=record.speed,
        status=_status(record.status),
        me=me,
        channels=tuple(state.channel for state in record.states),
        away=away,
    )


def _status(raw: bytes) -> dict[str, Any]:
    """What a peer says for people to read; anything that is no small JSON object is shown as nothing, and a number
    that is not finite, for which JSON has no word, as null."""
    try:
        value = json.loads(raw[:STATUS_BYTES_MAX] or b"{}", parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _finite(word: str) -> float | None:
    return value if math.isfinite(value := float(word)) else None


def status(
    peers: Sequence[str] | str, *, key: str | bytes | Path | None = None, run: str | None = None, timeout_s: float = 5.0
) -> list[Member]:
    """Ask `peers` (HOST:PORT), then everyone they know, who is there. `alive` means: answered us within `timeout_s`.

    run: leave out who is of another run.

    Raises UnreachableError if nobody (of that run) answered, WrongKeyError if somebody did but refused the key,
    UsageError.
    """
    listed, timeout_s = addresses_of(peers), seconds("timeout_s", timeout_s)
    if not listed:
        raise UsageError("there is nobody to ask: give the address (HOST:PORT) of a peer of the run")
    security = LinkSecurity.derive(load_run_key(key), "") if key is not None else None
    transport = Transport("127.0.0.1:0", security=security, ident=b"status" + secrets.token_bytes(8))
    me = Voter("", secrets.randbits(32))
    asked: dict[str, float] = {}
    answered: dict[str, Record] = {}
    known: dict[str, Record] = {}
    others: dict[str, str] = {}  # addresses that answered for another run, and its name; empty: it knows of none yet
    apart: dict[str, str] = {}  # addresses that answered in another version, and the sentence for it
    barred: set[str] = set()
    details: dict[str, str] = {}
    todo = set(listed)
    deadline = clock() + timeout_s
    try:
        while clock() < deadline:
            unheard = todo - answered.keys() - apart.keys() - {a for a in others if others[a]}
            if not unheard:
                break
            for address in unheard:
                if clock() - asked.get(address, -1e9) >= ASK_AGAIN_S:
                    asked[address] = clock()
                    hello = Hello(PROTOCOL_VERSION, run or "", b"", None, address)
                    transport.send_control(address, encode(me, bytes(8), hello))
            for event in transport.poll(0.1):
                if isinstance(event, LinkEvent):
                    silent = event.kind == "connected"
                    details[event.address] = f"{UNANSWERED}, {OTHER_VERSION}" if silent else event.detail
                    if event.kind == "auth_failed":
                        barred.add(event.address)
                if isinstance(event, Incoming):
                    _take(event, run, answered, known, others, apart)
            todo |= {r.control[0] for r in known.values() if r.control and not r.left}
    finally:
        transport.close(0.0)
    if not answered and others:
        raise UnreachableError("; ".join(_other(address, name, run) for address, name in sorted(others.items())))
    if not answered and apart:
        raise UnreachableError("; ".join(f"{address} answered: {why}" for address, why in sorted(apart.items())))
    if not answered and barred:
        raise WrongKeyError(wrong_key(sorted(barred), security is not None))
    if not answered:
        tried = ", ".join(f"{peer} ({details[peer]})" if details.get(peer) else peer for peer in listed)
        other = f", and that its run is {run!r}" if run else ""
        raise UnreachableError(
            f"no answer within {timeout_s:g} s from {tried}; check the address, that the peer runs{other}, and that "
            "its port is open"
        )
    alive = {r.voter for r in answered.values()}
    return [member_of(r, r.voter in alive, False) for _, r in sorted(known.items())]


def _other(address: str, name: str, run: str | None) -> str:
    """The sentence for one that answered, and not for this run."""
    if not name:
        return f"{address} answered, but knows of no run yet: it waits for others"
    return f"{address} answered, but its run is {name!r:.80}, not {run!r}"


def wrong_key(barred: Sequence[str], has_key: bool) -> str:
    """The sentence for addresses that answered a handshake, and did not finish it."""
    where = ", ".join(barred)
    if has_key:
        what = "refused our run key: use the key file of that run (or none if it has none)"
    else:
        what = "wants a run key: add --key-file with the key file of that run"
    return f"{where} answered, but {what}; or it is something else than dlc that listens there, and hangs up"


def _take(
    event: Incoming,
    run: str | None,
    answered: dict[str, Record],
    known: dict[str, Record],
    others: dict[str, str],
    apart: dict[str, str],
) -> None:
    try:
        _, message = decode(event.frames, bytes(8))
    except OtherVersion as error:
        if event.address is not None:
            apart[event.address] = str(error)
        return
    except ProtocolError:
        return
    if not isinstance(message, Welcome) or message.record is None:
        return
    if run is not None and message.run != run:
        others[message.address] = message.run
        return
    answered[message.address] = message.record
    for record in (message.record, *message.records):
        old = known.get(record.voter.peer)
        if old is None or (old.voter.inc, old.seq) < (record.voter.inc, record.seq):
            known[record.voter.peer] = record
