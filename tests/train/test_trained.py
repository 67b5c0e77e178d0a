"""What one DiLoCo trains is whole, stays what it was, and is trained by nobody else."""

from __future__ import annotations

import gc
import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from dlc.errors import CheckpointError, UsageError
from dlc.train import trained
from dlc.train.diloco import DiLoCo
from tests.train.fake_peer import FakePeer


class Pair(nn.Module):
    """Two parts, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))


def sgd(*params: torch.Tensor) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def step(opt: DiLoCo, *params: nn.Parameter) -> None:
    for parameter in params:
        parameter.grad = torch.ones_like(parameter)
    opt.step()


def test_two_over_one_model_are_an_error_before_a_step_counts_twice() -> None:
    """They made -39 of ten steps of -0.3, and all peers agreed on that."""
    m = Pair()
    first = DiLoCo(m, sgd(m.a), FakePeer(), sync_every=1, channel="a")
    second = DiLoCo(m, sgd(m.c), FakePeer(), sync_every=1, channel="c")
    step(second, m.a, m.c)
    before = [p.detach().clone() for p in m.parameters()]
    with pytest.raises(UsageError, match=r"another dlc.DiLoCo was made over 2 of these parameters"):
        step(first, m.a, m.c)
    with pytest.raises(UsageError, match="another dlc.DiLoCo"):
        first.finish()
    with pytest.raises(UsageError, match="another dlc.DiLoCo"):
        first.reload()
    assert all(torch.equal(p, q) for p, q in zip(m.parameters(), before, strict=True))


class Elsewhere(dict[torch.Tensor, object]):
    """Another thread claims parameters of its own while one is claimed here."""

    def __setitem__(self, key: torch.Tensor, value: object) -> None:
        super().__setitem__(key, value)
        trained._newest = next(trained._MADE)


def test_two_threads_may_each_make_one_of_their_own_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The later one's number was written to parameters of the other, which then refused its first step."""
    monkeypatch.setattr(trained, "_CLAIMS", Elsewhere())
    m = Pair()
    opt = DiLoCo(m, sgd(m.a, m.c), FakePeer(), sync_every=1)
    step(opt, m.a, m.c)
    assert m.a[0] < 0


def test_each_over_its_own_parameters_trains_as_one_would() -> None:
    m = Pair()
    opts = [DiLoCo([p], sgd(p), FakePeer(), sync_every=1, channel=n) for n, p in (("a", m.a), ("c", m.c))]
    for _ in range(3):
        for opt in opts:
            step(opt, m.a, m.c)
    assert torch.equal(m.a, m.c) and m.a[0] < 0


def test_two_that_follow_one_optimizer_are_an_error() -> None:
    m = Pair()
    inner, peer = sgd(*m.parameters()), FakePeer()
    for channel in ("a", "c"):
        DiLoCo(m, inner, peer if channel == "a" else FakePeer(), sync_every=2, channel=channel).follow()
    m.a.grad = torch.ones(3)
    with pytest.raises(UsageError, match="another dlc.DiLoCo"):
        inner.step()
    assert not m.a.any()


def test_two_that_were_both_ended_are_told_apart_again() -> None:
    """Nobody's parameters are those of whoever steps first."""
    m = Pair()
    inner = sgd(*m.parameters())
    one, two = (DiLoCo(m, inner, FakePeer(), sync_every=9, channel=name) for name in "ab")
    for opt in (one, two):
        opt.unfollow()
    for opt in (one, two):
        opt.follow()
    m.a.grad = torch.ones(3)
    with pytest.raises(UsageError, match="another dlc.DiLoCo"):
        inner.step()
    two.unfollow()
    with pytest.raises(UsageError, match="meanwhile"):
        inner.step()
    one.reload()
    inner.step()
    assert one.inner_step == 1


def test_who_goes_on_after_its_end_has_the_parameters_again() -> None:
    m = Pair()
    one, two = (DiLoCo(m, sgd(*m.parameters()), FakePeer(), sync_every=9, channel=name) for name in "ab")
    for opt in (one, two):
        opt.unfollow()
    step(two, m.a)
    with pytest.raises(UsageError, match="another dlc.DiLoCo was made over 2 of these parameters"):
        one.reload()


@pytest.mark.parametrize("how", ["unfollow", "finish", "gone"])
def test_parameters_are_handed_on_and_back_but_not_what_was_trained_meanwhile(how: str) -> None:
    """It was offered by both: -11.5 in place of -7.7."""
    m = Pair()
    peer = FakePeer()
    first = DiLoCo(m, sgd(*m.parameters()), peer, sync_every=2)
    step(first, m.a)
    later = [DiLoCo(m, sgd(*m.parameters()), FakePeer(), sync_every=2, channel="more")]
    for _ in range(3):
        step(later[0], m.a)
    if how == "gone":
        later.clear()
        gc.collect()
    else:
        getattr(later[0], how)()
    with pytest.raises(UsageError, match=r"has trained these parameters meanwhile.*call reload\(\)"):
        step(first, m.a)
    first.reload()
    assert torch.equal(m.a, torch.zeros(3)) and first.inner_step == 0
    step(first, m.a)
    assert not peer.weights
    step(first, m.a)
    assert peer.weights == [2.0] and m.a[0] < -0.2


def test_parameters_that_were_given_up_and_that_nobody_took_go_on() -> None:
    m = Pair()
    opt = DiLoCo(m, sgd(*m.parameters()), peer := FakePeer(), sync_every=2)
    step(opt, m.a)
    opt.unfollow()
    step(opt, m.a)
    assert peer.weights == [2.0]


