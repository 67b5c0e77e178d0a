"""A peer's stay in the swarm, as its `dlc.DiLoCo` finds it: where the peer has left, the caller is told what that means
for the inner steps, and nothing is begun any more."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from dlc.errors import SwarmClosed
from dlc.train.uncounted import Uncounted


class Stay:
    """`uncounted`: of the training that needs it."""

    def __init__(self, uncounted: Uncounted) -> None:
        self._uncounted = uncounted
        self.closed = ""
        """Why nothing can be exchanged any more."""

    @contextlib.contextmanager
    def needed(self) -> Iterator[None]:
        """Meanwhile. SwarmClosed: the peer has left, in which case nothing is begun from the second time on: steps
        would go on that no round could ever count."""
        if self.closed:
            raise SwarmClosed(self.closed)
        try:
            yield
        except SwarmClosed as closed:
            if self.closed:
                raise
            steps = self._uncounted.steps
            held = f", with {steps} inner steps that this peer has seen in no round" if steps else ""
            self.closed = (
                f"{closed}; the parameters stay as they are{held}: to train on in the swarm, join again and make a new "
                "dlc.DiLoCo, which sets them to the swarm's; to train on alone, call unfollow() and step the inner "
                "optimizer itself"
            )
            raise SwarmClosed(self.closed) from closed
