"""What the strategies of a run can be told, and which other options of a RunSpec each of them can honour.

One table per strategy that has options of its own. A table that is given for another strategy than the run's is an
error, and so is an option that the run's strategy has no use for: nothing is passed over in silence.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from dlc import options
from dlc.options import check, one_of

if TYPE_CHECKING:
    from dlc.runspec import RunSpec

STRATEGIES = ("diloco", "data-parallel", "gossip", "moshpit")
GRAPHS = ("ring", "exponential", "random-pairs")
GOSSIP_UPDATES = ("average", "noloco")
DIMS_MAX = 8
"""Of a grid: 2^8 peers in groups of two, and 2^32 in groups of sixteen."""
GROUP_SIZE_MAX = 64
TABLES = {"gossip": "gossip", "moshpit": "moshpit"}
"""The table of a strategy, by its name in the RunSpec."""


@dataclasses.dataclass(frozen=True)
class GossipSpec:
    """Averaging of parameters with neighbours, without rounds. Only for strategy "gossip"."""

    graph: str = "exponential"
    """Who averages with whom. "ring": the neighbours in the order of ids. "exponential": the peer 1, 2, 4, ... places
    ahead, another at each exchange. "random-pairs": pairs that are drawn anew at each exchange."""
    update: str = "average"
    """"average": parameters become the mean. "noloco": slow weights and a momentum of what the pair has learned, drawn
    to the pair's mean (NoLoCo, arXiv:2506.10911); needs graph "random-pairs"."""
    outer_lr: float = 0.7
    """How much of what the pair has learned moves the slow weights (NoLoCo's beta). Only for update "noloco"."""
    outer_momentum: float = 0.5
    """Of the slow weights (NoLoCo's alpha), in [0, 1). Only for update "noloco"."""
    pull: float = 0.9
    """How strongly the slow weights are drawn to the mean of the pair (NoLoCo's gamma), above `outer_momentum` and
    below 2. Only for update "noloco"."""

    def __post_init__(self) -> None:
        options.check_types(self, "gossip.")
        one_of("gossip.graph", self.graph, GRAPHS)
        one_of("gossip.update", self.update, GOSSIP_UPDATES)
        check(
            self.update != "noloco" or self.graph == "random-pairs",
            f'gossip.update "noloco" averages in pairs: set gossip.graph = "random-pairs", not {self.graph!r}',
        )
        check(self.outer_lr > 0, f"gossip.outer_lr must be above 0, got {self.outer_lr}")
        check(0 <= self.outer_momentum < 1, f"gossip.outer_momentum must lie in [0, 1), got {self.outer_momentum}")
        check(
            self.outer_momentum < self.pull < 2,
            f"gossip.pull must lie above gossip.outer_momentum ({self.outer_momentum}) and below 2, got {self.pull}",
        )


@dataclasses.dataclass(frozen=True)
class MoshpitSpec:
    """Averaging of parameters in rotating groups (Moshpit SGD, arXiv:2103.03239). Only for strategy "moshpit"."""

    group_size: int = 0
    """Peers in a group (M), at least 2. 0: chosen from the number of peers."""
    dims: int = 0
    """Dimensions of the grid (d): after so many exchanges without a fault all hold the mean of all, and M^d peers have
    a place each. 0: chosen from the number of peers."""

    def __post_init__(self) -> None:
        options.check_types(self, "moshpit.")
        check(
            self.group_size == 0 or 2 <= self.group_size <= GROUP_SIZE_MAX,
            f"moshpit.group_size must be 0 or lie in 2 ... {GROUP_SIZE_MAX}, got {self.group_size}",
        )
        check(self.dims <= DIMS_MAX, f"moshpit.dims must lie in 0 ... {DIMS_MAX}, got {self.dims}")


def check_strategy(spec: RunSpec, plain_outer: Any) -> None:
    """ConfigError, with the reason, where the strategy cannot honour an option. `plain_outer`: the default table."""
    name = spec.strategy
    one_of("strategy", name, STRATEGIES)
    for strategy, table in TABLES.items():
        given = getattr(spec, table) != type(getattr(spec, table))()
        check(
            not given or name == strategy,
            f'[{table}] is given, but strategy is "{name}": remove it, or set strategy = "{strategy}"',
        )
    if name == "diloco":
        return
    check(
        spec.outer == plain_outer,
        f'[outer] is given, but "{name}" takes no outer step: remove it, or set strategy = "diloco"',
    )
    if name == "data-parallel":
        _check_data_parallel(spec)
    elif name in ("gossip", "moshpit"):
        _check_averaging(spec)


def _check_data_parallel(spec: RunSpec) -> None:
    check(
        spec.overlap == "none",
        f'overlap = "{spec.overlap}" cannot go with "data-parallel": the next step needs the mean gradient of this one',
    )
    check(
        spec.inner.optimizer in ("adamw", "sgd"),
        f'inner.optimizer "{spec.inner.optimizer}" cannot go with "data-parallel": all peers take the step in the same '
        "bits, on any processor, and a matrix product has none in common; choose adamw or sgd",
    )
    check(
        spec.codec in ("fp32", "fp16", "bf16"),
        f'codec "{spec.codec}" cannot go with "data-parallel": set fp32, fp16 or bf16',
    )
    check(
        spec.precision != "fp16",
        'precision = "fp16" cannot go with "data-parallel": its loss scale is each peer\'s own; set auto, bf16 or fp32',
    )


def _check_averaging(spec: RunSpec) -> None:
    name = spec.strategy
    check(
        spec.overlap == "none",
        f'overlap = "{spec.overlap}" cannot go with "{name}": what is averaged are the parameters themselves',
    )
    check(
        spec.codec in ("fp32", "fp16", "bf16"),
        f'codec "{spec.codec}" cannot go with "{name}", which sends parameters, not changes: set fp32, fp16 or bf16',
    )
    check(
        spec.tokens == 0,
        f'tokens cannot end a run of "{name}": nobody counts the tokens of all; set rounds, each peer counts its own',
    )
    check(
        not spec.data.streaming,
        f'data.streaming cannot go with "{name}": there are no leases that say who reads what; set streaming = false',
    )
