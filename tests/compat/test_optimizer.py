"""`Optimizer` and what it is made of, over peers without sockets: the scenarios of Hivemind's optimizer tests."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dlc.compat.hivemind import (
    DHT,
    GradientAverager,
    GradScaler,
    Optimizer,
    ProgressTracker,
    TrainingAverager,
    TrainingStateAverager,
)
from dlc.compat.hivemind.optim import optimizer_state
from dlc.errors import UsageError
from tests.compat.fake_swarm import Town
from tests.helpers import wait_until

WAIT_S = 180.0
FOREVER_S = 300.0
TARGET, EPOCHS = 32, 3
SGD = partial(torch.optim.SGD, lr=0.1)
HALVING = partial(torch.optim.lr_scheduler.StepLR, gamma=0.5, step_size=1)


def dht(town: Town) -> DHT:
    return DHT(start=True, p2p=town.peer())


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(5, 1)


def weights(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def batches(seed: int, n: int, size: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    xs = [torch.randn(size, 5, generator=generator) for _ in range(n)]
    return [(x, x.sum(1, keepdim=True)) for x in xs]


def optimizer(town: Town, net: nn.Module, **options: Any) -> Optimizer:
    given: dict[str, Any] = {
        "run_id": "run",
        "target_batch_size": TARGET,
        "params": net.parameters(),
        "optimizer": SGD,
        "matchmaking_time": WAIT_S,
        **options,
    }
    return Optimizer(dht=dht(town), **given)


# ------------------------------------------------------------------ a whole training


COMBINATIONS = [
    # use_local_updates, delay_state_averaging, delay_optimizer_step, delay_grad_averaging, reuse_grad_buffers
    (False, False, False, False, False),
    (False, True, False, False, False),
    (False, True, True, True, False),
    (False, False, False, False, True),
    (False, True, True, True, True),
    (False, True, True, False, True),
    (True, False, False, False, False),
    (True, True, False, False, False),
]


@pytest.mark.parametrize(("local", "state", "step", "grad", "reuse"), COMBINATIONS)
def test_four_peers_train_together_in_every_mode(local: bool, state: bool, step: bool, grad: bool, reuse: bool) -> None:
    """All end in the same epoch with the same parameters, and with about the samples that the epochs take."""
    town, n, size = Town(), 4, 4
    nets = [model() for _ in range(n)]
    opts = [
        optimizer(
            town,
            net,
            batch_size_per_step=size,
            scheduler=HALVING,
            use_local_updates=local,
            delay_state_averaging=state,
            delay_optimizer_step=step,
            delay_grad_averaging=grad,
            reuse_grad_buffers=reuse,
            client_mode=i == 3,
        )
        for i, net in enumerate(nets)
    ]
    start = loss_of(nets[0], batches(9, 1, 100)[0])
    for opt in opts:
        opt.tracker.report_local_progress(0, 1)  # all are known to train before the first epoch ends
    samples = [0] * n

    def train(i: int) -> None:
        opt, data = opts[i], iter(batches(i, 1000, size))
        while opt.local_epoch < EPOCHS:
            x, y = next(data)
            F.mse_loss(nets[i](x), y).backward()
            opt.step()
            samples[i] += size
            if not reuse:
                opt.zero_grad()
        opt.state_averager.step(wait_for_delayed_updates=True)

    together(train, n)
    assert {opt.local_epoch for opt in opts} == {opt.tracker.global_epoch for opt in opts} == {EPOCHS}
    assert TARGET * EPOCHS <= sum(samples) <= 3 * TARGET * EPOCHS  # who waits for an average trains no further
    final = [weights(net) for net in nets]
    for other in final[1:]:
        torch.testing.assert_close(other, final[0], rtol=1e-5, atol=1e-6)
    assert loss_of(nets[0], batches(9, 1, 100)[0]) < start
    assert all(opt.opt.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**EPOCHS) for opt in opts)
    for opt in opts:
        assert opt.is_alive() and opt.use_local_updates is local
        opt.shutdown()
        opt.shutdown()
        assert not opt.is_alive() and not opt.tracker.is_alive()


def together(act: Any, n: int) -> list[Any]:
    with ThreadPoolExecutor(n) as pool:
        return [future.result(2 * WAIT_S) for future in [pool.submit(act, i) for i in range(n)]]


def loss_of(net: nn.Module, batch: tuple[Tensor, Tensor]) -> float:
    with torch.no_grad():
        return F.mse_loss(net(batch[0]), batch[1]).item()


@pytest.mark.parametrize("offload", [True, False])
def test_two_peers_make_the_steps_of_one_with_the_joint_batch(offload: bool) -> None:
    town, nets, alone = Town(), [model(), model()], model()
    opts = [
        optimizer(town, n, batch_size_per_step=TARGET, offload_optimizer=offload, average_state_every=1000)
        for n in nets
    ]
    data = [batches(i, EPOCHS, TARGET) for i in range(2)]
    for opt in opts:
        opt.tracker.report_local_progress(0, 1)  # both are known to train before the first epoch ends
    turn = threading.Barrier(2)

    def train(i: int) -> None:
        for x, y in data[i]:
            F.mse_loss(nets[i](x), y).backward()
            opts[i].step()
            opts[i].zero_grad()
            turn.wait(WAIT_S)

    together(train, 2)
    plain = SGD(alone.parameters())
    for (x0, y0), (x1, y1) in zip(*data, strict=True):
        plain.zero_grad()
        F.mse_loss(alone(torch.cat([x0, x1])), torch.cat([y0, y1])).backward()
        plain.step()
    assert [opt.local_epoch for opt in opts] == [EPOCHS] * 2
    assert torch.equal(weights(nets[0]), weights(nets[1]))
    torch.testing.assert_close(weights(nets[0]), weights(alone), rtol=1e-5, atol=1e-6)


def test_one_peer_alone_follows_the_plain_optimizer_over_accumulated_batches() -> None:
    net, alone = model(), model()
    opt = optimizer(Town(), net, batch_size_per_step=8, optimizer=partial(torch.optim.Adam, lr=0.05))
    plain = torch.optim.Adam(alone.parameters(), lr=0.05)
    data = batches(0, 12, 8)
    for x, y in data:
        F.mse_loss(net(x), y).backward()
        opt.step()
        opt.zero_grad()
    for start in range(0, 12, 4):
        plain.zero_grad()
        xs, ys = (torch.cat(parts) for parts in zip(*data[start : start + 4], strict=True))
        F.mse_loss(alone(xs), ys).backward()
        plain.step()
    assert opt.local_epoch == 3 and opt.local_progress.samples_accumulated == 0
    torch.testing.assert_close(weights(net), weights(alone), rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------ what goes wrong


def prepared(town: Town, n: int, **options: Any) -> tuple[list[nn.Linear], list[Optimizer]]:
    """n peers that are known to train, each with a gradient of a whole epoch."""
    nets = [model() for _ in range(n)]
    opts = [optimizer(town, net, batch_size_per_step=TARGET, **{"average_state_every": 1000, **options})
            for net in nets]  # fmt: skip
    for opt in opts:
        opt.tracker.report_local_progress(0, 1)
    return nets, opts


def backward(net: nn.Module, seed: int) -> None:
    ((x, y),) = batches(seed, 1, TARGET)
    F.mse_loss(net(x), y).backward()


def test_a_failed_average_is_tried_again_and_nothing_is_applied_alone(caplog: pytest.LogCaptureFixture) -> None:
    town = Town()
    nets, opts = prepared(town, 2)
    start = weights(nets[0])
    failed = threading.Event()

    def failing(peer: str) -> bool:
        return not failed.is_set()

    town.failing = failing
    for net in nets:
        backward(net, 0)

    def train(i: int) -> None:
        opts[i].step()

    with pytest.MonkeyPatch.context() as patch:
        for opt in opts:
            assert opt.grad_averager is not None
            patch.setattr(opt.grad_averager, "step", partial(opt.grad_averager.step, allow_retries=False))
        together(train, 2)
    assert [opt.local_epoch for opt in opts] == [0, 0] and "tries again" in caplog.text
    assert "reset_accumulated_grads_" not in caplog.text and "not used" not in caplog.text
    assert all(torch.equal(weights(net), start) for net in nets)
    failed.set()
    for opt, net in zip(opts, nets, strict=True):
        opt.zero_grad()
        backward(net, 1)
    together(train, 2)
    assert [opt.local_epoch for opt in opts] == [1, 1]
    assert torch.equal(weights(nets[0]), weights(nets[1])) and not torch.equal(weights(nets[0]), start)
    assert "reset_accumulated_grads_" not in caplog.text and "not used" not in caplog.text


@pytest.mark.parametrize("background", [False, True])
def test_an_average_that_can_never_be_is_raised_and_not_tried_again(background: bool) -> None:
    """What the caller has to mend is no bad luck: the training neither stands still nor goes on without averages."""
    town = Town()
    nets, opts = prepared(town, 2, delay_grad_averaging=background)
    with pytest.MonkeyPatch.context() as patch:
        for opt in opts:
            patch.setattr(opt.dht.swarm, "average", Mock(side_effect=UsageError("mend this")))
        for opt, net in zip(opts, nets, strict=True):
            backward(net, 0)
            with pytest.raises(UsageError, match="mend this"):
                opt.step()
                opt.state_averager.wait_for_delayed_updates()
                opt.state_averager.step(apply_delayed_updates=True)


def test_who_has_missed_an_epoch_loads_the_state_of_those_who_made_it() -> None:
    town = Town()
    nets, opts = prepared(town, 2, scheduler=HALVING)
    for net in nets:
        backward(net, 0)
    together(lambda i: opts[i].step(), 2)
    late = model()
    with torch.no_grad():
        late.weight.fill_(42.0)
    newcomer = optimizer(town, late, batch_size_per_step=4, scheduler=HALVING)
    backward(late, 3)
    newcomer.step()
    assert newcomer.local_epoch == 1 and newcomer.local_progress.samples_accumulated == 0
    assert torch.equal(weights(late), weights(nets[0]))
    assert newcomer.opt.param_groups[0]["lr"] == pytest.approx(0.05)


def test_peers_that_load_at_the_same_time_end_with_the_state_of_the_eldest() -> None:
    town, n = Town(), 4
    nets = [nn.Linear(5, 1) for _ in range(n)]
    opts = [optimizer(town, net, batch_size_per_step=TARGET) for net in nets]
    eldest = weights(nets[0])
    together(lambda i: opts[i].load_state_from_peers(timeout=WAIT_S), n)
    assert all(torch.equal(weights(net), eldest) for net in nets)


def test_a_peer_that_comes_late_in_the_same_epoch_takes_part_in_its_average() -> None:
    town = Town()
    nets, opts = prepared(town, 2)
    for net in nets:
        backward(net, 0)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(opts[0].step)
        wait_until(lambda: any(town.waiting.values()), WAIT_S)
        assert not first.done()
        opts[1].step()
        first.result(WAIT_S)
    assert [opt.local_epoch for opt in opts] == [1, 1] and torch.equal(weights(nets[0]), weights(nets[1]))


def test_a_background_average_that_fails_makes_its_peer_load_the_state() -> None:
    town = Town()
    nets, opts = prepared(town, 2, delay_grad_averaging=True)
    bad = opts[1].dht.peer_id
    town.failing = lambda peer: peer == bad
    assert opts[1].grad_averager is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opts[1].grad_averager, "step", partial(opts[1].grad_averager.step, allow_retries=False))
        for net in nets:
            backward(net, 0)
        together(lambda i: opts[i].step(), 2)
    for opt in opts:
        opt.state_averager.wait_for_delayed_updates()
        opt.state_averager.step(apply_delayed_updates=True)
    town.failing = lambda peer: False
    assert not torch.equal(weights(nets[0]), weights(nets[1]))
    opts[1].step()
    assert opts[1].local_epoch == 1 and torch.equal(weights(nets[0]), weights(nets[1]))


def test_an_auxiliary_peer_helps_and_trains_nothing() -> None:
    town = Town()
    nets, opts = prepared(town, 2)
    helper_net = model()
    helper = optimizer(town, helper_net, auxiliary=True, matchmaking_time=0.2)
    start = weights(helper_net)
    for net in nets:
        backward(net, 0)

    def act(i: int) -> None:
        if i < 2:
            opts[i].step()
        else:
            wait_until(lambda: helper.tracker.ready_to_update_epoch, WAIT_S)
            helper.step()

    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(act, 2)]
        wait_until(lambda: not futures[0].done(), WAIT_S)
        futures += [pool.submit(act, i) for i in range(2)]
        for future in futures:
            future.result(WAIT_S)
    assert [opt.local_epoch for opt in opts] == [1, 1] and helper.local_epoch <= 1
    assert torch.equal(weights(helper_net), start) and torch.equal(weights(nets[0]), weights(nets[1]))
    assert helper.tracker.global_progress.num_peers == 2
    with pytest.raises(UsageError, match="auxiliary"):
        helper.step(batch_size=4)


def test_an_auxiliary_peer_does_not_wait_for_an_epoch_that_the_others_have_made() -> None:
    town = Town()
    _, opts = prepared(town, 2)
    helper = optimizer(town, model(), auxiliary=True, matchmaking_time=2 * WAIT_S)
    opts[0].tracker.report_local_progress(0, TARGET)
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(helper.step)
        wait_until(lambda: any(town.waiting.values()), WAIT_S, "it looks for the others")
        for opt in opts:
            assert opt.grad_averager is not None
            opt.grad_averager.announce(averaged=0)
        step.result(WAIT_S)
    assert helper.local_epoch == 0 and not any(town.waiting.values())


def test_states_are_saved_and_restored_with_their_epoch() -> None:
    net, other = model(), model()
    opt, again = (optimizer(Town(), n, batch_size_per_step=TARGET, optimizer=torch.optim.Adam) for n in (net, other))
    for seed in range(2):
        backward(net, seed)
        opt.step()
        opt.zero_grad()
    saved = opt.state_dict()
    again.load_state_dict(saved)
    assert saved["state"]["local_epoch"] == again.local_epoch == 2 and again.state["local_epoch"] == 2
    assert again.opt.state_dict()["state"][0]["step"] == 2
    assert "local_epoch" in opt.state_dict()["state"], "a state_dict must not be changed by loading it"


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("delayed", [False, True])
def test_a_checkpoint_that_is_loaded_into_the_model_later_is_what_is_trained_on(order: str, delayed: bool) -> None:
    """Offloaded, which is the default, the optimizer has copies: they take over what was loaded, and give that away."""
    net, town = model(), Town()
    opt = optimizer(town, net, batch_size_per_step=TARGET, delay_grad_averaging=delayed, scheduler=HALVING)
    for seed in range(2):
        backward(net, seed)
        opt.step()
        opt.zero_grad()
    opt.state_averager.step(wait_for_delayed_updates=True)
    saved, held = opt.state_dict(), {name: value.clone() for name, value in net.state_dict().items()}

    def went_on(net: nn.Module, opt: Optimizer) -> tuple[Tensor, float]:
        backward(net, 2)
        opt.step()
        opt.state_averager.step(wait_for_delayed_updates=True)
        return weights(net), opt.opt.param_groups[0]["lr"]

    expected, lr = went_on(net, opt)
    town = Town()
    fresh = nn.Linear(5, 1)
    again = optimizer(town, fresh, batch_size_per_step=TARGET, delay_grad_averaging=delayed, scheduler=HALVING)
    backward(fresh, 9)
    again.step()  # in the background still, where it is delayed: the checkpoint counts
    again.zero_grad()
    for load in ((fresh.load_state_dict, held), (again.load_state_dict, saved))[:: 1 if order == "model first" else -1]:
        load[0](load[1])
    assert again.local_epoch == 2 and torch.equal(weights(fresh), torch.cat([v.flatten() for v in held.values()]))
    other = nn.Linear(5, 1)
    newcomer = optimizer(town, other, batch_size_per_step=TARGET, scheduler=HALVING)
    newcomer.load_state_from_peers()
    assert newcomer.local_epoch == 2 and torch.equal(weights(other), weights(fresh))
    newcomer.shutdown()
    assert torch.equal(went_on(fresh, again)[0], expected)
    assert again.opt.param_groups[0]["lr"] == lr == pytest.approx(0.1 * 0.5**3)


def test_with_local_updates_nothing_is_offloaded_unless_that_is_asked_for() -> None:
    town, net = Town(), model()
    assert not optimizer(town, net, use_local_updates=True).offload_optimizer
    assert optimizer(town, net, use_local_updates=True, offload_optimizer=True).offload_optimizer
    assert optimizer(town, net, use_local_updates=True, delay_optimizer_step=True).offload_optimizer
    assert optimizer(town, net).offload_optimizer


def test_arguments_that_do_not_go_together_are_refused_with_what_to_give() -> None:
    town, net = Town(), model()
    made = SGD(net.parameters())
    for options, text in (
        ({"optimizer": made, "params": None, "offload_optimizer": True}, "params"),
        ({"optimizer": SGD, "params": None}, "params"),
        ({"delay_grad_averaging": True, "delay_optimizer_step": False}, "delay_optimizer_step"),
        ({"delay_optimizer_step": True, "offload_optimizer": False}, "offload"),
        ({"delay_optimizer_step": True, "delay_state_averaging": False}, "delay_state_averaging"),
        ({"use_local_updates": True, "reuse_grad_buffers": True}, "reuse_grad_buffers"),
        ({"auxiliary": True, "batch_size_per_step": 4}, "auxiliary"),
        ({"scheduler": HALVING(made)}, "scheduler"),
        ({"average_state_every": 0}, "average_state_every"),
    ):
        with pytest.raises(UsageError, match=text):
            optimizer(town, net, **options)
    opt = optimizer(town, net, reuse_grad_buffers=True)
    with pytest.raises(UsageError, match="batch_size_per_step"):
        opt.step()
    with pytest.raises(UsageError, match="batch_size is 0"):
        opt.step(batch_size=0)
    with pytest.raises(UsageError, match="zeroed"):
        opt.zero_grad()
    with pytest.raises(UsageError, match="groups"):
        opt.add_param_group({})
    with pytest.raises(UsageError, match="GradScaler"):
        opt.step(batch_size=1, grad_scaler=object())  # type: ignore[arg-type]
    ready = optimizer(Town(), net, optimizer=made, params=None, batch_size_per_step=TARGET)
    assert ready.opt is made and not ready.offload_optimizer


def test_a_scaled_loss_is_unscaled_once_and_overflows_begin_the_sum_anew() -> None:
    net, alone = model(), model()
    opt = optimizer(Town(), net, batch_size_per_step=16, reuse_grad_buffers=True, offload_optimizer=False)
    scaler = GradScaler("cpu", init_scale=1024.0)
    plain = SGD(alone.parameters())
    data = batches(0, 2, 16)
    bad = net(data[0][0]).sum() * float("inf")
    scaler.scale(bad).backward()
    scaler.unscale_(opt)
    scaler.step(opt)
    scaler.update()
    assert opt.local_progress.samples_accumulated == 0 and scaler.get_scale() == 512.0
    for x, y in data:
        scaler.scale(F.mse_loss(net(x), y)).backward()
        scaler.step(opt)
        scaler.update()
    F.mse_loss(alone(torch.cat([x for x, _ in data])), torch.cat([y for _, y in data])).backward()
    plain.step()
    assert opt.local_epoch == 1
    torch.testing.assert_close(weights(net), weights(alone), rtol=1e-5, atol=1e-6)
    with pytest.raises(UsageError, match="torch.amp"):
        scaler.step(plain)
    with pytest.raises(UsageError, match="torch.amp"):
        scaler.step(optimizer(Town(), net, batch_size_per_step=16))


# ------------------------------------------------------------------ its parts


def test_gradients_are_summed_weighted_by_samples_and_substituted() -> None:
    town, shape = Town(), (5, 5)
    nets = [nn.ParameterDict({"w": nn.Parameter(torch.zeros(shape))}) for _ in range(2)]
    first, second = (
        GradientAverager(net.parameters(), dht=dht(town), prefix="g", start=True, reuse_grad_buffers=reuse,
                         target_group_size=2, min_matchmaking_time=FOREVER_S)
        for net, reuse in zip(nets, (False, True), strict=True)
    )  # fmt: skip
    controls = [first.schedule_step(), second.schedule_step()]
    for i in range(10):
        if i % 3 == 0:
            F.mse_loss(nets[0].w, torch.ones(shape)).backward()
            first.accumulate_grads_(batch_size=2)
            nets[0].zero_grad()
        else:
            F.mse_loss(nets[1].w, -torch.ones(shape)).backward()
            second.accumulate_grads_(batch_size=3)
    assert (first.local_samples_accumulated, first.local_times_accumulated) == (8, 4)
    assert (second.local_samples_accumulated, second.local_times_accumulated) == (18, 6)
    one, two = torch.full(shape, -2 / 25), torch.full(shape, 2 / 25)
    torch.testing.assert_close(next(first._grad_accumulators()), 4 * one)
    torch.testing.assert_close(next(second._grad_accumulators()), 6 * two)
    for averager, control in zip((first, second), controls, strict=True):
        averager.step(control=control, wait=False)
    for control in controls:
        assert len(control.result(WAIT_S)) == 2
    expected = (8 * one + 18 * two) / 26
    for averager, net in zip((first, second), nets, strict=True):
        with averager.use_averaged_gradients():
            torch.testing.assert_close(net.w.grad, expected)
    assert nets[0].w.grad is None and not torch.allclose(nets[1].w.grad, expected)
    with pytest.raises(UsageError, match="used already"):
        first.step(control=controls[0])
    with pytest.raises(ValueError, match="shapes"):
        GradientAverager(nets[0].parameters(), dht=dht(town), prefix="x", start=True,
                         averaged_grads=[torch.zeros(5, 5, 1)])  # fmt: skip


@pytest.mark.parametrize(("offload", "sync_epoch"), [(False, False), (True, False), (False, True), (True, True)])
def test_a_training_state_steps_in_place_and_averages_in_the_background(offload: bool, sync_epoch: bool) -> None:
    town = Town()
    torch.manual_seed(1337)
    nets = [nn.Linear(2, 3), nn.Linear(2, 3)]
    extras = [(torch.randn(2, 2), -torch.rand(1)), (-torch.randn(2, 2), torch.rand(1))]
    states = [
        TrainingStateAverager(
            dht=dht(town),
            params=net.parameters(),
            extra_tensors=extra,
            start=True,
            optimizer=partial(torch.optim.Adam, lr=0.1, betas=(0.9, 0.9)),
            scheduler=partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda t: 1.0 / max(1, t)),
            sync_epoch_when_averaging=sync_epoch,
            average_opt_statistics=("exp_avg_sq",),
            offload_optimizer=offload,
            target_group_size=2,
            prefix="my_exp",
            min_matchmaking_time=FOREVER_S,
        )
        for net, extra in zip(nets, extras, strict=True)
    ]
    x = torch.ones(2)
    for step in range(20):
        for state, net, target in zip(states, nets, (1.0, -1.0), strict=True):
            F.mse_loss(net(x), torch.full((3,), target)).mul(2).backward()
            state.step(
                optimizer_step=True, zero_grad=True, averaging_round=step == 10, delay_averaging=state is states[0]
            )
    assert all(net.weight.grad is None for net in nets)
    assert nets[0](x).mean() > 0.5 and nets[1](x).mean() < -0.5
    assert all(torch.allclose(a, b) for a, b in zip(*extras, strict=True))

    def statistic(state: TrainingStateAverager) -> Tensor:
        return state.optimizer.state_dict()["state"][0]["exp_avg_sq"].clone()

    before = [statistic(state) for state in states]
    assert not torch.allclose(*before)
    states[0].step(increment_epoch=True)
    for state in states:
        state.step(increment_epoch=True, averaging_round=True, delay_averaging=True)
    for state in states:
        state.step(wait_for_delayed_updates=True)
    assert torch.allclose(nets[0](x), nets[1](x))
    assert all(torch.allclose(statistic(state), (before[0] + before[1]) / 2) for state in states)
    assert [state.local_epoch for state in states] == [2, 2 if sync_epoch else 1]


def test_a_training_state_is_loaded_with_epoch_and_schedule_and_never_from_behind() -> None:
    town, nets = Town(), [nn.Linear(2, 3), nn.Linear(2, 3)]
    loader, donor = (
        TrainingStateAverager(
            dht=dht(town),
            params=net.parameters(),
            optimizer=SGD,
            scheduler=partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda t: 1.0 / max(1, t)),
            prefix="my_exp",
            start=True,
            allow_state_sharing=shares,
        )
        for net, shares in zip(nets, (False, True), strict=True)
    )
    donor.local_epoch = 137
    with torch.no_grad():
        nets[1].weight.fill_(42.0)
    assert loader.load_state_from_peers(timeout=WAIT_S) is not None
    assert loader.local_epoch == 137 and bool((nets[0].weight == 42).all())
    assert loader.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 137)
    donor.local_epoch = 5
    assert loader.load_state_from_peers(timeout=WAIT_S) is None and loader.local_epoch == 137


def test_progress_of_all_adds_up_and_who_is_gone_is_not_counted() -> None:
    town = Town()
    trackers = [ProgressTracker(dht(town), "run", 100, start=True) for _ in range(3)]
    watcher = ProgressTracker(dht(town), "run", 100, start=True)
    for i, tracker in enumerate(trackers):
        tracker.report_local_progress(0, 10 * (i + 1))
    wait_until(lambda: watcher.global_progress.samples_accumulated == 60, WAIT_S)
    assert watcher.global_progress.num_peers == 3 and not watcher.ready_to_update_epoch
    assert watcher.performance_ema.samples_per_second < 1e-9 < trackers[0].performance_ema.samples_per_second
    trackers[2].dht.shutdown()
    wait_until(lambda: watcher.global_progress.samples_accumulated == 30, WAIT_S)
    trackers[0].report_local_progress(0, 80)
    wait_until(lambda: watcher.ready_to_update_epoch and trackers[1].ready_to_update_epoch, WAIT_S)
    with trackers[0].pause_updates():
        assert trackers[0].update_epoch(1) == 1
    wait_until(lambda: watcher.global_epoch == 1, WAIT_S)
    assert trackers[1].ready_to_update_epoch, "another peer is in the next epoch"
    assert watcher.global_progress.samples_accumulated == 0 and watcher.global_progress.num_peers == 2
    trackers[1].report_local_progress(5, 7)
    wait_until(lambda: watcher.global_epoch == 5 and watcher.global_progress.num_peers == 1, WAIT_S)
    for tracker in trackers[:2]:
        tracker.shutdown()
        tracker.shutdown()
    wait_until(lambda: watcher.global_progress.num_peers == 0, WAIT_S)
    assert not trackers[0].is_alive() and watcher.global_epoch == 0


@pytest.mark.parametrize("locked", [True, False])
def test_a_training_averager_averages_parameters_gradients_and_statistics(locked: bool) -> None:
    town, nets = Town(), [model(), model()]
    opts = [torch.optim.Adam(net.parameters(), lr=0.1) for net in nets]
    averagers = [
        TrainingAverager(
            opt,
            average_parameters=True,
            average_gradients=True,
            average_opt_statistics=("exp_avg",),
            dht=dht(town),
            prefix="t",
            start=True,
            min_matchmaking_time=FOREVER_S,
        )
        for opt in opts
    ]
    for i, (net, opt) in enumerate(zip(nets, opts, strict=True)):
        backward(net, i)
        opt.step()
    mean = (weights(nets[0]) + weights(nets[1])) / 2
    lock = threading.Lock() if locked else None
    futures = [averager.step(data_lock=lock, wait=False, weight=1.0) for averager in averagers]
    assert all(len(future.result(WAIT_S)) == 2 for future in futures)
    for net, opt in zip(nets, opts, strict=True):
        torch.testing.assert_close(weights(net), mean, rtol=1e-6, atol=1e-6)
        grads, moments = net.weight.grad, opt.state[net.weight]["exp_avg"]
        torch.testing.assert_close(grads, nets[0].weight.grad, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(moments, opts[0].state[nets[0].weight]["exp_avg"], rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        nets[1].weight.zero_()
    assert averagers[0].load_state_from_peers(timeout=WAIT_S) is not None
    assert bool((nets[0].weight == 0).all()) and averagers[0].local_step == 1


def test_the_state_of_an_optimizer_is_made_without_a_step_and_carried_over() -> None:
    net, other = model(), model()
    opt = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5)
    before = weights(net)
    optimizer_state.initialize(opt)
    assert torch.equal(weights(net), before) and opt.state[net.weight]["step"] == 0
    backward(net, 0)
    opt.step()
    metadata, tensors = optimizer_state.dump(opt)
    again = torch.optim.AdamW(other.parameters(), lr=0.3)
    mine = list(other.parameters())
    optimizer_state.load(again, metadata, mine, [*(p.detach().clone() for p in net.parameters()), *tensors])
    assert again.param_groups[0]["lr"] == 0.1 and again.state[other.weight]["step"] == 1
    assert torch.equal(weights(net), weights(other))
    with pytest.raises(UsageError, match="shapes"):
        optimizer_state.load(again, metadata, mine, [torch.zeros(1), torch.zeros(1)])
