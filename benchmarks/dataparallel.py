"""Seconds of a data-parallel step on this machine: `strategy = "data-parallel"` beside torch's DDP over Gloo.

    python benchmarks/dataparallel.py
    python benchmarks/dataparallel.py --n 4 --batch 4 --repeats 7 --json

Both train the same Llama on batches of the same sizes with AdamW and clipping, by n processes of one thread each. All
processes live at once, and those of one kind work while the others wait: repetitions are interleaved. A repetition is
`--steps` steps; its figure is the time per step of the slowest process. Printed are the medians, their ratio, and where
the time of ours goes: the gradient, during whose last backward chunks travel already, and the rest of the step. Ours
also has digests compared at every step, elastic membership and leases of the data; Gloo's all-reduce is fp32, ours by
default bf16 (`--codec fp32` for the same).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from _workers import WORKER, Workers, say

from dlc.errors import ConfigError
from dlc.peer import Peer
from dlc.runspec import DataSpec, InnerSpec, ModelSpec, RunSpec
from dlc.train.inner import InnerLoop
from dlc.train.setup import inner_loop_of, model_of

SEQ_LEN = 128
LAYERS = 6
WARM_STEPS = 2
LIMIT_S = 300.0


def spec_of(options: argparse.Namespace) -> RunSpec:
    hidden = options.hidden
    config = {
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": SEQ_LEN,
        "tie_word_embeddings": True,
    }
    return RunSpec(
        run="dataparallel",
        strategy="data-parallel",
        codec=options.codec,
        chunk_elems=options.chunk_elems,
        model=ModelSpec(config=config),
        data=DataSpec(seq_len=SEQ_LEN),
        inner=InnerSpec(batch_size=options.batch, accumulate=options.accumulate),
    )


# ------------------------------------------------------------------ workers


class Gate:
    """Lets a worker do as many steps as it is told to, and tells how long they took."""

    def __init__(self) -> None:
        self._left = 0
        self._since = 0.0

    def pass_step(self, **fields: Any) -> bool:
        """At the end of each step. False: no more are wanted."""
        self._left -= 1
        if self._left > 0:
            return True
        if self._left == 0:
            say("done", seconds=time.perf_counter() - self._since, **fields)
        line = sys.stdin.readline()
        if not line:
            return False
        self._left, self._since = int(line), time.perf_counter()
        return True


def ours(options: argparse.Namespace) -> None:
    """One `Peer` with the trainer of `dlc join`."""
    from dlc.train.trainer import Trainer

    gate, gradient_s = Gate(), [0.0]
    gradient, stop = InnerLoop.gradient, threading.Event()

    def timed(self: InnerLoop, *rest: Any) -> float:
        since = time.perf_counter()
        loss = gradient(self, *rest)
        gradient_s[0] += time.perf_counter() - since
        return loss

    InnerLoop.gradient = timed  # type: ignore[method-assign]

    def take(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == 0:
            say("ready", address=peer.address)
        if event["event"] == "step" and len([m for m in peer.members() if m.alive]) < options.n:
            time.sleep(0.05)
        if (
            event["event"] == "round"
            and len(event["contributors"]) == options.n
            and not gate.pass_step(gradient_s=gradient_s[0], reduce_s=event["reduce_s"])
        ):
            stop.set()

    heard: queue.SimpleQueue[object] = queue.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        spec = spec_of(options) if not options.peers else None
        with Peer.join(options.peers or (), spec=spec, hold=True, on_event=heard.put) as peer:
            if options.peers:
                say("ready", address=peer.address)
            Trainer(
                peer,
                Path(folder),
                device="cpu",
                on_event=take,
                peer_events=heard,
                eval_blocks=1,
                checkpoint_every=0,
                cache=Path(options.cache),
            ).run(stop)


def ddp(options: argparse.Namespace) -> None:
    """One rank of torch's DistributedDataParallel."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from dlc.train.data import open_blocks
    from dlc.train.tokens import load_tokenizer

    os.environ.setdefault("GLOO_SOCKET_IFNAME", {"darwin": "lo0"}.get(sys.platform, "lo"))
    dist.init_process_group("gloo", init_method=f"file://{options.meet}", rank=options.rank, world_size=options.n)
    spec = spec_of(options)
    source = open_blocks(spec, load_tokenizer(spec.data.tokenizer), Path(options.cache))
    model = model_of(spec)
    forward = DistributedDataParallel(model, gradient_as_bucket_view=True)

    class Replica(InnerLoop):
        def _meanwhile(self, last: bool) -> contextlib.AbstractContextManager[Any]:
            """Gradients are averaged with the last micro-batch of a step only."""
            return contextlib.nullcontext() if last else forward.no_sync()

    def make(*rest: Any) -> InnerLoop:
        return Replica(*rest, forward=forward)

    loop = inner_loop_of(spec, model, torch.device("cpu"), make)
    gate, count, step = Gate(), spec.blocks_per_step, 0
    say("ready")
    while gate.pass_step():
        at = (step * options.n + options.rank) * count
        size = spec.inner.batch_size
        loop.train_step([source.batch(range(a, a + size)) for a in range(at, at + count, size)], step)
        step += 1


