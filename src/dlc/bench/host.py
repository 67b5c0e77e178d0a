"""The machine of a site that serves measurements: it echoes, counts, sends, and measures its own way to others.

One thing at a time, because two measurements on one host would disturb each other: a *session* (a client measures us)
or an *order* (we measure somebody for a client). Whoever comes meanwhile is told how long to wait at most.

    FREE --MeasureOpen--> SESSION --MeasureClose, time over, too many bytes, silence for IDLE_S--> FREE
    FREE --MeasureOrder--> ORDER --finished, time over, not asked for during IDLE_S--> FREE (the outcome stays)
                           ORDER --the site is busy--> as FREE for YIELD_S, or for a SESSION --> ORDER

An order's time holds the wait for a site that is busy. That may be so because it waits for us, hence the way that an
order gives to sessions of others now and then. The session that it opens over there has the order's id: a site
that is asked for the session of its own order is to measure the way to itself, and refuses.

What a client can make a site hold is a few numbers per connection: at most STREAMS_MAX connections, each with PULLS_MAX
chunks that wait to be sent, all of them views of one block of random bytes.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from dlc.bench.limits import (
    BUSY_S,
    BYTES_MAX,
    IDLE_S,
    OUTCOME_KEEP_S,
    OUTCOMES_MAX,
    PULLS_MAX,
    SECONDS_MAX,
    SLACK_S,
    STREAMS_MAX,
    YIELD_S,
)
from dlc.comm.measures import (
    MeasureAnswer,
    MeasureClose,
    MeasureCount,
    MeasureData,
    MeasureOpen,
    MeasureOrder,
    MeasureOutcome,
    MeasurePing,
    MeasurePong,
    MeasurePull,
    MeasurePush,
)
from dlc.comm.messages import Bulk, Message
from dlc.comm.window import CHUNK_BYTES_MAX
from dlc.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class Reply:
    """A control message on the connection that the received one came in by."""

    message: Message


@dataclass(frozen=True, slots=True)
class Begin:
    """Measure the way to `order.address`, and call `finished`, or `give_way` where it was busy for GIVE_WAY_S."""

    order: MeasureOrder


@dataclass(frozen=True, slots=True)
class Abandon:
    """The order takes too long, or nobody asks for its outcome any more: stop measuring, and call `finished`."""


HostEffect = Reply | Begin | Abandon


@dataclass(slots=True)
class Stream:
    """One bulk connection of the session."""

    total_bytes: int = 0
    counted_at: float = 0.0
    owes_count: bool = False
    pulls: deque[int] = field(default_factory=deque)


@dataclass(slots=True)
class Session:
    id: bytes
    ends_at: float
    heard_at: float
    bytes_left: int
    streams: dict[Hashable, Stream] = field(default_factory=dict)
    """Those heard of longest ago come first."""


@dataclass(slots=True)
class Order:
    asked: MeasureOrder
    ends_at: float
    heard_at: float
    outcome: MeasureOutcome
    abandoned: str = ""
    """Why; empty while it is not."""
    busy_until: float = math.inf
    """A site that is busy is waited for until then."""
    again_at: float | None = None
    """It gives way: nothing is done for it until then. None: it does not."""


class Host:
    """See the module. `route` is whatever names a connection; `block` has CHUNK_BYTES_MAX random bytes."""

    def __init__(self, bulk_port: int, block: memoryview) -> None:
        self._bulk_port, self._block = bulk_port, block
        self._session: Session | None = None
        self._order: Order | None = None
        self._kept: dict[bytes, tuple[float, MeasureOutcome]] = {}
        """Outcomes of orders that others came after, by order: when they are forgotten."""

    def receive(self, route: Hashable, message: Message, now: float) -> list[HostEffect]:
        """Raises ProtocolError for what no client of ours sends."""
        effects = self.tick(now)
        match message:
            case MeasureOpen():
                effects.append(Reply(self._open(message, now)))
            case MeasureOrder():
                effects += self._ordered(message, now)
            case MeasurePing() if self._is_open(message.session, now):
                effects.append(Reply(MeasurePong(message.session, message.serial)))
            case MeasureClose() if self._is_open(message.session, now):
                self._session = None
            case MeasurePush() | MeasurePull() if self._is_open(message.session, now):
                self._bulk(route, message, now)
        return effects

    def tick(self, now: float) -> list[HostEffect]:
        session, order = self._session, self._order
        self._kept = {id: kept for id, kept in self._kept.items() if now < kept[0]}
        if session is not None and now >= min(session.ends_at, session.heard_at + IDLE_S):
            self._session = None
        if order is None:
            return []
        if not order.outcome.running:
            if now >= order.heard_at + OUTCOME_KEEP_S:
                self._order = None
        elif not order.abandoned and now >= min(order.ends_at, order.heard_at + IDLE_S):
            late = now >= order.ends_at
            order.abandoned = f"it took over {_order_s(order.asked.seconds):g} s" if late else "nobody asked for it"
            if order.again_at is None:
                return [Abandon()]
            self.finished("", None, None, now)
        elif order.again_at is not None and self._session is None and now >= order.again_at:
            order.again_at = None
            return [Begin(order.asked)]
        return []

    def next_deadline(self) -> float | None:
        deadlines = []
        if self._session is not None:
            deadlines.append(min(self._session.ends_at, self._session.heard_at + IDLE_S))
        if self._order is not None and self._order.outcome.running and not self._order.abandoned:
            deadlines.append(min(self._order.ends_at, self._order.heard_at + IDLE_S))
            if self._order.again_at is not None and self._session is None:
                deadlines.append(self._order.again_at)
        return min(deadlines, default=None)

    def give_way(self, now: float) -> None:
        """The site that the order leads to is busy: others may measure to us, before it is asked again."""
        assert self._order is not None
        if now < self._order.busy_until and not self._order.abandoned:
            self._order.again_at = now + YIELD_S
            return
        address = self._order.asked.address
        self.finished(f"{address} was busy with other measurements for {BUSY_S:g} s; try again later", None, None, now)

    def finished(self, error: str, up_mbps: float | None, rtt_ms: float | None, now: float) -> None:
        """What came of the order that was begun."""
        assert self._order is not None
        if self._order.abandoned and up_mbps is None:
            error = f"the way to {self._order.asked.address} was not measured: {self._order.abandoned}"
        self._order.heard_at = now
        self._order.outcome = dataclasses.replace(
            self._order.outcome, running=False, error=error, up_mbps=up_mbps, rtt_ms=rtt_ms
        )

    @property
    def busy(self) -> bool:
        return self._session is not None or (self._order is not None and self._order.outcome.running)

    # ---------------------------------------------------------------- what waits to be sent, pulled by the shell

    def waiting(self) -> list[Hashable]:
        """Connections that something waits for."""
        streams = self._session.streams if self._session is not None else {}
        return [route for route, s in streams.items() if s.owes_count or s.pulls]

    def next_bulk(self, route: Hashable) -> Bulk | None:
        """What to send on that connection; it stays until `sent`."""
        session = self._session
        stream = session.streams.get(route) if session is not None else None
        if session is None or stream is None:
            return None
        if stream.owes_count:
            return MeasureCount(session.id, stream.total_bytes, stream.counted_at)
        if stream.pulls:
            return MeasureData(session.id, payload=self._block[: stream.pulls[0]])  # type: ignore[arg-type]
        return None

    def sent(self, route: Hashable) -> None:
        """The connection took what `next_bulk` gave. Nothing happens if the session has ended meanwhile."""
        stream = self._session.streams.get(route) if self._session is not None else None
        if stream is None:
            return
        if stream.owes_count:
            stream.owes_count = False
        elif stream.pulls:
            stream.pulls.popleft()

    # ---------------------------------------------------------------- inside

    def _is_open(self, session: bytes, now: float) -> bool:
        if self._session is None or self._session.id != session:
            return False
        self._session.heard_at = now
        return True

    def _free_in_s(self, now: float, for_session: bool = False) -> float:
        """0, or seconds after which nothing goes on here any more; above 0 while something does. An order that gives
        way gives it to a session."""
        ends = [self._session.ends_at] if self._session is not None else []
        gives_way = for_session and self._order is not None and self._order.again_at is not None
        if self._order is not None and self._order.outcome.running and not gives_way:
            ends.append(self._order.ends_at)
        return max(max(ends) - now, 0.1) if ends else 0.0

    def _open(self, asked: MeasureOpen, now: float) -> MeasureAnswer:
        if self._is_open(asked.session, now):
            return MeasureAnswer(asked.session, "", 0.0, self._bulk_port)
        refusal, wait_s = _refusal(asked.seconds, asked.bytes_max), self._free_in_s(now, for_session=True)
        if self._order is not None and self._order.outcome.running and self._order.asked.order == asked.session:
            refusal = "it is the host that is to measure the way there; list it under one address"
        if not refusal and not wait_s:
            self._session = Session(asked.session, now + asked.seconds + SLACK_S, now, asked.bytes_max)
        return MeasureAnswer(asked.session, refusal, wait_s, self._bulk_port)

    def _ordered(self, asked: MeasureOrder, now: float) -> list[HostEffect]:
        if self._order is not None and self._order.asked.order == asked.order:
            self._order.heard_at = now
            return [Reply(self._order.outcome)]
        if asked.order in self._kept:
            outcome = self._kept[asked.order][1]
            self._keep(outcome, now)
            return [Reply(outcome)]
        refusal, wait_s = _refusal(asked.seconds, asked.bytes_max), self._free_in_s(now)
        if refusal or wait_s:
            return [Reply(MeasureOutcome(asked.order, False, refusal, wait_s, None, None))]
        if self._order is not None:  # of another client, who may not have it yet
            self._keep(self._order.outcome, self._order.heard_at)
        outcome = MeasureOutcome(asked.order, True, "", 0.0, None, None)
        self._order = Order(asked, now + _order_s(asked.seconds), now, outcome, busy_until=now + BUSY_S)
        return [Begin(asked), Reply(outcome)]

    def _keep(self, outcome: MeasureOutcome, heard_at: float) -> None:
        self._kept.pop(outcome.order, None)
        self._kept[outcome.order] = heard_at + OUTCOME_KEEP_S, outcome
        while len(self._kept) > OUTCOMES_MAX:
            del self._kept[next(iter(self._kept))]

    def _bulk(self, route: Hashable, message: MeasurePush | MeasurePull, now: float) -> None:
        session = self._session
        assert session is not None
        stream = session.streams.pop(route, None) or Stream()
        if len(session.streams) >= STREAMS_MAX:  # a client that leaves a connection and makes a new one does not say so
            del session.streams[next(iter(session.streams))]
        session.streams[route] = stream
        n_bytes = len(message.payload) if isinstance(message, MeasurePush) else message.n_bytes
        if not 1 <= n_bytes <= CHUNK_BYTES_MAX or len(stream.pulls) >= PULLS_MAX:
            raise ProtocolError(f"a chunk of {n_bytes} bytes, {len(stream.pulls)} wait already")
        session.bytes_left -= n_bytes
        if session.bytes_left < 0:
            self._session = None
            raise ProtocolError("more bytes than the measurement was opened for")
        if isinstance(message, MeasurePull):
            stream.pulls.append(n_bytes)
        else:
            stream.total_bytes += n_bytes
            stream.counted_at, stream.owes_count = now, True


def _order_s(seconds: float) -> float:
    """An order takes up to this: the site that it measures the way to may be busy at first."""
    return BUSY_S + seconds + SLACK_S


def _refusal(seconds: float, bytes_max: int) -> str:
    if not 0 < seconds <= SECONDS_MAX:
        return f"a measurement takes up to {SECONDS_MAX:g} s, not {seconds:g}"
    if not 0 < bytes_max <= BYTES_MAX:
        return f"a measurement moves up to {BYTES_MAX // 10**6} MB, not {bytes_max / 1e6:g}"
    return ""
