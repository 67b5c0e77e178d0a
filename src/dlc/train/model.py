"""Build the model that a run names: from a config (seeded random weights), from a local folder, or from the hub.

Equal spec, seed and library versions give equal bits on one kind of host; between unlike hosts the founder's weights
are what counts, since newcomers fetch them. Only a name of the hub is ever downloaded; no code of a model folder or
repository is run, and no pickled weights are read. The caller's random state is left as it was.

`transformers` is imported on first use: it takes seconds, and the library works with any `nn.Module` without it.
"""

from __future__ import annotations

import difflib
import inspect
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dlc.errors import ConfigError, UsageError, first_line
from dlc.train.checkpoint import save_model_folder
from dlc.train.shelf import model_folder
from dlc.train.tokens import Tokenizer

log = logging.getLogger(__name__)

ModelSpec = Mapping[str, Any] | str | Path
"""Fields of a `transformers` config with `model_type` among them; or the path of a local model folder."""

MISSING_TOLD = 3
"""Names of weights that are not there."""
OLD_NAMES = {"rope_theta": "rope_parameters", "rope_scaling": "rope_parameters", "torch_dtype": "dtype"}
"""Fields as they stand in the config.json of most models; later versions of transformers take them for these."""


def build_model(spec: ModelSpec, seed: int) -> nn.Module:
    """A causal language model in fp32 on the CPU, in training mode, with the attention that transformers takes for it:
    sdpa where the architecture has it, else eager.

    ConfigError: unknown `model_type` or field (with the nearest name), or values that do not fit together.
    UsageError: the folder is missing or holds no model.
    """
    if isinstance(spec, Mapping):
        return _from_config(dict(spec), seed)
    return load_model(Path(spec), seed=seed)


def _from_config(fields: dict[str, Any], seed: int) -> nn.Module:
    from transformers import AutoModelForCausalLM

    config = config_of(fields)
    try:
        with _seeded(seed):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as e:  # transformers and torch raise many kinds for values that do not fit together
        raise ConfigError(f"transformers cannot build a {config.model_type} model from {fields}: {e}") from e
    return _trainable(model)


def config_of(given: Mapping[str, Any]) -> Any:
    """The config of a model, which is not built yet; transformers takes any keyword without a word, so names are
    checked here. ConfigError: as `build_model`, but for values that only show when the model is built."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    fields = dict(given)
    kind = fields.pop("model_type", None)
    if kind is None:
        raise ConfigError('the model needs a model_type, for example "llama", or a path to a model folder')
    if kind not in KNOWN:
        raise ConfigError(f"model_type {kind!r} is no causal language model of transformers{_nearest(kind, KNOWN)}")
    default = _config(kind, {})
    known = set(default.to_dict()) | set(default.attribute_map)
    known |= {old for old, new in OLD_NAMES.items() if new in known}
    for name in fields:
        if name not in known and not _reads(KNOWN[kind], name):
            raise ConfigError(f"{name!r} is no field of a {kind} model{_nearest(name, known)}")
    return _config(kind, fields)


def _config(kind: str, fields: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.for_model(kind, **fields)
    except Exception as e:  # validation errors of transformers and huggingface_hub have no common base
        raise ConfigError(f"transformers refuses the {kind} config {fields}: {e}") from e


def _reads(model: str, name: str) -> bool:
    """Whether this class of `transformers` reads a field that its config has no default for: many do `head_dim`."""
    import transformers

    module = sys.modules[getattr(transformers, model).__module__]
    return f'getattr(config, "{name}"' in inspect.getsource(module)


def config_in(folder: Path) -> Any:
    """The config of a model folder. UsageError: it cannot be read."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as e:  # JSON and transformers have no common base
        raise UsageError(f"the model in {folder} cannot be loaded: {first_line(e)}") from e


def config_at(name: str | Path, revision: str = "") -> Any:
    """The config of the model that `load_model` would load; fetched if it is on the hub. UsageError: as there."""
    from transformers import AutoConfig

    if (folder := model_folder(name)) is not None:
        return config_in(folder)
    try:
        return AutoConfig.from_pretrained(name, revision=revision or None)
    except Exception as e:  # as in `load_model`
        raise _not_on_hub(name, e) from e


