"""Peers that come back: after a crash, a freeze, with another address, twice at once, or a whole swarm after a stop."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import queue
import select
import shutil
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from dlc.comm import driver, events
from dlc.comm.entries import LogState, SavedLog
from dlc.comm.health import LocalTime
from dlc.comm.ids import Voter
from dlc.comm.links import RETRY_MAX_S
from dlc.comm.log import HISTORY_ROUNDS_MAX
from dlc.comm.node import Node
from dlc.comm.security import generate_run_key
from dlc.comm.timeouts import Timeouts
from dlc.comm.view import View
from dlc.comm.wire import unpack
from dlc.errors import JoinError, StateDirBusy, SwarmClosed
from dlc.handles import Checkpoint, Resume
from dlc.peer import Peer
from dlc.report import RoundReport
from dlc.runspec import RunSpec
from dlc.sim.toy import ToyState
from dlc.train.saves import Saved, newest
from dlc.train.setup import model_of
from dlc.train.trainer import Summary, Trainer
from tests.helpers import wait_until
from tests.swarm import (
    DEADLINE_S,
    JOIN_S,
    PATIENT,
    ROUND_S,
    RUN,
    Host,
    Process,
    free_addresses,
    swarm,
    together,
)

EVICT_S = 600.0
"""What a restart must not wait for."""
SETTLE = Timeouts(slot_settle_s=0.3, evict_s=EVICT_S)
"""A death is found out soon; in one process, where all stand still together, nobody dies of a busy machine."""
CALM = dataclasses.replace(PATIENT, evict_s=EVICT_S)
"""Where no death is to be found out: a restart proves it."""
SHORT = Timeouts(slot_settle_s=0.3, probe_s=0.18, beat_s=0.5, evict_s=6.0)
"""An early eviction; nobody is taken for dead who only waits for a processor."""
SHORT_S = 300.0
"""Long enough for that one, however busy the machine is."""


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path)
    yield host
    host.close()


def voters(peer: Peer) -> set[Voter]:
    return peer._ask(lambda node, now: set(node.log.state.electorate))


def casting_vote(peer: Peer) -> str:
    return peer._ask(lambda node, now: node.log.state.rank0.peer)


def average(peer: Peer, timeout_s: float = ROUND_S) -> RoundReport:
    return peer.all_reduce(torch.zeros(8), timeout_s=timeout_s)


def names(report: RoundReport) -> set[str]:
    return {share.peer for share in report.contributors}


def average_until(peers: Sequence[Peer], ids: set[str]) -> list[RoundReport]:
    """Rounds of these, until one is of `ids`, which is told: a process that a busy machine stops for a while is dead
    meanwhile."""
    told: list[RoundReport] = []

    def whole() -> bool:
        told[:] = together(peers, lambda p, i: average(p))
        return all(names(r) == ids for r in told)

    wait_until(whole, what=f"a round of {ids}")
    return told


def crash(peer: Peer) -> None:
    """As SIGKILL would: nothing is announced, the sockets close, and the state directory is free."""
    peer._driver.stop(10.0)
    peer._intro.state.close()


class Asleep:
    """A peer whose driver thread does not run, as under SIGSTOP; leaving wakes it."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self._woken = threading.Event()
        peer._driver.call(lambda now: self._woken.wait())

    def wake(self) -> None:
        self._woken.set()

    def __enter__(self) -> Asleep:
        return self

    def __exit__(self, *error: object) -> None:
        self.wake()


