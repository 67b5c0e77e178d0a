"""How one chunk of a vector travels: fp32, fp16 or bf16 elements, little-endian, nothing else in the frame.

A codec is stateless and has no buffers of its own, so that one object serves every thread and every chunk. All of
them keep three promises, which the reduction rests on:

- **Sizes are exact**: `wire_bytes(numel)` is the only length that `numel` elements ever have.
- **Finite stays finite**: a finite element beyond the range of the wire type is clamped to the largest value of
  that type (fp16: +-65504, bf16: +-3.39e38). It never becomes an infinity.
- **Non-finite stays non-finite**: NaN and infinities survive encoding, so that the receiver can see and refuse them.

Payloads are read where they lie (a ZeroMQ frame, a bytes object): no copy is made before the conversion. Torch does
the work, in one pass over a chunk per step; a chunk of about 1 MiB of fp32 stays in the cache between the passes.
"""

from __future__ import annotations

import ctypes
import math
import sys
from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from dlc.errors import ConfigError, ProtocolError

Payload = bytes | bytearray | memoryview


class Codec(ABC):
    """What the reduction needs of a wire format. Vectors are fp32, one-dimensional, contiguous, on the CPU."""

    name: str
    """As in RunSpec and GridSpec."""

    @abstractmethod
    def wire_bytes(self, numel: int) -> int:
        """Length of the payload of `numel` elements (at least 1); ValueError below that."""

    @abstractmethod
    def encode(self, x: Tensor, scratch: Tensor | None = None) -> bytes:
        """The payload of x; ValueError unless x is an fp32 vector as above with at least one element.

        `scratch` saves an allocation: fp32, at least as long as x, in memory of its own, and overwritten.
        """

    @abstractmethod
    def decode(self, payload: Payload, numel: int) -> Tensor:
        """`numel` fp32 elements in memory of their own; ProtocolError where the length is wrong."""

    @abstractmethod
    def accumulate(self, acc: Tensor, payload: Payload, weight: float, scratch: Tensor) -> None:
        """acc += weight * decode(payload), the product and the sum each rounded to fp32 (no fused multiply-add).

        `weight` is rounded to fp32 first. `scratch` is fp32, at least as long as `acc`, and is overwritten.
        ProtocolError where the length is wrong; `acc` is unchanged then.
        """

    @abstractmethod
    def finite(self, payload: Payload, numel: int) -> bool:
        """No element is NaN or infinite; ProtocolError where the length is wrong."""


class CastCodec(Codec):
    """Elements converted to a torch floating type, rounded to nearest, ties to even."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self.dtype = dtype

    def wire_bytes(self, numel: int) -> int:
        if numel < 1:
            raise ValueError(f"a payload has at least 1 element, got {numel}")
        return numel * self.dtype.itemsize

    def encode(self, x: Tensor, scratch: Tensor | None = None) -> bytes:
        _check_vector(x)
        n_bytes = self.wire_bytes(x.numel())
        wire = x.detach()
        if self.dtype is not torch.float32:
            wire = self._rounded(wire, scratch)
        return ctypes.string_at(wire.data_ptr(), n_bytes)

    def _rounded(self, x: Tensor, scratch: Tensor | None) -> Tensor:
        """x in the wire type, in the memory of `scratch` if there is one; out of range is clamped."""
        wire = torch.empty_like(x, dtype=self.dtype) if scratch is None else scratch.view(self.dtype)[: x.numel()]
        wire.copy_(x)
        if not _all_finite(wire):
            limit = torch.finfo(self.dtype).max
            wire.copy_(torch.where(torch.isfinite(x), x.clamp(-limit, limit), x))
        return wire

    def decode(self, payload: Payload, numel: int) -> Tensor:
        return self._view(payload, numel).to(torch.float32, copy=True)

    def accumulate(self, acc: Tensor, payload: Payload, weight: float, scratch: Tensor) -> None:
        view = self._view(payload, acc.numel())
        product = scratch[: acc.numel()]
        if self.dtype is torch.float32:
            torch.mul(view, weight, out=product)
        else:
            product.copy_(view).mul_(weight)
        acc.add_(product)

    def finite(self, payload: Payload, numel: int) -> bool:
        return _all_finite(self._view(payload, numel))

    def _view(self, payload: Payload, numel: int) -> Tensor:
        """The payload itself as a tensor of the wire type: to be read, never to be written."""
        expected_bytes = self.wire_bytes(numel)
        n_bytes = memoryview(payload).nbytes
        if n_bytes != expected_bytes:
            raise ProtocolError(
                f"{numel} elements of {self.name} are {expected_bytes} bytes, the payload has {n_bytes}"
            )
        return torch.frombuffer(_writable(payload), dtype=self.dtype)


CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        CastCodec("fp32", torch.float32),
        CastCodec("fp16", torch.float16),
        CastCodec("bf16", torch.bfloat16),
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


def _check_vector(x: Tensor) -> None:
    if x.dtype is not torch.float32 or x.dim() != 1 or x.device.type != "cpu" or not x.is_contiguous():
        raise ValueError(
            "a codec takes contiguous fp32 vectors on the CPU, "
            f"got {x.dtype} of shape {tuple(x.shape)} on {x.device.type}"
        )


def _all_finite(x: Tensor) -> bool:
    """`aminmax` hands on NaN, and is some 15 times faster than `isfinite(x).all()`."""
    low, high = torch.aminmax(x)
    return math.isfinite(low.item()) and math.isfinite(high.item())


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
