"""A peer that was away is *stale*: no coordination, promise or vote of its own until it knows where the others are."""

from __future__ import annotations

from dlc.comm.context import Context
from dlc.comm.entries import EMPTY
from dlc.comm.ids import Voter
from dlc.comm.log import Log
from dlc.comm.permit import can_vote, greater_alive
from dlc.comm.records import key_of


class Absence:
    """How long this peer stays stale: after it has started, and after each gap in which it did not run."""

    def __init__(self, ctx: Context, log: Log) -> None:
        self._ctx, self._log = ctx, log
        self._since: float | None = None
        self._led_at = 0.0
        """When somebody alive was last ahead, while I was stale. Both in running time of the membership."""
        self.woken = False
        """Stale because of a freeze, and not because the process has just started."""

    def begin(self, woken: bool) -> None:
        """I may have been frozen (`woken`), or have just started: ask all where they are."""
        members = self._ctx.members
        self.woken = woken
        self._ctx.stale = True
        if woken:
            members.update_own(stale=True)
        self._ctx.out.extend(members.begin_refresh(self._ctx.now))
        self._since = self._led_at = members.running_s  # after the step that the gap itself adds

    def over(self) -> bool:
        """Whether it ends now: nobody alive is ahead, and every voter that is not gone has answered, or patience is
        over."""
        ctx, members = self._ctx, self._ctx.members
        if ctx.leaving or self._since is None:
            return False
        if greater_alive(ctx, self._log):
            self._led_at = members.running_s
            return False
        waited_s = members.running_s - self._since
        # Who sleeps may have been left behind by a forced ballot, and those who left may be cut off just now: so a
        # woken peer waits as long as they had to. A process that has just started never voted before.
        patience_s = members.t_evict_s if self.woken else members.t_refresh_s
        if waited_s < patience_s:
            asked = self._to_be_heard(everybody=waited_s < members.t_refresh_s)
            if not all(members.gone(v) or members.refreshed(v) for v in asked):
                return False
        # Whoever has answered that it is ahead, and is silent now, is one of those, cut off later.
        if self.woken and members.running_s - self._led_at < members.t_evict_s:
            if any(self._ahead(v) and not members.gone(v) for v in self._to_be_heard(everybody=False)):
                return False
        ctx.stale = False
        self._since = None
        members.update_own(stale=False)
        return True

    def _ahead(self, voter: Voter) -> bool:
        """It said so last, though it may be silent now."""
        record = self._ctx.members.record(voter.peer)
        return record is not None and can_vote(record) and key_of(record) > self._log.state.key

    def _to_be_heard(self, everybody: bool) -> set[Voter]:
        """Who may have gone on while I did not look: the voters. Where I slept, also whoever stood at my head, or not
        far behind, without a vote (it could go on by force), and whoever is known to be ahead; for the time that an
        answer takes, everybody."""
        state = self._log.state
        asked = set(state.electorate)
        if self.woken:
            recent = {state.head, *(past.entry.parent for past in self._log.past)} - {EMPTY}
            others = [r for r in self._ctx.members.records() if can_vote(r)]
            asked |= {r.voter for r in others if everybody or r.head in recent or key_of(r) > state.key}
        return asked - {self._ctx.me}
