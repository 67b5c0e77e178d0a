"""From a RunSpec to the parts of an inner loop, on the device of this host."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dlc.errors import ConfigError, DataError, UsageError, first_line
from dlc.runspec import BYTES, RunSpec
from dlc.train.flops import Utilisation, flops_per_token, peak_flops
from dlc.train.inner import InnerLoop, autocast_dtype, build_optimizer, learning_rate
from dlc.train.model import build_model, load_model, positions_in, positions_of, text_config, vocab_of
from dlc.train.shelf import has_tokenizer
from dlc.train.tokens import Tokenizer, load_tokenizer

log = logging.getLogger(__name__)

BYTE_ROWS_MAX = 1024
"""No model of bytes has a vocabulary that is larger."""
SAME_WORDS_MIN = 0.9
"""Of the smaller one's tokens: some may have been added to a model's tokenizer, or taken from it."""
LOOKED_AT = 8
"""Tokens of which the first half is to be the same, whatever the second is."""
FROM_LATER_MAX = 1e-4
"""Of the greatest logit: sums in another order differ by some 1e-6, and an encoder's words by 1e-3 and more."""


def model_of(spec: RunSpec) -> nn.Module:
    """The network that the run trains, with the founder's seed. ConfigError: blocks are longer than it can take."""
    what = spec.model
    if what.kind == "config":
        model = build_model(what.config, spec.seed)
    else:
        name = Path(what.path) if what.kind == "path" else what.name
        model = load_model(name, revision=what.revision, pretrained=what.pretrained, seed=spec.seed)
    _check_positions(spec, positions_of(model))
    return model


def _check_positions(spec: RunSpec, positions: int | None) -> None:
    what = spec.model
    if positions is not None and spec.data.seq_len > positions:
        raise ConfigError(
            f"data.seq_len ({spec.data.seq_len}) exceeds the {positions} positions (max_position_embeddings) of the "
            f"model {what.path or what.name or what.config.get('model_type')}: lower data.seq_len"
        )


def check_config(spec: RunSpec, config: Any, tokenizer: Tokenizer) -> None:
    """As `model_of` and `check_vocabulary`, as far as a config tells. ConfigError, DataError."""
    _check_positions(spec, positions_in(config))
    rows = getattr(text_config(config), "vocab_size", None)
    if type(rows) is int:
        _check_rows(rows, tokenizer)


