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

STRATEGIES = ("diloco", "data-parallel", "gossip", "moshpit", "parameter-server")
WITHOUT_LOG = ("gossip", "moshpit", "parameter-server")
"""Strategies whose peers take part without the replicated log."""
OWN_MODELS = ("gossip", "moshpit")
"""Strategies whose peers have models of their own, and give them to newcomers."""
WITHOUT_RATES = ("parameter-server",)
"""Strategies that have no use for what links carry: it is not measured before they begin."""
GRAPHS = ("ring", "exponential", "random-pairs")
GOSSIP_UPDATES = ("average", "noloco")
SERVER_SPANS_MAX = 4096
DIMS_MAX = 8
"""Of a grid: 2^8 peers in groups of two, and 2^32 in groups of sixteen."""
GROUP_SIZE_MAX = 64
TABLES = {"gossip": "gossip", "moshpit": "moshpit", "parameter-server": "server"}
"""The table of a strategy, by its name in the RunSpec."""


@dataclasses.dataclass(frozen=True)
class GossipSpec:
    """Averaging of parameters with neighbours, without rounds of all. Only for strategy "gossip"."""

    graph: str = "exponential"
    """Who averages with whom. "ring": the neighbours in the order of ids. "exponential": the peer 1, 2, 4, ... places
    ahead, another in each round. "random-pairs": pairs that are drawn anew in each round."""
    update: str = "average"
    """"average": parameters become the mean. "noloco": slow weights and a momentum of what the pair has learned, drawn
    to the pair's mean (NoLoCo, arXiv:2506.10911); needs graph "random-pairs"."""
    outer_lr: float = 0.7
    """How much of what the pair has learned moves the slow weights (NoLoCo's beta). Only for update "noloco"."""
    outer_momentum: float = 0.5
    """Of the slow weights (NoLoCo's alpha), in [0, 1). Only for update "noloco"."""
    pull: float = 0.6
    """How strongly the slow weights are drawn to the mean of the pair (NoLoCo's gamma), above 0 and below
    2 (1 - outer_momentum^2): with more, momentum drives peers apart. Only for update "noloco"."""

    wait_s: float = 2.0
    """How long a round waits at most for the neighbours that it is with. 0: it takes what came meanwhile, and inner
    steps never stand still; not for update "noloco". That one waits up to twice as long where it follows others to a
    later round, and in two of 16 rounds until a partner that is not much slower can be there, to come to be in step."""

    def __post_init__(self) -> None:
        options.check_types(self, "gossip.")
        one_of("gossip.graph", self.graph, GRAPHS)
        one_of("gossip.update", self.update, GOSSIP_UPDATES)
        check(
            self.update != "noloco" or self.graph == "random-pairs",
            f'gossip.update "noloco" averages in pairs: set gossip.graph = "random-pairs", not {self.graph!r}',
        )
        least = "above 0" if self.update == "noloco" else "at least 0"
        check(
            self.wait_s > 0 or (self.wait_s == 0 and self.update != "noloco"),
            f"gossip.wait_s must be {least}, got {self.wait_s}",
        )
        check(self.outer_lr > 0, f"gossip.outer_lr must be above 0, got {self.outer_lr}")
        check(0 <= self.outer_momentum < 1, f"gossip.outer_momentum must lie in [0, 1), got {self.outer_momentum}")
        most = 2 * (1 - self.outer_momentum**2)
        check(
            0 < self.pull < most,
            f"gossip.pull must lie above 0 and below 2 (1 - gossip.outer_momentum^2) = {most:g}, got {self.pull}",
        )
        which = f'gossip.update is "{self.update}", which has no slow weights'
        options.check_used(self, "gossip.", ("outer_lr", "outer_momentum", "pull"), self.update == "noloco", which)


@dataclasses.dataclass(frozen=True)
class MoshpitSpec:
    """Averaging of parameters in rotating groups (Moshpit SGD, arXiv:2103.03239). Only for strategy "moshpit"."""

    group_size: int = 0
    """Peers in a group (M), at least 2. 0: about 8, or as `dims` and the number of peers have it."""
    dims: int = 0
    """Dimensions of the grid (d): in as many rounds what a peer learned reaches all, and M^d peers have a place
    each. 0: as the group size and the number of peers have it."""
    wait_s: float = 5.0
    """How long a peer waits for the members of its group that have not come, above 0; up to twice as long where it
    follows others to a later round. In two of 16 cycles it waits until those that are not much slower can be there,
    to come to be in step with them."""

    def __post_init__(self) -> None:
        options.check_types(self, "moshpit.")
        check(
            self.group_size == 0 or 2 <= self.group_size <= GROUP_SIZE_MAX,
            f"moshpit.group_size must be 0 or lie in 2 ... {GROUP_SIZE_MAX}, got {self.group_size}",
        )
        check(
            not (self.group_size and self.dims),
            "moshpit.group_size and moshpit.dims are both given: remove one, it follows from the number of peers",
        )
        check(self.wait_s > 0, f"moshpit.wait_s must be above 0, got {self.wait_s}")
        check(self.dims <= DIMS_MAX, f"moshpit.dims must lie in 0 ... {DIMS_MAX}, got {self.dims}")


