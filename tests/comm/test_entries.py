"""The log's pure part: quorums intersect, keys grow, hashes name values and not ballots, and rounds count who is in."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlc.comm.entries import (
    CONFIG,
    EMPTY,
    OPEN,
    ROUND,
    Entry,
    LogState,
    Part,
    SavedLog,
    counted_parts,
    is_quorum,
    manifest_hash,
)
from dlc.comm.ids import Voter
from dlc.comm.wire import pack, unpack

A, B, C, D = (Voter(name, 1) for name in "abcd")


def entry(state: LogState, kind: str = CONFIG, **changes: object) -> Entry:
    plain = Entry(kind, state.head, state.depth + 1, "", 0, (A, B, C), (A, B, C), (), 0, 0, "", b"", b"", 0)
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def opened() -> LogState:
    state = LogState().apply(entry(LogState()))
    return state.apply(entry(state, OPEN, channel="train", numel=10, chunk_elems=4, codec="fp16", lease_len=5))


@given(st.integers(1, 7), st.data())
def test_any_two_quorums_of_one_electorate_intersect(n: int, data: st.DataObject) -> None:
    electorate = [Voter(str(i), 1) for i in range(n)]
    rank0 = data.draw(st.sampled_from(electorate))
    quorums = [
        set(s)
        for size in range(n + 1)
        for s in itertools.combinations(electorate, size)
        if is_quorum(s, electorate, rank0)
    ]
    assert quorums and all(p & q for p in quorums for q in quorums)


def test_half_decides_only_with_rank_zero() -> None:
    assert is_quorum([A, B], [A, B, C, D], A)
    assert not is_quorum([C, D], [A, B, C, D], A)
    assert not is_quorum([], [], None), "nobody decides on the empty log"


def test_rank_zero_is_the_first_in_rank_and_nobody_is_on_the_empty_log() -> None:
    state = opened()
    assert state.rank0 == state.ranked[0] and LogState().rank0 is None
    rank1, rank2 = state.ranked[1:]
    two = dataclasses.replace(state, electorate=(state.ranked[0], rank1))
    assert two.quorum([state.ranked[0]]) and not two.quorum([rank1]) and state.quorum([rank1, rank2])


def test_strangers_do_not_count_towards_a_quorum() -> None:
    assert not is_quorum([A, Voter("x", 1), Voter("y", 1)], [A, B, C], A)


def test_hash_depends_on_every_field() -> None:
    base = entry(LogState())
    seen = {base.hash}
    for field in dataclasses.fields(Entry):
        old = getattr(base, field.name)
        new = (
            old + "x" if isinstance(old, str)
            else old + b"x" if isinstance(old, bytes)
            else old + 1 if isinstance(old, int)
            else (Part(A, 1.0, 1),) if field.name == "roster"
            else old[:1]
        )  # fmt: skip
        seen.add(dataclasses.replace(base, **{field.name: new}).hash)
    assert len(seen) == 1 + len(dataclasses.fields(Entry))


def test_a_round_counts_tokens_and_positions_and_moves_the_base() -> None:
    state = opened()
    lease = state.ledger.lease(A)
    assert lease is not None
    roster = (Part(A, 100.0, 3), Part(B, 50.0, 7))
    after = state.apply(entry(state, ROUND, channel="train", t=1, roster=roster), counted=roster[:1])
    assert after.tokens == 100.0 and after.round_of("train") == 1
    assert after.base("train") == after.head != state.base("train")
    moved, unmoved = after.ledger.lease(A), after.ledger.lease(B)
    assert moved is not None and moved.ranges[0].lo == 3
    assert unmoved == state.ledger.lease(B)


def test_a_contribution_without_samples_counts_no_tokens() -> None:
    state = opened()
    roster = (Part(A, 100.0, -1), Part(B, 50.0, 7))
    after = state.apply(entry(state, ROUND, channel="train", t=1, roster=roster), counted=roster)
    assert after.tokens == 50.0 and after.round_of("train") == 1 and after.ledger.lease(A) == state.ledger.lease(A)


def test_config_keeps_base_and_rank_and_a_round_moves_both() -> None:
    state = opened()
    config = state.apply(entry(state, CONFIG))
    assert config.base("train") == state.base("train") and config.ranked == state.ranked
    assert config.head != state.head
    round_ = state.apply(entry(state, ROUND, channel="train", t=1))
    assert round_.rank_seed == round_.head
    founded = LogState().apply(entry(LogState()))
    assert founded.rank_seed == founded.head


def test_keys_grow_along_a_log_and_a_gap_is_refused() -> None:
    first = LogState().apply(entry(LogState()))
    second = first.apply(entry(first))
    assert LogState().key < first.key < second.key
    with pytest.raises(ValueError, match="does not follow"):
        second.apply(entry(first))


def test_library_channels_count_no_tokens() -> None:
    state = opened()
    after = state.apply(entry(state, ROUND, channel="lib", t=1, roster=(Part(A, 9.0, 0),)), (Part(A, 9.0, 0),))
    assert after.tokens == 0 and after.round_of("lib") == 1 and after.ledger.lease(A) == state.ledger.lease(A)


def test_counted_means_more_than_half_of_the_elements() -> None:
    a, b = Part(A, 1.0, 1), Part(B, 1.0, 1)
    assert counted_parts((a, b), [(5, (a, b)), (5, (a,))]) == (a,)
    assert counted_parts((a, b), [(6, (a, b)), (5, (a,))]) == (a, b)


def test_a_saved_log_that_is_of_one_piece_fits() -> None:
    state = opened()
    for chain, totals, fits in (
        ((EMPTY, state.head), (0.0, 0.0), True),
        ((state.head, EMPTY), (0.0, 0.0), False),
        ((EMPTY, state.head), (0.0,), False),
        ((), (), False),
    ):
        assert SavedLog(state, chain, totals).fits is fits


def test_log_state_survives_the_wire() -> None:
    state = opened()
    assert unpack(pack(state), LogState) == state


def test_manifest_depends_on_order() -> None:
    assert manifest_hash([b"1" * 32, b"2" * 32]) != manifest_hash([b"2" * 32, b"1" * 32])
    assert len(EMPTY) == 32
