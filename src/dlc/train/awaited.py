"""Whether rounds wait for a peer: as long as it trains on one of its channels at least.

What a peer tells the others of itself is of all its channels, so all who train with it have one record here.
"""

from __future__ import annotations

import contextlib
import weakref

from dlc.comm.straggler import NEVER_S
from dlc.errors import SwarmClosed
from dlc.train.swarm import TrainPeer

_TRAINED: weakref.WeakKeyDictionary[TrainPeer, set[str]] = weakref.WeakKeyDictionary()
"""Channels on which each peer trains."""


class Awaited:
    """On behalf of the training of `channel`."""

    def __init__(self, peer: TrainPeer, channel: str) -> None:
        self._peer, self._channel = peer, channel

    @property
    def begun(self) -> bool:
        """Somebody trains on this channel with this peer."""
        return self._channel in _TRAINED.get(self._peer, ())

    def begin(self) -> None:
        """Rounds wait for this peer, if they do for anybody."""
        trained = _TRAINED.setdefault(self._peer, {self._channel})
        if not trained:  # the others were told that there is nothing to wait for
            self._peer.describe(eta_s=-1.0)
        trained.add(self._channel)

    def end(self) -> None:
        """No round waits for this peer, unless it trains on another channel, until `begin`."""
        trained = _TRAINED.setdefault(self._peer, set())
        trained.discard(self._channel)
        if not trained:
            with contextlib.suppress(SwarmClosed):
                self._peer.describe(eta_s=NEVER_S)
