"""The address that a peer tells of itself, where its host has no default route to guess it by."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dlc.comm.addresses import join_address, parse_address
from dlc.comm.ids import Voter
from dlc.comm.security import generate_run_key
from dlc.joining import Introduction
from dlc.peer import Peer
from dlc.statedir import Ephemeral
from dlc.whereabouts import SEEN_MIN, Whereabouts
from tests.helpers import benchmark_module, wait_until
from tests.swarm import PATIENT, free_addresses

wan_module = benchmark_module("_wan")
REASON = wan_module.available()
JOIN_S = 60.0
KEY = generate_run_key()
ROUTER = "127.0.0.9"
"""Another host, with ports of its own."""

MEMBER = """
import sys
import dlc
key, *through = sys.argv[1:]
with dlc.Peer.join(through, key=key, listen="0.0.0.0:4600", log=False, join_timeout_s=180.0) as peer:
    print(peer.address, flush=True)
    sys.stdin.readline()
"""
THIRD = """
import sys
import dlc
from tests.helpers import wait_until
key, first, second = sys.argv[1:]
with dlc.Peer.join([second], key=key, listen="0.0.0.0:4600", log=False, join_timeout_s=180.0) as peer:
    def alive(): return {m.address for m in peer.members() if m.alive and not m.me}
    wait_until(lambda: alive() == {first, second}, what="both, where they are")
    print("both", flush=True)
    wait_until(lambda: alive() == {first}, what="the first, without the second to carry messages")
    print("one", flush=True)
"""


def joined(first: Peer, host: str) -> Peer:
    """Somebody who joins `first` by this address of its host."""
    address = join_address(host, parse_address(first.address)[1])
    return Peer.join([address], key=KEY, log=False, join_timeout_s=JOIN_S)


@contextlib.contextmanager
def forwarded(outside: int, inside: int) -> Iterator[None]:
    """What comes to this port of ROUTER is led to that one of this machine."""

    def carry(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):  # whoever ends it
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as ends:
            while True:
                caller = ends.enter_context(door.accept()[0])
                callee = ends.enter_context(socket.create_connection(("127.0.0.1", inside)))
                for way in ((caller, callee), (callee, caller)):
                    threading.Thread(target=carry, args=way, daemon=True).start()

    with socket.create_server((ROUTER, outside)) as door:
        thread = threading.Thread(target=accept)
        thread.start()
        yield
        door.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """127.0.0.1 is the guess of a host without a default route; 127.0.0.2 and .3 stand for addresses to dial."""
    monkeypatch.setattr("dlc.joining.outbound_host", lambda host: "127.0.0.1")
    monkeypatch.setattr("dlc.comm.transport.leads_here", lambda host: host != "127.0.0.1")
    return monkeypatch


def test_a_founder_without_a_default_route_tells_the_address_by_which_it_was_reached(
    routes: pytest.MonkeyPatch,
) -> None:
    """It told everybody to dial 127.0.0.1, and a third peer did not find it there."""
    with Peer.join(key=KEY, log=False) as first:
        port = parse_address(first.address)[1]
        with joined(first, "127.0.0.1") as local:
            assert first.address == f"127.0.0.1:{port}"
            with joined(first, "127.0.0.2") as second, joined(first, "127.0.0.3") as third:
                assert first.address == f"127.0.0.2:{port}"
                for other in (local, second, third):
                    wait_until(lambda peer=other: first.address in {m.address for m in peer.members() if m.alive})


@pytest.mark.parametrize("told", ["given", "a guess that others can dial"])
def test_an_address_that_was_given_or_may_be_dialled_stays(routes: pytest.MonkeyPatch, told: str) -> None:
    if told == "given":
        advertise, host = "127.0.0.1", "127.0.0.1"
    else:
        advertise, host = None, "192.0.2.7"
        routes.setattr("dlc.joining.outbound_host", lambda listened: host)
    with Peer.join(key=KEY, log=False, advertise=advertise) as first:
        with joined(first, "127.0.0.2"):
            assert parse_address(first.address)[0] == host


def test_behind_ports_of_a_router_that_lead_to_others_a_peer_is_in_rounds() -> None:
    """Others dialled the router at the bulk port that the peer had inside, and nothing was there."""
    inside, outside = free_addresses(2)
    ports = [parse_address(address)[1] for address in (outside, inside)]
    with forwarded(*ports), forwarded(*(port + 1 for port in ports)), Peer.join(timeouts=PATIENT) as first:
        options: dict[str, Any] = {"listen": inside, "advertise": f"{ROUTER}:{ports[0]}", "timeouts": PATIENT}
        with Peer.join([first.address], join_timeout_s=JOIN_S, **options) as second:
            assert second.address == options["advertise"]
            calls = [peer.all_reduce(torch.ones(2, 100_000), async_op=True) for peer in (first, second)]
            assert [len(call.wait(JOIN_S).contributors) for call in calls] == [2, 2]


@pytest.mark.parametrize(
    ("advertise", "bulk"), [("host", 4701), ("host:4600", 4701), ("host:7000", 7001), ("host:65535", 4701)]
)
def test_the_bulk_port_is_told_that_leads_here(advertise: str, bulk: int) -> None:
    intro = Introduction(Ephemeral(), Voter("p", 1), "0.0.0.0", 4600, 4701, advertise, "trainer")
    assert intro.record().bulk == (f"host:{bulk}",)


@pytest.mark.parametrize("given", ["host", "192.0.2.8:4600", "192.0.2.7"])
def test_where_nobody_reaches_a_given_address_it_is_said_once_and_stays(
    caplog: pytest.LogCaptureFixture, given: str
) -> None:
    """It trained alone, and nobody was told that another address had been seen."""
    intro = Introduction(Ephemeral(), Voter("p", 1), "0.0.0.0", 4600, 4601, given, "trainer")
    whereabouts = Whereabouts(intro)
    for times in range(1, 3 * SEEN_MIN):
        assert whereabouts.seen("192.0.2.7", intro.record()) == {}
        assert len(caplog.records) == (times >= SEEN_MIN and given != "192.0.2.7")


@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_a_third_host_reaches_a_founder_without_a_default_route(tmp_path: Path) -> None:
    key = tmp_path / "run.key"
    key.write_text(KEY)
    key.chmod(0o600)
    pipe = subprocess.PIPE
    with wan_module.Wan({name: wan_module.Site() for name in ("first", "second", "third")}) as wan:
        at = {name: f"{wan.address(name)}:4600" for name in wan.names}

        def start(name: str, code: str, *arguments: str) -> subprocess.Popen[str]:
            process: subprocess.Popen[str] = wan.popen(
                name, [sys.executable, "-c", code, str(key), *arguments], stdin=pipe, stdout=pipe, text=True
            )
            return process

        def line(process: subprocess.Popen[str]) -> str:
            assert process.stdout is not None
            return process.stdout.readline().strip()

        assert line(start("first", MEMBER)) == "127.0.0.1:4600"
        second = start("second", MEMBER, at["first"])
        assert line(second) == at["second"]
        third = start("third", THIRD, at["first"], at["second"])
        assert line(third) == "both"
        second.kill()
        assert line(third) == "one"
