"""What no correct peer says about a slot, one relation broken at a time."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from dlc.comm.codecs import get_codec
from dlc.comm.entries import CONFIG, EMPTY, OPEN, ROUND, Entry, LogState, Part
from dlc.comm.filling import FILL_S_MAX
from dlc.comm.ids import LOWEST, Ballot, Voter
from dlc.comm.ledger import Ledger
from dlc.comm.messages import ChunkHeader, Decree, FixedChunk, HeldChunk, Nack, Offer, Plan, Promise, Result
from dlc.comm.reducer import WEIGHT_MAX
from dlc.comm.shapes import (
    BALLOTS_AHEAD_MAX,
    check_slot_message,
    plausible_decree,
    plausible_entry,
    plausible_plan,
    plausible_results,
    plausible_state,
)
from dlc.errors import ProtocolError

A, B, C = (Voter(name, 1) for name in "abc")
VOTERS = (A, B)
N_CHUNKS = 3
FIRST = Ballot(0, A)


def entry(state: LogState, kind: str, **changes: Any) -> Entry:
    plain = Entry(kind, state.head, state.depth + 1, "", 0, VOTERS, VOTERS, (), 0, 0, "", b"", b"", 0)
    return dataclasses.replace(plain, **changes)


def opened() -> LogState:
    """A leased channel of ten elements in three chunks."""
    state = LogState().apply(entry(LogState(), CONFIG))
    grid = {"channel": "train", "numel": 10, "chunk_elems": 4, "codec": "fp32"}
    return state.apply(entry(state, OPEN, digest=b"d" * 32, lease_len=5, **grid))


STATE = opened()
ROSTER = (Part(A, 3.0, 2), Part(B, 1.0, 7))
ROUND_1 = entry(STATE, ROUND, channel="train", t=1, numel=10, chunk_elems=4, codec="fp32", roster=ROSTER)
FIXED = FixedChunk(1, b"h" * 32, (B,))
PLAN = Plan(STATE.head, FIRST, (), ROUND_1, b"", VOTERS, (0, -1, 1), (FIXED,), (), (1.0, 2.0))


def results() -> tuple[Result, ...]:
    """The last chunk has two elements, and nobody is in the second."""
    sizes = {0: 4, 1: 0, 2: 2}
    header = ChunkHeader(STATE.base("train"), 0, STATE.head, FIRST, A, ROSTER, ())
    return tuple(
        Result(
            dataclasses.replace(header, chunk=chunk, included=ROSTER if numel else ()),
            bytes(get_codec("fp32").wire_bytes(numel) if numel else 0),
        )
        for chunk, numel in sizes.items()
    )


def test_what_is_broken_below_is_whole() -> None:
    assert plausible_entry(ROUND_1, STATE) and plausible_plan(PLAN, STATE)
    assert plausible_plan(dataclasses.replace(PLAN, digest=bytes(32), norms=(), fill_s=FILL_S_MAX), STATE)
    assert plausible_results(ROUND_1, results()) and plausible_decree(Decree(ROUND_1, (b"h",) * N_CHUNKS), STATE)
    assert plausible_state(offered())
    for message in (PLAN, promise(), Nack(STATE.head, FIRST)):
        check_slot_message(message, STATE, LOWEST)


@pytest.mark.parametrize(
    "change",
    [
        {"parent": EMPTY},
        {"depth": STATE.depth},
        {"kind": "none such"},
        {"electorate": ()},
        {"electorate": (A, B, A._replace(inc=2))},
        {"trainers": (A, C)},
        {"t": 0},
        {"t": 2},
        {"numel": 9},
        {"chunk_elems": 5},
        {"codec": "bf16"},
        {"roster": (ROSTER[0], ROSTER[0])},
        {"roster": (Part(A, -1.0, 2),)},
        {"roster": (Part(A, math.nan, 2),)},
        {"roster": (Part(A, 2 * WEIGHT_MAX, 2),)},
        {"roster": (Part(A, 3.0, 7),)},  # what B has leased
        {"roster": (Part(C, 3.0, 2),)},
    ],
    ids=str,
)
def test_entries(change: dict[str, Any]) -> None:
    assert not plausible_entry(dataclasses.replace(ROUND_1, **change), STATE)


@pytest.mark.parametrize(
    "change",
    [
        {"digest": bytes(31)},
        {"assignment": (0, -1)},
        {"assignment": (0, -1, 1, 1)},
        {"assignment": (0, 1, 1)},  # of a chunk that is fixed
        {"assignment": (-1, -1, 1)},  # nobody's, and not fixed
        {"assignment": (0, -1, 2)},
        {"assignment": (0, -2, 1)},
        {"fixed": ()},
        {"fixed": (FIXED, FIXED)},
        {"fixed": (FIXED, FixedChunk(3, b"h" * 32, (B,)))},
        {"fixed": (FIXED, FixedChunk(-1, b"h" * 32, (B,)))},
        {"norms": (1.0,)},
        {"norms": (1.0, -1.0)},
        {"norms": (1.0, math.inf)},
        {"norms": (1.0, math.nan)},
        {"fill_s": -1.0},
        {"entry": dataclasses.replace(ROUND_1, t=2)},
    ],
    ids=str,
)
def test_plans(change: dict[str, Any]) -> None:
    assert not plausible_plan(dataclasses.replace(PLAN, **change), STATE)


@pytest.mark.parametrize(
    ("chunk", "header", "payload"),
    [
        (0, {"chunk": 1}, bytes(16)),
        (0, {}, bytes(15)),
        (0, {"included": ()}, bytes(16)),
        (2, {}, bytes(16)),
        (0, {"included": (ROSTER[0], ROSTER[0])}, bytes(16)),
        (0, {"included": (dataclasses.replace(ROSTER[0], weight=2.0),)}, bytes(16)),
        (1, {"included": ROSTER}, b""),
    ],
)
def test_results(chunk: int, header: dict[str, Any], payload: bytes) -> None:
    false = list(results())
    false[chunk] = Result(dataclasses.replace(false[chunk].header, **header), payload)
    assert not plausible_results(ROUND_1, false)


def test_results_and_decrees_of_another_number_of_chunks() -> None:
    assert not plausible_results(ROUND_1, results()[:2])
    for n in (0, N_CHUNKS - 1, N_CHUNKS + 1):
        assert not plausible_decree(Decree(ROUND_1, (b"h",) * n), STATE)


def promise(**changes: Any) -> Promise:
    decree = Decree(ROUND_1, (b"h",) * N_CHUNKS)
    whole = Promise(STATE.head, FIRST, FIRST, decree, PLAN, (HeldChunk(2, FIRST, b"h", 0),), (ROSTER,), ())
    return dataclasses.replace(whole, **changes)


@pytest.mark.parametrize(
    "message",
    [
        dataclasses.replace(PLAN, owners=()),
        dataclasses.replace(PLAN, ballot=Ballot(BALLOTS_AHEAD_MAX + 1, A)),
        Nack(STATE.head, Ballot(BALLOTS_AHEAD_MAX + 1, A)),
        Nack(STATE.head, Ballot(-1, A)),
        promise(accepted=None),
        promise(accepted_ballot=None),
        promise(accepted=Decree(ROUND_1, ())),
        promise(plan=None),  # of which a chunk is held
        promise(plan=dataclasses.replace(PLAN, head=EMPTY)),
        promise(plan=dataclasses.replace(PLAN, fixed=())),
        promise(held=(HeldChunk(N_CHUNKS, FIRST, b"h", 0),)),
        promise(held=(HeldChunk(-1, FIRST, b"h", 0),)),
        promise(held=(HeldChunk(0, FIRST, b"h", 1),)),
        promise(held=(HeldChunk(0, FIRST, b"h", -1),)),
    ],
)
def test_messages(message: Any) -> None:
    with pytest.raises(ProtocolError):
        check_slot_message(message, STATE, LOWEST)


def offered(**changes: Any) -> Offer:
    """The log's second state, after one that told of no tokens."""
    state = dataclasses.replace(STATE, tokens=4.0, **changes)
    return Offer(state, (EMPTY, b"1" * 32, STATE.head), (0.0, 0.0, 4.0), ())


