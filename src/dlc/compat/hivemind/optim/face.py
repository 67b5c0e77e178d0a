"""What `Optimizer` shows to programs that know torch's optimizers: groups, state, gradients."""

from __future__ import annotations

from typing import Any

import torch

from dlc.compat.bound import BoundOptimizer
from dlc.compat.hivemind.optim.grad_averager import GradientAverager
from dlc.compat.hivemind.optim.progress_tracker import LocalTrainingProgress, ProgressTracker
from dlc.compat.hivemind.optim.state_averager import TrainingStateAverager
from dlc.errors import UsageError


class Group(dict[str, Any]):
    """A copy of `inside` with other parameters, which passes on to it what options are set."""

    def __init__(self, inside: dict[str, Any], params: list[torch.Tensor]) -> None:
        super().__init__({**inside, "params": params})
        self._inside = inside

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        if name != "params":
            self._inside[name] = value

    def setdefault(self, name: str, default: Any = None) -> Any:
        """As of a dict."""
        if name not in self:
            self[name] = default
        return self[name]

    def update(self, *others: Any, **options: Any) -> None:
        """As of a dict."""
        for name, value in dict(*others, **options).items():
            self[name] = value

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        """A copy of it, or one in a file, is of nobody's options."""
        return dict, (dict(self),)


class TorchFace(BoundOptimizer):
    """Base of `Optimizer`, which makes its parts."""

    run_id: str
    tracker: ProgressTracker
    state_averager: TrainingStateAverager
    grad_averager: GradientAverager | None

    @property
    def local_epoch(self) -> int:
        """Epochs that this peer's parameters have seen."""
        return self.state_averager.local_epoch

    @property
    def local_progress(self) -> LocalTrainingProgress:
        return self.tracker.local_progress

    @property
    def use_local_updates(self) -> bool:
        return self.grad_averager is None

    @property
    def use_gradient_averaging(self) -> bool:
        return self.grad_averager is not None

    @property
    def opt(self) -> torch.optim.Optimizer:
        """The optimizer inside."""
        return self.state_averager.optimizer

    @property
    def _inside(self) -> torch.optim.Optimizer:
        return self.opt

    @property
    def state(self) -> Any:  # type: ignore[override]
        return {**self.opt.state, "local_epoch": self.local_epoch}

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        """The groups of the optimizer inside, with the model's own parameters; an option that is set there counts."""
        parts = self.state_averager.parts
        main = dict(zip(parts.optimized, parts.main, strict=True))  # the optimizer may hold them in an order of its own
        return tuple(Group(group, [main[param] for param in group["params"]]) for group in self.opt.param_groups)

    @property
    def accumulates(self) -> bool:
        """There are gradients in the local sum."""
        return self.grad_averager is not None and self.grad_averager.local_times_accumulated > 0

    def is_alive(self) -> bool:
        return self.state_averager.is_alive()

    def is_synchronized_with_peers(self) -> bool:
        """At the newest epoch, or the one before."""
        return self.local_epoch >= self.tracker.global_epoch - 1

    def __repr__(self) -> str:
        return f"Optimizer(run_id={self.run_id!r}, epoch={self.local_epoch})"

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Forget the gradients of the model. UsageError with reuse_grad_buffers: they are the sums."""
        if self.grad_averager is not None and self.grad_averager.reuse_grad_buffers:
            raise UsageError(
                "with reuse_grad_buffers the gradients are the sums: they are zeroed here, not by the caller"
            )
        self.state_averager.parts.zero_main_gradients(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Of the optimizer inside, and the epoch: that of the model, which is saved beside it."""
        state = self.opt.state_dict()
        state["state"] = {**state["state"], "local_epoch": self.state_averager.epoch_of_model}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave; local sums begin anew."""
        inner = dict(state_dict["state"])
        epoch = int(inner.pop("local_epoch", self.local_epoch))
        self.state_averager.restore({**state_dict, "state": inner}, epoch)
        if self.grad_averager is not None:
            self.grad_averager.reset_accumulated_grads_()
        self.tracker.report_local_progress(self.local_epoch, 0)
        self._number_rounds()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the others would not have it."""
        raise UsageError("give all groups of parameters when the optimizer is made")

    def _number_rounds(self) -> None:
        """The epoch has changed."""
        raise NotImplementedError


__all__ = ["TorchFace"]
