"""The strategies of a run, each by its one word: the same model, data and steps, over one emulated wide-area network.

    python benchmarks/techniques.py --state techniques.json --png techniques.png
    python benchmarks/techniques.py --arms diloco,gossip --conditions plain,slow

Real `dlc join` processes, one a site, on links of --mbit and --rtt-ms; inner steps are paced to --step seconds, as if
an accelerator made them, and all peers begin together. The parameter server has two helpers more. A condition is
"plain", "slow" (the last peer's steps take SLOWER times as long) or "churn" (after a third of the steps the last peer
is killed, and another one joins).

An arm ends when its peers have made --steps inner steps (or, where a peer is slow or dies, when the run ends on the
others). Told are the mean over the peers of the validation loss at the end, of the seconds from the first step to the
end of the last exchange, of the bytes sent, and of tokens/s of all peers together; the picture has the losses
against seconds and against bytes. The model is small and steps are few: the table shows what the techniques cost in
time and bytes, and how far each one comes with these steps, not how a large run would end.

With --state, arms that are in the file are not run again. Needs root (network namespaces); --local does without.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import _wan
from _paced import paced_join

from dlc.comm.security import generate_run_key
from dlc.demo import ONE_THREAD
from dlc.errors import ConfigError
from dlc.monitor.children import Children
from dlc.monitor.feed import Feed
from dlc.runspec import DataSpec, InnerSpec, ModelSpec, RunSpec
from dlc.strategyspec import GossipSpec, MoshpitSpec, ServerSpec

PORT = 7000
SLOWER = 4.0
START_LIMIT_S = 150.0
EVALS = 5
"""Validations of each peer in a run, beside those at its two ends."""
CONDITIONS = ("plain", "slow", "churn")
ARMS: dict[str, dict[str, Any]] = {
    "diloco": {},
    "diloco-delayed": {"overlap": "delayed"},
    "data-parallel": {"strategy": "data-parallel", "codec": "bf16"},
    "gossip": {"strategy": "gossip", "gossip": GossipSpec(graph="exponential")},
    "noloco": {"strategy": "gossip", "gossip": GossipSpec(graph="random-pairs", update="noloco")},
    "moshpit": {"strategy": "moshpit", "moshpit": MoshpitSpec(group_size=2)},
    "server": {"strategy": "parameter-server"},
    "server-async": {"strategy": "parameter-server", "server": ServerSpec(async_=True)},
}
HELPERS = ("helper-0", "helper-1")
"""Beside the trainers, for the parameter server: on links like theirs."""
Result = dict[str, Any]


def spec_of(arm: str, args: argparse.Namespace) -> RunSpec:
    hidden = args.hidden
    config = {
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    spec = RunSpec(
        run="techniques",
        sync_every=args.sync_every,
        model=ModelSpec(config=config),
        data=DataSpec(seq_len=64),
        inner=InnerSpec(batch_size=4, warmup_steps=10, total_steps=args.steps),
        rounds=1,
        **ARMS[arm],
    )
    return RunSpec.from_dict({**spec.to_dict(), "rounds": -(-args.steps // spec.steps_per_round)})


class Told:
    """What one process told."""

    def __init__(self) -> None:
        self.synced = self.ended = self.over = False
        self.steps_s: list[float] = []
        self.exchanges: list[tuple[float, int]] = []
        """(when, bytes sent until then)."""
        self.losses: list[tuple[float, int, float]] = []
        """(when, bytes sent until then, validation loss)."""
        self.tokens = 0.0

    @property
    def sent(self) -> int:
        return self.exchanges[-1][1] if self.exchanges else 0

    def take(self, at_s: float, event: dict[str, Any] | None, tokens_per_step: int) -> None:
        if event is None:
            self.ended = True
            return
        match event["event"]:
            case "synced":
                self.synced = True
            case "step":
                self.steps_s.append(at_s)
                self.tokens += tokens_per_step
            case "round" | "averaging":
                self.exchanges.append((at_s, self.sent + event["bytes_sent"]))
            case "validation":
                self.losses.append((at_s, self.sent, event["loss"]))
            case "end":
                self.over = True


@contextlib.contextmanager
def network(args: argparse.Namespace, sites: list[str]) -> Iterator[tuple[Mapping[str, str], Mapping[str, list[str]]]]:
    """Address of each site, and the words that start a process there."""
    if args.local:
        yield {site: f"127.0.0.1:{PORT + 2 * i}" for i, site in enumerate(sites)}, {site: [] for site in sites}
        return
    links = {site: _wan.Site(args.mbit, args.mbit, args.rtt_ms / 4) for site in sites}
    with _wan.Wan(links) as wan:
        yield {site: f"{wan.address(site)}:{PORT}" for site in sites}, {site: wan.enter(site) for site in sites}


def run(arm: str, condition: str, args: argparse.Namespace, folder: Path) -> Result:
    spec = spec_of(arm, args)
    names = [f"peer-{i}" for i in range(args.n)]
    sites = [*names, "late", *HELPERS]
    folder.mkdir(parents=True)
    (folder / "RUN.toml").write_text(spec.to_toml(), encoding="utf-8")
    key, gate = folder / "run.key", folder / "begin"
    key.touch(mode=0o600)
    key.write_text(generate_run_key(), encoding="ascii")
    every = max(1, spec.rounds // EVALS)
    told: dict[str, Told] = {}
    tokens_per_step = spec.blocks_per_step * spec.data.seq_len
    with Children() as children, network(args, sites) as (addresses, enter):
        feed = Feed()

        def start(name: str, step_s: float, known: list[str], *more: str) -> None:
            words = ["--json", "--key-file", str(key), "--state-dir", str(folder / name), "--listen", addresses[name]]
            if name not in HELPERS:
                words += ["--device", "cpu", "--checkpoint-every", "0", "--eval-every", str(every)]
            words += [
                "--peers",
                ",".join(addresses[other] for other in known),
                "--config",
                str(folder / "RUN.toml"),
                *more,
            ]
            command = [*enter[name], *paced_join(step_s, gate), *words]
            told[name] = Told()
            feed.attach(name, children.start(name, command, folder / f"{name}.log", ONE_THREAD))

        def listen() -> None:
            item = feed.get(0.2)
            if item is not None:
                told[item.name].take(item.at_s, item.event, tokens_per_step)

        for i, name in enumerate(names):
            slow = condition == "slow" and i == args.n - 1
            start(name, args.step * (SLOWER if slow else 1.0), [other for other in names if other != name])
        if spec.strategy == "parameter-server":
            for name in HELPERS:
                start(name, args.step, names, "--role", "helper")
        limit = time.monotonic() + START_LIMIT_S
        while not all(told[name].synced for name in names):
            listen()
            if time.monotonic() > limit or any(peer.ended for peer in told.values()):
                raise SystemExit(f"{arm}: not all peers started; see {folder}")
        gate.touch()
        began, victim, killed = time.monotonic(), names[-1], False
        limit = began + args.limit
        staying = [name for name in names if not (condition == "churn" and name == victim)]
        while not all(told[name].ended for name in staying):
            listen()
            if condition == "churn" and not killed and len(told[victim].steps_s) >= args.steps // 3:
                children.signal(victim, 9)
                killed = True
                start("late", args.step, staying)
            if time.monotonic() > limit:
                break
        done = all(told[name].over for name in staying)
    measured = [told[name] for name in staying if told[name].steps_s]
    first_s = min(peer.steps_s[0] for peer in measured)
    seconds = [max(peer.steps_s[-1], *(at for at, _ in peer.exchanges or [(0.0, 0)])) - first_s for peer in measured]
    losses = [[(at - first_s, sent, loss) for at, sent, loss in peer.losses] for peer in measured]
    return {
        "arm": arm,
        "condition": condition,
        "done": done,
        "loss": statistics.fmean(curve[-1][2] for curve in losses),
        "seconds": statistics.fmean(seconds),
        "sent": statistics.fmean(peer.sent for peer in measured),
        "tokens_per_s": sum(p.tokens / s for p, s in zip(measured, seconds, strict=True)),
        "losses": losses,
    }


def table(results: list[Result]) -> str:
    head = "| condition | strategy | loss | seconds | MB sent per peer | tokens/s of all |\n|---|---|---|---|---|---|"
    order = {name: i for i, name in enumerate(ARMS)}
    rows = [
        f"| {r['condition']} | {r['arm']} | {r['loss']:.3f} | {r['seconds']:.1f}{'' if r['done'] else ', not done'} | "
        f"{r['sent'] / 1e6:.2f} | {r['tokens_per_s']:.0f} |"
        for r in sorted(results, key=lambda r: (CONDITIONS.index(r["condition"]), order[r["arm"]]))
    ]
    return "\n".join([head, *rows])


def picture(results: list[Result], path: str) -> None:
    """Loss against seconds, and against megabytes, a row for each condition; of each peer a thin line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    conditions = [c for c in CONDITIONS if any(r["condition"] == c for r in results)]
    figure = Figure(figsize=(11, 4.5 * len(conditions)), layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(conditions), 2, sharey="row", squeeze=False)
    for condition, (by_time, by_bytes) in zip(conditions, rows, strict=True):
        for i, arm in enumerate(ARMS):
            for result in (r for r in results if r["arm"] == arm and r["condition"] == condition):
                for n, curve in enumerate(result["losses"]):
                    options: dict[str, Any] = {"color": f"C{i}", "alpha": 0.7, "label": arm if n == 0 else None}
                    by_time.plot([max(0.0, at) for at, _, _ in curve], [loss for _, _, loss in curve], **options)
                    by_bytes.plot([sent / 1e6 for _, sent, _ in curve], [loss for _, _, loss in curve], **options)
        by_time.set(xlabel="seconds", xscale="symlog", ylabel="validation loss, nats per token", title=condition)
        by_bytes.set(xlabel="MB sent per peer", xscale="symlog")
        by_time.legend(loc="lower left")
    figure.savefig(path, dpi=80)


