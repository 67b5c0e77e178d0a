"""Says, shortly before a contribution is there, that it will be: the peers agree on its round meanwhile.

    the last inner step begins ──in_s──> a round may name the contribution ──> the step ends ──> encoded, sent

It is said by another thread, as the trainer's own is in the middle of a step. What is offered has the memory of its
payloads and no values yet; the exchange reads none of it before they are final (`dlc.comm.filling`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from dlc.comm.encoded import Encoded
from dlc.comm.filling import Filling
from dlc.errors import DlcError, RoundTimeout
from dlc.train.offers import Work
from dlc.train.swarm import Pending, TrainPeer


class Announcements:
    """Of what `peer` offers on a channel: one at a time. Used from one thread."""

    def __init__(self, peer: TrainPeer, channel: str, patience_s: float) -> None:
        self._peer, self._channel, self._patience_s = peer, channel, patience_s
        self._standing: Announcement | None = None
        self._taken_back: Pending | None = None
        """Of an announcement that nothing came of: its round goes on without us."""

    def say(self, sent: Encoded, weight: float, work: Work, after: int, in_s: float, expected_s: float) -> None:
        """In `in_s` seconds from now, to the round after `after`: `sent` is final within about `expected_s` more."""
        assert not self.stands and self._taken_back is None, "one at a time"
        filling = Filling(sent.numel(), expected_s)

        def contribute() -> Pending:
            return self._peer.contribute(
                self._channel,
                sent,
                weight=weight,
                upto=work.upto,
                after=after,
                patience_s=self._patience_s,
                filling=filling,
            )

        self._standing = Announcement(sent, filling, weight, work, contribute, in_s)

    def retract(self, but: tuple[float, Work] | None = None) -> None:
        """Nothing comes of what was announced, if anything was; unless it was the offer of this weight and work."""
        standing = self._standing
        if standing is None or (standing.weight, standing.work) == but:
            return
        standing.filling.stop()
        pending = standing.over()
        self._standing = None
        if pending is not None and not self._peer.withdraw(self._channel):
            self._taken_back = pending

    def free(self, timeout_s: float) -> bool:
        """Whether no round is on its way, after at most `timeout_s`, that names what was announced and taken back."""
        if self._taken_back is not None:
            with contextlib.suppress(RoundTimeout):
                self._taken_back.wait(timeout_s)
                self._taken_back = None
        return self._taken_back is None

    @property
    def stands(self) -> bool:
        """Something is announced, and neither taken back nor `final`."""
        return self._standing is not None

    def taken_up(self, weight: float, work: Work) -> tuple[Encoded, Pending] | None:
        """The announcement of just this offer, if it was made and its round is not over: its memory is to be filled,
        and `final` then. No other stands afterwards."""
        self.retract(but=(weight, work))
        standing = self._standing
        pending = standing.over() if standing is not None else None
        if standing is None or pending is None or pending.done:
            self.retract()
            return None
        return standing.sent, pending

    def final(self) -> None:
        """What was `taken_up` is filled."""
        assert self._standing is not None, "taken up before"
        self._standing.filling.reached(0)
        self._standing = None


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
