import dataclasses
import math
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dlc.errors import CheckpointError, ConfigError, UsageError
from dlc.runspec import InnerSpec, RunSpec
from dlc.train import muon
from dlc.train.flops import Utilisation, flops_per_token, peak_flops, peak_of
from dlc.train.inner import InnerLoop, StepResult, build_optimizer, causal_loss, evaluate, learning_rate, param_groups
from dlc.train.model import build_model, config_of, positions_in, positions_of
from dlc.train.muon import hidden_matrices, stacked_matrices
from dlc.train.setup import checkpoint_activations, inner_loop_of


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


def llama(**changes: object) -> nn.Module:
    config = {"model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    return build_model(config | {"max_position_embeddings": 32, "tie_word_embeddings": True} | changes, 0)


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


def test_of_a_gradient_the_mean_loss_is_told_before_the_last_backward() -> None:
    inner, told = loop(Tiny()), list[tuple[float, float]]()
    head: nn.Parameter = inner.model.head.weight  # type: ignore[union-attr,assignment]

    def at_last(loss: Tensor) -> None:
        told.append((float(loss), 0.0 if head.grad is None else float(head.grad.norm())))

    assert inner.gradient([ids(1), ids(2, b=2)], at_last) == pytest.approx(told[0][0])
    whole = head.grad.clone()  # type: ignore[union-attr]
    assert len(told) == 1 and 0.0 < told[0][1] != float(whole.norm())
    assert told[0][0] == pytest.approx(float(causal_loss(inner.model, torch.cat((ids(1), ids(2, b=2)))).detach()))
    inner.gradient([ids(1), ids(2, b=2)])
    assert torch.equal(head.grad, whole), "that of before is not in it"  # type: ignore[arg-type]


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
    assert not result.applied and math.isnan(result.grad_norm) and result.diverged
    assert StepResult(math.inf, 1, 0.0).diverged and not StepResult(1.0, 1, 0.0).diverged
    assert torch.equal(params(model), before)
    handle.remove()
    assert inner.train_step([ids(1)], 1).applied and bool(params(model).isfinite().all())


def test_fp16_trains_with_a_scaled_loss() -> None:
    model, twin = Tiny(), Tiny()
    half, full = loop(model, lr=3e-2, precision="fp16"), loop(twin, lr=3e-2)
    losses = [(half.train_step([ids(1)], step), full.train_step([ids(1)], step)) for step in range(60)]
    assert losses[0][0].loss != losses[0][1].loss, "the products are fp16's"
    assert all(a.applied for a, _ in losses) and losses[-1][0].loss < losses[0][0].loss - 0.5
    assert losses[0][0].grad_norm == pytest.approx(losses[0][1].grad_norm, rel=1e-2), "of the loss itself"
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_fp16_makes_a_step_again_whose_scale_is_too_large() -> None:
    """It was left out, and counted as trained: its tokens gave weight to a model that had not moved."""
    model = Tiny()
    inner = loop(model, precision="fp16")
    inner.load(inner.tensors() | {"scaler.scale": torch.tensor(2.0**120)})
    before = params(model)
    result = inner.train_step([ids(1)], 0)
    assert result.applied and not result.diverged and not torch.equal(params(model), before)
    assert 1.0 <= float(inner.tensors()["scaler.scale"]) < 2.0**119
    other = Tiny()
    usual = loop(other, precision="fp16")
    assert usual.train_step([ids(1)], 0).loss == result.loss
    torch.testing.assert_close(params(model), params(other), rtol=0, atol=2e-3)
    twin = loop(Tiny(), precision="fp16")
    twin.load(inner.tensors())
    for name in ("scaler.scale", "scaler.growth_tracker"):
        assert twin.tensors()[name] == inner.tensors()[name] != 0


def test_fp16_tries_a_larger_scale_as_long_after_an_overflow_as_ever() -> None:
    """What had been counted before stood: the scale that was too large came back with one of the next steps."""
    inner = loop(Tiny(), precision="fp16")
    scaler = {"scaler.scale": torch.tensor(2.0**120), "scaler.growth_tracker": torch.tensor(1998.0)}
    inner.load(inner.tensors() | scaler)
    assert inner.train_step([ids(1)], 0).applied
    fits = inner.tensors()["scaler.scale"]
    assert inner.train_step([ids(1)], 1).applied
    assert (inner.tensors()["scaler.scale"], inner.tensors()["scaler.growth_tracker"]) == (fits, 2.0)


def test_fp16_at_its_least_scale_diverges_like_any_other() -> None:
    inner = loop(Tiny(), precision="fp16")
    inner.load(inner.tensors() | {"scaler.scale": torch.tensor(4.0)})
    head: nn.Parameter = inner.model.head.weight  # type: ignore[union-attr,assignment]
    scales = list[float]()
    head.register_hook(lambda grad: (scales.append(float(inner.tensors()["scaler.scale"])), grad * math.inf)[1])
    assert [inner.train_step([ids(1)], k).diverged for k in range(2)] == [True, True]
    assert scales == [4.0, 2.0, 1.0, 1.0]


def test_fp16_goes_on_after_a_loss_that_was_not_finite() -> None:
    inner = loop(Tiny(), precision="fp16")
    head: nn.Parameter = inner.model.head.weight  # type: ignore[union-attr,assignment]
    before = head.detach().clone()
    head.data.fill_(math.nan)
    calls = list[int]()
    handle = inner.model.register_forward_hook(lambda *_: calls.append(1))
    assert inner.train_step([ids(1)], 0).diverged and len(calls) == 1, "no scale would help"
    handle.remove()
    head.data.copy_(before)
    assert inner.train_step([ids(1)], 1).applied


needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="Muon came with torch 2.9")


