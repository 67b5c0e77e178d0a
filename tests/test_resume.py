"""A peer that goes on from a checkpoint: from the one that was asked for, and as if it had never stopped.

One peer alone in its run, over a real log and real leases. Its model has dropout, so that the random state matters.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import queue
import shutil
import socket
import stat
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dlc.cli import main
from dlc.cli.join import join_swarm
from dlc.cli.options import parser
from dlc.comm.entries import SavedLog
from dlc.comm.wire import unpack
from dlc.errors import CheckpointError, ConfigError, NoRoom, RoundTimeout
from dlc.handles import Pending
from dlc.peer import Peer, Resume
from dlc.report import RoundReport
from dlc.runspec import DataSpec, InnerSpec, ModelSpec, OuterSpec, RunSpec, TimeoutsSpec
from dlc.statedir import StateDir
from dlc.train import checkpoint, phases, saver, saves, trainer
from dlc.train.outer_loop import OuterLoop
from dlc.train.saves import Saved
from dlc.train.setup import schedule_of
from dlc.train.shelf import list_checkpoints
from dlc.train.trainer import Summary, Trainer

ROUNDS, AT, H = 5, 2, 3
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 256,
    "n_positions": 16,
    "n_embd": 8,
    "n_layer": 1,
    "n_head": 2,
    "resid_pdrop": 0.2,
    "embd_pdrop": 0.2,
    "attn_pdrop": 0.2,
}
Event = dict[str, Any]


@pytest.fixture(autouse=True)
def rounds_alone_have_no_steps_beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a round takes longer than usual, steps go on: on a busy machine, at moments that no two runs share."""
    monkeypatch.setattr(phases, "PATIENCE_S_MIN", 60.0)


def spec_in(folder: Path, codec: str = "int4") -> RunSpec:
    text = folder / "text.txt"
    text.write_bytes(bytes(range(32, 127)) * 40)
    return RunSpec(
        rounds=ROUNDS,
        sync_every=H,
        codec=codec,
        model=ModelSpec(config=GPT2),
        data=DataSpec(source=str(text), seq_len=16),
        inner=InnerSpec(batch_size=2, warmup_steps=4),
    )


def train(
    folder: Path,
    spec: RunSpec,
    saved: Saved | None = None,
    stop_at: tuple[int, int] | None = None,
    **options: Any,
) -> tuple[list[Event], Summary]:
    """As `dlc join` does; the step events and the end. stop_at: as by Ctrl-C, after which round and inner step."""
    events, heard, stop = list[Event](), queue.SimpleQueue[object](), threading.Event()

    def take(event: Event) -> None:
        events.append(event)
        if event["event"] == "round":
            trainer._saver.finish()  # these rounds are shorter than a write, and while one is written none is begun
        if event["event"] == "step" and (event["t"], event["inner"]) == stop_at:
            stop.set()

    resume = None if saved is None else Resume(saved.log)
    with Peer.join(spec=spec, state_dir=folder, hold=True, resume=resume, on_event=heard.put) as peer:
        trainer = Trainer(
            peer,
            folder,
            device="cpu",
            on_event=take,
            peer_events=heard,
            resume=saved,
            eval_blocks=2,
            checkpoint_every=1,
            keep=2 * ROUNDS,
            **options,
        )
        summary = trainer.run(stop)
    return [event for event in events if event["event"] == "step"], summary


def losses(steps: list[Event], since: int = 0) -> list[tuple[int, float, float]]:
    return [(step["step"], step["loss"], step["lr"]) for step in steps if step["t"] >= since]


def named(folder: Path, spec: RunSpec, t: int) -> Path:
    return saves.folder_of(folder, spec) / saves.name_of(t)


def test_who_resumes_at_a_rounds_end_has_the_same_loss_curve_bit_for_bit(tmp_path: Path) -> None:
    spec = spec_in(tmp_path)
    whole, end = train(tmp_path / "a", spec)
    assert [step["step"] for step in whole] == list(range(ROUNDS * H))
    saved = saves.chosen(named(tmp_path / "a", spec, AT), spec)
    for copy in ("b", "c"):
        shutil.copytree(tmp_path / "a", tmp_path / copy)
    resumed, same_end = train(tmp_path / "b", spec, saved)
    assert losses(resumed) == losses(whole, since=AT) and len(resumed) == (ROUNDS - AT) * H
    assert (same_end.digest, same_end.tokens) == (end.digest, end.tokens)
    assert same_end.validation_loss == end.validation_loss

    saved = saves.read(named(tmp_path / "c", spec, AT))  # the image before was the state's memory
    without, _ = train(tmp_path / "c", spec, dataclasses.replace(saved, rng={}))
    assert losses(without) != losses(whole, since=AT), "the random state plays no part: the test proves nothing"


def test_what_other_fragments_have_not_exchanged_is_resumed_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not by another peer, nor where the swarm went on. A run that reached its end has nothing of the kind left."""
    caplog.set_level(logging.INFO, logger="dlc.train.rounds")

    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "dlc.train.rounds"]

    spec = spec_in(tmp_path)
    inner = dataclasses.replace(spec.inner, total_steps=2 * ROUNDS * H)  # the schedule, whatever the length
    spec = dataclasses.replace(spec, sync_every=2 * H, fragments=2, inner=inner)
    whole, end = train(tmp_path / "a", spec)
    assert [step["step"] for step in whole] == list(range(2 * ROUNDS * H))
    saved = saves.chosen(named(tmp_path / "a", spec, AT + 1), spec)
    for copy in ("b", "c", "d"):
        shutil.copytree(tmp_path / "a", tmp_path / copy)
    resumed, same_end = train(tmp_path / "b", spec, saved)
    assert losses(resumed) == losses(whole, since=AT + 1) and len(resumed) == (2 * ROUNDS - AT - 1) * H
    assert same_end.digest == end.digest and not told()

    short = dataclasses.replace(spec, rounds=AT)
    saves.set_aside(tmp_path / "d")
    train(tmp_path / "d", short)
    longer, _ = train(tmp_path / "d", spec, saves.newest(tmp_path / "d", spec))
    assert [step["t"] for step in longer] == [t for t in range(2 * AT + 1, 2 * ROUNDS) for _ in range(H)] and not told()

    saved = saves.read(named(tmp_path / "c", spec, AT + 1))
    another, other_end = train(tmp_path / "c", spec, dataclasses.replace(saved, peer="another"))
    assert other_end.digest != end.digest
    assert told() == [f"what fragments, or mixing, had left of the inner steps before round {AT + 1} is lost"]


@pytest.mark.parametrize(
    ("overlap", "mixing", "fragments"),
    [
        ("none", 0.0, 3),
        ("delayed", 0.0, 2),
        ("eager", 0.0, 3),
        ("delayed", 0.5, 1),
        ("eager", 0.5, 2),
    ],
)
def test_with_an_overlap_who_resumes_at_the_end_of_a_round_that_no_step_overtook_goes_on_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: str, mixing: float, fragments: int
) -> None:
    """Neither what other fragments hold nor what mixing left was saved where there is an overlap."""
    wait = OuterLoop.wait
    monkeypatch.setattr(OuterLoop, "wait", lambda loop, timeout_s: wait(loop, 60.0))
    rounds, at = 3 * fragments, fragments + 1
    spec = dataclasses.replace(
        spec_in(tmp_path), rounds=3, sync_every=H * fragments, overlap=overlap, mixing=mixing, fragments=fragments
    )
    whole, end = train(tmp_path / "a", spec)
    assert len(whole) == rounds * H
    saved = saves.chosen(named(tmp_path / "a", spec, at), spec)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    resumed, same_end = train(tmp_path / "b", spec, saved)
    assert losses(resumed) == losses(whole, since=at) and len(resumed) == (rounds - at) * H
    assert (same_end.digest, same_end.validation_loss) == (end.digest, end.validation_loss)


class Late:
    """A contribution that is not on its way before all steps that may overlap it are made."""

    def __init__(self, contribute: Callable[[], Pending]) -> None:
        self._contribute = contribute
        self._pending: Pending | None = None

    def wait(self, timeout_s: float) -> RoundReport | None:
        if not timeout_s:
            raise RoundTimeout("it waits for inner steps")
        self._pending = self._pending or self._contribute()
        return self._pending.wait(60.0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pending, name)


@pytest.mark.parametrize(
    ("overlap", "mixing", "fragments"),
    [
        ("delayed", 0.0, 1),
        ("delayed", 0.5, 2),
        ("eager", 0.0, 3),
        ("eager", 0.5, 1),
    ],
)
def test_inner_steps_that_are_ahead_of_the_round_are_resumed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: str, mixing: float, fragments: int
) -> None:
    """They were trained anew, with an inner optimizer and a random state that had made them."""
    contribute = Peer.contribute
    monkeypatch.setattr(
        Peer, "contribute", lambda peer, *args, **terms: Late(partial(contribute, peer, *args, **terms))
    )
    rounds, at, begun = 3 * fragments, fragments + 1, H - 1
    spec = dataclasses.replace(
        spec_in(tmp_path),
        rounds=3,
        sync_every=H * fragments,
        overlap=overlap,
        overlap_steps=begun,
        mixing=mixing,
        fragments=fragments,
    )
    whole, end = train(tmp_path / "a", spec)
    assert [step["step"] for step in whole] == list(range(rounds * H))
    saved = saves.chosen(named(tmp_path / "a", spec, at), spec)
    assert not saved.ahead
    for copy in ("b", "c"):
        shutil.copytree(tmp_path / "a", tmp_path / copy)
    resumed, same_end = train(tmp_path / "b", spec, saved)
    assert losses(resumed) == losses(whole)[at * H + begun :]
    assert (same_end.digest, same_end.tokens) == (end.digest, end.tokens)
    assert same_end.validation_loss == end.validation_loss

    own = saves.read(named(tmp_path / "c", spec, at))
    stopped, summary = train(tmp_path / "c", spec, own, stop_at=(at, H))
    assert losses(stopped) == losses(resumed)[:1] and summary.setbacks.tokens_dropped > 0
    rest, same_end = train(tmp_path / "c", spec, saves.read(own.path))
    assert losses(rest) == losses(resumed) and same_end.digest == end.digest


def test_who_is_stopped_in_the_middle_of_a_phase_goes_on_bit_for_bit_from_the_round_before(tmp_path: Path) -> None:
    """Ctrl-C wrote the moments and the random state of steps that were dropped over those of the round's end."""
    spec = spec_in(tmp_path)
    StateDir(tmp_path / "a").close()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    whole, end = train(tmp_path / "a", spec)
    made = list[Event]()
    for again in range(2):  # the second time before a round of its own
        saved = saves.newest(tmp_path / "b", spec)
        assert (saved is None) if not again else (saved is not None and saved.t == AT and not saved.ahead)
        steps, summary = train(tmp_path / "b", spec, saved, stop_at=(AT, 1))
        assert summary.reason == "interrupted" and summary.t == AT
        made += steps
    saved = saves.newest(tmp_path / "b", spec)
    assert saved is not None and saved.t == AT
    rest, same_end = train(tmp_path / "b", spec, saved)
    assert losses(rest) == losses(whole, since=AT) and same_end.digest == end.digest
    assert losses(made)[: AT * H] == losses(whole)[: AT * H]


