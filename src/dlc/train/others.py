"""When the other trainers will be at their sync point, from what they say of themselves.

Each trainer's status names its round, its inner step and the seconds a step takes. It comes by gossip, now and then, so
a prediction is aged by the time since it was first seen here. A peer that stopped telling is taken at its last word
until membership finds it dead.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from dlc.comm.roles import TRAINER
from dlc.train.swarm import MemberView
from dlc.train.telling import ENDS, SITS_OUT

LOOK_EVERY_S = 0.2
"""Between two looks at the members, which cost a moment of the peer's own thread."""
TOLD_AGE_S = 1.0
"""How old a status is when it comes: it is told at most twice a second, and gossip takes a while to reach everybody."""
STEP_S_MAX = 24 * 3600.0
"""A longer inner step is no report of a working trainer."""


class _Told(NamedTuple):
    t: int
    inner: int
    of: int
    step_s: float | None
    """None: not known yet."""
    ends: bool
    """It has nothing for the round after `t`."""


class Others:
    """Call `look` between inner steps; the rest answers from what was seen."""

    def __init__(self, members: Callable[[], Sequence[MemberView]], clock: Callable[[], float]) -> None:
        self._members, self._clock = members, clock
        self._look_at = -math.inf
        self._told: dict[str, tuple[_Told, float]] = {}
        """Peer id: what it told last, and when that was new here."""
        self._silent = False
        """One of the trainers has told nothing yet."""

    def look(self) -> None:
        """See what is new; cheap if called often."""
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_S
        others = [m for m in self._members() if m.alive and not m.left and not m.me]
        told = {m.id: _told(m.status) for m in others}
        self._silent = any(m.role == TRAINER and told[m.id] is None for m in others)
        before = self._told
        self._told = {
            peer: before[peer] if peer in before and before[peer][0] == new else (new, now)
            for peer, new in told.items()
            if new is not None
        }

    def inner(self, t: int) -> int | None:
        """The inner step at which most of the others are by now that train after round `t`; None: nobody does."""
        self.look()
        at = [self._by_now(told, since) for told, since in self._told.values() if told.t == t]
        return statistics.median_low(at) if at else None

    def steps_s(self) -> list[float]:
        """Seconds of an inner step of each of the others, as far as they know it."""
        self.look()
        return [told.step_s for told, _ in self._told.values() if told.step_s is not None]

    def may_offer(self, t: int) -> bool:
        """Whether one of them has not said that it has nothing for the round after t."""
        self.look()
        return self._silent or any(not told.ends or told.t != t for told, _ in self._told.values())

    def _by_now(self, told: _Told, since: float) -> int:
        made = (TOLD_AGE_S + self._clock() - since) // told.step_s if told.step_s else 0
        return int(min(told.of, told.inner + made))

    def etas_s(self, t: int) -> list[float]:
        """Seconds until each of the others is at its sync point after round `t`, 0 for those that are.

        Who told of the round before only is taken to begin just now; who is further behind is not in step with us.
        """
        self.look()
        return [eta_s for told, since in self._told.values() if (eta_s := self._eta_s(told, since, t)) is not None]

    def offer_in_s(self, t: int) -> float | None:
        """Seconds until the last of those is there that have something for the round after `t`; None: nobody has."""
        self.look()
        offering = [(told, since) for told, since in self._told.values() if not (told.ends and told.t == t)]
        etas_s = [eta_s for told, since in offering if (eta_s := self._eta_s(told, since, t)) is not None]
        return max(etas_s, default=None)

    def _eta_s(self, told: _Told, since: float, t: int) -> float | None:
        if told.step_s is None or not t - 1 <= told.t <= t:
            return None
        if told.t < t:
            return told.of * told.step_s
        return max(0.0, (told.of - told.inner) * told.step_s - TOLD_AGE_S - (self._clock() - since))


def _told(status: Mapping[str, Any]) -> _Told | None:
    """What another host says is checked."""
    t, inner, of = (_whole(status.get(name)) for name in ("t", "inner", "of"))
    if t is None or inner is None:
        return None
    ends = status.get("phase") in (ENDS, SITS_OUT)
    return _Told(t, inner, inner if of is None else of, _step_s(status.get("step_s")), ends)


def _whole(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 53 else None


def _step_s(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and 0 < value <= STEP_S_MAX else None
