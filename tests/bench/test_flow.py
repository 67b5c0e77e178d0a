"""Rates out of marks, on a virtual clock."""

from __future__ import annotations

import random

import pytest

from dlc.bench.flow import COUNTED_RTTS, MARKS_MAX, PACE_S_MIN, SETTLE_RTTS, Meter, least_s, rate_mbps
from dlc.comm.window import WINDOW_BYTES_MAX, WINDOW_BYTES_MIN, Window

RTT_S = 0.02


def steady(rate_mbit: float, begin: float, seconds: float, chunk: int = 10_000, bunch: int = 1) -> Meter:
    """Chunks at a constant rate, read in bunches as a thread finds them."""
    meter, per_s = Meter(), rate_mbit * 125_000
    for i in range(bunch, int(seconds * per_s / chunk), bunch):
        for j in range(bunch):
            meter.add(begin + i * chunk / per_s + 1e-5 * j, (i - bunch + 1 + j) * chunk)
    return meter


@pytest.mark.parametrize("bunch", [1, 2, 7])
@pytest.mark.parametrize("chunk", [10_000, 100_000])
def test_a_steady_rate_is_found_exactly_however_chunks_are_bunched(bunch: int, chunk: int) -> None:
    assert rate_mbps([steady(50, 3.0, 5.0, chunk, bunch)], RTT_S) == pytest.approx(50, rel=2e-3)


def test_the_slow_start_is_not_counted() -> None:
    meter = Meter()
    for i in range(1000):
        at = i / 100
        meter.add(at, int(1e6 * at if at < 2 else 2e6 + 5e6 * (at - 2)))
    assert rate_mbps([meter], RTT_S) == pytest.approx(40, rel=1e-3)


def doubling(rate_mbit: float, rtt_s: float, seconds: float) -> Meter:
    """Slow start from 10 segments: twice as much in each round trip, until the rate is reached."""
    meter, total, at = Meter(), 0.0, 0.0
    while at <= seconds:
        meter.add(at, int(total))
        total += min(14_600 * 2 ** (at / rtt_s) / rtt_s, rate_mbit * 125_000) * rtt_s / 10
        at += rtt_s / 10
    return meter


@pytest.mark.parametrize(("rate_mbit", "rtt_s"), [(50, 0.25), (100, 0.105), (1000, 0.25), (20, 0.6), (10_000, 0.1)])
@pytest.mark.parametrize("n", [1, 4])
def test_a_rate_that_still_grows_is_told_as_none(rate_mbit: float, rtt_s: float, n: int) -> None:
    """However early the transfer ends, its rate is that of the link, or not known."""
    for rtts in range(4, 60):
        found = rate_mbps([doubling(rate_mbit / n, rtt_s, rtts * rtt_s)] * n, rtt_s)
        assert found is None or found == pytest.approx(rate_mbit, rel=0.05), rtts
        assert found is None or rtts >= SETTLE_RTTS + COUNTED_RTTS
        assert found is not None or rtts < 26


def test_a_part_of_some_round_trips_makes_a_rate_and_less_does_not() -> None:
    for rtt_s in (0.0002, 0.02, 0.3):
        least = least_s(rtt_s)
        assert least == pytest.approx((SETTLE_RTTS + COUNTED_RTTS) * max(rtt_s, PACE_S_MIN))
        assert rate_mbps([steady(500, 0.0, 0.9 * least)], rtt_s) is None
        assert rate_mbps([steady(500, 0.0, 1.2 * least)], rtt_s) == pytest.approx(500, rel=0.02)


def test_a_standstill_after_slow_start_is_not_the_rate() -> None:
    """As seen at 600 ms: some of the first losses are lost again, and for three round trips nothing new can be told."""
    meter, total, rtt_s = Meter(), 0.0, 0.6
    rates = [0.3, 0.6, 1.1, 1.7, 3.7, 7.4, 13.1, 8.9, 12.5, 22.3, 0.7, 0.7, 0.7, 6.7, 17.0, 17.4, *([18.5] * 14)]
    for i, rate in enumerate(rates):
        meter.add(i * rtt_s, int(total))
        total += rate * 125_000 * rtt_s
        if i < 17:
            assert rate_mbps([meter], rtt_s) is None, i
    assert rate_mbps([meter], rtt_s) == pytest.approx(18.3, rel=0.05)


def test_losses_that_hold_back_what_came_later_are_no_growth() -> None:
    """Around 40 Mbit/s in all, in bursts: what followed a lost segment is handed over when that has come again."""
    meter, rng, total, rtt_s = Meter(), random.Random(3), 0, 0.25
    for i in range(200):
        total += int(rng.choice((0.2, 0.4, 1.5, 1.9)) * 40 * 125_000 * rtt_s)
        meter.add(i * rtt_s, total)
    counted = (meter.totals[-1] - meter.totals[60]) * 8e-6 / (meter.times[-1] - meter.times[60])
    assert rate_mbps([meter], rtt_s) == pytest.approx(counted, rel=0.05)


