"""What a wire format is to the reduction, and how payloads are read where they lie.

Payloads (a ZeroMQ frame, a bytes object) are read in place: no copy is made before the conversion. What is encoded is
handed out in the memory that it was written to.
"""

from __future__ import annotations

import ctypes
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dlc.errors import ProtocolError

Payload = bytes | bytearray | memoryview
_FP32_MAX = torch.finfo(torch.float32).max


class Codec(ABC):
    """What the reduction needs of a wire format. Vectors are fp32, one-dimensional, contiguous, on the CPU."""

    name: str
    """As in RunSpec and GridSpec."""
    feedback: bool = False
    """It loses so much that contributors keep what it lost, and add it to what they contribute next."""
    carry: float = 1.0
    """The part of what they kept that they add."""
    sparse: bool = False
    """Most elements are not sent at all: of no use to who does not keep them."""
    sum_tells: bool = False
    """A contribution that is not finite shows in the sum, see `combine_usual`: it needs no look of its own before."""

    @abstractmethod
    def wire_bytes(self, numel: int) -> int:
        """Length of the payload of `numel` elements (at least 1); ValueError below that."""

    @abstractmethod
    def encode(self, x: Tensor, scratch: Tensor | None = None) -> memoryview:
        """The payload of x, in memory of its own that nobody writes to; ValueError unless x is an fp32 vector as above
        with at least one element.

        `scratch` saves an allocation: fp32, at least as long as x, in memory of its own, and overwritten.
        """

    def encode_rows(self, x: Tensor, out: Tensor) -> None:
        """The payload of each row of x, by the processor that has it: the bytes that `encode` gives.

        x: fp32 [rows, numel]; out: uint8 [rows, wire_bytes(numel)]; contiguous, both on one device. ValueError else. On
        CUDA it waits for the work queued before, and its own may still go on when it returns.
        """
        self._check_rows(x, out)
        for row, payload in zip(x.cpu(), out, strict=True):
            payload.copy_(torch.frombuffer(_writable(self.encode(row)), dtype=torch.uint8))

    @abstractmethod
    def decode(self, payload: Payload, numel: int, out: Tensor | None = None) -> Tensor:
        """`numel` fp32 elements, in `out` (so many, contiguous) or memory of their own; ProtocolError where the length
        is wrong.

        No other payload is an error here: what is decoded may have been decided already. See `finite`.
        """

    def scaled(self, out: Tensor, payload: Payload, weight: float) -> None:
        """out = weight * decode(payload), rounded to fp32: the first term of a sum, as `accumulate` would add it."""
        self.decode(payload, out.numel(), out).mul_(weight)

    @abstractmethod
    def accumulate(self, acc: Tensor, payload: Payload, weight: float, scratch: Tensor) -> None:
        """acc += weight * decode(payload), the product and the sum each rounded to fp32 (no fused multiply-add).

        `weight` is rounded to fp32 first. `scratch` is fp32, at least as long as `acc`, and is overwritten.
        ProtocolError where the length is wrong; `acc` is unchanged then.
        """

    @abstractmethod
    def finite(self, payload: Payload, numel: int) -> bool:
        """No element is NaN or infinite, and nothing in it is what `encode` never writes; ProtocolError where the
        length is wrong."""

    # A result is a payload of the mean. A codec whose parts do not add up to one overrides all of what follows.

    def result_bytes(self, numel: int, n_parts: int) -> int:
        """Length of the result of `n_parts` (at least 1) contributions of `numel` elements."""
        return self.wire_bytes(numel)

    def combine(
        self, parts: Sequence[tuple[Payload, float]], divisor: float, acc: Tensor, scratch: Tensor
    ) -> memoryview:
        """The result of at least one (contribution, weight): the sum of weight * decoded, in this order, divided by
        `divisor`, each step rounded to fp32.

        Weights and divisor are fp32 numbers. `acc` has the elements of the chunk, `scratch` at least as many; both are
        overwritten.
        """
        self._mean(parts, divisor, acc, scratch)
        acc.clamp_(-_FP32_MAX, _FP32_MAX)
        return self.encode(acc, scratch)

    def combine_usual(
        self, parts: Sequence[tuple[Payload, float]], divisor: float, acc: Tensor, scratch: Tensor
    ) -> memoryview | None:
        """`combine` for a codec whose `sum_tells`; None where some element of the mean is beyond the wire type, or not
        finite, as it is where one of a contribution is not."""
        raise NotImplementedError

    def _mean(self, parts: Sequence[tuple[Payload, float]], divisor: float, acc: Tensor, scratch: Tensor) -> None:
        """The mean in fp32, in `acc`."""
        (first, weight), *others = parts
        self.scaled(acc, first, weight)
        for payload, weight in others:
            self.accumulate(acc, payload, weight, scratch)
        if divisor != 1:
            acc.div_(divisor)

    def decode_result(self, payload: Payload, numel: int, out: Tensor | None = None) -> Tensor:
        """`decode` of a result: the same bits on every host."""
        return self.decode(payload, numel, out)

    def finite_result(self, payload: Payload, numel: int) -> bool:
        """`finite` of a result."""
        return self.finite(payload, numel)

    def _check_rows(self, x: Tensor, out: Tensor) -> None:
        """ValueError unless these are what `encode_rows` takes."""
        fits = x.dtype is torch.float32 and out.dtype is torch.uint8 and x.dim() == 2 and x.device == out.device
        rows, numel = x.shape if fits else (0, 0)
        if not fits or out.shape != (rows, self.wire_bytes(numel)) or not (x.is_contiguous() and out.is_contiguous()):
            raise ValueError(
                f"rows are contiguous fp32 and their payloads uint8, on one device; got {x.dtype} {tuple(x.shape)} on "
                f"{x.device} and {out.dtype} {tuple(out.shape)} on {out.device} for {self.name}"
            )

    def _buffer(self, payload: Payload, numel: int) -> Payload | ctypes.Array[ctypes.c_char]:
        """The payload's own memory for `torch.frombuffer`, its length checked: to be read, never to be written."""
        expected_bytes = self.wire_bytes(numel)
        n_bytes = memoryview(payload).nbytes
        if n_bytes != expected_bytes:
            raise ProtocolError(
                f"{numel} elements of {self.name} are {expected_bytes} bytes, the payload has {n_bytes}"
            )
        return _writable(payload)


