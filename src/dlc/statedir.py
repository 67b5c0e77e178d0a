"""What one peer keeps on disk between its starts, and the lock that makes it the only one.

    <dir>/lock           held as long as the process uses the directory (folderlock)
    <dir>/identity.key   private Ed25519 key, readable by its owner only
    <dir>/boot           number of starts so far; on disk *before* the incarnation made of it is used
    <dir>/peers.json     address book

Every file is written beside its place, synced, and moved there, so a crash or a full disk leaves the old one. Losing
the directory is safe: the peer comes back under a new id. Two processes with one identity would not be, hence the
lock. A damaged key or counter stops the start with a message, because going on would break "an incarnation is never
used twice"; a damaged address book is only worth a warning.

Where somebody removes the directory while it is in use, `keep` makes it anew, before something is written there: the
same peer, with the same lock.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from dlc.comm.identity import PRIVATE_KEY_BYTES, Identity
from dlc.comm.roles import TRAINER
from dlc.errors import StateDirBusy, UsageError
from dlc.folderlock import FolderLock

log = logging.getLogger(__name__)

PEERS_PER_HOST_MAX = 1024
"""Directories that `free_state_dir` looks at: far more peers than one host runs."""
BOOTS_MAX = 1 << 31
"""The counter is the upper half of a signed 64-bit incarnation."""
ADDRESS_BOOK_BYTES_MAX = 64 << 20
"""An address book above this is not ours."""


@runtime_checkable
class PeerState(Protocol):
    """What the peer needs of its state, on disk or not."""

    @property
    def path(self) -> Path | None: ...
    @property
    def identity(self) -> Identity: ...
    def next_incarnation(self, random32: int) -> int: ...
    def load_address_book(self) -> dict[str, Any]: ...
    def save_address_book(self, book: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class StateDir:
    """The state directory `path`, made if it is missing, and locked until `close`.

    Raises StateDirBusy if another process (or another StateDir of this one) uses it, UsageError if it cannot be used.
    """

    def __init__(self, path: Path | str) -> None:
        if not str(path):  # to pathlib that is the folder where the process runs
            raise UsageError("the state directory is an empty path: give the path of a folder")
        try:
            self._path = Path(path).absolute()  # who uses a library may change the working directory
        except OSError as error:
            raise _unusable(path, error) from None
        self._locks = {self._path: self._locked()}
        """By folder; that of the directory first."""
        self._boots = 0
        """As last counted here; 0: not yet."""
        self._keeping = threading.Lock()
        try:
            self._identity = self._load_identity()
        except OSError as error:
            self.close()
            raise _unusable(path, error) from None
        except UsageError:
            self.close()
            raise

    def _locked(self) -> FolderLock:
        try:
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            return FolderLock(self._path)
        except BlockingIOError:
            raise StateDirBusy(
                f"another process uses the state directory {self._path}; stop it, or give this peer a directory of its "
                "own"
            ) from None
        except OSError as error:
            raise _unusable(self._path, error) from None

    def hold(self, folder: Path) -> None:
        """Lock `folder`, too, which may be a link, or lie behind one, so that other state directories have it as well.
        It is made if it is missing; where it cannot be locked, the log says so.

        Raises StateDirBusy if another process uses it.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._locks[folder] = FolderLock(folder)
        except FileExistsError:  # it is no folder, which is told by who looks into it
            return
        except BlockingIOError:
            raise StateDirBusy(
                f"another process uses the folder {folder}, which is {os.path.realpath(folder)}; stop it, or give this "
                "peer a folder of its own"
            ) from None
        except OSError as error:
            why = error.strerror or error
            log.warning("%s cannot be locked (%s): see to it that no other peer uses that folder", folder, why)

    def keep(self) -> None:
        """Before something is written there, long after the start: see that it still is this peer's. Where somebody
        removed it, it is made anew, which the log says. From any thread.

        Raises StateDirBusy if another process uses it now, UsageError if it cannot be made.
        """
        with self._keeping:
            lost = [folder for folder, lock in self._locks.items() if lock.lost()]
            for folder in lost:
                before = self._locks[folder]
                if folder == self._path:
                    self._take_back()
                else:
                    self.hold(folder)
                before.close()
            if lost:
                log.warning(
                    "the lock in %s was gone, as where somebody removes the folder of a peer that runs: that folder is "
                    "made anew if it was missing, and locked again; what else was in it may be lost",
                    lost[0],
                )

    def _take_back(self) -> None:
        """The directory itself, with what makes it this peer's."""
        lock = self._locked()
        try:
            if self._load_identity(self._identity).peer != self._identity.peer:
                raise StateDirBusy(f"the state directory {self._path} is another peer's now; give this one another")
            if self._boots and not (self._path / "boot").exists():
                self._count(self._boots)
        except OSError as error:
            lock.close()
            raise _unusable(self._path, error) from None
        except UsageError:
            lock.close()
            raise
        self._locks[self._path] = lock

    @property
    def path(self) -> Path:
        """Where it is, absolute."""
        return self._path

    @property
    def identity(self) -> Identity:
        """This peer's key pair; made on first use of the directory."""
        return self._identity

    def next_incarnation(self, random32: int) -> int:
        """Count a start and return `counter << 32 | random32`, greater than all before; it is on disk on return."""
        _check_random(random32)
        path = self._path / "boot"
        try:
            text = path.read_text("ascii")
        except FileNotFoundError:
            text = "0"
        except UnicodeDecodeError:
            text = ""
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}; let this user read and write it") from None
        if not re.fullmatch(r"[0-9]{1,10}\n?", text) or int(text) + 1 >= BOOTS_MAX:
            raise _damaged(path, "a number of starts")
        counter = int(text) + 1
        try:
            self._count(counter)
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}") from None
        self._boots = counter
        return counter << 32 | random32

    def _count(self, starts: int) -> None:
        _write_atomically(self._path / "boot", f"{starts}\n".encode())

    def load_address_book(self) -> dict[str, Any]:
        """What was saved last; empty if nothing was, or if it cannot be read (then the log says so)."""
        path = self._path / "peers.json"
        try:
            with path.open("rb") as file:
                book = json.loads(file.read(ADDRESS_BOOK_BYTES_MAX))
            if not isinstance(book, dict):
                raise ValueError("not an object")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            log.warning("the address book %s cannot be read and is left out: %s", path, error)
            return {}
        return book

    def save_address_book(self, book: dict[str, Any]) -> None:
        """Replace the address book. Raises OSError if the disk is full, UsageError as `keep`; the old one stays."""
        self.keep()
        _write_atomically(self._path / "peers.json", json.dumps(book, indent=1, sort_keys=True).encode())

    def close(self) -> None:
        """Let another process use the directory. May be called twice."""
        for lock in self._locks.values():
            lock.close()
        self._locks = {}

    def _load_identity(self, new: Identity | None = None) -> Identity:
        """What is there; where nothing is, `new`, or else one that is made."""
        path = self._path / "identity.key"
        try:
            private = path.read_bytes()
        except FileNotFoundError:
            identity = new or Identity.generate()
            _write_atomically(path, identity.private_bytes())
            return identity
        if len(private) != PRIVATE_KEY_BYTES:
            raise _damaged(path, "a private key")
        return Identity.from_private_bytes(private)


