"""Contributions that become final while they are offered: the front, and what a peer's data plane makes of it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from dlc.comm import messages as msg
from dlc.comm.codecs import get_codec
from dlc.comm.context import Context
from dlc.comm.entries import EMPTY, Part
from dlc.comm.exchange import Exchange, Offered
from dlc.comm.filling import FILL_S_MAX, Filling
from dlc.comm.grid import Grid
from dlc.comm.ids import Ballot, Voter
from dlc.comm.log import Log
from dlc.comm.messages import Contrib, GridSpec, Plan, Ready
from dlc.comm.patience import OVERTIME
from dlc.comm.shapes import plausible_plan
from dlc.sim.schedule import TRAIN
from dlc.sim.toy import NOT_MADE
from dlc.sim.world import Process
from tests.comm.stage import Stage, past_round
from tests.comm.test_exchange import FIRST, ME, OTHER, SECOND, Everybody, at, part, plan

torch.set_num_threads(1)

NUMEL, CHUNK = 40, 4
GRID = GridSpec(NUMEL, CHUNK, "fp32")
N_CHUNKS = NUMEL // CHUNK
FILL_S = 5.0
SILENCE_S = 2.1
"""A little more than what a contributor may be silent for without being late."""

# ------------------------------------------------------------------ the front


def test_each_chunk_is_told_once_and_the_front_never_goes_back() -> None:
    filling, told = Filling(10, 1.0), list[int]()
    filling.reached(9)
    filling.watch(4, lambda: told.append(filling.front))
    assert told == [9], "what was final before"
    for front in (8, 8, 7, 9, 5, 4, 0, 0):
        filling.reached(front)
    assert told == [9, 8, 4, 0] and filling.complete
    filling.stop()
    assert told == [9, 8, 4, 0] and not filling.stopped and filling.covers(0)


def test_what_is_stopped_covers_nothing_and_goes_no_further() -> None:
    filling, told = Filling(8, 1.0), list[int]()
    filling.watch(4, lambda: told.append(filling.front))
    filling.reached(4)
    assert filling.covers(4) and not filling.covers(3)
    filling.stop()
    filling.stop()
    filling.reached(0)
    assert told == [4, 4] and filling.stopped and not filling.complete and not filling.covers(4)


@pytest.mark.parametrize(("numel", "expected_s"), [(0, 1.0), (1, 0.0), (1, -1.0), (1, math.nan)])
def test_a_filling_of_nothing_or_without_end_is_refused(numel: int, expected_s: float) -> None:
    with pytest.raises(ValueError, match="a filling of"):
        Filling(numel, expected_s)
    assert Filling(1, 1e9).expected_s == FILL_S_MAX


# ------------------------------------------------------------------ one data plane, step by step


@pytest.fixture
def exchange() -> Exchange:
    return Exchange(Context(ME, cast(Any, Everybody())), Log())


def the_plan(owner: Voter, ballot: Ballot = FIRST, owners: str = "") -> Plan:
    """Of chunks that all belong to `owner`, or each to ME or OTHER as a letter of `owners` says."""
    planned = dataclasses.replace(plan(grid=GRID, ballot=ballot), owners=(owner,), fill_s=FILL_S)
    if not owners:
        return planned
    return dataclasses.replace(planned, owners=(ME, OTHER), assignment=tuple("mo".index(o) for o in owners))


def offer(exchange: Exchange) -> tuple[Filling, Tensor]:
    """Ones, once they are final."""
    filling, vector = Filling(NUMEL, FILL_S), torch.full((NUMEL,), NOT_MADE)
    ready = Ready(EMPTY, "a", exchange.log.state.base("a"), GRID, 1.0, 0, b"", 1.0, False, 0, 0.0, FILL_S)
    exchange.offered["a"] = Offered(ready, vector, None, exchange.ctx.now, filling=filling)
    return filling, vector


def fill(exchange: Exchange, front: int) -> None:
    mine = exchange.offered["a"]
    assert mine.filling is not None
    mine.vector[front:] = 1.0
    mine.filling.reached(front)
    exchange.filled()


def sent(exchange: Exchange) -> list[int]:
    """The chunks that go out to OTHER now; all of them hold ones."""
    chunks = []
    while OTHER.peer in exchange.pending():
        message = exchange.next_bulk(OTHER.peer)
        if isinstance(message, Contrib):
            assert torch.equal(get_codec("fp32").decode(message.payload, CHUNK), torch.ones(CHUNK))
            chunks.append(message.chunk)
    assert exchange.next_bulk(OTHER.peer) is None, "nobody asks for what it does not offer"
    return chunks


def test_a_chunk_is_sent_once_it_is_final_and_the_last_one_first(exchange: Exchange) -> None:
    offer(exchange)
    exchange.begin(the_plan(OTHER), (ME, OTHER), {})
    assert sent(exchange) == []
    fill(exchange, NUMEL - CHUNK + 1)
    assert sent(exchange) == [], "it lacks an element"
    fill(exchange, NUMEL - CHUNK)
    assert sent(exchange) == [N_CHUNKS - 1]
    fill(exchange, NUMEL - 3 * CHUNK - 2)
    assert sent(exchange) == [N_CHUNKS - 2, N_CHUNKS - 3]
    fill(exchange, 0)
    assert sent(exchange) == list(reversed(range(N_CHUNKS - 3)))


def test_whoever_has_all_of_it_sends_in_the_same_order(exchange: Exchange) -> None:
    """Windows that are full of other chunks than an owner's would wait for each other."""
    offer(exchange)
    fill(exchange, 0)
    exchange.begin(the_plan(OTHER), (ME, OTHER), {})
    assert sent(exchange) == list(reversed(range(N_CHUNKS)))
    exchange.begin(dataclasses.replace(the_plan(OTHER, SECOND), fill_s=0.0), (ME, OTHER), {})
    assert sent(exchange) == list(range(N_CHUNKS)), "as ever, where nothing fills"


