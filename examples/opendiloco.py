"""A loop written for OpenDiLoCo: its import changed, and a `dlc.Peer` in place of its DHT."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import _peers
import torch
from torch import Tensor, nn

import dlc
from dlc.compat.opendiloco import DiLoCoOptimizer


def train(peer: dlc.Peer, shard: int) -> Iterable[Tensor]:
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = DiLoCoOptimizer(
        dht=peer,
        run_id="example",
        batch_size=16,
        num_inner_steps=10,
        params=model.parameters(),
        inner_optimizer=partial(torch.optim.AdamW, lr=1e-2),
        outer_optimizer=partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True),
    )
    optimizer.load_state_from_peers()
    generator = torch.Generator().manual_seed(shard)
    while optimizer.local_epoch < 4:
        x = torch.randn(16, 8, generator=generator)
        loss = (model(x) - x.sin().sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if not optimizer.tracker.local_step:
            peers = optimizer.tracker.global_progress.num_peers
            print(f"epoch {optimizer.local_epoch}, {peers} peers: loss {loss.item():.3f}", flush=True)
    return model.parameters()


if __name__ == "__main__":
    _peers.run(train)
