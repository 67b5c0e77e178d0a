"""`dlc bench link`: round trip, rates up and down, and what several streams carry, between here and one site.

    open a session ──> round trips ──> for each number of streams: connect, all up, then all down ──> close

Streams are connections of the bulk lane, each with a transport and a thread of its own; the site serves all of them
with one thread, as a peer does. Rates are payload bytes at the receiver, encrypted as in a real run.

A transfer needs a number of round trips before its rate means anything. So the time is not spread over more numbers of
streams than it is enough for: the last ones are not measured, and their report says why. Nor are those that a slow link
would only hold for long.
"""

from __future__ import annotations

import dataclasses
import math
import re
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from dlc.bench.flow import PACE_S_MIN, least_s, rate_mbps
from dlc.bench.limits import BYTES_MAX, MB, SECONDS_MAX, STREAMS_MAX
from dlc.bench.plain import rounded
from dlc.bench.stream import MeasureFailed, Stream, new_block
from dlc.bench.transfer import DRAIN_S, Transfer, median, percentile
from dlc.comm.allocator import keep_freed_chunks
from dlc.comm.clock import clock
from dlc.comm.security import LinkSecurity
from dlc.comm.tcp import send_buffer_bytes
from dlc.comm.window import WINDOW_BYTES_MIN, WINDOW_EXTRA_S
from dlc.errors import UsageError

PING_SHARE, PING_S_MAX = 0.1, 2.0
"""Of the whole time, for round trips."""
CONNECT_RTTS = 7
"""To connect a stream, from the first packet to the first byte of payload that is known to have come through."""
PHASE_RTTS = 26
"""Planned for a transfer, until nothing is on the way any more. More than it needs at least: segments that wait for a
lost one count when that has come, so a few round trips can carry more than the link."""
TOO_SLOW = "the link is too slow for more connections: they would only keep it full for long"
BUFFER_SHARE = 0.25
"""Of the send buffer, on the way: above it BBR, which asks for 2.9 times what the path holds until it knows the rate,
finds the buffer empty, does not learn that the path is full, and goes on overfilling it."""
HELPS = 1.2
"""So many times the rate of one stream is worth several connections; less is noise."""
ENOUGH = 1.5
"""Times what was too little that is asked for."""
NUMBER = re.compile(r"\d+")
"""How much more a sentence asks for."""


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
    def directions(self) -> int:
        """Transfers of each number of streams."""
        return 2 if self.down else 1


@dataclass(frozen=True)
class StreamRates:
    """What `n` connections side by side carried; None: too little came through to tell, or it was not measured."""

    n: int
    up_mbps: float | None
    down_mbps: float | None
    up_missing: str = ""
    """Why `up_mbps` is None; empty where it is not."""
    down_missing: str = ""
    bytes_ended: bool = False
    """The bytes of a transfer were used up before its time was over."""
    planned: bool = True
    """The time is enough for it, as far as round trips tell, and the link not too slow for so many connections; else it
    is no fault that there are no rates."""


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
    asked_mb: float
    """Payload that was sent, or asked for: also what had not come through when a transfer was broken off."""
    send_buffer_mb: float | None = None
    """How large the send buffer of a connection of this host may become; None where the system does not tell."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, rounded to what was measured."""
        plain: dict[str, Any] = rounded(dataclasses.asdict(self))
        return plain

    @property
    def missing(self) -> int:
        """How many rates of `streams` that were planned are None."""
        planned = [rates for rates in self.streams if rates.planned]
        return sum(rate is None for rates in planned for rate in (rates.up_mbps, rates.down_mbps))

    def remarks(self) -> list[str]:
        """What limits these numbers, a sentence each: rates that are missing, transfers that ended with their bytes,
        and this host's send buffers."""
        found: list[str] = []
        if self.missing:
            tried = [rates for rates in self.streams if rates.planned]
            texts = [text for rates in tried for text in (rates.up_missing, rates.down_missing) if text]
            most = {NUMBER.sub("", text): text for text in sorted(texts, key=_number)}  # all advise more of something
            found.append(f"{self.missing} of {2 * len(tried)} rates could not be told: {'; '.join(most.values())}")
        if left := [rates for rates in self.streams if not rates.planned]:
            numbers = ",".join(str(rates.n) for rates in left)
            found.append(f"not measured with --streams {numbers}: {left[0].up_missing}")
        if ended := [str(rates.n) for rates in self.streams if rates.bytes_ended]:
            found.append(f"--max-mb ended transfers before their time, with --streams {','.join(ended)}")
        on_the_way_mb = max((r.up_mbps / r.n for r in self.streams if r.up_mbps), default=0.0) * self.rtt_min_ms / 8e3
        if self.send_buffer_mb is not None and on_the_way_mb > BUFFER_SHARE * self.send_buffer_mb:
            found.append(
                f"this host's TCP send buffers of {self.send_buffer_mb:.1f} MB may be what limits single connections "
                f"with round trips of {self.rtt_min_ms:.0f} ms: raise the last number of the sysctl net.ipv4.tcp_wmem"
            )
        return found

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
            return f"{_connections(max(n for _, n in gains))} carried no more than {fewest}."
        return f"{best} connections carried {gain:.1f} times what {fewest} did: several help on this path."


