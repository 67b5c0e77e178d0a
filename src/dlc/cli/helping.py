"""`dlc join --role helper`: own a share of the parameters of a run with a parameter server, until it ends."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from dlc.comm.roles import TRAINER
from dlc.errors import SwarmClosed, UsageError

if TYPE_CHECKING:
    from dlc.cli.sinks import Event
    from dlc.peer import Peer
    from dlc.runspec import RunSpec

log = logging.getLogger(__name__)

Serving = tuple[tuple[int, ...], tuple[int, ...], int]
"""Spans that are owned, those backed as a standby, and the newest round."""
LOOK_S = 0.5
SAY_EVERY = 20
"""Looks between two lines of the log, where nothing changes."""


def check_helped(spec: RunSpec) -> None:
    """UsageError: the run has no work for a helper."""
    if spec.strategy != "parameter-server":
        raise UsageError(
            'a helper serves the parameters of a run with strategy = "parameter-server", and this one has '
            f'"{spec.strategy}": leave out --role helper'
        )


def help_out(
    peer: Peer,
    events: queue.SimpleQueue[object],
    stop: threading.Event,
    as_json: bool,
    tell_start: Callable[[Callable[[Event], None]], None],
) -> None:
    """Serve until `stop`, or until the run has had its rounds and all trainers have left.

    UsageError: the run has another strategy. SwarmClosed: another process has this peer's identity.
    """
    from dlc.cli.sinks import JsonLines
    from dlc.server import ParameterServer

    spec = peer.spec
    check_helped(spec)
    lines = JsonLines(muted=not as_json)
    server = ParameterServer(peer, outer=spec.outer.ending(spec.rounds), spec=spec.server)
    tell_start(lines.take)
    said: Serving = ((), (), 0)
    now = said
    looks = 0
    while not stop.wait(LOOK_S):
        while not events.empty():
            events.get()  # members and so on: nothing that a helper tells
        if server.ended.is_set():
            raise server.error or SwarmClosed("the peer has left")
        now = (*server.spans(), server.step())
        owned, backed, step = now
        looks += 1
        if now != said and (now[:2] != said[:2] or as_json or looks >= SAY_EVERY):
            said, looks = now, 0
            lines.take({"event": "serving", "owned": list(owned), "standby": list(backed), "t": step})
            spans = "1 span" if len(owned) == 1 else f"{len(owned)} spans"
            log.info("owner of %s, standby of %d, round %d", spans, len(backed), step)
        trainers = [m for m in peer.members() if m.alive and not m.left and m.role == TRAINER]
        if spec.rounds and step >= spec.rounds and not trainers:
            log.info("the run is over, and all trainers have left")
            break
    lines.take({"event": "end", "owned": list(now[0]), "standby": list(now[1]), "t": now[2]})
