"""An optimizer's state as small metadata and a list of tensors, for a peer that loads it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dlc.compat.hivemind.compression import CompressionInfo, TensorRole
from dlc.errors import UsageError
from dlc.flat import identity

INDEX = "__tensor__"
"""Key of what stands in place of a tensor."""
BUFFER = "momentum_buffer"
"""A statistic of SGD."""
BEGINS = {"step": 0.0, "mu_product": 1.0}
"""What is not as it was before the first step, though the gradients were zero: Adam's steps, NAdam's product."""


def initialize(opt: Optimizer, averaged: Sequence[str] = ()) -> None:
    """Make the state that the first step would begin with, so that it can be averaged and given to others.

    What a parameter has already stays. averaged: names of statistics that must be tensors. SGD with momentum *and*
    dampening takes the first gradient whole, by having no buffer yet; a buffer that is averaged begins as zero, and the
    first gradient is dampened, too. UsageError: a step needs a closure, or sparse gradients.
    """
    params = _params(opt)
    new = [param for param in params if param not in opt.state]
    if not new:
        return
    grads, values = [p.grad for p in params], [p.detach().clone() for p in new]
    decays = [(group, group["weight_decay"]) for group in opt.param_groups if "weight_decay" in group]
    for param in params:
        param.grad = None
    for param in new:
        param.grad = torch.zeros_like(param)
    for group, _ in decays:
        group["weight_decay"] = 0.0  # it would be in the statistics
    try:
        opt.step()
    except torch.OutOfMemoryError:
        raise  # another optimizer may not help
    except (TypeError, RuntimeError) as error:
        raise UsageError(
            f"{type(opt).__name__} makes no step without a closure, by dense gradients, as averages are ({error}): "
            "take an optimizer that does, such as Adam or SGD"
        ) from error
    finally:
        for group, decay in decays:
            group["weight_decay"] = decay
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        with torch.no_grad():
            for param, value in zip(new, values, strict=True):
                param.copy_(value)
    made = set(new)
    for group in opt.param_groups:
        begins = {**BEGINS, "eta": float(group.get("lr", 0.0))}  # of ASGD
        for state in (opt.state[param] for param in group["params"] if param in made and param in opt.state):
            for name in begins.keys() & state.keys():
                value, begin = state[name], begins[name]
                state[name] = torch.full_like(value, begin) if isinstance(value, Tensor) else type(value)(begin)
            if group.get("dampening") and BUFFER in state and BUFFER not in averaged:
                state[BUFFER] = None


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

    UsageError, with nothing changed: they, or statistics, have other shapes, or are of another optimizer.
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

    own = opt.state, opt.param_groups
    try:
        opt.load_state_dict(full(metadata))
        _check_same(opt, *own)
    except (AttributeError, KeyError, IndexError, ValueError, TypeError) as error:
        opt.state, opt.param_groups = own  # torch checks next to nothing before it sets them
        raise UsageError(f"the state of the other peer does not fit this optimizer: {error}") from error
    with torch.no_grad():
        for tensor, value in zip(mine, values, strict=True):
            tensor.copy_(value)


def _check_same(opt: Optimizer, state: Mapping[Tensor, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """ValueError where what was loaded is no state of such an optimizer: options are missing that it had itself before,
    in `groups`, or statistics have not the shapes that they had in `state`."""
    for before, group in zip(groups, opt.param_groups, strict=True):
        if missing := opt.defaults.keys() & before.keys() - group.keys():  # others are a schedule's
            raise ValueError(f"it has no {min(missing)}")
    for param, mine in state.items():
        theirs = opt.state.get(param)
        if not (isinstance(mine, dict) and isinstance(theirs, dict)):
            continue
        for name in mine.keys() & theirs.keys():
            here, there = mine[name], theirs[name]
            if isinstance(here, Tensor) and isinstance(there, Tensor) and here.shape != there.shape:
                raise ValueError(f"its {name} is {list(there.shape)}, and here {list(here.shape)}")


def state_infos(
    params: Sequence[Tensor], names: Sequence[Any], extra: Sequence[Tensor], statistics: Sequence[Tensor]
) -> list[CompressionInfo]:
    """Of the tensors of a state, by which their compression is chosen."""
    named = zip(params, names, strict=True)
    return [
        *(CompressionInfo.from_tensor(param, name, TensorRole.PARAMETER) for param, name in named),
        *(CompressionInfo.from_tensor(tensor, i) for i, tensor in enumerate(extra)),
        *(CompressionInfo.from_tensor(tensor, i, TensorRole.OPTIMIZER) for i, tensor in enumerate(statistics)),
    ]


def check_real(tensors: Iterable[Tensor]) -> None:
    """UsageError where one is complex: they are averaged as fp32, which has no imaginary part."""
    for tensor in tensors:
        if tensor.is_complex():
            raise UsageError(
                f"a tensor of {tensor.dtype} cannot be averaged: give torch.view_as_real of it, or let the model hold "
                "its real and imaginary parts"
            )


def check_averaged(tensors: Iterable[Tensor]) -> None:
    """As `check_real`. UsageError also where one stands among them twice: what it is to become would be added to it
    twice."""
    many = list(tensors)
    check_real(many)
    seen = [identity(tensor) for tensor in many]
    if len(set(seen)) != len(seen):
        raise UsageError("a tensor is to be averaged twice: give each of extra_tensors once, and no parameter")


def statistics_of(opt: Optimizer, params: Sequence[Tensor], names: Iterable[str]) -> Iterator[Tensor]:
    """Those of these names, of each parameter. UsageError: a parameter has no tensor of that name."""
    for name in names:
        for param in params:
            own = opt.state.get(param, {})
            if not isinstance(value := own.get(name), Tensor):
                known = ", ".join(str(key) for key, one in own.items() if isinstance(one, Tensor)) or "none"
                raise UsageError(
                    f"average_opt_statistics names {name!r}, which {type(opt).__name__} keeps as no tensor; it has: "
                    f"{known}"
                )
            yield value


def _params(opt: Optimizer) -> list[Tensor]:
    return [param for group in opt.param_groups for param in group["params"]]


__all__ = ["check_averaged", "check_real", "dump", "initialize", "load", "state_infos", "statistics_of"]
