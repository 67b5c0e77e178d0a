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
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex

import torch
from blake3 import blake3
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dlc.arguments import instance, joined, number, whole
from dlc.comm.roles import OBSERVER
from dlc.comm.straggler import NEVER_S
from dlc.errors import CheckpointError, SwarmClosed, UsageError
from dlc.handles import outer_part
from dlc.pacespec import check_overlap
from dlc.report import RoundReport
from dlc.runspec import OuterSpec
from dlc.train.checkpoint import bytes_tensor
from dlc.train.held import END_PATIENCE_S, Held
from dlc.train.offers import NotFinite, Settled, Work, check_terms, step_weight
from dlc.train.outer import OuterState
from dlc.train.outer_loop import WAIT_SLICE_S, OuterLoop
from dlc.train.outgoing import Hook
from dlc.train.scalars import saved_count, saved_counts, saved_share
from dlc.train.swarm import TrainPeer
from dlc.train.trained import Trained

log = logging.getLogger(__name__)

_NESTEROV = OuterSpec()
PLANNED_S = 1.0
"""After an offer, where the others are ready too, a plan names it: taken back at that moment it would be left out."""


def skipped(inner: torch.optim.Optimizer) -> bool:
    """In a hook of its step: whether a GradScaler has it skip this one. With `fused=True` its kernel does that, so the
    step is made all the same. Waits for the device, as a GradScaler does with other optimizers."""
    return bool(getattr(inner, "found_inf", False))


