"""Gossip with `update = "noloco"`: slow weights with a momentum, averaged in random pairs (NoLoCo, arXiv:2506.10911).

    d      <- theta - phi                                                 what this peer learned since the last exchange
    m      <- mu m + lr mean(d) + pull (mean(phi) - phi)                  means over the pair
    phi    <- phi + m ;  theta <- phi

Pairs are a matching of the members that is drawn from the run's seed and the step. A partner that does not come within
`gossip.wait_s` is not waited for: the step is then taken alone, with means over one. Where the partner of a step has
passed it, this peer tries the partner's next one instead: who is a step behind would stay so, and meet nobody. If it
meets nobody there either, it has taken no more than its own step: two that never meet would count each other's.
Momentum and slow weights are each peer's own, and differ. What the codec cannot say of a peer's d and phi stays in the
means that it takes itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from dlc.comm import vectors
from dlc.comm.clock import clock
from dlc.comm.graphs import pairs
from dlc.comm.grid import Grid, usual_chunk_elems
from dlc.comm.ids import PeerId
from dlc.comm.meetings import GoneOn
from dlc.comm.roles import TRAINER
from dlc.errors import CheckpointError, RoundTimeout
from dlc.handover import Standing
from dlc.mesh import Group
from dlc.peer import Peer
from dlc.runspec import RunSpec
from dlc.train.averaging import EXCHANGE_S, NAME, Averaged, unsaid


def noloco_step(
    phi: Tensor, m: Tensor, d: Tensor, mean_d: Tensor, mean_phi: Tensor, lr: float, mu: float, pull: float
) -> None:
    """Move slow weights `phi` and momentum `m` in place; all flat fp32 of equal length, `mean_phi` is overwritten."""
    m.mul_(mu).add_(mean_d, alpha=lr).add_(mean_phi.sub_(phi), alpha=pull)
    phi.add_(m)


class Pairs:
    """See `averaging.Exchange`."""

    def __init__(self, peer: Peer, spec: RunSpec, standings: Callable[[], list[Standing]]) -> None:
        """standings: at which step each of the others is."""
        self._peer, self._spec, self._standings = peer, spec, standings
        self._phi = self._m = vectors.empty(0)

    def begin(self, vector: Tensor) -> None:
        self._phi, self._m = vector.clone(), torch.zeros_like(vector)

    def step(self, t: int, vector: Tensor) -> Averaged:
        gossip, began = self._spec.gossip, clock()
        d = vector - self._phi
        both = torch.cat((d, self._phi))
        averaged, own_t, waited_s = None, t, 0.0
        while averaged is None:
            t, partner = self._pair(t)
            tried = clock()
            averaged = self._with(partner, t, both, d) if partner else Averaged(t, ())
            waited_s += clock() - tried if averaged is None else averaged.waiting_s
        if not averaged.partners:
            averaged = replace(averaged, t=own_t)
        mean_d, mean_phi = both[: len(d)], both[len(d) :]
        lr, mu = gossip.outer_lr, gossip.outer_momentum
        noloco_step(self._phi, self._m, d, mean_d, mean_phi, lr, mu, gossip.pull)
        vector.copy_(self._phi)
        return replace(averaged, seconds=clock() - began, waiting_s=waited_s)

    def _with(self, partner: PeerId, t: int, both: Tensor, d: Tensor) -> Averaged | None:
        """Means over the pair in the place of `both`, d and phi; None: the partner has gone on meanwhile."""
        gossip, began = self._spec.gossip, clock()
        group = Group(
            self._peer,
            f"{NAME}/noloco",
            peers=(self._peer.id, partner),
            matchmaking_s=gossip.wait_s,
            codec=self._spec.codec,
            expected=partial(self._awaited, partner, t),
        )
        try:
            report = group.all_reduce(both, tag=str(t), timeout_s=gossip.wait_s + EXCHANGE_S)
        except RoundTimeout as error:
            if isinstance(error.__cause__, GoneOn):
                return None
            return Averaged(t, (), {partner: "did not come"}, waiting_s=clock() - began)
        self._keep_unsaid(both, d)
        return Averaged(
            t,
            tuple(share.peer for share in report.contributors if share.peer != self._peer.id),
            {absent.peer: absent.reason for absent in report.missing},
            report.bytes_sent,
            report.bytes_received,
            waiting_s=report.waiting_s,
        )

    def _pair(self, t: int) -> tuple[int, PeerId]:
        """The step to be taken, `t` or one that nobody to be met has left behind, and with whom; empty where this peer
        is left over, or none is left before the end of the run."""
        while True:
            partner = self._partner(t) if t <= (self._spec.rounds or t) else ""
            passed = self._passed(partner, t)
            if passed is None:
                return t, partner
            t = passed + 1

    def _passed(self, partner: PeerId, t: int) -> int | None:
        """Where the partner of step `t` stands if it will not come to that; None: it may."""
        return next((s.t for s in self._standings() if s.voter.peer == partner and s.t >= t), None)

    def _awaited(self, partner: PeerId, t: int) -> tuple[PeerId, ...]:
        """On the peer's driver thread, while this peer waits."""
        if self._passed(partner, t) is not None:
            raise GoneOn
        return self._peer.id, partner

    def _keep_unsaid(self, means: Tensor, d: Tensor) -> None:
        """means: of d and phi, as all_reduce gave them."""
        n, grid = d.numel(), Grid(means.numel(), usual_chunk_elems(means.numel()), self._spec.codec)
        for chunk in range(grid.n_chunks):
            start, stop = grid.span(chunk)
            own = torch.cat((d[start:stop], self._phi[max(0, start - n) : max(0, stop - n)]))
            means[start:stop].add_(unsaid(grid, chunk, own))

    def _partner(self, t: int) -> PeerId:
        ids = sorted(m.id for m in self._peer.members() if (m.alive or m.me) and not m.left and m.role == TRAINER)
        me = ids.index(self._peer.id)
        partner = pairs(len(ids), t, self._spec.seed)[me]
        return "" if partner == me else ids[partner]

    def own(self) -> dict[str, Tensor]:
        return {"phi": self._phi, "momentum": self._m}

    def load(self, own: Mapping[str, Tensor]) -> None:
        if set(own) != {"phi", "momentum"}:
            raise CheckpointError("the checkpoint lacks the slow weights of NoLoCo")
        self._phi, self._m = own["phi"].clone(), own["momentum"].clone()

    def close(self) -> None:
        """Nothing is held between two steps."""
