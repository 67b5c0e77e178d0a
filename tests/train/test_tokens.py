import json
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE, WordLevel
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dlc.errors import DataError, NoRoom
from dlc.train import packing, sources
from dlc.train.checkpoint import save_model_folder
from dlc.train.data import BlockSource
from dlc.train.packing import tokenise
from dlc.train.sources import Files, Piece, Place
from dlc.train.tokens import ByteTokenizer, HubTokenizer, Ids, is_here, load_tokenizer
from tests.train.tokenizers_made import make_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(path)
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus"
    path.mkdir()
    for i in range(60):
        (path / f"f{i}.txt").write_text(f"the cat {i} sat on the mat. " * 8)
    (path / "nothing.txt").touch()
    return path


def test_documents_become_ids_that_end_with_eos(folder: Path, corpus: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.dtype == np.uint16 and 256 < tokenizer.vocab_size <= 300
    source = BlockSource(corpus, 8, tokenizer=tokenizer)
    assert isinstance(tokenizer, HubTokenizer)
    stream = tokenise(Files(Place(str(corpus))), tokenizer)
    eos = tokenizer._inner.eos_token_id
    texts = tokenizer._inner.decode(stream.train.tolist() + stream.held.tolist()).split("<eos>")
    assert sorted(texts) == sorted(["", "", *(f"the cat {i} sat on the mat. " * 8 for i in range(60))])
    assert int((stream.train == eos).sum()) + int((stream.held == eos).sum()) == 61
    blocks = source.batch(range(source.n_blocks))
    assert blocks.dtype == torch.int64 and blocks.shape == (source.n_blocks, 8)
    n = source.n_blocks * 8
    assert sorted(blocks.tolist()) == sorted(
        stream.train[:n].astype(int).reshape(-1, 8).tolist()
    )  # all of it, no padding
    assert source.bytes_per_token == stream.held_meta.text_bytes / len(stream.held) > 1.5


def test_a_special_token_that_a_text_holds_is_that_token(folder: Path) -> None:
    """As from the tokenizer itself: docs/data.md says so."""
    tokenizer = load_tokenizer(str(folder))
    assert isinstance(tokenizer, HubTokenizer)
    (ids,) = tokenizer.encode([Piece("a", b"the cat<eos>sat", True)])
    assert ids.tolist() == [*tokenizer._inner("the cat<eos>sat", add_special_tokens=False)["input_ids"], tokenizer.end]
    assert ids.tolist().count(tokenizer.end) == 2


def test_an_end_that_a_text_holds_is_not_unknown_where_one_token_is_for_both(folder: Path, tmp_path: Path) -> None:
    """As that of GPT-2."""
    both = AutoTokenizer.from_pretrained(folder)
    both.unk_token = both.eos_token
    both.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert isinstance(tokenizer, HubTokenizer) and tokenizer._inner.unk_token_id == tokenizer.end
    tokenizer.encode([Piece("a", b"the cat<eos>sat", True)])
    assert tokenizer.unknown == 0


@pytest.mark.parametrize(("size", "dtype"), [(1 << 16, np.uint16), ((1 << 16) + 1, np.uint32)])
def test_a_wide_vocabulary_takes_four_bytes(tmp_path: Path, size: int, dtype: type) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="w1").save_pretrained(tmp_path)
    wide = load_tokenizer(str(tmp_path))
    assert wide.dtype == dtype and wide.vocab_size == size
    assert wide.encode([Piece("a", f"w{size - 1} w5".encode(), True)])[0].tolist() == [size - 1, 5, 1]


def test_ids_may_have_gaps_and_all_lie_below_the_size_of_the_vocabulary(tmp_path: Path) -> None:
    inner = Tokenizer(WordLevel({"the": 0, "<eos>": 70_000}, unk_token="<eos>"))
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>").save_pretrained(tmp_path)
    gaps = load_tokenizer(str(tmp_path))
    assert (gaps.vocab_size, gaps.end, gaps.dtype) == (70_001, 70_000, np.uint32)


def test_a_document_has_no_special_token_but_its_end(tmp_path: Path) -> None:
    """Nor has a piece of one, whatever a tokenizer adds to a text by itself."""
    inner = Tokenizer(WordLevel({"the": 0, "<eos>": 1, "<bos>": 2}, unk_token="<eos>"))
    inner.post_processor = TemplateProcessing(single="<bos> $A <eos>", special_tokens=[("<bos>", 2), ("<eos>", 1)])
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", bos_token="<bos>").save_pretrained(tmp_path)
    pieces = [Piece("a", b"the", False), Piece("a", b"the", True)]
    assert [ids.tolist() for ids in load_tokenizer(str(tmp_path)).encode(pieces)] == [[0], [0, 1]]


