"""Chaos: real `dlc join` processes on loopback, and every few seconds one of them is killed, frozen, leaves, or joins.

    python benchmarks/chaos.py --n 8 --every 20 --minutes 10
    python benchmarks/chaos.py --n 8 --sites 4 --minutes 10
    python benchmarks/chaos.py --overlap delayed --fragments 2
    python benchmarks/chaos.py --strategy data-parallel --n 4 --every 10 --step 0.3 --share 0.9
    python benchmarks/chaos.py --seed 7 --print-schedule

First an undisturbed run of the same length, then one with faults: SIGKILL (and a restart in the same state directory
after a while), SIGSTOP and SIGCONT, a leave by SIGINT, and newcomers, by a schedule that the seed determines. Nobody
does anything by hand. With --sites the peers are spread over as many network namespaces, and there are cuts too: two
sites do not reach each other, or one reaches no other; once so long that both sides go on. At the end the processes are
asked to leave, and checked is that

- peers at the same round had the same digest, in every round that anybody told of, and at the end;
- nobody was stuck: every living peer had a round within the last --stuck seconds;
- no process ended by itself or with a wrong exit status;
- tokens per second and living peer kept --share of those of the undisturbed run. A peer lives from having the swarm's
  state until its training ends, without the time for which it was frozen. Inner steps that die with a SIGKILL are
  lost, and count as such. Printed is where living time went, from each fault to the next.

The model is tiny and every inner step is paced to --step seconds, as if an accelerator did it, so that many peers fit
on few cores and their number does not change their speed. What would happen on a host of its own, the imports of a
process that starts and the interpreter's end, runs at the lowest priority (as root; else it takes the others' time).
Where sites are parted, the share is only told: a side that gives up its history loses tokens by design. The exit status
is 1 if a check failed; then seed, schedule and the last lines of the processes are printed, and the logs are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import heapq
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import _wan
from _chaos import Fault, Life, Loss, Round, Span, living_s, losses, problems, schedule, site_of, throughput
from _paced import paced_join

from dlc.demo import ONE_THREAD, free_addresses
from dlc.errors import ConfigError
from dlc.monitor.children import Children
from dlc.monitor.feed import Feed
from dlc.pacespec import OVERLAPS
from dlc.runspec import DataSpec, InnerSpec, ModelSpec, RunSpec

SETTLE_S = 40.0
"""After the last fault: a newcomer starts and joins, and a frozen peer catches up."""
START_LIMIT_S = 120.0
END_LIMIT_S = 60.0
FIRST_PORT = 7001
ASIDE = 19
"""Niceness of what is no part of a peer's life."""
SITE_DELAY_MS = 5.0
"""One way from a site to the middle: a round trip between two sites takes 20 ms."""
TOLD = ("history_lost", "digest_mismatch", "contribution_dropped")
RETRY_S = 1.0
"""A fault whose peer is not ready for it (a leave before there is anything to save) is tried again after this."""


def spec(args: argparse.Namespace) -> RunSpec:
    config = {
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "tie_word_embeddings": True,
    }
    return RunSpec(
        run="chaos",
        strategy=args.strategy,
        sync_every=args.sync_every,
        overlap=args.overlap,
        fragments=args.fragments,
        chunk_elems=1024,
        seed=args.seed,
        model=ModelSpec(config=config),
        data=DataSpec(seq_len=32),
        inner=InnerSpec(batch_size=2, warmup_steps=10),
    )


