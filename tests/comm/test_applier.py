"""What moves the head of a log, and what the application is told of its own contribution then."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dlc.comm import applier, early
from dlc.comm import messages as msg
from dlc.comm.dropped import UNASKED
from dlc.comm.effects import Notify, Send
from dlc.comm.entries import CONFIG, EMPTY, Entry, Part
from dlc.comm.events import ContributionDropped, LeftAhead, RoundDone
from dlc.comm.fetcher import Fetcher
from dlc.comm.ids import Ballot, Voter
from dlc.comm.messages import Ready
from dlc.comm.node import Node
from dlc.comm.offered import Offered
from dlc.errors import ProtocolError
from dlc.sim.schedule import TRAIN
from dlc.sim.toy import Means
from dlc.sim.world import Process
from tests.comm.stage import Stage
from tests.comm.test_transcripts_cases import nothing

torch.set_num_threads(1)

WRONG = b"w" * 32


def voted() -> tuple[Process, msg.Commit]:
    """It holds all of a round that it voted for, and its own contribution is in each mean; the COMMIT is on its way."""
    stage = Stage(3, inner_s=3.0)
    stage.hold = lambda source, target, message: isinstance(message, msg.Held | msg.Commit)
    coordinator, _ = stage.planned()
    process = stage.peers(coordinator)[0]
    stage.until(lambda: process.node.slot.accepted is not None)
    node = process.node
    assert node.slot.accepted is not None and node.exchange.complete
    process.node.ctx.out.clear()
    return process, msg.Commit(node.slot.accepted[1].entry, (coordinator.voter,))


@pytest.mark.parametrize("whole", [True, False])
def test_the_results_of_one_manifest_are_not_taken_for_those_of_another(
    whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another ballot may have decided on other means of the same roster: they are asked of who holds them."""
    process, commit = voted()
    node, (holder,) = process.node, commit.holders
    if not whole:
        node.exchange.held.popitem()
        monkeypatch.setattr(node.exchange, "coming", lambda since_run: False)  # nor is it on its way
    assert node.exchange.complete is whole
    head, other = node.log.head, dataclasses.replace(commit.entry, manifest=bytes(32))
    node.applier.receive_commit(holder, msg.Commit(other, (holder,)))
    assert node.log.head == head and node.applier.sync.donor == holder
    node.applier.receive_commit(holder, commit)
    assert node.log.head == commit.entry.hash


def test_a_commit_of_another_round_than_is_planned_here_is_not_waited_for() -> None:
    """Its results do not come by themselves."""
    process, commit = voted()
    node, (holder,) = process.node, commit.holders
    other = dataclasses.replace(commit.entry, roster=commit.entry.roster[1:], manifest=bytes(32))
    node.exchange.held.popitem()
    node.applier.receive_commit(holder, msg.Commit(other, (holder,)))
    assert node.applier.sync.donor == holder and node.applier.next_entry is None


def asked_of(node: Node) -> list[str]:
    """Whom it asks what follows its head, since it was asked last."""
    out, node.ctx.out = node.ctx.out, []
    return [e.to for e in out if isinstance(e, Send) and isinstance(e.message, msg.SyncReq)]


def test_a_commit_of_a_greater_history_is_asked_for_of_the_living_and_an_old_one_of_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process, commit = voted()
    node, (holder,) = process.node, commit.holders
    state, dead = node.log.state, next(v for v in commit.entry.electorate if v not in (node.me, *commit.holders))
    monkeypatch.setattr(node.applier, "last_results_come", lambda: False)
    monkeypatch.setattr(node.sync, "last_results_come", lambda: False)
    monkeypatch.setattr(node.members, "alive", lambda voter: voter == holder)
    fork = dataclasses.replace(commit.entry, parent=b"x" * 32)
    for depth in (state.depth - 1, state.depth):
        node.applier.receive_commit(holder, msg.Commit(dataclasses.replace(fork, depth=depth), (holder,)))
        assert asked_of(node) == []
    node.applier.receive_commit(dead, msg.Commit(fork, (dead, node.me, holder)))
    assert asked_of(node) == [holder.peer]


