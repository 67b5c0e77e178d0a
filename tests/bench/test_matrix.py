"""Matrices over real sites on loopback, and how they look."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import sys
import threading
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rich.console import Console

import dlc.bench.flow as flow_module
import dlc.bench.heatmap as heatmap
import dlc.bench.host as host_module
import dlc.bench.matrix as matrix_module
import dlc.bench.serve as serve_module
import dlc.train.shelf as shelf
from dlc.bench import show
from dlc.bench.link import Budget
from dlc.bench.matrix import MatrixReport, PairReport, measure_matrix
from dlc.bench.stream import Stopped
from dlc.comm.clock import clock
from dlc.comm.lanes import Event
from dlc.comm.measures import MeasureOpen, MeasureOrder
from dlc.comm.transport import Transport
from dlc.errors import UsageError
from tests.bench.sites import KEYED, OTHER, WAIT_S, patient, reached_by_polls, serving
from tests.helpers import wait_until
from tests.swarm import free_addresses

SMALL = Budget(100.0, 400_000_000, (1,), down=False)
"""It ends with its bytes, in about a second: its time is for a machine that stands still in between."""
OPEN_S = 2.0


class Waiting(Transport):
    """Tells for how long it has waited for nothing."""

    waited_s = 0.0

    def poll(self, timeout_s: float, want_write: Collection[str] = (), bulk: bool = True) -> list[Event]:
        events = super().poll(timeout_s, want_write, bulk)
        if not events:
            Waiting.waited_s += timeout_s
        return events


def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is through with SMALL in less than 0.15 s has a rate, too."""
    monkeypatch.setattr(flow_module, "PACE_S_MIN", 0.001)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is waited for long; for the asker time passes only while nothing comes."""
    patient(monkeypatch)
    fast(monkeypatch)
    reached_by_polls(monkeypatch, OPEN_S)
    monkeypatch.setattr(matrix_module, "OPEN_S", OPEN_S)
    monkeypatch.setattr(matrix_module, "Transport", Waiting)
    monkeypatch.setattr(matrix_module, "clock", lambda: Waiting.waited_s)


def test_every_direction_is_measured_by_its_sender(soon: None) -> None:
    before = set(threading.enumerate())
    seen: list[PairReport] = []
    with serving() as a, serving() as b, serving() as c:
        sites = ("here.invalid:1", b.address, c.address)
        reach = {"here.invalid:1": a.address}
        report = measure_matrix(sites, KEYED, SMALL, reach=reach, on_pair=seen.append)
    rates = {(p.sender, p.receiver): p for p in report.pairs}
    assert set(rates) == {(x, y) for x in sites for y in sites if x != y} and seen == list(report.pairs)
    for (sender, receiver), pair in rates.items():
        if receiver == sites[0]:  # a name that only this host knows: its own error, and nobody else's
            assert pair.up_mbps is None and "here.invalid" in pair.error
        else:
            assert pair.error == "" and pair.up_mbps and pair.rtt_ms, (sender, receiver)
    assert report.failed == 2
    wait_until(lambda: set(threading.enumerate()) <= before, WAIT_S, "no thread is left")


def test_a_site_that_cannot_be_reached_costs_its_own_pairs_only(soon: None) -> None:
    with serving() as a, serving() as b, serving(OTHER) as stranger:
        (gone,) = free_addresses(1)
        sites = (a.address, b.address, gone, stranger.address)
        report = measure_matrix(sites, KEYED, SMALL, reach={})
    good = {(a.address, b.address), (b.address, a.address)}
    for pair in report.pairs:
        assert ((pair.sender, pair.receiver) in good) == (pair.up_mbps is not None)
        assert (pair.up_mbps is None) == bool(pair.error)
    said = {p.sender: p.error for p in report.pairs if p.error and p.sender not in (a.address, b.address)}
    assert "cannot be reached from here" in said[gone] and "refused our key" in said[stranger.address]
    assert report.failed == 10


def test_a_host_under_two_names_is_told_so(soon: None) -> None:
    with serving() as a:
        other = a.address.replace("127.0.0.1", "localhost")
        report = measure_matrix((a.address, other), KEYED, SMALL, reach={})
    assert [pair.up_mbps for pair in report.pairs] == [None, None]
    assert all("list it under one address" in pair.error for pair in report.pairs), report.pairs


def test_a_receiver_that_is_busy_is_named(soon: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (host_module, matrix_module):
        monkeypatch.setattr(module, "BUSY_S", OPEN_S)
    with serving() as a, serving() as b:
        b._host.receive("somebody", MeasureOpen(b"s" * 16, 600.0, 10**9), clock())
        report = measure_matrix((a.address, b.address), KEYED, SMALL, reach={})
    assert f"{b.address} was busy with other measurements" in report.pairs[0].error


def test_two_matrices_at_once_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """One asks a to measure the way to b, and the other one b the way to a."""
    patient(monkeypatch)
    fast(monkeypatch)
    monkeypatch.setattr(serve_module, "GIVE_WAY_S", 0.3)
    with serving() as a, serving() as b, ThreadPoolExecutor(2) as pool:
        both = [(a.address, b.address), (b.address, a.address)]
        found = [pool.submit(measure_matrix, sites, KEYED, SMALL, reach={}) for sites in both]
        assert [pair.error for report in found for pair in report.result(WAIT_S).pairs] == [""] * 4


def test_too_few_bytes_are_the_reason_of_a_pair_without_a_rate(soon: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_module, "GROWTH", 0.0)  # no rate settles, however long a machine takes for these bytes
    with serving() as a, serving() as b:
        report = measure_matrix((a.address, b.address), KEYED, Budget(100.0, 1_000_000, (1,), down=False), reach={})
    assert report.failed == 2 and all("give --max-mb " in pair.error and pair.rtt_ms for pair in report.pairs)
    assert not any("streams" in pair.error for pair in report.pairs), "a matrix has no such option"


def test_an_order_whose_asker_is_gone_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as a, serving() as b:
        asker = matrix_module._Asker(KEYED, {}, threading.Event())
        order = MeasureOrder(b"o" * 16, b.address, 60.0, 10**11)
        asker._transport.send_control(a.address, matrix_module.encode(asker._me, matrix_module.TAG, order))
        asker._transport.poll(0.1)
        wait_until(lambda: asker._transport.poll(0.05) is not None and a._host.busy, WAIT_S, "it has begun")
        asker.close()
        monkeypatch.setattr("dlc.bench.host.IDLE_S", 0.3)
        wait_until(lambda: not a._host.busy, WAIT_S, "a gives it up")
        wait_until(lambda: not b._host.busy, WAIT_S, "b is free too")


REPORT = MatrixReport(
    ("a:1", "b:1"),
    True,
    (PairReport("a:1", "b:1", 123.456789, 20.0, ""), PairReport("b:1", "a:1", None, None, "[red]b:1 is not there")),
    3.0,
)


def test_names_of_the_json_document() -> None:
    plain = json.loads(json.dumps(REPORT.to_dict()))
    assert plain["sites"] == ["a:1", "b:1"] and plain["seconds"] == 3.0 and plain["encrypted"] is True
    assert plain["pairs"][0] == {"from": "a:1", "to": "b:1", "up_mbps": 123.457, "rtt_ms": 20.0, "error": ""}
    assert plain["pairs"][1]["up_mbps"] is None


def test_the_table_shows_rates_and_errors_and_no_markup_of_others() -> None:
    out = io.StringIO()
    show.matrix(REPORT, Console(file=out, width=80))
    text = out.getvalue()
    assert "123 (20.0)" in text and "[red]b:1 is not there" in text and "A  a:1" in text


def shown(report: MatrixReport, width: int = 80) -> str:
    out = io.StringIO()
    show.matrix(report, Console(file=out, width=width))
    return out.getvalue()


@pytest.mark.parametrize("width", [30, 80, 200])
@pytest.mark.parametrize("n", [2, 3, 4, 6, 8, 12, 20, 30])
def test_no_number_is_cut_off_however_many_sites_there_are(n: int, width: int) -> None:
    sites = tuple(f"site-{i}.example.org:4700" for i in range(n))
    ways = [(a, b) for a in sites for b in sites if a != b]
    pairs = tuple(PairReport(a, b, 12345.0 + i, 1000.5 + i, "") for i, (a, b) in enumerate(ways))
    text = shown(MatrixReport(sites, True, pairs, 3.0), width)
    assert "…" not in text
    for i, (a, b) in enumerate(ways):
        assert f"{12345 + i}" in text and f"{1000.5 + i:.1f}" in text
        assert a in text and b in text
    lines = text.splitlines()
    assert all(len(line) <= width or f"{ways[0][0]} to" in text for line in lines)


def test_what_does_not_fit_is_left_out_one_by_one() -> None:
    def of(n: int) -> str:
        sites = tuple(f"host{i}:4700" for i in range(n))
        pairs = tuple(PairReport(a, b, 123.0, 20.0, "") for a in sites for b in sites if a != b)
        return shown(MatrixReport(sites, True, pairs, 3.0))

    assert "A  host0:4700  " in of(3) and "Mbit/s (round trip, ms)" in of(3)
    assert "Mbit/s (ms)" in of(5) and "\nA  host0:4700\n" in of(5) and "123 (20.0)" in of(5)
    assert "\nms " in of(8) and "\nA  host0:4700\n" in of(8) and "(20.0)" not in of(8)
    assert "host0:4700 to host13:4700: 123 Mbit/s, 20.0 ms" in of(14)


def test_an_error_tells_who_measured_to_whom_and_an_address_is_no_markup() -> None:
    sites = ("[fe80::1]:1", "b:1", "c:1")
    pairs = tuple(PairReport(a, b, None, None, "no way") for a in sites for b in sites if a != b)
    text = shown(MatrixReport(sites, True, pairs, 3.0))
    assert "A  [fe80::1]:1" in text
    assert "[fe80::1]:1 to b:1, c:1: no way\nb:1 to [fe80::1]:1, c:1: no way\n" in text


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the heat map needs the extra `plots`")
    heatmap.check(tmp_path / "m.png")
    assert not os.listdir(tmp_path)
    heatmap.draw(REPORT, tmp_path / "m.png")
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_written_is_refused_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder that takes no file though its permissions let root write was found out when all was measured."""
    monkeypatch.setattr(heatmap.importlib.util, "find_spec", lambda name: "there")
    monkeypatch.setattr(heatmap.os, "access", lambda path, mode: False)
    (tmp_path / "old.png").touch()
    with pytest.raises(UsageError, match=r"old.png cannot be written by this user"):
        heatmap.check(tmp_path / "old.png")

    def refuse(dir: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(dir / "x"))

    monkeypatch.setattr(shelf.tempfile, "TemporaryFile", refuse)
    told = f"--png {tmp_path / 'new.png'} cannot be written: nothing can be made in {tmp_path} (Read-only file system)"
    with pytest.raises(UsageError, match=re.escape(told)):
        heatmap.check(tmp_path / "new.png")
    monkeypatch.setattr(heatmap.os, "access", lambda path, mode: True)
    heatmap.check(tmp_path / "old.png")  # its folder takes no new file, and it is written in place
    told = f"there is no folder {tmp_path / 'nowhere'}; make it, or name another file"
    with pytest.raises(UsageError, match=re.escape(told)):
        heatmap.check(tmp_path / "nowhere" / "m.png")
    assert os.listdir(tmp_path) == ["old.png"]


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(heatmap.importlib.util, "find_spec", lambda name: "there")
    with pytest.raises(UsageError, match="png"):
        heatmap.check(tmp_path / "m.jpg")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(UsageError, match="folder.png is a folder"):
        heatmap.check(tmp_path / "folder.png")
    monkeypatch.setattr(heatmap.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"dlc\[plots\]"):
        heatmap.check(tmp_path / "m.png")


def test_a_matplotlib_that_cannot_be_loaded_is_told_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(heatmap.importlib.util, "find_spec", lambda name: "there")
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(UsageError, match=r"matplotlib cannot be loaded here .*install it anew"):
        heatmap.check(tmp_path / "m.png")


def test_a_matrix_that_is_stopped_ends_in_the_middle() -> None:
    stop = threading.Event()
    nobody = ("127.0.0.1:1", "127.0.0.1:2")
    with pytest.raises(Stopped):
        measure_matrix(nobody, KEYED, SMALL, reach={}, say=lambda text: stop.set(), stop=stop)
