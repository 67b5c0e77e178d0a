"""What is freed stays in the process."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from types import SimpleNamespace

import pytest

from dlc.comm import allocator

FAULTS = """
import ctypes, resource
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

faults()
without = faults()
keep_freed_chunks() or exit(0)
faults()
print(without, faults())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's thresholds")
def test_chunks_that_are_freed_are_there_for_the_next_ones() -> None:
    """The pages of each round's chunks were taken anew from the system."""
    found = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True, timeout=60)
    if not allocator.keep_freed_chunks():
        pytest.skip("no glibc here")
    without, kept = map(int, found.stdout.split())
    assert without > 100 and kept < without / 20


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
