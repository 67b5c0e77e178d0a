"""Memory for vectors: fp32 on the CPU, whatever PyTorch's defaults are where it is made.

The default dtype is the whole process's, and libraries change it for a while (to build a model in bf16); the default
device and inference mode are the calling thread's. What peers average may depend on none of them: a mean decoded into a
bf16 buffer would be rounded in silence, and memory made under inference mode can be written by no other thread.
"""

from __future__ import annotations

import torch
from torch import Tensor


def empty(numel: int) -> Tensor:
    """fp32 [numel] on the CPU; what is in it is undefined."""
    with torch.inference_mode(False):
        return torch.empty(numel, dtype=torch.float32, device="cpu")


def zeros(numel: int) -> Tensor:
    """fp32 [numel] on the CPU, all 0."""
    with torch.inference_mode(False):
        return torch.zeros(numel, dtype=torch.float32, device="cpu")
