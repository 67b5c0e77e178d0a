"""When inner steps end: after so many, or at a time that all have in common. All in virtual time."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import dlc.train.local_model
from dlc.comm.straggler import NEVER_S
from dlc.runspec import RunSpec
from dlc.train import others
from dlc.train.inner import InnerLoop, StepResult
from dlc.train.others import Others
from dlc.train.pace import Deadline, Pace, Steps, pace_of
from tests.train.fake_peer import FakeMember, FakePeer
from tests.train.test_ahead import PER_STEP, STEP_TOKENS, spec, trained
from tests.train.test_trainer import Run

__all__ = ["spec", "trained"]

H = 20


@pytest.fixture(autouse=True)
def look_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dlc.train.local_model, "POLL_S", 0.0)
    monkeypatch.setattr(others, "LOOK_EVERY_S", 0.0)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def telling(step_s: float, t: int = 0, inner: int = 0, of: int = H, name: str = "other") -> FakeMember:
    return FakeMember(name, status={"t": t, "inner": inner, "of": of, "step_s": step_s})


def phase_of(pace: Pace, clock: Clock, step_s: float, made: int = 0) -> int:
    """Steps until it is time for a round."""
    while not pace.due(made):
        clock.now += step_s
        made += 1
    return made


def swarm_round(h: int, steps_s: Sequence[float]) -> tuple[list[int], list[float]]:
    """Inner steps of each peer in one phase after a common commit, and when each offers them."""
    made, offered_s = [], []
    for index, step_s in enumerate(steps_s):
        members = [telling(s, name=str(i)) for i, s in enumerate(steps_s) if i != index]
        clock = Clock()
        pace = Deadline(h, 0.0, Others(lambda m=members: m, clock), lambda s=step_s: s, clock)
        pace.begins(0, 0, clock.now)
        made.append(phase_of(pace, clock, step_s))
        offered_s.append(clock.now)
    return made, offered_s


def test_peers_of_one_speed_make_h_steps_each() -> None:
    made, offered_s = swarm_round(50, [0.3] * 4)
    assert made == [50] * 4 and offered_s == pytest.approx([15.0] * 4)


def test_a_peer_ten_times_slower_is_not_waited_for() -> None:
    """The others keep 95 % of their tokens per second, and its few steps are in every round."""
    made, offered_s = swarm_round(50, [0.1, 0.1, 0.1, 1.0])
    assert made == [50, 50, 50, 5]
    round_s = max(offered_s)
    assert 3 * 50 / round_s >= 0.95 * 3 / 0.1


def test_a_faster_peer_makes_more_steps_and_waits_for_less_than_one() -> None:
    made, offered_s = swarm_round(50, [0.1, 0.1, 0.043, 0.1])
    assert made[2] == 116 and made[0] == 50
    assert max(offered_s) - offered_s[2] < 0.043


def test_unequal_peers_are_ready_at_almost_the_same_time() -> None:
    steps_s = [0.07, 0.1, 0.13, 0.31, 0.9]
    _, offered_s = swarm_round(100, steps_s)
    end = max(offered_s)
    assert all(end - at < 1.3 * step_s for at, step_s in zip(offered_s, steps_s, strict=True))
    assert end <= 100 * statistics.median(steps_s) + 0.25 * max(steps_s)


def test_a_slow_peer_makes_one_step_at_least() -> None:
    made, offered_s = swarm_round(10, [0.1, 0.1, 0.1, 60.0])
    assert made[3] == 1 and offered_s[3] == 60.0


def test_the_time_of_a_round_may_be_told() -> None:
    clock = Clock()
    pace = Deadline(50, 2.0, Others(lambda: [telling(9.0)], clock), lambda: 0.25, clock)
    pace.begins(3, 0, clock.now)
    assert pace.target(0) == 8 and phase_of(pace, clock, 0.25) == 8


def test_steps_made_while_the_round_was_on_its_way_count() -> None:
    clock = Clock()
    clock.now = 7.0
    pace = Deadline(50, 2.0, Others(list, clock), lambda: 0.25, clock)
    pace.begins(3, 3, clock.now - 3 * 0.25)
    assert pace.target(3) == 8 and phase_of(pace, clock, 0.25, made=3) == 8


def test_a_newcomer_is_ready_when_the_others_are() -> None:
    """They have 30 of their 50 steps before them, of which they told a second ago."""
    clock = Clock()
    members = [telling(0.1, t=4, inner=20, of=50, name=str(i)) for i in range(3)]
    pace = Deadline(50, 0.0, Others(lambda: members, clock), lambda: 0.2, clock)
    pace.begins(4, 0, None)
    assert phase_of(pace, clock, 0.2) == 10 and clock.now == pytest.approx(2.0)


@pytest.mark.parametrize("round_s", [0.0, 2.0])
def test_a_newcomer_does_not_go_on_without_end_because_one_says_that_it_will(round_s: float) -> None:
    """Its deadline never came, and what it trained was in no round."""
    clock = Clock()
    members = [telling(86400.0, t=4, inner=0, of=1 << 50)]
    pace = Deadline(H, round_s, Others(lambda: members, clock), lambda: 0.1, clock)
    pace.begins(4, 0, None)
    made = 0
    while made < 3 * H and not pace.due(made):
        clock.now, made = clock.now + 0.1, made + 1
    assert made == 2 * H and pace.target(made) <= made + 1


def test_nobody_knows_a_speed_before_the_first_steps() -> None:
    clock, told = Clock(), [0.0]
    pace = Deadline(5, 0.0, Others(list, clock), lambda: told[0], clock)
    pace.begins(0, 0, None)
    assert pace.target(0) == 5 and not pace.due(0) and not pace.due(4) and pace.due(5)
    told[0] = 0.5
    assert phase_of(pace, clock, 0.5) == 5


def test_the_run_says_which(spec: RunSpec) -> None:
    clock = Clock()
    by_steps = pace_of(dataclasses.replace(spec, fragments=2), Others(list, clock), lambda: 1.0, clock)
    assert isinstance(by_steps, Steps) and by_steps.due(2) and not by_steps.due(1) and by_steps.target(7) == 2
    by_time = dataclasses.replace(spec, sync_mode="deadline")
    assert isinstance(pace_of(by_time, Others(list, clock), lambda: 1.0, clock), Deadline)
    told = pace_of(dataclasses.replace(by_time, round_s=30.0), Others(list, clock), lambda: 1.0, clock)
    told.begins(0, 0, clock.now)
    assert told.target(0) == 30


class Timed:
    """A trainer whose inner steps take `step_s` of a virtual clock, among others of `others_s`."""

    def __init__(
        self,
        spec: RunSpec,
        folder: Path,
        step_s: float,
        others_s: Sequence[float],
        patch: pytest.MonkeyPatch,
        **options: Any,
    ) -> None:
        self.clock = clock = Clock()
        train_step = InnerLoop.train_step

        def timed(loop: InnerLoop, batches: Any, step: int) -> StepResult:
            clock.now += step_s
            return train_step(loop, batches, step)

        patch.setattr(InnerLoop, "train_step", timed)
        self.run = Run(FakePeer(spec), folder, clock=clock, **options)
        self.run.peer.others = [telling(s, name=str(i)) for i, s in enumerate(others_s)]


def test_a_slow_trainer_offers_few_steps_in_time(
    spec: RunSpec, tmp_path: Path, trained: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    deadline = dataclasses.replace(spec, rounds=3, sync_every=H, sync_mode="deadline", round_s=H * 0.1)
    timed = Timed(deadline, tmp_path, 0.5, [0.1, 0.1, 0.1], monkeypatch)
    timed.run.go()
    first = 2  # by what the others said, they began a second before us
    assert timed.run.peer.weights == [first * STEP_TOKENS, 4 * STEP_TOKENS, 4 * STEP_TOKENS]
    assert trained == list(range((first + 8) * PER_STEP))
    assert timed.clock.now == pytest.approx(3 * H * 0.1 - 1.0)
    told = [said["eta_s"] for said in timed.run.peer.said if said.get("eta_s")]
    assert told.pop() == NEVER_S, "it leaves"
    assert told[1:] and max(told[1:]) <= H * 0.1, "but for the first step, before which no speed is known"


def test_a_fast_trainer_goes_on_as_far_as_its_lease_holds(
    spec: RunSpec, tmp_path: Path, trained: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    deadline = dataclasses.replace(spec, rounds=2, sync_every=H, sync_mode="deadline", round_s=H * 0.5)
    timed = Timed(deadline, tmp_path, 0.1, [0.5], monkeypatch)
    timed.run.go()
    first = 5 * H - 10  # by what the others said, they began a second before us
    assert timed.run.peer.weights == [first * STEP_TOKENS, 5 * H * STEP_TOKENS]
    assert deadline.blocks_per_lease == 8 * H * PER_STEP
    assert trained == list(range((first + 5 * H) * PER_STEP))
    steps = [event["step"] for event in timed.run.all("step")]
    assert steps[:first] == [*range(H), *[H - 1] * (first - H)], "the rate stays at that of the round's last step"


def test_a_trainer_that_is_busy_after_a_round_offers_with_the_others_all_the_same(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their time runs from the commit. Half of it is gone when this one has measured its validation loss."""
    deadline = dataclasses.replace(spec, rounds=3, sync_every=H, sync_mode="deadline", round_s=2.0)
    timed = Timed(deadline, tmp_path, 0.1, [], monkeypatch, eval_every=1)
    timed.run.peer.round_s = 0.0

    def evaluate(batches: object) -> float:
        timed.clock.now += 1.0
        return 1.0

    monkeypatch.setattr(timed.run.trainer._engine, "evaluate", evaluate)
    timed.run.go()
    assert timed.run.peer.weights == [H * STEP_TOKENS, H // 2 * STEP_TOKENS, H // 2 * STEP_TOKENS]


@pytest.mark.parametrize("overlap", ["delayed", "eager"])
def test_with_overlap_the_deadline_is_as_long_after_the_plan_as_for_the_others(
    overlap: str, spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever offered early would be as early in the next round, and more so in each, if its time ran from its own
    offer: there would be no moment that all have in common."""
    deadline = dataclasses.replace(spec, rounds=4, sync_every=H, sync_mode="deadline", round_s=2.0, overlap=overlap)
    timed = Timed(deadline, tmp_path, 0.1, [], monkeypatch)
    early = 5
    timed.run.peer.slices, timed.run.peer.round_s = [early, early, early], early * 0.1
    timed.run.go()
    assert timed.run.peer.weights == [H * STEP_TOKENS, *[(early + H) * STEP_TOKENS] * 3]
