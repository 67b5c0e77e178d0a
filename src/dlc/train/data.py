"""Training data as a numbered sequence of blocks.

    documents --split by name--> train stream | validation stream --cut--> blocks of seq_len tokens

Tokens are bytes (vocabulary 256). The documents of a stream are packed one after another, each ended by a zero byte;
block i of a stream is its tokens [i * seq_len, (i + 1) * seq_len), the rest at the end is dropped. A block is both
input and label: the model predicts token j + 1 from tokens up to j, so a block has seq_len - 1 targets.

**Split.** A document belongs to validation where BLAKE3(name) mod 20 = 0: fixed for ever, whatever files are added.
Where that leaves one side without a block (a single file, a few files) the last 5 % of all blocks are validation
instead.

**Order.** Which block stands at training position k (0, 1, 2, ... without end) is a pure function of (seed, k): epoch
k div n_blocks, and within it a permutation of all blocks, computed in O(1) by a Feistel network. So a lease of
positions [a, b) names its samples exactly, and any peer can train it; peers must hold the same data for that, which
`fingerprint` tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor

from dlc.errors import DataError
from dlc.train.sources import SEPARATOR, read_documents

VOCAB_SIZE = 256
VALIDATION_ONE_IN = 20
_MASK64 = 2**64 - 1
_FEISTEL_ROUNDS = 4
"""Four rounds of a keyed mix make a pseudo-random permutation (Luby and Rackoff, 1988)."""


class BlockSource:
    """Blocks of one data source. `source` is as in `read_documents`; everything is read at creation.

    DataError: the source is missing, unreadable, empty, or too short for one block of each side.
    """

    def __init__(self, source: str | Path, seq_len: int, seed: int = 0) -> None:
        if seq_len < 2:
            raise DataError(f"seq_len must be at least 2, not {seq_len}: a block needs something to predict")
        self.tokens_per_block = seq_len
        self._seed = seed
        self._train, self._validation = _split(source, seq_len)
        self.n_blocks = len(self._train)
        self.n_validation_blocks = len(self._validation)

    def block(self, k: int) -> Tensor:
        """Training position k >= 0: int64 [seq_len]."""
        return self.batch([k])[0]

    def batch(self, ks: Sequence[int]) -> Tensor:
        """Training positions as one batch: int64 [len(ks), seq_len]."""
        rows = [self._row(k) for k in ks]
        return self._train[torch.tensor(rows, dtype=torch.int64)].long()

    def _row(self, k: int) -> int:
        epoch, within = divmod(k, self.n_blocks)
        if epoch < 0:
            raise DataError(f"positions start at 0, not {k}")
        return permute(within, self.n_blocks, _mix(_mix(self._seed) ^ epoch))

    def validation_batches(self, batch_size: int, max_blocks: int) -> list[Tensor]:
        """At most `max_blocks` validation blocks, evenly spaced: int64 [<= batch_size, seq_len] each."""
        n = self.n_validation_blocks
        count = min(max_blocks, n)
        rows = torch.tensor([j * n // count for j in range(count)], dtype=torch.int64)
        return [self._validation[part].long() for part in torch.split(rows, batch_size)] if count > 0 else []

    def fingerprint(self) -> bytes:
        """BLAKE3-256 of both streams: two peers with equal ones mean the same samples by the same positions."""
        hasher = blake3(max_threads=blake3.AUTO)
        for stream in (self._train, self._validation):
            hasher.update(len(stream).to_bytes(8, "little"))
            hasher.update(stream.numpy().data)
        return hasher.digest()


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


def is_validation(name: str) -> bool:
    """Whether a document of this name is held out."""
    return int.from_bytes(blake3(name.encode("utf-8", "surrogateescape")).digest(8), "little") % VALIDATION_ONE_IN == 0


def _split(source: str | Path, seq_len: int) -> tuple[Tensor, Tensor]:
    """Train and validation blocks, uint8 [n, seq_len] each, both with at least one row."""
    documents = read_documents(source)
    held_out = [is_validation(name) for name, _ in documents]
    if len(documents) > 1:
        train = _pack([raw for (_, raw), held in zip(documents, held_out, strict=True) if not held], seq_len)
        validation = _pack([raw for (_, raw), held in zip(documents, held_out, strict=True) if held], seq_len)
        if len(train) and len(validation):
            return train, validation
    blocks = _pack([raw for _, raw in documents], seq_len)
    if len(blocks) < 2:
        total = sum(len(raw) + 1 for _, raw in documents)
        raise DataError(
            f"the data source {source} holds {total} tokens, but training and validation need a block of {seq_len} "
            f"each: give at least {2 * seq_len} bytes of text, or a smaller seq_len"
        )
    n_validation = max(1, len(blocks) // VALIDATION_ONE_IN)
    return blocks[:-n_validation], blocks[-n_validation:]


def _pack(texts: list[bytes], seq_len: int) -> Tensor:
    stream = bytearray().join(raw + SEPARATOR for raw in texts)
    n = len(stream) // seq_len
    if not n:
        return torch.empty(0, seq_len, dtype=torch.uint8)
    return torch.frombuffer(stream, dtype=torch.uint8, count=n * seq_len).view(n, seq_len)
