import gzip
import json
import logging
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlc.errors import DataError
from dlc.runspec import DataSpec, RunSpec
from dlc.train import sources
from dlc.train.data import OWN_BLOCKS, BlockSource, WholeText, demand_data, first_block, open_blocks, permute, place_of
from dlc.train.packing import is_validation, tokenise
from dlc.train.sources import Files, Place
from dlc.train.tokens import ByteTokenizer


def documents(source: object) -> list[tuple[str, bytes]]:
    """Names and texts."""
    found: dict[str, bytes] = {}
    for piece in Files(Place(str(source))).pieces():
        found[piece.name] = found.get(piece.name, b"") + piece.text + (b"\0" if piece.last else b"")
    return [(name, text[:-1]) for name, text in found.items()]


def words(n: int, tag: str = "w") -> str:
    return " ".join(f"{tag}{i}" for i in range(n))


@given(n=st.integers(1, 300), key=st.integers(0, 2**64 - 1))
def test_permutation_is_a_bijection(n: int, key: int) -> None:
    assert sorted(permute(i, n, key) for i in range(n)) == list(range(n))


def test_permutation_is_cheap_and_stays_below_n_for_large_n() -> None:
    n = 10**12 + 39
    assert len({permute(i, n, 5) for i in range(1000)}) == 1000
    assert all(0 <= permute(n - 1 - i, n, 5) < n for i in range(1000))
    spread = [permute(i, 4096, 5) for i in range(64)]  # neighbours do not stay neighbours
    assert sum(abs(a - b) < 64 for a, b in zip(spread, spread[1:], strict=False)) < 10


def test_which_block_stands_where_is_fixed_for_ever() -> None:
    """Else who joins a run with another version would train what others train, and leave out what nobody does."""
    assert [permute(i, 10, 5) for i in range(10)] == [8, 3, 1, 6, 2, 5, 9, 0, 4, 7]
    assert [permute(i, 16, 5) for i in range(16)] == [11, 3, 1, 6, 15, 5, 14, 10, 4, 7, 13, 8, 2, 0, 9, 12]
    assert permute(7, 10**12, 2**64 - 1) == 339553216659
    assert [first_block(seed, peer) // OWN_BLOCKS for seed, peer in ((0, "a"), (1, "a"), (0, "b"))] == [
        14454193,
        8174791,
        5658873,
    ]


