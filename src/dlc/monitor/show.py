"""A board on the screen: a live table on a terminal, plain lines now and then anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table

from dlc.monitor.table import Board, lines, table

REDRAWS_PER_S = 4
LINES_EVERY_S = 10.0
"""Between two outputs of plain lines: a log of two minutes stays a page long."""


class Show:
    """Shows `board` until it is left. `draw` may be called as often as one likes."""

    def __init__(self, board: Board, console: Console, title: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._board, self._console, self._title, self._clock = board, console, title, clock
        self._start_s = self._printed_s = clock()
        self._live: Live | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(console=console, refresh_per_second=REDRAWS_PER_S, get_renderable=self._table)

    def __enter__(self) -> Show:
        if self._live is not None:
            self._live.start(refresh=True)
        else:
            self.note(self._title)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def draw(self) -> None:
        """Show the board's present state; the live table draws itself."""
        now = self._clock()
        if self._live is None and now - self._printed_s >= LINES_EVERY_S:
            self._printed_s = now
            for line in lines(self._board):
                self._plain(f"{self._stamp()}  {line}")

    def note(self, text: str) -> None:
        """Say something that happened; it stays above the table."""
        self._plain(f"{self._stamp()}  {text}")

    def _plain(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _stamp(self) -> str:
        return f"{self._clock() - self._start_s:6.1f} s"

    def _table(self) -> Table:
        return table(self._board, title=self._title, caption=self._stamp().strip())
