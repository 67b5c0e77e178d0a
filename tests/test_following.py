"""What follows a run: curves, the profile, the progress on a terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib.machinery
import io
import json
import logging
import os
import pty
import signal
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from dlc.cli import interrupt, main, sinks, trackers
from dlc.cli.interrupt import SHOW_CURSOR, Interrupts
from dlc.cli.options import PROFILE_STEPS, parser
from dlc.cli.profile import StepProfile
from dlc.cli.sinks import Bars
from dlc.errors import SwarmClosed
from dlc.report import Missing
from dlc.runspec import RunSpec
from dlc.survey import Member
from dlc.train.metrics import FILE_NAME, read_metrics
from tests.helpers import wait_until
from tests.train.fake_peer import FakePeer
from tests.train.test_trainer import Run, spec

__all__ = ["spec"]

Event = dict[str, Any]


def step(n: int, of: int = 4, **fields: Any) -> Event:
    own = {"event": "step", "t": n // of, "step": n, "inner": n % of + 1, "of": of}
    return {**own, "loss": 2.5 - n, "lr": 0.5, "tokens_per_s": 100.0, "mfu": None, **fields}


ROUND: Event = {
    "event": "round",
    "t": 1,
    "loss": None,
    "seconds": 3.0,
    "waiting_s": 1.0,
    "bytes_sent": 10,
    "bytes_received": 20,
    "contributors": [{}, {}],
    "missing": [{}],
}
VALIDATION: Event = {"event": "validation", "t": 1, "loss": 1.25}


def test_tensorboard_files_hold_the_curves(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = trackers.tensorboard(tmp_path / "new")
    for event in (
        step(0),
        step(1, mfu=0.25),
        ROUND,
        VALIDATION,
        step(2, loss=None),
        {"event": "phase", "phase": "leaving"},
    ):
        board.take(event)
    board.close()
    found = accumulator.EventAccumulator(str(tmp_path / "new")).Reload()

    def curve(name: str) -> list[tuple[int, float]]:
        return [(scalar.step, scalar.value) for scalar in found.Scalars(name)]

    assert curve("train/loss") == [(0, 2.5), (1, 1.5)]
    assert curve("train/lr") == [(0, 0.5), (1, 0.5), (2, 0.5)]
    assert curve("train/mfu") == [(1, 0.25)]  # where the device's peak is known
    assert curve("round/peers") == [(1, 2.0)] and curve("round/missing") == [(1, 1.0)]
    assert curve("validation/loss") == [(1, 1.25)]
    assert "round/loss" not in found.Tags()["scalars"]  # it was not counted


def test_curves_have_what_is_finite_and_count_this_peer_among_those_that_averaged() -> None:
    unknown = {"loss": float("nan"), "distance": None, "seconds": float("inf")}
    known = {"weight": 1.0, "waiting_s": 0.5, "bytes_sent": 1, "bytes_received": 2}
    found = trackers.point({"event": "averaging", "t": 2, **unknown, **known, "partners": ["a", "b"]})
    values = {f"round/{name}": float(value) for name, value in known.items()}
    assert found == trackers.Point("round", 2, {**values, "round/peers": 3.0})


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on the size of files")
def test_a_full_disk_under_tensorboard_is_told_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import resource

    pytest.importorskip("tensorboard")
    printed: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", printed.append)
    hook, (soft, hard) = threading.excepthook, resource.getrlimit(resource.RLIMIT_FSIZE)
    board = trackers.tensorboard(tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # stands in for a full disk
    try:
        for n in range(200):
            board.take(step(n))
        board.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not printed and threading.excepthook is hook
    assert "TensorBoard is not complete: [Errno 27]" in caplog.text


def test_the_file_of_metrics_tells_steps_from_rounds(tmp_path: Path) -> None:
    """A validation after round 1 stood there as one after step 1."""
    sink = sinks.Metrics(tmp_path)
    bad = {**VALIDATION, "t": 3, "loss": None}
    for event in (step(7), ROUND, VALIDATION, bad, {"event": "averaging", "t": 2, "distance": 0.5, "seconds": 1.5}):
        sink.take(event)
    sink.close()
    inner, of_round, validation, not_finite, averaging = read_metrics(tmp_path / FILE_NAME)
    assert (inner["step"], inner["loss"]) == (7, -4.5) and of_round["report"]["t"] == 1
    assert (validation["round"], validation["validation_loss"]) == (1, 1.25)
    assert (not_finite["round"], not_finite["validation_loss"]) == (3, None), "it had no line"
    assert (averaging["round"], averaging["consensus_distance"]) == (2, 0.5)
    assert not {"step"} & {*validation, *averaging}
    assert "mfu" not in inner, "the peak of this device is not known, which is not 0"


def names_of(record: Any) -> set[str]:
    """The fields of a line, those of fields too; but for what is named by peers."""
    if isinstance(record, list):
        return set().union(*map(names_of, record))
    if not isinstance(record, dict):
        return set()
    below = [names_of(value) for name, value in record.items() if name not in ("paths", "owned")]
    return set(record).union(*below)


def test_every_field_of_the_file_of_metrics_is_explained(spec: RunSpec, tmp_path: Path) -> None:
    """`lr` and `mfu` were so nowhere."""
    run = Run(FakePeer(spec), tmp_path)
    run.go()
    lacked = dataclasses.asdict(Missing("another", "late", 0.5))
    sink = sinks.Metrics(tmp_path)
    for event in (*run.events, {"event": "averaging", "t": 2, "distance": 0.5, "seconds": 1.5}):
        more = {"step": {"mfu": 0.5}, "round": {"missing": [lacked]}}.get(event["event"], {})
        sink.take({**event, **more})
    sink.close()
    told = set().union(*map(names_of, read_metrics(tmp_path / FILE_NAME)))
    assert {"lr", "mfu", "consensus_distance", "validation_loss", "fraction", "reason", "own_waiting_s"} <= told
    page = (Path(__file__).parents[1] / "docs" / "following.md").read_text("utf-8")
    assert sorted(name for name in told if f"`{name}`" not in page) == []


class FakeWandb(types.ModuleType):
    """As much of W&B's module as is used; it keeps what it gets."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
        self.options: dict[str, Any] = {}
        self.axes: dict[str, str] = {}
        self.logged: list[dict[str, float]] = []
        self.finished = False
        self.fails: Exception | None = None

    def Settings(self, **settings: Any) -> dict[str, Any]:  # noqa: N802  its name there
        return settings

    def init(self, **options: Any) -> FakeWandb:
        if self.fails:
            raise self.fails
        self.options = options
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes[name] = step_metric

    def log(self, data: dict[str, float]) -> None:
        if self.fails:
            raise self.fails
        self.logged.append(data)

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def fake_wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_gets_the_run_and_its_curves(fake_wandb: FakeWandb, tmp_path: Path) -> None:
    trackers.demand("wandb", "--wandb")
    board = trackers.wandb("my-project", "my-run", "abcdefghijk", {"rounds": 2}, tmp_path)
    for event in (step(0), ROUND, VALIDATION, step(1, mfu=0.25)):
        board.take(event)
    board.close()
    options = fake_wandb.options
    assert (options["project"], options["group"], options["name"]) == ("my-project", "my-run", "abcdefgh")
    assert options["config"] == {"rounds": 2} and options["dir"] == str(tmp_path)
    assert fake_wandb.axes == {"train/*": "step", "round/*": "round", "validation/*": "round"}
    assert fake_wandb.logged[0] == {"step": 0, "train/loss": 2.5, "train/lr": 0.5, "train/tokens_per_s": 100.0}
    assert fake_wandb.logged[1]["round"] == 1 and fake_wandb.logged[2] == {"round": 1, "validation/loss": 1.25}
    assert fake_wandb.logged[3]["train/mfu"] == 0.25
    assert fake_wandb.finished


