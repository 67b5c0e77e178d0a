"""A strategy of one's own: local steps, an outer step by Lion (arXiv:2302.06675), the buffers of one peer for all."""

from __future__ import annotations

from collections.abc import Iterable

import _peers
import torch
from torch import Tensor, nn

import dlc

LR, BETA1, BETA2 = 0.01, 0.9, 0.99


def train(peer: dlc.Peer, shard: int) -> Iterable[Tensor]:
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 1))
    source = min(member.id for member in peer.members() if member.alive)  # the same one on all peers
    peer.broadcast_state(model.state_dict(), source)  # all begin at one point
    params = list(model.parameters())
    theta = [p.detach().clone() for p in params]
    momentum = [torch.zeros_like(p) for p in theta]
    generator = torch.Generator().manual_seed(shard)
    for _ in range(4):
        inner = torch.optim.AdamW(params, lr=1e-2)
        for _ in range(10):
            x = torch.randn(16, 8, generator=generator)
            inner.zero_grad()
            loss = (model(x) - x.sin().sum(1, keepdim=True)).square().mean()
            loss.backward()
            inner.step()
        means = [kept - p.detach() for kept, p in zip(theta, params, strict=True)]
        report = peer.all_reduce(means, name="difference", codec="fp32")
        print(f"loss {loss.item():.3f}; {report.summary()}", flush=True)
        # Whoever is late for a round, or joins in the middle, would need theta and momentum of another by
        # broadcast_state; dlc.DiLoCo sees to that by itself.
        with torch.no_grad():
            for kept, p, m, mean in zip(theta, params, momentum, means, strict=True):
                kept -= LR * (BETA1 * m + (1 - BETA1) * mean).sign()
                m.mul_(BETA2).add_((1 - BETA2) * mean)
                p.copy_(kept)
    peer.broadcast_state(dict(model.named_buffers()), source)  # what training changed, and no mean would fit
    return model.state_dict().values()


if __name__ == "__main__":
    _peers.run(train)
