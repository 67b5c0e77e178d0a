"""When a peer permits a forced ballot, where the simulator's schedules seldom lead."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from dlc.comm.context import Context
from dlc.comm.entries import EMPTY, LogState
from dlc.comm.ids import Voter
from dlc.comm.log import Log
from dlc.comm.messages import Record
from dlc.comm.permit import greater_alive, permits, proposal
from dlc.comm.records import key_of
from dlc.comm.roles import HELPER, OBSERVER
from dlc.comm.view import View
from tests.comm.stage import Stage
from tests.comm.swim_net import record_of

torch.set_num_threads(1)

HERE, ELSEWHERE = b"h" * 32, b"e" * 32
T_DEAD_S, T_EVICT_S, LONG_S = 2.0, 60.0, 1000.0


class Left:
    """One of the three voters a, b, c: b, of which the others are dead, and unseen for T_evict. A newcomer, d, is dead
    for as long, and stands elsewhere. b is active, and came to its head long ago."""

    t_dead_s, t_evict_s = T_DEAD_S, T_EVICT_S

    def __init__(self) -> None:
        names = ("a", "b", "c", "d")
        self.of = {name: dataclasses.replace(record_of(name), head=HERE, tokens=9.0, depth=5) for name in names}
        self.says("d", head=ELSEWHERE, depth=4)
        self.living, self.proved_gone = {"b"}, set[str]()
        self.unseen = dict.fromkeys(names, T_EVICT_S)
        self.ctx, self.log = Context(self.voter("b"), cast(Any, self)), Log()
        self.ctx.stale, self.ctx.running_s, self.log.active = False, LONG_S, True
        self.log.state = LogState(HERE, 5, 9.0, tuple(self.voter(name) for name in "abc"))
        self.listed: tuple[str, ...] = ()
        self.answers: dict[str, str] = {}
        self.founder = False

    def voter(self, name: str) -> Voter:
        return self.of[name].voter

    def says(self, name: str, **changes: Any) -> None:
        self.of[name] = dataclasses.replace(self.of[name], **changes)

    def lives(self, *names: str) -> None:
        self.living.update(names)
        self.unseen.update(dict.fromkeys(names, 0.0))

    def permits(self, *names: str) -> bool:
        group = [self.voter(name) for name in names]
        return permits(self.ctx, self.log, group, self.listed, self.answers, self.founder)

    # what it asks of the membership

    @property
    def own(self) -> Record:
        return self.of["b"]

    def records(self) -> list[Record]:
        return list(self.of.values())

    def ahead_of(self, state: LogState) -> list[Record]:
        return [r for r in self.records() if key_of(r) > state.key]

    def alive(self, voter: Voter) -> bool:
        return voter.peer in self.living

    def gone(self, voter: Voter) -> bool:
        return voter.peer in self.proved_gone

    def unseen_s(self, voter: Voter) -> float:
        return self.unseen[voter.peer]


Change = Callable[[Left], None]


def slept(left: Left) -> None:
    left.ctx.stale = True


def one_was_seen_within_T_evict(left: Left) -> None:
    left.unseen["c"] = T_EVICT_S - 0.1


def five_vote(left: Left) -> None:
    """Two are no quorum."""
    state, more = left.log.state, (Voter("e", 1), Voter("f", 1))
    left.log.state = dataclasses.replace(state, electorate=(*state.electorate, *more))
    left.unseen |= {voter.peer: T_EVICT_S for voter in more}


def one_lives_but_stands_elsewhere(left: Left) -> None:
    five_vote(left)
    left.living.add("c")
    left.says("c", head=ELSEWHERE, depth=4)


def one_lives_here(left: Left) -> None:
    left.lives("d")
    left.says("d", head=HERE, depth=5)


def somebody_alive_is_ahead(left: Left) -> None:
    left.lives("d")
    left.says("d", tokens=10.0)


def a_newcomer_stood_here_within_T_evict(left: Left) -> None:
    left.unseen["d"] = T_EVICT_S - 0.1
    left.says("d", head=HERE, depth=5)


def one_was_ahead_within_T_evict(left: Left) -> None:
    left.unseen["d"] = T_EVICT_S - 0.1
    left.says("d", tokens=10.0)


def its_entry_was_learned_within_T_evict(left: Left) -> None:
    left.log.learned_run = LONG_S - T_EVICT_S + 0.1


def its_entry_was_learned_just_now_and_somebody_with_a_history_lives(left: Left) -> None:
    left.proved_gone |= {"a", "c"}
    left.log.learned_run = LONG_S - T_DEAD_S + 0.1
    left.lives("d")


def it_was_decided_by_force_with_one_seen_within_T_evict(left: Left) -> None:
    left.log.fellows = (HERE, frozenset({left.voter("d")}))
    left.unseen["d"] = T_EVICT_S - 0.1


def nobody_is_of_the_run(left: Left) -> None:
    left.log.active = False


def one_of_the_run_is_known_and_silent(left: Left) -> None:
    nobody_is_of_the_run(left)
    left.says("d", active=True)


REFUSED = (
    slept,
    one_was_seen_within_T_evict,
    one_lives_but_stands_elsewhere,
    one_lives_here,
    somebody_alive_is_ahead,
    a_newcomer_stood_here_within_T_evict,
    one_was_ahead_within_T_evict,
    its_entry_was_learned_within_T_evict,
    its_entry_was_learned_just_now_and_somebody_with_a_history_lives,
    it_was_decided_by_force_with_one_seen_within_T_evict,
    nobody_is_of_the_run,
    one_of_the_run_is_known_and_silent,
)


@pytest.mark.parametrize("why", REFUSED, ids=lambda why: why.__name__)
def test_a_ballot_is_not_forced(why: Change) -> None:
    left = Left()
    assert left.permits("b") and not left.permits("a"), "only one of its own"
    why(left)
    assert not left.permits("b")


def the_others_are_gone(left: Left) -> None:
    left.unseen = dict.fromkeys(left.unseen, 0.0)
    left.proved_gone |= {"a", "c", "d"}


def an_observer_is_ahead(left: Left) -> None:
    somebody_alive_is_ahead(left)
    left.says("d", role=OBSERVER)


def an_observer_stands_here(left: Left) -> None:
    one_lives_here(left)
    left.says("d", role=OBSERVER)


def an_observer_stood_here(left: Left) -> None:
    a_newcomer_stood_here_within_T_evict(left)
    left.says("d", role=OBSERVER)


def somebody_alive_is_behind(left: Left) -> None:
    left.lives("d")


def who_has_no_history_lives(left: Left) -> None:
    its_entry_was_learned_just_now_and_somebody_with_a_history_lives(left)
    left.says("d", head=EMPTY, depth=0, tokens=0.0)


def another_entry_was_decided_by_force(left: Left) -> None:
    it_was_decided_by_force_with_one_seen_within_T_evict(left)
    left.log.fellows = (ELSEWHERE, left.log.fellows[1])


def it_may_found_the_run(left: Left) -> None:
    left.log.active, left.founder = False, True


PERMITTED = (
    the_others_are_gone,
    an_observer_is_ahead,
    an_observer_stands_here,
    an_observer_stood_here,
    somebody_alive_is_behind,
    who_has_no_history_lives,
    another_entry_was_decided_by_force,
    it_may_found_the_run,
)


@pytest.mark.parametrize("how", PERMITTED, ids=lambda how: how.__name__)
def test_nothing_of_this_keeps_a_ballot_from_being_forced(how: Change) -> None:
    left = Left()
    how(left)
    assert left.permits("b")


def test_no_ballot_is_forced_where_a_quorum_lives() -> None:
    """Though all of it agrees: an ordinary ballot would do."""
    left = Left()
    left.lives("a")
    assert not left.permits("a", "b")
    five_vote(left)
    assert left.permits("a", "b") and not left.permits("b"), "who lives here is in it"


def test_newcomers_may_go_on_from_here_with_those_who_are_left() -> None:
    left = Left()
    one_lives_here(left)
    assert left.permits("b", "d")
    left.says("d", active=True)
    left.log.active = False
    assert left.permits("b", "d"), "one of them is of the run"
    left.says("d", active=False)
    assert not left.permits("b", "d")
    left.log.active = True
    left.proved_gone |= {"a", "c"}
    left.log.learned_run = LONG_S
    assert left.permits("b", "d") and not left.permits("b"), "it came here, too, or will as soon as it hears of it"
    left.says("d", tokens=10.0)
    assert not left.permits("b", "d"), "it has gone on already, and is followed"


def test_a_group_without_anybody_of_the_run_needs_all_listed_addresses() -> None:
    left = Left()
    one_lives_here(left)
    left.log.active, left.listed, left.answers = False, ("x", "y"), {"x": "b"}
    assert not left.permits("b", "d"), "one has not answered"
    left.answers["y"] = "c"
    assert not left.permits("b", "d"), "one is answered for by somebody else"
    left.answers["y"] = "d"
    assert left.permits("b", "d")
    del left.of["d"]
    group = [left.voter("b"), record_of("d").voter]
    assert permits(left.ctx, left.log, group, left.listed, left.answers, False), "one whose record is not here yet"


def test_on_the_empty_log_only_those_who_live_are_waited_for() -> None:
    """Who was there, and is silent, has the same list: it founds nothing without those who are here."""
    left = Left()
    left.log.state = LogState()
    for name in left.of:
        left.says(name, head=EMPTY, depth=0, tokens=0.0)
    left.unseen = dict.fromkeys(left.unseen, 0.0)
    assert left.permits("b")
    left.living.add("d")
    assert not left.permits("b") and left.permits("b", "d")


def test_the_smallest_of_those_who_live_here_proposes_all_of_them() -> None:
    left = Left()
    assert proposal(left.ctx, left.log) == (left.voter("b"),)
    one_lives_here(left)
    left.lives("c")
    left.says("c", head=ELSEWHERE)
    assert proposal(left.ctx, left.log) == (left.voter("b"), left.voter("d"))
    left.lives("a")
    assert proposal(left.ctx, left.log) == ()
    left.says("a", role=OBSERVER)
    left.says("d", role=HELPER)
    assert proposal(left.ctx, left.log) == (left.voter("b"), left.voter("d"))
    left.says("b", role=OBSERVER)
    assert proposal(left.ctx, left.log) == ()


def test_only_who_lives_and_may_vote_is_followed() -> None:
    left = Left()
    left.says("d", tokens=10.0)
    assert not greater_alive(left.ctx, left.log)
    left.lives("d")
    assert [r.voter for r in greater_alive(left.ctx, left.log)] == [left.voter("d")]
    left.says("d", role=OBSERVER)
    assert not greater_alive(left.ctx, left.log)


def test_who_came_here_as_i_did_is_not_left_out_before_its_record_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry that leaves all without a vote: its electorate is gone, and the others' records still tell the head
    before it. Each that went on alone was a run of its own."""
    stage = Stage(3)
    process, fellow, _ = stage.peers()
    node, log, me = process.node, process.node.log, (process.voter,)
    head = bytes(range(32))
    log.state = dataclasses.replace(log.state, head=head, depth=log.state.depth + 1, electorate=(Voter("gone", 1),))

    def alone() -> bool:
        return permits(node.ctx, log, me, (), {}, False)

    monkeypatch.setattr(View, "gone", lambda view, voter: voter.peer == "gone")
    log.learned_run = -math.inf
    assert alone()
    log.learned_run = node.ctx.running_s
    assert not alone(), "they may have learned of it as well"
    log.learned_run = -math.inf
    log.fellows = (head, frozenset({process.voter, fellow.voter}))
    assert not alone(), "it decided it with me"
    log.fellows = (bytes(32), log.fellows[1])
    assert alone(), "that was another entry"
