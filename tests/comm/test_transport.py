"""The transport over real sockets on loopback. Nothing sleeps: `pump` polls until a condition holds."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

import dlc.comm.addresses as addresses
import dlc.comm.lanes as lanes
import dlc.comm.links as links
import dlc.comm.transport as transport_module
from dlc.comm import tcp
from dlc.comm.addresses import leads_here, parse_address
from dlc.comm.lanes import BULK_KEEPALIVE, CONTROL_KEEPALIVE, Event, Incoming, LinkEvent, Reached, Writable
from dlc.comm.security import LinkSecurity
from dlc.comm.transport import Transport
from dlc.errors import UsageError
from tests import ports
from tests.helpers import wait_until
from tests.swarm import free_addresses

WAIT_S = 120.0
"""Until what is to happen has happened: a machine may stand still for seconds."""
KEYED = LinkSecurity.derive(bytes(32), "run")
OTHER = LinkSecurity.derive(bytes(31) + b"\1", "run")


class Node:
    """A transport and all that it has returned."""

    def __init__(self, name: str, listen: str = "127.0.0.1:0", security: LinkSecurity | None = KEYED) -> None:
        self.transport = Transport(listen, security=security, ident=name.encode())
        self.events: list[Event] = []
        self.address = f"127.0.0.1:{self.transport.control_port}"
        self.bulk_address = f"127.0.0.1:{self.transport.bulk_port}"

    def messages(self, lane: str = "control") -> list[list[bytes]]:
        return [[bytes(f) for f in e.frames] for e in self.events if isinstance(e, Incoming) and e.lane == lane]

    def link_kinds(self, address: str) -> list[str]:
        return [e.kind for e in self.events if isinstance(e, LinkEvent) and e.address == address]


@pytest.fixture
def node() -> Iterator[Callable[..., Node]]:
    with contextlib.ExitStack() as stack:

        def make(*args: str, **options: object) -> Node:
            made = Node(*args, **options)  # type: ignore[arg-type]
            stack.callback(made.transport.close, 0.0)
            return made

        yield make


def pump(until: Callable[[], object], *nodes: Node, want: dict[Node, list[str]] | None = None) -> None:
    deadline = time.monotonic() + WAIT_S
    while not until():
        assert time.monotonic() < deadline, [n.events[-5:] for n in nodes]
        for n in nodes:
            n.events += n.transport.poll(0.01, (want or {}).get(n, ()))


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="no IPv6 loopback here")


@pytest.mark.parametrize("security", [KEYED, None], ids=["key", "no-key"])
def test_messages_and_replies_travel_both_ways(node: Callable[..., Node], security: LinkSecurity | None) -> None:
    a, b = node("a", security=security), node("b", security=security)
    assert a.transport.send_control(b.address, [b"head", b"", b"x" * 100_000])
    pump(lambda: b.messages(), a, b)
    assert b.messages() == [[b"head", b"", b"x" * 100_000]]
    (got,) = [e for e in b.events if isinstance(e, Incoming)]
    assert got.route is not None and got.address is None and got.observed_host == "127.0.0.1"
    assert b.transport.reply(got.route, [b"answer"])
    pump(lambda: a.messages(), a, b)
    (answer,) = [e for e in a.events if isinstance(e, Incoming)]
    assert (answer.frames, answer.route, answer.address) == ([b"answer"], None, b.address)
    assert a.link_kinds(b.address) == ["connected"]


def test_bulk_is_refused_until_the_link_is_up_and_then_bounded(node: Callable[..., Node]) -> None:
    a, b = node("a"), node("b")
    chunk = os.urandom(1 << 20)
    assert not a.transport.send_bulk(b.bulk_address, [b"h", chunk])
    pump(lambda: Writable(b.bulk_address) in a.events, a, b, want={a: [b.bulk_address]})
    sent = 0
    room = True
    while room:  # b does not poll
        while a.transport.send_bulk(b.bulk_address, [b"%d" % sent, memoryview(chunk)]):
            sent += 1
            assert sent < 200, "a receiver that does not read must stop the sender"
        room = Writable(b.bulk_address) in a.transport.poll(0.3, [b.bulk_address])
    assert sent >= lanes.BULK_SEND_HWM
    pump(lambda: len(b.messages("bulk")) == sent, a, b)
    assert [m[0] for m in b.messages("bulk")] == [b"%d" % i for i in range(sent)]
    assert b.messages("bulk")[-1][1] == chunk
    views = [e.frames[1] for e in b.events if isinstance(e, Incoming)]
    assert all(isinstance(v, memoryview) for v in views)


def test_it_is_known_whether_anybody_came_in_by_the_bulk_port(node: Callable[..., Node]) -> None:
    """That a firewall keeps all out is said where nobody did."""
    a, b = node("a"), node("b")
    assert a.transport.send_control(b.address, [b"x"])
    pump(lambda: b.messages(), a, b)
    assert not b.transport.bulk_entered
    a.transport.open_bulk(b.bulk_address)
    pump(lambda: b.transport.bulk_entered, a, b)


def test_bulk_can_be_replied_to(node: Callable[..., Node]) -> None:
    a, b = node("a"), node("b")
    pump(lambda: a.transport.send_bulk(b.bulk_address, [b"fetch"]), a, b)
    pump(lambda: b.messages("bulk"), a, b)
    (got,) = [e for e in b.events if isinstance(e, Incoming)]
    assert got.route is not None and b.transport.reply(got.route, [b"h", b"y" * (1 << 20)])
    pump(lambda: a.messages("bulk"), a, b)
    assert [(e.address, e.route) for e in a.events if isinstance(e, Incoming)] == [(b.bulk_address, None)]


def test_of_a_message_with_too_many_frames_few_are_held(node: Callable[..., Node]) -> None:
    """A million empty ones cost half a gigabyte before they were counted."""
    alive: weakref.WeakSet[Part] = weakref.WeakSet()
    most = 0

    class Part:
        bytes = b""

        def __init__(self, more: bool) -> None:
            self.more = more
            alive.add(self)

    class Sender:
        left = 10_000

        def recv(self, flags: int = 0, copy: bool = True) -> Part:
            nonlocal most
            most, self.left = max(most, len(alive)), self.left - 1
            if self.left < 0:
                raise zmq.Again
            return Part(self.left > 0)

    transport, events = node("a").transport, []
    assert transport._take(Sender(), "control", None, 5, events) == 4  # type: ignore[arg-type]
    assert not events and transport.dropped == 1 and most <= transport_module.FRAMES_MAX + 3


def test_control_is_taken_before_bulk_that_came_earlier(node: Callable[..., Node]) -> None:
    a, b = node("a"), node("b")
    queued = 0
    pump(lambda: a.transport.send_bulk(b.bulk_address, [b"chunk", bytes(1 << 20)]), a, b)
    while a.transport.send_bulk(b.bulk_address, [b"chunk", bytes(1 << 20)]):
        queued += 1
    b.events.clear()
    for i in range(20):
        assert a.transport.send_control(b.address, [b"%d" % i])
    # both lanes are full at b before it polls: a's control link comes up while b serves nothing but ZAP
    pump(lambda: a.link_kinds(b.address) == ["connected"], a, zap_only(b))
    a.transport.poll(0.0)
    control, bulk = b.transport._control, b.transport._bulk
    assert control.poll(WAIT_S * 1000) and bulk.poll(WAIT_S * 1000)
    polls = 0
    while len(b.messages()) < 20:
        assert control.poll(WAIT_S * 1000)
        found = b.transport.poll(WAIT_S)
        kinds = [e.lane for e in found if isinstance(e, Incoming)]
        assert kinds[0] == "control" and kinds.count("bulk") <= transport_module.BULK_MESSAGES_MAX
        b.events += found
        polls += 1
    assert polls < 20, "all that is there is taken at once"
    pump(lambda: len(b.messages("bulk")) >= queued, a, b)


def zap_only(one: Node) -> Node:
    """`one`, but its poll only answers ZAP: a peer whose thread is busy as far as messages go."""

    class Busy:
        def poll(self, timeout_s: float, want_write: object) -> list[Event]:
            t = one.transport
            t._serve(t._wait(timeout_s, ()), time.monotonic())
            return []

    busy = object.__new__(Node)
    busy.transport = Busy()  # type: ignore[assignment]
    busy.events = []
    return busy


def test_a_refused_connection_is_reported_and_tried_for_ever(node: Callable[..., Node]) -> None:
    a, (nobody,) = node("a"), free_addresses(1)
    assert a.transport.send_control(nobody, [b"x"])
    pump(lambda: len(a.link_kinds(nobody)) >= 3, a)
    assert set(a.link_kinds(nobody)) == {"refused"}
    a.transport.forget(nobody)
    seen = len(a.link_kinds(nobody))
    a.events += a.transport.poll(0.3)
    assert len(a.link_kinds(nobody)) == seen


def test_no_port_of_a_test_is_given_again_soon(node: Callable[..., Node]) -> None:
    """A peer of another test, without a key as well, had that of one that was gone, and was dialled by those who had
    known it: two swarms became one, or nobody was somebody."""
    seen: list[int] = []
    for _ in range(3):
        a = node("a").transport
        seen += [a.control_port, a.bulk_port]
        a.close(0.0)
    assert len(set(seen)) == 6 and all(ports.FIRST <= port < ports.END for port in seen)


def test_a_peer_that_starts_later_gets_what_was_sent_before(node: Callable[..., Node]) -> None:
    a, (address,) = node("a"), free_addresses(1)
    for i in range(5):
        assert a.transport.send_control(address, [b"%d" % i])
    pump(lambda: "refused" in a.link_kinds(address), a)
    b = node("b", address)
    pump(lambda: len(b.messages()) == 5, a, b)
    assert [m[0] for m in b.messages()] == [b"%d" % i for i in range(5)]


def test_a_peer_that_restarts_is_reached_again(node: Callable[..., Node]) -> None:
    a, b = node("a"), node("b", *free_addresses(1))
    a.transport.send_control(b.address, [b"1"])
    pump(lambda: b.messages(), a, b)
    b.transport.close()
    pump(lambda: "disconnected" in a.link_kinds(b.address), a)
    again = node("b2", b.address)
    a.transport.send_control(b.address, [b"2"])
    pump(lambda: again.messages(), a, again)
    assert again.messages() == [[b"2"]]
    pump(lambda: a.link_kinds(b.address)[-1] == "connected", a, again)


def test_a_route_that_has_gone_is_not_sent_to(node: Callable[..., Node]) -> None:
    a, b = node("a"), node("b")
    a.transport.send_control(b.address, [b"1"])
    pump(lambda: b.messages(), a, b)
    (got,) = [e for e in b.events if isinstance(e, Incoming)]
    a.transport.close()
    assert got.route is not None
    pump(lambda: not b.transport.reply(got.route, [b"late"]), b)


def test_a_full_queue_says_so(node: Callable[..., Node]) -> None:
    a, (nobody, large) = node("a"), free_addresses(2)
    accepted = sum(a.transport.send_control(nobody, [b"x"]) for _ in range(links.CONTROL_PENDING_MAX + 10))
    assert accepted == links.CONTROL_PENDING_MAX
    accepted = sum(a.transport.send_control(large, [bytes(1 << 20)]) for _ in range(30))
    assert accepted == links.CONTROL_PENDING_BYTES_MAX >> 20


@pytest.mark.parametrize(
    ("ours", "theirs"), [(OTHER, KEYED), (KEYED, None), (None, KEYED)], ids=["wrong key", "they: none", "we: none"]
)
def test_another_key_is_told_apart_and_nothing_passes(
    node: Callable[..., Node], ours: LinkSecurity | None, theirs: LinkSecurity | None
) -> None:
    a, b = node("a", security=ours), node("b", security=theirs)
    a.transport.send_control(b.address, [b"in"])
    b.transport.send_control(a.address, [b"out"])
    pump(lambda: len(a.link_kinds(b.address)) >= 2 and len(b.link_kinds(a.address)) >= 2, a, b)
    assert set(a.link_kinds(b.address)) == set(b.link_kinds(a.address)) == {"auth_failed"}
    assert not a.messages() and not b.messages()


def test_zap_refuses_one_who_knows_only_the_servers_public_key(node: Callable[..., Node]) -> None:
    half = LinkSecurity(KEYED.server_public, OTHER.server_secret, OTHER.client_public, OTHER.client_secret)
    a, b = node("a", security=half), node("b")
    a.transport.send_control(b.address, [b"in"])
    pump(lambda: a.link_kinds(b.address).count("auth_failed") >= 2, a, b)  # libzmq alone would try once
    assert b.transport.refused_clients >= 2 and not b.messages()
    assert set(a.link_kinds(b.address)) == {"auth_failed"}


def test_a_stranger_who_keeps_trying_does_not_disturb_members(node: Callable[..., Node]) -> None:
    stranger, a, b = node("s", security=OTHER), node("a"), node("b")
    stranger.transport.send_control(b.address, [b"no"])
    with socket.create_connection(("127.0.0.1", b.transport.control_port)) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(1000))
        with socket.create_connection(("127.0.0.1", b.transport.bulk_port)):
            a.transport.send_control(b.address, [b"yes"])
            pump(lambda: b.messages() and stranger.link_kinds(b.address), stranger, a, b)
    assert b.messages() == [[b"yes"]]


def test_something_that_speaks_another_protocol_is_reported(node: Callable[..., Node]) -> None:
    a = node("a")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        a.transport.send_control(address, [b"x"])
        a.transport.poll(0.0)
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)
            pump(lambda: a.link_kinds(address), a)
    assert a.link_kinds(address)[0] in ("handshake_failed", "auth_failed")


def test_a_taken_port_is_named(node: Callable[..., Node]) -> None:
    a = node("a")
    with pytest.raises(UsageError, match=f"port {a.transport.control_port} on 127.0.0.1 is taken"):
        Transport(a.address, security=KEYED, ident=b"b")
    with pytest.raises(UsageError, match="bulk lane"):
        Transport(security=KEYED, ident=b"b", bulk_port=a.transport.bulk_port)


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "*:0", "[::]:0"])
def test_beyond_loopback_a_key_is_needed(listen: str) -> None:
    with pytest.raises(UsageError, match="--insecure"):
        Transport(listen, security=None, ident=b"a")


def test_insecure_must_be_said(node: Callable[..., Node]) -> None:
    Transport("0.0.0.0:0", security=None, insecure=True, ident=b"a").close()
    Transport("0.0.0.0:0", security=KEYED, ident=b"a").close()


def test_listening_on_an_address_of_another_host_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="cannot listen"):
        Transport("192.0.2.1:0", security=KEYED, ident=b"a")
    with pytest.raises(UsageError, match="looked up"):
        Transport("no-such-host.invalid:0", security=KEYED, ident=b"a")


def test_localhost_is_looked_up(node: Callable[..., Node]) -> None:
    a, b = node("a"), node("b", "localhost:0")
    host = f"localhost:{b.transport.control_port}"
    assert a.transport.send_control(host, [b"hello"])
    pump(lambda: b.messages() and a.link_kinds(host), a, b)
    assert a.link_kinds(host) == ["connected"]


@needs_ipv6
def test_ipv6(node: Callable[..., Node]) -> None:
    a, b = node("a"), node("b", "[::1]:0")
    assert b.transport.host == "::1"
    a.transport.send_control(f"[::1]:{b.transport.control_port}", [b"six"])
    pump(lambda: a.transport.send_bulk(f"[::1]:{b.transport.bulk_port}", [b"six", bytes(1 << 20)]), a, b)
    pump(lambda: b.messages() and b.messages("bulk"), a, b)
    assert {e.observed_host for e in b.events if isinstance(e, Incoming)} == {"::1"}


@pytest.mark.parametrize(
    ("host", "leads"),
    [
        ("10.0.0.1", True),
        ("169.254.7.7", True),
        ("2001:db8::1", True),
        ("127.0.0.1", False),
        ("127.8.8.8", False),
        ("::1", False),
        ("0.0.0.0", False),
        ("::", False),
        ("fe80::1%eth0", False),
    ],
)
def test_which_addresses_of_a_host_others_can_dial(host: str, leads: bool) -> None:
    assert leads_here(host) == leads


@pytest.mark.parametrize("listen", ["0.0.0.0:0", pytest.param("[::]:0", marks=needs_ipv6)])
def test_the_address_by_which_a_member_came_is_told_once(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch, listen: str
) -> None:
    """127.0.0.2 and .3 stand for addresses that others can dial."""
    monkeypatch.setattr(transport_module, "leads_here", lambda host: host != "127.0.0.1")
    a = node("a", listen)
    port = a.transport.control_port

    def come(name: str, host: str, security: LinkSecurity = KEYED) -> None:
        peer, address = node(name, security=security), f"{host}:{port}"
        peer.transport.send_control(address, [name.encode()])
        pump(lambda: [name.encode()] in a.messages() or "auth_failed" in peer.link_kinds(address), a, peer)

    come("local", "127.0.0.1")
    come("stranger", "127.0.0.2", OTHER)
    assert not any(isinstance(e, Reached) for e in a.events)
    come("b", "127.0.0.3")
    come("c", "127.0.0.2")
    told = [e if isinstance(e, Reached) else bytes(e.frames[0]) for e in a.events if isinstance(e, Reached | Incoming)]
    assert told == [b"local", Reached("127.0.0.3"), b"b", b"c"]  # before what came by it


def test_who_listens_at_one_address_is_told_of_no_other(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport_module, "leads_here", lambda host: True)
    a, b = node("a", "127.0.0.2:0"), node("b")
    b.transport.send_control(f"127.0.0.2:{a.transport.control_port}", [b"x"])
    pump(lambda: a.messages(), a, b)
    assert not any(isinstance(e, Reached) for e in a.events)


@needs_ipv6
def test_every_address_of_a_name_is_tried(node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "look_up", lambda host: ["::1", "127.0.0.1"])
    a, b = node("a"), node("b")
    name = f"two.example:{b.transport.control_port}"
    a.transport.send_control(name, [b"x"])
    pump(lambda: b.messages(), a, b)
    pump(lambda: a.link_kinds(name), a, b)
    assert a.link_kinds(name) == ["connected"] and b.messages() == [[b"x"]]


def test_a_name_that_is_not_known_yet_is_asked_for_again(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def look_up(host: str) -> list[str]:
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror("unknown")
        return ["127.0.0.1"]

    monkeypatch.setattr(addresses, "look_up", look_up)
    a, b = node("a"), node("b")
    name = f"later.example:{b.transport.control_port}"
    a.transport.send_control(name, [b"x"])
    pump(lambda: b.messages() and len(a.link_kinds(name)) == 3, a, b)
    assert a.link_kinds(name) == ["unreached", "unreached", "connected"] and asked == ["later.example"] * 3


def test_close_waits_for_all_look_ups_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited for each in turn: with a silent name server a peer of many names took that many times as long."""
    go_on, waits_s = threading.Event(), list[float]()
    monkeypatch.setattr(addresses, "look_up", lambda host: [] if go_on.wait(WAIT_S) else [host])
    resolver = addresses.Resolver(lambda: None)
    for i in range(20):
        resolver.ask(f"{i}.example")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", lambda self, timeout: waits_s.append(timeout))
        resolver.close()
    go_on.set()
    assert len(waits_s) == 20 and sum(waits_s) == pytest.approx(addresses.JOIN_S)
    resolver.close()


