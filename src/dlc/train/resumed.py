"""The outer state of a swarm that is stopped as a whole and started again: as `DiLoCo.state_dict(outer=True)` has it.

saved       the log (for `Resume.of`), and the image of the outer state that it leads to
restore     before the channel is open: that image, if the run stands where it did
digest_of   of that image: whether inner steps that were saved with it begin at what is here now
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from blake3 import blake3

from dlc.errors import UsageError
from dlc.handles import outer_part
from dlc.train.checkpoint import bytes_tensor
from dlc.train.outer import OuterState
from dlc.train.scalars import saved_count
from dlc.train.swarm import TrainPeer

log = logging.getLogger(__name__)


def rounds_made(peer: TrainPeer, channel: str, timeout_s: float | None) -> int:
    """Of the run, before the channel is open; a peer that was joined with `hold` may have heard of none of them yet."""
    if not peer.position(channel).t:
        peer.take_seat(timeout_s)
    return peer.position(channel).t


def saved(peer: TrainPeer, channel: str) -> dict[str, Any]:
    """As it is now."""
    frozen = peer.checkpoint(channel)
    return {"t": frozen.t, "log": bytes_tensor(frozen.log), "image": bytes_tensor(frozen.image)}


def restore(given: Mapping[str, Any], into: OuterState, peer: TrainPeer, channel: str, timeout_s: float | None) -> None:
    """From the state `given`, before the channel is open; where the run has gone on, its own state counts.

    CheckpointError: it is of another model. UsageError: it has no outer part; the run was begun anew, without this
    state, or resumed, with another.
    """
    part = outer_part(given)
    t = saved_count(part, "t")
    here = rounds_made(peer, channel, timeout_s)
    if here == t:
        into.restore(part["image"].cpu().numpy().data.toreadonly())
    elif 0 < here < t:
        log.warning(
            "the state given is of round %d, but the run has gone on from round %d: what is newer is not used; to "
            "go on from the newest, let every peer join with resume=dlc.Resume.of(its own state)",
            t,
            here,
        )
    elif not here:
        raise UsageError(
            f"the state is of round {t}, but this run has made none: join with resume=dlc.Resume.of(state), or "
            "leave resume= away to start anew from the model's parameters"
        )


def check_resumed(state: OuterState, peer: TrainPeer, channel: str) -> None:
    """UsageError: this peer resumed the run, and `state` is not what it stands at."""
    if (t := peer.resumed_at(channel)) and state.t != t:
        raise UsageError(
            f"the run was resumed at round {t}, and this peer is to bring its state: give resume= here, too, with "
            "the state of which dlc.Resume was made"
        )


def digest_of(given: Mapping[str, Any]) -> bytes:
    """Of the outer state in `given`, as in a `Position`."""
    return blake3(given["outer"]["image"].cpu().numpy().data, max_threads=blake3.AUTO).digest()
