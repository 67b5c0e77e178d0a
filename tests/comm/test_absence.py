"""When a peer that was away knows enough to promise, vote and coordinate again."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import pytest

from dlc.comm.absence import Absence
from dlc.comm.context import Context
from dlc.comm.effects import Effect, Send
from dlc.comm.entries import CONFIG, EMPTY, Entry, LogState
from dlc.comm.ids import Voter
from dlc.comm.log import Log, Past
from dlc.comm.messages import Leave, Record
from dlc.comm.records import key_of
from dlc.comm.roles import OBSERVER
from tests.comm.swim_net import record_of

HERE, BEFORE, ELSEWHERE = b"h" * 32, b"b" * 32, b"e" * 32
T_REFRESH_S, T_EVICT_S = 2.5, 60.0
ASKED = Send("everybody", Leave(record_of("a")))
"""For what the membership sends when it asks all anew."""


class Back:
    """Voter a, which has just come back; b is another voter, c a newcomer that stands elsewhere. Nobody lives, or has
    answered."""

    t_refresh_s, t_evict_s = T_REFRESH_S, T_EVICT_S

    def __init__(self, woken: bool) -> None:
        self.of = {n: dataclasses.replace(record_of(n), head=HERE, tokens=9.0, depth=5) for n in ("a", "b", "c")}
        self.says("c", head=ELSEWHERE, depth=3)
        self.living, self.answered, self.proved_gone = set[str](), set[str](), set[str]()
        self.told_stale: list[bool] = []
        self.running_s = 100.0
        self.ctx, self.log = Context(self.voter("a"), cast(Any, self)), Log()
        self.ctx.stale = False
        self.log.state = LogState(HERE, 5, 9.0, (self.voter("a"), self.voter("b")))
        entry = Entry(CONFIG, BEFORE, 5, "", 0, (), (), (), 0, 0, "", b"", b"", 0)
        self.log.past.append(Past(entry, (), ()))
        self.absence = Absence(self.ctx, self.log)
        self.absence.begin(woken)
        assert self.ctx.stale and self.ctx.out == [ASKED] and self.absence.woken == woken

    def voter(self, name: str) -> Voter:
        return self.of[name].voter

    def says(self, name: str, **changes: Any) -> None:
        self.of[name] = dataclasses.replace(self.of[name], **changes)

    def over(self, after_s: float = 0.0) -> bool:
        """Whether it ends so long from now."""
        self.running_s += after_s
        assert (over := self.absence.over()) != self.ctx.stale
        return over

    # what it asks of the membership

    def update_own(self, *, stale: bool) -> None:
        self.told_stale.append(stale)

    def begin_refresh(self, now: float) -> list[Effect]:
        return [ASKED]

    def records(self) -> list[Record]:
        return list(self.of.values())

    def record(self, peer: str) -> Record | None:
        return self.of.get(peer)

    def ahead_of(self, state: LogState) -> list[Record]:
        return [r for r in self.records() if key_of(r) > state.key]

    def alive(self, voter: Voter) -> bool:
        return voter.peer in self.living

    def gone(self, voter: Voter) -> bool:
        return voter.peer in self.proved_gone

    def refreshed(self, voter: Voter) -> bool:
        return voter.peer in self.answered


def test_whoever_has_just_started_waits_for_the_voters_only_as_long_as_an_answer_takes() -> None:
    back = Back(woken=False)
    assert not back.over(T_REFRESH_S - 0.1) and back.over(0.2)
    assert back.told_stale == [False]


@pytest.mark.parametrize("how", ["answered", "proved_gone"])
def test_once_all_voters_are_heard_of_it_is_over(how: str) -> None:
    back = Back(woken=False)
    assert not back.over()
    getattr(back, how).add("b")
    assert back.over() and not back.absence.over(), "it ends once"


def test_who_slept_says_so_and_waits_for_the_silent_for_T_evict() -> None:
    """They may have gone on without it by force, and be cut off just now."""
    back = Back(woken=True)
    assert back.told_stale == [True]
    assert not back.over(T_EVICT_S - 0.1) and back.over(0.2)
    assert back.told_stale == [True, False]


def test_who_slept_hears_everybody_for_as_long_as_an_answer_takes() -> None:
    back = Back(woken=True)
    back.answered = {"b"}
    assert not back.over(T_REFRESH_S - 0.1), "the newcomer has not answered"
    assert back.over(0.2)
    back = Back(woken=True)
    back.answered = {"b", "c"}
    assert back.over()
    back = Back(woken=False)
    back.answered = {"b"}
    assert back.over(), "whoever has just started slept through nothing"


@pytest.mark.parametrize(
    ("says", "asked"),
    [
        ({"head": HERE, "depth": 5}, True),
        ({"head": BEFORE, "depth": 4}, True),
        ({"head": ELSEWHERE, "depth": 6}, True),
        ({"head": ELSEWHERE, "depth": 3}, False),
        ({"head": EMPTY, "depth": 0, "tokens": 0.0}, False),
        ({"head": HERE, "depth": 5, "role": OBSERVER}, False),
    ],
    ids=["here", "an entry behind", "ahead", "elsewhere", "without a history", "an observer"],
)
def test_who_slept_waits_also_for_whoever_could_go_on_without_a_vote(says: dict[str, Any], asked: bool) -> None:
    back = Back(woken=True)
    back.says("c", **says)
    back.answered = {"b"}
    assert back.over(T_REFRESH_S + 0.1) != asked
    back.answered.add("c")
    assert not asked or back.over(T_EVICT_S)


def test_nobody_alive_may_be_ahead() -> None:
    for woken in (False, True):
        back = Back(woken)
        back.answered = {"b", "c"}
        back.living.add("c")
        back.says("c", tokens=10.0)
        assert not back.over(2 * T_EVICT_S)
        back.log.state = dataclasses.replace(back.log.state, tokens=10.0, depth=6)
        assert back.over()


def test_who_was_ahead_and_fell_silent_is_waited_for_for_T_evict_from_then_on() -> None:
    back = Back(woken=True)
    back.answered = {"b", "c"}
    back.living.add("c")
    back.says("c", tokens=10.0)
    assert not back.over(30.0)
    back.living.clear()
    assert not back.over(T_EVICT_S - 0.1) and back.over(0.2)
    for end in ("gone", "an observer", "just started"):
        back = Back(woken=end != "just started")
        back.answered = {"b", "c"}
        back.living.add("c")
        back.says("c", tokens=10.0)
        assert not back.over(30.0)
        back.living.clear()
        if end == "gone":
            back.proved_gone.add("c")
        elif end == "an observer":
            back.says("c", role=OBSERVER)
        assert back.over(1.0), end


def test_who_leaves_is_back_no_more() -> None:
    back = Back(woken=False)
    back.answered = {"b"}
    back.ctx.leaving = True
    assert not back.over(2 * T_EVICT_S)


def test_a_second_sleep_begins_anew() -> None:
    back = Back(woken=False)
    back.running_s += T_EVICT_S
    back.absence.begin(woken=True)
    assert not back.over(T_EVICT_S - 0.1) and back.over(0.2)