def rounds_made(peer: TrainPeer, channel: str, timeout_s: float | None) -> int:
    """Of the run, before the channel is open; a peer that was joined with `hold` may have heard of none of them yet."""
    if not peer.position(channel).t:
        peer.take_seat(timeout_s)
    return peer.position(channel).t


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
        if not isinstance(sync_every, SupportsIndex) or operator.index(sync_every) < 1:
            raise UsageError(f"sync_every must be a whole number of inner steps, at least 1, not {sync_every!r}")
        sync_every = operator.index(sync_every)
        if not isinstance(outer, OuterSpec):
            raise UsageError(f"outer is {type(outer).__name__}: give a dlc.OuterSpec, which names the outer optimizer")
        if peer.role == OBSERVER:
            raise UsageError("an observer takes part in no rounds: join as a trainer to train")
        instance("overlap", overlap, str, 'give "none", "delayed" or "eager"')
        overlap_steps, fragments = whole("overlap_steps", overlap_steps, 0), whole("fragments", fragments, 1)
        mixing, chunk_elems = number("mixing", mixing, 0, 1, "0 to below 1"), whole("chunk_elems", chunk_elems, 0)
        if resume is not None:
            instance("resume", resume, Mapping, "give what state_dict(outer=True) returned")
        check_overlap(overlap, overlap_steps, mixing, fragments, sync_every)
        check_terms(pseudo_gradient_hook, patience_s)
        if isinstance(inner, DiLoCo):
            raise UsageError("inner is a dlc.DiLoCo, which exchanges by itself: give the optimizer inside, its .inner")
        self.inner = inner
        self._sync_every = sync_every
        self.weight = weight
        self.last_report: RoundReport | None = None
        """Of the last round that counted this peer."""
        self._overlaps = overlap != "none"
        self._whole = fragments == 1 and not mixing
        """A round that counted all inner steps leaves nothing of what they changed."""
        self._period = sync_every // fragments
        """Inner steps between two rounds."""
        self._overlap_steps = overlap_steps or self._period
        self._steps = 0
        """Made, and offered to no round, or to none that is settled."""
        self._held = Held(fragments)
        """Steps."""
        self._offered = 0
        """Those of `steps` that are on their way to a round."""
        self._skipped = 0
        """Steps of this period that were lost with an earlier process: no round counts them, but it is due sooner."""
        self._follows: tuple[RemovableHandle, ...] | None = None
        self._begun = False
        """A step of `inner` that nobody has counted yet, while this follows it."""
        self._closed = ""
        """Why nothing can be exchanged any more."""
        self._peer, self._channel = peer, channel
        self._trained = Trained(model, inner)
        self._outer = OuterLoop(
            peer,
            self._trained.view,
            channel=channel,
            outer=outer,
            fragments=fragments,
            overlap=overlap,
            mixing=mixing,
            hook=pseudo_gradient_hook,
            patience_s=patience_s,
        )
        if resume is not None:
            self._resume(resume, timeout_s)
        if (t := peer.resumed_at(channel)) and self._outer.state.t != t:
            raise UsageError(
                f"the run was resumed at round {t}, and this peer is to bring its state: give resume= here, too, with "
                "the state of which dlc.Resume was made"
            )
        of_another = channel in _TRAINED.get(peer, ())
        try:
            self._trains()  # told before the wish to open: who does not know it may begin the first round without us
            self._outer.open(codec=codec, chunk_elems=chunk_elems, timeout_s=timeout_s)
            self._trained.claim()
        except BaseException:
            if not of_another:
                self._ends()
            raise

    def _trains(self) -> None:
        """Rounds wait for this peer, if they do for anybody."""
        trained = _TRAINED.setdefault(self._peer, {self._channel})
        if not trained:  # the others were told that there is nothing to wait for
            self._peer.describe(eta_s=-1.0)
        trained.add(self._channel)

    def _ends(self) -> None:
        """No round waits for this peer, unless it trains on another channel, until its next step."""
        trained = _TRAINED.setdefault(self._peer, set())
        trained.discard(self._channel)
        if not trained:
            with contextlib.suppress(SwarmClosed):
                self._peer.describe(eta_s=NEVER_S)

    def _resume(self, state: Mapping[str, Any], timeout_s: float | None) -> None:
        """Before the channel is open: the outer state of a swarm that was stopped, if the run stands where it did."""
        saved = outer_part(state)
        t = saved_count(saved, "t")
        here = rounds_made(self._peer, self._channel, timeout_s)
        if here == t:
            self._outer.state.restore(saved["image"].cpu().numpy().data.toreadonly())
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

    @property
    def sync_every(self) -> int:
        """As it was given. To be read only: rounds are due by it, on all peers alike."""
        return self._sync_every

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
        return self._steps - self._offered

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
        if self._follows is not None:
            raise UsageError("after follow(), step the inner optimizer: its steps make the exchanges")
        self._caught_up()
        with self._trained.counting():
            self.inner.step(closure)
        return self._stepped()

    def _caught_up(self) -> None:
        """End a wait that was interrupted: without overlap no inner step may come before the round is over."""
        self._trained.check_mine()
        with self._member():
            if self._outer.waiting and not self._overlaps:
                self._settle(wait=True)
                if self._outer.displaced and not self._outer.resume(self._work):
                    self._dropped()

    @contextlib.contextmanager
    def _member(self) -> Iterator[None]:
        """What needs the swarm. SwarmClosed: the peer has left, in which case nothing is begun from the second time on:
        steps would go on that no round could ever count."""
        if self._closed:
            raise SwarmClosed(self._closed)
        try:
            yield
        except SwarmClosed as closed:
            if self._closed:
                raise
            held = f", with {self._steps} inner steps that this peer has seen in no round" if self._steps else ""
            self._closed = (
                f"{closed}; the parameters stay as they are{held}: to train on in the swarm, join again and make a new "
                "dlc.DiLoCo, which sets them to the swarm's; to train on alone, call unfollow() and step the inner "
                "optimizer itself"
            )
            raise SwarmClosed(self._closed) from closed

    def _before_step(self, *_: object) -> None:
        self._begun = True
        self._caught_up()

    def _after_step(self, *_: object) -> None:
        """Where a class of optimizers calls the `step` of its base, torch calls the hooks of both for one step."""
        counts, self._begun = self._begun and not skipped(self.inner), False
        if counts:
            self._stepped()

    def _stepped(self) -> RoundReport | None:
        """Count an inner step, and do what is due after it."""
        self._steps += 1
        self._held.add(1)
        with self._member():
            self._trains()
            report = self._settle(wait=self.inner_step >= self._overlap_steps) if self._outer.waiting else None
            if not self._outer.waiting:
                if self._steps + self._skipped >= self._period:
                    report = self._exchange(wait=not self._overlaps) or report
                elif self._outer.model.moved() and not self._outer.rebase(self._work):
                    self._dropped()
            return report

    def flush(self) -> RoundReport | None:
        """Wait for the round that is on its way, if there is one: before the model is saved or measured at the end."""
        with self._member():
            return self._settle(wait=True) if self._outer.waiting else None

    def follow(self) -> None:
        """From now on each step that somebody else makes with `inner` counts: a Trainer, or an accelerated optimizer.

        The report is in `last_report`, and what `step` raises comes out of `inner.step()`. Ends with `finish` or
        `unfollow`.
        """
        if self._follows is None:
            self._trained.unwatch()
            self._follows = (
                self.inner.register_step_pre_hook(self._before_step),
                self.inner.register_step_post_hook(self._after_step),
            )

    def unfollow(self) -> None:
        """Undo `follow`, or end the use of this object; nothing is exchanged, no round waits for this peer before it
        makes another step, and another DiLoCo may train the parameters."""
        self._unhook()
        if self._channel in _TRAINED.get(self._peer, ()):
            self._ends()
        self._trained.release()

    def _unhook(self) -> None:
        for hook in self._follows or ():
            hook.remove()
        self._follows = None

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
            with self._member():
                if self._held.any():
                    self._trains()  # also after `unfollow`
                self._outer.patience_s = patience_s or END_PATIENCE_S
                if not patience_s and self._outer.waiting and self._overlaps and not self._outer.wait(PLANNED_S):
                    self._offer_anew()
                report = self.flush()
                while self._weight_of_next(last=True):
                    report = self._exchange(wait=True, last=True) or report
        finally:
            self._outer.patience_s = patience_s
            self._ends()
            self._trained.release()
        strayed = not self._held.any() and self._outer.strayed()
        with self._member():
            self._outer.adopt()
        if self._held.any():
            log.warning("%s: rounds have passed without this peer", self._held.left_over("steps"))
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
            self._outer.grow(self._steps * self.weight, self._work)
        self._offered = len(self._outer.offered.blocks)

    def reload(self) -> None:
        """Take the swarm's newest parameters; the steps that are in no round yet are dropped."""
        self._trained.check_free()
        self.flush()
        self._skipped = 0
        with self._member():
            self._outer.adopt()
        self._dropped()
        self._trained.claim()

    @property
    def _work(self) -> Work:
        return Work(tuple(range(self._steps)))

    def _dropped(self) -> None:
        """The model is the swarm's again: no step that was in no round is in it any more."""
        self._steps = 0
        self._held.drop()

    def _weight_of_next(self, last: bool = False) -> float:
        """Of what the next round would be offered: 0 where that is nothing. last: no step comes after it."""
        steps = self._held.weight(self.t) if last else self._steps
        return steps * self.weight

    def _exchange(self, wait: bool, last: bool = False) -> RoundReport | None:
        """Offer all steps, and see them counted if we wait."""
        self._skipped = 0
        if self._held.any():
            self._trained.check_same()
            self._trained.tell_of_others()
        while weight := self._weight_of_next(last):
            try:
                with self._member():
                    self._outer.offer(weight, self._work)
            except NotFinite:
                self.inner.state.clear()  # moments that are not finite would spoil the model with the next step
                raise
            finally:
                if self._outer.waiting:
                    self._offered = self._steps
                elif not self._closed:
                    self._dropped()
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
        try:
            settled = self._outer.settle(self._work)
        except SwarmClosed:
            raise  # without the swarm's parameters there is nothing to set them to
        except BaseException:
            log.warning("the end of a round was interrupted: inner steps that it did not count are dropped")
            self._offered = 0
            self._dropped()
            self._outer.adopt()
            raise
        if settled.counted and settled.report is not None:
            self._steps -= self._offered
            self._held.counted(settled.report.t, self._steps)
        elif not settled.kept:
            self._tell_lost(settled)
            self._dropped()
        self._offered = 0
        if self._outer.displaced and self._overlaps:
            self._outer.resume(self._work)
        if not settled.counted:
            return None
        self.last_report = settled.report
        return settled.report

    def _tell_lost(self, settled: Settled) -> None:
        log.warning(
            "up to %d inner steps are lost, and the parameters are the swarm's now: %s",
            max(self._held.amounts()),
            "an owner refused what was offered, as it was not finite"
            if settled.report is not None
            else "this peer's state was replaced by that of the others, and whether a round counted them is not known",
        )

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
            "inner_step": self._skipped + self.inner_step,
            "t": self.t,
            "residual": self._outer.outgoing.residual,
            "steps": self._steps,
            "offered": self._offered,
            "share": self._outer.share,
        }
        if outer:
            frozen = self._peer.checkpoint(self._channel)
            state["outer"] = {"t": frozen.t, "log": bytes_tensor(frozen.log), "image": bytes_tensor(frozen.image)}
            kept = (self._steps or not self._whole) and frozen.t == self.t
            state["local"] = self._outer.model.local() if kept else None
            state["start"] = self._outer.model.origin.rounded() if kept else None
            state["held"] = self._held.amounts()
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
        inner_step, offered = saved_count(state, "inner_step"), saved_count(state, "offered")
        steps = saved_count(state, "steps") if "steps" in state else inner_step
        held = saved_counts(state, "held")
        share = saved_share(state.get("share", self._outer.share))
        self._outer.outgoing.check_residual(residual)
        for vector in (local, start):
            if vector is not None:
                self._outer.model.check(vector)
        if state["inner"] is not None:
            self.inner.load_state_dict(state["inner"])
        if self._steps:
            self.reload()  # what a training that goes on did since its last round is not what was saved
        if local is not None and not self._steps and self._taken_up(local, start, state["outer"]["image"]):
            self._steps, self._skipped = steps, max(0, inner_step + offered - steps)
            if not self._held.load(held):
                self._held.drop()
                self._held.add(self._steps)
        else:
            self._skipped = min(inner_step, self._period - 1)
            if lost := steps - offered:
                log.warning("%d inner steps that were in no round when this state was saved are lost", lost)
            if offered:
                log.warning(
                    "%d inner steps were on their way to a round when this state was saved: they are lost, unless it "
                    "counted them",
                    offered,
                )
        self._outer.outgoing.load_residual(residual)
        self._outer.share = share

    def _taken_up(self, local: Tensor, start: Tensor | None, image: Tensor) -> bool:
        """The model goes on from `local`, if these inner steps began at the outer state of this image."""
        of = blake3(image.cpu().numpy().data, max_threads=blake3.AUTO).digest()
        if of != self._outer.position.digest:
            return False
        self._dropped()
        return self._outer.take_up(local.cpu(), of, Work(), start.cpu() if start is not None else None)


_TRAINED: weakref.WeakKeyDictionary[TrainPeer, set[str]] = weakref.WeakKeyDictionary()
"""Channels on which each peer trains: what a peer tells of itself is of all of them."""


__all__ = ["DiLoCo", "NotFinite"]
