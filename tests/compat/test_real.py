"""The compat layer over real peers on loopback: few and short, the scenarios themselves are in the files beside."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dlc.comm import heirs
from dlc.comm.security import generate_run_key
from dlc.compat.hivemind import DHT, DecentralizedAverager, Float16Compression, Optimizer, get_dht_time
from dlc.compat.hivemind.averaging.allreduce import AllreduceException
from dlc.compat.hivemind.compression import (
    CompressionBase,
    NoCompression,
    ScaledFloat16Compression,
    SizeAdaptiveCompression,
    Uniform8BitQuantization,
)
from dlc.compat.hivemind.optim import GradientAverager, PowerSGDGradientAverager, TrainingStateAverager
from dlc.compat.opendiloco.strategy import peer_of
from dlc.errors import DlcError, SwarmClosed, UsageError
from dlc.mesh import GroupCall
from tests.helpers import wait_until

WAIT_S = 180.0
MATCHMAKING_S = 120.0
"""A group is complete long before, when all are here."""


@contextmanager
def dhts(n: int, **options: object) -> Iterator[list[DHT]]:
    """n of one swarm; the first begins it."""
    made = [DHT(start=True, **options)]  # type: ignore[arg-type]
    try:
        maddrs = made[0].get_visible_maddrs()
        with ThreadPoolExecutor(n) as pool:
            given: dict[str, object] = {"start": True, "startup_timeout": WAIT_S, **options}
            joins = [pool.submit(DHT, maddrs, **given) for _ in range(n - 1)]  # type: ignore[arg-type]
            made += [join.result(WAIT_S) for join in joins]
        for dht in made:
            wait_until(lambda dht=dht: len(dht.swarm.present()) == n, WAIT_S, "everybody is known to everybody")
        yield made
    finally:
        for dht in made:
            dht.shutdown()


def test_values_groups_clients_and_state_over_real_peers() -> None:
    before = threading.active_count()
    mixed = SizeAdaptiveCompression(threshold=100, less=NoCompression(), greater_equal=Float16Compression())
    with dhts(4, run_key=generate_run_key()) as made:
        assert made[0].store("key", {"a": 1}, get_dht_time() + 60, subkey="x")
        wait_until(lambda: made[3].get("key") is not None, WAIT_S)
        assert made[3].get("key").value["x"].value == {"a": 1}
        averagers = [
            DecentralizedAverager(
                [torch.full((1000,), float(i)), torch.full((3,), 10.0 * i)],
                dht,
                start=True,
                prefix="mine",
                min_matchmaking_time=MATCHMAKING_S,
                compression=mixed,
                client_mode=i == 1,
                auxiliary=i == 3,
            )
            for i, dht in enumerate(made)
        ]
        wait_until(lambda: all(len(a.directory.others()) == 3 for a in averagers), WAIT_S)
        for _ in range(2):
            steps = [a.step(wait=False, weight=w, gather=w, timeout=WAIT_S)
                     for a, w in zip(averagers, (1.0, 2.0, 3.0, None), strict=True)]  # fmt: skip
            for step in steps:
                assert step.result(WAIT_S) == {
                    a.peer_id: w for a, w in zip(averagers, (1.0, 2.0, 3.0, None), strict=True)
                }
        for i, averager in enumerate(averagers):
            outcome = averager.last_outcome
            assert outcome is not None and not outcome.missing
            with averager.get_tensors() as (big, small):
                assert big[0].item() == pytest.approx((0 + 2 * 1 + 3 * 2) / 6 if i < 3 else 3.0, abs=1e-3)
                assert small[0].item() == pytest.approx((0 + 20 + 60) / 6 if i < 3 else 30.0, abs=1e-5)
        metadata, tensors = averagers[3].load_state_from_peers(timeout=WAIT_S)
        assert metadata == {"group_key": ""} and tensors[1][0].item() == pytest.approx(80 / 6, abs=1e-5)
        for averager in averagers:
            averager.shutdown()
    with pytest.raises(SwarmClosed):
        made[0].get("key")
    wait_until(lambda: threading.active_count() <= before, WAIT_S, "no thread is left")


@pytest.mark.parametrize("compression", [Float16Compression(), ScaledFloat16Compression(), Uniform8BitQuantization()])
def test_steps_below_the_resolution_of_the_compression_add_up(compression: CompressionBase) -> None:
    """As in Hivemind: parameters stayed where they were, since each average rounded off what a step had changed. But
    gradients are averaged once, and all peers are to make the same step."""
    start, steps, lr = torch.linspace(0.5, 1.0, 1000), 8, 1e-4
    options: dict[str, Any] = {"start": True, "min_matchmaking_time": MATCHMAKING_S, "compression": compression}
    with dhts(2) as made, ThreadPoolExecutor(2) as pool:
        params = [nn.Parameter(start.clone()) for _ in made]
        states = [
            TrainingStateAverager(
                dht=dht, optimizer=partial(torch.optim.SGD, lr=lr), params=[param], prefix="state", **options
            )
            for dht, param in zip(made, params, strict=True)
        ]
        gradients = [GradientAverager([p], dht=dht, prefix="g", **options) for dht, p in zip(made, params, strict=True)]
        for averager in (*states, *gradients):
            wait_until(lambda a=averager: len(a.directory.others()) == 1, WAIT_S)
        for param in params:
            param.grad = -torch.ones(1000)
        step = partial(TrainingStateAverager.step, optimizer_step=True, averaging_round=True, delay_averaging=False)
        for _ in range(steps):
            list(pool.map(step, states))
        for param in params:
            torch.testing.assert_close(param.detach(), start + steps * lr, rtol=0, atol=2e-6)
        for i, (averager, param) in enumerate(zip(gradients, params, strict=True)):
            param.grad = start * (1 + i)
            averager.accumulate_grads_(1)
        list(pool.map(GradientAverager.step, gradients))
        with gradients[0].get_tensors() as (one,), gradients[1].get_tensors() as (other,):
            assert torch.equal(one, other)


def test_a_member_that_dies_leaves_the_others_a_mean_of_their_own() -> None:
    with dhts(3) as made:
        averagers = [
            DecentralizedAverager(
                [torch.full((10,), float(i))], dht, start=True, prefix="p", min_matchmaking_time=MATCHMAKING_S
            )
            for i, dht in enumerate(made)
        ]
        wait_until(lambda: all(len(a.directory.others()) == 2 for a in averagers), WAIT_S)
        steps = [a.step(wait=False, timeout=WAIT_S) for a in averagers[:2]]
        assert not any(step.done() for step in steps)
        made[2].shutdown()  # they wait for it no longer
        assert all(len(step.result(WAIT_S)) == 2 for step in steps)
        for averager in averagers[:2]:
            with averager.get_tensors() as (tensor,):
                assert tensor.tolist() == [0.5] * 10


def test_who_cancels_a_step_and_makes_another_at_once_is_in_the_group_of_the_others() -> None:
    with dhts(3) as made:
        options = {"prefix": "p", "start": True, "min_matchmaking_time": MATCHMAKING_S}
        averagers = [DecentralizedAverager([torch.ones(3)], dht, **options) for dht in made]  # type: ignore[arg-type]
        wait_until(lambda: all(len(a.directory.others()) == 2 for a in averagers), WAIT_S)
        cancelled = averagers[0].step(wait=False)
        wait_until(lambda: all(dht.swarm.notices("meet/") for dht in made), WAIT_S, "all see that it waits")
        assert cancelled.cancel()
        steps = [a.step(wait=False) for a in (*averagers[1:], averagers[0])]
        assert all(len(step.result(WAIT_S)) == 3 for step in steps)


def test_a_group_that_is_there_is_known_before_anybody_can_have_its_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or else an Optimizer that hears that others have made the epoch takes it for one without itself."""
    monkeypatch.setattr("dlc.compat.hivemind.peer_swarm.LOOK_S", 1.0)
    ended, known = GroupCall._end, []

    def end(call: GroupCall, error: DlcError | None) -> None:
        known.append([step.began_allreduce for step in steps])
        ended(call, error)

    with dhts(2) as made:
        pair = [
            DecentralizedAverager([torch.zeros(8)], d, start=True, prefix="x", min_matchmaking_time=MATCHMAKING_S)
            for d in made
        ]
        wait_until(lambda: all(a.directory.others() for a in pair), WAIT_S)
        monkeypatch.setattr(GroupCall, "_end", end)
        steps = [averager.step(wait=False, require_trigger=True) for averager in pair]
        for step in steps:
            step.allow_allreduce()
        for step in steps:
            step.result(WAIT_S)
    assert known[0] == [True, True]


