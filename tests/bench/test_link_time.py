"""How `link` spends its time: over streams on a virtual clock, on links that are far or slow."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

import dlc.bench.link as link_module
from dlc.bench.flow import Meter, least_s
from dlc.bench.link import Budget, LinkReport, StreamRates, fitting, least_phase_s, moving_s, too_short
from dlc.bench.transfer import DRAIN_S
from dlc.comm.window import WINDOW_BYTES_MIN

RATE_MBIT = 50.0
STEPS = 10
"""Marks in a round trip."""


class Moved:
    """What a transfer has done."""

    def __init__(self, n_bytes: int, bytes_max: int) -> None:
        self.meter = Meter()
        self.moved = self.asked = n_bytes
        self.bytes_ended = n_bytes >= bytes_max


class World:
    """A link with slow start, and a clock that only its transfers move."""

    def __init__(
        self,
        rtt_s: float,
        rate_mbit: float = RATE_MBIT,
        drain_s: float = 0.0,
        shared: bool = False,
        held_bytes: int = 0,
    ) -> None:
        """shared: all streams together have that rate. held_bytes: on the way of each when its time is over."""
        self.now, self.rtt_s, self.rate, self.drain_s = 0.0, rtt_s, rate_mbit * 125_000, drain_s
        self.shared, self.held_bytes = shared, held_bytes
        self.connected = 0


class FakeStream:
    """One stream of a World; the first one moves the clock."""

    def __init__(self, world: World) -> None:
        self.world, self.place = world, world.connected
        world.connected += 1

    def open(self, seconds: float, bytes_max: int, say: Callable[[str], None]) -> int:
        return 1

    def use(self, bulk_port: int, passable: bool = False) -> None:
        pass

    def ping(self, seconds: float) -> list[float]:
        self.world.now += seconds
        return [self.world.rtt_s]

    def transfer(self, up: bool, seconds: float, bytes_max: int, rtt_s: float, until: float) -> Moved:
        world = self.world
        if bytes_max == 1:  # it connects
            world.now += (self.place == 0) * link_module.CONNECT_RTTS * world.rtt_s
            return Moved(1, 1)
        at = world.now + world.rtt_s
        begin, end, total, marks = at, min(at + seconds, until), 0.0, []
        fair = world.rate / world.connected if world.shared else world.rate
        while at < end + world.held_bytes / fair and total < bytes_max:
            marks.append((at, int(total)))
            rate = min(14_600 * 2 ** ((at - begin) / world.rtt_s) / world.rtt_s, fair)
            total = min(total + rate * world.rtt_s / STEPS, bytes_max)
            at += world.rtt_s / STEPS
        done = Moved(int(total), bytes_max)
        for mark in marks:
            done.meter.add(*mark)
        world.now = at + world.drain_s if self.place == 0 else world.now
        return done


class Inline(ThreadPoolExecutor):
    """Does at once what it is given."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


def measured(monkeypatch: pytest.MonkeyPatch, world: World, budget: Budget) -> LinkReport:
    monkeypatch.setattr(link_module, "clock", lambda: world.now)
    connect: Any = lambda: FakeStream(world)  # noqa: E731
    with Inline() as pool:
        return link_module._Work(connect, budget, pool, lambda text: None).run("far:4700", True)


@pytest.mark.parametrize(("rtt_s", "known"), [(0.03, 4), (0.105, 4), (0.15, 3), (0.25, 1), (0.45, 1)])
def test_a_far_link_is_measured_with_fewer_numbers_of_streams(
    monkeypatch: pytest.MonkeyPatch, rtt_s: float, known: int
) -> None:
    world = World(rtt_s)
    report = measured(monkeypatch, world, Budget(30.0, 10**10))
    one = report.streams[0]
    assert one.up_mbps == pytest.approx(RATE_MBIT, rel=0.05) and one.down_mbps == pytest.approx(RATE_MBIT, rel=0.05)
    assert [rates.up_mbps is not None for rates in report.streams] == [place < known for place in range(4)]
    assert report.missing == 0 and [rates.planned for rates in report.streams] == [place < known for place in range(4)]
    assert report.seconds <= 30.0 + rtt_s
    for rates in report.streams[known:]:
        assert (
            f"are too short with round trips of {1e3 * rtt_s:g} ms" in rates.up_missing
            and rates.up_missing == rates.down_missing
        )
    assert world.connected == (1, 2, 4, 8)[known - 1], "no others are connected"
    assert ("8 connections" in report.advice()) == (known == 4)


def test_what_a_slow_link_still_holds_is_no_reason_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(0.03, 0.1, 3 * DRAIN_S)
    report = measured(monkeypatch, world, Budget(20.0, 10**10))
    assert report.seconds <= 20.0 + 3 * DRAIN_S and world.connected == 1
    assert [rates.up_mbps is None for rates in report.streams] == [False, True, True, True]
    assert all(rates.up_missing == link_module.TOO_SLOW for rates in report.streams[1:])
    assert report.missing == 0 and [rates.planned for rates in report.streams] == [True, False, False, False]
    assert report.remarks() == [f"not measured with --streams 2,4,8: {link_module.TOO_SLOW}"]


