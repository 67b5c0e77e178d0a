"""`dlc export` and `dlc eval` on checkpoints of a short training."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dlc.cli import evaluate, main
from dlc.cli.evaluate import Evaluation, _json
from dlc.errors import CheckpointError, UsageError
from dlc.flat import FlatView
from dlc.runspec import BYTES, DataSpec, InnerSpec, ModelSpec, RunSpec
from dlc.train import saves, shelf
from dlc.train.checkpoint import save_model_folder
from dlc.train.model import build_model
from dlc.train.packing import is_validation
from dlc.train.restored import restore
from tests.train.fake_peer import FakePeer
from tests.train.test_trainer import LLAMA, Run
from tests.train.tokenizers_made import make_tokenizer


@dataclasses.dataclass
class Trained:
    state: Path
    spec: RunSpec
    peer: FakePeer


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run with a tokenizer, from a model folder, and its state directory."""
    folder = tmp_path_factory.mktemp("run")
    make_tokenizer(folder / "tokenizer")
    save_model_folder(build_model({**LLAMA, "vocab_size": 300}, 1), folder / "start")
    corpus = folder / "corpus"
    corpus.mkdir()
    for i in range(60):
        (corpus / f"f{i}.txt").write_text(f"the cat sat on the mat {i} and the dog ate the hat. " * 4)
    spec = RunSpec(
        rounds=1,
        sync_every=2,
        model=ModelSpec(kind="path", path=str(folder / "start")),
        data=DataSpec(source=str(corpus), tokenizer=str(folder / "tokenizer"), seq_len=16),
        inner=InnerSpec(batch_size=2, warmup_steps=1),
    )
    run = Run(FakePeer(spec), folder / "state")
    run.go()
    return Trained(folder / "state", spec, run.peer)


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLC_HOME", str(tmp_path / "home"))


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def fails(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(list(words)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err.splitlines()[-1]


def test_what_the_encoding_of_stdout_lacks_is_shown_all_the_same(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the name of a folder: what was written, or worked out, would be said to have failed by it."""
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, "ascii"))
    assert main(["export", str(trained.state), "--out", str(tmp_path / "Bücher")]) == 0
    assert rb"B\xfccher" in out.getvalue()


def test_an_export_is_what_from_pretrained_loads(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "out"
    said = printed(capsys, "export", str(trained.state), "--out", str(out))
    assert said["t"] == 1 and said["model"] == str(out) and said["checkpoint"].endswith("t-00000001.safetensors")
    view = FlatView.of(AutoModelForCausalLM.from_pretrained(out))
    assert torch.equal(view.gather(torch.empty(view.numel)), trained.peer.theta())
    assert said["parameters"] == view.numel
    assert AutoTokenizer.from_pretrained(out).eos_token == "<eos>"
    assert AutoTokenizer.from_pretrained(trained.state / "model").eos_token == "<eos>"  # as the trainer wrote it
    (out / "notes.txt").write_text("mine")
    assert "exists already" in fails(capsys, "export", str(trained.state), "--out", str(out))
    assert (out / "notes.txt").read_text() == "mine"


def test_a_checkpoint_and_its_export_are_evaluated_alike(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    of_state = printed(capsys, "eval", str(trained.state))
    assert of_state["part"] == "validation" and of_state["seq_len"] == 16 and of_state["t"] == 1
    checkpoint = printed(capsys, "export", str(trained.state), "--out", str(tmp_path / "out"))["checkpoint"]
    of_file = printed(capsys, "eval", checkpoint)
    assert of_file["loss"] == of_state["loss"]
    text = tmp_path / "text.txt"
    text.write_text("the dog sat on the cat. " * 40)
    words = ("--source", str(text), "--seq-len", "8", "--batch-size", "3")
    a, b = printed(capsys, "eval", checkpoint, *words), printed(capsys, "eval", str(tmp_path / "out"), *words)
    same = ("loss", "perplexity", "bits_per_byte", "blocks", "seq_len", "source", "part")
    assert {name: a[name] for name in same} == {name: b[name] for name in same} and a["part"] == "all"
    assert b["tokenizer"] == str(tmp_path / "out") and b["t"] is None

    inner = make_tokenizer(tmp_path / "tokenizer")
    ids = [*inner(text.read_text())["input_ids"], inner.eos_token_id]
    blocks = torch.tensor(ids[: len(ids) // 8 * 8]).view(-1, 8)
    assert a["blocks"] == len(blocks)
    with torch.no_grad():
        loss = float(AutoModelForCausalLM.from_pretrained(tmp_path / "out")(input_ids=blocks, labels=blocks).loss)
    assert a["loss"] == pytest.approx(loss, rel=1e-5) and a["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    bits = loss * len(ids) / math.log(2) / len(text.read_bytes())
    assert a["bits_per_byte"] == pytest.approx(bits, rel=1e-4)

    assert main(["eval", checkpoint, *words]) == 0
    assert f"{a['loss']:.4f} nats/token" in capsys.readouterr().out


def test_who_measures_with_another_tokenizer_than_the_models_is_told(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "text.txt").write_text("the dog sat on the cat. " * 40)
    words = ("eval", str(trained.state), "--source", str(tmp_path / "text.txt"), "--seq-len", "8")
    printed(capsys, *words)
    assert "other ids" not in caplog.text
    printed(capsys, *words, "--tokenizer", "bytes")
    assert f"{trained.state}" in caplog.text and "other ids than those of the tokenizer bytes: 0 of its" in caplog.text


def test_a_run_is_measured_on_what_it_holds_out_at_any_seq_len(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 624 bytes one block of 16 is held out, but three of 8 would be: one of them was trained on."""
    (tmp_path / "a.txt").write_text("the cat sat on the mat. " * 26)
    spec = RunSpec(
        rounds=1,
        sync_every=2,
        model=ModelSpec(config=LLAMA),
        data=DataSpec(source=str(tmp_path / "a.txt"), seq_len=16),
        inner=InnerSpec(batch_size=2, warmup_steps=1),
    )
    Run(FakePeer(spec), tmp_path / "state").go()
    state = str(tmp_path / "state")
    assert [printed(capsys, "eval", state, "--seq-len", n)["blocks"] for n in ("16", "8")] == [1, 2]


def test_a_text_that_another_tokenizer_cuts_elsewhere_may_have_been_trained_on(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Of one text the last blocks are held out, and blocks of bytes are shorter."""
    (tmp_path / "a.txt").write_text("the cat sat on the mat. " * 26)
    data = dataclasses.replace(trained.spec.data, source=str(tmp_path / "a.txt"))
    Run(FakePeer(dataclasses.replace(trained.spec, data=data)), tmp_path / "state").go()

    def told(state: Path, *words: str) -> bool:
        caplog.clear()
        printed(capsys, "eval", str(state), *words)
        return "begins at another place" in caplog.text

    assert told(tmp_path / "state", "--tokenizer", "bytes")
    assert not told(tmp_path / "state")
    assert not told(trained.state, "--tokenizer", "bytes"), "whole texts are held out, whatever the tokenizer"


def test_texts_that_a_run_cut_in_two_for_want_of_others_may_have_been_trained_on(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Of what is to be trained on its tokenizer made no block: it trained on most of what is held out otherwise."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    held = next(name for name in (f"f{i}.txt" for i in range(1000)) if is_validation(name))
    kept = next(name for name in (f"f{i}.txt" for i in range(1000)) if not is_validation(name))
    (corpus / kept).write_text("the cat sat on the mat. ")
    (corpus / held).write_text("the cat sat on the mat. " * 26)
    data = dataclasses.replace(trained.spec.data, source=str(corpus))
    Run(FakePeer(dataclasses.replace(trained.spec, data=data)), tmp_path / "state").go()
    printed(capsys, "eval", str(tmp_path / "state"), "--tokenizer", "bytes")
    assert "what is measured may be text that the model was trained on" in caplog.text


@pytest.mark.parametrize("streaming", [False, True])
def test_data_that_changed_since_may_have_been_trained_on(
    streaming: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    text = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": f"the cat sat on mat {i}. " * 3}) + "\n" for i in range(200)]
    text.write_text("".join(lines))
    spec = RunSpec(
        rounds=1,
        sync_every=2,
        model=ModelSpec(config=LLAMA),
        data=DataSpec(source=str(text), seq_len=16, streaming=streaming, shards=2 if streaming else 8),
        inner=InnerSpec(batch_size=2, warmup_steps=1),
    )
    Run(FakePeer(spec), tmp_path / "state").go()

    def told() -> list[str]:
        caplog.clear()
        for n in ("16", "8"):
            printed(capsys, "eval", str(tmp_path / "state"), "--seq-len", n)
        return [line for line in caplog.messages if "is not what it was" in line]

    assert not told()
    text.write_text("".join(lines[:150]))
    assert len(said := told()) == 2 and said[0].startswith(f"the data at {text} is not what it was when {tmp_path}")


def test_a_folder_whose_tokenizer_is_of_no_use_is_not_taken_for_one_of_bytes(tmp_path: Path) -> None:
    save_model_folder(build_model(LLAMA, 0), tmp_path / "m")
    assert restore(str(tmp_path / "m")).tokenizer == BYTES
    (tmp_path / "m" / "tokenizer.model").write_bytes(b"sentencepiece")
    assert restore(str(tmp_path / "m")).tokenizer == str(tmp_path / "m")


def test_a_model_of_bytes_needs_no_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model_folder(build_model(LLAMA, 0), tmp_path / "m")
    said = printed(capsys, "eval", str(tmp_path / "m"), "--blocks", "4")
    assert (said["source"], said["tokenizer"], said["seq_len"], said["blocks"]) == ("stdlib", "bytes", 16, 4)
    assert said["loss"] == pytest.approx(math.log(256), rel=0.05)


def test_a_model_that_lacks_its_tokenizer_is_not_measured_on_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its ids mean something else to it: a perplexity of thousands was printed of a good model."""
    save_model_folder(build_model({**LLAMA, "vocab_size": 1025}, 1), tmp_path / "m")
    said = fails(capsys, "eval", str(tmp_path / "m"), "--blocks", "4")
    assert "m has no tokenizer, and a vocabulary of 1025: give --tokenizer" in said
    assert printed(capsys, "eval", str(tmp_path / "m"), "--blocks", "4", "--tokenizer", "bytes")["blocks"] == 4
    save_model_folder(build_model({**LLAMA, "vocab_size": 1024}, 1), tmp_path / "bytes")
    assert printed(capsys, "eval", str(tmp_path / "bytes"), "--blocks", "4")["tokenizer"] == "bytes"


def test_a_model_that_lacks_weights_is_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It would have another perplexity each time."""
    save_model_folder(build_model(LLAMA, 0), tmp_path / "m")
    config = tmp_path / "m" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 9}))
    said = fails(capsys, "eval", str(tmp_path / "m"), "--blocks", "4")
    assert "weights that a LlamaForCausalLM has (model.layers." in said


def test_a_text_of_one_block_is_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing of it is held out, and nobody is told so."""
    save_model_folder(build_model(LLAMA, 0), tmp_path / "m")
    (tmp_path / "a.txt").write_text("x" * 20)
    assert main(["eval", str(tmp_path / "m"), "--source", str(tmp_path / "a.txt"), "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["blocks"] == 1 and "to train on" not in said.err


def test_a_name_that_is_no_folder_is_told_before_the_hub_is_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []

    def restore(target: str) -> None:
        told.append(caplog.text)
        raise UsageError("no such model")

    monkeypatch.setattr("dlc.train.restored.restore", restore)
    assert fails(capsys, "eval", "nope") == "dlc eval: no such model"
    assert "there is no file or folder nope here: the Hugging Face hub is asked" in told[0]


def test_an_export_without_room_fails_at_once_and_into_an_empty_folder_fills_it(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    before = out.stat().st_ino  # it may be a disk of its own, which cannot be renamed
    numel = trained.peer.theta().numel()
    assert shelf.model_bytes(saves.chosen(trained.state, None).path) == 4 * numel
    assert shelf.model_bytes(Path(__file__)) == shelf.model_bytes(tmp_path) == 0
    with monkeypatch.context() as patched:
        patched.setattr(shelf, "free_bytes", lambda folder: 4 * numel - 1)
        patched.setattr("dlc.train.restored.of_checkpoint", pytest.fail)
        assert "MB free" in fails(capsys, "export", str(trained.state), "--out", str(out))
    assert out.is_dir() and not list(out.iterdir())
    printed(capsys, "export", str(trained.state), "--out", str(out))
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "model.safetensors"} <= names and "model.new" not in names and out.stat().st_ino == before


def test_an_export_beside_a_peer_that_saves_takes_what_is_the_newest_by_then(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Torch takes seconds to load, and in them the peer may save, and delete what was the newest before."""
    state = tmp_path / "state"
    shutil.copytree(trained.state, state)
    before = saves.chosen(state, None).path
    after = before.with_name(saves.name_of(2))
    monkeypatch.setattr("dlc.cli.export.demand_room", lambda out, needed: before.rename(after))
    assert printed(capsys, "export", str(state), "--out", str(tmp_path / "out"))["checkpoint"] == str(after)
    after.unlink()
    after.symlink_to("/proc/self/mem")  # a file whose reading is an error, also for root
    assert "cannot be read" in fails(capsys, "eval", str(state)), "there, and cannot be read: no other is looked for"


def test_what_cannot_be_used_is_told_in_one_line(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "there is no checkpoint in" in fails(capsys, "export", str(tmp_path), "--out", str(tmp_path / "o"))
    assert "no checkpoint, state directory or model" in fails(capsys, "eval", str(tmp_path / "nowhere"))
    assert "16 positions" in fails(capsys, "eval", str(trained.state), "--seq-len", "99")
    assert "at least 1" in fails(capsys, "eval", str(trained.state), "--blocks", "0")
    save_model_folder(build_model(LLAMA, 0), tmp_path / "m")
    weights = str(tmp_path / "m" / "model.safetensors")
    assert f"{weights} is no dlc checkpoint; if it is a part of a model folder, name" in fails(capsys, "eval", weights)
    tokenizer = str(Path(trained.spec.data.tokenizer))
    assert "ids, but the model's vocabulary" in fails(capsys, "eval", str(tmp_path / "m"), "--tokenizer", tokenizer)


def test_a_checkpoint_of_another_model_names_what_differs(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = Path(trained.spec.model.path)
    kept = start.rename(start.with_name("kept"))
    try:
        save_model_folder(build_model({**LLAMA, "vocab_size": 300, "num_hidden_layers": 2}, 1), start)
        said = fails(capsys, "export", str(trained.state), "--out", str(tmp_path / "o"))
        assert "model.layers.1.self_attn.q_proj.weight is only in the model" in said and "and 4 more" in said
        saved = saves.newest(trained.state, trained.spec)
        with pytest.raises(CheckpointError, match=r"layers\.1"):
            Run(FakePeer(trained.spec), tmp_path / "state", resume=saved)
        start.rename(start.with_name("deeper"))
        save_model_folder(build_model({**LLAMA, "vocab_size": 301}, 1), start)
        said = fails(capsys, "export", str(trained.state), "--out", str(tmp_path / "o"))
        assert "model.embed_tokens.weight is float32 300x8 there, float32 301x8 here" in said
    finally:
        start.rename(start.with_name("wider"))
        kept.rename(start)


def test_numbers_that_json_has_no_word_for_are_null() -> None:
    found = Evaluation("m", None, "stdlib", "all", "bytes", 1, 16, 800.0, math.inf, math.nan)
    plain = json.loads(_json(found), parse_constant=pytest.fail)
    assert plain["perplexity"] is None and plain["bits_per_byte"] is None and plain["loss"] == 800.0


def test_how_far_a_long_evaluation_is_stands_in_the_log(
    trained: Trained,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A larger model on a CPU took half an hour without a word."""
    caplog.set_level("INFO")
    words = ("eval", str(trained.state), "--batch-size", "2", "--blocks", "5")
    n_blocks = printed(capsys, *words)["blocks"]
    assert n_blocks == 5 and "are measured" not in caplog.text
    monkeypatch.setattr(evaluate, "TELL_EVERY_S", 0.0)
    printed(capsys, *words)
    said = [message for message in caplog.messages if "are measured" in message]
    assert said == ["2 of 5 blocks are measured", "4 of 5 blocks are measured"]
