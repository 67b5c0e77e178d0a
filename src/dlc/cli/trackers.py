"""Curves for people: TensorBoard and Weights & Biases, as sinks of the events of `dlc join`.

    train/*   loss, tokens/s, MFU, learning rate    over the swarm's inner steps
    round/*   loss, seconds, peers, bytes           over rounds
    validation/loss                                 over rounds

Both are optional extras. Whether one is installed is asked before the run is joined; whatever fails or hangs later is
told once, and the training goes on. What else W&B needs (a login, or WANDB_MODE=offline) is its own matter.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from dlc.errors import UsageError

log = logging.getLogger(__name__)

TRAIN_AXIS, ROUND_AXIS = "step", "round"
POINTS_MAX = 10_000
"""That wait for a tracker: some minutes of short steps."""
CLOSE_S = 60.0
"""How long what still waits may take at the end."""
Event = dict[str, Any]


class Point(NamedTuple):
    """Named values at one place of one axis."""

    axis: str
    at: int
    values: dict[str, float]


Write = Callable[[Point], None]


def demand(extra: str, option: str) -> None:
    """UsageError, with the command that mends it, if the extra of that name is not installed."""
    found = find_spec(extra)
    is_folder = found is not None and found.loader is None and found.submodule_search_locations is not None
    if found is None or is_folder:  # one of that name lies here, such as W&B makes
        raise UsageError(f"{option} needs a package that is not installed: pip install 'dlc[{extra}]'")


def point(event: Mapping[str, Any]) -> Point | None:
    """What an event adds to the curves; values that are not finite are left out."""
    match event["event"]:
        case "step":
            names = ("loss", "tokens_per_s", "mfu", "lr")
            return _point(TRAIN_AXIS, event["step"], {f"train/{name}": event[name] for name in names})
        case "averaging":
            known = ("loss", "distance", "weight", "seconds", "waiting_s", "bytes_sent", "bytes_received")
            partners = {"round/peers": len(event["partners"]) + 1}
            return _point(ROUND_AXIS, event["t"], {f"round/{name}": event[name] for name in known} | partners)
        case "round":
            values = {f"round/{name}": event[name] for name in ("loss", "seconds", "waiting_s", "bytes_sent")}
            values["round/bytes_received"] = event["bytes_received"]
            values["round/peers"] = len(event["contributors"])
            values["round/missing"] = len(event["missing"])
            return _point(ROUND_AXIS, event["t"], values)
        case "validation":
            return _point(ROUND_AXIS, event["t"], {"validation/loss": event["loss"]})
    return None


def _point(axis: str, at: int, values: dict[str, Any]) -> Point | None:
    finite = {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}
    return Point(axis, at, finite) if finite else None


class Tracker:
    """Hands the points to `write`, on a thread of its own: a disk or a server that hangs does not hold up the training.
    The first failure ends it."""

    def __init__(self, name: str, write: Write, finish: Callable[[], object]) -> None:
        self._name, self._write, self._finish = name, write, finish
        self._points: queue.Queue[Point | None] = queue.Queue(POINTS_MAX)
        self._behind = self._failed = False
        self._thread = threading.Thread(target=self._run, name=f"dlc-{name}", daemon=True)
        self._thread.start()

    def take(self, event: Event) -> None:
        found = point(event)
        if found is None or self._failed:
            return
        try:
            self._points.put_nowait(found)
        except queue.Full:
            if not self._behind:
                self._behind = True
                log.warning("%s hangs, or is slow: points are left out of it; training goes on", self._name)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Write out what is held back, unless it hangs."""
        with contextlib.suppress(queue.Full):
            self._points.put(None, timeout=timeout_s)
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("%s is not complete: it has hung for %.0f s", self._name, timeout_s)

    def _run(self) -> None:
        while (found := self._points.get()) is not None:
            if self._failed:
                continue
            try:
                self._write(found)
            except Exception as error:  # of a foreign library, whose writer thread hands on whatever it died of
                log.warning("nothing more goes to %s: %s; training goes on", self._name, error)
                self._failed = True
        try:
            self._finish()  # here, since it may hang, too
        except Exception as error:
            log.warning("%s is not complete: %s", self._name, error)


def tensorboard(folder: Path) -> Tracker:
    """Event files in `folder`, made if it is missing.

    Its writer is a thread, of whose end Python would print a traceback, in the midst of the live table.
    """
    from torch.utils.tensorboard import SummaryWriter  # takes a second

    try:
        board: Any = SummaryWriter(str(folder))
    except OSError as error:
        raise UsageError(f"--tensorboard {folder} cannot be written: {error.strerror or error}") from None

    def write(point: Point) -> None:
        for name, value in point.values.items():
            board.add_scalar(name, value, point.at)

    before, ends = threading.excepthook, []

    def thread_ended(args: threading.ExceptHookArgs) -> None:
        if type(args.thread).__module__.startswith("tensorboard."):
            ends.append(args.exc_value)
        else:
            before(args)

    def finish() -> None:
        try:
            board.close()
            if ends and ends[0] is not None:
                raise ends[0]
        finally:
            threading.excepthook = before

    threading.excepthook = thread_ended
    return Tracker("TensorBoard", write, finish)


def wandb(project: str, run: str, peer: str, config: dict[str, Any], folder: Path) -> Tracker:
    """One W&B run for this process, in the group of the swarm's run; its files are in `folder`."""
    import wandb as library

    try:
        folder.mkdir(parents=True, exist_ok=True)
        board: Any = library.init(
            project=project,
            group=run,
            name=peer[:8],
            config=config,
            dir=str(folder),
            settings=library.Settings(console="off"),  # it would take stderr away from the live table
        )
        for pattern, axis in (("train/*", TRAIN_AXIS), ("round/*", ROUND_AXIS), ("validation/*", ROUND_AXIS)):
            board.define_metric(pattern, step_metric=axis)
    except Exception as error:  # a missing login is an error class of its own, and so on
        raise UsageError(f"--wandb: {error}; run `wandb login`, or set WANDB_MODE=offline") from None
    return Tracker("W&B", lambda point: board.log({point.axis: point.at, **point.values}), board.finish)
