"""The strategy "moshpit": a group of a grid averages at each exchange, along another axis each time; see `dlc.Moshpit`.

After as many exchanges as the grid has axes, everybody's inner steps of the first of them are in everybody's model, if
nobody failed. Members count with equal weights. What the codec cannot say of a peer's parameters stays in that peer's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping

from torch import Tensor

from dlc.comm.grid import Grid, usual_chunk_elems
from dlc.errors import UsageError
from dlc.moshpit import Moshpit
from dlc.peer import Peer
from dlc.report import MoshpitReport
from dlc.runspec import RunSpec
from dlc.train.averaging import EXCHANGE_S, NAME, Averaged, last_of

log = logging.getLogger(__name__)

T_BYTES = 8
"""Of the number of its exchange, that each member tells its group: all go on from the greatest."""


class Grids:
    """See `averaging.Exchange`."""

    def __init__(self, peer: Peer, spec: RunSpec, stopping: Callable[[], bool] | None = None) -> None:
        table = spec.moshpit
        self._me, self._timeout_s = peer.id, table.wait_s + EXCHANGE_S
        self._warned, self._codec, self._last = False, spec.codec, last_of(spec)
        self._moshpit = Moshpit(
            peer,
            NAME,
            group_size=table.group_size or None,
            dims=table.dims or None,
            matchmaking_s=table.wait_s,
            codec=spec.codec,
        )
        self._moshpit.stopping = stopping

    def step(self, t: int, vector: Tensor) -> Averaged:
        before = vector.clone()
        try:
            report = self._moshpit.step(vector, gather=t.to_bytes(T_BYTES, "big"), timeout_s=self._timeout_s)
        except UsageError as error:  # fewer peers than the grid needs: there may be more of them later
            if not self._warned:
                log.warning("this peer trains alone for now: %s", error)
            self._warned = True
            return Averaged(t, (), {self._me: str(error)})
        self._warned = False
        self._keep_unsaid(vector, before, self._moshpit.without_mine)
        missing = {absent.peer: absent.reason for group in report.rounds for absent in group.missing}
        if not self._gave_up(report):
            failed = {self._me: "; ".join(report.failed)} if report.failed else {}
            missing = dict(report.absent) | missing | failed
        return Averaged(
            t=max([t, *(self._number(word) for group in report.rounds for word in group.gathered.values())]),
            partners=tuple(s.peer for group in report.rounds for s in group.contributors if s.peer != self._me),
            missing=missing,
            bytes_sent=report.bytes_sent,
            bytes_received=report.bytes_received,
            seconds=report.seconds,
            waiting_s=report.waiting_s,
        )

    def _gave_up(self, report: MoshpitReport) -> bool:
        """The training is to stop, so that nobody was waited for: nobody failed to come."""
        return not report.rounds and self._moshpit.stopping is not None and self._moshpit.stopping()

    def _keep_unsaid(self, vector: Tensor, before: Tensor, unencoded: Collection[int]) -> None:
        """Add what the codec rounded off of mine; but where nobody gave anything, and all of it is there still, and in
        the `unencoded` chunks, into which mine has come as it was."""
        grid = Grid(vector.numel(), usual_chunk_elems(vector.numel(), self._codec), self._codec)
        for chunk in set(range(grid.n_chunks)).difference(unencoded):
            part = slice(*grid.span(chunk))
            vector[part].add_(grid.unsaid(chunk, before[part]).mul_(vector[part] != before[part]))

    def _number(self, word: bytes) -> int:
        """Of the exchange, as a member told it; 0 where it told none that can be."""
        t = int.from_bytes(word, "big")
        return t if len(word) == T_BYTES and t <= self._last else 0

    def own(self) -> dict[str, Tensor]:
        return {}

    def load(self, own: Mapping[str, Tensor]) -> None:
        """Nothing: the grid is that of who is up."""

    def begin(self, vector: Tensor) -> None:
        """Nothing to do."""

    def close(self) -> None:
        self._moshpit.close()