class Doorbell:
    """Listens where nobody should call."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._sockets = [socket.create_server((host, int(port) + lane)) for lane in (0, 1)]
        for listener in self._sockets:
            listener.setblocking(False)

    def rung(self) -> bool:
        return bool(select.select(self._sockets, [], [], 0.0)[0])

    def __enter__(self) -> Doorbell:
        return self

    def __exit__(self, *error: object) -> None:
        for listener in self._sockets:
            listener.close()


class Theta(ToyState):
    """Eight parameters that a peer can train."""

    def __init__(self) -> None:
        super().__init__(8, 0)


def fields(timeouts: Timeouts) -> dict[str, float]:
    """For a worker, as a peer of this process has them."""
    return dataclasses.asdict(timeouts)


def copy_of_running(source: Path, target: Path) -> None:
    """A state directory as SIGKILL would leave it; its peer goes on, and old checkpoints vanish meanwhile."""

    def copy(file: str, to: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            shutil.copy2(file, to)

    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, copy_function=copy)


def seated(worker: Process) -> Voter:
    event = worker.event("seated")
    return Voter(event["peer"], event["inc"])


# ------------------------------------------------------------------ one peer


def test_after_sigkill_the_same_identity_is_a_voter_again_at_once(host: Host) -> None:
    """Of two peers one is killed and started again: even the other alone needs no eviction to go on."""
    (address,) = free_addresses(1)
    with Peer.join(timeouts=CALM) as peer:
        worker = host.work("w", [peer.address], address, **fields(CALM))
        before = seated(worker)
        assert names(average(peer)) == {peer.id, before.peer}
        worker.kill()
        worker = host.work("w", [peer.address], address, **fields(CALM))
        after = seated(worker)
        assert after.peer == before.peer and after.inc > before.inc
        wait_until(lambda: voters(peer) == {peer.voter, after}, EVICT_S / 2)
        assert names(average(peer)) == {peer.id, after.peer}


def test_a_crashed_peer_comes_back_at_another_address(tmp_path: Path) -> None:
    with swarm(2, timeouts=CALM) as (one, two):
        moved = Peer.join([one.address], state_dir=tmp_path, timeouts=CALM, join_timeout_s=JOIN_S)
        old_address, old_voter = moved.address, moved.voter
        crash(moved)
        with Peer.join([two.address], state_dir=tmp_path, timeouts=CALM, join_timeout_s=JOIN_S) as moved:
            assert moved.id == old_voter.peer and moved.address != old_address
            three = [one, two, moved]
            for peer in three:
                wait_until(lambda peer=peer: voters(peer) == {p.voter for p in three}, EVICT_S / 2)
            known = {m.id: m.address for m in one.members()}
            assert known[moved.id] == moved.address
            reports = together(three, lambda p, i: average(p))
            assert all(r.complete and len(r.contributors) == 3 for r in reports)


def test_a_frozen_process_takes_part_again(host: Host) -> None:
    """SIGSTOP for longer than T_dead and shorter than T_gap."""
    heard: queue.SimpleQueue[object] = queue.SimpleQueue()
    with Peer.join(timeouts=SETTLE, on_event=heard.put) as one:
        with Peer.join([one.address], timeouts=SETTLE, join_timeout_s=JOIN_S) as two:
            worker = host.work("w", [one.address], **fields(SETTLE))
            frozen = seated(worker)
            worker.signal(signal.SIGSTOP)

            def told(kind: type) -> bool:
                while not heard.empty():
                    event = heard.get()
                    if isinstance(event, kind) and event.voter == frozen:  # type: ignore[attr-defined]
                        return True
                return False

            wait_until(lambda: told(events.MemberDown), EVICT_S / 4)
            reports = together([one, two], lambda p, i: average(p))
            assert all(names(r) == {one.id, two.id} for r in reports), "the others did not wait for it"
            worker.signal(signal.SIGCONT)
            wait_until(lambda: told(events.MemberUp), EVICT_S / 4)
            wait_until(lambda: frozen in voters(one), EVICT_S / 2)
            average_until([one, two], {one.id, two.id, frozen.peer})


def test_who_slept_through_its_eviction_and_the_history_comes_back_as_itself() -> None:
    """Asleep for longer than T_evict, in which the others had more rounds than they keep; no part of it is lost."""
    with swarm(3, timeouts=SHORT) as peers, Asleep(peers[2]) as asleep:
        voter, (one, two) = asleep.peer.voter, peers[:2]
        wait_until(lambda: voter not in voters(one) and voter not in voters(two), SHORT_S)
        began = driver.clock()
        rounds = 0
        while rounds <= HISTORY_ROUNDS_MAX or driver.clock() < began + SHORT.t_evict_s(3, 1.0):
            assert driver.clock() < began + SHORT_S, f"{rounds} rounds of both"
            reports = together([one, two], lambda p, i: average(p))
            for report in reports:
                assert report.contributors and asleep.peer.id not in names(report), str(report.to_dict())
            rounds += all(names(report) == {one.id, two.id} for report in reports)  # else one was taken for dead
        asleep.wake()
        for peer in peers:
            wait_until(lambda peer=peer: voters(peer) == {p.voter for p in peers}, EVICT_S / 2)
        reports = average_until(peers, {p.id for p in peers})
        assert all(r.complete for r in reports), str([r.to_dict() for r in reports])
        assert asleep.peer.voter == voter and len({r.head for r in reports}) == 1


def test_nobody_dials_the_address_that_a_peer_has_left_behind(tmp_path: Path) -> None:
    """It moves; those who knew it, and one who was given that address to join by, find it at the new one only."""
    (old,) = free_addresses(1)
    with Peer.join(timeouts=CALM) as one:
        moved = Peer.join([one.address], listen=old, state_dir=tmp_path, timeouts=CALM, join_timeout_s=JOIN_S)
        with Peer.join([old], timeouts=CALM, join_timeout_s=JOIN_S) as two:
            assert all(r.complete for r in together([one, two, moved], lambda p, i: average(p)))
            crash(moved)
            with Doorbell(old) as doorbell:
                wait_until(doorbell.rung, what="somebody looks for it where it was")
            with Peer.join([one.address], state_dir=tmp_path, timeouts=CALM, join_timeout_s=JOIN_S) as moved:
                assert moved.address != old
                three = [one, two, moved]
                for peer in three:
                    wait_until(lambda peer=peer: voters(peer) == {p.voter for p in three}, EVICT_S / 2)
                with Doorbell(old) as doorbell:
                    end = driver.clock() + 2 * RETRY_MAX_S
                    while driver.clock() < end:
                        assert all(r.complete for r in together(three, lambda p, i: average(p)))
                    assert not doorbell.rung()


# ------------------------------------------------------------------ one identity twice


def test_a_second_process_with_the_state_directory_is_refused(host: Host) -> None:
    folder = host.folder / "shared"
    with Peer.join(state_dir=folder):
        with pytest.raises(StateDirBusy, match=str(folder)):
            Peer.join(state_dir=folder)
        second = host.start("shared", "--config", host.config(1), "--key-file", str(host.key))
        assert second.exit_code() == 2
        assert str(folder) in second.log() and "another process" in second.log()
        assert not second.events


def test_of_two_copies_the_greater_incarnation_stays(tmp_path: Path) -> None:
    """The older one's waiting and later calls raise SwarmClosed, and say why."""
    with swarm(2, timeouts=CALM) as (one, two), ThreadPoolExecutor(1) as pool:
        first = Peer.join([one.address], state_dir=tmp_path / "a", timeouts=CALM, join_timeout_s=JOIN_S)
        waiting = pool.submit(average, first)
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        copy = Peer.join([two.address], state_dir=tmp_path / "b", timeouts=CALM, join_timeout_s=JOIN_S)
        with copy:
            assert copy.id == first.id and copy.voter > first.voter
            with pytest.raises(SwarmClosed, match="this peer's identity is newer"):
                waiting.result(JOIN_S)
            for call in (first.members, lambda: average(first), lambda: first.position("default")):
                with pytest.raises(SwarmClosed, match="this peer's identity is newer"):
                    call()
            first.leave()
            three = [one, two, copy]
            for peer in three:
                wait_until(lambda peer=peer: voters(peer) == {p.voter for p in three}, EVICT_S / 2)
            assert all(r.complete for r in together(three, lambda p, i: average(p)))


