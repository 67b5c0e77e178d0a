"""A peer of several processes, as rank 0 sees it: what `engine` is on one device, on all ranks at once.

    rank 0                                   rank 1 ...
    Trainer ── SiteEngine ── orders ───────> follower.follow
               LeaderLoop    the sequences
               SiteView      the parameters

Rank 0 alone knows the swarm, the data and the outer state. It says before each thing that changes the model what comes
(`group.Order`), and all ranks do it together: an inner step, a fresh optimizer, new parameters after a round.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from dlc.comm import vectors
from dlc.flat import CPU, FlatView, parts_of
from dlc.runspec import RunSpec
from dlc.train.engine import Engine
from dlc.train.flops import Utilisation
from dlc.train.group import Group, Order, send_tensors
from dlc.train.inner import InnerLoop, StepResult
from dlc.train.parallel import Replica, SiteLoop, check_fits, replica_of
from dlc.train.setup import model_of


class SiteEngine(Engine):
    """The run's model on all ranks of `group`. Rank 0 alone makes one; `peer` is the id of the site's peer.

    micro_batch: as in `Engine`, on each rank.

    ConfigError: the model cannot be built, a step of the run cannot be shared evenly, or an option of it does not go
    with `group.parallel`.
    """

    def __init__(self, spec: RunSpec, group: Group, peer: str, micro_batch: int = 0) -> None:
        check_fits(spec, group.size, group.parallel)
        super().__init__(spec, group.device, micro_batch)
        del self.view  # it would keep the whole parameters, which are cut into parts one layer after the other
        with group.together():
            group.tell(Order.RUN)
            told = {"spec": spec.to_dict(), "peer": peer, "parallel": group.parallel, "batch_size": self.batch_size}
            group.text(json.dumps(told))
            group.meet()
            self._replica = replica_of(group.parallel, spec, group, self.model, self.batch_size)
        self._group = group
        self.view: FlatView = SiteView(self._replica)

    def inner_loop(self) -> InnerLoop:
        with self._group.together():
            self._group.tell(Order.LOOP)
            return self._replica.inner_loop(LeaderLoop)

    def evaluate(self, batches: Sequence[Tensor]) -> float:
        if self._group.parallel == "ddp":
            return super().evaluate(batches)  # the others need not know
        with self._group.together():
            self._group.tell(Order.EVALUATE)
            send_tensors(self._group, {str(i): batch for i, batch in enumerate(batches)})
            return self._replica.evaluate(list(batches))

    def whole_model(self) -> nn.Module:
        if self._group.parallel == "ddp":
            return self.model
        whole = model_of(self.spec)
        FlatView.of(whole).scatter(self.view.gather(vectors.empty(self.view.numel)))
        return whole

    def utilisation(self) -> Utilisation:
        one = super().utilisation()
        return dataclasses.replace(one, peak_flops=one.peak_flops * self._group.size if one.peak_flops else None)


class SiteView(FlatView):
    """The parameters of all ranks: they are gathered from rank 0, and scattered to all."""

    def __init__(self, replica: Replica) -> None:
        named = dict(replica.model.named_parameters())
        super().__init__(named.values(), named)
        self._replica = replica

    def gather(self, out: Tensor) -> Tensor:
        group = self._replica.group
        with group.together():
            if group.parallel != "ddp":  # there rank 0 has all of them
                group.tell(Order.GATHER)
            self._replica.gather(out)
        return out

    @property
    def device(self) -> torch.device:
        return CPU

    def parts(self, elems: int, device: torch.device = CPU) -> Iterator[Tensor]:
        whole = self.gather(vectors.empty(self.numel))
        return (part.to(device) for part in parts_of(whole, elems))

    def scatter(self, flat: Tensor) -> None:
        with self._replica.group.together():
            self._replica.group.tell(Order.SCATTER)
            self._replica.scatter(flat)


class LeaderLoop(SiteLoop):
    """The inner loop of rank 0, which takes the others along."""

    def train_step(self, batches: Sequence[Tensor], step: int) -> StepResult:
        rows = torch.cat(list(batches))
        with self._group.together():
            self._group.tell(Order.STEP, step, *rows.shape)
            result = self.shared_step(self._group.give(rows), step)
        return dataclasses.replace(result, tokens=rows.numel())

    def tensors(self) -> dict[str, Tensor]:
        with self._group.together():
            self._group.tell(Order.SAVE)
            return super().tensors()

    def load(self, tensors: dict[str, Tensor]) -> None:
        super().load(tensors)  # which refuses what belongs to another model
        with self._group.together():
            self._group.tell(Order.LOAD)
            send_tensors(self._group, tensors)
