"""The strategy "parameter-server": what H inner steps changed is pushed to helpers, and the parameters are pulled.

    pull ──> theta ──> H inner steps ──> push theta - local ──> (counted, or told why not) ──> pull ──> theta ...

With server.async = false a round is made of one push of every trainer; with true each push moves theta by itself, and
nobody waits for another trainer; a slower one makes fewer inner steps, so that all push about as often. A push that is
refused (stale, late) is lost work, and told as such: the inner steps go on from the parameters that were pulled then.

Promises of a run that it keeps: no master (each span of the parameters has an owner and a standby; `dlc.comm.server`),
true reports, strangers stay out. Not kept: one model in the same bits on all trainers (with `async` each sees theta as
of its own pull), and data that is trained once: without leases every trainer draws samples in an order of its own.
"""

from __future__ import annotations

import contextlib
import logging
import math
import statistics
import threading
from collections.abc import Sequence
from typing import Any, cast

import torch
from blake3 import blake3

from dlc.comm import vectors
from dlc.comm.roles import HELPER
from dlc.errors import DlcError, RoundTimeout
from dlc.handles import Checkpoint, Position
from dlc.peer import Peer
from dlc.server import ServerClient, ServerReport
from dlc.train.checkpoint import bytes_tensor
from dlc.train.data import first_block
from dlc.train.loader import AHEAD_MAX, Loader, Stopped
from dlc.train.outer import OuterState, pseudo_gradient, theta_of
from dlc.train.phases import DIVERGED_MAX
from dlc.train.rng import load_random_state, random_state
from dlc.train.saves import Local, Saved
from dlc.train.strategy import CHANNEL, Parts
from dlc.train.telling import at_the_end

log = logging.getLogger(__name__)

WAIT_SLICE_S = 0.2
"""Between two looks at `stop` and at what the peer has to say, while an exchange is waited for."""
STOP_S = 5.0
"""An exchange that is near is waited for, when the training is to stop."""
_BLOCKS, _HISTORY = "blocks", "history"
_ENDED = (
    "the run has ended while this peer was away: %s came to its last round, and no helper has its parameters any more. "
    "The model of the end is in their state directories; this peer's is of round %d"
)


