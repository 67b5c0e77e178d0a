"""The share of wall time that real `dlc join` processes spend in inner steps, on an emulated wide-area network.

    python benchmarks/utilisation.py
    python benchmarks/utilisation.py --case one-slow --overlaps none --rounds 6

Compute and exchange stand to each other as in OpenDiLoCo's run of 1.1 billion parameters (arXiv 2407.07852: phases of
500 steps in 67.5 minutes, fp16): a phase lasts RATIO times the least time in which these links carry one round of this
model. Model, rates and phases are smaller; round trips are not, so they weigh more here than there.

Inner steps are paced to --step seconds, as if an accelerator made them. Measured is from the end of round --warm on,
for --rounds of them: the steps made times --step, over all peers' time. What is missing was waited for, or lost.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import _wan
from _paced import paced_join
from wan import CASES, limit_s, network

from dlc.comm.codecs import CODECS, get_codec
from dlc.comm.security import generate_run_key
from dlc.demo import ONE_THREAD
from dlc.monitor.children import Children
from dlc.monitor.feed import Feed
from dlc.pacespec import OVERLAPS
from dlc.runspec import DataSpec, InnerSpec, ModelSpec, RunSpec

OPENDILOCO_PARAMETERS, OPENDILOCO_PHASE_S = 1.1e9, 67.5 * 60
PORT = 7000
START_LIMIT_S = 180.0
ROUND_LIMIT_S = 60.0
"""Beyond the phase and the least time of its exchange."""


def config(hidden: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32,
        "tie_word_embeddings": True,
    }


def parameters(hidden: int) -> int:
    """Of that model, which is tied."""
    return 256 * hidden + 4 * (4 * hidden**2 + 3 * hidden * (hidden * 11 // 4) + 2 * hidden) + hidden


class Peer:
    """What one process told."""

    def __init__(self) -> None:
        self.steps_s: list[float] = []
        self.rounds_s: dict[int, float] = {}
        self.exchanges_s: list[float] = []
        self.ended = False


def run(args: argparse.Namespace, overlap: str, folder: Path) -> dict[str, Any]:
    case, numel = CASES[args.case], parameters(args.hidden)
    least_s = limit_s(case, get_codec(args.codec).wire_bytes(numel)) / args.scale
    theirs_s = limit_s(case, get_codec("fp16").wire_bytes(round(OPENDILOCO_PARAMETERS)))
    phase_s = least_s * OPENDILOCO_PHASE_S / theirs_s
    steps = max(1, round(phase_s / args.step))
    rounds = args.warm + args.rounds
    spec = RunSpec(
        run="utilisation",
        sync_every=steps,
        codec=args.codec,
        overlap=overlap,
        rounds=rounds + 1,  # the last one of a run is waited for
        model=ModelSpec(config=config(args.hidden)),
        data=DataSpec(seq_len=16),
        inner=InnerSpec(batch_size=1, warmup_steps=10),
    )
    folder.mkdir()
    (folder / "RUN.toml").write_text(spec.to_toml(), encoding="utf-8")
    key = folder / "run.key"
    key.touch(mode=0o600)
    key.write_text(generate_run_key(), encoding="ascii")
    peers = {site: Peer() for site in case.up}
    with Children() as children, network(case, args.scale, args.loss) as wan:
        feed = Feed()
        addresses = {site: f"{wan.address(site)}:{PORT}" for site in peers}
        for site in peers:
            others = ",".join(a for other, a in addresses.items() if other != site)
            words = ["--json", "--key-file", str(key), "--state-dir", str(folder / site), "--device", "cpu"]
            words += ["--checkpoint-every", "0", "--listen", addresses[site], "--peers", others]
            words += ["--config", str(folder / "RUN.toml")]
            command = [*wan.enter(site), *paced_join(args.step), *words]
            feed.attach(site, children.start(site, command, folder / f"{site}.log", ONE_THREAD))
        limit = time.monotonic() + START_LIMIT_S + rounds * (phase_s + least_s + ROUND_LIMIT_S)
        while not all(rounds in peer.rounds_s for peer in peers.values()):
            item = feed.get(1.0)
            if item is not None:
                take(peers[item.name], item.at_s, item.event)
            ended = [site for site, peer in peers.items() if peer.ended and rounds not in peer.rounds_s]
            if ended or time.monotonic() > limit:
                raise SystemExit(f"round {rounds} was not reached: {ended or 'too slow'}; see {folder}")
    shares = []
    for peer in peers.values():
        begin, end = peer.rounds_s[args.warm], peer.rounds_s[rounds]
        made = sum(begin < at <= end for at in peer.steps_s)
        shares.append(made * args.step / (end - begin))
    exchanges = [s for peer in peers.values() for s in peer.exchanges_s[args.warm :]]
    return {
        "overlap": overlap,
        "parameters": numel,
        "steps": steps,
        "phase_s": steps * args.step,
        "least_exchange_s": least_s,
        "exchange_s": sorted(exchanges)[len(exchanges) // 2],
        "physical_limit": steps * args.step / (steps * args.step + least_s) if overlap == "none" else 1.0,
        "share": sum(shares) / len(shares),
        "shares": dict(zip(peers, shares, strict=True)),
    }


def take(peer: Peer, at_s: float, event: dict[str, Any] | None) -> None:
    if event is None:
        peer.ended = True
    elif event["event"] == "step":
        peer.steps_s.append(at_s)
    elif event["event"] == "round":
        peer.rounds_s[event["t"]] = at_s
        peer.exchanges_s.append(event["seconds"] - event["waiting_s"])


def show(result: dict[str, Any]) -> str:
    each = ", ".join(f"{site} {share:.1%}" for site, share in result["shares"].items())
    return (
        f"overlap {result['overlap']:<8} {result['share']:6.2%} of wall time in inner steps "
        f"(limit {result['physical_limit']:.1%}); phases of {result['steps']} steps, {result['phase_s']:.1f} s; "
        f"exchange {result['exchange_s']:.2f} s, least {result['least_exchange_s']:.2f} s; {each}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=tuple(CASES), default="four-site")
    parser.add_argument("--overlaps", default="none,delayed", help="one run for each (default none,delayed)")
    parser.add_argument("--codec", choices=tuple(CODECS), default="fp16")
    parser.add_argument("--hidden", type=int, default=256, help="width of the model (default 256: 3.3 M parameters)")
    parser.add_argument("--scale", type=float, default=0.2, help="of the rates (default 0.2)")
    parser.add_argument("--loss", type=float, default=0.0, help="probability that a segment is lost")
    parser.add_argument("--step", type=float, default=1.0, help="seconds of an inner step (default 1)")
    parser.add_argument("--rounds", type=int, default=4, help="measured (default 4)")
    parser.add_argument("--warm", type=int, default=2, help="rounds before them (default 2)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if unknown := set(args.overlaps.split(",")) - set(OVERLAPS):
        parser.error(f"--overlaps: no {', '.join(sorted(unknown))}; there are {', '.join(OVERLAPS)}")
    if reason := _wan.available():
        print(f"skipped: {reason}", file=sys.stderr)
        return 0
    folder = Path(tempfile.mkdtemp(prefix="dlc-utilisation-"))
    results = []
    for overlap in args.overlaps.split(","):
        results.append(run(args, overlap, folder / overlap))
        if not args.json:
            print(show(results[-1]), flush=True)
    if args.json:
        print(json.dumps(results, indent=1))
    shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
