"""OpenDiLoCo's optimizer over `dlc.DiLoCo`: for programs that import `open_diloco.hivemind_diloco`.

    from dlc.compat.opendiloco import DHT, AllReduceStrategy, DiLoCoOptimizer

    optimizer = DiLoCoOptimizer(
        dht=DHT(initial_peers=["/ip4/203.0.113.7/tcp/4600"], start=True),
        run_id="llama",
        batch_size=512,
        num_inner_steps=500,
        params=model.parameters(),
        inner_optimizer=partial(torch.optim.AdamW, lr=4e-4),
        outer_optimizer=partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True),
    )

`dht` may be a `dlc.Peer`, or whatever holds one as `.peer`. A round is one exchange: the pseudo-gradients are averaged,
and all peers take the same outer step on the same bits, so there is no second one that averages the states. What
differs from OpenDiLoCo, and why, stands in docs/migration-opendiloco.md.
"""

from dlc.compat.opendiloco.dht import DHT
from dlc.compat.opendiloco.grad_averager import DiLoCoGradAverager
from dlc.compat.opendiloco.optimizer import DiLoCoOptimizer
from dlc.compat.opendiloco.strategy import AllReduceStrategy
from dlc.compat.opendiloco.tracker import DiloCoProgressTracker

__all__ = ["DHT", "AllReduceStrategy", "DiLoCoGradAverager", "DiLoCoOptimizer", "DiloCoProgressTracker"]
