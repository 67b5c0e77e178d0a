"""Sites that serve measurements in this process."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import dlc.bench.flow as flow_module
import dlc.bench.link as link_module
import dlc.bench.stream as stream_module
import dlc.bench.transfer as transfer_module
from dlc.bench.serve import Site
from dlc.comm.clock import clock
from dlc.comm.security import LinkSecurity

KEYED = LinkSecurity.derive(bytes(32), "")
OTHER = LinkSecurity.derive(bytes(31) + b"\1", "")
WAIT_S = 120.0
"""For what is to happen: a machine may stand still for seconds."""


@contextlib.contextmanager
def serving(security: LinkSecurity | None = KEYED, listen: str = "127.0.0.1:0") -> Iterator[Site]:
    site, stop = Site(listen, security), threading.Event()
    thread = threading.Thread(target=site.run, args=(stop,), name="test-site")
    thread.start()
    try:
        yield site
    finally:
        stop.set()
        site.wake()
        thread.join(WAIT_S)
        site.close()
        assert not thread.is_alive()


def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still for seconds is no site that is gone, no link that lost a ping, and no slow start."""
    for module, name in (
        (stream_module, "OPEN_S"),
        (stream_module, "BUSY_S"),
        (transfer_module, "STALL_S"),
        (transfer_module, "PING_LOST_S"),
        (link_module, "PING_S_MAX"),
    ):
        monkeypatch.setattr(module, name, WAIT_S)
    monkeypatch.setattr(flow_module, "GROWTH", 1e9)


def reached_by_polls(monkeypatch: pytest.MonkeyPatch, limit_s: float) -> None:
    """Who does not answer is given up after so many seconds of polls: none passes while the machine stands still."""
    opening, opened = threading.local(), stream_module.Stream.open

    def polled() -> float:
        polls: Iterator[int] | None = getattr(opening, "polls", None)
        return clock() if polls is None else next(polls) * stream_module.POLL_S_MAX

    def open_(self: stream_module.Stream, *rest: Any) -> int:
        opening.polls = itertools.count()
        try:
            return opened(self, *rest)
        finally:
            opening.polls = None

    monkeypatch.setattr(stream_module, "OPEN_S", limit_s)
    monkeypatch.setattr(stream_module, "clock", polled)
    monkeypatch.setattr(stream_module.Stream, "open", open_)
