"""Options of OpenDiLoCo as what dlc makes of them: strategies, compressions, the swarm behind a `dht`."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from dlc.comm.codecs import get_codec
from dlc.errors import UsageError
from dlc.survey import Member
from dlc.train.swarm import TrainerPeer

DEFAULT_TIMEOUT_WAITING_FOR_PEERS = 600.0
"""Seconds; of WAIT_FOR_ALL."""
CODECS = {
    "NoCompression": "fp32",
    "Float16Compression": "fp16",
    "ScaledFloat16Compression": "bf16",
    "Uniform8BitQuantization": "int8",
    "Quantile8BitQuantization": "int8",
    "BlockwiseQuantization": "int8",
}
"""Hivemind's compression classes by name: the codec that comes next."""


class AllReduceStrategy(Enum):
    """When a round begins: with all peers that are alive, or soon after the first."""

    WAIT_FOR_ALL = "WAIT_FOR_ALL"
    """When all are ready; those who are not after `timeout_waiting_for_peers` come into a later round."""
    NO_WAIT = "NO_WAIT"
    """`matchmaking_time` after the first is ready; the work of the others comes into a later round."""


class SwarmPeer(TrainerPeer, Protocol):
    """The part of `dlc.Peer` that the optimizer uses."""

    def members(self, departed: bool = False) -> Sequence[Member]:
        """Everybody known; with `departed` those that have left, too."""


def patience_of(strategy: AllReduceStrategy, timeout_s: float | None, matchmaking_s: float) -> float:
    """Seconds that a round waits for peers that are alive. ValueError: the options contradict each other."""
    if strategy is AllReduceStrategy.NO_WAIT:
        if timeout_s is not None:
            raise ValueError("timeout_waiting_for_peers has no meaning with NO_WAIT: leave it out, or use WAIT_FOR_ALL")
        return matchmaking_s
    if timeout_s is not None and timeout_s < matchmaking_s:
        raise ValueError(
            f"timeout_waiting_for_peers ({timeout_s}) must not be less than matchmaking_time ({matchmaking_s})"
        )
    return DEFAULT_TIMEOUT_WAITING_FOR_PEERS if timeout_s is None else timeout_s


def codec_of(compression: object) -> str:
    """The codec of a compression: a codec's name, an object with a `codec`, or one of Hivemind's classes.

    UsageError: none of these. ConfigError: no codec has that name.
    """
    name = compression if isinstance(compression, str) else getattr(compression, "codec", None)
    name = name or CODECS.get(type(compression).__name__)
    if not isinstance(name, str):
        raise UsageError(f"the compression {compression!r} has no codec here: give fp32, fp16, bf16, int8 or int4")
    return get_codec(name).name


def peer_of(dht: object) -> SwarmPeer:
    """The peer behind `dht`: itself, or its `.peer`, or that of its `.swarm`. UsageError: there is none, it was not
    started, or it takes part in no rounds."""
    held = getattr(dht, "peer", None) or getattr(getattr(dht, "swarm", None), "peer", None)
    for found in (dht, held):
        if hasattr(found, "contribute") and hasattr(found, "members"):
            peer: SwarmPeer = found  # type: ignore[assignment]
            return peer
    raise UsageError(
        f"dht must be a dlc.compat.opendiloco.DHT, or a dlc.Peer, or hold one as .peer, not {type(dht).__name__}"
    )
