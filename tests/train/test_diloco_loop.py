import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dlc.train.local_model
import dlc.train.offers
import dlc.train.outer_loop
from dlc.comm.straggler import NEVER_S
from dlc.errors import CheckpointError, DlcError, UsageError
from dlc.flat import FlatView
from dlc.handles import Resume
from dlc.runspec import OuterSpec
from dlc.train.diloco import DiLoCo, NotFinite
from dlc.train.offers import Work
from dlc.train.origin import Origin
from tests.train.fake_peer import FakePeer


@pytest.fixture(autouse=True)
def look_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dlc.train.local_model, "POLL_S", 0.0)


def build(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def backward(model: nn.Module, step: int) -> None:
    inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
    model(inputs.to(next(model.parameters()).dtype)).square().sum().backward()


def params(model: nn.Module) -> Tensor:
    view = FlatView.of(model)
    return view.gather(torch.empty(view.numel))


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def test_an_optimizer_of_another_model_is_refused() -> None:
    """Nothing would be trained, and every round would report as usual."""
    model, before = build(), build()
    for refused in (model, list(model.parameters())):
        with pytest.raises(UsageError, match="holds none of the model's parameters"):
            DiLoCo(refused, sgd(before), FakePeer(), sync_every=2)
    with pytest.raises(UsageError, match="holds none of the model's parameters"):
        DiLoCo(model, torch.optim.SGD([{"params": []}], lr=0.1), FakePeer(), sync_every=2)
    DiLoCo(model, torch.optim.SGD([next(model.parameters())], lr=0.1), FakePeer(), sync_every=2)


def test_a_weight_that_no_round_could_have_is_refused_when_it_is_set() -> None:
    """The round refused it, and its inner steps were gone; where all peers gave 0, `step` never returned."""
    peer, model = FakePeer(), build()
    opt = DiLoCo(model, sgd(model), peer, sync_every=2)
    for weight in (0.0, -1.0, float("nan"), 2.0**53, "3"):
        with pytest.raises(UsageError, match="the weight of a step must be above 0"):
            opt.weight = weight  # type: ignore[assignment]
    opt.weight = 3
    for step in range(2):
        backward(model, step)
        opt.step()
    assert peer.weights == [6.0]


def test_sync_every_cannot_be_set_later_as_rounds_would_be_due_as_before() -> None:
    model = build()
    opt = DiLoCo(model, sgd(model), FakePeer(), sync_every=2)
    with pytest.raises(AttributeError):
        opt.sync_every = 3  # type: ignore[misc]
    assert opt.sync_every == 2


def test_an_optimizer_wrapped_by_accelerate_is_refused() -> None:
    """Its step makes none where gradients are accumulated, and each was counted as one."""
    accelerate = pytest.importorskip("accelerate")
    model = build()
    wrapped = accelerate.Accelerator(cpu=True).prepare(sgd(model))
    with pytest.raises(UsageError, match=r"AcceleratedOptimizer wraps .*call follow\(\)"):
        DiLoCo(model, wrapped, FakePeer(), sync_every=2)


def test_what_cannot_be_trained_is_refused_before_the_run_has_it() -> None:
    model, peer = build(), FakePeer()
    for weight in (0.0, -1.0, float("nan"), float("inf"), 2.0**53, 10**400):
        with pytest.raises(UsageError, match="the weight of a step must be above 0"):
            DiLoCo(model, sgd(model), peer, sync_every=2, weight=weight)
    for patience_s in (-1.0, float("nan"), float("inf"), "3"):
        with pytest.raises(UsageError, match="patience_s is .*a number of seconds"):
            DiLoCo(model, sgd(model), peer, sync_every=2, patience_s=patience_s)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="hook is int: it must be a function"):
        DiLoCo(model, sgd(model), peer, sync_every=2, pseudo_gradient_hook=3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"outer is str: give a dlc\.OuterSpec"):
        DiLoCo(model, sgd(model), peer, sync_every=2, outer="sgd")  # type: ignore[arg-type]
    for wrong in ({"mixing": "2"}, {"fragments": "2"}, {"chunk_elems": 0.5}, {"overlap": None}, {"resume": 3}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            DiLoCo(model, sgd(model), peer, sync_every=2, **wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"peer is NoneType: give what dlc\.Peer\.join\(...\) returned"):
        DiLoCo(model, sgd(model), None, sync_every=2)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="model is float: give a torch module"):
        DiLoCo(3.0, sgd(model), peer, sync_every=2)  # type: ignore[arg-type]
    peer.role = "observer"
    with pytest.raises(UsageError, match="an observer takes part in no rounds"):
        DiLoCo(model, sgd(model), peer, sync_every=2)
    peer.role = "trainer"
    wide = nn.Parameter(torch.zeros(1).expand(8))
    with pytest.raises(UsageError, match="expanded tensor"):
        DiLoCo([wide], torch.optim.SGD([wide], lr=0.1), peer, sync_every=2)
    lazy = nn.LazyLinear(3)
    with pytest.raises(UsageError, match="run the model on a batch first"):
        DiLoCo(lazy, torch.optim.SGD(lazy.parameters(), lr=0.1), peer, sync_every=2)
    with torch.no_grad():
        next(model.parameters())[0] = float("nan")
    with pytest.raises(UsageError, match="hold NaN or Inf, and a run would begin from them"):
        DiLoCo(model, sgd(model), peer, sync_every=2)
    assert not hasattr(peer, "state")