def test_a_copy_that_slept_while_a_newer_one_started_stops_and_harms_nobody(tmp_path: Path) -> None:
    """It wakes with votes and a contribution on its hands; the newer one stays a voter through it all."""
    with swarm(2, timeouts=CALM) as (one, two), ThreadPoolExecutor(1) as pool:
        first = Peer.join([one.address], state_dir=tmp_path / "a", timeouts=CALM, join_timeout_s=JOIN_S)
        waiting = pool.submit(average, first)
        with Asleep(first) as asleep:
            shutil.copytree(tmp_path / "a", tmp_path / "b")
            with Peer.join([two.address], state_dir=tmp_path / "b", timeouts=CALM, join_timeout_s=JOIN_S) as copy:
                three = [one, two, copy]
                for peer in three:
                    wait_until(lambda peer=peer: voters(peer) == {p.voter for p in three}, EVICT_S / 2)
                asleep.wake()
                with pytest.raises(SwarmClosed, match="this peer's identity is newer"):
                    waiting.result(JOIN_S)
                first.leave()
                for _ in range(3):
                    reports = together(three, lambda p, i: average(p))
                    assert all(r.complete and names(r) == {p.id for p in three} for r in reports)
                assert all(voters(peer) == {p.voter for p in three} for peer in three)


