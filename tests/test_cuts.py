"""Two sites lose sight of each other for so long that TCP would try again only much later, and find the way again."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from dlc.comm.lanes import CONTROL_KEEPALIVE
from dlc.comm.security import generate_run_key
from tests.helpers import benchmark_module, wait_until

wan_module = benchmark_module("_wan")
REASON = wan_module.available()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

KEY = generate_run_key()
BULK_BYTES_MIN = 1 << 20
"""More than all else that is said."""
AVERAGE = """
import sys, torch
from pathlib import Path
import dlc
from dlc.errors import RoundLost

ESTABLISHED, LISTENING = "01", "0A"

def opened():
    "Both ports of each connection that this site has opened; no other process is here."
    rows = [line.split()[1:4] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ends = [(int(ours[9:], 16), int(theirs[9:], 16), state) for ours, theirs, state in rows]
    listening = {ours for ours, _, state in ends if state == LISTENING}
    return {(ours, theirs) for ours, theirs, state in ends if state == ESTABLISHED and ours not in listening}

key, listen, peers = sys.argv[1:]
with dlc.Peer.join([p for p in peers.split(",") if p], run="cuts", key=key, listen=listen) as peer:
    while True:
        try:
            report = peer.all_reduce(torch.ones(4_000_000), name="x", timeout_s=600)
        except RoundLost:
            continue
        whole = report.complete and len(report.contributors) == 2
        print(report.t if whole else 0, *(f"{ours}-{theirs}" for ours, theirs in opened()), flush=True)
"""

ADDRESS_GONE = """
import contextlib, socket, subprocess
from dlc.comm import tcp
from dlc.comm.links import STALLED_TIMEOUTS
from tests.helpers import wait_until

subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
subprocess.run(["ip", "address", "add", "10.9.9.9/24", "dev", "lo"], check=True)

def full(sock):
    "Its other side reads nothing: no more is taken of what is sent."
    sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            sock.send(bytes(1 << 16))

with socket.create_server(("127.0.0.1", 0)) as listens:
    at = listens.getsockname()
    goes, stays = (socket.create_connection(at, source_address=(host, 0)) for host in ("10.9.9.9", "127.0.0.1"))
    full(stays)
    subprocess.run(["ip", "address", "del", "10.9.9.9/24", "dev", "lo"], check=True)
    goes.send(b"x")
    most = []
    def stalled():
        most.append(tcp.sample(stays).timeouts)
        return tcp.sample(goes).timeouts >= STALLED_TIMEOUTS
    wait_until(stalled, 60)
    # Linux answers such a probe once in 0.5 s (tcp_invalid_ratelimit) and the second comes 0.4 s after the first: that
    # one stays without, and the third makes it two until its answer is there.
    assert tcp.sample(stays).queued_bytes and max(most) <= 2 < STALLED_TIMEOUTS, max(most)
"""


class Averaging:
    """A site, and what it told last of a round in which all of both was."""

    def __init__(self, net: Any, name: str) -> None:
        arguments = [KEY, f"{net.address(name)}:7000", f"{net.address('a')}:7000" if name != "a" else ""]
        command = [sys.executable, "-c", AVERAGE, *arguments]
        self.t, self.connections = 0, set[str]()
        process = net.popen(name, command, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, args=(process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            t, *connections = line.split()
            if int(t):
                self.connections, self.t = set(connections), int(t)


def test_after_a_cut_connections_are_made_anew_in_place_of_those_on_which_tcp_waits() -> None:
    """After a cut of 45 s it took 20 s more until peers saw each other, by when one of them had gone on alone, and 48 s
    until a round had all of them (benchmarks/cuts.py)."""
    site = wan_module.Site
    with wan_module.Wan({name: site(up_mbit=16, down_mbit=16, delay_ms=5) for name in "ab"}, seed=1) as net:
        sites = [Averaging(net, name) for name in "ab"]
        wait_until(lambda: all(one.t for one in sites), what="a round of both")
        before = [one.connections for one in sites]

        def sent() -> int:
            return min(one["sent"] for one in net.stats().values())

        moved = sent() + BULK_BYTES_MIN
        wait_until(lambda: sent() > moved, what="chunks move")
        net.cut("a", "b")
        end = time.monotonic() + CONTROL_KEEPALIVE.silent_s + 3
        wait_until(lambda: time.monotonic() > end, what="a cut for so long")
        last = max(one.t for one in sites)
        net.heal("a", "b")
        wait_until(lambda: all(one.t > last for one in sites), what="another round of both")
        after = [one.connections for one in sites]
    assert all(len(ends) >= 2 for ends in (*before, *after)), "one of each lane"
    assert not any(old & new for old, new in zip(before, after, strict=True))


def test_a_connection_from_an_address_that_this_host_has_lost_is_seen_to_get_no_answer() -> None:
    """Bulk went nowhere for a minute. To somebody who only takes nothing for a while there is an answer."""
    run = ["unshare", "--net", sys.executable, "-c", ADDRESS_GONE]
    found = subprocess.run(run, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": "src:."}, timeout=120)
    assert found.returncode == 0, found.stderr
