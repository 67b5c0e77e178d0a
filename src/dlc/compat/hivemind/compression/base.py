"""Hivemind's place for what all compression classes share."""

from __future__ import annotations

from dlc.compat.hivemind.compression import CompressionBase, CompressionInfo, Key, NoCompression, TensorRole

__all__ = ["CompressionBase", "CompressionInfo", "Key", "NoCompression", "TensorRole"]