class Served:
    """See `strategy.Strategy`."""

    def __init__(self, parts: Parts) -> None:
        self._parts, self._spec = parts, parts.spec
        self._view = parts.engine.view
        self._theta = self._view.gather(vectors.empty(self._view.numel))
        self._push = torch.empty_like(self._theta)
        self.inner = parts.engine.inner_loop()
        on_gpu = self.inner.device.type == "cuda"
        self._loader = Loader(parts.source, parts.engine.batch_size, on_gpu, parts.calls.stopping)
        self._client: ServerClient | None = None
        self._position = Position(0, 0.0, b"", None, b"")
        self._first_block = first_block(self._spec.seed, parts.peer.id)
        self._blocks = 0
        """Drawn so far, by this process and those before it."""
        self._history = b""
        """What theta is part of (`ServerClient.history`)."""
        self._diverged = self._exchanges = 0

    @property
    def position(self) -> Position:
        return self._position

    def newest(self) -> Position:
        return self._position

    def open(self, saved: Saved | None) -> Position:
        if saved is not None:
            self._theta.copy_(theta_of(saved.image))
            self._blocks = int(saved.own[_BLOCKS]) if _BLOCKS in saved.own else 0
            self._history = saved.own[_HISTORY].numpy().tobytes() if _HISTORY in saved.own else b""
            self.inner.load(saved.inner)
            load_random_state(saved.rng, self._parts.engine.device)
        spec = self._spec
        self._client = ServerClient(
            cast(Peer, self._parts.peer),
            self._theta,
            spec=spec.server,
            codec=spec.codec,
            chunk_elems=spec.chunk_elems,
            step=saved.t if saved is not None else 0,
            history=self._history,
        )
        self._client.begin()
        report = self._wait(None)
        assert report is not None
        self._adopt(report)
        if report.rounds_lost:  # at full phases: how many steps this trainer made in each is not kept
            self._parts.tell.history_lost(report.rounds_lost, float(report.rounds_lost * spec.tokens_per_round))
        return self._position

    def ready(self) -> bool:
        return True

    def advance(self, stop: threading.Event) -> None:
        losses, tokens = self._inner_phase(stop)
        if not losses:
            return
        local = self._view.gather(self._push)
        push = pseudo_gradient(self._theta, local, out=self._push)
        if not all(map(math.isfinite, (*losses, float(push.abs().max())))):
            self._start_again(len(losses), tokens)
            return
        self._diverged = 0
        self._exchange(stop, losses, tokens)

    def _inner_phase(self, stop: threading.Event) -> tuple[list[float], int]:
        """H inner steps, or fewer on `stop`: the loss of each, and the tokens of all. A loss that is not finite ends
        them, and is the last."""
        parts, h, t = self._parts, self._steps(), self._position.t
        parts.tell.round_begins(t, 0, h)
        losses: list[float] = []
        tokens, first = 0, t * self._spec.sync_every
        count = self._spec.inner.batch_size * self._spec.inner.accumulate
        for inner in range(h):
            parts.calls.hear()
            if parts.calls.over(stop) is not None:
                break
            block = self._first_block + self._blocks
            group, *ahead = [range(block + i * count, block + (i + 1) * count) for i in range(1 + AHEAD_MAX)]
            began = parts.clock()
            try:
                batches = self._loader.take(group, ahead)
            except Stopped:
                break
            result = self.inner.train_step(batches, first + inner)
            self._blocks += count
            tokens += result.tokens
            losses.append(math.nan if result.diverged else result.loss)
            if result.diverged:
                break
            parts.tell.step(t, inner + 1, h, result.loss, result.tokens, parts.clock() - began)
            parts.tell.event(
                "step",
                t=t,
                step=first + inner,
                inner=inner + 1,
                of=h,
                loss=result.loss,
                tokens_per_s=parts.tell.tokens_per_s,
                mfu=parts.tell.mfu,
                lr=self.inner.optimizer.param_groups[0]["lr"],
            )
        return losses, tokens

    def _steps(self) -> int:
        """Of the next inner phase: H; with `async` in proportion to the speed, so that all push about as often."""
        h, own = self._spec.sync_every, self._parts.tell.tokens_per_s
        if not self._spec.server.async_ or not own:
            return h
        members: Sequence[Any] = self._parts.peer.members()
        return share_of_steps(h, own, [member.speed for member in members if member.alive and not member.me])

    def _exchange(self, stop: threading.Event, losses: list[float], tokens: int) -> None:
        parts, client = self._parts, self._client
        assert client is not None
        parts.tell.phase("waiting")
        began = parts.clock()
        client.begin(self._push, weight=float(tokens))
        try:
            report = self._wait(stop)
        except DlcError:
            parts.tell.work_dropped(self._position.t, len(losses), tokens)
            raise
        if report is None:
            parts.tell.work_dropped(self._position.t, len(losses), tokens)
            parts.calls.moved(0, 0, parts.clock() - began)
            return
        self._adopt(report)
        if report.set_aside:
            parts.tell.history_lost(report.set_aside, report.set_aside_weight)
        if report.counted < 1.0:
            lost = 1.0 - report.counted
            parts.tell.work_dropped(self._position.t, len(losses), round(tokens * lost), share=lost)
        counted = report.counted > 0.5
        self._exchanges += 1
        head = f"{parts.peer.id[:8]}-{self._exchanges}"
        loss = statistics.fmean(losses) if counted else None
        parts.calls.on_round(report.to_round(CHANNEL, head), counted, loss, parts.clock() - began)
        parts.calls.counted(self._position.t, stop)

    def _wait(self, stop: threading.Event | None) -> ServerReport | None:
        """The report of the exchange under way; None: `stop` came first, and a while passed since. DlcError: the run
        has ended without this peer, and nobody serves it any more."""
        client, clock = self._client, self._parts.clock
        assert client is not None
        left_s, over_since = STOP_S, math.inf
        while not client.done:
            self._parts.calls.listen()
            client.poll(WAIT_SLICE_S)
            ended = self._ended()
            over_since = min(over_since, clock()) if ended else math.inf
            if clock() - over_since >= self._spec.timeouts.evict_s:
                raise DlcError(_ENDED % (ended, self._position.t))
            if stop is not None and stop.is_set():
                left_s -= WAIT_SLICE_S
                if left_s <= 0:
                    break
        try:
            return client.wait(0.0)
        except RoundTimeout:
            return None

    def _ended(self) -> str:
        """Names of those who have come to the end of the run, where no helper is left; empty: it goes on."""
        members = self._parts.peer.members(departed=True) if self._spec.rounds else []
        if any(m.role == HELPER and m.alive and not m.left for m in members):
            return ""
        return at_the_end(members, self._spec)

    def _adopt(self, report: ServerReport) -> None:
        """The model becomes what was pulled."""
        assert self._client is not None
        self._client.read(self._theta)
        self._history = self._client.history()
        self._view.scatter(self._theta)
        digest = blake3(self._theta.numpy().data.cast("B")).digest()
        self._position = Position(report.step, 0.0, b"", None, digest)

    def _start_again(self, steps: int, tokens: int) -> None:
        """From what was pulled last, with a new inner optimizer: the steps since were not finite."""
        self._diverged += 1
        self._parts.tell.work_dropped(self._position.t, steps, tokens)
        self._parts.tell.event("diverged", t=self._position.t, in_a_row=self._diverged)
        log.warning("the loss is not finite; those inner steps are undone, and not pushed")
        self._view.scatter(self._theta)
        self.inner = self._parts.engine.inner_loop()
        if self._diverged >= DIVERGED_MAX:
            raise DlcError(
                f"the loss was not finite {DIVERGED_MAX} times in a row (last after round {self._position.t}): "
                'found the run anew, or from its model (model.kind = "path"), with a lower inner.lr, a longer '
                "inner.warmup_steps, or inner.clip_norm above 0"
            )

    def wind_up(self, stopped: bool, stop: threading.Event) -> None:
        """Nothing is left over: each phase ends in its exchange."""

    def finish(self) -> Position:
        self._view.scatter(self._theta)  # where an exchange was given up, the model has steps that may never count
        return self._position

    def at_rest(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def frozen(self) -> Checkpoint:
        state = OuterState(self._theta, self._spec.outer.ending(self._spec.rounds), t=self._position.t)
        return Checkpoint(b"", self._position.t, 0.0, self._position.digest, state.export())

    def local(self) -> Local:
        own = {_BLOCKS: torch.tensor([self._blocks], device="cpu"), _HISTORY: bytes_tensor(self._history)}
        return Local(self.inner.tensors(), None, random_state(self._parts.engine.device), own)

    def close(self) -> None:
        self._loader.close()


def share_of_steps(h: int, own: float, others: Sequence[float]) -> int:
    """floor(H v / v_max), at least 1 (dynamic local updates, arXiv:2401.09135); what others tell is checked."""
    fastest = max((speed for speed in others if math.isfinite(speed)), default=0.0)
    return h if fastest <= own else max(1, int(h * own / fastest))
