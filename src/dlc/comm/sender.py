"""What a peer sends under one plan, to whom, and in which order: its contribution, and what is ready for others.

  begin    a queue per owner, of its chunks in the order of all members ─┐    (or an empty part, see below)
           queued ──next_bulk──> in flight, a window at most ──done──> over: the chunk's result is here
             ^                        │
             ├───────── broken ───────┤    a connection to its owner has ended
             └──── send_again, once ──┘    its result does not come, and nothing else moves
  outbox   results that this peer reduced, and what was asked for: whoever has such a thing puts it in; the last window
           of results that went to each peer comes back to it when a connection there has ended

`next_bulk` is pulled, a message at a time, when the link to a peer can take one; it takes from the queue and from the
outbox by turns (`turns.py`). The contribution is shown to each call, as it may be withdrawn or replaced meanwhile:
nothing goes out without it, and only what is final of it. Where it is not what the plan names, or was given up, each
owner gets an empty part instead: nobody need wait for it.

A `Sender` owns the queues, what is in flight, and whose turn it is. Of results it knows only which chunks have one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from dlc.comm.context import Context
from dlc.comm.entries import Part
from dlc.comm.grid import Grid
from dlc.comm.ids import PeerId, Voter
from dlc.comm.messages import Bulk, Contrib, Plan, Result
from dlc.comm.offered import Offered
from dlc.comm.outbox import Outbox
from dlc.comm.turns import Turns

WINDOW_BYTES = 16 << 20
"""Contributions on their way to one owner whose results have not come back: bounds what an owner must hold per peer."""
WINDOW_CHUNKS_MIN = 4


@dataclass(slots=True)
class _Queue:
    """Chunks of one owner."""

    todo: deque[int] = field(default_factory=deque)
    in_flight: dict[int, None] = field(default_factory=dict)
    """Sent in this order, and their results are not here."""


class Sender:
    """Of one peer, for one plan after the other. `mine` of its calls: the contribution to the plan as it is now, or
    None where it was withdrawn."""

    def __init__(self, ctx: Context, outbox: Outbox) -> None:
        self.ctx, self.outbox = ctx, outbox
        self._plan: Plan | None = None
        self._grid: Grid | None = None
        self._base = b""
        self._part: Part | None = None
        """What the plan names of me."""
        self._queues: dict[Voter, _Queue] = {}
        self._done: set[int] = set()
        self._again: set[int] = set()
        """Chunks that were sent once more."""
        self._window = WINDOW_CHUNKS_MIN
        self._turns = Turns()
        self._went: dict[PeerId, dict[int, Result]] = {}
        """The results of this plan's slot that went to each peer last, by chunk, a window at most."""

    def begin(self, plan: Plan, base: bytes, grid: Grid, mine: Offered | None, held: Iterable[int]) -> None:
        """Send for this plan from now on, and for no other. base: of its channel. held: chunks that have a result."""
        self._plan, self._base, self._grid = plan, base, grid
        self._queues, self._again, self._done, self._went = {}, set(), set(held), {}
        self._window = window_chunks(grid)
        part = self._part = next((p for p in plan.entry.roster if p.voter == self.ctx.me), None)
        owned = 0
        if part is not None:
            if mine is None or mine.given_up or (part.weight, part.upto) != (mine.ready.weight, mine.ready.upto):
                self._tell_absent()
            else:
                mine.started = self.ctx.now if mine.started is None else mine.started
                self.outbox.take_back(plan.entry.channel, base, part)
                owned = self._fill_queues(plan)
        self._turns.begin({owner.peer: len(queue.todo) for owner, queue in self._queues.items()}, owned)

    def _fill_queues(self, plan: Plan) -> int:
        """Returns how many chunks are mine to reduce."""
        owned = 0
        for chunk, owner in in_order(plan):
            if owner >= 0 and plan.owners[owner] != self.ctx.me:
                self._queues.setdefault(plan.owners[owner], _Queue()).todo.append(chunk)
            else:
                owned += owner >= 0
        return owned

    def _tell_absent(self) -> None:
        """What the plan names I have no more, or never will: nobody need wait for it. An empty part says so."""
        plan, part = self._plan, self._part
        assert plan is not None and part is not None
        first = {owner: chunk for chunk, owner in reversed(list(enumerate(plan.assignment))) if owner >= 0}
        for index, chunk in first.items():
            owner = plan.owners[index]
            if owner != self.ctx.me:
                empty = Contrib(plan.entry.channel, self._base, chunk, part.weight, part.upto)
                self.outbox.serve(owner.peer, empty)

    def give_up(self) -> None:
        """My contribution will not be finished: what is not sent of it never is, and its owners are told so, once."""
        if self._queues:
            self._queues = {}
            self._tell_absent()

    def end(self) -> None:
        """There is no plan any more. What is in the outbox still goes."""
        self._plan, self._grid, self._part, self._queues, self._went = None, None, None, {}, {}

    def done(self, chunk: int) -> None:
        """Its result is here: it takes no room in a window, and need not be sent."""
        self._done.add(chunk)
        for queue in self._queues.values():
            queue.in_flight.pop(chunk, None)

    def broken(self, peer: PeerId) -> None:
        """A connection to it has ended: nobody knows what of the last window has come through, so all of it goes once
        more, first of all."""
        for owner, queue in self._queues.items():
            if owner.peer == peer:
                queue.todo.extendleft(reversed(queue.in_flight))
                queue.in_flight.clear()
        if went := self._went.pop(peer, None):
            waiting = self.outbox.results.setdefault(peer, deque())
            queued = {(result.header.ballot, result.header.chunk) for result in waiting}
            again = [r for r in went.values() if (r.header.ballot, r.header.chunk) not in queued]
            waiting.extendleft(reversed(again))

    def send_again(self, chunk: int) -> None:
        """Nothing moves and this chunk's result is missing: my part may have been lost with a connection. Once only."""
        for queue in self._queues.values():
            if chunk in queue.in_flight and chunk not in self._again:
                self._again.add(chunk)
                del queue.in_flight[chunk]
                queue.todo.append(chunk)

    # ---------------------------------------------------------------- pulled

    def pending(self, mine: Offered | None) -> set[PeerId]:
        """Peers for which `next_bulk` has something now."""
        return {*self.outbox.peers(), *self._owners_with_room(mine)}

    def idle(self, mine: Offered | None) -> bool:
        """Nobody is pending."""
        return self.outbox.empty and next(self._owners_with_room(mine), None) is None

    def _owners_with_room(self, mine: Offered | None) -> Iterator[PeerId]:
        """Those who lack parts of mine, and whose window is not full."""
        for owner, queue in self._queues.items():
            if queue.todo and len(queue.in_flight) < self._window and self._sendable(mine, queue.todo[0]):
                yield owner.peer

    def _sendable(self, mine: Offered | None, chunk: int) -> bool:
        """It need not wait until more of my contribution is final."""
        if mine is None or mine.filling is None or chunk in self._done:
            return True
        assert self._grid is not None
        return mine.final(self._grid.span(chunk)[0])

    def next_bulk(self, peer: PeerId, mine: Offered | None, n_open: int) -> Bulk | None:
        """Taken out: the next message for `peer`. n_open: chunks that I reduce and that have no result yet."""
        first = self._next_contribution(peer, mine) if self._contribution_first(peer, n_open) else None
        message = first or self.outbox.next(peer) or self._next_contribution(peer, mine)
        if isinstance(message, Result):
            self._remember(peer, message)
        return message

    def _remember(self, peer: PeerId, result: Result) -> None:
        if self._plan is not None and result.header.head == self._plan.head:
            went = self._went.setdefault(peer, {})
            went.pop(result.header.chunk, None)  # it was asked for, and has gone before
            went[result.header.chunk] = result
            if len(went) > self._window:
                del went[next(iter(went))]

    def _contribution_first(self, peer: PeerId, n_open: int) -> bool:
        results = self.outbox.results.get(peer)
        if not results:
            return False
        parts_left = sum(len(queue.todo) for owner, queue in self._queues.items() if owner.peer == peer)
        return self._turns.contribution_first(peer, parts_left, n_open + len(results))

    def _next_contribution(self, peer: PeerId, mine: Offered | None) -> Contrib | None:
        if mine is None or self._grid is None:
            return None
        for owner, queue in self._queues.items():
            while owner.peer == peer and queue.todo and len(queue.in_flight) < self._window:
                if not self._sendable(mine, queue.todo[0]):
                    break
                chunk = queue.todo.popleft()
                if chunk in self._done:
                    continue
                queue.in_flight[chunk] = None
                return mine.contrib(self._grid, chunk)
        return None


def window_chunks(grid: Grid) -> int:
    """Chunks of `grid` that may be in flight to one owner."""
    return max(WINDOW_CHUNKS_MIN, WINDOW_BYTES // max(1, grid.wire_bytes(0)))


def in_order(plan: Plan) -> Iterable[tuple[int, int]]:
    """(chunk, index of its owner) in the order in which all members send and close them: an owner could wait for ever
    for windows that are full of other chunks."""
    chunks = list(enumerate(plan.assignment))
    return reversed(chunks) if plan.fill_s > 0 else chunks
