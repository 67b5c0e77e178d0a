"""The inner steps of a `dlc.DiLoCo` that no round has counted.

    add ──> made ──offer──> on their way ──counted──> in a round, and no more of ours
              ↑                  │
              └──── back ────────┘                    `drop`: the model is the swarm's again, without them

Where steps were lost with an earlier process (`lose`), the next round is due as if they were made, so that this peer
does not keep the others waiting.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from dlc.errors import CheckpointError
from dlc.train.held import Held
from dlc.train.offers import Settled, Work
from dlc.train.scalars import damaged, saved_count, saved_counts

log = logging.getLogger(__name__)


class SavedSteps(NamedTuple):
    """What `Uncounted.saved` gave."""

    inner_step: int
    steps: int
    offered: int
    held: list[int]

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> SavedSteps:
        """From what was saved. CheckpointError: a number in it cannot be."""
        inner_step = saved_count(state, "inner_step")
        steps = saved_count(state, "steps") if "steps" in state else inner_step
        offered, held = saved_count(state, "offered", steps), saved_counts(state, "held")
        if held and min(held) != steps:  # that of the fragment of the last round; of all before the first
            raise CheckpointError(damaged("steps", steps, f"{min(held)}, the least that a fragment holds"))
        return cls(inner_step, steps, offered, held)


class Uncounted:
    """`period`: inner steps between two rounds."""

    def __init__(self, period: int, fragments: int) -> None:
        self._period = period
        self.steps = 0
        """Made, and offered to no round, or to none that is settled."""
        self.offered = 0
        """Those of `steps` that are on their way to a round."""
        self.held = Held(fragments)
        """What each fragment holds of these, and of those that a round counted for other fragments."""
        self._skipped = 0
        """Steps of this period that were lost with an earlier process: no round counts them, but it is due sooner."""

    @property
    def since_offer(self) -> int:
        """Made, and on no way to a round."""
        return self.steps - self.offered

    @property
    def work(self) -> Work:
        """To offer all of them."""
        return Work(range(self.steps))

    @property
    def due(self) -> bool:
        """It is time for a round, where none is on its way."""
        return self.steps + self._skipped >= self._period

    def next(self, t: int, last: bool) -> float:
        """So many would be offered to the round after t: 0 where there is nothing. last: no step comes after it."""
        return self.held.weight(t) if last else self.steps

    def add(self) -> None:
        """A step was made."""
        self.steps += 1
        self.held.add(1)

    def begins(self) -> None:
        """A round is begun, or the model is taken anew: the next one is due a whole period later."""
        self._skipped = 0

    def counted(self, t: int) -> None:
        """Round t counted those that were on their way to it."""
        self.steps -= self.offered
        self.held.counted(t, self.steps)

    def drop(self) -> None:
        """The model is the swarm's again: no step that was in no round is in it any more."""
        self.steps = 0
        self.held.drop()

    def tell_lost(self, settled: Settled) -> None:
        """For people, where they are dropped as that became of their offer."""
        log.warning(
            "up to %d inner steps are lost, and the parameters are the swarm's now: %s",
            max(self.held.amounts()),
            "an owner refused what was offered, as it was not finite"
            if settled.report is not None
            else "this peer's state was replaced by that of the others, and whether a round counted them is not known",
        )

    # ---------------------------------------------------------------- from one process to the next

    def saved(self) -> dict[str, int]:
        """For `SavedSteps`; `held` is saved where the parameters are."""
        return {"inner_step": self._skipped + self.since_offer, "steps": self.steps, "offered": self.offered}

    def take_up(self, saved: SavedSteps) -> None:
        """The model has all of them."""
        self.steps, self._skipped = saved.steps, max(0, saved.inner_step + saved.offered - saved.steps)
        if not self.held.load(saved.held):
            self.held.drop()
            self.held.add(self.steps)

    def lose(self, saved: SavedSteps) -> None:
        """The model is the swarm's, and has none of them."""
        self._skipped = min(saved.inner_step, self._period - 1)
        if lost := saved.steps - saved.offered:
            log.warning("%d inner steps that were in no round when this state was saved are lost", lost)
        if saved.offered:
            log.warning(
                "%d inner steps were on their way to a round when this state was saved: they are lost, unless it "
                "counted them",
                saved.offered,
            )
