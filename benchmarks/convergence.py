"""What do fewer exchanges, smaller payloads, late means and more peers cost in loss? At equal tokens per worker.

    python benchmarks/convergence.py --state convergence.json --plot convergence.png

Arms: one worker; one that takes the batches of four (what data parallel training would reach); then 4 workers with
H = 50 and fp16 on the wire, and one factor at a time from there. Every worker makes the same number of inner steps, on
blocks of its own, through `dlc.DiLoCo`; the rounds go through the codec, reducer and outer step of real peers (see
`_virtual`). A late mean is as late as its arm allows.

Printed: validation loss of the swarm's model in nats per byte, mean over the seeds and its standard error; and the
difference to 4 workers, H = 50, fp16, seed by seed, with the standard error of that. A difference is called one only
beyond two of them.

Each run (arm and seed) is saved in the state file when it is done: an interrupted benchmark goes on from there. With
`--start N` all arms go on from a model that one worker has trained for N steps, as in DiLoCo's paper; the schedule of
the learning rate is one over both parts.
`--arms` takes names or groups. `why` and `noise` ask what the outer step should be in a training as short as this one,
and with less noise in the gradients; `lr` whether the inner learning rate is to blame; `drift` what is
left of the distance to the larger batch where workers are averaged after every step; `later` waits as long as it can;
`topk` is for comparison with plain averaging, as its outer step is that one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from _virtual import Swarm, VirtualPeer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dlc.comm.state import State
from dlc.flat import FlatView
from dlc.runspec import EMBEDDED_LLAMA, DataSpec, InnerSpec, ModelSpec, OuterSpec, RunSpec
from dlc.train.data import BlockSource
from dlc.train.diloco import DiLoCo
from dlc.train.inner import InnerLoop, evaluate
from dlc.train.setup import inner_loop_of, model_of

HIDDEN, LAYERS, SEQ_LEN, BATCH = 64, 2, 64, 4
CURVE_POINTS = 12
CURVE_BLOCKS, FINAL_BLOCKS = 128, 1024
"""Validation blocks at a point of the curve, and at the end."""
SURE = 2.0
"""Standard errors beyond which a difference is called one."""


@dataclasses.dataclass(frozen=True)
class Arm:
    name: str
    group: str
    workers: int = 4
    """0: no outer step; one worker trains on its own."""
    batches: int = 1
    """Batches of a worker in one inner step."""
    h: int = 50
    lr: float = 1.0
    """Times the inner learning rate."""
    outer: OuterSpec = OuterSpec(momentum=0.5)
    """A training of a few dozen rounds is too short for a momentum of .9: see the groups `why` and `noise`."""
    options: tuple[tuple[str, Any], ...] = ()
    """Of `dlc.DiLoCo`."""


REFERENCE = "4 workers, H 50, fp16"
AVERAGE = OuterSpec(lr=1.0, momentum=0.0)
FASTER = OuterSpec(lr=2.0, momentum=0.0)
"""What four workers average has half the noise of one, and might go twice as far. It must not: see README.md."""
LATE = (("overlap", "delayed"), ("overlap_steps", 10))
EAGER = (("overlap", "eager"), ("overlap_steps", 10))
ARMS = (
    Arm("1 worker", "base", workers=0),
    Arm("batch x4", "base", workers=0, batches=4),
    Arm(REFERENCE, "base"),
    Arm("int8", "codec", options=(("codec", "int8"),)),
    Arm("int4", "codec", options=(("codec", "int4"),)),
    Arm("delayed by 10 steps", "late", options=LATE),
    Arm("eager, 10 steps", "late", options=EAGER),
    Arm("2 fragments", "streaming", options=(("fragments", 2),)),
    Arm("2 fragments, 10 steps, mixing .5", "streaming", options=(*LATE, ("fragments", 2), ("mixing", 0.5))),
    Arm("2 fragments, eager, 10 steps", "streaming", options=(*EAGER, ("fragments", 2))),
    Arm("H 10", "h", h=10),
    Arm("H 200", "h", h=200),
    Arm("2 workers", "workers", workers=2),
    Arm("8 workers", "workers", workers=8),
    Arm("delayed by 50 steps", "later", options=(("overlap", "delayed"),)),
    Arm("eager, 50 steps", "later", options=(("overlap", "eager"),)),
    Arm("momentum .9", "why", outer=OuterSpec()),
    Arm("plain averaging", "why", outer=AVERAGE),
    Arm("topk, plain averaging", "topk", outer=AVERAGE, options=(("codec", "topk"),)),
    Arm("H 10, topk, plain averaging", "topk", h=10, outer=AVERAGE, options=(("codec", "topk"),)),
    Arm("lr 2, no momentum", "why", outer=FASTER),
    Arm("H 10, lr 2, no momentum", "why", h=10, outer=FASTER),
    Arm("lr .35, momentum .9", "why", outer=OuterSpec(lr=0.35)),
    Arm("H 10, momentum .9", "why", h=10, outer=OuterSpec()),
    Arm("H 10, plain averaging", "why", h=10, outer=AVERAGE),
    Arm("batch x16", "noise", workers=0, batches=16),
    Arm("4 workers of batch x4", "noise", batches=4),
    Arm("4 workers of batch x4, delayed by 10 steps", "noise", batches=4, options=LATE),
    Arm("4 workers of batch x4, momentum .9", "noise", batches=4, outer=OuterSpec()),
    Arm("4 workers of batch x4, plain averaging", "noise", batches=4, outer=AVERAGE),
    Arm("H 1, plain averaging", "drift", h=1, outer=AVERAGE),
    Arm("H 1, plain averaging, inner lr x2", "drift", h=1, outer=AVERAGE, lr=2.0),
    Arm("H 10, plain averaging, inner lr x2", "drift", h=10, outer=AVERAGE, lr=2.0),
    Arm("4 workers, inner lr x2", "drift", lr=2.0),
    Arm("1 worker, inner lr x2", "lr", workers=0, lr=2.0),
    Arm("batch x4, inner lr x2", "lr", workers=0, batches=4, lr=2.0),
    Arm("4 workers, momentum .9, inner lr x2", "lr", lr=2.0, outer=OuterSpec()),
    Arm("1 worker, inner lr x1/2", "lr", workers=0, lr=0.5),
    Arm("batch x4, inner lr x1/2", "lr", workers=0, batches=4, lr=0.5),
    Arm("4 workers, momentum .9, inner lr x1/2", "lr", lr=0.5, outer=OuterSpec()),
)
DEFAULT_GROUPS = ("base", "codec", "late", "streaming", "h", "workers")


class Bench:
    """The runs of one state file; all have the same steps, model and data."""

    def __init__(self, steps: int, inner_lr: float, path: Path | None, start: int = 0) -> None:
        self.steps, self.inner_lr, self.start, self._path = steps, inner_lr, start, path
        sizes = [HIDDEN, LAYERS, SEQ_LEN, BATCH]
        settings = {"start": start, "steps": steps, "inner_lr": inner_lr, "sizes": sizes}
        self.runs: dict[str, dict[str, Any]] = {}
        self._file = {"settings": settings, "runs": self.runs}
        self._sources: dict[int, BlockSource] = {}
        self._starts: dict[int, Tensor] = {}
        if path is not None and path.exists():
            found = json.loads(path.read_text())
            if found["settings"] != settings:
                raise SystemExit(f"{path} is of a benchmark with {found['settings']}, not {settings}: name another one")
            self.runs.update(found["runs"])

    def spec(self, arm: Arm, seed: int) -> RunSpec:
        config = {**EMBEDDED_LLAMA, "hidden_size": HIDDEN, "intermediate_size": 176, "num_hidden_layers": LAYERS}
        return RunSpec(
            sync_every=arm.h,
            seed=seed,
            model=ModelSpec(config=config),
            data=DataSpec(seq_len=SEQ_LEN),
            inner=InnerSpec(
                lr=self.inner_lr * arm.lr,
                batch_size=BATCH * arm.batches,
                warmup_steps=50,
                total_steps=self.start + self.steps,
            ),
        )

    def run(self, arm: Arm, seed: int) -> dict[str, Any]:
        """Train it, or say what is known of it."""
        key = f"{arm.name}|{seed}"
        if key not in self.runs:
            began = time.perf_counter()
            self.runs[key] = {**_Run(self, arm, seed).go(), "seconds": time.perf_counter() - began}
            self._save()
        return self.runs[key]

    def trained(self, seed: int) -> Tensor | None:
        """The parameters from which all arms of this seed go on: fp32, one vector. None: they begin anew.

        Trained by one worker with its own batches, and kept in a file beside the state file.
        """
        if not self.start or seed in self._starts:
            return self._starts.get(seed)
        kept = self._path and self._path.with_suffix(f".start-{seed}.safetensors")
        if kept is not None and kept.exists():
            self._starts[seed] = load_file(kept)["theta"]
            return self._starts[seed]
        spec = self.spec(Arm("start", ""), seed)
        model = model_of(spec)
        inner = inner_loop_of(spec, model, torch.device("cpu"))
        for step in range(self.start):
            inner.train_step([self.source(seed).batch(range(step * BATCH, (step + 1) * BATCH))], step)
        view = FlatView.of(model)
        theta = self._starts[seed] = torch.empty(view.numel)
        view.gather(theta)
        if kept is not None:
            save_file({"theta": theta}, kept)
        return theta

    def source(self, seed: int) -> BlockSource:
        """The text in the order of this seed; read once."""
        if seed not in self._sources:
            self._sources[seed] = BlockSource("stdlib", SEQ_LEN, seed)
        return self._sources[seed]

    def _save(self) -> None:
        if self._path is not None:
            fresh = self._path.with_suffix(".new")
            fresh.write_text(json.dumps(self._file))
            os.replace(fresh, self._path)


class _Run:
    def __init__(self, bench: Bench, arm: Arm, seed: int) -> None:
        self.arm, self.steps, self.spec = arm, bench.steps, bench.spec(arm, seed)
        self.source = bench.source(seed)
        self.held = self.source.validation_batches(32, FINAL_BLOCKS)
        self.judge = model_of(self.spec)
        self.view = FlatView.of(self.judge)
        self.theta = torch.empty(self.view.numel)
        self.start, self.trained = bench.start, bench.trained(seed)
        self._begin(self.judge)
        self.curve: list[tuple[int, float]] = []

    def go(self) -> dict[str, Any]:
        self._point(0)
        if not self.arm.workers:
            self._train_alone()
            return {"loss": evaluate(self.judge, self.held), "curve": self.curve, "sent_bytes": 0}
        swarm = Swarm(self.arm.workers)
        swarm.peers[0].on_round = self._round
        digests = swarm.run(self._train)
        if len(set(digests)) != 1:
            raise AssertionError("the workers' states differ")
        swarm.peers[0].state.read(self.theta)  # type: ignore[attr-defined]
        self.view.scatter(self.theta)
        return {
            "loss": evaluate(self.judge, self.held),
            "curve": self.curve,
            "sent_bytes": swarm.peers[0].sent_bytes,
            "parameters": self.view.numel,
        }

    def _begin(self, model: nn.Module) -> None:
        if self.trained is not None:
            FlatView.of(model).scatter(self.trained)

    def _step(self, inner: InnerLoop, step: int, workers: int = 1, index: int = 0) -> None:
        """One inner step of one of the workers, on blocks that nobody else has, nor had before the start's end."""
        per_step, first = self.spec.inner.batch_size, self.start * BATCH
        blocks = [first + (step * per_step + k) * workers + index for k in range(per_step)]
        inner.train_step([self.source.batch(blocks)], self.start + step)

    def _point(self, step: int) -> None:
        self.curve.append((step, evaluate(self.judge, self.held[: CURVE_BLOCKS // 32])))

    def _train_alone(self) -> None:
        inner = inner_loop_of(self.spec, self.judge, torch.device("cpu"))
        for step in range(self.steps):
            self._step(inner, step)
            if (step + 1) % (self.steps // CURVE_POINTS) == 0:
                self._point(step + 1)

    def _round(self, state: State) -> None:
        """The swarm's own model, with every tenth or so of the training."""
        peer_rounds = state.t  # type: ignore[attr-defined]
        step = round(peer_rounds * self.steps / self._rounds)
        if step - self.curve[-1][0] >= self.steps // CURVE_POINTS:
            state.read(self.theta)  # type: ignore[attr-defined]
            self.view.scatter(self.theta)
            self._point(step)

    @property
    def _rounds(self) -> int:
        return self.steps // self.arm.h * int(dict(self.arm.options).get("fragments", 1))

    def _train(self, peer: VirtualPeer, index: int) -> bytes:
        model = model_of(self.spec)
        self._begin(model)
        inner = inner_loop_of(self.spec, model, torch.device("cpu"))
        opt = DiLoCo(model, inner.optimizer, peer, self.arm.h, outer=self.arm.outer, **dict(self.arm.options))
        opt.follow()
        for step in range(self.steps):
            self._step(inner, step, self.arm.workers, index)
        opt.finish()
        return peer.state.digest()


# ---------------------------------------------------------------- what is printed


def table(bench: Bench, arms: list[Arm], seeds: list[int]) -> list[dict[str, Any]]:
    """One row for each arm that has all its seeds."""
    reference = [bench.runs.get(f"{REFERENCE}|{seed}") for seed in seeds]
    rows = []
    for arm in arms:
        found = [bench.runs.get(f"{arm.name}|{seed}") for seed in seeds]
        losses = [run["loss"] for run in found if run is not None]
        if len(losses) < len(seeds):
            continue
        row: dict[str, Any] = {"arm": arm.name, "loss": statistics.fmean(losses), "error": _error(losses)}
        row["sent_mb"] = statistics.fmean(run["sent_bytes"] for run in found if run is not None) / 1e6
        if arm.name != REFERENCE and all(run is not None for run in reference):
            gaps = [loss - run["loss"] for loss, run in zip(losses, reference, strict=True) if run is not None]
            gap = statistics.fmean(gaps)
            row |= {"gap": gap, "gap_error": _error(gaps), "gap_share": gap / (row["loss"] - gap)}
        rows.append(row)
    return rows


def _error(values: list[float]) -> float:
    """Standard error of their mean."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def verdict(row: dict[str, Any]) -> str:
    gap, error = row["gap"], row["gap_error"]
    if not abs(gap) > SURE * error:  # also where there is no error to go by
        return "no difference that can be told"
    return f"{'worse' if gap > 0 else 'better'} by {abs(row['gap_share']):.1%}"


def show(rows: list[dict[str, Any]]) -> None:
    print("| arm | loss | sent by a worker, MB | against the reference | |\n|---|---|---|---|---|")
    for row in rows:
        gap = f"{row['gap']:+.4f} ± {row['gap_error']:.4f}" if "gap" in row else ""
        words = verdict(row) if "gap" in row else ""
        print(f"| {row['arm']} | {row['loss']:.4f} ± {row['error']:.4f} | {row['sent_mb']:.1f} | {gap} | {words} |")


def plot(bench: Bench, arms: list[Arm], seeds: list[int], path: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        print("matplotlib is not installed; for the picture: pip install 'dlc[plots]'")
        return
    figure = Figure(figsize=(11, 6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for arm in arms:
        curves = [bench.runs[key]["curve"] for seed in seeds if (key := f"{arm.name}|{seed}") in bench.runs]
        if curves:
            losses = [statistics.fmean(points) for points in zip(*([y for _, y in c] for c in curves), strict=True)]
            axes.plot([x for x, _ in curves[0]], losses, label=arm.name, linewidth=1.2)
    axes.set(
        xlabel="inner steps per worker", ylabel="validation loss of the swarm's model, nats per byte", yscale="log"
    )
    axes.legend(fontsize=8)
    axes.grid(alpha=0.25)
    figure.savefig(path)


def chosen(words: str) -> list[Arm]:
    wanted = [word.strip() for word in words.split(";")]
    known = {arm.name for arm in ARMS} | {arm.group for arm in ARMS}
    unknown = [word for word in wanted if word not in known]
    if unknown:
        raise SystemExit(f"no arm or group {', '.join(unknown)}; there are: {'; '.join(sorted(known))}")
    return [arm for arm in ARMS if arm.name in wanted or arm.group in wanted]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    groups = "; ".join(group for group in DEFAULT_GROUPS if any(arm.group == group for arm in ARMS))
    parser.add_argument("--arms", default=groups, help=f"names or groups, with ';' between (default: {groups})")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds (default 3)")
    parser.add_argument("--steps", type=int, default=800, help="inner steps of each worker (default 800)")
    parser.add_argument("--start", type=int, default=0, help="steps of one worker before those, shared by all arms")
    parser.add_argument("--inner-lr", type=float, default=2e-3, help="greatest inner learning rate (default 2e-3)")
    parser.add_argument("--state", type=Path, help="file of the runs that are done; made if it is not there")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="begin no further run after so many seconds")
    parser.add_argument("--plot", type=Path, help="write the curves to this file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(args.steps, args.inner_lr, args.state, args.start)
    arms, seeds = chosen(args.arms), list(range(args.seeds))
    end = time.monotonic() + args.limit_s
    for seed in seeds:
        for arm in arms:
            if time.monotonic() < end:
                result = bench.run(arm, seed)
                print(f"seed {seed}, {arm.name}: {result['loss']:.4f} ({result['seconds']:.0f} s)", file=sys.stderr)
    rows = table(bench, arms, seeds)
    if args.json:
        # One seed has no error: JSON has no NaN.
        plain = [{key: None if value != value else value for key, value in row.items()} for row in rows]
        print(json.dumps({"rows": plain}))
    else:
        show(rows)
    if args.plot is not None:
        plot(bench, arms, seeds, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
