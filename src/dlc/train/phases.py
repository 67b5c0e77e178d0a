"""The inner steps of a trainer between rounds, and its part in them.

    inner_phase: H inner steps ──> exchange: offer ──> wait ──> settle ──> inner_phase ...
                   │       ↑                  ↑          │
                   └───────┘ rebase           └──────────┘ more inner steps, while the round waits for others

- When it is time for a round: see `pace`. H is the number of inner steps between two rounds.
- The learning rate of inner step i after round t is that of global step t * H + i, on every peer; beyond H steps it is
  that of the last one.
- Who comes in the middle of a round begins at the inner step at which the others are, so that it is ready when they are
  and nobody waits for it. Its weight is what it did train.
- Work that a round did not count is kept, and is part of a later one: weights are tokens, so this is exact. After a
  round without us we go on until the others are at their sync point. The lease alone limits how far that can be.
- Inner steps stand still only for as long as rounds usually take. Where one takes longer (somebody is late or has died,
  the quorum is lost), they go on; see `outer_loop` for what becomes of them.
- With overlap they do not stand still at all, but after `overlap_steps`: the steps made while a round is on its way are
  the first ones of the next phase, and go on from the new theta when it is there (local := theta_new - what is not
  counted yet).
- A phase whose loss is not finite contributes nothing: the swarm's model is loaded again, the round that the others
  are about to have goes on without us, and after `DIVERGED_MAX` such phases in a row the trainer gives up.
"""

from __future__ import annotations

import logging
import math
import statistics
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from dlc.errors import DataError, DlcError
from dlc.report import RoundReport
from dlc.runspec import RunSpec
from dlc.train.data import Blocks
from dlc.train.held import END_PATIENCE_S, Held
from dlc.train.inner import InnerLoop
from dlc.train.loader import Loader, Stopped
from dlc.train.offers import NotFinite, Work
from dlc.train.others import Others
from dlc.train.outer_loop import WAIT_SLICE_S, OuterLoop
from dlc.train.pace import pace_of
from dlc.train.progress import Progress
from dlc.train.strategy import Calls
from dlc.train.supply import Supply
from dlc.train.telling import SITS_OUT, Teller

log = logging.getLogger(__name__)

DIVERGED_MAX = 3
"""Phases in a row that may end in NaN or Inf: one can be bad luck, three are a wrong learning rate."""
SIT_OUT_S = 30.0
"""A round that a peer sits out may take so much longer than is usual: where it does not come, that peer trains on."""
GROW_EVERY_S = 5.0
"""Between two tries to offer more while a round waits for others: where a plan crosses it, the round waits in vain."""
LAST_ROUND_S = 5.0
"""A peer that was asked to stop takes part in a round that is no further away than this."""
ANNOUNCED_S = 0.5
"""Before the last inner step of a phase should end the others are told that our contribution is about to come: longer
than it takes to agree on a round, and not so long that a failure in that round is found late."""
ANNOUNCED_STEP_S_MIN = 0.2
"""Steps that are shorter would be over before the others have heard of it."""
OVERRUN_STEPS = 2.0
"""So many inner steps the last one may take longer than usual; the others wait for three times as long, and T_chunk."""
EXPECTED_S_MIN = 2.0
"""Told at least: a host may hang for some seconds, and its work should not have to wait for the next round."""
PATIENCE_S_MIN = 0.1
EXCHANGES_KEPT = 8
"""Rounds of which the usual time of an exchange is taken: a few, because links and swarms change."""
_BEGUN = "begun"