def test_a_diloco_in_place_of_an_optimizer_is_refused_and_stays_of_use() -> None:
    """It was taken, and the steps of the inner one were then refused as if another had trained its parameters."""
    model, peer = build(), FakePeer()
    opt = DiLoCo(model, sgd(model), peer, sync_every=1)
    with pytest.raises(UsageError, match="inner is a dlc.DiLoCo, which exchanges by itself: give the optimizer inside"):
        DiLoCo(model, opt, peer, channel="another")  # type: ignore[arg-type]
    backward(model, 0)
    assert opt.step() is not None


def test_a_creation_that_is_interrupted_leaves_nothing_that_rounds_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model, peer = build(), FakePeer()

    def interrupted(loop: dlc.train.outer_loop.OuterLoop) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(dlc.train.outer_loop.OuterLoop, "adopt", interrupted)
        DiLoCo(model, sgd(model), peer, sync_every=2)
    assert peer.said == [{"eta_s": NEVER_S}] and peer.abandoned == [peer.state]
    DiLoCo(model, sgd(model), peer, sync_every=2)
    assert peer.said[-1] == {"eta_s": -1.0}

    def refused(*_: Any, **__: Any) -> None:
        raise UsageError("a state is there already")

    monkeypatch.setattr(peer, "open", refused)
    with pytest.raises(UsageError):
        DiLoCo(model, sgd(model), peer, sync_every=2)
    assert peer.said[-1] == {"eta_s": -1.0}, "the one that is in use goes on"


def test_parameters_that_are_replaced_or_cast_are_an_error_and_no_offer_of_nothing() -> None:
    """Zeros were offered, with the full weight of the steps, and the report said complete."""
    model, peer = build(), FakePeer()
    opt = DiLoCo(model, sgd(model), peer, sync_every=2)
    model.load_state_dict({name: p.clone() for name, p in model.state_dict().items()}, assign=True)
    opt.step()
    with pytest.raises(UsageError, match=r"4 of the parameters are no part of the model any more.*assign=True"):
        opt.step()
    model = build()
    opt = DiLoCo(model, sgd(model), peer, sync_every=1, channel="cast")
    model.to(torch.bfloat16)
    with pytest.raises(UsageError, match="have changed their dtype or shape"):
        opt.step()
    assert not peer.weights


@pytest.mark.parametrize("overlap", ["none", "eager"])
def test_steps_of_an_offer_that_failed_are_counted_by_no_other(overlap: str) -> None:
    model, peer = build(), FakePeer()
    opt = DiLoCo(model, sgd(model), peer, sync_every=3, overlap=overlap)
    theta = params(model)

    def fail() -> None:
        peer.on_contribute = lambda: None
        raise MemoryError

    peer.on_contribute = fail
    for step in range(2):
        backward(model, step)
        opt.step()
    with pytest.raises(MemoryError):
        opt.step()
    assert torch.equal(params(model), theta) and opt.inner_step == 0 and not peer.weights
    for step in range(3):
        backward(model, step)
        opt.step()
    opt.flush()
    assert peer.weights == [3.0] and len(peer.counted) == 1


def test_an_interruption_after_the_offer_leaves_it_standing_and_nothing_of_the_overlay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, peer = build(), FakePeer()
    opt = DiLoCo(model, sgd(model), peer, sync_every=2, overlap="eager")
    scatter, theta = Origin.scatter, params(model)

    def interrupted(origin: Origin, local: Tensor) -> Tensor:
        monkeypatch.setattr(Origin, "scatter", scatter)
        scatter(origin, local)
        raise KeyboardInterrupt

    peer.slices = [3, 0]
    monkeypatch.setattr(Origin, "scatter", interrupted)
    backward(model, 0)
    opt.step()
    with pytest.raises(KeyboardInterrupt):
        opt.step()
    offered = peer.vectors[0].clone()
    torch.testing.assert_close(theta - params(model), offered)
    assert opt.inner_step == 0
    opt.flush()
    assert peer.weights == [2.0] and torch.equal(peer.counted[0], offered)
    opt.outer_state.read(theta)
    assert torch.equal(params(model), theta), "the overlay is gone with the round"


