"""Writes safetensors files, in the format of https://github.com/huggingface/safetensors, as that library reads them.

    8 bytes    length of the header, little-endian
    header     JSON: dtype, shape and place of each tensor, and "__metadata__"; filled up with spaces
    tensors    one after the other, row-major, little-endian

The library itself, before its release 0.8, copies all tensors first, and lets no other thread of Python run until the
file is written: a peer with a large model would answer nobody for that long, and be taken for frozen.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dlc.errors import CheckpointError

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The format's names."""
ALIGNED_BYTES = 8
"""Where the tensors begin is a multiple of it, so that each lies as its elements have to in a file that is mapped."""

MODE = 0o600


def save_file(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write `tensors` (on the CPU, contiguous), which must not change meanwhile, and `metadata` as a new file,
    that nobody else may read.

    OSError: what the file system has against it, and a part may be there. CheckpointError: a dtype has no name there.
    """
    ordered = sorted(tensors.items(), key=lambda named: (-named[1].element_size(), named[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, tensor in ordered:
        if tensor.dtype not in NAMES:
            raise CheckpointError(f"the tensor {name} is {tensor.dtype}, which a safetensors file cannot hold")
        offsets = [at, at + tensor.nbytes]
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        at = offsets[1]
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNED_BYTES)
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags, MODE)) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, tensor in ordered:
            file.write(_portable(tensor).data)


def _portable(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """Its own memory as little-endian bytes; a copy only on a big-endian host."""
    raw: npt.NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    if sys.byteorder == "little" or not tensor.numel():
        return raw
    width = tensor.element_size() // (2 if tensor.is_complex() else 1)
    return np.ascontiguousarray(raw.reshape(-1, width)[:, ::-1]).reshape(-1)