class Swarm:
    """The processes and what they told."""

    def __init__(self, args: argparse.Namespace, folder: Path, wan: _wan.Wan | None) -> None:
        from dlc.comm.security import generate_run_key

        folder.mkdir(parents=True)
        self.args, self.folder, self.wan = args, folder, wan
        self.children, self.feed = Children(), Feed()
        self.lives: dict[str, Life] = {}
        """By process name: peer name and number of the start."""
        self.now: dict[str, str] = {}
        """Peer name: its present process."""
        self.addresses: dict[str, str] = {}
        self.ids: dict[str, str] = {}
        """Peer id of each process."""
        self.paused: set[str] = set()
        """Processes that did something other than inner steps since their last one."""
        self.config, self.key = folder / "RUN.toml", folder / "run.key"
        self.config.write_text(spec(args).to_toml(), encoding="utf-8")
        self.key.touch(mode=0o600)
        self.key.write_text(generate_run_key(), encoding="ascii")

    def start(self, peer: str, *options: str) -> None:
        process = f"{peer}.{sum(life.name.split('.')[0] == peer for life in self.lives.values())}"
        words = ["--json", "--key-file", str(self.key), "--state-dir", str(self.folder / peer), "--device", "cpu"]
        words += ["--log-level", "info", "--checkpoint-every", "5", *options]
        enter = self.wan.enter(site_of(peer, self.args.sites)) if self.wan is not None else []
        aside = ["nice", "-n", str(ASIDE)] if may_raise_priority() else []
        command = [*enter, *aside, *paced_join(self.args.step), *words]
        stdout = self.children.start(process, command, self.folder / f"{process}.log", ONE_THREAD)
        self.lives[process] = Life(process, time.monotonic())
        self.now[peer] = process
        self.feed.attach(process, stdout)

    def found(self, names: list[str]) -> None:
        """All at once, each naming the addresses of all others."""
        addresses = free_addresses(len(names))
        if self.wan is not None:  # their ports are free: each site is a world of its own
            addresses = [f"{self._host(name)}:{FIRST_PORT + 2 * i}" for i, name in enumerate(names)]
        listed = dict(zip(names, addresses, strict=True))
        for name in names:
            others = ",".join(a for n, a in listed.items() if n != name)
            self.start(name, "--listen", listed[name], "--peers", others, "--config", str(self.config))

    def enter(self, peer: str) -> None:
        """A newcomer, or one that starts again: it knows two living peers' addresses and the key."""
        living = [n for n, p in self.now.items() if n != peer and self._lives(p) and n in self.addresses]
        known = ",".join(self.addresses[n] for n in living[:2])
        self.start(peer, "--listen", f"{self._host(peer)}:0", "--peers", known)

    def _host(self, peer: str) -> str:
        return "127.0.0.1" if self.wan is None else self.wan.address(site_of(peer, self.args.sites))

    def _lives(self, process: str) -> bool:
        life = self.lives[process]
        return life.ended_s is None and not life.ending and not self.frozen(process)

    def frozen(self, process: str) -> bool:
        frozen = self.lives[process].frozen
        return bool(frozen) and frozen[-1][1] == float("inf")

    def apply(self, fault: Fault) -> bool:
        """False: not possible yet."""
        if fault.kind in ("cut", "split", "heal"):
            self._part(fault)
            return True
        process = self.now.get(fault.peer)
        if fault.kind in ("join", "restart"):
            self.enter(fault.peer)
            return True
        assert process is not None
        life = self.lives[process]
        if life.ended_s is not None:
            return True  # it ended by itself; the verdict tells
        if life.synced_s is None:
            return False
        if fault.kind == "kill":
            life.ending = "kill"
            self.children.signal(process, signal.SIGKILL)
        elif fault.kind == "leave":
            life.ending = "leave"
            self.children.signal(process, signal.SIGINT)
        elif fault.kind == "freeze":
            self.children.signal(process, signal.SIGSTOP)
            life.frozen.append((time.monotonic(), float("inf")))
        elif life.frozen:
            life.frozen[-1] = (life.frozen[-1][0], time.monotonic())
            self.children.signal(process, signal.SIGCONT)
        return True

    def _part(self, fault: Fault) -> None:
        """Cut the links of two sites, or all of one; or put them back."""
        assert self.wan is not None
        first, _, second = fault.peer.partition("+")
        for other in [second] if second else [name for name in self.wan.names if name != first]:
            (self.wan.heal if fault.kind == "heal" else self.wan.cut)(first, other)

    def pump(self, timeout_s: float) -> None:
        item = self.feed.get(timeout_s)
        if item is None:
            return
        life, event = self.lives[item.name], item.event
        if event is not None and event["event"] in ("phase", "round", "synced"):
            self.paused.add(item.name)
        if event is None:
            life.ended_s = item.at_s
            life.exit_code = self.children.exit_code(item.name, 10.0)
            if life.exit_code and life.ending != "kill":
                text = (self.folder / f"{item.name}.log").read_text("utf-8", "replace")
                life.said = text.splitlines()[-5:]
        elif event["event"] == "started":
            self.addresses[item.name.split(".")[0]] = event["address"]
            self.ids[item.name] = event["peer"]
        elif event["event"] == "synced":
            life.synced_s = life.synced_s or item.at_s
            prioritise(self.children.pid(item.name), 0)
        elif event["event"] == "round":
            life.rounds.append(Round(item.at_s, event["t"], event["head"], event["digest"], event["weight"]))
            if event["counted"]:
                own = sum(c["weight"] for c in event["contributors"] if c["peer"] == self.ids[item.name])
                life.counted.append((item.at_s, own))
        elif event["event"] == "step":
            life.steps.append((item.at_s, item.name not in self.paused))
            self.paused.discard(item.name)
        elif event["event"] == "work_dropped":
            life.dropped.append((item.at_s, event["tokens"]))
        elif event["event"] in TOLD:
            life.told[event["event"]] += 1
        elif event["event"] == "end":
            life.done_s, life.end_t, life.end_digest = item.at_s, event["t"], event["digest"]
            prioritise(self.children.pid(item.name), ASIDE)

    def until(self, at_s: float) -> None:
        while (left := at_s - time.monotonic()) > 0:
            self.pump(min(0.2, left))


