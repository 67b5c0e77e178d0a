"""Leases: whatever happens, every block is consumed, pooled, leased or fresh, and never two of them (I5)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlc.comm.ids import Voter
from dlc.comm.ledger import RANGES_PER_VOTER, Ledger, Range

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
        assert [lease.voter for lease in ledger.leases] == sorted(seats)
        assert all(len(lease.ranges) == RANGES_PER_VOTER for lease in ledger.leases)


def test_what_a_removed_voter_had_not_committed_is_handed_out_again_first() -> None:
    a, b = VOTERS[0], VOTERS[2]
    ledger = Ledger(length=10).seated([a]).committed([(a, 4)])
    ledger = ledger.seated([b])
    lease = ledger.lease(b)
    assert lease is not None and lease.ranges == (Range(4, 10), Range(10, 20))
    assert ledger.next == 20 and not ledger.pool


def test_take_crosses_ranges_and_upto_advances_over_both() -> None:
    a, b = VOTERS[0], VOTERS[2]
    lease = Ledger(length=3).seated([a, b]).lease(a)
    assert lease is not None and lease.ranges == (Range(0, 3), Range(6, 9))
    blocks, upto = lease.take(5)
    assert blocks == [0, 1, 2, 6, 7] and upto == 8
    assert lease.advanced(upto).ranges == (Range(8, 9),)
    assert lease.take(99) == ([0, 1, 2, 6, 7, 8], 9)


def test_positions_outside_the_lease_are_not_valid() -> None:
    a, b = VOTERS[0], VOTERS[2]
    ledger = Ledger(length=3).seated([a])
    assert ledger.valid(a, 1) and ledger.valid(a, 3)
    assert not ledger.valid(a, 0) and not ledger.valid(a, 7) and not ledger.valid(b, 1)
    with pytest.raises(ValueError, match="outside the lease"):
        ledger.committed([(a, 7)])


def test_without_leases_everything_is_valid_and_nothing_changes() -> None:
    ledger = Ledger()
    assert ledger.valid(VOTERS[0], 12345)
    assert ledger.committed([(VOTERS[0], 5)]).seated(VOTERS) == ledger