def test_what_cannot_be_read_takes_no_place_and_where_nothing_can_be_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = spec_in(tmp_path, codec="fp16")
    writer = saver.Saver(tmp_path, spec, {}, kept=2)
    for t in (4, 5):
        writer.save(Frozen(t), saves.Local({}))
    named(tmp_path, spec, 5).write_bytes(b"")
    saved = saves.newest(tmp_path, spec)
    assert saved is not None and saved.t == 4 and f"now called {saves.name_of(5)}.damaged" in caplog.text
    saver.Saver(tmp_path, spec, {}, kept=2, resumed=saved).save(Frozen(6), saves.Local({}))
    folder = saves.folder_of(tmp_path, spec)
    left = [saves.name_of(4), saves.name_of(5) + ".damaged", saves.name_of(6)]
    assert sorted(path.name for path in folder.iterdir()) == left, "the good one is not what went"
    for path in list_checkpoints(folder):
        path.write_bytes(path.read_bytes()[:-1])
    assert "begins anew" not in caplog.text
    assert saves.newest(tmp_path, spec) is None and "of 2 checkpoints" in caplog.text
    assert "the run begins anew at round 0" in caplog.text


def test_a_file_that_could_not_be_opened_just_now_keeps_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many open files, or a newer version's format: neither is damage."""
    spec = spec_in(tmp_path, codec="fp16")
    path = saver.Saver(tmp_path, spec, {}).save(Frozen(5), saves.Local({}))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "FORMAT", checkpoint.FORMAT + 1)
        assert saves.newest(tmp_path, spec) is None

        def exhausted(*_: Any, **__: Any) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

        patch.setattr(checkpoint, "safe_open", exhausted)
        with pytest.raises(CheckpointError, match="Too many open files"):
            saves.newest(tmp_path, spec)
    found = saves.newest(tmp_path, spec)
    assert found is not None and found.path == path


def test_of_what_is_damaged_the_newest_stays_once_a_new_one_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that damages files would be filled with them, start by start."""
    spec = spec_in(tmp_path, codec="fp16")
    longer, folders = dataclasses.replace(spec, rounds=ROUNDS + 3), [saves.folder_of(tmp_path, spec)]
    saved = None
    for t in range(2, 8):
        one = spec if t < 6 else longer
        path = saver.Saver(tmp_path, one, {}, resumed=saved).save(Frozen(t), saves.Local({}))
        assert path is not None
        if t in (3, 4, 6):
            path.write_bytes(path.read_bytes()[:-1])
        saved = saves.newest(tmp_path, longer)
        assert saved is not None and saved.t == (t - 1 if t in (3, 6) else t - 2 if t == 4 else t)
    folders.append(saves.folder_of(tmp_path, longer))
    left = [saves.name_of(5), saves.name_of(6) + ".damaged", saves.name_of(7)]
    assert sorted(path.name for folder in folders for path in folder.iterdir()) == left
    (folders[0] / (saves.name_of(9) + ".damaged")).mkdir()  # which is none of ours
    caplog.clear()
    assert saver.Saver(tmp_path, longer, {}, resumed=saved).save(Frozen(8), saves.Local({})) is not None
    assert not caplog.messages and (folders[1] / (saves.name_of(6) + ".damaged")).exists()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
@pytest.mark.parametrize("length", ["same", "longer"])
@pytest.mark.parametrize("older", [False, True])
def test_a_file_that_may_not_be_read_is_not_taken_for_none(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
    length: str,
    older: bool,
) -> None:
    """The run would begin anew at round 0, or go on from an older one, and its checkpoints would take that file's
    place."""
    spec, state, config = dataclasses.replace(spec_in(tmp_path, codec="fp16"), rounds=1), tmp_path / "a", tmp_path / "R"
    for t in (3, 4) if older else (4,):
        saver.Saver(state, spec, {}).save(Frozen(t), saves.Local({}))
    shut = named(state, spec, 4)
    config.write_text(dataclasses.replace(spec, rounds=1 if length == "same" else 6).to_toml())
    opened = Path.open

    def refused(path: Path, *args: Any, **options: Any) -> Any:
        if path == shut:
            raise OSError(number, os.strerror(number), str(path))
        return opened(path, *args, **options)

    monkeypatch.setattr(Path, "open", refused)  # a mode would stop anybody but root
    command = ["join", "--config", str(config), "--state-dir", str(state), "--device", "cpu", "--found"]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert f"the checkpoint {shut} cannot be read ([Errno {number}] {os.strerror(number)}" in said
    assert "let this user read it, or mend its disk; or move that file out of its folder" in said
    assert not (state / "model").exists() and len(list_checkpoints(shut.parent)) == 1 + older, "all is as it was"
    if length == "same" and not older:
        assert main([*command, "--resume", "never"]) == 0, "which the error names"
        assert (state / "checkpoints" / "old-1" / shut.parent.name / shut.name).exists()


@pytest.mark.parametrize("kind", ["a folder", "a named pipe", "a link that leads nowhere", "no file"])
def test_what_has_the_name_of_a_checkpoint_and_is_none_is_told_once_and_takes_no_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A folder cannot be deleted as a file is, so that each save warned of it."""
    spec = spec_in(tmp_path, codec="fp16")
    for t in (2, 4):
        saver.Saver(tmp_path, spec, {}).save(Frozen(t), saves.Local({}))
    stray = named(tmp_path, spec, 3)
    monkeypatch.chdir(stray.parent)  # the name of a socket must be short
    with socket.socket(socket.AF_UNIX) as bound:
        match kind:
            case "a folder":
                stray.mkdir()
            case "a named pipe":
                os.mkfifo(stray)
            case "a link that leads nowhere":
                stray.symlink_to("nowhere")
            case _:
                bound.bind(stray.name)
    newest = saves.newest(tmp_path, spec)
    assert newest is not None and newest.t == 4
    assert caplog.messages == [f"{stray} is {kind}, and no checkpoint: it is passed over, and left alone"]
    caplog.clear()
    writer = saver.Saver(tmp_path, spec, {}, kept=2, resumed=newest)
    for t in (5, 6, 7):
        assert writer.save(Frozen(t), saves.Local({})) is not None
    assert not caplog.messages
    assert [path.name for path in list_checkpoints(stray.parent)] == [saves.name_of(t) for t in (3, 6, 7)]
    assert os.path.lexists(stray)
    assert saves.chosen(tmp_path, None).t == 7 and f"{stray} is {kind}" in caplog.text, "by `dlc export`, too"


