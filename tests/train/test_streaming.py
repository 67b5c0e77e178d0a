import itertools
import json
import logging
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from dlc.errors import ConfigError, DataError
from dlc.runspec import DataSpec, InnerSpec, RunSpec
from dlc.train import packing, sources, streaming
from dlc.train.data import BlockSource, open_blocks
from dlc.train.datasets_io import Stream
from dlc.train.packing import is_validation
from dlc.train.sources import Piece, Place
from dlc.train.streaming import StreamSource
from dlc.train.tokens import ByteTokenizer, Ids, load_tokenizer
from tests.train.tokenizers_made import make_tokenizer

FILES, ROWS, SEQ, L = 4, 90, 16, 5


def text(file: int, row: int) -> str:
    return f"file {file} row {row} " * (1 + row % 4)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for f in range(FILES):
        lines = [json.dumps({"text": text(f, i), "id": i}) for i in range(ROWS + f)]
        (folder / f"part{f}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def opened(source: Path, shards: int = 2, marks: Path | None = None) -> StreamSource:
    return StreamSource(Stream(Place(str(source)), shards), SEQ, ByteTokenizer(), L, marks)


def expected(files: list[list[str]], s: int) -> Iterator[bytes]:
    """Blocks of shard s, worked out by hand: its documents but the held-out ones, again and again."""
    kept = [t for n, t in enumerate(t for file in files for t in file) if not is_validation(f"{s}/{n}")]
    stream = b"".join(t.encode() + b"\0" for t in kept) * 3
    yield from (stream[a : a + SEQ] for a in range(0, len(stream) - SEQ + 1, SEQ))


def rows_of(s: int, shards: int) -> list[list[str]]:
    """FILES is a multiple of the shards: whole files."""
    return [[text(f, i) for i in range(ROWS + f)] for f in range(s, FILES, shards)]


def test_a_position_is_a_segment_of_a_shard(corpus: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dlc")
    source = opened(corpus)
    want = [list(expected(rows_of(s, 2), s)) for s in range(2)]
    epoch = len(want[0]) // 3
    got = [bytes(row) for row in source.batch(range(2 * (epoch + 40) // L * L)).tolist()]
    for k, block in enumerate(got):  # through the end of both shards into their second epochs
        r, within = divmod(k, L)
        assert block == want[r % 2][r // 2 * L + within], k
    assert len(got) > 2 * epoch
    told = [record.getMessage() for record in caplog.records]
    assert sorted(told) == [f"shard {s} of {corpus} has ended, and begins again" for s in range(2)]


@pytest.mark.parametrize("shards", [1, 3, 4, 7])
def test_any_peer_finds_the_same_at_any_position_in_any_order(
    corpus: Path, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards of whole files, and shards of one row in S; reading on, back, and over what others train."""
    monkeypatch.setattr(streaming, "DOCUMENTS_AT_ONCE", 7)
    one, other = opened(corpus, shards), opened(corpus, shards)
    in_order = one.batch(range(40 * L))
    generator = torch.Generator().manual_seed(shards)
    for _ in range(12):
        start = int(torch.randint(0, 39 * L, (1,), generator=generator))
        ks = list(range(start, start + L))
        assert torch.equal(other.batch(ks), in_order[ks]), ks
    assert torch.equal(one.batch(range(40 * L)), in_order)


def test_of_large_documents_few_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the tokenizer is given slices of one; what stands in the blocks does not depend on it."""
    for i in range(60):
        (tmp_path / f"{i:02}.txt").write_text(f"book {i} " * 40)
    want = opened(tmp_path, 1)
    blocks, held = want.batch(range(900)), torch.cat(want.validation_batches(4, 9))
    monkeypatch.setattr(streaming, "GROUP_BYTES", 700)
    monkeypatch.setattr(packing, "SLICE_BYTES", 300)
    monkeypatch.setattr(sources, "PIECE_BYTES_MAX", 100)
    given: list[int] = []
    encode = ByteTokenizer.encode

    def counted(self: ByteTokenizer, pieces: Sequence[Piece]) -> list[Ids]:
        given.append(sum(len(piece.text) for piece in pieces))
        return encode(self, pieces)

    monkeypatch.setattr(ByteTokenizer, "encode", counted)
    few = opened(tmp_path, 1)
    assert torch.equal(torch.cat(few.validation_batches(4, 9)), held)
    assert max(given) <= 400
    for k in range(900):
        assert torch.equal(few.batch([k])[0], blocks[k])
        assert sum(len(ids) for _, ids in few._shards[0]._ready) <= 1100
    assert max(given) <= 400 and len(given) > 40


def test_reading_on_reads_each_document_once(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    source = opened(corpus)
    cut = streaming.cut
    monkeypatch.setattr(streaming, "cut", lambda name, raw: read.append(name) or cut(name, raw))
    for k in range(0, 30 * L, 3):
        source.batch(range(k, k + 3))
    assert len(read) == len(set(read)) > 50


def test_what_is_held_out_is_never_trained_on(corpus: Path) -> None:
    source = opened(corpus)
    held = torch.cat(source.validation_batches(4, 12))
    assert held.shape == (12, SEQ) and [len(batch) for batch in source.validation_batches(5, 12)] == [5, 5, 2]
    names = [[(s, n) for n in range(400) if is_validation(f"{s}/{n}")] for s in range(2)]
    flat = [[t for file in rows_of(s, 2) for t in file] for s in range(2)]
    streams = ["".join(flat[s][n] + "\0" for _, n in names[s] if n < len(flat[s])).encode() for s in range(2)]
    for i, block in enumerate(held.tolist()):  # shards in turn
        assert bytes(block) == streams[i % 2][i // 2 * SEQ : i // 2 * SEQ + SEQ]
    trained = b"".join(bytes(row) for row in source.batch(range(0, 2 * 60 * L)).tolist())
    for s in range(2):
        for _, n in names[s]:
            if n < len(flat[s]):
                assert b"\0" + flat[s][n].encode() + b"\0" not in trained
    assert source.bytes_per_token == pytest.approx(1, abs=0.1) and source.bytes_per_token < 1
    assert sum(len(batch) for batch in source.validation_batches(8, 10**6)) == sum(len(t) // SEQ for t in streams)


def test_a_restart_goes_on_from_its_marks(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "DOCUMENTS_AT_ONCE", 4)
    first = opened(corpus, marks=tmp_path)
    want = first.batch(range(40 * L))
    again = opened(corpus, marks=tmp_path)
    read: list[str] = []
    cut = streaming.cut
    monkeypatch.setattr(streaming, "cut", lambda name, raw: read.append(name) or cut(name, raw))
    assert torch.equal(again.batch(range(39 * L, 40 * L)), want[39 * L :])
    assert 0 < len(read) < 40  # of the hundreds before
    for file in tmp_path.glob("*/*.json"):
        file.write_text("[1, 2")
    assert torch.equal(opened(corpus, marks=tmp_path).batch(range(40 * L)), want)
    monkeypatch.setattr(streaming, "MARKS_MAX", 3)
    few = opened(corpus, marks=tmp_path / "few")
    assert torch.equal(few.batch(range(40 * L)), want) and torch.equal(few.batch(range(L)), want[:L])
    kept = [json.loads(file.read_text()) for file in (tmp_path / "few").glob("*/*.json")]
    assert kept and all(len(marks) == 3 for marks in kept)
    newest = [str(segment * L) for segment in (17, 18, 19)]
    assert all(list(marks) == newest for marks in kept)


def test_marks_that_cannot_be_kept_are_told_now_and_then(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a full disk each lease said so."""
    source = StreamSource(Stream(Place(str(corpus)), 1), SEQ, ByteTokenizer(), L, tmp_path)

    def full(*_: object) -> None:
        raise OSError("full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        for at in range(10):
            source.batch([at * L])
    assert [r.getMessage().partition("its start")[2] for r in caplog.records] == [
        "",
        " (again)",
        " (for the 4th time in a row)",
        " (for the 8th time in a row)",
    ]
    caplog.clear()
    source.batch([10 * L])
    assert not caplog.records and not list(tmp_path.rglob("*tmp-*"))


def test_while_a_shard_is_read_over_marks_are_written_and_it_is_told_now_and_then(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dlc")
    writes: list[int] = []
    write = streaming._write_marks

    def counted(file: Path, lines: Collection[str]) -> None:
        writes.append(len(lines))
        write(file, lines)

    monkeypatch.setattr(streaming, "_write_marks", counted)
    now = 0.0
    stream = Stream(Place(str(corpus)), 1)
    source = StreamSource(stream, SEQ, ByteTokenizer(), L, tmp_path, clock=lambda: now)
    source.batch([40 * L])
    assert writes == [41] and not caplog.records
    source.batch(range(40 * L, 41 * L))
    assert writes == [41], "there was no new one"

    def clock() -> float:
        nonlocal now
        now += 1
        return now

    source = StreamSource(stream, SEQ, ByteTokenizer(), L, tmp_path / "other", clock=clock)
    source.batch([6 * L])
    assert writes[1:] == [1, 2, 3, 4, 5, 6, 7]  # every 5 s, and where it was to go
    told = [record.getMessage() for record in caplog.records]
    where = f"reading shard 0 of {corpus} on to block 30, over what others train; at"
    assert told == [f"{where} {at} so far" for at in (10, 20, 30)]
    again = StreamSource(stream, SEQ, ByteTokenizer(), L, tmp_path / "other")
    assert list(again._shards[0]._marks) == [segment * L for segment in range(7)]


@pytest.mark.parametrize(("change", "used"), [({"epoch": 0}, True), ({"skip": None}, False)])
def test_of_marks_as_another_version_wrote_them_those_are_used_that_say_enough(
    corpus: Path, tmp_path: Path, change: dict[str, Any], used: bool
) -> None:
    opened(corpus, marks=tmp_path).batch(range(4 * L))
    for file in tmp_path.glob("*/*.json"):
        marks = {at: mark | change for at, mark in json.loads(file.read_text()).items()}
        said = {at: {name: value for name, value in mark.items() if value is not None} for at, mark in marks.items()}
        file.write_text(json.dumps({at: {"state": None} | mark for at, mark in said.items()}))
    again = opened(corpus, marks=tmp_path)
    assert bool(again._shards[0]._marks) == used
    assert torch.equal(again.batch(range(4 * L)), opened(corpus).batch(range(4 * L)))


def test_parquet_saved_datasets_and_text_stream_too(tmp_path: Path) -> None:
    import datasets

    rows = [text(0, i) for i in range(200)]
    made = datasets.Dataset.from_dict({"body": rows, "n": list(range(200))})
    made.to_parquet(tmp_path / "a.parquet")
    made.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": made.select(range(9)), "other": made}).save_to_disk(tmp_path / "dict")
    wholes = {
        Place(str(tmp_path / "a.parquet"), text_field="body"): 1,
        Place(str(tmp_path / "saved"), text_field="body"): 1,
        Place(str(tmp_path / "dict"), split="other", text_field="body"): 1,
    }
    want = list(expected([rows], 0))
    for place in wholes:
        source = StreamSource(Stream(place, 1), SEQ, ByteTokenizer(), L)
        assert [bytes(row) for row in source.batch(range(100)).tolist()] == want[:100], place
    (tmp_path / "text").mkdir()
    for i, row in enumerate(rows):
        (tmp_path / "text" / f"{i:03}.txt").write_bytes(row.encode() + (b"\xff" if i == 0 else b""))
    got = opened(tmp_path / "text", 1).batch(range(100))
    rows[0] += "\ufffd"
    assert [bytes(row) for row in got.tolist()] == list(expected([rows], 0))[:100]


def test_of_a_saved_dataset_a_stream_reads_the_text_alone(tmp_path: Path) -> None:
    """Every row of a table with pictures was decoded as a whole."""
    import datasets

    made = datasets.Dataset.from_dict({"text": [text(0, i) for i in range(9)], "n": list(range(9))})
    made.save_to_disk(tmp_path / "saved")
    stream = Stream(Place(str(tmp_path / "saved")), 2)
    rows = [row for s in range(2) for row in stream.shard(s)]
    assert rows == [{"text": text(0, i)} for i in range(9)]
    assert stream.content.startswith(datasets.load_from_disk(str(tmp_path / "saved"))._fingerprint), "of all of it"


def test_map_style_datasets_are_split_by_row(tmp_path: Path) -> None:
    import datasets

    rows = [text(1, i) for i in range(150)]
    datasets.Dataset.from_dict({"text": rows}).save_to_disk(tmp_path / "saved")
    source = BlockSource(tmp_path / "saved", SEQ)
    held = b"".join(rows[i].encode() + b"\0" for i in range(150) if is_validation(str(i)))
    got = b"".join(bytes(row) for batch in source.validation_batches(8, 10**6) for row in batch.tolist())
    assert got == held[: len(held) // SEQ * SEQ] and len(got) > 3 * SEQ
    with pytest.raises(DataError, match='no column "body".*data.text_field'):
        BlockSource("", SEQ, place=Place(str(tmp_path / "saved"), text_field="body"))
    datasets.DatasetDict({"test": datasets.Dataset.from_dict({"text": rows})}).save_to_disk(tmp_path / "dict")
    with pytest.raises(DataError, match="no split 'train' .found: test"):
        BlockSource(tmp_path / "dict", SEQ)


@pytest.mark.parametrize(
    "told", [{"type": "torch", "columns": ["ids"]}, {"type": "pandas"}, {"type": "arrow"}, {"columns": ["ids"]}]
)
def test_the_format_in_which_a_dataset_was_saved_does_not_matter(told: dict[str, Any], tmp_path: Path) -> None:
    """As of one that was tokenised for another trainer: of its columns only the ids would be given."""
    import datasets

    plain = datasets.Dataset.from_dict({"text": [text(1, i) for i in range(150)], "ids": [[1, 2]] * 150})
    plain.save_to_disk(tmp_path / "plain")
    plain.with_format(**told).save_to_disk(tmp_path / "told")
    want, got = (BlockSource(tmp_path / name, SEQ) for name in ("plain", "told"))
    assert got.fingerprint() == want.fingerprint()
    want, got = opened(tmp_path / "plain"), opened(tmp_path / "told")
    assert torch.equal(got.batch(range(20)), want.batch(range(20)))


@pytest.mark.parametrize(("row", "at"), [(30, "after row 29"), (0, "from its first row on")])
def test_a_row_that_is_no_text_is_named(row: int, at: str, tmp_path: Path) -> None:
    """Of an Arrow file that is damaged."""
    import datasets

    datasets.Dataset.from_dict({"text": ["h\u00e9llo " * 9 + str(i) for i in range(50)]}).save_to_disk(str(tmp_path))
    (file,) = tmp_path.glob("*.arrow")
    raw, bad = f"h\u00e9llo {row}".encode(), b"h\xff\xfello %d" % row
    file.write_bytes(file.read_bytes().replace(raw, bad))
    with pytest.raises(DataError, match=f"{tmp_path} cannot be read {at}: UnicodeDecodeError"):
        BlockSource(tmp_path, SEQ)


def test_a_stream_that_shrank_is_other_data_and_a_copy_is_not(corpus: Path, tmp_path: Path) -> None:
    """Where its first documents are the same still."""
    for name in ("here", "there"):
        shutil.copytree(corpus, tmp_path / name)
    here, there = (opened(tmp_path / name) for name in ("here", "there"))
    assert here.fingerprint() == there.fingerprint()
    last = max(path for path in (tmp_path / "there").rglob("*") if path.is_file())
    lines = last.read_bytes().splitlines(keepends=True)
    last.write_bytes(b"".join(lines[:-1]))
    assert opened(tmp_path / "there").fingerprint() != here.fingerprint()


def test_whatever_gives_a_position_another_sample_is_other_data(corpus: Path, tmp_path: Path) -> None:
    """Else peers of one run would train some samples twice, and others never."""

    def told(source: Path = corpus, shards: int = 2, seq_len: int = SEQ, segment: int = L, end: str = "") -> bytes:
        tokenizer = ByteTokenizer()
        tokenizer.identity += end.encode()
        return StreamSource(Stream(Place(str(source)), shards), seq_len, tokenizer, segment).fingerprint()

    changed = tmp_path / "changed"
    shutil.copytree(corpus, changed)
    for path in changed.rglob("*.jsonl"):  # of the same size
        path.write_bytes(path.read_bytes().replace(b"row", b"ROW"))
    ways = [told(), told(changed), told(shards=3), told(seq_len=SEQ + 1), told(segment=L + 1), told(end="x")]
    assert ways[0] == told() and len(set(ways)) == len(ways)


def test_marks_of_another_cut_of_the_same_stream_are_not_used(corpus: Path, tmp_path: Path) -> None:
    stream, ks = Stream(Place(str(corpus)), 2), range(12 * L, 14 * L)
    for seq_len, segment in ((SEQ, L), (SEQ + 1, L), (SEQ, L + 1)):
        want = StreamSource(stream, seq_len, ByteTokenizer(), segment).batch(ks)
        for _ in range(2):  # the second time by its own marks
            got = StreamSource(stream, seq_len, ByteTokenizer(), segment, tmp_path).batch(ks)
            assert torch.equal(got, want)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("kind", ["files", "saved", "datasets:"])
def test_marks_of_other_data_are_not_used(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files changed since, but for their first documents."""
    import datasets

    monkeypatch.setattr(streaming, "DOCUMENTS_AT_ONCE", 7)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    folder = tmp_path / "data"

    def written(word: str, at_ns: int) -> None:
        long = range(350, 600) if word == "now!" else range(100, 350)
        texts = [f"{'same' if n < 100 else word} {n} " * (4 if n in long else 2) for n in range(600)]
        shutil.rmtree(folder, ignore_errors=True)
        if kind == "saved":
            made = datasets.Dataset.from_dict({"text": texts})
            made._fingerprint = "the same"
            made.save_to_disk(str(folder))
        else:
            folder.mkdir()
            lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
            (folder / "train.jsonl").write_text(lines)
        for path in folder.iterdir():
            os.utime(path, ns=(at_ns, at_ns))

    def source(marks: Path | None) -> StreamSource:
        place = Place(f"{kind if kind == 'datasets:' else ''}{folder}")
        return StreamSource(Stream(place, 1), SEQ, ByteTokenizer(), L, marks)

    written("here", 10**18)
    source(tmp_path / "marks").batch(range(80 * L))
    written("now!", 10**18 + 10**9)  # of the same size
    ks = range(70 * L, 80 * L)
    assert torch.equal(source(tmp_path / "marks").batch(ks), source(None).batch(ks))
    written("now!", 10**18 + 10**9)
    again = source(tmp_path / "marks")
    assert again._shards[0]._marks, "those of the same data are"
    before = again.fingerprint()
    written("elsewhere", 10**18 + 10**9)
    assert source(None).fingerprint() != before


def test_marks_of_another_release_of_datasets_are_not_used(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in them is its own affair."""
    import datasets

    first = opened(corpus, marks=tmp_path)
    want = first.batch(range(40))
    monkeypatch.setattr(datasets, "__version__", "1000.0.0")
    for marks in tmp_path.rglob("*.json"):
        known = {at: mark | {"state": {"elsewhere": 3}} for at, mark in json.loads(marks.read_bytes()).items()}
        marks.write_text(json.dumps(known))
    second = opened(corpus, marks=tmp_path)
    assert torch.equal(second.batch(range(30, 40)), want[30:]) and second.fingerprint() == first.fingerprint()


def test_marks_that_cannot_be_written_leave_nothing_behind(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    opened(corpus, marks=tmp_path).batch(range(4 * L))
    assert "No space left on device" in caplog.text
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_the_commit_of_a_dataset_on_the_hub_is_part_of_its_content(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def opened(commit: str) -> Stream:
        files = datasets.data_files.DataFilesList(["hf://datasets/a/b/0.parquet"], [("a/b", commit)])
        builder = SimpleNamespace(config=SimpleNamespace(data_files={datasets.Split.TRAIN: files}))
        monkeypatch.setattr(datasets, "load_dataset_builder", lambda *args: builder)
        return Stream(Place("datasets:a/b"), 1)

    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: None)
    one, same, other = opened("c0ffee"), opened("c0ffee"), opened("deed")
    assert (one.content, one.identity) == (same.content, same.identity)
    assert one.content != other.content and one.identity != other.identity
    builder = SimpleNamespace(config=SimpleNamespace(data_files=None))
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *args: builder)
    assert Stream(Place("datasets:a/b"), 1).content == ""


def test_a_run_opens_what_its_spec_names(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tokenizer(tmp_path / "tokenizer")
    data = DataSpec(
        source=str(corpus),
        streaming=True,
        shards=2,
        seq_len=SEQ,
        tokenizer=str(tmp_path / "tokenizer"),
        lease_blocks=10,
    )
    spec = RunSpec(data=data, sync_every=5, inner=InnerSpec(batch_size=2))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer"))
    blocks = open_blocks(spec, tokenizer, tmp_path / "cache")
    assert isinstance(blocks, StreamSource)
    same = StreamSource(Stream(Place(str(corpus)), 2), SEQ, tokenizer, 10)
    assert torch.equal(blocks.batch(range(30)), same.batch(range(30)))
    assert blocks.fingerprint() == same.fingerprint() != opened(corpus).fingerprint()

    import datasets

    asked: list[object] = []

    def unreachable(*args: object, **options: object) -> None:
        asked.append((args, options))
        raise ConnectionError("Couldn't reach 'someone/corpus' on the Hub\nmore")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    far = DataSpec(source="datasets:someone/corpus", subset="small", split="test", streaming=True, seq_len=SEQ)
    with pytest.raises(DataError, match="Couldn't reach.*save_to_disk"):
        open_blocks(RunSpec(data=far), ByteTokenizer())
    assert asked == [(("someone/corpus", "small"), {"split": "test", "streaming": True})]


def test_a_shard_with_nothing_to_train_on_is_refused_at_the_start(corpus: Path, tmp_path: Path) -> None:
    """All trainers would end when they get there."""
    folder = tmp_path / "data"
    shutil.copytree(corpus, folder)
    (folder / "part2.jsonl").write_text("")
    with pytest.raises(DataError, match=r"shard 2 of .*data holds no .*\(empty files: part2.jsonl\).*shards below 4"):
        opened(folder, 4)
    assert opened(folder, 2).batch(range(90)).shape == (90, SEQ)  # another file is in that shard
    (folder / "part2.jsonl").write_text('{"text": null}\n' * 40)
    (folder / "part3.jsonl").write_text('{"text": null}\n')
    with pytest.raises(DataError, match=r"shards 2, 3 of .*data hold no text to train on: set data.shards below 4"):
        opened(folder, 4)


def counted_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of `datasets`, over some data."""
    import datasets

    passes, begin = list[int](), datasets.IterableDataset.__iter__

    def counted(self: Any) -> Any:
        passes.append(1)
        return begin(self)

    monkeypatch.setattr(datasets.IterableDataset, "__iter__", counted)
    return passes


@pytest.mark.parametrize("shards", [3, 7])
def test_the_beginnings_of_shards_that_share_files_are_read_together(
    shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each for itself read all rows: thousands of shards took minutes, or hours."""
    lines = [json.dumps({"text": text(0, i)}) if i % 9 else '{"text": null}' for i in range(1500)]
    lines[100:100] = ["", " "]  # no documents, but rows
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    passes = counted_passes(monkeypatch)
    source = opened(tmp_path, shards)
    assert len(passes) == 1
    stream = source._stream
    alone = [streaming._Held(ByteTokenizer(), SEQ, streaming._OwnFiles(stream, s).read) for s in range(shards)]
    want = [held.first(4) for held in alone]
    assert len(passes) == 1 + shards
    together = [held.first(4) for held in source._held]
    assert all(len(blocks) == 4 for blocks in want)
    for s in range(shards):
        assert [block.tobytes() for block in together[s]] == [block.tobytes() for block in want[s]], s


def test_far_more_shards_than_records_are_refused_soon_and_a_few_of_them_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text(0, i)}) + "\n" for i in range(100)))
    passes = counted_passes(monkeypatch)
    few = r"^shards (\d+, ){4}\d+ and \d+ more of .* hold no text to train on: set data.shards below 4096"
    with pytest.raises(DataError, match=few):
        opened(tmp_path, 4096)
    assert len(passes) == 1


@pytest.mark.parametrize(("suffix", "nothing"), [(".txt", ""), (".jsonl", '{"text": ""}\n' * 40)])
def test_a_shard_of_empty_documents_has_nothing_to_train_on(suffix: str, nothing: str, tmp_path: Path) -> None:
    """All of its blocks would be ends of documents, which a model soon predicts."""
    for i, text in enumerate((nothing, '{"text": "the cat sat on the mat"}\n' * 40) * 2):
        (tmp_path / f"{i}{suffix}").write_text(text)
    with pytest.raises(DataError, match="shard 0 of .* holds no text to train on"):
        opened(tmp_path, 2)
    assert opened(tmp_path, 1).batch(range(9)).any()


def test_where_no_shard_has_anything_to_train_on_text_is_missing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": null}\n' * 40)
    with pytest.raises(DataError, match=r"shard 0 of .* holds no text to train on: give more text$"):
        opened(tmp_path, 1)


def test_parquet_files_that_are_unlike_each_other_are_one_stream(tmp_path: Path) -> None:
    """In their other columns, or without a row: what differs in the last would end all trainers when they get there."""
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    rows = [text(0, i) for i in range(120)]
    tables = [{"text": rows[:40], "n": list(range(40))}, {"text": rows[:0]}, {"n": ["a"] * 20, "text": rows[40:60]}]
    for number, table in enumerate(tables):
        parquet.write_table(pyarrow.table(table), tmp_path / f"{number}.parquet", row_group_size=25)
    with parquet.ParquetWriter(tmp_path / "3.parquet", pyarrow.schema({"text": pyarrow.string()})) as file:
        for part in (rows[:0], rows[60:]):  # two groups, the first without a row
            file.write_table(pyarrow.table({"text": pyarrow.array(part, pyarrow.string())}))
    want = list(expected([rows], 0))
    assert [bytes(row) for row in opened(tmp_path, 1).batch(range(90)).tolist()] == want[:90]
    assert len(BlockSource(tmp_path, SEQ).batch(range(90))) == 90
    parquet.write_table(pyarrow.table({"body": rows}), tmp_path / "4.parquet")
    with pytest.raises(DataError, match=r'4.parquet: no column "text" \(found: body\); set data.text_field'):
        opened(tmp_path, 1)
    for number in (0, 2, 3, 4):
        (tmp_path / f"{number}.parquet").unlink()
    with pytest.raises(DataError, match="holds no row"):
        opened(tmp_path, 1)
    with pytest.raises(DataError, match="holds no text"):
        BlockSource(tmp_path, SEQ)


def test_parquet_columns_without_a_string_do_not_decide_what_the_others_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`datasets` reads all files as it finds the first, and broke off where the others begin."""
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    rows = [text(0, i) for i in range(120)]
    kinds = [pyarrow.string(), pyarrow.large_string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())]
    arrays = [pyarrow.nulls(30), *(pyarrow.array(rows[40 * i : 40 * (i + 1)], kinds[i]) for i in range(3))]
    for number, array in enumerate([*arrays, pyarrow.nulls(30)]):
        parquet.write_table(pyarrow.table({"text": array}), tmp_path / f"{number}.parquet")
    want = list(expected([rows], 0))
    assert [bytes(row) for row in opened(tmp_path, 1).batch(range(90)).tolist()] == want[:90]
    assert caplog.text.count('0.parquet has rows whose "text" is null') == 1
    assert len(BlockSource(tmp_path, SEQ).batch(range(90))) == 90
    parquet.write_table(pyarrow.table({"text": pyarrow.array([1] * 30)}), tmp_path / "5.parquet")
    with pytest.raises(DataError, match='5.parquet: the column "text" holds int64, not strings; set data.text_field'):
        opened(tmp_path, 1)


@pytest.mark.parametrize("how", ["grows", "shrinks", "stays"])
def test_files_that_change_while_they_are_read_are_told(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, when a shard has ended: what comes next may stand elsewhere at other peers."""
    lines = [json.dumps({"text": text(0, i)}) + "\n" for i in range(200)]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(lines))
    source = opened(tmp_path, 2)
    first = source.batch(range(9))
    file.write_text("".join(lines * 2 if how == "grows" else lines[:150] if how == "shrinks" else lines))
    assert "while they were read" not in caplog.text
    source.batch(range(900))
    assert caplog.text.count(f"files of {tmp_path} came, went or changed while they were read") == (how != "stays")
    assert torch.equal(opened(tmp_path, 2).batch(range(9)), first)


def test_a_file_that_came_and_is_none_to_be_read_ends_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text(0, i)}) + "\n" for i in range(200)))
    source = opened(tmp_path, 2)
    (tmp_path / "b.jsonl").write_bytes(b"\x1f\x8b packed")
    source.batch(range(900))
    assert caplog.text.count(f"files of {tmp_path} came, went or changed while they were read") == 1


def test_a_tokenizer_that_was_made_for_other_text_than_a_stream_is_told_once(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inner = Tokenizer(WordLevel({"file": 0, "[UNK]": 1, "<eos>": 2}, unk_token="[UNK]"))
    inner.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", unk_token="[UNK]").save_pretrained(tmp_path)
    for _ in range(2):
        StreamSource(Stream(Place(str(corpus)), 2), SEQ, load_tokenizer(str(tmp_path)), L)
    (said,) = caplog.messages
    assert said.startswith(f"68% of the tokens stand for text that is not known; the tokenizer {tmp_path} was made for")


def test_who_reads_over_can_be_broken_off(corpus: Path) -> None:
    source = opened(corpus)
    want = source.batch(range(3))
    source.break_off()
    with pytest.raises(DataError, match="is not read on: the training ends"):
        source.batch([60 * L])
    assert torch.equal(opened(corpus).batch(range(3)), want)


def test_after_a_read_that_broke_off_positions_hold_what_they_did(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents that had been read when it did would be missing, and all blocks after them be others."""
    monkeypatch.setattr(streaming, "DOCUMENTS_AT_ONCE", 7)
    want, source = opened(corpus).batch(range(12 * L)), opened(corpus)
    source.batch(range(3))
    line_text, lines = streaming.line_text, itertools.count()

    def breaks_off(*args: Any, **options: Any) -> bytes | None:
        if next(lines) == 5:
            raise DataError("the network")
        return line_text(*args, **options)

    monkeypatch.setattr(streaming, "line_text", breaks_off)
    with pytest.raises(DataError, match="the network"):
        source.batch(range(12 * L))
    assert torch.equal(source.batch(range(12 * L)), want)


def test_file_names_are_no_patterns(tmp_path: Path, corpus: Path) -> None:
    odd = tmp_path / "part[1]*.jsonl"
    odd.write_bytes((corpus / "part0.jsonl").read_bytes())
    (tmp_path / "part1.jsonl").write_text('{"text": "another file"}\n' * 99)
    hidden = tmp_path / ".cache" / "__x__" / "part0.jsonl"
    hidden.parent.mkdir(parents=True)
    hidden.write_bytes(odd.read_bytes())
    want = opened(corpus / "part0.jsonl", 1).batch(range(20))
    assert all(torch.equal(opened(source, 1).batch(range(20)), want) for source in (odd, hidden))


def test_a_group_of_documents_that_are_all_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last documents of a shard can be such; with any tokenizer the shard then begins again."""
    monkeypatch.setattr(streaming, "DOCUMENTS_AT_ONCE", 1)
    make_tokenizer(tmp_path / "tokenizer")
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer"))
    last = next(n for n in range(20, 200) if is_validation(f"0/{n}"))
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": text(0, i)}) + "\n" for i in range(last + 1)))
    source = StreamSource(Stream(Place(str(file)), 1), SEQ, tokenizer, L)
    kept = [Piece("", text(0, i).encode(), True) for i in range(last + 1) if not is_validation(f"0/{i}")]
    ids = np.concatenate(tokenizer.encode(kept) * 2)
    blocks = len(ids) // SEQ
    assert source.batch(range(blocks)).flatten().tolist() == ids[: blocks * SEQ].tolist()


def test_bytes_that_are_no_utf8_and_nulls_do_not_end_a_stream(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They may stand far from the beginning, where all peers have trained for long."""
    rows = [text(0, i) for i in range(200)]
    file = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": row}).encode() for row in rows]
    lines[150] = b'{"text": "a\xff\xfeb"}'
    rows[150] = "a\ufffd\ufffdb"
    lines[160] = b'{"text": null}'
    lines[161] = b'{"text": ""}'
    file.write_bytes(b"\n".join(lines))
    rows[161] = ""
    kept = [row for n, row in enumerate(rows) if n != 160 and not is_validation(f"0/{n}")]
    want = ("\0".join(kept) + "\0").encode() * 2
    got = opened(file, 1).batch(range(len(want) // SEQ))
    assert bytes(got.flatten().tolist()) == want[: got.numel()]
    assert caplog.text.count(f'{file} has rows whose "text" is null or missing; they are passed over') == 1


@pytest.mark.parametrize(
    "torn", ['{"text": "cut in the mid', "[1]", "7", '{"text": 5}', "[" * 100_000, '{"text": "a"} {"text": "b"}']
)
def test_torn_lines_do_not_end_a_stream(tmp_path: Path, torn: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each is a document that is not there; a blank line is none, and a record without the field has a null."""
    rows = [text(0, i) for i in range(200)]
    lines = ["\ufeff" + json.dumps({"text": rows[0]}), "", *(json.dumps({"text": row}) for row in rows[1:])]
    lines[151] = lines[171] = torn
    lines[181] = '{"body": "x"}'
    file = tmp_path / "a.jsonl"
    file.write_text("\r\n".join(lines), encoding="utf-8")
    kept = [row for n, row in enumerate(rows) if n not in (150, 170, 180) and not is_validation(f"0/{n}")]
    want = ("\0".join(kept) + "\0").encode() * 2
    got = opened(file, 1).batch(range(len(want) // SEQ))
    assert bytes(got.flatten().tolist()) == want[: got.numel()]
    assert caplog.text.count(f'{file} has lines that are no JSON object with a string as "text"; they are') == 1
    assert caplog.text.count(f'{file} has rows whose "text" is null or missing; they are passed over') == 1


def test_the_ends_of_lines_of_a_stream_of_texts_are_lf(tmp_path: Path) -> None:
    """As docs/data.md says; those of files that are read as a whole stay."""
    for i in range(40):
        (tmp_path / f"{i:02}.txt").write_bytes(b"one\r\ntwo\r\n")
    stream = StreamSource(Stream(Place(str(tmp_path)), 1), 9, ByteTokenizer(), 4)
    assert bytes(stream.batch([0])[0].tolist()) == b"one\ntwo\n\0"
    assert bytes(BlockSource(str(tmp_path), 11).block(0).tolist()) == b"one\r\ntwo\r\n\0"


def test_a_stream_that_broke_off_is_read_again_from_a_mark(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader may have read ahead, and nobody asked for what failed: the next block must be the right one."""
    monkeypatch.setattr(streaming, "DOCUMENTS_AT_ONCE", 7)
    want = opened(corpus, 1).batch(range(40 * L))
    source = opened(corpus, 1)
    fails = {30, 33, 90}
    whole, read = streaming.line_text, 0

    def broken(*args: object, **options: object) -> bytes | None:
        nonlocal read
        read += 1
        if read in fails:
            raise ConnectionError("reset by peer")
        return whole(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(streaming, "line_text", broken)
    got: list[torch.Tensor] = []
    failed = 0
    while len(got) < 40 * L:
        try:
            got.append(source.batch([len(got)]))
        except DataError as error:
            assert "broke off in shard 0: ConnectionError: reset by peer" in str(error)
            failed += 1
    assert failed == len(fails) and torch.equal(torch.cat(got), want)


def test_streams_that_cannot_be_used_say_why(tmp_path: Path, corpus: Path) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("".join(json.dumps({"text": "x" * 40}) + "\n" for _ in range(2)))
    with pytest.raises(DataError, match="shard 1 .*data.shards below 3|shard 2 .*data.shards below 3"):
        opened(few, 3).batch(range(3 * L))
    with pytest.raises(DataError, match="held out"):
        opened(few, 1).validation_batches(4, 4)
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    (mixed / "a.jsonl").write_text(few.read_text())
    (mixed / "b.txt").write_text("text")
    with pytest.raises(DataError, match="several kinds"):
        opened(mixed)
    for line in ("{ no json", '["text"]', '{"body": "x"}', '{"text": 5}', "[" * 100_000):
        broken = tmp_path / "broken.jsonl"
        broken.write_text(line + "\n" + few.read_text())
        says = 'shard 0: its first line is no JSON object with a string as "text" .*: set data.text_field, or mend that'
        with pytest.raises(DataError, match=says):
            opened(broken, 1).batch(range(9))
    table = tmp_path / "broken.parquet"
    table.write_bytes(b"PAR1 and so on")
    with pytest.raises(DataError, match="broken.parquet cannot be read as parquet"):
        opened(table, 1)
    with pytest.raises(DataError, match="start at 0"):
        opened(corpus).batch([-1])
    for wrong in (
        {"streaming": True},
        {"shards": 0},
        {"subset": "x"},
        {"source": "datasets:"},
        {"tokenizer": ""},
        {"split": ""},
        {"text_field": ""},
        {"split": "test"},
        {"text_field": "body"},
        {"source": "a.txt", "shards": 4},
    ):
        with pytest.raises(ConfigError, match="data\\."):
            DataSpec(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("streaming", [False, True])
def test_what_is_said_of_a_source_and_not_read_is_refused(tmp_path: Path, streaming: bool) -> None:
    import datasets

    (tmp_path / "a.txt").write_text("one two three")
    (tmp_path / "a.jsonl").write_text('{"body": "one two three"}\n')

    def read(name: str, **said: str) -> None:
        place = Place(str(tmp_path / name), **said)
        if streaming:
            Stream(place, 2)
        else:
            BlockSource("", SEQ, place=place)

    with pytest.raises(DataError, match="no split 'test'"):
        read("a.jsonl", split="test", text_field="body")
    with pytest.raises(DataError, match="without a field 'body'"):
        read("a.txt", text_field="body")
    saved = datasets.Dataset.from_dict({"text": ["one two three"]}, split="validation")
    saved.save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DataError, match="one dataset, without a split 'test'"):
        read("saved", split="test")