def in_order(rate_mbit: float, rtt_s: float, seconds: float, rng: random.Random) -> Meter:
    """A full link that loses segments: what follows one is handed over when that has come again."""
    meter, total, at, lost, back = Meter(), 0, 0.0, rng.uniform(2, 8) * rtt_s, 0.0
    while at <= seconds:
        if at >= max(lost, back):
            lost, back = (at, at + rng.uniform(1, 3) * rtt_s) if back < lost else (at + rng.uniform(2, 8) * rtt_s, 0.0)
        total = total if lost <= at < back else int(at * rate_mbit * 125_000)
        meter.add(at, total)
        at += rtt_s / 10
    return meter


def test_what_was_held_back_behind_a_loss_makes_no_rate_above_the_link_s() -> None:
    found = []
    for seed in range(400):
        rng, n = random.Random(seed), 1 + seed % 3
        seconds = rng.uniform(16, 30) * 0.1
        found.append(rate_mbps([in_order(50 / n, 0.1, seconds, rng) for _ in range(n)], 0.1))
    rates = [rate for rate in found if rate is not None]
    assert len(rates) > 350 and max(rates) < 1.15 * 50
    assert sum(rate > 1.05 * 50 for rate in rates) < 0.05 * len(rates)
    assert sum(rates) / len(rates) == pytest.approx(50, rel=0.06)


def test_a_burst_at_the_end_is_no_rate() -> None:
    """As seen at 80 ms on a link of 48 Mbit/s: two connections, in each of which a loss held back all for long."""
    first = [10.8, 11.0, 43.0, 37.8, 38.2, 6.5, 5.2, 49.9, 72.3, 16.7, 11.6, 11.6, 79.0]
    first += [5.8, 6.2, 7.0, 7.0, 7.0, 44.1, 21.5, 21.5, 47.9, 121.0, 51.0, 13.3, 32.3]
    second = [2.0, 4.6, 5.0, 10.2, 9.9, 1.5, 4.7, 20.6, 32.1, 4.4, 1.6, 33.7, 19.6]
    second += [4.6, 4.7, 5.1, 5.1, 5.1, 17.1, 19.5, 12.8, 11.2, 71.9, 6.3, 4.5, 18.2]
    meters = [Meter(), Meter()]
    for meter, rates in zip(meters, (first, second), strict=True):
        total = 0.0
        for i, rate in enumerate([*rates, 0.0]):
            meter.add(i * 0.08, int(total))
            total += rate * 125_000 * 0.08
    found = rate_mbps(meters, 0.08)
    assert found is None or found <= 1.05 * 48.3


def test_streams_are_added_up_over_the_time_in_which_all_of_them_run() -> None:
    assert rate_mbps([steady(30, 0.0, 4.0), steady(20, 1.0, 4.0), steady(10, 0.5, 2.5)], RTT_S) == pytest.approx(
        60, rel=3e-3
    )


def test_a_rate_counts_until_the_meter_was_stopped() -> None:
    silent, late = steady(40, 0.0, 1.0), steady(40, 0.0, 3.0)
    silent.stop(2.0)
    assert rate_mbps([silent], RTT_S) == pytest.approx(40 * 0.4 / 1.4, rel=0.02), "nothing came from 1.0 on"
    late.stop(2.0)
    late.add(100.0, 10**9)
    assert late.end == pytest.approx(2.0, abs=0.01) and late.end in late.times, "a mark, where there is one"
    assert rate_mbps([late], RTT_S) == pytest.approx(40, rel=2e-3), "what comes later is not counted"
    back = steady(40, 0.0, 1.0)
    back.stop(2.0)
    back.add(2.5, 6_000_000)
    assert rate_mbps([back], RTT_S) == pytest.approx((40 * 0.25 + 8) / 1.75, rel=0.02), "silence at the end counts"
    assert rate_mbps([silent, late], RTT_S) == pytest.approx(40 * 0.4 / 1.4 + 40, rel=0.02)


def test_too_little_gives_no_rate() -> None:
    one, late = Meter(), steady(10, 100.0, 1.0)
    one.add(0.0, 1)
    assert rate_mbps([], RTT_S) is None and rate_mbps([one], RTT_S) is None
    assert rate_mbps([steady(10, 0.0, 1.0), late], RTT_S) is None, "they never ran together"


def test_a_meter_holds_a_bounded_number_of_marks_and_stays_right() -> None:
    meter, rng, total = Meter(), random.Random(1), 0
    for i in range(10 * MARKS_MAX):
        total += rng.randrange(1000, 3000)
        meter.add(i * 0.005, total)
    assert len(meter.times) <= MARKS_MAX and meter.totals[-1] == total
    assert rate_mbps([meter], RTT_S) == pytest.approx(2000 * 8e-6 / 0.005, rel=0.02)


def test_the_window_grows_with_the_path_and_has_a_limit() -> None:
    slow, fast, huge = Window(0.05), Window(0.05), Window(0.5)
    for i in range(200):
        slow.progress(i * 0.1, int(1e4 * i))
        fast.progress(i * 0.01, int(1.25e5 * i))
        huge.progress(i * 0.01, int(1e8 * i))
    assert slow.n_bytes == WINDOW_BYTES_MIN
    assert fast.n_bytes == pytest.approx(2 * 1.25e7 * 0.15, rel=0.01)
    assert huge.n_bytes == WINDOW_BYTES_MAX
    assert slow.chunk_bytes < fast.chunk_bytes < huge.chunk_bytes
