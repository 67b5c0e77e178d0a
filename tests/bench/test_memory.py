"""Measurements that do not fit the memory of a host are refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from dlc.bench import memory
from dlc.bench.children import LOCAL_MAX, check_local, check_vector
from dlc.bench.codec import measure_codecs
from dlc.cli import main
from dlc.errors import UsageError


def test_no_more_are_started_than_the_memory_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = tmp_path / "meminfo"
    monkeypatch.setattr(memory, "MEMINFO", told)
    check_local(LOCAL_MAX, 8000.0)  # where the system does not tell
    told.write_text("MemTotal:       99999999 kB\nMemAvailable:    8000000 kB\nHugePages_Total:       0\n")
    check_local(4, 300.0)
    with pytest.raises(UsageError, match=r"--local 4 with --mb 400 takes about 9.0 GB of memory, and 8.2 GB are free"):
        check_local(4, 400.0)
    with pytest.raises(UsageError, match=f"--local is {LOCAL_MAX + 1}; choose up to {LOCAL_MAX}"):
        check_local(LOCAL_MAX + 1, 0.1)


def test_a_vector_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before anything is allocated: the system would end the process without a word."""
    told = tmp_path / "meminfo"
    monkeypatch.setattr(memory, "MEMINFO", told)
    told.write_text("MemAvailable:    8000000 kB\n")
    check_vector(1600.0)
    with pytest.raises(UsageError, match=r"--mb 1700 takes about 8.5 GB of memory, and 8.2 GB are free: choose a smal"):
        check_vector(1700.0)
    with pytest.raises(UsageError, match=r"--mb 3000 takes about 9.0 GB of memory, and 8.2 GB are free"):
        measure_codecs(3000.0, [], lambda text: None)


@pytest.mark.parametrize("command", [["codec"], ["allreduce", "--peers", "127.0.0.1:1", "--n-peers", "2"]])
def test_the_commands_look_first(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = tmp_path / "meminfo"
    told.write_text("MemAvailable:    1000000 kB\n")
    monkeypatch.setattr(memory, "MEMINFO", told)
    assert main(["bench", *command, "--mb", "2000"]) == 2
    assert "and 1.0 GB are free: choose a smaller vector" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "folder", "names"),
    [
        ("0::/box/inner\n", "box", memory.V2),
        ("0::/\n", "", memory.V2),
        ("4:cpu,memory:/box\n0::/\n", "memory/box", memory.V1),
    ],
)
def test_the_limit_of_a_container_counts(
    line: str, folder: str, names: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    (tmp_path / "groups").write_text(line)
    group, (most, used, cached) = tmp_path / folder, names
    group.mkdir(parents=True, exist_ok=True)
    (group / most).write_text("max\n")
    assert memory._free_of_groups() == math.inf
    for name, text in (
        (most, "3000000000\n"),
        (used, "1500000000\n"),
        ("memory.stat", f"anon 5\n{cached} 500000000\n"),
    ):
        (group / name).write_text(text)
    assert memory._free_of_groups() == 2e9
    with pytest.raises(UsageError, match=r"takes about 4.5 GB of memory, and 2.0 GB are free"):
        check_local(2, 400.0)
