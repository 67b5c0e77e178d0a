"""One rank's part of a site: its model in DDP, its inner loop, and its share of each step.

All ranks make the same step: each takes its part of the step's sequences, the gradients are averaged over the ranks,
and clipping and optimizer see the same values everywhere. So the step is that of one process with all the sequences,
but for the rounding of sums.

The average of the ranks is the mean over all sequences because the loss of rank r's piece is weighted with
size * (sequences of the piece) / (sequences of the step).

DDP averages nothing of a step in which a parameter has no gradient, unless it was told to look for those: then it goes
through the whole graph in each step. So a model is tried first; one that drops layers at random may leave out others
later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dlc.errors import ConfigError
from dlc.flat import FlatView, flatten_tensors, unflatten_into
from dlc.runspec import RunSpec
from dlc.train.group import Group
from dlc.train.inner import InnerLoop, StepResult, autocast_dtype, causal_loss, evaluate, placed
from dlc.train.model import vocab_of
from dlc.train.setup import inner_loop_of

STRATEGIES = ("diloco", "parameter-server")
"""Those that take a site for one peer."""
TRIED = 8
"""Tokens of the first backward pass, which shows whether it reaches all parameters."""


def check_fits(spec: RunSpec, size: int, parallel: str) -> None:
    """ConfigError: the run is none for a site of `size` processes, its steps cannot be shared out evenly among them, or
    not every option goes with `parallel`."""
    if spec.strategy not in STRATEGIES:
        raise ConfigError(
            f'strategy "{spec.strategy}" is for peers of one process each: start every process with its own '
            '`dlc join`, without torchrun, or set strategy = "diloco"'
        )
    if parallel == "fsdp":
        from dlc.train.sharded import check_options

        check_options(spec)
    if spec.fragments > 1:
        raise ConfigError(
            f"fragments = {spec.fragments} cannot go with a site of {size} processes: every round would gather the "
            "whole model from its ranks, for a part of it; found the run with fragments = 1, or join with one process"
        )
    inner = spec.inner
    each = inner.batch_size * inner.accumulate
    if each % size:
        raise ConfigError(
            f"a step of this run has inner.batch_size * inner.accumulate = {each} sequences, which {size} ranks cannot "
            f"share evenly: start the site with a number of ranks (--nproc-per-node times --nnodes) that divides {each}"
        )


def pieces_of(n: int, rank: int, size: int, batch_size: int) -> list[tuple[slice, float]]:
    """Rank `rank`'s micro-batches of a step of n >= 1 sequences: which of them, and their share of the step's mean.

    All ranks get equally many, since they meet in each. At the end of a lease a step may be too short for that: a rank
    with nothing to do in one computes the first sequence with weight 0.
    """
    first, last = n * rank // size, n * (rank + 1) // size
    most = -(-n // size)
    count = -(-most // batch_size)
    cuts = [first + (last - first) * i // count for i in range(count + 1)]
    return [(slice(a, b), (b - a) / n) if b > a else (slice(0, 1), 0.0) for a, b in zip(cuts, cuts[1:], strict=False)]


def dropped_layers(model: nn.Module) -> str:
    """The option by which `model` drops layers at random, as "name = value"; empty: it does not."""
    config = getattr(model, "config", None)
    named = {name: getattr(config, name, None) for name in ("layerdrop", "decoder_layerdrop")}
    return ", ".join(f"{name} = {value}" for name, value in named.items() if value)


class Replica:
    """The run's `model` on this rank, whole, in DDP; `sharded.Sharded` holds a part. Rank 0's parameters and
    buffers count. `batch_size`: sequences that go through it at once.

    Made on all ranks at once, of models of one kind; all but `inner_loop` is a matter of all ranks too.
    """

    parallel = "ddp"

    def __init__(self, spec: RunSpec, group: Group, model: nn.Module, batch_size: int) -> None:
        self.spec, self.group, self.batch_size = spec, group, batch_size
        self.model = model.to(group.device)
        self.tensors = FlatView.of(self.model).tensors
        leaves_out = torch.tensor(float(bool(dropped_layers(model)) or not self._reaches_all()))
        dist.all_reduce(leaves_out)
        self._finds_unused = bool(leaves_out)
        self.forward: nn.Module = DistributedDataParallel(
            self.model,
            device_ids=[group.device] if group.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            find_unused_parameters=self._finds_unused,
        )

    def _reaches_all(self) -> bool:
        """Whether a backward pass of a few tokens makes a gradient for every trainable parameter."""
        device, was_training = self.group.device, self.model.training
        ids = torch.arange(min(TRIED, self.spec.data.seq_len), device=device) % (vocab_of(self.model) or 2)
        dtype = autocast_dtype(self.spec.precision, device)
        self.model.train()
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            with torch.autocast(device.type, dtype, enabled=dtype is not None):
                loss = causal_loss(self.model, ids.unsqueeze(0))
            loss.backward()  # type: ignore[no-untyped-call]
        self.model.train(was_training)
        reaches = all(tensor.grad is not None for tensor in self.tensors)
        self.model.zero_grad()
        return reaches

    def inner_loop(self, kind: type[SiteLoop]) -> SiteLoop:
        """A new one, with a fresh optimizer."""
        loop = inner_loop_of(self.spec, self.model, self.group.device, partial(kind, self))
        assert isinstance(loop, SiteLoop)
        return loop

    def scatter(self, flat: Tensor | None) -> None:
        """All ranks get the parameters; rank 0 alone has them in `flat` (fp32, CPU)."""
        if flat is not None:
            unflatten_into(flat, self.tensors)
        for tensor in self.tensors:
            dist.broadcast(tensor.detach(), 0)

    def gather(self, out: Tensor | None) -> None:
        """Into `out` on rank 0 (fp32, CPU)."""
        if out is not None:
            flatten_tensors(self.tensors, out)

    def evaluate(self, batches: list[Tensor]) -> float:
        """Mean next-token loss in nats per token over all batches, the same on all ranks."""
        return evaluate(self.model, batches, self.group.device)

    def meanwhile(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Around a micro-batch: gradients are averaged with the last one of a step."""
        assert isinstance(self.forward, DistributedDataParallel)
        return contextlib.nullcontext() if last else self.forward.no_sync()

    def check_averaged(self) -> None:
        """After the backward passes of a step. RuntimeError: a gradient is lacking, so that none was averaged."""
        if not self._finds_unused and any(tensor.grad is None for tensor in self.tensors):
            raise RuntimeError(
                "the model left parameters out of a step that it did not leave out of the first one: a site averages "
                "no such gradients; join with one process"
            )

    def whole(self, tensor: Tensor) -> Tensor:
        """A gradient norm, or a tensor of the optimizer's state, as one process would have it."""
        return tensor

    def placed(self, value: Tensor, like: Tensor) -> Tensor:
        """A whole tensor of the optimizer's state as the parameter `like` lies on this rank; no memory is shared."""
        return placed(value, like)


