"""`Optimizer` and what it is made of, over peers without sockets: the scenarios of Hivemind's optimizer tests."""

from __future__ import annotations

import copy
import math
import operator
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dlc.compat.hivemind import (
    DHT,
    DecentralizedAverager,
    Float16Compression,
    GradientAverager,
    GradScaler,
    NoCompression,
    Optimizer,
    ProgressTracker,
    RoleAdaptiveCompression,
    TrainingAverager,
    TrainingStateAverager,
)
from dlc.compat.hivemind.averaging.allreduce import AllreduceException
from dlc.compat.hivemind.averaging.control import StepControl
from dlc.compat.hivemind.optim import components, optimizer_state, state_averager
from dlc.compat.hivemind.optim.state_averager import LRSchedulerBase
from dlc.compat.hivemind.swarm import Outcome, Terms, key_of
from dlc.compat.hivemind.utils.serializer import MSGPackSerializer
from dlc.errors import DlcError, RoundTimeout, SwarmClosed, UsageError
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


class Net(nn.Linear):
    """What transformers.Trainer trains."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"loss": super().forward(x).square().mean()}


class NoOpScheduler(LRSchedulerBase):
    """As in Hivemind's ALBERT example: the schedule is the optimizer's own."""

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, epoch: int | None = None) -> None:
        self._last_lr = self.get_lr()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize("delayed", [False, True])
def test_trainer_takes_the_optimizer_and_goes_on_from_its_checkpoint(delayed: bool, tmp_path: Path) -> None:
    """The scheme of Hivemind's ALBERT example: `optimizers=` of transformers.Trainer."""
    pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate: pip install 'dlc[accelerate]'")
    from transformers import Trainer, TrainingArguments

    rows = [{"x": x} for x in torch.randn(64, 4, generator=torch.Generator().manual_seed(0))]
    seen: list[tuple[int, float, float]] = []
    saved: list[int] = []

    def remembered(state_dict: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        state = state_dict()
        saved.append(state["state"]["local_epoch"])
        return state

    for steps, resume in ((20, None), (40, True)):
        torch.manual_seed(0)
        net = Net(4, 1)
        opt = optimizer(
            Town(),
            net,
            batch_size_per_step=4,
            params=[{"params": [net.weight], "weight_decay": 0.1}, {"params": [net.bias], "weight_decay": 0.0}],
            scheduler=HALVING,
            delay_optimizer_step=delayed,
            delay_grad_averaging=delayed,
            averager_opts={"bandwidth": 100.0, "target_group_size": 256},
        )
        settings: dict[str, Any] = {"max_steps": steps, "save_steps": 20, "per_device_train_batch_size": 4}
        quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True}
        trainer = Trainer(
            model=net,
            args=TrainingArguments(str(tmp_path), **settings, **quiet),
            train_dataset=rows,  # type: ignore[arg-type]
            optimizers=(opt, NoOpScheduler(opt)),
        )
        if not resume:
            opt.state_dict = partial(remembered, opt.state_dict)  # type: ignore[method-assign]
        trainer.train(resume_from_checkpoint=resume)
        opt.state_averager.step(wait_for_delayed_updates=True)
        seen.append((opt.local_epoch, opt.param_groups[1]["lr"], loss_of_rows(net, rows)))
        opt.shutdown()
    per_epoch = TARGET // 4
    epoch = saved[-1]  # of checkpoint-20, the last that the first training wrote
    assert epoch == 20 // per_epoch or (delayed and epoch == 20 // per_epoch - 1), "the last one may be on its way"
    assert [epoch for epoch, _, _ in seen] == [20 // per_epoch, epoch + 20 // per_epoch]
    assert [lr for _, lr, _ in seen] == [pytest.approx(0.1 * 0.5**epoch) for epoch, _, _ in seen]
    assert seen[1][2] < seen[0][2]


def test_what_is_saved_during_a_delayed_step_is_of_the_epoch_whose_parameters_the_model_has() -> None:
    """A checkpoint had the model of the epoch before, and the number of the next: what that had learned was lost."""
    net, made = model(), threading.Event()
    opt = optimizer(Town(), net, batch_size_per_step=TARGET, delay_optimizer_step=True, delay_grad_averaging=True)
    step = opt.state_averager.optimizer.step

    def late(*args: Any) -> Any:
        assert made.wait(WAIT_S)
        return step(*args)

    opt.state_averager.optimizer.step = late  # type: ignore[method-assign]
    before = weights(net)
    ((x, y),) = batches(0, 1, TARGET)
    F.mse_loss(net(x), y).backward()
    opt.step()
    assert opt.local_epoch == 1 and torch.equal(weights(net), before)
    assert opt.state_dict()["state"]["local_epoch"] == 0
    made.set()
    opt.state_averager.wait_for_delayed_updates()
    assert opt.state_dict()["state"]["local_epoch"] == 0 and torch.equal(weights(net), before)
    opt.state_averager.step(wait_for_delayed_updates=True)
    assert opt.state_dict()["state"]["local_epoch"] == 1 and not torch.equal(weights(net), before)
    opt.shutdown()


def loss_of_rows(net: nn.Module, rows: list[dict[str, Tensor]]) -> float:
    with torch.no_grad():
        return float(net(torch.stack([row["x"] for row in rows]))["loss"])


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


def test_a_peer_whose_group_has_just_begun_does_not_take_its_epoch_for_one_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others of the group may be done with it before this peer looks again."""
    monkeypatch.setattr("dlc.compat.hivemind.optim.state_averager.LOOK_S", 0.0)
    opt = optimizer(Town(), model(), batch_size_per_step=4)
    control = StepControl(0.0, float("inf"), allow_retries=False, weight=1.0, number=0)

    def looked(epoch: int) -> bool:
        if control.began_allreduce:
            control.set_result({"a": None, "b": None})
        control.began_allreduce = True
        return True

    opt._missed = looked  # type: ignore[method-assign]
    assert opt._result(control, 0) == {"a": None, "b": None}


@pytest.mark.parametrize("background", [False, True])
def test_those_for_whom_an_average_fails_do_not_make_the_epoch_in_a_group_of_their_own(background: bool) -> None:
    """They met again, and made it with other gradients than who had succeeded: from then on models differed, unseen."""
    town = Town()
    delays = {"delay_optimizer_step": background, "delay_grad_averaging": background}
    nets, opts = prepared(town, 3, **delays)
    names = [str(opt.dht.peer_id) for opt in opts]
    fail = set(names[1:])

    def failing(peer: str) -> bool:
        fails = peer in fail
        fail.discard(peer)
        return fails

    town.failing = failing

    def train(i: int) -> None:
        backward(nets[i], i)
        opts[i].step()
        opts[i].zero_grad()
        opts[i].state_averager.step(wait_for_delayed_updates=True)

    together(train, 3)
    for i in (1, 2):
        assert opts[i]._out_of_step()
        train(i)
    assert [opt.local_epoch for opt in opts] == [1, 1, 1] and not fail
    assert torch.equal(weights(nets[0]), weights(nets[1])) and torch.equal(weights(nets[0]), weights(nets[2]))


def test_two_peers_that_begin_together_end_their_epochs_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though neither has heard yet that the other trains, and how far it is."""
    town = Town()
    nets = [model(), model()]
    opts = [optimizer(town, net, batch_size_per_step=TARGET, average_state_every=1000) for net in nets]
    for opt in opts:
        monkeypatch.setattr(opt.dht.swarm, "post", Mock())  # on its way
    for epoch in range(EPOCHS):
        for seed, (opt, net) in enumerate(zip(opts, nets, strict=True)):
            opt.zero_grad()
            backward(net, seed)
        together(lambda i: opts[i].step(), 2)
        assert [opt.local_epoch for opt in opts] == [epoch + 1] * 2
        assert torch.equal(weights(nets[0]), weights(nets[1]))
    assert [len(members) for _, members in town.rounds] == [2] * EPOCHS


@pytest.mark.parametrize("background", [False, True])
def test_a_peer_that_never_trains_is_waited_for_once(background: bool, caplog: pytest.LogCaptureFixture) -> None:
    town, net = Town(), model()
    opt = optimizer(
        town,
        net,
        batch_size_per_step=TARGET,
        average_state_every=1000,
        delay_grad_averaging=background,
        matchmaking_time=0.2,
    )
    watcher = optimizer(town, model(), batch_size_per_step=TARGET)
    start = weights(net)

    def step(seed: int) -> None:
        opt.zero_grad()
        backward(net, seed)
        opt.step()
        opt.state_averager.step(wait_for_delayed_updates=True)

    step(0)
    made = opt.local_epoch == 1 and not torch.equal(weights(net), start)
    assert made == background and f"{watcher.dht.peer_id[:8]} did not come" in caplog.text
    caplog.clear()
    for seed in range(1, 5):
        step(seed)
    assert opt.local_epoch >= 4 and not torch.equal(weights(net), start)
    assert "did not come" not in caplog.text and not town.rounds


def test_an_epoch_that_is_counted_is_in_the_model_though_nobody_came(caplog: pytest.LogCaptureFixture) -> None:
    """In the background the epoch ends before it is known that the other one never trains."""
    town, net, n = Town(), model(), 4
    options = {"batch_size_per_step": TARGET, "delay_grad_averaging": True, "matchmaking_time": 0.2}
    opt = optimizer(town, net, optimizer=partial(torch.optim.SGD, lr=1.0), **options)
    optimizer(town, model(), batch_size_per_step=TARGET)
    start = net.bias.item()
    for _ in range(n):
        opt.zero_grad()
        net(torch.ones(1, 5)).sum().backward()
        opt.step()
    opt.state_averager.step(wait_for_delayed_updates=True)
    assert opt.local_epoch == n and net.bias.item() == pytest.approx(start - n)
    assert caplog.text.count("no longer waited for") == 1


@pytest.mark.parametrize("slow", [False, True])
def test_who_is_heard_of_while_it_is_waited_for_is_not_gone_on_without(
    slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nobody has come before the step that began this has ended."""
    town, net = Town(), model()
    options = {"batch_size_per_step": TARGET, "delay_grad_averaging": True, "matchmaking_time": 0.2}
    opt = optimizer(town, net, **options)
    other = optimizer(town, model(), batch_size_per_step=TARGET)
    start = weights(net)

    def nobody_comes(*_: object) -> None:
        other.tracker.report_local_progress(0, 1)

    def update_epoch(epoch: int) -> int:
        if slow:
            opt.state_averager.wait_for_delayed_updates()
        return update(epoch)

    update = opt.tracker.update_epoch
    monkeypatch.setattr(opt.tracker, "update_epoch", update_epoch)
    monkeypatch.setattr(opt.dht.swarm, "average", nobody_comes)
    backward(net, 0)
    opt.step()
    opt.state_averager.step(wait_for_delayed_updates=True)
    assert torch.equal(weights(net), start)
    assert opt.state_averager.state_sharing_priority == 0.5, "whoever loads does not take what lacks an epoch"


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


@pytest.mark.parametrize("samples", [0, 8])
def test_who_has_missed_an_epoch_loads_the_state_of_those_who_made_it(
    samples: int, caplog: pytest.LogCaptureFixture
) -> None:
    """And says so where that costs work of its own."""
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
    newcomer.tracker.report_local_progress(0, samples)
    newcomer.step()
    assert newcomer.local_epoch == 1 and newcomer.local_progress.samples_accumulated == 0
    told = [message for message in caplog.messages if "is lost" in message]
    assert len(told) == (samples > 0) and all("was in epoch 0 and" in m and "(8 samples" in m for m in told)
    assert torch.equal(weights(late), weights(nets[0]))
    assert newcomer.opt.param_groups[0]["lr"] == pytest.approx(0.05)


def test_peers_that_load_at_the_same_time_end_with_the_state_of_the_eldest() -> None:
    town, n = Town(), 4
    nets = [nn.Linear(5, 1) for _ in range(n)]
    opts = [optimizer(town, net, batch_size_per_step=TARGET) for net in nets]
    eldest = weights(nets[0])
    together(lambda i: opts[i].load_state_from_peers(timeout=WAIT_S), n)
    assert all(torch.equal(weights(net), eldest) for net in nets)


def test_a_state_is_not_loaded_beside_the_steps_of_its_optimizer() -> None:
    """The future was taken for the state: sums were dropped, and the log told of one that had not come."""
    town, nets = Town(), [nn.Linear(5, 1) for _ in range(2)]
    opts = [optimizer(town, net, batch_size_per_step=TARGET // 2) for net in nets]
    backward(nets[1], 0)
    opts[1].step()
    with pytest.raises(UsageError, match="wait=False"):
        opts[1].load_state_from_peers(wait=False)
    assert opts[1].local_progress.samples_accumulated == TARGET // 2 and not opts[1].state_averager.entry.loading
    opts[1].load_state_from_peers(wait=True, timeout=WAIT_S)
    assert torch.equal(weights(nets[0]), weights(nets[1])) and not opts[1].local_progress.samples_accumulated


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


def test_who_lacks_a_step_that_others_have_made_gives_no_state() -> None:
    """A newcomer to whom the others did not answer took it for one of their epoch, and trained on with it, unseen."""
    town, fails = Town(), threading.Event()
    nets, opts = prepared(town, 2, delay_grad_averaging=True)
    bad, late, newest = opts[1].dht.peer_id, model(), opts[0].state_averager
    start, average = weights(late), opts[1].dht.swarm.average
    town.failing = lambda peer: peer == bad

    def fails_later(*of: Any) -> Any:
        try:
            return average(*of)
        finally:
            fails.wait(WAIT_S)

    assert opts[1].grad_averager is not None
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(opts[1].grad_averager, "step", partial(opts[1].grad_averager.step, allow_retries=False))
        patch.setattr(opts[1].dht.swarm, "average", fails_later)
        patch.setattr(newest, "get_current_state", Mock(side_effect=RoundTimeout("not now")))
        for opt, net in zip(opts, nets, strict=True):
            backward(net, 0)
            opt.step()
        assert [opt.local_epoch for opt in opts] == [1, 1], "counted already"
        wait_until(lambda: town.rounds, WAIT_S)
        newcomer = optimizer(town, late, batch_size_per_step=4)
        loading = pool.submit(newcomer.load_state_from_peers)
        asked = f"want/{key_of(newest.prefix)}/{bad}"
        wait_until(lambda: any(key == asked for _, key in town.posted), WAIT_S)
        fails.set()
        loading.result(WAIT_S)
        assert newcomer.local_epoch == 0 and torch.equal(weights(late), start)
    for opt in opts:
        opt.state_averager.step(wait_for_delayed_updates=True)
    assert not torch.equal(weights(nets[0]), weights(nets[1]))
    backward(late, 0)
    newcomer.step()  # the others have made the epoch, and give it now
    assert newcomer.local_epoch == 1 and torch.equal(weights(late), weights(nets[0]))
    opts[1].step()
    assert torch.equal(weights(nets[1]), weights(nets[0]))
    opts[1].state_averager.get_current_state()


def test_of_those_who_all_lack_a_step_the_eldest_gives_its_state() -> None:
    """Nobody has made it: the state is that of the epoch which is counted."""
    town, late = Town(), model()
    _, opts = prepared(town, 2, delay_grad_averaging=True)
    for opt in opts:
        opt.state_averager.local_epoch, opt.state_averager.lacks_step = 3, True
        opt._number_rounds()
    opts[0].state_averager.get_current_state()
    with pytest.raises(DlcError, match="lacks a step that others have made"):
        opts[1].state_averager.get_current_state()
    newcomer = optimizer(town, late, batch_size_per_step=4)
    newcomer.load_state_from_peers(timeout=WAIT_S)
    assert newcomer.local_epoch == 3
    for opt in opts:
        opt.load_state_from_peers(timeout=WAIT_S)
        assert not opt.state_averager.lacks_step and opt.local_epoch == 3


def test_who_goes_on_without_a_step_that_those_made_who_share_no_state_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    nets, opts = prepared(Town(), 2, delay_grad_averaging=True)
    opts[0].state_averager.allow_state_sharing = False
    for opt in opts:
        opt.state_averager.local_epoch = 1
        opt._number_rounds()
    assert opts[0].grad_averager is not None
    opts[0].grad_averager.announce(averaged=0)
    opts[1].state_averager.lacks_step = True
    backward(nets[1], 0)
    opts[1].step()
    assert not opts[1].state_averager.lacks_step
    assert f"lacks the step of epoch 0, and {opts[0].dht.peer_id[:8]}, who made it, share no state" in caplog.text


def failing_once(opt: Optimizer, monkeypatch: pytest.MonkeyPatch) -> None:
    step = opt.opt.step

    def fails(*args: Any) -> None:
        monkeypatch.setattr(opt.opt, "step", step)
        raise FloatingPointError("no step")

    monkeypatch.setattr(opt.opt, "step", fails)


def test_an_epoch_whose_step_fails_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    nets, opts = prepared(Town(), 2, offload_optimizer=False)
    failing_once(opts[1], monkeypatch)

    def first(i: int) -> None:
        backward(nets[i], i)
        if i:
            with pytest.raises(FloatingPointError):
                opts[i].step()
        else:
            opts[i].step()

    together(first, 2)
    assert [opt.local_epoch for opt in opts] == [1, 0] and opts[1].state_dict()["state"]["local_epoch"] == 0
    opts[1].step()  # the others have made it
    assert opts[1].local_epoch == 1 and torch.equal(weights(nets[0]), weights(nets[1]))


@pytest.mark.parametrize("local", [False, True])
def test_an_epoch_whose_average_of_the_state_is_interrupted_is_over(
    local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradients were in the next step once more, and its samples in the next epoch."""
    nets, opts = prepared(
        Town(), 2, average_state_every=1, delay_state_averaging=False, use_local_updates=local, offload_optimizer=False
    )

    both = threading.Barrier(2)

    def interrupted(*args: Any) -> None:
        both.wait(WAIT_S)  # or else the first would be known to have left it out
        raise KeyboardInterrupt

    for opt in opts:
        monkeypatch.setattr(opt.state_averager, "_average_state", interrupted)

    def train(i: int) -> None:
        backward(nets[i], i)
        with pytest.raises(KeyboardInterrupt):
            opts[i].step()

    together(train, 2)
    for opt in opts:
        progress = opt.local_progress
        assert (opt.local_epoch, progress.epoch, progress.samples_accumulated) == (1, 1, 0)
        assert opt.state_averager.entry.round == 2 and not opt.accumulates


def test_a_sum_whose_average_is_interrupted_is_not_unscaled_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lay there unscaled, with gradients to come that are not."""
    nets, opts = prepared(Town(), 2, reuse_grad_buffers=True)

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(opts[0], "_result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        scaled_step(GradScaler("cpu", init_scale=64.0), opts[0], nets[0], *batches(0, 1, TARGET))
    assert not opts[0].accumulates and opts[0].local_progress.samples_accumulated == 0
    assert all(p.grad is not None and not p.grad.any() for p in nets[0].parameters())
    for opt in opts:
        assert opt.grad_averager is not None
        opt.grad_averager.shutdown()


def test_who_made_no_step_in_the_background_gives_no_state_and_loads_that_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nets, opts = prepared(Town(), 2, delay_grad_averaging=True)
    failing_once(opts[0], monkeypatch)

    def first(i: int) -> None:
        backward(nets[i], i)
        opts[i].step()

    together(first, 2)
    for opt in opts:
        opt.state_averager.wait_for_delayed_updates()
    with pytest.raises(DlcError, match="lacks a step that others have made"):
        opts[0].state_averager.get_current_state()
    with pytest.raises(FloatingPointError):
        opts[0].step()
    opts[1].state_averager.step(wait_for_delayed_updates=True)
    opts[0].step()
    assert opts[0].local_epoch == 1 and torch.equal(weights(nets[0]), weights(nets[1]))
    assert not opts[0].state_averager.lacks_step


def test_who_tells_late_how_far_it_is_as_a_donor_does_not_take_back_that_it_lacks_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step fails in the background while the epoch is told of."""
    opt, lock = optimizer(Town(), model(), batch_size_per_step=TARGET), Watched()
    state, priority = opt.state_averager, TrainingStateAverager.state_sharing_priority

    def fail() -> None:
        state.lacks_step = True
        opt._tell_priority()

    def late(averager: TrainingStateAverager, told: float) -> None:
        if threading.current_thread() is not failing:
            failing.start()
            wait_until(lambda: len(lock.came) == 2 or not failing.is_alive(), WAIT_S, "it has failed")
        priority.fset(averager, told)  # type: ignore[attr-defined]

    failing = threading.Thread(target=fail)
    monkeypatch.setattr(opt, "_lock_priority", lock, raising=False)
    monkeypatch.setattr(TrainingStateAverager, "state_sharing_priority", priority.setter(late))  # type: ignore[attr-defined]
    state.local_epoch = 1
    opt._tell_priority()
    failing.join(WAIT_S)
    assert state.state_sharing_priority == state.entry.priority == 0.5


def test_an_auxiliary_peer_helps_and_trains_nothing() -> None:
    town = Town()
    nets, opts = prepared(town, 2)
    helper_net = model()
    helper = optimizer(town, helper_net, auxiliary=True, average_state_every=1000)
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


def test_an_auxiliary_peer_that_is_ahead_of_an_average_in_the_background_undoes_no_step() -> None:
    """Those who made the step took it for one who had made it without them, and each went its own way."""
    town = Town()
    nets, opts = prepared(town, 2, delay_grad_averaging=True)
    helper = optimizer(town, model(), auxiliary=True)
    assert helper.grad_averager is not None
    helper.grad_averager.announce(round=1, averaged=0)  # the trainers count the epoch before they have averaged

    def train(i: int) -> None:
        backward(nets[i], i)
        opts[i].step()
        opts[i].state_averager.step(wait_for_delayed_updates=True)

    together(train, 2)
    assert not any(opt.state_averager.lacks_step for opt in opts)
    assert not torch.equal(weights(nets[0]), weights(model())) and torch.equal(weights(nets[0]), weights(nets[1]))


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
    assert helper.local_epoch == 0
    wait_until(lambda: not any(town.waiting.values()), WAIT_S, "it looks for nobody any more")


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


SCHEDULES = {
    "steps": HALVING,
    "a function": partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda t: 1.0 / (t + 1)),
    "one cycle": partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=1.0, total_steps=20),
    "one after another": lambda opt: torch.optim.lr_scheduler.SequentialLR(
        opt, [HALVING(opt), torch.optim.lr_scheduler.ConstantLR(opt, 0.25)], milestones=[2]
    ),
    "at once": lambda opt: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.ConstantLR(opt, 0.25, 2), torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)]
    ),
    "with restarts": partial(torch.optim.lr_scheduler.CosineAnnealingWarmRestarts, T_0=3),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_schedule_goes_back_with_an_earlier_epoch_that_is_loaded(name: str) -> None:
    net = model()
    opt = optimizer(Town(), net, batch_size_per_step=TARGET, scheduler=SCHEDULES[name])

    def options() -> tuple[float, float]:
        return opt.opt.param_groups[0]["lr"], opt.opt.param_groups[0]["momentum"]

    def epochs(n: int) -> list[tuple[float, float]]:
        seen = []
        for seed in range(n):
            backward(net, seed)
            opt.step()
            opt.zero_grad()
            seen.append(options())
        return seen

    begin, first = options(), epochs(6)
    saved = copy.deepcopy(opt.state_dict())
    assert saved["state"]["local_epoch"] == 6
    rest = epochs(3)
    opt.load_state_dict(saved)
    assert opt.local_epoch == 6 and options() == first[-1] and epochs(3) == rest
    for epoch, (lr, momentum) in ((2, first[1]), (0, begin)):
        saved["state"]["local_epoch"] = epoch
        saved["param_groups"][0].update(lr=lr, momentum=momentum)
        opt.load_state_dict(saved)
        assert options() == (lr, momentum) and epochs(6 - epoch) == first[epoch:]