def test_a_wandb_that_fails_is_told_once_and_the_training_goes_on(
    fake_wandb: FakeWandb, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    board = trackers.wandb("project", "run", "peer", {}, tmp_path)
    fake_wandb.fails = OSError("the disk is full")
    for n in range(3):
        board.take(step(n))
    board.close()
    assert caplog.text.count("the disk is full") == 1 and not fake_wandb.logged
    with pytest.raises(trackers.UsageError, match="WANDB_MODE=offline"):
        trackers.wandb("project", "run", "peer", {}, tmp_path)


def test_a_tracker_that_hangs_holds_up_no_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    wrote: list[int] = []
    finished: list[bool] = []

    def write(point: trackers.Point) -> None:
        begun.set()
        assert goes_on.wait(60.0)
        wrote.append(point.at)

    monkeypatch.setattr(trackers, "POINTS_MAX", 2)
    board = trackers.Tracker("W&B", write, lambda: finished.append(True))
    board.take(step(0))
    assert begun.wait(60.0)
    for n in range(1, 9):
        board.take(step(n))
    assert caplog.text.count("points are left out of it") == 1
    board.close(timeout_s=0.01)
    assert "it has hung" in caplog.text and not finished
    goes_on.set()
    board.close()
    assert finished and wrote == [0, 1, 2]


def test_a_tracker_that_hangs_in_its_end_holds_up_no_end(caplog: pytest.LogCaptureFixture) -> None:
    goes_on = threading.Event()
    board = trackers.Tracker("W&B", lambda point: None, lambda: goes_on.wait(60.0))
    board.close(timeout_s=0.01)
    assert "W&B is not complete: it has hung" in caplog.text
    goes_on.set()


@pytest.mark.parametrize(("option", "extra"), [("--tensorboard", "tensorboard"), ("--wandb", "wandb")])
def test_an_extra_that_is_missing_is_said_before_anything_begins(
    option: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    state = tmp_path / "state"
    assert main(["join", option, "there", "--state-dir", str(state), "--device", "cpu"]) == 2
    assert f"{option} needs" in (said := capsys.readouterr().err) and f"pip install 'dlc[{extra}]'" in said
    assert not state.exists()


def test_a_folder_of_its_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B makes a folder `wandb` where it is used, and `python -m dlc` looks for packages there."""
    (tmp_path / "no_such_tracker").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(trackers.UsageError, match="is not installed"):
        trackers.demand("no_such_tracker", "--wandb")


def test_the_profile_is_a_trace_of_so_many_steps(tmp_path: Path) -> None:
    args = parser(False).parse_args(["join", "--profile", f"{tmp_path / 'traces'}:2"])
    assert args.profile == (tmp_path / "traces", 2)
    assert parser(False).parse_args(["join", "--profile", "traces"]).profile == (Path("traces"), PROFILE_STEPS)
    sink = StepProfile(*args.profile, "abcdefghijk")
    for n in range(8):
        torch.full((3 + n,), 1.0).cumsum(0)
        sink.take(step(n))
    sink.close()
    (path,) = (tmp_path / "traces").iterdir()
    assert path.name == "abcdefgh-steps-2-3.json"
    names = [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]
    assert names.count("aten::cumsum") == 2


def test_a_run_that_ends_before_the_profile_writes_what_there_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for steps, said in ((0, True), (1, True), (2, True), (4, False)):
        sink = StepProfile(tmp_path / str(steps), 9, "abcdefghijk")
        for n in range(steps):
            torch.ones(3).cumsum(0)
            sink.take(step(n))
        sink.close()
        assert ("there is no trace" in caplog.text) is said
        caplog.clear()
    assert [path.name for path in (tmp_path / "4").iterdir()] == ["abcdefgh-steps-2-3.json"]
    assert not [*(tmp_path / "1").iterdir(), *(tmp_path / "2").iterdir()]


def test_a_profile_that_could_not_be_written_is_not_said_to_be_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = StepProfile(tmp_path / "traces", 1, "abcdefghijk")
    (tmp_path / "traces").rmdir()
    with caplog.at_level(logging.INFO, "dlc"):
        for n in range(4):
            torch.ones(3).cumsum(0)
            sink.take(step(n))
    assert "could not be written" in caplog.text and "profile of inner steps" not in caplog.text


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and a limit on the size of files")
def test_a_profile_that_could_not_be_written_gives_its_room_back(tmp_path: Path) -> None:
    """torch keeps the file open that it did not finish: deleted, it would fill the disk until the process ends."""
    import resource

    sink, (soft, hard) = StepProfile(tmp_path, 1, "abcdefghijk"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))  # stands in for a full disk
    try:
        for n in range(4):
            for _ in range(200):
                torch.ones(3).cumsum(0)
            sink.take(step(n))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not [*tmp_path.iterdir()]
    held = [fd for fd in Path("/proc/self/fd").iterdir() if str(tmp_path) in os.path.realpath(fd)]
    assert not sum(fd.stat().st_size for fd in held)


@pytest.mark.parametrize("option", ["--tensorboard", "--profile"])
def test_a_folder_that_cannot_be_written_to_is_told_before_anything_begins(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    shut, state = tmp_path / "shut", tmp_path / "state"
    shut.mkdir()

    def refuse(dir: Path) -> None:  # root may do anything
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(dir))

    monkeypatch.setattr("dlc.train.shelf.tempfile.TemporaryFile", refuse)
    assert main(["join", option, str(shut), "--state-dir", str(state), "--device", "cpu", "--rounds", "1"]) == 2
    assert f"{option} {shut} cannot be written: Permission denied" in capsys.readouterr().err
    assert not state.exists()


def drawn(bars: Bars) -> str:
    out = io.StringIO()
    Console(file=out, width=80).print(bars.shown)
    return out.getvalue()


def test_a_round_that_counted_this_peer_without_inner_steps_is_not_said_to_have_left_it_out() -> None:
    """Such as each fragment's last turn."""
    peers = [{"peer": "ab", "weight": 8.0, "fraction": 1.0}]
    about = {"channel": "train", "head": "", "digest": "", "weight": 8.0, "reduce_s": 1.0, "ballots": 1}
    also = {"missing": [], "paths": {}, "owned": {}}
    told = {**ROUND, **about, **also, "contributors": peers, "tokens_per_s": 1.0, "mfu": None}
    cases = ((True, None, "; counted;"), (True, 2.5, "; loss 2.5000;"), (False, None, "; not counted here;"))
    for counted, loss, says in cases:
        line = sinks.sentence({**told, "counted": counted, "loss": loss})
        assert says in line and ("not counted" in line) is not counted, line


def test_bars_of_the_round_and_of_the_run() -> None:
    bars = Bars(rounds=3, each=4)
    bars.take(ROUND)  # one that passed before our first step
    assert "4/12" in drawn(bars)
    bars.take(step(5))
    assert "2/4" in drawn(bars) and "6/12" in drawn(bars)
    bars.take({**ROUND, "t": 2})
    assert "8/12" in drawn(bars)
    endless = Bars(rounds=0, each=4)
    endless.take(step(5))
    assert "2/4" in drawn(endless) and "run" not in drawn(endless)


def test_what_is_left_of_a_round_and_of_the_run_is_told_in_every_round() -> None:
    """Steps of 60 s, and rounds that are waited for for 240 s: 20 steps, of which 9 are made, are 4 rounds."""
    now = [0.0]
    bars = Bars(rounds=5, each=4, clock=lambda: now[0])
    for n in range(9):
        now[0] += 60.0 if n % 4 else 300.0
        bars.take(step(n))
    assert "1/4" in drawn(bars) and left(bars, "round") is None, "nothing to tell it by"
    now[0] += 60.0
    bars.take(step(9))
    assert left(bars, "round") == 120.0
    assert left(bars, "run") == pytest.approx(10 * (60.0 + 240.0 / 4), rel=0.1)


def test_steps_that_are_made_during_a_round_go_on_with_the_run() -> None:
    """With overlap they are of the next phase, and come before the round is told."""
    bars = Bars(rounds=3, each=4)
    for n in range(4):
        bars.take(step(n))
    ahead = {"t": 0, "inner": 1}
    bars.take(step(4, **ahead))
    assert "1/4" in drawn(bars) and "5/12" in drawn(bars)
    bars.take(ROUND)
    assert "1/4" in drawn(bars) and "5/12" in drawn(bars)


def left(bars: Bars, name: str) -> float | None:
    (task,) = (task for task in bars.shown.tasks if task.description == name)
    return task.time_remaining


def test_the_live_table_shows_the_bars_and_leaves_the_terminal_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    out, handlers = io.StringIO(), list(logging.getLogger().handlers)
    monkeypatch.setattr(sinks, "Console", lambda stderr: Console(file=out, force_terminal=True, width=100))
    table = sinks.LiveTable(lambda: [], rounds=3, each=4)
    try:
        table.take(step(5))
    finally:
        table.close()
    assert "2/4" in out.getvalue() and "6/12" in out.getvalue()
    assert out.getvalue().rindex("\x1b[?25h") > out.getvalue().rindex("\x1b[?25l"), "the cursor is hidden"
    assert logging.getLogger().handlers == handlers


def test_the_live_table_is_drawn_while_nothing_happens_here_and_ends_with_what_came_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A round is waited for for minutes, and what stands there at the end is taken for the result."""
    out = io.StringIO()
    monkeypatch.setattr(sinks, "Console", lambda stderr: Console(file=out, force_terminal=True, width=200))
    monkeypatch.setattr(sinks, "REDRAW_EVERY_S", 0.01)
    members = iter([[member("training")], [member("waiting")]])

    def known() -> list[Member]:
        try:
            return next(members)
        except StopIteration:
            raise SwarmClosed("the peer has left") from None

    table = sinks.LiveTable(known, rounds=3, each=4)
    wait_until(lambda: "waiting" in out.getvalue())
    table.take(VALIDATION)
    table.take({"event": "end"})
    table.close()
    last = out.getvalue().rpartition("\x1b[2K")[2]
    assert "waiting" in last and "validation after round 1: 1.2500" in last


class Terminal(io.StringIO):
    """One that may go away."""

    gone = False

    def write(self, text: str) -> int:
        if self.gone:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().write(text)


def test_a_terminal_that_goes_away_takes_neither_the_table_nor_the_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end was an error, by which other sinks stayed open."""
    terminal, handlers, stderr = Terminal(), list(logging.getLogger().handlers), sys.stderr
    monkeypatch.setattr(sinks, "Console", lambda stderr: Console(file=terminal, force_terminal=True, width=100))
    monkeypatch.setattr(sinks, "REDRAW_EVERY_S", 0.01)
    asked: list[bool] = []

    def members() -> list[Member]:
        asked.append(terminal.gone)
        return []

    table = sinks.LiveTable(members, rounds=3, each=4)
    terminal.gone = True
    wait_until(lambda: sum(asked) >= 2, what="it is drawn once more after it could not be drawn")
    table.close()
    assert logging.getLogger().handlers == handlers and sys.stderr is stderr


def member(phase: str) -> Member:
    return Member("p" * 32, "host:1", "trainer", True, False, "", 0.0, 0, 0.0, {"phase": phase}, True)


def test_the_second_ctrl_c_gives_the_cursor_back(monkeypatch: pytest.MonkeyPatch) -> None:
    master, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as stderr, Interrupts() as interrupts:
        ended: list[int] = []
        monkeypatch.setattr(interrupt.os, "_exit", ended.append)
        monkeypatch.setattr(sys, "stderr", stderr)
        interrupts.can_save = True
        signal.raise_signal(signal.SIGINT)
        assert not ended
        print("|", end="", file=stderr, flush=True)
        signal.raise_signal(signal.SIGINT)
        monkeypatch.undo()
    read = b""
    with contextlib.suppress(OSError):  # by which a terminal ends on Linux
        while part := os.read(master, 999):  # the kernel hands on in parts what was written at once
            read += part
    os.close(master)
    first, second = read.split(b"|")
    assert ended == [130] and SHOW_CURSOR not in first and second.startswith(SHOW_CURSOR)
