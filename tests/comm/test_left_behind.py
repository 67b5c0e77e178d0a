"""What may happen to who is not waited for at the end of a round, and to those who did not wait for it.

Every stage runs under the simulator's checker: no schedule may give anybody another mean, or keep it from what follows.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dlc.comm import messages as msg
from dlc.comm import slot
from dlc.comm.entries import Entry
from dlc.sim.world import Process
from tests.comm.stage import Stage
from tests.comm.test_transcripts_cases import nothing

torch.set_num_threads(1)


class Scene:
    """A round of `n` is planned. No results of others reach those in `behind` until `lost`."""

    def __init__(self, n: int = 4, n_behind: int = 1, coordinates: bool = False) -> None:
        self.stage = stage = Stage(n, n_chunks=2 * n, inner_s=5.0)
        self.coordinator, self.plan = stage.planned()
        some = [self.coordinator] if coordinates else stage.peers(self.coordinator)
        self.behind = some[:n_behind]
        self.others = stage.peers(*self.behind)
        stage.hold = self._lacks

    def _lacks(self, source: str, target: str, m: object) -> bool:
        of_round = isinstance(m, msg.Result) and m.header.head == self.plan.head
        return of_round and target in {p.host.name for p in self.behind}

    def decided(self) -> None:
        """By those others that run."""
        self.stage.committed(self.plan.entry.t, self.others)
        assert all(p.node.log.head == self.plan.head for p in self.behind if p.running)

    def lost(self) -> None:
        self.stage.held.clear()
        self.stage.hold = nothing

    def ends_well(self) -> None:
        self.stage.committed(self.plan.entry.t, self.stage.peers())
        self.stage.all_in()


def owner_of(scene: Scene) -> Process:
    """One of the others that did not coordinate the round."""
    return next(p for p in scene.others if p is not scene.coordinator)


def an_owner_dies(scene: Scene) -> None:
    scene.stage.world.crash(owner_of(scene))


def all_but_one_die(scene: Scene) -> None:
    """The last has the results of all."""
    for process in scene.others[1:]:
        scene.stage.world.crash(process)


def it_sleeps(scene: Scene) -> None:
    """So long that it must look around first."""
    (process,) = scene.behind
    scene.stage.world.freeze(process, 8.0)


def it_is_started_again(scene: Scene) -> None:
    (process,) = scene.behind
    scene.stage.world.crash(process)
    scene.stage.world.start(process.host, tuple(p.host.address for p in scene.others))


@pytest.mark.parametrize("happens", [an_owner_dies, all_but_one_die, it_sleeps, it_is_started_again])
def test_who_lacks_the_end_of_a_round_gets_it_whatever_happens_then(happens: Callable[[Scene], None]) -> None:
    """The others decide, with its bytes in the kernel of one: none of them arrives."""
    scene = Scene()
    scene.decided()
    scene.lost()
    happens(scene)
    scene.stage.until(lambda: len({p.node.log.head for p in scene.stage.peers()}) == 1, 60.0)
    scene.stage.all_in(limit_s=120.0)


@pytest.mark.parametrize("lost", [True, False])
def test_who_coordinates_may_lack_the_end_itself(lost: bool) -> None:
    """The others see by each other's votes that it is decided; it does not begin another ballot by which any of them is
    held up, and tells the rest once it holds all."""
    scene = Scene(coordinates=True)
    scene.decided()
    if lost:
        scene.lost()
    else:
        scene.stage.hold = nothing
        scene.stage.release()
    scene.ends_well()


def test_a_coordinator_that_dies_between_the_votes_and_its_commit_is_followed_by_one_that_proposes_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All votes but one were for it. Nobody knows that it was decided; what was accepted is asked for."""
    monkeypatch.setattr(slot, "VOTES_TOLD_MAX", 0)
    scene = Scene()
    stage, coordinator = scene.stage, scene.coordinator
    committed: list[Entry] = []
    monkeypatch.setattr(coordinator.node.coordinator, "committed", lambda entry, holders: committed.append(entry))
    stage.until(lambda: committed)
    (entry,) = committed
    stage.world.crash(coordinator)
    scene.lost()
    scene.others.remove(coordinator)
    stage.until(lambda: all(p.node.log.head != scene.plan.head for p in stage.peers()))
    assert all(p.node.log.past[0].entry.hash == entry.hash for p in stage.peers()) or all(
        entry.hash in p.node.log.chain for p in stage.peers()
    )
    stage.all_in()


def test_of_two_that_lack_results_of_each_other_nobody_knows_whether_they_are_sent() -> None:
    """They are waited for a while: each owns chunks, and has not told for whom these wait."""
    scene = Scene(5, n_behind=2)
    owners = {scene.plan.owners[owner] for owner in scene.plan.assignment}
    assert owners.issuperset(p.voter for p in scene.behind)
    stage = scene.stage
    stage.until(lambda: len(scene.coordinator.node.coordinator.votes) == 3)
    began = stage.world.now
    scene.decided()
    assert stage.world.now - began >= stage.world.scenario.timeouts.commit_s
    scene.lost()
    scene.ends_well()


def test_what_waits_for_a_laggard_when_the_next_round_begins_is_dropped_and_had_by_catching_up() -> None:
    """Its link takes so little that the round is decided without it after T_commit. What it asks of the plan that is
    over is not answered; the entry is given to it with its results, once."""
    stage = Stage(4, n_chunks=8)
    coordinator, plan = stage.planned()
    laggard = stage.peers(coordinator)[0]
    others, peer, room = stage.peers(laggard), laggard.voter.peer, False

    def waiting(process: Process) -> set[int]:
        """Chunks of that round that wait there for the laggard."""
        results = process.node.exchange.outbox.results.get(peer, ())
        return {r.header.chunk for r in results if r.header.head == plan.head}

    for process in others:
        outbox = process.node.exchange.outbox

        def take(to: str, take: Callable[[str], msg.Bulk | None] = outbox.next) -> msg.Bulk | None:
            return take(to) if room or to != peer else None

        outbox.next = take  # type: ignore[method-assign]
    began = stage.world.now
    stage.committed(plan.entry.t, others)
    assert stage.world.now - began >= stage.world.scenario.timeouts.commit_s and all(map(waiting, others))
    stage.until(lambda: all((now := p.node.slot.plan) is not None and now.head != plan.head for p in others))
    assert laggard.node.log.head == plan.head and not any(map(waiting, others))
    room = True
    stage.committed(plan.entry.t, [laggard])
    came = [m for _, _, to, m in stage.sent if to == peer and isinstance(m, msg.Result)]
    got = [result.header.chunk for result in came if result.header.head == plan.head]
    assert len(got) == len(set(got)), "nothing came twice"
    stage.all_in()