def main() -> int:
    args = _options()
    if not args.local and (reason := _wan.available()):
        print(f"skipped: {reason}", file=sys.stderr)
        return 0
    state = Path(args.state) if args.state else None
    results: list[Result] = json.loads(state.read_text()) if state is not None and state.exists() else []
    folder = Path(tempfile.mkdtemp(prefix="dlc-techniques-"))
    for condition in args.conditions.split(","):
        for arm in args.arms.split(","):
            if any((r["arm"], r["condition"]) == (arm, condition) for r in results):
                continue
            results.append(run(arm, condition, args, folder / f"{arm}-{condition}"))
            if state is not None:
                state.write_text(json.dumps(results))
            if not args.json:
                print(table(results[-1:]).splitlines()[-1], flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(results) if args.json else table(results))
    if args.png:
        picture(results, args.png)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", default=",".join(ARMS), help="which strategies (default all)")
    parser.add_argument("--conditions", default="plain", help=f"of {', '.join(CONDITIONS)} (default plain)")
    parser.add_argument("--n", type=int, default=4, help="peers (default 4)")
    parser.add_argument("--steps", type=int, default=120, help="inner steps of each peer (default 120)")
    parser.add_argument("--sync-every", type=int, default=10, help="inner steps between exchanges (default 10)")
    parser.add_argument("--step", type=float, default=0.1, help="seconds of an inner step (default 0.1)")
    parser.add_argument("--hidden", type=int, default=64, help="width of the model (default 64: 0.12 M parameters)")
    parser.add_argument("--mbit", type=float, default=20.0, help="of each link, up and down (default 20)")
    parser.add_argument("--rtt-ms", type=float, default=60.0, help="between any two sites (default 60)")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds for one arm, start apart (default 180)")
    parser.add_argument("--local", action="store_true", help="over loopback, without the emulated network")
    parser.add_argument("--state", default="", help="file of the results so far, for the next call")
    parser.add_argument("--png", default="", help="write the picture; needs matplotlib")
    parser.add_argument("--json", action="store_true", help="the results as JSON")
    args = parser.parse_args()
    for option, given, known in (("--arms", args.arms, ARMS), ("--conditions", args.conditions, CONDITIONS)):
        if unknown := set(given.split(",")) - set(known):
            parser.error(f"{option}: no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    try:
        for arm in args.arms.split(","):
            spec_of(arm, args)
    except ConfigError as error:
        parser.error(str(error))
    return args


if __name__ == "__main__":
    sys.exit(main())
