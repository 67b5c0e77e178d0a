"""`dlc demo`: each check on recorded events, with the record that fails it; and once all of it, on real processes."""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import psutil
import pytest
import torch
from rich.console import Console

from dlc.cli import main as command
from dlc.cli.fault import kill_in_round, unfinished
from dlc.demo import add_arguments, free_addresses, main
from dlc.errors import UsageError
from dlc.monitor.children import Children
from dlc.monitor.outcome import write_outcome
from dlc.monitor.verdict import Expected, Record, exit_text, reports_of_kill_round, verdict
from dlc.report import Missing, RoundReport, Share
from dlc.runspec import RunSpec, TimeoutsSpec
from tests.forked import AVAILABLE, Forked
from tests.helpers import wait_until
from tests.swarm import ROUND_S, swarm, together
from tests.swarm import free_addresses as addresses_for_tests

ROUNDS, KILL_ROUND = 4, 2
EXPECTED = Expected(rounds=ROUNDS, kill_round=KILL_ROUND, limit_s=180.0)
IDS = {"victim": "v" * 16, "b": "b" * 16, "c": "c" * 16, "newcomer": "n" * 16, "alone": "a" * 16}
E2E_S = 900.0
"""For the real demo at its smallest useful size, on a machine that does other things too."""


def round_event(t: int, names: str, ballots: int = 1, missing: tuple[Missing, ...] = ()) -> dict[str, Any]:
    shares = tuple(Share(IDS[name], 1000.0, 1.0) for name in names.split())
    report = RoundReport(
        channel="train", t=t, head=f"{t:02x}", contributors=shares, missing=missing, weight=1000.0 * len(shares),
        bytes_sent=1000, bytes_received=2000, seconds=0.2, waiting_s=0.1, reduce_s=0.1, ballots=ballots,
    )  # fmt: skip
    return {"event": "round", **report.to_dict(), "counted": True, "digest": f"digest-{t}", "own_waiting_s": 0.1}


def started(name: str) -> dict[str, Any]:
    return {"event": "started", "peer": IDS[name], "address": "127.0.0.1:1"}


def end(loss: float, digest: str = f"digest-{ROUNDS}") -> dict[str, Any]:
    counts = {"bytes_sent": 4000, "bytes_received": 8000, "waited_s": 0.4}
    return {"event": "end", "reason": "rounds", "t": ROUNDS, "digest": digest, "validation_loss": loss, **counts}


def recorded() -> dict[str, Record]:
    """A demo in which everything held."""
    before: dict[str, Any] = {"event": "validation", "t": 0, "loss": 5.5}
    killed = round_event(KILL_ROUND, "victim b c", ballots=2)
    after = [round_event(3, "b c", missing=(Missing(IDS["victim"], "dead", 1.0),)), round_event(4, "b c newcomer")]
    survivor = [{"event": "synced", "t": 0}, before, round_event(1, "victim b c"), killed, *after, end(2.25)]
    victim = [before, round_event(1, "victim b c"), {"event": "phase", "phase": "reducing"}]
    newcomer = [{"event": "synced", "t": 3}, round_event(4, "b c newcomer"), end(2.25)]
    records = [
        Record("victim", "victim", [started("victim"), *victim], -9),
        Record("b", "peer", [started("b"), *survivor], 0),
        Record("c", "peer", [started("c"), *survivor], 0),
        Record("newcomer", "newcomer", [started("newcomer"), *newcomer], 0),
        Record("alone", "alone", [started("alone"), before, end(2.5, "digest-alone")], 0),
    ]
    return {record.name: copy.deepcopy(record) for record in records}


def failed(records: dict[str, Record], elapsed_s: float = 100.0) -> list[str]:
    return [check.name for check in verdict(list(records.values()), EXPECTED, elapsed_s) if not check.held]


def change(record: Record, kind: str, at: int | None = None, /, **fields: Any) -> None:
    """Overwrite fields of its events of one kind (and round)."""
    found = [e for e in record.events if e["event"] == kind and at in (None, e.get("t"))]
    assert found
    for event in found:
        event.update(fields)  # type: ignore[attr-defined]


def drop(record: Record, kind: str) -> None:
    record.events = [event for event in record.events if event["event"] != kind]


SAME, HISTORY, ROUNDS_DONE = "survivors and newcomer hold", "same digest after", "all 4 rounds done"
KILLED, SURVIVED, NEWCOMER = "the victim got SIGKILL", "the survivors finished", "the newcomer took"
FELL, BEATS, EXITS, TIME = "validation loss fell", "validation loss is not worse", "every other process", "took less"


