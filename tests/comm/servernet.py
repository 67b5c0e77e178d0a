"""Helpers and trainers of a parameter server on a virtual clock: real nodes without a log, a seeded network, faults.

The nodes are `dlc.comm.node.Node`, membership and all; only clock, network and application are stand-ins. `hook` sees
every message before it leaves, and may let something happen at that very step.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

from dlc.comm import messages as msg
from dlc.comm.effects import Answer, Dial, Effect, Notify, Send
from dlc.comm.grid import Grid
from dlc.comm.ids import Voter
from dlc.comm.node import Node, NodeConfig
from dlc.comm.server import SpanServer
from dlc.comm.serverclient import SpanClient
from dlc.comm.serverexchange import ExchangeOver, History, Outcome, Paused
from dlc.comm.servermessages import COUNTED
from dlc.comm.spanowner import Rules
from dlc.comm.spans import Spans, assign
from dlc.comm.spanstate import Optimizer
from dlc.comm.timeouts import Timeouts
from dlc.comm.wire import pack, unpack
from dlc.errors import ProtocolError
from dlc.sim.network import Clock, Network, Weather
from dlc.train.outer_step import Sgd


class Sum(Sgd):
    """Each push moves theta by itself, whoever else pushes: what was counted can be read from theta."""

    def apply(self, t: int, lr: float, theta: Tensor, moments: Sequence[Tensor], g: Tensor, x: Tensor) -> None:
        super().apply(t, 1.0, theta, moments, g, x)


SPANS = Spans(Grid(60, 8, "fp32"), 4)
PLAIN = Optimizer("sgd", Sgd(), lambda t: 1.0)
ASYNC = Optimizer("async sum", Sum(), lambda t: 1.0, asynchronous=True)
UPLINK_Bps = 1e6
EVENTS_MAX = 2_000_000


class Process:
    def __init__(
        self,
        net: Net,
        name: str,
        role: str,
        inc: int,
        theta: Tensor | None,
        step: int = 0,
        history: History | None = None,
    ) -> None:
        self.net, self.name, self.role = net, name, role
        self.voter = Voter(name, (inc << 32) + inc)
        self.running, self.frozen = True, False
        self.inbox: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self.news: list[object] = []
        self.uplink_busy = False
        self.tick_at = float("inf")
        record = msg.Record(
            voter=self.voter, public_key=b"", control=(name,), bulk=(name,), role=role, head=bytes(32), tokens=0.0,
            depth=0, active=False, synced=False, speed=0.0, eta_s=-1.0, seq=0, left=False,
        )  # fmt: skip
        config = NodeConfig(
            "net", b"spec", b"spec", net.bootstrap(name), False, net.timeouts, log=False, probe_links=False
        )
        rng = random.Random(f"{net.seed} {name} {inc}")
        self.node = Node(record, config, sign=lambda r: r, verify=lambda r: True, rng=rng, now=net.now)
        self.service: Any
        if role == "helper":
            self.service = SpanServer(self.node.members, net.optimizer, net.rules, net.now)
        else:
            assert theta is not None
            digest = blake3(theta.numpy().tobytes()).digest(16)
            asynchronous = net.rules.asynchronous
            self.service = SpanClient(self.node.members, net.spans, theta, digest, asynchronous, net.now, step, history)
        self.node.services.add(self.service)

    @property
    def exchanges(self) -> list[ExchangeOver]:
        return [news for news in self.news if isinstance(news, ExchangeOver)]

    def begin(self, vector: Tensor | None, weight: float = 1.0) -> None:
        self.net.act(self, lambda now: self.node.serve(lambda: self.service.begin(vector, weight, now), now))

    @property
    def paused(self) -> bool:
        """It was told so last."""
        told = [news for news in self.news if isinstance(news, Paused)]
        return bool(told and told[-1].spans)

    def outcomes(self) -> tuple[Outcome, ...]:
        return self.exchanges[-1].outcomes


class Net:
    def __init__(
        self,
        seed: int = 0,
        asynchronous: bool = False,
        max_staleness: int = 100,
        loss: float = 0.0,
        spans: Spans = SPANS,
        optimizer: Optimizer | None = None,
        patience_s: float = 2.0,
    ) -> None:
        self.seed, self.spans = seed, spans
        self.optimizer = optimizer or (ASYNC if asynchronous else PLAIN)
        self.rules = Rules(asynchronous, max_staleness, patience_s)
        self.timeouts = Timeouts()
        self.clock = Clock()
        weather = Weather(0.005, 0.05, loss=loss, duplicates=loss)
        self.network = Network(self.clock, random.Random(f"network {seed}"), weather)
        self.processes: dict[str, Process] = {}
        self.hook: Callable[[Process, str, object], None] = lambda source, target, message: None
        self.lost: Callable[[Process, str, object], bool] = lambda source, target, message: False
        """Which messages do not arrive."""
        self.may_refuse = False
        """Some messages are refused, as they should be; else that is an error of the test."""
        self._boots: dict[str, int] = {}

    @property
    def now(self) -> float:
        return self.clock.now

    def bootstrap(self, name: str) -> tuple[str, ...]:
        return tuple(n for n in self.processes if n != name)[:3]

    def start(self, name: str, theta: Tensor | None = None, step: int = 0, history: History | None = None) -> Process:
        """A new process; helpers are those whose names begin with h. `step`, `history`: of a trainer's checkpoint."""
        self._boots[name] = self._boots.get(name, 0) + 1
        role = "helper" if name.startswith("h") else "trainer"
        if role == "trainer" and theta is None:
            theta = torch.zeros(self.spans.grid.numel)
        process = Process(self, name, role, self._boots[name], theta, step, history)
        self.processes[name] = process
        self._arm(process)
        return process

    # ---------------------------------------------------------------- running

    def until(self, condition: Callable[[], object], limit_s: float = 120.0, what: str = "") -> None:
        end, events_max = self.now + limit_s, self.clock.events + EVENTS_MAX
        while not condition():
            assert self.clock.step() and self.now < end, f"not within {limit_s:g} s: {what}"
            assert self.clock.events < events_max, f"a storm of messages: {what}"

    def run(self, seconds: float) -> None:
        assert self.clock.run_until(self.now + seconds, EVENTS_MAX + self.clock.events)

    def act(self, process: Process, act: Callable[[float], list[Effect]]) -> None:
        self._perform(process, act(self.now))
        self._settle(process)

    def _perform(self, process: Process, effects: list[Effect], answer_to: str = "") -> None:
        for effect in effects:
            if isinstance(effect, Notify):
                process.news.append(effect.event)
            elif isinstance(effect, Send | Dial | Answer):
                to = effect.to if isinstance(effect, Send) else getattr(effect, "address", answer_to)
                self._carry(process, to, effect.message, bulk=False)

    def _carry(self, process: Process, to: str, message: Any, bulk: bool) -> None:
        if not process.running:
            return
        self.hook(process, to, message)
        if process.running and not process.frozen and not self.lost(process, to, message):  # the hook may have struck
            wired = unpack(pack(message), type(message)) if not bulk else message
            self.network.carry(process.name, to, self._deliver, to, process.voter, process.name, wired, bulk=bulk)

    def _deliver(self, to: str, sender: Voter, source: str, message: object) -> None:
        target = self.processes.get(to)
        if target is None or not target.running:
            return
        if target.frozen:
            target.inbox.append((self._deliver, (to, sender, source, message)))
            return
        try:
            effects = target.node.receive(sender, message, self.now)
        except ProtocolError:
            if not self.may_refuse:
                raise
            return
        self._perform(target, effects, source)
        self._settle(target)

    def _settle(self, process: Process) -> None:
        self._arm(process)
        self._pull(process)

    def _arm(self, process: Process) -> None:
        due = max(process.node.next_deadline(), self.now + 1e-3)
        if due < process.tick_at:
            process.tick_at = due
            self.clock.at(due, self._tick, process, due)

    def _tick(self, process: Process, due: float) -> None:
        if not process.running or due != process.tick_at:
            return
        if process.frozen:
            process.inbox.append((self._tick, (process, due)))
            return
        process.tick_at = float("inf")
        self.act(process, process.node.tick)

    def _pull(self, process: Process) -> None:
        if process.uplink_busy or not process.running or process.frozen:
            return
        for peer in sorted(process.node.pending_bulk()):
            message = process.node.next_bulk(peer)
            if message is not None:
                process.uplink_busy = True
                size = len(message.payload) + 100  # type: ignore[attr-defined]
                self.clock.at(self.now + size / UPLINK_Bps, self._left, process, peer, message)
                return

    def _left(self, process: Process, peer: str, message: msg.Bulk) -> None:
        process.uplink_busy = False
        self._carry(process, peer, message, bulk=True)
        self._pull(process)

    # ---------------------------------------------------------------- faults

    def kill(self, process: Process) -> None:
        process.running = False

    def freeze(self, process: Process, for_s: float) -> None:
        process.frozen = True
        self.clock.at(self.now + for_s, self.thaw, process)

    def thaw(self, process: Process) -> None:
        if not process.frozen or not process.running:
            return
        process.frozen = False
        inbox, process.inbox = process.inbox, deque()
        for act, args in inbox:
            act(*args)
        self._settle(process)

    # ---------------------------------------------------------------- questions

    def helpers(self) -> list[Process]:
        return [p for p in self.processes.values() if p.role == "helper" and p.running and not p.frozen]

    def trainers(self) -> list[Process]:
        return [p for p in self.processes.values() if p.role == "trainer" and p.running and not p.frozen]

    def owners(self, span: int) -> list[Process]:
        return [p for p in self.helpers() if span in p.service.owned]

    def owner(self, span: int = 0) -> Process:
        (found,) = self.owners(span)
        return found

    def standby(self, span: int = 0) -> Process | None:
        voter = self.owner(span).service.seats[span].owner.view.standby
        return None if voter is None else self.processes[voter.peer]

    def served(self, standbys: bool = True) -> bool:
        """Every span has one owner, with a standby that holds all, and the helpers agree about it."""
        for span in range(self.spans.n):
            owners = self.owners(span)
            if len(owners) != 1:
                return False
            owner = owners[0].service.seats[span].owner
            if any(p.service.witness.established.get(span) != owner.view for p in self.helpers()):
                return False
            if standbys and (owner.view.standby is None or not owner.holds_all(owner.view.standby)):
                return False
        return True

    def at_rest(self) -> bool:
        """Served, by those who should."""
        if not self.helpers() or not self.served(len(self.helpers()) > 1):
            return False
        wanted = assign(self.spans.n, tuple(sorted(h.name for h in self.helpers())))
        views = [self.owner(span).service.seats[span].owner.view for span in range(self.spans.n)]
        return wanted == tuple((v.owner.peer, v.standby.peer if v.standby else None) for v in views)

    def check_replicas(self) -> None:
        """Owner and standby hold the same bits, span by span."""
        for span in range(self.spans.n):
            standby = self.standby(span)
            if standby is not None:
                mine = self.owner(span).service.seats[span].owner.state
                theirs = standby.service.seats[span].replica.state
                assert theirs.version == mine.version and theirs.digest() == mine.digest(), f"span {span}"

    def exchange(self, vectors: dict[str, Tensor | None], limit_s: float = 200.0) -> None:
        """Let these trainers exchange, all at once, until they are through."""
        before = {name: len(self.processes[name].exchanges) for name in vectors}
        for name, vector in vectors.items():
            self.processes[name].begin(vector)
        self.until(
            lambda: all(len(self.processes[name].exchanges) > n for name, n in before.items()),
            limit_s,
            f"exchange of {', '.join(vectors)}",
        )

    def theta(self) -> Tensor:
        """What the owners hold together."""
        return torch.cat([self.owner(span).service.seats[span].owner.state.theta for span in range(self.spans.n)])


def counted(process: Process, spans: Spans = SPANS) -> Tensor:
    """1 for each element whose push counted in the last exchange, as the trainer was told."""
    ones = torch.zeros(spans.grid.numel)
    for outcome in process.outcomes():
        a, b = spans.elements(outcome.span)
        ones[a:b] = float(outcome.outcome == COUNTED)
    return ones
