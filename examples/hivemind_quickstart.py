"""A program in Hivemind's style, with another import: DHT, Optimizer, and a plain loop.

python examples/hivemind_quickstart.py                                   two peers here, one in a process of its own
python examples/hivemind_quickstart.py --run_key run.key --host /ip4/0.0.0.0/tcp/4600             the first of a run
python examples/hivemind_quickstart.py --run_key run.key --host /ip4/0.0.0.0/tcp/4600 \
    --initial_peers /ip4/FIRST/tcp/4600 --shard 1                                                 the second

Training begins when both are there, or as many as --size says to each of them.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection

import torch
from torch import nn
from torch.nn import functional as F

import dlc.compat.hivemind as hivemind

EPOCHS = 5
JOIN_S = 60.0
LOOK_S = 0.1


def told(dht: hivemind.DHT, what: str) -> set[str]:
    """Who has stored that it has come so far."""
    found = dht.get(what)
    return set(found.value) if found is not None else set()


def tell(dht: hivemind.DHT, what: str) -> None:
    dht.store(what, True, hivemind.get_dht_time() + 3600, subkey=str(dht.peer_id))


def train(dht: hivemind.DHT, shard: int, size: int) -> None:
    """Until five times 256 samples were trained, by all together: so little that they wait for each other first."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    opt = hivemind.Optimizer(
        dht=dht,
        run_id="quickstart",
        target_batch_size=256,
        batch_size_per_step=32,
        params=model.parameters(),
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-2),
        scheduler=lambda opt: torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.9),
        grad_compression=hivemind.Float16Compression(),
        delay_state_averaging=False,
        matchmaking_time=10.0,
        verbose=True,
    )
    opt.load_state_from_peers()
    tell(dht, "ready")
    print(f"training begins when {size} peers are ready", flush=True)
    while len(told(dht, "ready")) < size:
        time.sleep(LOOK_S)
    generator = torch.Generator().manual_seed(shard)
    while opt.local_epoch < EPOCHS:
        x = torch.randn(32, 8, generator=generator)
        F.mse_loss(model(x), x.sin().sum(1, keepdim=True)).backward()
        opt.step()
        opt.zero_grad()
    digest = hashlib.sha256(torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().tobytes())
    sys.stdout.write(f"peer {str(dht.peer_id)[:8]} ends with {digest.hexdigest()[:16]}\n")
    sys.stdout.flush()
    tell(dht, "trained")
    while not dht.swarm.present() <= told(dht, "trained"):  # another may still want this one's state
        time.sleep(LOOK_S)
    opt.shutdown()


def second(pipe: Connection) -> None:
    with hivemind.DHT(initial_peers=pipe.recv(), start=True) as dht:
        pipe.send("joined")
        train(dht, 1, 2)


def two() -> None:
    """A peer in a process of its own, and one in this. The process starts first: a peer does not outlive a fork."""
    torch.set_num_threads(1)  # two processes share this machine
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    here, there = context.Pipe()
    child = context.Process(target=second, args=(there,), daemon=True)
    child.start()
    with hivemind.DHT(start=True) as dht:
        here.send(dht.get_visible_maddrs())
        if not here.poll(JOIN_S):
            sys.exit("the second peer did not join")
        train(dht, 0, 2)
    child.join()
    if child.exitcode:
        sys.exit(f"the second peer ended with exit status {child.exitcode}")


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, epilog=__doc__)
    parser.add_argument("--initial_peers", nargs="*", default=[])
    parser.add_argument("--host", help="where to listen, for a run on several machines")
    parser.add_argument("--run_key", help="file made by `dlc key`")
    parser.add_argument("--shard", type=int, default=0, help="which share of the data is trained")
    parser.add_argument("--size", type=int, default=2, help="peers that training waits for, this one among them")
    args = parser.parse_args()
    if args.host is None:
        two()
        return
    with hivemind.DHT(args.initial_peers, start=True, host_maddrs=[args.host], run_key=args.run_key) as dht:
        print("others join with --initial_peers", *dht.get_visible_maddrs(), flush=True)
        train(dht, args.shard, args.size)


if __name__ == "__main__":
    main()
