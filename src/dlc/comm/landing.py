"""Payloads that a device makes, on their way to the host's memory.

    part k      encode ──> copy to pinned memory ──> copy to where it belongs
    part k + 1             encode ─────────────────> copy to pinned memory ──> ...

Encoded before they are copied, they are half as long as the numbers, or less. Both happen on a stream of their own, so
that the copies wait for nothing that the device is asked for meanwhile. Pinned memory is bounded, however long the
vector is, as the system cannot use it for anything else.

On a CPU the same calls do all at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

N_BUFFERS = 2
"""One is filled while the other is emptied."""


class Landing:
    """For one vector of `device`, in parts of at most `n_bytes` when encoded. Used from one thread."""

    def __init__(self, device: torch.device, n_bytes: int) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.Stream(device)
        self._buffers = [_Buffer(device, n_bytes, self._module.Event()) for _ in range(N_BUFFERS)]
        self._turn = 0

    def take(self, encode: Callable[[Tensor], None], out: Tensor) -> None:
        """`encode` writes a payload into memory of the device, as long as `out` (uint8, CPU), which has it after
        `finish`. What it was made of may be overwritten by whatever is queued from now on."""
        buffer = self._buffers[self._turn]
        self._turn = (self._turn + 1) % N_BUFFERS
        buffer.empty()
        usual = self._module.current_stream(self._device)
        self._stream.wait_stream(usual)
        with self._module.stream(self._stream):
            encode(buffer.there[: out.numel()])
            encoded = self._stream.record_event()
            buffer.fetch(out, self._stream)
        usual.wait_event(encoded)

    def finish(self) -> None:
        """All payloads are where they belong when this returns."""
        for buffer in self._buffers:
            buffer.empty()


class _Buffer:
    """Holds one payload at a time, on the device and in pinned memory. `copied`: an event of the device."""

    def __init__(self, device: torch.device, n_bytes: int, copied: Any) -> None:
        self.there = torch.empty(n_bytes, dtype=torch.uint8, device=device)
        self._here = torch.empty(n_bytes, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
        self._copied = copied
        self._out: Tensor | None = None

    def fetch(self, out: Tensor, stream: Any) -> None:
        """Begin to copy what is on the device, as much as `out` takes."""
        self._here[: out.numel()].copy_(self.there[: out.numel()], non_blocking=True)
        self._copied.record(stream)
        self._out = out

    def empty(self) -> None:
        """Wait for the copy, and hand it on; at once where there is none."""
        out, self._out = self._out, None
        if out is not None:
            self._copied.synchronize()
            out.copy_(self._here[: out.numel()])
