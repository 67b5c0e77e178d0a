"""What a peer is to a group, under Hivemind's names."""

from __future__ import annotations

from enum import Enum

from dlc.compat.hivemind.averaging.partition import AllreduceException


class AveragingMode(Enum):
    """NODE: contributes, and computes a part of the mean; CLIENT: only contributes; AUX: only computes."""

    NODE = 0
    CLIENT = 1
    AUX = 2


__all__ = ["AllreduceException", "AveragingMode"]