def test_where_all_give_weight_0_a_step_says_so() -> None:
    """It said that fewer than two had come."""
    with dhts(2) as made, ThreadPoolExecutor(2) as pool:
        averagers = [DecentralizedAverager([torch.ones(8)], dht, start=True, prefix="idle") for dht in made]
        wait_until(lambda: all(len(a.directory.others()) == 1 for a in averagers), WAIT_S)
        steps = [pool.submit(averager.step, weight=0.0, allow_retries=False) for averager in averagers]
        for step in steps:
            with pytest.raises(AllreduceException, match="all who contribute give weight 0"):
                step.result(WAIT_S)


@pytest.mark.parametrize("mode", ["at once", "delayed", "local"])
def test_two_optimizers_train_one_model_and_a_third_joins_with_their_state(mode: str) -> None:
    torch.manual_seed(0)
    features = torch.randn(100, 5)
    targets = features @ torch.randn(5, 1)
    nets = [nn.Linear(5, 1) for _ in range(3)]
    with dhts(3) as made:

        def make(i: int) -> Optimizer:
            return Optimizer(
                dht=made[i],
                run_id="run",
                target_batch_size=32,
                batch_size_per_step=8,
                params=nets[i].parameters(),
                optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
                matchmaking_time=MATCHMAKING_S,
                delay_state_averaging=mode != "at once",
                delay_grad_averaging=mode == "delayed",
                use_local_updates=mode == "local",
                grad_compression=Float16Compression(),
            )

        def train(opt: Optimizer, net: nn.Module, epochs: int) -> None:
            while opt.local_epoch < epochs:
                batch = torch.randint(0, len(features), (8,))
                opt.zero_grad()
                F.mse_loss(net(features[batch]), targets[batch]).backward()
                opt.step()
            opt.state_averager.step(wait_for_delayed_updates=True)

        opts = [make(0), make(1)]
        for opt in opts:
            wait_until(lambda opt=opt: len(opt.state_averager.directory.others()) == 1, WAIT_S)
        for opt in opts:
            opt.load_state_from_peers(timeout=WAIT_S)
            opt.tracker.report_local_progress(0, 1)
        assert torch.equal(nets[0].weight, nets[1].weight)
        wait_until(lambda: all(opt.tracker.global_progress.num_peers == 2 for opt in opts), WAIT_S)
        start = F.mse_loss(nets[0](features), targets).item()
        with ThreadPoolExecutor(2) as pool:
            for future in [pool.submit(train, opt, net, 5) for opt, net in zip(opts, nets, strict=False)]:
                future.result(2 * WAIT_S)
        assert opts[0].local_epoch == opts[1].local_epoch == 5
        torch.testing.assert_close(nets[0].weight, nets[1].weight, rtol=1e-4, atol=1e-5)
        assert F.mse_loss(nets[0](features), targets).item() < start
        third = make(2)
        wait_until(lambda: len(third.state_averager.directory.others()) == 2, WAIT_S)
        third.load_state_from_peers(timeout=WAIT_S)
        assert third.local_epoch == 5
        torch.testing.assert_close(nets[2].weight, nets[0].weight, rtol=1e-4, atol=1e-5)
        for opt in (*opts, third):
            opt.shutdown()