def test_where_there_is_no_thread_for_a_look_up_it_fails_and_is_made_another_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The whole peer ended."""

    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    woken = list[None]()
    monkeypatch.setattr(addresses, "look_up", lambda host: ["127.0.0.1"])
    resolver = addresses.Resolver(lambda: woken.append(None))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        resolver.ask("one.example")
    assert woken
    ((host, found, problem),) = resolver.answers()
    assert (host, found) == ("one.example", []) and "can't start new thread" in problem
    resolver.ask("one.example")
    wait_until(lambda: resolver.answers() == [("one.example", ["127.0.0.1"], "the name has no address")], WAIT_S)


@pytest.mark.parametrize("bad", ["", "host", ":1", "host:", "host:x", "host:65536", "::1:5", "a b:1", "[::1]", "h/x:1"])
def test_a_malformed_address_is_refused_without_raising(node: Callable[..., Node], bad: str) -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        parse_address(bad)
    a = node("a")
    assert not a.transport.send_control(bad, [b"x"]) and not a.transport.send_bulk(bad, [b"x"])
    pump(lambda: a.link_kinds(bad), a, want={a: [bad]})
    assert set(a.link_kinds(bad)) == {"unreached"}


def test_close_delivers_what_was_sent_before(node: Callable[..., Node]) -> None:
    a, b = node("a"), node("b")
    for i in range(300):  # more than fits inside libzmq, and the link is not even up
        assert a.transport.send_control(b.address, [b"%d" % i, bytes(10_000)])
    closer = threading.Thread(target=a.transport.close, args=(WAIT_S,))
    closer.start()
    pump(lambda: not closer.is_alive(), b)
    pump(lambda: len(b.messages()) == 300, b)
    assert [m[0] for m in b.messages()] == [b"%d" % i for i in range(300)]


@pytest.mark.parametrize("by", ["link", "reply"])
def test_close_waits_until_a_slow_one_has_taken_what_libzmq_has(node: Callable[..., Node], by: str) -> None:
    a, n = node("a", security=None), 20
    with zmq.Context() as context, context.socket(zmq.ROUTER if by == "link" else zmq.DEALER) as slow:
        slow.linger, slow.rcvhwm, slow.rcvbuf = 0, 1, 1 << 16
        if by == "link":
            address = f"127.0.0.1:{slow.bind_to_random_port('tcp://127.0.0.1')}"
            a.transport.send_control(address, [b"x"])
            pump(lambda: slow.poll(0), a)
            slow.recv_multipart()
        else:
            slow.connect(f"tcp://{a.address}")
            slow.send(b"x")
            pump(lambda: a.messages(), a)
        route = next((e.route for e in a.events if isinstance(e, Incoming)), None)
        for i in range(n):
            frames = [b"%d" % i, bytes(1 << 20)]
            assert a.transport.send_control(address, frames) if route is None else a.transport.reply(route, frames)
        closer = threading.Thread(target=a.transport.close, args=(WAIT_S,))
        closer.start()
        for i in range(n):
            assert slow.poll(WAIT_S * 1000) and slow.recv_multipart()[-2] == b"%d" % i
        closer.join(WAIT_S)
        assert not closer.is_alive()


def test_close_tries_those_once_more_who_were_not_there(node: Callable[..., Node]) -> None:
    """One that had been restarted in its place never heard that the other left: its link had failed a moment before."""
    a, (address,) = node("a"), free_addresses(1)
    a.transport.send_control(address, [b"leave"])
    pump(lambda: len(a.link_kinds(address)) >= 3, a)
    b = node("b", address)
    closer = threading.Thread(target=a.transport.close, args=(WAIT_S,))
    closer.start()
    pump(lambda: not closer.is_alive(), b)
    pump(lambda: b.messages() == [[b"leave"]], b)


def test_close_does_not_wait_for_those_who_are_not_there(node: Callable[..., Node]) -> None:
    a, (nobody,) = node("a"), free_addresses(1)
    a.transport.send_control(nobody, [b"x"])
    pump(lambda: a.link_kinds(nobody), a)
    began = time.monotonic()
    a.transport.close(2 * WAIT_S)
    assert time.monotonic() - began < WAIT_S


def test_close_waits_without_a_look_at_what_nobody_will_read(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as a message lay there unread, it kept a processor busy."""
    a, b = node("a"), node("b")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert a.transport.send_control(f"127.0.0.1:{silent.getsockname()[1]}", [b"x"])
        assert b.transport.send_control(a.address, [b"unread"])
        pump(lambda: b.link_kinds(a.address), b, zap_only(a))
        assert a.transport._control.poll(WAIT_S * 1000)
        waits, wait = 0, a.transport._wait

        def counted(*args: Any, **options: Any) -> dict[Any, int]:
            nonlocal waits
            waits += 1
            return wait(*args, **options)

        monkeypatch.setattr(a.transport, "_wait", counted)
        a.transport.close(0.5)
    assert 0 < waits < 40