def test_an_owner_closes_a_chunk_once_its_own_part_of_it_is_final(exchange: Exchange) -> None:
    offer(exchange)
    exchange.begin(the_plan(ME), (ME, OTHER), {})
    for chunk in (9, 8, 7):
        exchange.receive_contrib(OTHER, part(exchange, chunk, 3.0))
    assert not exchange.held
    fill(exchange, 8 * CHUNK)
    assert sorted(exchange.held) == [8, 9]
    fill(exchange, 0)
    assert sorted(exchange.held) == [7, 8, 9], "of the others no part came"
    mean = get_codec("fp32").decode(exchange.held[7].payload, CHUNK)
    assert torch.equal(mean, torch.full((CHUNK,), 2.0))


def test_a_filling_that_ends_early_is_told_and_the_rest_is_the_others(exchange: Exchange) -> None:
    filling, _ = offer(exchange)
    exchange.begin(the_plan(ME, owners="momomomomo"), (ME, OTHER), {})
    for chunk in range(0, N_CHUNKS, 2):
        exchange.receive_contrib(OTHER, part(exchange, chunk, 3.0))
    fill(exchange, 4 * CHUNK)
    assert sent(exchange) == [9, 7, 5] and list(exchange.held) == [8, 6, 4]
    fill(exchange, 2 * CHUNK + 1)
    filling.stop()
    assert OTHER.peer not in exchange.pending()
    exchange.filled()
    exchange.filled()
    out = list[msg.Bulk]()
    while (message := exchange.next_bulk(OTHER.peer)) is not None:
        out.append(message)
    ends = [m for m in out if isinstance(m, Contrib)]
    assert [(m.payload, m.weight, m.upto) for m in ends] == [(b"", 1.0, 0)], "once, and nothing of chunk 3"
    assert [m.header.chunk for m in out if isinstance(m, msg.Result)] == [2, 0]
    roster = the_plan(ME).entry.roster
    assert {c: r.header.included for c, r in exchange.held.items() if c >= 4} == dict.fromkeys((8, 6, 4), roster)
    for chunk in (0, 2):
        header = exchange.held[chunk].header
        assert header.included == (Part(OTHER, 1.0, 0),)
        assert [(x.voter, x.reason) for x in header.excluded] == [(ME, "late")]
        assert torch.equal(get_codec("fp32").decode(exchange.held[chunk].payload, CHUNK), torch.full((CHUNK,), 3.0))


def test_what_has_ended_is_told_to_the_owners_of_the_next_plan_too(exchange: Exchange) -> None:
    filling, _ = offer(exchange)
    fill(exchange, 5 * CHUNK)
    filling.stop()
    exchange.begin(the_plan(OTHER), (ME, OTHER), {})
    told = exchange.next_bulk(OTHER.peer)
    assert isinstance(told, Contrib) and told.payload == b""
    assert exchange.next_bulk(OTHER.peer) is None


def test_an_owner_that_hears_of_the_end_keeps_what_it_was_sent(exchange: Exchange) -> None:
    offer(exchange)
    fill(exchange, 0)
    exchange.begin(the_plan(ME), (ME, OTHER), {})
    exchange.receive_contrib(OTHER, part(exchange, 9, 3.0))
    exchange.receive_contrib(OTHER, Contrib("a", exchange.log.state.base("a"), 0, 1.0, 0))
    exchange.close_due()
    assert exchange.complete
    assert [len(r.header.included) for r in exchange.results()] == [1] * 9 + [2]


