"""`PeerSwarm`, where it takes more peers than a machine has room for: over memberships on a virtual clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from dlc.comm.detector import HEARTBEATS_MAX
from dlc.comm.membership import Membership
from dlc.compat.hivemind.peer_swarm import PeerSwarm
from tests.comm.swim_net import Net


def swarm_of(members: Membership) -> PeerSwarm:
    mesh = SimpleNamespace(ground=SimpleNamespace(members=members))

    def ask(read: Any) -> Any:
        return read(mesh, 0.0)

    return PeerSwarm(Mock(id=members.me.peer, mesh=Mock(ask=ask)))


def test_nobody_who_lives_is_missed_in_a_swarm_too_large_to_ping_all_of_it_and_the_dead_are() -> None:
    net, names = Net(), [f"p{i:02d}" for i in range(HEARTBEATS_MAX + 4)]
    for name in names:
        net.start(name, names[0])
    first = swarm_of(net.hosts[names[0]].machine)
    net.run_until(lambda: len(first.present()) == len(names), 120.0)
    for _ in range(10):
        net.run(1.0)
        assert first.present() == set(names)
    net.crash(names[-1])
    net.run_until(lambda: len(first.present()) < len(names), 120.0)
    assert first.present() == set(names[:-1])