@pytest.mark.parametrize("level", ["all", "of one run"])
def test_a_folder_on_a_disk_that_is_not_mounted_is_not_taken_for_an_empty_one(tmp_path: Path, level: str) -> None:
    """The run would begin anew at round 0, and none of its checkpoints could be written."""
    spec, state, disk = spec_in(tmp_path, codec="fp16"), tmp_path / "state", tmp_path / "disk"
    link = state / "checkpoints" if level == "all" else saves.folder_of(state, spec)
    link.parent.mkdir(parents=True)
    link.symlink_to(disk, target_is_directory=True)
    with pytest.raises(CheckpointError, match=f"{link} cannot be read: it is a link to {disk}, where no folder is"):
        saves.newest(state, spec)
    disk.mkdir()
    assert saves.newest(state, spec) is None


def test_what_another_version_wrote_is_told_and_keeps_its_name_and_of_another_run_it_is_no_loss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A newer version knows options that this one does not; its hashes, hence its folders, differ too."""
    spec, state = spec_in(tmp_path, codec="fp16"), tmp_path / "a"
    newer = [by_a_newer_version(state, one) for one in (spec, dataclasses.replace(spec, run="other"))]
    assert saves.newest(state, spec) is None and saves.of_another_run(state, spec) is None
    (said,) = caplog.messages
    assert said.startswith(f"the checkpoint {newer[0]} is of another version of dlc: unknown option 'speed'")
    assert said.endswith("; it is passed over")
    assert all(path.exists() for path in newer)
    with pytest.raises(ConfigError, match=f"{newer[0]} is of another version"):
        saves.chosen(newer[0], None)
    caplog.clear()
    own = saver.Saver(state, spec, {}).save(Frozen(4), saves.Local({}))
    found = saves.newest(state, spec)
    assert found is not None and found.path == own and all(path.exists() for path in newer)


def by_a_newer_version(state: Path, spec: RunSpec) -> Path:
    path = saver.Saver(state / "of-old", spec, {}).save(Frozen(5), saves.Local({}))
    assert path is not None
    tensors, meta = checkpoint.load_checkpoint(path)
    there = state / "checkpoints" / spec.run.encode().hex()[:8].ljust(12, "0") / path.name
    checkpoint.save_checkpoint(there, tensors, {**meta, "spec": "speed = 9\n" + meta["spec"]})
    return there


def test_a_damaged_header_in_the_folder_of_another_length_is_told_and_of_another_run_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = spec_in(tmp_path, codec="fp16")
    longer, other = dataclasses.replace(spec, rounds=ROUNDS + 100), dataclasses.replace(spec, seed=7)
    for one in (spec, other):
        for t in (4, 5):
            saver.Saver(tmp_path, one, {}).save(Frozen(t), saves.Local({}))
        with named(tmp_path, one, 5).open("r+b") as file:
            file.write(b"\xff" * 64)
    found = saves.newest(tmp_path, longer)
    assert found is not None and found.path == named(tmp_path, spec, 4)
    assert f"now called {saves.name_of(5)}.damaged" in caplog.text and len(caplog.messages) == 1
    assert not named(tmp_path, spec, 5).exists() and named(tmp_path, other, 5).exists()
    caplog.clear()
    named(tmp_path, spec, 4).write_bytes(b"")
    assert saves.newest(tmp_path, longer) is None and "the run begins anew at round 0" in caplog.text


@pytest.mark.parametrize("level", ["all", "of one run"])
def test_a_folder_that_may_not_be_read_is_not_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], level: str
) -> None:
    """The run would begin anew at round 0."""
    spec, state, config = spec_in(tmp_path, codec="fp16"), tmp_path / "a", tmp_path / "RUN.toml"
    config.write_text(spec.to_toml())
    path = saver.Saver(state, spec, {}).save(Frozen(4), saves.Local({}))
    assert path is not None
    shut = {path.parent if level == "of one run" else path.parent.parent}
    listdir = os.listdir

    def refused(folder: str) -> list[str]:
        if Path(folder) in shut:
            raise PermissionError(13, "Permission denied")
        return listdir(folder)

    monkeypatch.setattr("dlc.train.shelf.os.listdir", refused)  # a mode would stop anybody but root
    assert main(["join", "--config", str(config), "--state-dir", str(state), "--device", "cpu"]) == 2
    assert f"the checkpoints in {shut.pop()} cannot be read (Permission denied)" in capsys.readouterr().err
    foreign = path.parent.parent / "lost+found"
    foreign.mkdir()
    shut.add(foreign)
    found = saves.newest(state, spec)
    assert found is not None and found.path == path, "the folder that may not be read is none of ours"


def test_the_one_that_is_gone_on_from_stays_however_it_is_named_and_whatever_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, state = spec_in(tmp_path, codec="fp16"), tmp_path / "state"
    for t in (4, 5):
        saver.Saver(state, spec, {}).save(Frozen(t), saves.Local({}))
    monkeypatch.chdir(tmp_path)
    resumed = saves.chosen(Path("state"), spec)
    writer = saver.Saver(state, spec, {}, resumed=resumed)
    with monkeypatch.context() as patch:

        def full(*_: Any) -> None:
            raise NoRoom("full")

        patch.setattr(saver, "save_checkpoint", full)
        assert writer.save(Frozen(6), saves.Local({})) is None
    assert [path.name for path in list_checkpoints(saves.folder_of(state, spec))] == [saves.name_of(5)]
    with monkeypatch.context() as patch:

        def broken(*_: Any) -> None:
            raise OSError("broken")

        patch.setattr(saver, "move_later", broken)
        assert writer.save(Frozen(6), saves.Local({})) == named(state, spec, 6)
    assert writer.last == named(state, spec, 6), "it is written, whatever came after that"


def test_a_history_that_was_given_up_stays_so_where_a_kill_left_its_checkpoints_in_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_in(tmp_path, codec="fp16")
    longer = dataclasses.replace(spec, rounds=ROUNDS + 100)
    for t in (4, 8):
        saver.Saver(tmp_path, spec, {}).save(Frozen(t), saves.Local({}))
    saver.Saver(tmp_path, longer, {}).save(Frozen(9), saves.Local({}))
    with monkeypatch.context() as patch:

        class Killed(BaseException):
            pass

        def killed(*_: Any) -> None:
            raise Killed

        patch.setattr(saver, "move_later", killed)
        with pytest.raises(Killed):
            saver.Saver(tmp_path, spec, {}, kept=2).save(Frozen(6), saves.Local({}))
    assert named(tmp_path, spec, 8).exists() and named(tmp_path, longer, 9).exists()
    found = saves.newest(tmp_path, longer)
    assert found is not None and found.path == named(tmp_path, spec, 6)
    assert saves.chosen(tmp_path, None).path == found.path, "what is exported is the same"

    saver.Saver(tmp_path, spec, {}, kept=2, resumed=found).save(Frozen(7), saves.Local({}))
    left = sorted(path.name for path in tmp_path.glob("checkpoints/*/*.safetensors"))
    assert left == [saves.name_of(6), saves.name_of(7)]
    for t in (8, 9):  # which the history that won comes to as well
        saver.Saver(tmp_path, spec, {}).save(Frozen(t), saves.Local({}))
        found = saves.newest(tmp_path, longer)
        assert found is not None and found.path == named(tmp_path, spec, t)


def test_where_one_goes_on_from_another_peers_one_of_ones_own_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other peer deletes its own as it goes on, on a full disk too."""
    spec, state = spec_in(tmp_path, codec="fp16"), tmp_path / "state"
    for folder, rounds in ((state, (3, 4)), (tmp_path / "other", (5,))):
        for t in rounds:
            saver.Saver(folder, spec, {}).save(Frozen(t), saves.Local({}))
    writer = saver.Saver(state, spec, {}, resumed=saves.chosen(tmp_path / "other", spec))

    def full(*_: Any) -> None:
        raise NoRoom("full")

    monkeypatch.setattr(saver, "save_checkpoint", full)
    assert writer.save(Frozen(6), saves.Local({})) is None
    assert list_checkpoints(saves.folder_of(state, spec)) == [named(state, spec, 4)]


