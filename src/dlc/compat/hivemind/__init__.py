"""Hivemind's names over dlc's own peer: `import dlc.compat.hivemind as hivemind`.

For programs that were written for Hivemind 1.1. The classes are thin faces on one `dlc.Peer` per `DHT`: no process is
forked, and no memory shared. Modules stand where Hivemind has them (`hivemind.averaging`, `.optim`, `.compression`,
`.dht`, `.utils`); what is not offered raises NotOffered with its name. docs/migration.md tells what differs, and why.
"""

from __future__ import annotations

from dlc.compat.hivemind import averaging, compression, dht, moe, optim, p2p, utils
from dlc.compat.hivemind.averaging import DecentralizedAverager
from dlc.compat.hivemind.compression import (
    BlockwiseQuantization,
    CompressionBase,
    CompressionInfo,
    Float16Compression,
    NoCompression,
    PerTensorCompression,
    Quantile8BitQuantization,
    RoleAdaptiveCompression,
    ScaledFloat16Compression,
    SizeAdaptiveCompression,
    TensorRole,
    Uniform8BitQuantization,
)
from dlc.compat.hivemind.dht import DHT, set_run_key
from dlc.compat.hivemind.moe import NAMES
from dlc.compat.hivemind.optim import (
    GradientAverager,
    GradScaler,
    Optimizer,
    ProgressTracker,
    TrainingAverager,
    TrainingStateAverager,
)
from dlc.compat.hivemind.p2p import Multiaddr, PeerID
from dlc.compat.hivemind.refused import INSIDE, MOE, NotOffered, attribute_hook, explain_absent_modules
from dlc.compat.hivemind.utils import (
    DHTExpiration,
    MSGPackSerializer,
    PerformanceEMA,
    SerializerBase,
    ValueWithExpiration,
    get_dht_time,
    get_logger,
    log_visible_maddrs,
    use_hivemind_log_handler,
)

__version__ = "1.1.12"
"""Of Hivemind: that whose names these are, for programs that look; that of dlc is `dlc.__version__`."""
OF_NETWORK = (
    "BatchTensorDescriptor",
    "DHTNode",
    "MPFuture",
    "P2P",
    "P2PContext",
    "P2PHandlerError",
    "PeerInfo",
    "TensorDescriptor",
    "TimedStorage",
    "deserialize_torch_tensor",
    "serialize_torch_tensor",
)
"""Of Hivemind's own network, not offered."""

explain_absent_modules()
__getattr__ = attribute_hook(__name__, {**dict.fromkeys(NAMES, MOE), **dict.fromkeys(OF_NETWORK, INSIDE)})

__all__ = [
    "BlockwiseQuantization",
    "CompressionBase",
    "CompressionInfo",
    "DHT",
    "DHTExpiration",
    "DecentralizedAverager",
    "Float16Compression",
    "GradScaler",
    "GradientAverager",
    "MSGPackSerializer",
    "Multiaddr",
    "NoCompression",
    "NotOffered",
    "Optimizer",
    "PeerID",
    "PerTensorCompression",
    "PerformanceEMA",
    "ProgressTracker",
    "Quantile8BitQuantization",
    "RoleAdaptiveCompression",
    "ScaledFloat16Compression",
    "SerializerBase",
    "SizeAdaptiveCompression",
    "TensorRole",
    "TrainingAverager",
    "TrainingStateAverager",
    "Uniform8BitQuantization",
    "ValueWithExpiration",
    "averaging",
    "compression",
    "dht",
    "get_dht_time",
    "get_logger",
    "log_visible_maddrs",
    "moe",
    "optim",
    "p2p",
    "set_run_key",
    "use_hivemind_log_handler",
    "utils",
]
