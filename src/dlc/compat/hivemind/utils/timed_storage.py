"""Values that expire: what `DHT.get` returns."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")
DHTExpiration = float
"""Seconds since 1970, as `get_dht_time` counts."""


def get_dht_time() -> float:
    """Seconds since 1970 by this host's clock. dlc itself compares no clocks of two hosts."""
    return time.time()


@dataclass(frozen=True)
class ValueWithExpiration(Generic[T]):
    """A value, and until when it holds; unpacks, and compares equal, as (value, expiration_time) does, and can be asked
    by these names, too."""

    value: T
    expiration_time: DHTExpiration

    def __iter__(self) -> Iterator[Any]:
        return iter((self.value, self.expiration_time))

    def __getitem__(self, item: int | str) -> Any:
        return getattr(self, item) if isinstance(item, str) else (self.value, self.expiration_time)[item]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ValueWithExpiration):
            other = (other.value, other.expiration_time)
        return (self.value, self.expiration_time) == other

    def __hash__(self) -> int:
        return hash((self.value, self.expiration_time))


__all__ = ["DHTExpiration", "ValueWithExpiration", "get_dht_time"]
