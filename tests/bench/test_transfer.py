"""The client's machines against the serving one, over a fake link with a known rate and delay, on a virtual clock."""

from __future__ import annotations

import heapq
import itertools
import math

import pytest

from dlc.bench.flow import rate_mbps
from dlc.bench.host import Host
from dlc.bench.transfer import DRAIN_S, PING_LOST_S, PINGS_MAX, STALL_S, Pinger, Transfer, percentile
from dlc.comm.measures import MeasureClose, MeasureCount, MeasureOpen, MeasurePing, MeasurePong, MeasurePush
from dlc.comm.messages import Message
from dlc.comm.window import CHUNK_BYTES_MAX

SESSION = b"s" * 16
BLOCK = memoryview(bytes(CHUNK_BYTES_MAX))
STEP_S = 0.001
RTT_S = 0.02
SKEW_S = 1000.0
"""The site's clock is not ours."""


class FakeLink:
    """Both directions of one connection: `rate_mbit` for payload, half the round trip for everything."""

    def __init__(
        self,
        rate_mbit: float,
        rtt_s: float,
        up: bool,
        seconds: float,
        n_bytes: int,
        slow_start: bool = False,
        until: float = math.inf,
    ) -> None:
        self.slow_start = slow_start
        self.now, self.rate, self.rtt_s = 0.0, rate_mbit * 125_000, rtt_s
        self.host = Host(1, BLOCK)
        self.host.receive("c", MeasureOpen(SESSION, 60.0, 10**10), SKEW_S)
        self.transfer = Transfer(
            up, SESSION, BLOCK, seconds=seconds, bytes_max=n_bytes, rtt_s=rtt_s, counted=0, now=0.0, until=until
        )
        self.free_at = {"there": 0.0, "here": 0.0}
        self.flying: list[tuple[float, int, str, Message]] = []
        self.serial = itertools.count()
        self.still = (math.inf, math.inf)
        """From when until when nothing arrives; it arrives then."""

    def send(self, to: str, message: Message) -> None:
        n_bytes = len(getattr(message, "payload", b""))
        slow = 14_600 * 2 ** min(self.now / self.rtt_s, 30) / self.rtt_s if self.slow_start else math.inf
        self.free_at[to] = max(self.now, self.free_at[to]) + n_bytes / min(self.rate, slow)
        heapq.heappush(self.flying, (self.free_at[to] + self.rtt_s / 2, next(self.serial), to, message))

    def run(self) -> Transfer:
        """Until the transfer is done or has stalled."""
        t = self.transfer
        while not t.done(self.now) and not t.stalled(self.now):
            while t.wants_room and self.free_at["there"] < self.now + 0.01:
                bulk = t.next_bulk()
                self.send("there", bulk)
                t.sent(bulk)
            self.now += STEP_S
            moving = not self.still[0] <= self.now < self.still[1]
            while moving and self.flying and self.flying[0][0] <= self.now:
                _, _, to, message = heapq.heappop(self.flying)
                if to == "here":
                    t.receive(message, self.now)
                    continue
                self.host.receive("b", message, self.now + SKEW_S)
            while (out := self.host.next_bulk("b")) is not None and self.free_at["here"] < self.now + 0.01:
                self.host.sent("b")
                self.send("here", out)
            t.tick(self.now)
        return t


@pytest.mark.parametrize("up", [True, False], ids=["up", "down"])
@pytest.mark.parametrize(("rate_mbit", "rtt_s"), [(1, 0.03), (50, 0.05), (50, 0.3), (1000, 0.1), (3000, 0.001)])
def test_the_rate_of_the_link_is_found(rate_mbit: float, rtt_s: float, up: bool) -> None:
    link = FakeLink(rate_mbit, rtt_s, up, 4.0, 10**10)
    done = link.run()
    assert done.drained() and rate_mbps([done.meter], min(rtt_s, 0.2)) == pytest.approx(rate_mbit, rel=0.03)
    assert link.now < 4.0 + 2 * rtt_s + DRAIN_S + 0.5


def test_bytes_are_bounded_exactly() -> None:
    for up in (True, False):
        link = FakeLink(100, 0.02, up, 10.0, 1_234_567)
        done = link.run()
        assert done.moved == done.asked == 1_234_567 and done.drained() and link.now < 1.0
        assert done.bytes_ended and not FakeLink(100, 0.02, up, 10.0, 10**9).transfer.bytes_ended


@pytest.mark.parametrize("up", [True, False], ids=["up", "down"])
@pytest.mark.parametrize(("rate_mbit", "rtt_s"), [(50, 0.25), (100, 0.105)])
def test_slow_start_is_never_the_rate(rate_mbit: float, rtt_s: float, up: bool) -> None:
    for rtts in (6, 9, 14):
        done = FakeLink(rate_mbit, rtt_s, up, rtts * rtt_s, 10**10, slow_start=True).run()
        assert rate_mbps([done.meter], rtt_s) is None, rtts
    done = FakeLink(rate_mbit, rtt_s, up, 20 * rtt_s, 10**10, slow_start=True).run()
    assert rate_mbps([done.meter], rtt_s) == pytest.approx(rate_mbit, rel=0.05)
    few = FakeLink(rate_mbit, rtt_s, up, 100 * rtt_s, 2_500_000, slow_start=True).run()
    assert few.bytes_ended and rate_mbps([few.meter], rtt_s) is None


