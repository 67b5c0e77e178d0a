"""`Optimizer`: steps that all peers of a run make together, as if one had the whole batch.

An *epoch* is `target_batch_size` samples of all peers. Each call of `step` adds the local gradients to a sum; when the
samples are there, the sums are averaged, weighted by samples, and every peer makes the same optimizer step. With
use_local_updates each call steps locally, and the parameters are averaged at the end of an epoch.

What a peer may not do is go on alone, unseen. So, otherwise than in Hivemind: where the average of an epoch fails, the
sums are kept and the next call tries again; who has missed an epoch that others have made loads their state.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dlc.arguments import instance, seconds, whole
from dlc.comm.seating import GROUP_MAX
from dlc.compat.hivemind.averaging.allreduce import AllreduceException, AveragingMode
from dlc.compat.hivemind.averaging.control import StepControl
from dlc.compat.hivemind.averaging.directory import Entry
from dlc.compat.hivemind.compression import CompressionBase, NoCompression
from dlc.compat.hivemind.dht import DHT
from dlc.compat.hivemind.optim.face import TorchFace
from dlc.compat.hivemind.optim.grad_averager import GradientAverager, GradientAveragerFactory
from dlc.compat.hivemind.optim.grad_scaler import GradScaler
from dlc.compat.hivemind.optim.progress_tracker import ProgressTracker
from dlc.compat.hivemind.optim.state_averager import TrainingStateAverager, unless_missed
from dlc.errors import DlcError, SwarmClosed, UsageError

log = logger = logging.getLogger(__name__)

NO_COMPRESSION = NoCompression()


class Optimizer(TorchFace):
    """run_id: peers with the same one train together. target_batch_size: samples per epoch. batch_size_per_step: of one
    call of `step`. optimizer, params, scheduler: as of `TrainingStateAverager`. matchmaking_time: how long an average
    waits for peers that are late (s). averaging_timeout: limit of one average (s). load_state_timeout: of loading.

    reuse_grad_buffers: gradients are summed in `.grad`; nobody may zero them. offload_optimizer: it works on fp32
    copies in host memory; default where params are given, without local updates. delay_optimizer_step,
    delay_grad_averaging, delay_state_averaging: in the background, applied by a later step. average_state_every: epochs
    between averages of parameters, average_opt_statistics and extra_tensors. use_local_updates: see above. client_mode:
    contributes, and computes no part of a mean. auxiliary: computes, and trains nothing. grad_compression,
    state_averaging_compression, load_state_compression: of `compression`. averager_opts, tracker_opts: more arguments
    of the averagers, the tracker.

    allreduce_timeout: of one exchange (s), default averaging_timeout. No effect: next_chunk_timeout, shutdown_timeout.
    """

    def __init__(
        self,
        *,
        dht: DHT,
        run_id: str,
        target_batch_size: int,
        batch_size_per_step: int | None = None,
        optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer],
        params: Iterable[Any] | None = None,
        scheduler: Any = None,
        matchmaking_time: float | None = 15.0,
        averaging_timeout: float | None = 60.0,
        allreduce_timeout: float | None = None,
        next_chunk_timeout: float | None = None,
        load_state_timeout: float = 600.0,
        reuse_grad_buffers: bool = False,
        offload_optimizer: bool | None = None,
        delay_optimizer_step: bool | None = None,
        delay_grad_averaging: bool = False,
        delay_state_averaging: bool = True,
        average_state_every: int = 1,
        use_local_updates: bool = False,
        client_mode: bool | None = None,
        auxiliary: bool = False,
        grad_compression: CompressionBase = NO_COMPRESSION,
        grad_averager_factory: GradientAveragerFactory | None = None,
        state_averaging_compression: CompressionBase = NO_COMPRESSION,
        load_state_compression: CompressionBase = NO_COMPRESSION,
        average_opt_statistics: Sequence[str] = (),
        extra_tensors: Sequence[Tensor] = (),
        averager_opts: dict[str, Any] | None = None,
        tracker_opts: dict[str, Any] | None = None,
        performance_ema_alpha: float = 0.1,
        shutdown_timeout: float = 5.0,
        verbose: bool = False,
    ) -> None:
        delay_step = delay_grad_averaging if delay_optimizer_step is None else delay_optimizer_step
        offload_by_default = params is not None and (delay_step or not use_local_updates)
        self.offload_optimizer = offload_by_default if offload_optimizer is None else offload_optimizer
        _check(
            (not delay_grad_averaging or delay_step, "delay_grad_averaging needs delay_optimizer_step"),
            (not delay_step or self.offload_optimizer, "delay_optimizer_step needs offload_optimizer and params"),
            (not delay_step or delay_state_averaging, "delay_optimizer_step needs delay_state_averaging"),
            (
                not use_local_updates or not reuse_grad_buffers,
                "local updates accumulate no gradients: reuse_grad_buffers",
            ),
            (not use_local_updates or not delay_grad_averaging, "local updates average no gradients"),
            (not use_local_updates or grad_averager_factory is None, "local updates average no gradients"),
            (not auxiliary or batch_size_per_step is None, "an auxiliary peer has no batches"),
        )
        instance("dht", dht, DHT, "give a hivemind.DHT")
        instance("run_id", run_id, str, "give the string under which peers train together")
        if batch_size_per_step is not None:
            batch_size_per_step = whole("batch_size_per_step", batch_size_per_step, 1)
        average_state_every = whole("average_state_every", average_state_every, 1)
        target_batch_size = whole("target_batch_size", target_batch_size, 1)
        matchmaking_time = 15.0 if matchmaking_time is None else seconds("matchmaking_time", matchmaking_time)
        self.dht, self.run_id, self.auxiliary = dht, run_id, auxiliary
        self.client_mode = dht.client_mode if client_mode is None else client_mode
        self.batch_size_per_step, self.target_batch_size = batch_size_per_step, target_batch_size
        self.delay_optimizer_step, self.delay_grad_averaging = delay_step, delay_grad_averaging
        self.delay_state_averaging, self.average_state_every = delay_state_averaging, average_state_every
        self.matchmaking_time, self.averaging_timeout = matchmaking_time, averaging_timeout
        self.load_state_timeout = seconds("load_state_timeout", load_state_timeout)
        self.status_loglevel = logging.INFO if verbose else logging.DEBUG
        self.scheduled_grads = self.scheduled_state = None
        """As in Hivemind, but always None: a group is found at once, so none is looked for ahead."""
        common = {
            "dht": dht,
            "min_matchmaking_time": self.matchmaking_time,
            "allreduce_timeout": averaging_timeout if allreduce_timeout is None else allreduce_timeout,
            "client_mode": self.client_mode,
            "auxiliary": auxiliary,
            "start": True,
            **(averager_opts or {}),
        }
        with ExitStack() as undo:  # or others would wait for a peer that never trains, and load its state
            self.tracker = ProgressTracker(
                dht,
                run_id,
                target_batch_size,
                client_mode=self.client_mode,
                performance_ema_alpha=performance_ema_alpha,
                start=True,
                **(tracker_opts or {}),
            )
            undo.callback(self.tracker.shutdown)
            self.state_averager = TrainingStateAverager(
                optimizer=optimizer,
                params=params,
                scheduler=scheduler,
                offload_optimizer=self.offload_optimizer,
                custom_gradients=not use_local_updates,
                delta_rule_averaging=use_local_updates and delay_state_averaging,
                compression=state_averaging_compression,
                state_compression=load_state_compression,
                average_opt_statistics=average_opt_statistics,
                extra_tensors=extra_tensors,
                performance_ema_alpha=performance_ema_alpha,
                status_loglevel=self.status_loglevel,
                prefix=f"{run_id}_state_averager",
                **common,
            )
            undo.callback(self.state_averager.shutdown)
            self.state_averager.when_lost = self._tell_priority
            self.grad_averager: GradientAverager | None = None
            if not use_local_updates:
                self.grad_averager = (grad_averager_factory or GradientAverager)(
                    self.state_averager.main_parameters,
                    prefix=f"{run_id}_grad_averager",
                    compression=grad_compression,
                    reuse_grad_buffers=reuse_grad_buffers,
                    **{**common, "allow_state_sharing": False},
                )
            undo.pop_all()
        self._step_supports_amp_scaling = reuse_grad_buffers
        self._lock_priority = threading.Lock()
        """Whoever tells it holds this: or else a slower thread would take back what another has told since."""
        self._met: frozenset[str] = frozenset()
        """Peers in the last average of gradients."""
        self._given_up: frozenset[str] = frozenset()
        """Peers that came to no average, and are not known to train: they are not waited for again."""
        self._number_rounds()

    # ---------------------------------------------------------------- a step

    def step(  # as in Hivemind: more arguments than torch's
        self,
        closure: Callable[[], Any] | None = None,
        batch_size: int | None = None,
        grad_scaler: GradScaler | None = None,
    ) -> Any:
        """Count the gradients of `batch_size` samples (default batch_size_per_step), and end the epoch if it is full.

        Returns what `closure` returns. grad_scaler: a `hivemind.GradScaler`. An auxiliary peer gives no arguments.
        """
        self._check_step(closure, batch_size, grad_scaler)
        if grad_scaler is not None and not grad_scaler.is_enabled():
            grad_scaler = None
        self.state_averager.step(apply_delayed_updates=True)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.auxiliary:
            self.state_averager.local_epoch = max(self.local_epoch, self.tracker.global_epoch)
            self.tracker.report_local_progress(self.local_epoch, 0)
            self._number_rounds()
        elif self._out_of_step():
            self.load_state_from_peers()
            return loss  # the gradients are of parameters that are no longer
        elif not self._count(self.batch_size_per_step or 0 if batch_size is None else batch_size, grad_scaler):
            return loss
        if self.tracker.ready_to_update_epoch:
            self._end_epoch(grad_scaler)
        return loss

    def _count(self, batch_size: int, scaler: GradScaler | None) -> bool:
        """Add the local gradients to the sum, or step with them; False: they have overflowed."""
        if self.grad_averager is None:
            if scaler is not None:
                self.state_averager.step(wait_for_delayed_updates=self.delay_optimizer_step)  # of another finding
                with scaler.running_global_step():
                    scaler.unscale_(self)
            samples = self.local_progress.samples_accumulated + batch_size
            self.state_averager.step(
                optimizer_step=True, delay_optimizer_step=self.delay_optimizer_step, grad_scaler=scaler
            )
        else:
            if scaler is not None and not scaler.are_grads_finite(self):
                log.log(self.status_loglevel, "gradients have overflowed: the local sum begins anew")
                self._drop_sums()
                return False
            self.grad_averager.accumulate_grads_(batch_size)
            samples = self.grad_averager.local_samples_accumulated
        self.tracker.report_local_progress(self.local_epoch, samples)
        return True

    def _end_epoch(self, scaler: GradScaler | None) -> None:
        """Average what is to be averaged, step, and begin the next epoch."""
        epoch, state = self.local_epoch, self.state_averager
        with self.tracker.pause_updates():
            if self.grad_averager is not None:
                state.step(wait_for_delayed_updates=self.delay_optimizer_step)
            others = self.tracker.global_progress.num_peers > (0 if self.auxiliary else 1)
            unheard = frozenset() if others else self._unheard(epoch)
            others = others or bool(unheard)
            trigger: Callable[[], None] | None = None
            if self.grad_averager is not None:
                self.grad_averager.announce(round=epoch)
                control = self._begin_gradients(self.grad_averager, scaler, others)
                finish = partial(self._finish_gradients, self.grad_averager, control, epoch, unheard)
                if self.delay_grad_averaging and not self.auxiliary:
                    trigger = finish
                elif not self._try(finish, scaler):
                    return  # the sums are kept; the next step tries again
            due = (epoch + 1) % self.average_state_every == 0 and others and not state.passed(state.next_round)
            steps = self.grad_averager is not None and not self.auxiliary
            try:
                state.step(
                    increment_epoch=True,
                    wait_for_trigger=trigger,
                    optimizer_step=steps,
                    delay_optimizer_step=self.delay_optimizer_step and steps,
                    grad_scaler=scaler,
                    averaging_round=due,
                    delay_averaging=self.delay_state_averaging and not self.auxiliary,
                    averaging_opts={"timeout": self.matchmaking_time} if due else None,
                )
            finally:  # an average of the state that is interrupted leaves the step made, and its epoch counted
                if self.local_epoch > epoch:
                    self._begin_epoch()

    def _begin_epoch(self) -> None:
        """What was accumulated is in the model, or on its way there."""
        if self.grad_averager is not None and not self.delay_grad_averaging and not self.auxiliary:
            self.grad_averager.reset_accumulated_grads_()
        self.tracker.update_epoch(self.local_epoch)
        self._number_rounds()
        log.log(self.status_loglevel, "epoch %d begins", self.local_epoch)

    def _begin_gradients(
        self, averager: GradientAverager, scaler: GradScaler | None, others: bool
    ) -> StepControl | None:
        """The average, on its way; None: there is nobody else."""
        if scaler is not None:
            with scaler.running_global_step():
                scaler.unscale_(self)
        if not others:
            averager.load_accumulators_into_averager_()
            if self.delay_grad_averaging:
                averager.reset_accumulated_grads_()
            return None
        control: StepControl = averager.step(
            reset_accumulators=self.delay_grad_averaging, wait=False, timeout=self.matchmaking_time
        )
        return control

    def _finish_gradients(
        self, averager: GradientAverager, control: StepControl | None, epoch: int, unheard: frozenset[str]
    ) -> None:
        """Give the average to the optimizer. What it raises stops the step; in the background, this peer is lost.

        In the background the epoch is counted already: where only those did not come who are still not known to train,
        the step is made with this peer's own gradients, which lie where the average would be.
        """
        group: dict[Any, Any] = {}
        try:
            if control is not None:
                group = self._result(control, epoch)
                self._check_together(epoch, group)
                log.log(self.status_loglevel, "averaged the gradients of %d peers", len(group))
        except BaseException as error:
            alone = bool(unheard) and control is not None and self._nobody_came(control, error)
            if alone:
                self._given_up |= unheard
                names = ", ".join(sorted(peer[:8] for peer in unheard))
                log.warning("%s did not come to average, nor report samples: no longer waited for", names)
            if not (alone and self.delay_grad_averaging) or self._somebody_trains(epoch):
                self.state_averager.lacks_step = self.delay_grad_averaging
                self._tell_priority()
                raise
        self._met = frozenset(map(str, group)) - {self.dht.swarm.id}
        with averager.get_tensors() as averaged, torch.no_grad():
            parts = self.state_averager.parts
            for main, param, average in zip(parts.main, parts.optimized, averaged, strict=True):
                if not main.requires_grad:  # the optimizer leaves it alone, weight decay and all
                    param.grad = None
                    continue
                if param.grad is None or param.grad.shape != average.shape:
                    param.grad = torch.empty_like(param)
                param.grad.copy_(average)
        averager.notify_used_averaged_gradients()
        averager.announce(averaged=epoch)

    @staticmethod
    def _nobody_came(control: StepControl, error: BaseException) -> bool:
        """Whether the average failed since there was no group."""
        failed = isinstance(error, DlcError) and not isinstance(error, SwarmClosed | UsageError)
        return failed and not control.cancelled() and not control.began_allreduce

    def _result(self, control: StepControl, epoch: int) -> dict[Any, Any]:
        """Of the average, unless it waits for others who have made the epoch already."""
        return unless_missed(control, lambda: self._missed(epoch), f"epoch {epoch} was made by the others")

    def _check_together(self, epoch: int, group: dict[Any, Any]) -> None:
        """AllreduceException: others have made the epoch in another group, though one has room for all. So it is where
        an all-reduce fails for some of its members only, and those meet again."""
        averager = self.grad_averager
        assert averager is not None
        others = self._trainers(averager)
        apart = any(
            max(entry.averaged, entry.round - 1) >= epoch for peer, entry in others.items() if peer not in group
        )
        if apart and averager.target_group_size is None and len(others) < GROUP_MAX:
            raise AllreduceException(f"the others have made epoch {epoch} without this peer")

    def _drop_sums(self) -> None:
        if self.grad_averager is not None:
            self.grad_averager.reset_accumulated_grads_()
        self.tracker.report_local_progress(self.local_epoch, 0)

    def _try(self, work: Callable[[], None], scaler: GradScaler | None) -> bool:
        """Whether there was an average. Without one the sums are kept, unless a scaler has unscaled them: they would be
        so once more."""
        made = False
        try:
            work()
            made = True
        except (SwarmClosed, UsageError):
            raise
        except DlcError as error:
            if self.auxiliary:
                log.log(self.status_loglevel, "%s; there is nothing to help with until the next epoch ends", error)
            else:
                log.warning("%s; the gradients are kept, and the next step tries again", error)
        finally:
            if not made and scaler is not None:
                self._drop_sums()
        return made

    # ---------------------------------------------------------------- in step with the others

    def _unheard(self, epoch: int) -> frozenset[str]:
        """Who is in this epoch, or was in the last average, where nobody is known to have reported samples: they may
        have begun just now, and notices take their time.

        Each is waited for once, as long as matchmaking takes: it may never train, but give its state or look on.
        """
        if self.auxiliary or self.grad_averager is None:
            return frozenset()
        averager = self.grad_averager
        here = averager.directory.expected(averager.get_group_bits(), epoch)
        here |= self._met & averager.directory.others().keys()
        return here - {self.dht.swarm.id} - self._given_up

    def _somebody_trains(self, epoch: int) -> bool:
        """Whether another peer is known to train by now, or to have made the epoch. In the background: the step that
        began it may hold the progress still."""
        return self.tracker.progress_now().num_peers > 1 or self._missed(epoch)

    def _out_of_step(self) -> bool:
        """Whether others have made an epoch without this peer."""
        if self.state_averager.lacks_step:
            return True
        epoch, newest = self.local_epoch, self.tracker.global_epoch
        if self.grad_averager is None or newest <= epoch:
            return epoch < newest - 1
        return epoch < newest - 1 or self._missed(epoch)

    @staticmethod
    def _trainers(averager: GradientAverager) -> dict[str, Entry]:
        """The others who make steps: an auxiliary peer goes from epoch to epoch without, ahead of averages even."""
        others = averager.directory.others()
        return {peer: entry for peer, entry in others.items() if entry.mode != AveragingMode.AUX.value}

    def _missed(self, epoch: int) -> bool:
        """Others have averaged the gradients of this epoch, and there is no other group to do it with."""
        if self.grad_averager is None:
            return False
        others = self._trainers(self.grad_averager).values()
        waiting = any(entry.averaged < epoch and epoch - 1 <= entry.round <= epoch for entry in others)
        in_groups = self.grad_averager.target_group_size is not None
        return any(entry.averaged >= epoch for entry in others) and not (in_groups and waiting)

    def load_state_from_peers(self, **kwargs: Any) -> None:
        """Take over parameters, statistics and epoch of the peer that is furthest; local sums begin anew.

        Where no peer gives its state, or all that do are as far as this one and came later, nothing is changed.
        timeout: seconds; default load_state_timeout. UsageError: wait=False.
        """
        if not kwargs.pop("wait", True):
            raise UsageError("an Optimizer's state is taken over between two of its steps: leave out wait=False")
        self.state_averager.wait_for_delayed_updates()
        self.state_averager.step(apply_delayed_updates=True)
        if self.state_averager.directory.is_reference() and self.local_epoch >= self.tracker.global_epoch:
            self._go_on_as_reference()
            return
        epoch, samples = self.local_epoch, self.local_progress.samples_accumulated
        with self.tracker.pause_updates():
            loaded = self.state_averager.load_state_from_peers(**{"timeout": self.load_state_timeout, **kwargs})
            alone = not self.state_averager.directory.others()
            if alone:
                self.state_averager.lacks_step = False
            elif loaded is None:
                log.warning("no peer has given its state, though there are others; trying again with the next step")
            if loaded is not None and samples:
                log.warning(
                    "this peer was in epoch %d and has another one's state of epoch %d now: what it had trained since "
                    "its last average (%d samples in its last epoch) is lost",
                    epoch,
                    self.local_epoch,
                    samples,
                )
            self._drop_sums()
            self._number_rounds()

    def _go_on_as_reference(self) -> None:
        """Who loads a state loads this peer's: all others that are as far lack the step, too, or share no state."""
        state, averager = self.state_averager, self.grad_averager
        if state.lacks_step and averager is not None:
            made = [peer for peer, e in self._trainers(averager).items() if e.averaged >= self.local_epoch - 1]
            if made:
                log.warning(
                    "this peer lacks the step of epoch %d, and %s, who made it, share no state: it goes on without it, "
                    "and its model differs from theirs until parameters are averaged (average_state_every)",
                    self.local_epoch - 1,
                    ", ".join(sorted(peer[:8] for peer in made)),
                )
        state.lacks_step = False
        self._number_rounds()

    def _number_rounds(self) -> None:
        """Tell the others which rounds this peer will join next, and how far it is as a donor."""
        state, epoch = self.state_averager, self.local_epoch
        state.next_round = epoch // self.average_state_every + 1
        if not state.averaging_in_progress:  # or else it is told when that round is over
            state.announce(round=state.next_round)
        if self.grad_averager is not None:
            self.grad_averager.next_round = epoch
            if not state.busy:
                self.grad_averager.announce(round=epoch)
        self._tell_priority()

    def _tell_priority(self) -> None:
        """From any thread."""
        with self._lock_priority:
            if self.state_averager.allow_state_sharing:
                self.state_averager.state_sharing_priority = self.local_epoch - 0.5 * self.state_averager.lacks_step

    def shutdown(self) -> None:
        """Be no peer of this run any more, and make no step (UsageError); the DHT goes on. Idempotent."""
        self.tracker.shutdown()
        self.state_averager.shutdown()
        if self.grad_averager is not None:
            self.grad_averager.shutdown()

    def _check_step(self, closure: object, batch_size: int | None, scaler: object) -> None:
        if not self.is_alive():
            raise UsageError("this optimizer was shut down: no peer of the run would know of its steps")
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise UsageError("grad_scaler must be a hivemind.GradScaler: torch's own does not know of accumulated sums")
        if scaler is not None and not self._step_supports_amp_scaling and not self.use_local_updates:
            raise UsageError("without reuse_grad_buffers use torch.amp.GradScaler, which unscales before each step")
        if self.auxiliary:
            if closure is not None or batch_size is not None or scaler is not None:
                raise UsageError("an auxiliary peer trains nothing: call step() without arguments")
        elif batch_size is None and self.batch_size_per_step is None:
            raise UsageError("say how many samples a step has: batch_size_per_step, or step(batch_size=...)")
        elif batch_size is not None:
            if batch_size == 0:
                raise UsageError("batch_size is 0: without samples leave the step out")
            whole("batch_size", batch_size, 1)


def _check(*relations: tuple[bool, str]) -> None:
    for holds, text in relations:
        if not holds:
            raise UsageError(text)


__all__ = ["Optimizer"]
