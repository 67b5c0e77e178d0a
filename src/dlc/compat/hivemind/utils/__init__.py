"""Helpers with Hivemind's names."""

from __future__ import annotations

from dlc.compat.hivemind.refused import INSIDE, attribute_hook
from dlc.compat.hivemind.utils.logging import get_logger, use_hivemind_log_handler
from dlc.compat.hivemind.utils.networking import log_visible_maddrs
from dlc.compat.hivemind.utils.performance_ema import PerformanceEMA
from dlc.compat.hivemind.utils.serializer import MSGPackSerializer, SerializerBase
from dlc.compat.hivemind.utils.timed_storage import DHTExpiration, ValueWithExpiration, get_dht_time

OF_NETWORK = (
    "BatchTensorDescriptor",
    "MPFuture",
    "TensorDescriptor",
    "TimedStorage",
    "choose_ip_address",
    "increase_file_limit",
    "nested_compare",
    "nested_flatten",
    "nested_map",
    "nested_pack",
)

__getattr__ = attribute_hook(__name__, dict.fromkeys(OF_NETWORK, INSIDE))

__all__ = [
    "DHTExpiration",
    "MSGPackSerializer",
    "PerformanceEMA",
    "SerializerBase",
    "ValueWithExpiration",
    "get_dht_time",
    "get_logger",
    "log_visible_maddrs",
    "use_hivemind_log_handler",
]
