"""Training data as a numbered sequence of blocks.

    documents --tokenise, split by name (packing)--> train stream | validation stream --cut--> blocks of seq_len tokens

The documents of a stream are packed one after another, without padding, each ended by EOS (a zero byte for byte
tokens); block i of a stream is its tokens [i * seq_len, (i + 1) * seq_len), the rest at the end is dropped. A block is
both input and label: the model predicts token j + 1 from tokens up to j, so a block has seq_len - 1 targets.

**Split.** By the names of the documents (see `packing`). Where that leaves one side without a block (a single text, a
few of them) that side is dropped, and the last 5 % of the other side's blocks are validation. So a run's split depends
on its seq_len, and whoever measures in blocks of another length cuts the same two sides anew. Of a few large texts much
may be held out: that is told.

**Order.** Which block stands at training position k (0, 1, 2, ... without end) is a pure function of (seed, k): epoch
k div n_blocks, and within it a permutation of all blocks, computed in O(1) by a Feistel network. So a lease of
positions [a, b) names its samples exactly, and any peer can train it; peers must hold the same data for that, which
`fingerprint` tells. A source that is streamed has another order: see `streaming`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3
from torch import Tensor

from dlc.errors import DataError
from dlc.runspec import RunSpec
from dlc.train import datasets_io
from dlc.train.packing import VALIDATION_ONE_IN, Streams, tokenise
from dlc.train.sources import DATASETS, Documents, Files, Place
from dlc.train.streaming import StreamSource
from dlc.train.tokens import ByteTokenizer, Ids, Tokenizer

log = logging.getLogger(__name__)

HELD_SHARE_USUAL_MAX = 2 / VALIDATION_ONE_IN
"""Of all blocks: more of them held out is told."""
BLOCKS_MIN = 2
"""One to train on, and one that is held out."""
SHARDS_LOOKED_INTO = 32
"""Before a run begins: of more, the beginnings of all would be read twice, which takes half a minute for 256."""
OWN_BLOCKS = 1 << 32
"""Positions of one peer, where there are no leases; the next one's come after them."""
_MASK64 = 2**64 - 1
_FEISTEL_ROUNDS = 4
"""Four rounds of a keyed mix make a pseudo-random permutation (Luby and Rackoff, 1988)."""


