"""A site's model in parts: FSDP2 (`fully_shard`), where each rank holds one in `size` of parameters and moments.

Layers are put together for their forward and backward pass, one after the other, and gradients are averaged into the
parts: all ranks need gradients of the same parameters. The whole vector exists only on the host of rank 0, and is read
and written tensor by tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from dlc.errors import ConfigError
from dlc.flat import FlatView
from dlc.runspec import RunSpec
from dlc.train.group import Group
from dlc.train.parallel import Replica, dropped_layers


def check_options(spec: RunSpec) -> None:
    """ConfigError: the run has an option that needs whole matrices, or one loss scale, on each rank."""
    if spec.inner.optimizer == "muon":
        raise ConfigError('inner.optimizer "muon" needs whole matrices: start this site with --parallel ddp')
    if spec.precision == "fp16":
        raise ConfigError('precision "fp16" needs the whole gradient on each rank: start this site with --parallel ddp')


def check_layers(model: nn.Module) -> None:
    """ConfigError: each rank would drop other layers at random, and wait for the others in those that they dropped."""
    if named := dropped_layers(model):
        raise ConfigError(
            f"the model drops layers at random ({named}), which FSDP2 cannot do: start this site with --parallel ddp"
        )


class Probe(nn.Module):
    """Its gradient is what it is given."""

    def __init__(self, numel: int, device: torch.device) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(numel, dtype=torch.float32, device=device))

    def forward(self, gradient: float) -> Tensor:
        return self.vector * gradient


def check_mean(mesh: DeviceMesh, group: Group) -> None:
    """ConfigError: what the ranks get for the mean of their gradients is none. FSDP2 of torch 2.7 and 2.8 gives their
    sum over Gloo, and says nothing."""
    probe = Probe(group.size, group.device)
    fully_shard(probe, mesh=mesh)
    probe(group.rank + 1.0).sum().backward()
    gradient = probe.vector.grad
    assert isinstance(gradient, DTensor)
    if not bool(gradient.full_tensor().sub((group.size + 1) / 2).abs().lt(0.01).all()):
        raise ConfigError(
            f"torch {torch.__version__} does not average gradients right where a model is in parts on "
            f"{group.device.type}: update torch, or start this site with --parallel ddp"
        )


class Sharded(Replica):
    """A part of the run's model."""

    parallel = "fsdp"

    def __init__(self, spec: RunSpec, group: Group, model: nn.Module, batch_size: int) -> None:
        self.spec, self.group, self.batch_size = spec, group, batch_size
        check_layers(model)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):  # as DDP does: the hosts' folders may differ
                tensor.copy_(group.give(tensor.detach().contiguous()))
        mesh = init_device_mesh(group.device.type, (group.size,))
        check_mean(mesh, group)
        for layer in layers_of(model):  # which takes each to the device: the whole model may have no room there
            fully_shard(layer, mesh=mesh)
        self.model = self.forward = model
        self._root = fully_shard(model, mesh=mesh)  # the same object
        self.tensors = FlatView.of(self.model).tensors

    def scatter(self, flat: Tensor | None) -> None:
        for tensor, part in self._with_parts(flat):
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.group.device)
            if part is not None:
                whole.copy_(part)
            with torch.no_grad():
                tensor.copy_(distribute_tensor(whole, tensor.device_mesh, tensor.placements))

    def gather(self, out: Tensor | None) -> None:
        for tensor, part in self._with_parts(out):
            whole = tensor.full_tensor().detach()
            if part is not None:
                part.copy_(whole)

    def _with_parts(self, flat: Tensor | None) -> Iterator[tuple[DTensor, Tensor | None]]:
        start = 0
        for tensor in self.tensors:
            assert isinstance(tensor, DTensor)
            yield tensor, None if flat is None else flat[start : start + tensor.numel()].view(tensor.shape)
            start += tensor.numel()

    def evaluate(self, batches: list[Tensor]) -> float:
        try:
            return super().evaluate(batches)
        finally:
            self._root.reshard()  # or the next forward pass would see the parameters of now

    @contextlib.contextmanager
    def meanwhile(self, last: bool) -> Iterator[None]:
        """Each micro-batch is averaged by itself: a sum of whole gradients would take the memory that parts save.

        RuntimeError: gradients of different parameters were averaged. FSDP2 puts those that there are of a layer one
        after the other, and does not look whose they are.
        """
        yield
        if not self.group.agree([tensor.grad is not None for tensor in self.tensors]):
            raise RuntimeError(
                "the processes of this site left different parameters out of a step, as experts do that are modules "
                "of their own, and FSDP2 cannot average that: start the site with --parallel ddp"
            )

    def check_averaged(self) -> None:
        """Done in `meanwhile`."""

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def placed(self, value: Tensor, like: Tensor) -> Tensor:
        if not isinstance(like, DTensor) or not value.dim():
            return super().placed(value, like)
        moved = value.to(self.group.device)
        part = distribute_tensor(moved, like.device_mesh, like.placements, src_data_rank=None)
        return part.clone()  # of some versions of torch it is a view of the whole


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a transformer: what stands in its outermost lists of modules."""
    found: list[nn.Module] = []
    for child in model.children():
        found += list(child) if isinstance(child, nn.ModuleList) else layers_of(child)
    return found
