"""Catching up, message by message: which answers are taken, what of them is applied, and what is told of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from dlc.comm import messages as msg
from dlc.comm.effects import Send
from dlc.comm.entries import Entry, LogState, manifest_hash
from dlc.comm.events import HistoryLost
from dlc.comm.exchange import result_hash
from dlc.comm.ids import LOWEST, Voter
from dlc.comm.log import Past
from dlc.comm.sync import ASK_AGAIN_S, STEPS_IN_FLIGHT, Sync
from dlc.sim.schedule import TRAIN
from tests.comm.stage import Stage, past_round

torch.set_num_threads(1)

X = b"x" * 32


class Behind:
    """One of two that lacks the last round, and has asked the other what follows its head."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stage = Stage(2, inner_s=3.0)
        process, other = stage.peers()
        self.sync: Sync = process.node.sync
        self.log, self.ctx, self.donor = process.node.log, process.node.ctx, other.voter
        before, t = self.log.state, self.log.state.round_of(TRAIN) + 1
        stage.until(lambda: self.log.state.round_of(TRAIN) == t)
        self.past: Past = past_round(process.node, t)
        assert self.past.entry.parent == before.head and self.past.hashes
        self.log.state = before
        self.applied: list[Entry] = []
        monkeypatch.setattr(self.sync, "apply", self._apply)
        monkeypatch.setattr(self.sync, "start", lambda hint=None: None)
        self.sync._abandon()
        self.sync._asked = {self.donor: self.ctx.now}
        self.log.learned_run = -1.0

    def _apply(self, entry: Entry, hashes: tuple[bytes, ...], results: tuple[msg.Result, ...]) -> None:
        assert tuple(map(result_hash, results)) == hashes
        self.applied.append(entry)
        self.log.state = dataclasses.replace(self.log.state, head=entry.hash, depth=entry.depth)

    def steps(self, *steps: tuple[Entry, tuple[bytes, ...]], after: bytes = b"", sender: Voter | None = None) -> Any:
        """What it is asked for then."""
        self.ctx.out.clear()
        answer = msg.Steps(after or self.log.head, tuple(msg.Step(*step) for step in steps))
        self.sync.receive_steps(sender or self.donor, answer)
        return [e.message.hashes for e in self.ctx.out if isinstance(e, Send) and isinstance(e.message, msg.Fetch)]

    @property
    def step(self) -> tuple[Entry, tuple[bytes, ...]]:
        return self.past.entry, self.past.hashes


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch) -> Behind:
    return Behind(monkeypatch)


def test_steps_are_applied_once_all_their_results_are_here(behind: Behind) -> None:
    assert behind.steps(behind.step) == [behind.past.hashes] and behind.sync.busy
    *others, last = behind.past.results
    assert all(behind.sync.receive_result(result) for result in others) and not behind.applied
    stranger = dataclasses.replace(last, header=dataclasses.replace(last.header, base=X))
    assert not behind.sync.receive_result(stranger), "nobody waits for that"
    assert behind.sync.receive_result(last)
    assert behind.applied == [behind.past.entry] and not behind.sync.busy and behind.sync.donor is None
    assert behind.log.learned_run == behind.ctx.running_s, "others live, or did so just now"
    assert not behind.sync.receive_result(last)


