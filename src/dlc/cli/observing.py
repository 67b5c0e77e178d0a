"""`dlc join --role observer`: look on at a run, and be an address that others join by, until Ctrl-C."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from dlc.errors import UsageError
from dlc.strategyspec import WITHOUT_LOG

if TYPE_CHECKING:
    from dlc.cli.sinks import Event
    from dlc.peer import Peer

log = logging.getLogger(__name__)

LOOK_S = 0.5


def check_observed(found: bool) -> None:
    """UsageError: it is to found a run."""
    if found:
        raise UsageError("an observer founds no run, as it has no vote: leave --found away, and it waits for one")


def look_on(
    peer: Peer,
    events: queue.SimpleQueue[object],
    stop: threading.Event,
    as_json: bool,
    tell_start: Callable[[Callable[[Event], None]], None],
) -> None:
    """Tell of members and rounds until `stop`, the end of the run included: more may come.

    SwarmClosed: another process has this peer's identity.
    """
    from dlc.cli.sinks import JsonLines, LogLines
    from dlc.train.telling import Teller

    lines, log_lines = JsonLines(muted=not as_json), LogLines()
    rounds = 0

    def take(event: Event) -> None:
        lines.take(event)
        log_lines.take(event)

    tell_start(lines.take)
    if peer.spec.strategy in WITHOUT_LOG:
        log.info(
            'a run with strategy = "%s" has no log of rounds to look on at: who comes and who leaves is all that is '
            "told here",
            peer.spec.strategy,
        )
    teller = Teller(peer, take, events)
    while not stop.wait(LOOK_S):
        for done in teller.peer_events():
            rounds += 1
            take({"event": "looked_on", **done.report.to_dict()})
        peer.members()  # SwarmClosed where nothing more will come
    lines.take({"event": "end", "rounds": rounds})
