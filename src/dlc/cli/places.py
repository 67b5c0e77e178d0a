"""What the environment says: where state lies, and which key file is meant by default."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dlc.comm.identity import Identity
from dlc.errors import KeyFileError, UsageError
from dlc.statedir import StateDir
from dlc.train.shelf import expanded


def home() -> Path:
    """The folder with the state of all peers of this user. UsageError: this user has no folder at all."""
    named = os.environ.get("DLC_HOME")
    mine = expanded("~")
    if not named and not mine.is_absolute():
        raise UsageError("this user has no home folder: set DLC_HOME to where the state of peers is to be")
    return expanded(named) if named else mine / ".local" / "state" / "dlc"


def key_file(given: str | None) -> Path | None:
    """The key file: the one given, else that of DLC_KEY_FILE, else none."""
    named = given or os.environ.get("DLC_KEY_FILE")
    return expanded(named) if named else None


def run_key(given: str | None) -> bytes | None:
    """The key in the file that `key_file` says; None: it says none. KeyFileError: there is no key in it."""
    from dlc.comm.security import load_run_key  # zmq, which `dlc --help` does without

    path = key_file(given)
    try:
        return None if path is None else load_run_key(path)
    except KeyFileError as error:
        if given:
            raise
        raise KeyFileError(f"{error} (DLC_KEY_FILE in the environment names it)") from None


class KeptOpen:
    """A state directory lent to a peer: closing it is for the lender, who still writes there after the leave."""

    def __init__(self, state: StateDir) -> None:
        self._state = state

    @property
    def path(self) -> Path:
        """Where it is."""
        return self._state.path

    @property
    def identity(self) -> Identity:
        """This peer's key pair."""
        return self._state.identity

    def next_incarnation(self, random32: int) -> int:
        """As `StateDir.next_incarnation`."""
        return self._state.next_incarnation(random32)

    def load_address_book(self) -> dict[str, Any]:
        """As `StateDir.load_address_book`."""
        return self._state.load_address_book()

    def save_address_book(self, book: dict[str, Any]) -> None:
        """As `StateDir.save_address_book`."""
        self._state.save_address_book(book)

    def close(self) -> None:
        """Left to the lender."""
