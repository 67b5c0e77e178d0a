"""`measure` over real sockets on loopback: what it reports, what it says when it can't, and what it leaves behind."""

from __future__ import annotations

import threading

import pytest

import dlc.bench.link as link_module
import dlc.bench.stream as stream_module
import dlc.bench.transfer as transfer_module
from dlc.bench.link import Budget, LinkReport, StreamRates, measure
from dlc.bench.stream import MeasureFailed, Stopped
from dlc.comm.security import LinkSecurity
from dlc.errors import UnreachableError, UsageError, WrongKeyError
from dlc.peer import Peer
from tests.bench.sites import KEYED, OTHER, serving

SMALL = Budget(2.0, 16_000_000, (1, 2))


@pytest.fixture(autouse=True)
def nothing_is_left() -> object:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("security", [KEYED, None], ids=["key", "no key"])
def test_a_link_is_measured_within_its_budget(security: LinkSecurity | None) -> None:
    said: list[str] = []
    with serving(security) as site:
        report = measure(site.address, security, SMALL, say=said.append)
        assert site.bad_frames == 0
    assert report.to == site.address and report.encrypted == (security is not None)
    assert 0 < report.rtt_min_ms <= report.rtt_ms <= report.rtt_p95_ms < 1000 and report.pings > 0
    assert [rates.n for rates in report.streams] == [1, 2]
    for rates in report.streams:
        assert rates.up_mbps is not None and rates.up_mbps > 1
        assert rates.down_mbps is not None and rates.down_mbps > 1
    assert (report.up_mbps, report.down_mbps) == (report.streams[0].up_mbps, report.streams[0].down_mbps)
    assert 15.9 < report.moved_mb <= 16.0 and report.seconds < 10
    assert any("2 connections down" in text for text in said)
    plain = report.to_dict()
    assert plain["streams"][1]["n"] == 2 and {"up_mbps", "down_mbps", "rtt_ms", "rtt_p95_ms"} <= plain.keys()


def test_one_after_the_other_where_two_want_the_same_site() -> None:
    said: list[str] = []
    with serving() as site:
        first = threading.Event()
        found: list[LinkReport] = []

        def say(text: str) -> None:
            if "1 connection up" in text:
                first.set()

        budget = Budget(1.0, 100_000_000_000, (1,))
        thread = threading.Thread(target=lambda: found.append(measure(site.address, KEYED, budget, say=say)))
        thread.start()
        assert first.wait(20)
        measure(site.address, KEYED, SMALL, say=said.append)
        thread.join(20)
    assert len(found) == 1 and found[0].up_mbps is not None
    assert any("busy" in text for text in said)


def test_another_key_or_none_is_told_apart_from_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as site:
        with pytest.raises(WrongKeyError, match=f"{site.address} answered, but refused our key"):
            measure(site.address, OTHER, SMALL)
        with pytest.raises(WrongKeyError, match="wants a key: add --key-file"):
            measure(site.address, None, SMALL)
    monkeypatch.setattr(stream_module, "OPEN_S", 0.5)
    with pytest.raises(UnreachableError, match="nobody listens there.*dlc bench serve"):
        measure(site.address, KEYED, SMALL)
    with pytest.raises(UnreachableError, match="cannot be looked up"):
        measure("no-such-host.invalid:4700", KEYED, SMALL)


def test_a_peer_of_a_run_is_told_from_a_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "OPEN_S", 2.0)
    with Peer.join(key=bytes(32)) as peer, pytest.raises(UnreachableError, match="a peer of a run does not serve"):
        measure(peer.address, KEYED, SMALL)


def test_a_closed_bulk_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_module, "STALL_S", 0.5)
    with serving() as site:
        site._host._bulk_port = 1
        with pytest.raises(MeasureFailed, match="open TCP 1 in the firewall"):
            measure(site.address, KEYED, SMALL)
        site._host._bulk_port = site.bulk_port
        assert measure(site.address, KEYED, SMALL).up_mbps, "the site is free again at once"


def test_a_site_that_vanishes_in_the_middle_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_module, "STALL_S", 0.5)
    with serving() as site:

        def say(text: str) -> None:
            if "1 connection up" in text:
                site._host._session = None

        with pytest.raises(MeasureFailed, match="nothing came through"):
            measure(site.address, KEYED, Budget(20.0, 100_000_000_000, (1,)), say=say)


@pytest.mark.parametrize("moment", ["connecting", "round trips", "2 connections up"])
def test_it_can_be_stopped_at_any_moment(moment: str) -> None:
    stop = threading.Event()
    with serving() as site:

        def say(text: str) -> None:
            if moment in text:
                stop.set()

        with pytest.raises(Stopped):
            measure(site.address, KEYED, SMALL, say=say, stop=stop)
        assert measure(site.address, KEYED, SMALL).up_mbps, "and the site is free again"


def test_an_error_of_one_stream_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    real = link_module.Stream.transfer

    def failing(self: link_module.Stream, up: bool, *rest: object) -> object:
        if not up and threading.current_thread() is not threading.main_thread():
            raise MeasureFailed("this one failed")
        return real(self, up, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(link_module.Stream, "transfer", failing)
    with serving() as site, pytest.raises(MeasureFailed, match="this one failed"):
        measure(site.address, KEYED, SMALL)


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
        return LinkReport("h:1", True, 1, 1, 1, 9, rates[0].up_mbps, rates[0].down_mbps, rates, 9, 9)

    assert report(StreamRates(1, 50, 50)).advice() == ""
    assert "no more than 1 connection" in report(StreamRates(1, 50, 50), StreamRates(2, 55, None)).advice()
    helped = report(StreamRates(1, 50, 50), StreamRates(2, 55, 90), StreamRates(4, 60, 150)).advice()
    assert helped.startswith("4 connections carried 3.0 times")
    assert "no more" in report(StreamRates(1, None, None), StreamRates(2, 55, 9)).advice()