def run(
    args: argparse.Namespace, folder: Path, names: list[str], faults: list[Fault], minutes: float
) -> dict[str, Any]:
    wan = _wan.Wan({f"s{i}": _wan.Site(delay_ms=SITE_DELAY_MS) for i in range(args.sites)}) if args.sites else None
    swarm = Swarm(args, folder, wan)
    may_fork = any(fault.kind == "split" for fault in faults)
    try:
        swarm.found(names)
        limit_s = time.monotonic() + START_LIMIT_S
        while not all(life.rounds for life in swarm.lives.values()):
            swarm.pump(0.2)
            if time.monotonic() > limit_s or any(life.ended_s for life in swarm.lives.values()):
                return {"problems": [f"the swarm did not start within {START_LIMIT_S:g} s; see {folder}"]}
        from_s = time.monotonic()
        due = [(from_s + fault.at_s, i, fault) for i, fault in enumerate(faults)]
        heapq.heapify(due)
        done: Counter[str] = Counter()
        marks: list[tuple[float, str]] = []
        while due:
            at_s, i, fault = heapq.heappop(due)
            swarm.until(at_s)
            if swarm.apply(fault):
                done[fault.kind] += 1
                marks.append((time.monotonic(), f"{fault.kind} {fault.peer}"))
                note(args, f"{time.monotonic() - from_s:7.2f} s  {fault.kind} {fault.peer}")
            else:
                heapq.heappush(due, (time.monotonic() + RETRY_S, i, fault))
        swarm.until(from_s + minutes * 60)
        span = Span(from_s, time.monotonic())
        finish(swarm)
        lives = list(swarm.lives.values())
        run_spec = spec(args)
        step_tokens = run_spec.tokens_per_round / run_spec.steps_per_round
        where = losses(lives, span, marks, args.step, step_tokens)
        return {
            "problems": problems(lives, span, args.stuck, may_fork),
            "throughput": throughput(lives, span),
            "peer_seconds": living_s(lives, span),
            "rounds": max((r.t for life in lives for r in life.rounds), default=0),
            "faults": dict(done),
            "told": dict(sum((life.told for life in lives), Counter())),
            "losses": [dataclasses.asdict(loss) | {"at_s": loss.at_s - from_s} for loss in where],
        }
    finally:
        swarm.children.close()
        if wan is not None:
            wan.close()


def may_raise_priority() -> bool:
    """Whoever may not would leave its peers at the lowest priority."""
    return sys.platform == "linux" and os.geteuid() == 0


def prioritise(pid: int, nice: int) -> None:
    """All threads of a process; nothing where that is not allowed, or it has ended."""
    if may_raise_priority():
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                os.setpriority(os.PRIO_PROCESS, int(thread), nice)


def finish(swarm: Swarm) -> None:
    """Ask all that live to leave, and hear them out."""
    waited = [life for life in swarm.lives.values() if life.ended_s is None]
    for life in waited:
        life.ending = life.ending or "end"
    swarm.children.interrupt(0.0)
    limit_s = time.monotonic() + END_LIMIT_S
    while any(life.ended_s is None for life in waited) and time.monotonic() < limit_s:
        swarm.pump(0.2)


