"""topk: of each block the greatest elements, in two bits each (SparseLoCo, arXiv:2508.15706).

A contributor sends TOP of BLOCK elements: where they stand, and of each its sign and which of the block's two sizes is
nearer. What it did not send it keeps, and offers again (`dlc.train.feedback`, with `carry` of it):

    a = carry * e + d      Q(a) = the TOP greatest of a, each as -high, -low, low or high      e := a - Q(a)

    thr  = mean of |a| over the TOP      low, high = mean of |a| over those up to, and those beyond thr, as bf16

    payload:  low, high of each block, bf16 (the last block of a chunk may be shorter: it sends one per 64, rounded up)
              codes: two bits per element sent, four to a byte: 1 = negative, 2 = high
              places: twelve bits per element sent, ascending within the block, two to three bytes

That is 116 bytes for 4096 elements, a 141st of fp32.

The elements of several contributors do not add up to a payload of the same form, so the owner *joins*: the result is
every part as it came, in roster order, each after the factor (fp32) that it counts with. Receivers add them up, all in
the same order: an element is 0 + factor * value + factor * value ..., each product and sum rounded to fp32. So the mean
loses nothing more on its way, and a result is as long as all of its parts together.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dlc.comm import vectors
from dlc.comm.codecbase import Codec, Payload, check_numel, check_vector, sealed
from dlc.errors import ProtocolError

BLOCK, TOP = 4096, 64
"""Elements, and those that are sent: the sizes of the paper. Places in a block take twelve bits."""
PER_SENT = BLOCK // TOP
LEVELS_BYTES = 4
CARRY = 0.95
"""beta of the paper: what is never among the greatest fades away, and does not come as a surprise much later."""
FACTOR = struct.Struct("<f")
_FP32_MAX = torch.finfo(torch.float32).max
_BF16_MAX = torch.finfo(torch.bfloat16).max


class TopKCodec(Codec):
    """Sparse contributions, joined results."""

    name = "topk"
    feedback = True
    carry = CARRY
    sparse = True

    def wire_bytes(self, numel: int) -> int:
        check_numel(numel)
        n_sent = _n_sent(numel)
        return _n_blocks(numel) * LEVELS_BYTES + -(-n_sent // 4) + -(-3 * n_sent // 2)

    def result_bytes(self, numel: int, n_parts: int) -> int:
        return n_parts * (FACTOR.size + self.wire_bytes(numel))

    def encode(self, x: Tensor, scratch: Tensor | None = None) -> memoryview:
        check_vector(x)
        x, numel = x.detach(), x.numel()
        payload = torch.zeros(self.wire_bytes(numel), dtype=torch.uint8, device="cpu")
        levels, codes, places = _parts(payload, numel)
        found = [_greatest(rows) for rows in _rows(x)]
        levels.copy_(torch.cat([f[0] for f in found]).flatten())
        _pack_codes(torch.cat([f[1].flatten() for f in found]), codes)
        _pack_places(torch.cat([f[2].flatten() for f in found]), places)
        return sealed(payload)

    def decode(self, payload: Payload, numel: int, out: Tensor | None = None) -> Tensor:
        out = vectors.zeros(numel) if out is None else out.zero_()
        places, values = self._sent(payload, numel)
        out[places] = values
        return out

    def accumulate(self, acc: Tensor, payload: Payload, weight: float, scratch: Tensor) -> None:
        product = self.decode(payload, acc.numel(), scratch[: acc.numel()])
        acc.add_(product.mul_(weight))

    def finite(self, payload: Payload, numel: int) -> bool:
        levels, codes, places = self._views(payload, numel)
        sizes = levels.view(-1, 2).to(torch.float32)
        in_order = bool(((sizes[:, 0] >= 0) & (sizes[:, 0] <= sizes[:, 1]) & (sizes[:, 1] <= _BF16_MAX)).all())
        found = _unpack_places(places, _n_sent(numel))
        ascending = all(
            bool((rows[:, 1:] > rows[:, :-1]).all()) and int(rows.max()) < length
            for rows, length in _by_block(found, numel)
        )
        return in_order and ascending and _ends_with_zeros(codes, places, _n_sent(numel))

    # ---------------------------------------------------------------- results

    def combine(
        self, parts: Sequence[tuple[Payload, float]], divisor: float, acc: Tensor, scratch: Tensor
    ) -> memoryview:
        factors = (FACTOR.pack(weight / divisor) for _, weight in parts)
        return memoryview(b"".join(piece for f, (p, _) in zip(factors, parts, strict=True) for piece in (f, p)))

    def decode_result(self, payload: Payload, numel: int, out: Tensor | None = None) -> Tensor:
        out = vectors.zeros(numel) if out is None else out.zero_()
        for factor, part in self._joined(payload, numel):
            places, values = self._sent(part, numel)
            out[places] = out[places].add_(values.mul_(factor))
        return out.clamp_(-_FP32_MAX, _FP32_MAX)

    def finite_result(self, payload: Payload, numel: int) -> bool:
        return all(0 <= factor < math.inf and self.finite(part, numel) for factor, part in self._joined(payload, numel))

    def _joined(self, payload: Payload, numel: int) -> Iterator[tuple[float, memoryview]]:
        view, each = memoryview(payload).cast("B"), self.result_bytes(numel, 1)
        if not view.nbytes or view.nbytes % each:
            raise ProtocolError(
                f"joined parts of {numel} elements of {self.name} are {each} bytes each, the result has {view.nbytes}"
            )
        for start in range(0, view.nbytes, each):
            (factor,) = FACTOR.unpack_from(view, start)
            yield factor, view[start + FACTOR.size : start + each]

    # ---------------------------------------------------------------- inside a payload

    def _views(self, payload: Payload, numel: int) -> tuple[Tensor, Tensor, Tensor]:
        return _parts(torch.frombuffer(self._buffer(payload, numel), dtype=torch.uint8), numel)

    def _sent(self, payload: Payload, numel: int) -> tuple[Tensor, Tensor]:
        """(places in the chunk, values), in memory of their own."""
        levels, codes, places = self._views(payload, numel)
        n_sent = _n_sent(numel)
        code = _unpack_codes(codes, n_sent)
        block = torch.arange(n_sent, device="cpu").div_(TOP, rounding_mode="floor")
        values = levels.to(torch.float32)[2 * block + (code >> 1)]
        values = torch.where((code & 1).bool(), -values, values)
        # Places beyond the chunk are not finite() and never decided; they must not write elsewhere either.
        return (_unpack_places(places, n_sent) + BLOCK * block).clamp_(max=numel - 1), values


def _n_blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def _n_sent(numel: int) -> int:
    """TOP of each whole block, and as great a part of the last one."""
    return numel // BLOCK * TOP + -(-(numel % BLOCK) // PER_SENT)


def _rows(x: Tensor) -> list[Tensor]:
    """Whole blocks as a matrix, and the rest as a row of another."""
    whole = x.numel() // BLOCK * BLOCK
    parts = [x[:whole].view(-1, BLOCK)] if whole else []
    return [*parts, x[whole:].view(1, -1)] if whole < x.numel() else parts


def _by_block(sent: Tensor, numel: int) -> list[tuple[Tensor, int]]:
    """What was sent, one row per block, with the length of the blocks: the whole ones, and the last."""
    whole = numel // BLOCK * TOP
    parts = [(sent[:whole].view(-1, TOP), BLOCK)] if whole else []
    return [*parts, (sent[whole:].view(1, -1), numel % BLOCK)] if whole < sent.numel() else parts


def _greatest(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(levels bf16 [blocks, 2], codes, places) of the greatest elements of each row; levels are NaN where a row is not
    finite. Means are of float64: no order of summing shows in bf16."""
    places = rows.abs().topk(-(-rows.shape[1] // PER_SENT), dim=1, sorted=False).indices.sort(dim=1).values
    values = rows.gather(1, places)
    sizes = values.abs().double()
    high = sizes > sizes.mean(1, keepdim=True)
    n_high = high.sum(1)
    low_mean = sizes.masked_fill(high, 0).sum(1) / (sizes.shape[1] - n_high)
    high_mean = torch.where(n_high > 0, sizes.masked_fill(~high, 0).sum(1) / n_high.clamp(min=1), low_mean)
    means = torch.stack([low_mean, high_mean], 1)
    levels = means.clamp(max=_BF16_MAX).masked_fill(~torch.isfinite(means), math.nan).to(torch.bfloat16)
    return levels, (values < 0) + 2 * high.to(torch.uint8), places


def _parts(payload: Tensor, numel: int) -> tuple[Tensor, Tensor, Tensor]:
    """(levels, codes, places) in the memory of a payload."""
    levels = _n_blocks(numel) * LEVELS_BYTES
    codes = -(-_n_sent(numel) // 4)
    return payload[:levels].view(torch.bfloat16), payload[levels : levels + codes], payload[levels + codes :]


def _padded(x: Tensor, multiple: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, -x.numel() % multiple))


def _pack_codes(code: Tensor, out: Tensor) -> None:
    four = _padded(code, 4).view(-1, 4)
    out.copy_(four[:, 0] | four[:, 1] << 2 | four[:, 2] << 4 | four[:, 3] << 6)


def _unpack_codes(packed: Tensor, n_sent: int) -> Tensor:
    return torch.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], 1).flatten()[:n_sent].long()


def _pack_places(places: Tensor, out: Tensor) -> None:
    two = _padded(places, 2).view(-1, 2)
    a, b = two[:, 0], two[:, 1]
    three = torch.stack([a & 255, a >> 8 | (b & 15) << 4, b >> 4], 1)
    out.copy_(three.flatten()[: out.numel()])


def _unpack_places(packed: Tensor, n_sent: int) -> Tensor:
    three = _padded(packed, 3).view(-1, 3).long()
    a, b = three[:, 0] | (three[:, 1] & 15) << 8, three[:, 1] >> 4 | three[:, 2] << 4
    return torch.stack([a, b], 1).flatten()[:n_sent]


def _ends_with_zeros(codes: Tensor, places: Tensor, n_sent: int) -> bool:
    """Bits after the last code and the last place are 0."""
    unused_codes = int(codes[-1]) >> 2 * (n_sent % 4) if n_sent % 4 else 0
    unused_place = int(places[-1]) >> 4 if n_sent % 2 else 0
    return not unused_codes and not unused_place
