"""What must hold after every event (docs/protocol.md, "Invariants"): a wrong step raises `Violation`.

The checker sees what no peer sees: every vote and promise as it is sent (it stands between a node and its context),
every head, every freeze and cut. It remembers entries, states, digests and votes by hash, and looks only at what the
last event changed, so that checking costs less than what is checked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from dlc.comm import messages as msg
from dlc.comm.coordinator import IDLE
from dlc.comm.entries import EMPTY, OPEN, ROUND, Entry, LogState, Part, manifest_hash
from dlc.comm.events import ContributionDropped, DigestMismatch, HistoryLost, RoundDone
from dlc.comm.exchange import result_hash
from dlc.comm.ids import Ballot, Voter
from dlc.comm.log import Past, counted_of
from dlc.comm.probemessages import ProbePush
from dlc.sim import limits
from dlc.sim.ballots import Ballots
from dlc.sim.history import History
from dlc.sim.oracle import check_delivered, check_ledger, check_means, check_report
from dlc.sim.paths import Paths
from dlc.sim.schedule import TRAIN
from dlc.sim.toy import Means, ToyState
from dlc.sim.truth import Truth

if TYPE_CHECKING:
    from dlc.sim.world import Process, World

NO_ONE: frozenset[Voter] = frozenset()
LIMITS_EVERY = 32
"""Every so many events the buffers of the process at hand are measured."""
BEHIND_MAX = 3
"""Entries that a peer may be behind the greatest head while rounds go on."""
ROUNDS_AFTER = 3
"""Rounds that show that a run goes on."""
ROUND_S = 30.0
"""For a round, detection and eviction apart: an inner phase of 5 s, waiting for stragglers, chunks at 5 kB/s, what was
lost fetched again."""


class Violation(Exception):
    """An invariant does not hold."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name


