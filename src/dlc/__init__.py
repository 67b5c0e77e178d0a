"""Decentralised low-communication training.

    dlc.Peer          join a run, average tensors with the other peers
    dlc.DiLoCo        an inner optimizer that meets the other peers every `sync_every` steps
    dlc.OuterSpec     the outer optimizer of a `DiLoCo`
    dlc.Resume        where a whole swarm is started again: what `Peer.join` needs of a saved `DiLoCo`
    dlc.Gossip        averages with a few neighbours at a time, without rounds
    dlc.Group         an all-reduce among some of the peers, or those who show up
    dlc.Moshpit       averages in small groups on a grid: everybody has the exact mean after a few rounds
    dlc.RunSpec       what all peers of a run agree on
    dlc.RoundReport   what a round tells its caller
    dlc.ParameterServer, dlc.ServerClient   helpers that own the parameters, and the trainers' side of it

Each name is loaded on first use, so that `import dlc` is instant and does not need torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dlc.gossip import Gossip
    from dlc.handles import Resume
    from dlc.mesh import Group
    from dlc.moshpit import Moshpit
    from dlc.peer import Peer
    from dlc.report import GossipReport, GroupReport, MoshpitReport, RoundReport
    from dlc.runspec import OuterSpec, RunSpec
    from dlc.server import ParameterServer, ServerClient
    from dlc.strategyspec import ServerSpec
    from dlc.train.diloco import DiLoCo

__version__ = "0.1.0"
__all__ = [
    "DiLoCo",
    "Gossip",
    "GossipReport",
    "Group",
    "GroupReport",
    "Moshpit",
    "MoshpitReport",
    "OuterSpec",
    "ParameterServer",
    "Peer",
    "Resume",
    "RoundReport",
    "RunSpec",
    "ServerClient",
    "ServerSpec",
    "__version__",
]

_HOMES = {
    "DiLoCo": "dlc.train.diloco",
    "Gossip": "dlc.gossip",
    "GossipReport": "dlc.report",
    "Group": "dlc.mesh",
    "GroupReport": "dlc.report",
    "Moshpit": "dlc.moshpit",
    "MoshpitReport": "dlc.report",
    "OuterSpec": "dlc.runspec",
    "ParameterServer": "dlc.server",
    "Peer": "dlc.peer",
    "Resume": "dlc.handles",
    "RoundReport": "dlc.report",
    "RunSpec": "dlc.runspec",
    "ServerClient": "dlc.server",
    "ServerSpec": "dlc.strategyspec",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'dlc' has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