def test_what_another_peer_saved_is_gone_on_from_without_what_is_that_peers_own(tmp_path: Path) -> None:
    timeouts = TimeoutsSpec(evict_s=9.0)  # whose checkpoint it is is waited for
    spec = dataclasses.replace(spec_in(tmp_path), timeouts=timeouts)
    train(tmp_path / "a", dataclasses.replace(spec, rounds=AT))
    saved = saves.newest(tmp_path / "a")
    assert saved is not None and saved.residual is not None and saved.rng and saved.peer
    assert saved.as_of(saved.peer) is saved
    other = saved.as_of("another")
    assert other.residual is None and not other.rng and other.inner and other.ahead
    steps, summary = train(tmp_path / "b", spec, saved, stop_at=(AT, 1))
    assert summary.t == AT and len(steps) == 1
    own = saves.newest(tmp_path / "b", spec)
    assert own is not None and own.t == AT, "in its own folder, though it made no round"


def test_a_copy_that_somebody_keeps_beside_the_runs_is_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an older checkpoint of the run; neither where the disk is full."""
    spec = spec_in(tmp_path, codec="fp16")
    writer = saver.Saver(tmp_path, spec, {}, kept=1)
    writer.save(Frozen(4), saves.Local({}))
    copy = tmp_path / "checkpoints" / "best" / saves.name_of(4)
    copy.parent.mkdir()
    shutil.copy(named(tmp_path, spec, 4), copy)
    for t in (5, 6):
        writer.save(Frozen(t), saves.Local({}))
    assert list_checkpoints(saves.folder_of(tmp_path, spec)) == [named(tmp_path, spec, 6)]

    def full(*_: Any) -> None:
        raise NoRoom("full")

    monkeypatch.setattr(saver, "save_checkpoint", full)
    assert writer.save(Frozen(7), saves.Local({})) is None
    assert list_checkpoints(copy.parent) == [copy] and saves.chosen(tmp_path, spec).t == 6


def test_a_disk_that_stays_full_is_told_now_and_then_and_when_it_has_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each checkpoint said so anew: with one a round, hundreds of lines in an hour."""
    caplog.set_level(logging.INFO, logger="dlc.train.saver")
    spec = spec_in(tmp_path, codec="fp16")
    writer, why = saver.Saver(tmp_path, spec, {}), [CheckpointError("broken"), NoRoom("full")]

    def fails(*_: Any) -> None:
        raise why[-1]

    def beside(*ts: int) -> list[str]:
        caplog.clear()
        for t in ts:
            writer.start(Frozen(t), saves.Local({}))
        writer.finish()
        return caplog.messages[:]

    with monkeypatch.context() as patch:
        patch.setattr(saver, "save_checkpoint", fails)
        told = beside(*range(1, 101))
        assert len(told) == 7 and told[:2] == ["full; training goes on", "full; training goes on (again)"]
        assert told[-1] == "full; training goes on (for the 64th time in a row)"
        why.pop()
        assert beside(101) == ["broken; training goes on"], "that is another trouble"
        assert beside(102, 103) == ["broken; training goes on (again)"]
        caplog.clear()
        assert writer.save(Frozen(104), saves.Local({})) is None and len(caplog.messages) == 1
        caplog.clear()
        assert writer.save(Frozen(105), saves.Local({})) is None
        assert caplog.messages == ["broken"], "the last one is told in any case, and nothing goes on"
    assert beside(106, 107) == [f"checkpoints are written again: {named(tmp_path, spec, 106)}"]


def test_what_somebody_keeps_beside_the_runs_is_not_taken_for_what_a_kill_left(tmp_path: Path) -> None:
    theirs = [tmp_path / "checkpoints" / folder / ".tmpl" for folder in ("best", "old-1")]
    for path in theirs:
        path.parent.mkdir(parents=True)
        path.touch()
    spec = spec_in(tmp_path, codec="fp16")
    assert saver.Saver(tmp_path, spec, {}).save(Frozen(4), saves.Local({})) == named(tmp_path, spec, 4)
    assert all(path.exists() for path in theirs)


def test_of_rounds_with_another_digit_the_last_are_kept_and_found_as_of_any(tmp_path: Path) -> None:
    """They were written, and never found, nor deleted, as of data-parallel training each step is a round."""
    spec = spec_in(tmp_path, codec="fp16")
    writer = saver.Saver(tmp_path, spec, {}, kept=2)
    last = 99_999_999
    for t in (last - 1, last, last + 1):
        writer.save(Frozen(t), saves.Local({}))
    kept = {path.name for path in saves.folder_of(tmp_path, spec).iterdir()}
    assert kept == {saves.name_of(last), saves.name_of(last + 1)}
    found = saves.newest(tmp_path)
    assert found is not None and found.t == last + 1
    writer.save(Frozen(last), saves.Local({}))
    assert [path.name for path in tmp_path.glob("checkpoints/given-up-1/*/*")] == [saves.name_of(last + 1)]


def test_of_a_run_that_got_more_rounds_as_many_are_kept_as_of_any(tmp_path: Path) -> None:
    spec = spec_in(tmp_path, codec="fp16")
    longer, other = dataclasses.replace(spec, rounds=ROUNDS + 100), dataclasses.replace(spec, seed=7)
    for one, rounds in ((other, (50,)), (spec, (4, 5)), (longer, (6,))):
        writer = saver.Saver(tmp_path, one, {}, kept=2)
        for t in rounds:
            writer.save(Frozen(t), saves.Local({}))
            (saves.folder_of(tmp_path, one) / f".{saves.name_of(t + 1)}.tmp-1").touch()  # a kill left it
    kept = sorted(path.name for path in tmp_path.glob("checkpoints/*/*.safetensors"))
    assert kept == [saves.name_of(t) for t in (5, 6, 50)]
    assert [path.name for path in tmp_path.glob("checkpoints/*/.*")] == [f".{saves.name_of(7)}.tmp-1"]


def test_what_killed_processes_left_of_the_model_goes_once_it_is_whole(tmp_path: Path) -> None:
    rest = [tmp_path / "a" / f".model.{kind}-12345" for kind in ("tmp", "old")]
    for folder in rest:
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"half")
    train(tmp_path / "a", dataclasses.replace(spec_in(tmp_path, codec="fp16"), rounds=1))
    assert (tmp_path / "a" / "model" / "config.json").exists() and not any(folder.exists() for folder in rest)


def test_what_killed_processes_left_of_the_model_goes_before_any_checkpoint_does_where_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest, save_model = tmp_path / "a" / ".model.tmp-12345", trainer.save_model
    rest.mkdir(parents=True)

    def crowded(model: Any, folder: Path, tokenizer: Any) -> None:
        if rest.exists():
            raise NoRoom("full")
        save_model(model, folder, tokenizer)

    monkeypatch.setattr(trainer, "save_model", crowded)
    spec = spec_in(tmp_path, codec="fp16")
    _, summary = train(tmp_path / "a", spec)
    assert summary.model is not None
    kept = [path.name for path in list_checkpoints(saves.folder_of(tmp_path / "a", spec))]
    assert kept == [saves.name_of(t) for t in range(1, ROUNDS + 1)]


