"""Several bulk connections to one far host, where the system has no BBR for one. Real sockets on loopback."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

import dlc.comm.transport as transport_module
from dlc.comm import tcp
from dlc.comm.bundle import BUFFERED, STREAMS, STREAMS_MAX, Bundle
from dlc.comm.links import CONGESTION_CONTROL, Link
from dlc.comm.transport import Transport
from tests.comm.test_transport import WAIT_S, Node, pump
from tests.helpers import wait_until
from tests.swarm import swarm, together

pytestmark = pytest.mark.skipif(not tcp.AVAILABLE, reason="congestion controls are Linux's")
SO_MAX_PACING_RATE = 47


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """No host is this one, and BBR is refused; False: from then on it is allowed."""
    refused, real = [True], tcp.set_congestion

    def choose(sock: socket.socket, name: str) -> bool:
        if name != CONGESTION_CONTROL:
            return real(sock, name)
        if refused[0]:
            real(sock, "reno")  # the system's own may be BBR
        return not refused[0]

    monkeypatch.setattr(tcp, "set_congestion", choose)
    monkeypatch.setattr("dlc.comm.links.is_loopback", lambda host: False)
    monkeypatch.setattr("dlc.comm.links.NEAR_RTT_S", 0.0)
    monkeypatch.setattr("dlc.comm.bundle.NEAR_RTT_S", 0.0)
    return lambda refuse: refused.__setitem__(0, refuse)


@pytest.fixture
def node() -> Iterator[Callable[..., Node]]:
    with contextlib.ExitStack() as stack:

        def make(name: str, streams: int = STREAMS) -> Node:
            made = Node(name)
            made.transport._streams = streams
            stack.callback(made.transport.close, 0.0)
            return made

        yield make


def bundle(a: Node, b: Node) -> Bundle:
    return a.transport._bundles[b.bulk_address]


def connect(a: Node, b: Node, n: int) -> list[Link]:
    """Until there are so many connections and all are up."""
    a.transport.open_bulk(b.bulk_address)
    pump(lambda: len(bundle(a, b).links) == n and all(link.up for link in bundle(a, b).links), a, b)
    return bundle(a, b).links


def send(a: Node, b: Node, messages: list[bytes]) -> None:
    """And wait until all have come, in whatever order."""
    left, before = list(reversed(messages)), len(b.messages("bulk"))

    def done() -> bool:
        while left and a.transport.send_bulk(b.bulk_address, [left[-1]]):
            left.pop()
        return len(b.messages("bulk")) == before + len(messages)

    pump(done, a, b)


def rate_of(link: Link) -> int:
    assert link._tcp is not None
    return int.from_bytes(link._tcp.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 4), sys.byteorder)


def test_bulk_takes_all_connections_and_comes_once(far: object, node: Callable[..., Node]) -> None:
    a, b = node("a"), node("b")
    links = connect(a, b, STREAMS)
    sent = [i.to_bytes(4, "big") + os.urandom(50_000) for i in range(100)]
    send(a, b, sent)
    assert Counter(frames[0] for frames in b.messages("bulk")) == Counter(sent)
    carried = [sample.bytes_acked for link in links if (sample := link.tcp_sample()) is not None]
    assert len(carried) == STREAMS and min(carried) > 500_000, "a quarter of it is 1.25 MB"


@pytest.mark.parametrize("why", ["allowed", "near", "not wanted", "too many links"])
def test_one_connection_does_where_there_is_no_reason_for_more(
    far: Callable[[bool], None], node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    far(why != "allowed")
    if why == "near":
        monkeypatch.setattr("dlc.comm.links.is_loopback", lambda host: True)
    if why == "too many links":
        monkeypatch.setattr(transport_module, "WIDE_LINKS_MAX", 1)
    a, b = node("a", 1 if why == "not wanted" else STREAMS), node("b")
    connect(a, b, 1)
    send(a, b, [b"x"] * 10)
    assert len(bundle(a, b).links) == 1


def test_a_host_that_turns_out_to_be_near_needs_no_more(
    far: object, node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the connection opened while a probe filled the way."""
    a, b = node("a", 1), node("b")
    (link,) = connect(a, b, 1)
    assert link.lossy
    monkeypatch.setattr("dlc.comm.links.NEAR_RTT_S", 1e9)
    a.transport.pace(b.bulk_address, 5e6)
    assert not link.lossy


