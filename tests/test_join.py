"""Real `dlc join` processes on loopback. Every wait has a deadline and a reason."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import shlex
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from dlc.cli import main
from dlc.cli.interrupt import Interrupts
from dlc.cli.join import join_swarm
from dlc.cli.observing import look_on
from dlc.cli.options import parser
from dlc.comm.security import generate_run_key
from dlc.errors import SpecMismatch
from dlc.joining import OtherSpec
from dlc.peer import Peer
from dlc.runspec import DataSpec, ModelSpec, RunSpec
from dlc.statedir import StateDir
from tests.helpers import wait_until
from tests.swarm import DEADLINE_S, Event, Host, Process, free_addresses
from tests.train.test_site import places


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path)
    yield host
    host.close()


def shared(one: Process, other: Process) -> list[tuple[Event, Event]]:
    """What both have told of the same round by now: who was not there at a round tells none."""
    mine, theirs = ({event["t"]: event for event in process.told("round")} for process in (one, other))
    return [(mine[t], theirs[t]) for t in sorted(mine.keys() & theirs.keys())]


def agree(one: Event, other: Event) -> bool:
    """Of one round: none is told the digest by a peer that had gone on to the next one already."""
    told = [event["digest"] for event in (one, other) if event["digest"]]
    return one["head"] == other["head"] and len(set(told)) < 2


def test_two_that_start_together_train_one_model_to_the_end(host: Host) -> None:
    rounds = 5  # on a busy machine one of them may be left out of the first ones, as too slow to be worth waiting for
    config, (one, two) = host.config(rounds=rounds), free_addresses(2)
    common = ["--config", config, "--key-file", str(host.key)]
    a = host.start("a", *common, "--listen", one, "--peers", two)
    b = host.start("b", *common, "--listen", two, "--peers", one)
    ends = [process.event("end") for process in (a, b)]
    assert [process.exit_code() for process in (a, b)] == [0, 0]
    assert [(end["reason"], end["t"]) for end in ends] == [("rounds", rounds)] * 2
    assert ends[0]["digest"] == ends[1]["digest"] != ""
    assert ends[0]["validation_loss"] == ends[1]["validation_loss"]
    ids = {a.event("started")["peer"], b.event("started")["peer"]}
    for round_a, round_b in shared(a, b):
        assert agree(round_a, round_b)
        named = {share["peer"] for share in round_a["contributors"]} | {lost["peer"] for lost in round_a["missing"]}
        assert named == ids
    assert any(len(event["contributors"]) == 2 for event, _ in shared(a, b))
    for end in ends:
        assert Path(end["model"], "model.safetensors").is_file() and Path(end["checkpoint"]).is_file()


def test_join_by_the_printed_line_leave_by_ctrl_c_and_resume(host: Host) -> None:
    config = host.config(rounds=0)
    founder = host.start("founder", "--config", config, "--key-file", str(host.key), "--listen", "127.0.0.1:0")
    line = shlex.split(founder.event("started")["join"])
    assert line[:3] == ["dlc", "join", "--peers"]
    founder.event("round", t=2)
    late = host.start("late", *line[2:])
    assert late.event("started")["run"] == "test" and late.event("synced")["t"] >= 2
    late.event("round", counted=True)
    wait_until(lambda: shared(founder, late), what="a round that both were in")
    assert all(agree(one, other) for one, other in shared(founder, late))

    founder.signal(signal.SIGINT)  # who founded it leaves; the other goes on alone
    left = founder.event("end")
    assert (left["reason"], left["validation_loss"], founder.exit_code()) == ("interrupted", None, 0)
    late.event("member", change="left")
    late.event("round", t=left["t"] + 3)
    late.signal(signal.SIGTERM)
    last = late.event("end")
    assert late.exit_code() == 0 and last["t"] > left["t"]

    alone = ["--key-file", str(host.key), "--listen", "127.0.0.1:0"]
    again = host.start("late", "--config", config, *alone, "--keep", "999")
    assert again.event("started")["peer"] == late.event("started")["peer"]
    assert again.event("synced")["t"] == last["t"]
    assert again.event("step")["t"] == last["t"]
    again.event("round", t=last["t"] + 1)
    again.signal(signal.SIGINT)
    assert again.exit_code() == 0

    older = host.start("late", "--resume", last["checkpoint"], *alone)  # what is trained stands in the checkpoint
    assert older.event("synced")["t"] == last["t"] < again.event("end")["t"]
    assert (host.folder / "late" / "checkpoints" / "old-1").is_dir()
    older.event("round", t=last["t"] + 1)
    older.signal(signal.SIGINT)
    assert older.exit_code() == 0


def test_an_observer_looks_on_is_an_address_to_join_by_and_holds_nothing_up(host: Host) -> None:
    key = ["--key-file", str(host.key)]
    founder = host.start("founder", "--config", host.config(rounds=0), *key, "--listen", "127.0.0.1:0")
    address = founder.event("started")["address"]
    observer = host.start("observer", "--role", "observer", "--peers", address, *key)
    seen = observer.event("looked_on")
    assert [share["peer"] for share in seen["contributors"]] == [founder.event("started")["peer"]]
    late = host.start("late", "--peers", observer.event("started")["address"], *key)
    late.event("round", counted=True)
    ids = {process.event("started")["peer"] for process in (founder, late)}
    observer.event("looked_on", lambda event: event["t"] > seen["t"])
    observer.signal(signal.SIGINT)
    assert observer.exit_code() == 0 and observer.event("end")["rounds"] >= 2
    last = observer.all("looked_on")[-1]["t"]
    after = founder.event("round", lambda event: event["t"] >= last + 2)
    assert {share["peer"] for share in after["contributors"]} <= ids
    alone = host.start("alone", "--role", "observer", "--found", *key)
    assert alone.exit_code() == 2 and "an observer founds no run" in alone.log()


@pytest.mark.parametrize(("strategy", "told"), [("gossip", True), ("moshpit", True), ("diloco", False)])
def test_an_observer_of_a_run_without_rounds_says_that_it_will_tell_of_none(
    strategy: str, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stop = threading.Event()
    stop.set()
    peer = cast(Peer, SimpleNamespace(spec=SimpleNamespace(strategy=strategy)))
    with caplog.at_level(logging.INFO, "dlc"):
        look_on(peer, queue.SimpleQueue(), stop, False, lambda take: None)
    assert (f'strategy = "{strategy}" has no log of rounds to look on at' in caplog.text) == told


def test_a_run_that_is_over_is_given_more_rounds(host: Host) -> None:
    """By its RUN.toml; who has none is told by who has."""
    at, key = free_addresses(2), ["--key-file", str(host.key)]
    three = ["--config", host.config(rounds=3, impatient=True), *key]
    both = [host.start(name, *three, "--listen", at[i], "--peers", at[1 - i]) for i, name in enumerate("ab")]
    assert [process.event("end")["t"] for process in both] == [3, 3]
    assert [process.exit_code() for process in both] == [0, 0]

    over = host.start("a", *three, "--found")
    assert over.exit_code() == 0 and not over.all("step")
    assert "the run has had its rounds: to train on, raise rounds in RUN.toml" in over.log()

    endless = host.config(rounds=0, impatient=True)
    a = host.start("a", "--config", endless, *key, "--listen", at[0], "--found")
    a.event("started")  # SIGINT would end one that is still importing
    b = host.start("b", *key, "--peers", at[0])
    b.event("round", counted=True)
    for process in (a, b):
        process.signal(signal.SIGINT)
    assert [process.exit_code() for process in (a, b)] == [0, 0]
    for process in (a, b):
        assert process.event("synced")["t"] >= 3 and process.event("step")["t"] >= 3
    said = (host.folder / "b.log").read_text()
    assert "going on from round 3" in said and "rounds: 0 now, 3 then" in said

    last = b.event("end")["t"]
    shorter = host.start("b", "--resume", str(host.folder / "b"), "--rounds", str(last - 1), *key)
    assert shorter.exit_code() == 2 and "is at or past the end of this run" in shorter.log()
    longer = host.start("b", "--resume", str(host.folder / "b"), "--rounds", str(last + 1), *key, "--found")
    assert longer.exit_code() == 0 and longer.event("end")["t"] == last + 1 and longer.event("step")["t"] == last


def test_an_observer_may_come_first_and_whoever_joins_by_it_begins_the_run(host: Host) -> None:
    key, (address,) = ["--key-file", str(host.key)], free_addresses(1)
    observer = host.start("observer", "--role", "observer", "--listen", address, *key)
    wait_until(lambda: f"whoever joins by {address} first begins it" in observer.log(), DEADLINE_S)
    trainers = [host.start(f"t{i}", "--config", host.config(rounds=0), "--peers", address, *key) for i in range(2)]
    ids = {trainer.event("started")["peer"] for trainer in trainers}
    assert observer.event("started")["address"] == address
    trainers[0].event("round", counted=True)
    trainers[1].event("round", counted=True)
    assert {share["peer"] for share in observer.event("looked_on")["contributors"]} <= ids


@pytest.mark.parametrize("words", [[], ["--config", "RUN.toml"], ["--resume", "checkpoint"]])
def test_rounds_alone_is_answered_by_the_run_s_length_and_not_by_all_that_differs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str]
) -> None:
    theirs = RunSpec(run="theirs", rounds=9, sync_every=7)

    def refused(*args: object, spec: RunSpec, **options: object) -> Peer:
        raise OtherSpec(spec, theirs)

    monkeypatch.setattr(Peer, "join", refused)
    args = parser(demo_wanted=False).parse_args(["join", "--peers", "127.0.0.1:1", "--rounds", "8", *words])
    args.key = None
    with contextlib.closing(StateDir(tmp_path)) as state, pytest.raises(SpecMismatch) as told:
        join_swarm(args, RunSpec(rounds=8), state, None, queue.SimpleQueue())
    alone = "the run 'theirs', which has rounds = 9: leave out --rounds" in str(told.value)
    assert alone == (not words) and ("sync_every" in str(told.value)) == bool(words)


def test_a_wrong_key_and_another_run_are_refused(host: Host) -> None:
    founder = host.start("founder", "--config", host.config(rounds=0), "--key-file", str(host.key))
    address = "127.0.0.1:" + founder.event("started")["address"].rpartition(":")[2]
    other_key = host.folder / "other.key"
    other_key.touch(mode=0o600)
    other_key.write_text(generate_run_key())
    stranger = host.start("stranger", "--peers", address, "--key-file", str(other_key))
    differs = host.start("differs", "--peers", address, "--key-file", str(host.key), "--config", host.config(rounds=7))
    assert stranger.exit_code() == 3 and "refused our run key" in stranger.log()
    assert differs.exit_code() == 3 and "rounds: 7 here, 0 there" in differs.log()
    assert "to give the run another length, stop all of its peers" in differs.log()
    assert not stranger.events and not differs.events


def test_nobody_is_told_to_join_a_run_whose_data_is_not_there(host: Host) -> None:
    config = Path(host.config(rounds=1))
    config.write_text(config.read_text().replace(host.text.as_posix(), (host.folder / "nowhere").as_posix()))
    peer = host.start("a", "--config", str(config))
    assert peer.exit_code() == 2
    assert "no data source at" in peer.log() and "others join with" not in peer.log()


@pytest.mark.parametrize("lacks", ["data", "model"])
def test_a_joiner_that_lacks_what_the_run_is_made_of_says_so_and_keeps_what_it_has(
    lacks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """It had told others to join, and was told to give another source, though the run's is what its peers have."""
    caplog.set_level("INFO")
    nowhere, state = str(tmp_path / "nowhere"), tmp_path / "state"
    data, model = DataSpec(source=nowhere), ModelSpec(kind="path", path=nowhere)
    spec = RunSpec(run="far", data=data) if lacks == "data" else RunSpec(run="far", model=model)
    kept = state / "checkpoints" / "0123456789ab" / "t-00000001.safetensors"
    kept.parent.mkdir(parents=True)
    kept.touch()
    words = ["join", "--state-dir", str(state), "--device", "cpu", "--resume", "never", "--peers"]
    with Peer.join(spec=spec, hold=True) as founder:
        assert main([*words, founder.address]) == 2
    what = "data source" if lacks == "data" else "model folder"
    said = capsys.readouterr().err
    assert f"the run 'far' cannot be trained here: no {what} at {nowhere}; " in said and os.getcwd() in said
    assert "others join with" not in caplog.text and kept.exists()


