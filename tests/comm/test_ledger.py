"""Leases: whatever happens, every block is consumed, pooled, leased or fresh, and never two of them (I5)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlc.comm.ids import Voter
from dlc.comm.ledger import AWAY_ENTRIES, RANGES_PER_VOTER, Lease, Ledger, Range

VOTERS = [Voter(name, inc) for name in "abcd" for inc in (1, 2)]


def blocks_of(ranges: tuple[Range, ...]) -> list[int]:
    return [b for r in ranges for b in range(r.lo, r.hi)]


@given(st.data())
def test_consumed_pool_and_leases_partition_the_blocks(data: st.DataObject) -> None:
    ledger = Ledger(length=data.draw(st.integers(1, 7)))
    consumed: list[int] = []
    for _ in range(data.draw(st.integers(1, 25))):
        counted = []
        for lease in ledger.leases:
            if lease.blocks and data.draw(st.booleans()):
                blocks, upto = lease.take(data.draw(st.integers(1, lease.blocks)))
                counted.append((lease.voter, upto))
                consumed += blocks
        seats = data.draw(st.lists(st.sampled_from(VOTERS), unique=True))
        ledger = ledger.committed(counted).seated(seats)
        held = consumed + blocks_of(ledger.pool) + [b for lease in ledger.leases for b in blocks_of(lease.ranges)]
        assert sorted(held) == list(range(ledger.next))
        seated = [lease for lease in ledger.leases if not lease.away]
        assert [lease.voter for lease in seated] == sorted(seats)
        assert all(len(lease.ranges) == RANGES_PER_VOTER for lease in seated)
        assert all(lease.away <= AWAY_ENTRIES for lease in ledger.leases)


def test_what_a_removed_voter_had_not_committed_is_handed_out_again_first() -> None:
    a, b = VOTERS[0], VOTERS[2]
    ledger = Ledger(length=10).seated([a]).committed([(a, 4)])
    for _ in range(AWAY_ENTRIES):
        ledger = ledger.seated([b])
        lease = ledger.lease(a)
        assert lease is not None and lease.ranges == (Range(4, 10), Range(10, 20)) and ledger.valid(a, 7)
    ledger = ledger.seated([b])
    assert ledger.lease(a) is None and not ledger.valid(a, 7)
    assert ledger.pool == (Range(4, 10), Range(10, 20))
    lease = ledger.committed([(b, 30)]).seated([b]).lease(b)
    assert lease is not None and lease.ranges == (Range(30, 40), Range(4, 10))


def test_of_a_short_pool_who_has_nothing_is_given_first() -> None:
    """Else it trains fresh blocks, and those of the dead wait behind what the other has yet."""
    a, b, c = VOTERS[0], VOTERS[2], VOTERS[4]
    ledger = Ledger(10, (Lease(a, (Range(0, 10),)), Lease(b, ())), (Range(10, 17),), 17).seated([a, b, c])
    ranges = [lease.ranges for lease in ledger.leases]
    assert [held[0] for held in ranges] == [Range(0, 10), Range(10, 17), Range(17, 27)]
    assert [held[1] for held in ranges] == [Range(27, 37), Range(37, 47), Range(47, 57)] and not ledger.pool


def test_who_has_committed_all_of_its_lease_leaves_none_behind() -> None:
    a, b = VOTERS[0], VOTERS[2]
    ledger = Ledger(length=10).seated([a]).committed([(a, 20)])
    assert ledger.lease(a) == Lease(a, ()) and ledger.seated([b]).lease(a) is None


def test_a_table_that_no_entries_can_have_made_is_not_sound() -> None:
    a, b = VOTERS[0], VOTERS[2]
    one, other = Range(0, 10), Range(10, 20)
    assert Ledger().sound and Ledger(10, (Lease(a, (one,)), Lease(b, (other,), 1)), (Range(20, 30),), 30).sound
    assert Ledger(10, (Lease(a, (Range(4, 10), other)), Lease(b, ())), (), 30).sound, "what is missing is consumed"
    for leases, pool, then in (
        ((Lease(b, (one,)), Lease(a, (other,))), (), 20),  # out of order
        ((Lease(a, (one,)), Lease(a, (other,))), (), 20),  # two of one voter
        ((Lease(a, (one,)), Lease(b, (Range(9, 20),))), (), 20),  # a block is leased twice
        ((Lease(a, (one,)),), (Range(5, 6),), 20),  # leased, and in the pool
        ((Lease(a, (Range(5, 5),)),), (), 20),  # nothing is a range
        ((Lease(a, (Range(-1, 5),)),), (), 20),
        ((Lease(a, (one, other)),), (), 19),  # a block that is handed out again as a fresh one
        ((), (one,), 9),
        ((Lease(a, (one, other, Range(20, 30))),), (), 30),
        ((Lease(a, (one,), AWAY_ENTRIES + 1),), (), 20),
        ((Lease(a, (one,), -1),), (), 20),
    ):
        assert not Ledger(10, leases, pool, then).sound
    for without in (Ledger(0, (Lease(a, ()),)), Ledger(0, (), (one,)), Ledger(0, (), (), 1)):
        assert not without.sound, "the run has no leases"


def test_who_comes_back_in_time_goes_on_with_its_lease() -> None:
    a, b = VOTERS[0], VOTERS[2]
    ledger = Ledger(length=10).seated([a, b]).committed([(a, 4)])
    before = ledger.lease(a)
    for _ in range(AWAY_ENTRIES):
        ledger = ledger.seated([b])
    lease = ledger.seated([a, b]).lease(a)
    assert before is not None and lease is not None and lease.away == 0 and lease.ranges == before.ranges


def test_another_process_of_the_peer_has_its_lease_at_once() -> None:
    """Where all were started again, each trained what another had begun."""
    a, again, b, b_again = VOTERS[:4]
    ledger = Ledger(length=10).seated([a, b]).committed([(a, 4), (b, 13)])
    for seats in ([again, b_again], [again, b]):
        later = ledger.seated(seats)
        assert later.lease(a) is None and not later.valid(a, 7) and not later.pool
        ranges = [lease.ranges for lease in later.leases]
        assert ranges == [(Range(4, 10), Range(20, 30)), (Range(13, 20), Range(30, 40))]


def test_of_two_older_processes_the_first_is_succeeded_and_what_the_other_had_goes_to_the_pool() -> None:
    a, again, third = *VOTERS[:2], Voter("a", 3)
    ledger = Ledger(length=10).seated([a, again]).seated([third])
    lease = ledger.lease(third)
    assert lease is not None and lease.ranges == (Range(0, 10), Range(20, 30))
    assert ledger.pool == (Range(10, 20), Range(30, 40)) and len(ledger.leases) == 1


def test_of_two_newer_processes_the_last_one_succeeds() -> None:
    """The one before it is about to lose its seat."""
    a, again, third = *VOTERS[:2], Voter("a", 3)
    ledger = Ledger(length=10).seated([a]).committed([(a, 4)]).seated([again, third])
    ranges = [lease.ranges for lease in ledger.leases]
    assert ranges == [(Range(20, 30), Range(30, 40)), (Range(4, 10), Range(10, 20))]


def test_take_crosses_ranges_and_upto_advances_over_both() -> None:
    a, b = VOTERS[0], VOTERS[2]
    lease = Ledger(length=3).seated([a, b]).lease(a)
    assert lease is not None and lease.ranges == (Range(0, 3), Range(6, 9))
    blocks, upto = lease.take(5)
    assert blocks == [0, 1, 2, 6, 7] and upto == 8
    assert lease.advanced(upto).ranges == (Range(8, 9),)
    assert lease.take(99) == ([0, 1, 2, 6, 7, 8], 9)


def test_nothing_taken_is_nothing_to_commit() -> None:
    lease = Ledger(length=3).seated(VOTERS[:1]).lease(VOTERS[0])
    assert lease is not None and lease.take(0) == ([], -1)


def test_positions_outside_the_lease_are_not_valid() -> None:
    a, b = VOTERS[0], VOTERS[2]
    ledger = Ledger(length=3).seated([a])
    assert ledger.valid(a, 1) and ledger.valid(a, 3)
    assert not ledger.valid(a, 0) and not ledger.valid(a, 7) and not ledger.valid(b, 1)
    with pytest.raises(ValueError, match="outside the lease"):
        ledger.committed([(a, 7)])


def test_who_brings_no_samples_needs_a_lease_and_moves_nothing() -> None:
    a, b = VOTERS[0], VOTERS[2]
    ledger = Ledger(length=3).seated([a])
    assert ledger.valid(a, -1) and not ledger.valid(b, -1)
    assert ledger.committed([(a, -1)]) == ledger


def test_without_leases_everything_is_valid_and_nothing_changes() -> None:
    ledger = Ledger()
    assert ledger.valid(VOTERS[0], 12345)
    assert ledger.committed([(VOTERS[0], 5)]).seated(VOTERS) == ledger