def measure(
    address: str,
    security: LinkSecurity | None,
    budget: Budget,
    *,
    say: Callable[[str], None] = lambda text: None,
    stop: threading.Event | None = None,
    session: bytes | None = None,
    busy_s: float | None = None,
) -> LinkReport:
    """Measure the link to a site that runs `dlc bench serve`.

    say: told what is going on. stop: ends it early, with `Stopped`. session: its name; a random one, unless given.
    busy_s: how long a site that measures with others is waited for; BUSY_S, unless given.
    Raises UnreachableError, WrongKeyError (the site cannot be used), MeasureFailed (it broke before there was a rate:
    later ones are missing in the report, with the reason). Whatever happens, no thread and no socket is left.
    """
    keep_freed_chunks()
    mine = threading.Event()  # set when this measurement ends, for whatever reason
    either, block = _Either(mine, stop), new_block()
    name = session or secrets.token_bytes(16)
    with ThreadPoolExecutor(max(budget.streams), "dlc-stream") as pool:
        work = _Work(lambda: Stream(address, security, name, block, either, busy_s), budget, pool, say)
        try:
            return work.run(address, security is not None)
        finally:
            mine.set()
            pool.shutdown(wait=True, cancel_futures=True)
            for stream in reversed(work.streams):  # the first one, which says that the session is over, comes last
                stream.close()


class _Either(threading.Event):
    """Set if this or that is."""

    def __init__(self, mine: threading.Event, other: threading.Event | None) -> None:
        super().__init__()
        self._mine, self._other = mine, other

    def is_set(self) -> bool:
        return self._mine.is_set() or (self._other is not None and self._other.is_set())


