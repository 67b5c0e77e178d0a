"""What this peer offers to the next round of a channel, and what it did for the channel meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dlc.comm.encoded import Encoded
from dlc.comm.filling import Filling
from dlc.comm.log import Sink
from dlc.comm.messages import Ready


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


@dataclass
class Traffic:
    """What this peer did for a channel since its last round, with a contribution of its own or without."""

    bytes_sent: int = 0
    bytes_received: int = 0
    ballots: int = 0
