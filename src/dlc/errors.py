"""Every error that dlc raises on purpose.

    DlcError
    ├── UsageError              the caller can mend it: a wrong option, value, file or shape
    │   ├── ConfigError         RUN.toml or a RunSpec field
    │   ├── KeyFileError        the run key is missing, unreadable or malformed
    │   ├── DataError           the data source is empty, unreadable or too short
    │   ├── CheckpointError     a checkpoint is cut short, or belongs to another model
    │   │   └── NoRoom          the disk is too full for one
    │   └── StateDirBusy        another process uses the same state directory
    ├── JoinError               the swarm could not be joined
    │   ├── UnreachableError    no bootstrap address answered
    │   ├── WrongKeyError       an address answered, but the handshake failed
    │   └── SpecMismatch        the swarm runs another RunSpec
    ├── RoundTimeout            the caller's own time limit ran out before the round was committed
    ├── RoundLost               the round went on without the caller, who was away; the next call is none the worse
    ├── SwarmClosed             the peer has left, or its driver thread has ended
    └── ProtocolError           *theirs*: a frame that no correct peer sends; dropped, counted, never fatal

What a wide-area network does every day (a late peer, a lost link, a dead owner) is no error: it stands in the
`RoundReport`.
"""

from __future__ import annotations


class DlcError(Exception):
    """Base of all errors of this package."""


class UsageError(DlcError):
    """The caller gave something that cannot work; the message says what to give instead."""


class ConfigError(UsageError):
    """A field of RUN.toml or of a RunSpec is unknown, missing or out of range."""


class KeyFileError(UsageError):
    """The run key cannot be used."""


class DataError(UsageError):
    """The data source cannot be used."""


class CheckpointError(UsageError):
    """A checkpoint, or a run's state, cannot be used; nothing was changed."""


class NoRoom(CheckpointError):
    """The disk, or what is left of a quota on it, is too small for a checkpoint or a model."""


class StateDirBusy(UsageError):
    """The state directory is locked by another process."""


class JoinError(DlcError):
    """The swarm could not be joined."""


class UnreachableError(JoinError):
    """No bootstrap address answered in time."""


class WrongKeyError(JoinError):
    """An address was reached, but it does not share our run key."""


class SpecMismatch(JoinError):
    """The swarm's RunSpec differs from ours; the message names the fields."""


class RoundTimeout(DlcError):
    """The caller's time limit passed before the round was committed; the local tensors are unchanged."""


class RoundLost(DlcError):
    """A round of an all-reduce was decided while this peer was away, so its mean is not here; the tensors are
    unchanged, and may be averaged anew."""


class SwarmClosed(DlcError):
    """The peer is no longer part of the swarm."""


class ProtocolError(DlcError):
    """A message from another peer is malformed; the receiver drops it and goes on."""


def first_line(error: BaseException) -> str:
    """What an error of another library says, for a sentence of ours: its first line, or its kind if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
