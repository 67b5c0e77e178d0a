"""The outer half of DiLoCo on one peer: what happens to a model between its inner steps.

    base    theta of the swarm, as it was when the inner steps began
    local   the parameters, moved by the inner steps
    d       base - local: the pseudo-gradient

A phase ends with `exchange`: d is offered to the next round; once a round counted it, the model becomes the new theta.

A round can be committed without us: we were late, or joined in the middle. Then d is not lost. Between inner steps
`rebase` sets base := theta_new, local := theta_new - d, so that d stays what it was; while d is already offered, it is
offered again. Either holds only as long as the lease still names the blocks that d was trained on: otherwise somebody
else trains them now, and d is dropped (promise P7).

Parameters of fewer bits than fp32 hold a rounded theta. d is measured from what they did hold, not from theta, so the
rounding is no part of it and theta serves as the master copy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dlc.errors import DlcError, RoundTimeout
from dlc.flat import FlatView
from dlc.report import RoundReport
from dlc.train.outer import OuterState, pseudo_gradient
from dlc.train.swarm import Pending, Position, TrainPeer

POLL_S = 0.2
"""Between two looks whether a round passed without us: short against a round, long against the cost of looking."""
WAIT_SLICE_S = 0.1
"""How long a stop can go unnoticed while waiting for a round."""


class NotFinite(DlcError):
    """The inner steps ended in NaN or Inf; nothing was offered, and the model is the swarm's again."""


class Work(NamedTuple):
    """What a pseudo-gradient was trained on."""

    blocks: tuple[int, ...] = ()
    """Positions of the data source, in order of use; empty on a channel without leases."""
    upto: int = 0
    """The lease position after them."""


class OuterLoop:
    """Keeps one model in step with channel `channel` of `peer`. Used from one thread."""

    def __init__(
        self,
        peer: TrainPeer,
        view: FlatView,
        *,
        channel: str,
        lr: float,
        momentum: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._peer, self._view, self._channel, self._clock = peer, view, channel, clock
        self._base = view.gather(torch.empty(view.numel, dtype=torch.float32))
        self._delta = torch.empty_like(self._base)
        exact = all(t.dtype == torch.float32 for t in view.tensors)
        self._start: Tensor = self._base if exact else self._base.clone()
        """What the parameters held before the inner steps, less what a rebase kept."""
        self._position: Position | None = None
        self._leased = False
        self._poll_at = -math.inf
        self.state = OuterState(self._base, lr=lr, momentum=momentum)

    @property
    def position(self) -> Position:
        """The position that `base` belongs to."""
        if self._position is None:
            raise DlcError("the channel is not open yet")
        return self._position

    def open(self, *, codec: str, chunk_elems: int, lease_len: int = 0, timeout_s: float | None = None) -> Position:
        """Attach the state to the channel and load the swarm's theta into the model; blocks until both are done."""
        self._leased = lease_len > 0
        self._peer.open(
            self._channel, self.state, codec=codec, chunk_elems=chunk_elems, lease_len=lease_len, timeout_s=timeout_s
        )
        return self.adopt()

    def adopt(self) -> Position:
        """Set the model to the swarm's theta; local progress is dropped."""
        self._position = self._peer.pull(self._channel, self._base)
        self._view.scatter(self._base)
        if self._start is not self._base:
            self._view.gather(self._start)
        return self._position

    def refresh(self) -> Position:
        """The newest position, with the model at its theta: called where there is no local progress."""
        newest = self._peer.position(self._channel)
        if self._differs(newest):
            return self.adopt()
        self._position = newest
        return newest

    def moved(self) -> bool:
        """Whether theta changed under our inner steps. Cheap: most calls do not even ask the peer."""
        now = self._clock()
        if now < self._poll_at:
            return False
        self._poll_at = now + POLL_S
        return self._differs(self._peer.position(self._channel))

    def rebase(self, work: Work) -> bool:
        """Go on from the swarm's newest theta. True: local progress is kept; False: it was dropped."""
        self._measure()
        self._position = self._peer.pull(self._channel, self._base)
        kept = self._stands(self._position, work)
        exact = self._start is self._base
        if not kept:
            self._view.scatter(self._base)
        else:  # theta_new - d
            self._view.scatter(torch.sub(self._base, self._delta, out=self._delta if exact else self._start))
        if not exact:
            self._view.gather(self._start)
            if kept:
                self._start.add_(self._delta)
        return kept

    def exchange(
        self,
        weight: float,
        work: Work,
        *,
        give_up: Callable[[], bool] = lambda: False,
        on_round: Callable[[RoundReport, bool], None] = lambda report, counted: None,
    ) -> RoundReport | None:
        """Offer d until a round counts it; returns that round's report, with the model at the new theta.

        None: d was dropped (its lease is gone, an owner refused it, this peer's state was replaced, or `give_up` said
        so, after which nothing more may be offered); the model is at theta then too. `on_round` hears of every round
        that ended meanwhile, and whether d was counted in it.
        NotFinite: d holds NaN or Inf.
        """
        self._measure()
        if not math.isfinite(float(torch.linalg.vector_norm(self._delta, ord=math.inf))):
            self.adopt()
            raise NotFinite("the inner steps ended in values that are not finite; the swarm's model was loaded again")
        while self._stands(self._peer.position(self._channel), work):
            pending = self._peer.contribute(self._channel, self._delta, weight=weight, upto=work.upto)
            if not _finished(pending, give_up):
                self._delta = torch.empty_like(self._delta)  # the peer may still send from the other one
                break
            report, counted = pending.report, pending.counted
            # Not the model yet: if d is offered again, base only tells `give_up` where the swarm stands.
            self._position = self.adopt() if counted else self._peer.pull(self._channel, self._base)
            if report is None:
                break
            on_round(report, counted)
            if counted:
                return report
            if _refused(report, self._peer.id) or give_up():
                break
        self.adopt()
        return None

    def _measure(self) -> None:
        """delta <- start - local."""
        pseudo_gradient(self._start, self._view.gather(self._delta), out=self._delta)

    def _stands(self, position: Position, work: Work) -> bool:
        if not self._leased:
            return True
        lease = position.lease
        return lease is not None and tuple(lease.take(len(work.blocks))[0]) == work.blocks

    def _differs(self, newest: Position) -> bool:
        if not newest.digest:
            return False  # being fetched again: nothing to go on from yet
        return newest.t != self.position.t or newest.digest != self.position.digest


def _finished(pending: Pending, give_up: Callable[[], bool]) -> bool:
    """Wait for a contribution. False: `give_up` said so first."""
    while True:
        try:
            pending.wait(WAIT_SLICE_S)
            return True
        except RoundTimeout:
            if give_up():
                return False


def _refused(report: RoundReport, peer: str) -> bool:
    return any(missing.peer == peer and missing.reason.startswith("refused") for missing in report.missing)
