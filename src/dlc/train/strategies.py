"""The strategies by their names in a RunSpec. Each module is imported only by those whose run names it."""

from __future__ import annotations

from dlc.errors import ConfigError
from dlc.train.strategy import Parts, Strategy


def strategy_of(parts: Parts) -> Strategy:
    """The strategy of the run. ConfigError, UsageError: it cannot do what the run asks with the parts at hand."""
    match parts.spec.strategy:
        case "diloco":
            from dlc.train.rounds import Rounds

            return Rounds(parts)
        case "data-parallel":
            from dlc.train.dataparallel import DataParallel

            return DataParallel(parts)
        case "parameter-server":
            from dlc.train.served import Served

            return Served(parts)
        case "gossip" | "moshpit":
            from dlc.train.averaging import Averaging

            return Averaging(parts)
        case name:
            raise ConfigError(f'strategy "{name}" is not in this version of dlc: set strategy = "diloco"')
