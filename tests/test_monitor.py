"""The parts that watch a swarm: feed, children, table, curves."""

from __future__ import annotations

import dataclasses
import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import pytest
from rich.console import Console

from dlc.cli.sinks import LiveTable, LogLines, sentence
from dlc.monitor.children import Children
from dlc.monitor.curves import Curve, Curves, curves, save_picture, smooth
from dlc.monitor.feed import Feed, Item, parse_event
from dlc.monitor.show import LINES_EVERY_S, Show
from dlc.monitor.table import Board, lines, read_report, short_report, table
from dlc.monitor.verdict import Record
from dlc.report import Missing, RoundReport, Share
from dlc.train.telling import Setbacks
from tests.helpers import wait_until

DEADLINE_S = 180.0


def report(t: int = 3, ballots: int = 1, missing: tuple[Missing, ...] = ()) -> RoundReport:
    return RoundReport(
        channel="train",
        t=t,
        head="00",
        contributors=(Share("aaaaaaaaaaaa", 100.0, 1.0), Share("bbbbbbbbbbbb", 100.0, 1.0)),
        missing=missing,
        weight=200.0,
        bytes_sent=2_000_000,
        bytes_received=3_000_000,
        seconds=0.25,
        waiting_s=0.1,
        reduce_s=0.1,
        ballots=ballots,
    )


def round_event(**changes: Any) -> dict[str, Any]:
    return {"event": "round", **report().to_dict(), "counted": True, "digest": "d3", "own_waiting_s": 0.5, **changes}


def read_all(feed: Feed, streams: int) -> list[Item]:
    items: list[Item] = []
    while sum(item.event is None for item in items) < streams:
        item = feed.get(DEADLINE_S)
        assert item is not None, f"no end of the stream, only {items}"
        items.append(item)
    return items


def screen(renderable: object) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


class TestFeed:
    def test_events_arrive_in_order_and_then_the_end(self) -> None:
        feed = Feed(clock=lambda: 7.0)
        text = b"".join(json.dumps({"event": "step", "step": i}).encode() + b"\n" for i in range(50))
        feed.attach("a", io.BytesIO(text))
        items = read_all(feed, 1)
        assert [item.event["step"] for item in items if item.event] == list(range(50))
        assert items[-1] == Item("a", 7.0, None)

    def test_torn_and_foreign_lines_are_kept_apart(self) -> None:
        feed = Feed()
        feed.attach("a", io.BytesIO(b'hello\n{"event": "synced", "t": 2}\n\xff\xfe\n[1]\n{"event": "round", "t": '))
        items = read_all(feed, 1)
        assert [item.event for item in items] == [{"event": "synced", "t": 2}, None]
        assert feed.stray("a") == ["hello", "\ufffd\ufffd", "[1]", '{"event": "round", "t":']

    def test_several_streams_keep_their_names(self) -> None:
        feed = Feed()
        for name in "ab":
            feed.attach(name, io.BytesIO(json.dumps({"event": "x", "of": name}).encode()))
        assert {item.event["of"]: item.name for item in read_all(feed, 2) if item.event} == {"a": "a", "b": "b"}

    def test_nothing_to_read_is_none(self) -> None:
        assert Feed().get(0.0) is None

    @pytest.mark.parametrize("line", [b"", b"1", b"{}", b'{"event": 1}', b"[" * 100_000, b'{"event": "a"'])
    def test_what_is_no_event(self, line: bytes) -> None:
        assert parse_event(line) is None


def sleeper(children: Children, name: str, log: Path, code: str = "pass", wait: str = "time.sleep(600)") -> IO[bytes]:
    """A process that has said a line, and then waits: by default it sleeps for longer than any test."""
    program = f"import os, sys, time; {code}; print(os.getpid(), flush=True); {wait}"
    return children.start(name, [sys.executable, "-c", program], log)


