"""Inner steps that go on where a round cannot, and what becomes of them (promises P3, P4, P7)."""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dlc.train.local_model
from dlc.cli.sinks import sentence
from dlc.comm.events import ContributionDropped, DigestMismatch, HistoryLost, LeftAhead, Waiting
from dlc.comm.straggler import NEVER_S
from dlc.errors import DlcError
from dlc.runspec import DataSpec, InnerSpec, ModelSpec, RunSpec, TimeoutsSpec
from dlc.train import others, phases, trainer
from dlc.train.inner import InnerLoop, StepResult
from dlc.train.loader import Loader
from dlc.train.offers import Work
from dlc.train.outer_loop import OuterLoop
from dlc.train.telling import SITS_OUT
from tests.helpers import wait_until
from tests.train.fake_peer import THIRD, FakeMember, FakePeer
from tests.train.school import DEADLINE_S, Pupil, School
from tests.train.test_trainer import LLAMA, H, Run

PER_STEP = 4
"""Blocks: 2 x 2 accumulated."""
STEP_TOKENS = PER_STEP * 16
Event = dict[str, Any]


@pytest.fixture(autouse=True)
def look_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dlc.train.local_model, "POLL_S", 0.0)
    monkeypatch.setattr(others, "LOOK_EVERY_S", 0.0)


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(32, 127)) * 100)
    return RunSpec(
        rounds=2,
        sync_every=H,
        model=ModelSpec(config=LLAMA),
        data=DataSpec(source=str(text), seq_len=16),
        inner=InnerSpec(batch_size=2, accumulate=2, warmup_steps=1),
    )


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The blocks of all inner steps, in order."""
    seen: list[int] = []
    take = Loader.take

    def noted(self: Loader, group: Any, ahead: Any) -> Any:
        seen.extend(group)
        return take(self, group, ahead)

    monkeypatch.setattr(Loader, "take", noted)
    return seen


def far(t: int, step_s: float = 1000.0) -> FakeMember:
    """Another one, that has a long way to go after round `t`."""
    return FakeMember(status={"t": t, "inner": 0, "of": 100, "step_s": step_s})


def near(t: int) -> FakeMember:
    return FakeMember(status={"t": t, "inner": 100, "of": 100, "step_s": 1000.0})


def test_nothing_is_trained_ahead_in_a_round_like_any_other(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phases, "PATIENCE_S_MIN", 1000.0)
    run = Run(FakePeer(spec), tmp_path)
    run.peer.slices = [3, 3]
    run.peer.others = [FakeMember(status={"t": 0, "inner": 0, "of": 0, "step_s": 1.0})]
    run.go()
    assert len(run.all("step")) == 2 * H and run.peer.weights == [H * STEP_TOKENS] * 2


def test_a_round_that_waits_for_others_costs_no_time_and_no_work(
    spec: RunSpec, tmp_path: Path, trained: list[int]
) -> None:
    run = Run(FakePeer(spec), tmp_path)
    run.peer.slices = [3]
    run.peer.others = [far(0)]
    summary = run.go()
    assert run.peer.weights == [H * STEP_TOKENS, (3 + H) * STEP_TOKENS]
    assert run.peer.uptos == [H * PER_STEP, (2 * H + 3) * PER_STEP]
    assert trained == list(range((2 * H + 3) * PER_STEP)) and summary.tokens == (2 * H + 3) * STEP_TOKENS
    assert [event["step"] for event in run.all("step")] == [0, 1, 2, 3, 3, 3, 3, 4, 5, 6, 7]  # of the swarm's schedule
    assert summary.setbacks.tokens_dropped == 0


def test_a_step_that_ends_after_the_commit_is_the_first_of_the_next_phase(spec: RunSpec, tmp_path: Path) -> None:
    run = Run(FakePeer(spec), tmp_path)
    run.peer.slices = [2]
    run.peer.round_s = -1000.0  # committed long before the steps ended
    run.peer.others = [far(0)]
    run.go()
    assert [event["step"] for event in run.all("step")] == [0, 1, 2, 3, 3, 3, 6, 7]
    assert run.peer.weights == [H * STEP_TOKENS, H * STEP_TOKENS]


def test_without_a_plan_the_offer_grows(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: list[int]
) -> None:
    monkeypatch.setattr(phases, "GROW_EVERY_S", 0.0)
    run = Run(FakePeer(spec), tmp_path)
    run.peer.planned = False
    run.peer.slices = [2] * 4 + [0]
    run.peer.others = [far(0)]
    run.on_step = {H + 4: lambda: setattr(run.peer, "planned", True)}
    run.go()
    assert run.peer.withdrawn == 3
    grown = [H, H + 1, H + 2, H + 3]
    assert run.peer.weights[:4] == [steps * STEP_TOKENS for steps in grown]
    assert run.peer.tokens == sum(run.peer.weights[3:]) == len(trained) / PER_STEP * STEP_TOKENS
    assert trained == list(range(len(trained)))


def test_the_lease_limits_how_far_a_trainer_is_ahead(spec: RunSpec, tmp_path: Path, trained: list[int]) -> None:
    run = Run(FakePeer(spec), tmp_path)
    run.peer.slices = [100]
    run.peer.others = [far(0)]
    run.go()
    assert run.peer.uptos == [H * PER_STEP, 2 * spec.blocks_per_lease]
    assert trained == list(range(2 * spec.blocks_per_lease))


def test_after_a_round_without_us_we_go_on_until_the_others_are_near(
    spec: RunSpec, tmp_path: Path, trained: list[int]
) -> None:
    run = Run(FakePeer(dataclasses.replace(spec, rounds=3)), tmp_path)
    run.peer.misses = ["not ready"]

    def told(*members: FakeMember) -> Callable[[], None]:
        named = [dataclasses.replace(member, id=f"p{i}") for i, member in enumerate(members)]
        return lambda: setattr(run.peer, "others", named)

    run.peer.others = [near(0)]
    run.on_step = {1: told(near(0)), H + 1: told(far(1), far(1), near(1)), H + 5: told(far(1), near(1), near(1))}
    run.peer.on_contribute = told(far(1), far(1), near(1))  # at the time of the round that we missed
    run.go()
    first = 1  # who comes while the others wait does one step
    assert run.peer.weights[0] == first * STEP_TOKENS
    assert run.peer.uptos[0] == first * PER_STEP
    assert [event["counted"] for event in run.all("round")][:2] == [False, True]
    assert run.peer.weights[1] == (H + 5) * STEP_TOKENS and trained == list(range(len(trained)))


def test_who_offers_again_without_a_step_offers_the_same_bits(spec: RunSpec, tmp_path: Path) -> None:
    run = Run(FakePeer(spec), tmp_path)
    run.peer.misses = ["late"]
    run.peer.others = [near(1)]
    run.go()
    assert run.peer.vectors[0].equal(run.peer.vectors[1]) and run.peer.weights[0] == run.peer.weights[1]


def test_nothing_is_offered_beyond_the_last_round_of_the_run(spec: RunSpec, tmp_path: Path) -> None:
    """The others' last round is committed between our last look and our offer: no further round is begun."""
    run = Run(FakePeer(spec), tmp_path)

    def last_round() -> None:
        if run.peer.state.t == spec.rounds - 1:
            run.peer.pass_round()

    run.peer.on_contribute = last_round
    summary = run.go()
    assert summary.reason == "rounds" and summary.t == run.peer.state.t == spec.rounds
    assert len(run.peer.vectors) == spec.rounds - 1
    assert summary.setbacks.tokens_dropped == H * STEP_TOKENS


