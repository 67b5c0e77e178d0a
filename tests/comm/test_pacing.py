"""What the kernel does for bulk links: pacing, its numbers, and whose descriptor is whose. Real sockets on loopback."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import dlc.comm.dispatch as dispatch
import dlc.comm.links as links
from dlc.comm import tcp
from dlc.comm.clock import clock
from dlc.comm.effects import Pace
from dlc.comm.lanes import Broken
from dlc.comm.links import (
    CONGESTION_CONTROL,
    NEAR_CONGESTION_CONTROLS,
    NEAR_RTT_S,
    RENEW_BYTES_MIN,
    WINDOW_BYTES_MIN,
    WINDOW_SPARE,
)
from dlc.peer import Peer
from tests.comm.test_transport import WAIT_S, Node, pump
from tests.helpers import wait_until
from tests.swarm import swarm, together

CHUNK = os.urandom(1 << 17)
SO_MAX_PACING_RATE, TCP_CONGESTION, TCP_NOTSENT_LOWAT = 47, 13, 25
UNLIMITED = 2**32 - 1
linux = pytest.mark.skipif(not tcp.AVAILABLE, reason="pacing and TCP_INFO are Linux's")


@pytest.fixture
def pair() -> Iterator[tuple[Node, Node]]:
    with contextlib.ExitStack() as stack:
        nodes = Node("a"), Node("b")
        for one in nodes:
            stack.callback(one.transport.close, 0.0)
        yield nodes


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The listener and the client of a connection of our own."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        yield server, client


def connect(a: Node, b: Node) -> None:
    a.transport.open_bulk(b.bulk_address)
    pump(lambda: link(a.transport, b.bulk_address).up, a, b)


def link(transport: object, address: str) -> links.Link:
    return transport._bundles[address].links[0]  # type: ignore[attr-defined, no-any-return]


def descriptor(transport: object, address: str) -> socket.socket:
    sock = link(transport, address)._tcp
    assert sock is not None
    return sock


def number(sock: socket.socket, level: int, option: int) -> int:
    return int.from_bytes(sock.getsockopt(level, option, 4), sys.byteorder)


def rate_of(transport: object, address: str) -> int:
    """What the kernel paces the link to `address` at, in bytes/s."""
    return number(descriptor(transport, address), socket.SOL_SOCKET, SO_MAX_PACING_RATE)


def seconds_for(a: Node, b: Node, n_bytes: int) -> float:
    """To move that much from a to b, in chunks."""
    left, began = -(-n_bytes // len(CHUNK)), time.monotonic()
    expected = len(b.messages("bulk")) + left
    while len(b.messages("bulk")) < expected:
        assert time.monotonic() < began + WAIT_S
        while left and a.transport.send_bulk(b.bulk_address, [CHUNK]):
            left -= 1
        a.events += a.transport.poll(0.001, [b.bulk_address] if left else [])
        b.events += b.transport.poll(0.001)
    return time.monotonic() - began


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def descriptors() -> Counter[str]:
    """How many lead to each open file of this process, in which threads of the test before may still close some."""
    found = Counter[str]()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found[os.readlink(f"/proc/self/fd/{fd}")] += 1
    return found


# ---------------------------------------------------------------------- pacing


@pytest.mark.alone
@linux
def test_a_paced_link_takes_its_time_and_an_unpaced_one_does_not(pair: tuple[Node, Node]) -> None:
    a, b = pair
    connect(a, b)
    seconds_for(a, b, 2_000_000)  # the first ten segments, 640 kB here, are never paced
    assert a.transport.pace(b.bulk_address, 5e6)
    paced = seconds_for(a, b, 2_000_000)
    assert paced >= 0.35, "2 MB at 5 MB/s take 0.4 s, or longer on a machine that stands still meanwhile"
    assert a.transport.pace(b.bulk_address, None)
    wait_until(lambda: seconds_for(a, b, 2_000_000) < 0.3, WAIT_S, "it is quick again")


@pytest.mark.alone
@linux
def test_a_rate_outlives_the_connection(pair: tuple[Node, Node]) -> None:
    a, b = pair
    assert not a.transport.pace(b.bulk_address, 5e6), "there is no connection yet"
    connect(a, b)
    assert rate_of(a.transport, b.bulk_address) == 5_000_000
    broken = descriptor(a.transport, b.bulk_address)
    broken.shutdown(socket.SHUT_RDWR)
    pump(lambda: link(a.transport, b.bulk_address)._tcp is not broken and link(a.transport, b.bulk_address).up, a, b)
    assert broken.fileno() == -1
    assert rate_of(a.transport, b.bulk_address) == 5_000_000
    seconds_for(a, b, 1_000_000)
    assert seconds_for(a, b, 1_000_000) > 0.15
    assert a.transport.pace(b.bulk_address, None)
    assert rate_of(a.transport, b.bulk_address) == UNLIMITED


def test_lifting_a_limit_opens_no_link(pair: tuple[Node, Node]) -> None:
    a, b = pair
    assert not a.transport.pace(b.bulk_address, None)
    assert not a.transport._links()


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_rate_that_is_none_is_refused(pair: tuple[Node, Node], rate: float) -> None:
    a, b = pair
    with pytest.raises(ValueError, match="above 0"):
        a.transport.pace(b.bulk_address, rate)


@linux
def test_control_links_are_left_as_they_are(pair: tuple[Node, Node]) -> None:
    a, b = pair
    a.transport.send_control(b.address, [b"x"])
    connect(a, b)
    pump(lambda: b.messages(), a, b)
    assert a.transport._controls[b.address]._tcp is None


@linux
@pytest.mark.parametrize(
    ("loopback", "rtt_s", "near"),
    [(True, 0.0, True), (False, NEAR_RTT_S / 2, True), (False, NEAR_RTT_S, False), (False, 0.0, False)],
    ids=["loopback", "near", "far", "unknown"],
)
def test_bulk_links_ask_for_a_congestion_control(
    pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch, loopback: bool, rtt_s: float, near: bool
) -> None:
    told = tcp.sample

    def sample(sock: socket.socket) -> tcp.TcpSample | None:
        found = told(sock)
        return found and replace(found, min_rtt_s=rtt_s)

    monkeypatch.setattr(tcp, "sample", sample)
    monkeypatch.setattr("dlc.comm.links.is_loopback", lambda host: loopback)
    a, b = pair
    connect(a, b)
    sock = descriptor(a.transport, b.bulk_address)
    with socket.socket() as fresh:
        if near:
            assert any(tcp.set_congestion(fresh, name) for name in NEAR_CONGESTION_CONTROLS)
        else:
            tcp.set_congestion(fresh, CONGESTION_CONTROL)  # where it is not allowed, both keep the system's
        expected = fresh.getsockopt(socket.IPPROTO_TCP, TCP_CONGESTION, 16)
    assert sock.getsockopt(socket.IPPROTO_TCP, TCP_CONGESTION, 16) == expected


@linux
@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("far", [True, False])
def test_a_system_that_does_not_let_far_links_have_bbr_is_told_of_once(
    pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, far: bool, allowed: bool
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(tcp, "set_congestion", lambda sock, name: asked.append(name) or allowed)
    monkeypatch.setattr("dlc.comm.links.is_loopback", lambda host: not far)
    monkeypatch.setattr(tcp, "sample", lambda sock: None)
    a, b = pair
    connect(a, b)
    connect(b, a)
    a.transport.pace(b.bulk_address, 5e6)
    a.transport.send_control(b.address, [b"x"])
    pump(lambda: b.messages(), a, b)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (2 if far and not allowed else 0), "by each of both"
    assert all("tcp_allowed_congestion_control" in message for message in told)
    assert asked.count(CONGESTION_CONTROL) >= 3 * far


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The descriptors of the connections that began anew."""
    found: list[int] = []
    real = tcp.begin_congestion

    def begin(sock: socket.socket, names: Sequence[str]) -> bool:
        found.append(sock.fileno())
        return real(sock, names)

    monkeypatch.setattr(tcp, "begin_congestion", begin)
    return found


