"""OpenDiLoCo's optimizer over ours: its algorithm, its arguments, its state; mostly over a peer without a network."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from torch import Tensor, nn

from dlc.comm.codecs import get_codec
from dlc.compat.hivemind.peer_swarm import RUN as WITHOUT_ROUNDS
from dlc.compat.opendiloco import DHT, AllReduceStrategy, DiLoCoGradAverager, DiLoCoOptimizer
from dlc.compat.opendiloco.strategy import CODECS, codec_of
from dlc.compat.opendiloco.tracker import DiloCoProgressTracker, Own
from dlc.errors import ConfigError, RoundTimeout, UsageError
from dlc.handles import Reduction
from dlc.peer import Peer
from dlc.runspec import RunSpec
from dlc.survey import Member
from tests.swarm import JOIN_S, swarm
from tests.train.fake_peer import FakePeer, FakePosition

H = 3
WAIT_S = 180.0
NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
ADAMW = partial(torch.optim.AdamW, lr=0.01)


class LonePeer(FakePeer):
    """Knows members of all roles, and can be asked where a channel stands before it is open."""

    known: list[Member] = []

    def position(self, channel: str) -> FakePosition:
        return super().position(channel) if hasattr(self, "state") else FakePosition(0, 0.0, b"", None, b"")

    def members(self) -> list[Member]:  # type: ignore[override]
        return [member("me", me=True), *self.known]


def member(
    name: str, role: str = "trainer", alive: bool = True, me: bool = False, speed: float = 0.0, said: Any = None
):
    """What is known of a peer that said `said` of itself."""
    status = {} if said is None else {"opendiloco": said}
    return Member(name, "", role, alive, False, "", 0.0, 0, speed, status, me)


def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def made(net: nn.Module, peer: object, **options: Any) -> DiLoCoOptimizer:
    given = {"outer_optimizer": NESTEROV, "inner_optimizer": ADAMW, "batch_size": 5, "num_inner_steps": H}
    return DiLoCoOptimizer(dht=peer, run_id="run", params=net.parameters(), **{**given, **options})  # type: ignore[arg-type]


def loss_of(net: nn.Module, step: int) -> Tensor:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
    dtype = next(net.parameters()).dtype
    return (net(x.to(dtype)).float() - x.sum(1, keepdim=True)).square().mean()


def train(net: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(net, step).backward()
        optimizer.step()


def flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def test_rounds_are_torchs_outer_steps_on_what_the_inner_optimizer_did() -> None:
    net, twin, peer = model(), model(), LonePeer()
    optimizer = made(net, peer, scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5))
    inner = ADAMW(twin.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(inner, step_size=2, gamma=0.5)
    theta = [p.detach().clone().requires_grad_() for p in twin.parameters()]
    outer = NESTEROV(theta)
    train(net, optimizer, range(2 * H))
    for step in range(2 * H):
        train(twin, inner, range(step, step + 1))
        schedule.step()
        if step % H == H - 1:
            for kept, p in zip(theta, twin.parameters(), strict=True):
                kept.grad = kept.detach() - p.detach()
            outer.step()
            for kept, p in zip(theta, twin.parameters(), strict=True):
                p.data.copy_(kept.data)
    torch.testing.assert_close(flat(net), flat(twin), rtol=1e-5, atol=1e-6)
    assert optimizer.param_groups[0]["lr"] == inner.param_groups[0]["lr"] < 0.01
    assert optimizer.local_epoch == 2 and optimizer.last_report is not None and peer.weights == [5.0 * H] * 2
    told, exact = optimizer.state_averager.optimizer.state_dict(), outer.state_dict()
    assert told["state"].keys() == exact["state"].keys()
    for place, state in told["state"].items():
        torch.testing.assert_close(state["momentum_buffer"], exact["state"][place]["momentum_buffer"])
    assert optimizer.state_averager.optimizer.param_groups[0]["lr"] == 0.7


def test_a_swarm_that_is_started_again_from_a_saved_state_goes_on_as_it_was() -> None:
    whole = model()
    train(whole, made(whole, LonePeer()), range(4 * H + 1))
    net = model()
    optimizer = made(net, LonePeer())
    train(net, optimizer, range(2 * H + 1))
    told = optimizer.state_dict()
    assert told["state_dict_outer"]["state"]["local_epoch"] == 2 and told["state_dict_outer"]["dlc"]["steps"] == 1
    train(net, optimizer, range(2 * H + 1, 3 * H))  # up to a round, where the parameters are theta
    saved, base = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(net)
    again = made(base, LonePeer())
    again.load_state_dict(saved)
    before = copy.deepcopy(again.state_dict())
    assert before["state_dict_outer"]["param_groups"] == saved["state_dict_outer"]["param_groups"]
    for place in range(4):
        held = [s["state_dict_outer"]["state"][place]["momentum_buffer"] for s in (before, saved)]
        assert torch.equal(*held) and bool(held[0].any())
    assert again.local_epoch == 3 and before["state_dict_inner"]["state"].keys() == {0, 1, 2, 3}
    train(base, again, range(3 * H, 4 * H + 1))
    assert torch.equal(flat(base), flat(whole)) and again.local_epoch == 4


def stored(*states: Any) -> Any:
    """As from a file of torch's, in another process: a copy, of nothing but what weights_only=True reads."""

    def check(value: Any) -> None:
        if isinstance(value, dict):
            value = [*value, *value.values()]
        if isinstance(value, list | tuple):
            for item in value:
                check(item)
        else:
            assert value is None or type(value) in (bool, int, float, str, Tensor), value

    plain = [dict(state) for state in states]
    check(plain)
    return copy.deepcopy(plain)


