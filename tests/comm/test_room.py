"""topk: a result is as long as its parts together, so a round has as many contributors as one message can carry."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from dlc.comm import grid as grid_module
from dlc.comm.entries import EMPTY, ROUND, Entry, LogState, Part
from dlc.comm.events import RoundDone
from dlc.comm.grid import RESULT_BYTES_MAX, RESULT_PARTS, Grid
from dlc.comm.ids import Voter
from dlc.comm.lanes import BULK_FRAME_BYTES_MAX
from dlc.comm.shapes import plausible_entry
from dlc.report import RoundReport
from dlc.sim.network import Weather
from dlc.sim.run import run
from dlc.sim.schedule import Scenario, Start
from dlc.sim.world import Process, World

torch.set_num_threads(1)

ONE = (Voter("p0", 1),)


@pytest.mark.parametrize("chunk_elems", [1 << 14, 1 << 18, 1 << 20])
def test_as_many_parts_as_a_grid_allows_fit_a_frame_and_one_more_does_not(chunk_elems: int) -> None:
    grid = Grid(3 * chunk_elems, chunk_elems, "topk")
    assert grid.parts_max >= RESULT_PARTS
    assert grid.result_bytes(0, grid.parts_max) <= RESULT_BYTES_MAX < grid.result_bytes(0, grid.parts_max + 1)
    assert RESULT_BYTES_MAX <= BULK_FRAME_BYTES_MAX
    assert Grid(3 * chunk_elems, chunk_elems, "fp16").parts_max > 10**9


def test_a_plan_with_a_longer_roster_is_none() -> None:
    grid = Grid(1 << 20, 1 << 20, "topk")
    state = LogState()
    for codec, extra, good in (("topk", 0, True), ("topk", 1, False), ("int4", 1, True)):
        roster = tuple(Part(Voter(f"p{i}", 1), 1.0, 0) for i in range(grid.parts_max + extra))
        entry = Entry(ROUND, EMPTY, 1, "x", 1, ONE, ONE, roster, grid.numel, grid.chunk_elems, codec, b"", b"", 0)
        assert plausible_entry(entry, state) is good


def test_where_not_all_have_room_in_a_round_they_take_turns_and_no_round_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = (Start(0.0, ()), *(Start(0.2 * i, (0,)) for i in range(1, 5)))
    plan = Scenario(0, starts, (), Weather(latency_max_s=0.05), inner_s=1.0, codec="topk")
    room = 2
    monkeypatch.setattr(grid_module, "RESULT_PARTS", 1)
    monkeypatch.setattr(grid_module, "RESULT_BYTES_MAX", room * Grid(8, plan.chunk_elems, "topk").result_bytes(0, 1))
    reports: dict[int, RoundReport] = {}
    notify = World._notify

    def noted(world: World, process: Process, event: object) -> None:
        if isinstance(event, RoundDone):
            reports[event.report.t] = event.report
        notify(world, process, event)

    monkeypatch.setattr(World, "_notify", noted)
    outcome = run(plan)
    assert not outcome.violation
    rosters = [{share.peer for share in reports[t].contributors} for t in sorted(reports)][-30:]
    counted = Counter(peer for roster in rosters for peer in roster)
    assert len(rosters) == 30 and max(map(len, rosters)) == room
    assert len(counted) == 5 and min(counted.values()) >= 10, "each has its turn"
    left_out = Counter(m.reason for t in sorted(reports)[-30:] for m in reports[t].missing)
    assert left_out["no room"] >= 60 and not left_out["late"] and not left_out["dead"]
    assert all("no room" not in {m.reason for m in r.missing} for r in reports.values() if len(r.contributors) < room)
