import math

import pytest
import torch
from torch import Tensor, nn

from dlc.errors import CheckpointError, ConfigError, UsageError
from dlc.train.inner import InnerLoop, build_optimizer, causal_loss, evaluate, learning_rate, param_groups


class Tiny(nn.Module):
    """A causal model that returns logits: embedding, one mixing of the past, head."""

    def __init__(self, vocab: int = 17, width: int = 16, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed, self.norm, self.head = nn.Embedding(vocab, width), nn.LayerNorm(width), nn.Linear(width, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        past = x.cumsum(1) / torch.arange(1, ids.shape[1] + 1).view(1, -1, 1)
        logits: Tensor = self.head(self.norm(x + past))
        return logits


def ids(seed: int, b: int = 4, s: int = 9, vocab: int = 17) -> Tensor:
    return torch.randint(vocab, (b, s), generator=torch.Generator().manual_seed(seed))


def loop(model: nn.Module, name: str = "adamw", lr: float = 1e-2, **kwargs: object) -> InnerLoop:
    return InnerLoop(model, build_optimizer(name, model, lr=lr, betas=(0.9, 0.95), weight_decay=0.0), **kwargs)  # type: ignore[arg-type]


def params(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_schedule() -> None:
    def rate(step: int) -> float:
        return learning_rate(step, peak=2.0, warmup_steps=10, total_steps=110, min_ratio=0.1)

    assert rate(0) == pytest.approx(0.2) and rate(9) == rate(10) == 2.0
    assert rate(60) == pytest.approx(2.0 * 0.55)
    assert rate(110) == rate(10**9) == pytest.approx(0.2)
    assert all(rate(k) >= rate(k + 1) for k in range(10, 120))
    assert learning_rate(0, 1.0, 0, 10, 0.0) == 1.0
    assert learning_rate(5, 1.0, 5, 5, 0.3) == pytest.approx(0.3)
    assert learning_rate(10**9, 1.0, 5, 0, 0.3) == 1.0 and learning_rate(0, 1.0, 5, 0, 0.3) == pytest.approx(0.2)


def test_vectors_do_not_decay_and_frozen_ones_are_left_out() -> None:
    model = Tiny()
    model.embed.weight.requires_grad_(False)
    decay, rest = param_groups(model, 0.1)
    assert decay["weight_decay"] == 0.1 and [p.dim() for p in decay["params"]] == [2]
    assert rest["weight_decay"] == 0.0 and [p.dim() for p in rest["params"]] == [1, 1, 1]


def test_overfits_a_tiny_batch() -> None:
    model = Tiny()
    inner = loop(model, lr=3e-2, clip_norm=1.0)
    batch = ids(1, b=2)
    first = inner.train_step([batch], 0)
    for step in range(1, 150):
        last = inner.train_step([batch], step)
    assert first.loss > 2.0 and last.loss < 0.1
    assert last.tokens == 18 and last.applied


@pytest.mark.parametrize("cuts", [(4, 4), (1, 7), (2, 2, 4)])
def test_accumulation_equals_the_joint_batch(cuts: tuple[int, ...]) -> None:
    one, many, batch = Tiny(), Tiny(), ids(2, b=8)
    a = loop(one, "sgd", 0.5).train_step([batch], 0)
    b = loop(many, "sgd", 0.5).train_step(list(batch.split(cuts)), 0)
    torch.testing.assert_close(params(one), params(many), rtol=1e-5, atol=1e-6)
    assert (a.tokens, a.loss, a.grad_norm) == pytest.approx((b.tokens, b.loss, b.grad_norm), rel=1e-5)


def test_schedule_is_keyed_to_the_global_step() -> None:
    inner = loop(Tiny(), schedule=lambda step: step / 100)
    inner.train_step([ids(1)], 7)
    assert {g["lr"] for g in inner.optimizer.param_groups} == {0.07}
    inner.train_step([ids(1)], 3)
    assert {g["lr"] for g in inner.optimizer.param_groups} == {0.03}


def test_clipping_bounds_the_step_and_reports_the_norm_before() -> None:
    model = Tiny()
    before = params(model)
    result = loop(model, "sgd", lr=1.0, clip_norm=0.01).train_step([ids(3)], 0)
    assert result.grad_norm > 0.02
    assert float((params(model) - before).norm()) == pytest.approx(0.01, rel=1e-2)


def test_a_gradient_that_is_not_finite_is_not_applied() -> None:
    model = Tiny()
    inner = loop(model)
    before = params(model)
    handle = model.head.register_forward_hook(lambda *a: a[2] * math.nan)
    result = inner.train_step([ids(1)], 0)
    assert not result.applied and math.isnan(result.grad_norm)
    assert torch.equal(params(model), before)
    handle.remove()
    assert inner.train_step([ids(1)], 1).applied and bool(params(model).isfinite().all())


def test_optimizer_state_survives_a_restart() -> None:
    a = loop(Tiny())
    a.train_step([ids(1)], 0)
    twin = Tiny()
    twin.load_state_dict(a.model.state_dict())
    b = loop(twin)
    b.load(a.tensors())
    a.train_step([ids(2)], 1)
    b.train_step([ids(2)], 1)
    assert torch.equal(params(a.model), params(b.model))
    with pytest.raises(CheckpointError):
        loop(Tiny(width=8)).load(a.tensors())


def test_evaluate_is_the_mean_per_target_and_changes_nothing() -> None:
    model = Tiny()
    model.train()
    batches = [ids(1, b=4), ids(2, b=1, s=5)]
    before = params(model)
    loss = evaluate(model, batches)
    assert loss == evaluate(model, batches) and model.training and torch.equal(params(model), before)
    with torch.no_grad():
        parts = [float(causal_loss(model, b)) for b in batches]
    assert loss == pytest.approx((parts[0] * 32 + parts[1] * 4) / 36, rel=1e-6)


def test_a_uniform_model_has_the_entropy_of_its_vocabulary() -> None:
    model = Tiny()
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    assert evaluate(model, [ids(1)]) == pytest.approx(math.log(17))


def test_wrong_names_and_empty_batches() -> None:
    with pytest.raises(ConfigError, match="adamw"):
        loop(Tiny(), "adam")
    with pytest.raises(ConfigError, match="fp8"):
        loop(Tiny(), precision="fp8")
    with pytest.raises(UsageError):
        loop(Tiny()).train_step([], 0)
    with pytest.raises(UsageError):
        evaluate(Tiny(), [])