@dataclasses.dataclass(frozen=True)
class ServerSpec:
    """Helpers that own spans of the parameters and the state of the [outer] optimizer. Only for strategy
    "parameter-server"."""

    async_: bool = False
    """false: in rounds, which are made of one push of every trainer, weighted by tokens. true: each push is applied by
    itself, as far as its trainer's part of a round would, and no trainer waits for another; with outer.optimizer
    "nesterov" the momentum follows the mean of as many pushes as there are trainers (delayed Nesterov,
    arXiv:2401.09135), with "adam" the moments follow each push."""
    max_staleness: int = 64
    """A push is refused if more others than this were applied since its trainer pulled. Only with `async`."""
    patience_s: float = 10.0
    """Least time, in seconds, that a round waits for late trainers after the first push; half of what the last round
    took if that is longer. Only without `async`."""
    spans: int = 0
    """Into how many parts the parameters are cut, each with an owner and a standby; at least twice the helpers there
    will be. 0: 16."""
    weight_decay: float = 0.0
    """Decoupled, per round, as a factor of the learning rate: with outer.optimizer "adam" this is AdamW."""

    def __post_init__(self) -> None:
        options.check_types(self, "server.")
        check(self.patience_s > 0, f"server.patience_s must be above 0, got {self.patience_s}")
        check(self.spans <= SERVER_SPANS_MAX, f"server.spans must be at most {SERVER_SPANS_MAX}, got {self.spans}")
        check(self.weight_decay >= 0, f"server.weight_decay must not be negative, got {self.weight_decay}")
        plain = ServerSpec.__dataclass_fields__
        for name, wanted in (("max_staleness", True), ("patience_s", False)):
            given = getattr(self, name) != plain[name].default
            check(
                not given or self.async_ == wanted,
                f"server.{name} is for server.async = {str(wanted).lower()} only: remove it",
            )


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
    which = f'strategy is "{name}", which '
    leased = name not in WITHOUT_LOG
    options.check_used(spec.data, "data.", ("lease_blocks",), leased, which + "leases no data")
    chunked = name not in OWN_MODELS
    options.check_used(spec, "", ("chunk_elems",), chunked, which + "cuts vectors by their length")
    if name == "diloco":
        return
    if name == "parameter-server":
        _check_server(spec)
        return
    check(
        spec.outer == plain_outer,
        f'[outer] is given, but "{name}" takes no outer step: remove it, or set strategy = "diloco"',
    )
    if name == "data-parallel":
        _check_data_parallel(spec)
    elif name in OWN_MODELS:
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


def _check_server(spec: RunSpec) -> None:
    check(
        spec.overlap == "none",
        f'overlap = "{spec.overlap}" cannot go with "parameter-server": set none; server.async = true lets no '
        "peer wait for another",
    )
    check(
        spec.codec in ("fp32", "fp16", "bf16"),
        f'codec "{spec.codec}" cannot go with "parameter-server": nobody keeps what it loses; set fp32, fp16 or bf16',
    )
    check(
        spec.outer.clip == "none",
        f'outer.clip = "{spec.outer.clip}" cannot go with "parameter-server": each span sees its own part of a push '
        "only",
    )
    check(spec.tokens == 0, 'tokens cannot end a run of "parameter-server": nobody counts those of all; set rounds')
    check(
        not spec.data.streaming,
        'data.streaming cannot go with "parameter-server": there are no leases that say who reads what',
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
    mean_is_encoded = name == "moshpit" or spec.gossip.update == "noloco"
    check(
        spec.codec != "bf16" or not mean_is_encoded,
        f'codec "bf16" cannot go with {"moshpit" if name == "moshpit" else "noloco"}: it would round every mean of '
        "parameters to 8 bits, and nobody keeps what that loses; fp16 keeps 11 in as many bytes, fp32 all",
    )
    check(
        spec.tokens == 0,
        f'tokens cannot end a run of "{name}": nobody counts the tokens of all; set rounds, each peer counts its own',
    )
    check(
        not spec.data.streaming,
        f'data.streaming cannot go with "{name}": there are no leases that say who reads what; set streaming = false',
    )
