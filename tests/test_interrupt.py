"""Signals while what there is to say cannot be said, and beside another process that asks for the end."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ASKED_TO_STOP = """
import os, signal
from dlc.cli.interrupt import Interrupts
with Interrupts() as interrupts:
    interrupts.can_save = True
    os.kill(os.getpid(), signal.SIGTERM)
    assert interrupts.stop.wait(5)
    print("the end is saved")
"""


HANGS_UP = """
import os, signal
from dlc.cli.interrupt import Interrupts
with Interrupts() as interrupts:
    interrupts.holds = True
    interrupts.can_save = True
    os.kill(os.getpid(), signal.SIGHUP)
    assert interrupts.stop.is_set() == {ends}
    os.kill(os.getpid(), signal.SIGHUP)
    os.kill(os.getpid(), signal.SIGTERM)
    print("still there")
"""
HANGS_UP_EARLY = """
import os, signal
from dlc.cli.interrupt import Interrupts
with Interrupts() as interrupts:
    interrupts.holds = True
    try:
        os.kill(os.getpid(), signal.SIGHUP)
    except KeyboardInterrupt:
        os.kill(os.getpid(), signal.SIGHUP)
        print("has left")
"""
WHILE_IMPORTING = """
import os, signal, sys
from dlc.cli import main
class Importing:
    def find_spec(self, name, path=None, target=None):
        if name == "transformers":
            try:
                os.kill(os.getpid(), signal.SIGINT)
                for _ in range(10):
                    pass
            except KeyboardInterrupt:
                raise RuntimeError("an error of a class") from None
sys.meta_path.insert(0, Importing())
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("words", [("eval", "."), ("export", "empty", "--out", "out")])
def test_ctrl_c_while_a_model_is_yet_to_be_read_is_no_error_of_what_is_imported(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    """What imports a module may take the interrupt for an error, of another name, or for none."""
    (tmp_path / "empty").touch()
    program = [sys.executable, "-c", WHILE_IMPORTING, *words]
    done = subprocess.run(program, capture_output=True, text=True, timeout=180, check=False, cwd=tmp_path)
    assert (done.stdout, done.stderr, done.returncode) == ("", "dlc: interrupted\n", 130)


@pytest.mark.skipif(sys.platform == "win32", reason="has no SIGHUP")
@pytest.mark.parametrize("ignored", [False, True])
def test_a_terminal_that_is_closed_asks_for_a_clean_end_as_often_as_it_is_told(ignored: bool) -> None:
    """The shell and the kernel both tell it. Behind `nohup` it is ignored. What Ctrl-C says then is its first word."""
    done = subprocess.run(
        [sys.executable, "-c", HANGS_UP.format(ends=not ignored)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL) and None,
    )
    assert (done.stdout, done.returncode) == ("still there\n", 0), done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="has no SIGHUP")
def test_a_terminal_that_is_closed_is_told_once_where_there_is_nothing_to_save() -> None:
    """The second time interrupted the leave."""
    program = [sys.executable, "-c", HANGS_UP_EARLY]
    done = subprocess.run(program, capture_output=True, text=True, timeout=180, check=False)
    assert (done.stdout, done.returncode) == ("has left\n", 0), done.stderr


@pytest.mark.parametrize("stderr", ["a pipe that nobody reads", "a full disk", "closed"])
def test_a_stop_that_cannot_be_told_still_saves(stderr: str) -> None:
    if stderr == "a full disk":
        if not os.path.exists("/dev/full"):
            pytest.skip("no /dev/full here")
        end = os.open("/dev/full", os.O_WRONLY)
    else:
        read, end = os.pipe()
        os.close(read)
    program = "import sys; sys.stderr.close()\n" + ASKED_TO_STOP if stderr == "closed" else ASKED_TO_STOP
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=end, timeout=180, check=False
        )
    finally:
        os.close(end)
    assert done.stdout == b"the end is saved\n"
    assert done.returncode == 0


AFTER_A_COMMAND = """
import atexit, os, signal, sys
from dlc.__main__ import main
signal.signal(signal.SIGINT, signal.default_int_handler)
atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))
sys.argv = ["dlc", "key"]
sys.exit(main())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="ends by another signal")
def test_ctrl_c_while_python_ends_prints_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", AFTER_A_COMMAND], capture_output=True, timeout=180, check=False)
    assert (done.returncode, done.stderr) == (130, b"")


ASKED_BY_ANOTHER = """
import os, signal, threading, time
from dlc.cli.interrupt import Interrupts

def ask():
    thread = threading.Thread(target=interrupts.ask)
    thread.start()
    thread.join()

with Interrupts() as interrupts:
    interrupts.holds = True
    interrupts.can_save = {can_save}
    try:
        {first}
        {second}
        assert interrupts.stop.wait(5)
    except KeyboardInterrupt:
        print("nothing to save")
    else:
        print("the end is saved", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
    {third}
"""
SIGNAL = "os.kill(os.getpid(), signal.SIGTERM)"


@pytest.mark.parametrize(
    ("steps", "can_save", "said", "code"),
    [
        (("ask()", "ask()", ""), True, "the end is saved", 0),
        (("ask()", SIGNAL, ""), True, "the end is saved", 130),
        ((SIGNAL, "ask()", ""), True, "the end is saved", 130),
        (("ask()", "time.sleep(60)", "ask()"), False, "nothing to save", 0),
    ],
)
def test_who_is_asked_for_the_end_by_another_still_has_its_own_first_signal(
    steps: tuple[str, str, str], can_save: bool, said: str, code: int
) -> None:
    first, second, third = (step or "pass" for step in steps)
    program = ASKED_BY_ANOTHER.format(can_save=can_save, first=first, second=second, third=third)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=180, check=False)
    assert (done.stdout.strip(), done.returncode) == (said, code), done.stderr
