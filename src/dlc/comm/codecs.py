"""How one chunk of a vector travels: fp32, fp16, bf16 elements, int8, int4 in blocks, or the greatest only;
little-endian.

A codec is stateless and has no buffers of its own, so that one object serves every thread and every chunk. All of
them keep three promises, which the reduction rests on:

- **Sizes are exact**: `wire_bytes(numel)` is the only length that `numel` elements ever have.
- **Finite stays finite**: a finite element beyond the range of the wire type is clamped to the largest value of
  that type (fp16: +-65504, bf16: +-3.39e38). It never becomes an infinity.
- **Non-finite stays non-finite**: NaN and infinities survive encoding (in blocks: as a block of NaN), so that the
  receiver can see and refuse them.

Torch does the work, in one pass over a chunk per step; a chunk of about 1 MiB of fp32 stays in the cache between the
passes. The casts are here, the blocks in `blockcodecs.py`, the greatest elements in `sparsecodec.py`, what they have in
common in `codecbase.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from dlc.comm.blockcodecs import Int4Codec, Int8Codec
from dlc.comm.codecbase import Codec, Payload, all_finite, check_numel, check_vector, sealed
from dlc.comm.sparsecodec import TopKCodec
from dlc.errors import ConfigError

__all__ = ["CODECS", "CastCodec", "Codec", "Payload", "get_codec"]


class CastCodec(Codec):
    """Elements converted to a torch floating type, rounded to nearest, ties to even; nothing else in the frame."""

    sum_tells = True

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self.dtype = dtype

    def wire_bytes(self, numel: int) -> int:
        check_numel(numel)
        return numel * self.dtype.itemsize

    def encode(self, x: Tensor, scratch: Tensor | None = None) -> memoryview:
        check_vector(x)
        x = x.detach()
        payload, wire = self._cast(x)
        self._clamp(x, wire)
        return sealed(payload)

    def encode_rows(self, x: Tensor, out: Tensor) -> None:
        self._check_rows(x, out)
        self._clamp(x, out.view(self.dtype).copy_(x))

    def _clamp(self, x: Tensor, wire: Tensor) -> None:
        """What the cast of x has made infinite becomes the greatest number there is."""
        if self.dtype is not torch.float32 and not all_finite(wire):
            limit = torch.finfo(self.dtype).max
            wire.copy_(torch.where(torch.isfinite(x), x.clamp(-limit, limit), x))

    def _cast(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(payload, the same memory in the wire type)."""
        payload = torch.empty(self.wire_bytes(x.numel()), dtype=torch.uint8, device="cpu")
        wire = payload.view(self.dtype)
        return payload, wire.copy_(x)

    def decode(self, payload: Payload, numel: int, out: Tensor | None = None) -> Tensor:
        view = self._view(payload, numel)
        return view.to(torch.float32, copy=True) if out is None else out.copy_(view)

    def accumulate(self, acc: Tensor, payload: Payload, weight: float, scratch: Tensor) -> None:
        view = self._view(payload, acc.numel())
        product = scratch[: acc.numel()]
        if self.dtype is torch.float32:
            torch.mul(view, weight, out=product)
        else:
            product.copy_(view).mul_(weight)
        acc.add_(product)

    def combine_usual(
        self, parts: Sequence[tuple[Payload, float]], divisor: float, acc: Tensor, scratch: Tensor
    ) -> memoryview | None:
        self._mean(parts, divisor, acc, scratch)
        # No mean of finite numbers of the wire type is greater than they are by more than (k + 5) 2^-24 of it, which is
        # rounded away again where fewer than 4,000 contribute.
        return sealed(self._cast(acc)[0]) if all_finite(acc) else None

    def finite(self, payload: Payload, numel: int) -> bool:
        return all_finite(self._view(payload, numel))

    def _view(self, payload: Payload, numel: int) -> Tensor:
        """The payload itself as a tensor of the wire type: to be read, never to be written."""
        return torch.frombuffer(self._buffer(payload, numel), dtype=self.dtype)


CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        CastCodec("fp32", torch.float32),
        CastCodec("fp16", torch.float16),
        CastCodec("bf16", torch.bfloat16),
        Int8Codec(),
        Int4Codec(),
        TopKCodec(),
    )
}


def get_codec(name: str) -> Codec:
    """The codec of that name; ConfigError with the known names where there is none."""
    if sys.byteorder != "little":
        raise ConfigError("payloads are little-endian and this host is not: dlc cannot run here")
    try:
        return CODECS[name]
    except KeyError:
        raise ConfigError(f"unknown codec {name!r}; known: {', '.join(CODECS)}") from None