def test_everything_held() -> None:
    assert failed(recorded()) == []


@pytest.mark.parametrize(
    ("spoil", "which"),
    [
        (lambda r: change(r["c"], "end", digest="other"), {SAME}),
        (lambda r: change(r["newcomer"], "end", digest="other"), {SAME}),
        (lambda r: change(r["newcomer"], "end", t=3), {SAME, ROUNDS_DONE}),
        (lambda r: [change(r[name], "end", digest="") for name in ("b", "c", "newcomer")], {SAME}),
        (lambda r: r.pop("newcomer"), {SAME, NEWCOMER}),
        (lambda r: change(r["victim"], "round", 1, digest="other"), {HISTORY}),
        (lambda r: change(r["newcomer"], "round", 4, digest="other"), {HISTORY}),
        (lambda r: [change(r[name], "end", t=3) for name in ("b", "c", "newcomer")], {ROUNDS_DONE}),
        (lambda r: change(r["alone"], "end", reason="interrupted"), {ROUNDS_DONE}),
        (lambda r: setattr(r["victim"], "exit_code", 0), {KILLED}),
        (lambda r: setattr(r["victim"], "exit_code", -15), {KILLED}),
        (lambda r: r["victim"].events.append({"event": "phase", "phase": "training"}), {KILLED}),
        (lambda r: r["victim"].events.insert(-1, round_event(2, "victim b c")), {KILLED}),
        (lambda r: drop(r["victim"], "round"), {KILLED}),
        (lambda r: r.pop("victim"), {KILLED}),
        (lambda r: change(r["b"], "round", KILL_ROUND, ballots=1), {SURVIVED}),
        (lambda r: drop(r["c"], "round"), {SURVIVED}),
        (lambda r: drop(r["newcomer"], "synced"), {NEWCOMER}),
        (lambda r: change(r["newcomer"], "synced", 3, t=1), {NEWCOMER}),
        (lambda r: change(r["newcomer"], "round", 4, counted=False), {NEWCOMER}),
        (lambda r: change(r["b"], "end", validation_loss=6.0), {FELL, BEATS}),
        (lambda r: change(r["b"], "end", validation_loss=None), {FELL, BEATS}),
        (lambda r: [drop(r[name], "validation") for name in ("b", "c", "victim")], {FELL}),
        (lambda r: change(r["alone"], "end", validation_loss=2.2), {BEATS}),
        (lambda r: r.pop("alone"), {BEATS}),
        (lambda r: setattr(r["c"], "exit_code", 4), {EXITS}),
        (lambda r: setattr(r["newcomer"], "exit_code", None), {EXITS}),
        (lambda r: setattr(r["alone"], "exit_code", -9), {EXITS}),
    ],
)
def test_each_check_fails_for_its_reason(spoil: Callable[[dict[str, Record]], object], which: set[str]) -> None:
    records = recorded()
    spoil(records)
    found = failed(records)
    assert len(found) == len(which) and all(any(name.startswith(w) for w in which) for name in found), found


def test_the_time_limit() -> None:
    assert [name for name in failed(recorded(), 180.0) if name.startswith(TIME)]


def test_without_any_event_nothing_but_the_time_holds() -> None:
    records = {name: Record(name, record.role) for name, record in recorded().items()}
    assert len(failed(records)) == 9
    assert len(failed({})) == 9


def test_a_report_that_names_the_victim_missing_will_do_too() -> None:
    records = recorded()
    lost = [{"peer": IDS["victim"], "reason": "dead", "fraction": 0.25}]
    for name in "bc":
        change(records[name], "round", KILL_ROUND, ballots=1, missing=lost)
    assert failed(records) == []
    reports = reports_of_kill_round(list(records.values()), EXPECTED)
    assert {name: report.missing[0].reason for name, report in reports.items()} == {"b": "dead", "c": "dead"}


def test_a_victim_that_was_too_late_for_its_round_dies_in_the_next() -> None:
    records = recorded()
    late = (Missing(IDS["victim"], "not ready", 1.0),)
    for name in "bc":
        change(records[name], "round", KILL_ROUND, **round_event(KILL_ROUND, "b c", missing=late))
    records["victim"].events.insert(-1, round_event(KILL_ROUND, "b c", missing=late) | {"counted": False})
    assert failed(records) == []
    for name in "bc":
        change(records[name], "round", KILL_ROUND + 1, missing=[])
    (name,) = failed(records)
    assert name.startswith(SURVIVED)