@pytest.mark.parametrize("rounds", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_state_of_the_middle_of_a_round_goes_on_as_it_was(
    rounds: int, dtype: torch.dtype, apart: bool, steps: int
) -> None:
    """The outer parameters are those that the round began with, not what the steps made of them."""
    net, peer, other = model().to(dtype), LonePeer(), LonePeer()
    halving = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
    optimizer = made(net, peer, scheduler=halving, grad_compression="int8")
    first = rounds * H + steps
    train(net, optimizer, range(first))
    outer, schedule = optimizer.state_averager.optimizer, optimizer.state_averager.scheduler_inner_optimizer
    if apart:  # OpenDiLoCo's checkpoints hold both optimizers, the inner and the outer
        saved = stored(
            net.state_dict(), schedule.state_dict(), outer.state_dict(), optimizer.inner_optimizer.state_dict()
        )
    else:
        saved = stored(net.state_dict(), schedule.state_dict(), optimizer.state_dict())
    base = model().to(dtype)
    again = made(base, other, scheduler=halving, grad_compression="int8")
    base.load_state_dict(saved[0])
    again.state_averager.scheduler_inner_optimizer.load_state_dict(saved[1])
    if apart:
        again.state_averager.optimizer.load_state_dict(saved[2])
        again.inner_optimizer.load_state_dict(saved[3])
    else:
        again.load_state_dict(saved[2])
    assert again.state_dict()["state_dict_outer"]["dlc"].keys() == outer.state_dict()["dlc"].keys()
    assert again.state_dict()["state_dict_outer"]["dlc"]["steps"] == steps
    train(net, optimizer, range(first, 3 * H + 1))
    train(base, again, range(first, 3 * H + 1))
    assert torch.equal(flat(base), flat(net)) and torch.equal(other.theta(), peer.theta())
    assert again.tracker.real_step == optimizer.tracker.real_step == 3 * H + 1
    assert again.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert again.tracker.local_progress.samples_accumulated == optimizer.tracker.local_progress.samples_accumulated == 5
    assert other.weights == peer.weights[rounds:]


def test_of_a_model_that_is_not_the_saved_one_no_steps_are_taken_up(caplog: pytest.LogCaptureFixture) -> None:
    net = model()
    optimizer = made(net, LonePeer())
    train(net, optimizer, range(2))
    (saved,) = stored(optimizer.state_dict())
    with torch.random.fork_rng():
        torch.manual_seed(1)
        base = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    begun, peer = flat(base), LonePeer()
    again = made(base, peer)
    again.load_state_dict(saved)
    with caplog.at_level("WARNING"):
        again.load_state_from_peers()
    assert torch.equal(peer.theta(), begun) and torch.equal(flat(base), begun) and again.tracker.local_step == 0
    assert "not as it was when this state was saved" in caplog.text and "2 inner steps" in caplog.text


def test_a_swarm_that_began_without_the_state_that_was_loaded_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """Somebody without a checkpoint was there first: all that it holds would be lost, unsaid."""
    net, peer = model(), LonePeer()
    optimizer = made(net, LonePeer())
    train(net, optimizer, range(H))
    made(model(), peer).load_state_from_peers()
    image, opened = peer.state.export(), peer.open

    def join(channel: str, own: Any, **options: Any) -> FakePosition:
        found = opened(channel, own, **options)
        own.restore(image)
        return found

    peer.open = join  # type: ignore[method-assign]
    again = made(net, peer)
    again.load_state_dict(stored(optimizer.state_dict())[0])
    assert again.local_epoch == 1 and not torch.equal(flat(net), flat(model()))
    again.load_state_from_peers()
    assert "begun from the parameters of another peer" in caplog.text and "of epoch 1" in caplog.text
    assert torch.equal(flat(net), flat(model())) and again.local_epoch == 0


def test_a_training_that_goes_on_takes_back_a_state_of_its_own_round() -> None:
    net, whole, peer = model(), model(), LonePeer()
    optimizer, twin = made(net, peer), made(whole, LonePeer())
    train(net, optimizer, range(H + 1))
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    train(net, optimizer, range(90, 91))  # which went wrong
    net.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(net, optimizer, range(H + 1, 2 * H))
    train(whole, twin, range(2 * H))
    assert torch.equal(flat(net), flat(whole)) and peer.weights == [5.0 * H] * 2


def test_what_is_changed_after_a_state_was_loaded_stays() -> None:
    net = model()
    optimizer = made(net, LonePeer())
    train(net, optimizer, range(1))
    again = made(net, LonePeer())
    again.load_state_dict(optimizer.state_dict())
    again.param_groups[0]["lr"] = 0.125
    train(net, again, range(1, 2))
    assert again.param_groups[0]["lr"] == 0.125


def test_where_the_swarm_lives_its_state_counts_and_gradients_of_other_parameters_are_dropped() -> None:
    peer, first, net = LonePeer(), model(), model()
    train(first, made(first, peer), range(H))
    state, opened = peer.state, peer.open

    def join(channel: str, own: Any, **options: Any) -> FakePosition:
        found = opened(channel, own, **options)
        own.restore(state.export())
        return found

    peer.open = join  # type: ignore[method-assign]
    saved = made(model(), LonePeer()).state_dict()
    optimizer = made(net, peer)
    optimizer.load_state_dict(
        {**saved, "state_dict_outer": {**saved["state_dict_outer"], "state": {"local_epoch": 40}}}
    )
    assert optimizer.local_epoch == 40
    train(net, optimizer, range(1))
    assert torch.equal(flat(net), flat(first)) and optimizer.local_epoch == 1 and not optimizer.tracker.local_step
    train(net, optimizer, range(1, 3))
    assert optimizer.tracker.local_step == 2 and optimizer.tracker.real_step == H + 2
    optimizer.load_state_from_peers()
    assert torch.equal(flat(net), flat(first)) and not optimizer.tracker.local_step
    with pytest.raises(UsageError, match="swarm's by now"):
        optimizer.state_averager.optimizer.load_state_dict(saved["state_dict_outer"])
    held = optimizer.state_averager.optimizer.state_dict()
    optimizer.state_averager.optimizer.load_state_dict(held)  # the same changes nothing


@pytest.mark.parametrize("fused", [False, True])
def test_samples_of_each_step_make_the_weight_and_what_a_scaler_skips_is_no_step(fused: bool) -> None:
    net, peer = model(), LonePeer()
    halving = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.5**step)
    optimizer = made(net, peer, inner_optimizer=partial(ADAMW, fused=fused), scheduler=halving)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    sizes = iter((1, 2, 100, 4))
    for step, spoilt in enumerate((False, False, True, False)):
        optimizer.zero_grad()
        scaler.scale(loss_of(net, step)).backward()
        if spoilt:
            next(net.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
        optimizer.step(batch_size=next(sizes), scaler=scaler)
        scaler.update()
    assert peer.weights == [7.0] and optimizer.local_epoch == 1 and scaler.get_scale() == 4.0
    assert optimizer.param_groups[0]["lr"] == 0.01 / 2**3, "the schedule goes on with the steps that were made"


def test_groups_may_hold_their_parameters_as_torch_takes_them() -> None:
    """Those of a generator were used up before the inner optimizer was made: it had none, and trained nothing."""
    net, plain = model(), model()
    one = (p for p in [net[0].weight])
    groups = [{"params": one, "lr": 0.1}, {"params": net[0].bias}, {"params": net[2].parameters()}]
    optimizer = DiLoCoOptimizer(
        dht=LonePeer(), run_id="run", params=groups, outer_optimizer=NESTEROV, inner_optimizer=ADAMW, batch_size=5,
        num_inner_steps=H,
    )  # fmt: skip
    train(net, optimizer, range(H - 1))
    reference = ADAMW([{"params": [plain[0].weight], "lr": 0.1}, {"params": [plain[0].bias, *plain[2].parameters()]}])
    train(plain, reference, range(H - 1))
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1, 2]
    assert torch.equal(flat(net), flat(plain))