def test_a_state_of_another_inner_optimizer_changes_nothing() -> None:
    model, other, peer = build(), build(), FakePeer()
    opt = DiLoCo(model, sgd(model), peer, sync_every=4)
    half = DiLoCo(other, torch.optim.SGD([next(other.parameters())], lr=0.1), FakePeer(), sync_every=4)
    backward(other, 0)
    half.step()
    before = params(model)
    with pytest.raises(ValueError, match="parameter group"):
        opt.load_state_dict(half.state_dict(outer=True))
    assert torch.equal(params(model), before) and opt.state_dict()["inner_step"] == 0


def test_parameters_that_begin_to_train_later_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = build()
    model[2].requires_grad_(False)
    opt = DiLoCo(model, sgd(model), FakePeer(), sync_every=1)
    backward(model, 0)
    opt.step()
    assert not caplog.records
    model[2].requires_grad_(True)
    for step in range(1, 3):
        backward(model, step)
        opt.step()
    (record,) = caplog.records
    assert "2 parameters need gradients that did not" in record.message and "(2.weight, 2.bias)" in record.message


def test_parameters_that_are_frozen_later_and_move_on_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """Rounds moved a layer that was frozen in the middle of a run, and nobody was told."""
    model = build()
    opt = DiLoCo(model, sgd(model), FakePeer(), sync_every=1)
    for step in range(3):
        if step == 1:
            model[0].requires_grad_(False)
            frozen = model[0].weight.clone()
            assert not caplog.messages
        backward(model, step)
        opt.step()
        opt.zero_grad()
    assert not torch.equal(model[0].weight, frozen), "by the outer momentum"
    (told,) = caplog.messages
    assert "2 parameters need no gradients any more (0.weight, 0.bias)" in told


def test_a_round_of_another_codec_is_an_error_and_no_round_for_ever() -> None:
    model, peer = build(), FakePeer()
    before = params(model)
    opt = DiLoCo(model, sgd(model), peer, sync_every=1)
    contribute = peer.contribute

    def misfit(*args: Any, **options: Any) -> Any:
        pending = contribute(*args, **options)
        pending.commit = lambda: (None, False)
        pending.misfit = "67 elements in int8"
        return pending

    peer.contribute = misfit  # type: ignore[method-assign]
    backward(model, 0)
    with pytest.raises(UsageError, match="averaged 67 elements in int8.* in fp16, in chunks of 67: all peers must"):
        opt.step()
    assert torch.equal(params(model), before) and opt.inner_step == 0
    peer.contribute = contribute  # type: ignore[method-assign]
    backward(model, 0)
    assert opt.step() is not None, "it may go on where the others have changed"


