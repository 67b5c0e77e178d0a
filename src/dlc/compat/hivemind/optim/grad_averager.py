"""`GradientAverager`: gradients of several batches are added up here, and averaged with those of other peers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dlc.compat.hivemind.averaging.averager import DecentralizedAverager
from dlc.compat.hivemind.averaging.control import StepControl, check_weight, waited
from dlc.compat.hivemind.dht import DHT
from dlc.compat.hivemind.optim.optimizer_state import check_real
from dlc.errors import UsageError

log = logging.getLogger(__name__)


class GradientAverager(DecentralizedAverager):
    """Three sets of tensors: the gradients of `parameters`, the sums of them (`accumulate_grads_`), and the averages.

    A sum is divided by the number of batches, and each batch is counted by its size against the first one's; the weight
    in a round is the number of samples. As in Hivemind; so the average is that of all samples only where all batches of
    a peer have one size: where its first one is smaller than the others, its gradients count for too much.

    reuse_grad_buffers: the parameters' gradients are the sums: nobody may zero them. accumulate_grads_on: device of
    the sums. warn: say where sums were not reset, or averages not used. averaged_grads: tensors to average in, of the
    shapes of the gradients (ValueError otherwise). Others: DecentralizedAverager.
    """

    _keeps_unsaid = False  # nothing of a gradient is averaged once more; all make the same step

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        dht: DHT,
        prefix: str,
        reuse_grad_buffers: bool = False,
        accumulate_grads_on: torch.device | str | None = None,
        client_mode: bool | None = None,
        warn: bool = True,
        averaged_grads: Sequence[Tensor] = (),
        **kwargs: Any,
    ) -> None:
        if reuse_grad_buffers and accumulate_grads_on is not None:
            log.warning("accumulate_grads_on changes nothing where the gradients themselves are the sums")
        self.parameters = tuple(parameters)
        self.reuse_grad_buffers, self.warn = reuse_grad_buffers, warn
        self.local_samples_accumulated = self.local_times_accumulated = 0
        self._first_batch: int | None = None
        self._sums_used = self._averages_unused = False
        self._last: StepControl | None = None
        grads = list(self._grads())
        check_real(grads)
        self._sums = None if reuse_grad_buffers else [torch.zeros_like(g, device=accumulate_grads_on) for g in grads]
        averaged = list(averaged_grads) or [g.detach().to("cpu", torch.float32, copy=True) for g in grads]
        if [a.shape for a in averaged] != [g.shape for g in grads]:
            raise ValueError(
                f"averaged_grads have the shapes {[tuple(a.shape) for a in averaged]}, "
                f"the parameters {[tuple(g.shape) for g in grads]}"
            )
        super().__init__(averaged, dht, prefix=prefix, client_mode=client_mode, **kwargs)

    def _grads(self) -> Iterator[Tensor]:
        """Of the parameters; zeros where there is none yet."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            yield parameter.grad

    def _grad_accumulators(self) -> Iterator[Tensor]:
        yield from self._grads() if self._sums is None else self._sums

    @torch.no_grad()
    def accumulate_grads_(self, batch_size: int) -> None:
        """Add the present gradients, the mean over `batch_size` samples, to the sums."""
        self._look_back()
        if self._sums_used and self.warn:
            log.warning("the sums of the last round were not reset: call reset_accumulated_grads_ after it")
            self._sums_used = False
        if self._first_batch is None:
            self._first_batch = batch_size
        self.local_samples_accumulated += batch_size
        self.local_times_accumulated += 1
        if self._sums is not None:
            share = batch_size / self._first_batch
            for total, grad in zip(self._sums, self._grads(), strict=True):
                total.add_(grad.to(total.device), alpha=share)

    def schedule_step(self, scheduled_time: float | None = None, **kwargs: Any) -> StepControl:
        """Look for a group now; give what this returns to `step(control=...)` once the gradients are there."""
        if kwargs.get("weight") is not None:
            raise UsageError("the weight is given to step, not to schedule_step")
        control: StepControl = super().step(scheduled_time=scheduled_time, wait=False, require_trigger=True, **kwargs)
        return control

    def step(  # type: ignore[override]  # as in Hivemind: it takes a control, and always waits for a trigger inside
        self,
        weight: float | None = None,
        reset_accumulators: bool = True,
        control: StepControl | None = None,
        timeout: float | None = None,
        wait: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Average the sums. Returns what was gathered, or with wait=False the StepControl.

        weight: default the number of samples. reset_accumulators: the sums begin anew. control: of `schedule_step`.
        timeout: seconds; other arguments as of `DecentralizedAverager.step`. AllreduceException: there was no mean.
        TimeoutError: not in time, and a control was given: it can be waited for again, or cancelled.
        ValueError, with nothing done: no weight that a mean can have.
        """
        given = control is not None
        if control is not None and kwargs:
            raise UsageError(f"{', '.join(kwargs)}: give this to schedule_step, where the group is looked for")
        if control is not None and control.triggered:
            raise UsageError("this StepControl was used already")
        weight = self.local_samples_accumulated if weight is None else weight
        check_weight(weight)
        self._look_back()
        if self._averages_unused and self.warn:
            log.warning("the averages of the last round were not used")
        self.load_accumulators_into_averager_()
        if control is None:  # after the copy, which takes its time in a large model: the timeout is for the others
            control = self.schedule_step(timeout=timeout, **kwargs)
        self._sums_used = self._averages_unused = True
        control.weight = weight
        if reset_accumulators:
            self.reset_accumulated_grads_()
        self._last = control
        control.allow_allreduce()
        if not wait:
            return control
        return control.result(timeout) if given else waited(control, timeout)

    def _look_back(self) -> None:
        """Where there was no mean, the sums are as good as before, and nobody can use averages. Looked at when that
        counts: who has waited for the step may go on before a callback of it is called."""
        last = self._last
        if last is not None and last.done() and (last.cancelled() or last.exception() is not None):
            self._sums_used = self._averages_unused = False

    @torch.no_grad()
    def load_accumulators_into_averager_(self) -> None:
        """Put the local mean (sums by the number of batches) where the average will be."""
        scale = 1.0 / self.local_times_accumulated if self.local_times_accumulated else 0.0
        with self.get_tensors() as averaged:
            for total, average in zip(self._grad_accumulators(), averaged, strict=True):
                average.copy_(total).mul_(scale)

    @torch.no_grad()
    def reset_accumulated_grads_(self) -> None:
        """Begin the sums anew."""
        self._sums_used, self._first_batch = False, None
        self.local_samples_accumulated = self.local_times_accumulated = 0
        for total in self._grad_accumulators():
            total.zero_()

    @contextmanager
    def use_averaged_gradients(self) -> Iterator[tuple[Tensor, ...]]:
        """Inside, `.grad` of each parameter is its average (on its device, in its dtype)."""
        self._averages_unused = False
        old = [parameter.grad for parameter in self.parameters]
        with self.get_tensors() as averaged:
            try:
                for parameter, average in zip(self.parameters, averaged, strict=True):
                    parameter.grad = average.to(parameter.device, parameter.dtype)
                yield averaged
            finally:
                for parameter, grad in zip(self.parameters, old, strict=True):
                    parameter.grad = grad

    def notify_used_averaged_gradients(self) -> None:
        """The averages were used in another way."""
        self._averages_unused = False


GradientAveragerFactory = Callable[..., GradientAverager]

__all__ = ["GradientAverager", "GradientAveragerFactory"]
