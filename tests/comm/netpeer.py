"""A host of the virtual network where a `dlc.Peer` is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dlc.comm.mesh import Mesh
from dlc.sim.meshnet import Host, MeshNet


class NetPeer:
    """In place of a `dlc.Peer`, and its mesh in place of a `Served`."""

    def __init__(self, net: MeshNet, host: Host) -> None:
        self.net, self.host = net, host
        self.id, self.voter = host.name, host.voter

    @property
    def mesh(self) -> NetPeer:
        return self

    def ask(self, fn: Callable[[Mesh, float], Any]) -> Any:
        return fn(self.host.mesh, self.net.now)

    def act(self, fn: Callable[[Mesh, float], Any]) -> None:
        self.net.act(self.host, fn)

    def check_may_wait(self) -> None: ...

    def describe(self, **changes: object) -> None: ...

    def listen(self, listener: Callable[[Any], None]) -> None: ...

    def unlisten(self, listener: Callable[[Any], None]) -> None: ...
