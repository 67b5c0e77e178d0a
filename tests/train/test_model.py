import dataclasses
import json
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from tokenizers.models import WordLevel
from torch import nn
from transformers import AutoConfig, PreTrainedTokenizerFast

from dlc.errors import ConfigError, DataError, UsageError
from dlc.flat import FlatView
from dlc.runspec import DataSpec, RunSpec
from dlc.runspec import ModelSpec as RunModel
from dlc.train import checkpoint
from dlc.train.checkpoint import save_model_folder
from dlc.train.engine import Engine
from dlc.train.inner import InnerLoop, build_optimizer, causal_loss, evaluate
from dlc.train.model import build_model, config_of, load_model, positions_in, positions_of, save_model
from dlc.train.setup import check_own_tokenizer, check_vocabulary, model_of
from dlc.train.tokens import ByteTokenizer, load_tokenizer
from tests.train.tokenizers_made import make_tokenizer

LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}


def flat(model: torch.nn.Module) -> torch.Tensor:
    view = FlatView.of(model)
    return view.gather(torch.empty(view.numel))


def test_equal_seeds_equal_bits_and_the_random_state_is_left_alone() -> None:
    torch.manual_seed(5)
    random.seed(5)
    before, py = torch.get_rng_state(), random.getstate()
    a, b, c = build_model(LLAMA, 1), build_model(LLAMA, 1), build_model(LLAMA, 2)
    assert torch.equal(flat(a), flat(b)) and not torch.equal(flat(a), flat(c))
    assert torch.equal(torch.get_rng_state(), before) and random.getstate() == py
    assert FlatView.of(a).fingerprint() == FlatView.of(c).fingerprint()
    assert a.training and a.config._attn_implementation == "sdpa"  # type: ignore[union-attr]
    assert {p.dtype for p in a.parameters()} == {torch.float32}


@pytest.mark.parametrize("kind", ["gemma2", "bloom", "mamba"])
def test_an_architecture_without_sdpa_is_built_and_loaded(kind: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 16}
    model = build_model({"model_type": kind, **sizes, **(heads if kind == "gemma2" else {})}, 0)
    assert evaluate(model, [torch.zeros(1, 8, dtype=torch.int64)]) > 0
    save_model_folder(model, tmp_path / "m")
    assert torch.equal(flat(load_model(tmp_path / "m")), flat(model))


def test_tied_embeddings_stand_once() -> None:
    tied, untied = (build_model({**LLAMA, "tie_word_embeddings": t}, 0) for t in (True, False))
    assert FlatView.of(untied).numel - FlatView.of(tied).numel == 64 * 32


def test_it_trains_and_its_own_loss_is_ours() -> None:
    model = build_model(LLAMA, 0)
    ids = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert float(causal_loss(model, ids)) == pytest.approx(evaluate(model, [ids]), rel=1e-5)
    loop = InnerLoop(model, build_optimizer("adamw", model, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1))
    losses = [loop.train_step([ids], k).loss for k in range(20)]
    assert losses[-1] < losses[0] - 1


