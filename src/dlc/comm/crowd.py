"""A group that forms by itself, where all of its members wait for the same peers.

    Wish (with whom I wait for) on the board ──> who has seen those of all of them is in the group ──> groups.py

Nobody asks and nobody begins: half a round trip after the last of them has come, all are in. Each wish has a digest of
its author's crowd, those whom it waits for and itself. Who has seen a wish with the digest of its own crowd from each
of these is in the group that they make; seats (seating.py) and nonce follow from the wishes, so each of them finds the
same ones. A wish counts from when it is seen on, also when it is no longer shown: its author may be in the group
already. What else can happen:

- *One of them has not seen them all* (a message was lost): whoever hears nothing of it in the group sends it Begin,
  ever more seldom (`RollCall`). It is in then, as its own wish is among those that the nonce was made of.
- *One has given up* what it showed: it says so (Decline) to all of its crowd, and to whoever sends Begin. Where it
  waits anew under the same key it may be in the group still, within ANSWER_S; its new wish has no crowd, so that no
  second group comes of it.
- *One is never heard of*: it counts as not come, and where too few are left for a member's `least`, there is no mean.

Where their crowds differ, somebody gathers them by invitations (meetings.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from blake3 import blake3

from dlc.comm.ground import Ground
from dlc.comm.ids import PeerId, Voter
from dlc.comm.meshmessages import Begin, Decline, Seat, Wish

ANSWER_S = 2.0
"""For an answer to an invitation, and four round trips."""
AGAIN_S = 0.4
"""Unanswered messages of the formation are repeated so often."""
NOT_COME = "did not come"
"""Why a member contributed nothing, in reports: it had given up when the group formed."""
GATHER_SHOWN_MAX = 1 << 10
"""Bytes to be gathered that are shown with a wish; with more of them a group is formed by invitations."""


def answer_s(rtt_s: float) -> float:
    """How long an answer from so far is waited for."""
    return ANSWER_S + 4 * rtt_s


def crowd_digest(peers: Collection[PeerId]) -> bytes:
    return blake3("\0".join(sorted(peers)).encode()).digest(8)


def crowd_nonce(key: str, wishes: Iterable[tuple[Voter, int]]) -> int:
    """Of the group that these wishes make."""
    names = "".join(f"\0{voter.peer}\0{voter.inc}\0{nonce}" for voter, nonce in sorted(wishes))
    return int.from_bytes(blake3((key + names).encode()).digest(6), "big")


class Crowd:
    """Those whom one call waits for, and what was seen of their wishes."""

    def __init__(self, me: Voter, wish: Wish, peers: Collection[PeerId]) -> None:
        """peers: with me."""
        self.peers, self.digest = frozenset(peers), wish.crowd
        self._me, self._seen = me, {me.peer: (me, wish)}
        self._given_up: dict[PeerId, tuple[Voter, int]] = {}
        """The last wish of each that it gave up; the board may show it a little longer."""

    def see(self, voter: Voter, wish: Wish) -> None:
        if voter.peer not in self.peers or self._given_up.get(voter.peer) == (voter, wish.nonce):
            return
        if wish.crowd == self.digest:
            self._seen[voter.peer] = voter, wish
        else:
            self._seen.pop(voter.peer, None)

    def give_up(self, voter: Voter, nonce: int) -> None:
        """It waits no longer with this wish."""
        if voter.peer in self.peers:
            self._given_up[voter.peer] = voter, nonce
        seen = self._seen.get(voter.peer)
        if seen is not None and (seen[0], seen[1].nonce) == (voter, nonce):
            del self._seen[voter.peer]

    @property
    def seen(self) -> set[Voter]:
        """Who else has shown its wish, and has not given it up."""
        return {voter for voter, _ in self._seen.values()} - {self._me}

    def whole(self) -> dict[Voter, Wish] | None:
        """Everybody's wish, by voter; None: not all have shown one."""
        return dict(self._seen.values()) if len(self._seen) == len(self.peers) else None


class RollCall:
    """Who has been heard of in such a group, as far as one member can know it."""

    def __init__(self, ground: Ground, begin: Begin, awaited: Iterable[Seat]) -> None:
        """awaited: seats that will ask me for something, or send me something."""
        self._ground, self._begin = ground, begin
        self._seats = {seat.voter: seat for seat in begin.seats}
        self._awaited = {seat.voter for seat in awaited}
        self._gap_s = max([AGAIN_S, *(2 * ground.members.rtt_s(v.peer) for v in self._awaited)])
        self._again_run = ground.running_s + self._gap_s
        self._until: dict[Voter, float] = {}
        """Running time until which those that have given up may wait anew."""
        self._heard = {ground.me}
        self.never: set[Voter] = set()
        """Who has not come at all."""

    def lacks(self, voter: Voter) -> bool:
        """It is named, and may not know it."""
        return voter in self._seats and voter not in self._heard and voter not in self.never

    def heard(self, voter: Voter) -> None:
        self._heard.add(voter)
        self._awaited.discard(voter)
        self._until.pop(voter, None)

    def declined(self, voter: Voter, m: Decline) -> bool:
        """It is not in the group. True: nor will it be; otherwise it has a while to wait anew."""
        seat = self._seats.get(voter)
        if seat is None or not self.lacks(voter) or m.given_up not in (0, seat.wish):
            return False
        if m.given_up:
            patience_s = answer_s(self._ground.members.rtt_s(voter.peer))
            self._until.setdefault(voter, self._ground.running_s + patience_s)
            return False
        return m.nonce == self._begin.nonce

    def lost(self, voter: Voter) -> None:
        """Nothing more will come of it."""
        if self.lacks(voter):
            self.never.add(voter)
            self._awaited.discard(voter)
            self._until.pop(voter, None)

    def tick(self) -> list[Voter]:
        """Who has given up, and has had its time to wait anew."""
        running_s, members = self._ground.running_s, self._ground.members
        if self._awaited and running_s >= self._again_run:
            self._gap_s *= 2
            self._again_run = running_s + self._gap_s
            for voter in sorted(self._awaited):
                if not members.gone(voter):
                    self._ground.send(voter, self._begin)
        return [voter for voter, until in self._until.items() if running_s >= until]

    def next_deadline(self) -> float | None:
        """Absolute time of the next tick that is needed."""
        due = [*self._until.values(), *([self._again_run] if self._awaited else [])]
        return self._ground.at(min(due)) if due else None