def check_numel(numel: int) -> None:
    """ValueError for fewer than one element: no chunk is empty."""
    if numel < 1:
        raise ValueError(f"a payload has at least 1 element, got {numel}")


def check_vector(x: Tensor) -> None:
    """ValueError unless x is what a codec takes."""
    if x.dtype is not torch.float32 or x.dim() != 1 or x.device.type != "cpu" or not x.is_contiguous():
        raise ValueError(
            "a codec takes contiguous fp32 vectors on the CPU, "
            f"got {x.dtype} of shape {tuple(x.shape)} on {x.device.type}"
        )


def sealed(payload: Tensor) -> memoryview:
    """The bytes of a uint8 vector, which nobody writes to any more."""
    return payload.numpy().data.toreadonly()


def all_finite(x: Tensor) -> bool:
    """No element of x (fp32, fp16, bf16) is NaN or infinite. Many times faster than `isfinite(x).all()`."""
    if x.dtype in _INFINITY_BITS:
        return greatest_bits(x) is not None
    if math.isfinite(x.sum().item()):  # no sum with NaN or an infinity in it is finite
        return True
    low, high = torch.aminmax(x)  # the sum of finite numbers may overflow; this hands on NaN
    return math.isfinite(low.item()) and math.isfinite(high.item())


_INFINITY_BITS = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80}
_LEAST = {
    dtype: torch.tensor((1 << 15) - 2 * infinity, dtype=torch.int16, device="cpu")
    for dtype, infinity in _INFINITY_BITS.items()
}
"""See `greatest_bits`; made once, as it takes a tenth of the time of a look at a chunk."""


def greatest_bits(x: Tensor) -> int | None:
    """The bits of the greatest |x| (fp16 or bf16, on the CPU), which grow as the numbers do; None where some x is not
    finite. By arithmetic modulo 2^16, where comparing floats is slow.

    Doubling drops the sign: what is not finite is then 2 * infinity or more. Counted from there these are the least
    numbers of all, and -2^15 + 2^16 - 2 * infinity is the least that a finite one becomes: zero does.
    """
    least = (1 << 15) - 2 * _INFINITY_BITS[x.dtype]
    low, high = torch.aminmax(torch.add(_LEAST[x.dtype], x.view(torch.int16), alpha=2))
    return (int(high) - least) // 2 if int(low) >= least else None


def _writable(payload: Payload) -> Payload | ctypes.Array[ctypes.c_char]:
    """The same memory as a buffer that torch takes without complaint.

    `torch.frombuffer` warns about read-only buffers because a tensor can't be read-only. Ours are only read, so
    such a buffer is passed by address; the ctypes array keeps the payload alive for as long as the tensor lives.
    """
    view = memoryview(payload)
    if not view.readonly:
        return payload
    address, _ = np.frombuffer(view, dtype=np.uint8).__array_interface__["data"]
    array = (ctypes.c_char * view.nbytes).from_address(address)
    array.owner = view  # type: ignore[attr-defined]
    return array
