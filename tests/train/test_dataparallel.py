"""Data parallel: the step that all take against torch's own, the trainer's loop, and a swarm against one process."""

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
from torch import Tensor, nn

from dlc.comm.filling import Filling
from dlc.errors import DlcError
from dlc.flat import FlatView
from dlc.runspec import DataSpec, InnerSpec, ModelSpec, RunSpec, TimeoutsSpec
from dlc.train import saves
from dlc.train.gradients import Gradients
from dlc.train.inner import InnerLoop
from dlc.train.joint import NORM_ELEMENTS_MAX, JointState, Squares, joint_spec
from dlc.train.outer import IMAGE_HEADER
from dlc.train.phases import DIVERGED_MAX
from dlc.train.setup import inner_loop_of, model_of, schedule_of
from tests.helpers import wait_until
from tests.train.fake_peer import FakePeer
from tests.train.school import DEADLINE_S, Pupil, School
from tests.train.test_trainer import DROPPING, LLAMA, Run

ROUNDS = 12


def spec_in(folder: Path, **options: Any) -> RunSpec:
    text = folder / "text.txt"
    text.write_bytes(bytes(range(32, 127)) * 100)
    inner = InnerSpec(batch_size=2, accumulate=2, warmup_steps=3, clip_norm=0.5)
    usual: dict[str, Any] = {"rounds": ROUNDS, "sync_every": 4, "codec": "fp32", "chunk_elems": 1024, "inner": inner}
    data, model = DataSpec(source=str(text), seq_len=16), ModelSpec(config=LLAMA)
    return RunSpec(strategy="data-parallel", data=data, model=model, **{**usual, **options})


# ------------------------------------------------------------------ the step


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("clip_norm", [0.0, 0.5])
def test_a_step_is_torchs_own_step(optimizer: str, clip_norm: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 7))
    inner = InnerSpec(optimizer=optimizer, clip_norm=clip_norm, warmup_steps=4, weight_decay=0.3, lr=0.01)
    spec = RunSpec(strategy="data-parallel", rounds=9, inner=inner)
    view = FlatView.of(model)
    state = JointState(view.gather(torch.empty(view.numel)), view.tensors, joint_spec(spec), inner)
    loop = inner_loop_of(spec, model, torch.device("cpu"))
    for step in range(9):
        g = torch.randn(view.numel) * (1.0 if step % 2 else 0.01)  # above the clipping norm, and below
        state.step(step + 1, [(a, min(a + 100, view.numel), g[a : a + 100]) for a in range(0, view.numel, 100)])
        at = 0
        for tensor in view.tensors:
            tensor.grad = g[at : at + tensor.numel()].view(tensor.shape).clone()
            at += tensor.numel()
        loop._clipped()
        for group in loop.optimizer.param_groups:
            group["lr"] = loop._schedule(step)  # type: ignore[misc]
        loop.optimizer.step()
    out = torch.empty(view.numel)
    state.read(out)
    assert torch.allclose(out, view.gather(torch.empty(view.numel)), rtol=1e-5, atol=1e-6)
    assert state.lr(1) == pytest.approx(0.01 / 4) and state.norm == pytest.approx(float(g.norm()), rel=1e-5)


def test_what_nobody_contributed_to_stays_as_it_is() -> None:
    inner = InnerSpec()
    spec = RunSpec(strategy="data-parallel", inner=inner)
    state = JointState(torch.ones(8), [torch.empty(2, 4)], joint_spec(spec), inner)
    state.step(1, [(0, 4, torch.ones(4)), (4, 8, None)])
    out = torch.empty(8)
    state.read(out)
    assert (out[:4] < 1).all() and (out[4:] == 1).all()


@pytest.mark.parametrize("numel", [1, 2, 3, 1000, NORM_ELEMENTS_MAX + 5])
@pytest.mark.parametrize("size", [1.0, 1e30, 1e-30])
def test_the_sum_of_squares(numel: int, size: float) -> None:
    vector = torch.randn(numel, generator=torch.Generator().manual_seed(1)) * size
    squares = Squares()
    squares.add(vector)
    exact = math.fsum(float(x) ** 2 for x in vector.tolist())
    assert squares.total() == pytest.approx(exact, rel=1e-5, abs=1e-35)


# ------------------------------------------------------------------ one trainer


