"""Reports of `dlc bench` as tables for people; all fit 80 columns, but a matrix of many sites."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from dlc.bench.link import LinkReport
from dlc.bench.matrix import MatrixReport

if TYPE_CHECKING:  # these need torch
    from dlc.bench.allreduce import AllReduceReport
    from dlc.bench.codec import CodecReport


def link(report: LinkReport, console: Console) -> None:
    safety = "encrypted" if report.encrypted else "not encrypted"
    console.print(
        f"to {report.to} ({safety}): round trip {report.rtt_ms:.1f} ms, least {report.rtt_min_ms:.1f}, "
        f"95 % within {report.rtt_p95_ms:.1f} ({report.pings} pings)",
        highlight=False,
        soft_wrap=True,
    )
    table = _table("connections", "up Mbit/s", "down Mbit/s")
    for rates in report.streams:
        table.add_row(str(rates.n), rate(rates.up_mbps), rate(rates.down_mbps))
    console.print(table)
    if report.advice():
        console.print(report.advice(), highlight=False, soft_wrap=True)
    console.print(f"moved {report.moved_mb:.0f} MB in {report.seconds:.1f} s", highlight=False, soft_wrap=True)


def matrix(report: MatrixReport, console: Console) -> None:
    """Rows send, columns receive; errors below, one line each."""
    found = {(pair.sender, pair.receiver): pair for pair in report.pairs}
    names = {site: chr(ord("A") + i) if len(report.sites) <= 26 else str(i + 1) for i, site in enumerate(report.sites)}
    table = _table("Mbit/s (round trip, ms)", *(f"to {names[site]}" for site in report.sites))
    for sender in report.sites:
        cells = []
        for receiver in report.sites:
            pair = found.get((sender, receiver))
            ms = "" if pair is None or pair.rtt_ms is None else f" ({pair.rtt_ms:.1f})"
            cells.append("" if pair is None else f"{rate(pair.up_mbps)}{ms}")
        table.add_row(f"{names[sender]}  {sender}", *cells)
    console.print(table)
    for error in dict.fromkeys(pair.error for pair in report.pairs if pair.error):
        console.print(error, markup=False, highlight=False, soft_wrap=True)
    console.print(f"{len(report.pairs)} directions in {report.seconds:.1f} s", highlight=False, soft_wrap=True)


def allreduce(report: AllReduceReport, console: Console) -> None:
    n = len(report.seconds)
    console.print(
        f"{report.n_peers} peers, {report.mb:g} MB of fp32 each, as {report.codec}: median "
        f"{report.seconds_median:.3f} s, least {report.seconds_min:.3f} s of {n} rounds; "
        f"{report.effective_mbps:.0f} Mbit/s each way per peer",
        highlight=False,
        soft_wrap=True,
    )
    if report.limit_s is not None and report.limit_share is not None:
        console.print(
            f"limit of the links: {report.limit_s:.3f} s ({report.limited_by}); "
            f"{report.limit_share:.0%} of what they allow was reached",
            highlight=False,
            soft_wrap=True,
        )
    if report.incomplete_rounds:
        console.print(
            f"{report.incomplete_rounds} rounds lacked a peer or did not come about, and are in no figure",
            highlight=False,
            soft_wrap=True,
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
        console.print(note, highlight=False, soft_wrap=True)


def rate(mbps: float | None) -> str:
    """Three digits that mean something; a dash where nothing was measured."""
    if mbps is None:
        return "-"
    return f"{mbps:.0f}" if mbps >= 100 else f"{mbps:.1f}" if mbps >= 10 else f"{mbps:.2f}"


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table
