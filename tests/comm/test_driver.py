"""The driver between a machine and a transport that both only note what is asked of them; its thread is not started."""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from dlc.comm import driver as module
from dlc.comm.catalogue import CODES
from dlc.comm.driver import POLL_S_MAX, Driver, Reply
from dlc.comm.effects import Notify, Pace, Send
from dlc.comm.events import MemberLeft
from dlc.comm.framing import Envelope, decode, encode
from dlc.comm.ids import Voter
from dlc.comm.lanes import Broken, Event, Incoming, LinkEvent, Route
from dlc.comm.messages import PROTOCOL_VERSION, Bulk, Contrib, Gossip, Hello, Ping, Welcome
from dlc.comm.transport import Transport
from dlc.comm.wire import pack, unpack
from dlc.errors import ProtocolError, SwarmClosed

ME = Voter("me", 1)
PING = Ping(1, Gossip((), ()))


class Links:
    """Stands in for a transport; `room`: its links take messages. `came`: what comes in next."""

    def __init__(self) -> None:
        self.room, self.went = True, list[tuple[str, Bulk]]()
        self.came, self.waited_s = list[Event](), list[float]()
        self.forgotten, self.paced = list[str](), list[tuple[str, float | None]]()
        self.told = list[str]()
        self.replied = list[tuple[Route, Any]]()
        self.bulk_entered = True

    def poll(self, wait_s: float, wanted: Sequence[str] = (), bulk: bool = True) -> list[Event]:
        self.waited_s.append(wait_s)
        came, self.came = self.came, []
        return came

    def forget(self, address: str) -> None:
        self.forgotten.append(address)

    def wake(self) -> None:
        pass

    def send_control(self, address: str, frames: Any) -> None:
        self.told.append(address)

    def reply(self, route: Route, frames: Any) -> None:
        self.replied.append((route, frames))

    def close(self, linger_s: float = 1.0) -> None:
        pass

    def revive_bulk(self) -> None:
        pass

    def mend_bulk(self) -> bool:
        return False

    def pace(self, address: str, rate_Bps: float | None, control: str) -> None:
        self.paced.append((address, rate_Bps))

    def send_bulk(self, address: str, frames: Any) -> bool:
        if self.room:
            self.went.append((address, cast(Bulk, decode(frames, bytes(8))[1])))
        return self.room


class Source:
    """A machine with bulk for "her", who has this address, or is not known; `log`: what it was given to do."""

    awaits_bulk, torn = False, False

    def __init__(self, *messages: Bulk) -> None:
        self.messages, self.address = list(messages), "her:1"
        self.known, self.log = True, list[Any]()
        self.control = ("her:0",)
        self.enough = threading.Event()
        """Set by the first breath."""

    def receive(self, sender: Voter, message: Any, now: float) -> list[Any]:
        self.log.append(message.chunk)
        return []

    def tick(self, now: float) -> list[Any]:
        self.log.append("tick")
        return []

    def next_deadline(self) -> float:
        return 0.0

    def breathe(self, now: float, *_: object) -> list[Any]:
        self.enough.set()
        return []

    def refused(self, peer: str, now: float) -> list[Any]:
        self.log.append(f"{peer} refused")
        return []

    def bulk_broken(self, peer: str) -> None:
        self.log.append(f"{peer} broken")

    def bulk_peers(self) -> set[str]:
        return set()

    def work_aside(self, aside: Callable[..., None]) -> None:
        pass

    def pending_bulk(self) -> set[str]:
        return {"her"} if self.messages else set()

    def next_bulk(self, peer: str) -> Bulk | None:
        return self.messages.pop(0) if self.messages else None

    def record_of(self, peer: str) -> Any:
        return SimpleNamespace(bulk=(self.address,), control=self.control) if self.known else None


def driven(links: Links, source: Source) -> Driver:
    driver = Driver(cast(Transport, links), ME, lambda event: None)
    driver.install(cast(Any, source), bytes(8), cast(Any, source))
    return driver


def chunk(number: int) -> Contrib:
    return Contrib("train", b"", number, 1.0, 1, bytes(3))


