import errno
import math
import os
import signal
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from dlc.errors import CheckpointError, NoRoom, UsageError
from dlc.runspec import OuterSpec, RunSpec
from dlc.train import checkpoint, saves, shelf
from dlc.train.checkpoint import (
    DamagedError,
    UnreadableError,
    left_over,
    load_checkpoint,
    save_checkpoint,
    save_model_folder,
)
from dlc.train.outer import OuterState
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
    of_header = [
        (b'round\\": 12', b'round\\": 13'),
        (b'"part"', b'"parT"'),
        (b'"BF16"', b'"F16"'),
        (b"[0,3]", b"[3,0]"),
    ]
    for was, then in of_header:  # a header of another length is padded with blanks
        assert raw.count(was) == 1
        damaged.write_bytes(raw.replace(was, then.ljust(len(was))))
        with pytest.raises(CheckpointError, match="damaged"):
            load_checkpoint(damaged)


def test_missing_and_foreign_files(tmp_path: Path) -> None:
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


@pytest.mark.skipif(sys.platform == "win32", reason="Windows is asked in another way")
def test_a_disk_that_does_not_answer_how_much_room_it_has_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(folder: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    class Model(torch.nn.Module):
        save_pretrained = pytest.fail

    monkeypatch.setattr("dlc.train.shelf.os.statvfs", broken)
    with pytest.raises(CheckpointError, match=r"could not be written \(\[Errno 5\] Input/output error\)"):
        save_checkpoint(tmp_path / "a.safetensors", {"a": torch.zeros(1)}, {})
    with pytest.raises(CheckpointError, match=r"could not be written \(\[Errno 5\] Input/output error\)"):
        checkpoint.save_model_folder(Model(), tmp_path / "model")
    assert not list(tmp_path.iterdir())


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


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="no file that opens, and cannot be read")
def test_a_file_on_a_disk_with_errors_is_read_before_it_is_mapped(tmp_path: Path) -> None:
    """What cannot be read of a mapped file is no error, but the end of the process. The memory of one begins with what
    nobody may read."""
    path = tmp_path / "a.safetensors"
    path.symlink_to("/proc/self/mem")
    with pytest.raises(UnreadableError, match="cannot be read .*Input/output error"):
        load_checkpoint(path)


@pytest.mark.parametrize("where", ["header", "meta", "spec"])
def test_what_is_nested_too_deep_is_a_damaged_file(where: str, tmp_path: Path) -> None:
    """The start of a peer ended with a traceback."""
    path, deep = tmp_path / shelf.FOLDER / "run" / saves.name_of(1), "[" * 100_000
    if where == "header":
        path.parent.mkdir(parents=True)
        path.write_bytes(struct.pack("<Q", len(deep)) + deep.encode())
    elif where == "meta":
        path.parent.mkdir(parents=True)
        save_file({"a": torch.zeros(1)}, path, {shelf.META: deep})
    else:
        save_checkpoint(path, {"a": torch.zeros(1)}, {"spec": f"rounds = {deep}"})
    assert saves.newest(tmp_path) is None


def test_meta_data_that_is_no_json_is_of_no_checkpoint(tmp_path: Path) -> None:
    """Though the hash is right: it was written by somebody else."""
    path, text = tmp_path / "a.safetensors", "[" * 100_000
    header = {shelf.META: text, "dlc_format": str(checkpoint.FORMAT), "dlc_blake3": checkpoint._content_hash({}, text)}
    save_file({}, path, header)
    with pytest.raises(CheckpointError, match="not JSON"):
        load_checkpoint(path)


@pytest.mark.parametrize("told", [{"id": []}, {"given_up": 5}, {"given_up": [[]]}])
def test_what_a_foreign_header_says_of_given_up_ones_ends_no_start(told: dict[str, object], tmp_path: Path) -> None:
    save_checkpoint(tmp_path / shelf.FOLDER / "run" / saves.name_of(1), {"a": torch.zeros(1)}, told)
    assert saves.newest(tmp_path) is None