class _Work:
    """One measurement: its streams, and what they have moved."""

    def __init__(
        self, connect: Callable[[], Stream], budget: Budget, pool: ThreadPoolExecutor, say: Callable[[str], None]
    ) -> None:
        self.streams: list[Stream] = []
        self._connect, self._budget, self._pool, self._say = connect, budget, pool, say
        self._bulk_port = 0
        self._rtt_s = 0.0
        self._until = 0.0
        self._share = 0  # bytes of one transfer of all streams together
        self._moved = self._asked = 0
        self._slow = False  # what streams have on the way at least takes over DRAIN_S
        self._broke: MeasureFailed | None = None  # nothing is measured after it

    def run(self, address: str, encrypted: bool) -> LinkReport:
        """See `measure`."""
        budget, say = self._budget, self._say
        say(f"connecting to {address}")
        first = self._connect()
        self.streams.append(first)
        self._bulk_port = first.open(budget.seconds, budget.bytes_max, say)
        begin = clock()
        first.use(self._bulk_port)
        say("round trips")
        rtts_s = first.ping(min(PING_SHARE * budget.seconds, PING_S_MAX))
        self._rtt_s, self._until = min(rtts_s), begin + budget.seconds
        fit = fitting(budget, self._rtt_s, self._until - clock())
        self._share = (budget.bytes_max - sum(budget.streams)) // (fit * budget.directions)  # a byte connects a stream
        rates: list[StreamRates] = []
        for place, n in enumerate(budget.streams):
            needed_s = connecting_s(self._rtt_s) + budget.directions * least_phase_s(self._rtt_s)
            if self._broke or place >= fit or (place and (self._slow or clock() + needed_s > self._until)):
                why = TOO_SLOW if self._slow else str(self._broke or too_short(budget, self._rtt_s))
                planned = place < fit and not self._slow
                rates.append(StreamRates(n, None, None, why, why if budget.down else "", planned=planned))
            else:
                rates.append(self._rates(n, fit - place - 1))
        if self._broke is not None and all(r.up_mbps is None and r.down_mbps is None for r in rates):
            raise self._broke
        return LinkReport(
            to=address,
            encrypted=encrypted,
            rtt_ms=1e3 * median(rtts_s),
            rtt_min_ms=1e3 * min(rtts_s),
            rtt_p95_ms=1e3 * percentile(rtts_s, 0.95),
            pings=len(rtts_s),
            up_mbps=rates[0].up_mbps,
            down_mbps=rates[0].down_mbps,
            streams=tuple(rates),
            seconds=clock() - begin,
            moved_mb=self._moved / MB,
            asked_mb=self._asked / MB,
            send_buffer_mb=None if (buffer_bytes := send_buffer_bytes()) is None else buffer_bytes / MB,
        )

    def _rates(self, n: int, later: int) -> StreamRates:
        """Of that many streams; so many numbers of streams come after this one, and need their time too."""
        directions = self._budget.directions
        mbps: list[float | None] = [None, None]
        missing = ["", ""]
        bytes_ended = False
        try:
            self._connect_streams(n)
            for place in range(directions):
                later = 0 if self._slow else later
                left_s = self._until - clock() - later * connecting_s(self._rtt_s)
                seconds = left_s / (directions - place + later * directions)
                if seconds < least_phase_s(self._rtt_s):
                    missing[place] = too_short(self._budget, self._rtt_s)
                    continue
                self._say(f"{_connections(n)} {'down' if place else 'up'}, {seconds:.1f} s")
                move_s = moving_s(seconds, self._rtt_s)
                done = self._side_by_side(n, not place, move_s, self._share // n, clock() + seconds)
                mbps[place] = rate_mbps([t.meter for t in done], self._rtt_s)
                ended = any(t.bytes_ended for t in done)
                bytes_ended = bytes_ended or ended
                slow = not ended and _bytes_per_s(done) * DRAIN_S < n * WINDOW_BYTES_MIN
                self._slow = self._slow or slow
                if mbps[place] is None:
                    missing[place] = unsettled(self._budget, self._enough(done) if ended else 0)
        except MeasureFailed as failed:
            self._broke = failed
            for place in range(directions):
                if mbps[place] is None:
                    missing[place] = missing[place] or str(failed)
        return StreamRates(n, mbps[0], mbps[1], missing[0], missing[1], bytes_ended)

    def _connect_streams(self, n: int) -> None:
        """Before they are needed, and not in the middle of the others' traffic, where a handshake can take seconds."""
        while len(self.streams) < n:
            self.streams.append(self._connect())
            self.streams[-1].use(self._bulk_port, passable=self._moved > 0)
        self._side_by_side(n, True, PING_S_MAX, 1, self._until)

    def _enough(self, done: Sequence[Transfer]) -> int:
        """Bytes of all transfers together with which one as fast as these would have lasted for long enough."""
        lasted_s = min((t.meter.times[-1] - t.meter.times[0] for t in done if t.meter.times), default=0.0)
        longer = ENOUGH * least_s(self._rtt_s) / max(lasted_s, PACE_S_MIN)
        return math.ceil(self._budget.bytes_max * max(longer, ENOUGH))

    def _side_by_side(self, n: int, up: bool, seconds: float, bytes_max: int, until: float) -> list[Transfer]:
        """One transfer on each of the first n streams at the same time; the first on the calling thread, which Ctrl-C
        reaches."""
        words = (up, seconds, bytes_max, self._rtt_s, until)
        others: list[Future[Transfer]] = [self._pool.submit(s.transfer, *words) for s in self.streams[1:n]]
        done = [self.streams[0].transfer(*words), *(other.result() for other in others)]
        self._moved += sum(t.moved for t in done)
        self._asked += sum(t.asked for t in done)
        return done


def _bytes_per_s(done: Sequence[Transfer]) -> float:
    """Of transfers side by side, from their first sign of progress to the last: also while they drain."""
    marks = [t.meter for t in done if t.meter.times]
    if not marks:
        return 0.0
    lasted_s = max(m.times[-1] for m in marks) - min(m.times[0] for m in marks)
    return sum(t.moved for t in done) / max(lasted_s, PACE_S_MIN)


# ---------------------------------------------------------------- what the time is enough for


def connecting_s(rtt_s: float) -> float:
    """To connect streams; all of one number do it at the same time."""
    return CONNECT_RTTS * rtt_s


def moving_s(phase_s: float, rtt_s: float) -> float:
    """What a transfer of `phase_s` asks for payload; never less than it takes to have a rate.

    The rest is for what is on the way then: twice what the path holds, and what losses held back.
    """
    return max(phase_s - 2 * (2 * rtt_s + WINDOW_EXTRA_S), least_s(rtt_s) + rtt_s)


def least_phase_s(rtt_s: float) -> float:
    """A transfer that gets less has no rate; with its first round trip, in which nothing comes."""
    return least_s(rtt_s) + rtt_s + 2 * (rtt_s + WINDOW_EXTRA_S)


def number_s(budget: Budget, rtt_s: float) -> float:
    """To measure one number of streams."""
    phase_s = PHASE_RTTS * max(rtt_s, PACE_S_MIN) + 2 * WINDOW_EXTRA_S
    return connecting_s(rtt_s) + budget.directions * phase_s


def fitting(budget: Budget, rtt_s: float, left_s: float) -> int:
    """How many numbers of streams, from the first on, can be measured in that time: at least one is tried."""
    return min(max(int(left_s / number_s(budget, rtt_s)), 1), len(budget.streams))


def too_short(budget: Budget, rtt_s: float) -> str:
    """Why there was no time; says how much there must be."""
    all_s = len(budget.streams) * number_s(budget, rtt_s)
    wanted_s = math.ceil(all_s + min(PING_SHARE / (1 - PING_SHARE) * all_s, PING_S_MAX))
    if wanted_s <= budget.seconds:
        return f"what was measured before took longer than planned: give more --seconds{_or_fewer(budget)}"
    return (
        f"{budget.seconds:g} s are too short with round trips of {1e3 * rtt_s:.3g} ms: give --seconds {wanted_s}"
        f"{_or_fewer(budget)}"
    )


def _or_fewer(budget: Budget) -> str:
    """Which a matrix has not, and takes no option for."""
    return ", or fewer streams" if len(budget.streams) > 1 else ""


def unsettled(budget: Budget, bytes_needed: int) -> str:
    """Why a transfer has no rate. bytes_needed: of all transfers, where its bytes ended it and not its time."""
    if not bytes_needed:
        return "too little came through, or too unevenly, or it still grew when the time was over: give more --seconds"
    if bytes_needed > BYTES_MAX:
        return "its bytes were through before the rate had settled: give fewer --streams, and more --max-mb"
    needed_mb = bytes_needed // MB + 1
    return f"its bytes were through before the rate had settled: give --max-mb {needed_mb}{_or_fewer(budget)}"


def _number(text: str) -> int:
    """The last one in it; 0: there is none."""
    return int((NUMBER.findall(text) or ["0"])[-1])


def _connections(n: int) -> str:
    return "1 connection" if n == 1 else f"{n} connections"
