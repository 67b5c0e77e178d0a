"""The state of one span: parameters, moments, and what has been counted. Owner and standby hold the same bits.

It moves by *updates* alone. An update is a header (its number, whose pushes it holds) and the payloads of the span's
chunks, exactly as they travelled; so whoever applies the same updates in the same order holds the same bits. Which push
of each trainer was counted last is part of the state: a push that comes again after a takeover is known, and counted
once.

    synchronous     theta, moments <- rule(theta, moments, g)           g: the mean of a round, weighted by tokens
    asynchronous    sgd        theta <- theta - lr g / n
                    nesterov   b <- b + g / n ;  theta <- theta - lr g / n              delayed Nesterov, algorithm 4 of
                               every n updates: m <- mu m + b ; theta <- theta - lr mu m ; b <- 0  arXiv:2401.09135, c=0
                    others     theta, moments <- rule(theta, moments, g), with lr / n

n is the number of trainers when the owner made the update, so that n updates move theta as far as one round would; the
momentum of Nesterov sees their mean and not each of them, while the moments of Adam follow each. With weight decay,
theta <- theta - lr wd theta comes first (AdamW); asynchronous with lr / n.
All arithmetic is of separately rounded fp32 operations, as in `outer_step`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from dlc.comm import vectors
from dlc.comm.codecs import Payload
from dlc.comm.ids import PeerId, Voter
from dlc.comm.servermessages import (
    NUMBERS_AHEAD_MAX,
    SEQ_MAX,
    Counted,
    Origin,
    Update,
    check_numbers,
    check_origin,
    check_update,
)
from dlc.comm.spans import Spans
from dlc.comm.wire import pack, unpack
from dlc.errors import ProtocolError

COUNTED_MAX = 4096
"""Trainers whose last counted push is remembered; beyond that those counted longest ago are forgotten."""
HEAD_BYTES = 4
"""Length of an image's header, in front of it."""


class SpanRule(Protocol):
    """As `dlc.train.outer_step.Rule`."""

    n_moments: ClassVar[int]

    def apply(self, t: int, lr: float, theta: Tensor, moments: Sequence[Tensor], g: Tensor, x: Tensor) -> None: ...


@dataclass(frozen=True)
class Optimizer:
    """How updates move the parameters; the same on all helpers."""

    name: str
    """Names rule, rates and mode: two states move alike exactly where it is equal."""
    rule: SpanRule
    lr: Callable[[int], float]
    """Learning rate of a round, the first is 1."""
    asynchronous: bool = False
    momentum: float | None = None
    """Asynchronous only: that of delayed Nesterov, whose one moment the rule names; 0: plain sgd; None: neither, the
    rule is applied to each update."""
    weight_decay: float = 0.0

    @property
    def n_vectors(self) -> int:
        """Vectors of a span's length: theta, moments, and the mean in the making of delayed Nesterov."""
        return 1 + self.rule.n_moments + (1 if self.asynchronous and self.momentum else 0)


@dataclass(frozen=True, slots=True)
class SpanHead:
    """All of the state but its vectors."""

    optimizer: str
    layout: bytes
    span: int
    origin: Origin
    seed: tuple[int, int]
    version: int
    step: int
    moved: int
    rounds: float
    buffered: int
    counted: tuple[Counted, ...]
    last: Update | None


