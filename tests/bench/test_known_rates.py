"""On an emulated network with known rates the reports say these rates."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dlc.comm.security import generate_run_key
from tests.helpers import benchmark_module, undisturbed

wan_module = benchmark_module("_wan")
REASON = wan_module.available()


UP_MBIT, DOWN_MBIT, RTT_MS = 10.0, 20.0, 30.0
"""Of the listening site. Low: a relay in Python keeps such rates on a busy machine too."""
PAYLOAD = 1448 / 1500
"""Share of an IP packet that is no TCP/IP header: no tool that tells the truth reports more of the rate."""
SAMPLE_S = 0.1
LINK_S, TRANSFER_S = 8, 3
"""Of the tool, and at least what it gives each direction: a pause of 0.3 s in there takes a sixth off the rate."""
PLAIN_S = 3.0
PLAIN = """
import socket, sys, time
seconds = float(sys.argv[2])
if sys.argv[1] == "serve":
    with socket.create_server((sys.argv[3], 4800)) as listening:
        print("listening", flush=True)
        link, _ = listening.accept()
        total, points = 0, []
        while piece := link.recv(1 << 16):
            total += len(piece)
            points.append((time.monotonic(), total))
    late = [p for p in points if p[0] >= points[0][0] + 0.3 * seconds and p[0] <= points[0][0] + seconds]
    print(8e-6 * (late[-1][1] - late[0][1]) / (late[-1][0] - late[0][0]), flush=True)
else:
    end = time.monotonic() + seconds
    with socket.create_connection((sys.argv[3], 4800)) as link:
        while time.monotonic() < end:
            link.sendall(bytes(1 << 16))
"""
"""What a plain TCP connection carries: it has the same machine and the same network."""


def plain_mbps(wan: wan_module.Wan) -> float:
    """From b to a."""
    words = [sys.executable, "-c", PLAIN]
    serve = wan.popen("a", [*words, "serve", str(PLAIN_S), wan.address("a")], stdout=subprocess.PIPE)
    assert serve.stdout.readline() == b"listening\n"
    wan.popen("b", [*words, "send", str(PLAIN_S), wan.address("a")]).wait(120)
    return float(serve.communicate(timeout=120)[0])


class Observed:
    """What the network itself carried to one site while a command ran: the rate between 15 and 85 % of the bytes."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = []

    def add(self, total_bytes: int) -> None:
        self._seen.append((time.monotonic(), total_bytes))

    @property
    def mbps(self) -> float:
        start, end = self._seen[0][1], self._seen[-1][1]
        middle = [(at, n) for at, n in self._seen if 0.15 <= (n - start) / (end - start) <= 0.85]
        (begin, low), (finish, high) = middle[0], middle[-1]
        return 8e-6 * (high - low) / (finish - begin)


Run = tuple[dict[str, Any], float, float]


@pytest.mark.alone
@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_known_rates_are_reported_in_the_right_direction(tmp_path: Path) -> None:
    key = tmp_path / "run.key"
    key.write_text(generate_run_key())
    key.chmod(0o600)
    far = wan_module.Site(up_mbit=UP_MBIT, down_mbit=DOWN_MBIT, delay_ms=RTT_MS / 3)
    near, dlc = wan_module.Site(delay_ms=RTT_MS / 6), [sys.executable, "-m", "dlc", "bench"]
    with wan_module.Wan({"a": far, "b": near}, seed=1) as wan:
        address = f"{wan.address('a')}:4700"
        serve = wan.popen("a", [*dlc, "serve", "--listen", address, "--key-file", str(key), "--json"], stdout=-1)
        assert b"serving" in serve.stdout.readline()

        def measure() -> Run:
            """The tool's report, and what the network carried meanwhile (up, down)."""
            # Within the 10 s after which BBR pauses to look for the least round trip: a short transfer loses 8 % by it.
            words = [
                "link",
                "--to",
                address,
                "--key-file",
                str(key),
                "--seconds",
                str(LINK_S),
                "--streams",
                "1",
                "--json",
            ]
            link = wan.popen("b", [*dlc, *words], stdout=subprocess.PIPE)
            up, down, over = Observed(), Observed(), threading.Event()
            deadline = time.monotonic() + 90
            while link.poll() is None and time.monotonic() < deadline:
                stats = wan.stats()
                up.add(stats["a"]["received"])
                down.add(stats["b"]["received"])
                over.wait(SAMPLE_S)
            out, _ = link.communicate(timeout=1)
            return json.loads(out), up.mbps, down.mbps

        def plain() -> float:
            return undisturbed(wan.late_s, lambda: plain_mbps(wan), 60)

        before = plain()
        report, up, down = undisturbed(wan.late_s, measure, 60, figure_s=TRANSFER_S)
        plainly = min(before, plain())
    # A relay that a busy machine kept from running carried less than its rate: the tool is held to what came through.
    assert 0.95 * PAYLOAD * up <= report["up_mbps"] <= PAYLOAD * DOWN_MBIT, (up, report)
    assert 0.95 * PAYLOAD * down <= report["down_mbps"] <= PAYLOAD * UP_MBIT, (down, report)
    assert up > UP_MBIT, up  # so that a swapped direction is seen
    assert report["up_mbps"] >= 0.9 * plainly, (plainly, report)  # and the tool fills the link as well as anybody does
    assert RTT_MS <= report["rtt_min_ms"] <= RTT_MS + 10 and report["rtt_min_ms"] <= report["rtt_ms"], report
    assert report["seconds"] < 10, report
