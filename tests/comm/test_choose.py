"""What a new coordinator must keep: written as small transcripts, one per rule."""

from __future__ import annotations

import dataclasses

import pytest

from dlc.comm.choose import Again, Resume, choose
from dlc.comm.entries import CONFIG, ROUND, Entry, Part
from dlc.comm.ids import Ballot, Voter
from dlc.comm.messages import Decree, HeldChunk, Plan, Promise

A, B, C = (Voter(name, 1) for name in "abc")
PA, PB = Part(A, 1.0, 4), Part(B, 1.0, 8)
HEAD = b"h" * 32
ROUND_1 = Entry(ROUND, HEAD, 3, "train", 1, (A, B, C), (A, B, C), (PA, PB), 8, 4, "fp32", b"", b"", 0)
H0, H1, H2 = b"0" * 32, b"1" * 32, b"2" * 32


def plan(counter: int, voter: Voter = A, entry: Entry = ROUND_1) -> Plan:
    return Plan(HEAD, Ballot(counter, voter), (), entry, b"", (A, B), (0, 1), (), ())


def promise(**fields: object) -> Promise:
    empty = Promise(HEAD, Ballot(9, C), None, None, None, (), (), ())
    return dataclasses.replace(empty, **fields)  # type: ignore[arg-type]


def test_nothing_known_is_a_free_choice() -> None:
    assert choose({A: promise(), B: promise()}) is None


def test_a_config_plan_that_nobody_accepted_is_forgotten() -> None:
    config = dataclasses.replace(ROUND_1, kind=CONFIG, roster=())
    assert choose({A: promise(plan=plan(0, entry=config))}) is None


def test_an_accepted_decree_is_proposed_again_verbatim() -> None:
    decree = Decree(dataclasses.replace(ROUND_1, manifest=b"m" * 32), (H0, H1))
    choice = choose(
        {
            A: promise(accepted_ballot=Ballot(0, A), accepted=decree, plan=plan(0)),
            B: promise(plan=plan(5)),
            C: promise(accepted_ballot=Ballot(0, A), accepted=decree),
        }
    )
    assert isinstance(choice, Again) and choice.decree == decree
    assert [(f.chunk, f.hash, f.holders) for f in choice.fixed] == [(0, H0, (A, C)), (1, H1, (A, C))]


@pytest.mark.parametrize("wrong", [A, B, C])
def test_of_two_decrees_in_one_ballot_the_one_that_most_accepted_is_proposed(wrong: Voter) -> None:
    """A host with broken memory accepts other bytes; whoever saw only the votes of the others has learned theirs."""
    right, other = (Decree(dataclasses.replace(ROUND_1, manifest=m * 32), (h, H1)) for m, h in ((b"a", H0), (b"z", H2)))
    choice = choose(
        {v: promise(accepted_ballot=Ballot(1, B), accepted=other if v == wrong else right) for v in (A, B, C)}
    )
    assert isinstance(choice, Again) and choice.decree == right
    assert wrong not in choice.fixed[0].holders and len(choice.fixed[0].holders) == 2


@pytest.mark.parametrize("first", [A, B])
def test_of_two_accepted_decrees_the_higher_ballot_wins(first: Voter) -> None:
    """Whichever promise came first."""
    old, new = (Decree(dataclasses.replace(ROUND_1, manifest=m * 32), (H0, H1)) for m in (b"o", b"n"))
    promises = {
        A: promise(accepted_ballot=Ballot(1, B), accepted=old),
        B: promise(accepted_ballot=Ballot(2, A), accepted=new),
    }
    choice = choose({first: promises.pop(first), **promises})
    assert isinstance(choice, Again) and choice.decree == new
    assert {f.holders for f in choice.fixed} == {(B,)}, "who accepted the other one does not hold these bytes"


def test_a_round_goes_on_with_the_chunks_that_are_held() -> None:
    choice = choose(
        {
            A: promise(plan=plan(0), held=(HeldChunk(0, Ballot(0, A), H0, 0),), rosters=((PA, PB),)),
            B: promise(plan=plan(0)),
        }
    )
    assert isinstance(choice, Resume) and choice.plan.entry.roster == (PA, PB)
    assert [(f.chunk, f.hash, f.holders) for f in choice.fixed] == [(0, H0, (A,))]


@pytest.mark.parametrize("newest", [A, B, C])
def test_of_the_plans_that_are_known_the_highest_goes_on(newest: Voter) -> None:
    """Whoever tells of it: an older one may have a roster that the newest was made without."""
    plans = {v: plan(4 if v == newest else 1, v) for v in (A, B, C)}
    choice = choose({v: promise(plan=plans[v]) for v in (A, B, C)})
    assert isinstance(choice, Resume) and choice.plan == plans[newest]


