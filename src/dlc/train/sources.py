"""Where text comes from: documents as bytes, in an order that is the same on every host that holds the same files.

    "stdlib"            the .py files of this Python's standard library, without tests: on every machine, no download
    a file              .jsonl (field "text"), .parquet (column "text"), anything else as plain text
    a folder            every file below it with a suffix of TEXT_SUFFIXES, .jsonl or .parquet; hidden ones left out

A document is one file; its name is the path below the source with "/" between folders. The texts of a jsonl or parquet
file are joined by SEPARATOR. Bytes are taken as they are: nothing has to be valid UTF-8.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from dlc.errors import DataError

SEPARATOR = b"\0"
"""Ends each document and each record: a byte that text does not hold."""
STDLIB = "stdlib"
STDLIB_BYTES_MAX = 24 * 2**20
"""Enough for the whole library of today (12 MB); bounds the start-up time of a distribution that adds to it."""
SOURCE_BYTES_MAX = 8 * 2**30
"""A source is held in memory, one byte a token; larger text needs a streaming source."""
TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py", ".c", ".h", ".cpp", ".rs", ".js", ".html", ".csv", ".tex")
RECORD_SUFFIXES = (".jsonl", ".parquet")
_STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def read_documents(source: str | Path) -> list[tuple[str, bytes]]:
    """All (name, bytes) of a source, sorted by name. DataError where it is missing, unreadable, empty or too large."""
    if str(source) == STDLIB:
        return list(_capped(_stdlib()))
    root = Path(source).expanduser()
    try:
        documents = list(_bounded(root, _files(root)))
    except OSError as e:
        raise DataError(f"the data source {root} cannot be read: {e}") from e
    if not any(raw for _, raw in documents):
        raise DataError(f"the data source {root} holds no text; give a file or folder with text in it, or {STDLIB!r}")
    return documents


def _stdlib() -> Iterator[tuple[str, Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = _walk(root, skipped=_STDLIB_SKIPPED, suffixes=(".py",)) if root.is_dir() else []
    if not paths:
        raise DataError(f"this Python has no standard library sources in {root}; name a text file or folder instead")
    yield from paths


def _capped(files: Iterator[tuple[str, Path]]) -> Iterator[tuple[str, bytes]]:
    """Whole files up to STDLIB_BYTES_MAX. One that cannot be read is left out: distributions differ."""
    total = 0
    for name, path in files:
        try:
            raw = path.read_bytes()
        except OSError:
            continue
        total += len(raw)
        if total > STDLIB_BYTES_MAX:
            return
        yield name, raw


def _files(root: Path) -> list[tuple[str, Path]]:
    if root.is_dir():
        found = _walk(root, skipped={"__pycache__"}, suffixes=TEXT_SUFFIXES + RECORD_SUFFIXES)
        if not found:
            known = " ".join(TEXT_SUFFIXES + RECORD_SUFFIXES)
            raise DataError(f"the folder {root} holds no file with a known suffix ({known})")
        return found
    if root.is_file():
        return [(root.name, root)]
    raise DataError(f"no data source at {root}; give a text file, a folder, a .jsonl or .parquet file, or {STDLIB!r}")


def _walk(root: Path, skipped: set[str], suffixes: tuple[str, ...]) -> list[tuple[str, Path]]:
    found: list[tuple[str, Path]] = []
    for folder, below, names in os.walk(root, onerror=_reraise):
        below[:] = [d for d in below if d not in skipped and not d.startswith(".")]
        for name in names:
            path = Path(folder, name)
            if path.suffix.lower() in suffixes and not name.startswith(".") and path.is_file():
                found.append((path.relative_to(root).as_posix(), path))
    return sorted(found)


def _reraise(error: OSError) -> None:
    raise error


def _bounded(root: Path, files: list[tuple[str, Path]]) -> Iterator[tuple[str, bytes]]:
    total = 0
    for name, path in files:
        raw = _read(path)
        total += len(raw)
        if total > SOURCE_BYTES_MAX:
            raise DataError(f"the data source {root} is larger than {SOURCE_BYTES_MAX} bytes; give a part of it")
        yield name, raw


def _read(path: Path) -> bytes:
    if path.stat().st_size > SOURCE_BYTES_MAX:
        raise DataError(f"{path} is larger than {SOURCE_BYTES_MAX} bytes; give a part of it")
    if path.suffix.lower() == ".jsonl":
        return SEPARATOR.join(_jsonl(path))
    if path.suffix.lower() == ".parquet":
        return SEPARATOR.join(_parquet(path))
    return path.read_bytes()


def _jsonl(path: Path) -> Iterator[bytes]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"]
            except (ValueError, KeyError, TypeError) as e:
                raise DataError(f'{path}, line {number}: not a JSON object with a "text" field') from e
            yield _encoded(text, f"{path}, line {number}")


def _parquet(path: Path) -> Iterator[bytes]:
    try:
        import datasets
    except ImportError as e:
        raise DataError(f"reading {path} needs the package datasets: pip install datasets") from e
    try:
        rows = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
        for number, row in enumerate(rows, start=1):
            if "text" not in row:
                raise DataError(f'{path} has no column "text" (found: {", ".join(row)})')
            yield _encoded(row["text"], f"{path}, row {number}")
    except DataError:
        raise
    except Exception as e:  # pyarrow and datasets have no common base
        raise DataError(f"{path} cannot be read as parquet: {e}") from e


def _encoded(text: object, where: str) -> bytes:
    if not isinstance(text, str):
        raise DataError(f'{where}: "text" is {type(text).__name__}, not a string')
    return text.encode("utf-8", errors="surrogatepass")
