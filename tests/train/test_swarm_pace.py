"""Trainers of unequal speed over real peers: who is late is left out, goes on, and is counted all the same."""

from __future__ import annotations

import dataclasses
import queue
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import dlc.train.phases
from dlc.comm.events import Waiting
from dlc.comm.filling import Filling
from dlc.comm.timeouts import Timeouts
from dlc.errors import DlcError
from dlc.peer import Peer
from dlc.runspec import DataSpec, InnerSpec, ModelSpec, RunSpec
from dlc.train.inner import InnerLoop, StepResult
from dlc.train.trainer import Summary, Trainer
from tests.helpers import wait_until
from tests.train.test_trainer import LLAMA

H = 10
STEP_S = (0.04, 0.04, 0.04, 0.065)
"""Seconds of an inner step, for each peer: three that wait would lose more than the slow one brings."""
OF_MACHINE = 8.0
"""So many times what an inner step takes this machine it lasts at least, where a slower device is to make a
difference."""
TIMEOUTS = Timeouts(straggler_floor_s=0.05, slot_settle_s=0.3)
ROUNDS, WINDOW = 24, 8
DEADLINE_S = 240.0
Event = dict[str, Any]


def pace(monkeypatch: pytest.MonkeyPatch, lasts_s: Callable[[float], float]) -> None:
    """`lasts_s`: for how long an inner step lasts that took the machine so long, asked on its trainer's thread."""
    train_step = InnerLoop.train_step

    def step(self: InnerLoop, batches: Any, number: int) -> StepResult:
        begun_s = time.monotonic()
        result = train_step(self, batches, number)
        end_s = begun_s + lasts_s(time.monotonic() - begun_s)
        time.sleep(max(0.0, end_s - time.monotonic()))
        return result

    monkeypatch.setattr(InnerLoop, "train_step", step)


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inner steps last as long as the peer's device would take, which is named after it."""
    pace(monkeypatch, lambda took_s: PACE[threading.get_ident()])


@pytest.fixture
def paced_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `paced`; on a slow machine all of them last longer, in proportion: else it would be what all wait for alike,
    and the slower device none."""
    newest_s = deque[float](maxlen=5 * len(STEP_S))

    def lasts_s(took_s: float) -> float:
        newest_s.append(took_s)
        return PACE[threading.get_ident()] * max(1.0, OF_MACHINE * statistics.median(newest_s) / min(STEP_S))

    pace(monkeypatch, lasts_s)


PACE: dict[int, float] = {}
"""Of each trainer's thread."""


class Pupil:
    """One trainer with its peer."""

    def __init__(self, spec: RunSpec, folder: Path, step_s: float, listed: str, timeouts: Timeouts = TIMEOUTS) -> None:
        self.step_s, self.events, self.stop = step_s, list[Event](), threading.Event()
        heard: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.peer = Peer.join(listed, spec=spec, hold=True, on_event=heard.put, timeouts=timeouts)
        self.trainer = Trainer(
            self.peer, folder, device="cpu", on_event=self.events.append, peer_events=heard, eval_blocks=1
        )

    def go(self) -> Summary:
        PACE[threading.get_ident()] = self.step_s
        return self.trainer.run(self.stop)

    def all(self, name: str) -> list[Event]:
        return [event for event in list(self.events) if event["event"] == name]


def spec_of(folder: Path, rounds: int, lease_blocks: int = 0) -> RunSpec:
    text = folder / "text.txt"
    text.write_bytes(bytes(range(32, 127)) * 100)
    return RunSpec(
        rounds=rounds,
        sync_every=H,
        chunk_elems=1024,
        model=ModelSpec(config=LLAMA),
        data=DataSpec(source=str(text), seq_len=16, lease_blocks=lease_blocks),
        inner=InnerSpec(batch_size=2, warmup_steps=1),
    )


def regularly(counted: list[bool]) -> bool:
    """Left out of some rounds, never of three in a row, and not of most."""
    thrice = any(not any(counted[i : i + 3]) for i in range(len(counted) - 2))
    return not all(counted) and not thrice and counted.count(False) <= 0.6 * len(counted)