@pytest.mark.parametrize(
    "change",
    [
        {"chain": ()},
        {"chain": (EMPTY, STATE.head)},
        {"chain": (EMPTY, b"1" * 32, b"2" * 32)},
        {"chain": (b"0" * 32, b"1" * 32, STATE.head)},  # more entries than its depth
        {"chain": (EMPTY, b"1" * 32, STATE.head, STATE.head), "totals": (0.0, 0.0, 4.0, 4.0)},
        {"totals": (0.0, 4.0)},
        {"totals": (0.0, 0.0, 3.0)},
        {"totals": (0.0, 5.0, 4.0)},
        {"totals": (-1.0, 0.0, 4.0)},
    ],
    ids=str,
)
def test_offers(change: dict[str, Any]) -> None:
    assert not plausible_state(dataclasses.replace(offered(), **change))


@pytest.mark.parametrize(
    "change",
    [
        {"electorate": (), "trainers": ()},
        {"trainers": (C,)},
        {"channels": STATE.channels * 2},
        {"channels": (dataclasses.replace(STATE.channels[0], t=-1),)},
        {"channels": (dataclasses.replace(STATE.channels[0], numel=0),)},
        {"channels": (dataclasses.replace(STATE.channels[0], name=""),)},
        {"channels": (dataclasses.replace(STATE.channels[0], leased=False),)},
        {"ledger": Ledger()},
        {"ledger": dataclasses.replace(STATE.ledger, next=0)},
    ],
    ids=lambda change: ",".join(change),
)
def test_states(change: dict[str, Any]) -> None:
    assert not plausible_state(offered(**change))
