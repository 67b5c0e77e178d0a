"""What a trainer tells: events to its own process, and its status to the other peers.

Events are plain dicts with an "event" key, ready for JSON; `dlc join --json` documents them. The peer's own events
(membership, rounds) arrive on the driver's thread through a queue and leave here on the trainer's thread, so whoever
listens hears one thing at a time and in order.
"""

from __future__ import annotations

import dataclasses
import math
import queue
import time
from collections.abc import Callable, Iterable
from typing import Any

from dlc.comm import events
from dlc.comm.roles import TRAINER
from dlc.comm.straggler import NEVER_S
from dlc.runspec import RunSpec
from dlc.train.flops import Utilisation
from dlc.train.swarm import MemberView, TrainerPeer

DESCRIBE_EVERY_S = 0.5
"""A status travels by gossip to everybody: twice a second is plenty for people."""
ENDS = "leaving"
"""Phase of a trainer that offers nothing more."""
SITS_OUT = "sitting out"
"""Of one that offers nothing to the next round."""
ETAS_S = {"waiting": 0.0, "overlapping": 0.0, ENDS: NEVER_S, SITS_OUT: NEVER_S}
"""Of a contribution, in the phases that say it."""
RATE_WEIGHT = 0.2
"""Of the newest step in the running means of a step's time and tokens."""

_UNKNOWN = Utilisation()
Event = dict[str, Any]
MEMBER_CHANGES: dict[type, str] = {
    events.MemberUp: "up",
    events.MemberSuspect: "suspect",
    events.MemberDown: "down",
    events.MemberLeft: "left",
}


@dataclasses.dataclass
class Setbacks:
    """What faults cost this peer, since it started."""

    rounds_lost: int = 0
    """Rounds of a part of the swarm whose history was given up, with us."""
    tokens_lost: float = 0.0
    """Of all peers, in those rounds."""
    digest_mismatches: int = 0
    """How often our state differed from the swarm's and was fetched again."""
    contributions_dropped: int = 0
    """Offers that no round can count any more; the work behind them may still be in a later one."""
    tokens_dropped: int = 0
    """Of our own inner steps that no round counted: they are left to others, or not needed any more at the end."""


