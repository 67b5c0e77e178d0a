"""An optimizer's state as small metadata and a list of tensors, for a peer that loads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dlc.errors import UsageError

INDEX = "__tensor__"
"""Key of what stands in place of a tensor."""


def initialize(opt: Optimizer) -> None:
    """Make the state that the first step would make: a step with gradients of zero, whose other effects are undone."""
    params = _params(opt)
    grads, values = [p.grad for p in params], [p.detach().clone() for p in params]
    for param in params:
        param.grad = torch.zeros_like(param)
    opt.step()
    with torch.no_grad():
        for param, grad, value in zip(params, grads, values, strict=True):
            param.grad = grad
            param.copy_(value)  # weight decay has moved it
    for state in opt.state.values():
        for name, value in state.items():
            if name == "step":  # of Adam: the steps to come count, this one does not
                state[name] = torch.zeros_like(value) if isinstance(value, Tensor) else type(value)(0)


def dump(opt: Optimizer) -> tuple[Any, list[Tensor]]:
    """(metadata that msgpack takes, tensors on the CPU, copied)."""
    tensors: list[Tensor] = []

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value.detach().cpu().clone())
            return {INDEX: len(tensors) - 1}
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(plain(item) for item in value)
        return value

    return plain(opt.state_dict()), tensors


def load(opt: Optimizer, metadata: Any, mine: Sequence[Tensor], loaded: Sequence[Tensor]) -> None:
    """Take over: `loaded` are the values of `mine` (parameters and others), then the tensors of `dump`.

    UsageError, with nothing changed: they have other shapes, or are of another optimizer.
    """
    values, state = loaded[: len(mine)], loaded[len(mine) :]
    if [v.shape for v in values] != [m.shape for m in mine]:
        raise UsageError("the state of the other peer has tensors of other shapes: is it the same model?")

    def full(value: Any) -> Any:
        if isinstance(value, dict):
            return state[value[INDEX]] if INDEX in value else {key: full(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(full(item) for item in value)
        return value

    try:
        opt.load_state_dict(full(metadata))
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise UsageError(f"the state of the other peer does not fit this optimizer: {error}") from error
    with torch.no_grad():
        for tensor, value in zip(mine, values, strict=True):
            tensor.copy_(value)


def _params(opt: Optimizer) -> list[Tensor]:
    return [param for group in opt.param_groups for param in group["params"]]


__all__ = ["dump", "initialize", "load"]
