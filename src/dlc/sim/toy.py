"""What the simulated peers train: a state of a few dozen elements, and trainers that are a function of the seed.

The vector of a contribution is a function of channel and roster entry, so that the checker can compute every mean again
from the roster alone.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from blake3 import blake3
from torch import Tensor

from dlc.comm import vectors
from dlc.comm.entries import Part
from dlc.comm.events import ContributionDropped, RoundDone
from dlc.comm.filling import Filling
from dlc.comm.grid import Grid
from dlc.errors import CheckpointError
from dlc.sim.schedule import REDUCE, TRAIN

if TYPE_CHECKING:
    from dlc.sim.world import Process, World

LEASE_LEN = 12
"""Blocks per lease range: a few contributions, so that ranges change often."""
TOKENS_PER_BLOCK = 100
RETRY_S = 0.5
GROW_SHARE = 0.3
"""Of an inner phase: after this an eager trainer offers more, as long as it waits."""
FILLING_SHARE = 0.7
"""Of the contributions, where some become final while they are offered."""
FILL_SHARE_MAX = 0.5
"""Of an inner phase: the longest that one of these takes."""
TURNS_SHARE = 0.3
"""Of the contributions to the training that bring no samples, where some do."""
NOT_MADE = 1e6
"""In place of elements that are not final: no mean may show it."""
PATIENCE_S = 5.0
"""How long an all-reduce waits for the others after the first."""
PATIENT_S = 1e6
"""How long a round of the training does, where it is patient."""


class ToyState:
    """theta and m, moved by the means of committed rounds; satisfies dlc.comm.state.State."""

    def __init__(self, numel: int, seed: int, extra_bytes: int = 0) -> None:
        """`extra_bytes`: of its image, as another outer optimizer would have."""
        self.extra_bytes = extra_bytes
        self.theta = torch.arange(numel, dtype=torch.float32) * 0.01 + seed
        self.m = vectors.zeros(numel)
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

    def copy(self) -> ToyState:
        twin = ToyState(0, 0, self.extra_bytes)
        twin.theta, twin.m, twin.t = self.theta.clone(), self.m.clone(), self.t
        return twin

    def flip(self) -> None:
        """Corrupt one element."""
        self.theta[0] += 1.0

    def digest(self) -> bytes:
        return blake3(bytes(self.export())).digest()

    def image_bytes(self) -> int:
        return 8 * self.numel + 8 + self.extra_bytes

    def export(self) -> memoryview:
        t = self.t.to_bytes(8 + self.extra_bytes, "little")
        return memoryview(self.theta.numpy().tobytes() + self.m.numpy().tobytes() + t)

    def copy_image(self, start: int, out: memoryview) -> None:
        out[:] = self.export()[start : start + len(out)]

    def restore(self, image: memoryview) -> None:
        n = 4 * self.numel
        if len(image) != self.image_bytes():
            raise CheckpointError(f"the image here has {self.image_bytes()} bytes, this one {len(image)}")
        self.theta = torch.frombuffer(bytearray(image[:n]), dtype=torch.float32)
        self.m = torch.frombuffer(bytearray(image[n : 2 * n]), dtype=torch.float32)
        self.t = int.from_bytes(image[2 * n :], "little")


class Means:
    """Takes the means of one all-reduce; satisfies dlc.comm.log.Sink."""

    out = None

    def __init__(self) -> None:
        self.t = 0
        self.chunks: list[tuple[int, int, Tensor | None]] = []

    def step(self, t: int, means: Iterator[tuple[int, int, Tensor | None]]) -> None:
        if self.t:
            raise AssertionError(f"the means of round {t} after those of round {self.t}: an offer is for one round")
        self.t, self.chunks = t, [(a, b, mean if mean is None else mean.clone()) for a, b, mean in means]


def vector(channel: str, part: Part, numel: int) -> Tensor:
    """The contribution that a roster names: of the training, a pseudo-gradient from the blocks before `upto`; of other
    channels, one that no other offer of this peer has."""
    peer = part.voter.peer
    return _vector(f"{peer}/{part.upto}" if channel == TRAIN else f"{peer}/{channel}/{part.upto}", numel)


@lru_cache(maxsize=4096)
def _vector(name: str, numel: int) -> Tensor:
    """Made by whole numbers and one division. A sine has other bits on a processor with other vector instructions, and
    so would a seed have other hashes there, other ranks and other coordinators."""
    numbers = (torch.arange(numel) * 7919 + zlib.crc32(name.encode())) % 20_011
    return (numbers - 10_005).float() / 10_005


class Trainer:
    """Inner phases of one process in one channel: works for a while, contributes, and begins anew or tries again."""

    def __init__(self, world: World, process: Process, channel: str, inner_s: float) -> None:
        self.world, self.process, self.channel = world, process, channel
        self.inner_s = inner_s
        self.blocks: list[int] = []
        """Trained and not yet counted."""
        self.upto = 0
        self.weight = 0.0
        self.sink: Means | None = None
        self.rounds = 0
        self.due = False
        """An inner phase has ended and its contribution is not offered yet."""
        self._fills = random.Random(f"filling {world.scenario.seed} {process.voter} {channel}")
        self._turn = False
        """What is offered next brings no samples."""
        self._turns = random.Random(f"turns {world.scenario.seed} {process.voter} {channel}")

    def begin(self) -> None:
        """Start an inner phase."""
        rng = self.process.rng
        self.blocks, self.weight = [], 0.0
        self.due = False
        self._turn = self.world.scenario.turns and self._turns.random() < TURNS_SHARE
        seconds = self.inner_s * rng.uniform(0.7, 1.3)
        if self._eager:
            speed = 3.0 * TOKENS_PER_BLOCK / self.inner_s
            self.world.later(self.process, 0.0, self._describe, speed, seconds)
        self.world.later(self.process, seconds, self._finished)

    @property
    def grid(self) -> Grid:
        return self.world.grid_of(self.process.host, self.channel)

    @property
    def _eager(self) -> bool:
        return self.world.scenario.eager and self.channel == TRAIN

    def _describe(self, speed: float, eta_s: float) -> None:
        self.world.act(self.process, lambda now: self.process.node.describe(now, speed=speed, eta_s=eta_s))

    def _grow(self) -> None:
        """Take back what is offered, unless a plan may name it, and offer more blocks of the lease."""
        node = self.process.node
        if self.channel not in node.exchange.offered or self.process.left:
            return
        lease = node.lease()
        if not self._planned() and lease is not None and node.withdraw(self.channel):
            self.world.checker.withdrawn(self.process, self.channel)
            self.blocks, self.upto = lease.take(len(self.blocks) + self.process.rng.randint(1, 3))
            self.due = True
            self._offer()
        else:
            self.world.later(self.process, GROW_SHARE * self.inner_s, self._grow)

    def _planned(self) -> bool:
        """A plan may name what is offered."""
        plan = self.process.node.slot.plan
        return plan is not None and plan.entry.channel == self.channel

    def _finished(self) -> None:
        self.due = True
        self._offer()

    def _offer(self) -> None:
        """Contribute as soon as state, lease and channel allow; looked at again every RETRY_S until done."""
        process, node = self.process, self.process.node
        if not self.due or process.left:
            return
        if self.channel in node.exchange.offered or not self._seated() or not self._work():
            self.world.later(process, RETRY_S, self._offer)
            return
        self.due = False
        number = node.offers + 1
        upto = self.upto or (-number if self.channel == TRAIN else number)
        part = Part(process.voter, self.weight, upto)
        x = vector(self.channel, part, self.grid.numel)
        self.sink = Means() if self.channel == REDUCE else None
        filling, y = self._filling(x)
        self.world.checker.offered(process, self.channel, part)
        self.world.act(
            process,
            lambda now: node.contribute(
                self.channel,
                y,
                self.grid,
                weight=self.weight,
                upto=self.upto,
                patience_s=self._patience_s,
                sink=self.sink,
                now=now,
                filling=filling,
            ),
        )
        if self._eager:
            self.world.later(process, GROW_SHARE * self.inner_s, self._grow)

    @property
    def _patience_s(self) -> float:
        if self.channel == REDUCE:
            return PATIENCE_S
        return PATIENT_S if self.world.scenario.patient else 0.0

    def _filling(self, x: Tensor) -> tuple[Filling | None, Tensor]:
        """What is offered in place of x: x itself, or something that becomes x, as far as it does."""
        rng = self._fills
        if not self.world.scenario.filling or rng.random() > FILLING_SHARE:
            return None, x
        takes_s = rng.uniform(0.05, FILL_SHARE_MAX) * self.inner_s
        filling = Filling(x.numel(), takes_s * rng.choice((0.1, 1.0, 1.0, 1.5)))
        y = torch.full_like(x, NOT_MADE)
        fronts = sorted({0, *(rng.randrange(x.numel()) for _ in range(4))}, reverse=True)
        ends = rng.choice(("well", "well", "well", "stops", "hangs"))
        if ends == "hangs" and self.world.now > self.world.scenario.last_fault_s:
            ends = "well"  # one that is waited for in vain is a fault, too
        for i, front in enumerate(fronts if ends == "well" else fronts[: rng.randrange(len(fronts))], 1):
            self.world.later(self.process, takes_s * i / len(fronts), self._fill, filling, x, y, front)
        if ends == "stops":
            self.world.later(self.process, takes_s, self._stop_filling, filling)
        return filling, y

    def _fill(self, filling: Filling, x: Tensor, y: Tensor, front: int) -> None:
        y[front : filling.front] = x[front : filling.front]
        filling.reached(front)
        self.world.act(self.process, self.process.node.filled)

    def _stop_filling(self, filling: Filling) -> None:
        """The work failed: take it back, unless a plan may name it."""
        process, node = self.process, self.process.node
        filling.stop()
        self.world.act(process, node.filled)
        mine = node.exchange.offered.get(self.channel)
        if mine is None or mine.filling is not filling or process.left or self._planned():
            return
        if node.withdraw(self.channel):
            self.world.checker.withdrawn(process, self.channel)
            self.due, self.sink = True, None
            self.world.later(process, RETRY_S, self._offer)

    def _seated(self) -> bool:
        node = self.process.node
        if self.process.voter not in node.log.state.trainers:
            return False
        attached = node.log.attached.get(self.channel)
        return self.channel == REDUCE or (attached is not None and attached.synced and node.log.is_open(self.channel))

    def _work(self) -> bool:
        """What was trained; the same work again where it was not counted and, in the training, is still leased."""
        rng = self.process.rng
        if self.channel != TRAIN:
            self.weight = self.weight or float(TOKENS_PER_BLOCK * rng.randint(1, 5))
            return True
        lease = self.process.node.lease()
        if lease is None:
            return False
        if self._turn and not self.blocks:
            self.weight, self.upto = self.weight or float(rng.randint(1, TOKENS_PER_BLOCK)), 0
            return True
        if not self.blocks or lease.take(len(self.blocks)) != (self.blocks, self.upto):
            self.blocks, self.upto = lease.take(rng.randint(1, 5))
        self.weight = float(len(self.blocks) * TOKENS_PER_BLOCK)
        return bool(self.blocks)

    def told(self, event: object) -> None:
        if isinstance(event, RoundDone) and event.report.channel == self.channel:
            self.rounds += 1
            if self.sink is not None:
                self.world.checker.delivered(event, self.sink)
                self.sink = None
            if event.counted:
                self.begin()
                return
        elif isinstance(event, ContributionDropped) and event.channel == self.channel:
            self.sink = None
        else:
            return
        if not self.due and self.weight and self.channel not in self.process.node.exchange.offered:
            self.due = True
            self.world.later(self.process, 0.0, self._offer)