def test_whoever_expects_to_take_its_time_is_not_late_before_that(exchange: Exchange) -> None:
    offer(exchange)
    fill(exchange, 0)
    exchange.begin(the_plan(ME), (ME, OTHER), {})
    for now in range(int(OVERTIME * FILL_S)):
        at(exchange, float(now))
        exchange.close_due()
    assert not exchange.held and exchange.collector.fills_until == OVERTIME * FILL_S
    at(exchange, OVERTIME * FILL_S + SILENCE_S)
    exchange.close_due()
    assert {x.reason for r in exchange.held.values() for x in r.header.excluded} == {"late"}
    exchange.reset()
    assert not exchange.collector.fills_until


def test_an_owner_goes_on_without_its_own_part_if_that_never_comes(exchange: Exchange) -> None:
    """Its trainer hangs; its driver does not."""
    offer(exchange)
    exchange.begin(the_plan(ME), (ME, OTHER), {})
    for chunk in range(N_CHUNKS):
        exchange.receive_contrib(OTHER, part(exchange, chunk, 3.0))
    at(exchange, OVERTIME * FILL_S)
    exchange.close_due()
    assert not exchange.held
    at(exchange, OVERTIME * FILL_S + SILENCE_S)
    exchange.close_due()
    assert exchange.complete and {r.header.included for r in exchange.results()} == {(Part(OTHER, 1.0, 0),)}


def test_nothing_that_is_not_final_is_encoded(exchange: Exchange) -> None:
    """Whatever asks for it."""
    offer(exchange)
    fill(exchange, 1)
    with pytest.raises(RuntimeError, match="must not be sent"):
        exchange.offered["a"].contrib(Grid(NUMEL, CHUNK, "fp32"), 0)


def test_a_plan_that_would_wait_without_end_is_implausible(exchange: Exchange) -> None:
    for fill_s, good in ((0.0, True), (FILL_S_MAX, True), (FILL_S_MAX + 1, False), (-1.0, False), (math.nan, False)):
        assert plausible_plan(dataclasses.replace(the_plan(ME), fill_s=fill_s), exchange.log.state) is good


# ------------------------------------------------------------------ transcripts

N_STAGE_CHUNKS, STAGE_CHUNK = 6, 8
STAGE_NUMEL = N_STAGE_CHUNKS * STAGE_CHUNK
Steps = list[tuple[float, int]]


def fills(stage: Stage, process: Process, expected_s: float, steps: Steps, patience_s: float = 0.0) -> None:
    """From now on what it contributes becomes final in these (seconds after the offer, front).

    patience_s: of its offers; 0: the round waits for others as long as it pays.
    """
    contribute = process.node.contribute

    def filling(channel: str, x: Tensor, *args: Any, **options: Any) -> Any:
        filling, y = Filling(x.numel(), expected_s), torch.full_like(x, NOT_MADE)
        for delay_s, front in steps:
            stage.world.later(process, delay_s, process.trainer._fill, filling, x, y, front)
        return contribute(channel, y, *args, **{**options, "filling": filling, "patience_s": patience_s})

    process.node.contribute = filling  # type: ignore[method-assign]


def evenly(takes_s: float, chunks: int = N_STAGE_CHUNKS) -> Steps:
    """So many of the chunks, where all would take so long."""
    return [(takes_s * i / N_STAGE_CHUNKS, STAGE_NUMEL - i * STAGE_CHUNK) for i in range(1, chunks + 1)]


def stage_of(n: int) -> Stage:
    return Stage(n, n_chunks=N_STAGE_CHUNKS, chunk_elems=STAGE_CHUNK)


def a_plan_that_fills(stage: Stage) -> tuple[Process, Plan]:
    """The first to which all contribute as they were told to."""
    for _ in range(20):
        coordinator, planned = stage.planned()
        if planned.fill_s and len(planned.entry.roster) == len(stage.peers()):
            return coordinator, planned
        stage.committed(planned.entry.t, stage.peers(), 60.0)
    raise AssertionError("they are never in one round")