def coming(number: int) -> Incoming:
    return Incoming("control", encode(Voter("her", 1), bytes(8), chunk(number)), None, None, "")


def test_what_was_taken_for_a_peer_that_moves_meanwhile_goes_to_where_it_is() -> None:
    """It was gone: her part in that chunk's mean, or the result that she lacked."""
    sent = [chunk(number) for number in range(3)]
    links, source = Links(), Source(*sent)
    driver = driven(links, source)
    links.room = False
    assert driver.dispatch.want_write() == ["her:1"]
    driver.dispatch.pump("her:1")
    assert len(source.messages) == 2, "the first is taken out of the machine"
    source.address, links.room = "her:2", True
    assert driver.dispatch.want_write() == ["her:2"]
    driver.dispatch.pump("her:2")
    assert links.went == [("her:2", message) for message in sent]


def test_the_link_to_where_a_peer_s_bulk_went_before_is_closed() -> None:
    """One that was up stayed for ever, and what the kernel said of it was taken for what it says of the new one."""
    links, source = Links(), Source(chunk(0))
    driver = driven(links, source)
    for address in ("her:1", "her:1", "her:2", "her:1"):
        source.address = address
        assert driver.dispatch.want_write() == [address]
    assert links.forgotten == ["her:1", "her:2"] and driver.dispatch._addresses == {"her:1": "her"}
    driver.dispatch._addresses["her:1"] = "him"
    source.address = "her:2"
    assert driver.dispatch.want_write() == ["her:2"]
    assert links.forgotten == ["her:1", "her:2"], "it is his now"


def test_the_machine_hears_of_each_bulk_connection_that_ends() -> None:
    """What was on its way there is sent once more."""
    links, source = Links(), Source(chunk(0))
    driver = driven(links, source)
    driver._take(Broken("her:1"))
    assert source.log == [], "nothing has gone there"
    driver.dispatch.want_write()
    driver._take(Broken("her:1"))
    assert source.log == ["her broken"]
    source.address = "her:2"
    driver.dispatch.want_write()
    assert source.log == ["her broken"] * 2, "she moved, and the link to where she was is closed"
    driver.dispatch.want_write()
    driver.dispatch.forget("her")
    assert source.log == ["her broken"] * 3