def test_a_schedule_that_cannot_follow_the_epochs_is_refused() -> None:
    class Uncounted(LRSchedulerBase):
        def step(self, epoch: int | None = None) -> None:
            self.optimizer.param_groups[0]["lr"] *= 0.5

    with pytest.raises(UsageError, match="ReduceLROnPlateau a metric: step it yourself"):
        optimizer(Town(), model(), scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)
    net = model()
    opt = optimizer(Town(), net, batch_size_per_step=TARGET, scheduler=Uncounted)
    backward(net, 0)
    with pytest.raises(UsageError, match="Uncounted does not count its steps"):
        for _ in range(3):
            opt.step()
    opt.shutdown()


@pytest.mark.parametrize("on_its_way", ["an average of the state", "a step"])
def test_a_model_that_is_loaded_while_an_update_is_on_its_way_is_what_is_trained_on(
    on_its_way: str, caplog: pytest.LogCaptureFixture
) -> None:
    town, n = Town(), 2 if "average" in on_its_way else 1
    nets, opts = prepared(town, n, average_state_every=1, delay_grad_averaging=n == 1)
    for net in nets:
        backward(net, 0)
    together(lambda i: opts[i].step(), n)
    net, opt = nets[0], opts[0]
    wait_until(lambda: not opt.state_averager.busy, WAIT_S)
    assert opt.local_epoch == 1
    loaded = torch.full((6,), 100.0)
    net.load_state_dict({name: torch.full_like(value, 100.0) for name, value in net.state_dict().items()})
    other = nn.Linear(5, 1)
    newcomer = optimizer(town, other, batch_size_per_step=TARGET)
    newcomer.state_averager.load_state_from_peers(timeout=WAIT_S)
    newcomer.shutdown()
    opt.zero_grad()
    backward(net, 1)
    opt.step(batch_size=1)
    assert torch.equal(weights(net), loaded) and "what it changed stays" in caplog.text
    assert torch.equal(torch.cat([p.detach().flatten() for p in opt.state_averager.parts.optimized]), loaded)
    assert n > 1 or torch.equal(weights(other), loaded), "a donor gives what was loaded"


