"""The strategies "gossip" and "moshpit": a peer trains its own model, and averages its parameters with a few others.

    [ H inner steps ──> exchange with a few ──> show the model to newcomers ] again: a *round*, of this peer alone

- There is no log, and so no common state: models differ between peers, by the *consensus distance* that every
  exchange tells (the root mean square of how far each is from the mean of all). Nobody is waited for but the few of an
  exchange, and these for a limited time. Who they are, and what becomes of the vector, is the part of an `Exchange`.
- A peer that dies takes what it had learned since its last exchange with it, and harms nobody. One that comes later
  takes the model of whoever is furthest (`handover`), and that peer's step. Where all who have trained are gone before
  it has that, it begins no other training under the run's name: it waits for them for `timeouts.evict_s`, and ends.
- Kept are P1 (no master), P5 (strangers stay out) and P6 (true reports). Not kept: P2 (there is no one model), P7
  (every peer goes through all of the data in an order of its own: samples are drawn, not leased).
- A checkpoint is of this peer alone: its model and its inner optimizer.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import torch
from blake3 import blake3
from torch import Tensor

from dlc.comm import vectors
from dlc.comm.ids import PeerId
from dlc.comm.roles import TRAINER
from dlc.errors import CheckpointError, DlcError, JoinError
from dlc.flat import finite
from dlc.handles import Checkpoint, Position
from dlc.handover import T_MAX, Handover
from dlc.peer import Peer
from dlc.runspec import OuterSpec, RunSpec
from dlc.train.data import first_block
from dlc.train.loader import AHEAD_MAX, Loader
from dlc.train.outer import OuterState, theta_of
from dlc.train.phases import DIVERGED_MAX
from dlc.train.rng import load_random_state, random_state
from dlc.train.saves import Local, Saved
from dlc.train.strategy import Parts
from dlc.train.swarm import Frozen, MemberView
from dlc.train.telling import ENDS, at_the_end

log = logging.getLogger(__name__)

NAME = "train"
LOOK_S = 5.0
"""How long a newcomer waits to hear from all known trainers where they stand: each tells it once it has a model. One
that heard of nobody looks again before its first exchange."""
LOOK_EVERY_S = 0.05
EXCHANGE_S = 600.0
"""An exchange that has begun ends within this; who dies in it is noticed far sooner."""
_COUNTS = "counts"
_MISSED = (
    "all who have trained in this run have left, or do not answer, before this peer had the model of one of them (%s): "
    "it is in their state directories, as their newest checkpoint. Start one of them again and join by its address, or "
    "begin the run anew, with --config and without --peers"
)
_ENDED = (
    "the run has ended, and all who have its model have left, or do not answer, before this peer had its first round "
    "(%s): it is in their state directories, as their newest checkpoint; with more rounds, start one of them again, "
    "and this peer goes on from there by its address"
)


@dataclass(frozen=True)
class Averaged:
    """What an exchange did."""

    t: int
    """Its number: who falls behind goes on with that of the others, so that all end together."""
    partners: tuple[str, ...]
    """Peer ids of the others whose vectors are part of the mean."""
    missing: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Peer id to why its vector is not, though it was to be."""
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds: float = 0.0
    waiting_s: float = 0.0
    """Part of them in which this peer only waited."""
    weight: float = 1.0
    """Of push-sum. What this peer learns next counts with that and what comes meanwhile, together 1 on average."""


class Exchange(Protocol):
    """With whom one averages, and how. A `step` waits for nobody from the time on that the training is to stop."""

    def step(self, t: int, vector: Tensor) -> Averaged:
        """Average `vector` (fp32, CPU, [numel]) in place, as round `t`; who fails is no part of the mean."""

    def own(self) -> dict[str, Tensor]:
        """What is to be kept of this peer in a checkpoint."""

    def load(self, own: Mapping[str, Tensor]) -> None:
        """Take it back."""

    def begin(self, vector: Tensor) -> None:
        """Before the first step, where nothing was loaded: the model that all began with, or a newcomer took over."""

    def close(self) -> None:
        """Take part no longer."""