def test_dlc_join_ends_with_one_clear_line_when_a_copy_replaces_it(host: Host) -> None:
    older = host.start("a", "--config", host.config(0), "--key-file", str(host.key), "--listen", "127.0.0.1:0")
    started = older.event("started")
    older.event("round", t=1)
    copy_of_running(host.folder / "a", host.folder / "b")
    copy = Peer.join([started["address"]], key=host.key, state_dir=host.folder / "b", hold=True, join_timeout_s=JOIN_S)
    with copy:
        assert copy.id == started["peer"]
        assert older.exit_code() == 4
        lines = [line for line in older.log().splitlines() if "identity" in line]
        assert len(lines) == 1 and lines[0].startswith("dlc join: another process with this peer's identity")
        assert "Traceback" not in older.log()


# ------------------------------------------------------------------ two runs, one key


def train_alone(peer: Peer, rounds: int) -> None:
    """Open the channel and commit this many rounds of 100 tokens."""
    peer.open("train", Theta(), codec="fp32", chunk_elems=4, timeout_s=JOIN_S)
    for _ in range(rounds):
        report = peer.contribute("train", torch.ones(8), weight=100.0).wait(JOIN_S)
        assert report is not None and names(report) == {peer.id}


def train_together(peer: Peer, number: int) -> RoundReport:
    report = peer.contribute("train", torch.ones(8), weight=100.0, patience_s=JOIN_S).wait(ROUND_S)
    assert report is not None
    return report


def test_two_runs_founded_apart_with_one_key_become_one(tmp_path: Path) -> None:
    """They meet through a third peer. The one with more tokens stays as it is; the other says what it has lost."""
    key = tmp_path / "run.key"
    key.touch(mode=0o600)
    key.write_text(generate_run_key())
    heard: queue.SimpleQueue[object] = queue.SimpleQueue()
    with (
        Peer.join(key=key, timeouts=SETTLE) as greater,
        Peer.join(key=key, timeouts=SETTLE, on_event=heard.put) as lesser,
    ):
        train_alone(greater, 4)
        train_alone(lesser, 2)
        before = greater.position("train")
        both = [greater.address, lesser.address]
        with Peer.join(both, key=key, timeouts=SETTLE, hold=True) as third:
            third.open("train", Theta(), codec="fp32", chunk_elems=4, timeout_s=JOIN_S)
            three = [greater, lesser, third]
            for peer in three:
                wait_until(lambda peer=peer: voters(peer) == {p.voter for p in three}, JOIN_S)
            wait_until(lambda: len({peer.position("train").digest for peer in three}) == 1, JOIN_S)
            after = lesser.position("train")
            assert after.t == before.t == 4 and after.tokens == 400.0 and after.digest == before.digest
            reports = together(three, train_together)
            assert len({r.head for r in reports}) == 1 and all(names(r) == {p.id for p in three} for r in reports)
    told = [event for event in drained(heard) if isinstance(event, events.HistoryLost)]
    assert len(told) == 1, "it is told once"
    assert (told[0].rounds, told[0].tokens) == (2, 200.0)


