"""The owner's side of a plan: the chunks that it gives to this peer, and the parts of them that others send.

  part         stored, by channel and base, before or while a plan asks for it ──> in the reducer of its chunk
  owned chunk  open ──> closed: all parts are in, or whoever's is missing is dead or late (`patience.py`)

A `Collector` sums nothing before its chunk closes and sends nothing: what a call closes it returns, as results of the
plan, for the exchange to hold and to pass on. Parts of a base stay valid for every plan of that base; of what no plan
asks for yet only so much is kept of each sender. `mine` of its calls: the own contribution as it is now, as it may be
withdrawn or replaced meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from dlc.comm.context import Context
from dlc.comm.dropped import Dropped
from dlc.comm.entries import Part
from dlc.comm.grid import Grid
from dlc.comm.ids import Voter
from dlc.comm.log import Log
from dlc.comm.messages import ChunkHeader, Contrib, Excluded, Plan, Result
from dlc.comm.offered import Offered
from dlc.comm.patience import Patience
from dlc.comm.reducer import WRONG_SIZE, ChunkReducer, Workspace
from dlc.comm.sender import in_order, window_chunks

STRAY_CHUNKS_MAX = 4096
STRAY_BYTES_MAX = 64 << 20
"""Contributions kept per sender before the plan that asks for them is known here: more than a window of small chunks
has, and more bytes than one of large ones."""


class Collector:
    def __init__(self, ctx: Context, log: Log, dropped: Dropped) -> None:
        self.ctx, self.log = ctx, log
        self.patience = Patience(ctx)
        self.gained = 0
        """Parts taken and chunks closed under this plan: that it rises shows that bytes move."""
        self.parts: dict[tuple[str, bytes], dict[int, dict[Voter, Contrib]]] = {}
        """By (channel, base), chunk and sender."""
        self._kept: dict[Voter, tuple[int, int]] = {}
        """Of each sender, how many of them there are, and their bytes."""
        self._dropped = dropped
        self._absent: dict[Voter, tuple[str, bytes, Part]] = {}
        """(channel, base, part): the contribution that each one said last it has no more, though a plan may name it."""
        self._plan: Plan | None = None
        self._grid: Grid | None = None
        """None: nothing is reduced under this plan."""
        self._base = b""
        """Of the plan's channel."""
        self._parts_of: dict[Voter, tuple[int, Part]] = {}
        """The plan's roster by voter: (index, part)."""
        self._owned: dict[int, ChunkReducer] = {}
        self._window = 0
        """Chunks that others may have in flight to me under this plan."""
        self._workspace: tuple[Grid, Workspace] | None = None
        """Kept from round to round: fresh buffers for every chunk would be page faults for every chunk."""

    @property
    def n_open(self) -> int:
        """Chunks that are mine to close yet."""
        return len(self._owned)

    def begin(self, plan: Plan, grid: Grid | None, recipients: Collection[Voter], mine: Offered | None) -> list[Result]:
        """Collect for this plan from now on: open the chunks that it gives me, with the parts that came before it.

        recipients: who else gets the results.
        """
        self._plan, self._grid, self._base = plan, grid, self.log.state.base(plan.entry.channel)
        self._parts_of = {part.voter: (index, part) for index, part in enumerate(plan.entry.roster)}
        self._owned, self.gained = {}, 0
        if grid is None:
            return []
        if self._workspace is None or self._workspace[0] != grid:
            self._workspace = (grid, Workspace(grid))
        self._window = window_chunks(grid)
        chunks = [c for c, owner in in_order(plan) if owner >= 0 and plan.owners[owner] == self.ctx.me]
        owed_bytes = sum(grid.wire_bytes(chunk) for chunk in chunks)
        roster = (p.voter for p in plan.entry.roster if p.voter != self.ctx.me)
        result_bytes = grid.result_bytes(0, max(1, len(plan.entry.roster)))
        self.patience.begin(roster, len(recipients), grid.wire_bytes(0), result_bytes, owed_bytes, plan.fill_s)
        parts = self.parts.get((plan.entry.channel, self._base), {})
        for chunk in chunks:
            self._owned[chunk] = ChunkReducer(grid, chunk, plan.entry.roster, plan.norms)
            for sender, contrib in list(parts.get(chunk, {}).items()):
                self._offer(sender, contrib)
        return self.close_due(mine)

    def end(self) -> None:
        """The slot is over: parts live on as long as their base."""
        for key in [k for k in self.parts if self.log.state.base(k[0]) != k[1]]:
            for by_sender in self.parts.pop(key).values():
                self._gone(by_sender)
        self._absent = {v: told for v, told in self._absent.items() if self.log.state.base(told[0]) == told[1]}
        self._plan, self._grid, self._parts_of, self._owned = None, None, {}, {}

    # ---------------------------------------------------------------- parts

    def take(self, sender: Voter, contrib: Contrib, mine: Offered | None) -> list[Result]:
        """A part of the present base of its channel; without a payload: its sender has no more of what it offered."""
        part = Part(sender, contrib.weight, contrib.upto)
        if not contrib.payload:
            self._absent[sender] = (contrib.channel, contrib.base, part)
            return self.close_due(mine)
        if self._absent.get(sender) == (contrib.channel, contrib.base, part):
            del self._absent[sender]  # the same was offered once more
        if not (self._store(sender, contrib) and contrib.chunk in self._owned):
            return []
        result = self._close_if_done(contrib.chunk, mine)
        return [] if result is None else [result]

    def _store(self, sender: Voter, contrib: Contrib) -> bool:
        """Keep a part; True if it is of the present plan's channel: one of another may have the same chunk number."""
        plan = self._plan
        asked_for = plan is not None and contrib.channel == plan.entry.channel and contrib.base == self._base
        wanted = asked_for and contrib.chunk in self._owned
        if not wanted and not self._room_for(sender, contrib):
            self._dropped.note(sender, "more than is kept before a plan asks for it")
            return False
        self.patience.heard(sender, len(contrib.payload))
        if asked_for and not (self._grid is not None and 0 <= contrib.chunk < self._grid.n_chunks):
            self._dropped.note(sender, "a chunk that there is not", bad=True)
            return False
        # What this plan gives to another owner, or what I hold already, is for the next plan: the sender may have seen
        # it before me, and the coordinator may have made it before it knew what I hold.
        by_sender = self.parts.setdefault((contrib.channel, contrib.base), {}).setdefault(contrib.chunk, {})
        if sender in by_sender:
            self._gone({sender: by_sender[sender]})
        by_sender[sender] = contrib
        count, size = self._kept.get(sender, (0, 0))
        self._kept[sender] = count + 1, size + len(contrib.payload)
        self.gained += wanted
        if asked_for:
            self._offer(sender, contrib)
        return asked_for

    def _room_for(self, sender: Voter, contrib: Contrib) -> bool:
        count, size = self._kept.get(sender, (0, 0))
        return count < STRAY_CHUNKS_MAX and size + len(contrib.payload) <= STRAY_BYTES_MAX

    def _gone(self, parts: Mapping[Voter, Contrib]) -> None:
        """These are kept no more."""
        for sender, contrib in parts.items():
            count, size = self._kept.pop(sender)
            if count > 1:
                self._kept[sender] = count - 1, size - len(contrib.payload)

    def _offer(self, sender: Voter, contrib: Contrib) -> None:
        """Hand a part of the plan's channel to the reducer of its chunk, if it is one that the plan's roster names."""
        reducer = self._owned.get(contrib.chunk)
        index, part = self._parts_of.get(sender, (-1, None))
        if reducer is None or part is None or (part.weight, part.upto) != (contrib.weight, contrib.upto):
            return
        if (reason := reducer.offer(index, contrib.payload)) is not None:
            self._dropped.note(sender, f"a part of a chunk: {reason}", bad=reason == WRONG_SIZE)

    # ---------------------------------------------------------------- closing

    def close_due(self, mine: Offered | None) -> list[Result]:
        """Look at the open chunks in the window again: a contributor may have died or become late."""
        if not self._owned:
            return []
        alone = len(self._parts_of) == 1
        window = len(self._owned) if alone else self._window
        self.patience.waiting_for(self._awaited())
        tried = (self._close_if_done(chunk, mine) for chunk in list(self._owned)[:window])
        return [result for result in tried if result is not None]

    def _awaited(self) -> Iterator[Voter]:
        """The others whose parts the next open chunk lacks."""
        assert self._plan is not None
        roster, first = self._plan.entry.roster, self._owned[next(iter(self._owned))]
        return (roster[i].voter for i in first.missing() if roster[i].voter != self.ctx.me)

    def _close_if_done(self, chunk: int, mine: Offered | None) -> Result | None:
        """Close an owned chunk if it has all the parts it will get.

        My own part is encoded when all others are in, and summed at once: it never waits in memory.
        """
        assert self._plan is not None
        roster, reducer = self._plan.entry.roster, self._owned[chunk]
        reasons: dict[Voter, str] = {}
        own: Offered | None = None
        for index in reducer.missing():
            part = roster[index]
            offered = mine if part.voter == self.ctx.me else None
            if offered is not None and (part.weight, part.upto) == (offered.ready.weight, offered.ready.upto):
                if offered.final(reducer.grid.span(chunk)[0]):
                    own = offered
                    continue
                if not offered.given_up and not self.patience.own_overdue():
                    return None
            reason = self._given_up(part)
            if reason is None:
                return None
            reasons[part.voter] = reason
        if own is not None:
            self._offer(self.ctx.me, own.contrib(reducer.grid, chunk))
        return self._close(chunk, reducer, reasons)

    def _given_up(self, part: Part) -> str | None:
        """Why this contributor's part is no longer waited for, or None."""
        members, plan, voter = self.ctx.members, self._plan, part.voter
        assert plan is not None
        # It was taken back, or another was offered, since its contributor was ready: it will not come.
        if voter == self.ctx.me or self._absent.get(voter) == (plan.entry.channel, self._base, part):
            return "late"
        if members.gone(voter):
            return "left" if members.record(voter.peer) is None else "dead"  # or it is back as another process
        # The coordinator left it out as an owner, and I find it silent myself: no need to wait for my own verdict.
        if not members.alive(voter) or (voter not in plan.owners and members.suspect(voter)):
            return "dead"
        # The plan has no place for it as an owner, and I reach it by a relay only: its bulk has no way to me.
        if voter not in plan.owners and members.relay_for(voter.peer) is not None and not self.patience.began(voter):
            return "late"
        return "late" if self.patience.given_up(voter) else None

    def _close(self, chunk: int, reducer: ChunkReducer, reasons: dict[Voter, str]) -> Result:
        assert self._plan is not None and self._workspace is not None
        plan, roster = self._plan, self._plan.entry.roster
        payload, included = reducer.close(self._workspace[1])
        reasons |= {roster[i].voter: reason for i, reason in reducer.refused.items()}
        header = ChunkHeader(
            base=self._base,
            chunk=chunk,
            head=plan.head,
            ballot=plan.ballot,
            owner=self.ctx.me,
            included=tuple(roster[i] for i in included),
            excluded=tuple(Excluded(v, r) for v, r in sorted(reasons.items())),
        )
        del self._owned[chunk]
        self._gone(self.parts.get((plan.entry.channel, self._base), {}).pop(chunk, {}))
        self.gained += 1
        self.patience.closed()
        return Result(header, payload)

    # ---------------------------------------------------------------- views

    @property
    def stall_s(self) -> float:
        """T_stall: the longest silence of anybody's that is no reason to act."""
        members = self.ctx.members
        floor_s = members.timeouts.t_chunk_s(members.rtt_max_s, 0.0)
        return max([floor_s, *(self.patience.silence_s(v) for v in self._parts_of if v != self.ctx.me)])

    @property
    def waits_s(self) -> float:
        """The longest silence that I bear with of those whose parts my next open chunk lacks; 0 where it lacks none."""
        if not self._owned:
            return 0.0
        return max((self.patience.silence_s(v) for v in self._awaited() if not self.patience.given_up(v)), default=0.0)

    @property
    def fills_until(self) -> float:
        """Running time: before this it is no sign of failure that nothing moves, as contributions become final."""
        return self.patience.fills_until if self._grid is not None else 0.0