@linux
def test_a_near_link_begins_anew_when_it_is_paced_and_goes_on_while_it_is(
    pair: tuple[Node, Node], begun: list[int]
) -> None:
    """One of twelve connections, whose window a probe's losses had made small, made four sites wait: 3.8 s for 3.2."""
    a, b = pair
    connect(a, b)
    mine = [descriptor(a.transport, b.bulk_address).fileno()]
    assert begun == mine, "it opened"
    for rate in (5e6, 6e6):
        assert a.transport.pace(b.bulk_address, rate)
    assert begun == 2 * mine, "another rate is another plan of the same round"
    a.transport.pace(b.bulk_address, None)
    assert begun == 2 * mine
    a.transport.pace(b.bulk_address, 5e6)
    assert begun == 3 * mine


@linux
def test_a_link_that_was_always_busy_is_near_if_the_hosts_control_connection_says_so(
    pair: tuple[Node, Node], begun: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It opened while a probe filled the way, and had the congestion control of far ones for its first round."""
    a, b = pair
    told = tcp.sample

    def sample(sock: socket.socket) -> tcp.TcpSample | None:
        bulk = tcp.peer_of(sock) == ("127.0.0.1", int(b.bulk_address.rpartition(":")[2]))
        return replace(found, min_rtt_s=2 * NEAR_RTT_S if bulk else NEAR_RTT_S / 2) if (found := told(sock)) else None

    monkeypatch.setattr(tcp, "sample", sample)
    monkeypatch.setattr("dlc.comm.links.is_loopback", lambda host: False)
    connect(a, b)
    assert a.transport.pace(b.bulk_address, 5e6, control=b.address), "there is no such connection yet"
    assert not begun
    a.transport.send_control(b.address, [b"x"])
    pump(lambda: a.transport._controls[b.address].up, a, b)
    copies: list[socket.socket | None] = []
    duplicate = tcp.duplicate
    monkeypatch.setattr(tcp, "duplicate", lambda *where: copies.append(duplicate(*where)) or copies[-1])
    a.transport.pace(b.bulk_address, None)
    assert a.transport.pace(b.bulk_address, 5e6, control=b.address)
    assert begun == [descriptor(a.transport, b.bulk_address).fileno()]
    assert [copy.fileno() for copy in copies if copy is not None] == [-1], "it was closed after the look"


@linux
def test_bbr_is_allowed_the_part_that_it_keeps_from_what_it_saw(raw: tuple[socket.socket, socket.socket]) -> None:
    _, client = raw
    if not tcp.set_congestion(client, "bbr"):
        pytest.skip("the system has no BBR, or does not allow it")
    assert tcp.pace(client, 4.95e6)
    assert number(client, socket.SOL_SOCKET, SO_MAX_PACING_RATE) == 5_000_000, "BBR sends at 0.99 of it"
    assert tcp.set_congestion(client, "reno") and tcp.pace(client, 4.95e6)
    assert number(client, socket.SOL_SOCKET, SO_MAX_PACING_RATE) == 4_950_000
    assert tcp.set_congestion(client, "bbr") and tcp.pace(client, None)
    assert number(client, socket.SOL_SOCKET, SO_MAX_PACING_RATE) == UNLIMITED


@linux
@pytest.mark.parametrize(
    ("rate_Bps", "unsent_bytes"), [(5e6, 1_250_000), (1000.0, 128 << 10), (None, UNLIMITED), (5e9, UNLIMITED)]
)
def test_of_a_paced_connection_little_waits_unsent(
    raw: tuple[socket.socket, socket.socket], rate_Bps: float | None, unsent_bytes: int
) -> None:
    _, client = raw
    assert tcp.set_congestion(client, "reno") and tcp.pace(client, 1e6) and tcp.pace(client, rate_Bps)
    assert number(client, socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT) == unsent_bytes


@linux
def test_bbr_tells_what_went_through(raw: tuple[socket.socket, socket.socket]) -> None:
    server, client = raw
    assert tcp.set_congestion(client, "reno") and tcp.bbr_Bps(client) is None
    if not tcp.set_congestion(client, "bbr"):
        pytest.skip("the system has no BBR, or does not allow it")
    assert tcp.bbr_Bps(client) == 0
    other, _ = server.accept()
    with other:
        other.settimeout(WAIT_S)
        client.settimeout(WAIT_S)

        def known() -> bool:
            client.sendall(bytes(1 << 16))
            read = 0
            while read < 1 << 16:
                read += len(other.recv(1 << 16))
            return (tcp.bbr_Bps(client) or 0) > 1e6

        wait_until(known, WAIT_S, "it has seen what loopback carries")
        assert tcp.begin_congestion(client, ("bbr",))
        assert tcp.bbr_Bps(client) == 0, "it has begun anew"
    client.close()
    assert tcp.bbr_Bps(client) is None


@linux
@pytest.mark.parametrize(
    ("share", "acked", "anew"),
    [
        (0.79, RENEW_BYTES_MIN, 1),
        (0.81, RENEW_BYTES_MIN, 0),
        (0.79, RENEW_BYTES_MIN - 1, 0),
        (None, RENEW_BYTES_MIN, 0),
    ],
)
def test_a_far_link_that_knows_of_less_than_its_pace_begins_anew(
    pair: tuple[Node, Node],
    begun: list[int],
    monkeypatch: pytest.MonkeyPatch,
    share: float | None,
    acked: int,
    anew: int,
) -> None:
    """BBR finds more by a quarter in eight round trips. Who knows nothing yet doubles its rate in each anyway."""
    a, b = pair
    told = tcp.sample

    def sample(sock: socket.socket) -> tcp.TcpSample | None:
        found = told(sock)
        return replace(found, min_rtt_s=2 * NEAR_RTT_S, bytes_acked=acked) if found is not None else None

    monkeypatch.setattr(tcp, "sample", sample)
    monkeypatch.setattr("dlc.comm.links.is_loopback", lambda host: False)
    monkeypatch.setattr(tcp, "bbr_Bps", lambda sock: None if share is None else share * 5e6)
    connect(a, b)
    assert not begun, "it opened"
    assert a.transport.pace(b.bulk_address, 5e6)
    assert len(begun) == anew
    assert a.transport.pace(b.bulk_address, 6e6)
    assert len(begun) == anew, "another rate is another plan of the same round"
    assert a.transport.pace(b.bulk_address, None)
    assert len(begun) == anew
    a.transport.pace(b.bulk_address, 5e6)
    assert len(begun) == 2 * anew


SSTHRESH, SSTHRESH_NONE = 76, 2**31 - 1


def ssthresh(sock: socket.socket) -> int:
    """In segments; SSTHRESH_NONE: slow start goes on until something is lost."""
    return int.from_bytes(sock.getsockopt(socket.IPPROTO_TCP, 11, 104)[SSTHRESH : SSTHRESH + 4], sys.byteorder)


@pytest.mark.alone
@linux
def test_a_connection_that_begins_anew_knows_no_threshold(raw: tuple[socket.socket, socket.socket]) -> None:
    server, client = raw
    if not tcp.set_congestion(client, "bbr"):
        pytest.skip("the system has no BBR, or does not allow it")
    other, _ = server.accept()
    with other:
        other.settimeout(WAIT_S)
        tcp.pace(client, 5e6)
        client.setblocking(False)
        assert ssthresh(client) == SSTHRESH_NONE

        def more() -> bool:
            with contextlib.suppress(BlockingIOError):
                client.send(bytes(1 << 20))
            assert other.recv(1 << 16)
            return ssthresh(client) < SSTHRESH_NONE

        wait_until(more, WAIT_S, "it knows what the way carries")
        assert tcp.set_congestion(client, "reno") and ssthresh(client) < SSTHRESH_NONE
        assert tcp.begin_congestion(client, ("no-such", "reno"))
    assert ssthresh(client) == SSTHRESH_NONE
    assert tcp.congestion(client) == "reno"


# ---------------------------------------------------------------------- windows that losses left

NARROW = tcp.TcpSample(
    RENEW_BYTES_MIN, 0.1, 0.1, 0.0, True, 0.0, 9, queued_bytes=0, threshold_bytes=WINDOW_BYTES_MIN - 1
)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[[tcp.TcpSample], None]:
    """Sets what the kernel says of every connection from then on. No link leads to this host."""
    monkeypatch.setattr("dlc.comm.links.is_loopback", lambda host: False)

    def tell(sample: tcp.TcpSample) -> None:
        monkeypatch.setattr(tcp, "sample", lambda sock: sample)

    return tell


@linux
def test_a_link_whose_window_losses_made_small_is_connected_anew(
    pair: tuple[Node, Node], kernel: Callable[[tcp.TcpSample], None]
) -> None:
    """Between four far sites without BBR the first round took 6.7 s of 3.15: one connection of twelve, whose slow start
    a probe's losses ended at 36 segments, had 64 after six seconds, and needed 117."""
    a, b = pair
    connect(a, b)
    assert a.transport.send_bulk(b.bulk_address, [b"before"])
    pump(lambda: b.messages("bulk"), a, b)
    kernel(NARROW)
    before = descriptor(a.transport, b.bulk_address)
    a.transport.mend_bulk()
    assert before.fileno() == -1 and not link(a.transport, b.bulk_address).up
    kernel(replace(NARROW, bytes_acked=1000))
    pump(lambda: link(a.transport, b.bulk_address).up, a, b)
    after = descriptor(a.transport, b.bulk_address)
    a.transport.mend_bulk()
    assert descriptor(a.transport, b.bulk_address) is after, "once"
    assert a.transport.send_bulk(b.bulk_address, [b"after"])
    pump(lambda: len(b.messages("bulk")) == 2, a, b)
    assert b.messages("bulk") == [[b"before"], [b"after"]]


@linux
@pytest.mark.parametrize(
    ("sample", "last_Bps", "paced", "anew"),
    [
        (NARROW, None, False, True),
        (NARROW, 1e4, False, True),
        (NARROW, 1e4, True, False),
        (replace(NARROW, bytes_acked=RENEW_BYTES_MIN - 1), None, False, False),
        (replace(NARROW, queued_bytes=1), None, False, False),
        (replace(NARROW, threshold_bytes=math.inf), None, False, False),
        (replace(NARROW, threshold_bytes=1e9), None, False, True),
        (replace(NARROW, threshold_bytes=WINDOW_BYTES_MIN), 1e4, False, False),
        (replace(NARROW, threshold_bytes=1e6), 10e6, False, True),
        (replace(NARROW, threshold_bytes=WINDOW_SPARE * 1e6), 10e6, False, False),
    ],
    ids=[
        "no round told what it needs",
        "less than any needs",
        "a round is on its way",
        "it is new",
        "something is on its way",
        "nothing was lost",
        "a probe lost something",
        "enough for a slow one",
        "what the rate has on the way and nothing to spare",
        "enough for its rate",
    ],
)
def test_a_link_is_connected_anew_only_where_that_is_better(
    pair: tuple[Node, Node],
    kernel: Callable[[tcp.TcpSample], None],
    sample: tcp.TcpSample,
    last_Bps: float | None,
    paced: bool,
    anew: bool,
) -> None:
    a, b = pair
    connect(a, b)
    if last_Bps is not None:
        a.transport.pace(b.bulk_address, last_Bps)
        if not paced:
            a.transport.pace(b.bulk_address, None)
    kernel(sample)
    before = descriptor(a.transport, b.bulk_address)
    assert a.transport.send_bulk(b.bulk_address, [b"x"])
    a.transport.mend_bulk()
    assert (before.fileno() == -1) == anew
    assert Broken(b.bulk_address) not in a.transport.poll(0.0), "at rest nothing is lost"


@linux
def test_a_connection_with_bbr_stays_whatever_its_threshold(
    pair: tuple[Node, Node], kernel: Callable[[tcp.TcpSample], None]
) -> None:
    """BBR sets one as soon as it knows what the path holds. Taken for a loss's, it cost what the probe had found out:
    the first round of four far sites began with slow start, and took 4.2 s instead of 3.9."""
    a, b = pair
    connect(a, b)
    before = descriptor(a.transport, b.bulk_address)
    if not tcp.set_congestion(before, "bbr"):
        pytest.skip("the system has no BBR, or does not allow it")
    assert tcp.congestion(before) == "bbr"
    kernel(NARROW)
    a.transport.mend_bulk()
    assert before.fileno() != -1 and link(a.transport, b.bulk_address).up
    assert tcp.set_congestion(before, "reno")
    a.transport.mend_bulk()
    assert before.fileno() == -1


@linux
def test_links_within_this_host_and_control_links_stay(
    pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    a.transport.send_control(b.address, [b"x"])
    connect(a, b)
    pump(lambda: b.messages(), a, b)
    monkeypatch.setattr(tcp, "sample", lambda sock: NARROW)
    before = descriptor(a.transport, b.bulk_address)
    a.transport.mend_bulk()
    assert descriptor(a.transport, b.bulk_address) is before
    monkeypatch.setattr("dlc.comm.links.is_loopback", lambda host: False)
    a.transport.mend_bulk()
    assert before.fileno() == -1
    assert a.transport._controls[b.address].up


@linux
def test_peers_connect_anew_when_a_round_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    told, rested_s = tcp.sample, list[float]()

    def sample(sock: socket.socket) -> tcp.TcpSample | None:
        return replace(found, threshold_bytes=1.0) if (found := told(sock)) else None

    monkeypatch.setattr(tcp, "sample", sample)
    monkeypatch.setattr("dlc.comm.links.is_loopback", lambda host: False)
    with swarm(2) as peers:
        one, two = peers
        mine, mend = one._driver, one._driver.transport.mend_bulk

        def note() -> bool:
            rested_s.append(clock() - mine.dispatch.bulk_at)
            return mend()

        monkeypatch.setattr(mine.transport, "mend_bulk", note)
        wait_until(lambda: sample_of(one, two) is not None, WAIT_S, "the link")
        address = bulk_address(one, two)
        before = descriptor(mine.transport, address)
        for round_ in (1.0, 2.0):
            vectors = [torch.full((50_000,), round_), torch.full((50_000,), 3 * round_)]
            together(peers, lambda peer, i, v=vectors: peer.all_reduce(v[i], codec="fp32", timeout_s=2 * WAIT_S))
            assert all(torch.equal(vector, torch.full((50_000,), 2 * round_)) for vector in vectors)
            wait_until(lambda old=before: link(mine.transport, address)._tcp is not old, WAIT_S, "it begins anew")
            wait_until(lambda: link(mine.transport, address).up, WAIT_S, "it is there again")
            before = descriptor(mine.transport, address)
        assert min(rested_s) >= dispatch.SAMPLE_TAIL_S, "never while bulk moves"


# ---------------------------------------------------------------------- the kernel's numbers


@pytest.mark.alone
@linux
def test_the_numbers_of_a_link_are_plausible(pair: tuple[Node, Node]) -> None:
    a, b = pair
    assert a.transport.way_sample(b.bulk_address) is None
    connect(a, b)
    began, first = time.monotonic(), link(a.transport, b.bulk_address).tcp_sample()
    assert first is not None and 0 < first.bytes_acked < 10_000 and first.app_limited
    seconds_for(a, b, 1_000_000)
    a.transport.pace(b.bulk_address, 5e6)
    seconds_for(a, b, 2_000_000)
    told: list[tuple[tcp.TcpSample, tcp.WaySample]] = []

    def at_rest() -> bool:
        """Nothing has come or gone between two looks, which are told with what the way says between them."""
        now, whole = link(a.transport, b.bulk_address).tcp_sample(), a.transport.way_sample(b.bulk_address)
        assert now is not None and whole is not None
        told.append((now, whole))
        return not now.queued_bytes and now == link(a.transport, b.bulk_address).tcp_sample()

    pump(at_rest, a, b)
    last, whole = told[-1]
    assert whole.bytes_acked == last.bytes_acked and whole.min_rtt_s == last.min_rtt_s
    moved = last.bytes_acked - first.bytes_acked
    assert 3_000_000 <= moved < 3_500_000, "with a little for framing"
    assert 0 < last.min_rtt_s < 1 and last.min_rtt_s <= last.rtt_s
    assert last.delivery_Bps > 1e6, "of a busier time, where little is sent now"
    assert 0.2 < last.busy_s - first.busy_s <= time.monotonic() - began + 0.1
    assert last.retransmits >= 0
    a.transport.forget(b.bulk_address)
    assert a.transport.way_sample(b.bulk_address) is None


class Told:
    """A socket whose TCP_INFO is given."""

    def __init__(self, info: bytes) -> None:
        self.info = info

    def getsockopt(self, level: int, option: int, room: int) -> bytes:
        assert (level, option) == (socket.IPPROTO_TCP, 11)
        return self.info[:room]


def info(
    length: int,
    app_limited: bool = True,
    min_rtt_us: int = 20_000,
    sacked: int = 0,
    threshold: int = 40,
    probes: int = 0,
) -> bytes:
    told = bytearray(248)
    told[2], told[3] = 4, probes
    told[7] = (
        (0x01 if sys.byteorder == "little" else 0x80) if app_limited else 0x06 if sys.byteorder == "little" else 0x60
    )
    for offset, code, value in (
        (16, "I", 1448),
        (24, "I", 3),
        (28, "I", sacked),
        (68, "I", 25_000),
        (76, "I", threshold),
        (80, "I", 40),
        (100, "I", 7),
        (120, "Q", 10**12),
        (128, "Q", 99),
        (144, "I", 1000),
        (148, "I", min_rtt_us),
        (160, "Q", 6_250_000),
        (168, "Q", 1_500_000),
        (176, "Q", 300_000),
        (184, "Q", 200_000),
    ):
        struct.pack_into("=" + code, told, offset, value)
    return bytes(told[:length])


@pytest.mark.parametrize("length", [192, 232, 248], ids=["Linux 4.10", "5.4", "6.x"])
def test_tcp_info_of_every_length_is_read(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setattr(tcp, "AVAILABLE", True)
    found = tcp.sample(Told(info(length)))  # type: ignore[arg-type]
    assert found == tcp.TcpSample(10**12, 0.025, 0.02, 6.25e6, True, 1.5, 7, 0.5, 99, 3 * 1448 + 1000, 4, 40 * 1448)
    other = tcp.sample(Told(info(length, app_limited=False, min_rtt_us=UNLIMITED)))  # type: ignore[arg-type]
    assert other is not None and not other.app_limited and other.min_rtt_s == 0
    lossy = tcp.sample(Told(info(length, sacked=5)))  # type: ignore[arg-type]
    assert lossy is not None and (lossy.bytes_acked, lossy.sacked_bytes) == (10**12 + 5 * 1448, 5 * 1448)
    assert [found.timeouts for probes in (3, 6) if (found := tcp.sample(Told(info(length, probes=probes))))] == [4, 6]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("threshold", "n_bytes"), [(SSTHRESH_NONE, math.inf), (50, 50 * 1448), (29, 30 * 1448), (0, 30 * 1448)]
)
def test_slow_start_ends_at_the_threshold_or_where_the_window_was(
    monkeypatch: pytest.MonkeyPatch, threshold: int, n_bytes: float
) -> None:
    """After an idle time Linux has three quarters of the window, 40 segments here, as threshold, if that is more."""
    monkeypatch.setattr(tcp, "AVAILABLE", True)
    found = tcp.sample(Told(info(192, threshold=threshold)))  # type: ignore[arg-type]
    assert found is not None and found.threshold_bytes == n_bytes


def test_what_came_behind_a_loss_counts_and_the_count_never_falls(
    pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "AVAILABLE", True)
    a, b = pair
    connect(a, b)
    told = Told(info(248, sacked=100))
    monkeypatch.setattr(link(a.transport, b.bulk_address), "_tcp", told)
    told.close = lambda: None  # type: ignore[attr-defined]

    def acked() -> int:
        sample = a.transport.way_sample(b.bulk_address)
        assert sample is not None
        return sample.bytes_acked

    assert acked() == 10**12 + 100 * 1448
    told.info = info(248, sacked=99)
    assert acked() == 10**12 + 100 * 1448
    told.info = info(248, sacked=101)
    assert acked() == 10**12 + 101 * 1448


@pytest.mark.parametrize("length", [0, 104, 168, 191])
def test_a_kernel_that_tells_less_tells_nothing(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setattr(tcp, "AVAILABLE", True)
    assert tcp.sample(Told(info(length))) is None  # type: ignore[arg-type]


# ---------------------------------------------------------------------- systems without it


def test_without_the_system_bulk_goes_as_before(pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "AVAILABLE", False)
    a, b = pair
    connect(a, b)
    assert link(a.transport, b.bulk_address)._tcp is None
    assert not a.transport.pace(b.bulk_address, 5e6)
    assert a.transport.way_sample(b.bulk_address) is None
    seconds_for(a, b, 1_000_000)


@linux
def test_functions_that_the_system_refuses_do_nothing(raw: tuple[socket.socket, socket.socket]) -> None:
    _, client = raw
    assert not tcp.set_congestion(client, "no-such") and not tcp.begin_congestion(client, ("no-such",))
    with socket.socketpair()[0] as local:
        assert tcp.sample(local) is None and tcp.congestion(local) == ""


def test_nothing_is_done_where_nothing_is_available(
    raw: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "AVAILABLE", False)
    server, client = raw
    assert tcp.duplicate(client.fileno(), *server.getsockname()) is None
    assert tcp.sample(client) is None
    assert not tcp.pace(client, 5e6)
    assert not tcp.set_congestion(client, "bbr") and tcp.congestion(client) == ""


# ---------------------------------------------------------------------- whose descriptor is whose


@linux
def test_only_the_connection_that_is_meant_is_duplicated(raw: tuple[socket.socket, socket.socket]) -> None:
    server, client = raw
    host, port = server.getsockname()
    before = descriptors()
    with socket.socket() as closed:
        gone = closed.fileno()
    assert tcp.duplicate(gone, host, port) is None
    with open(os.devnull) as file:
        assert tcp.duplicate(file.fileno(), host, port) is None, "the number belongs to a file now"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.connect((host, port))
        assert tcp.duplicate(udp.fileno(), host, port) is None
    assert tcp.duplicate(server.fileno(), host, port) is None, "it leads nowhere"
    assert tcp.duplicate(client.fileno(), host, port + 1) is None
    assert tcp.duplicate(client.fileno(), "127.0.0.2", port) is None
    assert not descriptors() - before
    copy = tcp.duplicate(client.fileno(), host, port)
    assert copy is not None
    with copy:
        assert copy.getpeername() == (host, port) and copy.fileno() != client.fileno()
        assert not os.get_inheritable(copy.fileno())


@linux
def test_what_we_close_is_closed_for_the_other_side_at_once(pair: tuple[Node, Node]) -> None:
    """The duplicate must not keep the connection open, though nobody polls any more."""
    a, _ = pair
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        for end in (a.transport.forget, lambda address: a.transport.close(0.0)):
            a.transport.open_bulk(address)
            other, _ = server.accept()
            with other:
                pump(lambda: link(a.transport, address)._tcp is not None, a)
                kept = link(a.transport, address)  # or its own end would close the duplicate
                end(address)
                assert ends(other) and kept._tcp is None


@linux
def test_what_libzmq_closes_is_closed_for_the_other_side_at_the_next_poll(pair: tuple[Node, Node]) -> None:
    a, _ = pair
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        a.transport.open_bulk(address)
        other, _ = server.accept()
        with other:
            pump(lambda: link(a.transport, address)._tcp is not None, a)
            other.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)
            pump(lambda: link(a.transport, address)._tcp is None, a)
            assert ends(other)


def ends(other: socket.socket) -> bool:
    """Whether the other side sees the end of the connection."""
    other.settimeout(WAIT_S)
    try:
        while other.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True


@linux
def test_fifty_reconnections_leave_no_descriptor(pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "RETRY_MIN_S", 0.001)
    a, b = pair
    connect(a, b)
    before = open_files()
    for _ in range(50):
        broken = descriptor(a.transport, b.bulk_address)
        broken.shutdown(socket.SHUT_RDWR)
        pump(
            lambda old=broken: (
                link(a.transport, b.bulk_address)._tcp is not old and link(a.transport, b.bulk_address).up
            ),
            a,
            b,
        )
    pump(lambda: open_files() <= before, a, b)
    a.transport.forget(b.bulk_address)
    pump(lambda: open_files() < before, a, b)


# ---------------------------------------------------------------------- peers


def bulk_address(peer: Peer, of: Peer) -> str:
    record = peer._ask(lambda node, now: node.record_of(of.id))
    assert record is not None
    return record.bulk[0]


def sample_of(peer: Peer, of: Peer) -> tcp.WaySample | None:
    record = peer._ask(lambda node, now: node.record_of(of.id))
    if record is None:  # not heard of yet
        return None
    return peer._ask(lambda node, now: peer._driver.transport.way_sample(record.bulk[0]))


@linux
def test_bulk_links_are_open_before_the_first_round() -> None:
    with swarm(3) as peers:
        ways = [(a, b) for a in peers for b in peers if a is not b]
        wait_until(lambda: all(sample_of(a, b) is not None for a, b in ways), WAIT_S, "links between all voters")
        for a, b in ways:
            sample = sample_of(a, b)
            assert sample is not None and sample.bytes_acked < 10_000, "nothing but handshakes"


@pytest.mark.alone
@linux
def test_a_node_is_told_of_its_links_while_bulk_moves_and_paces_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "SAMPLE_TAIL_S", WAIT_S)  # the last bulk is looked at after a standstill, too
    with swarm(2) as peers:
        one, two = peers
        vectors = [torch.ones(500_000), torch.zeros(500_000)]
        together(peers, lambda peer, i: peer.all_reduce(vectors[i], codec="fp32", timeout_s=2 * WAIT_S))

        def told(peer: Peer, of: Peer) -> int:
            return peer._ask(lambda node, now: node.exchange.rates._last_acked.get(of.id, 0))

        wait_until(lambda: told(one, two) > 2_000_000 and told(two, one) > 2_000_000, WAIT_S, "the last sample")
        address = bulk_address(one, two)

        def paced(rate_Bps: float | None) -> int:
            def act(node: object, now: float) -> int:
                one._driver.perform([Pace(two.id, rate_Bps)])
                return rate_of(one._driver.transport, address)

            return one._ask(act)

        assert paced(3e6) == UNLIMITED, "no link lies between peers of one host"
        monkeypatch.setattr(dispatch, "on_this_host", lambda address: False)
        looked: list[links.Link] = []
        monkeypatch.setattr(links.Link, "path_s", lambda self: looked.append(self) or 0.0)
        assert paced(3e6) == 3_000_000
        assert [one.lane for one in looked] == ["control", "bulk"], "both connections tell how near it is"
        assert {one.host for one in looked} == {"127.0.0.1"}
        assert paced(None) == UNLIMITED


@pytest.mark.parametrize(
    ("address", "here"),
    [
        ("127.0.0.1:80", True),
        ("127.9.9.9:80", True),
        ("[::1]:80", True),
        ("10.0.0.1:80", False),
        ("a.example:80", False),
    ],
)
def test_who_is_on_this_host(address: str, here: bool) -> None:
    assert dispatch.on_this_host(address) == here


def test_pacing_a_peer_that_nobody_knows_is_nothing() -> None:
    with swarm(1) as (peer,):
        peer._ask(lambda node, now: peer._driver.perform([Pace("nobody", 1e6)]))


def test_the_largest_send_buffer_is_what_the_system_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "tcp_wmem"
    monkeypatch.setattr(tcp, "SEND_BUFFERS", told)
    assert tcp.send_buffer_bytes() is None
    for text, n_bytes in (("4096\t16384\t4194304\n", 4 << 20), ("4096", None), ("a b c", None)):
        told.write_text(text)
        assert tcp.send_buffer_bytes() == n_bytes
