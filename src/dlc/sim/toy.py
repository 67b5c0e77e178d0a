"""What the simulated peers train: a state of a few dozen elements, and a trainer that is a function of the seed.

The vector of a contribution is a function of (peer, upto), so that the checker can compute every mean again from the
roster alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from blake3 import blake3
from torch import Tensor

from dlc.comm.events import ChannelSynced, RoundDone
from dlc.comm.grid import Grid
from dlc.errors import CheckpointError

if TYPE_CHECKING:
    from dlc.sim.world import Process, World

CHANNEL = "train"
LEASE_LEN = 12
"""Blocks per lease range: a few contributions, so that ranges change often."""
TOKENS_PER_BLOCK = 100
RETRY_S = 0.5


class ToyState:
    """theta and m, moved by the means of committed rounds; satisfies dlc.comm.state.State."""

    def __init__(self, numel: int, seed: int) -> None:
        self.theta = torch.arange(numel, dtype=torch.float32) * 0.01 + seed
        self.m = torch.zeros(numel)
        self.t = 0

    @property
    def numel(self) -> int:
        return self.theta.numel()

    def step(self, t: int, means: Iterable[tuple[int, int, Tensor | None]]) -> None:
        if t != self.t + 1:
            raise AssertionError(f"round {t} applied after round {self.t}")
        self.t = t
        for start, stop, mean in means:
            if mean is not None:
                m = self.m[start:stop]
                m.mul_(0.5).add_(mean)
                self.theta[start:stop].add_(m)

    def digest(self) -> bytes:
        return blake3(bytes(self.export())).digest()

    def image_bytes(self) -> int:
        return 8 * self.numel + 8

    def export(self) -> memoryview:
        return memoryview(self.theta.numpy().tobytes() + self.m.numpy().tobytes() + self.t.to_bytes(8, "little"))

    def restore(self, image: memoryview) -> None:
        n = 4 * self.numel
        if len(image) != 2 * n + 8:
            raise CheckpointError(f"an image of {self.numel} elements has {2 * n + 8} bytes, this one {len(image)}")
        self.theta = torch.frombuffer(bytearray(image[:n]), dtype=torch.float32)
        self.m = torch.frombuffer(bytearray(image[n : 2 * n]), dtype=torch.float32)
        self.t = int.from_bytes(image[2 * n :], "little")


@lru_cache(maxsize=4096)
def vector(peer: str, upto: int, numel: int) -> Tensor:
    """The pseudo-gradient that `peer` computed from its blocks before `upto`."""
    phase = zlib.crc32(f"{peer}/{upto}".encode()) % 10_000 / 100
    return torch.sin(torch.arange(numel, dtype=torch.float32) * 0.7 + phase)


class Trainer:
    """Inner phases of one process: works for a while, contributes, and on RoundDone goes on or contributes again."""

    def __init__(self, world: World, process: Process, grid: Grid, inner_s: float) -> None:
        self.world, self.process, self.grid = world, process, grid
        self.inner_s = inner_s
        self.blocks: list[int] = []
        """Trained and not yet counted."""
        self.upto = 0
        self.rounds = 0
        self.due = False
        """An inner phase has ended and its contribution is not offered yet."""

    def begin(self) -> None:
        """Start an inner phase."""
        rng = self.process.rng
        self.blocks = []
        self.due = False
        self.world.later(self.process, self.inner_s * rng.uniform(0.7, 1.3), self._finished)

    def _finished(self) -> None:
        self.due = True
        self._offer()

    def _offer(self) -> None:
        """Contribute as soon as state, lease and channel allow; looked at again every RETRY_S until done."""
        process, node = self.process, self.process.node
        if not self.due or process.left:
            return
        attached = node.log.attached.get(CHANNEL)
        lease = node.lease()
        ready = attached is not None and attached.synced and node.log.is_open(CHANNEL) and lease is not None
        if not ready or CHANNEL in node.exchange.offered:
            self.world.later(process, RETRY_S, self._offer)
            return
        assert lease is not None
        if not self.blocks or lease.take(len(self.blocks)) != (self.blocks, self.upto):
            self.blocks, self.upto = lease.take(process.rng.randint(1, 5))
        if not self.blocks:
            self.world.later(process, RETRY_S, self._offer)
            return
        self.due = False
        weight = float(len(self.blocks) * TOKENS_PER_BLOCK)
        x = vector(process.host.name, self.upto, self.grid.numel)
        self.world.act(
            process,
            lambda now: node.contribute(
                CHANNEL, x, self.grid, weight=weight, upto=self.upto, patience_s=0.0, sink=None, now=now
            ),
        )
        self.world.later(process, RETRY_S, self._watch)

    def _watch(self) -> None:
        """An offer vanishes without a RoundDone when its base has moved by a snapshot."""
        if self.due or self.process.left:
            return
        if CHANNEL in self.process.node.exchange.offered:
            self.world.later(self.process, RETRY_S, self._watch)
        elif self.blocks:
            self.due = True
            self._offer()

    def told(self, event: object) -> None:
        if isinstance(event, RoundDone) and event.report.channel == CHANNEL:
            self.rounds += 1
            if event.counted:
                self.begin()
            elif self.blocks and CHANNEL not in self.process.node.exchange.offered:
                self.due = True
                self.world.later(self.process, 0.0, self._offer)
        elif isinstance(event, ChannelSynced) and self.blocks and CHANNEL not in self.process.node.exchange.offered:
            self.due = True
            self.world.later(self.process, 0.0, self._offer)