def test_who_trains_again_says_so_before_it_opens_its_next_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first round of the new training could begin without it, whatever its patience."""
    model, peer = build(), FakePeer()
    DiLoCo(model, sgd(model), peer, sync_every=2, channel="first").finish()
    assert peer.said == [{"eta_s": NEVER_S}]
    opened, said_by_then = peer.open, list[dict[str, Any]]()

    def look(*args: Any, **options: Any) -> Any:
        said_by_then.extend(peer.said)
        return opened(*args, **options)

    monkeypatch.setattr(peer, "open", look)
    DiLoCo(model, sgd(model), peer, sync_every=2, channel="second")
    assert said_by_then[-1] == {"eta_s": -1.0}


def test_no_round_waits_for_who_has_ended_its_training_before_its_next_step() -> None:
    model, other, peer = build(), build(1), FakePeer()
    opt = DiLoCo(model, sgd(model), peer, sync_every=2)
    assert not peer.said
    backward(model, 0)
    opt.step()
    opt.finish()
    assert peer.said == [{"eta_s": NEVER_S}] and len(peer.weights) == 1
    opt.step()
    opt.step()
    assert peer.said == [{"eta_s": NEVER_S}, {"eta_s": -1.0}]
    opt.follow()
    opt.unfollow()
    assert peer.said[-1] == {"eta_s": NEVER_S}
    opt.unfollow()
    assert len(peer.said) == 3
    opt.step()
    second = DiLoCo(other, sgd(other), peer, sync_every=2, channel="other")
    opt.finish()
    assert peer.said[-1] == {"eta_s": -1.0}, "it trains on another channel"
    second.finish()
    assert peer.said[-1] == {"eta_s": NEVER_S}
    opt.step()
    peer.left = True
    opt.follow()
    opt.unfollow()


@pytest.mark.parametrize("outer", [False, True])
def test_a_state_loaded_into_a_training_that_goes_on_takes_the_place_of_its_steps(outer: bool) -> None:
    model, peer = build(), FakePeer()
    opt = DiLoCo(model, sgd(model), peer, sync_every=4)
    for step in range(6):
        backward(model, step)
        opt.step()
        opt.zero_grad()
    at_save, theta = params(model), peer.theta()
    saved = copy.deepcopy(opt.state_dict(outer=outer))
    backward(model, 7)
    opt.step()
    opt.load_state_dict(saved)
    assert torch.equal(params(model), at_save if outer else theta)
    rounds = len(peer.weights)
    for _ in range(2):
        assert len(peer.weights) == rounds
        opt.step()
    assert peer.weights[rounds:] == [4.0 if outer else 2.0]


@pytest.mark.parametrize(
    ("spec", "oracle"),
    [
        (OuterSpec(), lambda theta: torch.optim.SGD([theta], lr=0.7, momentum=0.9, nesterov=True)),
        (OuterSpec(optimizer="sgd", lr=0.5), lambda theta: torch.optim.SGD([theta], lr=0.5)),
        (OuterSpec(optimizer="adam"), lambda theta: torch.optim.Adam([theta], lr=0.7, betas=(0.9, 0.95), eps=0.1)),
    ],
    ids=["nesterov", "sgd", "adam"],
)
def test_each_exchange_is_one_outer_step_of_torch_on_the_pseudo_gradient(
    spec: OuterSpec, oracle: Callable[[nn.Parameter], torch.optim.Optimizer]
) -> None:
    peer, model, twin = FakePeer(), build(), build()
    opt = DiLoCo(model, torch.optim.AdamW(model.parameters(), lr=0.01), peer, sync_every=3, outer=spec, codec="fp32")
    inner = torch.optim.AdamW(twin.parameters(), lr=0.01)
    theta = nn.Parameter(params(twin))
    outer = oracle(theta)
    reports = []
    for step in range(12):
        backward(model, step)
        reports.append(opt.step())
        opt.zero_grad()
        backward(twin, step)
        inner.step()
        inner.zero_grad()
        if step % 3 == 2:
            theta.grad = theta.detach() - params(twin)
            outer.step()
            FlatView.of(twin).scatter(theta.detach())
    assert [report.t if report else None for report in reports] == [None, None, 1, None, None, 2, None, None, 3] + [
        None,
        None,
        4,
    ]
    assert opt.t == 4 and opt.last_report is reports[-1] and peer.weights == [3.0] * 4
    torch.testing.assert_close(params(model), params(twin), rtol=1e-5, atol=1e-6)
    assert torch.equal(params(model), peer.theta())


@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_the_norm_of_what_is_offered_is_told_where_it_is_to_be_clipped(codec: str) -> None:
    for clip in ("none", "median"):
        peer, model = FakePeer(), build()
        peer.lossy = True
        opt = DiLoCo(model, sgd(model), peer, sync_every=1, outer=OuterSpec(clip=clip), codec=codec)
        for step in range(2):
            backward(model, step)
            opt.step()
        told = [float(v.norm()) if clip == "median" else 0.0 for v in peer.vectors]
        assert peer.norms == pytest.approx(told, rel=1e-6) and len(told) == 2


def test_a_round_that_passes_without_us_moves_the_base_and_keeps_our_progress() -> None:
    peer, model = FakePeer(), build()
    mean = OuterSpec(lr=1.0, momentum=0.0)
    opt = DiLoCo(model, sgd(model), peer, sync_every=3, outer=mean, codec="fp32")
    start = params(model)
    backward(model, 0)
    opt.step()
    progress = start - params(model)
    update = torch.full((peer.state.numel,), 0.5)
    peer.pass_round(update)
    for group in opt.param_groups:
        group["lr"] = 0.0  # so that only the rebase moves anything
    assert opt.step() is None and opt.t == 1
    torch.testing.assert_close(params(model), start - update - progress)
    assert opt.step() is not None and opt.t == 2
    torch.testing.assert_close(peer.vectors[0], progress, rtol=0, atol=1e-6)
    torch.testing.assert_close(params(model), start - update - progress)


def test_after_one_bad_batch_a_peer_trains_on() -> None:
    """AdamW's moments would be NaN for ever, and so each of its later steps."""
    peer, model = FakePeer(), build()
    opt = DiLoCo(model, torch.optim.AdamW(model.parameters(), lr=0.01), peer, sync_every=2, codec="fp32")
    backward(model, 0)
    next(model.parameters()).grad[0, 0] = float("nan")
    opt.step()
    backward(model, 1)
    with pytest.raises(NotFinite):
        opt.step()
    assert torch.equal(params(model), peer.theta())
    for step in range(2, 6):
        opt.zero_grad()
        backward(model, step)
        opt.step()
    assert opt.t == 2 and peer.weights == [2.0, 2.0] and bool(params(model).isfinite().all())


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize("misses", [[], ["late"]])
def test_a_wait_that_was_interrupted_is_taken_up_by_the_next_step(
    monkeypatch: pytest.MonkeyPatch, misses: list[str], follows: bool
) -> None:
    """Ctrl-C in a notebook, and the cell is run again: nothing is lost, and no step is made in between."""
    peer, model = FakePeer(), build()
    opt = DiLoCo(model, sgd(model), peer, sync_every=2, outer=OuterSpec(lr=1.0, momentum=0.0), codec="fp32")
    if follows:
        opt.follow()
    wait, interrupts = opt._outer.wait, [True]

    def interrupted(timeout_s: float) -> bool:
        if interrupts:
            interrupts.pop()
            raise KeyboardInterrupt
        return wait(timeout_s)

    monkeypatch.setattr(opt._outer, "wait", interrupted)
    peer.misses = list(misses)
    step = opt.inner.step if follows else opt.step
    for n in range(5):
        opt.zero_grad()
        backward(model, n)
        if n == 1:
            with pytest.raises(KeyboardInterrupt):
                step()
        else:
            step()
    opt.finish()
    assert sum(peer.weights[-len(peer.counted) :]) == 5.0, "each inner step is in one round"
    assert torch.equal(params(model), peer.theta())


