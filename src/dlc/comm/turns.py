"""What goes first on the connection to an owner: my contribution to its span, or the results of mine.

Every result of a span waits for the contributions of all, and every contributor for the results of all. So on each
connection both shall be done at the same time: whichever has the greater part still before it goes first. With results
always first, a peer whose own span closes early fills its connections with those; its contribution to some owner comes
last of all, that owner's span closes late, and in the end everybody waits for it while most links idle.

A contribution may be LEAD of its way ahead of the results, so that a connection that is late for a moment holds up
nobody.
"""

from __future__ import annotations

from collections.abc import Mapping

from dlc.comm.ids import PeerId

LEAD = 0.1
"""Part of a contribution that goes before the first result, where one is ready."""


class Turns:
    """Of one plan."""

    def __init__(self) -> None:
        self._owed: Mapping[PeerId, int] = {}
        self._owned = 0

    def begin(self, owed: Mapping[PeerId, int], owned: int) -> None:
        """owed: chunks of my contribution that each owner is to get; owned: chunks that I reduce for all."""
        self._owed, self._owned = owed, owned

    def contribution_first(self, peer: PeerId, parts_left: int, results_left: int) -> bool:
        """A chunk of my contribution goes to `peer` before a result that is ready.

        parts_left: chunks of my contribution that it has not been sent. results_left: chunks that I reduce, open ones
        included, whose result it has not been sent.
        """
        owed = self._owed.get(peer, 0)
        if not owed or not self._owned:
            return False
        return parts_left / owed > results_left / self._owned - LEAD