class Blocks(Protocol):
    """What a trainer reads."""

    tokens_per_block: int
    tokenizer: Tokenizer

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text that a token of the validation side stands for, on average: for bits per byte."""
        ...

    def batch(self, ks: Sequence[int]) -> Tensor:
        """Training positions as one batch: int64 [len(ks), seq_len]; the same on every peer with the same data."""
        ...

    def break_off(self) -> None:
        """No batch is wanted any more: one that another thread makes ends, by a DataError, if it takes long."""
        ...

    def validation_batches(self, batch_size: int, max_blocks: int) -> list[Tensor]:
        """At most `max_blocks` blocks that no position holds: int64 [<= batch_size, seq_len] each."""
        ...

    def fingerprint(self) -> bytes:
        """Two peers with equal ones mean the same samples by the same positions."""
        ...


def place_of(spec: RunSpec) -> Place:
    """Where the text of a run is."""
    data = spec.data
    return Place(data.source, data.subset, data.split, data.text_field)


def open_blocks(spec: RunSpec, tokenizer: Tokenizer, cache: Path | None = None) -> Blocks:
    """The data of a run; what its tokenizer makes is kept in the folder `cache`. DataError: it cannot be used."""
    data = spec.data
    return blocks_of(
        place_of(spec),
        data.seq_len,
        tokenizer,
        seed=spec.seed,
        shards=data.shards if data.streaming else 0,
        segment_blocks=spec.blocks_per_lease,
        cache=cache,
    )


def blocks_of(
    place: Place,
    seq_len: int,
    tokenizer: Tokenizer,
    *,
    seed: int = 0,
    shards: int = 0,
    segment_blocks: int = 1,
    split_seq_len: int | None = None,
    cache: Path | None = None,
) -> Blocks:
    """The blocks of a source: streamed in `shards`, with `segment_blocks` in a lease, or read as a whole where that is
    0, in an order that `seed` gives. `split_seq_len`: as in `BlockSource`; a stream is split by names alone."""
    if not shards:
        return BlockSource(
            place.source, seq_len, seed, tokenizer=tokenizer, place=place, split_seq_len=split_seq_len, cache=cache
        )
    check_seq_len(seq_len)
    return StreamSource(datasets_io.Stream(place, shards), seq_len, tokenizer, segment_blocks, cache)


def open_documents(place: Place) -> Documents:
    """The documents of a source that is read as a whole. DataError: there is none, or it cannot be loaded."""
    return datasets_io.Rows(place) if datasets_io.is_dataset(place) else Files(place)


def demand_data(spec: RunSpec, tokenizer: Tokenizer) -> None:
    """DataError: the data of a run cannot be used, as far as that shows where it is read until there is enough of it.

    Of "datasets:NAME", which may have yet to be fetched, nothing is read.
    """
    place, seq_len = place_of(spec), spec.data.seq_len
    if place.source.startswith(DATASETS):
        return
    if spec.data.streaming:
        each = spec.data.shards <= SHARDS_LOOKED_INTO
        stream = datasets_io.Stream(place, spec.data.shards if each else 1)
        source = StreamSource(stream, seq_len, tokenizer, spec.blocks_per_lease)
        if each:
            source.validation_batches(1, 1)
        return
    n_bytes = n_tokens = 0
    for piece in open_documents(place).pieces():
        n_bytes += len(piece.text)
        n_tokens += len(tokenizer.encode([piece])[0])
        if n_bytes and n_tokens >= BLOCKS_MIN * seq_len:
            return
    if not n_bytes:
        raise _no_text(place)
    raise DataError(
        f"the data source {place.source} holds {n_tokens} tokens, but training and validation need a block of "
        f"{seq_len} each: give more text, at least {BLOCKS_MIN * seq_len} tokens, or a smaller seq_len"
    )


class BlockSource:
    """Blocks of a source that is read, and tokenised, at creation.

    source:         as in `DataSpec`; `place` says more of it.
    tokenizer:      bytes if not given.
    split_seq_len:  of the run whose validation side is measured here, where that has blocks of another length: which
                    tokens are held out can depend on it.
    cache:          folder for what another tokenizer makes; None: it is held in memory.

    DataError: the source is missing, unreadable, empty, or too short for one block of each side.
    """

    def __init__(
        self,
        source: str | Path,
        seq_len: int,
        seed: int = 0,
        *,
        tokenizer: Tokenizer | None = None,
        place: Place | None = None,
        split_seq_len: int | None = None,
        cache: Path | None = None,
    ) -> None:
        check_seq_len(seq_len)
        split_seq_len = split_seq_len or seq_len
        self.tokens_per_block, self._seed = seq_len, seed
        self.tokenizer: Tokenizer = tokenizer or ByteTokenizer()
        streams = _streams(place or Place(str(source)), self.tokenizer, cache)
        self._metas = (streams.train_meta, streams.held_meta)
        self._measured = streams.held_meta if len(streams.held) >= split_seq_len else streams.train_meta
        """Of the side that the validation blocks are from, as `_split` takes them."""
        self.whole_texts = min(len(streams.train), len(streams.held)) >= split_seq_len
        """Held out are whole texts; else both sides are cut from those of one, at a place that the tokenizer gives."""
        train, validation = _split(streams.train, streams.held, split_seq_len, str(source))
        self._train, self._validation = _blocks(train.reshape(-1), seq_len), _blocks(validation.reshape(-1), seq_len)
        self.n_blocks = len(self._train)
        self.n_validation_blocks = len(self._validation)
        if not self.n_validation_blocks:
            raise DataError(
                f"the run holds out {validation.size} tokens of {source} for validation, fewer than a block of "
                f"{seq_len}: give a smaller seq_len"
            )
        log.info(
            "%s has %d blocks of %d tokens to train on, and %d held out",
            source,
            self.n_blocks,
            seq_len,
            self.n_validation_blocks,
        )
        self._epoch: int | None = None
        """Of the furthest position so far."""

    @property
    def bytes_per_token(self) -> float:
        """As `Blocks.bytes_per_token`."""
        return max(1, self._measured.text_bytes) / self._measured.tokens

    def block(self, k: int) -> Tensor:
        """Training position k >= 0: int64 [seq_len]."""
        return self.batch([k])[0]

    def batch(self, ks: Sequence[int]) -> Tensor:
        """As `Blocks.batch`."""
        rows = [self._row(k) for k in ks]
        if ks:
            self._tell_of_epochs(max(ks))
        return _tensor(self._train, rows)

    def break_off(self) -> None:
        """As `Blocks.break_off`: none takes long."""

    def _tell_of_epochs(self, k: int) -> None:
        """When the 1st, the 2nd, the 4th, ... of them is over: a small source is gone through many times, and people
        have to know. Without leases: of this peer's own positions."""
        begins = k // OWN_BLOCKS * OWN_BLOCKS
        epoch = max(0, k // self.n_blocks - -(-begins // self.n_blocks))
        if self._epoch is not None and epoch.bit_length() > self._epoch.bit_length():
            log.info(
                "all %d blocks to train on have been taken %s; they come again, in another order",
                self.n_blocks,
                "once" if epoch == 1 else f"{epoch} times",
            )
        self._epoch = max(epoch, self._epoch or 0)

    def _row(self, k: int) -> int:
        epoch, within = divmod(k, self.n_blocks)
        if epoch < 0:
            raise DataError(f"positions start at 0, not {k}")
        return permute(within, self.n_blocks, _mix(_mix(self._seed) ^ epoch))

    def validation_batches(self, batch_size: int, max_blocks: int) -> list[Tensor]:
        """As `Blocks.validation_batches`; evenly spaced."""
        return _spread(self._validation, batch_size, max_blocks)

    def fingerprint(self) -> bytes:
        """As `Blocks.fingerprint`: BLAKE3-256 of all ids of both sides, in the order in which they are packed."""
        return blake3("".join(f"{meta.tokens}:{meta.digest}\n" for meta in self._metas).encode()).digest()


class WholeText:
    """All of a source as blocks, for the evaluation of text that no run is trained on: nothing is split off.

    It is read, and tokenised, at creation. DataError: as of `BlockSource`, but that one block is enough.
    """

    def __init__(self, place: Place, seq_len: int, tokenizer: Tokenizer, cache: Path | None = None) -> None:
        check_seq_len(seq_len)
        self._seq_len = seq_len
        self._streams = streams = _streams(place, tokenizer, cache)
        n_tokens = len(streams.train) + len(streams.held)
        self.n_blocks = n_tokens // seq_len
        if not self.n_blocks:
            raise DataError(
                f"the data source {place.source} holds {n_tokens} tokens, fewer than a block of {seq_len}: give more "
                "text, or a smaller --seq-len"
            )
        log.info("%s has %d blocks of %d tokens", place.source, self.n_blocks, seq_len)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text that a token stands for, on average."""
        metas = (self._streams.train_meta, self._streams.held_meta)
        return sum(meta.text_bytes for meta in metas) / sum(meta.tokens for meta in metas)

    def batches(self, batch_size: int, max_blocks: int) -> list[Tensor]:
        """At most `max_blocks` blocks, evenly spaced: int64 [<= batch_size, seq_len] each."""
        rows = _spaced(self.n_blocks, max_blocks)
        return [
            torch.from_numpy(np.stack([self._block(row) for row in rows[a : a + batch_size]]))
            for a in range(0, len(rows), batch_size)
        ]

    def _block(self, row: int) -> npt.NDArray[np.int64]:
        """Of one side of a run, or of the end of one and the beginning of the other."""
        train, held = self._streams.train, self._streams.held
        start, stop = row * self._seq_len, (row + 1) * self._seq_len
        first = train[start:stop]
        second = held[max(0, start - len(train)) : max(0, stop - len(train))]
        return np.concatenate([first, second]).astype(np.int64)


def first_block(seed: int, peer: str) -> int:
    """Where the positions of a peer begin in a run without leases: far from those of others, in an order of samples
    that is its own."""
    return int.from_bytes(blake3(f"{seed} {peer}".encode()).digest(3), "big") * OWN_BLOCKS


def check_seq_len(seq_len: int) -> None:
    """DataError: too short."""
    if seq_len < 2:
        raise DataError(f"seq_len must be at least 2, not {seq_len}: a block needs something to predict")


def permute(i: int, n: int, key: int) -> int:
    """Where a keyed permutation of 0 ... n - 1 sends i: a Feistel network over the next power of four, walked until it
    falls below n (fewer than four steps on average)."""
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = i >> half, i & mask
        for r in range(_FEISTEL_ROUNDS):
            left, right = right, left ^ (_mix(key ^ _mix((r << 56) ^ right)) & mask)
        i = (left << half) | right
        if i < n:
            return i


def _mix(x: int) -> int:
    """splitmix64: a cheap bijection of 64 bits in which every input bit reaches every output bit."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _tensor(blocks: Ids, rows: Sequence[int]) -> Tensor:
    return torch.from_numpy(blocks[np.asarray(rows, np.int64)].astype(np.int64))


def _spread(blocks: Ids, batch_size: int, max_blocks: int) -> list[Tensor]:
    rows = _spaced(len(blocks), max_blocks)
    return [_tensor(blocks, rows[a : a + batch_size]) for a in range(0, len(rows), batch_size)]


def _spaced(n: int, most: int) -> list[int]:
    """At most `most` of 0 ... n - 1."""
    count = min(most, n)
    return [j * n // count for j in range(count)]


def _streams(place: Place, tokenizer: Tokenizer, cache: Path | None) -> Streams:
    """DataError: there is no text."""
    streams = tokenise(open_documents(place), tokenizer, cache)
    if not streams.train_meta.text_bytes + streams.held_meta.text_bytes:
        raise _no_text(place)
    return streams


def _no_text(place: Place) -> DataError:
    return DataError(f"the data source {place.source} holds no text; give a file or folder with text in it")


def _split(train: Ids, held: Ids, seq_len: int, source: str) -> tuple[Ids, Ids]:
    """Train and validation blocks, [n, seq_len] each, both with at least one row."""
    a, b = _blocks(train, seq_len), _blocks(held, seq_len)
    if len(a) and len(b):
        if (share := len(b) / (len(a) + len(b))) > HELD_SHARE_USUAL_MAX:
            log.warning(
                "%.0f %% of %s is held out for validation, and never trained on: whole texts are, and these are few or "
                "unequal. Cut them into more files, or into the records of a jsonl file",
                100 * share,
                source,
            )
        return a, b
    blocks = a if len(a) else b
    if len(blocks) < BLOCKS_MIN:
        raise DataError(
            f"the data source {source} holds {len(train)} tokens to train on, and {len(held)} in texts that are held "
            f"out for validation, but a block of {seq_len} of each is needed, or {BLOCKS_MIN} of one: give more text, "
            "or a smaller seq_len"
        )
    n_validation = max(1, len(blocks) // VALIDATION_ONE_IN)
    return blocks[:-n_validation], blocks[-n_validation:]


def _blocks(stream: Ids, seq_len: int) -> npt.NDArray[Any]:
    n = len(stream) // seq_len
    return stream[: n * seq_len].reshape(n, seq_len)
