"""Peers on the virtual clock that average round by round, in groups that change, and train between the rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Protocol, cast

import torch

from dlc.comm.calls import Call, GoneOn, GroupDone, GroupFailed, GroupFormed, MeetingFailed
from dlc.comm.grid import Grid
from dlc.comm.ids import PeerId
from dlc.comm.roles import TRAINER
from dlc.comm.rotation import Turn
from dlc.moshpit import Moshpit
from dlc.peer import Peer
from dlc.places import Places
from dlc.runspec import RunSpec
from dlc.sim.meshnet import Host, MeshNet
from dlc.strategyspec import GossipSpec
from dlc.train.noloco import Pairs
from tests.comm.netpeer import NetPeer


@dataclass(frozen=True)
class Round:
    """As one peer saw it."""

    round: int
    ended: float
    others: frozenset[PeerId]
    """Who was to come."""
    met: frozenset[PeerId]
    """Who came."""
    waited_s: float


class Way(Protocol):
    """How one peer comes from round to round."""

    places: Places
    least: int
    """Fewer are no group."""

    def turn(self, away_s: float) -> tuple[Turn, str]:
        """The next round, and its group's key."""

    def passed(self, turn: Turn, met: bool) -> int:
        """It is over; the next one."""


class OnGrid:
    """As `dlc.Moshpit.step` goes."""

    least = 1

    def __init__(self, net: MeshNet, host: Host, patience_s: float, dims: int) -> None:
        self.pit = Moshpit(cast(Peer, NetPeer(net, host)), "m", dims=dims, matchmaking_s=patience_s)
        self.places = self.pit._places

    def turn(self, away_s: float) -> tuple[Turn, str]:
        stop = self.pit._stop(away_s)
        return stop.turn, stop.key

    def passed(self, turn: Turn, met: bool) -> int:
        self.pit._round = turn.round + 1
        return self.pit._round


class InPairs:
    """As NoLoCo goes."""

    least = 2

    def __init__(self, net: MeshNet, host: Host, patience_s: float) -> None:
        gossip = GossipSpec("random-pairs", "noloco", wait_s=patience_s)
        peer = NetPeer(net, host)
        self.pairs = Pairs(cast(Peer, peer), RunSpec(strategy="gossip", gossip=gossip, seed=net.seed))
        self.places, self.t = self.pairs._places, 1
        peer.members = lambda: [  # type: ignore[attr-defined]
            SimpleNamespace(id=name, alive=True, me=name == host.name, left=False, role=TRAINER) for name in net.hosts
        ]

    def turn(self, away_s: float) -> tuple[Turn, str]:
        turn = self.pairs._turn(self.t, away_s)
        return turn, f"pair/{turn.round}/{sorted({self.pairs._peer.id, *turn.others})}"

    def passed(self, turn: Turn, met: bool) -> int:
        self.t = (turn.round if met else self.t) + 1
        return self.t


class Stepper:
    """numel: of the vectors, 4 bytes each."""

    def __init__(
        self, net: MeshNet, host: Host, way: Way, patience_s: float, train_s: Callable[[], float], numel: int = 4
    ) -> None:
        self.net, self.host, self.way, self.patience_s, self.train_s = net, host, way, patience_s, train_s
        self.vector = torch.ones(numel)
        self.rounds: list[Round] = []
        host.heard = self._hear

    def begin(self) -> None:
        if not self.host.dead:
            self._began, self._away_s = self.net.now, self.way.places.comes()
            self._turn()

    def _turn(self) -> None:
        me, since = self.host.name, self.net.now
        turn, key = self.way.turn(self._away_s)
        self.turn, self.met = turn, frozenset[PeerId]()
        left_s = min(turn.patience_s, self._began + turn.patience_s + self.patience_s - since)
        if left_s <= 0 or not turn.others:
            self._end()
            return
        self.way.places.waits(turn)
        numel = self.vector.numel()
        call = Call(
            key,
            Grid(numel, max(4, numel // 64), "fp32"),
            self.vector,
            torch.empty(numel),
            least=self.way.least,
            expected=lambda: turn.awaited(self.way.places.ask(), self.net.now - since) | {me},
            show_to=(me, *turn.others),
            patience_s=left_s,
            budget_s=600.0,
        )
        self.net.act(self.host, lambda mesh, now: mesh.meet(call, now))

    def _hear(self, news: object) -> None:
        if isinstance(news, GroupFormed):
            self.met = frozenset(news.peers) - {self.host.name}
            self.way.places.averages(self.turn)
        elif isinstance(news, MeetingFailed) and isinstance(news.cause, GoneOn):
            self.net.clock.at(self.net.now, self._turn)
        elif isinstance(news, GroupDone | GroupFailed | MeetingFailed):
            self._end()

    def _end(self) -> None:
        now = self.net.now
        self.rounds.append(Round(self.turn.round, now, self.turn.others, self.met, now - self._began))
        after = self.way.passed(self.turn, bool(self.met))
        self.way.places.trains(after, self.turn.mates)
        self.net.clock.at(now + self.train_s(), self.begin)
