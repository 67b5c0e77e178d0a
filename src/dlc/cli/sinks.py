"""Where the events of `dlc join` go: JSON lines, a live table, log lines, a metrics file. All take all events.

Curves (TensorBoard, W&B) stand in `trackers`, the profiler in `profile`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from dlc.cli.status import member_table
from dlc.errors import DlcError
from dlc.monitor.news import news
from dlc.monitor.table import megabytes, read_report
from dlc.survey import Member
from dlc.train.metrics import MetricsWriter

log = logging.getLogger(__name__)

LOG_STEP_EVERY_S = 10.0
"""Between two log lines about inner steps; rounds and validations always get theirs."""
REDRAW_EVERY_S = 0.5
SPEED_S = 3600.0
"""What is left of a run is told by the steps of so long, at most 1,000: by rounds with what they wait, and not by one
inner phase."""
TIMED_WIDTH = 60
"""Columns of a terminal from which on lines of the log have room for the time."""
CHANGES = {"suspect": "does not answer", "left": "has left"}
"""Of members, in words that are not just their names."""
Event = dict[str, Any]


class Sink(Protocol):
    """Takes events until it is closed."""

    def take(self, event: Event) -> None: ...
    def close(self) -> None: ...


class JsonLines:
    """One line per event on stdout, whole and at once. Thread-safe."""

    def __init__(self, muted: bool = False) -> None:
        self._lock = threading.Lock()
        self._open = not muted

    def take(self, event: Event) -> None:
        if not self._open:
            return
        line = json.dumps(event, allow_nan=False, default=str) + "\n"
        with self._lock:
            try:
                sys.stdout.write(line)
                sys.stdout.flush()
            except OSError as error:  # nobody reads, or the disk is full: the training is worth more than its output
                self._open = False
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                if not isinstance(error, BrokenPipeError):
                    log.warning("no more events go to stdout: %s; training goes on", error.strerror or error)

    def close(self) -> None:
        """stdout stays open."""


class LogLines:
    """What a person wants to find in a log."""

    def __init__(self, steps: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps, self._clock = steps, clock
        self._said_at = clock()

    def take(self, event: Event) -> None:
        if event["event"] == "waiting":  # the peer logs that itself
            return
        text = sentence(event)
        if event["event"] == "step":
            if not self._steps or self._clock() - self._said_at < LOG_STEP_EVERY_S:
                return
            self._said_at = self._clock()
        if text:
            log.info("%s", text)

    def close(self) -> None:
        """Nothing is held."""


def draws() -> bool:
    """Whether stderr is a terminal on which something can be drawn anew in its place."""
    return sys.stderr.isatty() and not Console(stderr=True).is_dumb_terminal


class LiveTable:
    """The members of the swarm and how far this peer is, redrawn in place, below the log.

    It is drawn on a thread of its own, also while a round is waited for and nothing happens here, and once more at the
    end. A terminal that goes away, as when the connection to this host breaks, is drawn on no more.
    members: asked there; where it raises DlcError, as after the leave, those it gave last are shown.
    rounds: where the run ends; 0: it has no such end, and only the steps to the next round are shown.
    each: as of `Bars`.
    """

    def __init__(self, members: Callable[[], list[Member]], rounds: int, each: int) -> None:
        self._members = members
        self._known: list[Member] = []
        self._bars = Bars(rounds, each)
        self._last_round = self._validation = self._news = ""
        self._console = console = Console(stderr=True)
        self._live = Live(console=console, auto_refresh=False)  # its thread holds a lock that the log waits for
        self._live.start()
        self._root = logging.getLogger()
        self._handlers = self._root.handlers
        self._root.handlers = [
            RichHandler(console=console, show_path=False, markup=False, show_time=console.width >= TIMED_WIDTH)
        ]
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._redraw, name="dlc-table", daemon=True)
        self._thread.start()

    def take(self, event: Event) -> None:
        self._bars.take(event)
        self._news = "" if event["event"] in ("round", "synced") else news(event) or self._news
        if event["event"] in ("round", "averaging"):
            self._last_round = sentence(event)
        if event["event"] == "validation":
            self._validation = sentence(event)

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        self._draw()
        with contextlib.suppress(OSError):
            self._live.stop()
        self._root.handlers = self._handlers

    def _redraw(self) -> None:
        while not self._closed.wait(REDRAW_EVERY_S):
            self._draw()

    def _draw(self) -> None:
        with contextlib.suppress(DlcError):
            self._known = self._members()
        below = [Text(line) for line in (self._last_round, self._validation, self._news) if line]
        table = member_table(self._known, self._console.width)
        with contextlib.suppress(OSError):
            self._live.update(Group(table, self._bars.shown, *below), refresh=True)


class Bars:
    """Inner steps of this round, and of the run if it has an end; what is left of both in hours and minutes, for the
    run with the time that its rounds take.

    rounds: as of `LiveTable`. each: inner steps of a round, by the swarm's schedule.
    """

    def __init__(self, rounds: int, each: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._each = each
        columns = (TextColumn("{task.description:>5}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.shown = Progress(*columns, auto_refresh=False, speed_estimate_period=SPEED_S, get_time=clock)
        """To be drawn by the caller: it is never started, so it draws nothing itself."""
        self._round = self.shown.add_task("round", total=None)
        self._run = self.shown.add_task("run", total=rounds * each, visible=rounds > 0)

    def take(self, event: Event) -> None:
        match event["event"]:
            case "step":
                if event["inner"] <= self.shown.tasks[self._round].completed:  # of the next round: another time is left
                    self.shown.reset(self._round)
                self.shown.update(self._round, completed=event["inner"], total=event["of"])
                self.shown.update(self._run, completed=event["step"] + 1)
            case "round" | "averaging":  # unless steps of the next one are made already
                done = max(self.shown.tasks[self._run].completed, event["t"] * self._each)
                self.shown.update(self._run, completed=done)


class Metrics:
    """metrics.jsonl."""

    def __init__(self, folder: Path, before_write: Callable[[], None] = lambda: None) -> None:
        self._writer = MetricsWriter(folder, before_write=before_write)

    def take(self, event: Event) -> None:
        match event["event"]:
            case "step":
                names = ("loss", "tokens_per_s", "lr", "mfu")
                known = {name: float(event[name]) for name in names if event[name] is not None}
                self._writer.scalar(event["step"], **known)
            case "round":
                self._writer.report({name: value for name, value in event.items() if name != "event"})
            case "averaging":
                values = {"consensus_distance": event["distance"], "exchange_s": event["seconds"]}
                self._writer.of_round(event["t"], **{k: v for k, v in values.items() if v is not None})
            case "validation":
                self._writer.of_round(event["t"], validation_loss=event["loss"])

    def close(self) -> None:
        self._writer.close()


def sentence(event: Event) -> str:
    """An event as one line for people; empty for those that need none."""
    match event["event"]:
        case "synced":
            return f"in step with the swarm at round {event['t']}"
        case "step":
            return (
                f"after round {event['t']}, step {event['inner']}/{event['of']}: loss {event['loss']:.4f}, "
                f"{_speed(event)}"
            )
        case "round":
            own = "counted" if event["counted"] else "not counted here"
            if event["loss"] is not None:  # there is none without inner steps, as where each fragment has its last turn
                own = f"loss {event['loss']:.4f}"
            digest = f"; digest {event['digest'][:12]}" if event["digest"] else ""
            return f"{read_report(event).summary()}; {own}; {_speed(event)}{digest}"
        case "looked_on":
            return read_report(event).summary(own=False)
        case "averaging":
            loss = "" if event["loss"] is None else f"; loss {event['loss']:.4f}"
            return f"{averaging(event)}{loss}; {_speed(event)}"
        case "validation":
            loss = "not finite" if event["loss"] is None else f"{event['loss']:.4f} nats per token"
            return f"validation after round {event['t']}: {loss}"
        case "member":
            change = event["change"]
            return f"peer {event['peer'][:8]} {CHANGES.get(change, f'is {change}')}"
        case "end":
            moved = f"sent {megabytes(event['bytes_sent']) or 0}, received {megabytes(event['bytes_received']) or 0}"
            early = {"interrupted": "left the run", "failed": "the training failed, and left the run"}
            why = early.get(event["reason"], f"the run is over ({event['reason']})")
            setbacks = "".join(f"; {name.replace('_', ' ')} {n:g}" for name, n in event["setbacks"].items() if n)
            return (
                f"{why} at round {event['t']}; in rounds it waited {event['waited_s']:.1f} s, {moved}{setbacks}; "
                f"model {event['model'] or 'not written'}; checkpoint {event['checkpoint'] or 'not written'}"
            )
    return news(event)


def averaging(event: Event) -> str:
    """A round of this peer with a few others: with whom, how far models are apart, what it took."""
    partners, missing = event["partners"], event["missing"]
    met = ", ".join(peer[:8] for peer in partners) or "nobody"
    parts = [
        f"round {event['t']}: with {met}",
        f"distance {'not known' if event['distance'] is None else format(event['distance'], '.4g')}",
        f"{event['seconds']:.2f} s (waiting {event['waiting_s']:.2f})",
        f"sent {megabytes(event['bytes_sent']) or 0}, received {megabytes(event['bytes_received']) or 0}",
    ]
    parts += [f"without {peer[:8]} ({why})" for peer, why in missing.items()]
    return "; ".join(parts)


def _speed(event: Event) -> str:
    """Of the inner steps: tokens/s, and MFU where the device's peak is known."""
    mfu = "" if event["mfu"] is None else f", MFU {event['mfu']:.1%}"
    return f"{event['tokens_per_s']:.0f} tokens/s{mfu}"
