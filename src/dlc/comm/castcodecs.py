"""fp32, bf16 and fp16: the elements of a chunk converted to a torch floating type, rounded to nearest, ties to even.

fp16 ends at 6e-8 and at 65504, and pseudo-gradients and gradients lie below or near the one, statistics and clients'
sums beyond the other. So each chunk of fp16 has a power of two, by which its elements are divided before they are
converted:

    a = max |x|, rounded to 11 bits        m 2^e = a,  1/2 <= m < 1
    s = 0        where 1 <= a <= 65504, or a < 2^-86, or x is not finite
        e - 15   else: the greatest half is then in [2^14, 2^15)
    payload:  h = fp16(x / 2^s), then s as int16         Q(x) = h 2^s

An element has 11 bits down to 2^-28 of the greatest of its chunk, and only what is below 2^-39 of it becomes 0; with
s = 0 down to 6.1e-5 and 3e-8. Multiplying by a power of two is exact, so nothing else is rounded. s is between
EXPONENT_MIN and EXPONENT_MAX: so no h 2^s but 0 is a subnormal fp32 number, and it does not matter whether a host
flushes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dlc.comm.codecbase import Codec, Payload, all_finite, check_numel, check_vector, greatest_bits, sealed

EXPONENT_BYTES = 2
EXPONENT_MIN, EXPONENT_MAX = -100, 113
HALF_BITS = 11
"""Of the significand of an fp16 number, the hidden one included."""
_HALF_NORMAL, _HALF_ONE, _HALF_FULL, _HALF_END = 0x0400, 0x3C00, 0x7400, 0x7800
"""Bits of 2^-14 (the least with all bits), 1, 2^14 and 2^15 in fp16. The bits of positive numbers grow as they do."""
_HALF_MAX, _FULL_MAX = 65504.0, 32752.0
"""The greatest, and the greatest below 2^15."""
_FP32 = torch.finfo(torch.float32)


class CastCodec(Codec):
    """Elements of a torch floating type, nothing else in the frame."""

    sum_tells = True

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self.dtype = dtype

    def wire_bytes(self, numel: int) -> int:
        check_numel(numel)
        return numel * self.dtype.itemsize

    def encode(self, x: Tensor, scratch: Tensor | None = None) -> memoryview:
        check_vector(x)
        payload = torch.empty(self.wire_bytes(x.numel()), dtype=torch.uint8, device="cpu")
        self._clamp(x, payload.view(self.dtype).copy_(x.detach()))
        return sealed(payload)

    def encode_rows(self, x: Tensor, out: Tensor) -> None:
        self._check_rows(x, out)
        self._clamp(x, out.view(self.dtype).copy_(x))

    def _clamp(self, x: Tensor, wire: Tensor) -> None:
        """What the cast of x has made infinite becomes the greatest number there is."""
        if self.dtype is not torch.float32 and not all_finite(wire):
            limit = torch.finfo(self.dtype).max
            wire.copy_(torch.where(torch.isfinite(x), x.clamp(-limit, limit), x))

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
        if not all_finite(acc):
            return None
        # No mean of finite numbers of the wire type is greater than they are by more than (k + 5) 2^-24 of it, which is
        # rounded away again where fewer than 4,000 contribute: there is nothing to clamp.
        payload = torch.empty(self.wire_bytes(acc.numel()), dtype=torch.uint8, device="cpu")
        payload.view(self.dtype).copy_(acc)
        return sealed(payload)

    def finite(self, payload: Payload, numel: int) -> bool:
        return all_finite(self._view(payload, numel))

    def _view(self, payload: Payload, numel: int) -> Tensor:
        """The payload itself as a tensor of the wire type: to be read, never to be written."""
        return torch.frombuffer(self._buffer(payload, numel), dtype=self.dtype)


class HalfCodec(Codec):
    """fp16 with a power of two per chunk, see above."""

    name = "fp16"
    sum_tells = True

    def wire_bytes(self, numel: int) -> int:
        check_numel(numel)
        return 2 * numel + EXPONENT_BYTES

    def encode(self, x: Tensor, scratch: Tensor | None = None) -> memoryview:
        check_vector(x)
        payload = torch.empty(self.wire_bytes(x.numel()), dtype=torch.uint8, device="cpu")
        self._write(x.detach(), payload, scratch)
        return sealed(payload)

    def encode_rows(self, x: Tensor, out: Tensor) -> None:
        self._check_rows(x, out)
        if x.device.type != "cpu":
            write_rows(x.detach(), out)
            return
        scratch = torch.empty_like(x[0])
        for row, payload in zip(x.detach(), out, strict=True):
            self._write(row, payload, scratch)

    def _write(self, x: Tensor, out: Tensor, scratch: Tensor | None) -> bool:
        """The payload of x into `out` (uint8). False: x is not finite, and nor is the payload."""
        halves, exponent = _parts(out)
        s = _exponent(halves.copy_(x), x)
        exponent.fill_(s or 0)
        if s is None:
            halves.copy_(torch.where(torch.isfinite(x), x.clamp(-_HALF_MAX, _HALF_MAX), x))
        elif s:
            scaled = torch.mul(x, 2.0**-s, out=torch.empty_like(x) if scratch is None else scratch[: x.numel()])
            # The greatest numbers of fp32 would become 2^15 times 2^113, which is infinite.
            halves.copy_(scaled.clamp_(-_FULL_MAX, _FULL_MAX) if s == EXPONENT_MAX else scaled)
        return s is not None

    def decode(self, payload: Payload, numel: int, out: Tensor | None = None) -> Tensor:
        halves, power = self._read(payload, numel)
        out = halves.to(torch.float32, copy=True) if out is None else out.copy_(halves)
        return out if power == 1.0 else out.mul_(power)

    def scaled(self, out: Tensor, payload: Payload, weight: float) -> None:
        halves, power = self._read(payload, out.numel())
        _weigh(out.copy_(halves), power, weight)

    def accumulate(self, acc: Tensor, payload: Payload, weight: float, scratch: Tensor) -> None:
        halves, power = self._read(payload, acc.numel())
        acc.add_(_weigh(scratch[: acc.numel()].copy_(halves), power, weight))

    def combine_usual(
        self, parts: Sequence[tuple[Payload, float]], divisor: float, acc: Tensor, scratch: Tensor
    ) -> memoryview | None:
        self._mean(parts, divisor, acc, scratch)
        payload = torch.empty(self.wire_bytes(acc.numel()), dtype=torch.uint8, device="cpu")
        return sealed(payload) if self._write(acc, payload, scratch) else None

    def finite(self, payload: Payload, numel: int) -> bool:
        halves, exponent = _parts(self._bytes(payload, numel))
        greatest, s = greatest_bits(halves), int(exponent)
        if greatest is None:
            return False
        if s == 0:
            return greatest == 0 or greatest >= _HALF_ONE
        return EXPONENT_MIN <= s <= EXPONENT_MAX and _HALF_FULL <= greatest < _HALF_END

    def _read(self, payload: Payload, numel: int) -> tuple[Tensor, float]:
        """The halves, where they lie (to be read, never to be written), and 2^s: NaN, where `encode` has no such s."""
        halves, exponent = _parts(self._bytes(payload, numel))
        s = int(exponent)
        return halves, 2.0**s if EXPONENT_MIN <= s <= EXPONENT_MAX else math.nan

    def _bytes(self, payload: Payload, numel: int) -> Tensor:
        return torch.frombuffer(self._buffer(payload, numel), dtype=torch.uint8)


def _parts(payload: Tensor) -> tuple[Tensor, Tensor]:
    """Views of bytes, [..., 2 numel + 2]: the halves and the exponents."""
    at = payload.shape[-1] - EXPONENT_BYTES
    return payload[..., :at].view(torch.float16), payload[..., at:].view(torch.int16)[..., 0]


def _weigh(halves: Tensor, power: float, weight: float) -> Tensor:
    """weight * (halves * power), the product rounded once; `halves` are in fp32, and overwritten."""
    weight = float(np.float32(weight))
    factor = weight * power
    if power == 1.0 or weight == 0.0 or _FP32.smallest_normal <= abs(factor) <= _FP32.max:
        return halves.mul_(factor)
    return halves.mul_(power).mul_(weight)


def _exponent(halves: Tensor, x: Tensor) -> int | None:
    """s, where `halves` are x converted as it is. None: some x is not finite.

    Where fp16 has the greatest with all bits, they tell: it takes a third of the time of a look at x. Its least number
    of those may be one below it, rounded up with a bit less.
    """
    greatest = greatest_bits(halves)
    if greatest is not None and greatest >= _HALF_ONE:
        return 0
    if greatest is not None and greatest > _HALF_NORMAL:
        return (greatest >> HALF_BITS - 1) - 29
    low, high = (end.item() for end in torch.aminmax(x))  # which hands on NaN
    if not (math.isfinite(low) and math.isfinite(high)):
        return None
    mantissa, e = math.frexp(max(-low, high))
    e += round(math.ldexp(mantissa, HALF_BITS)) >> HALF_BITS  # 1 where the rounded mantissa is
    return min(e - 15, EXPONENT_MAX) if mantissa and e - 15 >= EXPONENT_MIN else 0


def write_rows(x: Tensor, out: Tensor) -> None:
    """`encode` of each row by a processor that is not to be waited for: all go the same way, whatever they need."""
    a = x.abs().amax(dim=1)
    mantissa, e = torch.frexp(a)
    s = e + (torch.round(mantissa * (1 << HALF_BITS)) >= 1 << HALF_BITS).int() - 15
    half = a.half()
    as_it_is = (half >= 1.0) & (half <= _HALF_MAX) | (a == 0.0) | (s < EXPONENT_MIN) | ~torch.isfinite(a)
    s = s.clamp(max=EXPONENT_MAX).masked_fill(as_it_is, 0)
    halves, exponents = _parts(out)
    exponents.copy_(s)
    factors = (127 - s << 23).view(torch.float32)  # 2^-s by its bits: a library's powers need not be exact
    limits = (_HALF_MAX - (_HALF_MAX - _FULL_MAX) * (s == EXPONENT_MAX).float())[:, None]  # fp32, whatever the default
    scaled = x * factors[:, None]
    halves.copy_(torch.where(torch.isfinite(x), scaled.clamp(-limits, limits), scaled))
