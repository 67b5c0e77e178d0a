"""Who may serve a span: two views of one term are never both established, and a later one takes the place of both."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dlc.comm.claimant import Claimant
from dlc.comm.claims import CLAIM_S, Claiming, Witness
from dlc.comm.ids import Voter
from dlc.comm.seats import Seat
from dlc.comm.servermessages import Granted, Origin, Refused, SpanView

A, B, C, D, E = (Voter(name, 1) for name in "abcde")
VIEW = SpanView(3, 5, B, None, Origin(b"theta"), 0, 0)


def view(term: int, owner: Voter = B) -> SpanView:
    return dataclasses.replace(VIEW, term=term, owner=owner)


@pytest.mark.parametrize("other", [view(5, A), view(5, C), dataclasses.replace(VIEW, standby=C), view(4)])
def test_a_witness_grants_one_view_of_a_term_and_none_of_an_earlier_one(other: SpanView) -> None:
    witness = Witness()
    assert witness.asked(VIEW) == Granted(3, 5)
    assert witness.asked(other) == Refused(VIEW, False)
    assert witness.asked(VIEW) == Granted(3, 5), "its answer was lost: it is asked again"
    assert witness.asked(dataclasses.replace(other, span=4)) == Granted(4, other.term)
    assert witness.asked(view(6, C)) == Granted(3, 6)
    assert witness.asked(VIEW) == Refused(view(6, C), False)


@pytest.mark.parametrize("other", [view(5, A), view(5, C), view(4)])
def test_no_other_view_of_an_established_term_is_granted(other: SpanView) -> None:
    witness = Witness()
    assert witness.learn(VIEW)
    assert witness.asked(other) == Refused(VIEW, True)
    assert witness.asked(VIEW) == Granted(3, 5)
    assert witness.asked(view(6, C)) == Granted(3, 6)


def test_of_two_established_views_the_greater_term_and_then_the_greater_owner_holds() -> None:
    witness = Witness()
    assert witness.learn(VIEW)
    for older in (VIEW, view(5, A), view(4, C)):
        assert not witness.learn(older) and witness.established == {3: VIEW}
    for newer in (view(5, C), view(6, A)):
        assert witness.learn(newer) and witness.established == {3: newer}


def test_the_next_term_is_after_all_that_were_granted_or_established() -> None:
    witness = Witness()
    assert witness.term_after(3) == 1
    witness.asked(VIEW)
    assert witness.term_after(3) == 6 and witness.term_after(4) == 1
    witness.learn(view(8))
    assert witness.term_after(3) == 9


@pytest.mark.parametrize(
    ("granted", "won"),
    [({A, B}, False), ({A, B, C}, True), ({A, B, E}, False), ({A, B, C, E}, True), (set(), False)],
)
def test_a_claim_is_won_by_more_than_half_of_those_known(granted: set[Voter], won: bool) -> None:
    """Two halves would establish two views of one term; who is not known any more is no part of a majority."""
    assert Claiming(VIEW, 0.0, granted).won([A, B, C, D]) is won


@pytest.mark.parametrize("lives", [True, False])
def test_after_a_refusal_the_next_claim_is_for_a_term_that_can_be_granted(lives: bool) -> None:
    """Of who lives only in a while: it may win. Each claim would be refused by those who granted the other one."""
    host: Any = SimpleNamespace(witness=Witness(), now=0.0, me=A, lives=lambda v: lives, away=lambda v: not lives)
    host.known, host.living, host.cast = lambda: [A, B, C], lambda *roles: [B, C], lambda voters, message: None
    seat, claimant, state = Seat(), Claimant(host), SimpleNamespace(origin=VIEW.origin, seed=(0, 0), version=0)
    host.seats = {3: seat}
    claimant.make(3, seat, cast(Any, state), A, None)
    assert seat.claim is not None and seat.claim.view.term == 1
    claimant.refused(Refused(view(0), False))
    assert seat.claim is not None, "that answers an earlier one"
    claimant.refused(Refused(view(9), False))
    assert seat.claim is None and (seat.retry_at >= CLAIM_S / 2) is lives
    claimant.make(3, seat, cast(Any, state), A, None)
    assert seat.claim is not None and seat.claim.view.term == 10
    assert host.witness.asked(view(10, C)) == Refused(seat.claim.view, False), "of my own claim I am a witness, too"


@pytest.mark.parametrize("refused", [True, False])
def test_an_owner_whose_claim_comes_to_nothing_goes_on_with_the_standby_that_it_has(refused: bool) -> None:
    """One that was to hand its span over made no more updates, and waited for a replica that nobody was to have."""
    host: Any = SimpleNamespace(witness=Witness(), now=0.0, me=A, lives=lambda v: True, away=lambda v: False)
    host.known, host.living, host.cast = lambda: [A, B, C], lambda *roles: [B, C], lambda voters, message: None
    owner: Any = SimpleNamespace(also=C, closing=True)
    seat, claimant, state = Seat(owner=owner), Claimant(host), SimpleNamespace(origin=VIEW.origin, seed=(0, 0))
    host.seats = {3: seat}
    claimant.make(3, seat, cast(Any, state), C, None)
    host.now = CLAIM_S
    assert seat.claim is not None
    claimant.press(3, seat, seat.claim)
    assert seat.claim is not None and (owner.also, owner.closing) == (C, True), "it may come yet"
    if refused:
        claimant.refused(Refused(view(9), False))
    else:
        host.now = CLAIM_S + 0.1
        claimant.press(3, seat, seat.claim)
    assert seat.claim is None and (owner.also, owner.closing) == (None, False)