def test_where_the_end_of_a_round_is_interrupted_the_next_round_is_as_any(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    peer, model = FakePeer(), build()
    opt = DiLoCo(model, sgd(model), peer, sync_every=2, codec="fp32")
    settle = opt._outer.settle

    def interrupted(work: Any) -> Any:
        monkeypatch.setattr(opt._outer, "settle", settle)
        opt._outer._offer = None  # as the real one does first
        raise KeyboardInterrupt

    monkeypatch.setattr(opt._outer, "settle", interrupted)
    for n in range(4):
        opt.zero_grad()
        backward(model, n)
        if n == 1:
            with pytest.raises(KeyboardInterrupt):
                opt.step()
            assert "interrupted" in caplog.text and torch.equal(params(model), peer.theta())
        else:
            opt.step()
    assert opt.t == 2 and opt.flush() is None and torch.equal(params(model), peer.theta())


def test_a_contribution_that_missed_its_round_is_offered_again_unchanged() -> None:
    peer, model = FakePeer(), build()
    opt = DiLoCo(model, sgd(model), peer, sync_every=1, outer=OuterSpec(lr=1.0, momentum=0.0))
    start = params(model)
    peer.misses = ["late", "dead"]
    backward(model, 0)
    report = opt.step()
    assert report is not None and report.t == 3 == opt.t
    assert len(peer.vectors) == 3 and all(torch.equal(vector, peer.vectors[0]) for vector in peer.vectors)
    assert torch.equal(params(model), start - peer.vectors[0])


@pytest.mark.parametrize(
    ("miss", "why"), [("refused: not finite", "an owner refused"), ("dropped", "state was replaced")], ids=str
)
def test_a_contribution_that_is_refused_or_of_unknown_fate_is_dropped_and_the_log_says_so(
    miss: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    peer, model = FakePeer(), build()
    opt = DiLoCo(model, sgd(model), peer, sync_every=2)
    start = params(model)
    peer.misses = [miss]
    for step in range(2):
        backward(model, step)
        assert opt.step() is None
    assert len(peer.vectors) == 1 and torch.equal(params(model), start)
    (line,) = caplog.messages
    assert line.startswith("up to 2 inner steps are lost") and why in line


def test_values_that_are_not_finite_are_never_offered() -> None:
    peer, model = FakePeer(), build()
    opt = DiLoCo(model, sgd(model, lr=float("inf")), peer, sync_every=1)
    start = params(model)
    backward(model, 0)
    with pytest.raises(DlcError, match="not finite"):
        opt.step()
    assert not peer.vectors and torch.equal(params(model), start)


def test_the_rounding_of_bf16_parameters_is_not_contributed() -> None:
    peer, model = FakePeer(), build().bfloat16()
    opt = DiLoCo(model, sgd(model, lr=0.0), peer, sync_every=2)
    backward(model, 0)
    opt.step()
    peer.pass_round(torch.full((peer.state.numel,), 1e-3))  # theta is no bf16 number from here on
    opt.step()
    opt.step()
    opt.step()
    assert len(peer.vectors) == 2 and all(not vector.any() for vector in peer.vectors)
    assert torch.equal(params(model), peer.theta().bfloat16().float())
    assert not torch.equal(params(model), peer.theta())


def test_a_newcomer_starts_from_the_swarms_parameters() -> None:
    peer, first, late = FakePeer(), build(0), build(1)
    DiLoCo(first, sgd(first), peer)
    peer.pass_round(torch.ones(peer.state.numel))
    swarm = peer.state

    class Joined(FakePeer):
        def open(self, channel, state, **grid):  # type: ignore[no-untyped-def]
            state.restore(swarm.export())
            return super().open(channel, state, **grid)

    opt = DiLoCo(late, sgd(late), Joined())
    assert opt.t == 1 and torch.equal(params(late), peer.theta())


def test_state_dict_brings_inner_state_and_counter_back() -> None:
    peer, model = FakePeer(), build()
    opt = DiLoCo(model, torch.optim.AdamW(model.parameters()), peer, sync_every=3)
    for step in range(2):
        backward(model, step)
        opt.step()
    state = opt.state_dict()
    other_model, other_peer = build(), FakePeer()
    other = DiLoCo(other_model, torch.optim.AdamW(other_model.parameters()), other_peer, sync_every=3)
    other.load_state_dict(state)
    assert other.inner_step == 0 and other.state_dict()["inner_step"] == 2
    moments = [s["exp_avg"] for s in other.inner.state_dict()["state"].values()]
    assert moments and all(m.any() for m in moments)
    backward(other_model, 2)
    assert other.step() is not None, "the round is due when it would have been"
    assert other_peer.weights == [1.0], "the two steps that were lost with the process are in no difference"
    for step in range(3):
        backward(other_model, step)
        assert (other.step() is None) == (step < 2)
    assert other_peer.weights == [1.0, 3.0]


def test_the_round_after_lost_steps_is_due_as_soon_also_where_it_is_saved_and_resumed_once_more() -> None:
    peer, model = FakePeer(), build()
    opt = DiLoCo(model, sgd(model), peer, sync_every=4)
    for step in range(6):
        backward(model, step)
        opt.step()
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))  # the last two are lost, of the four of this round
    backward(model, 6)
    opt.step()
    state = copy.deepcopy(opt.state_dict(outer=True))
    other, later = build(1), FakePeer(start_t=1)
    again = DiLoCo(other, sgd(other), later, sync_every=4, resume=state)
    again.load_state_dict(state)
    assert (again.inner_step, again.state_dict()["inner_step"]) == (1, 3)
    backward(other, 7)
    assert again.step() is not None and later.weights == [2.0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": "delayed", "overlap_steps": 3},
        {"overlap": "eager", "overlap_steps": 3},
        {"fragments": 2},
        {"fragments": 2, "overlap": "eager", "overlap_steps": 2},
        {"overlap": "delayed", "overlap_steps": 3, "mixing": 0.5},
    ],
    ids=str,
)
def test_steps_between_two_rounds_are_taken_up_where_the_run_stands_where_it_stood(options: dict[str, Any]) -> None:
    def made(peer: FakePeer, net: nn.Module, resume: dict[str, Any] | None = None) -> DiLoCo:
        return DiLoCo(net, sgd(net), peer, sync_every=4, codec="fp32", resume=resume, **options)

    def train(opt: DiLoCo, net: nn.Module, steps: range) -> None:
        for step in steps:
            backward(net, step)
            opt.step()
            opt.zero_grad()

    peer, model = FakePeer(), build()
    peer.slices = [2] * 9  # with overlap a round takes as many looks: one of them is on its way when it is saved
    opt = made(peer, model)
    train(opt, model, range(6))
    state = copy.deepcopy(opt.state_dict(outer=True))
    assert not torch.equal(state["local"], peer.theta())
    other_peer, other = FakePeer(start_t=state["t"]), build(1)
    again = made(other_peer, other, state)
    again.load_state_dict(state)
    taken = again.state_dict(outer=True)
    assert torch.equal(taken["local"], state["local"]) and torch.equal(params(other), state["local"])
    assert taken["steps"] == state["steps"] and taken["t"] == state["t"]
    if not options:
        train(opt, model, range(6, 12))
        train(again, other, range(6, 12))
        assert torch.equal(params(other), params(model)) and other_peer.weights == peer.weights[1:] == [4.0, 4.0]


