"""Whether a round waits for those who are not ready: by what it costs, on both sides (docs/protocol.md, "Timeouts").

Everything is counted in work: seconds times tokens per second.

- Waiting costs what the ready ones could have done meanwhile: their paces, times the wait.
- Leaving a peer out costs `share` of the work that it would have brought, from when a round counted it last until it is
  ready. No more, because a later round counts that work; and who was left out has twice as much at stake next time.

So a round waits as long as the predicted wait for some of the late ones costs less than leaving them out. Who has just
got its vote would bring little, and is not waited for unless few are ready. A prediction that is not fulfilled ends by
itself: no more is spent on waiting than there is at stake, and what comes to be so by the wait itself counts up to one
phase only. Else who hangs, and is twice as fast as all that are ready, would be waited for without end.

No more than half waits for a majority, if that is predicted within one phase: they may be ready because the last round
left them out, while the others have just begun. Going on without these would keep the two halves out of step for good,
each in every second round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

NEVER_S = 1e9
"""Told as the time until its next contribution by who has ended its training: no round waits for it."""


@dataclass(frozen=True, slots=True)
class Idle:
    """A peer that is ready."""

    since_s: float
    """How long it has been so."""
    pace: float
    """Tokens per second, or 1 where nobody says."""


@dataclass(frozen=True, slots=True)
class Late:
    """A living trainer that is not ready."""

    eta_s: float | None
    """When it will be, from now, as it said; 0: overdue; None: it did not say."""
    worked_s: float
    """How long ago a round counted it, or it got its vote."""
    pace: float


def worth_waiting(
    ready: Sequence[Idle], late: Sequence[Late], floor_s: float, share: float, usual_s: float, fill_s: float = 0.0
) -> bool:
    """Whether the round should not start yet. `ready` is not empty.

    floor_s: nobody who has worked for half of a phase is left out before the first of the ready ones has waited for so
             long: predictions are no better than that.
    share:   of its work that is lost with a peer that is left out.
    usual_s: length of an inner phase, up to the offer; fill_s: of what comes after it.
    """
    waited_s = max(peer.since_s for peer in ready)
    if waited_s < usual_s and waited_s + _majority_s(ready, late, usual_s) <= usual_s + floor_s:
        return True
    if waited_s < floor_s and any(peer.worked_s >= usual_s / 2 for peer in late):
        return True
    coming = [(_eta_s(peer, usual_s), peer) for peer in late]
    stakes = [share * (_at_stake_s(peer, waited_s, usual_s + fill_s) + eta_s) * peer.pace for eta_s, peer in coming]
    stake = sum(stakes)
    if sum(peer.since_s * peer.pace for peer in ready) >= stake:
        return False
    cost, lost, until_s, idle = 0.0, stake, 0.0, sum(peer.pace for peer in ready)
    for (eta_s, peer), its_stake in sorted(zip(coming, stakes, strict=True), key=lambda x: x[0][0]):
        cost += idle * (eta_s - until_s)
        lost -= its_stake
        until_s, idle = eta_s, idle + peer.pace
        if cost + lost < stake:
            return True
    return False


def _majority_s(ready: Sequence[Idle], late: Sequence[Late], usual_s: float) -> float:
    """When more than half will be ready, from now; infinite where they are. Who has made no step yet does not count."""
    working = sorted(_eta_s(peer, usual_s) for peer in late if peer.worked_s > 0)
    lacking = (len(ready) + len(working)) // 2 + 1 - len(ready)
    return working[lacking - 1] if lacking > 0 else math.inf


def _at_stake_s(peer: Late, waited_s: float, phase_s: float) -> float:
    """Of the time that it has worked: what it had when the wait began, and up to a phase also what came since."""
    return max(min(peer.worked_s, phase_s), peer.worked_s - waited_s)


def _eta_s(peer: Late, usual_s: float) -> float:
    """As it said; else it works as long as is usual."""
    return peer.eta_s if peer.eta_s is not None else max(0.0, usual_s - peer.worked_s)
