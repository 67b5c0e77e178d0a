"""Reports of `dlc bench` as tables for people; all fit 80 columns, but the lines of a matrix of many sites."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dlc.bench.link import LinkReport
from dlc.bench.matrix import MatrixReport, PairReport

if TYPE_CHECKING:  # these need torch
    from dlc.bench.allreduce import AllReduceReport
    from dlc.bench.codec import CodecReport

GAP = 2
"""Columns of a terminal between those of a table."""
LETTERS = 26


def link(report: LinkReport, console: Console) -> None:
    safety = "encrypted" if report.encrypted else "not encrypted"
    _say(
        console,
        f"to {report.to} ({safety}): round trip {report.rtt_ms:.1f} ms, least {report.rtt_min_ms:.1f}, "
        f"95 % within {report.rtt_p95_ms:.1f} ({report.pings} pings)",
    )
    table = _table("connections", "up Mbit/s", "down Mbit/s")
    for rates in report.streams:
        table.add_row(str(rates.n), rate(rates.up_mbps), rate(rates.down_mbps))
    console.print(table)
    if report.advice():
        _say(console, report.advice())
    _say(console, f"moved {report.moved_mb:.0f} MB in {report.seconds:.1f} s")


def matrix(report: MatrixReport, console: Console) -> None:
    """Rows send, columns receive; errors below, one line for each sender and error.

    Nothing is cut off: what does not fit with addresses is shown with letters alone, then with round trips in a table
    of their own, and at last with a line for each direction.
    """
    for layout in (_addressed, _lettered, _apart):
        tables, legend = layout(report)
        if all(table.width <= console.width for table in tables):
            for table in tables:
                console.print(table.build())
            for line in legend:
                _say(console, line)
            break
    else:
        for pair in report.pairs:
            ms = "" if pair.rtt_ms is None else f", {pair.rtt_ms:.1f} ms"
            _say(console, f"{pair.sender} to {pair.receiver}: {rate(pair.up_mbps)} Mbit/s{ms}")
    errors: dict[tuple[str, str], list[str]] = {}
    for pair in report.pairs:
        if pair.error:
            errors.setdefault((pair.sender, pair.error), []).append(pair.receiver)
    for (sender, error), receivers in errors.items():
        _say(console, f"{sender} to {', '.join(receivers)}: {error}")
    _say(console, f"{len(report.pairs)} directions in {report.seconds:.1f} s")


@dataclass(frozen=True)
class _Grid:
    """A table whose width is known before it is printed."""

    rows: Sequence[Sequence[str]]
    """The first is the head."""

    @property
    def width(self) -> int:
        columns = zip(*self.rows, strict=True)
        return sum(max(map(cell_len, column)) + GAP for column in columns) - GAP

    def build(self) -> Table:
        head, *rows = self.rows
        table = _table(*head)
        for row in rows:
            table.add_row(*map(Text, row))
        return table


_Layout = tuple[list[_Grid], list[str]]
"""Tables, and the lines of a legend below them."""


def _addressed(report: MatrixReport) -> _Layout:
    names = _names(report.sites)
    labels = [f"{names[site]}  {site}" for site in report.sites]
    return [_grid(report, "Mbit/s (round trip, ms)", labels, _both)], []


def _lettered(report: MatrixReport) -> _Layout:
    names = _names(report.sites)
    grid = _grid(report, "Mbit/s (ms)", list(names.values()), _both)
    return [grid], [f"{name}  {site}" for site, name in names.items()]


def _apart(report: MatrixReport) -> _Layout:
    names = _names(report.sites)
    letters = list(names.values())
    rates = _grid(report, "Mbit/s", letters, lambda pair: rate(pair.up_mbps))
    round_trips = _grid(report, "ms", letters, lambda pair: "-" if pair.rtt_ms is None else f"{pair.rtt_ms:.1f}")
    return [rates, round_trips], [f"{name}  {site}" for site, name in names.items()]


def _names(sites: Sequence[str]) -> dict[str, str]:
    return {site: chr(ord("A") + i) if len(sites) <= LETTERS else str(i + 1) for i, site in enumerate(sites)}


def _grid(report: MatrixReport, title: str, labels: Sequence[str], cell: Callable[[PairReport], str]) -> _Grid:
    found = {(pair.sender, pair.receiver): pair for pair in report.pairs}
    rows = [[title, *(f"to {name}" for name in _names(report.sites).values())]]
    for label, sender in zip(labels, report.sites, strict=True):
        pairs = (found.get((sender, receiver)) for receiver in report.sites)
        rows.append([label, *("" if pair is None else cell(pair) for pair in pairs)])
    return _Grid(rows)


def _both(pair: PairReport) -> str:
    return rate(pair.up_mbps) + ("" if pair.rtt_ms is None else f" ({pair.rtt_ms:.1f})")


def allreduce(report: AllReduceReport, console: Console) -> None:
    n = len(report.seconds)
    _say(
        console,
        f"{report.n_peers} peers, {report.mb:g} MB of fp32 each, as {report.codec}: median "
        f"{report.seconds_median:.3f} s, least {report.seconds_min:.3f} s of {n} rounds; "
        f"{report.effective_mbps:.0f} Mbit/s each way per peer",
    )
    if report.limit_s is not None and report.limit_share is not None:
        _say(
            console,
            f"limit of the links: {report.limit_s:.3f} s ({report.limited_by}); "
            f"{report.limit_share:.0%} of what they allow was reached",
        )
    if report.incomplete_rounds:
        _say(
            console,
            f"{report.incomplete_rounds} rounds lacked a peer or did not come about, and are in no figure",
        )
    table = _table("peer", "waiting s", "reducing s", "rest s", "sent MB", "received MB")
    for peer in report.peers:
        times = (f"{s:.3f}" for s in (peer.waiting_s, peer.reduce_s, peer.rest_s))
        table.add_row(peer.peer[:8], *times, f"{peer.sent_mb:.1f}", f"{peer.received_mb:.1f}")
    console.print(table)


def codecs(reports: Sequence[CodecReport], note: str, console: Console) -> None:
    table = _table("codec", "device", "encode GB/s", "decode GB/s", "bytes", "rms error", "max error")
    for r in reports:
        speeds = (f"{r.encode_gb_per_s:.2f}", f"{r.decode_gb_per_s:.2f}", f"{r.wire_share:.0%}")
        table.add_row(r.codec, r.device, *speeds, f"{r.rms_relative_error:.1e}", f"{r.max_relative_error:.1e}")
    console.print(table)
    if note:
        _say(console, note)


def rate(mbps: float | None) -> str:
    """Three digits that mean something; a dash where nothing was measured."""
    if mbps is None:
        return "-"
    return f"{mbps:.0f}" if mbps >= 100 else f"{mbps:.1f}" if mbps >= 10 else f"{mbps:.2f}"


def _say(console: Console, text: str) -> None:
    """A line as it is: an address of IPv6 is no markup."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False)
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table
