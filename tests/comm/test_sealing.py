"""The sealed bulk lane: what passes, what a stranger on the way can do, and what comes of a lost session."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
import zmq

from dlc.comm import links, sealing
from dlc.comm import transport as transport_module
from dlc.comm.lanes import Incoming
from dlc.comm.sealing import AGAIN, HELLO, PUBLIC_BYTES, SEAL_BYTES, BrokenSeal, Greeting, Session, answer
from dlc.comm.security import GATE_DOMAIN, LinkSecurity
from dlc.comm.transport import Transport
from tests.comm.test_transport import KEYED, OTHER, Node, node, pump

__all__ = ["node"]
SECRET = bytes(range(32))
FRAMES = [b"envelope", b"", bytes(range(256)) * 40]


def sessions() -> tuple[Session, Session]:
    """Of who connects, and of who listens."""
    greeting = Greeting(SECRET)
    answered = answer(SECRET, greeting.hello)
    assert answered is not None
    here = greeting.answered(answered[0])
    assert here is not None
    return here, answered[1]


def test_messages_pass_both_ways_and_in_their_own_direction_only() -> None:
    here, there = sessions()
    for _ in range(3):
        sealed = here.seal([FRAMES[0], memoryview(FRAMES[2])])
        assert there.open([memoryview(frame) for frame in sealed]) == [FRAMES[0], FRAMES[2]]
        assert here.open(there.seal(FRAMES)) == FRAMES
    with pytest.raises(BrokenSeal):
        here.open(here.seal(FRAMES))


def test_a_sealed_frame_is_little_longer_and_never_the_same_twice() -> None:
    here, _ = sessions()
    first, second = here.seal(FRAMES), here.seal(FRAMES)
    assert all(0 < len(s) - len(f) <= SEAL_BYTES for s, f in zip(first, FRAMES, strict=True))
    assert not {*first} & {*second} and not any(FRAMES[0] in frame for frame in first)
    assert max(len(HELLO), len(AGAIN)) < len(first[0])


def test_a_message_that_was_never_sent_leaves_a_gap_and_nothing_is_shown_twice_or_late() -> None:
    here, there = sessions()
    one, _, three = here.seal([b"1"]), here.seal([b"2"]), here.seal([b"3"])
    assert there.open(one) == [b"1"] and there.open(three) == [b"3"]
    for again in (one, three):
        with pytest.raises(BrokenSeal):
            there.open(again)
    assert there.open(here.seal([b"4"])) == [b"4"]


def test_what_was_changed_cut_or_put_together_anew_is_refused_and_costs_nothing() -> None:
    here, there = sessions()
    one, two = here.seal(FRAMES), here.seal(FRAMES)
    wrong = [one[:2], [*one, b""], [one[1], one[0], one[2]], [*two[:2], one[2]], [one[0][:7]], [b""]]
    for frame in range(3):
        for at in {0, 8, len(one[frame]) // 2, len(one[frame]) - 1} & set(range(len(one[frame]))):
            flipped = bytearray(one[frame])
            flipped[at] ^= 1
            wrong.append([*one[:frame], bytes(flipped), *one[frame + 1 :]])
    for frames in wrong:
        with pytest.raises(BrokenSeal):
            there.open(frames)
    assert there.open(one) == FRAMES


def test_who_has_another_key_comes_to_no_session() -> None:
    greeting = Greeting(SECRET)
    answered = answer(bytes(32), greeting.hello)
    assert answered is not None and greeting.answered(answered[0]) is None
    here = Greeting(bytes(32))
    other = answer(SECRET, here.hello)
    assert other is not None
    forged = [HELLO, Greeting(SECRET).public, other[0][2]]
    assert greeting.answered(forged) is None


def test_an_answer_to_another_hello_or_of_a_wrong_form_is_none() -> None:
    one, two = Greeting(SECRET), Greeting(SECRET)
    to_one = answer(SECRET, one.hello)
    assert to_one is not None and two.answered(to_one[0]) is None
    for frames in ([HELLO], [HELLO, b"x"], [HELLO, bytes(PUBLIC_BYTES - 1), b""], [HELLO, bytes(PUBLIC_BYTES), b""]):
        assert answer(SECRET, frames) is None and one.answered(frames) is None
    assert answer(SECRET, [HELLO, bytes(PUBLIC_BYTES)]) is None, "a public key that makes any secret zero"
    assert one.answered([*to_one[0][:2], b""]) is None


# ---------------------------------------------------------------- over sockets


class Wiretap:
    """Stands between a client and a port of this host, passes on what it hears, and keeps what the client said."""

    def __init__(self, port: int) -> None:
        self.port, self.heard = port, bytearray()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._server.accept()[0]
                there = socket.create_connection(("127.0.0.1", self.port))
                threading.Thread(target=self._pass, args=(client, there, self.heard), daemon=True).start()
                threading.Thread(target=self._pass, args=(there, client, bytearray()), daemon=True).start()

    @staticmethod
    def _pass(source: socket.socket, target: socket.socket, heard: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                heard += data
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def tap() -> Iterator[Callable[[int], Wiretap]]:
    with contextlib.ExitStack() as stack:

        def make(port: int) -> Wiretap:
            made = Wiretap(port)
            stack.callback(made.close)
            return made

        yield make


def send(a: Node, address: str, frames: list[bytes], *nodes: Node) -> None:
    pump(lambda: a.transport.send_bulk(address, frames), a, *nodes)


@pytest.mark.parametrize("security", [KEYED, None], ids=["key", "no key"])
def test_who_listens_on_the_way_reads_bulk_only_where_there_is_no_key(
    node: Callable[..., Node], tap: Callable[[int], Wiretap], security: LinkSecurity | None
) -> None:
    a, b = node("a", security=security), node("b", security=security)
    wire, chunk = tap(b.transport.bulk_port), os.urandom(1 << 16)
    send(a, wire.address, [b"the head of it", chunk], b)
    pump(lambda: b.messages("bulk"), a, b)
    assert b.messages("bulk") == [[b"the head of it", chunk]]
    assert (b"the head of it" in wire.heard, chunk[:64] in wire.heard) == (security is None, security is None)


def turns(heard: bytes) -> list[bytes]:
    """What a ZMTP 3.1 client said: its greeting, its commands, its messages, each of which is answered in turn."""
    found, at, part = [heard[:64]], 64, b""
    while at < len(heard):
        flags, long = heard[at], heard[at] & 2
        size = int.from_bytes(heard[at + 1 : at + 9], "big") if long else heard[at + 1]
        end = at + (9 if long else 2) + size
        part += heard[at:end]
        at = end
        if not flags & 1:
            found.append(part)
            part = b""
    return found


def test_a_recorded_connection_shown_again_passes_nothing(
    node: Callable[..., Node], tap: Callable[[int], Wiretap]
) -> None:
    """Not to the same process, whose gate has seen its name, and not to another one, which has other session keys."""
    a, b, c = node("a"), node("b"), node("c")
    wire = tap(b.transport.bulk_port)
    send(a, wire.address, [b"once"], b)
    pump(lambda: b.messages("bulk"), a, b)
    greeting, name, ready, hello, message = turns(bytes(wire.heard))
    for target, count in ((b, 2), (c, 4)):
        with socket.create_connection(("127.0.0.1", target.transport.bulk_port)) as again:
            for turn in (greeting, name, ready, hello)[:count]:
                again.sendall(turn)
                pump(lambda s=again: select.select([s], [], [], 0)[0], target)  # type: ignore[misc]
                again.recv(1 << 16)
            if target is c:
                again.sendall(message)
                pump(lambda: c.transport.unsealed, c)
    assert (b.transport.refused_clients, c.transport.refused_clients) == (1, 0)
    assert b.messages("bulk") == [[b"once"]] and not c.messages("bulk")


@contextlib.contextmanager
def raw(name: bytes, password: bytes, port: int) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.linger = 0
        sock.plain_username, sock.plain_password = name, password
        sock.connect(f"tcp://127.0.0.1:{port}")
        yield sock


def test_the_gate_takes_a_members_name_once(node: Callable[..., Node]) -> None:
    b = node("b")
    good = KEYED.password(b"one")
    with raw(b"one", good, b.transport.bulk_port) as sock:
        sock.send_multipart([b"not sealed", b"x"])
        pump(lambda: sock.poll(0), b)
        assert sock.recv_multipart() == [AGAIN] and b.transport.unsealed == 1
    for count, (name, password) in enumerate([(b"one", good), (b"two", good), (b"two", OTHER.password(b"two"))], 1):
        with raw(name, password, b.transport.bulk_port) as sock:
            sock.send_multipart([b"not sealed", b"x"])
            pump(lambda c=count: b.transport.refused_clients >= c, b)  # type: ignore[misc]
    assert b.transport.unsealed == 1 and not b.messages("bulk")


def test_only_so_many_names_are_remembered(monkeypatch: pytest.MonkeyPatch, node: Callable[..., Node]) -> None:
    monkeypatch.setattr("dlc.comm.security.NAMES_MAX", 2)
    handler = node("b").transport._zap
    assert handler is not None
    request = [b"1.0", b"7", GATE_DOMAIN, b"127.0.0.1", b"", b"PLAIN"]
    came = [handler._accepts([*request, name, KEYED.password(name)]) for name in (b"1", b"1", b"2", b"3", b"2", b"1")]
    assert came == [True, False, True, True, False, True]


def test_a_session_that_was_lost_is_made_anew(node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """As where more came than are remembered. What had no session is lost, as with a connection."""
    monkeypatch.setattr(transport_module, "SESSIONS_MAX", 1)
    a, b, c = node("a"), node("b"), node("c")
    for one, word in ((a, b"1"), (c, b"2")):
        send(one, b.bulk_address, [word], b)
        pump(lambda w=word: [w] in b.messages("bulk"), a, b, c)  # type: ignore[misc]
    assert len(b.transport._sessions) == 1
    send(a, b.bulk_address, [b"lost"], b)
    pump(lambda: b.transport.unsealed, a, b)
    pump(lambda: a.transport._links["bulk", b.bulk_address]._session is None, a)
    send(a, b.bulk_address, [b"3"], b)
    pump(lambda: [b"3"] in b.messages("bulk"), a, b)
    assert [b"lost"] not in b.messages("bulk")


def test_a_reply_without_a_session_is_not_sent(node: Callable[..., Node]) -> None:
    a, b = node("a"), node("b")
    send(a, b.bulk_address, [b"fetch"], b)
    pump(lambda: b.messages("bulk"), a, b)
    (route,) = [e.route for e in b.events if isinstance(e, Incoming)]
    assert route is not None
    b.transport._sessions.clear()
    assert not b.transport.reply(route, [b"secret"])


def test_a_listener_that_never_answers_the_hello_is_left_and_tried_again(node: Callable[..., Node]) -> None:
    """Nothing is sent to it: neither where it has another key, nor as plain text."""
    b, now = node("b"), [0.0]
    b.transport._security = OTHER  # behind the gate of KEYED
    with contextlib.closing(Transport(security=KEYED, ident=b"a", clock=lambda: now[0])) as a:
        wrong = Node.__new__(Node)
        wrong.transport, wrong.events = a, []
        assert not a.send_bulk(b.bulk_address, [b"x"])
        link = a._links["bulk", b.bulk_address]
        pump(lambda: link.up, wrong, b)
        pump(lambda: len(b.transport._sessions) == 1, wrong, b)
        assert not link.takes and not a.send_bulk(b.bulk_address, [b"x"])
        now[0] += links._OVERDUE_S + 0.1
        pump(lambda: not link.up, wrong)
        now[0] += links.RETRY_MAX_S
        b.transport._security = KEYED
        pump(lambda: link.takes, wrong, b)
        send(wrong, b.bulk_address, [b"now"], b)
        pump(lambda: b.messages("bulk"), wrong, b)
    assert b.messages("bulk") == [[b"now"]]


def test_the_longest_frame_passes_sealed(node: Callable[..., Node]) -> None:
    a, b = node("a"), node("b")
    send(a, b.bulk_address, [bytes(transport_module.BULK_FRAME_BYTES_MAX)], b)
    pump(lambda: b.messages("bulk"), a, b)
    assert len(b.messages("bulk")[0][0]) == transport_module.BULK_FRAME_BYTES_MAX


def test_session_keys_are_of_each_connection(node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bytes] = []
    before = Session.__init__

    def init(self: Session, mine: bytes, theirs: bytes) -> None:
        made.extend([mine, theirs])
        before(self, mine, theirs)

    monkeypatch.setattr(sealing.Session, "__init__", init)
    a, b = node("a"), node("b")
    for word in (b"1", b"2"):
        send(a, b.bulk_address, [word], b)
        pump(lambda w=word: [w] in b.messages("bulk"), a, b)  # type: ignore[misc]
        a.transport.forget(b.bulk_address)
    assert len(made) == 8 and len(set(made)) == 4
