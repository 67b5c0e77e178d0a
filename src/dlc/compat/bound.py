"""Base of optimizers that step another one: torch's programs take them for optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from dlc.errors import UsageError
from dlc.handles import Unpicklable


class BoundOptimizer(Unpicklable, torch.optim.Optimizer):
    """torch's own `__init__` is not called: state, groups and hooks are those of the optimizer inside."""

    @property
    def _inside(self) -> torch.optim.Optimizer:
        raise NotImplementedError

    def __reduce_ex__(self, protocol: object) -> Any:
        """As `Unpicklable`; torch's own would begin to copy, and change this class in doing so."""
        return self.__reduce__()

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Those of the optimizer inside."""
        return self._inside.defaults

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Called before each step of the optimizer inside, with that one."""
        return self._inside.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Called after each step of the optimizer inside, with that one."""
        return self._inside.register_step_post_hook(hook)

    def _refused(self, hook: Callable[..., Any], prepend: bool = False) -> RemovableHandle:
        """UsageError."""
        raise UsageError(f"a {type(self).__name__} has no hooks of its state: change what state_dict() gives")

    register_state_dict_pre_hook = register_state_dict_post_hook = _refused
    register_load_state_dict_pre_hook = register_load_state_dict_post_hook = _refused
