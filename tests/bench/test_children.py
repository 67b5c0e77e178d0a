"""The other processes of `dlc bench allreduce --local`: what they printed counts, however another one ended."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest

from dlc.bench import children as children_module
from dlc.bench.allreduce import PeerReport, Work, combine, take_part
from dlc.bench.children import Children
from dlc.errors import DlcError
from dlc.peer import Peer
from tests.helpers import wait_until

WAIT_S = 120.0
SEEN = PeerReport("p", "a:1", (1.0, 2.0), 0.1, 0.2, 0.3, 1.0, 1.0, 0)
PRINTED = f"print({json.dumps(json.dumps({'peers': [dataclasses.asdict(SEEN)]}))})"
KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
WAITING = "import threading; threading.Event().wait()"


def processes(monkeypatch: pytest.MonkeyPatch, *programs: str) -> Children:
    commands = iter([[sys.executable, "-c", program] for program in programs])
    monkeypatch.setattr(children_module, "_command", lambda options: next(commands))
    return Children(len(programs), {})


def looked(children: Children) -> str:
    """What is said of the first that failed; "" as long as none did."""
    try:
        children.look()
    except DlcError as error:
        return str(error)
    return ""


def test_what_is_told_of_those_that_came_to_an_end_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = f"{PRINTED}; raise SystemExit(4)"
    with processes(monkeypatch, PRINTED, KILLED, stopped) as children:
        wait_until(lambda: bool(looked(children)), WAIT_S, "one has failed")
        found, lost = children.reports()
    assert found == [SEEN, SEEN] and "SIGKILL" in lost and "memory" in lost
    whole = combine([SEEN, *found], Work(4, 1.0, "fp16", 2), False, None, lost)
    assert whole.stopped == lost and whole.seconds == SEEN.seconds and len(whole.peers) == 3


def test_a_status_without_figures_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for program, said in (
        ("raise SystemExit(4)", "exit status 4; its error stands above"),
        (f"{PRINTED}; raise SystemExit(3)", "exit status 3"),
        (f"{PRINTED}; import sys; sys.stdout.flush(); {KILLED}", "SIGKILL"),
    ):
        with processes(monkeypatch, program) as children:
            found, lost = children.reports()
        assert found == [] and said in lost


def test_others_are_not_waited_for_without_end_once_one_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children_module, "LAST_S", 0.0)
    with processes(monkeypatch, WAITING, KILLED) as children:
        found, lost = children.reports()
    assert found == [] and "SIGKILL" in lost


def test_very_many_rounds_are_no_reason_to_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a pipe holds is printed while nobody reads."""
    long = dataclasses.replace(SEEN, seconds=(0.125,) * 100_000)
    program = (
        f"import json; print(json.dumps({{'peers': [{dataclasses.asdict(SEEN)} | {{'seconds': [0.125] * 100000}}]}}))"
    )
    with processes(monkeypatch, program) as children:
        assert children.reports() == ([long], "")


def test_who_fails_before_the_first_round_ends_the_waiting() -> None:
    with Children(1, {"--peers": "127.0.0.1:1", "--codec": "nix"}) as children, Peer.join() as peer:
        with pytest.raises(DlcError, match="exit status 2"):
            take_part(peer, Work(3, 2.0, "fp16", 3), lambda text: None, 600.0, children.look)