class Phases:
    """Used from the trainer's thread. `inner`: the inner optimizer; a new one is made after steps that diverged.

    batch_size: sequences that go through the model at once.
    """

    def __init__(
        self,
        spec: RunSpec,
        outer: OuterLoop,
        source: Blocks,
        others: Others,
        tell: Teller,
        new_inner: Callable[[], InnerLoop],
        batch_size: int,
        clock: Callable[[], float],
        calls: Calls,
    ) -> None:
        self._spec, self._outer, self._others, self._tell = spec, outer, others, tell
        self._new_inner, self._clock, self._calls = new_inner, clock, calls
        self.inner = new_inner()
        self._done = Progress()
        self.held = Held(spec.fragments)
        """Tokens."""
        self._ends = False
        """The run is over: no step is made any more."""
        self._pace = pace_of(spec, others, lambda: tell.step_s, clock)
        self._h = spec.steps_per_round
        self._overlap_steps = spec.overlap_steps or math.inf
        loader = Loader(source, batch_size, self.inner.device.type == "cuda", calls.stopping)
        self._supply = Supply(outer.model, loader, spec.blocks_per_step)
        self._inner_step = 0
        """Of this phase; beyond H if it goes on."""
        self._in_step = False
        """The last round counted us: the others began their phase when we did."""
        self._since = 0.0
        """When that was: at its commit, with overlap at its plan."""
        self._begun = 0
        """Steps of the next phase that are made already: we were in the middle of one when the round was committed."""
        self._passed = False
        """A round was committed without the work of this phase."""
        self._exchanges_s: deque[float] = deque(maxlen=EXCHANGES_KEPT)
        self._offer_s = 0.0
        """What the last offer took: measuring and encoding."""
        self.ahead = False
        """Inner steps since the last round that counted us are dropped, and the inner optimizer has made them."""
        self._leave_at: float | None = None
        self._diverged = 0

    @property
    def at_work(self) -> bool:
        """Something is done that no round has counted."""
        return len(self._done) > 0

    def tensors(self) -> dict[str, Tensor]:
        """Where a round has just counted this peer: the inner steps that are ahead of it, for `take_up`. Empty where
        there are none."""
        return {**self._done.tensors(), _BEGUN: torch.tensor(self._begun, device="cpu")} if self.at_work else {}

    def take_up(self, done: Progress, named: Mapping[str, Tensor]) -> None:
        """Go on after the inner steps that `tensors` gave, which are `done`."""
        if len(done):
            self._done, self._begun = done, min(len(done), int(named[_BEGUN]))

    def close(self) -> None:
        """End the loader's thread; no step can follow."""
        self._supply.close()

    # ---------------------------------------------------------------- inner steps

    def inner_phase(self, stop: threading.Event) -> bool:
        """Inner steps until it is time for a round. False: stopped, or the local progress was dropped."""
        t, pace = self._outer.position.t, self._pace
        if not self._passed:
            self._inner_step = self._first_step(t)
            pace.begins(t, self._inner_step, self._since if self._in_step else None)
        self._supply.forget()
        if self._inner_step < (of := pace.target(self._inner_step)):
            self._tell.round_begins(t, self._inner_step, of)
        while True:
            self._calls.hear()
            self._others.look()
            due = pace.due(self._inner_step)
            if self._outer.model.moved(at_once=due) and not self._rebase():
                return False
            if self._calls.over(stop) is not None:
                return False
            if due and not (self._passed and self._too_early()):
                break
            if not self._step():
                break  # the lease is used up
        return len(self._done) > 0

    def _first_step(self, t: int) -> int:
        """Where to start a phase: after what we have begun of it, and no earlier than at the inner step of the others,
        if they are in one and we were not with them."""
        if self._in_step or self._spec.sync_mode == "deadline":  # their steps are no measure of ours, their deadline is
            return self._begun
        return max(self._begun, min(self._others.inner(t) or 0, self._h - 1))

    def _too_early(self) -> bool:
        """Most of the others have more than one of our steps before them: who is ready now would only wait."""
        etas_s = self._others.etas_s(self._outer.position.t)
        return bool(etas_s) and statistics.median(etas_s) > self._tell.step_s

    def _rebase(self) -> bool:
        """A round passed without us: our work so far goes on from its theta."""
        self._supply.forget()
        if not len(self._done):
            self._in_step, self._begun = False, 0  # begin where the others are now
            return False
        if not self._outer.rebase(self._done.work):
            self.drop()
            return False
        self._passed = True
        return True

    def drop(self) -> None:
        """What is not counted will not be: its blocks go, or went, to others."""
        lost, tokens = len(self._done), self._done.tokens
        self._outer.announced.retract()
        self._done.keep(0)
        if self._ends and self.held.any():
            why = "this peer was stopped" if self._calls.stopping() else "rounds have passed without this peer"
            log.warning("%s: %s", self.held.left_over("tokens"), why)
        self.held.drop()
        self._supply.forget()
        self._in_step = self._passed = False
        self._begun = 0
        if lost:
            self.ahead, at = True, self._outer.position
            self._tell.work_dropped(at.t, lost, tokens, others=self._spec.over(at.t, at.tokens) is None)

    def _step(self, ahead: int | None = None) -> bool:
        """One inner step on the next blocks of the lease, of the present phase, or step `ahead` of the next one.

        False: there are no more blocks, or the round that is waited for is over.
        """
        if self._outer.displaced and not self._outer.resume(self._done.work):
            if not self._outer.waiting:
                self.drop()
            return False
        left = max(1, self._pace.target(self._inner_step) - self._inner_step)
        group = self._supply.next(self._done.work.blocks, left)
        if not group:
            return False
        h = self._h
        began, t = self._clock(), self._outer.position.t
        inner = min(self._inner_step if ahead is None else ahead, h - 1)
        step = (t if ahead is None else t + 1) * h + inner
        batches = self._supply.batches(group)
        if ahead is None and left == 1:
            self._announce(group, sum(ids.numel() for ids in batches))
        result = self.inner.train_step(batches, step)
        if result.diverged:
            raise NotFinite(f"the loss of inner step {inner} after round {t} is not finite")
        self._done.add(group, result.tokens, result.loss)
        self.held.add(result.tokens)
        self._inner_step += 1
        of = self._pace.target(self._inner_step) if ahead is None else h
        made = min(self._inner_step, of) if ahead is None else inner + 1
        told = made if ahead is None else of  # the others wait for our offer only, and that is made
        self._tell.step(t, told, of, result.loss, result.tokens, self._clock() - began)
        self._tell.event(
            "step",
            t=t,
            step=step,
            inner=made,
            of=of,
            loss=result.loss,
            tokens_per_s=self._tell.tokens_per_s,
            mfu=self._tell.mfu,
            lr=self.inner.optimizer.param_groups[0]["lr"],
        )
        return True

    def _announce(self, group: Sequence[int], tokens: int) -> None:
        """The last inner step of a phase begins, on these blocks: what `exchange` will offer is known, but its values.

        Not where it may not be the last one: others are further back than we, or a deadline is what counts. Nor alone:
        there is nobody to agree with, and where the step took too long its round would be one with nobody in it.
        """
        step_s, outer = self._tell.step_s, self._outer
        if outer.waiting or self._passed or self._spec.sync_mode != "steps" or self._overlaps() or self._too_early():
            return
        if step_s >= ANNOUNCED_STEP_S_MIN and self._others.steps_s():
            blocks = (*self._done.work.blocks, *group)
            in_s = max(0.0, step_s - ANNOUNCED_S)
            expected_s = max(EXPECTED_S_MIN, step_s - in_s + OVERRUN_STEPS * step_s + self._offer_s)
            outer.announce(float(self._done.tokens + tokens), Work(blocks, blocks[-1] + 1), in_s, expected_s)

    # ---------------------------------------------------------------- rounds

    def exchange(self, stop: threading.Event) -> None:
        """Offer what is done to the next round, and see it through; our steps go on if it takes longer than usual, or
        with overlap all the while."""
        outer, done, clock, overlaps = self._outer, self._done, self._clock, self._overlaps()
        self._tell.phase("overlapping" if overlaps else "waiting")
        since = tried_at = clock()
        stepped_s, patience_s, may_step = 0.0, self._patience_s(), not self._ends
        outer.announced.retract(but=(float(done.tokens), done.work))
        while not outer.announced.free(WAIT_SLICE_S):
            self._calls.listen()
            if self._gives_up(stop):
                outer.give_up()
                self.drop()
                return
        began = clock()
        weight = float(max(1, round(self.held.weight(outer.position.t))) if self._ends else done.tokens)
        if not outer.offer(weight, done.work):
            self.drop()
            return
        offered_at = clock()
        self._offer_s = offered_at - began
        offered, slice_s = len(done), 0.0 if overlaps else WAIT_SLICE_S
        while not outer.wait(slice_s):
            slice_s = WAIT_SLICE_S
            self._calls.listen()
            if self._gives_up(stop):
                outer.give_up()
                self.drop()
                return
            late = clock() - since >= patience_s or self._somebody_is_late()
            if not may_step or not (late or (overlaps and len(done) - offered < self._overlap_steps)):
                continue
            if late and len(done) > offered and clock() - tried_at >= GROW_EVERY_S:
                tried_at = clock()
                try:
                    if not outer.grow(float(done.tokens), done.work):
                        self.drop()
                        return
                except NotFinite:
                    self._undo_beyond(offered)
                    may_step = False
                    continue
                if outer.offered == done.work:
                    offered, offered_at = len(done), clock()
            began, before = clock(), len(done)
            may_step = not stop.is_set() and self._step_beyond(offered, overlaps)
            stepped_s += clock() - began
            if len(done) > before:
                slice_s = 0.0  # one step after the other
        report = self._settle(offered, max(0.0, clock() - since - stepped_s))
        if report is not None:
            late_s = max(0.0, clock() - offered_at - report.seconds)
            begun = len(done) if overlaps else round(late_s / self._tell.step_s) if len(done) else 0
            self._begun = min(len(done), begun)
            self._since = offered_at + (report.waiting_s if overlaps else report.seconds)
            self._calls.counted(report.t, stop)

    def _overlaps(self) -> bool:
        """Whether inner steps go on during the next round. Not during the last one: no round would count them."""
        ends = self._spec.exchanges and self._outer.position.t + 1 >= self._spec.exchanges
        return self._spec.overlap != "none" and not (ends or self._ends)

    def _step_beyond(self, offered: int, overlaps: bool) -> bool:
        """An inner step while a round is under way. False: it diverged, and all steps since the offer are undone; or
        its samples cannot be read, which the next phase finds out again, once the round has what was offered to it; or
        we are to stop, and they are not there."""
        try:
            self._step(len(self._done) - offered if overlaps else None)
            return True
        except NotFinite:
            self._undo_beyond(offered)
            return False
        except (DataError, Stopped):
            return False

    def _undo_beyond(self, offered: int) -> None:
        """The steps since the offer diverged: the model and the progress are those that were offered."""
        self._outer.put_back()
        before = self._done.tokens
        self._done.keep(offered)
        self.held.undo(self._outer.position.t, before - self._done.tokens)
        self._supply.forget()
        self._tell_diverged()

    def _settle(self, offered: int, waited_s: float) -> RoundReport | None:
        """The round is over: what it counted is no progress of ours any more, and the rest goes on from its theta.

        Returns its report, if it counted us.
        """
        settled = self._outer.settle(self._done.work)
        self._supply.forget()
        loss = self._done.counted(offered) if settled.counted else None
        if settled.counted and settled.report is not None:
            self.held.counted(settled.report.t, self._done.tokens)
            self.ahead = False
        if not settled.kept:
            self.drop()
        elif not settled.counted:
            self._passed = True
        if settled.report is None:
            return None
        self._calls.on_round(settled.report, settled.counted, loss, waited_s)
        self._exchanges_s.append(max(0.0, settled.report.seconds - settled.report.waiting_s))
        if not settled.counted:
            return None
        self._passed, self._in_step, self._diverged = False, True, 0
        return settled.report

    def _patience_s(self) -> float:
        """How long inner steps stand still for a round: as long as one usually takes, and a step more.

        A step that is begun too early ends too late: the next round would have to wait for us.
        """
        usual_s = statistics.median(self._exchanges_s) if self._exchanges_s else 0.0
        return max(PATIENCE_S_MIN, usual_s + self._tell.step_s)

    def _somebody_is_late(self) -> bool:
        """One of the others has more than one of our steps before it: there is time for one."""
        return max(self._others.etas_s(self._outer.position.t), default=0.0) > self._tell.step_s

    def _gives_up(self, stop: threading.Event) -> bool:
        """Whether a round is no longer waited for; who is to stop still waits for one that is near."""
        if not stop.is_set():
            return self._calls.over(stop) is not None and not self._ends
        return self._clock() >= self._leave_by()

    def _leave_by(self) -> float:
        """When a trainer that is to stop does so, settled at the first question."""
        if self._leave_at is None:
            etas_s = self._others.etas_s(self._outer.position.t)
            near = bool(etas_s) and statistics.median(etas_s) <= LAST_ROUND_S
            self._leave_at = self._clock() + LAST_ROUND_S if near else -math.inf
        return self._leave_at

    def last_round(self, stop: threading.Event) -> None:
        """We are to stop: contribute what is done, if the others are about to have a round."""
        try:
            while len(self._done) and self._clock() < self._leave_by():
                if not self._too_early():
                    self.exchange(stop)
                    if not self._passed:
                        return
                elif (self._outer.model.moved() and not self._rebase()) or not self._step_if_read():
                    return
                self._calls.hear()
        except (NotFinite, DataError):
            self.drop()

    def last_turns(self, stop: threading.Event) -> None:
        """The run is over: each fragment has one more turn with what it holds, in rounds without inner steps.

        Who has nothing for the next one stays as long as others may, so that all end with the same model.
        """
        if self._ends or self._spec.fragments == 1:
            return
        self._ends, self._outer.patience_s = True, END_PATIENCE_S
        t, since = -1, self._clock()
        try:
            while not stop.is_set():
                self._calls.hear()
                if self._outer.model.moved(at_once=True) and not self._outer.rebase(self._done.work):
                    self.drop()
                if t != self._outer.position.t:
                    t, since = self._outer.position.t, self._clock()
                if self.held.next(t):
                    self.exchange(stop)
                    continue
                self._tell.ends(t)
                if not self._others.may_offer(t) or self._clock() - since >= END_PATIENCE_S:
                    break
                stop.wait(WAIT_SLICE_S)
        except NotFinite:
            self.drop()
        if not stop.is_set():  # else the checkpoint has it
            self.drop()

    def _step_if_read(self) -> bool:
        """As `_step`, but that there may be none where its samples are not there yet."""
        try:
            return self._step()
        except Stopped:
            return True

    def start_again(self, stop: threading.Event) -> None:
        """From the swarm's model, with a new inner optimizer, after a phase that was not finite: from that of the next
        round, if the others are about to have one. From the same one as before, steps might diverge as they did."""
        self.drop()
        self._outer.adopt()
        self._tell_diverged()
        t, began = self._outer.position.t, self._clock()
        in_s = self._others.offer_in_s(t)
        if in_s is None:
            return
        log.warning("round %d goes on without this peer", t + 1)
        self._tell.phase(SITS_OUT)
        until = began + in_s + SIT_OUT_S + self._patience_s()
        while self._calls.over(stop) is None and not self._outer.model.moved(at_once=True):
            if self._clock() >= until or self._others.offer_in_s(t) is None:
                return
            self._calls.listen()
            stop.wait(WAIT_SLICE_S)

    def _tell_diverged(self) -> None:
        """The model is good again; so must the inner optimizer be. DlcError: it was so too often."""
        self._diverged += 1
        t = self._outer.position.t
        self._tell.event("diverged", t=t, in_a_row=self._diverged)
        log.warning("the loss is not finite; those inner steps are undone, and not contributed")
        self.inner = self._new_inner()
        if self._diverged >= DIVERGED_MAX:
            raise DlcError(
                f"the loss was not finite {DIVERGED_MAX} times in a row (last after round {t}): "
                'found the run anew, or from its model (model.kind = "path"), with a lower inner.lr, a longer '
                "inner.warmup_steps, or inner.clip_norm above 0"
            )