@pytest.mark.parametrize("n_blocks", [2, 3, 19, 20, 39, 40])
def test_a_small_source_has_a_block_of_each_side_and_no_block_twice(tmp_path: Path, n_blocks: int) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(bytes(1 + i // 4 for i in range(4 * n_blocks)))
    source = BlockSource(file, seq_len=4)
    train = source.batch(range(source.n_blocks))[:, 0].tolist()
    held = torch.cat(source.validation_batches(3, 1000))[:, 0].tolist()
    assert len(held) == max(1, n_blocks // 20) and sorted(train + held) == list(range(1, n_blocks + 1))


def test_each_epoch_has_every_block_once_in_another_order(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text(words(400))
    source = BlockSource(file, seq_len=16, seed=3)
    n = source.n_blocks
    epochs = [[source.block(e * n + i) for i in range(n)] for e in range(3)]
    text = [sorted(bytes(b.tolist()) for b in epoch) for epoch in epochs]
    stream = file.read_bytes() + b"\0"
    assert text[0] == text[1] == text[2] == sorted(stream[i * 16 : i * 16 + 16] for i in range(n))
    assert not torch.equal(torch.stack(epochs[0]), torch.stack(epochs[1]))
    again, other = BlockSource(file, 16, seed=3), BlockSource(file, 16, seed=4)
    assert torch.equal(torch.stack(epochs[0]), again.batch(range(n)))
    assert not torch.equal(again.batch(range(n)), other.batch(range(n)))
    batch = source.batch([0, n, 5 * n + 1])
    assert batch.dtype == torch.int64 and batch.shape == (3, 16) and source.tokens_per_block == 16
    assert torch.equal(batch[1], source.block(n))
    with pytest.raises(DataError):
        source.block(-1)


def test_where_the_text_of_a_run_is() -> None:
    data = DataSpec(source="datasets:a", subset="b", split="c", text_field="d")
    assert place_of(RunSpec(data=data)) == Place("datasets:a", "b", "c", "d")


def test_a_run_reads_its_data_in_the_order_of_its_seed(tmp_path: Path) -> None:
    """Where the seed is lost on the way, another one changes nothing, and nobody notices."""
    (tmp_path / "a.txt").write_text(words(500))
    ks = range(50)
    for seed in (0, 7):
        run = RunSpec(seed=seed, data=DataSpec(source=str(tmp_path), seq_len=16))
        assert torch.equal(open_blocks(run, ByteTokenizer()).batch(ks), BlockSource(tmp_path, 16, seed).batch(ks))


def test_a_text_to_evaluate_is_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of what a run would hold out, too, and across the two; one block is enough."""
    caplog.set_level(logging.INFO, "dlc")
    for i in range(60):
        (tmp_path / f"{i}.txt").write_text(f"{i:02} " * 5)
    streams = tokenise(Files(Place(str(tmp_path))), ByteTokenizer())
    ids = [*streams.train.tolist(), *streams.held.tolist()]
    assert len(streams.held) and len(ids) == 60 * 16
    for seq_len in (7, 100, len(ids)):
        whole = WholeText(Place(str(tmp_path)), seq_len, ByteTokenizer())
        got = torch.cat(whole.batches(8, 10**6))
        assert got.dtype == torch.int64 and got.shape == (len(ids) // seq_len, seq_len)
        assert got.reshape(-1).tolist() == ids[: len(ids) // seq_len * seq_len]
        assert whole.bytes_per_token == 15 / 16
        assert f"has {whole.n_blocks} blocks of {seq_len} tokens" in caplog.text
    assert "held out" not in caplog.text and "to train on" not in caplog.text
    assert [len(batch) for batch in WholeText(Place(str(tmp_path)), 7, ByteTokenizer()).batches(2, 5)] == [2, 2, 1]
    with pytest.raises(DataError, match=f"holds {len(ids)} tokens, fewer than a block of {len(ids) + 1}: .*--seq-len"):
        WholeText(Place(str(tmp_path)), len(ids) + 1, ByteTokenizer())


def test_a_source_that_is_used_up_is_told_now_and_then(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dlc")
    file = tmp_path / "a.txt"
    file.write_text(words(400))
    source = BlockSource(file, seq_len=16)
    n = source.n_blocks
    assert f"has {n} blocks of 16 tokens to train on, and {source.n_validation_blocks} held out" in caplog.text
    caplog.clear()
    told = []
    for ks in ([0, 1], [n - 1, n], [n, n + 1], [n - 2], [n + 2], [3 * n], [3 * n + 1]):
        source.batch(ks)
        told.append(len(caplog.records))
    for epoch in range(4, 100):
        source.batch([epoch * n])
    assert len(caplog.records) == 2 + 5 and "taken 64 times" in caplog.text
    assert told == [0, 1, 1, 1, 1, 2, 2] and f"all {n} blocks to train on have been taken" in caplog.text
    newcomer = BlockSource(file, seq_len=16)
    caplog.clear()
    newcomer.batch([7 * n])
    assert not caplog.records, "it has taken none of those before"


def test_without_leases_a_peer_counts_how_often_it_took_all_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dlc")
    file = tmp_path / "a.txt"
    file.write_text(words(400))
    source = BlockSource(file, seq_len=16)
    first, n = first_block(0, "a peer"), source.n_blocks
    assert first >= OWN_BLOCKS
    caplog.clear()
    taken: set[bytes] = set()
    for k in range(first, first + 5 * n):
        taken.add(bytes(source.block(k).tolist()))
        assert len(taken) == n or not caplog.messages
    assert [message.split("have been taken ")[1].split(";")[0] for message in caplog.messages] == [
        "once",
        "2 times",
        "4 times",
    ]


def test_one_file_is_split_by_blocks(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(bytes(range(1, 251)) * 8)  # 2000 bytes and one separator
    source = BlockSource(file, seq_len=20)
    assert (source.n_blocks, source.n_validation_blocks) == (95, 5)
    held = torch.cat(source.validation_batches(2, 100))
    assert bytes(held.reshape(-1).tolist()) == file.read_bytes()[95 * 20 :]


def test_a_folder_is_split_by_file_for_ever(tmp_path: Path) -> None:
    names = [f"part{i // 10}/f{i}.txt" for i in range(200)]
    for i, name in enumerate(names):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes([i + 1]) * 40)
    held = {i + 1 for i, name in enumerate(names) if is_validation(name)}
    assert 1 <= len(held) <= 25
    source = BlockSource(tmp_path, seq_len=8)
    train = set(source.batch(range(source.n_blocks)).unique().tolist())
    validation = set(torch.cat(source.validation_batches(4, 10**6)).unique().tolist())
    assert validation - {0} == held and train - {0} == set(range(1, 201)) - held
    (tmp_path / "zzz_new.txt").write_bytes(b"\xff" * 40)  # a new file moves no old one to the other side
    again = BlockSource(tmp_path, seq_len=8)
    assert set(torch.cat(again.validation_batches(4, 10**6)).unique().tolist()) - {0, 255} == held


def test_fingerprint_tells_data_apart_and_not_seeds(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text(words(100))
    a, b = BlockSource(file, 16, seed=1).fingerprint(), BlockSource(file, 16, seed=2).fingerprint()
    file.write_text(words(100).replace("w7", "w8"))
    assert a == b != BlockSource(file, 16, seed=1).fingerprint()


def test_which_documents_are_held_out_is_fixed_for_ever() -> None:
    """Else who joins a run with another version would train on what the others measure."""
    assert [i for i in range(100) if is_validation(f"part{i // 10}/f{i}.txt")] == [83, 99]


@pytest.mark.parametrize("side", [False, True])
def test_fingerprint_is_of_what_is_trained_on_and_of_what_is_held_out(tmp_path: Path, side: bool) -> None:
    names = [f"f{i}.txt" for i in range(100)]
    for name in names:
        (tmp_path / name).write_text(words(10))
    before = BlockSource(tmp_path, 16).fingerprint()
    (tmp_path / next(name for name in names if is_validation(name) == side)).write_text(words(10, "v"))
    assert BlockSource(tmp_path, 16).fingerprint() != before


def test_validation_batches_are_evenly_spaced_and_bounded(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text(words(3000))
    source = BlockSource(file, seq_len=8)
    batches = source.validation_batches(4, 10)
    assert [len(b) for b in batches] == [4, 4, 2] and all(b.dtype == torch.int64 for b in batches)
    everything = torch.cat(source.validation_batches(64, 10**9))
    assert len(everything) == source.n_validation_blocks
    n = source.n_validation_blocks
    assert torch.equal(torch.cat(batches), everything[[j * n // 10 for j in range(10)]])
    assert source.validation_batches(4, 0) == []


def test_stdlib_is_there_without_tests() -> None:
    source = BlockSource("stdlib", seq_len=128, seed=0)
    assert source.n_blocks > 10_000 and source.n_validation_blocks > 200
    assert torch.equal(source.block(7), BlockSource("stdlib", 128).block(7))
    names = [name for name, _ in documents("stdlib")]
    assert "json/decoder.py" in names and names == sorted(names)
    assert not any({"site-packages", "test", "tests"} & set(name.split("/")[:-1]) for name in names)


def test_jsonl_and_parquet(tmp_path: Path) -> None:
    texts = [words(50, "a"), "Grüße", words(50, "b")]
    lines = tmp_path / "a.jsonl"
    lines.write_text("\n\n".join(json.dumps({"text": t, "id": 1}) for t in texts) + "\n")
    at_lines = [(f"a.jsonl/{n}", text.encode()) for n, text in zip((1, 3, 5), texts, strict=True)]
    assert documents(lines) == at_lines
    pq = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    table = tmp_path / "b.parquet"
    pq.write_table(pyarrow.table({"text": texts}), table)
    at_rows = [(f"b.parquet/{n}", text.encode()) for n, text in enumerate(texts, 1)]
    assert documents(table) == at_rows
    assert documents(tmp_path) == [*at_lines, *at_rows]
    pq.write_table(pyarrow.table({"text": [texts[0], None, *texts[1:]]}), table)
    assert [text for _, text in documents(table)] == [text for _, text in at_rows], "a null is no document"
    lines.write_text('{"text": null}\n' + lines.read_text())
    assert [text for _, text in documents(lines)] == [text for _, text in at_lines]
    pq.write_table(pyarrow.table({"body": texts}), table)
    with pytest.raises(DataError, match='no column "text"'):
        documents(table)


def test_a_table_in_two_files_is_split_by_records_and_two_large_texts_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for kind in ("jsonl", "txt"):
        (tmp_path / kind).mkdir()
        pairs = ((f"{i}-0.{kind}", f"{i}-1.{kind}") for i in range(999))
        for name in next((a, b) for a, b in pairs if is_validation(a) and not is_validation(b)):
            records = [json.dumps({"text": words(9, f"{name}-{n}-")}) for n in range(500)]
            (tmp_path / kind / name).write_text("\n".join(records))
    tables = BlockSource(tmp_path / "jsonl", seq_len=32)
    assert 0.02 < tables.n_validation_blocks / (tables.n_blocks + tables.n_validation_blocks) < 0.1
    assert "held out for validation" not in caplog.text
    BlockSource(tmp_path / "txt", seq_len=32)
    assert "50 % of" in caplog.text and "held out for validation" in caplog.text


def test_a_long_text_comes_in_pieces_cut_where_tokens_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PIECE_BYTES_MAX", 16)
    file = tmp_path / "a.txt"
    for text in (
        b"one two\nthree four\nfive",
        b"a b c d e f g h i j k l m",
        "äöü".encode() * 20,
        "a😀😀".encode() * 20,
        b" " + b"x" * 40,
        b"\xff" * 50,
        b"x" * 32,
        b"",
    ):
        file.write_bytes(text)
        pieces = list(Files(Place(str(file))).pieces())
        assert b"".join(piece.text for piece in pieces) == text
        assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert all(len(piece.text) <= 16 for piece in pieces)
        if text[:1] != b"\xff":
            assert all(piece.text.decode() is not None for piece in pieces)
    file.write_bytes(b"one two\nthree four\nfive")
    assert [piece.text for piece in Files(Place(str(file))).pieces()] == [b"one two\n", b"three four\nfive"]
    file.write_bytes(b"a b c d e f g h")
    assert [piece.text for piece in Files(Place(str(file))).pieces()] == [b"a b c d e f g h"]
    file.write_bytes(b"a b c d e f g hi")
    assert [piece.text for piece in Files(Place(str(file))).pieces()] == [b"a b c d e f g hi"], "it has room as it is"
    file.write_bytes(b"a b c d e f g h i j")
    assert [piece.text for piece in Files(Place(str(file))).pieces()] == [b"a b c d e f g h", b" i j"]


@pytest.mark.parametrize("sliver", ["", "ok"])
def test_bytes_per_token_are_of_the_side_that_is_measured(tmp_path: Path, sliver: str) -> None:
    """What is held out is too short for a block, so the last blocks of the other side are measured: not that sliver."""
    held = next(n for n in range(1, 2000) if is_validation(f"a.jsonl/{n}"))
    texts = ["x y z w " * 400] * (held - 1) + [sliver]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    source = BlockSource(tmp_path, 128)
    assert source.n_validation_blocks > 10
    assert source.bytes_per_token == pytest.approx(3200 / 3201)


@pytest.mark.parametrize(
    ("held", "train", "whole"), [(16, 64, True), (15, 64, False), (64, 16, True), (64, 15, False)], ids=str
)
def test_whole_texts_are_held_out_where_both_sides_have_a_block(
    tmp_path: Path, held: int, train: int, whole: bool
) -> None:
    """Of the length of the run, whatever is measured now; and the bytes per token are of what is held out then."""
    names = [f"{i}.txt" for i in range(60)]
    for side, tokens in ((True, held), (False, train)):
        (tmp_path / next(name for name in names if is_validation(name) == side)).write_bytes(b"x" * (tokens - 1))
    for seq_len in (4, 16):
        source = BlockSource(tmp_path, seq_len, split_seq_len=16)
        assert source.whole_texts == whole
        measured = held if held >= 16 else train
        assert source.bytes_per_token == (measured - 1) / measured


def test_what_is_demanded_of_data_is_text_for_two_blocks(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    spec = RunSpec(data=DataSpec(source=str(tmp_path), seq_len=16))
    for i in range(40):
        (tmp_path / f"{i}.txt").touch()  # each is a token, its end
    with pytest.raises(DataError, match="no text"):
        demand_data(spec, tokenizer)
    for i in range(1, 40):
        (tmp_path / f"{i}.txt").unlink()
    (tmp_path / "0.txt").write_bytes(b"x" * 31)
    demand_data(spec, tokenizer)
    (tmp_path / "0.txt").write_bytes(b"x" * 30)
    with pytest.raises(DataError, match="holds 31 tokens, but training and validation need a block of 16 each"):
        demand_data(spec, tokenizer)


@pytest.mark.parametrize(("held_bytes", "train_bytes"), [(8, 600), (100, 600), (600, 0)])
def test_blocks_of_another_length_are_cut_from_the_same_sides(
    tmp_path: Path, held_bytes: int, train_bytes: int
) -> None:
    """What a run trains on is no validation text of it, whichever sides have a block of the other length."""
    for i in range(60):
        name = f"{i}.txt"
        (tmp_path / name).write_bytes(f"{i:02} ".encode() * ((held_bytes if is_validation(name) else train_bytes) // 3))
    run = 128
    split = BlockSource(tmp_path, run)
    side = split._validation.tobytes()
    assert len(side) == split.n_validation_blocks * run
    for seq_len in (16, 100, 128, len(side)):
        source = BlockSource(tmp_path, seq_len, split_seq_len=run)
        got = torch.cat(source.validation_batches(8, 10**6))
        assert bytes(got.reshape(-1).tolist()) == side[: len(side) // seq_len * seq_len]
        assert source.bytes_per_token == split.bytes_per_token
    with pytest.raises(DataError, match=f"holds out {len(side)} tokens .* give a smaller seq_len"):
        BlockSource(tmp_path, len(side) + 1, split_seq_len=run)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2"),
        ('{"body": "x"}', r'line 2: not a .* "text" field \(found: body\); set data.text_field'),
        ('{"text": 3}', "int"),
        ("[1]", "line 2"),
        ("[" * 100_000, "line 2"),
    ],
)
def test_bad_jsonl_names_the_line(tmp_path: Path, line: str, says: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(DataError, match=says):
        documents(file)


def test_unusable_sources_say_what_to_do(tmp_path: Path) -> None:
    empty, short, folder = tmp_path / "empty.txt", tmp_path / "short.txt", tmp_path / "folder"
    empty.touch()
    short.write_text("too short for two blocks")
    folder.mkdir()
    (folder / "image.png").write_bytes(b"\x89PNG")
    (tmp_path / "broken.parquet").write_bytes(b"no parquet at all")
    for source, says in [
        (empty, "no text"),
        (short, "smaller seq_len"),
        (folder, "suffix"),
        (tmp_path / "missing", "no data source"),
        (tmp_path / "broken.parquet", "parquet"),
    ]:
        with pytest.raises(DataError, match=says):
            BlockSource(source, seq_len=16)
    with pytest.raises(DataError, match="seq_len"):
        BlockSource("stdlib", seq_len=1)


def test_what_a_parquet_file_lacks_is_told_in_one_line(tmp_path: Path) -> None:
    """Its footer is damaged: pyarrow's words for that end with an empty line."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "torn.parquet"
    pq.write_table(pa.table({"text": ["a few words"] * 500}), file)
    whole = file.read_bytes()
    file.write_bytes(whole[:-250] + bytes(50) + whole[-200:])
    with pytest.raises(DataError, match="cannot be read as parquet: .") as refused:
        BlockSource(file, seq_len=16)
    assert len(str(refused.value).splitlines()) == 1


def test_text_that_is_too_short_on_both_sides_is_told_of_each(tmp_path: Path) -> None:
    """More than two blocks in all: "holds 29 tokens, ... give at least 22" told nobody what is missing."""
    names = [f"{i}.txt" for i in range(60)]
    for side, length in ((False, 18), (True, 9)):
        (tmp_path / next(name for name in names if is_validation(name) == side)).write_text("x" * length)
    says = (
        "holds 19 tokens to train on, and 10 in .* held out for validation, but a block of 11 of each .*, or 2 of one"
    )
    with pytest.raises(DataError, match=says):
        BlockSource(tmp_path, seq_len=11)
    assert BlockSource(tmp_path, seq_len=10).n_blocks == BlockSource(tmp_path, seq_len=9).n_validation_blocks == 1


def test_a_text_in_a_folder_may_be_compressed_too(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(words(400))
    (tmp_path / "b.txt").write_bytes(gzip.compress(words(400).encode()))
    with pytest.raises(DataError, match=r"b\.txt is compressed \(gzip\): unpack"):
        BlockSource(tmp_path, seq_len=16)


def test_what_is_left_out_of_a_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is hidden, and, which is told, other suffixes and linked folders."""
    caplog.set_level(logging.INFO, "dlc")
    folder, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    for name in ("a.txt", "below/b.txt", ".hidden.txt", ".git/c.txt", "__pycache__/d.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    assert [name for name, _ in documents(folder)] == ["a.txt", "below/b.txt"] and not caplog.records
    for name in ("c.jsonl.gz", "below/d.GZ", "e.java", "README", ".f.gz"):
        (folder / name).touch()
    elsewhere.mkdir()
    (elsewhere / "g.txt").write_text("g")
    (folder / "below" / "lang").symlink_to(elsewhere)
    (folder / "h.txt").symlink_to(elsewhere / "g.txt")
    for _ in ("to check them", "to read them"):
        assert [name for name, _ in documents(folder)] == ["a.txt", "below/b.txt", "h.txt"]
    assert len(caplog.messages) == 2, "each is told once"
    assert f"left out of {folder}, for other suffixes: 4 files (.gz 2, " in caplog.messages[0]
    assert f"left out of {folder}: 1 linked folder (below/lang)" in caplog.messages[1]


def test_the_hash_of_files_tells_where_one_ends_and_what_it_is(tmp_path: Path) -> None:
    """It names what is kept of them: the same bytes are other documents in other files."""

    def hashed(files: dict[str, bytes], field: str = "text") -> bytes:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for name, raw in files.items():
            (folder / name).write_bytes(raw)
        return Files(Place(str(folder), text_field=field)).content_hash()

    two = {"a.txt": b"x", "b.txt": b"y"}
    assert hashed(two) == hashed(two) != hashed({"a.txt": b"x", "c.txt": b"y"})
    assert hashed(two) != hashed({"a.txt": b"xb.txt.txt\0y"})
    records = {"a.jsonl": b"{}"}
    assert hashed(records) != hashed(records, "body") and hashed(records) != hashed({"a.txt": b"{}"})


def test_compressed_text_is_no_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = "\n".join(json.dumps({"text": words(20, f"{i}-")}) for i in range(200))
    plain, packed = tmp_path / "a.json", tmp_path / "a.jsonl.gz"
    plain.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    with pytest.raises(DataError, match=r"a\.jsonl\.gz is compressed \(gzip\): unpack"):
        BlockSource(packed, seq_len=16)
    assert BlockSource(plain, seq_len=16).n_blocks > 0
    assert "a.json is taken as one text" in caplog.text
    plain.unlink()
    with pytest.raises(DataError, match="unpack"):
        BlockSource(tmp_path, seq_len=16)


@pytest.mark.parametrize(
    ("name", "begins", "says"),
    [
        ("a.txt", "some text".encode("utf-16"), "a.txt is UTF-16: convert it to UTF-8"),
        ("a.jsonl", '{"text": ""}'.encode("utf-16"), "UTF-16"),
        ("a.txt", b"PAR1\x15\x04", "suffix .parquet"),
        ("a.md", b"ARROW1\0\0", "Arrow table: write it as .parquet"),
        ("a.txt", b"\x5d\0\0\x80\0\xff\xff", "compressed \\(lzma\\)"),
    ],
)
def test_what_only_looks_like_text_is_refused(tmp_path: Path, name: str, begins: bytes, says: str) -> None:
    """Alone, and among others."""
    (tmp_path / name).write_bytes(begins + words(400).encode())
    (tmp_path / "b.txt").write_text(words(400))
    for source in (tmp_path / name, tmp_path):
        with pytest.raises(DataError, match=says):
            BlockSource(source, seq_len=16)


def test_what_may_be_no_text_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a.ndjson", "a.csv", "a.json"):
        (tmp_path / name).write_text(words(400))
        BlockSource(tmp_path / name, seq_len=16)
        assert f"{name} is taken as one text" in caplog.text
    (tmp_path / "b.txt").write_bytes(b"\x01\x00" + words(400).encode())
    assert documents(tmp_path / "b.txt")[0][1].startswith(b"\x01\x00w"), "bytes are as good as text for who wants them"
    assert "b.txt holds zero bytes" in caplog.text and "a.csv holds zero bytes" not in caplog.text
    (tmp_path / "c.txt").write_bytes(bytes(range(1, 256)) * 40)
    (tmp_path / "d.txt").write_bytes(
        "Elle était déjà partie quand la pluie a cessé de tomber sur la ville. ".encode("latin-1") * 300
    )
    for name in ("c.txt", "d.txt"):
        documents(tmp_path / name)
    assert "c.txt is hardly text: 50% of its beginning is no UTF-8" in caplog.text
    assert "d.txt is hardly text" not in caplog.text


def test_a_linked_file_that_is_not_there_is_not_left_out_in_silence(tmp_path: Path) -> None:
    """As where a disk is not mounted: the run would be trained on what is left."""
    (tmp_path / "a.txt").write_text("x" * 100)
    (tmp_path / "b.txt").symlink_to(tmp_path / "elsewhere" / "b.txt")
    with pytest.raises(DataError, match=r"b\.txt is a link that leads nowhere"):
        documents(tmp_path)


def test_an_unreadable_file_is_a_data_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.txt"
    file.write_text("x" * 100)

    def refuse(self: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match="Permission denied"):
        documents(file)
