"""When a peer permits a forced ballot, where the simulator's schedules seldom lead."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from dlc.comm.ids import Voter
from dlc.comm.permit import permits
from dlc.comm.view import View
from tests.comm.stage import Stage

torch.set_num_threads(1)


def test_who_came_here_as_i_did_is_not_left_out_before_its_record_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry that leaves all without a vote: its electorate is gone, and the others' records still tell the head
    before it. Each that went on alone was a run of its own."""
    stage = Stage(3)
    process, fellow, _ = stage.peers()
    node, log, me = process.node, process.node.log, (process.voter,)
    head = bytes(range(32))
    log.state = dataclasses.replace(log.state, head=head, depth=log.state.depth + 1, electorate=(Voter("gone", 1),))

    def alone() -> bool:
        return permits(node.ctx, log, me, (), {}, False)

    monkeypatch.setattr(View, "gone", lambda view, voter: voter.peer == "gone")
    log.learned_run = -math.inf
    assert alone()
    log.learned_run = node.ctx.running_s
    assert not alone(), "they may have learned of it as well"
    log.learned_run = -math.inf
    log.fellows = (head, frozenset({process.voter, fellow.voter}))
    assert not alone(), "it decided it with me"
    log.fellows = (bytes(32), log.fellows[1])
    assert alone(), "that was another entry"
