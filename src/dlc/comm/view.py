"""What the other machines ask about the members: nothing here changes anything.

Answers refer to the last event that the membership machine saw.
"""

from __future__ import annotations

import random

from dlc.comm.detector import Detector
from dlc.comm.entries import LogState
from dlc.comm.health import RTT_DEFAULT_S, LocalTime
from dlc.comm.ids import PeerId, Voter
from dlc.comm.messages import Record
from dlc.comm.piggyback import Piggyback
from dlc.comm.records import RecordTable, Standing, key_of


class View:
    """The readable side of Membership."""

    def __init__(self, table: RecordTable, time: LocalTime, rng: random.Random) -> None:
        self.me = table.me
        self.timeouts = time.timeouts
        self._table = table
        self._time = time
        self._news = Piggyback(table, rng)
        self._detector = Detector(table, self._news, time, rng)
        self._prober = self._detector.prober
        self._out = self._detector.out
        self._watched: dict[Voter, float] = {}
        """The electorate, with the running time since which each one has been in it."""
        self._left = False
        self._living: tuple[Voter, ...] = ()
        self._living_for: tuple[tuple[Voter, ...], frozenset[Voter], bool] | None = None
        """Who was asked for, and who was alive, when `_living` was found."""
        self._ahead: list[Record] = []
        self._ahead_of: tuple[LogState, list[Record]] | None = None
        """The state and the list of records that `_ahead` was found from."""

    # ------------------------------------------------------------------ questions

    @property
    def own(self) -> Record:
        """My current record, signed."""
        return self._table.own

    def alive(self, voter: Voter) -> bool:
        """This very process answered a ping of mine, directly or indirectly, within T_dead of running time."""
        if voter == self.me:
            return not self._table.gone(voter)
        member = self._table.members.get(voter.peer)
        return member is not None and member.voter == voter and self._detector.alive(member)

    def awake(self, voter: Voter) -> bool:
        """It is alive, and does not say that it is stale: what it owes as a voter will come."""
        record = self.record(voter.peer)
        return record is not None and not record.stale and self.alive(voter)

    def up(self, voter: Voter) -> bool:
        """It answered me once, and nothing says since that it is dead, or gone. Weaker than `alive`, which holds in
        swarms of up to HEARTBEATS_MAX only: larger ones ping in turn."""
        if voter == self.me:
            return not self._left
        member = self._table.members.get(voter.peer)
        return member is not None and member.voter == voter and member.standing in (Standing.ALIVE, Standing.SUSPECT)

    def suspect(self, voter: Voter) -> bool:
        """It missed a probe, and has not answered since."""
        member = self._table.members.get(voter.peer)
        return member is not None and member.voter == voter and member.standing is Standing.SUSPECT

    def living(self, voters: tuple[Voter, ...]) -> tuple[Voter, ...]:
        """Those of `voters` that are alive, in their order.

        Asked of the electorate at every tick, while answers seldom change: the last one is kept until it does."""
        found_for = (voters, self._detector.living(), self.alive(self.me))
        if found_for != self._living_for:
            self._living_for = found_for
            self._living = tuple(voter for voter in voters if self.alive(voter))
        return self._living

    def away(self, voter: Voter) -> bool:
        """It does not answer, but did within T_evict, and nothing says that its process has ended: its host may be cut
        off, or stand still."""
        member = self._table.members.get(voter.peer)
        if member is None or member.voter != voter or member.refused or self.alive(voter):
            return False
        return not self.gone(voter) and self._time.running_s - member.seen_run < self.t_evict_s

    def gone(self, voter: Voter) -> bool:
        """Proof that the process is no more: a signed leave, or a signed record of its peer with a greater inc."""
        return self._table.gone(voter)

    def refreshed(self, voter: Voter) -> bool:
        """It answered a ping that was sent after the last `begin_refresh`."""
        if voter == self.me:
            return True
        member = self._table.members.get(voter.peer)
        return member is not None and member.voter == voter and member.generation == self._prober.generation

    def unseen_s(self, voter: Voter) -> float:
        """Running time since the last two-way proof; where there was none, since it was first heard of."""
        if voter == self.me:
            return 0.0
        member = self._table.members.get(voter.peer)
        if member is not None and member.voter == voter:
            return self._time.running_s - member.seen_run
        known = self._table.forgotten.get(voter.peer)
        if known is not None and known.voter == voter:
            return self._time.running_s - known.seen_run
        return self._time.running_s - self._watched.get(voter, self._time.running_s)

    def record(self, peer: PeerId) -> Record | None:
        """The newest known; None for one that left."""
        if peer == self.me.peer:
            return None if self._left else self._table.own
        member = self._table.members.get(peer)
        return None if member is None else member.record

    def records(self) -> list[Record]:
        """The newest of each known peer, mine first; those that left are not listed. Not to be changed."""
        return self._table.records()

    def departed(self) -> list[Record]:
        """The last of each peer that has left, and has not come back."""
        return list(self._table.tombstones.values())

    def ahead_of(self, state: LogState) -> list[Record]:
        """Records of histories greater than this, alive or not, the greatest first; not to be changed.

        Asked after every message, while records and heads seldom change: the last answer is kept until one does."""
        records, known = self._table.records(), self._ahead_of
        if known is None or known[0] is not state or known[1] is not records:
            self._ahead_of = (state, records)
            self._ahead = sorted((r for r in records if key_of(r) > state.key), key=key_of, reverse=True)
        return self._ahead

    def relay_for(self, peer: PeerId) -> PeerId | None:
        """None: send directly. Else the direct way fails, and this is the peer through which a ping succeeded last."""
        member = self._table.members.get(peer)
        if member is None or member.relay is None or self._detector.direct(member):
            return None
        if member.direct_run >= member.proof_run:  # in swarms too large to ping all of them it may be long ago
            return None
        relay = self._table.members.get(member.relay)
        return member.relay if relay is not None and self._detector.alive(relay) else None

    @property
    def running_s(self) -> float:
        """Sum of min(now - last, 1 s) over events: what I lived through, not what passed while I was frozen."""
        return self._time.running_s

    @property
    def health(self) -> int:
        """Local health: 1 = I answer in time, up to 8 = slow."""
        return self._time.health

    # ------------------------------------------------------------------ measured deadlines

    def rtt_s(self, peer: PeerId) -> float:
        """Smoothed round trip of the control lane."""
        member = self._table.members.get(peer)
        return RTT_DEFAULT_S if member is None or member.rtt_s < 0 else member.rtt_s

    @property
    def rtt_max_s(self) -> float:
        """The greatest among those alive, as of the last probe period."""
        return self._time.rtt_max_s

    @property
    def rtt_var_s(self) -> float:
        """The greatest deviation among those alive, as of the last probe period."""
        return self._time.rtt_var_s

    @property
    def t_dead_s(self) -> float:
        return self._time.t_dead_s

    @property
    def t_remove_s(self) -> float:
        return self.timeouts.t_remove_s(self._time.n, self._time.widening)

    @property
    def t_evict_s(self) -> float:
        return self.timeouts.t_evict_s(self._time.n, self._time.widening)

    @property
    def t_gap_s(self) -> float:
        return self.timeouts.t_gap_s()

    @property
    def t_refresh_s(self) -> float:
        return self.timeouts.t_refresh_s(self._time.n, self._time.widening, self.rtt_max_s)

    @property
    def t_coord_s(self) -> float:
        return self.timeouts.t_coord_s(self._time.n, self._time.widening, self.rtt_max_s)

    @property
    def t_prep_s(self) -> float:
        return self.timeouts.t_prep_s(self.rtt_max_s, self.rtt_var_s)
