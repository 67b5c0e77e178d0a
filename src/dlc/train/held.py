"""How much each fragment of a model holds that this peer trained and no round of that fragment has counted.

Inner steps move all fragments, a round counts one: a model of K fragments is in step with the swarm once each of them
had a turn after the last step. A weight by what a fragment holds is a K-th of it: so all turns of a step together have
the weight of the step.
"""

from __future__ import annotations

from collections.abc import Sequence

END_PATIENCE_S = 60.0
"""Of the rounds that end a training: whoever is a little late would be left out, and ends with another model. With
fragments they come one after the other, while all predict that the next one is a phase of inner steps away."""


class Held:
    """In tokens, or in steps; of a model that is not cut, in its one fragment."""

    def __init__(self, fragments: int) -> None:
        self._held = [0] * fragments

    def add(self, amount: int) -> None:
        """An inner step was made."""
        self._held = [held + amount for held in self._held]

    def counted(self, t: int, left: int) -> None:
        """Round t counted what its fragment held, but for what was trained since the offer."""
        self._held[(t - 1) % len(self._held)] = left

    def undo(self, t: int, amount: int) -> None:
        """What was trained since the offer to the round after t is undone, and in other fragments all."""
        kept = self.next(t) - amount
        self.drop()
        self._held[t % len(self._held)] = kept

    def drop(self) -> None:
        """The model is the swarm's."""
        self._held = [0] * len(self._held)

    def next(self, t: int) -> int:
        """Of the fragment that the round after t exchanges."""
        return self._held[t % len(self._held)]

    def weight(self, t: int) -> float:
        """Of that, in a round that ends a training."""
        return self.next(t) / len(self._held)

    def any(self) -> bool:
        """Whether a fragment holds something."""
        return any(self._held)

    def left_over(self, unit: str) -> str:
        """For people."""
        return f"up to {max(self._held)} {unit} of {sum(map(bool, self._held))} fragments are in no round"

    def __len__(self) -> int:
        return len(self._held)

    def amounts(self) -> list[int]:
        """Of each fragment."""
        return list(self._held)

    def load(self, amounts: Sequence[int]) -> bool:
        """Take back what `amounts` gave; False, with nothing changed: that was of another number of fragments."""
        if len(amounts) != len(self._held):
            return False
        self._held = [int(amount) for amount in amounts]
        return True
