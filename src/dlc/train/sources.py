"""Where text comes from: documents as bytes, in an order that is the same on every host that holds the same data.

    "stdlib"            the .py files of this Python's standard library, without tests: on every machine, no download
    a file              .jsonl or .parquet (the field `text_field`), anything else as plain text
    a folder            every file below it with a suffix of TEXT_SUFFIXES, .jsonl or .parquet; what is hidden is left
                        out, and so are other suffixes and linked folders, which is told
    a dataset           "datasets:NAME", or a folder that `datasets` wrote with save_to_disk: see `datasets_io`

Documents have names, by which they are split into training and validation: that of the file, as a path below the source
with "/" between folders; for a record of a jsonl or parquet file its line or row too ("part-0.jsonl/17"); or the number
of a dataset's row. So a corpus in a few large tables is split as one in a thousand is.
Bytes are taken as they are: nothing has to be valid UTF-8. A record or row whose text is null is no document: tables of
millions of rows have such, and a stream shows them when all have trained for long. Nor is a torn line of jsonl in a
stream; a file that is read as a whole is refused for one, since that comes before anything is trained.
"""

from __future__ import annotations

import functools
import glob
import json
import logging
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from blake3 import blake3

from dlc.errors import DataError, first_line
from dlc.runspec import STDLIB
from dlc.train.shelf import expanded

log = logging.getLogger(__name__)

STDLIB_BYTES_MAX = 24 * 2**20
"""Enough for the whole library of today (12 MB); bounds the start-up time of a distribution that adds to it."""
PIECE_BYTES_MAX = 1 << 20
"""A longer text is given in pieces: what is held, and given to a tokenizer, at once."""
TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py", ".c", ".h", ".cpp", ".rs", ".js", ".html", ".csv", ".tex")
RECORD_SUFFIXES = (".jsonl", ".parquet")
SUFFIXES_TOLD = 5
"""Of files that are left out, the most frequent ones."""
DATASETS = "datasets:"
PARQUET_ROWS = 1024
"""Read together. `datasets` would take as many as a file's first row group has, which may be none, or millions."""
TABLE_SUFFIXES = (".json", ".ndjson", ".jsonlines", ".csv", ".tsv")
"""Of files that hold records as a rule, and are taken as text here."""
PACKED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x5d\0\0": "lzma",
    b"PK\x03\x04": "zip",
    b"\x04\x22\x4d\x18": "lz4",
    b"7z\xbc\xaf\x27\x1c": "7z",
}
"""First bytes of compressed files: for byte tokens they would be a text as good as any."""
NO_TEXT = {
    b"PAR1": "a parquet table: give it the suffix .parquet",
    b"ARROW1": "an Arrow table: write it as .parquet",
    b"\xff\xfe": "UTF-16: convert it to UTF-8",
    b"\xfe\xff": "UTF-16: convert it to UTF-8",
}
"""Likewise of others that are no text as it is read here."""
LOOKED_AT_BYTES = 8192
"""Of a file's beginning: where these hold a zero byte, or many that are no UTF-8, it is hardly text."""
NO_UTF8_SHARE_MAX = 0.1
"""Of the characters there: more is told. Text of western Europe in Latin-1 comes to less."""
STRINGS = ("string", "large_string", "string_view")
"""Types of parquet columns that hold text."""
_STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Place:
    """Where the text is; the fields are those of `DataSpec`."""

    source: str
    subset: str = ""
    split: str = "train"
    text_field: str = "text"


class Piece(NamedTuple):
    """A document, or a part of it where it is longer than PIECE_BYTES_MAX."""

    name: str
    text: bytes
    last: bool
    """Whether the document ends with it."""


class Documents(Protocol):
    """All text of a source; what goes wrong in reading it is a DataError."""

    def pieces(self) -> Iterator[Piece]:
        """Every document, from the first; may be called again."""
        ...

    def content_hash(self) -> bytes:
        """Changes with the text."""
        ...