def test_what_a_process_has_told_is_not_said_by_the_next_one_of_its_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But values that were stored stay, whoever stored them, and newcomers see them."""
    monkeypatch.setattr(heirs, "TURN_S", 0.1)
    monkeypatch.setattr(heirs, "LOOK_S", 0.05)
    with dhts(1, run_key=(key := generate_run_key())) as (first,):
        options = {"start": True, "run_key": key, "identity_path": tmp_path, "startup_timeout": WAIT_S}
        for life in range(2):
            with DHT(first.get_visible_maddrs(), **options) as second:  # type: ignore[arg-type]
                if not life:
                    second.swarm.post("want/mine/", b"nonce", 600.0)
                    assert second.store("key", 1, get_dht_time() + 600)
                wait_until(lambda: second.swarm.id in first.swarm.present(), WAIT_S)  # noqa: B023
                wait_until(lambda: first.get("key") and first.swarm.notices("want/mine/"), WAIT_S)
                (notice,) = first.swarm.notices("want/mine/")
                assert notice.author == second.swarm.id and notice.lives is (not life)
                assert first.get("key").value == 1
                wait_until(lambda: second.get("key"), WAIT_S)  # noqa: B023
        with DHT(first.get_visible_maddrs(), start=True, run_key=key, startup_timeout=WAIT_S) as late:
            wait_until(lambda: late.get("key"), WAIT_S)


def test_with_the_log_a_dht_holds_a_peer_for_rounds_of_all() -> None:
    with dhts(2, log=True) as made, ThreadPoolExecutor(2) as pool:
        for dht in made:
            peer_of(dht).take_seat(WAIT_S)  # else the first one's round may be over before the other has one
        given = [torch.full((3,), float(i)) for i in (0, 2)]
        rounds = [pool.submit(peer_of(dht).all_reduce, t, timeout_s=WAIT_S) for dht, t in zip(made, given, strict=True)]
        assert all(future.result(2 * WAIT_S).complete for future in rounds)
        assert all(t.tolist() == [1.0] * 3 for t in given)
        assert made[0].store("k", 1, get_dht_time() + 60)
        wait_until(lambda: made[1].get("k") is not None, WAIT_S)
    with dhts(1) as (alone,), pytest.raises(UsageError, match="log=True"):
        peer_of(alone)


def test_listening_beyond_loopback_needs_a_run_key() -> None:
    with pytest.raises(UsageError, match="run key"):
        DHT(start=True, host_maddrs=["/ip4/0.0.0.0/tcp/0"])


def test_power_sgd_over_real_peers_gives_all_the_same_bits_of_a_mean_that_has_its_rank() -> None:
    matrix = torch.randn(64, 1, generator=torch.Generator().manual_seed(0)) @ torch.ones(1, 48)
    with dhts(3, run_key=generate_run_key()) as made:
        averagers = []
        for i, dht in enumerate(made):
            parameters = [nn.Parameter(torch.zeros(64, 48)), nn.Parameter(torch.zeros(5))]
            options = {"prefix": "power", "start": True, "min_matchmaking_time": MATCHMAKING_S, "client_mode": i == 2}
            averager = PowerSGDGradientAverager(parameters, 1, dht=dht, **options)  # type: ignore[arg-type]
            averagers.append(averager)
            parameters[0].grad, parameters[1].grad = matrix * i, torch.full((5,), float(i))
            averager.accumulate_grads_(i + 1)
        wait_until(lambda: all(len(a.directory.others()) == 2 for a in averagers), WAIT_S)
        with ThreadPoolExecutor(3) as pool:
            gathered = list(pool.map(lambda one: one.step(timeout=WAIT_S), averagers))
        assert all(set(one) == {dht.peer_id for dht in made} for one in gathered)
        means = []
        for averager in averagers:
            with averager.use_averaged_gradients() as tensors:
                means.append([tensor.clone() for tensor in tensors])
    share = (0 * 1 + 1 * 2 + 2 * 3) / 6
    torch.testing.assert_close(means[0][0], share * matrix, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(means[0][1], torch.full((5,), share))
    assert all(torch.equal(a, b) for mean in means for a, b in zip(mean, means[0], strict=True))


def test_one_bad_number_makes_no_peer_bad_for_good() -> None:
    """It is refused, and its peer has the mean of the others like all."""
    with dhts(2) as made:
        given = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([float("nan"), 5.0, 6.0])]
        averagers = [
            DecentralizedAverager([own], dht, start=True, prefix="mine", min_matchmaking_time=MATCHMAKING_S)
            for own, dht in zip(given, made, strict=True)
        ]
        steps = [averager.step(wait=False) for averager in averagers]
        for step in steps:
            step.result(WAIT_S)
        assert [own.tolist() for own in given] == [[1.0, 2.0, 3.0]] * 2
        assert dict(averagers[0].last_outcome.missing).keys() == {made[1].peer_id}
