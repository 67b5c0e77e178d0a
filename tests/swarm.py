"""Swarms for tests: peers in this process, and peers in processes of their own, all over real sockets on loopback.

    swarm(n)    n `Peer`s of one run in this process, each with its own driver thread
    Process     any program that prints one JSON event per line; every wait on it has a deadline and a reason
    Host        starts `dlc join --json`, and workers; none outlives the test

`python -m tests.swarm SETTINGS` is a worker: one `Peer` that averages a small vector for ever.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dlc.comm.catalogue import CODES
from dlc.comm.framing import Envelope
from dlc.comm.ids import Voter
from dlc.comm.lanes import Incoming
from dlc.comm.messages import Hello, Welcome
from dlc.comm.security import LinkSecurity, generate_run_key
from dlc.comm.timeouts import Timeouts
from dlc.comm.transport import Transport
from dlc.comm.wire import pack, unpack
from dlc.errors import DlcError
from dlc.peer import Peer
from dlc.report import RoundReport
from tests.forked import AVAILABLE, Forked
from tests.helpers import interrupted_at, wait_until

ROOT = Path(__file__).resolve().parent.parent
JOIN_S = 180.0
DEADLINE_S = 300.0
"""Most of it is for importing torch and transformers on a busy machine."""
ROUND_S = 240.0
"""For a round of all: who comes late to it, since its machine did something else, has half of that."""
PATIENT = Timeouts(probe_s=1.5, beat_s=1.5, chunk_s=30.0, commit_s=30.0, slot_settle_s=0.3, straggler_floor_s=60.0)
"""For tests in which nobody fails: whom the machine does not run for ten seconds is not taken for dead, and no round
goes on without its work, its bytes or its vote. Only who comes later is not waited for, to be taken in together."""
QUICK = Timeouts(slot_settle_s=PATIENT.slot_settle_s)
"""The usual ones, but for that."""
WORKER_ROUND_S = 1200.0
"""A worker is patient: it waits for the others half as long before it averages alone."""
RUN = """\
run = "test"
sync_every = 4
rounds = {rounds}
[model.config]
model_type = "llama"
vocab_size = 256
hidden_size = 8
intermediate_size = 16
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 2
max_position_embeddings = 16
[timeouts]
probe_s = 1.0
chunk_s = 30.0
[data]
source = "{text}"
seq_len = 16
[inner]
batch_size = 2
warmup_steps = 2
"""
Event = dict[str, Any]


# ------------------------------------------------------------------ peers of this process


@contextmanager
def swarm(n: int, **options: object) -> Iterator[list[Peer]]:
    """n peers of one run, PATIENT ones if nothing else is said; those after the first join it together through it."""
    options = {"timeouts": PATIENT, **options}
    peers: list[Peer] = []
    try:
        peers.append(Peer.join(**options))  # type: ignore[arg-type]
        address = peers[0].address
        with ThreadPoolExecutor(max(1, n)) as pool:
            joins = [pool.submit(Peer.join, [address], join_timeout_s=JOIN_S, **options) for _ in range(n - 1)]
            peers += [join.result() for join in joins]
        yield peers
    finally:
        for peer in peers:
            peer.leave()


@contextmanager
def late_for_its_partner(limit_s: float) -> Iterator[tuple[Peer, Peer]]:
    """Two without a log: the first, which of a single chunk is the owner, gets no part of it from the second."""
    with swarm(2, log=False) as peers:
        wait_until(lambda: all(sum(m.alive for m in p.members()) == 2 for p in peers), limit_s, "both are up")
        owner, late = sorted(peers, key=lambda peer: peer.voter)
        owner.mesh.ask(lambda mesh, now: setattr(mesh.parcels, "receive_parcel", lambda sender, parcel: None))
        yield owner, late


def together(peers: Sequence[Peer], act: Callable[[Peer, int], RoundReport]) -> list[RoundReport]:
    """Every peer acts in a thread of its own, as separate processes would."""
    with ThreadPoolExecutor(len(peers)) as pool:
        return list(pool.map(act, peers, range(len(peers))))


_ports = itertools.count(21_000 + os.getpid() * 254 % 4000, 2)
"""Below the range from which systems give out free ports; for each test process from another one on."""


def free_addresses(n: int) -> list[str]:
    """Addresses nobody listens at; the port after each one is free too, for the bulk lane. No two calls give the same,
    in this or another test process: who was given an address may not have begun to listen yet, or may come again."""
    found: list[str] = []
    for port in itertools.takewhile(lambda port: port < 32_000, _ports):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for number in (port, port + 1):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", number))
            taken = stack.enter_context(socket.socket(type=socket.SOCK_DGRAM))
            taken.bind(("127.0.0.1", port))
            taken.detach()  # UDP, which no peer uses: it stays open until this process ends
            found.append(f"127.0.0.1:{port}")
        if len(found) == n:
            return found
    raise AssertionError("no free ports")


# ------------------------------------------------------------------ processes


class Process:
    """A program and the events it has told so far; its stderr goes to `log`. `-m MODULE` is forked where it can be."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._log = log
        env = {**os.environ, "DLC_KEY_FILE": ""}  # no key of the one who runs the tests
        self._child: Forked | subprocess.Popen[bytes]
        if AVAILABLE and command[0] == "-m":
            self._child = Forked(command[1], command[2:], log, env)
        else:
            with log.open("ab") as errors:
                pipe = subprocess.PIPE
                self._child = subprocess.Popen([sys.executable, *command], stdout=pipe, stderr=errors, env=env)
        self.events: list[Event] = []
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def event(self, name: str, where: Callable[[Event], object] = lambda event: True, **fields: Any) -> Event:
        """The first event that matches, waited for; what was told before counts too."""
        end, seen = time.monotonic() + DEADLINE_S, 0
        while True:
            for event in self.events[seen:]:
                if event["event"] == name and fields.items() <= event.items() and where(event):
                    return event
            seen = len(self.events)
            self._take(end, f"event {name} {fields}")

    def exit_code(self) -> int:
        end = time.monotonic() + DEADLINE_S
        with contextlib.suppress(EOFError):
            while True:
                self._take(end, "end of output")
        return self._child.wait(max(0.0, end - time.monotonic()))

    def told(self, name: str) -> list[Event]:
        """The events of that name that have come by now."""
        with contextlib.suppress(queue.Empty):
            while (line := self._lines.get_nowait()) is not None:
                self.events.append(json.loads(line))
            self._lines.put(None)
        return self.all(name)

    def _take(self, end: float, what: str) -> None:
        try:
            line = self._lines.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            raise AssertionError(f"no {what} within {DEADLINE_S:g} s\n{self.log()}") from None
        if line is None:
            self._lines.put(None)
            raise EOFError(f"ended without {what}\n{self.log()}")
        self.events.append(json.loads(line))

    @property
    def running(self) -> bool:
        return self._child.poll() is None

    def signal(self, number: int) -> None:
        self._child.send_signal(number)

    def kill(self) -> None:
        self._child.kill()
        self._child.wait(DEADLINE_S)

    def log(self) -> str:
        return self._log.read_text("utf-8", "replace")[-4000:]

    def all(self, name: str) -> list[Event]:
        return [event for event in self.events if event["event"] == name]


