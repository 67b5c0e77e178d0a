"""The failure detector: who is probed when, and what silence means (SWIM, Das et al. 2002, with Lifeguard's health).

    NEW ── proof ──> ALIVE ── probe missed, suspect rumour, refused ──> SUSPECT ── T_dead ──> DEAD
                       ^                                                   │                   │
                       └──────────────────── proof ────────────────────────┴───────────────────┘

- **Proof** is an answer to my own ping, direct or through another peer, and dates from when that ping was *sent*:
  what lay in a queue while somebody was frozen proves nothing about now.
- **Probe**: ping; after an RTT-adaptive time ping again and ask others to ping for me; after that again the probe is
  missed. A peer that missed one is probed again at once, not in its turn: lost packets are common, deaths are not.
- **Who is probed**: one peer in shuffled order each probe period; the electorate each T_dead/2, dead or not; all other
  live peers at the same pace in swarms up to HEARTBEATS_MAX, so that `alive` does not flicker. The dead outside the
  electorate are contacted in membership.py, one at a time and for ever.
- **Suspicion** ends by proof, by the suspect's own refutation, or in death after T_dead. **Doubt** is strong evidence
  (a refused connection, a death rumour): the peer is pinged at once and has two probe periods to answer; one that had
  missed `MISSED_ENOUGH` probes of mine by then is dead. Who finds a death tells it at once.
- A member is DEAD only as long as it does not answer. Rumours tell where to look; they never overrule a proof.

Times here are running times (health.py). The detector appends what it wants sent or told to `out`.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Container

from dlc.comm.effects import Effect, Notify
from dlc.comm.events import Apart, MemberDown, MemberSuspect, MemberUp
from dlc.comm.health import LocalTime
from dlc.comm.ids import PeerId, Voter
from dlc.comm.messages import Rumour
from dlc.comm.piggyback import Piggyback
from dlc.comm.probing import Prober, SentPing
from dlc.comm.records import NEVER, NUMBER_MAX, Member, RecordTable, Standing

HEARTBEATS_MAX = 64
"""Largest swarm in which live peers outside the electorate are pinged each T_dead/2, and not in their turn only."""
TOLD_AT_ONCE_MAX = 16
"""Peers that hear of a death from its finder at once; those of a larger swarm by gossip."""
MISSED_ENOUGH = 2
"""Probes missed in a row that, together with another peer's verdict, need no further one."""
SLACK_S = 1e-6
"""Rounding of sums of clock differences: a timer this near is due."""
STEP_MIN_S = 1e-3
"""A timer is set at least this far ahead."""


