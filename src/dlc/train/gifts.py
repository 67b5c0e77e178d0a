"""Gossip with `update = "average"`: parameters approach the mean of all by push-sum over a sparse graph.

See `dlc.Gossip`. What the inner steps changed since the last exchange enters with this peer's weight.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from torch import Tensor

from dlc.gossip import Gossip
from dlc.peer import Peer
from dlc.runspec import RunSpec
from dlc.train.averaging import NAME, Averaged, last_of

log = logging.getLogger(__name__)


class Gifts:
    """See `averaging.Exchange`."""

    def __init__(self, peer: Peer, spec: RunSpec, stopping: Callable[[], bool] | None = None) -> None:
        self._gossip = Gossip(peer, NAME, graph=spec.gossip.graph, codec=spec.codec, seed=spec.seed)
        self._gossip.t_max, self._gossip.stopping = last_of(spec) - 1, stopping  # see `averaging.followed`
        self._wait_s = spec.gossip.wait_s

    def step(self, t: int, vector: Tensor) -> Averaged:
        self._gossip.t = t - 1
        report = self._gossip.step(vector, wait_s=self._wait_s)
        if report.unsure or report.overdrawn:
            log.warning(
                "shares of this model may count twice, of a weight of %.3g at most; %.3g that did is given up: who had "
                "taken them was gone, or silent for long",
                report.unsure,
                report.overdrawn,
            )
        return Averaged(
            t=report.t,
            partners=tuple(report.took),
            missing=report.returned,
            bytes_sent=report.bytes_sent,
            bytes_received=report.bytes_received,
            seconds=report.seconds,
            waiting_s=report.waiting_s,
            weight=report.weight,
        )

    def own(self) -> dict[str, Tensor]:
        return {}

    def load(self, own: Mapping[str, Tensor]) -> None:
        """Nothing: the weight of push-sum is of those that are up."""

    def begin(self, vector: Tensor) -> None:
        """Nothing to do."""

    def close(self) -> None:
        self._gossip.close()
