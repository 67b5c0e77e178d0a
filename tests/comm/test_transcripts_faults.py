"""Who dies or freezes, and at which step of a round: every role at every step, as docs/protocol.md tables it.

The cast of four, in the rank order of the slot: the coordinator; an owner that contributes nothing; a contributor that
owns nothing; a witness that does both and is always spared. "All three" strikes the first three at once, so that the
witness is alone. The simulator checks every mean, vote, promise and ledger after every event.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from dlc.comm import messages as msg
from dlc.comm.coordinator import RUN, WAIT
from dlc.comm.entries import ROUND
from dlc.report import RoundReport
from dlc.sim.schedule import TRAIN
from dlc.sim.world import Process
from tests.comm.stage import Stage, past_round

torch.set_num_threads(1)

STEPS = ("before the plan", "reducing", "voting", "after COMMIT")
ROLES = ("owner", "coordinator", "contributor", "all three")
FAULTS = {"dies": 0.0, "freezes": 4.0, "freezes for long": 8.0}
"""Seconds: one freeze is longer than T_dead, the other longer than T_gap too."""
UPLINK_Bps = 10_000.0
"""A chunk each 25 ms: there is a middle of the reduction."""
QUORUM_S, ALONE_S = 8.0, 90.0
"""Limits for the round: with a quorum alive; and for a survivor that has to wait for T_evict, which its own health
widens, since nobody answers it."""
ASLEEP_S = max(FAULTS.values()) + 4.0
"""The same where the quorum sleeps."""


@dataclass
class Cast:
    stage: Stage
    coordinator: Process
    owner: Process
    contributor: Process
    witness: Process

    @property
    def head(self) -> bytes:
        return self.witness.node.log.head

    def struck_by(self, role: str) -> list[Process]:
        three = {"owner": self.owner, "coordinator": self.coordinator, "contributor": self.contributor}
        return list(three.values()) if role == "all three" else [three[role]]


def cast_of_four() -> Cast:
    stage = Stage(4, n_chunks=9, uplink_Bps=UPLINK_Bps)
    by_voter = {p.voter: p for p in stage.peers()}
    cast = Cast(stage, *(by_voter[v] for v in stage.peers()[0].node.log.state.ranked))
    for process in stage.peers():
        process.node.coordinator.agenda.silent([cast.contributor.voter])  # hence it owns no chunk
    stage.hold = lambda source, target, m: source == cast.owner.host.name and isinstance(m, msg.Ready)
    return cast


# ------------------------------------------------------------------ the steps


def go_to(step: str, cast: Cast) -> None:
    stage, head = cast.stage, cast.head
    leading = cast.coordinator.node.coordinator
    if step == "before the plan":
        stage.until(
            lambda: any(isinstance(m, msg.Ready) and s == cast.contributor.host.name for _, s, _, m in stage.sent)
        )
        stage.until(lambda: cast.witness.voter in leading.agenda._ready.get(TRAIN, {}))
        assert leading.phase == WAIT
        return
    if step == "after COMMIT":
        unheard = told_only_to(cast.owner, cast.coordinator)
        waiting = stage.hold
        stage.hold = lambda s, t, m: waiting(s, t, m) or unheard(s, t, m)
    stage.until(lambda: leading.phase == RUN)
    plan = leading.plan
    assert plan is not None and plan.entry.kind == ROUND
    assert {p.voter for p in plan.entry.roster} == {p.voter for p in stage.peers(cast.owner)}
    assert cast.contributor.voter not in plan.owners
    owned = [c for c, o in enumerate(plan.assignment) if plan.owners[o] == cast.owner.voter]
    if step == "reducing":
        stage.until(lambda: any(c in cast.owner.node.exchange.held for c in owned))
        assert not all(c in cast.owner.node.exchange.held for c in owned)
    elif step == "voting":
        stage.until(lambda: len(leading.votes) == 2)
    else:
        stage.until(lambda: cast.coordinator.node.log.head != head)
    standing = {p.node.log.head for p in stage.peers(cast.coordinator)}
    assert standing == {head}, "nobody else has heard of the commit yet"


def told_only_to(whom: Process, coordinator: Process) -> Any:
    """Nobody else gets the COMMIT, or learns by the others' votes what it would say."""

    def held(source: str, target: str, m: msg.Message) -> bool:
        if isinstance(m, msg.Held):
            return target != coordinator.host.name
        return isinstance(m, msg.Commit) and target != whom.host.name

    return held


