"""Troubles that may last for hours, such as a full disk: each would be told as often as it is come upon."""

from __future__ import annotations


class Recurring:
    """A trouble. Of the times that it comes in a row the 1st, 2nd, 4th, 8th ... are told. For one thread at a time."""

    def __init__(self) -> None:
        self._kind: type[BaseException] | None = None
        self._times = 0

    def came(self, error: BaseException) -> str | None:
        """What is to be said after it of how often it came; None: this time is not told. One of another kind is
        another trouble."""
        self._times = self._times + 1 if type(error) is self._kind else 1
        self._kind = type(error)
        if self._times & (self._times - 1):
            return None
        return f" (for the {self._times}th time in a row)" if self._times > 2 else " (again)" * (self._times - 1)

    def passed(self) -> bool:
        """It did not come: whether it had, the last time."""
        lasted, self._times = self._times > 0, 0
        return lasted