class Checker:
    def __init__(self, world: World) -> None:
        self.world = world
        self.states: dict[bytes, LogState] = {EMPTY: LogState()}
        """The one state after each entry."""
        self.history = History()
        self.rounds = 0
        self.round_times: list[float] = []
        self.histories_lost = 0
        self._seen: dict[Process, tuple[bytes, tuple[float, int, bytes]]] = {}
        """Head and key of each process after its last event."""
        self._manifests: dict[tuple[bytes, Ballot], bytes] = {}
        self._results: dict[tuple[bytes, Ballot, int], msg.Result] = {}
        self._hashes: dict[int, tuple[msg.Result, bytes]] = {}
        """By the identity of a result, which is kept with its hash so that no other takes its place."""
        self._votes: dict[tuple[bytes, Ballot], set[Voter]] = {}
        self._ballots = Ballots()
        self._rosters: dict[bytes, dict[Ballot, frozenset[Voter]]] = {}
        """By slot: who contributes under the plan of each ballot."""
        self._pasts: dict[str, Past] = {}
        """Every round, by its hash in hex."""
        self._applied_at: dict[bytes, float] = {}
        """When each entry was first applied."""
        self._slept_through: dict[bytes, list[bytes]] = {}
        """By entry: the heads of those who had slept for about T_evict when it was first applied."""
        self._offers: dict[tuple[Process, str], tuple[float, Part | None]] = {}
        """Contributions whose end their trainer was not told yet: (process, channel), since when, which."""
        self._events = 0
        self._round_by = float("inf")
        """When the first round after the last fault must have been, at the latest."""
        self._misses = False
        """A state was found to be lost since the last fault."""
        self._moved: Process | None = None
        """Whose head the last event moved."""
        self._truth = Truth(self._first_state)
        self._true: set[tuple[Process, str]] = set()
        """(process, channel): whose state was the true one when its head last moved."""
        self.paths = Paths(world)

    @property
    def corrupt(self) -> Collection[Process]:
        """Processes whose state was wrong and is not known to be right again."""
        return self._truth.corrupt

    def paths_changed(self) -> None:
        self.paths.changed()

    # ---------------------------------------------------------------- what is sent

    def started(self, process: Process) -> None:
        """Stand between this process's machines and what they send."""
        node, ctx = process.node, process.node.ctx
        self._seen[process] = (node.log.head, node.log.state.key)
        send, cast = ctx.send, ctx.cast

        def watched_send(to: Voter, message: msg.Message) -> None:
            self._sent(process, message)
            send(to, message)

        def watched_cast(voters: Iterable[Voter], message: msg.Message) -> None:
            self._sent(process, message)
            cast(voters, message)

        ctx.send = watched_send  # type: ignore[method-assign]
        ctx.cast = watched_cast  # type: ignore[method-assign]
        log = node.log
        commit = log.commit

        def watched_commit(*args: Any) -> None:
            commit(*args)
            # At once: a lone voter decides several entries in one event, and its history may keep only the last.
            if log.head not in self.states:
                self._new_entry(process, log.past[-1])

        log.commit = watched_commit  # type: ignore[method-assign, assignment]

    def _sent(self, process: Process, m: msg.Message) -> None:
        if isinstance(m, msg.Held):
            self._voted(process, m)
        elif isinstance(m, msg.Promise | msg.Plan | msg.Prepare) and process.node.ctx.stale:
            raise Violation("I7", f"{process.voter} is stale and sends {type(m).__name__}")
        if isinstance(m, msg.Plan):
            self._rosters.setdefault(m.head, {})[m.ballot] = frozenset(part.voter for part in m.entry.roster)
            self._plan_sent(process, m)
            if self._truth.corrupt:
                self._planned(m)

    def _plan_sent(self, process: Process, plan: msg.Plan) -> None:
        promised, state = frozenset(plan.deciders or process.node.coordinator.heard()), process.node.log.state
        in_advance = state.ranked and plan.ballot == Ballot(0, state.ranked[0])
        if not (plan.deciders or in_advance or proper_quorum(promised, state)):
            raise Violation("I1", f"{process.voter} plans {plan.ballot} with the promises of {sorted(promised)} only")
        self._ballots.planned(plan.head, plan.ballot, promised)

    def _voted(self, process: Process, m: msg.Held) -> None:
        node, voter = process.node, process.voter
        slot, state = node.slot, node.log.state
        if node.ctx.stale:
            raise Violation("I7", f"{voter} votes while it is stale")
        if slot.accepted is None or slot.accepted[0] != m.ballot or m.ballot != slot.promised:
            raise Violation("I2", f"{voter} votes at {m.ballot}, promised {slot.promised}, accepted {slot.accepted}")
        key = (m.head, m.ballot)
        voters = self._votes.setdefault(key, set())
        if voter in voters and m.manifest == self._manifests[key]:
            return  # the same vote again
        decree, results = slot.accepted[1], slot.accepted_results
        entry_hash = decree.entry.hash
        plan = slot.plan
        deciders = frozenset(plan.deciders) if plan is not None and plan.ballot == m.ballot else NO_ONE
        if voter not in (deciders or state.electorate):
            raise Violation("I2", f"{voter} votes at {m.head[:3].hex()} and is no decider there")
        if decree.entry.kind == ROUND:
            hashes = tuple(self._hash_of(r) for r in results)
            if hashes != decree.hashes or manifest_hash(hashes) != m.manifest:
                raise Violation("I2", f"{voter} votes for a manifest whose bytes it does not hold")
        known = self._manifests.setdefault(key, m.manifest)
        value = self._ballots.value(m.head, m.ballot, entry_hash)
        if known != m.manifest or value != entry_hash:
            raise Violation("I3", f"two values in ballot {m.ballot} of slot {m.head[:3].hex()}")
        voters.add(voter)
        decides = deciders <= voters if deciders else proper_quorum(voters, state)
        deciding = (deciders or frozenset(voters & set(state.electorate))) if decides else NO_ONE
        why = self._ballots.voted(m.head, m.ballot, deciding, bool(deciders))
        if why:
            raise Violation("I1", f"slot {m.head[:3].hex()}: {why}")

    def _hash_of(self, result: msg.Result) -> bytes:
        """Hashed once for each object: results cannot be changed, and mostly are the same objects everywhere here."""
        known = self._hashes.get(id(result))
        if known is None:
            known = self._hashes[id(result)] = (result, result_hash(result))
        return known[1]

    def bulk_sent(self, process: Process, m: msg.Bulk) -> None:
        plan = process.node.slot.plan
        if isinstance(m, ProbePush) and plan is not None and plan.assignment:
            raise Violation("junk", f"{process.voter} probes its link in the middle of a round")
        if not isinstance(m, msg.Result):
            return
        key = (m.header.head, m.header.ballot, m.header.chunk)
        known = self._results.setdefault(key, m)
        if known is not m and known != m:
            raise Violation("I3", f"two results of chunk {key[2]} at {key[1]} of slot {key[0][:3].hex()}")

    # ---------------------------------------------------------------- after each event

    def after_event(self, process: Process) -> None:
        node = process.node
        if node.ctx.stale and node.coordinator.phase != IDLE:
            raise Violation("I7", f"{process.voter} coordinates while it is stale")
        self.paths.heard(process)
        self._events += 1
        if self._events % LIMITS_EVERY == 0 and (over := limits.over(process)):
            raise Violation("memory", f"{process.voter} keeps {over}")
        head, key = self._seen[process]
        log = node.log
        moved = log.head != head
        if moved:
            self._moved = process
            self._head_moved(process, key)
        if process in self._truth.corrupt:
            why = self._truth.look(process, jumped=moved and log.after(head) is None)
            if why:
                raise Violation("S1", f"{process.voter}, whose state was wrong, {why}")
        elif moved:
            self._check_digests(process, head)

    def _head_moved(self, process: Process, key: tuple[float, int, bytes]) -> None:
        log = process.node.log
        if log.state.key <= key:
            raise Violation("I6", f"{process.voter} goes from {key} down to {log.state.key}")
        self._seen[process] = (log.head, log.state.key)
        hashes = [p.entry.parent for p in log.past][1:] + [log.head]
        for past, entry_hash in zip(log.past, hashes, strict=False):
            if entry_hash not in self.states:
                self._new_entry(process, past)
        known = self.states.setdefault(log.head, log.state)
        if known != log.state:
            raise Violation("S1", f"two log states at head {log.head[:3].hex()}")

    # ---------------------------------------------------------------- states

    def _check_digests(self, process: Process, before: bytes) -> None:
        """S1: equal heads have equal states, and these are what the entries make of the first one.

        `before`: its head before this event.
        """
        log = process.node.log
        for channel, attached in log.attached.items():
            holds = (process, channel)
            if not (attached.synced and log.is_open(channel)):
                self._true.discard(holds)
                continue
            if attached.digest != attached.state.digest():
                raise Violation("S1", f"{process.voter} reports another digest than its state of {channel} has")
            if attached.digest == self._truth.digest(log.head, channel):
                self._true.add(holds)
                continue
            if self._truth.taken_for_true(log.head, channel, attached.digest):
                self._true.discard(holds)
                continue
            # A true state stays true by every entry, but where the swarm has given that state up; and what is fetched
            # is true, but where a fault has struck a donor.
            steps = log.after(before)
            lost = steps is not None and any(self._truth.given_up(step.entry.parent) for step in steps)
            if not self._truth.in_doubt or (holds in self._true and steps is not None and not lost):
                raise Violation("S1", f"{process.voter} has a wrong state of {channel} at head {log.head[:3].hex()}")
            self.corrupted(process)

    def corrupted(self, process: Process) -> None:
        """This process holds a wrong state."""
        self._truth.in_doubt = True
        self._truth.corrupt[process] = False
        self._true -= {holds for holds in self._true if holds[0] is process}

    def _planned(self, plan: msg.Plan) -> None:
        why = self._truth.planned(plan, self._sound(plan.head))
        if why:
            raise Violation("S1", why)

    def _sound(self, head: bytes) -> int:
        """Processes that hold the true state there; none if only observers do, who give it to nobody."""
        holders = [
            p
            for p in self.world.running()
            if p.node.log.head == head and p.node.log.synced and p not in self.corrupt and not p.left
        ]
        return len(holders) if any(p.host.role != "observer" for p in holders) else 0

    def _convicted(self, process: Process, event: DigestMismatch) -> None:
        head = process.node.log.head
        why = self._truth.told(process, event, head, self._sound(head))
        if why:
            raise Violation("S1", f"{process.voter} {why}")

    def _first_state(self, channel: str, digest: bytes) -> ToyState | None:
        """The first state with this digest: the hosts' own, in the order of their numbers."""
        return next((state for state in self.world.first_states(channel) if state.digest() == digest), None)

    # ---------------------------------------------------------------- entries

    def _new_entry(self, process: Process, past: Past) -> None:
        """The first time that this entry is applied anywhere."""
        entry = past.entry
        before = self.states.get(entry.parent)
        if before is None:
            return  # it came with a snapshot whose past nobody showed; cannot happen for a first application
        counted = counted_of(entry, past.results)
        after = before.apply(entry, counted)
        self.states[after.head] = after
        self._applied_at[after.head] = self.world.now
        self._slept_through[after.head] = [p.node.log.head for p in self.paths.asleep()]
        self._check_decided(process, entry)
        if entry.kind == ROUND:
            check_means(before, past, self.world.sizes(entry.channel), self._rosters.get(entry.parent, {}))
            self.rounds += 1
            self._pasts[after.head.hex()] = past
            if entry.channel == TRAIN:
                self.round_times.append(self.world.now)
        check_ledger(before, after, counted if entry.channel == TRAIN else ())
        why = self._truth.add(after.head, past, process.node.log.attached.get(entry.channel))
        if why:
            raise Violation("S1", why)
        self.history.add(entry)
        self._check_forks(process, entry)

    def _check_decided(self, process: Process, entry: Entry) -> None:
        if not self._ballots.is_decided(entry.parent, entry.hash):
            raise Violation("I1", f"{process.voter} applies {entry.kind} {entry.hash[:3].hex()}, which nobody decided")

    def _check_forks(self, process: Process, entry: Entry) -> None:
        """S2: no fork both of whose sides commit a ROUND while the other has awake peers (except by a partition)."""
        if entry.kind != ROUND:
            return
        for other in self.world.running():
            if other is process or other.frozen or not other.node.log.active or other.node.log.head == EMPTY:
                continue
            fork = self.history.fork(entry.hash, other.node.log.head)
            if fork is None or not self.history.commits(fork):
                continue
            # The fork was there when the second of its sides was decided: in a partition, or while those who had
            # decided the first slept. They go on from it when they wake only if theirs is the greater history, or in a
            # partition after that.
            first, second = sorted(fork[1:], key=lambda side: self._applied_at[side])
            slept = any(self.history.distance(first, head) is not None for head in self._slept_through[second])
            greater = process.node.log.state.key > other.node.log.state.key
            if slept and (fork[1] == second or greater or self.paths.apart(process, other)):
                continue
            if not self.paths.partitioned(self._applied_at[first], self._applied_at[second]):
                raise Violation("S2", f"both sides of the fork at {fork[0][:3].hex()} commit rounds: {fork}")

    # ---------------------------------------------------------------- what applications see

    def told(self, process: Process, event: object) -> None:
        """I4: the report says what the committed entry says."""
        if isinstance(event, DigestMismatch):
            self._convicted(process, event)
        if isinstance(event, HistoryLost):
            self.histories_lost += 1
        elif isinstance(event, ContributionDropped):
            self._offers.pop((process, event.channel), None)
        elif isinstance(event, RoundDone):
            _, offer = self._offers.pop((process, event.report.channel), (0.0, None))
            past = self._pasts[event.report.head]
            check_report(past, self.states[past.entry.parent], event, process.voter, offer)

    def offered(self, process: Process, channel: str, part: Part) -> None:
        """A contribution is about to be offered: it must end in RoundDone or ContributionDropped."""
        self._offers[(process, channel)] = self.world.now, part

    def withdrawn(self, process: Process, channel: str) -> None:
        """It was taken back by its trainer."""
        self._offers.pop((process, channel), None)

    def after_effects(self, process: Process) -> None:
        """L4: a contribution that ended with this event has been told so."""
        if self._moved is not process or not process.awake or process.unsent:
            return
        self._moved = None
        for channel in process.trainers:
            if (process, channel) in self._offers and channel not in process.node.exchange.offered:
                raise Violation("L4", f"a contribution of {process.voter} to {channel} has vanished without a word")

    def delivered(self, event: RoundDone, means: Means) -> None:
        """An all-reduce ended, and `means` is what it gave to its caller."""
        if event.fits and not event.older:
            check_delivered(self._pasts[event.report.head], means)

    # ---------------------------------------------------------------- liveness

    def faults_end(self) -> None:
        """From here on the next round has a limit: where a quorum is awake and in step, what it takes to see who is
        dead, and to take over once; else T_evict, for those who wake now and for a forced ballot after that. So it
        is, too, where those who have woken would be half once they are given votes, which they do not use yet."""
        awake = [p for p in self.world.running() if p.awake and not p.left]
        if not awake:
            return
        top = max((p.node.log.state for p in awake), key=lambda s: s.key)
        in_step = [p.voter for p in awake if p.node.log.head == top.head and not p.node.ctx.stale]
        members = [p.node.members for p in awake]
        woken = sum(p.node.ctx.stale and p.voter not in top.electorate for p in awake)
        outvoted = woken and 2 * len(set(top.electorate).intersection(in_step)) <= len(top.electorate) + woken
        quorum = bool(top.electorate) and proper_quorum(in_step, top) and not outvoted
        detection_s = 2 * max(m.t_dead_s for m in members) if quorum else 1.5 * max(m.t_evict_s for m in members)
        self._round_by = self.world.now + detection_s + ROUND_S

    def unsettled(self, since: float) -> str:
        """Why L1 to L4, and the repair of states, do not hold (yet): empty when all do."""
        alive = [p for p in self.world.running() if not p.left]
        alive = [p for p in alive if not self._astray(p, alive)]
        if not alive:
            return ""
        scenario = self.world.scenario
        if (scenario.misfits or scenario.orphans) and self._lost(alive):
            self.world.faults.struck["state lost"] += 1
            self._missed(alive)
        rounds = sum(at >= since for at in self.round_times[-50:])
        trains = any(p.host.role == "trainer" for p in alive)
        if trains and not rounds and self.world.now > self._round_by:
            raise Violation("L3", f"no round from {since:.0f} s to {self._round_by:.0f} s")
        top = self._top(alive)
        for p in alive:
            behind = self.history.distance(p.node.log.head, top.head)
            # No round waits for an observer: behind a fast voter it need not come near, as long as it comes along.
            limps = p.host.role == "observer" and self._applied_at.get(p.node.log.head, -1.0) >= since
            if behind is None or (behind > BEHIND_MAX and not limps):
                return f"L1: {p.voter} stands at {p.node.log.head[:3].hex()}, the greatest head is {top.head[:3].hex()}"
            if p.host.role != "observer" and p.voter not in top.electorate:
                return f"L2: {p.voter} is no voter"
            if p in self.corrupt:
                return f"S1: the wrong state of {p.voter} is not repaired"
        if trains and rounds < ROUNDS_AFTER:
            return f"L3: less than {ROUNDS_AFTER} rounds since {since:.0f} s"
        return self._waits_for_ever(alive, since)

    def _top(self, alive: Sequence[Process]) -> LogState:
        return max((p.node.log.state for p in alive), key=lambda s: s.key)

    def _lost(self, alive: Sequence[Process]) -> bool:
        """Whoever held the state of a channel is gone: who brings one cannot be told whether it is of that kind."""
        top = self._top(alive)
        logs = [p.node.log for p in alive if p.host.role != "observer"]
        held = {c for log in logs for c in log.attached if log.holds(c) and log.state.base(c) == top.base(c)}
        if any(channel.opened and channel.name not in held for channel in top.channels):
            return True
        decrees = (p.node.slot.accepted[1] for p in alive if p.node.slot.accepted is not None)
        return any(d.entry.kind == OPEN and not self._kept(alive, d.entry) for d in decrees)

    def _missed(self, alive: Sequence[Process]) -> None:
        """A state that nobody can give, to open its channel or to those who stand on another history, is waited for as
        long as the silent may stand in the way."""
        if not self._misses:
            self._misses = True
            patience_s = 1.5 * max(p.node.members.t_evict_s for p in alive)
            self._round_by = max(self._round_by, self.world.now + patience_s + ROUND_S)

    def _kept(self, alive: Sequence[Process], opening: Entry) -> bool:
        """Somebody has the first state that this opens its channel with."""
        channel, digest = opening.channel, opening.digest
        return any(
            p.node.log.attached[channel].digest == digest or p.node.sync.donations.kept(channel, digest)
            for p in alive
            if channel in p.node.log.attached
        )

    def _astray(self, process: Process, alive: Sequence[Process]) -> bool:
        """All addresses that it was given died, or left, before it heard of anybody, and nobody has heard of it: a
        newcomer, or one that goes on from a checkpoint."""
        records, log = process.node.members.records(), process.node.log
        unheard = log.head == EMPTY or not log.active
        others = {p.host.address for p in alive if p is not process}
        known = {a for r in records for a in r.control} | set(process.node.config.listed)
        knows_it = any(
            process.host.address in r.control for p in alive if p is not process for r in p.node.members.records()
        )
        return unheard and bool(others) and not known & others and not knows_it

    def _waits_for_ever(self, alive: Sequence[Process], since: float) -> str:
        """L4: what was offered before `since` has ended, and its trainer knows."""
        for (process, channel), (at, _) in self._offers.items():
            if process in alive and at < since:
                return f"L4: {process.voter} waits for its contribution to {channel} since {at:.1f} s"
        return ""


def proper_quorum(present: Iterable[Voter], state: LogState) -> bool:
    """The rule again, independent of the code under test."""
    electorate: Sequence[Voter] = state.electorate
    count = len(set(present) & set(electorate))
    return 2 * count > len(electorate) or (2 * count == len(electorate) and state.ranked[0] in set(present))
