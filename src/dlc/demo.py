"""`dlc demo`: real peers on this machine train one model; one is killed in the middle of a round, another joins.

    start       N processes `dlc join`, each naming the addresses of all others, found one run together
    kill        in round rounds // 2 the first of them gets SIGKILL while it owns chunks that it has not finished
    newcomer    then a process is started that knows nothing but a survivor's address and the run key
    alone       after the run one peer trains by itself, by the same RUN.toml, for comparison
    verdict     checks on what the processes told (monitor/verdict.py), figures, a picture; the exit status is 0 if
                every check held, 1 if not, 2 for wrong arguments, 130 after Ctrl-C

The processes are children that cannot outlive this one (monitor/children.py); their state is in a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from dlc.cli.interrupt import asked_to_stop
from dlc.cli.options import count, path
from dlc.errors import DlcError, UsageError
from dlc.monitor.children import WAIT_S, Children
from dlc.monitor.feed import Feed, Item
from dlc.monitor.outcome import write_outcome
from dlc.monitor.show import Show
from dlc.monitor.table import Board
from dlc.monitor.verdict import SIGKILL, Expected, Record, Role, exit_text, loss_text
from dlc.runspec import RunSpec

ROUNDS, SYNC_EVERY = 12, 20
"""About 90 s on two idle cores; the half that follows the kill is long enough for a process to start and join."""
PEERS_MIN, PEERS_MAX = 3, 16
"""With two, the survivor of a kill would be no majority and wait a minute; more than 16 are no demo."""
CHUNK_ELEMS = 8192
"""103 chunks of the 0.84 million parameters, so that a kill in the middle of a round finds unfinished ones."""
LIMIT_S = 180.0
"""What the default size may take in all; larger sizes may take more in proportion."""
SILENCE_MAX_S = 90.0
"""Without any event for so long the demo is stuck, and gives up."""
VALIDATIONS = 6
"""Of each peer on the way, for the curves; each stops it for a moment."""
PLAIN_WIDTH = 120
"""Columns of tables in a log."""
GRACE_S = 5.0
"""For children to leave and save after Ctrl-C."""
PORTS = range(20_000, 32_000, 2)
"""Control ports to choose from, the bulk port beside each; below the range from which systems give out free ports."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Several processes share the cores: more threads would only fight."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dlc demo`."""
    n_help = f"peers at the start, {PEERS_MIN} to {PEERS_MAX} (default 3)"
    parser.add_argument("--n-peers", type=count, default=3, metavar="N", help=n_help)
    parser.add_argument("--rounds", type=count, default=ROUNDS, metavar="R", help=f"outer rounds (default {ROUNDS})")
    parser.add_argument(
        "--sync-every",
        type=count,
        default=SYNC_EVERY,
        metavar="H",
        help=f"inner steps per round (default {SYNC_EVERY})",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data order (default 0)")
    parser.add_argument(
        "--out",
        type=path,
        default=Path("dlc-demo"),
        metavar="DIR",
        help="for picture, result and logs (default dlc-demo)",
    )
    parser.add_argument("--keep", action="store_true", help="keep the peers' state directories")
    parser.add_argument("--json", action="store_true", help="print the result as JSON; all else goes to stderr")


def main(args: argparse.Namespace) -> int:
    """Run the demo; returns the exit status. UsageError: with these options it cannot be run."""
    console = Console(stderr=args.json)
    if not console.is_terminal:
        console = Console(stderr=args.json, width=PLAIN_WIDTH)
    with asked_to_stop() as stop:  # before there is a folder, which a signal would leave behind
        folder = Path(tempfile.mkdtemp(prefix="dlc-demo-"))
        try:
            _check(args)
            with Demo(args, folder, console, stop) as demo:
                elapsed_s = demo.run()
                result = write_outcome(args.out, demo.spec, demo.records, demo.expected, elapsed_s, console)
            if args.json:
                print(json.dumps(result, indent=2))
            return 0 if result["held"] else 1
        except KeyboardInterrupt:
            console.print("dlc demo: stopped", markup=False)
            return 130
        finally:
            if args.keep:
                console.print(f"state of the peers: {folder}", markup=False, soft_wrap=True)
            else:
                shutil.rmtree(folder, ignore_errors=True)


class Stuck(DlcError):
    """The demo cannot go on; the verdict tells what is missing."""


class Demo:
    """The processes, and what they told so far. Leaving it ends them all.

    stop: set where it is to end early; `run` then raises KeyboardInterrupt.
    """

    def __init__(self, args: argparse.Namespace, folder: Path, console: Console, stop: threading.Event) -> None:
        self.spec = RunSpec(
            run="demo", rounds=args.rounds, sync_every=args.sync_every, seed=args.seed, chunk_elems=CHUNK_ELEMS
        )
        size = args.rounds * args.sync_every * args.n_peers / (ROUNDS * SYNC_EVERY * 3)
        self.expected = Expected(args.rounds, max(1, args.rounds // 2), LIMIT_S * max(1.0, size))
        self.records: list[Record] = []
        self._n_peers, self._folder, self._out, self._console = args.n_peers, folder, args.out, console
        self._stop = stop
        self._children, self._feed, self._board = Children(), Feed(), Board()

    def __enter__(self) -> Demo:
        return self

    def __exit__(self, kind: object, error: object, at: object) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):  # type: ignore[arg-type]
            self._children.interrupt(GRACE_S)
        self._children.close()

    def run(self) -> float:
        """All of it; returns the seconds it took. What goes wrong stands in the records, and fails the verdict."""
        start_s = time.monotonic()
        self._prepare()
        title = f"{self._n_peers} peers, {self.spec.rounds} rounds of {self.spec.sync_every} inner steps"
        with Show(self._board, self._console, title) as self._show:
            try:
                self._swarm()
                self._alone()
            except Stuck as stuck:
                self._show.note(f"given up: {stuck}")
        return time.monotonic() - start_s

    def _prepare(self) -> None:
        """Everything that the peers read: RUN.toml and a key."""
        from dlc.comm.security import generate_run_key

        try:
            (self._out / "logs").mkdir(parents=True, exist_ok=True)
            (self._out / "RUN.toml").write_text(self.spec.to_toml(), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--out {self._out} cannot be written: {error.strerror or error}") from None
        self._key = self._folder / "run.key"
        self._key.touch(mode=0o600)
        self._key.write_text(generate_run_key() + "\n", encoding="ascii")

    def _swarm(self) -> None:
        names = [f"peer-{i + 1}" for i in range(self._n_peers)]
        addresses = dict(zip(names, free_addresses(self._n_peers), strict=True))
        config = ["--config", str(self._out / "RUN.toml")]
        for name in names:
            others = ",".join(address for other, address in addresses.items() if other != name)
            fault = ["--fault", f"kill-in-round={self.expected.kill_round}"] if name == names[0] else []
            role: Role = "victim" if name == names[0] else "peer"
            self._start(name, role, [*config, "--listen", addresses[name], "--peers", others, *fault])
        victim = self.records[0]
        self._watch(lambda: victim.exit_code is not None)
        self._show.note(f"{victim.name} ended: {exit_text(victim.exit_code)}, {victim.last('phase').get('phase')}")
        if victim.exit_code != -SIGKILL:
            raise Stuck(f"{victim.name} was to be killed in round {self.expected.kill_round}, and was not")
        self._show.note(f"a newcomer joins through {names[1]}, {addresses[names[1]]}")
        self._start("newcomer", "newcomer", ["--peers", addresses[names[1]]])
        newcomer = self.records[-1]

        def over() -> bool:
            if all(record.exit_code is not None for record in self.records if record.role == "peer"):
                if not newcomer.last("synced"):
                    raise Stuck("the run ended before the newcomer was in; give it more --rounds or --sync-every")
            return all(record.exit_code is not None for record in self.records)

        self._watch(over)

    def _alone(self) -> None:
        self._show.note("one peer alone, the same number of steps")
        self._start("alone", "alone", ["--config", str(self._out / "RUN.toml")])
        self._watch(lambda: self.records[-1].exit_code is not None)

    def _start(self, name: str, role: Role, options: list[str]) -> None:
        listen = [] if "--listen" in options else ["--listen", "127.0.0.1:0"]
        command = [sys.executable, "-P", "-m", "dlc", "join", "--json", *listen, *options]
        command += ["--key-file", str(self._key), "--state-dir", str(self._folder / name)]
        command += [
            "--device",
            "cpu",
            "--eval-every",
            str(max(1, self.spec.rounds // VALIDATIONS)),
            "--checkpoint-every",
            "0",
        ]
        stdout = self._children.start(name, command, self._out / "logs" / f"{name}.log", ONE_THREAD)
        self._board.add(name)
        self.records.append(Record(name, role))
        self._feed.attach(name, stdout)

    def _watch(self, until: Callable[[], bool]) -> None:
        """Take events until the condition holds. Raises Stuck if a process fails, or all are silent for too long, and
        KeyboardInterrupt where it is to end early."""
        heard_s = time.monotonic()
        while not until():
            if self._stop.is_set():
                raise KeyboardInterrupt
            item = self._feed.get(0.2)
            if item is not None:
                heard_s = item.at_s
                self._take(item)
            elif time.monotonic() - heard_s > SILENCE_MAX_S:
                raise Stuck(f"no event for {SILENCE_MAX_S:.0f} s; logs are in {self._out / 'logs'}")
            self._show.draw()

    def _take(self, item: Item) -> None:
        record = next(record for record in self.records if record.name == item.name)
        if item.event is not None:
            record.events.append(item.event)
            self._board.apply(item.name, item.event)
            self._tell(record, item.event)
            return
        record.exit_code = self._children.exit_code(item.name, WAIT_S)
        self._board.end(item.name, record.exit_code)
        if record.exit_code != 0 and record.role != "victim":
            log = self._out / "logs" / f"{item.name}.log"
            said = (_last_lines(log) or self._feed.stray(item.name) or ["nothing"])[-6:]
            raise Stuck("\n  ".join([f"{item.name} ended: {exit_text(record.exit_code)}; {log} says:", *said]))

    def _tell(self, record: Record, event: dict[str, Any]) -> None:
        """Note what a reader should not miss."""
        kind = event["event"]
        if kind == "round" and record.role == "peer" and event.get("t") == self.expected.kill_round:
            self._show.note(f"{record.name} finished round {event['t']}: {self._board.rows[record.name].report}")
        elif kind == "synced" and record.role == "newcomer":
            self._show.note(f"the newcomer has the model of round {event.get('t')}")
        elif kind == "end":
            loss, digest = loss_text(event.get("validation_loss")), str(event.get("digest"))[:12]
            self._show.note(f"{record.name} done: validation loss {loss}, digest {digest}")


def free_addresses(count: int) -> list[str]:
    """Loopback addresses whose port and the next are free now: all peers are told of them before any listens."""
    found: list[str] = []
    for port in random.Random(os.getpid()).sample(PORTS, len(PORTS)):
        if len(found) == count:
            break
        if all(map(_is_free, (port, port + 1))):
            found.append(f"127.0.0.1:{port}")
    return found


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _last_lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text("utf-8", "replace").splitlines() if line.strip()]
    except OSError:
        return []


def _check(args: argparse.Namespace) -> None:
    if not PEERS_MIN <= args.n_peers <= PEERS_MAX:
        raise UsageError(f"--n-peers must lie in {PEERS_MIN} to {PEERS_MAX}, got {args.n_peers}")
    if args.rounds < 2:
        raise UsageError(f"--rounds must be at least 2, to be killed in one and to join in another; got {args.rounds}")
    if args.sync_every < 1:
        raise UsageError(f"--sync-every must be at least 1 inner step, got {args.sync_every}")
