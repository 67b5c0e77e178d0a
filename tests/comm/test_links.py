"""One connection's own rules: what waits for it, when it is tried again and where, in which words it fails."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, cast

import pytest
import zmq

from dlc.comm import links, tcp
from dlc.comm.addresses import Resolver
from dlc.comm.knock import Knock
from dlc.comm.lanes import CONNECT_TIMEOUT_S, LinkEvent
from dlc.comm.links import (
    CONTROL_PENDING_BYTES_MAX,
    CONTROL_PENDING_MAX,
    RENEW_BYTES_MIN,
    RETRY_MAX_S,
    RETRY_MIN_S,
    STALLED_TIMEOUTS,
    UNUSED_S,
    Link,
)
from tests.helpers import benchmark_module

wan = benchmark_module("_wan")


class Asked:
    """A resolver that answers nothing by itself."""

    def __init__(self) -> None:
        self.hosts: list[str] = []

    def ask(self, host: str) -> None:
        self.hosts.append(host)


class Outcome:
    """Of a knock: the link's `error`."""

    def __init__(self, link: Tried) -> None:
        self.error = lambda: link.error

    def close(self) -> None:
        pass


class Tried(Link):
    """Its attempts are noted, and nothing is connected; `room`: for how many messages. `error`: why they fail."""

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        self.asked, self.tries, self.room, self.went = Asked(), list[str](), 0, list[list[bytes]]()
        self.error: int | None = errno.ECONNREFUSED
        resolver = cast(Resolver, self.asked)
        super().__init__(context, address, "control", routing_id=b"me", security=None, resolver=resolver)

    def _open(self, now: float) -> list[LinkEvent]:
        self._opened_at, self._overdue_at = now, now + links._OVERDUE_S
        self.tries.append(self._candidates[self._candidate])
        return []

    def _ask_why(self, now: float) -> list[LinkEvent]:
        self._overdue_at, self.knock = now + CONNECT_TIMEOUT_S, cast(Knock, Outcome(self))
        return self.look(now)

    def send(self, frames: Any) -> bool:
        if self.room:
            self.room -= 1
            self.went.append([bytes(frame) for frame in frames])
            return True
        return False


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.term()


@pytest.fixture
def link(context: zmq.Context[Any]) -> Tried:
    return Tried(context, "10.0.0.1:7")


def fails(link: Tried, now: float) -> list[str]:
    """The attempt of which libzmq says that nobody listens there."""
    return [event.kind for event in link._on_event(zmq.EVENT_CLOSED, 0, now)]


def test_messages_wait_their_turn_and_so_many_of_them(link: Tried) -> None:
    assert link.send_or_keep([b"1"], 0.0)
    link.room = 1
    assert link.send_or_keep([b"2"], 0.0), "not before the first"
    assert not link.went
    link.flush()
    assert link.went == [[b"1"]]
    link.room = 1
    link.flush()
    assert link.went == [[b"1"], [b"2"]] and not link.pending
    assert all(link.send_or_keep([b""], 0.0) for _ in range(CONTROL_PENDING_MAX))
    assert not link.send_or_keep([b""], 0.0)


