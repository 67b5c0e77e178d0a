"""What must hold after every event (docs/protocol.md, "Invariants"): a wrong step raises `Violation`.

The checker sees what no peer sees: every vote and promise as it is sent (it stands between a node and its context),
every head, every freeze and cut. It remembers entries, states, digests and votes by hash, and looks only at what the
last event changed, so that checking costs less than what is checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from dlc.comm import messages as msg
from dlc.comm.coordinator import IDLE
from dlc.comm.entries import EMPTY, ROUND, Entry, LogState, manifest_hash
from dlc.comm.events import RoundDone
from dlc.comm.exchange import result_hash
from dlc.comm.ids import Ballot, Voter
from dlc.comm.log import Past, counted_of
from dlc.sim.history import History
from dlc.sim.oracle import check_ledger, check_means

if TYPE_CHECKING:
    from dlc.sim.world import Process, World

NO_ONE: frozenset[Voter] = frozenset()


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
        self._digests: dict[bytes, bytes] = {}
        self._manifests: dict[tuple[bytes, Ballot], bytes] = {}
        self._results: dict[tuple[bytes, Ballot, int], msg.Result] = {}
        self._votes: dict[tuple[bytes, Ballot], set[Voter]] = {}
        self._values: dict[tuple[bytes, Ballot], bytes] = {}
        self._decided: dict[bytes, list[tuple[frozenset[Voter], bytes]]] = {}
        self._apart_now: set[tuple[str, str]] = set()
        self._apart_s: dict[tuple[str, str], float] = {}
        """Seconds that both were awake without a two-way path since they last had one."""
        self._apart_noted = 0.0
        self.partitioned = False
        """Two awake processes had no two-way path for longer than T_evict - T_gap - T_dead."""

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

    def _sent(self, process: Process, m: msg.Message) -> None:
        if isinstance(m, msg.Held):
            self._voted(process, m)
        elif isinstance(m, msg.Promise | msg.Plan | msg.Prepare) and process.node.ctx.stale:
            raise Violation("I7", f"{process.voter} is stale and sends {type(m).__name__}")

    def _voted(self, process: Process, m: msg.Held) -> None:
        node, voter = process.node, process.voter
        slot, state = node.slot, node.log.state
        if node.ctx.stale:
            raise Violation("I7", f"{voter} votes while it is stale")
        if slot.accepted is None or slot.accepted[0] != m.ballot or m.ballot != slot.promised:
            raise Violation("I2", f"{voter} votes at {m.ballot}, promised {slot.promised}, accepted {slot.accepted}")
        key = (m.head, m.ballot)
        voters = self._votes.setdefault(key, set())
        if voter in voters and self._values[key] is not None:
            return
        decree, results = slot.accepted[1], slot.accepted_results
        plan = slot.plan
        deciders = frozenset(plan.deciders) if plan is not None and plan.ballot == m.ballot else NO_ONE
        if voter not in (deciders or state.electorate):
            raise Violation("I2", f"{voter} votes at {m.head[:3].hex()} and is no decider there")
        if decree.entry.kind == ROUND:
            hashes = tuple(result_hash(r) for r in results)
            if hashes != decree.hashes or manifest_hash(hashes) != m.manifest:
                raise Violation("I2", f"{voter} votes for a manifest whose bytes it does not hold")
        known = self._manifests.setdefault(key, m.manifest)
        value = self._values.setdefault(key, decree.entry.hash)
        if known != m.manifest or value != decree.entry.hash:
            raise Violation("I3", f"two values in ballot {m.ballot} of slot {m.head[:3].hex()}")
        voters.add(voter)
        self._decide(state, key, deciders)

    def _decide(self, state: LogState, key: tuple[bytes, Ballot], deciders: frozenset[Voter]) -> None:
        """I1: deciding sets of one slot that intersect decide the same entry."""
        voters, value = self._votes[key], self._values[key]
        if deciders:
            if not deciders <= voters:
                return
            deciding = deciders
        else:
            if not proper_quorum(voters, state):
                return
            deciding = frozenset(voters & set(state.electorate))
        for others, other in self._decided.setdefault(key[0], []):
            if other != value and others & deciding:
                raise Violation("I1", f"slot {key[0][:3].hex()}: {sorted(others)} and {sorted(deciding)} differ")
        self._decided[key[0]].append((deciding, value))

    def bulk_sent(self, process: Process, m: msg.Bulk) -> None:
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
        head, key = self._seen[process]
        log = node.log
        if log.head == head:
            return
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
        attached = log.attached.get("train")
        if attached is not None and attached.synced and log.is_open("train"):
            if attached.digest != attached.state.digest():
                raise Violation("S1", f"{process.voter} reports another digest than its state has")
            if self._digests.setdefault(log.head, attached.digest) != attached.digest:
                raise Violation("S1", f"{process.voter}: another digest at head {log.head[:3].hex()}")

    def _new_entry(self, process: Process, past: Past) -> None:
        """The first time that this entry is applied anywhere."""
        entry = past.entry
        before = self.states.get(entry.parent)
        if before is None:
            return  # it came with a snapshot whose past nobody showed; cannot happen for a first application
        counted = counted_of(entry, past.results)
        after = before.apply(entry, counted)
        self.states[after.head] = after
        self._check_decided(process, entry)
        if entry.kind == ROUND:
            check_means(before, past, self.world.grid.numel)
            self.rounds += 1
            self.round_times.append(self.world.now)
        check_ledger(before, after, counted)
        self.history.add(entry)
        self._check_forks(process, entry)

    def _check_decided(self, process: Process, entry: Entry) -> None:
        if not any(value == entry.hash for _, value in self._decided.get(entry.parent, ())):
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
            self._note_apart()
            if not self.partitioned:
                raise Violation("S2", f"both sides of the fork at {fork[0][:3].hex()} commit rounds: {fork}")

    def told(self, process: Process, event: object) -> None:
        """I4: the report equals the committed entry."""
        if type(event).__name__ == "HistoryLost":
            self.histories_lost += 1
        if not isinstance(event, RoundDone):
            return
        report = event.report
        past = next((p for p in reversed(process.node.log.past) if p.entry.hash.hex() == report.head), None)
        if past is None:
            return
        included = {p.voter.peer for r in past.results for p in r.header.included}
        if {share.peer for share in report.contributors} != included:
            raise Violation("I4", f"report of round {report.t} names {report.contributors}, the chunks {included}")
        counted = process.voter in {p.voter for p in counted_of(past.entry, past.results)}
        if counted != event.counted:
            raise Violation("I4", f"{process.voter} is told counted={event.counted} for round {report.t}")

    # ---------------------------------------------------------------- paths

    def paths_changed(self) -> None:
        """A cut, freeze, start or end: note which awake processes have no two-way path from now on."""
        self._note_apart()
        world = self.world
        awake = [p.host.name for p in world.running() if not p.frozen]
        self._apart_now = {
            (a, b) for i, a in enumerate(awake) for b in awake[i + 1 :] if not world.network.joined(a, b, awake)
        }
        running = {p.host.name for p in world.running()}
        for pair in [p for p in self._apart_s if p not in self._apart_now and running.issuperset(p)]:
            if set(pair) <= set(awake):
                del self._apart_s[pair]  # joined again; a freeze only stops the clock

    def _note_apart(self) -> None:
        """Add the time since the last change to every pair that is apart, and judge whether that is a partition.

        When a cut begins, the last proof of the other may be as old as T_dead; a freeze shorter than T_gap is noticed
        by nobody. So T_evict without a proof means this much time awake and apart.
        """
        world = self.world
        passed_s, self._apart_noted = world.now - self._apart_noted, world.now
        for pair in self._apart_now:
            self._apart_s[pair] = self._apart_s.get(pair, 0.0) + passed_s
        timeouts = world.scenario.timeouts
        proof_age_s = timeouts.t_gap_s()  # T_dead, which measured round trips widen to about this
        limit_s = timeouts.evict_s - timeouts.t_gap_s() - proof_age_s
        if any(apart_s > limit_s for apart_s in self._apart_s.values()):
            self.partitioned = True

    # ---------------------------------------------------------------- liveness

    def unsettled(self, since: float) -> str:
        """Why L1 to L3 do not hold (yet): empty when all do."""
        alive = [p for p in self.world.running() if not p.left]
        if not alive:
            return ""
        top = max((p.node.log.state for p in alive), key=lambda s: s.key)
        for p in alive:
            behind = self.history.distance(p.node.log.head, top.head)
            if behind is None or behind > 3:
                return f"L1: {p.voter} stands at {p.node.log.head[:3].hex()}, the greatest head is {top.head[:3].hex()}"
            if p.voter not in top.electorate:
                return f"L2: {p.voter} is no voter"
        if sum(at >= since for at in self.round_times[-50:]) < 3:
            return f"L3: less than 3 rounds since {since:.0f} s"
        return ""


def proper_quorum(present: Iterable[Voter], state: LogState) -> bool:
    """The rule again, independent of the code under test."""
    electorate: Sequence[Voter] = state.electorate
    count = len(set(present) & set(electorate))
    return 2 * count > len(electorate) or (2 * count == len(electorate) and state.ranked[0] in set(present))
