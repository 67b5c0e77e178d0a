"""The emulated wide-area network gives the rates and delays that were asked for, and cuts and heals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import benchmark_module, undisturbed, wait_until

wan_module = benchmark_module("_wan")
REASON = wan_module.available()
needs_wan = pytest.mark.skipif(bool(REASON), reason=REASON)
pytestmark = pytest.mark.alone

ECHO = """
import socket, sys, threading
def echo(link):
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while data := link.recv(1 << 18):
        link.sendall(data[:1])
with socket.create_server((sys.argv[1], 9000)) as server:
    print("up", flush=True)
    while True:
        threading.Thread(target=echo, args=server.accept()[:1]).start()
"""
RTT = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 9000), 180) as link:
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    times = []
    for _ in range(15):
        begin = time.monotonic()
        link.sendall(b"x")
        link.recv(1)
        times.append(time.monotonic() - begin)
    print(min(times))  # whoever answers may be kept from running: that only adds
"""
SINK = """
import hashlib, socket, sys, time
with socket.create_server((sys.argv[1], 9001)) as server:
    print("up", flush=True)
    link = server.accept()[0]
    digest, n, marks = hashlib.sha256(), 0, []
    while data := link.recv(1 << 18):
        digest.update(data)
        n += len(data)
        marks.append((time.monotonic(), n))
    gaps = [later - at for (at, _), (later, _) in zip(marks, marks[1:])]
    mbit = (n - marks[0][1]) * 8e-6
    print(mbit / sum(min(gap, 0.1) for gap in gaps), mbit / sum(gaps), digest.hexdigest())
"""
SOURCE = """
import hashlib, random, socket, sys
data = random.Random(0).randbytes(int(sys.argv[2]))
with socket.create_connection((sys.argv[1], 9001), 180) as link:
    link.sendall(data)
print(hashlib.sha256(data).hexdigest())
"""
TALK = """
import socket, sys
with socket.create_connection((sys.argv[1], 9000), 180) as link:
    link.settimeout(180)
    for line in sys.stdin:
        link.sendall(b"x")
        try:
            print(len(link.recv(1)), flush=True)
        except TimeoutError:
            print("silence", flush=True)
"""


@pytest.fixture
def wan() -> Iterator[Any]:
    site = wan_module.Site
    sites = {
        "a": site(up_mbit=60, down_mbit=200, delay_ms=10),
        "b": site(delay_ms=5),
        "c": site(down_mbit=30, delay_ms=40, loss=0.01),
    }
    with wan_module.Wan(sites, seed=1) as net:
        yield net


