"""The serving machine, as transcripts: one measurement at a time, and limits on all that a client can ask for."""

from __future__ import annotations

import pytest

from dlc.bench.host import Abandon, Begin, Host, HostEffect, Reply
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
from dlc.comm.window import CHUNK_BYTES_MAX
from dlc.errors import ProtocolError

BLOCK = memoryview(bytes(CHUNK_BYTES_MAX))
ONE, TWO = b"1" * 16, b"2" * 16


@pytest.fixture
def host() -> Host:
    return Host(4701, BLOCK)


def answer(effects: list[HostEffect]) -> object:
    (reply,) = (e for e in effects if isinstance(e, Reply))
    return reply.message


def opened(host: Host, session: bytes = ONE, seconds: float = 10.0, n_bytes: int = 10**6, now: float = 0.0) -> object:
    return answer(host.receive("c", MeasureOpen(session, seconds, n_bytes), now))


def test_a_session_pings_counts_sends_and_ends(host: Host) -> None:
    assert opened(host) == MeasureAnswer(ONE, "", 0.0, 4701) and host.busy
    assert answer(host.receive("c", MeasurePing(ONE, 7), 0.1)) == MeasurePong(ONE, 7)
    host.receive("b", MeasurePush(ONE, payload=bytes(300)), 0.2)
    host.receive("b", MeasurePush(ONE, payload=bytes(200)), 0.3)
    assert host.waiting() == ["b"]
    assert host.next_bulk("b") == MeasureCount(ONE, 500, 0.3), "one count for both"
    host.sent("b")
    assert host.waiting() == [] and host.next_bulk("b") is None
    host.receive("d", MeasurePull(ONE, 40), 0.4)
    host.receive("d", MeasurePull(ONE, 50), 0.4)
    sizes = []
    while isinstance(data := host.next_bulk("d"), MeasureData):
        assert host.next_bulk("d") == data, "it stays until it is sent"
        host.sent("d")
        sizes.append(len(data.payload))
    assert sizes == [40, 50]
    assert host.receive("c", MeasureClose(ONE), 0.5) == [] and not host.busy and host.waiting() == []


def test_one_at_a_time_and_the_other_is_told_how_long(host: Host) -> None:
    opened(host, seconds=10.0)
    told = opened(host, TWO, now=4.0)
    assert isinstance(told, MeasureAnswer) and told.wait_s == pytest.approx(6 + SLACK_S) and not told.refusal
    assert host.receive("x", MeasurePing(TWO, 1), 4.0) == [], "the other one is not served"
    host.receive("x", MeasurePull(TWO, 100), 4.0)
    host.receive("x", MeasureClose(TWO), 4.0)
    assert host.busy and host.waiting() == []
    assert opened(host, now=5.0) == MeasureAnswer(ONE, "", 0.0, 4701), "the first may repeat itself"
    host.receive("c", MeasureClose(ONE), 5.0)
    assert opened(host, TWO, now=5.0) == MeasureAnswer(TWO, "", 0.0, 4701)


def test_a_session_ends_by_silence_or_by_its_time(host: Host) -> None:
    opened(host, seconds=1.0)
    assert host.next_deadline() == IDLE_S
    host.tick(IDLE_S - 0.1)
    assert host.busy
    host.tick(IDLE_S)
    assert not host.busy and host.next_deadline() is None
    opened(host, seconds=1.0, now=100.0)
    for i in range(int(1 + SLACK_S)):
        host.receive("c", MeasurePing(ONE, i), 100.0 + i)
    assert host.busy
    host.receive("c", MeasurePing(ONE, 99), 101.0 + SLACK_S)
    assert not host.busy, "talking on does not help"


@pytest.mark.parametrize(
    ("seconds", "n_bytes"), [(SECONDS_MAX + 1, 1), (0.0, 1), (-1.0, 1), (1.0, BYTES_MAX + 1), (1.0, 0)]
)
def test_too_much_is_refused_with_the_limit(host: Host, seconds: float, n_bytes: int) -> None:
    told = opened(host, seconds=seconds, n_bytes=n_bytes)
    assert isinstance(told, MeasureAnswer) and "up to" in told.refusal and not host.busy
    effects = host.receive("c", MeasureOrder(TWO, "h:1", seconds, n_bytes), 0.0)
    outcome = answer(effects)
    assert isinstance(outcome, MeasureOutcome) and "up to" in outcome.error and len(effects) == 1 and not host.busy