def test_who_connects_late_has_not_more_time() -> None:
    link = FakeLink(10, 0.02, True, 2.0, 10**9, until=3.0)
    link.still = (0.0, 2.5)
    assert link.run().drained() and link.now == pytest.approx(3.0, abs=0.3)
    link = FakeLink(10, 0.02, True, 2.0, 10**9, until=1.0)
    link.still = (0.0, 2.5)
    assert link.run().drained() and link.now < 3.0 and rate_mbps([link.transfer.meter], 0.02) is None


def test_a_link_that_dies_is_a_stall_and_no_rate_is_made_up() -> None:
    link = FakeLink(10, 0.02, True, 4.0, 10**9)
    link.still = (0.0, math.inf)
    done = link.run()
    assert done.stalled(link.now) and link.now == pytest.approx(STALL_S, abs=0.01)
    assert done.moved == 0 and rate_mbps([done.meter], RTT_S) is None


@pytest.mark.parametrize("up", [True, False], ids=["up", "down"])
@pytest.mark.parametrize("n_bytes", [10**10, 20_000_000], ids=["time", "bytes"])
def test_a_link_that_dies_in_the_middle_is_a_stall_and_its_first_part_no_rate(up: bool, n_bytes: int) -> None:
    link = FakeLink(100, 0.02, up, 3.5 if n_bytes > 10**9 else 60.0, n_bytes)
    link.still = (1.5, math.inf)  # all bytes are asked for by then, where they are few
    done = link.run()
    assert done.stalled(link.now) and not done.done(link.now) and done.moved > 10**7
    assert link.now == pytest.approx(1.5 + STALL_S, abs=0.05), "not before, and not later"


@pytest.mark.parametrize("up", [True, False], ids=["up", "down"])
@pytest.mark.parametrize(("back_at", "least", "most"), [(math.inf, 75, 82), (4.5, 50, 75)], ids=["dead", "back"])
def test_silence_at_the_end_of_the_time_lowers_the_rate(up: bool, back_at: float, least: float, most: float) -> None:
    link = FakeLink(100, 0.02, up, 3.5, 10**10)
    link.still = (3.0, back_at)
    done = link.run()
    assert done.done(link.now) and done.drained() == (back_at < math.inf)
    assert least < (rate_mbps([done.meter], RTT_S) or 0) < most


def test_few_bytes_that_all_are_lost_are_a_stall_too() -> None:
    link = FakeLink(10, 0.02, False, 4.0, 1000)
    link.still = (0.0, math.inf)
    assert link.run().stalled(link.now)


def test_what_does_not_drain_is_left_behind() -> None:
    link = FakeLink(10, 0.02, True, 1.0, 10**9)
    while link.transfer.moved == 0:
        link.transfer.receive(link.host.next_bulk("b") or MeasureClose(SESSION), link.now)
        bulk = MeasurePush(SESSION, payload=BLOCK[:1000])  # type: ignore[arg-type]
        link.transfer.sent(bulk)
        link.host.receive("b", bulk, SKEW_S)
    link.transfer.sent(bulk)  # this one is lost
    link.transfer.tick(1.0)
    assert not link.transfer.done(1.0) and link.transfer.done(1.0 + DRAIN_S) and not link.transfer.drained()


def test_a_count_that_goes_back_changes_nothing() -> None:
    link = FakeLink(10, 0.02, True, 1.0, 10**6)
    done = link.run()
    before = list(done.meter.totals)
    moved = done.moved
    assert moved > 0
    done.receive(MeasureCount(SESSION, moved - 1, link.now + 1.0), link.now + 1.0)
    assert done.meter.totals == before and done.moved == moved


def test_pings_go_one_after_the_other_and_lost_ones_do_not_count() -> None:
    pinger, now = Pinger(SESSION, 1.0, 0.0), 0.0
    while not pinger.done(now):
        for message in pinger.tick(now):
            assert isinstance(message, MeasurePing)
            assert pinger.tick(now) == [], "one at a time"
            now += 0.025
            pinger.receive(MeasurePong(SESSION, message.serial - 1), now)  # a late answer to another one
            pinger.receive(MeasurePong(SESSION, message.serial), now)
    assert now == pytest.approx(1.0, abs=0.03) and {round(r, 6) for r in pinger.rtts_s} == {0.025}
    quick = Pinger(SESSION, 1.0, 0.0)
    while not quick.done(0.0):
        for message in quick.tick(0.0):
            assert isinstance(message, MeasurePing)
            quick.receive(MeasurePong(SESSION, message.serial), 0.0)
    assert len(quick.rtts_s) == PINGS_MAX
    deaf = Pinger(SESSION, 0.1, 0.0)
    deaf.tick(0.0)
    assert not deaf.done(PING_LOST_S - 0.1) and deaf.done(PING_LOST_S) and deaf.rtts_s == []
    patient, now, answered = Pinger(SESSION, 0.0, 0.0, STALL_S), 0.0, 0
    while not patient.done(now):  # of a host that stood still it waits for the first answer, and for no other
        for message in patient.tick(now):
            if now > STALL_S - PING_LOST_S - 1:
                patient.receive(MeasurePong(SESSION, message.serial), now)
                answered += 1
        now = max(now + 0.01, min(patient.next_deadline(), now + 1.0))
    assert answered == 1 and len(patient.rtts_s) == 1 and now < STALL_S


def test_percentiles() -> None:
    assert percentile([float(i) for i in range(1, 101)], 0.95) == 95.0
    assert percentile([float(i) for i in range(1, 22)], 0.95) == 20.0
    for n in range(1, PINGS_MAX + 1):
        found = percentile([float(i) for i in range(1, n + 1)], 0.95)
        assert 100 * found >= 95 * n > 100 * (found - 1), n
    assert percentile([3.0], 0.95) == 3.0
