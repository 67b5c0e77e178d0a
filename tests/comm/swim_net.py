"""A virtual network for membership machines: virtual clock, seeded latency and loss, cuts, crashes, freezes.

Machines are wired directly; every message passes through its wire form, so what they send is what can be sent. The
transcript holds one line per change that a machine reports, with its virtual time.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dlc.comm.effects import Answer, Dial, Effect, Notify, Send
from dlc.comm.ids import Voter
from dlc.comm.membership import Membership
from dlc.comm.messages import Hello, Record, Welcome
from dlc.comm.timeouts import Timeouts
from dlc.comm.wire import pack, unpack


def record_of(name: str, inc: int = 1) -> Record:
    return Record(
        voter=Voter(name, inc << 32),
        public_key=name.encode(),
        control=(f"{name}:1",),
        bulk=(f"{name}:2",),
        role="trainer",
        head=b"",
        tokens=0.0,
        depth=0,
        active=False,
        synced=False,
        speed=0.0,
        eta_s=-1.0,
        seq=0,
        left=False,
    )


def seal(record: Record) -> bytes:
    """A stand-in for a signature: checks of it are as strict, and cheap."""
    return b"sealed by " + pack(replace(record, signature=b""))[:64] + str(record.seq).encode()


def verify(record: Record) -> bool:
    return record.signature == seal(record)


def signed(record: Record, **changes: Any) -> Record:
    record = replace(record, **changes)
    return replace(record, signature=seal(record))


class Host:
    """One process: its machine, and what the network does to it."""

    def __init__(self, net: Net, name: str, inc: int, bootstrap: tuple[str, ...]) -> None:
        self.name = name
        self.signed = 0
        self.frozen = False
        self.inbox: list[tuple[Host | None, Voter, object]] = []
        self.due: float | None = None
        self.machine = Membership(
            record_of(name, inc),
            sign=self._sign,
            verify=verify,
            hello=self._hello,
            rng=random.Random(f"{net.seed} {name} {inc}"),
            timeouts=net.timeouts,
            bootstrap=bootstrap,
            now=net.now,
        )
        self.voter = self.machine.own.voter

    def _sign(self, record: Record) -> Record:
        self.signed += 1
        return replace(record, signature=seal(record))

    def _hello(self) -> Hello:
        return Hello(1, "run", b"", self.machine.own, "")


class Net:
    def __init__(self, seed: int = 0, loss: float = 0.0, latency_s: tuple[float, float] = (0.01, 0.05)) -> None:
        self.seed, self.loss, self.latency_s = seed, loss, latency_s
        self.timeouts = Timeouts()
        self.now = 1000.0
        self.hosts: dict[str, Host] = {}
        self.cut: set[tuple[str, str]] = set()
        """(from, to) that loses everything."""
        self.log: list[tuple[float, str, str, str]] = []
        """(time, at whom, what, about whom)"""
        self.sent: dict[str, int] = {}
        """How many messages of each class."""
        self.tap: list[tuple[str, str, object]] | None = None
        """If set, every message that is sent, with its sender and receiver."""
        self._rng = random.Random(seed)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._tie = 0

    # ------------------------------------------------------------------ faults

    def start(self, name: str, *bootstrap: str, inc: int = 1) -> Host:
        """A new process; with the name of an old one, in its place."""
        host = self.hosts[name] = Host(self, name, inc, tuple(f"{b}:1" for b in bootstrap))
        self._tick(host)
        return host

    def crash(self, name: str) -> None:
        del self.hosts[name]

    def freeze(self, name: str) -> None:
        self.hosts[name].frozen = True

    def thaw(self, name: str) -> None:
        """What came meanwhile lies in its sockets."""
        host = self.hosts[name]
        host.frozen = False
        inbox, host.inbox = host.inbox, []
        self._tick(host)
        for origin, sender, message in inbox:
            self._handle(host, origin, sender, message)

    def part(self, left: str, right: str) -> None:
        """No message between any of `left` and any of `right` (one letter each), in both directions."""
        self.cut |= {(a, b) for a in left for b in right} | {(b, a) for a in left for b in right}

    # ------------------------------------------------------------------ time

    def run(self, seconds: float) -> None:
        self.run_until(lambda: False, seconds)

    def run_until(self, condition: Callable[[], bool], limit_s: float) -> float:
        """Virtual seconds until `condition` holds; `limit_s` if it does not."""
        start = self.now
        while not condition():
            if not self._queue or self._queue[0][0] > start + limit_s:
                self.now = start + limit_s
                break
            self.now, _, act = heapq.heappop(self._queue)
            act()
        return self.now - start

    def _at(self, when: float, act: Callable[[], None]) -> None:
        self._tie += 1
        heapq.heappush(self._queue, (when, self._tie, act))

    # ------------------------------------------------------------------ questions

    def alive(self, name: str) -> str:
        """Whom this host holds alive, as sorted letters; itself not listed."""
        machine = self.hosts[name].machine
        return "".join(
            sorted(r.voter.peer for r in machine.records() if r.voter.peer != name and machine.alive(r.voter))
        )

    def all_alive(self, *groups: str) -> bool:
        """Within each group everybody holds exactly the others of the group alive."""
        return all(self.alive(name) == "".join(sorted(set(g) - {name})) for g in groups for name in g)

    def said(self, what: str) -> set[tuple[str, str]]:
        """(at whom, about whom) of all changes of this kind so far."""
        return {(at, whom) for _, at, kind, whom in self.log if kind == what}

    # ------------------------------------------------------------------ the wires

    def _tick(self, host: Host) -> None:
        if self.hosts.get(host.name) is host and not host.frozen:
            self.carry_out(host, host.machine.tick(self.now))

    def _handle(self, host: Host, origin: Host | None, sender: Voter, message: object) -> None:
        if self.hosts.get(host.name) is not host:
            return
        if host.frozen:
            host.inbox.append((origin, sender, message))
        elif isinstance(message, Hello):
            assert message.record is not None
            effects = host.machine.learn(message.record, self.now)
            own, others = host.machine.own, tuple(host.machine.records())
            effects.append(Answer(Welcome(1, "run", b"", own, others, message.address, "")))
            self.carry_out(host, effects, origin)
        else:
            self.carry_out(host, host.machine.receive(sender, message, self.now), origin)

    def carry_out(self, host: Host, effects: list[Effect], origin: Host | None = None) -> None:
        for effect in effects:
            match effect:
                case Notify(event):
                    voter: Voter = event.voter  # type: ignore[attr-defined]
                    self.log.append((self.now, host.name, type(event).__name__, voter.peer))
                case Send(to, message):
                    self._send(host, to, message)
                case Dial(address, message):
                    assert isinstance(message, Hello)
                    self._send(host, address.split(":")[0], replace(message, address=address))
                case Answer(message):
                    assert origin is not None
                    self._send(host, origin.name, message, origin)
        due = host.machine.next_deadline()
        if due is not None and due != host.due:
            host.due = due
            self._at(max(due, self.now), lambda: self._due(host, due))

    def _due(self, host: Host, due: float) -> None:
        if host.due == due:
            host.due = None
            self._tick(host)

    def _send(self, host: Host, name: str, message: object, to: Host | None = None) -> None:
        to = to or self.hosts.get(name)
        kind = type(message)
        self.sent[kind.__name__] = self.sent.get(kind.__name__, 0) + 1
        lost = self._rng.random() < self.loss
        delay_s = self._rng.uniform(*self.latency_s)
        if self.tap is not None:
            self.tap.append((host.name, name, message))
        if to is None or lost or (host.name, to.name) in self.cut:
            return
        sender, data = host.voter, pack(message)
        self._at(self.now + delay_s, lambda: self._handle(to, host, sender, unpack(data, kind)))


def swarm(names: str, seed: int = 0, **faults: Any) -> Net:
    """All started at once, knowing the first; back when everybody holds everybody alive, and everybody votes."""
    net = Net(seed, **faults)
    for name in names:
        net.start(name, names[0])
    net.run_until(lambda: net.all_alive(names), 20)
    assert net.all_alive(names), {name: net.alive(name) for name in names}
    electorate = [host.voter for host in net.hosts.values()]
    for host in net.hosts.values():
        host.machine.watch(electorate)
    net.log.clear()
    return net
