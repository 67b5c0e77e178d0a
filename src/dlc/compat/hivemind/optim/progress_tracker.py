"""How far all peers together are towards the next epoch: `target_batch_size` samples, by whomever."""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dlc.compat.hivemind.dht import DHT
from dlc.compat.hivemind.swarm import Swarm, key_of
from dlc.compat.hivemind.utils.performance_ema import PerformanceEMA
from dlc.compat.hivemind.utils.serializer import MSGPackSerializer
from dlc.compat.hivemind.utils.timed_storage import get_dht_time
from dlc.errors import SwarmClosed

log = logging.getLogger(__name__)

FRESH_S = 0.01
"""Notices are not read more often than that: a loop may ask for the progress in every step."""
TTL_S = 7 * 86400.0
"""Of a notice: it ends with its peer, so this only bounds memory."""


@dataclasses.dataclass(frozen=True)
class LocalTrainingProgress:
    """What one peer tells of itself."""

    peer_id: str
    epoch: int
    samples_accumulated: int
    """Towards the next epoch."""
    samples_per_second: float
    time: float
    """When, by this peer's own clock (`get_dht_time`)."""
    client_mode: bool


@dataclasses.dataclass(frozen=True)
class GlobalTrainingProgress:
    """All peers together."""

    epoch: int
    """The greatest of all."""
    samples_accumulated: int
    """Towards the next, by the peers at that epoch."""
    target_batch_size: int
    num_peers: int
    """That train at this epoch or the one before."""
    num_clients: int
    eta_next_epoch: float
    """An estimate, as `get_dht_time` counts; nothing is decided by it."""
    next_fetch_time: float
    """Now: notices come by themselves."""


