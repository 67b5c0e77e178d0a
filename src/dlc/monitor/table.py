"""What is known of each peer, from its events alone, and how it is shown.

    event ──> Board.apply ──> PeerRow ──> table(board)    a rich table, for a terminal
                                     └──> lines(board)    one plain line per peer, for a log

A board holds what a reader wants to see now; who wants the history keeps the events. Events are those of
`dlc join --json`; unknown ones, and missing fields, change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from dlc.monitor.news import news
from dlc.report import Missing, RoundReport, Share

STYLES = {
    "training": "green",
    "reducing": "cyan",
    "waiting": "yellow",
    "overlapping": "green",
    "sitting out": "yellow",
    "syncing": "yellow",
    "joining": "yellow",
    "starting": "dim",
    "done": "bold green",
    "killed": "bold red",
    "failed": "bold red",
}
"""Colours of states; others have none."""


@dataclass
class PeerRow:
    """One peer, as its last events tell it."""

    name: str
    state: str = "starting"
    id: str = ""
    address: str = ""
    t: int = 0
    """Rounds applied."""
    inner: int = 0
    """Inner steps done of this round."""
    of: int = 0
    tokens_per_s: float = 0.0
    loss: float | None = None
    """Of the last inner step, nats per token."""
    validation: float | None = None
    bytes_sent: int = 0
    bytes_received: int = 0
    waited_s: float = 0.0
    """Time that its training stood still for rounds."""
    report: str = ""
    """The last round, in one line."""
    news: str = ""
    """What went wrong since the last round, or for whom it waits."""
    digest: str = ""
    ended: bool = False


class Board:
    """A row for each peer, in the order in which they were added."""

    def __init__(self) -> None:
        self.rows: dict[str, PeerRow] = {}

    def add(self, name: str) -> PeerRow:
        return self.rows.setdefault(name, PeerRow(name))

    def apply(self, name: str, event: Mapping[str, Any]) -> None:
        """Take one event of a peer."""
        row = self.add(name)
        row.news = news(event) or row.news
        match event.get("event"):
            case "started":
                row.state, row.id, row.address = "joining", str(event.get("peer", "")), str(event.get("address", ""))
            case "synced":
                row.t, row.news = _int(event.get("t")), ""
            case "phase":
                row.state = str(event.get("phase", row.state))
            case "step":
                row.state = "training"
                row.inner, row.of = _int(event.get("inner")), _int(event.get("of"))
                row.loss, row.tokens_per_s = _float(event.get("loss")), _float(event.get("tokens_per_s")) or 0.0
            case "round":
                row.t, row.digest = _int(event.get("t")), str(event.get("digest", ""))
                row.bytes_sent += _int(event.get("bytes_sent"))
                row.bytes_received += _int(event.get("bytes_received"))
                row.waited_s += _float(event.get("own_waiting_s")) or 0.0
                row.report, row.news = short_report(event, self._names()), ""
            case "validation":
                row.validation = _float(event.get("loss"))
            case "waiting":
                row.state = "waiting"
            case "end":
                row.state, row.t, row.digest = "done", _int(event.get("t")), str(event.get("digest", ""))
                row.validation = _float(event.get("validation_loss"))
                row.waited_s = _float(event.get("waited_s")) or row.waited_s
                row.bytes_sent = _int(event.get("bytes_sent")) or row.bytes_sent
                row.bytes_received = _int(event.get("bytes_received")) or row.bytes_received

    def end(self, name: str, exit_code: int | None) -> None:
        """The peer's process has ended; negative codes are signals."""
        row = self.add(name)
        row.ended, row.tokens_per_s = True, 0.0
        row.state = "killed" if exit_code == -9 else "done" if exit_code == 0 else "failed"

    def _names(self) -> dict[str, str]:
        return {row.id: row.name for row in self.rows.values() if row.id}


def table(board: Board, title: str = "", caption: str = "") -> Table:
    """The board as a rich table."""
    grid = Table(title=title, caption=caption, title_justify="left", caption_justify="left", box=SIMPLE_HEAD)
    for head in ("peer", "state", "round", "step", "tokens/s", "loss", "MB out/in", "last round"):
        left = head in ("peer", "state", "last round")
        grid.add_column(head, justify="left" if left else "right", no_wrap=head != "last round")
    for row in board.rows.values():
        grid.add_row(
            row.name,
            Text(row.state, STYLES.get(row.state, "")),
            str(row.t),
            f"{row.inner}/{row.of}" if row.of else "",
            _thousands(row.tokens_per_s),
            _loss(row.loss),
            f"{row.bytes_sent / 1e6:.1f}/{row.bytes_received / 1e6:.1f}",
            Text(row.news, "yellow") if row.news else row.report,
            style="dim" if row.ended and row.state != "done" else "",
        )
    return grid


def lines(board: Board) -> list[str]:
    """The board as plain text, one line for each peer that has not ended."""
    return [
        f"{row.name:<10} {row.state:<9} round {row.t:>3}  step {row.inner:>3}/{row.of:<3} "
        f"{_thousands(row.tokens_per_s):>6} tokens/s  loss {_loss(row.loss):>6}  "
        f"sent {megabytes(row.bytes_sent):>8}  received {megabytes(row.bytes_received):>8}  {row.news}".rstrip()
        for row in board.rows.values()
        if not row.ended
    ]


def read_report(event: Mapping[str, Any]) -> RoundReport:
    """The RoundReport inside a "round" event; KeyError or TypeError where fields are missing or wrong."""
    fields = {name: event[name] for name in RoundReport.__dataclass_fields__}
    fields["contributors"] = tuple(Share(**share) for share in event["contributors"])
    fields["missing"] = tuple(Missing(**missing) for missing in event["missing"])
    return RoundReport(**fields)


def short_report(event: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """A round in the width of a table cell: who was in, how long, what went wrong; peers by name where known."""
    try:
        report = read_report(event)
    except (KeyError, TypeError, ValueError):
        return ""
    whole = len(report.contributors) + sum(lost.fraction == 1.0 for lost in report.missing)
    parts = [f"{len(report.contributors)} of {whole} in {report.seconds:.2f} s"]
    if report.ballots > 1:
        parts.append(f"{report.ballots} ballots")
    for lost in report.missing:
        share = "" if lost.fraction == 1.0 else f" {lost.fraction:.0%}"
        parts.append(f"{names.get(lost.peer, lost.peer[:8])} {lost.reason}{share}")
    return ", ".join(parts)


def megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count else ""


def _thousands(value: float) -> str:
    return "" if value <= 0 else f"{value / 1e3:.1f}k" if value >= 1e3 else f"{value:.0f}"


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _int(value: object) -> int:
    return value if isinstance(value, int) else 0


def _float(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None
