"""The applied log: what is set aside where two histories part."""

from __future__ import annotations

from dlc.comm.entries import EMPTY, LogState
from dlc.comm.log import Log


def test_what_a_lost_history_had_after_the_split_is_told_in_rounds_and_tokens() -> None:
    """Two training rounds and a config entry since the common ancestor; the entries before it are not lost."""
    mine, shared = [bytes([i]) * 32 for i in range(1, 7)], 3
    log = Log()
    log.install(LogState(tokens=900.0), (EMPTY, *mine), (0.0, 0.0, 200.0, 500.0, 700.0, 700.0, 900.0))
    theirs = (EMPTY, *mine[:shared], b"x" * 32, b"y" * 32)
    assert log.beyond(theirs) == (2, 400.0)
    assert log.beyond((EMPTY, *mine)) == (0, 0.0)
