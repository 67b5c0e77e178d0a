"""What of Hivemind is not offered, told by its name where it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dlc.errors import UsageError

MOE = "the mixture-of-experts layer is no part of dlc; it averages, and does not serve experts"
INSIDE = "it is a part of Hivemind's own network; DHT and the averagers are what dlc offers of that"
"""Of daemons, nodes and wire formats."""


class NotOffered(UsageError, NotImplementedError):
    """A name, an argument or a method of Hivemind that dlc does not have."""


def refuse(name: str, why: str) -> NotOffered:
    return NotOffered(f"dlc.compat.hivemind does not offer {name}: {why}")


def attribute_hook(module: str, reasons: Mapping[str, str]) -> Callable[[str], object]:
    """A module's `__getattr__`: NotOffered for the names in `reasons`, AttributeError for all others."""

    def look_up(name: str) -> object:
        if name in reasons:
            raise refuse(f"{module.removeprefix('dlc.compat.')}.{name}", reasons[name])
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return look_up
