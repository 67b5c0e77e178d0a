"""What this peer offers to the next round of a channel, and what it did for the channel meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dlc.comm.encoded import Encoded, payload_of
from dlc.comm.filling import Filling
from dlc.comm.grid import Grid
from dlc.comm.log import Sink
from dlc.comm.messages import Contrib, Ready


@dataclass
class Offered:
    """My own contribution to the next round of a channel. It is frozen, as far as `filling` covers it."""

    ready: Ready
    vector: Tensor | Encoded
    sink: Sink | None
    since: float
    since_run: float = 0.0
    """The same in running time."""
    started: float | None = None
    """When its first plan was seen."""
    filling: Filling | None = None
    """None: all of it is final."""
    first_final: float | None = None
    """When some of a filling was final first."""

    @property
    def waited_s(self) -> float | None:
        """Until there was a plan and something to send for it; None: there has not been both."""
        if self.started is None or (self.filling is not None and self.first_final is None):
            return None
        return max(0.0, self.started - self.since, (self.first_final or self.since) - self.since)

    @property
    def given_up(self) -> bool:
        """It was not finished, and nothing of it is sent any more."""
        return self.filling is not None and self.filling.stopped

    def final(self, start: int) -> bool:
        """Its elements from `start` on may be used."""
        return self.filling is None or self.filling.covers(start)

    def contrib(self, grid: Grid, chunk: int) -> Contrib:
        """This chunk of it, encoded; `grid` is its own. RuntimeError: the chunk is not final."""
        start, _ = grid.span(chunk)
        # Its maker may stop it at any moment, on another thread: what was final is so still, and may go.
        if self.filling is not None and start < self.filling.front:
            raise RuntimeError(f"chunk {chunk} is not final: it must not be sent")
        ready = self.ready
        return Contrib(ready.channel, ready.base, chunk, ready.weight, ready.upto, payload_of(self.vector, grid, chunk))


@dataclass
class Traffic:
    """What this peer did for a channel since its last round, with a contribution of its own or without."""

    bytes_sent: int = 0
    bytes_received: int = 0
    ballots: int = 0
