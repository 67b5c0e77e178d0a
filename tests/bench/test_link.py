"""`measure` over real sockets on loopback: what it reports, what it says when it can't, and what it leaves behind."""

from __future__ import annotations

import contextlib
import dataclasses
import threading

import pytest

import dlc.bench.flow as flow_module
import dlc.bench.link as link_module
import dlc.bench.transfer as transfer_module
from dlc.bench.link import Budget, LinkReport, StreamRates, measure
from dlc.bench.stream import MeasureFailed, Stopped, Stream
from dlc.comm.catalogue import CODES
from dlc.comm.framing import Envelope
from dlc.comm.ids import Voter
from dlc.comm.lanes import Incoming
from dlc.comm.measures import MeasureData
from dlc.comm.messages import PROTOCOL_VERSION, Hello, Message
from dlc.comm.security import LinkSecurity
from dlc.comm.transport import Transport
from dlc.comm.wire import pack, unpack
from dlc.errors import UnreachableError, UsageError, WrongKeyError
from dlc.peer import Peer
from tests.bench.sites import KEYED, OTHER, WAIT_S, patient, reached_by_polls, serving
from tests.helpers import wait_until
from tests.swarm import free_addresses, of_another_version

SMALL = Budget(400.0, 16_000_000, (1, 2))
"""It ends with its bytes, in less than a second: its time is for a machine that stands still in between."""
ENOUGH = Budget(400.0, 1_600_000_000, (1, 2))
"""The same, for a rate of each transfer of one stream."""


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> object:
    patient(monkeypatch)
    before = set(threading.enumerate())
    yield
    wait_until(lambda: set(threading.enumerate()) <= before, WAIT_S, "no thread is left")


@pytest.mark.parametrize("security", [KEYED, None], ids=["key", "no key"])
def test_a_link_is_measured_within_its_budget(security: LinkSecurity | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_module, "PACE_S_MIN", 0.001)  # a fast machine is through with these bytes in 0.15 s
    said: list[str] = []
    with serving(security) as site:
        report = measure(site.address, security, ENOUGH, say=said.append)
        assert site.bad_frames == 0
    assert report.to == site.address and report.encrypted == (security is not None)
    assert 0 < report.rtt_min_ms <= report.rtt_ms <= report.rtt_p95_ms and report.pings > 0
    assert report.rtt_min_ms < 1000
    assert [rates.n for rates in report.streams] == [1, 2]
    alone, two = report.streams
    assert alone.up_mbps and alone.up_mbps > 0 and alone.down_mbps and alone.down_mbps > 0
    # The first of two may be through before the other begins.
    assert all(rate is None or rate > 0 for rate in (two.up_mbps, two.down_mbps))
    assert (report.up_mbps, report.down_mbps) == (report.streams[0].up_mbps, report.streams[0].down_mbps)
    assert 1599 < report.moved_mb <= report.asked_mb <= 1600 and report.seconds < ENOUGH.seconds
    assert alone.bytes_ended and any("--max-mb ended" in remark for remark in report.remarks())
    assert any("2 connections down" in text for text in said)
    plain = report.to_dict()
    assert plain["streams"][1]["n"] == 2 and {"up_mbps", "down_mbps", "rtt_ms", "rtt_p95_ms"} <= plain.keys()


def test_one_after_the_other_where_two_want_the_same_site() -> None:
    said: list[str] = []
    with serving() as site:
        first, second = threading.Event(), threading.Event()
        found: list[LinkReport] = []

        def say(text: str) -> None:
            if "1 connection up" in text:
                first.set()
                second.wait(WAIT_S)

        def heard(text: str) -> None:
            said.append(text)
            if "busy" in text:
                second.set()

        thread = threading.Thread(target=lambda: found.append(measure(site.address, KEYED, SMALL, say=say)))
        thread.start()
        assert first.wait(WAIT_S)
        try:
            measure(site.address, KEYED, SMALL, say=heard)
        finally:
            second.set()
        thread.join(WAIT_S)
    assert len(found) == 1 and found[0].moved_mb > 15
    assert any("busy" in text for text in said)


def test_another_key_or_none_is_told_apart_from_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as site:
        with pytest.raises(
            WrongKeyError, match=f"{site.address} answered, but refused our key.* or leave --key-file out"
        ):
            measure(site.address, OTHER, SMALL)
        with pytest.raises(WrongKeyError, match="wants a key: add --key-file .*; or something else than that"):
            measure(site.address, None, SMALL)
    reached_by_polls(monkeypatch, 1.0)
    (nobody,) = free_addresses(1)
    with pytest.raises(UnreachableError, match="nobody listens there.*dlc bench serve"):
        measure(nobody, KEYED, SMALL)
    with pytest.raises(UnreachableError, match="cannot be looked up"):
        measure("no-such-host.invalid:4700", KEYED, SMALL)