class SpanState:
    """`theta`: the span's parameters, fp32, one-dimensional, on the CPU; becomes the state's own memory. `origin`:
    that of the training (see `server`)."""

    def __init__(self, spans: Spans, span: int, optimizer: Optimizer, theta: Tensor, origin: Origin) -> None:
        self.spans, self.span, self.optimizer, self.origin = spans, span, optimizer, origin
        if theta.dtype is not torch.float32 or theta.shape != (spans.numel(span),):
            raise ValueError(f"span {span} has {spans.numel(span)} fp32 elements, got {theta.dtype} {theta.shape}")
        self.theta = theta
        self._others = [torch.zeros_like(theta) for _ in range(optimizer.n_vectors - 1)]
        self.seed = (0, 0)
        """Term and version at which it was taken from a trainer."""
        self.version = self.step = 0
        self.moved = 0
        """Updates since the moments were zero."""
        self.rounds = 0.0
        """Asynchronous: sum of 1 / n over the updates."""
        self._buffered = 0
        """Updates in the mean in the making."""
        self.counted: dict[PeerId, Counted] = {}
        """Each trainer's newest push that is part of theta, those counted last at the end."""
        self.last: Update | None = None
        self._scratch = vectors.empty(min(spans.grid.chunk_elems, theta.numel()))

    def has(self, voter: Voter, seq: int) -> int | None:
        """Version of the update that made that push part of theta; 0: it is too old to be known. None: it is not."""
        counted = self.counted.get(voter.peer)
        if counted is None or (counted.voter.inc, counted.seq) < (voter.inc, seq):
            return None
        return counted.version if (counted.voter, counted.seq) == (voter, seq) else 0

    def newest(self, voter: Voter) -> int:
        """Number of its newest push that is part of theta; 0: none is. -1: not known any more."""
        counted = self.counted.get(voter.peer)
        if counted is None or counted.voter != voter:
            return 0 if len(self.counted) < COUNTED_MAX else -1
        return counted.seq

    # ---------------------------------------------------------------- moving

    def check(self, update: Update, payloads: Sequence[Payload]) -> None:
        """ProtocolError for what cannot be applied here."""
        sizes, later = self.spans.wire_sizes(self.span), update.step - self.step
        if not (self.optimizer.asynchronous or 0 < later <= NUMBERS_AHEAD_MAX):
            raise ProtocolError(f"an update of round {update.step} cannot follow round {self.step}")
        if update.version != self.version + 1 or update.n < 1 or any(p.seq > SEQ_MAX for p in update.pushes):
            raise ProtocolError(f"update {update.version} of span {self.span} cannot follow {self.version}")
        if len(payloads) != len(sizes) or any(len(p) not in (0, s) for p, s in zip(payloads, sizes, strict=True)):
            raise ProtocolError(f"update {update.version} of span {self.span} has payloads of another length")

    def apply(self, update: Update, payloads: Sequence[Payload]) -> None:
        """Move by one update; an empty payload leaves its chunk as it is. ProtocolError, with nothing changed."""
        self.check(update, payloads)
        self.version, self.step = update.version, max(self.step, update.step)
        self.moved += 1
        lr = self.optimizer.lr(int(self.rounds) + 1 if self.optimizer.asynchronous else self.step)
        delayed = self.optimizer.asynchronous and self.optimizer.momentum is not None
        flush = delayed and self._buffered + 1 >= update.n
        self._buffered = 0 if flush else self._buffered + 1
        self.rounds += 1 / update.n
        if self.optimizer.asynchronous:
            self.step = int(self.rounds)
        grid, chunks = self.spans.grid, self.spans.chunks(self.span)
        first = grid.span(chunks[0])[0]
        with torch.no_grad():
            for chunk, payload in zip(chunks, payloads, strict=True):
                a, b = (at - first for at in grid.span(chunk))
                if len(payload):
                    g = grid.coder.decode(payload, b - a)
                    self._move(a, b, lr, g, update.n if self.optimizer.asynchronous else 1, delayed)
                if flush and self.optimizer.momentum:
                    self._flush(a, b, lr)
        for push in update.pushes:
            self._count(Counted(push.voter, push.seq, update.version))
        while len(self.counted) > COUNTED_MAX:
            del self.counted[next(iter(self.counted))]
        self.last = update

    def _count(self, push: Counted) -> None:
        known = self.counted.pop(push.voter.peer, push)
        older = (push.voter.inc, push.seq) < (known.voter.inc, known.seq)  # a late one of the peer's process before
        self.counted[push.voter.peer] = known if older else push

    def _move(self, a: int, b: int, lr: float, g: Tensor, n: int, delayed: bool) -> None:
        """By an update that is an n-th of a round."""
        theta, x = self.theta[a:b], self._scratch[: b - a]
        if self.optimizer.weight_decay:
            torch.mul(theta, _fp32(lr * self.optimizer.weight_decay / n), out=x)
            theta.sub_(x)
        if not delayed:
            moments = [vector[a:b] for vector in self._others]
            self.optimizer.rule.apply(self.moved, lr / n, theta, moments, g, x)
            return
        g.div_(float(n))
        if self.optimizer.momentum:
            self._others[-1][a:b].add_(g)
        torch.mul(g, _fp32(lr), out=x)
        theta.sub_(x)

    def _flush(self, a: int, b: int, lr: float) -> None:
        """m <- mu m + b ; theta <- theta - lr mu m ; b <- 0"""
        m, mean = self._others[0][a:b], self._others[-1][a:b]
        mu, x = _fp32(self.optimizer.momentum or 0.0), self._scratch[: b - a]
        m.mul_(mu)
        m.add_(mean)
        mean.zero_()
        torch.mul(m, mu, out=x)
        x.mul_(_fp32(lr))
        self.theta[a:b].sub_(x)

    # ---------------------------------------------------------------- the whole of it

    def digest(self) -> bytes:
        """BLAKE3-256: equal exactly where the states are."""
        hasher = blake3(self._head())
        for vector in (self.theta, *self._others):
            hasher.update(vector.numpy().data.cast("B"))
        return hasher.digest()

    def image_bytes(self) -> int:
        return HEAD_BYTES + len(self._head()) + 4 * self.theta.numel() * self.optimizer.n_vectors

    def image(self) -> bytes:
        """A frozen copy: [length of the head][head][theta][the other vectors], little-endian."""
        head = self._head()
        vectors = (vector.numpy().tobytes() for vector in (self.theta, *self._others))
        return b"".join((len(head).to_bytes(HEAD_BYTES, "little"), head, *vectors))

    @classmethod
    def restored(cls, spans: Spans, span: int, optimizer: Optimizer, image: bytes) -> SpanState:
        """The state of an image. ProtocolError: it is none of this span, or moves by other rules."""
        length = int.from_bytes(image[:HEAD_BYTES], "little")
        head = unpack(image[HEAD_BYTES : HEAD_BYTES + length], SpanHead)
        if head.optimizer != optimizer.name or head.span != span:
            raise ProtocolError(f"an image of span {head.span} under {head.optimizer}, not {span}, {optimizer.name}")
        if head.layout != spans.digest:
            raise ProtocolError(f"an image of span {span} in another layout")
        check_numbers(*head.seed, head.version, head.step, head.moved, head.rounds, head.buffered)
        check_origin(head.origin)
        if head.last is not None:
            check_update(head.last)
        numel, start = spans.numel(span), HEAD_BYTES + length
        if len(image) != start + 4 * numel * optimizer.n_vectors:
            raise ProtocolError(f"an image of span {span} with {len(image)} bytes")
        vectors = np.frombuffer(image, "<f4", offset=start).astype(np.float32).reshape(optimizer.n_vectors, numel)
        state = cls(spans, span, optimizer, torch.from_numpy(vectors[0]), head.origin)
        for other, vector in zip(state._others, vectors[1:], strict=True):
            other.numpy()[:] = vector
        state.seed = head.seed
        state.version, state.step, state.moved = head.version, head.step, head.moved
        state.rounds, state._buffered, state.last = head.rounds, head.buffered, head.last
        state.counted = table_of(head.counted, head.version)
        return state

    def _head(self) -> bytes:
        return pack(
            SpanHead(
                self.optimizer.name,
                self.spans.digest,
                self.span,
                self.origin,
                self.seed,
                self.version,
                self.step,
                self.moved,
                self.rounds,
                self._buffered,
                tuple(self.counted.values()),
                self.last,
            )
        )


def table_of(pushes: Sequence[Counted], version: int) -> dict[PeerId, Counted]:
    """What somebody says is counted in a theta of this version (`SpanState.counted`). ProtocolError: it cannot be."""
    table = {push.voter.peer: push for push in pushes}
    if not len(pushes) == len(table) <= COUNTED_MAX:
        raise ProtocolError(f"{len(pushes)} newest pushes of {len(table)} trainers")
    for push in pushes:
        if not 1 <= push.seq <= SEQ_MAX or not 0 < push.version <= version:
            raise ProtocolError(f"push {push.seq} of {push.voter}, counted in {push.version}, in version {version}")
    return table


def contributors(update: Update | None) -> Iterable[Voter]:
    """Whose pushes it holds."""
    return () if update is None else (push.voter for push in update.pushes)


def _fp32(value: float) -> float:
    return float(np.float32(value))