def replica_of(parallel: str, spec: RunSpec, group: Group, model: nn.Module, batch_size: int) -> Replica:
    """`parallel`: "ddp" or "fsdp"."""
    if parallel == "ddp":
        return Replica(spec, group, model, batch_size)
    from dlc.train.sharded import Sharded

    return Sharded(spec, group, model, batch_size)


class SiteLoop(InnerLoop):
    """The inner loop of one rank; the other arguments are `InnerLoop`'s."""

    def __init__(
        self,
        replica: Replica,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Callable[[int], float] | None,
        clip_norm: float,
        device: torch.device,
        precision: str,
        compiled: bool,
    ) -> None:
        super().__init__(model, optimizer, schedule, clip_norm, device, precision, compiled, replica.forward)
        self._replica, self._group = replica, replica.group

    def shared_step(self, rows: Tensor, step: int) -> StepResult:
        """One optimizer step of all ranks on all sequences: int64 [n, s], the same on all ranks."""
        group = self._group
        pieces = pieces_of(len(rows), group.rank, group.size, self._replica.batch_size)
        return self.weighted_step([(rows[which], group.size * share) for which, share in pieces], step)

    def tensors(self) -> dict[str, Tensor]:
        """As `InnerLoop.tensors`, whole; on all ranks at once. Rank 0 alone gets them: a host that holds them once for
        each of its ranks may run out of memory."""
        named: dict[str, Tensor] = {}
        for name, tensor in super().tensors().items():
            whole = self._replica.whole(tensor)
            if self._group.rank == 0:
                named[name] = whole.cpu()
        return named

    def _meanwhile(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        return self._replica.meanwhile(last)

    def _clipped(self) -> Tensor:
        self._replica.check_averaged()
        return self._replica.whole(super()._clipped())

    def _agreed(self, values: Tensor) -> Tensor:
        dist.all_reduce(values)
        return values / self._group.size

    def _placed(self, value: Tensor, like: Tensor) -> Tensor:
        return self._replica.placed(value, like)