class Files:
    """The documents of a file, a folder, or the standard library; files are read when their turn comes."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.paths = list_files(place.source)
        """Names and paths, sorted by name."""
        check_used(place, [path for _, path in self.paths])

    def pieces(self) -> Iterator[Piece]:
        """As `Documents.pieces`."""
        for name, path in self.paths:
            try:
                yield from self._of(name, path)
            except OSError as e:
                raise DataError(f"the data source {path} cannot be read: {e}") from e

    def content_hash(self) -> bytes:
        """As `Documents.content_hash`: BLAKE3 of the names, kinds and bytes of all files."""
        hasher = blake3(self._place.text_field.encode(), max_threads=blake3.AUTO)
        for name, path in self.paths:
            hasher.update(name.encode("utf-8", "surrogateescape") + path.suffix.lower().encode() + b"\0")
            hash_file(hasher, path)
        return hasher.digest()

    def _of(self, name: str, path: Path) -> Iterator[Piece]:
        suffix = path.suffix.lower()
        if suffix == ".jsonl":
            texts = _jsonl(path, self._place.text_field)
        elif suffix == ".parquet":
            texts = _parquet(path, self._place.text_field)
        else:
            yield from _plain(name, path)
            return
        for number, text in texts:
            yield from cut(f"{name}/{number}", text)


def check_used(place: Place, paths: list[Path]) -> None:
    """DataError: something is said of these files that they do not have."""
    if place.split != Place.split:
        raise DataError(f"{place.source} is read as files, which have no split {place.split!r}: leave out data.split")
    if place.text_field != Place.text_field and not any(path.suffix.lower() in RECORD_SUFFIXES for path in paths):
        raise DataError(
            f"{place.source} holds plain text, without a field {place.text_field!r}: leave out data.text_field, or "
            f"name a source with {' or '.join(RECORD_SUFFIXES)} files"
        )


def demand_source(source: str) -> None:
    """DataError: there is no file or folder of that name, or it is kept shut. It is not looked into: this takes no
    time."""
    if source == STDLIB or source.startswith(DATASETS):
        return
    root = expanded(source)
    try:
        root.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise _nothing_at(root) from None
    except OSError as e:
        raise DataError(f"the data source {root} cannot be read: {e}") from e


def list_files(source: str) -> list[tuple[str, Path]]:
    """Names and paths of a file, a folder or the standard library, sorted by name; DataError where there are none."""
    if source == STDLIB:
        return list(_capped(_stdlib()))
    root = expanded(source)
    try:
        return _files(root)
    except OSError as e:
        raise DataError(f"the data source {root} cannot be read: {e}") from e


def cut(name: str, text: bytes) -> Iterator[Piece]:
    """A document in pieces of at most PIECE_BYTES_MAX."""
    start = 0
    while len(text) - start > PIECE_BYTES_MAX:
        end = start + _seam(text[start : start + PIECE_BYTES_MAX])
        yield Piece(name, text[start:end], False)
        start = end
    yield Piece(name, text[start:] if start else text, True)


def _seam(text: bytes) -> int:
    """Where to cut: after the last line, else before the last space, where tokens end; else between two characters."""
    if at := text.rfind(b"\n") + 1:
        return at
    if (at := text.rfind(b" ")) > 0:
        return at
    at = len(text) - 1
    while at > len(text) - 4 and text[at] & 0xC0 == 0x80:
        at -= 1
    return at


def _plain(name: str, path: Path) -> Iterator[Piece]:
    with path.open("rb") as file:
        text = b""
        while more := file.read(PIECE_BYTES_MAX):
            *whole, rest = cut(name, text + more)
            yield from whole
            text = rest.text
        yield Piece(name, text, True)


def _stdlib() -> Iterator[tuple[str, Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    paths, _ = _walk(root, skipped=_STDLIB_SKIPPED, suffixes=(".py",)) if root.is_dir() else ([], None)
    if not paths:
        raise DataError(f"this Python has no standard library sources in {root}; name a text file or folder instead")
    yield from paths


def _capped(files: Iterator[tuple[str, Path]]) -> Iterator[tuple[str, Path]]:
    """As many as fit the limit; what this user may not read is left out."""
    total = 0
    for name, path in files:
        if not os.access(path, os.R_OK):
            continue
        total += path.stat().st_size
        if total > STDLIB_BYTES_MAX:
            return
        yield name, path


def _files(root: Path) -> list[tuple[str, Path]]:
    if root.is_dir():
        found, left_out = _walk(root, skipped={"__pycache__"}, suffixes=TEXT_SUFFIXES + RECORD_SUFFIXES)
        left_out.tell(root)
        if not found:
            known = " ".join(TEXT_SUFFIXES + RECORD_SUFFIXES)
            raise DataError(f"the folder {root} holds no file with a known suffix ({known}); unpack compressed ones")
        for _, path in found:
            _check_text(path)
        return found
    if root.is_file():
        _check_text(root)
        if root.suffix.lower() in TABLE_SUFFIXES:
            log.warning(
                "%s is taken as one text, with all its brackets or commas: name a file of JSON records, one a line, "
                ".jsonl, and write another table as such a file or as .parquet",
                root,
            )
        return [(root.name, root)]
    raise _nothing_at(root)


def _nothing_at(root: Path) -> DataError:
    return DataError(
        f"no data source at {root}; give a text file, a folder, a .jsonl or .parquet file, "
        f'"{DATASETS}NAME", or {STDLIB!r}'
    )


def _check_text(path: Path) -> None:
    """DataError: it is compressed, or another thing than its suffix says, or a link to none."""
    if _leads_nowhere(path):
        raise DataError(f"the data source {path} is a link that leads nowhere: mount what it leads to, or remove it")
    with path.open("rb") as file:
        begins = file.read(LOOKED_AT_BYTES)
    for mark, kind in PACKED.items():
        if begins.startswith(mark):
            raise DataError(f"the data source {path} is compressed ({kind}): unpack it first")
    if path.suffix.lower() == ".parquet":
        return
    for mark, what in NO_TEXT.items():
        if begins.startswith(mark):
            raise DataError(f"the data source {path} is {what}")
    if b"\0" in begins:
        tell_once(f"{path} holds zero bytes, as no text does; it is taken as it is", logging.WARNING)
        return
    characters = begins.decode("utf-8", errors="replace")
    if (share := characters.count("\ufffd") / max(1, len(characters))) > NO_UTF8_SHARE_MAX:
        tell_once(
            f"{path} is hardly text: {share:.0%} of its beginning is no UTF-8. It is taken as it is: convert it to "
            "UTF-8 if it is text, and unpack or remove it if it is none",
            logging.WARNING,
        )


class _LeftOut:
    """What is not read of a folder, though it is not hidden."""

    def __init__(self) -> None:
        self.suffixes: Counter[str] = Counter()
        self.linked: list[str] = []
        """Folders."""

    def tell(self, root: Path) -> None:
        """In the log."""
        if self.suffixes:
            which = ", ".join(f"{suffix} {count}" for suffix, count in self.suffixes.most_common(SUFFIXES_TOLD))
            count = self.suffixes.total()
            tell_once(f"left out of {root}, for other suffixes: {_counted(count, 'file')} ({which})", logging.INFO)
        if self.linked:
            which = ", ".join(sorted(self.linked)[:SUFFIXES_TOLD])
            what = _counted(len(self.linked), "linked folder")
            tell_once(f"left out of {root}: {what} ({which}): copy or mount what is to be read", logging.WARNING)


def _counted(count: int, what: str) -> str:
    return f"1 {what}" if count == 1 else f"{count} {what}s"


def _walk(root: Path, skipped: set[str], suffixes: tuple[str, ...]) -> tuple[list[tuple[str, Path]], _LeftOut]:
    found: list[tuple[str, Path]] = []
    left_out = _LeftOut()
    for folder, below, names in os.walk(root, onerror=_reraise):
        below[:] = [d for d in below if d not in skipped and not d.startswith(".")]
        linked = [Path(folder, d) for d in below if os.path.islink(Path(folder, d))]
        left_out.linked += [path.relative_to(root).as_posix() for path in linked]
        for name in names:
            path = Path(folder, name)
            if name.startswith(".") or not (path.is_file() or _leads_nowhere(path)):
                continue
            if path.suffix.lower() in suffixes:
                found.append((path.relative_to(root).as_posix(), path))
            else:
                left_out.suffixes[path.suffix.lower() or "without"] += 1
    return sorted(found), left_out


def _leads_nowhere(path: Path) -> bool:
    return path.is_symlink() and not path.exists()


def _reraise(error: OSError) -> None:
    raise error


def _jsonl(path: Path, field: str) -> Iterator[tuple[int, bytes]]:
    """Numbers of lines, and their texts."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                text = record[field]
            except KeyError:
                raise DataError(
                    f'{path}, line {number}: not a JSON object with a "{field}" field (found: '
                    f"{', '.join(record) or 'none'}); set data.text_field, or give that record one"
                ) from None
            except (ValueError, TypeError, RecursionError) as e:
                raise DataError(f'{path}, line {number}: not a JSON object with a "{field}" field ({e})') from e
            if text is None:
                tell_of_nulls(str(path), field)
                continue
            yield number, encoded(text, field, f"{path}, line {number}")


