import logging
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from dlc.train.metrics import MetricsWriter, read_metrics


def writer(folder: Path) -> MetricsWriter:
    return MetricsWriter(folder, clock=lambda: 5.0)


def test_lines_are_there_at_once_and_appended(tmp_path: Path) -> None:
    w = writer(tmp_path / "new")
    w.scalar(3, loss=2.5, tokens=7)
    assert read_metrics(w.path) == [{"time_s": 5.0, "step": 3, "loss": 2.5, "tokens": 7}]
    w.close()
    w.close()
    again = writer(tmp_path / "new")
    again.scalar(4, loss=float("nan"), norm=torch.tensor(1.5))  # type: ignore[arg-type]
    again.close()
    assert read_metrics(w.path)[1:] == [{"time_s": 5.0, "step": 4, "loss": None, "norm": 1.5}]


def test_reports_of_any_content(tmp_path: Path) -> None:
    @dataclass
    class Part:
        name: bytes
        size: int

    w = writer(tmp_path)
    w.report({"t": 1, "missing": ("a", "b"), "parts": [Part(b"\x01\xff", 3)], "path": tmp_path, 4: float("inf")})
    w.close()
    assert read_metrics(w.path)[0]["report"] == {
        "t": 1,
        "missing": ["a", "b"],
        "parts": [{"name": "01ff", "size": 3}],
        "path": str(tmp_path),
        "4": None,
    }


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_is_told_once_and_training_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    w = writer(tmp_path)
    with caplog.at_level(logging.WARNING):
        for k in range(5):
            w.scalar(k, loss=1.0)
    w.close()
    assert len(caplog.records) == 1 and "No space left" in caplog.text


def test_a_torn_line_spoils_no_later_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    w = writer(tmp_path)
    w.scalar(1, loss=1.0)
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:9]))
    w.scalar(2, loss=2.0)
    monkeypatch.undo()
    w.scalar(3, loss=3.0)
    w.close()
    assert [r["step"] for r in read_metrics(w.path)] == [1, 3]


def test_a_line_torn_before_a_restart_spoils_no_later_one(tmp_path: Path) -> None:
    w = writer(tmp_path)
    w.scalar(1, loss=1.0)
    w.close()
    with w.path.open("ab") as file:
        file.write(b'{"time_s": 1')
    again = writer(tmp_path)
    again.scalar(2, loss=2.0)
    again.scalar(3, loss=3.0)
    again.close()
    assert [r["step"] for r in read_metrics(w.path)] == [1, 2, 3]


def test_a_file_that_is_rotated_away_is_begun_anew_and_one_that_is_cut_is_gone_on_with(tmp_path: Path) -> None:
    w = writer(tmp_path)
    w.scalar(1, loss=1.0)
    w.path.rename(tmp_path / "metrics.jsonl.1")
    w.scalar(2, loss=1.0)
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl.1")] == [1]
    assert [r["step"] for r in read_metrics(w.path)] == [2]
    os.truncate(w.path, 0)
    w.scalar(3, loss=1.0)
    w.path.unlink()
    w.scalar(4, loss=1.0)
    w.close()
    assert [r["step"] for r in read_metrics(w.path)] == [4]


def test_a_file_that_is_cut_in_the_middle_of_a_line_spoils_no_later_one(tmp_path: Path) -> None:
    """The line after the cut was glued to what was left, and both were lost."""
    w = writer(tmp_path)
    w.scalar(1, loss=1.0)
    w.scalar(2, loss=1.0)
    os.truncate(w.path, w.path.stat().st_size - 5)
    w.scalar(3, loss=1.0)
    w.close()
    assert [r["step"] for r in read_metrics(w.path)] == [1, 3]


def test_it_takes_no_call_that_windows_has_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pread", "pwrite", "preadv", "pwritev", "statvfs", "fstatvfs"):
        monkeypatch.delattr(os, name, raising=False)
    w = writer(tmp_path)
    w.scalar(1, loss=1.0)
    w.scalar(2, loss=1.0)
    w.close()
    assert [r["step"] for r in read_metrics(w.path)] == [1, 2]