def test_no_more_bytes_wait_than_are_allowed(link: Tried) -> None:
    half = bytes(CONTROL_PENDING_BYTES_MAX // 2)
    assert link.send_or_keep([half], 0.0) and link.send_or_keep([half[1:], b"x"], 0.0)
    assert not link.send_or_keep([b"x"], 0.0)
    link.room = 1
    link.flush()
    assert link.send_or_keep([half], 0.0) and not link.send_or_keep([b"x"], 0.0)


def test_what_has_waited_too_long_does_not_go_any_more(link: Tried) -> None:
    """A peer that was dead for an hour had a thousand pings of that hour to answer when it came back."""
    for second in range(100):
        link.advance(float(second))
        assert link.send_or_keep([b"%d" % second], float(second))
        fails(link, float(second))
    assert [message for (message,) in link.pending] == [b"%d" % second for second in range(70, 100)]
    link.room = 100
    link.flush()
    assert link.went == [[b"%d" % second] for second in range(70, 100)] and not link.pending
    half = bytes(CONTROL_PENDING_BYTES_MAX // 2)
    link.room = 0
    assert link.send_or_keep([half], 100.0) and link.send_or_keep([half], 110.0)
    link.advance(100.0 + UNUSED_S)
    assert link.send_or_keep([half], 131.0) and not link.send_or_keep([b"x"], 131.0)


def test_each_failure_in_a_row_doubles_the_wait_up_to_a_limit(link: Tried) -> None:
    now, waits_s = 0.0, []
    for _ in range(8):
        assert link.advance(now) == [] and link.deadline() is not None
        assert fails(link, now) == ["refused"] and link.tried
        at = link.deadline()
        assert at is not None
        waits_s.append(at - now)
        tries = len(link.tries)
        link.advance(at - 0.001)
        assert len(link.tries) == tries, "not yet"
        now = at
    usual = [min(RETRY_MIN_S * 2**i, RETRY_MAX_S) for i in range(8)]
    assert all(0.75 * s <= waited <= s for waited, s in zip(waits_s, usual, strict=True))
    link.advance(now)
    assert [event.kind for event in link._on_event(zmq.EVENT_HANDSHAKE_SUCCEEDED, 0, now)] == ["connected"]
    assert link.up and not link.tried and link.deadline() is None
    assert [event.kind for event in link._on_event(zmq.EVENT_DISCONNECTED, 0, now)] == ["disconnected"]
    at = link.deadline()
    assert at is not None and at - now <= RETRY_MIN_S and not link.tried and not link.up


def test_who_asks_once_more_need_not_wait(link: Tried) -> None:
    link.advance(0.0)
    link.once_more()
    link.advance(0.0)
    assert len(link.tries) == 1, "it is being tried"
    fails(link, 0.0)
    link.once_more()
    assert not link.tried
    link.advance(0.0)
    assert len(link.tries) == 2


def test_an_attempt_of_which_nothing_is_heard_is_given_up(link: Tried) -> None:
    link.advance(5.0)
    overdue = link.deadline()
    assert overdue is not None and overdue > 5.0 + CONNECT_TIMEOUT_S
    assert link.advance(overdue - 0.1) == []
    assert [event.kind for event in link.advance(overdue)] == ["unreached"]


def test_all_addresses_of_a_name_are_tried_before_it_fails_and_is_looked_up_again(context: zmq.Context[Any]) -> None:
    link = Tried(context, "somewhere:7")
    link.advance(0.0)
    assert link.asked.hosts == ["somewhere"] and not link.tries and link.deadline() is None
    link.resolved(["10.0.0.1", "10.0.0.2"], "", 1.0)
    assert link.resolved(["10.0.0.9"], "", 1.0) == [], "that was answered"
    assert fails(link, 1.0) == [] and not link.tried
    link.advance(1.0)
    assert link.tries == ["10.0.0.1", "10.0.0.2"]
    assert fails(link, 1.0) == ["refused"] and link.tried
    link.advance(9.0)
    assert link.asked.hosts == ["somewhere"] * 2
    (event,) = link.resolved([], "no such name", 9.0)
    assert (event.kind, event.detail) == ("unreached", "no such name")


@pytest.mark.parametrize(
    ("event", "value", "kind"),
    [
        (zmq.EVENT_HANDSHAKE_FAILED_AUTH, 400, "auth_failed"),
        (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, links._MECHANISM_MISMATCH, "auth_failed"),
        (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, 0x10000001, "handshake_failed"),
        (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, errno.EPIPE, "auth_failed"),
        (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, errno.ECONNRESET, "auth_failed"),
        (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, errno.EAGAIN, "handshake_failed"),
        (zmq.EVENT_DISCONNECTED, 0, "auth_failed"),
        (zmq.EVENT_CLOSED, 0, "refused"),
        (zmq.EVENT_CONNECTED, 3, None),
    ],
)
def test_what_libzmq_reports_in_our_words(link: Tried, event: int, value: int, kind: str | None) -> None:
    link.advance(0.0)
    assert [found.kind for found in link._on_event(event, value, 0.0)] == ([kind] if kind else [])


@pytest.mark.parametrize("value", [errno.EAGAIN, errno.EINTR])
def test_who_takes_connections_and_says_nothing_is_told_as_such_though_this_process_was_suspended(
    link: Tried, value: int
) -> None:
    """ "no handshake: EINTR", it said."""
    link.advance(0.0)
    (event,) = link._on_event(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, value, 0.0)
    assert event.detail == "no handshake: it takes connections, and says nothing"


def test_whose_address_gives_no_answer_is_told_from_where_nobody_listens(link: Tried) -> None:
    link.advance(0.0)
    (event,) = link._on_event(zmq.EVENT_CLOSED, 0, CONNECT_TIMEOUT_S - 0.1)
    assert "nobody listens" in event.detail
    link.advance(10.0)
    (event,) = link._on_event(zmq.EVENT_CLOSED, 0, 10.0 + CONNECT_TIMEOUT_S)
    assert (event.kind, event.detail) == ("unreached", "no answer"), "which says less than that nobody listens"
    link.up = True
    assert link._on_event(zmq.EVENT_CLOSED, 0, 20.0) == [], "an earlier attempt's socket"


def test_a_host_that_refuses_is_told_from_one_to_which_there_is_no_way(link: Tried) -> None:
    """Whoever a host that was cut off had been connected to was said to have ended, and was not waited for."""
    link.error, now = errno.EHOSTUNREACH, 0.0
    link.advance(now)
    (event,) = link._on_event(zmq.EVENT_CLOSED, 0, now)
    assert event.kind == "unreached" and "No route to host" in event.detail
    link.error, now = None, 10.0
    link.advance(now)
    assert fails(link, now) == [] and link.look(now) == [] and not link.up
    link.error = errno.ECONNREFUSED
    assert [event.kind for event in link.look(now)] == ["refused"] and link.look(now) == []
    link.error, now = None, 20.0
    link.advance(now)
    fails(link, now + 1.0)
    assert link.deadline() == now + 1.0 + CONNECT_TIMEOUT_S
    assert link.advance(now + CONNECT_TIMEOUT_S) == []
    (event,) = link.advance(now + 1.0 + CONNECT_TIMEOUT_S)
    assert (event.kind, event.detail) == ("unreached", "no answer")
    link.error, now = 0, 30.0
    link.advance(now)
    assert fails(link, now) == ["unreached"], "it is there again"


NO_WAY = """
import subprocess
from dlc.comm.lanes import LinkEvent
from dlc.comm.transport import Transport
from tests.helpers import wait_until

LINES = '''link set lo up
link add v0 type veth peer name v1
address add 10.9.9.1/24 dev v0
link set v0 up
link set v1 up
ntable change name arp_cache dev v0 retrans 50 mcast_probes 1
route add unreachable 10.8.0.0/16'''
for line in LINES.splitlines():
    subprocess.run(["ip", *line.split()], check=True)
nobody, no_host, no_way, no_route = addresses = "127.0.0.1:9", "10.9.9.2:9", "10.8.0.1:9", "192.0.2.1:9"
transport, kinds = Transport(security=None, ident=b"a"), {}
for address in addresses:
    transport.send_control(address, [b"x"])
    transport.open_bulk(address)

def heard():
    for event in transport.poll(0.01):
        if isinstance(event, LinkEvent):
            kinds.setdefault(event.address, event.kind)
    return kinds.keys() == set(addresses) and all(map(transport.barred, addresses))

wait_until(heard, 60)
assert kinds == {nobody: "refused", no_host: "unreached", no_way: "unreached", no_route: "unreached"}, kinds
whys = [transport.barred(address).partition(":")[0] for address in addresses]
assert whys == ["nobody listens there"] + 3 * ["there is no way to it"], whys
transport.close(0.0)
"""


@pytest.mark.skipif(bool(wan.available()), reason=wan.available())
def test_the_kernel_says_which_of_the_two_it_is() -> None:
    run = ["unshare", "--net", sys.executable, "-c", NO_WAY]
    found = subprocess.run(run, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": "src:."}, timeout=120)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("timeouts", [0, STALLED_TIMEOUTS - 1, STALLED_TIMEOUTS])
def test_a_connection_on_which_the_kernel_gets_no_answer_is_made_anew(
    link: Tried, monkeypatch: pytest.MonkeyPatch, timeouts: int
) -> None:
    link.advance(0.0)
    link._on_event(zmq.EVENT_HANDSHAKE_SUCCEEDED, 0, 1.0)
    sample = tcp.TcpSample(1000, 0.1, 0.1, 1e6, False, 1.0, 20, timeouts=timeouts)
    monkeypatch.setattr(link, "tcp_sample", lambda: sample if link.up else None)
    assert link.revive(9.0) == []
    stalled = timeouts >= STALLED_TIMEOUTS
    assert link.up is not stalled and len(link.tries) == 1 + stalled
    assert link.revive(9.1) == [] and len(link.tries) == 1 + stalled, "it is being tried"


@pytest.mark.parametrize(("acked", "stalls"), [(1000, 2), (RENEW_BYTES_MIN, 0)])
def test_connections_that_carry_next_to_nothing_and_stall_are_counted(
    link: Tried, monkeypatch: pytest.MonkeyPatch, acked: int, stalls: int
) -> None:
    sample = tcp.TcpSample(acked, 0.1, 0.1, 1e6, False, 1.0, 20, timeouts=STALLED_TIMEOUTS)
    monkeypatch.setattr(link, "tcp_sample", lambda: sample if link.up else None)
    link.advance(0.0)
    for _ in range(2):
        link._on_event(zmq.EVENT_HANDSHAKE_SUCCEEDED, 0, 1.0)
        link.revive(9.0)
    assert link.stalls == stalls


class Takes:
    """A socket that is given messages, and nothing more."""

    def send(self, frame: bytes, flags: int) -> None:
        pass

    def monitor(self, *args: object) -> None:
        pass

    def close(self, linger_ms: int = 0) -> None:
        pass


@pytest.mark.parametrize("n_bytes", [500, 20_000])
def test_connections_that_carried_such_messages_before_they_stalled_are_not_counted(
    link: Tried, monkeypatch: pytest.MonkeyPatch, n_bytes: int
) -> None:
    """Between two cuts those of a tiny model carry little, however many rounds: each second cut was said to be packets
    of full size that are lost."""

    def sampled(acked: int, queued: int, timeouts: int = 0) -> None:
        sample = tcp.TcpSample(acked, 0.1, 0.1, 1e6, False, 1.0, 0, queued_bytes=queued, timeouts=timeouts)
        monkeypatch.setattr(tcp, "sample", lambda sock: sample)

    def lives(answered: int, unanswered: int) -> int:
        """One connection, with messages of these lengths; how many are counted then."""
        link._on_event(zmq.EVENT_HANDSHAKE_SUCCEEDED, 0, 1.0)
        link.socket, link._tcp, link._acked_bytes = cast(Any, Takes()), cast(Any, Takes()), 0
        Link.send(link, [bytes(answered)])
        sampled(answered + 600, 0)
        link.tcp_sample()
        Link.send(link, [b"", bytes(unanswered)])
        sampled(answered + 600, unanswered, STALLED_TIMEOUTS)
        link.revive(9.0)
        return link.stalls

    link.advance(0.0)
    assert [lives(n_bytes, n_bytes) for _ in range(3)] == [1, 1, 1]
    assert [lives(n_bytes - 100 if n_bytes < 4000 else 1200, n_bytes) for _ in range(3)] == [2, 3, 4]
    assert lives(n_bytes, n_bytes) == 1


def test_a_connection_that_carries_much_ends_the_count_of_stalls(link: Tried, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though something is on its way all the time: packets of full size pass."""
    link.advance(0.0)
    link._on_event(zmq.EVENT_HANDSHAKE_SUCCEEDED, 0, 1.0)
    link._tcp, link.stalls = cast(Any, Takes()), 2
    for acked, stalls in ((RENEW_BYTES_MIN - 1, 2), (RENEW_BYTES_MIN, 0)):
        sample = tcp.TcpSample(acked, 0.1, 0.1, 1e6, False, 1.0, 0, queued_bytes=9)
        monkeypatch.setattr(tcp, "sample", lambda sock, sample=sample: sample)
        link.tcp_sample()
        assert link.stalls == stalls


def test_that_a_connection_broke_is_known_until_somebody_looks(link: Tried) -> None:
    """Whatever is tried meanwhile: what it was given last may be lost, and has to go once more."""
    link.advance(0.0)
    link._on_event(zmq.EVENT_HANDSHAKE_SUCCEEDED, 0, 1.0)
    link._on_event(zmq.EVENT_DISCONNECTED, 0, 2.0)
    assert not link.broke, "it was given nothing"
    link._on_event(zmq.EVENT_HANDSHAKE_SUCCEEDED, 0, 3.0)
    link.socket = cast(Any, Takes())
    Link.send(link, [b"x"])
    link._on_event(zmq.EVENT_DISCONNECTED, 0, 4.0)
    link.close()
    assert link.broke


def test_why_the_last_attempt_failed_is_known_until_one_succeeds(link: Tried) -> None:
    link.advance(0.0)
    assert link.why == ""
    fails(link, 0.0)
    assert "nobody listens there" in link.why
    link.advance(RETRY_MAX_S)
    link._on_event(zmq.EVENT_HANDSHAKE_SUCCEEDED, 0, RETRY_MAX_S)
    assert link.why == ""
    link._on_event(zmq.EVENT_DISCONNECTED, 0, 9.0)
    assert link.why == "", "it was up, and nothing has been tried since"