def test_who_had_gone_before_libzmq_asked_where_it_was_is_nowhere() -> None:
    """The error ended the peer."""
    assert transport_module._observed_host(zmq.Frame(b"x")) == ""


def test_close_leaves_no_thread_and_no_port(node: Callable[..., Node]) -> None:
    if not os.path.isdir("/proc/self/task"):
        pytest.skip("counts threads in /proc")
    before = set(os.listdir("/proc/self/task"))  # one of the test before may be ending still
    a, b = node("a", *free_addresses(1)), node("b")
    a.transport.send_control(b.address, [b"x"])
    a.transport.send_control("localhost:1", [b"x"])
    pump(lambda: b.messages(), a, b)
    for one in (a, b):
        one.transport.close()
        one.transport.close()
        one.transport.wake()
    # One that was joined is listed until the kernel has taken it away.
    wait_until(lambda: set(os.listdir("/proc/self/task")) <= before, WAIT_S, "no thread is left")
    node("c", a.address)


def test_a_long_poll_ends_when_there_is_something_to_do(node: Callable[..., Node]) -> None:
    a, b, (nobody,) = node("a", security=None), node("b", security=None), free_addresses(1)
    began = time.monotonic()
    a.transport.send_control(nobody, [b"x"])
    while len(a.link_kinds(nobody)) < 3:
        a.events += a.transport.poll(WAIT_S)
    a.transport.forget(nobody)
    for _ in range(4 * lanes.CONTROL_SEND_HWM):
        assert a.transport.send_control(b.address, [bytes(10_000)])
    while a.transport._controls[b.address].pending:
        a.transport.poll(WAIT_S)
    assert time.monotonic() - began < WAIT_S


