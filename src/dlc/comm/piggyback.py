"""What travels on pings and answers besides the proof itself (SWIM's infection-style dissemination).

- **News**: a record or rumour that changed my table is passed on about 3 log2(N+1) times, then it has reached everybody
  with high probability. The queues hold peers, not contents: what is sent is always the newest.
- **My own record**: on every message to a peer that has not yet proved (by an answer) to have its current version.
- **One other record, drawn at random, on each ping**: whatever news was lost reaches everybody in time.
- **The table**, or a sample of it where it is large, to a peer that I meet for the first time, or again.
- **A rumour about the receiver itself**, until it is refuted: the one who can refute it must hear it.

Every message is bounded: by counts here, in bytes by the limits of a record.
"""

from __future__ import annotations

import math
import random
from itertools import islice

from dlc.comm.ids import PeerId
from dlc.comm.messages import Gossip, Record, Rumour
from dlc.comm.records import Member, RecordTable, Standing

NEWS_RECORDS_MAX = 6
"""Changed records in one message."""
NEWS_RUMOURS_MAX = 16
"""Rumours in one message."""
TABLE_RECORDS_MAX = 64
"""Records told on first contact: the whole table of a common swarm, a random sample of a larger one."""
COPIES_PER_LOG = 3
"""Times log2(N+1): how often a piece of news is passed on."""

NOTHING = Gossip((), ())


class Piggyback:
    def __init__(self, table: RecordTable, rng: random.Random) -> None:
        self.refutation = 0
        """My own counter: raised to refute what is said of me."""
        self._table = table
        self._rng = rng
        self._records: dict[PeerId, int] = {}
        self._rumours: dict[PeerId, int] = {}

    def add_record(self, peer: PeerId) -> None:
        self._records.pop(peer, None)
        self._records[peer] = self._copies()

    def add_ghost(self, peer: PeerId) -> None:
        """Tell the leave of this peer again, unless it is being told anyway."""
        if peer not in self._records:
            self.add_record(peer)

    def add_rumour(self, peer: PeerId) -> None:
        self._rumours.pop(peer, None)
        self._rumours[peer] = self._copies()

    def fill(self, target: Member | None, ping: bool = False) -> Gossip:
        """What to tell `target` (None: a stranger, who gets to know who I am)."""
        table = self._table
        if target is None:
            return Gossip((table.own,), ())
        peer = target.voter.peer
        records: list[Record] = []
        if target.acked_seq < table.own_seq:
            records.append(table.own)
        if target.owed_table:
            target.owed_table = False
            records += self._sample(peer)
        elif self._records:
            records += filter(None, map(self._record, _take(self._records, NEWS_RECORDS_MAX, peer)))
        if ping and (others := table.order()):
            other = others[int(self._rng.random() * len(others))]
            if other != peer:
                records.append(table.members[other].record)
        rumours: list[Rumour] = []
        if target.told[1] != Standing.ALIVE:
            rumours.append(_rumour(target))
        if self._rumours:
            rumours += filter(None, map(self._rumour, _take(self._rumours, NEWS_RUMOURS_MAX, peer)))
        return Gossip(tuple(records), tuple(rumours)) if records or rumours else NOTHING

    def _copies(self) -> int:
        return math.ceil(COPIES_PER_LOG * math.log2(len(self._table.members) + 2))

    def _record(self, peer: PeerId) -> Record | None:
        member = self._table.members.get(peer)
        return member.record if member is not None else self._table.tombstones.get(peer)

    def _rumour(self, peer: PeerId) -> Rumour | None:
        if peer == self._table.me.peer:
            return Rumour(self._table.me, Standing.ALIVE, self.refutation)
        member = self._table.members.get(peer)
        return None if member is None else _rumour(member)

    def _sample(self, peer: PeerId) -> list[Record]:
        others = self._table.order()
        if len(others) > TABLE_RECORDS_MAX:
            others = self._rng.sample(others, TABLE_RECORDS_MAX)
        return [self._table.members[other].record for other in others if other != peer]


def _rumour(member: Member) -> Rumour:
    refutation, state = member.told
    return Rumour(member.voter, state, refutation)


def _take(queue: dict[PeerId, int], limit: int, skip: PeerId) -> list[PeerId]:
    """The first peers of the queue, moved to its end with one copy less; `skip` knows its own news best."""
    taken = [peer for peer in islice(queue, limit + 1) if peer != skip][:limit]
    for peer in taken:
        copies = queue.pop(peer) - 1
        if copies > 0:
            queue[peer] = copies
    return taken
