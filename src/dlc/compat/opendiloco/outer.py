"""The outer optimizer as OpenDiLoCo's programs see it: `optimizer.state_averager.optimizer`.

Its state lives in the swarm. Before the first round it can be loaded (a whole swarm that is started again); after that
it can be read, in the form of torch.optim, and not be changed by one peer alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dlc.errors import UsageError
from dlc.flat import flatten_tensors, unflatten_into
from dlc.runspec import OuterSpec

_MOMENTS = {"nesterov": ("momentum_buffer",), "sgd": (), "adam": ("exp_avg", "exp_avg_sq")}
"""torch's names of the moments, by the name of the outer optimizer."""
_ADAM_REFUSED = ("weight_decay", "amsgrad", "maximize")
_SGD_REFUSED = ("weight_decay", "dampening", "maximize")


def spec_of(make: Callable[[Any], torch.optim.Optimizer]) -> OuterSpec:
    """What a callable from parameters to an optimizer amounts to. TypeError: it makes none; UsageError: dlc has not
    that outer step."""
    made = make([torch.zeros(1, requires_grad=True)])
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(f"outer_optimizer must make a torch.optim.Optimizer of parameters, not {type(made).__name__}")
    return spec_of_group(type(made).__name__, made.param_groups[0])


def spec_of_group(kind: str, group: Mapping[str, Any]) -> OuterSpec:
    """The same from the options of one parameter group of a torch optimizer of that class."""
    if kind == "SGD" and not any(group.get(name) for name in _SGD_REFUSED):
        if not group["momentum"]:
            return OuterSpec(optimizer="sgd", lr=float(group["lr"]))
        if group["nesterov"]:
            return OuterSpec(lr=float(group["lr"]), momentum=float(group["momentum"]))
    if kind == "Adam" and not any(group.get(name) for name in _ADAM_REFUSED):
        b1, b2 = group["betas"]
        return OuterSpec(optimizer="adam", lr=float(group["lr"]), betas=(float(b1), float(b2)), eps=float(group["eps"]))
    options = ", ".join(f"{name}={value}" for name, value in group.items() if name != "params" and value)
    raise UsageError(
        f"the outer optimizer {kind}({options}) is not offered: use SGD with nesterov=True, SGD without momentum, or "
        "Adam, without weight decay, dampening, amsgrad and maximize"
    )


class Group(dict[str, Any]):
    """A parameter group that can be read only: one peer alone must not change what all peers do."""

    def __setitem__(self, name: str, value: Any) -> None:
        raise UsageError(
            f"{name} of the outer optimizer is the same on all peers and cannot be set here; for a schedule of the "
            "outer learning rate use dlc.DiLoCo with outer=dlc.OuterSpec(schedule=...)"
        )


