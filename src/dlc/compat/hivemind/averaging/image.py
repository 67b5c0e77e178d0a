"""The state of a peer as bytes: metadata (msgpack) and tensors of any dtype, for `load_state_from_peers`.

    [length of the header, 8 bytes little-endian][header, msgpack][payloads, one after the other]

A tensor with a lossy codec travels as what the codec makes of its fp32 values, all others as their own memory.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from dlc.comm.codecs import get_codec
from dlc.compat.hivemind.utils.serializer import MSGPackSerializer
from dlc.errors import DlcError, ProtocolError, UsageError
from dlc.flat import FLAT_DTYPES

LENGTH = struct.Struct("<Q")
LOSSLESS = "fp32"
DTYPES = (
    *FLAT_DTYPES,
    *(torch.float64, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
    *(torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)
KNOWN = "a floating, whole or complex dtype"
BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


def pack_state(metadata: object, tensors: Sequence[Tensor], codecs: Sequence[str]) -> bytes:
    """`codecs`: one per tensor; those of integers and float64 are not looked at. UsageError: metadata that msgpack does
    not know, a tensor of another dtype."""
    rows, payloads = [], []
    for tensor, codec in zip(tensors, codecs, strict=True):
        if tensor.dtype not in DTYPES or tensor.layout != torch.strided:
            raise UsageError(f"a tensor of {tensor.dtype}, {tensor.layout} cannot be given: make it dense, of {KNOWN}")
        flat = tensor.detach().cpu().contiguous().view(-1)
        codec = codec if tensor.dtype in FLAT_DTYPES and flat.numel() else LOSSLESS
        payload = _raw(flat) if codec == LOSSLESS else get_codec(codec).encode(flat.float())
        rows.append([str(tensor.dtype).removeprefix("torch."), list(tensor.shape), codec, len(payload)])
        payloads.append(payload)
    header = MSGPackSerializer.dumps([metadata, rows])
    return b"".join((LENGTH.pack(len(header)), header, *payloads))


def unpack_state(raw: bytes) -> tuple[Any, list[Tensor]]:
    """(metadata, tensors); ProtocolError for bytes that `pack_state` never writes."""
    try:
        (length,) = LENGTH.unpack_from(raw)
        start = LENGTH.size + length
        metadata, rows = MSGPackSerializer.loads(raw[LENGTH.size : start])
        tensors = []
        for dtype, shape, codec, n_bytes in rows:
            if not 0 <= n_bytes <= len(raw) - start:
                raise ValueError("it is cut short")
            tensors.append(_tensor(BY_NAME[dtype], [int(n) for n in shape], codec, raw[start : start + n_bytes]))
            start += n_bytes
    except (ValueError, KeyError, TypeError, OverflowError, RuntimeError, struct.error, DlcError) as error:
        raise ProtocolError(f"no state of a peer: {error}") from error
    return metadata, tensors


def _raw(flat: Tensor) -> bytes:
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _tensor(dtype: torch.dtype, shape: list[int], codec: str, payload: bytes) -> Tensor:
    numel = prod(shape)
    if codec != LOSSLESS:
        return get_codec(codec).decode(payload, numel).to(dtype).view(shape)
    if len(payload) != numel * dtype.itemsize:
        raise ValueError(f"{len(payload)} bytes for {numel} elements of {dtype}")
    if not numel:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(payload), dtype=dtype).view(shape)