def test_a_bulk_link_with_nothing_to_send_ends_no_poll(node: Callable[..., Node]) -> None:
    """There is room on it all the time: a processor would be busy with that."""
    a, b = node("a"), node("b")
    pump(lambda: a.transport.send_bulk(b.bulk_address, [b"x"]), a, b)

    def rests() -> bool:
        began = time.monotonic()
        a.transport.poll(0.1)
        return time.monotonic() - began > 0.05

    assert any(rests() for _ in range(20))


def test_wake_ends_a_poll_in_another_thread(node: Callable[..., Node]) -> None:
    a, polling = node("a"), threading.Event()

    def poll() -> None:
        polling.set()
        a.transport.poll(5 * WAIT_S)

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    polling.wait()
    a.transport.wake()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    for _ in range(100_000):  # nobody reads: must neither block nor raise
        a.transport.wake()


def test_a_message_over_the_limits_costs_the_link_and_nothing_else(node: Callable[..., Node]) -> None:
    a, b = node("a", security=None), node("b", security=None)
    for bad in ([], [b""] * (transport_module.FRAMES_MAX + 1), [bytes(lanes.CONTROL_FRAME_BYTES_MAX + 1)]):
        with pytest.raises(ValueError, match="frames"):
            a.transport.send_control(b.address, bad)
    with zmq.Context() as context, context.socket(zmq.DEALER) as rude:
        rude.linger = 0
        rude.connect(f"tcp://{b.address}")
        rude.send_multipart([b"f"] * (transport_module.FRAMES_MAX + 1))
        pump(lambda: b.transport.dropped == 1, a, b)
        rude.send(bytes(lanes.CONTROL_FRAME_BYTES_MAX + 1))
        rude.send_multipart([b"after"])
        a.transport.send_control(b.address, [b"fine"])
        pump(lambda: [b"fine"] in b.messages(), a, b)
        pump(lambda: [b"after"] in b.messages(), a, b)
    assert sorted(b.messages()) == [[b"after"], [b"fine"]]


