"""A host gets another address while it runs, as one behind a router that was connected anew."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.helpers import benchmark_module

REASON = benchmark_module("_wan").available()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

MOVES = """
import itertools, logging, subprocess, sys
import torch
import dlc
from dlc.comm.security import generate_run_key
from tests.helpers import wait_until

KEY, FIRST, SECOND, NEW = generate_run_key(), "10.9.9.1", "10.9.9.2", "10.9.9.3"

def address(do, *what):
    subprocess.run(["ip", "address", do, *what, "dev", "lo"], check=True)

def leaves_from(to, host):
    "What goes to that host bears this address, as from a host of its own."
    route = ["ip", "route", "replace", "local", to, "dev", "lo", "src", host, "table", "local"]
    subprocess.run(route, check=True)

subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
for host in (FIRST, SECOND):
    address("add", f"{host}/32")
leaves_from(FIRST, SECOND)
leaves_from(SECOND, FIRST)
port = {FIRST: 7000, SECOND: 7010}
given, warned = sys.argv[2] or None, []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: warned.append(record.getMessage())
logging.getLogger("dlc.whereabouts").addHandler(handler)
with dlc.Peer.join(listen="0.0.0.0:7000", key=KEY) as first:
    with dlc.Peer.join([f"{FIRST}:7000"], listen="0.0.0.0:7010", key=KEY, advertise=given) as second:
        def contributors(name):
            calls = [peer.all_reduce(torch.ones(8), name=name, async_op=True) for peer in (first, second)]
            return min(len(call.wait(60).contributors) for call in calls)

        stays, moves = (first, second) if sys.argv[1] == "joiner" else (second, first)
        before, other = (SECOND, FIRST) if sys.argv[1] == "joiner" else (FIRST, SECOND)
        assert contributors("before") == 2
        assert moves.address == f"{before}:{port[before]}" in {m.address for m in stays.members()}
        address("add", f"{NEW}/32")
        leaves_from(other, NEW)
        leaves_from(NEW, other)
        address("del", f"{before}/32")
        subprocess.run(["ip", "route", "del", "local", before, "dev", "lo", "table", "local"], check=True)
        if given:
            wait_until(lambda: warned, 60, "it is said that what was given is wrong")
            assert moves.address == given and f"at {given}, which --advertise gives" in warned[0] and NEW in warned[0]
            sys.exit()
        wait_until(lambda: moves.address == f"{NEW}:{port[before]}", 60, "it has heard of its new address")
        wait_until(lambda: moves.address in {m.address for m in stays.members() if m.alive}, 60, "so has the other")
        names = itertools.count()
        wait_until(lambda: contributors(f"after {next(names)}") == 2, 60, "a round of both")
"""


@pytest.mark.parametrize(("who", "given"), [("joiner", ""), ("founder", ""), ("joiner", "10.9.9.2:7010")])
def test_a_host_that_has_another_address_says_so_and_rounds_go_on(who: str, given: str) -> None:
    """The others answered at the old one; it went on alone after a minute, and so did they. So it does where the user
    gave the old one; but that was not said."""
    run = ["unshare", "--net", sys.executable, "-c", MOVES, who, given]
    found = subprocess.run(run, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": "src:."}, timeout=240)
    assert found.returncode == 0, found.stderr
