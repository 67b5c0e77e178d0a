"""`DiLoCo.finish`: every step that was made is in a round, or a line says that it is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dlc
import dlc.train.local_model
from dlc.errors import SwarmClosed
from dlc.runspec import OuterSpec
from dlc.train.diloco import DiLoCo
from dlc.train.held import END_PATIENCE_S
from tests.swarm import DEADLINE_S, ROUND_S, swarm
from tests.train.fake_peer import FakePeer

MEAN = OuterSpec(lr=1.0, momentum=0.0)
"""The outer step is the mean of the parameters."""


@pytest.fixture(autouse=True)
def look_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dlc.train.local_model, "POLL_S", 0.0)


def build() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def made(net: nn.Module, peer: Any, **options: Any) -> DiLoCo:
    inner = torch.optim.SGD(net.parameters(), lr=0.05)
    return DiLoCo(net, inner, peer, **{"sync_every": 6, "outer": MEAN, "codec": "fp32", **options})


def backward(net: nn.Module, seed: int) -> None:
    net.zero_grad()
    net(torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))).square().sum().backward()


def train(opt: DiLoCo, net: nn.Module, steps: range) -> None:
    for step in steps:
        backward(net, step)
        opt.step()


def flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


@pytest.mark.parametrize("overlap", ["none", "delayed", "eager"])
@pytest.mark.parametrize("steps", [1, 7, 8])
@pytest.mark.parametrize("fragments", [2, 3])
def test_at_the_end_each_fragment_has_its_turn_once_more(fragments: int, steps: int, overlap: str) -> None:
    """All but one were set back to their last round: up to `sync_every` steps of them were gone without a word."""
    peer, net = FakePeer(), build()
    opt = made(net, peer, fragments=fragments, overlap=overlap)
    train(opt, net, range(steps))
    opt.flush()
    before, rounds = flat(net), opt.t
    assert opt.finish() is not None
    torch.testing.assert_close(flat(net), before, rtol=1e-6, atol=1e-7)  # alone, the mean is what this peer has
    assert torch.equal(flat(net), peer.theta())
    assert set(peer.patiences_s[rounds:]) == {END_PATIENCE_S}
    period = 6 // fragments
    if overlap == "none":
        held = [steps % period + period * turn for turn in range(fragments)][::-1]  # in the order of their turns
        held = [min(steps, steps_held) for steps_held in held if steps_held]
        assert peer.weights[rounds:] == pytest.approx([steps_held / fragments for steps_held in held])
    assert opt.finish() is None and opt.t == len(peer.counted)


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize(("given_s", "last_s"), [(0.0, END_PATIENCE_S), (3.0, 3.0)])
def test_the_last_rounds_wait_for_who_ends_a_little_later(fragments: int, given_s: float, last_s: float) -> None:
    """One without fragments waited as those of the training do: peers 3 s apart ended with different models."""
    peer, net = FakePeer(), build()
    opt = made(net, peer, fragments=fragments, patience_s=given_s)
    train(opt, net, range(1))
    opt.finish()
    assert peer.patiences_s == [last_s] * fragments and len(peer.counted) == fragments
    train(opt, net, range(6))
    assert peer.patiences_s[fragments:] == [given_s] * fragments


@pytest.mark.parametrize("overlap", ["delayed", "eager"])
@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize(("given_s", "planned"), [(0.0, False), (0.0, True), (3.0, False)])
def test_what_is_on_its_way_at_the_end_waits_as_the_last_rounds_do(
    given_s: float, planned: bool, fragments: int, overlap: str
) -> None:
    """It kept the patience of the training, so that who ended seconds later was left out of it."""
    peer, net = FakePeer(), build()
    opt = made(net, peer, patience_s=given_s, fragments=fragments, overlap=overlap)
    peer.planned, peer.slices = planned, [0] * (fragments - 1) + [99]
    train(opt, net, range(6))
    assert peer.patiences_s == [given_s] * fragments
    peer.slices = []
    opt.finish()
    assert peer.withdrawn == (not planned and not given_s)
    assert set(peer.patiences_s[fragments:]) <= {given_s or END_PATIENCE_S}
    assert len(peer.counted) == opt.t == 2 * fragments - 1 and torch.equal(flat(net), peer.theta())


def test_steps_after_an_offer_that_waits_at_the_end_are_counted_with_it_and_once() -> None:
    peer, net = FakePeer(), build()
    opt = made(net, peer, overlap="delayed")
    peer.planned, peer.slices = False, [99]
    train(opt, net, range(8))
    peer.slices = []
    report = opt.finish()
    assert report is not None and report.t == 1 and peer.weights == [6.0, 8.0] and peer.withdrawn
    assert opt.inner_step == 0 and torch.equal(flat(net), peer.theta())


def test_what_is_in_no_round_at_the_end_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """A turn that passes without this peer does not come back before others of which there is nothing to offer."""
    peer, net = FakePeer(), build()
    opt = made(net, peer, fragments=3)
    train(opt, net, range(3))
    peer.misses = ["", "late"]
    opt.finish()
    assert set(peer.patiences_s[1:]) == {END_PATIENCE_S}
    assert opt.t == 4 and torch.equal(flat(net), peer.theta())
    assert caplog.messages == ["up to 3 steps of 1 fragments are in no round: rounds have passed without this peer"]
    train(opt, net, range(1))
    opt.finish()
    assert len(caplog.messages) == 1 and opt.t == 7


def interrupt_end(opt: DiLoCo, at_wait: int) -> None:
    """End the training, but for an interrupt at this wait for a round."""
    wait, calls = opt._outer.wait, [0]

    def interrupted(timeout_s: float) -> bool:
        calls[0] += 1
        if calls[0] == at_wait:
            raise KeyboardInterrupt
        return wait(timeout_s)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(opt._outer, "wait", interrupted)
        opt.finish()


def test_an_interrupted_end_goes_on_where_it_was() -> None:
    peer, net = FakePeer(), build()
    opt = made(net, peer, fragments=3)
    train(opt, net, range(6))
    before = flat(net)
    interrupt_end(opt, at_wait=2)
    opt.finish()
    torch.testing.assert_close(flat(net), before, rtol=1e-6, atol=1e-7)
    assert opt.t == len(peer.counted) == 5


def test_a_state_that_is_loaded_after_an_interrupted_end_comes_after_the_round_on_its_way() -> None:
    """No step is in no round then, but the round is of what some fragments held of earlier ones."""
    peer, net = FakePeer(), build()
    opt = made(net, peer, fragments=3)
    train(opt, net, range(6))
    state = copy.deepcopy(opt.state_dict(outer=True))
    interrupt_end(opt, at_wait=1)
    opt.load_state_dict(state)
    assert opt.t == len(peer.counted) == 4 and torch.equal(flat(net), peer.theta())
    assert opt.finish() is None, "that state is of another theta"


def test_what_a_fragment_holds_is_part_of_the_state() -> None:
    peer, net = FakePeer(), build()
    opt = made(net, peer, fragments=3)
    train(opt, net, range(6))
    state = copy.deepcopy(opt.state_dict(outer=True))
    opt.finish()
    for kept in (state, {name: value for name, value in state.items() if name != "held"}):
        again_peer, again = FakePeer(start_t=state["t"]), build()
        other = made(again, again_peer, fragments=3, resume=state)
        other.load_state_dict(kept)
        other.finish()
        assert torch.equal(flat(again), flat(net)) == ("held" in kept)


STRAY = "the optimizer was stepped, and not by its dlc.DiLoCo"
CHANGED = "the parameters have changed since the last round, and by no step that this dlc.DiLoCo counted"


def test_who_steps_the_optimizer_itself_is_told_at_once_and_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    """No round came, no line said so, and `finish` put all of the training back to where it began."""
    peer, net = FakePeer(), build()
    opt = made(net, peer)
    for step in range(8):
        backward(net, step)
        opt.inner.step()
    assert [message.startswith(STRAY) for message in caplog.messages] == [True], "once"
    assert opt.finish() is None and torch.equal(flat(net), peer.theta())
    assert [message.startswith(CHANGED) for message in caplog.messages[1:]] == [True]
    opt.finish()
    assert len(caplog.messages) == 2, "nothing has changed"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_that_count_are_not_told(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    def step(make: Callable[[], object]) -> None:
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        make()

    net, peer = build().to(dtype), FakePeer()
    first = made(net, peer)
    for _ in range(7):
        step(first.step)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    step(lambda: scaler.step(first))
    first.finish()
    step(first.inner.step)  # its own matter, after the end
    followed = DiLoCo(net, first.inner, peer, sync_every=6, channel="followed")
    followed.follow()
    for _ in range(7):
        step(followed.inner.step)
    followed.finish()
    second = DiLoCo(net, first.inner, peer, sync_every=6, channel="second")
    third = DiLoCo(net, first.inner, peer, sync_every=6, channel="third")
    step(third.step)
    third.finish()
    assert not caplog.messages
    second.unfollow()


@pytest.mark.parametrize("options", [{}, {"overlap": "delayed"}, {"fragments": 3}])
def test_who_has_left_makes_no_further_steps(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """They went on, uncounted, and the end told them as changes of the parameters that it had undone."""
    net = build()
    with swarm(1) as (peer,):
        opt = made(net, peer, **options)
        train(opt, net, range(7))
        opt.flush()
        caplog.clear()
        before = opt.inner_step
        peer.leave()
        with pytest.raises(SwarmClosed, match=f"the peer has left; .* with {before + 1} inner steps"):
            train(opt, net, range(7, 8))
        there = flat(net)
        for call in (lambda: train(opt, net, range(8, 9)), opt.finish, opt.reload):
            with pytest.raises(SwarmClosed, match=f"with {before + 1} inner steps"):
                call()
            assert torch.equal(flat(net), there)
        opt.unfollow()
        opt.inner.step()
    assert not caplog.messages and opt.state_dict()["steps"] == before + 1


def test_peers_that_end_together_have_the_mean_of_all_fragments() -> None:
    nets, n = [build(), build()], 2

    def run(peer: dlc.Peer, net: nn.Module, me: int) -> Tensor:
        opt = made(net, peer, fragments=3, patience_s=ROUND_S)
        train(opt, net, range(10 * me, 10 * me + 1))
        before = flat(net)
        opt.finish()
        assert opt.t == 3
        return before

    with swarm(n) as peers, ThreadPoolExecutor(n) as pool:
        futures = [pool.submit(run, peer, net, me) for me, (peer, net) in enumerate(zip(peers, nets, strict=True))]
        before = [future.result(DEADLINE_S) for future in futures]
    assert torch.equal(flat(nets[0]), flat(nets[1])) and not torch.equal(*before)
    torch.testing.assert_close(flat(nets[0]), (before[0] + before[1]) / 2, rtol=1e-6, atol=1e-7)
