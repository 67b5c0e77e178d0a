"""Signals while what there is to say cannot be said."""

import os
import subprocess
import sys

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
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=end, timeout=60, check=False
        )
    finally:
        os.close(end)
    assert done.stdout == b"the end is saved\n"
    assert done.returncode == 0