class ProgressTracker:
    """Reports this peer's samples to all, and adds up what all report. There is no thread and no period: notices are
    sent when something changes, and read when they are asked for.

    Not needed, and of no effect: the refresh periods, the expected drift, metadata_expiration, private_key, daemon.
    """

    def __init__(
        self,
        dht: DHT,
        prefix: str,
        target_batch_size: int,
        *,
        client_mode: bool | None = None,
        min_refresh_period: float = 0.5,
        max_refresh_period: float = 10.0,
        default_refresh_period: float = 3.0,
        expected_drift_peers: float = 3.0,
        expected_drift_rate: float = 0.2,
        performance_ema_alpha: float = 0.1,
        metadata_expiration: float = 60.0,
        status_loglevel: int = logging.DEBUG,
        private_key: Any = None,
        daemon: bool = True,
        start: bool,
    ) -> None:
        self.dht, self.prefix, self.target_batch_size = dht, prefix, target_batch_size
        self.client_mode = bool(dht.client_mode if client_mode is None else client_mode)
        self.performance_ema = PerformanceEMA(alpha=performance_ema_alpha)
        self.status_loglevel = status_loglevel
        self.fetched_global_progress_this_epoch = threading.Event()
        self.local_progress = self._local(0, 0)
        self._key = f"progress/{key_of(prefix)}/"
        self._alive = start
        self._reports = False
        """Samples were reported: before that this peer is not counted, and an auxiliary one never is."""
        self._paused: GlobalTrainingProgress | None = None
        self._read: tuple[float, GlobalTrainingProgress] | None = None
        self._warned: set[str] = set()

    def start(self) -> None:
        self._alive = True

    def is_alive(self) -> bool:
        return self._alive

    @property
    def global_progress(self) -> GlobalTrainingProgress:
        now, paused, read = time.monotonic(), self._paused, self._read  # which another thread may drop meanwhile
        if paused is not None:
            return paused
        if read is None or now - read[0] > FRESH_S:
            self._read = read = now, self.progress_now()
            self.fetched_global_progress_this_epoch.set()
        return read[1]

    def progress_now(self) -> GlobalTrainingProgress:
        """`global_progress` as it is known now, though updates be paused. From any thread."""
        now = get_dht_time()
        peers = self._others() + ([self.local_progress] if self._reports else [])
        epoch = max([self.local_progress.epoch, *(p.epoch for p in peers if not p.client_mode)])
        near = [p for p in peers if p.epoch >= epoch - 1]  # the others have stopped, or will load the state first
        samples = sum(p.samples_accumulated for p in near if p.epoch == epoch)
        speed = self.performance_ema.eps + sum(p.samples_per_second for p in near)
        ahead = sum(
            p.samples_accumulated + max(0.0, now - p.time) * p.samples_per_second for p in near if p.epoch == epoch
        )
        eta = now + max(0.0, self.target_batch_size - ahead) / speed
        clients = sum(p.client_mode for p in near)
        return GlobalTrainingProgress(epoch, samples, self.target_batch_size, len(near), clients, eta, now)

    @property
    def global_epoch(self) -> int:
        return self.global_progress.epoch

    @property
    def ready_to_update_epoch(self) -> bool:
        """The samples are there, or another peer is an epoch ahead."""
        progress = self.global_progress
        return progress.epoch > self.local_progress.epoch or progress.samples_accumulated >= self.target_batch_size

    @property
    def estimated_next_update_time(self) -> float:
        """When the epoch will end, by the speed of all peers; an estimate (`get_dht_time`)."""
        return get_dht_time() if self.ready_to_update_epoch else self.global_progress.eta_next_epoch

    def report_local_progress(
        self, local_epoch: int, samples_accumulated: int, update_global_samples: bool = True
    ) -> None:
        """Tell all peers that so many samples are accumulated here since the epoch began."""
        added = samples_accumulated - self.local_progress.samples_accumulated
        if added > 0:
            self.performance_ema.update(added)
            self._reports = True
        else:
            self.performance_ema.reset_timer()
        self.local_progress = self._local(local_epoch, samples_accumulated)
        self._post()

    @contextmanager
    def pause_updates(self) -> Iterator[None]:
        """Inside, `global_progress` stands still, and time does not count as training."""
        self._paused = self.global_progress
        try:
            with self.performance_ema.pause():
                yield
        finally:
            self._paused, self._read = None, None

    def update_epoch(self, new_epoch: int | None = None) -> int:
        """This peer is in that epoch now (default: the next), with no samples; returns it."""
        new_epoch = self.local_progress.epoch + 1 if new_epoch is None else new_epoch
        self.report_local_progress(new_epoch, 0)
        self.fetched_global_progress_this_epoch.clear()
        if self._paused is not None:
            self._paused = self.progress_now()
        return new_epoch

    def shutdown(self, timeout: float | None = None) -> None:
        """Be counted no more. Idempotent."""
        if self._alive:
            self._alive = False
            try:
                self._swarm.withdraw(self._key)
            except SwarmClosed:
                log.debug("the peer had left before its tracker was shut down")

    @property
    def _swarm(self) -> Swarm:
        return self.dht.swarm

    def _local(self, epoch: int, samples: int) -> LocalTrainingProgress:
        speed = self.performance_ema.samples_per_second
        return LocalTrainingProgress(str(self.dht.peer_id), epoch, samples, speed, get_dht_time(), self.client_mode)

    def _post(self) -> None:
        self._read = None
        if self._alive and self._reports:
            raw = MSGPackSerializer.dumps(list(dataclasses.astuple(self.local_progress)))
            self._swarm.post(self._key, raw, TTL_S)

    def _others(self) -> list[LocalTrainingProgress]:
        swarm, found = self._swarm, []
        for notice in swarm.notices(self._key):
            if notice.lives and notice.author != swarm.id:
                try:
                    found.append(_checked(LocalTrainingProgress(*MSGPackSerializer.loads(notice.value))))
                except (ValueError, TypeError):
                    if notice.author not in self._warned:
                        self._warned.add(notice.author)
                        log.warning("%s posted something that is no progress; it is not counted", notice.author[:8])
        return found


def _checked(progress: LocalTrainingProgress) -> LocalTrainingProgress:
    """TypeError where a field has another type than it says."""
    counts = (progress.epoch, progress.samples_accumulated)
    speeds = (progress.samples_per_second, progress.time)
    sound = all(type(n) is int and n >= 0 for n in counts) and type(progress.client_mode) is bool
    if not sound or not all(isinstance(x, int | float) and math.isfinite(x) for x in speeds):
        raise TypeError("no progress")
    return progress


__all__ = ["GlobalTrainingProgress", "LocalTrainingProgress", "ProgressTracker"]