def test_a_round_that_is_over_when_a_step_would_begin_drops_nothing(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts the offer, so there is nothing to resume: it is settled first."""
    over: list[bool] = []
    resume = OuterLoop.resume

    def just_over(self: OuterLoop, work: Work) -> bool:
        pending = run.peer._pending
        assert pending is not None and not pending.done
        pending.slices = 0
        pending.wait()
        over.append(resume(self, work))
        return over[-1]

    monkeypatch.setattr(OuterLoop, "resume", just_over)
    run = Run(FakePeer(spec), tmp_path)
    run.peer.slices = [5]
    run.peer.others = [far(0)]
    summary = run.go()
    assert over == [False] and summary.setbacks.tokens_dropped == 0
    assert run.peer.weights == [H * STEP_TOKENS] * 2


def test_steps_that_diverge_during_a_round_spoil_neither_it_nor_the_next(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    train_step = InnerLoop.train_step

    def poisoned(self: InnerLoop, batches: Any, step: int) -> StepResult:
        calls.append(step)
        result = train_step(self, batches, step)
        return StepResult(float("nan"), result.tokens, 1.0) if len(calls) == H + 2 else result

    monkeypatch.setattr(InnerLoop, "train_step", poisoned)
    run = Run(FakePeer(spec), tmp_path)
    run.peer.slices = [5]
    run.peer.others = [far(0)]
    run.go()
    assert len(run.all("diverged")) == 1 and run.peer.weights == [H * STEP_TOKENS] * 2
    assert [event["counted"] for event in run.all("round")] == [True, True]


def diverging(monkeypatch: pytest.MonkeyPatch, *at: int) -> None:
    """The loss of these inner steps, counted from 1, is not finite."""
    train_step, calls = InnerLoop.train_step, itertools.count(1)

    def poisoned(self: InnerLoop, batches: Any, step: int) -> StepResult:
        result = train_step(self, batches, step)
        return StepResult(math.nan, result.tokens, 1.0) if next(calls) in at else result

    monkeypatch.setattr(InnerLoop, "train_step", poisoned)


def test_whose_steps_diverge_sits_the_round_of_the_others_out(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the same model it tried again at once, and three times in a row within one round were the end of it."""
    diverging(monkeypatch, 2, 3)
    run = Run(FakePeer(spec), tmp_path)
    run.peer.others = [far(0)]
    said: list[int] = []

    def pass_round(event: Event) -> None:
        if event["event"] == "phase" and event["phase"] == SITS_OUT:
            said.append(len(run.peer.said))
            run.peer.pass_round()
            run.peer.others = []

    run.on_event = pass_round
    assert run.go().t == 2
    assert run.peer.said[said[0]]["eta_s"] == NEVER_S, "nobody waits for it"
    told = [(e["event"], e.get("t")) for e in run.events if e["event"] in ("step", "diverged")]
    assert told == [("step", 0), ("diverged", 0), ("diverged", 1), *[("step", 1)] * H], "alone it tries again at once"


def test_a_round_that_does_not_come_is_sat_out_no_longer_than_it_may_take(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phases, "SIT_OUT_S", 0.0)
    diverging(monkeypatch, 1)
    run = Run(FakePeer(spec), tmp_path)
    run.peer.others = [near(0)]
    assert run.go().t == 2 and len(run.peer.counted) == 2
    assert len(run.all("diverged")) == 1 and any(event["phase"] == SITS_OUT for event in run.all("phase"))


def test_parameters_that_diverge_before_the_offer_grows_spoil_nothing(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The losses are finite all the time: it is seen when the larger offer is measured."""
    monkeypatch.setattr(phases, "GROW_EVERY_S", 0.0)
    run = Run(FakePeer(spec), tmp_path)
    run.peer.planned, run.peer.slices = False, [9, 9, 3]
    run.peer.others = [far(0)]

    def poison() -> None:
        with torch.no_grad():
            next(run.trainer.model.parameters()).fill_(float("nan"))

    run.on_step = {H + 2: poison}
    run.go()
    assert len(run.all("diverged")) == 1
    assert run.peer.weights[:2] == [H * STEP_TOKENS, (H + 1) * STEP_TOKENS], "it had grown by a step before"
    assert all(torch.isfinite(vector).all() for vector in run.peer.vectors)
    counted = [event["counted"] for event in run.all("round")]
    assert counted == [True, True] and torch.isfinite(run.peer.theta()).all()


def test_who_is_to_stop_takes_part_in_a_round_that_is_near(spec: RunSpec, tmp_path: Path) -> None:
    run = Run(FakePeer(spec), tmp_path)
    run.on_step = {2: run.stop.set}
    run.peer.others = [FakeMember(status={"t": 0, "inner": 0, "of": 0, "step_s": 1.0})]
    summary = run.go()
    assert (summary.reason, summary.t) == ("interrupted", 1) and run.peer.weights == [2 * STEP_TOKENS]
    assert summary.setbacks.tokens_dropped == 0


def test_who_is_to_stop_does_not_wait_long(spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "LAST_ROUND_S", 0.2)
    run = Run(FakePeer(spec), tmp_path)
    run.on_step = {2: run.stop.set}
    run.peer.others = [FakeMember(status={"t": 0, "inner": 0, "of": 0, "step_s": 1.0})]
    run.peer.slices = [1 << 60]
    summary = run.go()
    assert (summary.reason, summary.t, summary.setbacks.tokens_dropped) == ("interrupted", 0, 2 * STEP_TOKENS)
    assert run.all("work_dropped")[0]["steps"] == 2


def test_setbacks_are_told_and_summed_up(spec: RunSpec, tmp_path: Path) -> None:
    run = Run(FakePeer(spec), tmp_path)

    def bad_day() -> None:
        for event in (
            HistoryLost(3, 4096.0),
            DigestMismatch("train", 1),
            ContributionDropped("train"),
            Waiting("no quorum", ("other",), 35.0),
        ):
            run.peer.events.put(event)

    run.on_step = {1: bad_day}
    summary = run.go()
    assert run.all("history_lost")[0] == {"event": "history_lost", "rounds": 3, "tokens": 4096.0}
    assert run.all("digest_mismatch")[0]["t"] == 1 and run.all("contribution_dropped")[0]["channel"] == "train"
    assert run.all("waiting")[0]["left_s"] == 35.0
    told = {"rounds_lost": 3, "tokens_lost": 4096.0, "digest_mismatches": 1, "contributions_dropped": 1}
    assert run.all("end")[0]["setbacks"] == dataclasses.asdict(summary.setbacks) == {**told, "tokens_dropped": 0}


@pytest.mark.parametrize(("t", "ends"), [(2, True), (1, False), ("2", False)])
def test_who_is_left_behind_by_all_that_ended_the_run_gives_it_no_other_end(
    spec: RunSpec, tmp_path: Path, t: object, ends: bool
) -> None:
    """As a host that slept to the end: it had trained on alone, and ended with another model, of the same round."""
    run = Run(FakePeer(spec), tmp_path)

    def leave() -> None:
        run.peer.others = [FakeMember("gone-to-the-end", left=True, alive=False, status={"t": t})]
        run.peer.events.put(LeftAhead((THIRD,), 640.0))

    run.on_step = {H: leave}
    if ends:
        why = "ended while this peer was away: gone-to- came to its last round, .* this peer's is of round 1. Started"
        with pytest.raises(DlcError, match=why):
            run.go()
        assert run.all("end")[0]["reason"] == "failed" and run.all("end")[0]["t"] == 1 and run.all("end")[0]["saved"]
    else:
        assert run.go().reason == "rounds"
    told = run.all("left_ahead")[0]
    assert told == {"event": "left_ahead", "peers": [THIRD.peer], "tokens": 640.0}
    assert "left with 640 tokens trained that nobody here has" in sentence(told)


@pytest.mark.parametrize("stays", [True, False], ids=["to the end", "for longer"])
def test_a_host_that_stands_still_until_the_others_have_ended_the_run_has_their_end_or_says_so(
    spec: RunSpec, tmp_path: Path, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not stays:
        monkeypatch.setattr(trainer, "LINGER_S", 0.0)
    rounds = 24
    spec = dataclasses.replace(spec, rounds=rounds, timeouts=TimeoutsSpec(probe_s=0.25, evict_s=DEADLINE_S))
    gate = threading.Event()
    with School() as school:
        first = school.add(Pupil(spec, tmp_path / "0"))
        second, asleep = (school.add(Pupil(spec, tmp_path / name, first.peer.address)) for name in "12")

        def do_not_run_away(event: Event) -> None:
            if event["event"] == "step" and event["step"] == 3:
                wait_until(lambda: asleep.all("round"), DEADLINE_S, "all train")

        def ended(pupil: Pupil) -> bool:
            return any(event["t"] == rounds for event in pupil.all("validation"))

        def stand_still(event: Event) -> None:
            if event["event"] == "round" and event["t"] < rounds:
                asleep.on_event = lambda event: None
                asleep.peer._driver.call(lambda now: gate.wait(DEADLINE_S))

        first.on_event, second.on_event, asleep.on_event = do_not_run_away, do_not_run_away, stand_still
        *ends, late = [school.start(pupil) for pupil in (first, second, asleep)]
        if stays:
            wait_until(lambda: all(ended(pupil) for pupil in (first, second)), DEADLINE_S, "they are at the end")
            assert not (ends[0].done() or ends[1].done())
            gate.set()
            summaries = [end.result(DEADLINE_S) for end in (*ends, late)]
            assert len({(s.t, s.digest) for s in summaries}) == 1 and not asleep.all("left_ahead")
            return
        assert {end.result(DEADLINE_S).t for end in ends} == {rounds}
        gate.set()
        with pytest.raises(DlcError, match="ended while this peer was away: .* came to its last round, and left"):
            late.result(DEADLINE_S)
        assert len(asleep.all("left_ahead")) == 1 and asleep.all("end")[0]["t"] < rounds
