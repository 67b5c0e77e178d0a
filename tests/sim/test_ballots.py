"""What `Ballots` takes for a broken promise, and what for the price of a forced ballot."""

from __future__ import annotations

import pytest

from dlc.comm.ids import Ballot, Voter
from dlc.sim.ballots import Ballots

HEAD, X, Y = b"head", b"x", b"y"
V = {name: Voter(name * 32, 1) for name in "abcde"}


class Slot:
    """One slot of the voters a to e; those in a forced ballot decide together, else three of them."""

    def __init__(self) -> None:
        self.ballots = Ballots()
        self.votes: dict[int, set[str]] = {}
        self.forced: dict[int, str] = {}

    def plan(self, counter: int, promised: str, forced: bool = False) -> None:
        self.ballots.planned(HEAD, Ballot(counter, V["a"]), frozenset(V[name] for name in promised))
        if forced:
            self.forced[counter] = promised

    def vote(self, counter: int, names: str, value: bytes) -> str:
        ballot, votes = Ballot(counter, V["a"]), self.votes.setdefault(counter, set())
        for name in names:
            assert self.ballots.value(HEAD, ballot, value) == value
            votes.add(name)
            decides = votes >= set(self.forced[counter]) if counter in self.forced else len(votes) >= 3
            deciding = frozenset(V[n] for n in votes) if decides else frozenset()
            why = self.ballots.voted(HEAD, ballot, deciding, counter in self.forced)
            if why:
                return why
        return ""


def test_two_groups_force_one_slot_and_a_quorum_goes_on_with_the_higher_ballot() -> None:
    """In either order of time: the votes of the higher one may have been sent first."""
    for lower_first in (True, False):
        slot = Slot()
        slot.plan(1, "be", forced=True)
        slot.plan(2, "ad", forced=True)
        slot.plan(3, "abde")
        votes = [(1, "be", X), (2, "ad", Y)]
        for vote in votes if lower_first else reversed(votes):
            assert slot.vote(*vote) == ""
        assert slot.vote(3, "abde", Y) == ""


def test_a_quorum_may_not_decide_in_an_older_ballot_after_others_forced_a_newer_one() -> None:
    """Before that it may: they could not know."""
    for lower_first in (True, False):
        slot = Slot()
        slot.plan(0, "")
        slot.plan(1, "de", forced=True)
        slot.plan(2, "cde")
        votes = [(0, "abc", X), (1, "d", Y)]
        for vote in votes if lower_first else reversed(votes):
            assert slot.vote(*vote) == ""
        assert ("differ" in slot.vote(2, "dec", Y)) == (not lower_first)


@pytest.mark.parametrize("others", ["ab", "de"])
def test_a_higher_forced_ballot_with_one_of_those_who_decided_excuses_nothing(others: str) -> None:
    slot = Slot()
    slot.plan(1, "be", forced=True)
    slot.plan(2, others, forced=True)
    assert slot.vote(1, "be", X) == ""
    assert "has another value" in slot.vote(2, others, Y)


def test_a_vote_sent_before_is_no_excuse_either() -> None:
    slot = Slot()
    slot.plan(1, "be", forced=True)
    slot.plan(2, "ab", forced=True)
    assert slot.vote(2, "ab", Y) == ""
    assert slot.vote(1, "b", X) == ""
    assert "differ" in slot.vote(1, "e", X)


def test_the_first_vote_for_another_value_is_found_before_a_quorum_has_it() -> None:
    slot = Slot()
    slot.plan(0, "")
    slot.plan(1, "cde")
    assert slot.vote(0, "abc", X) == ""
    assert "has another value" in slot.vote(1, "e", Y)


def test_deciding_sets_that_meet_differ() -> None:
    """Nobody of those who decided was asked, but they vote again, for something else."""
    slot = Slot()
    slot.plan(1, "be", forced=True)
    slot.plan(2, "acd")
    assert slot.vote(1, "be", X) == ""
    assert "differ" in slot.vote(2, "bac", Y)


def test_the_same_value_again_is_what_ballots_are_for() -> None:
    slot = Slot()
    slot.plan(0, "")
    slot.plan(1, "abc")
    assert slot.vote(0, "abc", X) == "" and slot.vote(1, "abcde", X) == ""
    assert slot.ballots.is_decided(HEAD, X) and not slot.ballots.is_decided(HEAD, Y)
