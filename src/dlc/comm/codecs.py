"""How one chunk of a vector travels: fp32, fp16, bf16 elements, int8, int4 in blocks, or the greatest only;
little-endian.

A codec is stateless and has no buffers of its own, so that one object serves every thread and every chunk. All of
them keep three promises, which the reduction rests on:

- **Sizes are exact**: `wire_bytes(numel)` is the only length that `numel` elements ever have.
- **Finite stays finite**: a finite element beyond the range of the wire type is clamped to the largest value of
  that type (bf16: +-3.39e38, fp16: +-3.40e38). It never becomes an infinity.
- **Non-finite stays non-finite**: NaN and infinities survive encoding (in blocks: as a block of NaN), so that the
  receiver can see and refuse them.

Torch does the work, in one pass over a chunk per step; a chunk of about 1 MiB of fp32 stays in the cache between the
passes. The casts are in `castcodecs.py`, the blocks in `blockcodecs.py`, the greatest elements in `sparsecodec.py`,
what they have in common in `codecbase.py`.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Collection

import torch

from dlc.comm.blockcodecs import Int4Codec, Int8Codec
from dlc.comm.castcodecs import CastCodec, HalfCodec
from dlc.comm.codecbase import Codec, Payload
from dlc.comm.sparsecodec import TopKCodec
from dlc.errors import ConfigError

__all__ = ["CODECS", "DENSE", "Codec", "Payload", "get_codec"]


CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        CastCodec("fp32", torch.float32),
        HalfCodec(),
        CastCodec("bf16", torch.bfloat16),
        Int8Codec(),
        Int4Codec(),
        TopKCodec(),
    )
}


DENSE = tuple(name for name, codec in CODECS.items() if not codec.sparse)
"""Names of those that send all elements, and so are of use in one call by itself."""


def get_codec(name: str, offered: Collection[str] = CODECS) -> Codec:
    """The codec of that name; ConfigError, with the names that are `offered` and the nearest of them, where there is
    none."""
    if sys.byteorder != "little":
        raise ConfigError("payloads are little-endian and this host is not: dlc cannot run here")
    codec = CODECS.get(name) if isinstance(name, str) else None
    if codec is None:
        near = difflib.get_close_matches(str(name)[:60], offered, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"unknown codec {name!r:.60}; known: {', '.join(offered)}{hint}")
    return codec
