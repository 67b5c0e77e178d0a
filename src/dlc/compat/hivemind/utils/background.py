"""Work on a thread of its own that never keeps a program from ending."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_background(work: Callable[[], T], name: str) -> Future[T]:
    """Run `work` on a daemon thread; its result, or what it raises, is the future's."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # the future tells it
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=f"dlc-hivemind-{name}", daemon=True).start()
    return future


__all__ = ["in_background"]
