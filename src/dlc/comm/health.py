"""The local view of time: running time, Lifeguard's local health, and the deadlines that follow from them.

*Running time* is the sum of min(now - last, 1 s) over events. A process that was frozen did not listen, so the silence
of others counts for little: ages and timers of the failure detector are all in running time.

*Local health* (Dadgar et al., "Lifeguard", 2017) is 1 while I answer in time, and up to 8 when the signs say that it
is me who is slow: I was scheduled late, nobody at all answers, others suspect me. It stretches my deadlines, so a slow
peer does not accuse the others. The silence of a single peer while others answer says nothing about me.
"""

from __future__ import annotations

from dlc.comm.timeouts import Timeouts

RUNNING_STEP_MAX_S = 1.0
"""The most that one event can add to running time."""
HEALTH_MAX = 8
"""Lifeguard's bound of the multiplier."""
RTT_DEFAULT_S = 0.05
"""Assumed for a peer that was not measured."""
RTT_MAX_S = 10.0
"""Samples above count as this much: the queue was full, or one of us was frozen."""


class LocalTime:
    def __init__(self, timeouts: Timeouts, now: float) -> None:
        self.timeouts = timeouts
        self.last = now
        self.running_s = 0.0
        self.grace_run = 0.0
        """Until then no deadline is judged: answers may lie unread since I was not scheduled."""
        self.health = 1
        self.n = 1
        """Peers not dead, me included."""
        self.rtt_max_s = RTT_DEFAULT_S
        self.rtt_var_s = 0.0
        self.t_dead_s = timeouts.t_dead_s(1, 1)
        self.pace_s = self.t_dead_s / 2
        """Between two pings of a peer that is kept an eye on: half of T_dead at health 1."""
        self.widening = 1.0
        """What the `health` of Timeouts is given: local health, and room for round trips over a probe period."""

    def advance(self, now: float) -> None:
        elapsed_s = now - self.last
        if elapsed_s <= 0:
            return
        self.last = now
        self.running_s += elapsed_s if elapsed_s < RUNNING_STEP_MAX_S else RUNNING_STEP_MAX_S
        if elapsed_s > 2 * self.timeouts.probe_s:  # a timer of at most one probe period was due: I come late
            self.grace_run = self.running_s + self.timeouts.probe_s
            self.worse()

    def worse(self) -> None:
        self.health = min(self.health + 1, HEALTH_MAX)
        self.retune()

    def better(self) -> None:
        if self.health > 1:
            self.health -= 1
            self.retune()

    def measured(self, rtt_max_s: float, rtt_var_s: float) -> None:
        """Round trips of those alive: the greatest, and the greatest deviation."""
        if rtt_max_s != self.rtt_max_s or rtt_var_s != self.rtt_var_s:
            self.rtt_max_s, self.rtt_var_s = rtt_max_s, rtt_var_s
            self.retune()

    def retune(self) -> None:
        """To be called when n, health or round trips have changed."""
        probe_s = self.timeouts.probe_s
        slow_s = max(0.0, 2 * (self.rtt_max_s + 4 * self.rtt_var_s - probe_s))
        self.widening = self.health + slow_s / self.timeouts.t_dead_s(self.n, 1)
        self.t_dead_s = self.timeouts.t_dead_s(self.n, self.widening)
        self.pace_s = self.timeouts.t_dead_s(self.n, self.widening - self.health + 1) / 2

    @property
    def suspicion_s(self) -> float:
        """From the first suspicion until death: T_dead without its one probe."""
        return self.t_dead_s - self.timeouts.probe_s * self.health
