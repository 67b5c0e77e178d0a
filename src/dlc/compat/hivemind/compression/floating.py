"""Hivemind's place for these two."""

from __future__ import annotations

from dlc.compat.hivemind.compression import Float16Compression, ScaledFloat16Compression

__all__ = ["Float16Compression", "ScaledFloat16Compression"]