def test_what_is_on_its_way_is_not_asked_for_again(behind: Behind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a slow link results come seconds apart. All were asked for each second, came several times, and were thrown
    away where the donor was silent for longer than between two of them."""
    sync, ctx = behind.sync, behind.ctx

    def asked(for_s: float) -> int:
        ctx.out.clear()
        for _ in range(round(for_s / 0.25)):
            ctx.now += 0.25
            sync.tick()
        return sum(isinstance(e, Send) and isinstance(e.message, msg.Fetch) for e in ctx.out)

    before = behind.log.state
    behind.steps(behind.step)
    first, second, last = behind.past.results
    assert asked(3.5) == 2, "after one second, after two, ..."
    assert sync.receive_result(first) and asked(9.0) == 0
    assert sync.receive_result(second) and asked(3 * 9.0 - 0.25) == 0 and sync.donor is not None
    asked(0.25)
    assert sync.donor is None and not sync.receive_result(last), "it is silent"
    sync._asked = {behind.donor: ctx.now}
    assert behind.steps(behind.step) == [behind.past.hashes[2:]]
    assert sync.receive_result(last) and behind.applied == [behind.past.entry] and not sync._results
    sync._results = {X: last, behind.past.hashes[0]: first}
    behind.log.state = before
    assert behind.steps(behind.step) == [behind.past.hashes[1:]] and X not in sync._results, (
        "of no use to another donor"
    )
    sync._abandon()
    sync._results = {X: last}  # of a donor that was left before others led past it
    assert asked(0.25) == 0 and sync._results
    monkeypatch.setattr("dlc.comm.sync.greater_alive", lambda ctx, log: [])
    assert asked(0.25) == 0 and not sync._results


def test_results_that_are_held_here_are_not_asked_for(behind: Behind) -> None:
    exchange = behind.sync.exchange
    first, *rest = behind.past.hashes
    exchange.held, exchange.hashes = {0: behind.past.results[0]}, {0: first}
    assert behind.steps(behind.step) == [tuple(rest)]
    for result in behind.past.results[1:]:
        behind.sync.receive_result(result)
    assert behind.applied == [behind.past.entry]


def test_what_is_applied_is_let_go_and_what_came_of_the_next_step_is_not(behind: Behind) -> None:
    entry, other = behind.past.entry, dataclasses.replace(behind.past.results[0], payload=b"another")
    hashes = (result_hash(other), X)
    following = {"parent": entry.hash, "depth": entry.depth + 1, "t": entry.t + 1, "manifest": manifest_hash(hashes)}
    behind.steps(behind.step, (dataclasses.replace(entry, **following), hashes))
    for result in (other, *behind.past.results):
        assert behind.sync.receive_result(result)
    assert behind.applied == [entry] and behind.sync._results == {hashes[0]: other}


def test_what_has_come_of_a_step_is_looked_through_when_it_may_be_all(
    behind: Behind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With each result anew it took seconds for a vector of 8,192 chunks, in which no ping was answered."""
    sync, looks = behind.sync, list[int]()
    replay = sync._replay
    monkeypatch.setattr(sync, "_replay", lambda: (looks.append(len(sync._results)), replay()))
    behind.steps(behind.step)
    for result in behind.past.results:
        sync.receive_result(result)
        sync.receive_result(result)
    assert looks == [0, len(behind.past.results)] and behind.applied


def test_what_another_plan_has_dropped_meanwhile_is_lacking_again(behind: Behind) -> None:
    """It was here when the steps came, as a candidate, and was not asked for."""
    sync, exchange = behind.sync, behind.sync.exchange
    first, *rest = behind.past.results
    exchange.held, exchange.hashes = {0: first}, {0: behind.past.hashes[0]}
    behind.steps(behind.step)
    exchange.held, exchange.hashes = {}, {}
    for result in rest:
        assert sync.receive_result(result)
    assert not behind.applied and sync.busy
    assert sync.receive_result(first) and behind.applied == [behind.past.entry]


def test_only_answers_to_my_question_are_taken(behind: Behind) -> None:
    assert behind.steps(behind.step, sender=Voter("stranger", 1)) == []
    assert behind.steps(behind.step, after=X) == []
    assert behind.steps() == [] and not behind.sync.busy
    assert behind.steps(behind.step)
    given = list(behind.sync._steps)
    assert behind.steps((behind.past.entry, ())) == [] and behind.sync._steps == given, "one answer at a time"


def test_a_few_steps_are_fetched_at_a_time(behind: Behind) -> None:
    """Two, the next when the first is applied; what belongs to later ones is not kept."""
    following = [(behind.past.entry, (bytes([i]) * 32,)) for i in range(1, 4)]
    asked = behind.steps(behind.step, *following)
    assert asked == [behind.past.hashes, *(hashes for _, hashes in following[: STEPS_IN_FLIGHT - 1])]
    result = behind.past.results[0]
    behind.sync._abandon()
    another = (dataclasses.replace(behind.past.entry, manifest=manifest_hash((X,))), (X,))
    behind.steps(*[another] * STEPS_IN_FLIGHT, behind.step)
    assert not behind.sync.receive_result(result)
    behind.sync._abandon()
    behind.steps(behind.step, *following)
    behind.ctx.out.clear()
    for result in behind.past.results:
        behind.sync.receive_result(result)
    assert behind.applied
    fetches = [e.message for e in behind.ctx.out if isinstance(e, Send) and isinstance(e.message, msg.Fetch)]
    assert [fetch.hashes for fetch in fetches] == [following[1][1]]


@pytest.mark.parametrize("n_later", [0, 1])
def test_a_step_whose_commit_came_first_is_done(behind: Behind, n_later: int) -> None:
    """What I accepted in an older ballot may be all there, while the results of it are on their way once more. That
    speaks against neither my log nor its donor."""
    sync, entry = behind.sync, behind.past.entry
    later = (dataclasses.replace(entry, parent=entry.hash, depth=entry.depth + 1, t=entry.t + 1), behind.past.hashes)
    behind.steps(behind.step, *[later] * n_later)
    behind.log.state = dataclasses.replace(behind.log.state, head=entry.hash, depth=entry.depth)
    sync.receive_result(behind.past.results[0])
    assert not sync._misled([behind.donor]) and sync.busy == (n_later > 0)
    behind.ctx.now += ASK_AGAIN_S
    behind.ctx.out.clear()
    sync.tick()
    fetches = [e.message for e in behind.ctx.out if isinstance(e, Send) and isinstance(e.message, msg.Fetch)]
    assert [fetch.head for fetch in fetches] == [entry.hash] * n_later


def test_steps_are_done_where_commits_have_led_past_them(behind: Behind) -> None:
    """In a second there may be several entries. Else the donor would be asked for a snapshot, and calls that have a
    contribution in the rounds that it jumps over would lose them."""
    sync, entry = behind.sync, behind.past.entry
    later = dataclasses.replace(entry, parent=entry.hash, depth=entry.depth + 1, t=entry.t + 1)
    behind.steps(behind.step)
    behind.log.state = dataclasses.replace(behind.log.state, head=later.hash, depth=later.depth)
    behind.log.chain.append(later.hash)
    sync.receive_result(behind.past.results[0])
    assert not sync._misled([behind.donor]) and not sync.busy and sync.donor is None


@pytest.mark.parametrize(
    "changes",
    [{"parent": X}, {"electorate": ()}, {"manifest": X}, {"t": 0}, {"kind": "config", "roster": (), "t": 0}],
    ids=str,
)
def test_a_step_that_cannot_follow_is_not_applied(behind: Behind, changes: dict[str, Any]) -> None:
    behind.steps((dataclasses.replace(behind.past.entry, **changes), behind.past.hashes))
    for result in behind.past.results:
        behind.sync.receive_result(result)
    assert not behind.applied and not behind.sync.busy and behind.sync.donor is None


def test_results_that_cannot_be_of_their_entry_are_not_applied(behind: Behind) -> None:
    """Its donor named them, and they have these hashes: it is wrong, or was made by another version."""
    first, *rest = behind.past.results
    short = dataclasses.replace(first, payload=bytes(first.payload)[:-4])
    hashes = (result_hash(short), *behind.past.hashes[1:])
    behind.steps((dataclasses.replace(behind.past.entry, manifest=manifest_hash(hashes)), hashes))
    for result in (short, *rest):
        behind.sync.receive_result(result)
    assert not behind.applied and not behind.sync.busy


def test_only_who_was_asked_last_has_nothing_to_offer(behind: Behind) -> None:
    sync = behind.sync
    sync.donor = behind.donor
    sync.receive_no_offer(Voter("stranger", 1), msg.NoOffer(X))
    assert sync.donor == behind.donor
    behind.steps(behind.step)
    sync.receive_no_offer(behind.donor, msg.NoOffer(X))
    assert sync.donor == behind.donor, "it gives what it gave already"
    sync._abandon()
    sync.donor = behind.donor
    sync.receive_no_offer(behind.donor, msg.NoOffer(X))
    assert sync.donor is None


def test_a_donor_is_left_when_it_dies_or_falls_silent(behind: Behind, monkeypatch: pytest.MonkeyPatch) -> None:
    sync, dead = behind.sync, set[Voter]()
    monkeypatch.setattr(behind.ctx.members, "alive", lambda voter: voter not in dead)
    for end in ("silent", "dead"):
        behind.steps(behind.step)
        behind.ctx.now += sync._patience_s - 0.1
        sync.tick()
        assert sync.donor == behind.donor and sync.busy
        if end == "dead":
            dead.add(behind.donor)
        else:
            behind.ctx.now += 0.2
        sync.tick()
        assert sync.donor is None and not sync.busy, end


def test_a_history_that_is_left_is_told_where_it_is_one(behind: Behind, monkeypatch: pytest.MonkeyPatch) -> None:
    log, told = behind.log, list[Any]()
    monkeypatch.setattr(behind.ctx, "notify", told.append)
    log.install(LogState(head=b"b" * 32, depth=2, tokens=9.0), (b"a" * 32, b"b" * 32), (4.0, 9.0))

    def offers(chain: tuple[bytes, ...], depth: int) -> list[Any]:
        told.clear()
        state = LogState(head=chain[-1], depth=depth, tokens=20.0)
        behind.sync._report_loss(msg.Offer(state, chain, (0.0,) * len(chain), ()))
        return list(told)

    log.active = True
    assert offers((b"a" * 32, X), 3) == [HistoryLost(1, 5.0)]
    assert offers((b"a" * 32, b"b" * 32, X), 3) == [], "mine goes on there"
    assert offers((X,), 9) == [], "its chain does not reach back to where I stand"
    log.active = False
    assert offers((b"a" * 32, X), 3) == [], "what I had was nobody's history yet"


def test_a_state_is_in_step_with_no_history_that_has_not_opened_its_channel(
    behind: Behind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its donor may offer the very same one, as a first state: no round of that name is to move it."""
    sync, log = behind.sync, behind.log
    attached, state = log.attached[TRAIN], log.state
    monkeypatch.setattr(sync, "switched", lambda: None)
    image = msg.ImageOffer(TRAIN, attached.digest, attached.state.image_bytes(), 1 << 20, (X,))
    assert log.holds(TRAIN)
    there = dataclasses.replace(state, head=X, depth=state.depth + 1, channels=())
    sync._jump(msg.Offer(there, (X,), (state.tokens,), (image,)), {TRAIN: state.base(TRAIN)})
    assert log.head == X and not attached.synced and log.digest(TRAIN) == b""


def test_a_channel_that_only_a_lost_history_had_opened_is_wished_for_again() -> None:
    """Nobody on that side did: where they were half of the voters, it opened no more."""
    stage = Stage(2, inner_s=3.0)
    stage.world.grids["late"] = stage.world.grids[TRAIN]
    for process in stage.peers():
        stage.world._attach(process, "late", None)
    nodes = [process.node for process in stage.peers()]
    stage.until(lambda: all(node.log.holds("late") for node in nodes))
    stage.until(lambda: nodes[0].slot.promised != LOWEST)
    wished = [[ready.channel for ready in node.slot._readies() if ready.opening] for node in nodes]
    assert wished == [[], []], "it is open"
    node = nodes[0]
    state, digest = node.log.state, node.log.attached["late"].digest
    there = dataclasses.replace(state, head=X, depth=state.depth + 1, channels=())
    bases = {channel: state.base(channel) for channel in node.log.attached}
    node.sync._jump(msg.Offer(there, (X,), (state.tokens,), ()), bases)
    (ready,) = [ready for ready in node.slot._readies() if ready.opening]
    assert (ready.channel, ready.head, ready.digest) == ("late", X, digest), "and not one that rounds have moved"


def test_who_answers_by_a_relay_only_is_asked_where_there_is_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """It can give entries, but no bytes of it get here."""
    node, *others = (process.node for process in Stage(3, inner_s=3.0).peers())
    sync, ctx, relayed = node.sync, node.ctx, {others[0].me.peer}
    ahead = [dataclasses.replace(other.members.own, tokens=node.log.state.tokens + 1.0) for other in others]
    monkeypatch.setattr("dlc.comm.sync.greater_alive", lambda ctx, log: ahead)
    monkeypatch.setattr(node.members, "relay_for", lambda peer: node.me.peer if peer in relayed else None)

    def asked() -> set[str]:
        ctx.out.clear()
        for _ in range(4):
            sync.donor = None
            ctx.now += ASK_AGAIN_S
            sync.start()
        return {e.to for e in ctx.out if isinstance(e, Send) and isinstance(e.message, msg.SyncReq)}

    assert asked() == {others[1].me.peer}
    relayed.add(others[1].me.peer)
    assert asked() == relayed
