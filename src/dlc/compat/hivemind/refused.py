"""What of Hivemind is not offered, told by its name where it is asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

from dlc.errors import UsageError

MOE = "the mixture-of-experts layer is no part of dlc; it averages, and does not serve experts"
INSIDE = "it is a part of Hivemind's own network; DHT and the averagers are what dlc offers of that"
"""Of daemons, nodes and wire formats."""

OF_HIVEMIND = frozenset(
    "averaging.group_info averaging.key_manager averaging.load_balancing averaging.matchmaking "
    "compression.serialization dht.node dht.protocol dht.routing dht.traverse hivemind_cli moe.expert_uid proto "
    "utils.asyncio utils.auth utils.limits utils.math utils.mpfuture utils.nested utils.streaming "
    "utils.tensor_descr".split()
)
"""Modules of Hivemind that are not here. What it has not either is simply not found."""


class NotOffered(UsageError, NotImplementedError):
    """A name, an argument or a method of Hivemind that dlc does not have."""


class NameNotOffered(NotOffered, ImportError):
    """Of a name that is imported: programs that do without it catch ImportError."""


class ModuleNotOffered(NotOffered, ModuleNotFoundError):
    """Of a module."""


def refuse(name: str, why: str, kind: type[NotOffered] = NotOffered) -> NotOffered:
    return kind(f"dlc.compat.hivemind does not offer {name}: {why}")


def attribute_hook(module: str, reasons: Mapping[str, str]) -> Callable[[str], object]:
    """A module's `__getattr__`: NameNotOffered for the names in `reasons`, AttributeError for all others."""

    def look_up(name: str) -> object:
        if name in reasons:
            raise refuse(f"{module.removeprefix('dlc.compat.')}.{name}", reasons[name], NameNotOffered)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return look_up


class _Absent(MetaPathFinder):
    """Asked last: says of a module of Hivemind that nobody has found what is offered in its place."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        own = fullname.removeprefix("dlc.compat.")
        ours = own != fullname or sys.modules.get("hivemind") is sys.modules.get("dlc.compat.hivemind")
        below = own.removeprefix("hivemind.").split(".")
        if ours and own.startswith("hivemind.") and {".".join(below[:n]) for n in (1, 2)} & OF_HIVEMIND:
            why = MOE if own.startswith("hivemind.moe") else INSIDE
            error = ModuleNotOffered(f"dlc.compat.hivemind has no module {own}: {why}")
            error.name = fullname
            raise error


def explain_absent_modules() -> None:
    """From now on the import of a module that this package does not have says so; called once."""
    sys.meta_path.append(_Absent())
