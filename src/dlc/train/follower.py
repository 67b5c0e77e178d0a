"""What the ranks of a site other than 0 do: what they are told, until the end; see `site`.

They know neither the swarm nor the data nor the outer state, and write nothing.
"""

from __future__ import annotations

import json

import torch

from dlc.errors import DlcError
from dlc.runspec import RunSpec
from dlc.train.group import Group, Order, receive_tensors
from dlc.train.parallel import Replica, SiteLoop, replica_of
from dlc.train.rng import seed_peer
from dlc.train.setup import model_of


def follow(group: Group) -> None:
    """Take part in the site's run until rank 0 ends it. SiteLost: a rank has ended without a word."""
    with group.together():
        order, _ = group.hear()
        if order is Order.END:
            return
        told = json.loads(group.text())
        spec = RunSpec.from_dict(told["spec"])
        seed_peer(spec.seed, f"{told['peer']} rank {group.rank}")
        model = model_of(spec)
        group.meet()
        _obey(group, replica_of(told["parallel"], spec, group, model, told["batch_size"]))


def _obey(group: Group, replica: Replica) -> None:
    loop: SiteLoop | None = None
    while True:
        order, numbers = group.hear()
        match order:
            case Order.END:
                return
            case Order.LOOP:
                loop = replica.inner_loop(SiteLoop)
            case Order.SCATTER:
                replica.scatter(None)
            case Order.GATHER:
                replica.gather(None)
            case Order.EVALUATE:
                replica.evaluate([batch for _, batch in receive_tensors(group)])
            case Order.STEP if loop is not None:
                step, n, s = numbers
                loop.shared_step(group.give(torch.empty(n, s, dtype=torch.int64)), step)
            case Order.LOAD if loop is not None:
                loop.take(receive_tensors(group))
            case Order.SAVE if loop is not None:
                loop.tensors()
            case _:
                raise DlcError(f"rank 0 ordered {order.name} too early; all ranks must run one version of dlc")
