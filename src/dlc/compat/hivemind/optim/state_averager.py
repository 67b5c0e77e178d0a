"""`TrainingStateAverager`: an optimizer with its parameters, schedule and statistics, kept in step with other peers.

A `step` does, in this order, what its flags ask for: wait for a trigger, step the optimizer and the schedule, average
the state. Each part is done at once, or in the background (delay_optimizer_step, delay_averaging); what was done in the
background is applied to the model by a later `step`, never in between.

Offloaded, the optimizer works on fp32 copies in host memory, and the model's parameters are set from them.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer as TorchOptimizer
from torch.optim.lr_scheduler import LRScheduler

from dlc.compat.hivemind.averaging.allreduce import AllreduceException
from dlc.compat.hivemind.averaging.averager import DecentralizedAverager
from dlc.compat.hivemind.averaging.carry import take
from dlc.compat.hivemind.averaging.control import StepControl
from dlc.compat.hivemind.compression import CompressionInfo, TensorRole
from dlc.compat.hivemind.dht import DHT
from dlc.compat.hivemind.optim.components import Components, build, differ, merged, steps_of, versions
from dlc.compat.hivemind.optim.grad_scaler import GradScaler
from dlc.compat.hivemind.optim.optimizer_state import check_averaged, dump, load, state_infos, statistics_of
from dlc.compat.hivemind.utils.background import in_background
from dlc.compat.hivemind.utils.performance_ema import PerformanceEMA
from dlc.errors import DlcError, SwarmClosed, UsageError

log = logging.getLogger(__name__)

LRSchedulerBase = LRScheduler
Parameters = Iterable[Tensor]
ParamGroups = Iterable[dict[str, Any]]
OptimizerFactory = Callable[[Parameters | ParamGroups], TorchOptimizer]
SchedulerFactory = Callable[[TorchOptimizer], LRScheduler]
"""Types for annotations, and for schedules of one's own, that Hivemind's programs import from here."""


LOOK_S = 0.5
"""How often who waits for an average looks whether it was missed."""


def unless_missed(control: StepControl, missed: Callable[[], bool], what: str) -> dict[Any, Any]:
    """The result of the step, or AllreduceException with `what`: there is no group yet, and no others to come."""
    while True:
        try:
            gathered: dict[Any, Any] = control.result(LOOK_S)
            return gathered
        except TimeoutError:
            # Looked at first: who is in one group with this peer can be ahead of it only once that group has begun.
            if missed() and not control.began_allreduce and control.cancel():
                raise AllreduceException(f"{what} without this peer") from None
        except BaseException:
            control.cancel()  # of an interrupt: its mean would come into what is averaged next
            raise


class Update:
    """What one `step` does, and what of it is not in the model yet."""

    def __init__(self) -> None:
        self.stepped = False
        """The optimizer has made its step: an offloaded one has other parameters than the model."""
        self.averaged: list[Tensor] = []
        """Means that the local tensors are to take."""
        self.epoch = 0
        """The greatest of the group, if it comes with its means."""
        self.before: list[Tensor] = []
        """What was averaged: with the delta rule, only the change is taken over; without it, of the parameters, where
        the program may change them meanwhile: what it did change is not overwritten."""
        self.outdated = False
        """Another state was loaded meanwhile, of which there is no mean."""
        self.versions: list[int] = []
        """Of the parameters, when what is in the background began, if they are the model's own."""
        self.owes_step = self.averages = False
        """The optimizer's step is done in the background; a round is a part of it."""
        self.counts = False
        """Its epoch is counted in `local_epoch`."""
        self.future: Future[None] | None = None
        """Where it is done in the background."""

    @property
    def owes(self) -> bool:
        """Its step is still to be made."""
        return self.owes_step and not self.stepped and not self.done

    @property
    def done(self) -> bool:
        return self.future is None or self.future.done()