class OnGpu(Tensor):
    """As `torch.load(file, map_location="cuda")` gives it."""

    device = torch.device("cuda")  # type: ignore[assignment]

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def cpu(self, *_: Any) -> Tensor:
        return self.as_subclass(Tensor)


def test_a_state_may_be_loaded_onto_a_gpu() -> None:
    peer, model = FakePeer(), build()
    opt = DiLoCo(model, sgd(model), peer, sync_every=4, codec="fp32")
    for step in range(6):
        backward(model, step)
        opt.step()
    state = copy.deepcopy(opt.state_dict(outer=True))
    state["local"] = state["local"].as_subclass(OnGpu)
    state["outer"] |= {name: state["outer"][name].as_subclass(OnGpu) for name in ("log", "image")}
    other = build(1)
    again = DiLoCo(other, sgd(other), FakePeer(start_t=state["t"]), sync_every=4, codec="fp32", resume=state)
    again.load_state_dict(state)
    assert Resume.of(state).log == b"the log" and again.inner_step == 2
    assert torch.equal(params(other), params(model))


def test_steps_between_two_rounds_are_lost_where_the_run_has_gone_on_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    peer, model = FakePeer(), build()
    opt = DiLoCo(model, sgd(model), peer, sync_every=4)
    for step in range(6):
        backward(model, step)
        opt.step()
    state = copy.deepcopy(opt.state_dict(outer=True))
    peer.pass_round(torch.full((peer.state.numel,), 0.5))
    other = build(1)
    again = DiLoCo(
        other, sgd(other), peer, sync_every=4, resume=state
    )  # takes the state that it brings for the swarm's
    peer.pass_round(torch.full((peer.state.numel,), 0.5))
    again.reload()
    again.load_state_dict(state)
    assert torch.equal(params(other), peer.theta()) and again.inner_step == 0
    assert "2 inner steps that were in no round when this state was saved are lost" in caplog.text
    with pytest.raises(CheckpointError, match="another model"):
        opt._outer.take_up(torch.zeros(3), peer.state.digest(), Work())