def _parquet(path: Path, field: str) -> Iterator[tuple[int, bytes]]:
    """Numbers of rows, and their texts."""
    if not rows_of(path, field):
        return
    import datasets

    try:
        rows = datasets.load_dataset(
            "parquet", data_files=as_pattern(path), split="train", streaming=True, **parquet_options(field)
        )
        for number, row in enumerate(rows, start=1):
            text = text_of(row, field, str(path), f"row {number}")
            if text is not None:
                yield number, text
    except DataError:
        raise
    except Exception as e:  # pyarrow and datasets have no common base
        raise DataError(f"{path} cannot be read as parquet: {first_line(e)}") from e


def parquet_options(field: str) -> dict[str, Any]:
    """Of other columns nothing is read, so that they may be of another type in each file."""
    return {"columns": [field], "batch_size": PARQUET_ROWS}


def rows_of(path: Path, field: str) -> int:
    """How many a parquet file has, 0 where the column is of the type null: `datasets` takes the types of the first file
    for those of all. DataError: it is none, or has rows, but no such column, or one that holds no strings."""
    try:
        from pyarrow import parquet, types
    except ImportError as e:
        raise DataError(f"reading {path} needs pyarrow, which cannot be imported: {e}") from e
    try:
        with parquet.ParquetFile(path) as file:
            rows, schema = int(file.metadata.num_rows), file.schema_arrow
    except Exception as e:  # the errors of pyarrow have no common base
        raise DataError(f"{path} cannot be read as parquet: {first_line(e)}") from e
    if not rows:
        return 0
    if field not in schema.names:
        raise DataError(f'{path}: no column "{field}" (found: {", ".join(schema.names)}); set data.text_field')
    kind = schema.field(field).type
    if types.is_null(kind):
        tell_of_nulls(str(path), field)
        return 0
    plain = kind.value_type if types.is_dictionary(kind) else getattr(kind, "storage_type", kind)
    if str(plain) not in STRINGS:
        raise DataError(f'{path}: the column "{field}" holds {kind}, not strings; set data.text_field')
    return rows


