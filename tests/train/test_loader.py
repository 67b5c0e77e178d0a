from __future__ import annotations

import dataclasses
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dlc.errors import DataError
from dlc.runspec import DataSpec, RunSpec
from dlc.train import loader as loader_module
from dlc.train import local_model, saves, supply
from dlc.train.data import BlockSource
from dlc.train.loader import AHEAD_MAX, Loader, Stopped
from dlc.train.supply import Supply
from tests.helpers import wait_until
from tests.train.fake_peer import FakeMember, FakePeer
from tests.train.test_ahead import STEP_TOKENS
from tests.train.test_served import Helpers, helpers
from tests.train.test_trainer import H, Run, spec

__all__ = ["helpers", "spec"]


class Source:
    """Block k holds k; it can be held up, and notes what is made, and on which threads."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.threads: set[str] = set()
        self.go = threading.Event()
        self.go.set()
        self.broken = self.broken_off = False

    def batch(self, ks: Sequence[int]) -> Tensor:
        assert self.go.wait(30)
        if self.broken:
            raise DataError("the stream broke off")
        self.threads.add(threading.current_thread().name)
        self.made.extend(ks)
        return torch.tensor([[k, k] for k in ks])

    def break_off(self) -> None:
        self.broken_off = True


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def loader(source: Source) -> Any:
    made = Loader(source, 2)  # type: ignore[arg-type]  # the rest of it is not used
    yield made
    source.go.set()
    made.close()


def plain(batches: list[Tensor]) -> list[list[int]]:
    return [batch[:, 0].tolist() for batch in batches]


def test_the_next_steps_are_made_while_one_computes(source: Source, loader: Loader) -> None:
    steps = [[3 * i, 3 * i + 1, 3 * i + 2] for i in range(6)]
    assert plain(loader.take(steps[0], steps[1:])) == [[0, 1], [2]]
    wait_until(lambda: len(source.made) == 3 * (1 + AHEAD_MAX))
    source.go.clear()
    assert plain(loader.take(steps[1], steps[2:])) == [[3, 4], [5]]  # made before
    source.go.set()
    for i in range(2, 6):
        assert plain(loader.take(steps[i], steps[i + 1 :])) == [steps[i][:2], steps[i][2:]]
    assert source.made == list(range(18))  # each once, in order, and nothing beyond
    assert len(source.threads) == 1 and "dlc-loader" in source.threads.pop()


def test_a_plan_that_changes_is_made_anew(source: Source, loader: Loader) -> None:
    loader.take([0], [[1], [2]])
    assert plain(loader.take([7], [[8]])) == [[7]]
    assert plain(loader.take([8], [[1], [2]])) == [[8]]
    assert plain(loader.take([1])) == [[1]]
    assert plain(loader.take([1], [[1]])) == [[1]] and plain(loader.take([1])) == [[1]]
    assert plain(loader.take([5], [[6], [9]])) == [[5]]
    assert plain(loader.take([6], [[7], [9]])) == [[6]]  # the first of the plan still holds
    assert plain(loader.take([7])) == [[7]]


def test_only_so_much_is_made_ahead(source: Source, loader: Loader) -> None:
    loader.take([0], [[i] for i in range(1, 50)])
    loader.take([1], [[i] for i in range(2, 50)])
    wait_until(lambda: len(source.made) == 2 + AHEAD_MAX)
    assert len(loader._made) == AHEAD_MAX


def test_an_error_comes_with_the_step_that_needs_it(source: Source, loader: Loader) -> None:
    loader.take([0])
    source.broken = True
    with pytest.raises(DataError, match="broke off"):
        loader.take([1], [[2]])
    source.broken = False
    assert plain(loader.take([1])) == [[1]], "it is read again"
    loader.take([9])  # what failed for another plan is forgotten


def test_who_is_to_stop_waits_for_no_batch_and_for_no_source_that_hangs(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_module, "CLOSE_S", 0.01)
    looks: list[bool] = []
    loader = Loader(source, 2, stopping=lambda: bool(looks) and looks.pop(0))  # type: ignore[arg-type]
    loader.take([0], [[1]])
    wait_until(lambda: all(batches.done() for _, batches in loader._made))
    assert source.made == [0, 1]
    source.go.clear()
    looks += [False, False, True, True, False]
    assert plain(loader.take([1], [[2], [3]])) == [[1]] and len(looks) == 5, "what is there is given"
    with pytest.raises(Stopped):
        loader.take([2], [[3]])
    with pytest.raises(Stopped):
        loader.take([2], [[3]])
    assert not source.broken_off
    loader.close()
    assert source.broken_off and loader._thread is not None and loader._thread.is_alive() and loader._thread.daemon
    source.go.set()
    loader._thread.join(30)
    assert not loader._thread.is_alive() and source.made == [0, 1, 2], "nothing more was begun"


def test_a_batch_that_came_late_is_the_one_that_was_waited_for(source: Source) -> None:
    stopping = True
    loader = Loader(source, 2, stopping=lambda: stopping)  # type: ignore[arg-type]
    source.go.clear()
    with pytest.raises(Stopped):
        loader.take([0], [[1]])
    source.go.set()
    stopping = False
    assert plain(loader.take([0], [[1]])) == [[0]] and plain(loader.take([1])) == [[1]]
    assert source.made == [0, 1]
    loader.close()
    assert loader._thread is not None and not loader._thread.is_alive()


def test_blocks_that_were_not_there_come_next(source: Source) -> None:
    lease = SimpleNamespace(take=lambda count: (list(range(count)), count))
    model = SimpleNamespace(newest=lambda: SimpleNamespace(lease=lease))
    loader = Loader(source, 2, stopping=lambda: True)  # type: ignore[arg-type]
    blocks = Supply(model, loader, 2)  # type: ignore[arg-type]
    source.go.clear()
    with pytest.raises(Stopped):
        blocks.batches(blocks.next((), 3))
    source.go.set()
    assert blocks.next((), 3) == [0, 1]
    blocks.close()


def test_of_a_lease_that_names_other_blocks_than_were_trained_none_come_next(source: Source) -> None:
    """They were given out again: its next ones would be counted as what comes after the others."""
    lease = SimpleNamespace(take=lambda count: (list(range(count)), count))
    model = SimpleNamespace(newest=lambda: SimpleNamespace(lease=lease))
    blocks = Supply(model, Loader(source, 2), 2)  # type: ignore[arg-type]
    assert blocks.next((0, 1), 3) == [2, 3]
    blocks.forget()
    assert blocks.next((5, 6), 3) == []
    blocks.close()


Hang = Callable[[Run, int], None]


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hang]:
    """The source hangs after so many steps, and the run is told to stop when it waits for the next one."""
    monkeypatch.setattr(loader_module, "CLOSE_S", 0.01)
    monkeypatch.setattr(loader_module, "WAIT_SLICE_S", 0.01)
    release, batch, take = threading.Event(), BlockSource.batch, Loader.take

    def after(run: Run, steps: int) -> None:
        read: set[tuple[int, ...]] = set()
        taken = itertools.count()

        def hanging(self: BlockSource, ks: Sequence[int]) -> Tensor:
            read.add(tuple(ks))
            if len(read) > 2 * steps:  # accumulate
                release.wait(30)
            return batch(self, ks)

        def stopped(self: Loader, *groups: Any) -> list[Tensor]:
            if next(taken) == steps:
                run.stop.set()
            return take(self, *groups)

        monkeypatch.setattr(BlockSource, "batch", hanging)
        monkeypatch.setattr(Loader, "take", stopped)

    yield after
    release.set()


@pytest.mark.parametrize("steps", [0, 2])
def test_a_training_whose_source_hangs_stops_and_saves(spec: RunSpec, tmp_path: Path, steps: int, hang: Hang) -> None:
    run = Run(FakePeer(spec), tmp_path)
    hang(run, H + steps)
    summary = run.go()
    assert (summary.reason, summary.t, summary.saved) == ("interrupted", 1, True) and run.peer.left
    saved = saves.newest(tmp_path, spec)
    assert saved is not None and saved.t == 1
    assert torch.equal(run.params(), run.peer.theta())


def test_its_steps_go_into_a_round_that_is_near(spec: RunSpec, tmp_path: Path, hang: Hang) -> None:
    run = Run(FakePeer(spec), tmp_path)
    run.peer.others = [FakeMember(status={"t": 0, "inner": 0, "of": 0, "step_s": 1.0})]
    hang(run, 2)
    summary = run.go()
    assert (summary.reason, summary.t) == ("interrupted", 1) and run.peer.weights == [2 * STEP_TOKENS]


def test_a_round_that_is_under_way_has_what_was_offered(spec: RunSpec, tmp_path: Path, hang: Hang) -> None:
    run = Run(FakePeer(dataclasses.replace(spec, overlap="delayed")), tmp_path)
    run.peer.slices = [3]
    run.peer.others = [FakeMember(status={"t": 0, "inner": 0, "of": 0, "step_s": 1.0})]
    hang(run, H + 1)
    summary = run.go()
    assert (summary.reason, summary.setbacks.tokens_dropped) == ("interrupted", 0)
    assert run.peer.weights == [H * STEP_TOKENS, STEP_TOKENS]


def test_a_server_has_the_steps_that_were_made(
    spec: RunSpec, tmp_path: Path, hang: Hang, helpers: type[Helpers]
) -> None:
    run = Run(FakePeer(dataclasses.replace(spec, strategy="parameter-server")), tmp_path)
    hang(run, 2)
    summary = run.go()
    assert (summary.reason, summary.t, summary.setbacks.tokens_dropped) == ("interrupted", 1, 0)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_run_is_the_same_with_and_without_it(
    streaming: bool, spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "text.jsonl"
    source.write_text("".join(json.dumps({"text": f"document {i} " * (1 + i % 5)}) + "\n" for i in range(300)))
    data = DataSpec(source=str(source), seq_len=16, streaming=streaming, shards=2 if streaming else 8)
    spec = dataclasses.replace(spec, data=data, rounds=3)
    monkeypatch.setattr(local_model, "POLL_S", 0.0)  # or the round that passes is noticed sooner on a slow machine
    ahead = Run(FakePeer(spec), tmp_path / "ahead")
    ahead.on_step = {6: ahead.peer.pass_round}  # also where the plan changes
    ahead.go()
    monkeypatch.setattr(loader_module, "AHEAD_MAX", 0)
    monkeypatch.setattr(supply, "AHEAD_MAX", 0)
    plain = Run(FakePeer(spec), tmp_path / "plain")
    plain.on_step = {6: plain.peer.pass_round}
    plain.go()
    losses = [event["loss"] for event in ahead.all("step")]
    assert losses == [event["loss"] for event in plain.all("step")] and len(set(losses)) >= 8
    assert torch.equal(ahead.peer.theta(), plain.peer.theta())
