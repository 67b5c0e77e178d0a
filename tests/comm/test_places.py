"""Who takes part, on a virtual clock: peers show it on the board, and hours may pass between two exchanges."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from dlc.comm.board import REPEAT_MAX_S
from dlc.gossip import Gossip
from dlc.handover import Handover
from dlc.moshpit import Moshpit
from dlc.peer import Peer
from dlc.sim.meshnet import DETECT_S, MeshNet
from tests.comm.netpeer import NetPeer

PHASE_S = 67.5 * 60
"""Inner steps between two exchanges of OpenDiLoCo's largest run."""


@pytest.mark.parametrize("end", ["close", "kill", "leave"])
def test_a_peer_keeps_its_place_through_phases_of_any_length_and_loses_it_with_its_end(end: str) -> None:
    net = MeshNet(1)
    hosts = net.add(2)
    one, two = (cast(Peer, NetPeer(net, host)) for host in hosts)
    places = [(Gossip(peer, "x"), Moshpit(peer, "x", group_size=2), Handover(peer, "x", 4)) for peer in (one, two)]
    for _, _, handover in places:
        handover.stand(1, torch.zeros(4))
    gossip, moshpit, handover = places[0]

    def seen() -> tuple[bool, bool, bool]:
        """Whether the other one is there to gossip with, to average with, and to take a model from."""
        return two.voter in gossip._members(), two.id in moshpit._leg().peers, bool(handover.standings())

    net.run(1.0)
    assert seen() == (True, True, True)
    net.run(PHASE_S)
    assert seen() == (True, True, True)
    for place in places[1] if end == "close" else ():
        place.close()
    if end != "close":
        getattr(net, end)(hosts[1])
    net.run(DETECT_S + REPEAT_MAX_S)
    moshpit._course.passed()
    assert seen() == (False, False, False)
