"""Membership of many peers on the virtual clock: what it costs each of them, and how soon a death is known to all.

The machines are those that real peers run (`dlc.comm.membership`), without a log, so that nobody watches an electorate;
every message passes through its wire form. Signatures have their length, and are not checked.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass

from dlc.comm.effects import Effect, Notify, Send
from dlc.comm.events import MemberDown
from dlc.comm.ids import Voter
from dlc.comm.membership import Membership
from dlc.comm.messages import Hello, Welcome
from dlc.comm.timeouts import Timeouts
from dlc.comm.wire import pack, unpack
from dlc.sim.meshnet import record_of
from dlc.sim.network import Clock, Network, Weather

SIGNATURE = b"s" * 64
SETTLE_S, MEASURED_S = 10.0, 10.0
LIMIT_S = 120.0


@dataclass(frozen=True)
class Watch:
    """What membership took."""

    n: int
    sent_Bps: float
    """Bytes of messages that each peer sends a second while nothing changes, on average; headers of TCP left aside."""
    seconds: float
    """From a crash to the moment at which the last of the others took the peer for dead."""


class Host:
    def __init__(self, net: SwimNet, i: int) -> None:
        self.net, self.name = net, f"p{i:04}"
        record = dataclasses.replace(  # as long as a real one
            record_of(Voter(self.name, 1)),
            public_key=b"k" * 32,
            control=(f"198.51.100.{i % 250}:{4000 + i}",),
            bulk=(f"198.51.100.{i % 250}:{4001 + i}",),
            head=b"h" * 32,
        )
        self.machine = Membership(
            record,
            sign=lambda r: dataclasses.replace(r, signature=SIGNATURE),
            verify=lambda r: True,
            hello=lambda: Hello(1, "run", b"", self.machine.own, ""),
            rng=random.Random(f"{net.seed} {i}"),
            timeouts=Timeouts(),
            bootstrap=(),
            now=net.clock.now,
        )
        self.dead = False
        self.due = float("inf")
        self.down: set[str] = set()
        """Whom it takes for dead."""


class SwimNet:
    """n peers that know each other from the start."""

    def __init__(self, n: int, seed: int) -> None:
        self.seed, self.clock = seed, Clock()
        self.clock.now = 1000.0
        self.network = Network(self.clock, random.Random(seed), Weather(0.01, 0.08))
        self.hosts = {host.name: host for host in (Host(self, i) for i in range(n))}
        self.sent_bytes = 0
        records = [host.machine.own for host in self.hosts.values()]
        for host in self.hosts.values():
            others = tuple(record for record in records if record.voter.peer != host.name)
            table = Welcome(1, "run", b"", None, others, "", "")
            self._carry_out(host, host.machine.receive(host.machine.me, table, self.clock.now))
            self.clock.at(self.clock.now + random.Random(f"{seed} {host.name}").random(), self._tick, host)

    def run(self, seconds: float) -> None:
        self.clock.run_until(self.clock.now + seconds, 1 << 40)

    def _tick(self, host: Host) -> None:
        if not host.dead:
            self._carry_out(host, host.machine.tick(self.clock.now))

    def _carry_out(self, host: Host, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                data = pack(effect.message)
                self.sent_bytes += len(data)
                target = self.hosts[effect.to]
                self.network.carry(
                    host.name, effect.to, self._arrive, target, host.machine.me, data, type(effect.message)
                )
            elif isinstance(effect, Notify) and isinstance(effect.event, MemberDown):
                host.down.add(effect.event.voter.peer)
        due = host.machine.next_deadline()
        if due is not None and due != host.due:
            host.due = due
            self.clock.at(due, self._due, host, due)

    def _due(self, host: Host, due: float) -> None:
        if host.due == due:
            host.due = float("inf")
            self._tick(host)

    def _arrive(self, host: Host, sender: Voter, data: bytes, kind: type) -> None:
        if not host.dead:
            self._carry_out(host, host.machine.receive(sender, unpack(data, kind), self.clock.now))


def membership(n: int, seed: int) -> Watch:
    net = SwimNet(n, seed)
    net.run(SETTLE_S)
    before = net.sent_bytes
    net.run(MEASURED_S)
    sent_Bps = (net.sent_bytes - before) / n / MEASURED_S
    victim, *others = net.hosts.values()
    victim.dead, start = True, net.clock.now
    while not all(victim.name in host.down for host in others):
        if net.clock.now > start + LIMIT_S:
            raise AssertionError(f"not all of {n} peers took the dead one for dead within {LIMIT_S:g} s")
        net.run(0.1)
    return Watch(n, sent_Bps, net.clock.now - start)
