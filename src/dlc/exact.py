"""Any tensors, bit for bit, as a vector that a round can carry.

Rounds add up vectors of fp32. Three bytes make a whole number below 2^24, which fp32 holds exactly, so a vector of such
numbers to which the others add zeros arrives as it was sent. In front of the bytes stands their hash, over names,
shapes and dtypes too: what arrives is the source's state, or is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from dlc.arguments import instance
from dlc.errors import UsageError
from dlc.flat import check_writable

HASH_BYTES = 32
ELEM_BYTES = 3
"""Per element of the vector: a fourth byte would not fit the 24 bits of an fp32 mantissa."""


class Exact:
    """The bytes of a state dict, in the order of its names. Holds the tensors themselves."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        instance("state", state, Mapping, "give tensors by name, such as model.state_dict()")
        if not state:
            raise UsageError("there is nothing to broadcast: the state has no tensor")
        for name, tensor in state.items():
            if not isinstance(tensor, Tensor):
                raise UsageError(f"{name!r} is a {type(tensor).__name__}: only tensors can be broadcast")
            try:
                check_writable(tensor)
            except UsageError as error:
                raise UsageError(f"{name!r}: {error}") from None
        self._state = dict(sorted(state.items()))
        self._bytes = sum(t.numel() * t.element_size() for t in self._state.values())
        self.numel = -(-(HASH_BYTES + self._bytes) // ELEM_BYTES)
        """Elements of the vector."""

    def pack(self) -> Tensor:
        """The tensors as they are now: fp32 [numel]."""
        raw = np.zeros(self.numel * ELEM_BYTES, np.uint8)
        start = HASH_BYTES
        for tensor in self._state.values():
            plain = tensor.detach().resolve_conj().resolve_neg()
            part = plain.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            raw[start : start + part.size] = part
            start += part.size
        raw[:HASH_BYTES] = np.frombuffer(self._hash(raw), np.uint8)
        whole = np.zeros((self.numel, 4), np.uint8)
        whole[:, :ELEM_BYTES] = raw.reshape(-1, ELEM_BYTES)
        return torch.from_numpy(whole.view("<u4").reshape(-1).astype(np.float32))

    def unpack(self, vector: Tensor, source: str) -> None:
        """Write what `source` packed into the tensors; UsageError, with nothing changed, where theirs are others."""
        raw = vector.numpy().astype("<u4").view(np.uint8).reshape(-1, 4)[:, :ELEM_BYTES].reshape(-1)
        if raw[:HASH_BYTES].tobytes() != self._hash(raw):
            raise UsageError(
                f"the state of {source[:8]} has other names, shapes or dtypes than the one here, of "
                f"{len(self._state)} tensors and {self._bytes} bytes; nothing was changed"
            )
        start = HASH_BYTES
        with torch.no_grad():
            for tensor in filter(torch.numel, self._state.values()):
                size = tensor.numel() * tensor.element_size()
                part = torch.from_numpy(raw[start : start + size].copy())
                tensor.copy_(part.view(tensor.dtype).reshape(tensor.shape))
                start += size

    def _hash(self, raw: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> bytes:
        hasher = blake3(repr([(n, str(t.dtype), tuple(t.shape)) for n, t in self._state.items()]).encode())
        hasher.update(raw[HASH_BYTES : HASH_BYTES + self._bytes].data)
        return hasher.digest()
