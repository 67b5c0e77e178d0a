"""How long an owner waits for whose parts: deadlines from measured pace (docs/protocol.md, "Timeouts").

A contributor is *late* in a plan, once one of these is true:

- it has been silent for longer than its own pace explains (T_chunk): three times the longest pause between two of its
  parts lately, or what is to be expected of an uplink such as it tells in its record. A pause that its pace did not
  explain (a cut, a sleep) counts as T_chunk, and none counts where contributions become final only on the way. Of whom
  nothing has come in this plan, that is at least as long as a connection takes to be made, and to carry one;
- all in all it was waited for three times as long as such a silence and all that it owes me take together, at the rate
  of its earlier rounds, or at that of most others now where they are slower.

The second rule is there for the peer that answers pings and trickles: each part comes in time, the whole never does.
Waited for is who lacks in the next open chunk, and has sent nothing since I looked last. Parts come in order, so
whoever is only held up by a slower one (its window is full) is not accused.

Where contributions become final only while the round goes on (`filling.py`), nobody is silent before OVERTIME times as
long has passed as the slowest of them expects.

All times are running times: while I was not scheduled, parts lay unread in my own sockets.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

from dlc.comm.context import Context
from dlc.comm.ids import Voter

FIRST_RATE_Bps = 1 << 20
"""Bytes per second assumed of a contributor's whole uplink that tells none, and until parts have come from it."""
RATE_MIN_Bps = 64 << 10
"""No contributor is taken for slower than this: at less, a large vector would hold up everybody for days."""
RATE_SHARE_NEW = 0.5
"""Weight of the newest round in a contributor's rate."""
GAP_S_MAX = 20.0
"""A longer pause between two parts counts as this: T_chunk grows to three times it and no further."""
GAP_DECAY = 0.9
"""What is left of the longest pause after each further part."""
SETUP_TRIPS = 6
"""Round trips from a plan to the first bytes on a connection that is made for it: the handshakes of TCP, ZMTP and CURVE
take five (3.0 s at 0.6 s), the plan and the bytes half of one each."""
FIRST_WINDOW_BYTES = 14_600
"""What a new connection, or one that was idle, sends in its first round trip (RFC 6928): in each further one twice as
much."""
OVERTIME = 3.0
"""Times the prediction that a contributor may be waited for."""


