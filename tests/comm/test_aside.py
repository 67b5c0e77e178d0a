"""What is done aside: nothing that a peer sends to itself leaves early."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dlc.comm import messages as msg
from dlc.comm import node as node_module
from dlc.comm.effects import Effect, Send
from tests.comm.stage import Stage


def test_the_vote_that_a_coordinator_repeats_to_itself_does_not_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the tick that ends T_commit, on the beat of its votes: the step is made aside, and what decides goes first."""
    monkeypatch.setattr(node_module, "AT_LENGTH_BYTES_MIN", 0)
    stage = Stage(3)
    coordinator, plan = stage.planned()
    early: list[Effect] = []

    def aside(work: Callable[[], None], effects: list[Effect]) -> None:
        early.extend(effects)
        work()

    coordinator.node.work_aside(aside)
    silent = stage.peers(coordinator)[0].host.name
    stage.hold = lambda s, t, m: silent in (s, t) and isinstance(m, msg.Held)

    def due() -> Any:
        since = coordinator.node.coordinator._quorum_since
        return since is not None and stage.world.now - since > 1.5

    stage.until(due)
    coordinator.node.slot._last_ready = coordinator.node.coordinator._quorum_since + 1.0
    stage.committed(plan.entry.t, [coordinator], limit_s=5.0)
    assert any(isinstance(e, Send) and isinstance(e.message, msg.Commit) for e in early)
    assert not [e for e in early if isinstance(e, Send) and e.to == coordinator.node.me.peer]


def test_the_last_vote_is_told_before_its_voter_makes_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others need not wait for that with theirs."""
    monkeypatch.setattr(node_module, "AT_LENGTH_BYTES_MIN", 0)
    stage = Stage(3)
    coordinator, plan = stage.planned()
    process = stage.peers(coordinator)[0]
    early: list[Effect] = []

    def aside(work: Callable[[], None], effects: list[Effect]) -> None:
        early.extend(effects)
        work()

    process.node.work_aside(aside)
    stage.hold = lambda source, target, m: target == process.host.name and isinstance(m, msg.Result | msg.Commit)
    stage.until(lambda: len(process.node.slot.votes) == 2)
    stage.held = [held for held in stage.held if isinstance(held[-1], msg.Result)]
    stage.hold = lambda source, target, m: False
    stage.release()
    stage.until(lambda: process.node.log.head != plan.head)
    told = {e.to for e in early if isinstance(e, Send) and isinstance(e.message, msg.Held)}
    assert told == {p.voter.peer for p in stage.peers(process)}
