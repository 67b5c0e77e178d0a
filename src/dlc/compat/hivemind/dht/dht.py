"""`DHT`, at the place that Hivemind gives it."""

from __future__ import annotations

from dlc.compat.hivemind.dht import DHT

__all__ = ["DHT"]