class TrainingStateAverager(DecentralizedAverager):
    """optimizer: one, or a callable of `params` (parameters or groups of them) that makes it; scheduler: the same, of
    the optimizer; it follows `local_epoch`, not the number of steps. offload_optimizer: see above; needs callables.
    custom_gradients: the caller fills the gradients of an offloaded optimizer. delta_rule_averaging: what local steps
    changed during a round is kept: tensor += mean - value before. sync_epoch_when_averaging: take over the greatest
    epoch of the group. average_opt_statistics: statistics by name that are averaged, too, and so are extra_tensors.

    Not needed, and of no effect: reuse_tensors (rounds have buffers of their own). Others: DecentralizedAverager.
    """

    def __init__(
        self,
        *,
        dht: DHT,
        optimizer: TorchOptimizer | Callable[..., TorchOptimizer],
        params: Iterable[Any] | None = None,
        scheduler: LRScheduler | Callable[..., LRScheduler] | None = None,
        initialize_optimizer: bool | None = None,
        offload_optimizer: bool = False,
        custom_gradients: bool = False,
        reuse_tensors: bool | None = None,
        delta_rule_averaging: bool = False,
        performance_ema_alpha: float = 0.1,
        sync_epoch_when_averaging: bool = False,
        parameter_names: Sequence[str] | None = None,
        average_opt_statistics: Sequence[str] = (),
        extra_tensors: Sequence[Tensor] = (),
        status_loglevel: int = logging.DEBUG,
        **kwargs: Any,
    ) -> None:
        self.parts: Components = build(
            optimizer, params, scheduler, initialize_optimizer, offload_optimizer, average_opt_statistics
        )
        self.optimizer, self.scheduler = self.parts.optimizer, self.parts.scheduler
        self._began: Any = copy.deepcopy((self._hyperparameters(), self.scheduler and self.scheduler.state_dict()))
        """Options and schedule as they were made, for an earlier epoch: a schedule only goes forward."""
        self.main_parameters = self.parts.main
        self.parameter_names = tuple(parameter_names or range(len(self.main_parameters)))
        self.offload_optimizer, self.custom_gradients = offload_optimizer, custom_gradients
        self.delta_rule_averaging, self.sync_epoch_when_averaging = delta_rule_averaging, sync_epoch_when_averaging
        self.opt_keys_for_averaging, self.extra_tensors = tuple(average_opt_statistics), tuple(extra_tensors)
        self.status_loglevel = status_loglevel
        self.local_epoch = 0
        self.lacks_step = False
        """An epoch is counted whose gradients could not be averaged, or whose step failed: the parameters are not those
        of the others."""
        self.when_lost: Callable[[], object] = lambda: None
        """Called when a step in the background has failed, maybe on another thread."""
        self.delay_before_averaging = PerformanceEMA(alpha=performance_ema_alpha)
        self.lock_optimizer = threading.RLock()
        """Whoever reads or changes parameters and statistics holds it, so that a donor never gives half a step."""
        self._updates: list[Update] = []
        self._told = False
        """That the program changes the model while updates are on their way: once, it may do so with every step."""
        self.last_error: DlcError | None = None
        """Of the last round that failed."""
        check_averaged(self._local_tensors())
        averaged = [t.detach().to("cpu", torch.float32, copy=True) for t in self._local_tensors()]
        super().__init__(averaged, dht, tensor_infos=list(self._infos()), **kwargs)

    # ---------------------------------------------------------------- one step

    def schedule_step(self, scheduled_time: float | None = None, **kwargs: Any) -> StepControl:
        """Look for a group now; give what this returns to `step(averaging_control=...)`."""
        control: StepControl = super().step(scheduled_time=scheduled_time, wait=False, require_trigger=True, **kwargs)
        return control

    def step(  # type: ignore[override]  # as in Hivemind: other arguments than its base
        self,
        wait_for_delayed_updates: bool | None = None,
        apply_delayed_updates: bool = True,
        increment_epoch: bool = False,
        optimizer_step: bool = False,
        zero_grad: bool = False,
        delay_optimizer_step: bool = False,
        averaging_round: bool = False,
        delay_averaging: bool | None = None,
        averaging_control: StepControl | None = None,
        wait_for_trigger: Callable[[], Any] | None = None,
        grad_scaler: GradScaler | None = None,
        set_to_none: bool = True,
        averaging_opts: dict[str, Any] | None = None,
    ) -> None:
        """What the flags say, in their order. A round that fails is logged, and leaves everything as it was.

        What the program has changed in the model since the last step of an offloaded optimizer counts, value by value:
        what was on its way in the background is waited for, and changes only the others.
        """
        delay_averaging = delay_optimizer_step if delay_averaging is None else delay_averaging
        work = optimizer_step or zero_grad or averaging_round
        self._check_flags(delay_optimizer_step, delay_averaging, averaging_round, averaging_opts, averaging_control)
        if wait_for_trigger is not None and not self.custom_gradients and delay_optimizer_step:
            raise UsageError("a delayed step with a trigger needs custom_gradients: the caller fills them")
        if wait_for_delayed_updates is None:
            keeps_local_steps = self.delta_rule_averaging and not delay_optimizer_step
            wait_for_delayed_updates = averaging_round or (work and not keeps_local_steps)
        changed = self.parts.changed()
        if wait_for_delayed_updates or changed:
            self.wait_for_delayed_updates()
        if apply_delayed_updates or changed:
            self._apply_finished(changed)
        self._take_over()
        if not work:
            if increment_epoch:
                with self.lock_optimizer:
                    self.local_epoch += 1
                    self._update_scheduler()
            return
        if self.offload_optimizer and not self.custom_gradients:
            self.parts.load_gradients()
        update = Update()
        number, epoch = self.next_round, self.local_epoch + increment_epoch  # what is in the background comes later
        update.owes_step, update.averages = delay_optimizer_step and optimizer_step, averaging_round
        update.counts = increment_epoch

        def optimize() -> None:
            self._optimize(update, optimizer_step, zero_grad, grad_scaler, set_to_none)

        def average() -> None:
            if averaging_round:
                self._average_state(update, averaging_control, averaging_opts or {}, number, epoch)

        def both() -> None:
            if wait_for_trigger is not None:
                wait_for_trigger()
            optimize()
            average()

        if not delay_optimizer_step:
            if wait_for_trigger is not None:
                wait_for_trigger()
            with self.lock_optimizer:  # whoever is given the state now has epoch and parameters that belong together
                self.local_epoch += increment_epoch
                optimize()
            try:
                if not delay_averaging:
                    self._guard(average)
            finally:  # the step is made, and its epoch counted, though the average be interrupted
                self._apply(update)
        if delay_optimizer_step or (averaging_round and delay_averaging):
            later = both if delay_optimizer_step else average
            with self.lock_optimizer:
                if delay_optimizer_step:
                    self.local_epoch += increment_epoch
                if update.owes_step:
                    self.parts.hold()
                if not self.offload_optimizer:
                    update.versions = versions(self.parts.main)
                update.future = in_background(lambda: self._guard(later), "update")
                self._updates.append(update)

    def wait_for_delayed_updates(self) -> None:
        """Return when nothing is done in the background any more; a round ends by its own time limits."""
        for update in list(self._updates):
            if update.future is not None:
                update.future.exception()  # raised where the update is applied

    def _wait_for_steps(self) -> None:
        """Return when no step of the optimizer is owed."""
        for update in list(self._updates):
            if update.future is not None and update.owes:
                update.future.exception()

    @property
    def epoch_of_model(self) -> int:
        """The epoch whose parameters the model has: steps in the background are in `local_epoch` from their beginning,
        and in the model of an offloaded optimizer when a later `step` brings them there."""
        owed = [u for u in self._updates if u.owes_step and (self.offload_optimizer or not u.stepped)]
        return self.local_epoch - sum(update.counts for update in owed)

    @property
    def busy(self) -> bool:
        """Something is done in the background."""
        return any(not update.done for update in self._updates)

    @property
    def averaging_in_progress(self) -> bool:
        return any(update.averages and not update.done for update in self._updates)

    # ---------------------------------------------------------------- its parts

    def _guard(self, work: Callable[[], None]) -> None:
        """A round that fails is told in the log and in `last_error`, and does not stop the training."""
        try:
            work()
        except (SwarmClosed, UsageError):
            raise
        except DlcError as error:
            self.last_error = error
            log.warning("%s: %s", self.prefix, error)

    def _optimize(
        self, update: Update, optimizer_step: bool, zero_grad: bool, scaler: GradScaler | None, set_to_none: bool
    ) -> None:
        with self.lock_optimizer:
            if optimizer_step:
                if not self.delta_rule_averaging:
                    for other in list(self._updates):
                        other.before = []  # a mean overwrites what this step changes, as without the delta rule
                try:
                    self._step_optimizer(scaler)
                except BaseException:
                    self._not_made(update)
                    raise
                update.stepped = True
            if zero_grad:
                self.optimizer.zero_grad(set_to_none)
                self.parts.zero_main_gradients(set_to_none)
            self._update_scheduler()

    def _step_optimizer(self, scaler: GradScaler | None) -> None:
        if scaler is None:
            self.optimizer.step()
        else:
            with scaler.running_global_step():
                scaler.step(self.optimizer)

    def _not_made(self, update: Update) -> None:
        """The optimizer's step has failed: its epoch is not counted, or where others were told of it, lacks it."""
        if not update.counts:
            return
        if update.owes_step:
            self.lacks_step = True
            self.when_lost()
        else:
            self.local_epoch -= 1

    def _average_state(
        self, update: Update, control: StepControl | None, opts: dict[str, Any], number: int, epoch: int
    ) -> None:
        began = time.perf_counter()
        with self.lock_optimizer, torch.no_grad(), self.get_tensors() as averaged:
            for average, local in zip(averaged, self._local_tensors(), strict=True):
                average.copy_(local)
            if self.delta_rule_averaging or update.versions:
                kept = averaged if self.delta_rule_averaging else averaged[: len(update.versions)]
                update.before = [average.clone() for average in kept]
        if control is None or control.triggered or control.done():  # after the copy: its patience is for the others
            control = self.schedule_step(gather=epoch, **opts)
            control.number = number
        self.delay_before_averaging.update(1, time.perf_counter() - began)
        control.allow_allreduce()
        gathered = unless_missed(control, lambda: self.passed(number), f"{self.prefix}: round {number} was made")
        with self.get_tensors() as averaged:
            update.averaged = [average.clone() for average in averaged]
        log.log(self.status_loglevel, "%s: averaged the state of %d peers", self.prefix, len(gathered))
        if self.sync_epoch_when_averaging:
            update.epoch = max([0, *(e for e in gathered.values() if isinstance(e, int))])

    def passed(self, number: int) -> bool:
        """All others have averaged in that round, or left it out: nobody comes any more. Who has numbered no round only
        looks on."""
        rounds = [entry.round for entry in self.directory.others().values() if entry.round >= 0]
        return number >= 0 and bool(rounds) and min(rounds) > number

    def _apply_finished(self, changed: bool, whole: bool = False) -> None:
        """changed: the program has changed the model; whole: it has loaded it, so that no mean is of it any more."""
        if changed and self._updates:
            self._tell_changed()
        for update in [update for update in self._updates if update.done]:
            self._updates.remove(update)
            if update.future is not None:
                update.future.result()  # an error of the optimizer itself
            update.outdated = update.outdated or (changed and whole)
            self._apply(update, whole)
        if not any(update.owes_step for update in self._updates):
            with self.lock_optimizer:
                self.parts.release()

    def _tell_changed(self) -> None:
        if not self._told:
            self._told = True
            log.warning(
                "%s: the program has changed the model while an update was on its way; what it changed stays",
                self.prefix,
            )

    def _take_over(self, whole: bool = False) -> None:
        """Of a model that the program has changed, unless the copies are worked with now."""
        if not self._updates:
            with self.lock_optimizer:
                self.parts.take_over(whole)

    def _apply(self, update: Update, whole: bool = False) -> None:
        """Bring what was done into the model, but for what the program has changed there."""
        with self.lock_optimizer, torch.no_grad():
            means = [] if update.outdated else update.averaged
            if not (update.stepped or means):
                return
            changes = self.parts.changes(whole)
            if means:
                self._take_means(update, means)
            if self.offload_optimizer:
                self.parts.take(changes)
                self.parts.apply()

    def _take_means(self, update: Update, means: list[Tensor]) -> None:
        """Local tensors <- means; with the delta rule, what local steps have changed meanwhile is kept on top, and
        without it what the program has changed of the parameters stays."""
        for i, (local, mean) in enumerate(zip(self._local_tensors(), means, strict=True)):
            if self.delta_rule_averaging:
                take(local, update.before[i], mean)
                continue
            written = i < len(update.before) and local._version != update.versions[i]
            where = differ(local, update.before[i]) if written else None
            local.copy_(mean if where is None else merged(local, mean, where))
            if where is not None:
                self._tell_changed()
        if update.epoch > self.local_epoch:
            self.local_epoch = update.epoch
            self._update_scheduler()

    def _update_scheduler(self) -> None:
        """Bring the schedule to `local_epoch`. UsageError: it does not count its steps."""
        if self.scheduler is not None:
            while (made := steps_of(self.scheduler)) <= self.local_epoch:
                self.scheduler.step()
                if steps_of(self.scheduler) <= made:
                    raise UsageError(
                        f"{type(self.scheduler).__name__} does not count its steps in last_epoch, by which it follows "
                        "the epochs: make it a torch.optim.lr_scheduler.LRScheduler that has only get_lr of its own"
                    )

    # ---------------------------------------------------------------- tensors

    def _local_tensors(self) -> Iterator[Tensor]:
        """What is averaged, as the optimizer has it."""
        params = self.parts.optimized
        yield from params
        yield from statistics_of(self.optimizer, params, self.opt_keys_for_averaging)
        yield from self.extra_tensors

    def _infos(self) -> Iterator[CompressionInfo]:
        named = list(zip(self.main_parameters, self.parameter_names, strict=True))
        yield from (CompressionInfo.from_tensor(p, name, TensorRole.PARAMETER) for p, name in named)
        for stat in self.opt_keys_for_averaging:
            yield from (CompressionInfo.from_tensor(p, (name, stat), TensorRole.OPTIMIZER) for p, name in named)
        yield from (CompressionInfo.from_tensor(t, i) for i, t in enumerate(self.extra_tensors))

    # ---------------------------------------------------------------- state for others

    def get_current_state(self) -> tuple[Any, ...]:
        """Parameters, extra tensors and the optimizer's state, after what is still done in the background.

        DlcError: a step is missing in them that others have made.
        """
        owes = True
        while owes:
            self._wait_for_steps()  # their epochs are counted already
            with self.lock_optimizer:
                lacks_step, owes = self.lacks_step, any(update.owes for update in list(self._updates))
                state = () if owes else self._current_state()  # or one has begun meanwhile
        if lacks_step and not self.directory.is_reference():
            raise DlcError("it lacks a step that others have made")
        return state

    @torch.no_grad()
    def _current_state(self) -> tuple[Any, ...]:
        state, statistics = dump(self.optimizer)
        pairs = zip(self.parts.current, self.parts.optimized, strict=True)
        params = [now.detach().to("cpu", own.dtype, copy=True) for now, own in pairs]
        tensors = [*params, *(t.detach().cpu().clone() for t in self.extra_tensors)]
        metadata = {
            "epoch": self.local_epoch,
            "group_bits": self.get_group_bits(),
            "optimizer_metadata": state,
        }
        infos = state_infos(self.main_parameters, self.parameter_names, self.extra_tensors, statistics)
        return metadata, [*tensors, *statistics], infos

    def load_state_from_peers(self, wait: bool = True, timeout: float | None = None) -> Any:
        """Take over parameters, statistics, epoch and schedule of the best donor; returns them, or None: there is no
        donor, or none that is as far as this peer. A mean that is on its way is then not taken over."""
        if not wait:
            return in_background(lambda: self.load_state_from_peers(timeout=timeout), "load")
        loaded = super().load_state_from_peers(timeout=timeout)
        if loaded is None:
            return None
        metadata, tensors = loaded
        epoch = metadata.get("epoch") if isinstance(metadata, dict) else None
        if type(epoch) is not int or epoch < self.local_epoch:
            log.warning("%s: the state of the other peer is of epoch %r, this peer is further", self.prefix, epoch)
            return None
        self._wait_for_steps()
        with self.lock_optimizer:
            mine = [*self.parts.optimized, *self.extra_tensors]
            own = self._hyperparameters()
            load(self.optimizer, metadata.get("optimizer_metadata"), mine, tensors)
            for update in list(self._updates):
                update.outdated = True
            if self.offload_optimizer:
                self.parts.apply()
            self.local_epoch, self.lacks_step = epoch, False
            if self.scheduler is not None:
                self._catch_up(own)
        return loaded

    def restore(self, state: dict[str, Any], epoch: int) -> None:
        """Take back what the optimizer's `state_dict` gave in that epoch, and bring the schedule there.

        What is still done in the background counts first, but for a model that the program has loaded meanwhile.
        """
        self.wait_for_delayed_updates()
        now = [] if self.offload_optimizer else versions(self.parts.main)
        written = any(update.versions != now for update in self._updates)
        self._apply_finished(written or self.parts.written, whole=True)  # loaded, though it may be what was there
        self._take_over(whole=True)
        with self.lock_optimizer:
            own = self._hyperparameters()
            self.optimizer.load_state_dict(state)
            self.local_epoch = epoch
            if self.scheduler is not None and steps_of(self.scheduler) > epoch + 1:
                own, schedule = copy.deepcopy(self._began)
                self.scheduler.load_state_dict(schedule)
            if self.scheduler is not None and steps_of(self.scheduler) <= epoch:
                self._catch_up(own)

    def _hyperparameters(self) -> list[dict[str, Any]]:
        return [{key: group[key] for key in group if key != "params"} for group in self.optimizer.param_groups]

    def _catch_up(self, own: list[dict[str, Any]]) -> None:
        """Bring the schedule to `local_epoch`: it goes on from where it was itself, with what it had set."""
        for group, before in zip(self.optimizer.param_groups, own, strict=True):
            group.update(before)
        self._update_scheduler()

    def shutdown(self) -> None:
        self.wait_for_delayed_updates()
        super().shutdown()

    @staticmethod
    def _check_flags(delay_step: bool, delay_averaging: bool, round_: bool, opts: object, control: object) -> None:
        if delay_step and round_ and not delay_averaging:
            raise UsageError("after a delayed optimizer step the averaging is delayed, too")
        if not round_ and (opts or control is not None):
            raise UsageError("averaging_opts and averaging_control are for steps with averaging_round=True")


__all__ = [
    "GradScaler",
    "LRSchedulerBase",
    "OptimizerFactory",
    "ParamGroups",
    "Parameters",
    "SchedulerFactory",
    "TorchOptimizer",
    "TrainingStateAverager",
]
