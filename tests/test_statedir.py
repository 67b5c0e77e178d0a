"""State directory: one user at a time, nothing half-written, an incarnation never used twice."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

import pytest

import dlc.folderlock as folderlock
import dlc.statedir as statedir
from dlc.comm.roles import HELPER, OBSERVER, TRAINER
from dlc.errors import StateDirBusy, UsageError
from dlc.statedir import Ephemeral, PeerState, StateDir, free_state_dir

HOLD = """
import sys
from dlc.statedir import StateDir
state = StateDir(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def test_a_restarted_peer_keeps_its_id_and_gets_a_greater_incarnation(tmp_path: Path) -> None:
    incarnations, peers = [], set()
    for start in range(3):
        state = StateDir(tmp_path / "deep" / "peer")
        peers.add(state.identity.peer)
        incarnations.append(state.next_incarnation(0xFFFFFFFF - start))
        state.close()
    assert len(peers) == 1
    assert incarnations == [1 << 32 | 0xFFFFFFFF, 2 << 32 | 0xFFFFFFFE, 3 << 32 | 0xFFFFFFFD]


def test_another_process_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        with pytest.raises(StateDirBusy, match=str(tmp_path)):
            StateDir(tmp_path)
        other.kill()
        other.wait()
        StateDir(tmp_path).close()


def test_the_same_process_is_refused_too_and_close_releases(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    with pytest.raises(StateDirBusy, match="directory of its own"):
        StateDir(tmp_path)
    state.close()
    state.close()
    StateDir(tmp_path).close()


@pytest.mark.skipif(os.name != "posix", reason="Windows removes no folder in which a file is open")
def test_a_directory_that_is_removed_in_use_is_made_anew_for_the_same_peer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "peer"
    state = StateDir(path)
    state.hold(path / "checkpoints")
    before = state.next_incarnation(5)
    state.keep()
    assert not caplog.messages
    shutil.rmtree(path)
    for _ in range(2):
        state.keep()
    assert [message for message in caplog.messages if f"the lock in {path} was gone" in message] == caplog.messages
    assert len(caplog.messages) == 1 and stat.S_IMODE(path.stat().st_mode) == 0o700
    with pytest.raises(StateDirBusy):
        StateDir(path)
    other = StateDir(tmp_path / "other")
    with pytest.raises(StateDirBusy):
        other.hold(path / "checkpoints")
    other.close()
    state.close()
    again = StateDir(path)
    assert again.identity.peer == state.identity.peer and again.next_incarnation(0) > before
    again.close()


@pytest.mark.skipif(os.name != "posix", reason="Windows removes no folder in which a file is open")
def test_a_directory_that_is_anothers_by_now_is_left_to_it(tmp_path: Path) -> None:
    """Somebody removed it, and what was started next took it."""
    path = tmp_path / "peer"
    state = StateDir(path)
    shutil.rmtree(path)
    other = StateDir(path)
    for _ in range(2):
        with pytest.raises(StateDirBusy, match="another process uses"):
            state.keep()
    other.keep()
    other.close()
    for _ in range(2):
        with pytest.raises(StateDirBusy, match=f"{path} is another peer's now"):
            state.keep()
    state.close()
    again = StateDir(path)
    assert again.identity.peer == other.identity.peer
    again.close()


@pytest.mark.parametrize("linked", ["checkpoints", "checkpoints/0123456789ab"])
def test_a_folder_that_another_state_directory_has_too_is_refused(tmp_path: Path, linked: str) -> None:
    """By links: each would delete what the other writes."""
    first, second = StateDir(tmp_path / "a"), StateDir(tmp_path / "b")
    first.hold(tmp_path / "a" / linked)
    (tmp_path / "b" / linked).parent.mkdir(exist_ok=True)
    (tmp_path / "b" / linked).symlink_to(tmp_path / "a" / linked, target_is_directory=True)
    with pytest.raises(StateDirBusy, match=f"uses the folder {tmp_path / 'b' / linked}, which is {tmp_path / 'a'}"):
        second.hold(tmp_path / "b" / linked)
    first.close()
    second.hold(tmp_path / "b" / linked)
    second.close()


@pytest.mark.skipif(os.name != "posix", reason="flock")
def test_checkpoints_on_a_file_system_without_locks_are_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As some clusters have it: it was no error before, and is none as long as each peer has its own."""
    state = StateDir(tmp_path)

    def refuse(file: IO[bytes], operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    with monkeypatch.context() as patch:
        patch.setattr(folderlock.fcntl, "flock", refuse)
        state.hold(tmp_path / "checkpoints")
    (said,) = caplog.messages
    assert f"{tmp_path / 'checkpoints'} cannot be locked (its file system keeps no locks" in said
    state.keep()
    state.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no file that is always full")
def test_a_lock_without_room_for_its_line_holds_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to("/dev/full")
    lock = folderlock.FolderLock(tmp_path)
    assert not lock.lost()
    with pytest.raises(BlockingIOError):
        folderlock.FolderLock(tmp_path)
    (tmp_path / "lock").unlink()
    assert lock.lost()
    lock.close()


def test_peers_of_one_host_get_a_directory_each(tmp_path: Path) -> None:
    first, second = free_state_dir(tmp_path, "run"), free_state_dir(tmp_path, "run")
    assert (first.path, second.path) == (tmp_path / "run" / "peer-0", tmp_path / "run" / "peer-1")
    assert first.identity.peer != second.identity.peer
    first.close()
    again = free_state_dir(tmp_path, "run")
    assert again.path == first.path and again.identity.peer == first.identity.peer
    again.close()
    second.close()


def test_an_observer_takes_no_trainers_directory_and_which_are_in_use_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    roles = (OBSERVER, HELPER, TRAINER)
    states = [free_state_dir(tmp_path, "run", role) for role in roles]
    assert [state.path.name for state in states] == ["observer-0", "helper-0", "peer-0"]
    assert not caplog.messages
    states += [free_state_dir(tmp_path, "run", TRAINER) for _ in range(2)]
    folder = tmp_path / "run"
    assert caplog.messages == [
        f"in {folder} other processes use peer-0: this one takes peer-1",
        f"in {folder} other processes use peer-0 to peer-1: this one takes peer-2",
    ]
    for state in states:
        state.close()


@pytest.mark.parametrize("run", ["../../out", "..", ".", "", "a/b", "C:\\x", "ø"])
def test_no_run_name_leads_out_of_the_base(tmp_path: Path, run: str) -> None:
    base = tmp_path / "base"
    state = free_state_dir(base, run)
    assert state.path.resolve().parent.parent == base.resolve()
    state.close()


def test_the_directory_stays_where_it_was_when_the_process_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    state = StateDir("peer")
    monkeypatch.chdir("elsewhere")
    state.next_incarnation(0)
    state.save_address_book({"a": 1})
    state.close()
    assert state.path == tmp_path / "peer" and (tmp_path / "peer" / "peers.json").is_file()
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="others keep a directory that a process is in")
def test_a_relative_path_where_the_process_is_in_no_directory_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(UsageError, match="the state directory peer cannot be used: No such file or directory"):
        StateDir("peer")


@pytest.mark.skipif(os.name != "posix", reason="POSIX permissions")
def test_only_the_owner_can_read(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "peer")
    state.save_address_book({})
    assert stat.S_IMODE(state.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((state.path / "identity.key").stat().st_mode) == 0o600
    state.close()


def test_an_address_book_survives_and_a_broken_one_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = StateDir(tmp_path)
    assert state.load_address_book() == {}
    state.save_address_book({"peer": ["127.0.0.1:1"]})
    state.close()
    state = StateDir(tmp_path)
    assert state.load_address_book() == {"peer": ["127.0.0.1:1"]}
    (tmp_path / "peers.json").write_text("{")
    assert state.load_address_book() == {} and "address book" in caplog.text
    state.close()


def test_a_full_disk_leaves_the_old_address_book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = StateDir(tmp_path)
    state.save_address_book({"old": 1})

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(statedir.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        state.save_address_book({"new": 1})
    with pytest.raises(UsageError, match="No space"):
        state.next_incarnation(0)
    monkeypatch.undo()
    assert state.load_address_book() == {"old": 1}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["identity.key", "lock", "peers.json"]
    state.close()


def test_a_disk_that_is_full_at_the_start_is_told_and_a_start_with_room_is_as_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(statedir.os, "fsync", full)
    with pytest.raises(UsageError, match="No space left on device; make room, or choose another"):
        StateDir(tmp_path)
    monkeypatch.undo()
    StateDir(tmp_path).close()


def test_the_counter_is_synced_before_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = StateDir(tmp_path)
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(statedir.os, "fsync", lambda fd: (steps.append("fsync"), fsync(fd))[1])
    monkeypatch.setattr(statedir.os, "replace", lambda a, b: (steps.append("replace"), replace(a, b))[1])
    state.next_incarnation(1)
    assert steps[:2] == ["fsync", "replace"] and (os.name != "posix" or steps[2:] == ["fsync"])
    state.close()


@pytest.mark.parametrize(
    ("name", "content"), [("identity.key", b"short"), ("boot", b"many"), ("boot", b""), ("boot", b"\xff")]
)
def test_damage_is_named_and_the_lock_let_go(tmp_path: Path, name: str, content: bytes) -> None:
    StateDir(tmp_path).close()
    (tmp_path / name).write_bytes(content)
    for _ in range(2):
        with pytest.raises(UsageError, match="new peer"):
            state = StateDir(tmp_path)
            try:
                state.next_incarnation(0)
            finally:
                state.close()


def test_a_counter_that_cannot_be_read_is_not_called_damaged(tmp_path: Path) -> None:
    """Who moved the directory away, as that says, would begin as a new peer, for want of a permission."""
    state = StateDir(tmp_path)
    (tmp_path / "boot").mkdir()
    with pytest.raises(UsageError, match=r"boot cannot be read: .*; let this user read"):
        state.next_incarnation(0)
    state.close()


def test_a_path_that_is_no_directory_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="choose another"):
        StateDir(tmp_path / "file")


@pytest.mark.skipif(os.name != "posix", reason="flock")
def test_two_threads_may_close_a_lock_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that stops, and a program that makes its peer leave: one of the two ended with EBADF."""
    lock, unlock = folderlock.FolderLock(tmp_path), folderlock._unlock
    other = threading.Thread(target=lock.close)

    def unlock_behind_the_other(file: IO[bytes]) -> None:
        monkeypatch.setattr(folderlock, "_unlock", unlock)
        other.start()
        other.join()
        unlock(file)

    monkeypatch.setattr(folderlock, "_unlock", unlock_behind_the_other)
    lock.close()
    assert other.ident is not None
    folderlock.FolderLock(tmp_path).close()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_a_usage_error_and_nothing_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    files: list[IO[bytes]] = []

    def refuse(file: IO[bytes], operation: int) -> None:
        files.append(file)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(folderlock.fcntl, "flock", refuse)
    with pytest.raises(UsageError, match=r"keeps no locks.*--state-dir DIR") as error:
        StateDir(tmp_path)
    assert str(tmp_path) in str(error.value) and os.strerror(number) in str(error.value)
    assert len(files) == 1 and files[0].closed


def test_ephemeral_state_offers_the_same(tmp_path: Path) -> None:
    state: PeerState = Ephemeral()
    assert state.next_incarnation(7) == 1 << 32 | 7 and state.next_incarnation(0) == 2 << 32
    state.save_address_book({"a": 1})
    assert state.load_address_book() == {"a": 1} and state.path is None
    state.close()
    on_disk: PeerState = StateDir(tmp_path)
    on_disk.close()
