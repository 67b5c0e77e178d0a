"""Hivemind's place for the 8-bit ones."""

from __future__ import annotations

from dlc.compat.hivemind.compression import BlockwiseQuantization, Quantile8BitQuantization, Uniform8BitQuantization

__all__ = ["BlockwiseQuantization", "Quantile8BitQuantization", "Uniform8BitQuantization"]