def test_samples_of_a_step_that_failed_do_not_count() -> None:
    """They weighed in the round as if they were in it."""
    net, peer = model(), LonePeer()
    optimizer = made(net, peer)
    train(net, optimizer, range(1))
    with pytest.raises(ArithmeticError):
        optimizer.step(Mock(side_effect=ArithmeticError))
    assert optimizer.tracker.local_progress.samples_accumulated == 5
    train(net, optimizer, range(1, H))
    assert peer.weights == [5.0 * H]


def test_the_schedule_counts_a_step_whose_round_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The learning rate of all that followed was that of a step before."""
    net, peer = model(), LonePeer()
    optimizer = made(net, peer, scheduler=lambda inner: torch.optim.lr_scheduler.StepLR(inner, 1, 0.5))
    train(net, optimizer, range(H - 1))
    with monkeypatch.context() as patch:
        patch.setattr(peer, "contribute", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train(net, optimizer, range(H - 1, H))
    schedule = optimizer.state_averager.scheduler_inner_optimizer
    assert schedule.last_epoch == H and optimizer.param_groups[0]["lr"] == schedule.get_last_lr()[0]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscaled", ["by nobody", "inner", "outer"])
def test_gradients_are_unscaled_once_whoever_does_it(unscaled: str, fused: bool) -> None:
    """OpenDiLoCo's own program unscales its optimizer, to clip, and then has that step: they were divided twice."""
    sgd = partial(torch.optim.SGD, lr=0.1, fused=fused)
    net, plain = model(), model()
    optimizer, reference = made(net, LonePeer(), inner_optimizer=sgd), sgd(plain.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(H - 1):
        for stepped in (optimizer, reference):
            stepped.zero_grad()
        scaler.scale(loss_of(net, step)).backward()
        loss_of(plain, step).backward()
        if unscaled != "by nobody":
            scaler.unscale_(optimizer if unscaled == "outer" else optimizer.inner_optimizer)
            assert torch.allclose(*(next(m.parameters()).grad for m in (net, plain)))  # type: ignore[arg-type]
        optimizer.step(scaler=scaler)
        reference.step()
        scaler.update()
        assert torch.allclose(flat(net), flat(plain), rtol=1e-5)


def test_an_overflow_that_unscaling_found_is_no_step() -> None:
    net, peer = model(), LonePeer()
    optimizer, before = made(net, peer), flat(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss_of(net, 0)).backward()
    next(net.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
    scaler.unscale_(optimizer)
    optimizer.step(scaler=scaler)
    scaler.update()
    assert torch.equal(flat(net), before) and scaler.get_scale() == 512.0 and not optimizer.tracker.local_step


def test_a_closure_is_evaluated_once_and_its_loss_comes_back() -> None:
    net = model()
    optimizer, calls = made(net, LonePeer()), []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, 0)
        loss.backward()
        calls.append(loss.item())
        return loss

    loss = optimizer.step(closure)
    assert isinstance(loss, Tensor) and calls == [loss.item()]
    with pytest.raises(ValueError, match="scaler"):
        optimizer.step(closure, scaler=torch.amp.GradScaler("cpu"))


@pytest.mark.parametrize(
    ("options", "patience_s"),
    [
        ({}, 600.0),
        ({"timeout_waiting_for_peers": 20.0}, 20.0),
        ({"all_reduce_strategy": AllReduceStrategy.NO_WAIT, "matchmaking_time": 2.0}, 2.0),
        ({"all_reduce_strategy": "NO_WAIT", "matchmaking_time": 2.0}, 2.0),
    ],
)
def test_a_round_waits_as_the_strategy_says(options: dict[str, Any], patience_s: float) -> None:
    net, peer = model(), LonePeer()
    train(net, made(net, peer, **options), range(H))
    assert peer.patiences_s == [patience_s]


def heavy_ball(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.7, momentum=0.9)


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"timeout_waiting_for_peers": 5.0}, ValueError, "matchmaking_time"),
        (
            {"timeout_waiting_for_peers": 50.0, "all_reduce_strategy": AllReduceStrategy.NO_WAIT},
            ValueError,
            "WAIT_FOR_ALL",
        ),
        ({"all_reduce_strategy": "NOWAIT"}, ValueError, "NOWAIT"),
        ({"batch_size": 0}, ValueError, "batch_size is 0"),
        ({"num_inner_steps": 0}, ValueError, "num_inner_steps is 0"),
        ({"optimizer": NESTEROV}, KeyError, "outer_optimizer"),
        ({"target_batch_size": 9}, KeyError, "num_inner_steps"),
        ({"use_local_updates": False}, ValueError, "use_local_updates"),
        ({"delay_optimizer_step": True}, ValueError, "delay_optimizer_step"),
        ({"extra_tensors": [torch.ones(1)]}, ValueError, "extra_tensors"),
        ({"num_iner_steps": 5}, TypeError, "num_iner_steps"),
        ({"outer_optimizer": NESTEROV([torch.ones(1)])}, TypeError, "callable"),
        ({"outer_optimizer": len}, TypeError, "torch.optim.Optimizer"),
        ({"inner_optimizer": 3}, TypeError, "inner_optimizer"),
        ({"scheduler": 3}, TypeError, "scheduler"),
        ({"outer_optimizer": heavy_ball}, UsageError, "nesterov=True"),
        ({"outer_optimizer": partial(NESTEROV, weight_decay=0.1)}, UsageError, "weight_decay=0.1"),
        ({"outer_optimizer": partial(NESTEROV, maximize=True)}, UsageError, "maximize=True"),
        ({"outer_optimizer": partial(torch.optim.Adam, amsgrad=True)}, UsageError, "amsgrad=True"),
        ({"grad_compression": object()}, UsageError, "fp16"),
        ({"grad_compression": "zz"}, ConfigError, "unknown codec"),
        ({"dht": "127.0.0.1:4600"}, UsageError, "dlc.Peer"),
        ({"params": []}, ValueError, "params"),
        ({"outer_scheduler": len}, UsageError, "outer_scheduler is not offered"),
    ],
)
def test_what_is_not_offered_is_refused_by_its_name(options: dict[str, Any], error: type[Exception], told: str) -> None:
    given: dict[str, Any] = {"dht": LonePeer(), "run_id": "run", "params": model().parameters(), "batch_size": 5}
    given |= {"num_inner_steps": H, "outer_optimizer": NESTEROV, "inner_optimizer": ADAMW}
    with pytest.raises(error, match=told):
        DiLoCoOptimizer(**{**given, **options})


