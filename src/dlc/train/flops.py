"""How much of a device's arithmetic the inner steps use: model FLOPs utilisation (PaLM, arXiv:2204.02311, appendix B).

    FLOPs per token = 6 N + 12 L d s      N: parameters that a token meets in matrix products, L: layers,
                                          d: width of attention, s: length
    MFU             = tokens/s * FLOPs per token / peak

6 N is two FLOPs per parameter forward and four backward; of the experts of a mixture those that a token is sent to, and
of a model that sees or hears, too, those of its text.
The second term is attention, counted without the causal mask, of the layers that have it: those of a linear attention
or a convolution take what their parameters say, whatever s. Where keys and values differ in width, d is their mean.
Recomputation (activation checkpointing) does not count: it is not the model's work.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dlc.train.model import text_config
from dlc.train.muon import parameters_of_stacked_experts

PEAKS_TFLOPS: tuple[tuple[str, float], ...] = (
    ("B200", 2250.0),
    ("H100 PCIe|H800 PCIe", 756.0),
    ("H100 NVL|H200 NVL", 835.0),
    ("H20", 148.0),
    ("H100|H200|H800|GH200", 989.4),
    ("A100|A800", 312.0),
    ("A40", 149.7),
    ("A30", 165.0),
    ("A10", 125.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("RTX 6000 Ada", 364.2),
    ("RTX 5090", 209.5),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
    ("V100-PCIE", 112.0),
    ("V100", 125.0),
    ("T4", 65.0),
)
"""Words of a CUDA device's name, and its peak for 16-bit matrix products with fp32 sums, without sparsity, by the
vendor's data sheets; the first that fits counts."""
OTHERS = re.compile(r"\b(MIG|Laptop|Max-Q|Ti|SUPER|D)\b")
"""In the names of parts and of relatives of these, which have another peak."""


EXPERTS = "experts"
"""The module of transformers that holds those of a layer among which a token is sent to some, where each is a module of
its own; of stacks the class tells (`muon`)."""
SHARED = "shared"
"""In the names of those to which all tokens are sent."""
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Names of their number in a config."""
MET_COUNTS = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k")
"""And of how many a token is sent to."""
NO_ATTENTION = ("linear_attention", "conv", "mamba", "moe", "recurrent")
"""In the `layer_types` of a config, and what older versions call it: layers whose work does not grow with s."""


@dataclass(frozen=True)
class Utilisation:
    """From tokens/s to MFU."""

    flops_per_token: float = 0.0
    peak_flops: float | None = None
    """Of the device, per second. None: not known, so nothing is reported."""

    def mfu(self, tokens_per_s: float) -> float | None:
        """In [0, 1]; None where the device's peak is not known, or the arithmetic is not 16-bit."""
        return tokens_per_s * self.flops_per_token / self.peak_flops if self.peak_flops else None


def flops_per_token(model: nn.Module, seq_len: int) -> float:
    """Of one training step, forward and backward. A model without a transformers config counts without attention."""
    config = getattr(model, "config", None)
    text = text_config(config)
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    body: nn.Module = model if text is config else getattr(model, "get_decoder", lambda: model)()
    tables = {id(m.weight): m.weight for m in body.modules() if isinstance(m, nn.Embedding)}
    params = {id(p): p for p in body.parameters()}
    if head is not None:
        tables.pop(id(head.weight), None)  # tied: looked up once, and multiplied once
        params |= {id(p): p for p in head.parameters()}
    layers = _layers(text)
    met = statistics.fmean(map(_experts_met, layers)) if layers else 1.0
    routed = _routed(model)
    n = sum(p.numel() * (met if key in routed else 1.0) for key, p in params.items())
    n -= sum(t.numel() for t in tables.values())
    return 6.0 * n + 12.0 * sum(map(_attention_width, _attending(text, layers))) * seq_len


def _routed(model: nn.Module) -> set[int]:
    """Ids of the parameters of experts among which a token is sent to some."""
    stacked = {id(p) for p in parameters_of_stacked_experts(model)}
    named = model.named_parameters()
    if stacked:
        return {id(p) for name, p in named if id(p) in stacked and SHARED not in name}
    return {id(p) for name, p in named if EXPERTS in name.split(".")}


def _layers(config: Any) -> list[Any]:
    """A config for each layer. Of a model whose layers differ the whole one refuses to tell in what, and raises."""
    if getattr(config, "is_heterogeneous", False):
        return list(config.per_layer_config)
    return [config] * getattr(config, "num_hidden_layers", 0)


def _attending(config: Any, layers: list[Any]) -> list[Any]:
    """Those with attention, as far as the config tells; it does not where `layers` differ in more."""
    if getattr(config, "is_heterogeneous", False):
        return layers
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    return [layer for i, layer in enumerate(layers) if i >= len(kinds) or kinds[i] not in NO_ATTENTION]


def _attention_width(layer: Any) -> float:
    heads: int = getattr(layer, "num_attention_heads", 0)
    plain, turned, values = (
        getattr(layer, name, None) or 0 for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    if plain and values:  # latent attention, as of DeepSeek, whose head_dim is `turned` alone
        return heads * (plain + turned + values) / 2
    width: int = heads * (getattr(layer, "head_dim", None) or 0) or getattr(layer, "hidden_size", 0)
    return width


def _experts_met(layer: Any) -> float:
    """The part of a layer's experts that a token is sent to; 1 where there are none."""
    of = _count(layer, EXPERT_COUNTS)
    return (_count(layer, MET_COUNTS) or of) / of if of else 1.0


def _count(layer: Any, names: Sequence[str]) -> int:
    """What the config tells by one of these names, or its `ffn_config`, as DBRX has one; 0: nothing."""
    told = (getattr(config, name, None) for config in (layer, getattr(layer, "ffn_config", None)) for name in names)
    return next((count for count in told if type(count) is int and count > 0), 0)


def peak_flops(device: torch.device) -> float | None:
    """16-bit matrix products of a CUDA device per second; None: a CPU, or a device that is not in the table."""
    return peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_of(name: str) -> float | None:
    """The same by the device's name, such as "NVIDIA A100-SXM4-80GB"."""
    if OTHERS.search(name):
        return None
    for words, tflops in PEAKS_TFLOPS:
        if re.search(rf"\b({words})\b", name):
            return tflops * 1e12
    return None
