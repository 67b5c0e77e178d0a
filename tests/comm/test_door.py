"""Strangers at the sockets that listen, over real connections. 127.0.0.2 to .4 stand for other hosts."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import resource
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import zmq

import dlc.comm.transport as transport_module
from dlc.comm import door, links, tcp
from dlc.comm.lanes import Incoming
from dlc.comm.security import LinkSecurity
from dlc.comm.transport import Transport

pytestmark = pytest.mark.skipif(not tcp.AVAILABLE, reason="this system does not say what a connection has sent")

WAIT_S = 120.0
KEYED = LinkSecurity.derive(bytes(32), "run")
LIMIT = 8
UNLIMITED = resource.RLIM_INFINITY
ZMTP_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(47)
HELLO_BYTES = 202
"""Of the first message of CurveZMQ, with its frame."""


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_module, "strangers_max", lambda: LIMIT)


@pytest.fixture
def transport() -> Iterator[Callable[..., Transport]]:
    with contextlib.ExitStack() as stack:

        def make(name: str, security: LinkSecurity | None = KEYED, listen: str = "127.0.0.1:0") -> Transport:
            made = Transport(listen, security=security, insecure=True, ident=name.encode())
            stack.callback(made.close, 0.0)
            return made

        yield make


@pytest.fixture
def stranger() -> Iterator[Callable[[Transport, str], socket.socket]]:
    with contextlib.ExitStack() as stack:

        def come(to: Transport, host: str = "127.0.0.2", lane: str = "control") -> socket.socket:
            port = to.control_port if lane == "control" else to.bulk_port
            return stack.enter_context(socket.create_connection(("127.0.0.1", port), 30, (host, 0)))

        yield come


def pump(until: Callable[[], object], *transports: Transport) -> None:
    deadline = time.monotonic() + WAIT_S
    while not until():
        assert time.monotonic() < deadline
        for one in transports:
            one.poll(0.01)


def pass_message(sender: Transport, to: Transport) -> None:
    sender.send_control(f"127.0.0.1:{to.control_port}", [b"x"])
    found: list[object] = []

    def arrived() -> bool:
        found.extend(e for e in to.poll(0.01) if isinstance(e, Incoming))
        sender.poll(0.0)
        return bool(found)

    pump(arrived)


def is_open(sock: socket.socket) -> bool:
    """Nothing but a greeting has come: no end."""
    sock.setblocking(False)
    try:
        return all(sock.recv(4096) for _ in range(3))
    except BlockingIOError:
        return True
    except OSError:
        return False


def guests(one: Transport) -> int:
    return len(one._door._guests)


@pytest.mark.usefixtures("limit")
@pytest.mark.parametrize("lane", ["control", "bulk"])
def test_the_oldest_strangers_are_shut_when_there_are_too_many(
    transport: Callable[..., Transport],
    stranger: Callable[..., socket.socket],
    caplog: pytest.LogCaptureFixture,
    lane: str,
) -> None:
    a = transport("a")
    came = []
    with caplog.at_level(logging.WARNING):
        for i in range(5 * LIMIT):
            came.append(stranger(a, lane=lane))
            pump(lambda i=i: guests(a) + a._door.shut == i + 1, a)
    assert guests(a) <= LIMIT
    left = guests(a)
    assert left >= LIMIT // 2
    pump(lambda: sum(map(is_open, came)) == left, a)
    assert all(map(is_open, came[-left:]))  # the youngest
    assert sum("do not say that they know the run key" in r.message for r in caplog.records) == 1
    assert "127.0.0.2" in caplog.text


@pytest.mark.usefixtures("limit")
def test_members_stay_and_come_among_strangers(
    transport: Callable[..., Transport], stranger: Callable[..., socket.socket]
) -> None:
    a, *members = (transport(name) for name in "abcdefghijklm")
    address = f"127.0.0.1:{a.control_port}"
    messages: list[Incoming] = []
    strangers: list[socket.socket] = []
    for i, member in enumerate(members):  # more of them than strangers may be
        strangers += [stranger(a) for _ in range(LIMIT)]
        assert member.send_control(address, [b"%d" % i])

        def arrived(i: int = i, member: Transport = member) -> bool:
            messages.extend(e for e in a.poll(0.01) if isinstance(e, Incoming))
            member.poll(0.0)
            return len(messages) > i

        pump(arrived)
    assert a._door.shut >= (len(members) - 2) * LIMIT
    for message in messages:  # nobody had to come again
        assert a.reply(message.route, [b"still here"])
    waiting = set(members)

    def answered() -> bool:
        for member in members:
            if any(isinstance(e, Incoming) for e in member.poll(0.0)):
                waiting.discard(member)
        return not waiting

    pump(answered, a)


@pytest.mark.usefixtures("limit")
def test_a_host_that_sends_many_strangers_does_not_keep_others_out(
    transport: Callable[..., Transport], stranger: Callable[..., socket.socket]
) -> None:
    a = transport("a")
    slow = [stranger(a, "127.0.0.3"), stranger(a, "127.0.0.4")]  # not known to be members yet
    pump(lambda: guests(a) == 2, a)
    for _ in range(3 * LIMIT):
        stranger(a)
    pump(lambda: guests(a) + a._door.shut == 3 * LIMIT + 2, a)
    assert a._door.shut > LIMIT and all(map(is_open, slow))


@pytest.mark.usefixtures("limit")
def test_of_strangers_from_as_many_hosts_the_oldest_are_shut(
    transport: Callable[..., Transport], stranger: Callable[..., socket.socket]
) -> None:
    """It was the youngest: a member that came while many hosts knocked was shut before it could say who it is."""
    a = transport("a")
    came = []
    for i in range(LIMIT + 1):
        came.append(stranger(a, f"127.0.0.{10 + i}"))
        pump(lambda i=i: guests(a) + a._door.shut == i + 1, a)
    left = guests(a)
    assert left == LIMIT // 2
    pump(lambda: sum(map(is_open, came)) == left, a)
    assert all(map(is_open, came[-left:]))


@pytest.fixture
def accepted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Transport, int, int], None]:
    """What libzmq says of a descriptor and the port by which somebody came, and the door is told at its next look."""
    said: list[tuple[int, int]] = []

    def recv(monitor: object, flags: int) -> dict[str, object]:
        if not said:
            raise zmq.Again
        fd, port = said.pop(0)
        return {"event": int(zmq.EVENT_ACCEPTED), "value": fd, "endpoint": b"tcp://127.0.0.1:%d" % port}

    def tell(of: Transport, fd: int, port: int) -> None:
        monkeypatch.setattr(door, "recv_monitor_message", recv)
        said.append((fd, port))
        assert of._door.look() == []

    return tell


@pytest.fixture
def pairs() -> Iterator[Callable[[], tuple[socket.socket, socket.socket]]]:
    """Both ends of a connection within this process: who made it, and who took it."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def make() -> tuple[socket.socket, socket.socket]:
            made = stack.enter_context(socket.create_connection(server.getsockname()))
            return made, stack.enter_context(server.accept()[0])

        yield make


