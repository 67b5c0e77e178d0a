"""`optimizer.tracker`: how far this peer is, and how far the swarm, from what the members' records tell."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from dlc.comm.roles import TRAINER
from dlc.compat.opendiloco.strategy import SwarmPeer

TELL_S = 1.0
"""Between two words to the others: a record travels to every peer."""
COUNT_MAX = 1 << 53
"""Nobody has come to a greater epoch, or trained on more samples in one."""
RATE_SHARE = 0.1
"""Of the newest step in the moving average of the seconds per step."""


class Own(NamedTuple):
    """Where this peer stands."""

    epoch: int
    steps: int
    """Inner steps since the last round."""
    samples: int
    """In those steps."""


@dataclass(frozen=True)
class LocalProgress:
    """Of this peer."""

    peer_id: str
    epoch: int
    samples_accumulated: int
    """In the inner steps since the last round."""
    samples_per_second: float
    time: float
    """Seconds since 1970."""
    client_mode: bool = False


@dataclass(frozen=True)
class GlobalProgress:
    """Of the swarm, as far as this peer has heard."""

    epoch: int
    samples_accumulated: int
    """Of the peers that are in this epoch together."""
    target_batch_size: int
    """Samples of one peer in one epoch."""
    num_peers: int
    """Trainers that are alive, this one included."""
    num_clients: int
    eta_next_epoch: float
    """When the slowest of them is ready, in seconds since 1970."""
    next_fetch_time: float


class DiloCoProgressTracker:
    """`own`: where this peer stands, whenever that is asked for."""

    def __init__(
        self,
        peer: SwarmPeer,
        run_id: str,
        batch_size: int,
        num_inner_steps: int,
        own: Callable[[], Own],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.batch_size, self.num_inner_steps = batch_size, num_inner_steps
        self.target_batch_size = batch_size * num_inner_steps
        self._peer, self._run_id, self._clock = peer, run_id, clock
        self._own = own
        self._step_s = 0.0
        self._stepped_at: float | None = None
        self._told_at = float("-inf")

    @property
    def local_step(self) -> int:
        """Inner steps since the last round."""
        return self._own().steps

    @property
    def real_step(self) -> int:
        """Inner steps of this peer's place in the run: those of all epochs before, and the local ones."""
        own = self._own()
        return own.epoch * self.num_inner_steps + own.steps

    @property
    def local_progress(self) -> LocalProgress:
        own = self._own()
        return LocalProgress(self._peer.id, own.epoch, own.samples, self._samples_per_s, time.time())

    @property
    def global_progress(self) -> GlobalProgress:
        """Asks the peer; nothing is sent for it."""
        trainers = [m for m in self._peer.members() if m.role == TRAINER and (m.me or (m.alive and not m.left))]
        mine = self.local_progress
        told = [(mine.epoch, mine.samples_accumulated, mine.samples_per_second)]
        for member in trainers:
            said = member.status.get("opendiloco")
            if not member.me and isinstance(said, list) and len(said) == 3 and said[0] == self._run_id:
                _, epoch, samples = said  # from another host
                if all(type(n) is int and 0 <= n <= COUNT_MAX for n in (epoch, samples)):
                    told.append((epoch, samples, member.speed))
        epoch = max(e for e, _, _ in told)
        left_s = [max(0, self.target_batch_size - n) / rate for e, n, rate in told if e == epoch and rate > 0]
        now = time.time()
        return GlobalProgress(
            epoch=epoch,
            samples_accumulated=sum(n for e, n, _ in told if e == epoch),
            target_batch_size=self.target_batch_size,
            num_peers=len(trainers),
            num_clients=0,
            eta_next_epoch=now + max(left_s, default=0.0),
            next_fetch_time=now,
        )

    @property
    def global_epoch(self) -> int:
        return self.global_progress.epoch

    @property
    def ready_to_update_epoch(self) -> bool:
        """The next inner step ends in a round."""
        return self.local_step + 1 >= self.num_inner_steps

    @contextlib.contextmanager
    def pause_updates(self) -> Iterator[None]:
        """Nothing has to pause: between two steps of its own a peer's state stands still."""
        yield

    @property
    def _samples_per_s(self) -> float:
        return self.batch_size / self._step_s if self._step_s else 0.0

    def stepped(self, round_s: float) -> None:
        """After an inner step, of which `round_s` seconds went into a round. Tells the others, now and then."""
        now = self._clock()
        if self._stepped_at is not None:
            took_s = max(0.0, now - self._stepped_at - round_s)
            self._step_s = (1 - RATE_SHARE) * self._step_s + RATE_SHARE * took_s if self._step_s else took_s
        self._stepped_at = now
        if now - self._told_at >= TELL_S:
            self._told_at = now
            own = self._own()
            left = max(0, self.num_inner_steps - own.steps)
            self._peer.describe(
                speed=self._samples_per_s,
                eta_s=left * self._step_s if self._step_s else None,
                status={"opendiloco": [self._run_id, own.epoch, own.samples]},
            )
