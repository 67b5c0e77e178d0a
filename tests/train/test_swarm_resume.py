"""Trainers that are stopped and started again together, from checkpoints of one round, go on bit for bit."""

from __future__ import annotations

import queue
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dlc.peer import Peer, Resume
from dlc.runspec import DataSpec, InnerSpec, ModelSpec, RunSpec
from dlc.train import saves
from dlc.train.others import Others
from dlc.train.phases import Phases
from dlc.train.rounds import Rounds
from dlc.train.saves import Saved
from dlc.train.trainer import Summary, Trainer
from tests.helpers import wait_until
from tests.swarm import DEADLINE_S, PATIENT, ROUND_S, free_addresses
from tests.test_resume import Late
from tests.train.test_trainer import LLAMA

H, ROUNDS, AT, AHEAD = 3, 4, 2, 2
Event = dict[str, Any]


@pytest.fixture(autouse=True)
def steps_during_a_round_are_as_many_as_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not as the time would have it, of which no two runs have as much."""
    contribute = Peer.contribute
    monkeypatch.setattr(Peer, "contribute", lambda peer, *args, **more: Late(partial(contribute, peer, *args, **more)))
    monkeypatch.setattr(Phases, "_patience_s", lambda phases: DEADLINE_S)
    monkeypatch.setattr(Phases, "_somebody_is_late", lambda phases: False)
    monkeypatch.setattr(Phases, "_announce", lambda phases, group, tokens: None)
    monkeypatch.setattr(Others, "inner", lambda others, t: None)  # who begins a moment later begins at the first step


class Pair:
    """Two peers; each begins to train once the other has the model."""

    def __init__(
        self, spec: RunSpec, folders: Sequence[Path], at: Sequence[str], saved: Sequence[Saved | None]
    ) -> None:
        self._spec, self._folders, self._at, self._saved = spec, folders, at, saved
        self._synced = threading.Barrier(2)
        self.steps: list[list[Event]] = [[], []]
        self.contributors: list[int] = []

    def run(self) -> list[Summary]:
        heard = [queue.SimpleQueue[object]() for _ in self._folders]
        with ThreadPoolExecutor(2) as pool:
            peers = list(pool.map(self._join, (0, 1), heard))
            try:
                trainers = [self._trainer(i, peers[i], heard[i]) for i in (0, 1)]  # the seed is the process's
                wait_until(lambda: all(sum(m.alive for m in p.members()) == 2 for p in peers), DEADLINE_S, "acquainted")
                return list(pool.map(lambda trainer: trainer.run(threading.Event()), trainers))
            finally:
                for peer in peers:
                    peer.leave()

    def _join(self, i: int, heard: queue.SimpleQueue[object]) -> Peer:
        saved = self._saved[i]
        return Peer.join(
            self._at[:i],
            found=not i,
            listen=self._at[i],
            spec=self._spec,
            hold=True,
            timeouts=PATIENT,
            state_dir=self._folders[i],
            resume=Resume(saved.log) if saved is not None else None,
            on_event=heard.put,
        )

    def _trainer(self, i: int, peer: Peer, heard: queue.SimpleQueue[object]) -> Trainer:
        def take(event: Event) -> None:
            if event["event"] == "synced":
                self._synced.wait(DEADLINE_S)
            elif event["event"] == "round":
                self.contributors.append(len(event["contributors"]))
                trainer._saver.finish()
            elif event["event"] == "step":
                self.steps[i].append(event)

        folder, saved = self._folders[i], self._saved[i]
        options: dict[str, Any] = {"eval_blocks": 2, "checkpoint_every": 1, "keep": 100}
        trainer = Trainer(peer, folder, device="cpu", on_event=take, peer_events=heard, resume=saved, **options)
        assert isinstance(trainer.strategy, Rounds)
        trainer.strategy.outer.patience_s = ROUND_S  # each round waits for both
        return trainer


@pytest.mark.parametrize(("overlap", "fragments", "mixing"), [("none", 1, 0.0), ("delayed", 1, 0.0), ("eager", 2, 0.5)])
def test_two_trainers_that_are_started_again_go_on_as_if_they_had_not_been_stopped(
    tmp_path: Path, overlap: str, fragments: int, mixing: float
) -> None:
    """Their leases were mixed, what was ahead of the round was lost, and eager took its part for all of the mean."""
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(32, 127)) * 200)
    ahead = AHEAD if overlap != "none" else 0
    spec = RunSpec(
        rounds=ROUNDS,
        sync_every=H * fragments,
        overlap=overlap,
        overlap_steps=ahead,
        fragments=fragments,
        mixing=mixing,
        codec="int8",
        model=ModelSpec(config=LLAMA),
        data=DataSpec(source=str(text), seq_len=16),
        inner=InnerSpec(batch_size=2, warmup_steps=1),
    )
    at, before = free_addresses(2), [tmp_path / name for name in ("a0", "a1")]
    first = Pair(spec, before, at, [None, None])
    (end, other_end) = first.run()
    after = [shutil.copytree(folder, folder.with_name(f"{folder.name}-again")) for folder in before]
    saved = [saves.read(saves.folder_of(folder, spec) / saves.name_of(AT)) for folder in after]
    second = Pair(spec, after, at, saved)
    ends = second.run()
    assert set(first.contributors) == set(second.contributors) == {2}, "somebody was late: the test proves nothing"
    assert {e.digest for e in (end, other_end, *ends)} == {end.digest}
    for whole, resumed in zip(first.steps, second.steps, strict=True):
        rest = [(step["step"], step["loss"], step["lr"]) for step in whole][AT * H + ahead :]
        assert [(step["step"], step["loss"], step["lr"]) for step in resumed] == rest
