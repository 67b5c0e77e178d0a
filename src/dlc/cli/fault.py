"""Faults on purpose, for `dlc demo`, benchmarks and tests: in the middle of a round, where they hurt most."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from dlc.comm.ids import PeerId
from dlc.comm.messages import Bulk, Result
from dlc.comm.node import Node
from dlc.peer import Peer


def kill_in_round(peer: Peer, channel: str, t: int, last_words: Callable[[], None]) -> None:
    """From round `t` on, kill this process as soon as it sends bulk while it owns chunks that are not finished; or,
    where all that the others sent was here first, before it finishes the last of these."""

    def ripe(node: Node) -> bool:
        plan = node.exchange.plan
        return plan is not None and plan.entry.channel == channel and plan.entry.t >= t and unfinished(node) > 0

    def die(node: Node) -> None:
        last_words()
        os.kill(os.getpid(), signal.SIGKILL)

    def arm(node: Node, now: float) -> None:
        collector = node.exchange.collector
        close = collector._close

        def last(*chunk: Any) -> Result:
            if ripe(node) and unfinished(node) == 1:
                die(node)
            return close(*chunk)

        setattr(collector, "_close", last)  # noqa: B010  a method of one object, on purpose

    strike(peer, ripe, die)
    peer._ask(arm)


def strike(peer: Peer, ripe: Callable[[Node], bool], act: Callable[[Node], None]) -> None:
    """Call `act`, once, on the driver thread, when a bulk message is about to leave and `ripe` says yes."""

    def arm(node: Node, now: float) -> None:
        next_bulk = node.next_bulk

        def fatal(to: PeerId) -> Bulk | None:
            bulk = next_bulk(to)
            if bulk is not None and ripe(node):
                setattr(node, "next_bulk", next_bulk)  # noqa: B010  as above
                act(node)
            return bulk

        setattr(node, "next_bulk", fatal)  # noqa: B010  as above

    peer._ask(arm)


def unfinished(node: Node) -> int:
    """Chunks of the present plan that this peer owns and has not finished."""
    return node.exchange.collector.n_open