def test_an_oversized_reply_does_not_end_the_link(node: Callable[..., Node]) -> None:
    """libzmq gives such a connection up for ever; the link opens another."""
    a = node("a", security=None)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as rude:
        rude.linger, rude.router_handover = 0, 1
        address = f"127.0.0.1:{rude.bind_to_random_port('tcp://127.0.0.1')}"
        a.transport.send_control(address, [b"1"])
        pump(lambda: rude.poll(0), a)
        rude.send_multipart([rude.recv_multipart()[0], bytes(lanes.CONTROL_FRAME_BYTES_MAX + 1)])
        pump(lambda: a.link_kinds(address) == ["connected", "disconnected", "connected"], a)
        a.transport.send_control(address, [b"2"])
        pump(lambda: rude.poll(0), a)
        assert rude.recv_multipart()[1] == b"2"


def test_two_names_of_one_peer_do_not_fight_over_a_route(node: Callable[..., Node]) -> None:
    a, b = node("a"), node("b")
    alias = f"localhost:{b.transport.control_port}"
    for i in range(5):
        a.transport.send_control(b.address, [b"%d" % i])
        a.transport.send_control(alias, [b"%d" % i])
        pump(lambda i=i: len(b.messages()) == 2 * (i + 1), a, b)
    pump(lambda: a.link_kinds(b.address) and a.link_kinds(alias), a, b)
    assert a.link_kinds(b.address) == a.link_kinds(alias) == ["connected"]