def test_a_chunk_of_another_roster_is_not_reused() -> None:
    """Found by simulation: an old plan's chunk averaged somebody whom the newer plan's roster does not name."""
    newer = plan(4, B, dataclasses.replace(ROUND_1, roster=(PA,)))
    choice = choose(
        {
            A: promise(plan=plan(0), held=(HeldChunk(0, Ballot(0, A), H0, 0),), rosters=((PA, PB),)),
            B: promise(plan=newer),
        }
    )
    assert isinstance(choice, Resume) and choice.plan == newer and choice.fixed == ()


def test_a_chunk_of_another_channel_is_not_reused() -> None:
    """A lease position of the one may be the number of an offer in the other, and rosters look the same."""
    other = plan(4, B, dataclasses.replace(ROUND_1, channel="sum", numel=4))
    held = (HeldChunk(0, Ballot(0, A), H0, 0), HeldChunk(1, Ballot(0, A), H1, 0))
    choice = choose({A: promise(plan=plan(0), held=held, rosters=((PA, PB),)), B: promise(plan=other), C: promise()})
    assert isinstance(choice, Resume) and choice.plan == other and choice.fixed == ()


def test_a_chunk_that_was_clipped_to_another_median_is_not_reused() -> None:
    """Of contributors that both rosters name; the chunks of one round were clipped by different factors."""
    few = dataclasses.replace(plan(1, B), norms=(3.0, 4.0))
    larger = dataclasses.replace(ROUND_1, roster=(*ROUND_1.roster, Part(C, 1.0, 2)))
    for other, reused in (
        (few, True),
        (dataclasses.replace(few, norms=(3.0, 5.0)), False),
        (dataclasses.replace(few, norms=()), False),
        (dataclasses.replace(few, entry=larger, norms=(3.0, 4.0, 5.0)), False),
        (dataclasses.replace(few, entry=larger), False),
    ):
        holder = promise(
            plan=dataclasses.replace(other, ballot=Ballot(0, A)),
            held=(HeldChunk(0, Ballot(0, A), H0, 0),),
            rosters=((PA, PB),),
        )
        choice = choose({A: holder, B: promise(plan=few)})
        assert isinstance(choice, Resume) and choice.plan == few and bool(choice.fixed) == reused


def test_a_contribution_with_another_lease_position_is_another_contribution() -> None:
    """Found by simulation: the same weight with other samples was averaged, and its samples leased again."""
    stale = Part(B, PB.weight, PB.upto - 4)
    choice = choose({A: promise(plan=plan(0), held=(HeldChunk(0, Ballot(0, A), H0, 0),), rosters=((PA, stale),))})
    assert isinstance(choice, Resume) and choice.fixed == ()


def test_a_chunk_without_contributors_is_reduced_again() -> None:
    choice = choose({A: promise(plan=plan(0), held=(HeldChunk(0, Ballot(0, A), H0, 0),), rosters=((),))})
    assert isinstance(choice, Resume) and choice.fixed == ()


def test_of_two_candidates_the_one_with_more_holders_then_the_higher_ballot() -> None:
    rosters = ((PA, PB),)
    old, new = HeldChunk(0, Ballot(0, A), H0, 0), HeldChunk(0, Ballot(3, B), H1, 0)
    choice = choose({v: promise(plan=plan(3), held=(h,), rosters=rosters) for v, h in ((A, old), (B, new), (C, old))})
    assert isinstance(choice, Resume) and choice.fixed[0].hash == H0
    choice = choose({v: promise(plan=plan(3), held=(h,), rosters=rosters) for v, h in ((A, old), (B, new))})
    assert isinstance(choice, Resume) and choice.fixed[0].hash == H1


def test_a_fixed_chunk_names_a_few_of_its_holders_each_chunk_others() -> None:
    voters = tuple(Voter(name, 1) for name in "abcde")
    decree = Decree(ROUND_1, (H0, H1, H2, H0, H1))
    choice = choose({v: promise(accepted_ballot=Ballot(0, A), accepted=decree) for v in reversed(voters)})
    assert isinstance(choice, Again)
    a, b, c, d, e = voters
    assert [f.holders for f in choice.fixed] == [(a, b, c), (b, c, d), (c, d, e), (d, e, a), (e, a, b)]
    few = choose({v: promise(accepted_ballot=Ballot(0, A), accepted=decree) for v in (c, b, a)})
    assert isinstance(few, Again) and {f.holders for f in few.fixed} == {(a, b, c)}
