"""`Announced`: what an averager is before it averages: known to the others, with a place on the grid of groups and a
state that it gives."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

from torch import Tensor

from dlc.compat.hivemind.averaging.allreduce import AveragingMode
from dlc.compat.hivemind.averaging.directory import Directory, Entry
from dlc.compat.hivemind.averaging.image import pack_state
from dlc.compat.hivemind.averaging.sharing import Sharing
from dlc.compat.hivemind.compression import CompressionBase, CompressionInfo
from dlc.compat.hivemind.dht import DHT
from dlc.compat.hivemind.p2p import PeerID
from dlc.compat.hivemind.utils.background import in_background
from dlc.errors import SwarmClosed, UsageError
from dlc.handles import Unpicklable

log = logging.getLogger(__name__)


class Announced(Unpicklable):
    """Base of `DecentralizedAverager`; announced to the others by `run_in_background`."""

    def __init__(
        self,
        tensors: tuple[Tensor, ...],
        dht: DHT,
        prefix: str,
        entry: Entry,
        state_compression: CompressionBase,
        tensor_infos: Sequence[CompressionInfo] | None,
    ) -> None:
        self.dht, self.prefix = dht, prefix
        self.state_compression, self.tensor_infos = state_compression, tensor_infos
        self.lock_averaged_tensors = threading.Lock()
        self._averaged_tensors = tensors
        self._entry = entry
        self._priority = 0.0
        self._directory: Directory | None = None
        self._sharing: Sharing | None = None

    # ---------------------------------------------------------------- beginning and end

    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        """Announce this averager to the others. No process is started; the arguments change nothing."""
        if self._directory is None:
            swarm = self.dht.swarm
            older = self.dht.averagers.get(self.prefix)
            if older is not None and older.is_alive():
                log.warning("another averager %r of this peer was not shut down; this one takes its place", self.prefix)
                older.shutdown()
            self.dht.averagers[self.prefix] = self
            self._directory = Directory(swarm, self.prefix, self._entry)
            self._sharing = Sharing(swarm, self.prefix, self._directory, self._pack_state)

    start = run_in_background

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """It is ready since it was started."""

    def is_alive(self) -> bool:
        """Announced, and not shut down."""
        return self._directory is not None and self._directory.open

    def shutdown(self) -> None:
        """Be no averager any more; the DHT goes on. Idempotent."""
        if self._directory is not None and self._sharing is not None and self.is_alive():
            if self.dht.averagers.get(self.prefix) is self:
                del self.dht.averagers[self.prefix]
            self._sharing.close()
            try:
                self._directory.close()
            except SwarmClosed:
                log.debug("the peer had left before its averager was shut down")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    @property
    def peer_id(self) -> PeerID:
        return self.dht.peer_id

    @contextmanager
    def get_tensors(self) -> Iterator[tuple[Tensor, ...]]:
        """The averaged tensors; no round changes them inside. A round holds them from its begin to its end."""
        with self.lock_averaged_tensors:
            yield self._averaged_tensors

    # ---------------------------------------------------------------- what the others know

    @property
    def entry(self) -> Entry:
        """What this averager tells of itself."""
        return self._entry if self._directory is None else self._directory.entry

    @property
    def directory(self) -> Directory:
        """The averagers of this prefix. UsageError before the start, and after the end."""
        if self._directory is None:
            raise UsageError("this averager was not started: give start=True, or call run_in_background()")
        if not self._directory.open:
            raise UsageError("this averager was shut down")
        return self._directory

    def announce(self, **changes: Any) -> None:
        """Change my entry, posted already or not."""
        if self._directory is not None:
            self._directory.change(**changes)
        else:
            self._entry = replace(self._entry, **changes)

    def get_group_bits(self, wait: bool = True) -> str:
        """Where this peer stands on the grid of groups."""
        return self.entry.bits

    def set_group_bits(self, group_bits: str, wait: bool = True) -> None:
        """Stand elsewhere, from the next step on."""
        check_bits(group_bits)
        self.announce(bits=group_bits)

    # ---------------------------------------------------------------- state for others

    @property
    def allow_state_sharing(self) -> bool:
        """Whether others may load this peer's state."""
        return self.entry.priority is not None

    @allow_state_sharing.setter
    def allow_state_sharing(self, allowed: bool) -> None:
        if allowed and self._client:
            raise ValueError("a peer in client mode cannot share its state")
        self.announce(priority=self._priority if allowed else None)

    @property
    def state_sharing_priority(self) -> float:
        """Others load from the peers with the greatest one."""
        return self._priority

    @state_sharing_priority.setter
    def state_sharing_priority(self, priority: float) -> None:
        if priority and self._client:
            raise ValueError("a peer in client mode shares no state: a priority has no use")
        if math.isnan(priority):
            raise ValueError("a priority is a number by which donors are put in order, not NaN")
        if self._priority != priority:
            self._priority = float(priority)
            if self.allow_state_sharing:
                self.announce(priority=self._priority)

    def get_current_state(self) -> tuple[Any, ...]:
        """(small metadata, tensors) or (metadata, tensors, infos) for a peer that loads; to be overridden.

        Called on another thread, when a peer asks.
        """
        with self.get_tensors() as tensors:
            return {"group_key": self.get_group_bits()}, [t.detach().clone() for t in tensors], self.tensor_infos

    def load_state_from_peers(self, wait: bool = True, timeout: float | None = None) -> Any:
        """What `get_current_state` of the best donor gives, as (metadata, tensors); None: nobody gave it in time.

        wait=False: a future of that.
        """
        if self._sharing is None:
            raise UsageError("this averager was not started: give start=True, or call run_in_background()")
        sharing = self._sharing
        return sharing.load(timeout) if wait else in_background(lambda: sharing.load(timeout), "load")

    def _pack_state(self) -> bytes:
        metadata, tensors, *rest = self.get_current_state()
        infos = rest[0] if rest and rest[0] is not None else infos_of(tensors)
        return pack_state(metadata, tensors, [self.state_compression.codec_for(info) for info in infos])

    @property
    def _client(self) -> bool:
        return self.entry.mode == AveragingMode.CLIENT.value


def infos_of(tensors: Sequence[Tensor]) -> list[CompressionInfo]:
    return [CompressionInfo.from_tensor(tensor, key=i) for i, tensor in enumerate(tensors)]


def check_bits(bits: str) -> None:
    """UsageError unless they are 0 and 1."""
    if not isinstance(bits, str) or set(bits) - {"0", "1"}:
        raise UsageError(f"group bits are a string of 0 and 1, not {bits!r}")


__all__ = ["Announced"]