def test_a_slower_peer_is_counted_regularly_with_all_its_work(tmp_path: Path, paced_alike: None) -> None:
    spec = spec_of(tmp_path, ROUNDS)
    pupils: list[Pupil] = []
    with ThreadPoolExecutor(len(STEP_S)) as pool:
        try:
            for i, step_s in enumerate(STEP_S):
                listed = pupils[0].peer.address if pupils else ""
                pupils.append(Pupil(spec, tmp_path / str(i), step_s, listed))
            ends = [pool.submit(pupil.go) for pupil in pupils]
            wait_until(lambda: all(end.done() for end in ends), DEADLINE_S, "all trainers end")
        finally:
            for pupil in pupils:
                pupil.stop.set()
                try:
                    pupil.peer.leave()
                except DlcError:
                    pass
        summaries = [end.result() for end in ends]
    assert {s.reason for s in summaries} == {"rounds"}
    assert len({(s.t, s.digest) for s in summaries}) == 1

    slow = pupils[-1]
    rounds = {event["t"]: event for pupil in pupils for event in pupil.all("round")}
    everybody = [t for t, event in rounds.items() if len(event["contributors"]) + len(event["missing"]) == len(STEP_S)]
    counted = [any(c["peer"] == slow.peer.id for c in rounds[t]["contributors"]) for t in sorted(everybody)]
    # In every second round if all keep their pace, as they do for a while; a busy machine changes who is fast.
    windows = [counted[i : i + WINDOW] for i in range(len(counted) - WINDOW + 1)]
    assert any(regularly(window) for window in windows), f"counted too seldom, or waited for every time: {counted}"

    # All that anybody trained is counted, but for what was in hand at the end of the run.
    tokens: Counter[str] = Counter()
    for event in rounds.values():
        tokens.update({c["peer"]: c["weight"] for c in event["contributors"]})
    for pupil in pupils:
        steps, summary = len(pupil.all("step")), summaries[pupils.index(pupil)]
        assert steps * 32 == tokens[pupil.peer.id] + summary.setbacks.tokens_dropped
    assert sum(tokens.values()) == summaries[0].tokens


def test_without_a_quorum_inner_steps_go_on_and_all_of_them_count(tmp_path: Path, paced: None) -> None:
    """Two of three die at once: the third may only go on without them after T_evict, and works until then."""
    evict_s, step_s = 12.0, 0.02  # who is stopped for a quarter of it has to ask anew what it missed
    timeouts = Timeouts(probe_s=0.1, beat_s=0.4, evict_s=evict_s, slot_settle_s=0.3)
    spec = spec_of(tmp_path, rounds=1000, lease_blocks=20_000)
    pupils: list[Pupil] = []
    told: list[tuple[float, float]] = []
    """What the one that is left says is left of T_evict, and T_evict as it has it just then."""

    with ThreadPoolExecutor(3) as pool:
        try:
            for i in range(3):
                listed = pupils[0].peer.address if pupils else ""
                pupils.append(Pupil(spec, tmp_path / str(i), step_s, listed, timeouts))
            ends = [pool.submit(pupil.go) for pupil in pupils]
            left, *dead = pupils
            hear = left.peer._on_event

            def noted(event: object) -> None:
                if isinstance(event, Waiting) and event.reason == "no quorum" and event.left_s is not None:
                    told.append((event.left_s, left.peer._node.members.t_evict_s))
                hear(event)

            left.peer._on_event = noted
            wait_until(lambda: any(len(e["contributors"]) == 3 for e in left.all("round")), DEADLINE_S, "all take part")
            for pupil in dead:
                pupil.peer._driver.stop(0.0)  # nothing is announced
            died = len(left.events)

            def missed() -> int:
                """Which of its events says first that there is no quorum; 0: none does yet."""
                after = enumerate(left.events[died:], died)
                return next((i for i, e in after if (e["event"], e.get("reason")) == ("waiting", "no quorum")), 0)

            wait_until(missed, DEADLINE_S, "the quorum is missed")
            earlier = left.events[: missed()]
            at = max(event["t"] for event in earlier if event["event"] == "round")
            steps = sum(event["event"] == "step" for event in earlier)
            wait_until(lambda: left.all("round")[-1]["t"] >= at + 3, DEADLINE_S, "it goes on alone")
        finally:
            for pupil in pupils:
                pupil.stop.set()
        summary = ends[0].result(DEADLINE_S)
        for end in ends[1:]:
            with pytest.raises(DlcError):
                end.result(DEADLINE_S)
    # In steps of 5 s; a host that is not scheduled in time gives the others longer, as it knows.
    assert told and all(left_s <= given_s + 5.0 and left_s % 5.0 == 0.0 for left_s, given_s in told)
    later = [event for event in left.all("round") if event["t"] > at]
    ahead = max(event["weight"] for event in later) / (2 * 16)
    assert ahead > 3 * H, f"no more than {ahead} steps were made while there was no quorum"
    assert steps + ahead <= len(left.all("step")) + H
    counted = sum(c["weight"] for e in left.all("round") for c in e["contributors"] if c["peer"] == left.peer.id)
    assert len(left.all("step")) * 2 * 16 == counted + summary.setbacks.tokens_dropped


