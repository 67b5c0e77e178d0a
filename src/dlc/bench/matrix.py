"""`dlc bench matrix`: sites measure the ways between them, one turn of a tournament after the other.

    for each turn: MeasureOrder to the sender of each pair, repeated every second until its outcome is there

The site that sends does the measuring (round trip, then payload to the other, on the connection that it opens), exactly
as a peer would send in a run: a direction that a firewall blocks shows as an error of that pair only. A site that can't
be reached from here is not asked again; others still measure their way to it.
"""

from __future__ import annotations

import dataclasses
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dlc.bench.limits import BUSY_S, IDLE_S, SLACK_S, TAG
from dlc.bench.link import Budget
from dlc.bench.plain import rounded
from dlc.bench.schedule import turns
from dlc.bench.stream import AUTH_FAILURES, OPEN_S, Stopped, wrong_key
from dlc.comm.clock import clock
from dlc.comm.framing import decode, encode
from dlc.comm.ids import Voter
from dlc.comm.lanes import Event, Incoming, LinkEvent
from dlc.comm.measures import MeasureOrder, MeasureOutcome
from dlc.comm.security import LinkSecurity
from dlc.comm.transport import Transport
from dlc.errors import ProtocolError

ASK_AGAIN_S = 1.0
"""Well under IDLE_S, after which a site gives an order up."""
ERROR_CHARS_MAX = 300
"""Of what a site says: it goes to a terminal."""


@dataclass(frozen=True)
class PairReport:
    """One ordered pair."""

    sender: str
    receiver: str
    up_mbps: float | None
    """From sender to receiver, Mbit/s of payload; None: see `error`."""
    rtt_ms: float | None
    error: str
    """Why there is no rate; empty where there is one."""