def test_what_the_program_did_not_load_takes_the_update_that_was_on_its_way() -> None:
    net, expected = model(), model()
    opt = optimizer(Town(), net, batch_size_per_step=TARGET, delay_grad_averaging=True)
    backward(net, 0)
    backward(expected, 0)
    opt.step()
    SGD(expected.parameters()).step()
    with torch.no_grad():
        net.bias.fill_(100.0)
    opt.zero_grad()
    opt.step(batch_size=1)
    assert torch.equal(net.weight, expected.weight) and net.bias.item() == 100.0


@pytest.mark.parametrize("limit", [1e3, 1.0])
def test_a_limit_that_the_program_keeps_undoes_no_step(limit: float) -> None:
    """Whether it changes no value, or some: what it did not change takes the step, beside what it did."""
    net, n = model(), 4
    opt = optimizer(
        Town(),
        net,
        batch_size_per_step=TARGET,
        optimizer=partial(torch.optim.SGD, lr=1.0),
        delay_optimizer_step=True,
    )
    start, slopes = weights(net), torch.tensor([1.0, -1.0, 0.25, 0.0, -0.25, 0.125])
    expected = start.clone()
    for _ in range(n):
        opt.zero_grad()
        (net(slopes[:5].expand(1, 5)) + (slopes[5] - 1.0) * net.bias).sum().backward()
        opt.step()  # its change comes with the next one
        with torch.no_grad():
            for param in net.parameters():
                param.clamp_(-limit, limit)
    opt.state_averager.step(wait_for_delayed_updates=True)
    for _ in range(n):
        expected = (expected - slopes).clamp(-limit, limit)
    assert opt.local_epoch == n and torch.allclose(weights(net).clamp(-limit, limit), expected, atol=1e-6)