def as_pattern(path: Path) -> str:
    """A path for `datasets`, which takes patterns where it finds one of *?[ in a name."""
    return glob.escape(str(path))


def text_of(row: Mapping[str, object], field: str, source: str, at: str) -> bytes | None:
    """The text of a row of a table, `at` some place of the source; None where it is null.

    DataError: the row has no such column, or neither null nor a string in it.
    """
    if field not in row:
        raise DataError(f'{source}, {at}: no column "{field}" (found: {", ".join(row)}); set data.text_field')
    if row[field] is None:
        tell_of_nulls(source, field)
        return None
    return encoded(row[field], field, f"{source}, {at}")


def hash_file(hasher: blake3, path: Path) -> None:
    """Take in its bytes, and how many they are. DataError: it cannot be read."""
    try:
        hasher.update_mmap(path)
        hasher.update(path.stat().st_size.to_bytes(8, "little"))
    except OSError as e:
        raise DataError(f"the data source {path} cannot be read: {e}") from e


@functools.cache
def tell_once(what: str, level: int) -> None:
    """A folder is listed to check it, and to read it."""
    log.log(level, "%s", what)


@functools.cache
def tell_of_nulls(source: str, field: str) -> None:
    """Once of each source."""
    log.warning('%s has rows whose "%s" is null or missing; they are passed over', source, field)


def line_text(line: str, field: str, source: str, at: str, first: bool) -> bytes | None:
    """The text of a line of a jsonl stream; None where it is null, or the line no record of that kind.

    DataError: it is no such record, and the `first` at this place, so that the others may be none either.
    """
    try:
        record = json.loads(line.removeprefix("\ufeff"))
        text = record[field] if first else record.get(field)
        if text is not None:
            return encoded(text, field, f"{source}, {at}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, DataError) as e:
        if first:
            raise DataError(
                f'{source}, {at}: its first line is no JSON object with a string as "{field}" ({e}): '
                "set data.text_field, or mend that line"
            ) from e
        tell_of_torn(source, field)
        return None
    tell_of_nulls(source, field)
    return None


@functools.cache
def tell_of_torn(source: str, field: str) -> None:
    """Once of each source."""
    log.warning('%s has lines that are no JSON object with a string as "%s"; they are passed over', source, field)


def encoded(text: object, field: str, where: str) -> bytes:
    """UTF-8; half of a surrogate pair, which is none, is kept as it is."""
    if not isinstance(text, str):
        raise DataError(f'{where}: "{field}" is {type(text).__name__}, not a string')
    return text.encode("utf-8", errors="surrogatepass")
