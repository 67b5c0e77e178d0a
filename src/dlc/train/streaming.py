"""Blocks of a source that is read as it comes: S virtual shards, each packed into a sequence of blocks without end.

    position k = range r = k div L, block k mod L of it        L: length of a lease in blocks
    range r    = segment r div S of shard r mod S              segment i: blocks [i * L, (i + 1) * L) of the shard

so that which sample stands at a position is a pure function of the source, S, L and the tokenizer, and any peer can
train any lease. Leases are given out in order of k: all peers go through the S shards side by side, and read each of
them on from where they were. A shard that has ended begins again, its next documents packed right after the last.

Segments that others train are read over, so a peer reads (and tokenises) what the whole swarm trains. Reading back is
rare: what a dead peer had not contributed is given out again. For that, and for a restart, the place of each segment is
kept as a *mark*: the `state_dict` of the dataset at some document, and how many tokens to leave out from there.

Document n of shard s has the name "s/n", and is held out or not by it (see `packing`), in every epoch.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3
from torch import Tensor

from dlc.errors import DataError
from dlc.train.datasets_io import Stream
from dlc.train.packing import SLICE_BYTES, is_validation, slices, tell_of_unfit
from dlc.train.recurring import Recurring
from dlc.train.sources import Piece, cut, line_text, text_of
from dlc.train.tokens import Ids, Tokenizer

log = logging.getLogger(__name__)

DOCUMENTS_AT_ONCE = 32
"""Read together, and given to the tokenizer: enough for its threads, and little to read twice from a mark."""
GROUP_BYTES = SLICE_BYTES
"""Text of them, after which a group ends with fewer documents: they may be whole books."""
MARKS_MAX = 1024
"""Kept per shard, the newest: leases that come back are recent."""
MARKS_EVERY_S = 5.0
"""Between two times that they are written while a shard is read over."""
TELL_EVERY_S = 10.0
"""Between two lines of the log, likewise."""
SHARDS_TOLD = 5
"""Of those that cannot be used."""


@dataclass(frozen=True)
class Mark:
    """A place in a shard."""

    state: dict[str, Any] | None
    """Of the dataset, before a document; None: before the first."""
    document: int
    skip: int
    """Tokens to leave out from there."""


class StreamSource:
    """A `Blocks` of a stream. Used by one thread at a time.

    segment_blocks: L, the lease length of the run.
    marks:          folder for the marks; None: they are kept in memory only.
    clock:          as time.monotonic.

    DataError: a shard holds no text to train on; also later: the stream cannot be read.
    """

    def __init__(
        self,
        stream: Stream,
        seq_len: int,
        tokenizer: Tokenizer,
        segment_blocks: int,
        marks: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tokens_per_block, self.tokenizer = seq_len, tokenizer
        self._stream, self._segment_blocks = stream, segment_blocks
        self._held = _held_of(stream, tokenizer, seq_len)
        self._check_shards()
        if marks is not None:
            marks /= f"marks-{blake3(stream.identity + self.fingerprint()).hexdigest(12)}"
        self._shards = [
            Shard(stream, s, tokenizer, seq_len, segment_blocks, marks / f"{s}.json" if marks else None, clock)
            for s in range(stream.shards)
        ]

    def _check_shards(self) -> None:
        """DataError: there is nothing to train on in some, which would end all trainers when they get there. Where the
        tokenizer does not fit what is held out first, the log says so."""
        before = self.tokenizer.unknown
        barren = [s for s, held in enumerate(self._held) if not held.any_to_train()]
        if barren:
            raise _barren(self._stream, barren)
        self._held_blocks(1)
        tokens, text_bytes = sum(held.tokens for held in self._held), sum(held.text_bytes for held in self._held)
        tell_of_unfit(self.tokenizer, self.tokenizer.unknown - before, tokens, text_bytes)

    @property
    def bytes_per_token(self) -> float:
        """As `Blocks.bytes_per_token`."""
        return sum(held.text_bytes for held in self._held) / max(1, sum(held.tokens for held in self._held))

    def batch(self, ks: Sequence[int]) -> Tensor:
        """As `Blocks.batch`."""
        return torch.from_numpy(np.stack([self._block(k) for k in ks]).astype(np.int64))

    def break_off(self) -> None:
        """As `Blocks.break_off`: at the next block that is read over."""
        for shard in self._shards:
            shard.broken_off = True

    def _block(self, k: int) -> npt.NDArray[Any]:
        if k < 0:
            raise DataError(f"positions start at 0, not {k}")
        r, within = divmod(k, self._segment_blocks)
        segment, s = divmod(r, self._stream.shards)
        return self._shards[s].block(segment * self._segment_blocks + within)

    def validation_batches(self, batch_size: int, max_blocks: int) -> list[Tensor]:
        """As `Blocks.validation_batches`: the first held-out blocks, as many of each shard as of the others."""
        blocks = self._held_blocks(-(-max_blocks // self._stream.shards))[:max_blocks]
        if max_blocks and not blocks:
            raise DataError(
                f"{self._stream.place.source} has no block of {self.tokens_per_block} tokens held out for validation: "
                "one document in 20 is; give more of them, or set data.streaming = false"
            )
        return [
            torch.from_numpy(np.stack(blocks[a : a + batch_size]).astype(np.int64))
            for a in range(0, len(blocks), batch_size)
        ]

    def _held_blocks(self, per_shard: int) -> list[npt.NDArray[Any]]:
        """Shards in turn."""
        found = [held.first(per_shard) for held in self._held]
        return [blocks[i] for i in range(per_shard) for blocks in found if i < len(blocks)]

    def fingerprint(self) -> bytes:
        """As `Blocks.fingerprint`, as far as a stream can tell: of its layout, the sizes of its files, and its first
        held-out blocks."""
        layout = (self._stream.content, self._stream.shards, self._segment_blocks, self.tokens_per_block)
        hasher = blake3(repr(layout).encode() + self.tokenizer.identity)
        for block in self._held_blocks(1):
            hasher.update(block.astype("<u4").tobytes())
        return hasher.digest()


class Shard:
    """The endless blocks of one shard, in order; going back is possible, by marks."""

    def __init__(
        self,
        stream: Stream,
        s: int,
        tokenizer: Tokenizer,
        seq_len: int,
        segment_blocks: int,
        file: Path | None,
        clock: Callable[[], float],
    ) -> None:
        self._stream, self._s, self._tokenizer, self._seq_len = stream, s, tokenizer, seq_len
        self._segment_blocks, self._file, self._clock = segment_blocks, file, clock
        self._marks: dict[int, Mark] = _read_marks(file)
        self._lines: dict[int, str] = {at: _line(at, mark) for at, mark in self._marks.items()}
        """The same as JSON, made once."""
        self._unwritten, self._unkept = False, Recurring()
        self._reader = _Reader(stream, s, None)
        self._ready: list[tuple[Mark, npt.NDArray[Any]]] = []
        """Tokens read, and not given: the mark of a group of documents, and what is left of their tokens."""
        self._next = 0
        """The block that comes next."""
        self._barren = 0
        """Ends of the shard since there was a token."""
        self.broken_off = False
        """Set by another thread: nothing is read over any more."""
        self._whole = True
        """No read was broken off: what was read of a group is lost then, and the dataset takes itself for ended."""

    def block(self, j: int) -> npt.NDArray[Any]:
        """Block j >= 0."""
        behind = [at for at in self._marks if at <= j]
        nearest = max(behind, default=0)
        whole, self._whole = self._whole, False
        if not whole or j < self._next or nearest > self._next:
            self._go_to(nearest)
        written = told = self._clock()
        while True:
            block = self._take()
            if self._next > j:
                self._whole = True
                self._write()
                return block
            if self.broken_off:
                raise DataError(f"shard {self._s} of {self._stream.place.source} is not read on: the training ends")
            now = self._clock()
            if now - written >= MARKS_EVERY_S:
                written = now
                self._write()
            if now - told >= TELL_EVERY_S:
                told = now
                log.info(
                    "reading shard %d of %s on to block %d, over what others train; at %d so far",
                    self._s,
                    self._stream.place.source,
                    j,
                    self._next,
                )

    def _go_to(self, at: int) -> None:
        mark = self._marks.get(at, Mark(None, 0, 0))
        self._reader, self._ready, self._next, self._barren = _Reader(self._stream, self._s, mark), [], at, 0
        self._fill(mark.skip + 1)
        self._drop(mark.skip)

    def _take(self) -> npt.NDArray[Any]:
        """The next block."""
        self._fill(self._seq_len)
        if self._next % self._segment_blocks == 0:
            self._remember()
        missing, parts = self._seq_len, []
        for _, ids in self._ready:
            parts.append(ids[:missing])
            missing -= len(parts[-1])
            if not missing:
                break
        block = np.concatenate(parts)
        self._drop(self._seq_len)
        self._next += 1
        return block

    def _fill(self, count: int) -> None:
        """At least `count` tokens ready."""
        while sum(len(ids) for _, ids in self._ready) < count:
            group = self._reader.group()
            if group is None:
                if self._barren:
                    raise _barren(self._stream, [self._s])
                self._barren += 1
                log.info("shard %d of %s has ended, and begins again", self._s, self._stream.place.source)
                self._stream.check_files()
                self._reader = _Reader(self._stream, self._s, None)
                continue
            mark, pieces = group
            ids = _encoded(self._tokenizer, [piece for piece in pieces if not is_validation(piece.name)])
            if ids:
                self._barren = 0
                self._ready.append((mark, np.concatenate(ids)))

    def _drop(self, count: int) -> None:
        while count:
            mark, ids = self._ready[0]
            taken = min(count, len(ids))
            count -= taken
            if taken == len(ids):
                del self._ready[0]
            else:
                self._ready[0] = (Mark(mark.state, mark.document, mark.skip + taken), ids[taken:])

    def _remember(self) -> None:
        """The place of a segment: what is not kept is read again from the mark before, or the start."""
        if self._next in self._marks:
            return
        mark = self._marks[self._next] = self._ready[0][0]
        self._lines[self._next] = _line(self._next, mark)
        self._unwritten = True
        for old in sorted(self._marks)[:-MARKS_MAX]:
            del self._marks[old], self._lines[old]

    def _write(self) -> None:
        """The marks, where there are new ones."""
        if self._unwritten and self._file is not None:
            try:
                _write_marks(self._file, self._lines.values())
                self._unkept.passed()
            except OSError as e:
                if (how_often := self._unkept.came(e)) is not None:
                    log.warning(
                        "the marks of a stream cannot be kept in %s: %s; a restart will read it from its start%s",
                        self._file,
                        e,
                        how_often,
                    )
        self._unwritten = False


class _Reader:
    """One pass over a shard, from a mark (None: the start): groups of documents."""

    def __init__(self, stream: Stream, s: int, mark: Mark | None) -> None:
        self._stream, self._s = stream, s
        self._document = mark.document if mark is not None else 0
        self._rows: Any = stream.shard(s)
        if mark is not None and mark.state is not None:
            self._rows.load_state_dict(mark.state)
        self._state = mark.state if mark is not None else None
        self._iterator: Iterator[Any] | None = None

    def group(self) -> tuple[Mark, list[Piece]] | None:
        """The next documents, with the mark before them; None: the shard has ended."""
        stream, source, at = self._stream, self._stream.place.source, f"shard {self._s}"
        mark = Mark(self._state, self._document, 0)
        pieces: list[Piece] = []
        size = 0
        with _reading(source, at):
            if self._iterator is None:
                self._iterator = iter(self._rows)
            for row in self._iterator:
                document = _document(stream, self._s, self._document, row)
                if document is None:
                    continue
                pieces += document
                size += sum(len(piece.text) for piece in document)
                self._document += 1
                if self._document - mark.document == DOCUMENTS_AT_ONCE or size >= GROUP_BYTES:
                    break
            if self._document == mark.document:
                return None
            self._state = self._rows.state_dict()
        return mark, pieces


class _Held:
    """The held-out blocks of one shard, from its start, as many as are asked for.

    `read`: reads on, and has the next documents of the shard taken, or its end.
    """

    def __init__(self, tokenizer: Tokenizer, seq_len: int, read: Callable[[_Held], None]) -> None:
        self._tokenizer, self._seq_len, self._read = tokenizer, seq_len, read
        self._to_train = False
        self._ids: list[Ids] = []
        self.tokens = self.text_bytes = 0
        self.ended = False

    def any_to_train(self) -> bool:
        """Whether the shard has text that is not held out: of empty documents there would be nothing but their ends."""
        while not self.ended and not self._to_train:
            self._read(self)
        return self._to_train

    def take(self, documents: Sequence[Piece]) -> None:
        """The next ones."""
        pieces = [piece for piece in documents if is_validation(piece.name)]
        self._to_train = self._to_train or any(piece.text for piece in documents if not is_validation(piece.name))
        if pieces:
            self._ids += _encoded(self._tokenizer, pieces)
            self.text_bytes += sum(len(piece.text) for piece in pieces)
            self.tokens += sum(len(ids) for ids in self._ids[-len(pieces) :])

    def first(self, count: int) -> list[npt.NDArray[Any]]:
        """At most `count` blocks, fewer where the shard has no more."""
        while not self.ended and self.tokens < count * self._seq_len:
            self._read(self)
        if not self._ids:
            return []
        stream = np.concatenate(self._ids)
        return [stream[a : a + self._seq_len] for a in range(0, len(stream) - self._seq_len + 1, self._seq_len)][:count]


class _OwnFiles:
    """Reads a shard that has files of its own."""

    def __init__(self, stream: Stream, s: int) -> None:
        self._stream, self._s = stream, s
        self._reader: _Reader | None = None

    def read(self, held: _Held) -> None:
        """The next documents, or that there are none."""
        self._reader = self._reader or _Reader(self._stream, self._s, None)
        group = self._reader.group()
        if group is None:
            held.ended = True
        else:
            held.take(group[1])


class _SharedRows:
    """Reads all shards at once, where each is of some rows of all files: each for itself would read all of them."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._rows: Iterator[Any] | None = None
        self._documents = [0] * stream.shards
        self.shards: list[_Held] = []

    def read(self, _: _Held) -> None:
        """The next row of each shard, or that there are none."""
        s = -1
        with _reading(self._stream.place.source, "its first rows"):
            self._rows = self._rows or self._stream.rows()
            for s, row in enumerate(itertools.islice(self._rows, self._stream.shards)):
                document = _document(self._stream, s, self._documents[s], row)
                if document is not None:
                    self._documents[s] += 1
                    self.shards[s].take(document)
        if s + 1 < self._stream.shards:
            for held in self.shards:
                held.ended = True