@dataclass(frozen=True)
class MatrixReport:
    """All ordered pairs of `sites`."""

    sites: tuple[str, ...]
    encrypted: bool
    pairs: tuple[PairReport, ...]
    seconds: float

    @property
    def failed(self) -> int:
        """Pairs without a rate."""
        return sum(pair.up_mbps is None for pair in self.pairs)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; what `--links` of `dlc bench allreduce` reads."""
        plain: dict[str, Any] = rounded(dataclasses.asdict(self))
        for pair in plain["pairs"]:
            pair["from"], pair["to"] = pair.pop("sender"), pair.pop("receiver")
        return plain


def measure_matrix(
    sites: tuple[str, ...],
    security: LinkSecurity | None,
    budget: Budget,
    *,
    reach: Mapping[str, str],
    say: Callable[[str], None] = lambda text: None,
    on_pair: Callable[[PairReport], None] = lambda pair: None,
    stop: threading.Event | None = None,
) -> MatrixReport:
    """Measure every ordered pair of `sites` (addresses that all of them can dial), with `budget` for each.

    reach: address that this host dials instead, for the sites that it knows by another one. Errors are in the report.
    stop: ends it early, with `Stopped`.
    """
    asker = _Asker(security, reach, stop or threading.Event())
    begin = clock()
    done: list[PairReport] = []
    schedule = turns(len(sites))
    try:
        for number, turn in enumerate(schedule):
            pairs = [(sites[a], sites[b]) for a, b in turn]
            say(f"turn {number + 1} of {len(schedule)}: " + ", ".join(f"{a} to {b}" for a, b in pairs))
            for pair in asker.ask(pairs, budget):
                done.append(pair)
                on_pair(pair)
    finally:
        asker.close()
    return MatrixReport(sites, security is not None, tuple(done), clock() - begin)


@dataclass
class _Asked:
    """An order of this turn."""

    order: MeasureOrder
    begun_at: float
    asked_at: float = -1e9
    busy: bool = False
    running: bool = False
    heard_at: float = 0.0


class _Asker:
    """Gives orders to sites, over one transport."""

    def __init__(self, security: LinkSecurity | None, reach: Mapping[str, str], stop: threading.Event) -> None:
        self._has_key, self._reach, self._stop = security is not None, reach, stop
        self._transport = Transport("127.0.0.1:0", security=security, ident=b"matrix" + secrets.token_bytes(8))
        self._me = Voter("", secrets.randbits(32))
        self._up: set[str] = set()
        self._failures: dict[str, int] = {}
        self._details: dict[str, str] = {}
        self._given_up: dict[str, str] = {}

    def close(self) -> None:
        self._transport.close(0.0)

    def ask(self, pairs: list[tuple[str, str]], budget: Budget) -> list[PairReport]:
        """The outcomes of one turn, when all are there."""
        done: dict[str, PairReport] = {}
        asked: dict[str, _Asked] = {}
        for sender, receiver in pairs:
            if sender in self._given_up:
                done[sender] = PairReport(sender, receiver, None, None, self._given_up[sender])
                continue
            order = MeasureOrder(secrets.token_bytes(16), receiver, budget.seconds, budget.bytes_max)
            asked[sender] = _Asked(order, clock())
        while asked:
            if self._stop.is_set():
                raise Stopped("the matrix was stopped")
            now = clock()
            for sender, a in asked.items():
                if now >= a.asked_at + ASK_AGAIN_S and (a.asked_at < 0 or self._dialled(sender) in self._up):
                    a.asked_at = now
                    self._transport.send_control(self._dialled(sender), encode(self._me, TAG, a.order))
            for event in self._transport.poll(ASK_AGAIN_S / 4):
                self._link_event(event)
                outcome = _outcome(event)
                for sender, a in list(asked.items()):
                    if outcome is not None and outcome.order == a.order.order:
                        a.running, a.busy, a.heard_at = outcome.running, outcome.wait_s > 0, clock()
                        if not a.running and not a.busy:
                            error = _plain(outcome.error)
                            done[sender] = _pair(sender, a, outcome.up_mbps, outcome.rtt_ms, error)
                            del asked[sender]
            for sender, a in list(asked.items()):
                error = self._why_not(sender, a, budget, clock())
                if error:
                    done[sender] = _pair(sender, a, None, None, error)
                    del asked[sender]
        return [done[sender] for sender, _ in pairs]

    def _dialled(self, site: str) -> str:
        return self._reach.get(site, site)

    def _link_event(self, event: Event) -> None:
        if not isinstance(event, LinkEvent):
            return
        if event.kind == "connected":
            self._up.add(event.address)
            self._failures[event.address] = 0
        else:
            self._up.discard(event.address)
            self._details[event.address] = event.detail
            if event.kind == "auth_failed":
                self._failures[event.address] = self._failures.get(event.address, 0) + 1

    def _why_not(self, site: str, a: _Asked, budget: Budget, now: float) -> str:
        """Why this order is given up; empty while there is hope."""
        dialled = self._dialled(site)
        error = ""
        if self._failures.get(dialled, 0) >= AUTH_FAILURES:
            error = wrong_key(site, self._has_key)
        elif not a.heard_at and now >= a.begun_at + OPEN_S:
            if dialled in self._up:
                error = f"{site} was reached, but does not answer measurements: run `dlc bench serve` there"
            else:
                detail = self._details.get(dialled, "no answer")
                error = f"{site} cannot be reached from here ({detail}): does `dlc bench serve` run there?"
        elif a.heard_at and now >= a.heard_at + IDLE_S:
            error = f"{site} stopped answering in the middle of a measurement"
        if error:
            self._given_up[site] = error
        elif a.busy and now >= a.begun_at + BUSY_S:
            return f"{site} was busy with other measurements for {BUSY_S:g} s"
        elif a.running and now >= a.begun_at + 2 * BUSY_S + OPEN_S + budget.seconds + SLACK_S:
            return f"{site} did not come to an end"
        return error


def _outcome(event: Event) -> MeasureOutcome | None:
    if not isinstance(event, Incoming):
        return None
    try:
        message = decode(event.frames, TAG)[1]
    except ProtocolError:
        return None
    return message if isinstance(message, MeasureOutcome) else None


def _pair(sender: str, a: _Asked, up_mbps: float | None, rtt_ms: float | None, error: str) -> PairReport:
    return PairReport(sender, a.order.address, up_mbps, rtt_ms, error)


def _plain(text: str) -> str:
    """Words of another host: short, and nothing that a terminal obeys."""
    return "".join(c if c.isprintable() else "?" for c in text[:ERROR_CHARS_MAX])