def test_a_folder_here_goes_before_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some-tokenizer").mkdir()
    assert is_here("some-tokenizer") and is_here("bytes") and not is_here("another-tokenizer")


def test_a_folder_that_is_not_there_is_no_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"there is no tokenizer folder {tmp_path / 'gone'}"):
        load_tokenizer(str(tmp_path / "gone"))


class Counting(HubTokenizer):
    calls = 0

    def encode(self, pieces: Sequence[Piece]) -> list[Ids]:
        Counting.calls += 1
        return super().encode(pieces)


def test_what_was_tokenised_is_kept_by_content_and_tokenizer(
    folder: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "SLICE_BYTES", 1000)
    monkeypatch.setattr(Counting, "calls", 0)
    cache = tmp_path / "cache"

    def opened(tokenizer: Path = folder) -> BlockSource:
        return BlockSource(corpus, 8, tokenizer=Counting(str(tokenizer)), cache=cache)

    first = opened()
    slices = Counting.calls
    assert slices > 5 and [path.name for path in cache.iterdir()] == [first._train.base.filename.parent.name]  # type: ignore[union-attr]
    again, held = opened(), BlockSource(corpus, 8, tokenizer=Counting(str(folder)))
    assert Counting.calls == 2 * slices  # of the one without a cache
    for other in (again, held):
        assert torch.equal(first.batch(range(50)), other.batch(range(50)))
        assert first.fingerprint() == other.fingerprint()

    (corpus / "f1.txt").write_text("the dog ate the hat " * 8)
    changed = opened()
    assert changed.fingerprint() != first.fingerprint() and len(list(cache.iterdir())) == 2
    other_tokenizer = tmp_path / "smaller"
    make_tokenizer(other_tokenizer, vocab_size=262)
    assert opened(other_tokenizer).fingerprint() != changed.fingerprint() and len(list(cache.iterdir())) == 3


def test_tokens_of_a_saved_dataset_are_those_of_its_rows(folder: Path, tmp_path: Path) -> None:
    """`datasets` keeps one fingerprint for all that a generator gave, and for other rows of the same number."""
    import datasets

    def opened(word: str) -> BlockSource:
        made = datasets.Dataset.from_dict({"text": [f"{word} cat {i} " * 4 for i in range(100)]}, split="train")
        made._fingerprint = "the same"
        made.save_to_disk(str(tmp_path / word))
        return BlockSource(tmp_path / word, 8, tokenizer=load_tokenizer(str(folder)), cache=tmp_path / "cache")

    first, other = opened("hat"), opened("dog")
    assert not torch.equal(first.batch(range(9)), other.batch(range(9))) and first.fingerprint() != other.fingerprint()
    (tmp_path / "hat").rename(tmp_path / "moved")
    opened_again = BlockSource(tmp_path / "moved", 8, tokenizer=load_tokenizer(str(folder)), cache=tmp_path / "cache")
    assert torch.equal(first.batch(range(9)), opened_again.batch(range(9)))
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_tokens_are_kept_apart_by_what_ends_a_document(tmp_path: Path) -> None:
    """It may be another of the same tokens, which tokenizer_config.json alone says."""
    made = make_tokenizer(tmp_path / "a")
    made.add_special_tokens({"pad_token": "<other>"})
    for name in "ab":
        made.save_pretrained(tmp_path / name)
    for file in (tmp_path / "b").glob("*.json"):
        if file.name != "tokenizer.json":
            file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": "<other>"}))
    a, b = (load_tokenizer(str(tmp_path / name)) for name in "ab")
    assert a.end != b.end and a.words == b.words and a.identity != b.identity


def test_tokens_are_kept_apart_by_whether_special_ones_in_texts_are_split(folder: Path, tmp_path: Path) -> None:
    """Of all that decides on ids this stands in no tokenizer.json."""
    text = tmp_path / "text.txt"
    text.write_text("the cat<eos>sat " * 40)

    def opened(splits: bool) -> BlockSource:
        config = folder / "tokenizer_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"split_special_tokens": splits}))
        return BlockSource(text, 8, tokenizer=load_tokenizer(str(folder)), cache=tmp_path / "cache")

    splits, plain = opened(True), opened(False)
    assert splits.n_blocks > plain.n_blocks and len(list((tmp_path / "cache").iterdir())) == 2