class TestChildren:
    def test_variables_output_log_and_exit_code(self, tmp_path: Path) -> None:
        program = "import os, sys; print(os.environ['DLC_TEST']); print('oh', file=sys.stderr); sys.exit(3)"
        with Children() as children:
            out = children.start("a", [sys.executable, "-c", program], tmp_path / "a.log", {"DLC_TEST": "yes"})
            with out:
                assert out.read().split() == [b"yes"]
            assert children.exit_code("a", DEADLINE_S) == 3
        assert (tmp_path / "a.log").read_text().strip() == "oh"

    def test_all_are_killed_on_the_way_out(self, tmp_path: Path) -> None:
        with pytest.raises(RuntimeError, match="boom"), Children() as children:
            with sleeper(children, "a", tmp_path / "log") as out:
                out.readline()
            assert children.exit_code("a") is None
            raise RuntimeError("boom")
        assert children.exit_code("a") == -signal.SIGKILL

    def test_interrupt_lets_them_leave_by_themselves(self, tmp_path: Path) -> None:
        # No handler: a signal that comes just before the sleep begins would be answered when that is over.
        code = "from signal import *; pthread_sigmask(SIG_BLOCK, {SIGINT})"
        with Children() as children:
            with sleeper(children, "a", tmp_path / "log", code, "sigwait({SIGINT})") as out:
                out.readline()
                children.interrupt(DEADLINE_S)
            assert children.exit_code("a") == 0

    @pytest.mark.skipif(sys.platform != "linux", reason="only Linux has PR_SET_PDEATHSIG")
    def test_they_die_with_a_parent_that_got_sigkill(self, tmp_path: Path) -> None:
        program = (
            "import sys, time; from pathlib import Path; from dlc.monitor.children import Children\n"
            f"out = Children().start('a', [sys.executable, '-c', {SLEEP!r}], Path({str(tmp_path / 'log')!r}))\n"
            "print(int(out.readline()), flush=True); time.sleep(600)"
        )
        parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        try:
            assert parent.stdout is not None
            with parent.stdout:
                pid = int(parent.stdout.readline())
        finally:
            parent.kill()
            parent.wait(DEADLINE_S)
        wait_until(lambda: not running(pid), DEADLINE_S, "the grandchild is gone")


SLEEP = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


