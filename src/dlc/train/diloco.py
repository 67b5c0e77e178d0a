"""`dlc.DiLoCo`: an inner optimizer that meets the other peers every `sync_every` steps.

    peer = dlc.Peer.join(peers=["host:port"], key="run.key")
    opt = dlc.DiLoCo(model, inner=torch.optim.AdamW(model.parameters()), peer=peer, sync_every=500)
    for batch in data:
        loss(model, batch).backward()
        opt.step()
        opt.zero_grad()

Every step is a step of the inner optimizer. Each `sync_every`-th one also offers the pseudo-gradient to a round, waits
for its commit, and leaves the model at the swarm's new parameters (DiLoCo, arXiv:2311.08105). The outer state lives in
the swarm: a peer that comes late starts from it, and equal rounds give equal bits on all peers. What the optimizer
does not know (buffers such as batch-norm statistics, the moments of the inner optimizer) stays local, and so does what
the codecs int8 and int4 lose of a contribution, which is added to the next one.

With overlap="delayed" no step waits, unless a round takes longer than `overlap_steps` of them: the mean is applied at
the first step after it is there, and the steps made meanwhile are kept on top of it and offered with the next ones.
With "eager" those steps begin where this peer's own part of the mean will take the parameters.

With fragments=K every `sync_every / K`-th step exchanges a K-th of the model, in turn (`fragments`): as much traffic,
but never more than that at once, and with overlap it has as many steps to travel.

Where a framework calls `inner.step()`, `follow` hangs the exchanges on that; `finish` ends a training in either case.

Learning-rate schedulers take `inner`. `torch.amp.GradScaler` takes this object, in `unscale_(opt)` as in `step(opt)`:
given `inner` in one of them, it unscales twice. A step that it skips is not counted.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dlc.arguments import instance, joined, whole
from dlc.comm.roles import OBSERVER
from dlc.errors import CheckpointError, SwarmClosed, UsageError
from dlc.report import RoundReport
from dlc.runspec import OuterSpec
from dlc.train import resumed
from dlc.train.awaited import Awaited
from dlc.train.held import END_PATIENCE_S
from dlc.train.offers import NotFinite, Work, check_terms, step_weight
from dlc.train.outer import OuterState
from dlc.train.outer_loop import WAIT_SLICE_S, OuterLoop
from dlc.train.outgoing import Hook
from dlc.train.rhythm import Rhythm
from dlc.train.scalars import saved_share
from dlc.train.stay import Stay
from dlc.train.stephooks import StepHooks
from dlc.train.swarm import TrainPeer
from dlc.train.trained import Trained
from dlc.train.uncounted import SavedSteps, Uncounted

log = logging.getLogger(__name__)

_NESTEROV = OuterSpec()
PLANNED_S = 1.0
"""After an offer, where the others are ready too, a plan names it: taken back at that moment it would be left out."""


class DiLoCo:
    """Wraps `inner` so that `model` is trained by all peers of the channel.

    Creation blocks until the swarm's parameters are in `model` (the first peer's become the swarm's), at most
    `timeout_s` where given. All peers must build models of equal shapes, and use equal `outer` and codec.

    model:   or its parameters, in the same order on all peers. Where several optimizers train one model, or one process
             several, each has a DiLoCo over the parameters of its own, and all peers step them in the same order.
    outer:   the outer optimizer and its schedule. ConfigError: a schedule that ends, without `total_rounds`.
    inner:   steps these very parameters. One that keeps copies of its own, as some do in fp32 for a model of bf16,
             would write them over the mean of every round: leave that to theta, which is fp32 on all peers.
    chunk_elems: elements per chunk of the exchange; 0: some hundreds of chunks.
    codec:   of contributions and means, as in `Peer.all_reduce`; "int8", "int4" and "topk" carry over what they lose.
    overlap: "none", or "delayed" or "eager": inner steps go on during a round; `flush` waits for the last one.
    overlap_steps: so many of them at most, then a round is waited for; 0: until the next one is due.
    mixing:  how much of a round's effect on the parameters is left undone by a peer whose steps went on, in [0, 1).
    fragments: into how many parts the model is cut; `sync_every` must be a multiple. ConfigError: it cannot be cut so.
    weight:  of one inner step in the mean of a round: tokens of a step, or 1 where all peers use equal batches.
    pseudo_gradient_hook: makes of the difference that the inner steps made (fp32 [parameters], on the CPU: the
             trainable parameters one after the other, each row-major; a copy) what is offered in its place: masked,
             clipped, with noise. Called before the codec, and again where an offer missed its round.
    patience_s: how long a round may wait for peers that are alive and not ready; 0: as long as it pays, by what they
             predict. The longest of all peers counts.
    resume:  what `state_dict(outer=True)` gave, where a whole swarm is started again: join with
             `resume=dlc.Resume.of(state)`, and the outer state goes on as it was. Where the swarm lives on, its state
             counts. CheckpointError: of another model; UsageError: the peer joined a new run without that resume, or
             with one, and this is not its state.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Parameter],
        inner: torch.optim.Optimizer,
        peer: TrainPeer,
        sync_every: int = 500,
        *,
        outer: OuterSpec = _NESTEROV,
        codec: str = "fp16",
        chunk_elems: int = 0,
        channel: str = "train",
        overlap: str = "none",
        overlap_steps: int = 0,
        mixing: float = 0.0,
        fragments: int = 1,
        weight: float = 1.0,
        pseudo_gradient_hook: Hook | None = None,
        patience_s: float = 0.0,
        resume: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        joined(peer)
        rhythm = Rhythm.of(sync_every, overlap, overlap_steps, mixing, fragments)
        if not isinstance(outer, OuterSpec):
            raise UsageError(f"outer is {type(outer).__name__}: give a dlc.OuterSpec, which names the outer optimizer")
        if peer.role == OBSERVER:
            raise UsageError("an observer takes part in no rounds: join as a trainer to train")
        chunk_elems = whole("chunk_elems", chunk_elems, 0)
        if resume is not None:
            instance("resume", resume, Mapping, "give what state_dict(outer=True) returned")
        check_terms(pseudo_gradient_hook, patience_s)
        if isinstance(inner, DiLoCo):
            raise UsageError("inner is a dlc.DiLoCo, which exchanges by itself: give the optimizer inside, its .inner")
        self.inner = inner
        self._rhythm = rhythm
        self.weight = weight
        self.last_report: RoundReport | None = None
        """Of the last round that counted this peer."""
        self._uncounted = Uncounted(rhythm.period, rhythm.fragments)
        self._hooks: StepHooks | None = None
        """While this follows the inner optimizer."""
        self._stay = Stay(self._uncounted)
        self._peer, self._channel = peer, channel
        self._awaited = Awaited(peer, channel)
        self._trained = Trained(model, inner)
        self._outer = OuterLoop(
            peer,
            self._trained.view,
            channel=channel,
            outer=outer,
            fragments=rhythm.fragments,
            overlap=rhythm.overlap,
            mixing=rhythm.mixing,
            hook=pseudo_gradient_hook,
            patience_s=patience_s,
        )
        if resume is not None:
            resumed.restore(resume, self._outer.state, peer, channel, timeout_s)
        resumed.check_resumed(self._outer.state, peer, channel)
        of_another = self._awaited.begun
        try:
            self._awaited.begin()  # before the wish to open: who does not know it may begin the first round without us
            self._outer.open(codec=codec, chunk_elems=chunk_elems, timeout_s=timeout_s)
            self._trained.claim()
        except BaseException:
            if not of_another:
                self._awaited.end()
            raise

    @property
    def sync_every(self) -> int:
        """As it was given. To be read only: rounds are due by it, on all peers alike."""
        return self._rhythm.sync_every

    @property
    def weight(self) -> float:
        """Of one inner step, when the next round is offered: all steps since the last one have it. UsageError, when it
        is set: it is not above 0, or that of a round would be over 2^53."""
        return self._weight

    @weight.setter
    def weight(self, weight: float) -> None:
        self._weight = step_weight(weight, self.sync_every)

    @property
    def t(self) -> int:
        """Rounds in the parameters that the present inner steps started from."""
        return self._outer.position.t

    @property
    def outer_state(self) -> OuterState:
        """Theta and the outer moments, as they stand on this peer. To be read only."""
        return self._outer.state

    @property
    def inner_step(self) -> int:
        """Inner steps since the last offer."""
        return self._uncounted.since_offer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the inner optimizer."""
        return self.inner.param_groups

    def step(self, closure: Callable[[], float] | None = None) -> RoundReport | None:
        """One inner step. Every `sync_every`-th (or, with K fragments, each K times as often) blocks for a round and
        returns its report; others return None.

        With overlap the report comes with the first step after the round. None also stands for a contribution that an
        owner refused, or of which nothing is known, as this peer's state was replaced meanwhile (it was away for long):
        its steps are dropped then, and the log says so.

        NotFinite (a DlcError): the parameters held NaN or Inf; UsageError: the pseudo_gradient_hook made nothing that
        can be offered, or the others use another codec or chunk_elems. The parameters are the swarm's again when either
        is raised, so a caller may go on; after NotFinite the inner optimizer's moments begin anew, while buffers (such
        as BatchNorm's) are the caller's to reset. SwarmClosed: the peer has left; the parameters stay as this step made
        them, and every further one raises it with nothing done. UsageError, with nothing done: `follow` was called.

        A wait that something interrupted (Ctrl-C in a notebook) is taken up by the next step, before anything else.
        """
        if self._hooks is not None:
            raise UsageError("after follow(), step the inner optimizer: its steps make the exchanges")
        self._caught_up()
        with self._trained.counting():
            self.inner.step(closure)
        return self._stepped()

    def _caught_up(self) -> None:
        """End a wait that was interrupted: without overlap no inner step may come before the round is over."""
        self._trained.check_mine()
        with self._stay.needed():
            if self._outer.waiting and not self._rhythm.overlaps:
                self._settle(wait=True)
                if self._outer.displaced and not self._outer.resume(self._uncounted.work):
                    self._uncounted.drop()

    def _stepped(self) -> RoundReport | None:
        """Count an inner step, and do what is due after it."""
        self._uncounted.add()
        with self._stay.needed():
            self._awaited.begin()
            report = self._settle(wait=self.inner_step >= self._rhythm.overlap_steps) if self._outer.waiting else None
            if not self._outer.waiting:
                if self._uncounted.due:
                    report = self._exchange(wait=not self._rhythm.overlaps) or report
                elif self._outer.model.moved() and not self._outer.rebase(self._uncounted.work):
                    self._uncounted.drop()
            return report

    def flush(self) -> RoundReport | None:
        """Wait for the round that is on its way, if there is one: before the model is saved or measured at the end."""
        with self._stay.needed():
            return self._settle(wait=True) if self._outer.waiting else None

    def follow(self) -> None:
        """From now on each step that somebody else makes with `inner` counts: a Trainer, or an accelerated optimizer.

        The report is in `last_report`, and what `step` raises comes out of `inner.step()`. Ends with `finish` or
        `unfollow`.
        """
        if self._hooks is None:
            self._trained.unwatch()
            self._hooks = StepHooks(self.inner, self._caught_up, self._stepped)

    def unfollow(self) -> None:
        """Undo `follow`, or end the use of this object; nothing is exchanged, no round waits for this peer before it
        makes another step, and another DiLoCo may train the parameters."""
        self._unhook()
        if self._awaited.begun:
            self._awaited.end()
        self._trained.release()

    def _unhook(self) -> None:
        if self._hooks is not None:
            self._hooks.remove()
        self._hooks = None

    def finish(self) -> RoundReport | None:
        """End the training: offer the steps that are in no round yet, wait for it, and leave the model at the swarm's
        newest parameters. To be called before the peer leaves. Undoes `follow`. Raises as `step` does, and returns the
        report of the last round that counted this peer meanwhile; None also if there was nothing to offer.

        The peer stays a member, and no round waits for it before it makes another step. With K fragments these are up
        to K rounds, one after the other, so that each fragment has its turn once more; the weight of each is a K-th of
        the steps that its fragment holds, as it is on average before. These rounds wait for the others, who may be
        ending too, for `patience_s`, or a minute where that is 0. One that `step` has waited for does not: where the
        last step was a `sync_every`-th, peers that make it seconds apart may end with different models, unless they
        have `patience_s`.
        """
        self._unhook()
        patience_s = self._outer.patience_s
        try:
            self._trained.check_mine()
            with self._stay.needed():
                if self._uncounted.held.any():
                    self._awaited.begin()  # also after `unfollow`
                self._outer.patience_s = patience_s or END_PATIENCE_S
                if not patience_s and self._outer.waiting and self._rhythm.overlaps and not self._outer.wait(PLANNED_S):
                    self._offer_anew()
                report = self.flush()
                while self._weight_of_next(last=True):
                    report = self._exchange(wait=True, last=True) or report
        finally:
            self._outer.patience_s = patience_s
            self._awaited.end()
            self._trained.release()
        held = self._uncounted.held
        strayed = not held.any() and self._outer.strayed()
        with self._stay.needed():
            self._outer.adopt()
        if held.any():
            log.warning("%s: rounds have passed without this peer", held.left_over("steps"))
        elif strayed:
            log.warning(
                "the parameters have changed since the last round, and by no step that this dlc.DiLoCo counted; they "
                "are set to the swarm's now, in which that is not"
            )
        self._trained.tell_of_gone()
        return report

    def _offer_anew(self) -> None:
        """What is on its way to a round waits for others as long as is set now, along with the steps since, unless a
        plan names it."""
        with contextlib.suppress(NotFinite):  # what is on its way is finite, and stays
            self._outer.grow(self._uncounted.steps * self.weight, self._uncounted.work)
        self._uncounted.offered = len(self._outer.offered.blocks)

    def reload(self) -> None:
        """Take the swarm's newest parameters; the steps that are in no round yet are dropped."""
        self._trained.check_free()
        self.flush()
        self._uncounted.begins()
        with self._stay.needed():
            self._outer.adopt()
        self._uncounted.drop()
        self._trained.claim()

    def _weight_of_next(self, last: bool = False) -> float:
        """Of what the next round would be offered: 0 where that is nothing. last: no step comes after it."""
        return self._uncounted.next(self.t, last) * self.weight

    def _exchange(self, wait: bool, last: bool = False) -> RoundReport | None:
        """Offer all steps, and see them counted if we wait."""
        self._uncounted.begins()
        if self._uncounted.held.any():
            self._trained.check_same()
            self._trained.tell_of_others()
        while weight := self._weight_of_next(last):
            try:
                with self._stay.needed():
                    self._outer.offer(weight, self._uncounted.work)
            except NotFinite:
                self.inner.state.clear()  # moments that are not finite would spoil the model with the next step
                raise
            finally:
                if self._outer.waiting:
                    self._uncounted.offered = self._uncounted.steps
                elif not self._stay.closed:
                    self._uncounted.drop()
            if not wait:
                return None
            report = self._settle(wait=True)
            if report is not None:
                return report
        return None

    def _settle(self, wait: bool) -> RoundReport | None:
        """The report of the round, if it is over and counted what was offered."""
        while not self._outer.wait(WAIT_SLICE_S if wait else 0.0):
            if not wait:
                return None
        uncounted = self._uncounted
        try:
            settled = self._outer.settle(uncounted.work)
        except SwarmClosed:
            raise  # without the swarm's parameters there is nothing to set them to
        except BaseException:
            log.warning("the end of a round was interrupted: inner steps that it did not count are dropped")
            uncounted.offered = 0
            uncounted.drop()
            self._outer.adopt()
            raise
        if settled.counted and settled.report is not None:
            uncounted.counted(settled.report.t)
        elif not settled.kept:
            uncounted.tell_lost(settled)
            uncounted.drop()
        uncounted.offered = 0
        if self._outer.displaced and self._rhythm.overlaps:
            self._outer.resume(uncounted.work)
        if not settled.counted:
            return None
        self.last_report = settled.report
        return settled.report

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self.inner.zero_grad(set_to_none=set_to_none)

    def state_dict(self, outer: bool = False, inner: bool = True) -> dict[str, Any]:
        """The inner optimizer's state, this peer's counters, and what int8, int4 or topk still owe (None with others).

        The outer state is the swarm's, and a peer that comes back takes it from there. outer: have it in, with the
        run's log, for a whole swarm that is stopped and started again (see `resume`), and the parameters as the steps
        since the last round made them: 4 bytes per parameter more than right after a round, and another 4 where they
        have fewer bits than fp32, for what they were when these steps began. inner: False has None in place of the
        inner optimizer's state, where a framework saves that.

        As in torch, tensors are not copied: save them, or `deepcopy`, before the next step.
        """
        state: dict[str, Any] = {
            "inner": self.inner.state_dict() if inner else None,
            "t": self.t,
            **self._uncounted.saved(),
            "residual": self._outer.outgoing.residual,
            "share": self._outer.share,
        }
        if outer:
            state["outer"] = resumed.saved(self._peer, self._channel)
            kept = (self._uncounted.steps or not self._rhythm.whole) and state["outer"]["t"] == self.t
            state["local"] = self._outer.model.local() if kept else None
            state["start"] = self._outer.model.origin.rounded() if kept else None
            state["held"] = self._uncounted.held.amounts()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave, on whatever device it was loaded; `t` is only information, since the swarm
        may have gone on. Saved with inner=False, it leaves the inner optimizer as it is.

        The steps that were in no round then are taken up where the state was saved with outer=True and the run stands
        where it stood: the model goes on from them. Otherwise it stays at the swarm's parameters, and they are lost;
        the log says so, they are not counted, but the next round is due when it would have been. Steps that this
        object has made since its last round are dropped, and a round that is on its way is waited for.

        CheckpointError, with nothing changed: its residual, or the parameters, are of another model, or one of its
        numbers cannot be; ValueError, from the inner optimizer, with nothing changed: it is of other parameter groups.
        """
        residual, local, start = state.get("residual"), state.get("local"), state.get("start")
        if not {"inner", "inner_step"} <= state.keys() or (local is not None and "outer" not in state):
            raise CheckpointError("this is no state of dlc.DiLoCo: give what its own state_dict() returned")
        steps = SavedSteps.of(state)
        share = saved_share(state.get("share", self._outer.share))
        self._outer.outgoing.check_residual(residual)
        for vector in (local, start):
            if vector is not None:
                self._outer.model.check(vector)
        if state["inner"] is not None:
            self.inner.load_state_dict(state["inner"])
        if self._uncounted.steps or self._outer.waiting:
            self.reload()  # what a training that goes on did since its last round is not what was saved
        if local is not None and self._taken_up(local, start, resumed.digest_of(state)):
            self._uncounted.take_up(steps)
        else:
            self._uncounted.lose(steps)
        self._outer.outgoing.load_residual(residual)
        self._outer.share = share

    def _taken_up(self, local: Tensor, start: Tensor | None, of: bytes) -> bool:
        """The model goes on from `local`, if these inner steps began at the outer state of this digest."""
        if of != self._outer.position.digest:
            return False
        self._uncounted.drop()
        return self._outer.take_up(local.cpu(), of, Work(), start.cpu() if start is not None else None)


__all__ = ["DiLoCo", "NotFinite"]
