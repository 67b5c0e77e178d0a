"""Gossip with `update = "noloco"`: slow weights with a momentum, averaged in random pairs (NoLoCo, arXiv:2506.10911).

    d      <- theta - phi                                                 what this peer learned since the last exchange
    m      <- mu m + lr mean(d) + pull (mean(phi) - phi)                  means over the pair
    phi    <- phi + m ;  theta <- phi

Pairs are a matching of the members that is drawn from the run's seed and the step. A partner that does not come within
`gossip.wait_s` is not waited for: the step is then taken alone, with means over one; and one that no vector reaches is
not waited for at all. Who is behind goes on to a step in which others wait, or that its partner has not passed, and in
some steps waits as long as its partner trains (comm/rotation.py): those who have come apart would never meet again. If
it meets nobody where it goes, it has taken no more than its own step: two that never meet would count each other's.
Where the partner went on without a part of this peer's, which came too late, the mean of that part is made here: so
what was learned here is not lost. Momentum and slow weights are each peer's own, and differ. What the codec cannot say
of a peer's d and phi stays in the means that it takes itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from dlc.comm import vectors
from dlc.comm.calls import GoneOn
from dlc.comm.clock import clock
from dlc.comm.graphs import pairs
from dlc.comm.ids import PeerId
from dlc.comm.roles import TRAINER
from dlc.comm.rotation import Turn, next_turn
from dlc.errors import CheckpointError, RoundTimeout
from dlc.mesh import Group, GroupCall, waited
from dlc.peer import Peer
from dlc.places import Places
from dlc.runspec import RunSpec
from dlc.train.averaging import EXCHANGE_S, NAME, Averaged, last_of


def noloco_step(
    phi: Tensor, m: Tensor, d: Tensor, mean_d: Tensor, mean_phi: Tensor, lr: float, mu: float, pull: float
) -> None:
    """Move slow weights `phi` and momentum `m` in place; all flat fp32 of equal length, `mean_phi` is overwritten."""
    m.mul_(mu).add_(mean_d, alpha=lr).add_(mean_phi.sub_(phi), alpha=pull)
    phi.add_(m)


class Pairs:
    """See `averaging.Exchange`."""

    def __init__(self, peer: Peer, spec: RunSpec, stopping: Callable[[], bool] | None = None) -> None:
        self._peer, self._spec, self._stopping = peer, spec, stopping
        self._places = Places(peer, f"{NAME}/noloco", everybody=True, most=last_of(spec) + 1)
        self._phi = self._m = vectors.empty(0)

    def begin(self, vector: Tensor) -> None:
        self._phi, self._m = vector.clone(), torch.zeros_like(vector)

    def step(self, t: int, vector: Tensor) -> Averaged:
        gossip, began = self._spec.gossip, clock()
        away_s = self._places.comes()
        d = vector - self._phi
        both = torch.cat((d, self._phi))
        averaged, waited_s, before, turn = None, 0.0, t, self._turn(t, away_s)
        tries_from = clock()
        try:
            while averaged is None:
                tried = clock()
                averaged = self._with(turn, tries_from, both, d)
                waited_s += clock() - tried if averaged is None else averaged.waiting_s
                if averaged is None:
                    turn = self._turn(turn.round, away_s)
            if not averaged.partners:
                averaged = replace(averaged, t=t)
            before = averaged.t + 1
        finally:
            self._places.trains(before, turn.mates)
        mean_d, mean_phi = both[: len(d)], both[len(d) :]
        lr, mu = gossip.outer_lr, gossip.outer_momentum
        noloco_step(self._phi, self._m, d, mean_d, mean_phi, lr, mu, gossip.pull)
        vector.copy_(self._phi)
        return replace(averaged, seconds=clock() - began, waiting_s=waited_s)

    def _with(self, turn: Turn, began: float, both: Tensor, d: Tensor) -> Averaged | None:
        """Means over the pair in the place of `both`, d and phi; None: the others have gone on meanwhile. began: the
        first try, at whatever step."""
        t, since, wait_s = turn.round, clock(), self._spec.gossip.wait_s
        if not turn.others:
            return Averaged(t, ())
        (partner,) = turn.others
        left_s = min(turn.patience_s, began + turn.patience_s + wait_s - since)
        if left_s <= 0:
            return Averaged(t, (), {partner: "was followed to later steps for long enough"})
        formed = list[float]()

        def begun(members: tuple[PeerId, ...]) -> None:
            formed.append(clock())
            self._places.averages(turn)

        group = Group(
            self._peer,
            f"{NAME}/noloco",
            peers=(self._peer.id, partner),
            matchmaking_s=left_s,
            codec=self._spec.codec,
            expected=partial(self._awaited, turn, since),
            formed=begun,
        )
        self._places.waits(turn)
        try:
            call = group.all_reduce(both, tag=str(t), timeout_s=left_s + EXCHANGE_S, async_op=True)
            call.stopping = self._stopping
            report = waited(call)
        except RoundTimeout as error:
            if isinstance(error.__cause__, GoneOn):
                return None
            waiting_s = (formed[0] if formed else clock()) - since
            if not formed and self._stopping is not None and self._stopping():  # so that it was not waited for
                return Averaged(t, (), waiting_s=waiting_s)
            why = str(error) if formed else "did not come"
            return Averaged(t, (), {partner: why}, waiting_s=waiting_s)
        self._keep_own(both, d, call)
        return Averaged(
            t,
            tuple(share.peer for share in report.contributors if share.peer != self._peer.id),
            {absent.peer: absent.reason for absent in report.missing},
            report.bytes_sent,
            report.bytes_received,
            waiting_s=report.waiting_s,
        )

    def _turn(self, t: int, away_s: float) -> Turn:
        """The step to be taken, `t` or a later one; with nobody for the one left over, and after the end of the run."""
        ids = sorted(m.id for m in self._peer.members() if (m.alive or m.me) and not m.left and m.role == TRAINER)
        wait_s, others = self._spec.gossip.wait_s, set(ids) - {self._peer.id}
        apart = {voter.peer for voter in self._peer.mesh.ask(lambda mesh, now: mesh.ground.apart())}
        return next_turn(t, partial(self._partner, ids, apart), others, 1, self._places.ask(), wait_s, away_s)

    def _partner(self, ids: list[PeerId], apart: Collection[PeerId], t: int) -> tuple[PeerId, ...]:
        """Of these members, in step `t`; none for the one left over, where the partner is one of `apart`, which no
        vector reaches, and after the end of the run."""
        if self._spec.rounds and t > self._spec.rounds:
            return ()
        me = ids.index(self._peer.id)
        partner = pairs(len(ids), t, self._spec.seed)[me]
        return () if partner == me or ids[partner] in apart else (ids[partner],)

    def _awaited(self, turn: Turn, since: float) -> frozenset[PeerId]:
        """On the peer's driver thread, while this peer waits."""
        return turn.awaited(self._places.ask(), clock() - since) | {self._peer.id}

    def _keep_own(self, means: Tensor, d: Tensor, call: GroupCall) -> None:
        """means: of d and phi, as the call gave them."""
        n, grid = d.numel(), call.grid
        for chunk in range(grid.n_chunks):
            start, stop = grid.span(chunk)
            own = torch.cat((d[start:stop], self._phi[max(0, start - n) : max(0, stop - n)]))
            if chunk in call.without_mine:
                means[start:stop].lerp_(own, 0.5)
            else:
                means[start:stop].add_(grid.unsaid(chunk, own))

    def own(self) -> dict[str, Tensor]:
        return {"phi": self._phi, "momentum": self._m}

    def load(self, own: Mapping[str, Tensor]) -> None:
        if set(own) != {"phi", "momentum"}:
            raise CheckpointError("the checkpoint lacks the slow weights of NoLoCo")
        self._phi, self._m = own["phi"].clone(), own["momentum"].clone()

    def close(self) -> None:
        self._places.close()