def test_a_saved_folder_is_the_same_model(tmp_path: Path) -> None:
    model = build_model(LLAMA, 3)
    save_model_folder(model, tmp_path / "m")
    assert torch.equal(flat(build_model(tmp_path / "m", 0)), flat(model))
    other = build_model(LLAMA, 4)
    save_model_folder(other, tmp_path / "m")  # in place of the old one
    assert torch.equal(flat(build_model(str(tmp_path / "m"), 0)), flat(other))
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_all_of_a_folder_is_on_the_disk_before_it_takes_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own list of names, and what is in folders below it (templates of a tokenizer), too."""
    synced: set[Path] = set()
    exchange = checkpoint._exchange

    def watched(new: Path, target: Path, old: Path) -> None:
        assert synced == {new, *new.rglob("*")}
        exchange(new, target, old)

    def more(folder: Path) -> None:
        (folder / "below").mkdir()
        (folder / "below" / "a.jinja").write_text("{{ a }}")

    monkeypatch.setattr(checkpoint, "_fsync", synced.add)
    monkeypatch.setattr(checkpoint, "_exchange", watched)
    save_model_folder(build_model(LLAMA, 3), tmp_path / "m", more)
    assert (tmp_path / "m" / "below" / "a.jinja").is_file() and tmp_path in synced


def test_a_folder_that_cannot_be_saved_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(LLAMA, 3)
    save_model_folder(model, tmp_path / "m")

    def full(folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model, "save_pretrained", full)
    with pytest.raises(UsageError, match="No space left"):
        save_model_folder(model, tmp_path / "m")
    assert torch.equal(flat(build_model(tmp_path / "m", 0)), flat(model))
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    with pytest.raises(UsageError, match="Linear"):
        save_model_folder(torch.nn.Linear(1, 1), tmp_path / "x")


def test_a_trained_model_generates_as_it_was_trained(tmp_path: Path) -> None:
    """The ids in a config are those of the tokenizer that its architecture came with, which is not the run's."""
    from transformers import AutoModelForCausalLM

    save_model(build_model(LLAMA, 0), tmp_path / "bytes", ByteTokenizer())
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "bytes")
    assert made.config.eos_token_id == made.generation_config.eos_token_id == 0
    assert made.config.use_cache and made.generation_config.use_cache
    make_tokenizer(tmp_path / "t")
    tokenizer = load_tokenizer(str(tmp_path / "t"))
    gpt2 = {"model_type": "gpt2", "vocab_size": 300, "n_embd": 16, "n_layer": 1, "n_head": 2}
    for ends, then in ((50256, tokenizer.end), ([7, tokenizer.end], [7, tokenizer.end])):
        save_model(build_model({**gpt2, "eos_token_id": ends}, 0), tmp_path / "hub", tokenizer)
        made = AutoModelForCausalLM.from_pretrained(tmp_path / "hub")
        assert made.config.eos_token_id == made.generation_config.eos_token_id == then
        assert made.config.bos_token_id == tokenizer.end, "50256 is none of its ids"
    assert (tmp_path / "hub" / "tokenizer.json").is_file()


def test_a_model_whose_own_config_is_half_said_is_saved(tmp_path: Path) -> None:
    """It names a temperature, not that it samples: `transformers` loads that, and refuses to write it once changed."""
    from transformers import AutoModelForCausalLM

    save_model_folder(build_model(LLAMA, 3), tmp_path / "given")
    (tmp_path / "given" / "generation_config.json").write_text('{"temperature": 0.9, "top_p": 0.6, "eos_token_id": 2}')
    save_model(load_model(tmp_path / "given"), tmp_path / "m", ByteTokenizer())
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "m").generation_config
    assert (made.temperature, made.top_p, made.do_sample, made.eos_token_id) == (0.9, 0.6, True, 0)


def test_what_a_killed_process_left_of_an_exchange_stands_in_nobodys_way(tmp_path: Path) -> None:
    """In a container each process has the number of the one before."""
    save_model_folder(build_model(LLAMA, 3), tmp_path / "m")
    left = tmp_path / f".m.old-{os.getpid()}"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"of a model before")
    save_model_folder(build_model(LLAMA, 4), tmp_path / "m")
    assert torch.equal(flat(build_model(tmp_path / "m", 0)), flat(build_model(LLAMA, 4)))
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