@needs_muon
def test_muon_moves_the_hidden_matrices_and_adamw_the_rest() -> None:
    def mlp() -> nn.Module:
        model = Tiny()
        model.head = nn.Sequential(nn.Linear(16, 16), model.head)
        return model

    torch.manual_seed(1)
    model = mlp()
    twin = mlp()
    twin.load_state_dict(model.state_dict())
    inner = InnerLoop(model, build_optimizer("muon", model, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1))
    hidden = hidden_matrices(twin)
    assert [tuple(p.shape) for p in hidden] == [(16, 16), (17, 16)]  # a plain module has no head that is known as one
    rest = [p for p in twin.parameters() if all(p is not h for h in hidden)]
    matrices = torch.optim.Muon(hidden, lr=1e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(
        [{"params": rest[:1], "weight_decay": 0.1}, {"params": rest[1:], "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.9, 0.95),
    )
    for step in range(5):
        inner.train_step([ids(step)], step)
        causal_loss(twin, ids(step)).backward()
        for optimizer in (matrices, adamw):
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(params(model), params(twin))


def test_muon_leaves_embeddings_and_head_of_a_transformers_model_to_adamw() -> None:
    for tied in (True, False):
        model = llama(tie_word_embeddings=tied)
        named = {id(p): name for name, p in model.named_parameters()}
        names = {named[id(p)] for p in hidden_matrices(model)}
        assert len(names) == 2 * 7 and all(".layers." in name and "norm" not in name for name in names)
    with pytest.raises(ConfigError, match="no hidden matrices"):
        build_optimizer("muon", nn.Embedding(3, 3), lr=0.1, betas=(0.9, 0.9), weight_decay=0.0)


def test_muon_is_refused_where_torch_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(ConfigError, match=r'"muon" needs torch 2\.9 or newer, and this is .*: update torch'):
        build_optimizer("muon", nn.Sequential(nn.Linear(3, 3)), lr=0.1, betas=(0.9, 0.9), weight_decay=0.0)


def mixture(kind: str) -> nn.Module:
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    count = "num_experts" if kind == "qwen3_moe" else "num_local_experts"
    experts = {count: 4, "num_experts_per_tok": 2, "num_key_value_heads": 2, "intermediate_size": 24}
    wide = {"moe_intermediate_size": 24} if kind == "qwen3_moe" else {}
    return build_model({"model_type": kind, **sizes, **experts, **wide}, 0)


@needs_muon
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_muon_takes_the_matrices_of_experts_and_not_their_biases(kind: str) -> None:
    model = mixture(kind)
    if all(p.ndim < 3 for p in model.parameters()):
        pytest.skip("in this transformers each expert has matrices of its own")
    named = {id(p): name for name, p in model.named_parameters()}
    stacked = {named[id(p)].split(".", 2)[2] for p in stacked_matrices(model)}
    assert stacked == {f"{i}.mlp.experts.{name}" for i in range(2) for name in ("gate_up_proj", "down_proj")}
    assert not any("bias" in named[id(p)] or "experts" in named[id(p)] for p in hidden_matrices(model))
    optimizer = build_optimizer("muon", model, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    listed = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(listed) == sorted(named)


@needs_muon
@pytest.mark.parametrize("shape", [(5, 12, 20), (3, 20, 12)])
@pytest.mark.parametrize("at_once", [1, 2 * 12 * 20, 1 << 26])
def test_each_matrix_of_a_stack_moves_as_muon_moves_it(
    shape: tuple[int, ...], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(muon, "ELEMENTS_AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(1)
    stack = nn.Parameter(torch.randn(shape, generator=generator))
    alone = [nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    a = muon.StackedMuon([stack], lr=1e-2, weight_decay=0.1, momentum=0.95)
    b = torch.optim.Muon(alone, lr=1e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        stack.grad = torch.randn(shape, generator=generator)
        stack.grad[1] = 0.0  # an expert that no token was sent to
        for matrix, grad in zip(alone, stack.grad, strict=True):
            matrix.grad = grad.clone()
        before = stack.detach().clone()
        a.step()
        b.step()
        moved = (stack.detach() - before).norm()
        assert (stack.detach() - torch.stack([p.detach() for p in alone])).norm() < 0.02 * moved  # sums in bf16


@needs_muon
def test_each_expert_of_dbrx_moves_as_muon_moves_it() -> None:
    """They are below each other in a 2-D parameter, which was taken for one matrix."""
    model = build_model({"model_type": "dbrx", **MIXTURES["dbrx"](2)}, 0)
    named = dict(model.named_parameters())
    stacks = {name: p for name, p in named.items() if name.rpartition(".")[2] in ("w1", "v1", "w2")}
    if {p.dim() for p in stacks.values()} != {2}:
        pytest.skip("in this transformers they are stacked otherwise")
    a = build_optimizer("muon", model, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    assert sorted(id(p) for group in a.param_groups for p in group["params"]) == sorted(map(id, named.values()))
    alone = {name: [nn.Parameter(matrix.clone()) for matrix in p.detach().split(24)] for name, p in stacks.items()}
    matrices = [matrix for many in alone.values() for matrix in many]
    b = torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        for name, p in stacks.items():
            p.grad = torch.randn(p.shape, generator=generator)
            for matrix, grad in zip(alone[name], p.grad.split(24), strict=True):
                matrix.grad = grad.clone()
        before = {name: p.detach().clone() for name, p in stacks.items()}
        a.step()
        b.step()
        for name, p in stacks.items():
            moved = (p.detach() - before[name]).norm()
            assert (p.detach() - torch.cat([m.detach() for m in alone[name]])).norm() < 0.02 * moved  # sums in bf16


@pytest.mark.parametrize("tied", [True, False])
def test_flops_per_token_are_counted_by_palm(tied: bool) -> None:
    layer = 4 * 16 * 16 + 3 * 16 * 24 + 2 * 16
    n = 2 * layer + 16 + 32 * 16  # the head's table is multiplied, the other one, if any, only looked up
    assert flops_per_token(llama(tie_word_embeddings=tied), 8) == 6 * n + 12 * 2 * 16 * 8
    assert flops_per_token(Tiny(), 8) == 6 * (2 * 16 + 17 * 16 + 17)


SMALL = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 32}
MIXTURES: dict[str, Any] = {
    "mixtral": lambda met: SMALL | {"num_local_experts": 4, "num_experts_per_tok": met},
    "qwen3_moe": lambda met: SMALL | {"num_experts": 4, "num_experts_per_tok": met, "moe_intermediate_size": 24},
    "gemma4_text": lambda met: (
        SMALL
        | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": met, "moe_intermediate_size": 24}
        | {"head_dim": 8, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 32}
    ),
    "aria_text": lambda met: SMALL | {"moe_num_experts": 4, "moe_topk": met, "pad_token_id": 0},
    "dbrx": lambda met: (
        {"d_model": 16, "n_heads": 2, "n_layers": 2, "vocab_size": 32, "max_seq_len": 32}
        | {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}}
        | {"ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": met}}
    ),
}
"""Configs of transformers, in which a token is sent to so many of four experts."""


@pytest.mark.parametrize("kind", MIXTURES)
def test_of_a_mixture_the_experts_count_that_a_token_is_sent_to(kind: str) -> None:
    """Of some kinds all counted, and the MFU that was told was some times too high."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        pytest.skip(f"this transformers has no {kind}")

    def flops(met: int) -> float:
        return flops_per_token(build_model({"model_type": kind, **MIXTURES[kind](met)}, 0), 8)

    assert flops(2) - flops(1) == 6 * 2 * 3 * 16 * 24, "one more expert of three matrices in each layer"


def test_experts_that_are_stacked_under_another_name_count_likewise() -> None:
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "kv_channels": 8}
    kind = {"model_type": "jetmoe", "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 1}
    model = build_model({**sizes, **kind}, 0)
    stacked = sum(p.numel() for p in model.parameters() if p.dim() == 3)
    met = sum(p.numel() for p in model.parameters()) - stacked + stacked // 4
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert stacked and flops_per_token(model, 8) == 6 * (met - 32 * 16 * (not tied)) + 12 * 2 * 16 * 8


def test_layers_that_differ_count_each_by_its_own_width() -> None:
    class Layer:
        num_attention_heads, hidden_size = 2, 16

        def __init__(self, head_dim: int) -> None:
            self.head_dim = head_dim

    class Config:
        """As one of transformers, which tells nothing of what differs."""

        num_hidden_layers, is_heterogeneous = 3, True
        per_layer_config = (Layer(8), Layer(8), Layer(64))

        @property
        def head_dim(self) -> int:
            raise RuntimeError("'head_dim' is a per-layer attribute and may vary across layers")

    model = Tiny()
    n = flops_per_token(model, 8)
    model.config = Config()
    assert flops_per_token(model, 8) == n + 12 * 2 * (8 + 8 + 64) * 8


def test_latent_attention_has_the_width_of_its_keys_and_values() -> None:
    """It was that of the part of the keys which is rotated, and the MFU too low."""
    heads = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "q_lora_rank": 8, "kv_lora_rank": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    kind = {"model_type": "deepseek_v3", "first_k_dense_replace": 2}
    model = build_model(SMALL | kind | heads | experts, 0)
    assert flops_per_token(model, 9) - flops_per_token(model, 8) == 6 * 2 * 2 * (8 + 4 + 6), "of two layers and heads"


def test_layers_without_attention_do_not_count_as_if_they_had_it() -> None:
    """Those of linear attention did, as most of a Qwen3-Next are, and the MFU was too high."""

    class Config:
        num_hidden_layers, num_attention_heads, head_dim = 4, 2, 8
        layer_types = ("linear_attention", "conv", "sliding_attention", "full_attention")

    model = Tiny()
    n = flops_per_token(model, 8)
    model.config = Config()
    assert flops_per_token(model, 8) == n + 12 * 2 * (2 * 8) * 8


def test_of_a_model_that_sees_too_what_a_token_of_text_meets_counts() -> None:
    """It counted without attention, and with all that looks at images."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if not {"gemma3", "gemma3_text"} <= MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys():
        pytest.skip("this transformers has no gemma3")
    eyes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    images = {"vision_config": eyes | {"image_size": 8, "patch_size": 4}, "mm_tokens_per_image": 4}
    text = SMALL | {"head_dim": 8}
    sees = build_model({"model_type": "gemma3", "text_config": text, **images}, 0)
    assert flops_per_token(sees, 9) == flops_per_token(build_model({"model_type": "gemma3_text", **text}, 0), 9)
    assert positions_of(sees) == positions_in(config_of({"model_type": "gemma3", "text_config": text})) == 32


def test_mfu_is_told_where_the_peak_is_known() -> None:
    peaks = {
        "NVIDIA H200": 989.4e12,
        "NVIDIA H100 80GB HBM3": 989.4e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA A10": 125e12,
        "NVIDIA L4": 121e12,
        "NVIDIA L40S": 362e12,
        "NVIDIA GeForce RTX 4090": 165.2e12,
        "NVIDIA A10G": None,
        "NVIDIA H200 NVL": 835e12,
        "Tesla V100-SXM2-16GB": 125e12,
        "Tesla V100-PCIE-16GB": 112e12,
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb": None,
        "NVIDIA GeForce RTX 4090 Laptop GPU": None,
        "NVIDIA GeForce RTX 4090 D": None,
        "NVIDIA GeForce RTX 3090 Ti": None,
        "GeForce GTX 1080": None,
    }
    assert {name: peak_of(name) for name in peaks} == peaks
    assert Utilisation(6e9, 3e14).mfu(25_000.0) == pytest.approx(0.5)
    assert Utilisation(6e9, None).mfu(25_000.0) is None
    assert peak_flops(torch.device("cpu")) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"lr": 0.02},
        {"betas": (0.5, 0.6)},
        {"weight_decay": 0.7},
        {"clip_norm": 0.05},
        {"warmup_steps": 3},
        {"total_steps": 5},
        {"min_lr_ratio": 0.8},
        {"optimizer": "sgd"},
    ],
)
def test_a_run_has_the_inner_steps_that_its_options_name(changed: dict[str, Any]) -> None:
    """As a loop that is put together by hand; an option that is dropped on the way to it trains on, unnoticed."""
    inner = InnerSpec(**{"warmup_steps": 1, "total_steps": 4} | changed)
    ours, by_hand = Tiny(), Tiny()
    made = inner_loop_of(RunSpec(inner=inner), ours, torch.device("cpu"))
    groups = param_groups(by_hand, inner.weight_decay)
    sgd, adamw = partial(torch.optim.SGD, groups, lr=1.0), partial(torch.optim.AdamW, groups, betas=inner.betas)
    schedule = partial(
        learning_rate,
        peak=inner.lr,
        warmup_steps=inner.warmup_steps,
        total_steps=inner.total_steps,
        min_ratio=inner.min_lr_ratio,
    )
    hand = InnerLoop(by_hand, sgd() if inner.optimizer == "sgd" else adamw(), schedule, inner.clip_norm)
    for step in range(5):
        assert made.train_step([ids(step)], step) == hand.train_step([ids(step)], step)
    assert torch.equal(params(ours), params(by_hand))


def test_a_run_has_the_arithmetic_that_its_options_name(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[nn.Module] = []
    monkeypatch.setattr("dlc.train.inner._compiled", lambda model, device: compiled.append(model) or model)
    cpu, losses = torch.device("cpu"), dict[str, float]()
    for precision in ("auto", "fp32", "bf16", "fp16"):
        made = inner_loop_of(RunSpec(precision=precision), Tiny(), cpu)
        losses[precision] = made.train_step([ids(0)], 0).loss
    assert losses["auto"] == losses["fp32"] and len(set(losses.values())) == 3 and not compiled
    model = Tiny()
    inner_loop_of(RunSpec(inner=InnerSpec(compile=True)), model, cpu)
    assert compiled == [model]


@needs_muon
def test_muon_has_the_momentum_that_a_run_names() -> None:
    spec = RunSpec(inner=InnerSpec(optimizer="muon", momentum=0.6))
    made = inner_loop_of(spec, llama(), torch.device("cpu"))
    assert {group["momentum"] for group in made.optimizer.param_groups if "momentum" in group} == {0.6}


def test_checkpointed_layers_are_computed_again_and_give_the_same_step() -> None:
    plain, saving = llama(), llama()
    saving.load_state_dict(plain.state_dict())
    spec = RunSpec(inner=InnerSpec(warmup_steps=0))
    a = inner_loop_of(spec, plain, torch.device("cpu"))
    b = inner_loop_of(dataclasses.replace(spec, inner=InnerSpec(warmup_steps=0, checkpointing=True)), saving, a.device)
    calls = {"plain": 0, "saving": 0}
    for name, model in (("plain", plain), ("saving", saving)):

        def count(*_: object, name: str = name) -> None:
            calls[name] += 1

        model.model.layers[0].mlp.register_forward_pre_hook(count)  # type: ignore[union-attr,index]
    for step in range(3):
        assert a.train_step([ids(step, vocab=32)], step) == b.train_step([ids(step, vocab=32)], step)
    assert torch.equal(params(plain), params(saving)) and calls == {"plain": 3, "saving": 6}
    with pytest.raises(ConfigError, match=r"inner\.checkpointing = false"):
        checkpoint_activations(Tiny())


class Casts(TorchDispatchMode):
    """Sees what autocast makes of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and isinstance(args[0], nn.Parameter):
            self.made.append(weakref.ref(out))
        return out


def test_checkpointed_layers_leave_no_weights_in_16_bits_behind() -> None:
    """With FSDP2 that would be the whole model on each GPU."""
    model, held = llama(), list[int]()
    spec = RunSpec(precision="bf16", inner=InnerSpec(checkpointing=True))
    inner = inner_loop_of(spec, model, torch.device("cpu"))
    with Casts() as casts:
        model.lm_head.register_forward_pre_hook(  # type: ignore[union-attr]
            lambda *_: held.append(sum(made() is not None for made in casts.made))
        )
        inner.train_step([ids(0, vocab=32)], 0)
    assert len(casts.made) > 14 and held == [0]


def test_a_compiled_loop_does_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through dynamo, which traces; without a compiler behind it, which takes a minute."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    plain, traced = llama(), llama()
    traced.load_state_dict(plain.state_dict())
    a, b = loop(plain), loop(traced, compiled=True)
    for step in range(3):
        assert a.train_step([ids(step, vocab=32)], step) == b.train_step([ids(step, vocab=32)], step)
    assert torch.equal(params(plain), params(traced)) and a.tensors().keys() == b.tensors().keys()


def test_a_host_that_cannot_compile_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> object:
        raise RuntimeError("no C++ compiler found\nlong trace")

    monkeypatch.setattr(torch, "compile", fails)
    with pytest.raises(ConfigError, match=r"no C\+\+ compiler found\).*inner\.compile = false"):
        loop(Tiny(), compiled=True)


@needs_muon
def test_a_mixture_goes_on_with_muon_after_a_restart() -> None:
    a, twin = loop(mixture("mixtral"), "muon"), mixture("mixtral")
    a.train_step([ids(1)], 0)
    twin.load_state_dict(a.model.state_dict())
    b = loop(twin, "muon")
    b.load(a.tensors())
    a.train_step([ids(2)], 1)
    b.train_step([ids(2)], 1)
    assert torch.equal(params(a.model), params(b.model))


@needs_muon
def test_a_state_that_says_nothing_of_matrices_in_rows_is_of_an_optimizer_that_has_none() -> None:
    """As one does that was saved before there were such groups."""
    a, b = (build_optimizer("muon", mixture("mixtral"), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1) for _ in "ab")
    old = a.state_dict()
    for group in old["param_groups"]:
        group.pop("matrices", None)
    b.load_state_dict(old)
    for optimizer in (a, b):
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            p.grad = torch.ones_like(p)
        optimizer.step()
    pairs = zip(a.param_groups, b.param_groups, strict=True)
    assert all(torch.equal(p, q) for one, other in pairs for p, q in zip(one["params"], other["params"], strict=True))


@pytest.mark.parametrize("name", ["adamw", pytest.param("muon", marks=needs_muon), "sgd"])
def test_optimizer_state_survives_a_restart(name: str) -> None:
    a = loop(Tiny(), name)
    a.train_step([ids(1)], 0)
    twin = Tiny()
    twin.load_state_dict(a.model.state_dict())
    b = loop(twin, name)
    b.load(a.tensors())
    a.train_step([ids(2)], 1)
    b.train_step([ids(2)], 1)
    assert torch.equal(params(a.model), params(b.model))
    if a.tensors():
        with pytest.raises(CheckpointError):
            loop(Tiny(width=8), name).load(a.tensors())
        with pytest.raises(CheckpointError, match="another model"):
            b.load(a.tensors() | {f"{len(list(twin.parameters()))}.step": torch.tensor(1.0)})


def test_evaluate_is_the_mean_per_target_and_changes_nothing() -> None:
    model = Tiny()
    model.train()
    batches = [ids(1, b=4), ids(2, b=1, s=5)]
    before = params(model)
    loss = evaluate(model, batches)
    assert loss == evaluate(model, batches) and model.training and torch.equal(params(model), before)
    assert loss == evaluate(model.eval(), batches) and not model.training
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
