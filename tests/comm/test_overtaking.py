"""Results on the bulk lane that overtake the plan they belong to, which travels on the control lane."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dlc.comm.context import Context
from dlc.comm.early import EARLY_BYTES_MAX, size_of
from dlc.comm.entries import EMPTY, ROUND, Entry, Part
from dlc.comm.exchange import Exchange
from dlc.comm.ids import Ballot, Voter
from dlc.comm.log import Log
from dlc.comm.messages import ChunkHeader, Plan, Result
from dlc.comm.timeouts import Timeouts
from tests.comm.stage import Stage

ME, OTHER = Voter("me", 1), Voter("other", 1)
CHUNK_ELEMS, N_CHUNKS = 4, 3
FIRST, SECOND, THIRD = Ballot(0, OTHER), Ballot(1, OTHER), Ballot(2, OTHER)


@pytest.fixture
def exchange() -> Exchange:
    members = SimpleNamespace(timeouts=Timeouts(), alive=lambda voter: True, gone=lambda voter: False)
    members.record = lambda peer: SimpleNamespace(voter=Voter(peer, 1), up_Bps=0.0, down_Bps=0.0)
    return Exchange(Context(ME, cast(Any, members)), Log())


def plan(ballot: Ballot) -> Plan:
    roster = (Part(OTHER, 1.0, 0),)
    numel = CHUNK_ELEMS * N_CHUNKS
    entry = Entry(ROUND, EMPTY, 1, "a", 1, (ME, OTHER), (), roster, numel, CHUNK_ELEMS, "fp32", b"", b"", 0)
    return Plan(EMPTY, ballot, (), entry, b"", (OTHER,), (0,) * N_CHUNKS, (), ())


def result(exchange: Exchange, ballot: Ballot, chunk: int, size: int = 4 * CHUNK_ELEMS) -> Result:
    base = exchange.log.state.base("a")
    header = ChunkHeader(base, chunk, EMPTY, ballot, OTHER, (Part(OTHER, 1.0, 0),), ())
    return Result(header, bytes(size))


def begin(exchange: Exchange, ballot: Ballot) -> None:
    exchange.begin(plan(ballot), (ME, OTHER), {})


def test_a_result_before_the_first_plan_is_not_lost(exchange: Exchange) -> None:
    assert not exchange.receive_result(result(exchange, FIRST, 1))
    begin(exchange, FIRST)
    assert set(exchange.held) == {1}


def test_a_result_before_the_plan_of_a_higher_ballot_is_not_lost(exchange: Exchange) -> None:
    begin(exchange, FIRST)
    assert not exchange.receive_result(result(exchange, SECOND, 2)) and not exchange.held
    begin(exchange, SECOND)
    assert set(exchange.held) == {2} and exchange.held[2].header.ballot == SECOND


def test_it_waits_for_its_own_plan_and_no_other(exchange: Exchange) -> None:
    begin(exchange, FIRST)
    exchange.receive_result(result(exchange, THIRD, 0))
    exchange.receive_result(result(exchange, SECOND, 1))
    begin(exchange, SECOND)
    assert set(exchange.held) == {1}
    begin(exchange, THIRD)
    assert set(exchange.held) == {0}


def test_it_is_forgotten_with_its_slot_and_one_of_another_slot_is_not_kept(exchange: Exchange) -> None:
    exchange.receive_result(result(exchange, FIRST, 0))
    exchange.reset()
    other = result(exchange, FIRST, 1)
    exchange.receive_result(Result(dataclasses.replace(other.header, head=b"x" * 32), other.payload))
    begin(exchange, FIRST)
    assert not exchange.held


def test_what_is_kept_is_limited_and_still_checked(exchange: Exchange) -> None:
    exchange.receive_result(result(exchange, FIRST, 0, EARLY_BYTES_MAX - size_of(result(exchange, FIRST, 0, 0))))
    exchange.receive_result(result(exchange, FIRST, 1))
    assert exchange.dropped.total() == 1
    begin(exchange, FIRST)
    assert not exchange.held  # one was too much, the other had a size that the plan does not give it


def test_a_kept_chunk_whose_owner_died_is_fetched_at_once() -> None:
    """It reached one peer alone, and nobody will send it unasked: without a FETCH the others would wait for T_stall."""
    stage = Stage(3, n_chunks=6)
    coordinator, first = stage.planned()
    owner, witness = stage.peers(coordinator)
    kept = next(c for c, o in enumerate(first.assignment) if first.owners[o] == owner.voter)

    def only_one_chunk_to_one_peer(source: str, target: str, m: Any) -> bool:
        if source != owner.host.name or not isinstance(m, Result) or m.header.head != first.head:
            return False
        return target != witness.host.name or m.header.chunk != kept

    stage.hold = only_one_chunk_to_one_peer
    stage.until(lambda: kept in witness.node.exchange.held and len(coordinator.node.exchange.held) == 4)
    stage.world.crash(owner)
    stage.until(lambda: (p := coordinator.node.slot.plan) is not None and p.ballot > first.ballot)
    planned_s = stage.world.now
    stage.committed(first.entry.t, stage.peers())
    assert stage.world.now - planned_s < Timeouts().chunk_s / 4
