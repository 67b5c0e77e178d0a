"""`Optimizer` against a reference in float64: whichever gradients it has averaged, it makes torch's steps with them.

What each peer has added up for an epoch is noted as it is handed to the average, in all modes: delayed steps and
averages, offloaded or not, gradients summed in `.grad`, a client among the peers, batches of another size on each. The
parameters are those of SGD with momentum, weight decay and a schedule on the mean over all samples.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dlc.compat.hivemind import Optimizer
from dlc.compat.hivemind.optim.grad_averager import GradientAverager
from tests.compat.fake_swarm import Town
from tests.compat.test_optimizer import WAIT_S, batches, dht, model, together, weights

EPOCHS, TARGET = 4, 24
SIZES = (2, 4, 6)
LR, MOMENTUM, DECAY, GAMMA = 0.05, 0.9, 0.1, 0.7
Vector = npt.NDArray[np.float64]


class Noted:
    """Of each averager and epoch: the gradients, and of how many samples each is the mean."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of: dict[tuple[int, int], list[tuple[Vector, int]]] = {}
        self._now: dict[int, list[tuple[Vector, int]]] = {}
        accumulate, load, reset = (
            GradientAverager.accumulate_grads_,
            GradientAverager.load_accumulators_into_averager_,
            GradientAverager.reset_accumulated_grads_,
        )

        def noting_accumulate(averager: GradientAverager, batch_size: int) -> None:
            noted = self._now.setdefault(id(averager), [])
            g = flat([p.grad for p in averager.parameters])
            if averager.reuse_grad_buffers:  # what is there are the sums
                g = g - sum(before for before, _ in noted)
            noted.append((g, batch_size))
            accumulate(averager, batch_size)

        def noting_load(averager: GradientAverager) -> None:
            self.of[id(averager), averager.next_round] = list(self._now[id(averager)])
            load(averager)

        def noting_reset(averager: GradientAverager) -> None:
            self._now[id(averager)] = []
            reset(averager)

        monkeypatch.setattr(GradientAverager, "accumulate_grads_", noting_accumulate)
        monkeypatch.setattr(GradientAverager, "load_accumulators_into_averager_", noting_load)
        monkeypatch.setattr(GradientAverager, "reset_accumulated_grads_", noting_reset)


def flat(tensors: list[Tensor | None]) -> Vector:
    values: Vector = torch.cat([t.detach().flatten() for t in tensors if t is not None]).double().numpy()
    return values


def optimizers(nets: list[torch.nn.Linear], client: bool, **options: Any) -> list[Optimizer]:
    """Of peers that are known to train before the first epoch ends."""
    town, sgd = Town(), partial(torch.optim.SGD, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    made = [
        Optimizer(
            dht=dht(town),
            run_id="run",
            target_batch_size=TARGET,
            params=net.parameters(),
            optimizer=sgd,
            matchmaking_time=WAIT_S,
            batch_size_per_step=size,
            client_mode=client and i == len(nets) - 1,
            **options,
        )
        for i, (net, size) in enumerate(zip(nets, SIZES, strict=False))
    ]
    for opt in made:
        opt.tracker.report_local_progress(0, 1)
    return made


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    ("offload", "delay_step", "delay_grad", "reuse", "every"),
    [
        (False, False, False, False, 1),
        (False, False, False, True, 1000),
        (True, False, False, False, 1),
        (True, True, False, False, 1000),
        (True, True, True, False, 1),
        (True, True, True, True, 1000),
    ],
)
def test_steps_are_torchs_on_the_mean_over_all_samples(
    n: int, offload: bool, delay_step: bool, delay_grad: bool, reuse: bool, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted, nets = Noted(monkeypatch), [model() for _ in range(n)]
    theta = weights(nets[0]).double().numpy()
    opts = optimizers(
        nets,
        client=n > 1,
        scheduler=partial(torch.optim.lr_scheduler.StepLR, gamma=GAMMA, step_size=2),
        offload_optimizer=offload,
        delay_optimizer_step=delay_step,
        delay_grad_averaging=delay_grad,
        reuse_grad_buffers=reuse,
        average_state_every=every,
    )

    def train(i: int) -> None:
        data = iter(batches(i, 1000, SIZES[i]))
        while opts[i].local_epoch < EPOCHS:
            x, y = next(data)
            F.mse_loss(nets[i](x), y).backward()
            opts[i].step()
            if not reuse:
                opts[i].zero_grad()
        opts[i].state_averager.step(wait_for_delayed_updates=True)

    together(train, n)
    m = np.zeros_like(theta)
    for epoch in range(EPOCHS):
        given = [part for opt in opts for part in noted.of[id(opt.grad_averager), epoch]]
        mean = sum(g * size for g, size in given) / sum(size for _, size in given)
        m = MOMENTUM * m + mean + DECAY * theta
        theta = theta - LR * GAMMA ** (epoch // 2) * m
    for net in nets:
        np.testing.assert_allclose(weights(net).double().numpy(), theta, rtol=0, atol=2e-6)
    for opt in opts:
        opt.shutdown()