def test_a_peer_that_is_killed_in_each_save_leaves_no_more_behind_than_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for want of memory: it would come again from the same checkpoint until the disk was full."""
    spec = spec_in(tmp_path, codec="fp16")
    whole = saver.Saver(tmp_path, spec, {}).save(Frozen(4), saves.Local({}))

    class Killed(BaseException):
        pass

    for process in range(3):

        def killed(path: Path, *_: Any, process: int = process) -> None:
            path.with_name(f".{path.name}.tmp-{process}").write_bytes(b"half")
            path.with_name(f".tmp{process}").write_bytes(b"half")  # of safetensors
            raise Killed

        monkeypatch.setattr(saver, "save_checkpoint", killed)
        with pytest.raises(Killed):
            saver.Saver(tmp_path, spec, {}, resumed=saves.newest(tmp_path, spec)).save(Frozen(5), saves.Local({}))
    names = sorted(path.name for path in saves.folder_of(tmp_path, spec).iterdir())
    assert names == [f".{saves.name_of(5)}.tmp-2", ".tmp2", saves.name_of(4)]
    found = saves.newest(tmp_path, spec)
    assert found is not None and found.path == whole


def test_after_a_resume_the_committed_positions_are_those_of_the_uninterrupted_run(tmp_path: Path) -> None:
    spec = spec_in(tmp_path, codec="fp16")
    train(tmp_path / "a", spec)
    saved = saves.chosen(named(tmp_path / "a", spec, AT), spec)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    train(tmp_path / "b", spec, saved)
    ledgers = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        end = saves.newest(folder, spec)
        assert end is not None and end.t == ROUNDS
        ledgers.append(unpack(end.log, SavedLog).state.ledger)
    ranges = [[lease.ranges for lease in ledger.leases] for ledger in ledgers]
    assert ranges[0] == ranges[1] and ledgers[0].next == ledgers[1].next
    assert ledgers[0].pool == ledgers[1].pool == ()
    assert ranges[0][0][0].lo == ROUNDS * spec.blocks_per_round  # every block before it was trained once


def test_a_run_that_is_over_is_given_more_rounds_bit_for_bit(tmp_path: Path) -> None:
    """With the end of the schedule named, it is as if it had been of that length from the beginning."""
    spec = spec_in(tmp_path)
    inner = dataclasses.replace(spec.inner, total_steps=ROUNDS * H)
    outer = OuterSpec(schedule="cosine", total_rounds=ROUNDS)
    spec = dataclasses.replace(spec, inner=inner, outer=outer)
    StateDir(tmp_path / "a").close()
    shutil.copytree(tmp_path / "a", tmp_path / "b")  # the dropout is the peer's own
    whole, end = train(tmp_path / "a", spec)
    short = dataclasses.replace(spec, rounds=AT)
    train(tmp_path / "b", short)
    saved = saves.newest(tmp_path / "b", spec)
    assert saved is not None and saved.spec == short and saved.t == AT
    rest, same_end = train(tmp_path / "b", spec, saved)
    assert losses(rest) == losses(whole, since=AT) and len(rest) == (ROUNDS - AT) * H
    assert (same_end.digest, same_end.tokens) == (end.digest, end.tokens)
    newest = saves.newest(tmp_path / "b", spec)
    assert newest is not None and newest.spec == spec and newest.t == ROUNDS


@pytest.mark.parametrize("resume", ["auto", "this one"])
def test_a_longer_schedule_alone_makes_no_round_of_a_run_that_is_over_anew(
    resume: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It began anew at round 0, or at an older checkpoint, and its end was moved away."""
    spec, config = dataclasses.replace(spec_in(tmp_path, codec="fp16"), rounds=AT), tmp_path / "RUN.toml"
    inner = dataclasses.replace(spec.inner, total_steps=9 * H)
    longer = dataclasses.replace(spec, inner=inner)
    ends = list[Saved]()
    words = ["join", "--config", str(config), "--state-dir", str(tmp_path / "a"), "--device", "cpu"]
    for run in (spec, longer):
        config.write_text(run.to_toml())
        given = [] if resume == "auto" or not ends else ["--resume", str(ends[0].path)]
        assert main([*words, "--log-level", "warning", *given]) == 0
        newest = saves.newest(tmp_path / "a", run)
        assert newest is not None
        ends.append(newest)
    assert [(end.t, end.digest) for end in ends] == [(AT, ends[0].digest)] * 2 and ends[0].path.exists()
    assert caplog.messages == ["the run has had its rounds: to train on, raise rounds in RUN.toml, on every peer"]


def test_a_schedule_that_ends_with_the_run_is_stretched(tmp_path: Path) -> None:
    spec = dataclasses.replace(spec_in(tmp_path), outer=OuterSpec(schedule="cosine"))
    train(tmp_path, dataclasses.replace(spec, rounds=AT))
    saved = saves.newest(tmp_path, spec)
    assert saved is not None
    rest, end = train(tmp_path, spec, saved)
    rates = [schedule_of(spec)(step) for step in range(AT * H, ROUNDS * H)]
    assert [step["lr"] for step in rest] == rates and end.t == ROUNDS


def test_a_run_goes_on_from_one_of_another_length_and_from_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = spec_in(tmp_path, codec="fp16")
    saver.Saver(tmp_path, spec, {}).save(Frozen(5, tokens=500.0), saves.Local({}))
    path = named(tmp_path, spec, 5)

    def found(**changes: Any) -> Path | None:
        saved = saves.newest(tmp_path, dataclasses.replace(spec, **changes))
        return saved.path if saved is not None else None

    inner = dataclasses.replace(spec.inner, total_steps=99)
    assert [found(rounds=rounds) for rounds in (6, 0, 5)] == [path] * 3
    assert found(rounds=6, tokens=501) == found(rounds=6, inner=inner) == found(inner=inner) == path
    assert not caplog.text
    turned = saves.Saved(path, dataclasses.replace(spec, fragments=3), 18, b"", memoryview(b""), {}, None, {}, {})
    assert turned.leads_to(dataclasses.replace(turned.spec, rounds=6)), "though its last turns were as many"
    assert not turned.leads_to(dataclasses.replace(turned.spec, rounds=4))
    for changes in ({"rounds": 4}, {"rounds": 6, "tokens": 500}):
        assert found(**changes) is None and f"{path} is at or past the end of this run" in caplog.text
        with pytest.raises(CheckpointError, match="saved after round 5 and 500 tokens"):
            saves.chosen(path, dataclasses.replace(spec, **changes))
        caplog.clear()
    for changes in ({"rounds": 6, "seed": 1}, {"rounds": 6, "sync_every": 2 * H}):
        assert found(**changes) is None and not caplog.text
        with pytest.raises(CheckpointError, match="rounds: 6 here, 5 there"):
            saves.chosen(path, dataclasses.replace(spec, **changes))

    longer, longest = (dataclasses.replace(spec, rounds=rounds) for rounds in (9, 20))
    saver.Saver(tmp_path, longer, {}).save(Frozen(7), saves.Local({}))
    for number, (newer, t) in enumerate([(spec, 5), (longer, 7)], 1):
        os.utime(named(tmp_path, newer, t), (10**10 + number, 10**10 + number))
        assert found(rounds=20) == named(tmp_path, longer, 7), "the later round, whichever was written to last"
    aside = saves.set_later_aside(tmp_path, saves.chosen(path, longest), longest)
    assert aside is not None and found(rounds=20) == path, "what was asked for, though a run of a third length is ahead"


@pytest.mark.parametrize("ahead_s", [86_400, -86_400])
def test_a_run_that_got_more_rounds_goes_on_at_its_last_whatever_the_clock_said(tmp_path: Path, ahead_s: int) -> None:
    """The clock ran ahead during the shorter run, or a copy of the folders did not keep the times."""
    spec = spec_in(tmp_path, codec="fp16")
    longer = dataclasses.replace(spec, rounds=ROUNDS + 100)
    for one, rounds in ((spec, (4, 5)), (longer, (54, 55))):
        writer = saver.Saver(tmp_path, one, {})
        for t in rounds:
            path = writer.save(Frozen(t), saves.Local({}))
            assert path is not None
            time_s = path.stat().st_mtime + (ahead_s if one is spec else 0)
            os.utime(path, (time_s, time_s))
    for more in (longer, dataclasses.replace(spec, rounds=ROUNDS + 200)):
        newest = saves.newest(tmp_path, more)
        assert newest is not None and newest.path == named(tmp_path, longer, 55)
    assert saves.chosen(tmp_path, None).path == named(tmp_path, longer, 55)
    newest = saves.newest(tmp_path)
    assert newest is not None and newest.path == named(tmp_path, longer, 55)


def test_what_a_given_up_history_left_is_moved_and_not_deleted_whatever_its_length(tmp_path: Path) -> None:
    """A swarm that stands at an earlier round may have the greater history: what it makes is what goes on."""
    spec = spec_in(tmp_path, codec="fp16")
    longer, longest = (dataclasses.replace(spec, rounds=rounds) for rounds in (9, 20))
    saver.Saver(tmp_path, longer, {}).save(Frozen(8), saves.Local({}))
    saver.Saver(tmp_path, longest, {}).save(Frozen(3), saves.Local({}))
    moved = [path.relative_to(tmp_path) for path in tmp_path.glob("checkpoints/old-1/*/*")]
    assert moved == [Path("checkpoints", "old-1", named(tmp_path, longer, 8).parent.name, saves.name_of(8))]
    newest = saves.newest(tmp_path, longest)
    assert newest is not None and newest.t == 3