def test_rounds_of_steps_that_take_their_time_are_agreed_upon_before_these_end(
    tmp_path: Path, paced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All offers of all peers are whole, and none is made twice."""
    spec = dataclasses.replace(spec_of(tmp_path, rounds=8), sync_every=3)
    pupils: list[Pupil] = []
    planned: list[bool] = []
    reached = Filling.reached

    def noted(filling: Filling, start: int) -> None:
        nodes = [pupil.peer._node for pupil in pupils]
        mine = next(node for node in nodes for o in list(node.exchange.offered.values()) if o.filling is filling)
        planned.append(mine.slot.plan is not None)
        reached(filling, start)

    monkeypatch.setattr(Filling, "reached", noted)
    with ThreadPoolExecutor(3) as pool:
        try:
            for i in range(3):
                listed = pupils[0].peer.address if pupils else ""
                pupils.append(Pupil(spec, tmp_path / str(i), 0.3, listed, Timeouts()))
            ends = [pool.submit(pupil.go) for pupil in pupils]
            wait_until(lambda: all(end.done() for end in ends), DEADLINE_S, "all trainers end")
        finally:
            for pupil in pupils:
                pupil.stop.set()
        summaries = [end.result() for end in ends]
    assert {s.reason for s in summaries} == {"rounds"} and len({(s.t, s.digest) for s in summaries}) == 1
    rounds = {event["t"]: event for pupil in pupils for event in pupil.all("round")}
    tokens: Counter[str] = Counter()
    for event in rounds.values():
        assert all(c["fraction"] == 1.0 for c in event["contributors"])
        tokens.update({c["peer"]: c["weight"] for c in event["contributors"]})
    for pupil, summary in zip(pupils, summaries, strict=True):
        assert len(pupil.all("step")) * 32 == tokens[pupil.peer.id] + summary.setbacks.tokens_dropped
    assert sum(planned) >= 3, f"hardly a round was planned before the last step of its contributors ended: {planned}"


def test_a_last_step_that_takes_much_longer_than_the_others_costs_a_lone_trainer_no_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is nobody to go on without it: its round would be one with nobody in it, and the run a round shorter."""
    train_step, steps = InnerLoop.train_step, [0]

    def step(self: InnerLoop, batches: Any, number: int) -> StepResult:
        steps[0] += 1
        time.sleep(8.0 if steps[0] == 6 else 0.25)
        return train_step(self, batches, number)

    monkeypatch.setattr(InnerLoop, "train_step", step)
    monkeypatch.setattr(dlc.train.phases, "EXPECTED_S_MIN", 0.1)  # others would not wait for as long as it takes
    monkeypatch.setattr(dlc.train.phases, "OVERRUN_STEPS", 0.5)
    spec = dataclasses.replace(spec_of(tmp_path, rounds=2), sync_every=3)
    alone = Pupil(spec, tmp_path / "alone", 0.0, "", Timeouts())
    try:
        summary = alone.go()
    finally:
        alone.peer.leave()
    assert [event["counted"] for event in alone.all("round")] == [True, True]
    assert (summary.t, summary.tokens) == (2, 2 * spec.tokens_per_round)
    assert not summary.setbacks.tokens_dropped