# ------------------------------------------------------------------ the benchmark


def measure(options: argparse.Namespace) -> dict[str, Any]:
    kinds = {"ddp": [f"ddp-{i}" for i in range(options.n)], "ours": [f"ours-{i}" for i in range(options.n)]}
    shape = [f"--n={options.n}", f"--batch={options.batch}", f"--accumulate={options.accumulate}"]
    shape += [f"--hidden={options.hidden}", f"--codec={options.codec}", f"--chunk-elems={options.chunk_elems}"]
    steps_s: dict[str, list[float]] = {"ddp": [], "ours": []}
    gradients_s: list[float] = []
    with tempfile.TemporaryDirectory() as folder, Workers(__file__) as workers:
        shape.append(f"--cache={folder}")
        for rank, name in enumerate(kinds["ddp"]):
            workers.start(name, *shape, "--kind=ddp", f"--rank={rank}", f"--meet={folder}/meet")
        founder, *others = kinds["ours"]
        workers.start(founder, *shape, "--kind=ours")
        address = workers.wait(founder, "ready", LIMIT_S)["address"]
        for name in others:
            workers.start(name, *shape, "--kind=ours", f"--peers={address}")
        for name in (*kinds["ddp"], *others):
            workers.wait(name, "ready", LIMIT_S)
        before = 0.0
        for repeat in range(-1, options.repeats):
            steps = WARM_STEPS if repeat < 0 else options.steps
            for kind, names in kinds.items():
                for name in names:
                    workers.tell(name, str(steps))
                done = [workers.wait(name, "done", LIMIT_S) for name in names]
                gradient_s = max(event.get("gradient_s", 0.0) for event in done)
                if repeat >= 0:
                    steps_s[kind].append(max(event["seconds"] for event in done) / steps)
                if kind == "ours":
                    if repeat >= 0:
                        gradients_s.append((gradient_s - before) / steps)
                    before = gradient_s
    medians = {kind: statistics.median(values) for kind, values in steps_s.items()}
    return {
        "n": options.n,
        "parameters": sum(p.numel() for p in model_of(spec_of(options)).parameters()),
        "tokens": options.batch * options.accumulate * SEQ_LEN,
        "codec": options.codec,
        "repeats": options.repeats,
        "ddp_s": medians["ddp"],
        "ours_s": medians["ours"],
        "ratio": medians["ours"] / medians["ddp"],
        "gradient_s": statistics.median(gradients_s),
        "all_s": steps_s,
    }


def main() -> int:
    options = _options()
    torch.set_num_threads(1)
    if options.kind:
        {"ours": ours, "ddp": ddp}[options.kind](options)
        return 0
    result = measure(options)
    if options.json:
        print(json.dumps(result))
        return 0
    print(
        f"{result['n']} processes, {result['parameters'] / 1e6:.1f} M parameters, {result['tokens']} tokens each, "
        f"medians of {result['repeats']}\n"
        f"DDP over Gloo     {result['ddp_s']:.3f} s a step\n"
        f"data-parallel     {result['ours_s']:.3f} s a step, {result['codec']}: {result['ratio']:.2f} times; "
        f"{result['gradient_s']:.3f} s of it are the gradient"
    )
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--hidden", type=int, default=368, help="width of the model (default 368: 10 M parameters)")
    parser.add_argument("--batch", type=int, default=8, help="sequences of 128 tokens in a micro-batch (default 8)")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step (default 1)")
    parser.add_argument("--codec", default="bf16", help="of the gradients on the wire (default bf16)")
    parser.add_argument("--chunk-elems", type=int, default=0, help="elements of a chunk; default: as a run has it")
    parser.add_argument("--steps", type=int, default=4, help="steps of one repetition (default 4)")
    parser.add_argument("--repeats", type=int, default=7, help="repetitions (default 7)")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    for hidden in ("--kind", "--peers", "--meet", "--cache"):
        parser.add_argument(hidden, default="", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args([word for word in sys.argv[1:] if word != WORKER])
    try:
        spec_of(options)
    except ConfigError as error:
        parser.error(str(error))
    return options


if __name__ == "__main__":
    sys.exit(main())