def test_what_a_run_gives_up_to_one_that_was_resumed_from_a_later_checkpoint_is_told(tmp_path: Path) -> None:
    """Who has just resumed still knows the way to where it stands, and so the other where they parted.

    The voters of the checkpoints never come back, so each goes on once they are given up.
    """
    key = tmp_path / "run.key"
    key.touch(mode=0o600)
    key.write_text(generate_run_key())
    saved: dict[int, Checkpoint] = {}
    with Peer.join(key=key, timeouts=SHORT) as first:
        first.open("train", Theta(), codec="fp32", chunk_elems=4, timeout_s=JOIN_S)
        for t in range(1, 6):
            report = first.contribute("train", torch.ones(8), weight=100.0).wait(JOIN_S)
            assert report is not None
            saved[t] = first.checkpoint("train")

    def resumed(t: int, heard: queue.SimpleQueue[object]) -> Peer:
        peer = Peer.join(key=key, timeouts=SHORT, found=True, resume=Resume(saved[t].log), on_event=heard.put)
        theta = Theta()
        theta.restore(saved[t].image)
        peer.open("train", theta, codec="fp32", chunk_elems=4, timeout_s=JOIN_S)
        assert peer.position("train").t == t
        return peer

    heard = {t: queue.SimpleQueue[object]() for t in (2, 5)}
    with resumed(5, heard[5]) as later, resumed(2, heard[2]) as earlier:
        report = earlier.contribute("train", torch.ones(8), weight=100.0).wait(JOIN_S)
        assert report is not None and earlier.position("train").t == 3
        with Peer.join([later.address, earlier.address], key=key, timeouts=SHORT, hold=True):
            wait_until(lambda: earlier.position("train").t == 5, JOIN_S)
            assert earlier.position("train").digest == later.position("train").digest
    told = {t: [e for e in drained(events_of) if isinstance(e, events.HistoryLost)] for t, events_of in heard.items()}
    assert [(e.rounds, e.tokens) for e in told[2]] == [(1, 100.0)] and not told[5]


def drained(heard: queue.SimpleQueue[object]) -> list[object]:
    return [heard.get() for _ in range(heard.qsize())]


# ------------------------------------------------------------------ two peers, one lost


Heard = queue.SimpleQueue[object]


@contextmanager
def pair(host: Host, timeouts: Timeouts, survivor_casts: bool) -> Iterator[tuple[Peer, Process, Heard]]:
    """This process's peer and a worker, after a round that gave the casting vote as asked."""
    heard = Heard()
    with Peer.join(timeouts=timeouts, on_event=heard.put) as peer:
        worker = host.work("w", [peer.address], **fields(timeouts))
        both = {peer.id, seated(worker).peer}
        wait_until(lambda: names(average(peer)) == both and (casting_vote(peer) == peer.id) == survivor_casts)
        yield peer, worker, heard


def test_the_survivor_with_the_casting_vote_goes_on_alone(host: Host) -> None:
    with pair(host, SETTLE, survivor_casts=True) as (peer, worker, _):
        worker.kill()
        report = average(peer, EVICT_S / 2)
        assert names(report) == {peer.id}
        assert [m.reason for m in report.missing] == ["dead"]
        for _ in range(4):  # no round of its own may give the casting vote away to the dead
            assert names(average(peer, EVICT_S / 4)) == {peer.id}
        assert voters(peer) == {peer.voter}


def test_the_survivor_without_it_counts_down_and_goes_on(
    host: Host, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalTime, "worse", lambda self: None)  # T_evict of a peer that is slow itself grows meanwhile
    with pair(host, SHORT, survivor_casts=False) as (peer, worker, heard):
        worker.kill()
        while not heard.empty():
            heard.get()
        caplog.clear()
        lost = worker.event("seated")["peer"]
        report = average(peer)
        assert names(report) == {peer.id}
        told = []
        while not heard.empty():
            event = heard.get()
            if isinstance(event, events.Waiting):
                told.append(event)
        left = [event.left_s for event in told]
        assert len(left) >= 2 and None not in left, "it counts down"
        assert left == sorted(left, reverse=True) and len(set(left)) == len(left)  # type: ignore[type-var]
        assert all(event.peers == (lost,) for event in told)
        lines = [
            r.getMessage()
            for r in caplog.records
            if r.getMessage().startswith("waiting: ") and lost[:8] in r.getMessage()
        ]
        assert len(lines) == len(told) and f"in {left[0]:.0f} s" in lines[0]


