"""A readable account of the last events of one schedule. Only made when asked for: a seed replays exactly."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable

from dlc.comm import messages as msg
from dlc.comm.ids import Ballot, Voter

LINES_MAX = 400
QUIET = (msg.Ping, msg.Ack, msg.PingReq, msg.IndirectAck)
"""Left out: they are nine of ten messages."""
ITEMS_SHOWN = 6


class Transcript:
    def __init__(self, lines_max: int = LINES_MAX) -> None:
        self._lines: deque[tuple[float, str, str, object]] = deque(maxlen=lines_max)

    def received(self, now: float, receiver: Voter, sender: Voter, message: msg.Message) -> None:
        if not isinstance(message, QUIET):
            self._lines.append((now, str(receiver), f"<- {sender}", message))

    def said(self, now: float, who: Voter, verb: str, what: object) -> None:
        self._lines.append((now, str(who), verb, what))

    def happened(self, now: float, what: str) -> None:
        self._lines.append((now, "----", what, ""))

    def lines(self) -> Iterable[str]:
        for now, who, verb, what in self._lines:
            yield f"{now:9.3f}  {who:>6} {verb:<12} {what if isinstance(what, str) else show(what)}"


def show(value: object) -> str:
    """A short form: hashes by their first three bytes, voters and ballots as they name themselves."""
    if isinstance(value, bytes):
        return value[:3].hex() or "-"
    if isinstance(value, Voter | Ballot):
        return str(value)
    if isinstance(value, float):
        return f"{value:g}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        return f"{type(value).__name__}({', '.join(f'{n}={show(v)}' for n, v in fields if _telling(v))})"
    if isinstance(value, tuple | list):
        shown = ", ".join(show(v) for v in value[:ITEMS_SHOWN])
        return f"[{shown}{', …' if len(value) > ITEMS_SHOWN else ''}]"
    return str(value)


def _telling(value: object) -> bool:
    return value is not None and value != () and value != b"" and value != ""