@pytest.mark.parametrize("wrong", [{"sync_every": 0}, {"weight": 0.0}, {"weight": float("nan")}])
def test_wrong_values_are_refused(wrong: dict[str, float]) -> None:
    model = build()
    with pytest.raises(UsageError):
        DiLoCo(model, sgd(model), FakePeer(), **wrong)  # type: ignore[arg-type]


def delayed(peer: FakePeer, model: nn.Module, sync_every: int = 3, lr: float = 0.05) -> DiLoCo:
    return DiLoCo(model, sgd(model, lr), peer, sync_every=sync_every, codec="fp32", overlap="delayed")


def test_with_overlap_no_step_waits_and_the_mean_is_applied_when_it_is_there() -> None:
    peer, model = FakePeer(), build()
    peer.slices = [1, 0, 2]
    opt = delayed(peer, model)
    reports = []
    for step in range(9):
        backward(model, step)
        reports.append(opt.step())
        opt.zero_grad()
    assert [report.t if report else None for report in reports] == [None] * 4 + [1, None, 2, None, None]
    assert peer.weights == [3.0, 3.0, 3.0] and opt.inner_step == 0
    last = opt.flush()
    assert last is not None and last.t == 3 and opt.flush() is None
    assert torch.equal(params(model), peer.theta())