class Ephemeral:
    """State of a peer that keeps nothing: a new identity each time, hence a new peer each time."""

    def __init__(self) -> None:
        self._identity = Identity.generate()
        self._boots = 0
        self._book: dict[str, Any] = {}

    @property
    def path(self) -> None:
        """There is no directory."""
        return None

    @property
    def identity(self) -> Identity:
        """This peer's key pair."""
        return self._identity

    def next_incarnation(self, random32: int) -> int:
        """As `StateDir.next_incarnation`, within this object."""
        _check_random(random32)
        self._boots += 1
        return self._boots << 32 | random32

    def load_address_book(self) -> dict[str, Any]:
        """What was saved last."""
        return dict(self._book)

    def save_address_book(self, book: dict[str, Any]) -> None:
        """Remember until the end of the process."""
        self._book = dict(book)

    def close(self) -> None:
        """Nothing is held."""


def free_state_dir(base: Path | str, run: str, role: str = TRAINER) -> StateDir:
    """The first of `<base>/<run>/peer-0`, `peer-1`, ... that no process uses, so peers of one host have one each; of a
    helper or an observer `helper-0`, `observer-0`, ..., so that none takes the place of a trainer's checkpoints."""
    folder, kind = Path(base) / _file_name(run), "peer" if role == TRAINER else role
    for number in range(PEERS_PER_HOST_MAX):
        try:
            state = StateDir(folder / f"{kind}-{number}")
        except StateDirBusy:
            continue
        if number:
            before = f"{kind}-0" + (f" to {kind}-{number - 1}" if number > 1 else "")
            log.info("in %s other processes use %s: this one takes %s", folder, before, state.path.name)
        return state
    raise StateDirBusy(f"all {PEERS_PER_HOST_MAX} state directories in {folder} are in use; name another directory")


def _file_name(run: str) -> str:
    """A folder name for any run name: what could be a path is written as %XX; different names stay different."""
    quoted = re.sub(r"[^A-Za-z0-9_-]", lambda match: "".join(f"%{b:02X}" for b in match[0].encode()), run)
    return quoted or "%"


def _check_random(random32: int) -> None:
    if not 0 <= random32 < 1 << 32:
        raise ValueError("random32 must be 32 bits")


def _unusable(path: Path | str, error: OSError) -> UsageError:
    why = f"{error.strerror} ({error.filename})" if error.filename else str(error.strerror or error)
    remedy = "make room, or choose another" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "choose another"
    return UsageError(f"the state directory {path} cannot be used: {why}; {remedy} (--state-dir DIR)")


def _damaged(path: Path, what: str) -> UsageError:
    return UsageError(f"{path} does not hold {what}; move the directory {path.parent} away to start as a new peer")


def _write_atomically(path: Path, data: bytes) -> None:
    """All of `data` or what was there before, whatever fails; on disk on return; readable by the owner only."""
    beside = path.with_name(path.name + ".new")
    beside.unlink(missing_ok=True)
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make a rename durable; a folder cannot be opened on Windows, where the rename itself is logged."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
