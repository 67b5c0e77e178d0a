"""The strategy "parameter-server" without a swarm: a trainer beside helpers that are played."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dlc.cli.sinks import sentence
from dlc.comm.roles import HELPER
from dlc.errors import DlcError, RoundTimeout
from dlc.report import Share
from dlc.runspec import ModelSpec, RunSpec
from dlc.server import ServerReport
from dlc.train import saves, served
from dlc.train.data import OWN_BLOCKS, first_block
from dlc.train.inner import InnerLoop, StepResult
from dlc.train.outer import theta_of
from dlc.train.served import share_of_steps
from tests.train.fake_peer import ME, FakeMember, FakePeer
from tests.train.test_trainer import DROPPING, H, Run, spec

__all__ = ["spec"]
ALL = {"counted": 1.0}


class Helpers:
    """In place of a `ServerClient`: each push moves theta at once. `says`: fields of the n-th report, the first pull
    being report 0. `deaf_from`: from this report on none comes."""

    says: dict[int, dict[str, Any]] = {}
    deaf_from = math.inf
    began_with: list[bytes] = []

    def __init__(self, peer: object, theta: Tensor, *, step: int, history: bytes, **options: object) -> None:
        self.began_with.append(history)
        self.theta, self.step, self.number = theta.clone(), step, -1
        self.outcomes: dict[str, float] = {}
        self.weight = 0.0

    def begin(self, vector: Tensor | None = None, *, weight: float = 1.0) -> None:
        self.number += 1
        self.outcomes, self.weight = {}, weight
        if vector is not None and self.done:
            self.theta -= vector
            self.step, self.outcomes = self.step + 1, ALL

    @property
    def done(self) -> bool:
        return self.number < self.deaf_from

    def poll(self, timeout_s: float) -> bool:
        return self.done

    def wait(self, timeout_s: float) -> ServerReport:
        if not self.done:
            raise RoundTimeout("no helper")
        report = ServerReport(
            step=self.step,
            outcomes=self.outcomes,
            contributors=(Share(ME.peer, self.weight, 1.0),) if self.outcomes else (),
            missing=(),
            owned={"h": 1.0},
            staleness=0,
            version=self.step,
            bytes_sent=0,
            bytes_received=0,
            seconds=0.0,
        )
        return dataclasses.replace(report, **self.says.get(self.number, {}))

    def read(self, out: Tensor) -> Tensor:
        return out.copy_(self.theta)

    def history(self) -> bytes:
        return f"to round {self.step}".encode()


@pytest.fixture
def helpers(monkeypatch: pytest.MonkeyPatch) -> type[Helpers]:
    class Here(Helpers):
        says: dict[int, dict[str, Any]] = {}
        began_with: list[bytes] = []

    monkeypatch.setattr(served, "ServerClient", Here)
    return Here


@pytest.fixture
def server(spec: RunSpec) -> RunSpec:
    return dataclasses.replace(spec, strategy="parameter-server", rounds=4)


def test_pushes_that_a_partition_set_aside_are_told_and_summed_up(
    server: RunSpec, tmp_path: Path, helpers: type[Helpers]
) -> None:
    helpers.says = {2: {"set_aside": 2, "set_aside_weight": 320.0}, 4: {"set_aside": 1, "set_aside_weight": 160.0}}
    run = Run(FakePeer(server), tmp_path)
    summary = run.go()
    told = [(event["rounds"], event["tokens"]) for event in run.all("history_lost")]
    assert told == [(2, 320.0), (1, 160.0)]
    assert (summary.setbacks.rounds_lost, summary.setbacks.tokens_lost) == (3, 480.0)
    assert summary.setbacks.tokens_dropped == 0, "the pushes that told it counted themselves"
    assert summary.tokens is None and run.all("end")[0]["tokens"] is None, "nobody counts those of all"
    names = [event["event"] for event in run.events]
    assert names.index("history_lost") < [i for i, name in enumerate(names) if name == "round"][1], "before its round"


def test_rounds_of_a_checkpoint_that_the_swarm_does_not_have_are_told(
    server: RunSpec, tmp_path: Path, helpers: type[Helpers]
) -> None:
    Run(FakePeer(server), tmp_path).go()
    saved_last = saves.newest(tmp_path, server)
    assert saved_last is not None
    helpers.says = {0: {"rounds_lost": 3}}
    run = Run(FakePeer(server), tmp_path, resume=saved_last)
    summary = run.go()
    assert helpers.began_with == [b"", b"to round 4"], "its checkpoint tells what theta was part of"
    told = [(event["rounds"], event["tokens"]) for event in run.all("history_lost")]
    assert told == [(3, 3.0 * server.tokens_per_round)] and summary.setbacks.rounds_lost == 3


def test_a_push_that_was_lost_in_part_is_told_by_its_tokens(
    server: RunSpec, tmp_path: Path, helpers: type[Helpers]
) -> None:
    helpers.says = {
        1: {"outcomes": {"counted": 0.75, "lost": 0.25}},
        2: {"outcomes": {"stale": 1.0}},
        3: {"outcomes": {"counted": 0.25, "lost": 0.75}},
    }
    run = Run(FakePeer(server), tmp_path)
    summary = run.go()
    tokens = server.tokens_per_round
    dropped = [(event["steps"], event["tokens"], event["share"]) for event in run.all("work_dropped")]
    assert dropped == [(H, tokens // 4, 0.25), (H, tokens, 1.0), (H, tokens // 4 * 3, 0.75)]
    assert "in 25% of the model" in sentence(run.all("work_dropped")[0])
    assert summary.setbacks.tokens_dropped == tokens // 4 * 4 + tokens
    assert [event["counted"] for event in run.all("round")] == [True, False, False, True]


def test_steps_that_diverge_end_their_phase_and_are_told_as_a_person_can_read_them(
    server: RunSpec, tmp_path: Path, helpers: type[Helpers], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    step = InnerLoop.train_step

    def nan_once(self: InnerLoop, batches: Sequence[Tensor], number: int) -> StepResult:
        calls.append(number)
        result = step(self, batches, number)
        return dataclasses.replace(result, loss=math.nan) if len(calls) == H + 2 else result

    monkeypatch.setattr(InnerLoop, "train_step", nan_once)
    run = Run(FakePeer(server), tmp_path)
    assert run.go().t == 4
    assert all(sentence(event) for event in run.all("step"))
    assert [event["in_a_row"] for event in run.all("diverged")] == [1]
    dropped = [(event["steps"], event["tokens"]) for event in run.all("work_dropped")]
    assert dropped == [(2, 2 * server.tokens_per_round // H)]
    assert calls == [*range(H), H, H + 1, *range(H, 4 * H)], "what follows a step that diverged is not trained in vain"


def test_steps_that_diverge_are_undone_and_pushed_by_nobody_and_count_only_in_a_row(
    server: RunSpec, tmp_path: Path, helpers: type[Helpers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three times in four rounds; the second time the loss of the step after which nothing is finite still was."""
    spoilt = {H + 2: True, 3 * H + 2: False, 4 * H + 3: True}
    calls, loops, pushed = list[int](), list[InnerLoop](), list[Tensor]()
    step, begin = InnerLoop.train_step, Helpers.begin

    def spoil(self: InnerLoop, batches: Sequence[Tensor], number: int) -> StepResult:
        calls.append(number)
        loops.append(self)
        result = step(self, batches, number)
        if len(calls) not in spoilt:
            return result
        with torch.no_grad():
            next(self.model.parameters()).fill_(math.nan)
        return dataclasses.replace(result, loss=math.nan) if spoilt[len(calls)] else result

    def kept(self: Helpers, vector: Tensor | None = None, *, weight: float = 1.0) -> None:
        if vector is not None:
            pushed.append(vector.clone())
        begin(self, vector, weight=weight)

    monkeypatch.setattr(InnerLoop, "train_step", spoil)
    monkeypatch.setattr(helpers, "begin", kept)
    run = Run(FakePeer(server), tmp_path)
    assert run.go().t == 4
    assert [event["in_a_row"] for event in run.all("diverged")] == [1, 1, 1]
    assert len(calls) == 5 * H + 3 and len(pushed) == 4 and all(bool(p.isfinite().all()) for p in pushed)
    begun = [i + 1 for i in range(1, len(loops)) if loops[i] is not loops[i - 1]]
    assert begun == [call + 1 for call in spoilt], "what they left in the optimizer is gone, too"
    assert bool(run.params().isfinite().all())