def test_steps_made_during_a_round_stay_on_top_of_its_mean() -> None:
    peer, model, twin = FakePeer(), build(), build()
    peer.slices = [1]
    opt, inner = delayed(peer, model), sgd(twin)
    theta_0 = params(model)
    for step in range(3):
        for net, one in ((model, opt), (twin, inner)):
            backward(net, step)
            one.step()
            one.zero_grad()
    offered = theta_0 - params(twin)
    torch.testing.assert_close(peer.vectors[0], offered)
    made = params(model)
    backward(model, 3)
    assert opt.step() is None  # the round is still on its way
    opt.zero_grad()
    ahead = params(model) - made
    backward(model, 4)
    report = opt.step()  # the inner step, and then the mean of the round
    assert report is not None and report.t == 1 and opt.inner_step == 2
    fifth = -0.05 * torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    theta_1 = peer.theta()
    torch.testing.assert_close(theta_1, theta_0 - 0.7 * 1.9 * offered, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(params(model), theta_1 + ahead + fifth, rtol=1e-5, atol=1e-6)


def test_a_delayed_contribution_that_missed_its_round_is_part_of_the_next_offer() -> None:
    peer, model = FakePeer(), build()
    peer.misses, peer.slices = ["late"], [1]
    opt = delayed(peer, model, sync_every=2)
    for step in range(4):
        backward(model, step)
        opt.step()
        opt.zero_grad()
    assert peer.weights == [2.0, 4.0]
    assert opt.flush() is not None and opt.inner_step == 0 and peer.tokens == 4.0
    assert torch.equal(params(model), peer.theta())


def test_a_delayed_contribution_that_missed_its_round_goes_on_from_its_theta() -> None:
    """Also where no step was made meanwhile."""
    peer, model = FakePeer(), build()
    peer.misses = ["late"]
    opt = delayed(peer, model)
    of_others = torch.full((peer.state.numel,), 0.1)
    peer.pass_round = partial(peer.pass_round, of_others)  # type: ignore[method-assign]
    theta_0 = params(model)
    for step in range(3):
        backward(model, step)
        opt.step()
    learned = params(model) - theta_0
    assert opt.flush() is None and opt.inner_step == 3 and not torch.equal(peer.theta(), theta_0)
    torch.testing.assert_close(params(model), peer.theta() + learned, rtol=1e-5, atol=1e-6)


def test_a_delayed_round_that_takes_longer_than_a_phase_is_waited_for() -> None:
    peer, model = FakePeer(), build()
    peer.slices = [7]
    opt = delayed(peer, model, sync_every=2)
    reports = []
    for step in range(4):
        backward(model, step)
        reports.append(opt.step())
        opt.zero_grad()
    assert [report.t if report else None for report in reports] == [None, None, None, 1] and peer.weights == [2.0, 2.0]


def test_delayed_steps_that_are_not_finite_are_never_offered() -> None:
    peer, model = FakePeer(), build()
    opt = delayed(peer, model, sync_every=1)
    backward(model, 0)
    opt.step()
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(DlcError):
        opt.step()
    assert torch.equal(params(model), peer.theta()) and opt.inner_step == 0


def test_the_norm_of_a_vector_whose_squares_overflow_is_told() -> None:
    assert dlc.train.offers.norm_of(torch.full((4,), 1e30)) == pytest.approx(2e30)


def test_a_hook_changes_what_is_offered_and_nothing_else() -> None:
    peer, model = FakePeer(), build()
    peer.misses = ["late"]
    given = []

    def half(d: Tensor) -> Tensor:
        given.append(d.clone())
        return d.mul_(0.5)

    mean = OuterSpec(lr=1.0, momentum=0.0)
    opt = DiLoCo(model, sgd(model), peer, sync_every=1, outer=mean, codec="fp32", pseudo_gradient_hook=half)
    start = params(model)
    backward(model, 0)
    report = opt.step()
    assert report is not None and report.t == 2, "the first offer was late, and the second one the same"
    assert len(given) == 2 and torch.equal(given[0], given[1]) and bool(given[0].any())
    assert all(torch.equal(vector, 0.5 * given[0]) for vector in peer.vectors)
    torch.testing.assert_close(params(model), start - 0.5 * given[0])


def test_a_hook_may_return_what_would_need_a_gradient() -> None:
    """Torch warned of it at each round."""
    peer, model, scale = FakePeer(), build(), nn.Parameter(torch.tensor(0.5))
    opt = DiLoCo(model, sgd(model), peer, sync_every=1, pseudo_gradient_hook=lambda d: d * scale)
    backward(model, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step()
    assert len(peer.vectors) == 1 and not peer.vectors[0].requires_grad


def test_with_a_lossy_codec_the_residual_comes_on_top_of_the_hook() -> None:
    peer, model = FakePeer(), build()
    peer.lossy = True
    seen = []
    opt = DiLoCo(
        model, sgd(model), peer, sync_every=1, codec="int4", pseudo_gradient_hook=lambda d: seen.append(d) or -d
    )
    for step in range(2):
        before = opt.state_dict()["residual"].clone()
        backward(model, step)
        opt.step()
        opt.zero_grad()
        torch.testing.assert_close(peer.vectors[step], before - seen[step])
    assert bool(before.any())


def bad_shape(d: Tensor) -> Tensor:
    return d[:-1]


def bad_dtype(d: Tensor) -> Tensor:
    return d.double()


def bad_value(d: Tensor) -> Tensor:
    return d / 0.0


def no_tensor(d: Tensor) -> Tensor:
    return None  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("hook", "told"), [(bad_shape, "66"), (bad_dtype, "float64"), (bad_value, "NaN or Inf"), (no_tensor, "None")]
)
def test_what_a_hook_must_not_return_is_refused_and_the_swarms_model_stands(
    hook: Callable[[Tensor], Tensor], told: str
) -> None:
    peer, model = FakePeer(), build()
    opt = DiLoCo(model, sgd(model), peer, sync_every=1, pseudo_gradient_hook=hook)
    start = params(model)
    backward(model, 0)
    with pytest.raises(UsageError, match=told):
        opt.step()
    assert not peer.vectors and torch.equal(params(model), start) and not opt.inner_step


def test_how_long_a_round_may_wait_goes_with_each_offer() -> None:
    peer, model = FakePeer(), build()
    opt = DiLoCo(model, sgd(model), peer, sync_every=1, patience_s=7.0)
    for step in range(2):
        backward(model, step)
        opt.step()
    assert peer.patiences_s == [7.0, 7.0]


def test_who_was_joined_with_hold_goes_on_from_a_saved_state_as_others_do() -> None:
    first, model = FakePeer(), build()
    opt = DiLoCo(model, sgd(model), first, sync_every=1, codec="fp32")
    backward(model, 0)
    opt.step()
    saved = opt.state_dict(outer=True)
    peer, other = FakePeer(start_t=1), build(seed=1)
    peer.held = True
    assert DiLoCo(other, sgd(other), peer, resume=saved).t == 1
    assert torch.equal(params(other), params(model))
    anew = FakePeer()
    anew.held = True
    with pytest.raises(UsageError, match="this run has made none"):
        DiLoCo(model, sgd(model), anew, resume=saved)