def running(pid: int) -> bool:
    """Neither gone nor a zombie that nobody has collected yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


NO_QUORUM = {"event": "waiting", "reason": "no quorum", "peers": ["cccccccccccc"], "left_s": 35.0}
NEWS: list[tuple[dict[str, Any], str]] = [
    (NO_QUORUM, "no quorum: cccccccc; going on without in 35 s at most"),
    ({**NO_QUORUM, "left_s": 0.0}, "no quorum: cccccccc; going on without as soon as all that are left agree"),
    ({**NO_QUORUM, "reason": "founding needs every listed address", "left_s": None}, "every listed address: cccc"),
    (
        {"event": "waiting", "reason": "why", "peers": ["host.example.org:4600"], "left_s": None, "waited_s": 30.0}
        | {"advice": "do this"},
        "why: host.example.org:4600 (for more than 30 s); do this",
    ),
    ({"event": "history_lost", "rounds": 7, "tokens": 5120.0}, "7 rounds and 5120 tokens of ours are set aside"),
    ({"event": "history_lost", "rounds": 1, "tokens": 9.0}, "1 round and 9 tokens of ours are set aside"),
    ({"event": "digest_mismatch", "t": 4}, "state of round 4 differed"),
    ({"event": "contribution_dropped", "channel": "train"}, "our state was replaced"),
    (
        {"event": "work_dropped", "t": 4, "steps": 3, "tokens": 192, "others": False, "share": 1.0},
        "3 inner steps of ours (192 tokens) are dropped",
    ),
    (
        {"event": "work_dropped", "t": 4, "steps": 4, "tokens": 64, "others": False, "share": 0.25},
        "4 inner steps of ours (64 tokens) are dropped in 25% of the model",
    ),
    (
        {"event": "work_dropped", "t": 4, "steps": 1, "tokens": 64, "others": True, "share": 1.0},
        "1 inner step of ours (64 tokens) is dropped; their samples are trained anew",
    ),
    ({"event": "diverged", "t": 4, "in_a_row": 1}, "not finite"),
]
"""Events that a user must hear of, and what is said."""


class TestBoard:
    def board(self) -> Board:
        board = Board()
        board.apply("a", {"event": "started", "peer": "aaaaaaaaaaaa", "address": "127.0.0.1:1"})
        board.apply("b", {"event": "started", "peer": "bbbbbbbbbbbb", "address": "127.0.0.1:2"})
        return board

    def test_a_peers_life(self) -> None:
        board = self.board()
        row = board.rows["a"]
        assert row.state == "joining"
        board.apply("a", {"event": "synced", "t": 2})
        board.apply("a", {"event": "step", "t": 2, "inner": 4, "of": 20, "loss": 3.25, "tokens_per_s": 7500.0})
        assert (row.state, row.t, row.inner, row.loss) == ("training", 2, 4, 3.25)
        board.apply("a", {"event": "phase", "phase": "reducing"})
        assert row.state == "reducing"
        board.apply("a", round_event())
        board.apply("a", round_event(t=4, digest="d4"))
        assert (row.t, row.digest, row.bytes_sent, row.bytes_received) == (4, "d4", 4_000_000, 6_000_000)
        assert row.waited_s == 1.0
        board.apply("a", {"event": "end", "t": 8, "digest": "d8", "validation_loss": 2.5, "bytes_sent": 9})
        assert (row.state, row.t, row.validation, row.bytes_sent) == ("done", 8, 2.5, 9)

    @pytest.mark.parametrize(("code", "state"), [(0, "done"), (-9, "killed"), (3, "failed"), (None, "failed")])
    def test_how_a_process_ended(self, code: int | None, state: str) -> None:
        board = self.board()
        board.end("a", code)
        assert board.rows["a"].state == state

    def test_strange_events_change_nothing(self) -> None:
        board = self.board()
        for event in ({}, {"event": "news"}, {"event": "round"}, {"event": "step", "loss": None, "inner": "x"}):
            board.apply("a", event)
        assert board.rows["a"].loss is None and board.rows["a"].report == ""

    def test_table_and_lines_show_every_figure(self) -> None:
        board = self.board()
        board.apply("a", {"event": "step", "t": 2, "inner": 4, "of": 20, "loss": 3.25, "tokens_per_s": 7500.0})
        board.apply("a", round_event())
        text = screen(table(board, "title"))
        for shown in ("title", "training", "4/20", "7.5k", "3.250", "2.0/3.0", "2 of 2 in 0.25 s"):
            assert shown in text
        first = lines(board)[0]
        for shown in ("a ", "training", "round   3", "4/20", "7.5k", "3.250", "2.0 MB", "3.0 MB"):
            assert shown in first
        board.end("a", 0)
        assert [line.split()[0] for line in lines(board)] == ["b"]

    @pytest.mark.parametrize("event, says", NEWS)
    def test_what_goes_wrong_is_shown_until_the_next_round(self, event: dict[str, Any], says: str) -> None:
        board = self.board()
        board.apply("a", event)
        for shown in (screen(table(board)), lines(board)[0]):
            assert says in shown
        for good in (round_event(), {"event": "synced", "t": 4}):
            board.apply("a", event)
            board.apply("a", good)
            for shown in (screen(table(board)), lines(board)[0]):
                assert says not in shown

    def test_the_wait_for_a_quorum_counts_down(self) -> None:
        board = self.board()
        for left_s in (60.0, 55.0, 50.0):
            board.apply("a", {**NO_QUORUM, "left_s": left_s})
            board.apply("a", {"event": "step", "t": 2, "inner": 4, "of": 20, "loss": 3.25, "tokens_per_s": 7500.0})
            assert f"in {left_s:.0f} s" in lines(board)[0] and "training" in lines(board)[0]

    def test_a_report_survives_json_and_names_peers(self) -> None:
        lost = (Missing("cccccccccccc", "dead", 1.0), Missing("bbbbbbbbbbbb", "late", 0.25))
        full = report(ballots=2, missing=lost)
        event = json.loads(json.dumps({"event": "round", **full.to_dict()}))
        assert read_report(event) == full
        text = short_report(event, {"cccccccccccc": "peer-1"})
        assert text == "2 of 3 in 0.25 s, 2 ballots, peer-1 dead, bbbbbbbb late 25%"


class TestShow:
    def shown(self, terminal: bool) -> str:
        now = [0.0]
        out = io.StringIO()
        board = Board()
        board.apply("a", {"event": "started"})
        with Show(board, Console(file=out, width=120, force_terminal=terminal), "title", clock=lambda: now[0]) as show:
            show.draw()
            now[0] = LINES_EVERY_S
            show.draw()
            show.draw()
            show.note("it happened")
        return out.getvalue()

    def test_plain_lines_now_and_then(self) -> None:
        text = self.shown(terminal=False)
        assert text.count("joining") == 1 and "title" in text and "  10.0 s  it happened" in text

    def test_a_live_table_on_a_terminal(self) -> None:
        text = self.shown(terminal=True)
        assert "tokens/s" in text and "last round" in text and "it happened" in text


END = {
    "event": "end",
    "reason": "rounds",
    "t": 8,
    "waited_s": 1.0,
    "bytes_sent": 9,
    "bytes_received": 9,
    "model": None,
    "checkpoint": None,
}


class TestSinks:
    def test_a_log_tells_all_that_goes_wrong(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO")
        assert sentence({"event": "member", "peer": "abcdefghij", "change": "left"}) == "peer abcdefgh has left"
        sink = LogLines()
        for event, _ in NEWS:
            sink.take(event)
        sink.take({**END, "setbacks": dataclasses.asdict(Setbacks(7, 5120.0, 0, 1, 192))})
        for event, says in NEWS:
            assert (says in caplog.text) == (event["event"] != "waiting")  # which the peer logs itself
        assert "rounds lost 7; tokens lost 5120; contributions dropped 1; tokens dropped 192;" in caplog.text
        assert caplog.text.rstrip().endswith("model not written; checkpoint not written")
        # A model that a newcomer fetched came in no round.
        assert "at round 8; in rounds it waited 1.0 s, sent 0.0 MB, received 0.0 MB; rounds lost" in caplog.text

    def test_a_round_is_told_with_speed_and_with_mfu_where_it_is_known(self) -> None:
        event = {**round_event(), "loss": 1.0, "tokens_per_s": 7500.0}
        assert "; loss 1.0000; 7500 tokens/s; digest" in sentence({**event, "mfu": None})
        assert "; loss 1.0000; 7500 tokens/s, MFU 41.2%; digest" in sentence({**event, "mfu": 0.412})

    def test_a_round_without_a_digest_tells_none(self) -> None:
        """As all of a parameter server, and those that another had followed before they were told."""
        event = {**round_event(), "loss": 1.0, "tokens_per_s": 7500.0, "mfu": None, "digest": ""}
        assert sentence(event).endswith("; loss 1.0000; 7500 tokens/s")

    def test_the_live_table_counts_down_until_the_next_round(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, for rich
        monkeypatch.setenv("COLUMNS", "100")
        monkeypatch.setattr("dlc.cli.sinks.REDRAW_EVERY_S", 0.01)
        sink = LiveTable(list, rounds=0, each=1)
        try:
            for left_s, told in ((35.0, "in 35 s at most"), (30.0, "in 30 s at most")):
                sink.take({**NO_QUORUM, "left_s": left_s})
                wait_until(lambda told=told: told in capsys.readouterr().err)
            sink.take({**round_event(), "loss": 1.0, "tokens_per_s": 7500.0, "mfu": None})
            wait_until(lambda: "loss 1.0000" in capsys.readouterr().err.rpartition("no quorum")[2])
        finally:
            sink.close()
        assert "no quorum" not in capsys.readouterr().err


class TestCurves:
    def test_swarm_is_the_mean_of_its_peers(self) -> None:
        def step(step: int, loss: float | None) -> dict[str, Any]:
            return {"event": "step", "step": step, "loss": loss}

        records = [
            Record("a", "victim", [step(0, 4.0)]),
            Record("b", "peer", [step(0, 2.0), step(1, 2.0), {"event": "validation", "t": 2, "loss": 1.5}]),
            Record("c", "newcomer", [step(1, 1.0), step(2, None)]),
            Record("d", "alone", [step(0, 9.0)]),
        ]
        found = curves(records, sync_every=10)
        assert found.swarm == Curve([0, 1], [3.0, 1.5])
        assert found.alone == Curve([0], [9.0])
        assert found.swarm_validation == Curve([20], [1.5])
        assert found.alone_validation == Curve([], [])

    def test_smoothing_keeps_the_length(self) -> None:
        assert smooth(Curve([0, 1, 2], [3.0, 1.0, 2.0]), 3) == Curve([0, 1, 2], [2.0, 2.0, 1.5])

    def test_the_picture_is_a_png(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib", reason="matplotlib is not installed")
        one = Curve([0, 1], [3.0, 2.0])
        assert save_picture(tmp_path / "a.png", Curves(one, one, one, Curve([], [])), [(1, "killed")], "t") == ""
        assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
        assert "cannot be written" in save_picture(tmp_path / "no" / "a.png", Curves(one, one, one, one), [], "t")

    def test_without_matplotlib_it_says_so(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        empty = Curve([], [])
        said = save_picture(tmp_path / "a.png", Curves(empty, empty, empty, empty), [], "t")
        assert "matplotlib is not installed" in said and not (tmp_path / "a.png").exists()