def test_a_peer_of_a_run_is_told_from_a_site(monkeypatch: pytest.MonkeyPatch) -> None:
    reached_by_polls(monkeypatch, 3.0)
    with Peer.join(key=bytes(32)) as peer, pytest.raises(UnreachableError, match="a peer of a run, which serves no"):
        measure(peer.address, KEYED, SMALL)


@pytest.mark.parametrize("protocol", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
def test_who_meets_another_version_is_told_both(protocol: int) -> None:
    """It was told to have the same version there as here, and neither which one is here nor there."""
    said = f"answered: it speaks protocol version {protocol}, and this dlc {PROTOCOL_VERSION}"
    with of_another_version(protocol, KEYED) as address, pytest.raises(UnreachableError, match=f"{address} {said}"):
        measure(address, KEYED, SMALL)


def test_a_site_tells_who_asks_in_another_version_which_one_it_is_of() -> None:
    with serving() as site:
        asks = Transport("127.0.0.1:0", security=KEYED, ident=b"other")
        hello = pack(Envelope(PROTOCOL_VERSION + 1, bytes(8), Voter("", 1), CODES[Hello]))
        asks.send_control(site.address, [hello, b"of another shape"])
        told = list[int]()

        def heard() -> object:
            frames = [event.frames[0] for event in asks.poll(0.01) if isinstance(event, Incoming)]
            told.extend(unpack(frame, Envelope).protocol for frame in frames)
            return told

        wait_until(heard, WAIT_S)
        asks.close(0.0)
    assert told == [PROTOCOL_VERSION]


def test_a_closed_bulk_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as site:
        site._host._bulk_port = 1
        with monkeypatch.context() as hasty, pytest.raises(MeasureFailed, match="open TCP 1 in the firewall"):
            hasty.setattr(transfer_module, "STALL_S", 0.5)
            measure(site.address, KEYED, SMALL)
        site._host._bulk_port = site.bulk_port
        assert measure(site.address, KEYED, SMALL).moved_mb > 15, "the site is free again at once"


def test_a_further_connection_that_carries_nothing_is_no_closed_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Firewalls limit connections, too; and a link may be cut just then."""
    fill, stalled = Stream._fill, transfer_module.Transfer.stalled

    def first() -> bool:
        """Further connections have threads of their own."""
        return threading.current_thread() is threading.main_thread()

    def stalled_soon(self: transfer_module.Transfer, now: float) -> bool:
        return stalled(self, now if first() else now + transfer_module.STALL_S - 0.5)

    monkeypatch.setattr(Stream, "_fill", lambda self, transfer: fill(self, transfer) if first() else None)
    monkeypatch.setattr(transfer_module.Transfer, "stalled", stalled_soon)
    monkeypatch.setattr(flow_module, "PACE_S_MIN", 0.001)
    with serving() as site:
        report = measure(site.address, KEYED, ENOUGH)
    (text,) = [remark for remark in report.remarks() if "could not be told" in remark]
    assert text.startswith("2 of 4 rates could not be told: ") and report.missing == 2 and report.up_mbps
    assert "one more connection" in text and f"TCP {site.bulk_port}" in text
    assert "fewer --streams" in text and "firewall" not in text


def test_a_site_that_vanishes_in_the_middle_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as site:

        def say(text: str) -> None:
            if "1 connection up" in text:
                monkeypatch.setattr(transfer_module, "STALL_S", 0.5)
                site._host._session = None

        with pytest.raises(MeasureFailed, match="nothing came through"):
            measure(site.address, KEYED, Budget(20.0, 100_000_000_000, (1,)), say=say)


DIED = "stopped answering; is `dlc bench serve` still running there"


@pytest.mark.parametrize(
    ("moment", "measured"), [("1 connection up", 0), ("1 connection down", 1), ("2 connections up", 2)]
)
def test_a_site_that_dies_in_the_middle_is_no_closed_port_and_what_was_measured_is_told(
    monkeypatch: pytest.MonkeyPatch, moment: str, measured: int
) -> None:
    monkeypatch.setattr(flow_module, "PACE_S_MIN", 0.001)
    with contextlib.ExitStack() as living:
        site = living.enter_context(serving())

        def say(text: str) -> None:
            if moment in text:
                living.close()
                monkeypatch.setattr(transfer_module, "STALL_S", 3.0)

        if not measured:
            with pytest.raises(MeasureFailed, match=DIED):
                measure(site.address, KEYED, ENOUGH, say=say)
            return
        budget = dataclasses.replace(ENOUGH, streams=(1, 2, 4), bytes_max=2_400_000_000)
        report = measure(site.address, KEYED, budget, say=say)
    rates = [rate for r in report.streams for rate in ((r.up_mbps, r.up_missing), (r.down_mbps, r.down_missing))]
    assert [bool(rate) for rate, _ in rates] == [place < measured for place in range(6)]
    assert all(why == "" if rate else DIED in why for rate, why in rates)
    assert report.missing == 6 - measured and any(DIED in remark for remark in report.remarks())


@pytest.mark.parametrize("stood_still", [False, True])
def test_a_site_that_dies_shortly_before_the_end_is_no_measurement(
    monkeypatch: pytest.MonkeyPatch, stood_still: bool
) -> None:
    monkeypatch.setattr(link_module, "moving_s", lambda phase_s, rtt_s: 0.0 if stood_still else 0.5)
    monkeypatch.setattr(link_module, "rate_mbps", lambda meters, rtt_s: None)  # of the way up, before it dies
    if stood_still:  # when this host looks again, everything is over, and nobody has told that the site is gone
        monkeypatch.setattr(transfer_module, "DRAIN_S", 0.0)
    real = transfer_module.Transfer.receive
    with contextlib.ExitStack() as living:
        site = living.enter_context(serving())

        def receive(self: transfer_module.Transfer, message: Message, now: float) -> None:
            if not isinstance(message, MeasureData):
                real(self, message, now)
            elif not self.moved:  # what came after this one is lost with the site
                living.close()
                real(self, message, now)

        monkeypatch.setattr(transfer_module.Transfer, "receive", receive)
        with pytest.raises(MeasureFailed, match="stopped answering"):
            measure(site.address, KEYED, Budget(WAIT_S, 100_000_000_000, (1,)))


@pytest.mark.parametrize("moment", ["connecting", "round trips", "2 connections up"])
def test_it_can_be_stopped_at_any_moment(moment: str) -> None:
    stop = threading.Event()
    with serving() as site:

        def say(text: str) -> None:
            if moment in text:
                stop.set()

        with pytest.raises(Stopped):
            measure(site.address, KEYED, SMALL, say=say, stop=stop)
        assert measure(site.address, KEYED, SMALL).moved_mb > 15, "and the site is free again"


def test_an_error_of_one_stream_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    real = link_module.Stream.transfer

    def failing(self: link_module.Stream, up: bool, *rest: object) -> object:
        if not up and threading.current_thread() is not threading.main_thread():
            raise MeasureFailed("this one failed")
        return real(self, up, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(link_module.Stream, "transfer", failing)
    monkeypatch.setattr(link_module, "rate_mbps", lambda meters, rtt_s: None)  # of the way up, before it
    with serving() as site, pytest.raises(MeasureFailed, match="this one failed"):
        measure(site.address, KEYED, dataclasses.replace(SMALL, streams=(2,)))


@pytest.mark.parametrize(
    ("seconds", "n_bytes", "streams", "said"),
    [
        (0.0, 10**7, (1,), "--seconds"),
        (1e6, 10**7, (1,), "--seconds"),
        (1.0, 10, (1,), "--max-mb"),
        (1.0, 10**15, (1,), "--max-mb"),
        (1.0, 10**7, (), "--streams"),
        (1.0, 10**7, (0,), "--streams"),
        (1.0, 10**7, (1, 99), "--streams"),
    ],
)
def test_a_budget_out_of_bounds_is_refused(seconds: float, n_bytes: int, streams: tuple[int, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Budget(seconds, n_bytes, streams)


def test_the_advice_follows_the_numbers() -> None:
    def report(*rates: StreamRates) -> LinkReport:
        return LinkReport("h:1", True, 1, 1, 1, 9, rates[0].up_mbps, rates[0].down_mbps, rates, 9, 9, 9)

    assert report(StreamRates(1, 50, 50)).advice() == ""
    assert "no more than 1 connection" in report(StreamRates(1, 50, 50), StreamRates(2, 55, None)).advice()
    helped = report(StreamRates(1, 50, 50), StreamRates(2, 55, 90), StreamRates(4, 60, 150)).advice()
    assert helped.startswith("4 connections carried 3.0 times")
    shuffled = report(StreamRates(8, 90, 90), StreamRates(1, 30, None), StreamRates(2, 33, 50)).advice()
    assert shuffled.startswith("8 connections carried 3.0 times what 1 connection did")
    unmeasured = report(StreamRates(1, None, None), StreamRates(2, 50, 9), StreamRates(4, 55, 9)).advice()
    assert unmeasured == "4 connections carried no more than 2 connections."


def test_what_cannot_be_compared_gives_no_advice() -> None:
    for rates in (
        (StreamRates(1, None, None), StreamRates(2, 55, 9)),
        (StreamRates(16, None, None), StreamRates(16, None, None)),
        (StreamRates(16, 50, 50), StreamRates(16, 90, 90)),
        (StreamRates(1, 50, None), StreamRates(2, None, 90)),
    ):
        assert LinkReport("h:1", True, 1, 1, 1, 9, None, None, rates, 9, 9, 9).advice() == ""