def test_a_shorter_run_that_began_anew_is_what_is_exported_and_gets_more_rounds(tmp_path: Path) -> None:
    """It does not go on from what is past its end, and nobody prefers that to what it made itself."""
    spec = spec_in(tmp_path, codec="fp16")
    longer, shorter, other = (
        dataclasses.replace(spec, **changes) for changes in ({"rounds": 9}, {"rounds": 6}, {"rounds": 9, "seed": 7})
    )
    for one in (other, longer):
        saver.Saver(tmp_path, one, {}).save(Frozen(8), saves.Local({}))
    assert saves.newest(tmp_path, shorter) is None
    for t in (1, 6):
        saver.Saver(tmp_path, shorter, {}).save(Frozen(t), saves.Local({}))
    assert saves.chosen(tmp_path, None).path == named(tmp_path, shorter, 6)
    for more in (longer, dataclasses.replace(spec, rounds=7)):
        newest = saves.newest(tmp_path, more)
        assert newest is not None and newest.path == named(tmp_path, shorter, 6)
    assert [path.name for path in tmp_path.glob("checkpoints/old-1/*/*")] == [saves.name_of(8)], "kept, out of the way"
    assert named(tmp_path, other, 8).exists(), "of another run"


def test_what_stays_on_the_disk_and_what_is_chosen(tmp_path: Path) -> None:
    spec = spec_in(tmp_path, codec="fp16")
    train(tmp_path / "a", spec)
    folder = tmp_path / "a"
    kept = list_checkpoints(saves.folder_of(folder, spec))
    assert [path.name for path in kept] == [saves.name_of(t) for t in range(1, ROUNDS + 1)]
    assert saves.chosen(folder, None).t == saves.chosen(kept[0].parent, spec).t == ROUNDS
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        saves.chosen(folder / "model", spec)
    with pytest.raises(CheckpointError, match="cannot be read"):
        saves.chosen(tmp_path / "nowhere", spec)
    with pytest.raises(CheckpointError, match=r"seed: 7 here, 0 there"):
        saves.chosen(kept[0], dataclasses.replace(spec, seed=7))

    aside = saves.set_later_aside(folder, saves.chosen(kept[1], spec), spec)
    assert aside is not None and sorted(path.name for path in aside.glob("*/*")) == [p.name for p in kept[2:]]
    assert saves.set_later_aside(folder, saves.chosen(kept[1], spec), spec) is None
    newest = saves.newest(folder, spec)
    assert newest is not None and newest.path == kept[1]
    longer = dataclasses.replace(spec, rounds=ROUNDS + 1)
    saver.Saver(folder, longer, {}).save(Frozen(ROUNDS + 1), saves.Local({}))
    assert saves.set_later_aside(folder, saves.chosen(kept[1], longer), longer) is not None
    newest = saves.newest(folder, longer)
    assert newest is not None and newest.path == kept[1], "not the later one of the longer run"


def test_a_given_up_history_is_not_resumed_from(tmp_path: Path) -> None:
    """Rounds are numbered anew where another history wins: its files are the newest, whatever their numbers."""
    spec = spec_in(tmp_path, codec="fp16")
    writer = saver.Saver(tmp_path, spec, {}, kept=2)
    for t in (5, 6, 4, 5):
        writer.save(Frozen(t), saves.Local({}))
    names = [path.name for path in list_checkpoints(saves.folder_of(tmp_path, spec))]
    assert names == [saves.name_of(4), saves.name_of(5)]
    aside = [path.name for path in tmp_path.glob("checkpoints/given-up-1/*/*")]
    assert sorted(aside) == [saves.name_of(5), saves.name_of(6)]


def test_of_what_it_gave_up_while_it_trained_a_peer_keeps_the_last(tmp_path: Path) -> None:
    """A network that is cut now and then would have filled the disk. What was there before is its user's."""
    spec, place = spec_in(tmp_path, codec="fp16"), tmp_path / "checkpoints"
    writer = saver.Saver(tmp_path, spec, {}, kept=2)
    for t in (5, 6):
        writer.save(Frozen(t), saves.Local({}))
    writer = saver.Saver(tmp_path, spec, {}, kept=2)
    for t in (4, 3):
        writer.save(Frozen(t), saves.Local({}))
    theirs = [place / "given-up-1" / "note", place / "given-up-7" / ("f" * 12) / saves.name_of(9)]
    theirs[0].touch()
    for t in (4, 2, 3, 1):
        writer.save(Frozen(t), saves.Local({}))
    theirs[1].parent.mkdir(parents=True)
    theirs[1].touch()
    for t in (2, 0):
        writer.save(Frozen(t), saves.Local({}))
    aside = {(path.parents[1].name, saves.round_of(path)) for path in place.glob("*/*/t-*") if path not in theirs}
    of_last = {("given-up-3", 2), ("given-up-3", 3), ("given-up-8", 1), ("given-up-8", 2)}
    assert aside == {("old-1", 5), ("old-1", 6)} | of_last
    assert not (place / "given-up-2").exists() and all(path.exists() for path in theirs)
    assert saves.chosen(tmp_path, None).t == 0


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder from which, and to which, nothing can be renamed."""
    place, rename = tmp_path / "disk", Path.rename
    place.mkdir()

    def within(path: Path) -> bool:
        return path.parent.resolve().is_relative_to(place)

    def renamed(path: Path, target: Path) -> Path:
        if within(path) != within(target):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", renamed)
    return place


def test_checkpoints_on_a_disk_of_their_own_are_moved_out_of_the_way_there(
    tmp_path: Path, disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec, state = spec_in(tmp_path, codec="fp16"), tmp_path / "state"
    state.mkdir()
    (state / "checkpoints").symlink_to(disk, target_is_directory=True)
    writer = saver.Saver(state, spec, {}, kept=2)
    for t in (5, 6, 4, 5):
        assert writer.save(Frozen(t), saves.Local({})) is not None
    assert "is written, but" not in caplog.text
    assert saves.set_later_aside(state, saves.chosen(named(state, spec, 4), spec), spec) is not None
    assert sorted(path.name for path in disk.glob("*-1/*/*")) == [saves.name_of(t) for t in (5, 5, 6)]
    assert saves.set_aside(state) is not None
    assert saves.newest(state, spec) is None and len([*disk.glob("old-2/*/*")]) == 1
    assert saves.set_aside(state) is None, "there are none"
    assert writer.save(Frozen(1), saves.Local({})) is not None
    assert [path.name for path in disk.glob("[!og]*/*")] == [saves.name_of(1)], "where the others were"


def test_what_cannot_be_moved_out_of_the_way_is_told_and_what_was_written_is_saved(
    tmp_path: Path, disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder of the run itself lies elsewhere."""
    spec, state = spec_in(tmp_path, codec="fp16"), tmp_path / "state"
    folder = saves.folder_of(state, spec)
    folder.parent.mkdir(parents=True)
    folder.symlink_to(disk, target_is_directory=True)
    writer = saver.Saver(state, spec, {})
    writer.save(Frozen(6), saves.Local({}))
    assert writer.save(Frozen(4), saves.Local({})) == folder / saves.name_of(4) == writer.last
    assert f"{folder / saves.name_of(4)} is written, but" in caplog.text and "Invalid cross-device link" in caplog.text
    newest = saves.newest(state, spec)
    assert newest is not None and newest.t == 4, "the later one is known to be given up"
    with pytest.raises(CheckpointError, match="cannot be moved out of the way"):
        saves.set_later_aside(state, newest, spec)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "no empty folder is left"


@pytest.mark.parametrize("linked", ["checkpoints", "checkpoints/of the run"])
def test_the_checkpoint_of_a_round_is_kept_when_steps_beyond_it_are_dropped_wherever_the_folder_lies(
    tmp_path: Path, linked: str
) -> None:
    """What Ctrl-C would save of that round has an inner optimizer that is ahead of it."""
    spec, state, disk = spec_in(tmp_path, codec="fp16"), tmp_path / "state", tmp_path / "disk"
    disk.mkdir()
    link = state / "checkpoints" if linked == "checkpoints" else saves.folder_of(state, spec)
    link.parent.mkdir(parents=True)
    link.symlink_to(disk, target_is_directory=True)
    writer = saver.Saver(state, spec, {})
    path = writer.save(Frozen(4), saves.Local({}))
    assert path is not None and writer.save(Frozen(4), saves.Local({}, ahead=True)) == path
    newest = saves.newest(state, spec)
    assert newest is not None and not newest.ahead
    writer = saver.Saver(state, spec, {}, resumed=newest)
    writer.save(Frozen(4), saves.Local({}, ahead=True))
    assert not saves.read(path).ahead, "nor after a resume"
    elsewhere = saver.Saver(tmp_path / "another", spec, {}, resumed=newest).save(Frozen(4), saves.Local({}, ahead=True))
    assert elsewhere == named(tmp_path / "another", spec, 4), "another peer keeps its own"