def test_a_backward_of_twice_the_expected_time_costs_nobody_a_chunk() -> None:
    """Nothing moves for longer than a silence may last, and than a coordinator waits before it plans anew."""
    stage = stage_of(3)
    for process in stage.peers():
        fills(stage, process, 6.0, [(12.0, STAGE_NUMEL // 2), (12.5, 0)], patience_s=20.0)
    _, planned = a_plan_that_fills(stage)
    assert planned.fill_s == 6.0
    reports = stage.committed(planned.entry.t, stage.peers(), 60.0)
    assert all(r.ballots == 1 and not r.missing and len(r.contributors) == 3 for r in reports.values())
    fetched = [m for at_s, _, _, m in stage.sent if isinstance(m, msg.Fetch)]
    assert not fetched, "what is not made yet is not missing"
    waited = [(r.waiting_s, r.seconds - r.waiting_s) for r in reports.values()]
    assert all(waiting_s > 11.9 and exchange_s < 4.0 for waiting_s, exchange_s in waited), waited


def test_chunks_flow_while_the_rest_is_made() -> None:
    stage = stage_of(3)
    for process in stage.peers():
        fills(stage, process, 4.0, evenly(4.0), patience_s=20.0)
    _, planned = a_plan_that_fills(stage)
    stage.sent.clear()
    stage.until(lambda: all(len(p.node.exchange.held) >= 4 for p in stage.peers()))
    fronts = [p.node.exchange.offered[TRAIN].filling for p in stage.peers()]
    assert all(filling is not None and filling.front > 0 for filling in fronts), "most of it is back by then"
    order = [
        m.chunk for _, source, _, m in stage.sent if isinstance(m, Contrib) and source == stage.peers()[0].host.name
    ]
    assert order == sorted(order, reverse=True) and len(order) > 1
    reports = stage.committed(planned.entry.t, stage.peers())
    assert all(r.waiting_s < 2.0 and r.seconds >= 4.0 for r in reports.values()), "bytes moved from the first chunk on"


def test_a_trainer_that_hangs_in_its_backward_is_late_for_what_it_did_not_make() -> None:
    stage = stage_of(3)
    hanging, *others = stage.peers()
    fills(stage, hanging, 1.0, [])
    for process in others:
        fills(stage, process, 1.0, evenly(1.0))
    _, planned = a_plan_that_fills(stage)
    began = stage.world.now
    reports = stage.committed(planned.entry.t, stage.peers(), 60.0)
    # As an owner it closes without itself first, and is heard by that.
    assert stage.world.now - began < OVERTIME * 1.0 + 2 * SILENCE_S + 0.5
    for report in reports.values():
        assert report.ballots == 1
        assert [(m.peer, m.reason, m.fraction) for m in report.missing] == [(hanging.host.name, "late", 1.0)]


def test_who_dies_in_its_backward_leaves_what_it_had_sent() -> None:
    """The checker finds that each mean is exactly that of those it names."""
    stage = stage_of(3)
    for process in stage.peers():
        fills(stage, process, 3.0, evenly(3.0), patience_s=20.0)
    coordinator, planned = a_plan_that_fills(stage)
    dying = stage.peers(coordinator)[0]
    stage.until(lambda: len(coordinator.node.exchange.held) >= 2)
    stage.world.crash(dying)
    reports = stage.committed(planned.entry.t, stage.peers(), 60.0)
    for report in reports.values():
        share = next(s.fraction for s in report.contributors if s.peer == dying.host.name)
        assert 0 < share < 1 and {m.reason for m in report.missing if m.peer == dying.host.name} == {"dead"}
    results = past_round(coordinator.node, planned.entry.t).results
    included = [dying.voter in {p.voter for p in r.header.included} for r in results]
    assert included == sorted(included), "it went from the last chunk to the first"


def test_a_coordinator_that_dies_while_they_fill_is_followed_by_one_that_knows() -> None:
    stage = stage_of(3)
    for process in stage.peers():
        fills(stage, process, 5.0, [(10.0, 0)], patience_s=20.0)
    coordinator, planned = a_plan_that_fills(stage)
    stage.until(lambda: all(p.node.slot.plan is not None for p in stage.world.running()))
    stage.world.crash(coordinator)
    reports = stage.committed(planned.entry.t, stage.peers(), 60.0)
    later = [m for _, _, _, m in stage.sent if isinstance(m, Plan) and m.head == planned.head]
    assert {m.fill_s for m in later} == {5.0} and len({m.ballot for m in later}) == 2
    for report in reports.values():
        assert {m.peer for m in report.missing} == {coordinator.host.name}


def test_who_offers_late_is_waited_for_as_long_as_its_whole_work_is_worth() -> None:
    """Half of it is done at the offer, so the least wait for it is half as long, too."""
    stage = stage_of(3)
    for process in stage.peers():
        fills(stage, process, 1.0, evenly(1.0))
    _, planned = a_plan_that_fills(stage)
    stage.committed(planned.entry.t, stage.peers())
    stage.between_rounds()
    late = stage.peers(next(p for p in stage.peers() if p.voter == p.node.log.state.rank0))[0]
    stage.hold = lambda source, target, m: source == late.host.name and isinstance(m, msg.Ready)
    stage.until(lambda: any(TRAIN in p.node.exchange.offered for p in stage.peers(late)))
    ready_at = stage.world.now
    _, planned = stage.planned()
    assert late.voter not in {part.voter for part in planned.entry.roster}
    assert stage.world.now - ready_at < 1.9 < stage.world.scenario.timeouts.straggler_floor_s
