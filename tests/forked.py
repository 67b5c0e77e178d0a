"""Processes that do not import torch and transformers anew, which would take five seconds of processor time each.

They are forked from one server (multiprocessing's forkserver) that has imported all of it and runs nothing else; a test
process starts its server when it first needs one. `Forked` runs `python -m MODULE WORDS...` in such a process.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

AVAILABLE = "forkserver" in multiprocessing.get_all_start_methods()
PRELOAD = ["dlc.train.trainer", "dlc.cli.join", "dlc.cli.console", "transformers.models.llama.modeling_llama"]
PRELOAD += ["tests.resuming", "transformers.trainer", "lightning.pytorch"]
"""What is not installed is passed over."""

CONTEXT = multiprocessing.get_context("forkserver" if AVAILABLE else "spawn")
CONTEXT.set_forkserver_preload(PRELOAD)


class Forked:
    """Of `subprocess.Popen` what tests need: its output is in `stdout`, its stderr is added to the file `log`.

    daemon: it ends with this process, and may have no children by `multiprocessing` itself.
    """

    def __init__(
        self, module: str, words: Sequence[str], log: Path, env: Mapping[str, str], *, daemon: bool = True
    ) -> None:
        log.touch()
        ours, theirs = CONTEXT.Pipe(duplex=False)
        self._process = CONTEXT.Process(
            target=_run, args=(module, list(words), theirs, str(log), dict(env), os.getcwd()), daemon=daemon
        )
        self._process.start()
        theirs.close()
        with ours:
            self.stdout = os.fdopen(os.dup(ours.fileno()), "rb")

    def poll(self) -> int | None:
        """What it returned, negative for the signal that ended it; None: it still runs."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        assert code is not None, f"still running after {timeout:g} s"
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None and self._process.pid is not None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()


def _run(module: str, words: list[str], stdout: Connection, log: str, env: dict[str, str], folder: str) -> None:
    """In the new process: as `python -m` runs it."""
    errors = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(stdout.fileno(), 1)
    os.dup2(errors, 2)
    os.close(errors)
    stdout.close()  # the end of the output is when descriptor 1 is closed
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