def test_steps_below_the_resolution_of_the_model_add_up_though_the_program_writes_to_it() -> None:
    net = model().bfloat16()
    with torch.no_grad():
        net.bias.fill_(1.0)
    opt = optimizer(Town(), net, batch_size_per_step=TARGET, optimizer=partial(torch.optim.SGD, lr=1e-3))
    for _ in range(8):
        opt.zero_grad()
        net.bias.sum().backward()
        opt.step()
        with torch.no_grad():
            net.bias.clamp_(-2.0, 2.0)
    assert net.bias.item() == 1.0 - 2**-7


def test_a_checkpoint_of_what_the_model_still_shows_is_gone_back_to() -> None:
    net = model()
    opt = optimizer(Town(), net, batch_size_per_step=TARGET, delay_optimizer_step=True)
    held, saved, start = copy.deepcopy(net.state_dict()), copy.deepcopy(opt.state_dict()), weights(net)
    backward(net, 0)
    opt.step()  # in the background
    net.load_state_dict(held)
    opt.load_state_dict(saved)
    opt.step(batch_size=1)
    assert opt.local_epoch == 0 and torch.equal(weights(net), start)


def test_a_mean_is_taken_over_but_where_the_program_has_changed_the_model_meanwhile() -> None:
    town, n = Town(), 2
    nets, opts = prepared(town, n, average_state_every=1, optimizer=partial(torch.optim.SGD, lr=0.0))
    with torch.no_grad():
        nets[1].weight.add_(2.0)
    for net in nets:
        backward(net, 0)
    middle = weights(nets[0]) + torch.tensor([1.0] * 5 + [0.0])
    together(lambda i: opts[i].step(), n)
    with torch.no_grad():
        for net in nets:
            net.weight.mul_(1.0)
        nets[0].weight[0, 0] = 7.0
    for opt in opts:
        opt.state_averager.step(wait_for_delayed_updates=True)
    torch.testing.assert_close(weights(nets[1]), middle)
    middle[0] = 7.0
    torch.testing.assert_close(weights(nets[0]), middle)


def average_that_waits(monkeypatch: pytest.MonkeyPatch, peer: Any) -> tuple[threading.Event, threading.Event]:
    """(it has begun, let it end) of each average of this peer, whose mean is -7 everywhere."""
    began, on, name = threading.Event(), threading.Event(), peer.dht.swarm.id

    def average(key: str, parts: list[tuple[Tensor, str]], terms: Terms) -> Outcome:
        began.set()
        assert on.wait(WAIT_S)
        parts[:] = [(torch.full_like(vector, -7.0), codec) for vector, codec in parts]
        return Outcome((name,), {name: terms.data}, {}, None)

    monkeypatch.setattr(peer.dht.swarm, "average", average)
    return began, on


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("how", ["a checkpoint", "the state of a peer"])
def test_what_was_loaded_is_not_overwritten_by_an_average_that_was_on_its_way(
    how: str, offload: bool, local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The average began before, and ends after."""
    town, net = Town(), model()
    options = {"batch_size_per_step": TARGET, "offload_optimizer": offload, "use_local_updates": local}
    opt = optimizer(town, net, **options)
    donor_net = nn.Linear(5, 1)
    donor = optimizer(town, donor_net, **options)
    donor.state_averager.local_epoch = 3

    began, on = average_that_waits(monkeypatch, opt)
    state = opt.state_averager
    state.step(increment_epoch=True, averaging_round=True, delay_averaging=True)
    assert began.wait(WAIT_S)
    if how == "a checkpoint":
        net.load_state_dict(donor_net.state_dict())
        saved = donor.state_dict()
        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(opt.load_state_dict, saved)  # it waits for the average
            on.set()
            loading.result(WAIT_S)
    else:
        assert state.load_state_from_peers(timeout=WAIT_S) is not None
        on.set()
    state.step(wait_for_delayed_updates=True)
    assert torch.equal(weights(net), weights(donor_net)) and opt.local_epoch == 3
    assert all(map(torch.equal, state.parts.optimized, donor.state_averager.parts.optimized))


@pytest.mark.parametrize("clamped", [False, True])
def test_a_model_that_is_loaded_alone_beside_an_average_stays_and_the_mean_is_for_what_was_not(
    clamped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is offloaded, so that it is the model itself that is averaged. To write what is there changes nothing."""
    net, extra = model(), torch.zeros(2)
    opt = optimizer(Town(), net, batch_size_per_step=TARGET, offload_optimizer=False, extra_tensors=[extra])

    began, on = average_that_waits(monkeypatch, opt)
    opt.state_averager.step(averaging_round=True, delay_averaging=True)
    assert began.wait(WAIT_S)
    if clamped:
        with torch.no_grad():
            net.weight.clamp_(-1e3, 1e3)
    else:
        net.load_state_dict({"weight": torch.full((1, 5), 100.0), "bias": net.bias.detach().clone()})
    extra.add_(1.0)  # as a forward pass does with those of a batch norm
    on.set()
    opt.state_averager.step(wait_for_delayed_updates=True)
    assert net.weight.tolist() == [[-7.0 if clamped else 100.0] * 5]
    assert net.bias.item() == -7.0 and extra.tolist() == [-7.0] * 2


class Watched:
    """A lock, and how many have come to it."""

    def __init__(self) -> None:
        self.lock, self.came = threading.Lock(), list[str]()

    def __enter__(self) -> None:
        self.came.append(threading.current_thread().name)
        self.lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self.lock.release()


def test_what_a_training_averager_has_loaded_is_not_overwritten_by_a_step_that_was_on_its_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    town, nets, lock = Town(), [model(), nn.Linear(5, 1)], Watched()
    options = {"average_parameters": True, "average_gradients": False, "prefix": "t", "start": True}
    first, _ = (TrainingAverager(SGD(net.parameters()), dht=dht(town), **options) for net in nets)
    began, on = average_that_waits(monkeypatch, first)
    monkeypatch.setattr(first, "lock_averager_step", lock)
    step = first.step(wait=False)
    assert began.wait(WAIT_S)
    loading = first.load_state_from_peers(wait=False, timeout=WAIT_S)
    wait_until(lambda: loading.done() or len(lock.came) == 2, WAIT_S, "what was fetched is taken over, or waits")
    on.set()
    assert loading.result(WAIT_S) is not None and len(step.result(WAIT_S)) == 1
    assert torch.equal(weights(nets[0]), weights(nets[1]))


def test_peers_that_make_no_step_while_they_average_have_the_mean_in_the_same_bits() -> None:
    """By the delta rule: 1e8 + (4 - 1e8) is 0 in fp32, and models of bf16 differed by a bit here and there."""
    town, values = Town(), (1e8, 8 - 1e8)
    params = [nn.Parameter(torch.tensor([value])) for value in values]
    states = [
        TrainingStateAverager(dht=dht(town), optimizer=SGD, params=[param], prefix="state", start=True,
                              delta_rule_averaging=True, target_group_size=2, min_matchmaking_time=WAIT_S)
        for param in params
    ]  # fmt: skip
    for state in states:
        state.step(averaging_round=True, delay_averaging=True)
    for state in states:
        state.step(wait_for_delayed_updates=True)
    assert [param.item() for param in params] == [4.0, 4.0]


def test_a_local_step_beside_an_average_is_not_undone_by_a_write_that_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net, expected, on = model(), model(), threading.Event()
    opt = optimizer(
        Town(), net, batch_size_per_step=TARGET, use_local_updates=True, offload_optimizer=True, scheduler=None
    )
    monkeypatch.setattr(opt.dht.swarm, "average", lambda *_: on.wait(WAIT_S) and None)
    state, alone = opt.state_averager, SGD(expected.parameters())
    state.step(averaging_round=True, delay_averaging=True, averaging_opts={"allow_retries": False})
    try:
        for one in (net, expected):
            backward(one, 0)
        with torch.no_grad():
            net.weight.mul_(1.0)
        state.step(optimizer_step=True)
        alone.step()
        assert state.averaging_in_progress and torch.equal(weights(net), weights(expected))
    finally:
        on.set()
        opt.shutdown()


def test_who_ends_an_epoch_that_the_others_have_averaged_does_not_wait_for_them() -> None:
    """A newcomer, one epoch behind, waited as long as matchmaking takes for those who had gone on."""
    town = Town()
    options = {"use_local_updates": True, "delay_state_averaging": False, "matchmaking_time": FOREVER_S}
    nets = [model() for _ in range(2)]
    first = optimizer(town, nets[0], batch_size_per_step=TARGET, **options)
    backward(nets[0], 0)
    first.step()
    late = optimizer(town, nets[1], batch_size_per_step=TARGET, **options)
    assert (first.local_epoch, late.local_epoch) == (1, 0)
    backward(nets[1], 1)
    together(lambda _: late.step(), 1)
    assert late.local_epoch == 1
    for net in nets:
        backward(net, 2)
    together(lambda i: (first, late)[i].step(), 2)
    assert [key.rpartition("/")[2] for key, _ in town.rounds] == ["2"]
    assert first.local_epoch == late.local_epoch == 2 and torch.equal(weights(nets[0]), weights(nets[1]))


def test_who_waits_for_an_average_that_the_others_have_made_waits_no_longer(caplog: pytest.LogCaptureFixture) -> None:
    """Their group had formed before this peer came; it waited on, as long as matchmaking takes."""
    town = Town()
    options = {"use_local_updates": True, "delay_state_averaging": False, "matchmaking_time": FOREVER_S}
    first, net = optimizer(town, model(), batch_size_per_step=TARGET, **options), model()
    late = optimizer(town, net, batch_size_per_step=TARGET, **options)
    first.tracker.report_local_progress(0, 1)
    backward(net, 1)
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(late.step)
        wait_until(lambda: any(town.waiting.values()), WAIT_S)
        first.state_averager.announce(round=2)
        step.result(WAIT_S)
    assert late.local_epoch == 1 and "round 1 was made without this peer" in caplog.text


@pytest.mark.parametrize("offload", [False, True])
def test_an_option_that_is_set_in_its_groups_counts(offload: bool) -> None:
    """By the program, or a schedule of its own: Hivemind's groups are copies, and what is set there is lost, unsaid."""
    net, twin = model(), model()
    opt = optimizer(Town(), net, batch_size_per_step=TARGET, offload_optimizer=offload, optimizer=partial(SGD, lr=9.0))
    opt.param_groups[0]["lr"] = 0.1
    opt.param_groups[0].update(momentum=0.5)
    copied = copy.deepcopy(opt.param_groups[0])
    copied["lr"] = 7.0
    assert type(copied) is dict
    ref = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.5)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (opt, ref)]
    for seed in range(3):
        for each, trained in ((opt, net), (ref, twin)):
            each.zero_grad()
            backward(trained, seed)
            each.step()
        for schedule in schedules:
            schedule.step()
    torch.testing.assert_close(weights(net), weights(twin))
    assert opt.param_groups[0]["lr"] == opt.opt.param_groups[0]["lr"] == pytest.approx(0.0125)
    assert (
        opt.param_groups[0]["params"][0] is net.weight
        and (opt.opt.param_groups[0]["params"][0] is net.weight) != offload
    )