Pairs = Callable[[], tuple[socket.socket, socket.socket]]


def test_a_descriptor_that_is_another_files_by_now_is_none_of_a_strangers(
    transport: Callable[..., Transport], accepted: Callable[..., None], pairs: Pairs
) -> None:
    """A stranger that had gone again left its number to a connection that this process made, to whom it liked: that
    was shut for being silent while much came."""
    a = transport("a")
    own, other = pairs()
    accepted(a, own.fileno(), a.control_port)
    assert guests(a) == 0
    other.sendall(bytes(2 * door.HELLO_BYTES_MAX))
    a._door.inspect(math.inf)
    assert a._door.shut == 0 and is_open(own)


def test_a_descriptor_that_became_another_files_is_no_strangers_any_more(
    transport: Callable[..., Transport], accepted: Callable[..., None], pairs: Pairs
) -> None:
    a = transport("a")
    (_, stranger), (own, other) = pairs(), pairs()
    accepted(a, stranger.fileno(), stranger.getsockname()[1])
    assert guests(a) == 1
    os.dup2(own.fileno(), stranger.fileno())
    other.sendall(bytes(2 * door.HELLO_BYTES_MAX))
    a._door.inspect(1.0)
    assert a._door.shut == guests(a) == 0 and is_open(own)


def test_who_comes_by_a_descriptor_whose_end_was_not_told_is_the_youngest(
    transport: Callable[..., Transport], accepted: Callable[..., None], pairs: Pairs
) -> None:
    a = transport("a")
    first, second = (took.fileno() for _, took in (pairs(), pairs()))
    for fd in (first, second, first):
        accepted(a, fd, pairs()[1].getsockname()[1])
    assert [fd for _, fd in a._door._guests] == [second, first]


