"""One flat fp32 vector in place of a list of tensors.

The rounds average a single CPU vector of float32; a model holds many tensors of mixed shapes, dtypes and devices. This
module is the only place that maps one to the other: tensors in the order they are given, each row-major, without
padding. Tied weights stand once; frozen parameters and buffers not at all: they are not averaged, and a newcomer has
those of its own model. So what training changes in a buffer (BatchNorm's running statistics) differs between peers.

float32 holds every bf16 and fp16 value exactly, so gather is exact; scatter rounds to the dtype of the parameter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor, nn

from dlc.comm import vectors
from dlc.errors import UsageError

FLAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What float32 holds exactly; float64 would be rounded in silence, so it is refused."""
CPU = torch.device("cpu")
WRAPPERS = frozenset(("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
"""Parts of names that DDP, torch.compile, FSDP and activation checkpointing add, on one peer and not on another."""


class Layout(NamedTuple):
    """Which parameter each element of a flat vector is of; zeros: that is not known. For peers that hold models of as
    many elements, in other shapes or another order: their mean would be one of nothing."""

    shapes: bytes
    """Eight bytes, of the shapes in order."""
    names: bytes
    """Eight bytes, of the names in order."""

    def differs(self, other: Layout) -> str:
        """In which way, as a clause; empty where it does not, as far as is known."""
        kinds = "in other shapes", "of other names, or in another order"
        for mine, theirs, what in zip(self, other, kinds, strict=True):
            if any(mine) and any(theirs) and mine != theirs:
                return what
        return ""


UNKNOWN_LAYOUT = Layout(bytes(8), bytes(8))


def flatten_tensors(tensors: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Copy tensors (fp32, bf16, fp16; any shape, strides, device) into one fp32 CPU vector, `out` where given."""
    numel = sum(t.numel() for t in tensors)
    flat = vectors.empty(numel) if out is None else _check_flat(out, numel)
    start = 0
    with torch.no_grad():
        for t in tensors:
            _check_dtype(t)
            flat[start : start + t.numel()].view(t.shape).copy_(t)
            start += t.numel()
    return flat


def unflatten_into(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy a fp32 CPU vector back into the tensors it came from, in place, rounding to each one's dtype."""
    _check_flat(flat, sum(t.numel() for t in tensors))
    for t in tensors:
        _check_dtype(t)
    start = 0
    with torch.no_grad():
        for t in tensors:
            t.copy_(flat[start : start + t.numel()].view(t.shape))
            start += t.numel()


def check_writable(t: Tensor) -> None:
    """UsageError unless its values can be read, and all of them written."""
    if t.device.type == "meta":
        raise UsageError("a tensor on meta has no values to average: bring the model to its device first (to_empty)")
    if t.layout != torch.strided:
        raise UsageError(f"a tensor of {t.layout} cannot be averaged: it must be dense")
    if _is_sharded(t):
        raise UsageError("a DTensor holds a part of a tensor only: average its full_tensor(), or its to_local()")
    if t.is_inference() and not torch.is_inference_mode_enabled():
        raise UsageError("a tensor made under torch.inference_mode() cannot be written outside of it: clone() it")
    if any(stride == 0 and size > 1 for stride, size in zip(t.stride(), t.shape, strict=True)):
        raise UsageError("an expanded tensor cannot be averaged in place: its elements share memory, clone() it first")


def writable_tensors(tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """One or many as a list. UsageError unless their values can be read, and all of them written."""
    if isinstance(tensors, np.ndarray):
        raise UsageError("what is averaged must be torch tensors, not ndarray: torch.from_numpy(x) shares its memory")
    if not isinstance(tensors, (Tensor, Iterable)):
        raise UsageError(f"what is averaged must be torch tensors, not {type(tensors).__name__}")
    many = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    for t in many:
        if not isinstance(t, Tensor):
            raise UsageError(f"what is averaged must be torch tensors, not {type(t).__name__}")
        _check_dtype(t)
        check_writable(t)
    return many


def parts_of(vector: Tensor, elems: int) -> Iterator[Tensor]:
    """Views of `elems` elements each, one after the other; the last may be shorter."""
    for start in range(0, vector.numel(), elems):
        yield vector[start : start + elems]


def device_of(tensors: Iterable[Tensor]) -> torch.device:
    """Where these are best put together, and encoded: the CUDA device that holds them all; else the CPU."""
    devices = {t.device for t in tensors}
    device = devices.pop() if len(devices) == 1 else CPU
    return device if device.type == "cuda" else CPU


def parts_of_many(tensors: Sequence[Tensor], elems: int, device: torch.device) -> Iterator[Tensor]:
    """What `flatten_tensors` gives, on `device`, in parts of `elems` elements, the last perhaps shorter: the memory of
    one part is used again for the next."""
    numel = sum(t.numel() for t in tensors)
    part, filled = vectors.empty(min(elems, numel), device), 0
    for t in tensors:
        _check_dtype(t)
        flat, done = t.detach().reshape(-1), 0
        while done < t.numel():
            more = min(len(part) - filled, t.numel() - done)
            part[filled : filled + more].copy_(flat[done : done + more])
            filled, done = filled + more, done + more
            if filled == len(part):
                yield part
                filled = 0
    if filled:
        yield part[:filled]


def finite(vector: Tensor) -> bool:
    """Whether no element is NaN or Inf."""
    low, high = torch.aminmax(vector)  # a twentieth of the time of `vector_norm`; hands on NaN
    return math.isfinite(low) and math.isfinite(high)


class FlatView:
    """The trainable parameters of a model as one fp32 CPU vector.

    Holds the parameters themselves, so it stays right when `model.to(...)` moves them; tying or freezing weights
    afterwards is not seen. A `Parameter` that needs no gradient is left out; a plain tensor always counts.
    """

    def __init__(self, params: Iterable[nn.Parameter | Tensor], names: Iterable[str] | None = None) -> None:
        given = list(params)
        labels = [""] * len(given) if names is None else list(names)
        if len(labels) != len(given):
            raise UsageError(f"{len(given)} parameters, but {len(labels)} names")
        self.tensors: list[Tensor] = []
        self._names: list[str] = []
        seen: set[tuple[object, ...]] = set()
        for tensor, label in zip(given, labels, strict=True):
            if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
                continue
            if _is_lazy(tensor):
                raise UsageError("a parameter has no shape yet: run the model on a batch first, as its layers are lazy")
            key = identity(tensor)
            if key not in seen:
                seen.add(key)
                _check_dtype(tensor)
                self.tensors.append(tensor)
                self._names.append(label)
        _check_apart(self.tensors, self._names)
        self.numel = sum(t.numel() for t in self.tensors)
        if not self.numel:
            raise UsageError("no trainable parameter: at least one must have requires_grad=True")

    @classmethod
    def of(cls, model: nn.Module) -> FlatView:
        """The view of all trainable parameters of a model, with their names in the digest."""
        named = list(model.named_parameters())
        return cls([p for _, p in named], [n for n, _ in named])

    def gather(self, out: Tensor) -> Tensor:
        """Copy the parameters into `out` (fp32, CPU, contiguous, `numel` elements) and return it."""
        return flatten_tensors(self.tensors, out)

    def scatter(self, flat: Tensor) -> None:
        """Copy `flat` (fp32, CPU, `numel` elements) into the parameters."""
        unflatten_into(flat, self.tensors)

    @property
    def device(self) -> torch.device:
        """Where `parts` are best made: see `device_of`."""
        return device_of(self.tensors)

    def parts(self, elems: int, device: torch.device = CPU) -> Iterator[Tensor]:
        """The same vector, on `device`, in parts of `elems` elements, the last perhaps shorter, without memory for the
        whole: that of one part is used again for the next."""
        return parts_of_many(self.tensors, elems, device)

    def sizes(self) -> list[tuple[str, int]]:
        """Name and number of elements of each parameter, in order."""
        return [(name, t.numel()) for name, t in zip(self._names, self.tensors, strict=True)]

    def layout(self) -> dict[str, str]:
        """Dtype and shape of each parameter by name, in order: "float32 256x128"."""
        return {
            name: f"{str(t.dtype).removeprefix('torch.')} {'x'.join(map(str, t.shape)) or 'scalar'}"
            for name, t in zip(self._names, self.tensors, strict=True)
        }

    def fingerprint(self) -> Layout:
        """Of shapes and names, not of dtypes: equal exactly where two peers may average their vectors.

        Of names only in what they differ: the model may be a part of another module on one peer, and wrapped.
        """
        names = [[part for part in name.split(".") if part and part not in WRAPPERS] for name in self._names]
        while all(len(parts) > 1 for parts in names) and len({parts[0] for parts in names}) == 1:
            names = [parts[1:] for parts in names]
        shapes = [tuple(t.shape) for t in self.tensors]
        return Layout(_hash8(shapes), _hash8(names) if all(names) else UNKNOWN_LAYOUT.names)


def _is_lazy(t: Tensor) -> bool:
    """Whether it is one of a lazy module that has seen no batch yet."""
    return isinstance(t, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer))


def _hash8(what: object) -> bytes:
    return blake3(repr(what).encode()).digest(length=8)


def identity(t: Tensor) -> tuple[object, ...]:
    """Equal for two tensors that are the same memory read the same way: tied weights."""
    if not t.numel() or t.device.type == "meta" or not t.data_ptr():  # a part of a sharded one tells no address
        return (id(t),)
    return (t.device, t.data_ptr(), t.dtype, tuple(t.shape), t.stride())


def _check_apart(tensors: Sequence[Tensor], names: Sequence[str]) -> None:
    """UsageError: two of them are the same memory read in different ways (the transpose of another one, say). What is
    averaged of each is rounded by itself, so they would not stay the same, and whichever is written last counts.

    Looked at are those that fill the memory from their first element to their last.
    """
    spans: list[tuple[str, int, int, str]] = []
    for t, name in zip(tensors, names, strict=True):
        if type(t) in (Tensor, nn.Parameter) and t.numel() and t.device.type != "meta" and t.data_ptr():
            reach = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
            if reach == t.numel():
                spans.append((str(t.device), t.data_ptr(), t.data_ptr() + reach * t.element_size(), name))
    spans.sort(key=lambda span: span[:3])
    for (device, _, end, name), (other, start, _, another) in itertools.pairwise(spans):
        if device == other and start < end:
            both = f"the parameters {name} and {another}" if name and another else "two parameters"
            raise UsageError(
                f"{both} share memory in other forms, so that each would be averaged by itself, and they would not "
                "stay the same: keep one of them as a Parameter, and make the other form of it in forward()"
            )


def _is_sharded(t: Tensor) -> bool:
    if type(t) in (Tensor, nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor  # slow to import, and seldom of use

    return isinstance(t, DTensor)


def _check_dtype(t: Tensor) -> None:
    if t.dtype not in FLAT_DTYPES:
        raise UsageError(f"a tensor of {t.dtype} cannot be averaged; use float32, bfloat16 or float16")


def _check_flat(flat: Tensor, numel: int) -> Tensor:
    if flat.dtype != torch.float32 or flat.device.type != "cpu" or flat.dim() != 1 or not flat.is_contiguous():
        raise UsageError(f"the flat vector must be contiguous 1-D float32 on the CPU, not {flat.dtype} {flat.device}")
    if flat.numel() != numel:
        raise UsageError(f"the flat vector has {flat.numel()} elements, but the tensors hold {numel}")
    return flat
