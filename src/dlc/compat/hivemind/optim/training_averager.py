"""`TrainingAverager`: the parameters, gradients or statistics of an optimizer, averaged when `step` is called."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from dlc.compat.hivemind.averaging.averager import DecentralizedAverager
from dlc.compat.hivemind.averaging.carry import take
from dlc.compat.hivemind.compression import CompressionInfo, TensorRole
from dlc.compat.hivemind.optim.optimizer_state import (
    check_averaged,
    dump,
    initialize,
    load,
    state_infos,
    statistics_of,
)
from dlc.compat.hivemind.utils.background import in_background
from dlc.errors import UsageError


class TrainingAverager(DecentralizedAverager):
    """Averages the parameters of `opt` (average_parameters), their gradients (average_gradients), statistics of its
    state by name (average_opt_statistics), and `extra_tensors`.

    initialize_optimizer: make the state that the optimizer would make in its first step. Others: DecentralizedAverager.
    """

    def __init__(
        self,
        opt: torch.optim.Optimizer,
        *,
        average_parameters: bool,
        average_gradients: bool,
        average_opt_statistics: Sequence[str] = (),
        extra_tensors: Sequence[Tensor] = (),
        parameter_names: Sequence[str] | None = None,
        initialize_optimizer: bool = True,
        **kwargs: Any,
    ) -> None:
        if initialize_optimizer:
            initialize(opt, average_opt_statistics)
        self.opt, self.extra_tensors, self.local_step = opt, tuple(extra_tensors), 0
        self.opt_statistics = tuple(average_opt_statistics)
        self.average_parameters, self.average_gradients = average_parameters, average_gradients
        self.parameter_names = tuple(parameter_names or range(len(self._params())))
        self.lock_averager_step = threading.Lock()
        check_averaged(self.local_tensors())
        averaged = [t.detach().to("cpu", torch.float32, copy=True) for t in self.local_tensors()]
        super().__init__(averaged, tensor_infos=list(self._infos()), **kwargs)

    def step(  # type: ignore[override]  # as in Hivemind: a lock for the data, and a plain future
        self, data_lock: AbstractContextManager[Any] | None = None, wait: bool = True, **kwargs: Any
    ) -> Any:
        """Average now. Returns what was gathered, or with wait=False a future of it.

        data_lock: the tensors may be changed by others meanwhile, under this lock; what they change is kept.
        AllreduceException: there was no mean; nothing is changed.
        """
        if not wait:
            future: Future[Any] = in_background(lambda: self.step(data_lock, **kwargs), "training")
            return future
        lock = data_lock or nullcontext()
        with self.lock_averager_step, torch.no_grad():
            tensors = list(self.local_tensors())
            with lock, self.get_tensors() as averaged:
                for average, tensor in zip(averaged, tensors, strict=True):
                    average.copy_(tensor)
                before = [average.clone() for average in averaged] if data_lock is not None else []
            gathered = super().step(**kwargs)
            with lock, self.get_tensors() as averaged:
                for i, (tensor, average) in enumerate(zip(tensors, averaged, strict=True)):
                    if before:
                        take(tensor, before[i], average)
                    else:
                        tensor.copy_(average)
            self.local_step += 1
            return gathered

    def local_tensors(self) -> Iterator[Tensor]:
        """The tensors that are averaged; a gradient that is not there yet is made, of zeros."""
        params = self._params()
        if self.average_parameters:
            yield from params
        if self.average_gradients:
            for param in params:
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
                yield param.grad
        yield from statistics_of(self.opt, params, self.opt_statistics)
        yield from self.extra_tensors

    def _params(self) -> list[Tensor]:
        return [param for group in self.opt.param_groups for param in group["params"]]

    def _infos(self) -> Iterator[CompressionInfo]:
        named = list(zip(self._params(), self.parameter_names, strict=True))
        if self.average_parameters:
            yield from (CompressionInfo.from_tensor(p, name, TensorRole.PARAMETER) for p, name in named)
        if self.average_gradients:
            yield from (CompressionInfo.from_tensor(p, name, TensorRole.GRADIENT) for p, name in named)
        for stat in self.opt_statistics:
            yield from (CompressionInfo.from_tensor(p, (name, stat), TensorRole.OPTIMIZER) for p, name in named)
        yield from (CompressionInfo.from_tensor(t, i) for i, t in enumerate(self.extra_tensors))

    def get_current_state(self) -> tuple[Any, ...]:
        """(metadata, tensors, what they are): parameters, extra tensors, and the optimizer's state."""
        with torch.no_grad():
            metadata, state = dump(self.opt)
            tensors = [t.detach().cpu().clone() for t in (*self._params(), *self.extra_tensors)]
        meta = {"step": self.local_step, "group_bits": self.get_group_bits(), "optimizer_metadata": metadata}
        return meta, [*tensors, *state], state_infos(self._params(), self.parameter_names, self.extra_tensors, state)

    def load_state_from_peers(self, wait: bool = True, timeout: float | None = None) -> Any:
        """Take over what `get_current_state` of another peer gives; returns it, or None where there is none.

        A step that is on its way is waited for: its mean is of what was there before."""
        if not wait:
            return in_background(lambda: self.load_state_from_peers(timeout=timeout), "load")
        loaded = super().load_state_from_peers(timeout=timeout)
        if loaded is not None:
            metadata, tensors = loaded
            step = metadata.get("step") if isinstance(metadata, dict) else None
            if type(step) is not int:
                raise UsageError(f"{self.prefix}: the other peer gave no state of a TrainingAverager")
            with self.lock_averager_step:
                load(self.opt, metadata.get("optimizer_metadata"), [*self._params(), *self.extra_tensors], tensors)
                self.local_step = max(self.local_step, step)
        return loaded


__all__ = ["TrainingAverager"]