def test_more_bytes_than_announced_end_the_session(host: Host) -> None:
    opened(host, n_bytes=1000)
    host.receive("b", MeasurePush(ONE, payload=bytes(600)), 0.0)
    host.receive("b", MeasurePull(ONE, 400), 0.0)
    with pytest.raises(ProtocolError, match="more bytes"):
        host.receive("b", MeasurePull(ONE, 1), 0.0)
    assert not host.busy and host.waiting() == []


def test_connections_waiting_chunks_and_sizes_have_limits(host: Host) -> None:
    opened(host, n_bytes=BYTES_MAX)
    for i in [0, *range(STREAMS_MAX), 0]:
        host.receive(i, MeasurePull(ONE, 1), 0.0)
    host.receive("one more", MeasurePull(ONE, 1), 0.0)
    assert sorted(map(str, host.waiting())) == sorted(map(str, [0, *range(2, STREAMS_MAX), "one more"]))
    for size in (0, -1, CHUNK_BYTES_MAX + 1):
        with pytest.raises(ProtocolError, match="chunk"):
            host.receive(0, MeasurePull(ONE, size), 0.0)
    for _ in range(PULLS_MAX - 3):
        host.receive(0, MeasurePull(ONE, 1), 0.0)
    with pytest.raises(ProtocolError, match="wait already"):
        host.receive(0, MeasurePull(ONE, 1), 0.0)


def test_an_order_runs_once_is_asked_for_again_and_its_outcome_is_kept_for_a_while(host: Host) -> None:
    order = MeasureOrder(ONE, "far:4700", 5.0, 10**6)
    running = MeasureOutcome(ONE, True, "", 0.0, None, None)
    assert host.receive("c", order, 0.0) == [Begin(order), Reply(running)]
    assert host.receive("c", order, 1.0) == [Reply(running)], "it is not begun twice"
    told = opened(host, TWO, now=1.0)
    assert isinstance(told, MeasureAnswer) and told.wait_s > 0
    other = answer(host.receive("x", MeasureOrder(TWO, "far:4700", 5.0, 10**6), 1.0))
    assert isinstance(other, MeasureOutcome) and other.wait_s > 0 and not other.running
    host.finished("", 93.5, 20.0, 6.0)
    assert not host.busy
    assert host.receive("c", order, 6.5) == [Reply(MeasureOutcome(ONE, False, "", 0.0, 93.5, 20.0))]
    host.tick(6.5 + OUTCOME_KEEP_S)
    assert host.receive("c", order, 7.0 + OUTCOME_KEEP_S)[0] == Begin(order), "forgotten"


def test_an_outcome_waits_for_its_asker_though_another_order_comes_first(host: Host) -> None:
    """Of two clients at once, one had its way measured anew, as the other's order took the place of the outcome."""
    orders = [MeasureOrder(i.to_bytes(16, "big"), f"far{i}:4700", 5.0, 10**6) for i in range(OUTCOMES_MAX + 2)]

    def measured(i: int, now: float) -> MeasureOutcome:
        assert Begin(orders[i]) in host.receive("c", orders[i], now)
        host.finished("", 1.0 + i, 20.0, now)
        return MeasureOutcome(orders[i].order, False, "", 0.0, 1.0 + i, 20.0)

    first, second = measured(0, 0.0), measured(1, 1.0)
    for order, outcome in ((orders[0], first), (orders[1], second), (orders[0], first)):
        assert host.receive("c", order, 2.0) == [Reply(outcome)]
    assert not host.busy
    assert host.receive("c", orders[0], 1.9 + OUTCOME_KEEP_S) == [Reply(first)], "asked for again"
    host.tick(2.0 + 2 * OUTCOME_KEEP_S)
    assert measured(0, 2.0 + 2 * OUTCOME_KEEP_S) == first, "forgotten"
    measured(1, 2.5 * OUTCOME_KEEP_S)
    assert measured(0, 3.2 * OUTCOME_KEEP_S) == first, "so long after it was asked for, and not after the other's order"
    now = 3.5 * OUTCOME_KEEP_S
    for i in range(1, OUTCOMES_MAX + 2):
        measured(i, now)
    assert Begin(orders[0]) in host.receive("c", orders[0], now), "forgotten for the many others"


