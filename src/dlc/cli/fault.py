"""A fault on purpose, for `dlc demo` and tests: SIGKILL in the middle of a round, where it hurts most."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from dlc.comm.ids import PeerId
from dlc.comm.messages import Bulk
from dlc.comm.node import Node
from dlc.peer import Peer


def kill_in_round(peer: Peer, channel: str, t: int, last_words: Callable[[], None]) -> None:
    """From round `t` on, kill this process as soon as it sends bulk while it owns chunks that are not finished."""

    def arm(node: Node, now: float) -> None:
        next_bulk = node.next_bulk

        def fatal(to: PeerId) -> Bulk | None:
            bulk, exchange = next_bulk(to), node.exchange
            plan = exchange.plan
            if bulk is None or plan is None or plan.entry.channel != channel or plan.entry.t < t:
                return bulk
            unfinished = sum(
                owner >= 0 and plan.owners[owner] == node.me and chunk not in exchange.held
                for chunk, owner in enumerate(plan.assignment)
            )
            if unfinished:
                last_words()
                os.kill(os.getpid(), signal.SIGKILL)
            return bulk

        setattr(node, "next_bulk", fatal)  # noqa: B010  a method of one object, on purpose

    peer._ask(arm)