class OuterOptimizer:
    """`tensors`: the parameters that are averaged. `read`: round, theta and moments, once there is a swarm's state."""

    def __init__(
        self,
        spec: OuterSpec,
        tensors: Sequence[Tensor],
        read: Callable[[], tuple[int, list[Tensor]] | None],
    ) -> None:
        self.spec = spec
        self.moments: list[Tensor] = []
        """Loaded, for the first round of a new run."""
        self.own: Callable[[tuple[int, list[Tensor]] | None], dict[str, Any]] = lambda held: {}
        """What `state_dict` tells of the peer itself, beside the state that was read."""
        self.when_loaded: Callable[[Mapping[str, Any]], None] = lambda saved: None
        """Called with what `load_state_dict` has taken back."""
        self._tensors, self._read = list(tensors), read

    @property
    def param_groups(self) -> list[Group]:
        """One group, as torch has it."""
        return [Group(self._options(), params=self._tensors)]

    def state_dict(self) -> dict[str, Any]:
        """As of torch.optim: the moments per parameter, by its place; copies, and none before there is a state. Under
        "dlc", where the peer itself stands: outer parameters where the model's are others (4 bytes each), steps."""
        held = self._read()
        t, moments = (0, self.moments) if held is None else (held[0], held[1][1:])
        state: dict[int, dict[str, Any]] = {}
        if t or self.moments:
            flat = [self._split(moment) for moment in moments]
            for place in range(len(self._tensors)):
                named = {n: parts[place] for n, parts in zip(_MOMENTS[self.spec.optimizer], flat, strict=True)}
                state[place] = {"step": torch.tensor(float(t)), **named} if self.spec.optimizer == "adam" else named
        groups = [{**self._options(), "params": list(range(len(self._tensors)))}]
        return {"state": state, "param_groups": groups, "dlc": self.own(held)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave: as in torch with its options, lr among them.

        Of effect only where this peer begins a run, or all that begin it together load the same; where the swarm lives,
        its state counts. UsageError, with nothing changed: it is of another model, of Adam after a round (whose step
        count belongs to a run), or there is a swarm's state already.
        """
        (group,) = saved["param_groups"]
        spec = spec_of_group("Adam" if "betas" in group else "SGD", group)
        if self._read() is not None:
            held = self.state_dict()
            if spec != self.spec or not _equal(saved["state"], held["state"]):
                raise UsageError(
                    "the outer state is the swarm's by now: load one before the first step and before "
                    "load_state_from_peers"
                )
            self.when_loaded(saved)
            return
        state = {place: values for place, values in saved["state"].items() if isinstance(values, Mapping)}
        if state and spec.optimizer == "adam":
            raise UsageError("the state of an outer Adam belongs to its run: use dlc.DiLoCo and its resume=")
        self.moments = [self._join(name, state) for name in _MOMENTS[spec.optimizer]] if state else []
        self.spec = spec
        self.when_loaded(saved)

    def _options(self) -> dict[str, Any]:
        spec = self.spec
        if spec.optimizer == "adam":
            return {"lr": spec.lr, "betas": spec.betas, "eps": spec.eps, "weight_decay": 0.0, "amsgrad": False}
        nesterov = spec.optimizer == "nesterov"
        momentum = spec.momentum if nesterov else 0.0
        return {"lr": spec.lr, "momentum": momentum, "nesterov": nesterov, "dampening": 0.0, "weight_decay": 0.0}

    def _split(self, flat: Tensor) -> list[Tensor]:
        """One vector as tensors of the parameters' shapes."""
        parts = [torch.empty(t.shape, dtype=torch.float32, device="cpu") for t in self._tensors]
        unflatten_into(flat, parts)
        return parts

    def _join(self, name: str, state: Mapping[int, Mapping[str, Any]]) -> Tensor:
        """The moment `name` of all parameters as one vector; UsageError where it does not fit them."""
        moments = [state.get(place, {}).get(name) for place in range(len(self._tensors))]
        whole: list[Tensor] = []
        for place, (moment, tensor) in enumerate(zip(moments, self._tensors, strict=True)):
            if moment is not None and moment.shape != tensor.shape:
                raise UsageError(
                    f"the outer {name} of parameter {place} is {list(moment.shape)}, and the parameter "
                    f"{list(tensor.shape)}: it is of another model"
                )
            whole.append(torch.zeros(tensor.shape, dtype=torch.float32) if moment is None else moment)
        return flatten_tensors(whole)


def _equal(saved: Mapping[Any, Any], held: Mapping[int, Mapping[str, Tensor]]) -> bool:
    numbered = {place: values for place, values in saved.items() if isinstance(values, Mapping)}
    return numbered.keys() == held.keys() and all(
        values.keys() == held[place].keys() and all(torch.equal(values[name], held[place][name]) for name in values)
        for place, values in numbered.items()
    )


def parameters_of(params: Iterable[Any] | None) -> tuple[list[Any], list[torch.nn.Parameter]]:
    """`params` as an optimizer takes them (parameters, or groups of them), and the parameters in order.

    ValueError: there are none.
    """
    given = [_group(item) if isinstance(item, Mapping) else item for item in (params if params is not None else ())]
    flat = [p for item in given for p in (item["params"] if isinstance(item, Mapping) else [item])]
    if not flat:
        raise ValueError("params must be the parameters to train, or groups of them")
    return given, flat


def _group(group: Mapping[str, Any]) -> dict[str, Any]:
    """With its parameters in a list: the optimizer reads them once more."""
    params = group["params"]
    return {**group, "params": [params] if isinstance(params, Tensor) else list(params)}
