"""Muon for the hidden matrices of a model, AdamW for the rest, as one optimizer (MuLoCo, arXiv:2505.23725).

Muon (torch.optim.Muon) moves a matrix along its orthogonalised momentum. That is meant for matrices that map one hidden
space to another; embeddings, the output head, vectors and scalars are AdamW's. Muon's steps are scaled to the size of
AdamW's (`match_rms_adamw`, arXiv:2502.16982, section 2.2), so that one learning rate and weight decay serve both.

The experts of a mixture are matrices, too, but transformers keeps those of a layer stacked in one parameter, which
torch.optim.Muon does not take, or would take for one matrix: `StackedMuon` moves each of them for itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dlc.errors import ConfigError

EXPERTS = "Experts"
"""How the classes of transformers end that stack a layer's experts along the first dimension of their parameters."""
IN_ROWS = "DbrxExpertGLU"
"""The one that puts the matrices of its `moe_num_experts` experts below each other, in 2-D parameters."""
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the iteration; they, its steps and the least norm are those of torch.optim.Muon."""
NEWTON_SCHULZ_STEPS = 5
NORM_MIN = 1e-7
ELEMENTS_AT_ONCE = 1 << 26
"""Of a stack, at most, but for a larger matrix: bounds what its step takes of memory."""


class Joint(torch.optim.Optimizer):
    """Several optimizers of different parameters as one: their groups in order, with one state."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = list(parts)
        self._sizes = [len(part.param_groups) for part in self._parts]
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # a loss is nobody's business here
        """One step of each part; `closure` must be None."""
        if closure is not None:
            raise ValueError("a joint optimizer takes no closure")
        for part in self._parts:
            part.step()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called by `load_state_dict` too, which replaces groups and state."""
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """The parts work on our groups and our state."""
        first = 0
        for part, size in zip(self._parts, self._sizes, strict=True):
            part.param_groups = self.param_groups[first : first + size]
            part.state = self.state
            first += size


class StackedMuon(torch.optim.Optimizer):
    """What torch.optim.Muon, with `match_rms_adamw`, does with each of n matrices, for parameters [n, a, b]; in a group
    whose `matrices` is n, for parameters [n * a, b]."""

    def __init__(self, params: Iterable[Any], *, lr: float, weight_decay: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "matrices": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as in `Joint`
        """One step; `closure` must be None."""
        if closure is not None:
            raise ValueError("a stacked optimizer takes no closure")
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if "momentum_buffer" not in state:
                        state["momentum_buffer"] = torch.zeros_like(p.grad)
                    self._move(p, p.grad, state["momentum_buffer"], group)

    def _move(self, p: Tensor, grad: Tensor, buffer: Tensor, group: dict[str, Any]) -> None:
        lr, momentum = group["lr"], group["momentum"]
        n = group.get("matrices", 0)  # a state of before has none
        shape = (n, -1, p.shape[-1]) if n else p.shape
        stacks = [x.view(shape) for x in (p, grad, buffer)]
        a, b = stacks[0].shape[1:]
        count = max(1, ELEMENTS_AT_ONCE // (a * b))
        for theta, g, m in zip(*(torch.split(x, count) for x in stacks), strict=True):
            m.lerp_(g, 1 - momentum)
            update = orthogonal(g.lerp(m, momentum))
            theta.mul_(1 - lr * group["weight_decay"])
            theta.add_(update, alpha=-0.2 * math.sqrt(max(a, b)) * lr)


def orthogonal(matrices: Tensor) -> Tensor:
    """The orthogonal factor of each of [n, a, b], about, in bf16: singular values of 0.7 to 1.2, by Newton-Schulz
    iterations x = (p + q g + r g^2) x with g = x x^T. Zero stays zero."""
    p, q, r = NEWTON_SCHULZ
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=NORM_MIN)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=q, alpha=r), x, beta=p)
    return x.mT if tall else x


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Trainable 2-D parameters but for embeddings, the output head, and what is stacked of experts.

    The head is known by `get_output_embeddings` of transformers models; in a module without it, it counts as hidden.
    """
    outer = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    if head is not None:
        outer |= {id(parameter) for parameter in head.parameters()}
    rows = (p for params in matrices_in_rows(model).values() for p in params)
    outer |= {id(parameter) for parameter in (*parameters_of_stacked_experts(model), *rows)}
    return [p for p in model.parameters() if p.requires_grad and p.dim() == 2 and id(p) not in outer]


def stacked_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Trainable 3-D parameters of experts, one matrix of each after the other; other 3-D parameters, such as those of
    convolutions, are none."""
    return [p for p in parameters_of_stacked_experts(model) if p.requires_grad and p.dim() == 3]


def matrices_in_rows(model: nn.Module) -> dict[int, list[nn.Parameter]]:
    """By n: trainable parameters [n * a, b] of n experts, the matrices [a, b] of which are below each other."""
    found: dict[int, list[nn.Parameter]] = {}
    for module in model.modules():
        if type(module).__name__ == IN_ROWS:
            trained = [p for p in module.parameters(recurse=False) if p.requires_grad]
            found.setdefault(int(module.moe_num_experts), []).extend(trained)  # type: ignore[arg-type]
    return {n: params for n, params in found.items() if params}


def parameters_of_stacked_experts(model: nn.Module) -> list[nn.Parameter]:
    """Matrices and biases."""
    experts = (module for module in model.modules() if type(module).__name__.endswith(EXPERTS))
    return [p for module in experts for p in module.parameters(recurse=False)]


def muon_and_adamw(
    model: nn.Module,
    groups: Sequence[dict[str, Any]],
    *,
    lr: float,
    betas: tuple[float, float],
    momentum: float,
    weight_decay: float,
    fused: bool,
) -> Joint:
    """`groups`: AdamW's parameter groups of the whole model, from which the hidden matrices are taken out."""
    hidden, stacked, rows = hidden_matrices(model), stacked_matrices(model), matrices_in_rows(model)
    experts: list[dict[str, Any]] = [{"params": stacked}] if stacked else []
    experts += [{"params": params, "matrices": n} for n, params in rows.items()]
    if not hidden and not experts:
        raise ConfigError('the model has no hidden matrices for inner.optimizer "muon": choose "adamw"')
    if hidden and not hasattr(torch.optim, "Muon"):
        raise ConfigError(
            f'inner.optimizer "muon" needs torch 2.9 or newer, and this is {torch.__version__}: update torch, or '
            'choose "adamw"'
        )
    taken = {id(p) for p in (*hidden, *(p for group in experts for p in group["params"]))}
    rest = [{**group, "params": [p for p in group["params"] if id(p) not in taken]} for group in groups]
    rest = [group for group in rest if group["params"]]
    parts: list[torch.optim.Optimizer] = []
    if hidden:
        parts.append(
            torch.optim.Muon(
                hidden, lr=lr, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn="match_rms_adamw"
            )
        )
    if experts:
        parts.append(StackedMuon(experts, lr=lr, weight_decay=weight_decay, momentum=momentum))
    if rest:
        parts.append(torch.optim.AdamW(rest, lr=lr, betas=betas, fused=fused or None))
    return Joint(parts)