def test_needless_arguments_and_compressions_by_class_are_taken() -> None:
    class Uniform8BitQuantization:
        pass

    optimizer = made(
        model(), LonePeer(), grad_compression=Uniform8BitQuantization(), averaging_timeout=5.0, verbose=True,
        delay_grad_averaging=False, client_mode=None,
    )  # fmt: skip
    optimizer.load_state_from_peers()
    assert optimizer.state_dict()["state_dict_outer"]["dlc"]["residual"] is not None, "int8 keeps what it loses"


def test_options_of_the_outer_optimizer_are_not_one_peers_to_change() -> None:
    optimizer = made(model(), LonePeer(), outer_optimizer=partial(torch.optim.Adam, lr=0.1, betas=(0.9, 0.95), eps=0.1))
    with pytest.raises(UsageError, match="same on all peers"):
        optimizer.state_averager.optimizer.param_groups[0]["lr"] = 0.1
    other = partial(torch.optim.SGD, lr=0.4)
    saved = made(model(), LonePeer(), outer_optimizer=other).state_dict()
    optimizer.load_state_dict(saved)
    assert optimizer.state_averager.optimizer.param_groups[0]["lr"] == 0.4, "as in torch, what is loaded counts"


def test_to_a_scheduler_it_is_an_optimizer_and_its_groups_are_the_inner_ones() -> None:
    net = model()
    optimizer = made(net, LonePeer())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    for step in range(2):
        train(net, optimizer, range(step, step + 1))
        schedule.step()
    assert optimizer.inner_optimizer.param_groups[0]["lr"] == pytest.approx(0.01 / 3)
    assert isinstance(optimizer, torch.optim.Optimizer) and optimizer.state is optimizer.inner_optimizer.state
    with pytest.raises(UsageError, match="as params"):
        optimizer.add_param_group({"params": []})


