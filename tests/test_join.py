"""Real `dlc join` processes on loopback. Every wait has a deadline and a reason."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dlc.cli.interrupt import Interrupts
from dlc.comm.security import generate_run_key

SRC = Path(__file__).resolve().parent.parent / "src"
DEADLINE_S = 90.0
"""Most of it is for importing torch and transformers on a busy machine."""
RUN = """\
run = "test"
sync_every = 4
rounds = {rounds}
[model.config]
model_type = "llama"
vocab_size = 256
hidden_size = 8
intermediate_size = 16
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 2
max_position_embeddings = 16
[data]
source = "{text}"
seq_len = 16
[inner]
batch_size = 2
warmup_steps = 2
"""
Event = dict[str, Any]


class Process:
    """One `dlc join --json`, and the events it has told so far."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.state = folder
        self._log = folder.with_suffix(".log")
        # The shared machine: one thread each, and no colours, proxies or keys of the one who runs the tests.
        env = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", "DLC_KEY_FILE": ""}
        command = [sys.executable, "-m", "dlc", "join", "--json", "--state-dir", str(folder), *words]
        with self._log.open("ab") as log:
            self._child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=env)
        self.events: list[Event] = []
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def event(self, name: str, **fields: Any) -> Event:
        """The first event that matches, waited for; what was told before counts too."""
        end, seen = time.monotonic() + DEADLINE_S, 0
        while True:
            for event in self.events[seen:]:
                if event["event"] == name and fields.items() <= event.items():
                    return event
            seen = len(self.events)
            self._take(end, f"event {name} {fields}")

    def exit_code(self) -> int:
        end = time.monotonic() + DEADLINE_S
        with contextlib.suppress(EOFError):
            while True:
                self._take(end, "end of output")
        return self._child.wait(max(0.0, end - time.monotonic()))

    def _take(self, end: float, what: str) -> None:
        try:
            line = self._lines.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            raise AssertionError(f"no {what} within {DEADLINE_S:g} s\n{self.log()}") from None
        if line is None:
            self._lines.put(None)
            raise EOFError(f"ended without {what}\n{self.log()}")
        self.events.append(json.loads(line))

    def signal(self, number: int) -> None:
        self._child.send_signal(number)

    def kill(self) -> None:
        self._child.kill()
        self._child.wait(DEADLINE_S)

    def log(self) -> str:
        return self._log.read_text("utf-8", "replace")[-4000:]

    def all(self, name: str) -> list[Event]:
        return [event for event in self.events if event["event"] == name]


class Host:
    """Starts processes that do not outlive the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.text, self.key = folder / "text.txt", folder / "run.key"
        self.text.write_bytes(bytes(range(32, 127)) * 50)
        self.key.touch(mode=0o600)
        self.key.write_text(generate_run_key())
        self._started: list[Process] = []

    def config(self, rounds: int) -> str:
        path = self.folder / f"RUN-{rounds}.toml"
        path.write_text(RUN.format(rounds=rounds, text=self.text.as_posix()))
        return str(path)

    def start(self, name: str, *words: str) -> Process:
        self._started.append(Process(self.folder / name, *words))
        return self._started[-1]

    def close(self) -> None:
        for process in self._started:
            process.kill()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path)
    yield host
    host.close()


def two_addresses() -> list[str]:
    """Addresses nobody listens at; the port after each one is free too, for the bulk lane."""
    found: list[str] = []
    for port in range(21_000 + os.getpid() % 4000, 32_000, 2):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for number in (port, port + 1):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", number))
            found.append(f"127.0.0.1:{port}")
        if len(found) == 2:
            return found
    raise AssertionError("no free ports")


def test_two_that_start_together_train_one_model_to_the_end(host: Host) -> None:
    config, (one, two) = host.config(rounds=2), two_addresses()
    common = ["--config", config, "--key-file", str(host.key)]
    a = host.start("a", *common, "--listen", one, "--peers", two)
    b = host.start("b", *common, "--listen", two, "--peers", one)
    ends = [process.event("end") for process in (a, b)]
    assert [process.exit_code() for process in (a, b)] == [0, 0]
    assert [(end["reason"], end["t"]) for end in ends] == [("rounds", 2)] * 2
    assert ends[0]["digest"] == ends[1]["digest"] != ""
    assert ends[0]["validation_loss"] == ends[1]["validation_loss"]
    ids = {a.event("started")["peer"], b.event("started")["peer"]}
    for round_a, round_b in zip(a.all("round"), b.all("round"), strict=True):
        assert (round_a["t"], round_a["head"], round_a["digest"]) == (round_b["t"], round_b["head"], round_b["digest"])
        named = {share["peer"] for share in round_a["contributors"]} | {lost["peer"] for lost in round_a["missing"]}
        assert named == ids
    assert any(len(event["contributors"]) == 2 for event in a.all("round"))
    for end in ends:
        assert Path(end["model"], "model.safetensors").is_file() and Path(end["checkpoint"]).is_file()


def test_join_by_the_printed_line_leave_by_ctrl_c_and_resume(host: Host) -> None:
    config = host.config(rounds=0)
    founder = host.start("founder", "--config", config, "--key-file", str(host.key), "--listen", "127.0.0.1:0")
    line = shlex.split(founder.event("started")["join"])
    assert line[:3] == ["dlc", "join", "--peers"]
    founder.event("round", t=2)
    late = host.start("late", *line[2:])
    assert late.event("started")["run"] == "test" and late.event("synced")["t"] >= 2
    shared = late.event("round", counted=True)
    same = founder.event("round", t=shared["t"])
    assert shared["digest"] == same["digest"] and shared["head"] == same["head"]

    founder.signal(signal.SIGINT)  # who founded it leaves; the other goes on alone
    left = founder.event("end")
    assert (left["reason"], left["validation_loss"], founder.exit_code()) == ("interrupted", None, 0)
    late.event("member", change="left")
    late.event("round", t=left["t"] + 3)
    late.signal(signal.SIGTERM)
    last = late.event("end")
    assert late.exit_code() == 0 and last["t"] > left["t"]

    again = host.start("late", *["--config", config, "--key-file", str(host.key), "--listen", "127.0.0.1:0"])
    assert again.event("started")["peer"] == late.event("started")["peer"]
    assert again.event("synced")["t"] == last["t"]
    assert again.event("step")["t"] == last["t"]
    again.event("round", t=last["t"] + 1)
    again.signal(signal.SIGINT)
    assert again.exit_code() == 0


def test_a_wrong_key_and_another_run_are_refused(host: Host) -> None:
    founder = host.start("founder", "--config", host.config(rounds=0), "--key-file", str(host.key))
    address = "127.0.0.1:" + founder.event("started")["address"].rpartition(":")[2]
    other_key = host.folder / "other.key"
    other_key.touch(mode=0o600)
    other_key.write_text(generate_run_key())
    stranger = host.start("stranger", "--peers", address, "--key-file", str(other_key))
    differs = host.start("differs", "--peers", address, "--key-file", str(host.key), "--config", host.config(rounds=7))
    assert stranger.exit_code() == 3 and "refused our run key" in stranger.log()
    assert differs.exit_code() == 3 and "rounds: 7 here, 0 there" in differs.log()
    assert not stranger.events and not differs.events


def test_the_second_signal_ends_the_process_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr("dlc.cli.interrupt.os._exit", ended.append)
    with Interrupts() as interrupts:
        interrupts.can_save = True
        signal.raise_signal(signal.SIGINT)
        assert interrupts.stop.is_set() and not ended
        signal.raise_signal(signal.SIGINT)
        assert ended == [130]
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