def test_while_work_is_done_aside_no_more_bytes_are_held_back_than_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages were counted alone, of which each may have 4 MB."""
    monkeypatch.setattr(module, "HELD_BACK_BYTES_MAX", 100)
    monkeypatch.setattr(module, "BREATH_S", 0.0)
    links, breaths = Links(), 0
    came = Incoming("control", [bytes(20), bytes(40)], None, None, "")

    class Breathing(Source):
        def breathe(self, now: float, *_: object) -> list[Any]:
            nonlocal breaths
            breaths += 1
            links.came = [came]
            if breaths == 20:
                self.enough.set()
            return []

    source = Breathing()
    driver = driven(links, source)
    driver._aside(source.enough.wait, [])  # type: ignore[arg-type]
    assert list(driver._held_back) == [came] * 2
    driver._take_held_back()
    assert driver.bad_frames == 2
    source.enough.clear()
    breaths = 0
    driver._aside(source.enough.wait, [])  # type: ignore[arg-type]
    assert len(driver._held_back) == 2, "there is room again"


def test_what_is_taken_out_of_the_machine_last_waits_for_room_too() -> None:
    links, source = Links(), Source(chunk(0))
    driver = driven(links, source)
    links.room = False
    driver.dispatch.pump(*driver.dispatch.want_write())
    assert not source.messages and not links.went
    links.room = True
    driver.dispatch.pump(*driver.dispatch.want_write())
    assert links.went == [("her:1", chunk(0))] and driver.dispatch.want_write() == []


def test_what_was_held_back_comes_before_what_is_newer_and_before_time_does() -> None:
    """Or a message that came in time would be called late, and an older one contradict a newer one."""
    links, source = Links(), Source()
    driver = driven(links, source)
    driver.dispatch._warm_at = math.inf

    def hold_back(*numbers: int) -> None:
        links.came = [coming(number) for number in numbers]
        source.enough.clear()
        driver._aside(source.enough.wait, [])  # type: ignore[arg-type]

    hold_back(0, 1)
    links.came = [coming(2)]
    driver.call(lambda now: hold_back(3))
    driver._turn()
    assert source.log == [0, 1, 2, 3, "tick"]


def test_a_machine_in_doubt_is_given_nothing_any_more() -> None:
    links, source = Links(), Source()
    driver = driven(links, source)
    driver.dispatch._warm_at = math.inf
    links.came = [coming(0)]
    driver.error = SwarmClosed("in doubt")
    asked = driver.call(lambda now: source.log.append("call"))
    driver._turn()
    assert not source.log and not asked.done()
    driver._fail_calls()
    with pytest.raises(SwarmClosed, match="in doubt"):
        asked.result(0.0)


def test_what_was_called_before_the_end_is_answered_and_what_comes_later_is_told_of_it() -> None:
    driver, done = driven(Links(), Source()), list[str]()
    driver.on_stop = lambda: done.append("end")
    before, taken_back = driver.call(lambda now: "here"), driver.call(lambda now: done.append("taken back"))
    assert taken_back.cancel()
    driver._stopping = True
    driver._run()
    assert before.result(0.0) == "here" and done == ["end"]
    with pytest.raises(SwarmClosed, match="the peer has left"):
        driver.call(lambda now: None).result(0.0)


def test_calls_that_wait_for_a_driver_that_fails_are_told_why() -> None:
    links = Links()
    driver = driven(links, Source())

    def poll(*_: object) -> list[Event]:
        raise ValueError("a broken socket")

    links.poll = poll  # type: ignore[method-assign]
    waits = driver.call(lambda now: None)
    driver._run()
    with pytest.raises(SwarmClosed, match="a broken socket"):
        waits.result(0.0)


def test_work_done_aside_takes_no_small_number_for_zero() -> None:
    """Threads made later are as their maker was set, and this peer's state would be another one than the others'."""
    driver, found = driven(Links(), Source()), list[float]()
    small = torch.full((), 1e-40)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor takes none for zero")
    try:
        driver._aside(lambda: found.append((small * 1).item()), [])
    finally:
        torch.set_flush_denormal(False)
    assert found[0] > 0


def test_why_a_driver_ended_is_told_however_it_is_stopped_then() -> None:
    driver = driven(Links(), Source())
    driver.error = ValueError("what it was")
    driver.stop(0.0)
    driver.stop(0.0, SwarmClosed("another"))
    with pytest.raises(SwarmClosed, match="what it was"):
        driver.call(lambda now: None).result(0.0)


def test_who_moves_is_written_to_where_it_is_and_the_link_to_where_it_was_is_closed() -> None:
    links, source = Links(), Source()
    driver = driven(links, source)
    for address in ("her:8", "her:8", "her:9"):
        source.control = (address,)
        driver.perform([Send("her", PING)])
    assert links.told == ["her:8", "her:8", "her:9"] and links.forgotten == ["her:8"]


def test_where_nobody_listens_any_more_whoever_was_there_is_told_of() -> None:
    """Also where another process had that address in between, and is forgotten."""
    links, source = Links(), Source()
    driver = driven(links, source)
    for peer in ("her", "him"):
        driver.perform([Send(peer, PING)])
    driver._link_event(LinkEvent("her:0", "unreached", ""))
    driver._link_event(LinkEvent("her:0", "refused", ""))
    driver.dispatch.forget("him")
    driver.perform([Send("her", PING)])
    driver._link_event(LinkEvent("her:0", "refused", ""))
    assert source.log == ["him refused", "her refused"]


@pytest.mark.parametrize("left", [True, False])
def test_links_to_who_left_or_is_forgotten_are_closed(left: bool) -> None:
    links, source = Links(), Source(chunk(0))
    driver = driven(links, source)
    links.room = False
    driver.dispatch.pump(*driver.dispatch.want_write())
    if left:
        driver.perform([Notify(MemberLeft(Voter("her", 1)))])
        assert links.forgotten == ["her:1"]
    source.known = False
    assert driver.dispatch.want_write() == [] and not driver.dispatch._stash, "what was for her is let go"
    driver.dispatch.warm(100.0)
    assert links.forgotten == ["her:1"]
    assert not (driver.dispatch._addresses or driver.dispatch._dials or driver.dispatch._bulk_to)


def test_bulk_within_this_host_is_not_paced() -> None:
    links, source = Links(), Source()
    driver = driven(links, source)
    for source.address in ("127.0.0.1:1", "10.0.0.1:1"):
        driver.perform([Pace("her", 5.0)])
    assert links.paced == [("10.0.0.1:1", 5.0)]


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


def test_what_went_to_one_peer_is_not_kept() -> None:
    """A part is a view of all that was contributed, a piece of an image: that memory stayed until the next round."""

    class Vector(bytearray):
        pass

    whole = Vector(9)
    links, source = Links(), Source(Contrib("train", b"", 0, 1.0, 1, memoryview(whole)[:3]))
    driver = driven(links, source)
    driver.dispatch.pump(*driver.dispatch.want_write())
    assert [message.chunk for _, message in links.went] == [0]  # type: ignore[attr-defined]
    links.went.clear()
    gone = weakref.ref(whole)
    del whole
    gc.collect()
    assert gone() is None


def test_a_refusal_by_a_machine_that_is_in_doubt_ends_the_driver() -> None:
    """It was counted as a bad frame, and the machine went on."""

    class Refusing(Source):
        def receive(self, sender: Voter, message: Any, now: float) -> list[Any]:
            raise ProtocolError("a result that cannot be")

    links, source = Links(), Refusing()
    driver = driven(links, source)
    driver._receive(coming(0))
    assert driver.bad_frames == 1
    source.torn = True
    with pytest.raises(ProtocolError, match="a result that cannot be"):
        driver._receive(coming(1))


@pytest.mark.parametrize("apart", [-1, 1])
def test_whoever_asks_in_another_version_is_answered_and_nobody_else(apart: int) -> None:
    """It got no answer, and only the log here said why."""
    links = Links()
    driver = driven(links, Source())
    route = Route("control", b"asker")

    def comes(kind: type, **how: Any) -> None:
        envelope = pack(Envelope(PROTOCOL_VERSION + apart, bytes(8), Voter("her", 1), CODES[kind]))
        driver._receive(Incoming("control", [envelope, b"of another shape"], **how))

    comes(Ping, route=route, address=None, observed_host="h")
    comes(Hello, route=None, address="her:0", observed_host="h")  # nobody sends it so
    assert not links.replied
    comes(Hello, route=route, address=None, observed_host="h")
    ((to, frames),) = links.replied
    assert to is route and unpack(frames[0], Envelope).protocol == PROTOCOL_VERSION
    events = list[LinkEvent]()
    driver.on_link = events.append
    comes(Welcome, route=None, address="her:0", observed_host="h")
    (event,) = events
    assert event.kind == "other_version" and event.address == "her:0"
    assert f"protocol version {PROTOCOL_VERSION + apart}, and this dlc {PROTOCOL_VERSION}" in event.detail
    assert len(links.replied) == 1 and driver.bad_frames == 4


@pytest.mark.parametrize("torn", [False, True])
def test_a_call_that_leaves_a_machine_in_doubt_ends_the_driver_too(torn: bool) -> None:
    source = Source()
    driver, done = driven(Links(), source), list[str]()

    def fails(now: float) -> None:
        source.torn = torn
        raise ValueError("halfway")

    failed = driver.call(fails)
    driver.call(lambda now: done.append("the next one"))
    if torn:
        with pytest.raises(ValueError, match="halfway"):
            driver._drain_calls()
    else:
        driver._drain_calls()
    assert done == ([] if torn else ["the next one"])
    with pytest.raises(ValueError, match="halfway"):
        failed.result(0.0)


def test_what_is_asked_is_not_done_once_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the wait: whoever is told that nothing was offered must not find it in a round."""

    def interrupted(reply: Reply[Any], timeout: float | None = None) -> None:
        raise KeyboardInterrupt

    driver, done = driven(Links(), Source()), list[str]()
    monkeypatch.setattr(Reply, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        driver.ask(lambda now: done.append("offered"))
    driver._drain_calls()
    assert not done
