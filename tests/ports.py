"""Ports that tests listen on: none of them is given again soon, to this test process or to another.

Who has known a peer dials it for as long as it lives. Where the system gives the port of one that is gone to the next
that asks, which may be another test's, two swarms without a key become one, and a stranger answers where a test wants
nobody. So port 0 is one of a range here that systems do not give out: its own for each test process of a run, and
gone through from where other runs on the machine hardly are.
"""

from __future__ import annotations

import itertools
import os

import zmq

from dlc.comm.lanes import Lane
from dlc.comm.transport import Transport
from dlc.errors import UsageError

FIRST, END = 10_000, 21_000
"""Above, `tests.swarm.free_addresses` begins."""


def take(worker: int = 0, workers: int = 1) -> None:
    """From here on whoever listens on port 0 in this process has one of ours: it is the `worker`-th of so many."""
    first, end = (FIRST + (END - FIRST) * k // workers for k in (worker, worker + 1))
    start = os.getpid() * 254 % (end - first)
    ports = itertools.cycle([*range(first + start, end), *range(first, first + start)])
    bind = Transport._bind

    def bound(self: Transport, sock: zmq.Socket[bytes], lane: Lane, port: int) -> int:
        for number in itertools.islice(ports, end - first) if port == 0 else [port]:
            try:
                return bind(self, sock, lane, number)
            except UsageError as error:
                if port or "is taken" not in str(error):
                    raise
        raise AssertionError("no free ports")

    Transport._bind = bound  # type: ignore[method-assign]
