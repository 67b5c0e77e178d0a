"""A machine outside the log, reached from other threads: what `Peer.serve` returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from dlc.comm.effects import Effect
from dlc.comm.service import Service, ServiceNews
from dlc.errors import SwarmClosed, UsageError

if TYPE_CHECKING:
    from dlc.peer import Peer

S = TypeVar("S", bound=Service)
R = TypeVar("R")


@dataclass(frozen=True)
class Stopped(ServiceNews):
    """The last news of all: the peer has left, or its driver thread has ended."""

    error: SwarmClosed


class Served(Generic[S]):
    """The service lives on the peer's driver thread: everything of it is read and changed there, through here."""

    def __init__(self, peer: Peer, service: S) -> None:
        self._peer, self._service = peer, service
        self._closed = False

    def ask(self, fn: Callable[[S, float], R]) -> R:
        """`fn(service, now)` on the driver thread, and its result. Raises SwarmClosed, UsageError after `close`, and
        what `fn` raises."""
        self._refuse_closed()
        return self._peer._ask(lambda node, now: fn(self._service, now))

    def act(self, fn: Callable[[S, float], list[Effect]]) -> None:
        """`fn(service, now)` on the driver thread; its effects are carried out."""
        self._refuse_closed()
        self._peer._act(lambda node, now: node.serve(lambda: fn(self._service, now), now))

    def check_may_wait(self) -> None:
        """UsageError: this is the driver thread, on which all that is waited for would have to be done."""
        self._peer._check_may_wait()

    def listen(self, listener: Callable[[ServiceNews], None]) -> None:
        """Called on the driver thread with everything that any service of this peer tells, `Stopped` at the end: it
        must be quick and must not raise."""
        self._peer._listeners.append(listener)

    def unlisten(self, listener: Callable[[ServiceNews], None]) -> None:
        """Once more changes nothing."""
        if listener in self._peer._listeners:
            self._peer._listeners.remove(listener)

    def close(self) -> None:
        """The peer carries it no longer; messages for it are dropped from now on. Once more changes nothing."""
        if self._closed:
            return
        self._closed = True
        self._peer._ask(lambda node, now: node.services.remove(self._service))

    def _refuse_closed(self) -> None:
        if self._closed:
            raise UsageError("it was closed: make another one")