def test_a_newcomer_that_is_quicker_than_the_round_of_the_kill_takes_over_what_that_gave() -> None:
    records = recorded()
    records["newcomer"].events.insert(1, {"event": "synced", "t": KILL_ROUND - 1})
    assert failed(records) == []


def test_a_survivor_that_was_not_there_at_the_round_of_the_kill_has_no_report_of_it() -> None:
    records = recorded()
    records["c"].events = [event for event in records["c"].events if event.get("t") != KILL_ROUND]
    assert failed(records) == []


def test_as_good_as_one_peer_alone_is_enough_and_a_loss_that_stays_as_it_was_has_not_fallen() -> None:
    records = recorded()
    change(records["alone"], "end", validation_loss=2.25)
    change(records["newcomer"], "synced", t=KILL_ROUND)
    records["b"].events.append({"event": "validation", "t": ROUNDS - 1, "loss": 2.0})  # the first one is that before
    assert failed(records) == []
    for name in ("b", "c", "newcomer", "alone"):
        change(records[name], "end", validation_loss=5.5)
    (name,) = failed(records)
    assert name.startswith(FELL)


def test_exit_codes_as_text() -> None:
    assert [exit_text(code) for code in (0, 3, -9, -200, None)] == [
        "exit 0", "exit 3", "SIGKILL", "signal 200", "still runs",
    ]  # fmt: skip


