"""`dlc bench link`: round trip, rates up and down, and what several streams carry, between here and one site.

    open a session ──> round trips ──> for each number of streams: connect, all up, then all down ──> close

Streams are connections of the bulk lane, each with a transport and a thread of its own; the site serves all of them
with one thread, as a peer does. Rates are payload bytes at the receiver, encrypted as in a real run.
"""

from __future__ import annotations

import dataclasses
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from dlc.bench.flow import rate_mbps
from dlc.bench.limits import BYTES_MAX, MB, SECONDS_MAX, STREAMS_MAX
from dlc.bench.plain import rounded
from dlc.bench.stream import Stream, new_block
from dlc.bench.transfer import Transfer, median, percentile
from dlc.comm.allocator import keep_freed_chunks
from dlc.comm.clock import clock
from dlc.comm.security import LinkSecurity
from dlc.errors import UsageError

PING_SHARE, PING_S_MAX = 0.1, 2.0
"""Of the whole time, for round trips."""
MOVE_SHARE = 0.7
"""Of a transfer's time, from its first sign of progress on; the rest is for connecting before and draining after."""
HELPS = 1.2
"""So many times the rate of one stream is worth several connections; less is noise."""


@dataclass(frozen=True)
class Budget:
    """How much a measurement may cost; checked when made."""

    seconds: float
    """For everything after the site was reached."""
    bytes_max: int
    """Payload, both directions together."""
    streams: tuple[int, ...] = (1, 2, 4, 8)
    down: bool = True
    """Also the direction from the site to here."""

    def __post_init__(self) -> None:
        if not 0 < self.seconds <= SECONDS_MAX:
            raise UsageError(f"--seconds is {self.seconds:g}; a measurement takes up to {SECONDS_MAX:g} s")
        if not MB <= self.bytes_max <= BYTES_MAX:
            raise UsageError(f"--max-mb is {self.bytes_max / MB:g}; choose 1 to {BYTES_MAX // MB} MB")
        if not 1 <= len(self.streams) <= STREAMS_MAX or any(not 1 <= n <= STREAMS_MAX for n in self.streams):
            raise UsageError(f"--streams wants up to {STREAMS_MAX} numbers from 1 to {STREAMS_MAX}, like 1,2,4,8")

    @property
    def phases(self) -> int:
        """Transfers that share the budget."""
        return len(self.streams) * (2 if self.down else 1)


@dataclass(frozen=True)
class StreamRates:
    """What `n` connections side by side carried; None: too little came through to tell, or it was not measured."""

    n: int
    up_mbps: float | None
    down_mbps: float | None


@dataclass(frozen=True)
class LinkReport:
    """One link, as seen from here. Rates are Mbit/s of payload, at the receiver."""

    to: str
    encrypted: bool
    rtt_ms: float
    """Median."""
    rtt_min_ms: float
    rtt_p95_ms: float
    pings: int
    up_mbps: float | None
    """Here to there, by the first number of streams that was measured (one, unless told otherwise)."""
    down_mbps: float | None
    streams: tuple[StreamRates, ...]
    seconds: float
    """All of it."""
    moved_mb: float
    """Payload that came through, both directions."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, rounded to what was measured."""
        plain: dict[str, Any] = rounded(dataclasses.asdict(self))
        return plain

    @property
    def missing(self) -> int:
        """How many rates of `streams` are None."""
        return sum(rate is None for rates in self.streams for rate in (rates.up_mbps, rates.down_mbps))

    def advice(self) -> str:
        """What the numbers of streams mean, in one sentence; empty where no two of them can be compared."""
        measured = sorted((rates for rates in self.streams if rates.up_mbps or rates.down_mbps), key=lambda r: r.n)
        gains: list[tuple[float, int]] = []
        for rates in measured:
            for mine, ones in ((rates.up_mbps, measured[0].up_mbps), (rates.down_mbps, measured[0].down_mbps)):
                if rates.n > measured[0].n and mine and ones:
                    gains.append((mine / ones, rates.n))
        if not gains:
            return ""
        gain, best = max(gains, key=lambda found: found[0])
        fewest = _connections(measured[0].n)
        if gain < HELPS:
            return f"More connections carried no more than {fewest}."
        return f"{best} connections carried {gain:.1f} times what {fewest} did: several help on this path."


