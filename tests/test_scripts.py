"""Scripts that end by an exception, Ctrl-C or sys.exit leave nothing behind; forked children harm nobody.

One interpreter imports what they need, and forks for each script before any peer exists; a script is a session of its
own, and its end is the interpreter's own. `survivor` is a member that stays, in this process.
"""

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

import pytest

from dlc.peer import Peer
from tests.helpers import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the runner forks after torch was imported")

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 200.0
"""For all of them: some seconds on an idle machine."""
RUNNER = """\
import json, os, sys
import torch, torch.utils.data, dlc.peer
for line in sys.stdin.read().splitlines():
    name, script = json.loads(line)
    child = os.fork()
    if not child:
        os.setsid()
        file = os.open(name + ".log", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1), os.dup2(file, 2), os.close(file)
        del child, file, line
        exec(script)
        sys.exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        os.killpg(child, 0)
        left = True
    except ProcessLookupError:
        left = False
    print(json.dumps([name, status, left]), flush=True)
"""
JOIN = """\
import os, signal, sys, threading, torch
from dlc.peer import Peer
peer = Peer.join(["ADDRESS"], join_timeout_s=60.0)
print("joined", peer.id, peer.address, flush=True)
"""
SCRIPTS = {
    "exception": JOIN
    + """\
peer.on_member_change(print)
raise RuntimeError("out of ideas")
""",
    "ctrl-c": JOIN
    + """\
def interrupt():
    while not peer._pending:
        threading.Event().wait(0.01)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
peer.all_reduce(torch.ones(3), timeout_s=1000.0)
""",
    "exit": JOIN
    + """\
with peer:
    handle = peer.all_reduce(torch.ones(3), timeout_s=1000.0, async_op=True)
    sys.exit(3)
""",
    "forks": """\
import os, sys, torch
from concurrent.futures import ThreadPoolExecutor
from torch.utils.data import DataLoader, Dataset
from dlc.errors import UsageError
from dlc.peer import Peer

class Data(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        try:
            one.members()
        except UsageError as error:
            return str(error)

def average():
    for _ in range(10):  # a busy machine may find one of them dead for a moment
        with ThreadPoolExecutor(2) as pool:
            calls = [pool.submit(p.all_reduce, torch.ones(3), timeout_s=60.0) for p in (one, two)]
            if all(call.result().complete for call in calls):
                return
    sys.exit("no round of both")

with Peer.join() as one, Peer.join([one.address], join_timeout_s=60.0) as two:
    for batch in DataLoader(Data(), batch_size=2, num_workers=2, multiprocessing_context="fork"):
        assert all("join in the child" in text for text in batch), batch
        average()
    if not (child := os.fork()):
        sys.exit(7)  # through the ends of both `with` blocks, and the interpreter's own
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    average()
    print("joined", one.id, one.address, flush=True)
""",
}


@pytest.fixture(scope="module")
def survivor() -> Iterator[Peer]:
    with Peer.join() as peer:
        yield peer


@pytest.fixture(scope="module")
def ends(survivor: Peer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, bool, str]]:
    """By script: exit status, whether one of its processes is left, and what it printed."""
    folder = tmp_path_factory.mktemp("scripts")
    lines = [json.dumps([f"{folder}/{n}", s.replace("ADDRESS", survivor.address)]) for n, s in SCRIPTS.items()]
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input="\n".join(lines),
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    found: list[list[Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    return {Path(n).name: (status, left, Path(f"{n}.log").read_text()) for n, status, left in found}


@pytest.mark.parametrize(
    ("name", "status", "told"),
    [
        ("exception", 1, "out of ideas"),
        ("ctrl-c", -signal.SIGINT, "KeyboardInterrupt"),
        ("exit", 3, "joined"),
        ("forks", 0, "joined"),
    ],
)
def test_a_script_ends_as_it_should_and_leaves_no_process_and_no_port(
    name: str, status: int, told: str, ends: dict[str, tuple[int, bool, str]]
) -> None:
    found, left, text = ends[name]
    assert found == status and told in text, text
    assert not left, "a process of it is still there"
    for peer in (line.split() for line in text.splitlines() if line.startswith("joined")):
        host, _, port = peer[2].rpartition(":")
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that are closing do not count
            free.bind((host, int(port)))


@pytest.mark.parametrize("name", ["exception", "ctrl-c", "exit"])
def test_the_others_are_told_that_it_left(name: str, survivor: Peer, ends: dict[str, tuple[int, bool, str]]) -> None:
    (peer,) = (line.split()[1] for line in ends[name][2].splitlines() if line.startswith("joined"))
    wait_until(lambda: all(not m.alive for m in survivor.members() if m.id == peer), 60.0)
    assert all(m.left for m in survivor.members() if m.id == peer)
