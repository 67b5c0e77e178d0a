"""What a coordinator proposes when it is free to choose: who is ready, and who should vote next.

Order of the day: open a channel that is wished for; start a round whose contributors are ready (or whose straggler
deadline has passed); otherwise, if no round is near, bring the electorate up to date.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TypeVar

from dlc.comm.context import Context
from dlc.comm.entries import CHANNEL_BYTES_MAX, CHANNELS_MAX, CONFIG, EMPTY, OPEN, ROUND, Entry, Part, forget_oldest
from dlc.comm.events import BulkLost
from dlc.comm.filling import FILL_S_MAX
from dlc.comm.grid import Grid
from dlc.comm.ids import Voter
from dlc.comm.log import Log, grid_of
from dlc.comm.messages import GridSpec, Plan, Ready
from dlc.comm.owners import plan_round
from dlc.comm.permit import can_vote
from dlc.comm.records import told_digest
from dlc.comm.reducer import WEIGHT_MAX
from dlc.comm.roles import HELPER, OBSERVER, TRAINER
from dlc.comm.shapes import DIGEST_BYTES, LEASE_LEN_MAX
from dlc.comm.straggler import NEVER_S, Idle, Late, worth_waiting
from dlc.errors import ConfigError

T = TypeVar("T")

MUTE_S = 120.0
"""How long a peer whose bulk did not come is given no chunks; then it is tried again, which may cost a stall."""
MUTE_S_MAX = 3600.0
"""It doubles each time, up to this. Whoever was not found mute for so long after it begins anew: in weeks, all are now
and then."""
OPEN_PATIENCE_S = 5.0
"""How long an opening waits for the other voters' wishes after the first."""
PHASE_UNKNOWN_S = 30.0
"""Assumed length of an inner phase until one was seen."""
DISSENT_PATIENCE_S = 60.0
"""How long a round waits, where states differ, for others to tell which is wrong."""
ALONE_PATIENCE = 3
"""Times T_dead that a coordinator waits which has heard of nobody else's state: it may be its own that is wrong."""
NEWCOMER_LAG_MAX, NEWCOMER_LAG_S = 4, 5.0
"""Entries that a newcomer may be behind when it is given a vote; or more, if no more time has passed since."""
RECENT_HEADS_MAX = 256
"""Of several small rounds a second."""


@dataclass(frozen=True, slots=True)
class Draft:
    entry: Entry
    digest: bytes
    owners: tuple[Voter, ...] = ()
    assignment: tuple[int, ...] = ()
    norms: tuple[float, ...] = ()
    """See `Plan`."""
    fill_s: float = 0.0