class Detector:
    def __init__(self, table: RecordTable, news: Piggyback, time: LocalTime, rng: random.Random) -> None:
        self.out: list[Effect] = []
        self.prober = Prober(table, news, time, rng, self.out)
        self._table = table
        self._news = news
        self._time = time
        self._rng = rng
        self._timers: list[tuple[float, int, Member]] = []
        self._tie = 0
        self._turns: list[Member] = []
        self._alive: list[Member] | None = None
        self._living: frozenset[Voter] = frozenset()
        self._living_until_run = NEVER
        """Until then nobody ceases to be alive by the mere passing of time; NEVER: to be found out anew."""
        self._living_t_dead_s = 0.0
        self._probe_run = 0.0

    # ------------------------------------------------------------------ questions

    def alive(self, member: Member) -> bool:
        time = self._time
        return (
            member.standing is not Standing.DEAD
            and time.running_s - member.proof_run < time.t_dead_s
            and time.running_s < member.verdict_run
        )

    def living(self) -> frozenset[Voter]:
        """All voters that are alive; the same object until one becomes so or ceases to be."""
        time = self._time
        if time.running_s >= self._living_until_run or time.t_dead_s != self._living_t_dead_s:
            alive = [m for m in self._table.members.values() if self.alive(m)]
            ends_run = (min(m.verdict_run, m.proof_run + time.t_dead_s) - SLACK_S for m in alive)
            self._living_until_run, self._living_t_dead_s = min(ends_run, default=math.inf), time.t_dead_s
            living = frozenset(m.voter for m in alive)
            if living != self._living:
                self._living = living
        return self._living

    def direct(self, member: Member) -> bool:
        return self._time.running_s - member.direct_run < self._time.t_dead_s

    def live_members(self) -> list[Member]:
        """Those that stand as ALIVE; not to be changed."""
        if self._alive is None:
            self._alive = [m for m in self._table.members.values() if m.standing is Standing.ALIVE]
        return self._alive

    # ------------------------------------------------------------------ time

    def tick(self) -> None:
        running_s = self._time.running_s + SLACK_S
        while self._timers and self._timers[0][0] <= running_s:
            at_run, _, member = heapq.heappop(self._timers)
            if member.timer_run == at_run:
                member.timer_run = math.inf
                self._wake(member)
        if self._probe_run <= running_s:
            self._probe_run = self._time.running_s + self._time.timeouts.probe_s
            self._next_turn()
            self.prober.measure(self.live_members())

    def next_run(self) -> float:
        timers, soonest_run = self._timers, self._probe_run
        while timers and timers[0][2].timer_run != timers[0][0]:
            heapq.heappop(timers)
        return timers[0][0] if timers and timers[0][0] < soonest_run else soonest_run

    def _wake(self, member: Member) -> None:
        """Do what is due for one member, and set its next timer."""
        running_s = self._time.running_s + SLACK_S
        if running_s < self._time.grace_run:
            self._arm(member, self._time.grace_run)
            return
        if member.probe_nonce and running_s >= member.probe_until_run:
            self._missed(member)
        elif member.probe_nonce and running_s >= member.direct_until_run:
            self.prober.ask_others(member, self.live_members())
            if member.standing is not Standing.DEAD:
                self.prober.again(member)
        if member.standing is Standing.SUSPECT and running_s >= self._dead_run(member):
            self._dead(member)
        if not member.probe_nonce and running_s >= member.due_run:
            self.ping(member)
        self._arm(member)

    def _arm(self, member: Member, at_run: float = math.inf) -> None:
        if at_run == math.inf:
            if not member.probe_nonce:
                at_run = member.due_run
            else:
                at_run = min(member.direct_until_run, member.probe_until_run)
            if member.standing is Standing.SUSPECT:
                at_run = min(at_run, self._dead_run(member))
        at_run = max(at_run, self._time.running_s + STEP_MIN_S)
        if at_run < member.timer_run:
            member.timer_run = at_run
            self._tie += 1
            heapq.heappush(self._timers, (at_run, self._tie, member))

    def _next_turn(self) -> None:
        """SWIM's round-robin: each live peer once, in an order that is shuffled anew each time round."""
        fresh = False
        while True:
            if not self._turns:
                if fresh:
                    return
                fresh = True
                self._turns = [m for m in self._table.members.values() if m.standing is not Standing.DEAD]
                self._rng.shuffle(self._turns)
                continue
            member = self._turns.pop()
            if self._known(member) and member.standing is not Standing.DEAD and not member.probe_nonce:
                self.ping(member, scored=True)
                return

    # ------------------------------------------------------------------ probing

    def ping(self, member: Member, scored: bool = False) -> None:
        """Start a probe; one that was under way is forgotten, but its answer still counts."""
        self.prober.probe(member, scored)
        member.due_run = self._time.running_s + self._pace_s(member)
        if member.relay is not None and not self.direct(member):
            self.prober.ask_others(member, self.live_members())
        self._arm(member)

    def _pace_s(self, member: Member) -> float:
        """Until this member is pinged again outside its turn. Not stretched by local health: when that recovers, T_dead
        shrinks at once, and proofs must be young enough."""
        in_turn_only = member.standing is Standing.DEAD or self._time.n > HEARTBEATS_MAX
        return math.inf if in_turn_only and not member.watched else self._time.pace_s

    def proof(self, member: Member, nonce: int, ping: SentPing, relay: PeerId | None) -> None:
        """`member` answered `ping`: directly, or as `relay` says."""
        time = self._time
        if not self.alive(member):
            self._living_until_run = NEVER
        self.prober.answered(member, ping, relay)
        if time.running_s - ping.sent_run >= time.t_dead_s:
            self.hearing(member)
            return
        if ping.sent_run < member.doubt_run:
            return
        if relay is not None:
            self._apart(member, relay)
        if nonce == member.probe_nonce and member.probe_scored:
            time.better()
        member.verdict_run = math.inf
        member.probe_nonce = 0
        member.missed, member.refused = 0, False
        if member.standing is not Standing.ALIVE:
            member.owed_table = member.owed_table or member.standing is Standing.DEAD
            self._stand(member, Standing.ALIVE)
            self.out.append(Notify(MemberUp(member.voter)))
            member.due_run = min(member.due_run, time.running_s + self._pace_s(member))
            self._arm(member)

    def _apart(self, member: Member, relay: PeerId) -> None:
        """It answered by a relay. If it is pinged all the time, and has answered like this for T_dead, that is told."""
        paced, since_run = self._pace_s(member) != math.inf, member.relayed_run
        if paced and not member.told_apart and self._time.running_s - since_run >= self._time.t_dead_s:
            member.told_apart = True
            self.out.append(Notify(Apart(member.voter, relay)))

    def hearing(self, member: Member) -> None:
        """Something came from a member that has no standing as alive: it may be within reach."""
        if member.standing is not Standing.ALIVE and not member.probe_nonce:
            self.ping(member)

    # ------------------------------------------------------------------ standing

    def added(self, member: Member) -> None:
        """A voter that was not in the table."""
        self._recount()
        self.ping(member)

    def removed(self, member: Member) -> None:
        member.timer_run = math.inf
        self._recount()

    def watch(self, voters: Container[Voter]) -> None:
        for member in self._table.members.values():
            before, member.watched = member.watched, member.voter in voters
            if member.watched and not before:  # a probe under way may have been the last of one that is dead
                member.due_run = min(member.due_run, self._time.running_s + self._pace_s(member))
                self._arm(member)

    def doubt(self, member: Member) -> None:
        """Strong evidence that it is dead: it has about two probe periods to prove the contrary, or none."""
        if member.standing in (Standing.DEAD, Standing.NEW) or member.verdict_run < math.inf:
            return
        time = self._time
        probes = MISSED_ENOUGH - member.missed
        answer_s = max(time.timeouts.probe_s, 2 * (time.rtt_max_s + 4 * time.rtt_var_s))
        patience_s = answer_s + (probes - 1) * time.timeouts.probe_s if probes > 0 else 0.0
        self._living_until_run = NEVER
        member.doubt_run = time.running_s
        member.verdict_run = time.running_s + patience_s
        self._suspect(member)
        self.ping(member)

    def rumour(self, rumour: Rumour) -> None:
        """What others say of a voter; never stronger than my own proof."""
        if not (0 <= rumour.state <= Standing.DEAD and 0 <= rumour.refutation < NUMBER_MAX):
            return
        if rumour.voter == self._table.me:
            self._refute(rumour)
            return
        member = self._table.members.get(rumour.voter.peer)
        told = (rumour.refutation, rumour.state)
        if member is None or member.voter != rumour.voter or told <= member.told:
            return
        member.told = told
        self._news.add_rumour(rumour.voter.peer)
        if rumour.state == Standing.DEAD:
            self.doubt(member)
        elif rumour.state == Standing.SUSPECT:
            self._suspect(member)
        elif member.standing is Standing.DEAD:
            self.hearing(member)
        elif member.standing is Standing.SUSPECT and member.verdict_run == math.inf:
            self._stand(member, Standing.ALIVE)
            self.out.append(Notify(MemberUp(member.voter)))

    def _refute(self, rumour: Rumour) -> None:
        if rumour.state != Standing.ALIVE and rumour.refutation >= self._news.refutation:
            self._news.refutation = rumour.refutation + 1
            self._news.add_rumour(self._table.me.peer)
            self._time.worse()

    def _missed(self, member: Member) -> None:
        """A probe got no answer, direct or indirect."""
        time = self._time
        member.probe_nonce = 0
        member.missed += 1
        if member.standing is Standing.DEAD:
            return
        if self.prober.heard_run < member.probe_run and len(self.live_members()) > 1:
            time.worse()  # nobody at all answered: it is probably me
        member.due_run = time.running_s
        if member.standing is Standing.ALIVE and member.proof_run < member.probe_run:
            self._suspect(member)
        elif member.standing is Standing.NEW and time.running_s - member.first_run > time.t_dead_s:
            self._stand(member, Standing.DEAD)
            member.due_run = time.running_s + self._pace_s(member)

    def _suspect(self, member: Member) -> None:
        if member.standing is not Standing.ALIVE:
            return
        member.suspect_run = self._time.running_s
        self._stand(member, Standing.SUSPECT)
        self._spread(member, Standing.SUSPECT)
        self.out.append(Notify(MemberSuspect(member.voter)))
        self._arm(member)

    def _dead_run(self, member: Member) -> float:
        """When suspicion turns into death: its own time is over, a doubt was not answered, or the last proof, where
        one is asked for each T_dead/2, is too old for `alive`."""
        end_run = min(member.verdict_run, member.suspect_run + self._time.suspicion_s)
        if self._pace_s(member) != math.inf:
            end_run = min(end_run, member.proof_run + self._time.t_dead_s)
        return end_run

    def _dead(self, member: Member) -> None:
        self._stand(member, Standing.DEAD)
        member.verdict_run = math.inf
        member.probe_nonce = 0
        member.relayed_run = math.inf
        member.acked_seq = -1  # should it come back, it may have forgotten me
        member.due_run = self._time.running_s + self._pace_s(member)
        self._spread(member, Standing.DEAD)
        self.out.append(Notify(MemberDown(member.voter)))
        for other in self.live_members()[:TOLD_AT_ONCE_MAX]:
            self.prober.tell(other)  # rounds may be waiting for the dead

    def _spread(self, member: Member, state: Standing) -> None:
        """My own finding, under the newest refutation that I know of; a greater rumour stands."""
        member.told = max(member.told, (member.told[0], int(state)))
        self._news.add_rumour(member.voter.peer)

    def _stand(self, member: Member, standing: Standing) -> None:
        member.standing = standing
        self._recount()

    def _recount(self) -> None:
        self._alive, self._living_until_run = None, NEVER
        n = 1 + sum(m.standing is not Standing.DEAD for m in self._table.members.values())
        if n != self._time.n:
            self._time.n = n
            self._time.retune()

    def _known(self, member: Member) -> bool:
        return self._table.members.get(member.voter.peer) is member
