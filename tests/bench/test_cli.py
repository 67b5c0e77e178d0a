"""The command line of `dlc bench`: help, sentences, exit codes, JSON, and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dlc.bench.children import LOCAL_MAX
from dlc.bench.link import LinkReport, StreamRates
from dlc.bench.matrix import MatrixReport, PairReport
from dlc.bench.stream import Stopped
from dlc.cli import main
from dlc.cli.bench import _interruptible
from dlc.comm.security import generate_run_key
from tests.helpers import wait_until

END_S = WAIT_S = 180.0


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DLC_KEY_FILE", raising=False)


@pytest.fixture
def key(tmp_path: Path) -> str:
    path = tmp_path / "run.key"
    path.write_text(generate_run_key())
    path.chmod(0o600)
    return str(path)


class Running:
    """`dlc bench ...` as a process of its own; killed in the end, with its children."""

    def __init__(self, *words: str) -> None:
        command = [sys.executable, "-m", "dlc", "bench", *words]
        pipe, environment = subprocess.PIPE, os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)

    def line(self, stream: str = "stdout") -> str:
        pipe = getattr(self.process, stream)
        return str(pipe.readline()).strip()

    def until(self, said: str) -> None:
        """Read stderr until that is said."""
        while said not in (line := self.line("stderr")):
            assert line, f"it ended without saying {said!r}"

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=END_S)
        return self.process.returncode, out, err

    def close(self) -> None:
        if self.process.poll() is None:
            for process in [*psutil.Process(self.process.pid).children(recursive=True), self.process]:
                process.kill()
            self.process.communicate()


@pytest.fixture
def run() -> Iterator[Any]:
    started: list[Running] = []

    def start(*words: str) -> Running:
        started.append(Running(*words))
        return started[-1]

    yield start
    for running in started:
        running.close()


def fails(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    try:
        code = main(["bench", *words])
    except SystemExit as exit:  # argparse
        code = int(str(exit.code))
    said = capsys.readouterr()
    assert said.out == "" and "Traceback" not in said.err
    return code, said.err


@pytest.mark.parametrize("tool", ["", "serve", "link", "matrix", "allreduce", "codec"])
def test_every_tool_has_help_with_an_example(capsys: pytest.CaptureFixture[str], tool: str) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["bench", *([tool] if tool else []), "--help"])
    said = capsys.readouterr().out
    assert exit.value.code == 0 and f"  dlc bench {tool}".rstrip() in said
    assert not tool or ("--json" in said and "Exit codes: 0 " in said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "TOOL"),
        (["speed"], "invalid choice: 'speed'"),
        (["serve"], "--listen"),
        (["serve", "--listen", "somewhere"], "no address"),
        (["serve", "--listen", "0.0.0.0:0"], "needs a run key"),
        (["link", "--to", "host"], "'host' is no address"),
        (["link", "--to", "host:0"], "port 0"),
        (["link", "--to", "a:1,b:1"], "dlc bench matrix"),
        (["link", "--to", ""], "it is empty"),
        (["matrix", "--peers", " , "], "it is empty"),
        (["allreduce", "--peers", ""], "it is empty"),
        (["allreduce", "--local", "2", "--pause", "-5"], "above 0"),
        (["allreduce", "--local", "2", "--pause", "nan"], "above 0"),
        (["codec", "--device", "meta"], "'meta' cannot be used"),
        (["link", "--to", "a:1", "--streams", "many"], "--streams"),
        (["serve", "--listen", "127.0.0.1:65535"], "listen on another"),
        (["matrix", "--peers", "a:1", "--listen", "127.0.0.1:65535"], "listen on another"),
        (["link", "--to", "a:1", "--max-mb", "0"], "--max-mb is 0; choose 1 to 100000 MB"),
        (["link", "--to", "a:1", "--max-mb", "1e12"], "--max-mb is 1e+12; choose 1 to 100000 MB"),
        (["link", "--to", "a:1", "--max-mb", "nan"], "--max-mb is nan; choose 1 to 100000 MB"),
        (["link", "--to", "a:1", "--max-mb", "x"], "--max-mb: 'x' is no number"),
        (["matrix", "--peers", "a:1,b:1", "--max-mb", "x"], "--max-mb: 'x' is no number"),
        (["allreduce", "--local", "2", "--mb", "x"], "--mb: 'x' is no number"),
        (["allreduce", "--local", "2", "--mb", "nan"], "--mb is nan"),
        (["codec", "--mb", "x"], "--mb: 'x' is no number"),
        (["codec", "--mb", "inf"], "--mb is inf"),
        (["link", "--to", "a:1", "--seconds", "1e6"], "--seconds"),
        (["link", "--to", "a:1", "--key-file", "nowhere.key"], "dlc key > nowhere.key"),
        (["matrix", "--peers", "a:1"], "two hosts"),
        (["matrix", "--peers", "a:1,b:1", "--advertise", "c"], "--listen"),
        (["matrix", "--peers", "a:1,b:1", "--png", "m.jpg"], ".png"),
        (["allreduce"], "--local"),
        (["allreduce", "--local", "1"], "at least 2 peers"),
        (["allreduce", "--peers", "127.0.0.1:4600"], "list all in --peers, this one included"),
        (["allreduce", "--local", "100000"], "choose up to 64 processes"),
        (["allreduce", "--local", "2", "--codec", "nix"], "known: fp32, fp16, bf16, int8, int4\n"),
        (["allreduce", "--local", "2", "--codec", "int9"], "int8, int4; did you mean 'int"),
        (["allreduce", "--local", "2", "--codec", "topk"], "for training only"),
        (["allreduce", "--local", "2", "--links", "f"], "--peers"),
        (["allreduce", "--local", "2", "--threads", "100000"], "--threads is 100000"),
        (["allreduce", "--peers", "a:1,b:1", "--links", "nowhere.json"], "nowhere.json"),
        (["allreduce", "--peers", "a:1,b:1,c:1", "--n-peers", "2", "--links", "f"], "--n-peers is 2"),
        (["codec", "--device", "abacus"], "abacus"),
        (["codec", "--mb", "0"], "--mb is 0; choose more than 0, up to"),
        (["allreduce", "--local", "2", "--mb", "0"], "--mb is 0; choose more than 0, up to"),
        (["codec", "--mb", "-1"], "--mb"),
    ],
)
def test_wrong_usage_is_one_clear_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    code, text = fails(capsys, *words)
    assert code == 2 and said in text


def test_processes_are_no_more_than_fit_and_the_help_says_how_many(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dlc.bench.memory._free_bytes", lambda: 2e9)
    code, text = fails(capsys, "allreduce", "--local", "4", "--mb", "100")
    assert code == 2 and "takes about 3.0 GB of memory, and 2.0 GB are free" in text
    with pytest.raises(SystemExit):
        main(["bench", "allreduce", "--help"])
    assert f"up to {LOCAL_MAX}" in capsys.readouterr().out


@pytest.mark.alone
def test_serve_link_and_matrix_together(run: Any, key: str, tmp_path: Path) -> None:
    site = run("serve", "--listen", "127.0.0.1:0", "--key-file", key, "--json")
    serving = json.loads(site.line())
    address = f"127.0.0.1:{serving['port']}"
    budget = ("--key-file", key, "--seconds", "10", "--max-mb", "100000", "--json")
    code, out, err = run("link", "--to", address, "--streams", "1,2", *budget).end()
    report = json.loads(out)
    two = report["streams"][1]
    assert code == (4 if None in (two["up_mbps"], two["down_mbps"]) else 0), err
    assert report["up_mbps"] and report["down_mbps"], err
    assert report["to"] == address and report["encrypted"] and [s["n"] for s in report["streams"]] == [1, 2]
    assert "2 connections down" in err, "progress"
    picture = tmp_path / "m.png"
    sites = ("--peers", address, "--listen", "127.0.0.1:0", "--png", str(picture))
    code, out, err = run("matrix", *sites, *budget, "--seconds", "4").end()
    assert code == 0, err
    matrix = json.loads(out)
    assert len(matrix["pairs"]) == 2 and all(pair["up_mbps"] for pair in matrix["pairs"]) and picture.exists()
    assert matrix["sites"][1] == address
    assert main(["bench", "link", "--to", address]) == 3, "no key"
    site.process.send_signal(signal.SIGINT)
    code, _, err = site.end()
    assert code == 0 and "no longer serving" in err
    for port in (serving["port"], serving["bulk_port"]):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))


@pytest.mark.parametrize(
    ("rates", "code", "said"),
    [
        (((9.0, 8.0), (9.0, 8.0)), 0, ""),
        (((9.0, 8.0), (None, 7.0)), 4, "1 of 4 rates could not be told"),
        (((None, None), (None, None)), 3, "4 of 4 rates could not be told"),
    ],
)
def test_rates_that_are_missing_are_told_by_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rates: Any, code: int, said: str
) -> None:
    streams = tuple(StreamRates(n, *of_n) for n, of_n in enumerate(rates, 1))
    report = LinkReport("h:1", True, 1.0, 1.0, 1.0, 9, *rates[0], streams, 9.0, 9.0, 9.0)
    monkeypatch.setattr("dlc.bench.link.measure", lambda *words, **options: report)
    assert main(["bench", "link", "--to", "h:1", "--log-level", "error"]) == code
    shown = capsys.readouterr()
    assert shown.err.count("\n") == bool(said) and said in shown.err and "up Mbit/s" in shown.out


@pytest.mark.parametrize(("up_mbps", "code"), [(9.0, 0), (None, 4)])
def test_a_picture_that_cannot_be_written_costs_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, up_mbps: Any, code: int
) -> None:
    def draw(report: MatrixReport, path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    pairs = (PairReport("a:1", "b:1", 9.0, 1.0, ""), PairReport("b:1", "a:1", up_mbps, 1.0, ""))
    report = MatrixReport(("a:1", "b:1"), False, pairs, 3.0)
    monkeypatch.setattr("dlc.bench.matrix.measure_matrix", lambda *words, **options: report)
    monkeypatch.setattr("dlc.bench.heatmap.check", lambda path: None)
    monkeypatch.setattr("dlc.bench.heatmap.draw", draw)
    picture = tmp_path / "m.png"
    assert main(["bench", "matrix", "--peers", "a:1,b:1", "--png", str(picture), "--json"]) == code
    shown = capsys.readouterr()
    assert json.loads(shown.out)["pairs"][0]["up_mbps"] == 9.0
    assert f"{picture} could not be written: No space left on device" in shown.err


def test_transfers_that_ended_with_their_bytes_are_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    why = "5 MB were through before the rate had settled: give more --max-mb"
    for rates, code, n_lines in (
        (StreamRates(1, 90.0, 90.0, bytes_ended=True), 0, 1),
        (StreamRates(1, None, None, why, why, bytes_ended=True), 3, 2),
    ):
        report = LinkReport("h:1", True, 1.0, 1.0, 1.0, 9, rates.up_mbps, rates.down_mbps, (rates,), 9.0, 9.0, 9.0)
        monkeypatch.setattr("dlc.bench.link.measure", lambda *words, found=report, **options: found)
        assert main(["bench", "link", "--to", "h:1", "--json", "--log-level", "error"]) == code
        shown = capsys.readouterr()
        assert json.loads(shown.out)["streams"][0]["bytes_ended"] is True
        assert shown.err.count("\n") == n_lines and "--max-mb ended transfers" in shown.err
        assert shown.err.count(why) == n_lines - 1


@pytest.mark.alone
def test_ctrl_c_ends_a_link_at_once_and_frees_the_site(run: Any, key: str) -> None:
    site = run("serve", "--listen", "127.0.0.1:0", "--key-file", key, "--json")
    address = f"127.0.0.1:{json.loads(site.line())['port']}"
    link = run("link", "--to", address, "--key-file", key, "--seconds", "120", "--max-mb", "100000", "--streams", "3")
    link.until("3 connections up")
    link.process.send_signal(signal.SIGINT)
    code, out, err = link.end()
    assert code == 130 and out == "" and "interrupted" in err and "Traceback" not in err
    again = ("--key-file", key, "--seconds", "5", "--max-mb", "100000", "--streams", "1")
    code, _, err = run("link", "--to", address, *again).end()
    assert code == 0 and "busy" not in err


def test_a_ctrl_c_that_is_lost_where_it_comes_ends_the_measurement_all_the_same() -> None:
    """pyzmq prints and drops an exception that a signal raises while it checks a result: so none is raised there."""
    with pytest.raises(KeyboardInterrupt), _interruptible() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        wait_until(stop.is_set, WAIT_S, "the signal is handled")
        raise Stopped("as every poll does then")
    with pytest.raises(KeyboardInterrupt), _interruptible() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        wait_until(stop.is_set, WAIT_S, "the signal is handled")
        os.kill(os.getpid(), signal.SIGINT)
        wait_until(lambda: False, 5, "the second one ends it at once")


def test_a_kill_ends_it_as_ctrl_c_does() -> None:
    with pytest.raises(KeyboardInterrupt), _interruptible() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(stop.is_set, WAIT_S, "the signal is handled")
        raise Stopped("as every poll does then")


def test_allreduce_of_processes_on_this_host(run: Any, key: str) -> None:
    words = ("--local", "2", "--mb", "1", "--rounds", "2", "--codec", "fp32", "--key-file", key, "--json")
    code, out, err = run("allreduce", *words).end()
    assert code == 0, err
    report = json.loads(out)
    assert report["n_peers"] == 2 and report["encrypted"] and len(report["seconds"]) == 2
    assert len({peer["peer"] for peer in report["peers"]}) == 2
    assert report["seconds_min"] <= report["seconds_median"] and report["limit_s"] is None


def test_ctrl_c_ends_an_allreduce_and_its_processes(run: Any) -> None:
    reduce = run("allreduce", "--local", "2", "--mb", "1", "--rounds", "100000")
    reduce.until("round 2 of")
    children = psutil.Process(reduce.process.pid).children(recursive=True)
    assert children
    reduce.process.send_signal(signal.SIGINT)
    code, _, err = reduce.end()
    assert code == 130 and err.count("interrupted") == 1
    wait_until(lambda: not any(child.is_running() for child in children), WAIT_S, "the other peers end")


def test_a_process_that_is_killed_does_not_cost_what_was_measured(run: Any) -> None:
    reduce = run("allreduce", "--local", "2", "--mb", "1", "--rounds", "100000", "--json")
    reduce.until("round 3 of")
    (child,) = psutil.Process(reduce.process.pid).children(recursive=True)
    child.kill()
    code, out, err = reduce.end()
    report = json.loads(out)
    assert code == 4 and len(report["peers"]) == 1 and len(report["seconds"]) >= 2
    assert "SIGKILL" in report["stopped"] and report["stopped"] in err and "stands above" not in err


def test_codec_prints_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "codec", "--mb", "1", "--device", "cpu", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {c["codec"] for c in document["codecs"]} >= {"fp32", "fp16", "bf16"} and document["note"] == ""
    assert main(["bench", "codec", "--mb", "1", "--device", "cpu"]) == 0
    assert "encode GB/s" in capsys.readouterr().out
