"""Work on a thread of its own that never keeps a program from ending."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, TypeVar

from dlc.handles import Flag

T = TypeVar("T")


class AwaitableFuture(Future[T]):
    """A future that a coroutine may await, too, as it may those of Hivemind.

    Ctrl-C may come in anybody's wait: that of a plain future may then keep a lock that whoever has the result needs to
    set it. Here no wait takes one before the result is there.
    """

    def __init__(self) -> None:
        super().__init__()
        over = self._over = Flag()
        self.add_done_callback(lambda _: over.set())  # it must not hold this future, which keeps it

    def result(self, timeout: float | None = None) -> T:
        """As of a `Future`."""
        self._wait(timeout)
        return super().result(0.0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As of a `Future`."""
        self._wait(timeout)
        return super().exception(0.0)

    def _wait(self, timeout_s: float | None) -> None:
        """TimeoutError, unless only a look is wanted, which is what a plain future is asked for."""
        if not self._over.wait(timeout_s) and timeout_s:
            raise TimeoutError

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self).__await__()


def in_background(work: Callable[[], T], name: str) -> AwaitableFuture[T]:
    """Run `work` on a daemon thread; its result, or what it raises, is the future's, which cannot be cancelled."""
    future: AwaitableFuture[T] = AwaitableFuture()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # the future tells it
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=f"dlc-hivemind-{name}", daemon=True).start()
    return future


__all__ = ["AwaitableFuture", "in_background"]