newer = pytest.mark.skipif(transformers.__version__.startswith("4."), reason="transformers 4 builds such a model")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"hidden_size": 8}, "model_type"),
        ({"model_type": "lama"}, "did you mean"),
        ({**LLAMA, "hiden_size": 8}, "did you mean 'hidden_size'"),
        pytest.param({**LLAMA, "hidden_size": 33}, "llama", marks=newer),
        ({**LLAMA, "hidden_size": "x"}, "llama"),
        ({"model_type": "vit"}, "no causal"),
    ],
)
def test_wrong_specs_are_named(spec: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build_model(spec, 0)


def test_a_kind_that_transformers_makes_by_no_default_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As some that are made of several models: their error came as it was."""
    made = AutoConfig.for_model

    def half_said(kind: str, **fields: Any) -> Any:
        if not fields:
            raise ValueError("give a text_encoder")
        return made(kind, **fields)

    monkeypatch.setattr(AutoConfig, "for_model", half_said)
    with pytest.raises(ConfigError, match="transformers refuses the llama config .*: give a text_encoder"):
        config_of({"model_type": "llama", "hidden_size": 16})


def test_a_config_with_several_texts_is_taken_as_a_whole() -> None:
    class Several:
        max_position_embeddings = 64

        def get_text_config(self) -> Any:
            raise ValueError("Multiple valid text configs were found")

    assert positions_in(Several()) == 64


def test_wrong_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no model folder"):
        build_model(tmp_path / "missing", 0)
    with pytest.raises(UsageError, match=r"config\.json"):
        build_model(tmp_path, 0)
    save_model_folder(build_model(LLAMA, 0), tmp_path / "m")
    weights = tmp_path / "m" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UsageError, match="cannot be loaded"):
        build_model(tmp_path / "m", 0)
    weights.unlink()
    with pytest.raises(UsageError, match="cannot be loaded"):
        build_model(tmp_path / "m", 0)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A cache of the hub that holds someone/tiny, and no network; gives the model in it."""
    import huggingface_hub.constants

    model = build_model(LLAMA, 3)
    repository = tmp_path / "hub" / "models--someone--tiny"
    save_model_folder(model, repository / "snapshots" / ("a" * 40))
    (repository / "refs").mkdir()
    for name in ("main", "v1"):
        (repository / "refs" / name).write_text("a" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("transformers.utils.hub.TRANSFORMERS_CACHE", str(tmp_path / "hub"), raising=False)  # of 4.*
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return model


def test_models_of_the_hub(hub: nn.Module) -> None:
    assert torch.equal(flat(load_model("someone/tiny")), flat(hub))
    assert torch.equal(flat(load_model("someone/tiny", revision="v1")), flat(hub))
    bare = load_model("someone/tiny", pretrained=False, seed=5)
    assert torch.equal(flat(bare), flat(build_model(LLAMA, 5)))
    spec = RunSpec(model=RunModel(kind="hub", name="someone/tiny", revision="v1"), data=DataSpec(seq_len=8))
    assert torch.equal(flat(model_of(spec)), flat(hub))
    bare_spec = dataclasses.replace(spec, model=RunModel(kind="hub", name="someone/tiny", pretrained=False), seed=5)
    assert torch.equal(flat(model_of(bare_spec)), flat(bare))


@pytest.mark.parametrize(("name", "revision"), [("someone/other", ""), ("nothing", ""), ("someone/tiny", "v2")])
def test_without_network_it_says_how_to_use_a_folder(hub: nn.Module, name: str, revision: str) -> None:
    with pytest.raises(UsageError, match=r"no folder .*couldn't connect.*model\.path"):
        load_model(name, revision=revision)


def test_weights_that_a_folder_lacks_are_told_and_the_same_on_every_peer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a model without a head, or one whose config.json has a layer more."""
    folder = tmp_path / "m"
    save_model_folder(build_model(LLAMA, 3), folder)
    config = json.loads((folder / "config.json").read_text())
    load_model(folder, whole=True)
    assert not caplog.records
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": config["num_hidden_layers"] + 1}))
    spec = RunSpec(model=RunModel(kind="path", path=str(folder)), data=DataSpec(seq_len=8), seed=7)
    first = flat(model_of(spec))
    torch.rand(1)  # another process has drawn other numbers
    assert torch.equal(flat(model_of(spec)), first)
    assert not torch.equal(flat(model_of(dataclasses.replace(spec, seed=8))), first)
    lacks = rf"the model {folder} lacks 9 weights that a LlamaForCausalLM has \(model\.layers\.2\..*, \.\.\.\)"
    told = [record.getMessage() for record in caplog.records if record.name == "dlc.train.model"]
    assert len(told) == 3 and re.match(f"{lacks}: these begin as random numbers", told[0])
    with pytest.raises(UsageError, match=lacks):
        load_model(folder, whole=True)


def test_only_the_config_of_a_folder(tmp_path: Path) -> None:
    save_model_folder(build_model(LLAMA, 3), tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    spec = RunSpec(
        model=RunModel(kind="path", path=str(tmp_path / "m"), pretrained=False), data=DataSpec(seq_len=8), seed=7
    )
    assert torch.equal(flat(model_of(spec)), flat(build_model(LLAMA, 7)))


def test_blocks_longer_than_the_model_takes_are_refused(hub: nn.Module, tmp_path: Path) -> None:
    save_model_folder(hub, tmp_path / "m")
    for model in (RunModel(kind="path", path=str(tmp_path / "m")), RunModel(kind="hub", name="someone/tiny")):
        with pytest.raises(ConfigError, match=rf"seq_len \(128\) exceeds the {positions_of(hub)} positions"):
            model_of(RunSpec(model=model, data=DataSpec(seq_len=128)))


def test_an_encoder_that_sees_what_it_is_to_predict_is_refused() -> None:
    sizes = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = {"model_type": "bert", "intermediate_size": 48, **sizes}

    def engine(config: dict[str, object]) -> Engine:
        return Engine(RunSpec(model=RunModel(config=config), data=DataSpec(seq_len=16)), torch.device("cpu"))

    torch.manual_seed(5)
    before = torch.get_rng_state()
    with pytest.raises(ConfigError, match=r"BertLMHeadModel.*sees the tokens.*is_decoder = true"):
        engine(bert)
    moe = {"model_type": "mixtral", "intermediate_size": 48, "num_key_value_heads": 2, "num_local_experts": 4}
    for config in ({**bert, "is_decoder": True}, {**sizes, **moe}, {**LLAMA, "vocab_size": 256}):
        assert engine(config).model.training
    assert torch.equal(torch.get_rng_state(), before)


def test_raw_bytes_for_a_model_that_has_a_tokenizer_are_refused(tmp_path: Path) -> None:
    """Its ids mean something else to it, and nothing would show but the loss."""
    model, raw = build_model({**LLAMA, "vocab_size": 301}, 0), ByteTokenizer()
    save_model_folder(model, tmp_path, lambda folder: None)

    def spec(**options: Any) -> RunSpec:
        return RunSpec(model=RunModel(kind="path", path=str(tmp_path), **options))

    check_own_tokenizer(spec(), model, raw)  # a folder without one may be of bytes
    make_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match=rf"data.tokenizer = '{tmp_path}', or model.pretrained = false"):
        check_own_tokenizer(spec(), model, raw)
    check_own_tokenizer(spec(pretrained=False), model, raw)
    check_own_tokenizer(spec(), model, load_tokenizer(str(tmp_path)))
    check_own_tokenizer(RunSpec(), model, raw)
    hub = RunSpec(model=RunModel(kind="hub", name="some/model"))
    check_own_tokenizer(hub, model, raw)
    with pytest.raises(ConfigError, match="'some/model'"):
        check_own_tokenizer(hub, build_model({**LLAMA, "vocab_size": 2000}, 0), raw)


def test_another_tokenizer_than_that_of_the_model_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One with some tokens more is not."""
    model, folder = build_model({**LLAMA, "vocab_size": 400}, 0), tmp_path / "model"
    save_model_folder(model, folder, lambda folder: None)
    own = make_tokenizer(folder)
    spec = RunSpec(model=RunModel(kind="path", path=str(folder)))
    own.add_tokens(["<more>", "<and more>"])
    own.save_pretrained(tmp_path / "more")
    vocabulary = {f"word{i}": i for i in range(300)} | {"<eos>": 300}
    other = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(WordLevel(vocabulary)), eos_token="<eos>")
    other.save_pretrained(tmp_path / "other")
    for name in ("model", "more"):
        check_own_tokenizer(spec, model, load_tokenizer(str(tmp_path / name)))
    assert not caplog.messages
    check_own_tokenizer(spec, model, load_tokenizer(str(tmp_path / "other")))
    (said,) = caplog.messages
    assert f"{folder} was trained with other ids than those of the tokenizer {tmp_path / 'other'}: 0 of its" in said


@pytest.mark.parametrize("fields", [{"rope_theta": 500000.0}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}])
def test_fields_may_stand_as_they_do_in_the_config_of_most_models(fields: dict[str, Any]) -> None:
    changed, usual = build_model({**LLAMA, **fields}, 0), build_model(LLAMA, 0)
    assert not torch.equal(*(m(input_ids=torch.arange(8)[None]).logits for m in (changed, usual)))


def test_a_field_that_a_model_reads_may_be_given_though_its_config_lists_none() -> None:
    """As it stands in the config.json of Qwen3-30B-A3B."""
    fields = {**LLAMA, "model_type": "qwen3_moe", "head_dim": 12, "num_experts": 2, "moe_intermediate_size": 8}
    model = build_model(fields, 0)
    heads = fields["num_attention_heads"]
    assert dict(model.named_parameters())["model.layers.0.self_attn.q_proj.weight"].shape[0] == 12 * heads
    with pytest.raises(ConfigError, match="'head_dim' is no field of a gpt2 model"):
        build_model({"model_type": "gpt2", "head_dim": 12}, 0)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    small, large = (build_model({**LLAMA, "vocab_size": n}, 0) for n in (256, tokenizer.vocab_size))
    with pytest.raises(DataError, match=rf"{tokenizer.vocab_size} ids.*only 256.*vocab_size to {tokenizer.vocab_size}"):
        check_vocabulary(small, tokenizer)
    check_vocabulary(large, tokenizer)
    check_vocabulary(small, ByteTokenizer())
    check_vocabulary(nn.Linear(2, 2), tokenizer)  # a module of one's own has no such table