def load_model(
    name: str | Path, *, revision: str = "", pretrained: bool = True, seed: int = 0, whole: bool = False
) -> nn.Module:
    """As `build_model`, from a folder written by save_pretrained, or (a string only) by a name on the Hugging Face hub.

    revision:    branch, tag or commit on the hub; empty: the default one.
    pretrained:  False: only the config is taken.
    seed:        of the random weights in place of those that are not taken, or not there.
    whole:       all weights have to be there; else the log names those that are not.

    UsageError: there is no such model, it is damaged, or the hub cannot be reached.
    """
    folder = model_folder(name)
    where = {"revision": revision or None} if folder is None else {"local_files_only": True}
    try:
        model, missing = _load(str(folder or name), where, pretrained, seed)
    except Exception as e:  # a cut weight file, missing keys, no network, an unknown architecture: each another class
        if folder is not None:
            raise UsageError(f"the model in {folder} cannot be loaded: {e}") from e
        raise _not_on_hub(name, e) from e
    if missing:
        some = ", ".join(missing[:MISSING_TOLD]) + (", ..." if len(missing) > MISSING_TOLD else "")
        told = f"the model {folder or name} lacks {len(missing)} weights that a {type(model).__name__} has ({some})"
        if whole:
            raise UsageError(f"{told}: give a folder or a name with all of them")
        log.warning("%s: these begin as random numbers. If they should be there, compare config.json", told)
    return _trainable(model)


def _not_on_hub(name: str | Path, error: Exception) -> UsageError:
    return UsageError(
        f"there is no folder {name}, and no such model of the Hugging Face hub can be loaded: {first_line(error)}; "
        "where there is no network, copy its folder here and give its path (in RUN.toml model.path, with "
        'model.kind = "path")'
    )


def _load(name: str, where: dict[str, Any], pretrained: bool, seed: int) -> tuple[Any, list[str]]:
    """The model, and the names of the weights that should have been there."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with _seeded(seed):
        if not pretrained:
            config = AutoConfig.from_pretrained(name, **where)
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32), []
        options = {"use_safetensors": True, "dtype": torch.float32, "output_loading_info": True}
        model, told = AutoModelForCausalLM.from_pretrained(name, **options, **where)
        return model, sorted(told["missing_keys"])


def save_model(model: nn.Module, folder: Path, tokenizer: Tokenizer) -> None:
    """Write a trained model for `from_pretrained`, with its tokenizer: see `save_model_folder`.

    It generates as it was trained: what ended documents ends its text, whatever its config had by default, and keys and
    values are kept.
    """
    rows = vocab_of(model)
    configs: list[Any] = [getattr(model, name, None) for name in ("config", "generation_config")]
    for told in configs:
        if told is None:
            continue
        told.use_cache = True
        ends = told.eos_token_id
        if tokenizer.end not in (ends if isinstance(ends, list) else [ends]):
            told.eos_token_id = tokenizer.end
        for name, instead in (("bos_token_id", tokenizer.end), ("pad_token_id", None)):
            token = getattr(told, name, None)
            if rows is not None and type(token) is int and token >= rows:
                setattr(told, name, instead)
    _make_valid(getattr(model, "generation_config", None))
    save_model_folder(model, folder, tokenizer.save)


def _make_valid(generation: Any) -> None:
    """Sample, where it names a temperature or the like: `transformers` loads one that does not say so, but refuses to
    write it once anything in it was changed."""
    if generation is None:
        return
    try:
        generation.validate(strict=True)
    except TypeError:
        return  # an older version, which looks only as it writes
    except ValueError:
        generation.do_sample = True


def positions_of(model: nn.Module) -> int | None:
    """The longest sequence that a `transformers` model takes; None where it says nothing of one."""
    return positions_in(getattr(model, "config", None))


def positions_in(config: Any) -> int | None:
    """As `positions_of`, of a model that is not built yet."""
    found = getattr(text_config(config), "max_position_embeddings", None)
    return found if type(found) is int and found > 0 else None


def text_config(config: Any) -> Any:
    """What a config says of the text of a model that sees or hears, too; of another model the whole of it."""
    find = getattr(config, "get_text_config", None)
    try:
        return find() if callable(find) else config
    except ValueError:  # it has several
        return config


def vocab_of(model: nn.Module) -> int | None:
    """Rows of the input embedding of a `transformers` model: ids must lie below; None where it has no such table."""
    find = getattr(model, "get_input_embeddings", None)
    table = find() if callable(find) else None
    rows = getattr(table, "num_embeddings", None)
    return rows if type(rows) is int else None


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