def test_all_together_are_paced_at_the_rate(far: object, node: Callable[..., Node]) -> None:
    a, b = node("a"), node("b")
    assert not a.transport.pace(b.bulk_address, 8e6), "there is no connection yet"
    links = connect(a, b, STREAMS)
    assert [rate_of(link) for link in links] == [2_000_000] * STREAMS, "those that came later, too"
    assert a.transport.pace(b.bulk_address, 4e6)
    assert [rate_of(link) for link in links] == [1_000_000] * STREAMS
    assert a.transport.pace(b.bulk_address, None)
    assert {rate_of(link) for link in links} == {2**32 - 1}


def test_what_was_acknowledged_counts_on_when_a_connection_breaks(far: object, node: Callable[..., Node]) -> None:
    """A sum that fell was taken for another connection's first bytes, hence for a rate of hundreds of Mbit/s."""
    a, b = node("a"), node("b")
    links = connect(a, b, STREAMS)

    def acked() -> int:
        sample = a.transport.way_sample(b.bulk_address)
        assert sample is not None
        return sample.bytes_acked

    def unanswered() -> int:
        samples = [sample for link in links if (sample := link.tcp_sample()) is not None]
        return sum(sample.queued_bytes for sample in samples)

    chunks = [os.urandom(100_000) for _ in range(40)]
    send(a, b, chunks)
    pump(lambda: acked() > 4_000_000 and not unanswered(), a, b)
    before, broken = acked(), links[1]._tcp
    assert before < 4_100_000 and broken is not None
    broken.shutdown(socket.SHUT_RDWR)
    pump(lambda: not links[1].up, a, b)
    assert acked() == before, "the others have sent nothing since"
    pump(lambda: links[1].up, a, b)
    assert before <= acked() < before + 10_000, "a handshake"
    send(a, b, chunks)
    pump(lambda: acked() > before + 4_000_000, a, b)
    assert acked() < before + 4_100_000


def test_bulk_goes_by_those_that_are_up(far: object, node: Callable[..., Node]) -> None:
    a, b = node("a"), node("b")
    links = connect(a, b, STREAMS)
    for link in links[:-1]:
        link.close()
        link._retry_at = float("inf")
    send(a, b, [b"x"] * 10)


def test_to_forget_an_address_closes_them_all(far: object, node: Callable[..., Node]) -> None:
    a, b = node("a"), node("b")
    links = connect(a, b, STREAMS)
    a.transport.forget(b.bulk_address)
    assert all(link.socket is None and link._tcp is None for link in links)
    assert not a.transport._links()


def test_the_number_of_links_has_an_end(
    far: object, node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport_module, "LINKS_MAX", STREAMS - 1)
    a, b = node("a"), node("b")
    connect(a, b, STREAMS - 1)
    send(a, b, [b"x"] * 10)


FREE = tcp.TcpSample(10**6, 0.1, 0.1, 0.0, True, busy_s=2.0, retransmits=0, buffered_s=0.0)
HELD = replace(FREE, buffered_s=2.0 * BUFFERED + 0.01)


@pytest.fixture
def kernel(far: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch) -> Callable[[tcp.TcpSample], None]:
    """Sets what the kernel says of every connection from then on; BBR is allowed."""
    far(False)

    def tell(sample: tcp.TcpSample) -> None:
        monkeypatch.setattr(tcp, "sample", lambda sock: sample)

    return tell


def test_there_are_more_connections_where_buffers_held_them_back(
    kernel: Callable[[tcp.TcpSample], None], node: Callable[..., Node]
) -> None:
    """With buffers for half of the rate, four far sites took 7.8 s a round for 3.0; with four connections 3.6."""
    a, b = node("a"), node("b")
    connect(a, b, 1)
    kernel(HELD)
    assert a.transport.mend_bulk()
    kernel(FREE)
    connect(a, b, STREAMS)
    assert not a.transport.mend_bulk()
    kernel(replace(HELD, busy_s=4.0, buffered_s=2.0))
    assert a.transport.mend_bulk(), "still not enough"
    kernel(FREE)
    connect(a, b, 2 * STREAMS)
    kernel(replace(HELD, busy_s=7.0, buffered_s=4.0))
    assert a.transport.mend_bulk()
    kernel(FREE)
    connect(a, b, STREAMS_MAX)
    send(a, b, [b"x"] * 10)
    kernel(replace(HELD, busy_s=9.0, buffered_s=9.0))
    assert not a.transport.mend_bulk(), "but there is an end"


