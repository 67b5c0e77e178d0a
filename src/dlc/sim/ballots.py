"""I1 (docs/protocol.md, "Why what is decided stays decided"): the votes of every slot, as all send them.

The order that counts is that of the ballots. Of time there is one rule: a quorum that decides in an older ballot, after
others went on without it by force, must not be: who slept so long votes no more for what it promised before.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dlc.comm.ids import Ballot, Voter


@dataclass
class Votes:
    promised: dict[Ballot, frozenset[Voter]] = field(default_factory=dict)
    """Whose promises the plan of each ballot was made from; of a forced one, its deciders."""
    forced: list[tuple[Ballot, int]] = field(default_factory=list)
    """Of each vote in a forced ballot: the ballot, and how often had been decided before."""
    values: dict[Ballot, bytes] = field(default_factory=dict)
    """The entry that got a vote in each ballot."""
    decided: list[tuple[Ballot, frozenset[Voter], bytes]] = field(default_factory=list)
    """The ballot, who decided in it, and the entry, in the order of time; again with each vote that came later."""


class Ballots:
    def __init__(self) -> None:
        self._slots: dict[bytes, Votes] = {}

    def planned(self, head: bytes, ballot: Ballot, promised: frozenset[Voter]) -> None:
        """The first plan of this ballot is sent; `promised`: whose promises it was made from."""
        self._slots.setdefault(head, Votes()).promised.setdefault(ballot, promised)

    def value(self, head: bytes, ballot: Ballot, entry: bytes) -> bytes:
        """The one entry of this ballot: this, unless another got a vote before."""
        return self._slots.setdefault(head, Votes()).values.setdefault(ballot, entry)

    def is_decided(self, head: bytes, entry: bytes) -> bool:
        slot = self._slots.get(head)
        return slot is not None and any(value == entry for _, _, value in slot.decided)

    def voted(self, head: bytes, ballot: Ballot, deciding: frozenset[Voter], forced: bool) -> str:
        """A vote in this ballot: what is wrong with it, if anything.

        deciding: those who voted in it, where they are a quorum or all deciders of a forced ballot; else empty.
        """
        slot = self._slots[head]
        if forced:
            slot.forced.append((ballot, len(slot.decided)))
        why = self._passed_over(slot, ballot, deciding) if deciding else ""
        if deciding:
            slot.decided.append((ballot, deciding, slot.values[ballot]))
        return why or self._promised_before(slot)

    @staticmethod
    def _passed_over(slot: Votes, ballot: Ballot, deciding: frozenset[Voter]) -> str:
        """Deciding sets that intersect decide the same entry, but where the lower one was passed over: in a ballot
        between the two, and without any of its deciders, a forced ballot got a vote for the entry of the other (later,
        unless the lower one was forced as well), or a quorum decided it (later; only a forced ballot does not intersect
        that), or promised a ballot in which it got a vote. Nobody among these can know what those others decided, and
        their votes outrank theirs when one comes back.
        """
        value, by_force = slot.values[ballot], {b for b, _ in slot.forced}
        for number, (then, others, other) in enumerate(slot.decided):
            if other == value or not others & deciding:
                continue
            between = [b for b, voted in slot.values.items() if then < b < ballot and voted == value]
            apart = {b for b in between if not slot.promised[b] & others}
            outranked = bool(apart - by_force)
            forced = any(b in apart and (then in by_force or number < before) for b, before in slot.forced)
            by_quorum = any(b in between and not quorum & others for b, quorum, _ in slot.decided[number + 1 :])
            if not (outranked or forced or by_quorum):
                return f"{sorted(others)} and {sorted(deciding)} differ"
        return ""

    @staticmethod
    def _promised_before(slot: Votes) -> str:
        """Of all ballots above one that decided, the least in which something else got a vote was chosen without a
        promise of any of those who decided."""
        for then, deciding, value in slot.decided:
            first = min((b for b, voted in slot.values.items() if b > then and voted != value), default=None)
            if first is not None and deciding & slot.promised[first]:
                return f"{sorted(deciding)} decided in {then}; {first}, which some of them promised, has another value"
        return ""