# ------------------------------------------------------------------ a whole swarm


class Training:
    """What `dlc join` does, in a thread: join, go on from the newest checkpoint, train until stopped, save."""

    running: ClassVar[list[Training]] = []

    def __init__(self, folder: Path, spec: RunSpec, listen: str, peers: Sequence[str]) -> None:
        self.folder, self.spec = folder, spec
        self.stop = threading.Event()
        self.t = -1
        self.trained_from = -1
        """The round of the state that its first round went on from: the last one that it was given before that."""
        self.summary: Summary | None = None
        self.error: BaseException | None = None
        self._where = (listen, peers)
        self._thread = threading.Thread(target=self._run, daemon=True)
        Training.running.append(self)
        self._thread.start()

    def _run(self) -> None:
        listen, peers = self._where
        saved, heard = newest(self.folder, self.spec), queue.SimpleQueue[object]()
        try:
            with Peer.join(
                peers,
                spec=self.spec,
                listen=listen,
                state_dir=self.folder,
                hold=True,
                resume=None if saved is None else Resume(saved.log),
                on_event=heard.put,
                timeouts=SHORT,  # those that stopped last are not here: they must be evicted first
            ) as peer:
                trainer = Trainer(
                    peer, self.folder, on_event=self._told, peer_events=heard, resume=saved, eval_blocks=1
                )
                self.summary = trainer.run(self.stop)
        except BaseException as error:
            self.error = error

    def _told(self, event: dict[str, object]) -> None:
        if event["event"] == "synced" and self.t < 0:
            self.trained_from = int(str(event["t"]))
        if event["event"] == "round":
            self.t = int(str(event["t"]))

    def reach(self, t: int) -> None:
        wait_until(lambda: self.t >= t or self.error is not None, DEADLINE_S, f"round {t}")
        assert self.error is None, self.error

    def end(self) -> Saved:
        """As Ctrl-C does."""
        self.stop.set()
        self._thread.join(DEADLINE_S)
        assert self.summary is not None and self.summary.reason == "interrupted", self.error
        saved = newest(self.folder, self.spec)
        assert saved is not None and saved.t == self.summary.t
        return saved


