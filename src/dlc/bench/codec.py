"""`dlc bench codec`: how fast this host encodes and decodes, and what each codec loses.

A vector of normal numbers, of the size of pseudo-gradients, goes through each codec in chunks of CHUNK_ELEMS, as in a
round. GB/s are of fp32 (10^9 bytes) on one thread, as the driver works; the best of REPEATS passes counts, since
everything else on the host only makes a pass slower. With `cuda` the copy between device and host is part of it, as in
a round: encoded there, and decoded here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlc.bench.memory import check_memory
from dlc.bench.plain import rounded
from dlc.comm.allocator import keep_freed_chunks
from dlc.comm.clock import clock
from dlc.comm.codecs import CODECS, Codec
from dlc.comm.encoded import Encoded, part_elems
from dlc.comm.grid import Grid
from dlc.errors import UsageError
from dlc.train.setup import pick_device

CHUNK_ELEMS = 1 << 18
"""1 MiB of fp32: the largest chunks that rounds between hosts have where nobody sets them."""
REPEATS = 5
MB_MAX = 4000.0
"""More only takes longer."""
VECTORS = 3
"""The vector is held so many times: as it is, encoded (in as many bytes, by fp32) and decoded."""
SEED = 0
SIZE = 1e-3
"""Standard deviation of what is encoded: about that of pseudo-gradients, which fp16 multiplies by a power of two."""


@dataclass(frozen=True)
class CodecReport:
    """One codec on one device."""

    codec: str
    device: str
    wire_share: float
    """Bytes on the wire / bytes of fp32."""
    encode_gb_per_s: float
    decode_gb_per_s: float
    rms_relative_error: float
    """Root mean square of the error / that of the numbers."""
    max_relative_error: float
    """Greatest error / root mean square of the numbers."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, rounded to what was measured."""
        plain: dict[str, Any] = rounded(dataclasses.asdict(self))
        return plain


def devices(name: str) -> tuple[list[torch.device], str]:
    """What to measure for `auto`, `cpu`, `cuda`, ..., and a sentence where something that was meant is not there."""
    if name in ("auto", "cpu"):
        found = [torch.device("cpu")]
        if name == "auto" and torch.cuda.is_available():
            found.append(torch.device("cuda"))
        missing = name == "auto" and len(found) == 1
        return (
            found,
            f"torch {torch.__version__} sees no CUDA device here: only the CPU was measured" if missing else "",
        )
    return [pick_device(name)], ""


def measure_codecs(mb: float, on: list[torch.device], say: Callable[[str], None]) -> list[CodecReport]:
    """Every codec on every device, for a vector of `mb` (10^6 bytes of fp32)."""
    if not 0 < mb <= MB_MAX:
        raise UsageError(f"--mb is {mb:g}; choose more than 0, up to {MB_MAX:g} MB")
    check_memory(f"--mb {mb:g}", VECTORS * mb * 1e6, "choose a smaller vector")
    keep_freed_chunks()
    torch.set_num_threads(1)
    vector = torch.randn(max(int(mb * 1e6 / 4), 1), generator=torch.Generator().manual_seed(SEED)).mul_(SIZE)
    reports = []
    for device in on:
        for codec in CODECS.values():
            say(f"{codec.name} on {device}")
            reports.append(_measured(codec, vector, device))
    return reports


def _measured(codec: Codec, vector: Tensor, device: torch.device) -> CodecReport:
    chunks, grid = torch.split(vector, CHUNK_ELEMS), Grid(vector.numel(), CHUNK_ELEMS, codec.name)
    scratch, there = torch.empty(CHUNK_ELEMS), vector.to(device)

    def encode() -> list[memoryview]:
        if device.type == "cpu":
            return [codec.encode(chunk, scratch) for chunk in chunks]
        encoded = Encoded(grid, torch.split(there, part_elems(grid, device)))
        return [encoded.payload(chunk) for chunk in range(grid.n_chunks)]

    encode()  # the warm-up
    encode_s = _best_s(encode, device)
    payloads = encode()
    out = torch.split(torch.empty_like(vector, device=device), CHUNK_ELEMS)

    def decode() -> None:
        for payload, target in zip(payloads, out, strict=True):
            target.copy_(codec.decode(payload, target.numel()))

    decode()
    n_bytes = 4 * vector.numel()
    decode_s = _best_s(decode, device)
    error_squares, squares, largest = _errors(out, chunks)
    rms = math.sqrt(squares / vector.numel())
    return CodecReport(
        codec=codec.name,
        device=str(device),
        wire_share=sum(map(len, payloads)) / n_bytes,
        encode_gb_per_s=n_bytes / encode_s / 1e9,
        decode_gb_per_s=n_bytes / decode_s / 1e9,
        rms_relative_error=math.sqrt(error_squares / vector.numel()) / rms,
        max_relative_error=largest / rms,
    )


def _errors(out: Sequence[Tensor], chunks: Sequence[Tensor]) -> tuple[float, float, float]:
    """(sum of squared errors, of squared numbers, greatest error), in float64 of one chunk at a time."""
    error_squares, squares, greatest = [], [], []
    for decoded, chunk in zip(out, chunks, strict=True):
        exact = chunk.double()
        error = decoded.cpu().double().sub_(exact)
        error_squares.append(error.square().sum().item())
        squares.append(exact.square().sum().item())
        greatest.append(error.abs_().max().item())
    return math.fsum(error_squares), math.fsum(squares), torch.tensor(greatest, dtype=torch.float64).max().item()


def _best_s(work: Callable[[], object], device: torch.device) -> float:
    best = float("inf")
    for _ in range(REPEATS):
        _synchronize(device)
        begin = clock()
        work()
        _synchronize(device)
        best = min(best, clock() - begin)
    return best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
