"""Two sites lose sight of each other for so long that TCP would try again only much later, and find the way again."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from dlc.comm.links import STALLED_TIMEOUTS
from dlc.comm.security import generate_run_key
from tests.helpers import benchmark_module, wait_until

wan_module = benchmark_module("_wan")
REASON = wan_module.available()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

KEY = generate_run_key()
BULK_BYTES_MIN = 1 << 20
"""More than all else that is said."""
ESTABLISHED, LISTENING = "01", "0A"
"""As the kernel writes it."""
AVERAGE = """
import sys, torch
import dlc
from dlc.errors import RoundLost

key, listen, peers = sys.argv[1:]
with dlc.Peer.join([p for p in peers.split(",") if p], run="cuts", key=key, listen=listen) as peer:
    while True:
        try:
            report = peer.all_reduce(torch.ones(4_000_000), name="x", timeout_s=600)
        except RoundLost:
            continue
        print(report.t if report.complete and len(report.contributors) == 2 else 0, flush=True)
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
    """A site, and the last round that it told in which all of both was."""

    def __init__(self, net: Any, name: str) -> None:
        arguments = [KEY, f"{net.address(name)}:7000", f"{net.address('a')}:7000" if name != "a" else ""]
        command = [sys.executable, "-c", AVERAGE, *arguments]
        self.t = 0
        self._process = net.popen(name, command, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout:
            self.t = int(line) or self.t

    def opened(self) -> dict[tuple[str, str], int]:
        """The connections that this site has opened, by their ends: how often in a row the kernel sent in vain."""
        rows = Path(f"/proc/{self._process.pid}/net/tcp").read_text().splitlines()[1:]
        ends = [(row[1], row[2], row[3], int(row[6], 16)) for row in map(str.split, rows)]
        listening = {_port(ours) for ours, _, state, _ in ends if state == LISTENING}
        ours_all = [end for end in ends if end[2] == ESTABLISHED and _port(end[0]) not in listening]
        return {(ours, theirs): timeouts for ours, theirs, _, timeouts in ours_all}


def _port(end: str) -> str:
    return end.rpartition(":")[2]


def test_after_a_cut_connections_are_made_anew_in_place_of_those_on_which_tcp_waits() -> None:
    """After a cut of 45 s it took 20 s more until peers saw each other, by when one of them had gone on alone, and 48 s
    until a round had all of them (benchmarks/cuts.py)."""
    site = wan_module.Site
    with wan_module.Wan({name: site(up_mbit=16, down_mbit=16, delay_ms=5) for name in "ab"}, seed=1) as net:
        sites = [Averaging(net, name) for name in "ab"]
        wait_until(lambda: all(one.t for one in sites), what="a round of both")

        def sent() -> int:
            return min(one["sent"] for one in net.stats().values())

        moved = sent() + BULK_BYTES_MIN
        wait_until(lambda: sent() > moved, what="chunks move")
        net.cut("a", "b")
        before, in_vain = [one.opened().keys() for one in sites], [0]

        def gone() -> bool:
            found = [one.opened() for one in sites]
            left = [n for now, old in zip(found, before, strict=True) for ends, n in now.items() if ends in old]
            in_vain.extend(left)
            return not left

        wait_until(gone, what="no connection is left that was cut")
        last = max(one.t for one in sites)
        net.heal("a", "b")
        wait_until(lambda: all(one.t > last for one in sites), what="another round of both")
        after = [one.opened().keys() for one in sites]
    assert all(len(ends) >= 2 for ends in (*before, *after)), "one of each lane"
    assert max(in_vain) <= STALLED_TIMEOUTS + 1, "the next time is longer than all before it"


def test_a_connection_from_an_address_that_this_host_has_lost_is_seen_to_get_no_answer() -> None:
    """Bulk went nowhere for a minute. To somebody who only takes nothing for a while there is an answer."""
    run = ["unshare", "--net", sys.executable, "-c", ADDRESS_GONE]
    found = subprocess.run(run, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": "src:."}, timeout=120)
    assert found.returncode == 0, found.stderr