def test_a_round_whose_means_are_of_others_than_its_roster_names_is_refused() -> None:
    process, commit = voted()
    node, (holder,) = process.node, commit.holders
    head, fewer = node.log.head, dataclasses.replace(commit.entry, roster=commit.entry.roster[1:])
    with pytest.raises(ProtocolError, match="its results do not fit"):
        node.applier.receive_commit(holder, msg.Commit(fewer, (holder,)))
    assert node.log.head == head


@pytest.mark.parametrize("current", [True, False])
def test_after_a_jump_of_the_head_a_contribution_to_an_older_base_is_dropped(current: bool) -> None:
    process, _ = voted()
    node = process.node
    offered, base = node.exchange.offered[TRAIN], node.log.state.base("calls")
    ready = dataclasses.replace(offered.ready, channel="calls", base=base if current else bytes(31) + b"1")
    node.exchange.offered["calls"] = Offered(ready, offered.vector, None, offered.since)
    node.applier.switched()
    dropped = [
        e.event.channel for e in node.ctx.out if isinstance(e, Notify) and isinstance(e.event, ContributionDropped)
    ]
    assert ("calls" in node.exchange.offered, dropped) == (current, [] if current else ["calls"])


def as_named(ready: Ready) -> Ready:
    return ready


def of_another_weight(ready: Ready) -> Ready:
    """It was made after the one that the plan names was taken back."""
    return dataclasses.replace(ready, weight=2 * ready.weight)


def of_another_grid(ready: Ready) -> Ready:
    return dataclasses.replace(ready, grid=dataclasses.replace(ready.grid, codec="bf16"))


@pytest.mark.parametrize(
    ("change", "counted", "fits", "older"),
    [
        (as_named, True, True, False),
        (of_another_weight, False, True, True),
        (of_another_grid, True, False, False),
    ],
)
def test_means_go_to_the_sink_of_the_contribution_that_they_are_of(
    change: Callable[[Ready], Ready], counted: bool, fits: bool, older: bool
) -> None:
    process, commit = voted()
    node, sink = process.node, Means()
    offered = node.exchange.offered[TRAIN]
    node.exchange.offered[TRAIN] = Offered(change(offered.ready), offered.vector, sink, offered.since)
    assert Part(node.me, offered.ready.weight, offered.ready.upto) in commit.entry.roster
    node.log.attached[TRAIN].synced = False  # means move the state of the channel, or go to the sink
    node.applier.receive_commit(commit.holders[0], commit)
    told = [effect.event for effect in node.ctx.out if isinstance(effect, Notify)]
    (done,) = [event for event in told if isinstance(event, RoundDone)]
    assert (done.counted, done.fits, done.older) == (counted, fits, older)
    good = fits and not older
    assert len(done.included) == (3 if fits else 0) and set(done.included) == ({good} if fits else set())
    assert sink.t == (commit.entry.t if good else 0)
    assert told == [done] and TRAIN not in node.exchange.offered, "its offer is over, and not dropped"


def test_an_older_offer_that_is_in_no_mean_takes_none_from_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    process, commit = voted()
    node, sink = process.node, Means()
    offered = node.exchange.offered[TRAIN]
    node.exchange.offered[TRAIN] = Offered(of_another_weight(offered.ready), offered.vector, sink, offered.since)
    node.log.attached[TRAIN].synced = False
    monkeypatch.setattr(applier, "chunks_with", lambda part, results: (False,) * len(results))
    node.applier.receive_commit(commit.holders[0], commit)
    (done,) = told(node, RoundDone)
    assert (done.counted, done.older, sink.t) == (False, False, commit.entry.t)


def told(node: Node, kind: type) -> list[Any]:
    return [e.event for e in node.ctx.out if isinstance(e, Notify) and isinstance(e.event, kind)]