def _held_of(stream: Stream, tokenizer: Tokenizer, seq_len: int) -> list[_Held]:
    """Of each shard."""
    if not stream.by_rows:
        return [_Held(tokenizer, seq_len, _OwnFiles(stream, s).read) for s in range(stream.shards)]
    together = _SharedRows(stream)
    together.shards = [_Held(tokenizer, seq_len, together.read) for _ in range(stream.shards)]
    return together.shards


@contextlib.contextmanager
def _reading(source: str, at: str) -> Iterator[None]:
    """DataError: what goes wrong meanwhile."""
    try:
        yield
    except DataError:
        raise
    except Exception as e:  # network, hub, pyarrow and datasets have no common base
        raise DataError(f"the stream {source} broke off in {at}: {type(e).__name__}: {e}") from e


def _document(stream: Stream, s: int, number: int, row: Mapping[str, Any]) -> list[Piece] | None:
    """A row as document `number` of shard s, without pieces where its text is null; None: an empty line, which is
    none."""
    source, field, at = stream.place.source, stream.place.text_field, f"shard {s}"
    if not stream.lines:
        text = text_of(row, field, source, at)
    elif row["text"].strip():
        text = line_text(row["text"], field, source, at, first=not number)
    else:
        return None
    return list(cut(f"{s}/{number}", text)) if text is not None else []