def test_it_is_not_copied_and_its_hooks_are_those_of_the_inner_one() -> None:
    """One deepcopy, which failed, broke the steps of all such optimizers in the process."""
    net = model()
    optimizer = made(net, LonePeer())
    for copied in (copy.copy, copy.deepcopy, operator.methodcaller("__reduce_ex__", 2)):
        with pytest.raises(TypeError, match="neither pickled nor copied"):
            copied(optimizer)
    told: list[object] = []
    optimizer.register_step_pre_hook(lambda inner, *_: told.append(inner))
    after = optimizer.register_step_post_hook(lambda inner, *_: told.append(inner))
    train(net, optimizer, range(1))
    assert told == [optimizer.inner_optimizer] * 2 and optimizer.defaults is optimizer.inner_optimizer.defaults
    after.remove()
    train(net, optimizer, range(1))
    assert len(told) == 3
    with pytest.raises(UsageError, match="no hooks of its state"):
        optimizer.register_state_dict_post_hook(lambda *_: None)


def test_the_tracker_counts_trainers_that_are_alive_and_believes_no_nonsense() -> None:
    net, peer = model(), LonePeer()
    peer.known = [
        member("a", speed=2.5, said=["run", 0, 5]),
        member("b", said=["other", 7, 5]),
        member("c", said={"epoch": 9}),
        member("d", said=["run", "9", None]),
        member("e", speed=1.0, said=["run", 0, 10**400]),
        member("f", said=["run", 1 << 60, 5]),
        member("g", said=["run", 0, -5]),
        member("dead", alive=False, said=["run", 9, 9]),
        member("seer", role="observer"),
    ]
    optimizer = made(net, peer)
    train(net, optimizer, range(2))
    seen = optimizer.tracker.global_progress
    assert (seen.num_peers, seen.epoch, seen.target_batch_size) == (9 - 1, 0, 5 * H)
    assert seen.samples_accumulated == 10 + 5 and optimizer.tracker.global_epoch == 0
    assert seen.eta_next_epoch - seen.next_fetch_time >= (5 * H - 5) / 2.5
    assert optimizer.tracker.ready_to_update_epoch and optimizer.tracker.local_progress.samples_accumulated == 10
    assert peer.said[0]["status"] == {"opendiloco": ["run", 0, 5]}
    with optimizer.tracker.pause_updates():
        optimizer.shutdown()


def test_peers_end_with_equal_bits_and_a_newcomer_takes_them() -> None:
    nets = [model(), model()]

    def run(peer: Peer, i: int, steps: range) -> DiLoCoOptimizer:
        optimizer = made(nets[i], peer, grad_compression="fp16")
        optimizer.load_state_from_peers()
        train(nets[i], optimizer, steps)
        return optimizer

    with swarm(2) as peers, ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(run, peer, i, range(10 * i, 10 * i + 2 * H)) for i, peer in enumerate(peers)]
        both = [end.result(WAIT_S) for end in ends]
        assert torch.equal(flat(nets[0]), flat(nets[1])) and [o.local_epoch for o in both] == [2, 2]
        assert all(o.tracker.global_progress.num_peers == 2 for o in both)
        assert all(len(o.last_report.contributors) == 2 for o in both if o.last_report is not None)
        states = [o.state_averager.optimizer.state_dict()["state"] for o in both]
        assert all(torch.equal(states[0][k]["momentum_buffer"], states[1][k]["momentum_buffer"]) for k in range(4))
        host, _, port = peers[0].address.rpartition(":")
        with DHT([f"/ip4/{host}/tcp/{port}/p2p/{peers[0].id}"], start=True, startup_timeout=JOIN_S) as third:
            late = model()
            newcomer = made(late, third, grad_compression="fp16")
            newcomer.load_state_from_peers()
            assert torch.equal(flat(late), flat(nets[0])) and newcomer.local_epoch == 2
            (maddr,) = third.get_visible_maddrs()
            assert maddr.address == third.peer.address and maddr.endswith(third.peer_id)


def test_a_dht_takes_tcp_addresses_and_is_of_no_use_before_its_start() -> None:
    for wrong in ("/ip4/10.0.0.1/udp/4600", "/ip4/10.0.0.1/udp/4600/quic"):
        with pytest.raises(UsageError, match="HOST:PORT"):
            DHT([wrong])
    with pytest.raises(TypeError, match="list of addresses"):
        DHT("/ip4/10.0.0.1/tcp/4600")
    with pytest.raises(UsageError, match="start=True"):
        made(model(), DHT())
    net, peer = model(), LonePeer()
    for dht in (SimpleNamespace(peer=peer), SimpleNamespace(swarm=SimpleNamespace(peer=peer))):
        made(net, dht).load_state_from_peers()


