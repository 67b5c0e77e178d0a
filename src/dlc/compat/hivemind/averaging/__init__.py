"""Averaging in groups."""

from __future__ import annotations

from dlc.compat.hivemind.averaging.averager import DecentralizedAverager

__all__ = ["DecentralizedAverager"]