class Agenda:
    def __init__(self, ctx: Context, log: Log) -> None:
        self.ctx, self.log = ctx, log
        self.diverged: tuple[str, bytes] | None = None
        """(channel, digest): most voters report another state than mine; I must not coordinate before repair."""
        self._ready: dict[str, dict[Voter, tuple[Ready, float]]] = {}
        self._slot_since = self._slot_since_run = 0.0
        self._heads: deque[tuple[float, bytes]] = deque(maxlen=RECENT_HEADS_MAX)
        """My heads, and since when."""
        self._seated: dict[Voter, float] = {}
        """Since when a voter stands in the electorate."""
        self._counted_at: dict[tuple[str, Voter], float] = {}
        """When a round of a channel last had a voter in its roster."""
        self._phase_s: dict[str, float] = {}
        self._told: dict[Voter, tuple[float, float]] = {}
        """The eta that a voter told last, and when that was new here."""
        self._wished_at: dict[str, float] = {}
        """When a channel was first wished to be opened: slots may be shorter than an opening's patience."""
        self._unheard: dict[str, tuple[float, float]] = {}
        """By channel: for how long too many have not told their states, now and in slots before; and when I looked."""
        self._hears = False
        """A round would begin, but for those whose offers are still to be heard of in this slot."""
        self._mute_until: dict[Voter, float] = {}
        self._mute_s: dict[Voter, float] = {}

    def enter(self) -> None:
        self._ready = {}
        self._slot_since, self._slot_since_run = self.ctx.now, self.ctx.running_s
        if self._heads and self.log.after(self._heads[-1][1]) is None:
            self._heads.clear()  # a snapshot, perhaps of another history
            self._unheard.clear()
        self._heads.append((self.ctx.now, self.log.head))
        self.diverged = None
        electorate = self.log.state.electorate
        self._seated = {v: self._seated.get(v, self.ctx.now) for v in electorate}
        self._wished_at = {c: at for c, at in self._wished_at.items() if not self.log.is_open(c)}
        self._told = {v: told for v, told in self._told.items() if v in self._seated}
        self._counted_at = {key: at for key, at in self._counted_at.items() if key[1] in self._seated}

    def recent(self) -> frozenset[bytes]:
        """Heads at which a newcomer may stand to get a vote: it catches up as any voter does.

        To wait for it at the very head, or a few entries behind, would starve it where rounds are shorter than fetching
        a state and being heard of take. Once it has a vote, they wait for it.
        """
        now, heads = self.ctx.now, [head for _, head in self._heads]
        ends = [at for at, _ in self._heads][1:]  # each was mine until the next began
        late = {head for head, end in zip(heads, ends, strict=False) if now - end <= NEWCOMER_LAG_S}
        return frozenset({self.log.head, *heads[-1 - NEWCOMER_LAG_MAX :], *late} - {EMPTY})

    def silent(self, voters: Iterable[Voter]) -> None:
        """Bulk that these owed did not come, though they answer pings: a closed port, a cut in one direction."""
        fresh = sorted(set(voters) - self.mute())
        if not fresh:
            return
        self.ctx.notify(BulkLost(tuple(fresh)))
        since = self.ctx.now - MUTE_S_MAX
        self._mute_until = {v: until for v, until in self._mute_until.items() if until > since}
        self._mute_s = {v: self._mute_s[v] for v in self._mute_until}
        for voter in fresh:
            self._mute_s[voter] = min(2 * self._mute_s.get(voter, MUTE_S / 2), MUTE_S_MAX)
            self._mute_until[voter] = self.ctx.now + self._mute_s[voter]

    def mute(self) -> frozenset[Voter]:
        return frozenset(v for v, until in self._mute_until.items() if until > self.ctx.now)

    def apart(self) -> set[tuple[Voter, Voter]]:
        """Pairs between which there is no direct way, as those who are ready say."""
        return {(v, other) for by_voter in self._ready.values() for v, (m, _) in by_voter.items() for other in m.apart}

    def applied(self, channel: str) -> None:
        """A round of this channel was applied: the next inner phase of its contributors begins."""
        self._unheard.pop(channel, None)
        self._counted_at.update({(channel, part.voter): self.ctx.now for part in self.log.past[-1].entry.roster})

    def ready(self, voter: Voter, m: Ready) -> None:
        if m.head != self.log.head or voter not in self.log.state.electorate or not _sound(m):
            return
        known = self._ready.get(m.channel, {})
        if voter not in known and sum(voter in others for others in self._ready.values()) >= CHANNELS_MAX:
            return
        self._ready[m.channel] = known
        since = self.ctx.now - m.offered_s
        before, at = known.get(voter, (m, since))
        same = (before.opening, before.weight, before.upto) == (m.opening, m.weight, m.upto)
        known[voter] = (m, min(since, at) if same else since)

    def waiting_for(self) -> tuple[Voter, ...]:
        """Alive voters that hold up an opening; where none is wished, those that are ready for nothing yet."""
        ready = {voter for by_voter in self._ready.values() for voter in by_voter}
        for channel in sorted(self._ready):
            wishes = [v for v, (m, _) in self._living(channel).items() if m.opening]
            if wishes:
                ready = {*wishes, *self._abstaining(wishes)}
                break
        return tuple(v for v in self._alive() if v not in ready)

    # ---------------------------------------------------------------- what is due

    def due(self) -> Draft | None:
        self.diverged, self._hears = None, False
        self._hear_etas()
        for channel in sorted(self._ready, key=self._waits_since):
            draft = self._opening(channel) or self._round(channel)
            if draft is not None or self._hears:
                return draft
        return self._config()

    def stirs(self, channel: str) -> bool:
        """Whether an offer or a wish that has just come on this channel may make anything due. Where many channels wait
        to look at all of them each time would take longer than the rounds; what time makes due is seen at a tick."""
        if channel not in self._ready:
            return False
        if len(self._ready) == 1:
            return True
        self.diverged, self._hears = None, False
        self._hear_etas()
        due = self._opening(channel) or self._round(channel)
        return due is not None or self._hears or self.diverged is not None

    def _waits_since(self, channel: str) -> tuple[float, str]:
        """Whoever has waited for the longest comes first: one that is offered again and again would starve another."""
        offered = min(at for _, at in self._ready[channel].values())
        return min(offered, self._wished_at.get(channel, offered)), channel

    def _alive(self) -> list[Voter]:
        return [v for v in self.log.state.electorate if self.ctx.members.alive(v)]

    def _living(self, channel: str) -> dict[Voter, tuple[Ready, float]]:
        """Who is ready and alive: the contribution, or the first state, of a dead peer cannot be had any more."""
        return {v: ready for v, ready in self._ready[channel].items() if self.ctx.members.alive(v)}

    def _opening(self, channel: str) -> Draft | None:
        wishes = {v: (m, at) for v, (m, at) in self._living(channel).items() if m.opening}
        if wishes and self.log.state.leased is not None:  # another one takes no samples from the same ledger
            wishes = {v: (m, at) for v, (m, at) in wishes.items() if not m.lease_len}
        if not wishes or self.log.is_open(channel):
            return None
        first = self._wished_at.setdefault(channel, min(at for _, at in wishes.values()))
        forget_oldest(self._wished_at)
        everyone = all(v in wishes for v in self._alive())
        if not everyone and self.ctx.now - first < OPEN_PATIENCE_S:
            return None
        holders = len(self.log.state.electorate) - len(self._abstaining(wishes))
        if not self.log.state.quorum(wishes) and 2 * len(wishes) <= holders:
            return None
        # The state that most voters hold already wins; ties go to the lowest digest.
        votes = Counter((m.digest, m.grid, m.lease_len) for m, _ in wishes.values())
        digest, grid, lease_len = min(votes, key=lambda k: (-votes[k], k[0], k[1].codec, k[1].numel))
        return Draft(self._entry(OPEN, channel, 0, (), grid, digest, lease_len), digest)

    def _abstaining(self, wishes: Collection[Voter]) -> list[Voter]:
        """Helpers that wish no such channel: they vote, and need no state of it."""
        told = ((v, self.ctx.members.record(v.peer)) for v in self.log.state.electorate if v not in wishes)
        return [v for v, record in told if record is not None and record.voter == v and record.role == HELPER]

    def _round(self, channel: str) -> Draft | None:
        state = self.log.state
        base, known = state.base(channel), state.channel(channel)
        offers = {
            v: (m, at)
            for v, (m, at) in self._living(channel).items()
            if not m.opening and m.base == base and (known is None or not known.leased or state.ledger.valid(v, m.upto))
        }
        if not offers:
            return None
        grid = _most_common([m.grid for m, _ in offers.values()])
        if known is not None and known.opened:
            grid = GridSpec(known.numel, known.chunk_elems, known.codec)
        mine = self.log.digest(channel)
        digest = self._digest(channel, mine, offers)
        if digest is None:
            return None
        if mine and digest and mine != digest:
            self.diverged = (channel, digest)
            return None
        fit = {v: x for v, x in offers.items() if x[0].grid == grid and x[0].digest == digest}
        if not fit or not self._time_to_start(channel, offers):
            return None
        room = self._longest_uncounted(channel, fit)[: Grid(grid.numel, grid.chunk_elems, grid.codec).parts_max]
        roster = tuple(Part(v, fit[v][0].weight, fit[v][0].upto) for v in sorted(room))
        norms = tuple(fit[part.voter][0].norm for part in roster)
        entry = self._entry(ROUND, channel, state.round_of(channel) + 1, roster, grid, b"", 0)
        owners, assignment = plan_round(self.ctx, self.log, roster, grid_of(entry), (), (), self.mute(), self.apart())
        fill_s = max(m.fill_s for m, _ in fit.values())
        return Draft(entry, digest, owners, assignment, norms if any(norms) else (), fill_s)

    def _longest_uncounted(self, channel: str, voters: Iterable[Voter]) -> list[Voter]:
        """Those whom no round has had for the longest time come first: where not all have room, they take turns."""
        return sorted(voters, key=lambda v: (self._counted_at.get((channel, v), -math.inf), v))

    def _digest(self, channel: str, mine: bytes, offers: dict[Voter, tuple[Ready, float]]) -> bytes | None:
        """The state that most report, this peer included; None where they differ and the next report may decide.

        The first to be ready may be the one whose state is wrong: it must not convict me, nor, as coordinator, the
        others. Observers hold the state too, and so did whoever told its own at this head and fell silent: they speak
        for one that somebody else here has, as they cannot give theirs away; that they have another shows only that one
        is wrong. Where states differ, all who hold one and live are heard before anybody is convicted, newcomers, too,
        that come to this head with the voters, and voters that are silent, until the electorate goes on without them.
        Ties, where all have reported or patience is over, go to the lowest; but one who may just have died does not
        convict me by a tie: either it is heard of again, or its word counts no more.
        """
        reports = {v: m.digest for v, (m, _) in offers.items()}
        if mine:
            reports[self.ctx.me] = mine
        unheard, others, witnesses = 0, 0, list[bytes]()
        for record in self.ctx.members.records():
            voter, told = record.voter, told_digest(record, self.log.head, channel)
            alive = self.ctx.members.alive(voter)
            if voter in reports:
                continue
            if told and not (alive and can_vote(record)):
                witnesses.append(told)
            elif told:
                reports[voter] = told
            elif told is None:
                holds = any(s.channel == channel for s in record.states)
                votes_here = voter in self.log.state.electorate
                awaited = votes_here and (holds or voter in self.log.state.trainers)
                unheard += awaited and alive
                others += holds and not votes_here if alive else awaited and not self.ctx.members.gone(voter)
        if any(reports.values()):  # who is being repaired has none
            reports = {v: digest for v, digest in reports.items() if digest}
        told_of = set(reports.values())
        votes = [*reports.values(), *(digest for digest in witnesses if digest in told_of)]
        digest = _most_common(votes)
        tie = mine and digest != mine and votes.count(digest) == votes.count(mine)
        if tie and any(told == digest and self.ctx.members.suspect(v) for v, told in reports.items()):
            return None
        dissent = len(told_of.union(witnesses)) > 1
        unheard += others if dissent else 0
        if not digest or not unheard or 2 * votes.count(digest) > len(votes) + unheard:
            self._unheard.pop(channel, None)
            return digest
        listened_s, t_dead_s = self._listened_s(channel), self.ctx.members.t_dead_s
        if dissent:
            waited_s = self.ctx.now - min(at for _, at in offers.values())
            return digest if waited_s >= DISSENT_PATIENCE_S and listened_s >= t_dead_s else None
        return digest if listened_s >= (t_dead_s if len(votes) > 1 else ALONE_PATIENCE * t_dead_s) else None

    def outvoted(self, plan: Plan) -> bool:
        """More of those that live tell another state of its channel here than this plan's; or as many, this peer among
        them. Whoever planned it may have been wrong, and alone with that: its round is not to be resumed, but what is
        due found out anew."""
        channel, me = plan.entry.channel, self.ctx.me
        told = {r.voter: told_digest(r, self.log.head, channel) for r in self.ctx.members.records() if can_vote(r)}
        told |= {v: m.digest for v, (m, _) in self._ready.get(channel, {}).items()} | {me: self.log.digest(channel)}
        votes = Counter(digest for v, digest in told.items() if digest and self.ctx.members.alive(v))
        planned, others = votes.pop(plan.digest, 0), max(votes.values(), default=0)
        mine_counts = told[me] not in (b"", plan.digest)
        return bool(plan.digest) and (others > planned or (mine_counts and others == planned))

    def _listened_s(self, channel: str) -> float:
        """For how long, of this process's running time, others could have told their states at my head, and too few
        have: in this slot, and in those since the channel's last round, which may each be too short. How old the offers
        are says nothing of that."""
        now, began = self.ctx.running_s, self._slot_since_run
        before_s, looked = self._unheard.get(channel, (0.0, began))
        listened_s = before_s + now - max(looked, began)
        self._unheard[channel] = listened_s, now
        forget_oldest(self._unheard)
        return listened_s

    def _time_to_start(self, channel: str, offers: dict[Voter, tuple[Ready, float]]) -> bool:
        """All alive voters are ready, or the straggler deadline has passed."""
        now, members = self.ctx.now, self.ctx.members
        late = [
            v for v in self._alive() if v not in offers and v in self.log.state.trainers and not self._rests(channel, v)
        ]
        if not late:
            return True
        first = min(at for _, at in offers.values())
        young = first < self._slot_since and now - self._slot_since < members.t_prep_s
        patience = max(m.patience_s for m, _ in offers.values())
        over = now - first >= patience if patience > 0 else self._not_worth_waiting(channel, offers, late)
        self._hears = over and young  # others may have offered before this slot, too, and have said so here
        return over and not young

    def _not_worth_waiting(self, channel: str, offers: dict[Voter, tuple[Ready, float]], late: list[Voter]) -> bool:
        """By what all of them predict."""
        now, members = self.ctx.now, self.ctx.members
        timeouts = members.timeouts
        told = {v: record.speed for v in (*offers, *late) if (record := members.record(v.peer)) is not None}
        known = [speed for speed in told.values() if speed > 0]
        usual = sum(known) / len(known) if known else 1.0
        pace = {v: told.get(v, 0.0) if told.get(v, 0.0) > 0 else usual for v in (*offers, *late)}
        # Who tells no speed where others do has made no step yet: it builds its model, or loads its data.
        worked_s = {v: 0.0 if known and told.get(v) == 0 else now - self._works_since(channel, v) for v in pace}
        ready = [Idle(now - at, pace[v]) for v, (_, at) in offers.items()]
        awaited = [Late(self._eta_s(v, worked_s[v]), worked_s[v], pace[v]) for v in late]
        usual_s = self._phase_of(channel, offers)
        # Where all offer before their work is done, who offers late is late by so much more when it is.
        fill_s = max(m.fill_s for m, _ in offers.values())
        work_s = usual_s + fill_s
        floor_s = max(timeouts.straggler_floor_s * (usual_s / work_s if work_s > 0 else 1.0), 4 * members.rtt_max_s)
        return not worth_waiting(ready, awaited, floor_s, timeouts.straggler_share, usual_s, fill_s)

    def _rests(self, channel: str, voter: Voter) -> bool:
        """It says that it trains no more; that says nothing of an all-reduce, which has no state."""
        if not self.log.is_open(channel):
            return False
        record = self.ctx.members.record(voter.peer)
        return record is not None and record.voter == voter and record.eta_s >= NEVER_S

    def _phase_of(self, channel: str, offers: dict[Voter, tuple[Ready, float]]) -> float:
        """Length of an inner phase, by those who began it with the last round: others are ready too soon."""
        last = max((at for (c, _), at in self._counted_at.items() if c == channel), default=None)
        fresh = [
            max(0.0, at - self._works_since(channel, v))  # it may have applied that round, and offered, before I did
            for v, (_, at) in offers.items()
            if last is None or self._counted_at.get((channel, v)) == last
        ]
        if fresh:
            self._phase_s[channel] = statistics.median(fresh)
        return self._phase_s.get(channel, PHASE_UNKNOWN_S)

    def _hear_etas(self) -> None:
        """Remember when each voter's prediction came: it is told as seconds from then."""
        for voter in self.log.state.electorate:
            record = self.ctx.members.record(voter.peer)
            if record is not None and (voter not in self._told or self._told[voter][0] != record.eta_s):
                self._told[voter] = (record.eta_s, self.ctx.now)

    def _eta_s(self, voter: Voter, worked_s: float) -> float | None:
        """Seconds until it is ready, by what it said since it began this work."""
        eta_s, at = self._told.get(voter, (-1.0, self.ctx.now))
        age_s = self.ctx.now - at
        return max(0.0, eta_s - age_s) if eta_s >= 0 and age_s <= worked_s else None

    def _works_since(self, channel: str, voter: Voter) -> float:
        """When the inner steps began that it has not contributed yet."""
        first_round = self.log.state.round_of(channel) == 0
        began = max(self._seated.get(voter, 0.0), self._slot_since if first_round else 0.0)
        return self._counted_at.get((channel, voter), began)

    def _config(self) -> Draft | None:
        """Bring the electorate up to date, if it is out of date and nothing else is going on."""
        state = self.log.state
        if self.ctx.now - self._slot_since < self.ctx.members.timeouts.slot_settle_s:
            return None
        electorate, trainers = next_electorate(self.ctx, self.log, None, self.recent())
        if electorate == state.electorate and trainers == state.trainers and self._leases_stand():
            return None
        return Draft(self._entry(CONFIG, "", 0, (), GridSpec(0, 0, ""), b"", 0), b"")

    def _leases_stand(self) -> bool:
        state = self.log.state
        return not state.ledger.length or all(
            (lease := state.ledger.lease(v)) is not None and lease.ranges for v in state.trainers
        )

    def _entry(
        self, kind: str, channel: str, t: int, roster: tuple[Part, ...], grid: GridSpec, digest: bytes, lease_len: int
    ) -> Entry:
        state = self.log.state
        electorate, trainers = next_electorate(self.ctx, self.log, None, self.recent(), ranks_anew=kind != CONFIG)
        return Entry(
            kind=kind,
            parent=state.head,
            depth=state.depth + 1,
            channel=channel,
            t=t,
            electorate=electorate,
            trainers=trainers,
            roster=roster,
            numel=grid.numel,
            chunk_elems=grid.chunk_elems,
            codec=grid.codec,
            manifest=b"",
            digest=digest,
            lease_len=lease_len,
        )


