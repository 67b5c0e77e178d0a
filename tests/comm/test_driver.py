"""The driver between a machine and a transport that both only note what is asked of them; its thread is not started."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from dlc.comm.driver import POLL_S_MAX, Driver, Reply
from dlc.comm.framing import decode
from dlc.comm.ids import Voter
from dlc.comm.lanes import Event, Incoming
from dlc.comm.messages import Bulk, Contrib
from dlc.comm.transport import Transport

ME = Voter("me", 1)


class Links:
    """Stands in for a transport; `room`: its links take messages. `came`: what comes in next."""

    def __init__(self) -> None:
        self.room, self.went = True, list[tuple[str, Bulk]]()
        self.came, self.waited_s = list[Event](), list[float]()

    def poll(self, wait_s: float, wanted: list[str]) -> list[Event]:
        self.waited_s.append(wait_s)
        came, self.came = self.came, []
        return came

    def send_bulk(self, address: str, frames: Any) -> bool:
        if self.room:
            self.went.append((address, cast(Bulk, decode(frames, bytes(8))[1])))
        return self.room


class Source:
    """A machine with bulk for "her", who has this address."""

    def __init__(self, *messages: Bulk) -> None:
        self.messages, self.address = list(messages), "her:1"

    def work_aside(self, aside: Callable[..., None]) -> None:
        pass

    def pending_bulk(self) -> set[str]:
        return {"her"} if self.messages else set()

    def next_bulk(self, peer: str) -> Bulk | None:
        return self.messages.pop(0) if self.messages else None

    def record_of(self, peer: str) -> Any:
        return SimpleNamespace(bulk=(self.address,))


def test_what_was_taken_for_a_peer_that_moves_meanwhile_goes_to_where_it_is() -> None:
    """It was gone: her part in that chunk's mean, or the result that she lacked."""
    links = Links()
    driver = Driver(cast(Transport, links), ME, lambda event: None)
    sent = [Contrib("train", b"", chunk, 1.0, 1, bytes(3)) for chunk in range(3)]
    source = Source(*sent)
    driver.install(cast(Any, source), bytes(8), cast(Any, source))
    links.room = False
    assert driver._want_write() == ["her:1"]
    driver._pump("her:1")
    assert len(source.messages) == 2, "the first is taken out of the machine"
    source.address, links.room = "her:2", True
    assert driver._want_write() == ["her:2"]
    driver._pump("her:2")
    assert links.went == [("her:2", message) for message in sent]


def test_bulk_that_comes_before_there_is_a_use_for_it_keeps_no_processor_busy() -> None:
    """One that restarts is sent chunks while it still asks for the run: it looked at its sockets without a pause."""
    links = Links()
    driver = Driver(cast(Transport, links), ME, lambda event: None)
    links.came = [Incoming("bulk", [b"x"], None, None, "")]
    for _ in range(2):
        driver._turn()
    assert links.waited_s == [POLL_S_MAX, POLL_S_MAX]


def test_what_a_call_gave_is_let_go_with_its_reply() -> None:
    """A checkpoint is as large as the model: no collector of cycles is to be waited for."""

    class Image:
        pass

    reply, image = Reply[Image](), Image()
    reply.set_result(image)
    assert reply.result() is image
    gone = weakref.ref(image)
    gc.disable()
    try:
        del reply, image
        assert gone() is None
    finally:
        gc.enable()
