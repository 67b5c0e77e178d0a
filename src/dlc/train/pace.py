"""When a peer's inner steps end and it offers them: after so many of them, or at a time that all have in common.

    Steps      after H inner steps (sync_mode "steps")
    Deadline   when the time of a round is over (sync_mode "deadline"): a fast peer has made more steps by then and a
               slow one fewer, and the mean is weighted by tokens (deadlines as in OpenDiLoCo, arXiv:2407.07852; steps
               by speed as in asynchronous local SGD, arXiv:2401.09135)

The time of a round is what H inner steps of the median peer take, by what all tell of themselves, or `round_s`. It
begins for everybody when the last round is committed, whatever a peer has to do before its next inner step; with
overlap when that round is planned, as who is still waited for then goes on from there. Either is within a round trip
the same moment: nobody's clock is compared with another's. A peer ends before the deadline rather than after it, since
all others would wait for it; what it loses by that is less than one step. Whose single step is longer than a round is
late, and left out as any straggler.

Who was in no round yet, or was left out, takes the deadline from what the others say they have before them: as long as
that is not much more than a round.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Protocol

from dlc.runspec import RunSpec
from dlc.train.others import Others

EARLY_SHARE = 0.75
"""A step is begun if so much of it fits in before the deadline: steps vary, and the last one of a peer that is as fast
as the median would otherwise be left out by chance."""
TOLD_MAX = 2.0
"""Times that a round usually takes: what the others tell is believed up to there. One that says it has far more before
it would have who comes go on with inner steps without end."""


class Pace(Protocol):
    """Asked between two inner steps. `made`: steps of this phase so far, those made ahead included."""

    def begins(self, t: int, made: int, since: float | None) -> None:
        """A phase begins after round t. `since`: when it did for all whom that round counted; None: not for us."""

    def due(self, made: int) -> bool:
        """Whether it is time for a round."""

    def target(self, made: int) -> int:
        """The step at which it will be, as things stand."""


class Steps:
    """After h inner steps."""

    def __init__(self, h: int) -> None:
        self._h = h

    def begins(self, t: int, made: int, since: float | None) -> None:
        pass

    def due(self, made: int) -> bool:
        return made >= self._h

    def target(self, made: int) -> int:
        return self._h


class Deadline:
    """At a common time. `step_s`: of our own inner steps, 0 while it is not known."""

    def __init__(
        self, h: int, round_s: float, others: Others, step_s: Callable[[], float], clock: Callable[[], float]
    ) -> None:
        self._h, self._round_s, self._others, self._step_s, self._clock = h, round_s, others, step_s, clock
        self._began = 0.0
        self._until: float | None = None
        """The deadline, where the others told it."""
        self._told_at = 0.0

    def begins(self, t: int, made: int, since: float | None) -> None:
        now = self._clock()
        self._began = now - made * self._step_s() if since is None else min(since, now)
        etas_s = self._others.etas_s(t) if since is None else []
        self._until, self._told_at = now + statistics.median(etas_s) if etas_s else None, now

    def due(self, made: int) -> bool:
        if not made:
            return False
        until, step_s = self._deadline(), self._step_s()
        if until is None:
            return made >= self._h
        return self._clock() + EARLY_SHARE * step_s > until

    def target(self, made: int) -> int:
        until, step_s = self._deadline(), self._step_s()
        if until is None or not step_s:
            return max(self._h, made)
        fits = math.floor((until - self._clock()) / step_s + 1 - EARLY_SHARE)
        return max(1, made + fits)

    def _deadline(self) -> float | None:
        """None: nobody has made a step yet."""
        usual_s = self._usual_s()
        if self._until is None:
            return None if usual_s is None else self._began + usual_s
        return self._until if usual_s is None else min(self._until, self._told_at + TOLD_MAX * usual_s)

    def _usual_s(self) -> float | None:
        """A round's; None: nobody has made a step yet."""
        if self._round_s:
            return self._round_s
        steps_s = self._others.steps_s() + ([self._step_s()] if self._step_s() else [])
        return self._h * statistics.median_low(steps_s) if steps_s else None


def pace_of(spec: RunSpec, others: Others, step_s: Callable[[], float], clock: Callable[[], float]) -> Pace:
    """As the run has it."""
    h = spec.steps_per_round
    return Deadline(h, spec.round_s, others, step_s, clock) if spec.sync_mode == "deadline" else Steps(h)
