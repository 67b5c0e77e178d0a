"""Memory for vectors: fp32 on the CPU, whatever PyTorch's defaults are where it is made.

The default dtype is the whole process's, and libraries change it for a while (to build a model in bf16); the default
device and inference mode are the calling thread's. What peers average may depend on none of them: a mean decoded into a
bf16 buffer would be rounded in silence, and memory made under inference mode can be written by no other thread.

Large ones lie in memory of numpy's, which asks Linux for pages of 2 MiB where they are given to whoever asks. A fresh
vector of 100 MB costs 18 ms at its first use instead of 60 then, and every pass over it takes two thirds of the time.
What is needed anew in each round is `recycled`, which costs nothing.
"""

from __future__ import annotations

import collections
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

LARGE_BYTES = 4 << 20
"""What numpy asks for larger pages for."""
KEPT_MAX, KEPT_BYTES_MAX = 6, 128 << 20
"""Vectors whose memory is kept for others, and the size of each: contributions and means of three rounds, as others may
still need those of the last one when the next begins. What is larger takes long to exchange, and memory enough."""
_ELEM_BYTES, _LINE_BYTES = 4, 64
_Memory = np.ndarray[Any, np.dtype[np.float32]]
_kept: collections.deque[_Memory] = collections.deque(maxlen=KEPT_MAX)


def empty(numel: int, device: torch.device | None = None) -> Tensor:
    """fp32 [numel] on the CPU, or that device; what is in it is undefined."""
    if numel * _ELEM_BYTES < LARGE_BYTES or (device is not None and device.type != "cpu"):
        return _small(numel, device)
    return _vector(_aligned(_memory(numel), numel))


def zeros(numel: int) -> Tensor:
    """fp32 [numel] on the CPU, all 0."""
    return empty(numel).zero_()


def recycled(numel: int) -> Tensor:
    """As `empty`, where one of this length was made here before, and nobody refers to it any more, in its memory."""
    if not LARGE_BYTES <= numel * _ELEM_BYTES <= KEPT_BYTES_MAX:
        return empty(numel)
    memory = _taken(numel)
    array = _aligned(memory, numel)
    weakref.finalize(array, _kept.append, memory).atexit = False  # a tensor holds it for as long as its storage lives
    return _vector(array)


def _taken(numel: int) -> _Memory:
    """Without a lock: vectors may come to their end on any thread, and in the middle of this."""
    for _ in range(len(_kept)):
        try:
            memory = _kept.popleft()
        except IndexError:
            break
        if memory.size == _size(numel):
            return memory
        _kept.append(memory)
    return _memory(numel)


def _size(numel: int) -> int:
    return numel + _LINE_BYTES // _ELEM_BYTES


def _memory(numel: int) -> _Memory:
    return np.empty(_size(numel), np.float32)


def _aligned(memory: _Memory, numel: int) -> _Memory:
    """So that no vector register spans two cache lines."""
    skipped = -memory.ctypes.data % _LINE_BYTES // _ELEM_BYTES
    return memory[skipped : skipped + numel]


def _vector(array: _Memory) -> Tensor:
    with torch.inference_mode(False):
        return torch.from_numpy(array)


def _small(numel: int, device: torch.device | None) -> Tensor:
    with torch.inference_mode(False):
        return torch.empty(numel, dtype=torch.float32, device=device or "cpu")