def test_strangers_addresses_cannot_open_links_without_end(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport_module, "LINKS_MAX", 3)
    a = node("a")
    others = free_addresses(5)
    assert [a.transport.send_control(other, [b"x"]) for other in others] == [True] * 3 + [False] * 2
    a.transport.forget(others[0])
    assert a.transport.send_control(others[4], [b"x"])


def test_links_that_are_down_and_of_no_use_are_let_go(node: Callable[..., Node]) -> None:
    """Of all who died in the weeks of a run, each had a link that was tried every two seconds, for ever."""
    now, a, b = 1000.0, node("a"), node("b")
    a.transport._clock = lambda: now
    nobody, other = free_addresses(2)
    for address in (nobody, other, b.address):
        a.transport.send_control(address, [b"x"])
    a.transport.open_bulk(nobody)
    pump(lambda: a.link_kinds(nobody) and a.link_kinds(other) and a.link_kinds(b.address) and b.messages(), a, b)
    now += links.UNUSED_S - 1.0
    a.transport.send_control(other, [b"y"])
    a.transport.poll(0.0)
    assert sorted(link.address for link in a.transport._links()) == sorted([nobody, nobody, other, b.address])
    now += 1.0
    a.transport.poll(0.0)
    assert {link.address: len(link.pending) for link in a.transport._links()} == {other: 1, b.address: 0}
    now += 10 * links.UNUSED_S
    a.transport.poll(0.0)
    assert [link.address for link in a.transport._links()] == [b.address], "the one that is up stays"