@pytest.mark.parametrize(
    ("sample", "streams"),
    [
        (replace(HELD, buffered_s=2.0 * BUFFERED - 0.01), STREAMS),
        (replace(HELD, min_rtt_s=0.001), STREAMS),
        (replace(HELD, busy_s=0.4, buffered_s=0.4), STREAMS),
        (HELD, 1),
    ],
    ids=["next to nothing", "near", "too short to tell", "not wanted"],
)
def test_one_connection_does_where_buffers_are_large_enough(
    kernel: Callable[[tcp.TcpSample], None],
    node: Callable[..., Node],
    monkeypatch: pytest.MonkeyPatch,
    sample: tcp.TcpSample,
    streams: int,
) -> None:
    monkeypatch.setattr("dlc.comm.bundle.NEAR_RTT_S", 0.003)
    a, b = node("a", streams), node("b")
    connect(a, b, 1)
    kernel(sample)
    assert not a.transport.mend_bulk() and len(bundle(a, b).links) == 1


def test_only_what_came_since_the_last_look_counts(
    kernel: Callable[[tcp.TcpSample], None], node: Callable[..., Node]
) -> None:
    a, b = node("a"), node("b")
    connect(a, b, 1)
    kernel(replace(FREE, busy_s=10.0))
    assert not a.transport.mend_bulk()
    kernel(replace(FREE, busy_s=10.4, buffered_s=0.4))
    assert not a.transport.mend_bulk(), "too short, and kept for later"
    kernel(replace(FREE, busy_s=10.6, buffered_s=0.4))
    assert a.transport.mend_bulk()
    kernel(replace(FREE, busy_s=1.0, buffered_s=0.05))
    assert not bundle(a, b).held_back(), "other connections, which began at 0"
    kernel(replace(FREE, busy_s=2.0, buffered_s=0.3))
    assert bundle(a, b).held_back()


def test_one_of_four_connections_that_buffers_held_back_is_no_reason(
    kernel: Callable[[tcp.TcpSample], None], node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen connections in place of four made rounds slower where BBR is allowed: 4.1 s for 3.6."""
    a, b = node("a"), node("b")
    connect(a, b, 1)
    kernel(HELD)
    assert a.transport.mend_bulk()
    links = connect(a, b, STREAMS)
    of_one = replace(FREE, busy_s=4.0, buffered_s=1.0)
    monkeypatch.setattr(Link, "tcp_sample", lambda self: of_one if self is links[2] else replace(FREE, busy_s=4.0))
    assert not bundle(a, b).held_back()
    of_one = replace(FREE, busy_s=6.0, buffered_s=3.0)
    monkeypatch.setattr(Link, "tcp_sample", lambda self: of_one if self is links[2] else replace(FREE, busy_s=6.0))
    assert bundle(a, b).held_back()


def test_who_has_more_connections_measures_the_link_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    with swarm(2) as peers:
        one = peers[0]
        node_ = one._ask(lambda node, now: node)
        assert node_.probes is not None
        begun: list[None] = []
        monkeypatch.setattr(node_.probes, "begin_anew", lambda: begun.append(None))
        more = iter([True])
        monkeypatch.setattr(one._driver.transport, "mend_bulk", lambda: next(more, False))
        wait_until(lambda: begun, WAIT_S, "the driver tells of it")
        assert len(begun) == 1


def test_rounds_over_several_connections_have_the_right_means(far: object) -> None:
    with swarm(3) as peers:

        def wide() -> bool:
            found: list[Transport] = [peer._driver.transport for peer in peers]
            return all(
                len(one._bundles) == 2
                and all(len(way.links) == STREAMS and all(x.up for x in way.links) for way in one._bundles.values())
                for one in found
            )

        wait_until(wide, WAIT_S, "all have four connections to both others")
        for round_ in (1.0, 2.0):
            vectors = [torch.full((500_000,), round_ * (i + 1)) for i in range(3)]
            together(peers, lambda peer, i, v=vectors: peer.all_reduce(v[i], codec="fp32", timeout_s=2 * WAIT_S))
            assert all(torch.equal(vector, torch.full((500_000,), 2 * round_)) for vector in vectors)