def test_a_step_of_a_gradient_averager_that_ends_without_a_mean_is_given_up() -> None:
    """It stayed on its way: each further step was refused, while the others counted what it had offered."""
    mains = [[nn.Parameter(torch.full((3,), float(i))), nn.Parameter(torch.zeros(1))] for i in range(2)]
    outers = [torch.optim.SGD([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(1))], lr=1.0) for _ in mains]
    with swarm(2) as peers:
        one, other = (
            DiLoCoGradAverager(m, o, dht=p, prefix="g", min_matchmaking_time=WAIT_S)
            for m, o, p in zip(mains, outers, peers, strict=True)
        )
        for _ in range(2):
            with pytest.raises(RoundTimeout, match="no round of 'g/gradients' was committed within"):
                one.step(timeout=0.1)
            with one.get_tensors() as (grad, _):
                assert torch.equal(grad, torch.ones(3)), "this peer's own"
        with torch.no_grad():
            mains[0][0].fill_(2.0)
        for _ in range(3):  # a round that begins with what was given up goes on without that
            control = other.step(wait=False)
            assert not isinstance(control, dict)
            together = one.step(timeout=WAIT_S)
            assert isinstance(together, dict) and control.result(WAIT_S) == together
            if len(together) == 2:
                break
        assert together.keys() == {peer.id for peer in peers}
        for averager in (one, other):
            with averager.get_tensors() as (grad, _):
                assert torch.equal(grad, torch.full((3,), -0.5)), "of what each held when it was called last"
        with torch.no_grad():
            mains[1][0].fill_(5.0)
        with pytest.raises(UsageError, match="used already"):
            other.step(control)
        with other.get_tensors() as (grad, _):
            assert torch.equal(grad, torch.full((3,), -0.5)), "nothing is done"


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_a_step_of_a_gradient_averager_that_is_interrupted_is_given_up(
    interrupt: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By any exception of a signal's handler: it wrote its mean into the gradients later, and no step came after it."""
    main = nn.Parameter(torch.zeros(3))
    outer = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=1.0)
    with swarm(2) as (peer, _):
        averager = DiLoCoGradAverager([main], outer, dht=peer, prefix="g", min_matchmaking_time=WAIT_S)
        with monkeypatch.context() as patch, pytest.raises(interrupt):
            patch.setattr(Reduction, "wait", Mock(side_effect=interrupt))
            averager.step()
        with pytest.raises(RoundTimeout, match="was committed within"):
            averager.step(timeout=0.1)


@torch.no_grad()
def test_gradients_that_a_loop_has_forgotten_are_made_anew_for_each_average() -> None:
    """`zero_grad` of any torch optimizer sets them to None, and the second average was refused as one of a NoneType."""
    mains = [[nn.Parameter(torch.zeros(3))] for _ in range(2)]
    outers = [NESTEROV([nn.Parameter(torch.zeros(3))]) for _ in mains]
    alone = nn.Parameter(torch.zeros(3))
    reference = NESTEROV([alone])
    with swarm(2) as peers:
        averagers = [
            DiLoCoGradAverager(m, o, dht=p, prefix="g", min_matchmaking_time=WAIT_S)
            for m, o, p in zip(mains, outers, peers, strict=True)
        ]
        for _ in range(3):
            for i, (main,) in enumerate(mains):
                main -= i + 1.0
            controls = [averager.step(wait=False) for averager in averagers]
            alone.grad = alone - (mains[0][0] + mains[1][0]) / 2
            reference.step()
            for averager, control, outer, (main,) in zip(averagers, controls, outers, mains, strict=True):
                assert not isinstance(control, dict)
                control.result(WAIT_S)
                outer.step()
                outer.zero_grad()
                with averager.get_tensors() as (grad,):
                    assert torch.equal(grad, torch.zeros(3))
                main.copy_(outer.param_groups[0]["params"][0])
    for (main,) in mains:
        torch.testing.assert_close(main.detach(), alone.detach())


def test_pseudo_gradients_are_averaged_into_the_gradients_of_an_optimizer_of_the_callers() -> None:
    mains = [[nn.Parameter(torch.full((3,), float(i))), nn.Parameter(torch.full((2, 2), 2.0 * i))] for i in range(2)]
    outers = [torch.optim.SGD([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))], lr=1.0) for _ in mains]
    with swarm(2) as peers:
        averagers = [
            DiLoCoGradAverager(m, o, dht=p, prefix="g", min_matchmaking_time=WAIT_S, start=True, target_group_size=4)
            for m, o, p in zip(mains, outers, peers, strict=True)
        ]
        controls = [averager.step(wait=False) for averager in averagers]
        for averager, control in zip(averagers, controls, strict=True):
            assert not isinstance(control, dict)
            assert control.result(WAIT_S).keys() == {peer.id for peer in peers} and control.done()
            with averager.get_tensors() as (one, other):
                assert torch.equal(one, torch.full((3,), 0.5)) and torch.equal(other, torch.zeros(2, 2))
            with pytest.raises(UsageError, match="used already"):
                averager.step(control)
        alone = DiLoCoGradAverager(mains[0], outers[0], dht=peers[0], prefix="h", min_group_size=2)
        with pytest.raises(RoundTimeout, match="1 peers came, fewer than min_group_size=2"):
            alone.step()
        with pytest.raises(UsageError, match="on its way"):
            averagers[0].schedule_step().result()
    make: Callable[..., object] = partial(DiLoCoGradAverager, offloaded_optimizer=outers[0], dht=peers[0], prefix="g")
    for error, options in (
        (KeyError, {"client_mode": True}),
        (KeyError, {"averaged_grads": ()}),
        (TypeError, {"prefxi": 1}),
        (ValueError, {"averaging_alpha": 0.25}),
    ):
        with pytest.raises(error):
            make(mains[0], **options)
    with pytest.raises(ValueError, match="iterator"):
        make(iter(mains[0]))
    with pytest.raises(ValueError, match="shapes"):
        make(mains[0][:1])