@pytest.mark.parametrize("sockets", [1, 2, 3, 4])
def test_a_link_for_which_there_are_not_enough_sockets_fails_and_is_tried_again(sockets: int) -> None:
    """One needs three: without the second or third it hung for ever when it was closed."""
    with zmq.Context() as context:
        context.set(zmq.MAX_SOCKETS, sockets)
        resolver = addresses.Resolver(lambda: None)
        link = links.Link(context, *free_addresses(1), "control", routing_id=b"a", security=None, resolver=resolver)
        found = link.advance(0.0)
        if link.socket is None:
            assert [(event.kind, event.detail) for event in found] == [
                ("unreached", "no attempt could be made: Too many open files")
            ]
            assert link.deadline() is not None and link.monitor is None
        else:
            assert not found and link.monitor is not None
        assert (link.socket is not None) == (sockets >= 3)
        link.close()


@pytest.mark.parametrize("lane", ["control", "bulk"])
def test_a_process_that_may_open_no_more_files_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lane: str
) -> None:
    """Its bulk did not pass, and all that it and the others said was to look whether its second port is open."""
    monkeypatch.setattr(transport_module, "SOCKETS_MAX", 8)  # two listen, each with both ends of a monitor
    a = Transport(security=None, ident=b"a")
    try:
        for address in free_addresses(3):
            if lane == "control":
                a.send_control(address, [b"x"])
            else:
                a.open_bulk(address)
            a.poll(0.0)
    finally:
        a.close(0.0)
    (told,) = (r.getMessage() for r in caplog.records)
    assert "may open no more files" in told and "ulimit -n" in told


def test_a_connection_that_nobody_saw_break_is_taken_over_by_its_successor(node: Callable[..., Node]) -> None:
    b = node("b", security=None)
    with zmq.Context() as context, context.socket(zmq.DEALER) as before, context.socket(zmq.DEALER) as after:
        for i, sock in enumerate((before, after)):
            sock.linger, sock.routing_id = 0, b"same"
            sock.connect(f"tcp://{b.address}")
            sock.send(b"%d" % i)
            pump(lambda i=i: len(b.messages()) == i + 1, b)
        route = [e.route for e in b.events if isinstance(e, Incoming)][-1]
        assert route is not None and b.transport.reply(route, [b"to the later"])
        assert after.poll(WAIT_S * 1000) and after.recv() == b"to the later"