class Averaging:
    """See `strategy.Strategy`; the peer is no site of several processes."""

    def __init__(self, parts: Parts) -> None:
        self._parts, self._view = parts, parts.engine.view
        self._peer = cast(Peer, parts.peer)
        self._inner = parts.engine.inner_loop()
        on_gpu = self._inner.device.type == "cuda"
        self._loader = Loader(parts.source, parts.engine.batch_size, on_gpu, parts.calls.stopping)
        self._vector = self._view.gather(vectors.empty(self._view.numel))
        """The model after the last exchange: what steps that diverge are undone to."""
        self._scratch = torch.empty_like(self._vector)
        self._handover: Handover | None = None
        self._exchange: Exchange | None = None
        self._first_block = first_block(parts.spec.seed, self._peer.id)
        self._unheard = False
        """There are others, and when this peer began none had told where it stands, or one that is further had not."""
        self._told: dict[PeerId, int] = {}
        """The step that each of the others told last: one that comes back tells none before it has its model again."""
        self._in_vain = False
        """Who is further could not give its model when it was asked."""
        self._t = self._blocks = self._tokens = self._new_tokens = 0
        """`new`: since the last exchange, and in `blocks` and `tokens`, too."""
        self._inner_step = self._kept_steps = self._diverged = 0
        """`kept`: inner steps of this phase that are in `vector` already: it was resumed in the middle."""
        self._loss_sum = 0.0
        self._over = False
        """It takes part in no exchange any more."""

    @property
    def position(self) -> Position:
        """`tokens`: of this peer alone. There is no lease, and no head."""
        return Position(self._t, float(self._tokens), b"", None, b"")

    def newest(self) -> Position:
        return self.position

    # ---------------------------------------------------------------- the beginning

    def open(self, saved: Saved | None) -> Position:
        spec = self._parts.spec
        handover = self._handover = Handover(self._peer, NAME, self._view.numel, spec.seed, last_of(spec))
        if saved is not None:
            self._restore(saved)
        handover.stand(self._t, self._vector)
        if self._caught_up(handover):
            self._inner_step = self._kept_steps = 0
        exchange = self._exchange = exchange_of(self._peer, self._parts)
        own = {name: tensor for name, tensor in saved.own.items() if name != _COUNTS} if saved is not None else {}
        if own and saved is not None and saved.t == self._t:
            exchange.load(own)
        else:
            exchange.begin(self._vector)
        return self.position

    def _restore(self, saved: Saved) -> None:
        counts = saved.own.get(_COUNTS)
        if counts is None or counts.shape != (3,):
            raise CheckpointError(
                f"{saved.path} is not of a run that averages without a log, or is of another version of dlc"
            )
        self._vector.copy_(theta_of(saved.image))
        self._view.scatter(self._vector)
        self._inner.load(saved.inner)
        load_random_state(saved.rng, self._inner.device)
        blocks, tokens, made = (int(count) for count in counts)
        if saved.peer in ("", self._peer.id):  # what another one drew and trained is not counted as this one's
            self._blocks, self._tokens = blocks, tokens
        self._t, self._inner_step, self._kept_steps = saved.t, made, made

    def _caught_up(self, handover: Handover) -> bool:
        """Whether the model is that of another, who is further. JoinError: see `_missed`."""
        pause, since = threading.Event(), None
        while not ((furthest := self._furthest(handover)) > self._t and self._take_over(handover)):
            lost, now, evict_s = self._out_of_reach(), self._parts.clock(), self._parts.spec.timeouts.evict_s
            if not lost and (self._t or not furthest):
                return False
            if self._t:
                log.warning("%s trained further, and left or do not answer: goes on from round %d", lost, self._t)
                return False
            if not lost:  # a model that nobody has trained would spoil theirs
                since = None
            elif since is None:
                since = now
                log.warning("%s have the model, and left or do not answer: waiting for %g s at most", lost, evict_s)
            elif now - since >= evict_s:
                raise self._missed(lost)
            self._parts.calls.listen()
            pause.wait(LOOK_EVERY_S)
        return True

    def _out_of_reach(self) -> str:
        """Names of the trainers that are further than this peer, where none of them gives its model any more, or again;
        empty where one may, or nobody is further."""
        last, members = last_of(self._parts.spec), self._peer.members(departed=True)
        others = [m for m in members if m.role == TRAINER and not m.me]
        told = _told_by(others)
        self._told |= told
        further = [m for m in others if self._t < self._told.get(m.id, 0) <= last]
        if any(m.id in told and m.alive and not m.left and m.status.get("phase") != ENDS for m in further):
            return ""
        return ", ".join(m.id[:8] for m in further)

    def _missed(self, lost: str) -> JoinError:
        """All who have trained are gone, and this peer has nothing of it."""
        ended = at_the_end(self._peer.members(departed=True), self._parts.spec)
        return JoinError((_ENDED if ended else _MISSED) % lost)

    def _furthest(self, handover: Handover) -> int:
        """The furthest step of the others; 0 where nobody tells one."""
        pause, end, last = threading.Event(), self._parts.clock() + LOOK_S, last_of(self._parts.spec)
        while True:
            standings = handover.standings()
            # one that is not known to live may only not have answered this newcomer yet
            others = [m for m in self._peer.members() if not (m.left or m.me) and m.role == TRAINER]
            silent = {m.id for m in others} - {standing.voter.peer for standing in standings}
            if not silent or self._parts.clock() >= end:
                told = _told_by(m for m in others if m.id in silent and m.status.get("phase") != ENDS)
                further = any(self._t < t <= last for t in told.values())
                self._unheard = bool(others) and (further or not standings)
                return max((standing.t for standing in standings), default=0)
            pause.wait(LOOK_EVERY_S)

    def _take_over(self, handover: Handover) -> bool:
        """Whether somebody who is further gave its model; `scratch` is spoilt."""
        t = handover.fetch(self._scratch, above=self._t)
        if t is None:
            again = self._unheard or not self._t
            then = "it is asked for again" if again else f"this peer goes on from its own, of round {self._t}"
            log.log(logging.DEBUG if self._in_vain else logging.WARNING, "nobody could give its model: %s", then)
            self._in_vain = True
            return False
        log.info("goes on from the model of another peer, of round %d; its own was of round %d", t, self._t)
        self._vector, self._scratch = self._scratch, self._vector
        self._view.scatter(self._vector)
        self._t = t
        handover.stand(t, self._vector)
        return True

    # ---------------------------------------------------------------- steps

    def ready(self) -> bool:
        return True

    def advance(self, stop: threading.Event) -> None:
        parts, h = self._parts, self._parts.spec.sync_every
        parts.tell.round_begins(self._t, self._inner_step, h)
        while self._inner_step < h:
            parts.calls.hear()
            if parts.calls.over(stop) is not None:
                return
            if not self._step(h):
                return
        if finite(self._view.gather(self._scratch)):
            self._average(stop)
        else:
            self._undo()

    def _step(self, h: int) -> bool:
        """One inner step. False: it diverged."""
        parts, count, began = self._parts, self._parts.spec.blocks_per_step, self._parts.clock()
        first = self._first_block + self._blocks
        groups = [range(first + i * count, first + (i + 1) * count) for i in range(1 + AHEAD_MAX)]
        batches = self._loader.take(groups[0], groups[1:])
        step = self._t * h + self._inner_step
        result = self._inner.train_step(batches, step)
        self._blocks += count
        if result.diverged:
            self._undo()
            return False
        self._tokens += result.tokens
        self._new_tokens += result.tokens
        self._loss_sum += result.loss
        self._inner_step += 1
        tell = parts.tell
        tell.step(self._t, self._inner_step, h, result.loss, result.tokens, parts.clock() - began)
        tell.event(
            "step",
            t=self._t,
            step=step,
            inner=self._inner_step,
            of=h,
            loss=result.loss,
            tokens_per_s=tell.tokens_per_s,
            mfu=tell.mfu,
            lr=self._inner.optimizer.param_groups[0]["lr"],
        )
        return True

    def _undo(self) -> None:
        """Steps diverged: the model is that of the last exchange again. DlcError: it was so too often."""
        self._diverged += 1
        self._drop(self._t)
        self._parts.tell.event("diverged", t=self._t, in_a_row=self._diverged)
        log.warning("the loss is not finite; the inner steps since the last round are undone")
        self._view.scatter(self._vector)
        self._inner = self._parts.engine.inner_loop()
        if self._diverged >= DIVERGED_MAX:
            raise DlcError(
                f"the loss was not finite {DIVERGED_MAX} times in a row (last after round {self._t}): found the run "
                'anew, or from its model (model.kind = "path"), with a lower inner.lr, a longer inner.warmup_steps, or '
                "inner.clip_norm above 0"
            )

    def _average(self, stop: threading.Event) -> None:
        """`scratch` holds the parameters."""
        parts = self._parts
        assert self._exchange is not None and self._handover is not None
        parts.tell.phase("waiting")
        ts = [standing.t for standing in self._handover.standings()]
        if self._unheard and max(ts, default=0) > self._t:
            self._begin_again()
            return
        if self._unheard and not self._t and (lost := self._out_of_reach()):
            raise self._missed(lost)
        self._unheard = False
        averaged = self._exchange.step(max(self._t + 1, followed(ts, last_of(parts.spec))), self._scratch)
        self._vector, self._scratch = self._scratch, self._vector
        self._view.scatter(self._vector)
        steps = self._inner_step - self._kept_steps  # 0: all were made before a resume
        loss, self._loss_sum = self._loss_sum / steps if steps else None, 0.0
        self._t, self._diverged, self._new_tokens = averaged.t, 0, 0
        self._inner_step = self._kept_steps = 0
        distance = self._handover.stand(self._t, self._vector)
        parts.calls.moved(averaged.bytes_sent, averaged.bytes_received, averaged.waiting_s)
        parts.tell.event(
            "averaging",
            t=self._t,
            partners=list(averaged.partners),
            missing=dict(averaged.missing),
            distance=distance,
            bytes_sent=averaged.bytes_sent,
            bytes_received=averaged.bytes_received,
            seconds=averaged.seconds,
            waiting_s=averaged.waiting_s,
            weight=averaged.weight,
            loss=loss,
            tokens_per_s=parts.tell.tokens_per_s,
            mfu=parts.tell.mfu,
        )
        parts.calls.counted(self._t, stop)

    def _begin_again(self) -> None:
        """From the model of the others, whom this peer did not hear of when it began: one that it has trained alone
        would spoil theirs. Where nobody gives it now, the next call tries again, before anything is exchanged."""
        assert self._exchange is not None and self._handover is not None
        parts, t = self._parts, self._t
        if not self._take_over(self._handover):
            threading.Event().wait(LOOK_EVERY_S)
            return
        self._unheard = False
        self._exchange.begin(self._vector)
        self._inner = parts.engine.inner_loop()
        self._drop(t)
        self._inner_step = self._kept_steps = 0

    def _drop(self, t: int) -> None:
        """The inner steps since `vector`, of exchange `t`, are no part of the model any more."""
        steps, tokens = self._inner_step - self._kept_steps, self._new_tokens
        self._inner_step, self._loss_sum, self._new_tokens = self._kept_steps, 0.0, 0
        self._tokens -= tokens
        if steps:
            self._parts.tell.work_dropped(t, steps, tokens)

    # ---------------------------------------------------------------- the end

    def wind_up(self, stopped: bool, stop: threading.Event) -> None:
        """What was trained since the last exchange stays in this peer's own model, and so in its checkpoint."""

    def finish(self) -> Position:
        """Of a common state there is none: the model stays this peer's own, and is shown to newcomers until `close`.
        `digest` is that of its parameters."""
        self._end_exchanges()
        self._view.gather(self._scratch)
        digest = blake3(self._scratch.numpy().data.cast("B")).digest()
        return Position(self._t, float(self._tokens), b"", None, digest)

    def at_rest(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def frozen(self) -> Frozen:
        image = OuterState(self._view.gather(self._scratch), OuterSpec(optimizer="sgd"), t=self._t).export()
        return Checkpoint(b"", self._t, float(self._tokens), blake3(image).digest(), image)

    def local(self) -> Local:
        assert self._exchange is not None
        counts = torch.tensor([self._blocks, self._tokens, self._inner_step], device="cpu")
        own = {_COUNTS: counts, **self._exchange.own()}
        return Local(self._inner.tensors(), None, random_state(self._inner.device), own)

    def close(self) -> None:
        self._loader.close()
        self._end_exchanges()
        if self._handover is not None:
            _part_from(self._handover)

    def _end_exchanges(self) -> None:
        if self._exchange is not None and not self._over:
            self._over = True
            _part_from(self._exchange)


def _part_from(part: Exchange | Handover) -> None:
    """Nobody counts on this peer's exchanges, or on its model, any more."""
    try:
        part.close()
    except DlcError as error:  # the peer has left already, and everybody knows
        log.debug("%s", error)


def _told_by(members: Iterable[MemberView]) -> dict[PeerId, int]:
    """The step that each of them tells, by peer id; without those that tell none."""
    return {m.id: t for m in members if type(t := m.status.get("t")) is int}


def last_of(spec: RunSpec) -> int:
    """The last round that there can be: who tells of one after it is not followed."""
    return spec.rounds or T_MAX


def followed(ts: Sequence[int], last: int) -> int:
    """Of the rounds that the others are at: the furthest, with which this peer goes on; 0 where there is none. To
    the run's end one goes by itself, or with most: one that has ended alone, behind a cut, and is started again, is
    there, too."""
    at_end = sum(t >= last for t in ts)
    return max((t for t in ts if t < last or 2 * at_end > len(ts) + 1), default=0)


def exchange_of(peer: Peer, parts: Parts) -> Exchange:
    """What the run names."""
    spec, stopping = parts.spec, parts.calls.stopping
    if spec.strategy == "moshpit":
        from dlc.train.grids import Grids

        return Grids(peer, spec, stopping)
    if spec.gossip.update == "noloco":
        from dlc.train.noloco import Pairs

        return Pairs(peer, spec, stopping)
    from dlc.train.gifts import Gifts

    return Gifts(peer, spec, stopping)
