"""The machines outside the log on a virtual clock: latency, loss, uplinks of a stated rate, death and freezes.

    net = MeshNet(seed=1, loss=0.05)
    hosts = net.add(8)
    net.act(hosts[0], lambda mesh, now: mesh.post("key", b"value", 60.0, now))
    net.until(lambda: all(...))

Control messages pass through their wire form. Bulk leaves a host one message at a time at its uplink's rate. Who is up
is told by the net itself, DETECT_S after the fact: membership is tested elsewhere (the simulator's worlds, swim_net).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from dlc.comm.effects import Effect, Notify, Send
from dlc.comm.events import MemberDown, MemberLeft, MemberUp
from dlc.comm.ground import Ground
from dlc.comm.ids import PeerId, Voter
from dlc.comm.mesh import Mesh
from dlc.comm.messages import Bulk, Record
from dlc.comm.rates import Rates
from dlc.comm.service import MemberEvent
from dlc.comm.wire import pack, unpack
from dlc.errors import ProtocolError
from dlc.sim.network import Clock, Network, Weather

DETECT_S = 3.0
TICK_S_MIN, TICK_S_MAX = 0.005, 0.9
"""A node is ticked more often than each second, so that its running time goes on."""
HEADER_BYTES = 100
"""Of a bulk message, beside its payload."""


def record_of(voter: Voter) -> Record:
    return Record(
        voter,
        b"",
        (f"{voter.peer}:1",),
        (f"{voter.peer}:2",),
        "trainer",
        b"",
        0.0,
        0,
        False,
        False,
        0.0,
        -1.0,
        0,
        False,
    )


class Seen:
    """What one host knows of the others: answers `Members`."""

    def __init__(self, me: Voter, net: MeshNet) -> None:
        self.me, self._net = me, net
        self.down: set[Voter] = set()
        self.left: set[Voter] = set()
        self.relays: dict[PeerId, PeerId] = {}
        self._records: list[Record] = []
        self._for = -1

    def alive(self, voter: Voter) -> bool:
        return self.up(voter)

    def up(self, voter: Voter) -> bool:
        return voter in self._net.voters and voter not in self.down and voter not in self.left

    def gone(self, voter: Voter) -> bool:
        return voter in self.left

    def record(self, peer: PeerId) -> Record | None:
        host = self._net.hosts.get(peer)
        return None if host is None or host.voter in self.left else host.record

    def records(self) -> list[Record]:
        if self._for != self._net.version:
            self._for = self._net.version
            hosts = [h for h in self._net.hosts.values() if h.voter not in self.left and h.voter != self.me]
            self._records = [self._net.hosts[self.me.peer].record, *(h.record for h in hosts)]
        return self._records

    def relay_for(self, peer: PeerId) -> PeerId | None:
        return self.relays.get(peer)

    def rtt_s(self, peer: PeerId) -> float:
        return self._net.rtt_s

    @property
    def t_dead_s(self) -> float:
        return DETECT_S


class Host:
    def __init__(self, net: MeshNet, name: str, inc: int, up_Bps: float) -> None:
        self.voter, self.up_Bps = Voter(name, inc), up_Bps
        self.record = record_of(self.voter)
        self.seen = Seen(self.voter, net)
        self.mesh = Mesh(Ground(self.voter, self.seen, Rates(), random.Random(f"{net.seed} {name} {inc}")))
        self.told: list[object] = []
        self.heard: Callable[[object], None] = self.told.append
        """Called with what its machines tell."""
        self.dead = self.frozen = False
        self.sending = False
        self.due = float("inf")
        self.inbox: list[tuple[Voter, Any]] = []
        self.bulk_bytes = self.control_bytes = 0
        self.bad: list[str] = []

    @property
    def name(self) -> PeerId:
        return self.voter.peer


class MeshNet:
    def __init__(
        self,
        seed: int = 0,
        *,
        loss: float = 0.0,
        duplicates: float = 0.0,
        latency_s: tuple[float, float] = (0.005, 0.05),
        detect_s: float = DETECT_S,
        ordered: bool = False,
    ) -> None:
        """ordered: of what one host sends another nothing overtakes, as on the connection between them."""
        self.seed, self.detect_s = seed, detect_s
        self.rtt_s = 2 * latency_s[1]
        self.clock = Clock()
        self.clock.now = 1000.0
        weather = Weather(
            latency_min_s=latency_s[0], latency_max_s=latency_s[1], loss=loss, duplicates=duplicates, ordered=ordered
        )
        self.network = Network(self.clock, random.Random(seed), weather)
        self.hosts: dict[PeerId, Host] = {}
        self.voters: set[Voter] = set()
        self.version = 0
        self.sent: Counter[str] = Counter()
        self.tamper: Callable[[str, str, Any], Any] = lambda source, target, message: message
        """Changes a message on its way, or drops it (None)."""

    @property
    def now(self) -> float:
        return self.clock.now

    # ---------------------------------------------------------------- who is there

    def add(self, n: int, up_Bps: float = 1e6) -> list[Host]:
        """n peers that know each other from the start: nobody has posted anything that others would have to see."""
        first = len(self.hosts)
        hosts = [Host(self, f"p{first + i:04}", 1, up_Bps) for i in range(n)]
        for host in hosts:
            self.hosts[host.name] = host
            self.voters.add(host.voter)
        self.version += 1
        for host in hosts:
            self._tick(host)
        return hosts

    def start(self, name: str, inc: int = 1, up_Bps: float = 1e6) -> Host:
        """A new process; with the name of an old one, in its place."""
        host, before = Host(self, name, inc, up_Bps), self.hosts.get(name)
        self.hosts[name] = host
        self.voters.add(host.voter)
        self.version += 1
        for other in list(self.hosts.values()):
            if other is not host:
                if before is not None:
                    other.seen.left.add(before.voter)
                    self._tell(other, MemberDown(before.voter))
                self._tell(other, MemberUp(host.voter))
                self._tell(host, MemberUp(other.voter))
        self._tick(host)
        return host

    def kill(self, host: Host) -> None:
        host.dead = True
        self._unseen(host)

    def freeze(self, host: Host) -> None:
        host.frozen = True
        self._unseen(host)

    def thaw(self, host: Host) -> None:
        host.frozen = False
        for other in self.hosts.values():
            if host.voter in other.seen.down:
                other.seen.down.discard(host.voter)
                self._tell(other, MemberUp(host.voter))
        inbox, host.inbox = host.inbox, []
        for sender, message in inbox:
            self._deliver(host, sender, message)
        self._tick(host)
        self._pump(host)

    def leave(self, host: Host) -> None:
        host.dead = True
        for other in self.hosts.values():
            if other is not host:
                other.seen.left.add(host.voter)
                self._tell(other, MemberLeft(host.voter))
        del self.hosts[host.name]
        self.version += 1

    def cut(self, a: Host, b: Host, relay: Host) -> None:
        """No bulk passes between the two from now on. Messages do, by way of `relay`, as both know."""
        a.seen.relays[b.name] = b.seen.relays[a.name] = relay.name

    def _unseen(self, host: Host) -> None:
        def notice() -> None:
            if host.dead or host.frozen:
                for other in self.hosts.values():
                    if other is not host and host.voter not in other.seen.down:
                        other.seen.down.add(host.voter)
                        self._tell(other, MemberDown(host.voter))

        self.clock.at(self.now + self.detect_s, notice)

    def _tell(self, host: Host, event: MemberEvent) -> None:
        if not host.dead:
            self.carry_out(host, host.mesh.member(event, self.now))

    # ---------------------------------------------------------------- time

    def act(self, host: Host, command: Callable[[Mesh, float], list[Effect]]) -> None:
        self.carry_out(host, command(host.mesh, self.now))

    def until(self, condition: Callable[[], object], limit_s: float = 120.0) -> float:
        """Virtual seconds until it holds; AssertionError where it does not within `limit_s`."""
        start = self.now
        while not condition():
            assert self.clock.step() and self.now < start + limit_s, f"not within {limit_s:g} virtual seconds"
        return self.now - start

    def run(self, seconds: float) -> None:
        self.clock.run_until(self.now + seconds, 1 << 40)

    # ---------------------------------------------------------------- the wires

    def carry_out(self, host: Host, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._send(host, effect.to, effect.message)
            elif isinstance(effect, Notify):
                host.heard(effect.event)
        due = max(self.now + TICK_S_MIN, min(host.mesh.next_deadline(), self.now + TICK_S_MAX))
        if due < host.due - 1e-9 or host.due <= self.now:
            host.due = due
            self.clock.at(due, self._due, host, due)
        self._pump(host)

    def _due(self, host: Host, due: float) -> None:
        if host.due == due:
            host.due = float("inf")
            self._tick(host)

    def _tick(self, host: Host) -> None:
        if not (host.dead or host.frozen):
            self.carry_out(host, host.mesh.tick(self.now))

    def _send(self, host: Host, to: PeerId, message: Any) -> None:
        self.sent[type(message).__name__] += 1
        target = self.hosts.get(to)
        message = self.tamper(host.name, to, message)
        if target is None or message is None:
            return
        data, kind = pack(message), type(message)
        host.control_bytes += len(data)
        self.network.carry(host.name, to, self._arrive, target, host.voter, data, kind)

    def _arrive(self, host: Host, sender: Voter, data: bytes, kind: type) -> None:
        self._deliver(host, sender, unpack(data, kind))

    def _deliver(self, host: Host, sender: Voter, message: Any) -> None:
        if host.dead:
            return
        if host.frozen:
            host.inbox.append((sender, message))
            return
        try:
            effects = host.mesh.receive(sender, message, self.now)
        except ProtocolError as error:
            host.bad.append(str(error))
            effects = host.mesh.tick(self.now)
        self.carry_out(host, effects)

    def _pump(self, host: Host) -> None:
        """The uplink sends one message at a time, to one peer after the other."""
        if host.sending or host.dead or host.frozen:
            return
        for peer in list(host.mesh.pending_bulk()):
            message = host.mesh.next_bulk(peer)
            if message is not None:
                size = len(message.payload) + HEADER_BYTES  # type: ignore[attr-defined]
                host.sending = True
                host.bulk_bytes += size
                self.clock.at(self.now + size / host.up_Bps, self._left, host, peer, message)
                return

    def _left(self, host: Host, peer: PeerId, message: Bulk) -> None:
        host.sending = False
        target, changed = self.hosts.get(peer), self.tamper(host.name, peer, message)
        self.sent[type(message).__name__] += 1
        passes = peer not in host.seen.relays
        if target is not None and changed is not None and passes and not host.dead:
            self.network.carry(host.name, peer, self._deliver, target, host.voter, changed, bulk=True)
        self._pump(host)
