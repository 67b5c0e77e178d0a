"""I1 (docs/protocol.md, "Why what is decided stays decided"): the votes of every slot, as all send them.

The order that counts is that of the ballots, not that in which their votes were sent: nobody who votes in a ballot can
know of a vote that no promise told of.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dlc.comm.ids import Ballot, Voter


@dataclass
class Votes:
    promised: dict[Ballot, frozenset[Voter]] = field(default_factory=dict)
    """Whose promises the plan of each ballot was made from; of a forced one, its deciders."""
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

    def voted(self, head: bytes, ballot: Ballot, deciding: frozenset[Voter]) -> str:
        """A vote in this ballot: what is wrong with it, if anything.

        deciding: those who voted in it, where they are a quorum or all deciders of a forced ballot; else empty.
        """
        slot = self._slots[head]
        why = self._passed_over(slot, ballot, deciding) if deciding else ""
        if deciding:
            slot.decided.append((ballot, deciding, slot.values[ballot]))
        return why or self._promised_before(slot)

    @staticmethod
    def _passed_over(slot: Votes, ballot: Ballot, deciding: frozenset[Voter]) -> str:
        """Deciding sets that intersect decide the same entry, but where the lower one was passed over: in a ballot
        between the two, and without any of its deciders, a forced ballot got a vote for the entry of the other, or a
        quorum decided it (which only a forced ballot does not intersect), or promised a ballot in which it got a vote.
        Nobody among these can know what those others decided, and their votes outrank theirs when one comes back.
        """
        value = slot.values[ballot]
        for number, (then, others, other) in enumerate(slot.decided):
            if other == value or not others & deciding:
                continue
            between = [b for b, voted in slot.values.items() if then < b < ballot and voted == value]
            outranked = any(not slot.promised[b] & others for b in between)
            by_quorum = any(b in between and not quorum & others for b, quorum, _ in slot.decided[number + 1 :])
            if not (outranked or by_quorum):
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
