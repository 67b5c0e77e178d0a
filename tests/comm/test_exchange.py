"""The data plane of one owner, with parts handed to it one by one."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from dlc.comm.choose import HOLDERS_MAX, Resume, choose
from dlc.comm.codecs import CODECS, get_codec
from dlc.comm.collector import STRAY_BYTES_MAX, STRAY_CHUNKS_MAX
from dlc.comm.context import Context
from dlc.comm.early import EARLY_BYTES_MAX, Early, Room, size_of
from dlc.comm.entries import EMPTY, ROUND, Entry, Part
from dlc.comm.exchange import Exchange, Offered, result_hash
from dlc.comm.filling import Filling
from dlc.comm.grid import Grid, usual_chunk_elems
from dlc.comm.ids import LOWEST, Ballot, Voter
from dlc.comm.log import Log
from dlc.comm.messages import (
    ChunkHeader,
    Contrib,
    Excluded,
    FixedChunk,
    GridSpec,
    HeldChunk,
    Plan,
    Promise,
    Ready,
    Result,
)
from dlc.comm.reducer import NOT_FINITE, WRONG_SIZE
from dlc.comm.sender import WINDOW_CHUNKS_MIN, window_chunks
from dlc.comm.timeouts import Timeouts

torch.set_num_threads(1)

ME, OTHER = Voter("me", 1), Voter("other", 1)
NUMEL, CHUNK = 400, 4
GRID = GridSpec(NUMEL, CHUNK, "fp32")
FIRST, SECOND = Ballot(0, ME), Ballot(1, ME)
N_CHUNKS = NUMEL // CHUNK
FEW = 64


class Everybody:
    """Members who are all alive and have left no trace otherwise."""

    timeouts = Timeouts()
    rtt_max_s = 0.01
    health = 1
    suspects: frozenset[Voter] = frozenset()

    def alive(self, voter: Voter) -> bool:
        return True

    def gone(self, voter: Voter) -> bool:
        return False

    def suspect(self, voter: Voter) -> bool:
        return voter in self.suspects

    def rtt_s(self, peer: str) -> float:
        return 0.01

    def relay_for(self, peer: str) -> str | None:
        return None

    def record(self, peer: str) -> Any:
        return SimpleNamespace(voter=Voter(peer, 1), up_Bps=0.0, down_Bps=0.0)


@pytest.fixture
def exchange() -> Exchange:
    return Exchange(Context(ME, cast(Any, Everybody())), Log())


def plan(channel: str = "a", grid: GridSpec = GRID, ballot: Ballot = FIRST) -> Plan:
    roster = (Part(ME, 1.0, 0), Part(OTHER, 1.0, 0))
    entry = Entry(
        ROUND, EMPTY, 1, channel, 1, (ME, OTHER), (), roster, grid.numel, grid.chunk_elems, grid.codec, b"", b"", 0
    )
    n_chunks = -(-grid.numel // grid.chunk_elems)
    return Plan(EMPTY, ballot, (), entry, b"", (ME,), (0,) * n_chunks, (), ())


def offer(exchange: Exchange, vector: Tensor, grid: GridSpec = GRID, channel: str = "a") -> None:
    base = exchange.log.state.base(channel)
    ready = Ready(EMPTY, channel, base, grid, 1.0, 0, b"", 1.0, False, 0)
    exchange.offered[channel] = Offered(ready, vector, None, exchange.ctx.now)


def part(exchange: Exchange, chunk: int, value: float, channel: str = "a") -> Contrib:
    payload = get_codec("fp32").encode(torch.full((CHUNK,), value))
    return Contrib(channel, exchange.log.state.base(channel), chunk, 1.0, 0, payload)


def test_a_part_of_another_channel_does_not_enter_the_mean(exchange: Exchange) -> None:
    """Same chunk number, weight and position, as those of two library all-reduces always are."""
    offer(exchange, torch.zeros(NUMEL))
    exchange.begin(plan(), (ME, OTHER), {})
    exchange.receive_contrib(OTHER, part(exchange, 0, 100.0, channel="b"))
    assert 0 not in exchange.held
    exchange.receive_contrib(OTHER, part(exchange, 0, 4.0))
    mean = get_codec("fp32").decode(exchange.held[0].payload, CHUNK)
    assert torch.equal(mean, torch.full((CHUNK,), 2.0))


@pytest.mark.parametrize("change", [{"weight": 2.0}, {"upto": 4}])
@pytest.mark.parametrize("early", [False, True])
def test_a_part_of_another_offer_does_not_enter_the_mean(exchange: Exchange, change: Any, early: bool) -> None:
    """It would count with the weight, and for the samples, that the roster names."""
    offer(exchange, torch.zeros(NUMEL))
    other = dataclasses.replace(part(exchange, 0, 100.0), **change)
    if early:
        exchange.receive_contrib(OTHER, other)
    exchange.begin(plan(), (ME, OTHER), {})
    exchange.receive_contrib(OTHER, other)
    assert 0 not in exchange.held
    exchange.receive_contrib(OTHER, part(exchange, 0, 4.0))
    mean = get_codec("fp32").decode(exchange.held[0].payload, CHUNK)
    assert torch.equal(mean, torch.full((CHUNK,), 2.0))


@pytest.mark.parametrize("change", [{"weight": 2.0}, {"upto": 4}])
def test_an_own_offer_that_the_plan_does_not_name_is_told_as_late(exchange: Exchange, change: Any) -> None:
    offer(exchange, torch.full((NUMEL,), 100.0))
    mine = exchange.offered["a"]
    exchange.offered["a"] = Offered(dataclasses.replace(mine.ready, **change), mine.vector, None, exchange.ctx.now)
    exchange.begin(plan(), (ME, OTHER), {})
    exchange.receive_contrib(OTHER, part(exchange, 0, 4.0))
    header = exchange.held[0].header
    assert header.included == (Part(OTHER, 1.0, 0),) and header.excluded == (Excluded(ME, "late"),)
    assert torch.equal(get_codec("fp32").decode(exchange.held[0].payload, CHUNK), torch.full((CHUNK,), 4.0))


def test_of_the_parts_that_came_before_the_plan_the_newest_counts(exchange: Exchange) -> None:
    offer(exchange, torch.zeros(NUMEL))
    exchange.receive_contrib(OTHER, dataclasses.replace(part(exchange, 0, 100.0), weight=2.0))
    exchange.receive_contrib(OTHER, part(exchange, 0, 4.0))
    exchange.begin(plan(), (ME, OTHER), {})
    assert torch.equal(get_codec("fp32").decode(exchange.held[0].payload, CHUNK), torch.full((CHUNK,), 2.0))


def test_parts_of_a_base_serve_every_plan_of_it(exchange: Exchange) -> None:
    offer(exchange, torch.zeros(NUMEL))
    for channel in "ab":
        exchange.receive_contrib(OTHER, part(exchange, 0, 4.0, channel=channel))
    exchange.begin(dataclasses.replace(plan(), owners=(OTHER,)), (ME, OTHER), {})
    exchange.reset()
    exchange.begin(plan(ballot=SECOND), (ME, OTHER), {})
    assert exchange.held[0].header.included == plan().entry.roster
    assert {channel for channel, _ in exchange.collector.parts} == {"a", "b"}
    exchange.reset()
    exchange.close_due()
    assert exchange.collector.n_open == 0, "of a slot that is over nothing is closed"


def test_contributions_are_clipped_by_the_norms_of_the_plan(exchange: Exchange) -> None:
    offer(exchange, torch.full((NUMEL,), 1.0))
    third = Voter("third", 1)
    three = dataclasses.replace(plan().entry, roster=(*plan().entry.roster, Part(third, 1.0, 0)))
    exchange.begin(dataclasses.replace(plan(), entry=three, norms=(1.0, 16.0, 2.0)), (ME, OTHER, third), {})
    exchange.receive_contrib(OTHER, part(exchange, 0, 16.0))  # counts as 2
    exchange.receive_contrib(third, part(exchange, 0, 6.0))
    assert torch.equal(get_codec("fp32").decode(exchange.held[0].payload, CHUNK), torch.full((CHUNK,), 3.0))


def test_the_next_plan_may_have_larger_chunks(exchange: Exchange) -> None:
    offer(exchange, torch.zeros(NUMEL))
    exchange.begin(plan(), (ME, OTHER), {})
    larger = GridSpec(NUMEL, 2 * CHUNK, "fp32")
    offer(exchange, torch.arange(float(NUMEL)), larger, channel="b")
    exchange.begin(plan("b", larger), (ME, OTHER), {})
    payload = get_codec("fp32").encode(torch.zeros(2 * CHUNK))
    exchange.receive_contrib(OTHER, Contrib("b", exchange.log.state.base("b"), 1, 1.0, 0, payload))
    mean = get_codec("fp32").decode(exchange.held[1].payload, 2 * CHUNK)
    assert torch.equal(mean, torch.arange(8.0, 16.0) / 2)


def test_who_has_taken_its_offer_back_is_not_waited_for_unless_it_offers_it_once_more(exchange: Exchange) -> None:
    offer(exchange, torch.zeros(NUMEL))
    gone = dataclasses.replace(part(exchange, 0, 0.0), payload=b"")
    exchange.receive_contrib(OTHER, dataclasses.replace(gone, weight=2.0))  # of another offer
    exchange.begin(plan(), (ME, OTHER), {})
    assert not exchange.held
    exchange.receive_contrib(OTHER, gone)
    assert exchange.complete and {r.header.excluded for r in exchange.results()} == {(Excluded(OTHER, "late"),)}
    exchange.receive_contrib(OTHER, part(exchange, 1, 4.0))
    exchange.begin(plan(ballot=SECOND), (ME, OTHER), {})
    assert list(exchange.held) == [1]


def test_what_was_sent_to_a_round_that_is_over_is_forgotten_and_not_before(exchange: Exchange) -> None:
    """Nor is what was gained under one plan a sign that the next goes on."""
    offer(exchange, torch.zeros(NUMEL))
    exchange.begin(plan(), (ME, OTHER), {})
    exchange.receive_contrib(OTHER, part(exchange, 0, 4.0))
    assert exchange.collector.gained == 2
    exchange.begin(plan(ballot=SECOND), (ME, OTHER), {})
    assert exchange.collector.gained == 0
    exchange.receive_contrib(OTHER, part(exchange, 1, 4.0, channel="b"))
    exchange.receive_contrib(OTHER, dataclasses.replace(part(exchange, 0, 0.0), payload=b""))
    collector = exchange.collector
    exchange.reset()
    assert collector.parts and collector._absent, "the next plan may be of the same base"
    exchange.log.state = cast(Any, SimpleNamespace(base=lambda channel: b"the next one"))
    exchange.reset()
    assert not collector.parts and not collector._absent


def test_who_has_taken_its_offer_back_is_not_waited_for_because_it_offers_to_another_channel(
    exchange: Exchange,
) -> None:
    offer(exchange, torch.zeros(NUMEL))
    exchange.receive_contrib(OTHER, dataclasses.replace(part(exchange, 0, 0.0), payload=b""))
    exchange.receive_contrib(OTHER, part(exchange, 0, 4.0, channel="b"))
    exchange.begin(plan(), (ME, OTHER), {})
    assert exchange.complete and {r.header.included for r in exchange.results()} == {(Part(ME, 1.0, 0),)}


def test_of_parts_without_weight_nothing_is_included(exchange: Exchange) -> None:
    weightless = dataclasses.replace(plan().entry, roster=(Part(OTHER, 0.0, 0),))
    exchange.begin(dataclasses.replace(plan(), entry=weightless), (ME, OTHER), {})
    exchange.receive_contrib(OTHER, dataclasses.replace(part(exchange, 0, 4.0), weight=0.0))
    assert exchange.held[0].header.included == () and exchange.held[0].payload == b""


def test_a_part_that_is_refused_is_told_with_its_reason(exchange: Exchange) -> None:
    offer(exchange, torch.zeros(NUMEL))
    exchange.begin(plan(), (ME, OTHER), {})
    exchange.receive_contrib(OTHER, part(exchange, 0, float("nan")))
    assert exchange.held[0].header.excluded == (Excluded(OTHER, NOT_FINITE),)


def test_results_that_are_ready_early_do_not_keep_a_contribution_back(exchange: Exchange) -> None:
    """Results first, always: a peer whose own half closed at once sent its contribution to the other half last, and all
    waited for that half (4 equal sites took 4.6 s for a round of 3.0 s)."""
    offer(exchange, torch.zeros(NUMEL))
    halves = (0,) * (N_CHUNKS // 2) + (1,) * (N_CHUNKS // 2)
    exchange.begin(dataclasses.replace(plan(ballot=SECOND), owners=(ME, OTHER), assignment=halves), (ME, OTHER), {})
    for chunk in range(N_CHUNKS // 2):
        exchange.receive_contrib(OTHER, part(exchange, chunk, 1.0))
    sent = [type(bulk) for bulk in iter(lambda: exchange.next_bulk(OTHER.peer), None)]
    assert len(sent) == N_CHUNKS
    for at in range(1, N_CHUNKS):
        assert sent[:at].count(Contrib) >= sent[:at].count(Result) >= sent[:at].count(Contrib) - 0.1 * N_CHUNKS


def test_a_vector_offered_after_the_plan_with_another_grid_is_not_cut_by_the_plan(exchange: Exchange) -> None:
    offer(exchange, torch.ones(8), GridSpec(8, CHUNK, "fp32"))
    exchange.begin(plan(), (ME, OTHER), {})  # chunk 2 of 100 would be empty
    exchange.receive_contrib(OTHER, part(exchange, 5, 4.0))
    elsewhere = dataclasses.replace(plan(ballot=Ballot(1, OTHER)), owners=(OTHER,))
    exchange.begin(elsewhere, (ME, OTHER), {})
    told = exchange.next_bulk(OTHER.peer)
    assert isinstance(told, Contrib) and told.payload == b"", "only that there is nothing to wait for"
    assert exchange.pending() == set() and exchange.next_bulk(OTHER.peer) is None


def at(exchange: Exchange, now: float) -> None:
    exchange.ctx.now = exchange.ctx.running_s = now


def test_one_silence_is_waited_out_once_and_not_once_per_chunk(exchange: Exchange) -> None:
    offer(exchange, torch.zeros(NUMEL))
    exchange.begin(plan(), (ME, OTHER), {})
    for step in range(4 * 3 + 1):  # a little more than the 2 s after which a silent contributor is late
        at(exchange, 0.25 * step)
        exchange.close_due()
    assert exchange.complete
    assert {e.reason for r in exchange.held.values() for e in r.header.excluded} == {"late"}


def test_whose_connection_has_yet_to_be_made_is_waited_for_as_long_as_that_takes(
    exchange: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 0.6 s the first part of a newcomer's first round took 3.8 s. It was late after 2.4 s, in all chunks, and their
    owner was taken for one whose bulk port is closed."""
    monkeypatch.setattr(Everybody, "rtt_s", lambda self, peer: 0.6)
    exchange.begin(plan(), (ME, OTHER), {})
    at(exchange, 3.5)
    assert not exchange.collector.patience.given_up(OTHER)
    exchange.receive_contrib(OTHER, part(exchange, 3, 4.0))
    at(exchange, 3.5 + 2.4)
    assert not exchange.collector.patience.given_up(OTHER)
    at(exchange, 3.5 + 3 * 2.4 + 0.1)  # the first pause counts as no more than T_chunk was
    assert exchange.collector.patience.given_up(OTHER)


