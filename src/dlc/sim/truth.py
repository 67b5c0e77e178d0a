"""The true state after every entry, computed from the entries alone, and who is known to hold another one.

A fault may corrupt a peer's state. From its next round on its digest is wrong: it must be told so by DigestMismatch and
hold the true state again in the end, and nobody else may take it for the true one, as long as more peers are sound.
Where no more are (a fault struck those), nobody can tell, and what the run goes on with is the truth from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dlc.comm.entries import EMPTY, OPEN, ROUND
from dlc.comm.events import DigestMismatch
from dlc.comm.log import Attached, Past, means
from dlc.comm.messages import Plan
from dlc.sim.schedule import TRAIN
from dlc.sim.toy import ToyState

if TYPE_CHECKING:
    from dlc.sim.world import Process

States = dict[str, tuple[ToyState, bytes]]
"""By channel: the state and its digest."""


class Truth:
    def __init__(self, first_state: Callable[[str, bytes], ToyState | None]) -> None:
        self._first_state = first_state
        """The state with this digest with which somebody began a channel."""
        self._after: dict[bytes, States] = {EMPTY: {}}
        self.in_doubt = False
        """A state was corrupted in this schedule: others may hold, for a while, what they fetched of it."""
        self.corrupt: dict[Process, bool] = {}
        """Processes whose state is, or was, wrong and is not known to be right again; True: they have been told so."""
        self._lost: dict[bytes, bytes] = {}
        """Heads at which nobody can tell what is true, and the state that was taken for it: the state of the first that
        goes on from there is."""
        self._taken: set[tuple[bytes, bytes]] = set()
        """(digest of the true state, of the one that was taken for it): the same at all heads with that state."""

    def add(self, head: bytes, past: Past, first: Attached | None) -> str:
        """A new entry, and the training state of who applied it first; why it cannot be, empty if it can."""
        entry = past.entry
        states = self._after[entry.parent]
        if entry.kind == OPEN:
            begun = self._first_state(entry.channel, entry.digest)
            if begun is None:
                return f"channel {entry.channel} is opened with a state that nobody had"
            states = {**states, entry.channel: (begun, entry.digest)}
        elif entry.kind == ROUND and entry.channel in states:
            if entry.parent in self._lost and first is not None and isinstance(first.state, ToyState):
                state = first.state.copy()
                self.corrupt = {p: told for p, told in self.corrupt.items() if self._wrong_elsewhere(p, first)}
            else:
                state = states[entry.channel][0].copy()
                state.step(entry.t, means(entry, past.results))
            states = {**states, entry.channel: (state, state.digest())}
        self._after[head] = states
        return ""

    def _wrong_elsewhere(self, process: Process, first: Attached) -> bool:
        """The run goes on with a wrong state, that of `first`, and this process, which had a wrong one, has another."""
        log = process.node.log
        held = log.attached[TRAIN]
        if held is first or log.head not in self._after or TRAIN not in self._after[log.head]:
            return False
        digest = held.state.digest()
        return digest != self.digest(log.head, TRAIN) and not self.taken_for_true(log.head, TRAIN, digest)

    def digest(self, head: bytes, channel: str) -> bytes:
        return self._after[head][channel][1]

    def given_up(self, head: bytes) -> bool:
        """A run went on from here with a state that was not the true one, because nobody could tell."""
        return head in self._lost

    def taken_for_true(self, head: bytes, channel: str, digest: bytes) -> bool:
        """Whether the run went on with this state from here, or from another head with the same true one."""
        return (self.digest(head, channel), digest) in self._taken

    def planned(self, plan: Plan, sound: int) -> str:
        """A plan is made while `sound` peers hold the true state; why that must not be, empty if it may."""
        channel = plan.entry.channel
        if plan.entry.kind != ROUND or not plan.digest or channel not in self._after.get(plan.head, {}):
            return ""
        if plan.digest == self.digest(plan.head, channel) or plan.head in self._lost:
            return ""
        if sound > len([p for p in self.corrupt if p.running]):
            return f"a plan is made for a wrong state of {channel}, though {sound} peers hold the true one"
        self._lost[plan.head] = plan.digest
        self._taken.add((self.digest(plan.head, channel), plan.digest))
        return ""

    def told(self, process: Process, event: DigestMismatch, head: bytes, sound: int) -> str:
        """It is told that its state is wrong, while `sound` others hold the true one; why it must not be, or empty."""
        if process in self.corrupt:
            self.corrupt[process] = True
            return ""
        taken = self.taken_for_true(head, event.channel, process.node.log.attached[event.channel].state.digest())
        if head in self._lost or taken or sound <= len([p for p in self.corrupt if p.running]):
            # Nobody can tell, or could tell elsewhere, where a run went on with it: it is to hold what the others do.
            self.corrupt[process] = True
            return ""
        return f"is told that its state of {event.channel} is wrong, though {sound} others hold the same"

    def look(self, process: Process, jumped: bool) -> str:
        """Look at a process in `corrupt`; what is wrong with its being right again, empty if nothing, or not yet.

        `jumped`: it has just taken a snapshot, and with it a state from elsewhere, without being asked for its digest.
        """
        log = process.node.log
        attached = log.attached[TRAIN]
        if not attached.synced or attached.state.digest() != self.digest(log.head, TRAIN):
            return ""
        was_told = self.corrupt.pop(process)
        return "" if was_told or jumped or attached.digest != self.digest(log.head, TRAIN) else "was told nothing of it"