@pytest.mark.parametrize("told", [{"t": math.inf}, {"tokens": 10**400}])
def test_numbers_that_no_trainer_writes_are_of_no_checkpoint(told: dict[str, float], tmp_path: Path) -> None:
    """The start of a peer ended with a traceback."""
    path = tmp_path / "a.safetensors"
    meta = {"spec": RunSpec().to_toml(), "t": 1, "layout": [], "tokens": 0.0, "digest": "", **told}
    parts = {name: torch.zeros(1, dtype=torch.uint8) for name in ("log", "image")}
    save_checkpoint(path, parts, meta)
    with pytest.raises(CheckpointError, match="no checkpoint of a training peer"):
        saves.read(path)


def test_a_named_pipe_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its opening waited for ever for somebody who writes."""
    path = tmp_path / shelf.FOLDER / "run" / saves.name_of(1)
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    found: list[object] = []
    looked_at = [lambda: saves.newest(tmp_path), lambda: saves.of_another_run(tmp_path, RunSpec())]
    looking = threading.Thread(target=lambda: found.extend(look() for look in looked_at), daemon=True)
    looking.start()
    looking.join(20)
    assert found == [None, None]
    assert f"{path} is a named pipe" in caplog.text
    with pytest.raises(CheckpointError, match="is a named pipe, and no checkpoint: move it away"):
        load_checkpoint(path)


def test_why_it_could_not_be_written_is_told_though_nothing_can_be_cleared_away(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(CheckpointError, match="could not be written"):
        save_checkpoint(tmp_path / "a" / "a.safetensors", {"a": torch.zeros(1)}, {})


def test_a_model_that_transformers_would_not_write_is_told_as_such(tmp_path: Path) -> None:
    """It ended the training as an unexpected error, with a checkpoint of the end on the disk."""

    class Tied(torch.nn.Linear):
        def save_pretrained(self, folder: Path) -> None:
            raise RuntimeError("The weights trying to be saved contained shared tensors")

    with pytest.raises(CheckpointError, match="m could not be written .*shared tensors.*what was there is kept"):
        save_model_folder(Tied(2, 2), tmp_path / "m")
    assert not any(tmp_path.iterdir())


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


def test_a_save_is_over_when_its_name_is_on_the_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.safetensors"
    done: list[str] = []
    sync, replace = os.fsync, os.replace

    def synced(fd: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file")
        sync(fd)

    def replaced(old: Path, new: Path) -> None:
        done.append("rename")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    save_checkpoint(path, {"a": torch.zeros(10)}, {})
    assert done == (["file", "rename"] if os.name == "nt" else ["file", "rename", "folder"])


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, NoRoom), (errno.EDQUOT, NoRoom), (errno.EIO, CheckpointError)]
)
@pytest.mark.parametrize(
    "error", [lambda number: OSError(number, "it failed"), lambda number: SafetensorError(f"(os error {number})")]
)
def test_a_disk_that_fills_up_in_the_middle_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type, error: Callable[[int], Exception]
) -> None:
    """Older checkpoints are then deleted to make room."""

    def fail(*_: object) -> None:
        raise error(number)

    monkeypatch.setattr(checkpoint, "save_file", fail)
    with pytest.raises(CheckpointError) as raised:
        save_checkpoint(tmp_path / "a.safetensors", {"a": torch.zeros(10)}, {})
    assert type(raised.value) is kind


def test_what_a_tensor_is_called_and_how_it_is_shaped_is_in_the_hash(tmp_path: Path) -> None:
    path, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_checkpoint(path, {"one": torch.zeros(2, 3), "two": torch.ones(2, 3)}, {})
    raw = path.read_bytes()
    swapped = raw.replace(b'"one"', b'"tmp"').replace(b'"two"', b'"one"').replace(b'"tmp"', b'"two"')
    for changed in (swapped, raw.replace(b"[2,3]", b"[3,2]"), raw.replace(b'"F32"', b'"I32"')):
        assert changed != raw
        other.write_bytes(changed)
        with pytest.raises(DamagedError):
            load_checkpoint(other)


class Kept(torch.nn.Module):
    """As a transformers model is saved."""

    def save_pretrained(self, folder: Path) -> None:
        (folder / "more").mkdir(parents=True)
        (folder / "more" / "weights").write_bytes(b"of the new one")


def test_a_model_folder_takes_the_place_of_the_old_one_when_all_of_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    sync, exchange = os.fsync, checkpoint._exchange

    def noted(fd: int) -> None:
        synced.add(os.fstat(fd).st_ino)
        sync(fd)

    def exchanged(new: Path, target: Path, old: Path) -> None:
        assert {path.stat().st_ino for path in (new, *new.rglob("*"))} <= synced
        exchange(new, target, old)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(checkpoint, "_exchange", exchanged)
    (tmp_path / "m").mkdir()
    checkpoint.save_model_folder(Kept(), tmp_path / "m")
    assert [path.name for path in tmp_path.iterdir()] == ["m"] and (tmp_path / "m" / "more" / "weights").is_file()
    monkeypatch.setattr(checkpoint, "_exchange", lambda new, target, old: exchange(new / "missing", target, old))
    with pytest.raises(CheckpointError):
        checkpoint.save_model_folder(Kept(), tmp_path / "m")
    assert [path.name for path in tmp_path.iterdir()] == ["m"] and (tmp_path / "m" / "more" / "weights").is_file()


@pytest.mark.skipif(os.name == "nt", reason="this system has no umask")
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o007, 0o660), (0o077, 0o600)])
def test_all_files_of_a_model_are_for_those_for_whom_the_umask_lets_them_be(
    tmp_path: Path, umask: int, mode: int
) -> None:
    def weights(folder: Path) -> None:
        save_file({"w": torch.ones(2)}, folder / "model.safetensors")

    before = os.umask(umask)
    try:
        checkpoint.save_model_folder(Kept(), tmp_path / "m", also=weights)
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "m").rglob("*") if path.is_file()]
    assert {path.name: path.stat().st_mode & 0o777 for path in files} == {"weights": mode, "model.safetensors": mode}


def test_where_a_model_folder_is_a_link_the_model_is_written_where_it_leads(tmp_path: Path) -> None:
    """To a disk with more room: what others read there is not left to be of an older model."""
    place, state = tmp_path / "disk" / "m", tmp_path / "state"
    place.mkdir(parents=True)
    state.mkdir()
    (place / "weights").write_bytes(b"of the old one")
    (place.parent / ".m.tmp-7").mkdir()
    (state / "model").symlink_to(place, target_is_directory=True)
    checkpoint.save_model_folder(Kept(), state / "model")
    checkpoint.sweep_model_folder(state / "model")
    assert [path.name for path in place.iterdir()] == ["more"] and (place / "more" / "weights").is_file()
    assert [path.name for path in place.parent.iterdir()] == ["m"]
    assert [path.name for path in state.iterdir()] == ["model"] and (state / "model").is_symlink()


def test_of_what_a_killed_process_left_beside_a_model_the_old_one_stays_where_no_model_is(tmp_path: Path) -> None:
    """Between the two renames it is what somebody had."""
    for kind in ("old", "tmp"):
        (tmp_path / f".m.{kind}-7").mkdir()
    checkpoint.sweep_model_folder(tmp_path / "m")
    assert [path.name for path in tmp_path.iterdir()] == [".m.old-7"]
    (tmp_path / "m").mkdir()
    checkpoint.sweep_model_folder(tmp_path / "m")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_bytes_become_a_tensor_of_just_these() -> None:
    whole = np.frombuffer(b"abcd", np.uint8).copy()
    tensor = checkpoint.bytes_tensor(whole.data.toreadonly())
    whole[0] = ord("x")
    assert bytes(tensor.tolist()) == b"xbcd", "no copy was made"
    for given in (b"bc", whole.data[1:3], memoryview(b"bc")):
        assert bytes(checkpoint.bytes_tensor(given).tolist()) == b"bc"
    for empty in (b"", np.empty(0, np.uint8).data):
        assert checkpoint.bytes_tensor(empty).shape == (0,)


def test_the_image_of_a_state_is_saved_without_another_copy_of_it() -> None:
    """It was copied once more, 8 bytes per parameter, and meanwhile no thread of the peer could answer anybody."""
    image = OuterState(torch.randn(300), OuterSpec()).export()
    tensor = checkpoint.bytes_tensor(image)
    assert np.shares_memory(tensor.numpy(), np.frombuffer(image, np.uint8)) and bytes(image) == bytes(tensor.tolist())


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