def check_causal(model: nn.Module) -> None:
    """ConfigError: the model sees the tokens that it is to predict, and would only learn to copy them.

    So do encoders that `transformers` counts among causal models too. One that cannot run on this host's CPU is not
    checked.
    """
    n = min(LOOKED_AT, positions_of(model) or LOOKED_AT)
    ids = torch.arange(n).repeat(2, 1) % (vocab_of(model) or 2)
    ids[1, n // 2 :] = ids[0, n // 2 :].flip(0)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            logits: Tensor = model(input_ids=ids).logits
    except Exception as error:  # kernels that there are for CUDA only, and what else an architecture asks for
        log.debug("the model is not checked for being causal: %s", error)
        return
    finally:
        model.train(was_training)
    first, second = logits[:, : n // 2]
    if float((first - second).abs().max()) > FROM_LATER_MAX * float(first.abs().max()):
        raise ConfigError(
            f"the model ({type(model).__name__}) sees the tokens that it is to predict: what it says of the first ones "
            "changes with those after them. Set is_decoder = true in model.config (or in its config.json), or train "
            "another model"
        )


def check_vocabulary(model: nn.Module, tokenizer: Tokenizer) -> None:
    """DataError: the tokenizer makes ids for which the model has no embedding."""
    rows = vocab_of(model)
    if rows is not None:
        _check_rows(rows, tokenizer)


def _check_rows(rows: int, tokenizer: Tokenizer) -> None:
    if tokenizer.vocab_size > rows:
        raise DataError(
            f"the tokenizer {tokenizer.name!r} has {tokenizer.vocab_size} ids, but the model's vocabulary (vocab_size) "
            f"only {rows}: set data.tokenizer to the model's own, or model.config.vocab_size to "
            f"{tokenizer.vocab_size} or more"
        )


def check_own_tokenizer(spec: RunSpec, model: nn.Module, tokenizer: Tokenizer) -> None:
    """ConfigError: raw bytes for a model that was trained with a tokenizer, whose ids mean something else to it. Of
    another tokenizer than its own the log tells."""
    what = spec.model
    if what.kind == "config" or not what.pretrained:
        return
    name = what.path or what.name
    if tokenizer.name != BYTES:
        if what.kind == "path" and has_tokenizer(Path(name)):
            tell_other_words(name, name, tokenizer)
        return
    rows = vocab_of(model)
    if (what.kind == "path" and has_tokenizer(Path(name))) or (rows is not None and rows > BYTE_ROWS_MAX):
        raise ConfigError(
            f"the model {name} was trained with a tokenizer, and data.tokenizer is {BYTES!r}: set data.tokenizer = "
            f"{name!r}, or model.pretrained = false to begin from random weights"
        )


def tell_other_words(model: str, own: str, tokenizer: Tokenizer) -> None:
    """Tell where ids mean something else to a model, as `own` has them, the name of its tokenizer on this host."""
    if own == tokenizer.name:
        return
    try:
        known = load_tokenizer(own)
    except DataError as error:
        log.debug("the tokenizer is not compared with that of the model: %s", error)
        return
    same = len(known.words.items() & tokenizer.words.items())
    if same < SAME_WORDS_MIN * min(len(known.words), len(tokenizer.words)):
        log.warning(
            "the model %s was trained with other ids than those of the tokenizer %s: %d of its %d tokens are the same. "
            "Its weights are of little use so: take the tokenizer that belongs to it, %s",
            model,
            tokenizer.name,
            same,
            len(known.words),
            own,
        )


def inner_loop_of(
    spec: RunSpec, model: nn.Module, device: torch.device, make: Callable[..., InnerLoop] = InnerLoop
) -> InnerLoop:
    """The inner loop of the run, with a fresh optimizer; moves the model to the device. `make`: as `InnerLoop`.

    ConfigError: this model, or this host, cannot do what the options ask for.
    """
    inner = spec.inner
    if inner.checkpointing:
        checkpoint_activations(model)
    optimizer = build_optimizer(
        inner.optimizer,
        model.to(device),
        lr=inner.lr,
        betas=inner.betas,
        weight_decay=inner.weight_decay,
        momentum=inner.momentum,
        fused=device.type == "cuda",
    )
    return make(model, optimizer, schedule_of(spec), inner.clip_norm, device, spec.precision, inner.compile)


def schedule_of(spec: RunSpec) -> Callable[[int], float]:
    """The inner learning rate of the run by global step, the first being 0."""
    inner = spec.inner
    return partial(
        learning_rate,
        peak=inner.lr,
        warmup_steps=inner.warmup_steps,
        total_steps=spec.horizon_steps,
        min_ratio=inner.min_lr_ratio,
    )


def checkpoint_activations(model: nn.Module) -> None:
    """Keep only the inputs of each layer for the backward pass, and compute the rest again there. Twice is as once."""
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise ConfigError(
            f"{type(model).__name__} has no activation checkpointing in transformers: set inner.checkpointing = false"
        )
    enable: Any = getattr(model, "activation_checkpointing_enable", None)
    if callable(enable):
        enable()
    else:  # older versions of transformers know it by this name, with another default
        enable = model.gradient_checkpointing_enable
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def utilisation_of(spec: RunSpec, model: nn.Module, device: torch.device) -> Utilisation:
    """What MFU is counted by; without a peak where the steps are not 16-bit arithmetic."""
    peak = peak_flops(device) if autocast_dtype(spec.precision, device) is not None else None
    return Utilisation(flops_per_token(model, spec.data.seq_len), peak)


def pick_device(name: str) -> torch.device:
    """The device by name; "auto" is CUDA where there is one, else the CPU. UsageError if torch cannot use it."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device).cpu()  # which the device "meta", whose tensors hold nothing, cannot
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # a torch without CUDA asserts
        reason = first_line(error).partition(". ")[0]
        raise UsageError(f"the device {name!r} cannot be used ({reason}); choose auto, cpu or cuda") from None
    return device
