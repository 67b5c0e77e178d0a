"""Hivemind's place for those that choose."""

from __future__ import annotations

from dlc.compat.hivemind.compression import PerTensorCompression, RoleAdaptiveCompression, SizeAdaptiveCompression

__all__ = ["PerTensorCompression", "RoleAdaptiveCompression", "SizeAdaptiveCompression"]