@pytest.mark.parametrize("forced", [False, True])
def test_who_left_ahead_is_told_of_once_and_only_after_a_forced_ballot(
    forced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quorum goes on from the greatest history; a few may have missed what those who left had decided."""
    process, commit = voted()
    node, tokens = process.node, process.node.log.state.tokens
    gone = dataclasses.replace(node.members.own, voter=Voter("gone", 1), tokens=tokens + 1e9)
    monkeypatch.setattr(node.members, "departed", lambda: [gone, dataclasses.replace(gone, tokens=tokens)])
    node.log.fellows = (commit.entry.hash if forced else WRONG, frozenset({node.me}))
    node.applier.receive_commit(commit.holders[0], commit)
    assert len(told(node, LeftAhead)) == forced
    node.applier._look_back()
    assert [event.voters for event in told(node, LeftAhead)] == [(gone.voter,)] * forced


def test_holders_are_told_of_the_entry_that_they_hold() -> None:
    """To whoever is one behind. After entries that were replayed nobody's are known but my own."""
    process, commit = voted()
    node = process.node
    node.applier.receive_commit(commit.holders[0], commit)
    assert node.applier.last_decision() == commit
    node.applier._decision = dataclasses.replace(commit, entry=dataclasses.replace(commit.entry, t=commit.entry.t + 1))
    assert node.applier.last_decision() == msg.Commit(commit.entry, (node.me,))


@pytest.mark.parametrize("active", [False, True])
@pytest.mark.parametrize("how", ["steps", "snapshot"])
def test_what_was_had_of_inactive_peers_makes_nobody_active(
    how: str, active: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some that were started from checkpoints may give it to each other, while the run lives elsewhere."""
    process, commit = voted()
    node, (donor,) = process.node, commit.holders
    record = node.members.record(donor.peer)
    assert record is not None and node.slot.accepted is not None
    record, node.log.active = dataclasses.replace(record, active=active), False
    if how == "steps":
        node.sync.donor = donor
        monkeypatch.setattr(node.members, "record", lambda peer: record)
        node.applier.apply(commit.entry, node.slot.accepted[1].hashes, node.slot.accepted_results)
    else:
        monkeypatch.setattr("dlc.comm.applier.alive_records", lambda ctx: [record])
        node.applier.switched()
    assert node.log.active is active


@pytest.mark.parametrize("fill_s", [0.0, 1.0])
def test_who_heard_of_nobody_is_silent_but_where_contributions_filled(
    fill_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that become final on the way an owner may have had what there was in time for its chunks."""
    process, commit = voted()
    node, (owner,) = process.node, commit.holders
    assert node.exchange.plan is not None
    node.exchange.plan = dataclasses.replace(node.exchange.plan, fill_s=fill_s)
    monkeypatch.setattr("dlc.comm.applier.deaf_owners", lambda entry, results: [owner])
    node.applier.receive_commit(owner, commit)
    assert (owner in node.coordinator.agenda.mute()) is not bool(fill_s)


def test_a_contribution_whose_samples_are_leased_to_another_is_dropped() -> None:
    """Its base is still the present one: both would be counted for the same samples."""
    process, _ = voted()
    node = process.node
    offered = node.exchange.offered[TRAIN]
    others = next(lease for lease in node.log.state.ledger.leases if lease.voter != node.me).ranges[0]
    node.applier.switched()
    assert not told(node, ContributionDropped) and node.exchange.offered[TRAIN] is offered
    offered.ready = dataclasses.replace(offered.ready, upto=others.hi)
    node.applier.switched()
    assert told(node, ContributionDropped) == [ContributionDropped(TRAIN)] and TRAIN not in node.exchange.offered


def test_what_a_round_has_moved_is_wished_for_no_more() -> None:
    """Another history that has not opened the channel is not to begin it anew with a state that is no first one."""
    process, commit = voted()
    node = process.node
    node.slot.wishes[TRAIN] = node.exchange.offered[TRAIN].ready
    node.applier.receive_commit(commit.holders[0], commit)
    assert TRAIN not in node.slot.wishes


def test_a_state_that_is_being_repaired_is_not_found_wrong_again(monkeypatch: pytest.MonkeyPatch) -> None:
    process, commit = voted()
    node, found = process.node, list[bytes]()
    assert node.slot.plan is not None
    plan = dataclasses.replace(node.slot.plan, digest=WRONG)
    monkeypatch.setattr(node.applier, "diverged", lambda channel, digest: found.append(digest))
    for synced in (True, False):
        node.log.attached[TRAIN].synced = synced
        node.applier.check_digest(commit.holders[0], plan)
    node.log.attached[TRAIN].synced = True
    for digest in (b"", node.log.digest(TRAIN)):
        node.applier.check_digest(commit.holders[0], dataclasses.replace(plan, digest=digest))
    assert found == [WRONG]


def test_who_has_a_wrong_state_forgets_what_it_was() -> None:
    """What others tell of the last heads is compared with it: it would be convicted of the same once more."""
    process, _ = voted()
    attached = process.node.log.attached[TRAIN]
    assert attached.passed
    process.node.applier.diverged(TRAIN, WRONG)
    assert not attached.passed and not attached.synced


def test_who_has_a_wrong_state_gives_nobody_an_image_of_it() -> None:
    """Also not those that it had offered before it was told."""
    process, _ = voted()
    node, newcomer = process.node, Voter("newcomer", 1)
    digest = node.log.digest(TRAIN)
    node.sync.donations.receive_request(newcomer, msg.SyncReq(EMPTY, 0, True, ()))
    node.applier.diverged(TRAIN, WRONG)
    node.ctx.out.clear()
    node.sync.donations.receive_piece_request(newcomer, msg.PieceReq(TRAIN, digest, (0,)))
    assert [e.message for e in node.ctx.out if isinstance(e, Send)] == [msg.NoPiece(TRAIN, digest)]
    assert newcomer.peer not in node.exchange.outbox.served


# ------------------------------------------------------------------ decided, and the last bytes are on their way


class Behind:
    """Four end a round, of whom one lacks the results: they are on their way. `kept`: what else does not arrive."""

    def __init__(self, *kept: type, n_chunks: int = 3) -> None:
        self.stage = stage = Stage(4, n_chunks, inner_s=5.0)
        coordinator, self.plan = stage.planned()
        self.process, *_ = stage.peers(coordinator)
        self.node, self.others = self.process.node, stage.peers(self.process)
        self.kept = kept
        stage.hold = self._lacks
        stage.committed(self.plan.entry.t, self.others)
        assert self.node.log.head == self.plan.head

    def _lacks(self, source: str, target: str, message: object) -> bool:
        last = isinstance(message, msg.Result) and message.header.head == self.plan.head
        return target == self.process.host.name and (last or isinstance(message, self.kept))

    def comes(self) -> None:
        """What was kept, but for messages of the kinds that do not arrive."""
        self.stage.held = [held for held in self.stage.held if not isinstance(held[-1], self.kept)]
        self.stage.hold = lambda source, target, message: False
        self.stage.release()

    def asked(self) -> list[type]:
        """What it asked others for."""
        sent = ((source, m) for _, source, _, m in self.stage.sent)
        return [type(m) for source, m in sent if source == self.process.host.name and isinstance(m, ASKING)]


ASKING = (msg.SyncReq, msg.Fetch)


@pytest.mark.parametrize("kept", [(), (msg.Held,), (msg.Commit,)])
def test_who_lacks_what_is_on_its_way_waits_for_it_and_asks_for_nothing(kept: tuple[type, ...]) -> None:
    """The others have gone on without its vote; what they sent comes, and it applies the same round. That it is decided
    it knows by their votes, or by the COMMIT."""
    behind = Behind(*kept)
    stage, node = behind.stage, behind.node
    stage.until(node.applier.last_results_come)
    behind.comes()
    stage.committed(behind.plan.entry.t, stage.peers())
    assert not behind.asked()
    assert node.applier._decided_run is None and node.applier.next_entry is None, "that was of the slot before"
    stage.all_in()


def test_who_has_asked_before_it_knows_that_the_rest_is_on_its_way_does_not_ask_for_that() -> None:
    """By its record it saw somebody ahead, and asked what follows; then the votes came."""
    behind = Behind(msg.Held, msg.Commit, msg.Steps)
    stage, node = behind.stage, behind.node
    stage.until(lambda: any(isinstance(held[-1], msg.Steps) for held in stage.held))
    told = [held for held in stage.held if isinstance(held[-1], msg.Held)]
    steps = [held for held in stage.held if isinstance(held[-1], msg.Steps)]
    for of, there in ((told, node.applier.last_results_come), (steps, lambda: node.sync.busy)):
        for source, target, deliver, *args in of:
            stage._carry(source, target, deliver, *args)
        stage.until(there)
    stage.held = [held for held in stage.held if isinstance(held[-1], msg.Result)]
    behind.comes()
    stage.committed(behind.plan.entry.t, stage.peers())
    assert set(behind.asked()) == {msg.SyncReq}
    stage.all_in()


def test_what_never_comes_is_asked_for_after_a_while() -> None:
    """A connection may have taken it along."""
    behind = Behind()
    stage, node = behind.stage, behind.node
    stage.until(node.applier.last_results_come)
    assert not behind.asked()
    stage.held.clear()
    behind.comes()
    stage.committed(behind.plan.entry.t, stage.peers())
    assert msg.SyncReq in behind.asked()
    stage.all_in()


def test_what_is_sent_last_may_be_on_its_way_long_after_what_came_before() -> None:
    """Owners may have waited for somebody with their last chunks."""
    behind = Behind()
    exchange, now = behind.node.exchange, behind.node.ctx.running_s
    patience = exchange.collector.patience
    for came, sent, comes in ((now - 60.0, now, True), (now, now - 60.0, True), (now - 60.0, now - 60.0, False)):
        patience.last_came = came
        assert exchange.coming(sent) == comes
    exchange.plan = None
    assert not exchange.coming(now)


def test_the_slowest_of_those_whose_results_are_lacking_is_waited_for() -> None:
    behind = Behind()
    exchange, now = behind.node.exchange, behind.node.ctx.running_s
    patience = exchange.collector.patience
    patience.last_came = now - 10.0
    slow, *others = {behind.plan.owners[behind.plan.assignment[c]] for c in exchange.missing()} - {behind.node.me}
    assert others
    patience._pause_s = {slow: 5.0, **dict.fromkeys(others, 0.1)}
    assert exchange.coming(now - 10.0) and patience.underway_s(slow) == 15.0
    floor_s = behind.node.members.timeouts.chunk_s / 2
    assert all(patience.underway_s(v) == floor_s for v in others)
    patience._pause_s[slow] = 0.0
    assert patience.underway_s(slow) == patience.silence_s(slow) / 2 and not exchange.coming(now - 10.0)
    patience.begin((), 1, 1, 1, 1)
    assert not patience._pause_s and not patience._came and patience.last_came == now


def test_who_decided_without_one_that_is_awake_knows_it_to_be_behind_until_it_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it lacks may be in their queues only: they do not leave before."""
    behind = Behind()
    stage, node, others = behind.stage, behind.node, [p.node for p in behind.others]
    assert all(other.left_behind() == [node.me] for other in others) and not node.left_behind()
    with monkeypatch.context() as patch:
        for other in others:
            patch.setattr(other.members, "awake", lambda voter: False)
            assert not other.left_behind()
    stage.world.freeze(behind.process, 30.0)
    stage.until(lambda: not any(other.left_behind() for other in others))
    assert not any(other.members.alive(node.me) for other in others)

    behind = Behind()
    stage, node, others = behind.stage, behind.node, [p.node for p in behind.others]
    behind.comes()
    stage.committed(behind.plan.entry.t, stage.peers())
    stage.until(lambda: not any(other.left_behind() for other in others), 2.0)
    assert all(other.members.alive(node.me) for other in others) and not node.left_behind()


class Last(Behind):
    """Of each other's chunks, the last does not reach it. One of the others was once silent for long."""

    def __init__(self) -> None:
        super().__init__(n_chunks=16)

    def _lacks(self, source: str, target: str, message: object) -> bool:
        if target != self.process.host.name or not isinstance(message, msg.Result):
            return False
        header, assignment = message.header, self.plan.assignment
        last = max(c for c, owner in enumerate(assignment) if self.plan.owners[owner] == header.owner)
        return header.head == self.plan.head and header.chunk == last


def test_who_lost_the_last_bytes_asks_soon_though_somebody_in_the_round_is_slow() -> None:
    behind = Last()
    stage, node = behind.stage, behind.node
    exchange, slow = node.exchange, behind.others[0].voter
    exchange.collector.patience._gap[slow] = 20.0
    assert exchange.collector.stall_s / 2 > 25.0
    stage.until(node.applier.last_results_come)
    began = stage.world.now
    stage.until(lambda: msg.SyncReq in behind.asked())
    timeouts = node.members.timeouts
    assert timeouts.chunk_s / 2 <= stage.world.now - began < 2 * timeouts.chunk_s
    stage.held.clear()
    behind.comes()
    stage.committed(behind.plan.entry.t, stage.peers())
    stage.all_in()


def test_whose_last_bytes_come_at_their_pace_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each one after a longer while than would be waited for if no pace were known."""
    monkeypatch.setattr(Fetcher, "look", lambda self, plan: None)  # that does not depend on what is decided
    stage = Stage(4, n_chunks=20, inner_s=5.0)
    coordinator, plan = stage.planned()
    process, *_ = stage.peers(coordinator)
    node, others = process.node, stage.peers(process)

    def held(source: str, target: str, m: object) -> bool:
        last = isinstance(m, msg.Result) and m.header.head == plan.head and target == process.host.name
        return last or isinstance(m, msg.Held)

    stage.hold = held
    stage.until(lambda: all(p.node.exchange.complete for p in others))
    pace_s = 1.5 * node.exchange.collector.stall_s / 2
    coming = {
        p: [h for h in stage.held if isinstance(h[-1], msg.Result) and h[-1].header.owner == p.voter] for p in others
    }
    votes = [h for h in stage.held if isinstance(h[-1], msg.Held)]
    assert len(votes) >= 6 and all(len(of) == 5 for of in coming.values())
    stage.hold = lambda source, target, m: isinstance(m, msg.Held)
    for number in range(5):
        if number == 2:
            stage.hold = lambda source, target, m: False
        stage.held = [of[number] for of in coming.values()] + (votes if number == 2 else [])
        stage.release()
        end = stage.world.now + pace_s
        stage.until(lambda end=end: stage.world.now >= end or node.log.head != plan.head)
    asked = [m for _, source, _, m in stage.sent if source == process.host.name and isinstance(m, ASKING)]
    assert node.log.head != plan.head and not asked
    stage.all_in()


# ------------------------------------------------------------------ what comes meanwhile for the next slot


def to_next(behind: Behind, head: bytes = b"", chunk: int = 0) -> tuple[Voter, msg.Contrib]:
    """A part of one of the others for the round after the one that is behind."""
    sender = behind.others[0].voter
    return sender, msg.Contrib(TRAIN, head or behind.others[0].node.log.head, chunk, 1.0, 1, bytes(32))


def parts(node: Node) -> int:
    return sum(len(by) for chunks in node.exchange.collector.parts.values() for by in chunks.values())


@pytest.mark.parametrize("kept", [(), (msg.Held,), (msg.Commit,)])
def test_what_comes_early_for_the_next_slot_is_there_when_that_begins(kept: tuple[type, ...]) -> None:
    behind = Behind(*kept)
    stage, node = behind.stage, behind.node
    stage.until(node.applier.last_results_come)
    sender, part = to_next(behind)
    other = next(p.node for p in behind.others if p.voter == sender)
    vote = msg.Held(other.log.head, Ballot(0, other.log.state.rank0), WRONG, ())
    now = behind.process.host.clock_s(stage.world.now)
    for message in (part, vote, dataclasses.replace(part, base=b"x" * 32)):
        node.receive(sender, message, now)
    assert not parts(node) and not node.slot.votes.get(sender) == vote
    behind.comes()
    stage.until(lambda: node.log.head == other.log.head)
    assert parts(node) == 1 and node.slot.votes == {sender: vote}
    assert not node.inbox._early and not node.exchange.room.used_bytes
    assert node.exchange.dropped[sender.peer, UNASKED] == 1
    stage.all_in()


def test_nonsense_that_comes_early_ends_nobody_when_its_slot_begins() -> None:
    """It is looked at in the middle of the event by which the head moves."""
    behind = Behind()
    stage, node, (other, *_) = behind.stage, behind.node, behind.others
    stage.until(node.applier.last_results_come)
    nack = msg.Nack(other.node.log.head, Ballot(1 << 40, other.voter))
    node.receive(other.voter, nack, behind.process.host.clock_s(stage.world.now))
    assert list(node.inbox._early) == [(other.voter, nack)]
    behind.comes()
    stage.until(lambda: node.log.head == other.node.log.head)
    assert [why for peer, why in node.exchange.dropped if peer == other.voter.peer] == [f"ballot counter {1 << 40}"]
    stage.all_in()


def test_a_commit_that_comes_early_is_kept_and_nothing_asked_for() -> None:
    behind = Behind()
    stage, node, (other, *_) = behind.stage, behind.node, behind.others
    stage.until(node.applier.last_results_come)
    state = other.node.log.state
    voters = state.electorate, state.trainers
    plain = Entry(CONFIG, state.head, state.depth + 1, "", 0, *voters, (), 0, 0, "", b"", b"", 0)
    commit = msg.Commit(plain, (other.voter,))
    node.receive(other.voter, commit, behind.process.host.clock_s(stage.world.now))
    assert list(node.inbox._early) == [(other.voter, commit)] and not behind.asked()


def test_an_owner_that_lags_holds_up_no_next_round() -> None:
    """A helper lacks the end of a round, and the trainers are ready for the next one at once: PLAN, parts and votes of
    that come before. They were dropped, and sent again a second later."""
    stage = Stage(3, n_chunks=8, inner_s=0.2)
    helper = stage.world.start(stage.world.new_host("helper"), ("sim:p0",))
    trainers = stage.peers(helper)
    node = helper.node

    def owns(plan: msg.Plan) -> bool:
        return helper.voter in {plan.owners[owner] for owner in plan.assignment} and plan.ballot.voter != helper.voter

    while True:
        plan = stage.planned()[1]
        if owns(plan):
            stage.hold = lambda s, target, m, head=plan.head: (
                target == helper.host.name and isinstance(m, msg.Result) and m.header.head == head
            )
        stage.committed(plan.entry.t, trainers)
        if owns(plan) and trainers[0].node.log.state.rank0 != helper.voter:
            break  # whoever is to coordinate the next round has to know the end of this one
        stage.hold = nothing
        stage.release()
    began = stage.world.now
    stage.until(lambda: any(isinstance(m, msg.Contrib) for _, m in node.inbox._early))
    assert node.log.head == plan.head
    stage.hold = nothing
    stage.release()
    stage.committed(plan.entry.t + 1, trainers)
    assert stage.world.now - began < 1.0 and not node.exchange.dropped
    assert all(not report.missing for report in stage.reports(plan.entry.t + 1).values())


def test_what_is_kept_for_the_next_slot_is_limited_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of small chunks there may be thousands: those over a number were lost, and came a second later or never."""
    behind = Behind()
    stage, node = behind.stage, behind.node
    stage.until(node.applier.last_results_come)
    now = behind.process.host.clock_s(stage.world.now)
    for chunk in range(2000):
        node.receive(*to_next(behind, chunk=chunk), now)
    assert len(node.inbox._early) == 2000 and not node.exchange.dropped
    nack = msg.Nack(behind.others[0].node.log.head, Ballot(0, node.me))
    monkeypatch.setattr(early, "EARLY_BYTES_MAX", node.exchange.room.used_bytes + 2 * early.size_of(nack))
    for _ in range(3):
        node.receive(behind.others[0].voter, nack, now)
    assert len(node.inbox._early) == 2002 and node.exchange.dropped.total() == 1
    node.slot.votes.clear()
    node.applier._announced = None
    node.tick(now)
    assert not node.inbox._early and not parts(node), "another history may follow"
