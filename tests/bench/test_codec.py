"""`dlc bench codec`: errors are those of the formats, whatever the speed of this host."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch

from dlc.bench.codec import MB_MAX, _errors, devices, measure_codecs
from dlc.comm.blockcodecs import BLOCK
from dlc.comm.codecs import CODECS
from dlc.errors import UsageError


def test_every_codec_is_measured_on_the_cpu() -> None:
    said: list[str] = []
    reports = {r.codec: r for r in measure_codecs(2.5, [torch.device("cpu")], said.append)}
    assert list(reports) == list(CODECS) and len(said) == len(CODECS)
    for report in reports.values():
        assert report.encode_gb_per_s > 0 and report.decode_gb_per_s > 0 and report.device == "cpu"
    assert reports["fp32"].wire_share == 1.0 and reports["fp32"].max_relative_error == 0.0
    for name, bits, more in (("fp16", 11, 3 * 2), ("bf16", 8, 0)):  # a power of two in each of three chunks
        assert reports[name].wire_share == 0.5 + more / 2.5e6
        assert 2.0**-bits / 4 < reports[name].rms_relative_error < 2.0**-bits
        assert reports[name].max_relative_error <= 8 * 2.0**-bits
    for name, bits, limit in (("int8", 8, 127), ("int4", 4, 7)):
        assert abs(reports[name].wire_share - (bits + 32 / BLOCK) / 32) < 1e-5
        step = 3.0 / limit  # the greatest of a block is at 2.5 to 4 for most, and errors are even within a step
        assert 0.8 < reports[name].rms_relative_error * 12**0.5 / step < 1.25
        assert reports[name].max_relative_error <= 6 / limit / 2


MEASURED = """
import torch
from dlc.bench import codec
codec.keep_freed_chunks = lambda: True
def peak(mb):
    codec.measure_codecs(mb, [torch.device("cpu")], lambda text: None)
    return 1024 * next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
small = peak(1.0)
print((peak(16.0) - small) / 15e6)
"""
"""Not `ru_maxrss`, which begins at that of the parent: no less than the process of the tests has had."""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_three_times_the_vector() -> None:
    """Every chunk is given back to the system when it is freed: else what lies between others stays, more or less."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run([sys.executable, "-c", MEASURED], capture_output=True, text=True, check=True, env=environment)
    assert 2.5 < float(done.stdout) < 4.0


def test_errors_are_those_of_the_whole_vector() -> None:
    """Chunk by chunk they are what they are in one piece, and what is no number shows."""
    exact = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    decoded = exact.half().float()
    error = (decoded.double() - exact.double()).square().sum().item()
    found = _errors(torch.split(decoded, 300), torch.split(exact, 300))
    assert found == pytest.approx(
        (error, exact.double().square().sum().item(), (decoded.double() - exact.double()).abs().max().item()), rel=1e-12
    )
    decoded[999] = math.nan
    assert all(map(math.isnan, _errors([decoded], [exact])[::2]))


def test_says_so_where_there_is_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    on, note = devices("auto")
    assert on == [torch.device("cpu")] and "no CUDA device" in note
    assert devices("cpu") == ([torch.device("cpu")], "")
    with pytest.raises(UsageError, match="abacus"):
        devices("abacus")
    with pytest.raises(UsageError, match="--mb"):
        measure_codecs(MB_MAX + 1, on, print)


@pytest.mark.gpu
def test_cuda_is_measured_with_the_copy() -> None:
    on, note = devices("auto")
    assert [d.type for d in on] == ["cpu", "cuda"] and note == ""
    cpu, cuda = (measure_codecs(8, [d], lambda text: None) for d in on)
    for a, b in zip(cpu, cuda, strict=True):
        assert (a.codec, a.max_relative_error) == (b.codec, b.max_relative_error)