class Patience:
    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self._n_recipients = 0
        self._chunk_bytes = 0
        """Of a part and a result."""
        self._owed_bytes = 0
        self.fills_until = 0.0
        """Running time; until then a contribution may not be final yet."""
        self._since = 0.0
        self._last_close = 0.0
        self._looked = 0.0
        self._heard: dict[Voter, float] = {}
        self._received: dict[Voter, int] = {}
        self._waited_s: dict[Voter, float] = {}
        self._late: set[Voter] = set()
        """Given up in this plan, until something comes from them: one silence is waited out once only."""
        self.last_came = 0.0
        """Running time at which a result of anybody came last."""
        self._came: dict[Voter, float] = {}
        """When a message of each came last, in this plan."""
        self._pause_s: dict[Voter, float] = {}
        """The longest pause between two messages of each lately, in this plan."""
        self._gap: dict[Voter, float] = {}
        self._rate_Bps: dict[Voter, float] = {}

    def begin(
        self,
        roster: Iterable[Voter],
        n_recipients: int,
        part_bytes: int,
        result_bytes: int,
        owed_bytes: int,
        fill_s: float = 0.0,
    ) -> None:
        """A plan begins: each of the roster owes me `owed_bytes`, in parts of `part_bytes`, and serves so many
        recipients of its parts and results. `fill_s`: until all expect to have what they offer."""
        self._learn_rates()
        now = self._since = self._last_close = self._looked = self.ctx.running_s
        self._n_recipients, self._chunk_bytes, self._owed_bytes = n_recipients, part_bytes + result_bytes, owed_bytes
        self.fills_until = now + OVERTIME * fill_s
        self._heard = dict.fromkeys(roster, now)
        self._received = dict.fromkeys(self._heard, 0)
        self._waited_s = dict.fromkeys(self._heard, 0.0)
        self.last_came, self._came, self._pause_s = now, {}, {}
        self._late = set()
        self._gap = {v: gap_s for v, gap_s in self._gap.items() if v in self._heard}
        self._rate_Bps = {v: rate for v, rate in self._rate_Bps.items() if v in self._heard}

    def _learn_rates(self) -> None:
        for voter, size in self._received.items():
            seconds = self._heard[voter] - self._since
            if size and seconds > 0:
                rate = size / seconds
                self._rate_Bps[voter] = rate + (1 - RATE_SHARE_NEW) * (self._rate_Bps.get(voter, rate) - rate)

    def heard(self, voter: Voter, size: int) -> None:
        """A part of `size` bytes came."""
        self._arrived(voter)
        if voter not in self._heard:
            return
        now = self.ctx.running_s
        # Until I closed a chunk its window may have been full.
        gap_s = max(0.0, now - max(self._heard[voter], self._last_close, self.fills_until))
        if self.fills_until > self._since:
            gap_s = 0.0  # it may have had nothing to send
        known_s = GAP_DECAY * self._gap.get(voter, 0.0)
        self._gap[voter] = known_s if gap_s <= known_s else max(known_s, min(gap_s, self._pace_s(voter)))
        self._heard[voter] = now
        self._received[voter] += size
        if not self._overdue(voter):
            self._late.discard(voter)

    def began(self, voter: Voter) -> bool:
        """Some of its parts have come in this plan."""
        return bool(self._received.get(voter))

    def sign(self, voter: Voter) -> None:
        """A result of its came: its uplink serves these, too, and is not silent."""
        self._arrived(voter)
        self.last_came = self.ctx.running_s
        if voter in self._heard:
            self._heard[voter] = self.ctx.running_s

    def _arrived(self, voter: Voter) -> None:
        """A message of its bulk came."""
        now = self.ctx.running_s
        pause_s = min(now - self._came.get(voter, now), GAP_S_MAX)
        self._pause_s[voter] = max(pause_s, GAP_DECAY * self._pause_s.get(voter, 0.0))
        self._came[voter] = now

    def closed(self) -> None:
        """I closed a chunk: whoever's window was full may send again from now on."""
        self._last_close = self.ctx.running_s

    def waiting_for(self, voters: Iterable[Voter]) -> None:
        """To be called now and then with those that my next open chunk lacks."""
        since, self._looked = self._looked, self.ctx.running_s
        waited_s = self._looked - max(since, self.fills_until)
        for voter in voters:
            if waited_s > 0 and self._heard.get(voter, self._since) <= since:
                self._waited_s[voter] = self._waited_s.get(voter, 0.0) + waited_s

    def given_up(self, voter: Voter) -> bool:
        """It is late: not waited for any longer in this plan."""
        if voter in self._late:
            return True
        silent_since = max(self._heard.get(voter, self._since), self._last_close, self.fills_until)
        if self.ctx.running_s - silent_since > self.silence_s(voter) or self._overdue(voter):
            self._late.add(voter)
            return True
        return False

    def own_overdue(self) -> bool:
        """My own contribution should have been final: I close without what is not."""
        members = self.ctx.members
        return self.ctx.running_s - self.fills_until > members.timeouts.t_chunk_s(members.rtt_max_s, 0.0)

    def _overdue(self, voter: Voter) -> bool:
        waited_s = self._waited_s.get(voter, 0.0)
        return waited_s > 0 and waited_s > self.whole_s(voter)

    def silence_s(self, voter: Voter) -> float:
        """T_chunk: the longest silence that its pace explains, and more where I am slow myself."""
        silence_s = self._pace_s(voter)
        if not self._received.get(voter):
            silence_s = max(silence_s, self._start_s(voter))
        return silence_s * self.ctx.members.health

    def underway_s(self, voter: Voter) -> float:
        """How long what it has sent may stay away: three of the pauses between what came of it in this plan, and half
        of the least T_chunk at least; half of T_chunk where no pause is known."""
        members, pause_s = self.ctx.members, self._pause_s.get(voter, 0.0)
        if not pause_s:
            return self.silence_s(voter) / 2
        floor_s = members.timeouts.t_chunk_s(members.rtt_s(voter.peer), 0.0) / 2
        return max(floor_s, members.timeouts.chunk_gaps * pause_s) * members.health

    def _start_s(self, voter: Voter) -> float:
        """Until its first part is here, with a result before it, if its connection has yet to be made."""
        trips = SETUP_TRIPS + math.log2(1 + self._chunk_bytes / FIRST_WINDOW_BYTES)
        return trips * self.ctx.members.rtt_s(voter.peer)

    def _pace_s(self, voter: Voter) -> float:
        """Of its pace alone. Parts come whole, so a slow link is silent at times."""
        members = self.ctx.members
        record = members.record(voter.peer)
        rate_Bps = record.up_Bps if record is not None and record.up_Bps > 0 else FIRST_RATE_Bps
        # Between two parts for me its uplink carries a part and a result for everybody.
        expected_s = self._n_recipients * self._chunk_bytes / max(rate_Bps, RATE_MIN_Bps)
        gap_s = min(max(self._gap.get(voter, 0.0), expected_s), GAP_S_MAX)
        return members.timeouts.t_chunk_s(members.rtt_s(voter.peer), gap_s)

    def whole_s(self, voter: Voter) -> float:
        """The longest that it is waited for in one plan, all silences together."""
        rate_Bps = self._rate_Bps.get(voter, FIRST_RATE_Bps / max(1, self._n_recipients))
        passed_s = self.ctx.running_s - self._since
        if passed_s > 0 and self._received:  # where everybody is slow it is the network, or me
            rate_Bps = min(rate_Bps, statistics.median(self._received.values()) / passed_s)
        return OVERTIME * (self.silence_s(voter) + self._owed_bytes / max(rate_Bps, RATE_MIN_Bps))