def measure(
    address: str,
    security: LinkSecurity | None,
    budget: Budget,
    *,
    say: Callable[[str], None] = lambda text: None,
    stop: threading.Event | None = None,
) -> LinkReport:
    """Measure the link to a site that runs `dlc bench serve`.

    say: told what is going on. stop: ends it early, with `Stopped`. Raises UnreachableError, WrongKeyError (the site
    cannot be used), MeasureFailed (it broke in the middle). Whatever happens, no thread and no socket is left.
    """
    keep_freed_chunks()
    session, block = secrets.token_bytes(16), new_block()
    mine = threading.Event()  # set when this measurement ends, for whatever reason
    streams: list[Stream] = []
    with ThreadPoolExecutor(max(budget.streams), "dlc-stream") as pool:
        try:
            return _measured(address, security, budget, session, block, streams, pool, say, _Either(mine, stop))
        finally:
            mine.set()
            pool.shutdown(wait=True, cancel_futures=True)
            for stream in reversed(streams):  # the first one, which says that the session is over, comes last
                stream.close()


class _Either(threading.Event):
    """Set if this or that is."""

    def __init__(self, mine: threading.Event, other: threading.Event | None) -> None:
        super().__init__()
        self._mine, self._other = mine, other

    def is_set(self) -> bool:
        return self._mine.is_set() or (self._other is not None and self._other.is_set())


def _measured(
    address: str,
    security: LinkSecurity | None,
    budget: Budget,
    session: bytes,
    block: memoryview,
    streams: list[Stream],
    pool: ThreadPoolExecutor,
    say: Callable[[str], None],
    stop: threading.Event,
) -> LinkReport:
    say(f"connecting to {address}")
    first = Stream(address, security, session, block, stop)
    streams.append(first)
    bulk_port = first.open(budget.seconds, budget.bytes_max, say)
    begin = clock()
    first.use(bulk_port)
    say("round trips")
    rtts_s = first.ping(min(PING_SHARE * budget.seconds, PING_S_MAX))
    left, moved, rates = budget.phases, 0, []
    longest_s = (begin + budget.seconds - clock()) / left
    for n in budget.streams:
        while len(streams) < n:
            streams.append(Stream(address, security, session, block, stop))
            streams[-1].use(bulk_port)
        # Connected before, and not in the middle of the others' traffic, where a handshake can take seconds.
        _side_by_side(streams[:n], pool, True, PING_S_MAX, 1, min(rtts_s))
        found: list[float | None] = [None, None]
        for up in (True, False) if budget.down else (True,):
            seconds = min(longest_s, (begin + budget.seconds - clock()) / left)
            left -= 1
            if seconds <= 0:  # connecting or draining took what was left
                continue
            say(f"{_connections(n)} {'up' if up else 'down'}, {seconds:.1f} s")
            share = (budget.bytes_max - sum(budget.streams)) // budget.phases // n  # a byte connects a stream
            done = _side_by_side(streams[:n], pool, up, MOVE_SHARE * seconds, share, min(rtts_s))
            found[0 if up else 1] = rate_mbps([t.meter for t in done])
            moved += sum(t.moved for t in done)
        rates.append(StreamRates(n, *found))
    return LinkReport(
        to=address,
        encrypted=security is not None,
        rtt_ms=1e3 * median(rtts_s),
        rtt_min_ms=1e3 * min(rtts_s),
        rtt_p95_ms=1e3 * percentile(rtts_s, 0.95),
        pings=len(rtts_s),
        up_mbps=rates[0].up_mbps,
        down_mbps=rates[0].down_mbps,
        streams=tuple(rates),
        seconds=clock() - begin,
        moved_mb=moved / MB,
    )


def _side_by_side(
    streams: Sequence[Stream], pool: ThreadPoolExecutor, up: bool, seconds: float, bytes_max: int, rtt_s: float
) -> list[Transfer]:
    """One transfer on each stream at the same time; the first on the calling thread, which Ctrl-C reaches."""
    others: list[Future[Transfer]] = [pool.submit(s.transfer, up, seconds, bytes_max, rtt_s) for s in streams[1:]]
    done = [streams[0].transfer(up, seconds, bytes_max, rtt_s)]
    return done + [other.result() for other in others]


def _connections(n: int) -> str:
    return "1 connection" if n == 1 else f"{n} connections"