def test_with_local_updates_nothing_is_offloaded_unless_that_is_asked_for() -> None:
    town, net = Town(), model()
    assert not optimizer(town, net, use_local_updates=True).offload_optimizer
    assert optimizer(town, net, use_local_updates=True, offload_optimizer=True).offload_optimizer
    assert optimizer(town, net, use_local_updates=True, delay_optimizer_step=True).offload_optimizer
    assert optimizer(town, net).offload_optimizer


@pytest.mark.parametrize(("make", "said"), [(torch.optim.LBFGS, "closure"), (torch.optim.SparseAdam, "dense")])
def test_an_optimizer_that_cannot_step_by_averages_is_refused_by_its_name(make: Any, said: str) -> None:
    town, net = Town(), model()
    start = weights(net)
    for options in ({}, {"use_local_updates": True}):
        with pytest.raises(UsageError, match=f"{make.__name__}.*{said}.*such as Adam"):
            optimizer(town, net, optimizer=make, batch_size_per_step=4, **options)
    assert torch.equal(weights(net), start) and all(p.grad is None for p in net.parameters())


def test_where_the_statistics_find_no_memory_that_is_what_is_told() -> None:
    class Full(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    with pytest.raises(torch.OutOfMemoryError, match="2 GiB"):
        optimizer(Town(), model(), optimizer=partial(Full, lr=0.1), batch_size_per_step=4)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"grad_compression": Float16Compression}, UsageError, r"Float16Compression\(\)"),
        ({"state_averaging_compression": "fp16"}, UsageError, "hivemind.compression"),
        ({"load_state_compression": object()}, UsageError, "state_compression is <object"),
        ({"extra_tensors": [torch.zeros(2, dtype=torch.complex64)]}, UsageError, "view_as_real"),
        ({"grad_averager_factory": lambda *_, **__: operator.truediv(1, 0)}, ZeroDivisionError, "zero"),
    ],
)
def test_an_optimizer_that_is_refused_is_no_peer_of_the_run(
    options: dict[str, Any], error: type[Exception], said: str
) -> None:
    """Others waited for it, and loaded its state."""
    town = Town()
    with pytest.raises(error, match=said):
        optimizer(town, model(), batch_size_per_step=4, **options)
    assert not town.posted


def test_a_group_may_hold_its_parameters_as_torch_takes_them() -> None:
    """Of a group of one parameter the rows were taken, which get no gradients: it was never trained."""
    net = model()
    groups = [{"params": net.weight}, {"params": (p for p in [net.bias])}]
    opt = optimizer(Town(), net, params=groups, batch_size_per_step=TARGET)
    before = [p.detach().clone() for p in net.parameters()]
    backward(net, 0)
    opt.step()
    assert not any(torch.equal(p, was) for p, was in zip(net.parameters(), before, strict=True))
    with pytest.raises(UsageError, match="one tensor"):
        optimizer(Town(), net, params=net.weight)


def test_an_optimizer_that_is_not_made_of_what_it_is_given_is_refused() -> None:
    """Offloaded, it stepped the model, which was then set from copies that nobody had stepped."""
    net = model()
    with pytest.raises(UsageError, match="holds other parameters"):
        optimizer(Town(), net, optimizer=lambda params: SGD(net.parameters()))


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
        ({"average_state_every": 1.5}, "average_state_every"),
        ({"batch_size_per_step": 0}, "batch_size_per_step"),
        ({"batch_size_per_step": 8.0}, "batch_size_per_step"),  # others would not count its samples
        ({"target_batch_size": "32"}, "target_batch_size"),
        ({"target_batch_size": 32.5}, "target_batch_size"),
        ({"matchmaking_time": math.nan}, "matchmaking_time"),
        ({"load_state_timeout": "60"}, "load_state_timeout"),
        ({"run_id": None}, "run_id"),
        ({"average_opt_statistics": ("exp_avg",)}, "'exp_avg', which SGD keeps as no tensor; it has: none"),
        ({"optimizer": torch.optim.Adam, "average_opt_statistics": ("exp",)}, "it has: step, exp_avg, exp_avg_sq"),
    ):
        with pytest.raises(UsageError, match=text):
            optimizer(town, net, **options)
    opt = optimizer(town, net, reuse_grad_buffers=True)
    with pytest.raises(UsageError, match="batch_size_per_step"):
        opt.step()
    with pytest.raises(UsageError, match="batch_size is 0"):
        opt.step(batch_size=0)
    for wrong in (-1, 2.5, math.nan, "8"):
        with pytest.raises(UsageError, match="batch_size is .* a whole number"):
            opt.step(batch_size=wrong)  # type: ignore[arg-type]
    assert opt.local_progress.samples_accumulated == 0
    with pytest.raises(UsageError, match="dht is NoneType"):
        Optimizer(dht=None, run_id="run", target_batch_size=1, optimizer=made)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="zeroed"):
        opt.zero_grad()
    with pytest.raises(UsageError, match="groups"):
        opt.add_param_group({})
    with pytest.raises(UsageError, match="GradScaler"):
        opt.step(batch_size=1, grad_scaler=object())  # type: ignore[arg-type]
    ready = optimizer(Town(), net, optimizer=made, params=None, batch_size_per_step=TARGET)
    assert ready.opt is made and not ready.offload_optimizer


