"""Helpers with Hivemind's names."""

from __future__ import annotations

from dlc.compat.hivemind.utils.logging import get_logger, use_hivemind_log_handler
from dlc.compat.hivemind.utils.networking import log_visible_maddrs
from dlc.compat.hivemind.utils.performance_ema import PerformanceEMA
from dlc.compat.hivemind.utils.timed_storage import DHTExpiration, ValueWithExpiration, get_dht_time

__all__ = [
    "DHTExpiration",
    "PerformanceEMA",
    "ValueWithExpiration",
    "get_dht_time",
    "get_logger",
    "log_visible_maddrs",
    "use_hivemind_log_handler",
]
