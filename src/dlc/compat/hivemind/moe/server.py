"""`hivemind.moe.server`: not offered; each of its names says so."""

from __future__ import annotations

from dlc.compat.hivemind.moe import SERVER
from dlc.compat.hivemind.refused import MOE, attribute_hook

__getattr__ = attribute_hook(__name__, dict.fromkeys(SERVER, MOE))