def test_what_is_ahead_of_a_round_takes_the_place_of_what_is_too_and_of_another_history(tmp_path: Path) -> None:
    """Only one that is of just that round, and of that history, is better than the newest."""
    spec, path = spec_in(tmp_path, codec="fp16"), named(tmp_path, spec_in(tmp_path, codec="fp16"), 4)

    def kept(writer: saver.Saver, made: str) -> set[str]:
        writer.save(Frozen(4, digest=b"two"), saves.Local({made: torch.ones(1)}, ahead=True))
        found = saves.read(path)
        assert found.ahead and found.digest == b"two"
        return set(found.inner)

    writer = saver.Saver(tmp_path, spec, {})
    writer.save(Frozen(4, digest=b"one"), saves.Local({}))
    assert kept(writer, "first") == {"first"} and kept(writer, "second") == {"second"}
    assert kept(saver.Saver(tmp_path, spec, {}, resumed=saves.read(path)), "third") == {"third"}


def test_what_is_whole_takes_the_place_of_what_was_saved_of_that_round_before(tmp_path: Path) -> None:
    """Such as steps made since then, which are told with it: only those that are dropped leave it as it is."""
    spec = spec_in(tmp_path, codec="fp16")
    writer = saver.Saver(tmp_path, spec, {})
    for inner in ({}, {"step": torch.ones(1)}):
        writer.save(Frozen(5), saves.Local(inner))
    assert list(saves.read(named(tmp_path, spec, 5)).inner) == ["step"]


def test_what_is_written_in_the_background_is_of_the_time_when_that_was_asked_for(tmp_path: Path) -> None:
    """The next step changes the tensors in place."""
    spec, changed, state = spec_in(tmp_path, codec="fp16"), threading.Event(), torch.ones(3)

    def late() -> None:
        assert changed.wait(60.0)

    writer = saver.Saver(tmp_path, spec, {}, before_write=late)
    writer.start(Frozen(4), saves.Local({"state": state}))
    state.zero_()
    changed.set()
    writer.finish()
    assert torch.equal(saves.read(named(tmp_path, spec, 4)).inner["state"], torch.ones(3))


def test_a_link_that_leads_in_a_circle_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spec = spec_in(tmp_path, codec="fp16")
    whole = saver.Saver(tmp_path, spec, {}).save(Frozen(4), saves.Local({}))
    assert whole is not None
    later = whole.with_name(saves.name_of(5))
    later.symlink_to(later.name)
    newest = saves.newest(tmp_path, spec)
    assert newest is not None and newest.path == whole
    assert f"{later} is a link that leads in a circle, and no checkpoint" in caplog.text
    writer = saver.Saver(tmp_path, spec, {}, kept=1, resumed=newest)
    for t in (6, 7):
        assert writer.save(Frozen(t), saves.Local({})) is not None
    names = [path.name for path in list_checkpoints(whole.parent)]
    assert names == [saves.name_of(5), saves.name_of(7)], "it takes no place, and is left alone"


def test_where_the_newest_of_a_folder_is_damaged_an_older_one_is_named(tmp_path: Path) -> None:
    """Who names a folder is not given another model than the newest without a word."""
    spec = spec_in(tmp_path, codec="fp16")
    older, newest = (saver.Saver(tmp_path, spec, {}).save(Frozen(t), saves.Local({})) for t in (4, 5))
    saver.Saver(tmp_path, dataclasses.replace(spec, seed=7), {}).save(Frozen(3), saves.Local({}))
    assert older is not None and newest is not None
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"{newest} cannot be read .*; name an older one, such as {older}"):
        saves.chosen(newest.parent, None)
    with pytest.raises(CheckpointError, match=f"{newest} cannot be read [^;]*$"):
        saves.chosen(newest, None)
    older.unlink()
    with pytest.raises(CheckpointError, match=f"{newest} cannot be read [^;]*$"):
        saves.chosen(tmp_path, None)  # where there is one of another run, too


def test_a_copied_folder_is_gone_on_from_at_its_last_round(tmp_path: Path) -> None:
    """A copy need not keep the times, and a clock may jump: within one run the rounds count."""
    spec = spec_in(tmp_path, codec="fp16")
    other = dataclasses.replace(spec, seed=7)
    for one, times in ((spec, (300, 200, 400)), (other, (500, 350, 450))):
        writer = saver.Saver(tmp_path, one, {}, kept=3)
        for t, time_s in enumerate(times, 8):
            path = writer.save(Frozen(t), saves.Local({}))
            assert path is not None
            os.utime(path, (time_s, time_s))
    os.utime(named(tmp_path, spec, 9), (450, 450))
    assert saves.chosen(saves.folder_of(tmp_path, spec), None).t == 10
    assert saves.chosen(tmp_path, None).path == named(tmp_path, other, 10), "the run that was written to last"
    newest = saves.newest(tmp_path)
    assert newest is not None and newest.path == named(tmp_path, other, 10)


@dataclasses.dataclass(frozen=True)
class Frozen:
    t: int
    log: bytes = b"log"
    tokens: float = 0.0
    digest: bytes = b""
    image: memoryview = memoryview(b"image")


def test_a_full_disk_stops_neither_the_training_nor_the_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing can be written, the address book included."""
    spec = spec_in(tmp_path, codec="fp16")
    train(tmp_path / "a", dataclasses.replace(spec, rounds=1))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(StateDir, "save_address_book", full)
    monkeypatch.setattr("dlc.train.checkpoint.save_file", full)
    _, end = train(tmp_path / "a", spec)
    assert (end.reason, end.t, end.checkpoint, end.saved) == ("rounds", ROUNDS, None, False)
    assert "t-00000001.safetensors could not be written" in caplog.text and "address book" in caplog.text
    older = saves.newest(tmp_path / "a")
    assert older is not None and older.t == 1


@pytest.mark.parametrize("stop_at", [None, (AT, 1)], ids=["at the end", "by Ctrl-C"])
def test_a_disk_that_is_gone_at_the_end_is_told_and_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stop_at: tuple[int, int] | None
) -> None:
    """As one over a network may be. Path.exists raises then, and who has come for the end of the run got none."""
    state, finish, stat = tmp_path / "a", Trainer._finish, os.stat

    def gone(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(str(state)):
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected", str(path))
        return stat(path, *args, **options)

    def without_disk(trainer: Trainer, *args: Any) -> Summary:
        trainer._saver.finish()
        monkeypatch.setattr(os, "stat", gone)
        return finish(trainer, *args)

    monkeypatch.setattr(Trainer, "_finish", without_disk)
    spec = spec_in(tmp_path, codec="fp16")
    _, end = train(state, spec, stop_at=stop_at)
    t, reason = (ROUNDS, "rounds") if stop_at is None else (AT, "interrupted")
    assert (end.t, end.reason, end.saved, end.model) == (t, reason, False, None)
    assert end.checkpoint == named(state, spec, ROUNDS - 1 if stop_at is None else AT)
    assert f"the model folder {state / 'model'} could not be written" in caplog.text


@pytest.mark.skipif(os.name != "posix", reason="Windows removes no folder in which a file is open")
@pytest.mark.parametrize("taken", [False, True])
def test_a_state_directory_that_is_removed_in_the_middle_is_made_anew_and_never_anothers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    taken: bool,
) -> None:
    """It was made with the modes of any folder, without lock or key; and another's was written into."""
    state, config, finish = tmp_path / "a", tmp_path / "RUN.toml", Trainer._finish
    config.write_text(dataclasses.replace(spec_in(tmp_path, codec="fp16"), rounds=1).to_toml())
    keys, others = list[bytes](), list[StateDir]()

    def removed(trainer: Trainer, *args: Any) -> Summary:
        trainer._saver.finish()
        keys.append((state / "identity.key").read_bytes())
        shutil.rmtree(state)
        if taken:
            others.append(StateDir(state))
        return finish(trainer, *args)

    monkeypatch.setattr(Trainer, "_finish", removed)
    status = main(["join", "--config", str(config), "--state-dir", str(state), "--device", "cpu"])
    if taken:
        others[0].close()
        assert status == 4 and "another process uses the state directory" in caplog.text
        assert "the end was not saved whole" in capsys.readouterr().err
        assert sorted(path.name for path in state.iterdir()) == ["identity.key", "lock"]
        assert (state / "identity.key").read_bytes() != keys[0]
    else:
        assert status == 0 and f"the lock in {state} was gone" in caplog.text
        assert stat.S_IMODE(state.stat().st_mode) == 0o700
        assert (state / "identity.key").read_bytes() == keys[0]
        assert len([*state.glob("checkpoints/*/t-*")]) == 1 and (state / "model" / "config.json").is_file()
        assert "validation_loss" in (state / "metrics" / "metrics.jsonl").read_text()