def test_what_drains_after_its_time_makes_no_link_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 Mbit/s hold what four connections have on the way for over DRAIN_S: eight of them are not tried."""
    world = World(0.02, 2.0, shared=True, held_bytes=WINDOW_BYTES_MIN)
    report = measured(monkeypatch, world, Budget(30.0, 10**10))
    assert world.connected == 4 and [rates.planned for rates in report.streams] == [True, True, True, False]
    assert report.streams[3].up_missing == report.streams[3].down_missing == link_module.TOO_SLOW
    assert report.missing == 0


def test_a_transfer_that_drains_late_leaves_less_time_and_no_starved_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    report = measured(monkeypatch, World(0.05, drain_s=3 * DRAIN_S), Budget(30.0, 10**10))
    assert report.seconds <= 30.0 + 3 * DRAIN_S and 0 < report.missing < 8
    for rates in report.streams:
        for mbps, why in ((rates.up_mbps, rates.up_missing), (rates.down_mbps, rates.down_missing)):
            assert (mbps == pytest.approx(rates.n * RATE_MBIT, rel=0.05) and not why) or (
                mbps is None and "--seconds" in why
            )


def test_few_bytes_are_told_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    report = measured(monkeypatch, World(0.105), Budget(30.0, 5_000_000, (1,)))
    (one,) = report.streams
    assert one.up_mbps is None and one.down_mbps is None and one.bytes_ended
    told = re.fullmatch(r"its bytes were through before the rate had settled: give --max-mb (\d+)", one.up_missing)
    assert told is not None
    again = measured(monkeypatch, World(0.105), Budget(30.0, int(told[1]) * 10**6, (1,)))
    assert again.up_mbps == pytest.approx(RATE_MBIT, rel=0.05) and not again.missing
    assert report.remarks()[1] == "--max-mb ended transfers before their time, with --streams 1"


def test_reasons_that_differ_by_how_much_more_they_ask_for_are_told_once_with_the_most() -> None:
    budget = Budget(30.0, 5_000_000, (1, 2, 4))
    few, many, other = (link_module.unsettled(budget, bytes_needed) for bytes_needed in (91_000_000, 105_000_000, 0))
    assert few.endswith("give --max-mb 92, or fewer streams")
    streams = tuple(StreamRates(n, None, None, up, few) for n, up in ((1, few), (2, many), (4, other)))
    report = LinkReport("h:1", True, 1.0, 1.0, 1.0, 9, None, None, streams, 9.0, 9.0, 9.0)
    assert report.remarks() == [f"6 of 6 rates could not be told: {other}; {many}"]


@pytest.mark.parametrize(
    ("rtt_s", "n", "buffer_bytes", "told"),
    [
        (0.25, 1, 4_000_000, True),
        (0.25, 1, 64_000_000, False),
        (0.05, 1, 4_000_000, False),
        (0.25, 2, 4_000_000, True),
        (0.25, 1, None, False),
    ],
)
def test_a_send_buffer_that_holds_little_more_than_the_path_is_told(
    monkeypatch: pytest.MonkeyPatch, rtt_s: float, n: int, buffer_bytes: int | None, told: bool
) -> None:
    monkeypatch.setattr(link_module, "send_buffer_bytes", lambda: buffer_bytes)
    report = measured(monkeypatch, World(rtt_s), Budget(30.0, 10**10, (n,)))
    assert report.send_buffer_mb == (None if buffer_bytes is None else buffer_bytes / 1e6)
    assert any("send buffers of 4.0 MB" in remark and "tcp_wmem" in remark for remark in report.remarks()) == told


def test_no_time_at_all_is_told_with_how_much_there_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = Budget(3.0, 10**9, (1, 2))
    report = measured(monkeypatch, World(0.3), budget)
    assert report.missing == 2 and report.moved_mb == pytest.approx(1e-6), "the second number was not planned"
    remark, left = report.remarks()
    assert left.startswith("not measured with --streams 2: 3 s are too short with round trips of 300 ms")
    assert "round trips of 300 ms" in remark and too_short(budget, 0.3) in remark
    wanted_s = float(remark.split("--seconds ")[1].split(",")[0])
    enough = measured(monkeypatch, World(0.3), Budget(wanted_s, 10**10, (1, 2)))
    assert not enough.missing and all(rates.planned for rates in enough.streams)


@pytest.mark.parametrize("rtt_s", [0.0001, 0.02, 0.1, 0.3, 0.7])
def test_the_time_that_is_planned_is_enough_for_a_rate(rtt_s: float) -> None:
    for seconds in (1.0, 10.0, 30.0, 600.0):
        budget = Budget(seconds, 10**9)
        fit = fitting(budget, rtt_s, seconds)
        phase_s = (seconds - fit * link_module.connecting_s(rtt_s)) / (fit * budget.directions)
        assert fit == 1 or phase_s > least_phase_s(rtt_s)
    for phase_s in (least_phase_s(rtt_s), 2 * least_phase_s(rtt_s)):
        assert least_s(rtt_s) + rtt_s <= moving_s(phase_s, rtt_s) <= phase_s