def test_of_whom_nothing_ever_comes_is_late_all_the_same(exchange: Exchange, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Everybody, "rtt_s", lambda self, peer: 0.6)
    exchange.begin(plan(), (ME, OTHER), {})
    at(exchange, 4.0)
    assert exchange.collector.patience.given_up(OTHER)


def test_a_late_contributor_that_is_heard_again_is_waited_for_again(exchange: Exchange) -> None:
    offer(exchange, torch.zeros(NUMEL))
    exchange.begin(plan(), (ME, OTHER), {})
    at(exchange, 2.1)
    assert exchange.collector.patience.given_up(OTHER)
    exchange.receive_contrib(OTHER, part(exchange, 3, 4.0))
    exchange.close_due()
    assert list(exchange.held) == [3]


def test_a_contributor_that_trickles_is_not_waited_for_without_end(exchange: Exchange) -> None:
    """Each part comes well before it would be late, all together would take 100 times as long."""
    offer(exchange, torch.zeros(NUMEL))
    exchange.begin(plan(), (ME, OTHER), {})
    step = 0
    while not exchange.complete:
        step += 1
        assert step < 60, "it is waited for still"
        at(exchange, 0.5 * step)
        if step % 3 == 0:
            exchange.receive_contrib(OTHER, part(exchange, step // 3 - 1, 4.0))
        exchange.close_due()
    included = [len(r.header.included) for r in exchange.results()]
    assert 3 <= included.count(2) <= 20 and included == sorted(included, reverse=True)


def test_whoever_is_held_up_by_a_slower_one_is_not_accused(exchange: Exchange) -> None:
    """Chunk 0 waits for the third peer; the second has sent it, and its later parts are none that are waited for."""
    third = Voter("third", 1)
    both = dataclasses.replace(plan().entry, roster=(*plan().entry.roster, Part(third, 1.0, 0)))
    offer(exchange, torch.zeros(NUMEL))
    exchange.begin(dataclasses.replace(plan(), entry=both), (ME, OTHER, third), {})
    exchange.receive_contrib(OTHER, part(exchange, 0, 4.0))
    for step in range(1, 6):
        at(exchange, 0.35 * step)
        exchange.close_due()
    assert exchange.collector.patience._waited_s == {OTHER: 0.0, third: pytest.approx(0.35 * 5)}


def test_who_waits_for_me_to_close_a_chunk_is_not_silent(exchange: Exchange) -> None:
    """Its window may have been full until then."""
    third = Voter("third", 1)
    three = dataclasses.replace(plan().entry, roster=(*plan().entry.roster, Part(third, 1.0, 0)))
    offer(exchange, torch.zeros(NUMEL))
    exchange.begin(dataclasses.replace(plan(), entry=three), (ME, OTHER, third), {})
    for now, sender in ((0.1, OTHER), (1.9, third)):
        at(exchange, now)
        exchange.receive_contrib(sender, part(exchange, 0, 4.0))
    assert list(exchange.held) == [0]
    at(exchange, 2.3)
    assert not exchange.collector.patience.given_up(OTHER)
    at(exchange, 4.0)
    assert exchange.collector.patience.given_up(OTHER)


def test_a_stop_of_my_own_is_not_the_silence_of_others(exchange: Exchange) -> None:
    """Ten seconds without an event: what came meanwhile lies unread."""
    offer(exchange, torch.zeros(NUMEL))
    exchange.begin(plan(), (ME, OTHER), {})
    exchange.ctx.now, exchange.ctx.running_s = 10.0, 1.0
    exchange.close_due()
    assert not exchange.held


def test_a_suspect_that_the_plan_left_out_is_taken_for_dead(
    exchange: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator gave it no chunks and I find it silent: its parts are not waited for until I am sure."""
    monkeypatch.setattr(Everybody, "suspects", frozenset({OTHER}))
    offer(exchange, torch.zeros(NUMEL))
    owning = dataclasses.replace(plan(), owners=(ME, OTHER))
    exchange.begin(owning, (ME, OTHER), {})
    assert not exchange.held
    exchange.begin(plan(ballot=SECOND), (ME, OTHER), {})
    assert exchange.complete
    assert {e.reason for r in exchange.held.values() for e in r.header.excluded} == {"dead"}


def test_a_slow_uplink_is_not_taken_for_silence(exchange: Exchange) -> None:
    """1 MiB parts and results for seven others at 1 MiB/s, for want of a better figure: one for me in 14 s, if none is
    lost. It is given up after three times as long."""
    big = GridSpec(2 << 18, 1 << 18, "fp32")
    offer(exchange, torch.zeros(big.numel), big)
    exchange.begin(plan(grid=big), [ME, OTHER, *(Voter(f"v{i}", 1) for i in range(6))], {})
    at(exchange, 41.0)
    exchange.close_due()
    assert not exchange.held and exchange.collector.stall_s > 41.0
    at(exchange, 43.0)
    exchange.close_due()
    assert exchange.complete


def test_a_result_that_is_not_finite_is_no_result(exchange: Exchange) -> None:
    """A broken owner's NaN would be everybody's mean."""
    elsewhere = dataclasses.replace(plan(), owners=(OTHER,))
    exchange.begin(elsewhere, (ME, OTHER), {})
    good = torch.full((CHUNK,), 2.0)
    for value, taken in ((float("nan"), False), (float("inf"), False), (2.0, True)):
        mean = good.clone()
        mean[1] = value
        base = exchange.log.state.base("a")
        header = ChunkHeader(base, 0, EMPTY, FIRST, OTHER, elsewhere.entry.roster, ())
        dropped = exchange.dropped.total()
        assert exchange.receive_result(Result(header, get_codec("fp32").encode(mean))) is taken
        assert exchange.dropped.total() == dropped + (not taken) and (0 in exchange.held) is taken


def result(exchange: Exchange, value: float = 2.0, **header: Any) -> Result:
    """Of chunk 0, by OTHER, at the second ballot."""
    roster = plan().entry.roster
    usual = ChunkHeader(exchange.log.state.base("a"), 0, EMPTY, SECOND, OTHER, roster, ())
    return Result(dataclasses.replace(usual, **header), get_codec("fp32").encode(torch.full((CHUNK,), value)))


@pytest.mark.parametrize(
    "header",
    [
        {"owner": Voter("third", 1)},
        {"ballot": FIRST},
        {"head": b"h" * 32},
        {"chunk": -1},
        {"chunk": N_CHUNKS},
        {"included": ()},
        {"included": (Part(OTHER, 2.0, 0),)},
        {"included": (Part(OTHER, 1.0, 4),)},
    ],
)
def test_a_result_that_the_plan_does_not_ask_for_is_not_taken(exchange: Exchange, header: Any) -> None:
    exchange.begin(dataclasses.replace(plan(ballot=SECOND), owners=(OTHER,)), (ME, OTHER), {})
    assert not exchange.receive_result(result(exchange, **header)) and not exchange.held
    assert exchange.receive_result(result(exchange)) and not exchange.receive_result(result(exchange))


def test_a_fixed_chunk_is_taken_with_the_bytes_and_the_contributors_that_the_plan_fixes(exchange: Exchange) -> None:
    fixed = result(exchange, ballot=FIRST)
    chunk = FixedChunk(0, result_hash(fixed), (OTHER,))
    others = (-1, *(0,) * (N_CHUNKS - 1))
    exchange.begin(
        dataclasses.replace(plan(ballot=SECOND), owners=(OTHER,), assignment=others, fixed=(chunk,)), (ME, OTHER), {}
    )
    assert not exchange.receive_result(result(exchange, 3.0, ballot=FIRST))
    assert not exchange.receive_result(result(exchange, ballot=FIRST, included=(Part(OTHER, 1.0, 0),)))
    assert not exchange.held
    assert exchange.receive_result(fixed) and exchange.hashes == {0: chunk.hash}
    assert exchange.plan is not None
    exchange.begin(exchange.plan, (ME, OTHER), {0: fixed})
    assert exchange.held == {0: fixed} and exchange.hashes == {0: chunk.hash}


def test_a_fixed_chunk_of_whom_the_plan_does_not_name_is_not_held(exchange: Exchange) -> None:
    """Whoever counted such a round would end in the middle of it, and so would all that voted for it."""
    made = result(exchange, ballot=FIRST)
    chunk, others = FixedChunk(0, result_hash(made), (OTHER,)), (-1, *(0,) * (N_CHUNKS - 1))
    kept = dataclasses.replace(plan(ballot=SECOND), owners=(OTHER,), assignment=others, fixed=(chunk,))
    exchange.begin(kept, (ME, OTHER), {0: made})
    assert exchange.held == {0: made} and exchange.hashes == {0: chunk.hash}
    entry = dataclasses.replace(kept.entry, roster=kept.entry.roster[:1])
    exchange.begin(dataclasses.replace(kept, ballot=Ballot(2, ME), entry=entry), (ME, OTHER), {0: made})
    assert not exchange.held and not exchange.hashes and 0 in exchange.missing()
    assert not exchange.receive_result(made)


def test_a_result_makes_room_in_its_owners_window_and_is_a_gain(
    exchange: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlc.comm.sender.WINDOW_BYTES", 1)
    offer(exchange, torch.zeros(NUMEL))
    exchange.begin(dataclasses.replace(plan(ballot=SECOND), owners=(OTHER,)), (ME, OTHER), {})

    def sent() -> list[int]:
        messages = iter(lambda: exchange.next_bulk(OTHER.peer), None)
        return [m.chunk for m in messages if isinstance(m, Contrib)]

    assert sent() == list(range(WINDOW_CHUNKS_MIN)) and not exchange.pending()
    exchange.ctx.now = 7.0
    assert exchange.receive_result(result(exchange)) and exchange.last_gain == 7.0
    assert exchange.pending() == {OTHER.peer} and sent() == [WINDOW_CHUNKS_MIN]


def test_what_a_round_moved_is_counted_once_for_its_channel(exchange: Exchange) -> None:
    offer(exchange, torch.zeros(NUMEL))
    exchange.begin(dataclasses.replace(plan(ballot=SECOND), owners=(OTHER,)), (ME, OTHER), {})
    assert exchange.rates.planned
    size = len(result(exchange).payload)
    assert exchange.next_bulk(OTHER.peer) is not None
    for message in (part(exchange, 0, 1.0), part(exchange, 1, 1.0)):
        exchange.receive_contrib(OTHER, message)
    assert [exchange.receive_result(result(exchange)) for _ in range(2)] == [True, False]
    exchange.reset()
    traffic = exchange.traffic["a"]
    assert (traffic.bytes_sent, traffic.bytes_received, traffic.ballots) == (size, 3 * size, 1)
    assert not exchange.rates.planned, "what comes after it is none of its pace"


def test_fixed_chunks_alone_may_still_be_coming_for_a_while(exchange: Exchange) -> None:
    chunk, others = FixedChunk(0, result_hash(result(exchange)), (OTHER,)), (-1, *(0,) * (N_CHUNKS - 1))
    entry = dataclasses.replace(plan().entry, roster=(Part(ME, 1.0, 0),))
    offer(exchange, torch.zeros(NUMEL))
    fixed = dataclasses.replace(plan(ballot=Ballot(2, ME)), entry=entry, assignment=others, fixed=(chunk,))
    exchange.begin(fixed, (ME, OTHER), {})
    assert exchange.missing() == [0] and exchange.coming(0.0)
    exchange.ctx.running_s = 1.1 * exchange.collector.stall_s / 2
    assert not exchange.coming(0.0) and exchange.coming(exchange.ctx.running_s), "since it was found to be decided"


def test_a_plan_without_bulk_ends_what_was_sent_for_the_one_before(exchange: Exchange) -> None:
    offer(exchange, torch.zeros(NUMEL))
    exchange.begin(dataclasses.replace(plan(), owners=(OTHER,)), (ME, OTHER), {})
    assert exchange.pending() == {OTHER.peer}
    nobody = dataclasses.replace(plan(ballot=SECOND), assignment=(), owners=())
    exchange.begin(nobody, (ME, OTHER), {})
    assert exchange.pending() == set() and exchange.next_bulk(OTHER.peer) is None


def test_room_for_early_results_is_there_again_for_each_plan(
    exchange: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (result(exchange, ballot=Ballot(counter, OTHER)) for counter in (1, 2))
    monkeypatch.setattr("dlc.comm.early.EARLY_BYTES_MAX", size_of(first))
    elsewhere = dataclasses.replace(plan(), owners=(OTHER,))
    exchange.begin(elsewhere, (ME, OTHER), {})
    for early in (first, second):
        assert not exchange.receive_result(early)
        exchange.begin(dataclasses.replace(elsewhere, ballot=early.header.ballot), (ME, OTHER), {})
        assert exchange.held == {0: early}


def test_of_what_waits_to_be_sent_the_next_plan_keeps_what_it_fixes_and_what_the_living_asked_for(
    exchange: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    third, (older, fixed) = Voter("third", 1), (result(exchange, head=b"h" * 32), result(exchange, ballot=FIRST))
    exchange.outbox.tell(older, [OTHER.peer])
    exchange.outbox.tell(fixed, [OTHER.peer])
    for peer in (OTHER.peer, third.peer):
        exchange.outbox.serve(peer, older)
    monkeypatch.setattr(Everybody, "alive", lambda self, voter: voter != third)
    chunk, others = FixedChunk(0, result_hash(fixed), (OTHER,)), (-1, *(0,) * (N_CHUNKS - 1))
    exchange.begin(dataclasses.replace(plan(ballot=SECOND), assignment=others, fixed=(chunk,)), (ME, OTHER), {})
    assert exchange.hashes == {}, "it is not here"
    assert exchange.outbox.peers() == {OTHER.peer}
    assert [exchange.outbox.next(OTHER.peer) for _ in range(3)] == [fixed, older, None]


def test_when_some_of_an_offer_was_final_first_is_noted_once(exchange: Exchange) -> None:
    offer(exchange, torch.zeros(NUMEL))
    mine = exchange.offered["a"]
    mine.filling = Filling(NUMEL, 1.0)
    for now, front, noted in ((1.0, NUMEL, None), (2.0, NUMEL - CHUNK, 2.0), (3.0, 0, 2.0)):
        exchange.ctx.now = now
        mine.filling.reached(front)
        exchange.filled()
        assert mine.first_final == noted


def test_a_chunk_that_the_plan_fixes_is_not_reduced_again(exchange: Exchange) -> None:
    chunk = FixedChunk(0, result_hash(result(exchange, ballot=FIRST)), (OTHER,))
    offer(exchange, torch.zeros(NUMEL))
    others = (-1, *(0,) * (N_CHUNKS - 1))
    exchange.begin(dataclasses.replace(plan(ballot=SECOND), assignment=others, fixed=(chunk,)), (ME, OTHER), {})
    for number in (0, 1):
        exchange.receive_contrib(OTHER, part(exchange, number, 4.0))
    assert list(exchange.held) == [1] and exchange.collector.n_open == N_CHUNKS - 2


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("numel", [1 << bits for bits in (10, 14, 23, 25, 27, 31, 33)])
def test_more_parts_are_kept_before_the_plan_is_known_than_a_window_has(numel: int, codec: str) -> None:
    """A contributor may have the plan before the owner, by as long as a control message is lost. Of small chunks most
    were dropped, and came once more after a stall, or were given up where others went on meanwhile."""
    grid = Grid(numel, usual_chunk_elems(numel, codec), codec)
    in_flight = min(window_chunks(grid), grid.n_chunks)
    assert in_flight <= STRAY_CHUNKS_MAX and in_flight * grid.wire_bytes(0) <= STRAY_BYTES_MAX
    one = size_of(Contrib("a channel's name", EMPTY, in_flight, 1e9, 10**9)) + grid.wire_bytes(0)
    assert 7 * in_flight * one <= EARLY_BYTES_MAX, "and of the slot after this one, of seven"


def test_all_that_comes_early_has_one_bound_in_bytes(exchange: Exchange, monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers count, and so does each message, however small."""
    small, large = part(exchange, 0, 1.0), result(exchange, excluded=(Excluded(OTHER, "late"),) * 1000)
    assert size_of(large) > 1000 * len(OTHER.peer) and size_of(Contrib("", b"", 0, 1.0, 0)) > 500
    room = Room(exchange.dropped)
    first, second = Early[object](room), Early[object](room)
    monkeypatch.setattr("dlc.comm.early.EARLY_BYTES_MAX", size_of(large) + size_of(small))
    first.keep(OTHER, large)
    second.keep(OTHER, small)
    first.keep(OTHER, small)
    assert (list(first), list(second), exchange.dropped.total()) == ([(OTHER, large)], [(OTHER, small)], 1)
    assert first.take() == [(OTHER, large)] and not first and room.used_bytes == size_of(small)
    assert second.take() == [(OTHER, small)] and not second and room.used_bytes == 0
    for _ in range(2):
        first.keep(OTHER, small)
        assert room.used_bytes == size_of(small) and first.take() == [(OTHER, small)] and room.used_bytes == 0


def test_all_parts_that_come_before_their_plan_are_in_its_mean(exchange: Exchange) -> None:
    offer(exchange, torch.zeros(NUMEL))
    for number in range(N_CHUNKS):
        exchange.receive_contrib(OTHER, part(exchange, number, 4.0))
    exchange.begin(plan(), (ME, OTHER), {})
    assert {len(result.header.included) for result in exchange.results()} == {2} and exchange.complete


def test_parts_that_no_plan_asks_for_are_limited_per_sender(
    exchange: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlc.comm.collector.STRAY_CHUNKS_MAX", FEW)
    for number in range(3 * FEW):
        exchange.receive_contrib(OTHER, part(exchange, number, 1.0, channel=f"c{number % 5}"))
    exchange.begin(plan(), (ME, OTHER), {})
    for number in range(3 * FEW):
        exchange.receive_contrib(OTHER, part(exchange, 1000 + number, 1.0, channel="z"))
    kept = sum(len(by) for chunks in exchange.collector.parts.values() for by in chunks.values())
    assert kept <= FEW and exchange.dropped.total() >= 4 * FEW


def test_parts_that_no_plan_asks_for_are_limited_in_bytes_too(
    exchange: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(part(exchange, 0, 1.0).payload)
    monkeypatch.setattr("dlc.comm.collector.STRAY_BYTES_MAX", 3 * size)
    for number in range(5):
        exchange.receive_contrib(OTHER, part(exchange, number, 1.0))
    assert sum(len(by) for chunks in exchange.collector.parts.values() for by in chunks.values()) == 3
    assert {key[0] for key in exchange.dropped} == {OTHER.peer} and exchange.dropped.total() == 2


def test_room_for_parts_is_there_again_when_they_were_used_or_their_base_is_over(
    exchange: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlc.comm.collector.STRAY_CHUNKS_MAX", 2)
    offer(exchange, torch.zeros(NUMEL))

    def taken(*chunks: int, channel: str = "a") -> list[bool]:
        before = [exchange.dropped.total()]
        for chunk in chunks:
            exchange.receive_contrib(OTHER, part(exchange, chunk, 4.0, channel=channel))
            before.append(exchange.dropped.total())
        return [a == b for a, b in itertools.pairwise(before)]

    assert taken(0, 0, 1, 2) == [True, True, True, False], "one that comes again takes the place of the first"
    exchange.receive_contrib(Voter("third", 1), part(exchange, 2, 4.0))
    assert exchange.dropped.total() == 1, "each has its own room"
    exchange.begin(plan(), (ME, OTHER), {})
    assert list(exchange.held) == [0, 1] and taken(1, 2, 3, channel="z") == [True, True, False]
    exchange.log.state = cast(Any, SimpleNamespace(base=lambda channel: b"the next one"))
    exchange.reset()
    assert taken(0, 1, 2) == [True, True, False]


def test_of_a_result_that_lacks_somebody_each_contributor_is_looked_up_once(
    exchange: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked for one after the other, some hundreds of them took longer than the chunk itself."""
    many = tuple(Part(Voter(f"p{i:03}", 1), 1.0, i) for i in range(300))
    whole = plan(ballot=SECOND)
    entry = dataclasses.replace(whole.entry, roster=many)
    exchange.begin(dataclasses.replace(whole, entry=entry, owners=(OTHER,)), (ME, OTHER), {})
    compared, equal = [0], Part.__eq__

    def counted(self: Part, other: object) -> bool:
        compared[0] += 1
        return equal(self, other)

    monkeypatch.setattr(Part, "__eq__", counted)
    travelled = tuple(dataclasses.replace(p) for p in many[1:])
    assert exchange.receive_result(result(exchange, included=travelled)) and compared[0] < 5 * len(many)


@pytest.mark.parametrize("chunk", [-1, N_CHUNKS, 10**6])
def test_who_sends_what_no_honest_peer_does_is_named_once(
    exchange: Exchange, caplog: pytest.LogCaptureFixture, chunk: int
) -> None:
    exchange.begin(plan(), (ME, OTHER), {})
    for _ in range(3):
        exchange.receive_contrib(OTHER, part(exchange, chunk, 1.0))
    assert exchange.dropped == {(OTHER.peer, "a chunk that there is not"): 3}
    assert [r.message for r in caplog.records] == [
        f"{OTHER.peer[:8]} sent what was dropped: a chunk that there is not (told once; the round goes on without it)"
    ]


def test_parts_of_another_channel_are_limited_though_the_plan_has_such_chunks(
    exchange: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlc.comm.collector.STRAY_CHUNKS_MAX", FEW)
    exchange.begin(plan(), (ME, OTHER), {})
    for number in range(FEW + 5):
        exchange.receive_contrib(OTHER, part(exchange, number, 1.0, channel="z"))
    assert sum(len(by) for chunks in exchange.collector.parts.values() for by in chunks.values()) == FEW
    assert exchange.collector.gained == 0, "nothing of what is waited for has come"
    exchange.receive_contrib(OTHER, part(exchange, 0, 1.0))
    assert exchange.collector.gained == 2, "it was taken, and its chunk closed"


@pytest.mark.parametrize("alone", [False, True])
def test_chunks_close_within_the_window_but_where_there_is_nobody_to_wait_for(
    exchange: Exchange, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    monkeypatch.setattr("dlc.comm.sender.WINDOW_BYTES", 0)
    offer(exchange, torch.zeros(NUMEL))
    entry = plan().entry
    entry = dataclasses.replace(entry, roster=entry.roster[:1]) if alone else entry
    exchange.begin(dataclasses.replace(plan(), entry=entry), (ME, OTHER), {})
    assert exchange.complete == alone
    at(exchange, 2.1)
    exchange.close_due()
    assert exchange.complete == alone and (alone or list(exchange.held) == list(range(WINDOW_CHUNKS_MIN)))


@pytest.mark.parametrize("left", [False, True])
def test_who_is_gone_for_good_has_left_or_is_dead(
    exchange: Exchange, monkeypatch: pytest.MonkeyPatch, left: bool
) -> None:
    monkeypatch.setattr(Everybody, "gone", lambda self, voter: voter == OTHER)
    if left:
        monkeypatch.setattr(Everybody, "record", lambda self, peer: None)
    offer(exchange, torch.zeros(NUMEL))
    exchange.begin(plan(), (ME, OTHER), {})
    assert exchange.held[0].header.excluded == (Excluded(OTHER, "left" if left else "dead"),)


def test_who_is_reached_by_a_relay_only_is_late_unless_the_plan_relies_on_it_or_its_parts_come(
    exchange: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Everybody, "relay_for", lambda self, peer: "between")
    offer(exchange, torch.zeros(NUMEL))
    owning = dataclasses.replace(plan(), owners=(ME, OTHER))
    exchange.begin(owning, (ME, OTHER), {})
    assert not exchange.held
    exchange.begin(plan(ballot=SECOND), (ME, OTHER), {})
    assert exchange.complete
    monkeypatch.undo()
    exchange.begin(plan(ballot=Ballot(2, ME)), (ME, OTHER), {})
    exchange.receive_contrib(OTHER, part(exchange, 3, 4.0))
    monkeypatch.setattr(Everybody, "relay_for", lambda self, peer: "between")
    exchange.close_due()
    assert list(exchange.held) == [3], "some of its parts have come"


def test_who_is_left_out_is_told_in_one_order(exchange: Exchange, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order of the roster."""
    monkeypatch.setattr(Everybody, "gone", lambda self, voter: voter != ME)
    entry, names = plan().entry, ("z", "a", "m")
    roster = (*entry.roster[:1], *(Part(Voter(name, 1), 1.0, 0) for name in names))
    offer(exchange, torch.zeros(NUMEL))
    exchange.begin(dataclasses.replace(plan(), entry=dataclasses.replace(entry, roster=roster)), (ME, OTHER), {})
    assert [e.voter.peer for e in exchange.held[0].header.excluded] == sorted(names)


def test_a_part_of_another_size_is_named(exchange: Exchange, caplog: pytest.LogCaptureFixture) -> None:
    exchange.begin(plan(), (ME, OTHER), {})
    exchange.receive_contrib(OTHER, dataclasses.replace(part(exchange, 0, 1.0), payload=b"short"))
    (told,) = caplog.records
    assert told.getMessage().startswith(f"{OTHER.peer[:8]} sent what was dropped: a part of a chunk: {WRONG_SIZE} (")


def test_what_was_asked_for_is_still_served_after_the_next_plan(exchange: Exchange) -> None:
    """Who is behind fetches results of older rounds while rounds go on."""
    offer(exchange, torch.zeros(NUMEL))
    exchange.begin(plan(), (ME, OTHER), {})
    exchange.receive_contrib(OTHER, part(exchange, 0, 4.0))
    old = exchange.held[0]
    exchange.outbox.serve(OTHER.peer, old)
    exchange.outbox.serve(OTHER.peer, old)
    exchange.begin(plan(ballot=SECOND), (ME, OTHER), {})
    assert exchange.next_bulk(OTHER.peer) is old
    assert exchange.next_bulk(OTHER.peer) is None


def test_a_fixed_chunk_names_few_holders_and_not_always_the_same() -> None:
    voters = tuple(Voter(f"v{i:02}", 1) for i in range(40))
    roster = (Part(voters[0], 1.0, 0),)
    entry = dataclasses.replace(plan().entry, roster=roster)
    base = dataclasses.replace(plan(), entry=entry)
    held = tuple(HeldChunk(c, Ballot(0, ME), bytes([c]) * 32, 0) for c in range(N_CHUNKS))
    promise = Promise(EMPTY, LOWEST, None, None, base, held, (roster,), ())
    choice = choose(dict.fromkeys(voters, promise))
    assert isinstance(choice, Resume) and len(choice.fixed) == N_CHUNKS
    assert {len(f.holders) for f in choice.fixed} == {HOLDERS_MAX}
    assert {v for f in choice.fixed for v in f.holders} == set(voters)
