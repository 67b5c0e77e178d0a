"""Says, shortly before a contribution is there, that it will be: the peers agree on its round meanwhile.

    the last inner step begins ──in_s──> a round may name the contribution ──> the step ends ──> encoded, sent

It is said by another thread, as the trainer's own is in the middle of a step. What is offered has the memory of its
payloads and no values yet; the exchange reads none of it before they are final (`dlc.comm.filling`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from dlc.comm.encoded import Encoded
from dlc.comm.filling import Filling
from dlc.errors import DlcError
from dlc.train.offers import Work
from dlc.train.swarm import Pending


class Announcement:
    """Of `sent`, to be final when `filling` says so. `contribute` offers it, `in_s` seconds from now, unless `over` was
    called before. `weight`, `work`: of the offer, which it may be taken for if they come to be so."""

    def __init__(
        self,
        sent: Encoded,
        filling: Filling,
        weight: float,
        work: Work,
        contribute: Callable[[], Pending],
        in_s: float,
    ) -> None:
        self.sent, self.filling, self.weight, self.work = sent, filling, weight, work
        self._contribute = contribute
        self._pending: Pending | None = None
        self._timer = threading.Timer(in_s, self._say)
        self._timer.name, self._timer.daemon = "dlc-announce", True
        self._timer.start()

    def _say(self) -> None:
        try:
            self._pending = self._contribute()
        except DlcError:
            pass  # whoever makes the offer itself is told the same

    def over(self) -> Pending | None:
        """It is not said any more. What became of it, if it was; None: it was not, or nothing was offered by it."""
        self._timer.cancel()
        self._timer.join()
        pending = self._pending
        return None if pending is None or pending.overtaken else pending