def _sound(m: Ready) -> bool:
    """A contribution, or wish, that no correct peer offers is not planned for."""
    try:
        Grid(m.grid.numel, m.grid.chunk_elems, m.grid.codec)
    except ConfigError:
        return False
    named = 1 <= len(m.channel.encode()) <= CHANNEL_BYTES_MAX
    return (
        named
        and len(m.digest) in (0, DIGEST_BYTES)
        and 0 <= m.lease_len < LEASE_LEN_MAX
        and 0 <= m.weight <= WEIGHT_MAX
        and 0 <= m.norm < math.inf
        and 0 <= m.fill_s <= FILL_S_MAX
        and 0 <= m.offered_s < math.inf
    )


def _most_common(values: list[T]) -> T:
    if all(value == values[0] for value in values):
        return values[0]
    counts = Counter(values)
    return min(counts, key=lambda v: (-counts[v], repr(v)))


def next_electorate(
    ctx: Context, log: Log, forced: tuple[Voter, ...] | None, recent: Collection[bytes], ranks_anew: bool = False
) -> tuple[tuple[Voter, ...], tuple[Voter, ...]]:
    """(voters, trainers) after this entry: those that stay, plus alive newcomers that stand in step at a `recent` head.

    A forced ballot names its deciders as the electorate. Where half of the voters decide by the casting vote, and the
    entry ranks them anew, the others leave with it, before T_remove: it might give the casting vote to one of them.
    """
    members = ctx.members
    records = {r.voter: r for r in members.records()}
    if forced is not None:
        electorate = set(forced)
    else:
        alive = {v for v in log.state.electorate if members.alive(v) and not members.gone(v)}
        bare = ranks_anew and 2 * len(alive) <= len(log.state.electorate)
        patience_s = 0.0 if bare else members.t_remove_s
        electorate = alive | {
            v for v in log.state.electorate if not members.gone(v) and members.unseen_s(v) < patience_s
        }
        newcomers = {
            r.voter
            for r in records.values()
            if r.role != OBSERVER and r.synced and r.head in recent and members.alive(r.voter)
        }
        electorate |= {v for v in newcomers if not members.gone(v)}
    newest: dict[str, Voter] = {}
    for voter in sorted(electorate):
        newest[voter.peer] = voter
    voters = tuple(sorted(newest.values()))
    trainers = tuple(v for v in voters if v not in records or records[v].role == TRAINER)
    return voters, trainers
