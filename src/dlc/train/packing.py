"""Documents as two long streams of token ids: to train on, and held out. Tokenised once, and kept on disk.

    pieces ── slices of SLICE_BYTES ──> tokenizer ── split by name ──> train | held

**Split.** A document is held out where BLAKE3(name) mod 20 = 0: fixed for ever, whatever documents are added.

**Cache.** What a tokenizer made lies in a folder named by a hash of the text and of the tokenizer:

    <cache>/<hash>/train.bin   held.bin   little-endian ids, read as a memory map
                   streams.json           lengths and hashes; a folder without it, or with other ids, is not taken

It is written under another name, unlike that of any other peer, and renamed when it is whole: so peers may share it,
also from containers, in which all have the same process number. Byte tokens need no cache: they are the text, and are
held in memory, at most MEMORY_BYTES_MAX; so is everything where no cache is given.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from blake3 import blake3

from dlc.errors import DataError
from dlc.runspec import BYTES
from dlc.train.shelf import expanded
from dlc.train.sources import Documents, Piece, tell_once
from dlc.train.tokens import Ids, Tokenizer

log = logging.getLogger(__name__)

VALIDATION_ONE_IN = 20
SLICE_BYTES = 8 << 20
"""Text given to the tokenizer at once: enough for all its threads, and bounds what is held besides the streams."""
MEMORY_BYTES_MAX = 8 * 2**30
"""Ids held in memory; more needs a tokenizer with a cache, or a streaming source."""
TELL_EVERY_S = 10.0
"""Between two lines of the log while a long text is tokenised."""
UNFINISHED_S = 24 * 3600.0
"""What nobody wrote to for so long is of a process that was killed while it tokenised."""
UNKNOWN_SHARE_MAX = 0.01
"""Of the tokens: more is told. Rare characters come to less."""
BYTES_PER_TOKEN_MAX = 20.0
"""Likewise: text has 3 to 6. A tokenizer that has no token for what it does not know leaves it out."""
FORMAT = 2
"""1: all records of a file were held out, or none."""
TOKENS = "tokens"
"""Name of the cache's folder, below that of a peer or of all peers."""
_META = "streams.json"


@dataclass(frozen=True)
class StreamMeta:
    """What is known of one stream."""

    tokens: int
    text_bytes: int
    """Of the text that they were made of."""
    digest: str
    """BLAKE3 of the ids, hex."""


@dataclass(frozen=True)
class Streams:
    """All ids of a source."""

    train: Ids
    held: Ids
    train_meta: StreamMeta
    held_meta: StreamMeta


def is_validation(name: str) -> bool:
    """Whether a document of this name is held out."""
    return int.from_bytes(blake3(name.encode("utf-8", "surrogateescape")).digest(8), "little") % VALIDATION_ONE_IN == 0