def test_an_order_that_nobody_asks_for_any_more_is_abandoned_once(host: Host) -> None:
    host.receive("c", MeasureOrder(ONE, "far:4700", 5.0, 10**6), 0.0)
    assert host.tick(IDLE_S - 0.1) == []
    assert host.tick(IDLE_S) == [Abandon()]
    assert host.tick(IDLE_S + 1) == [] and host.busy, "until it has really ended"
    host.finished("the measurement was stopped", None, None, IDLE_S + 2)
    assert not host.busy


def test_an_order_has_time_to_wait_for_a_busy_site_and_says_what_took_too_long(host: Host) -> None:
    order, end = MeasureOrder(ONE, "far:4700", 5.0, 10**6), int(BUSY_S + 5 + SLACK_S)
    effects = [effect for now in range(end) for effect in host.receive("c", order, float(now))]
    assert Abandon() not in effects, "a site that is busy for BUSY_S, and the measurement after that"
    assert host.tick(float(end)) == [Abandon()]
    host.finished("the measurement was stopped", None, None, end + 0.5)
    outcome = answer(host.receive("c", order, end + 1.0))
    assert isinstance(outcome, MeasureOutcome)
    assert outcome.error == "the way to far:4700 was not measured: it took over 95 s"


def test_an_order_to_measure_the_way_to_oneself_is_refused_at_once(host: Host) -> None:
    host.receive("c", MeasureOrder(ONE, "myself:4700", 5.0, 10**6), 0.0)
    told = opened(host, ONE, now=0.1)
    assert isinstance(told, MeasureAnswer) and "is to measure the way" in told.refusal
    other = opened(host, TWO, now=0.1)
    assert isinstance(other, MeasureAnswer) and not other.refusal and other.wait_s > 0, "others wait"
    host.finished(told.refusal, None, None, 0.2)
    assert opened(host, ONE, now=0.3) == MeasureAnswer(ONE, "", 0.0, 4701)


def test_an_order_waits_while_a_session_is_open(host: Host) -> None:
    opened(host)
    outcome = answer(host.receive("c", MeasureOrder(TWO, "far:4700", 5.0, 10**6), 1.0))
    assert isinstance(outcome, MeasureOutcome) and outcome.wait_s > 0 and not outcome.running and not outcome.error


def test_an_order_that_waits_for_a_busy_site_lets_others_measure_now_and_then(host: Host) -> None:
    """That site may be waiting for us: two of them would wait for each other until both give up."""
    order = MeasureOrder(TWO, "h:1", 10.0, 10**6)
    assert Begin(order) in host.receive("c", order, 0.0)
    told = opened(host, now=1.0)
    assert isinstance(told, MeasureAnswer) and told.wait_s > 0
    host.give_way(4.0)
    other = answer(host.receive("d", MeasureOrder(b"3" * 16, "i:1", 10.0, 10**6), 4.0))
    assert isinstance(other, MeasureOutcome) and other.wait_s > 0, "another order is none of those"
    assert host.next_deadline() == 4.0 + YIELD_S and opened(host, now=4.1) == MeasureAnswer(ONE, "", 0.0, 4701)
    assert host.receive("c", order, 4.0 + 2 * YIELD_S)[-1] == Reply(MeasureOutcome(TWO, True, "", 0.0, None, None))
    assert host.receive("c", MeasureClose(ONE), 9.0) == [] and host.tick(9.0) == [Begin(order)]
    told = opened(host, now=9.0 + YIELD_S)
    assert isinstance(told, MeasureAnswer) and told.wait_s > 0
    for at in range(10, int(BUSY_S) + 1, 10):
        host.receive("c", order, float(at))
    host.give_way(BUSY_S)
    outcome = answer(host.receive("c", order, BUSY_S))
    assert isinstance(outcome, MeasureOutcome) and outcome.error.startswith(
        "h:1 was busy with other measurements for 60 s"
    )
    assert not host.busy


def test_an_order_that_gives_way_ends_where_nobody_asks_for_it(host: Host) -> None:
    order = MeasureOrder(TWO, "h:1", 10.0, 10**6)
    host.receive("c", order, 0.0)
    host.give_way(4.0)
    opened(host, now=4.1, seconds=100.0)
    for at in range(5, 12):
        host.receive("c", MeasurePing(ONE, at), float(at))
    assert host.tick(IDLE_S) == []
    outcome = answer(host.receive("c", order, IDLE_S))
    assert isinstance(outcome, MeasureOutcome) and not outcome.running and "nobody asked for it" in outcome.error