@pytest.fixture(autouse=True)
def nothing_trains_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test that failed in the middle leaves no trainer to the tests after it. Those that train end by the model and
    the checkpoint of one round, though rounds take no longer than a busy machine needs to take both."""
    monkeypatch.setattr("dlc.train.trainer.LAST_TRIES", 10**6)
    yield
    while Training.running:
        training = Training.running.pop()
        training.stop.set()
        training._thread.join(DEADLINE_S)
        assert not training._thread.is_alive()


def log_of(saved: Saved) -> LogState:
    return unpack(saved.log, SavedLog).state


def trained_once(saved: Saved) -> int:
    """The blocks that are committed; each was counted once, since the tokens of all rounds are theirs."""
    state = log_of(saved)
    ledger = state.ledger
    open_blocks = sum(r.hi - r.lo for r in ledger.pool) + sum(lease.blocks for lease in ledger.leases)
    committed = ledger.next - open_blocks
    assert state.tokens == committed * saved.spec.data.seq_len
    return committed


def test_a_stopped_swarm_goes_on_from_the_newest_state_with_other_peers(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(32, 127)) * 50)
    config = tmp_path / "RUN.toml"
    config.write_text(RUN.format(rounds=0, text=text.as_posix()))
    spec = RunSpec.from_toml(config)
    model_of(spec)  # transformers cannot be imported by several threads at once
    at = dict(zip("abcd", free_addresses(4), strict=True))

    def start(*who: str) -> dict[str, Training]:
        return {w: Training(tmp_path / w, spec, at[w], [at[other] for other in who if other != w]) for w in who}

    first = start("a", "b", "c")
    for training in first.values():
        training.reach(2)
    old = first["a"].end()  # it leaves; the others go on, and are stopped later
    for who in "bc":
        first[who].reach(old.t + 3)
    new, newest_c = first["b"].end(), first["c"].end()
    assert old.t < min(new.t, newest_c.t)
    for saved in (old, new, newest_c):
        trained_once(saved)

    again = start("a", "b", "d")  # one with an old state, one with a new one, one without; one is missing
    for training in again.values():
        training.reach(new.t + 3)
    # Nobody went on from the older state, or from none; who was late for the first round, from that round's.
    assert min(training.trained_from for training in again.values()) == new.t
    ends = [training.end() for training in again.values()]
    assert all(saved.t >= new.t + 3 for saved in ends)
    assert all(trained_once(saved) > trained_once(new) for saved in ends)
    same = {saved.t: saved.image.tobytes() for saved in ends}
    assert all(saved.image.tobytes() == same[saved.t] for saved in ends)


@pytest.mark.parametrize("how", ["stopped", "killed", "moved"])
def test_a_swarm_restarted_all_at_once_finds_itself_by_its_address_books(tmp_path: Path, how: str) -> None:
    """Nobody is given an address. Killed: each waits for the two others. Stopped one by one: the last one, which saw
    the others leave, goes on, and they find it. Moved: killed, and two come back at other addresses, to the one that
    looks for them where they were. One run each time, from the newest of their states."""
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(32, 127)) * 50)
    config = tmp_path / "RUN.toml"
    config.write_text(RUN.format(rounds=0, text=text.as_posix()))
    spec = RunSpec.from_toml(config)
    model_of(spec)
    at = dict(zip("abc", free_addresses(3), strict=True))
    first = {w: Training(tmp_path / w, spec, at[w], [at[other] for other in at if other != w]) for w in at}
    for training in first.values():
        training.reach(2)
    folders = {w: tmp_path / w for w in at}
    if how != "stopped":
        for w in at:
            folders[w] = tmp_path / "disk" / w
            wait_until(lambda w=w: copy_of_running(tmp_path / w, folders[w]) or newest(folders[w], spec) is not None)
    for training in first.values():
        training.end()
    saved = [found.t for w in at if (found := newest(folders[w], spec)) is not None]
    assert len(saved) == 3

    again = {"a": Training(folders["a"], spec, at["a"], ())}
    now = dict(zip("bc", free_addresses(2), strict=True)) if how == "moved" else at
    again |= {w: Training(folders[w], spec, now[w], [at["a"]] if how == "moved" else ()) for w in "bc"}
    for training in again.values():
        training.reach(max(saved) + 2)
    ends = [training.end() for training in again.values()]
    assert all(trained_once(end) for end in ends)
    # Who is late for the first rounds goes on from any later state, and nobody from an older one.
    assert min(training.trained_from for training in again.values()) >= max(saved)
    same = {end.t: end.image.tobytes() for end in ends}
    assert all(end.image.tobytes() == same[end.t] for end in ends)


def test_a_restart_does_not_wait_for_those_without_whom_the_run_had_gone_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of weeks there are many that were killed and never came back, and onlookers, who begin no run anyway. Once it was
    only --found that did not wait for each of them, for ever; later a host that was slow as it left waited for those of
    the last minutes. They are dialled all the same."""
    here, options = tmp_path / "a", {"codec": "fp32", "chunk_elems": 8}
    at = free_addresses(1)[0]
    with Peer.join(timeouts=SHORT, state_dir=here, listen=at) as peer:
        peer.open("train", ToyState(8, 0), timeout_s=ROUND_S, **options)  # type: ignore[arg-type]
        onlooker = Peer.join([peer.address], role="observer", timeouts=SHORT, join_timeout_s=JOIN_S)
        lost = Peer.join([peer.address], role="helper", timeouts=SHORT, join_timeout_s=JOIN_S)
        at_lost = lost.address
        for gone in (lost, onlooker):
            gone._driver.stop(JOIN_S)  # without a word
        monkeypatch.setattr(LocalTime, "worse", lambda self: None)  # T_evict of a peer that is slow itself grows

        def gone_on(node: Node, now: float) -> bool:
            return node.members.unseen_s(lost.voter) >= node.members.t_evict_s

        wait_until(lambda: peer._ask(gone_on), SHORT_S)
        assert peer.contribute("train", torch.ones(8), weight=1.0).wait(SHORT_S) is not None
        saved = peer.checkpoint("train")
        assert saved.t == 1
        monkeypatch.setattr(View, "t_evict_s", EVICT_S)  # it is slow itself, and gives all others longer
    monkeypatch.undo()
    for gone in (lost, onlooker):
        gone.leave()
    resumed = Peer.join(timeouts=SHORT, state_dir=here, resume=Resume(saved.log), join_timeout_s=SHORT_S, listen=at)
    with resumed as peer:
        assert voters(peer) == {peer.voter} and at_lost in peer._ask(lambda node, now: node.config.known)


