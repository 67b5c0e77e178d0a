"""Build the model that a run names: from a config (seeded random weights) or from a local folder.

Equal spec, seed and library versions give equal bits on one kind of host; between unlike hosts the founder's weights
are what counts, since newcomers fetch them. Nothing is downloaded. The caller's random state is left as it was.

`transformers` is imported on first use: it takes seconds, and the library works with any `nn.Module` without it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dlc.errors import ConfigError, UsageError

ModelSpec = Mapping[str, Any] | str | Path
"""Fields of a `transformers` config with `model_type` among them; or the path of a local model folder."""


def build_model(spec: ModelSpec, seed: int) -> nn.Module:
    """A causal language model in fp32 on the CPU, in training mode, with sdpa attention.

    ConfigError: unknown `model_type` or field (with the nearest name), or values that do not fit together.
    UsageError: the folder is missing or holds no model.
    """
    if isinstance(spec, Mapping):
        return _from_config(dict(spec), seed)
    return _from_folder(Path(spec).expanduser())


def _from_config(fields: dict[str, Any], seed: int) -> nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    kind = fields.pop("model_type", None)
    if kind is None:
        raise ConfigError('the model needs a model_type, for example "llama", or a path to a model folder')
    if kind not in KNOWN:
        raise ConfigError(f"model_type {kind!r} is no causal language model of transformers{_nearest(kind, KNOWN)}")
    config = _config(kind, fields)
    try:
        with _seeded(seed):
            model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    except Exception as e:  # transformers and torch raise many kinds for values that do not fit together
        raise ConfigError(f"transformers cannot build a {kind} model from {fields}: {e}") from e
    return _trainable(model)


def _config(kind: str, fields: dict[str, Any]) -> Any:
    """The config of a model; transformers takes any keyword without a word, so names are checked here."""
    from transformers import AutoConfig

    default = AutoConfig.for_model(kind)
    known = set(default.to_dict()) | set(default.attribute_map)
    for name in fields:
        if name not in known:
            raise ConfigError(f"{name!r} is no field of a {kind} model{_nearest(name, known)}")
    try:
        return AutoConfig.for_model(kind, **fields)
    except Exception as e:  # validation errors of transformers and huggingface_hub have no common base
        raise ConfigError(f"transformers refuses the {kind} config {fields}: {e}") from e


def _from_folder(folder: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM

    if not folder.is_dir():
        raise UsageError(f"no model folder at {folder}; give a folder written by save_pretrained")
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} holds no config.json; give a folder written by save_pretrained")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, attn_implementation="sdpa", dtype=torch.float32, use_safetensors=True
        )
    except Exception as e:  # a cut weight file, missing keys, an unknown architecture: each another class
        raise UsageError(f"the model in {folder} cannot be loaded: {e}") from e
    return _trainable(model)


def _trainable(model: Any) -> nn.Module:
    model.config.use_cache = False  # a key-value cache is of no use in training
    module: nn.Module = model
    return module.train()


class _seeded:
    """Seed torch's CPU generator and put it back; `torch.manual_seed` would also reseed every accelerator."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __enter__(self) -> None:
        self._state = torch.default_generator.get_state()
        torch.default_generator.manual_seed(self._seed)

    def __exit__(self, *_: object) -> None:
        torch.default_generator.set_state(self._state)


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