def test_the_outcome_is_printed_and_saved(tmp_path: Path) -> None:
    records = list(recorded().values())
    out = io.StringIO()
    spec = RunSpec(rounds=ROUNDS, sync_every=2)
    result = write_outcome(tmp_path, spec, records, EXPECTED, 100.0, Console(file=out, width=120))
    assert result["held"] is True
    assert result == json.loads((tmp_path / "result.json").read_text())
    assert result["validation_loss"] == {"before": 5.5, "swarm": 2.25, "alone": 2.5}
    text = out.getvalue()
    for shown in (
        "5.5000",
        "2.2500",
        "2.5000",
        "digest-4",
        "SIGKILL",
        "0.4 s",
        "the round of the kill, by b",
        "2 ballots",
    ):
        assert shown in text, shown
    assert text.count("ok    ") == 10 and "FAILED" not in text
    again: dict[str, list[Any]] = {}
    for line in (tmp_path / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        again.setdefault(event.pop("from"), []).append(event)
    assert again == {record.name: record.events for record in records}


def test_addresses_are_free_in_pairs() -> None:
    found = free_addresses(5)
    ports = [int(address.rpartition(":")[2]) for address in found]
    taken = {port for pair in ports for port in (pair, pair + 1)}
    assert len(taken) == 10
    for port in taken:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


@pytest.mark.parametrize("words", [["--n-peers", "2"], ["--n-peers", "17"], ["--rounds", "1"], ["--sync-every", "0"]])
def test_wrong_arguments(words: list[str], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words[0]):
        main(arguments([*words, "--out", str(tmp_path)]))


def test_an_out_folder_that_cannot_be(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert command(["demo", "--out", str(tmp_path / "file")]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("dlc demo: --out") and said.err.count("\n") == 1 and said.out == ""


def arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def start_demo(tmp_path: Path) -> subprocess.Popen[bytes]:
    """`dlc demo` in a process of its own, with its temporary files below `tmp_path`."""
    (tmp_path / "tmp").mkdir()
    env = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    command = [sys.executable, "-m", "dlc", "demo", "--out", str(tmp_path / "out")]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def processes_with(text: str) -> list[int]:
    """Running processes whose command line holds `text`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left_behind(tmp_path: Path, number: signal.Signals) -> None:
    demo = start_demo(tmp_path)
    mark = str(tmp_path / "tmp")  # in the --state-dir of each child
    try:
        wait_until(lambda: len(processes_with(mark)) == 3, what="three peers run")
        demo.send_signal(number)
        assert demo.wait(180.0) == (130 if number == signal.SIGINT else -number)
        wait_until(lambda: not processes_with(mark), what="all peers are gone")
        if number == signal.SIGINT:
            assert list((tmp_path / "tmp").iterdir()) == []
    finally:
        demo.kill()
        demo.communicate()


def test_a_ctrl_c_that_comes_while_a_peer_is_started_ends_the_demo_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An exception raised there could be lost, or leave a process that nobody knows of."""
    start, pids = Children.start, list[int]()

    def interrupted(self: Children, name: str, command: list[str], *args: Any) -> Any:
        stdout = start(self, name, [sys.executable, "-c", "import time; time.sleep(600)"], *args)
        pids.append(self.pid(name))
        if len(pids) == 3:
            with contextlib.suppress(KeyboardInterrupt):  # as what runs around a fork does
                os.kill(os.getpid(), signal.SIGINT)
        return stdout

    monkeypatch.setattr(Children, "start", interrupted)
    assert main(arguments(["--out", str(tmp_path)])) == 130
    assert "dlc demo: stopped" in capsys.readouterr().out
    assert len(pids) == 3 and not any(psutil.pid_exists(pid) for pid in pids)


def test_a_sigterm_right_at_the_start_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(prefix: str) -> str:
        (folder := tmp_path / f"{prefix}x").mkdir()
        signal.raise_signal(signal.SIGTERM)
        return str(folder)

    started: list[str] = []
    monkeypatch.setattr("dlc.demo.tempfile.mkdtemp", interrupted)
    monkeypatch.setattr(Children, "start", lambda self, name, *args, **options: started.append(name) or io.BytesIO())
    monkeypatch.setattr(Children, "exit_code", lambda self, name, wait_s=0.0: None)
    before = signal.signal(signal.SIGTERM, lambda number, frame: pytest.fail("nobody looked for it"))
    try:
        assert main(arguments(["--out", str(tmp_path / "out")])) == 130
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "dlc demo: stopped" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_victim_that_gets_to_send_nothing_dies_before_its_last_chunk_is_finished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine all that the others sent was there first, and it outlived the round."""
    kills: list[tuple[int, int]] = []
    with swarm(3) as peers:
        victim = peers[0]
        node = victim._ask(lambda node, now: node)
        next_bulk = node.next_bulk
        monkeypatch.setattr(node, "next_bulk", lambda to: next_bulk(to) if not unfinished(node) else None)
        monkeypatch.setattr("dlc.cli.fault.os.kill", lambda pid, number: kills.append((number, unfinished(node))))
        said: list[str] = []
        kill_in_round(victim, "default", 1, lambda: said.append("reducing"))
        reports = together(peers, lambda peer, i: peer.all_reduce(torch.ones(300_000), patience_s=ROUND_S))
    assert {report.t for report in reports} == {1}
    assert kills == [(signal.SIGKILL, 1)] and said == ["reducing"]


class ForkedChild(Forked):
    """`subprocess.Popen` for `Children`: of `env NAME=VALUE ... python -P -m MODULE WORDS...` without the imports."""

    def __init__(self, command: Sequence[str], *, stderr: IO[bytes], **_: object) -> None:
        at = command.index("-m")
        assert command[at - 2 : at] == [sys.executable, "-P"]
        variables = dict(word.split("=") for word in command[1 : at - 2])
        super().__init__(command[at + 1], command[at + 2 :], Path(stderr.name), {**os.environ, **variables})

    def wait(self, timeout: float) -> int:
        try:
            return super().wait(timeout)
        except AssertionError:
            raise subprocess.TimeoutExpired("", timeout) from None


@pytest.mark.skipif(not AVAILABLE, reason="this system has no forkserver")
def test_the_demo_on_real_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that takes nobody for dead whom a busy machine does not run for some seconds."""
    processes = SimpleNamespace(Popen=ForkedChild, PIPE=None, DEVNULL=None, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr("dlc.monitor.children.subprocess", processes)
    monkeypatch.setattr("dlc.demo.RunSpec", partial(RunSpec, timeouts=TimeoutsSpec(probe_s=1.0, chunk_s=30.0)))
    monkeypatch.setattr("dlc.demo.free_addresses", addresses_for_tests)  # other tests run beside this one
    monkeypatch.setattr("dlc.demo.LIMIT_S", E2E_S)
    monkeypatch.setattr("dlc.demo.SILENCE_MAX_S", E2E_S)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    # The newcomer's start is to take less than the end of the victim's round and the last two rounds.
    code = main(arguments(["--out", str(tmp_path / "out"), "--rounds", "3", "--sync-every", "10", "--json"]))
    result = json.loads(capsys.readouterr().out)
    not_held = [check for check in result["checks"] if not check["held"]]
    assert code == (1 if not_held else 0)
    assert not [check for check in not_held if not check["name"].startswith(BEATS)], not_held  # too short for that one
    assert {peer["exit"] for peer in result["peers"]} == {"exit 0", "SIGKILL"}
    assert (tmp_path / "out" / "result.json").exists()
    assert list((tmp_path / "tmp").glob("dlc-demo-*")) == []
