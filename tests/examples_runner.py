"""What test_examples starts: it runs examples one after another, each peer in a fork of this process.

    python -m tests.examples_runner LIMIT_S JOBS     JOBS: JSON, [[log, name, [words of the first peer, ...]], ...]

For each job it prints its log and the exit statuses of its peers. A peer that takes longer than LIMIT_S says where it
stands, and ends.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import dlc
import dlc.compat.hivemind.peer_swarm  # once for all
from tests.helpers import wait_until
from tests.swarm import PATIENT, ROOT


def main(limit_s: int, jobs: Sequence[tuple[str, str, Sequence[Sequence[str]]]]) -> None:
    os.chdir(ROOT)
    sys.path.insert(0, "examples")
    join: Any = dlc.Peer.join.__func__  # type: ignore[attr-defined]
    dlc.Peer.join = classmethod(partial(join, timeouts=PATIENT))  # type: ignore[assignment]
    for log, name, starts in jobs:
        peers: list[int] = []
        for words in starts:
            if peers:
                wait_until(lambda log=log, last=peers[-1]: _waits(Path(log), last), limit_s + 60)
            peers.append(os.fork() or _run(log, name, words, limit_s))
        print(log, *(os.waitstatus_to_exitcode(os.waitpid(peer, 0)[1]) for peer in peers), flush=True)


def _waits(log: Path, peer: int) -> bool:
    """The peer waits for another one, or has ended."""
    over = os.waitid(os.P_PID, peer, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return over is not None or (log.exists() and "training begins when" in log.read_text())


def _run(log: str, name: str, words: Sequence[str], limit_s: int) -> int:
    """In the new process, which ends here."""
    status = 1
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1), os.dup2(file, 2)
        signal.signal(signal.SIGALRM, signal.default_int_handler), signal.alarm(limit_s)
        sys.argv = [name, *words]
        runpy.run_path(f"examples/{name}.py", run_name="__main__")
        status = 0
    except SystemExit as end:
        print(end)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