def test_a_damaged_cache_is_made_anew_and_a_full_disk_is_told(
    folder: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"

    def opened() -> BlockSource:
        return BlockSource(corpus, 8, tokenizer=load_tokenizer(str(folder)), cache=cache)

    want = opened().batch(range(9))
    (kept,) = cache.iterdir()
    whole = (kept / "train.bin").read_bytes()
    (kept / "train.bin").write_bytes(whole[:-2])
    assert torch.equal(opened().batch(range(9)), want) and (kept / "train.bin").read_bytes() == whole
    damaged = f"the tokens in {kept} are damaged; they are made anew"
    assert caplog.messages.count(damaged) == 1
    (kept / "train.bin").write_bytes(whole[2:] + whole[:2])  # as a disk does that loses what it was given
    assert torch.equal(opened().batch(range(9)), want) and (kept / "train.bin").read_bytes() == whole
    assert caplog.messages.count(damaged) == 2
    (kept / "streams.json").write_text(json.dumps({"train": {}}))
    assert torch.equal(opened().batch(range(9)), want)
    (kept / "streams.json").unlink()

    def full(file: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packing, "_sync", full)
    with pytest.raises(DataError, match="No space left on device; make room there"):
        opened()
    assert [path.name for path in cache.iterdir()] == [kept.name]  # and nothing half written beside it


def test_where_no_tokens_may_be_kept_room_is_of_no_help(folder: Path, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="; let this user write there, or set DLC_HOME"):
        BlockSource(corpus, 8, tokenizer=load_tokenizer(str(folder)), cache=tmp_path / "file" / "cache")


def test_text_that_changes_while_it_is_tokenised_is_not_kept_as_what_it_was(
    folder: Path, corpus: Path, tmp_path: Path
) -> None:
    """Its tokens would be taken for those of the old text by every peer of this host that has that."""
    file = corpus / "f59.txt"
    old = file.read_bytes()

    class Slow(HubTokenizer):
        def encode(self, pieces: Sequence[Piece]) -> list[Ids]:
            file.write_bytes(old + b"the dog ate the hat")
            return super().encode(pieces)

    with pytest.raises(DataError, match="the text changed while it was tokenised"):
        BlockSource(corpus, 8, tokenizer=Slow(str(folder)), cache=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_what_a_killed_process_left_is_deleted_in_time(folder: Path, corpus: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for name, dir_h, file_h in (("dead", 30, 25), ("slow", 30, 1), ("new", 1, 1)):
        unfinished = cache / f".{name}.tmp-1-aa"
        unfinished.mkdir(parents=True)
        (unfinished / "train.bin").write_bytes(b"x")
        os.utime(unfinished / "train.bin", (time.time() - file_h * 3600,) * 2)
        os.utime(unfinished, (time.time() - dir_h * 3600,) * 2)
    BlockSource(corpus, 8, tokenizer=load_tokenizer(str(folder)), cache=cache)
    assert sorted(path.name for path in cache.glob(".*")) == [".new.tmp-1-aa", ".slow.tmp-1-aa"]
    assert len(list(cache.iterdir())) == 3


def test_who_tokenises_under_the_same_process_number_disturbs_nobody(
    folder: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As two containers that share the cache do: the second one begins and ends while the first one writes."""
    cache = tmp_path / "cache"
    monkeypatch.setattr(packing, "SLICE_BYTES", 1000)
    second: list[BlockSource] = []

    class First(HubTokenizer):
        def encode(self, pieces: Sequence[Piece]) -> list[Ids]:
            if not second:
                second.append(BlockSource(corpus, 8, tokenizer=load_tokenizer(str(folder)), cache=cache))
            return super().encode(pieces)

    first = BlockSource(corpus, 8, tokenizer=First(str(folder)), cache=cache)
    assert torch.equal(first.batch(range(9)), second[0].batch(range(9)))
    assert len(list(cache.iterdir())) == 1


def test_undecodable_bytes_are_replaced_and_told_once(
    folder: Path, corpus: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "PIECE_BYTES_MAX", 500)
    for i in range(3):
        (corpus / f"bad{i}.txt").write_bytes(b"the \xff\xfe cat sat on the mat " * (1 + i * 100))
    tokenizer = load_tokenizer(str(folder))
    BlockSource(corpus, 8, tokenizer=tokenizer)
    assert [r.message for r in caplog.records if "UTF-8" in r.message] == [
        "3 documents hold bytes that are no UTF-8; those became U+FFFD for the tokenizer"
    ]
    for i in range(3):
        (corpus / f"bad{i}.txt").unlink()
    caplog.clear()
    BlockSource(corpus, 8, tokenizer=tokenizer)
    assert "UTF-8" not in caplog.text, "it counts those of this text"
    ids = tokenizer.encode([Piece("x", b"a\xffb", False)])[0]
    assert isinstance(tokenizer, HubTokenizer) and tokenizer._inner.decode(ids) == "a\ufffdb"
    assert bytes(ByteTokenizer().encode([Piece("x", b"a\xffb", True)])[0]) == b"a\xffb\0"


@pytest.mark.parametrize(
    ("unk", "said"),
    [
        ("[UNK]", "25% of the tokens stand for text that is not known; the tokenizer {name} was made for other text"),
        (None, "a token stands for 36 bytes: much is left out, or the tokenizer {name} was made for other text"),
    ],
)
def test_a_tokenizer_that_was_made_for_other_text_is_told(
    unk: str | None, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    vocabulary = {character: i for i, character in enumerate("abcdefgh ")} | {"<eos>": 9, "[UNK]": 10}
    inner = Tokenizer(BPE(vocabulary, [], unk_token=unk, fuse_unk=True))
    folder, known, other = (tmp_path / name for name in ("tokenizer", "known", "other"))
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", unk_token=unk).save_pretrained(folder)
    for place, word in ((known, "ab cd"), (other, "жза" * 6 if unk is None else "a жза")):
        place.mkdir()
        for i in range(9):
            (place / f"{i}.txt").write_text(word, encoding="utf-8")
    (known / "rare.txt").write_text("ab cd " * 100 + "ж", encoding="utf-8")
    tokenizer = load_tokenizer(str(folder))
    tokenise(Files(Place(str(known))), tokenizer)
    assert not caplog.messages
    for place in (other, known):  # what it met in another text is no matter of this one
        tokenise(Files(Place(str(place))), tokenizer)
    assert [message.startswith(said.format(name=folder)) for message in caplog.messages] == [True], caplog.messages


def test_a_tokenizer_is_given_so_much_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "SLICE_BYTES", 8)
    pieces = [Piece("x", b"abc", True)] * 5 + [Piece("x", b"", True)] * 9
    given = list(packing.slices(pieces))
    assert [len(together) for together in given] == [2, 2, 5, 5] and sum(given, []) == pieces


def test_a_long_job_tells_how_far_it_is(folder: Path, corpus: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dlc")
    now = iter(range(0, 10_000, 11))
    tokenise(Files(Place(str(corpus))), load_tokenizer(str(folder)), clock=lambda: next(now))
    assert "tokenising: 0 MB so far" in caplog.text


def test_unusable_tokenizers_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tokenizer(tmp_path / "endless", eos=None)
    with pytest.raises(DataError, match="no EOS token"):
        load_tokenizer(str(tmp_path / "endless"))
    with pytest.raises(DataError, match="tokenizer.json"):
        load_tokenizer(str(tmp_path))

    import transformers

    def offline(*args: object, **options: object) -> None:
        assert args == ("someone/some-tokenizer",) and options == {"local_files_only": False}
        raise OSError("We couldn't connect to 'https://huggingface.co'\nand more")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", offline)
    with pytest.raises(DataError, match="couldn't connect.*; give a folder"):
        load_tokenizer("someone/some-tokenizer")


def test_bytes_are_not_kept_a_second_time(corpus: Path, tmp_path: Path) -> None:
    tokenise(Files(Place(str(corpus))), ByteTokenizer(), tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def test_too_much_for_the_memory_says_so(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MEMORY_BYTES_MAX", 1000)
    with pytest.raises(DataError, match="streaming"):
        BlockSource(corpus, 8)


def test_both_sides_together_are_too_much_for_the_memory(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = BlockSource(corpus, 8)
    train, held = (meta.tokens for meta in source._metas)  # of one byte each
    assert train and held
    monkeypatch.setattr(packing, "MEMORY_BYTES_MAX", train + held)
    assert BlockSource(corpus, 8).fingerprint() == source.fingerprint()
    monkeypatch.setattr(packing, "MEMORY_BYTES_MAX", train + held - 1)
    with pytest.raises(DataError, match="streaming"):
        BlockSource(corpus, 8)


def test_kept_tokens_are_on_the_disk_before_they_have_their_name(
    folder: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a host that loses its power might keep files of the right length with other content."""
    synced: set[int] = set()
    sync, rename = os.fsync, Path.rename

    def noted(fd: int) -> None:
        synced.add(os.fstat(fd).st_ino)
        sync(fd)

    def renamed(path: Path, target: Path) -> Path:
        assert {file.stat().st_ino for file in path.iterdir()} == synced and len(synced) == 3
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "rename", renamed)
    BlockSource(corpus, 8, tokenizer=load_tokenizer(str(folder)), cache=tmp_path / "cache")
    assert len(synced) == 3


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full here")
def test_a_disk_that_is_full_at_the_tokenizer_of_a_model_is_told_apart(folder: Path, tmp_path: Path) -> None:
    """tokenizers raises a bare Exception there, which ended the training as a failed one."""
    tokenizer, target = load_tokenizer(str(folder)), tmp_path / "model"

    class Model(torch.nn.Module):
        def save_pretrained(self, path: Path) -> None:
            path.mkdir()
            (path / "tokenizer.json").symlink_to("/dev/full")

    with pytest.raises(NoRoom, match="No space left on device"):
        save_model_folder(Model(), target, tokenizer.save)
    assert list(tmp_path.iterdir()) == []
