"""The strategy "data-parallel": the gradients of every step, averaged over all peers; all take the same step.

    [ blocks ──> forward ──> offer ──> backward ──> theta ] again
                             weight:   meanwhile    all apply the mean to the same replicated AdamW, see `joint`
                             tokens    the round

- The gradient is offered as its last backward begins, and is averaged as it is made, from the last parameters to the
  first (`gradients`); only the first step of a process waits for the end of backward. If it turns out not to be finite,
  or backward fails, nothing more of it is sent: what others took before is a part of those chunks' means, as of a peer
  that died then.
- A round is an entry of the log, so all its promises hold: a peer that dies in the middle of a step leaves the true
  weighted mean of the others, whoever goes on has the same bits, a block is counted once.
- The mean belongs to one theta. A gradient that comes too late for its step is dropped, and its blocks are trained
  again at the new theta: with this strategy nothing is ever stale. So who is much slower than the others adds little
  (`diloco` has a use for its work), and waits for a round cost what they last: inner steps cannot go on meanwhile.
- With codec fp32 a step is that of one process with the batches of all, up to the order of the sums.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from dlc.comm import vectors
from dlc.comm.filling import Filling
from dlc.errors import DlcError, RoundTimeout
from dlc.train.gradients import Gradients
from dlc.train.joint import JointState, joint_spec, step_chunk_elems
from dlc.train.loader import AHEAD_MAX, Loader
from dlc.train.outer_loop import WAIT_SLICE_S
from dlc.train.phases import DIVERGED_MAX, LAST_ROUND_S
from dlc.train.rng import load_random_state, random_state
from dlc.train.saves import Local, Saved
from dlc.train.strategy import CHANNEL, Parts
from dlc.train.swarm import Frozen, Pending, Position

log = logging.getLogger(__name__)

TELL_WAITING_S = 1.0
"""A step that waits for so long is told as waiting."""
NOT_FINITE = "its gradient is not finite"


class DataParallel:
    """See `strategy.Strategy`; the peer is no site of several processes."""

    def __init__(self, parts: Parts) -> None:
        self._parts, self._view = parts, parts.engine.view
        self._inner = parts.engine.inner_loop()
        self._vector = self._view.gather(vectors.empty(self._view.numel))
        """theta as it was pulled; then the gradient that is offered; then theta again."""
        self.state = JointState(self._vector, self._view.tensors, joint_spec(parts.spec), parts.spec.inner)
        self._chunk_elems = parts.spec.chunk_elems or step_chunk_elems(self._view.numel, parts.spec.codec)
        self._gradients = Gradients(self._view.tensors, self._chunk_elems, parts.clock)
        on_gpu = self._inner.device.type == "cuda"
        self._loader = Loader(parts.source, parts.engine.batch_size, on_gpu, parts.calls.stopping)
        self._position: Position | None = None
        self._stopped_at = math.inf
        self._diverged = 0

    @property
    def position(self) -> Position:
        if self._position is None:
            raise DlcError("the channel is not open yet")
        return self._position

    def newest(self) -> Position:
        return self._parts.peer.position(CHANNEL)

    def open(self, saved: Saved | None) -> Position:
        parts, spec = self._parts, self._parts.spec
        if saved is not None:
            self.state.restore(saved.image, any_end=saved.spec != spec)
            load_random_state(saved.rng, parts.engine.device)
        parts.peer.open(
            CHANNEL,
            self.state,
            codec=spec.codec,
            chunk_elems=self._chunk_elems,
            lease_len=spec.blocks_per_lease,
        )
        return self.finish()

    def ready(self) -> bool:
        newest = self.newest()
        if newest.digest and (newest.t, newest.digest) != (self.position.t, self.position.digest):
            self.finish()
        else:
            self._position = newest
        lease = self.position.lease
        return bool(newest.digest) and lease is not None and lease.blocks > 0

    def advance(self, stop: threading.Event) -> None:
        parts, began = self._parts, self._parts.clock()
        blocks, later = self._blocks()
        parts.tell.phase("training")
        batches = self._loader.take(blocks, later)
        tokens, upto, after = sum(ids.numel() for ids in batches), blocks[-1] + 1, self.position.t

        def offer(filling: Filling | None) -> Pending:
            return parts.peer.contribute(
                CHANNEL, self._vector, weight=float(tokens), upto=upto, after=after, filling=filling
            )

        with self._untouched():
            loss, sound, pending = self._gradient(batches, offer)
            if sound:
                self._tell_step(loss, tokens, parts.clock() - began)
            elif pending is None or parts.peer.withdraw(CHANNEL):
                self._tell_diverged()
                return
            pending = pending or offer(None)
            since = parts.clock()
            if not self._wait(pending, stop):
                return
        waited_s = parts.clock() - since
        if pending.report is not None:
            parts.calls.on_round(pending.report, pending.counted, loss if pending.counted else None, waited_s)
        self.finish()
        if not sound:
            self._tell_diverged()
        if pending.report is not None and pending.counted:
            self._diverged = 0 if sound else self._diverged
            parts.calls.counted(pending.report.t, stop)
            return
        at = self.position
        parts.tell.work_dropped(at.t, 1, tokens, others=parts.spec.over(at.t, at.tokens) is None)
        if pending.report is not None and pending.report.refused(parts.peer.id):
            self._tell_diverged()

    def _blocks(self) -> tuple[list[int], list[list[int]]]:
        """Those of this step, and of the next ones as things stand."""
        lease, count = self.position.lease, self._parts.spec.blocks_per_step
        assert lease is not None  # it is ready
        blocks = lease.take((1 + AHEAD_MAX) * count)[0]
        groups = [blocks[a : a + count] for a in range(0, len(blocks), count)]
        return groups[0], groups[1:]

    def _gradient(
        self, batches: Sequence[Tensor], offer: Callable[[Filling | None], Pending]
    ) -> tuple[float, bool, Pending | None]:
        """The gradient, flat, in `_vector`: (mean loss, whether all of it can be offered, the offer if one was
        made before it was complete)."""
        pending: Pending | None = None

        def begin(loss: Tensor) -> None:
            nonlocal pending
            filling = self._gradients.begin(self._vector)
            if filling is not None and math.isfinite(float(loss)):
                pending = offer(filling)

        try:
            loss = self._inner.gradient(batches, begin)
            sound = math.isfinite(loss) and self._gradients.end()
        finally:
            self._gradients.drop()
        return loss, sound, pending

    def _wait(self, pending: Pending, stop: threading.Event) -> bool:
        """Whether the round is over; False: we are to stop, and it is too far away."""
        parts, since = self._parts, self._parts.clock()
        while not _over(pending):
            parts.calls.listen()
            now = parts.clock()
            if now - since >= TELL_WAITING_S:
                parts.tell.phase("waiting")
            if stop.is_set():
                self._stopped_at = min(self._stopped_at, now)
            if now >= self._stopped_at + LAST_ROUND_S:
                self._take_back()
                return False
        return True

    @contextlib.contextmanager
    def _untouched(self) -> Iterator[None]:
        """Around all of an offer: whatever ends it early, the model is pulled into memory that nobody else reads."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(DlcError):
                self._take_back()
            raise

    def _take_back(self) -> None:
        """What is offered: it is not waited for."""
        if not self._parts.peer.withdraw(CHANNEL):
            self._vector = torch.empty_like(self._vector)  # the peer may still send the other

    def _tell_step(self, loss: float, tokens: int, seconds: float) -> None:
        tell, t = self._parts.tell, self.position.t
        tell.step(t, 1, 1, loss, tokens, seconds)
        tell.event(
            "step",
            t=t,
            step=t,
            inner=1,
            of=1,
            loss=loss,
            tokens_per_s=tell.tokens_per_s,
            mfu=tell.mfu,
            lr=self.state.lr(t + 1),
        )

    def _tell_diverged(self) -> None:
        """This step contributes nothing. DlcError: it was so too often."""
        self._diverged += 1
        t = self.position.t
        self._parts.tell.event("diverged", t=t, in_a_row=self._diverged)
        log.warning("step %d of this peer is not counted: %s", t + 1, NOT_FINITE)
        if self._diverged >= DIVERGED_MAX:
            raise DlcError(
                f"{DIVERGED_MAX} steps in a row (last after step {t}) were not counted: {NOT_FINITE}. Found the run "
                'anew, or from its model (model.kind = "path"), with a lower inner.lr or a longer inner.warmup_steps'
            )

    def wind_up(self, stopped: bool, stop: threading.Event) -> None:
        """Nothing is under way between two calls of `advance`."""

    def finish(self) -> Position:
        self._position = self._parts.peer.pull(CHANNEL, self._vector)
        self._view.scatter(self._vector)
        return self._position

    def at_rest(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def frozen(self) -> Frozen:
        return self._parts.peer.checkpoint(CHANNEL)

    def local(self) -> Local:
        """The optimizer is no part of it: its moments are those of all."""
        return Local({}, None, random_state(self._parts.engine.device))

    def close(self) -> None:
        self._gradients.close()
        self._loader.close()


def _over(pending: Pending) -> bool:
    """Whether its round is, after a short wait."""
    try:
        pending.wait(WAIT_SLICE_S)
    except RoundTimeout:
        return False
    return True
