import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dlc.errors import CheckpointError, UsageError
from dlc.train import shelf
from dlc.train.checkpoint import left_over, load_checkpoint, save_checkpoint
from dlc.train.shelf import list_checkpoints


def tensors() -> dict[str, torch.Tensor]:
    base = torch.arange(24.0).view(4, 6)
    return {
        "theta": base,
        "same": base,  # shared memory
        "part": base.t()[1:3],
        "half": torch.ones(3, dtype=torch.bfloat16),
        "step": torch.tensor(7),
        "none": torch.empty(0, 3),
        "flags": torch.tensor([True, False]),
    }


META = {"round": 12, "run": "ünï", "nested": {"a": [1, 2.5, None]}}


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.safetensors"
    save_checkpoint(path, tensors(), META)
    loaded, meta = load_checkpoint(path)
    assert meta == META and loaded.keys() == tensors().keys()
    for name, t in tensors().items():
        assert loaded[name].dtype == t.dtype and torch.equal(loaded[name], t)
    assert [p.name for p in path.parent.iterdir()] == ["a.safetensors"]


def test_every_cut_and_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_checkpoint(path, tensors(), META)
    raw = path.read_bytes()
    damaged = tmp_path / "b.safetensors"
    for size in [*range(0, len(raw), 97), len(raw) - 1]:
        damaged.write_bytes(raw[:size])
        with pytest.raises(CheckpointError):
            load_checkpoint(damaged)
    start = 8 + int.from_bytes(raw[:8], "little")
    for at in range(start, len(raw), 5):
        damaged.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        with pytest.raises(CheckpointError):
            load_checkpoint(damaged)
    damaged.write_bytes(raw.replace(b'round\\": 12', b'round\\": 13'))
    with pytest.raises(CheckpointError, match="damaged"):
        load_checkpoint(damaged)


def test_missing_and_foreign_files(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    with pytest.raises(CheckpointError, match="nowhere"):
        load_checkpoint(tmp_path / "nowhere")
    save_file({"a": torch.zeros(2)}, tmp_path / "foreign.safetensors")
    with pytest.raises(CheckpointError, match="no dlc checkpoint"):
        load_checkpoint(tmp_path / "foreign.safetensors")
    with pytest.raises(UsageError, match="JSON"):
        save_checkpoint(tmp_path / "x", {}, {"a": object()})


FULL_DISK = """
import resource, signal, sys, torch
from dlc.errors import CheckpointError
from dlc.train.checkpoint import save_checkpoint
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    save_checkpoint(sys.argv[1], {"a": torch.ones(100_000)}, {"round": 2})
except CheckpointError as e:
    assert sys.argv[1] in str(e), e
    sys.exit(7)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no file size limit on Windows")
def test_a_full_disk_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    """A limit on file sizes stands in for the full disk: the write fails half-way in both."""
    path = tmp_path / "a.safetensors"
    save_checkpoint(path, {"a": torch.zeros(10)}, {"round": 1})
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(path)], timeout=180, check=False)
    assert done.returncode == 7
    assert load_checkpoint(path)[1] == {"round": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_disk_is_not_filled_to_find_out_that_it_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "a.safetensors"
    monkeypatch.setattr(shelf, "free_bytes", lambda folder: 3_000_000)
    monkeypatch.setattr("dlc.train.checkpoint.save_file", pytest.fail)
    with pytest.raises(CheckpointError, match=r"takes 4\.0 MB, and its disk has 3\.0 MB free"):
        save_checkpoint(path, {"a": torch.zeros(1_000_000)}, {})
    assert not list(tmp_path.iterdir())
    assert shelf.free_bytes(tmp_path)
    monkeypatch.setattr(shelf, "free_bytes", lambda folder: None)
    shelf.demand_room(path, 1 << 60)  # of a file system that does not tell, nothing is known


@pytest.mark.parametrize("shut", ["", "checkpoints", "checkpoints/0123456789ab"])
def test_a_folder_that_may_not_be_read_is_not_taken_for_an_empty_one(
    shut: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is older, of another run, would be taken for the newest."""
    (tmp_path / "checkpoints" / "0123456789ab").mkdir(parents=True)
    older = tmp_path / "checkpoints" / "ba9876543210" / "t-00000001.safetensors"
    save_checkpoint(older, {"a": torch.zeros(1)}, {})
    assert shelf.file_of(tmp_path) == older == shelf.file_of(older.parent) == shelf.file_of(older.parent.parent)
    listdir = os.listdir

    def refused(folder: str) -> list[str]:
        if Path(folder) == tmp_path / shut:
            raise PermissionError(13, "Permission denied")
        return listdir(folder)

    monkeypatch.setattr("dlc.train.shelf.os.listdir", refused)  # a mode would stop anybody but root
    with pytest.raises(CheckpointError, match=r"cannot be read \(Permission denied\)"):
        shelf.file_of(tmp_path)


def test_a_file_that_may_not_be_read_is_not_said_to_be_missing(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.symlink_to(path)  # a mode would stop anybody but root
    with pytest.raises(CheckpointError, match="cannot be read .*symbolic links"):
        load_checkpoint(path)


def test_why_it_could_not_be_written_is_told_though_nothing_can_be_cleared_away(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(CheckpointError, match="could not be written"):
        save_checkpoint(tmp_path / "a" / "a.safetensors", {"a": torch.zeros(1)}, {})


def test_a_failed_rename_keeps_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.safetensors"
    save_checkpoint(path, {"a": torch.zeros(10)}, {"round": 1})
    synced: list[str] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append("fsync"), real(fd))[1])

    def fail(*_: object) -> None:
        assert synced, "the file must be on the disk before it takes the name"
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(CheckpointError, match="Read-only"):
        save_checkpoint(path, {"a": torch.ones(10)}, {"round": 2})
    assert load_checkpoint(path)[1] == {"round": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def test_checkpoints_are_listed_by_name_and_what_a_killed_process_left_is_told_apart(tmp_path: Path) -> None:
    for k in (3, 10):
        save_checkpoint(tmp_path / f"c-{k:04}.safetensors", {"a": torch.zeros(1)}, {})
    (tmp_path / "other.txt").touch()
    (tmp_path / ".c-0004.safetensors.tmp-123").touch()
    assert [p.name for p in list_checkpoints(tmp_path)] == ["c-0003.safetensors", "c-0010.safetensors"]
    assert [p.name for p in left_over(tmp_path)] == [".c-0004.safetensors.tmp-123"]


KILLED = """
import resource, signal, sys, torch
from dlc.train.checkpoint import save_checkpoint
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
save_checkpoint(sys.argv[1], {"a": torch.zeros(100_000)}, {})
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGXFSZ, which ends a process in the midst of a write")
def test_all_that_a_save_leaves_where_the_process_is_killed_in_it_is_told_apart(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path / "c-0001.safetensors")]
    done = subprocess.run(command, timeout=120, check=False)
    assert done.returncode == -signal.SIGXFSZ
    there = list(tmp_path.iterdir())
    assert there and left_over(tmp_path) == there and not list_checkpoints(tmp_path)