def test_a_folder_of_checkpoints_that_two_peers_have_is_refused_to_the_second(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a link: each would sweep away what the other writes."""
    spec, config, first, second = spec_in(tmp_path), tmp_path / "RUN.toml", tmp_path / "a", tmp_path / "b"
    config.write_text(dataclasses.replace(spec, rounds=1).to_toml())
    for state in (first, second):
        state.mkdir()
        (tmp_path / "disk").mkdir(exist_ok=True)
        (state / "checkpoints").symlink_to(tmp_path / "disk", target_is_directory=True)
    command = ["join", "--config", str(config), "--device", "cpu", "--state-dir"]
    holding = StateDir(first)
    holding.hold(first / "checkpoints")
    assert main([*command, str(second)]) == 2
    said = capsys.readouterr().err
    assert f"another process uses the folder {second / 'checkpoints'}, which is {tmp_path / 'disk'}" in said
    holding.close()
    assert main([*command, str(second)]) == 0


def test_on_a_full_disk_what_was_set_aside_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It goes by itself never, and there may be more of it than of all else."""
    spec = spec_in(tmp_path, codec="fp16")
    writer = saver.Saver(tmp_path, spec, {})
    writer.save(Frozen(4), saves.Local({}))

    def full(*_: object) -> None:
        raise NoRoom("full")

    monkeypatch.setattr(saver, "save_checkpoint", full)
    assert writer.save(Frozen(5), saves.Local({})) is None and "may be deleted" not in caplog.text
    aside = saves.set_aside(tmp_path)
    assert aside is not None and writer.save(Frozen(5), saves.Local({})) is None
    assert caplog.messages[-1] == f"full; what was set aside in {aside.with_name('old-*')} may be deleted (again)"
    aside.with_name("given-up-7").mkdir()
    assert writer.save(Frozen(5), saves.Local({})) is None
    both = f"{aside.with_name('old-*')} and {aside.with_name('given-up-*')}"
    assert caplog.messages[-1] == f"full; what was set aside in {both} may be deleted"


def test_a_full_disk_on_which_nothing_can_be_deleted_is_told_and_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The system makes a disk that has errors read-only."""
    unlink = Path.unlink

    def full(*_: object) -> None:
        raise NoRoom("full")

    def read_only(path: Path, missing_ok: bool = False) -> None:
        if path.name == saves.name_of(1):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(trainer, "save_model", full)
    monkeypatch.setattr(Path, "unlink", read_only)
    _, end = train(tmp_path / "a", spec_in(tmp_path, codec="fp16"))
    assert (end.reason, end.saved, end.model) == ("rounds", True, None)
    assert f"{saves.name_of(1)} cannot be deleted (Read-only file system)" in caplog.text


def test_a_disk_that_fails_while_room_is_made_for_the_model_is_told_and_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint of the end was there, and the training failed all the same, and stayed for nobody."""

    def full(*_: object) -> None:
        raise NoRoom("full")

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    def trained(save: Callable[..., object]) -> Callable[..., object]:
        def then(*given: Any) -> object:
            path = save(*given)
            monkeypatch.setattr(saver, "_damaged_in", broken)
            return path

        return then

    monkeypatch.setattr(trainer, "save_model", full)
    state = tmp_path / "a"
    monkeypatch.setattr(saver.Saver, "save", trained(saver.Saver.save))
    _, end = train(state, spec_in(tmp_path, codec="fp16"))
    assert (end.reason, end.saved, end.model) == ("rounds", True, None)
    assert f"the model folder {state / 'model'} could not be written ([Errno 5] Input/output error)" in caplog.text


def test_checkpoints_of_another_run_are_left_alone_and_what_differs_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever changes an option of RUN.toml, or leaves --config and --peers out, begins another run."""
    caplog.set_level("INFO")
    spec, config, folder = dataclasses.replace(spec_in(tmp_path, codec="fp16"), rounds=1), tmp_path / "R.toml", "a"
    words = ["join", "--config", str(config), "--state-dir", str(tmp_path / folder), "--device", "cpu"]
    for run in (spec, dataclasses.replace(spec, rounds=2), dataclasses.replace(spec, rounds=2, seed=7)):
        assert "left alone" not in caplog.text, "none is there, or it is of the same run"
        config.write_text(run.to_toml())
        assert main(words) == 0
    left = named(tmp_path / folder, dataclasses.replace(spec, rounds=2), 2)
    assert f"the checkpoint {left} belongs to another run, and is left alone (seed: 7 now, 0 then)" in caplog.text
    instead = f"takes the place of {tmp_path / folder / 'model'}; `dlc export {left} --out DIR` writes that run's again"
    assert instead in caplog.text
    assert left.exists()


def test_who_is_to_begin_without_its_checkpoints_and_cannot_join_has_them_still(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They were set aside first, so that one wrong digit in --peers cost them their place."""
    caplog.set_level("INFO")
    spec, state, config = dataclasses.replace(spec_in(tmp_path), rounds=1), tmp_path / "a", tmp_path / "RUN.toml"
    other = dataclasses.replace(spec, seed=7)
    for one in (spec, other):
        saver.Saver(state, one, {}).save(Frozen(1), saves.Local({}))
    command = ["join", "--state-dir", str(state), "--device", "cpu", "--resume", "never"]
    assert main([*command, "--peers", "127.0.0.1:1", "--join-timeout", "0.2"]) == 3
    assert named(state, spec, 1).exists() and not (state / "checkpoints" / "old-1").exists()
    config.write_text(dataclasses.replace(spec, seed=8).to_toml())
    assert main([*command, "--config", str(config), "--found"]) == 0
    aside = sorted(path.name for path in (state / "checkpoints" / "old-1").iterdir())
    assert aside == sorted(named(state, one, 1).parent.name for one in (spec, other))
    assert "set aside in" in caplog.text and "left alone" not in caplog.text


def test_who_names_no_run_goes_on_from_the_newest_of_the_swarms_and_not_of_any(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    spec, state = spec_in(tmp_path, codec="fp16"), tmp_path / "a"
    other = dataclasses.replace(spec, seed=7, rounds=1)
    train(state, dataclasses.replace(spec, rounds=AT))
    train(state, other)
    newest = saves.newest(state)
    assert newest is not None and newest.spec == other
    with Peer.join(spec=spec, state_dir=tmp_path / "b", hold=True) as founder:
        args = parser(demo_wanted=False).parse_args(["join", "--history-bytes=3MiB"])
        args.peers, args.key, args.listen = (founder.address,), None, "127.0.0.1:0"
        opened = StateDir(state)
        peer, saved = join_swarm(args, None, opened, newest, queue.SimpleQueue())
        with peer:
            assert peer.spec == spec and saved is not None
            assert peer._ask(lambda node, now: node.log.history_bytes_max) == 3 << 20
            assert saved.path == named(state, dataclasses.replace(spec, rounds=AT), AT)
        opened.close()
    assert f"the checkpoint {newest.path} belongs to another run, and is left alone" in caplog.text


def test_an_end_that_could_not_be_saved_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dlc.train.checkpoint.save_file", full)
    config = tmp_path / "RUN.toml"
    config.write_text(dataclasses.replace(spec_in(tmp_path, codec="fp16"), rounds=1).to_toml())
    assert main(["join", "--config", str(config), "--state-dir", str(tmp_path / "a"), "--device", "cpu"]) == 4
    said = capsys.readouterr().err
    assert (
        "the end was not saved whole" in said and "the same command begins without a checkpoint: none is here" in said
    )


def test_where_only_the_model_could_not_be_written_it_is_told_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise NoRoom("its disk has 0.0 MB free")

    config, state = tmp_path / "RUN.toml", tmp_path / "a"
    config.write_text(dataclasses.replace(spec_in(tmp_path, codec="fp16"), rounds=1).to_toml())
    command = ["join", "--config", str(config), "--state-dir", str(state), "--device", "cpu"]
    with monkeypatch.context() as patch:
        patch.setattr("dlc.train.trainer.save_model", full)
        assert main(command) == 4
    (checkpoint,) = state.glob("checkpoints/*/*.safetensors")
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"the checkpoint {checkpoint} is of the end, and the model is in it" in said
    assert f"`dlc export {checkpoint} --out DIR`" in said
    assert main(["export", str(checkpoint), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file() and not (state / "model").exists()
    assert main(command) == 0, "which the line says, too"
    assert (state / "model" / "model.safetensors").is_file()
