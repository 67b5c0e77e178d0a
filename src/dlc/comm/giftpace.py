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

TELL_S = 10.0
"""Where there is always a gift on its way, what was seen is learned from so often."""


class GiftPace:
    """Of one gossip. A group or a round that is on its way has its own plan: beside it nothing is paced here."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._takers: tuple[Voter, ...] = ()
        self._paced: set[PeerId] = set()
        self._since: float | None = None
        """When measuring began; None: it has not."""
        self._changed = False
        """What is paced is not what it should be, because of a plan."""

    def follow(self, takers: Collection[Voter]) -> None:
        """These have something of mine to come."""
        if tuple(takers) != self._takers:
            self._takers, self._changed = tuple(takers), True
            self.look()

    def look(self) -> None:
        """A plan may have ended."""
        if self._ground.rates.planned:  # what it lifts at its end may be taken up again
            self._changed, self._since = True, None
        elif self._changed:
            self._changed = False
            self._pace()

    def close(self) -> None:
        """Nothing of mine is to come any more. Nobody looks again: all is lifted now, beside a plan, too."""
        self._takers, self._changed = (), False
        self._pace()

    def _pace(self) -> None:
        now, rates = self._ground.now, self._ground.rates
        if self._since is not None and (not self._takers or now - self._since >= TELL_S):
            self._since = None
            rates.end(gifts=True)
            self._ground.tell_rates()
        found = {taker.peer: self._rate_Bps(taker) for taker in self._takers}
        paced = {peer: rate_Bps for peer, rate_Bps in found.items() if rate_Bps is not None}
        self._lift(self._paced - paced.keys())
        self._ground.out.extend(Pace(peer, rate_Bps) for peer, rate_Bps in paced.items())
        self._paced = set(paced)
        if self._takers:
            self._since = now if self._since is None else self._since
            rates.begin(now, Load(sum(paced.values()), 0.0), gifts=True)

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
