"""int8 and int4: blocks of BLOCK elements, each with a scale of its own.

    s_b = fp32(max |x| in block b / limit)     limit: 127 for int8, 7 for int4
    q   = round(fp32(x / s_b)), ties to even   in [-limit, limit]
    Q(x) = fp32(q * s_b)

    payload:  the scales, fp32, one per block (the last block of a chunk may be shorter)
              int8: q, one byte each
              int4: with h = ceil(numel / 2) a byte for j < h: 16 * q[j + h] + q[j] as int8; q beyond the end is 0

|x - Q(x)| is at most s_b / 2 but for rounding: 1/254 of the greatest element of the block, 1/14 for int4.

Every step is one IEEE operation per element, so the same input gives the same bytes on every host, and the same bytes
the same numbers. x is divided by the scale, not multiplied by a reciprocal, which overflows for the least scales.
A scale is never below SCALE_MIN (the block is 0 then, an error below 3e-36): neither a subnormal element nor a
subnormal quotient or product can matter then, so nor does it whether a host flushes them to zero. A scale is never
so great that limit * scale overflows either.

A block with NaN or an infinity has the scale NaN. `finite` refuses scales that are NaN, negative or too great, and
integers that `encode` never writes (int8 -128; int4 -8, 8, or one beyond the end). Decoding those is no error: what
comes out is useless, and on all hosts the same.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from dlc.comm import vectors
from dlc.comm.codecbase import Codec, Payload, check_numel, check_vector, sealed

BLOCK = 256
"""Elements per scale. Of pseudo-gradients of the embedded run int4 loses 8 to 11 % (rms) with 256, 9 to 12 % with 512,
9 to 14 % with 1024, at 4.13, 4.06 and 4.03 bits per element; a whole bit is worth a factor of 2. All are as fast."""
SCALE_BYTES = 4
"""fp32: fp16 would save 1.5 % of int4, but ends at 6e-8, where scales of a low learning rate lie."""
SCALE_MIN = 2.0**-125
"""Twice the least normal number: subnormal elements are less than half a scale, and round to 0."""


class BlockCodec(Codec):
    """What int8 and int4 have in common: scales and quotients."""

    feedback = True

    def __init__(self, name: str, limit: int) -> None:
        self.name = name
        self.limit = limit
        # One number below max / limit, which may have been rounded up: the product with limit is still finite, and
        # the greatest number divided by it still rounds to limit.
        self.scale_max = float(np.nextafter(np.float32(torch.finfo(torch.float32).max / limit), np.float32(0)))

    @abstractmethod
    def _packed_bytes(self, numel: int) -> int:
        """Bytes of `numel` integers."""

    @abstractmethod
    def _pack(self, q: Tensor, out: Tensor) -> None:
        """Whole numbers in fp32, [..., numel], into `out` (int8); q may be overwritten."""

    @abstractmethod
    def _unpack(self, packed: Tensor, out: Tensor) -> None:
        """The inverse: whole numbers in fp32 into `out`."""

    @abstractmethod
    def _in_range(self, packed: Tensor, numel: int) -> bool:
        """All integers are at most `limit` in size, and none is beyond the end."""

    def wire_bytes(self, numel: int) -> int:
        check_numel(numel)
        return _blocks(numel) * SCALE_BYTES + self._packed_bytes(numel)

    def encode(self, x: Tensor, scratch: Tensor | None = None) -> memoryview:
        check_vector(x)
        payload = torch.empty(self.wire_bytes(x.numel()), dtype=torch.uint8, device="cpu")
        self._encode(x.detach(), payload, torch.empty_like(x) if scratch is None else scratch[: x.numel()])
        return sealed(payload)

    def encode_rows(self, x: Tensor, out: Tensor) -> None:
        self._check_rows(x, out)
        self._encode(x.detach(), out, torch.empty_like(x))

    def _encode(self, x: Tensor, out: Tensor, q: Tensor) -> None:
        """One vector, or rows of them; q is scratch of its form."""
        at = _blocks(x.shape[-1]) * SCALE_BYTES
        # A tensor on the device: by a number CUDA would multiply with its reciprocal, and round twice.
        scales = torch.div(_peaks(x, q), torch.full((), self.limit, dtype=torch.float32, device=x.device))
        low, high = torch.aminmax(scales)
        if SCALE_MIN <= low.item() and high.item() <= self.scale_max:  # not so with NaN
            _each_block(torch.div, x, scales, q)
        else:
            self._divide_extremes(x, scales, q)
        out[..., :at].copy_(scales.view(torch.uint8))  # which need not be aligned in a row
        self._pack(q.round_(), out[..., at:].view(torch.int8))

    def _divide_extremes(self, x: Tensor, scales: Tensor, q: Tensor) -> None:
        """q = x / scales, where some scales are too small or too great for that, and are changed, or are not finite."""
        bad = ~torch.isfinite(scales)
        scales.clamp_(max=self.scale_max).masked_fill_(scales < SCALE_MIN, 0.0).masked_fill_(bad, math.nan)
        # By 1 where the scale is 0: the quotients are then below 1e-35, and round to 0.
        _each_block(torch.div, x, scales.masked_fill(scales == 0, 1.0), q)
        q.nan_to_num_(nan=0.0)  # NaN has no integer: what a conversion makes of it depends on the host

    def decode(self, payload: Payload, numel: int, out: Tensor | None = None) -> Tensor:
        scales, packed = self._views(payload, numel)
        out = vectors.empty(numel) if out is None else out
        self._unpack(packed, out)
        _each_block(torch.mul, out, scales, out)
        return out

    def accumulate(self, acc: Tensor, payload: Payload, weight: float, scratch: Tensor) -> None:
        scales, packed = self._views(payload, acc.numel())
        product = scratch[: acc.numel()]
        self._unpack(packed, product)
        _each_block(torch.mul, product, scales, product)
        acc.add_(product.mul_(weight))

    def finite(self, payload: Payload, numel: int) -> bool:
        scales, packed = self._views(payload, numel)
        low, high = torch.aminmax(scales)  # hands on NaN, which no comparison below holds for
        return 0 <= low.item() and high.item() <= self.scale_max and self._in_range(packed, numel)

    def _views(self, payload: Payload, numel: int) -> tuple[Tensor, Tensor]:
        """Scales and integers of a payload, where they lie: to be read, never to be written."""
        return _parts(torch.frombuffer(self._buffer(payload, numel), dtype=torch.uint8), numel)


class Int8Codec(BlockCodec):
    """One byte per element."""

    def __init__(self) -> None:
        super().__init__("int8", 127)

    def _packed_bytes(self, numel: int) -> int:
        return numel

    def _pack(self, q: Tensor, out: Tensor) -> None:
        out.copy_(q)

    def _unpack(self, packed: Tensor, out: Tensor) -> None:
        out.copy_(packed)

    def _in_range(self, packed: Tensor, numel: int) -> bool:
        return int(packed.min()) >= -self.limit


class Int4Codec(BlockCodec):
    """Two elements per byte: a = q[j] and b = q[j + h] as a + 16 b, which fits int8 and gives both back."""

    def __init__(self) -> None:
        super().__init__("int4", 7)

    def _packed_bytes(self, numel: int) -> int:
        return (numel + 1) // 2

    def _pack(self, q: Tensor, out: Tensor) -> None:
        h = out.shape[-1]
        q[..., : q.shape[-1] - h].add_(q[..., h:], alpha=16)  # whole numbers below 2^24: exact, fused or not
        out.copy_(q[..., :h])

    def _unpack(self, packed: Tensor, out: Tensor) -> None:
        h = packed.numel()
        low, high = out[: out.numel() - h], out[h:]
        out[:h].copy_(packed)
        torch.mul(low, 1 / 16, out=high).round_()  # a / 16 is below a half
        low.sub_(high, alpha=16)

    def _in_range(self, packed: Tensor, numel: int) -> bool:
        low, high = torch.aminmax(packed)
        limit = 17 * self.limit
        if not -limit <= int(low) <= int(high) <= limit:
            return False
        # A low half of 8 is -8 or 8. `min` is 40 times faster than `(...).any()`.
        return int(((packed & 15) ^ 8).min()) > 0 and (numel % 2 == 0 or abs(int(packed[-1])) <= self.limit)


def _blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def _parts(payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """(scales, integers) in the memory of a payload."""
    at = _blocks(numel) * SCALE_BYTES
    return payload[:at].view(torch.float32), payload[at:].view(torch.int8)


def _peaks(x: Tensor, scratch: Tensor) -> Tensor:
    """The greatest size of an element, for each block; NaN where one is NaN. `scratch` is overwritten."""
    numel = x.shape[-1]
    whole = numel // BLOCK * BLOCK
    sizes = torch.abs(x, out=scratch)
    peaks = torch.empty((*x.shape[:-1], _blocks(numel)), dtype=torch.float32, device=x.device)
    if whole:
        torch.amax(_in_blocks(sizes[..., :whole]), -1, out=peaks[..., : whole // BLOCK])
    if whole < numel:
        torch.amax(sizes[..., whole:], -1, out=peaks[..., -1])
    return peaks


def _each_block(operation: Callable[..., Tensor], x: Tensor, scales: Tensor, out: Tensor) -> None:
    """out = operation(x, the scale of its block); `out` may be x."""
    whole = x.shape[-1] // BLOCK * BLOCK
    if whole:
        each = scales[..., : whole // BLOCK, None]
        operation(_in_blocks(x[..., :whole]), each, out=_in_blocks(out[..., :whole]))
    if whole < x.shape[-1]:
        operation(x[..., whole:], scales[..., -1:], out=out[..., whole:])


def _in_blocks(x: Tensor) -> Tensor:
    """[..., n * BLOCK] as [..., n, BLOCK]."""
    return x.view(*x.shape[:-1], -1, BLOCK)
