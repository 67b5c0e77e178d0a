"""What a caller changed while a mean was on its way, brought over to the mean."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dlc.flat import FLAT_DTYPES


@torch.no_grad()
def carry(local: Tensor, before: Tensor, mean: Tensor) -> Tensor:
    """local += mean - before, in place; where `before` is not finite, local = mean. Returns `local`.

    `local` may be of another dtype and device. A contribution with NaN or Inf is refused, and the mean is that of the
    others: by the sum alone its sender would stay as it is for ever.
    """
    finite = before.isfinite()
    if finite.all():
        return local.add_((mean - before).to(local.device, local.dtype))
    moved = local + (mean - before).to(local.device, local.dtype)
    return local.copy_(torch.where(finite.to(local.device), moved, mean.to(local.device, local.dtype)))


@torch.no_grad()
def take(local: Tensor, before: Tensor, mean: Tensor) -> None:
    """local <- mean, with what was changed since `before` (fp32, on the CPU) on top. A tensor that nobody has changed
    becomes the mean itself: the sum would round, and leave each peer with other bits."""
    exact = local.dtype in FLAT_DTYPES
    if exact and torch.equal(local.detach().to(before.device, before.dtype), before):
        local.copy_(mean)
    else:
        carry(local, before, mean)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Of two fp32 tensors: NaN is the same as itself here."""
    return np.array_equal(a.view(torch.int32).numpy(), b.view(torch.int32).numpy())  # in two thirds of torch's time
