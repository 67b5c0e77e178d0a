"""What a peer keeps in memory, against the limits that its buffers are said to have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dlc.comm.collector import STRAY_CHUNKS_MAX
from dlc.comm.coordinator import IDLE
from dlc.comm.donations import IMAGES_MAX, STEPS_MAX
from dlc.comm.early import EARLY_BYTES_MAX, size_of
from dlc.comm.entries import ROUND
from dlc.comm.ids import Voter
from dlc.comm.log import CHAIN_MAX, HISTORY_PINNED_MAX, HISTORY_ROUNDS_MAX, HISTORY_STATELESS_MAX
from dlc.comm.outbox import SERVED_MAX

if TYPE_CHECKING:
    from dlc.sim.world import Process

Size = tuple[str, int, int]
"""What is measured, what it holds, and the most it may."""


def over(process: Process) -> str:
    """The first buffer that is over its limit; empty where none is."""
    for measure in (_log, _exchange, _decisions):
        for name, size, most in measure(process):
            if size > most:
                return f"{name}: {size} of {most}"
    return ""


def _log(process: Process) -> Iterator[Size]:
    log, sync = process.node.log, process.node.sync
    yield "entries kept", len(log.past), HISTORY_PINNED_MAX if log.holds_pinned else HISTORY_ROUNDS_MAX
    if len(log.past) > 1:
        yield "bytes of results kept", sum(p.payload_bytes for p in log.past), log.history_bytes_max
    stateless = sum(p.entry.kind == ROUND and not log.is_open(p.entry.channel) for p in log.past)
    yield "rounds without state kept", stateless, HISTORY_PINNED_MAX if log.holds_pinned else HISTORY_STATELESS_MAX
    yield "chain", len(log.chain), CHAIN_MAX
    yield "steps to replay", len(sync._steps), STEPS_MAX
    for channel, count in Counter(channel for channel, _ in sync.donations._images).items():
        # One more: a first state that this peer accepted and set aside.
        yield f"images of {channel}", count, IMAGES_MAX + 1


def _exchange(process: Process) -> Iterator[Size]:
    exchange, state = process.node.exchange, process.node.log.state
    chunks = max(trainer.grid.n_chunks for trainer in process.trainers.values())
    early = [m for kept in (exchange._early, process.node.inbox._early) for _, m in kept]
    yield "what came too early", sum(map(size_of, early)), EARLY_BYTES_MAX
    for peer, served in exchange.outbox.served.items():
        yield f"served to {peer}", len(served), SERVED_MAX
    for peer, results in exchange.outbox.results.items():
        yield f"results for {peer}", len(results), 2 * chunks  # of this plan, and those of an older one that it fixes
    senders: Counter[Voter] = Counter()
    for (channel, base), by_chunk in exchange.collector.parts.items():
        yield f"parts of an old base of {channel}", int(base != state.base(channel)), 0
        for by_sender in by_chunk.values():
            senders.update(by_sender.keys())
    for sender, count in senders.items():
        yield f"parts of {sender}", count, STRAY_CHUNKS_MAX + chunks
    counted = {sender: count for sender, (count, _) in exchange.collector._kept.items()}
    yield "senders whose parts are counted wrongly", int(counted != senders), 0


def _decisions(process: Process) -> Iterator[Size]:
    coordinator, state = process.node.coordinator, process.node.log.state
    deciders = len(coordinator.deciders or state.electorate)
    if coordinator.phase != IDLE:  # what is left of an earlier ballot is of its own deciders
        yield "promises", len(coordinator.promises), deciders
        yield "votes", len(coordinator.votes), deciders
    for channel, ready in coordinator.agenda._ready.items():
        yield f"who is ready for {channel}", len(ready), len(state.electorate)