class Teller:
    """Speed, phase and position of one trainer, told to both sides. Used from the trainer's thread.

    about: what else is said of this trainer to the other peers, always.
    """

    def __init__(
        self,
        peer: TrainerPeer,
        on_event: Callable[[Event], None],
        peer_events: queue.SimpleQueue[object] | None,
        clock: Callable[[], float] = time.monotonic,
        utilisation: Utilisation = _UNKNOWN,
        about: dict[str, Any] | None = None,
    ) -> None:
        self._peer, self._on_event, self._queue, self._clock = peer, on_event, peer_events, clock
        self._utilisation = utilisation
        self._status: dict[str, Any] = {"phase": "syncing", **(about or {})}
        self._told_at = -math.inf
        self.step_s = 0.0
        """Of an inner step, a running mean; 0: none was made yet."""
        self._step_tokens = 0.0
        """The same of its tokens."""
        self._synced_t = -1
        self.setbacks = Setbacks()
        self.left_ahead = False
        """Some have left with rounds that nobody here has."""

    @property
    def tokens_per_s(self) -> float:
        """Of the inner steps: their tokens over the time that they took. A mean of each step's own rate would be far
        too high where a few take long."""
        return self._step_tokens / self.step_s if self.step_s else 0.0

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation of the inner steps, a running mean; None where the device's peak is not known."""
        return self._utilisation.mfu(self.tokens_per_s)

    def event(self, name: str, **fields: Any) -> None:
        """Tell our own process; values that are not finite become null, since JSON has none."""
        self._on_event({"event": name, **{key: _finite(value) for key, value in fields.items()}})

    def synced(self, t: int) -> None:
        """The swarm's state of round t is here; told once, whoever notices it first."""
        if t != self._synced_t:
            self._synced_t = t
            self.event("synced", t=t)

    def phase(self, name: str) -> None:
        """Both sides hear at once of a new phase."""
        if self._status.get("phase") != name:
            self._status["phase"] = name
            self.event("phase", phase=name)
            self._describe(eta_s=ETAS_S.get(name))

    def ends(self, t: int) -> None:
        """This peer has nothing for the round after t."""
        known, self._status["t"] = self._status.get("t"), t
        if self._status.get("phase") == ENDS and known != t:
            self._describe(eta_s=NEVER_S)
        self.phase(ENDS)

    def round_begins(self, t: int, inner: int, of: int) -> None:
        """Inner steps start, at `inner` of `of`."""
        self._status.update(t=t, inner=inner, of=of)
        self.phase("training")
        self._describe(eta_s=self.step_s * (of - inner) if self.step_s else None)

    def step(self, t: int, inner: int, of: int, loss: float, tokens: int, seconds: float) -> None:
        """An inner step was done."""
        seconds = max(seconds, 1e-9)
        weight = RATE_WEIGHT if self.step_s else 1.0
        self.step_s += weight * (seconds - self.step_s)
        self._step_tokens += weight * (tokens - self._step_tokens)
        self._status.update(
            t=t,
            inner=inner,
            of=of,
            step_s=float(f"{self.step_s:.3g}"),
            loss=_finite(round(loss, 4)),
            tokens_per_s=round(self.tokens_per_s),
        )
        if self._clock() - self._told_at >= DESCRIBE_EVERY_S:
            self._describe(eta_s=self.step_s * (of - inner))

    def work_dropped(self, t: int, steps: int, tokens: int, others: bool = False, share: float = 1.0) -> None:
        """Inner steps of ours will not be counted. others: whoever holds their samples now trains them, as the run goes
        on. share: of the model, in which they are not; `tokens` are theirs, times that."""
        self.setbacks.tokens_dropped += tokens
        self.event("work_dropped", t=t, steps=steps, tokens=tokens, others=others, share=share)

    def history_lost(self, rounds: int, tokens: float) -> None:
        """Rounds of ours that had counted are set aside."""
        self.setbacks.rounds_lost += rounds
        self.setbacks.tokens_lost += tokens
        self.event("history_lost", rounds=rounds, tokens=tokens)

    def _describe(self, eta_s: float | None) -> None:
        self._told_at = self._clock()
        self._peer.describe(speed=self.tokens_per_s, eta_s=eta_s, status=dict(self._status))

    def peer_events(self) -> list[events.RoundDone]:
        """Pass on what the peer said meanwhile, but for finished rounds, which are returned."""
        rounds: list[events.RoundDone] = []
        while self._queue is not None and not self._queue.empty():
            match self._queue.get():
                case events.RoundDone() as done:
                    rounds.append(done)
                case events.ChannelSynced(_, t):
                    self.synced(t)
                case events.DigestMismatch(_, t):
                    self.setbacks.digest_mismatches += 1
                    self.event("digest_mismatch", t=t)
                case events.HistoryLost(lost, tokens):
                    self.history_lost(lost, tokens)
                case events.LeftAhead(voters, tokens):
                    self.left_ahead = True
                    self.event("left_ahead", peers=[voter.peer for voter in voters], tokens=tokens)
                case events.ContributionDropped(channel):
                    self.setbacks.contributions_dropped += 1
                    self.event("contribution_dropped", channel=channel)
                case events.Waiting(reason, peers, left_s, waited_s, advice):
                    about = {"left_s": left_s, "waited_s": waited_s, "advice": advice}
                    self.event("waiting", reason=reason, peers=list(peers), **about)
                case events.MemberUp() | events.MemberSuspect() | events.MemberDown() | events.MemberLeft() as news:
                    self.event("member", change=MEMBER_CHANGES[type(news)], peer=news.voter.peer)
        return rounds


def at_the_end(members: Iterable[MemberView], spec: RunSpec) -> str:
    """Names of the other trainers that have come to the end of the run, as they say; empty: nobody has."""
    told = [(m.id[:8], m.status.get("t"), m.tokens) for m in members if m.role == TRAINER and not m.me]
    return ", ".join(name for name, t, tokens in told if type(t) is int and spec.over(t, tokens))


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