def _barren(stream: Stream, shards: list[int]) -> DataError:
    """Of shards without a document to train on."""
    several, more = len(shards) > 1, len(shards) - SHARDS_TOLD
    named = ", ".join(map(str, shards[:SHARDS_TOLD])) + (f" and {more} more" if more > 0 else "")
    which = f"shards {named}" if several else f"shard {named}"
    advice = [f"set data.shards below {stream.shards}"] if stream.shards > len(shards) else ["give more text"]
    told = ""
    if stream.empty:
        told = f" (empty files: {', '.join(stream.empty[:3])})"
        advice.insert(0, "take these away")
    return DataError(
        f"{which} of {stream.place.source} {'hold' if several else 'holds'} no text to train on{told}: "
        + ", or ".join(advice)
    )


def _encoded(tokenizer: Tokenizer, pieces: list[Piece]) -> list[Ids]:
    """In slices: a tokenizer takes many times the memory of what it is given."""
    return [ids for together in slices(pieces) for ids in tokenizer.encode(together)]


def _read_marks(file: Path | None) -> dict[int, Mark]:
    """None where there are none, or not ours: they only save time."""
    try:
        marks = json.loads(file.read_bytes()) if file else {}
        return {int(at): Mark(mark["state"], mark["document"], mark["skip"]) for at, mark in marks.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _line(at: int, mark: Mark) -> str:
    """A mark in JSON."""
    return f'"{at}": {json.dumps(asdict(mark))}'


def _write_marks(file: Path, lines: Collection[str]) -> None:
    """OSError: what was there stays."""
    temporary = file.with_name(f".{file.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text("{" + ",\n".join(lines) + "}")
        os.replace(temporary, file)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)  # on a full disk one more would stay at each lease
        raise