def test_the_second_signal_ends_the_process_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr("dlc.cli.interrupt.os._exit", ended.append)
    with Interrupts() as interrupts:
        interrupts.can_save = True
        signal.raise_signal(signal.SIGINT)
        assert interrupts.stop.is_set() and not ended
        signal.raise_signal(signal.SIGINT)
        assert ended == [130]
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        interrupts.holds = True
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_import_that_takes_ctrl_c_for_a_missing_package_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr("dlc.cli.interrupt.os._exit", ended.append)
    with Interrupts():  # nothing is held yet: the process ends, whoever would have caught an exception
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert ended == [130]
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts:
        interrupts.holds = True
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ModuleNotFoundError("could not import it") from None
    with pytest.raises(OSError), Interrupts() as interrupts:
        interrupts.can_save = True
        signal.raise_signal(signal.SIGINT)
        raise OSError("the disk is full")  # an error of saving stays one


@pytest.mark.parametrize("size", [1, 2], ids=["one process", "a site"])
def test_what_was_trained_is_saved_where_the_data_ends_in_rubbish(
    host: Host, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All went well until then, so this is no wrong option."""
    import datasets

    folder = host.folder / "rows"
    folder.mkdir()
    rows = [f"row {n} " * 200 for n in range(40)]
    for name in ("0.parquet", "1.parquet"):
        datasets.Dataset.from_dict({"text": rows}).to_parquet(str(folder / name))
    with (folder / "1.parquet").open("r+b") as file:  # its end, which lists what there is, stays as it was
        file.seek(4)
        file.write(b"rubbish" * 20)
    config = Path(host.config(rounds=0))
    said = f"source = {json.dumps(folder.as_posix())}\nstreaming = true\nshards = 1\nlease_blocks = 64"
    text = config.read_text().replace("batch_size = 2", "batch_size = 16")
    config.write_text(text.replace(f'source = "{host.text.as_posix()}"', said))
    started = []
    for rank, place in enumerate(places(size)):
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        started.append(host.start(str(rank), "--config", str(config), "--checkpoint-every", "0"))
    peer, *others = started
    end = peer.event("end")
    assert peer.exit_code() == 4
    assert not any(other.exit_code() or other.events for other in others)  # an end that rank 0 told them
    assert end["reason"] == "failed" and end["t"] > 9 and end["saved"] and "broke off in shard 0" in peer.log()
    assert Path(end["checkpoint"]).is_file() and Path(end["model"], "model.safetensors").is_file()
