"""How fast gifts go: all that are on their way share my link, and none overfills the way down of its taker.

TCP alone finds out what a link carries by overfilling it, and the answers of the other direction wait in that queue, as
in a round (pacing.py). What comes in is as much as goes out in most graphs, so nobody else is reckoned with. What was
sent tells what the link carries, as in a round.
"""

from __future__ import annotations

from collections.abc import Collection

from dlc.comm.effects import Pace
from dlc.comm.ground import Ground
from dlc.comm.ids import PeerId, Voter
from dlc.comm.pacing import PLAN_SHARE, RATE_MIN_BPS, UNPACED_BPS
from dlc.comm.partition import Load


class GiftPace:
    """Of one gossip. A group or a round that is on its way has its own plan: beside it nothing is paced here."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._takers: tuple[Voter, ...] = ()
        self._paced: set[PeerId] = set()
        self._measures = False

    def follow(self, takers: Collection[Voter]) -> None:
        """These have something of mine to come."""
        if tuple(takers) == self._takers:
            return
        self._takers = tuple(takers)
        if not takers:
            self._end()
        elif self._measures or not self._ground.rates.measuring:
            self._begin()

    def _begin(self) -> None:
        found = {taker.peer: self._rate_Bps(taker) for taker in self._takers}
        paced = {peer: rate_Bps for peer, rate_Bps in found.items() if rate_Bps is not None}
        self._lift(self._paced - paced.keys())
        self._ground.out.extend(Pace(peer, rate_Bps) for peer, rate_Bps in paced.items())
        self._paced, self._measures = set(paced), True
        self._ground.rates.begin(self._ground.now, Load(sum(paced.values()), 0.0))

    def _end(self) -> None:
        self._lift(self._paced)
        self._paced = set()
        if self._measures:
            self._measures = False
            self._ground.rates.end()
            self._ground.tell_rates()

    def _lift(self, peers: Collection[PeerId]) -> None:
        self._ground.out.extend(Pace(peer, None) for peer in sorted(peers))

    def _rate_Bps(self, taker: Voter) -> float | None:
        """None: without limit, as the links are not known, or too fast for timers."""
        record = self._ground.members.record(taker.peer)
        up_Bps, down_Bps = self._ground.rates.told_up_Bps, record.down_Bps if record is not None else 0.0
        if not up_Bps or min(up_Bps, down_Bps or up_Bps) >= UNPACED_BPS:
            return None
        share_Bps = up_Bps / len(self._takers)
        return max(RATE_MIN_BPS, PLAN_SHARE * min(share_Bps, down_Bps or share_Bps))
