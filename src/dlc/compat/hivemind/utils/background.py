"""Work on a thread of its own that never keeps a program from ending."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class AwaitableFuture(Future[T]):
    """A future that a coroutine may await, too, as it may those of Hivemind."""

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self).__await__()


def in_background(work: Callable[[], T], name: str) -> AwaitableFuture[T]:
    """Run `work` on a daemon thread; its result, or what it raises, is the future's."""
    future: AwaitableFuture[T] = AwaitableFuture()

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