def test_a_bulk_connection_that_ends_is_told_of_where_it_had_carried_something(node: Callable[..., Node]) -> None:
    """What was on its way is nobody's then, and its sender waited for the answer."""
    a, (address,) = node("a"), free_addresses(1)
    for carries in (False, True):
        b = node("b", address)
        bulk = b.bulk_address
        pump(lambda bulk=bulk: a.transport.open_bulk(bulk) or a.transport._bundles[bulk].links[0].up, a, b)
        if carries:
            assert a.transport.send_bulk(bulk, [b"x"])
        b.transport.close()
        pump(lambda bulk=bulk: not a.transport._bundles[bulk].links[0].up, a)
        a.events += a.transport.poll(0.0)
        assert [e for e in a.events if isinstance(e, lanes.Broken)] == [lanes.Broken(bulk)] * carries


def test_a_bulk_connection_that_is_made_anew_for_want_of_answers_is_told_of(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = node("a"), node("b")
    a.transport.open_bulk(b.bulk_address)
    pump(lambda: a.transport.send_bulk(b.bulk_address, [b"x"]), a, b)
    stalled = tcp.TcpSample(1000, 0.1, 0.1, 1e6, False, 1.0, 20, timeouts=links.STALLED_TIMEOUTS)
    monkeypatch.setattr(a.transport._bundles[b.bulk_address].links[0], "tcp_sample", lambda: stalled)
    a.transport.revive_bulk()
    assert lanes.Broken(b.bulk_address) in a.transport.poll(0.0)


@pytest.mark.parametrize("streams", [1, 4])
def test_where_only_small_packets_pass_it_is_said_and_what_helps(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, streams: int
) -> None:
    """Of a path that loses packets above 1300 bytes it was only said that a port might be closed, which was open; then
    by each of the connections to one host."""
    a, b = node("a"), node("b")
    a.transport.open_bulk(b.bulk_address)
    a.transport._widen(b.bulk_address, streams)
    many = a.transport._bundles[b.bulk_address].links
    stalled = tcp.TcpSample(1000, 0.1, 0.1, 1e6, False, 1.0, 20, timeouts=links.STALLED_TIMEOUTS)
    for link in many:
        monkeypatch.setattr(link, "tcp_sample", lambda link=link: stalled if link.up else None)
    for said in (0, 1, 1):
        pump(lambda: len(many) == streams and all(link.up for link in many), a, b)
        a.transport.revive_bulk()
        assert not any(link.up for link in many) and len(caplog.records) == said
    assert b.bulk_address in caplog.text and "mtu 1280" in caplog.text


def test_all_connections_to_one_host_are_mended(node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = node("a"), node("b")
    a.transport.open_bulk(b.bulk_address)
    a.transport._widen(b.bulk_address, 4)
    many, renewed = a.transport._bundles[b.bulk_address].links, []
    for link in many:
        monkeypatch.setattr(link, "renew", lambda now, link=link: renewed.append(link) or [])
    a.transport.mend_bulk()
    assert len(many) == 4 and renewed == many


@pytest.mark.skipif(not tcp.AVAILABLE, reason="/proc/self/fd and TCP_USER_TIMEOUT are Linux's")
def test_both_ends_of_a_connection_give_up_what_gets_no_answer(
    node: Callable[..., Node],
) -> None:
    a, b = node("a"), node("b")
    a.transport.send_control(b.address, [b"x"])
    a.transport.open_bulk(b.bulk_address)
    pump(lambda: b.messages() and a.transport.send_bulk(b.bulk_address, [b"x"]), a, b)
    ports, told_s = (b.transport.control_port, b.transport.bulk_port), dict[tuple[int, str], int]()
    alive = dict[tuple[int, str], tuple[int, ...]]()
    options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    with contextlib.closing(tcp.Spare()) as spare:
        for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
            with spare.duplicate(fd) as sock:
                ends = {"b": sock.getsockname()[1], "a": sock.getpeername()[1]} if sock is not None else {}
                for end, port in ends.items():
                    if sock is not None and port in ports:
                        told_s[port, end] = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) // 1000
                        probes = [sock.getsockopt(socket.IPPROTO_TCP, option) for option in options]
                        alive[port, end] = (sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), *probes)
    lanes_of = dict(zip(ports, (CONTROL_KEEPALIVE, BULK_KEEPALIVE), strict=True))
    ends = [(port, end) for port in ports for end in "ab"]
    assert told_s == {(port, end): lanes_of[port].silent_s for port, end in ends}
    assert alive == {
        (port, end): (1, of.idle_s, of.interval_s, of.count) for port, end in ends for of in (lanes_of[port],)
    }
    assert max(of.idle_s for of in lanes_of.values()) < 30, "some routers forget a connection that rests for so long"
    assert CONTROL_KEEPALIVE.silent_s < 15, "a cut is known soon"
    assert BULK_KEEPALIVE.silent_s > 45, "who computes at length takes no chunks meanwhile"
