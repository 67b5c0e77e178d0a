"""Hivemind's compression classes, each as the codec of dlc that comes next to it.

| class | codec | on the wire, per element |
|---|---|---|
| NoCompression | fp32 | 4 bytes |
| Float16Compression | fp16 | 2 bytes, and a power of two per chunk |
| ScaledFloat16Compression | bf16 | 2 bytes; the range of fp32 without a scale, three bits less of mantissa |
| Uniform8BitQuantization, Quantile8BitQuantization, BlockwiseQuantization | int8 | 1 byte, a scale per 256 elements |

The adaptive ones choose among these for each tensor. A class of one's own is refused: every peer must know the format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from math import prod
from typing import Any

from torch import Tensor

from dlc.arguments import instance
from dlc.comm.codecs import get_codec
from dlc.compat.hivemind.refused import INSIDE, attribute_hook, refuse
from dlc.errors import UsageError

Key = Any
"""Name or index of a tensor."""


class TensorRole(Enum):
    """What a tensor is to the model."""

    ACTIVATION = auto()
    PARAMETER = auto()
    GRADIENT = auto()
    OPTIMIZER = auto()
    UNSPECIFIED = auto()


@dataclass(frozen=True)
class CompressionInfo:
    """What the adaptive classes choose by."""

    key: Key
    shape: tuple[int, ...]
    role: TensorRole = TensorRole.UNSPECIFIED

    @classmethod
    def from_tensor(cls, tensor: Tensor, key: Key = None, role: TensorRole = TensorRole.UNSPECIFIED) -> CompressionInfo:
        return cls(key, tuple(tensor.shape), role)

    @property
    def numel(self) -> int:
        return prod(self.shape)


class CompressionBase:
    """Base of all."""

    codec: str = ""
    """Name of the codec of dlc."""

    def choose_compression(self, info: CompressionInfo) -> CompressionBase:
        return self

    def codec_for(self, info: CompressionInfo) -> str:
        """The codec of the tensor that `info` describes; NotOffered for a class that is none of this module's."""
        chosen = self.choose_compression(info)
        if not isinstance(chosen, CompressionBase) or not chosen.codec:
            raise refuse(f"the compression {type(chosen).__name__}", "use one of hivemind.compression")
        return chosen.codec

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        """Bytes on the wire as a share of those of fp32."""
        numel = max(info.numel, 1)
        return get_codec(self.codec_for(info)).wire_bytes(numel) / (4 * numel)

    def __repr__(self) -> str:
        return f"hivemind.{type(self).__name__}()"


class NoCompression(CompressionBase):
    """fp32."""

    codec = "fp32"


class Float16Compression(CompressionBase):
    """fp16."""

    codec = "fp16"


class ScaledFloat16Compression(CompressionBase):
    """bf16: its range makes a scale needless."""

    codec = "bf16"


class Uniform8BitQuantization(CompressionBase):
    """int8 in blocks."""

    codec = "int8"


class Quantile8BitQuantization(CompressionBase):
    """int8 in blocks: a codebook of quantiles would be computed on every peer anew."""

    codec = "int8"


class BlockwiseQuantization(CompressionBase):
    """int8 in blocks."""

    codec = "int8"


class SizeAdaptiveCompression(CompressionBase):
    """`less` for tensors of fewer than `threshold` elements, `greater_equal` for the others."""

    def __init__(self, threshold: int, less: CompressionBase, greater_equal: CompressionBase) -> None:
        _check_made({"less": less, "greater_equal": greater_equal})
        self.threshold, self.less, self.greater_equal = threshold, less, greater_equal

    def choose_compression(self, info: CompressionInfo) -> CompressionBase:
        chosen = self.less if info.numel < self.threshold else self.greater_equal
        return chosen.choose_compression(info)


class RoleAdaptiveCompression(CompressionBase):
    """One for each role, `default` where none is given."""

    def __init__(
        self,
        *,
        activation: CompressionBase | None = None,
        parameter: CompressionBase | None = None,
        gradient: CompressionBase | None = None,
        optimizer: CompressionBase | None = None,
        default: CompressionBase | None = None,
    ) -> None:
        given = {"activation": activation, "parameter": parameter, "gradient": gradient, "optimizer": optimizer}
        _check_made({name: one for name, one in {**given, "default": default}.items() if one is not None})
        default = default or NoCompression()
        self.role_compressions = {
            TensorRole.ACTIVATION: activation or default,
            TensorRole.PARAMETER: parameter or default,
            TensorRole.GRADIENT: gradient or default,
            TensorRole.OPTIMIZER: optimizer or default,
            TensorRole.UNSPECIFIED: default,
        }

    def choose_compression(self, info: CompressionInfo) -> CompressionBase:
        return self.role_compressions[info.role].choose_compression(info)


class PerTensorCompression(CompressionBase):
    """One for each tensor, by its key. UsageError, as it is asked for: a tensor has none."""

    def __init__(self, tensor_compressions: Sequence[CompressionBase] | Mapping[Key, CompressionBase]) -> None:
        given = tensor_compressions
        by_key: Mapping[Key, CompressionBase] = given if isinstance(given, Mapping) else dict(enumerate(given))
        _check_made({f"that of the tensor {key!r}": one for key, one in by_key.items()})
        self.tensor_compressions = given

    def choose_compression(self, info: CompressionInfo) -> CompressionBase:
        try:
            chosen = self.tensor_compressions[info.key]
        except (LookupError, TypeError):  # by place, and this one has a name
            raise UsageError(f"PerTensorCompression has no compression of the tensor {info.key!r}") from None
        return chosen.choose_compression(info)


def _check_made(compressions: Mapping[str, object]) -> None:
    """UsageError: one is none, or a class in place of an object of it."""
    for name, one in compressions.items():
        instance(name, one, CompressionBase, "give an object of hivemind.compression, such as Float16Compression()")


__getattr__ = attribute_hook(
    __name__,
    dict.fromkeys(("deserialize_tensor_stream", "deserialize_torch_tensor", "serialize_torch_tensor"), INSIDE),
)

__all__ = [
    "BlockwiseQuantization",
    "CompressionBase",
    "CompressionInfo",
    "Float16Compression",
    "NoCompression",
    "PerTensorCompression",
    "Quantile8BitQuantization",
    "RoleAdaptiveCompression",
    "ScaledFloat16Compression",
    "SizeAdaptiveCompression",
    "TensorRole",
    "Uniform8BitQuantization",
]
