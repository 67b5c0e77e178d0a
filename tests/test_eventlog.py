"""What the log says of events."""

from __future__ import annotations

import pytest

from dlc.comm.events import Apart
from dlc.comm.ids import Voter
from dlc.eventlog import log_event
from dlc.joining import Introduction


def test_two_that_do_not_reach_each_other_are_named_with_who_carries_their_messages(
    caplog: pytest.LogCaptureFixture,
) -> None:
    intro = Introduction.__new__(Introduction)
    log_event(Apart(Voter("anna" * 8, 1), "carl" * 8), intro, heard=True)
    (line,) = [r.getMessage() for r in caplog.records if r.name == "dlc.eventlog"]
    assert line.startswith("annaanna and this host do not reach each other") and "by way of carlcarl" in line
    assert "firewall" in line