def strike(cast: Cast, victims: list[Process], fault: str) -> None:
    """What is held back at this moment is lost."""
    stage = cast.stage
    for process in victims:
        if fault == "dies":
            stage.world.crash(process)
        else:
            stage.world.freeze(process, FAULTS[fault])
    stage.held.clear()
    stage.hold = lambda source, target, m: False


def accepted(processes: list[Process]) -> set[bytes]:
    decrees = [p.node.slot.accepted[1] for p in processes if p.node.slot.accepted is not None]
    return {decree.entry.hash for decree in decrees}


def held_by(processes: Iterable[Process]) -> set[bytes]:
    return {digest for p in processes for digest in p.node.exchange.hashes.values()}


def limit_s(role: str, fault: str) -> float:
    if role != "all three":
        return QUORUM_S
    return ALONE_S if fault == "dies" else ASLEEP_S


# ------------------------------------------------------------------ what must hold


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("step", STEPS)
def test_one_fault_at_one_step(step: str, role: str, fault: str) -> None:
    cast = cast_of_four()
    stage, t = cast.stage, cast.witness.node.log.state.round_of(TRAIN) + 1
    go_to(step, cast)
    victims = cast.struck_by(role)
    healthy = stage.peers(*victims)
    voted_for = accepted(healthy)
    committed = {p.node.log.head for p in stage.peers() if p.node.log.head != cast.head}
    candidates = held_by(p for p in healthy if p is not cast.contributor)
    strike(cast, victims, fault)

    reports = stage.committed(t, healthy, limit_s(role, fault))
    decided = {past_round(p.node, t).entry.hash for p in healthy}
    assert len(decided) == 1 and len({r.head for r in reports.values()}) == 1
    assert candidates <= set(past_round(cast.witness.node, t).hashes), "what the living hold is kept over the ballots"
    if role != "all three":
        assert decided >= committed and decided >= voted_for, "what was decided, or accepted, is decided again"
    elif fault == "dies":
        assert decided >= voted_for
    some_hold_all = step in ("voting", "after COMMIT") and (role != "all three" or fault != "dies" or bool(voted_for))
    for process in healthy:
        check_report(reports[process.host.name], cast, step, role, whole=some_hold_all)

    stage.all_in(healthy, limit_s(role, fault))
    if fault != "dies":
        everybody_is_back(cast)


def check_report(report: RoundReport, cast: Cast, step: str, role: str, whole: bool) -> None:
    """The witness is always wholly in, who was struck before the plan is not. `whole`: a voter holds all bytes."""
    shares = {s.peer: s.fraction for s in report.contributors}
    reasons = {m.peer: m.reason for m in report.missing}
    assert shares[cast.witness.host.name] == 1.0
    if step != "before the plan":
        assert cast.owner.host.name not in shares, "a roster is never enlarged"
        if role in ("owner", "coordinator"):
            assert shares[cast.contributor.host.name] == 1.0
    elif role == "contributor":
        assert cast.contributor.host.name not in shares
    if role == "contributor" and step == "reducing":
        assert shares.get(cast.contributor.host.name, 0.0) < 1.0
        assert reasons[cast.contributor.host.name] in ("dead", "late")
    if whole:
        assert set(shares.values()) == {1.0} and len(shares) == 3
        assert report.ballots == 1 or role in ("coordinator", "all three")


def everybody_is_back(cast: Cast) -> None:
    """The woken are counted again, on the one log."""
    stage = cast.stage
    stage.until(lambda: all(p.awake for p in stage.peers()))
    stage.all_in(limit_s=60.0)
    assert not stage.world.checker.history.forks