def note(args: argparse.Namespace, text: str) -> None:
    print(text, file=sys.stderr if args.json else sys.stdout, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=8, help="peers at the start (default 8)")
    parser.add_argument("--minutes", type=float, default=10.0, help="length of each of the two runs (default 10)")
    parser.add_argument("--calm-minutes", type=float, help="of the undisturbed run, if another")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two faults (default 20)")
    parser.add_argument("--sites", type=int, default=0, help="network namespaces to spread over, with cuts; needs root")
    parser.add_argument("--seed", type=int, default=0, help="of schedule and run (default 0)")
    parser.add_argument("--step", type=float, default=0.5, help="seconds of an inner step (default 0.5)")
    parser.add_argument("--sync-every", type=int, default=8, help="inner steps in a round (default 8)")
    help_text = "data-parallel: a round for each step (default diloco)"
    parser.add_argument("--strategy", choices=("diloco", "data-parallel"), default="diloco", help=help_text)
    parser.add_argument("--overlap", choices=OVERLAPS, default="none", help="inner steps during rounds (default none)")
    parser.add_argument("--fragments", type=int, default=1, help="parts with rounds of their own (default 1)")
    parser.add_argument("--stuck", type=float, default=20.0, help="seconds without a round that fail (default 20)")
    parser.add_argument("--share", type=float, default=0.98, help="of the throughput to keep (default 0.98)")
    parser.add_argument("--print-schedule", action="store_true", help="print the faults, and exit")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    if not args.every > 0:
        parser.error(f"--every must be above 0 seconds, got {args.every:g}")
    try:
        spec(args)
    except ConfigError as error:
        parser.error(str(error))
    names = [f"p{i}" for i in range(args.n)]
    faults = schedule(args.seed, names, args.every, args.minutes * 60 - SETTLE_S, args.sites)
    if args.n < 3 or not faults:
        parser.error(f"--n must be at least 3, and --minutes leave room for a fault before the last {SETTLE_S:.0f} s")
    if args.sites in (1, 2):
        parser.error("--sites must be 3 at least: one that is cut off must leave a quorum")
    if args.print_schedule:
        print(*faults, sep="\n")
        return 0
    if args.sites and (reason := _wan.available()):
        print(f"skipped: {reason}", file=sys.stderr)
        return 0
    folder = Path(tempfile.mkdtemp(prefix="dlc-chaos-"))
    load = os.getloadavg()[0]
    note(args, f"seed {args.seed}, {args.n} peers; load of the machine before the start {load:.1f}")
    calm = run(args, folder / "calm", names, [], args.calm_minutes or args.minutes)
    chaos = run(args, folder / "chaos", names, faults, args.minutes) if not calm["problems"] else {"problems": []}
    share = chaos.get("throughput", 0.0) / calm["throughput"] if calm.get("throughput") else 0.0
    failed = [f"undisturbed: {p}" for p in calm["problems"]] + chaos["problems"]
    split = any(fault.kind == "split" for fault in faults)
    if not failed and share < args.share and not split:
        failed.append(f"kept {share:.1%} of the undisturbed throughput per living peer, asked were {args.share:.1%}")
    result = {"seed": args.seed, "n": args.n, "load": load, "calm": calm, "chaos": chaos, "share": share}
    if args.json:
        plan = [dataclasses.asdict(fault) for fault in faults]
        print(json.dumps(result | {"problems": failed, "schedule": plan if failed else []}))
    else:
        report(args, result, failed, faults)
    if failed:
        note(args, f"logs: {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if failed else 0


def total(lost: list[Loss]) -> Loss:
    sums = (
        sum(getattr(loss, name) for loss in lost) for name in ("idle_s", "slow_s", "unsaved_s", "dropped_s", "of_s")
    )
    return Loss(0.0, "", *sums)


def loss_text(loss: Loss) -> str:
    """Living peer-seconds without tokens, as seconds and as a share."""
    parts = (
        (loss.idle_s, "idle"),
        (loss.slow_s, "slow steps"),
        (loss.unsaved_s, "killed"),
        (loss.dropped_s, "dropped"),
    )
    return ", ".join(f"{name} {s:6.1f} s ({s / loss.of_s if loss.of_s else 0.0:5.1%})" for s, name in parts)


def report(args: argparse.Namespace, result: dict[str, Any], failed: list[str], faults: list[Fault]) -> None:
    for name in ("calm", "chaos"):
        one = result[name]
        if "throughput" in one:
            print(
                f"{name:<6} {one['rounds']} rounds, {one['throughput']:.1f} tokens/s per living peer, "
                f"{one['peer_seconds']:.0f} peer-seconds, faults {one['faults'] or 'none'}"
            )
            lost = [Loss(**loss) for loss in one["losses"]]
            for loss in lost if name == "chaos" else []:
                print(f"  {loss.at_s:7.2f} s  {loss.text:<12} {loss_text(loss)}")
            print(f"  {'':9}  {'all of it':<12} {loss_text(total(lost))}")
            if one["told"]:
                print(f"  told to the users: {one['told']}")
    print(f"kept {result['share']:.1%} of the undisturbed throughput per living peer")
    if failed:
        print(f"FAILED with --seed {args.seed}:", *failed, "the schedule was", *faults, sep="\n  ")
    else:
        print("equal digests in every round, nobody stuck, all exit statuses right")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a `kill` cleans up as Ctrl-C does
    sys.exit(main())
