"""What the tests of the compat layer share."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.compat.fake_swarm import Town
from tests.helpers import wait_until


@pytest.fixture(autouse=True)
def _everybody_leaves_in_the_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No thread of an averager outlives the swarm of its test."""
    towns: list[Town] = []
    make = Town.__init__

    def made(self: Town) -> None:
        make(self)
        towns.append(self)

    monkeypatch.setattr(Town, "__init__", made)
    before = threading.active_count()
    yield
    for town in towns:
        for peer in tuple(town.peers.values()):
            peer.leave()
    if towns:
        wait_until(lambda: threading.active_count() <= before, 120, "threads of averagers whose swarm is gone")