def test_who_was_shut_down_trains_no_further() -> None:
    """Alone, and seen by nobody: it did so where no other peer was known to train."""
    net = model()
    opt = optimizer(Town(), net, batch_size_per_step=TARGET)
    opt.shutdown()
    with pytest.raises(UsageError, match="this optimizer was shut down"):
        opt.step()
    assert torch.equal(weights(net), weights(model())) and opt.local_epoch == 0


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


SCALED: dict[str, Any] = {"reuse_grad_buffers": True, "delay_optimizer_step": True, "delay_grad_averaging": True}


def scaled_step(scaler: GradScaler, opt: Optimizer, net: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    scaler.scale(F.mse_loss(net(batch[0]), batch[1])).backward()
    scaler.step(opt)
    scaler.update()


@pytest.mark.parametrize("options", [{"reuse_grad_buffers": True}, {"use_local_updates": True}])
def test_a_scaler_that_is_not_enabled_does_nothing(options: dict[str, Any]) -> None:
    """As torch's, which programs make with enabled=amp; it was an AttributeError."""
    nets = [model(), model()]
    opts = [optimizer(Town(), net, batch_size_per_step=16, **options) for net in nets]
    scaler = GradScaler("cpu", enabled=False)
    for x, y in batches(0, 4, 16):
        for net, opt in zip(nets, opts, strict=True):
            scaler.scale(F.mse_loss(net(x), y)).backward()
            if opt is opts[0]:
                scaler.unscale_(opt)
                scaler.step(opt)
                scaler.update()
            else:
                opt.step()
            if opt.use_local_updates:
                opt.zero_grad()
    assert opts[0].local_epoch == 2 and torch.equal(weights(nets[0]), weights(nets[1]))


def test_a_scaled_step_that_waits_for_one_in_the_background_lets_it_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scaler held its lock meanwhile, which the step in the background needed: both waited for ever."""
    nets, opts = prepared(Town(), 2, **SCALED)
    scalers = [GradScaler("cpu", init_scale=64.0) for _ in range(2)]
    waits, state = threading.Event(), opts[0].state_averager
    wait_for = state.wait_for_delayed_updates

    def waiting() -> None:
        waits.set()
        wait_for()

    def train(i: int) -> None:
        for seed in (i, i + 2):
            scaled_step(scalers[i], opts[i], nets[i], *batches(seed, 1, TARGET))

    first = threading.Thread(target=train, args=(0,), daemon=True)
    monkeypatch.setattr(state, "wait_for_delayed_updates", waiting)
    first.start()
    assert waits.wait(WAIT_S) and first.is_alive(), "for the average of an epoch to which the other has not come"
    train(1)
    first.join(WAIT_S)
    assert not first.is_alive()
    for opt in opts:
        opt.state_averager.step(wait_for_delayed_updates=True)
    assert [opt.local_epoch for opt in opts] == [2, 2] and torch.equal(weights(nets[0]), weights(nets[1]))


def test_a_sum_has_one_scale_though_a_step_in_the_background_ends_while_it_grows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net, alone, updated, in_background = model(), model(), threading.Event(), state_averager.in_background

    def late(work: Callable[[], None], name: str) -> Any:
        return in_background(lambda: work() if updated.wait(WAIT_S) else None, name)

    monkeypatch.setattr(state_averager, "in_background", late)
    opt = optimizer(Town(), net, batch_size_per_step=16, **SCALED)
    scaler, plain = GradScaler("cpu", init_scale=64.0, growth_interval=1), SGD(alone.parameters())
    data, scales, made = batches(0, 6, 16), [], []
    for batch in data:
        updated.clear()
        scaled_step(scaler, opt, net, batch)
        updated.set()
        made.append(weights(net))
        opt.state_averager.wait_for_delayed_updates()  # so the next call finds it done
        scales.append(scaler.get_scale())
    assert scales[:5] == [64.0, 64.0, 64.0, 128.0, 128.0], "it grows for a step when the next epoch ends"
    for i in (0, 2, 4):
        plain.zero_grad()
        for j, (x, y) in enumerate(data[i : i + 2]):
            with torch.no_grad():
                seen = alone if i + j == 0 else copy.deepcopy(alone)
                nn.utils.vector_to_parameters(made[i + j - 1] if i + j else weights(alone), seen.parameters())
            loss = F.mse_loss(seen(x), y) / 2
            for param, grad in zip(alone.parameters(), torch.autograd.grad(loss, list(seen.parameters())), strict=True):
                param.grad = grad if param.grad is None else param.grad + grad
        plain.step()
    opt.state_averager.step(wait_for_delayed_updates=True)
    torch.testing.assert_close(weights(net), weights(alone), rtol=1e-5, atol=1e-6)


def test_an_overflow_of_one_local_step_is_not_taken_for_that_of_the_one_in_the_background(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step before used up what was found of this one, which then made every parameter NaN."""
    net, begins = model(), threading.Event()
    opt = optimizer(Town(), net, batch_size_per_step=1, use_local_updates=True, delay_optimizer_step=True)
    scaler, state, start = GradScaler("cpu", init_scale=64.0), opt.state_averager, weights(net)
    wait_for, in_background = state.wait_for_delayed_updates, state_averager.in_background

    def waiting() -> None:
        if state.busy:
            begins.set()
        wait_for()

    def late(work: Callable[[], None], name: str) -> Any:
        return in_background(lambda: work() if begins.wait(WAIT_S) else None, name)

    monkeypatch.setattr(state, "wait_for_delayed_updates", waiting)
    monkeypatch.setattr(state_averager, "in_background", late)
    ((x, y),) = batches(0, 1, 1)
    for factor in (1.0, float("inf")):
        opt.zero_grad()
        scaler.scale(F.mse_loss(net(x), y) * factor).backward()
        scaler.step(opt)
        scaler.update()
    state.step(wait_for_delayed_updates=True)
    assert weights(net).isfinite().all() and not torch.equal(weights(net), start)


def test_a_scaler_is_updated_after_a_step_that_only_loaded_a_state() -> None:
    town, net = Town(), model()
    opt = optimizer(town, net, batch_size_per_step=TARGET, **SCALED)
    scaler, batch = GradScaler("cpu", init_scale=64.0), batches(0, 1, TARGET)[0]
    scaled_step(scaler, opt, net, batch)
    opt.state_averager.wait_for_delayed_updates()
    other = optimizer(town, model(), batch_size_per_step=TARGET)
    other.tracker.report_local_progress(9, 1)
    scaled_step(scaler, opt, net, batch)
    assert opt.local_progress.samples_accumulated == 0 and scaler.get_scale() == 64.0


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


def test_a_group_is_looked_for_when_the_gradients_are_there() -> None:
    """A large model takes its time to copy them: longer than matchmaking may take, and no step would ever be made."""
    order: list[str] = []

    class Watched(GradientAverager):
        def schedule_step(self, *args: Any, **kwargs: Any) -> Any:
            order.append("look for a group")
            return super().schedule_step(*args, **kwargs)

        def load_accumulators_into_averager_(self) -> None:
            order.append("copy")
            super().load_accumulators_into_averager_()

    net = nn.Linear(2, 1)
    averager = Watched(net.parameters(), dht=dht(Town()), prefix="g", start=True, min_matchmaking_time=FOREVER_S)
    net(torch.ones(1, 2)).sum().backward()
    averager.accumulate_grads_(batch_size=1)
    averager.step(wait=False)
    assert order == ["copy", "look for a group"]


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("given", [False, True])
def test_a_weight_that_no_mean_can_have_is_refused_before_anything_is_begun(
    given: bool, weight: float, caplog: pytest.LogCaptureFixture
) -> None:
    """A step that nobody would ever trigger stayed, and the sums were taken for used."""
    net = nn.Linear(2, 1)
    averager = GradientAverager(
        net.parameters(), dht=dht(Town()), prefix="g", start=True, min_matchmaking_time=FOREVER_S
    )
    net(torch.ones(1, 2)).sum().backward()
    averager.accumulate_grads_(batch_size=1)
    control = averager.schedule_step() if given else None
    with pytest.raises(ValueError, match="weight"):
        averager.step(weight=weight, control=control)
    assert averager._steps == ({control} if given else set())
    assert averager.local_samples_accumulated == 1 and (control is None or not control.triggered)
    averager.accumulate_grads_(batch_size=1)
    averager.step(control=control, wait=False)
    assert not caplog.text


def test_who_goes_on_at_once_after_an_average_that_failed_is_not_told_to_reset_its_sums(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They were taken for used, and averages for there, as long as the thread of that step was not done with it."""
    on = threading.Event()

    class Slow(GradientAverager):
        def schedule_step(self, *args: Any, **kwargs: Any) -> StepControl:
            control = super().schedule_step(*args, **kwargs)
            control.add_done_callback(lambda _: on.wait(WAIT_S))
            return control

    peer = Slow([nn.Parameter(torch.zeros(1))], dht=dht(Town()), prefix="g", start=True, min_matchmaking_time=0.1)
    for _ in range(2):
        peer.accumulate_grads_(batch_size=1)
        control = peer.step(reset_accumulators=False, allow_retries=False, wait=False)
        assert isinstance(control.exception(WAIT_S), DlcError)
    on.set()
    assert "reset_accumulated_grads_" not in caplog.text and "not used" not in caplog.text


def until_given_up(key: str, parts: Any, terms: Terms) -> None:
    """An average that finds nobody, and finds that out late."""
    over = threading.Event()
    terms.when_given_up(over.set)
    assert over.wait(WAIT_S)


def test_a_step_without_a_mean_in_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It went on, with a TimeoutError for its caller, and its mean would have come into the gradients of the next."""
    peer = GradientAverager([nn.Parameter(torch.zeros(1))], dht=dht(Town()), prefix="g", start=True)
    monkeypatch.setattr(peer.dht.swarm, "average", until_given_up)
    peer.accumulate_grads_(batch_size=1)
    with pytest.raises(AllreduceException, match=r"no mean within 0\.1 s"):
        peer.step(timeout=0.1)
    assert peer._last is not None and peer._last.cancelled()
    control = peer.schedule_step()
    with pytest.raises(TimeoutError):
        peer.step(control=control, timeout=0.1)
    assert not control.done(), "whoever has it can wait again"
    control.cancel()


def test_an_average_of_the_state_that_is_interrupted_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mean came into what the next one averaged."""
    controls: list[StepControl] = []

    def interrupted(control: StepControl, timeout: float | None = None) -> None:
        controls.append(control)
        raise KeyboardInterrupt

    state = TrainingStateAverager(
        dht=dht(Town()), optimizer=SGD, params=model().parameters(), prefix="state", start=True, min_group_size=2
    )
    monkeypatch.setattr(state.dht.swarm, "average", until_given_up)
    monkeypatch.setattr(StepControl, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        state.step(averaging_round=True)
    assert [control.cancelled() for control in controls] == [True]
    state.shutdown()


def test_an_offloaded_optimizer_leaves_out_what_a_batch_did_not_use() -> None:
    used, other = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    parts = components.build(lambda p: torch.optim.SGD(p, lr=1.0), [used, other], None, None, True)
    for batch in range(3):
        used.grad, other.grad = torch.ones(1), torch.ones(1) if batch == 0 else None
        parts.load_gradients()
        parts.optimizer.step()
        parts.apply()
    assert (used.item(), other.item()) == (-3.0, -1.0)


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


@pytest.mark.parametrize("loaded", [False, True])
def test_the_epoch_of_a_group_comes_with_its_mean(loaded: bool) -> None:
    """It was counted before: a state given meanwhile had the parameters of before, and who loaded another one meanwhile
    took the epoch without the mean."""
    town, nets = Town(), [nn.Linear(2, 3) for _ in range(3)]
    first, second, donor = (
        TrainingStateAverager(
            dht=dht(town),
            params=net.parameters(),
            optimizer=SGD,
            sync_epoch_when_averaging=True,
            target_group_size=2,
            prefix="state",
            min_matchmaking_time=FOREVER_S,
            start=True,
        )
        for net in nets
    )
    begin = weights(nets[0])
    second.local_epoch, donor.local_epoch = 10, 5
    for state in (first, second):
        state.step(averaging_round=True, delay_averaging=True)
    first.wait_for_delayed_updates()
    second.wait_for_delayed_updates()
    assert first.get_current_state()[0]["epoch"] == 0 and torch.equal(weights(nets[0]), begin)
    if loaded:
        second.allow_state_sharing = False
        first.load_state_from_peers(timeout=WAIT_S)
    first.step(apply_delayed_updates=True)
    mean = weights(nets[2]) if loaded else (begin + weights(nets[1])) / 2
    assert first.local_epoch == (5 if loaded else 10)
    torch.testing.assert_close(weights(nets[0]), mean)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SwarmClosed])
def test_a_step_is_in_the_model_though_the_average_after_it_is_interrupted(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was in the copies only: a checkpoint that was saved then had the number of the next epoch, and lacked it."""
    net = model()
    state = TrainingStateAverager(
        dht=dht(Town()), optimizer=SGD, params=net.parameters(), offload_optimizer=True, prefix="state", start=True
    )
    begin = weights(net)
    monkeypatch.setattr(state, "schedule_step", Mock(side_effect=error))
    backward(net, 0)
    with pytest.raises(error):
        state.step(increment_epoch=True, optimizer_step=True, averaging_round=True)
    assert state.epoch_of_model == 1 and not torch.equal(weights(net), begin)
    assert all(map(torch.equal, net.parameters(), state.parts.optimized))
    state.shutdown()


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


@pytest.mark.parametrize("delayed", [False, True])
def test_a_state_that_is_given_while_an_epoch_ends_has_the_parameters_of_its_epoch(delayed: bool) -> None:
    """It had the number of the next epoch and the parameters of before: who loaded it lacked a step, unseen."""
    net = model()
    state = TrainingStateAverager(
        dht=dht(Town()),
        optimizer=SGD,
        params=net.parameters(),
        offload_optimizer=True,
        prefix="state",
        start=True,
    )
    begin, load_gradients = weights(net), state.parts.load_gradients
    given: list[tuple[int, Tensor]] = []

    def give() -> None:
        meta, tensors, _ = state.get_current_state()
        given.append((meta["epoch"], torch.cat([t.flatten() for t in tensors[:2]])))

    def at_that_moment() -> None:
        give()
        load_gradients()

    object.__setattr__(state.parts, "load_gradients", at_that_moment)
    backward(net, 0)
    state.step(increment_epoch=True, optimizer_step=True, delay_optimizer_step=delayed)
    give()
    assert [epoch for epoch, _ in given] == [0, 1]
    assert torch.equal(given[0][1], begin) and not torch.equal(given[1][1], begin)
    state.shutdown()


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


def test_batches_count_by_their_size_against_the_first_of_their_sum() -> None:
    weight = nn.Parameter(torch.zeros(2))
    averager = GradientAverager([weight], dht=dht(Town()), prefix="sums", start=True)
    for sizes, mean in (((2, 4, 2), (1 + 2 * 2 + 3) / 3), ((4, 2), (1 + 2 / 2) / 2)):
        for i, size in enumerate(sizes):
            weight.grad = torch.full((2,), i + 1.0)
            averager.accumulate_grads_(size)
        assert averager.local_samples_accumulated == sum(sizes)
        averager.load_accumulators_into_averager_()
        with averager.get_tensors() as (average,):
            torch.testing.assert_close(average, torch.full((2,), mean))
        averager.reset_accumulated_grads_()


def test_a_client_that_is_ahead_ends_nobodys_epoch() -> None:
    """It gives no state, from which those behind could load what it has."""
    town = Town()
    client, other = (ProgressTracker(dht(town), "run", TARGET, client_mode=mode, start=True) for mode in (True, False))
    client.report_local_progress(3, 8)
    other.report_local_progress(1, 8)
    assert other.progress_now().epoch == 1 and not other.ready_to_update_epoch


def test_progress_of_other_types_is_not_counted() -> None:
    """A name in place of a flag ended the step of every other peer; a rate that is no number, the estimates."""
    town = Town()
    stranger, watcher = town.peer(), ProgressTracker(dht(town), "run", 100, start=True)
    sound = ["", 0, 10, 1.0, 0.0, False]
    for place, wrong in ((1, -1), (2, True), (3, float("nan")), (4, float("inf")), (4, "now"), (5, "client"), (5, 1)):
        said = [*sound[:place], wrong, *sound[place + 1 :]]
        stranger.post("progress/run/", MSGPackSerializer.dumps(said), 60.0)
        assert watcher.progress_now().num_peers == 0, said
    stranger.post("progress/run/", MSGPackSerializer.dumps(sound), 60.0)
    assert watcher.progress_now().num_peers == 1


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


@pytest.mark.parametrize("make", ["TrainingAverager", "TrainingStateAverager"])
def test_a_tensor_that_would_be_averaged_twice_is_refused(make: str) -> None:
    net, town = model(), Town()
    common = {"dht": dht(town), "prefix": "mine", "start": True}
    buffer = torch.zeros(2)
    for extra in ([buffer, buffer], [net.weight]):
        with pytest.raises(UsageError, match="averaged twice: give each of extra_tensors once"):
            if make == "TrainingAverager":
                TrainingAverager(
                    SGD(net.parameters()),
                    average_parameters=True,
                    average_gradients=False,
                    extra_tensors=extra,
                    **common,
                )
            else:
                TrainingStateAverager(optimizer=SGD(net.parameters()), extra_tensors=extra, **common)


def test_the_state_of_a_training_averager_is_compressed_by_role_and_takes_no_steps_back() -> None:
    town, nets = Town(), [model(), model()]
    donor, loader = (
        TrainingAverager(
            torch.optim.Adam(net.parameters(), lr=0.1),
            average_parameters=True,
            average_gradients=False,
            parameter_names=list(dict(net.named_parameters())),
            state_compression=RoleAdaptiveCompression(parameter=Float16Compression(), default=NoCompression()),
            dht=dht(town),
            prefix="t",
            start=True,
        )
        for net in nets
    )
    third = torch.full((1, 5), 1 / 3)
    with torch.no_grad():
        nets[0].weight.copy_(third)
    donor.opt.state[nets[0].weight]["exp_avg"].copy_(third)
    metadata, tensors, infos = donor.get_current_state()
    assert metadata["step"] == 0 and [info.key for info in infos][:2] == ["weight", "bias"]
    assert [tuple(t.shape) for t in tensors] == [info.shape for info in infos]
    loader.local_step = 7
    loader.load_state_from_peers(timeout=WAIT_S)
    assert torch.equal(nets[1].weight, third.half().float()) and loader.local_step == 7
    assert torch.equal(loader.opt.state[nets[1].weight]["exp_avg"], third)


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5),
        partial(torch.optim.Adam, lr=0.1, weight_decay=0.1),
        partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1),
        partial(torch.optim.NAdam, lr=0.1),
        partial(torch.optim.ASGD, lr=0.1),
        partial(torch.optim.Adagrad, lr=0.1, weight_decay=0.1),
        partial(torch.optim.RMSprop, lr=0.1, momentum=0.9, weight_decay=0.1),
    ],
)
def test_a_state_that_was_made_without_a_step_leaves_the_steps_to_come_as_they_were(make: Any) -> None:
    nets = [model(), model()]
    plain, made = (make(net.parameters()) for net in nets)
    optimizer_state.initialize(made)
    assert made.state_dict()["param_groups"] == plain.state_dict()["param_groups"]
    for seed in range(4):
        for net, opt in zip(nets, (plain, made), strict=True):
            opt.zero_grad()
            backward(net, seed)
            opt.step()
        if seed == 1:
            optimizer_state.initialize(made)  # there is one by now
    assert torch.equal(weights(nets[1]), weights(nets[0]))


