"""Calls of any thread to the machine that a peer's driver thread drives, and waiting for what comes of them."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

from dlc.comm.clock import clock
from dlc.comm.driver import Driver
from dlc.comm.effects import Effect
from dlc.comm.node import Node
from dlc.errors import RoundTimeout, SwarmClosed, UsageError
from dlc.handles import FORKED, Flag, Unpicklable

log = logging.getLogger(__name__)
T = TypeVar("T")

LOOK_S = 0.25
"""Who waits for a condition looks at it at least this often."""


class DriverCalls(Unpicklable, ABC):
    """The part of `dlc.Peer` that hands work to the driver thread."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._node: Node | None = None
        """None before the peer is part of a run."""
        self._waiting: set[Flag] = set()
        """One of each thread in `_wait`: told after every event."""
        self._closed = False
        self._pid = os.getpid()

    @abstractmethod
    def _held_up(self) -> str:
        """What is known to hold up what is waited for, after a colon; empty where nothing is."""

    def _ask(self, fn: Callable[[Node, float], T]) -> T:
        """Run `fn(node, now)` on the driver thread. Raises SwarmClosed, UsageError in a forked child, and what `fn`
        raises."""
        return self._driver.ask(self._on_node(fn))

    def _look(self, fn: Callable[[Node, float], T]) -> T:
        """The same, also while the driver thread waits for work that is done aside; `fn` only reads."""
        return self._driver.ask(self._on_node(fn), look=True)

    def _act(self, fn: Callable[[Node, float], list[Effect]]) -> None:
        """As `_ask`, and carry out the effects."""
        self._ask(lambda node, now: self._perform(fn(node, now)))

    def _tell(self, fn: Callable[[Node, float], list[Effect]]) -> None:
        """As `_act`, without waiting for it; from any thread.

        Nobody waits for its result: an error of the machine ends the driver, before the machine does anything more, as
        one in any other event does."""

        def run(now: float) -> None:
            try:
                if self._node is not None:
                    self._perform(fn(self._node, now))
            except BaseException as error:
                log.exception("the driver stops on an error")
                self._driver.stop(0.0, error)

        self._driver.call(run)

    def _perform(self, effects: list[Effect]) -> None:
        """On the driver thread."""
        self._driver.perform(effects)

    def _wait(self, condition: Callable[[], bool], timeout_s: float | None, what: str) -> None:
        """Wait until `condition` holds; it is looked at again after every event. RoundTimeout tells `what` is lacking;
        SwarmClosed: the driver has ended."""
        deadline = None if timeout_s is None else clock() + timeout_s
        changed = Flag()
        try:
            self._waiting.add(changed)
            while not condition():
                self._check_may_wait()
                if self._driver.error is not None or self._closed:
                    raise self._driver.closed_error()
                left = LOOK_S if deadline is None else min(LOOK_S, deadline - clock())
                if left <= 0:
                    raise RoundTimeout(f"{what} after {timeout_s:g} s{self._held_up()}")
                changed.wait(left)
                changed.clear()
        finally:
            self._waiting.discard(changed)

    def _tell_waiting(self) -> None:
        for changed in tuple(self._waiting):
            changed.set()

    def _check_may_wait(self) -> None:
        """UsageError: this is the driver thread, on which all that is waited for would have to be done."""
        if self._driver.is_current:
            raise UsageError(
                "a callback of on_event, or of a group, cannot wait for the other peers, as it runs on the thread that "
                "talks to them: hand the call to a thread of yours, or use on_member_change, whose callbacks have one"
            )

    def _refuse_fork(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(FORKED)

    def _on_node(self, fn: Callable[[Node, float], T]) -> Callable[[float], T]:
        self._refuse_fork()

        def run(now: float) -> T:
            if self._node is None:
                raise SwarmClosed("the peer is not part of a run")
            return fn(self._node, now)

        return run
