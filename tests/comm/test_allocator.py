"""What is freed stays in the process."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest

from dlc.comm import allocator

FAULTS = """
import ctypes, resource, sys
from dlc.comm.allocator import keep_freed_chunks

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [libc.malloc(20 << 20) for _ in range(6)]
    for block in blocks:
        ctypes.memset(block, 1, 20 << 20)
    for block in blocks:
        libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1] == "kept":
    assert keep_freed_chunks()
faults()
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's thresholds")
def test_chunks_that_are_freed_are_there_for_the_next_ones() -> None:
    """The pages of each round's chunks were taken anew from the system."""
    turns = [[sys.executable, "-c", FAULTS, how] for how in ("usual", "kept")]
    usual, kept = (int(subprocess.run(turn, capture_output=True, check=True, timeout=180).stdout) for turn in turns)
    assert usual > 100 and kept < usual / 20


@pytest.mark.parametrize(
    ("libc", "kept"),
    [(SimpleNamespace(mallopt=lambda what, size: 1), True), (SimpleNamespace(mallopt=lambda what, size: 0), False)],
)
def test_whether_they_are_is_told(monkeypatch: pytest.MonkeyPatch, libc: object, kept: bool) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: libc)
    assert allocator.keep_freed_chunks() is kept
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert not allocator.keep_freed_chunks(), "another libc"