def test_a_step_of_a_gradient_averager_beside_another_leaves_what_that_one_sends() -> None:
    """It was refused only when it had written its own pseudo-gradient over what the others were to get."""
    mains = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    with swarm(2) as peers:
        averager, other = (
            DiLoCoGradAverager(
                [main],
                torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=1.0),
                dht=peer,
                prefix="g",
                min_matchmaking_time=WAIT_S,
            )
            for main, peer in zip(mains, peers, strict=True)
        )
        control = averager.step(wait=False)
        assert not isinstance(control, dict)
        with torch.no_grad():
            mains[0].fill_(9.0)
        with pytest.raises(UsageError, match="the averaging before is on its way"):
            averager.step(wait=False)
        together = other.step(timeout=WAIT_S)
        assert isinstance(together, dict) and len(together) == 2
        assert control.result(WAIT_S) == together
        for each in (averager, other):
            with each.get_tensors() as (grad,):
                assert torch.equal(grad, torch.ones(3))
        controls = [each.step(wait=False) for each in (averager, other)]
        for control in controls:
            assert not isinstance(control, dict)
            control.result(WAIT_S)
        with other.get_tensors() as (grad,):
            assert torch.equal(grad, torch.full((3,), -3.5))


def test_what_a_dht_is_given_reaches_its_peer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An argument that is lost on the way is missed by nobody: there is a default for each."""
    joined: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    peer = Mock(spec=Peer, id="me", address="127.0.0.1:4600")
    peer.spec = RunSpec()

    def join(*args: Any, **options: Any) -> Mock:
        joined.append((args, options))
        return peer

    monkeypatch.setattr(Peer, "join", join)
    with DHT(
        ["/ip4/10.0.0.1/tcp/4600", "10.0.0.2:4600"],
        start=True,
        host_maddrs=["/ip4/10.0.0.9/udp/1", "/ip4/10.0.0.9/tcp/7"],
        announce_maddrs=["/ip4/192.0.2.9/tcp/9"],
        run_key=b"k" * 32,
        identity_path=tmp_path,
        startup_timeout=7.5,
        probe_links=False,
        role="observer",
    ) as dht:
        dht.run_in_background()
        assert joined == [
            (
                (["10.0.0.1:4600", "10.0.0.2:4600"],),
                {
                    "listen": "10.0.0.9:7",
                    "advertise": "192.0.2.9:9",
                    "key": b"k" * 32,
                    "state_dir": tmp_path,
                    "join_timeout_s": 7.5,
                    "probe_links": False,
                    "role": "observer",
                    "hold": True,
                },
            )
        ]
        assert peer.take_seat.call_args_list == [call(7.5)] and not peer.leave.called
    peer.leave.assert_called_once_with()


def test_a_dht_that_cannot_take_part_leaves_and_can_be_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Mock(spec=Peer)
    peer.spec = RunSpec()
    peer.take_seat.side_effect = RoundTimeout("no seat")
    monkeypatch.setattr(Peer, "join", lambda *args, **options: peer)
    dht = DHT()
    with pytest.raises(RoundTimeout):
        dht.run_in_background()
    assert peer.leave.call_count == 1
    with pytest.raises(UsageError, match="not started"):
        _ = dht.peer
    peer.spec = RunSpec(run=WITHOUT_ROUNDS)
    with pytest.raises(UsageError, match="no rounds of all"):
        DHT(start=True)


def test_a_dht_says_at_once_that_a_run_without_the_log_gives_no_seat() -> None:
    """It waited for `startup_timeout`, or for ever, and told nothing of the strategy."""
    with Peer.join(spec=RunSpec(run="pairs", strategy="gossip")) as peer:
        dht = DHT([peer.address])
        with pytest.raises(UsageError, match=r"no rounds of all: the run 'pairs' has strategy = \"gossip\""):
            dht.run_in_background()
        with pytest.raises(UsageError, match="not started"):
            _ = dht.peer
        with pytest.raises(UsageError, match="there are no seats: this peer takes part without the replicated log"):
            peer.take_seat()


def test_what_a_gradient_averager_is_given_reaches_its_round() -> None:
    peer, reduction = Mock(spec=Peer), Mock(spec=Reduction, done=False)
    peer.all_reduce.return_value = reduction
    reduction.wait.return_value = SimpleNamespace(contributors=[SimpleNamespace(peer="a"), SimpleNamespace(peer="b")])
    outer = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=1.0)
    averager = DiLoCoGradAverager(
        [nn.Parameter(torch.zeros(3))], outer, dht=peer, prefix="g", compression="int8", min_matchmaking_time=2.5,
        allreduce_timeout=7.5,
    )  # fmt: skip
    control = averager.step(wait=False)
    assert not isinstance(control, dict) and control.triggered and not control.done()
    (grads,), options = peer.all_reduce.call_args
    assert len(grads) == 1 and torch.equal(grads[0], torch.ones(3))
    assert options == {"name": "g/gradients", "codec": "int8", "patience_s": 2.5, "async_op": True}
    reduction.done = True
    assert control.done() and control.result().keys() == {"a", "b"}
    control.result(3.0)
    averager.step(timeout=4.0)
    scheduled = averager.schedule_step(timeout=5.0)
    averager.step(scheduled)
    assert reduction.wait.call_args_list == [call(7.5), call(3.0), call(4.0), call(5.0)]
    with pytest.raises(KeyError, match="auxiliary"):
        DiLoCoGradAverager([nn.Parameter(torch.zeros(3))], outer, dht=peer, prefix="g", auxiliary=True)


@pytest.mark.parametrize("late", [False, True])
def test_a_mean_that_is_decided_as_its_wait_ends_is_no_time_out(late: bool) -> None:
    """The gradients are the mean, though the caller was told that they are its own."""
    peer, reduction = Mock(spec=Peer), Mock(spec=Reduction, done=True)
    peer.all_reduce.return_value = reduction
    reduction.cancel.return_value = late
    reduction.wait.side_effect = [RoundTimeout("late"), SimpleNamespace(contributors=[SimpleNamespace(peer="a")])]
    outer = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=1.0)
    averager = DiLoCoGradAverager([nn.Parameter(torch.zeros(3))], outer, dht=peer, prefix="g")
    if late:
        with pytest.raises(RoundTimeout, match="late"):
            averager.step()
    else:
        assert averager.step() == {"a": None}


def test_an_outer_state_of_something_else_is_refused_and_nothing_is_changed() -> None:
    net = model()
    optimizer = made(net, LonePeer())
    train(net, optimizer, range(H))
    held = optimizer.state_averager.optimizer.state_dict()
    other_lr = copy.deepcopy(held)
    other_lr["param_groups"][0]["lr"] = 0.1
    with pytest.raises(UsageError, match="the swarm's by now"):
        optimizer.state_averager.optimizer.load_state_dict(other_lr)
    other_model = made(nn.Linear(4, 2), LonePeer())
    with pytest.raises(UsageError, match="it is of another model"):
        other_model.state_averager.optimizer.load_state_dict(held)
    assert other_model.state_averager.optimizer.param_groups[0]["lr"] == 0.7 and other_model.local_epoch == 0


def test_the_state_of_an_outer_adam_counts_its_steps_and_belongs_to_its_run() -> None:
    net, adam = model(), partial(torch.optim.Adam, lr=0.1, betas=(0.8, 0.9), eps=0.25)
    optimizer = made(net, LonePeer(), outer_optimizer=adam)
    train(net, optimizer, range(2 * H))
    held = optimizer.state_averager.optimizer.state_dict()
    assert [state["step"].item() for state in held["state"].values()] == [2.0] * 4
    assert held["param_groups"][0]["betas"] == (0.8, 0.9) and held["param_groups"][0]["eps"] == 0.25
    again = made(model(), LonePeer(), outer_optimizer=adam)
    with pytest.raises(UsageError, match="belongs to its run"):
        again.state_averager.optimizer.load_state_dict(held)


def test_the_tracker_times_inner_steps_without_their_rounds_and_tells_now_and_then() -> None:
    peer, now, own = LonePeer(), 0.0, Own(0, 0, 0)
    tracker = DiloCoProgressTracker(peer, "run", 5, 4, lambda: own, clock=lambda: now)
    tracker.stepped(0.0)
    now, own = 10.0, Own(0, 1, 5)
    tracker.stepped(8.0)
    now = 10.5
    tracker.stepped(0.0)
    assert [(said["speed"], said["eta_s"]) for said in peer.said] == [(0.0, None), (2.5, 3 * 2.0)]
    assert peer.said[-1]["status"] == {"opendiloco": ["run", 0, 5]}
    assert tracker.local_progress.samples_per_second == pytest.approx(5 / (0.9 * 2.0 + 0.1 * 0.5))


def test_the_tracker_counts_those_of_the_furthest_epoch_and_waits_for_the_slowest_of_them() -> None:
    peer = LonePeer()
    peer.known = [
        member("slow", speed=1.0, said=["run", 1, 10]),
        member("quick", speed=5.0, said=["run", 1, 15]),
        member("behind", speed=0.1, said=["run", 0, 0]),
        replace(member("left", said=["run", 9, 0]), left=True),
    ]
    seen = DiloCoProgressTracker(peer, "run", 5, 4, lambda: Own(1, 2, 10)).global_progress
    assert (seen.num_peers, seen.epoch, seen.samples_accumulated) == (4, 1, 10 + 10 + 15)
    assert seen.eta_next_epoch - seen.next_fetch_time == pytest.approx((20 - 10) / 1.0)


@pytest.mark.parametrize(("name", "codec"), CODECS.items())
def test_a_compression_of_hivemind_is_the_codec_that_comes_next(name: str, codec: str) -> None:
    bits = {"NoCompression": 32, "Float16Compression": 16, "ScaledFloat16Compression": 16}
    assert codec_of(type(name, (), {})()) == codec
    assert get_codec(codec).wire_bytes(1 << 16) < (1 << 16) * bits.get(name, 8) / 8 * 1.1 and codec != "topk"


def test_after_the_shutdown_steps_are_the_inner_optimizers_alone() -> None:
    net, peer = model(), LonePeer()
    optimizer = made(net, peer)
    train(net, optimizer, range(2))
    optimizer.load_state_from_peers()
    assert optimizer.tracker.local_progress.samples_accumulated == 0, "they are dropped"
    optimizer.shutdown()
    twin = copy.deepcopy(net)
    inner = ADAMW(twin.parameters())
    inner.load_state_dict(copy.deepcopy(optimizer.inner_optimizer.state_dict()))
    train(net, optimizer, range(2, 2 + 2 * H))
    train(twin, inner, range(2, 2 + 2 * H))
    assert not peer.vectors and torch.equal(flat(net), flat(twin)) and optimizer.local_epoch == 0
