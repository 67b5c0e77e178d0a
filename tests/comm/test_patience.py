"""How long an owner waits for whom, without the rest of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from dlc.comm.context import Context
from dlc.comm.ids import Voter
from dlc.comm.patience import GAP_S_MAX, OVERTIME, RATE_SHARE_NEW, FIRST_RATE_Bps, Patience
from dlc.comm.timeouts import Timeouts

A, B = Voter("a", 1), Voter("b", 1)
TIMEOUTS = Timeouts()
MB = 1_000_000


@pytest.fixture
def patience() -> Patience:
    members = SimpleNamespace(timeouts=TIMEOUTS, health=1.0, rtt_max_s=0.01)
    members.rtt_s, members.record = lambda peer: 0.01, lambda peer: None
    return Patience(Context(Voter("me", 1), cast(Any, members)))


def begin(patience: Patience, owed_bytes: int = 0) -> None:
    patience.begin((A, B), 1, 1000, 1000, owed_bytes)


def passes(patience: Patience, seconds: float) -> None:
    patience.ctx.running_s += seconds


def test_who_was_late_in_one_plan_is_waited_for_in_the_next(patience: Patience) -> None:
    begin(patience)
    passes(patience, 1.1 * TIMEOUTS.chunk_s)
    assert patience.given_up(A)
    begin(patience)
    assert not patience.given_up(A) and patience.given_up(B) is False


def test_a_slow_contributor_is_waited_for_as_long_as_its_earlier_rounds_took(patience: Patience) -> None:
    begin(patience, owed_bytes=100 * MB)
    usual_s = patience.whole_s(A) - OVERTIME * patience.silence_s(A)
    assert usual_s == pytest.approx(OVERTIME * 100 * MB / FIRST_RATE_Bps)
    slow = []
    for rate_Bps in (0.2 * MB, 0.1 * MB):
        passes(patience, 10.0)
        patience.heard(A, int(10 * rate_Bps))
        begin(patience, owed_bytes=100 * MB)
        slow.append(OVERTIME * 100 * MB / (patience.whole_s(A) - OVERTIME * patience.silence_s(A)))
    mixed = RATE_SHARE_NEW * 0.1 * MB + (1 - RATE_SHARE_NEW) * 0.2 * MB
    assert slow == pytest.approx([0.2 * MB, mixed])
    assert patience.whole_s(B) - OVERTIME * patience.silence_s(B) == pytest.approx(usual_s), "of it nothing is known"


def test_who_sends_between_two_looks_is_not_waited_for_meanwhile(patience: Patience) -> None:
    begin(patience)
    for _ in range(100):
        passes(patience, 1.0)
        patience.heard(A, 1000)
        patience.waiting_for((A,))
    assert not patience.given_up(A) and patience.given_up(B)


def test_a_pause_that_its_pace_does_not_explain_counts_as_one_silence_and_wears_off(patience: Patience) -> None:
    """A cut, a sleep: else who was away for an hour would be waited for as long ever after."""
    begin(patience)
    patience.heard(A, 1000)
    passes(patience, 3600.0)
    patience.heard(A, 1000)
    assert patience.silence_s(A) == TIMEOUTS.chunk_gaps * TIMEOUTS.chunk_s
    for _ in range(20):
        patience.heard(A, 1000)
    assert patience.silence_s(A) == TIMEOUTS.chunk_s
    for _ in range(20):  # what it grows to by steps has an end
        passes(patience, patience.silence_s(A))
        patience.heard(A, 1000)
    assert patience.silence_s(A) == TIMEOUTS.chunk_gaps * GAP_S_MAX


def test_whose_results_come_is_not_silent(patience: Patience) -> None:
    begin(patience)
    passes(patience, 0.9 * TIMEOUTS.chunk_s)
    patience.sign(A)
    passes(patience, 0.9 * TIMEOUTS.chunk_s)
    assert not patience.given_up(A) and patience.given_up(B)


def test_pauses_while_contributions_become_final_tell_of_no_pace(patience: Patience) -> None:
    patience.begin((A, B), 1, 1000, 1000, 0, fill_s=10.0)
    patience.heard(A, 1000)
    passes(patience, OVERTIME * 10.0 + 50.0)
    patience.heard(A, 1000)
    assert patience.silence_s(A) == TIMEOUTS.chunk_s


def test_who_is_slow_itself_bears_with_longer_silences(patience: Patience) -> None:
    begin(patience)
    patience.heard(A, 1000)
    patience.ctx.members.health = 4.0  # type: ignore[misc]
    assert patience.silence_s(A) == 4 * TIMEOUTS.chunk_s


def test_where_most_are_slower_than_it_was_nobody_need_be_as_fast(patience: Patience) -> None:
    begin(patience)
    passes(patience, 10.0)
    patience.heard(A, 1 * MB)
    for rate_Bps, counts_Bps in ((1.0 * MB, 0.1 * MB), (0.08 * MB, 0.08 * MB)):
        begin(patience, owed_bytes=100 * MB)
        passes(patience, 1.0)
        patience._received = dict.fromkeys((A, B), int(rate_Bps))
        rest_s = patience.whole_s(A) - OVERTIME * patience.silence_s(A)
        assert rest_s == pytest.approx(OVERTIME * 100 * MB / counts_Bps)
        patience._received = dict.fromkeys((A, B), 0)


def test_what_is_on_its_way_is_waited_for_by_the_pauses_lately(patience: Patience) -> None:
    begin(patience)
    assert patience.underway_s(A) == patience.silence_s(A) / 2, "no pause is known"
    patience.sign(A)
    passes(patience, 5.0)
    patience.sign(A)
    assert patience.underway_s(A) == TIMEOUTS.chunk_gaps * 5.0
    for _ in range(40):
        passes(patience, 0.1)
        patience.sign(A)
    assert patience.underway_s(A) == TIMEOUTS.chunk_s / 2


def test_nobody_is_silent_while_contributions_become_final(patience: Patience) -> None:
    patience.begin((A, B), 1, 1000, 1000, 0, fill_s=10.0)
    passes(patience, OVERTIME * 10.0 + 0.9 * TIMEOUTS.chunk_s)
    assert not patience.given_up(A) and not patience.own_overdue()
    passes(patience, 0.2 * TIMEOUTS.chunk_s)
    assert patience.given_up(A) and patience.own_overdue()