def test_who_comes_as_a_run_ends_and_finds_nobody_with_its_state_is_told() -> None:
    spec, options = RunSpec(rounds=1), {"codec": "fp32", "chunk_elems": 8}
    with Peer.join(spec=spec, timeouts=SHORT) as first:
        first.open("train", ToyState(8, 0), timeout_s=ROUND_S, **options)  # type: ignore[arg-type]
        with Peer.join([first.address], timeouts=SHORT, join_timeout_s=JOIN_S) as late:
            round_ = first.contribute("train", torch.ones(8), weight=1.0)
            assert round_.wait(ROUND_S) is not None and spec.over(first.position("train").t, 0.0)
            wait_until(lambda: late.position("train").t == 1)
            first.leave()
            with pytest.raises(JoinError, match="the run has ended, and everybody who has its model has left"):
                late.open("train", ToyState(8, 0), timeout_s=SHORT_S, **options)  # type: ignore[arg-type]


def test_a_stream_with_deadlines_is_trained_once_though_a_peer_dies(host: Host) -> None:
    """Each makes as many steps as it can, so where its lease is cut off is another place in each round."""
    folder = host.folder / "rows"
    folder.mkdir()
    for part in range(2):
        lines = [json.dumps({"text": f"row {n} of part {part} " * 4}) for n in range(200)]
        (folder / f"{part}.jsonl").write_text("\n".join(lines))
    config = Path(host.config(rounds=0, impatient=True))
    by_time = 'sync_mode = "deadline"\nround_s = 0.3\nrounds = 0'
    stream = f"source = {json.dumps(folder.as_posix())}\nstreaming = true\nshards = 2"
    text = config.read_text().replace("rounds = 0", by_time)
    config.write_text(text.replace(f'source = "{host.text.as_posix()}"', stream))
    spec, addresses = RunSpec.from_toml(config), free_addresses(3)
    words = ("--config", str(config), "--device", "cpu", "--no-probe", "--peers", ",".join(addresses))
    *rest, dying = [host.start(str(i), *words, "--listen", addresses[i]) for i in range(3)]
    dying.event("round", lambda event: event["counted"] and event["t"] >= 3)
    dying.kill()
    died = max(event["t"] for process in (*rest, dying) for event in process.told("round"))
    lacked = rest[0].event("round", lambda event: event["t"] > died and len(event["contributors"]) == 2)["t"]
    for process in rest:
        process.event("round", lambda event: event["t"] > lacked + 3)
        process.signal(signal.SIGINT)
    assert [process.exit_code() for process in rest] == [0, 0]
    for i in range(2):
        saved = newest(host.folder / str(i), spec)
        assert saved is not None and saved.t > lacked + 2
        blocks = trained_once(saved)
        assert blocks > 0 and blocks % spec.inner.batch_size == 0 and log_of(saved).ledger.sound