@pytest.mark.parametrize("names", [(), ("momentum_buffer",)])
def test_a_buffer_that_is_averaged_is_one_from_the_start_and_others_can_load_a_state_without(names: tuple[str]) -> None:
    dampened, town = partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5), Town()
    first, second = (
        optimizer(town, model(), batch_size_per_step=TARGET, optimizer=dampened, average_opt_statistics=names)
        for _ in range(2)
    )
    buffer = first.opt.state_dict()["state"][0]["momentum_buffer"]
    assert torch.equal(buffer, torch.zeros(1, 5)) if names else buffer is None
    assert second.state_averager.load_state_from_peers(timeout=WAIT_S) is not None


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


def test_a_state_of_another_optimizer_or_of_other_shapes_is_refused_and_changes_nothing() -> None:
    """It was taken over in part: the step after it failed. Of a donor without one an AttributeError was told."""
    adam, sgd = partial(torch.optim.Adam, lr=0.1), partial(torch.optim.SGD, lr=0.1, momentum=0.9)

    def made(make: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        net = model()
        opt = make(net.parameters())
        optimizer_state.initialize(opt)
        return net, opt

    of_adam, of_sgd = (optimizer_state.dump(made(make)[1]) for make in (adam, sgd))
    wide = [statistic.new_zeros(2) for statistic in of_adam[1]]
    for make, metadata, statistics in (
        (adam, None, []),
        (adam, {"state": {}}, []),
        (adam, *of_sgd),
        (sgd, *of_adam),
        (adam, of_adam[0], wide),
        (adam, of_adam[0], of_adam[1][:-1]),
    ):
        net, opt = made(make)
        values = [torch.zeros_like(param) for param in net.parameters()]
        begin, before = weights(net), str(opt.state_dict())
        with pytest.raises(UsageError, match="does not fit this optimizer"):
            optimizer_state.load(opt, metadata, list(net.parameters()), [*values, *statistics])
        assert torch.equal(weights(net), begin) and str(opt.state_dict()) == before
        backward(net, 0)
        opt.step()
        assert not torch.equal(weights(net), begin)


def test_a_training_averager_takes_no_state_of_an_averager_of_another_kind() -> None:
    town, net = Town(), model()
    DecentralizedAverager([torch.zeros(3)], dht(town), start=True, prefix="t")
    loader = TrainingAverager(
        SGD(net.parameters()), average_parameters=True, average_gradients=False, dht=dht(town), prefix="t", start=True
    )
    with pytest.raises(UsageError, match="no state of a TrainingAverager"):
        loader.load_state_from_peers(timeout=WAIT_S)


def test_a_state_that_is_refused_leaves_a_mean_on_its_way_as_good_as_before() -> None:
    town, net = Town(), model()
    momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    donor, state = (
        TrainingStateAverager(dht=dht(town), optimizer=make, params=own.parameters(), prefix="state", start=True)
        for make, own in ((momentum, nn.Linear(5, 1)), (torch.optim.Adam, net))
    )
    donor.local_epoch, begin = 5, weights(net)
    update = state_averager.Update()
    state._updates.append(update)
    with pytest.raises(UsageError, match="does not fit this optimizer"):
        state.load_state_from_peers(timeout=WAIT_S)
    assert not update.outdated and state.local_epoch == 0 and torch.equal(weights(net), begin)
    state._updates.clear()


def test_the_state_of_an_optimizer_of_ones_own_is_taken_over_again_and_again() -> None:
    """torch adds to the defaults of one that is loaded what its groups do not have."""

    class Sign(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        def step(self, closure: Any = None) -> None:
            """None is made."""

    net = model()
    opts = [Sign(net.parameters()) for _ in range(2)]
    opts[0].param_groups[0]["lr"] = 0.5
    for _ in range(2):
        metadata, tensors = optimizer_state.dump(opts[0])
        optimizer_state.load(opts[1], metadata, [], tensors)
        assert opts[1].param_groups[0]["lr"] == 0.5
        opts[1].param_groups[0]["lr"] = 0.1


def test_it_is_not_copied_and_zero_grad_keeps_the_gradients_as_hiveminds() -> None:
    net = model()
    opt = optimizer(Town(), net, batch_size_per_step=TARGET)
    for copied in (copy.copy, copy.deepcopy, operator.methodcaller("__reduce_ex__", 2)):
        with pytest.raises(TypeError, match="neither pickled nor copied"):
            copied(opt)
    assert opt.defaults == opt.opt.defaults
    F.mse_loss(*batch_of(net)).backward()
    opt.zero_grad()
    assert net.weight.grad is not None and not net.weight.grad.any()
    opt.zero_grad(set_to_none=True)
    assert net.weight.grad is None
    opt.shutdown()


@pytest.mark.parametrize("offload", [False, True])
def test_groups_show_the_models_parameters_though_the_optimizer_has_them_in_another_order(offload: bool) -> None:
    """They were paired by their places: whoever limited the gradients of one group did so to those of another."""
    net = model()

    def by_groups(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        (weight, bias) = (p for group in groups for p in group["params"])
        return SGD([{"params": [bias], "momentum": 0.5}, {"params": [weight]}])

    opt = optimizer(Town(), net, optimizer=by_groups, batch_size_per_step=TARGET, offload_optimizer=offload)
    (first,), (second,) = (group["params"] for group in opt.param_groups)
    assert first is net.bias and second is net.weight and opt.param_groups[0]["momentum"] == 0.5
    opt.shutdown()


@pytest.mark.parametrize("offload", [False, True])
def test_frozen_parameters_do_not_decay(offload: bool) -> None:
    """Gradients of zero were made for them, and AdamW took that for a step."""
    net = model()
    net.bias.requires_grad_(False)
    adamw = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
    options = {"offload_optimizer": True, "delay_optimizer_step": False} if offload else {}
    opt = optimizer(Town(), net, optimizer=adamw, batch_size_per_step=TARGET, **options)
    bias, weight = net.bias.detach().clone(), net.weight.detach().clone()
    for _ in range(2):
        F.mse_loss(*batch_of(net)).backward()
        opt.step()
        opt.zero_grad()
    assert torch.equal(net.bias, bias) and not torch.equal(net.weight, weight) and opt.local_epoch == 2
    opt.shutdown()


def batch_of(net: nn.Module) -> tuple[Tensor, Tensor]:
    ((x, y),) = batches(0, 1, TARGET)
    return net(x), y
