"""What one slow peer costs the others: inner steps to a number, or to a common deadline. Real processes on loopback.

    python benchmarks/stragglers.py

Trainers (`dlc join`'s own, see `train.trainer`) of a model that is next to nothing, each inner step drawn out to a
given time, so that neither processors nor links matter. Told are the tokens per second of the fast peers that rounds
counted, once without the slow one and then with it, under each sync_mode; and what the slow one brought.
"""

from __future__ import annotations

import argparse
import json
import queue
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from _workers import LIMIT_S, WORKER, Workers, say

import dlc
from dlc.comm.security import generate_run_key
from dlc.demo import free_addresses
from dlc.runspec import EMBEDDED_LLAMA, DataSpec, InnerSpec, ModelSpec, RunSpec
from dlc.train.inner import InnerLoop, StepResult
from dlc.train.trainer import Trainer

TINY = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SEQ_LEN = 16
SETTLED = 3
"""Rounds at the start that do not count: peers come one after another, and do not know each other's speed."""


def spec_of(folder: str, sync_mode: str, h: int, rounds: int) -> RunSpec:
    text = Path(folder, "text.txt")
    if not text.exists():
        text.write_bytes(bytes(range(32, 127)) * 200)
    return RunSpec(
        run="stragglers",
        sync_every=h,
        sync_mode=sync_mode,
        rounds=rounds,
        model=ModelSpec(config={**EMBEDDED_LLAMA, **TINY, "num_key_value_heads": 2}),
        data=DataSpec(source=str(text), seq_len=SEQ_LEN),
        inner=InnerSpec(batch_size=2, warmup_steps=1),
    )


def worker_main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    for name in ("--key", "--listen", "--folder", "--name", "--sync-mode"):
        parser.add_argument(name, required=True)
    parser.add_argument("--peers", default="")
    parser.add_argument("--step-s", type=float, required=True)
    parser.add_argument("--h", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    train_step = InnerLoop.train_step

    def paced(loop: InnerLoop, batches: Any, step: int) -> StepResult:
        end_s = time.monotonic() + options.step_s
        result = train_step(loop, batches, step)
        time.sleep(max(0.0, end_s - time.monotonic()))
        return result

    InnerLoop.train_step = paced  # type: ignore[method-assign]

    def tell(event: dict[str, Any]) -> None:
        if event["event"] == "round":
            shares = {share["peer"]: share["weight"] for share in event["contributors"]}
            say("round", t=event["t"], at_s=time.monotonic(), shares=shares)

    heard: queue.SimpleQueue[object] = queue.SimpleQueue()
    spec = spec_of(options.folder, options.sync_mode, options.h, options.rounds)
    listed = [p for p in options.peers.split(",") if p]
    peer = dlc.Peer.join(
        listed, key=options.key, spec=spec, listen=options.listen, hold=True, on_event=heard.put, join_timeout_s=LIMIT_S
    )
    say("joined", peer=peer.id)
    folder = Path(options.folder, options.name)
    trainer = Trainer(peer, folder, device="cpu", on_event=tell, peer_events=heard, eval_blocks=1, checkpoint_every=0)
    summary = trainer.run(threading.Event())
    say("end", t=summary.t, dropped=summary.setbacks.tokens_dropped)


def measure(sync_mode: str, steps_s: list[float], h: int, rounds: int) -> list[float]:
    """Tokens per second of each peer that rounds counted, once they are in step."""
    addresses, key = free_addresses(len(steps_s)), generate_run_key()
    with tempfile.TemporaryDirectory() as folder, Workers(__file__) as workers:
        spec_of(folder, sync_mode, h, rounds)
        for i, step_s in enumerate(steps_s):
            words = ["--key", key, "--listen", addresses[i], "--folder", folder, "--name", f"p{i}", "--h", str(h)]
            words += ["--step-s", str(step_s), "--rounds", str(rounds), "--sync-mode", sync_mode]
            workers.start(f"p{i}", *words, *(["--peers", addresses[0]] if i else []))
        ids = [workers.wait(f"p{i}", "joined")["peer"] for i in range(len(steps_s))]
        told: dict[int, dict[str, Any]] = {}
        while not told or max(told) < rounds:
            event = workers.wait("p0", "round")
            told[event["t"]] = event
    everybody = [t for t, event in told.items() if len(event["shares"]) == len(steps_s)]
    first = max(SETTLED, min(everybody, default=SETTLED))
    seconds = told[rounds]["at_s"] - told[first]["at_s"]
    return [sum(told[t]["shares"].get(peer, 0.0) for t in told if t > first) / seconds for peer in ids]


def main() -> int:
    if sys.argv[1:2] == [WORKER]:
        worker_main(sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", type=int, default=3, help="peers of the usual speed (default 3)")
    parser.add_argument("--step-s", type=float, default=0.1, help="seconds of their inner steps (default 0.1)")
    parser.add_argument("--slower", type=float, default=10.0, help="so many times slower is the other (default 10)")
    parser.add_argument("--sync-every", type=int, default=20, help="inner steps of a round (default 20)")
    parser.add_argument("--rounds", type=int, default=10, help="of each measurement (default 10)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    fast = [args.step_s] * args.fast
    h, rounds = args.sync_every, args.rounds
    alone = statistics.fmean(measure("steps", fast, h, rounds))
    rows = []
    for mode in ("steps", "deadline"):
        rates = measure(mode, [*fast, args.step_s * args.slower], h, rounds)
        rows.append({"sync_mode": mode, "kept": statistics.fmean(rates[:-1]) / alone, "slow": rates[-1] / alone})
    if args.json:
        print(json.dumps({"slower": args.slower, "tokens_per_s": alone, "rows": rows}))
        return 0
    print(
        f"{args.fast} peers at {alone:.0f} tokens/s each without the slow one; with one {args.slower:g} times slower:\n"
    )
    print("| sync_mode | the others keep | the slow one brings |\n|---|---|---|")
    for row in rows:
        print(f"| {row['sync_mode']} | {row['kept']:.1%} | {row['slow']:.1%} of what a fast one does |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