@pytest.mark.usefixtures("limit")
def test_members_that_wait_to_be_let_in_may_be_more_than_strangers(
    transport: Callable[..., Transport], stranger: Callable[..., socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred that begin at once wait together while the thread that lets them in is busy."""
    real = tcp.sample

    def sample(sock: socket.socket) -> tcp.TcpSample | None:
        told = real(sock)
        return replace(told, bytes_acked=door.WELCOMED_BYTES, sacked_bytes=0) if told is not None else None

    monkeypatch.setattr(tcp, "sample", sample)
    a, most = transport("a"), door.WELCOMED_TIMES * LIMIT
    came = [stranger(a) for _ in range(most)]
    pump(lambda: guests(a) == most, a)
    assert a._door.shut == 0 and all(map(is_open, came))
    stranger(a)
    pump(lambda: guests(a) == most // 2, a)


@pytest.mark.parametrize("lane", ["control", "bulk"])
def test_a_stranger_that_sends_more_than_a_hello_is_shut(
    transport: Callable[..., Transport], stranger: Callable[..., socket.socket], lane: str
) -> None:
    """libzmq keeps what comes of a frame of up to 8 MiB: hundreds of strangers filled gigabytes of memory."""
    a, b = transport("a"), transport("b")
    came = stranger(a, lane=lane)
    came.sendall(ZMTP_GREETING + b"\x06" + (4 << 20).to_bytes(8, "big") + bytes(64 << 10))
    b.send_control(f"127.0.0.1:{a.control_port}", [b"x"])
    found: list[object] = []

    def arrived() -> bool:
        found.extend(e for e in a.poll(0.01) if isinstance(e, Incoming))
        b.poll(0.0)
        return bool(found) and a._door.shut == 1 and guests(a) == 0

    pump(arrived)
    pump(lambda: not is_open(came), a)


def first_message_of(member: Transport) -> bytes:
    """What it says to whoever it connects to: its greeting, and a message that needs no answer to its own."""
    said = b""
    with socket.create_server(("127.0.0.1", 0)) as listens:
        listens.settimeout(WAIT_S)
        address = f"127.0.0.1:{listens.getsockname()[1]}"
        member.send_control(address, [b"x"])
        came, _ = listens.accept()
        with came:
            came.settimeout(WAIT_S)
            came.sendall(ZMTP_GREETING)
            while len(said) < door.GREETING_BYTES + HELLO_BYTES:
                assert (more := came.recv(4096))
                said += more
    member.forget(address)
    return said


def is_welcomed(sock: socket.socket) -> bool:
    """Our side took its first message for a member's, and said what it says then."""
    sock.setblocking(False)
    try:
        return len(sock.recv(4096, socket.MSG_PEEK)) == door.WELCOMED_BYTES
    except BlockingIOError:
        return False


@pytest.mark.usefixtures("limit")
def test_who_says_what_a_member_said_before_opens_no_more_than_some(
    transport: Callable[..., Transport], stranger: Callable[..., socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever had listened on the way could take all open files of a process, and keep members out."""
    monkeypatch.setattr(links, "HANDSHAKE_TIMEOUT_S", 2 * WAIT_S)
    a, b = transport("a"), transport("b")
    said, most = first_message_of(b), door.WELCOMED_TIMES * LIMIT
    for _ in range(2 * most):
        came = stranger(a)
        came.sendall(said)
        pump(lambda came=came: is_welcomed(came), a)
    # Whoever has not acknowledged its answer yet, as the newest, is among the strangers still.
    assert guests(a) <= most + LIMIT and a._door.shut >= most // 2
    pass_message(b, a)


@pytest.mark.parametrize("lane", ["control", "bulk"])
def test_who_says_what_a_member_said_before_and_sends_more_is_shut(
    transport: Callable[..., Transport], stranger: Callable[..., socket.socket], lane: str
) -> None:
    a, b = transport("a"), transport("b")
    came = stranger(a, lane=lane)
    came.sendall(first_message_of(b))
    pump(lambda: is_welcomed(came), a)
    came.sendall(b"\x06" + (4 << 20).to_bytes(8, "big") + bytes(64 << 10))
    pump(lambda: a._door.shut == 1 and guests(a) == 0, a)


def test_who_acknowledges_what_it_never_got_is_a_stranger_still(
    transport: Callable[..., Transport], stranger: Callable[..., socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the first bytes had been lost on the way: each segment behind them counts as a full one."""
    real = tcp.sample

    def sample(sock: socket.socket) -> tcp.TcpSample | None:
        told = real(sock)
        return replace(told, bytes_acked=told.bytes_acked + 1448, sacked_bytes=1448) if told is not None else None

    monkeypatch.setattr(tcp, "sample", sample)
    monkeypatch.setattr(door, "INSPECT_S", 0.0)
    a = transport("a")
    came = stranger(a)
    pump(lambda: guests(a) == 1, a)
    for _ in range(10):
        a.poll(0.01)
    assert guests(a) == 1 and is_open(came)


@pytest.mark.usefixtures("limit")
def test_without_a_key_nobody_is_a_stranger(
    transport: Callable[..., Transport], stranger: Callable[..., socket.socket]
) -> None:
    a, b = transport("a", None), transport("b", None)
    came = [stranger(a) for _ in range(4 * LIMIT)]
    pass_message(b, a)
    assert guests(a) == a._door.shut == 0 and all(map(is_open, came))


def test_who_leaves_by_itself_is_counted_no_more(
    transport: Callable[..., Transport], stranger: Callable[..., socket.socket]
) -> None:
    a = transport("a")
    came = [stranger(a) for _ in range(3)]
    pump(lambda: guests(a) == 3, a)
    for sock in came:
        sock.close()
    pump(lambda: guests(a) == 0, a)
    assert a._door.shut == 0


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("0.0.0.1", "::1:0:0:0:1", False),
    ],
)
def test_what_one_machine_may_have_is_one_site(one: str, other: str, same: bool) -> None:
    assert (door._site(one) == door._site(other)) == same


@pytest.mark.parametrize(
    ("files", "most"),
    [(64, door.STRANGERS_MIN), (1024, 128), (1 << 20, door.STRANGERS_MAX), (UNLIMITED, door.STRANGERS_MAX)],
)
def test_how_many_may_be_strangers(monkeypatch: pytest.MonkeyPatch, files: int, most: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (files, files))
    assert door.strangers_max() == most


def test_a_process_with_few_open_files_keeps_some_for_itself() -> None:
    """Of 96 files strangers would take all; a member comes, and the process opens files, while they go on coming."""
    program = """
        import resource, sys, tempfile
        resource.setrlimit(resource.RLIMIT_NOFILE, (96, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        from dlc.comm.lanes import Incoming
        from dlc.comm.security import LinkSecurity
        from dlc.comm.transport import Transport
        one = Transport(security=LinkSecurity.derive(bytes(32), ""), ident=b"one")
        print(one.control_port, flush=True)
        while True:
            for event in one.poll(0.05):
                if isinstance(event, Incoming):
                    files = [tempfile.TemporaryFile() for _ in range(16)]
                    print("came", one._door.shut, flush=True)
                    sys.exit(0)
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with child, contextlib.ExitStack() as stack:
        stack.callback(child.kill)
        assert child.stdout is not None
        port = int(child.stdout.readline())
        for _ in range(300):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 30))
        two = Transport(security=LinkSecurity.derive(bytes(32), ""), ident=b"two")
        stack.callback(two.close, 0.0)
        two.send_control(f"127.0.0.1:{port}", [b"hello"])
        pump(lambda: child.poll() is not None, two)
        said, wrong = child.communicate()
        assert child.returncode == 0, wrong
        assert said.startswith("came") and int(said.split()[1]) > 200
