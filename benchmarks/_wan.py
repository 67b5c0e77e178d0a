"""A wide-area network on one machine: sites with rates, latency, loss, and cuts that come and go.

Each site is a Linux network namespace with one interface. All interfaces end in one relay process, which takes every
packet through

    uplink of the sender (rate, buffer)  ->  path (delay, loss, cut)  ->  downlink of the receiver (rate, buffer)

and hands it on when it would have arrived. It is done in user space because many kernels lack `netem`; what is needed
is root, `/dev/net/tun`, and the tools `ip`, `nsenter` and `setpriv` (`available` says what is missing). The interfaces
pass TCP's super-packets of up to 64 KiB, so that Python can keep up with about a gigabit in all; the relay counts and
loses the single segments in them.

    with Wan({"paris": Site(up_mbit=100, delay_ms=10), "tokyo": Site(delay_ms=90, loss=1e-3)}) as wan:
        server = wan.popen("paris", [sys.executable, "serve.py", wan.address("paris")])
        wan.cut("paris", "tokyo")       # silence, in both directions; nobody is told
        wan.heal("paris", "tokyo")

Nothing has a name outside, so nothing can be left over: the namespaces end with the last process in them, and the
relay kills these when its owner closes it, or is killed. Sites of two `Wan`s may have equal addresses.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RELAY = Path(__file__).resolve().parent / "_wan_relay.py"
END_S = 5.0
"""Within this the relay ends when it is told to."""


class WanError(Exception):
    """The network could not be built, or does not know a site."""


@dataclass(frozen=True)
class Site:
    """One place. Rates count IP bytes; 0 means without limit."""

    up_mbit: float = 0.0
    down_mbit: float = 0.0
    delay_ms: float = 0.0
    """One way to the middle: the path between two sites takes the sum of both, the round trip twice that."""
    loss: float = 0.0
    """Probability with which a segment that leaves this site is lost."""


def available() -> str:
    """Why no `Wan` can be built here; empty if one can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    for tool in ("ip", "nsenter", "setpriv", "unshare"):
        if shutil.which(tool) is None:
            return f"the command {tool!r} is not installed (iproute2, util-linux)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "/dev/net/tun is missing or closed to us"
    probe = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True)
    return "" if probe.returncode == 0 else f"no network namespace can be made: {probe.stderr.strip()}"


class Wan:
    """Sites and the relay between them, from creation until `close` (or the end of the process)."""

    def __init__(self, sites: Mapping[str, Site], seed: int = 0) -> None:
        reason = available()
        if reason:
            raise WanError(reason)
        self.names = list(sites)
        self._control, theirs = socket.socketpair()
        self._relay = subprocess.Popen(
            [sys.executable, str(RELAY), str(seed), json.dumps([asdict(s) for s in sites.values()])],
            stdin=theirs,
            start_new_session=True,  # Ctrl-C is for us: the relay ends when we do
        )
        theirs.close()
        self._lines = self._control.makefile("r")
        try:
            self._spaces = [os.open(f"/proc/{self._relay.pid}/fd/{n}", os.O_RDONLY) for n in self._answer()]
        except BaseException:
            self._spaces = []
            self.close()
            raise

    def __enter__(self) -> Wan:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def address(self, site: str) -> str:
        return address_of(self._index(site))

    def enter(self, site: str) -> list[str]:
        """The words before a command that put it into a site. Whoever starts it sees that it ends."""
        return ["nsenter", f"--net=/proc/{os.getpid()}/fd/{self._spaces[self._index(site)]}", "--"]

    def set_ipv4(self, name: str, value: str) -> None:
        """Set `net.ipv4.NAME` in all sites, for the connections that are made from then on."""
        for site in self.names:
            write = ["sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{name}"]
            subprocess.run([*self.enter(site), *write], check=True)

    def popen(self, site: str, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command in a site; it is killed when the calling thread ends, and when this network is closed."""
        return subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *self.enter(site), *argv], **options)

    def cut(self, a: str, b: str) -> None:
        """Lose everything between two sites, in both directions, what is on the way included."""
        self._ask("cut", a, b)

    def heal(self, a: str, b: str) -> None:
        self._ask("heal", a, b)

    def isolate(self, site: str) -> None:
        """Cut a site off from all others."""
        for other in self.names:
            if other != site:
                self.cut(site, other)

    def set_rate(self, site: str, *, up_mbit: float, down_mbit: float) -> None:
        self._ask("rate", site, up_mbit, down_mbit)

    def set_delay(self, a: str, b: str, one_way_ms: float) -> None:
        """Give one pair another delay than the sum of its sites'."""
        self._ask("delay", a, b, one_way_ms)

    def stats(self) -> dict[str, dict[str, int]]:
        """Of each site: bytes sent and received, segments lost by chance, dropped by full buffers, and cut."""
        return dict(zip(self.names, self._ask("stats"), strict=True))

    def late_s(self) -> float:
        """For how long, in sum, this machine kept the relay from running when it had to: then links carried less."""
        late_s: float = self._ask("late")
        return late_s

    def close(self) -> None:
        """Kill what runs in the sites, and take the network down. Idempotent."""
        self._lines.close()
        self._control.close()
        try:
            self._relay.wait(END_S)
        except subprocess.TimeoutExpired:
            self._relay.kill()
            self._relay.wait()
        for space in self._spaces:
            os.close(space)
        self._spaces = []

    def _index(self, site: str) -> int:
        if site not in self.names:
            raise WanError(f"there is no site {site!r}; there are {', '.join(self.names)}")
        return self.names.index(site)

    def _ask(self, what: str, *arguments: str | float) -> Any:
        numbers = [self._index(a) if isinstance(a, str) else a for a in arguments]
        self._control.sendall(json.dumps([what, *numbers]).encode() + b"\n")
        return self._answer()

    def _answer(self) -> Any:
        line = self._lines.readline()
        if not line:
            raise WanError(f"the relay has ended ({self._relay.wait(END_S)}); its error stands above")
        return json.loads(line)


def address_of(index: int) -> str:
    """In every site's own world."""
    return f"10.77.0.{index + 1}"