def joint(spec: RunSpec, batches: list[list[Tensor]]) -> Tensor:
    """The parameters of one process that steps on these batches."""
    model = model_of(spec)
    loop = inner_loop_of(spec, model, torch.device("cpu"))
    for step, batch in enumerate(batches):
        loop.train_step(batch, step)
    view = FlatView.of(model)
    return view.gather(torch.empty(view.numel))


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[list[Tensor]]]:
    """Of each gradient, in order, by the thread that made it."""
    made: dict[int, list[list[Tensor]]] = {}
    gradient = InnerLoop.gradient

    def recorded(self: InnerLoop, batches: Any, *rest: Any) -> float:
        made.setdefault(threading.get_ident(), []).append(list(batches))
        return gradient(self, batches, *rest)

    monkeypatch.setattr(InnerLoop, "gradient", recorded)
    return made


def test_a_whole_run(tmp_path: Path, batches: dict[int, list[list[Tensor]]]) -> None:
    spec = spec_in(tmp_path)
    run = Run(FakePeer(spec), tmp_path / "state")
    summary = run.go()
    assert (summary.reason, summary.t, summary.tokens) == ("rounds", ROUNDS, ROUNDS * 4 * 16)
    assert run.peer.uptos == [4 * t for t in range(1, ROUNDS + 1)], "each block once, in order"
    assert [(e["step"], e["t"], e["inner"], e["of"]) for e in run.all("step")] == [(t, t, 1, 1) for t in range(ROUNDS)]
    assert [e["t"] for e in run.all("round") if e["counted"] and e["digest"]] == list(range(1, ROUNDS + 1))
    assert torch.allclose(run.params(), joint(spec, batches[threading.get_ident()]), atol=1e-6)
    first, last = (event["loss"] for event in run.all("validation"))
    assert last < first


def test_a_gradient_that_is_late_is_dropped_and_its_blocks_are_trained_again(
    tmp_path: Path, batches: dict[int, list[list[Tensor]]]
) -> None:
    run = Run(FakePeer(spec_in(tmp_path)), tmp_path / "state")
    run.peer.misses = ["", "late", *[""] * (ROUNDS - 3), "late"]
    summary = run.go()
    assert [(e["t"], e["others"]) for e in run.all("work_dropped")] == [(2, True), (ROUNDS, False)], (
        "the run is over then"
    )
    made = batches[threading.get_ident()]
    assert all(torch.equal(a, b) for a, b in zip(made[1], made[2], strict=True))
    assert len(made) == ROUNDS and summary.tokens == (ROUNDS - 2) * 64 and summary.setbacks.tokens_dropped == 2 * 64
    assert [event["counted"] for event in run.all("round")][:3] == [True, False, True]


@pytest.mark.parametrize("forward", [True, False])
def test_a_round_that_passes_during_the_gradient_takes_it_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forward: bool
) -> None:
    """In forward nothing is offered then; in backward it was, and goes nowhere."""
    run = Run(FakePeer(spec_in(tmp_path)), tmp_path / "state")
    backward, count = InnerLoop._backward, itertools.count()

    def passed(self: InnerLoop, parts: Any, at_last: Callable[[Tensor], None]) -> Tensor:
        def pass_round() -> None:
            run.peer.pass_round(torch.ones(run.peer.state.numel))

        third = next(count) == 2
        if third and forward:
            pass_round()

        def in_backward(loss: Tensor) -> None:
            at_last(loss)
            pass_round()

        return backward(self, parts, in_backward if third and not forward else at_last)

    monkeypatch.setattr(InnerLoop, "_backward", passed)
    summary = run.go()
    assert len(run.peer.vectors) == ROUNDS - forward and summary.setbacks.tokens_dropped == 64
    assert [(e["t"], e["counted"]) for e in run.all("round")][1:4] == [(2, True), (3, False), (4, True)]


