"""One probe: a ping, the request to others to ping for me, and what an answer measures.

Every ping has a nonce of its own and is remembered until it is answered or old, long after its probe was judged: a late
answer is still a proof, as of the time its ping was sent. What silence means is decided in detector.py.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from dlc.comm.effects import Effect, Send
from dlc.comm.health import RTT_DEFAULT_S, RTT_MAX_S, LocalTime
from dlc.comm.ids import PeerId
from dlc.comm.messages import Ping, PingReq
from dlc.comm.piggyback import Piggyback
from dlc.comm.records import Member, RecordTable, Standing

HELPERS_MAX = 3
"""Peers asked to ping for me; SWIM's k."""
PINGS_MAX = 8192
"""Unanswered pings that are remembered; the oldest go first."""
FROZEN_S_MIN = 0.5
"""Elapsed time less running time since a ping: more than this means that I was not scheduled in between."""
PING_KEEP_S = 30.0
"""An answer that is later than this tells nothing."""


@dataclass(slots=True, eq=False)
class SentPing:
    """A ping of mine that may still be answered."""

    peer: PeerId
    sent_run: float
    sent_at: float
    generation: int
    own_seq: int
    """The receiver has my record up to this version if it answers."""
    origin: PeerId | None = None
    """On whose behalf: it gets an IndirectAck with `origin_nonce`."""
    origin_nonce: int = 0


class Prober:
    def __init__(
        self, table: RecordTable, news: Piggyback, time: LocalTime, rng: random.Random, out: list[Effect]
    ) -> None:
        self.generation = 0
        """Raised by each refresh; pings carry it here, in my memory."""
        self.pings: OrderedDict[int, SentPing] = OrderedDict()
        self.heard_run = 0.0
        """When the newest answered ping to anybody was sent."""
        self._table = table
        self._news = news
        self._time = time
        self._rng = rng
        self._out = out

    def probe(self, member: Member, scored: bool) -> None:
        """Ping, and set when others are to be asked and when the probe counts as missed."""
        time = self._time
        member.probe_nonce, member.probe_run, member.probe_scored = self._send(member), time.running_s, scored
        direct_s = time.timeouts.probe_s
        if member.rtt_s >= 0:
            direct_s = max(direct_s / 2, member.rtt_s + 4 * member.rtt_var_s)
        indirect_s = max(time.timeouts.probe_s, 2 * (time.rtt_max_s + 4 * time.rtt_var_s))
        # A probe that outlasts T_dead tells nothing more, and keeps the next ping waiting.
        member.direct_until_run = time.running_s + min(direct_s * time.health, time.t_dead_s / 2)
        member.probe_until_run = min(member.direct_until_run + indirect_s * time.health, time.running_s + time.t_dead_s)

    def ask_others(self, member: Member, live: Sequence[Member]) -> None:
        """The direct way is silent: up to HELPERS_MAX others ping for me, the last that succeeded among them."""
        member.direct_until_run = math.inf
        dead = member.standing is Standing.DEAD
        # Voters are dead for long only where no quorum lives: whether one can be reached then decides about a fork.
        count = 1 if dead and not member.watched else HELPERS_MAX
        helpers: list[Member] = []
        # The last relay that succeeded comes first; to the dead it leads no more, and all others must get their turn.
        if not dead and member.relay is not None and (last := self._table.members.get(member.relay)) is not None:
            helpers.append(last)
        drawn = live if len(live) <= count else self._rng.sample(live, min(count + 2, len(live)))
        helpers += [other for other in drawn if other is not member and other not in helpers]
        for helper in helpers[:count]:
            request = PingReq(member.probe_nonce, member.voter.peer, self._news.fill(helper))
            self._out.append(Send(helper.voter.peer, request))

    def again(self, member: Member) -> None:
        """A second ping for the same probe: an answer to either is a proof."""
        self._send(member)

    def tell(self, member: Member) -> None:
        """A ping beside any probe, for the news that it carries."""
        self._send(member)

    def ping_for(self, member: Member, origin: PeerId, nonce: int) -> None:
        """Ping once on behalf of another peer."""
        ping = self.pings[self._send(member)]
        ping.origin, ping.origin_nonce = origin, nonce

    def answered(self, member: Member, ping: SentPing, relay: PeerId | None) -> None:
        """Note what the answer to `ping` proves and measures."""
        if ping.generation == self.generation:
            member.generation = self.generation
        if relay is None:
            self._measure_rtt(member, ping)
            member.direct_run, member.relayed_run = max(member.direct_run, ping.sent_run), math.inf
            member.acked_seq = max(member.acked_seq, ping.own_seq)
        else:
            member.relay, member.relayed_run = relay, min(member.relayed_run, self._time.running_s)
        member.proof_run = max(member.proof_run, ping.sent_run)
        self.heard_run = max(self.heard_run, ping.sent_run)

    def measure(self, live: Sequence[Member]) -> None:
        """Once per probe period: round trips of those alive; old pings are forgotten."""
        time = self._time
        rtt_max_s, rtt_var_s = -1.0, 0.0
        for member in live:
            if member.rtt_s > rtt_max_s:
                rtt_max_s = member.rtt_s
            if member.rtt_var_s > rtt_var_s:
                rtt_var_s = member.rtt_var_s
        time.measured(rtt_max_s if rtt_max_s >= 0 else RTT_DEFAULT_S, rtt_var_s)
        while self.pings:
            nonce, ping = next(iter(self.pings.items()))
            if ping.sent_run + PING_KEEP_S > time.running_s:
                break
            del self.pings[nonce]

    def _send(self, member: Member) -> int:
        time = self._time
        nonce = self._rng.getrandbits(62) | 1
        peer = member.voter.peer
        self.pings[nonce] = SentPing(peer, time.running_s, time.last, self.generation, self._table.own_seq)
        if len(self.pings) > PINGS_MAX:
            self.pings.popitem(last=False)
        self._out.append(Send(peer, Ping(nonce, self._news.fill(member, ping=True))))
        return nonce

    def _measure_rtt(self, member: Member, ping: SentPing) -> None:
        """Only what both ends were awake for: an answer that lay in a queue during a freeze measures the freeze."""
        time = self._time
        elapsed_s, running_s = time.last - ping.sent_at, time.running_s - ping.sent_run
        if elapsed_s - running_s < FROZEN_S_MIN and running_s < time.t_dead_s:
            self._sample_rtt(member, elapsed_s)

    def _sample_rtt(self, member: Member, sample_s: float) -> None:
        """Jacobson's estimator, as in TCP; one sample a round trip: pings that were on their way together, until the
        first answer to one of them, count as the quickest. Who slept answers many at once, and each would stretch
        T_dead, and let a later one count that stretches it again."""
        sent_at, sample_s = self._time.last - sample_s, min(sample_s, RTT_MAX_S)
        if sent_at >= member.sampled_at:
            member.sampled_at, member.rtt_before = self._time.last, (member.rtt_s, member.rtt_var_s)
        elif sample_s >= member.sample_s:
            return
        member.sample_s = sample_s
        rtt_s, rtt_var_s = member.rtt_before
        if rtt_s < 0:
            member.rtt_s, member.rtt_var_s = sample_s, sample_s / 2
            return
        member.rtt_var_s = rtt_var_s + (abs(sample_s - rtt_s) - rtt_var_s) / 4
        member.rtt_s = rtt_s + (sample_s - rtt_s) / 8