def test_what_the_optimizer_trains_beside_the_model_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """It went its own way on each peer, without a word."""
    m, head = Pair(), nn.Parameter(torch.zeros(2))
    opt = DiLoCo(m, sgd(*m.parameters(), head), FakePeer(), sync_every=1)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            step(opt, m.a, head)
    (record,) = caplog.records
    assert "trains 1 parameters that are none of those given to dlc.DiLoCo" in record.message


def test_one_optimizer_may_train_the_parameters_of_two(caplog: pytest.LogCaptureFixture) -> None:
    """As of a part that is exchanged more often: each said that the other's are never averaged."""
    m, peers = Pair(), [FakePeer(), FakePeer()]
    inner = sgd(m.a, m.c)
    often = DiLoCo([m.a], inner, peers[0], sync_every=1, channel="often")
    seldom = DiLoCo([m.c], inner, peers[1], sync_every=3, channel="seldom")
    for opt in (often, seldom):
        opt.follow()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            m.a.grad, m.c.grad = torch.ones(3), torch.ones(3)
            inner.step()
    assert not caplog.records and [peer.weights for peer in peers] == [[1.0] * 3, [3.0]]
    seldom.unfollow()
    with caplog.at_level(logging.WARNING):
        inner.step()
    (record,) = caplog.records
    assert "trains 1 parameters that are none of those given" in record.message, "nobody averages them any more"


def test_parameters_that_are_gone_are_told_where_nothing_is_left_to_exchange(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    opt = DiLoCo(model, sgd(*model.parameters()), FakePeer(), sync_every=2)
    for _ in range(2):
        step(opt, *model.parameters())
    model[1] = nn.Identity()  # as adapters that were merged
    with caplog.at_level(logging.WARNING):
        assert opt.finish() is None
    assert "2 of the parameters are no part of the model any more" in caplog.text
    step(opt)
    with pytest.raises(UsageError, match="2 of the parameters are no part of the model any more.*merged adapters"):
        opt.finish()


class FullyShardedDataParallel(nn.Module):
    """By its name and group, torch's first one."""

    def __init__(self, inside: nn.Module, ranks: int) -> None:
        super().__init__()
        self.inside, self.process_group = inside, SimpleNamespace(size=lambda: ranks)
        self.sharding_strategy = SimpleNamespace(name="FULL_SHARD")


def test_shards_are_refused() -> None:
    """Those of two ranks were averaged with one another: layers with other layers, and no error."""
    sharded = FullyShardedDataParallel(nn.Linear(2, 2), 2)
    for model in (sharded, nn.Sequential(nn.Linear(2, 2), sharded)):
        with pytest.raises(UsageError, match=r"shards \(FSDP\).*--parallel fsdp"):
            DiLoCo(model, sgd(*model.parameters()), FakePeer(), sync_every=2)
    flat = nn.Parameter(torch.zeros(4))
    flat._fsdp_flattened = True  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="shards"):
        DiLoCo([flat], sgd(flat), FakePeer(), sync_every=2)
    alone = FullyShardedDataParallel(nn.Linear(2, 2), 1)
    DiLoCo(alone, sgd(*alone.parameters()), FakePeer(), sync_every=2)
    sharded.sharding_strategy.name = "NO_SHARD"
    DiLoCo(sharded, sgd(*sharded.parameters()), FakePeer(), sync_every=2)


def test_one_of_several_ranks_is_told_that_the_others_see_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    m = Pair()
    with caplog.at_level(logging.WARNING):
        DiLoCo(m, sgd(*m.parameters()), FakePeer(), sync_every=2)
        assert not caplog.records
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
        DiLoCo(m, sgd(*m.parameters()), FakePeer(), sync_every=2)
    assert "one of 4 ranks" in caplog.text


def test_what_is_no_optimizer_no_parameter_no_period_and_no_state_is_named() -> None:
    m = Pair()
    inner = sgd(*m.parameters())
    for none in (None, torch.optim.SGD):
        with pytest.raises(UsageError, match="inner must be a torch optimizer, not"):
            DiLoCo(m, none, FakePeer(), sync_every=2)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="of groups of parameters give the parameters"):
        DiLoCo([{"params": [m.a]}], inner, FakePeer(), sync_every=2)  # type: ignore[list-item]
    DiLoCo(m, inner, FakePeer(), sync_every=np.int64(2))  # type: ignore[arg-type]
    for period in (2.5, 0, "2"):
        with pytest.raises(UsageError, match="a whole number of inner steps"):
            DiLoCo(m, inner, FakePeer(), sync_every=period)  # type: ignore[arg-type]
    opt = DiLoCo(m, inner, FakePeer(), sync_every=2)
    for state in ({}, inner.state_dict()):
        with pytest.raises(CheckpointError, match="no state of dlc.DiLoCo"):
            opt.load_state_dict(state)


def test_of_parameters_that_share_memory_one_is_named_and_both_are_averaged(caplog: pytest.LogCaptureFixture) -> None:
    one = nn.Parameter(torch.zeros(3))
    other = nn.Parameter(one.data)
    with caplog.at_level(logging.WARNING):
        step(DiLoCo([one, other], sgd(one), FakePeer(), sync_every=1), one)
        step(DiLoCo([one, other], sgd(one, other), FakePeer(), sync_every=1, channel="b"), one, other)
    assert not caplog.records
