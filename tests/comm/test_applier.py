"""What moves the head of a log, and what the application is told of its own contribution then."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from dlc.comm import messages as msg
from dlc.comm.effects import Notify
from dlc.comm.entries import Part
from dlc.comm.events import ContributionDropped, RoundDone
from dlc.comm.messages import Ready
from dlc.comm.offered import Offered
from dlc.errors import ProtocolError
from dlc.sim.schedule import TRAIN
from dlc.sim.toy import Means
from dlc.sim.world import Process
from tests.comm.stage import Stage

torch.set_num_threads(1)


def voted() -> tuple[Process, msg.Commit]:
    """It holds all of a round that it voted for, and its own contribution is in each mean; the COMMIT is on its way."""
    stage = Stage(3, inner_s=3.0)
    stage.hold = lambda source, target, message: isinstance(message, msg.Held | msg.Commit)
    coordinator, _ = stage.planned()
    process = stage.peers(coordinator)[0]
    stage.until(lambda: process.node.slot.accepted is not None)
    node = process.node
    assert node.slot.accepted is not None and node.exchange.complete
    process.node.ctx.out.clear()
    return process, msg.Commit(node.slot.accepted[1].entry, (coordinator.voter,))


@pytest.mark.parametrize("whole", [True, False])
def test_the_results_of_one_manifest_are_not_taken_for_those_of_another(whole: bool) -> None:
    """Another ballot may have decided on other means of the same roster: they are asked of who holds them."""
    process, commit = voted()
    node, (holder,) = process.node, commit.holders
    if not whole:
        node.exchange.held.popitem()
        node.exchange.last_gain = -1e9  # nor is it on its way
    assert node.exchange.complete is whole
    head, other = node.log.head, dataclasses.replace(commit.entry, manifest=bytes(32))
    node.applier.receive_commit(holder, msg.Commit(other, (holder,)))
    assert node.log.head == head and node.applier.sync.donor == holder
    node.applier.receive_commit(holder, commit)
    assert node.log.head == commit.entry.hash


def test_a_round_whose_means_are_of_others_than_its_roster_names_is_refused() -> None:
    process, commit = voted()
    node, (holder,) = process.node, commit.holders
    head, fewer = node.log.head, dataclasses.replace(commit.entry, roster=commit.entry.roster[1:])
    with pytest.raises(ProtocolError, match="its results do not fit"):
        node.applier.receive_commit(holder, msg.Commit(fewer, (holder,)))
    assert node.log.head == head


@pytest.mark.parametrize("current", [True, False])
def test_after_a_jump_of_the_head_a_contribution_to_an_older_base_is_dropped(current: bool) -> None:
    process, _ = voted()
    node = process.node
    offered, base = node.exchange.offered[TRAIN], node.log.state.base("calls")
    ready = dataclasses.replace(offered.ready, channel="calls", base=base if current else bytes(31) + b"1")
    node.exchange.offered["calls"] = Offered(ready, offered.vector, None, offered.since)
    node.applier.switched()
    dropped = [
        e.event.channel for e in node.ctx.out if isinstance(e, Notify) and isinstance(e.event, ContributionDropped)
    ]
    assert ("calls" in node.exchange.offered, dropped) == (current, [] if current else ["calls"])


def as_named(ready: Ready) -> Ready:
    return ready


def of_another_weight(ready: Ready) -> Ready:
    """It was made after the one that the plan names was taken back."""
    return dataclasses.replace(ready, weight=2 * ready.weight)


def of_another_grid(ready: Ready) -> Ready:
    return dataclasses.replace(ready, grid=dataclasses.replace(ready.grid, codec="bf16"))


@pytest.mark.parametrize(
    ("change", "counted", "fits", "older"),
    [
        (as_named, True, True, False),
        (of_another_weight, False, True, True),
        (of_another_grid, True, False, False),
    ],
)
def test_means_go_to_the_sink_of_the_contribution_that_they_are_of(
    change: Callable[[Ready], Ready], counted: bool, fits: bool, older: bool
) -> None:
    process, commit = voted()
    node, sink = process.node, Means()
    offered = node.exchange.offered[TRAIN]
    node.exchange.offered[TRAIN] = Offered(change(offered.ready), offered.vector, sink, offered.since)
    assert Part(node.me, offered.ready.weight, offered.ready.upto) in commit.entry.roster
    node.log.attached[TRAIN].synced = False  # means move the state of the channel, or go to the sink
    node.applier.receive_commit(commit.holders[0], commit)
    told = [effect.event for effect in node.ctx.out if isinstance(effect, Notify)]
    (done,) = [event for event in told if isinstance(event, RoundDone)]
    assert (done.counted, done.fits, done.older) == (counted, fits, older)
    good = fits and not older
    assert len(done.included) == (3 if fits else 0) and set(done.included) == ({good} if fits else set())
    assert sink.t == (commit.entry.t if good else 0)
    assert told == [done] and TRAIN not in node.exchange.offered, "its offer is over, and not dropped"


# ------------------------------------------------------------------ decided, and the last bytes are on their way


class Behind:
    """Four end a round, of whom one lacks the results: they are on their way. `kept`: what else does not arrive."""

    def __init__(self, *kept: type) -> None:
        self.stage = stage = Stage(4, inner_s=5.0)
        coordinator, self.plan = stage.planned()
        self.process, *_ = stage.peers(coordinator)
        self.node, self.others = self.process.node, stage.peers(self.process)
        self.kept = kept
        stage.hold = self._lacks
        stage.committed(self.plan.entry.t, self.others)
        assert self.node.log.head == self.plan.head

    def _lacks(self, source: str, target: str, message: object) -> bool:
        last = isinstance(message, msg.Result) and message.header.head == self.plan.head
        return target == self.process.host.name and (last or isinstance(message, self.kept))

    def comes(self) -> None:
        """What was kept, but for messages of the kinds that do not arrive."""
        self.stage.held = [held for held in self.stage.held if not isinstance(held[-1], self.kept)]
        self.stage.hold = lambda source, target, message: False
        self.stage.release()

    def asked(self) -> list[type]:
        """What it asked others for."""
        sent = ((source, m) for _, source, _, m in self.stage.sent)
        return [type(m) for source, m in sent if source == self.process.host.name and isinstance(m, ASKING)]


ASKING = (msg.SyncReq, msg.Fetch)


@pytest.mark.parametrize("kept", [(), (msg.Held,), (msg.Commit,)])
def test_who_lacks_what_is_on_its_way_waits_for_it_and_asks_for_nothing(kept: tuple[type, ...]) -> None:
    """The others have gone on without its vote; what they sent comes, and it applies the same round. That it is decided
    it knows by their votes, or by the COMMIT."""
    behind = Behind(*kept)
    stage, node = behind.stage, behind.node
    stage.until(node.applier.last_results_come)
    behind.comes()
    stage.committed(behind.plan.entry.t, stage.peers())
    assert not behind.asked()
    stage.all_in()


def test_what_never_comes_is_asked_for_after_a_while() -> None:
    """A connection may have taken it along."""
    behind = Behind()
    stage, node = behind.stage, behind.node
    stage.until(node.applier.last_results_come)
    assert not behind.asked()
    stage.held.clear()
    behind.comes()
    stage.committed(behind.plan.entry.t, stage.peers())
    assert msg.SyncReq in behind.asked()
    stage.all_in()