def tokenise(
    documents: Documents,
    tokenizer: Tokenizer,
    cache: Path | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Streams:
    """The streams of a source, from the cache where they are in it. DataError: unreadable, or changed meanwhile, or the
    disk is full."""
    if cache is None or tokenizer.name == BYTES:
        return _in_memory(documents, tokenizer, clock)
    content = documents.content_hash()
    key = blake3(content + tokenizer.identity + FORMAT.to_bytes(4, "little")).hexdigest(16)
    folder = expanded(cache) / key
    found = _open(folder, tokenizer)
    if found is None:
        if folder.exists():
            log.warning("the tokens in %s are damaged; they are made anew", folder)
        try:
            _write(folder, documents, content, tokenizer, clock)
        except OSError as e:
            full = e.errno in (errno.ENOSPC, errno.EDQUOT)
            advice = "make room there" if full else "let this user write there, or set DLC_HOME to another folder"
            raise DataError(f"the tokens cannot be kept in {folder}: {e.strerror or e}; {advice}") from e
        found = _open(folder, tokenizer)
    if found is None:
        raise DataError(f"the tokens in {folder} are damaged; delete that folder")
    return found


class _Sink:
    """Takes the ids of one stream."""

    def __init__(self, put: Callable[[memoryview], object]) -> None:
        self._put = put
        self._hasher = blake3()
        self._tokens = self._bytes = 0

    def take(self, ids: Ids, text_bytes: int) -> None:
        raw = ids.astype(ids.dtype.newbyteorder("<"), copy=False).view(np.uint8).data
        self._put(raw)
        self._hasher.update(raw)
        self._tokens += len(ids)
        self._bytes += text_bytes

    def meta(self) -> StreamMeta:
        return StreamMeta(self._tokens, self._bytes, self._hasher.hexdigest())


def _in_memory(documents: Documents, tokenizer: Tokenizer, clock: Callable[[], float]) -> Streams:
    buffers = (bytearray(), bytearray())

    def put(buffer: bytearray) -> Callable[[memoryview], None]:
        def more(raw: memoryview) -> None:
            if len(buffers[0]) + len(buffers[1]) + len(raw) > MEMORY_BYTES_MAX:
                raise DataError(
                    f"the data source is larger than the {MEMORY_BYTES_MAX} bytes that are held in memory; give a part "
                    "of it, or set data.streaming = true"
                )
            buffer.extend(raw)

        return more

    train, held = _Sink(put(buffers[0])), _Sink(put(buffers[1]))
    _fill(documents, tokenizer, train, held, clock)
    a, b = (np.frombuffer(buffer, tokenizer.dtype.newbyteorder("<")) for buffer in buffers)
    return Streams(a, b, train.meta(), held.meta())


def _fill(documents: Documents, tokenizer: Tokenizer, train: _Sink, held: _Sink, clock: Callable[[], float]) -> None:
    began = told = clock()
    before, unknown_before, done = tokenizer.replaced, tokenizer.unknown, 0
    for pieces in slices(documents.pieces()):
        for piece, ids in zip(pieces, tokenizer.encode(pieces), strict=True):
            (held if is_validation(piece.name) else train).take(ids, len(piece.text))
            done += len(piece.text)
        if clock() - told >= TELL_EVERY_S:
            told = clock()
            log.info("tokenising: %.0f MB so far, %.1f MB/s", done / 1e6, done / 1e6 / (told - began))
    if replaced := tokenizer.replaced - before:
        log.warning("%d documents hold bytes that are no UTF-8; those became U+FFFD for the tokenizer", replaced)
    tell_of_unfit(tokenizer, tokenizer.unknown - unknown_before, train.meta().tokens + held.meta().tokens, done)


def tell_of_unfit(tokenizer: Tokenizer, unknown: int, tokens: int, text_bytes: int) -> None:
    """Where a tokenizer is made for other text, little of this one is in the tokens, and the loss looks all the
    better for it."""
    advice = f"the tokenizer {tokenizer.name} was made for other text: take one that was made for this"
    if unknown > UNKNOWN_SHARE_MAX * tokens:
        share = f"{unknown / tokens:.0%} of the tokens stand for text that is not known"
        tell_once(f"{share}; {advice}", logging.WARNING)
    elif text_bytes > BYTES_PER_TOKEN_MAX * tokens:
        length = f"a token stands for {text_bytes / tokens:.0f} bytes"
        tell_once(f"{length}: much is left out, or {advice}", logging.WARNING)


def slices(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """What a tokenizer is given at once."""
    together: list[Piece] = []
    size = 0
    for piece in pieces:
        together.append(piece)
        size += len(piece.text) + 1
        if size >= SLICE_BYTES:
            yield together
            together, size = [], 0
    if together:
        yield together


def _write(
    folder: Path, documents: Documents, content: bytes, tokenizer: Tokenizer, clock: Callable[[], float]
) -> None:
    """DataError: the documents are not those of the hash `content` any more, by which the folder is named."""
    temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    temporary.mkdir(parents=True)
    _sweep(folder.parent)
    log.info("tokenising with %s; the tokens are kept in %s", tokenizer.name, folder)
    try:
        with (temporary / "train.bin").open("wb") as a, (temporary / "held.bin").open("wb") as b:
            train, held = _Sink(a.write), _Sink(b.write)
            _fill(documents, tokenizer, train, held, clock)
            _sync(a)
            _sync(b)
        if documents.content_hash() != content:
            raise DataError(
                "the text changed while it was tokenised, and no other peer would have the same: start again once "
                "nothing writes to the files of data.source"
            )
        meta = {"train": asdict(train.meta()), "held": asdict(held.meta())}
        with (temporary / _META).open("wb") as c:
            c.write(json.dumps(meta).encode())
            _sync(c)
        if _open(folder, tokenizer) is None:
            shutil.rmtree(folder, ignore_errors=True)
        try:
            temporary.rename(folder)
        except OSError:
            if _open(folder, tokenizer) is None:
                raise  # else another peer of this host was faster
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sweep(cache: Path) -> None:
    """Delete what others did not finish."""
    now = time.time()
    for unfinished in cache.glob(".*.tmp-*"):
        try:
            written = max(path.stat().st_mtime for path in (unfinished, *unfinished.iterdir()))
        except OSError:
            continue  # another peer is faster
        if now - written > UNFINISHED_S:
            log.info("%s is of a process that was killed; it is deleted", unfinished)
            shutil.rmtree(unfinished, ignore_errors=True)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _open(folder: Path, tokenizer: Tokenizer) -> Streams | None:
    """None: not there, or not whole."""
    try:
        meta = json.loads((folder / _META).read_bytes())
        train, held = StreamMeta(**meta["train"]), StreamMeta(**meta["held"])
        return Streams(
            _map(folder / "train.bin", train, tokenizer), _map(folder / "held.bin", held, tokenizer), train, held
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _map(path: Path, meta: StreamMeta, tokenizer: Tokenizer) -> Ids:
    """ValueError: the file holds other ids than were written."""
    dtype = tokenizer.dtype.newbyteorder("<")
    if path.stat().st_size != meta.tokens * dtype.itemsize:
        raise ValueError(f"{path} is cut short")
    if not meta.tokens:
        return np.empty(0, dtype)
    if blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest() != meta.digest:
        raise ValueError(f"{path} is damaged")
    return np.memmap(path, dtype, mode="r")
