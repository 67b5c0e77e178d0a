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
    from dlc.server import ParameterServer

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
    """Serve until `stop`, or until the run has had its rounds and all trainers have left; then tell what was served.

    UsageError: the run has another strategy. SwarmClosed: another process has this peer's identity.
    """
    from dlc.cli.sinks import JsonLines
    from dlc.monitor.table import megabytes
    from dlc.server import ParameterServer

    spec = peer.spec
    check_helped(spec)
    lines = JsonLines(muted=not as_json)
    server = ParameterServer(peer, outer=spec.outer.ending(spec.rounds), spec=spec.server)
    tell_start(lines.take)
    said: Serving = ((), (), 0)
    looks, why = 0, "left the run"
    first: int | None = None  # the round that its first spans were of
    while not stop.wait(LOOK_S):
        while not events.empty():
            events.get()  # members and so on: nothing that a helper tells
        if server.ended.is_set():
            raise server.error or SwarmClosed("the peer has left")
        now = _serving(server)
        owned, backed, step = now
        first = step if first is None and (owned or backed) else first
        looks += 1
        if now != said and (now[:2] != said[:2] or as_json or looks >= SAY_EVERY):
            said, looks = now, 0
            lines.take({"event": "serving", "owned": list(owned), "standby": list(backed), "t": step})
            log.info("%s, round %d", _spans(now), step)
        trainers = [m for m in peer.members() if m.alive and not m.left and m.role == TRAINER]
        if spec.rounds and step >= spec.rounds and not trainers:
            why = "the run is over, and all trainers have left"
            break
    owned, backed, step = now = _serving(server)
    rounds, (sent, received) = max(0, step - (step if first is None else first)), server.moved()
    told = f"sent {megabytes(sent) or 0}, received {megabytes(received) or 0}"
    log.info("%s; round %d, %d of them served here; %s; %s", why, step, rounds, _spans(now), told)
    moved = {"rounds": rounds, "bytes_sent": sent, "bytes_received": received}
    lines.take({"event": "end", "owned": list(owned), "standby": list(backed), "t": step, **moved})


def _serving(server: ParameterServer) -> Serving:
    return (*server.spans(), server.step())


def _spans(serving: Serving) -> str:
    owned, backed, _ = serving
    return f"owner of {'1 span' if len(owned) == 1 else f'{len(owned)} spans'}, standby of {len(backed)}"