def test_chunks_are_final_while_backward_runs_and_are_those_of_the_whole_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step is offered when it is over; its time is what the second one is expected to take."""
    spec = spec_in(tmp_path, chunk_elems=256)
    run = Run(FakePeer(spec), tmp_path / "state")
    run.go()
    first, *others = run.peer.fillings
    assert first is None and all(filling is not None and filling.complete for filling in others)
    assert all(filling is not None and 0 < filling.expected_s < 60.0 for filling in others)
    steps = run.peer.fronts[: run.peer.fronts.index(0) + 1]
    assert len(steps) > 2 and steps == sorted(steps, reverse=True), "the head, the layers, the embedding"
    begin = Gradients.begin

    def unwatched(self: Gradients, vector: Tensor) -> Filling | None:
        self._expected_s = 0.0
        return begin(self, vector)

    monkeypatch.setattr(Gradients, "begin", unwatched)
    whole = Run(FakePeer(spec), tmp_path / "whole")
    whole.go()
    assert set(whole.peer.fillings) == {None} and torch.equal(run.params(), whole.params())
    assert all(torch.equal(a, b) for a, b in zip(run.peer.vectors, whole.peer.vectors, strict=True))


def spoil(run: Run, step: int, spoiled: Callable[[Tensor], Tensor]) -> None:
    """The gradient that backward makes last, in the last micro-batch of this step."""
    calls = itertools.count(1)
    first = FlatView.of(run.trainer.model).tensors[0]
    first.register_hook(lambda g: spoiled(g) if next(calls) == 2 * step else g)


@pytest.mark.parametrize("planned", [False, True])
def test_a_gradient_that_turns_out_not_to_be_finite_goes_no_further(tmp_path: Path, planned: bool) -> None:
    run = Run(FakePeer(spec_in(tmp_path)), tmp_path / "state")
    run.peer.planned = planned
    spoil(run, 3, lambda g: g * math.inf)
    summary = run.go()
    bad = run.peer.fillings[2]
    assert bad is not None and bad.stopped and 0 < bad.front < bad.numel, "the rest had been sent"
    assert run.peer.withdrawn == (not planned) and len(run.peer.vectors) == ROUNDS + (not planned)
    assert [e["in_a_row"] for e in run.all("diverged")] == [1]
    assert [e["counted"] for e in run.all("round")].count(False) == planned
    assert summary.setbacks.tokens_dropped == 64 * planned and summary.tokens == 64 * (ROUNDS - planned)
    assert run.peer.uptos[2] == run.peer.uptos[3], "its blocks are trained again"
    assert torch.isfinite(run.params()).all()


def test_steps_that_are_not_finite_end_the_training_in_a_row_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradient, made = InnerLoop.gradient, itertools.count(1)

    def now_and_then(inner: InnerLoop, *rest: Any) -> float:
        return math.nan if next(made) % 2 == 0 else gradient(inner, *rest)

    monkeypatch.setattr(InnerLoop, "gradient", now_and_then)
    run = Run(FakePeer(dataclasses.replace(spec_in(tmp_path), rounds=DIVERGED_MAX + 2)), tmp_path / "state")
    assert run.go().t == DIVERGED_MAX + 2
    assert [event["in_a_row"] for event in run.all("diverged")] == [1] * (DIVERGED_MAX + 1)


def test_a_backward_that_fails_takes_back_what_it_offered(tmp_path: Path) -> None:
    def broken(g: Tensor) -> Tensor:
        raise RuntimeError("out of memory")

    run = Run(FakePeer(spec_in(tmp_path)), tmp_path / "state")
    run.peer.planned = False
    spoil(run, 3, broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        run.go()
    bad = run.peer.fillings[2]
    assert bad is not None and bad.stopped and run.peer.withdrawn == 1 and len(run.peer.counted) == 2


def test_a_checkpoint_brings_the_moments_and_the_random_state_back(tmp_path: Path) -> None:
    spec = dataclasses.replace(spec_in(tmp_path), model=ModelSpec(config=DROPPING))
    whole = Run(FakePeer(spec), tmp_path / "whole")
    whole.go()
    half = Run(FakePeer(spec), tmp_path / "half")
    half.on_step = {6: half.stop.set}
    assert half.go().reason == "interrupted"
    saved = saves.newest(tmp_path / "half", spec)
    assert saved is not None and saved.t == 6 and not saved.inner
    peer = FakePeer(spec)
    rest = Run(peer, tmp_path / "rest", resume=saved)
    open_, ledger = peer.open, half.peer.ledger

    def opened(*args: Any, **options: Any) -> Any:
        open_(*args, **options)
        peer.ledger = ledger  # which the log would bring back
        return peer.position("train")

    peer.open = opened  # type: ignore[method-assign]
    rest.go()
    assert torch.equal(rest.params(), whole.params())


def test_more_steps_than_a_run_had_go_on_from_its_state(tmp_path: Path) -> None:
    """Its schedule is part of the state's image, and follows the run's new length."""
    spec = spec_in(tmp_path)
    for before in (0, 3):
        short = dataclasses.replace(spec, rounds=before)
        folder = tmp_path / f"after-{before}"
        first = Run(FakePeer(short), folder)
        first.on_step = {3: first.stop.set} if not before else {}
        first.go()
        saved = saves.newest(folder, spec)
        assert saved is not None and saved.spec == short and saved.t == 3
        rest = Run(FakePeer(spec), folder, resume=saved)
        assert rest.go().t == spec.rounds and len(rest.peer.counted) == spec.rounds - 3
        schedule = schedule_of(spec)
        assert [event["lr"] for event in rest.all("step")] == pytest.approx(
            [schedule(step) for step in range(3, spec.rounds)]
        )


@pytest.mark.parametrize("planned", [False, True])
def test_who_is_to_stop_takes_back_what_waits_for_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planned: bool
) -> None:
    """Where that cannot be taken back, the peer may still send it: it stays as it is."""
    monkeypatch.setattr("dlc.train.dataparallel.LAST_ROUND_S", 0.0)
    run = Run(FakePeer(spec_in(tmp_path)), tmp_path / "state")
    run.peer.planned, run.peer.slices = planned, [0, 1000]
    run.peer.on_contribute = lambda: run.stop.set() if len(run.peer.vectors) == 1 else None
    contribute, given = run.peer.contribute, list[Any]()

    def kept(channel: str, vector: Tensor, **rest: Any) -> Any:
        given.append(vector)
        return contribute(channel, vector, **rest)

    run.peer.contribute = kept  # type: ignore[method-assign]
    assert run.go().reason == "interrupted"
    assert run.peer.withdrawn == (not planned) and len(run.peer.counted) == 1
    assert torch.equal(run.params(), run.peer.theta())
    assert not planned or torch.equal(given[1], run.peer.vectors[1])


def test_a_state_of_another_history_is_taken_though_it_is_of_as_many_rounds(tmp_path: Path) -> None:
    run = Run(FakePeer(spec_in(tmp_path)), tmp_path / "state")
    t = run.go().t
    image = bytearray(run.peer.state.export())
    theta = torch.frombuffer(image, dtype=torch.float32, count=run.peer.state.size, offset=IMAGE_HEADER.size)
    theta.add_(1.0)
    run.peer.state.restore(bytes(image))
    strategy = run.trainer.strategy
    strategy.ready()
    assert strategy.position.t == t and strategy.position.digest == run.peer.state.digest()
    assert torch.equal(run.params(), theta)


@pytest.mark.parametrize("reason", ["nan", "refused: not finite"])
def test_steps_that_diverge_in_a_row_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    run = Run(FakePeer(spec_in(tmp_path)), tmp_path / "state")
    if reason == "nan":
        monkeypatch.setattr(InnerLoop, "gradient", lambda self, *rest: math.nan)
    else:
        run.peer.misses = [reason] * DIVERGED_MAX
    with pytest.raises(DlcError, match="not finite. Found the run anew.*warmup_steps"):
        run.go()
    assert [event["in_a_row"] for event in run.all("diverged")] == [1, 2, 3]
    assert len(run.peer.vectors) == (0 if reason == "nan" else DIVERGED_MAX) and not run.peer.counted


def test_steps_that_diverge_in_a_row_end_the_training_though_others_took_a_part_of_them(tmp_path: Path) -> None:
    run = Run(FakePeer(spec_in(tmp_path)), tmp_path / "state")
    calls, contribute = itertools.count(1), run.peer.contribute
    FlatView.of(run.trainer.model).tensors[0].register_hook(lambda g: g * math.inf if next(calls) > 2 else g)

    def counted(*args: Any, **rest: Any) -> Any:
        pending = contribute(*args, **rest)
        wait = pending.wait

        def waited(timeout_s: float | None = None) -> Any:
            report = wait(timeout_s)
            pending.counted = True
            return report

        pending.wait = waited  # type: ignore[method-assign]
        return pending

    run.peer.contribute = counted  # type: ignore[method-assign]
    with pytest.raises(DlcError, match="3 steps in a row"):
        run.go()
    assert [event["in_a_row"] for event in run.all("diverged")] == [1, 2, 3]
    assert [event["counted"] for event in run.all("round")] == [True] * 4


# ------------------------------------------------------------------ a swarm


def test_two_peers_take_the_steps_of_one_process_with_the_joint_batch(
    tmp_path: Path, batches: dict[int, list[list[Tensor]]]
) -> None:
    rounds = 60
    spec = spec_in(tmp_path, rounds=rounds, timeouts=TimeoutsSpec(probe_s=1.0, chunk_s=30.0))  # none is counted in part
    threads: dict[int, int] = {}
    with School() as school:
        one = school.add(Pupil(spec, tmp_path / "0"))
        two = school.add(Pupil(spec, tmp_path / "1", one.peer.address))

        def wait(event: dict[str, Any]) -> None:
            """The first peer does not run away while the second one joins."""
            threads[0] = threading.get_ident()
            if event["event"] == "step" and event["step"] == 3:
                wait_until(lambda: one.stop.is_set() or two.all("step"), DEADLINE_S, "the second peer trains")

        one.on_event = wait
        two.on_event = lambda event: threads.update({1: threading.get_ident()})
        for pupil in (one, two):
            school.start(pupil)
        summaries = school.summaries()
    events = [pupil.events for pupil in (one, two)]
    assert len({(s.t, s.digest) for s in summaries}) == 1 and summaries[0].t == rounds
    told = {e["t"]: e for events_of in events for e in events_of if e["event"] == "round"}
    together = [t for t, e in told.items() if len(e["contributors"]) == 2]
    assert together, "they never took a step together"
    at = [{e["t"]: batch for e, batch in zip(_steps(events[i]), batches[threads[i]], strict=True)} for i in range(2)]
    ids = {pupil.peer.id: i for i, pupil in enumerate((one, two))}
    steps = [
        [ids_ for share in told[t]["contributors"] for ids_ in at[ids[share["peer"]]][t - 1]]
        for t in range(1, rounds + 1)
    ]
    model = saves.newest(tmp_path / "0", spec)
    assert model is not None
    view = FlatView.of(model_of(spec))
    theta = torch.frombuffer(bytearray(model.image[128 : 128 + 4 * view.numel]), dtype=torch.float32)
    assert torch.allclose(theta, joint(spec, steps), rtol=1e-4, atol=1e-5)


def _steps(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == "step"]


def test_a_peer_that_dies_harms_nobody_and_who_comes_later_has_the_same_state(tmp_path: Path) -> None:
    spec = spec_in(tmp_path, rounds=0)
    with School() as school:
        one = school.add(Pupil(spec, tmp_path / "0"))
        others = [school.add(Pupil(spec, tmp_path / str(i), one.peer.address)) for i in (1, 2, 3)]
        two, dead, late = others

        def together(*pupils: Pupil) -> list[dict[str, Any]]:
            ids = {pupil.peer.id for pupil in pupils}
            return [e for e in one.all("round") if {share["peer"] for share in e["contributors"]} == ids]

        for pupil in (one, two, dead):
            school.start(pupil)
        wait_until(lambda: together(one, two, dead), DEADLINE_S, "three take a step together")
        dead.peer._driver.stop(0.0)  # nothing is announced
        wait_until(lambda: together(one, two), DEADLINE_S, "two go on")
        school.start(late)
        wait_until(lambda: len(together(one, two, late)) > 20, DEADLINE_S, "the newcomer takes part")
        ends = [school.ends[0], school.ends[1], school.ends[3]]
        for pupil in (one, two, late):
            pupil.stop.set()
        wait_until(lambda: all(end.done() for end in ends), DEADLINE_S, "they end")
        assert {end.result().reason for end in ends} == {"interrupted"}
    states: dict[str, set[str]] = {}
    for pupil in (one, two, late):
        assert not pupil.all("digest_mismatch")
        for event in pupil.all("round"):
            if event["digest"]:  # none is told where the next step was taken already
                states.setdefault(event["head"], set()).add(event["digest"])
    assert all(len(digests) == 1 for digests in states.values())
    assert late.all("synced")[0]["t"] > 0