class Host:
    """Starts processes that do not outlive the test; each has a state directory of its name in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.text, self.key = folder / "text.txt", folder / "run.key"
        self.text.write_bytes(bytes(range(32, 127)) * 50)
        self.key.touch(mode=0o600)
        self.key.write_text(generate_run_key())
        self._started: list[Process] = []

    def config(self, rounds: int, impatient: bool = False) -> str:
        """`impatient`: those who are gone are waited for the shortest time that there is, not a minute."""
        path, table = self.folder / f"RUN-{rounds}.toml", RUN.format(rounds=rounds, text=self.text.as_posix())
        path.write_text(table.replace("probe_s = 1.0", "probe_s = 0.4\nevict_s = 24.0") if impatient else table)
        return str(path)

    def start(self, name: str, *words: str, launcher: Sequence[str] = ("-m",)) -> Process:
        """`dlc join`; `launcher`: what is said before the module's name."""
        return self._run(name, [*launcher, "dlc", "join", "--json", "--state-dir", str(self.folder / name), *words])

    def work(self, name: str, peers: Sequence[str], listen: str = "127.0.0.1:0", **timeouts: float) -> Process:
        """A worker."""
        settings = {"peers": peers, "listen": listen, "state_dir": str(self.folder / name), "timeouts": timeouts}
        return self._run(name, ["-m", "tests.swarm", json.dumps(settings)])

    def _run(self, name: str, command: list[str]) -> Process:
        self._started.append(Process(command, self.folder / f"{name}.log"))
        return self._started[-1]

    def close(self) -> None:
        for process in self._started:
            process.kill()


def work(settings: dict[str, Any]) -> None:
    """The worker: tells that it has a seat, and each round."""
    torch.set_num_threads(1)
    timeouts = Timeouts(**settings.pop("timeouts"))
    with Peer.join(settings.pop("peers"), timeouts=timeouts, join_timeout_s=JOIN_S, **settings) as peer:
        _tell("seated", peer=peer.id, inc=peer.voter.inc, address=peer.address)
        while True:
            try:
                report = peer.all_reduce(torch.zeros(8), timeout_s=WORKER_ROUND_S)
            except DlcError as error:
                _tell("closed", why=str(error))
                return
            _tell("round", **report.to_dict())


def _tell(name: str, **fields: Any) -> None:
    print(json.dumps({"event": name, **fields}), flush=True)


@contextmanager
def of_another_version(protocol: int, security: LinkSecurity | None = None) -> Iterator[str]:
    """Somebody at this address answers each HELLO in words of that protocol version."""
    listens, over = Transport("127.0.0.1:0", security=security, ident=b"other"), threading.Event()
    words = [pack(Envelope(protocol, bytes(8), Voter("", 1), CODES[Welcome])), b"of another shape"]

    def answer() -> None:
        while not over.is_set():
            for event in listens.poll(0.01):
                if isinstance(event, Incoming) and event.route is not None and _is_hello(event):
                    listens.reply(event.route, words)

    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(answer)
        try:
            yield f"127.0.0.1:{listens.control_port}"
        finally:
            over.set()
            answers.result()
            listens.close(0.0)


def _is_hello(event: Incoming) -> bool:
    return unpack(event.frames[0], Envelope).code == CODES[Hello]


if __name__ == "__main__":
    work(json.loads(sys.argv[1]))


def lines_interrupted(peer: Peer, call: Callable[[], object], tell: Callable[[], object]) -> int:
    """How many lines the call has, each of which was interrupted by Ctrl-C in turn. After each the driver thread does
    `tell`; AssertionError where it does not come to its end. The peer leaves."""
    at, interrupted = 0, True

    def told(said: queue.SimpleQueue[None]) -> None:
        tell()
        said.put(None)

    while interrupted:
        at += 1
        interrupted = interrupted_at(at, call)
        said = queue.SimpleQueue[None]()
        peer._driver.call(lambda now, said=said: told(said))
        try:
            said.get(timeout=JOIN_S)
        except queue.Empty:
            peer._closed = True  # to leave would take for ever
            raise AssertionError(f"the driver is stuck after an interruption at {at}") from None
    peer.leave()
    return at