def test_steps_begin_at_what_was_pulled_and_a_push_has_nothing_of_what_others_did(
    server: RunSpec, tmp_path: Path, helpers: type[Helpers], monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed, begin = list[Tensor](), Helpers.begin

    def with_others(self: Helpers, vector: Tensor | None = None, *, weight: float = 1.0) -> None:
        if vector is not None:
            pushed.append(vector.clone())
        begin(self, vector, weight=weight)
        self.theta += 0.5

    def nothing(self: InnerLoop, batches: Sequence[Tensor], number: int) -> StepResult:
        return StepResult(1.0, sum(ids.numel() for ids in batches), 1.0)

    monkeypatch.setattr(helpers, "begin", with_others)
    monkeypatch.setattr(InnerLoop, "train_step", nothing)
    run = Run(FakePeer(server), tmp_path)
    start = run.params()
    assert run.go().t == 4
    assert len(pushed) == 4 and not any(bool(p.any()) for p in pushed)
    torch.testing.assert_close(run.params(), start + 5 * 0.5)


def test_who_resumes_draws_on_where_it_was(
    server: RunSpec, tmp_path: Path, helpers: type[Helpers], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[Tensor] = []
    step = InnerLoop.train_step

    def watched(self: InnerLoop, batches: Sequence[Tensor], number: int) -> StepResult:
        trained.extend(batches)
        return step(self, batches, number)

    monkeypatch.setattr(InnerLoop, "train_step", watched)
    Run(FakePeer(server), tmp_path / "whole").go()
    whole = list(trained)
    trained.clear()
    half = Run(FakePeer(server), tmp_path / "parts")
    half.on_step = {H + 1: half.stop.set}
    assert half.go().reason == "interrupted"
    saved = saves.newest(tmp_path / "parts", server)
    assert saved is not None and saved.t == 2
    assert Run(FakePeer(server), tmp_path / "parts", resume=saved).go().t == 4
    assert len(trained) == (3 * H + 1) * server.inner.accumulate
    assert torch.equal(torch.cat(trained), torch.cat(whole[: len(trained)]))


def test_who_resumes_after_an_exchange_goes_on_bit_for_bit(
    server: RunSpec, tmp_path: Path, helpers: type[Helpers]
) -> None:
    spec = dataclasses.replace(server, model=ModelSpec(config=DROPPING))
    whole = Run(FakePeer(spec), tmp_path, checkpoint_every=1, keep=4, each_is_saved=True)
    assert whole.go().t == 4
    saved = saves.read(saves.folder_of(tmp_path, spec) / saves.name_of(2))
    rest = Run(FakePeer(spec), tmp_path / "rest", resume=dataclasses.replace(saved))
    assert rest.go().t == 4
    steps = [[(e["step"], e["loss"], e["lr"]) for e in run.all("step") if e["t"] >= 2] for run in (whole, rest)]
    assert steps[0] == steps[1] and len(steps[0]) == 2 * H
    assert torch.equal(rest.params(), whole.params())
    without = Run(FakePeer(spec), tmp_path / "without", resume=dataclasses.replace(saved, rng={}))
    without.go()
    assert not torch.equal(without.params(), whole.params()), "the random state plays no part: this proves nothing"


def test_a_model_whose_last_push_was_given_up_is_that_of_its_checkpoint(
    server: RunSpec, tmp_path: Path, helpers: type[Helpers], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]

    def in_vain(helpers: Helpers, timeout_s: float) -> bool:
        now[0] += 7.0
        return False

    monkeypatch.setattr(served, "STOP_S", 0.0)
    monkeypatch.setattr(helpers, "poll", in_vain)
    helpers.deaf_from = 2
    run = Run(FakePeer(server), tmp_path, clock=lambda: now[0])
    run.on_step = {H + 2: run.stop.set}
    summary = run.go()
    assert (summary.reason, summary.t, summary.setbacks.tokens_dropped) == (
        "interrupted",
        1,
        server.tokens_per_round // 2,
    )
    assert summary.waited_s == 7.0, "a wait in vain is one, too"
    saved = saves.newest(tmp_path, server)
    assert saved is not None and torch.equal(run.params(), theta_of(saved.image))


@pytest.mark.parametrize("helped", [False, True])
def test_who_wakes_after_the_end_of_a_run_that_nobody_serves_any_more_ends_and_says_so(
    server: RunSpec, tmp_path: Path, helpers: type[Helpers], monkeypatch: pytest.MonkeyPatch, helped: bool
) -> None:
    """It waited for a helper for ever, which would have begun anew with what this peer had pulled before the end."""
    now, peer = [100.0], FakePeer(server)
    peer.others = [
        FakeMember("early", alive=False, left=True, status={"t": 3}),
        FakeMember("ended", alive=False, left=True, status={"t": 4}),
        FakeMember("helper", alive=helped, role=HELPER),
    ]
    run = Run(peer, tmp_path, clock=lambda: now[0])

    def in_vain(helpers: Helpers, timeout_s: float) -> bool:
        now[0] += 7.0
        if now[0] > 1000.0:
            run.stop.set()
        return False

    monkeypatch.setattr(helpers, "poll", in_vain)
    helpers.deaf_from = 2
    if helped:
        assert run.go().reason == "interrupted"
        return
    with pytest.raises(DlcError, match=r"ended while this peer was away: ended came .* this peer's is of round 1"):
        run.go()
    assert 60.0 <= now[0] - 100.0 <= 80.0 and peer.left
    assert [event["tokens"] for event in run.all("work_dropped")] == [server.tokens_per_round]
    saved = saves.newest(tmp_path, server)
    assert saved is not None and saved.t == 1 and torch.equal(run.params(), theta_of(saved.image))


@pytest.mark.parametrize(
    ("own", "others", "steps"),
    [
        (100.0, [], 20),
        (100.0, [50.0], 20),
        (50.0, [100.0, 80.0], 10),
        (10.0, [100.0], 2),
        (1.0, [1e9], 1),
        (100.0, [math.inf, math.nan, -5.0], 20),
    ],
)
def test_a_slower_trainer_makes_fewer_steps_in_proportion(own: float, others: list[float], steps: int) -> None:
    assert share_of_steps(20, own, others) == steps


def test_each_trainer_draws_samples_in_an_order_of_its_own() -> None:
    firsts = [first_block(0, f"peer{i}") for i in range(50)]
    assert len(set(firsts)) == 50 and all(first % OWN_BLOCKS == 0 for first in firsts)
    assert firsts[0] == first_block(0, "peer0") != first_block(1, "peer0")