def _start(net: Any, site: str, code: str, *arguments: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    process: subprocess.Popen[str] = net.popen(
        site, [sys.executable, "-c", code, *arguments], stdin=pipe, stdout=pipe, text=True
    )
    return process


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _serve(net: Any, site: str, code: str) -> subprocess.Popen[str]:
    process = _start(net, site, code, net.address(site))
    assert _line(process) == "up"
    return process


def _rates_mbit(net: Any, source: str, target: str, n_bytes: int) -> tuple[float, float]:
    """While bytes came, and all in all: in long gaps one of both processes did not run, and in the first of what came
    then may be what had been waiting for it."""
    return undisturbed(net.late_s, lambda: _once_mbit(net, source, target, n_bytes))


def _once_mbit(net: Any, source: str, target: str, n_bytes: int) -> tuple[float, float]:
    sink = _serve(net, target, SINK)
    sent = _line(_start(net, source, SOURCE, net.address(target), str(n_bytes)))
    moving, whole, digest = _line(sink).split()
    assert digest == sent
    assert sink.wait(180) == 0  # the next one listens at the same port
    return float(moving), float(whole)


def _rtt_s(net: Any, source: str, target: str) -> float:
    return undisturbed(net.late_s, lambda: float(_line(_start(net, source, RTT, net.address(target)))))


@needs_wan
def test_latency_is_that_of_the_path(wan: Any) -> None:
    _serve(wan, "a", ECHO)
    for site, rtt_s in (("b", 0.030), ("c", 0.100)):
        assert rtt_s <= _rtt_s(wan, site, "a") < 1.5 * rtt_s
    wan.set_delay("a", "c", 20.0)
    assert 0.040 <= _rtt_s(wan, "c", "a") < 0.070


@needs_wan
def test_rates_are_those_of_the_narrowest_link(wan: Any) -> None:
    """TCP's payload is 96.5 % of the IP bytes that are limited, less what the slow start takes."""

    def check(limit_mbit: float, *path: Any) -> None:
        moving, whole = _rates_mbit(wan, *path)
        assert 0.7 * limit_mbit < moving and whole < limit_mbit

    check(60, "a", "b", 15_000_000)
    wan.set_rate("a", up_mbit=20, down_mbit=200)
    check(20, "a", "b", 5_000_000)
    check(30, "b", "c", 8_000_000)  # the receiver's downlink


@needs_wan
def test_lost_segments_are_counted_and_the_stream_stays_whole(wan: Any) -> None:
    """A super-packet that loses a segment in its middle goes on as two; `_once_mbit` compares the bytes."""
    _once_mbit(wan, "c", "b", 6_000_000)
    counts = wan.stats()["c"]
    segments = counts["sent"] / 1500
    assert 0.005 * segments < counts["lost"] < 0.015 * segments


@needs_wan
def test_a_cut_is_silent_and_heals(wan: Any) -> None:
    _serve(wan, "a", ECHO)
    near, far = (_start(wan, site, TALK, wan.address("a")) for site in ("b", "c"))

    def say(process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()

    for process in (near, far):
        say(process)
        assert _line(process) == "1"
    wan.cut("a", "c")
    say(far)
    wait_until(lambda: wan.stats()["a"]["cut"] > 0, what="packets vanish")
    say(near)
    assert _line(near) == "1", "others are not cut"
    wan.heal("a", "c")
    assert _line(far) == "1", "TCP says it again"


@needs_wan
def test_a_relay_that_cannot_run_says_so(wan: Any) -> None:
    before = wan.late_s()
    os.kill(wan._relay.pid, signal.SIGSTOP)
    begun = time.monotonic()
    wait_until(lambda: time.monotonic() >= begun + 0.5)
    os.kill(wan._relay.pid, signal.SIGCONT)
    wait_until(lambda: wan.late_s() - before >= 0.4, what="the half second")


@needs_wan
def test_nothing_is_left_over(wan: Any) -> None:
    """Not of one that was closed, and not of one whose process was killed."""
    child = _serve(wan, "a", ECHO)
    relay = wan._relay
    wan.close()
    assert child.wait(180) == -signal.SIGKILL
    assert relay.poll() is not None
    code = (
        f"import sys; sys.path.insert(0, {str(wan_module.RELAY.parent)!r})\n"
        "from _wan import Site, Wan\n"
        "net = Wan({'a': Site()})\n"
        "child = net.popen('a', ['sh', '-c', 'sleep 1000 & echo $!; wait'], stdout=-1, text=True)\n"
        "print(net._relay.pid, child.stdout.readline(), flush=True)\n"
        "input()\n"
    )
    pipe = subprocess.PIPE
    owner = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True)
    pids = [int(word) for word in _line(owner).split()]
    assert len(pids) == 2 and all(_lives(pid) for pid in pids)
    owner.kill()
    owner.wait()
    wait_until(lambda: not any(_lives(pid) for pid in pids), what="relay and grandchild end")


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@needs_wan
def test_an_unknown_site_is_named(wan: Any) -> None:
    with pytest.raises(wan_module.WanError, match="'z'"):
        wan.cut("a", "z")


def test_says_why_it_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(wan_module.shutil, "which", lambda tool: f"/bin/{tool}")
    if sys.platform.startswith("linux"):
        assert "root" in wan_module.available()
