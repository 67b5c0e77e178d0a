"""What a member asks for itself: results of its plan that do not come (docs/protocol.md, "Data plane", Resend).

  a plan begins       what it fixes and nobody would send unasked ──> a holder
  nothing moves       all that is missing, each T_stall / 2 ────────> owner and coordinator by turns (or a holder);
                      the own parts of it are sent once more
  an owner is silent  what is missing of its results ───────────────> that owner, while others go on: its connection
                      may have broken, and what went down with it keeps the window to it shut

Where the last lacks parts itself, it has nothing to send; what still waits there for me is not sent twice. Owners whose
bulk has no way here are left to the second rule: what they reduced comes from others.
"""

from __future__ import annotations

from collections.abc import Iterable

from dlc.comm.context import Context
from dlc.comm.exchange import Exchange
from dlc.comm.ids import Voter
from dlc.comm.log import Log
from dlc.comm.messages import Fetch, Plan
from dlc.comm.reach import direct


class Fetcher:
    """Of one peer, for one plan after the other."""

    def __init__(self, ctx: Context, log: Log, exchange: Exchange) -> None:
        self.ctx, self.log, self.exchange = ctx, log, exchange
        self._last = 0.0
        """When all that was missing was asked for."""
        self._asked: dict[Voter, float] = {}
        """When each owner was asked last for what is missing of its results."""

    def begin(self, plan: Plan, before: Plan | None) -> None:
        """The exchange runs this plan now; before: the slot's one before it."""
        self._asked = {}
        lacking = (f.chunk for f in plan.fixed if f.chunk not in self.exchange.held)
        self._ask(plan, [chunk for chunk in lacking if self._orphan(chunk, before)], turn=0)

    def _orphan(self, chunk: int, before: Plan | None) -> bool:
        """Nobody sends this fixed chunk unasked: its owner, who sends it to everybody, is no more, or not known."""
        if before is None or chunk >= len(before.assignment):
            return True
        owner = before.assignment[chunk]
        return owner < 0 or not self.ctx.members.alive(before.owners[owner])

    def look(self, plan: Plan) -> None:
        """To be called now and then while results are missing."""
        if self.ctx.running_s < self.exchange.collector.fills_until:
            return  # what is missing may not be made yet
        now, stall_s = self.ctx.now, self.exchange.collector.stall_s / 2
        if now - max(self.exchange.last_gain, self._last) >= stall_s:
            self._last, self._asked = now, dict.fromkeys(plan.owners, now)
            missing = self.exchange.missing()
            for chunk in missing:
                self.exchange.send_again(chunk)
            self._ask(plan, missing, int(now / stall_s))
            return
        for index, owner in enumerate(plan.owners):
            if not direct(self.ctx, (owner,)):
                continue  # its results come from others, who are asked when nothing moves
            if now - max(self.exchange.heard_of(owner), self._asked.get(owner, 0.0)) >= stall_s:
                self._asked[owner] = now
                self._ask(plan, [c for c in self.exchange.missing() if plan.assignment[c] == index], turn=0)

    def _ask(self, plan: Plan, missing: Iterable[int], turn: int) -> None:
        """FETCH these chunks: from a holder where they are fixed, else from owner or coordinator. Where no bulk comes
        from any of these, from others, who get the results as I do."""
        members = self.ctx.members
        others = direct(self.ctx, (v for v in self.log.state.electorate if v != self.ctx.me and members.alive(v)))
        holders = {f.chunk: f for f in plan.fixed}
        asked: dict[Voter, list[int]] = {}
        for chunk in missing:
            if chunk in holders:
                choices = [v for v in holders[chunk].holders if members.alive(v)] or [plan.ballot.voter]
            else:
                choices = [plan.owners[plan.assignment[chunk]], plan.ballot.voter]
                if choices[0] == self.ctx.me:
                    continue  # nobody has it, if not I
            choices = direct(self.ctx, (v for v in choices if v != self.ctx.me)) or others or choices
            target = choices[turn % len(choices)]
            if target != self.ctx.me:
                asked.setdefault(target, []).append(chunk)
        for target, chunks in asked.items():
            fixed = [c for c in chunks if c in holders]
            reduced = tuple(c for c in chunks if c not in holders)
            if fixed:
                known = tuple(holders[c].hash for c in fixed)
                self.ctx.send(target, Fetch(self.log.head, plan.ballot, tuple(fixed), known))
            if reduced:
                self.ctx.send(target, Fetch(self.log.head, plan.ballot, reduced, ()))
